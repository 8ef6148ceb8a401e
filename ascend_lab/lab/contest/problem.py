"""Reads a problem of the MLSys 2026 contest: operations on matrices, a fast and a slow memory.

`lower_bound` is a cost that no schedule can beat. `Relations` has the edges between operations as
bit masks: 0b101 is the set of operations 0 and 2. The format is that of PROBLEM.md in
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
"""Keys of a problem file, and the kind of each value."""


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
    fields = decoded(FIELDS, {name: data[name] for name in FIELDS}, max_items=COUNT)
    widths = fields["widths"]
    lengths = {"heights": len(widths), "native_granularity": 2}
    lengths |= dict.fromkeys(("inputs", "outputs", "base_costs"), len(fields["op_types"]))
    for name, length in lengths.items():
        if len(fields[name]) != length:
            raise InputError(f"{length} entries in {name}", str(len(fields[name])))
    columns = [fields[name] for name in ("op_types", "inputs", "outputs", "base_costs")]
    operations = tuple(
        Operation(kind, inputs, outputs, float(cost))
        for kind, inputs, outputs, cost in zip(*columns, strict=True)
    )
    for index, operation in enumerate(operations):
        _check(index, operation, len(widths))
    producer, consumers = _links(operations)
    order = _topological(operations, producer)
    # order (2, 0, 1) gives rank (1, 2, 0): operation 0 is at place 1
    rank = tuple(sorted(range(len(order)), key=order.__getitem__))
    return Problem(
        widths=widths,
        heights=fields["heights"],
        operations=operations,
        capacity=float(fields["fast_memory_capacity"]),
        throughput=float(fields["slow_memory_bandwidth"]),
        native=fields["native_granularity"],
        producer=producer,
        consumers=consumers,
        order=order,
        rank=rank,
    )


def _check(index: int, operation: Operation, tensors: int) -> None:
    """Raise `InputError` for an operation with wrong numbers of tensors or unknown ones."""
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
    """Return the operation that makes each tensor, and for each tensor those that read it."""
    producer: dict[int, int] = {}
    consumers: dict[int, list[int]] = {}
    for index, operation in enumerate(ops):
        for tensor in operation.outputs:
            if tensor in producer:
                makers = f"operations {producer[tensor]} and {index}"
                raise InputError(f"one operation that makes tensor {tensor}", makers)
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
    native_width, native_height = problem.native
    return problem.operations[operation].base_cost * (
        -(-width // native_width) * -(-height // native_height)
    )


def lower_bound(problem: Problem) -> float:
    """Return max(all compute, inputs and results of the graph / bandwidth).

    A step takes max(compute, moves), so the steps of a schedule together take at least the sum of
    the compute, and at least that of the moves.
    """
    compute = sum(compute_time(problem, op) for op in range(len(problem.operations)))
    inputs = {tensor for tensor in problem.consumers if tensor not in problem.producer}
    results = {tensor for tensor in problem.producer if tensor not in problem.consumers}
    moved = sum(map(problem.size, results)) + sum(_needed(problem, tensor) for tensor in inputs)
    return max(compute, moved / problem.throughput)


def _needed(problem: Problem, tensor: int) -> int:
    """Return how many elements of a tensor its readers need, where shapes do not fit exactly."""
    largest_area = 0
    for op in problem.consumers[tensor]:
        operation = problem.operations[op]
        (height, width) = problem.shape(op)
        for place, input_tensor in enumerate(operation.inputs):
            if input_tensor == tensor:
                is_product = operation.kind == "MatMul"
                rows = problem.depth(op) if is_product and place == 1 else height
                columns = problem.depth(op) if is_product and place == 0 else width
                area = min(rows, problem.heights[tensor]) * min(columns, problem.widths[tensor])
                largest_area = max(largest_area, area)
    return largest_area


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
"""Groups that together hold all operations, as bit masks; an operation may be in several."""
WINDOW = 16
"""How many groups an order looks past the first that can run, for one that reads what is there."""


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the set bits, smallest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def union(masks: Sequence[int], mask: int) -> int:
    """Return the union of masks[i] over the set bits i of a mask."""
    return reduce(int.__or__, map(masks.__getitem__, bits(mask)), 0)


class Relations:
    """The edges of a problem as bit masks over operations.

    Each list has a mask for every operation: `readers` and `makers` are those that read its results
    or make its inputs, `after` and `before` all that follow or precede on some path. `touching` are
    all operations that share a tensor with it. `beside` is a part of these: readers, makers, and
    where many operations read one tensor, the next and the previous reader. `results` is the mask
    of operations whose results no other operation reads.
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

    def _join(self, op: int, other: int) -> None:
        """Record two operations as neighbours of each other."""
        self.beside[op] |= 1 << other
        self.beside[other] |= 1 << op

    def components(self, group: int) -> list[int]:
        """Return the connected parts of a group: operations that share a tensor are connected."""
        parts = []
        while group:
            part = 0
            newest = group & -group
            while newest:
                part |= newest
                newest = union(self.touching, newest) & group & ~part
            parts.append(part)
            group &= ~part
        return parts

    def hull(self, group: int) -> int:
        """Return the least closed set of operations that holds a group.

        It is closed if it has every operation on a path between two of its members, and for each
        operation either all readers or none.
        """
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
        ordered: list[int] = []
        made = 0
        last_results = 0
        while waiting:
            # the first group that can run, or a later one that reads what the last one made
            chosen = 0
            looked = 0
            for group in waiting:
                needs = self.ends(group)[0]
                if not needs & ~made and (not chosen or needs & last_results):
                    chosen = group
                    if needs & last_results:
                        break
                if chosen:
                    looked += 1
                if looked > WINDOW:
                    break
            if not chosen:
                return None
            ordered.append(chosen)
            waiting.remove(chosen)
            last_results = self.ends(chosen)[1]
            made |= last_results
        return ordered

    def covers(self, groups: Sequence[int]) -> bool:
        """Return whether the groups run every operation and leave every result of the graph."""
        done = 0
        stored = 0
        for group in groups:
            done |= group
            stored |= self.ends(group)[1]
        return done == self.everything and not self.results & ~stored
