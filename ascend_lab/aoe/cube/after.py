"""How a finished tile leaves L0C: pieces, and the cycles each takes, for many tilings at once.

On chips with a vector unit beside the cube a tile goes piece by piece through UB, where the
epilogue is computed; on the others the fix pipe does all in one copy.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ascend_lab.aoe.cube.table import Array, same_rows, up
from ascend_lab.aoe.cube.work import Floats, Job
from ascend_lab.chip import DTYPE_BYTES, Chip, Path, VectorCost
from ascend_lab.kernels.epilogue import Epilogue
from ascend_lab.kernels.epilogue_plan import (
    Demand,
    Plan,
    channel_blocks,
    demand_of,
    pattern,
    plan_of,
)
from ascend_lab.kernels.gemm_schedule import ACCUMULATOR, FRACTAL

BLOCK = FRACTAL * FRACTAL


@dataclass(frozen=True, slots=True)
class After:
    """What follows the sums of a tile, per tiling of a job where it is an array.

    `piece_blocks` x `piece_run` elements fit a piece. `in_cycles_per_byte`, `in_latency` are of
    operands per element; `channel_loads` copies of `channel_bytes` in all for each of
    `channel_blocks` blocks bring numbers per channel, there `channel_latency` later.
    """

    epilogue: Epilogue | None
    plan: Plan | None
    out_dtype: str
    piece_blocks: Array
    piece_run: Array
    out_cycles_per_byte: Floats
    in_cycles_per_byte: Floats
    in_latency: Array
    channel_loads: int
    channel_bytes: int
    channel_blocks: Array
    channel_cycles_per_byte: Floats
    channel_latency: Array

    def take(self, index: Array) -> After:
        """Return what follows in some tilings."""
        names = [n for n in self.__slots__ if isinstance(getattr(self, n), np.ndarray)]
        values = {
            n: getattr(self, n)[index] if n in names else getattr(self, n) for n in self.__slots__
        }
        return After(**values)

    def blocks(self, run: Array, n: Array) -> Array:
        """Return output blocks of a piece of a tile of `n` blocks, `run` elements each."""
        blocks: Array = np.minimum(np.maximum(self.piece_blocks * self.piece_run // run, 1), n)
        return blocks


def after_of(
    job: Job, epilogue: Epilogue | None, out_dtype: str, warm: Collection[str] = ()
) -> After:
    """Return what follows the sums of each tiling of a job; L2 holds the operands `warm`.

    If it holds one of them, all count as held.
    """
    chip, w = job.chip, job.work
    sums, out = ACCUMULATOR[job.dtype], epilogue.out_dtype if epilogue else out_dtype
    demand = demand_of(epilogue, chip, sums)
    held, pieces = _rooms(job, demand, DTYPE_BYTES[out])
    loads, wide = _channel_copies(epilogue, chip)
    path = chip.path("GM", "UB" if chip.combined else "L1")
    store = chip.path("UB" if chip.combined else "L0C", "GM")
    n, clock = w.cores.astype(np.float64), chip.clock_hz
    own, hit = 1.0 / path.rate_bytes_per_cycle, n * clock / chip.l2.rate_bytes_per_s
    rate = np.maximum(own, hit)
    memory = np.maximum(own, n * clock / chip.device_memory.rate_bytes_per_s)
    memory = np.where(w.ragged, rate, memory)
    near = path.latency_cycles + chip.l2.latency_cycles
    far = np.where(w.ragged, near, path.latency_cycles + chip.device_memory.latency_cycles)
    again = np.maximum(w.m_tiles * (held < w.n_own), 1)
    fresh = 1.0 / np.maximum(1, max(loads, 1) * w.rows * again)
    if epilogue and any(o.name.partition(".")[0] in warm for o in epilogue.operands):
        memory, far, fresh = rate, np.full_like(far, near), np.zeros_like(fresh)
    return After(
        epilogue,
        plan_of(epilogue, sums) if epilogue and chip.combined else None,
        out,
        pieces,
        w.m * BLOCK,
        np.maximum(1.0 / store.rate_bytes_per_cycle, hit),
        memory,
        far,
        loads,
        wide,
        held,
        np.where(fresh == 1.0, memory, rate),
        np.floor(near + fresh * (far - near)).astype(np.int64),
    )


def _rooms(job: Job, demand: Demand | None, out_bytes: int) -> tuple[Array, Array]:
    """Return the blocks of numbers per channel a slot holds, and the output blocks of a piece."""
    chip, w = job.chip, job.work
    tile_n = np.minimum(w.n, w.n_own)
    if demand is None:
        fit = chip.buffers.get("UB", 0) // (2 * w.m * BLOCK * out_bytes)
        return np.zeros_like(w.n), np.clip(fit, 1, tile_n) if chip.combined else tile_n
    held = _held(demand, chip, w.n_own, tile_n)
    if not chip.combined:
        return held, tile_n
    left = chip.buffers["UB"] - 2 * held * demand.block_bytes
    return held, np.clip(left // (w.m * BLOCK * demand.tile_bytes), 1, tile_n)


def _channel_copies(epilogue: Epilogue | None, chip: Chip) -> tuple[int, int]:
    """Return how many copies bring the numbers per channel, and their bytes for 16 channels."""
    channels = epilogue.of_kind("channel") if epilogue else ()
    units = [pattern(o.dtype) // FRACTAL if chip.combined else 1 for o in channels]
    sizes = [FRACTAL * DTYPE_BYTES[o.dtype] for o in channels]
    return sum(units), sum(u * size for u, size in zip(units, sizes, strict=True))


def _held(demand: Demand, chip: Chip, n_own: Array, tile_n: Array) -> Array:
    """Return the blocks of numbers per channel a slot holds: `channel_blocks` on arrays."""
    (owns, tiles), _, which = same_rows([n_own, tile_n])
    pairs = zip(owns.tolist(), tiles.tolist(), strict=True)
    return np.array([channel_blocks(demand, chip, *pair) for pair in pairs], np.int64)[which]


def copied(path: Path, size_bytes: Array, cycles_per_byte: Floats | float | None = None) -> Array:
    """Return cycles of a copy on a path, by default at its own rate."""
    rate = 1.0 / path.rate_bytes_per_cycle if cycles_per_byte is None else cycles_per_byte
    moved = np.ceil(size_bytes * rate - 1e-9)
    return np.asarray(path.startup_cycles + moved.astype(np.int64))


def vector_cycles(after: After, chip: Chip, count: Array, run: Array) -> Array:
    """Return the cycles of all steps of the epilogue on a piece of `count` blocks of `run`."""
    total = np.zeros_like(count)
    assert after.plan is not None and after.epilogue is not None
    operands = {o.name: o for o in after.epilogue.operands}
    for step in after.plan.steps:
        named = [operands[s] for s in step.sources if isinstance(s, str)]
        formats = [o.dtype for o in named]
        formats += [after.plan.tiles[t] for t in (step.to, *step.sources) if isinstance(t, int)]
        lanes = chip.vector_bytes_per_repeat // max(DTYPE_BYTES[f] for f in formats)
        cost = chip.vector_costs.get(step.op, chip.vector_costs["default"])
        if not any(o.kind == "channel" for o in named):
            total = total + _run_cycles(count * run, lanes, chip.max_repeat, cost)
            continue
        parts = up(run, lanes)
        across = parts * (cost.head_cycles + cost.slope_cycles * count)
        blocks = count * _run_cycles(run, lanes, chip.max_repeat, cost)
        total = total + np.where((parts < count) & (count <= chip.max_repeat), across, blocks)
    return total


def _run_cycles(elements: Array, lanes: int, most: int, cost: VectorCost) -> Array:
    """Cycles of one operation on neighbouring elements: repeats, at most `most` an instruction."""
    repeats, rest = elements // lanes, elements % lanes > 0
    instructions = up(repeats, most) + rest
    cycles: Array = cost.head_cycles * instructions + cost.slope_cycles * (repeats + rest)
    return cycles


def tail_cycles(after: After, chip: Chip) -> int:
    """Cycles until the result of the last step is visible."""
    if after.plan is None or not after.plan.steps:
        return 0
    op = after.plan.steps[-1].op
    return chip.vector_costs.get(op, chip.vector_costs["default"]).tail_cycles
