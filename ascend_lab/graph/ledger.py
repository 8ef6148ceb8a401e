"""Where the time of a network goes: its bound, and by name all that lies above it.

    time = bound + launches + cube + cube fill + memory + vector + copies
         + AI CPU + barriers + waits

Each phase of a kernel is cut from its cycles, layer by layer: what is counted first hides what is
counted later, so that nothing counts twice and no term is negative. What limits the bound comes
first; of the layers the bound's own seconds are then taken away, its own kind first.

`graph.zoo.why` says it of a model in a line. A network of few products can still be slow: every
kernel is a launch, a depthwise layer fills a sixteenth of the cube, and many small tensors move
more bytes than they compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ascend_lab.errors import InputError
from ascend_lab.graph.bound import Bound
from ascend_lab.graph.network import NetworkTimeline
from ascend_lab.graph.tasks import CpuTimeline
from ascend_lab.sim.timeline import Timeline

TERMS: Mapping[str, str] = {
    "bound": "what no schedule or slicing goes below, one launch of it",
    "launches": "kernels started, but for the first",
    "cube": "products with zeros that pad, or in halos, or hidden by the bound",
    "cube fill": "the slowest cube beyond an even share: heads, idle cores",
    "memory": "device memory beyond the bound's bytes: spills, second reads",
    "vector": "vector work that neither cube nor memory hides",
    "copies": "copies between buffers that nothing above hides",
    "AI CPU": "operators without a kernel, and their launches",
    "barriers": "all cores wait for each other, inside a kernel or between two of one launch",
    "waits": "all that is left: latencies, flags, turns",
}
"""The terms in order, and what each is."""
FIRST = {"cube": ("cube", "cube fill"), "memory": ("memory",), "vector": ("vector",)}
"""Layers that are cut first, by what limits the bound; results leave on a pipe that copies."""
LAYERS = ("cube", "cube fill", "memory", "vector", "copies", "waits")


def ledger(times: NetworkTimeline, bound: Bound) -> dict[str, float]:
    """Return seconds by term, in the order of `TERMS`; they add up to the time of the network.

    Raises `InputError` for a bound more than a cycle above the time, one of another graph or chip.
    """
    if bound.time_s > times.time_s + 1 / times.chip.clock_hz:
        got = f"{bound.time_s * 1e6:.3f} us, the time is {times.time_s * 1e6:.3f} us"
        raise InputError("a bound of these times", got, "bound_of the graph and chip timed")
    first = FIRST.get(bound.limit, ())
    order = (*first, *(name for name in LAYERS if name not in first))
    cycles, launches = Counter[str](), 0
    for op in times.operators:
        if isinstance(op.timeline, CpuTimeline):
            cycles["AI CPU"] += op.timeline.total_cycles
            continue
        if op.timeline.start in ("cold", "queued"):
            launches += op.timeline.launch_cycles
        else:
            cycles["barriers"] += op.timeline.launch_cycles
        cycles["barriers"] += op.timeline.sync_cycles
        for phase in op.timeline.phases:
            _cut(phase, order, cycles)
    clock = times.chip.clock_hz
    found = {name: cycles[name] / clock for name in (*order, "barriers", "AI CPU")}
    found["launches"] = launches / clock
    found["bound"] = _taken(found, bound.launch, ("launches",))
    found["bound"] += _taken(found, bound.work_s, (*order, "barriers", "AI CPU", "launches"))
    return {name: found[name] for name in TERMS}


def _taken(found: dict[str, float], seconds: float, order: tuple[str, ...]) -> float:
    """Take seconds from terms in order, as far as they go; return how many."""
    left = seconds
    for name in order:
        part = min(found[name], left)
        found[name] -= part
        left -= part
    return seconds - left


def account(times: NetworkTimeline, bound: Bound) -> dict[str, Any]:
    """Return bound, ledger, bytes and counts of a network as plain data, ready for JSON."""
    return {
        "bound_s": bound.time_s,
        "ledger": ledger(times, bound),
        "memory_bytes": times.memory_bytes,
        "kernels": times.kernels,
        "launches": times.launches,
    }


def ledger_table(*ledgers: Mapping[str, float]) -> list[str]:
    """Return the terms as lines: of each ledger microseconds and share, and what the term is."""
    totals = [sum(found.values()) or 1.0 for found in ledgers]
    heads = ("before", "after") if len(ledgers) == 2 else ()
    lines = [f"where the time goes:{''.join(f'{head:>20}' for head in heads)}".rstrip()]
    for name, meaning in TERMS.items():
        parts = [found[name] for found in ledgers]
        if max(parts) >= 5e-9:
            pairs = zip(parts, totals, strict=True)
            columns = (f"{s * 1e6:10.2f} us {s / total:6.1%}" for s, total in pairs)
            lines.append(f"  {name:9} {' '.join(columns)}  {meaning}")
    return lines


def _cut(phase: Timeline, order: tuple[str, ...], cycles: Counter[str]) -> None:
    """Add what each layer of a phase is longer than those before it."""
    chip, height, busy = phase.chip, 0.0, Counter[str]()
    for pipe, worked in phase.busy_cycles.items():
        kind = pipe.rpartition(".")[2]  # of AIC.M in a mix launch
        busy[kind] = max(busy[kind], worked)
    share = phase.macs / (chip.macs_per_cycle(phase.dtype) * chip.core_count) if phase.macs else 0.0
    memory = phase.memory_bytes / chip.device_memory.rate_bytes_per_s * chip.clock_hz
    reach = {
        "cube": share,
        "cube fill": busy["M"],
        "memory": memory,
        "vector": busy["V"],
        "copies": max((c for pipe, c in busy.items() if pipe not in ("M", "V")), default=0),
        "waits": phase.cycles,
    }
    for name in order:
        top = min(max(reach[name], height), phase.cycles)
        cycles[name] += top - height  # type: ignore[assignment]
        height = top
