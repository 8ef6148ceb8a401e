"""Run a search: propose, measure, feed back, until the budget is spent; what it did is a trace.

Budgets count unique candidates. A search sees costs in the order it proposed the points, whoever
measured them, so that a seed fixes the result for any number of workers.
"""

import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from ascend_lab.aoe.space import Point, Space
from ascend_lab.aoe.workers import Deadline, Measure, TimeUpError, Workers, WorkersLostError
from ascend_lab.errors import InputError


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
        return min(good, key=lambda t: t.cost)

    @property
    def best_so_far(self) -> list[float]:
        """Least cost after each trial."""
        return list(accumulate((t.cost for t in self.trials), min))

    @property
    def failures(self) -> tuple[Trial, ...]:
        """Trials that gave no cost."""
        return tuple(t for t in self.trials if not math.isfinite(t.cost))

    def as_dict(self) -> Mapping[str, Any]:
        """Return the trace as plain data; failed trials have cost None."""
        rows = [
            {
                "number": t.number,
                "point": dict(zip(self.names, t.point, strict=True)),
                "cost": t.cost if math.isfinite(t.cost) else None,
                "note": t.note,
            }
            for t in self.trials
        ]
        return {"end": self.end, "seed": self.seed, "trials": rows}


Steps = Generator[list[Point], list[float], None]
Search = Callable[[Space, np.random.Generator, Sequence[Point]], Steps]
"""(space, rng, points worth trying first) -> batches of points, which are answered by costs."""
IDLE_BATCHES = 200
"""A search that proposes so many batches without a new candidate has come to its end."""


@dataclass
class _Driven:
    """One run: what it asks of whom and how long, its trials so far, and costs by candidate."""

    space: Space
    measure: Measure
    budget: int
    workers: Workers
    deadline: Deadline
    trial_limit_s: float | None
    early_stop: float | None
    known: Mapping[Point, tuple[float, str]]
    on_trial: Callable[[Trial], None] | None
    patience: int | None = None
    trials: list[Trial] = field(default_factory=list)
    costs: dict[Hashable, float] = field(default_factory=dict)

    def loop(self, steps: Steps, is_proven: Callable[[Sequence[Trial]], bool] | None) -> str:
        """Have batches proposed and measured to the end, and return why it came."""
        idle, answers = 0, None
        while True:
            try:
                batch = next(steps) if answers is None else steps.send(answers)
            except StopIteration:
                return "exhausted"
            if len(self.trials) >= self.budget:
                return "budget"
            if self.deadline.over:
                return "time"
            new = self.fresh(batch)
            idle = 0 if new else idle + 1
            if idle > IDLE_BATCHES:
                return "exhausted"
            self.tell(new)
            if new and is_proven and is_proven(self.trials):
                return "proven"
            if self.patience and len(self.trials) - self.best_at > self.patience:
                return "idle"
            costs = [self.costs.get(self.space.key(p)) for p in batch]
            answers = [cost for cost in costs if cost is not None]
            if len(answers) < len(batch):  # the budget cut the batch: no search hears of half of it
                return "budget"

    @property
    def best_at(self) -> int:
        """The number of the first trial that cost least."""
        return min(range(len(self.trials)), key=lambda i: self.trials[i].cost, default=0)

    def fresh(self, batch: Sequence[Point]) -> dict[Hashable, Point]:
        """Return the candidates of a batch not tried before, as far as the budget reaches."""
        found: dict[Hashable, Point] = {}
        for point in batch:
            key = self.space.key(point)
            if key not in self.costs:
                found.setdefault(key, point)
        return dict(list(found.items())[: self.budget - len(self.trials)])

    def tell(self, new: Mapping[Hashable, Point]) -> None:
        """Measure new candidates and add their trials in order, each as soon as it is known."""
        answers = self.hopeless(new)
        answers.update({k: self.known[p] for k, p in new.items()
                        if k not in answers and p in self.known})  # fmt: skip
        todo, waiting = [k for k in new if k not in answers], list(new)

        def add() -> None:
            while waiting and waiting[0] in answers:
                key = waiting.pop(0)
                cost, note = answers[key]
                self.costs[key] = cost
                self.trials.append(Trial(len(self.trials), new[key], cost, note))
                if self.on_trial:
                    self.on_trial(self.trials[-1])

        def told(place: int, cost: float, note: str) -> None:
            if math.isfinite(cost) or not self.deadline.over:
                answers[todo[place]] = cost, note
                add()
            if self.deadline.over:
                raise TimeUpError

        add()
        left_s = self.deadline.left_s
        limits_s = [s for s in (self.trial_limit_s, left_s) if s is not None and math.isfinite(s)]
        self.workers.run(self.measure, [new[k] for k in todo], min(limits_s, default=None), told)

    def hopeless(self, new: Mapping[Hashable, Point]) -> dict[Hashable, tuple[float, str]]:
        """Return the candidates whose bound says to stop early, with the bound as their cost."""
        bound, best = (
            getattr(self.measure, "bound", None),
            min(self.costs.values(), default=math.inf),
        )
        if not self.early_stop or bound is None or not math.isfinite(best):
            return {}
        bounds = {key: float(bound(point)) for key, point in new.items()}
        most = best * self.early_stop
        return {key: (low, "stopped early") for key, low in bounds.items() if low > most}


def drive(
    search: Search,
    space: Space,
    measure: Measure,
    budget: int,
    *,
    seed: int = 0,
    start: Sequence[Point] = (),
    executor: Executor | Workers | None = None,
    time_limit_s: float | None = None,
    trial_limit_s: float | None = None,
    early_stop: float | None = None,
    known: Mapping[Point, tuple[float, str]] | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    is_proven: Callable[[Sequence[Trial]], bool] | None = None,
    patience: int | None = None,
) -> Trace:
    """Return the trace of a search with at most `budget` unique candidates.

    A candidate longer than `trial_limit_s` fails. With `early_stop`, one whose certified bound
    (`measure.bound`) exceeds that many times the best is not built: its bound is its cost. `known`
    are attempts of an earlier run, answered without measuring. The run ends as soon as the trials
    say `is_proven`: nothing better is left, or after `patience` trials without a gain. Ctrl-C keeps
    what was found; candidates that the end of the time cuts off are no trials. Raises
    `WorkersLostError`.
    """
    workers = executor if isinstance(executor, Workers) else Workers(executor=executor)
    deadline = Deadline.of(time_limit_s)
    limits = deadline, trial_limit_s, early_stop
    run = _Driven(space, measure, budget, workers, *limits, known or {}, on_trial, patience)
    steps = search(space, np.random.default_rng(seed), start)
    try:
        end = run.loop(steps, is_proven)
    except WorkersLostError:
        if not deadline.over:
            raise
        end = "time"
    except TimeUpError:
        end = "time"
    except KeyboardInterrupt:
        end = "interrupted"
    steps.close()
    return Trace(space.names, tuple(run.trials), end, seed)
