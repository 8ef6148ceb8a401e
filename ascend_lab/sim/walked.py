"""The simulator for short programs: every step once, in the order in which it is written.

A program written with the builder sets each flag before the line that waits for it, so one walk
along the lines meets every time it needs. Few steps are walked faster than matrices are built.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ascend_lab.sim.compiled import SET, WAIT, Compiled, Nest
from ascend_lab.sim.fast import NotComposableError

PASSES = 30
"""Passes of the average step up to which a walk is faster than `run_fast` (measured)."""


def is_short(program: Compiled) -> bool:
    """Tell whether to walk."""
    return sum(program.runs()) <= PASSES * len(program.steps)


def run_walked(program: Compiled) -> int:
    """Return the cycles of one program; raise `NotComposableError` for a wait before its set."""
    walker = _Walker(program)
    walker.run(program.tree)
    ends = zip(walker.free, program.tail_latency, strict=True)
    return max([time + tail for time, tail in ends], default=0)


class _Walker:
    """When each pipe is free, and the times of raised flags, first in first out."""

    def __init__(self, program: Compiled) -> None:
        self.counts = program.counts
        self.free = [0] * len(program.pipes)
        self.flags: list[deque[int]] = [deque() for _ in program.events]
        rows = zip(program.steps, program.cycles, program.latency, strict=True)
        self.timed = [(s.pipe, s.kind, s.event, cycles, latency) for s, cycles, latency in rows]

    def run(self, nodes: Sequence[int | Nest]) -> None:
        free, flags, timed = self.free, self.flags, self.timed
        for node in nodes:
            if isinstance(node, Nest):
                for _ in range(self.counts[node.loop]):
                    self.run(node.body)
                continue
            pipe, kind, event, cycles, latency = timed[node]
            now = free[pipe]
            if kind == WAIT:
                if not flags[event]:
                    raise NotComposableError("each set_flag before its wait_flag", "a wait first")
                raised = flags[event].popleft()
                now = max(now, raised)
            free[pipe] = now = now + cycles
            if kind == SET:
                flags[event].append(now + latency)
