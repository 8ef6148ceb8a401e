"""A policy learned from the bank: which option of a decision do the best schedules take?

Every decision with several options is an example. A softmax over a few features of each option is
fitted to all examples by gradient descent, nothing is random; each decision has its own weights.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe.bank import BankEntry
from ascend_lab.aoe.search.mcts import Prior
from ascend_lab.aoe.space import Point, Value
from ascend_lab.aoe.vector.space import VectorSpace
from ascend_lab.dsl.stages import Stage

DECISIONS = "decisions"
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
        data = entry.schedule[DECISIONS]
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
