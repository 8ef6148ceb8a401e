"""The fast simulator of short programs and of cores that work together: a walk that leaps.

Every core goes through its program as written until it waits for another one; who goes on does not
depend on times, and times only add up and take maxima. So once the walk stands where it stood
before, but for loop counters, and all times of what the loops touch have grown by the same number,
it will do so again and again: as many rounds are left out as no counter runs dry in.
"""

from collections import deque
from collections.abc import Sequence
from operator import add
from typing import NamedTuple

from ascend_lab.sim.compiled import SET, WAIT, Compiled, Nest, NotComposableError

BEGIN, END, STOP = 0, 1, 5
LONG = 12
"""Turns from which on a loop is watched."""
KEPT = 6
"""States remembered for each place."""


class _State(NamedTuple):
    """What a walk knows between two steps: turns left, times of pipes and raised flags."""

    left: list[int]
    free: list[int]
    flags: list[tuple[int, ...]]


class _Walk:
    """Where each core stands, what its loops have left, times of pipes and raised flags."""

    def __init__(self, program: Compiled) -> None:
        self.program = program
        self.code: list[tuple[int, int, int, int, int]] = []
        self.nests: dict[int, Nest] = {}
        self.owner: dict[int, int] = {}
        self.at: list[int] = []
        for core, nodes in enumerate(
            [[n] for n in program.tree] if program.cores else [program.tree]
        ):
            self.at.append(len(self.code))
            self.lay(core, nodes)
            self.code.append((STOP, 0, 0, 0, 0))
        self.left, self.free = [0] * len(program.counts), [0] * len(program.pipes)
        self.flags: list[deque[int]] = [deque() for _ in program.events]
        self.seen: dict[tuple[int, ...], list[_State]] = {}

    def lay(self, core: int, nodes: Sequence[int | Nest]) -> None:
        """Write down a nest as steps, with a begin and an end for each loop."""
        program = self.program
        for node in nodes:
            if isinstance(node, Nest):
                begin = len(self.code)
                self.code.append((BEGIN, node.loop, 0, program.counts[node.loop], 0))
                self.nests[node.loop], self.owner[node.loop] = node, core
                self.lay(core, node.body)
                self.code[begin] = (BEGIN, node.loop, len(self.code), program.counts[node.loop], 0)
                self.code.append((END, node.loop, begin, program.counts[node.loop], 0))
            else:
                s = program.steps[node]
                row = (s.kind, s.pipe, s.event, program.cycles[node], program.latency[node])
                self.code.append(row)

    def go(self, core: int) -> bool:
        """Walk one core until it waits in vain or ends; return whether it moved."""
        code, free, flags, left = self.code, self.free, self.flags, self.left
        i = start = self.at[core]
        turned = False
        while True:
            kind, pipe, event, cycles, latency = code[i]
            if kind == BEGIN:
                left[pipe] = cycles
                i = i if cycles else event
            elif kind == END:
                left[pipe] -= 1
                if left[pipe] > 0:
                    i, turned = event, True
                    if cycles >= LONG and left[pipe] > 1:
                        self.at[core] = i
                        self.leap(pipe)
            elif kind == STOP:
                break
            elif kind == WAIT:
                if not flags[event]:
                    break
                free[pipe] = max(free[pipe], flags[event].popleft()) + cycles
            else:
                free[pipe] += cycles
                if kind == SET:
                    flags[event].append(free[pipe] + latency)
            i += 1
        self.at[core] = i
        return turned or i != start

    def leap(self, loop: int) -> None:
        """Leave out rounds if the walk stands, all times later by one number, where it stood."""
        where = (loop, *self.at, *map(len, self.flags))
        states = self.seen.setdefault(where, [])
        for old in reversed(states):
            if self._repeats(old):
                states.clear()
                return
        states.append(_State(self.left.copy(), self.free.copy(), [*map(tuple, self.flags)]))
        del states[:-KEPT]

    def _repeats(self, old: _State) -> bool:
        """Leap if only loop counters and, all by one number, times of what they touch differ."""
        moved = [n for n, (a, b) in enumerate(zip(old.left, self.left, strict=True)) if a != b]
        cores = [self.owner[n] for n in moved]
        falls = [old.left[n] - self.left[n] for n in moved]
        if not moved or min(falls) < 0 or len(set(cores)) < len(cores):
            return False
        rounds = min((self.left[n] - 1) // fall for n, fall in zip(moved, falls, strict=True))
        pipes = {p for n in moved for p in self.nests[n].pipes}
        events = {e for n in moved for e in self.nests[n].events}
        if rounds < 1 or not pipes:
            return False
        later = self.free[min(pipes)] - old.free[min(pipes)]
        steady = all(
            now - then == (later if p in pipes else 0)
            for p, (now, then) in enumerate(zip(self.free, old.free, strict=True))
        ) and all(
            now - then == (later if e in events else 0)
            for e, (up, before) in enumerate(zip(self.flags, old.flags, strict=True))
            for now, then in zip(up, before, strict=True)
        )
        if steady:
            for n, fall in zip(moved, falls, strict=True):
                self.left[n] -= rounds * fall
            for p in pipes:
                self.free[p] += rounds * later
            for e in events:
                self.flags[e] = deque(t + rounds * later for t in self.flags[e])
        return steady


def run_walked(program: Compiled) -> int:
    """Return the cycles of one program, or of cores that work together.

    The builder writes each set before its wait, so a core alone never waits in vain. Raises
    `NotComposableError` for a standstill.
    """
    walk = _Walk(program)
    while sum(walk.go(core) for core in range(len(walk.at))):
        pass
    if any(walk.code[i][0] != STOP for i in walk.at):
        raise NotComposableError("each set_flag before its wait_flag", "a wait first")
    return max(map(add, walk.free, program.tail_latency), default=0)
