"""Defines the model's answer to a row: seconds, a lower bound, and what takes longest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ascend_lab.compare.rows import Work
from ascend_lab.machine.chip import Chip

if TYPE_CHECKING:
    from ascend_lab.compiler import Graph
    from ascend_lab.compiler.bound import Bound
    from ascend_lab.compiler.network import NetworkTimeline


@dataclass(frozen=True, slots=True)
class Estimate:
    """The model's seconds, the bound's (None: unknown), and in `limit` what takes longest.

    `busy` holds each pipe's share of the model's time, `marks` remarks on how the work was timed.
    """

    model_s: float
    bound_s: float | None
    limit: str
    busy: Mapping[str, float] = field(default_factory=dict)
    marks: tuple[str, ...] = ()


def at_peak(chip: Chip) -> Chip:
    """Return a chip whose memory has the peak rate of its interface, for bounds."""
    # kernels reach less than the interface's rate; a bound may not assume such a loss
    memory = replace(chip.device_memory, rate_bytes_per_s=chip.memory_peak_bytes_per_s)
    return replace(chip, device_memory=memory)


def with_bytes(bound: Bound, graph: Graph, chip: Chip) -> Bound:
    """Return a bound that also counts the bytes a graph reads and those it writes beyond L2's size.

    The bound of a network counts no bytes for slices of a tensor that nobody needs. A kernel alone
    has to read all of its input.
    """
    read = sum(graph.types[name].data_bytes for name in graph.inputs)
    written = sum(graph.types[name].data_bytes for name in graph.outputs)
    # 40 MB read and 60 MB written, 48 of which may stay in L2: 52 MB cross the memory interface.
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
    """Return the estimate of a chain of kernels.

    The host starts the first one; the others wait in the device's queue. A profiler's tasks do not
    include the host's part of that start, so it is subtracted if the row is a sum of such tasks.
    """
    from ascend_lab.compiler.compile import account

    limit = largest(account(times, bound)["ledger"])
    if work.timing == "kernel":
        host_start_s = chip.launch_overhead_s - chip.queued_launch_s
        return Estimate(times.time_s - host_start_s, bound.work_s, limit, {}, marks)
    return Estimate(times.time_s, bound.time_s, limit, {}, marks)


def largest(ledger: Mapping[str, float]) -> str:
    """Return the entry of a breakdown of time that takes longest, apart from the bound itself."""
    # the breakdown lists the bound and the losses on top of it
    losses_s = {entry: time_s for entry, time_s in ledger.items() if entry != "bound"}
    return max(losses_s, key=lambda entry: losses_s[entry], default="bound")


def fetched(estimate: Estimate, chip: Chip, cores: int) -> Estimate:
    """Return an estimate plus the time in which cores fetch the code of a library kernel.

    The cores fetch one after another: 48 cores take 48 times `library_fetch_s`.
    """
    # all cores ask for the same addresses, which memory serves one after another
    wait_s = cores * chip.library_fetch_s
    mark = f"with {1e6 * wait_s:.1f} us until {cores} cores have fetched its code"
    return replace(estimate, model_s=estimate.model_s + wait_s, marks=(*estimate.marks, mark))
