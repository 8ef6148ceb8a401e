"""Convolutions with what follows them lane by lane, on images in NC1HWC0."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from ascend_lab import dsl as te
from ascend_lab.chip import Chip
from ascend_lab.dsl.handwritten import renamed
from ascend_lab.errors import UnsupportedError
from ascend_lab.graph.ir import Node, TensorType
from ascend_lab.graph.lower.chain import epilogue_of
from ascend_lab.graph.lower.piece import Form, Lowered, Piece, Values
from ascend_lab.graph.lower.stored import beside, pack_beside
from ascend_lab.graph.lower.vector import expressions
from ascend_lab.isa import Kernel
from ascend_lab.kernels import ConvShape, conv_launch
from ascend_lab.kernels.conv_groups import bundle_weights
from ascend_lab.kernels.conv_place import dense_placement
from ascend_lab.kernels.epilogue import Epilogue, Operand
from ascend_lab.kernels.gemm_schedule import ACCUMULATOR
from ascend_lab.layout import address_map, pack
from ascend_lab.ops.convolution import geometry
from ascend_lab.ops.formats import numpy_type
from ascend_lab.ops.lifting import narrow


def conv_shape_of(piece: Piece, node: Node, out_dtype: str) -> ConvShape:
    """Return the node's convolution as the kernels describe it."""
    (n, c, h, w), (k, _, r, t) = (piece.type(name).shape for name in node.inputs[:2])
    step, pads, spread = geometry(*(node.attr(key, value) for key, value in _GEOMETRY))
    groups = c if node.op == "depthwise_conv2d" else node.attr("groups", 1)
    dtype, sides = piece.type(node.inputs[0]).dtype, (*pads[0], *pads[1])
    return ConvShape(n, c, h, w, k, r, t, step, sides, dtype, out_dtype, spread, groups)


_GEOMETRY = (("stride", 1), ("pad", 0), ("dilation", 1))


def lower_conv(piece: Piece, chip: Chip) -> Lowered:
    """Return the convolution at the head of a piece, its bias and the rest as its epilogue."""
    node, out = piece.graph.nodes[0], piece.output
    epilogue, operands = conv_epilogue(piece, node)
    shape = conv_shape_of(piece, node, epilogue.out_dtype if epilogue else out.dtype)
    launch = conv_launch(shape, chip, place=dense_placement(shape), epilogue=epilogue)
    x, weight = node.inputs[:2]
    own = {"x": x, "weight": weight, "y": piece.graph.outputs[-1]}
    kernel = Kernel("conv2d", (renamed(launch, own),))
    return Lowered(kernel, {weight: partial(_weights, shape), **operands})


def _weights(shape: ConvShape, array: Values) -> Values:
    """Pack the weights as FRACTAL_Z, a bundle of groups after the other."""
    parts = bundle_weights(shape, array.astype(numpy_type(shape.dtype), copy=False))
    return np.concatenate(
        [pack(address_map("FRACTAL_Z", p.shape, shape.dtype), p).reshape(-1) for p in parts]
    )


def conv_epilogue(piece: Piece, node: Node) -> tuple[Epilogue | None, dict[str, Form]]:
    """Return the epilogue for a bias and the nodes behind the first, and how operands are packed.

    None if there is nothing to do.
    """
    nodes = piece.graph.nodes[1:]
    bias = node.inputs[2:3]
    if not nodes and not bias:
        return None, {}
    first = piece.type(node.output)
    wide = ACCUMULATOR[piece.type(node.inputs[0]).dtype]
    main = replace(first, layout="NC1HWC0", dtype="fp16")
    sums = te.placeholder(beside(first.shape, main), wide, "sums")
    known, operands = operands_of(piece, nodes, main)
    y = sums
    if bias:
        column = te.placeholder(beside((first.shape[1], 1, 1), main), wide, bias[0])
        operands[column] = Operand(bias[0], "channel", wide)
        y = te.vadd(sums, te.broadcast(column, sums.shape))
    known[node.output] = narrow(y, first.dtype)
    found = expressions(nodes, known, main)
    epilogue = epilogue_of(found[piece.graph.outputs[-1]], sums, operands)
    return epilogue, channel_forms(epilogue, piece, main)


def operands_of(
    piece: Piece, nodes: tuple[Node, ...], main: TensorType
) -> tuple[dict[str, te.Tensor], dict[te.Tensor, Operand]]:
    """Return placeholders of what the nodes behind the first read from memory."""
    known: dict[str, te.Tensor] = {}
    operands: dict[te.Tensor, Operand] = {}
    for name in dict.fromkeys(n for node in nodes for n in node.inputs):
        if name not in piece.graph.inputs:
            continue
        kind = piece.type(name)
        stored = beside(kind.shape, main)
        tile = stored == beside(main.shape, main)
        if not tile and name not in piece.constants:
            raise UnsupportedError("an epilogue of constants per channel", name, "run it apart")
        if not tile and not is_channel(kind.shape, main):
            raise UnsupportedError("one number per channel", str(kind), "run it on its own")
        known[name] = te.placeholder(stored, kind.dtype, name)
        operands[known[name]] = Operand(name, "tile" if tile else "channel", kind.dtype)
    return known, operands


def is_channel(shape: tuple[int, ...], main: TensorType) -> bool:
    """Tell whether an operand has one number per channel (images) or column (matrices)."""
    axis = 1 if main.layout == "NC1HWC0" else len(main.shape) - 1
    sizes = (1,) * (len(main.shape) - len(shape)) + tuple(shape)
    return all(n == (main.shape[i] if i == axis else 1) for i, n in enumerate(sizes))


def channel_forms(epilogue: Epilogue, piece: Piece, main: TensorType) -> dict[str, Form]:
    """Return how each operand that is a constant is packed, converted first if its name says so."""
    forms: dict[str, Form] = {}
    for operand in epilogue.operands:
        if operand.name.partition(".")[0] in piece.constants:
            shape = piece.type(operand.name.partition(".")[0]).shape
            sizes = (*shape, 1, 1) if main.layout == "NC1HWC0" and len(shape) == 1 else shape
            forms[operand.name] = partial(_operand, main=main, dtype=operand.dtype, shape=sizes)
    return forms


def _operand(array: Values, *, main: TensorType, dtype: str, shape: tuple[int, ...]) -> Values:
    packed = pack_beside(array.reshape(shape).astype(numpy_type(dtype)), main)
    return packed.reshape(-1)
