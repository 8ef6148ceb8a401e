"""Find the steps between two layouts: the greedy rule of MindSpore, and the cheapest sequence.

The greedy rule (mindspore, redistribution_operator_infer.cc): cut what can be cut without moving
anything, exchange an axis between dimensions, gather what the target does not cut; if nothing of
that applies, gather the first dimension that is wrong. It never looks at sizes. The exact search
is Dijkstra's, over all layouts that slice, all-to-all and all-gather reach.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from ascend_lab.errors import LayoutError
from ascend_lab.parallel.redistribution.layout import Layout, Map, all_layouts, unified
from ascend_lab.parallel.redistribution.steps import Cost, Step, step, steps_from

Price = Callable[[Step], float]


def price(item_bytes: int, cost: Cost | None = None) -> Price:
    """Return what a step costs: seconds of a cost model, or bytes received where there is none."""
    if cost is None:
        return lambda one: one.received_bytes(item_bytes)
    model = cost
    return lambda one: one.time_s(item_bytes, model)


def redistribute(
    source: Layout, target: Layout, item_bytes: int = 2, cost: Cost | None = None
) -> tuple[Step, ...]:
    """Return the cheapest steps from source to target: in seconds by `cost`, else in bytes.

    Of equally cheap sequences a shortest one. LayoutError if the layouts have different tensors or
    devices, or device matrices without a common refinement.
    """
    source, target = unified(source, target)
    return cheapest(source, price(item_bytes, cost))[target.tensor_map].steps


@dataclass(frozen=True, slots=True)
class Path:
    """Steps from a source, and their total price."""

    total: float
    steps: tuple[Step, ...]


def cheapest(source: Layout, cost: Price) -> dict[Map, Path]:
    """Return the cheapest path from a layout to every layout of its matrix, by tensor map."""
    done: dict[Map, Path] = {}
    ticket = count()
    queue: list[tuple[float, int, int, Layout, tuple[Step, ...]]] = [(0.0, 0, 0, source, ())]
    while queue:
        total, length, _, at, path = heapq.heappop(queue)
        if at.tensor_map in done:
            continue
        done[at.tensor_map] = Path(total, path)
        for one in steps_from(at):
            if one.after.tensor_map not in done:
                item = (total + cost(one), length + 1, next(ticket) + 1, one.after, (*path, one))
                heapq.heappush(queue, item)
    return done


def greedy(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Return the steps of the greedy rule; LayoutError as `redistribute`."""
    source, target = unified(source, target)
    steps: list[Step] = []
    at = source
    while at.tensor_map != target.tensor_map:
        steps.append(_next(at, target))
        at = steps[-1].after
    return tuple(steps)


def _next(at: Layout, target: Layout) -> Step:
    """Return the step the greedy rule takes next."""
    used = {axis for dim in at.tensor_map for axis in dim}
    wanted = {axis for dim in target.tensor_map for axis in dim}
    pairs = list(enumerate(zip(at.tensor_map, target.tensor_map, strict=True)))
    growing = {
        dim: goal[len(own)]
        for dim, (own, goal) in pairs
        if len(own) < len(goal) and goal[: len(own)] == own
    }
    for dim, axis in growing.items():
        if axis not in used:
            return step(at, "slice", dim, axis)
    for dim, axis in growing.items():
        for other, (own, _) in pairs:
            if own and own[-1] == axis:
                return step(at, "all_to_all", other, to_dim=dim)
    wrong = [dim for dim, (own, goal) in pairs if own and goal[: len(own)] != own]
    for dim in wrong:
        if at.tensor_map[dim][-1] not in wanted:
            return step(at, "all_gather", dim)
    if not wrong:
        raise LayoutError("a step towards the target", f"{at.tensor_map}: none")
    return step(at, "all_gather", wrong[0])


@dataclass(frozen=True, slots=True)
class Comparison:
    """The greedy rule beside the optimum over all ordered pairs of layouts of one tensor.

    `worse` counts pairs where greedy costs more; `excess` is its total cost over the optimal
    total, minus 1; `worst` the largest ratio of a pair, `example` a pair that has it.
    """

    pairs: int
    worse: int
    excess: float
    worst: float
    example: tuple[Layout, Layout] | None


def compare(
    device_matrix: Sequence[int],
    shape: Sequence[int],
    item_bytes: int = 2,
    cost: Cost | None = None,
) -> Comparison:
    """Run both searches between all pairs of layouts of a tensor; keep matrices small."""
    value = price(item_bytes, cost)
    matrix = [size for size in device_matrix if size > 1]
    layouts = list(all_layouts(matrix, shape))
    worse, worst, example = 0, 1.0, None
    paid = best = 0.0
    for source in layouts:
        paths = cheapest(source, value)
        for target in layouts:
            optimum = paths[target.tensor_map].total
            taken = sum(map(value, greedy(source, target)))
            paid, best = paid + taken, best + optimum
            if taken > optimum * (1 + 1e-9):
                worse += 1
                if optimum and taken / optimum > worst:
                    worst, example = taken / optimum, (source, target)
    excess = paid / best - 1 if best else 0.0
    return Comparison(len(layouts) ** 2, worse, excess, worst, example)
