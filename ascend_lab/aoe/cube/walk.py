"""Run the kernels of many tilings side by side, one turn of the cube at a time, as arrays.

What is kept are the waits and durations of a kernel's pipes; where a detail is left out (room in UB
between pieces of a tile, the latency of numbers per channel), a wait is missing and never one too
many. So the times are at most those of the simulator, and in most kernels equal to them.
"""

from __future__ import annotations

import numpy as np

from ascend_lab.aoe.cube.after import After, copied
from ascend_lab.aoe.cube.drains import Drains
from ascend_lab.aoe.cube.pipes import busy_of, macs_per_fractal
from ascend_lab.aoe.cube.state import LOOPS, PIPES
from ascend_lab.aoe.cube.table import Array, Mask
from ascend_lab.aoe.cube.work import Job


class Walk(Drains):
    """Kernels that go turn by turn through their loops."""

    def __init__(self, job: Job, after: After) -> None:
        """Start all kernels; `after` is what follows a tile."""
        super().__init__(job, after)
        self.load_channels()

    def run(self, most: int) -> Array:
        """Return the cycles until each kernel has ended; it does at most `most` turns of the cube.

        Of a kernel that has not ended by then every pipe still has the rest of its work before it.
        """
        for _ in range(most):
            self.turn()
            if (self.ends > 0).all():
                return self.ends
        totals = busy_of(self.job, self.after).pipes
        left = [
            self.at[pipe] + np.maximum(np.floor(total).astype(np.int64) - self.done[pipe], 0)
            for pipe, total in zip(PIPES, totals, strict=True)
        ]
        return np.where(self.ends > 0, self.ends, np.maximum.reduce(left))

    def turn(self) -> None:
        """One product of L0 tiles in every kernel that has not ended."""
        w, p, f = self.job.work, self.place, self.flag
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
        begin_tile, end_tile = begin_stage & (p["stage"] == 0), end_stage & last_stage
        cube = self.at["cube"]
        self.spend("cube", going & begin_tile, self.slots["c"].wait(cube) + f, f)
        if (going & begin_stage).any():
            self._stage(going & begin_stage, begin_tile, m_at, n, units, depth_all)
        self._multiply(going, m, n, depth)
        self._free_l1(going & end_stage, end_tile)
        if (going & end_tile).any():
            self.drain(going & end_tile, m_at, n)
        self._step(going, end_stage, end_tile)

    def _stage(
        self, going: Mask, begin_tile: Mask, m_at: Array, n: Array, units: Array, depth: Array
    ) -> None:
        """Load what a stage needs, or an outer loop keeps, to L1; MTE1 waits for it."""
        w, p, job = self.job.work, self.place, self.job
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
        self._bring("a", a, a_cycles, job.a.latency_cycles)
        carried = np.where(a, job.a.latency_cycles - b_cycles, 0)
        self._bring("b", b & ~w.hold_b, b_cycles, np.maximum(job.b.latency_cycles, carried))

    def _bring(self, name: str, where: Mask, cycles: Array, latency: Array) -> None:
        """Copy to a slot of L1 and tell MTE1, which waits."""
        f = self.flag
        done = self.slots[f"{name}1"].wait(self.at["load"]) + 2 * f + cycles
        self.spend("load", where, done, 2 * f + cycles)
        self.spend("feed", where, np.maximum(self.at["feed"], done + latency) + f, 0)

    def _free_l1(self, end: Mask, end_tile: Mask) -> None:
        w, p = self.job.work, self.place
        last = end_tile & (p["inner"] == self.inner - 1)
        a = end & ~w.by_a & (~w.hold_a | last)
        b = end & ~w.by_b & (~w.hold_b | (last & (~w.hold_all | (p["outer"] == self.outer - 1))))
        # what an outer loop keeps is given back last
        early = b & w.hold_a & ~w.hold_b
        for name, where in (("b1", early), ("a1", a), ("b1", b & ~early)):
            self.spend("feed", where, self.at["feed"] + self.flag, 0)
            self.slots[name].free(self.at["feed"], where)

    def _multiply(self, going: Mask, m: Array, n: Array, depth: Array) -> None:
        """Feed L0A and L0B, multiply, give the slots back."""
        job, f = self.job, self.flag
        chip, area = job.chip, job.area_bytes
        l0a, l0b = chip.path("L1", "L0A"), chip.path("L1", "L0B")
        if job.is_conv:
            a_cycles = copied(l0a, m * depth * area)
        else:
            a_cycles = np.minimum(m, depth) * copied(l0a, np.maximum(m, depth) * area)
        b_cycles = depth * copied(l0b, n * area)
        cube = self.at["cube"]
        for name, cycles, by in (("a", a_cycles, job.work.by_a), ("b", b_cycles, job.work.by_b)):
            slots = self.slots[f"{name}0"]
            full = slots.wait(self.at["feed"]) + 2 * f + cycles
            if by.any():
                full = self._straight(name, going, full, m, n, depth)
            self.spend("feed", going & ~by, full, 2 * f + cycles)
            cube = np.maximum(cube, full) + f
        product = chip.cube_head_cycles + m * depth * n * macs_per_fractal(job)
        cube = cube + product
        self.spend("cube", going, cube + 2 * f, product + 4 * f)
        self.slots["a0"].free(cube + f, going)
        self.slots["b0"].free(cube + 2 * f, going)

    def _straight(
        self, name: str, going: Mask, full: Array, m: Array, n: Array, depth: Array
    ) -> Array:
        """Load what bypasses L1 from GM to L0; return when it is there, or `full` elsewhere."""
        job, f = self.job, self.flag
        load, by = (job.a, job.work.by_a) if name == "a" else (job.b, job.work.by_b)
        path, area = job.chip.path("GM", f"L0{name.upper()}"), job.area_bytes
        if name == "a":
            size, times = np.maximum(m, depth) * area, np.minimum(m, depth)
        else:
            size, times = n * area, depth
        cycles = times * copied(path, size, load.cycles_per_byte)
        done = self.slots[f"{name}0"].wait(self.at["load"]) + 2 * f + cycles
        self.spend("load", going & by, done, 2 * f + cycles)
        return np.where(by, done + load.latency_cycles, full)

    def _step(self, going: Mask, end_stage: Mask, end_tile: Mask) -> None:
        """Go to the next turn of every loop; note the kernels that have ended."""
        p, w = self.place, self.job.work
        end_inner = end_tile & (p["inner"] == self.inner - 1)
        end_outer = end_inner & (p["outer"] == self.outer - 1)
        over = going & end_outer & (p["bundle"] == w.bundles - 1)
        done = self.slots["out" if self.job.chip.combined else "c"].newer + self.flag
        self.ends = np.where(over, done, self.ends)
        ends = (end_stage, end_tile, end_inner, end_outer, over)
        step = going
        for name, end in zip(LOOPS, ends, strict=True):
            p[name] = np.where(step, np.where(end, 0, p[name] + 1), p[name])
            step = step & end
