"""A timeline as Chrome trace JSON: it opens in Perfetto and in MindStudio Insight."""

import json
from pathlib import Path
from typing import Any

from ascend_lab.output import write_whole
from ascend_lab.sim.timeline import Timeline


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Return Chrome trace events with msprof's field names: ph, name, ts, dur, pid, tid, args.

    Times are microseconds. One complete event (ph "X") per instruction, waits marked with the
    flag that held them, and metadata events (ph "M") that name process and pipes.
    """
    scale = 1e6 / timeline.chip.clock_hz
    pid = 0
    pipes = timeline.compiled.pipes
    events: list[dict[str, Any]] = [
        _meta("process_name", pid, 0, {"name": f"AI Core ({timeline.chip.name})"})
    ]
    for tid, pipe in enumerate(pipes):
        events.append(_meta("thread_name", pid, tid, {"name": pipe}))
        events.append(_meta("thread_sort_index", pid, tid, {"sort_index": tid}))
    for span in timeline.spans:
        args: dict[str, Any] = {"start_cycle": span.start, "cycles": span.end - span.start}
        if span.stall_cycles:
            args |= {"stall_cycles": span.stall_cycles, "waits_for": span.cause}
        events.append(
            {
                "name": span.name,
                "cat": "stall" if span.stall_cycles else "instruction",
                "ph": "X",
                "ts": span.start * scale,
                "dur": (span.end - span.start) * scale,
                "pid": pid,
                "tid": pipes.index(span.pipe),
                "args": args,
            }
        )
    return events


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}


def write_trace(timeline: Timeline, file: str | Path) -> None:
    """Write the trace to `file`; raise `InputError` if that cannot be done."""
    data = {"traceEvents": trace_events(timeline), "displayTimeUnit": "ns"}
    write_whole(file, json.dumps(data))
