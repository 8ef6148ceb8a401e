"""A warp scheduler, cycle by cycle: the small truth behind the closed form of `occupancy`.

It issues one instruction per cycle and scheduler slot to the warp that has waited longest, keeps a
scoreboard per warp, and serves memory first come, first served. It is slow and exact; the closed
form is fast and a bound. Tests hold the two against each other, and a figure draws this one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ascend_lab.errors import MachineError
from ascend_lab.machines.occupancy import Simt, occupancy
from ascend_lab.machines.program import Arith, Branch, Instr, Kernel, Load, Store, Total, text

MAX_ISSUES = 200_000


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of a warp: bytes it moves, cycles until its result, steps it depends on."""

    text: str
    moved_bytes: int
    latency_cycles: int
    needs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Warp `warp` issued `text` at cycle `start` and its result was ready at `ready`."""

    warp: int
    text: str
    start: int
    ready: int


def steps_of(kernel: Kernel, machine: Simt, itemsize: int = 4) -> tuple[Step, ...]:
    """Return the steps of one full warp of a kernel without branches, loads coalesced."""
    row_bytes = machine.warp_lanes * itemsize
    writer: dict[str, int] = {}
    steps = [Step("index", 0, 1, ()) for _ in range(machine.thread_instructions)]
    for instr in kernel.body:
        if isinstance(instr, Branch | Total):
            raise MachineError(
                "the drawn schedule needs straight-line code", text(instr), "leave it out"
            )
        needs = tuple(writer[name] for name in _sources(instr) if name in writer)
        memory = isinstance(instr, Load | Store)
        latency = machine.port.latency_cycles if isinstance(instr, Load) else machine.arith_cycles
        steps.append(Step(text(instr), row_bytes if memory else 0, latency, needs))
        if isinstance(instr, Load | Arith):
            writer[instr.dst] = len(steps) - 1
    return tuple(steps)


def _sources(instr: Instr) -> tuple[str, ...]:
    if isinstance(instr, Arith):
        return tuple(arg for arg in instr.args if isinstance(arg, str))
    if isinstance(instr, Store):
        return (instr.src,)
    return (instr.index,) if isinstance(instr, Load) and instr.index else ()


def schedule(
    kernel: Kernel, machine: Simt, warps: int, resident: int | None = None
) -> tuple[Span, ...]:
    """Return when every instruction of every warp was issued.

    At most `resident` warps run at once (default: what `occupancy` allows); a warp that ends makes
    room for the next. Raises `MachineError` beyond MAX_ISSUES instructions.
    """
    steps = steps_of(kernel, machine)
    if warps < 1 or warps * len(steps) > MAX_ISSUES:
        raise MachineError(
            f"a drawn schedule needs 1 to {MAX_ISSUES} instructions",
            str(warps * len(steps)),
            "use fewer warps",
        )
    limit = occupancy(machine)["all"] if resident is None else resident
    return _simulate(steps, machine, warps, limit)


def _simulate(steps: Sequence[Step], machine: Simt, warps: int, resident: int) -> tuple[Span, ...]:
    """Step from issue to issue; the queue holds (cycle at which a warp can issue, order, warp)."""
    spans: list[Span] = []
    ready = [[0] * len(steps) for _ in range(warps)]
    position = [0] * warps
    queue = [(0, warp, warp) for warp in range(min(resident, warps))]
    waiting, order = len(queue), warps
    issue_at, port_free = 0.0, 0.0
    gap = 1 / machine.warps_per_cycle
    while queue:
        can, _, warp = heapq.heappop(queue)
        issue_at = max(issue_at, can)
        step = steps[position[warp]]
        start = int(issue_at)
        if step.moved_bytes:
            port_free = max(port_free, start) + step.moved_bytes / machine.port.rate_bytes_per_cycle
        done = start + step.latency_cycles
        if step.moved_bytes:
            done = max(done, math.ceil(port_free))
        ready[warp][position[warp]] = done
        spans.append(Span(warp, step.text, start, done))
        position[warp] += 1
        issue_at += gap
        order += 1
        if position[warp] < len(steps):
            needs = steps[position[warp]].needs
            can = max([start + 1, *(ready[warp][need] for need in needs)])
            heapq.heappush(queue, (can, order, warp))
        elif waiting < warps:
            heapq.heappush(queue, (start + 1, order, waiting))
            waiting += 1
    return tuple(spans)


def finish(spans: Sequence[Span]) -> int:
    """Return the cycle at which the last instruction has left and the last byte has moved."""
    return max(span.ready if span.text.startswith("st") else span.start + 1 for span in spans)
