"""Rules of operators that work element by element; operands that were broadcast sum back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ascend_lab.graph import Value
from ascend_lab.ops.activations import GELU_CUBE, GELU_SCALE
from ascend_lab.train.rules import Grads, Site, rule


def number(site: Site, value: float, like: Value) -> Value:
    """Return a constant of one element that broadcasts with a tensor, in its format."""
    shape = (1,) * min(1, len(like.shape))
    return site.net.number(value, replace(like.type, shape=shape))


def where(site: Site, mask: Value, grad: Value) -> Value:
    """Return the gradient where the mask is not 0, else 0."""
    out: Value = site.net.select(mask, grad, number(site, 0.0, grad))
    return out


def unary(op: str, slope: Callable[[Site], Value], *, wide: bool = False) -> None:
    """Register the rule of an operator of one input from its gradient's expression."""
    rule(op, wide=wide)(lambda site: (slope(site),))


# -- one operand ----------------------------------------------------------------------------------
unary("neg", lambda s: s.net.muls(s.g, number=-1.0))
unary("adds", lambda s: s.g)
unary("muls", lambda s: s.net.scaled(s.g, s.attrs["number"]))
unary("relu", lambda s: where(s, s.y(), s.g))
unary("abs", lambda s: s.net.mul(s.g, s.net.sign(s.x())))
unary("exp", lambda s: s.net.mul(s.g, s.y()), wide=True)
unary("log", lambda s: s.net.div(s.g, s.x()), wide=True)
unary("sqrt", lambda s: s.net.div(s.net.muls(s.g, number=0.5), s.y()), wide=True)
unary(
    "rsqrt",
    lambda s: s.net.muls(s.net.mul(s.g, s.net.div(s.y(), s.x())), number=-0.5),
    wide=True,
)
unary("rec", lambda s: s.net.muls(s.net.mul(s.g, s.net.square(s.y())), number=-1.0), wide=True)
unary("square", lambda s: s.net.mul(s.net.muls(s.g, number=2.0), s.x()), wide=True)
unary("softplus", lambda s: s.net.mul(s.g, s.net.sigmoid(s.x())), wide=True)


def _one_minus(s: Site, value: Value) -> Value:
    out: Value = s.net.adds(s.net.muls(value, number=-1.0), number=1.0)
    return out


@rule("sigmoid", wide=True)
def _sigmoid(s: Site) -> Grads:
    return (s.net.mul(s.g, s.net.mul(s.y(), _one_minus(s, s.y()))),)


@rule("tanh", wide=True)
def _tanh(s: Site) -> Grads:
    return (s.net.mul(s.g, _one_minus(s, s.net.square(s.y()))),)


@rule("erf", wide=True)
def _erf(s: Site) -> Grads:
    bell = s.net.exp(s.net.muls(s.net.square(s.x()), number=-1.0))
    return (s.net.mul(s.net.muls(s.g, number=2.0 / math.sqrt(math.pi)), bell),)


@rule("gelu", wide=True)
def _gelu(s: Site) -> Grads:
    """Return g (p + x p (1 - p) u'), p = sigmoid(u), u = a (x + b x^3)."""
    net, x = s.net, s.x()
    square = net.square(x)
    inner = net.mul(x, net.adds(net.muls(square, number=GELU_SCALE * GELU_CUBE), number=GELU_SCALE))
    slope = net.adds(net.muls(square, number=3 * GELU_SCALE * GELU_CUBE), number=GELU_SCALE)
    return (net.mul(s.g, _swish_slope(s, x, net.sigmoid(inner), slope)),)


def _swish_slope(s: Site, x: Value, part: Value, slope: Value | None) -> Value:
    """Return p (1 + x (1 - p) u')."""
    rest = s.net.mul(x, _one_minus(s, part))
    rest = rest if slope is None else s.net.mul(rest, slope)
    out: Value = s.net.mul(part, s.net.adds(rest, number=1.0))
    return out


@rule("silu", wide=True)
def _silu(s: Site) -> Grads:
    return (s.net.mul(s.g, _swish_slope(s, s.x(), s.net.sigmoid(s.x()), None)),)


def _inside(s: Site, x: Value, low: float, high: float) -> Value:
    """Return 1 where low < x < high, else 0."""
    net = s.net
    out: Value = net.mul(net.greater(x, number(s, low, x)), net.less(x, number(s, high, x)))
    return out


unary("relu6", lambda s: where(s, _inside(s, s.y(), 0.0, 6.0), s.g))
unary("clip", lambda s: where(s, _inside(s, s.x(), s.attrs["low"], s.attrs["high"]), s.g))
unary(
    "hard_sigmoid",
    lambda s: where(s, _inside(s, s.y(), 0.0, 1.0), s.net.muls(s.g, number=1.0 / 6.0)),
)


@rule("hard_swish", wide=True)
def _hard_swish(s: Site) -> Grads:
    """Return g times 0 below -3, 1 above 3, x / 3 + 1/2 between."""
    net, x = s.net, s.x()
    between = net.adds(net.muls(x, number=1.0 / 3.0), number=0.5)
    slope = net.select(net.less(x, number(s, 3.0, x)), between, number(s, 1.0, x))
    return (net.mul(s.g, where(s, net.greater(x, number(s, -3.0, x)), slope)),)


@rule("leaky_relu")
def _leaky_relu(s: Site) -> Grads:
    above = s.net.greater(s.x(), number(s, 0.0, s.g))
    return (s.net.select(above, s.g, s.net.muls(s.g, number=s.attrs["alpha"])),)


@rule("elu", wide=True)
def _elu(s: Site) -> Grads:
    """Return g where x > 0, else g alpha e^x = g (y + alpha)."""
    above = s.net.greater(s.x(), number(s, 0.0, s.g))
    below = s.net.mul(s.g, s.net.adds(s.y(), number=s.attrs["alpha"]))
    return (s.net.select(above, s.g, below),)


@rule("ceil", "floor", "round", "sign")
def _flat(s: Site) -> Grads:
    return (None,)


@rule("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")
def _comparison(s: Site) -> Grads:
    return None, None


@rule("cast")
def _cast(s: Site) -> Grads:
    return (s.net.in_format(s.g, s.kind().dtype),)


# -- two operands ---------------------------------------------------------------------------------
def _back(s: Site, left: Value, right: Value) -> Grads:
    """Return the gradients of both operands in their shapes."""
    return s.net.summed_to(left, s.shape(0)), s.net.summed_to(right, s.shape(1))


@rule("add")
def _add(s: Site) -> Grads:
    return _back(s, s.g, s.g)


@rule("sub")
def _sub(s: Site) -> Grads:
    right = s.net.summed_to(s.g, s.shape(1))
    return s.net.summed_to(s.g, s.shape(0)), s.net.muls(right, number=-1.0)


@rule("mul")
def _mul(s: Site) -> Grads:
    return (
        s.net.summed_to(s.net.mul(s.g, s.x(1)), s.shape(0)) if s.wanted[0] else None,
        s.net.summed_to(s.net.mul(s.g, s.x(0)), s.shape(1)) if s.wanted[1] else None,
    )


@rule("div", wide=True)
def _div(s: Site) -> Grads:
    share = s.net.div(s.g, s.x(1))
    return _back(s, share, s.net.muls(s.net.mul(share, s.y()), number=-1.0))


@rule("max")
def _max(s: Site) -> Grads:
    left = s.net.greater(s.x(0), s.x(1))
    return _back(s, s.net.mul(s.g, left), s.net.mul(s.g, _one_minus(s, left)))


@rule("min")
def _min(s: Site) -> Grads:
    left = s.net.less(s.x(0), s.x(1))
    return _back(s, s.net.mul(s.g, left), s.net.mul(s.g, _one_minus(s, left)))


@rule("pow", wide=True)
def _pow(s: Site) -> Grads:
    """Return g y z / x and g z ln x."""
    net, z = s.net, s.net.mul(s.g, s.y())
    left = net.div(net.mul(z, s.x(1)), s.x(0)) if s.wanted[0] else s.g
    return _back(s, left, net.mul(z, net.log(s.x(0))) if s.wanted[1] else s.g)


@rule("select")
def _select(s: Site) -> Grads:
    net, mask, zero = s.net, s.x(0), number(s, 0.0, s.g)
    left, right = net.select(mask, s.g, zero), net.select(mask, zero, s.g)
    return None, net.summed_to(left, s.shape(1)), net.summed_to(right, s.shape(2))
