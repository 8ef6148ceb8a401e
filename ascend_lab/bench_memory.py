"""The challenging MiniMalloc instances, packed on one core: part of `lab.py bench`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ascend_lab.bench_table import Figure
from ascend_lab.data import data_path
from ascend_lab.graph.memory import plan, simulate_writes, verify
from ascend_lab.graph.memory.table import read_csv

CAPACITY_BYTES = 1_048_576
TIME_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Packing:
    """What the planner reached on one instance."""

    name: str
    buffers: int
    height_bytes: int
    lower_bound_bytes: int
    method: str
    optimal: bool
    time_s: float

    @property
    def over(self) -> float:
        """Return the height over the capacity, minus 1; at most 0 when it is packed."""
        return self.height_bytes / CAPACITY_BYTES - 1


def measure(names: Sequence[str] = "ABCDEF", time_limit_s: float = TIME_LIMIT_S) -> list[Packing]:
    """Plan each instance, check the plan on real bytes, and return what was reached.

    The planner runs in one thread.
    """
    rows = []
    for name in names:
        buffers = read_csv(data_path(f"minimalloc/{name}.{CAPACITY_BYTES}.csv"))
        start = time.perf_counter()
        found = plan(buffers, CAPACITY_BYTES, time_limit_s=time_limit_s)
        taken = time.perf_counter() - start
        verify(found, buffers)
        simulate_writes(buffers, found)
        high, bound = found.height_bytes, found.lower_bound_bytes
        rows.append(Packing(name, len(buffers), high, bound, found.method, found.optimal, taken))
    return rows


def report(rows: Sequence[Packing]) -> str:
    """Return the table as text."""
    lines = [f"memory plans into {CAPACITY_BYTES} bytes, at most {TIME_LIMIT_S:.0f} s each"]
    for row in rows:
        verdict = "packed" if row.over <= 0 else f"{row.over:.1%} over"
        lines.append(
            f"  {row.name} {row.buffers:4d} buffers  height {row.height_bytes:8d}  "
            f"{verdict:10s} {row.time_s:6.2f} s  {row.method}"
        )
    return "\n".join(lines)


def memory_figures() -> list[Figure]:
    """Return what `lab.py bench` prints: how many are packed, how far above the others are."""
    rows = measure()
    packed = sum(row.over <= 0 for row in rows)
    worst = max((row.over for row in rows), default=0.0)
    print("\n" + report(rows) + "\n")
    return [
        Figure("MiniMalloc instances packed", f"{packed} of {len(rows)}", ">= 4 of 6", packed >= 4),
        Figure("  the others above capacity", f"{max(worst, 0.0):.1%}", "<= 5 %", worst <= 0.05),
    ]


if __name__ == "__main__":
    print(report(measure()))
