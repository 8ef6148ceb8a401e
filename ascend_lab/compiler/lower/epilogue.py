"""Turns the elementwise operators after a cube operator into the epilogue of its kernel.

An epilogue is what the kernel of a cube operator does to its sums on their way out: with bias and
ReLU after a convolution, it adds a number per channel and then takes the maximum with 0. Each
vector operation of the operators' tensor expressions becomes a step, in order; a broadcast or copy
is only a new name for its source.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ascend_lab.compiler.ir import Node, TensorType, Values, operator_of
from ascend_lab.compiler.lower.piece import Form, Piece, packed
from ascend_lab.compiler.lower.vector import expressions
from ascend_lab.errors import UnsupportedError
from ascend_lab.operators import dsl as te
from ascend_lab.operators.dsl.tensor import Call, Compute, Expr, Load, topological
from ascend_lab.operators.kernels.epilogue import PAIR, SUMS, Deq, Epilogue, Operand, Step
from ascend_lab.operators.ops.formats import numpy_type

Source = str | int
"""An operand's name, or the number of an earlier step."""
DEQUANTISING = ("dequantise", "requantise")


class _Chain:
    """The steps emitted so far, and the name or step number of each tensor."""

    def __init__(self, operands: Sequence[Operand]) -> None:
        self.operands = {o.name: o for o in operands}
        self.steps: list[Step] = []
        self.names: dict[te.Tensor, Source] = {}

    def source(self, expr: Expr) -> Source:
        """Append the steps of an expression.

        Returns the operand name or step number of its result.
        """
        if isinstance(expr, Load):
            return self.names[expr.tensor]
        assert isinstance(expr, Call)
        # operands first: a step names the tensors that it reads, or earlier steps by number
        sources = tuple(self.source(arg) for arg in expr.args)
        if expr.op == "vcopy":
            return sources[0]
        if expr.op == "vconv" and expr.mode in ("", "rint"):
            operand = self.operands.get(str(sources[0]))
            # one number per channel is converted before the launch
            if operand is not None and operand.kind == "channel":
                converted = f"{operand.name.partition('.')[0]}.{expr.format}"
                self.operands[converted] = replace(operand, name=converted, dtype=expr.format)
                return converted
        if expr.mode and (expr.op, expr.mode) != ("vconv", "rint"):
            raise UnsupportedError("an operation lane by lane", str(expr), "run it on its own")
        step = Step(expr.op, sources, expr.number, expr.format if expr.op == "vconv" else "")
        # a value that is used twice is computed once
        if step not in self.steps:
            self.steps.append(step)
        return self.steps.index(step)


def epilogue_of(
    output: te.Tensor,
    sums: te.Tensor,
    operands: Mapping[te.Tensor, Operand],
    deq: Deq | None = None,
    second_deq: Deq | None = None,
) -> Epilogue:
    """Return the epilogue that computes `output` from the sums and operands.

    If `deq` is given, the sums are int32 and are dequantised first: scaled to floats by a number
    per channel. `second_deq` does so with the sums of another cube operator. A channel operand
    whose format changes is called "name.dtype"; the caller packs it in that format. Raises
    `UnsupportedError` for operations that are not elementwise, `InputError` for operations that
    epilogues do not have.
    """
    chain = _Chain(list(operands.values()))
    chain.names = {sums: SUMS, **{tensor: o.name for tensor, o in operands.items()}}
    for tensor in topological((output,)):
        if tensor in chain.names:
            continue
        body = tensor.body
        if not isinstance(body, Compute) or body.fold:
            raise UnsupportedError("elementwise operators", tensor.label, "end the group before it")
        chain.names[tensor] = chain.source(body.expr)
    # relu(sums + bias) has two steps: vadd of the sums and an operand, vrelu of step 0
    read = {s for step in chain.steps for s in step.sources}
    used = tuple(o for o in chain.operands.values() if o.name in read)
    for scaling in filter(None, (deq, second_deq)):
        # a scale in fp32 and, if there is one, a bias in int32 that is added before it
        used += tuple(
            Operand(name, "channel", dtype)
            for name, dtype in zip(scaling.names, ("fp32", "int32"), strict=False)
        )
    return Epilogue(used, tuple(chain.steps), output.dtype, deq, second=second_deq)


def int8_epilogue(
    piece: Piece, layout: str, second_node: Node | None = None
) -> tuple[Epilogue, TensorType]:
    """Return the epilogue of an int8 cube operator, and the type of its tiles.

    Node 1 of the piece dequantises its int32 sums; `second_node`, if given, dequantises those of a
    second cube operator. Raises `UnsupportedError` for any other node in these places.
    """
    scaling_node, *followers = piece.graph.nodes[1:]
    dtype = piece.type(scaling_node.output).dtype
    formats = {piece.type(n).dtype for m in followers for n in m.inputs if n in piece.graph.inputs}
    has_int8 = "int8" in {piece.output.dtype, *formats}
    tile_type = TensorType(
        piece.type(scaling_node.output).shape, "int8" if has_int8 else "fp16", layout
    )
    floats = {piece.output.dtype, *formats} - {"int8"}
    # 48 channels: 3 blocks of 16 in fp16, one and a half of 32 in int8
    if has_int8 and floats and tile_type.shape[_channel_axis(tile_type)] % PAIR:
        raise UnsupportedError(
            f"a multiple of {PAIR} channels", str(tile_type), "run it on its own"
        )
    deq = _deq(piece, scaling_node, tile_type)
    second_deq = _deq(piece, second_node, tile_type) if second_node else None
    sums = te.placeholder(tile_type.map.piece_shape, dtype, "sums")
    tensors, operands = operands_of(piece, followers, tile_type)
    layouts = {piece.type(o.name).layout for o in operands.values() if o.kind == "tile"}
    if layouts - {layout, "C1NHWC0"}:
        raise UnsupportedError(f"operands in {layout}", str(layouts), "cut here")
    tensors[scaling_node.output] = sums
    if second_node:
        name = second_node.output
        second_dtype = piece.type(second_node.output).dtype
        tensors[name] = te.placeholder(tile_type.map.piece_shape, second_dtype, name)
        operands[tensors[name]] = Operand(name, "sums", second_dtype)
    output = expressions(followers, tensors, tile_type)[piece.graph.outputs[-1]]
    return epilogue_of(output, sums, operands, deq, second_deq), tile_type


def _deq(piece: Piece, node: Node, tile_type: TensorType) -> Deq:
    """Return how a node scales int32 sums; raise `UnsupportedError` unless it is per channel."""
    settings = operator_of(node.op).settings(node.attrs)
    constants = node.inputs[1:]  # a scale and perhaps a bias
    # only an int8 result has a zero point
    has_no_offset = node.op == "requantise" or not settings["offset"]
    if node.op not in DEQUANTISING or not constants or settings["scale"] != 1 or not has_no_offset:
        raise UnsupportedError("sums scaled per channel", str(node), "run it on its own")
    if not all(
        is_channel(piece.type(n).shape, tile_type) and n in piece.constants for n in constants
    ):
        raise UnsupportedError("constants per channel", str(node), "run it on its own")
    bias = constants[1] if len(constants) > 1 else ""
    dtype = piece.type(node.output).dtype
    return Deq(constants[0], bias, settings.get("relu", False), settings["offset"], dtype)


def operands_of(
    piece: Piece, nodes: Sequence[Node], tile_type: TensorType
) -> tuple[dict[str, te.Tensor], dict[te.Tensor, Operand]]:
    """Return placeholders and operands for the tensors that `nodes` read from memory."""
    tensors: dict[str, te.Tensor] = {}
    operands: dict[te.Tensor, Operand] = {}
    for name in dict.fromkeys(n for node in nodes for n in node.inputs):
        if name not in piece.graph.inputs:
            continue
        tensor_type = piece.type(name)
        # one number per channel is loaded once; other operands load a tile with each tile of sums
        has_channel_shape = tensor_type.elements == 1 or is_channel(tensor_type.shape, tile_type)
        is_per_channel = has_channel_shape and name in piece.constants
        if not is_per_channel and tensor_type.shape != tile_type.shape:
            got = f"{piece.names[name]}: {tensor_type}"
            raise UnsupportedError(
                "operands per element, or constants per channel", got, "cut here"
            )
        stored = channels(tile_type) if is_per_channel else tile_type.map.piece_shape
        tensors[name] = te.placeholder(stored, tensor_type.dtype, name)
        kind = "channel" if is_per_channel else "tile"
        operands[tensors[name]] = Operand(name, kind, tensor_type.dtype)
    return tensors, operands


def _channel_axis(tile_type: TensorType) -> int:
    """Return the axis of channels (images) or columns (matrices)."""
    return 1 if tile_type.layout == "NC1HWC0" else len(tile_type.shape) - 1


def channels(tile_type: TensorType) -> tuple[int, ...]:
    """Return the stored shape of one number per channel."""
    return tuple(p.count if p.axis == _channel_axis(tile_type) else 1 for p in tile_type.map.pieces)


def is_channel(shape: tuple[int, ...], tile_type: TensorType) -> bool:
    """Tell whether an operand has one number per channel (images) or column (matrices)."""
    # for an image of 40 channels, (40, 1, 1) has one number per channel and (40,) has not; for a
    # matrix of 40 columns, (40,) has one number per column
    sizes = (1,) * (len(tile_type.shape) - len(shape)) + tuple(shape)
    return all(
        n == (tile_type.shape[i] if i == _channel_axis(tile_type) else 1)
        for i, n in enumerate(sizes)
    )


def operand_forms(
    operands: Iterable[Operand], piece: Piece, tile_type: TensorType
) -> dict[str, Form]:
    """Return the packing function of each constant operand; "name.dtype" is converted to dtype."""
    forms: dict[str, Form] = {}
    for operand in operands:
        if operand.name.partition(".")[0] in piece.constants:
            pack = _pack_channels if operand.kind == "channel" else _pack_tile
            forms[operand.name] = partial(pack, tile_type=tile_type, dtype=operand.dtype)
    return forms


def _pack_channels(array: Values, *, tile_type: TensorType, dtype: str) -> Values:
    """Return one number per channel, with zeros for the channels that fill the last block."""
    padded = np.zeros(int(np.prod(channels(tile_type))), numpy_type(dtype))
    if array.size == 1:
        padded[:] = array.item()
    else:
        padded[: array.size] = array.ravel()
    return padded


def _pack_tile(array: Values, *, tile_type: TensorType, dtype: str) -> Values:
    """Return a tensor of the result's shape in the layout of the result's tiles."""
    return packed(replace(tile_type, dtype=dtype), array.astype(numpy_type(dtype)))
