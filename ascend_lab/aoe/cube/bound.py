"""Computes certified lower bounds on the simulated cycles of every tiling of a space.

A tiling whose bound is 5,000 cycles need not be simulated if another one took 4,800. There are two
kinds of bounds, the second tighter and more expensive: closed forms for all tilings of a table, and
a walk through the kernels of some tilings. Both include the time that memory needs for its bytes,
and the host's launch.

The walk advances all kernels by one turn of the cube (one product of two L0 tiles) at a time, as
NumPy arrays. It models the waits and durations of a kernel's pipes: MTE2 loads from GM to L1, MTE1
feeds L0 from L1, the cube multiplies, V or the fix pipe drains L0C, MTE3 stores from UB to GM.
Where the walk leaves out a detail (room in UB between pieces of a tile, the latency of operands per
channel), a wait is missing and none is added. So its times are at most those of the simulator, and
in most kernels equal to them.

In a test with 60 products and convolutions of random shapes, chips and epilogues, 57 were proven
optimal within 200 trials with the walk, and 32 with closed forms alone, which took 4.7 times as
long.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ascend_lab.aoe.cube import pipe_work
from ascend_lab.aoe.cube.pipe_work import (
    BLOCK,
    DrainWork,
    copy_cycles,
    l1_to_l0_cycles,
    weights_stay_in_l0b,
)
from ascend_lab.aoe.cube.space import Array, Columns, Floats, Mask, Shape, ceil_div_array
from ascend_lab.aoe.cube.work import CubeWork, conv_work, gemm_work, select_tilings
from ascend_lab.machine import isa
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.sim.timeline import start_cycles
from ascend_lab.operators import kernels
from ascend_lab.operators.kernels.epilogue import Epilogue

PIPES = ("load", "feed", "cube", "drain", "store")
"""The pipes MTE2, MTE1 and M, the pipe that empties L0C (V or FIX), and MTE3."""
LOOPS = ("k", "stage", "inner", "outer", "bundle")
"""The loops of a kernel from the inside: K tiles of a stage, stages of an output tile, tiles along
one side, tiles along the other side, and bundles of channel groups."""


class Slots:
    """The times at which the slots of a queue become free, one array for each slot.

    `times[0]` belongs to the slot that was freed last, so `times[count - 1]` to the next in turn.
    """

    def __init__(self, count: Array) -> None:
        """Start with all of them free."""
        self.count = count
        # one array of zeros serves for all slots: `free` replaces arrays and never changes one
        self.times = [np.zeros_like(count)] * int(count.max())

    def wait(self, time: Array) -> Array:
        """Return the time from which the next slot is free."""
        # kernels with one slot look at times[0], kernels with two at times[1]
        free_time: Array = np.maximum(time, np.choose(self.count - 1, self.times))
        return free_time

    def free(self, times: Array, where: Mask) -> None:
        """Give a slot back at `times`."""
        # the times move on by one slot: (t0, t1) becomes (new, t0)
        shifted_times = [times, *self.times[:-1]]
        pairs = zip(shifted_times, self.times, strict=True)
        self.times = [np.where(where, shifted, current) for shifted, current in pairs]


@dataclass(frozen=True, slots=True)
class OutputTile:
    """The finished output tiles of the kernels with the numbers `kernels`, one entry for each.

    A tile has `blocks` blocks of `run` elements; with padding they are `fractals` fractals high.
    `extra_copies` are those to GM beyond the first.
    """

    kernels: Array
    run: Array
    fractals: Array
    blocks: Array
    extra_copies: Array


@dataclass(frozen=True, slots=True)
class Piece:
    """The pieces of output tiles that the vector unit computes at the same time.

    Arrays have an entry for each of `kernels`; only `selected` has one for every kernel of the
    walk: whether it has such a piece. A piece has `blocks` blocks of `run` elements, each of
    which takes `stride` elements in UB. With `released_early` its tile has left L0C before the
    epilogue.
    """

    kernels: Array
    selected: Mask
    blocks: Array
    run: Array
    stride: Array
    extra_copies: Array
    released_early: Mask

    @property
    def exists(self) -> Mask:
        """Whether each of `kernels` has such a piece."""
        mask: Mask = self.selected[self.kernels]
        return mask


class Walk:
    """Kernels of many tilings that run turn by turn through their loops, one array entry each.

    `free_at` holds the time at which each pipe is free, `done` the cycles of work it has done, and
    `loop_index` the position in each loop. `slots` are the queues of buffers: "a1" and "b1" in L1,
    "a0" and "b0" in L0A and L0B, "c" in L0C, "out" and "tile" (results and operands of the
    epilogue) in UB.
    """

    def __init__(self, job: CubeWork, drain_work: DrainWork) -> None:
        """Start all kernels; `drain_work` says how a finished tile leaves L0C."""
        self.job = job
        self.drain_work = drain_work
        self.flag_cycles = job.chip.flag_cycles
        work = job.work
        flag = self.flag_cycles
        zero = np.zeros(len(work.m), np.int64)
        # at the start each consumer raises a flag for every slot of its queue: "this one is free"
        shared_slots = pipe_work.shared_slots(job)
        self.shares_slots = shared_slots > 0
        a_flags = np.where(work.bypass_a, 0, work.a_l1)
        b_flags = np.where(work.bypass_b | self.shares_slots, 0, work.b_l1)
        start_times = {
            "load": zero + flag,
            "feed": flag * (a_flags + b_flags),
            "cube": flag * (work.a_l0 + work.b_l0),
            "drain": zero + 2 * flag,
            "store": zero + 2 * flag,
        }
        self.free_at = {name: start_times[name] for name in PIPES}
        self.done = {name: zero.copy() for name in PIPES}
        self.loop_index = {name: zero.copy() for name in LOOPS}
        self.end_cycles = zero.copy()
        sum_bytes = BLOCK * DTYPE_BYTES[isa.ACCUMULATOR[job.dtype]]
        tile_bytes = work.m * np.minimum(work.n, work.core_n) * sum_bytes
        two_tiles_fit = 2 * tile_bytes <= job.chip.buffers["L0C"]
        counts = {
            "a1": np.maximum(work.a_l1, shared_slots),
            "b1": np.maximum(work.b_l1, shared_slots),
            "a0": work.a_l0,
            "b0": work.b_l0,
            "c": np.where(two_tiles_fit, 2, 1),
            "out": zero + 2,
            "tile": zero + 2,
        }
        self.slots = {name: Slots(count) for name, count in counts.items()}
        self.outer = np.where(work.n_is_outer, work.n_tiles, work.m_tiles)
        self.inner = np.where(work.n_is_outer, work.m_tiles, work.n_tiles)
        self.stages = ceil_div_array(work.units, work.stage_units)
        self._load_channels()

    def _occupy(self, pipe: str, where: Mask, end: Array, cycles: Array | int) -> None:
        """Let a pipe be busy until `end`, of which `cycles` are work and the rest is waiting."""
        self.free_at[pipe] = np.where(where, end, self.free_at[pipe])
        self.done[pipe] += np.where(where, cycles, 0)

    # -- from L0C to GM ----------------------------------------------------------------------------
    def _load_channels(self) -> None:
        """Load the epilogue's operands per channel, where they stay on the core for all tiles."""
        channel = self.drain_work.channel
        work = self.job.work
        chip = self.job.chip
        flag = self.flag_cycles
        if not channel.copies:
            return
        stays = channel.resident_blocks >= work.core_n
        path = chip.path("GM", "UB" if chip.combined else "L1")
        moved_cycles = work.core_n * channel.block_bytes * channel.cycles_per_byte
        cycles = channel.copies * path.startup_cycles + moved_cycles.astype(np.int64) + 2 * flag
        self._occupy("load", stays, self.free_at["load"] + cycles, cycles)
        if chip.combined:
            return
        # a bias of 4 bytes for each of the 16 columns of a block
        table_cycles = copy_cycles(chip.path("L1", "BT"), work.core_n * isa.FRACTAL * 4)
        loaded_at = self.free_at["load"] + channel.latency_cycles
        table_ready = np.maximum(self.free_at["feed"], loaded_at) + 4 * flag + table_cycles
        # the closed forms of MTE1 and the cube leave this work out, so it must not count as done:
        # `run` adds what the closed forms have left
        self._occupy("feed", stays, table_ready, 0)
        self._occupy("cube", stays, np.maximum(self.free_at["cube"], table_ready) + flag, 0)

    def _drain(self, where: Mask, m_at: Array, n: Array) -> None:
        """Send finished tiles on their way to GM."""
        job = self.job
        flag = self.flag_cycles
        self._occupy("cube", where, self.free_at["cube"] + flag, flag)
        kernels = np.flatnonzero(where)
        number = job.work.first_tile[kernels] + m_at[kernels]
        tile = OutputTile(
            kernels=kernels,
            run=job.tile_list.pixels[number] * isa.FRACTAL,
            fractals=job.tile_list.fractals[number],
            blocks=n[kernels],
            extra_copies=job.tile_list.runs[number] - 1,
        )
        start = np.maximum(self.free_at["drain"][kernels], self.free_at["cube"][kernels]) + flag
        if job.chip.combined:
            self._drain_by_vector(where, tile, start)
        else:
            self._drain_by_fix_pipe(where, tile, start)

    def _drain_by_fix_pipe(self, where: Mask, tile: OutputTile, start: Array) -> None:
        """Copy tiles from L0C to GM at once; the fix pipe computes the epilogue on the way."""
        chip = self.job.chip
        flag = self.flag_cycles
        drain_work = self.drain_work
        path = chip.path("L0C", "GM")
        size_bytes = tile.run * tile.blocks * DTYPE_BYTES[drain_work.out_dtype]
        cycles_per_byte = drain_work.out_cycles_per_byte[tile.kernels]
        copy = copy_cycles(path, size_bytes, cycles_per_byte)
        copy = copy + tile.extra_copies * path.startup_cycles
        self.free_at["drain"][tile.kernels] = start + copy + flag
        self.done["drain"][tile.kernels] += copy + 2 * flag
        released = self.free_at["drain"] + path.latency_cycles + chip.l2.latency_cycles
        self.slots["c"].free(released, where)

    def _drain_by_vector(self, where: Mask, tile: OutputTile, start: Array) -> None:
        """Drain tiles piece by piece through UB, where the vector unit computes the epilogue."""
        kernels = tile.kernels
        flag = self.flag_cycles
        drain_work = select_tilings(self.drain_work, kernels)
        # 40 pixels in 3 fractals: all 48 rows are copied without an epilogue, 40 with one
        stride = tile.fractals * BLOCK if drain_work.plan is None else tile.run
        piece_blocks = drain_work.blocks(stride, tile.blocks)
        # with an epilogue and a single piece, L0C is free as soon as the piece is in UB; the cube
        # need not wait for the epilogue
        released_early = (piece_blocks == tile.blocks) & (drain_work.plan is not None)
        drain_free = start
        l0c_free = start
        for number in range(int(ceil_div_array(tile.blocks, piece_blocks).max())):
            # 5 blocks in pieces of 2: 2, 2, 1, then 0 while other kernels have more pieces
            blocks = np.clip(tile.blocks - number * piece_blocks, 0, piece_blocks)
            selected = np.zeros(len(where), bool)
            selected[kernels] = blocks > 0
            piece = Piece(
                kernels, selected, blocks, tile.run, stride, tile.extra_copies, released_early
            )
            loaded_at = self._load_operands(piece, drain_work)
            drain_free, l0c_free = self._drain_piece(
                piece, drain_work, drain_free, l0c_free, loaded_at
            )
        self.free_at["drain"][kernels] = np.where(released_early, drain_free, drain_free + flag)
        released = self.free_at["drain"].copy()
        released[kernels] = np.where(released_early, l0c_free, drain_free + flag)
        self.slots["c"].free(released, where)

    def _load_operands(self, piece: Piece, drain_work: DrainWork) -> Array:
        """Load the elementwise operands of a piece; return the time at which they are in UB."""
        kernels = piece.kernels
        elements = piece.blocks * piece.run
        tile_operands = drain_work.epilogue.of_kind("tile") if drain_work.epilogue else ()
        if not tile_operands:
            return np.zeros_like(elements)
        path = self.job.chip.path("GM", "UB")
        cycles = np.full_like(elements, 2 * self.flag_cycles)
        for operand in tile_operands:
            size_bytes = elements * DTYPE_BYTES[operand.dtype]
            cycles += copy_cycles(path, size_bytes, drain_work.in_cycles_per_byte)
            cycles += piece.extra_copies * path.startup_cycles
        loaded_at = self.slots["tile"].wait(self.free_at["load"])[kernels] + cycles
        load_free = self.free_at["load"][kernels]
        self.free_at["load"][kernels] = np.where(piece.exists, loaded_at, load_free)
        self.done["load"][kernels] += np.where(piece.exists, cycles, 0)
        return loaded_at + drain_work.in_latency

    def _drain_piece(
        self,
        piece: Piece,
        drain_work: DrainWork,
        drain_free: Array,
        l0c_free: Array,
        loaded_at: Array,
    ) -> tuple[Array, Array]:
        """Move a piece from L0C through the epilogue to GM; return when V and L0C are free."""
        kernels = piece.kernels
        chip = self.job.chip
        flag = self.flag_cycles
        # the drain converts the sums to the format in which the epilogue begins
        plan = drain_work.plan
        ub_dtype = drain_work.out_dtype if plan is None else plan.tiles[plan.start]
        ub_bytes = piece.blocks * piece.stride * DTYPE_BYTES[ub_dtype]
        drain_cycles = copy_cycles(chip.path("L0C", "UB"), ub_bytes)
        # UB has two slots for results: the next one in turn is that freed before the last
        end = np.maximum(drain_free, self.slots["out"].times[1][kernels]) + flag + drain_cycles
        if plan is not None and drain_work.epilogue is not None:
            copied_at = np.where(piece.released_early, end + flag, end)
            l0c_free = np.where(piece.exists & piece.released_early, copied_at, l0c_free)
            epilogue_cycles = pipe_work.vector_cycles(drain_work, chip, piece.blocks, piece.run)
            drain_cycles = drain_cycles + epilogue_cycles
            if drain_work.epilogue.of_kind("tile"):
                end = np.maximum(copied_at, loaded_at) + flag + epilogue_cycles + flag
                self._free("tile", piece, end)
            else:
                end = copied_at + epilogue_cycles
        end = end + flag
        self.done["drain"][kernels] += np.where(piece.exists, drain_cycles + 4 * flag, 0)
        self._store(piece, drain_work, end)
        return np.where(piece.exists, end, drain_free), l0c_free

    def _store(self, piece: Piece, drain_work: DrainWork, ready_at: Array) -> None:
        """Store a piece from UB to GM, and give its slot back when it has arrived."""
        kernels = piece.kernels
        chip = self.job.chip
        path = chip.path("UB", "GM")
        size_bytes = piece.blocks * piece.run * DTYPE_BYTES[drain_work.out_dtype]
        copy = copy_cycles(path, size_bytes, drain_work.out_cycles_per_byte) + 2 * self.flag_cycles
        copy += piece.extra_copies * path.startup_cycles
        visible_at = ready_at + pipe_work.tail_cycles(drain_work, chip)
        store_free = self.free_at["store"][kernels]
        stored_at = np.maximum(store_free, visible_at) + copy
        self.free_at["store"][kernels] = np.where(piece.exists, stored_at, store_free)
        self.done["store"][kernels] += np.where(piece.exists, copy, 0)
        self._free("out", piece, stored_at + path.latency_cycles + chip.l2.latency_cycles)

    def _free(self, queue: str, piece: Piece, times: Array) -> None:
        """Give the slot of a piece back in every kernel that has the piece."""
        all_times = np.zeros_like(self.free_at["load"])
        all_times[piece.kernels] = times
        self.slots[queue].free(all_times, piece.selected)

    # -- turn by turn ------------------------------------------------------------------------------
    def run(self, max_turns: int) -> Array:
        """Return the cycles of each kernel; one that needs more than `max_turns` gets a bound.

        The bound of a pipe is the time it has reached, plus the work that the closed form says is
        left; the busiest pipe counts.
        """
        for _ in range(max_turns):
            self._turn()
            if (self.end_cycles > 0).all():
                return self.end_cycles
        totals = pipe_work.busy_of(self.job, self.drain_work).pipes
        remaining = [
            self.free_at[pipe] + np.maximum(np.floor(total).astype(np.int64) - self.done[pipe], 0)
            for pipe, total in zip(PIPES, totals, strict=True)
        ]
        return np.where(self.end_cycles > 0, self.end_cycles, np.maximum.reduce(remaining))

    def _turn(self) -> None:
        """Advance every kernel that has not ended by one product of L0 tiles."""
        work = self.job.work
        loop = self.loop_index
        flag = self.flag_cycles
        active = self.end_cycles == 0
        m_at = np.where(work.n_is_outer, loop["inner"], loop["outer"])
        n_at = np.where(work.n_is_outer, loop["outer"], loop["inner"])
        m = self.job.tile_list.fractals[work.first_tile + m_at]
        n = np.where(n_at == work.n_tiles - 1, work.n_last, work.n)
        last_stage = loop["stage"] == self.stages - 1
        units = np.where(
            last_stage, work.units - loop["stage"] * work.stage_units, work.stage_units
        )
        depth_all = units * self.job.taps
        depth = np.minimum(work.k, depth_all - loop["k"] * work.k)
        # loops from the inside: K tiles of a stage, stages of a tile, inner and outer tiles
        begin_stage = loop["k"] == 0
        end_stage = (loop["k"] + 1) * work.k >= depth_all
        begin_tile = begin_stage & (loop["stage"] == 0)
        end_tile = end_stage & last_stage
        cube = self.free_at["cube"]
        self._occupy("cube", active & begin_tile, self.slots["c"].wait(cube) + flag, flag)
        if (active & begin_stage).any():
            self._stage(active & begin_stage, begin_tile, m_at, n, units, depth_all)
        self._multiply(active, m, n, depth)
        self._free_l1(active & end_stage, end_tile)
        if (active & end_tile).any():
            self._drain(active & end_tile, m_at, n)
        self._advance_loops(active, end_stage, end_tile)

    def _stage(
        self, active: Mask, begin_tile: Mask, m_at: Array, n: Array, units: Array, depth: Array
    ) -> None:
        """Load to L1 what this stage needs, or what an outer loop keeps; MTE1 waits for it."""
        job = self.job
        work = job.work
        loop = self.loop_index
        # an operand that an outer loop keeps is loaded only where that loop begins
        begin_outer = begin_tile & (loop["inner"] == 0)
        begin_b = begin_outer & (~work.keeps_b_throughout | (loop["outer"] == 0))
        loads_a = active & ~work.bypass_a & (~work.keeps_a | begin_outer)
        loads_b = active & ~work.bypass_b & (~work.keeps_b | begin_b)
        a_units = np.where(work.keeps_a, work.units, units)
        b_depth = np.where(work.keeps_b, work.units * job.taps, depth)
        a_bytes = job.tile_list.unit_bytes[work.first_tile + m_at] * a_units
        b_bytes = n * b_depth * job.area_bytes
        path = job.chip.path("GM", "L1")
        a_cycles = copy_cycles(path, a_bytes, job.a.cycles_per_byte)
        b_cycles = copy_cycles(path, b_bytes, job.b.cycles_per_byte)
        # weights that an outer loop keeps are loaded before the pixels or rows of A
        weights_first = loads_b & work.keeps_b
        if weights_first.any():
            self._load_to_l1("b", weights_first, b_cycles, job.b.latency_cycles)
            to_l0b_cycles = copy_cycles(job.chip.path("L1", "L0B"), b_bytes)
            fed_at = self.free_at["feed"] + to_l0b_cycles
            moves_on = weights_first & weights_stay_in_l0b(job)
            self._occupy("feed", moves_on, fed_at, to_l0b_cycles)
        self._load_to_l1("a", loads_a, a_cycles, job.a.latency_cycles)
        # B is copied behind A, whose latency passes meanwhile
        latency_left = np.where(loads_a, job.a.latency_cycles - b_cycles, 0)
        b_latency = np.maximum(job.b.latency_cycles, latency_left)
        self._load_to_l1("b", loads_b & ~work.keeps_b, b_cycles, b_latency)

    def _load_to_l1(self, name: str, where: Mask, cycles: Array, latency: Array) -> None:
        """Copy to a slot of L1 and raise a flag for MTE1; A and B in a shared slot need one."""
        flag = np.where(self.shares_slots & (name == "b"), 0, self.flag_cycles)
        loaded_at = self.slots[f"{name}1"].wait(self.free_at["load"]) + 2 * flag + cycles
        self._occupy("load", where, loaded_at, 2 * flag + cycles)
        self._occupy("feed", where, np.maximum(self.free_at["feed"], loaded_at + latency) + flag, 0)

    def _free_l1(self, end_stage: Mask, end_tile: Mask) -> None:
        """Give the slots of L1 back that no later product of this stage or outer loop reads."""
        work = self.job.work
        loop = self.loop_index
        end_outer = end_tile & (loop["inner"] == self.inner - 1)
        end_b = end_outer & (~work.keeps_b_throughout | (loop["outer"] == self.outer - 1))
        frees_a = end_stage & ~work.bypass_a & (~work.keeps_a | end_outer)
        frees_b = end_stage & ~work.bypass_b & (~work.keeps_b | end_b)
        # the operand that an outer loop keeps is freed last: if A is kept, B is freed first
        b_first = frees_b & work.keeps_a & ~work.keeps_b
        for name, where in (("b1", b_first), ("a1", frees_a), ("b1", frees_b & ~b_first)):
            flag = np.where(self.shares_slots & (name == "b1"), 0, self.flag_cycles)
            self._occupy("feed", where, self.free_at["feed"] + flag, 0)
            self.slots[name].free(self.free_at["feed"], where)

    def _multiply(self, active: Mask, m: Array, n: Array, depth: Array) -> None:
        """Feed L0A and L0B from L1, multiply, and give the slots back."""
        job = self.job
        chip = self.job.chip
        flag = self.flag_cycles
        cube = self.free_at["cube"]
        a_cycles, b_cycles = l1_to_l0_cycles(job, m, n, depth)
        stays = weights_stay_in_l0b(job)
        for name, cycles, bypasses_l1 in (
            ("a", a_cycles, job.work.bypass_a),
            ("b", b_cycles, job.work.bypass_b),
        ):
            moves = ~stays if name == "b" else np.ones(len(stays), bool)
            slots = self.slots[f"{name}0"]
            loaded_at = slots.wait(self.free_at["feed"]) + 2 * flag + cycles
            if bypasses_l1.any():
                loaded_at = self._load_past_l1(name, active, loaded_at, m, n, depth)
            self._occupy("feed", active & moves & ~bypasses_l1, loaded_at, 2 * flag + cycles)
            cube = np.where(moves, np.maximum(cube, loaded_at) + flag, cube)
        product = chip.cube_head_cycles + m * depth * n * pipe_work.cycles_per_fractal_pair(job)
        # the cube raises a flag for L0A and, unless the weights stay, one for L0B: "refill this"
        cube = cube + product
        flag_cycles = np.where(stays, flag, 2 * flag)
        self._occupy("cube", active, cube + flag_cycles, product + 2 * flag_cycles)
        self.slots["a0"].free(cube + flag, active)
        self.slots["b0"].free(cube + 2 * flag, active)

    def _load_past_l1(
        self, name: str, active: Mask, staged_at: Array, m: Array, n: Array, depth: Array
    ) -> Array:
        """Load operands that bypass L1 from GM to L0; return when they are there.

        For kernels whose operand comes through L1 the result is `staged_at`.
        """
        job = self.job
        flag = self.flag_cycles
        load, bypasses_l1 = (
            (job.a, job.work.bypass_a) if name == "a" else (job.b, job.work.bypass_b)
        )
        path = job.chip.path("GM", f"L0{name.upper()}")
        area = job.area_bytes
        if name == "a":
            size = np.maximum(m, depth) * area
            times = np.minimum(m, depth)
        else:
            size = n * area
            times = depth
        cycles = times * copy_cycles(path, size, load.cycles_per_byte)
        loaded_at = self.slots[f"{name}0"].wait(self.free_at["load"]) + 2 * flag + cycles
        self._occupy("load", active & bypasses_l1, loaded_at, 2 * flag + cycles)
        return np.where(bypasses_l1, loaded_at + load.latency_cycles, staged_at)

    def _advance_loops(self, active: Mask, end_stage: Mask, end_tile: Mask) -> None:
        """Advance the loop counters like an odometer; record the end times of kernels."""
        loop = self.loop_index
        work = self.job.work
        end_inner = end_tile & (loop["inner"] == self.inner - 1)
        end_outer = end_inner & (loop["outer"] == self.outer - 1)
        finished = active & end_outer & (loop["bundle"] == work.bundles - 1)
        # the last slot to be freed is that of the last tile: its data are in GM then
        end_time = self.slots["out" if self.job.chip.combined else "c"].times[0] + self.flag_cycles
        self.end_cycles = np.where(finished, end_time, self.end_cycles)
        loop_ends = (end_stage, end_tile, end_inner, end_outer, finished)
        step = active
        for name, end in zip(LOOPS, loop_ends, strict=True):
            # a loop that has ended begins again at 0, and the next outer one moves on
            loop[name] = np.where(step, np.where(end, 0, loop[name] + 1), loop[name])
            step = step & end


# -- the bounds ------------------------------------------------------------------------------------
MAX_TURNS = 1024
"""A walk follows this many turns of the cube; the busiest pipe bounds the remaining ones."""


@dataclass(frozen=True, slots=True)
class CubeProblem:
    """A product or a convolution on a chip, with its epilogue and the contents of L2 at the start.

    `warm` names the tensors in L2: "a" (rows of A or pixels), "b" (columns of B or weights), or
    operands of the epilogue.
    """

    shape: Shape
    chip: Chip
    epilogue: Epilogue | None = None
    warm: frozenset[str] = frozenset()


class Bounds:
    """Lower bounds for the tilings in the rows of a table."""

    def __init__(self, problem: CubeProblem, table: Columns) -> None:
        """Prepare the rows of `table`."""
        shape = problem.shape
        chip = problem.chip
        warm = problem.warm
        if isinstance(shape, kernels.ConvShape):
            self.job: CubeWork = conv_work(shape, chip, table, warm)
        else:
            self.job = gemm_work(shape, chip, table, warm)
        self.drain_work: DrainWork = pipe_work.drain_work_of(
            self.job, problem.epilogue, shape.out_dtype, warm
        )
        self.memory_cycles = _memory_cycles(self.job, self.drain_work, warm)
        self.launch_cycles = start_cycles(chip, "cold")

    @cached_property
    def closed_form(self) -> Floats:
        """The bounds in closed form, for all rows."""
        core = pipe_work.closed_bounds(self.job, self.drain_work)
        return np.maximum(core, self.memory_cycles) + self.launch_cycles

    @cached_property
    def from_walks(self) -> Floats:
        """The tighter bounds of the rows that were walked; 0 for other rows."""
        return np.zeros_like(self.closed_form)

    def walk(self, rows: Array) -> Floats:
        """Return the tighter bounds of some rows; each row is walked once and then remembered."""
        unwalked = rows[self.from_walks[rows] == 0]
        if not len(unwalked):
            return self.from_walks[rows]
        # batches of about 2048 kernels of similar length: a batch walks until its longest has ended
        order = np.argsort(self.turns[unwalked], kind="stable")
        for batch in np.array_split(unwalked[order], max(1, len(unwalked) // 2048)):
            walk = Walk(select_tilings(self.job, batch), select_tilings(self.drain_work, batch))
            cycles = walk.run(MAX_TURNS) + self.launch_cycles
            self.from_walks[batch] = np.maximum(cycles, self.closed_form[batch])
        return self.from_walks[rows]

    @cached_property
    def turns(self) -> Array:
        """The turns of the cube on one core, for each row."""
        work = self.job.work
        return pipe_work.turns_of(self.job) * work.m_tiles * work.n_tiles * work.bundles


def _memory_cycles(job: CubeWork, drain_work: DrainWork, warm: Collection[str]) -> Floats:
    """Return the cycles that device memory takes for the bytes of each tiling.

    (bytes of operands not in L2 + max(0, result bytes - L2 bytes)) / memory rate
    """
    chip = job.chip
    elements = job.out_pixels * job.out_blocks * isa.FRACTAL
    operands = drain_work.epilogue.of_kind("tile") if drain_work.epilogue else ()
    cold_operands = [o for o in operands if o.name.partition(".")[0] not in warm]
    bytes_per_element = sum(DTYPE_BYTES[o.dtype] for o in cold_operands) if chip.combined else 0
    operand_bytes = np.where(job.work.ragged, 0, elements * bytes_per_element)
    read_bytes = job.a.fetched_bytes + job.b.fetched_bytes + operand_bytes
    written_bytes = elements * DTYPE_BYTES[drain_work.out_dtype]
    total = read_bytes + max(0, written_bytes - chip.l2.size_bytes)
    cycles: Floats = np.ceil(total / chip.device_memory.rate_bytes_per_s * chip.clock_hz - 1e-9)
    return cycles
