"""Run a search: propose, measure, feed back, until the budget is spent; what it did is a trace.

Budgets count unique candidates. A search sees costs in the order it proposed the points, whoever
measured them, so that a seed fixes the result for any number of workers.

From top to bottom: what a user may say about a run (`Settings`), what a run says while it goes on
(`Progress`, which `Bars` shows), the search itself (`drive`), and the same on a recorded space.
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
ALONE = {"4": "gradient"}
"""Of those that run by themselves: this one needs a cluster."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Budgets and ways of a run.

    `budget`: unique candidates per operator. `time_limit_s`: for the whole network, shared by its
    operators in proportion to what they can still gain. `trial_limit_s`: for one candidate.
    `search`: the name of a search instead of the one that suits each operator. `repeat`: tune again
    what the bank knows. Where a cube's operator is not proven optimal, branch and bound tries
    `budget` more; with `deeper` as many as it takes, within `deeper_s` seconds an operator.
    `verify`: run every winner and compare its values with the default's.
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
    """Return the jobs of a text such as "2" or "1,2", in the order they run: subgraph first."""
    numbers = [word.strip() for word in text.split(",")]
    if not text or any(job not in JOBS for job in numbers):
        names = ", ".join(f"{number} {name}" for number, name in {**JOBS, **ALONE}.items())
        remedy = "e.g. 2, or 1,2; 4 by itself: `aoe --job_type 4 --cluster NAME`, or tune_gradients"
        raise InputError(f"jobs among {names}", text or "nothing", remedy)
    # "2,1" runs as ("1", "2"): operators get their final shapes only from slicing.
    return tuple(sorted(set(numbers)))


# -- what a run says while it goes on --------------------------------------------------------------
OVERALL = "all"
"""What progress of a whole run is called: compiling, slicing, each operator, the end."""
Progress = Callable[[str, int, int, str], None]
"""(what is tuned, done, out of, best so far as text) -> None."""

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
"""What the stages count; all others count trials."""


class Bars:
    """Shows progress as bars: in terminals and notebooks, or where it is `on`."""

    def __init__(self, on: bool | None = None, stream: TextIO | None = None) -> None:
        """Start without a bar; `on` decides, else whether somebody watches `stream` (stderr)."""
        self.stream = stream or sys.stderr
        notebook = type(self.stream).__module__.startswith("ipykernel")
        self.on = (notebook or self.stream.isatty()) if on is None else on
        self.label = ""
        self.best = math.inf
        self.bar: Any = None
        self.overall: Any = None

    def __call__(self, label: str, done: int, total: int, best: str) -> None:
        """Show `done` of at most `total`, and the least number that `best` began with."""
        if not self.on:
            return
        # Two bars at most: the whole run in the first line, and below it what is being tuned.
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
        with suppress(IndexError, ValueError):  # a text without a number in front is no best
            if (cost := float(best.split(maxsplit=1)[0])) < self.best:
                self.best = cost
                self.bar.set_postfix_str(f"best {best}")

    def _bar(self, label: str, total: int, unit: str, place: int) -> Any:
        tqdm = import_module("tqdm.auto").tqdm
        where = {"position": place} if place else {}
        return tqdm(total=total, desc=label, file=self.stream, leave=False, unit=unit, **where)

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
    """One candidate: its cost (infinite if it failed) and a note that says why, or ""."""

    number: int
    point: Point
    cost: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """The trials of one search, and why it ended.

    `end`: "exhausted" (nothing left to try), "proven" (nothing better left), "idle" (no gain for
    long), "budget", "time", or "interrupted".
    """

    names: tuple[str, ...]
    trials: tuple[Trial, ...]
    end: str
    seed: int = 0

    @property
    def best(self) -> Trial:
        """The first trial of least cost; raises `InputError` if none succeeded."""
        good = [t for t in self.trials if math.isfinite(t.cost)]
        if not good:
            notes = {t.note for t in self.trials}
            got = f"{len(self.trials)} trials: {'; '.join(sorted(notes))[:200]}"
            raise InputError("a candidate that can be built", got, "widen the space")
        # `min` keeps the first of equal ones: the trial that a reader sees first in the trace.
        return min(good, key=lambda t: t.cost)

    @property
    def best_so_far(self) -> list[float]:
        """Least cost after each trial."""
        # Costs 9, 7, 8, 5 give 9, 7, 7, 5.
        return list(accumulate((t.cost for t in self.trials), min))

    @property
    def failures(self) -> tuple[Trial, ...]:
        """Trials that gave no cost."""
        return tuple(t for t in self.trials if not math.isfinite(t.cost))


Steps = Generator[list[Point], list[float], None]
Search = Callable[[Space, np.random.Generator, Sequence[Point]], Steps]
"""(space, rng, points worth trying first) -> batches of points, which are answered by costs."""
IDLE_BATCHES = 200
"""A search that proposes so many batches without a new candidate has come to its end."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Where a search starts, who measures its candidates, and what ends it before its budget.

    A candidate longer than `trial_limit_s` fails. With `early_stop`, one whose certified bound
    (`measure.bound`) exceeds that many times the best cost is not built: its bound is its cost.
    `known` are trials of an earlier run, answered without measuring. The search ends as soon as its
    trials say `is_proven` (nothing better is left), or after `patience` trials without a gain.
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
class _Driven:
    """One run: its space and its rules, the trials so far, and the costs by candidate."""

    space: Space
    measure: Measure
    budget: int
    rules: Rules
    workers: Workers
    deadline: Deadline
    trials: list[Trial] = field(default_factory=list)
    costs: dict[Hashable, float] = field(default_factory=dict)

    def loop(self, steps: Steps) -> str:
        """Have batches proposed and measured until the search ends, and return what ended it."""
        is_proven = self.rules.is_proven
        patience = self.rules.patience
        idle = 0
        answers = None
        while True:
            try:
                batch = next(steps) if answers is None else steps.send(answers)
            except StopIteration:
                return "exhausted"
            if len(self.trials) >= self.budget:
                return "budget"
            if self.deadline.over:
                return "time"
            # A search may propose a candidate twice, as annealing does on its way back: only new
            # ones count.
            untried = self.fresh(batch)
            idle = 0 if untried else idle + 1
            if idle > IDLE_BATCHES:
                return "exhausted"
            self.tell(untried)
            if untried and is_proven and is_proven(self.trials):
                return "proven"
            if patience and len(self.trials) - self.best_at > patience:
                return "idle"
            costs = [self.costs.get(self.space.key(p)) for p in batch]
            answers = [cost for cost in costs if cost is not None]
            # With 6 of the budget spent and 8 allowed, a batch of 4 is answered for 2 points only.
            if len(answers) < len(batch):  # the budget cut the batch: no search gets half an answer
                return "budget"

    @property
    def best_at(self) -> int:
        """The number of the first trial that cost least."""
        return min(range(len(self.trials)), key=lambda i: self.trials[i].cost, default=0)

    def fresh(self, batch: Sequence[Point]) -> dict[Hashable, Point]:
        """Return the candidates of a batch that are new, at most as many as the budget allows."""
        candidates: dict[Hashable, Point] = {}
        for point in batch:
            key = self.space.key(point)
            if key not in self.costs:
                candidates.setdefault(key, point)
        return dict(list(candidates.items())[: self.budget - len(self.trials)])

    def tell(self, untried: Mapping[Hashable, Point]) -> None:
        """Measure new candidates and add their trials in order, each as soon as it is known."""
        answers = self.hopeless(untried)
        known = self.rules.known
        answers |= {k: known[p] for k, p in untried.items() if k not in answers and p in known}
        unanswered = [k for k in untried if k not in answers]
        # Answers come in any order from many processes, trials in the order of the batch: the
        # answer of the third candidate waits here until the first two are known.
        waiting = list(untried)

        def add() -> None:
            while waiting and waiting[0] in answers:
                key = waiting.pop(0)
                cost, note = answers[key]
                self.costs[key] = cost
                self.trials.append(Trial(len(self.trials), untried[key], cost, note))
                if self.rules.on_trial:
                    self.rules.on_trial(self.trials[-1])

        def on_answer(place: int, cost: float, note: str) -> None:
            if math.isfinite(cost) or not self.deadline.over:
                answers[unanswered[place]] = cost, note
                add()
            if self.deadline.over:
                raise TimeUpError

        add()
        left_s = self.deadline.left_s
        limits_s = [
            s for s in (self.rules.trial_limit_s, left_s) if s is not None and math.isfinite(s)
        ]
        self.workers.run(
            self.measure, [untried[k] for k in unanswered], min(limits_s, default=None), on_answer
        )

    def hopeless(self, untried: Mapping[Hashable, Point]) -> dict[Hashable, tuple[float, str]]:
        """Return the candidates whose bound says to stop early, with the bound as their cost."""
        bound = getattr(self.measure, "bound", None)
        best = min(self.costs.values(), default=math.inf)
        early_stop = self.rules.early_stop
        if not early_stop or bound is None or not math.isfinite(best):
            return {}
        bounds = {key: float(bound(point)) for key, point in untried.items()}
        # With early_stop 4 and a best of 1,000 cycles, a kernel that needs 4,001 at least is not
        # written.
        limit = best * early_stop
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
    """Return the trace of a search with at most `budget` unique candidates.

    Ctrl-C ends the search and keeps its trials. A candidate that the time limit cuts off is not a
    trial. Raises `WorkersLostError`.
    """
    workers = rules.workers
    if not isinstance(workers, Workers):
        workers = Workers(executor=workers)
    deadline = Deadline.of(rules.time_limit_s)
    run = _Driven(space, measure, budget, rules, workers, deadline)
    steps = search(space, np.random.default_rng(seed), rules.start)
    try:
        end = run.loop(steps)
    except WorkersLostError:
        if not deadline.over:
            raise
        end = "time"
    except TimeUpError:
        end = "time"
    except KeyboardInterrupt:
        end = "interrupted"
    # The generator may still wait for the answer to its last batch.
    steps.close()
    return Trace(space.names, tuple(run.trials), end, seed)


# -- on a recorded space ---------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Replay:
    """Results of one search on a recorded space with several seeds; infinite if nothing ran."""

    optimum: float
    best_per_seed: tuple[float, ...]
    evaluations_per_seed: tuple[int, ...]

    @property
    def median_ratio(self) -> float:
        """Median over seeds of best found / optimum."""
        return float(np.median(self.best_per_seed)) / self.optimum

    def share_within(self, gap: float) -> float:
        """Return the share of seeds whose best is at most `gap` above the optimum."""
        return float(np.mean(np.array(self.best_per_seed) <= (1 + gap) * self.optimum))


def replay(space: RecordedSpace, search: Search, budget: int, seeds: Iterable[int]) -> Replay:
    """Return what a search finds with `budget` trials, once per seed."""
    traces = []
    for seed in seeds:
        traces.append(drive(search, space.space, space, budget, seed=seed))
        if traces[-1].end == "interrupted":
            raise KeyboardInterrupt
    # Failed trials cost infinity: a seed that found nothing has an infinite best.
    best = tuple(min(t.cost for t in trace.trials) for trace in traces)
    return Replay(space.optimum, best, tuple(len(trace.trials) for trace in traces))
