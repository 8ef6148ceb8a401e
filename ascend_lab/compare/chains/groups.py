"""Builds measured grouped products: handwritten kernels, with graphs for the steps around them.

    grouped_matmul               y[rows of g] = x[rows of g] w[g] + bias[g]
    grouped_matmul_swiglu_quant  bytes of silu(a) b, (a, b) = (x[rows of g] w[g]) scale[g] token
    weight_quant_batch_matmul    y = x ((w + offset) scale) + bias, w in int8

scale[g] has a number for each column, `token` one for each row, which is a token of a text.
A mixture of experts sends each row to one expert g; rows are sorted, so that the rows of an expert
are adjacent: with counts (3, 0, 5) rows 0 .. 2 are multiplied by w[0] and rows 3 .. 7 by w[2]. The
product is a kernel of `ops.grouped`, or of `kernels.weight_quant` where weights in int8 are widened
on the way. Conversions of its operands and steps on its result are graphs, which are compiled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ascend_lab.compare.chains.products import (
    FLOATS,
    column,
    in_fractals,
    known_words,
    one_dtype_each,
    product_of,
)
from ascend_lab.compare.rows import Work
from ascend_lab.compiler import Graph, GraphBuilder, Node, TensorType
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import shown
from ascend_lab.machine import isa
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.operators.kernels.epilogue import SUMS, Deq, Epilogue, Operand, Step
from ascend_lab.operators.kernels.weight_quant import WeightQuantShape, weight_quant_launch
from ascend_lab.operators.ops.grouped import GroupedShape, default_grouped

BIAS = Operand("bias", "channel", "fp32")
SCALE = Operand("scale", "channel", "fp32")


@dataclass(frozen=True, slots=True)
class Groups:
    """A grouped product, its epilogue, and the graphs of the kernels before and after it.

    products         the same work as a graph of separate products, from which the lower bound of
                     the time is computed
    operand_graph    writes the kernel's operands a and b, in its launch if `together`, else before
    result_graph     reads the kernel's result as its input "y"
    """

    shape: GroupedShape
    epilogue: Epilogue | None
    products: Graph
    operand_graph: Graph | None = None
    result_graph: Graph | None = None
    together: bool = False

    def kernel(self, chip: Chip) -> isa.Kernel:
        """Return the kernel; raises what `default_grouped` raises."""
        return default_grouped(self.shape, chip, self.epilogue)


@dataclass(frozen=True, slots=True)
class WidenedWeights:
    """A product with int8 weights in a single kernel, with no graph before or after it."""

    shape: WeightQuantShape
    products: Graph
    operand_graph: None = None
    result_graph: None = None
    together: bool = False

    def kernel(self, chip: Chip) -> isa.Kernel:
        """Return the kernel; raises what `weight_quant_launch` raises."""
        return isa.as_kernel(weight_quant_launch(self.shape, chip))


def _shape(work: Work, out: str) -> GroupedShape:
    """Return the product of a table's row: x (rows, k), w (groups, k, n), the rows of each group.

    Raises `InputError` if these sizes contradict one another.
    """
    sizes = [len(shape) for shape in work.shapes[:2]]
    rows = work.attributes.get("rows")
    # a table's row with a single group has a number here instead of a tuple
    rows = (rows,) if isinstance(rows, int) else rows
    counts_are_integers = isinstance(rows, tuple) and all(type(count) is int for count in rows)
    if sizes != [2, 3] or not isinstance(rows, tuple) or not counts_are_integers:
        needed = f"{work.operator}: x (rows, k), w (groups, k, n) and the rows of each group"
        raise InputError(needed, f"{work.shapes[:2]}, rows={shown(rows)}", "correct that row")
    (total, k), (groups, *sides) = work.shapes[:2]
    is_transposed = bool(work.attributes.get("trans_b", False))
    # with trans_b, w is stored as (n, k)
    depth, columns = sides[::-1] if is_transposed else sides
    groups_in_row = work.attributes.get("groups", groups)
    if (depth, len(rows), sum(rows), groups_in_row) != (k, groups, total, groups):
        needed = f"{work.operator}: {groups} groups with {total} rows in all, of {depth} numbers"
        raise InputError(needed, f"rows={shown(rows)} of x {work.shapes[0]}", "correct that row")
    return GroupedShape(rows, k, columns, work.dtypes[0], out)


def _products(work: Work, shape: GroupedShape) -> Graph:
    """Return a graph with one product for each group that has rows."""
    net = GraphBuilder(work.operator)
    for group, rows in enumerate(shape.rows):
        # rows = (3, 0, 5) gives two products: a group without rows has none
        if rows:
            x = net.input(f"x{group}", (rows, shape.k), shape.dtype)
            w = net.input(f"w{group}", (shape.k, shape.n), shape.dtype)
            net.output(net.matmul(x, w))
    return net.build()


def grouped_matmul(work: Work) -> Groups:
    """Return x[rows of g] w[g], plus bias[g] if there is a third input (groups, n).

    Operands whose rows are not a multiple of 32 bytes are converted to fractals first: the cube's
    loads move whole blocks of 32 bytes.
    """
    known_words(work, ("groups", "rows", "trans_b"))
    dtype = work.dtypes[0] if work.dtypes else ""
    count = len(work.shapes)
    if dtype not in FLOATS or count not in (2, 3) or len(work.dtypes) not in (1, count):
        needed = f"{work.operator}: x and w in fp16 or bf16, and a bias"
        raise UnsupportedError(needed, f"{count} in {', '.join(work.dtypes)}", "none is guessed")
    shape = _shape(work, dtype)
    layouts = {"a": "FRACTAL_NZ", "b": "FRACTAL_ZN"}
    if work.attributes.get("trans_b", False):
        layouts["b"] = "FRACTAL_NZ"
    ragged_operands = {}
    for name, operand_shape in zip("ab", work.shapes, strict=False):
        # 100 columns in fp16 are 200 bytes, 6.25 blocks: such rows are converted
        if operand_shape[-1] * DTYPE_BYTES[dtype] % BLOCK_BYTES:
            ragged_operands[name] = (TensorType(operand_shape, dtype), layouts[name])
    conversions = _in_blocks(ragged_operands)
    if count == 2:
        return Groups(shape, None, _products(work, shape), conversions, together=True)
    if work.shapes[2] != (len(shape.rows), shape.n):
        needed = f"{work.operator}: a bias of {len(shape.rows)} x {shape.n}"
        raise InputError(needed, str(work.shapes[2]), "correct that row")
    # bf16 sums are fp32: add the bias, then round once
    steps = Step("vadd", (SUMS, BIAS.name)), Step("vconv", (0,), dtype=dtype)
    epilogue = Epilogue((BIAS,), steps, dtype)
    return Groups(shape, epilogue, _products(work, shape), conversions, together=True)


def swiglu_quant(work: Work) -> Groups:
    """Return silu(a) b in int8 and a scale per row: x, w in int8, scales (groups, n) and (rows,).

    The weights are stored row by row and first converted to fractals, as in the measured chain.
    """
    known_words(work, ("groups", "rows"))
    dtypes = one_dtype_each(work)
    if dtypes != ("int8", "int8", "fp32", "fp32"):
        needed = f"{work.operator}: x, w in int8, scales of columns and rows in fp32"
        raise UnsupportedError(needed, ", ".join(dtypes), "none is guessed")
    shape = _shape(work, "int32")
    scales = (len(shape.rows), shape.n), (sum(shape.rows),)
    # a and b are the halves of a row, and each must be whole fractals of 16 columns
    if work.shapes[2:] != scales or shape.n % (2 * isa.FRACTAL):
        needed = f"{work.operator}: scales of {scales}, columns in blocks of {2 * isa.FRACTAL}"
        raise InputError(needed, str(work.shapes[2:]), "correct that row")
    epilogue = Epilogue((SCALE,), (), "fp32", Deq(SCALE.name, dtype="fp32"))
    conversions = _in_blocks({"b": (TensorType(work.shapes[1], "int8"), "FRACTAL_NZ")})
    return Groups(
        shape=shape,
        epilogue=epilogue,
        products=_products(work, shape),
        operand_graph=conversions,
        result_graph=_gated(work, shape),
    )


def _in_blocks(tensors: Mapping[str, tuple[TensorType, str]]) -> Graph | None:
    """Return a graph that converts NAME_rows to NAME for each of `tensors`; None if there are none.

    Each entry gives the type of a tensor and its layout.
    """
    nodes = list[Node]()
    types = dict[str, TensorType]()
    for name, (kind, layout) in tensors.items():
        types |= {f"{name}_rows": kind, name: replace(kind, layout=layout)}
        nodes.append(Node(name, "trans_data", (f"{name}_rows",), (name,), {"layout": layout}))
    inputs = tuple(f"{name}_rows" for name in tensors)
    return Graph("rows", inputs, tuple(tensors), tuple(nodes), types) if nodes else None


def _gated(work: Work, shape: GroupedShape) -> Graph:
    """Return the graph of q and s: q s = silu(y1 token) (y2 token), q in int8, s per row."""
    # each group's rows are padded to a multiple of 16, the height of a fractal
    rows = shape.whole.m
    half = shape.n // 2
    net = GraphBuilder(work.operator, "fp32")
    y = net.input("y", (rows, shape.n))
    token = net.input("token", (rows, 1))
    gate = net.mul(net.slice(y, begin=(0, 0), end=(rows, half)), token)
    value = net.mul(net.slice(y, begin=(0, half), end=(rows, shape.n)), token)
    gated = net.mul(net.silu(gate), value)
    # the largest number of a row becomes 127
    scale = net.muls(net.reduce_max(net.abs(gated), axis=-1, keepdims=True), number=1 / 127)
    net.output(net.cast(net.div(gated, scale), dtype="int8"))
    net.output(scale)
    return in_fractals(net.build(), {"y": "FRACTAL_NZ"})


def as_groups(work: Work) -> Work:
    """Return a batch_matmul whose table row says `groups` as a grouped_matmul.

    x (groups, m, k) becomes (groups m, k), with m rows in every group. Other work is unchanged.
    """
    if work.operator != "batch_matmul" or "groups" not in work.attributes:
        return work
    groups_in_row = work.attributes["groups"]
    sizes = [len(shape) for shape in work.shapes[:2]]
    if sizes != [3, 3] or groups_in_row != work.shapes[0][0]:
        needed = "grouped_matmul: x (groups, m, k) and w (groups, k, n)"
        raise InputError(
            needed, f"{work.shapes[:2]}, groups={shown(groups_in_row)}", "correct that row"
        )
    (groups, rows, depth), *later_shapes = work.shapes
    attributes = {**work.attributes, "rows": (rows,) * groups}
    shapes = (groups * rows, depth), *later_shapes
    return replace(work, operator="grouped_matmul", shapes=shapes, attributes=attributes)


def weight_quant(work: Work) -> WidenedWeights:
    """Return y = x ((w + offset) scale) + bias: x (m, k) in fp16 or bf16, w (k, n) in int8.

    A scale follows w, then an offset, a bias, or both. If there is one input after the scale, its
    format tells which it is: a bias is fp32, an offset never is.
    """
    known_words(work, ())
    dtypes = one_dtype_each(work)
    dtype = dtypes[0]
    if not 3 <= len(dtypes) <= 5 or dtype not in FLOATS or dtypes[1] != "int8":
        needed = f"{work.operator}: x in fp16 or bf16, w in int8, a scale, an offset, a bias"
        raise UnsupportedError(needed, ", ".join(dtypes), "none is guessed")
    x, w = product_of(work)
    if len(w) > 2:
        needed = f"{work.operator}: one matrix of weights"
        raise UnsupportedError(needed, str(w), "none is guessed")
    depth, columns = w
    has_bias = len(dtypes) == 5 or (len(dtypes) == 4 and dtypes[3] == "fp32")
    has_offset = len(dtypes) == 5 or (len(dtypes) == 4 and not has_bias)
    net = GraphBuilder(work.operator)
    x_input = net.input("x", x, dtype)
    weight = net.input("w", w, "int8")
    net.output(net.matmul(x_input, net.cast(weight, dtype=dtype)))
    for shape in work.shapes[2:]:
        column(work, shape, columns, "fp32")
    product = WeightQuantShape(x[0], depth, columns, dtype, has_offset, has_bias)
    # the graph leaves out scale, offset and bias: for the bound its product is enough
    return WidenedWeights(product, net.build())


def spans(shape: GroupedShape) -> list[tuple[int, int]]:
    """Return (first row, end) of each group in the result, where groups are padded to fractals."""
    # rows = (3, 0, 5) have heights 1, 0, 1: the groups are rows 0-15, none, and 16-31
    ends = accumulate((height * isa.FRACTAL for height in shape.fractal_rows), initial=0)
    return list(pairwise(ends))


BUILDERS: Mapping[str, Callable[[Work], Groups | WidenedWeights]] = {
    "grouped_matmul": grouped_matmul,
    "grouped_matmul_swiglu_quant": swiglu_quant,
    "weight_quant_batch_matmul": weight_quant,
}
"""The table's name for a kernel -> its builder."""
