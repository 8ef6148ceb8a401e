"""A program reduced to what time needs, and the plain simulator that steps through it.

Pipes, flags, loops, and the cycles of each instruction are all that time depends on. The simulator
lets every pipe step through its instructions, one event at a time. That is the definition of time
in this package: the fast engine must equal it to the cycle. The same function runs on Python lists
and, where Numba is installed, compiled on arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ascend_lab.errors import SimulationError, SyncError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import Event, Instruction, Loop, Node, Program
from ascend_lab.machine.isa.program import CROSS
from ascend_lab.machine.sim.cost import Cost, Surroundings, costs_of

BEGIN, END, WORK, SET, WAIT, STOP = range(6)
"""Kinds of step: WORK, SET, WAIT; engines add BEGIN and END of a loop, STOP of a pipe's code."""
MAX_EVENTS = 100_000_000
"""Most steps to follow: a record of 100 million, four numbers of 8 bytes each, fills 3.2 GB."""


class Step(NamedTuple):
    """One static step: its pipe, kind, event number (-1 for work) and source instruction."""

    pipe: int
    kind: int
    event: int
    source: int


@dataclass(frozen=True, slots=True)
class Nest:
    """A loop of the compiled tree.

    `loop` is the index of its trip count in `Compiled.counts`. The body consists of step numbers
    and inner loops; it touches `pipes` and the flags of `events`.
    """

    loop: int
    body: "tuple[int | Nest, ...]"
    pipes: tuple[int, ...]
    events: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Structure (shared by all candidates of one template) plus durations and trip counts.

    `cores` is 0 for the program of one core. For several cores it is their number, and the top of
    the tree has one nest per core. Step s occupies its pipe for `cycles[s]`; if it is a SET, its
    flag goes up `latency[s]` cycles later. `tail_latency[p]` is what is left of the latency of
    pipe p's work when its last step ends; the program ends after it. It is 0 if the pipe sets a
    flag after that work: then the latency delays the flag instead.
    """

    pipes: tuple[str, ...]
    events: tuple[Event, ...]
    steps: tuple[Step, ...]
    tree: tuple[int | Nest, ...]
    sources: tuple[Instruction, ...]
    cycles: tuple[int, ...]
    latency: tuple[int, ...]
    tail_latency: tuple[int, ...]
    counts: tuple[int, ...]
    cores: int = 0

    def runs(self) -> list[int]:
        """Return how often each step runs."""
        runs_of_step = [0] * len(self.steps)
        self._count(self.tree, 1, runs_of_step)
        return runs_of_step

    def _count(self, nodes: Sequence[int | Nest], passes: int, runs_of_step: list[int]) -> None:
        """Add the runs of all steps of a nest that is passed `passes` times."""
        for node in nodes:
            if isinstance(node, Nest):
                self._count(node.body, passes * self.counts[node.loop], runs_of_step)
            else:
                runs_of_step[node] += passes


class Compiler:
    """Collects the steps of one program, or of several that run together, at known costs."""

    def __init__(self, chip: Chip, costs: Mapping[int, Cost]) -> None:
        """Start empty."""
        self.chip = chip
        self.costs = costs
        self.names: list[str] = []
        self.pipes: dict[str, int] = {}  # of the core that is being compiled: name to number
        self.prefix = ""
        self.events: dict[Event, int] = {}
        self.event_numbers: dict[int, int] = {}  # of that core's events, by identity
        self.steps: list[Step] = []
        self.sources: list[Instruction] = []
        self.cycles: list[int] = []
        self.latency: list[int] = []
        self.counts: list[int] = []
        # Of each pipe, how long after its last step all its results are visible: to a flag set now,
        # and to the end of the program.
        self.last_latency: list[int] = []
        self.tail_latency: list[int] = []

    def alone(self, program: Program) -> Compiled:
        """Return the timed form of one program."""
        self.begin(program.pipes)
        return self.finish(self.tree(program.body))

    def begin(self, pipes: Sequence[str], prefix: str = "") -> None:
        """Begin the program of a core; `prefix` stands before the names of its pipes."""
        self.prefix, start = prefix, len(self.names)
        self.pipes = {pipe: start + number for number, pipe in enumerate(pipes)}
        self.names += [prefix + pipe for pipe in pipes]
        self.last_latency += [0] * len(pipes)
        self.tail_latency += [0] * len(pipes)
        self.event_numbers = {}

    def tree(self, nodes: tuple[Node, ...]) -> tuple[int | Nest, ...]:
        """Add the steps of a program's nodes; return the same tree with step numbers as leaves."""
        compiled_nodes: list[int | Nest] = []
        for node in nodes:
            if isinstance(node, Loop):
                loop_number = len(self.counts)
                first_step = len(self.steps)
                self.counts.append(node.count)
                body = self.tree(node.body)
                body_steps = self.steps[first_step:]
                pipes = {s.pipe for s in body_steps}
                events = {s.event for s in body_steps} - {-1}
                compiled_nodes.append(
                    Nest(loop_number, body, tuple(sorted(pipes)), tuple(sorted(events)))
                )
            elif node.op in CROSS:
                compiled_nodes += self.cross(node)
            elif node.pipe == "ALL":
                compiled_nodes += self.barrier(node)
            else:
                compiled_nodes.append(self.instruction(node))
        return tuple(compiled_nodes)

    def number_of(self, event: Event) -> int:
        """Return the number of a flag between pipes of the core."""
        # The flags of a queue share one event object: its identity is found faster than its value.
        number = self.event_numbers.get(id(event))
        if number is None:
            full_event = event
            prefix = self.prefix
            if prefix:  # "AIC." makes M -> FIX the event AIC.M -> AIC.FIX, no other core's
                full_event = replace(event, src=prefix + event.src, dst=prefix + event.dst)
            number = self.events.setdefault(full_event, len(self.events))
            self.event_numbers[id(event)] = number
        return number

    def step(self, pipe: int, kind: int, event: int, cycles: int, latency: int) -> int:
        """Add a step and return its number."""
        self.steps.append(Step(pipe, kind, event, len(self.sources) - 1))
        self.cycles.append(cycles)
        self.latency.append(latency)
        return len(self.steps) - 1

    def instruction(self, node: Instruction) -> int:
        """Add work, or a flag between pipes."""
        self.sources.append(node)
        pipe = self.pipes[node.pipe]
        if node.event is None:
            cost = self.costs[id(node)]
            # A flag says that all results before it are visible, also those of a slow copy before a
            # fast one. If 100 cycles of latency were left and this step occupies the pipe for 30,
            # then 70 are left at its end, or its own latency if that is longer.
            remaining = self.last_latency[pipe] - cost.occupancy_cycles
            self.last_latency[pipe] = max(cost.latency_cycles, remaining)
            remaining = self.tail_latency[pipe] - cost.occupancy_cycles
            self.tail_latency[pipe] = max(cost.latency_cycles, remaining)
            return self.step(pipe, WORK, -1, cost.occupancy_cycles, 0)
        event = self.number_of(node.event)
        cycles = self.chip.flag_cycles
        if node.op == "set_flag":
            # Whoever waits for this flag pays the latency, so the end of the program need not.
            self.tail_latency[pipe] = 0
            return self.step(pipe, SET, event, cycles, self.last_latency[pipe])
        return self.step(pipe, WAIT, event, cycles, 0)

    def cross(self, node: Instruction) -> list[int]:
        """Add a flag between cores to the program of a single core, where only its issue counts."""
        self.sources.append(node)
        if node.op == "cross_wait":
            return []
        return [self.step(self.pipes[node.pipe], WORK, -1, self.chip.flag_cycles, 0)]

    def barrier(self, node: Instruction) -> list[int]:
        """Add a barrier on all pipes: each pipe sets a flag for every other, then waits for theirs.

        The barrier waits for results to be visible too, so flags after it add no latency again.
        """
        self.sources.append(node)
        names = self.names
        pipes = self.pipes.values()
        pairs = [(p, q) for p in pipes for q in pipes if p != q]
        # Event 1000: hardware has 4 or 8 flags per pair of pipes, so that no program uses it.
        number = {
            pair: self.events.setdefault(
                Event(names[pair[0]], names[pair[1]], 1000), len(self.events)
            )
            for pair in pairs
        }
        steps = [self.step(p, SET, number[p, q], 0, self.last_latency[p]) for p, q in pairs]
        steps += [self.step(q, WAIT, number[p, q], 0, 0) for p, q in pairs]
        cycles = self.chip.barrier_cycles
        for p in pipes:
            self.last_latency[p] = self.tail_latency[p] = 0
        return steps + [self.step(p, WORK, -1, cycles, 0) for p in pipes]

    def finish(self, tree: tuple[int | Nest, ...], cores: int = 0) -> Compiled:
        """Return the timed form of all programs added so far."""
        return Compiled(
            tuple(self.names),
            tuple(self.events),
            tuple(self.steps),
            tree,
            tuple(self.sources),
            tuple(self.cycles),
            tuple(self.latency),
            tuple(self.tail_latency),
            tuple(self.counts),
            cores,
        )


def compile_program(program: Program, chip: Chip, around: Surroundings) -> Compiled:
    """Return the timed form of `program`; the durations are those of `instruction_cost`."""
    return Compiler(chip, costs_of([program], chip, around)).alone(program)


# -- event by event --------------------------------------------------------------------------------
# One function on purpose: Numba compiles it as a whole, and the plain version saves the calls.
def _run(code: Any, pipes: Any, flags: Any, record: bool, records: Any) -> int:
    """Advance every pipe until it stops or waits; return -1 at the end, else a deadlocked pipe."""
    # Columns of `code`: see _Row. Of each pipe: position in the code, turns left of the loop that
    # ends at a position, and the cycle from which the pipe is free. The sets of event e stand in
    # `token` from base[e] on: head[e] of them were waited for, tail[e] were set.
    (op, arg, cycles, latency) = code
    (pc, left, free) = pipes
    head, tail, base, token, token_by = flags
    steps, starts, ends, causes = records
    last = [-1 for _ in free]  # the last step recorded of each pipe
    count = 0
    while True:
        stuck = -1
        count_before_round = count
        for p in range(len(free)):
            i = pc[p]
            now = free[p]
            while op[i] != STOP:
                kind = op[i]
                e = arg[i]
                if kind == END:
                    # 0 turns left: this is the end of the first pass, since a loop that has run
                    # through leaves 0. Of 3 turns, `left` reads 2, 1, 0 after each.
                    left[i] = (left[i] if left[i] > 0 else cycles[i]) - 1
                    i = e if left[i] > 0 else i + 1
                    continue
                if kind == WAIT and head[e] == tail[e]:
                    stuck = p
                    break
                start = now
                cause = last[p]
                if kind == WAIT:
                    flag = base[e] + head[e]
                    head[e] += 1
                    if token[flag] > now:
                        now = token[flag]
                        cause = token_by[flag]
                now += cycles[i]
                if kind == SET:
                    flag = base[e] + tail[e]
                    token[flag] = now + latency[i]
                    token_by[flag] = count
                    tail[e] += 1
                if record:
                    steps[count] = i
                    starts[count] = start
                    ends[count] = now
                    causes[count] = cause
                    last[p] = count
                count += 1
                i += 1
            pc[p] = i
            free[p] = now
        # A pipe that waits is deadlocked only if no other moved in this round.
        if stuck < 0 or count == count_before_round:
            return stuck


@cache
def _compiled_run() -> Callable[..., int]:
    import numba

    compiled: Callable[..., int] = numba.njit(cache=True)(_run)
    return compiled


def numba_available() -> bool:
    """Tell whether the compiled variant can be used."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Record:
    """Every event of a run: step number, start and end cycle, and the event that held it up."""

    step: Sequence[int]
    start: Sequence[int]
    end: Sequence[int]
    cause: Sequence[int]


_Row = tuple[int, int, int, int, int]
"""A row of the code: kind, event, cycles, latency, step number.

In the row of an END the second is the position where the loop begins, the third its turns.
"""


def _assemble(program: Compiled) -> tuple[list[_Row], list[int]]:
    """Return the pipes' codes laid end to end, and where each begins.

    Each pipe gets the loops in which it has work, so that pipes run through them independently.
    """
    code = list[_Row]()
    entry = list[int]()

    def visit(nodes: Sequence[int | Nest], pipe: int) -> None:
        for node in nodes:
            if not isinstance(node, Nest):
                s = program.steps[node]
                if s.pipe == pipe:
                    code.append(
                        (s.kind, s.event, program.cycles[node], program.latency[node], node)
                    )
            elif program.counts[node.loop] > 0:
                begin = len(code)
                visit(node.body, pipe)
                if len(code) > begin:
                    code.append((END, begin, program.counts[node.loop], 0, -1))

    for pipe in range(len(program.pipes)):
        entry.append(len(code))
        visit(program.tree, pipe)
        code.append((STOP, 0, 0, 0, -1))
    return code, entry


def run_reference(
    program: Compiled, *, record: bool = False, compiled: bool = False
) -> tuple[int, list[int], Record | None]:
    """Return (cycles, end time per pipe, record) of one core's program, event by event.

    `compiled` uses Numba. Raises `SyncError` on deadlock, `SimulationError` without Numba or above
    MAX_EVENTS.
    """
    if compiled and not numba_available():
        raise SimulationError("Numba for the compiled engine", "not installed", "pip install numba")
    events = sum(program.runs())
    if events > MAX_EVENTS:
        got = str(events)
        remedy = "use a smaller shape, or loops that the fast engine can take"
        raise SimulationError(f"at most {MAX_EVENTS} steps to follow one by one", got, remedy)
    if not program.pipes:
        return 0, [], Record((), (), (), ()) if record else None
    rows, entry = _assemble(program)
    array: Callable[[Any], Any] = partial(np.array, dtype=np.int64) if compiled else list
    code = tuple(map(array, zip(*(row[:4] for row in rows), strict=True)))
    pipes = tuple(map(array, (entry, [0] * len(rows), [0] * len(entry))))
    records = tuple(array([0] * (events if record else 1)) for _ in range(4))
    run: Callable[..., int] = _compiled_run() if compiled else _run
    stuck = run(code, pipes, tuple(map(array, _flags(program))), record, records)
    if stuck >= 0:
        needed = "flags that let every pipe finish"
        got = f"pipe {program.pipes[stuck]} waits forever"
        raise SyncError(needed, got, "run the sanitizer: it names the cycle of events")
    ends = [int(t) for t in pipes[2]]
    finish = [t + tail for t, tail in zip(ends, program.tail_latency, strict=True)]
    events_in_time = None
    if record:
        steps, starts, finishes, causes = (list(map(int, c[:events])) for c in records)
        events_in_time = Record([rows[i][4] for i in steps], starts, finishes, causes)
    return max(finish, default=0), ends, events_in_time


def _flags(program: Compiled) -> tuple[list[int], ...]:
    """Return the empty arrays head, tail, base, token and token_by of `_run`, in this order."""
    sets = [0] * len(program.events)
    for step, times in zip(program.steps, program.runs(), strict=True):
        if step.kind == SET:
            sets[step.event] += times
    base = [0, *accumulate(sets)]  # 3 and 2 sets of two events: tokens 0..2 and 3..4
    token_count = max(base[-1], 1)
    return [0] * len(base), [0] * len(base), base, [0] * token_count, [0] * token_count
