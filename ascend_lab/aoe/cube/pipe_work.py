"""What each pipe has to do under every tiling, and lower bounds in closed form that follow.

    cycles >= (first data reach the pipe) + (all its work) + (last tile leaves)

for every pipe. Where a queue has s slots, load and use of one slot follow each other, so that
(all loads + all latencies + all uses) / s is a bound too. Sums leave out what rounding up to whole
cycles adds and what short tiles cost more, so they stay below the simulator's.

On chips with a vector unit beside the cube a finished tile leaves L0C piece by piece through UB,
where the epilogue is computed; on the others the fix pipe does all in one copy.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ascend_lab.aoe.cube.space import Array, Floats, Mask, same_rows, up
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
from ascend_lab.operators.kernels.gemm_schedule import AHEAD, store_cycles_per_byte

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

    def blocks(self, run: Array, n: Array) -> Array:
        """Return output blocks of a piece of a tile of `n` blocks, `run` elements each."""
        blocks: Array = np.minimum(np.maximum(self.piece_blocks * self.piece_run // run, 1), n)
        return blocks


def after_of(
    job: CubeWork, epilogue: Epilogue | None, out_dtype: str, warm: Collection[str] = ()
) -> After:
    """Return what follows the sums of each tiling; L2 holds all operands if one is `warm`."""
    chip = job.chip
    w = job.work
    sums = ACCUMULATOR[job.dtype]
    out = epilogue.out_dtype if epilogue else out_dtype
    demand = demand_of(epilogue, chip, sums)
    held, pieces = _rooms(job, demand, DTYPE_BYTES[out])
    loads, wide = _channel_copies(epilogue, chip)
    path = chip.path("GM", "UB" if chip.combined else "L1")
    n = w.cores.astype(np.float64)
    clock = chip.clock_hz
    own = 1.0 / path.rate_bytes_per_cycle
    hit = n * clock / chip.l2.rate_bytes_per_s
    rate = np.maximum(own, hit)
    memory = np.maximum(own, n * clock / chip.device_memory.rate_bytes_per_s)
    memory = np.where(w.ragged, rate, memory)
    near = path.latency_cycles + chip.l2.latency_cycles
    far = np.where(w.ragged, near, path.latency_cycles + chip.device_memory.latency_cycles)
    again = np.maximum(w.m_tiles * (held < w.n_own), 1)
    fresh = 1.0 / np.maximum(1, max(loads, 1) * w.rows * again)
    if epilogue and any(o.name.partition(".")[0] in warm for o in epilogue.operands):
        memory = rate
        far = np.full_like(far, near)
        fresh = np.zeros_like(fresh)
    plan = drain_plan(epilogue, sums) if epilogue and chip.combined else None
    stored = store_cycles_per_byte(chip, w.cores)
    each = np.where(fresh == 1.0, memory, rate)
    seen = np.floor(near + fresh * (far - near)).astype(np.int64)
    return After(
        epilogue, plan, out, pieces, w.m * BLOCK, stored, memory, far, loads, wide, held, each, seen
    )


def _rooms(job: CubeWork, demand: Demand | None, out_bytes: int) -> tuple[Array, Array]:
    """Return the blocks of numbers per channel a slot holds, and the output blocks of a piece."""
    chip = job.chip
    w = job.work
    tile_n = np.minimum(w.n, w.n_own)
    if demand is None:
        fit = chip.buffers.get("UB", 0) // (2 * w.m * BLOCK * out_bytes)
        return np.zeros_like(w.n), np.clip(fit, 1, tile_n) if chip.combined else tile_n
    (owns, tiles), _, which = same_rows([w.n_own, tile_n])
    pairs = zip(owns.tolist(), tiles.tolist(), strict=True)
    held = np.array([channel_blocks(demand, chip, *pair) for pair in pairs], np.int64)[which]
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


def copied(path: Path, size_bytes: Array, cycles_per_byte: Floats | float | None = None) -> Array:
    """Return cycles of a copy on a path, by default at its own rate."""
    rate = 1.0 / path.rate_bytes_per_cycle if cycles_per_byte is None else cycles_per_byte
    moved = np.ceil(size_bytes * rate - 1e-9)
    return np.asarray(path.startup_cycles + moved.astype(np.int64))


def near(job: CubeWork) -> Mask:
    """Tell which tilings of a convolution may keep an output tile's weights in L0B for all pixels.

    A bias that takes the last room there is left out: then they are copied again, which costs more.
    """
    w = job.work
    every = w.units * job.taps * np.minimum(w.n, w.n_own) * job.area_bytes
    fits: Mask = (w.b_l0 * every <= job.chip.buffers["L0B"]) & (w.m_tiles > 1) & job.is_conv
    return fits & w.hold_b & (w.stage >= w.units)


def shared_slots(job: CubeWork) -> Array:
    """Return the most slots that rows and weights of a convolution's stage share, 0: no such."""
    w = job.work
    found: Mask = job.is_conv & (w.stage < w.units) & (w.a_l1 == 2) & (w.b_l1 == 2)
    return np.where(found, AHEAD, 0)


def fed(job: CubeWork, m: Array, n: Array, depth: Array) -> tuple[Array, Array]:
    """Return the cycles that copy a tile of A and one of B from L1 to L0."""
    l0a = job.chip.path("L1", "L0A")
    l0b = job.chip.path("L1", "L0B")
    area = job.area_bytes
    if job.is_conv:
        b = np.where(near(job), 0, copied(l0b, depth * n * area))
        return copied(l0a, m * depth * area), b
    a = np.minimum(m, depth) * copied(l0a, np.maximum(m, depth) * area)
    return a, depth * copied(l0b, n * area)


def vector_cycles(after: After, chip: Chip, count: Array, run: Array) -> Array:
    """Return the cycles of all steps of the epilogue on a piece of `count` blocks of `run`.

    A kernel may fill the blocks up to whole repeats where that is quicker: the less of both counts.
    """
    full = up(run, chip.vector_bytes_per_repeat // 2) * (chip.vector_bytes_per_repeat // 2)
    return np.minimum(*(_steps_cycles(after, chip, count, each) for each in (run, full)))


def _steps_cycles(after: After, chip: Chip, count: Array, run: Array) -> Array:
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
    repeats = elements // lanes
    rest = elements % lanes > 0
    instructions = up(repeats, most) + rest
    cycles: Array = cost.head_cycles * instructions + cost.slope_cycles * (repeats + rest)
    return cycles


def tail_cycles(after: After, chip: Chip) -> int:
    """Cycles until the result of the last step is visible."""
    if after.plan is None or not after.plan.steps:
        return 0
    op = after.plan.steps[-1].op
    return chip.vector_costs.get(op, chip.vector_costs["default"]).tail_cycles


@dataclass(frozen=True, slots=True)
class Busy:
    """Cycles of work on one core: MTE2 for A, for B, for operands; MTE1 for A, for B; the cube;
    out of L0C (V or fix pipe); the last hop to GM. `a_copies`, `b_copies`: loads from GM.
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
    """Return the turns of the cube for one tile."""
    w = job.work
    stages = up(w.units, w.stage)
    last = w.units - (stages - 1) * w.stage
    return (stages - 1) * up(w.stage * job.taps, w.k) + up(last * job.taps, w.k)


def macs_per_fractal(job: CubeWork) -> int:
    """Return the cycles of the cube for 16 x C0 x 16 products."""
    m0, k0, n0 = job.chip.cube_shape(job.dtype)
    return -(-FRACTAL // m0) * -(-c0_of(job.dtype) // k0) * -(-FRACTAL // n0)


def busy_of(job: CubeWork, after: After) -> Busy:
    """Return the work of every pipe."""
    chip = job.chip
    w = job.work
    f = job.chip.flag_cycles
    tiles = w.m_tiles * w.n_tiles * w.bundles
    products = w.bundles * w.m_sum * w.n_own * w.units * job.taps
    flags = np.where(near(job), 2 * f, 4 * f)
    heads = tiles * (2 * f + turns_of(job) * (chip.cube_head_cycles + flags))
    load_a, load_b, a_copies, b_copies = _loads(job)
    feed_a, feed_b = _feeds(job)
    operands = after.epilogue.of_kind("tile") if after.epilogue and chip.combined else ()
    elements = w.pixel_sum * w.n_own * FRACTAL * w.bundles
    more = elements * sum(DTYPE_BYTES[o.dtype] for o in operands) * after.in_cycles_per_byte
    cube = heads + products * float(macs_per_fractal(job))
    drain, store = _drains(job, after, tiles, elements)
    return Busy(load_a, load_b, more, feed_a, feed_b, cube, drain, store, a_copies, b_copies)


def _loads(job: CubeWork) -> tuple[Floats, Floats, Array, Array]:
    """MTE2: cycles for A and for B, and how often each is loaded."""
    w = job.work
    f = job.chip.flag_cycles
    area = job.area_bytes
    start = job.chip.path("GM", "L1").startup_cycles
    stages = up(w.units, w.stage)
    turns = turns_of(job)
    depth = w.units * job.taps
    a_times = np.where(w.hold_a & ~w.outer_n, 1, w.n_tiles)
    b_times = np.where(w.hold_b, 1, w.m_tiles)
    a_copies = w.bundles * w.m_tiles * a_times * np.where(w.hold_a, 1, stages)
    b_copies = w.bundles * w.n_tiles * b_times * np.where(w.hold_b, 1, stages)
    a_copies = np.where(w.by_a, w.m_tiles * a_times * turns, a_copies)
    b_copies = np.where(w.by_b, w.n_tiles * b_times * turns, b_copies)
    b_starts = np.where(w.by_b, w.n_tiles * b_times * depth, b_copies)
    a_bytes = w.bundles * a_times * w.unit_sum * w.units
    b_bytes = w.bundles * b_times * w.n_own * depth * area
    flags = np.where(shared_slots(job) > 0, 0, 2 * f)
    a = a_bytes * job.a.cycles_per_byte + a_copies * (start + 2 * f)
    b = b_bytes * job.b.cycles_per_byte + b_copies * flags + b_starts * start
    return a, b, a_copies, b_copies


def _feeds(job: CubeWork) -> tuple[Floats, Floats]:
    """MTE1: cycles for A and for B, flags counted."""
    chip = job.chip
    w = job.work
    area = job.area_bytes
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
        full = np.minimum(w.m, w.k) * (w.m_sum // w.m) * (depth // np.maximum(w.stage, w.k))
        copies = np.maximum(turns * w.m_tiles, full * (w.stage // w.k))
    a = copies * l0a.startup_cycles + depth * w.m_sum * area / l0a.rate_bytes_per_cycle
    b = w.n_tiles * rows * l0b.startup_cycles + depth * w.n_own * area / l0b.rate_bytes_per_cycle
    feed_a = np.where(w.by_a, 0.0, w.bundles * (a * w.n_tiles + flags))
    once = w.n_tiles * l0b.startup_cycles + depth * w.n_own * area / l0b.rate_bytes_per_cycle
    every = np.where(near(job), once, b * w.m_tiles + flags)
    feed_b = np.where(w.by_b, 0.0, w.bundles * every)
    return feed_a, feed_b


def _drains(job: CubeWork, after: After, tiles: Array, elements: Array) -> tuple[Floats, Floats]:
    """Cycles out of L0C, the epilogue's steps included, and of the last hop to GM."""
    chip = job.chip
    f = job.chip.flag_cycles
    size = DTYPE_BYTES[after.out_dtype]
    if not chip.combined:
        path = chip.path("L0C", "GM")
        fix = tiles * (path.startup_cycles + 2.0 * f) + elements * size * after.out_cycles_per_byte
        return fix, np.zeros_like(fix)
    hop = chip.path("L0C", "UB")
    path = chip.path("UB", "GM")
    demand = demand_of(after.epilogue, chip, ACCUMULATOR[job.dtype])
    per_element = demand.cycles if demand else size / hop.rate_bytes_per_cycle
    heads = hop.startup_cycles + 4 * f
    for step in after.plan.steps if after.plan else ():
        heads += chip.vector_costs.get(step.op, chip.vector_costs["default"]).head_cycles
    store = tiles * (path.startup_cycles + 2.0 * f) + elements * size * after.out_cycles_per_byte
    return tiles * float(heads) + elements * per_element, store


def first_of(job: CubeWork) -> tuple[Floats, Floats, Floats]:
    """Cycles of the first loads from GM, of the first copies to L0, and of the first product."""
    chip = job.chip
    w = job.work
    area = job.area_bytes
    path = chip.path("GM", "L1")
    m = job.sides.fractals[w.first]
    n = np.where(w.n_tiles == 1, w.n_last, w.n)
    stage = np.minimum(w.stage, w.units)
    depth = np.minimum(w.k, stage * job.taps)
    a_size = job.sides.unit_bytes[w.first] * np.where(w.hold_a, w.units, stage)
    b_size = n * area * np.where(w.hold_b, w.units, stage) * job.taps
    a = np.where(w.by_a, 0, copied(path, a_size, job.a.cycles_per_byte))
    b = np.where(w.by_b, 0, copied(path, b_size, job.b.cycles_per_byte))
    latency = np.minimum(job.a.latency_cycles, job.b.latency_cycles)
    feed_a, feed_b = fed(job, m, n, depth)
    feed = np.where(w.by_a, 0, feed_a) + np.where(w.by_b, 0, feed_b)
    product = chip.cube_head_cycles + m * n * depth * macs_per_fractal(job)
    return (a + b + latency) * 1.0, feed * 1.0, product * 1.0


def last_of(job: CubeWork, after: After) -> Floats:
    """Least cycles from the end of the last product until its tile is in GM."""
    chip = job.chip
    w = job.work
    size = DTYPE_BYTES[after.out_dtype]
    run = job.sides.pixels[w.first + w.m_tiles - 1] * FRACTAL
    if not chip.combined:
        path = chip.path("L0C", "GM")
        last = copied(path, run * w.n_last * size, after.out_cycles_per_byte)
        return (last + path.latency_cycles + chip.l2.latency_cycles).astype(np.float64)
    path = chip.path("UB", "GM")
    blocks = after.blocks(run, w.n_last)
    last_piece = w.n_last - (up(w.n_last, blocks) - 1) * blocks
    last = copied(path, run * last_piece * size, after.out_cycles_per_byte)
    return (last + path.latency_cycles + chip.l2.latency_cycles).astype(np.float64)


def closed_bounds(job: CubeWork, after: After) -> Floats:
    """Return a lower bound of the cycles of each tiling, without memory's own limit."""
    w = job.work
    busy = busy_of(job, after)
    f = job.chip.flag_cycles
    first_load, first_feed, first_cube = first_of(job)
    last = last_of(job, after)
    load, feed, cube, drain, store = busy.pipes
    # weights that stay may come to L0B while the first rows still come to L1
    late = feed - np.where(near(job), busy.feed_b, 0.0)
    ends = [load + last, feed + last, first_load + late + last]
    ends += [first_load + first_feed + cube + last]
    ends += [first_load + first_feed + first_cube + side for side in (drain, store)]
    ends += _alternating(job, busy)
    sums = DTYPE_BYTES[ACCUMULATOR[job.dtype]] * BLOCK
    alone = 2 * w.m * np.minimum(w.n, w.n_own) * sums > job.chip.buffers["L0C"]
    tiles = w.m_tiles * w.n_tiles * w.bundles
    hop = _out_of_l0c(job, after, tiles)
    ends.append(np.where(alone, first_load + first_feed + cube + hop, 0.0))
    bounds: Floats = np.floor(np.maximum.reduce(ends)) - 8 * f
    return np.maximum(bounds, 0.0)


def _out_of_l0c(job: CubeWork, after: After, tiles: Array) -> Floats:
    """Cycles a tile that fills L0C alone keeps the cube waiting, all tiles but the last one."""
    w = job.work
    chip = job.chip
    size = DTYPE_BYTES[after.out_dtype]
    if not chip.combined:
        path = chip.path("L0C", "GM")
        rate = after.out_cycles_per_byte
        each = path.startup_cycles + path.latency_cycles + chip.l2.latency_cycles
    else:
        path = chip.path("L0C", "UB")
        rate = np.full(len(tiles), 1.0 / path.rate_bytes_per_cycle)
        each = path.startup_cycles
        if after.plan is not None:
            size = DTYPE_BYTES[after.plan.tiles[after.plan.start]]
    elements = w.pixel_sum * w.n_own * FRACTAL * w.bundles
    largest = w.m * np.minimum(w.n, w.n_own) * BLOCK
    total: Floats = (tiles - 1) * each + np.maximum(elements - largest, 0) * size * rate
    return total


def _alternating(job: CubeWork, busy: Busy) -> list[Floats]:
    """Bounds by the slots of L1 and L0: load, latency and use of one slot do not overlap."""
    w = job.work
    feed = busy.feed_a + np.where(near(job), 0.0, busy.feed_b)
    a_staged = ~w.by_a & ~w.hold_a
    b_staged = ~w.by_b & ~w.hold_b
    wait_a = busy.a_copies * job.a.latency_cycles
    wait_b = busy.b_copies * job.b.latency_cycles
    a_l1, b_l1 = (np.maximum(shared_slots(job), slots) for slots in (w.a_l1, w.b_l1))
    both = (busy.load_a + busy.load_b + wait_b + feed) / a_l1
    a = np.where(w.by_a, 0.0, (busy.load_a + wait_a + feed) / a_l1)
    b = np.where(w.by_b, 0.0, (busy.load_b + wait_b + feed) / b_l1)
    # two flags of a turn and two of a tile are raised while the other pipe works
    tiles = w.m_tiles * w.n_tiles * w.bundles
    cube = busy.cube - 2 * job.chip.flag_cycles * tiles * (turns_of(job) + 1)
    l0 = np.where(w.a_l0 == 1, feed + cube, np.where(w.b_l0 == 1, busy.feed_b + cube, 0.0))
    return [np.where(a_staged & b_staged, both, 0.0), a, b, np.where(w.by_a | w.by_b, 0.0, l0)]
