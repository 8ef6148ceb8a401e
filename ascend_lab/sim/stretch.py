"""Where device memory is the limit: stretch the copies from it until the pipes fill its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ascend_lab.chip import Chip
from ascend_lab.sim.compiled import Compiled
from ascend_lab.sim.cost import Surroundings, instruction_cost
from ascend_lab.sim.fast import run_candidates

MAX_SLOWDOWN = 1024.0
WAYS, ROUNDS = 16, 3
"""Each round cuts what is left of the last doubling into WAYS pieces and keeps one."""


@dataclass(frozen=True, slots=True)
class Stretched:
    """How far memory is slowed down, and the slowest part with copies that take so much longer."""

    slowdown: float
    slowest: Compiled


def stretch(parts: Sequence[Compiled], chip: Chip, around: Surroundings, cycles: int) -> Stretched:
    """Return the largest slowdown of memory with which all parts still end within `cycles`.

    Time never falls with the slowdown, so the search keeps one interval: it doubles until memory's
    time is exceeded, then cuts the last step. All candidates of a round are timed as one batch.
    """

    def times(slowdowns: Sequence[float]) -> NDArray[np.int64]:
        durations = [_slowed(part, chip, around, slowdowns) for part in parts]
        return np.array([run_candidates(p, d) for p, d in zip(parts, durations, strict=True)])

    def fitting(slowdowns: Sequence[float]) -> int:
        return int((times(slowdowns).max(axis=0) <= cycles).sum())

    low = 1.0
    while 2.0 * low < MAX_SLOWDOWN and fitting([2.0 * low]):
        low *= 2.0
    width = low
    for _ in range(ROUNDS):
        width /= WAYS
        low += width * fitting([low + width * i for i in range(1, WAYS)])
    slowest = parts[int(times([low])[:, 0].argmax())]
    durations = _slowed(slowest, chip, around, [low])[:, 0].tolist()
    return Stretched(low, replace(slowest, cycles=tuple(durations)))


def _slowed(
    part: Compiled, chip: Chip, around: Surroundings, slowdowns: Sequence[float]
) -> NDArray[np.int64]:
    """Return durations (steps, slowdowns): copies that read GM take longer, nothing else."""
    cycles = np.repeat(np.array(part.cycles, np.int64)[:, None], len(slowdowns), axis=1)
    settings = [replace(around, memory_slowdown=s) for s in slowdowns]
    for number, step in enumerate(part.steps):
        source = part.sources[step.source]
        if source.event is None and any(r.space == "GM" for r in source.srcs):
            costs = [instruction_cost(chip, source, setting) for setting in settings]
            cycles[number] = [cost.occupancy_cycles for cost in costs]
    return cycles
