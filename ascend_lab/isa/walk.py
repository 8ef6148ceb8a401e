"""Walk a program as the core would: each pipe in order, pipes held apart by flags only."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ascend_lab.errors import SyncError
from ascend_lab.isa.program import Event, Instruction, Loop, Node, Program

Step = tuple[Instruction, dict[str, int]]
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
    """A pipe: what is left of its stream, its next step, and whether that can go on."""

    name: str
    stream: Iterator[Step]
    next: Step | None = None
    event: Event | None = None
    able: bool = False

    def advance(self, raised: Mapping[Event, int]) -> None:
        """Take the next step of the stream."""
        self.next = next(self.stream, None)
        instruction = self.next[0] if self.next else None
        waits = instruction is not None and instruction.op == "wait_flag"
        self.event = instruction.event if instruction and waits else None
        self.able = instruction is not None and instruction.pipe != "ALL"
        if waits:
            self.able = self.able and raised.get(self.event, 0) > 0  # type: ignore[arg-type]


def interleave(
    program: Program, env: Mapping[str, int] | None = None, pick: Pick = first
) -> Iterator[Step]:
    """Yield every instruction in an order the flags allow; `pick` decides between pipes.

    A barrier on all pipes is yielded once, when every pipe has reached it. Raises `SyncError`
    with the cycle of events when no pipe can go on.
    """
    binding, raised = dict(env or {name: 0 for name, _ in program.params}), dict[Event, int]()
    pipes = {n: _Pipe(n, pipe_stream(program, n, binding)) for n in program.pipes}
    all_pipes = tuple(pipes.values())
    for pipe in all_pipes:
        pipe.advance(raised)
    while True:
        ready = [pipe.name for pipe in all_pipes if pipe.able]
        if not ready:
            running = {n: p for n, p in pipes.items() if p.next is not None}
            if not running:
                return
            if any(p.next is None or p.next[0].pipe != "ALL" for p in all_pipes):
                raise SyncError(*_explain(running))
            barrier = all_pipes[0].next
            for pipe in all_pipes:
                pipe.advance(raised)
            assert barrier is not None
            yield barrier
            continue
        pipe = pipes[pick(ready)]
        step, event = pipe.next, None
        while step is not None and pipe.able and event is None:
            event = step[0].event
            if event is not None:
                raised[event] = raised.get(event, 0) + (1 if step[0].op == "set_flag" else -1)
                for other in all_pipes:
                    if other.event is not None and other.event == event:
                        other.able = raised[event] > 0
            pipe.advance(raised)
            yield step
            if pick is not first:
                break
            step = pipe.next


def _explain(running: Mapping[str, _Pipe]) -> tuple[str, str, str]:
    """Return message parts for a standstill: follow who waits for whom until it closes."""
    waits: dict[str, tuple[str, str]] = {}
    for name, pipe in running.items():
        assert pipe.next is not None
        event = pipe.next[0].event
        if event is not None:
            waits[name] = (event.src, f"{name} waits for {event}")
        else:
            waits[name] = ("", f"{name} waits at a barrier for all pipes")
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
