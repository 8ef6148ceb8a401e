"""Transposed convolution."""

from __future__ import annotations

from dataclasses import replace

from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import converter
from ascend_lab.graph.onnx.tensors import FLOATS, Shape
from ascend_lab.graph.onnx.weights import check_size
from ascend_lab.graph.onnx.windows import Pair, as_image, as_row, plain, window_of


@converter("ConvTranspose", types=(FLOATS,))
def _conv_transpose(ctx: Context) -> Value:
    shape, weight = ctx.shape(0), ctx.shape(1)
    spatial = shape[2:]
    given: Shape = ctx.attr("output_padding") or (0,) * len(spatial)
    if len(given) != len(spatial):
        ctx.unsupported(f"{len(spatial)} sizes of output_padding", str(given))
    auto = ctx.attr("auto_pad")
    if auto.startswith("SAME"):
        ctx.attrs = {**ctx.attrs, "auto_pad": "NOTSET"}
    window = window_of(ctx, weight[2:], spatial)
    lead = (1,) * (2 - len(spatial))
    extra = ((0,) * len(lead)) + given
    size, wanted = lead + spatial, ctx.attr("output_shape")
    if wanted or auto.startswith("SAME"):
        target = wanted[-len(spatial) :] if wanted else tuple(
            n * s for n, s in zip(spatial, window.stride[len(lead) :], strict=True)
        )  # fmt: skip
        rows = [
            _sides(ctx, (n - 1) * s + r + e - t, auto)
            for n, s, r, e, t in zip(
                size, window.stride, window.reach, extra, (*lead, *target), strict=True
            )
        ]
        window = replace(window, pads=(rows[0], rows[1]))
    whole = ((n - 1) * s + r for n, s, r in zip(size, window.stride, window.reach, strict=True))
    check_size(f"{ctx.where}: before its pads are cut", (*shape[:2], *whole), ctx.limits)
    values = [as_image(ctx, ctx.input(i)) for i in range(2)]
    if ctx.has(2):
        values.append(ctx.input(2))
    how = {"stride": window.stride, "pad": window.pads, "dilation": window.dilation}
    settings = {key: plain(value) for key, value in {**how, "output_padding": extra}.items()}
    out = ctx.emit("conv_transpose2d", *values, groups=ctx.attr("group"), **settings)
    return as_row(ctx, out, len(shape))


def _sides(ctx: Context, total: int, auto: str) -> Pair:
    """Return the pads that make an output of the size asked for; the odd one as `auto` says."""
    if total < 0:
        ctx.unsupported("an output_shape that needs no output_padding", f"{-total} missing")
    less, more = total // 2, total - total // 2
    return (less, more) if auto == "SAME_UPPER" else (more, less)
