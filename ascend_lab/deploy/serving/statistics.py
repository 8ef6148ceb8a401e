"""What a server counts of one version of a model, as the statistics and the metrics of Triton.

    statistics: https://github.com/triton-inference-server/server, docs/protocol
                (extension_statistics.md)
    metrics:    there, docs/user_guide/metrics.md

Times are kept in nanoseconds. Of a request they are: all of it (request), reading it
(compute_input), waiting (queue), the model's batch (compute_infer) and writing the answer
(compute_output).
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

PARTS = ("queue", "compute_input", "compute_infer", "compute_output")
REJECTED = "REJECTED"
OTHER = "OTHER"
"""Why a request failed: the queue was full, or something else."""


@dataclass(slots=True)
class Duration:
    """How often something was timed, and its nanoseconds together."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """Count one time more."""
        self.count += 1
        self.ns += ns

    def told(self) -> dict[str, int]:
        """Return it as statistics have it."""
        return {"count": self.count, "ns": self.ns}


def durations(names: Iterable[str]) -> dict[str, Duration]:
    """Return a duration of nothing for each name."""
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
    """By the rows that ran together: input, infer and output of the batch."""
    inferences: int = 0
    executions: int = 0
    last_ms: int = 0

    def executed(self, rows: int, requests: int, ns: dict[str, int]) -> None:
        """Count a batch: its rows and requests, and its nanoseconds by part."""
        self.executions += 1
        self.inferences += rows
        self.last_ms = int(time.time() * 1000)
        parts = self.batches.setdefault(rows, durations(PARTS[1:]))
        for part, spent_ns in ns.items():
            parts[part].add(spent_ns)
        for _ in range(requests):
            self.parts["compute_infer"].add(sum(ns.values()))

    def told(self) -> dict[str, Any]:
        """Return the object of the statistics extension."""
        failed = self.failures.values()
        fail = {"count": sum(f.count for f in failed), "ns": sum(f.ns for f in failed)}
        nothing = {"count": 0, "ns": 0}
        return {
            "name": self.name,
            "version": self.version,
            "last_inference": self.last_ms,
            "inference_count": self.inferences,
            "execution_count": self.executions,
            "inference_stats": {
                "success": self.success.told(),
                "fail": fail,
                **{part: self.parts[part].told() for part in PARTS},
                "cache_hit": nothing,
                "cache_miss": nothing,
            },
            "batch_stats": [
                {"batch_size": rows, **{part: parts[part].told() for part in parts}}
                for rows, parts in sorted(self.batches.items())
            ],
        }

    def metrics(self, pending: int) -> dict[str, dict[str, int]]:
        """Return the metrics: by name and kind, the values by label."""
        label = f'model={json.dumps(self.name)},version="{self.version}"'
        counters = {
            "request_success": self.success.count,
            "count": self.inferences,
            "exec_count": self.executions,
            "request_duration_us": self.success.ns // 1000,
        }
        counters |= {f"{part}_duration_us": self.parts[part].ns // 1000 for part in PARTS}
        rows = {f"{key} counter": {label: value} for key, value in counters.items()}
        rows["request_failure counter"] = {
            f'{label},reason="{reason}"': failed.count for reason, failed in self.failures.items()
        }
        rows["pending_request_count gauge"] = {label: pending}
        return rows


def metrics_text(tables: Iterable[dict[str, dict[str, int]]]) -> str:
    """Return the metrics of several versions in the text form of Prometheus."""
    together: dict[str, dict[str, int]] = {}
    for table in tables:
        for kind, values in table.items():
            together.setdefault(kind, {}).update(values)
    lines = []
    for kind, values in together.items():
        name = f"nv_inference_{kind.split()[0]}"
        lines.append(f"# TYPE nv_inference_{kind}\n")
        lines += [f"{name}{{{label}}} {value}\n" for label, value in values.items()]
    return "".join(lines)
