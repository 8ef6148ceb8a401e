"""Computes what a set of operations that run together costs: a roofline for each of its steps.

A subgraph runs on a grid of tiles of w x h. A tile takes `ceil(K / k)` steps, where K is the length
of the longest sums of its products; an operation with a smaller grid or fewer steps does nothing in
the other tiles and steps. Each step takes max(compute, moved elements / bandwidth). A tensor that
is made and read inside the subgraph moves for free.

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
    """A tensor that moves piece by piece, for an operation whose result is height x width.

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

    `reads` are tensors from outside, `writes` results that no operation inside reads, and `kept`
    tensors lie whole in fast memory. `bundles` has each slice, without its tensor's number, with
    how many are equal to it. `works` are the operations, those that compute alike as one. `depths`,
    `heights` and `widths` are the different lengths among these.
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
        """Return the steps at which the moves or the compute may change, from 0 to the end."""
        ends = [-(-depth // k) for depth in self.depths]
        return sorted({0, 1, *ends, *(end - 1 for end in ends)})


def group_of(
    problem: Problem,
    operations: Iterable[int],
    resident: Iterable[int] = (),
    retain: Iterable[int] = (),
) -> Group:
    """Return the group of some operations; ScheduleError if it cannot retain a tensor."""
    inside = set(operations)
    if not inside or not all(0 <= op < len(problem.operations) for op in inside):
        raise ScheduleError("a subgraph of operations of the problem", str(sorted(inside))[:60])
    ordered = sorted(inside, key=problem.rank.__getitem__)
    made = [tensor for op in ordered for tensor in problem.operations[op].outputs]
    made_set = set(made)
    used = {tensor for op in ordered for tensor in problem.operations[op].inputs}
    reads = tuple(sorted(used - made_set))
    writes = tuple(tensor for tensor in made if tensor not in used)
    resident_set = set(resident)
    retain_set = set(retain)
    stray = retain_set - set(writes) - set(reads) - resident_set
    if stray:
        needed = "retained tensors that the subgraph reads, holds or leaves"
        raise ScheduleError(needed, str(sorted(stray)))
    kept = tuple(sorted(resident_set | retain_set))
    ready = _ready(problem, ordered)
    slices = _slices(problem, ordered, made_set, resident_set, set(kept), ready)
    works = _works(problem, ordered, ready)
    slice_counts = Counter(replace(piece, tensor=-1) for piece in slices)
    depths = {work.depth for work in works} | {work.ready for work in works}
    return Group(
        problem=problem,
        operations=tuple(ordered),
        reads=reads,
        writes=writes,
        kept=kept,
        bundles=tuple(slice_counts.items()),
        works=works,
        depths=tuple(sorted(depths)),
        heights=tuple(sorted({work.height for work in works})),
        widths=tuple(sorted({work.width for work in works})),
    )


def _works(problem: Problem, ordered: Sequence[int], ready: dict[int, int]) -> tuple[Work, ...]:
    """Return the operations, those that compute alike as one with the sum of their costs."""
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
        makers = [problem.producer.get(t, -1) for t in problem.operations[op].inputs]
        deepest = max((ready[maker] for maker in makers if maker in ready), default=1)
        is_product = problem.operations[op].kind == "MatMul"
        ready[op] = problem.depth(op) if is_product else deepest
    return ready


def _slices(
    problem: Problem,
    ordered: Sequence[int],
    made: set[int],
    resident: set[int],
    kept: set[int],
    ready: dict[int, int],
) -> tuple[Slice, ...]:
    """Return the slices that move: not those of resident tensors, nor of results that stay."""
    slices: dict[tuple[int, str], Slice] = {}
    inside = [problem.operations[op] for op in ordered]
    read = {tensor for operation in inside for tensor in operation.inputs}
    lefts = {operation.inputs[0] for operation in inside if operation.kind == "MatMul"}
    for op, operation in zip(ordered, inside, strict=True):
        height, width = problem.shape(op)
        roles = ["operand"] * len(operation.inputs)
        if operation.kind == "MatMul":
            # a product that is a left factor of another keeps its own left factor whole
            is_left_factor = any(tensor in lefts for tensor in operation.outputs)
            roles = ["whole" if is_left_factor else "left", "right"][: len(roles)]
        moving = [
            (tensor, role)
            for tensor, role in zip(operation.inputs, roles, strict=True)
            if tensor not in made and tensor not in resident
        ]
        moving += [
            (tensor, "result")
            for tensor in operation.outputs
            if tensor not in read and tensor not in kept
        ]
        for tensor, role in moving:
            shape = (problem.heights[tensor], problem.widths[tensor])
            new_slice = Slice(tensor, role, shape, ready[op], height, width)
            known_slice = slices.get((tensor, role), new_slice)
            # a tensor read by several operations in one role moves once, for the largest grid
            slices[tensor, role] = replace(
                known_slice,
                height=max(known_slice.height, height),
                width=max(known_slice.width, width),
            )
    return tuple(slices.values())


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
    group: Group, granularity: tuple[Any, Any, Any], minimum: Callable[[Any, Any], Any] = min
) -> Any:
    """Return the elements that a tile needs in fast memory at once; of many by `np.minimum`."""
    problem = group.problem
    (w, h, k) = granularity
    total = sum(problem.size(tensor) for tensor in group.kept)
    for piece, count in group.bundles:
        height, width = piece.shape
        rows = k if piece.role == "right" else h
        columns = {"left": k, "whole": width}.get(piece.role, w)
        total = total + count * minimum(rows, height) * minimum(columns, width)
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
        got = f"{need} elements for subgraph {list(step.operations)[:8]} at {step.granularity}"
        raise CapacityError(needed, got, "use a smaller tile")
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
        missing = sorted(set(group.reads) - stored - resident)
        if missing:
            raise ScheduleError(f"tensors {missing[:8]} in a memory before subgraph {number}")
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
    """Return the time of all steps of all tiles of a group, whether or not they fit."""
    w, h, k = granularity
    tiles = _tiles(group, w, h, order)
    moves = _moves(group, tiles, k)
    works = _computed(group, tiles)
    time = 0.0
    # all steps from one cut to the next cost the same: the first one is computed
    for step, next_step in pairwise(group.cuts(k)):
        moved = np.zeros(len(tiles.weight))
        work = np.zeros(len(tiles.weight))
        for (per_term, depth), elements in moves.items():
            if per_term:
                moved += elements * _terms(depth, step, k)
            elif _ends(depth, step, k):
                moved += elements
        for (per_term, depth), cost in works.items():
            if per_term:
                work += cost * (_terms(depth, step, k) / depth)
            elif _ends(depth, step, k):
                work += cost
        step_time = np.maximum(work, moved / group.problem.throughput)
        time += float(step_time @ tiles.weight) * (next_step - step)
    return time


def _terms(depth: int, step: int, k: int) -> int:
    """Return how many terms of a sum of a depth a step adds up."""
    return min(max(depth - step * k, 0), k)


def _ends(depth: int, step: int, k: int) -> bool:
    """Return whether sums of a depth are complete after this step and not before."""
    return step == -(-depth // k) - 1


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Rows and columns of tiles of h x w, and how many equal tiles each stands for.

    `before` has row and column of the tile before, if there is an order. `heights_inside` and
    `widths_inside` map a length to how much of it lies in each tile.
    """

    rows: Ints
    columns: Ints
    weight: Floats
    before: tuple[Ints, Ints] | None
    h: int
    w: int
    heights_inside: Callable[[int], Floats] = field(init=False)
    widths_inside: Callable[[int], Floats] = field(init=False)

    def __post_init__(self) -> None:
        """Make both functions remember their results."""
        object.__setattr__(self, "heights_inside", cache(partial(_extent, self.h, self.rows)))
        object.__setattr__(self, "widths_inside", cache(partial(_extent, self.w, self.columns)))


Parts = dict[tuple[bool, int], Floats]
"""Amounts by tile: those of (True, depth) arise at each of the `depth` terms of a sum, those of
(False, depth) once, in the step in which sums of that depth end."""


def _computed(group: Group, tiles: _Tiles) -> Parts:
    """Return the compute of each tile: base cost times native tiles, a part of one as a whole."""
    native_width, native_height = group.problem.native
    amounts = Parts()
    for work in group.works:
        native_rows = np.ceil(tiles.heights_inside(work.height) / native_height)
        native_columns = np.ceil(tiles.widths_inside(work.width) / native_width)
        per_term = work.kind == "MatMul"
        key = (per_term, work.depth if per_term else work.ready)
        amounts[key] = amounts.get(key, 0.0) + work.base_cost * (native_rows * native_columns)
    return amounts


def _moves(group: Group, tiles: _Tiles, k: int) -> Parts:
    """Return the elements that each tile moves."""
    amounts = Parts()
    has_one_step = group.steps(k) == 1
    for piece, count in group.bundles:
        height, width = piece.shape
        per_term = piece.role in ("left", "right")
        if piece.role == "left":  # a column of the tile's rows for each term
            area = tiles.heights_inside(height)
            depth = width
        elif piece.role == "right":  # a row of the tile's columns for each term
            area = tiles.widths_inside(width)
            depth = height
        elif piece.role == "whole":  # all columns of the tile's rows, in the first step
            area = tiles.heights_inside(height) * width
            depth = 1
        else:
            area = tiles.heights_inside(height) * tiles.widths_inside(width)
            depth = piece.ready
        moves = (tiles.heights_inside(piece.height) > 0) & (tiles.widths_inside(piece.width) > 0)
        if piece.role == "whole" or (per_term and has_one_step):
            moves &= ~_found(piece, tiles)
        key = (per_term, depth)
        amounts[key] = amounts.get(key, 0.0) + count * np.where(moves, area, 0.0)
    return amounts


def _found(piece: Slice, tiles: _Tiles) -> NDArray[np.bool_]:
    """Return for each tile whether the tile before it has loaded its slice of a factor.

    That is so for a left factor in the same row of tiles, for a right one in the same column.
    """
    if tiles.before is None:
        return np.zeros(len(tiles.rows), bool)
    rows, columns = tiles.before
    was_inside = (rows >= 0) & (rows * tiles.h < piece.height) & (columns * tiles.w < piece.width)
    if piece.role == "right":
        return np.asarray(was_inside & (columns == tiles.columns))
    return np.asarray(was_inside & (rows == tiles.rows))


def _tiles(group: Group, w: int, h: int, order: Sequence[int] | None) -> _Tiles:
    """Return the tiles in their order; without one, tiles that cost the same count as one."""
    if order is None:
        first_rows, row_counts = _classes(group.heights, h)
        first_columns, column_counts = _classes(group.widths, w)
        return _Tiles(
            rows=np.repeat(first_rows, len(first_columns)),
            columns=np.tile(first_columns, len(first_rows)),
            weight=np.outer(row_counts, column_counts).ravel().astype(np.float64),
            before=None,
            h=h,
            w=w,
        )
    across = -(-max(group.widths) // w)
    down = -(-max(group.heights) // h)
    tiles = np.asarray(order, dtype=np.int64)
    if len(tiles) != across * down or not np.array_equal(np.sort(tiles), np.arange(len(tiles))):
        needed = f"a traversal order that names each of the {across * down} tiles once"
        raise ScheduleError(needed, f"{len(tiles)} entries")
    rows, columns = np.divmod(tiles, across)
    # the first tile has none before it, which -1 stands for
    before = (np.append(-1, rows[:-1]), np.append(-1, columns[:-1]))
    return _Tiles(rows, columns, np.ones(len(tiles)), before, h, w)


def _classes(lengths: Sequence[int], tile: int) -> tuple[Ints, Ints]:
    """Divide a row of tiles where a length ends: return each part's first tile and tile count.

    Tiles of 32 and lengths 64, 80: parts begin at tiles 0 and 2, with 2 tiles and 1.
    """
    cuts = sorted({0, *(n // tile for n in lengths), *(-(-n // tile) for n in lengths)})
    return np.array(cuts[:-1]), np.diff(cuts)


def _extent(tile: int, index: Ints, length: int) -> Floats:
    """Return how much of a length lies in each tile, given the tiles' numbers."""
    return np.minimum(np.maximum(length - index * tile, 0), tile).astype(np.float64)
