"""TBE operations on whole tensors that move, reduce or multiply: reshape, reduce_sum, matmul.

For example, `reduce_sum(a, 0)` of a tensor (64, 100) describes the tensor (100,) of column sums.
"""

import math
from collections.abc import Sequence

from ascend_lab.errors import ShapeError, TypeMismatchError
from ascend_lab.machine.isa import Affine, var
from ascend_lab.operators.dsl.formulas import (
    Fold,
    axis_names,
    cast_to,
    check_shape,
    computed,
    copied,
    vmuls,
)
from ascend_lab.operators.dsl.tensor import Axis, Call, Compute, Load, Shape, Template, Tensor


# -- moves: operations that compute nothing --------------------------------------------------------
def template(
    kind: str, inputs: Sequence[Tensor], shape: Shape, dtype: str, **attrs: object
) -> Tensor:
    """Return a tensor that a hand-written kernel computes."""
    body = Template(kind, tuple(inputs), tuple(sorted(attrs.items())))
    return Tensor("", shape, dtype, body, kind)


def one_axis(axis: int, rank: int, what: str) -> int:
    """Return an axis as a number 0..rank-1; raise `ShapeError` outside -rank..rank-1."""
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise ShapeError(f"{what}: an axis from {-rank} to {rank - 1}", str(axis), "check the rank")
    return axis % rank


def reshape(a: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the same elements, in row-major order, under another shape; one size may be -1."""
    sizes = tuple(int(n) for n in shape)
    if sizes.count(-1) == 1:
        known_elements = math.prod(n for n in sizes if n != -1)
        sizes = tuple(a.elements // max(known_elements, 1) if n == -1 else n for n in sizes)
    target = check_shape(sizes, "reshape")
    if math.prod(target) != a.elements:
        needed = f"reshape: {a.elements} elements for {a.label} {a.shape}"
        got = f"{math.prod(target)} for {target}"
        raise ShapeError(needed, got, "keep the number of elements")
    if target == a.shape:
        return a
    names = axis_names(len(target))
    moving = [var(n) for n, size in zip(names, target, strict=True) if size > 1]
    # (64, 1, 100) to (64, 100): only axes of size 1 come or go, and each index stays an axis.
    if [n for n in target if n > 1] == [n for n in a.shape if n > 1]:
        indices = iter(moving)
        index = tuple(next(indices) if size > 1 else Affine() for size in a.shape)
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
        needed = f"transpose: a permutation of 0..{rank - 1}"
        raise ShapeError(needed, str(order), "name each axis once")
    # -1 is the last axis: (0, -1, 1) of rank 3 is (0, 2, 1).
    order = tuple(p % rank for p in order)
    shape = tuple(a.shape[p] for p in order)
    moved = [p for p in order if a.shape[p] > 1]
    # Only axes of size 1 change places: the elements keep their order.
    if moved == sorted(moved):
        return reshape(a, shape)
    # If the innermost axis stays, rows are copied whole. Else a hand-written kernel moves every
    # element.
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
    starts = []
    sizes = []
    for first, stop, stride, size in zip(begin, end, steps, a.shape, strict=True):
        low = first + size if first < 0 else first
        high = stop + size if stop < 0 else min(stop, size)
        if not 0 <= low < high <= size:
            needed = f"slice: 0 <= begin < end <= {size}"
            raise ShapeError(needed, f"{first}, {stop}", "check the bounds of this axis")
        starts.append(low)
        # Every second of 2..9: (9 - 2) / 2 rounded up, 4 elements.
        sizes.append(-(-(high - low) // stride))
    names = axis_names(rank)
    axes = zip(names, steps, starts, strict=True)
    index = tuple(var(name) * stride + start for name, stride, start in axes)
    return copied(a[index], tuple(sizes), names, "slice")


def concat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Return the tensors one behind the other along an axis; other sizes and formats agree."""
    if not tensors:
        raise ShapeError("concat: at least one tensor", "none", "pass a list of tensors")
    example = tensors[0]
    at = one_axis(axis, len(example.shape), "concat")
    for tensor in tensors[1:]:
        if (*tensor.shape[:at], example.shape[at], *tensor.shape[at + 1 :]) != example.shape:
            needed = f"concat: equal sizes outside axis {at}"
            raise ShapeError(needed, f"{example.shape} and {tensor.shape}", "pad")
        if tensor.dtype != example.dtype:
            needed = "concat: one number format"
            raise TypeMismatchError(needed, f"{example.dtype} and {tensor.dtype}", "cast one")
    total = sum(t.shape[at] for t in tensors)
    shape = (*example.shape[:at], total, *example.shape[at + 1 :])
    return template("concat", tensors, shape, example.dtype, axis=at)


def pad(a: Tensor, widths: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """Return a with (before, after) elements of `value` added along each axis."""
    pairs = tuple((int(low), int(high)) for low, high in widths)
    if len(pairs) != len(a.shape) or any(min(p) < 0 for p in pairs):
        needed = f"pad: (before, after) >= 0 for each of {len(a.shape)} axes"
        raise ShapeError(needed, str(pairs), "use slice")
    if not any(low or high for low, high in pairs):
        return a
    shape = tuple(n + low + high for n, (low, high) in zip(a.shape, pairs, strict=True))
    return template("pad", (a,), shape, a.dtype, widths=pairs, value=float(value))


_padded = pad  # where `pad` is a number


def _check_indices(indices: Tensor, what: str) -> None:
    if indices.dtype != "int32":
        raise TypeMismatchError(f"{what}: int32 indices", indices.dtype, "cast them")


def gather(a: Tensor, indices: Tensor, axis: int = 0, *, from_end: bool = False) -> Tensor:
    """Return the slices of a along `axis` that `indices` names: out[i, ...] = a[index[i], ...].

    With `from_end` indices below 0 count from the end of the axis.
    """
    _check_indices(indices, "gather")
    at = one_axis(axis, len(a.shape), "gather")
    # Gathering along another axis: that axis is brought to the front, gathered, and brought back.
    if at:
        front = (at, *(d for d in range(len(a.shape)) if d != at))
        picked = gather(transpose(a, front), indices, from_end=from_end)
        rank = len(indices.shape)
        order = (*range(rank, rank + at), *range(rank), *range(rank + at, len(picked.shape)))
        return transpose(picked, order)
    shape = (*a.shape[:at], *indices.shape, *a.shape[at + 1 :])
    return template("gather", (a, indices), shape, a.dtype, axis=at, from_end=from_end)


def scatter(a: Tensor, indices: Tensor, updates: Tensor, mode: str = "update") -> Tensor:
    """Return a with updates[i] written to rows indices[i] ("update": the last wins), or added.

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
        needed = "scatter: one number format"
        raise TypeMismatchError(needed, f"{a.dtype} and {updates.dtype}", "cast one")
    return template("scatter", (a, indices, updates), a.shape, a.dtype, mode=mode)


# -- folds -----------------------------------------------------------------------------------------
def normal_axes(axis: int | Sequence[int], rank: int, what: str) -> tuple[int, ...]:
    """Return axes as sorted numbers 0..rank-1; negative ones count from the end."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    out = {one_axis(number, rank, what) for number in axes}
    if len(out) < len(axes):
        raise ShapeError(f"{what}: each axis once", str(axes), "drop the repeats")
    return tuple(sorted(out))


FOLD_FORMATS = {"fp16": "fp32", "bf16": "fp32", "int8": "int32", "uint8": "int32"}
"""For narrow formats, the format in which a fold adds or multiplies."""


def _reduce(fold: str, a: Tensor, axis: int | Sequence[int], keepdims: bool) -> Tensor:
    hint = f"reduce_{fold}"
    axes = normal_axes(axis, len(a.shape), hint)
    # 4,096 ones in fp16: above 2,048 adding 1 changes nothing. In fp32 the sum is exact.
    fold_format = FOLD_FORMATS.get(a.dtype) if fold in ("sum", "prod") else None
    source = cast_to(a, fold_format) if fold_format else a
    names = axis_names(len(a.shape))
    folded = tuple(Axis(f"r{names[n]}", a.shape[n], True) for n in axes)
    index = tuple(var(f"r{name}" if n in axes else name) for n, name in enumerate(names))
    kept = [n for n in range(len(names)) if n not in axes]
    value = Fold(fold, source[index], folded)
    # The sum of a whole vector is a tensor of one element: it keeps one axis, of size 1.
    kept_names = [names[n] for n in kept] or [names[0]]
    sizes = tuple(a.shape[n] for n in kept) or (1,)
    result = computed(sizes, kept_names, value, "", hint)
    if fold_format:
        result = cast_to(result, a.dtype)
    if not keepdims:
        return result
    return reshape(result, tuple(1 if n in axes else size for n, size in enumerate(a.shape)))


def reduce_sum(a: Tensor, axis: int | Sequence[int], keepdims: bool = False) -> Tensor:
    """Return the sum over axes; fp16 and bf16 are added in fp32, bytes in int32, rounded once."""
    return _reduce("sum", a, axis, keepdims)


def reduce_max(a: Tensor, axis: int | Sequence[int], keepdims: bool = False) -> Tensor:
    """Return the largest element over axes."""
    return _reduce("max", a, axis, keepdims)


def reduce_min(a: Tensor, axis: int | Sequence[int], keepdims: bool = False) -> Tensor:
    """Return the smallest element over axes."""
    return _reduce("min", a, axis, keepdims)


def reduce_prod(a: Tensor, axis: int | Sequence[int], keepdims: bool = False) -> Tensor:
    """Return the product over axes, taken like a sum in fp32 or int32 and rounded once."""
    return _reduce("prod", a, axis, keepdims)


# -- the cube: matmul, conv2d; and pooling, which shares their windows ----------------------------
CUBE_SUM_FORMATS = {"fp16": "fp32", "bf16": "fp32", "fp32": "fp32", "int8": "int32"}
"""Format the cube adds in, per operand format."""


def _out_dtype(operation: str, a: Tensor, b: Tensor, out_dtype: str | None) -> str:
    if a.dtype != b.dtype or a.dtype not in CUBE_SUM_FORMATS:
        needed = f"{operation}: operands of one cube format ({', '.join(CUBE_SUM_FORMATS)})"
        raise TypeMismatchError(needed, f"{a.dtype} and {b.dtype}", "cast them")
    # Sums of bytes do not fit into bytes: without a scale they stay int32.
    out = out_dtype or (a.dtype if a.dtype != "int8" else "int32")
    if out not in (CUBE_SUM_FORMATS[a.dtype], a.dtype if a.dtype != "int8" else "fp16"):
        needed = f"{operation}: a result in {CUBE_SUM_FORMATS[a.dtype]} or {a.dtype}"
        raise TypeMismatchError(needed, out, "cast it afterwards")
    return out


def matmul(
    a: Tensor, b: Tensor, trans_a: bool = False, trans_b: bool = False, out_dtype: str | None = None
) -> Tensor:
    """Return C[..., m, n] = sum over k of A[..., m, k] * B[..., k, n], added in fp32 or int32.

    With `trans_a` A is stored as (k, m), with `trans_b` B as (n, k). Leading axes are a batch, and
    must agree.
    """
    if len(a.shape) < 2 or len(b.shape) != len(a.shape) or a.shape[:-2] != b.shape[:-2]:
        needed = "matmul: matrices, or equal batches of them"
        raise ShapeError(needed, f"{a.shape} and {b.shape}", "reshape one")
    m, ka = a.shape[-2:][::-1] if trans_a else a.shape[-2:]
    kb, n = b.shape[-2:][::-1] if trans_b else b.shape[-2:]
    if ka != kb:
        needed = "matmul: equal inner sizes"
        raise ShapeError(needed, f"{ka} in {a.shape}, {kb} in {b.shape}", "transpose one")
    out = _out_dtype("matmul", a, b, out_dtype)
    # (8, 12, 128, 64) by (8, 12, 64, 128): batch axes b0 and b1, then m, n and k.
    batch = [f"b{d}" for d in range(len(a.shape) - 2)]
    head = tuple(var(x) for x in batch)
    a_index = (var("k"), var("m")) if trans_a else (var("m"), var("k"))
    b_index = (var("n"), var("k")) if trans_b else (var("k"), var("n"))
    product = Call("mac", (a[(*head, *a_index)], b[(*head, *b_index)]), CUBE_SUM_FORMATS[a.dtype])
    sizes = (*a.shape[:-2], m, n)
    axes = tuple(Axis(x, size) for x, size in zip((*batch, "m", "n"), sizes, strict=True))
    body = Compute(axes, product, "sum", (Axis("k", ka, True),))
    return Tensor("", sizes, out, body, "matmul")


def _pair(value: int | Sequence[int], what: str) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or min(pair) < 1:
        raise ShapeError(f"{what}: a number or a pair >= 1", str(value), "check it")
    return int(pair[0]), int(pair[1])


def pads_of(value: int | Sequence[int]) -> tuple[int, int, int, int]:
    """Return (top, bottom, left, right) from one number, a pair (height, width) or all four."""
    pads = (value,) * 4 if isinstance(value, int) else tuple(int(v) for v in value)
    if len(pads) == 2:
        pads = (pads[0], pads[0], pads[1], pads[1])
    if len(pads) != 4 or min(pads) < 0:
        raise ShapeError("padding: 1, 2 or 4 numbers >= 0", str(value), "top, bottom, left, right")
    return pads[0], pads[1], pads[2], pads[3]


def window_out(
    size: int, before: int, after: int, kernel: int, stride: int, dilation: int = 1
) -> int:
    """Return output size: (size + before + after - dilation (kernel - 1) - 1) // stride + 1."""
    # A 3 x 3 kernel of dilation 2 reaches over 5 rows: 14 rows, padded by 2 and 2, leave 14.
    reach = dilation * (kernel - 1) + 1
    if reach > size + before + after:
        needed = f"a window within the padded size {size + before + after}"
        raise ShapeError(needed, str(reach), "add padding")
    return (size + before + after - reach) // stride + 1


def conv2d(
    x: Tensor,
    weight: Tensor,
    stride: int | Sequence[int] = 1,
    pad: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    out_dtype: str | None = None,
) -> Tensor:
    """Return the convolution of x (n, c, h, w) with weights (k, c / groups, r, s)."""
    if len(x.shape) != 4 or len(weight.shape) != 4:
        got = f"{x.shape} and {weight.shape}"
        raise ShapeError("conv2d: x (n, c, h, w), weight (k, c/groups, r, s)", got, "reshape them")
    n, c, h, w = x.shape
    k, cg, r, s = weight.shape
    if groups < 1 or c % groups or k % groups or cg * groups != c:
        needed = f"conv2d: {groups} groups that divide {c} and {k} channels, weights over c/groups"
        raise ShapeError(needed, f"weights over {cg}", "check groups")
    sh, sw = _pair(stride, "stride")
    dh, dw = _pair(dilation, "dilation")
    pads = pads_of(pad)
    top, bottom, left, right = pads
    oh = window_out(h, top, bottom, r, sh, dh)
    ow = window_out(w, left, right, s, sw, dw)
    out = _out_dtype("conv2d", x, weight, out_dtype)
    attrs = {"dilation": (dh, dw), "groups": groups, "pad": pads, "stride": (sh, sw)}
    return template("conv2d", (x, weight), (n, k, oh, ow), out, **attrs)


def pooling2d(
    x: Tensor,
    window: int | Sequence[int],
    stride: int | Sequence[int],
    pad: int | Sequence[int] = 0,
    mode: str = "max",
) -> Tensor:
    """Return max or average ("avg", zeros count) pooling of x (n, c1, h, w, c0), i.e. NC1HWC0."""
    if len(x.shape) != 5:
        raise ShapeError("pooling2d: x (n, c1, h, w, c0)", str(x.shape), "convert to NC1HWC0")
    if mode not in ("max", "avg"):
        raise TypeMismatchError("pooling2d: mode max or avg", repr(mode), "choose one")
    kh, kw = _pair(window, "window")
    sh, sw = _pair(stride, "stride")
    top, bottom, left, right = pads_of(pad)
    n, c1, h, w, c0 = x.shape
    oh = window_out(h, top, bottom, kh, sh)
    ow = window_out(w, left, right, kw, sw)
    # The padding must be smaller than every element: with 0, windows of negative numbers would
    # return 0.
    lowest = -65504.0 if x.dtype == "fp16" else -3.0e38
    edges = ((0, 0), (0, 0), (top, bottom), (left, right), (0, 0))
    source = _padded(x, edges, lowest if mode == "max" else 0.0)
    names = axis_names(5)
    rh = Axis("rh", kh, True)
    rw = Axis("rw", kw, True)
    i, j, k, m, lane = (var(a) for a in names)
    # A 2 x 2 window of stride 2: out[k, m] folds x[2 k + rh, 2 m + rw] over rh and rw in 0..1.
    element = source[i, j, k * sh + rh, m * sw + rw, lane]
    kind = "max" if mode == "max" else "sum"
    out = computed((n, c1, oh, ow, c0), names, Fold(kind, element, (rh, rw)), "", "pooling2d")
    return out if mode == "max" else vmuls(out, 1.0 / (kh * kw))
