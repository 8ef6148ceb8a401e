"""A program reduced to what time needs, and the plain simulator that steps through it.

What is left are pipes, flags, loops, and what each instruction costs. Every pipe steps through its
instructions, one event at a time: this is the definition of time in this package; the fast engine
must equal it to the cycle. The same function runs on Python lists or, compiled by Numba when that
is installed, on arrays.
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
"""Kinds of timed step, and what engines put between: of a loop, and of a program."""
MAX_EVENTS = 100_000_000
"""Above this many steps memory and patience run out."""


class Step(NamedTuple):
    """One static step: its pipe, kind, event number (-1 for work) and source instruction."""

    pipe: int
    kind: int
    event: int
    source: int


@dataclass(frozen=True, slots=True)
class Nest:
    """A loop of the compiled tree: number of its trip count, its body, and what that touches."""

    loop: int
    body: "tuple[int | Nest, ...]"
    pipes: tuple[int, ...]
    events: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Structure (shared by all candidates of one template) plus durations and trip counts.

    `cores` counts the cores whose programs stand here, a nest each at the top of the tree; 0: one
    program. `cycles[s]` is how long step s takes its pipe; `latency[s]` delays the flag a SET
    raises; `tail_latency[p]` is the latency of the last work of pipe p, paid at the end unless a
    flag after it tells someone that the result is there.
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
        out = [0] * len(self.steps)
        self._count(self.tree, 1, out)
        return out

    def _count(self, nodes: Sequence[int | Nest], times: int, out: list[int]) -> None:
        for node in nodes:
            if isinstance(node, Nest):
                self._count(node.body, times * self.counts[node.loop], out)
            else:
                out[node] += times


class Compiler:
    """Collects the steps of one program, or of several that run together, at known costs."""

    def __init__(self, chip: Chip, costs: Mapping[int, Cost]) -> None:
        """Start empty."""
        self.chip = chip
        self.costs = costs
        self.names: list[str] = []
        self.pipes: dict[str, int] = {}
        self.prefix = ""
        self.events: dict[Event, int] = {}
        self.known: dict[int, int] = {}
        self.steps: list[Step] = []
        self.sources: list[Instruction] = []
        self.cycles: list[int] = []
        self.latency: list[int] = []
        self.counts: list[int] = []
        self.last_latency: list[int] = []
        self.tail_latency: list[int] = []

    def alone(self, program: Program) -> Compiled:
        """Return the timed form of one program."""
        self.begin(program.pipes)
        return self.finish(self.tree(program.body))

    def begin(self, pipes: Sequence[str], prefix: str = "") -> None:
        """Begin the program of a core, whose pipes are called `prefix` and their own name."""
        self.prefix, start = prefix, len(self.names)
        self.pipes = {pipe: start + number for number, pipe in enumerate(pipes)}
        self.names += [prefix + pipe for pipe in pipes]
        self.last_latency += [0] * len(pipes)
        self.tail_latency += [0] * len(pipes)
        self.known = {}

    def tree(self, nodes: tuple[Node, ...]) -> tuple[int | Nest, ...]:
        """Add the steps of a nest and return it with their numbers."""
        out: list[int | Nest] = []
        for node in nodes:
            if isinstance(node, Loop):
                number = len(self.counts)
                first = len(self.steps)
                self.counts.append(node.count)
                body = self.tree(node.body)
                inside = self.steps[first:]
                pipes = {s.pipe for s in inside}
                events = {s.event for s in inside} - {-1}
                out.append(Nest(number, body, tuple(sorted(pipes)), tuple(sorted(events))))
            elif node.op in CROSS:
                out += self.cross(node)
            elif node.pipe == "ALL":
                out += self.barrier(node)
            else:
                out.append(self.instruction(node))
        return tuple(out)

    def number_of(self, event: Event) -> int:
        """Return the number of a flag between pipes of the core."""
        # The flags of a queue share one event object: its identity is found faster than its value.
        number = self.known.get(id(event))
        if number is None:
            named = event
            prefix = self.prefix
            if prefix:
                named = replace(event, src=prefix + event.src, dst=prefix + event.dst)
            number = self.known[id(event)] = self.events.setdefault(named, len(self.events))
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
            # A flag tells that all before it can be seen, also a slow copy before a fast one.
            before = self.last_latency[pipe] - cost.occupancy_cycles
            self.last_latency[pipe] = max(cost.latency_cycles, before)
            before = self.tail_latency[pipe] - cost.occupancy_cycles
            self.tail_latency[pipe] = max(cost.latency_cycles, before)
            return self.step(pipe, WORK, -1, cost.occupancy_cycles, 0)
        event = self.number_of(node.event)
        cycles = self.chip.flag_cycles
        if node.op == "set_flag":
            self.tail_latency[pipe] = 0
            return self.step(pipe, SET, event, cycles, self.last_latency[pipe])
        return self.step(pipe, WAIT, event, cycles, 0)

    def cross(self, node: Instruction) -> list[int]:
        """What a flag for other cores costs a core by itself: its pipe a slot."""
        self.sources.append(node)
        if node.op == "cross_wait":
            return []
        return [self.step(self.pipes[node.pipe], WORK, -1, self.chip.flag_cycles, 0)]

    def barrier(self, node: Instruction) -> list[int]:
        """A barrier on all pipes: everyone tells everyone, then everyone waits for everyone.

        It waits for results to be visible too, so flags after it add no latency again.
        """
        self.sources.append(node)
        names = self.names
        pipes = self.pipes.values()
        pairs = [(p, q) for p in pipes for q in pipes if p != q]
        number = {
            pair: self.events.setdefault(
                Event(names[pair[0]], names[pair[1]], 1000), len(self.events)
            )
            for pair in pairs
        }
        out = [self.step(p, SET, number[p, q], 0, self.last_latency[p]) for p, q in pairs]
        out += [self.step(q, WAIT, number[p, q], 0, 0) for p, q in pairs]
        cycles = self.chip.barrier_cycles
        for p in pipes:
            self.last_latency[p] = self.tail_latency[p] = 0
        return out + [self.step(p, WORK, -1, cycles, 0) for p in pipes]

    def finish(self, tree: tuple[int | Nest, ...], cores: int = 0) -> Compiled:
        """Return what was collected."""
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
    """Advance every pipe until it stops or waits; return -1 when done, else a stuck pipe."""
    (op, arg, cycles, latency) = code
    (pc, left, free) = pipes
    head, tail, base, token, token_by = flags
    steps, starts, ends, causes = records
    last = [-1 for _ in free]
    count = 0
    while True:
        stuck = -1
        before = count
        for p in range(len(free)):
            i = pc[p]
            now = free[p]
            while op[i] != STOP:
                kind = op[i]
                e = arg[i]
                if kind == END:  # of a loop's body: 0 turns are left before the first, and at last
                    left[i] = (left[i] if left[i] > 0 else cycles[i]) - 1
                    i = e if left[i] > 0 else i + 1
                    continue
                if kind == WAIT and head[e] == tail[e]:
                    stuck = p
                    break
                start = now
                cause = last[p]
                if kind == WAIT:
                    at = base[e] + head[e]
                    head[e] += 1
                    if token[at] > now:
                        now = token[at]
                        cause = token_by[at]
                now += cycles[i]
                if kind == SET:
                    at = base[e] + tail[e]
                    token[at] = now + latency[i]
                    token_by[at] = count
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
        if stuck < 0 or count == before:
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
"""Of the code: kind, event (or where a loop begins), cycles (or turns), latency, step."""


def _assemble(program: Compiled) -> tuple[list[_Row], list[int]]:
    """Return the pipes' codes laid end to end, and where each begins."""
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
    kept = None
    if record:
        steps, starts, finishes, causes = (list(map(int, c[:events])) for c in records)
        kept = Record([rows[i][4] for i in steps], starts, finishes, causes)
    return max(finish, default=0), ends, kept


def _flags(program: Compiled) -> tuple[list[int], ...]:
    """Return per event the flags taken and set, where its own begin; per flag its time, cause."""
    sets = [0] * len(program.events)
    for step, times in zip(program.steps, program.runs(), strict=True):
        if step.kind == SET:
            sets[step.event] += times
    base = [0, *accumulate(sets)]
    room = max(base[-1], 1)
    return [0] * len(base), [0] * len(base), base, [0] * room, [0] * room
