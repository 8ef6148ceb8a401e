"""How good the tuners are and how fast: part of `lab.py bench`, all of it with `--tuners`."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe import tune, tune_operator
from ascend_lab.aoe.bank import Knowledge
from ascend_lab.aoe.cube import CubeJob, cube_space, prove
from ascend_lab.aoe.engine import Session
from ascend_lab.aoe.operators import Tunable, operators_of
from ascend_lab.aoe.space import TableSpace
from ascend_lab.aoe.vector import VectorJob
from ascend_lab.aoe.workers import attempt
from ascend_lab.compiler import GraphBuilder, compile_graph, zoo
from ascend_lab.data import FOLDER
from ascend_lab.errors import AscendLabError
from ascend_lab.lab.contest import read_problem, solve, unfused_floor
from ascend_lab.machine.chip import load_chip
from bench.search import recorded_cases, report as search_report
from bench.table import CHIPS, Figure, below

NETWORKS = ("resnet50", "mobilenet_v2", "bert_base")
PROOF_S = 10.0
CONTEST = FOLDER / "mlsys2026"
RECORDED = FOLDER / "autotune_bruteforce"
ROWS = Path("_build") / "networks.jsonl"
MAX_POINTS = 3000
"""Spaces are enumerated up to this size."""
Case = tuple[str, TableSpace, NDArray[np.float64]]


def operators(network: str, chip: str) -> tuple[Tunable, ...]:
    """Return the distinct kernels of a network at batch 1."""
    return operators_of(compile_graph(zoo.build(network), load_chip(chip)))


def cube_cases(count: int = 20) -> Iterator[Case]:
    """Yield measured spaces of cube operators, spread over networks and chips."""
    found = 0
    for network in NETWORKS:
        for number, operator in enumerate(operators(network, CHIPS[found % len(CHIPS)])):
            if operator.unit == "cube" and number % 2 == 0 and found < count:
                job = CubeJob(operator)
                m = job.measure
                space = cube_space(m.shape, m.chip, m.demand, MAX_POINTS, default=False)
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
            if job.space.size is None or not 60 <= job.space.size <= MAX_POINTS:
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
        best = max(ratios) - 1
        worst = min(ratios) - 1
        lines.append(f"{chip:<13}{batch:>6}{len(ratios):>9}{mean:>8.1%}{best:>8.1%}{worst:>8.1%}")
    return "\n".join(lines)


def tuner_figures() -> list[Figure]:
    """Return what `lab.py bench` prints of the tuners: name, measured, target, met."""
    chip = "Ascend310"
    graph = zoo.build("resnet50", batch=16)
    # in its network the stem is pooled on the core and the norm is the cube's: neither has a space
    net = GraphBuilder("stem", "fp16")
    other = GraphBuilder("norm", "fp16")
    x = net.input("x", (16, 3, 224, 224))
    rows_of = other.input("x", (2048, 768))
    net.output(net.relu(net.conv2d(x, net.weight((64, 3, 7, 7)), stride=2, pad=3)))
    other.output(other.layer_norm(rows_of, other.weight((768,)), other.weight((768,))))
    stem, norm = (
        next(o for o in operators_of(compile_graph(one.build(), load_chip(chip))) if o.unit)
        for one in (net, other)
    )
    rows = [
        below("tune the stem of ResNet-50 x16", _seconds(lambda: tune_operator(stem)), 5, "s"),
        below("tune a layer norm of 2048x768", _seconds(lambda: tune_operator(norm)), 3, "s"),
    ]
    with tempfile.TemporaryDirectory() as folder:

        def tuned() -> None:
            with Knowledge(Path(folder) / "bank.db", None) as bank:
                tune(graph, chip, "1,2", bank=bank, session=Session(executor="processes:2"))

        rows += [
            below("tune ResNet-50, 16 images, jobs 1,2", _seconds(tuned), 180, "s"),
            below("  again from the bank", _seconds(tuned), 5, "s"),
        ]
    for name, cost, bound, floor in contest_rows(CONTEST):
        ratio = f"{cost / bound:.3f} of bound"
        rows.append(Figure(f"{name}, {cost:,.0f}", ratio, f"< {floor:,.0f}", cost < floor))
    return rows


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def report(seeds: int, json_file: str | None) -> int:
    """Print proofs, the comparison of searches, and the table of networks; return 0."""
    for network, chip in product(NETWORKS, CHIPS):
        gaps = []
        seconds = []
        for operator in operators(network, chip):
            if operator.unit == "cube":
                start = time.perf_counter()
                job = CubeJob(operator)
                gaps.append(prove(job.space, job.measure, time_limit_s=PROOF_S).gap)
                seconds.append(time.perf_counter() - start)
        proven = sum(gap <= 0 for gap in gaps)
        print(
            f"{network:<14}{chip:<13}{proven:>3} of {len(gaps):>3} cube operators proven, worst "
            f"gap {max(gaps, default=0.0):.2%}, median {statistics.median(seconds or [0.0]):.2f} s",
            flush=True,
        )
    if ROWS.exists():
        rows = [json.loads(line) for line in ROWS.read_text("utf-8").splitlines()]
        print("\n" + network_table(rows) + "\n")
    cases = [*recorded_cases(RECORDED), *cube_cases(), *vector_cases()]
    return search_report(cases, seeds=seeds, json_file=json_file)
