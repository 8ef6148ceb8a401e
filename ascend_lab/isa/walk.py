"""Walk a program as the core would: each pipe in order, pipes held apart by flags only."""

from __future__ import annotations

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

    def visit(nodes: tuple[Node, ...], values: dict[str, int]) -> Iterator[Step]:
        for node in nodes:
            if isinstance(node, Loop):
                for i in range(node.count):
                    yield from visit(node.body, {**values, node.var: i})
            else:
                yield node, values

    return visit(project(program.body, pipe), dict(env))


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
    stream: Iterator[Step]
    next: Step | None
    barriers: int = 0


def interleave(
    program: Program, env: Mapping[str, int] | None = None, pick: Pick = first
) -> Iterator[Step]:
    """Yield every instruction in an order the flags allow; `pick` decides between pipes.

    A barrier on all pipes is yielded once, when every pipe has reached it. Raises `SyncError`
    with the cycle of events when no pipe can go on.
    """
    binding = dict(env or {name: 0 for name, _ in program.params})
    pipes: dict[str, _Pipe] = {}
    for name in program.pipes:
        stream = pipe_stream(program, name, binding)
        pipes[name] = _Pipe(stream, next(stream, None))
    raised: dict[Event, int] = {}
    while True:
        running = {n: p for n, p in pipes.items() if p.next is not None}
        if not running:
            return
        ready = [n for n, p in running.items() if _can_go(p, raised)]
        if not ready:
            if any(p.next is None or p.next[0].pipe != "ALL" for p in pipes.values()):
                raise SyncError(*_explain(running))
            step = next(p.next for p in running.values() if p.next)
            for p in pipes.values():
                p.next = next(p.stream, None)
            yield step
            continue
        pipe = pipes[pick(ready)]
        assert pipe.next is not None
        step = pipe.next
        event = step[0].event
        if event is not None:
            raised[event] = raised.get(event, 0) + (1 if step[0].op == "set_flag" else -1)
        pipe.next = next(pipe.stream, None)
        yield step


def _can_go(pipe: _Pipe, raised: Mapping[Event, int]) -> bool:
    assert pipe.next is not None
    instruction = pipe.next[0]
    if instruction.pipe == "ALL":
        return False
    return instruction.op != "wait_flag" or (
        instruction.event is not None and raised.get(instruction.event, 0) > 0
    )


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
