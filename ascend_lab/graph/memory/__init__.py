"""Memory planning: buffers with lifetimes in, an offset for each out."""

# fmt: off
# isort: off
from ascend_lab.graph.memory.buffers import (
    Buffer, Plan, peak_live_bytes, read_csv, share, simulate_writes, verify,
)
from ascend_lab.graph.memory.planner import HEURISTICS, METHODS, plan, reuse_distance_bytes

__all__ = [
    "HEURISTICS", "METHODS", "Buffer", "Plan", "peak_live_bytes", "plan", "read_csv",
    "reuse_distance_bytes", "share", "simulate_writes", "verify",
]
