"""Strategies of operators on many devices: the problem, exact and heuristic answers."""

# fmt: off
# isort: off
from ascend_lab.parallel.strategy.exact import Solution, solve
from ascend_lab.parallel.strategy.graph_problem import (
    GraphProblem, data_parallel, on_topology, problem_of, roofline,
)
from ascend_lab.parallel.strategy.problem import (
    FORBIDDEN, Edge, Evaluation, Node, Problem, evaluate, parse_problem, read_problem,
)
from ascend_lab.parallel.strategy.local import greedy, halving

__all__ = [
    "FORBIDDEN", "Edge", "Evaluation", "GraphProblem", "Node", "Problem", "Solution",
    "data_parallel", "evaluate", "greedy", "halving", "on_topology", "parse_problem",
    "problem_of", "read_problem", "roofline", "solve",
]
