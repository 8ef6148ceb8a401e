"""Sliding windows of the standard: pads, automatic pads, ceiling mode; one or two dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ascend_lab.errors import GraphError
from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.tensors import SMALL, Shape
from ascend_lab.graph.onnx.weights import check_size

Pair = tuple[int, int]
WINDOW: dict[str, Any] = {
    "kernel_shape": (),
    "strides": (),
    "pads": (),
    "dilations": (),
    "auto_pad": "NOTSET",
}
"""Attributes that all operators with windows share."""


@dataclass(frozen=True, slots=True)
class Window:
    """A window over an image: sizes per axis, height and width; a row has height 1."""

    kernel: Pair
    stride: Pair
    pads: tuple[Pair, Pair]
    dilation: Pair
    extra: Pair = (0, 0)
    """Elements behind the padded image that the last window of the ceiling mode reaches."""

    @property
    def reach(self) -> Pair:
        """Rows and columns a window spans: (k - 1) d + 1."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))  # type: ignore[return-value]


def window_of(ctx: Context, kernel: Shape, size: Shape) -> Window:
    """Return the window over the last axes of an input of spatial `size`."""
    rank = len(size)
    if rank not in (1, 2):
        ctx.unsupported("images of 1 or 2 dimensions", f"{rank} dimensions")
    if len(kernel) != rank or ctx.attr("kernel_shape") not in ((), kernel):
        raise GraphError(
            f"{ctx.where}: kernel_shape of {rank} sizes, as the weights",
            str(ctx.attr("kernel_shape") or kernel),
            "mend it",
        )
    stride, dilation = _sizes(ctx, "strides", rank), _sizes(ctx, "dilations", rank)
    if min(*kernel, *stride, *dilation) < 1:
        raise GraphError(f"{ctx.where}: sizes of at least 1", f"{kernel} {stride}", "mend it")
    if math.prod(kernel) > SMALL:
        ctx.unsupported(f"windows of at most {SMALL} elements", str(kernel))
    pads = _pads(ctx, kernel, stride, dilation, size)
    if any(n < 0 for side in pads for n in side):
        ctx.unsupported("pads of at least 0", str(pads))
    padded = tuple(n + sum(p) for n, p in zip(size, pads, strict=True))
    check_size(f"{ctx.where}: padded", (*ctx.shape(0)[:2], *padded), ctx.limits)
    lead = 2 - rank
    return Window(
        ((1,) * lead + kernel),  # type: ignore[arg-type]
        ((1,) * lead + stride),  # type: ignore[arg-type]
        (((0, 0),) * lead + pads),  # type: ignore[arg-type]
        ((1,) * lead + dilation),  # type: ignore[arg-type]
    )


def _sizes(ctx: Context, key: str, rank: int) -> Shape:
    given: Shape = ctx.attr(key) or (1,) * rank
    if len(given) != rank:
        raise GraphError(f"{ctx.where}: {key} of {rank} sizes", str(given), "mend it")
    return given


def _pads(
    ctx: Context, kernel: Shape, stride: Shape, dilation: Shape, size: Shape
) -> tuple[Pair, ...]:
    """Return (before, after) per axis: as given, or so that the output is ceil(size / stride)."""
    rank, auto, given = len(size), ctx.attr("auto_pad"), ctx.attr("pads")
    if auto in ("NOTSET", ""):
        flat = given or (0,) * (2 * rank)
        if len(flat) != 2 * rank:
            raise GraphError(f"{ctx.where}: {2 * rank} pads", str(flat), "mend it")
        return tuple((flat[i], flat[rank + i]) for i in range(rank))
    if any(given):
        ctx.unsupported("pads or auto_pad", "both")
    if auto == "VALID":
        return ((0, 0),) * rank
    if auto not in ("SAME_UPPER", "SAME_LOWER"):
        ctx.unsupported("auto_pad NOTSET, VALID, SAME_UPPER or SAME_LOWER", str(auto))
    if any(d != 1 for d in dilation):
        ctx.unsupported("dilations of 1 with auto_pad SAME", str(dilation))
    found = []
    for k, s, d, n in zip(kernel, stride, dilation, size, strict=True):
        total = (-(-n // s) - 1) * s + (k - 1) * d + 1 - n
        if total < 0 and ctx.op.endswith("Pool"):  # the standard's pads are negative here
            ctx.unsupported("windows with auto_pad SAME that leave no gap", f"{k} every {s}")
        total = max(total, 0)
        less, more = total // 2, total - total // 2
        found.append((less, more) if auto == "SAME_UPPER" else (more, less))
    return tuple(found)


def as_image(ctx: Context, value: Value) -> Value:
    """Return (n, c, w) as (n, c, 1, w); an image stays itself."""
    if len(value.shape) == 4:
        return value
    if len(value.shape) != 3:
        ctx.unsupported("tensors of 3 or 4 axes", str(value.shape))
    n, c, w = value.shape
    return ctx.emit("reshape", value, shape=(n, c, 1, w))


def as_row(ctx: Context, value: Value, rank: int) -> Value:
    """Return an image of height 1 as (n, c, w) if the input had `rank` 3."""
    if rank == 4:
        return value
    n, c, _, w = value.shape
    return ctx.emit("reshape", value, shape=(n, c, w))


def plain(value: Any) -> Any:
    """Return equal sizes as one number, nested ones too: ((1, 1), (1, 1)) is 1."""
    if isinstance(value, int):
        return value
    parts = [plain(v) for v in value]
    same = isinstance(parts[0], int) and len(set(map(str, parts))) == 1
    return parts[0] if same else tuple(tuple(p) if isinstance(p, list) else p for p in value)
