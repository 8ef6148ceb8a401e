"""What a random network may do next: nodes and blocks of nodes as real exporters write them.

Each step takes the network and the tensor to go on from, and returns the tensors that may be read
next. A step raises `UnfitError` where it does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from network_builder import FLOATS, Grower, Network, UnfitError
from onnx import TensorProto, numpy_helper

Made = str | Sequence[str]
Taking = Callable[[Grower, str], Made]
STEPS: list[tuple[float, Taking, Callable[[Grower, str], bool]]] = []
"""Weight, step, and whether it takes a tensor."""


def step(weight: float, *ranks: int, kind: str = "float") -> Callable[[Taking], Taking]:
    """Register a step for tensors of some ranks (none: all) and kind: float, int, bool or any."""

    def takes(net: Grower, x: str) -> bool:
        array = net.values[x]
        kinds = {"f": "float", "i": "int", "b": "bool"}
        fits = kind in ("any", kinds.get(array.dtype.kind))
        return fits and (not ranks or array.ndim in ranks)

    def register(function: Taking) -> Taking:
        STEPS.append((weight, function, takes))
        return function

    return register


def dtype(net: Grower, x: str) -> Any:
    return net.values[x].dtype


def rank(net: Grower, x: str) -> int:
    return net.values[x].ndim


def any_axis(net: Grower, x: str) -> int:
    """Return an axis, counted from either end."""
    ndim = rank(net, x)
    if not ndim:
        raise UnfitError("no axes")
    return net.whole(-ndim, ndim - 1)


def number(net: Grower, x: str, value: float) -> str:
    """Return a constant number of x's type, as a scalar or with one axis."""
    return net.constant(np.full(net.pick(((), (1,))), value, dtype(net, x)))


# -- forms that changed between opsets -------------------------------------------------------------
def with_axes(net: Grower, op: str, x: str, axes: Sequence[int], since: int, **attrs: Any) -> str:
    """Add a node whose axes are an input since some opset, and an attribute before."""
    if net.opset >= since:
        return net.add(op, x, net.ints(*axes), **attrs)
    return net.add(op, x, axes=list(axes), **attrs)


def squeezed(net: Grower, x: str, axes: Sequence[int]) -> str:
    return with_axes(net, "Squeeze", x, axes, 13)


def unsqueezed(net: Grower, x: str, axes: Sequence[int]) -> str:
    return with_axes(net, "Unsqueeze", x, axes, 13)


def reduced(net: Grower, op: str, x: str, axes: Sequence[int], keep: int) -> str:
    since = 13 if op == "ReduceSum" else 18
    return with_axes(net, op, x, axes, since, keepdims=keep)


def clipped(net: Grower, x: str, low: float, high: float) -> str:
    if net.opset < 11:
        return net.add("Clip", x, min=low, max=high)
    ends = [net.constant(np.array(end, dtype(net, x))) for end in (low, high)]
    way = net.pick(("both", "low", "high"))
    if way == "low":
        return net.add("Clip", x, ends[0])
    return net.add("Clip", x, "" if way == "high" else ends[0], ends[1])


def parts(net: Grower, x: str, sizes: Sequence[int], axis: int) -> list[str]:
    if net.opset >= 13:
        made = net.add("Split", x, net.ints(*sizes), outputs=len(sizes), axis=axis)
    else:
        made = net.add("Split", x, outputs=len(sizes), axis=axis, split=list(sizes))
    return [made] if isinstance(made, str) else made


def span(net: Grower, x: str, axis: int, low: int, high: int, by: int = 1) -> str:
    if net.opset >= 10:
        reads = [net.ints(low), net.ints(high), net.ints(axis)]
        return net.add("Slice", x, *reads, *([net.ints(by)] if by != 1 else []))
    return net.add("Slice", x, axes=[axis], starts=[low], ends=[high])


# -- activations -----------------------------------------------------------------------------------
def silu(net: Grower, x: str) -> str:
    return net.add("Mul", x, net.add("Sigmoid", x))


def mish(net: Grower, x: str) -> str:
    return net.add("Mul", x, net.add("Tanh", net.add("Softplus", x)))


def gelu(net: Grower, x: str) -> str:
    half = net.add("Div", x, number(net, x, math.sqrt(2)))
    whole = net.add("Add", net.add("Erf", half), number(net, x, 1.0))
    return net.add("Mul", net.add("Mul", x, whole), number(net, x, 0.5))


def hard_swish(net: Grower, x: str) -> str:
    if net.opset >= 14 and net.chance(0.5):
        return net.add("HardSwish", x)
    inner = clipped_both(net, net.add("Add", x, number(net, x, 3.0)), 0.0, 6.0)
    return net.add("Div", net.add("Mul", x, inner), number(net, x, 6.0))


def prelu(net: Grower, x: str) -> str:
    shape = net.shape(x)
    channels = (shape[1], *(1,) * (len(shape) - 2)) if len(shape) > 1 else (1,)
    slope = net.pick(((1,), channels))
    return net.add("PRelu", x, net.constant(net.like(dtype(net, x), slope, 0.3)))


def sloped(net: Grower, x: str) -> str:
    return net.add(net.pick(("LeakyRelu", "Elu")), x, alpha=net.pick((0.01, 0.2, 1.0)))


def hard_sigmoid(net: Grower, x: str) -> str:
    return net.add("HardSigmoid", x, alpha=net.pick((1 / 6, 0.2)), beta=0.5)


def celu_or_threshold(net: Grower, x: str) -> str:
    if net.opset < 12:
        raise UnfitError("no Celu yet")
    if net.chance(0.5):
        return net.add("Celu", x, alpha=0.7)
    return net.add("ThresholdedRelu", x, alpha=between(net, x))


def relu6(net: Grower, x: str) -> str:
    return clipped_both(net, x, 0.0, 6.0)


def clip(net: Grower, x: str) -> str:
    return clipped(net, x, -1.5, 2.0)


PLAIN = ("Relu", "Relu", "Sigmoid", "Tanh", "Softplus", "Softsign", "Abs", "Neg", "Erf", "Selu",
         "Identity")  # fmt: skip
BLOCKS = (silu, mish, gelu, hard_swish, prelu, sloped, hard_sigmoid, celu_or_threshold, relu6, clip)


def activated(net: Grower, x: str) -> str:
    """Return an activation of x: one node, or the nodes that exporters write for one."""
    chosen = net.pick((*PLAIN, *BLOCKS))
    return net.add(chosen, x) if isinstance(chosen, str) else chosen(net, x)


def clipped_both(net: Grower, x: str, low: float, high: float) -> str:
    if net.opset < 11:
        return net.add("Clip", x, min=low, max=high)
    ends = [net.constant(np.array(end, dtype(net, x))) for end in (low, high)]
    return net.add("Clip", x, *ends)


@step(3)
def activation(net: Grower, x: str) -> Made:
    return activated(net, x)


@step(1)
def lane(net: Grower, x: str) -> Made:
    """Add an elementwise function that activations do not have."""
    op = net.pick(("Exp", "Exp", "Log", "Sqrt", "Reciprocal", "Floor", "Ceil", "Round", "Sign",
                   "Pow", "Pow", "Sin" if net.chance(0.3) else "Sqrt"))  # fmt: skip
    if op == "Exp":
        return net.add("Exp", clipped_both(net, x, -4.0, 2.0))
    if op in ("Log", "Sqrt", "Reciprocal"):
        positive = net.add("Add", net.add("Abs", x), number(net, x, 0.5))
        return net.add(op, positive)
    if op == "Pow":
        power = net.pick((2.0, 3.0, 0.5, 1.5, -1.0))
        base = x if power in (2.0, 3.0) else net.add("Add", net.add("Abs", x), number(net, x, 0.5))
        return net.add("Pow", base, number(net, x, power))
    return net.add(op, x)


# -- images and signals ----------------------------------------------------------------------------
def window(net: Grower, x: str, *, dilated: bool = True, padded: bool = True) -> dict[str, Any]:
    """Return attributes of a sliding window that fits."""
    sizes = net.shape(x)[2:]
    kernel = [net.pick((1, 2, 3, 3, 5)) for _ in sizes]
    attrs: dict[str, Any] = {"kernel_shape": kernel}
    if net.chance(0.6):
        attrs["strides"] = [net.pick((1, 2, 2, 3)) for _ in sizes]
    if dilated and net.chance(0.25):
        attrs["dilations"] = [net.pick((1, 2)) for _ in sizes]
    gaps = attrs.get("dilations", [1] * len(sizes))
    spread = [(k - 1) * gap + 1 for k, gap in zip(kernel, gaps, strict=True)]
    way = net.pick(("none", "pads", "pads", "auto"))
    if way == "auto":
        # Both witnesses move windows of SAME whose stride is beyond the kernel: nobody to ask.
        steps = attrs.get("strides", [1] * len(sizes))
        apart = any(step > k for step, k in zip(steps, kernel, strict=True))
        ways = ("VALID",) * 3 if apart else ("SAME_UPPER", "SAME_LOWER", "VALID")
        attrs["auto_pad"] = net.pick(ways)
    elif way == "pads" and padded:
        most = [k // 2 for k in kernel]
        low = [net.whole(0, m) for m in most]
        high = low if net.chance(0.6) else [net.whole(0, m) for m in most]
        attrs["pads"] = [*low, *high]
    if "auto_pad" not in attrs or attrs["auto_pad"] == "VALID":
        pads = attrs.get("pads", [0] * 2 * len(sizes))
        total = [n + a + b for n, a, b in zip(sizes, pads, pads[len(sizes) :], strict=False)]
        if any(t < s for t, s in zip(total, spread, strict=True)):
            raise UnfitError("a window larger than the image")
    return attrs


@step(6, 3, 4)
def convolution(net: Grower, x: str) -> Made:
    attrs = window(net, x)
    channels = net.shape(x)[1]
    divisors = [g for g in (2, 3, 4, 8, channels) if channels % g == 0]
    groups = net.pick(divisors) if net.chance(0.35) else 1
    out = net.pick((1, 2, 5, 16)) * groups if groups < channels else channels * net.pick((1, 1, 2))
    if out > 64:
        out = groups
    if groups > 1 or net.chance(0.3):
        attrs["group"] = groups
    kernel = attrs["kernel_shape"]
    if net.chance(0.2):
        del attrs["kernel_shape"]
    fan_in = channels // groups * math.prod(kernel)
    reads = [net.weight((out, channels // groups, *kernel), dtype(net, x), fan_in)]
    if net.chance(0.6):
        reads.append(net.weight((out,), dtype(net, x)))
    y = net.add("Conv", x, *reads, **attrs)
    if net.chance(0.4):
        y = normed(net, y)
    return activated(net, y) if net.chance(0.5) else y


@step(2, 3, 4)
def transposed_convolution(net: Grower, x: str) -> Made:
    sizes = net.shape(x)[2:]
    channels = net.shape(x)[1]
    kernel = [net.pick((1, 2, 3, 4)) for _ in sizes]
    attrs: dict[str, Any] = {"kernel_shape": kernel}
    strides = [net.pick((1, 2, 3)) for _ in sizes]
    if net.chance(0.7):
        attrs["strides"] = strides
    else:
        strides = [1 for _ in sizes]
    way = net.pick(("none", "pads", "pads", "extra", "auto"))
    if way in ("pads", "extra"):
        attrs["pads"] = [net.whole(0, (k - 1) // 2) for k in kernel] * 2
    if way == "extra":
        attrs["output_padding"] = [net.whole(0, s - 1) for s in strides]
    if way == "auto":
        attrs["auto_pad"] = net.pick(("SAME_UPPER", "SAME_LOWER", "VALID"))
    if net.chance(0.15):
        attrs["dilations"] = [net.pick((1, 2)) for _ in sizes]
    groups = 2 if channels % 2 == 0 and net.chance(0.3) else 1
    if groups > 1:
        attrs["group"] = groups
    out = net.pick((1, 3, 8))
    fan_in = channels // groups * math.prod(kernel)
    reads = [net.weight((channels, out, *kernel), dtype(net, x), fan_in)]
    if net.chance(0.5):
        reads.append(net.weight((out * groups,), dtype(net, x)))
    return net.add("ConvTranspose", x, *reads, **attrs)


@step(2.5, 3, 4)
def pooling(net: Grower, x: str) -> Made:
    op = net.pick(("MaxPool", "MaxPool", "AveragePool", "AveragePool", "LpPool"))
    attrs = window(net, x, dilated=False)
    if op == "MaxPool" and net.opset >= 10 and net.chance(0.2):
        attrs["dilations"] = [net.pick((1, 2)) for _ in attrs["kernel_shape"]]
    if net.opset >= 10 and op != "LpPool" and "auto_pad" not in attrs and net.chance(0.4):
        attrs["ceil_mode"] = 1
    if op == "AveragePool" and net.chance(0.4):
        attrs["count_include_pad"] = 1
    if op == "LpPool":
        attrs["p"] = net.pick((1, 2))
    return net.add(op, x, **attrs)


@step(1.2, 3, 4)
def global_pool(net: Grower, x: str) -> Made:
    y = net.add(net.pick(("GlobalAveragePool", "GlobalAveragePool", "GlobalMaxPool")), x)
    way = net.pick(("stay", "flatten", "squeeze", "scale"))
    if way == "flatten":
        return net.add("Flatten", y, axis=1)
    if way == "squeeze":
        return squeezed(net, y, range(2, rank(net, y)))
    if way == "scale":
        return net.add("Mul", x, activated(net, y))
    return y


def normed(net: Grower, x: str) -> str:
    """Return x behind a batch norm in inference."""
    c = net.shape(x)[1]
    made = net.rng.uniform(0.5, 1.5, c), net.rng.normal(0, 0.5, c)
    made = *made, net.rng.normal(0, 0.5, c), net.rng.uniform(0.3, 2.0, c)
    reads = [net.constant(array.astype(dtype(net, x))) for array in made]
    attrs = {"epsilon": net.pick((1e-5, 1e-3))} if net.chance(0.7) else {}
    return net.add("BatchNormalization", x, *reads, **attrs)


@step(1.5, 2, 3, 4)
def batch_norm(net: Grower, x: str) -> Made:
    return normed(net, x)


@step(1, 3, 4)
def instance_or_group_norm(net: Grower, x: str) -> Made:
    """Add an instance norm, or a group norm as PyTorch exports it: reshape, instance norm, back."""
    shape = net.shape(x)
    if math.prod(shape[2:]) < 2:
        raise UnfitError("a plane of one number")
    groups = net.pick([g for g in (1, 2, 4, shape[1]) if shape[1] % g == 0])
    y = net.add("Reshape", x, net.ints(0, groups, -1))
    reads = (net.constant(np.ones(groups, dtype(net, x))),
             net.constant(np.zeros(groups, dtype(net, x))))  # fmt: skip
    y = net.add("InstanceNormalization", y, *reads, epsilon=1e-3)
    y = net.add("Reshape", y, net.add("Shape", x))
    ones = (shape[1], *(1,) * (len(shape) - 2))
    y = net.add("Mul", y, net.constant(net.like(dtype(net, x), ones)))
    return net.add("Add", y, net.constant(net.like(dtype(net, x), ones)))


@step(1.6, 4)
def squeeze_and_excite(net: Grower, x: str) -> Made:
    """Scale channels by what their means say, with anything behind it."""
    shape = net.shape(x)
    middle = net.pick((1, 4, 8))
    y = x
    if net.chance(0.5):
        y = net.add("Conv", x, net.weight((shape[1], shape[1], 1, 1), dtype(net, x), shape[1]))
    if net.chance(0.6):
        means = net.add("GlobalAveragePool", y)
    else:
        means = reduced(net, "ReduceMean", y, (2, 3), 1)
    sizes = ((middle, shape[1], 1, 1), (shape[1], middle, 1, 1))
    biased = net.chance(0.7)
    for i, size in enumerate(sizes):
        reads = [net.weight(size, dtype(net, x), size[1])]
        reads += [net.weight(size[:1], dtype(net, x))] if biased else []
        means = net.add("Conv", means, *reads)
        means = activated(net, means) if i == 0 else net.add(net.pick(("Sigmoid", "Tanh")), means)
    y = net.add("Mul", *((y, means) if net.chance(0.5) else (means, y)))
    way = net.pick(("alone", "activation", "residual", "convolution", "pool"))
    if way == "activation":
        return activated(net, y)
    if way == "residual":
        return net.add("Add", y, x)
    if way == "convolution":
        y = net.add("Conv", y, net.weight((5, shape[1], 1, 1), dtype(net, x), shape[1]))
        return activated(net, y) if net.chance(0.5) else y
    return net.add("GlobalAveragePool", y) if way == "pool" else y


@step(1.5, 4)
def inverted_residual(net: Grower, x: str) -> Made:
    """Add a pointwise, a depthwise and a pointwise convolution around a sum."""
    kind = dtype(net, x)
    c = net.shape(x)[1]
    wide = c * net.pick((1, 2))
    y = net.add("Conv", x, net.weight((wide, c, 1, 1), kind, c))
    y = activated(net, normed(net, y) if net.chance(0.6) else y)
    size = net.pick((3, 5))
    attrs = {"group": wide, "pads": [size // 2] * 4}
    y = activated(net, net.add("Conv", y, net.weight((wide, 1, size, size), kind, 9), **attrs))
    y = net.add("Conv", y, net.weight((c, wide, 1, 1), kind, wide), net.weight((c,), kind))
    return net.add("Add", x, y)


@step(1, 4)
def branches(net: Grower, x: str) -> Made:
    """Join convolutions of the same image, as Inception does, or shuffle their channels."""
    kind = dtype(net, x)
    c = net.shape(x)[1]
    made = []
    for _ in range(net.whole(2, 3)):
        size = net.pick((1, 3))
        weight = net.weight((net.pick((2, 8, 16)), c, size, size), kind, c * size)
        y = net.add("Conv", x, weight, pads=[size // 2] * 4)
        made.append(activated(net, y) if net.chance(0.6) else y)
    y = net.add("Concat", *made, axis=1)
    total = net.shape(y)[1]
    if total % 2 == 0 and net.chance(0.5):
        n, _, h, w = net.shape(y)
        y = net.add("Reshape", y, net.ints(n, 2, total // 2, h, w))
        y = net.add("Transpose", y, perm=[0, 2, 1, 3, 4])
        y = net.add("Reshape", y, net.ints(n, -1, h, w))
    return y


@step(1.2, 4)
def resized(net: Grower, x: str) -> Made:
    """Add Upsample 9, Resize 10, or a newer Resize by scales or sizes."""
    scales = [1.0, 1.0, *(net.pick((0.5, 1.0, 1.5, 2.0, 2.0, 3.0)) for _ in range(2))]
    if net.opset == 9:
        up = [max(1.0, s) for s in scales]
        stored = net.constant(np.array(up, np.float32))
        return net.add("Upsample", x, stored, mode=net.pick(("nearest", "linear")))
    if net.opset == 10:
        stored = net.constant(np.array(scales, np.float32))
        return net.add("Resize", x, stored, mode=net.pick(("nearest", "linear")))
    mode = net.pick(("nearest", "linear", "cubic"))
    attrs: dict[str, Any] = {"mode": mode}
    forms = ("half_pixel", "asymmetric", "pytorch_half_pixel", "align_corners")
    attrs["coordinate_transformation_mode"] = net.pick(forms)
    if mode == "nearest":
        attrs["nearest_mode"] = net.pick(("floor", "round_prefer_floor", "ceil"))
    roi = "" if net.opset >= 13 else net.constant(np.zeros(0, np.float32))
    if net.chance(0.5):
        return net.add("Resize", x, roi, net.constant(np.array(scales, np.float32)), **attrs)
    shape = net.shape(x)
    sizes = [*shape[:2], *(net.pick((1, s, s + 1, 2 * s)) for s in shape[2:])]
    empty = "" if net.opset >= 13 else net.constant(np.zeros(0, np.float32))
    return net.add("Resize", x, roi, empty, net.ints(*sizes), **attrs)


@step(0.7, 4)
def depth_and_space(net: Grower, x: str) -> Made:
    if net.chance(0.5):
        return net.add("SpaceToDepth", x, blocksize=2)
    attrs = {"mode": net.pick(("DCR", "CRD"))} if net.opset >= 11 else {}
    return net.add("DepthToSpace", x, blocksize=2, **attrs)


@step(0.7, 4)
def in_nhwc(net: Grower, x: str) -> Made:
    """Turn to NHWC, compute there, and turn back, as models from TensorFlow do."""
    y = net.add("Transpose", x, perm=[0, 2, 3, 1])
    y = net.add("Add", y, net.constant(net.like(dtype(net, x), net.shape(y)[-1:])))
    y = activated(net, y)
    return net.add("Transpose", y, perm=[0, 3, 1, 2])


@step(0.5, 3, 4)
def local_response(net: Grower, x: str) -> Made:
    return net.add("LRN", x, size=net.pick((1, 3, 5)), alpha=0.1, beta=0.75, bias=1.0)


# -- sequences -------------------------------------------------------------------------------------
@step(2.5, 2, 3)
def layer_norm(net: Grower, x: str) -> Made:
    """Add a layer norm: one node since opset 17, or the nodes exporters write for one."""
    kind = dtype(net, x)
    width = net.shape(x)[-1]
    if width < 4:
        raise UnfitError("rows too short")
    scale = net.constant(net.rng.uniform(0.5, 1.5, width).astype(kind))
    bias = net.constant(net.like(kind, (width,), 0.5))
    if net.opset >= 17 and net.chance(0.6):
        reads = (scale, bias) if net.chance(0.7) else (scale,)
        return net.add("LayerNormalization", x, *reads, axis=-1, epsilon=1e-3)
    centred = net.add("Sub", x, reduced(net, "ReduceMean", x, (-1,), 1))
    if net.chance(0.5):
        square = net.add("Pow", centred, number(net, x, 2.0))
    else:
        square = net.add("Mul", centred, centred)
    variance = net.add("Add", reduced(net, "ReduceMean", square, (-1,), 1), number(net, x, 1e-3))
    y = net.add("Div", centred, net.add("Sqrt", variance))
    return net.add("Add", net.add("Mul", y, scale), bias)


@step(2, 3)
def attention(net: Grower, x: str) -> Made:
    """Add self-attention with heads, a scale, and sometimes a mask, as exporters write it."""
    kind = dtype(net, x)
    n, t, width = net.shape(x)
    heads = net.pick((1, 2))
    each = net.pick((4, 8, 16))
    inner = heads * each
    heads_first = []
    for _ in range(3):
        y = net.add("MatMul", x, net.weight((width, inner), kind, width))
        if net.chance(0.5):
            y = net.add("Add", net.weight((inner,), kind), y)
        y = net.add("Reshape", y, net.ints(net.pick((0, n)), net.pick((t, -1)), heads, each))
        heads_first.append(net.add("Transpose", y, perm=[0, 2, 1, 3]))
    q, k, v = heads_first
    k = net.add("Transpose", k, perm=[0, 1, 3, 2])
    if net.chance(0.5):
        scores = net.add("Div", net.add("MatMul", q, k), number(net, x, math.sqrt(each)))
    else:
        scores = net.add("MatMul", net.add("Mul", q, number(net, x, each**-0.5)), k)
    way = net.pick(("none", "causal", "padding", "where", "input"))
    if way == "causal":
        mask = np.triu(np.full((t, t), -1e4), 1)[None, None]
        scores = net.add("Add", scores, net.constant(mask.astype(kind)))
    elif way == "padding":
        mask = np.where(net.rng.random((n, 1, 1, t)) < 0.3, -1e4, 0.0)
        scores = net.add("Add", scores, net.constant(mask.astype(kind)))
    elif way == "where":
        mask = np.tril(np.ones((1, 1, t, t), bool))
        scores = net.add("Where", net.constant(mask), scores, number(net, x, -1e4))
    elif way == "input":
        keep = net.rng.random((n, 1, 1, t)) < 0.7
        keep[..., 0] = True
        given = net.input(keep.astype(np.float32))
        taken = net.add("Cast", given, to=_number(kind))
        away = net.add("Sub", number(net, x, 1.0), taken)
        scores = net.add("Add", scores, net.add("Mul", away, number(net, x, -1e4)))
    y = net.add("MatMul", net.add("Softmax", scores, axis=-1 if net.opset >= 11 else 3), v)
    y = net.add("Reshape", net.add("Transpose", y, perm=[0, 2, 1, 3]), net.ints(n, -1, inner))
    y = net.add("MatMul", y, net.weight((inner, width), kind, inner))
    return net.add("Add", x, y) if net.chance(0.7) else y


@step(1, 2, 3)
def feed_forward(net: Grower, x: str) -> Made:
    kind = dtype(net, x)
    width = net.shape(x)[-1]
    wide = net.pick((8, 24))
    y = net.add("MatMul", x, net.weight((width, wide), kind, width))
    y = activated(net, net.add("Add", y, net.weight((wide,), kind)))
    y = net.add("MatMul", y, net.weight((wide, width), kind, wide))
    return net.add("Add", y, x)


@step(1.2, 3)
def recurrent(net: Grower, x: str) -> Made:
    """Add a small recurrent layer over (steps, batch, features)."""
    kind = dtype(net, x)
    x = net.add("Transpose", x, perm=[1, 0, 2])
    t, n, width = net.shape(x)
    if t > 8:
        raise UnfitError("too many steps")
    op, gates = net.pick((("LSTM", 4), ("GRU", 3), ("RNN", 1)))
    hidden = net.pick((3, 8))
    way = net.pick(("forward", "forward", "reverse", "bidirectional"))
    both = 2 if way == "bidirectional" else 1
    reads = [net.weight((both, gates * hidden, width), kind, width)]
    reads.append(net.weight((both, gates * hidden, hidden), kind, hidden))
    has_bias = net.chance(0.7)
    has_state = net.chance(0.4)
    if has_bias or has_state:
        reads.append(net.weight((both, 2 * gates * hidden), kind) if has_bias else "")
    if has_state:
        reads += ["", net.weight((both, n, hidden), kind)]
        reads += [net.weight((both, n, hidden), kind)] if op == "LSTM" else []
    attrs: dict[str, Any] = {"hidden_size": hidden, "direction": way}
    if op == "GRU" and net.chance(0.5):
        attrs["linear_before_reset"] = 1
    outputs = 3 if op == "LSTM" else 2
    made = net.add(op, x, *reads, outputs=outputs, **attrs)
    y = made[0]
    if net.chance(0.4):
        return made[1]
    if both == 1:
        return net.add("Transpose", squeezed(net, y, (1,)), perm=[1, 0, 2])
    y = net.add("Transpose", y, perm=[2, 0, 1, 3])
    return net.add("Reshape", y, net.ints(n, t, -1))


# -- products --------------------------------------------------------------------------------------
@step(3, 2)
def gemm(net: Grower, x: str) -> Made:
    kind = dtype(net, x)
    (m, k) = net.shape(x)
    n = net.pick((1, 3, 10, 17))
    attrs: dict[str, Any] = {}
    if net.chance(0.5):
        attrs["transB"] = 1
    if net.chance(0.3):
        attrs["alpha"] = net.pick((0.5, 2.0))
    if net.chance(0.3):
        attrs["beta"] = net.pick((0.5, 2.0, 0.0))
    if net.chance(0.2):
        attrs["transA"] = 1
        m, k = k, m
    weight = net.weight((n, k) if attrs.get("transB") else (k, n), kind, k)
    shape = net.pick(((n,), (1, n), (m, n), (m, 1), (1,), ()))
    bias = [] if net.opset >= 11 and net.chance(0.2) else [net.weight(shape, kind)]
    return net.add("Gemm", x, weight, *bias, **attrs)


@step(2, 1, 2, 3, 4)
def product(net: Grower, x: str) -> Made:
    """Multiply by weights with broadcast batches, by a vector, or by a tensor of the network."""
    kind = dtype(net, x)
    shape = net.shape(x)
    k = shape[-1]
    n = net.pick((1, 3, 8, 17))
    way = net.pick(("weight", "batched", "vector", "left", "gram", "square"))
    if way == "batched":
        batch = [net.pick((1, size)) for size in shape[:-2]]
        batch = batch[net.whole(0, len(batch)) :]
        return net.add("MatMul", x, net.weight((*batch, k, n), kind, k))
    if way == "vector":
        return net.add("MatMul", x, net.weight((k,), kind, k))
    if way == "left" and len(shape) > 1:
        batch = (2,) if len(shape) == 2 and net.chance(0.3) else ()
        return net.add("MatMul", net.weight((*batch, n, shape[-2]), kind, shape[-2]), x)
    if way in ("gram", "square") and len(shape) > 1:
        order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        turned = net.add("Transpose", x, perm=order)
        if shape[-1] == shape[-2] and net.chance(0.5):
            return net.add("MatMul", x, x)
        reads = (x, turned) if way == "square" else (turned, x)
        return net.add("MatMul", *reads)
    return net.add("MatMul", x, net.weight((k, n), kind, k))


@step(0.5, 2, 3)
def einsum(net: Grower, x: str) -> Made:
    if net.opset < 12:
        raise UnfitError("no Einsum yet")
    kind = dtype(net, x)
    k = net.shape(x)[-1]
    letters = "bik"[-rank(net, x) :]
    way = net.pick((f"{letters},kn->{letters[:-1]}n", f"{letters},nk->n{letters[:-1]}"))
    shape = (k, 5) if "kn" in way else (5, k)
    return net.add("Einsum", x, net.weight(shape, kind, k), equation=way)


# -- elementwise with broadcasting -----------------------------------------------------------------
def operand(net: Grower, x: str) -> str:
    """Return what broadcasts with x: a number, some axes, more axes, or another tensor."""
    kind = dtype(net, x)
    shape = net.shape(x)
    way = net.pick(("scalar", "axes", "axes", "last", "full", "wider", "other", "other", "fold"))
    if way == "scalar":
        return net.constant(net.like(kind, net.pick(((), (1,), (1,) * len(shape)))))
    if way == "axes":
        sizes = [net.pick((1, size)) for size in shape]
        return net.constant(net.like(kind, sizes[net.whole(0, len(sizes)) :]))
    if way == "last":
        return net.constant(net.like(kind, shape[-1:]))
    if way == "wider" and len(shape) < 4:
        return net.constant(net.like(kind, (2, *(1,) * len(shape))))
    if way == "fold" and shape:
        axes = sorted({net.whole(0, len(shape) - 1) for _ in range(2)})
        return reduced(net, net.pick(("ReduceMean", "ReduceMax")), x, axes, 1)
    if way == "other":
        fits = [n for n in net.open if dtype(net, n) == kind and _broadcast(net, n, x)]
        if fits:
            return net.pick(fits)
    return net.constant(net.like(kind, shape))


def _broadcast(net: Grower, one: str, two: str) -> bool:
    try:
        shape = np.broadcast_shapes(net.shape(one), net.shape(two))
    except ValueError:
        return False
    return math.prod(shape) <= 4000 and len(shape) <= 5


@step(4)
def binary(net: Grower, x: str) -> Made:
    op = net.pick(("Add", "Add", "Sub", "Mul", "Mul", "Div", "Max", "Min"))
    other = operand(net, x)
    if op == "Div":
        other = net.add("Add", net.add("Abs", other), number(net, x, 0.5))
    reads = (x, other) if net.chance(0.6) else (other, x)
    if op in ("Max", "Min") and net.opset < 13 and dtype(net, x) != np.float32:
        raise UnfitError("no half floats yet")
    y = net.add(op, *reads)
    return activated(net, y) if net.chance(0.3) else y


@step(0.7)
def variadic(net: Grower, x: str) -> Made:
    op = net.pick(("Sum", "Mean", "Max", "Min"))
    count = net.whole(1, 3)
    return net.add(op, x, *(operand(net, x) for _ in range(count - 1)))


@step(1.5)
def residual(net: Grower, x: str) -> Made:
    same = [n for n in net.open if n != x and net.shape(n) == net.shape(x)]
    same = [n for n in same if dtype(net, n) == dtype(net, x)]
    if not same:
        raise UnfitError("nothing to add")
    return net.add("Add", x, net.pick(same))


def between(net: Grower, x: str) -> float:
    """Return a number that no element of x is near: the middle of the widest gap."""
    numbers = np.unique(np.concatenate([net.values[x].ravel(), [-0.5, 0.5]]).astype(np.float64))
    gaps = np.diff(numbers)
    inner = slice(len(gaps) // 4, max(len(gaps) // 4 + 1, 3 * len(gaps) // 4))
    at = len(gaps) // 4 + int(np.argmax(gaps[inner]))
    return float(np.float16((numbers[at] + numbers[at + 1]) / 2))


@step(1.5)
def comparison(net: Grower, x: str) -> Made:
    """Compare with a number and choose between tensors, or count."""
    ops = ["Greater", "Less"] + (["GreaterOrEqual", "LessOrEqual"] if net.opset >= 12 else [])
    test = net.add(net.pick(ops), x, number(net, x, between(net, x)))
    if net.chance(0.2):
        test = net.add("Not", test)
    if net.chance(0.2):
        other = net.add("Less", net.add("Abs", x), number(net, x, between(net, x)))
        test = net.add(net.pick(("And", "Or", "Xor")), test, other)
    way = net.pick(("where", "where", "cast", "masked", "bool"))
    if way == "where":
        other = operand(net, x)
        return net.add("Where", test, *((x, other) if net.chance(0.5) else (other, x)))
    if way == "cast":
        return net.add("Cast", test, to=_number(net.pick((np.float32, np.int64, np.int32))))
    if way == "masked":
        return net.add("Mul", x, net.add("Cast", test, to=_number(dtype(net, x))))
    return test


# -- rows ------------------------------------------------------------------------------------------
REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2",
              "ReduceSumSquare", "ReduceLogSumExp", "ReduceProd")  # fmt: skip


@step(2.5)
def reduction(net: Grower, x: str) -> Made:
    op = net.pick(REDUCTIONS)
    keep = net.whole(0, 1)
    ndim = rank(net, x)
    if net.chance(0.15) or not ndim:
        return net.add(op, x, keepdims=keep)
    axes = [i for i in range(ndim) if net.chance(0.5)] or [ndim - 1]
    if net.opset >= 11 or op == "ReduceSum":
        axes = [i - ndim if net.chance(0.3) and net.opset >= 11 else i for i in axes]
    if net.chance(0.3):
        axes = axes[::-1]
    return reduced(net, op, x, axes, keep)


@step(1.5, 1, 2, 3, 4)
def softmax(net: Grower, x: str) -> Made:
    op = net.pick(("Softmax", "Softmax", "LogSoftmax"))
    if net.chance(0.3):
        return net.add(op, x)
    axis = any_axis(net, x) if net.opset >= 11 else net.whole(0, rank(net, x) - 1)
    return net.add(op, x, axis=axis)


@step(0.6, 1, 2, 3, 4)
def running_sum(net: Grower, x: str) -> Made:
    if net.opset < 11:
        raise UnfitError("no CumSum yet")
    axis = net.constant(np.array(any_axis(net, x), net.pick((np.int64, np.int32))))
    return net.add("CumSum", x, axis, exclusive=net.whole(0, 1), reverse=net.whole(0, 1))


@step(1, 1, 2, 3, 4)
def largest(net: Grower, x: str) -> Made:
    """Add ArgMax, ArgMin or TopK."""
    axis = net.whole(0, rank(net, x) - 1)
    op = net.pick(("ArgMax", "ArgMin", "TopK"))
    if op == "TopK":
        k = net.whole(1, min(4, net.shape(x)[axis]))
        if net.opset < 10:
            made = net.add("TopK", x, k=k, axis=axis, outputs=2)
        else:
            attrs = {"largest": net.whole(0, 1)} if net.opset >= 11 else {}
            made = net.add("TopK", x, net.ints(k), axis=axis, outputs=2, **attrs)
        return made if net.chance(0.4) else made[0]
    attrs = {"axis": axis, "keepdims": net.whole(0, 1)}
    if net.opset >= 12 and net.chance(0.3):
        attrs["select_last_index"] = 1
    return net.add(op, x, **attrs)


# -- shapes ----------------------------------------------------------------------------------------
@step(2.5, kind="any")
def reshaped(net: Grower, x: str) -> Made:
    """Reshape by a constant with -1 and 0, by arithmetic on the shape, or flatten."""
    shape = net.shape(x)
    total = math.prod(shape)
    way = net.pick(("constant", "constant", "shape", "flatten", "like"))
    if way == "flatten" and shape:
        least = -len(shape) if net.opset >= 11 else 0
        return net.add("Flatten", x, axis=net.whole(least, len(shape)))
    if way == "shape" and len(shape) > 1:
        return shape_arithmetic(net, x)
    if way == "like":
        same = [n for n in net.open if math.prod(net.shape(n)) == total and n != x]
        if same:
            return net.add("Reshape", x, net.add("Shape", net.pick(same)))
    forms = [[-1], [total], [1, -1], [-1, 1]]
    if shape:
        forms += [[0, -1], [-1, shape[-1]], [*shape, 1], [1, *shape]]
    if len(shape) > 2:
        forms += [[0, 0, -1], [shape[0], -1, shape[-1]], [shape[0] * shape[1], *shape[2:]]]
    halves = [i for i, size in enumerate(shape) if size % 2 == 0]
    if halves:
        i = net.pick(halves)
        forms.append([*shape[:i], 2, shape[i] // 2, *shape[i + 1 :]])
    if total == 1:
        forms.append([])
    wanted = net.pick(forms)
    if len(wanted) > 5:
        raise UnfitError("too many axes")
    return net.add("Reshape", x, net.constant(np.array(wanted, np.int64)))


def shape_arithmetic(net: Grower, x: str) -> str:
    """Return x reshaped by Shape, Gather, Mul, Concat, as PyTorch's exporter writes `view`."""
    shape = net.add("Shape", x)
    first = net.add("Gather", shape, net.constant(np.array(0, np.int64)), axis=0)
    first = unsqueezed(net, first, (0,))
    if net.chance(0.5):
        rest = net.ints(-1)
    else:
        after = [net.add("Gather", shape, net.ints(i), axis=0) for i in range(1, rank(net, x))]
        rest = after[0]
        for name in after[1:]:
            rest = net.add("Mul", rest, name)
    reads = (first, rest) if net.chance(0.7) else (net.ints(1), first, rest)
    return net.add("Reshape", x, net.add("Concat", *reads, axis=0))


@step(1.5, 2, 3, 4, 5, kind="any")
def turned(net: Grower, x: str) -> Made:
    if net.chance(0.15):
        return net.add("Transpose", x)
    return net.add("Transpose", x, perm=[int(i) for i in net.rng.permutation(rank(net, x))])


@step(1.2, kind="any")
def axes_of_one(net: Grower, x: str) -> Made:
    ndim = rank(net, x)
    ones = [i for i, size in enumerate(net.shape(x)) if size == 1]
    if ones and net.chance(0.7):
        some = [i for i in ones if net.chance(0.6)] or ones[:1]
        return squeezed(net, x, some) if net.chance(0.8) else net.add("Squeeze", x)
    if ndim > 4:
        raise UnfitError("too many axes")
    axes = (net.whole(0, ndim),) if net.chance(0.7) else (0, ndim + 1)
    return unsqueezed(net, x, axes)


@step(1.5, 1, 2, 3, 4, 5)
def joined(net: Grower, x: str) -> Made:
    axis = any_axis(net, x) if net.opset >= 11 else net.whole(0, rank(net, x) - 1)
    at = axis % rank(net, x)
    shape = net.shape(x)

    def fits(name: str) -> bool:
        other = net.shape(name)
        if len(other) != len(shape) or dtype(net, name) != dtype(net, x):
            return False
        return all(i == at or other[i] == shape[i] for i in range(len(shape)))

    mates = [name for name in net.open if fits(name)]
    others = [net.pick(mates) for _ in range(net.whole(0, 2))]
    if net.chance(0.4):
        size = [*shape[:at], net.whole(1, 3), *shape[at + 1 :]]
        others.append(net.constant(net.like(dtype(net, x), size)))
    reads = [x, *others]
    order = net.rng.permutation(len(reads))
    return net.add("Concat", *(reads[i] for i in order), axis=axis)


@step(1.5, 1, 2, 3, 4, 5, kind="any")
def cut(net: Grower, x: str) -> Made:
    axis = net.whole(0, rank(net, x) - 1)
    size = net.shape(x)[axis]
    if size < 2:
        raise UnfitError("nothing to cut")
    if net.chance(0.5):
        low = net.whole(0, size - 1)
        if net.opset >= 10 and net.chance(0.4):
            by = net.pick((2, -1, -2))
            low, high = (0, 2**31) if by > 0 else (size - 1, -(2**31))
            return span(net, x, axis, low, high, by)
        high = net.pick((size, 2**31 - 1, net.whole(low + 1, size)))
        return span(net, x, axis, low - size if net.chance(0.3) else low, high)
    if size % 2 == 0 and net.opset < 18 and net.chance(0.3):
        return net.add("Split", x, outputs=2, axis=axis)
    first = net.whole(1, size - 1)
    return parts(net, x, (first, size - first), axis)


@step(1, 1, 2, 3, 4)
def padded(net: Grower, x: str) -> Made:
    shape = net.shape(x)
    mode = net.pick(("constant", "constant", "reflect", "edge"))
    low = [net.whole(0, 2) if net.chance(0.5) else 0 for _ in shape]
    high = [net.whole(0, 2) if net.chance(0.5) else 0 for _ in shape]
    if mode == "reflect" and any(max(a, b) >= s for a, b, s in zip(low, high, shape, strict=True)):
        raise UnfitError("reflected further than the tensor")
    if mode == "constant" and net.chance(0.2):
        low[-1] = -1 if shape[-1] > 2 else 0
    value = net.pick((0.0, 1.5))
    if net.opset < 11:
        return net.add("Pad", x, mode=mode, pads=[*low, *high], value=value)
    reads = [net.ints(*low, *high)]
    if mode == "constant" and net.chance(0.6):
        reads.append(net.constant(np.array(value, dtype(net, x))))
    return net.add("Pad", x, *reads, mode=mode)


@step(0.8, 1, 2, 3, kind="any")
def repeated(net: Grower, x: str) -> Made:
    shape = net.shape(x)
    if net.chance(0.5):
        return net.add("Tile", x, net.ints(*(net.pick((1, 1, 2, 3)) for _ in shape)))
    sizes = [net.pick((3, 1)) if size == 1 else net.pick((1, size)) for size in shape]
    return net.add("Expand", x, net.ints(*net.pick(((2, *sizes), sizes))))


@step(0.7, 2, 3, 4)
def gated_halves(net: Grower, x: str) -> Made:
    """Multiply one half by a gate of the other, as GLU and SwiGLU do."""
    axis = net.whole(0, rank(net, x) - 1)
    size = net.shape(x)[axis]
    if size % 2:
        raise UnfitError("no halves")
    one, two = parts(net, x, (size // 2, size // 2), axis)
    gate = net.add("Sigmoid", two)
    gate = net.add("Mul", gate, two) if net.chance(0.4) else gate
    return net.add("Mul", one, gate)


@step(0.6, 3)
def positions(net: Grower, x: str) -> Made:
    """Add a row of a table for each place, places counted by Shape and Range."""
    if net.opset < 11:
        raise UnfitError("no Range yet")
    kind = dtype(net, x)
    (_, count, width) = net.shape(x)
    shape = net.add("Shape", x)
    last = net.add("Gather", shape, net.constant(np.array(1, np.int64)), axis=0)
    ends = [net.constant(np.array(number, np.int64)) for number in (0, 1)]
    places = net.add("Range", ends[0], last, ends[1])
    rows = net.add("Gather", net.weight((count + 2, width), kind), places, axis=0)
    return net.add("Add", x, rows)


@step(0.6, 2, 3, 4)
def filled(net: Grower, x: str) -> Made:
    """Join or add numbers that ConstantOfShape or Expand makes of the shape of x."""
    shape = net.add("Shape", x)
    if net.chance(0.5):
        other = net.add("Expand", number(net, x, 0.5), shape)
    else:
        value = numpy_helper.from_array(np.array([0.5], dtype(net, x)))
        other = net.add("ConstantOfShape", shape, value=value)
    if net.chance(0.5):
        return net.add("Concat", x, other, axis=net.whole(0, rank(net, x) - 1))
    return net.add("Sub", other, x)


@step(0.6, 2, 3, 4)
def other_norms(net: Grower, x: str) -> Made:
    op = net.pick(("LpNormalization", "MeanVarianceNormalization", "Hardmax", "GlobalLpPool"))
    if op == "LpNormalization":
        axis = net.whole(0, rank(net, x) - 1)
        return net.add(op, x, axis=axis, p=net.pick((1, 2)))
    if op == "MeanVarianceNormalization":
        return net.add(op, x, axes=[0, rank(net, x) - 1])
    if op == "Hardmax":
        return net.add(op, x, axis=rank(net, x) - 1)
    if rank(net, x) < 3:
        raise UnfitError("no plane")
    return net.add(op, x, p=net.pick((1, 2)))


@step(0.3, kind="any")
def unchanged(net: Grower, x: str) -> Made:
    return net.add(net.pick(("Identity", "Dropout")) if net.is_float(x) else "Identity", x)


@step(0.5, 2, 3)
def triangle(net: Grower, x: str) -> Made:
    if net.opset < 14:
        raise UnfitError("no Trilu yet")
    reads = [net.constant(np.array(net.whole(-1, 1), np.int64))] if net.chance(0.5) else []
    return net.add("Trilu", x, *reads, upper=net.whole(0, 1))


# -- gathering and scattering ----------------------------------------------------------------------
@step(1.5, 1, 2, 3, 4, kind="any")
def gathered(net: Grower, x: str) -> Made:
    """Gather by a constant, by numbers of the network, or element by element."""
    axis = net.whole(0, rank(net, x) - 1)
    shape = net.shape(x)
    size = shape[axis]
    low = -size if net.opset >= 11 else 0
    way = net.pick(("scalar", "list", "list", "input", "elements", "nd"))
    if way == "elements" and net.opset >= 11:
        sizes = [*shape]
        sizes[axis] = net.whole(1, 3)
        places = net.rng.integers(low, size, sizes)
        return net.add("GatherElements", x, net.constant(places.astype(np.int64)), axis=axis)
    if way == "nd" and net.opset >= 11:
        depth = net.whole(1, len(shape))
        places = np.stack([net.rng.integers(0, s, (2, 2)) for s in shape[:depth]], -1)
        return net.add("GatherND", x, net.constant(places.astype(np.int64)))
    if way == "input":
        wanted = net.rng.integers(0, size, (net.whole(1, 4),)).astype(np.int64)
        return net.add("Gather", x, net.input(wanted), axis=axis)
    places = net.rng.integers(low, size, () if way == "scalar" else (net.whole(1, 4),))
    return net.add("Gather", x, net.constant(places.astype(np.int64)), axis=axis)


@step(0.8, 1, 2, 3)
def scattered(net: Grower, x: str) -> Made:
    if net.opset < 11:
        raise UnfitError("no ScatterElements yet")
    kind = dtype(net, x)
    shape = net.shape(x)
    axis = net.whole(0, len(shape) - 1)
    count = net.whole(1, shape[axis])
    if net.chance(0.5):
        order = net.rng.permutation(shape[axis])[:count]
        sizes = [*shape]
        sizes[axis] = count
        lanes = [1] * len(shape)
        lanes[axis] = count
        places = np.broadcast_to(order.reshape(lanes), sizes)
        reads = (net.constant(places.astype(np.int64)), net.constant(net.like(kind, sizes)))
        attrs: dict[str, Any] = {"axis": axis}
        if net.opset >= 16 and net.chance(0.3):
            attrs["reduction"] = "add"
        return net.add("ScatterElements", x, *reads, **attrs)
    order = net.rng.permutation(shape[0])[: min(count, shape[0])].reshape(-1, 1)
    updates = net.constant(net.like(kind, (len(order), *shape[1:])))
    return net.add("ScatterND", x, net.constant(order.astype(np.int64)), updates)


OTHER_TYPES = (np.uint8, np.int8, np.float64, np.int16, bool)


# -- other types -----------------------------------------------------------------------------------
def _number(kind: Any) -> int:
    found = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.float16): TensorProto.FLOAT16,
             np.dtype(np.int64): TensorProto.INT64, np.dtype(np.int32): TensorProto.INT32,
             np.dtype(bool): TensorProto.BOOL, np.dtype(np.uint8): TensorProto.UINT8,
             np.dtype(np.int8): TensorProto.INT8, np.dtype(np.float64): TensorProto.DOUBLE,
             np.dtype(np.int16): TensorProto.INT16}  # fmt: skip
    return int(found[np.dtype(kind)])


@step(1.5)
def precision(net: Grower, x: str) -> Made:
    """Go to half floats or back, as mixed models do."""
    if not net.mixed:
        raise UnfitError("fp32 throughout")
    return net.add("Cast", x, to=_number(FLOATS[1 if dtype(net, x) == np.float32 else 0]))


@step(0.5)
def whole_numbers(net: Grower, x: str) -> Made:
    scaled = net.add("Mul", x, number(net, x, 2.0))
    if net.chance(0.3):
        wide = net.add("Cast", net.add("Abs", scaled), to=_number(net.pick(OTHER_TYPES)))
        return net.add("Cast", wide, to=_number(np.float32))
    return net.add("Cast", scaled, to=_number(net.pick((np.int32, np.int64))))


@step(3, kind="int")
def on_whole_numbers(net: Grower, x: str) -> Made:
    """Compute with whole numbers, or go back to floats."""
    kind = dtype(net, x)
    way = net.pick(("float", "float", "float", "arithmetic", "arithmetic", "table", "equal",
                    "onehot", "reduce"))  # fmt: skip
    if way == "float":
        return net.add("Cast", x, to=_number(np.float32))
    if way == "arithmetic":
        op = net.pick(("Add", "Sub", "Mul", "Div", "Mod"))
        low = 1 if op in ("Div", "Mod") else -3
        if op == "Mod" and net.opset < 10:
            raise UnfitError("no Mod yet")
        sizes = net.pick(((), (1,), net.shape(x)))
        return net.add(op, x, net.constant(net.rng.integers(low, 5, sizes).astype(kind)))
    if way == "table":
        rows = 7
        inside = net.add("Cast", x, to=_number(np.float32))
        inside = clipped_both(net, net.add("Abs", inside), 0.0, rows - 1.0)
        places = net.add("Cast", inside, to=_number(np.int64))
        table = net.weight((rows, net.pick((3, 8))), np.float32)
        return net.add("Gather", table, places, axis=0)
    if way == "equal":
        other = net.constant(np.array(int(net.pick(net.values[x].ravel())), kind))
        test = net.add("Equal", x, other)
        if net.chance(0.5):
            return net.add("Where", test, net.constant(np.array(5, kind)), x)
        return test
    if way == "onehot":
        ends = net.constant(np.array(net.pick(([0, 1], [-1, 2])), np.float32))
        depth = net.constant(np.array(net.whole(2, 6), np.int64))
        return net.add("OneHot", x, depth, ends, axis=net.pick((-1, 0)))
    if not rank(net, x):
        raise UnfitError("no axes")
    op = net.pick(("ReduceSum", "ReduceMax", "ReduceMin"))
    return reduced(net, op, x, (net.whole(0, rank(net, x) - 1),), net.whole(0, 1))


@step(4, kind="bool")
def on_truths(net: Grower, x: str) -> Made:
    way = net.pick(("float", "float", "int", "not"))
    if way == "not":
        return net.add("Not", x)
    return net.add("Cast", x, to=_number(np.float32 if way == "float" else np.int64))


# -- whole networks --------------------------------------------------------------------------------
def first_inputs(net: Grower) -> None:
    """Add one to three inputs: an image, a signal, a sequence, a table, or whole numbers."""
    batch = net.whole(1, 3)
    channels = net.pick((1, 3, 4, 8, 16, 17, 20))
    side = net.pick((1, 2, 4, 5, 7, 8))
    if net.chance(0.06):  # several blocks of channels, or several tiles of pixels
        channels, side = net.pick(((48, 9), (72, 7), (8, 20)))
    shapes = {
        "image": (batch, channels, side, net.pick((side, side, side + 1))),
        "signal": (batch, channels, net.pick((5, 8, 12))),
        "sequence": (batch, net.pick((1, 3, 6, 7)), net.pick((4, 8, 16, 17))),
        "table": (batch * net.pick((1, 4)), net.pick((1, 5, 16, 33))),
    }
    kinds = ["image", "image", "image", "signal", "sequence", "sequence", "table", "words"]
    kind = net.pick(kinds)
    if kind == "words":
        words = net.rng.integers(0, 9, shapes["sequence"][:2]).astype(np.int64)
        name = net.input(words)
        table = net.weight((9, shapes["sequence"][2]), np.float32)
        net.open.append(net.add("Gather", table, name, axis=0))
    else:
        net.open.append(net.input(net.like(np.float32, shapes[kind])))
    if net.mixed and kind != "words" and net.chance(0.3):
        net.open[-1:] = [net.input(net.like(np.float16, shapes[kind]))]
    main = net.shape(net.open[-1])
    if net.chance(0.3):
        extra = [net.pick((1, size)) for size in main] if net.chance(0.5) else [*main]
        net.open.insert(0, net.input(net.like(np.float32, extra)))
    if net.chance(0.1):
        net.input(net.like(np.float32, (batch, 3)))  # nothing reads it
    if net.chance(0.1):
        net.open.insert(0, net.input(net.like(np.float32, ())))


def random_network(seed: int, most: int = 9) -> Network:
    """Return the network of a seed: three steps to `most`, each of one node to twenty."""
    net = Grower(seed)
    first_inputs(net)
    wanted = net.whole(3, most)
    taken = 0
    for _ in range(10 * most):
        x = net.open[-1] if net.chance(0.8) else net.pick(net.open)
        fitting = [(weight, function) for weight, function, takes in STEPS if takes(net, x)]
        weights = np.array([weight for weight, _ in fitting])
        at = net.rng.choice(len(fitting), p=weights / weights.sum())
        taken += net.try_step(fitting[at][1], x)
        if taken == wanted:
            break
    return net.finish()
