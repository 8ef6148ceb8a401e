"""A problem of the MLSys 2026 contest, what no schedule can beat, and its sets of operations.

Operations on matrices, a fast and a slow memory; the format is that of PROBLEM.md in
github.com/yarongmu-google/MLSys, commit 38a2a695.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

from ascend_lab.errors import InputError
from ascend_lab.limits import COUNT, TABLE_BYTES, TINY, Range, decoded, json_of, read_file

LARGEST = 2**40
SIDE = Range(int, 1, 2**30)
"""Longer sides would overflow 64 bits in an area."""
AMOUNT = Range(float, TINY, LARGEST)
FIELDS: dict[str, object] = {
    "widths": [SIDE],
    "heights": [SIDE],
    "inputs": [[Range(int, 0, LARGEST)]],
    "outputs": [[Range(int, 0, LARGEST)]],
    "base_costs": [Range(float, 0, LARGEST)],
    "op_types": [("MatMul", "Pointwise")],
    "fast_memory_capacity": AMOUNT,
    "slow_memory_bandwidth": AMOUNT,
    "native_granularity": [SIDE],
}
"""What a problem file says, and the kind of each value."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A matrix product (left, right) or an element-wise operation, and its cost per native tile."""

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    base_cost: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Tensors (width, height in elements), operations and the two memories.

    `capacity` counts elements, `throughput` elements per unit of time, `native` is (width, height).
    `producer` gives the operation that makes a tensor, `consumers` those that read it; `order` is
    a topological order of the operations and `rank` the place of each in it.
    """

    widths: tuple[int, ...]
    heights: tuple[int, ...]
    operations: tuple[Operation, ...]
    capacity: float
    throughput: float
    native: tuple[int, int]
    producer: dict[int, int] = field(repr=False)
    consumers: dict[int, tuple[int, ...]] = field(repr=False)
    order: tuple[int, ...] = field(repr=False)
    rank: tuple[int, ...] = field(repr=False)

    def size(self, tensor: int) -> int:
        """Return the elements of a tensor."""
        return self.widths[tensor] * self.heights[tensor]

    def depth(self, operation: int) -> int:
        """Return the length of the sums of a matrix product, 1 for an element-wise operation."""
        op = self.operations[operation]
        return self.widths[op.inputs[0]] if op.kind == "MatMul" else 1

    def shape(self, operation: int) -> tuple[int, int]:
        """Return (height, width) of what an operation computes."""
        out = self.operations[operation].outputs[0]
        return self.heights[out], self.widths[out]


_SAMPLE = "example_problem.json in ascend_lab/data/mlsys2026 is one"


def read_problem(path: str | Path) -> Problem:
    """Read a problem from a JSON file; InputError for whatever is wrong with it."""
    data = read_file(path, "a readable problem file", TABLE_BYTES)
    return parse_problem(json_of(data, str(path)))


def parse_problem(data: object) -> Problem:
    """Check the decoded JSON of a problem and return it; InputError names the wrong field."""
    if not isinstance(data, dict):
        raise InputError("a JSON object with the fields of a problem", type(data).__name__, _SAMPLE)
    missing = [name for name in FIELDS if name not in data]
    if missing:
        raise InputError("a problem with all its fields", f"no {', '.join(missing)}", _SAMPLE)
    found = decoded(FIELDS, {name: data[name] for name in FIELDS}, max_items=COUNT)
    widths, heights, native = (found[name] for name in ("widths", "heights", "native_granularity"))
    parts = [found[name] for name in ("op_types", "inputs", "outputs", "base_costs")]
    lengths = {"heights": len(widths), "native_granularity": 2}
    lengths |= dict.fromkeys(("inputs", "outputs", "base_costs"), len(parts[0]))
    for name, length in lengths.items():
        if len(found[name]) != length:
            raise InputError(f"{length} entries in {name}", str(len(found[name])))
    rows = zip(*parts, strict=True)
    operations = tuple(Operation(kind, i, o, float(cost)) for kind, i, o, cost in rows)
    for index, operation in enumerate(operations):
        _check(index, operation, len(widths))
    producer, consumers = _links(operations)
    order = _topological(operations, producer)
    rank = tuple(sorted(range(len(order)), key=order.__getitem__))
    sizes = float(found["fast_memory_capacity"]), float(found["slow_memory_bandwidth"]), native
    return Problem(widths, heights, operations, *sizes, producer, consumers, order, rank)


def _check(index: int, operation: Operation, tensors: int) -> None:
    # The published example has a product of one factor; it counts as the left one.
    if operation.kind == "MatMul" and len(operation.inputs) > 2:
        needed = f"one or two tensors in inputs[{index}] (MatMul)"
        raise InputError(needed, str(len(operation.inputs)))
    if len(set(operation.outputs)) != len(operation.outputs):
        raise InputError(f"different tensors in outputs[{index}]", str(operation.outputs))
    if max(*operation.inputs, *operation.outputs) >= tensors:
        got = f"tensors {[*operation.inputs, *operation.outputs]}"
        raise InputError(f"tensors from 0 to {tensors - 1} in operation {index}", got)


def _links(ops: Sequence[Operation]) -> tuple[dict[int, int], dict[int, tuple[int, ...]]]:
    producer: dict[int, int] = {}
    consumers: dict[int, list[int]] = {}
    for index, operation in enumerate(ops):
        for tensor in operation.outputs:
            if tensor in producer:
                both = f"operations {producer[tensor]} and {index}"
                raise InputError(f"one operation that makes tensor {tensor}", both)
            producer[tensor] = index
        for tensor in dict.fromkeys(operation.inputs):
            consumers.setdefault(tensor, []).append(index)
    return producer, {tensor: tuple(readers) for tensor, readers in consumers.items()}


def _topological(operations: Sequence[Operation], producer: dict[int, int]) -> tuple[int, ...]:
    """Return the operations depth first, each after those it needs; InputError on a cycle."""
    needs = {
        index: {producer[tensor] for tensor in operation.inputs if tensor in producer}
        for index, operation in enumerate(operations)
    }
    try:
        return tuple(TopologicalSorter(needs).static_order())
    except CycleError as error:
        cycle = " -> ".join(map(str, error.args[1][:8]))
        raise InputError("a graph without cycles", f"operations {cycle}") from error


def compute_time(problem: Problem, operation: int) -> float:
    """Return base cost x native tiles of the result: the least time to compute an operation."""
    height, width = problem.shape(operation)
    wide, high = problem.native
    return problem.operations[operation].base_cost * (-(-width // wide) * -(-height // high))


def lower_bound(problem: Problem) -> float:
    """Return max(all compute, inputs and results of the graph / bandwidth).

    Certified: the step times of a schedule add up to at least its compute and at least its moves.
    """
    compute = sum(compute_time(problem, op) for op in range(len(problem.operations)))
    inputs = {tensor for tensor in problem.consumers if tensor not in problem.producer}
    results = {tensor for tensor in problem.producer if tensor not in problem.consumers}
    moved = sum(map(problem.size, results)) + sum(_needed(problem, tensor) for tensor in inputs)
    return max(compute, moved / problem.throughput)


def _needed(problem: Problem, tensor: int) -> int:
    """Return how many elements of a tensor its readers need, where shapes do not fit exactly."""
    most = 0
    for op in problem.consumers[tensor]:
        operation = problem.operations[op]
        (height, width) = problem.shape(op)
        for place, used in enumerate(operation.inputs):
            if used == tensor:
                product = operation.kind == "MatMul"
                rows = problem.depth(op) if product and place == 1 else height
                columns = problem.depth(op) if product and place == 0 else width
                area = min(rows, problem.heights[tensor]) * min(columns, problem.widths[tensor])
                most = max(most, area)
    return most


def unfused_floor(problem: Problem) -> float:
    """Return the sum over operations of max(compute, each of its tensors moved once).

    No schedule of single operations without retained tensors beats it; with a small fast memory
    none reaches it.
    """
    total = 0.0
    for index, operation in enumerate(problem.operations):
        moved = sum(map(problem.size, {*operation.inputs, *operation.outputs}))
        total += max(compute_time(problem, index), moved / problem.throughput)
    return total


Partition = tuple[int, ...]
WINDOW = 16
"""How many groups an order looks past the first that can run, for one that reads what is there."""


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the set bits, smallest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def union(masks: Sequence[int], mask: int) -> int:
    """Return the masks of the set bits in one."""
    return reduce(int.__or__, map(masks.__getitem__, bits(mask)), 0)


class Relations:
    """The edges of a problem as bit masks over operations.

    `readers` and `makers` are direct neighbours, `after` and `before` all that are reachable.
    `touching` share a tensor; `beside` are direct neighbours and, where many operations read one
    input, the next of them.
    """

    def __init__(self, problem: Problem) -> None:
        """Read the edges of a problem."""
        count = len(problem.operations)
        self.problem = problem
        self.everything = (1 << count) - 1
        self.readers = [0] * count
        self.makers = [0] * count
        self.before = [0] * count
        self.after = [0] * count
        self.touching = [0] * count
        self.beside = [0] * count
        for tensor, users in problem.consumers.items():
            group = sum(1 << user for user in users)
            for user, other in pairwise(users):
                self._join(user, other)
            if tensor in problem.producer:
                maker = problem.producer[tensor]
                self.readers[maker] |= group
                group |= 1 << maker
                for user in users:
                    self.makers[user] |= 1 << maker
                    self._join(user, maker)
            for op in bits(group):
                self.touching[op] |= group & ~(1 << op)
        for op in problem.order:
            self.before[op] = self.makers[op] | union(self.before, self.makers[op])
        for op in reversed(problem.order):
            self.after[op] = self.readers[op] | union(self.after, self.readers[op])
        self.results = sum(1 << op for op, readers in enumerate(self.readers) if not readers)
        self._ends: dict[int, tuple[int, int]] = {}

    def _join(self, one: int, other: int) -> None:
        self.beside[one] |= 1 << other
        self.beside[other] |= 1 << one

    def components(self, group: int) -> list[int]:
        """Return the parts of a group that shared tensors join."""
        parts = []
        while group:
            part = 0
            fresh = group & -group
            while fresh:
                part |= fresh
                fresh = union(self.touching, fresh) & group & ~part
            parts.append(part)
            group &= ~part
        return parts

    def hull(self, group: int) -> int:
        """Return the least closed set with all paths between its operations that holds a group."""
        while True:
            grown = group | (union(self.before, group) & union(self.after, group))
            for op in bits(grown):
                if self.readers[op] & grown:
                    grown |= self.readers[op]
            if grown == group:
                return group
            group = grown

    def ends(self, group: int) -> tuple[int, int]:
        """Return the operations outside that a group reads from, and those of results it leaves."""
        if group not in self._ends:
            leaves = sum(1 << op for op in bits(group) if not self.readers[op] & group)
            self._ends[group] = union(self.makers, group) & ~group, leaves
        return self._ends[group]

    def order(self, groups: Iterable[int]) -> list[int] | None:
        """Return the groups so that each finds its operands made, or None when that cannot be."""
        rank = self.problem.rank
        waiting = sorted(set(groups), key=lambda group: max(rank[op] for op in bits(group)))
        found: list[int] = []
        made = last = 0
        while waiting:
            chosen = looked = 0
            for group in waiting:
                needs = self.ends(group)[0]
                if not needs & ~made and (not chosen or needs & last):
                    chosen = group
                    if needs & last:
                        break
                looked += bool(chosen)
                if looked > WINDOW:
                    break
            if not chosen:
                return None
            found.append(chosen)
            waiting.remove(chosen)
            last = self.ends(chosen)[1]
            made |= last
        return found

    def covers(self, groups: Sequence[int]) -> bool:
        """Return whether the groups run every operation and leave every result of the graph."""
        done = stored = 0
        for group in groups:
            done |= group
            stored |= self.ends(group)[1]
        return done == self.everything and not self.results & ~stored
