"""Operators that move data and compute nothing: transpose, reshape, expand."""

import math
from typing import Any

import numpy as np

from ascend_lab import dsl as te
from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import ShapeError
from ascend_lab.isa import Launch
from ascend_lab.kernels.rearrange import reshape_launch
from ascend_lab.kernels.transpose import transpose_launch
from ascend_lab.layout.moves import copy_launch, row_major
from ascend_lab.ops.formats import Shape, TypeRule, axis_of, broadcast_shape, elements, exact
from ascend_lab.ops.operator import REQUIRED, Call, Example, Template, define
from ascend_lab.ops.slicing import (
    Adjust,
    AxisRule,
    Range,
    Ranges,
    SliceRules,
    Source,
    axis_rules,
    following,
)

ANY = tuple(d for d in DTYPE_BYTES if d != "uint8")
_EXACT = exact()


# -- transpose ------------------------------------------------------------------------------------
def _order(perm: Any, shape: Shape) -> tuple[int, ...]:
    """Return the permutation counted from 0; None reverses the axes."""
    if perm is None:
        return tuple(range(len(shape)))[::-1]
    order = tuple(axis_of("perm", p, shape) for p in perm)
    if sorted(order) != list(range(len(shape))):
        needed = f"perm: each of the {len(shape)} axes of {shape} once"
        raise ShapeError(needed, str(tuple(perm)), "mend perm")
    return order


define(
    "transpose", ("x",), lambda x, *, perm: x.transpose(_order(perm, x.shape)),
    lambda x, *, perm: te.transpose(x, _order(perm, x.shape)),
    "axis d of y is axis perm[d] of x (default: axes reversed)",
    attrs={"perm": None},
    shape_rule=lambda x, *, perm: tuple(x[p] for p in _order(perm, x)), types=TypeRule(ANY),
    slicing=lambda shapes, *, perm: axis_rules(
        "Transpose", [(Source(0, p),) for p in _order(perm, shapes[0])]
    ),
    backward=lambda s: (
        s.net.transpose(s.g, perm=tuple(np.argsort(_order(s.attrs["perm"], s.shape())).tolist())),
    ),
    template=Template(
        lambda call, chip: transpose_launch(
            chip, call.shapes[0], _order(call.attrs["perm"], call.shapes[0]), call.dtypes[0]
        ),
    ),
    traits=("moves",), tolerances=_EXACT,
    examples=(
        Example(((1,),)), Example(((16, 16),)), Example(((17, 33),), {"perm": (1, 0)}),
        Example(((2, 3, 5),), {"perm": (0, 2, 1)}), Example(((2, 3, 16),), {"perm": (1, 0, 2)}),
        Example(((2, 3, 4, 5),), {"perm": (-1, 0, 2, 1)}), Example(((31, 129),)),
    ),
)  # fmt: skip


# -- reshape --------------------------------------------------------------------------------------
def _target(x: Shape, *, shape: Any) -> Shape:
    """Return the new shape: 0 keeps a size, one -1 takes what is left (ONNX Reshape)."""
    sizes = [x[i] if n == 0 and i < len(x) else int(n) for i, n in enumerate(shape)]
    if sizes.count(-1) > 1 or any(n < -1 for n in sizes):
        needed = "shape: sizes, 0 to keep one, at most one -1"
        raise ShapeError(needed, str(tuple(shape)), "mend it")
    if -1 in sizes:
        rest = -elements(tuple(sizes))
        if rest == 0 or elements(x) % rest:
            needed = f"shape: sizes that divide the {elements(x)} elements of {x}"
            raise ShapeError(needed, str(tuple(shape)), "choose others")
        sizes[sizes.index(-1)] = elements(x) // rest
    if elements(tuple(sizes)) != elements(x):
        needed = f"shape: {elements(x)} elements, as in {x}"
        got = f"{elements(tuple(sizes))} in {tuple(sizes)}"
        raise ShapeError(needed, got, "keep the number of elements")
    return tuple(sizes)


def _axis_groups(x: Shape, out: Shape) -> dict[int, tuple[int, int, int]]:
    """Return the outermost axis of each part of `out` that whole axes of x make up.

    Its value is the outermost axis of x there, and the grains in which both may be cut: (b, s, k)
    as (b s, k) may be cut behind every s rows.
    """
    found: dict[int, tuple[int, int, int]] = {}
    i = j = 0
    while i < len(x) and j < len(out):
        first, ends = (i, j), [i + 1, j + 1]
        while math.prod(x[i : ends[0]]) != math.prod(out[j : ends[1]]):
            short = math.prod(x[i : ends[0]]) > math.prod(out[j : ends[1]])
            if ends[short] >= len((x, out)[short]):
                return found
            ends[short] += 1
        while first[0] + 1 < ends[0] and x[first[0]] == 1:
            first = first[0] + 1, first[1]
        while first[1] + 1 < ends[1] and out[first[1]] == 1:
            first = first[0], first[1] + 1
        rests = math.prod(x[first[0] + 1 : ends[0]]), math.prod(out[first[1] + 1 : ends[1]])
        both = math.lcm(*rests)
        found[first[1]] = first[0], both // rests[0] if both else 1, both // rests[1] if both else 1
        i, j = ends
    return found


def _reshaped(out: Shape) -> Adjust:
    """Return how the attribute `shape` changes for a piece."""

    def adjust(axis: int, piece: Range, ranges: Ranges) -> dict[str, Any]:
        return {"shape": tuple(piece[1] - piece[0] if i == axis else n for i, n in enumerate(out))}

    return adjust


def _reshape_slices(shapes: tuple[Shape, ...], *, shape: Any) -> SliceRules:
    x, out = shapes[0], _target(shapes[0], shape=shape)
    groups = _axis_groups(x, out) if elements(x) else {}
    axes = []
    for i, size in enumerate(out):
        source, taken, grain = groups.get(i, (0, 1, size + 1))
        if grain < size or grain == size == 1:
            rule = AxisRule(i, "free", (Source(0, source, grain=taken),), (i,), grain)
        else:
            rule = AxisRule(i, "whole", reason="its elements lie in several input axes", joins=(i,))
        axes.append(rule)
    return SliceRules("Transpose", tuple(axes), adjust=_reshaped(out))


define(
    "reshape", ("x",), lambda x, *, shape: x.reshape(_target(x.shape, shape=shape)),
    lambda x, *, shape: te.reshape(x, _target(x.shape, shape=shape)),
    "the same elements in row-major order; 0 keeps a size, one size may be -1",
    attrs={"shape": REQUIRED}, shape_rule=_target, types=TypeRule(ANY), slicing=_reshape_slices,
    backward=lambda s: (s.net.shaped(s.g, s.shape()),),
    template=Template(
        lambda call, chip: reshape_launch(chip, call.shapes[0], call.outputs[0], call.dtypes[0]),
    ),
    traits=("moves", "renames"), tolerances=_EXACT,
    examples=(
        Example(((1,),), {"shape": (1, 1)}), Example(((6, 35),), {"shape": (7, 30)}),
        Example(((2, 3, 17),), {"shape": (0, -1)}), Example(((129,),), {"shape": (3, 43)}),
    ),
)  # fmt: skip


# -- expand ---------------------------------------------------------------------------------------
def _expand_slices(shapes: tuple[Shape, ...], *, shape: Any) -> SliceRules:
    out = broadcast_shape("expand", shapes[0], tuple(shape))
    return axis_rules("Broadcast", following(shapes, out), adjust=_reshaped(out))


def _expand_kernel(call: Call, chip: Chip) -> Launch:
    """Return a copy whose source stands still along the repeated axes."""
    x, out = call.shapes[0], call.outputs[0]
    wide, dtype = (1,) * (len(out) - len(x)) + x, call.dtypes[0]
    steps = [0 if n == 1 else step for n, step in zip(wide, row_major(wide), strict=True)]
    views = out, steps, row_major(out)
    return copy_launch(chip, dtype, *views, source_elements=elements(x), name="expand")


define(
    "expand", ("x",),
    lambda x, *, shape: np.broadcast_to(x, broadcast_shape("", x.shape, tuple(shape))),
    lambda x, *, shape: te.broadcast(x, broadcast_shape("", x.shape, tuple(shape))),
    "x repeated to a shape by the broadcasting rule",
    attrs={"shape": REQUIRED},
    shape_rule=lambda x, *, shape: broadcast_shape("x and shape", x, tuple(shape)),
    types=TypeRule(("fp16", "fp32", "bf16", "int32")), slicing=_expand_slices,
    backward=lambda s: (s.net.summed_to(s.g, s.shape()),),
    template=Template(_expand_kernel), traits=("moves",), tolerances=_EXACT,
    examples=(
        Example(((1,),), {"shape": (17,)}), Example(((3, 1),), {"shape": (3, 33)}),
        Example(((5,),), {"shape": (4, 5)}), Example(((2, 1, 16),), {"shape": (2, 7, 16)}),
    ),
)  # fmt: skip
