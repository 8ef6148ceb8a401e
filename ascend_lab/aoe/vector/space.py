"""The decision space of a vector operator: how its stages are grouped, then nest by nest.

A policy is learned from the bank: which option of a decision do the best schedules take? Every
decision with several options is an example. A softmax over a few features of each option is fitted
to all examples by gradient descent, nothing is random; each decision has its own weights.
"""

import math
import pickle
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe.bank import BankEntry
from ascend_lab.aoe.drive import Trial
from ascend_lab.aoe.operators import Tunable
from ascend_lab.aoe.search.tree import Prior
from ascend_lab.aoe.space import Point, Value, random_completion
from ascend_lab.aoe.vector.bound import vector_bound
from ascend_lab.aoe.vector.grouping import Grouping, Structure
from ascend_lab.aoe.vector.layout import lay
from ascend_lab.aoe.vector.nest import DECISIONS, LEAST, NestSpace
from ascend_lab.chip import Chip
from ascend_lab.dsl import Schedule, Tensor, auto_schedule, lower
from ascend_lab.dsl.stages import Stage
from ascend_lab.errors import InputError
from ascend_lab.graph.lower import Choice
from ascend_lab.graph.lower.vector import vector_outputs
from ascend_lab.ops.matmul import warm_cycles
from ascend_lab.sim import simulate_kernel

COUNTED = 10_000
"""Spaces with more points than this are not counted: nests alone can have thousands of layouts."""


PATIENCE = 48
"""Trials without a gain that end a search: from defaults near their bound, gains come early."""


class VectorSpace:
    """Every schedule that the decisions can say; built step by step, as a search looks at it.

    The first decisions group the stages (a way and a number of partial folds per group), then
    `DECISIONS` follow for the first nest, the second, and so on; a grouping with fewer nests than
    others leaves the last ones at their only value.
    """

    def __init__(self, outputs: Tensor | Sequence[Tensor], chip: Chip) -> None:
        """Find the groupings; raise what `auto_schedule` raises, and for products of the cube."""
        self.outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        self.chip = chip
        self.default = auto_schedule(self.outputs, chip)
        self.grouping = Grouping(self.default)
        self._head = len(self.grouping.names)
        heads = self.grouping.heads()
        nests = list(zip_longest(*(self.structure(h).nests for h in heads)))
        opened = [set[int]().union(*(n.open_decisions for n in slot if n)) for slot in nests]
        self._slots = [tuple(sorted(places)) for places in opened]
        ends = [f" {k + 1}" if len(nests) > 1 else "" for k in range(len(nests))]
        pairs = zip(self._slots, ends, strict=True)
        own = (DECISIONS[at] + end for slot, end in pairs for at in slot)
        self.names = (*self.grouping.names, *own)
        self._options: dict[Point, tuple[Value, ...]] = {}
        self._places = [(k, at) for k, slot in enumerate(self._slots) for at in slot]

    # -- points and schedules ---------------------------------------------------------------------
    def structure(self, point: Point) -> Structure:
        """Return the stages as a point groups them; raise `InputError` if it is not legal."""
        found = self.grouping.structure(point[: self._head]) if len(point) >= self._head else None
        if found is None:
            raise InputError("a point of the space", str(point), "take values from `options`")
        return found

    def parts(self, point: Point) -> list[tuple[NestSpace, Point]]:
        """Return the nests of a point, each with the decisions about it."""
        found, at = [], self._head
        for nest, slot in zip(self.structure(point).nests, self._slots, strict=False):
            found.append((nest, _filled(slot, point[at : at + len(slot)])))
            at += len(slot)
        return found

    def joined(self, head: Point, owns: Sequence[Point]) -> Point:
        """Return the point of a grouping and of the decisions about each of its nests."""
        pairs = zip_longest(self._slots, owns, fillvalue=LEAST)
        return (*head, *(own[at] for slot, own in pairs for at in slot))

    def build(self, point: Point) -> Schedule:
        """Return the schedule of a point; `AscendLabError` for a point of another space."""
        if len(point) != len(self.names):
            raise InputError(f"{len(self.names)} decisions", str(len(point)), "complete the point")
        s = self.structure(point).schedule
        for nest, own in self.parts(point):
            s = lay(s, nest.nest, nest.layout(own))
        return s

    @property
    def default_point(self) -> Point:
        """The point of the default schedule."""
        head = self.grouping.default_head
        return self.joined(head, [n.default_point or LEAST for n in self.structure(head).nests])

    # -- the contract of a space ------------------------------------------------------------------
    def options(self, prefix: Point) -> tuple[Value, ...]:
        """Return the legal values of the decision after `prefix`, remembered for searches."""
        found = self._options.get(prefix)
        if found is None:
            found = self._options[prefix] = self._found(prefix)
        return found

    def _found(self, prefix: Point) -> tuple[Value, ...]:
        if len(prefix) < self._head:
            return self.grouping.options(prefix)
        number, at = self._places[len(prefix) - self._head]
        nests, slot = self.structure(prefix).nests, self._slots[number]
        if number >= len(nests):
            return (LEAST[at],)
        own = prefix[len(prefix) - slot.index(at) :] if at else ()
        return nests[number].options(_filled(slot, own)[:at])

    def sample(self, rng: np.random.Generator) -> Point:
        """Return a random point: every decision in turn, each option with the same chance."""
        return random_completion(self, (), rng)

    def key(self, point: Point) -> Hashable:
        """Return what a point builds: its grouping and the numbers of every nest."""
        return (point[: self._head], *(nest.layout(own) for nest, own in self.parts(point)))

    @property
    def size(self) -> int | None:
        """Number of points; None above `COUNTED`."""
        return self.counted(COUNTED)

    def counted(self, most: int) -> int | None:
        """Return the number of points; None if they are more than `most`."""
        total = 0
        for head in self.grouping.heads():
            points = 1
            for nest in self.structure(head).nests:
                points *= nest.count(most // points)
                if total + points > most:
                    return None
            total += points
        return total

    def points(self) -> Iterator[Point]:
        """Yield all points, grouping by grouping."""
        for head in self.grouping.heads():
            nests = [list(nest.points()) for nest in self.structure(head).nests]
            for chosen in product(*nests):
                yield self.joined(head, chosen)


def _filled(slot: Sequence[int], values: Sequence[Value]) -> Point:
    """Return all decisions about a nest, those without a choice and those still open at least."""
    given = dict(zip(slot, values, strict=False))
    return tuple(given.get(at, value) for at, value in enumerate(LEAST))


# Vector operators as jobs: how long a point takes, and how far one can get.


@dataclass(frozen=True)
class VectorMeasure:
    """Point -> cycles of one launch of the kernel, its host overhead included.

    Every phase starts on a cold L2, or with `warm` the first one on an L2 that holds these tensors
    and later ones on what is left there.
    """

    outputs: tuple[Tensor, ...]
    chip: Chip
    warm: frozenset[str] | None = None

    def __call__(self, point: Point) -> float:
        """Return the cycles of a point; raises `AscendLabError` where it cannot be built."""
        return _cycles(self, point)

    def space(self) -> VectorSpace:
        """Return the space, made once in a process."""
        return _space(self)

    def __hash__(self) -> int:
        """Hash outputs, chip name, and what L2 holds."""
        return hash((self.outputs, self.chip.name, self.warm))

    def __reduce__(self) -> tuple[Any, ...]:
        """Send everything as bytes: a worker unpacks them once, not for every point."""
        return _unpacked, (pickle.dumps((self.outputs, self.chip, self.warm)),)


@lru_cache(maxsize=64)
def _unpacked(data: bytes) -> VectorMeasure:
    return VectorMeasure(*pickle.loads(data))


@lru_cache(maxsize=64)
def _space(measure: VectorMeasure) -> VectorSpace:
    return VectorSpace(measure.outputs, measure.chip)


@lru_cache(maxsize=1024)
def _cycles(measure: VectorMeasure, point: Point) -> float:
    """Return the cycles of a point, remembered: one search after another asks for the same."""
    kernel = lower(measure.space().build(point))
    if measure.warm is None:
        return simulate_kernel(kernel, measure.chip).total_cycles
    return warm_cycles(kernel, measure.chip, measure.warm)


class VectorJob:
    """Elementwise work, reductions and what combines them, by a chain of primitives."""

    search = "mcts"

    def __init__(self, operator: Tunable) -> None:
        """Take an operator of the vector unit; raises what its space raises."""
        self.operator = operator
        self.outputs = tuple(vector_outputs(operator.piece)[0])
        self.measure = VectorMeasure(self.outputs, operator.chip, operator.warm)
        self.space: VectorSpace = self.measure.space()

    def choice(self, point: Point) -> Choice:
        """Return the steps of a point."""
        return Choice(steps=self.space.build(point).to_json())

    def start(self) -> Sequence[Point]:
        """Return the default."""
        return [self.space.default_point]

    def points(self, choices: Sequence[Choice]) -> list[Point]:
        """Return nothing: steps name the loops of their own shape."""
        return []

    @cached_property
    def least_cycles(self) -> int:
        """Cycles that no schedule beats, whatever it is."""
        return vector_bound(self.outputs, self.operator.chip, self.operator.warm)

    def bound(self, trials: Sequence[Trial]) -> tuple[int, bool]:
        """Return the bound, and whether all of the space was timed."""
        most = min(COUNTED, 1 << len(trials).bit_length())  # more of them were not all timed
        return self.operator.bounded(self.least_cycles, trials, self.space.counted(most))


TAUGHT = "decisions"


# -- the policy ------------------------------------------------------------------------------------
"""Under which name a bank's schedule keeps them, beside its steps."""
STEPS, RATE, PULL = 300, 1.0, 0.002
"""Gradient steps, their length, and how strongly weights are pulled to 0 (L2)."""
UNIFORM = 0.25
"""Share of the weights that all options get alike, so that none is ruled out."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Options of one decision; `usual` is the place of the default's option, -1 without.

    `folds` and `log_elements` describe the operator: reductions in it, log2 of its largest result.
    """

    name: str
    options: tuple[Value, ...]
    usual: int
    folds: int
    log_elements: float

    def features(self) -> list[dict[str, float]]:
        """Return what is known of each option, by name; about 1 at most."""
        top = max([1, *(v for v in self.options if isinstance(v, int | float))])
        last, rows = max(len(self.options) - 1, 1), []
        for place, value in enumerate(self.options):
            rank = place / last
            row: dict[str, float] = {"rank": rank, "first": place == 0, "last": rank == 1}
            row |= {"usual": place == self.usual, "rank folds": rank * self.folds / 4}
            row |= {"rank size": rank * self.log_elements / 24}
            if isinstance(value, int | float):
                row["ratio"] = math.log2(max(value, 1) / top) / 8
            if isinstance(value, str) or value in (1, 2, 3):
                row[f"is {value}"] = 1
            rows.append({f"{self.name} {key}": float(x) for key, x in row.items()})
        return rows


def _operator(space: VectorSpace) -> tuple[int, float]:
    folds = sum(isinstance(s, Stage) and bool(s.fold) for s in space.default.state.stages)
    return folds, math.log2(max(math.prod(t.shape) for t in space.outputs))


def _decision(space: VectorSpace, at: int, options: Sequence[Value]) -> Decision:
    default = space.default_point[at]
    usual = options.index(default) if default in options else -1
    return Decision(space.names[at].partition(" ")[0], tuple(options), usual, *_operator(space))


def decisions_of(space: VectorSpace, point: Point) -> dict[str, Any]:
    """Return what a bank keeps of a point: folds, size, and its decisions that had a choice.

    Of a decision: name, place of the option taken, place of the default's, options.
    """
    chain = []
    for at, value in enumerate(point):
        options = space.options(point[:at])
        if len(options) > 1:
            d = _decision(space, at, options)
            chain.append([d.name, options.index(value), d.usual, list(options)])
    folds, size = _operator(space)
    return {"folds": folds, "size": round(size, 3), "chain": chain}


def examples(entry: BankEntry) -> list[tuple[Decision, int]]:
    """Return the decisions of an entry and the places taken; none where it does not say."""
    try:
        data = entry.schedule[TAUGHT]
        about = int(data["folds"]), float(data["size"])
        found = [(Decision(n, tuple(o), usual, *about), at) for n, at, usual, o in data["chain"]]
        return found if all(at in range(len(d.options)) and _finite(d) for d, at in found) else []
    except (KeyError, TypeError, ValueError, OverflowError):  # old entries, and those of others
        return []


def _finite(decision: Decision) -> bool:
    plain = all(isinstance(v, int | float | str) for v in (decision.name, *decision.options))
    return plain and all(math.isfinite(x) for row in decision.features() for x in row.values())


@dataclass(frozen=True)
class Policy:
    """Weights by feature; without any, all options are alike."""

    weights: Mapping[str, float] = field(default_factory=dict)

    def chances(self, decision: Decision) -> NDArray[np.float64]:
        """Return a positive chance per option; they add up to 1."""
        rows = decision.features()
        scores = np.array([sum(self.weights.get(k, 0.0) * x for k, x in r.items()) for r in rows])
        power = np.exp(scores - scores.max())
        return np.asarray((1 - UNIFORM) * power / power.sum() + UNIFORM / len(rows))

    def prior(self, space: VectorSpace) -> Prior:
        """Return the policy as what a tree search asks."""
        known: dict[Point, list[float]] = {}

        def weigh(prefix: Point, options: Sequence[Value]) -> list[float]:
            if prefix not in known:
                known[prefix] = self.chances(_decision(space, len(prefix), options)).tolist()
            return known[prefix]

        return weigh


def learn(entries: Iterable[BankEntry]) -> Policy:
    """Fit a policy to entries: maximum likelihood, less PULL / 2 times the squared weights."""
    known = [pair for entry in entries for pair in examples(entry)]
    if not known:
        return Policy()
    rows = [row for decision, _ in known for row in decision.features()]
    names = sorted({name for row in rows for name in row})
    table = np.array([[row.get(name, 0.0) for name in names] for row in rows])
    counts = np.array([len(decision.options) for decision, _ in known])
    starts = np.cumsum(counts) - counts
    seen = table[starts + [place for _, place in known]].sum(axis=0)
    weights = np.zeros(len(names))
    for _ in range(STEPS):
        scores = table @ weights
        power = np.exp(scores - np.repeat(np.maximum.reduceat(scores, starts), counts))
        chances = power / np.repeat(np.add.reduceat(power, starts), counts)
        weights += RATE * ((seen - chances @ table) / len(known) - PULL * weights)
    return Policy(dict(zip(names, weights.tolist(), strict=True)))
