"""The plain simulator: every pipe steps through its instructions, one event at a time.

This is the definition of time in this package; the fast engine must equal it to the cycle. The
same function runs on Python lists or, compiled by Numba when that is installed, on arrays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numpy as np

from ascend_lab.errors import SimulationError, SyncError
from ascend_lab.sim.compiled import SET, WAIT, Compiled, Nest

END, STOP = 1, 5
MAX_EVENTS = 100_000_000
"""Above this many steps memory and patience run out."""


# One function on purpose: Numba compiles it as a whole, and the plain version saves the calls.
def _run(code: Any, pipes: Any, flags: Any, record: bool, records: Any) -> int:
    """Advance every pipe until it stops or waits; return -1 when done, else a stuck pipe."""
    (op, arg, cycles, latency), (pc, left, free) = code, pipes
    head, tail, base, token, token_by = flags
    steps, starts, ends, causes = records
    last, count = [-1 for _ in free], 0
    while True:
        stuck, before = -1, count
        for p in range(len(free)):
            i, now = pc[p], free[p]
            while op[i] != STOP:
                kind, e = op[i], arg[i]
                if kind == END:  # of a loop's body: 0 turns are left before the first, and at last
                    left[i] = (left[i] if left[i] > 0 else cycles[i]) - 1
                    i = e if left[i] > 0 else i + 1
                    continue
                if kind == WAIT and head[e] == tail[e]:
                    stuck = p
                    break
                start, cause = now, last[p]
                if kind == WAIT:
                    at = base[e] + head[e]
                    head[e] += 1
                    if token[at] > now:
                        now, cause = token[at], token_by[at]
                now += cycles[i]
                if kind == SET:
                    at = base[e] + tail[e]
                    token[at], token_by[at] = now + latency[i], count
                    tail[e] += 1
                if record:
                    steps[count], starts[count], ends[count], causes[count] = i, start, now, cause
                    last[p] = count
                count += 1
                i += 1
            pc[p], free[p] = i, now
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
    code, entry = list[_Row](), list[int]()

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
