"""The plain simulator: every pipe steps through its instructions, one event at a time.

This is the definition of time in this package; the fast engine must equal it to the cycle. The
same function runs on Python lists or, compiled by Numba when that is installed, on arrays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np

from ascend_lab.errors import SimulationError, SyncError
from ascend_lab.sim.compiled import SET, WAIT, WORK, Compiled, Nest

BEGIN, END, STOP = 0, 1, 5
MAX_EVENTS = 100_000_000
"""Above this many steps memory and patience run out."""


# One function on purpose: Numba compiles it as a whole, and the plain version saves the calls.
def _run(  # noqa: C901
    op: Any,
    arg: Any,
    cycles: Any,
    latency: Any,
    pc: Any,
    left: Any,
    free: Any,
    head: Any,
    tail: Any,
    base: Any,
    token: Any,
    token_by: Any,
    record: Any,
    rec_step: Any,
    rec_start: Any,
    rec_end: Any,
    rec_cause: Any,
) -> int:
    """Advance every pipe until it stops or waits; return -1 when done, else a stuck pipe."""
    pipes = len(free)
    last = [-1 for _ in range(pipes)]
    count = 0
    while True:
        moved = False
        stuck = -1
        for p in range(pipes):
            i = pc[p]
            now = free[p]
            while True:
                kind = op[i]
                if kind == WORK:
                    start = now
                    cause = last[p]
                    now = start + cycles[i]
                elif kind == WAIT:
                    e = arg[i]
                    h = head[e]
                    if h == tail[e]:
                        break
                    start = now
                    cause = last[p]
                    ready = token[base[e] + h]
                    head[e] = h + 1
                    if ready > now:
                        now = ready
                        cause = token_by[base[e] + h]
                    now += cycles[i]
                elif kind == SET:
                    e = arg[i]
                    start = now
                    cause = last[p]
                    now = start + cycles[i]
                    t = tail[e]
                    token[base[e] + t] = now + latency[i]
                    token_by[base[e] + t] = count
                    tail[e] = t + 1
                elif kind == BEGIN:
                    left[i] = cycles[i]
                    i = i + 1 if cycles[i] > 0 else arg[i] + 1
                    continue
                elif kind == END:
                    j = arg[i]
                    left[j] -= 1
                    i = j + 1 if left[j] > 0 else i + 1
                    continue
                else:
                    break
                if record:
                    rec_step[count] = i
                    rec_start[count] = start
                    rec_end[count] = now
                    rec_cause[count] = cause
                    last[p] = count
                count += 1
                moved = True
                i += 1
            pc[p] = i
            free[p] = now
            if op[i] != STOP:
                stuck = p
        if stuck < 0:
            return -1
        if not moved:
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


@dataclass(slots=True)
class _Code:
    """Per-pipe code laid end to end: loop begin/end and steps."""

    op: list[int]
    arg: list[int]
    cycles: list[int]
    latency: list[int]
    step: list[int]
    entry: list[int]


def _assemble(program: Compiled) -> _Code:
    code = _Code([], [], [], [], [], [])

    def put(op: int, arg: int, cycles: int, latency: int, step: int) -> None:
        code.op.append(op)
        code.arg.append(arg)
        code.cycles.append(cycles)
        code.latency.append(latency)
        code.step.append(step)

    def visit(nodes: Sequence[int | Nest], pipe: int) -> None:
        for node in nodes:
            if isinstance(node, Nest):
                begin = len(code.op)
                put(BEGIN, 0, program.counts[node.loop], 0, -1)
                visit(node.body, pipe)
                if len(code.op) == begin + 1:
                    for column in (code.op, code.arg, code.cycles, code.latency, code.step):
                        column.pop()
                    continue
                code.arg[begin] = len(code.op)
                put(END, begin, 0, 0, -1)
            elif program.steps[node].pipe == pipe:
                s = program.steps[node]
                put(s.kind, s.event, program.cycles[node], program.latency[node], node)

    for pipe in range(len(program.pipes)):
        code.entry.append(len(code.op))
        visit(program.tree, pipe)
        put(STOP, 0, 0, 0, -1)
    return code


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
    free = _zeros(len(program.pipes), compiled)
    code = _assemble(program)
    records = [_zeros(events if record else 1, compiled) for _ in range(4)]
    run: Callable[..., int] = _compiled_run() if compiled else _run
    stuck = run(*_arguments(program, code, free, compiled), record, *records)
    if stuck >= 0:
        needed = "flags that let every pipe finish"
        got = f"pipe {program.pipes[stuck]} waits forever"
        raise SyncError(needed, got, "run the sanitizer: it names the cycle of events")
    ends = [int(t) for t in free[: len(program.pipes)]]
    finish = [t + tail for t, tail in zip(ends, program.tail_latency, strict=True)]
    kept = None
    if record:
        steps, starts, finishes, causes = (list(map(int, c[:events])) for c in records)
        kept = Record([code.step[i] for i in steps], starts, finishes, causes)
    return max(finish, default=0), ends, kept


def _zeros(count: int, compiled: bool) -> Any:
    return np.zeros(max(count, 1), np.int64) if compiled else [0] * max(count, 1)


def _arguments(program: Compiled, code: _Code, free: Any, compiled: bool) -> list[Any]:
    """Lay out the arguments of `_run` up to `record`: code, pipe states, room for every flag."""
    sets = [0] * len(program.events)
    for step, times in zip(program.steps, program.runs(), strict=True):
        if step.kind == SET:
            sets[step.event] += times
    base = [0, *accumulate(sets)]
    columns = (code.op, code.arg, code.cycles, code.latency, code.entry, base)
    op, arg, cycles, latency, entry, first = (
        np.asarray(c or [0], np.int64) if compiled else c for c in columns
    )
    head, tail = _zeros(len(sets), compiled), _zeros(len(sets), compiled)
    token, token_by = _zeros(base[-1], compiled), _zeros(base[-1], compiled)
    left = _zeros(len(code.op), compiled)
    return [op, arg, cycles, latency, entry, left, free, head, tail, first, token, token_by]
