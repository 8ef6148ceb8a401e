"""The scheduling problem of the MLSys 2026 contest: parse, price, bound and solve it."""

from ascend_lab.lab.contest.cost import Step, schedule_latencies, step_latency, working_set
from ascend_lab.lab.contest.problem import (
    Operation,
    Problem,
    lower_bound,
    read_problem,
    unfused_floor,
)
from ascend_lab.lab.contest.solve import Solution, solve

__all__ = [
    "Operation", "Problem", "Solution", "Step", "lower_bound", "read_problem",
    "schedule_latencies", "solve", "step_latency", "unfused_floor", "working_set",
]  # fmt: skip
