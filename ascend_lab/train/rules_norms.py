"""Rules of operators that look along an axis: softmax, norms, losses, and sums over axes."""

from __future__ import annotations

from dataclasses import replace

from ascend_lab.graph import Value
from ascend_lab.ops.shapes import Shape, axes_of, axis_of, elements
from ascend_lab.train.rules import Grads, Site, rule


# -- softmax --------------------------------------------------------------------------------------
def softmax_grad(s: Site, grad: Value, y: Value, axis: int) -> Value:
    """Return y (g - sum(g y)) along an axis."""
    net = s.net
    total = net.reduce_sum(net.mul(grad, y), axis=(axis,), keepdims=True)
    out: Value = net.mul(y, net.sub(grad, total))
    return out


@rule("softmax", wide=True)
def _softmax(s: Site) -> Grads:
    return (softmax_grad(s, s.g, s.y(), axis_of("axis", s.attrs["axis"], s.shape())),)


@rule("masked_softmax", wide=True)
def _masked_softmax(s: Site) -> Grads:
    slope = softmax_grad(s, s.g, s.y(), len(s.shape()) - 1)
    return slope, s.net.summed_to(slope, s.shape(1)) if s.wanted[1] else None


@rule("log_softmax", wide=True)
def _log_softmax(s: Site) -> Grads:
    """Return g - e^y sum(g)."""
    net, axis = s.net, axis_of("axis", s.attrs["axis"], s.shape())
    total = net.reduce_sum(s.g, axis=(axis,), keepdims=True)
    return (net.sub(s.g, net.mul(net.exp(s.y()), total)),)


@rule("cross_entropy", wide=True)
def _cross_entropy(s: Site) -> Grads:
    """Return g (softmax sum(target) - target) and -g log_softmax."""
    net, rows = s.net, s.shape()[0]
    grad, logits, target = net.shaped(s.g, (rows, 1)), s.x(0), s.x(1)
    total = net.reduce_sum(target, axis=(1,), keepdims=True)
    slope = net.sub(net.mul(net.softmax(logits, axis=1), total), target)
    right = None
    if s.wanted[1]:
        right = net.muls(net.mul(net.log_softmax(logits, axis=1), grad), number=-1.0)
    return net.mul(slope, grad), right


# -- layer norm and root-mean-square norm ---------------------------------------------------------
def _tail(s: Site) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes in front of the normalised ones, and those."""
    at, rank = axis_of("axis", s.attrs["axis"], s.shape()), len(s.shape())
    return tuple(range(at)), tuple(range(at, rank))


def _rate(s: Site, centred: Value, axes: tuple[int, ...]) -> Value:
    spread = s.net.reduce_mean(s.net.square(centred), axis=axes, keepdims=True)
    out: Value = s.net.rsqrt(s.net.adds(spread, number=s.attrs["epsilon"]))
    return out


def _over(s: Site, x: Value, axes: tuple[int, ...]) -> Value:
    """Return x summed over its leading axes."""
    out: Value = s.net.reduce_sum(x, axis=axes, keepdims=False) if axes else x
    return out


@rule("layer_norm", wide=True)
def _layer_norm(s: Site) -> Grads:
    """Return r (h - mean(h) - n mean(h n)), sum(g n), sum(g); h = g scale, n = normalised x."""
    net, (lead, axes) = s.net, _tail(s)
    centred = net.sub(s.x(), net.reduce_mean(s.x(), axis=axes, keepdims=True))
    rate = _rate(s, centred, axes)
    grad, normal = s.g, net.mul(centred, rate)
    dscale, dbias = _over(s, net.mul(grad, normal), lead), _over(s, grad, lead)
    scaled = net.mul(grad, s.x(1))
    share = net.reduce_mean(net.mul(scaled, normal), axis=axes, keepdims=True)
    mean = net.reduce_mean(scaled, axis=axes, keepdims=True)
    dx = net.mul(rate, net.sub(net.sub(scaled, mean), net.mul(normal, share)))
    return dx, dscale, dbias


@rule("rms_norm", wide=True)
def _rms_norm(s: Site) -> Grads:
    net, (lead, axes) = s.net, _tail(s)
    rate = _rate(s, s.x(), axes)
    normal = net.mul(s.x(), rate)
    dscale = _over(s, net.mul(s.g, normal), lead)
    scaled = net.mul(s.g, s.x(1))
    share = net.reduce_mean(net.mul(scaled, normal), axis=axes, keepdims=True)
    return net.mul(rate, net.sub(scaled, net.mul(normal, share))), dscale


# -- batch norm -----------------------------------------------------------------------------------
def _column(s: Site, channels: Value) -> Value:
    """Return one number per channel, shaped to broadcast over (n, c, ...)."""
    return s.net.shaped(channels, (1, s.shape()[1], *(1,) * (len(s.shape()) - 2)))


def _norm_gradients(s: Site, mean: Value, variance: Value) -> tuple[Value, Value, Value]:
    """Return the gradients of scale and bias, and 1 / sqrt(variance + epsilon), as columns."""
    net, narrow, epsilon = s.net, replace(s, wide=False), s.attrs["epsilon"]
    if len(s.shape()) == 4:  # first the sums, which have the column's layout converted for all
        given = narrow.g, narrow.x(), mean, variance
        dscale, dbias = net.bn_training_update_grad(*given, epsilon=epsilon)
        return dscale, dbias, net.rsqrt(net.adds(variance, number=epsilon))
    rate = net.rsqrt(net.adds(variance, number=epsilon))
    moment = net.channel_sums(net.mul(s.g, net.sub(s.x(), mean)))
    return net.mul(moment, rate), net.channel_sums(s.g), rate


@rule("batch_norm_training", wide=True)
def _batch_norm(s: Site) -> Grads:
    """Return a r (g - mean(g) - n mean(g n)), sum(g n), sum(g); a = scale, n = normalised x.

    With momentum 0 the operator's averages are the batch's own, so nothing is measured again.
    Numbers per channel keep all axes: they lie beside the image in any layout.
    """
    net, shape = s.net, s.shape()
    share, grad, mean = shape[1] / elements(shape), s.g, _column(s, s.y(1))
    dscale, total, rate = _norm_gradients(s, mean, _column(s, s.y(2)))
    # dx = (g - x b - c) a, one number per channel each: no other tensor of the image's size
    b = net.mul(net.muls(dscale, number=share), rate)
    c = net.sub(net.muls(total, number=share), net.mul(mean, b))
    centred = net.sub(net.sub(grad, net.mul(s.x(), b)), c)
    dx = net.mul(centred, net.mul(_column(s, s.x(1)), rate))
    return dx, net.shaped(dscale, (shape[1],)), net.shaped(total, (shape[1],)), None, None


@rule("batch_norm", wide=True)
def _fixed_batch_norm(s: Site) -> Grads:
    """Return the gradients where the statistics are given, as in fine-tuning with them frozen."""
    net, channels = s.net, (s.shape()[1],)
    dscale, dbias, rate = _norm_gradients(s, _column(s, s.x(3)), _column(s, s.x(4)))
    dx = net.mul(s.g, net.mul(_column(s, s.x(1)), rate))
    return dx, net.shaped(dscale, channels), net.shaped(dbias, channels), None, None


# -- sums over axes -------------------------------------------------------------------------------
def _restored(s: Site, value: Value) -> tuple[Value, Shape]:
    """Return a reduced tensor with its folded axes back as size 1, and the input's shape."""
    shape = s.shape()
    axes = axes_of("reduce", s.attrs["axis"], shape)
    kept = tuple(1 if i in axes else n for i, n in enumerate(shape))
    return s.net.shaped(value, kept), shape


@rule("reduce_sum")
def _reduce_sum(s: Site) -> Grads:
    return (s.net.stretched(*_restored(s, s.g)),)


@rule("reduce_mean")
def _reduce_mean(s: Site) -> Grads:
    grad, shape = _restored(s, s.g)
    return (s.net.stretched(s.net.scaled(grad, elements(grad.shape) / elements(shape)), shape),)


def shared(s: Site, grad: Value, y: Value, axes: tuple[int, ...]) -> Value:
    """Return the gradient shared equally by the elements that are the extreme one."""
    net = s.net
    hits = net.equal(s.x(), y)
    count = net.reduce_sum(hits, axis=axes, keepdims=True)
    out: Value = net.mul(hits, net.div(grad, count))
    return out


@rule("reduce_max", "reduce_min", wide=True)
def _reduce_extreme(s: Site) -> Grads:
    axes = axes_of("reduce", s.attrs["axis"], s.shape())
    return (shared(s, _restored(s, s.g)[0], _restored(s, s.y())[0], axes),)


@rule("global_max_pool", wide=True)
def _global_max_pool(s: Site) -> Grads:
    return (shared(s, s.g, s.y(), (2, 3)),)


@rule("global_avg_pool")
def _global_avg_pool(s: Site) -> Grads:
    shape = s.shape()
    return (s.net.stretched(s.net.scaled(s.g, 1.0 / (shape[2] * shape[3])), shape),)
