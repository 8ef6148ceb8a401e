"""A set of operations that run together: what they read, write and keep, and in which slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ascend_lab.aoe.contest.problem import Problem
from ascend_lab.errors import ScheduleError


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
    slices: tuple[Slice, ...]
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
        cuts = {0, 1}
        for depth in self.depths:
            steps = -(-depth // k)
            cuts |= {steps - 1, steps}
        return sorted(cuts)


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
    resident, retain = set(resident), set(retain)
    stray = retain - set(writes) - set(reads) - resident
    if stray:
        raise ScheduleError(
            "retained tensors that the subgraph reads, holds or leaves", str(sorted(stray))
        )
    kept = tuple(sorted(resident | retain))
    ready = _ready(problem, ordered)
    slices = _slices(problem, ordered, own, resident, set(kept), ready)
    works = _works(problem, ordered, ready)
    alike = Counter(replace(piece, tensor=-1) for piece in slices)
    return Group(
        problem,
        tuple(ordered),
        reads,
        writes,
        kept,
        slices,
        tuple(alike.items()),
        works,
        tuple(sorted({work.depth for work in works} | {work.ready for work in works})),
        tuple(sorted({work.height for work in works})),
        tuple(sorted({work.width for work in works})),
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
        if problem.operations[op].kind == "MatMul":
            ready[op] = problem.depth(op)
            continue
        before = [problem.producer.get(t, -1) for t in problem.operations[op].inputs]
        ready[op] = max((ready[make] for make in before if make in ready), default=1)
    return ready


def _slices(
    problem: Problem,
    ordered: Sequence[int],
    own: set[int],
    resident: set[int],
    kept: set[int],
    ready: dict[int, int],
) -> tuple[Slice, ...]:
    """Return the slices that move: not those of resident tensors, nor of results that stay.

    A tensor that two operations read in the same role moves once, for the larger of their grids.
    """
    found: dict[tuple[int, str], Slice] = {}
    read = {tensor for op in ordered for tensor in problem.operations[op].inputs}
    lefts = {
        problem.operations[op].inputs[0]
        for op in ordered
        if problem.operations[op].kind == "MatMul"
    }
    for op in ordered:
        operation, (height, width) = problem.operations[op], problem.shape(op)
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
            new = Slice(tensor, role, shape, ready[op], height, width)
            old = found.get((tensor, role), new)
            size = (max(old.height, height), max(old.width, width))
            found[tensor, role] = replace(old, height=size[0], width=size[1])
    return tuple(found.values())
