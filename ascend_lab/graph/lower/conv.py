"""Depthwise convolutions whose weights are computed: packed by a phase of the kernel itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from ascend_lab import dsl as te
from ascend_lab.chip import Chip
from ascend_lab.errors import AscendLabError, UnsupportedError
from ascend_lab.graph.ir import Node, TensorType, Values, operator_of
from ascend_lab.graph.lower.piece import Form, Lowered, Piece, maps_between, packed
from ascend_lab.graph.lower.vector import epilogue_of, expressions
from ascend_lab.isa import Kernel, Launch
from ascend_lab.isa.program import renamed
from ascend_lab.kernels import (
    ConvShape,
    DeconvShape,
    GemmSchedule,
    conv_launch,
    depthwise_launch,
    pack_deconv,
)
from ascend_lab.kernels.conv_windows import dense_placement
from ascend_lab.kernels.deconv import phases_of
from ascend_lab.kernels.epilogue import Epilogue, Operand
from ascend_lab.kernels.gemm_schedule import ACCUMULATOR
from ascend_lab.kernels.packing import bundle_weights
from ascend_lab.kernels.pool_gradient import PoolGradient, pool_gradient_launch
from ascend_lab.layout import address_map, pack
from ascend_lab.layout.moves import maps_launch
from ascend_lab.ops.convolution import geometry
from ascend_lab.ops.deconvolution import deconv_shape
from ascend_lab.ops.expressions import narrow
from ascend_lab.ops.formats import numpy_type
from ascend_lab.ops.operator import Call
from ascend_lab.sim import simulate_kernel

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


# Convolutions with what follows them lane by lane, on images in NC1HWC0.


def conv_shape_of(piece: Piece, node: Node, out_dtype: str) -> ConvShape:
    """Return the node's convolution as the kernels describe it."""
    (n, c, h, w), (k, _, r, t) = (piece.type(name).shape for name in node.inputs[:2])
    step, pads, spread = geometry(*(node.attr(key, value) for key, value in _GEOMETRY))
    groups = c if node.op == "depthwise_conv2d" else node.attr("groups", 1)
    dtype, sides = piece.type(node.inputs[0]).dtype, (*pads[0], *pads[1])
    return ConvShape(n, c, h, w, k, r, t, step, sides, dtype, out_dtype, spread, groups)


_GEOMETRY = (("stride", 1), ("pad", 0), ("dilation", 1))


def lower_conv(piece: Piece, chip: Chip, tiling: GemmSchedule | None = None) -> Lowered:
    """Return the convolution at the head of a piece, its bias and the rest as its epilogue.

    Where every channel is a group of its own there are two ways, on the cube with zeros between the
    channels of a block, and on the vector unit: the faster one is taken. A given tiling is for the
    cube.
    """
    node = piece.graph.nodes[0]
    shape = conv_shape_of(piece, node, piece.output.dtype)
    fixed = node.inputs[1] in piece.constants
    if piece.type(node.inputs[1]).layout != "FRACTAL_Z":
        if not fixed and by_vector(shape):
            return _lower_conv(piece, chip, vector=True)
        _refuse_computed(piece, node.inputs[1])
    if tiling or not fixed or not by_vector(shape):
        return _lower_conv(piece, chip, vector=False, tiling=tiling)
    found, failure = [], None
    for vector in (True, False):
        try:
            found.append(_lower_conv(piece, chip, vector=vector))
        except AscendLabError as error:
            failure = error
    if not found:
        assert failure is not None
        raise failure
    return min(found, key=lambda way: simulate_kernel(way.kernel, chip).cycles)


def _lower_conv(
    piece: Piece, chip: Chip, *, vector: bool, tiling: GemmSchedule | None = None
) -> Lowered:
    node = piece.graph.nodes[0]
    shape, epilogue, operands = conv_job(piece, chip, vector=vector)
    x, weight = node.inputs[:2]
    form: Form = _depthwise_weights if vector else partial(_weights, shape)
    if vector:
        launch = depthwise_launch(shape, chip, dense=True, epilogue=epilogue)
    else:
        launch = conv_launch(shape, chip, tiling, dense_placement(shape), epilogue)
    fixed = weight in piece.constants
    packing = (pack_launch(piece.type(weight), weight, chip),) if vector and not fixed else ()
    own = {"x": x, "weight": PACKED if packing else weight, "y": piece.graph.outputs[-1]}
    forms = {weight: form, **operands} if fixed else operands
    return Lowered(Kernel(node.op, (*packing, renamed(launch, own))), forms)


def conv_job(
    piece: Piece, chip: Chip, *, vector: bool = False
) -> tuple[ConvShape, Epilogue | None, dict[str, Form]]:
    """Return the convolution at the head of a piece, what follows it, and operands' forms."""
    node = piece.graph.nodes[0]
    epilogue, operands = conv_epilogue(piece, node, chip, vector=vector)
    out_dtype = epilogue.out_dtype if epilogue else piece.output.dtype
    return conv_shape_of(piece, node, out_dtype), epilogue, operands


def _refuse_computed(piece: Piece, weight: str) -> None:
    """Raise `UnsupportedError` for weights that are no constants, which nothing has packed."""
    if weight not in piece.constants:
        got = f"{piece.names[weight]}: {piece.type(weight)}"
        raise UnsupportedError("constant weights, or neither groups nor phases", got, "fix them")


def by_vector(shape: ConvShape) -> bool:
    """Tell whether every channel is a group of its own: work for the vector unit."""
    return shape.groups == shape.c == shape.k and (shape.dtype, shape.out_dtype) == ("fp16",) * 2


def _depthwise_weights(array: Values) -> Values:
    image = array.reshape(1, array.shape[0], *array.shape[2:])
    return pack(address_map("NC1HWC0", image.shape, "fp16"), image).reshape(-1)


def lower_deconv(piece: Piece, chip: Chip) -> Lowered:
    """Return a transposed convolution: one plain one per phase of the stride, each its weights."""
    (node,) = piece.graph.nodes
    x, weight = node.inputs
    if weight not in piece.constants and is_depthwise(piece):
        return lower_depthwise_deconv(piece, chip)
    _refuse_computed(piece, weight)
    types = [piece.type(n) for n in node.inputs]
    settings = operator_of(node.op).settings(node.attrs)
    shapes, dtypes = tuple(t.shape for t in types), tuple(t.dtype for t in types)
    shape = deconv_shape(Call(shapes, dtypes, settings, (piece.output.shape,)))
    oh, ow = shape.out_hw
    launches, forms = [], {}
    for number, phase in enumerate(phases_of(shape)):
        name, place = f"{weight}.{number}", replace(phase.place, plane=oh * ow)
        names = {"x": x, phase.place.weight: name, "y": piece.graph.outputs[0]}
        launches.append(renamed(conv_launch(phase.conv, chip, place=place), names))
        forms[name] = partial(_phase_weights, shape, phase.place.weight)
    return Lowered(Kernel(node.op, tuple(launches)), forms)


def _phase_weights(shape: DeconvShape, name: str, array: Values) -> Values:
    image = np.zeros((shape.n, shape.c, shape.h, shape.w), array.dtype)
    return pack_deconv(shape, image, array)[name].reshape(-1)


def _weights(shape: ConvShape, array: Values) -> Values:
    """Pack the weights as FRACTAL_Z, a bundle of groups after the other."""
    parts = bundle_weights(shape, array.astype(numpy_type(shape.dtype), copy=False))
    return np.concatenate(
        [pack(address_map("FRACTAL_Z", p.shape, shape.dtype), p).reshape(-1) for p in parts]
    )


def conv_epilogue(
    piece: Piece, node: Node, chip: Chip, *, vector: bool
) -> tuple[Epilogue | None, dict[str, Form]]:
    """Return the epilogue for a bias and the nodes behind the first, and how operands are packed.

    None if there is nothing to do. Where sums pass UB they are rounded to the result's format on
    the way, and a bias is added to that: half the vector work, two roundings instead of one.
    """
    nodes = piece.graph.nodes[1:]
    bias = node.inputs[2:3]
    if not nodes and not bias:
        return None, {}
    first = piece.type(node.output)
    wide = ACCUMULATOR[piece.type(node.inputs[0]).dtype]
    main = replace(first, layout="NC1HWC0", dtype="fp16")
    stored = main.map.piece_shape
    sums = te.placeholder(stored, "fp16" if vector else wide, "sums")
    known, operands = operands_of(piece, nodes, main)
    y = narrow(sums, first.dtype) if chip.combined or vector else sums
    if bias:
        column = te.placeholder(channels(main), y.dtype, bias[0])
        operands[column] = Operand(bias[0], "channel", y.dtype)
        y = te.vadd(y, te.broadcast(column, y.shape))
    known[node.output] = narrow(y, first.dtype)
    found = expressions(nodes, known, main)
    epilogue = epilogue_of(found[piece.graph.outputs[-1]], sums, operands)
    return epilogue, operand_forms(epilogue, piece, main)


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
        channel = name in piece.constants and is_channel(kind.shape, main)
        if not channel and kind.shape != main.shape:
            got = f"{piece.names[name]}: {kind}"
            raise UnsupportedError(
                "operands per element, or constants per channel", got, "cut here"
            )
        stored = channels(main) if channel else main.map.piece_shape
        known[name] = te.placeholder(stored, kind.dtype, name)
        operands[known[name]] = Operand(name, "channel" if channel else "tile", kind.dtype)
    return known, operands


def channel_axis(main: TensorType) -> int:
    """Return the axis of channels (images) or columns (matrices)."""
    return 1 if main.layout == "NC1HWC0" else len(main.shape) - 1


def channels(main: TensorType) -> tuple[int, ...]:
    """Return the stored shape of one number per channel."""
    axis = channel_axis(main)
    return tuple(p.count if p.axis == axis else 1 for p in main.map.pieces)


def is_channel(shape: tuple[int, ...], main: TensorType) -> bool:
    """Tell whether an operand has one number per channel (images) or column (matrices)."""
    axis = channel_axis(main)
    sizes = (1,) * (len(main.shape) - len(shape)) + tuple(shape)
    return all(n == (main.shape[i] if i == axis else 1) for i, n in enumerate(sizes))


def operand_forms(epilogue: Epilogue, piece: Piece, main: TensorType) -> dict[str, Form]:
    """Return how each operand that is a constant is packed, converted first if its name says so."""
    forms: dict[str, Form] = {}
    for operand in epilogue.operands:
        if operand.name.partition(".")[0] in piece.constants:
            pack_it = _channels if operand.kind == "channel" else _tile
            forms[operand.name] = partial(pack_it, main=main, dtype=operand.dtype)
    return forms


def _channels(array: Values, *, main: TensorType, dtype: str) -> Values:
    wide = np.zeros(int(np.prod(channels(main))), numpy_type(dtype))
    wide[: array.size] = array.reshape(-1)
    return wide


def _tile(array: Values, *, main: TensorType, dtype: str) -> Values:
    return packed(replace(main, dtype=dtype), array.astype(numpy_type(dtype)))
