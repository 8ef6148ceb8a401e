"""The answer of the model to a row: seconds, a bound that no schedule beats, what limits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ascend_lab.compare.rows import Work
from ascend_lab.machine.chip import Chip

if TYPE_CHECKING:
    from ascend_lab.compiler import Bound, Graph, NetworkTimeline


@dataclass(frozen=True, slots=True)
class Estimate:
    """The model's seconds, those of the bound if one is certain, and in `limit` what takes longest.

    `busy` are shares of the model's own time, by pipe; `marks` what to keep in mind.
    """

    model_s: float
    bound_s: float | None
    limit: str
    busy: Mapping[str, float] = field(default_factory=dict)
    marks: tuple[str, ...] = ()


def at_peak(chip: Chip) -> Chip:
    """Return a chip whose memory moves what its interface could at best: nothing is quicker."""
    memory = replace(chip.device_memory, rate_bytes_per_s=chip.memory_peak_bytes_per_s)
    return replace(chip, device_memory=memory)


def with_bytes(bound: Bound, graph: Graph, chip: Chip) -> Bound:
    """Return a bound that also counts the bytes that a graph reads, and writes beyond its L2.

    The bound of a network takes a cut of a tensor for free; a kernel alone has to read it all.
    """
    read = sum(graph.types[name].data_bytes for name in graph.inputs)
    written = sum(graph.types[name].data_bytes for name in graph.outputs)
    crossing = read + max(0, written - chip.l2.size_bytes)
    memory_s = crossing / chip.device_memory.rate_bytes_per_s
    return replace(bound, memory=max(bound.memory, memory_s))


def of_tasks(
    work: Work,
    chip: Chip,
    times: NetworkTimeline,
    bound: Bound,
    marks: tuple[str, ...] = (),
) -> Estimate:
    """Return what a chain of kernels takes; a sum of a profiler's tasks is without the host's part.

    The host starts the first one only: the others wait in the device's queue.
    """
    from ascend_lab.compiler.compile import account

    limit = largest(account(times, bound)["ledger"])
    if work.timing == "kernel":
        by_host_s = chip.launch_overhead_s - chip.queued_launch_s
        return Estimate(times.time_s - by_host_s, bound.work_s, limit, {}, marks)
    return Estimate(times.time_s, bound.time_s, limit, {}, marks)


def largest(ledger: Mapping[str, float]) -> str:
    """Return what takes longest above the bound."""
    above = {part: time_s for part, time_s in ledger.items() if part != "bound"}
    return max(above, key=lambda part: above[part], default="bound")
