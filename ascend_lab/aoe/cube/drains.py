"""How finished tiles leave L0C in kernels that run side by side, and what an epilogue loads."""

from __future__ import annotations

import numpy as np

from ascend_lab.aoe.cube.after import BLOCK, After, copied, tail_cycles, vector_cycles
from ascend_lab.aoe.cube.state import State
from ascend_lab.aoe.cube.table import Array, Mask, up
from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.kernels.gemm_schedule import FRACTAL


class Drains(State):
    """Kernels and their way from L0C to GM."""

    def load_channels(self) -> None:
        """Load the numbers per channel that stay for all tiles."""
        after, w, chip, f = self.after, self.job.work, self.job.chip, self.flag
        if not after.channel_loads:
            return
        held = after.channel_blocks >= w.n_own
        path = chip.path("GM", "UB" if chip.combined else "L1")
        moved = w.n_own * after.channel_bytes * after.channel_cycles_per_byte
        cost = after.channel_loads * path.startup_cycles + moved.astype(np.int64) + 2 * f
        self.spend("load", held, self.at["load"] + cost, cost)
        if chip.combined:
            return
        table = copied(chip.path("L1", "BT"), w.n_own * FRACTAL * 4)
        full = self.at["load"] + after.channel_latency
        fed = np.maximum(self.at["feed"], full) + 4 * f + table
        # bounds of MTE1 and the cube do not count this work, so it is not noted as done
        self.spend("feed", held, fed, 0)
        self.spend("cube", held, np.maximum(self.at["cube"], fed) + f, 0)

    def drain(self, where: Mask, m_at: Array, n: Array) -> None:
        """Send finished tiles on their way to GM."""
        f, chip, job = self.flag, self.job.chip, self.job
        self.spend("cube", where, self.at["cube"] + f, f)
        index = np.flatnonzero(where)
        at = job.work.first[index] + m_at[index]
        run, fractals = job.sides.pixels[at] * FRACTAL, job.sides.fractals[at]
        start = np.maximum(self.at["drain"][index], self.at["cube"][index]) + f
        if chip.combined:
            self._by_vector(where, index, start, (run, fractals, n[index]))
            return
        after, path = self.after, chip.path("L0C", "GM")
        size = run * n[index] * DTYPE_BYTES[after.out_dtype]
        copy = copied(path, size, after.out_cycles_per_byte[index])
        self.at["drain"][index] = start + copy + f
        self.done["drain"][index] += copy + 2 * f
        times = self.at["drain"] + path.latency_cycles + chip.l2.latency_cycles
        self.slots["c"].free(times, where)

    def _by_vector(
        self, where: Mask, index: Array, drain: Array, sizes: tuple[Array, Array, Array]
    ) -> None:
        """Move tiles piece by piece through UB; `sizes`: elements and fractals high, blocks."""
        f, after, (run, fractals, n) = self.flag, self.after.take(index), sizes
        stride = fractals * BLOCK if after.plan is None else run
        most = after.blocks(stride, n)
        # an epilogue gives L0C back as soon as its only piece has left it
        early = (most == n) & (after.plan is not None)
        freed = drain
        for piece in range(int(up(n, most).max())):
            count = np.clip(n - piece * most, 0, most)
            mask = np.zeros(len(where), bool)
            mask[index] = count > 0
            loaded = self._operands(mask, index, after, count * run)
            drain, freed = self._piece(
                (mask, index), after, (drain, freed), loaded, (count, run, stride), early
            )
        self.at["drain"][index] = np.where(early, drain, drain + f)
        times = self.at["drain"].copy()
        times[index] = np.where(early, freed, drain + f)
        self.slots["c"].free(times, where)

    def _operands(self, mask: Mask, index: Array, after: After, elements: Array) -> Array:
        """Load the operands of a piece; return when they are there."""
        tiles = after.epilogue.of_kind("tile") if after.epilogue else ()
        if not tiles:
            return np.zeros_like(elements)
        path, rate = self.job.chip.path("GM", "UB"), after.in_cycles_per_byte
        cycles = np.full_like(elements, 2 * self.flag)
        for operand in tiles:
            cycles += copied(path, elements * DTYPE_BYTES[operand.dtype], rate)
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
        sizes: tuple[Array, Array, Array],
        early: Mask,
    ) -> tuple[Array, Array]:
        """One piece: out of L0C, through the steps, to GM; return times of V and of L0C free."""
        (mask, index), (drain, freed), (count, run, stride) = at, times, sizes
        f, chip, on = self.flag, self.job.chip, mask[index]
        size = DTYPE_BYTES[after.out_dtype]
        arrives = size if after.plan is None else DTYPE_BYTES[after.plan.tiles[after.plan.start]]
        work = copied(chip.path("L0C", "UB"), count * stride * arrives)
        end = np.maximum(drain, self.slots["out"].older[index]) + f + work
        if after.plan is not None and after.epilogue is not None:
            end = np.where(early, end + f, end)
            freed = np.where(on & early, end, freed)
            steps, tiles = vector_cycles(after, chip, count, run), after.epilogue.of_kind("tile")
            end, work = (np.maximum(end, loaded) + f if tiles else end) + steps, work + steps
            if tiles:
                end = end + f
                self._free("tile", at, end)
        end = end + f
        path = chip.path("UB", "GM")
        copy = copied(path, count * run * size, after.out_cycles_per_byte) + 2 * f
        store = np.maximum(self.at["store"][index], end + tail_cycles(after, chip)) + copy
        self.at["store"][index] = np.where(on, store, self.at["store"][index])
        self.done["drain"][index] += np.where(on, work + 4 * f, 0)
        self.done["store"][index] += np.where(on, copy, 0)
        self._free("out", at, store + path.latency_cycles + chip.l2.latency_cycles)
        return np.where(on, end, drain), freed

    def _free(self, queue: str, at: tuple[Mask, Array], times: Array) -> None:
        """Give slots of some kernels back."""
        (mask, index), every = at, np.zeros_like(self.at["load"])
        every[index] = times
        self.slots[queue].free(every, mask)
