"""Chooses how each operator is cut over many devices: exactly, or by heuristics.

`solve` finds the optimum with HiGHS through SciPy, or uses heuristics if SciPy is missing. The
problem is a mixed-integer linear program: x[v, s] is 1 if node v takes strategy s, and y[e, i, j]
is the share of edge e at group i of its source's strategies and group j of its target's. Minimise
the sum of costs times x and y such that

    sum over s of x[v, s] = 1
    sum over j of y[e, i, j] = sum over s in group i of x[source, s]      (same for targets)
    sum over the nodes of a row of usage[v, s] x[v, s] <= room of the row

Only x must be an integer: then y is one too. Strategies whose rows (or columns) in the cost table
of an edge differ by a constant form a group: the constant is added to the node's cost, and one y
serves the whole group.
"""

# fmt: off
# isort: off
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from ascend_lab.errors import ClusterError, UnsupportedError
from ascend_lab.cluster.parallel.strategy.graph_problem import (
    GraphProblem, data_parallel, on_topology, problem_of, roofline,
)
from ascend_lab.cluster.parallel.strategy.local import greedy, halving, search
from ascend_lab.cluster.parallel.strategy.problem import (
    FORBIDDEN, Costs, Edge, Evaluation, Node, Problem, Reduced, evaluate, parse_problem,
    read_problem, reduce_problem,
)

__all__ = [
    "FORBIDDEN", "Edge", "Evaluation", "GraphProblem", "Node", "Problem", "Solution",
    "data_parallel", "evaluate", "greedy", "halving", "on_topology", "parse_problem",
    "problem_of", "read_problem", "roofline", "solve",
]
# fmt: on
# isort: on

Method = Literal["auto", "exact", "heuristic"]
HEURISTIC_SHARE = 0.25
"""Part of a time limit spent on the heuristics before the solver starts."""
FEW_SWEEPS = 20
SWEEPS = 200
"""Numbers of sweeps of the heuristics: before a solver without time limit, and otherwise."""
MAX_REPAIRS = 3
"""How often limits are tightened because the solver's tolerance let a choice exceed them."""
ROUNDING = 1e-9
"""Assumed relative error of the solver's bound, which is a floating-point number."""
INFEASIBLE = 2
"""Status of SciPy's `milp` for a program that is proven to have no solution."""
Found = tuple[int, tuple[int, ...], str, int]
"""A solution that was found: cost, strategies, method, peak usage."""


@dataclass(frozen=True, slots=True)
class Solution:
    """One strategy per node, with its cost and usage, and a bound on the optimum.

    `proven` says that no choice costs less, up to a relative error of 1e-9. No choice costs less
    than `lower_bound`. `method` is the method that found the solution: "milp" or "messages".
    """

    cost: int
    strategies: tuple[int, ...]
    lower_bound: int
    proven: bool
    peak_usage: int
    usage_limit: int | None
    method: str

    @property
    def gap(self) -> float:
        """The largest possible distance to the optimum, as a share of the bound."""
        if self.proven:
            return 0.0
        # Cost 105 above a bound of 100: a gap of 5 %, though the cost may be the optimum.
        above = self.cost - self.lower_bound
        return above / self.lower_bound if self.lower_bound > 0 else math.inf

    def as_dict(self) -> dict[str, Any]:
        """Return the solution as a dictionary for JSON."""
        return {**asdict(self), "strategies": list(self.strategies)}


def solve(
    problem: Problem, time_limit_s: float | None = None, method: Method = "auto", seed: int = 0
) -> Solution:
    """Return the best strategies found, proven optimal where the solver finishes in time.

    "auto" uses SciPy's solver if it is installed, "heuristic" never, "exact" raises
    UnsupportedError without it. Raises ClusterError if no choice is allowed, or none was found.
    """
    limit_s = math.inf if time_limit_s is None else time_limit_s
    end_s = time.monotonic() + limit_s
    reduced = reduce_problem(problem)
    solutions: list[Found] = []

    def offer(positions: dict[int, int] | None, method_name: str) -> None:
        """Add a choice to the solutions if it is allowed."""
        if positions is not None:
            strategies = reduced.restore(positions)
            evaluation = evaluate(problem, strategies)
            if evaluation.feasible:
                solution = (evaluation.cost, strategies, method_name, evaluation.peak_usage)
                solutions.append(solution)

    exact = method == "exact" or (method == "auto" and scipy_available())
    sweeps = FEW_SWEEPS if exact and time_limit_s is None else SWEEPS
    share = HEURISTIC_SHARE if exact else 1.0
    offer(search(reduced, sweeps, share * (end_s - time.monotonic()), seed), "messages")
    lower = reduced.lower_bound
    if exact:
        lower = max(lower, _exact(reduced, solutions, end_s, offer))
    if not solutions:
        raise ClusterError(
            f"an allowed choice of strategies for {problem.name or 'the problem'}",
            "none found, and no proof that there is none",
            "allow more time, or install ascend-lab[exact]" if not exact else "allow more time",
        )
    return _best_solution(solutions, lower, problem.usage_limit)


def _best_solution(solutions: list[Found], lower: float, usage_limit: int | None) -> Solution:
    """Return the solution of least cost; `lower` is a bound with the solver's rounding errors."""
    cost, strategies, method_name, peak_usage = min(solutions)
    tolerance = 1e-6 + ROUNDING * abs(cost)
    # all costs are integers, so the bound can be rounded up
    integer_bound = math.ceil(lower - tolerance)
    proven = integer_bound >= cost or lower >= cost - tolerance
    return Solution(
        cost=cost,
        strategies=strategies,
        lower_bound=cost if proven else integer_bound,
        proven=proven,
        peak_usage=peak_usage,
        usage_limit=usage_limit,
        method=method_name,
    )


def _exact(
    reduced: Reduced,
    solutions: list[Found],
    end_s: float,
    offer: Callable[[dict[int, int] | None, str], None],
) -> float:
    """Call `offer` with each solution that the solver finds, and return its lower bound.

    Strategies that must cost more than the first of `solutions` are left out. If the solver's
    tolerance lets a choice slightly exceed a memory limit, the limit is tightened.
    """
    if solutions:
        first_cost = solutions[0][0]
        reduced = reduced.below(first_cost)
    try:
        answer = solve_milp(reduced, end_s - time.monotonic())
    except ClusterError:
        if solutions:  # a solution exists: the solver's arithmetic failed on huge costs
            return -math.inf
        raise
    lower = answer.lower_bound
    for _ in range(MAX_REPAIRS):
        positions = answer.positions
        offer(positions, "milp")
        if positions is None:
            break
        excess = 0
        for nodes, room in reduced.rows:
            usage = sum(int(reduced.usages[v][positions[v]]) for v in nodes)
            excess = max(excess, usage - room)
        if not excess:
            break
        tightened = [(nodes, room - excess) for nodes, room in reduced.rows]
        try:
            answer = solve_milp(replace(reduced, rows=tightened), end_s - time.monotonic())
        except ClusterError:
            break
    return lower


# -- the program ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Answer:
    """The best choice found, as positions (None: nothing found), and a lower bound on all costs."""

    positions: dict[int, int] | None
    lower_bound: float


class _Matrix:
    """The coefficients of linear equations, collected as (row, column, value)."""

    def __init__(self) -> None:
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.count = 0

    def add(self, row: np.ndarray, column: np.ndarray, value: float | np.ndarray) -> None:
        """Put `value` at each (row, column)."""
        self.parts.append((np.broadcast_to(value, row.shape), row, column))

    def build(self, columns: int) -> Any:
        """Return the matrix in SciPy's sparse form."""
        from scipy.sparse import csr_array

        if not self.parts:
            return csr_array((self.count, columns))
        values, rows, cols = map(np.concatenate, zip(*self.parts, strict=True))
        return csr_array((values, (rows, cols)), shape=(self.count, columns))


def scipy_available() -> bool:
    """Return whether SciPy is installed (`pip install ascend-lab[exact]`)."""
    return find_spec("scipy") is not None


def solve_milp(reduced: Reduced, time_limit_s: float = math.inf) -> Answer:
    """Solve a reduced problem; UnsupportedError without SciPy, ClusterError if proven impossible.

    After the time limit, the answer has the best choice found so far, if any, and the bound
    reached.
    """
    if not scipy_available():
        raise UnsupportedError(
            "SciPy for an exact strategy", "none", "pip install 'ascend-lab[exact]'"
        )
    if not reduced.costs:
        return Answer({}, reduced.constant)
    costs, equal, offsets, choices = _formulate(reduced)
    solution = _solved(reduced, costs, equal, offsets, choices, time_limit_s)
    if solution.status == INFEASIBLE:
        raise ClusterError("a choice of strategies within the usage limit", "proof: none exists")
    bound = solution.mip_dual_bound
    has_bound = bound is not None and math.isfinite(bound)
    lower = float(bound) + reduced.constant if has_bound else -math.inf
    if solution.x is None:
        return Answer(None, lower)
    values = {
        v: solution.x[offset : offset + len(reduced.costs[v])] for v, offset in offsets.items()
    }
    return Answer({v: int(np.argmax(indicators)) for v, indicators in values.items()}, lower)


def _solved(
    reduced: Reduced,
    costs: Costs,
    equal: _Matrix,
    offsets: dict[int, int],
    choices: int,
    time_limit_s: float,
) -> Any:
    """Solve the program by HiGHS and return SciPy's result; columns of cost inf stay 0."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    columns = len(costs)
    rhs = np.zeros(equal.count)
    # A node's 0/1 columns, one per strategy, add up to 1: exactly one strategy is chosen.
    rhs[: len(offsets)] = 1.0
    constraints = [LinearConstraint(equal.build(columns), rhs, rhs)]
    if reduced.rows:
        constraints.append(LinearConstraint(*_memory(reduced, offsets, columns)))
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


def _formulate(reduced: Reduced) -> tuple[Costs, _Matrix, dict[int, int], int]:
    """Return costs of columns, equations, first column of each node, number of x."""
    costs = {node: node_costs.copy() for node, node_costs in reduced.costs.items()}
    offsets = dict[int, int]()
    choices = 0
    equal = _Matrix()
    for node, node_costs in costs.items():
        offsets[node] = choices
        span = np.arange(choices, choices + len(node_costs))
        equal.add(np.full(len(node_costs), equal.count), span, 1.0)
        equal.count += 1
        choices += len(node_costs)
    # Columns 0 .. choices - 1 are the x, one per strategy. The columns of the y follow, one for
    # each allowed pair of groups.
    columns = choices
    tables = []
    for (u, v), table in reduced.edges.items():
        remainder, by_row, by_column = _grouped(table, costs[u], costs[v])
        # The table was a sum of a term of u and a term of v: nothing couples the two nodes.
        if remainder.shape == (1, 1):
            continue
        # the column of each allowed pair, -1 for a forbidden one
        is_allowed = np.isfinite(remainder)
        pair_count = int(np.count_nonzero(is_allowed))
        ids = np.full(remainder.shape, -1)
        ids[is_allowed] = columns + np.arange(pair_count)
        columns += pair_count
        tables.append(remainder[is_allowed])
        for node, lines, groups in ((u, ids, by_row), (v, ids.T, by_column)):
            line_number, _ = np.nonzero(lines >= 0)
            # A row of the table: the y in it add up to the x of the strategies in its group, sum y
            # - sum x = 0.
            equal.add(equal.count + line_number, lines[lines >= 0], 1.0)
            equal.add(equal.count + groups, offsets[node] + np.arange(len(groups)), -1.0)
            equal.count += len(lines)
    return np.concatenate([*costs.values(), *tables]), equal, offsets, choices


def _grouped(table: Costs, left: Costs, right: Costs) -> tuple[Costs, np.ndarray, np.ndarray]:
    """Return the table of groups and the group of every row and column.

    Minima of rows and columns move into the costs of the nodes, which change in place.
    """
    rows = table.min(axis=1)
    # [[5, 7], [6, 8]] has row minima 5 and 6, then column minima 0 and 2: nothing remains.
    remainder = table - np.where(np.isfinite(rows), rows, 0.0)[:, None]
    columns = remainder.min(axis=0)
    remainder = remainder - np.where(np.isfinite(columns), columns, 0.0)
    left += rows
    right += columns
    remainder, by_row = np.unique(remainder, axis=0, return_inverse=True)
    transposed, by_column = np.unique(remainder.T, axis=0, return_inverse=True)
    return transposed.T, by_row.ravel(), by_column.ravel()


def _memory(reduced: Reduced, offsets: dict[int, int], columns: int) -> tuple[Any, float, Any]:
    """Return the matrix, lower and upper bounds of the memory limits, scaled to about 1000."""
    used = _Matrix()
    limits = []
    for nodes, room in reduced.rows:
        # Solvers lose precision on coefficients of 1e10 bytes; about 1000 is safe.
        unit = max(room, 1) / 1024
        for node in (v for v in nodes if v in offsets):
            usage = reduced.usages[node]
            span = offsets[node] + np.arange(len(usage))
            used.add(np.full(len(usage), used.count), span, usage / unit)
        used.count += 1
        limits.append(room / unit)
    return used.build(columns), -np.inf, np.array(limits)
