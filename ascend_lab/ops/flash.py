"""FlashAttention: attention with a kernel that never stores the scores in device memory.

Source: Dao et al. 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention with
IO-Awareness".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.chip import Chip
from ascend_lab.isa import Kernel, as_kernel
from ascend_lab.kernels.flash import flash_launch
from ascend_lab.kernels.flash_chunks import widest
from ascend_lab.kernels.flash_shape import (
    FlashShape,
    FlashTiling,
    default_scale,
    fits,
)
from ascend_lab.kernels.flash_split import split_kernel
from ascend_lab.kernels.gemm_schedule import FRACTAL, up
from ascend_lab.layout import address_map, pack, unpack
from ascend_lab.ops.operator import Example
from ascend_lab.ops.registry import get, register
from ascend_lab.ops.shapes import Shape
from ascend_lab.ops.template import Call, Template

Values = NDArray[Any]
DTYPE = "fp16"


def flash_shape(call: Call) -> FlashShape:
    """Return a call as the kernel's description: batch axes joined into one."""
    q, k, v = call.shapes[:3]
    scale = call.attrs["scale"]
    kind, shared = "", [n for n, s in zip("qkv", (q, k, v), strict=True) if _single(s)]
    if len(call.shapes) > 3:
        mask = call.shapes[3]
        kind = "rows" if len(mask) < 2 or mask[-2] == 1 else "full"
        shared += ["mask"] * _single(mask)
    return FlashShape(
        math.prod(call.outputs[0][:-2]), q[-2], k[-2], q[-1], v[-1],
        default_scale(q[-1]) if scale is None else float(scale), kind, tuple(shared),
    )  # fmt: skip


def _single(shape: Shape) -> bool:
    """Tell whether there is one matrix for the whole batch."""
    return math.prod(shape[:-2]) == 1


def applies(call: Call, chip: Chip) -> bool:
    """Tell whether the kernel can run: fp16, and the smallest blocks fit.

    Elsewhere the operator is computed as `attention`.
    """
    if call.dtypes[0] != DTYPE:
        return False
    shape = flash_shape(call)
    if chip.combined:
        return fits(shape, FlashTiling(FRACTAL, FRACTAL), chip)
    return max(shape.fractals[2:]) <= widest(chip)


def flash_kernel(shape: FlashShape, chip: Chip, tiling: FlashTiling | None = None) -> Kernel:
    """Return the kernel: one launch on coupled cores, phases over chunks on separate ones.

    `tiling` belongs to the former. Raises `CapacityError` where blocks do not fit.
    """
    if chip.combined:
        return as_kernel(flash_launch(shape, chip, tiling))
    return split_kernel(shape, chip)


def _build(call: Call, chip: Chip) -> Kernel:
    return flash_kernel(flash_shape(call), chip)


def _feed(call: Call, arrays: Sequence[Values]) -> dict[str, Values]:
    batch = call.outputs[0][:-2]
    feed = {
        name: _fractals(_whole(x, batch, x.shape[-2:]))
        for name, x in zip("qkv", arrays, strict=False)
    }
    if len(arrays) > 3:
        shape = flash_shape(call)
        rows = 1 if shape.mask == "rows" else shape.rows
        mask = _whole(arrays[3], batch, (rows, shape.keys))
        feed["mask"] = _padded(mask) if shape.mask == "rows" else _fractals(mask)
    return feed


def _whole(x: Values, batch: Shape, matrix: Shape) -> Values:
    """Return x with whole matrices: one where it has one for the batch, else one each."""
    count = 1 if _single(x.shape) else math.prod(batch)
    target = matrix if count == 1 else (*batch, *matrix)
    return np.broadcast_to(x.reshape(x.shape[-2:]) if count == 1 else x, target).reshape(
        (count, *matrix)
    )


def _padded(mask: Values) -> Values:
    """Return rows of a mask filled up with zeros to whole fractals."""
    wide = np.zeros((mask.shape[0], up(mask.shape[-1], FRACTAL) * FRACTAL), mask.dtype)
    wide[:, : mask.shape[-1]] = mask[:, 0]
    return wide


def _fractals(x: Values) -> Values:
    return pack(address_map("FRACTAL_NZ", x.shape, DTYPE), x)


def _fetch(call: Call, memory: Mapping[str, Values]) -> tuple[Values, ...]:
    (out,) = call.outputs
    where = address_map("FRACTAL_NZ", (math.prod(out[:-2]), *out[-2:]), DTYPE)
    return (unpack(where, memory["y"].reshape(-1)).reshape(out),)


KERNEL = Template(_build, _feed, _fetch, applies)

register(
    replace(
        get("attention"),
        name="flash_attention",
        summary="softmax(scale q k^T + mask) v, block by block: scores stay on the core",
        template=KERNEL,
        layouts=dict.fromkeys(("q", "k", "v", "context"), "FRACTAL_NZ"),
        examples=(
            Example(((1, 1), (1, 1), (1, 1))),
            Example(((2, 17, 16), (2, 33, 16), (2, 33, 8))),
            Example(((2, 2, 7, 16), (2, 2, 16, 16), (2, 2, 16, 16), (7, 16))),
            Example(((2, 2, 40, 16), (1, 1, 72, 16), (1, 1, 72, 16), (2, 1, 1, 72))),
            Example(((1, 64, 32), (1, 100, 32), (1, 100, 48)), {"scale": 0.25}),
        ),
    )
)
