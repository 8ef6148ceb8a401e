"""Scatter: rows written where run-time indices say, replaced or added to.

Where indices repeat, the last update wins, or all are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab import dsl as te
from ascend_lab.chip import Chip
from ascend_lab.errors import ShapeError
from ascend_lab.isa import Launch
from ascend_lab.kernels.indexed import scatter_launch
from ascend_lab.ops.formats import TypeRule, exact, rounded
from ascend_lab.ops.indexing import INDICES, row_limit
from ascend_lab.ops.moving import ANY
from ascend_lab.ops.operator import Example, Operator
from ascend_lab.ops.registry import register
from ascend_lab.ops.shapes import Shape, elements
from ascend_lab.ops.slicing import AxisRule, Kind, SliceRules, Source
from ascend_lab.ops.template import Call, Template, results

Values = NDArray[Any]


# -- scatter --------------------------------------------------------------------------------------
def _scatter_shape(x: Shape, indices: Shape, updates: Shape) -> Shape:
    if not x or updates != (*indices, *x[1:]):
        raise ShapeError(
            f"updates of shape {(*indices, *x[1:])}: one row of x {x} per index",
            str(updates),
            "reshape the updates",
        )
    return x


def _scatter_slices(shapes: tuple[Shape, ...]) -> SliceRules:
    x, indices, _ = shapes
    why = "any index may hit any row: a piece must look at all indices and keep its own"
    kind: Kind = "indices"
    first = AxisRule(0, kind, reason=why)
    shift = len(indices) - 1
    rest = tuple(
        AxisRule(i, "free", (Source(0, i), Source(2, i + shift)), (i,)) for i in range(1, len(x))
    )
    return SliceRules("Scatter", (first, *rest))


def _scatter(mode: str, x: te.Tensor, indices: te.Tensor, updates: te.Tensor) -> te.Tensor:
    count = elements(indices.shape)
    flat = te.reshape(indices, (count,))
    return te.scatter(x, flat, te.reshape(updates, (count, *x.shape[1:])), mode)


def _updated(x: Values, indices: Values, updates: Values) -> Values:
    """Replace rows one after the other, so that the last of equal indices wins."""
    result = x.copy()
    for index, row in zip(indices.ravel(), updates.reshape(-1, *x.shape[1:]), strict=True):
        result[index] = row
    return result


def _added(x: Values, indices: Values, updates: Values) -> Values:
    result = x.copy()
    np.add.at(result, indices, updates)
    return result


def _scatter_feed(call: Call, arrays: Sequence[Values]) -> dict[str, Values]:
    """Return the tensors of the kernel, which changes y in place: y starts as x."""
    return {"y": arrays[0], "index": arrays[1], "u": arrays[2]}


def _scatter_template(mode: str) -> Template:
    def build(call: Call, chip: Chip) -> Launch:
        x, indices, _ = call.shapes
        columns, picks = elements(x[1:]), elements(indices)
        return scatter_launch(chip, x[0], columns, picks, call.dtypes[0], mode=mode)

    return Template(build, _scatter_feed, results)


def _register_scatter(mode: str, formula: Any, backward: Any, summary: str, **more: Any) -> None:
    register(
        Operator(
            f"scatter_{mode}",
            ("x", "indices", "updates"),
            formula,
            lambda x, indices, updates: _scatter(mode, x, indices, updates),
            summary,
            shape_rule=_scatter_shape,
            slicing=_scatter_slices,
            backward=backward,
            template=_scatter_template(mode),
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
    )


_register_scatter(
    "update",
    _updated,
    None,
    "x with row indices[i] replaced by updates[i]; of equal indices the last wins",
    types=TypeRule(ANY, INDICES),
    tolerances=exact(),
)
_register_scatter(
    "add",
    _added,
    lambda s: (s.g, None, s.net.gather(s.g, s.x(1), axis=0)),
    "x with updates[i] added to row indices[i]; equal indices add up",
    types=TypeRule(("fp16", "fp32", "int32"), INDICES),
    # narrow formats round after each addition: one ulp of the largest partial sum each
    tolerances=rounded(ulps=4.0, fp32_ulps=4.0, atol=2.0**-7),
)
