"""Chooses the engine of each operator, by the published rule or by a placement of least time.

By the rule of the vendor's graph engine, every operator takes the engine of the lowest rank that
supports it, regardless of its neighbours and of its time there. The exact placement minimises

    sum of the operators' seconds + sum of the copies' seconds between host and device

A tensor is copied once, however many operators read it on the other side. All engines of the device
share its memory, so that there are two sides, and the best placement is a minimum cut (Stone 1977):
an operator is cut from the side where it runs, a tensor from its readers on the other side.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ascend_lab.errors import UnsupportedError
from ascend_lab.machine.chip import Chip

CORE = "AI core"
CPU = "AI CPU"
MEDIA = "media unit"
HOST = "host CPU"


RANKS = {CORE: 1, CPU: 3, MEDIA: 5, HOST: 10}
"""The published rule takes the engine of lowest rank: AIcoreEngine, DNN_VM_AICPU_ASCEND,
DNN_VM_DVPP, DNN_VM_HOST_CPU (CANN graph engine, docs/zh/design/features/engine.md).
"""
HOST_OVERHEAD_S = 5e-6
HOST_RATE_BYTES_PER_S = 1e10
COPY_OVERHEAD_S = 1e-5
TRUST = "assumed"
"""How sure the host's numbers above are: no source gives them for operators.

The driver's time for a copy is added to the time on the chip's PCIe link.
"""


def copy_s(chip: Chip, size_bytes: int) -> float:
    """Return the seconds of a copy between host and device."""
    link = chip.links.get("pcie")
    if link is None:
        needed = f"{chip.name}: a link to the host"
        raise UnsupportedError(needed, "none", "add link.pcie to the chip file")
    return COPY_OVERHEAD_S + link.latency_s + size_bytes / link.rate_bytes_per_s


@dataclass(frozen=True, slots=True)
class Work:
    """An operator to place: its seconds on every engine that supports it, and its tensors."""

    name: str
    seconds: Mapping[str, float]
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def best(self, on_host: bool) -> tuple[float, str]:
        """Return the least seconds on host or device, and the engine; infinity without one."""
        sides = [(s, e) for e, s in self.seconds.items() if (e == HOST) == on_host]
        return min(sides, default=(math.inf, ""))


@dataclass(frozen=True, slots=True)
class Placement:
    """The engine of every operator, the tensors copied (True: to the host), and the seconds."""

    engines: Mapping[str, str]
    copies: tuple[tuple[str, bool], ...]
    time_s: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Operators in order, and the seconds of copying each tensor; others are copied for free."""

    works: Sequence[Work]
    copy_s: Mapping[str, float] = field(default_factory=dict)

    def placed(self, engines: Mapping[str, str]) -> Placement:
        """Return a placement with its copies and its time."""
        # True: written on the host; tensors that no operator writes are weights, on both sides
        side = {tensor: engines[work.name] == HOST for work in self.works for tensor in work.writes}
        # a tensor is copied once, however many operators of the other side read it
        copies = dict.fromkeys(
            (tensor, engines[work.name] == HOST)
            for work in self.works
            for tensor in work.reads
            if tensor in self.copy_s and side.get(tensor) == (engines[work.name] != HOST)
        )
        works_s = sum(work.seconds[engines[work.name]] for work in self.works)
        moved_s = sum(self.copy_s[tensor] for tensor, _ in copies)
        return Placement(dict(engines), tuple(copies), works_s + moved_s)

    def cheapest_engine(self) -> Placement:
        """Return the placement by the published rule."""
        return self.placed({w.name: min(w.seconds, key=RANKS.__getitem__) for w in self.works})

    def exact(self) -> Placement:
        """Return a placement of least time; of several, one with most operators on the device."""
        cut = _Cut()
        writer = {tensor: work.name for work in self.works for tensor in work.writes}
        for work in self.works:
            # an operator on the host's side is cut from the device: that costs its host seconds
            cut.add_edge("device", work.name, work.best(on_host=True)[0])
            cut.add_edge(work.name, "host", work.best(on_host=False)[0])
            for tensor in work.reads:
                # edges of infinite capacity tie a tensor's copy to its readers: one copy for all
                if tensor in writer and tensor in self.copy_s:
                    cut.add_edge(f"to host {tensor}", work.name, math.inf)
                    cut.add_edge(work.name, f"to device {tensor}", math.inf)
        for tensor, name in writer.items():
            if tensor in self.copy_s:
                # the copy is paid if the writer and some reader are on different sides
                cut.add_edge(name, f"to host {tensor}", self.copy_s[tensor])
                cut.add_edge(f"to device {tensor}", name, self.copy_s[tensor])
        on_host = cut.sink_side("device", "host")
        return self.placed({w.name: w.best(w.name in on_host)[1] for w in self.works})


class _Cut:
    """A network of capacities and its minimum cut.

    Capacities are integers, in femtoseconds: with floats, rounding would leave capacities of
    1e-20 s, and the search for paths would use these.
    """

    ENDLESS = 10**24

    def __init__(self) -> None:
        self.capacity_left: dict[str, dict[str, int]] = {}

    def add_edge(self, start: str, end: str, seconds: float) -> None:
        """Add an edge: its seconds are paid if start is on the source's side, end on the sink's."""
        capacity = self.ENDLESS if math.isinf(seconds) else round(seconds * 1e15)
        edges = self.capacity_left.setdefault(start, {})
        edges[end] = edges.get(end, 0) + capacity
        # the reverse edge can undo a flow: its capacity grows as the forward edge is used
        self.capacity_left.setdefault(end, {}).setdefault(start, 0)

    def sink_side(self, source: str, sink: str) -> set[str]:
        """Return the smallest sink side of any minimum cut, by Dinic's algorithm (1970)."""
        # each round fills all shortest paths, so that the shortest path of the next is longer
        while sink in (level := self._reached(source)):
            following = {node: iter(list(self.capacity_left[node])) for node in level}
            while path := self._path(source, sink, level, following):
                room = min(self.capacity_left[a][b] for a, b in path)
                for a, b in path:
                    self.capacity_left[a][b] -= room
                    self.capacity_left[b][a] += room
        # the smallest set: nodes from which the sink can still be reached. All others stay on the
        # device, which is preferred among cuts of equal cost.
        return set(self._reached(sink, back=True))

    def _reached(self, start: str, *, back: bool = False) -> dict[str, int]:
        """Return distances from `start` along edges with capacity left; `back`: against them."""
        level = {start: 0}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for end in self.capacity_left.get(node, {}):
                room = self.capacity_left[end][node] if back else self.capacity_left[node][end]
                if room > 0 and end not in level:
                    level[end] = level[node] + 1
                    queue.append(end)
        return level

    def _path(
        self, source: str, sink: str, level: Mapping[str, int], following: Mapping[str, object]
    ) -> list[tuple[str, str]]:
        """Return a path along rising levels, [] if none is left; dead ends are tried only once."""
        path: list[tuple[str, str]] = []
        node = source
        while node != sink:
            for end in following[node]:  # type: ignore[attr-defined]
                if self.capacity_left[node][end] > 0 and level.get(end) == level[node] + 1:
                    path.append((node, end))
                    node = end
                    break
            else:
                if not path:
                    return []
                # a dead end: go back a step and try the next edge there
                node = path.pop()[0]
        return path
