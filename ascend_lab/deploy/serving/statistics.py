"""Counts the requests and batches of a served model, for statistics and metrics as in Triton.

    statistics: https://github.com/triton-inference-server/server, docs/protocol
                (extension_statistics.md)
    metrics:    there, docs/user_guide/metrics.md

Times are in nanoseconds. A request has a total time (request), and the times of reading it
(compute_input), of waiting (queue), of the model's batch (compute_infer) and of writing the answer
(compute_output).
"""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

PARTS = ("queue", "compute_input", "compute_infer", "compute_output")
REJECTED = "REJECTED"
OTHER = "OTHER"
"""The reason of failures other than a full queue."""


@dataclass(slots=True)
class Duration:
    """A number of timed events, and the sum of their nanoseconds."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """Count one more time."""
        self.count += 1
        self.ns += ns


def durations(names: Iterable[str]) -> dict[str, Duration]:
    """Return a duration of 0 for each name."""
    return {name: Duration() for name in names}


@dataclass(slots=True)
class Statistics:
    """The counts of one version of a model since it was loaded."""

    name: str
    version: str
    success: Duration = field(default_factory=Duration)
    failures: dict[str, Duration] = field(default_factory=lambda: durations((REJECTED, OTHER)))
    parts: dict[str, Duration] = field(default_factory=lambda: durations(PARTS))
    batches: dict[int, dict[str, Duration]] = field(default_factory=dict)
    """Number of rows of a batch -> the durations of such batches by part."""
    inferences: int = 0
    executions: int = 0
    last_ms: int = 0

    def executed(self, rows: int, requests: int, ns: dict[str, int]) -> None:
        """Count a batch: its rows and requests, and its nanoseconds by part."""
        self.executions += 1
        self.inferences += rows
        self.last_ms = int(time.time() * 1000)
        parts = self.batches.setdefault(rows, durations(PARTS[1:]))
        for part_name, spent_ns in ns.items():
            parts[part_name].add(spent_ns)
        # the batch takes its time for each of its requests: 3 of them count it 3 times
        for _ in range(requests):
            self.parts["compute_infer"].add(sum(ns.values()))

    def as_dict(self) -> dict[str, Any]:
        """Return the object of Triton's statistics extension."""
        failed = self.failures.values()
        failure = Duration(sum(f.count for f in failed), sum(f.ns for f in failed))
        # The server has no cache, but clients expect both entries.
        empty = asdict(Duration())
        return {
            "name": self.name,
            "version": self.version,
            "last_inference": self.last_ms,
            "inference_count": self.inferences,
            "execution_count": self.executions,
            "inference_stats": {
                "success": asdict(self.success),
                "fail": asdict(failure),
                **_as_dicts(self.parts),
                "cache_hit": empty,
                "cache_miss": empty,
            },
            "batch_stats": [
                {"batch_size": rows, **_as_dicts(parts)}
                for rows, parts in sorted(self.batches.items())
            ],
        }

    def metrics(self, pending: int) -> dict[str, dict[str, int]]:
        """Return the metrics: "name kind" -> label -> value."""
        # json.dumps escapes quotes in a name, as the text format of Prometheus requires.
        label = f'model={json.dumps(self.name)},version="{self.version}"'
        counters = {
            "request_success": self.success.count,
            "count": self.inferences,
            "exec_count": self.executions,
            "request_duration_us": self.success.ns // 1000,
        }
        counters |= {
            f"{part_name}_duration_us": self.parts[part_name].ns // 1000 for part_name in PARTS
        }
        rows = {f"{key} counter": {label: value} for key, value in counters.items()}
        rows["request_failure counter"] = {
            f'{label},reason="{reason}"': failed.count for reason, failed in self.failures.items()
        }
        rows["pending_request_count gauge"] = {label: pending}
        return rows


def _as_dicts(parts: dict[str, Duration]) -> dict[str, dict[str, int]]:
    return {name: asdict(duration) for name, duration in parts.items()}


def metrics_text(tables: Iterable[dict[str, dict[str, int]]]) -> str:
    """Return the metrics of several versions in the text form of Prometheus."""
    # Prometheus requires the lines of a metric to be adjacent, including those of all versions.
    merged: dict[str, dict[str, int]] = {}
    for table in tables:
        for kind, values in table.items():
            merged.setdefault(kind, {}).update(values)
    lines = []
    for kind, values in merged.items():
        # `kind` is for example "request_success counter": values have only the first word.
        name = f"nv_inference_{kind.split()[0]}"
        lines.append(f"# TYPE nv_inference_{kind}\n")
        lines += [f"{name}{{{label}}} {value}\n" for label, value in values.items()]
    return "".join(lines)
