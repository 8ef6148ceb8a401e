"""Passes on images: convolutions absorb the batch norms, scales, biases and padding around them.

y = a (w * x + b) + c = (a w) * x + (a b + c): the new weights are a w, the new bias is a b + c.
Both are computed in fp64 and rounded once, and only when they are read. Further passes turn a mean
over an image into pooling, and pooling or a convolution over the image into cheaper forms.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.ir import Constant, Fill, Node, TensorType, Values
from ascend_lab.compiler.passes.rewrite import Pass, derived, rewrites, settings, sweep
from ascend_lab.operators.ops import formats, pooling


@dataclass(frozen=True, slots=True)
class Affine:
    """y = a x + c per channel: constants, and a function that computes (a, c) from their arrays."""

    sources: tuple[Constant, ...]
    factors: Callable[..., tuple[Any, Any]]

    def wide(self, arrays: tuple[Values, ...]) -> tuple[Any, Any]:
        """Return (a, c) in fp64."""
        return self.factors(*(array.astype(np.float64) for array in arrays))


def per_channel(draft: Draft, name: str, rank: int, channels: int) -> Constant | None:
    """Return a constant if it has one number for each channel (axis 1), or one for all.

    Returns None for other tensors.
    """
    constant = draft.constant(name)
    if constant is None or len(constant.type.shape) > rank:
        return None
    # (16, 1, 1) and (1, 16, 1, 1) broadcast to an image's 16 channels; (16,) to its width
    shape = (1,) * (rank - len(constant.type.shape)) + constant.type.shape
    is_per_channel = shape in ((1, channels, *(1,) * (rank - 2)), (1,) * rank)
    return constant if is_per_channel else None


def affine_of(draft: Draft, node: Node) -> tuple[str, Affine] | None:
    """Return (operand, scale and shift per channel) of a node a x + c; None for other nodes."""
    if node.op == "batch_norm":
        epsilon = settings(node)["epsilon"]

        def normalisation(
            scale: Values, bias: Values, mean: Values, variance: Values
        ) -> tuple[Any, Any]:
            # scale (x - mean) / sqrt(variance + epsilon) + bias = a x + (bias - mean a)
            # scale 2, bias 1, mean 3, variance 4: a = 2 / 2 = 1 and c = 1 - 3 = -2.
            # a negative variance gives NaN, which the compiler names; NumPy need not warn as well
            with np.errstate(invalid="ignore", divide="ignore"):
                a = scale / np.sqrt(variance + epsilon)
            return a, bias - mean * a

        constants = tuple(c for c in map(draft.constant, node.inputs[1:]) if c is not None)
        return (node.inputs[0], Affine(constants, normalisation)) if len(constants) == 4 else None
    if node.op in ("muls", "adds"):
        number = settings(node)["number"]
        scale_shift = (number, 0.0) if node.op == "muls" else (1.0, number)
        return node.inputs[0], Affine((), lambda: scale_shift)
    if node.op not in ("mul", "add"):
        return None
    kind = draft.type(node.output)
    for x, operand in (node.inputs, node.inputs[::-1]):
        if len(kind.shape) >= 2 and draft.type(x) == kind:
            column = per_channel(draft, operand, len(kind.shape), kind.shape[1])
            if column is not None and node.op == "mul":
                return x, Affine((column,), lambda c: (c.ravel(), 0.0))
            if column is not None:
                return x, Affine((column,), lambda c: (1.0, c.ravel()))
    return None


def into_convolution(draft: Draft, node: Node) -> bool:
    """Fold a scale and shift into the convolution before it, if that has no other reader."""
    affine = affine_of(draft, node)
    if affine is None:
        return node.op == "add" and _move_bias(draft, node)
    conv = draft.only(affine[0], "conv2d", "conv_transpose2d", "depthwise_conv2d")
    if conv is None or draft.type(conv.output).dtype != draft.type(conv.inputs[0]).dtype:
        return False
    weight = draft.constant(conv.inputs[1])
    has_bias = len(conv.inputs) > 2
    bias = draft.constant(conv.inputs[2]) if has_bias else None
    if weight is None or weight.type.dtype == "int8" or (has_bias and bias is None):
        return False
    is_transposed = conv.op == "conv_transpose2d"
    is_depthwise = conv.op == "depthwise_conv2d"
    # a batch norm scales and shifts, a `mul` only scales, an `add` only shifts
    scales = node.op not in ("add", "adds")
    shifts = node.op not in ("mul", "muls")
    # with groups, output channels of a transposed convolution are spread over both weight axes
    if (is_transposed and conv.attr("groups", 1) != 1) or (is_depthwise and not scales):
        return False
    inputs = [conv.inputs[0], conv.inputs[1]]
    if scales:
        inputs[1] = _weights(draft, conv, weight, affine[1], 1 if is_transposed else 0)
    # a depthwise convolution takes no bias: the shift stays an addition
    if is_depthwise and shifts:
        shift = _summand(draft, conv, None, affine[1], (1, 1), "shift")
        draft.become(conv, conv.op, inputs, conv.attrs)
        return draft.become(node, "add", (conv.output, shift))
    if not is_depthwise and (shifts or has_bias):
        inputs.append(_summand(draft, conv, bias, affine[1], (), "bias"))
    return draft.become(conv, conv.op, inputs, conv.attrs, node)


def _move_bias(draft: Draft, node: Node) -> bool:
    """Move the sum of two added convolutions' biases to the one with more kernel elements."""
    convolutions = [conv for name in node.inputs if (conv := draft.only(name, "conv2d"))]
    if len(convolutions) < 2 or draft.type(convolutions[0].output) != draft.type(
        convolutions[1].output
    ):
        return False

    def taps_and_stride(conv: Node) -> tuple[int, int]:
        strides = formats.pair("stride", settings(conv)["stride"])
        # the larger kernel comes first; of equal kernels, that with the smaller stride
        return -math.prod(draft.type(conv.inputs[1]).shape[2:]), strides[0]

    receiver, donor = sorted(convolutions, key=taps_and_stride)
    biases = [
        c
        for conv in convolutions
        if (c := draft.constant(conv.inputs[-1])) and len(conv.inputs) > 2
    ]
    if len(donor.inputs) < 3 or len(biases) < sum(len(conv.inputs) > 2 for conv in convolutions):
        return False
    bias_sum = derived(biases[0].type, lambda *a: sum(b.astype(np.float64) for b in a), *biases)
    draft.become(
        receiver,
        "conv2d",
        (*receiver.inputs[:2], draft.add(bias_sum, f"{receiver.name}_bias")),
        receiver.attrs,
    )
    return draft.become(donor, "conv2d", donor.inputs[:2], donor.attrs)


def _weights(draft: Draft, conv: Node, weight: Constant, affine: Affine, axis: int) -> str:
    """Add the constant a w; return its name."""
    # output channels: axis 0 of (Co, Ci, Kh, Kw), axis 1 of a transposed convolution's weights;
    # 8 factors for weights (8, 3, 3, 3) get the shape (8, 1, 1, 1)
    column = tuple(-1 if i == axis else 1 for i in range(4))

    def scaled_values(w: Values, *arrays: Values) -> Values:
        a = np.asarray(affine.wide(arrays)[0], np.float64)
        result: Values = w * (a if a.size == 1 else a.reshape(column))
        return result

    scaled_weight = derived(weight.type, scaled_values, weight, *affine.sources)
    return draft.add(scaled_weight, f"{conv.inputs[1]}_scaled")


def _summand(
    draft: Draft,
    conv: Node,
    bias: Constant | None,
    affine: Affine,
    trailing_sizes: Sequence[int],
    suffix: str,
) -> str:
    """Add the constant a b + c, a number for each channel; return its name."""
    out = draft.type(conv.output)
    kind = TensorType((out.shape[1], *trailing_sizes), out.dtype)
    biases = () if bias is None else (bias,)

    def shifted_values(*arrays: Values) -> Values:
        a, c = affine.wide(arrays[len(biases) :])
        scaled_bias = a * arrays[0].astype(np.float64) if biases else 0.0
        return np.broadcast_to(c + scaled_bias, kind.shape[:1]).reshape(kind.shape)

    return draft.add(
        derived(kind, shifted_values, *biases, *affine.sources), f"{conv.name}_{suffix}"
    )


CONV_BATCH_NORM = Pass(
    "ConvBatchnormFusionPass",
    "fuse",
    sweep(into_convolution, "batch_norm"),
    "folds batch norm into the weights and bias of the convolution before it",
    "rounded",
)
CONV_SCALE = Pass(
    "ConvScaleFusionPass",
    "fuse",
    sweep(into_convolution, "mul", "muls"),
    "folds a factor per channel into the convolution before it",
    "rounded",
)
CONV_BIAS = Pass(
    "AABiasaddConvFusion",
    "fuse",
    sweep(into_convolution, "add", "adds"),
    "makes a summand per channel the bias of the convolution before it",
    "rounded",
)


@rewrites("BatchnormScaleFusionPass", "mul", "muls", "add", "adds", values="rounded")
def batch_norm_scale(draft: Draft, node: Node) -> bool:
    """Fold factors and summands per channel into the batch norm before them."""
    affine_pair = affine_of(draft, node)
    norm = None if affine_pair is None else draft.only(affine_pair[0], "batch_norm")
    if affine_pair is None or norm is None or draft.type(norm.inputs[0]) != draft.type(norm.output):
        return False
    scale, bias = (draft.constant(name) for name in norm.inputs[1:3])
    if scale is None or bias is None:
        return False
    affine = affine_pair[1]

    def combined(place: int, values: Values, *arrays: Values) -> Values:
        a, c = affine.wide(arrays)
        result: Values = (values * a, values * a + c)[place]
        return result

    parameters = [
        draft.add(derived(constant.type, partial(combined, i), constant, *affine.sources), name)
        for i, (constant, name) in enumerate(zip((scale, bias), norm.inputs[1:3], strict=True))
    ]
    reads = (norm.inputs[0], *parameters, *norm.inputs[3:])
    return draft.become(norm, "batch_norm", reads, norm.attrs, node)


# -- padding, windows as large as the image -------------------------------------------------------
@rewrites("PadConv2dFusionPass", "conv2d", "depthwise_conv2d")
def pad_conv(draft: Draft, node: Node) -> bool:
    """Merge a zero padding into the `pad` attribute of the convolution after it."""
    source = draft.only(node.inputs[0], "pad")
    if source is None or settings(source)["value"] != 0:
        return False
    pad_widths = settings(source)["pads"]
    if any(any(p) for p in pad_widths[:2]):
        return False
    conv_pads = formats.pad_pairs("conv2d", settings(node)["pad"])
    pads = tuple((a[0] + b[0], a[1] + b[1]) for a, b in zip(pad_widths[2:], conv_pads, strict=True))
    reads = (*source.inputs, *node.inputs[1:])
    return draft.become(node, node.op, reads, {**node.attrs, "pad": pads})


@rewrites("ConvToFullyConnectionFusionPass", "conv2d", stage="opt-in", values="rounded")
def fully_connected(draft: Draft, node: Node) -> bool:
    """Turn a convolution over a window as large as the image into a matrix product (n, c h w).

    One node becomes three: this helps only where products are faster or tuned better.
    """
    x, weight = (draft.type(name) for name in node.inputs[:2])
    options = settings(node)
    out = draft.type(node.output)
    constants = [draft.constant(name) for name in node.inputs[1:]]
    covers_image = x.shape[2:] == weight.shape[2:] and out.shape[2:] == (1, 1)
    padded = any(map(any, formats.pad_pairs("conv2d", options["pad"])))
    if (
        not covers_image
        or padded
        or options["groups"] != 1
        or constants[0] is None
        or None in constants
    ):
        return False
    if formats.pair("dilation", options["dilation"]) != (1, 1) and weight.shape[2:] != (1, 1):
        return False
    if options["out_dtype"] or x.dtype == "int8":
        return False
    features = weight.shape[0]
    images = x.shape[0]
    # k features, each a sum over all c h w numbers of an image
    row_size = weight.elements // features
    kind = TensorType((features, row_size), weight.dtype)
    flat = derived(kind, lambda w: w.reshape(features, row_size), constants[0])
    rows = draft.insert(
        "reshape", node.inputs[:1], {"shape": (images, row_size)}, f"{node.name}_rows"
    )
    reads = (rows, draft.add(flat, f"{node.inputs[1]}_matrix"), *node.inputs[2:])
    op = "gemm" if len(constants) > 1 else "matmul"
    products = draft.insert(op, reads, {"trans_b": True}, f"{node.name}_product")
    return draft.become(node, "reshape", [products], {"shape": out.shape})


# -- pooling --------------------------------------------------------------------------------------
def _window(node: Node) -> tuple[tuple[int, int], tuple[int, int], tuple[tuple[int, int], ...]]:
    options = settings(node)
    return pooling.geometry(*(options[key] for key in ("kernel", "stride", "pad")))


@rewrites("AReduceMeanFusionPass", "reduce_mean")
def mean_of_image(draft: Draft, node: Node) -> bool:
    """Turn a mean over the pixels into global average pooling."""
    shape = draft.type(node.inputs[0]).shape
    options = settings(node)
    if len(shape) != 4 or formats.axes_of("reduce_mean", options["axis"], shape) != (2, 3):
        return False
    if options["keepdims"]:
        return draft.become(node, "global_avg_pool", node.inputs)
    mean = draft.insert("global_avg_pool", node.inputs, name=f"{node.name}_mean")
    return draft.become(node, "reshape", [mean], {"shape": shape[:2]})


@rewrites("GlobalPoolingPass", "avg_pool2d")
def pool_of_image(draft: Draft, node: Node) -> bool:
    """Turn an average over the whole image into global average pooling."""
    kernel, _, pads = _window(node)
    covers_image = kernel == draft.type(node.inputs[0]).shape[2:] and not any(map(any, pads))
    return covers_image and draft.become(node, "global_avg_pool", node.inputs)


@rewrites("PoolingToConvPass", "max_pool2d", "avg_pool2d", stage="opt-in", values="changed")
def pool_to_conv(draft: Draft, node: Node) -> bool:
    """Turn pooling into a strided convolution, to be trained again.

    The weights are all 1 / window: for average pooling that counts its padding the results are
    the same; a maximum becomes a mean, so that the new weights have to be trained.
    """
    kind = draft.type(node.inputs[0])
    (kernel, stride, pads) = _window(node)
    channels = kind.shape[1]
    weights = TensorType((channels, 1, *kernel), kind.dtype)
    filled = Constant(weights, Fill(1.0 / float(np.prod(kernel))))
    attrs = {"stride": stride, "pad": pads, "groups": channels}
    name = draft.add(filled, f"{node.name}_weight")
    return draft.become(node, "conv2d", (node.inputs[0], name), attrs)
