"""The work of each pipe under every tiling, and the lower bounds in closed form that follow.

For every pipe

    cycles >= (first data reach the pipe) + (all its work) + (last tile leaves)
               fill                          busy                flush

Where a queue has s slots, load and use of one slot alternate, so (all loads + all latencies + all
uses) / s is another bound. The sums leave out two costs, the rounding up to whole cycles and the
extra cost of short tiles, so they stay below the simulator's.

On chips that couple a vector unit with the cube, a finished tile leaves L0C piece by piece through
UB, where the epilogue is computed. On the others the fix pipe does all of it in one copy.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ascend_lab.aoe.cube.space import Array, Floats, Mask, ceil_div_array, distinct_rows
from ascend_lab.aoe.cube.work import CubeWork
from ascend_lab.machine.chip import DTYPE_BYTES, Chip, Path, VectorCost
from ascend_lab.machine.isa import ACCUMULATOR, FRACTAL, c0_of
from ascend_lab.operators.kernels.epilogue import Epilogue, pattern
from ascend_lab.operators.kernels.epilogue_plan import (
    Demand,
    Plan,
    channel_blocks,
    demand_of,
    drain_plan,
)
from ascend_lab.operators.kernels.gemm_schedule import MOST_STAGES_IN_L1, store_cycles_per_byte

BLOCK = FRACTAL * FRACTAL


@dataclass(frozen=True, slots=True)
class DrainWork:
    """How a finished tile leaves L0C: epilogue and copies; arrays have an entry for each tiling.

    A piece of a tile has `piece_blocks` x `piece_run` elements. `in_cycles_per_byte` and
    `in_latency` are those of the epilogue's elementwise operands. Operands with a number per
    channel take `channel_loads` copies, of `channel_bytes` in all for each of `channel_blocks`
    blocks, and arrive `channel_latency` cycles later.
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

    def blocks(self, run: Array, n: Array) -> Array:
        """Return how many output blocks of `run` elements a piece has; a tile has `n` blocks.

        A tile of fewer rows than usual leaves room for more blocks in a piece.
        """
        blocks: Array = np.minimum(np.maximum(self.piece_blocks * self.piece_run // run, 1), n)
        return blocks


def drain_work_of(
    job: CubeWork, epilogue: Epilogue | None, out_dtype: str, warm: Collection[str] = ()
) -> DrainWork:
    """Return the drain of each tiling; L2 holds all operands of the epilogue if one is `warm`."""
    chip = job.chip
    w = job.work
    sums_dtype = ACCUMULATOR[job.dtype]
    stored_dtype = epilogue.out_dtype if epilogue else out_dtype
    demand = demand_of(epilogue, chip, sums_dtype)
    resident_blocks, piece_blocks = _channel_room(job, demand, DTYPE_BYTES[stored_dtype])
    channel_loads, channel_bytes = _channel_copies(epilogue, chip)
    path = chip.path("GM", "UB" if chip.combined else "L1")
    core_count = w.cores.astype(np.float64)
    clock = chip.clock_hz
    path_cycles_per_byte = 1.0 / path.rate_bytes_per_cycle
    l2_cycles_per_byte = core_count * clock / chip.l2.rate_bytes_per_s
    warm_cycles_per_byte = np.maximum(path_cycles_per_byte, l2_cycles_per_byte)
    cold_cycles_per_byte = np.maximum(
        path_cycles_per_byte, core_count * clock / chip.device_memory.rate_bytes_per_s
    )
    # which of ragged cores reads a byte first is unknown here: the lower bound takes L2's rate
    cold_cycles_per_byte = np.where(w.ragged, warm_cycles_per_byte, cold_cycles_per_byte)
    l2_latency = path.latency_cycles + chip.l2.latency_cycles
    memory_latency = np.where(
        w.ragged, l2_latency, path.latency_cycles + chip.device_memory.latency_cycles
    )
    reloads = np.maximum(w.m_tiles * (resident_blocks < w.core_n), 1)
    first_read_share = 1.0 / np.maximum(1, max(channel_loads, 1) * w.rows * reloads)
    if epilogue and any(o.name.partition(".")[0] in warm for o in epilogue.operands):
        cold_cycles_per_byte = warm_cycles_per_byte
        memory_latency = np.full_like(memory_latency, l2_latency)
        first_read_share = np.zeros_like(first_read_share)
    plan = drain_plan(epilogue, sums_dtype) if epilogue and chip.combined else None
    out_cycles_per_byte = store_cycles_per_byte(chip, w.cores)
    channel_cycles_per_byte = np.where(
        first_read_share == 1.0, cold_cycles_per_byte, warm_cycles_per_byte
    )
    channel_latency = np.floor(
        l2_latency + first_read_share * (memory_latency - l2_latency)
    ).astype(np.int64)
    return DrainWork(
        epilogue,
        plan,
        stored_dtype,
        piece_blocks,
        w.m * BLOCK,
        out_cycles_per_byte,
        cold_cycles_per_byte,
        memory_latency,
        channel_loads,
        channel_bytes,
        resident_blocks,
        channel_cycles_per_byte,
        channel_latency,
    )


def _channel_room(job: CubeWork, demand: Demand | None, out_bytes: int) -> tuple[Array, Array]:
    """Return how many channel blocks stay in a slot, and how many output blocks a piece has."""
    chip = job.chip
    w = job.work
    tile_n = np.minimum(w.n, w.core_n)
    if demand is None:
        blocks_in_ub = chip.buffers.get("UB", 0) // (2 * w.m * BLOCK * out_bytes)
        return np.zeros_like(w.n), np.clip(blocks_in_ub, 1, tile_n) if chip.combined else tile_n
    (owned_blocks, tiles), _, row = distinct_rows([w.core_n, tile_n])
    pairs = zip(owned_blocks.tolist(), tiles.tolist(), strict=True)
    resident_blocks = np.array([channel_blocks(demand, chip, *pair) for pair in pairs], np.int64)[
        row
    ]
    if not chip.combined:
        return resident_blocks, tile_n
    free_bytes = chip.buffers["UB"] - 2 * resident_blocks * demand.block_bytes
    return resident_blocks, np.clip(free_bytes // (w.m * BLOCK * demand.tile_bytes), 1, tile_n)


def _channel_copies(epilogue: Epilogue | None, chip: Chip) -> tuple[int, int]:
    """Return how many copies bring the operands per channel, and their bytes for 16 channels."""
    channels = epilogue.of_kind("channel") if epilogue else ()
    copies = [pattern(o.dtype) // FRACTAL if chip.combined else 1 for o in channels]
    copy_bytes = [FRACTAL * DTYPE_BYTES[o.dtype] for o in channels]
    return sum(copies), sum(u * size for u, size in zip(copies, copy_bytes, strict=True))


def copy_cycles(
    path: Path, size_bytes: Array, cycles_per_byte: Floats | float | None = None
) -> Array:
    """Return the cycles of a copy: startup + ceil(bytes * cycles per byte), rate of the path."""
    rate = 1.0 / path.rate_bytes_per_cycle if cycles_per_byte is None else cycles_per_byte
    # 1e-9: a product that should be 128 may come out as 128.00000000000003, which is not 129
    transfer_cycles = np.ceil(size_bytes * rate - 1e-9)
    return np.asarray(path.startup_cycles + transfer_cycles.astype(np.int64))


def weights_stay_in_l0b(job: CubeWork) -> Mask:
    """Tell which tilings of a convolution keep an output tile's weights in L0B for all pixels.

    A bias may take the room that the weights need; then the kernel copies them again for each tile
    of pixels. That costs more, so leaving the bias out keeps the bound valid.
    """
    w = job.work
    weight_bytes = w.units * job.taps * np.minimum(w.n, w.core_n) * job.area_bytes
    fits: Mask = (w.b_l0 * weight_bytes <= job.chip.buffers["L0B"]) & (w.m_tiles > 1) & job.is_conv
    return fits & w.keeps_b & (w.stage >= w.units)


def shared_slots(job: CubeWork) -> Array:
    """Return how many slots a convolution's rows and weights share in L1; 0 where they do not."""
    w = job.work
    slots_are_shared: Mask = job.is_conv & (w.stage < w.units) & (w.a_l1 == 2) & (w.b_l1 == 2)
    return np.where(slots_are_shared, MOST_STAGES_IN_L1, 0)


def l1_to_l0_cycles(job: CubeWork, m: Array, n: Array, depth: Array) -> tuple[Array, Array]:
    """Return the cycles of copying a tile of A and a tile of B from L1 to L0.

    A product copies one row or column of fractals at a time, A along its shorter side: a tile of
    4 x 8 fractals takes 4 copies of 8. A convolution copies a whole tile at once.
    """
    l0a = job.chip.path("L1", "L0A")
    l0b = job.chip.path("L1", "L0B")
    fractal_bytes = job.area_bytes
    if job.is_conv:
        b_cycles = np.where(
            weights_stay_in_l0b(job), 0, copy_cycles(l0b, depth * n * fractal_bytes)
        )
        return copy_cycles(l0a, m * depth * fractal_bytes), b_cycles
    a_cycles = np.minimum(m, depth) * copy_cycles(l0a, np.maximum(m, depth) * fractal_bytes)
    return a_cycles, depth * copy_cycles(l0b, n * fractal_bytes)


def vector_cycles(drain_work: DrainWork, chip: Chip, count: Array, run: Array) -> Array:
    """Return the cycles of all steps of the epilogue on a piece of `count` blocks of `run`.

    A kernel may pad the blocks to whole repeats where that is quicker: the result is the minimum.
    """
    # a repeat of 256 bytes holds 128 elements of fp16
    whole_repeats = ceil_div_array(run, chip.vector_bytes_per_repeat // 2) * (
        chip.vector_bytes_per_repeat // 2
    )
    return np.minimum(
        *(_steps_cycles(drain_work, chip, count, run_length) for run_length in (run, whole_repeats))
    )


def _steps_cycles(drain_work: DrainWork, chip: Chip, count: Array, run: Array) -> Array:
    total = np.zeros_like(count)
    assert drain_work.plan is not None and drain_work.epilogue is not None
    operands = {o.name: o for o in drain_work.epilogue.operands}
    for step in drain_work.plan.steps:
        tensor_operands = [operands[s] for s in step.sources if isinstance(s, str)]
        formats = [o.dtype for o in tensor_operands]
        formats += [
            drain_work.plan.tiles[t] for t in (step.to, *step.sources) if isinstance(t, int)
        ]
        lanes = chip.vector_bytes_per_repeat // max(DTYPE_BYTES[f] for f in formats)
        cost = chip.vector_costs.get(step.op, chip.vector_costs["default"])
        if not any(o.kind == "channel" for o in tensor_operands):
            total = total + _run_cycles(count * run, lanes, chip.max_repeat, cost)
            continue
        # With a number per channel each block has its own factor. One instruction handles either
        # the same repeat of all blocks (`across_blocks`) or all repeats of one block.
        parts = ceil_div_array(run, lanes)
        across_blocks = parts * (cost.head_cycles + cost.slope_cycles * count)
        block_by_block = count * _run_cycles(run, lanes, chip.max_repeat, cost)
        total = total + np.where(
            (parts < count) & (count <= chip.max_repeat), across_blocks, block_by_block
        )
    return total


def _run_cycles(elements: Array, lanes: int, max_repeat: int, cost: VectorCost) -> Array:
    """Return the cycles of one operation on contiguous elements.

    An instruction costs a head and handles up to `max_repeat` repeats, each of which costs a slope.
    """
    repeats = elements // lanes
    has_tail = elements % lanes > 0
    instructions = ceil_div_array(repeats, max_repeat) + has_tail
    cycles: Array = cost.head_cycles * instructions + cost.slope_cycles * (repeats + has_tail)
    return cycles


def tail_cycles(drain_work: DrainWork, chip: Chip) -> int:
    """Return the cycles until the result of the epilogue's last step is visible."""
    if drain_work.plan is None or not drain_work.plan.steps:
        return 0
    op = drain_work.plan.steps[-1].op
    return chip.vector_costs.get(op, chip.vector_costs["default"]).tail_cycles


@dataclass(frozen=True, slots=True)
class Busy:
    """The cycles of work of each pipe on one core.

    MTE2 loads A, B and the epilogue's operands (`load_*`); MTE1 feeds A and B from L1 to L0
    (`feed_*`); the cube multiplies; V or the fix pipe drains L0C; MTE3 stores to GM where that is
    a hop of its own. `a_copies` and `b_copies` count the loads from GM.
    """

    load_a: Floats
    load_b: Floats
    load_more: Floats
    feed_a: Floats
    feed_b: Floats
    cube: Floats
    drain: Floats
    store: Floats
    a_copies: Array
    b_copies: Array

    @property
    def pipes(self) -> tuple[Floats, ...]:
        """Cycles of MTE2, MTE1, the cube, the drain and the store."""
        load = self.load_a + self.load_b + self.load_more
        feed = self.feed_a + self.feed_b
        return load, feed, self.cube, self.drain, self.store


def turns_of(job: CubeWork) -> Array:
    """Return how many times the cube accumulates into one tile: the K tiles of all its stages."""
    w = job.work
    stages = ceil_div_array(w.units, w.stage)
    last = w.units - (stages - 1) * w.stage
    return (stages - 1) * ceil_div_array(w.stage * job.taps, w.k) + ceil_div_array(
        last * job.taps, w.k
    )


def cycles_per_fractal_pair(job: CubeWork) -> int:
    """Return the cube's cycles for one fractal pair, 16 x C0 x 16 products.

    They are 1 where the cube multiplies 16 x 16 x 16 in a cycle (fp16, C0 = 16).
    """
    m0, k0, n0 = job.chip.cube_shape(job.dtype)
    return -(-FRACTAL // m0) * -(-c0_of(job.dtype) // k0) * -(-FRACTAL // n0)


def busy_of(job: CubeWork, drain_work: DrainWork) -> Busy:
    """Return the work of every pipe."""
    chip = job.chip
    w = job.work
    flag = job.chip.flag_cycles
    tiles = w.m_tiles * w.n_tiles * w.bundles
    products = w.bundles * w.m_sum * w.core_n * w.units * job.taps
    flags = np.where(weights_stay_in_l0b(job), 2 * flag, 4 * flag)
    overheads = tiles * (2 * flag + turns_of(job) * (chip.cube_head_cycles + flags))
    load_a, load_b, a_copies, b_copies = _loads(job)
    feed_a, feed_b = _feeds(job)
    operands = drain_work.epilogue.of_kind("tile") if drain_work.epilogue and chip.combined else ()
    elements = w.pixel_sum * w.core_n * FRACTAL * w.bundles
    operand_cycles = (
        elements * sum(DTYPE_BYTES[o.dtype] for o in operands) * drain_work.in_cycles_per_byte
    )
    cube = overheads + products * float(cycles_per_fractal_pair(job))
    drain, store = _drains(job, drain_work, tiles, elements)
    return Busy(
        load_a, load_b, operand_cycles, feed_a, feed_b, cube, drain, store, a_copies, b_copies
    )


def _loads(job: CubeWork) -> tuple[Floats, Floats, Array, Array]:
    """Return MTE2's cycles for A and for B, and the number of loads of each.

    An operand that stays in L1 (`keeps_a`) is loaded once for each tile of the outer loop; another
    one is loaded stage by stage, again for each tile of the other side.
    """
    w = job.work
    flag = job.chip.flag_cycles
    fractal_bytes = job.area_bytes
    startup_cycles = job.chip.path("GM", "L1").startup_cycles
    stages = ceil_div_array(w.units, w.stage)
    turns = turns_of(job)
    depth = w.units * job.taps
    a_times = np.where(w.keeps_a & ~w.n_is_outer, 1, w.n_tiles)
    b_times = np.where(w.keeps_b, 1, w.m_tiles)
    a_copies = w.bundles * w.m_tiles * a_times * np.where(w.keeps_a, 1, stages)
    b_copies = w.bundles * w.n_tiles * b_times * np.where(w.keeps_b, 1, stages)
    a_copies = np.where(w.bypass_a, w.m_tiles * a_times * turns, a_copies)
    b_copies = np.where(w.bypass_b, w.n_tiles * b_times * turns, b_copies)
    b_starts = np.where(w.bypass_b, w.n_tiles * b_times * depth, b_copies)
    a_bytes = w.bundles * a_times * w.unit_sum * w.units
    b_bytes = w.bundles * b_times * w.core_n * depth * fractal_bytes
    flags = np.where(shared_slots(job) > 0, 0, 2 * flag)
    a_cycles = a_bytes * job.a.cycles_per_byte + a_copies * (startup_cycles + 2 * flag)
    b_cycles = b_bytes * job.b.cycles_per_byte + b_copies * flags + b_starts * startup_cycles
    return a_cycles, b_cycles, a_copies, b_copies


def _feeds(job: CubeWork) -> tuple[Floats, Floats]:
    """Return MTE1's cycles for A and for B, flags included."""
    chip = job.chip
    w = job.work
    fractal_bytes = job.area_bytes
    l0a = chip.path("L1", "L0A")
    l0b = chip.path("L1", "L0B")
    depth = w.units * job.taps
    turns = turns_of(job)
    flags = 2 * chip.flag_cycles * turns * w.m_tiles * w.n_tiles
    if job.is_conv:
        copies = turns * w.m_tiles
        rows = turns
    else:
        rows = depth
        # a load per row or column of fractals: full tiles have min(m, k) of each
        full_tile_copies = (
            np.minimum(w.m, w.k) * (w.m_sum // w.m) * (depth // np.maximum(w.stage, w.k))
        )
        copies = np.maximum(turns * w.m_tiles, full_tile_copies * (w.stage // w.k))
    a_cycles_per_column_tile = (
        copies * l0a.startup_cycles + depth * w.m_sum * fractal_bytes / l0a.rate_bytes_per_cycle
    )
    b_cycles_per_row_tile = (
        w.n_tiles * rows * l0b.startup_cycles
        + depth * w.core_n * fractal_bytes / l0b.rate_bytes_per_cycle
    )
    feed_a = np.where(w.bypass_a, 0.0, w.bundles * (a_cycles_per_column_tile * w.n_tiles + flags))
    b_cycles_loaded_once = (
        w.n_tiles * l0b.startup_cycles + depth * w.core_n * fractal_bytes / l0b.rate_bytes_per_cycle
    )
    b_cycles = np.where(
        weights_stay_in_l0b(job), b_cycles_loaded_once, b_cycles_per_row_tile * w.m_tiles + flags
    )
    feed_b = np.where(w.bypass_b, 0.0, w.bundles * b_cycles)
    return feed_a, feed_b


def _drains(
    job: CubeWork, drain_work: DrainWork, tiles: Array, elements: Array
) -> tuple[Floats, Floats]:
    """Return the cycles of draining L0C, epilogue included, and of the last hop to GM."""
    chip = job.chip
    flag = job.chip.flag_cycles
    element_bytes = DTYPE_BYTES[drain_work.out_dtype]
    if not chip.combined:
        path = chip.path("L0C", "GM")
        fix_pipe = (
            tiles * (path.startup_cycles + 2.0 * flag)
            + elements * element_bytes * drain_work.out_cycles_per_byte
        )
        return fix_pipe, np.zeros_like(fix_pipe)
    l0c_path = chip.path("L0C", "UB")
    path = chip.path("UB", "GM")
    demand = demand_of(drain_work.epilogue, chip, ACCUMULATOR[job.dtype])
    per_element = demand.cycles if demand else element_bytes / l0c_path.rate_bytes_per_cycle
    overheads = l0c_path.startup_cycles + 4 * flag
    for step in drain_work.plan.steps if drain_work.plan else ():
        overheads += chip.vector_costs.get(step.op, chip.vector_costs["default"]).head_cycles
    store = (
        tiles * (path.startup_cycles + 2.0 * flag)
        + elements * element_bytes * drain_work.out_cycles_per_byte
    )
    return tiles * float(overheads) + elements * per_element, store


def fill_cycles(job: CubeWork) -> tuple[Floats, Floats, Floats]:
    """Return the cycles of the first loads from GM, first copies to L0, and first product."""
    chip = job.chip
    w = job.work
    fractal_bytes = job.area_bytes
    path = chip.path("GM", "L1")
    m = job.tile_list.fractals[w.first]
    n = np.where(w.n_tiles == 1, w.n_last, w.n)
    stage = np.minimum(w.stage, w.units)
    depth = np.minimum(w.k, stage * job.taps)
    a_bytes = job.tile_list.unit_bytes[w.first] * np.where(w.keeps_a, w.units, stage)
    b_bytes = n * fractal_bytes * np.where(w.keeps_b, w.units, stage) * job.taps
    a_cycles = np.where(w.bypass_a, 0, copy_cycles(path, a_bytes, job.a.cycles_per_byte))
    b_cycles = np.where(w.bypass_b, 0, copy_cycles(path, b_bytes, job.b.cycles_per_byte))
    latency = np.minimum(job.a.latency_cycles, job.b.latency_cycles)
    feed_a, feed_b = l1_to_l0_cycles(job, m, n, depth)
    feed = np.where(w.bypass_a, 0, feed_a) + np.where(w.bypass_b, 0, feed_b)
    product = chip.cube_head_cycles + m * n * depth * cycles_per_fractal_pair(job)
    return (a_cycles + b_cycles + latency) * 1.0, feed * 1.0, product * 1.0


def flush_cycles(job: CubeWork, drain_work: DrainWork) -> Floats:
    """Return the least cycles from the end of the last product until its tile is in GM."""
    chip = job.chip
    w = job.work
    element_bytes = DTYPE_BYTES[drain_work.out_dtype]
    run = job.tile_list.pixels[w.first + w.m_tiles - 1] * FRACTAL
    if not chip.combined:
        path = chip.path("L0C", "GM")
        copy = copy_cycles(path, run * w.n_last * element_bytes, drain_work.out_cycles_per_byte)
        return (copy + path.latency_cycles + chip.l2.latency_cycles).astype(np.float64)
    path = chip.path("UB", "GM")
    blocks = drain_work.blocks(run, w.n_last)
    last_piece = w.n_last - (ceil_div_array(w.n_last, blocks) - 1) * blocks
    copy = copy_cycles(path, run * last_piece * element_bytes, drain_work.out_cycles_per_byte)
    return (copy + path.latency_cycles + chip.l2.latency_cycles).astype(np.float64)


def closed_bounds(job: CubeWork, drain_work: DrainWork) -> Floats:
    """Return a lower bound of each tiling's cycles: the largest of several, without memory's."""
    w = job.work
    busy = busy_of(job, drain_work)
    flag = job.chip.flag_cycles
    first_load, first_feed, first_cube = fill_cycles(job)
    flush = flush_cycles(job, drain_work)
    load, feed, cube, drain, store = busy.pipes
    # weights that stay in L0B may arrive there while the first rows are still on their way to L1:
    # their feed need not follow the first load
    feed_beyond_fill = feed - np.where(weights_stay_in_l0b(job), busy.feed_b, 0.0)
    lower_bounds = [load + flush, feed + flush, first_load + feed_beyond_fill + flush]
    lower_bounds += [first_load + first_feed + cube + flush]
    lower_bounds += [first_load + first_feed + first_cube + side for side in (drain, store)]
    lower_bounds += _alternating(job, busy)
    sum_bytes = DTYPE_BYTES[ACCUMULATOR[job.dtype]] * BLOCK
    # two tiles of sums do not fit L0C: the cube waits until the last one has left
    one_tile_in_l0c = 2 * w.m * np.minimum(w.n, w.core_n) * sum_bytes > job.chip.buffers["L0C"]
    tiles = w.m_tiles * w.n_tiles * w.bundles
    l0c_wait = _out_of_l0c(job, drain_work, tiles)
    lower_bounds.append(np.where(one_tile_in_l0c, first_load + first_feed + cube + l0c_wait, 0.0))
    bounds: Floats = np.floor(np.maximum.reduce(lower_bounds)) - 8 * flag
    return np.maximum(bounds, 0.0)


def _out_of_l0c(job: CubeWork, drain_work: DrainWork, tiles: Array) -> Floats:
    """Return how long the cube waits for L0C if it holds one tile: all tiles but the last."""
    w = job.work
    chip = job.chip
    element_bytes = DTYPE_BYTES[drain_work.out_dtype]
    if not chip.combined:
        path = chip.path("L0C", "GM")
        cycles_per_byte = drain_work.out_cycles_per_byte
        tile_cycles = path.startup_cycles + path.latency_cycles + chip.l2.latency_cycles
    else:
        path = chip.path("L0C", "UB")
        cycles_per_byte = np.full(len(tiles), 1.0 / path.rate_bytes_per_cycle)
        tile_cycles = path.startup_cycles
        if drain_work.plan is not None:
            element_bytes = DTYPE_BYTES[drain_work.plan.tiles[drain_work.plan.start]]
    elements = w.pixel_sum * w.core_n * FRACTAL * w.bundles
    largest = w.m * np.minimum(w.n, w.core_n) * BLOCK
    total: Floats = (tiles - 1) * tile_cycles + np.maximum(
        elements - largest, 0
    ) * element_bytes * cycles_per_byte
    return total


def _alternating(job: CubeWork, busy: Busy) -> list[Floats]:
    """Return the bounds by slots of L1 and L0: load, latency and use of a slot do not overlap."""
    w = job.work
    feed = busy.feed_a + np.where(weights_stay_in_l0b(job), 0.0, busy.feed_b)
    a_staged = ~w.bypass_a & ~w.keeps_a
    b_staged = ~w.bypass_b & ~w.keeps_b
    wait_a = busy.a_copies * job.a.latency_cycles
    wait_b = busy.b_copies * job.b.latency_cycles
    a_l1, b_l1 = (np.maximum(shared_slots(job), slots) for slots in (w.a_l1, w.b_l1))
    staged_bound = (busy.load_a + busy.load_b + wait_b + feed) / a_l1
    a_bound = np.where(w.bypass_a, 0.0, (busy.load_a + wait_a + feed) / a_l1)
    b_bound = np.where(w.bypass_b, 0.0, (busy.load_b + wait_b + feed) / b_l1)
    # two flags of a turn and two of a tile are raised while the other pipe works
    tiles = w.m_tiles * w.n_tiles * w.bundles
    cube = busy.cube - 2 * job.chip.flag_cycles * tiles * (turns_of(job) + 1)
    l0_bound = np.where(w.a_l0 == 1, feed + cube, np.where(w.b_l0 == 1, busy.feed_b + cube, 0.0))
    return [
        np.where(a_staged & b_staged, staged_bound, 0.0),
        a_bound,
        b_bound,
        np.where(w.bypass_a | w.bypass_b, 0.0, l0_bound),
    ]
