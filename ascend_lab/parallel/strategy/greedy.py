"""The greedy rule in the spirit of recursive halving: heaviest node first, never back.

Nodes by weight descending; each takes the strategy with the least cost of its own and towards the
neighbours that have already chosen. MindSpore's double-recursive search chooses so in every round.
"""

from __future__ import annotations

import numpy as np

from ascend_lab.parallel.strategy.problem import Problem


def greedy(problem: Problem) -> tuple[int, ...]:
    """Return the greedy choice, heaviest by largest usage; memory is not looked at.

    Like the rule it imitates, it may exceed the limit: `evaluate` tells.
    """
    nodes = problem.nodes
    totals = [np.array(node.costs, np.float64) for node in nodes]
    near: list[list[tuple[int, np.ndarray]]] = [[] for _ in nodes]
    for edge in problem.edges:
        u, v = edge.source, edge.target
        table = np.array(edge.costs, np.float64).reshape(len(totals[u]), len(totals[v]))
        if u == v:
            totals[u] += np.diag(table)
        else:
            near[u].append((v, table))
            near[v].append((u, table.T))
    chosen: dict[int, int] = {}
    for node in sorted(range(len(nodes)), key=lambda v: -max(nodes[v].usages)):
        chosen[node] = int(np.argmin(totals[node]))
        for other, table in near[node]:
            totals[other] += table[chosen[node]]
    return tuple(chosen[node] for node in range(len(nodes)))
