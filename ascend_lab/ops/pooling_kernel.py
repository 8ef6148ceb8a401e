"""The kernels of pooling: images lie in device memory as NC1HWC0, and windows are folded there.

Rows of `C0` channels stay together, so that every window element is one contiguous block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab import dsl as te
from ascend_lab.chip import Chip
from ascend_lab.isa import Kernel
from ascend_lab.layout import address_map, pack, unpack
from ascend_lab.ops.formats import numpy_type
from ascend_lab.ops.lifting import narrow, wide
from ascend_lab.ops.shapes import Pairs
from ascend_lab.ops.template import Call, Template
from ascend_lab.ops.windowing import Pair

Values = NDArray[Any]
Geometry = Callable[[Call], tuple[Pair, Pair, Pairs]]
LOWEST = {"fp16": -65504.0, "fp32": -3.0e38, "bf16": -3.0e38}
"""What padding holds when the largest element is sought: no value is smaller."""


def folded(x: te.Tensor, size: Pair, step: Pair, kind: str) -> te.Tensor:
    """Return the "max" or "sum" of every window of a padded image (n, c1, h, w, c0)."""
    n, c1, h, w, c0 = x.shape
    out = (n, c1, (h - size[0]) // step[0] + 1, (w - size[1]) // step[1] + 1, c0)
    r, s = te.reduce_axis(size[0], "r"), te.reduce_axis(size[1], "s")
    fold = te.max if kind == "max" else te.sum

    def formula(b: Any, c: Any, i: Any, j: Any, lane: Any) -> Any:
        return fold(x[b, c, r + i * step[0], s + j * step[1], lane], (r, s))

    return te.compute(out, formula)


def _blocks(call: Call) -> tuple[int, ...]:
    return address_map("NC1HWC0", call.shapes[0], call.dtypes[0]).storage_shape


def _edges(pads: Pairs) -> tuple[tuple[int, int], ...]:
    return ((0, 0), (0, 0), *pads, (0, 0))


def _feed(call: Call, arrays: Sequence[Values]) -> dict[str, Values]:
    x = arrays[0]
    return {"x": pack(address_map("NC1HWC0", x.shape, call.dtypes[0]), x)}


def _fetch(call: Call, memory: Mapping[str, Values]) -> tuple[Values, ...]:
    layout = address_map("NC1HWC0", call.outputs[0], call.dtypes[0])
    return (unpack(layout, memory["y"].reshape(-1)),)


def max_kernel(geometry: Geometry) -> Template:
    """Return the template of maximum pooling."""

    def build(call: Call, chip: Chip) -> Kernel:
        size, step, pads = geometry(call)
        x = te.placeholder(_blocks(call), call.dtypes[0], "x")
        padded = te.pad(x, _edges(pads), LOWEST[x.dtype])
        values = wide(padded) if x.dtype == "bf16" else padded
        y = narrow(folded(values, size, step, "max"), x.dtype)
        return te.lower(te.auto_schedule(te.renamed(y, "y"), chip))

    return Template(build, _feed, _fetch)


def average_kernel(geometry: Geometry, counts: Callable[[Call], Values]) -> Template:
    """Return the template of average pooling; `counts(call)` (oh, ow) is what to divide by.

    Where all counts are equal they are a number of the program; otherwise their reciprocals are a
    small fp32 tensor `rate` beside x.
    """

    def build(call: Call, chip: Chip) -> Kernel:
        size, step, pads = geometry(call)
        x = te.placeholder(_blocks(call), call.dtypes[0], "x")
        total = folded(wide(te.pad(x, _edges(pads))), size, step, "sum")
        many = counts(call)
        if np.ptp(many) == 0:
            mean = te.vmuls(total, 1.0 / float(many.flat[0]))
        else:
            rate = te.placeholder((*many.shape, 1), "fp32", "rate")
            mean = te.vmul(total, te.broadcast(rate, total.shape))
        return te.lower(te.auto_schedule(te.renamed(narrow(mean, x.dtype), "y"), chip))

    def feed(call: Call, arrays: Sequence[Values]) -> dict[str, Values]:
        many, tensors = counts(call), _feed(call, arrays)
        if np.ptp(many):
            tensors["rate"] = (1.0 / many).astype(numpy_type("fp32"))
        return tensors

    return Template(build, feed, _fetch)
