"""Operations of the cube: matmul, conv2d; and pooling, which shares their windows."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_lab.dsl.expr import Call
from ascend_lab.dsl.formulas import Fold, computed
from ascend_lab.dsl.moves import axis_names
from ascend_lab.dsl.moves import pad as pad_tensor
from ascend_lab.dsl.operations import vmuls
from ascend_lab.dsl.tensor import Axis, Compute, Template, Tensor
from ascend_lab.errors import ShapeError, TypeMismatchError
from ascend_lab.isa import var

SUMS = {"fp16": "fp32", "bf16": "fp32", "int8": "int32"}
"""Format the cube adds in, per operand format."""


def _out_dtype(operation: str, a: Tensor, b: Tensor, out_dtype: str | None) -> str:
    if a.dtype != b.dtype or a.dtype not in SUMS:
        raise TypeMismatchError(
            f"{operation}: operands of one cube format ({', '.join(SUMS)})",
            f"{a.dtype} and {b.dtype}",
            "cast them",
        )
    out = out_dtype or (a.dtype if a.dtype != "int8" else "int32")
    if out not in (SUMS[a.dtype], a.dtype if a.dtype != "int8" else "fp16"):
        raise TypeMismatchError(
            f"{operation}: a result in {SUMS[a.dtype]} or {a.dtype}", out, "cast it afterwards"
        )
    return out


def matmul(
    a: Tensor,
    b: Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    out_dtype: str | None = None,
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
        raise ShapeError(
            "conv2d: x (n, c, h, w), weight (k, c/groups, r, s)",
            f"{x.shape} and {weight.shape}",
            "reshape them",
        )
    (n, c, h, w), (k, cg, r, s) = x.shape, weight.shape
    if groups < 1 or c % groups or k % groups or cg * groups != c:
        raise ShapeError(
            f"conv2d: {groups} groups that divide {c} and {k} channels, weights over c/groups",
            f"weights over {cg}",
            "check groups",
        )
    (sh, sw), (dh, dw) = _pair(stride, "stride"), _pair(dilation, "dilation")
    top, bottom, left, right = pads_of(pad)
    oh, ow = window_out(h, top, bottom, r, sh, dh), window_out(w, left, right, s, sw, dw)
    attrs = (
        ("dilation", (dh, dw)),
        ("groups", groups),
        ("pad", (top, bottom, left, right)),
        ("stride", (sh, sw)),
    )
    out = _out_dtype("conv2d", x, weight, out_dtype)
    return Tensor("", (n, k, oh, ow), out, Template("conv2d", (x, weight), attrs), "conv2d")


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
    source = pad_tensor(x, edges, floor if mode == "max" else 0.0)
    names = axis_names(5)
    rh, rw = Axis("rh", kh, True), Axis("rw", kw, True)
    i, j, k, m, lane = (var(a) for a in names)
    element = source[i, j, k * sh + rh, m * sw + rw, lane]
    kind = "max" if mode == "max" else "sum"
    out = computed((n, c1, oh, ow, c0), names, Fold(kind, element, (rh, rw)), "", "pooling2d")
    return out if mode == "max" else vmuls(out, 1.0 / (kh * kw))
