"""The fast simulators: time as linear algebra over (max, +), and a walk that leaps.

One pass of a loop body maps the times of pipes and raised flags to new times, each a maximum of
sums: y_i = max_j (A_ij + x_j). That is a matrix product in the (max, +) semiring, so n passes are
the n-th power and need about log2(n) products. Nested loops compose from the inside out. All
arrays carry a last axis of candidates, so a batch costs little more than one.

Short programs, and cores that work together, are walked instead. Every core goes through its
program as written until it waits for another one; who goes on does not depend on times, and times
only add up and take maxima. So once the walk stands where it stood before, but for loop counters,
and all times of what the loops touch have grown by the same number, it will do so again and again:
as many rounds are left out as no counter runs dry in.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import NotComposableError, SimulationError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim.compiled import (
    BEGIN,
    END,
    SET,
    STOP,
    WAIT,
    Compiled,
    Nest,
    run_reference,
)
from ascend_lab.machine.sim.cost import Surroundings, instruction_cost

Array = NDArray[np.int64]
NEVER = np.int64(-(2**61))
"""Minus infinity: 'does not depend on'. Sums of two stay below every real time."""
LATEST = 2**60
Number = int | Array
"""One number, or one per candidate."""
Numbers = Sequence[int] | Array
Time = tuple[Array, Number]
"""Row vector of what a time depends on, and cycles to add to all of it.

Work adds cycles only, so rows are computed at waits alone.
"""


def _times(a: Array, x: Array) -> Array:
    """(max, +) product of (i, j, b) with (j, k, b)."""
    out: Array = (a[:, :, None, :] + x[None]).max(axis=1)
    return np.maximum(out, NEVER, out=out)


def _power_times(a: Array, counts: Sequence[int], x: Array) -> Array:
    """Return a^counts (x) x by binary powers; counts holds one exponent per candidate."""
    left = list(counts)
    while True:
        odd = [n & 1 for n in left]
        if all(odd):
            x = _times(a, x)
        elif any(odd):
            x = np.where(np.array(odd, bool), _times(a, x), x)
        left = [n >> 1 for n in left]
        if not any(left):
            return x
        a = _times(a, a)


def _stack(times: Sequence[Time]) -> Array:
    """Return the times as one array (times, dependencies, candidates)."""
    ahead = np.array([ahead for _, ahead in times]).reshape(len(times), 1, -1)
    stacked: Array = np.array([row for row, _ in times]) + ahead
    return stacked


class _Runner:
    """Pushes times of pipes and raised flags through a program.

    `cycles`, `latency` and `counts` hold a number for each step or loop, or an array with one per
    candidate; `zero` is such a number.
    """

    def __init__(
        self, program: Compiled, cycles: Numbers, latency: Numbers, counts: Numbers, zero: Number
    ) -> None:
        self.program = program
        self.cycles = cycles
        self.latency = latency
        self.counts = counts
        self.zero = zero
        self.pipes: list[Time] = []
        self.flags: list[list[Time]] = [[] for _ in program.events]

    def ends(self, tail_latency: Array) -> Array:
        """Return when all pipes have ended."""
        none: Array = np.zeros(np.size(self.zero), np.int64)
        if not self.program.pipes:
            return none
        self.pipes = [(none[None], self.zero) for _ in self.program.pipes]
        self.run(self.program.tree)
        out: Array = (_stack(self.pipes)[:, 0] + tail_latency).max(axis=0)
        return out

    def run(self, nodes: Sequence[int | Nest]) -> None:
        steps = self.program.steps
        for node in nodes:
            if isinstance(node, Nest):
                self.loop(node)
                continue
            step = steps[node]
            row, ahead = self.pipes[step.pipe]
            if step.kind == WAIT:
                if not self.flags[step.event]:
                    raise NotComposableError("each set_flag before its wait_flag", "a wait first")
                raised, behind = self.flags[step.event].pop(0)
                row = np.maximum(row, raised + (behind - ahead))
            ahead = ahead + self.cycles[node]
            self.pipes[step.pipe] = row, ahead
            if step.kind == SET:
                self.flags[step.event].append((row, ahead + self.latency[node]))

    def loop(self, nest: Nest) -> None:
        """Replace n passes by the n-th power of one pass over the state the body touches.

        A body that touches nothing is skipped; one pipe by itself needs no matrix.
        """
        if not nest.events and len(nest.pipes) < 2:
            for pipe in nest.pipes:
                row, ahead = self.pipes[pipe]
                self.pipes[pipe] = row, ahead + self.work(nest)
            return
        times = self.counts[nest.loop]
        while len(nest.body) == 1 and isinstance(nest.body[0], Nest):
            nest = nest.body[0]
            times = times * self.counts[nest.loop]
        counts = np.ravel(times).tolist()
        if max(counts) == 0:
            return
        if max(counts) == min(counts) == 1:
            self.run(nest.body)
            return
        shape = [len(self.flags[e]) for e in nest.events]
        x = self.state(nest)
        one_pass = self.matrix(nest, shape, len(x))
        self.put(nest, shape, _power_times(one_pass, counts, x))

    def work(self, nest: Nest) -> Number:
        """Cycles of all passes of a loop in which one pipe works by itself."""
        once = [self.work(n) if isinstance(n, Nest) else self.cycles[n] for n in nest.body]
        return self.counts[nest.loop] * sum(once)

    def state(self, nest: Nest) -> Array:
        """Stack the times a loop touches."""
        flags = [time for event in nest.events for time in self.flags[event]]
        return _stack([self.pipes[p] for p in nest.pipes] + flags)

    def put(self, nest: Nest, shape: list[int], x: Array) -> None:
        """Take the times a loop touches from a stack; `shape` is the flags up per event."""
        times = iter([(row, self.zero) for row in x])
        for pipe in nest.pipes:
            self.pipes[pipe] = next(times)
        for event, size in zip(nest.events, shape, strict=True):
            self.flags[event] = [next(times) for _ in range(size)]

    def matrix(self, nest: Nest, shape: list[int], size: int) -> Array:
        """Return the matrix of one pass: the body applied to unit vectors."""
        unit = np.full((size * size, np.size(self.zero)), NEVER)
        unit[:: size + 1] = 0
        inner = _Runner(self.program, self.cycles, self.latency, self.counts, self.zero)
        inner.pipes = self.pipes.copy()
        inner.put(nest, shape, unit.reshape(size, size, -1))
        inner.run(nest.body)
        if [len(inner.flags[e]) for e in nest.events] != shape:
            needed = "as many sets as waits of each flag in a loop body"
            raise NotComposableError(needed, "a surplus")
        return inner.state(nest)


def run_batch(
    program: Compiled, cycles: Array, latency: Array, tail_latency: Array, counts: Array
) -> Array:
    """Return cycles (candidates,) of one structure under many durations and trip counts.

    `cycles` and `latency` are (steps, candidates), `tail_latency` (pipes, candidates), `counts`
    (loops, candidates). Raises `NotComposableError` where only the reference engine applies.
    """
    none = np.zeros(cycles.shape[-1], np.int64)
    return _Runner(program, cycles, latency, counts, none).ends(tail_latency)


def run_fast(program: Compiled) -> int:
    """Return the cycles of one program; see `run_batch`. Refuses times near the end of int64."""
    _check_work(program, program.cycles)
    runner = _Runner(program, program.cycles, program.latency, program.counts, 0)
    return int(runner.ends(np.array(program.tail_latency, np.int64)[:, None])[0])


# -- a walk that leaps ----------------------------------------------------------------------------
LONG = 12
KEPT = 6
"""Turns from which on a loop is watched, and states remembered for each place."""


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
        alone = [(node,) for node in program.tree] if program.cores else [program.tree]
        for core, nodes in enumerate(alone):
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
                count = program.counts[node.loop]
                self.code.append((BEGIN, node.loop, 0, count, 0))
                self.nests[node.loop] = node
                self.owner[node.loop] = core
                self.lay(core, node.body)
                self.code[begin] = (BEGIN, node.loop, len(self.code), count, 0)
                self.code.append((END, node.loop, begin, count, 0))
            else:
                s = program.steps[node]
                cycles = program.cycles[node]
                self.code.append((s.kind, s.pipe, s.event, cycles, program.latency[node]))

    def go(self, core: int) -> bool:
        """Walk one core until it waits in vain or ends; return whether it moved."""
        code = self.code
        free = self.free
        flags = self.flags
        left = self.left
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
                    i = event
                    turned = True
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
            now == then + (later if p in pipes else 0)
            for p, (now, then) in enumerate(zip(self.free, old.free, strict=True))
        ) and all(
            up == deque(t + (later if e in events else 0) for t in before)
            for e, (up, before) in enumerate(zip(self.flags, old.flags, strict=True))
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


SHORT = 30
TURNS = 16
MOST = 200_000
"""Passes of the average step up to which a walk is faster than `run_fast`, if it leaps in any loop
after so many turns (measured), and passes of all steps that it takes if it never does."""


def run_quickest(program: Compiled) -> int:
    """Return the cycles of one program by whichever engine is quick: walk, powers, or events."""
    try:
        few = replace(program, counts=tuple(min(count, TURNS) for count in program.counts))
        short = sum(few.runs()) <= SHORT * len(program.steps) and sum(program.runs()) <= MOST
        return run_walked(program) if program.cores or short else run_fast(program)
    except NotComposableError:
        return run_reference(program)[0]


def run_candidates(program: Compiled, cycles: Array) -> Array:
    """Return the cycles of one program under each column of durations (steps, candidates).

    Runs the reference engine where only that one applies.
    """
    try:
        if not program.cores:
            return _run_columns(program, cycles)
    except NotComposableError:
        pass
    each = (replace(program, cycles=tuple(column)) for column in cycles.T.tolist())
    return np.array(list(map(run_quickest, each)), np.int64)


def _check_work(program: Compiled, longest: Sequence[int]) -> None:
    rows = zip(program.runs(), longest, program.latency, strict=True)
    work = sum(runs * (cycles + latency) for runs, cycles, latency in rows)
    if work > LATEST:
        raise SimulationError(f"at most {LATEST:.0e} cycles of work", f"{work:.0e}", "split it")


def _run_columns(program: Compiled, cycles: Array) -> Array:
    _check_work(program, cycles.max(axis=1, initial=0).tolist())
    rows = (program.latency, program.tail_latency, program.counts)
    same = [np.repeat(np.array(r, np.int64)[:, None], cycles.shape[1], axis=1) for r in rows]
    return run_batch(program, cycles, *same)


# -- where device memory is the limit --------------------------------------------------------------
MAX_SLOWDOWN = 1024.0
WAYS = 16
ROUNDS = 3
"""Each round cuts what is left of the last doubling into WAYS pieces and keeps one."""


class Stretched(NamedTuple):
    """How far memory is slowed down, and the slowest part with copies that take so much longer."""

    slowdown: float
    slowest: Compiled


def stretch(parts: Sequence[Compiled], chip: Chip, around: Surroundings, cycles: int) -> Stretched:
    """Return the largest slowdown of memory with which all parts still end within `cycles`.

    Time never falls with the slowdown, so the search keeps one interval: it doubles until memory's
    time is exceeded, then cuts the last step. All candidates of a round are timed as one batch.
    """

    def times(slowdowns: Sequence[float]) -> Array:
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


def _slowed(part: Compiled, chip: Chip, around: Surroundings, slowdowns: Sequence[float]) -> Array:
    """Return durations (steps, slowdowns): copies that read GM take longer, nothing else."""
    cycles = np.repeat(np.array(part.cycles, np.int64)[:, None], len(slowdowns), axis=1)
    settings = [replace(around, memory_slowdown=s) for s in slowdowns]
    for number, step in enumerate(part.steps):
        source = part.sources[step.source]
        if source.event is None and any(r.space == "GM" for r in source.srcs):
            costs = [instruction_cost(chip, source, setting) for setting in settings]
            cycles[number] = [cost.occupancy_cycles for cost in costs]
    return cycles
