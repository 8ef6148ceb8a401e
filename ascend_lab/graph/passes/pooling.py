"""Pooling as a strided convolution, and means over an image."""

from __future__ import annotations

import numpy as np

from ascend_lab.graph.edit import Draft
from ascend_lab.graph.ir import Constant, Fill, Node, TensorType
from ascend_lab.graph.passes.rewrite import Pass, settings, sweep
from ascend_lab.ops.pooling import geometry
from ascend_lab.ops.shapes import axes_of


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
