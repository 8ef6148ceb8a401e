"""Certified lower bounds on the simulated cycles of every tiling of a space.

Three of them, each tighter and dearer than the last: closed forms for the whole table; a walk
through the kernels of some tilings, side by side; the simulator itself. None ends before memory has
moved its bytes, and the host's launch is counted.

The walk goes one turn of the cube at a time, as arrays. What is kept are the waits and durations of
a kernel's pipes; where a detail is left out (room in UB between pieces of a tile, the latency of
numbers per channel), a wait is missing and never one too many. So the times are at most those of
the simulator, and in most kernels equal to them.

Of 60 products and convolutions of random shapes, chips and epilogues, 57 are proven optimal within
200 trials with the walk and 32 with closed forms alone, which take 4.7 times as long to tune.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ascend_lab.aoe.cube import pipe_work
from ascend_lab.aoe.cube.pipe_work import BLOCK, After, copied, fed, near
from ascend_lab.aoe.cube.space import Array, Columns, Floats, Mask, Shape, up
from ascend_lab.aoe.cube.work import CubeWork, conv_work, gemm_work, rows_of
from ascend_lab.machine import isa
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.sim.timeline import start_cycles
from ascend_lab.operators import kernels
from ascend_lab.operators.kernels.epilogue import Epilogue

PIPES = ("load", "feed", "cube", "drain", "store")
"""MTE2, MTE1, M, what empties L0C (V or FIX), MTE3."""
LOOPS = ("k", "stage", "inner", "outer", "bundle")


class Slots:
    """When the slots of a queue are free again: `count` of them, the one freed last first."""

    def __init__(self, count: Array) -> None:
        """Start with all of them free."""
        self.count, self.times = count, [np.zeros_like(count)] * int(count.max())

    def wait(self, at: Array) -> Array:
        """Return the time from which the next slot is free."""
        free: Array = np.maximum(at, np.choose(self.count - 1, self.times))
        return free

    def free(self, times: Array, where: Mask) -> None:
        """Give a slot back at `times`."""
        moved = zip(self.times, [times, *self.times[:-1]], strict=True)
        self.times = [np.where(where, new, old) for old, new in moved]


class Walk:
    """Kernels that go turn by turn through their loops, and drain their tiles from L0C to GM.

    Times per pipe in `at`, work done per pipe in `done`, slots, and turns of the loops.
    """

    def __init__(self, job: CubeWork, after: After) -> None:
        """Start all kernels; `after` is what follows a tile."""
        self.job = job
        self.after = after
        self.flag = job.chip.flag_cycles
        w = job.work
        f = self.flag
        zero = np.zeros(len(w.m), np.int64)
        # consumers give their slots to the producers first, a flag each
        ahead = pipe_work.shared_slots(job)
        self.joint = ahead > 0
        l1 = np.where(w.by_a, 0, w.a_l1) + np.where(w.by_b | self.joint, 0, w.b_l1)
        starts = (zero + f, f * l1, f * (w.a_l0 + w.b_l0), zero + 2 * f, zero + 2 * f)
        self.at = dict(zip(PIPES, starts, strict=True))
        self.done = {name: zero.copy() for name in PIPES}
        self.place = {name: zero.copy() for name in LOOPS}
        self.ends = zero.copy()
        size = w.m * np.minimum(w.n, w.n_own) * BLOCK * DTYPE_BYTES[isa.ACCUMULATOR[job.dtype]]
        counts = {"a1": np.maximum(w.a_l1, ahead), "b1": np.maximum(w.b_l1, ahead)}
        counts |= {
            "c": 1 + (2 * size <= job.chip.buffers["L0C"]),
            "out": zero + 2,
            "tile": zero + 2,
        }
        counts |= {"a0": w.a_l0, "b0": w.b_l0}
        self.slots = {name: Slots(count) for name, count in counts.items()}
        self.outer = np.where(w.outer_n, w.n_tiles, w.m_tiles)
        self.inner = np.where(w.outer_n, w.m_tiles, w.n_tiles)
        self.stages = up(w.units, w.stage)
        self._load_channels()

    def _spend(self, pipe: str, where: Mask, until: Array, cycles: Array | int) -> None:
        """Let a pipe be busy `until`, `cycles` of the time with work."""
        self.at[pipe] = np.where(where, until, self.at[pipe])
        self.done[pipe] += np.where(where, cycles, 0)

    # -- from L0C to GM ----------------------------------------------------------------------------
    def _load_channels(self) -> None:
        """Load the numbers per channel that stay for all tiles."""
        after = self.after
        w = self.job.work
        chip = self.job.chip
        f = self.flag
        if not after.channel_loads:
            return
        held = after.channel_blocks >= w.n_own
        path = chip.path("GM", "UB" if chip.combined else "L1")
        moved = w.n_own * after.channel_bytes * after.channel_cycles_per_byte
        cost = after.channel_loads * path.startup_cycles + moved.astype(np.int64) + 2 * f
        self._spend("load", held, self.at["load"] + cost, cost)
        if chip.combined:
            return
        table = copied(chip.path("L1", "BT"), w.n_own * isa.FRACTAL * 4)
        full = self.at["load"] + after.channel_latency
        fed = np.maximum(self.at["feed"], full) + 4 * f + table
        # bounds of MTE1 and the cube do not count this work, so it is not noted as done
        self._spend("feed", held, fed, 0)
        self._spend("cube", held, np.maximum(self.at["cube"], fed) + f, 0)

    def _drain(self, where: Mask, m_at: Array, n: Array) -> None:
        """Send finished tiles on their way to GM."""
        f = self.flag
        chip = self.job.chip
        job = self.job
        self._spend("cube", where, self.at["cube"] + f, f)
        index = np.flatnonzero(where)
        at = job.work.first[index] + m_at[index]
        run = job.sides.pixels[at] * isa.FRACTAL
        fractals = job.sides.fractals[at]
        more = job.sides.runs[at] - 1
        start = np.maximum(self.at["drain"][index], self.at["cube"][index]) + f
        if chip.combined:
            self._by_vector(where, index, start, (run, fractals, n[index], more))
            return
        after = self.after
        path = chip.path("L0C", "GM")
        size = run * n[index] * DTYPE_BYTES[after.out_dtype]
        copy = copied(path, size, after.out_cycles_per_byte[index]) + more * path.startup_cycles
        self.at["drain"][index] = start + copy + f
        self.done["drain"][index] += copy + 2 * f
        times = self.at["drain"] + path.latency_cycles + chip.l2.latency_cycles
        self.slots["c"].free(times, where)

    def _by_vector(
        self, where: Mask, index: Array, drain: Array, sizes: tuple[Array, Array, Array, Array]
    ) -> None:
        """Move tiles piece by piece through UB.

        `sizes`: elements and fractals high, blocks, copies to GM beside the first.
        """
        f = self.flag
        after = rows_of(self.after, index)
        (run, fractals, n, more) = sizes
        stride = fractals * BLOCK if after.plan is None else run
        most = after.blocks(stride, n)
        # an epilogue gives L0C back as soon as its only piece has left it
        early = (most == n) & (after.plan is not None)
        freed = drain
        for piece in range(int(up(n, most).max())):
            count = np.clip(n - piece * most, 0, most)
            mask = np.zeros(len(where), bool)
            mask[index] = count > 0
            loaded = self._operands(mask, index, after, (count * run, more))
            drain, freed = self._piece(
                (mask, index), after, (drain, freed), loaded, (count, run, stride, more), early
            )
        self.at["drain"][index] = np.where(early, drain, drain + f)
        times = self.at["drain"].copy()
        times[index] = np.where(early, freed, drain + f)
        self.slots["c"].free(times, where)

    def _operands(
        self, mask: Mask, index: Array, after: After, sizes: tuple[Array, Array]
    ) -> Array:
        """Load the operands of a piece, elements and more copies; return when they are there."""
        elements, more = sizes
        tiles = after.epilogue.of_kind("tile") if after.epilogue else ()
        if not tiles:
            return np.zeros_like(elements)
        path = self.job.chip.path("GM", "UB")
        rate = after.in_cycles_per_byte
        cycles = np.full_like(elements, 2 * self.flag)
        for operand in tiles:
            cycles += copied(path, elements * DTYPE_BYTES[operand.dtype], rate)
            cycles += more * path.startup_cycles
        done = self.slots["tile"].wait(self.at["load"])[index] + cycles
        self.at["load"][index] = np.where(mask[index], done, self.at["load"][index])
        self.done["load"][index] += np.where(mask[index], cycles, 0)
        return done + after.in_latency

    def _piece(
        self,
        at: tuple[Mask, Array],
        after: After,
        times: tuple[Array, Array],
        loaded: Array,
        sizes: tuple[Array, Array, Array, Array],
        early: Mask,
    ) -> tuple[Array, Array]:
        """One piece: out of L0C, through the steps, to GM; return times of V and of L0C free."""
        (mask, index) = at
        (drain, freed) = times
        (count, run, stride, more) = sizes
        f = self.flag
        chip = self.job.chip
        on = mask[index]
        size = DTYPE_BYTES[after.out_dtype]
        arrives = size if after.plan is None else DTYPE_BYTES[after.plan.tiles[after.plan.start]]
        work = copied(chip.path("L0C", "UB"), count * stride * arrives)
        end = np.maximum(drain, self.slots["out"].times[1][index]) + f + work
        if after.plan is not None and after.epilogue is not None:
            end = np.where(early, end + f, end)
            freed = np.where(on & early, end, freed)
            steps = pipe_work.vector_cycles(after, chip, count, run)
            tiles = after.epilogue.of_kind("tile")
            end = (np.maximum(end, loaded) + f if tiles else end) + steps
            work = work + steps
            if tiles:
                end = end + f
                self._free("tile", at, end)
        end = end + f
        path = chip.path("UB", "GM")
        copy = copied(path, count * run * size, after.out_cycles_per_byte) + 2 * f
        copy += more * path.startup_cycles
        store = np.maximum(self.at["store"][index], end + pipe_work.tail_cycles(after, chip)) + copy
        self.at["store"][index] = np.where(on, store, self.at["store"][index])
        self.done["drain"][index] += np.where(on, work + 4 * f, 0)
        self.done["store"][index] += np.where(on, copy, 0)
        self._free("out", at, store + path.latency_cycles + chip.l2.latency_cycles)
        return np.where(on, end, drain), freed

    def _free(self, queue: str, at: tuple[Mask, Array], times: Array) -> None:
        """Give slots of some kernels back."""
        (mask, index) = at
        every = np.zeros_like(self.at["load"])
        every[index] = times
        self.slots[queue].free(every, mask)

    # -- turn by turn ------------------------------------------------------------------------------
    def run(self, most: int) -> Array:
        """Return the cycles to the end; behind `most` turns, those of the busiest pipe."""
        for _ in range(most):
            self._turn()
            if (self.ends > 0).all():
                return self.ends
        totals = pipe_work.busy_of(self.job, self.after).pipes
        left = [
            self.at[pipe] + np.maximum(np.floor(total).astype(np.int64) - self.done[pipe], 0)
            for pipe, total in zip(PIPES, totals, strict=True)
        ]
        return np.where(self.ends > 0, self.ends, np.maximum.reduce(left))

    def _turn(self) -> None:
        """One product of L0 tiles in every kernel that has not ended."""
        w = self.job.work
        p = self.place
        f = self.flag
        going = self.ends == 0
        m_at = np.where(w.outer_n, p["inner"], p["outer"])
        n_at = np.where(w.outer_n, p["outer"], p["inner"])
        m = self.job.sides.fractals[w.first + m_at]
        n = np.where(n_at == w.n_tiles - 1, w.n_last, w.n)
        last_stage = p["stage"] == self.stages - 1
        units = np.where(last_stage, w.units - p["stage"] * w.stage, w.stage)
        depth_all = units * self.job.taps
        depth = np.minimum(w.k, depth_all - p["k"] * w.k)
        begin_stage = p["k"] == 0
        end_stage = (p["k"] + 1) * w.k >= depth_all
        begin_tile = begin_stage & (p["stage"] == 0)
        end_tile = end_stage & last_stage
        cube = self.at["cube"]
        self._spend("cube", going & begin_tile, self.slots["c"].wait(cube) + f, f)
        if (going & begin_stage).any():
            self._stage(going & begin_stage, begin_tile, m_at, n, units, depth_all)
        self._multiply(going, m, n, depth)
        self._free_l1(going & end_stage, end_tile)
        if (going & end_tile).any():
            self._drain(going & end_tile, m_at, n)
        self._step(going, end_stage, end_tile)

    def _stage(
        self, going: Mask, begin_tile: Mask, m_at: Array, n: Array, units: Array, depth: Array
    ) -> None:
        """Load what a stage needs, or an outer loop keeps, to L1; MTE1 waits for it."""
        w = self.job.work
        p = self.place
        job = self.job
        first = begin_tile & (p["inner"] == 0)
        a = going & ~w.by_a & (~w.hold_a | first)
        b = going & ~w.by_b & (~w.hold_b | (first & (~w.hold_all | (p["outer"] == 0))))
        a_size = job.sides.unit_bytes[w.first + m_at] * np.where(w.hold_a, w.units, units)
        b_depth = np.where(w.hold_b, w.units * job.taps, depth)
        b_size = n * b_depth * job.area_bytes
        path = job.chip.path("GM", "L1")
        a_cycles = copied(path, a_size, job.a.cycles_per_byte)
        b_cycles = copied(path, b_size, job.b.cycles_per_byte)
        before = b & w.hold_b
        if before.any():
            self._bring("b", before, b_cycles, job.b.latency_cycles)
            once = copied(job.chip.path("L1", "L0B"), b_size)
            self._spend("feed", before & near(job), self.at["feed"] + once, once)
        self._bring("a", a, a_cycles, job.a.latency_cycles)
        carried = np.where(a, job.a.latency_cycles - b_cycles, 0)
        self._bring("b", b & ~w.hold_b, b_cycles, np.maximum(job.b.latency_cycles, carried))

    def _bring(self, name: str, where: Mask, cycles: Array, latency: Array) -> None:
        """Copy to a slot of L1 and tell MTE1, which waits: once for what shares slots."""
        f = np.where(self.joint & (name == "b"), 0, self.flag)
        done = self.slots[f"{name}1"].wait(self.at["load"]) + 2 * f + cycles
        self._spend("load", where, done, 2 * f + cycles)
        self._spend("feed", where, np.maximum(self.at["feed"], done + latency) + f, 0)

    def _free_l1(self, end: Mask, end_tile: Mask) -> None:
        w = self.job.work
        p = self.place
        last = end_tile & (p["inner"] == self.inner - 1)
        a = end & ~w.by_a & (~w.hold_a | last)
        b = end & ~w.by_b & (~w.hold_b | (last & (~w.hold_all | (p["outer"] == self.outer - 1))))
        # what an outer loop keeps is given back last
        early = b & w.hold_a & ~w.hold_b
        for name, where in (("b1", early), ("a1", a), ("b1", b & ~early)):
            f = np.where(self.joint & (name == "b1"), 0, self.flag)
            self._spend("feed", where, self.at["feed"] + f, 0)
            self.slots[name].free(self.at["feed"], where)

    def _multiply(self, going: Mask, m: Array, n: Array, depth: Array) -> None:
        """Feed L0A and L0B, multiply, give the slots back."""
        job = self.job
        chip = self.job.chip
        f = self.flag
        cube = self.at["cube"]
        a_cycles, b_cycles = fed(job, m, n, depth)
        stays = near(job)
        for name, cycles, by in (("a", a_cycles, job.work.by_a), ("b", b_cycles, job.work.by_b)):
            moves = ~stays if name == "b" else np.ones(len(stays), bool)
            slots = self.slots[f"{name}0"]
            full = slots.wait(self.at["feed"]) + 2 * f + cycles
            if by.any():
                full = self._straight(name, going, full, m, n, depth)
            self._spend("feed", going & moves & ~by, full, 2 * f + cycles)
            cube = np.where(moves, np.maximum(cube, full) + f, cube)
        product = chip.cube_head_cycles + m * depth * n * pipe_work.macs_per_fractal(job)
        cube = cube + product
        raised = np.where(stays, f, 2 * f)
        self._spend("cube", going, cube + raised, product + 2 * raised)
        self.slots["a0"].free(cube + f, going)
        self.slots["b0"].free(cube + 2 * f, going)

    def _straight(
        self, name: str, going: Mask, full: Array, m: Array, n: Array, depth: Array
    ) -> Array:
        """Load what bypasses L1 from GM to L0; return when it is there, or `full` elsewhere."""
        job = self.job
        f = self.flag
        load, by = (job.a, job.work.by_a) if name == "a" else (job.b, job.work.by_b)
        path = job.chip.path("GM", f"L0{name.upper()}")
        area = job.area_bytes
        if name == "a":
            size = np.maximum(m, depth) * area
            times = np.minimum(m, depth)
        else:
            size = n * area
            times = depth
        cycles = times * copied(path, size, load.cycles_per_byte)
        done = self.slots[f"{name}0"].wait(self.at["load"]) + 2 * f + cycles
        self._spend("load", going & by, done, 2 * f + cycles)
        return np.where(by, done + load.latency_cycles, full)

    def _step(self, going: Mask, end_stage: Mask, end_tile: Mask) -> None:
        """Go to the next turn of every loop; note the kernels that have ended."""
        p = self.place
        w = self.job.work
        end_inner = end_tile & (p["inner"] == self.inner - 1)
        end_outer = end_inner & (p["outer"] == self.outer - 1)
        over = going & end_outer & (p["bundle"] == w.bundles - 1)
        done = self.slots["out" if self.job.chip.combined else "c"].times[0] + self.flag
        self.ends = np.where(over, done, self.ends)
        ends = (end_stage, end_tile, end_inner, end_outer, over)
        step = going
        for name, end in zip(LOOPS, ends, strict=True):
            p[name] = np.where(step, np.where(end, 0, p[name] + 1), p[name])
            step = step & end


# -- the bounds ------------------------------------------------------------------------------------
TURNS = 1024
"""Turns of the cube that a walk follows; what remains then counts by the busiest pipe."""


@dataclass(frozen=True, slots=True)
class CubeProblem:
    """A product or a convolution on a chip, what follows it, and what L2 holds at the start.

    `warm`: "a" (rows, pixels), "b" (columns, weights), or names of operands of the epilogue.
    """

    shape: Shape
    chip: Chip
    epilogue: Epilogue | None = None
    warm: frozenset[str] = frozenset()


class Bounds:
    """Lower bounds for the rows of a table; the loads and sums are computed once."""

    def __init__(self, problem: CubeProblem, table: Columns) -> None:
        """Prepare the rows of `table`."""
        shape = problem.shape
        chip = problem.chip
        warm = problem.warm
        if isinstance(shape, kernels.ConvShape):
            self.job: CubeWork = conv_work(shape, chip, table, warm)
        else:
            self.job = gemm_work(shape, chip, table, warm)
        self.after: After = pipe_work.after_of(self.job, problem.epilogue, shape.out_dtype, warm)
        self.least = _memory_cycles(self.job, self.after, warm)
        self.launch_cycles = start_cycles(chip, "cold")

    @cached_property
    def closed(self) -> Floats:
        """The bounds in closed form, for all rows."""
        core = pipe_work.closed_bounds(self.job, self.after)
        return np.maximum(core, self.least) + self.launch_cycles

    @cached_property
    def tight(self) -> Floats:
        """The tighter bounds that are known, of other rows 0."""
        return np.zeros_like(self.closed)

    def walked(self, rows: Array) -> Floats:
        """Return tighter bounds of some rows, by walking once through the kernels of each."""
        new = rows[self.tight[rows] == 0]
        order = np.argsort(self.turns[new], kind="stable")
        for part in np.array_split(new[order], max(1, len(new) // 2048)) if len(new) else ():
            walk = Walk(rows_of(self.job, part), rows_of(self.after, part))
            out = walk.run(TURNS) + self.launch_cycles
            self.tight[part] = np.maximum(out, self.closed[part])
        return self.tight[rows]

    @cached_property
    def turns(self) -> Array:
        """Turns of the cube on one core, per row."""
        w = self.job.work
        return pipe_work.turns_of(self.job) * w.m_tiles * w.n_tiles * w.bundles


def _memory_cycles(job: CubeWork, after: After, warm: Collection[str]) -> Floats:
    """Cycles memory needs for what is read once and not in L2, and for what L2 cannot keep."""
    chip = job.chip
    elements = job.out_pixels * job.out_blocks * isa.FRACTAL
    operands = after.epilogue.of_kind("tile") if after.epilogue else ()
    cold = [o for o in operands if o.name.partition(".")[0] not in warm]
    width = sum(DTYPE_BYTES[o.dtype] for o in cold) if chip.combined else 0
    more = np.where(job.work.ragged, 0, elements * width)
    read = job.a.fetched_bytes + job.b.fetched_bytes + more
    written = elements * DTYPE_BYTES[after.out_dtype]
    total = read + max(0, written - chip.l2.size_bytes)
    cycles: Floats = np.ceil(total / chip.device_memory.rate_bytes_per_s * chip.clock_hz - 1e-9)
    return cycles
