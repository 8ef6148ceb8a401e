"""The state of many kernels that run side by side: times of pipes, slots, places in the loops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ascend_lab.aoe.cube.after import BLOCK, After
from ascend_lab.aoe.cube.table import Array, Mask, up
from ascend_lab.aoe.cube.work import Job
from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.kernels.gemm_schedule import ACCUMULATOR

PIPES = ("load", "feed", "cube", "drain", "store")
"""MTE2, MTE1, M, what empties L0C (V or FIX), MTE3."""
LOOPS = ("k", "stage", "inner", "outer", "bundle")


@dataclass(slots=True)
class Slots:
    """When the slots of a queue are free again: the one freed last, and the one before."""

    older: Array
    newer: Array
    two: Mask

    def wait(self, at: Array) -> Array:
        """Return the time from which the next slot is free."""
        free: Array = np.maximum(at, np.where(self.two, self.older, self.newer))
        return free

    def free(self, times: Array, where: Mask) -> None:
        """Give a slot back at `times`."""
        self.older = np.where(where, self.newer, self.older)
        self.newer = np.where(where, times, self.newer)


class State:
    """Times per pipe in `at`, work done per pipe in `done`, slots, and turns of the loops."""

    def __init__(self, job: Job, after: After) -> None:
        """Start all kernels; `after` is what follows a tile."""
        self.job, self.after, self.flag = job, after, job.chip.flag_cycles
        w, f = job.work, self.flag
        zero = np.zeros(len(w.m), np.int64)
        # consumers give their slots to the producers first, a flag each
        l1 = np.where(w.by_a, 0, w.a_l1) + np.where(w.by_b, 0, w.b_l1)
        starts = (zero + f, f * l1, f * (w.a_l0 + w.b_l0), zero + 2 * f, zero + 2 * f)
        self.at = dict(zip(PIPES, starts, strict=True))
        self.done = {name: zero.copy() for name in PIPES}
        self.place = {name: zero.copy() for name in LOOPS}
        self.ends = zero.copy()
        two = {"a1": w.a_l1 == 2, "b1": w.b_l1 == 2, "a0": w.a_l0 == 2, "b0": w.b_l0 == 2}
        size = w.m * np.minimum(w.n, w.n_own) * BLOCK * DTYPE_BYTES[ACCUMULATOR[job.dtype]]
        two |= {"c": 2 * size <= job.chip.buffers["L0C"], "out": zero == 0, "tile": zero == 0}
        self.slots = {name: Slots(zero, zero, both) for name, both in two.items()}
        self.outer = np.where(w.outer_n, w.n_tiles, w.m_tiles)
        self.inner = np.where(w.outer_n, w.m_tiles, w.n_tiles)
        self.stages = up(w.units, w.stage)

    def spend(self, pipe: str, where: Mask, until: Array, cycles: Array | int) -> None:
        """Let a pipe be busy `until`, `cycles` of the time with work."""
        self.at[pipe] = np.where(where, until, self.at[pipe])
        self.done[pipe] += np.where(where, cycles, 0)
