"""Strategies of operators on many devices: the problem, exact and heuristic answers."""

from __future__ import annotations

from ascend_lab.parallel.strategy.greedy import greedy
from ascend_lab.parallel.strategy.problem import (
    FORBIDDEN,
    Edge,
    Evaluation,
    Node,
    Problem,
    evaluate,
)
from ascend_lab.parallel.strategy.reading import parse_problem, read_problem
from ascend_lab.parallel.strategy.solve import Solution, solve

__all__ = [
    "FORBIDDEN",
    "Edge",
    "Evaluation",
    "Node",
    "Problem",
    "Solution",
    "evaluate",
    "greedy",
    "parse_problem",
    "read_problem",
    "solve",
]
