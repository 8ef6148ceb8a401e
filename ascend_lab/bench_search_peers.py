"""Programs that run other tuners' searches in environments of their own, for `bench_search`.

They read one JSON line about the space (`sizes`: values per decision; `words`: 1 where these have
no order; `rows`: the legal points, as places of values), then a seed per run. They print a point
and read its cost (null: failed), until told to stop; a search that ends by itself prints null.
"""

from __future__ import annotations

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
