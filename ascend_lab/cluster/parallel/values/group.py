"""Simulates communicating ranks on arrays, with automatic differentiation across them.

Every collective executes its schedule and is counted. All ranks run in one process and in lockstep:
a quantity is a list with one array per rank.

A tape records the operations for the backward pass. Operators and their gradients come from the
operator library. This module adds the communication steps, each with the step that is needed
backward:

    forward                 backward
    copy (nothing)          all-reduce
    all-reduce              copy (nothing)
    all-gather              reduce-scatter
    reduce-scatter          all-gather
    all-to-all              all-to-all

A model is a sequence of pieces (layers) that run on such a tape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.cluster import Schedule, execute, make
from ascend_lab.cluster.schedule import ALGORITHMS, Round
from ascend_lab.operators import ops

Values = np.ndarray
Ranked = list[Values]
"""One array per rank."""
SEND = Schedule("broadcast", "send", 2, 1, (Round.of([0], [1], [[0]]),))
"""One message from one rank to another."""


@dataclass(slots=True)
class Count:
    """Counts of one operation: its calls, the bytes of its tensors, and the bytes that a rank sent.

    Both byte counts are those of the busiest rank, added up over pipeline stages. The tensor is the
    input of all_reduce, reduce_scatter, all_to_all and send, the output of all_gather.
    """

    calls: int = 0
    size_bytes: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """All communication that took place: a `Count` for each (group, operation)."""

    counts: dict[tuple[str, str], Count] = field(default_factory=dict)

    def of(self, group: str, op: str) -> Count:
        """Return the count of an operation on a group; all zeros if it was never called."""
        return self.counts.get((group, op), Count())

    def note(self, group: str, op: str, size_bytes: int, sent_bytes: int) -> None:
        """Count one call."""
        count = self.counts.setdefault((group, op), Count())
        count.calls += 1
        count.size_bytes += size_bytes
        count.sent_bytes += sent_bytes

    def sent_bytes(self, group: str) -> int:
        """Return the bytes the busiest rank sent on a group, all operations together."""
        return sum(c.sent_bytes for (name, _), c in self.counts.items() if name == group)

    def __str__(self) -> str:
        """Return a table with one line per operation."""
        lines = [f"{'group':10}{'operation':16}{'calls':>6}{'tensor bytes':>14}{'sent bytes':>12}"]
        for (group, op), count in sorted(self.counts.items()):
            numbers = f"{count.calls:6}{count.size_bytes:14,}{count.sent_bytes:12,}"
            lines.append(f"{group:10}{op:16}{numbers}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Group:
    """A way to cut all ranks into equal teams that communicate at the same time.

    `members` lists the ranks of each team; every rank is in one team. In teams of one rank nothing
    is sent or counted, so that a program for many ranks also runs on one. An operation without an
    algorithm named `algorithm` uses its first algorithm.
    """

    name: str
    members: tuple[tuple[int, ...], ...]
    traffic: Traffic
    algorithm: str = "ring"

    @property
    def ranks(self) -> int:
        """The number of ranks in a team."""
        return len(self.members[0])

    def place(self, rank: int) -> int:
        """Return the number of a rank within its team."""
        return next(team.index(rank) for team in self.members if rank in team)

    def all_reduce(self, arrays: Ranked) -> Ranked:
        """Return on every rank the sum over its team."""
        reduced = self._run("all_reduce", [a.ravel() for a in arrays])
        return [f.reshape(a.shape) for f, a in zip(reduced, arrays, strict=True)]

    def all_to_all(self, arrays: Ranked) -> Ranked:
        """Send part i of axis 0 to rank i of the team; return the received parts, by sender."""
        part(arrays[0], self.ranks, 0, 0)
        exchanged = self._run("all_to_all", [a.ravel() for a in arrays])
        return [f.reshape(a.shape) for f, a in zip(exchanged, arrays, strict=True)]

    def all_gather(self, arrays: Ranked, axis: int = 0) -> Ranked:
        """Return on every rank the arrays of its team joined along an axis."""
        return self._along("all_gather", arrays, axis)

    def reduce_scatter(self, arrays: Ranked, axis: int = 0) -> Ranked:
        """Return on every rank its part, along an axis, of the sum over its team."""
        part(arrays[0], self.ranks, 0, axis)
        return self._along("reduce_scatter", arrays, axis)

    def _along(self, op: str, arrays: Ranked, axis: int) -> Ranked:
        """Run a collective that joins or divides arrays along an axis."""
        # Schedules join flat arrays one after another, that is, along axis 0: so the axis is moved
        # to the front.
        fronts = [np.moveaxis(a, axis, 0) for a in arrays]
        gathered = self._run(op, [f.ravel() for f in fronts])
        shaped = [
            f.reshape(-1, *front.shape[1:]) for f, front in zip(gathered, fronts, strict=True)
        ]
        return [np.moveaxis(s, 0, axis) for s in shaped]

    def _run(self, op: str, arrays: Ranked) -> Ranked:
        """Run a collective of flat arrays in every team, and count its messages."""
        if self.ranks == 1:
            return arrays
        schedule = _schedule(op, self.algorithm, self.ranks)
        received = list(arrays)
        for team in self.members:
            results = execute(schedule, [arrays[r] for r in team])
            for rank, result in zip(team, results, strict=True):
                received[rank] = result
        # For an all-gather the schedule counts the result: 4 ranks with 10 bytes each gather 40.
        size_bytes = arrays[0].nbytes * (self.ranks if op == "all_gather" else 1)
        self.traffic.note(self.name, op, size_bytes, _sent_bytes(schedule, size_bytes))
        return received


@cache
def _schedule(op: str, algorithm: str, ranks: int) -> Schedule:
    algorithms = ALGORITHMS[op]
    return make(op, algorithm if algorithm in algorithms else algorithms[0], ranks)


def _sent_bytes(schedule: Schedule, size_bytes: int) -> int:
    """Return the bytes that the busiest rank sends for a tensor of `size_bytes`."""
    blocks = np.zeros(schedule.ranks, np.int64)
    for step in schedule.rounds:
        # a rank that sends twice in a round counts twice: `blocks[sources] += counts` would not
        np.add.at(blocks, step.sources, step.counts)
    # A ring all-reduce of 4 ranks sends 6 of 4 blocks: 1.5 times the tensor.
    return round(int(blocks.max(initial=0)) * size_bytes / schedule.parts)


def send(arrays: Ranked, traffic: Traffic, name: str = "stage") -> Ranked:
    """Send every rank's array to the rank with the same number in the next or previous stage."""
    traffic.note(name, "send", arrays[0].nbytes, arrays[0].nbytes)
    # The receiver's array (zeros) only says how much is coming.
    flat = [a.ravel() for a in arrays]
    arrived = [execute(SEND, [f, np.zeros_like(f)])[1] for f in flat]
    return [f.reshape(a.shape) for f, a in zip(arrived, arrays, strict=True)]


def grid(sizes: dict[str, int], traffic: Traffic, algorithm: str = "ring") -> dict[str, Group]:
    """Return one group per axis, for ranks numbered row by row in a grid with named axes."""
    shape = tuple(sizes.values())
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    groups = {}
    for axis, name in enumerate(sizes):
        # {"data": 2, "tensor": 2}: data teams (0, 2) and (1, 3), tensor teams (0, 1) and (2, 3).
        teams = np.moveaxis(numbers, axis, -1).reshape(-1, shape[axis])
        groups[name] = Group(name, tuple(map(tuple, teams.tolist())), traffic, algorithm)
    return groups


def part(array: Values, ranks: int, rank: int, axis: int, what: str = "an axis") -> Values:
    """Return a rank's part of an array along an axis; raise `ClusterError` if parts are unequal."""
    size = array.shape[axis]
    if size % ranks:
        needed = f"{what} divisible by {ranks} ranks"
        raise errors.ClusterError(needed, str(size), "use fewer ranks or pad")
    step = size // ranks
    # Axis 1 of 12 columns for rank 2 of 4: [:, 6:9].
    index = (slice(None),) * (axis % array.ndim) + (slice(rank * step, (rank + 1) * step),)
    block: Values = array[index]
    return block


def parts(array: Values, group: Group, axis: int, what: str = "an axis") -> Ranked:
    """Return every rank's part of one array along an axis."""
    count = sum(len(team) for team in group.members)
    return [part(array, group.ranks, group.place(r), axis, what) for r in range(count)]


def same(arrays: Sequence[Values], tolerance: float = 1e-12) -> bool:
    """Return whether all arrays agree within a relative tolerance."""
    reference = arrays[0]
    scale = float(np.abs(reference).max(initial=0.0)) or 1.0
    return all(float(np.abs(a - reference).max(initial=0.0)) <= tolerance * scale for a in arrays)


# -- the tape --------------------------------------------------------------------------------------
VIEWS = ("reshape", "transpose")
"""Operators whose output is a view of their input."""


class Var:
    """A quantity on the tape: `values` and, after the backward pass, `grads`, per rank."""

    __slots__ = ("grads", "values")

    def __init__(self, values: Ranked) -> None:
        self.values = values
        self.grads: Ranked | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on each rank."""
        return self.values[0].shape

    def add(self, grads: Ranked) -> None:
        """Add `grads` to the gradient of this variable."""
        # A variable that two steps read, as around a residual, gets two gradients, which add up.
        previous = self.grads
        # not added in place: the same arrays may be the gradient of another variable
        self.grads = (
            grads if previous is None else [a + b for a, b in zip(previous, grads, strict=True)]
        )


class Tape:
    """Records the backward step of every forward operation; `backward` runs them in reverse."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.elements = 0  # of all outputs kept on the first rank

    def record(
        self,
        inputs: Sequence[Var],
        out: Ranked,
        gradient: Callable[[Ranked], Any],
        new: bool = True,
    ) -> Var:
        """Return a variable; `gradient(grads)` gives one gradient (or None) for each input.

        `new` says that the output needs memory, because it is not a view of an input.
        """
        var = Var(out)
        if new and not any(np.may_share_memory(out[0], variable.values[0]) for variable in inputs):
            self.elements += out[0].size

        def back() -> None:
            # the loss does not depend on this output
            if var.grads is None:
                return
            input_grads = gradient(var.grads)
            for variable, grads in zip(inputs, input_grads, strict=True):
                if grads is not None:
                    variable.add(grads)

        self.steps.append(back)
        return var

    def apply(self, name: str, *inputs: Var, **attrs: Any) -> Var:
        """Apply an operator of the library on every rank."""
        operator = ops.get(name)
        # Inputs x and w on ranks 0 and 1: ((x0, w0), (x1, w1)), one tuple of operands per rank.
        arguments = list(zip(*(var.values for var in inputs), strict=True))
        out = [operator.reference(*arrays, **attrs) for arrays in arguments]

        def gradient(grads: Ranked) -> list[Ranked | None]:
            # read the values only now: a gathered parameter may have been dropped and gathered
            # again
            arrays = zip(*(var.values for var in inputs), strict=True)
            rows = [
                ops.gradient(operator, [g], xs, [y], **attrs)
                for g, xs, y in zip(grads, arrays, out, strict=True)
            ]
            return [
                None if column[0] is None else list(column) for column in zip(*rows, strict=True)
            ]

        return self.record(inputs, out, gradient, name not in VIEWS)

    def backward(self, last: Var, grads: Ranked) -> None:
        """Run the steps in reverse from the gradient of the last variable."""
        last.add(grads)
        for backward_step in reversed(self.steps):
            backward_step()


def copy_in(tape: Tape, x: Var, group: Group) -> Var:
    """Begin a region in which ranks do different work on equal x: all-reduce x's gradient."""
    return tape.record([x], x.values, lambda g: [group.all_reduce(g)])


def sum_out(tape: Tape, x: Var, group: Group) -> Var:
    """End such a region: add up the partial results; the backward pass copies gradients."""
    # d(a + b) / da = 1: each addend has the gradient of the sum
    return tape.record([x], group.all_reduce(x.values), lambda g: [g])


def gather_in(tape: Tape, x: Var, group: Group, axis: int) -> Var:
    """Begin such a region with x split along an axis: all-gather; backward, reduce-scatter."""
    return tape.record(
        [x], group.all_gather(x.values, axis), lambda g: [group.reduce_scatter(g, axis)]
    )


def scatter_out(tape: Tape, x: Var, group: Group, axis: int) -> Var:
    """End such a region with the sum split along an axis: reduce-scatter; backward, all-gather."""
    return tape.record(
        [x], group.reduce_scatter(x.values, axis), lambda g: [group.all_gather(g, axis)]
    )


def exchange(tape: Tape, x: Var, group: Group) -> Var:
    """Send part i of axis 0 to rank i; the backward pass is an all-to-all as well."""
    return tape.record([x], group.all_to_all(x.values), lambda g: [group.all_to_all(g)])


# -- a model: a sequence of pieces, each a forward program over ranks ------------------------------
SEQUENCE = 1
"""The sequence axis of activations, which are (batch, sequence, width)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A weight that is cut along an axis among the ranks of a group: "tensor" or "expert"."""

    group: str
    axis: int


@dataclass(frozen=True, slots=True)
class Net:
    """The context in which a piece runs: the tape, its weights, the groups, and how x is split."""

    tape: Tape
    weights: Mapping[str, Var]
    groups: Mapping[str, Group]
    sequence: bool = False

    def __getitem__(self, name: str) -> Var:
        return self.weights[name]

    def apply(self, name: str, *inputs: Var, **attrs: Any) -> Var:
        """Apply an operator of the library."""
        return self.tape.apply(name, *inputs, **attrs)

    def enter(self, x: Var) -> Var:
        """Begin a tensor-parallel region: every rank gets all of x."""
        if self.sequence:
            return gather_in(self.tape, x, self.groups["tensor"], SEQUENCE)
        return copy_in(self.tape, x, self.groups["tensor"])

    def leave(self, x: Var) -> Var:
        """End a tensor-parallel region, in which x is each rank's part of a sum."""
        if self.sequence:
            return scatter_out(self.tape, x, self.groups["tensor"], SEQUENCE)
        return sum_out(self.tape, x, self.groups["tensor"])

    def linear(self, x: Var, weight: str, bias: str | None = None) -> Var:
        """Return x w, or x w + bias, where w are the rank's columns or rows of the weight."""
        y = self.apply("batch_matmul", x, self[weight])
        return y if bias is None else self.apply("add", y, self[bias])

    def norm(self, x: Var, name: str) -> Var:
        """Return the layer norm of x with weights `name`.scale and `name`.bias."""
        return self.apply("layer_norm", x, self[f"{name}.scale"], self[f"{name}.bias"])


@dataclass(frozen=True, slots=True)
class Piece:
    """A layer of a model: its full weights, how they may be cut, and its forward program.

    `forward(net, x, targets)` returns y; the last piece of a model returns the loss of each token.
    """

    name: str
    weights: Mapping[str, Values]
    forward: Callable[[Net, Var, Ranked], Var]
    shards: Mapping[str, Shard] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Model:
    """A sequence of pieces; the first reads the inputs of a batch, the last returns the losses."""

    pieces: tuple[Piece, ...]

    @property
    def weights(self) -> dict[str, Values]:
        """All weights by "piece.weight"."""
        return {f"{p.name}.{name}": w for p in self.pieces for name, w in p.weights.items()}

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return sum(w.size for w in self.weights.values())


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch: inputs (batch, ...), and targets, which give the class of each token."""

    inputs: Values
    targets: Values
