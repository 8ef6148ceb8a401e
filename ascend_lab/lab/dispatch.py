"""Who tells the device what to run next: the host, operator by operator, or the device itself.

A chip's launch overhead L is paid by two: L - d by the host, d by the device's own scheduler, which
starts each task whoever sent it. With t(i) the time of kernel i on the device,

    waits  the host sends a kernel, waits for its end, sends the next:  sum of L + t(i)
    ahead  the host sends without waiting:  end(i) = max(end(i - 1), (i + 1) (L - d)) + d + t(i)
    sink   the host sends the whole graph at once:  L - d + sum of d + t(i)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ascend_lab.errors import InputError
from ascend_lab.graph import Compiled, Graph, simulate_graph

WAYS = ("waits", "ahead", "sink")
TASK_S = 1e-6
"""The part d of a launch that is the device's own. Assumed: no figure is published."""
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """When the host is busy with launches and the device with kernels; (start, end) in seconds."""

    way: str
    host: tuple[Span, ...]
    device: tuple[Span, ...]

    @property
    def time_s(self) -> float:
        """End of the last kernel."""
        return self.device[-1][1]

    @property
    def busy_share(self) -> float:
        """Share of the time in which a kernel runs."""
        return sum(end - start for start, end in self.device) / self.time_s


def dispatch(
    times_s: Sequence[float], way: str, launch_s: float, task_s: float = TASK_S
) -> Dispatch:
    """Return when each of the kernels runs.

    Raises `InputError` for an unknown way, no kernels, or a task that takes longer than a launch.
    """
    if way not in WAYS or not times_s:
        got = f"{len(times_s)} kernels, {way!r}"
        raise InputError(f"kernels and a way: {', '.join(WAYS)}", got, "choose one")
    if not 0 <= task_s <= launch_s:
        raise InputError(f"a task from 0 to {launch_s} s", f"{task_s} s", "it is part of a launch")
    send_s = launch_s - task_s
    host: list[Span] = []
    device: list[Span] = []
    end = 0.0
    for i, time_s in enumerate(times_s):
        if way != "sink" or i == 0:
            begin = end if way == "waits" else i * send_s
            host.append((begin, begin + send_s))
        start = max(end, host[-1][1]) + task_s
        end = start + time_s
        device.append((start, end))
    return Dispatch(way, tuple(host), tuple(device))


def kernel_times(compiled: Compiled) -> dict[str, float]:
    """Return the seconds of each kernel of a network on the device, in order, launches left out."""
    clock_hz = compiled.chip.clock_hz
    return {op.name: op.timeline.cycles / clock_hz for op in simulate_graph(compiled).operators}


def crossing_bytes(graph: Graph, position: int) -> int:
    """Return the bytes that go over if the nodes from `position` on run on another device.

    Inputs of the graph that the second part reads count, and outputs that the first part writes
    do not; constants lie where they are needed.
    """
    before = set(graph.inputs) | {n for node in graph.nodes[:position] for n in node.outputs}
    after = {name for node in graph.nodes[position:] for name in node.inputs}
    return sum(graph.types[name].size_bytes for name in before & after)
