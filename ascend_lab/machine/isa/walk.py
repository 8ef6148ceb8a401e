"""Yields the instructions of programs one by one, in an order that real cores could take.

If MTE2 loads a tile and sets a flag for which V waits, V's work on the tile is yielded after the
load. Each pipe runs its instructions in order; between pipes only flags and barriers decide the
order. A core that waits for other cores issues no further instruction until the wait is over; its
pipes finish what was issued before. The unit that issues instructions is modelled as one more pipe,
ISSUE. Its stream holds only the barriers and the waits for other cores.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ascend_lab.errors import SyncError
from ascend_lab.machine.isa.launch import Counters, core_name
from ascend_lab.machine.isa.program import CROSS, Event, Instruction, Loop, Node, Program

ISSUE = "ISSUE"
Step = tuple[Instruction, dict[str, int]]
Core = tuple[Program, Mapping[str, int]]
Pick = Callable[[Sequence[str]], str]
"""Chooses, from the names of the pipes that can go on, the one that takes the next step."""


def first(pipes: Sequence[str]) -> str:
    """Return the first of the pipes that can go on; the default `pick` of a walk."""
    return pipes[0]


def pipe_stream(program: Program, pipe: str, env: Mapping[str, int]) -> Iterator[Step]:
    """Yield the instructions of one pipe in order, each with the loop variables' values."""
    outer = dict(env)
    # One iterator per open loop, innermost last: an explicit stack, because recursive generators
    # would pass every instruction through all levels of the nest.
    open_loops: list[Iterator[tuple[Node, dict[str, int]]]]
    open_loops = [iter([(node, outer) for node in project(program.body, pipe)])]
    while open_loops:
        for node, values in open_loops[-1]:
            if isinstance(node, Loop):
                open_loops.append(_passes(node, values))
                break
            yield node, values
        else:
            open_loops.pop()


def _passes(loop: Loop, outer: Mapping[str, int]) -> Iterator[tuple[Node, dict[str, int]]]:
    """Yield the nodes of a loop's body, pass by pass."""
    for i in range(loop.count):
        values = {**outer, loop.var: i}
        for node in loop.body:
            yield node, values


def project(nodes: tuple[Node, ...], pipe: str) -> tuple[Node, ...]:
    """Return a loop nest with the instructions of one pipe only; a barrier belongs to all pipes."""
    projected: list[Node] = []
    for node in nodes:
        if isinstance(node, Loop):
            body = project(node.body, pipe)
            # a loop without an instruction of this pipe is left out: its passes would yield nothing
            if body:
                projected.append(Loop(node.var, node.count, body))
        elif node.pipe in (pipe, "ALL"):
            projected.append(node)
    return tuple(projected)


@dataclass(slots=True)
class _Pipe:
    """A pipe: its remaining stream, its next step, and whether it can take that step now.

    `event` is the flag that the next step waits for, or None. `passed` counts the waits for other
    cores that this pipe has passed; `issued` of the core counts those that are over.
    """

    name: str
    pipe: str
    core: "_Core"
    stream: Iterator[Step]
    next: Step | None = None
    event: Event | None = None
    can_step: bool = False
    passed: int = 0

    def advance(self) -> None:
        """Take the next step of the stream."""
        self.next = next(self.stream, None)
        self.update()

    def update(self) -> None:
        """Set `can_step`, and `event` if the next step waits for a flag."""
        self.event = None
        self.can_step = False
        if self.next is None:
            return
        instruction = self.next[0]
        core = self.core
        if instruction.op == "wait_flag":
            self.event = instruction.event
            self.can_step = core.raised.get(self.event, 0) > 0
        elif instruction.op == "cross_wait":
            flag = instruction.int_attr("id")
            # A wait that ISSUE has not passed yet holds up all pipes of the core.
            is_pending = self.passed == core.issued
            if is_pending:
                is_ready = self.pipe == ISSUE and core.counters.ready(core.number, flag) > 0
                self.can_step = is_ready
            else:
                self.can_step = True
        else:
            # `interleave_cores` itself takes a barrier, when all pipes have reached it
            self.can_step = instruction.pipe != "ALL"

    @property
    def at_barrier(self) -> bool:
        """Whether the next step of the pipe is a barrier on all pipes."""
        return self.next is not None and self.next[0].pipe == "ALL" and self.next[0].op not in CROSS


@dataclass(slots=True)
class _Core:
    """A core: its pipes, the flags between them, and how many waits for other cores are over.

    `raised` counts, per event, the flags that are set and not yet waited for.
    """

    number: int
    counters: Counters
    pipes: list[_Pipe] = field(default_factory=list)
    raised: dict[Event | None, int] = field(default_factory=dict)
    issued: int = 0


def interleave(
    program: Program, env: Mapping[str, int] | None = None, pick: Pick = first
) -> Iterator[Step]:
    """Yield every instruction in an order the flags allow; `pick` decides between pipes.

    A barrier on all pipes is yielded once, when every pipe has reached it. Raises `SyncError`
    with the cycle of events when no pipe can go on.
    """
    # without values the walk is that of the core at position 0 of every axis
    binding = dict(env or {name: 0 for name, _ in program.params})
    # the core's number and the pipe's name are dropped
    return (step[2:] for step in interleave_cores([(program, binding)], pick))


def interleave_cores(
    programs: Sequence[Core], pick: Pick = first, team: int = 1
) -> Iterator[tuple[int, str, Instruction, dict[str, int]]]:
    """Yield (core, pipe, instruction, loop variables) for cores that work together.

    `team` programs make an AI core, the cube core's first. A wait for other cores is yielded on
    ISSUE when it is over, and again on every other pipe when the pipe passes it.
    """
    counters = Counters(len(programs), team)
    cores = list[_Core]()
    for number, (program, env) in enumerate(programs):
        core = _Core(number, counters)
        # MTE2 of two cores must differ: "0.MTE2" and "1.MTE2"
        prefix = f"{number}." if len(programs) > 1 else ""
        waits = any(i.op == "cross_wait" for i, _ in program.instructions())
        for pipe in (*program.pipes, *([ISSUE] if waits else [])):
            core.pipes.append(_Pipe(prefix + pipe, pipe, core, pipe_stream(program, pipe, env)))
        cores.append(core)
    pipes = {pipe.name: pipe for core in cores for pipe in core.pipes}
    for pipe_state in pipes.values():
        pipe_state.advance()
    while True:
        ready = [pipe.name for pipe in pipes.values() if pipe.can_step]
        if ready:
            yield from _take_steps(pipes[pick(ready)], cores, pick is first)
            continue
        unfinished = [p for p in pipes.values() if p.next is not None]
        if not unfinished:
            return
        # No pipe can go on: all pipes of some core are at a barrier, or this is a deadlock.
        stopped = next((c for c in cores if c.pipes and all(p.at_barrier for p in c.pipes)), None)
        if stopped is None:
            raise SyncError(*_explain_deadlock(unfinished, team))
        barrier = stopped.pipes[0].next
        assert barrier is not None
        for pipe_state in stopped.pipes:
            pipe_state.advance()
        yield stopped.number, "ALL", *barrier


def _take_steps(
    pipe: _Pipe, cores: Sequence[_Core], to_next_flag: bool
) -> Iterator[tuple[int, str, Instruction, dict[str, int]]]:
    """Take one step of a pipe, or all its steps up to and including the next flag.

    Only a flag changes which other pipes can go on. A caller that always picks the first pipe gets
    the same order either way, and faster with all steps at once.
    """
    core = pipe.core
    raised = pipe.core.raised
    last_step = False
    while pipe.next is not None and pipe.can_step and not last_step:
        instruction, values = pipe.next
        event = instruction.event
        op = instruction.op
        last_step = not to_next_flag or event is not None or op in CROSS
        yield core.number, pipe.pipe, instruction, values
        if event is not None:
            raised[event] = raised.get(event, 0) + (1 if op == "set_flag" else -1)
            # only for pipes that wait for this event `can_step` may have changed
            for waiting in core.pipes:
                if waiting.event is not None and waiting.event == event:
                    waiting.can_step = raised[event] > 0
        elif op == "cross_set":
            # a set may be the last one that a core waited for: all issuing units look again
            core.counters.set(core.number, instruction.int_attr("mode"), instruction.int_attr("id"))
            for issue_pipe in (p for c in cores for p in c.pipes if p.pipe == ISSUE):
                issue_pipe.update()
        elif op == "cross_wait":
            pipe.passed += 1
            # the issuing unit takes the flag; then the other pipes of the core may pass the wait
            if pipe.pipe == ISSUE:
                core.issued += 1
                core.counters.waits[core.number, instruction.int_attr("id")] += 1
                for held_pipe in core.pipes:
                    held_pipe.update()
        pipe.advance()


def _explain_deadlock(unfinished: Sequence[_Pipe], team: int) -> tuple[str, str, str]:
    """Return (needed, got, remedy) for pipes that all wait, with the cycle of waits if there is."""
    waits: dict[str, tuple[str, str]] = {}  # pipe: (the pipe that it waits for, the wait in words)
    cross_core_waits = list[str]()
    for pipe in unfinished:
        assert pipe.next is not None
        event = pipe.next[0].event
        if pipe.next[0].op == "cross_wait":
            if pipe.pipe == ISSUE:
                flag = pipe.next[0].int_attr("id")
                name = core_name(pipe.core.number, team)
                cross_core_waits.append(f"{name} waits for cross-core flag {flag}")
        elif event is not None:
            # "0.MTE2" waits for a flag of pipe V: that of its own core, "0.V"
            source = pipe.name.removesuffix(pipe.pipe) + event.src
            waits[pipe.name] = (source, f"{pipe.name} waits for {event}")
        else:
            waits[pipe.name] = ("", f"{pipe.name} waits at a barrier for all pipes")
    if cross_core_waits:
        needed = "deadlock: a cross_set for every cross_wait, before the wait that blocks it"
        got = ", ".join(cross_core_waits)
        return needed, got, "add the missing set, or move it before that wait"
    # begin at a pipe that waits for a flag, if any does: a barrier waits for no one in particular
    name = min(waits, key=lambda n: (waits[n][0] == "", n))
    chain: list[str] = []
    while name in waits and name not in chain:
        chain.append(name)
        name = waits[name][0]
    texts = [waits[n][1] for n in chain]
    # in the chain MTE3, V, MTE2 with MTE2 waiting for V the cycle is V, MTE2
    if name in chain:
        cycle = ", ".join(waits[n][1] for n in chain[chain.index(name) :])
        return (
            "deadlock: flags set before they are waited for",
            f"the cycle {cycle}",
            "move one set_flag before the wait that blocks it",
        )
    end = f"{name} has finished" if name else "other pipes never reach it"
    return (
        "deadlock: a set_flag for every wait_flag",
        f"{', '.join(texts)}, but {end}",
        "add the missing set_flag or drop the wait",
    )
