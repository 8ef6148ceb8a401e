"""Computes each pipe's work under every tiling, and from it lower bounds in closed form.

A pipe executes one kind of instruction: MTE2 loads from GM, MTE1 feeds L0 from L1, the cube
multiplies, V or the fix pipe drains L0C, MTE3 stores to GM. For every pipe

    cycles >= (first data reach the pipe) + (all its work) + (last tile leaves)
               fill                          busy                flush

Where a queue has s slots, load and use of one slot alternate, so (all loads + all latencies + all
uses) / s is another bound. The sums leave out two costs, the rounding up to whole cycles and the
extra cost of short tiles, so they stay below the simulator's.

On chips that couple a vector unit with the cube, a finished tile leaves L0C piece by piece through
UB, where the epilogue is computed. On the other chips the fix pipe does both in one copy.

The terms units, stages, taps and bundles are defined in `work.CoreWork`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ascend_lab.aoe.cube.space import Array, Floats, Mask, ceil_div_array, distinct_rows
from ascend_lab.aoe.cube.work import ChannelLoad, CubeWork
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
from ascend_lab.operators.kernels.gemm_schedule import MAX_STAGES_IN_L1, store_cycles_per_byte

# elements of a fractal of C: 16 x 16
BLOCK = FRACTAL * FRACTAL


@dataclass(frozen=True, slots=True)
class DrainWork:
    """How a finished tile leaves L0C: epilogue and copies; arrays have an entry for each tiling.

    A piece of a tile has `piece_blocks` x `piece_run` elements. `in_cycles_per_byte` and
    `in_latency` are those of the epilogue's elementwise operands, `channel` is the load of those
    with a number per channel.
    """

    epilogue: Epilogue | None
    plan: Plan | None
    out_dtype: str
    piece_blocks: Array
    piece_run: Array
    out_cycles_per_byte: Floats
    in_cycles_per_byte: Floats
    in_latency: Array
    channel: ChannelLoad

    def blocks(self, run: Array, n: Array) -> Array:
        """Return how many output blocks of `run` elements a piece has; a tile has `n` blocks.

        A tile of fewer rows than usual leaves room for more blocks in a piece.
        """
        # a piece of 2 blocks of 64 rows x 16 has room for 4 blocks of 32 rows, those of a last tile
        blocks: Array = np.minimum(np.maximum(self.piece_blocks * self.piece_run // run, 1), n)
        return blocks


def drain_work_of(
    job: CubeWork, epilogue: Epilogue | None, out_dtype: str, warm: Collection[str] = ()
) -> DrainWork:
    """Return the drain work of each tiling; if one epilogue operand is `warm`, L2 holds all."""
    chip = job.chip
    work = job.work
    sums_dtype = ACCUMULATOR[job.dtype]
    stored_dtype = epilogue.out_dtype if epilogue else out_dtype
    demand = demand_of(epilogue, chip, sums_dtype)
    resident_blocks, piece_blocks = _channel_room(job, demand, DTYPE_BYTES[stored_dtype])
    copies, block_bytes = _channel_copies(epilogue, chip)
    operand_names = [o.name.partition(".")[0] for o in epilogue.operands] if epilogue else []
    is_warm = any(name in warm for name in operand_names)
    # channel operands that do not all stay on the core are loaded again for every tile of m
    reloads = np.maximum(work.m_tiles * (resident_blocks < work.core_n), 1)
    channel_reads = np.maximum(1, max(copies, 1) * work.core_rows * reloads)
    costs = _operand_costs(job, is_warm, channel_reads)
    return DrainWork(
        epilogue=epilogue,
        plan=drain_plan(epilogue, sums_dtype) if epilogue and chip.combined else None,
        out_dtype=stored_dtype,
        piece_blocks=piece_blocks,
        piece_run=work.m * BLOCK,
        out_cycles_per_byte=store_cycles_per_byte(chip, work.cores),
        in_cycles_per_byte=costs.tile_cycles_per_byte,
        in_latency=costs.tile_latency,
        channel=ChannelLoad(
            copies=copies,
            block_bytes=block_bytes,
            resident_blocks=resident_blocks,
            cycles_per_byte=costs.channel_cycles_per_byte,
            latency_cycles=costs.channel_latency,
        ),
    )


class _OperandCosts(NamedTuple):
    """Cycles per byte and latency of the epilogue's operands: whole tiles, numbers per channel."""

    tile_cycles_per_byte: Floats
    tile_latency: Array
    channel_cycles_per_byte: Floats
    channel_latency: Array


def _operand_costs(job: CubeWork, is_warm: bool, channel_reads: Array) -> _OperandCosts:
    """Return the costs of reading the epilogue's operands; if `is_warm`, L2 holds all of them.

    Otherwise tiles of operands come from device memory. Of `channel_reads` copies of numbers per
    channel, one comes from device memory and all others come from L2.
    """
    chip = job.chip
    path = chip.path("GM", "UB" if chip.combined else "L1")
    cores_times_clock = job.work.cores.astype(np.float64) * chip.clock_hz
    path_cycles_per_byte = 1.0 / path.rate_bytes_per_cycle
    # 20 cores at 1.8 GHz share 3.6e12 bytes a second of L2: 0.01 cycles a byte for each
    l2_cycles_per_byte = np.maximum(
        path_cycles_per_byte, cores_times_clock / chip.l2.rate_bytes_per_s
    )
    l2_latency = path.latency_cycles + chip.l2.latency_cycles
    if is_warm:
        warm_latency = np.full_like(channel_reads, l2_latency)
        return _OperandCosts(l2_cycles_per_byte, warm_latency, l2_cycles_per_byte, warm_latency)
    # which of ragged cores reads a byte first is unknown here: the lower bound takes L2's rate
    memory_cycles_per_byte = np.where(
        job.work.ragged,
        l2_cycles_per_byte,
        np.maximum(path_cycles_per_byte, cores_times_clock / chip.device_memory.rate_bytes_per_s),
    )
    memory_latency = np.where(
        job.work.ragged, l2_latency, path.latency_cycles + chip.device_memory.latency_cycles
    )
    # 4 rows of cores that load a bias 3 times each: 1 of 12 reads comes from device memory
    first_read_share = 1.0 / channel_reads
    mean_latency = l2_latency + first_read_share * (memory_latency - l2_latency)
    return _OperandCosts(
        memory_cycles_per_byte,
        memory_latency,
        np.where(channel_reads == 1, memory_cycles_per_byte, l2_cycles_per_byte),
        np.floor(mean_latency).astype(np.int64),
    )


def _channel_room(job: CubeWork, demand: Demand | None, out_bytes: int) -> tuple[Array, Array]:
    """Return how many channel blocks stay in a slot, and how many output blocks a piece has."""
    chip = job.chip
    work = job.work
    tile_n = np.minimum(work.n, work.core_n)
    if demand is None:
        no_blocks = np.zeros_like(work.n)
        if not chip.combined:
            return no_blocks, tile_n
        # two slots, so that one piece is stored while the next is computed
        blocks_in_ub = chip.buffers["UB"] // (2 * work.m * BLOCK * out_bytes)
        return no_blocks, np.clip(blocks_in_ub, 1, tile_n)
    # many tilings share a pair (blocks of the core, blocks of a tile): each pair is computed once
    (core_blocks, tile_blocks), _, pair_of_tiling = distinct_rows([work.core_n, tile_n])
    pairs = zip(core_blocks.tolist(), tile_blocks.tolist(), strict=True)
    blocks_of_pair = np.array([channel_blocks(demand, chip, *pair) for pair in pairs], np.int64)
    resident_blocks = blocks_of_pair[pair_of_tiling]
    if not chip.combined:
        return resident_blocks, tile_n
    free_bytes = chip.buffers["UB"] - 2 * resident_blocks * demand.block_bytes
    blocks_in_ub = free_bytes // (work.m * BLOCK * demand.tile_bytes)
    return resident_blocks, np.clip(blocks_in_ub, 1, tile_n)


def _channel_copies(epilogue: Epilogue | None, chip: Chip) -> tuple[int, int]:
    """Return how many copies bring the operands per channel, and their bytes for 16 channels."""
    channels = epilogue.of_kind("channel") if epilogue else ()
    # a vector instruction repeats a block of 16 fp16, but 16 fp32 are two: they are copied 4 times
    copies = [pattern(o.dtype) // FRACTAL if chip.combined else 1 for o in channels]
    copy_bytes = [FRACTAL * DTYPE_BYTES[o.dtype] for o in channels]
    pairs = zip(copies, copy_bytes, strict=True)
    return sum(copies), sum(count * size for count, size in pairs)


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
    work = job.work
    weight_bytes = work.units * job.taps * np.minimum(work.n, work.core_n) * job.area_bytes
    fits: Mask = (
        (work.b_l0 * weight_bytes <= job.chip.buffers["L0B"]) & (work.m_tiles > 1) & job.is_conv
    )
    return fits & work.keeps_b & (work.stage_units >= work.units)


def shared_slots(job: CubeWork) -> Array:
    """Return how many slots a convolution's rows and weights share in L1; 0 if they share none."""
    work = job.work
    slots_are_shared: Mask = (
        job.is_conv & (work.stage_units < work.units) & (work.a_l1 == 2) & (work.b_l1 == 2)
    )
    return np.where(slots_are_shared, MAX_STAGES_IN_L1, 0)


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

    A kernel may pad the blocks to whole repeats if that is quicker: the result is the minimum.
    """
    # a repeat of 256 bytes holds 128 elements of fp16: a run of 208 is padded to 256
    repeat = chip.vector_bytes_per_repeat // 2
    padded_run = ceil_div_array(run, repeat) * repeat
    return np.minimum(
        _steps_cycles(drain_work, chip, count, run),
        _steps_cycles(drain_work, chip, count, padded_run),
    )


def _steps_cycles(drain_work: DrainWork, chip: Chip, count: Array, run: Array) -> Array:
    """Return the cycles of the epilogue's steps if a block has `run` elements."""
    total = np.zeros_like(count)
    plan = drain_work.plan
    assert plan is not None and drain_work.epilogue is not None
    operands = {o.name: o for o in drain_work.epilogue.operands}
    for step in plan.steps:
        # a source is an operand's name, or the number of a tile in UB
        tensor_operands = [operands[s] for s in step.sources if isinstance(s, str)]
        tiles = [t for t in (step.to, *step.sources) if isinstance(t, int)]
        formats = [o.dtype for o in tensor_operands] + [plan.tiles[tile] for tile in tiles]
        lanes = chip.vector_bytes_per_repeat // max(DTYPE_BYTES[f] for f in formats)
        cost = chip.vector_costs.get(step.op, chip.vector_costs["default"])
        if not any(o.kind == "channel" for o in tensor_operands):
            total = total + _run_cycles(count * run, lanes, chip.max_repeat, cost)
            continue
        # With a number per channel each block has its own factor. One instruction handles either
        # the same repeat of all blocks (`across_blocks`) or all repeats of one block.
        repeats = ceil_div_array(run, lanes)
        across_blocks = repeats * (cost.head_cycles + cost.slope_cycles * count)
        block_by_block = count * _run_cycles(run, lanes, chip.max_repeat, cost)
        goes_across = (repeats < count) & (count <= chip.max_repeat)
        total = total + np.where(goes_across, across_blocks, block_by_block)
    return total


def _run_cycles(elements: Array, lanes: int, max_repeat: int, cost: VectorCost) -> Array:
    """Return the cycles of one operation on contiguous elements.

    An instruction costs a head and handles up to `max_repeat` repeats, each of which costs a slope.
    """
    # 300 elements in 128 lanes: 2 repeats in one instruction, and one more for the tail of 44
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
    (`feed_*`); the cube multiplies; V or the fix pipe drains L0C; MTE3 stores to GM on chips where
    the drain ends in UB. `a_copies` and `b_copies` count the loads from GM.
    """

    load_a: Floats
    load_b: Floats
    load_operands: Floats
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
        load = self.load_a + self.load_b + self.load_operands
        feed = self.feed_a + self.feed_b
        return load, feed, self.cube, self.drain, self.store


def turns_of(job: CubeWork) -> Array:
    """Return how many times the cube accumulates into one tile: the K tiles of all its stages."""
    work = job.work
    # 9 taps, 5 units in stages of 2, K tiles of 4: turns 5 + 5 + 3, for 18, 18 and 9 fractals
    stages = ceil_div_array(work.units, work.stage_units)
    last_units = work.units - (stages - 1) * work.stage_units
    turns_per_stage = ceil_div_array(work.stage_units * job.taps, work.k)
    turns_of_last_stage = ceil_div_array(last_units * job.taps, work.k)
    return (stages - 1) * turns_per_stage + turns_of_last_stage


def cycles_per_fractal_pair(job: CubeWork) -> int:
    """Return the cube's cycles for one fractal pair, 16 x C0 x 16 products.

    They are 1 where the cube multiplies 16 x 16 x 16 in a cycle (fp16, C0 = 16).
    """
    m0, k0, n0 = job.chip.cube_shape(job.dtype)
    return -(-FRACTAL // m0) * -(-c0_of(job.dtype) // k0) * -(-FRACTAL // n0)


def busy_of(job: CubeWork, drain_work: DrainWork) -> Busy:
    """Return the work of every pipe."""
    chip = job.chip
    work = job.work
    flag_cycles = job.chip.flag_cycles
    tiles = work.m_tiles * work.n_tiles * work.bundles
    products = work.bundles * work.m_fractals * work.core_n * work.units * job.taps
    # a turn waits for A and for B and gives both slots back: 4 flags; resident weights need none
    flag_cycles_per_turn = np.where(weights_stay_in_l0b(job), 2 * flag_cycles, 4 * flag_cycles)
    overheads = tiles * (
        2 * flag_cycles + turns_of(job) * (chip.cube_head_cycles + flag_cycles_per_turn)
    )
    load_a, load_b, a_copies, b_copies = _loads(job)
    feed_a, feed_b = _feeds(job)
    operands = drain_work.epilogue.of_kind("tile") if drain_work.epilogue and chip.combined else ()
    elements = work.m_pixels * work.core_n * FRACTAL * work.bundles
    operand_cycles = (
        elements * sum(DTYPE_BYTES[o.dtype] for o in operands) * drain_work.in_cycles_per_byte
    )
    cube = overheads + products * float(cycles_per_fractal_pair(job))
    drain, store = _drains(job, drain_work, tiles, elements)
    return Busy(
        load_a=load_a,
        load_b=load_b,
        load_operands=operand_cycles,
        feed_a=feed_a,
        feed_b=feed_b,
        cube=cube,
        drain=drain,
        store=store,
        a_copies=a_copies,
        b_copies=b_copies,
    )


def _loads(job: CubeWork) -> tuple[Floats, Floats, Array, Array]:
    """Return MTE2's cycles for A and for B, and the number of loads of each.

    An operand that stays in L1 (`keeps_a`) is loaded once for each tile of the outer loop; any
    other operand is loaded stage by stage, and again for each tile of the other operand.
    """
    work = job.work
    flag_cycles = job.chip.flag_cycles
    fractal_bytes = job.area_bytes
    startup_cycles = job.chip.path("GM", "L1").startup_cycles
    stages = ceil_div_array(work.units, work.stage_units)
    turns = turns_of(job)
    depth = work.units * job.taps
    a_reads_per_tile = np.where(work.keeps_a & ~work.n_is_outer, 1, work.n_tiles)
    b_reads_per_tile = np.where(work.keeps_b, 1, work.m_tiles)
    a_tile_reads = work.m_tiles * a_reads_per_tile
    b_tile_reads = work.n_tiles * b_reads_per_tile
    staged_a_copies = work.bundles * a_tile_reads * np.where(work.keeps_a, 1, stages)
    staged_b_copies = work.bundles * b_tile_reads * np.where(work.keeps_b, 1, stages)
    a_copies = np.where(work.bypass_a, a_tile_reads * turns, staged_a_copies)
    b_copies = np.where(work.bypass_b, b_tile_reads * turns, staged_b_copies)
    # if B bypasses L1, it is copied one row of fractals at a time, each with a separate startup
    b_copy_starts = np.where(work.bypass_b, b_tile_reads * depth, staged_b_copies)
    a_bytes = work.bundles * a_reads_per_tile * work.m_unit_bytes * work.units
    b_bytes = work.bundles * b_reads_per_tile * work.core_n * depth * fractal_bytes
    flag_cycles_per_load = np.where(shared_slots(job) > 0, 0, 2 * flag_cycles)
    a_cycles = a_bytes * job.a.cycles_per_byte + a_copies * (startup_cycles + 2 * flag_cycles)
    b_cycles = b_bytes * job.b.cycles_per_byte + b_copies * flag_cycles_per_load
    b_cycles = b_cycles + b_copy_starts * startup_cycles
    return a_cycles, b_cycles, a_copies, b_copies


def _feeds(job: CubeWork) -> tuple[Floats, Floats]:
    """Return MTE1's cycles for A and for B, flags included."""
    chip = job.chip
    work = job.work
    fractal_bytes = job.area_bytes
    l0a = chip.path("L1", "L0A")
    l0b = chip.path("L1", "L0B")
    depth = work.units * job.taps
    feed_flag_cycles = 2 * chip.flag_cycles * turns_of(job) * work.m_tiles * work.n_tiles
    a_copies_per_column, b_copies_per_tile = _feed_copies(job)
    # all tiles of A that one column of tiles needs, and all tiles of B that one row needs
    a_transfer_cycles = depth * work.m_fractals * fractal_bytes / l0a.rate_bytes_per_cycle
    b_transfer_cycles = depth * work.core_n * fractal_bytes / l0b.rate_bytes_per_cycle
    a_startup_cycles = a_copies_per_column * l0a.startup_cycles
    b_startup_cycles = work.n_tiles * b_copies_per_tile * l0b.startup_cycles
    a_cycles_per_column_tile = a_startup_cycles + a_transfer_cycles
    b_cycles_per_row_tile = b_startup_cycles + b_transfer_cycles
    a_cycles = a_cycles_per_column_tile * work.n_tiles + feed_flag_cycles
    b_cycles_loaded_once = work.n_tiles * l0b.startup_cycles + b_transfer_cycles
    b_cycles = np.where(
        weights_stay_in_l0b(job),
        b_cycles_loaded_once,
        b_cycles_per_row_tile * work.m_tiles + feed_flag_cycles,
    )
    feed_a = np.where(work.bypass_a, 0.0, work.bundles * a_cycles)
    feed_b = np.where(work.bypass_b, 0.0, work.bundles * b_cycles)
    return feed_a, feed_b


def _feed_copies(job: CubeWork) -> tuple[Array, Array]:
    """Return the copies of A to L0A for one column of tiles, and of B to L0B for one tile."""
    work = job.work
    turns = turns_of(job)
    # a convolution copies a tile of A or B at once, in each turn
    if job.is_conv:
        return turns * work.m_tiles, turns
    # a product copies row by row or column by column of fractals: full tiles have min(m, k) of each
    depth = work.units * job.taps
    full_tiles = (work.m_fractals // work.m) * (depth // np.maximum(work.stage_units, work.k))
    full_tile_copies = np.minimum(work.m, work.k) * full_tiles * (work.stage_units // work.k)
    return np.maximum(turns * work.m_tiles, full_tile_copies), depth


def _drains(
    job: CubeWork, drain_work: DrainWork, tiles: Array, elements: Array
) -> tuple[Floats, Floats]:
    """Return the cycles of draining L0C, epilogue included, and of the last hop to GM."""
    chip = job.chip
    flag_cycles = job.chip.flag_cycles
    element_bytes = DTYPE_BYTES[drain_work.out_dtype]
    if not chip.combined:
        path = chip.path("L0C", "GM")
        fix_pipe = (
            tiles * (path.startup_cycles + 2.0 * flag_cycles)
            + elements * element_bytes * drain_work.out_cycles_per_byte
        )
        return fix_pipe, np.zeros_like(fix_pipe)
    l0c_path = chip.path("L0C", "UB")
    path = chip.path("UB", "GM")
    demand = demand_of(drain_work.epilogue, chip, ACCUMULATOR[job.dtype])
    per_element = demand.cycles if demand else element_bytes / l0c_path.rate_bytes_per_cycle
    overheads = l0c_path.startup_cycles + 4 * flag_cycles
    for step in drain_work.plan.steps if drain_work.plan else ():
        overheads += chip.vector_costs.get(step.op, chip.vector_costs["default"]).head_cycles
    store = (
        tiles * (path.startup_cycles + 2.0 * flag_cycles)
        + elements * element_bytes * drain_work.out_cycles_per_byte
    )
    return tiles * float(overheads) + elements * per_element, store


def fill_cycles(job: CubeWork) -> tuple[Floats, Floats, Floats]:
    """Return the cycles of the first loads from GM, first copies to L0, and first product."""
    chip = job.chip
    work = job.work
    fractal_bytes = job.area_bytes
    path = chip.path("GM", "L1")
    m = job.tile_list.fractals[work.first_tile]
    n = np.where(work.n_tiles == 1, work.n_last, work.n)
    stage = np.minimum(work.stage_units, work.units)
    depth = np.minimum(work.k, stage * job.taps)
    a_bytes = job.tile_list.unit_bytes[work.first_tile] * np.where(work.keeps_a, work.units, stage)
    b_bytes = n * fractal_bytes * np.where(work.keeps_b, work.units, stage) * job.taps
    a_cycles = np.where(work.bypass_a, 0, copy_cycles(path, a_bytes, job.a.cycles_per_byte))
    b_cycles = np.where(work.bypass_b, 0, copy_cycles(path, b_bytes, job.b.cycles_per_byte))
    latency = np.minimum(job.a.latency_cycles, job.b.latency_cycles)
    feed_a, feed_b = l1_to_l0_cycles(job, m, n, depth)
    feed = np.where(work.bypass_a, 0, feed_a) + np.where(work.bypass_b, 0, feed_b)
    product = chip.cube_head_cycles + m * n * depth * cycles_per_fractal_pair(job)
    return (a_cycles + b_cycles + latency) * 1.0, feed * 1.0, product * 1.0


def flush_cycles(job: CubeWork, drain_work: DrainWork) -> Floats:
    """Return the least cycles from the end of the last product until its tile is in GM."""
    chip = job.chip
    work = job.work
    element_bytes = DTYPE_BYTES[drain_work.out_dtype]
    # the last tile in the core's list, which may be lower than the others
    run = job.tile_list.pixels[work.first_tile + work.m_tiles - 1] * FRACTAL
    if not chip.combined:
        path = chip.path("L0C", "GM")
        copy = copy_cycles(path, run * work.n_last * element_bytes, drain_work.out_cycles_per_byte)
        return (copy + path.latency_cycles + chip.l2.latency_cycles).astype(np.float64)
    path = chip.path("UB", "GM")
    blocks = drain_work.blocks(run, work.n_last)
    # 5 blocks in pieces of 2 leave a last piece of 1
    last_piece = work.n_last - (ceil_div_array(work.n_last, blocks) - 1) * blocks
    copy = copy_cycles(path, run * last_piece * element_bytes, drain_work.out_cycles_per_byte)
    return (copy + path.latency_cycles + chip.l2.latency_cycles).astype(np.float64)


def closed_bounds(job: CubeWork, drain_work: DrainWork) -> Floats:
    """Return a lower bound of each tiling's cycles: the largest of several, without memory's."""
    work = job.work
    busy = busy_of(job, drain_work)
    flag_cycles = job.chip.flag_cycles
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
    one_tile_in_l0c = (
        2 * work.m * np.minimum(work.n, work.core_n) * sum_bytes > job.chip.buffers["L0C"]
    )
    tiles = work.m_tiles * work.n_tiles * work.bundles
    l0c_wait = _out_of_l0c(job, drain_work, tiles)
    lower_bounds.append(np.where(one_tile_in_l0c, first_load + first_feed + cube + l0c_wait, 0.0))
    bounds: Floats = np.floor(np.maximum.reduce(lower_bounds)) - 8 * flag_cycles
    return np.maximum(bounds, 0.0)


def _out_of_l0c(job: CubeWork, drain_work: DrainWork, tiles: Array) -> Floats:
    """Return how long the cube waits for L0C if it holds one tile: all tiles but the last."""
    work = job.work
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
    elements = work.m_pixels * work.core_n * FRACTAL * work.bundles
    largest = work.m * np.minimum(work.n, work.core_n) * BLOCK
    total: Floats = (tiles - 1) * tile_cycles + np.maximum(
        elements - largest, 0
    ) * element_bytes * cycles_per_byte
    return total


def _alternating(job: CubeWork, busy: Busy) -> list[Floats]:
    """Return the bounds by slots of L1 and L0: load, latency and use of a slot do not overlap."""
    work = job.work
    feed = busy.feed_a + np.where(weights_stay_in_l0b(job), 0.0, busy.feed_b)
    a_staged = ~work.bypass_a & ~work.keeps_a
    b_staged = ~work.bypass_b & ~work.keeps_b
    wait_a = busy.a_copies * job.a.latency_cycles
    wait_b = busy.b_copies * job.b.latency_cycles
    a_l1, b_l1 = (np.maximum(shared_slots(job), slots) for slots in (work.a_l1, work.b_l1))
    staged_bound = (busy.load_a + busy.load_b + wait_b + feed) / a_l1
    a_bound = np.where(work.bypass_a, 0.0, (busy.load_a + wait_a + feed) / a_l1)
    b_bound = np.where(work.bypass_b, 0.0, (busy.load_b + wait_b + feed) / b_l1)
    # two flags of a turn and two of a tile are raised while the other pipe works
    tiles = work.m_tiles * work.n_tiles * work.bundles
    cube = busy.cube - 2 * job.chip.flag_cycles * tiles * (turns_of(job) + 1)
    # MTE1 feeds A first: if A waits for the cube, B waits behind it; if only B waits, A is there
    l0_bound = np.where(
        work.a_l0 == 1, feed + cube, np.where(work.b_l0 == 1, busy.feed_b + cube, 0.0)
    )
    return [
        np.where(a_staged & b_staged, staged_bound, 0.0),
        a_bound,
        b_bound,
        np.where(work.bypass_a | work.bypass_b, 0.0, l0_bound),
    ]
