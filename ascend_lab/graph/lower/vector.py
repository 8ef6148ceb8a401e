"""Pieces for the vector unit: their operators as one tensor expression, and its schedule.

In a blocked layout the expression runs over the stored shape. That is right for elementwise work,
whose lanes do not care where they lie, and for folds over axes that are not cut into blocks. In
FRACTAL_NZ (.., N1, M1, M0, N0) a row is spread over the axes N1 and N0, without padding: a layer
norm or softmax of rows folds both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ascend_lab import dsl as te
from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.dsl.fractals import matrices
from ascend_lab.errors import UnsupportedError
from ascend_lab.graph.ir import CUBE_LAYOUTS, Node, TensorType, operator_of
from ascend_lab.graph.lower.piece import Form, Lowered, Piece, beside, pack_beside
from ascend_lab.isa import Kernel
from ascend_lab.isa.program import renamed
from ascend_lab.layout.moves import maps_launch
from ascend_lab.ops.build import own_tensor
from ascend_lab.ops.expressions import in_fp32

IMAGE_FOLDS = {"global_avg_pool": "reduce_mean", "global_max_pool": "reduce_max"}


def lower_vector(piece: Piece, chip: Chip, steps: str = "") -> Lowered:
    """Return the kernel of a piece without cube operators, scheduled by `steps` or by default.

    Raises what scheduling raises.
    """
    results, forms = vector_outputs(piece)
    schedule = te.replay(results, chip, steps) if steps else te.auto_schedule(results, chip)
    if matrices(schedule.state).keys() & {*piece.graph.inputs, *piece.graph.outputs}:
        raise UnsupportedError("operators of the vector unit", piece.graph.nodes[0].op, "expand it")
    return Lowered(te.lower(schedule), forms)


def mixed_blocks(piece: Piece) -> tuple[str, ...]:
    """Return the bytes in blocks of 32 that a piece has beside numbers in blocks of 16."""
    graph = piece.graph
    outside = [n for n in (*graph.inputs, *graph.outputs) if piece.type(n).layout in CUBE_LAYOUTS]
    wide = [n for n in outside if DTYPE_BYTES[piece.type(n).dtype] == 1]
    return tuple(wide) if len(wide) < len(outside) else ()


def lower_mixed(piece: Piece, chip: Chip) -> Lowered:
    """Return the kernel of a piece with `mixed_blocks`: bytes are brought to blocks of 16 before.

    Bytes it writes lie in blocks of 16 at first. Raises as `lower_vector`.
    """
    whole, graph = mixed_blocks(piece), piece.graph
    types = {
        n: replace(t, layout=f"{t.layout}:16") if t.layout in CUBE_LAYOUTS else t
        for n, t in graph.types.items()
    }
    inner = lower_vector(Piece(replace(graph, types=types), piece.constants, piece.names), chip)
    halves = {name: f"halves_{name}" for name in whole}
    before, after = [], []
    for name, own in halves.items():
        maps = (replace(graph.types[name].map, format="ND"), replace(types[name].map, format="ND"))
        if name in graph.inputs:
            launch = maps_launch(*maps, chip, "halves")
            before.append(renamed(launch, {"x": name, "y": own}))
        else:
            launch = maps_launch(*maps[::-1], chip, "whole")
            after.append(renamed(launch, {"x": own, "y": name}))
    phases = [renamed(phase, halves) for phase in inner.kernel.phases]
    return Lowered(Kernel(inner.kernel.name, (*before, *phases, *after)), inner.forms, inner.extra)


def vector_outputs(piece: Piece) -> tuple[list[te.Tensor], dict[str, Form]]:
    """Return what a piece computes as tensor expressions, and how its constants are packed."""
    graph = piece.graph
    forms: dict[str, Form] = {}
    tensors: dict[str, te.Tensor] = {}
    blocked = [t for t in graph.types.values() if t.layout != "ND"]
    main = max(blocked, key=lambda t: t.elements, default=piece.output)  # says how all is laid out
    for name in graph.inputs:
        shape, form = operand(piece, name, main)
        tensors[name] = te.placeholder(shape, piece.type(name).dtype, name)
        if form is not None:
            forms[name] = form
    outs = expressions(graph.nodes, tensors, main)
    return [te.renamed(own_tensor(outs[n], graph.inputs), n) for n in graph.outputs], forms


def operand(piece: Piece, name: str, main: TensorType) -> tuple[tuple[int, ...], Form | None]:
    """Return the stored shape of an input beside `main`, and how to pack it if it is constant."""
    kind = piece.type(name)
    if main.layout == "ND":
        return kind.shape or (1,), None
    if name in piece.constants and kind.layout == "ND":
        return beside(kind.shape, main), partial(pack_beside, main=main)
    if kind.layout != main.layout and kind.elements > 1:
        raise UnsupportedError(
            f"{piece.names[name]} in {main.layout}", kind.layout, "insert a trans_data"
        )
    return (kind.stored_shape if kind.layout != "ND" else (1,)), None


def expressions(
    nodes: Sequence[Node], tensors: Mapping[str, te.Tensor], main: TensorType
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


# -- rows in fractals -----------------------------------------------------------------------------
def _row(x: te.Tensor) -> tuple[int, int]:
    return len(x.shape) - 4, len(x.shape) - 1


def _layer_norm(
    x: te.Tensor, scale: te.Tensor, bias: te.Tensor, *, axis: int = -1, epsilon: float = 1e-5
) -> te.Tensor:
    first, last = _row(x)
    share = 1.0 / (x.shape[first] * x.shape[last])
    mean = te.vmuls(te.reduce_sum(x, _row(x), keepdims=True), share)
    apart = te.vsub(x, te.broadcast(mean, x.shape))
    square = te.reduce_sum(te.vmul(apart, apart), _row(x), keepdims=True)
    slope = te.vrsqrt(te.vadds(te.vmuls(square, share), epsilon))
    unit = te.vmul(apart, te.broadcast(slope, x.shape))
    scaled = te.vmul(unit, te.broadcast(scale, x.shape))
    return te.vadd(scaled, te.broadcast(bias, x.shape))


def _softmax(x: te.Tensor, *, axis: int = -1) -> te.Tensor:
    top = te.reduce_max(x, _row(x), keepdims=True)
    size = te.vexp(te.vsub(x, te.broadcast(top, x.shape)))
    total = te.reduce_sum(size, _row(x), keepdims=True)
    return te.vdiv(size, te.broadcast(total, x.shape))


ROW_WISE: dict[str, Callable[..., Any]] = {
    "layer_norm": in_fp32(_layer_norm),
    "softmax": in_fp32(_softmax),
}
"""Expressions on FRACTAL_NZ of operators that work along the last axis."""
