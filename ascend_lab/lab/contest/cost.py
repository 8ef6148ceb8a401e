"""What a set of operations that run together costs: one roofline for every step of it.

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

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import CapacityError, ScheduleError
from ascend_lab.lab.contest.problem import Problem


@dataclass(frozen=True, slots=True)
class Slice:
    """A tensor moved piece by piece for a grid of height x width, by an operation that uses it.

    `role` is left, right, whole (a left factor held for all steps), operand or result; `shape` is
    (height, width) of the tensor; operands and results move when sums of depth `ready` are done.
    """

    tensor: int
    role: str
    shape: tuple[int, int]
    ready: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class Work:
    """Operations that compute alike: a result of height x width, sums of one depth.

    An element-wise operation runs when sums of depth `ready` are complete. `base_cost` adds up.
    """

    kind: str
    height: int
    width: int
    depth: int
    ready: int
    base_cost: float


@dataclass(frozen=True, slots=True)
class Group:
    """Operations in an order that respects their edges, and the slices they move.

    `reads` come from outside, `writes` are results no operation inside reads, `kept` tensors lie
    whole in fast memory. `bundles` counts the slices that are alike, `works` the operations.
    """

    problem: Problem
    operations: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    kept: tuple[int, ...]
    bundles: tuple[tuple[Slice, int], ...]
    works: tuple[Work, ...]
    depths: tuple[int, ...]
    heights: tuple[int, ...]
    widths: tuple[int, ...]

    def steps(self, k: int) -> int:
        """Return the steps of a tile."""
        return -(-max(self.depths) // k)

    def cuts(self, k: int) -> list[int]:
        """Return the steps at which what is done in a step may change, from 0 to the end."""
        steps = [-(-depth // k) for depth in self.depths]
        return sorted({0, 1, *steps, *(step - 1 for step in steps)})


def group_of(
    problem: Problem,
    operations: Iterable[int],
    resident: Iterable[int] = (),
    retain: Iterable[int] = (),
) -> Group:
    """Return the group of some operations; ScheduleError if a retained tensor passes by it."""
    inside = set(operations)
    if not inside or not all(0 <= op < len(problem.operations) for op in inside):
        raise ScheduleError("a subgraph of operations of the problem", str(sorted(inside))[:60])
    ordered = sorted(inside, key=problem.rank.__getitem__)
    made = [tensor for op in ordered for tensor in problem.operations[op].outputs]
    own = set(made)
    used = {tensor for op in ordered for tensor in problem.operations[op].inputs}
    reads = tuple(sorted(used - own))
    writes = tuple(tensor for tensor in made if tensor not in used)
    resident = set(resident)
    retain = set(retain)
    stray = retain - set(writes) - set(reads) - resident
    if stray:
        needed = "retained tensors that the subgraph reads, holds or leaves"
        raise ScheduleError(needed, str(sorted(stray)))
    kept = tuple(sorted(resident | retain))
    ready = _ready(problem, ordered)
    slices = _slices(problem, ordered, own, resident, set(kept), ready)
    works = _works(problem, ordered, ready)
    alike = Counter(replace(piece, tensor=-1) for piece in slices)
    depths = sorted({work.depth for work in works} | {work.ready for work in works})
    sides = ({work.height for work in works}, {work.width for work in works})
    heights, widths = (tuple(sorted(side)) for side in sides)
    bundles = tuple(alike.items())
    return Group(
        problem, tuple(ordered), reads, writes, kept, bundles, works, tuple(depths), heights, widths
    )


def _works(problem: Problem, ordered: Sequence[int], ready: dict[int, int]) -> tuple[Work, ...]:
    costs: Counter[tuple[str, int, int, int, int]] = Counter()
    for op in ordered:
        operation = problem.operations[op]
        key = (operation.kind, *problem.shape(op), problem.depth(op), ready[op])
        costs[key] += operation.base_cost  # type: ignore[assignment]
    return tuple(Work(*key, base_cost) for key, base_cost in costs.items())


def _ready(problem: Problem, ordered: Sequence[int]) -> dict[int, int]:
    """Return for each operation the deepest sum that must be complete before its results are."""
    ready: dict[int, int] = {}
    for op in ordered:
        before = [problem.producer.get(t, -1) for t in problem.operations[op].inputs]
        deepest = max((ready[make] for make in before if make in ready), default=1)
        product = problem.operations[op].kind == "MatMul"
        ready[op] = problem.depth(op) if product else deepest
    return ready


def _slices(
    problem: Problem,
    ordered: Sequence[int],
    own: set[int],
    resident: set[int],
    kept: set[int],
    ready: dict[int, int],
) -> tuple[Slice, ...]:
    """Return the slices that move: not those of resident tensors, nor of results that stay."""
    found: dict[tuple[int, str], Slice] = {}
    inside = [problem.operations[op] for op in ordered]
    read = {tensor for operation in inside for tensor in operation.inputs}
    lefts = {operation.inputs[0] for operation in inside if operation.kind == "MatMul"}
    for op, operation in zip(ordered, inside, strict=True):
        height, width = problem.shape(op)
        roles = ["operand"] * len(operation.inputs)
        if operation.kind == "MatMul":
            whole = any(tensor in lefts for tensor in operation.outputs)
            roles = ["whole" if whole else "left", "right"][: len(roles)]
        pairs = [
            (tensor, role)
            for tensor, role in zip(operation.inputs, roles, strict=True)
            if tensor not in own and tensor not in resident
        ]
        pairs += [(t, "result") for t in operation.outputs if t not in read and t not in kept]
        for tensor, role in pairs:
            shape = (problem.heights[tensor], problem.widths[tensor])
            old = found.get((tensor, role), Slice(tensor, role, shape, ready[op], height, width))
            high = max(old.height, height)
            wide = max(old.width, width)
            found[tensor, role] = replace(old, height=high, width=wide)
    return tuple(found.values())


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Step:
    """One subgraph of a schedule: operations, (w, h, k), tensors kept afterwards, tile order."""

    operations: tuple[int, ...]
    granularity: tuple[int, int, int]
    retain: tuple[int, ...] = ()
    order: tuple[int, ...] | None = None


def working_set(
    group: Group, granularity: tuple[Any, Any, Any], least: Callable[[Any, Any], Any] = min
) -> Any:
    """Return the elements that a tile needs in fast memory at once; of many by `np.minimum`."""
    problem = group.problem
    (w, h, k) = granularity
    total = sum(problem.size(tensor) for tensor in group.kept)
    for piece, count in group.bundles:
        height, width = piece.shape
        rows = k if piece.role == "right" else h
        columns = {"left": k, "whole": width}.get(piece.role, w)
        total = total + count * least(rows, height) * least(columns, width)
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
        needed = f"a working set of at most {problem.capacity:.0f} elements"
        what = f"{need} elements for subgraph {list(step.operations)[:8]} at {step.granularity}"
        raise CapacityError(needed, what, "use a smaller tile")
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
    moves = _moves(group, tiles, k)
    works = _computed(group, tiles)
    time = 0.0
    cuts = group.cuts(k)
    for first, last in pairwise(cuts):
        moved = np.zeros(len(tiles.weight))
        work = np.zeros(len(tiles.weight))
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
    """Rows and columns of tiles, how often each counts; with an order those of the tile before."""

    rows: Ints
    columns: Ints
    weight: Floats
    before: tuple[Ints, Ints] | None
    h: int
    w: int
    high: Callable[[int], Floats] = field(init=False)
    wide: Callable[[int], Floats] = field(init=False)
    """The part of a height, and of a width, that each tile covers."""

    def __post_init__(self) -> None:
        """Remember the parts asked for."""
        object.__setattr__(self, "high", cache(partial(_extent, self.h, self.rows)))
        object.__setattr__(self, "wide", cache(partial(_extent, self.w, self.columns)))


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
            area = tiles.wide(width)
            depth = height
        elif piece.role == "operand" or piece.role == "result":
            area = tiles.high(height) * tiles.wide(width)
            depth = piece.ready
        else:
            area = tiles.high(height) * (1 if split else width)
            depth = width if split else 1
        present = (tiles.high(piece.height) > 0) & (tiles.wide(piece.width) > 0)
        if tiles.before is not None and (piece.role == "whole" or (split and one)):
            rows, columns = tiles.before  # who finds a slice of factors that the one before used
            was = (rows >= 0) & (rows * tiles.h < piece.height) & (columns * tiles.w < piece.width)
            same = columns == tiles.columns if piece.role == "right" else rows == tiles.rows
            present &= ~(was & same)
        key = (split, depth)
        parts[key] = parts.get(key, 0.0) + count * np.where(present, area, 0.0)
    return parts


def _tiles(group: Group, w: int, h: int, order: Sequence[int] | None) -> _Tiles:
    """Return the tiles in their order; without one, tiles that cost the same count as one."""
    if order is None:
        row, row_count = _classes(group.heights, h)
        column, column_count = _classes(group.widths, w)
        weight = np.outer(row_count, column_count).ravel().astype(np.float64)
        rows = np.repeat(row, len(column))
        columns = np.tile(column, len(row))
        return _Tiles(rows, columns, weight, None, h, w)
    across = -(-max(group.widths) // w)
    down = -(-max(group.heights) // h)
    tiles = np.asarray(order, dtype=np.int64)
    if len(tiles) != across * down or not np.array_equal(np.sort(tiles), np.arange(len(tiles))):
        what = f"a traversal order that names each of the {across * down} tiles once"
        raise ScheduleError(what, f"{len(tiles)} entries")
    rows, columns = np.divmod(tiles, across)
    before = (np.append(-1, rows[:-1]), np.append(-1, columns[:-1]))
    return _Tiles(rows, columns, np.ones(len(tiles)), before, h, w)


def _classes(lengths: Sequence[int], tile: int) -> tuple[Ints, Ints]:
    """Cut a line of tiles where some length ends: the first tile of each part, and how many."""
    cuts = sorted({0, *(n // tile for n in lengths), *(-(-n // tile) for n in lengths)})
    return np.array(cuts[:-1]), np.diff(cuts)


def _extent(tile: int, index: Ints, length: int) -> Floats:
    return np.minimum(np.maximum(length - index * tile, 0), tile).astype(np.float64)
