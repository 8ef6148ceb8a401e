"""Tunes one operator: searches its schedules, checks the best one, bounds the possible gain.

The result is the fastest candidate that computes the same values as the default schedule, and a
lower bound: no schedule of the space takes fewer cycles. A kernel of 1,050 cycles with a bound of
1,000 is at most 5 % above the optimum. If the time equals the bound, or if the whole space was
searched, the schedule is proven optimal.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np

from ascend_lab.aoe.cube import START_COUNT, CubeJob, JointJob, ProductJob, prove
from ascend_lab.aoe.drive import NO_RULES, Rules, Search, Settings, Steps, Trace, Trial, drive
from ascend_lab.aoe.operators import Tunable, difference_of
from ascend_lab.aoe.search import search_named
from ascend_lab.aoe.space import Point, Space, completed
from ascend_lab.aoe.vector import PATIENCE, VectorJob
from ascend_lab.aoe.workers import Deadline, Measure, TimeUpError, attempt
from ascend_lab.compiler.lower import Choice
from ascend_lab.errors import AscendLabError, InputError, UnsupportedError
from ascend_lab.machine.sim import few_collections


class Job(Protocol):
    """An operator to tune, with its space of schedules and a way to measure them."""

    @property
    def operator(self) -> Tunable:
        """The operator to tune."""

    @property
    def space(self) -> Space:
        """The legal schedules of the operator."""

    @property
    def measure(self) -> Measure:
        """A function from a point of the space to the cycles of its kernel, launch included.

        At the start the simulated L2 holds the same tensors as in the network.
        """

    @property
    def search(self) -> str:
        """Name of the search that suits the space, for example "genetic"."""

    def choice(self, point: Point) -> Choice:
        """Return a point as the `Choice` that lowering takes."""

    def start(self) -> Sequence[Point]:
        """Return points worth trying first, the default among them if it is in the space."""

    def points(self, choices: Sequence[Choice]) -> list[Point]:
        """Return the points closest to choices that were good for other shapes."""

    def bound(self, trials: Sequence[Trial]) -> tuple[int, bool]:
        """Return a lower bound on the cycles of every schedule, and whether the best is optimal."""


_JOBS: Mapping[str, Callable[[Tunable], Job]] = {
    "vector": VectorJob,
    "cube": CubeJob,
    "product": ProductJob,
    "joint": JointJob,
}


def job_of(operator: Tunable) -> Job:
    """Return the job of an operator; raise `UnsupportedError` with the reason if it has none."""
    if operator.unit not in _JOBS:
        raise UnsupportedError("an operator with a schedule", operator.op, operator.reason)
    return _JOBS[operator.unit](operator)


NOT_REACHED = "not reached in the time limit"
NOT_CHECKED = "no time was left to check the values of a faster candidate"
CERTAINTIES = ("proven optimal", "bounded", "without parameters", "not reached", "not tuned")
"""How certain it is that a kernel's time is optimal, the most certain first.

"without parameters": the kernel has no schedule to choose. "not reached": the time limit or Ctrl-C
came first. "not tuned": nobody asked for it, or its space could not be built.
"""
ReportProgress = Callable[[str, int, int], None]
"""Receives progress as (stage, done, total), for example ("proof", 12, 200)."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of tuning one operator.

    `choice` is None if the default schedule stays. `bound_cycles` is a lower bound for every
    schedule of the space; `proven` says that none is faster than this one. `source` is "tuned",
    "custom" or "builtin" (found in one of the banks), or "none" (not tuned, for the reason in
    `note`). `spent_s` is how long tuning took.
    """

    operator: Tunable
    choice: Choice | None
    before_cycles: int
    after_cycles: int
    bound_cycles: int | None = None
    proven: bool = False
    source: str = "tuned"
    note: str = ""
    search: str = ""
    trace: Trace | None = None
    spent_s: float = field(default=0.0, compare=False)

    @property
    def gap(self) -> float | None:
        """How far the result is above the bound, after / bound - 1; None without a bound."""
        return self.after_cycles / self.bound_cycles - 1.0 if self.bound_cycles else None

    @property
    def gain(self) -> float:
        """Improvement as the published reports print it: (before - after) / after."""
        return (self.before_cycles - self.after_cycles) / self.after_cycles

    @property
    def trials(self) -> int:
        """Number of different candidates that were tried."""
        return len(self.trace.trials) if self.trace else 0

    @property
    def certainty(self) -> str:
        """How certain it is that the kernel's time is optimal: one of `CERTAINTIES`."""
        # The first condition that holds decides: a proven result has a bound as well.
        if self.proven:
            return "proven optimal"
        if self.bound_cycles is not None:
            return "bounded"
        if not self.operator.unit:
            return "without parameters"
        if self.note in (NOT_REACHED, NOT_CHECKED, "interrupted"):
            return "not reached"
        return "not tuned"


def time_shares_permille(results: Sequence[Result]) -> dict[str, int]:
    """Return the share of the time that belongs to each certainty, in thousandths of the total.

    The shares add up to 1000; the largest absorbs the rounding: thirds become 334, 333 and 333.
    """
    cycles = dict.fromkeys(CERTAINTIES, 0)
    for result in results:
        cycles[result.certainty] += result.operator.count * result.after_cycles
    total = sum(cycles.values())
    if not total:
        return {}
    shares_permille = {
        certainty: round(1000 * certainty_cycles / total)
        for certainty, certainty_cycles in cycles.items()
    }
    largest = max(cycles, key=lambda certainty: cycles[certainty])
    # 333 + 333 + 333 = 999: the missing one goes to the largest.
    shares_permille[largest] += 1000 - sum(shares_permille.values())
    return shares_permille


def untuned(operator: Tunable, note: str) -> Result:
    """Return the result of an operator that keeps its default."""
    cycles = operator.default_cycles
    return Result(operator, None, cycles, cycles, source="none", note=note)


@few_collections()
def tune_operator(
    operator: Tunable,
    settings: Settings | None = None,
    *,
    rules: Rules = NO_RULES,
    deadline: Deadline | None = None,
    hints: Sequence[Choice] = (),
    report: ReportProgress = lambda stage, done, total: None,
) -> Result:
    """Search the schedules of an operator; its default stays if no candidate is faster.

    Of the `rules`, the caller sets `workers`, `known`, `on_trial` and `time_limit_s`, which limits
    search and proof; the other rules follow from the operator and the settings. The `deadline` also
    limits the check of the best candidate's values: an unchecked candidate is not used. `hints` are
    schedules that were good for similar shapes and are tried first. `report` receives the progress
    of proof and check. An operator without a space keeps its default; the note of the result says
    why. Raises `InputError` for an unknown search.
    """
    settings = settings or Settings()
    started = time.monotonic()
    deadline = deadline or Deadline()
    search_deadline = deadline.within(rules.time_limit_s)
    try:
        with deadline.cut():
            job = job_of(operator)
            start = [*job.start(), *job.points(hints)]
    except AscendLabError as error:
        return untuned(operator, str(error))
    except TimeUpError:
        return untuned(operator, NOT_REACHED)
    deadlines = _Deadlines(search=search_deadline, run=deadline)
    trace = _search_trace(job, start, settings, rules, deadlines)
    searched = _with_proof(job, trace, settings, deadlines, report)
    result = _result(job, searched, settings, deadline, report)
    spent_s = time.monotonic() - started
    return replace(result, search=settings.search or job.search, spent_s=spent_s)


class _Deadlines(NamedTuple):
    """When search and proof have to stop by themselves, and when the whole run is cut off."""

    search: Deadline
    run: Deadline


class _Searched(NamedTuple):
    """The trials of a search and of its proof, and a lower bound; `proven`: it was reached."""

    trace: Trace
    bound_cycles: int
    proven: bool


def _search_trace(
    job: Job, start: Sequence[Point], settings: Settings, rules: Rules, deadlines: _Deadlines
) -> Trace:
    """Run the search that the user named, or the default search for the type of operator."""
    has_default_search = not settings.search
    return drive(
        _search(settings.search or job.search, job, settings),
        job.space,
        job.measure,
        settings.budget,
        seed=settings.seed,
        rules=replace(
            rules,
            start=start,
            time_limit_s=deadlines.search.limit_s,
            trial_limit_s=settings.trial_limit_s,
            early_stop=settings.early_stop,
            is_proven=lambda trials: job.bound(trials)[1],
            patience=PATIENCE if isinstance(job, VectorJob) and has_default_search else None,
        ),
    )


def _search(name: str, job: Job, settings: Settings) -> Search:
    """Return the named search; the default search of the cube first times the likeliest tilings."""
    search = search_named(name)
    if isinstance(job, CubeJob) and not settings.search:
        return _likely_first(job, search, settings.budget)
    return search


def _likely_first(job: CubeJob, search: Search, budget: int) -> Search:
    """Return a search that times every point whose lower bound is below the best time so far.

    When none is left, the best point is proven optimal. It begins with the start points. If more
    such points exist than the budget allows, `search` takes over.
    """

    def steps(space: Space, rng: np.random.Generator, start: Sequence[Point]) -> Steps:
        costs: dict[Point, float] = {}
        batch = list(dict.fromkeys(completed(space, point) for point in start))
        while batch:
            costs |= zip(batch, (yield batch), strict=True)
            candidates = job.may_be_quickest(costs)
            if len(costs) + len(candidates) > budget:
                yield from search(space, rng, start)
                return
            # A few at a time, because every better time excludes more of the remaining tilings.
            batch = candidates[:START_COUNT]

    return steps


def _with_proof(
    job: Job, trace: Trace, settings: Settings, deadlines: _Deadlines, report: ReportProgress
) -> _Searched:
    """Return the bound after a search; for the cube, branch and bound may then prove the result.

    It follows the search only if the user named no search of their own or asked for proofs
    (`deeper`), and if no kernel failed that the proof would have to time again.
    """
    bound, proven = job.bound(trace.trials)
    searched = _Searched(trace, bound, proven)
    is_settled = proven or trace.failures or trace.end in ("interrupted", "time")
    may_follow = settings.deeper or not settings.search
    if is_settled or not may_follow or not isinstance(job, CubeJob):
        return searched
    return _branch_and_bound(job, searched, settings, deadlines, report)


def _branch_and_bound(
    job: CubeJob,
    searched: _Searched,
    settings: Settings,
    deadlines: _Deadlines,
    report: ReportProgress,
) -> _Searched:
    """Run branch and bound after a search; return the trials of both, and the new bound.

    Unless `deeper` is set, the proof simulates at most `budget` kernels. Ctrl-C, the deadline of
    the run, or a candidate that fails ends the proof; trials and bound then stay as they were.
    """
    trace = searched.trace
    max_kernels = None if settings.deeper else settings.budget
    limit_s = deadlines.search.within(settings.deeper_s if settings.deeper else None).limit_s
    # One kernel of the proof may take no longer than a trial, nor than the whole proof.
    kernel_limits_s = [s for s in (settings.trial_limit_s, limit_s) if s is not None]
    try:
        with deadlines.run.cut():
            proof = prove(
                job.space,
                _measure_once(job, trace, min(kernel_limits_s, default=None)),
                job.bounds,
                most=max_kernels,
                time_limit_s=limit_s,
                report=lambda done, of: report("proof", done, of),
            )
    except KeyboardInterrupt:
        return _Searched(replace(trace, end="interrupted"), searched.bound_cycles, False)
    except (AscendLabError, TimeUpError):
        return _Searched(trace, searched.bound_cycles, False)
    if proof.point not in {t.point for t in trace.trials}:
        proof_trial = Trial(len(trace.trials), proof.point, proof.cycles, "branch and bound")
        trace = replace(trace, trials=(*trace.trials, proof_trial))
    # The space has no schedules that divide K among cores. A proof about the space does not cover
    # them, so that their separate lower bound limits the result.
    lower_bound = min(proof.lower_bound, job.divided_k_bound)
    return _Searched(trace, int(lower_bound), proof.cycles <= lower_bound)


def _measure_once(job: CubeJob, trace: Trace, limit_s: float | None) -> Measure:
    """Return a measure that takes the costs of earlier trials; a failure raises `InputError`."""
    # Trials with a note failed or were stopped early: their cost is no time.
    costs = {t.point: t.cost for t in trace.trials if not t.note}

    def measure(point: Point) -> float:
        if point not in costs:
            costs[point], note = attempt(job.measure, point, limit_s)
            if note:
                raise InputError("a kernel that can be timed", note)
        return costs[point]

    return measure


def _result(
    job: Job,
    searched: _Searched,
    settings: Settings,
    deadline: Deadline,
    report: ReportProgress,
) -> Result:
    """Return the best trial that beats the default and computes the same values."""
    operator = job.operator
    trace, bound, proven = searched
    note = ""
    cycles = operator.default_cycles
    if trace.end == "time" and not trace.trials:
        return untuned(operator, NOT_REACHED)
    # Candidates are checked from the fastest on; the first with the default's values is the result.
    faster = [trial for trial in trace.trials if trial.cost < operator.default_cycles]
    for trial in sorted(faster, key=lambda t: (t.cost, t.number)):
        choice = job.choice(trial.point)
        report("values", 0, 1)
        try:
            with deadline.cut():
                difference = ""
                if settings.verify:
                    difference = difference_of(operator, choice, settings.seed)
        except TimeUpError:
            return replace(untuned(operator, NOT_CHECKED), trace=trace)
        report("values", 1, 1)
        if not difference:
            tuned_cycles = int(trial.cost)
            return Result(
                operator, choice, cycles, tuned_cycles, bound, proven, note=note, trace=trace
            )
        # The proof was about the faster candidate: it does not hold for the next one.
        note = f"a faster candidate was refused: {difference}"
        proven = False
    # The default belongs to the space as well: a lower bound cannot be above its time.
    bound = min(bound, cycles)
    return Result(operator, None, cycles, cycles, bound, proven, note=note, trace=trace)
