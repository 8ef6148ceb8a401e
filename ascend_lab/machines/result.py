"""The outcome of a run: values, cycles, and cycles by cause."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ascend_lab.errors import MachineError
from ascend_lab.machines.program import Array


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Cycles of compute, of moving bytes, and of waiting for a latency that nothing covers."""

    compute: int
    move: int
    wait: int

    @property
    def longest(self) -> int:
        """The largest part: no schedule of the same instructions can be faster."""
        return max(self.compute, self.move, self.wait)

    @property
    def total(self) -> int:
        """The sum of the parts: what a machine that overlaps nothing needs."""
        return self.compute + self.move + self.wait

    @property
    def bound_by(self) -> str:
        """The name of the largest part."""
        parts = {"compute": self.compute, "move": self.move, "wait": self.wait}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction of the machine's own stream, and how often it is issued."""

    text: str
    count: int


@dataclass(frozen=True, slots=True)
class Run:
    """What one machine did with one program.

    `parts` are the cycles each cause would need alone, so
    `parts.longest <= cycles <= parts.total`; `bar` splits the cycles that really passed.
    `counters` holds whole numbers: instructions, ops, bytes_used, bytes_moved and the machine's
    own, such as divergent warps.
    """

    machine: str
    program: str
    values: Mapping[str, Array]
    cycles: int
    parts: Breakdown
    counters: Mapping[str, int]
    stream: tuple[Line, ...]

    def __post_init__(self) -> None:
        """Refuse a time outside its bracket, and freeze the mappings."""
        if not self.parts.longest <= self.cycles <= self.parts.total:
            raise MachineError(
                f"{self.machine}: cycles must lie between the longest part and the sum of parts",
                f"{self.cycles} for {self.parts}",
                "the machine's timing rule is wrong: report it",
            )
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))
        object.__setattr__(self, "counters", MappingProxyType(dict(self.counters)))

    @property
    def bar(self) -> Breakdown:
        """The cycles that passed: computing, else only moving, else neither; they add up.

        Moving counts here only where no compute hides it, and waiting where nothing does.
        """
        move = min(self.parts.move, self.cycles - self.parts.compute)
        return Breakdown(self.parts.compute, move, self.cycles - self.parts.compute - move)

    @property
    def instructions(self) -> int:
        """Instructions fetched and issued, whatever number of elements each one touches."""
        return self.counters["instructions"]

    @property
    def ops_per_cycle(self) -> float:
        """Useful arithmetic operations per cycle reached."""
        return self.counters["ops"] / self.cycles


def whole(cycles: float) -> int:
    """Round a time up to whole cycles, forgiving the dust of floating-point sums."""
    return math.ceil(round(cycles, 6))


def tiled(
    compute: float, move: float, latency_cycles: float, tiles: int, buffers: int
) -> tuple[int, Breakdown]:
    """Time `tiles` equal tiles that are moved in, computed and moved out.

    With one buffer each tile waits for the one before: everything adds up. With b > 1 buffers the
    next tiles travel while one is computed, so after the first tile one more finishes every
    max(move, compute, (latency + move + compute) / b) cycles (all per tile).
    """
    wait = latency_cycles * (1 + (tiles - 1) / buffers)
    parts = Breakdown(whole(compute), whole(move), whole(wait))
    if buffers == 1:
        return parts.total, parts
    per_tile = latency_cycles + (move + compute) / tiles
    period = max(move / tiles, compute / tiles, per_tile / buffers)
    return min(whole(per_tile + (tiles - 1) * period), parts.total), parts
