"""Maps measured attention to our operators: causal rows, latent heads, selected keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ascend_lab.compare.estimates import Estimate, at_peak
from ascend_lab.compare.rows import Shape, Work
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip

if TYPE_CHECKING:
    from ascend_lab.operators.kernels.flash_shape import FlashShape

FLASH = "flash_attention"
TILE = 512
"""Rows of q, and keys, in a tile of the measured kernels; fully masked tiles are skipped.

Source: hicann/ops-transformer, attention/fused_infer_attention_score/op_host/arch22, sizes of the
basic block in m and in s2 where there are more than 16 queries.
"""
FEW_QUERIES = 16
"""The measured kernels use other tile sizes for up to this many queries (same source)."""
TILING_BYTES = 1596
"""What every core reads before it begins: sizes, and what each core owns, as arrays of 26.

20 numbers and a flag, 84 bytes; nine small records, 144; four numbers, 16; and 3 + 6 + 2 * 2 arrays
of 26 numbers, 1352. Source: hicann/ops-transformer, fused_infer_attention_score_tiling.h.
"""
LINE_BYTES = 64
"""A line of the scalar unit's cache (Ascend C, DataCacheCleanAndInvalid)."""
SKIPPED = f"causal: masked tiles of {TILE} keys skipped as measured, a mask added to the others"
LIBRARY = f"blocks of {TILE} rows dealt whole, tiling data read first, as in the library's kernel"
"""The remark on rows that are timed with the library's tiles."""


# -- one kernel ------------------------------------------------------------------------------------
def is_causal(work: Work) -> bool:
    """Tell whether a row's attention is causal: a query sees no keys after its own position."""
    return work.attributes.get("causal") in (True, 1)


def as_called(work: Work) -> Work:
    """Return a row of flash attention with the shapes of a call of the library.

    Causal attention needs no mask tensor: a query sees the keys up to its own. Heads that share
    keys are stacked as rows of q in the table; here they are separate heads, so that a query's
    position follows from its row.
    """
    if not is_causal(work) or len(work.shapes) not in (3, 4):
        return work
    q, k, v = work.shapes[:3]
    queries = work.attributes.get("queries", q[-2])
    if len(q) == 4 and q[-2] != queries:
        if type(queries) is not int or queries < 1 or q[-2] % queries:
            needed = f"{work.operator}: queries that divide the {q[-2]} rows of q"
            raise InputError(needed, f"queries={queries}", "correct that row")
        # q (1, 2, 96, 64) with 32 queries: 3 heads share the keys, so that q is (1, 6, 32, 64)
        q = (q[0], q[1] * (q[2] // queries), queries, q[3])
    dtypes = work.dtypes if len(work.dtypes) == 1 else work.dtypes[:3]
    return replace(work, shapes=(q, k, v), dtypes=dtypes)


def as_measured(work: Work) -> Work:
    """Return a causal call as the measured kernel computes it, other calls as they are.

    It skips tiles of `TILE` keys that no row of a block sees, and adds a mask to all others: with
    512 keys or fewer it skips nothing. Each query gets the mean of the keys that are not skipped;
    for 1024 queries of 1024 keys these are (512 + 1024) / 2.
    """
    if not is_causal(work) or len(work.shapes) != 3:
        return work
    q, k, v = work.shapes
    queries = q[-2]
    keys = k[-2]
    shared_by = q[-3] // k[-3] if len(q) > 3 and len(k) > 3 else 1
    # 8 heads of q that share keys: 64 queries of them fill a block of 512 rows
    step = max(1, TILE // max(shared_by, 1))  # queries whose heads fill a block of rows
    computed_scores = 0
    # 1024 queries and keys in tiles of 512: queries 0 .. 511 read 512 keys, the others 1024
    for first_query in range(0, queries, step):
        end = min(first_query + step, queries)
        # with more keys than queries the last query sees all keys: the first ones are a cache
        visible_keys = end + keys - queries
        computed_scores += (end - first_query) * min(keys, math.ceil(visible_keys / TILE) * TILE)
    mean = math.ceil(computed_scores / queries)
    # the fourth input is the mask that the measured kernel adds
    shapes = (q, (*k[:-2], mean, k[-1]), (*v[:-2], mean, v[-1]), (queries, mean))
    attributes = {word: value for word, value in work.attributes.items() if word != "causal"}
    return replace(work, shapes=shapes, dtypes=work.dtypes[:1], attributes=attributes)


def is_library(work: Work) -> bool:
    """Tell whether the library's kernel was measured, as far as a row shows it.

    Sources that empty L2 before every call time libraries; kernels written by hand are timed warm.
    """
    return work.operator == FLASH and work.l2 == "cold"


def busy_cores(work: Work, chip: Chip) -> int:
    """Return the cores that are busy to the end where blocks of `TILE` rows are dealt whole.

    32 blocks on 24 cores take two turns, so that 16 cores would do. Latent heads, whose keys are
    wider than their values, are cut so that all cores get the same.
    """
    q, k, v = work.shapes[:3]
    if q[-2] <= FEW_QUERIES or q[-1] != v[-1]:
        return chip.core_count
    matrices = math.prod(k[:-2])
    rows = math.prod(q[:-1]) // matrices
    blocks = matrices * math.ceil(rows / TILE)
    turns = math.ceil(blocks / chip.core_count)
    return math.ceil(blocks / turns)


def tiling_read_s(chip: Chip) -> float:
    """Return the seconds in which the scalar unit reads the tiling data from memory.

    It waits for each line, n lines of l cycles: n l / f.
    """
    # 1596 bytes are 25 lines of 64
    lines = math.ceil(TILING_BYTES / LINE_BYTES)
    return lines * chip.device_memory.latency_cycles / chip.clock_hz


def latent(work: Work) -> Work:
    """Return multi-head latent attention as one call: q and k join a latent and a rotary part.

    Inputs are latent q, rotary q, latent k, rotary k, latent v. All heads share one key, as wide
    as both parts (512 + 64), and one value, 512 wide.
    Source: DeepSeek-AI 2024, "DeepSeek-V2" (multi-head latent attention, weights absorbed).
    """
    _check_count(work, 5)
    q, q_rotary, k, k_rotary, v = (_heads_first(work, shape) for shape in work.shapes)
    # 512 + 64 numbers for q and k, 512 for v
    shapes = ((*q[:3], q[3] + q_rotary[3]), (*k[:3], k[3] + k_rotary[3]), v)
    return replace(work, operator=FLASH, shapes=shapes, dtypes=work.dtypes[:1])


def _check_count(work: Work, count: int) -> None:
    """Raise `InputError` unless a row has `count` inputs of 4 axes: batch, tokens, heads, size."""
    if len(work.shapes) != count or any(len(shape) != 4 for shape in work.shapes):
        needed = f"{work.operator}: {count} inputs of four axes"
        raise InputError(needed, str(work.shapes), "correct that row")


def _heads_first(work: Work, shape: Shape) -> Shape:
    """Return (batch, heads, tokens, size) of a shape in the row's layout."""
    layout = work.attributes.get("layout", "BNSD")
    if layout not in ("BNSD", "BSND"):
        needed = f"{work.operator}: layout BNSD or BSND"
        raise InputError(needed, str(layout), "correct that row")
    batch, second, third, size = shape
    return (batch, third, second, size) if layout == "BSND" else (batch, second, third, size)


# -- each query selects some of the keys -----------------------------------------------------------
def selected_shape(work: Work) -> FlashShape:
    """Return attention to selected keys: the heads of a query are rows, its keys a matrix.

    Inputs are q, k, v and the numbers of the keys: (b, s, h, d), (b, t, 1, d), (b, t, 1, e) and
    (b, s, 1, n). What a query reads was gathered into a ring that never leaves L2: for memory all
    queries share one matrix of keys.
    """
    from ascend_lab.operators.kernels.flash_shape import FlashShape, default_scale

    _check_count(work, 4)
    q, _, v, key_numbers = (_heads_first(work, shape) for shape in work.shapes)
    batch, heads, queries, depth = q
    return FlashShape(
        batch * queries,
        heads,
        key_numbers[3],
        depth,
        v[3],
        default_scale(depth),
        shared=("k", "v"),
        dtype=_dtype(work),
    )


def _dtype(work: Work) -> str:
    """Return our name of the number format of q."""
    from ascend_lab.operators.dsl.tensor import ALIASES

    return ALIASES.get(work.dtypes[0], work.dtypes[0])


def selected(work: Work, chip: Chip) -> Estimate:
    """Time attention to selected keys: vector cores gather rows while the cube multiplies others.

    Each half of a tile's rows is moved by one vector core to UB and on to a ring in L2, where the
    cube reads them. The first tile is gathered before the first product; all others overlap with
    products, unless the vector core's copies take longer than the products. A row of v is the first
    part of a row of k, and is gathered with it.

    Source: hicann/ops-transformer, attention/sparse_flash_attention/op_kernel/arch22 (MergeKv).
    """
    from ascend_lab.fused.flash_attention import flash_kernel
    from ascend_lab.machine.sim import DeviceMemory, simulate_kernel

    shape = selected_shape(work)
    timeline = simulate_kernel(flash_kernel(shape, chip), chip, DeviceMemory.of(chip))
    row_cycles = gathered_row_cycles(shape, chip)
    # 26 queries on 24 cores: some cores have 2, and these decide
    queries_of_core = math.ceil(shape.batch / chip.core_count)
    rows_of_query = math.ceil(shape.keys / chip.vector_cores_per_core)
    rows_of_tile = math.ceil(min(TILE, shape.keys) / chip.vector_cores_per_core)
    copies = timeline.busy_cycles.get("AIV.MTE2", 0) + queries_of_core * rows_of_query * row_cycles
    first_copy_cycles = rows_of_tile * row_cycles + chip.device_memory.latency_cycles
    # whichever of the three takes longest hides the others
    memory_s = (timeline.memory_bytes + table_bytes(work)) / chip.device_memory.rate_bytes_per_s
    parts = {
        "products": (timeline.cycles + first_copy_cycles) / chip.clock_hz,
        "gathered rows": copies / chip.clock_hz,
        "memory": memory_s,
    }
    limit = max(parts, key=lambda part: parts[part])
    start_s = timeline.task_s - timeline.cycles / chip.clock_hz
    model_s = start_s + parts[limit] + moves_s(work, chip)
    host_start_s = 0.0
    # a time that is not the kernel's alone contains the host's part of the launch
    if work.timing != "kernel":
        host_start_s = chip.launch_overhead_s - chip.queued_launch_s
    marks = ("one kernel: rows gathered beside the products, v as the front of k",)
    bound_s = selected_bound_s(shape, at_peak(chip))
    return Estimate(model_s + host_start_s, bound_s, limit, {}, marks)


def gathered_row_cycles(shape: FlashShape, chip: Chip) -> int:
    """Return the cycles of the copy that brings a row of k from a table in L2 to a vector core."""
    path = chip.path("GM", "UB")
    size = shape.depth * 2  # both formats of the cube's attention have two bytes
    cores = chip.core_count * chip.vector_cores_per_core
    rate = min(path.rate_bytes_per_cycle, chip.shared_rate_bytes_per_cycle("L2", cores))
    return path.startup_cycles + math.ceil(size / rate)


def table_bytes(work: Work) -> int:
    """Return the bytes of k that come from memory: each row once, if any query selects it."""
    q, k, _, key_numbers = (_heads_first(work, shape) for shape in work.shapes)
    # a table of 1,000 rows of which 64 queries select 32 each: at most all 1,000 are read
    rows = min(math.prod(k[:3]), q[0] * q[2] * key_numbers[3])
    return rows * k[3] * 2


def selected_bound_s(shape: FlashShape, chip: Chip) -> float:
    """Return the least seconds of the products, and of the bytes of q and of one query's keys."""
    products_s = shape.ops / chip.peak_ops_per_s(shape.dtype)
    # the bound counts the keys of only one query, because all queries may select the same keys
    read = (shape.batch * shape.rows + shape.keys) * shape.depth * 2
    return max(products_s, read / chip.device_memory.rate_bytes_per_s)


def moves_s(work: Work, chip: Chip) -> float:
    """Return the seconds of the slices or transposes whose times were added to the kernel's.

    Slice*4 cuts q and k into a latent part, as wide as v, and a rotary one. Transpose*2 changes the
    order of heads and tokens of q and of the result.
    """
    q, k, v, _ = work.shapes
    depth = q[3]
    width = v[3]
    total_s = 0.0
    # the table adds up the times of these kernels and of attention itself
    if "Slice*4" in work.kernels:
        for shape in (q, k):
            for begin, end in ((0, width), (width, depth)):
                words = {"begin": (0, 0, 0, begin), "end": (*shape[:3], end)}
                total_s += _alone_s("slice", shape, work, chip, words)
    if "Transpose*2" in work.kernels:
        for shape in (q, (*q[:3], width)):
            total_s += _alone_s("transpose", shape, work, chip, {"perm": (0, 2, 1, 3)})
    return total_s


def _alone_s(name: str, shape: Shape, work: Work, chip: Chip, words: Mapping[str, Any]) -> float:
    """Return the seconds of a kernel that moves a tensor, as a task of its own."""
    from ascend_lab.operators import ops

    return ops.time(name, (shape,), (_dtype(work),), chip, **words).task_s


BUILDERS: Mapping[str, Callable[[Work], Work]] = {"mla": latent}
"""The table's name for a kernel -> the call of an operator that computes it."""
ESTIMATES: Mapping[str, Callable[[Work, Chip], Estimate]] = {"sparse_flash_attention": selected}
"""The table's name for a kernel that is neither operator nor graph -> what times it."""
