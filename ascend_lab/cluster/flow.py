"""The greatest rate between two sets of nodes: a maximum flow (Edmonds and Karp 1972)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from ascend_lab.cluster.topology import Topology

Residual = dict[int, dict[int, float]]
SOURCE, SINK = -1, -2


def max_flow(topology: Topology, sources: Iterable[int], targets: Iterable[int]) -> float:
    """Return the bytes a second that can go from all sources together to all targets together."""
    left: Residual = {SOURCE: {}, SINK: {}}
    for (a, b), i in topology.between.items():
        left.setdefault(a, {})[b] = float(topology.rate_bytes_per_s[i])
        left.setdefault(b, {}).setdefault(a, 0.0)
    for node in sources:
        left[SOURCE][node] = math.inf
        left.setdefault(node, {})
    for node in targets:
        left.setdefault(node, {})[SINK] = math.inf
    total = 0.0
    while (path := _shortest(left)) is not None:
        amount = min(left[a][b] for a, b in path)
        if math.isinf(amount):
            return amount
        for a, b in path:
            left[a][b] -= amount
            left[b][a] = left[b].get(a, 0.0) + amount
        total += amount
    return total


def _shortest(left: Residual) -> list[tuple[int, int]] | None:
    """Return the edges of a shortest path with room from source to sink, or None."""
    came: dict[int, int] = {SOURCE: SOURCE}
    queue = deque([SOURCE])
    while queue:
        node = queue.popleft()
        for target, room in left[node].items():
            if room > 0 and target not in came:
                came[target] = node
                if target == SINK:
                    return _back(came)
                queue.append(target)
    return None


def _back(came: dict[int, int]) -> list[tuple[int, int]]:
    path, node = [], SINK
    while node != SOURCE:
        path.append((came[node], node))
        node = came[node]
    return path[::-1]
