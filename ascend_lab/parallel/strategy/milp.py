"""The strategy problem as a mixed-integer linear program, solved by HiGHS through SciPy.

x[v, s] is 1 where node v takes strategy s; y[e, i, j] is the share of edge e at group i of its
source and group j of its target. Minimise the sum of costs times x and y such that

    sum over s of x[v, s] = 1
    sum over j of y[e, i, j] = sum over s in group i of x[source, s]      (and alike for targets)
    sum over the nodes of a row of usage[v, s] x[v, s] <= room of the row

Only x must be whole: then y is too. Strategies whose lines in a table differ by a constant form a
group: the constant moves into the node's cost, and one y serves all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import ClusterError, UnsupportedError
from ascend_lab.parallel.strategy.reduced import Costs, Reduced

INFEASIBLE = 2
"""Status of SciPy's `milp` for a program that is proven to have no solution."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Positions of the best choice found (None: none), and a cost no choice goes below."""

    positions: dict[int, int] | None
    lower_bound: float


@dataclass(slots=True)
class _Matrix:
    """Coefficients of equations, collected triple by triple."""

    rows: list[NDArray[Any]]
    columns: list[NDArray[Any]]
    values: list[NDArray[Any]]
    count: int = 0

    def add(self, row: NDArray[Any], column: NDArray[Any], value: float | NDArray[Any]) -> None:
        """Put `value` at each (row, column)."""
        self.rows.append(row)
        self.columns.append(column)
        self.values.append(np.broadcast_to(value, row.shape))

    def build(self, columns: int) -> Any:
        """Return the matrix in SciPy's sparse form."""
        from scipy.sparse import csr_array

        if not self.rows:
            return csr_array((self.count, columns))
        values, rows, cols = map(np.concatenate, (self.values, self.rows, self.columns))
        return csr_array((values, (rows, cols)), shape=(self.count, columns))


def scipy_available() -> bool:
    """Return whether SciPy is installed (`pip install ascend-lab[exact]`)."""
    return find_spec("scipy") is not None


def solve_milp(small: Reduced, time_limit_s: float = math.inf) -> Answer:
    """Solve a reduced problem; UnsupportedError without SciPy, ClusterError if proven impossible.

    Out of time, the answer has the best choice found so far, if any, and the bound reached.
    """
    if not scipy_available():
        raise UnsupportedError(
            "SciPy for an exact strategy", "none", "pip install 'ascend-lab[exact]'"
        )
    if not small.costs:
        return Answer({}, small.constant)
    costs, equal, offsets, choices = _formulate(small)
    found = _solver(small, costs, equal, offsets, choices, time_limit_s)
    if found.status == INFEASIBLE:
        raise ClusterError("a choice of strategies within the usage limit", "proof: none exists")
    bound = found.mip_dual_bound
    known = bound is not None and math.isfinite(bound)
    lower = float(bound) + small.constant if known else -math.inf
    if found.x is None:
        return Answer(None, lower)
    values = {
        node: found.x[first : first + len(small.costs[node])] for node, first in offsets.items()
    }
    return Answer({node: int(np.argmax(own)) for node, own in values.items()}, lower)


def _solver(
    small: Reduced,
    costs: Costs,
    equal: _Matrix,
    offsets: dict[int, int],
    choices: int,
    time_limit_s: float,
) -> Any:
    """Hand the program to HiGHS and return SciPy's result; columns of cost inf stay 0."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    columns = len(costs)
    rhs = np.zeros(equal.count)
    rhs[: len(offsets)] = 1.0
    constraints = [LinearConstraint(equal.build(columns), rhs, rhs)]
    if small.rows:
        constraints.append(LinearConstraint(*_memory(small, offsets, columns)))
    options = {"mip_rel_gap": 0.0}
    if math.isfinite(time_limit_s):
        options["time_limit"] = max(time_limit_s, 0.0)
    allowed = np.isfinite(costs)
    return milp(
        np.where(allowed, costs, 0.0),
        integrality=(np.arange(columns) < choices).astype(int),
        bounds=Bounds(0, allowed.astype(float)),
        constraints=constraints,
        options=options,
    )


def _formulate(small: Reduced) -> tuple[Costs, _Matrix, dict[int, int], int]:
    """Return costs of columns, equations, first column of each node, number of x."""
    costs = {node: own.copy() for node, own in small.costs.items()}
    offsets, choices = {}, 0
    equal = _Matrix([], [], [])
    for node, own in costs.items():
        offsets[node] = choices
        span = np.arange(choices, choices + len(own))
        equal.add(np.full(len(own), equal.count), span, 1.0)
        equal.count += 1
        choices += len(own)
    columns, tables = choices, []
    for (u, v), table in small.edges.items():
        rest, by_row, by_column = _grouped(table, costs[u], costs[v])
        if rest.shape == (1, 1):
            continue
        ids = np.where(np.isfinite(rest), 0, -1)
        used = ids == 0
        ids[used] = columns + np.arange(np.count_nonzero(used))
        columns += int(np.count_nonzero(used))
        tables.append(rest[used])
        for node, lines, labels in ((u, ids, by_row), (v, ids.T, by_column)):
            place, _ = np.nonzero(lines >= 0)
            equal.add(equal.count + place, lines[lines >= 0], 1.0)
            equal.add(equal.count + labels, offsets[node] + np.arange(len(labels)), -1.0)
            equal.count += len(lines)
    return np.concatenate([*costs.values(), *tables]), equal, offsets, choices


def _grouped(table: Costs, left: Costs, right: Costs) -> tuple[Costs, NDArray[Any], NDArray[Any]]:
    """Return the table of groups and the group of every row and column.

    Minima of rows and columns move into the costs of the nodes, which change in place.
    """
    rows = table.min(axis=1)
    rest = table - np.where(np.isfinite(rows), rows, 0.0)[:, None]
    columns = rest.min(axis=0)
    rest = rest - np.where(np.isfinite(columns), columns, 0.0)
    left += rows
    right += columns
    rest, by_row = np.unique(rest, axis=0, return_inverse=True)
    turned, by_column = np.unique(rest.T, axis=0, return_inverse=True)
    return turned.T, by_row.ravel(), by_column.ravel()


def _memory(small: Reduced, offsets: dict[int, int], columns: int) -> tuple[Any, float, Any]:
    """Return matrix, lower and upper bounds of the rows of memory, in a unit near the room."""
    used = _Matrix([], [], [])
    limits = []
    for nodes, room in small.rows:
        unit = max(room, 1) / 1024
        for node in nodes:
            if node in offsets:
                own = small.usages[node]
                span = offsets[node] + np.arange(len(own))
                used.add(np.full(len(own), used.count), span, own / unit)
        used.count += 1
        limits.append(room / unit)
    return used.build(columns), -np.inf, np.array(limits)
