"""Vector operators as jobs: how long a schedule takes, and how far one can get.

A policy is learned from the bank: which option of a decision do the best schedules take? Every
decision with several options is an example. A softmax over a few features of each option is fitted
to all examples by gradient descent, nothing is random; each decision has its own weights.
"""

import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from ascend_lab.aoe import bank, operators
from ascend_lab.aoe.drive import Trial
from ascend_lab.aoe.search import Prior
from ascend_lab.aoe.space import Point, Reals, Value
from ascend_lab.aoe.vector.bound import vector_bound
from ascend_lab.aoe.vector.space import COUNTED, VectorSpace
from ascend_lab.compiler.lower import Choice, vector
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim import simulate_kernel
from ascend_lab.operators.dsl import Tensor, lower, stages
from ascend_lab.operators.ops.matmul import warm_cycles

__all__ = ["VectorJob", "VectorMeasure", "VectorSpace", "vector_bound"]
PATIENCE = 48
"""Trials without a gain that end a search: from defaults near their bound, gains come early."""


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

    def __reduce__(self) -> tuple[object, ...]:
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

    def __init__(self, operator: operators.Tunable) -> None:
        """Take an operator of the vector unit; raises what its space raises."""
        self.operator = operator
        self.outputs = tuple(vector.vector_outputs(operator.piece)[0])
        self.measure = VectorMeasure(self.outputs, operator.chip, operator.warm)
        self.space: VectorSpace = self.measure.space()

    def choice(self, point: Point) -> Choice:
        """Return the steps of a point."""
        return Choice(steps=self.space.build(point).to_json())

    def start(self) -> Sequence[Point]:
        """Return the default, and the default without parts of rows."""
        return self.space.default_points

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


# -- the policy ------------------------------------------------------------------------------------
TAUGHT = "decisions"
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
    folds = sum(isinstance(s, stages.Stage) and bool(s.fold) for s in space.default.state.stages)
    return folds, math.log2(max(math.prod(t.shape) for t in space.outputs))


def _decision(space: VectorSpace, at: int, options: Sequence[Value]) -> Decision:
    default = space.default_point[at]
    usual = options.index(default) if default in options else -1
    return Decision(space.names[at].partition(" ")[0], tuple(options), usual, *_operator(space))


def decisions_of(space: VectorSpace, point: Point) -> dict[str, object]:
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


def examples(entry: bank.BankEntry) -> list[tuple[Decision, int]]:
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

    def chances(self, decision: Decision) -> Reals:
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


def learn(entries: Iterable[bank.BankEntry]) -> Policy:
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
