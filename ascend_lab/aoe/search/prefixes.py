"""Search methods on prefixes of points: branch and bound, and Monte-Carlo tree search.

A prefix has values for the first decisions of a point. Both searches grow a tree whose nodes are
prefixes: the children of (128,) are (128, 16), (128, 32), ... Earlier decisions restrict the later
ones.

Branch and bound expands the prefix with the lowest certified bound first (A. H. Land, A. G. Doig,
"An Automatic Method of Solving Discrete Programming Problems", 1960).

Monte-Carlo tree search learns from the costs below a prefix where to go next. From the root it
follows the child with the largest

    lowest cost of all / lowest cost below the child + exploration * sqrt(log N / n),

where N and n count the visits of the node and the child. When it reaches a value that was never
tried, it completes the point at random, measures it, and lowers the best cost of every node on the
path (not their mean cost: a single good point makes a prefix good). A node below which everything
was tried is closed. L. Kocsis, C. Szepesvari, "Bandit Based Monte-Carlo Planning", ECML 2006.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.aoe.drive import Steps
from ascend_lab.aoe.search.points import SearchHistory
from ascend_lab.aoe.search.surrogate import Surrogate
from ascend_lab.aoe.space import Point, Space, Value, completed, mutated, random_completion

Bound = Callable[[Point], float]
"""Maps a prefix to a lower bound on the costs of all points that begin with it."""
_QueuedPrefix = tuple[float, int, int, Point]
"""Bound, negative length, arrival number, prefix: of equal bounds the longest prefix is first."""


def no_bound(prefix: Point) -> float:
    """Return minus infinity, a bound that excludes nothing."""
    return -math.inf


@dataclass
class BranchAndBound:
    """Expands the prefix with the lowest bound first, until no bound is below the best cost.

    `batch` points are measured at a time. After a run, `lower_bound` is a lower bound on the costs
    of the whole space, `opened` the number of prefixes that were generated, and `proven` says that
    the best point of the run is the optimum.
    """

    bound: Bound = no_bound
    batch: int = 4
    lower_bound: float = field(default=-math.inf, init=False)
    opened: int = field(default=0, init=False)
    proven: bool = field(default=False, init=False)

    def __call__(
        self, space: Space, rng: np.random.Generator, start: Sequence[Point] = ()
    ) -> Steps:
        """Propose points in the order of their bounds, until none can be better than the best."""
        self.lower_bound = -math.inf
        self.opened = 0
        self.proven = False
        history = SearchHistory(space, rng)
        best = math.inf
        # A good start point pays off at once: prefixes with a higher bound are never expanded.
        if batch := history.legal_starts(start):
            best = min((yield from history.ask(batch)))
        # the empty prefix stands for the whole space
        heap: list[_QueuedPrefix] = [(self.bound(()), 0, 0, ())]
        while batch := self._expand(history, heap, best):
            best = min(best, *(yield from history.ask(batch)))
            self.lower_bound = min(best, heap[0][0] if heap else math.inf)
        self.lower_bound = best
        self.proven = True

    def _expand(
        self, history: SearchHistory, heap: list[_QueuedPrefix], best: float
    ) -> list[Point]:
        """Expand prefixes until a batch is full, or no prefix has a bound below the best cost."""
        batch: list[Point] = []
        while heap and len(batch) < self.batch and heap[0][0] < best:
            bound, _, _, prefix = heapq.heappop(heap)
            if len(prefix) == len(history.space.names):
                batch = history.untried([*batch, prefix])
                continue
            for value in history.space.options(prefix):
                self.opened += 1
                child = (*prefix, value)
                # the parent's bound holds for the child as well
                low = max(bound, self.bound(child))
                if low < best:
                    heapq.heappush(heap, (low, -len(child), self.opened, child))
        return batch


# -- Monte-Carlo tree search ----------------------------------------------------------------------
ELITE_COUNT = 10
"""Number of best points whose later decisions are tried with other prefixes."""


@dataclass(slots=True)
class Node:
    """A node of the tree, which stands for a prefix.

    `best` is the lowest cost below the node. `pending` counts the descents through it whose points
    are not measured yet. `closed` means that every point below it was tried.
    """

    best: float = math.inf
    visits: int = 0
    pending: int = 0
    closed: bool = False
    children: dict[Value, "Node"] = field(default_factory=dict)


def tree_of(root: Node, deepest: int | None = None) -> dict[Point, Node]:
    """Return the nodes of a tree by their prefixes, parents first, down to the depth `deepest`."""
    nodes: dict[Point, Node] = {(): root}
    queue: list[Point] = [()]
    # the list grows while it is walked: prefixes come in order of their length
    for prefix in queue:
        if deepest is None or len(prefix) < deepest:
            children = {(*prefix, v): child for v, child in nodes[prefix].children.items()}
            nodes.update(children)
            queue += children
    return nodes


@dataclass
class Mcts:
    """Monte-Carlo tree search; `root` is the tree of the latest run.

    For each batch the tree is descended `rollouts` times. A descent counts as a visit at once (a
    virtual loss), so that the next one takes another path. A share `greedy` of the descents follows
    the best children to a random depth instead. Each descent ends in a prefix, which is completed
    to `completions` points: half at random, half with the later decisions of one of the best
    points. Of each descent the point that a model of the trials ranks first is kept, and the
    `batch` best of these are measured; `caution` is how much the model's uncertainty counts in
    favour of a point. With one completion there is neither a model nor a greedy descent: the plain
    algorithm. `bench/search.py` compares settings.
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
        """Propose points until the root is closed, which means that every point was tried."""
        self.root = Node()
        run = _Rollouts(self, SearchHistory(space, rng), self.root)
        batch = run.history.legal_starts(start) or run.history.sample(self.batch)
        while batch:
            costs = yield from run.history.ask(batch)
            run.model.learn(batch, costs)
            for point, cost in zip(batch, costs, strict=True):
                run.backup(point, cost)
            batch = run.rollouts()


@dataclass
class _Rollouts:
    """One run of the search: the tree, the trials, and a model of their costs."""

    search: Mcts
    history: SearchHistory
    root: Node
    model: Surrogate = field(default_factory=Surrogate)
    best_points: list[Point] = field(default_factory=list)

    def backup(self, point: Point, cost: float) -> None:
        """Add a point to the tree and update the best cost of every node on its path."""
        path = [self.root]
        for value in point:
            path.append(path[-1].children.setdefault(value, Node()))
        path[-1].closed = True
        for depth in reversed(range(len(path))):
            node = path[depth]
            node.best = min(node.best, cost)
            node.visits += 1
            # A node is closed when each of its options has a child and all of these are closed.
            if depth < len(point) and all(child.closed for child in node.children.values()):
                node.closed = len(node.children) == len(self.history.space.options(point[:depth]))

    def rollouts(self) -> list[Point]:
        """Return a batch of new points, empty only if no point is left."""
        order = np.argsort(self.model.costs, kind="stable")[:ELITE_COUNT]
        # Good tilings share decisions: those of the ten best are tried with other prefixes.
        self.best_points = [self.model.points[i] for i in order]
        pools: list[list[Point]] = []
        visited_nodes: list[Node] = []
        pool_count = self.search.rollouts if self.search.completions > 1 else self.search.batch
        # a descent may end where all points are known and give no pool: 10 attempts for each pool
        for _ in range(10 * pool_count):
            if len(pools) == pool_count or self.root.closed:
                break
            if self.search.completions > 1 and self.history.rng.random() < self.search.greedy:
                prefix = self._descend_greedily()
            else:
                prefix, path = self._descend()
                visited_nodes += path
            if pool := self._completions(prefix):
                pools.append(pool)
        # The virtual losses end with the batch; `backup` will count the real visits.
        for node in visited_nodes:
            node.pending = 0
        return self._best_of_pools(pools) or self.history.sample(self.search.batch)

    def _descend(self) -> tuple[Point, list[Node]]:
        """Follow the best children down to the first untried value; return prefix and nodes."""
        space = self.history.space
        node = self.root
        prefix: Point = ()
        path = [node]
        while len(prefix) < len(space.names):
            # counted before its cost is known, so that the next descent goes elsewhere
            node.pending += 1
            value = self._select(node, prefix)
            prefix = (*prefix, value)
            if value not in node.children:
                break
            node = node.children[value]
            path.append(node)
        return prefix, path

    def _descend_greedily(self) -> Point:
        """Follow the children of lowest cost to a random depth; return the prefix."""
        node = self.root
        prefix: Point = ()
        # a depth of 0 .. n - 1: at least the last decision is left to the completion
        for _ in range(int(self.history.rng.integers(len(self.history.space.names)))):
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
        """Return an untried value if there is one, else that of the child with the best score."""
        options = self.history.space.options(prefix)
        untried = [value for value in options if value not in node.children]
        if untried:
            return untried[int(self.history.rng.random() * len(untried))]
        # exploration * sqrt(log N), the part of the score that is the same for all children
        parent_term = self.search.exploration * math.sqrt(math.log(node.visits + node.pending))
        return max(options, key=lambda value: self._score(node.children[value], parent_term))

    def _score(self, child: Node, parent_term: float) -> float:
        """Return best cost of all / best cost below the child + exploration * sqrt(log N / n)."""
        if child.closed:
            return -math.inf
        # if all costs are infinite, inf / inf must be 1 as well
        cost_ratio = 1.0 if child.best == self.root.best else self.root.best / child.best
        return cost_ratio + parent_term / math.sqrt(child.visits + child.pending)

    def _completions(self, prefix: Point) -> list[Point]:
        """Return untried points that begin with a prefix.

        A completion whose cost is known, but which is not in the tree yet, is added to the tree.
        """
        completions: dict[Point, None] = {}
        for i in range(max(self.search.completions, 1)):
            # drawn also where it is replaced below, so that the random sequence stays the same
            point = random_completion(self.history.space, prefix, self.history.rng)
            if i % 2:
                point = self._completed_from_best(prefix)
            cost = self.history.cost(point)
            if cost is None:
                completions[point] = None
            elif not self._is_in_tree(point):
                self.backup(point, cost)
        return list(completions)

    def _completed_from_best(self, prefix: Point) -> Point:
        """Complete a prefix with the later decisions of one of the best points, one changed."""
        space = self.history.space
        rng = self.history.rng
        # prefix (128, 16), donor (64, 32, 2, 1): 2 and 1 are borrowed, or the values nearest them
        donor = self.best_points[int(rng.integers(len(self.best_points)))]
        point = mutated(space, completed(space, donor, prefix), rng)
        return completed(space, point, prefix)

    def _is_in_tree(self, point: Point) -> bool:
        """Tell whether a point is in the tree."""
        node: Node | None = self.root
        for value in point:
            node = node.children.get(value) if node else None
        return node is not None

    def _best_of_pools(self, pools: Sequence[Sequence[Point]]) -> list[Point]:
        """Return the best point of every pool in the model's order, at most a batch of them."""
        candidates = list(dict.fromkeys(point for pool in pools for point in pool))
        if self.search.completions > 1 and candidates and math.isfinite(self.root.best):
            mean, deviation = self.model.predict(candidates)
            # rounded: the last bits of a float may differ between machines
            scores = np.round(mean - self.search.caution * deviation, 9)
            candidates = [candidates[i] for i in np.argsort(scores, kind="stable")]
        rank = {point: i for i, point in enumerate(candidates)}
        best_of_pools = [min(pool, key=rank.__getitem__) for pool in pools]
        best_of_pools.sort(key=rank.__getitem__)
        return self.history.untried(best_of_pools)[: self.search.batch]
