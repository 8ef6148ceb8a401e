"""A network's kernels as Chrome trace JSON, in msprof's field names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ascend_lab.graph.network import NetworkTimeline
from ascend_lab.output import write_whole


def network_events(times: NetworkTimeline) -> list[dict[str, Any]]:
    """Return one event per launch and per phase, microseconds from the start of the network.

    Rows: what the host launches, kernels, and per pipe how long it works within each kernel.
    """
    scale = 1e6 / times.chip.clock_hz
    rows = ["launch", "kernel", *_pipes(times)]
    events = [_meta("process_name", 0, {"name": f"Ascend Hardware ({times.chip.name})"})]
    events += [_meta("thread_name", i, {"name": name}) for i, name in enumerate(rows)]
    now = 0.0
    for op in times.operators:
        t = op.timeline
        events.append(_span(f"launch {op.name}", now, t.launch_cycles * scale, 0, {}))
        now += t.launch_cycles * scale
        args = {key: value for key, value in op.summary().items() if key != "name"}
        events.append(_span(op.name, now, t.cycles * scale, 1, args))
        for pipe, cycles in t.busy_cycles.items():
            events.append(_span(op.type, now, cycles * scale, rows.index(pipe), {"busy": cycles}))
        now += t.cycles * scale
    return events


def _pipes(times: NetworkTimeline) -> list[str]:
    return sorted({pipe for op in times.operators for pipe in op.timeline.busy_cycles})


def _meta(name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": 0, "tid": tid, "args": args}


def _span(name: str, start: float, length: float, tid: int, args: Any) -> dict[str, Any]:
    return {"name": name, "ph": "X", "ts": start, "dur": length, "pid": 0, "tid": tid,
            "cat": "operator", "args": args}  # fmt: skip


def write_network_trace(times: NetworkTimeline, file: str | Path) -> None:
    """Write the trace to `file`; raise `InputError` if that cannot be done."""
    write_whole(file, json.dumps({"traceEvents": network_events(times), "displayTimeUnit": "ns"}))
