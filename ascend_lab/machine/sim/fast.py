"""Fast simulators: linear algebra over (max, +), and a walk that skips repeating loop passes.

One pass of a loop body maps the times of pipes and raised flags to new times, each a maximum of
sums: y_i = max_j (A_ij + x_j). That is a matrix product in the (max, +) semiring. So n passes are
the n-th power of the matrix and need about log2(n) products; nested loops compose from the inside
out. All arrays have a last axis of candidates: many candidates take little more time than one.

Short programs, and cores that signal each other, are walked step by step instead. The walk takes
each core through its program until it waits for another core. Which core moves next does not depend
on times, and times are only added and compared. So if the walk reaches a state that it was in
before, except that loop counters are lower and all times that the loops touch are later by the same
number of cycles, then the same will repeat. The walk leaps over all these rounds at once, until a
loop counter is about to reach its end.
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
MINUS_INFINITY = np.int64(-(2**61))
"""An entry of the matrix for "does not depend on it"; the sum of two is below every real time."""
MAX_TIME_CYCLES = 2**60
"""Programs that might take longer are refused, because their times could overflow."""
Number = int | Array
"""A number for all candidates, or one per candidate."""
Numbers = Sequence[int] | Array
Time = tuple[Array, Number]
"""A time: the row A_i of the module's formula, and an offset in cycles for all of its entries.

Work changes only the offset, so that rows are computed at waits alone.
"""


def _max_plus_product(a: Array, x: Array) -> Array:
    """Return y_ik = max_j (a_ij + x_jk) for each of the candidates b on the last axis."""
    out: Array = (a[:, :, None, :] + x[None]).max(axis=1)
    # The sum of two minus infinities must not fall below one: repeated squaring would leave int64.
    return np.maximum(out, MINUS_INFINITY, out=out)


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
        # at the top level, a time depends only on the start at cycle 0
        self.pipes = [(zeros[None], self.zero) for _ in self.program.pipes]
        self.run(self.program.tree)
        out: Array = (_stack(self.pipes)[:, 0] + tail_latency).max(axis=0)
        return out

    def run(self, nodes: Sequence[int | Nest]) -> None:
        """Carry the times through steps and loops."""
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
        """Carry the times through all passes of a loop, by the power of the matrix of one pass.

        A body that touches no pipe is skipped. A body of one pipe without flags needs no matrix.
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
        """Return the cycles of all passes of a loop that uses one pipe and no flags."""
        body_cycles = [self.work(n) if isinstance(n, Nest) else self.cycles[n] for n in nest.body]
        return self.counts[nest.loop] * sum(body_cycles)

    def state(self, nest: Nest) -> Array:
        """Return the times that a loop touches as one array."""
        flags = [time for event in nest.events for time in self.flags[event]]
        return _stack([self.pipes[p] for p in nest.pipes] + flags)

    def put(self, nest: Nest, flags_up: list[int], x: Array) -> None:
        """Set the times that a loop touches; `flags_up` counts the raised flags of each event."""
        times = iter([(row, self.zero) for row in x])
        for pipe in nest.pipes:
            self.pipes[pipe] = next(times)
        for event, count in zip(nest.events, flags_up, strict=True):
            self.flags[event] = [next(times) for _ in range(count)]

    def matrix(self, nest: Nest, flags_up: list[int], size: int) -> Array:
        """Return the matrix of one pass: the body applied to unit vectors."""
        # The unit matrix of (max, +): 0 on the diagonal, minus infinity elsewhere.
        unit = np.full((size * size, np.size(self.zero)), MINUS_INFINITY)
        unit[:: size + 1] = 0
        inner = _Runner(self.program, self.cycles, self.latency, self.counts, self.zero)
        inner.pipes = self.pipes.copy()
        inner.put(nest, flags_up, unit.reshape(size, size, -1))
        inner.run(nest.body)
        # A body that sets more flags than it waits for has no square matrix, and so no power.
        if [len(inner.flags[e]) for e in nest.events] != flags_up:
            needed = "as many sets as waits of each flag in a loop body"
            raise NotComposableError(needed, "a surplus")
        return inner.state(nest)


def run_batch(
    program: Compiled, cycles: Array, latency: Array, tail_latency: Array, counts: Array
) -> Array:
    """Return the cycles of one program for each candidate, a set of durations and trip counts.

    `cycles` and `latency` are (steps, candidates), `tail_latency` (pipes, candidates), `counts`
    (loops, candidates). Raises `NotComposableError` where only the reference engine applies.
    """
    zeros = np.zeros(cycles.shape[-1], np.int64)
    return _Runner(program, cycles, latency, counts, zeros).ends(tail_latency)


def run_fast(program: Compiled) -> int:
    """Return the cycles of one program; raises `SimulationError` if its times might overflow."""
    _check_work(program)
    runner = _Runner(program, program.cycles, program.latency, program.counts, 0)
    return int(runner.ends(np.array(program.tail_latency, np.int64)[:, None])[0])


# -- a walk that leaps ----------------------------------------------------------------------------
MIN_WATCHED_COUNT = 12
"""Only loops with at least this trip count are checked for repetition."""
MAX_STORED_STATES = 6
"""Number of earlier states that are stored for a position of the walk."""


class _State(NamedTuple):
    """State of a walk between two steps: passes left per loop, times of pipes and raised flags."""

    passes_left: list[int]
    free: list[int]
    flags: list[tuple[int, ...]]


class _Walk:
    """A walk: the position of each core, passes left per loop, times of pipes and raised flags."""

    def __init__(self, program: Compiled) -> None:
        self.program = program
        # A step is (kind, pipe, event, cycles, latency); a BEGIN or END is (kind, loop, position to
        # jump to, trip count, 0). `owner` is the core of each loop.
        self.code: list[tuple[int, int, int, int, int]] = []
        self.nests: dict[int, Nest] = {}
        self.owner: dict[int, int] = {}
        self.positions: list[int] = []
        per_core = [(node,) for node in program.tree] if program.cores else [program.tree]
        for core, nodes in enumerate(per_core):
            self.positions.append(len(self.code))
            self.add_code(core, nodes)
            self.code.append((STOP, 0, 0, 0, 0))
        self.passes_left = [0] * len(program.counts)
        self.free = [0] * len(program.pipes)
        self.flags: list[deque[int]] = [deque() for _ in program.events]
        self.earlier_states: dict[tuple[int, ...], list[_State]] = {}

    def add_code(self, core: int, nodes: Sequence[int | Nest]) -> None:
        """Append a nest to the code as steps, with a BEGIN and an END for each loop."""
        program = self.program
        for node in nodes:
            if isinstance(node, Nest):
                begin = len(self.code)
                count = program.counts[node.loop]
                self.code.append((BEGIN, node.loop, 0, count, 0))
                self.nests[node.loop] = node
                self.owner[node.loop] = core
                self.add_code(core, node.body)
                # only now the position of the END is known, to which a loop of 0 passes jumps
                self.code[begin] = (BEGIN, node.loop, len(self.code), count, 0)
                self.code.append((END, node.loop, begin, count, 0))
            else:
                step = program.steps[node]
                durations = program.cycles[node], program.latency[node]
                self.code.append((step.kind, step.pipe, step.event, *durations))

    def advance(self, core: int) -> bool:
        """Walk one core until it waits for a flag not yet set, or ends; return whether it moved."""
        code = self.code
        free = self.free
        flags = self.flags
        passes_left = self.passes_left
        start = self.positions[core]
        position = start
        has_looped = False
        while True:
            # `number` is a pipe, or for BEGIN and END a loop; `target` is an event, or the position
            # to jump to; `cycles` are those of the step, or the trip count.
            kind, number, target, cycles, latency = code[position]
            if kind == BEGIN:
                passes_left[number] = cycles
                if not cycles:
                    position = target
            elif kind == END:
                passes_left[number] -= 1
                if passes_left[number] > 0:
                    position = target
                    has_looped = True
                    if cycles >= MIN_WATCHED_COUNT and passes_left[number] > 1:
                        self.positions[core] = position
                        self.leap_if_periodic(number)
            elif kind == STOP:
                break
            elif kind == WAIT:
                if not flags[target]:
                    break
                free[number] = max(free[number], flags[target].popleft()) + cycles
            else:
                free[number] += cycles
                if kind == SET:
                    flags[target].append(free[number] + latency)
            position += 1
        self.positions[core] = position
        return has_looped or position != start  # a pass of a loop may end where it began

    def leap_if_periodic(self, loop: int) -> None:
        """Leap over rounds if the walk was at this position before and has begun to repeat."""
        situation = (loop, *self.positions, *map(len, self.flags))
        states = self.earlier_states.setdefault(situation, [])
        for earlier in reversed(states):
            if self._leap_from(earlier):
                states.clear()
                return
        states.append(_State(self.passes_left.copy(), self.free.copy(), [*map(tuple, self.flags)]))
        del states[:-MAX_STORED_STATES]

    def _leap_from(self, earlier: _State) -> bool:
        """Leap if the walk repeats what it did since an earlier state; return whether it did.

        It repeats if only loop counters differ, and the times that these loops touch, all by the
        same number of cycles.
        """
        pairs = zip(earlier.passes_left, self.passes_left, strict=True)
        loops = [loop for loop, (then, now) in enumerate(pairs) if then != now]
        cores = [self.owner[n] for n in loops]
        passes_per_round = [earlier.passes_left[n] - self.passes_left[n] for n in loops]
        # A counter that grew, or two counters of one core, mean that a loop was started again.
        if not loops or min(passes_per_round) < 0 or len(set(cores)) < len(cores):
            return False
        # With 20 passes left and 3 per round, 6 rounds are leapt over and 2 passes are walked.
        rounds = min(
            (self.passes_left[n] - 1) // passes
            for n, passes in zip(loops, passes_per_round, strict=True)
        )
        pipes = {p for n in loops for p in self.nests[n].pipes}
        events = {e for n in loops for e in self.nests[n].events}
        if rounds < 1 or not pipes:
            return False
        period = self.free[min(pipes)] - earlier.free[min(pipes)]
        is_periodic = all(
            new_free == old_free + (period if p in pipes else 0)
            for p, (new_free, old_free) in enumerate(zip(self.free, earlier.free, strict=True))
        ) and all(
            new_flags == deque(t + (period if e in events else 0) for t in old_flags)
            for e, (new_flags, old_flags) in enumerate(zip(self.flags, earlier.flags, strict=True))
        )
        if is_periodic:
            for n, passes in zip(loops, passes_per_round, strict=True):
                self.passes_left[n] -= rounds * passes
            for p in pipes:
                self.free[p] += rounds * period
            for e in events:
                self.flags[e] = deque(t + rounds * period for t in self.flags[e])
        return is_periodic


def run_walked(program: Compiled) -> int:
    """Return the cycles of one program, or of cores that signal each other.

    In a program of the builder each set is written before its wait, so that a single core never
    waits for a flag that is not set. Raises `NotComposableError` if no core can go on.
    """
    walk = _Walk(program)
    # sum, not any: any() would stop at the first core that moved, and not try the others
    while sum(walk.advance(core) for core in range(len(walk.positions))):
        pass
    if any(walk.code[i][0] != STOP for i in walk.positions):
        raise NotComposableError("each set_flag before its wait_flag", "a wait first")
    return max(map(add, walk.free, program.tail_latency), default=0)


MAX_RUNS_PER_STEP = 30
"""A walk is faster than `run_fast` if a step runs at most this often on average (measured)."""
PASSES_BEFORE_LEAP = 16
"""Number of passes of a loop after which a walk usually leaps (measured)."""
MAX_WALKED_STEPS = 200_000
"""Programs of more steps are not walked, because a walk that never leaps takes them all."""


def run_quickest(program: Compiled) -> int:
    """Return the cycles of one program, by the engine that is probably the fastest for it."""
    try:
        counts_to_leaps = tuple(min(count, PASSES_BEFORE_LEAP) for count in program.counts)
        leaping = replace(program, counts=counts_to_leaps)
        is_short = (
            sum(leaping.runs()) <= MAX_RUNS_PER_STEP * len(program.steps)
            and sum(program.runs()) <= MAX_WALKED_STEPS
        )
        return run_walked(program) if program.cores or is_short else run_fast(program)
    except NotComposableError:
        return run_reference(program)[0]


def _check_work(program: Compiled) -> None:
    """Raise `SimulationError` if all steps one after another might take over MAX_TIME_CYCLES."""
    rows = zip(program.runs(), program.cycles, program.latency, strict=True)
    work = sum(runs * (cycles + latency) for runs, cycles, latency in rows)
    if work > MAX_TIME_CYCLES:
        raise SimulationError(
            f"at most {MAX_TIME_CYCLES:.0e} cycles of work", f"{work:.0e}", "split it"
        )


# -- launches that are limited by device memory ----------------------------------------------------
MAX_SLOWDOWN = 1024.0
"""The search for the slowdown of memory ends here."""
HALVINGS = 12
"""Twelve halvings reduce the interval 1.0 .. 2.0 to 1 / 2^12 = 0.00024."""


class Stretched(NamedTuple):
    """The slowdown of memory, and the slowest part with its copies from memory slowed down."""

    slowdown: float
    slowest: Compiled


def stretch(
    parts: Sequence[Compiled], chip: Chip, surroundings: Surroundings, cycles: int
) -> Stretched:
    """Return the largest slowdown of memory with which all parts still end within `cycles`.

    The time never falls as the slowdown rises. So the slowdown is doubled until a part ends too
    late, and the last step is then halved again and again.
    """

    def cycles_of(part: Compiled, slowdown: float) -> int:
        return run_quickest(_slowed(part, chip, surroundings, slowdown))

    low = 1.0
    # only parts that are late at the upper end of the interval can be late inside of it
    candidates = list(parts)
    while 2.0 * low < MAX_SLOWDOWN:
        late = [part for part in parts if cycles_of(part, 2.0 * low) > cycles]
        if late:
            candidates = late
            break
        low *= 2.0
    width = low
    for _ in range(HALVINGS):
        width /= 2.0
        late = [part for part in candidates if cycles_of(part, low + width) > cycles]
        if late:
            candidates = late
        else:
            low += width
    slowest = max(parts, key=lambda part: cycles_of(part, low))
    return Stretched(low, _slowed(slowest, chip, surroundings, low))


def _slowed(part: Compiled, chip: Chip, surroundings: Surroundings, slowdown: float) -> Compiled:
    """Return the part with longer copies from GM; all else takes as long as before."""
    slowed_down = replace(surroundings, memory_slowdown=slowdown)
    cycles = list(part.cycles)
    for number, step in enumerate(part.steps):
        source = part.sources[step.source]
        if source.event is None and any(r.space == "GM" for r in source.srcs):
            cycles[number] = instruction_cost(chip, source, slowed_down).occupancy_cycles
    return replace(part, cycles=tuple(cycles))
