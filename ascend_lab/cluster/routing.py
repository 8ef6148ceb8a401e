"""Which links a message takes.

A direct link if there is one; else the quickest path through switches; else, where switches do not
lead there, the quickest path over anything, devices passing messages on. "Quickest" is for
`ROUTE_BYTES`, every link counted with alpha + n beta; equal paths are decided by the numbers of
their first and last links.
"""

from __future__ import annotations

import heapq

from ascend_lab.cluster.topology import Topology
from ascend_lab.errors import ClusterError

ROUTE_BYTES = 2**20
Path = tuple[int, ...]
"""Numbers of links."""
Tree = dict[int, tuple[float, int]]
"""Of every node reached: what it costs, and the last link on the way (-1 at the start)."""


class Router:
    """The routes of one topology, each found once."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._routes: dict[tuple[int, int], Path] = {}
        self._trees: dict[tuple[int, bool], Tree] = {}
        self._into: list[dict[int, int]] = [{} for _ in range(topology.size)]
        for (start, end), i in topology.between.items():
            if start >= topology.size > end:
                self._into[end][start] = i

    def route(self, source: int, target: int) -> Path:
        """Return the links from one device to another; raise `ClusterError` if there is no way."""
        key = (source, target)
        if key not in self._routes:
            self._routes[key] = self._find(source, target)
        return self._routes[key]

    def _find(self, source: int, target: int) -> Path:
        topology = self.topology
        direct = topology.between.get((source, target))
        if direct is not None:
            return (direct,)
        found = self._through_switches(source, target)
        if found is not None:
            return found[1]
        tree = self._tree(source, anything=True)
        if target not in tree:
            names = f"{topology.label(source)} to {topology.label(target)}"
            raise ClusterError(f"{topology.name}: a way from {names}", "none", "add a link")
        return self._walked(tree, target)

    def _walked(self, tree: Tree, target: int) -> Path:
        """Return the path from the root of a tree to a node."""
        path: list[int] = []
        while (link := tree[target][1]) >= 0:
            path.append(link)
            target = self.topology.links[link].source
        return tuple(reversed(path))

    def _through_switches(self, source: int, target: int) -> tuple[float, Path] | None:
        """Join the source's link to a switch, the switches' own tree, and the target's link."""
        topology, best = self.topology, None
        into = self._into[target]
        for first in topology.leaving[source]:
            switch = topology.links[first].target
            if switch < topology.size:
                continue
            tree = self._tree(switch, anything=False)
            for node, last in into.items():
                if node in tree:
                    total = self._cost(first) + tree[node][0] + self._cost(last)
                    found = (total, (first, *self._walked(tree, node), last))
                    best = found if best is None else min(best, found)
        return best

    def _tree(self, start: int, *, anything: bool) -> Tree:
        """Return the quickest ways from a node to every node (Dijkstra), or to switches only."""
        key = (start, anything)
        if key in self._trees:
            return self._trees[key]
        topology = self.topology
        done: Tree = {}
        queue = [(0.0, start, -1, -1)]  # cost, node, first and last link
        while queue:
            cost, node, first, last = heapq.heappop(queue)
            if node in done:
                continue
            done[node] = (cost, last)
            for i in topology.leaving[node]:
                target = topology.links[i].target
                if target not in done and (anything or target >= topology.size):
                    begin = i if first < 0 else first
                    heapq.heappush(queue, (cost + self._cost(i), target, begin, i))
        self._trees[key] = done
        return done

    def _cost(self, link: int) -> float:
        found = self.topology.links[link]
        return found.alpha_s + ROUTE_BYTES * found.beta_s_per_byte


def router_of(topology: Topology) -> Router:
    """Return the router of a topology, made when it is first asked for."""
    found = topology.__dict__.get("_router")
    if not isinstance(found, Router):
        found = Router(topology)
        object.__setattr__(topology, "_router", found)
    return found
