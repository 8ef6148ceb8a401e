"""Operators that only move data, as lists of strided moves: slice, concat, split, pad, reshape."""

import math
from collections.abc import Sequence

from ascend_lab.chip import Chip
from ascend_lab.errors import ShapeError
from ascend_lab.isa import Launch
from ascend_lab.layout.moves import Move, View, copy_launch, moves_launch, row_major


def slice_launch(
    chip: Chip,
    shape: Sequence[int],
    begin: Sequence[int],
    end: Sequence[int],
    dtype: str,
    *,
    step: Sequence[int] | None = None,
) -> Launch:
    """y = x[begin:end:step], element by axis; steps may be negative, as in NumPy.

    `begin` and `end` are positions, not counted from the end: 0 <= begin < n, and end may be -1 for
    a negative step. Raises `ShapeError` for positions outside `shape` or an empty result.
    """
    steps = tuple(step) if step is not None else (1,) * len(shape)
    if not len(shape) == len(begin) == len(end) == len(steps) or 0 in steps:
        raise ShapeError(
            f"begin, end and step, not 0, for the {len(shape)} axes of {tuple(shape)}",
            f"{tuple(begin)}, {tuple(end)}, {steps}",
            "give one of each per axis",
        )
    ranges = [range(b, e, s) for b, e, s in zip(begin, end, steps, strict=True)]
    for axis, (n, r) in enumerate(zip(shape, ranges, strict=True)):
        if not r or min(r[0], r[-1]) < 0 or max(r[0], r[-1]) >= n:
            wanted, got = f"positions 0..{n - 1} on axis {axis}, at least one", str(r)
            raise ShapeError(wanted, got, "check begin and end")
    strides = row_major(shape)
    sizes = tuple(len(r) for r in ranges)
    return copy_launch(
        chip,
        dtype,
        sizes,
        [s * t for s, t in zip(strides, steps, strict=True)],
        row_major(sizes),
        source_offset=sum(b * s for b, s in zip(begin, strides, strict=True)),
        source_elements=math.prod(shape),
        target_elements=math.prod(sizes),
        name="slice",
    )


def concat_launch(
    chip: Chip, shapes: Sequence[Sequence[int]], axis: int, dtype: str, *, name: str = "concat"
) -> Launch:
    """y = concatenate(x0, x1, ..) along `axis`; inputs are the tensors x0, x1, ...

    Raises `ShapeError` unless the shapes agree on all other axes.
    """
    total, moves = _pieces(shapes, axis, split=False)
    tensors = {f"x{i}": math.prod(s) for i, s in enumerate(shapes)} | {"y": math.prod(total)}
    return moves_launch(chip, dtype, tensors, moves, name=name)


def split_launch(
    chip: Chip, shape: Sequence[int], parts: Sequence[int], axis: int, dtype: str
) -> Launch:
    """y0, y1, .. = x cut along `axis` into pieces of `parts` rows. Raises `ShapeError`."""
    axis = axis_of(shape, axis)
    if sum(parts) != shape[axis] or min(parts, default=0) < 1:
        wanted, got = f"parts of 1 or more that sum to {shape[axis]}", str(tuple(parts))
        raise ShapeError(wanted, got, "check axis")
    shapes = [[*shape[:axis], n, *shape[axis + 1 :]] for n in parts]
    _, moves = _pieces(shapes, axis, split=True)
    tensors = {"x": math.prod(shape)} | {f"y{i}": math.prod(s) for i, s in enumerate(shapes)}
    return moves_launch(chip, dtype, tensors, moves, name="split")


def _pieces(
    shapes: Sequence[Sequence[int]], axis: int, *, split: bool
) -> tuple[tuple[int, ...], list[Move]]:
    """Return the joint shape, and a move per piece to or from it."""
    if not shapes:
        raise ShapeError("at least one tensor to join", "none", "pass the shapes")
    axis = axis_of(shapes[0], axis)
    others = [(*s[:axis], *s[axis + 1 :]) for s in shapes]
    if len({len(s) for s in shapes}) > 1 or len(set(others)) > 1:
        got = ", ".join(str(tuple(s)) for s in shapes)
        raise ShapeError(f"shapes equal on all axes but {axis}", got, "reshape or pad them first")
    total = (*shapes[0][:axis], sum(s[axis] for s in shapes), *shapes[0][axis + 1 :])
    strides, start, moves = row_major(total), 0, []
    for i, shape in enumerate(shapes):
        joint = View("x" if split else "y", strides, start * strides[axis])
        piece = View(f"y{i}" if split else f"x{i}", row_major(shape))
        source, target = (joint, piece) if split else (piece, joint)
        moves.append(Move(tuple(shape), target, source))
        start += shape[axis]
    return total, moves


def pad_launch(
    chip: Chip,
    shape: Sequence[int],
    pads: Sequence[tuple[int, int]],
    dtype: str,
    *,
    value: float = 0.0,
) -> Launch:
    """y = x with (before, after) elements of `value` added on every axis. Raises `ShapeError`."""
    if len(pads) != len(shape) or any(len(p) != 2 or min(p) < 0 for p in pads):
        wanted, got = f"(before, after) >= 0 for each axis of {tuple(shape)}", str(tuple(pads))
        raise ShapeError(wanted, got, "mend it")
    sizes = tuple(n + lo + hi for n, (lo, hi) in zip(shape, pads, strict=True))
    strides = row_major(sizes)
    inside = sum(lo * s for (lo, _), s in zip(pads, strides, strict=True))
    body = Move(tuple(shape), View("y", strides, inside), View("x", row_major(shape)))
    moves = [body] if math.prod(shape) else []
    for axis, (n, (lo, hi)) in enumerate(zip(shape, pads, strict=True)):
        corner = sum(pads[a][0] * strides[a] for a in range(axis))
        for thick, start in ((lo, 0), (hi, lo + n)):
            frame = (*shape[:axis], thick, *sizes[axis + 1 :])
            view = View("y", strides, corner + start * strides[axis])
            moves.append(Move(frame, view, value=value))
    tensors = {"x": math.prod(shape), "y": math.prod(sizes)}
    return moves_launch(chip, dtype, tensors, moves, name="pad")


def reshape_launch(chip: Chip, shape: Sequence[int], to: Sequence[int], dtype: str) -> Launch:
    """y = x.reshape(to): one contiguous copy. Raises `ShapeError` for another element count."""
    n = math.prod(shape)
    if math.prod(to) != n:
        wanted, got = f"a shape of {n} elements, as {tuple(shape)}", str(tuple(to))
        raise ShapeError(wanted, got, "check the sizes")
    return copy_launch(chip, dtype, (n,), (1,), (1,), name="reshape")


def axis_of(shape: Sequence[int], axis: int) -> int:
    """Return `axis` counted from 0; raise `ShapeError` outside -rank .. rank-1."""
    rank = len(shape)
    if not -rank <= axis < rank:
        wanted, got = f"an axis in {-rank}..{rank - 1} of {tuple(shape)}", str(axis)
        raise ShapeError(wanted, got, "check the rank")
    return axis % rank
