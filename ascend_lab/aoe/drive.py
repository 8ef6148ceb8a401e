"""Runs a search: measures the points that it proposes and sends their costs back to it.

A search is a generator: it yields a batch of points and is sent their costs, until the budget is
spent or nothing is left to try. `drive` runs it and returns a `Trace` of all trials. The budget
limits the number of different candidates. Costs come back in the order of the points, whichever
worker measured them, so that a seed determines the result for any number of workers.

This file contains `Settings` (the options of a user), progress bars, `drive`, and `replay`, which
runs a search on a recorded space.
"""

import math
import sys
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import accumulate
from typing import Any, Self, TextIO

import numpy as np

from ascend_lab.aoe.space import Point, RecordedSpace, Space
from ascend_lab.aoe.workers import Deadline, Measure, TimeUpError, Workers, WorkersLostError
from ascend_lab.errors import InputError

JOBS = {"1": "subgraph", "2": "operator"}
"""The published numbers of the jobs that may run together."""
SEPARATE_JOBS = {"4": "gradient"}
"""Jobs that cannot be combined with others: the gradient tuner needs a cluster as well."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a tuning run.

    - budget: different candidates per operator
    - time_limit_s: for the whole network, divided among its operators by their possible gains
    - trial_limit_s: for one candidate
    - early_stop: do not build a candidate whose lower bound is this many times the best cost
    - search: name of a search for all operators, in place of the default for each type
    - repeat: tune again even if the bank has a result
    - deeper, deeper_s: branch and bound follows the search of a cube operator to prove its result
      optimal; it tries at most `budget` kernels, or with `deeper` any number within `deeper_s`
      seconds per operator
    - verify: execute the best candidate and compare its values with the default's
    """

    budget: int = 200
    seed: int = 0
    time_limit_s: float | None = None
    trial_limit_s: float | None = 30.0
    early_stop: float | None = 4.0
    search: str = ""
    repeat: bool = False
    deeper: bool = False
    deeper_s: float = 10.0
    verify: bool = True

    def __post_init__(self) -> None:
        """Raise `InputError` for numbers that make no sense."""
        if self.budget < 1:
            raise InputError("a budget of at least 1", str(self.budget), "raise it")
        limits = [self.time_limit_s, self.trial_limit_s, self.early_stop, self.deeper_s]
        if any(x is not None and x <= 0 for x in limits):
            raise InputError("limits above 0", str(limits), "raise them, or leave them out")


def jobs_of(text: str) -> tuple[str, ...]:
    """Return the jobs named in a text such as "2" or "1,2", in the order in which they run."""
    numbers = [word.strip() for word in text.split(",")]
    if not text or any(job not in JOBS for job in numbers):
        names = ", ".join(f"{number} {name}" for number, name in {**JOBS, **SEPARATE_JOBS}.items())
        remedy = "e.g. 2, or 1,2; 4 by itself: `aoe --job_type 4 --cluster NAME`, or tune_gradients"
        raise InputError(f"jobs among {names}", text or "nothing", remedy)
    # "2,1" becomes ("1", "2"): slicing runs first because it changes the operators' shapes.
    return tuple(sorted(set(numbers)))


# -- progress --------------------------------------------------------------------------------------
OVERALL = "all"
"""The label under which the progress of the whole run is reported, not of one step."""
Progress = Callable[[str, int, int, str], None]
"""Receives (label, done, total, best so far), for example ("3/7 matmul", 12, 200, "5210")."""

UNITS = {
    "read": "file",
    "compile": "pass",
    "cuts": "cut",
    "segments": "segment",
    "plans": "plan",
    "bounds": "operator",
    "proof": "kernel",
    "values": "check",
    "save": "file",
}
"""The units that are counted under a label; all other labels count trials."""


class Bars:
    """Shows progress as bars, by default only in terminals and notebooks."""

    def __init__(self, on: bool | None = None, stream: TextIO | None = None) -> None:
        """Start without a bar.

        `on` switches the bars on or off; None shows them if `stream` (default: stderr) is a
        terminal or a notebook.
        """
        self.stream = stream or sys.stderr
        notebook = type(self.stream).__module__.startswith("ipykernel")
        self.on = (notebook or self.stream.isatty()) if on is None else on
        self.label = ""
        self.best = math.inf
        self.bar: Any = None
        self.overall: Any = None

    def __call__(self, label: str, done: int, total: int, best: str) -> None:
        """Show `done` of at most `total`, and the lowest cost reported in `best` so far."""
        if not self.on:
            return
        # Two bars at most: the whole run in the first line, and below it the operator being tuned.
        if label == OVERALL:
            self.overall = self.overall or self._bar(label, total, "step", 0)
            self.overall.total = total
            self.overall.update(done - self.overall.n)
            self.overall.refresh()
            return
        if self.bar is None or label != self.label:
            if self.bar is not None:
                self.bar.close()
            self.label = label
            self.best = math.inf
            unit = UNITS.get(label.rpartition(", ")[2], "trial")
            self.bar = self._bar(label, total, unit, int(self.overall is not None))
        self.bar.total = total
        self.bar.update(done - self.bar.n)
        with suppress(IndexError, ValueError):  # `best` may be empty, or text without a number
            if (cost := float(best.split(maxsplit=1)[0])) < self.best:
                self.best = cost
                self.bar.set_postfix_str(f"best {best}")

    def _bar(self, label: str, total: int, unit: str, line: int) -> Any:
        tqdm = import_module("tqdm.auto").tqdm
        options = {"position": line} if line else {}
        return tqdm(total=total, desc=label, file=self.stream, leave=False, unit=unit, **options)

    def close(self) -> None:
        """End the bars."""
        for bar in (self.bar, self.overall):
            if bar is not None:
                bar.close()
        self.bar = self.overall = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- the search ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate with its cost; if it failed, the cost is infinite and the note says why."""

    number: int
    point: Point
    cost: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """The trials of one search, and why it ended.

    `names` are those of the decisions of a point. `end` is "exhausted" (nothing left to try),
    "proven" (nothing better left), "idle" (no gain for long), "budget", "time", or "interrupted".
    """

    names: tuple[str, ...]
    trials: tuple[Trial, ...]
    end: str
    seed: int = 0

    @property
    def best(self) -> Trial:
        """The first trial of lowest cost; raises `InputError` if none succeeded."""
        succeeded = [t for t in self.trials if math.isfinite(t.cost)]
        if not succeeded:
            notes = {t.note for t in self.trials}
            got = f"{len(self.trials)} trials: {'; '.join(sorted(notes))[:200]}"
            raise InputError("a candidate that can be built", got, "widen the space")
        # of equal costs `min` returns the first
        return min(succeeded, key=lambda t: t.cost)

    @property
    def best_so_far(self) -> list[float]:
        """The lowest cost after each trial: costs 9, 7, 8, 5 give 9, 7, 7, 5."""
        return list(accumulate((t.cost for t in self.trials), min))

    @property
    def failures(self) -> tuple[Trial, ...]:
        """The trials that failed."""
        return tuple(t for t in self.trials if not math.isfinite(t.cost))


Steps = Generator[list[Point], list[float], None]
Search = Callable[[Space, np.random.Generator, Sequence[Point]], Steps]
"""Takes (space, rng, points to try first); yields batches of points and is sent their costs."""
MAX_IDLE_BATCHES = 200
"""A search that proposes this many batches in a row without a new candidate is ended."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Where a search starts, who measures its candidates, and what ends it before its budget.

    A candidate that takes longer than `trial_limit_s` fails. With `early_stop`, a candidate whose
    certified lower bound (`measure.bound`) exceeds that many times the best cost is not built; the
    bound stands as its cost. `known` holds cost and note of points that an earlier run measured.
    `on_trial` is called with every trial. The search ends as soon as `is_proven(trials)` is true
    (nothing better is left), or after `patience` trials without a gain.
    """

    start: Sequence[Point] = ()
    workers: Workers | Executor | None = None
    time_limit_s: float | None = None
    trial_limit_s: float | None = None
    early_stop: float | None = None
    known: Mapping[Point, tuple[float, str]] = field(default_factory=dict)
    on_trial: Callable[[Trial], None] | None = None
    is_proven: Callable[[Sequence[Trial]], bool] | None = None
    patience: int | None = None


NO_RULES = Rules()


@dataclass
class _SearchRun:
    """One run of a search: its rules, the trials so far, and the cost of each candidate."""

    space: Space
    measure: Measure
    budget: int
    rules: Rules
    workers: Workers
    deadline: Deadline
    trials: list[Trial] = field(default_factory=list)
    costs: dict[Hashable, float] = field(default_factory=dict)

    def loop(self, steps: Steps) -> str:
        """Measure one batch after another until the search ends; return why it ended."""
        is_proven = self.rules.is_proven
        patience = self.rules.patience
        idle_batches = 0
        answers = None
        while True:
            try:
                batch = next(steps) if answers is None else steps.send(answers)
            except StopIteration:
                return "exhausted"
            if len(self.trials) >= self.budget:
                return "budget"
            if self.deadline.has_passed:
                return "time"
            # A search may propose a candidate twice, as annealing does on its way back: only new
            # ones count.
            untried = self.untried_in(batch)
            idle_batches = 0 if untried else idle_batches + 1
            if idle_batches > MAX_IDLE_BATCHES:
                return "exhausted"
            self.measure_all(untried)
            if untried and is_proven and is_proven(self.trials):
                return "proven"
            if patience and len(self.trials) - self.best_number > patience:
                return "idle"
            costs = [self.costs.get(self.space.key(p)) for p in batch]
            answers = [cost for cost in costs if cost is not None]
            # With 6 trials of a budget of 8 done, only 2 points of a batch of 4 are measured. A
            # search cannot go on with half an answer.
            if len(answers) < len(batch):
                return "budget"

    @property
    def best_number(self) -> int:
        """The number of the first trial of lowest cost."""
        return min(range(len(self.trials)), key=lambda i: self.trials[i].cost, default=0)

    def untried_in(self, batch: Sequence[Point]) -> dict[Hashable, Point]:
        """Return the candidates of a batch that are new, at most as many as the budget allows."""
        candidates: dict[Hashable, Point] = {}
        for point in batch:
            key = self.space.key(point)
            if key not in self.costs:
                candidates.setdefault(key, point)
        return dict(list(candidates.items())[: self.budget - len(self.trials)])

    def measure_all(self, untried: Mapping[Hashable, Point]) -> None:
        """Measure new candidates; add their trials in the order of the batch."""
        answers = self.stopped_early(untried)
        known = self.rules.known
        for key, point in untried.items():
            if key not in answers and point in known:
                answers[key] = known[point]
        unanswered = [k for k in untried if k not in answers]
        # Several processes answer in any order, but trials are added in the order of the batch:
        # the answer for the third candidate waits until the first two have theirs.
        waiting = list(untried)

        def add_trials() -> None:
            while waiting and waiting[0] in answers:
                key = waiting.pop(0)
                cost, note = answers[key]
                self.costs[key] = cost
                self.trials.append(Trial(len(self.trials), untried[key], cost, note))
                if self.rules.on_trial:
                    self.rules.on_trial(self.trials[-1])

        def on_answer(index: int, cost: float, note: str) -> None:
            # a failure after the deadline may be due to the deadline: it is no trial
            if math.isfinite(cost) or not self.deadline.has_passed:
                answers[unanswered[index]] = cost, note
                add_trials()
            if self.deadline.has_passed:
                raise TimeUpError

        add_trials()
        limits_s = (self.rules.trial_limit_s, self.deadline.remaining_s)
        finite_limits_s = [s for s in limits_s if s is not None and math.isfinite(s)]
        points = [untried[key] for key in unanswered]
        self.workers.run(self.measure, points, min(finite_limits_s, default=None), on_answer)

    def stopped_early(self, untried: Mapping[Hashable, Point]) -> dict[Hashable, tuple[float, str]]:
        """Return cost and note of the candidates that are not worth building (see `Rules`)."""
        bound = getattr(self.measure, "bound", None)
        best_cost = min(self.costs.values(), default=math.inf)
        early_stop = self.rules.early_stop
        if not early_stop or bound is None or not math.isfinite(best_cost):
            return {}
        bounds = {key: float(bound(point)) for key, point in untried.items()}
        # With early_stop 4 and a best of 1,000 cycles, a kernel that needs at least 4,001 is not
        # built.
        limit = best_cost * early_stop
        return {key: (low, "stopped early") for key, low in bounds.items() if low > limit}


def drive(
    search: Search,
    space: Space,
    measure: Measure,
    budget: int,
    *,
    seed: int = 0,
    rules: Rules = NO_RULES,
) -> Trace:
    """Run a search for at most `budget` different candidates and return its trace.

    Ctrl-C ends the search and keeps its trials. A candidate that is being measured when the time
    limit ends is not a trial. Raises `WorkersLostError` if the workers are gone.
    """
    workers = rules.workers
    if not isinstance(workers, Workers):
        workers = Workers(executor=workers)
    deadline = Deadline.of(rules.time_limit_s)
    run = _SearchRun(space, measure, budget, rules, workers, deadline)
    steps = search(space, np.random.default_rng(seed), rules.start)
    try:
        end = run.loop(steps)
    except WorkersLostError:
        if not deadline.has_passed:
            raise
        end = "time"
    except TimeUpError:
        end = "time"
    except KeyboardInterrupt:
        end = "interrupted"
    # The generator may still wait for the costs of its last batch.
    steps.close()
    return Trace(space.names, tuple(run.trials), end, seed)


# -- on a recorded space ---------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Replay:
    """The best costs of one search on a recorded space, one per seed, and the optimum.

    The best cost of a seed is infinite if none of its configurations ran.
    """

    optimum: float
    best_per_seed: tuple[float, ...]
    evaluations_per_seed: tuple[int, ...]

    @property
    def median_ratio(self) -> float:
        """Median over the seeds of best cost / optimum."""
        return float(np.median(self.best_per_seed)) / self.optimum

    def share_within(self, gap: float) -> float:
        """Return the share of seeds whose best is at most `gap` above the optimum."""
        return float(np.mean(np.array(self.best_per_seed) <= (1 + gap) * self.optimum))


def replay(space: RecordedSpace, search: Search, budget: int, seeds: Iterable[int]) -> Replay:
    """Run a search on a recorded space with `budget` trials, once per seed."""
    traces = []
    for seed in seeds:
        traces.append(drive(search, space.space, space, budget, seed=seed))
        if traces[-1].end == "interrupted":
            raise KeyboardInterrupt
    # Failed trials cost infinity: a seed that found nothing has an infinite best.
    best_costs = tuple(min(t.cost for t in trace.trials) for trace in traces)
    trial_counts = tuple(len(trace.trials) for trace in traces)
    return Replay(space.optimum, best_costs, trial_counts)
