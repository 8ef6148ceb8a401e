"""Walk programs as the cores would: each pipe in order, pipes held apart by flags only.

A core that waits for others issues nothing behind the wait; its pipes run on to there. What issues
is one more pipe here, ISSUE, of barriers and such waits alone.
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
"""Chooses which of the pipes that can go on takes the next step."""


def first(pipes: Sequence[str]) -> str:
    """Pick the first pipe that can go on."""
    return pipes[0]


def pipe_stream(program: Program, pipe: str, env: Mapping[str, int]) -> Iterator[Step]:
    """Yield the instructions of one pipe in order, each with the loop variables' values."""
    outer = dict(env)
    ahead: list[Iterator[tuple[Node, dict[str, int]]]]
    ahead = [iter([(node, outer) for node in project(program.body, pipe)])]
    while ahead:
        for node, values in ahead[-1]:
            if isinstance(node, Loop):
                ahead.append(_turns(node, values))
                break
            yield node, values
        else:
            ahead.pop()


def _turns(loop: Loop, outer: Mapping[str, int]) -> Iterator[tuple[Node, dict[str, int]]]:
    """Yield the body of a loop, turn by turn."""
    for i in range(loop.count):
        values = {**outer, loop.var: i}
        for node in loop.body:
            yield node, values


def project(nodes: tuple[Node, ...], pipe: str) -> tuple[Node, ...]:
    """Return the part of a nest one pipe runs; barriers on all pipes belong to every pipe."""
    out: list[Node] = []
    for node in nodes:
        if isinstance(node, Loop):
            body = project(node.body, pipe)
            if body:
                out.append(Loop(node.var, node.count, body))
        elif node.pipe in (pipe, "ALL"):
            out.append(node)
    return tuple(out)


@dataclass(slots=True)
class _Pipe:
    """A pipe: what is left of its stream, its next step, and whether that can go on.

    `passed` counts the waits for other cores behind it, `issued` of its core those that are over.
    """

    name: str
    pipe: str
    core: "_Core"
    stream: Iterator[Step]
    next: Step | None = None
    event: Event | None = None
    able: bool = False
    passed: int = 0

    def advance(self) -> None:
        """Take the next step of the stream."""
        self.next = next(self.stream, None)
        self.look()

    def look(self) -> None:
        """Find out whether the next step can be taken."""
        self.event = None
        self.able = False
        if self.next is None:
            return
        instruction = self.next[0]
        core = self.core
        if instruction.op == "wait_flag":
            self.event = instruction.event
            self.able = core.raised.get(self.event, 0) > 0
        elif instruction.op == "cross_wait":
            flag = instruction.number("id")
            mine = self.passed == core.issued
            issues = mine and self.pipe == ISSUE and core.counters.ready(core.number, flag) > 0
            self.able = issues or not mine
        else:
            self.able = instruction.pipe != "ALL"

    @property
    def stops(self) -> bool:
        """Whether it stands at a barrier for all pipes."""
        return self.next is not None and self.next[0].pipe == "ALL" and self.next[0].op not in CROSS


@dataclass(slots=True)
class _Core:
    """A core: its pipes, the flags between them, and how many waits for other cores are over."""

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
    binding = dict(env or {name: 0 for name, _ in program.params})
    return (step[2:] for step in interleave_cores([(program, binding)], pick))


def interleave_cores(
    programs: Sequence[Core], pick: Pick = first, team: int = 1
) -> Iterator[tuple[int, str, Instruction, dict[str, int]]]:
    """Yield core, pipe, instruction and loop variables of cores that work together.

    They stand AI core by AI core, `team` to each, the cube core first. A wait for other cores is
    yielded on ISSUE when it is over, and on every other pipe when that passes it.
    """
    counters = Counters(len(programs), team)
    cores = list[_Core]()
    for number, (program, env) in enumerate(programs):
        core = _Core(number, counters)
        before = f"{number}." if len(programs) > 1 else ""
        waits = any(i.op == "cross_wait" for i, _ in program.instructions())
        for pipe in (*program.pipes, *([ISSUE] if waits else [])):
            core.pipes.append(_Pipe(before + pipe, pipe, core, pipe_stream(program, pipe, env)))
        cores.append(core)
    pipes = {pipe.name: pipe for core in cores for pipe in core.pipes}
    for one in pipes.values():
        one.advance()
    while True:
        ready = [pipe.name for pipe in pipes.values() if pipe.able]
        if ready:
            yield from _run(pipes[pick(ready)], cores, pick is first)
            continue
        running = [p for p in pipes.values() if p.next is not None]
        if not running:
            return
        held = next((c for c in cores if c.pipes and all(p.stops for p in c.pipes)), None)
        if held is None:
            raise SyncError(*_explain(running, team))
        barrier = held.pipes[0].next
        assert barrier is not None
        for one in held.pipes:
            one.advance()
        yield held.number, "ALL", *barrier


def _run(
    pipe: _Pipe, cores: Sequence[_Core], on: bool
) -> Iterator[tuple[int, str, Instruction, dict[str, int]]]:
    """Take steps of a pipe: one, or while it can go `on` up to the next flag."""
    core = pipe.core
    raised = pipe.core.raised
    marks = False
    while pipe.next is not None and pipe.able and not marks:
        instruction, values = pipe.next
        event = instruction.event
        op = instruction.op
        marks = not on or event is not None or op in CROSS
        yield core.number, pipe.pipe, instruction, values
        if event is not None:
            raised[event] = raised.get(event, 0) + (1 if op == "set_flag" else -1)
            for other in core.pipes:
                if other.event is not None and other.event == event:
                    other.able = raised[event] > 0
        elif op == "cross_set":
            core.counters.set(core.number, instruction.number("mode"), instruction.number("id"))
            for other in (p for c in cores for p in c.pipes if p.pipe == ISSUE):
                other.look()
        elif op == "cross_wait":
            pipe.passed += 1
            if pipe.pipe == ISSUE:
                core.issued += 1
                core.counters.taken[core.number, instruction.number("id")] += 1
                for other in core.pipes:
                    other.look()
        pipe.advance()


def _explain(running: Sequence[_Pipe], team: int) -> tuple[str, str, str]:
    """Return message parts for a standstill: follow who waits for whom until it closes."""
    waits: dict[str, tuple[str, str]] = {}
    across = list[str]()
    for pipe in running:
        assert pipe.next is not None
        event = pipe.next[0].event
        if pipe.next[0].op == "cross_wait":
            if pipe.pipe == ISSUE:
                flag = pipe.next[0].number("id")
                name = core_name(pipe.core.number, team)
                across.append(f"{name} waits for cross-core flag {flag}")
        elif event is not None:
            source = pipe.name.removesuffix(pipe.pipe) + event.src
            waits[pipe.name] = (source, f"{pipe.name} waits for {event}")
        else:
            waits[pipe.name] = ("", f"{pipe.name} waits at a barrier for all pipes")
    if across:
        needed = "deadlock: a cross_set for every cross_wait, before the wait that blocks it"
        return needed, ", ".join(across), "add the missing set, or move it before that wait"
    name = min(waits, key=lambda n: (waits[n][0] == "", n))
    chain: list[str] = []
    while name in waits and name not in chain:
        chain.append(name)
        name = waits[name][0]
    texts = [waits[n][1] for n in chain]
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
