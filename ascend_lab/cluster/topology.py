"""Cluster topologies as data: devices, switches and directed links, and the routes over them.

Nodes are numbers: devices 0 .. p-1, then switches. A message of n bytes over one link takes
alpha + n beta seconds; over a path the alphas add and the slowest link sets the rate.

A message takes a direct link if there is one, otherwise the quickest path through switches. If no
such path exists, it takes the quickest path through any nodes, and devices pass it on. The quickest
path is that of a message of n = `ROUTE_BYTES` bytes, where every link costs alpha + n beta. Of
equally quick paths the numbers of their first and last links decide.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import ClusterError
from ascend_lab.limits import shown

Floats = NDArray[np.float64]
Path = tuple[int, ...]
"""A path, as the indices of its links."""
Tree = dict[int, tuple[float, int]]
"""For every node that is reached: cost and last link of the path (-1 at the start)."""
LONGEST_S = 1e9
"""Largest credible latency or time per byte: a larger one is a mistake in the unit."""
ROUTE_BYTES = 2**20
"""Size of the message whose quickest path is the route of all messages."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a cable: from node to node, latency, seconds per byte.

    `share` is the achieved part of the cable's rated rate; beta already includes it.
    """

    source: int
    target: int
    alpha_s: float
    beta_s_per_byte: float
    share: float = 1.0


@dataclass(frozen=True)
class Topology:
    """Devices, switches, links; `groups` are the devices of each server, in order.

    A device takes `gamma_s_per_byte` to add one received byte to its own. A collective takes
    `call_s` before its first round, and `round_s` before the messages of each round. Raises
    `ClusterError` for links that lead nowhere and for times that are not numbers >= 0.
    """

    name: str
    devices: tuple[str, ...]
    switches: tuple[str, ...]
    links: tuple[Link, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    gamma_s_per_byte: float = 0.0
    call_s: float = 0.0
    round_s: float = 0.0

    def __post_init__(self) -> None:
        """Check every link, the groups and the other times."""
        if not self.devices:
            raise ClusterError(f"{self.name}: at least one device", "none", "name the devices")
        for link in self.links:
            self._check(link)
        checked(f"{self.name}: gamma", self.gamma_s_per_byte)
        checked(f"{self.name}: call_s", self.call_s)
        checked(f"{self.name}: round_s", self.round_s)
        groups = self.groups or (tuple(range(self.size)),)
        if sorted(d for group in groups for d in group) != list(range(self.size)):
            needed = f"{self.name}: each of {self.size} devices in one server"
            raise ClusterError(needed, str(groups)[:80], "list every device once")
        object.__setattr__(self, "groups", tuple(map(tuple, groups)))

    def _check(self, link: Link) -> None:
        """Raise `ClusterError` for a link to an unknown node or with wrong times."""
        nodes = self.size + len(self.switches)
        where = f"{self.name}: link {link.source} -> {link.target}"
        if not (0 <= link.source < nodes and 0 <= link.target < nodes):
            raise ClusterError(where, f"there are nodes 0 to {nodes - 1}", "name a node")
        if link.source == link.target:
            raise ClusterError(f"{where} between two nodes", "one node", "remove it")
        checked(f"{where}: alpha", link.alpha_s)
        checked(f"{where}: beta", link.beta_s_per_byte)

    @cached_property
    def _hash(self) -> int:
        return hash((self.links, self.groups))  # numbers alone: the same in every process

    def __hash__(self) -> int:
        return self._hash

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.devices)

    def label(self, node: int) -> str:
        """Return the name of a node."""
        return (*self.devices, *self.switches)[node]

    @cached_property
    def alpha_s(self) -> Floats:
        """The latency of every link, in seconds."""
        return np.array([link.alpha_s for link in self.links])

    @cached_property
    def rate_bytes_per_s(self) -> Floats:
        """The achieved rate of every link in bytes per second; infinite where beta is 0."""
        betas = np.array([link.beta_s_per_byte for link in self.links])
        with np.errstate(divide="ignore", over="ignore"):
            # beta = 1e-10 s/B is 10 GB/s.
            return 1.0 / betas

    @cached_property
    def rated_bytes_per_s(self) -> Floats:
        """The rated rate of every link in bytes per second, which is at least the achieved one."""
        # A cable rated at 28 GB/s that achieves 17 GB/s has share 0.607 and beta 1 / 17 GB/s: its
        # rated rate is 17 / 0.607 = 28.
        rated: Floats = self.rate_bytes_per_s / np.array([link.share for link in self.links])
        return rated

    @cached_property
    def between(self) -> dict[tuple[int, int], int]:
        """The link from one node to another; of several, that with the least beta, then alpha."""
        link_numbers: dict[tuple[int, int], int] = {}
        numbered = enumerate(self.links)
        # Sorted by (beta, alpha), `setdefault` keeps the first and therefore the quickest link of a
        # pair.
        for i, link in sorted(
            numbered, key=lambda pair: (pair[1].beta_s_per_byte, pair[1].alpha_s)
        ):
            link_numbers.setdefault((link.source, link.target), i)
        return link_numbers

    @cached_property
    def leaving(self) -> tuple[tuple[int, ...], ...]:
        """For every node, the links that leave it: one to each neighbour."""
        outgoing: list[list[int]] = [[] for _ in range(self.size + len(self.switches))]
        for (source, _), i in self.between.items():
            outgoing[source].append(i)
        return tuple(map(tuple, outgoing))

    def without(self, *dead: tuple[int, int]) -> "Topology":
        """Return the topology without the links between the node pairs `dead`, (source, target)."""
        pairs = set(dead)
        remaining = tuple(link for link in self.links if (link.source, link.target) not in pairs)
        if len(remaining) == len(self.links):
            raise ClusterError(f"{self.name}: a link to cut", str(dead), "name (source, target)")
        return replace(self, links=remaining)

    def route(self, source: int, target: int) -> Path:
        """Return the links from one device to another; raise `ClusterError` without a path."""
        return self._router.route(source, target)

    @cached_property
    def _router(self) -> "_Router":
        return _Router(self)

    def bisection_bytes_per_s(self) -> float:
        """Return the maximum flow from the first half of the devices to the second half.

        The halves follow the numbering, so that servers stay whole where their count is even.
        """
        half = self.size // 2
        return max_flow(self, range(half), range(half, self.size)) if half else math.inf

    def __repr__(self) -> str:
        """Return one line."""
        return (
            f"Topology({self.name}: {self.size} devices in {len(self.groups)} servers, "
            f"{len(self.switches)} switches, {len(self.links)} links)"
        )


def checked(what: str, value: Any, most: float = LONGEST_S) -> float:
    """Return a number from 0 to `most`; `ClusterError` for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value < math.inf):
        raise ClusterError(f"{what} as a number of at least 0", shown(value), "correct it")
    if value > most:
        raise ClusterError(f"{what} of at most {most:g}", shown(value), "correct it")
    return float(value)


# -- simple shapes --------------------------------------------------------------------------------
def both_ways(a: int, b: int, alpha_s: float, beta_s_per_byte: float) -> tuple[Link, Link]:
    """Return the two directions of a cable."""
    return Link(a, b, alpha_s, beta_s_per_byte), Link(b, a, alpha_s, beta_s_per_byte)


def star(
    count: int, alpha_s: float, beta_s_per_byte: float, gamma_s_per_byte: float = 0.0
) -> Topology:
    """Return `count` devices around one switch; alpha and beta hold from device to device."""
    # A message crosses two links, device to switch to device: alphas add, so each link has half.
    costs = (alpha_s / 2, beta_s_per_byte, gamma_s_per_byte)
    return _joined("star", count, costs, lambda n: ((d, n) for d in range(n)), ("switch",))


def full_mesh(
    count: int, alpha_s: float, beta_s_per_byte: float, gamma_s_per_byte: float = 0.0
) -> Topology:
    """Return `count` devices, each linked directly to every other."""
    costs = (alpha_s, beta_s_per_byte, gamma_s_per_byte)
    return _joined("mesh", count, costs, lambda n: combinations(range(n), 2))


def ring(
    count: int, alpha_s: float, beta_s_per_byte: float, gamma_s_per_byte: float = 0.0
) -> Topology:
    """Return `count` devices in a circle, each linked to the next in both directions."""
    costs = (alpha_s, beta_s_per_byte, gamma_s_per_byte)
    # Two devices need one cable, not 0-1 and 1-0; one device needs none.

    def pairs(n: int) -> Iterable[tuple[int, int]]:
        cables = n if n > 2 else n - 1
        return ((a, (a + 1) % n) for a in range(cables))

    return _joined("ring", count, costs, pairs)


def _joined(
    shape: str,
    count: int,
    costs: tuple[float, float, float],
    pairs: Callable[[int], Iterable[tuple[int, int]]],
    switches: tuple[str, ...] = (),
) -> Topology:
    """Return nodes that are linked pair by pair; `costs` are alpha, beta and gamma."""
    if not isinstance(count, int) or count < 1:
        raise ClusterError("a count of devices of at least 1", repr(count), "give one")
    devices = tuple(f"npu{i}" for i in range(count))
    links = tuple(link for a, b in pairs(count) for link in both_ways(a, b, *costs[:2]))
    return Topology(f"{shape}:{count}", devices, switches, links, (), costs[2])


# -- routes ---------------------------------------------------------------------------------------
class _Router:
    """Finds the routes of one topology, each only once."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        # caches: routes by (source, target); trees by (start, whether devices may forward)
        self.routes: dict[tuple[int, int], Path] = {}
        self.trees: dict[tuple[int, bool], Tree] = {}
        self.costs = [x.alpha_s + ROUTE_BYTES * x.beta_s_per_byte for x in topology.links]
        # for each device, the link from each switch that leads to it
        self.links_from_switches: list[dict[int, int]] = [{} for _ in range(topology.size)]
        for (start, end), i in topology.between.items():
            if start >= topology.size > end:
                self.links_from_switches[end][start] = i

    def route(self, source: int, target: int) -> Path:
        key = (source, target)
        if key not in self.routes:
            self.routes[key] = self._find(source, target)
        return self.routes[key]

    def _find(self, source: int, target: int) -> Path:
        """Return the route from one device to another; raise `ClusterError` if there is none."""
        topology = self.topology
        # A cable between the two devices is taken even if a way through a switch were quicker.
        if (direct := topology.between.get((source, target))) is not None:
            return (direct,)
        if paths := self._through_switches(source, target):
            return min(paths)[1]
        # No cable and no switch in common: other devices forward the message, as on a ring.
        tree = self._tree(source, over_devices=True)
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

    def _through_switches(self, source: int, target: int) -> list[tuple[float, Path]]:
        """Return (cost, path) for the ways from the source over switches to the target."""
        paths = []
        for first_link in self.topology.leaving[source]:
            switch = self.topology.links[first_link].target
            if switch >= self.topology.size:
                tree = self._tree(switch, over_devices=False)
                for node, last_link in self.links_from_switches[target].items():
                    if node in tree:
                        total = self.costs[first_link] + tree[node][0] + self.costs[last_link]
                        paths.append((total, (first_link, *self._walked(tree, node), last_link)))
        return paths

    def _tree(self, start: int, *, over_devices: bool) -> Tree:
        """Return the quickest paths from a node, over all nodes or switches only (Dijkstra)."""
        key = (start, over_devices)
        if key in self.trees:
            return self.trees[key]
        topology = self.topology
        tree = Tree()
        queue = [(0.0, start, -1, -1)]  # cost, node, first and last link
        while queue:
            cost, node, first_link, last_link = heapq.heappop(queue)
            if node in tree:
                continue
            tree[node] = (cost, last_link)
            for i in topology.leaving[node]:
                target = topology.links[i].target
                # Devices do not forward messages if a path through switches alone exists.
                if target not in tree and (over_devices or target >= topology.size):
                    begin = i if first_link < 0 else first_link
                    heapq.heappush(queue, (cost + self.costs[i], target, begin, i))
        self.trees[key] = tree
        return tree


# -- the greatest rate between two sets of nodes (Edmonds and Karp 1972) ---------------------------
SOURCE = -1
SINK = -2


def max_flow(topology: Topology, sources: Iterable[int], targets: Iterable[int]) -> float:
    """Return the bytes a second that can go from all sources together to all targets together."""
    # One artificial source feeds all sources without limit, and all targets drain into one sink, so
    # that the flow from set to set is a flow from node to node.
    residual: dict[int, dict[int, float]] = {SOURCE: dict.fromkeys(sources, math.inf), SINK: {}}
    for (a, b), i in topology.between.items():
        residual.setdefault(a, {})[b] = float(topology.rate_bytes_per_s[i])
        residual.setdefault(b, {}).setdefault(a, 0.0)
    for node in residual[SOURCE]:
        residual.setdefault(node, {})
    for node in targets:
        residual.setdefault(node, {})[SINK] = math.inf
    total = 0.0
    while path := _shortest(residual):
        # The narrowest link of a path bounds what the path adds. The reverse entry allows a later
        # path to take some of it back.
        amount = min(residual[a][b] for a, b in path)
        if math.isinf(amount):
            return amount
        for a, b in path:
            residual[a][b] -= amount
            residual[b][a] = residual[b].get(a, 0.0) + amount
        total += amount
    return total


def _shortest(residual: dict[int, dict[int, float]]) -> list[tuple[int, int]]:
    """Return the edges of a shortest path with free capacity, from sink to source; [] if none."""
    previous: dict[int, int] = {}
    queue = deque([SOURCE])
    while queue and SINK not in previous:
        node = queue.popleft()
        for target, spare in residual[node].items():
            if spare > 0 and target not in previous and target != SOURCE:
                previous[target] = node
                queue.append(target)
    path = []
    node = SINK
    while node in previous:
        path.append((previous[node], node))
        node = previous[node]
    return path
