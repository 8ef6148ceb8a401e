"""How good the tuners are and how fast: part of `lab.py bench`, all of it with `--tuners`."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe import Settings, tune, tune_operator
from ascend_lab.aoe.bank import BankEntry, Knowledge
from ascend_lab.aoe.cube.job import CubeJob, cube_space, prove
from ascend_lab.aoe.drive import drive
from ascend_lab.aoe.network import entry_of
from ascend_lab.aoe.operators import Tunable, operators_of
from ascend_lab.aoe.search import Mcts
from ascend_lab.aoe.space import Point, TableSpace
from ascend_lab.aoe.vector.job import VectorJob
from ascend_lab.aoe.vector.prior import learn
from ascend_lab.aoe.workers import attempt
from ascend_lab.chip import load_chip
from ascend_lab.data import FOLDER
from ascend_lab.errors import AscendLabError
from ascend_lab.graph import compile_graph, zoo
from ascend_lab.lab.contest import read_problem, solve, unfused_floor
from bench.search import recorded_cases
from bench.search import report as search_report
from bench.table import CHIPS, Figure

NETWORKS = ("resnet50", "mobilenet_v2", "bert_base")
PROOF_S = 10.0
DATA = Path(__file__).parent.parent / "tests" / "data"
CONTEST, RECORDED = FOLDER / "mlsys2026", DATA / "autotune_bruteforce"
ROWS = Path("_build") / "networks.jsonl"
MOST_POINTS = 3000
"""Spaces are enumerated up to this size."""
Case = tuple[str, TableSpace, NDArray[np.float64]]


def operators(network: str, chip: str) -> tuple[Tunable, ...]:
    """Return the distinct kernels of a network at batch 1."""
    return operators_of(compile_graph(zoo.build(network), load_chip(chip)))


@dataclass(frozen=True, slots=True)
class Proofs:
    """Cube operators of a network on a chip: how many, how many proven optimal, in what time."""

    network: str
    chip: str
    count: int
    proven: int
    worst_gap: float
    median_s: float


def proofs(network: str, chip: str) -> Proofs:
    """Return how many cube operators branch and bound proves, each within ten seconds."""
    gaps, seconds = [], []
    for operator in operators(network, chip):
        if operator.unit == "cube":
            start = time.perf_counter()
            job = CubeJob(operator)
            proof = prove(job.space, job.measure, time_limit_s=PROOF_S)
            gaps.append(proof.gap)
            seconds.append(time.perf_counter() - start)
    return Proofs(
        network,
        chip,
        len(gaps),
        sum(g <= 0 for g in gaps),
        max(gaps, default=0.0),
        statistics.median(seconds) if seconds else 0.0,
    )


SMALL = 3000
"""Points of a space that is measured as a whole."""


def cube_cases(count: int = 20) -> Iterator[Case]:
    """Yield measured spaces of cube operators, spread over networks and chips."""
    found = 0
    for network in NETWORKS:
        for number, operator in enumerate(operators(network, CHIPS[found % len(CHIPS)])):
            if operator.unit == "cube" and number % 2 == 0 and found < count:
                job = CubeJob(operator)
                m = job.measure
                space = cube_space(m.shape, m.chip, m.demand, SMALL, default=False)
                name = f"{network} {number} {operator.chip.name}"
                yield name, space, np.array([attempt(m, point)[0] for point in space.points()])
                found += 1


def vector_cases(count: int = 20) -> Iterator[Case]:
    """Yield measured spaces of vector operators that are small enough."""
    found = 0
    for network, chip in ((n, c) for c in CHIPS for n in NETWORKS):
        for number, operator in enumerate(operators(network, chip)):
            if operator.unit != "vector" or found >= count:
                continue
            try:
                job = VectorJob(operator)
            except AscendLabError:
                continue
            if job.space.size is None or not 60 <= job.space.size <= MOST_POINTS:
                continue
            yield _measured(f"{network} {number} {chip}", job)
            found += 1


def _measured(name: str, job: VectorJob) -> Case:
    """Return the table of a vector operator's space, each schedule measured once."""
    costs: dict[object, float] = {}
    points = list(job.space.points())
    for point in points:
        key = job.space.key(point)
        if key not in costs:
            costs[key] = job.measure(point)
    space = TableSpace(job.space.names, list(zip(*points, strict=True)))
    table = np.array([costs[job.space.key(p)] for p in space.points()])
    return name, space, table


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds to tune: a convolution, a vector operator, ResNet-50, and it again from the bank."""

    conv_s: float
    vector_s: float
    network_s: float
    again_s: float


def speed(chip: str = "Ascend310", batch: int = 16) -> Speed:
    """Time the tuners without a bank, then a second run with what the first one stored."""
    graph = zoo.build("resnet50", batch=batch)
    kernels = operators_of(compile_graph(graph, load_chip(chip)))
    conv = next(o for o in kernels if o.unit == "cube")  # the stem, 7x7, the longest of all
    vector = next(o for o in operators("bert_base", chip) if o.op == "layer_norm")
    times = [_tuned_s(conv), _tuned_s(vector)]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            start = time.perf_counter()
            with Knowledge(Path(folder) / "bank.db", None) as bank:
                tune(graph, chip, "1,2", bank=bank, executor="processes:2")
            times.append(time.perf_counter() - start)
    return Speed(*times)


def _tuned_s(operator: Tunable) -> float:
    start = time.perf_counter()
    tune_operator(operator, Settings())
    return time.perf_counter() - start


def contest_rows(folder: Path) -> list[tuple[str, float, float, float]]:
    """Return (instance, cost, lower bound, unfused floor) of the shipped contest problems."""
    rows = []
    for file in sorted(folder.glob("mlsys-*.json")):
        problem = read_problem(file)
        found = solve(problem)
        rows.append((file.stem, found.cost, found.lower_bound, unfused_floor(problem)))
    return rows


def network_table(rows: Sequence[dict[str, float]]) -> str:
    """Return geometric mean, best and worst gain per chip and batch of `lab.py bank`'s rows."""
    lines = [f"{'chip':<13}{'batch':>6}{'networks':>9}{'gain':>8}{'best':>8}{'worst':>8}"]
    groups: dict[tuple[object, object], list[float]] = {}
    for row in rows:
        key = (row["chip"], row["batch"])
        groups.setdefault(key, []).append(row["default_s"] / row["both_s"])
    for (chip, batch), ratios in sorted(groups.items(), key=str):
        mean = float(np.exp(np.mean(np.log(ratios)))) - 1
        best, worst = max(ratios) - 1, min(ratios) - 1
        lines.append(f"{chip:<13}{batch:>6}{len(ratios):>9}{mean:>8.1%}{best:>8.1%}{worst:>8.1%}")
    return "\n".join(lines)


def tuner_figures() -> list[Figure]:
    """Return what `lab.py bench` prints of the tuners: name, measured, target, met."""
    found = speed()
    limits = (5.0, 3.0, 180.0, 5.0)
    stem, norm = "tune ResNet-50's stem, 16 images", "tune a layer norm of BERT"
    names = (stem, norm, "tune ResNet-50, 16 images, jobs 1,2")
    times = (found.conv_s, found.vector_s, found.network_s, found.again_s)
    rows: list[Figure] = [
        Figure(name, f"{time_s:.2f} s", f"< {limit:g} s", time_s < limit)
        for name, time_s, limit in zip(
            (*names, "  again from the bank"), times, limits, strict=True
        )
    ]
    for name, cost, bound, floor in contest_rows(CONTEST):
        ratio = f"{cost / bound:.3f} of bound"
        rows.append(Figure(f"{name}, {cost:,.0f}", ratio, f"< {floor:,.0f}", cost < floor))
    return rows


def report(seeds: int, json_file: str | None) -> int:
    """Print proofs, the comparison of searches, and the table of networks; return 0."""
    for network in NETWORKS:
        for chip in CHIPS:
            p = proofs(network, chip)
            print(
                f"{network:<14}{chip:<13}{p.proven:>3} of {p.count:>3} cube operators proven, "
                f"worst gap {p.worst_gap:.2%}, median {p.median_s:.2f} s",
                flush=True,
            )
    rows = read_rows(ROWS)
    if rows:
        print("\n" + network_table(rows) + "\n")
    cases = [*recorded_cases(RECORDED), *cube_cases(), *vector_cases()]
    return search_report(cases, seeds=seeds, json_file=json_file)


def read_rows(file: Path) -> list[dict[str, float]]:
    """Return the rows `lab.py bank` left; none without a file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


# Is a policy learned from the bank worth it? Every operator left out of its own lesson.
#
# The bank knows what tree searches of 200 trials found for the other vector operators; the
# operator
# itself is left out on all chips. Both searches begin with the default, as the tuner does.
# Run: python -m bench.tuners


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
    tuned: list[tuple[Tunable, str, BankEntry]] = []
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


def _row(name: str, operator: Tunable, others: Sequence[BankEntry], seeds: int) -> Row:
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
