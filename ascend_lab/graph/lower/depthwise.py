"""Depthwise convolutions whose weights are computed: packed by a phase of the kernel itself."""

from __future__ import annotations

from dataclasses import replace

from ascend_lab.chip import Chip
from ascend_lab.dsl.handwritten import renamed
from ascend_lab.graph.infer import operator_of
from ascend_lab.graph.ir import TensorType
from ascend_lab.graph.lower.piece import Lowered, Piece
from ascend_lab.graph.lower.stored import maps_between
from ascend_lab.isa import Kernel, Launch
from ascend_lab.kernels import ConvShape
from ascend_lab.kernels.pool_gradient import pool_gradient_launch
from ascend_lab.kernels.pool_rows import PoolGradient
from ascend_lab.layout.launch import maps_launch
from ascend_lab.ops.convolution import geometry

PACKED = "packed"
"""Name of the kernel's own tensor of packed weights, (C1, r, s, 16)."""


def pack_launch(kind: TensorType, weight: str, chip: Chip) -> Launch:
    """Return the phase that packs weights (c, 1, r, s) as an image (1, c, r, s) in NC1HWC0."""
    c, _, r, s = kind.shape
    image = TensorType((1, c, r, s), kind.dtype)
    maps = maps_between(image, replace(image, layout="NC1HWC0"))
    return renamed(maps_launch(*maps, chip, "pack_weights"), {"x": weight, "y": PACKED})


def is_depthwise(piece: Piece) -> bool:
    """Tell whether a transposed convolution has a group per channel, in fp16, not dilated."""
    node, kinds = piece.graph.nodes[0], [piece.type(n) for n in piece.graph.nodes[0].inputs]
    settings = operator_of(node.op).settings(node.attrs)
    _, _, spread = geometry(settings["stride"], settings["pad"], settings["dilation"])
    single = kinds[1].shape[1] == 1 and settings["groups"] == kinds[0].shape[1]
    formats = {kinds[0].dtype, kinds[1].dtype, piece.output.dtype}
    return single and formats == {"fp16"} and spread == (1, 1)


def lower_depthwise_deconv(piece: Piece, chip: Chip) -> Lowered:
    """Return a depthwise transposed convolution on the vector unit: taps added where they fall.

    As forward there, products and sums are fp16 and round once each.
    """
    (node,) = piece.graph.nodes
    (x, weight), (n, c, h, w) = node.inputs, piece.output.shape
    settings = operator_of(node.op).settings(node.attrs)
    step, pads, _ = geometry(settings["stride"], settings["pad"], settings["dilation"])
    r, s = piece.type(weight).shape[2:]
    shape = ConvShape(n, c, h, w, c, r, s, step, (*pads[0], *pads[1]), groups=c)
    launch = pool_gradient_launch(PoolGradient(shape, False, weighted=True), chip)
    own = {"grad": x, "weight": PACKED, "y": piece.graph.outputs[-1]}
    packing = pack_launch(piece.type(weight), weight, chip)
    return Lowered(Kernel(node.op, (packing, renamed(launch, own))))
