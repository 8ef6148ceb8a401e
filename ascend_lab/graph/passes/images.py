"""Scales and shifts per channel melt into what computes the channel: conv + BN, scale, bias.

y = a (w * x + b) + c = (a w) * x + (a b + c): the new weights are a w, the new bias a b + c, both
computed in fp64 and rounded once, and only when somebody asks for their values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.graph.draft import Draft
from ascend_lab.graph.ir import Constant, Fill, Node, TensorType
from ascend_lab.graph.passes.rewrite import Pass, derived, settings, sweep
from ascend_lab.ops.pooling import geometry
from ascend_lab.ops.shapes import axes_of, pad_pairs, pair

Values = NDArray[Any]
CONVOLUTIONS = ("conv2d", "conv_transpose2d")


@dataclass(frozen=True, slots=True)
class Affine:
    """y = a x + c per channel: constants, and the function of their arrays that gives (a, c)."""

    sources: tuple[Constant, ...]
    factors: Callable[..., tuple[Any, Any]]


def per_channel(rw: Draft, name: str, rank: int, channels: int) -> Constant | None:
    """Return a constant that broadcasts over channels (axis 1) only, or is one number."""
    constant = rw.constant(name)
    if constant is None or len(constant.type.shape) > rank:
        return None
    shape = (1,) * (rank - len(constant.type.shape)) + constant.type.shape
    fits = shape in ((1, channels, *(1,) * (rank - 2)), (1,) * rank)
    return constant if fits else None


def affine_of(rw: Draft, node: Node) -> tuple[str, Affine] | None:
    """Return a node as (what it reads, scale and shift of each channel); None if it is no such."""
    if node.op == "batch_norm":
        return _batch_norm(rw, node)
    if node.op in ("muls", "adds"):
        number = settings(node)["number"]
        pair = (number, 0.0) if node.op == "muls" else (1.0, number)
        return node.inputs[0], Affine((), lambda: pair)
    if node.op not in ("mul", "add"):
        return None
    kind = rw.type(node.output)
    for x, other in (node.inputs, node.inputs[::-1]):
        if len(kind.shape) >= 2 and rw.type(x) == kind:
            found = per_channel(rw, other, len(kind.shape), kind.shape[1])
            if found is not None and node.op == "mul":
                return x, Affine((found,), lambda c: (c.ravel(), 0.0))
            if found is not None:
                return x, Affine((found,), lambda c: (1.0, c.ravel()))
    return None


def _batch_norm(rw: Draft, node: Node) -> tuple[str, Affine] | None:
    """Return a = scale / sqrt(variance + epsilon), c = bias - mean a."""
    parameters = [rw.constant(name) for name in node.inputs[1:]]
    known = tuple(p for p in parameters if p is not None)
    epsilon = settings(node)["epsilon"]

    def factors(scale: Values, bias: Values, mean: Values, variance: Values) -> tuple[Any, Any]:
        a = scale / np.sqrt(variance + epsilon)
        return a, bias - mean * a

    return (node.inputs[0], Affine(known, factors)) if len(known) == len(parameters) else None


def into_convolution(rw: Draft, node: Node) -> bool:
    """Fold a scale and shift into the convolution before it, if nobody else reads that."""
    found = affine_of(rw, node)
    if found is None:
        return False
    conv = rw.only(found[0], *CONVOLUTIONS, "depthwise_conv2d")
    if conv is None or rw.type(conv.output).dtype != rw.type(conv.inputs[0]).dtype:
        return False
    weight = rw.constant(conv.inputs[1])
    bias = rw.constant(conv.inputs[2]) if len(conv.inputs) > 2 else None
    if weight is None or weight.type.dtype == "int8" or (bias is None and len(conv.inputs) > 2):
        return False
    if conv.op == "conv_transpose2d" and conv.attr("groups", 1) != 1:
        return False
    axis = 1 if conv.op == "conv_transpose2d" else 0
    scaled = _weights(rw, conv, weight, found[1], axis) if _scales(node) else conv.inputs[1]
    if conv.op == "depthwise_conv2d":
        return _depthwise(rw, conv, node, scaled, found[1])
    if not _shifts(node) and bias is None:
        return rw.become(conv, conv.op, (conv.inputs[0], scaled), conv.attrs, node)
    shifted = _bias(rw, conv, bias, found[1])
    return rw.become(conv, conv.op, (conv.inputs[0], scaled, shifted), conv.attrs, node)


def _scales(node: Node) -> bool:
    return node.op not in ("add", "adds")


def _shifts(node: Node) -> bool:
    return node.op not in ("mul", "muls")


def _weights(rw: Draft, conv: Node, weight: Constant, affine: Affine, axis: int) -> str:
    """Return the name of the weights times a."""
    column = tuple(-1 if i == axis else 1 for i in range(4))

    def scaled(w: Values, *arrays: Values) -> Values:
        a = np.asarray(affine.factors(*(v.astype(np.float64) for v in arrays))[0], np.float64)
        result: Values = w.astype(np.float64) * (a if a.size == 1 else a.reshape(column))
        return result

    name = f"{conv.inputs[1]}_scaled"
    return rw.add(derived(weight.type, scaled, weight, *affine.sources), name)


def _bias(rw: Draft, conv: Node, bias: Constant | None, affine: Affine) -> str:
    """Return the name of a b + c."""
    out = rw.type(conv.output)
    kind = TensorType((out.shape[1],), out.dtype)
    old = () if bias is None else (bias,)

    def shifted(*arrays: Values) -> Values:
        wide = [v.astype(np.float64) for v in arrays]
        a, c = affine.factors(*wide[len(old) :])
        result: Values = np.broadcast_to(c + (a * wide[0] if old else 0.0), kind.shape)
        return result

    return rw.add(derived(kind, shifted, *old, *affine.sources), f"{conv.name}_bias")


def _depthwise(rw: Draft, conv: Node, node: Node, scaled: str, affine: Affine) -> bool:
    """Scale the weights; the shift stays an addition, for the operator takes no bias."""
    if node.op in ("add", "adds"):
        return False
    if node.op in ("mul", "muls"):
        return rw.become(conv, conv.op, (conv.inputs[0], scaled), conv.attrs, node)
    out = rw.type(conv.output)
    kind = TensorType((out.shape[1], 1, 1), out.dtype)

    def column(*arrays: Values) -> Values:
        shift: Values = affine.factors(*(v.astype(np.float64) for v in arrays))[1]
        return shift.reshape(kind.shape)

    shift = rw.add(derived(kind, column, *affine.sources), f"{conv.name}_shift")
    rw.become(conv, conv.op, (conv.inputs[0], scaled), conv.attrs)
    return rw.become(node, "add", (conv.output, shift))


def into_batch_norm(rw: Draft, node: Node) -> bool:
    """Fold a scale or shift into the batch norm before it."""
    found = affine_of(rw, node)
    norm = None if found is None else rw.only(found[0], "batch_norm")
    if found is None or norm is None or rw.type(norm.inputs[0]) != rw.type(norm.output):
        return False
    scale, bias = (rw.constant(name) for name in norm.inputs[1:3])
    if scale is None or bias is None:
        return False
    affine = found[1]

    def both(old: Values, *arrays: Values) -> tuple[Any, Any]:
        a, c = affine.factors(*(v.astype(np.float64) for v in arrays))
        return old * a, old * a + c

    new = [
        rw.add(derived(one.type, lambda *v, i=i: both(*v)[i], one, *affine.sources), name)
        for i, (one, name) in enumerate(zip((scale, bias), norm.inputs[1:3], strict=True))
    ]
    return rw.become(norm, "batch_norm", (norm.inputs[0], *new, *norm.inputs[3:]), norm.attrs, node)


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
BATCH_NORM_SCALE = Pass(
    "BatchnormScaleFusionPass",
    "fuse",
    sweep(into_batch_norm, "mul", "muls", "add", "adds"),
    "folds factors and summands per channel into the batch norm before them",
    "rounded",
)


# Convolutions that absorb padding, or that are matrix products.


def absorb_padding(rw: Draft, node: Node) -> bool:
    """Let a convolution pad with zeros itself."""
    source = rw.only(node.inputs[0], "pad")
    if source is None or settings(source)["value"] != 0:
        return False
    outer = settings(source)["pads"]
    if any(any(p) for p in outer[:2]):
        return False
    own = pad_pairs("conv2d", settings(node)["pad"])
    pads = tuple((a[0] + b[0], a[1] + b[1]) for a, b in zip(outer[2:], own, strict=True))
    return rw.become(node, node.op, (*source.inputs, *node.inputs[1:]), {**node.attrs, "pad": pads})


def to_matmul(rw: Draft, node: Node) -> bool:
    """Turn a convolution whose window is the whole image into a matrix product (n, c h w).

    One node becomes three: of use where matrix products are what is tuned, not to save nodes.
    """
    x, weight = (rw.type(name) for name in node.inputs[:2])
    options = settings(node)
    whole = x.shape[2:] == weight.shape[2:] and rw.type(node.output).shape[2:] == (1, 1)
    padded = any(map(any, pad_pairs("conv2d", options["pad"])))
    spread = pair("dilation", options["dilation"])
    constant = rw.constant(node.inputs[1])
    bias = rw.constant(node.inputs[2]) if len(node.inputs) > 2 else None
    if not whole or padded or options["groups"] != 1 or constant is None:
        return False
    if spread != (1, 1) and weight.shape[2:] != (1, 1):
        return False
    if options["out_dtype"] or x.dtype == "int8" or (bias is None and len(node.inputs) > 2):
        return False
    k, n = weight.shape[0], x.shape[0]
    inner = weight.elements // k
    flat = derived(TensorType((k, inner), weight.dtype), lambda w: w.reshape(k, inner), constant)
    rows = rw.insert("reshape", node.inputs[:1], {"shape": (n, inner)}, f"{node.name}_rows")
    table = rw.add(flat, f"{node.inputs[1]}_matrix")
    op = "gemm" if bias is not None else "matmul"
    made = rw.insert(op, (rows, table, *node.inputs[2:]), {"trans_b": True}, f"{node.name}_product")
    return rw.become(node, "reshape", [made], {"shape": rw.type(node.output).shape})


PAD_CONV = Pass(
    "PadConv2dFusionPass",
    "fuse",
    sweep(absorb_padding, "conv2d", "depthwise_conv2d"),
    "lets a convolution pad with zeros itself",
)
FULLY_CONNECTED = Pass(
    "ConvToFullyConnectionFusionPass",
    "opt-in",
    sweep(to_matmul, "conv2d"),
    "turns a convolution over a window as large as the image into a matrix product",
    "rounded",
)


# Pooling as a strided convolution, and means over an image.


def mean_of_image(rw: Draft, node: Node) -> bool:
    """Turn the mean over axes 2 and 3 into global_avg_pool."""
    shape = rw.type(node.inputs[0]).shape
    options = settings(node)
    if len(shape) != 4 or axes_of("reduce_mean", options["axis"], shape) != (2, 3):
        return False
    if options["keepdims"]:
        return rw.become(node, "global_avg_pool", node.inputs)
    mean = rw.insert("global_avg_pool", node.inputs, name=f"{node.name}_mean")
    return rw.become(node, "reshape", [mean], {"shape": shape[:2]})


def pool_of_image(rw: Draft, node: Node) -> bool:
    """Turn an average over a window as large as the image into global_avg_pool."""
    shape = rw.type(node.inputs[0]).shape
    size, _, pads = _geometry(node)
    if size != shape[2:] or any(map(any, pads)):
        return False
    return rw.become(node, "global_avg_pool", node.inputs)


def pooling_to_convolution(rw: Draft, node: Node) -> bool:
    """Turn pooling into a convolution of the same window, stride and padding, channel by channel.

    The weights are all 1 / window: for average pooling that counts its padding the results are
    the same; a maximum becomes a mean, and only training the new weights makes up for that.
    """
    kind = rw.type(node.inputs[0])
    size, step, pads = _geometry(node)
    shape = (kind.shape[1], 1, *size)
    weights = Constant(TensorType(shape, kind.dtype), Fill(1.0 / float(np.prod(size))))
    attrs = {"stride": step, "pad": pads, "groups": kind.shape[1]}
    name = rw.add(weights, f"{node.name}_weight")
    return rw.become(node, "conv2d", (node.inputs[0], name), attrs)


def _geometry(node: Node) -> tuple[tuple[int, int], tuple[int, int], tuple[tuple[int, int], ...]]:
    options = settings(node)
    return geometry(*(options[key] for key in ("kernel", "stride", "pad")))


MEAN = Pass(
    "AReduceMeanFusionPass",
    "fuse",
    sweep(mean_of_image, "reduce_mean"),
    "turns a mean over the pixels into global average pooling",
)
GLOBAL_POOL = Pass(
    "GlobalPoolingPass",
    "fuse",
    sweep(pool_of_image, "avg_pool2d"),
    "turns an average over the whole image into global average pooling",
)
POOL_TO_CONV = Pass(
    "PoolingToConvPass",
    "opt-in",
    sweep(pooling_to_convolution, "max_pool2d", "avg_pool2d"),
    "turns pooling into a strided convolution, to be trained again",
    "changed",
)
