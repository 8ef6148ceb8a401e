"""Networks whose feature maps do not fit: which part to compute in tiles, and in how many.

    bytes(tile) = weights + tensors resident while tiles are computed + peak of one tile

Resident are the tensors that the tiled part reads and writes, whole, and those that later nodes
still need. The fewest tiles that fit are chosen: each one computes its halo again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ascend_lab.errors import AscendLabError, CapacityError, ShapeError
from ascend_lab.graph.draft import pruned
from ascend_lab.graph.evaluate import live_bytes, macs, peak_bytes, pixels, spans, weight_bytes
from ascend_lab.graph.ir import Graph, Node, verify
from ascend_lab.graph.slice import (
    COLUMNS,
    ROWS,
    Walk,
    all_rules,
    part_of,
    rules_of,
    tile_graph_of,
    tile_key,
    walk,
)
from ascend_lab.ops.slicing import Range

Box = tuple[Range, Range]
"""Rows and columns."""
BALANCE = 256
"""Multiply-accumulates in the time an element takes to device memory: near those of the chips."""
INNER_ENDS = 4
"""Most places tried where a tiled part may end, but for the first and the last."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One run of a kind: the part of every image it reads, and of every output it writes."""

    kind: int
    reads: Mapping[str, Box]
    writes: Mapping[str, Box]


@dataclass(frozen=True, slots=True)
class Step:
    """Consecutive nodes: run as they are, or, with tiles, as one of `kinds` for every tile."""

    graph: Graph
    kinds: tuple[Graph, ...] = ()
    tiles: tuple[Tile, ...] = ()


def obstacle(graph: Graph, node: Node) -> str:
    """Return why a node cannot be computed tile by tile, or "" if it can."""
    if any(len(t.shape) != 4 or t.shape[2] * t.shape[3] == 1 for t in graph.out_types(node)):
        return "its result is no image (n, c, h, w)"
    try:
        rules = rules_of(graph, node)
    except AscendLabError as error:
        return str(error)
    ways = []
    for axis in (ROWS, COLUMNS):
        rule = rules.axes[axis]
        if not rule.splits or set(rule.joins) != {axis}:
            return f"axis {axis}: {rule.reason or 'pieces cannot be joined'}"
        if rule.grain != 1 or any(s.axis != axis or s.grain != 1 for s in rule.sources):
            return f"axis {axis} comes from another axis"
        ways.append({node.inputs[s.input] for s in rule.sources})
    if ways[0] != ways[1] or any(name in graph.constants for name in ways[0]):
        return "an operand is repeated along one axis only, or a constant image"
    return ""


def whole_inputs(graph: Graph, node: Node) -> set[str]:
    """Return the activations that every tile of a local node reads whole."""
    cut_up = {node.inputs[s.input] for s in rules_of(graph, node).axes[ROWS].sources}
    return {n for n in node.inputs if n not in cut_up and n not in graph.constants}


# -- grids ----------------------------------------------------------------------------------------
class Grid:
    """The grids of tiles of local nodes, given as a graph; which of them fit into `room` bytes."""

    def __init__(self, graph: Graph, room: int, pixels: int | None) -> None:
        self.graph, self.room, self.pixels = graph, room, pixels
        self.rules = all_rules(graph)
        shapes = [graph.types[n].shape for n in graph.outputs]
        axes = (ROWS, COLUMNS)
        self.most = [len(self.bounds(a, max(s[a] for s in shapes))) for a in axes]
        self.cache: dict[tuple[int, int], Walk | None] = {}

    def bounds(self, axis: int, count: int) -> list[dict[str, Range]]:
        """Return what each of about `count` tiles along an axis writes of every output.

        A unit is one entry of the coarsest tensor, so that strides rarely tell tiles apart; the
        last tile takes what is left.
        """
        types, names = self.graph.types, self.graph.outputs
        coarse = min(types[n].shape[axis] for node in self.graph.nodes for n in node.outputs)
        size = {n: types[n].shape[axis] for n in names}
        grain = {n: -(-size[n] // coarse) for n in names}
        units = max(-(-size[n] // grain[n]) for n in names)
        step = -(-units // count)
        inner = [u for u in range(step, units, step) if all(u * grain[n] < size[n] for n in names)]
        return [
            {n: (low * grain[n], size[n] if high is None else high * grain[n]) for n in names}
            for low, high in zip([0, *inner], [*inner, None], strict=True)
        ]

    def walk(self, axis: int, wanted: Mapping[str, Range]) -> Walk:
        """Return what a tile needs along an axis."""
        return walk(self.graph, self.rules, dict.fromkeys(self.graph.types, axis), wanted)

    def largest(self, axis: int, count: int) -> Walk | None:
        """Return the longest of about `count` tiles along an axis; None if there is no such cut."""
        if (axis, count) not in self.cache:
            bounds = self.bounds(axis, count)
            some = {0, min(1, len(bounds) - 1), len(bounds) // 2, len(bounds) - 1}
            try:
                walks = [self.walk(axis, bounds[i]) for i in some]
                found = max(walks, key=lambda w: sum(map(w.width, w.need)))
            except ShapeError:  # a tile would read padding only
                found = None
            self.cache[axis, count] = found
        return self.cache[axis, count]

    def tile(self, rows: int, cols: int) -> Graph | None:
        """Return the tile that computes most in a grid; None if the grid is none."""
        row, col = self.largest(ROWS, rows), self.largest(COLUMNS, cols)
        return tile_graph_of(self.graph, row, col, "tile") if row and col else None

    def smallest(self) -> int:
        """Return the bytes of a tile of the finest grid; too many if it reads only padding."""
        tile = self.tile(*self.most)
        return max(live_bytes(tile)) if tile else self.room + 1

    def fits(self, rows: int, cols: int) -> bool:
        """Tell whether the tiles of a grid fit into memory and their results into kernels."""
        tile = self.tile(rows, cols)
        if tile is None or max(live_bytes(tile)) > self.room:
            return False
        return not self.pixels or max(pixels(tile, n) for n in tile.nodes) <= self.pixels

    def least(self) -> Step | None:
        """Return the step with the fewest tiles that fit, of those with the shortest borders."""
        best, found = self.most[0] * self.most[1] + 1, list[tuple[int, int]]()
        rows = 1 if self.fits(*self.most) else best
        while rows <= min(self.most[0], best):
            cols = self.columns(rows, min(self.most[1], best // rows))
            if cols and rows * cols <= best:
                found = [g for g in found if g[0] * g[1] == rows * cols] + [(rows, cols)]
                best = rows * cols
            rows = max(rows + 1, rows * 9 // 8)
        high, wide = self.most
        # of equals the one with most rows of tiles: whole rows lie side by side in memory
        borders = {g: (g[0] * wide + g[1] * high, -g[0]) for g in found}
        return self.step(*min(found, key=borders.__getitem__)) if found else None

    def columns(self, rows: int, most: int) -> int:
        """Return the fewest columns of tiles that fit with so many rows of them, or 0."""
        low, high = 1, most
        if most < 1 or not self.fits(rows, most):
            return 0
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(rows, middle) else (middle + 1, high)
        return high

    def step(self, rows: int, cols: int) -> Step:
        """Return a grid as a step: tiles with equal keys share a graph."""
        graph, kinds, tiles = self.graph, list[Graph](), list[Tile]()
        known: dict[object, int] = {}
        own = []
        for axis, count in ((ROWS, rows), (COLUMNS, cols)):
            walks = [self.walk(axis, wanted) for wanted in self.bounds(axis, count)]
            own.append([(w, tile_key(graph, w, axis)) for w in walks])
        for (row, row_key), (col, col_key) in product(*own):
            key = (row_key, col_key)
            if key not in known:
                known[key] = len(kinds)
                name = f"{graph.name}.tile{len(kinds)}"
                kinds.append(verify(tile_graph_of(graph, row, col, name)))
            reads = {n: (row.need[n], col.need[n]) for n in graph.inputs if n in row.need}
            writes = {n: (row.wanted[n], col.wanted[n]) for n in graph.outputs}
            tiles.append(Tile(known[key], reads, writes))
        return Step(graph, tuple(kinds), tuple(tiles))


# -- what tiles cost -----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Tiled:
    """A network as steps within a limit; `peak_bytes` is what the steps need, weights included."""

    graph: Graph
    steps: tuple[Step, ...]
    limit_bytes: int
    peak_bytes: int

    @property
    def tile_count(self) -> int:
        """Number of tiles; 0 if everything runs whole."""
        return sum(len(step.tiles) for step in self.steps)

    @property
    def halo_share(self) -> float:
        """Multiply-accumulates computed again as a share of the network's: tiled / whole - 1.

        Of a network without any it is the share of elements.
        """
        count = macs if macs(self.graph) else work
        return sum(_sum(step, count) for step in self.steps) / max(1, count(self.graph)) - 1.0


def work(graph: Graph) -> int:
    """Return what a graph costs in multiply-accumulates, elements written at their balance."""
    written = sum(graph.types[n].elements for node in graph.nodes for n in node.outputs)
    return macs(graph) + BALANCE * written


def _sum(step: Step, count: Callable[[Graph], int]) -> int:
    each = [count(kind) for kind in step.kinds]
    return sum(each[tile.kind] for tile in step.tiles) if step.tiles else count(step.graph)


def _extra(step: Step) -> int:
    """Return the cost of tiles: what they compute again and the copies in and out."""
    copied = _sum(step, lambda g: sum(g.types[n].elements for n in (*g.inputs, *g.outputs)))
    return _sum(step, work) - work(step.graph) + BALANCE * copied


# -- which part -----------------------------------------------------------------------------------
def tile_graph(graph: Graph, limit_bytes: int, *, most_pixels: int | None = None) -> Tiled:
    """Return the graph as steps whose peak is within a limit; tiles only where it must.

    `most_pixels` bounds the pixels, of all images together, that one convolution writes.
    Raises `CapacityError` that says which node does not fit and why it cannot be tiled.
    """
    graph = pruned(graph)
    room = limit_bytes - weight_bytes(graph)
    live = live_bytes(graph)
    large = [
        i for i, node in enumerate(graph.nodes)
        if live[i] > room or pixels(graph, node) > (most_pixels or pixels(graph, node))
    ]  # fmt: skip
    chosen: list[_Part] = []
    for start, end in _runs(graph, large):
        over = [i for i in large if start <= i < end]
        if over:
            chosen += _parts(graph, start, end, over, limit_bytes, most_pixels)
    steps, done = list[Step](), 0
    for part in chosen:
        steps += [*_whole(graph, done, part.start), part.step]
        done = part.stop
    steps += _whole(graph, done, len(graph.nodes))
    inside = {i for part in chosen for i in range(part.start, part.stop)}
    peaks = [n for i, n in enumerate(live) if i not in inside] + [p.peak_bytes for p in chosen]
    return Tiled(graph, tuple(steps), limit_bytes, weight_bytes(graph) + max(peaks))


def _whole(graph: Graph, start: int, end: int) -> list[Step]:
    nodes = graph.nodes[start:end]
    return [Step(part_of(graph, nodes, f"{graph.name}.{start}"))] if nodes else []


def _runs(graph: Graph, large: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of consecutive nodes that may share tiles; refuse a large node in none."""
    start, written = 0, set[str]()
    for i, node in enumerate(graph.nodes):
        reason = obstacle(graph, node)
        if reason or whole_inputs(graph, node) & written:
            if start < i:
                yield start, i
            start, written = i + bool(reason), set()
        if reason and i in large:
            live = live_bytes(graph)[i]
            raise CapacityError(
                f"device memory for {live} B of activations while {node.name} ({node.op}) runs",
                f"an operator that cannot be computed in tiles: {reason}",
                "use a chip with more memory or a smaller input",
            )
        written |= set() if reason else set(node.outputs)
    if start < len(graph.nodes):
        yield start, len(graph.nodes)


@dataclass(frozen=True, slots=True)
class _Part:
    """Nodes start .. stop-1 in tiles, and the most bytes of activations there meanwhile."""

    start: int
    stop: int
    step: Step
    peak_bytes: int


def _parts(
    graph: Graph, start: int, end: int, over: Sequence[int], limit: int, pixels: int | None
) -> list[_Part]:
    """Return the tiled parts of a run: one for all large nodes, or one for each group of them."""
    firsts = [i for i in over if i - 1 not in over]
    lasts = [i for i in over if i + 1 not in over]
    one = [(start, over[-1], end)]
    each = list(zip(firsts, lasts, [*firsts[1:], end], strict=True))
    found, problem = list[list[_Part]](), None
    for way in (one, each) if each != one else (one,):
        try:
            found.append([_part(graph, *ends, limit, pixels) for ends in way])
        except CapacityError as error:
            problem = problem or error
    if not found:
        raise problem or AssertionError
    return min(found, key=lambda parts: sum(_extra(part.step) for part in parts))


def _part(graph: Graph, start: int, last: int, end: int, limit: int, pixels: int | None) -> _Part:
    """Return the part from `start`, past `last`, at most to `end`, that computes least again.

    It ends behind the last large node, or where few bytes cross, and never in front of an
    elementwise node, which is fused with what it follows.
    """
    weights, alive = weight_bytes(graph), spans(graph)
    found, least = list[_Part](), list[int]()
    stops = [s for s in range(last + 1, end) if not graph.nodes[s].has("lanes")]
    for stop in _ends(graph, alive, start, [*stops, end]):
        own = part_of(graph, graph.nodes[start:stop], f"{graph.name}.{start}")
        before = {
            n for n, (a, b) in alive.items() if b >= start and (a < start or n in graph.inputs)
        }
        resident = sum(graph.types[n].size_bytes for n in {*own.inputs, *own.outputs, *before})
        grid = Grid(own, limit - weights - resident, pixels)
        step = grid.least()
        if step:
            peak = resident + max(max(live_bytes(kind)) for kind in step.kinds)
            found.append(_Part(start, stop, step, peak))
        least.append(weights + resident + grid.smallest())
    if not found:
        raise CapacityError(
            f"{graph.name}: about {min(*least, peak_bytes(graph))} B of device memory for "
            f"{graph.nodes[start].name} .. {graph.nodes[last].name} whole or in the smallest "
            f"tiles, {weights} B of it weights",
            f"{limit} B",
            "use a chip with more memory or a smaller input",
        )
    return min(found, key=lambda part: (_extra(part.step), part.stop))


def _ends(graph: Graph, alive: Mapping[str, Range], start: int, stops: Sequence[int]) -> list[int]:
    """Return the first of the stops and the last, and some at which fewer bytes cross than near.

    What crosses is written from node `start` on and needed at the stop or behind it.
    """

    def crossing(stop: int) -> int:
        found = (n for n, (a, b) in alive.items() if start <= a < stop)
        needed = (n for n in found if alive[n][1] >= stop or n in graph.outputs)
        return sum(graph.types[n].size_bytes for n in needed if n not in graph.inputs)

    cost = [crossing(stop) for stop in stops]
    low = [stops[i] for i in range(1, len(cost) - 1) if cost[i - 1] > cost[i] <= cost[i + 1]]
    inner = low[:: -(-len(low) // INNER_ENDS)] if low else []
    return sorted({stops[0], *inner, stops[-1]})
