"""Operations that move data and compute nothing: reshape, transpose, slice, concat, pad, gather."""

import math
from collections.abc import Sequence
from typing import Any

from ascend_lab.dsl.formulas import axis_names, check_shape, copied
from ascend_lab.dsl.tensor import Load, Shape, Template, Tensor
from ascend_lab.errors import ShapeError, TypeMismatchError
from ascend_lab.isa import Affine, var


def template(kind: str, inputs: Sequence[Tensor], shape: Shape, dtype: str, **attrs: Any) -> Tensor:
    """Return a tensor that a kernel of its own computes."""
    body = Template(kind, tuple(inputs), tuple(sorted(attrs.items())))
    return Tensor("", shape, dtype, body, kind)


def one_axis(axis: int, rank: int, what: str) -> int:
    """Return an axis as a number 0..rank-1; raise `ShapeError` outside -rank..rank-1."""
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise ShapeError(f"{what}: an axis from {-rank} to {rank - 1}", str(axis), "check the rank")
    return axis % rank


def reshape(a: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the same elements, in row-major order, under another shape; one size may be -1."""
    wanted = tuple(int(n) for n in shape)
    if wanted.count(-1) == 1:
        rest = math.prod(n for n in wanted if n != -1)
        wanted = tuple(a.elements // max(rest, 1) if n == -1 else n for n in wanted)
    target = check_shape(wanted, "reshape")
    if math.prod(target) != a.elements:
        needed = f"reshape: {a.elements} elements for {a.label} {a.shape}"
        got = f"{math.prod(target)} for {target}"
        raise ShapeError(needed, got, "keep the number of elements")
    if target == a.shape:
        return a
    names = axis_names(len(target))
    moving = [var(n) for n, size in zip(names, target, strict=True) if size > 1]
    if [n for n in target if n > 1] == [n for n in a.shape if n > 1]:
        own = iter(moving)
        index = tuple(next(own) if size > 1 else Affine() for size in a.shape)
        return copied(a[index], target, names, "reshape")
    flat = Affine()
    for name, size in zip(names, target, strict=True):
        flat = flat * size + var(name)
    return copied(Load(a, (flat,), (a.elements,)), target, names, "reshape")


def transpose(a: Tensor, perm: Sequence[int] | None = None) -> Tensor:
    """Return out[i_perm] = a[i]: axis d of the result is axis perm[d] of a (default: reversed)."""
    rank = len(a.shape)
    order = tuple(range(rank))[::-1] if perm is None else tuple(int(p) for p in perm)
    if sorted(p % rank if -rank <= p < rank else rank for p in order) != list(range(rank)):
        raise ShapeError(
            f"transpose: a permutation of 0..{rank - 1}", str(order), "name each axis once"
        )
    order = tuple(p % rank for p in order)
    shape = tuple(a.shape[p] for p in order)
    moved = [p for p in order if a.shape[p] > 1]
    if moved == sorted(moved):
        return reshape(a, shape)
    if order[-1] == rank - 1:
        names = axis_names(rank)
        back = [order.index(d) for d in range(rank)]
        return copied(a[tuple(var(names[n]) for n in back)], shape, names, "transpose")
    return template("transpose", (a,), shape, a.dtype, perm=order)


def slice(  # noqa: A001 - the published name
    a: Tensor, begin: Sequence[int], end: Sequence[int], step: Sequence[int] | None = None
) -> Tensor:
    """Return a[begin:end:step] per axis; negative begin and end count from the end."""
    rank = len(a.shape)
    steps = (1,) * rank if step is None else tuple(step)
    if not len(begin) == len(end) == len(steps) == rank or min(steps) < 1:
        needed = f"slice: begin, end and step >= 1 for each of {rank} axes"
        got = f"{tuple(begin)}, {tuple(end)}, {steps}"
        raise ShapeError(needed, got, "give one number per axis")
    starts, sizes = [], []
    for b, e, s, n in zip(begin, end, steps, a.shape, strict=True):
        low, high = (b + n if b < 0 else b), (e + n if e < 0 else min(e, n))
        if not 0 <= low < high <= n:
            raise ShapeError(
                f"slice: 0 <= begin < end <= {n}", f"{b}, {e}", "check the bounds of this axis"
            )
        starts.append(low)
        sizes.append(-(-(high - low) // s))
    names = axis_names(rank)
    index = tuple(var(n) * s + b for n, s, b in zip(names, steps, starts, strict=True))
    return copied(a[index], tuple(sizes), names, "slice")


def concat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Return the tensors one behind the other along an axis; other sizes and formats agree."""
    if not tensors:
        raise ShapeError("concat: at least one tensor", "none", "pass a list of tensors")
    first = tensors[0]
    at = one_axis(axis, len(first.shape), "concat")
    for other in tensors[1:]:
        if (*other.shape[:at], first.shape[at], *other.shape[at + 1 :]) != first.shape:
            raise ShapeError(
                f"concat: equal sizes outside axis {at}", f"{first.shape} and {other.shape}", "pad"
            )
        if other.dtype != first.dtype:
            raise TypeMismatchError(
                "concat: one number format", f"{first.dtype} and {other.dtype}", "cast one"
            )
    total = sum(t.shape[at] for t in tensors)
    shape = (*first.shape[:at], total, *first.shape[at + 1 :])
    return template("concat", tensors, shape, first.dtype, axis=at)


def pad(a: Tensor, widths: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """Return a with (before, after) elements of `value` added along each axis."""
    pairs = tuple((int(low), int(high)) for low, high in widths)
    if len(pairs) != len(a.shape) or any(min(p) < 0 for p in pairs):
        raise ShapeError(
            f"pad: (before, after) >= 0 for each of {len(a.shape)} axes", str(pairs), "use slice"
        )
    if not any(low or high for low, high in pairs):
        return a
    shape = tuple(n + low + high for n, (low, high) in zip(a.shape, pairs, strict=True))
    return template("pad", (a,), shape, a.dtype, widths=pairs, value=float(value))


def _check_indices(indices: Tensor, what: str) -> None:
    if indices.dtype != "int32":
        raise TypeMismatchError(f"{what}: int32 indices", indices.dtype, "cast them")


def gather(a: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    """Return the slices of a along `axis` that `indices` names: out[i, ...] = a[index[i], ...]."""
    _check_indices(indices, "gather")
    at = one_axis(axis, len(a.shape), "gather")
    if at:
        front = (at, *(d for d in range(len(a.shape)) if d != at))
        picked = gather(transpose(a, front), indices)
        rank = len(indices.shape)
        order = (*range(rank, rank + at), *range(rank), *range(rank + at, len(picked.shape)))
        return transpose(picked, order)
    shape = (*a.shape[:at], *indices.shape, *a.shape[at + 1 :])
    return template("gather", (a, indices), shape, a.dtype, axis=at)


def scatter(a: Tensor, indices: Tensor, updates: Tensor, mode: str = "update") -> Tensor:
    """Return a with rows indices[i] replaced by updates[i] ("update": the last wins) or added to.

    a is (rows, ...), indices (count,), updates (count, ...).
    """
    _check_indices(indices, "scatter")
    if mode not in ("update", "add"):
        raise TypeMismatchError("scatter: mode update or add", repr(mode), "choose one")
    if len(indices.shape) != 1 or updates.shape != (indices.shape[0], *a.shape[1:]):
        needed = f"scatter: indices (count,) and updates (count, *{a.shape[1:]})"
        got = f"{indices.shape} and {updates.shape}"
        raise ShapeError(needed, got, "one row of updates per index")
    if updates.dtype != a.dtype:
        raise TypeMismatchError(
            "scatter: one number format", f"{a.dtype} and {updates.dtype}", "cast one"
        )
    return template("scatter", (a, indices, updates), a.shape, a.dtype, mode=mode)
