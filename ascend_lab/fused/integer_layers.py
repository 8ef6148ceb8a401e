"""Quantise / dequantise pairs become integer layers; tensors between layers stay in bytes.

    plain floor    q -> dequantise -> fp16 convolution -> quantise -> q
    fused          q -> int8 convolution, sums in int32 -> requantise in the epilogue -> q
    saved          half of the bytes, half of the cube's cycles, two kernels a layer


    conv(dequantise(q), dequantise(w))           dequantise(conv(q, w))        sums in int32
    quantise(relu(dequantise(sums)))             requantise(sums)              in the epilogue
    reshape(dequantise(q)), transpose, ...       dequantise(reshape(q))
    dequantise(q) + y                            add_dequantised(y, q)         a residual in bytes
    quantise(dequantise(q)), equal scales        q

y = sx sw (sum qx qw - ox sum qw + qb), qb = round(b / (sx sw)), where padding of x holds ox. A
layer whose sums might exceed int32 stays in floating point; a bias too large for int32 is added
after the sums are dequantised.

If a layer and an addition read the same float tensor, only the layer reads it in bytes: quantised
numbers saturate at the end of their scale, and the summand must not.
Source: github hicann/amct, graph_based; the vendor's V100/V200RequantFusionPass.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.ir import Constant, Graph, Node, TensorType, Values
from ascend_lab.compiler.passes import simplify
from ascend_lab.compiler.passes.rewrite import derived, settings, sweep
from ascend_lab.operators.kernels.epilogue_plan import LARGEST_BIAS
from ascend_lab.operators.ops.formats import is_float

CONVOLUTIONS = ("conv2d", "depthwise_conv2d")
MOVING = ("reshape", "transpose", "slice", "expand")
WINDOW = ("stride", "pad", "dilation")
MOST_APART = 16.0
"""Largest ratio of two layers' steps at which one layer may add the bias of the other."""
MOST_PRODUCT = 255 * 128
MOST_SUM = 2**31 - 1
"""The largest |(q - offset) w| of two bytes, and the largest sum that int32 holds."""
ZERO_STEPS = 2**18
"""Largest number of steps that the bias of a channel of zeros takes."""
COARSEST = 0.25
"""Largest step of the sums, in steps of the bytes, at which a shift may be rounded to sums."""
SHALLOW = 512
"""Products of a result up to which the vector unit may limit a layer, not the cube."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """A tensor q of int8 that stands for the numbers (q - offset) scale."""

    name: str
    scale: float
    offset: int


def bytes_of(draft: Draft, name: str) -> Bytes | None:
    """Return the int8 tensor behind a dequantised one, if that has one scale; else None."""
    node = draft.maker(name)
    if node is None or node.op != "dequantise" or len(node.inputs) > 1:
        return None
    if draft.type(node.inputs[0]).dtype != "int8":
        return None
    return Bytes(node.inputs[0], node.attr("scale", 1.0), node.attr("offset", 0))


# -- uint8 ----------------------------------------------------------------------------------------
def in_int8(draft: Draft, node: Node) -> bool:
    """Turn uint8 into int8 with a zero point 128 lower, if only `dequantise` nodes read it."""
    out = node.output
    readers = draft.graph.readers[node.output]
    only_dequantised = out not in draft.outputs and all(r.op == "dequantise" for r in readers)
    if draft.type(out).dtype != "uint8" or not only_dequantised:
        return False
    # uint8 200 with zero point 128 is int8 72 with zero point 0: (200 - 128) s = (72 - 0) s.
    attrs = {**node.attrs, "dtype": "int8", "offset": node.attr("offset", 0) - 128}
    quantised = draft.insert("quantise", node.inputs, attrs, out)
    for reader in readers:
        attrs = {**reader.attrs, "offset": reader.attr("offset", 0) - 128}
        others = draft.current(reader.name).inputs[1:]
        dequantised = draft.insert("dequantise", (quantised, *others), attrs, reader.name)
        draft.replace(reader.output, dequantised)
    return True


# -- integer layers -------------------------------------------------------------------------------
def integer_layer(draft: Draft, node: Node) -> bool:
    """Compute a convolution or product of bytes in int32."""
    x = bytes_of(draft, node.inputs[0])
    options = settings(node)
    weight = _weight(draft, node, options)
    if x is None or weight is None or not is_float(draft.type(node.output).dtype):
        return False
    if options.get("trans_a") or options.get("alpha", 1.0) != 1 or options.get("beta", 1.0) != 1:
        return False
    weight_bytes, scales = weight
    conv = node.op in CONVOLUTIONS
    title = node.name
    shape = (weight_bytes.type.shape[0], 1, 1) if conv else (draft.type(node.output).shape[-1],)
    # 64 input channels, 3 x 3 taps: 576 products a result.
    products = weight_bytes.type.elements // shape[0]
    # a sum has at most 65,793 products: (2^31 - 1) / (255 * 128)
    if products * MOST_PRODUCT > MOST_SUM:
        return False
    biased = len(node.inputs) > 2
    bias = _bias(draft, node, shape[0])
    if biased and bias is None:
        return False
    # what the largest possible sum leaves for the bias
    room = MOST_SUM - products * MOST_PRODUCT
    bias_in_floats = bias is not None and not _bias_fits(bias, scales, x.scale, room)
    sources = [scales, weight_bytes, *([bias] if bias and not bias_in_floats else [])]
    # the axes of a channel's weights, over which they are summed
    axes: tuple[int, ...] = (1, 2, 3) if conv else (-1 if options.get("trans_b") else 0,)
    kind = TensorType(shape, "fp32")
    name = draft.add(weight_bytes, f"{title}_weight")
    step = derived(kind, partial(_scales, x.scale, shape, axes), *sources)
    total = partial(_whole_bias, x, shape, axes)
    added = draft.add(derived(replace(kind, dtype="int32"), total, *sources), f"{title}_bias")
    attrs: dict[str, Any] = {key: options[key] for key in (*WINDOW, "trans_b") if key in options}
    if conv:
        channels = draft.type(x.name).shape[1]
        attrs["groups"] = options.get("groups", channels)
        # padding stands for 0, which is the number ox in bytes
        attrs["pad_value"] = x.offset if np.any(options["pad"]) else 0
    op = "conv2d" if conv else "matmul" if node.op == "gemm" else node.op
    sums = draft.insert(op, (x.name, name), attrs, f"{title}_sums")
    dequantise_attrs: dict[str, Any] = {"dtype": draft.type(node.output).dtype}
    if conv and weight_bytes.type.elements <= SHALLOW * shape[0]:
        dequantise_attrs |= _small(draft.constants[added])
    reads = (sums, draft.add(step, f"{title}_scales"), added)
    if not bias_in_floats:
        return draft.become(node, "dequantise", reads, dequantise_attrs)
    assert bias is not None
    floats = draft.insert("dequantise", reads, dequantise_attrs, f"{title}_floats")
    column = derived(
        TensorType(shape, draft.type(node.output).dtype),
        lambda b: np.broadcast_to(b.reshape(-1), (shape[0],)).reshape(shape),
        bias,
    )
    return draft.become(node, "add", (floats, draft.add(column, f"{title}_summand")))


def _bias_fits(bias: Constant, scales: Constant, step: float, room: int) -> bool:
    """Tell whether sums with this bias, in steps of the sums, fit in int32."""
    with np.errstate(all="ignore"):
        bias_steps = bias.array().astype(np.float64).reshape(-1) / (
            scales.array().astype(np.float64).reshape(-1) * step
        )
    return bool(np.all(np.abs(bias_steps) <= room))


def _small(bias: Constant) -> dict[str, bool]:
    """Return the attribute `small_bias` if the bias is small enough for the cube to add it."""
    return {"small_bias": True} if np.abs(bias.array()).max() <= LARGEST_BIAS else {}


def _weight(
    draft: Draft, node: Node, options: Mapping[str, Any]
) -> tuple[Constant, Constant] | None:
    """Return constant int8 weights with offset 0 and their scales, one or one per channel."""
    maker = draft.maker(node.inputs[1])
    if maker is None or maker.op != "dequantise" or len(maker.inputs) > 2:
        return None
    weight_bytes = draft.constant(maker.inputs[0])
    if weight_bytes is None or (
        node.op in simplify.PRODUCT_OPS and len(weight_bytes.type.shape) != 2
    ):
        return None
    # uint8 weights with zero point 128 are int8 weights with zero point 0
    zero_point = 128 if weight_bytes.type.dtype == "uint8" else 0
    if maker.attr("offset", 0) != zero_point or weight_bytes.type.dtype not in ("int8", "uint8"):
        return None
    if zero_point:
        kind = replace(weight_bytes.type, dtype="int8")
        weight_bytes = derived(kind, lambda values: values.astype(np.int64) - 128, weight_bytes)
    single_scale = Constant(
        TensorType((1,), "fp32"), np.array([maker.attr("scale", 1.0)], np.float32)
    )
    if len(maker.inputs) == 1:
        return weight_bytes, single_scale
    scales = draft.constant(maker.inputs[1])
    rank = len(weight_bytes.type.shape)
    if scales is None or maker.attr("scale", 1.0) != 1:
        return None
    sides = (1,) * (rank - len(scales.type.shape)) + scales.type.shape
    channels_last = node.op in simplify.PRODUCT_OPS and not options.get("trans_b")
    axis = rank - 1 if channels_last else 0
    fits = all(n == 1 or d == axis for d, n in enumerate(sides))
    return (weight_bytes, scales) if fits else None


def _bias(draft: Draft, node: Node, channels: int) -> Constant | None:
    """Return a constant bias in floats, dequantised if need be: one number, or one per channel."""
    if len(node.inputs) < 3:
        return None
    name = node.inputs[2]
    kind = draft.type(name)
    if kind.elements != 1 and (kind.elements, kind.shape[-1]) != (channels, channels):
        return None
    maker = draft.maker(name)
    if maker is None:
        return draft.constant(name)
    constants = [draft.constant(n) for n in maker.inputs]
    if maker.op != "dequantise" or len(constants) > 2 or any(g is None for g in constants):
        return None
    options = settings(maker)

    def floats(whole: Values, *scales: Values) -> Values:
        wide = (whole.astype(np.float64) - options["offset"]) * options["scale"]
        full: Values = wide * scales[0].astype(np.float64).reshape(-1) if scales else wide
        return full

    kind = replace(draft.type(name), dtype="fp32")
    return derived(kind, floats, *[g for g in constants if g])


def _scales(
    step: float,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    scales: Values,
    weight: Values,
    *bias: Values,
) -> Values:
    """Return the steps of the sums of each channel, sx sw.

    A channel of zeros computes its bias only, so that any scale is right. What exporters write
    there would not do: 1 rounds the bias to steps of sx, and with 1e-12 it exceeds int32. Such a
    channel gets a sixteenth of the others' median step, or more if its bias needs it.
    """
    flat = np.broadcast_to(scales.astype(np.float64).reshape(-1) * step, (math.prod(shape),))
    is_zero = ~weight.any(axes).reshape(-1)
    if not is_zero.any():
        return flat.reshape(shape)
    # the step of a typical channel
    typical = np.median(flat[~is_zero]) if not is_zero.all() else step / 127
    size = np.abs(bias[0].astype(np.float64).reshape(-1)) if bias else 0.0
    return np.where(is_zero, np.maximum(typical / 16, size / ZERO_STEPS), flat).reshape(shape)


def _whole_bias(
    x: Bytes,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    scales: Values,
    weight: Values,
    *bias: Values,
) -> Values:
    """Return round(b / (sx sw)) - ox sum qw: the bias of sums in int32."""
    # x = (0.5, -0.25) with sx = 0.01, ox = 3 is (53, -22); w = (1, 2) with sw = 0.02 is (50, 100).
    # Then sum qx qw = 450 and ox sum qw = 450: x w = 0.02 * 0.01 * (450 - 450) = 0.
    total: Values = -x.offset * weight.astype(np.float64).sum(axes).reshape(-1)
    if bias:
        step = _scales(x.scale, shape, axes, scales, weight, *bias).reshape(-1)
        total = total + np.rint(bias[0].astype(np.float64).reshape(-1) / step)
    return total.reshape(shape)


# -- between layers -------------------------------------------------------------------------------
def moved(draft: Draft, node: Node) -> bool:
    """Move bytes instead of the floats that they stand for."""
    x = bytes_of(draft, node.inputs[0])
    if x is None:
        return False
    moved_bytes = draft.insert(node.op, (x.name,), node.attrs, f"{node.name}_int8")
    attrs = {"scale": x.scale, "offset": x.offset, "dtype": draft.type(node.output).dtype}
    return draft.become(node, "dequantise", (moved_bytes,), attrs)


def residual(draft: Draft, node: Node) -> bool:
    """Let an addition read a quantised summand in bytes, as `add_dequantised`."""
    sides = [bytes_of(draft, name) for name in node.inputs]
    same_shape = len({draft.type(n).shape for n in (*node.inputs, node.output)}) == 1
    if not any(sides) or not same_shape or node.inputs[0] == node.inputs[1]:
        return False
    from_layer = [_is_fresh(draft, name) for name in node.inputs]
    # the operand that stays in floats: the one without bytes, or the one that a layer just wrote
    kept_place = (
        1 if sides[1] is None else 0 if sides[0] is None else int(from_layer[1] >= from_layer[0])
    )
    other = sides[1 - kept_place]
    assert other is not None
    pair = (node.inputs[kept_place], other.name)
    return draft.become(
        node, "add_dequantised", pair, {"scale": other.scale, "offset": other.offset}
    )


def _is_fresh(draft: Draft, name: str) -> bool:
    """Tell whether a tensor comes from a layer and has no other reader."""
    node = draft.only(name, "dequantise")
    if node is None:
        return False
    return draft.type(node.inputs[0]).dtype == "int32" or bool(
        draft.only(node.inputs[0], "requantise", "quantise")
    )


def requantised(draft: Draft, node: Node) -> bool:
    """Let a layer write bytes: requantise its sums, undo an equal pair, or scale before adding."""
    target = Bytes("", node.attr("scale", 1.0), node.attr("offset", 0))
    if node.attr("dtype", "int8") != "int8":
        return False
    unchanged = bytes_of(draft, node.inputs[0])
    if unchanged and (unchanged.scale, unchanged.offset) == (target.scale, target.offset):
        return draft.forward(node, unchanged.name)
    limits = _limited(draft, node.inputs[0], target)
    source, relu = limits or (node.inputs[0], False)
    sums = draft.only(source, "dequantise")
    if sums is not None and len(sums.inputs) == 3 and not sums.attr("offset", 0):
        scales = _divided(draft, sums, target.scale)
        attrs = {"offset": target.offset, "relu": relu}
        attrs |= {key: True for key in ("small_bias",) if sums.attr(key)}
        return draft.become(node, "requantise", (sums.inputs[0], scales, sums.inputs[2]), attrs)
    if target.scale != 1 and _in_steps(draft, node, target, (source, relu)):
        return True
    return bool(limits and not relu) and draft.become(node, "quantise", (source,), node.attrs)


def _limited(draft: Draft, name: str, target: Bytes) -> tuple[str, bool] | None:
    """Return (operand, whether it is a ReLU) of a limit that saturating int8 makes superfluous.

    The upper limit must be beyond 127 steps; the lower one beyond -128, or at 0, a ReLU.
    """
    node = draft.only(name, "clip", *simplify.RELU_LIMITS)
    if node is None:
        return None
    low, high = simplify.RELU_LIMITS.get(node.op, (node.attr("low"), node.attr("high")))
    low = -math.inf if low is None else low
    high = math.inf if high is None else high
    # Steps of 0.05, offset -128: clip(x, 0, 6) ends at 0 / 0.05 - 128 = -128 below, where bytes end
    # anyway, but at 6 / 0.05 - 128 = -8 above, which saturation does not do.
    low_is_beyond = low / target.scale + target.offset <= -128
    high_is_beyond = high / target.scale + target.offset >= 127
    return (
        (node.inputs[0], not low_is_beyond)
        if high_is_beyond and (low_is_beyond or low == 0)
        else None
    )


def _divided(draft: Draft, sums: Node, step: float) -> str:
    """Add the scales of dequantised sums divided by the step of the result; return the name."""
    scales = draft.constants[sums.inputs[1]]
    # Sums in steps of 0.0002 and a result in steps of 0.05: a factor of 0.004 in place of two
    # scalings.
    factor = sums.attr("scale", 1.0) / step
    return draft.add(
        derived(scales.type, lambda v: v.astype(np.float64) * factor, scales), f"{sums.name}_steps"
    )


def _in_steps(draft: Draft, node: Node, target: Bytes, limited: tuple[str, bool]) -> bool:
    """Compute a sum of two tensors in steps of its result, with one offset for all three.

    Two layers scale their sums by sx / s instead of sx, where s is the step of the result. With a
    residual in bytes, relu((x - ox) sx + (q - oq) sq) / s = relu(x (sx / s) + (q - o) (sq / s)).
    """
    source, relu = limited
    addition = draft.only(source, "add_dequantised", "add")
    # without a ReLU the offset of the result is part of the sum; with one it is added after it
    shift = 0.0 if relu else -float(target.offset)
    if addition is not None and addition.op == "add":
        heads = [draft.only(name, "dequantise") for name in addition.inputs]
        if not all(h is not None and len(h.inputs) == 3 for h in heads):
            return False
        if not all(h and _takes(draft, h, target.scale, shift) for h in heads):
            return False
        for head, head_shift in zip(heads, (shift, 0.0), strict=True):
            assert head is not None
            _head_in_steps(draft, head, target.scale, head_shift)
        layers = [draft.current(head.name) for head in heads if head]
        if draft.type(layers[0].output).shape == draft.type(layers[1].output).shape:
            _one_bias(draft, layers)
    else:
        head = draft.only(addition.inputs[0], "dequantise") if addition is not None else None
        if addition is None or head is None or len(head.inputs) == 2:
            return False
        # Steps of 0.1 in a result of steps of 0.05: each counts 2.
        scale = addition.attr("scale", 1.0) / target.scale
        shift += addition.attr("offset", 0.0) * scale
        if not _takes(draft, head, target.scale, shift):
            return False
        remaining = _head_in_steps(draft, head, target.scale, shift)
        pair = {"scale": scale, "offset": remaining / scale}
        draft.become(addition, "add_dequantised", draft.current(addition.name).inputs, pair)
    if relu:  # what is cut at 0 is in steps now; bytes cut it above
        source = draft.insert("relu", (source,), {}, f"{node.name}_relu")
    quantise_attrs = {"offset": target.offset} if relu else {}
    return draft.become(node, "quantise", (source,), quantise_attrs)


def _takes(draft: Draft, head: Node, step: float, shift: float) -> bool:
    """Tell whether a shift in steps of bytes can be added to sums: fine steps, and in int32."""
    if len(head.inputs) == 1:
        return True
    scales, bias = (draft.constants[name].array().astype(np.float64) for name in head.inputs[1:])
    steps = scales * (head.attr("scale", 1.0) / step)
    fits = np.abs(bias) + abs(shift) / steps <= MOST_SUM // 2
    return bool(np.all(fits) and np.all(steps <= COARSEST))


def _head_in_steps(draft: Draft, head: Node, step: float, shift: float) -> float:
    """Dequantise sums in steps of the result, minus `shift`; return the shift not yet subtracted.

    With a bias, the shift is subtracted from it, rounded to whole sums: half a sum off at most.
    """
    attrs: dict[str, Any] = {"dtype": head.attr("dtype", "fp32")}
    inputs = head.inputs
    if len(inputs) == 1:
        attrs["scale"] = head.attr("scale", 1.0) / step
        draft.become(head, "dequantise", inputs, attrs)
        return shift + float(head.attr("offset", 0) * attrs["scale"])
    inputs = (inputs[0], _divided(draft, head, step), inputs[2])
    scales, bias = (draft.constants[name] for name in inputs[1:])
    shifted_bias = derived(
        bias.type, lambda b, s: b - np.rint(shift / s.astype(np.float64)), bias, scales
    )
    attrs |= _small(shifted_bias) if head.attr("small_bias") else {}
    draft.become(
        head, "dequantise", (*inputs[:2], draft.add(shifted_bias, f"{head.name}_bias")), attrs
    )
    return 0.0


def _one_bias(draft: Draft, heads: list[Node]) -> None:
    """Let one of two added layers add both biases, half a step of its sums off at most.

    It is the layer with more taps, then with larger steps, unless its steps are too small for the
    other's bias.
    """

    def steps(head: Node) -> Values:
        wide: Values = draft.constants[head.inputs[1]].array().astype(np.float64).reshape(-1)
        return wide

    def order(head: Node) -> tuple[float, float]:
        layer = draft.maker(head.inputs[0])
        taps = draft.type(layer.inputs[1]).shape[2:] if layer else ()
        return -math.prod(taps), -float(steps(head).mean())

    heads.sort(key=order)
    for taker, other in (heads, heads[::-1]):
        if np.all(steps(other) <= MOST_APART * steps(taker)):
            numbers = [draft.constants[n] for head in (taker, other) for n in head.inputs[1:]]
            total = derived(numbers[1].type, _both, *numbers)
            moved = _both(*(constant.array().astype(np.float64) for constant in numbers))
            if np.abs(moved).max() > MOST_SUM // 2:
                continue
            kinds = [{"dtype": draft.type(head.output).dtype} for head in (taker, other)]
            small = _small(total) if taker.attr("small_bias") else {}
            bias = draft.add(total, f"{taker.name}_bias")
            draft.become(taker, "dequantise", (*taker.inputs[:2], bias), kinds[0] | small)
            draft.become(other, "dequantise", other.inputs[:2], kinds[1])
            return


def _both(scale: Values, bias: Values, other_scale: Values, other: Values) -> Values:
    """Return the sum of two layers' biases, in steps of the first layer's sums."""
    return np.asarray(bias + np.rint(other * (other_scale / scale.astype(np.float64))))


def fold(graph: Graph) -> tuple[Graph, int]:
    """Return the graph with integer layers, and the number of rewrites."""
    total = 0
    for apply in (
        simplify.COMMON.apply,
        sweep(in_int8, "quantise"),
        sweep(integer_layer, *CONVOLUTIONS, *simplify.PRODUCT_OPS),
        sweep(moved, *MOVING),
        sweep(residual, "add"),
        sweep(requantised, "quantise"),
    ):
        graph, count = apply(graph)
        total += count
    return graph, total


GRAPH_REWRITES = [("RequantFusionPass", fold)]
