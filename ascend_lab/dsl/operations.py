"""The published TBE operations on whole tensors: vadd, vrelu, broadcast, reduce_sum, ..."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ascend_lab.dsl import moves, tensor as exprs
from ascend_lab.dsl.formulas import Fold, axis_names, check_shape, computed, copied
from ascend_lab.dsl.tensor import FLOATS, Axis, Call, Compute, Expr, Shape, Tensor, binary, unary
from ascend_lab.errors import ShapeError, TypeMismatchError
from ascend_lab.isa import Affine, var

F = TypeVar("F", bound=Callable[..., Any])


def _map(hint: str, tensors: Sequence[Tensor], formula: Callable[..., Expr]) -> Tensor:
    """Return out[index] = formula(a[index], b[index], ...) for tensors of one shape."""
    first = tensors[0]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeMismatchError(
                f"{hint}: tensors", repr(tensor), "use vadds, vmuls for numbers"
            )
        if tensor.shape != first.shape:
            needed = f"{hint}: operands of one shape"
            got = f"{first.label} {first.shape} and {tensor.label} {tensor.shape}"
            raise ShapeError(needed, got, "broadcast them to one shape first")
    names = axis_names(len(first.shape))
    index = tuple(map(var, names))
    return computed(first.shape, names, formula(*(t[index] for t in tensors)), "", hint)


def _named(name: str, text: str) -> Callable[[F], F]:
    """Return a decorator that gives an operation its published name and docstring."""

    def keep(operation: F) -> F:
        operation.__name__, operation.__doc__ = name, text
        return operation

    return keep


def _check_whole(op: str, a: Tensor, whole: bool) -> None:
    if whole and a.dtype in FLOATS:
        raise TypeMismatchError(f"{op}: a whole-number format", a.dtype, "cast to int32")


def _binary(op: str, how: str, whole: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    @_named(op, f"Return {op}(a, b) {how}.")
    def operation(a: Tensor, b: Tensor) -> Tensor:
        _check_whole(op, a, whole)
        return _map(op, (a, b), lambda x, y: binary(op, x, y))

    return operation


def _unary(op: str, name: str = "", whole: bool = False) -> Callable[[Tensor], Tensor]:
    name = name or op

    @_named(name, f"Return {name}(a) element by element.")
    def operation(a: Tensor) -> Tensor:
        _check_whole(op, a, whole)
        return _map(name, (a,), lambda x: unary(op, x))

    return operation


def _scalar(op: str) -> Callable[[Tensor, float], Tensor]:
    @_named(f"{op}s", f"Return {op}(a, number) element by element.")
    def operation(a: Tensor, number: float) -> Tensor:
        return _map(f"{op}s", (a,), lambda x: binary(op, x, number))

    return operation


def _rounding(name: str, mode: str) -> Callable[[Tensor], Tensor]:
    @_named(name, f"Return {name}(a) as int32.")
    def operation(a: Tensor) -> Tensor:
        if a.dtype not in FLOATS:
            raise TypeMismatchError(f"{name}: a float format", a.dtype, "it is whole already")
        return _map(name, (a,), lambda x: unary("vconv", x, mode=mode, dtype="int32"))

    return operation


vadd, vsub, vmul, vdiv, vmax, vmin = (
    _binary(op, "element by element; equal shapes and formats")
    for op in ("vadd", "vsub", "vmul", "vdiv", "vmax", "vmin")
)
vand, vor = (_binary(op, "bit by bit; whole-number formats", True) for op in ("vand", "vor"))
vadds, vmuls, vmaxs, vmins = map(_scalar, ("vadd", "vmul", "vmax", "vmin"))
vabs, vexp, vsqrt, vrsqrt = map(_unary, ("vabs", "vexp", "vsqrt", "vrsqrt"))
vrec, vrelu = map(_unary, ("vrec", "vrelu"))
vlog, vnot = _unary("vln", "vlog"), _unary("vnot", whole=True)
floor, ceil = _rounding("floor", "floor"), _rounding("ceil", "ceil")
round = _rounding("round", "rint")  # noqa: A001 - the published name


def vcmp(a: Tensor, b: Tensor, op: str) -> Tensor:
    """Return 1 where a op b holds, else 0, in a's format; op is gt, ge, lt, le, eq or ne."""
    if op not in ("gt", "ge", "lt", "le", "eq", "ne"):
        raise TypeMismatchError("vcmp: gt, ge, lt, le, eq or ne", repr(op), "choose one")
    return _map("vcmp", (a, b), lambda x, y: replace(_same("vcmp", x, y), mode=op))


def select(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return a where condition is not 0, else b; all in one format."""
    return _map("vsel", (condition, a, b), lambda c, x, y: _same("vsel", c, x, y))


def _same(op: str, *args: Expr) -> Call:
    formats = [arg.dtype for arg in args]
    if len(set(formats)) > 1:
        raise TypeMismatchError(f"{op}: one number format", " and ".join(formats), "cast one")
    return Call(op, args, formats[0])


def cast_to(a: Tensor, dtype: str) -> Tensor:
    """Return a in another number format: round to nearest even, whole numbers saturate."""
    target = exprs.dtype_of(dtype)
    if target == a.dtype:
        return a
    return _map("cast_to", (a,), lambda x: unary("vconv", x, mode="rint", dtype=target))


def broadcast_shapes(a: Sequence[int], b: Sequence[int]) -> Shape:
    """Return the shape two shapes broadcast to (NumPy rule); raise `ShapeError` with both."""
    rank = max(len(a), len(b))
    left = (1,) * (rank - len(a)) + tuple(a)
    right = (1,) * (rank - len(b)) + tuple(b)
    for x, y in zip(left, right, strict=True):
        if x != y and 1 not in (x, y):
            needed = "shapes that broadcast: equal sizes, or 1, from the right"
            got = f"{tuple(a)} and {tuple(b)}"
            raise ShapeError(needed, got, f"{x} and {y} do not go together")
    return tuple(max(x, y) if 0 not in (x, y) else 0 for x, y in zip(left, right, strict=True))


def broadcast(a: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a repeated to `shape` (NumPy rule); raise `ShapeError` with both shapes."""
    target = check_shape(shape, "broadcast")
    if target == a.shape:
        return a
    if len(a.shape) > len(target) or broadcast_shapes(a.shape, target) != target:
        raise ShapeError(
            f"broadcast: a shape that repeats to {target}", f"{a.label} {a.shape}", "sizes 1 repeat"
        )
    names = axis_names(len(target))
    own = names[len(target) - len(a.shape) :]
    index = tuple(Affine() if size == 1 else var(n) for n, size in zip(own, a.shape, strict=True))
    return copied(a[index], target, names, "broadcast")


def normal_axes(axis: int | Sequence[int], rank: int, what: str) -> tuple[int, ...]:
    """Return axes as sorted numbers 0..rank-1; negative ones count from the end."""
    given = (axis,) if isinstance(axis, int) else tuple(axis)
    out = {moves.one_axis(number, rank, what) for number in given}
    if len(out) < len(given):
        raise ShapeError(f"{what}: each axis once", str(given), "drop the repeats")
    return tuple(sorted(out))


WIDE = {"fp16": "fp32", "bf16": "fp32", "int8": "int32", "uint8": "int32"}
"""The format sums and products of narrow numbers are taken in."""


def _reduce(fold: str, a: Tensor, axis: int | Sequence[int], keepdims: bool) -> Tensor:
    hint = f"reduce_{fold}"
    axes = normal_axes(axis, len(a.shape), hint)
    wide = WIDE.get(a.dtype) if fold in ("sum", "prod") else None
    source = cast_to(a, wide) if wide else a
    names = axis_names(len(a.shape))
    folded = tuple(Axis(f"r{names[n]}", a.shape[n], True) for n in axes)
    index = tuple(var(f"r{name}" if n in axes else name) for n, name in enumerate(names))
    kept = [n for n in range(len(names)) if n not in axes]
    value = Fold(fold, source[index], folded)
    own = [names[n] for n in kept] or [names[0]]
    sizes = tuple(a.shape[n] for n in kept) or (1,)
    out = computed(sizes, own, value, "", hint)
    out = cast_to(out, a.dtype) if wide else out
    if not keepdims:
        return out
    return moves.reshape(out, tuple(1 if n in axes else size for n, size in enumerate(a.shape)))


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

SUMS = {"fp16": "fp32", "bf16": "fp32", "int8": "int32"}
"""Format the cube adds in, per operand format."""


def _out_dtype(operation: str, a: Tensor, b: Tensor, out_dtype: str | None) -> str:
    if a.dtype != b.dtype or a.dtype not in SUMS:
        needed = f"{operation}: operands of one cube format ({', '.join(SUMS)})"
        raise TypeMismatchError(needed, f"{a.dtype} and {b.dtype}", "cast them")
    out = out_dtype or (a.dtype if a.dtype != "int8" else "int32")
    if out not in (SUMS[a.dtype], a.dtype if a.dtype != "int8" else "fp16"):
        raise TypeMismatchError(
            f"{operation}: a result in {SUMS[a.dtype]} or {a.dtype}", out, "cast it afterwards"
        )
    return out


def matmul(
    a: Tensor, b: Tensor, trans_a: bool = False, trans_b: bool = False, out_dtype: str | None = None
) -> Tensor:
    """Return C[..., m, n] = sum over k of A[..., m, k] * B[..., k, n], added in fp32 or int32.

    `trans_a`/`trans_b`: the operand is stored (k, m) / (n, k). Leading axes are a batch and agree.
    """
    if len(a.shape) < 2 or len(b.shape) != len(a.shape) or a.shape[:-2] != b.shape[:-2]:
        raise ShapeError(
            "matmul: matrices, or equal batches of them", f"{a.shape} and {b.shape}", "reshape one"
        )
    m, ka = a.shape[-2:][::-1] if trans_a else a.shape[-2:]
    kb, n = b.shape[-2:][::-1] if trans_b else b.shape[-2:]
    if ka != kb:
        raise ShapeError(
            "matmul: equal inner sizes", f"{ka} in {a.shape}, {kb} in {b.shape}", "transpose one"
        )
    out = _out_dtype("matmul", a, b, out_dtype)
    batch = [f"b{d}" for d in range(len(a.shape) - 2)]
    head = tuple(var(x) for x in batch)
    left = (var("k"), var("m")) if trans_a else (var("m"), var("k"))
    right = (var("n"), var("k")) if trans_b else (var("k"), var("n"))
    product = Call("mac", (a[(*head, *left)], b[(*head, *right)]), SUMS[a.dtype])
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
    given = (value,) * 4 if isinstance(value, int) else tuple(int(v) for v in value)
    if len(given) == 2:
        given = (given[0], given[0], given[1], given[1])
    if len(given) != 4 or min(given) < 0:
        raise ShapeError("padding: 1, 2 or 4 numbers >= 0", str(value), "top, bottom, left, right")
    return given[0], given[1], given[2], given[3]


def window_out(
    size: int, before: int, after: int, kernel: int, stride: int, dilation: int = 1
) -> int:
    """Return output size: (size + before + after - dilation (kernel - 1) - 1) // stride + 1."""
    reach = dilation * (kernel - 1) + 1
    if reach > size + before + after:
        raise ShapeError(
            f"a window within the padded size {size + before + after}", str(reach), "add padding"
        )
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
    (n, c, h, w), (k, cg, r, s) = x.shape, weight.shape
    if groups < 1 or c % groups or k % groups or cg * groups != c:
        needed = f"conv2d: {groups} groups that divide {c} and {k} channels, weights over c/groups"
        raise ShapeError(needed, f"weights over {cg}", "check groups")
    (sh, sw), (dh, dw) = _pair(stride, "stride"), _pair(dilation, "dilation")
    top, bottom, left, right = pads = pads_of(pad)
    oh, ow = window_out(h, top, bottom, r, sh, dh), window_out(w, left, right, s, sw, dw)
    out = _out_dtype("conv2d", x, weight, out_dtype)
    attrs = {"dilation": (dh, dw), "groups": groups, "pad": pads, "stride": (sh, sw)}
    return moves.template("conv2d", (x, weight), (n, k, oh, ow), out, **attrs)


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
    (kh, kw), (sh, sw) = _pair(window, "window"), _pair(stride, "stride")
    top, bottom, left, right = pads_of(pad)
    n, c1, h, w, c0 = x.shape
    oh, ow = window_out(h, top, bottom, kh, sh), window_out(w, left, right, kw, sw)
    floor = -65504.0 if x.dtype == "fp16" else -3.0e38
    edges = ((0, 0), (0, 0), (top, bottom), (left, right), (0, 0))
    source = moves.pad(x, edges, floor if mode == "max" else 0.0)
    names = axis_names(5)
    rh, rw = Axis("rh", kh, True), Axis("rw", kw, True)
    i, j, k, m, lane = (var(a) for a in names)
    element = source[i, j, k * sh + rh, m * sw + rw, lane]
    kind = "max" if mode == "max" else "sum"
    out = computed((n, c1, oh, ow, c0), names, Fold(kind, element, (rh, rw)), "", "pooling2d")
    return out if mode == "max" else vmuls(out, 1.0 / (kh * kw))
