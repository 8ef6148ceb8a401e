"""Layer norm and softmax of rows on a matrix that lies in fractals.

In FRACTAL_NZ (.., N1, M1, M0, N0) a row is spread over the axes N1 and N0: folds over a row fold
both. There must be no padding in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ascend_lab import dsl as te
from ascend_lab.chip import Chip
from ascend_lab.dsl.fractals import matrices
from ascend_lab.dsl.tensor import Call, Compute, Expr, Load, topological
from ascend_lab.errors import UnsupportedError
from ascend_lab.graph.ir import Node, TensorType, Values, operator_of
from ascend_lab.graph.lower.piece import Form, Lowered, Piece, beside, pack_beside
from ascend_lab.kernels.epilogue import SUMS, Epilogue, Operand, Step
from ascend_lab.ops.build import own_tensor
from ascend_lab.ops.expressions import in_fp32


def _axes(x: te.Tensor) -> tuple[int, int]:
    return len(x.shape) - 4, len(x.shape) - 1


def _count(x: te.Tensor) -> int:
    first, last = _axes(x)
    return x.shape[first] * x.shape[last]


def _spread(x: te.Tensor, like: te.Tensor) -> te.Tensor:
    return te.broadcast(x, like.shape)


def _layer_norm(
    x: te.Tensor, scale: te.Tensor, bias: te.Tensor, *, axis: int = -1, epsilon: float = 1e-5
) -> te.Tensor:
    share = 1.0 / _count(x)
    mean = te.vmuls(te.reduce_sum(x, _axes(x), keepdims=True), share)
    apart = te.vsub(x, _spread(mean, x))
    square = te.reduce_sum(te.vmul(apart, apart), _axes(x), keepdims=True)
    slope = te.vrsqrt(te.vadds(te.vmuls(square, share), epsilon))
    unit = te.vmul(apart, _spread(slope, x))
    return te.vadd(te.vmul(unit, _spread(scale, x)), _spread(bias, x))


def _softmax(x: te.Tensor, *, axis: int = -1) -> te.Tensor:
    top = te.reduce_max(x, _axes(x), keepdims=True)
    size = te.vexp(te.vsub(x, _spread(top, x)))
    total = te.reduce_sum(size, _axes(x), keepdims=True)
    return te.vdiv(size, _spread(total, x))


ROW_WISE: dict[str, Callable[..., Any]] = {
    "layer_norm": in_fp32(_layer_norm),
    "softmax": in_fp32(_softmax),
}
"""Expressions on FRACTAL_NZ of operators that work along the last axis."""


# Pieces for the vector unit: their operators as one tensor expression, and its schedule.
#
# In a blocked layout the expression runs over the stored shape. That is right for elementwise
# work,
# whose lanes do not care where they lie, and for folds over axes that are not cut into blocks.


IMAGE_FOLDS = {"global_avg_pool": "reduce_mean", "global_max_pool": "reduce_max"}


def lower_vector(piece: Piece, chip: Chip, steps: str = "") -> Lowered:
    """Return the kernel of a piece without cube operators, scheduled by `steps` or by default.

    Raises what scheduling raises.
    """
    results, forms = vector_outputs(piece)
    schedule = te.replay(results, chip, steps) if steps else te.auto_schedule(results, chip)
    fractal = matrices(schedule.state).keys() & {*piece.graph.inputs, *piece.graph.outputs}
    if fractal:
        got = str(piece.graph.nodes[0].op)
        raise UnsupportedError("operators of the vector unit", got, "expand it")
    return Lowered(te.lower(schedule), forms)


def vector_outputs(piece: Piece) -> tuple[list[te.Tensor], dict[str, Form]]:
    """Return what a piece computes as tensor expressions, and how its constants are packed."""
    graph, forms = piece.graph, {}
    tensors: dict[str, te.Tensor] = {}
    main = widest(piece)
    for name in graph.inputs:
        shape, form = operand(piece, name, main)
        tensors[name] = te.placeholder(shape, piece.type(name).dtype, name)
        if form is not None:
            forms[name] = form
    outs = expressions(graph.nodes, tensors, main)
    return [te.renamed(own_tensor(outs[n], graph.inputs), n) for n in graph.outputs], forms


def widest(piece: Piece) -> TensorType:
    """Return the type that says how a piece is laid out: its largest blocked tensor, or output."""
    blocked = [t for t in piece.graph.types.values() if t.layout != "ND"]
    return max(blocked, key=lambda t: t.elements, default=piece.output)


def operand(piece: Piece, name: str, main: TensorType) -> tuple[tuple[int, ...], Form | None]:
    """Return the stored shape of an input beside `main`, and how to pack it if it is constant."""
    kind = piece.type(name)
    if main.layout == "ND":
        return kind.shape or (1,), None
    if name in piece.constants and kind.layout == "ND":
        return beside(kind.shape, main), partial(_flat, main=main)
    if kind.layout != main.layout and kind.elements > 1:
        raise UnsupportedError(
            f"{piece.names[name]} in {main.layout}", kind.layout, "insert a trans_data"
        )
    return (kind.stored_shape if kind.layout != "ND" else (1,)), None


def _flat(array: Values, main: TensorType) -> Values:
    return pack_beside(array, main).reshape(-1)


def expressions(
    nodes: tuple[Node, ...], tensors: Mapping[str, te.Tensor], main: TensorType
) -> dict[str, te.Tensor]:
    """Return the tensors of all names, the nodes' expressions built on the given ones."""
    known = dict(tensors)
    for node in nodes:
        op, attrs = node.op, dict(node.attrs)
        if main.layout != "ND" and op in IMAGE_FOLDS:
            op, attrs = IMAGE_FOLDS[op], {"axis": (2, 3), "keepdims": True}
        given = [known[n] for n in node.inputs]
        if main.layout == "FRACTAL_NZ" and op in ROW_WISE:
            found: Any = ROW_WISE[op](*given, **attrs)
        else:
            found = operator_of(op).expression(*given, **attrs)
        many = found if isinstance(found, tuple) else (found,)
        known.update(zip(node.outputs, many, strict=True))
    return known


# Elementwise operators behind a cube operator as the epilogue of its kernel.
#
# The operators' tensor expressions are walked in order: every vector operation becomes a step,
# every
# broadcast or copy another name of its source.


Source = str | int


class _Chain:
    """Steps written so far and what each tensor is called."""

    def __init__(self, operands: Sequence[Operand]) -> None:
        self.operands = {o.name: o for o in operands}
        self.steps: list[Step] = []
        self.names: dict[te.Tensor, Source] = {}
        self.found: dict[Step, int] = {}

    def kind(self, source: Source) -> str:
        return self.operands[source].kind if source in self.operands else "tile"

    def source(self, expr: Expr) -> Source:
        if isinstance(expr, Load):
            return self.names[expr.tensor]
        assert isinstance(expr, Call)
        sources = tuple(self.source(arg) for arg in expr.args)
        if expr.op == "vcopy":
            return sources[0]
        if expr.op == "vconv" and expr.mode in ("", "rint") and self.kind(sources[0]) == "channel":
            return self.converted(str(sources[0]), expr.format)
        if expr.mode and (expr.op, expr.mode) != ("vconv", "rint"):
            raise UnsupportedError("an operation lane by lane", str(expr), "run it on its own")
        dtype = expr.format if expr.op == "vconv" else ""
        step = Step(expr.op, sources, expr.number, dtype)
        if step not in self.found:
            self.steps.append(step)
            self.found[step] = len(self.steps) - 1
        return self.found[step]

    def converted(self, name: str, dtype: str) -> str:
        """Return the operand with its numbers converted before the launch."""
        new = f"{name.partition('.')[0]}.{dtype}"
        self.operands[new] = replace(self.operands[name], name=new, dtype=dtype)
        return new


def epilogue_of(
    output: te.Tensor, sums: te.Tensor, operands: Mapping[te.Tensor, Operand]
) -> Epilogue:
    """Return the epilogue that computes `output` from the sums and operands.

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
    read = {s for step in chain.steps for s in step.sources}
    used = tuple(o for o in chain.operands.values() if o.name in read)
    return Epilogue(used, tuple(chain.steps), output.dtype)
