"""Random small strategy problems and their optimum by trying everything."""

import itertools
import math
from pathlib import Path

from hypothesis import strategies as st

from ascend_lab.parallel.strategy import FORBIDDEN, Edge, Node, Problem, evaluate

DATA = Path(__file__).parent.parent / "data" / "iopddl"
EXAMPLE = DATA / "example.json"
BENCHMARK = DATA / "asplos-2025-iopddl-B.json.gz"


def best(problem: Problem) -> float:
    """Return the least cost of an allowed choice; inf where there is none."""
    options = (range(len(node.costs)) for node in problem.nodes)
    found = (evaluate(problem, choice) for choice in itertools.product(*options))
    return min((e.cost for e in found if e.feasible), default=math.inf)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw up to five nodes of up to three strategies, edges (parallel ones, loops), memory."""
    cost = st.one_of(st.integers(0, 30), st.integers(-5, 5), st.just(10**12), st.just(FORBIDDEN))
    nodes = []
    for _ in range(draw(st.integers(1, 5))):
        count = draw(st.integers(1, 3))
        lower = draw(st.integers(0, 6))
        upper = draw(st.integers(lower, 7))
        costs = draw(st.lists(cost, min_size=count, max_size=count))
        used = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
        nodes.append(Node(lower, upper, tuple(costs), tuple(used)))
    place = st.integers(0, len(nodes) - 1)
    edges = []
    for source, target in draw(st.lists(st.tuples(place, place), max_size=7)):
        size = len(nodes[source].costs) * len(nodes[target].costs)
        table = draw(st.lists(cost, min_size=size, max_size=size))
        edges.append(Edge(source, target, tuple(table)))
    limit = draw(st.none() | st.integers(0, 25))
    return Problem("random", tuple(nodes), tuple(edges), limit)
