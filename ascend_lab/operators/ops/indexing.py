"""Operators whose addresses are known only at run time: gather, embedding, one_hot, scatter.

Indices are int32 and count from 0. With `from_end`, a gather also takes negative indices, which
count from the end. An index outside its tensor is an error and does not wrap around.
"""

from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.operators import dsl as te
from ascend_lab.operators.kernels import rearrange, transpose
from ascend_lab.operators.ops import formats as forms, gradients, moving
from ascend_lab.operators.ops.formats import Shape, TypeRule, Values, exact, rounded
from ascend_lab.operators.ops.operator import REQUIRED, Call, Example, Grads, Template, define
from ascend_lab.operators.ops.slicing import SliceRules, Source, axis_rules, every_input

INDICES = (("indices", "int32"),)


def _gather_kernel(call: Call, chip: Chip) -> isa.Kernel:
    """Return the kernel that gathers rows of a table; another axis is transposed to the front."""
    x, indices = call.shapes
    dtype = call.dtypes[0]
    gather_axis = forms.axis_of("gather", call.attrs.get("axis", 0), x)
    index_count = forms.elements(indices)
    columns = forms.elements(x) // x[gather_axis]
    from_end = call.attrs.get("from_end", False)  # an embedding has no such attribute
    gather_rows = rearrange.gather_launch(
        chip, x[gather_axis], columns, index_count, dtype, from_end=from_end
    )
    if forms.elements(x[:gather_axis]) == 1:
        return isa.as_kernel(gather_rows)
    # x (outer, n, inner) -> (n, outer, inner) -> rows (indices, outer, inner) -> y
    outer = forms.elements(x[:gather_axis])
    inner = forms.elements(x[gather_axis + 1 :])
    to_front = transpose.transpose_launch(chip, (outer, x[gather_axis], inner), (1, 0, 2), dtype)
    to_back = transpose.transpose_launch(chip, (index_count, outer, inner), (1, 0, 2), dtype)
    phases = (
        isa.renamed(to_front, {"y": "front"}),
        isa.renamed(gather_rows, {"x": "front", "y": "picked"}),
        isa.renamed(to_back, {"x": "picked"}),
    )
    return isa.Kernel("gather", phases)


GATHER = Template(_gather_kernel, ("x", "index"))


# -- gather ---------------------------------------------------------------------------------------
def _gather_shape(x: Shape, indices: Shape, *, axis: int, from_end: bool) -> Shape:
    if not isinstance(from_end, bool):
        raise errors.InputError("from_end True or False", repr(from_end), "choose one")
    gather_axis = forms.axis_of("gather", axis, x)
    return (*x[:gather_axis], *indices, *x[gather_axis + 1 :])


def _gather_slices(shapes: tuple[Shape, ...], *, axis: int = 0, **attrs: Any) -> SliceRules:
    x, indices = shapes
    gather_axis = forms.axis_of("gather", axis, x)
    index_axes = [(Source(1, i),) for i in range(len(indices))]
    outer, inner = (
        [every_input(i) for i in axes]
        for axes in (range(gather_axis), range(gather_axis + 1, len(x)))
    )
    return axis_rules("Segment", [*outer, *index_axes, *inner])


def _gather(x: te.Tensor, indices: te.Tensor, *, axis: int, from_end: bool) -> te.Tensor:
    """Return a gather of rows, with transposes before and after for an axis other than 0."""
    gather_axis = forms.axis_of("gather", axis, x.shape)
    index_rank = len(indices.shape)
    # x (3, 11, 8), 4 indices on axis 1: transposed to (11, 3, 8), gathered to (4, 3, 8), back to
    # (3, 4, 8).
    order = (gather_axis, *(i for i in range(len(x.shape)) if i != gather_axis))
    rows = te.gather(te.transpose(x, order), indices, 0, from_end=from_end)
    outer_axes = range(index_rank, index_rank + gather_axis)
    inner_axes = range(index_rank + gather_axis, len(rows.shape))
    return te.transpose(rows, (*outer_axes, *range(index_rank), *inner_axes))


def _gather_gradient(s: gradients.Site) -> Grads:
    axis = forms.axis_of("axis", s.attrs["axis"], s.shape())
    indices = s.x(1)
    size = s.shape()[axis]
    if s.attrs["from_end"]:
        # Negative indices get `size` added. Comparisons exist for floats only, so the mask of
        # negative indices is -index limited to [0, 1]: 1 for -3, 0 for 0 and for 5.
        zero = s.net.like(0, indices)
        one = s.net.like(1, indices)
        is_negative = s.net.min(s.net.max(s.net.neg(indices), zero), one)
        indices = s.net.add(indices, s.net.mul(is_negative, s.net.like(size, indices)))
    return gradients.scatter_gradient(s, s.g, indices, axis, size), None


def row_limit(x: Shape, *rest: Shape, axis: int = 0, **attrs: Any) -> int:
    """Return the size of the indexed axis: the first index that is too large."""
    return x[forms.axis_of("axis", axis, x)]


define(
    "gather",
    ("x", "indices"),
    lambda x, indices, *, axis, from_end: np.take(x, indices, axis),
    _gather,
    "the slices of x along an axis that indices name, in their order; from the end if asked",
    attrs={"axis": 0, "from_end": False},
    shape_rule=_gather_shape,
    types=TypeRule(moving.MOVABLE_FORMATS, INDICES),
    slicing=_gather_slices,
    backward=_gather_gradient,
    template=GATHER,
    traits=("moves",),
    weights=(0,),
    index_bounds={"indices": row_limit},
    tolerances=exact(),
    examples=(
        Example(((1, 1), (1,))),
        Example(((17, 16), (5,))),
        Example(((7, 33), (2, 3))),
        Example(((3, 11, 8), (4,)), {"axis": 1}),
        Example(((129, 32), (31,))),
        Example(((5, 6), (9,)), {"from_end": True}),
        Example(((3, 11, 8), (4,)), {"axis": 1, "from_end": True}),
    ),
)


def _embedding_shape(table: Shape, indices: Shape) -> Shape:
    if len(table) != 2:
        raise errors.ShapeError("table (words, width)", str(table), "reshape it")
    return (*indices, table[1])


define(
    "embedding",
    ("table", "indices"),
    lambda table, indices: table[indices],
    lambda table, indices: te.gather(table, indices, 0),
    "rows of a (words, width) table; gather on axis 0",
    shape_rule=_embedding_shape,
    types=TypeRule(forms.FLOATS, INDICES),
    slicing=_gather_slices,
    backward=lambda s: (gradients.scatter_gradient(s, s.g, s.x(1), 0, s.shape()[0]), None),
    template=GATHER,
    weights=(0,),
    index_bounds={"indices": row_limit},
    tolerances=exact(),
    examples=(Example(((5, 16), (1,))), Example(((100, 33), (2, 7))), Example(((31, 128), (17,)))),
)


# -- one hot --------------------------------------------------------------------------------------
def _one_hot_values(
    indices: Values, *, depth: int, on_value: float, off_value: float, dtype: str
) -> Values:
    # (2, 17, 1) against (5,): (2, 17, 5).
    is_index = indices[..., None] == np.arange(depth)
    kind = np.float64 if forms.is_float(dtype) else np.int64
    return np.where(is_index, on_value, off_value).astype(kind)


def _one_hot_shape(indices: Shape, *, depth: int, **attrs: Any) -> Shape:
    if not forms.is_whole(depth) or depth < 1:
        raise errors.ShapeError("depth of at least 1", repr(depth), "the number of classes")
    return (*indices, depth)


def _one_hot_kernel(call: Call, chip: Chip) -> isa.Kernel:
    """Return the kernel that writes ones and zeros, with a second phase for other values."""
    index_count = forms.elements(call.shapes[0])
    attrs = call.attrs
    marks = rearrange.one_hot_launch(chip, index_count, attrs["depth"], attrs["dtype"])
    on_value = attrs["on_value"]
    off_value = attrs["off_value"]
    if (on_value, off_value) == (1, 0):
        return isa.as_kernel(marks)
    marks_tensor = te.placeholder((index_count, attrs["depth"]), attrs["dtype"], "hot")
    # on 2, off -1: a mark of 1 becomes 1 * 3 - 1 = 2, a mark of 0 becomes -1.
    scaled = te.renamed(te.vadds(te.vmuls(marks_tensor, on_value - off_value), off_value), "y")
    phases = te.lower(te.auto_schedule(scaled, chip)).phases
    return isa.Kernel("one_hot", (isa.renamed(marks, {"y": "hot"}), *phases))


define(
    "one_hot",
    ("indices",),
    _one_hot_values,
    None,
    "on_value where the last axis equals the index, else off_value",
    attrs={"depth": REQUIRED, "on_value": 1.0, "off_value": 0.0, "dtype": "fp16"},
    ranges={"on_value": forms.NOT_NAN, "off_value": forms.NOT_NAN},
    shape_rule=_one_hot_shape,
    types=TypeRule(("int32",), result=lambda main, attrs: str(attrs["dtype"])),
    slicing=lambda shapes, **attrs: axis_rules(
        "Broadcast", [*map(every_input, range(len(shapes[0]))), "classes are counted from 0"]
    ),
    template=Template(_one_hot_kernel, ("index",)),
    index_bounds={"indices": lambda indices, *, depth, **attrs: depth},
    tolerances=exact(),
    examples=(
        Example(((1,),), {"depth": 1}),
        Example(((7,),), {"depth": 10}),
        Example(((2, 17),), {"depth": 5, "on_value": 2.0, "off_value": -1.0}),
        Example(((33,),), {"depth": 16, "dtype": "fp32"}),
    ),
)


# -- scatter: of equal indices the last update wins, or all are added ------------------------------
def _scatter_shape(x: Shape, indices: Shape, updates: Shape) -> Shape:
    if not x or updates != (*indices, *x[1:]):
        needed = f"updates of shape {(*indices, *x[1:])}: one row of x {x} per index"
        raise errors.ShapeError(needed, str(updates), "reshape the updates")
    return x


def _scatter_slices(shapes: tuple[Shape, ...]) -> SliceRules:
    rank = len(shapes[0])
    # x (10, 4), indices (2, 3), updates (2, 3, 4): axis 1 of x is axis 2 of the updates.
    shift = len(shapes[1]) - 1
    reason = "any index may hit any row: a piece must look at all indices and keep its own"
    row_axes = [(Source(0, i), Source(2, i + shift)) for i in range(1, rank)]
    return axis_rules("Scatter", [reason, *row_axes], kind="indices")


def _scatter(mode: str, x: te.Tensor, indices: te.Tensor, updates: te.Tensor) -> te.Tensor:
    # Indices (2, 3) are 6 rows of updates one after another: the kernel takes a vector of indices.
    count = forms.elements(indices.shape)
    flat_indices = te.reshape(indices, (count,))
    return te.scatter(x, flat_indices, te.reshape(updates, (count, *x.shape[1:])), mode)


def _replaced_rows(x: Values, indices: Values, updates: Values) -> Values:
    """Return x with rows replaced one after another: the last of equal indices counts."""
    result = x.copy()
    for index, row in zip(indices.ravel(), updates.reshape(-1, *x.shape[1:]), strict=True):
        result[index] = row
    return result


def _added_rows(x: Values, indices: Values, updates: Values) -> Values:
    result = x.copy()
    np.add.at(result, indices, updates)
    return result


def _register_scatter(mode: str, formula: Any, backward: Any, summary: str, **more: Any) -> None:
    def build(call: Call, chip: Chip) -> isa.Launch:
        x, indices, _ = call.shapes
        columns = forms.elements(x[1:])
        index_count = forms.elements(indices)
        # x (3, 4, 5), 8 indices: 3 rows of 20 numbers, of which 8 are written.
        table = x[0], columns, index_count, call.dtypes[0]
        return rearrange.scatter_launch(chip, *table, mode=mode, method="auto")

    define(
        f"scatter_{mode}",
        ("x", "indices", "updates"),
        formula,
        lambda x, indices, updates: _scatter(mode, x, indices, updates),
        summary,
        shape_rule=_scatter_shape,
        slicing=_scatter_slices,
        backward=backward,
        template=Template(build, ("y", "index", "u")),  # changes y in place: it starts as x
        traits=("in place",),
        index_bounds={"indices": row_limit},
        examples=(
            Example(((1, 1), (1,), (1, 1))),
            Example(((17, 16), (5,), (5, 16))),
            Example(((7, 33), (2, 3), (2, 3, 33))),
            Example(((3, 4, 5), (8,), (8, 4, 5))),
            Example(((129, 32), (31,), (31, 32))),
        ),
        **more,
    )


_register_scatter(
    "update",
    _replaced_rows,
    None,
    "x with row indices[i] replaced by updates[i]; of equal indices the last wins",
    types=TypeRule(moving.MOVABLE_FORMATS, INDICES),
    tolerances=exact(),
)
_register_scatter(
    "add",
    _added_rows,
    lambda s: (s.g, None, s.net.gather(s.g, s.x(1), axis=0)),
    "x with updates[i] added to row indices[i]; equal indices add up",
    types=TypeRule(("fp16", "fp32", "int32"), INDICES),
    # narrow formats round after each addition: one ulp of the largest partial sum each
    tolerances=rounded(ulps=4.0, fp32_ulps=4.0, atol=2.0**-7),
)
