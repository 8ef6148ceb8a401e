"""Rewrite layers between dequantise and quantise nodes as integer layers with tensors in int8.

    unfused    q -> dequantise -> fp16 convolution -> quantise -> q
    fused      q -> int8 convolution, sums in int32 -> requantise in the epilogue -> q
    saved      half of the bytes, half of the cube's cycles, two kernels per layer

    conv(dequantise(q), dequantise(w))           dequantise(conv(q, w))        sums in int32
    quantise(relu(dequantise(sums)))             requantise(sums)              in the epilogue
    reshape(dequantise(q)), transpose, ...       dequantise(reshape(q))
    dequantise(q) + y                            add_dequantised(y, q)         a residual in int8
    quantise(dequantise(q)), equal scales        q

With x = sx (qx - ox) and w = sw qw: y = sx sw (sum qx qw - ox sum qw + qb), where
qb = round(b / (sx sw)) and padding of qx is ox. A layer whose sums might exceed int32 stays in
floating point; a bias too large for int32 is added after the sums are dequantised.

If a layer and an addition read the same float tensor, only the layer reads it in int8: quantised
numbers saturate at the ends of their range, and an addition's summand must not saturate.
Source: github hicann/amct, graph_based; the vendor's V100/V200RequantFusionPass.
"""

import math
from collections.abc import Mapping, Sequence
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
"""Operators that only move numbers, and so can move int8 numbers instead of floats."""
WINDOW = ("stride", "pad", "dilation")
"""Attributes of a convolution that its integer form keeps."""
MAX_STEP_RATIO = 16.0
"""Largest ratio of two layers' steps at which the bias of one may be added by the other."""
MAX_PRODUCT = 255 * 128
"""The largest |(q - offset) w| of two int8 numbers."""
MAX_SUM = 2**31 - 1
"""The largest sum that int32 holds."""
MAX_ZERO_CHANNEL_STEPS = 2**18
"""A channel whose weights are all 0 gets a scale at which its bias is at most so many steps."""
MAX_SUM_STEP = 0.25
"""Largest step of the int32 sums, as a share of the int8 result's step, at which an offset may be
rounded to a whole number of sums."""
MAX_SHALLOW_PRODUCTS = 512
"""Layers with at most so many products per result may be limited by the vector unit rather than
the cube."""


@dataclass(frozen=True, slots=True)
class Int8Tensor:
    """A tensor q of int8 that stands for the numbers (q - offset) scale."""

    name: str
    scale: float
    offset: int


def int8_behind(draft: Draft, name: str) -> Int8Tensor | None:
    """Return the int8 tensor that `name` was dequantised from, if it has one scale; else None."""
    node = draft.maker(name)
    if node is None or node.op != "dequantise" or len(node.inputs) > 1:
        return None
    if draft.type(node.inputs[0]).dtype != "int8":
        return None
    return Int8Tensor(node.inputs[0], node.attr("scale", 1.0), node.attr("offset", 0))


# -- uint8 ----------------------------------------------------------------------------------------
def uint8_to_int8(draft: Draft, node: Node) -> bool:
    """Turn uint8 into int8 with a zero point 128 lower, if only `dequantise` nodes read it.

    Return whether the node was rewritten.
    """
    out = node.output
    readers = draft.graph.readers[node.output]
    only_dequantised = out not in draft.outputs and all(r.op == "dequantise" for r in readers)
    if draft.type(out).dtype != "uint8" or not only_dequantised:
        return False
    # uint8 200 with zero point 128 is int8 72 with zero point 0: (200 - 128) s = (72 - 0) s.
    quantise_attrs = {**node.attrs, "dtype": "int8", "offset": node.attr("offset", 0) - 128}
    quantised = draft.insert("quantise", node.inputs, quantise_attrs, out)
    for reader in readers:
        attrs = {**reader.attrs, "offset": reader.attr("offset", 0) - 128}
        scales = draft.current(reader.name).inputs[1:]
        dequantised = draft.insert("dequantise", (quantised, *scales), attrs, reader.name)
        draft.replace(reader.output, dequantised)
    return True


# -- integer layers -------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _IntegerOperands:
    """The operands of a layer that can be computed in int32.

    `channel_shape` is the shape of a tensor with one number per channel of the result.
    `bias_stays_float` is set if the bias, in steps of the sums, might exceed int32.
    """

    x: Int8Tensor
    weight: Constant
    scales: Constant
    bias: Constant | None
    channel_shape: tuple[int, ...]
    bias_stays_float: bool


def integer_layer(draft: Draft, node: Node) -> bool:
    """Compute a convolution or product of int8 tensors in int32; return whether it is done."""
    operands = _integer_operands(draft, node)
    if operands is None:
        return False
    float_type = TensorType(operands.channel_shape, draft.type(node.output).dtype)
    sums_and_scales, attrs = _insert_sums(draft, node, operands)
    if not operands.bias_stays_float:
        return draft.become(node, "dequantise", sums_and_scales, attrs)
    assert operands.bias is not None
    floats = draft.insert("dequantise", sums_and_scales, attrs, f"{node.name}_floats")
    column = derived(
        float_type,
        lambda b: np.broadcast_to(b.reshape(-1), float_type.shape[:1]).reshape(float_type.shape),
        operands.bias,
    )
    return draft.become(node, "add", (floats, draft.add(column, f"{node.name}_summand")))


def _integer_operands(draft: Draft, node: Node) -> _IntegerOperands | None:
    """Return the operands of a layer that can be computed in int32; None for any other node."""
    x = int8_behind(draft, node.inputs[0])
    options = settings(node)
    weight_and_scales = _weight(draft, node, options)
    out_type = draft.type(node.output)
    if x is None or weight_and_scales is None or not is_float(out_type.dtype):
        return None
    if options.get("trans_a") or options.get("alpha", 1.0) != 1 or options.get("beta", 1.0) != 1:
        return None
    weight, scales = weight_and_scales
    is_conv = node.op in CONVOLUTIONS
    channel_shape = (weight.type.shape[0], 1, 1) if is_conv else (out_type.shape[-1],)
    # 64 input channels, 3 x 3 taps: 576 products a result.
    products = weight.type.elements // channel_shape[0]
    # a sum has at most 65,793 products: (2^31 - 1) / (255 * 128)
    if products * MAX_PRODUCT > MAX_SUM:
        return None
    has_bias = len(node.inputs) > 2
    bias = _bias(draft, node, channel_shape[0])
    if has_bias and bias is None:
        return None
    # the range of int32 that the largest possible sum leaves for the bias
    room = MAX_SUM - products * MAX_PRODUCT
    bias_stays_float = bias is not None and not _bias_fits(bias, scales, x.scale, room)
    return _IntegerOperands(x, weight, scales, bias, channel_shape, bias_stays_float)


def _insert_sums(
    draft: Draft, node: Node, operands: _IntegerOperands
) -> tuple[tuple[str, str, str], dict[str, Any]]:
    """Insert the layer in int32; return the inputs and attributes of the `dequantise` behind it."""
    x = operands.x
    weight = operands.weight
    shape = operands.channel_shape
    options = settings(node)
    is_conv = node.op in CONVOLUTIONS
    sources = [operands.scales, weight]
    if operands.bias and not operands.bias_stays_float:
        sources.append(operands.bias)
    # the axes of a channel's weights, over which they are summed
    axes: tuple[int, ...]
    if is_conv:
        axes = (1, 2, 3)
    elif options.get("trans_b"):
        axes = (-1,)
    else:
        axes = (0,)
    channel_type = TensorType(shape, "fp32")
    weight_name = draft.add(weight, f"{node.name}_weight")
    scales_constant = derived(channel_type, partial(_scales, x.scale, shape, axes), *sources)
    bias_function = partial(_whole_bias, x, shape, axes)
    bias_constant = derived(replace(channel_type, dtype="int32"), bias_function, *sources)
    bias_name = draft.add(bias_constant, f"{node.name}_bias")
    attrs: dict[str, Any] = {key: options[key] for key in (*WINDOW, "trans_b") if key in options}
    if is_conv:
        channels = draft.type(x.name).shape[1]
        attrs["groups"] = options.get("groups", channels)
        # padding stands for the number 0, which is ox in int8
        attrs["pad_value"] = x.offset if np.any(options["pad"]) else 0
    integer_op = {"depthwise_conv2d": "conv2d", "gemm": "matmul"}.get(node.op, node.op)
    sums = draft.insert(integer_op, (x.name, weight_name), attrs, f"{node.name}_sums")
    dequantise_attrs: dict[str, Any] = {"dtype": draft.type(node.output).dtype}
    if is_conv and weight.type.elements <= MAX_SHALLOW_PRODUCTS * shape[0]:
        dequantise_attrs |= _small_bias_attr(draft.constants[bias_name])
    scales_name = draft.add(scales_constant, f"{node.name}_scales")
    return (sums, scales_name, bias_name), dequantise_attrs


def _bias_fits(bias: Constant, scales: Constant, step: float, room: int) -> bool:
    """Tell whether the bias, in steps of the sums, is at most `room`, so that sums fit in int32."""
    with np.errstate(all="ignore"):
        bias_steps = bias.array().astype(np.float64).reshape(-1) / (
            scales.array().astype(np.float64).reshape(-1) * step
        )
    return bool(np.all(np.abs(bias_steps) <= room))


def _small_bias_attr(bias: Constant) -> dict[str, bool]:
    """Return the attribute `small_bias` if the bias is small enough for the cube to add it."""
    return {"small_bias": True} if np.abs(bias.array()).max() <= LARGEST_BIAS else {}


def _weight(
    draft: Draft, node: Node, options: Mapping[str, Any]
) -> tuple[Constant, Constant] | None:
    """Return constant int8 weights with offset 0 and their scales, one or one per channel."""
    maker = draft.maker(node.inputs[1])
    if maker is None or maker.op != "dequantise" or len(maker.inputs) > 2:
        return None
    weight = draft.constant(maker.inputs[0])
    if weight is None or (node.op in simplify.PRODUCT_OPS and len(weight.type.shape) != 2):
        return None
    # uint8 weights with zero point 128 are int8 weights with zero point 0
    zero_point = 128 if weight.type.dtype == "uint8" else 0
    if maker.attr("offset", 0) != zero_point or weight.type.dtype not in ("int8", "uint8"):
        return None
    int8_weight = _shifted_to_int8(weight) if zero_point else weight
    single_scale = Constant(
        TensorType((1,), "fp32"), np.array([maker.attr("scale", 1.0)], np.float32)
    )
    if len(maker.inputs) == 1:
        return int8_weight, single_scale
    scales = draft.constant(maker.inputs[1])
    rank = len(weight.type.shape)
    if scales is None or maker.attr("scale", 1.0) != 1:
        return None
    sides = (1,) * (rank - len(scales.type.shape)) + scales.type.shape
    channels_last = node.op in simplify.PRODUCT_OPS and not options.get("trans_b")
    axis = rank - 1 if channels_last else 0
    fits = all(n == 1 or d == axis for d, n in enumerate(sides))
    return (int8_weight, scales) if fits else None


def _shifted_to_int8(weight: Constant) -> Constant:
    """Return uint8 weights minus 128, as int8: 200 becomes 72."""
    int8_type = replace(weight.type, dtype="int8")
    return derived(int8_type, lambda values: values.astype(np.int64) - 128, weight)


def _bias(draft: Draft, node: Node, channels: int) -> Constant | None:
    """Return a constant bias in floats, dequantised if needed: one number, or one per channel."""
    if len(node.inputs) < 3:
        return None
    name = node.inputs[2]
    bias_type = draft.type(name)
    is_per_channel = bias_type.elements == channels and bias_type.shape[-1] == channels
    if bias_type.elements != 1 and not is_per_channel:
        return None
    maker = draft.maker(name)
    if maker is None:
        return draft.constant(name)
    constants = [c for c in map(draft.constant, maker.inputs) if c is not None]
    all_constant = len(constants) == len(maker.inputs)
    if maker.op != "dequantise" or len(maker.inputs) > 2 or not all_constant:
        return None
    options = settings(maker)

    def floats(whole: Values, *scales: Values) -> Values:
        products = (whole.astype(np.float64) - options["offset"]) * options["scale"]
        channel_products: Values = (
            products * scales[0].astype(np.float64).reshape(-1) if scales else products
        )
        return channel_products

    return derived(replace(bias_type, dtype="fp32"), floats, *constants)


def _scales(
    step: float,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    scales: Values,
    weight: Values,
    *bias: Values,
) -> Values:
    """Return the steps of the sums of each channel, sx sw.

    A channel whose weights are all 0 computes only its bias, so any scale is exact for the weights.
    Scales that exporters write there do not suit the bias: with 1 it is rounded to steps of sx,
    with 1e-12 it exceeds int32. Such a channel gets a sixteenth of the others' median step, or more
    if its bias needs it.
    """
    flat = np.broadcast_to(scales.astype(np.float64).reshape(-1) * step, (math.prod(shape),))
    is_zero = ~weight.any(axes).reshape(-1)
    if not is_zero.any():
        return flat.reshape(shape)
    typical_step = step / 127 if is_zero.all() else np.median(flat[~is_zero])
    bias_size = np.abs(bias[0].astype(np.float64).reshape(-1)) if bias else 0.0
    zero_channel_step = np.maximum(typical_step / 16, bias_size / MAX_ZERO_CHANNEL_STEPS)
    return np.where(is_zero, zero_channel_step, flat).reshape(shape)


def _whole_bias(
    x: Int8Tensor,
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
def move_int8(draft: Draft, node: Node) -> bool:
    """Let a reshape, transpose or other move work on int8 numbers instead of dequantised floats."""
    x = int8_behind(draft, node.inputs[0])
    if x is None:
        return False
    moved_int8 = draft.insert(node.op, (x.name,), node.attrs, f"{node.name}_int8")
    attrs = {"scale": x.scale, "offset": x.offset, "dtype": draft.type(node.output).dtype}
    return draft.become(node, "dequantise", (moved_int8,), attrs)


def residual_in_int8(draft: Draft, node: Node) -> bool:
    """Let an addition read a quantised summand in int8, as `add_dequantised`."""
    sides = [int8_behind(draft, name) for name in node.inputs]
    same_shape = len({draft.type(n).shape for n in (*node.inputs, node.output)}) == 1
    if not any(sides) or not same_shape or node.inputs[0] == node.inputs[1]:
        return False
    # the operand that stays in floats: the one without int8, or the one that a layer just wrote
    if sides[0] is None or (sides[1] is not None and _only_first_is_fresh(draft, node)):
        float_operand = 0
    else:
        float_operand = 1
    quantised = sides[1 - float_operand]
    assert quantised is not None
    pair = (node.inputs[float_operand], quantised.name)
    attrs = {"scale": quantised.scale, "offset": quantised.offset}
    return draft.become(node, "add_dequantised", pair, attrs)


def _only_first_is_fresh(draft: Draft, addition: Node) -> bool:
    """Tell whether a layer just wrote the first summand, but not the second one."""
    first, second = addition.inputs
    return _is_fresh(draft, first) and not _is_fresh(draft, second)


def _is_fresh(draft: Draft, name: str) -> bool:
    """Tell whether a tensor comes from a layer and has no other reader."""
    node = draft.only(name, "dequantise")
    if node is None:
        return False
    return draft.type(node.inputs[0]).dtype == "int32" or bool(
        draft.only(node.inputs[0], "requantise", "quantise")
    )


def requantised(draft: Draft, node: Node) -> bool:
    """Let a layer write int8; return whether the graph was rewritten.

    Either its sums are requantised, or a quantise after an equal dequantise is dropped, or both
    summands of an addition are scaled to the steps of the result.
    """
    target = Int8Tensor("", node.attr("scale", 1.0), node.attr("offset", 0))
    if node.attr("dtype", "int8") != "int8":
        return False
    unchanged = int8_behind(draft, node.inputs[0])
    if unchanged and (unchanged.scale, unchanged.offset) == (target.scale, target.offset):
        return draft.forward(node, unchanged.name)
    limits = _limited(draft, node.inputs[0], target)
    source, relu = limits or (node.inputs[0], False)
    sums = draft.only(source, "dequantise")
    if sums is not None and len(sums.inputs) == 3 and not sums.attr("offset", 0):
        scales = _scales_in_steps(draft, sums, target.scale)
        attrs = {"offset": target.offset, "relu": relu}
        if sums.attr("small_bias"):
            attrs["small_bias"] = True
        return draft.become(node, "requantise", (sums.inputs[0], scales, sums.inputs[2]), attrs)
    if target.scale != 1 and _sum_in_result_steps(draft, node, target, (source, relu)):
        return True
    if limits and not relu:
        return draft.become(node, "quantise", (source,), node.attrs)
    return False


def _limited(draft: Draft, name: str, target: Int8Tensor) -> tuple[str, bool] | None:
    """Return (operand, whether it is a ReLU) of a clip that int8 saturation makes superfluous.

    The clip's upper limit must lie beyond step 127; its lower limit beyond step -128, or at 0,
    which makes it a ReLU.
    """
    node = draft.only(name, "clip", *simplify.RELU_LIMITS)
    if node is None:
        return None
    limits = simplify.RELU_LIMITS.get(node.op, (node.attr("low"), node.attr("high")))
    low = -math.inf if limits[0] is None else limits[0]
    high = math.inf if limits[1] is None else limits[1]
    # Steps of 0.05, offset -128: clip(x, 0, 6) ends at 0 / 0.05 - 128 = -128 below, where int8 ends
    # anyway, but at 6 / 0.05 - 128 = -8 above, which saturation does not do.
    low_is_beyond = low / target.scale + target.offset <= -128
    high_is_beyond = high / target.scale + target.offset >= 127
    if high_is_beyond and (low_is_beyond or low == 0):
        return node.inputs[0], not low_is_beyond
    return None


def _scales_in_steps(draft: Draft, dequantise: Node, step: float) -> str:
    """Add the scales of dequantised sums divided by the step of the result; return the name."""
    scales = draft.constants[dequantise.inputs[1]]
    # Sums in steps of 0.0002 and a result in steps of 0.05: one factor of 0.004 does the work of
    # two scalings.
    factor = dequantise.attr("scale", 1.0) / step
    return draft.add(
        derived(scales.type, lambda v: v.astype(np.float64) * factor, scales),
        f"{dequantise.name}_steps",
    )


def _sum_in_result_steps(
    draft: Draft, node: Node, target: Int8Tensor, limited: tuple[str, bool]
) -> bool:
    """Compute a sum of two tensors in steps of its result, with one offset for all three."""
    source, relu = limited
    addition = draft.only(source, "add_dequantised", "add")
    # without a ReLU the offset of the result is part of the sum; with one it is added after it
    shift = 0.0 if relu else -float(target.offset)
    if addition is None:
        return False
    if addition.op == "add":
        is_scaled = _layers_in_steps(draft, addition, target.scale, shift)
    else:
        is_scaled = _residual_in_steps(draft, addition, target.scale, shift)
    if not is_scaled:
        return False
    if not relu:
        return draft.become(node, "quantise", (source,), {})
    # with a ReLU the sum is limited to 0 in steps of the result; int8 limits it above
    rectified = draft.insert("relu", (source,), {}, f"{node.name}_relu")
    return draft.become(node, "quantise", (rectified,), {"offset": target.offset})


def _layers_in_steps(draft: Draft, addition: Node, step: float, shift: float) -> bool:
    """Scale the sums of two added layers to steps of the result, minus `shift`.

    Each layer scales its sums by sx sw / s instead of sx sw, where s is the step of the result.
    """
    dequantise_nodes: list[Node] = []
    for name in addition.inputs:
        dequantise = draft.only(name, "dequantise")
        if dequantise is None or len(dequantise.inputs) != 3:
            return False
        dequantise_nodes.append(dequantise)
    if not all(_can_absorb_shift(draft, node, step, shift) for node in dequantise_nodes):
        return False
    for dequantise, shift_of_layer in zip(dequantise_nodes, (shift, 0.0), strict=True):
        _dequantise_in_result_steps(draft, dequantise, step, shift_of_layer)
    layers = [draft.current(dequantise.name) for dequantise in dequantise_nodes]
    if draft.type(layers[0].output).shape == draft.type(layers[1].output).shape:
        _merge_biases(draft, layers)
    return True


def _residual_in_steps(draft: Draft, addition: Node, step: float, shift: float) -> bool:
    """Scale a layer's sums and a residual in int8 to steps of the result, minus `shift`.

    relu((x - ox) sx + (q - oq) sq) / s = relu(x (sx / s) + (q - o) (sq / s)) with
    o = oq + ox sx / sq.
    """
    dequantise = draft.only(addition.inputs[0], "dequantise")
    if dequantise is None or len(dequantise.inputs) == 2:
        return False
    # A residual in steps of 0.1 and a result in steps of 0.05: the factor is 2.
    scale = addition.attr("scale", 1.0) / step
    shift += addition.attr("offset", 0.0) * scale
    if not _can_absorb_shift(draft, dequantise, step, shift):
        return False
    remaining_shift = _dequantise_in_result_steps(draft, dequantise, step, shift)
    attrs = {"scale": scale, "offset": remaining_shift / scale}
    draft.become(addition, "add_dequantised", draft.current(addition.name).inputs, attrs)
    return True


def _can_absorb_shift(draft: Draft, dequantise: Node, step: float, shift: float) -> bool:
    """Tell whether a shift in steps of the int8 result can be added to int32 sums.

    It can if the steps of the sums are fine enough and the result fits int32.
    """
    if len(dequantise.inputs) == 1:
        return True
    scales = draft.constants[dequantise.inputs[1]].array().astype(np.float64)
    bias = draft.constants[dequantise.inputs[2]].array().astype(np.float64)
    steps = scales * (dequantise.attr("scale", 1.0) / step)
    fits = np.abs(bias) + abs(shift) / steps <= MAX_SUM // 2
    return bool(np.all(fits) and np.all(steps <= MAX_SUM_STEP))


def _dequantise_in_result_steps(draft: Draft, dequantise: Node, step: float, shift: float) -> float:
    """Dequantise sums in steps of the result, minus `shift`; return the shift not yet subtracted.

    A bias has the shift subtracted from it, rounded to whole steps of the sums, so that the error
    is at most half such a step.
    """
    attrs: dict[str, Any] = {"dtype": dequantise.attr("dtype", "fp32")}
    if len(dequantise.inputs) == 1:
        attrs["scale"] = dequantise.attr("scale", 1.0) / step
        draft.become(dequantise, "dequantise", dequantise.inputs, attrs)
        return shift + float(dequantise.attr("offset", 0) * attrs["scale"])
    sums, _, old_bias = dequantise.inputs
    scales_name = _scales_in_steps(draft, dequantise, step)
    scales = draft.constants[scales_name]
    bias = draft.constants[old_bias]
    shifted_bias = derived(
        bias.type, lambda b, s: b - np.rint(shift / s.astype(np.float64)), bias, scales
    )
    attrs |= _small_bias_attr(shifted_bias) if dequantise.attr("small_bias") else {}
    bias_name = draft.add(shifted_bias, f"{dequantise.name}_bias")
    draft.become(dequantise, "dequantise", (sums, scales_name, bias_name), attrs)
    return 0.0


def _merge_biases(draft: Draft, layers: Sequence[Node]) -> None:
    """Let one of two added layers add both biases, with an error of half a step of its sums.

    It is the layer with more taps, or else with larger steps, unless its steps are too small for
    the other layer's bias. `layers` are the `dequantise` nodes behind the two.
    """

    def steps(dequantise: Node) -> Values:
        scales: Values = draft.constants[dequantise.inputs[1]].array()
        return scales.astype(np.float64).reshape(-1)

    def order(dequantise: Node) -> tuple[float, float]:
        layer = draft.maker(dequantise.inputs[0])
        taps = draft.type(layer.inputs[1]).shape[2:] if layer else ()
        return -math.prod(taps), -float(steps(dequantise).mean())

    first, second = sorted(layers, key=order)
    for receiver, giver in ((first, second), (second, first)):
        if np.any(steps(giver) > MAX_STEP_RATIO * steps(receiver)):
            continue
        names = (*receiver.inputs[1:], *giver.inputs[1:])
        constants = [draft.constants[name] for name in names]
        merged = _merged_bias(*(constant.array().astype(np.float64) for constant in constants))
        if np.abs(merged).max() > MAX_SUM // 2:
            continue
        merged_constant = derived(constants[1].type, _merged_bias, *constants)
        receiver_attrs: dict[str, Any] = {"dtype": draft.type(receiver.output).dtype}
        giver_attrs = {"dtype": draft.type(giver.output).dtype}
        if receiver.attr("small_bias"):
            receiver_attrs |= _small_bias_attr(merged_constant)
        bias = draft.add(merged_constant, f"{receiver.name}_bias")
        draft.become(receiver, "dequantise", (*receiver.inputs[:2], bias), receiver_attrs)
        draft.become(giver, "dequantise", giver.inputs[:2], giver_attrs)
        return


def _merged_bias(scale: Values, bias: Values, other_scale: Values, other_bias: Values) -> Values:
    """Return the sum of two layers' biases, in steps of the first layer's sums."""
    return np.asarray(bias + np.rint(other_bias * (other_scale / scale.astype(np.float64))))


def fold(graph: Graph) -> tuple[Graph, int]:
    """Return the graph with integer layers, and the number of rewrites."""
    rewrites = (
        simplify.COMMON.apply,
        sweep(uint8_to_int8, "quantise"),
        sweep(integer_layer, *CONVOLUTIONS, *simplify.PRODUCT_OPS),
        sweep(move_int8, *MOVING),
        sweep(residual_in_int8, "add"),
        sweep(requantised, "quantise"),
    )
    rewritten = graph
    total = 0
    for rewrite in rewrites:
        rewritten, count = rewrite(rewritten)
        total += count
    return rewritten, total


GRAPH_REWRITES = [("RequantFusionPass", fold)]
