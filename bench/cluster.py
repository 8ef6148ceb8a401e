"""Clusters: speed of timed collectives and steps, and what published figures say of the model."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ascend_lab.cluster import collective_time, load_topology, make
from ascend_lab.cluster.fit import held_out, mape, read_table
from ascend_lab.cluster.parallel.redistribution import compare
from ascend_lab.cluster.parallel.strategy import (
    data_parallel,
    evaluate,
    greedy,
    halving,
    on_topology,
    problem_of,
    read_problem,
    roofline,
    solve,
)
from ascend_lab.cluster.parallel.strategy.local import search
from ascend_lab.cluster.parallel.strategy.problem import reduce_problem
from ascend_lab.cluster.timing import time_collective
from ascend_lab.compiler import zoo
from ascend_lab.data import data_path
from ascend_lab.errors import ClusterError
from ascend_lab.lab.validation import training_validation_table
from ascend_lab.machine.chip import load_chip
from bench.table import Figure, below

DEVICES = 1024
SIZES = tuple(2**k for k in range(10, 26))
TABLE = data_path("deepbench/allreduce_measured.csv")
LARGE_BYTES = 1e6
ERROR_LIMIT = 0.12
STEP = """
import time
from ascend_lab.cluster import load_topology
from ascend_lab.compiler.zoo import build
from ascend_lab.cluster.train import all_reduce_cost, profile_layers, step_timeline

start = time.process_time()
profile = profile_layers(
    lambda layers: build("bert_large", batch=8, layers=layers), 24, "Ascend910A", optimizer="adam"
)
middle = time.process_time()
step_timeline(profile, all_reduce_cost(load_topology("910a-server")))
print(middle - start, time.process_time() - middle)
"""


def cluster_figures() -> list[Figure]:
    """Return what `lab.py bench` prints of clusters; prints the published table on the way."""
    print("\n" + training_validation_table() + "\n")
    return [*collective_figures(), *step_figures(), *fit_figures()]


def collective_figures() -> list[Figure]:
    """Time the hierarchical all-reduce of 1024 devices at 16 sizes, and the choice of the best."""
    found: list[Figure] = []
    for kind in ("910a-roce", "910b-roce"):
        cluster = load_topology(f"{kind}:{DEVICES}")
        start = time.perf_counter()
        plan = make("all_reduce", "hierarchical", cluster)
        for size in SIZES:
            time_collective(plan, cluster, size)
        one_s = time.perf_counter() - start
        for size in SIZES:
            collective_time("all_reduce", cluster, size)
        all_s = time.perf_counter() - start - one_s
        name = f"{kind}:{DEVICES} hierarchical all-reduce, {len(SIZES)} sizes"
        found += [below(name, one_s, 5, "s"), below(f"{name}, best of all", all_s, unit="s")]
    return found


def step_figures() -> list[Figure]:
    """Time a BERT-large step of 8 devices in a fresh process: profile, then timeline."""
    done = subprocess.run(
        [sys.executable, "-c", STEP], capture_output=True, text=True, check=True, timeout=600
    )
    profile_s, timeline_s = map(float, done.stdout.split())
    name = "BERT-large on 8 devices, processor time"
    return [
        below(f"{name}: timeline of a step", timeline_s, 2, "s"),
        below(f"{name}: with its profile", profile_s + timeline_s, unit="s"),
    ]


def fit_figures() -> list[Figure]:
    """Return the errors on left-out sizes of the measured all-reduces, per band of sizes."""
    found: list[Figure] = []
    for device in ("NV_P100", "NV_M40"):
        judged = held_out(read_table(TABLE, device=device, max_ranks=8))
        large = mape(j for j in judged if j.row.size_bytes >= LARGE_BYTES)
        small = mape(j for j in judged if j.row.size_bytes < LARGE_BYTES)
        assert large is not None and small is not None
        name = f"all-reduce fit, {device}, 2-8 ranks, left-out sizes"
        found.append(Figure(f"{name} >= 1 MB", f"{large:.1%}", "<= 12 %", large <= ERROR_LIMIT))
        found.append(Figure(f"{name} < 1 MB", f"{small:.1%}", "information", None))
    return found


# -- strategy search against its optimum ----------------------------------------------------------
# The contest's benchmark B is solved and proven; on networks of the zoo, recursive halving, message
# passing and plain data parallelism stand beside the optimum of the same problem.
NETWORKS = ("alexnet", "vgg16", "resnet50", "mobilenet_v2", "bert_base", "gpt2_small")
BATCH = 64
STEP_DEVICES = 8
CHIP = "Ascend910B2"
TOPOLOGY = "910b-server"
CONTEST = Path(__file__).parent.parent / "tests" / "data" / "iopddl"
OPTIMUM_B = 532_843
LIMIT_S = 120.0
LAYOUTS = (((2, 2), (64, 64)), ((4, 2), (64, 64)), ((2, 2, 2), (64, 64)), ((4, 2), (64, 64, 64)))


def strategy_table(networks: Sequence[str] = NETWORKS) -> str:
    """Return the searches beside the optimum, one line per network.

    The last column is the optimum in half the memory per device of data parallelism.
    """
    columns = ("halving", "own costs", "messages", "data par.", "1/2 memory", "solved")
    names = "".join(f"{name:>12}" for name in columns)
    lines = [
        f"Training, {BATCH} samples, {STEP_DEVICES} devices of {TOPOLOGY}: time above the optimum",
        f"{'network':<14}{'nodes':>6}{'optimum':>11}{names}",
    ]
    for name in networks:
        graph = zoo.build(name, batch=BATCH, dtype="fp16")
        costs = on_topology(load_topology(TOPOLOGY)), roofline(load_chip(CHIP))
        given = problem_of(graph, STEP_DEVICES, *costs)
        start = time.perf_counter()
        best = solve(given.problem)
        solve_s = time.perf_counter() - start
        choices = halving(given), halving(given, own_costs=True), data_parallel(given)
        first, second, plain = (evaluate(given.problem, choice) for choice in choices)
        told = solve(given.problem, method="heuristic")
        half = replace(given.problem, usage_limit=plain.peak_usage // 2)
        try:
            halved: int | None = solve(half).cost
        except ClusterError:
            halved = None
        found = (first.cost, second.cost, told.cost, plain.cost, halved)
        cells = ("none" if cost is None else f"{cost / best.cost - 1:.2%}" for cost in found)
        head = f"{name:<14}{len(graph.nodes):>6}{best.cost / 1e6:>8.2f} ms"
        mark = "" if best.proven else " not proven"
        lines.append(f"{head}{''.join(f'{cell:>12}' for cell in cells)}{solve_s:>10.1f} s{mark}")
    return "\n".join(lines)


def redistribution_table() -> str:
    """Return how far the greedy redistribution lies above the cheapest, over all layout pairs."""
    lines = [
        f"{'devices':<12}{'tensor':<14}{'pairs':>7}{'dearer':>8}{'bytes above':>13}{'worst':>7}"
    ]
    for matrix, shape in LAYOUTS:
        found = compare(matrix, shape)
        lines.append(
            f"{'x'.join(map(str, matrix)):<12}{'x'.join(map(str, shape)):<14}{found.pairs:>7}"
            f"{found.worse:>8}{found.excess:>13.1%}{found.worst:>6.2f}x"
        )
    return "\n".join(lines)


def contest_figures() -> list[Figure]:
    """Return name, measured, target, met of benchmark B: exact, by messages, greedy."""
    problem = read_problem(CONTEST / "asplos-2025-iopddl-B.json.gz")
    wall = time.perf_counter()
    cpu = time.process_time()
    best = solve(problem)
    wall = time.perf_counter() - wall
    cpu = time.process_time() - cpu
    right = best.proven and best.cost == OPTIMUM_B
    told = solve(problem, method="heuristic")
    small = reduce_problem(problem)
    descended = evaluate(problem, small.restore(search(small, sweeps=0) or {}))
    first = evaluate(problem, greedy(problem))
    over = first.peak_usage / (problem.usage_limit or 1)
    return [
        Figure(
            f"IOPDDL B: {best.cost:,}", "proven" if best.proven else "not proven", "532,843", right
        ),
        Figure("  time to the proof", f"{wall:.1f} s, CPU {cpu:.1f} s", "< 120 s", wall < LIMIT_S),
        Figure("  message passing above it", f"{told.cost / OPTIMUM_B - 1:.4%}", "", None),
        Figure("  coordinate descent", f"{descended.cost / OPTIMUM_B:.0f}x the optimum", "", None),
        Figure("  greedy: forbidden choices", f"{first.forbidden}, memory {over:.1f}x", "", None),
    ]


def strategy_figures() -> list[Figure]:
    """Return what `lab.py bench` prints of strategies; prints the tables on the way."""
    print("\n" + strategy_table() + "\n\n" + redistribution_table() + "\n")
    return contest_figures()
