"""The reference simulator: every pipe steps through its instructions, one event at a time.

If MTE2 loads from cycle 0 to 100 and then sets a flag, V, which waits for the flag, cannot begin
before cycle 100 plus the latency of the load. The time of a program depends on its pipes, flags and
loops, and on the cycles of each instruction. `Compiler` reduces a program to these. The result of
`run_reference` is by definition the time of a program: the fast simulator (`fast`) must give the
same cycles. The same function runs on Python lists and, if Numba is installed, compiled on arrays.
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
"""Types of step: WORK, SET, WAIT; the engines add BEGIN and END of a loop, STOP at a code's end."""
MAX_EVENTS = 100_000_000
"""Largest number of steps to simulate: a record of each, 4 numbers of 8 bytes, takes 3.2 GB."""


class Step(NamedTuple):
    """One static step: its pipe, type, event number (-1 for work) and source instruction."""

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
    """A compiled program: the structure of its steps and loops, durations, and trip counts.

    `cores` is 0 for the program of one core. For several cores it is their number, and the top of
    the tree has one nest per core. Step s occupies its pipe for `cycles[s]`; if it is a SET, its
    flag is raised `latency[s]` cycles later. `tail_latency[p]` is how long after the last step of
    pipe p its results become visible, at which the program ends. It is 0 if the pipe sets a flag
    after that work: then the latency delays the flag instead.
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
        # For each pipe, how long after its last step all its results are visible: for a flag that
        # is set now, and for the end of the program.
        self.last_latency: list[int] = []
        self.tail_latency: list[int] = []

    def alone(self, program: Program) -> Compiled:
        """Return one program in compiled form."""
        self.begin(program.pipes)
        return self.finish(self.tree(program.body))

    def begin(self, pipes: Sequence[str], prefix: str = "") -> None:
        """Begin the program of a core; `prefix` stands before the names of its pipes."""
        self.prefix = prefix
        start = len(self.names)
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
        # the flags of a queue share one event object, which is looked up faster by its identity
        number = self.event_numbers.get(id(event))
        if number is None:
            event_of_core = event
            prefix = self.prefix
            if prefix:  # with "AIC." the event M -> FIX becomes AIC.M -> AIC.FIX
                event_of_core = replace(event, src=prefix + event.src, dst=prefix + event.dst)
            number = self.events.setdefault(event_of_core, len(self.events))
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
            # the pipe that waits for this flag waits for the latency: it no longer delays the end
            self.tail_latency[pipe] = 0
            return self.step(pipe, SET, event, cycles, self.last_latency[pipe])
        return self.step(pipe, WAIT, event, cycles, 0)

    def cross(self, node: Instruction) -> list[int]:
        """Add a flag between cores to the program of a single core: only issuing it takes time."""
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
        # Id 1000 is used by no program: hardware has 4 or 8 event ids per pair of pipes.
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
        """Return all programs added so far in compiled form."""
        return Compiled(
            pipes=tuple(self.names),
            events=tuple(self.events),
            steps=tuple(self.steps),
            tree=tree,
            sources=tuple(self.sources),
            cycles=tuple(self.cycles),
            latency=tuple(self.latency),
            tail_latency=tuple(self.tail_latency),
            counts=tuple(self.counts),
            cores=cores,
        )


def compile_program(program: Program, chip: Chip, surroundings: Surroundings) -> Compiled:
    """Return `program` in compiled form; the durations are those of `instruction_cost`."""
    return Compiler(chip, costs_of([program], chip, surroundings)).alone(program)


# -- event by event --------------------------------------------------------------------------------
# One function, although it is long: Numba compiles it as a whole, and in Python it saves calls.
def _run(code: Any, pipes: Any, flags: Any, record: bool, records: Any) -> int:
    """Advance every pipe until it stops or waits; return -1 at the end, else a deadlocked pipe.

    - code: by position, the columns of `_Row`
    - pipes: by pipe, its position in the code, and the cycle from which it is free; by position,
      how many passes of the loop that ends there are left
    - flags: by event, how often it was waited for, how often it was set, and the slot of its first
      set; by slot, the cycle at which the flag is raised, and the recorded step that raised it
    - records: if `record`, the columns of `Record`
    """
    kinds, arguments, cycles, latency = code
    position_of, passes_left, free_at = pipes
    wait_count, set_count, first_slot, raised_at, raised_by = flags
    steps, starts, ends, causes = records
    last_record = [-1 for _ in free_at]  # the last recorded step of each pipe
    count = 0
    while True:
        stuck = -1
        count_before_round = count
        for pipe in range(len(free_at)):
            position = position_of[pipe]
            now = free_at[pipe]
            while kinds[position] != STOP:
                kind = kinds[position]
                argument = arguments[position]
                if kind == END:
                    # 0 passes left means the end of the first pass, as a finished loop leaves 0.
                    # Of 3 passes, `passes_left` is 2, 1, 0 after each.
                    remaining = passes_left[position]
                    passes_left[position] = (remaining if remaining > 0 else cycles[position]) - 1
                    position = argument if passes_left[position] > 0 else position + 1
                    continue
                if kind == WAIT and wait_count[argument] == set_count[argument]:
                    stuck = pipe
                    break
                start = now
                cause = last_record[pipe]
                if kind == WAIT:
                    slot = first_slot[argument] + wait_count[argument]
                    wait_count[argument] += 1
                    if raised_at[slot] > now:
                        now = raised_at[slot]
                        cause = raised_by[slot]
                now += cycles[position]
                if kind == SET:
                    slot = first_slot[argument] + set_count[argument]
                    raised_at[slot] = now + latency[position]
                    raised_by[slot] = count
                    set_count[argument] += 1
                if record:
                    steps[count] = position
                    starts[count] = start
                    ends[count] = now
                    causes[count] = cause
                    last_record[pipe] = count
                count += 1
                position += 1
            position_of[pipe] = position
            free_at[pipe] = now
        # a waiting pipe is deadlocked only if no other pipe moved in this round
        if stuck < 0 or count == count_before_round:
            return stuck


@cache
def _compiled_run() -> Callable[..., int]:
    import numba

    compiled: Callable[..., int] = numba.njit(cache=True)(_run)
    return compiled


def numba_available() -> bool:
    """Tell whether Numba is installed, which the compiled variant needs."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Record:
    """Every event of a run: step number, start and end cycle, and the event that it waited for."""

    step: Sequence[int]
    start: Sequence[int]
    end: Sequence[int]
    cause: Sequence[int]


_Row = tuple[int, int, int, int, int]
"""A row of the code: type of step, event, cycles, latency, step number.

For an END the second number is the position where the loop begins, the third its trip count.
"""


def _assemble(program: Compiled) -> tuple[list[_Row], list[int]]:
    """Return the codes of all pipes one after another, and where each begins.

    A pipe gets the loops in which it has work, so that the pipes run through them independently.
    """
    code = list[_Row]()
    entry = list[int]()

    def add_code(nodes: Sequence[int | Nest], pipe: int) -> None:
        for node in nodes:
            if not isinstance(node, Nest):
                step = program.steps[node]
                if step.pipe == pipe:
                    durations = program.cycles[node], program.latency[node]
                    code.append((step.kind, step.event, *durations, node))
            elif program.counts[node.loop] > 0:
                begin = len(code)
                add_code(node.body, pipe)
                if len(code) > begin:
                    code.append((END, begin, program.counts[node.loop], 0, -1))

    for pipe in range(len(program.pipes)):
        entry.append(len(code))
        add_code(program.tree, pipe)
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
    visible = [end + latency for end, latency in zip(ends, program.tail_latency, strict=True)]
    full_record = None
    if record:
        positions, starts, step_ends, causes = (list(map(int, c[:events])) for c in records)
        full_record = Record([rows[i][4] for i in positions], starts, step_ends, causes)
    return max(visible, default=0), ends, full_record


def _flags(program: Compiled) -> tuple[list[int], ...]:
    """Return the arrays `flags` of `_run` before the first step."""
    sets = [0] * len(program.events)
    for step, times in zip(program.steps, program.runs(), strict=True):
        if step.kind == SET:
            sets[step.event] += times
    first_slot = [0, *accumulate(sets)]  # 3 and 2 sets of two events: slots 0..2 and 3..4
    event_count = len(first_slot)
    slot_count = max(first_slot[-1], 1)
    wait_count = [0] * event_count
    set_count = [0] * event_count
    return wait_count, set_count, first_slot, [0] * slot_count, [0] * slot_count
