"""Pieces for the vector unit: their operators as one tensor expression, and its schedule.

In a blocked layout the expression runs over the stored shape. That is right for elementwise work,
whose lanes do not care where they lie, and for folds over axes that are not cut into blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ascend_lab import dsl as te
from ascend_lab.chip import Chip
from ascend_lab.dsl.lower import matrices
from ascend_lab.errors import UnsupportedError
from ascend_lab.graph.infer import operator_of
from ascend_lab.graph.ir import Node, TensorType
from ascend_lab.graph.lower.piece import Form, Lowered, Piece, Values
from ascend_lab.graph.lower.rows import ROW_WISE
from ascend_lab.graph.lower.stored import beside, pack_beside
from ascend_lab.ops.build import own_tensor

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
