"""Grouped products: the rows of each expert times a matrix of its own, in one kernel of ours.

    grouped_matmul               y[rows of g] = x[rows of g] w[g] + bias[g]
    grouped_matmul_swiglu_quant  bytes of silu(a) b, (a, b) = (x[rows of g] w[g]) scale[g] token

The kernel is `ops.grouped`; what stands before and behind it are graphs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ascend_lab.compare.chains.products import FLOATS, in_fractals, known_words, one_dtype_each
from ascend_lab.compare.rows import Work
from ascend_lab.compiler import Graph, GraphBuilder, Node, TensorType
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import shown
from ascend_lab.machine.isa import FRACTAL
from ascend_lab.operators.kernels.epilogue import SUMS, Deq, Epilogue, Operand, Step
from ascend_lab.operators.ops.grouped import GroupedShape

BIAS = Operand("bias", "channel", "fp32")
SCALE = Operand("scale", "channel", "fp32")


@dataclass(frozen=True, slots=True)
class Groups:
    """A grouped product, what is done to its sums, and the graphs before and behind it.

    `behind` reads the result as its input "y". `products` is the same work as a graph, for bounds.
    """

    shape: GroupedShape
    epilogue: Epilogue | None
    products: Graph
    before: Graph | None = None
    behind: Graph | None = None


def _shape(work: Work, out: str) -> GroupedShape:
    """Return the product of a row: x (rows, k), w (groups, k, n), rows of each group."""
    sizes = [len(shape) for shape in work.shapes[:2]]
    rows = work.attributes.get("rows")
    rows = (rows,) if isinstance(rows, int) else rows
    whole = isinstance(rows, tuple) and all(type(count) is int for count in rows)
    if sizes != [2, 3] or not isinstance(rows, tuple) or not whole:
        needed = f"{work.operator}: x (rows, k), w (groups, k, n) and the rows of each group"
        raise InputError(needed, f"{work.shapes[:2]}, rows={shown(rows)}", "mend that row")
    (total, k), (groups, *sides) = work.shapes[:2]
    turned = bool(work.attributes.get("trans_b", False))
    depth, columns = sides[::-1] if turned else sides
    told = work.attributes.get("groups", groups)
    if (depth, len(rows), sum(rows), told) != (k, groups, total, groups):
        needed = f"{work.operator}: {groups} groups with {total} rows in all, of {depth} numbers"
        raise InputError(needed, f"rows={shown(rows)} of x {work.shapes[0]}", "mend that row")
    return GroupedShape(rows, k, columns, work.dtypes[0], out)


def _products(work: Work, shape: GroupedShape) -> Graph:
    """Return a product for each group."""
    net = GraphBuilder(work.operator)
    for group, rows in enumerate(shape.rows):
        if rows:
            x = net.input(f"x{group}", (rows, shape.k), shape.dtype)
            w = net.input(f"w{group}", (shape.k, shape.n), shape.dtype)
            net.output(net.matmul(x, w))
    return net.build()


def grouped_matmul(work: Work) -> Groups:
    """Return x[rows of g] w[g], and plus bias[g] where there is a third input (groups, n)."""
    known_words(work, ("groups", "rows", "trans_b"))
    main = work.dtypes[0] if work.dtypes else ""
    count = len(work.shapes)
    if main not in FLOATS or count not in (2, 3) or len(work.dtypes) not in (1, count):
        needed = f"{work.operator}: x and w in fp16 or bf16, and a bias"
        raise UnsupportedError(needed, f"{count} in {', '.join(work.dtypes)}", "none is guessed")
    shape = _shape(work, main)
    if count == 2:
        return Groups(shape, None, _products(work, shape))
    if work.shapes[2] != (len(shape.rows), shape.n):
        needed = f"{work.operator}: a bias of {len(shape.rows)} x {shape.n}"
        raise InputError(needed, str(work.shapes[2]), "mend that row")
    steps = Step("vadd", (SUMS, BIAS.name)), Step("vconv", (0,), dtype=main)
    return Groups(shape, Epilogue((BIAS,), steps, main), _products(work, shape))


def swiglu_quant(work: Work) -> Groups:
    """Return bytes of silu(a) b and a scale of each row: x, w in int8, scales (groups, n), (rows,).

    Before it the weights, row-major in memory, are brought into the cube's blocks, as the measured
    chain does.
    """
    known_words(work, ("groups", "rows"))
    dtypes = one_dtype_each(work)
    if dtypes != ("int8", "int8", "fp32", "fp32"):
        needed = f"{work.operator}: x, w in int8, scales of columns and rows in fp32"
        raise UnsupportedError(needed, ", ".join(dtypes), "none is guessed")
    shape = _shape(work, "int32")
    scales = (len(shape.rows), shape.n), (sum(shape.rows),)
    if work.shapes[2:] != scales or shape.n % (2 * FRACTAL):
        needed = f"{work.operator}: scales of {scales}, columns in blocks of {2 * FRACTAL}"
        raise InputError(needed, str(work.shapes[2:]), "mend that row")
    epilogue = Epilogue((SCALE,), (), "fp32", Deq(SCALE.name, dtype="fp32"))
    before = _in_blocks(TensorType(work.shapes[1], "int8"))
    return Groups(shape, epilogue, _products(work, shape), before, _gated(work, shape))


def _in_blocks(kind: TensorType) -> Graph:
    """Return a graph that brings matrices into blocks."""
    types = {"w": kind, "blocks": replace(kind, layout="FRACTAL_NZ")}
    node = Node("blocks", "trans_data", ("w",), ("blocks",), {"layout": "FRACTAL_NZ"})
    return Graph("weights", ("w",), ("blocks",), (node,), types)


def _gated(work: Work, shape: GroupedShape) -> Graph:
    """Return bytes q and scales s of q s = silu(y1 token) (y2 token), rows of groups filled up."""
    rows, half = shape.whole.m, shape.n // 2
    net = GraphBuilder(work.operator, "fp32")
    y, token = net.input("y", (rows, shape.n)), net.input("token", (rows, 1))
    gate, value = (
        net.mul(net.slice(y, begin=(0, first), end=(rows, end)), token)
        for first, end in ((0, half), (half, shape.n))
    )
    gated = net.mul(net.silu(gate), value)
    scale = net.muls(net.reduce_max(net.abs(gated), axis=-1, keepdims=True), number=1 / 127)
    net.output(net.cast(net.div(gated, scale), dtype="int8"))
    net.output(scale)
    return in_fractals(net.build(), {"y": "FRACTAL_NZ"})


def spans(shape: GroupedShape) -> list[tuple[int, int]]:
    """Return the first and the last row, of the filled up ones, of each group."""
    ends = accumulate((height * FRACTAL for height in shape.heights), initial=0)
    return list(pairwise(ends))


BUILDERS: Mapping[str, Callable[[Work], Groups]] = {
    "grouped_matmul": grouped_matmul,
    "grouped_matmul_swiglu_quant": swiglu_quant,
}
"""The table's name for a kernel -> its builder."""
