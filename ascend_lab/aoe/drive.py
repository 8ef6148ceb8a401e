"""Run a search: propose, measure, feed back, until the budget is spent.

Budgets count unique candidates. A search sees costs in the order it proposed the points, whoever
measured them, so that a seed fixes the result for any number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.aoe.clock import Deadline, TimeUpError
from ascend_lab.aoe.space import Point, Space
from ascend_lab.aoe.trace import Trace, Trial
from ascend_lab.aoe.workers import Measure, Workers, WorkersLostError

Steps = Generator[list[Point], list[float], None]
Search = Callable[[Space, np.random.Generator, Sequence[Point]], Steps]
"""(space, rng, points worth trying first) -> batches of points, which are answered by costs."""
IDLE_BATCHES = 200
"""A search that proposes so many batches without a new candidate has come to its end."""


@dataclass
class _Run:
    """The state of one run: trials so far, and costs by candidate."""

    space: Space
    budget: int
    trials: list[Trial] = field(default_factory=list)
    costs: dict[Hashable, float] = field(default_factory=dict)

    def fresh(self, batch: Sequence[Point]) -> dict[Hashable, Point]:
        """Return the candidates of a batch not tried before, as far as the budget reaches."""
        found: dict[Hashable, Point] = {}
        for point in batch:
            key = self.space.key(point)
            if key not in self.costs:
                found.setdefault(key, point)
        keep = self.budget - len(self.trials)
        return dict(list(found.items())[:keep])

    def add(self, key: Hashable, point: Point, cost: float, note: str) -> Trial:
        self.costs[key] = cost
        self.trials.append(Trial(len(self.trials), point, cost, note))
        return self.trials[-1]


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
) -> Trace:
    """Return the trace of a search with at most `budget` unique candidates.

    A candidate longer than `trial_limit_s` fails. With `early_stop`, one whose certified bound
    (`measure.bound`) exceeds that many times the best is not built: its bound is its cost. `known`
    are attempts of an earlier run, answered without measuring. The run ends as soon as the trials
    say `is_proven`: nothing better is left. Ctrl-C keeps what was found; candidates that the end of
    the time cuts off are no trials. Raises `WorkersLostError`.
    """
    workers = executor if isinstance(executor, Workers) else Workers(executor=executor)
    run = _Run(space, budget)
    deadline = Deadline.of(time_limit_s)
    steps = search(space, np.random.default_rng(seed), start)
    known = known or {}

    def tell(new: Mapping[Hashable, Point]) -> None:
        limits = trial_limit_s, deadline
        _measure(run, new, measure, workers, limits, early_stop, known, on_trial)

    try:
        end = _loop(run, steps, tell, deadline, is_proven)
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


def _loop(
    run: _Run,
    steps: Steps,
    tell: Callable[[Mapping[Hashable, Point]], None],
    deadline: Deadline,
    is_proven: Callable[[Sequence[Trial]], bool] | None,
) -> str:
    """Have batches proposed and measured to the end, and return why it came."""
    idle, answers = 0, None
    while True:
        try:
            batch = next(steps) if answers is None else steps.send(answers)
        except StopIteration:
            return "exhausted"
        if len(run.trials) >= run.budget:
            return "budget"
        if deadline.over:
            return "time"
        new = run.fresh(batch)
        idle = 0 if new else idle + 1
        if idle > IDLE_BATCHES:
            return "exhausted"
        tell(new)
        if new and is_proven and is_proven(run.trials):
            return "proven"
        costs = [run.costs.get(run.space.key(p)) for p in batch]
        answers = [cost for cost in costs if cost is not None]
        if len(answers) < len(batch):  # the budget cut the batch: no search hears of half of one
            return "budget"


def _measure(
    run: _Run,
    new: Mapping[Hashable, Point],
    measure: Measure,
    workers: Workers,
    limits: tuple[float | None, Deadline],
    early_stop: float | None,
    known: Mapping[Point, tuple[float, str]],
    on_trial: Callable[[Trial], None] | None,
) -> None:
    """Measure new candidates and add their trials in order, each as soon as it is known.

    `limits`: seconds of a candidate, and the end of all.
    """
    deadline = limits[1]
    left_s = [s for s in (limits[0], deadline.left_s) if s is not None and math.isfinite(s)]
    best = min(run.costs.values(), default=math.inf)
    answers = _hopeless(new, measure, best * early_stop) if early_stop else {}
    answers.update({k: known[p] for k, p in new.items() if k not in answers and p in known})
    todo, waiting = [k for k in new if k not in answers], list(new)

    def add() -> None:
        while waiting and waiting[0] in answers:
            key = waiting.pop(0)
            trial = run.add(key, new[key], *answers[key])
            if on_trial:
                on_trial(trial)

    def told(place: int, cost: float, note: str) -> None:
        if math.isfinite(cost) or not deadline.over:
            answers[todo[place]] = cost, note
            add()
        if deadline.over:
            raise TimeUpError

    add()
    workers.run(measure, [new[k] for k in todo], min(left_s, default=None), told)


def _hopeless(
    new: Mapping[Hashable, Point], measure: Measure, most: float
) -> dict[Hashable, tuple[float, str]]:
    """Return the candidates whose certified bound exceeds `most`, with the bound as their cost."""
    bound = getattr(measure, "bound", None)
    if bound is None or not math.isfinite(most):
        return {}
    bounds = {key: float(bound(point)) for key, point in new.items()}
    return {key: (low, "stopped early") for key, low in bounds.items() if low > most}
