"""Is a policy learned from the bank worth it? Every operator left out of its own lesson.

The bank knows what tree searches of 200 trials found for the other vector operators; the operator
itself is left out on all chips. Both searches begin with the default, as the tuner does.
Run: python -m ascend_lab.bench_prior
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.aoe import Settings, tune_operator
from ascend_lab.aoe.bank import BankEntry
from ascend_lab.aoe.drive import drive
from ascend_lab.aoe.known import entry_of
from ascend_lab.aoe.operators import Operator, operators_of
from ascend_lab.aoe.search import Mcts
from ascend_lab.aoe.space import Point
from ascend_lab.aoe.vector.job import VectorJob
from ascend_lab.aoe.vector.prior import learn
from ascend_lab.chip import load_chip
from ascend_lab.graph import compile_graph, zoo

LESSONS = ("bert_base", "mobilenet_v2", "vit_b16")
LESSON_CHIPS = ("Ascend310", "Ascend910A")
MARKS = (20, 50, 100)
"""Numbers of trials at which both searches are compared."""
Means = tuple[float, ...]
"""At each mark, best found / best known, mean over seeds."""


@dataclass(frozen=True, slots=True)
class Row:
    """An operator without and with the policy."""

    name: str
    plain: Means
    guided: Means


def rows(chips: Sequence[str] = LESSON_CHIPS, seeds: int = 10) -> Iterator[Row]:
    """Yield a row per vector operator that gains anything; minutes an operator at most."""
    tuned: list[tuple[Operator, str, BankEntry]] = []
    for network, chip in ((n, c) for n in LESSONS for c in chips):
        for operator in operators_of(compile_graph(zoo.build(network), load_chip(chip))):
            if operator.unit == "vector":
                settings = Settings(seed=77)
                entry = entry_of(tune_operator(operator, settings), settings)
                if entry.improved:
                    tuned.append((operator, network, entry))
    for operator, network, _ in tuned:
        others = [entry for other, _, entry in tuned if other.piece.key != operator.piece.key]
        yield _row(f"{network} {operator.op}, {operator.chip.name}", operator, others, seeds)


def _row(name: str, operator: Operator, others: Sequence[BankEntry], seeds: int) -> Row:
    job = VectorJob(operator)
    costs: dict[object, float] = {}

    def measure(point: Point) -> float:
        key = job.space.key(point)
        if key not in costs:
            costs[key] = job.measure(point)
        return costs[key]

    found = []
    for search in (Mcts(), Mcts(prior=learn(others).prior(job.space))):
        curves = []
        for seed in range(seeds):
            trace = drive(search, job.space, measure, MARKS[-1], seed=seed, start=job.start())
            best = trace.best_so_far
            curves.append([best[min(mark, len(best)) - 1] for mark in MARKS])
        found.append(np.mean(curves, axis=0))
    plain, guided = (tuple((f / min(costs.values())).tolist()) for f in found)
    return Row(name, plain, guided)


if __name__ == "__main__":
    for row in rows():
        pairs = zip(MARKS, row.plain, row.guided, strict=True)
        print(f"{row.name:<40}", *(f"{m}: {a:.3f} {b:.3f}" for m, a, b in pairs), flush=True)
