"""Elementwise operators behind a cube operator as the epilogue of its kernel.

The operators' tensor expressions are walked in order: every vector operation becomes a step, every
broadcast or copy another name of its source.
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
DEQUANTISING = ("dequantise", "requantise")


class _Chain:
    """Steps written so far and what each tensor is called."""

    def __init__(self, operands: Sequence[Operand]) -> None:
        self.operands = {o.name: o for o in operands}
        self.steps: list[Step] = []
        self.names: dict[te.Tensor, Source] = {}

    def source(self, expr: Expr) -> Source:
        """Return what an expression is called, its steps appended."""
        if isinstance(expr, Load):
            return self.names[expr.tensor]
        assert isinstance(expr, Call)
        # operands first: a step names the tensors that it reads, or earlier steps by number
        sources = tuple(self.source(arg) for arg in expr.args)
        if expr.op == "vcopy":
            return sources[0]
        if expr.op == "vconv" and expr.mode in ("", "rint"):
            operand = self.operands.get(str(sources[0]))
            if operand is not None and operand.kind == "channel":  # converted before the launch
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
    second: Deq | None = None,
) -> Epilogue:
    """Return the epilogue that computes `output` from the sums, dequantised if so, and operands.

    A channel operand whose format changes is called "name.dtype"; the caller packs it so. Raises
    `UnsupportedError` for what is not lane by lane, `InputError` for what epilogues do not do.
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
    for scaling in filter(None, (deq, second)):
        # a scale in fp32 and, if there is one, a bias in int32 that is added before it
        used += tuple(
            Operand(name, "channel", dtype)
            for name, dtype in zip(scaling.names, ("fp32", "int32"), strict=False)
        )
    return Epilogue(used, tuple(chain.steps), output.dtype, deq, second=second)


def whole_epilogue(
    piece: Piece, layout: str, beside: Node | None = None
) -> tuple[Epilogue, TensorType]:
    """Return the epilogue of a cube operator on int8 and how its tiles lie.

    The node behind it scales the int32 sums, and `beside` those of another; raises
    `UnsupportedError` for another.
    """
    node, *followers = piece.graph.nodes[1:]
    dtype = piece.type(node.output).dtype
    formats = {piece.type(n).dtype for m in followers for n in m.inputs if n in piece.graph.inputs}
    has_bytes = "int8" in {piece.output.dtype, *formats}
    main = TensorType(piece.type(node.output).shape, "int8" if has_bytes else "fp16", layout)
    floats = {piece.output.dtype, *formats} - {"int8"}
    # 48 channels: 3 blocks of 16 in fp16, one and a half of 32 in int8
    if has_bytes and floats and main.shape[_axis(main)] % PAIR:
        raise UnsupportedError(f"a multiple of {PAIR} channels", str(main), "run it on its own")
    deqs = [_deq(piece, scaling, main) if scaling else None for scaling in (node, beside)]
    sums = te.placeholder(main.map.piece_shape, dtype, "sums")
    tensors, operands = operands_of(piece, followers, main)
    layouts = {piece.type(o.name).layout for o in operands.values() if o.kind == "tile"}
    if layouts - {layout, "C1NHWC0"}:
        raise UnsupportedError(f"operands in {layout}", str(layouts), "cut here")
    tensors[node.output] = sums
    if beside:
        name = beside.output
        kind = piece.type(beside.output).dtype
        tensors[name] = te.placeholder(main.map.piece_shape, kind, name)
        operands[tensors[name]] = Operand(name, "sums", kind)
    output = expressions(followers, tensors, main)[piece.graph.outputs[-1]]
    return epilogue_of(output, sums, operands, *deqs), main


def _deq(piece: Piece, node: Node, main: TensorType) -> Deq:
    """Return how a node scales int32 sums; raise `UnsupportedError` if not so, per channel."""
    settings = operator_of(node.op).settings(node.attrs)
    constants = node.inputs[1:]  # a scale and perhaps a bias
    # only a result in bytes has a zero point of its own
    plain = node.op == "requantise" or not settings["offset"]
    if node.op not in DEQUANTISING or not constants or settings["scale"] != 1 or not plain:
        raise UnsupportedError("sums scaled per channel", str(node), "run it on its own")
    if not all(is_channel(piece.type(n).shape, main) and n in piece.constants for n in constants):
        raise UnsupportedError("constants per channel", str(node), "run it on its own")
    bias = constants[1] if len(constants) > 1 else ""
    dtype = piece.type(node.output).dtype
    return Deq(constants[0], bias, settings.get("relu", False), settings["offset"], dtype)


def operands_of(
    piece: Piece, nodes: Sequence[Node], main: TensorType
) -> tuple[dict[str, te.Tensor], dict[te.Tensor, Operand]]:
    """Return placeholders of what the nodes behind the first read from memory."""
    tensors: dict[str, te.Tensor] = {}
    operands: dict[te.Tensor, Operand] = {}
    for name in dict.fromkeys(n for node in nodes for n in node.inputs):
        if name not in piece.graph.inputs:
            continue
        kind = piece.type(name)
        # one number for each channel is loaded once; a tile of its own goes with each tile of sums
        channel = kind.elements == 1 or is_channel(kind.shape, main)
        channel = channel and name in piece.constants
        if not channel and kind.shape != main.shape:
            got = f"{piece.names[name]}: {kind}"
            raise UnsupportedError(
                "operands per element, or constants per channel", got, "cut here"
            )
        stored = channels(main) if channel else main.map.piece_shape
        tensors[name] = te.placeholder(stored, kind.dtype, name)
        operands[tensors[name]] = Operand(name, "channel" if channel else "tile", kind.dtype)
    return tensors, operands


def _axis(main: TensorType) -> int:
    """Return the axis of channels (images) or columns (matrices)."""
    return 1 if main.layout == "NC1HWC0" else len(main.shape) - 1


def channels(main: TensorType) -> tuple[int, ...]:
    """Return the stored shape of one number per channel."""
    return tuple(p.count if p.axis == _axis(main) else 1 for p in main.map.pieces)


def is_channel(shape: tuple[int, ...], main: TensorType) -> bool:
    """Tell whether an operand has one number per channel (images) or column (matrices)."""
    # Beside an image of 40 channels (40, 1, 1) fits and (40,) does not; beside a matrix of 40
    # columns (40,) fits.
    sizes = (1,) * (len(main.shape) - len(shape)) + tuple(shape)
    return all(n == (main.shape[i] if i == _axis(main) else 1) for i, n in enumerate(sizes))


def operand_forms(operands: Iterable[Operand], piece: Piece, main: TensorType) -> dict[str, Form]:
    """Return how each operand that is a constant is packed, converted first if its name says so."""
    return {
        o.name: partial(_channels if o.kind == "channel" else _tile, main=main, dtype=o.dtype)
        for o in operands
        if o.name.partition(".")[0] in piece.constants
    }


def _channels(array: Values, *, main: TensorType, dtype: str) -> Values:
    wide = np.zeros(int(np.prod(channels(main))), numpy_type(dtype))
    wide[: None if array.size == 1 else array.size] = array.reshape(-1)
    return wide


def _tile(array: Values, *, main: TensorType, dtype: str) -> Values:
    return packed(replace(main, dtype=dtype), array.astype(numpy_type(dtype)))
