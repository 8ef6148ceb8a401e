"""Searches compared where the optimum is known: ours, Optuna's TPE, Kernel Tuner's genetic one.

All count the same thing, unique legal candidates; a failed one costs a trial. A peer that proposes
what is not legal gets the nearest legal point instead, and what it repeats is answered from memory,
so neither costs it a trial. Ratios are best found / optimum after a number of trials.

The numbers in our searches and their model were chosen on dedispersion (AMD MI250X) and on three
spaces of the same collection that are not shipped: convolution on an AMD W6600 and on an NVIDIA
RTX 2080 Ti, matrix product on an RTX 3060, with seeds from 1000. Claims are made for other spaces,
with seeds from 0.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe.drive import Search, drive
from ascend_lab.aoe.search import SEARCHES, Genetic, Mcts, paced
from ascend_lab.aoe.space import RecordedSpace, TableSpace, completed, read_recorded
from bench.peers import FOLDER, Peer, PeerSkippedError, environment

Case = tuple[str, TableSpace, NDArray[np.float64]]
"""Name, space, and the cost of each row of the space (infinite where it fails)."""
Curves = NDArray[np.float64]
"""(seeds, budget) best found so far / optimum."""
MARKS = (50, 100, 200, 500)
"""Numbers of trials at which curves are read."""
PROPOSALS = 20
"""A peer that proposes so many times the budget has stopped finding anything new."""
WORST = 100.0
"""Ratios are cut here, so that a run without any success yet has a mean."""

# -- programs that run other tuners' searches in environments of their own -------------------------
# They read one JSON line about the space (`sizes`: values per decision; `words`: 1 where these have
# no order; `rows`: the legal points, as places of values), then a seed per run. They print a point
# and read its cost (null: failed), until told to stop; a search that ends by itself prints null.
_TALK = """
import json, sys
class Stop(Exception):
    pass
def ask(point):
    print(json.dumps([int(i) for i in point]), flush=True)
    answer = json.loads(sys.stdin.readline())
    if answer == "stop":
        raise Stop
    return answer
about = json.loads(sys.stdin.readline())
def runs(run):
    for line in sys.stdin:
        try:
            run(int(line))
            print("null", flush=True)
        except Stop:
            pass
"""
OPTUNA = (
    _TALK
    + """
import optuna
optuna.logging.set_verbosity(optuna.logging.ERROR)
def suggest(trial, place, size, words):
    if words:
        return trial.suggest_categorical(str(place), list(range(size)))
    return trial.suggest_int(str(place), 0, size - 1)
def run(seed):
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    while True:
        trial = study.ask()
        sizes = zip(about["sizes"], about["words"])
        cost = ask([suggest(trial, i, size, words) for i, (size, words) in enumerate(sizes)])
        if cost is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, cost)
runs(run)
"""
)
KERNEL_TUNER = (
    _TALK
    + """
import random
import numpy
from kernel_tuner.interface import Options
from kernel_tuner.searchspace import Searchspace
from kernel_tuner.strategies import genetic_algorithm
from kernel_tuner.util import RuntimeFailedConfig
names = [str(i) for i in range(len(about["sizes"]))]
space = {
    "tune_params": {name: list(range(size)) for name, size in zip(names, about["sizes"])},
    "cache": {str(i): dict(zip(names, row)) for i, row in enumerate(about["rows"])},
}
class Budget:
    def raise_exception_if_done(self):
        pass
    def get_fraction_consumed(self):
        return 0.0
class Runner:
    def add_strategy_time(self, time):
        pass
    def run(self, points, options):
        return [self.result(point) for point in points]
    def result(self, point):
        cost, found = ask(point), dict(zip(names, point))
        failed = {"time": 1e20, "__error__": RuntimeFailedConfig()}
        return found | (failed if cost is None else {"time": cost})
searchspace = Searchspace(None, None, None, from_cache=space)
def run(seed):
    random.seed(seed)
    numpy.random.seed(seed)
    options = Options(strategy_options={"maxiter": 2000}, objective=["time"],
        objective_higher_is_better=[False], budget=Budget(), verbose=False)
    genetic_algorithm.tune(searchspace, Runner(), options)
runs(run)
"""
)
PEERS = (
    Peer("Optuna", ("optuna==5.0.0",), 0, "TPE, its defaults; numbers as ordered", OPTUNA),
    Peer("KernelTuner", ("kernel_tuner==1.5.0",), 0, "genetic_algorithm, defaults", KERNEL_TUNER),
)
NAMES = ("random", "annealing", "iterated-local", "mcts", "genetic")
PLAIN: Mapping[str, Search] = {
    "mcts, no model": Mcts(completions=1),
    "genetic, no model": Genetic(screened=False),
}
"""Our main searches without the learned model, to show what it is worth."""


class Result(NamedTuple):
    """What one search did on one space."""

    space: str
    search: str
    curves: Curves

    def at(self, trials: int) -> Curves:
        """Return the ratio of each seed after so many trials (or all there are)."""
        return self.curves[:, min(trials, self.curves.shape[1]) - 1]

    def mean(self, trials: int) -> float:
        """Return the mean ratio over seeds."""
        return float(np.minimum(self.at(trials), WORST).mean())


def recorded_cases(folder: str | Path) -> list[Case]:
    """Return the recorded spaces in a folder."""
    found = []
    for path in sorted(Path(folder).glob("*.csv.gz")):
        recorded = read_recorded(path)
        found.append((path.name.removesuffix(".csv.gz"), recorded.space, recorded.costs))
    return found


def curve(costs: Iterable[float], budget: int, optimum: float) -> list[float]:
    """Return best so far / optimum for every number of trials, level after the last one."""
    best = math.inf
    found = []
    for cost in costs:
        best = min(best, cost)
        found.append(best / optimum)
    return (found + [best / optimum] * budget)[:budget]


def run_ours(case: Case, name: str, search: Search, budget: int, seeds: Iterable[int]) -> Result:
    """Return what one of our searches does on a space."""
    recorded = RecordedSpace(case[1], case[2])
    rows = []
    for seed in seeds:
        trace = drive(paced(search, budget), recorded.space, recorded, budget, seed=seed)
        rows.append(curve((t.cost for t in trace.trials), budget, recorded.optimum))
    return Result(case[0], name, np.array(rows))


def run_peer(case: Case, peer: Peer, python: Path, budget: int, seeds: Iterable[int]) -> Result:
    """Return what a peer does on a space; it runs in a process that asks for costs line by line."""
    space = case[1]
    words = [int(not all(isinstance(v, int | float) for v in vs)) for vs in case[1].values]
    about = {"words": words, "rows": space.codes.tolist(), "sizes": [len(v) for v in space.values]}
    command = [str(python), "-c", peer.program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None

        def say(data: Any) -> None:
            print(json.dumps(data), file=child.stdin, flush=True)

        def hear() -> Any:
            line = child.stdout.readline() if child.stdout else ""
            if not line:
                raise RuntimeError(f"{peer.name} on {case[0]} ended before its time")
            return json.loads(line)

        say(about)
        rows = [_one_run(case, budget, seed, say, hear) for seed in seeds]
        child.stdin.close()
    return Result(case[0], peer.name, np.array(rows))


def _one_run(
    case: Case, budget: int, seed: int, say: Callable[[Any], None], hear: Callable[[], Any]
) -> list[float]:
    """Return the curve of one seed; the peer proposes places of values, or None at its end."""
    _, space, table = case
    say(seed)
    costs: dict[int, float] = {}
    for _ in range(PROPOSALS * budget):
        proposed = hear()
        if proposed is None:
            break
        wanted = [values[i] for values, i in zip(space.values, proposed, strict=True)]
        row = space.row(completed(space, wanted))
        costs[row] = float(table[row])
        if len(costs) == min(budget, space.size):
            say("stop")
            break
        say(costs[row] if math.isfinite(costs[row]) else None)
    else:
        hear()
        say("stop")
    return curve(costs.values(), budget, float(table.min()))


def compare(
    cases: Sequence[Case], budget: int = 500, seeds: int = 30, peers: Mapping[Peer, Path] = {}
) -> list[Result]:
    """Run all searches on all spaces, printing as they end."""
    ours = {name: SEARCHES[name] for name in NAMES} | dict(PLAIN)
    results = []
    for case in cases:
        for name, search in ours.items():
            results.append(run_ours(case, name, search, budget, range(seeds)))
            print(line(results[-1], budget), flush=True)
        for peer, python in peers.items():
            results.append(run_peer(case, peer, python, budget, range(seeds)))
            print(line(results[-1], budget), flush=True)
    return results


def line(result: Result, budget: int) -> str:
    """Return one search on one space as a line."""
    marks = "".join(f"{result.mean(m):>8.3f}" for m in MARKS if m <= budget)
    last = result.at(budget)
    return (
        f"{result.space:<22}{result.search:<20}{marks}   median {np.median(last):.4f}"
        f"   worst {last.max():.3f}   within 5 % {(last <= 1.05).mean():.0%}"
    )


def table(results: Sequence[Result], budget: int) -> str:
    """Return the anytime table: geometric mean over spaces of the mean ratio over seeds."""
    marks = [mark for mark in MARKS if mark < budget] + [budget]
    searches = list(dict.fromkeys(r.search for r in results))
    means = {
        name: [geometric_mean(r.mean(m) for r in results if r.search == name) for m in marks]
        for name in searches
    }
    head = f"{'geometric mean after':<22}" + "".join(f"{mark:>8}" for mark in marks)
    rows = sorted(searches, key=lambda name: means[name][-1])
    return "\n".join(
        [head, *(f"{name:<22}" + "".join(f"{v:>8.3f}" for v in means[name]) for name in rows)]
    )


def geometric_mean(values: Iterable[float]) -> float:
    """Return exp of the mean logarithm."""
    return float(np.exp(np.mean(np.log(list(values)))))


def report(
    cases: Sequence[Case],
    budget: int = 500,
    seeds: int = 30,
    with_peers: bool = True,
    json_file: str | None = None,
) -> int:
    """Run the comparison and print it; peers that cannot be installed are skipped. Returns 0."""
    peers: dict[Peer, Path] = {}
    for peer in PEERS if with_peers else ():
        try:
            peers[peer] = environment(peer, FOLDER)
        except PeerSkippedError as error:
            print(f"skipped: {error}", flush=True)
    results = compare(cases, budget, seeds, peers)
    print(f"\n{table(results, budget)}\n\n{seeds} seeds, {len(cases)} spaces, {budget} trials")
    if json_file:
        rows = [
            {
                "space": r.space,
                "search": r.search,
                "mean": np.minimum(r.curves, WORST).mean(0).round(5).tolist(),
            }
            for r in results
        ]
        Path(json_file).write_text(json.dumps(rows, indent=1), "utf-8")
    return 0
