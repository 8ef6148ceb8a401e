"""Searches with one signature: (space, rng, points to start with) -> batches of points.

Those that are objects keep what they did in the latest run, for figures: generations, trees.

Searches from prefix to prefix: what is decided first narrows what is left.

Branch and bound opens the prefix of least certified bound first (A. H. Land, A. G. Doig, "An
Automatic Method of Solving Discrete Programming Problems", 1960).

Monte-Carlo tree search learns where to decide next from what lies below. A node is a prefix. From
the root the search follows the child of greatest

    best cost of all / best cost below the child + exploration * sqrt(log N / n),

with N and n the visits of node and child, until an option was never tried; then it completes the
point and gives every node on the way the least cost seen below it (minimum-time backup, not the
mean: one good point makes a prefix good). A node below which everything was tried is closed.
L. Kocsis, C. Szepesvari, "Bandit Based Monte-Carlo Planning", ECML 2006.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

import numpy as np

# fmt: off
# isort: off
from ascend_lab.aoe.drive import Search, Steps
from ascend_lab.aoe.search.points import (
    Annealing, Birth, Fresh, Genetic, IteratedLocal, Surrogate, exhaustive, random_order,
)
from ascend_lab.aoe.space import Point, Space, Value, completed, mutated, random_completion
from ascend_lab.errors import InputError
# fmt: on
# isort: on

__all__ = [
    "ALIASES",
    "SEARCHES",
    "Annealing",
    "Birth",
    "BranchAndBound",
    "Genetic",
    "IteratedLocal",
    "Mcts",
    "Node",
    "Surrogate",
    "exhaustive",
    "paced",
    "random_order",
    "search_named",
    "tree_of",
]

Bound = Callable[[Point], float]
"""Prefix -> a number that no point beginning with it can undercut."""
_Open = tuple[float, int, int, Point]
"""Bound, minus the length (deep prefixes first among equal bounds), order of arrival, prefix."""


def no_bound(prefix: Point) -> float:
    """Return minus infinity: nothing is known of the points behind a prefix."""
    return -math.inf


@dataclass
class BranchAndBound:
    """Open the prefix of least certified `bound` first, until no bound is below the best cost.

    `batch` points are measured at a time. `lower_bound` is what no point of the space undercuts, as
    far as known; `opened` counts prefixes; `proven` says that the best of the run is the optimum.
    """

    bound: Bound = no_bound
    batch: int = 4
    lower_bound: float = field(default=-math.inf, init=False)
    opened: int = field(default=0, init=False)
    proven: bool = field(default=False, init=False)

    def __call__(
        self, space: Space, rng: np.random.Generator, start: Sequence[Point] = ()
    ) -> Steps:
        """Measure points in the order of their bounds, until none can be better than the best."""
        self.lower_bound = -math.inf
        self.opened = 0
        self.proven = False
        fresh = Fresh(space, rng)
        best = math.inf
        # A good start is a low bar from the beginning: prefixes with higher bounds are never
        # opened.
        if batch := fresh.legal(start):
            best = min((yield from fresh.ask(batch)))
        heap: list[_Open] = [(self.bound(()), 0, 0, ())]
        while batch := self._leaves(fresh, heap, best):
            best = min(best, *(yield from fresh.ask(batch)))
            self.lower_bound = min(best, heap[0][0] if heap else math.inf)
        self.lower_bound = best
        self.proven = True

    def _leaves(self, fresh: Fresh, heap: list[_Open], best: float) -> list[Point]:
        """Open prefixes until a batch of points is found or nothing below the best is left."""
        batch: list[Point] = []
        while heap and len(batch) < self.batch and heap[0][0] < best:
            bound, _, _, prefix = heapq.heappop(heap)
            if len(prefix) == len(fresh.space.names):
                batch = fresh.new([*batch, prefix])
                continue
            for value in fresh.space.options(prefix):
                self.opened += 1
                child = (*prefix, value)
                low = max(bound, self.bound(child))  # a bound never falls on the way down
                if low < best:
                    heapq.heappush(heap, (low, -len(child), self.opened, child))
        return batch


# -- Monte-Carlo tree search ----------------------------------------------------------------------
ELITE = 10
"""Best points so far, whose endings are tried behind other prefixes."""


@dataclass(slots=True)
class Node:
    """A prefix: least cost below, visits, rollouts under way, whether all was tried, children."""

    best: float = math.inf
    visits: int = 0
    pending: int = 0
    closed: bool = False
    children: dict[Value, "Node"] = field(default_factory=dict)


def tree_of(root: Node, deepest: int | None = None) -> dict[Point, Node]:
    """Return the nodes of a tree by their prefixes, parents first, down to a depth."""
    nodes: dict[Point, Node] = {(): root}
    queue: list[Point] = [()]
    for prefix in queue:
        if deepest is None or len(prefix) < deepest:
            children = {(*prefix, v): child for v, child in nodes[prefix].children.items()}
            nodes.update(children)
            queue += children
    return nodes


@dataclass
class Mcts:
    """The search; `root` is the tree of the latest run.

    A batch comes of `rollouts` ways down; each counts as a visit at once (a virtual loss), so that
    the next one goes elsewhere. A share `greedy` of them follows the best child to a random depth
    instead. Half of the `completions` of each are random, half borrow the later decisions of one of
    the best points; of each rollout the one that a model of the trials so far likes best is kept,
    and the `batch` best of these are measured. With one completion there is no model and nothing
    greedy: the plain algorithm. The numbers were chosen as those of the genetic search.
    """

    exploration: float = 1.0
    batch: int = 8
    rollouts: int = 16
    greedy: float = 0.5
    completions: int = 16
    caution: float = 1.0
    root: Node = field(default_factory=Node, init=False, repr=False)

    def __call__(
        self, space: Space, rng: np.random.Generator, start: Sequence[Point] = ()
    ) -> Steps:
        """Grow the tree until its root is closed."""
        self.root = Node()
        run = _Rollouts(self, Fresh(space, rng), self.root)
        batch = run.fresh.legal(start) or run.fresh.sample(self.batch)
        while batch:
            costs = yield from run.fresh.ask(batch)
            run.model.learn(batch, costs)
            for point, cost in zip(batch, costs, strict=True):
                run.backup(point, cost)
            batch = run.rollouts()


@dataclass
class _Rollouts:
    """One run: the tree, the trials, and the model of them."""

    search: Mcts
    fresh: Fresh
    root: Node
    model: Surrogate = field(default_factory=Surrogate)
    elite: list[Point] = field(default_factory=list)

    def backup(self, point: Point, cost: float) -> None:
        """Put a point into the tree; its cost lowers the best of every node above it."""
        path = [self.root]
        for value in point:
            path.append(path[-1].children.setdefault(value, Node()))
        path[-1].closed = True
        for depth in reversed(range(len(path))):
            node = path[depth]
            node.best, node.visits = min(node.best, cost), node.visits + 1
            # A node is closed when each of its options has a child and all of these are closed.
            if depth < len(point) and all(child.closed for child in node.children.values()):
                node.closed = len(node.children) == len(self.fresh.space.options(point[:depth]))

    def rollouts(self) -> list[Point]:
        """Return a batch of new points, empty only if no point is left."""
        order = np.argsort(self.model.costs, kind="stable")[:ELITE]
        # Endings of the ten best points are tried behind other prefixes: good tilings share
        # decisions.
        self.elite = [self.model.points[i] for i in order]
        pools: list[list[Point]] = []
        walked: list[Node] = []
        pool_count = self.search.rollouts if self.search.completions > 1 else self.search.batch
        for _ in range(10 * pool_count):
            if len(pools) == pool_count or self.root.closed:
                break
            if self.search.completions > 1 and self.fresh.rng.random() < self.search.greedy:
                prefix = self._dive()
            else:
                prefix, path = self._descend()
                walked += path
            if pool := self._completions(prefix):
                pools.append(pool)
        # The virtual losses end with the batch: real visits take their place as costs come in.
        for node in walked:
            node.pending = 0
        return self._picked(pools) or self.fresh.sample(self.search.batch)

    def _descend(self) -> tuple[Point, list[Node]]:
        """Follow the best children down to the first untried option; return prefix and nodes."""
        space = self.fresh.space
        node = self.root
        prefix: Point = ()
        path = [node]
        while len(prefix) < len(space.names):
            node.pending += 1
            value = self._select(node, prefix)
            prefix = (*prefix, value)
            if value not in node.children:
                break
            node = node.children[value]
            path.append(node)
        return prefix, path

    def _dive(self) -> Point:
        """Follow the children of least cost to a random depth; return the prefix."""
        node = self.root
        prefix: Point = ()
        for _ in range(int(self.fresh.rng.integers(len(self.fresh.space.names)))):
            open_children = {
                value: child for value, child in node.children.items() if not child.closed
            }
            if not open_children:
                break
            value = min(open_children, key=lambda v: open_children[v].best)
            node = open_children[value]
            prefix = (*prefix, value)
        return prefix

    def _select(self, node: Node, prefix: Point) -> Value:
        """Return an untried option if there is one, else the option of greatest value."""
        options = self.fresh.space.options(prefix)
        untried = [value for value in options if value not in node.children]
        if untried:
            return untried[int(self.fresh.rng.random() * len(untried))]
        # sqrt(log N / n), with what depends on the parent alone computed once for all children.
        scale = self.search.exploration * math.sqrt(math.log(node.visits + node.pending))
        return max(options, key=lambda value: self._value(node.children[value], scale))

    def _value(self, child: Node, scale: float) -> float:
        if child.closed:
            return -math.inf
        good = 1.0 if child.best == self.root.best else self.root.best / child.best
        return good + scale / math.sqrt(child.visits + child.pending)

    def _completions(self, prefix: Point) -> list[Point]:
        """Return new points that begin with a prefix; known ones go into the tree for nothing."""
        completions: dict[Point, None] = {}
        for i in range(max(self.search.completions, 1)):
            point = random_completion(self.fresh.space, prefix, self.fresh.rng)
            # Half of the endings are random, half are borrowed from good points.
            if i % 2:
                point = self._borrowed(prefix)
            cost = self.fresh.cost(point)
            if cost is None:
                completions[point] = None
            elif not self._holds(point):
                self.backup(point, cost)
        return list(completions)

    def _borrowed(self, prefix: Point) -> Point:
        """Return a prefix with the ending of one of the best points, one decision changed."""
        space = self.fresh.space
        rng = self.fresh.rng
        donor = self.elite[int(rng.integers(len(self.elite)))]
        point = mutated(space, completed(space, donor, prefix), rng)
        return completed(space, point, prefix)

    def _holds(self, point: Point) -> bool:
        """Tell whether the tree has a point."""
        node: Node | None = self.root
        for value in point:
            node = node.children.get(value) if node else None
        return node is not None

    def _picked(self, pools: Sequence[Sequence[Point]]) -> list[Point]:
        """Return of every pool the point that the model likes best."""
        everything = list(dict.fromkeys(point for pool in pools for point in pool))
        if self.search.completions > 1 and everything and math.isfinite(self.root.best):
            mean, deviation = self.model.predict(everything)
            # rounded, so that the order does not hang on the last bit
            scores = np.round(mean - self.search.caution * deviation, 9)
            everything = [everything[i] for i in np.argsort(scores, kind="stable")]
        rank = {point: i for i, point in enumerate(everything)}
        best = sorted((min(pool, key=rank.__getitem__) for pool in pools), key=rank.__getitem__)
        return self.fresh.new(best)[: self.search.batch]


SEARCHES: dict[str, Search] = {
    "exhaustive": exhaustive,
    "random": random_order,
    "annealing": Annealing(),
    "genetic": Genetic(),
    "iterated-local": IteratedLocal(),
    "mcts": Mcts(),
    "branch-and-bound": BranchAndBound(),
}
"""Searches by name; branch and bound without a bound of its own enumerates the space."""
ALIASES = {
    "sa": "annealing",
    "simulated-annealing": "annealing",
    "ga": "genetic",
    "genetic-algorithm": "genetic",
    "ils": "iterated-local",
    "iterated-local-search": "iterated-local",
    "bnb": "branch-and-bound",
}
"""Other names by which searches are known."""


def search_named(name: str) -> Search:
    """Return the search with this name or alias; raise `InputError` for unknown names."""
    # "Simulated Annealing", "simulated_annealing" and "sa" are one search.
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    plain = ALIASES.get(plain, plain)
    if plain not in SEARCHES:
        suggestions = get_close_matches(plain, [*SEARCHES, *ALIASES], 1)
        remedy = f"did you mean {suggestions[0]}?" if suggestions else "give one of them"
        raise InputError(f"a search among {', '.join(SEARCHES)}", repr(name), remedy)
    return SEARCHES[plain]


def paced(search: Search, budget: int) -> Search:
    """Return the search with its schedule stretched to a budget, if it has a schedule."""
    return replace(search, length=budget) if isinstance(search, Annealing) else search
