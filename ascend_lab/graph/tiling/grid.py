"""Grids of tiles: the fewest tiles of a region that fit, and the graphs they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from ascend_lab.errors import ShapeError
from ascend_lab.graph.infer import verify
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.passes.order import live_bytes
from ascend_lab.graph.tiling.bytes import pixels
from ascend_lab.graph.tiling.cuts import AXES, Region, Walk, tile_graph_of, walk
from ascend_lab.ops.slicing import Range

Box = tuple[Range, Range]
"""Rows and columns."""


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


class Grid:
    """The grids of tiles of a region, and which of them fit into `room` bytes."""

    def __init__(self, region: Region, room: int, pixels: int | None) -> None:
        self.region, self.room, self.pixels = region, room, pixels
        sizes = [t.shape for t in map(region.graph.types.get, region.graph.outputs) if t]
        self.most = [len(region.bounds(a, max(s[a] for s in sizes))) for a in AXES]
        self.cache: dict[tuple[int, int], Walk | None] = {}

    def largest(self, axis: int, count: int) -> Walk | None:
        """Return the longest of about `count` tiles along an axis; None if there is no such cut."""
        if (axis, count) not in self.cache:
            bounds = self.region.bounds(axis, count)
            some = {0, min(1, len(bounds) - 1), len(bounds) // 2, len(bounds) - 1}
            try:
                found = max((walk(self.region, axis, bounds[i]) for i in some), key=_length)
            except ShapeError:  # a tile would read padding only
                found = None
            self.cache[axis, count] = found
        return self.cache[axis, count]

    def tile(self, rows: int, cols: int) -> Graph | None:
        """Return the tile that computes most in a grid; None if the grid is none."""
        row, col = self.largest(2, rows), self.largest(3, cols)
        return tile_graph_of(self.region, row, col, "tile") if row and col else None

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
        graph, kinds, tiles = self.region.graph, list[Graph](), list[Tile]()
        known: dict[object, int] = {}
        own = []
        for axis, count in zip(AXES, (rows, cols), strict=True):
            walks = [walk(self.region, axis, wanted) for wanted in self.region.bounds(axis, count)]
            own.append([(w, w.key(graph)) for w in walks])
        for (row, row_key), (col, col_key) in product(*own):
            key = (row_key, col_key)
            if key not in known:
                known[key] = len(kinds)
                name = f"{graph.name}.tile{len(kinds)}"
                kinds.append(verify(tile_graph_of(self.region, row, col, name)))
            reads = {n: (row.need[n], col.need[n]) for n in graph.inputs if n in row.need}
            writes = {n: (row.wanted[n], col.wanted[n]) for n in graph.outputs}
            tiles.append(Tile(known[key], reads, writes))
        return Step(graph, tuple(kinds), tuple(tiles))


def _length(walked: Walk) -> int:
    return sum(high - low for low, high in walked.need.values())
