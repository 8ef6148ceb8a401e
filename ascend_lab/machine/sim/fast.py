"""The fast simulators: time as linear algebra over (max, +), and a walk that leaps.

One pass of a loop body maps the times of pipes and raised flags to new times, each a maximum of
sums: y_i = max_j (A_ij + x_j). That is a matrix product in the (max, +) semiring, so n passes are
the n-th power and need about log2(n) products. Nested loops compose from the inside out. All
arrays carry a last axis of candidates, so a batch costs little more than one.

Short programs, and cores that work together, are walked instead. The walk takes each core through
its program until it waits for another core. Which core moves next does not depend on times, and
times only add up and take maxima. So suppose the walk reaches a state it was in before, except that
loop counters are lower and all times that the loops touch are later by the same number. Then the
rounds that follow will all do the same, and the walk leaps over as many of them as no loop counter
runs out in.
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
"""A number for all candidates, or one per candidate."""
Numbers = Sequence[int] | Array
Time = tuple[Array, Number]
"""Row vector of what a time depends on, and an offset in cycles to add to all of it.

Entry j of the row is A_ij of the module's formula. Work changes the offset only, so that rows are
computed at waits alone.
"""


def _max_plus_product(a: Array, x: Array) -> Array:
    """Return y_ik = max_j (a_ij + x_jk) for each of the candidates b on the last axis."""
    out: Array = (a[:, :, None, :] + x[None]).max(axis=1)
    # NEVER + NEVER must stay NEVER: repeated squaring would leave the range of int64.
    return np.maximum(out, NEVER, out=out)


def _apply_power(a: Array, counts: Sequence[int], x: Array) -> Array:
    """Return a^counts (x) x by repeated squaring; `counts` holds one exponent per candidate."""
    # 13 = 0b1101: multiplies x by a, a^4 and a^8, and squares three times
    exponents = list(counts)
    while True:
        is_odd = [n & 1 for n in exponents]
        if all(is_odd):
            x = _max_plus_product(a, x)
        elif any(is_odd):
            x = np.where(np.array(is_odd, bool), _max_plus_product(a, x), x)
        exponents = [n >> 1 for n in exponents]
        if not any(exponents):
            return x
        a = _max_plus_product(a, a)


def _stack(times: Sequence[Time]) -> Array:
    """Return the times as one array (times, dependencies, candidates)."""
    offsets = np.array([offset for _, offset in times]).reshape(len(times), 1, -1)
    stacked: Array = np.array([row for row, _ in times]) + offsets
    return stacked


class _Runner:
    """Carries the times of pipes and raised flags through a program.

    `cycles` and `latency` hold an entry for each step and `counts` one for each loop: a number, or
    an array with one number per candidate. `zero` is 0 in the same form.
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
        zeros: Array = np.zeros(np.size(self.zero), np.int64)
        if not self.program.pipes:
            return zeros
        # At the top level a time depends on one thing only: the start, at cycle 0.
        self.pipes = [(zeros[None], self.zero) for _ in self.program.pipes]
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
            row, offset = self.pipes[step.pipe]
            if step.kind == WAIT:
                if not self.flags[step.event]:
                    raise NotComposableError("each set_flag before its wait_flag", "a wait first")
                flag_row, flag_offset = self.flags[step.event].pop(0)
                # max(row + offset, flag_row + flag_offset), with the pipe's offset taken out
                row = np.maximum(row, flag_row + (flag_offset - offset))
            offset = offset + self.cycles[node]
            self.pipes[step.pipe] = row, offset
            if step.kind == SET:
                self.flags[step.event].append((row, offset + self.latency[node]))

    def loop(self, nest: Nest) -> None:
        """Replace n passes by the n-th power of one pass over the state the body touches.

        A body that touches no pipe is skipped. A pipe that works by itself needs no matrix.
        """
        if not nest.events and len(nest.pipes) < 2:
            for pipe in nest.pipes:
                row, offset = self.pipes[pipe]
                self.pipes[pipe] = row, offset + self.work(nest)
            return
        passes = self.counts[nest.loop]
        # Perfectly nested loops, 8 x 4 passes of one body, are one loop of 32 passes.
        while len(nest.body) == 1 and isinstance(nest.body[0], Nest):
            nest = nest.body[0]
            passes = passes * self.counts[nest.loop]
        counts = np.ravel(passes).tolist()
        if max(counts) == 0:
            return
        if max(counts) == min(counts) == 1:
            self.run(nest.body)
            return
        flags_up = [len(self.flags[e]) for e in nest.events]
        x = self.state(nest)
        one_pass = self.matrix(nest, flags_up, len(x))
        self.put(nest, flags_up, _apply_power(one_pass, counts, x))

    def work(self, nest: Nest) -> Number:
        """Return the cycles of all passes of a loop in which one pipe works by itself."""
        body_cycles = [self.work(n) if isinstance(n, Nest) else self.cycles[n] for n in nest.body]
        return self.counts[nest.loop] * sum(body_cycles)

    def state(self, nest: Nest) -> Array:
        """Stack the times a loop touches."""
        flags = [time for event in nest.events for time in self.flags[event]]
        return _stack([self.pipes[p] for p in nest.pipes] + flags)

    def put(self, nest: Nest, flags_up: list[int], x: Array) -> None:
        """Set the times a loop touches from a stack; `flags_up` counts raised flags per event."""
        times = iter([(row, self.zero) for row in x])
        for pipe in nest.pipes:
            self.pipes[pipe] = next(times)
        for event, count in zip(nest.events, flags_up, strict=True):
            self.flags[event] = [next(times) for _ in range(count)]

    def matrix(self, nest: Nest, flags_up: list[int], size: int) -> Array:
        """Return the matrix of one pass: the body applied to unit vectors."""
        # The unit matrix of (max, +): 0 on the diagonal, minus infinity elsewhere.
        unit = np.full((size * size, np.size(self.zero)), NEVER)
        unit[:: size + 1] = 0
        inner = _Runner(self.program, self.cycles, self.latency, self.counts, self.zero)
        inner.pipes = self.pipes.copy()
        inner.put(nest, flags_up, unit.reshape(size, size, -1))
        inner.run(nest.body)
        # A body that leaves more flags up than it found has no square matrix, hence no power.
        if [len(inner.flags[e]) for e in nest.events] != flags_up:
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
    zeros = np.zeros(cycles.shape[-1], np.int64)
    return _Runner(program, cycles, latency, counts, zeros).ends(tail_latency)


def run_fast(program: Compiled) -> int:
    """Return the cycles of one program; see `run_batch`. Refuses times near the end of int64."""
    _check_work(program, program.cycles)
    runner = _Runner(program, program.cycles, program.latency, program.counts, 0)
    return int(runner.ends(np.array(program.tail_latency, np.int64)[:, None])[0])


# -- a walk that leaps ----------------------------------------------------------------------------
WATCHED_TURNS = 12
KEPT_STATES = 6
"""Turns from which on a loop is watched for a leap, and states remembered for each position."""


class _State(NamedTuple):
    """State of a walk between two steps: turns left, times of pipes and raised flags."""

    left: list[int]
    free: list[int]
    flags: list[tuple[int, ...]]


class _Walk:
    """Where each core stands, the turns its loops have left, times of pipes and raised flags."""

    def __init__(self, program: Compiled) -> None:
        self.program = program
        # Of a step: kind, pipe, event, cycles, latency. Of a BEGIN or END: kind, loop, the position
        # to jump to, the loop's turns, 0.
        self.code: list[tuple[int, int, int, int, int]] = []
        self.nests: dict[int, Nest] = {}
        self.owner: dict[int, int] = {}
        self.at: list[int] = []
        per_core = [(node,) for node in program.tree] if program.cores else [program.tree]
        for core, nodes in enumerate(per_core):
            self.at.append(len(self.code))
            self.lay(core, nodes)
            self.code.append((STOP, 0, 0, 0, 0))
        self.left = [0] * len(program.counts)
        self.free = [0] * len(program.pipes)
        self.flags: list[deque[int]] = [deque() for _ in program.events]
        self.seen: dict[tuple[int, ...], list[_State]] = {}

    def lay(self, core: int, nodes: Sequence[int | Nest]) -> None:
        """Append a nest to the code as steps, with a BEGIN and an END for each loop."""
        program = self.program
        for node in nodes:
            if isinstance(node, Nest):
                begin = len(self.code)
                count = program.counts[node.loop]
                self.code.append((BEGIN, node.loop, 0, count, 0))
                self.nests[node.loop] = node
                self.owner[node.loop] = core
                self.lay(core, node.body)
                # Only now the END's position is known, to which a loop of 0 turns jumps.
                self.code[begin] = (BEGIN, node.loop, len(self.code), count, 0)
                self.code.append((END, node.loop, begin, count, 0))
            else:
                s = program.steps[node]
                cycles = program.cycles[node]
                self.code.append((s.kind, s.pipe, s.event, cycles, program.latency[node]))

    def go(self, core: int) -> bool:
        """Walk one core until it waits for a flag not yet set, or ends; return whether it moved."""
        code = self.code
        free = self.free
        flags = self.flags
        left = self.left
        i = start = self.at[core]
        has_looped = False
        while True:
            kind, pipe, event, cycles, latency = code[i]
            # Of loops, `pipe` is the loop's number, `event` where it jumps to, `cycles` its turns.
            if kind == BEGIN:
                left[pipe] = cycles
                i = i if cycles else event
            elif kind == END:
                left[pipe] -= 1
                if left[pipe] > 0:
                    i = event
                    has_looped = True
                    if cycles >= WATCHED_TURNS and left[pipe] > 1:
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
        return has_looped or i != start  # a turn of a loop may end where it began

    def leap(self, loop: int) -> None:
        """Leap over rounds if the walk was at this position before, all times equally earlier."""
        position = (loop, *self.at, *map(len, self.flags))
        states = self.seen.setdefault(position, [])
        for old in reversed(states):
            if self._repeats(old):
                states.clear()
                return
        states.append(_State(self.left.copy(), self.free.copy(), [*map(tuple, self.flags)]))
        del states[:-KEPT_STATES]

    def _repeats(self, old: _State) -> bool:
        """Leap if nothing but loop counters differs, and times of what they touch, all equally."""
        loops = [n for n, (a, b) in enumerate(zip(old.left, self.left, strict=True)) if a != b]
        cores = [self.owner[n] for n in loops]
        turns_per_round = [old.left[n] - self.left[n] for n in loops]
        # A counter that grew, or two of one core, show that a loop has begun anew meanwhile.
        if not loops or min(turns_per_round) < 0 or len(set(cores)) < len(cores):
            return False
        # 20 turns left at 3 a round: 6 rounds, which leave 2 turns to walk to the loop's end.
        rounds = min(
            (self.left[n] - 1) // turns for n, turns in zip(loops, turns_per_round, strict=True)
        )
        pipes = {p for n in loops for p in self.nests[n].pipes}
        events = {e for n in loops for e in self.nests[n].events}
        if rounds < 1 or not pipes:
            return False
        period = self.free[min(pipes)] - old.free[min(pipes)]
        is_periodic = all(
            new_free == old_free + (period if p in pipes else 0)
            for p, (new_free, old_free) in enumerate(zip(self.free, old.free, strict=True))
        ) and all(
            new_flags == deque(t + (period if e in events else 0) for t in old_flags)
            for e, (new_flags, old_flags) in enumerate(zip(self.flags, old.flags, strict=True))
        )
        if is_periodic:
            for n, turns in zip(loops, turns_per_round, strict=True):
                self.left[n] -= rounds * turns
            for p in pipes:
                self.free[p] += rounds * period
            for e in events:
                self.flags[e] = deque(t + rounds * period for t in self.flags[e])
        return is_periodic


def run_walked(program: Compiled) -> int:
    """Return the cycles of one program, or of cores that work together.

    The builder writes each set before its wait, so that a core by itself never meets a flag that
    is not set. Raises `NotComposableError` if no core can go on.
    """
    walk = _Walk(program)
    # sum, not any: every core moves in each round, also behind one that has moved.
    while sum(walk.go(core) for core in range(len(walk.at))):
        pass
    if any(walk.code[i][0] != STOP for i in walk.at):
        raise NotComposableError("each set_flag before its wait_flag", "a wait first")
    return max(map(add, walk.free, program.tail_latency), default=0)


PASSES_PER_STEP = 30
TURNS_BEFORE_LEAP = 16
MAX_WALKED_PASSES = 200_000
"""A walk is faster than `run_fast` up to 30 passes of the average step, if it leaps in every loop
after 16 turns (both measured). If it never leaps, it takes all passes of all steps: at most these.
"""


def run_quickest(program: Compiled) -> int:
    """Return the cycles of one program by whichever engine is quick: walk, powers, or events."""
    try:
        counts_to_leaps = tuple(min(count, TURNS_BEFORE_LEAP) for count in program.counts)
        leaping = replace(program, counts=counts_to_leaps)
        is_short = (
            sum(leaping.runs()) <= PASSES_PER_STEP * len(program.steps)
            and sum(program.runs()) <= MAX_WALKED_PASSES
        )
        return run_walked(program) if program.cores or is_short else run_fast(program)
    except NotComposableError:
        return run_reference(program)[0]


def run_candidates(program: Compiled, cycles: Array) -> Array:
    """Return the cycles of one program under each column of durations (steps, candidates).

    A program of several cores, or one that the (max, +) form cannot express, is timed column by
    column instead of all at once.
    """
    try:
        if not program.cores:
            return _run_columns(program, cycles)
    except NotComposableError:
        pass
    candidates = (replace(program, cycles=tuple(column)) for column in cycles.T.tolist())
    return np.array(list(map(run_quickest, candidates)), np.int64)


def _check_work(program: Compiled, longest: Sequence[int]) -> None:
    """Refuse a program whose steps, one after another, would take more than LATEST cycles."""
    rows = zip(program.runs(), longest, program.latency, strict=True)
    work = sum(runs * (cycles + latency) for runs, cycles, latency in rows)
    if work > LATEST:
        raise SimulationError(f"at most {LATEST:.0e} cycles of work", f"{work:.0e}", "split it")


def _run_columns(program: Compiled, cycles: Array) -> Array:
    _check_work(program, cycles.max(axis=1, initial=0).tolist())
    # Candidates differ in durations only: the other numbers are repeated for each.
    shared = (program.latency, program.tail_latency, program.counts)
    repeated = [np.repeat(np.array(r, np.int64)[:, None], cycles.shape[1], axis=1) for r in shared]
    return run_batch(program, cycles, *repeated)


# -- where device memory is the limit --------------------------------------------------------------
MAX_SLOWDOWN = 1024.0
INTERVALS = 16
ROUNDS = 3
"""Each round cuts the interval that holds the slowdown into INTERVALS and keeps one.

Three rounds find it to 1 / 16^3 of its last doubling: 1.0 .. 2.0 becomes 0.00024 wide.
"""


class Stretched(NamedTuple):
    """How far memory is slowed down, and the slowest part with its copies stretched as far."""

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
        # Times never fall along the list, so that those within `cycles` stand in front.
        return int((times(slowdowns).max(axis=0) <= cycles).sum())

    low = 1.0
    while 2.0 * low < MAX_SLOWDOWN and fitting([2.0 * low]):
        low *= 2.0
    width = low
    for _ in range(ROUNDS):
        width /= INTERVALS
        low += width * fitting([low + width * i for i in range(1, INTERVALS)])
    slowest = parts[int(times([low])[:, 0].argmax())]
    durations = _slowed(slowest, chip, around, [low])[:, 0].tolist()
    return Stretched(low, replace(slowest, cycles=tuple(durations)))


def _slowed(part: Compiled, chip: Chip, around: Surroundings, slowdowns: Sequence[float]) -> Array:
    """Return durations (steps, slowdowns) in which nothing but copies from GM takes longer."""
    cycles = np.repeat(np.array(part.cycles, np.int64)[:, None], len(slowdowns), axis=1)
    settings = [replace(around, memory_slowdown=s) for s in slowdowns]
    for number, step in enumerate(part.steps):
        source = part.sources[step.source]
        if source.event is None and any(r.space == "GM" for r in source.srcs):
            costs = [instruction_cost(chip, source, setting) for setting in settings]
            cycles[number] = [cost.occupancy_cycles for cost in costs]
    return cycles
