"""Which links a message takes.

A direct link if there is one; else the quickest path through switches; else, where switches do not
lead there, the quickest path over anything, devices passing messages on. "Quickest" is for
`ROUTE_BYTES`, every link counted with alpha + n beta; equal paths are decided by node number.
"""

from __future__ import annotations

import heapq

from ascend_lab.cluster.topology import Topology
from ascend_lab.errors import ClusterError

ROUTE_BYTES = 2**20
Path = tuple[int, ...]
"""Numbers of links."""


class Router:
    """The routes of one topology, each found once."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._routes: dict[tuple[int, int], Path] = {}
        self._trees: dict[tuple[int, bool], dict[int, tuple[float, Path]]] = {}
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
        if found is None:
            found = self._tree(source, anything=True).get(target)
        if found is None:
            names = f"{topology.label(source)} to {topology.label(target)}"
            raise ClusterError(f"{topology.name}: a way from {names}", "none", "add a link")
        return found[1]

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
                    cost, path = tree[node]
                    total = self._cost(first) + cost + self._cost(last)
                    found = (total, (first, *path, last))
                    best = found if best is None else min(best, found)
        return best

    def _tree(self, start: int, *, anything: bool) -> dict[int, tuple[float, Path]]:
        """Return cost and path from a node to every node (Dijkstra), or to switches only."""
        key = (start, anything)
        if key in self._trees:
            return self._trees[key]
        topology = self.topology
        done: dict[int, tuple[float, Path]] = {}
        queue: list[tuple[float, int, Path]] = [(0.0, start, ())]
        while queue:
            cost, node, path = heapq.heappop(queue)
            if node in done:
                continue
            done[node] = (cost, path)
            for i in topology.leaving[node]:
                target = topology.links[i].target
                if target not in done and (anything or target >= topology.size):
                    heapq.heappush(queue, (cost + self._cost(i), target, (*path, i)))
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
