"""The contest's price of a schedule: one roofline for every step of every subgraph.

A subgraph runs on a grid of tiles of w x h. A tile takes `ceil(K / k)` steps, K the deepest sum of
its products; an operation with a smaller grid or fewer steps sits out the rest. Each step takes
max(compute, moved elements / bandwidth). What is made and read inside the subgraph is free.

- left factor: h x k a step; right factor: k x w; element-wise operand and result: h x w, when the
  operation runs, which is after the last step of the products before it;
- a product read as the left factor of another product of the subgraph keeps its own left factor
  whole (h x K) for all steps of the tile (example 5 of PROBLEM.md);
- compute: base cost x native tiles begun x (k / K);
- no traversal order: every tile loads anew; a given order: a slice the step before held is free.

Limits: a real machine pays for what is free here, so costs of deep fusions are optimistic. The
organisers later forbade tiles above the native size (issues 74 and 86 of their repository), let the
raster order reuse (issue 37: 7096 in place of the 8192 of example 4) and tied an element-wise
operation before a product to tiles as wide as the sum (issue 71); the text followed here does not.

Source: PROBLEM.md of github.com/yarongmu-google/MLSys at commit 38a2a695, examples 1 to 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe.contest.group import Group, Slice, group_of
from ascend_lab.aoe.contest.problem import Problem
from ascend_lab.errors import CapacityError, ScheduleError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Step:
    """One subgraph of a schedule: operations, (w, h, k), tensors kept afterwards, tile order."""

    operations: tuple[int, ...]
    granularity: tuple[int, int, int]
    retain: tuple[int, ...] = ()
    order: tuple[int, ...] | None = None


def working_set(group: Group, granularity: tuple[int, int, int]) -> int:
    """Return the elements that a tile of the group needs in fast memory at once."""
    problem, (w, h, k) = group.problem, granularity
    total = sum(problem.size(tensor) for tensor in group.kept)
    for piece, count in group.bundles:
        height, width = piece.shape
        rows = k if piece.role == "right" else h
        columns = {"left": k, "whole": width}.get(piece.role, w)
        total += count * min(rows, height) * min(columns, width)
    return total


def step_latency(problem: Problem, step: Step, resident: Iterable[int] = ()) -> float:
    """Return the time of one subgraph that starts with the `resident` tensors in fast memory.

    CapacityError when the working set does not fit, ScheduleError for a malformed step.
    """
    if min(step.granularity) < 1:
        raise ScheduleError("a granularity of whole numbers from 1", str(step.granularity))
    group = group_of(problem, step.operations, resident, step.retain)
    need = working_set(group, step.granularity)
    if need > problem.capacity:
        what = f"{need} elements for subgraph {list(step.operations)[:8]} at {step.granularity}"
        raise CapacityError(
            f"a working set of at most {problem.capacity:.0f} elements", what, "use a smaller tile"
        )
    return grid_latency(group, step.granularity, step.order)


def schedule_latencies(problem: Problem, steps: Sequence[Step]) -> list[float]:
    """Check a schedule and return the time of each subgraph.

    Every operation runs at least once, every operand is in slow memory, resident or made inside the
    subgraph, and every result of the graph ends in slow memory; else ScheduleError.
    """
    stored = set(range(len(problem.widths))) - set(problem.producer)
    resident: frozenset[int] = frozenset()
    done: set[int] = set()
    latencies = []
    for number, step in enumerate(steps):
        group = group_of(problem, step.operations, resident, step.retain)
        lost = sorted(set(group.reads) - stored - resident)
        if lost:
            raise ScheduleError(f"tensors {lost[:8]} in a memory before subgraph {number}")
        latencies.append(step_latency(problem, step, resident))
        stored |= set(group.writes) - set(step.retain)
        resident = frozenset(step.retain)
        done |= set(step.operations)
    skipped = sorted(set(range(len(problem.operations))) - done)
    if skipped:
        raise ScheduleError("a schedule that runs every operation", f"none for {skipped[:8]}")
    results = {tensor for tensor in problem.producer if tensor not in problem.consumers}
    if results - stored:
        raise ScheduleError(f"tensors {sorted(results - stored)[:8]} in slow memory at the end")
    return latencies


def grid_latency(
    group: Group, granularity: tuple[int, int, int], order: Sequence[int] | None = None
) -> float:
    """Return the time of all steps of all tiles of a group, without a look at the capacity."""
    w, h, k = granularity
    tiles = _tiles(group, w, h, order)
    moves, works = _moves(group, tiles, k), _computed(group, tiles)
    time = 0.0
    cuts = group.cuts(k)
    for first, last in pairwise(cuts):
        moved, work = np.zeros(len(tiles.weight)), np.zeros(len(tiles.weight))
        for (split, depth), elements in moves.items():
            moved += elements * (_along(depth, first, k) if split else _ends(depth, first, k))
        for (split, depth), cost in works.items():
            share = _along(depth, first, k) / depth if split else _ends(depth, first, k)
            work += cost * share
        step = np.maximum(work, moved / group.problem.throughput)
        time += float(step @ tiles.weight) * (last - first)
    return time


def _along(depth: int, step: int, k: int) -> int:
    """Return how much of a sum a step covers."""
    return min(max(depth - step * k, 0), k)


def _ends(depth: int, step: int, k: int) -> bool:
    """Return whether sums of a depth are complete after this step and not before."""
    return step == -(-depth // k) - 1


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Rows and columns of tiles, how often each counts, and with an order those of the tile before.

    `down` and `across` remember the extents of lengths cut into tiles of h and of w.
    """

    rows: Ints
    columns: Ints
    weight: Floats
    before: tuple[Ints, Ints] | None
    h: int
    w: int
    down: dict[int, Floats]
    across: dict[int, Floats]

    def high(self, length: int) -> Floats:
        """Return the part of a height that each tile covers."""
        if length not in self.down:
            self.down[length] = _extent(length, self.h, self.rows)
        return self.down[length]

    def wide(self, length: int) -> Floats:
        """Return the part of a width that each tile covers."""
        if length not in self.across:
            self.across[length] = _extent(length, self.w, self.columns)
        return self.across[length]


Parts = dict[tuple[bool, int], Floats]
"""Vectors over tiles: (true, depth) counts for each unit of a sum, (false, depth) at its end."""


def _computed(group: Group, tiles: _Tiles) -> Parts:
    """Return the compute of each tile: base cost times native tiles begun."""
    wide, high = group.problem.native
    parts = Parts()
    for work in group.works:
        native = np.ceil(tiles.high(work.height) / high) * np.ceil(tiles.wide(work.width) / wide)
        split = work.kind == "MatMul"
        key = (split, work.depth if split else work.ready)
        parts[key] = parts.get(key, 0.0) + work.base_cost * native
    return parts


def _moves(group: Group, tiles: _Tiles, k: int) -> Parts:
    """Return the elements that each tile moves."""
    parts = Parts()
    one = group.steps(k) == 1
    for piece, count in group.bundles:
        height, width = piece.shape
        split = piece.role in ("left", "right")
        if piece.role == "right":
            area, depth = tiles.wide(width), height
        elif piece.role == "operand" or piece.role == "result":
            area, depth = tiles.high(height) * tiles.wide(width), piece.ready
        else:
            area, depth = tiles.high(height) * (1 if split else width), width if split else 1
        present = (tiles.high(piece.height) > 0) & (tiles.wide(piece.width) > 0)
        if tiles.before is not None and (piece.role == "whole" or (split and one)):
            present &= ~_held(piece, tiles, tiles.before)
        key = (split, depth)
        parts[key] = parts.get(key, 0.0) + count * np.where(present, area, 0.0)
    return parts


def _held(piece: Slice, tiles: _Tiles, before: tuple[Ints, Ints]) -> NDArray[np.bool_]:
    """Return which tiles find a slice of factors that the tile before them used."""
    rows, columns = before
    was = (rows >= 0) & (rows * tiles.h < piece.height) & (columns * tiles.w < piece.width)
    same = columns == tiles.columns if piece.role == "right" else rows == tiles.rows
    return np.asarray(was & same)


def _tiles(group: Group, w: int, h: int, order: Sequence[int] | None) -> _Tiles:
    """Return the tiles in their order; without one, tiles that cost the same count as one."""
    if order is None:
        row, row_count = _classes(group.heights, h)
        column, column_count = _classes(group.widths, w)
        weight = np.outer(row_count, column_count).ravel().astype(np.float64)
        rows, columns = np.repeat(row, len(column)), np.tile(column, len(row))
        return _Tiles(rows, columns, weight, None, h, w, {}, {})
    across, down = -(-max(group.widths) // w), -(-max(group.heights) // h)
    tiles = np.asarray(order, dtype=np.int64)
    if len(tiles) != across * down or not np.array_equal(np.sort(tiles), np.arange(len(tiles))):
        what = f"a traversal order that names each of the {across * down} tiles once"
        raise ScheduleError(what, f"{len(tiles)} entries")
    rows, columns = np.divmod(tiles, across)
    before = (np.append(-1, rows[:-1]), np.append(-1, columns[:-1]))
    return _Tiles(rows, columns, np.ones(len(tiles)), before, h, w, {}, {})


def _classes(lengths: Sequence[int], tile: int) -> tuple[Ints, Ints]:
    """Cut a line of tiles where some length ends: the first tile of each part, and how many."""
    starts = {0}
    for length in lengths:
        starts |= {length // tile, -(-length // tile)}
    cuts = sorted(starts)
    return np.array(cuts[:-1]), np.diff(cuts)


def _extent(length: int, tile: int, index: Ints) -> Floats:
    return np.minimum(np.maximum(length - index * tile, 0), tile).astype(np.float64)
