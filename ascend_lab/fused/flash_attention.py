"""Attention that never stores the scores in global memory: FlashAttention.

For s queries and t keys the scores q k^T and their softmax are s x t matrices, one for each head:

    unfused        q k^T -> GM; GM -> softmax -> GM; GM -> times v -> GM       three kernels
    fused          blocks of q, k and v -> scores, softmax, times v -> GM      one kernel
    saved          for 12 heads, 512 queries and keys in fp16: writing and reading 6.3 MB, twice

On cores that have both a cube and a vector unit the kernel is `operators.kernels.flash`; on chips
with separate cube and vector cores it is `operators.kernels.flash_split`. Where neither applies,
the three steps are separate kernels.

Source: Dao et al. 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention with
IO-Awareness".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ascend_lab.machine import isa, layout
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim import DeviceMemory, simulate_kernel
from ascend_lab.operators.kernels import flash, flash_split
from ascend_lab.operators.kernels.flash_shape import SCALES, FlashShape, FlashTiling, fits
from ascend_lab.operators.ops import formats
from ascend_lab.operators.ops.attention import grouped_heads, scale_of
from ascend_lab.operators.ops.formats import Shape, Values
from ascend_lab.operators.ops.operator import Call, Template


def flash_shape(call: Call) -> FlashShape:
    """Return the problem of a call as a `FlashShape`, with all batch axes joined into one.

    A call may have an attribute `views`, which says where its matrices lie in larger tensors; only
    then the number of heads is kept in the result.
    """
    q, k, v = call.shapes[:3]
    group_heads = grouped_heads(q, k, v)  # query heads that share k and v: one taller matrix
    tensors = zip(("q", "k", "v", "mask"), call.shapes, strict=False)
    shared_tensors = tuple(name for name, shape in tensors if _single(shape))
    views = call.attrs.get("views", ())
    heads = call.outputs[0][-3] if views and len(call.outputs[0]) > 2 else 1
    return FlashShape(
        batch=math.prod(call.outputs[0][:-2]) // group_heads,
        rows=q[-2] * group_heads,
        keys=k[-2],
        depth=q[-1],
        width=v[-1],
        scale=scale_of(call.attrs["scale"], q[-1]),
        mask=_mask_kind(call.shapes[3], group_heads) if len(call.shapes) > 3 else "",
        shared=shared_tensors,
        heads=heads,
        views=views,
        dtype=call.dtypes[0],
        causal=group_heads if call.attrs.get("causal") else 0,
    )


def _mask_kind(mask: Shape, group_heads: int) -> str:
    """Return "rows" for a mask that drops the same keys for each query and head, else "full".

    (b, 1, 1, t) is "rows", (s, t) is "full".
    """
    one_row = len(mask) < 2 or mask[-2] == 1
    one_head = group_heads == 1 or len(mask) < 3 or mask[-3] == 1
    return "rows" if one_row and one_head else "full"


def _single(shape: Shape) -> bool:
    """Tell whether all batch axes are 1, so that there is one matrix for the whole batch."""
    return math.prod(shape[:-2]) == 1


def _applies(call: Call, chip: Chip) -> bool:
    """Tell whether the kernel can run: the smallest blocks fit, and the scale is in range.

    bf16 and `causal` need separate vector cores. Where the kernel cannot run, the expression of
    `attention` is scheduled.
    """
    shape = flash_shape(call)
    if chip.combined:
        if shape.dtype != "fp16" or shape.causal:
            return False
        smallest = FlashTiling(isa.FRACTAL, isa.FRACTAL)
        return SCALES[0] <= shape.scale <= SCALES[1] and fits(shape, smallest, chip)
    return bool(flash_split.split_tilings(shape, chip))


def flash_kernel(shape: FlashShape, chip: Chip, tiling: FlashTiling | None = None) -> isa.Kernel:
    """Return the kernel for coupled cores, or the pipeline of separate cube and vector cores.

    Coupled cores have a cube and a vector unit each; `tiling` applies to them only. Raises
    `CapacityError` where blocks do not fit.
    """
    if chip.combined:
        return isa.as_kernel(flash.flash_launch(shape, chip, tiling))
    tiling_of_wide_heads = (
        None if max(shape.fractals[2:]) <= NARROW else quickest_tiling(shape, chip)
    )
    return isa.as_kernel(flash_split.flash_pipeline_launch(shape, chip, tiling_of_wide_heads))


NARROW = 8
"""Most fractals of a head (128 elements) for which the published kernel's tiling is taken.

It is for heads of this size; for wider heads tilings are simulated (`quickest_tiling`).
"""


@lru_cache(64)
def quickest_tiling(shape: FlashShape, chip: Chip) -> flash_split.SplitTiling:
    """Return the quickest tiling for wide heads, simulated on the same matrices without a mask.

    Blocks of many rows of q do more multiplications for each element of k and v that is loaded.
    Blocks of few rows leave room for more keys in a tile, so that fewer partial sums go to the
    vector cores.
    """
    unmasked = replace(shape, heads=1, views=(), causal=0, mask="", shared=())
    quickest: flash_split.SplitTiling | None = None
    fewest_cycles = math.inf
    for tiling in flash_split.split_tilings(shape, chip):
        if _key_cycles(unmasked, tiling, chip) >= fewest_cycles:
            continue  # loading k and v alone would take longer than the best kernel
        kernel = isa.as_kernel(flash_split.flash_pipeline_launch(unmasked, chip, tiling))
        cycles = simulate_kernel(kernel, chip, DeviceMemory.of(chip)).cycles
        if cycles < fewest_cycles:
            quickest = tiling
            fewest_cycles = cycles
    if quickest is None:
        return flash_split.split_tiling(shape, chip)  # raises: none fits
    return quickest


def _key_cycles(shape: FlashShape, tiling: flash_split.SplitTiling, chip: Chip) -> float:
    """Return a lower bound: the cycles of loading k and v to L1 once for each block of rows.

    blocks * keys * (depth + width) * 2 bytes / (cores * rate), evenly divided over the cores.
    """
    rows, keys, depth, width = shape.fractals
    # Counted in fractals of 16: 1024 rows are 64, and with 128 rows a block there are 8 blocks.
    blocks = shape.batch * isa.ceil_div(rows, tiling.rows // isa.FRACTAL)
    size_bytes = blocks * keys * (depth + width) * isa.FRACTAL**2 * 2
    return size_bytes / (chip.core_count * chip.path("GM", "L1").rate_bytes_per_cycle)


def _feed(call: Call, arrays: Sequence[Values]) -> dict[str, Values]:
    """Return the kernel's tensors by name: q, k, v and a mask in the layouts that it reads."""
    shape = flash_shape(call)
    # with grouped heads, the rows of a group's heads form one taller matrix against one k and v
    group_heads = grouped_heads(*call.shapes[:3])
    axes = call.outputs[0][:-2]
    batch = axes if group_heads == 1 else (*axes[:-1], axes[-1] // group_heads)
    q, k, v = arrays[:3]
    matrices = {"q": _by_query(q, group_heads), "k": k, "v": v}
    feed = {name: _fractals(_as_matrices(x, batch, x.shape[-2:])) for name, x in matrices.items()}
    if len(arrays) > 3:
        one_row = shape.mask == "rows"
        mask = arrays[3]
        grouped = _grouped_mask(mask, call, group_heads, one_row=one_row)
        masks = _as_matrices(grouped, batch, (1 if one_row else shape.rows, shape.keys))
        feed["mask"] = _padded(masks) if one_row else _fractals(masks)
    return feed


def _by_query(x: Values, group_heads: int) -> Values:
    """Return (..., h, s, d) as (..., h / g, s g, d), the g heads of a query side by side."""
    if group_heads == 1:
        return x
    *lead, count, rows, columns = x.shape
    # 8 heads in groups of 4: the rows are query 0 of heads 0, 1, 2, 3, then query 1 of heads 0 to
    # 3.
    heads_last = x.reshape(*lead, count // group_heads, group_heads, rows, columns).swapaxes(-3, -2)
    return heads_last.reshape(*lead, count // group_heads, rows * group_heads, columns)


def _by_head(x: Values, group_heads: int) -> Values:
    """Undo `_by_query`: return (..., h / g, s g, d) as (..., h, s, d)."""
    if group_heads == 1:
        return x
    *lead, count, rows, columns = x.shape
    # (2, 20, 64) with 4 heads a group: (2, 5, 4, 64), (2, 4, 5, 64), (8, 5, 64).
    heads_first = x.reshape(*lead, count, rows // group_heads, group_heads, columns).swapaxes(
        -3, -2
    )
    return heads_first.reshape(*lead, count * group_heads, rows // group_heads, columns)


def _grouped_mask(mask: Values, call: Call, heads: int, *, one_row: bool) -> Values:
    """Return a mask for grouped heads: one row for all queries, or a row for each row of q."""
    if one_row or heads == 1:
        return mask
    *batch, count, rows, _ = call.outputs[0]
    if _single(mask.shape):
        for_every_head = np.broadcast_to(
            mask.reshape(mask.shape[-2:]), (heads, rows, mask.shape[-1])
        )
        return _by_query(for_every_head, heads)
    return _by_query(np.broadcast_to(mask, (*batch, count, rows, mask.shape[-1])), heads)


def _as_matrices(x: Values, batch: Shape, matrix: Shape) -> Values:
    """Return x as (count, rows, columns): one matrix for the whole batch, or one for each entry."""
    if _single(x.shape) or math.prod(batch) == 1:
        return np.broadcast_to(x.reshape(x.shape[-2:]), matrix).reshape((1, *matrix))
    return np.broadcast_to(x, (*batch, *matrix)).reshape((math.prod(batch), *matrix))


def _padded(mask: Values) -> Values:
    """Return the rows of a mask padded with zeros to whole fractals."""
    # 33 keys are padded to 48.
    keys = mask.shape[-1]
    padded_keys = isa.ceil_div(keys, isa.FRACTAL) * isa.FRACTAL
    filled = np.zeros((mask.shape[0], padded_keys), mask.dtype)
    filled[:, :keys] = mask[:, 0]
    return filled


def _fractals(x: Values) -> Values:
    """Return matrices in FRACTAL_NZ."""
    return layout.pack(layout.address_map("FRACTAL_NZ", x.shape, formats.format_of(x)), x)


def _fetch(call: Call, memory: Mapping[str, Values]) -> tuple[Values, ...]:
    """Return the result of a call from the kernel's tensor y."""
    (out_shape,) = call.outputs
    shape = flash_shape(call)
    matrices = (shape.batch, shape.rows, shape.width)
    fractal_map = layout.address_map("FRACTAL_NZ", matrices, shape.dtype)
    values = layout.unpack(fractal_map, memory["y"].reshape(-1))
    group_heads = grouped_heads(*call.shapes[:3])
    return (_by_head(values, group_heads).reshape(out_shape),)


TEMPLATES = [
    (
        "flash_attention",
        Template(
            lambda call, chip: flash_kernel(flash_shape(call), chip),
            ("q", "k", "v", "mask"),
            applies=_applies,
            feed=_feed,
            fetch=_fetch,
        ),
    )
]
