"""The whole loop: a model, a chip and jobs in; a tuned network out, and the bounds it is held to.

Job 1 slices the graph for L2, from the bank or by search; job 2 takes every distinct operator from
the bank or by search, then all together. With both, slices come first, because the shapes of
operators are only final after slicing.

Time is shared by the operators in proportion to what they can still gain: count x (cycles - bound).
Operators are tuned alone; the network decides: a schedule that makes it slower is not taken.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ascend_lab.aoe.bank import MODEL_VERSION, Knowledge, Outcome, settle
from ascend_lab.aoe.drive import OVERALL, Progress, Rules, Settings, Trial, jobs_of
from ascend_lab.aoe.entries import entry_of, from_bank, key_of, suggestions
from ascend_lab.aoe.operators import Tunable, operators_of
from ascend_lab.aoe.subgraph import SlicePlan, SubgraphResult, slice_network
from ascend_lab.aoe.tuning import NOT_REACHED, Result, job_of, tune_operator, untuned
from ascend_lab.aoe.workers import Deadline, TimeUpError, Workers, workers_of
from ascend_lab.compiler import Compiled, Graph, NetworkTimeline, bound_of, ledger, simulate_graph
from ascend_lab.compiler.compile import Front, Road, finish_stages, front_stages
from ascend_lab.compiler.tasks import with_choices
from ascend_lab.errors import AscendLabError
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.sim import few_collections

TAIL = 0.5
"""Share of the seconds of the first compile that is kept for the last ones, and for saving."""
SLICES = 0.9
"""Share of a limited time that slices may take before operators are tuned: they gain more."""
Chosen = Callable[[Tunable], bool]
"""Tells whether the user wants an operator tuned."""
LEAST_S = 1.0
"""Seconds of a limited time that the search of an operator gets at least."""
CHECK_S = 40e-6
"""Assumed seconds to check the values of a kernel, per instruction it executes."""
_LATE = "reading and compiling took the time limit of {:g} s: nothing was tuned"


@dataclass(frozen=True, slots=True)
class NetworkResult:
    """A network before and after operator tuning; `outcomes` tell what became of the bank."""

    compiled: Compiled
    before_s: float
    after_s: float
    results: tuple[Result, ...]
    outcomes: tuple[Outcome, ...]
    interrupted: bool = False

    @property
    def gain(self) -> float:
        """Improvement, (before - after) / after."""
        return (self.before_s - self.after_s) / self.after_s if self.after_s else 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """How a tuning run is carried out, whatever it tunes.

    `executor` measures candidates: "serial", "processes:N", "dask:ADDRESS", or workers that are
    already open. `dtype` is the number format of the network. `chosen` tells which operators to
    tune, all by default. The run has to end by the `deadline`, or else within the settings' time
    limit from now on.
    """

    executor: Workers | str = "serial"
    dtype: str = "fp16"
    chosen: Chosen | None = None
    progress: Progress = lambda label, done, total, best: None
    deadline: Deadline | None = None

    @contextmanager
    def opened(self, settings: Settings) -> Iterator[tuple[Workers, Deadline]]:
        """Yield the workers, closed afterwards if they are opened here, and the deadline."""
        deadline = self.deadline or Deadline.of(settings.time_limit_s)
        # Whoever opened the workers closes them: a second network may use them next.
        if isinstance(self.executor, Workers):
            yield self.executor, deadline
            return
        with workers_of(self.executor) as workers:
            yield workers, deadline


NO_SESSION = Session()


class Ledgers(NamedTuple):
    """Where the seconds of a network go (see `compiler.ledger`), before and after tuning."""

    before: Mapping[str, float]
    after: Mapping[str, float]


NO_LEDGERS = Ledgers({}, {})


@dataclass(frozen=True, slots=True)
class Tuning:
    """A tuned network: the result of each job, and the times before and after (of the model).

    `bound_s`: no slicing and no schedule is faster. `outcomes`: what became of the bank's entry for
    the slicing. `warnings` are the bank's.
    """

    graph: Graph
    compiled: Compiled
    jobs: tuple[str, ...]
    subgraph: SubgraphResult | None
    operators: NetworkResult | None
    baseline_s: float
    result_s: float
    bound_s: float
    spent_s: float
    outcomes: tuple[Outcome, ...] = ()
    warnings: tuple[str, ...] = ()
    ledgers: Ledgers = NO_LEDGERS

    @property
    def interrupted(self) -> bool:
        """Whether the user stopped it."""
        return any(job is not None and job.interrupted for job in (self.subgraph, self.operators))

    @property
    def gain(self) -> float:
        """Improvement as the published reports print it: (before - after) / after."""
        return (self.baseline_s - self.result_s) / self.result_s if self.result_s else 0.0

    @property
    def gap(self) -> float:
        """How far above the bound the result is: after / bound - 1."""
        return self.result_s / self.bound_s - 1.0 if self.bound_s else 0.0


@few_collections()
def tune(
    graph: Graph,
    chip: Chip | str,
    job: str = "2",
    *,
    settings: Settings | None = None,
    bank: Knowledge | str | Path | None = None,
    session: Session = NO_SESSION,
) -> Tuning:
    """Tune a graph for a chip; Ctrl-C and the time limit keep the best results so far.

    The network is compiled as it is even if that takes longer than the limit.

    `job`: "1" subgraph, "2" operator, "1,2" both. `bank`: the custom bank's file; without one
    results are not stored, but the built-in bank is used. Raises as `compile_stages`, and
    `InputError` for unknown jobs or executors.
    """
    jobs = jobs_of(job)
    settings = settings or Settings()
    chip = load_chip(chip) if isinstance(chip, str) else chip
    with ExitStack() as opened_here:
        workers, deadline = opened_here.enter_context(session.opened(settings))
        if not isinstance(bank, Knowledge):
            bank = opened_here.enter_context(Knowledge(bank))
        session = replace(session, executor=workers, deadline=deadline)
        return _Jobs(chip, jobs, settings, bank, session, deadline).tune(graph)


@dataclass(frozen=True, slots=True)
class _Jobs:
    """Everything but the graph."""

    chip: Chip
    jobs: tuple[str, ...]
    settings: Settings
    knowledge: Knowledge
    session: Session
    deadline: Deadline

    def tune(self, graph: Graph) -> Tuning:
        """Run the jobs."""
        started = time.monotonic()
        chip = self.chip
        settings = self.settings
        knowledge = self.knowledge
        front, baseline, baseline_times = self._compiled(graph)
        # what ends a run is done on the same network: it takes less than what began it
        deadline = self.deadline.keeping(TAIL * (time.monotonic() - started))
        # A limit shorter than the first compile leaves nothing to tune with: the network is
        # returned as is.
        late = (_LATE.format(settings.time_limit_s),) if deadline.over else ()
        compiled = baseline
        sliced = None
        operators = None
        outcome = None
        if "1" in self.jobs:
            shares_time = "2" in self.jobs and not math.isinf(deadline.end)
            slicing_deadline = (
                deadline.within(SLICES * deadline.left_s) if shares_time else deadline
            )
            sliced, outcome = slice_network(
                front, chip, settings, knowledge, self.session.progress, slicing_deadline
            )
            # The empty plan is the network as it was compiled already: nothing to compile again.
            if sliced.plan != SlicePlan():
                graph = sliced.graph if sliced.plan.regions else graph
                compiled = sliced.compiled
        if "2" in self.jobs and not (sliced and sliced.interrupted):
            operators = tune_network(
                compiled, settings, knowledge, session=replace(self.session, deadline=deadline)
            )
            compiled = operators.compiled
        result_times = simulate_graph(compiled)
        # The bound is that of the network before slicing: it holds for every way to slice it.
        bound = bound_of(front.rewritten, chip)
        return Tuning(
            graph,
            compiled,
            self.jobs,
            sliced,
            operators,
            baseline_times.time_s,
            result_times.time_s,
            bound.time_s,
            time.monotonic() - started,
            (outcome,) if outcome else (),
            (*knowledge.warnings, *late),
            Ledgers(ledger(baseline_times, bound), ledger(result_times, bound)),
        )

    def _compiled(self, graph: Graph) -> tuple[Front, Compiled, NetworkTimeline]:
        """Return the network as it is and its times."""
        progress = self.session.progress
        progress(OVERALL, 0, 3, "")
        progress("compile", 0, 3, "")
        front = front_stages(graph, self.chip, Road(dtype=self.session.dtype))
        progress("compile", 1, 3, "")
        baseline = finish_stages(front, self.chip).compiled
        progress("compile", 2, 3, "")
        times = simulate_graph(baseline)
        progress("compile", 3, 3, "")
        progress(OVERALL, 1, 3, "")
        return front, baseline, times


# -- job 2, a whole network -----------------------------------------------------------------------
@few_collections()
def tune_network(
    compiled: Compiled,
    settings: Settings | None = None,
    knowledge: Knowledge | None = None,
    *,
    session: Session = NO_SESSION,
) -> NetworkResult:
    """Tune the operators of a compiled network; Ctrl-C and the deadline keep the results so far.

    Operators that the deadline leaves out keep their defaults, and their results say so.
    """
    settings = settings or Settings()
    knowledge = knowledge or Knowledge(None, None)
    operators = operators_of(compiled)
    is_chosen = session.chosen or (lambda operator: True)
    chosen = [op for op in operators if op.unit and is_chosen(op)]
    refused = {op.name: op.reason or "not asked for" for op in operators if op not in chosen}
    sizes = {t.piece.key: t.lowered.kernel.event_count for t in compiled.tasks if t.lowered}
    with session.opened(settings) as (workers, deadline):
        run = _Operators(settings, knowledge, workers, session.progress, deadline)
        try:
            run.tune(chosen, sizes)
        except KeyboardInterrupt:  # between two searches; those that ended are kept
            run.interrupted = True
    # What has no result was chosen and not tuned, or was never to be tuned: the note says which.
    missed = "interrupted" if run.interrupted else NOT_REACHED
    results = [
        run.results.get(op.name) or untuned(op, refused.get(op.name, missed)) for op in operators
    ]
    before_s = simulate_graph(compiled).time_s
    tuned, after_s, kept = together(compiled, results, before_s)
    return NetworkResult(tuned, before_s, after_s, kept, tuple(run.outcomes), run.interrupted)


@dataclass
class _Operators:
    """The operators of one network, with the results so far."""

    settings: Settings
    knowledge: Knowledge
    workers: Workers
    progress: Progress
    deadline: Deadline

    def __post_init__(self) -> None:
        self.results: dict[str, Result] = {}
        self.outcomes: list[Outcome] = []
        self.interrupted = False

    def tune(self, operators: Sequence[Tunable], sizes: Mapping[str, int]) -> None:
        """Take each from the bank or search, the one with most to gain first.

        `sizes` are instructions of the default kernels by piece. With a limited time, an operator
        whose values could not be checked in it is left out.
        """
        limited = math.isfinite(self.deadline.end)
        try:
            with self.deadline.cut():
                unknown = [op for op in operators if not self._known(op)]
                missing = []
                for number, operator in enumerate(unknown, 1):
                    gain = estimated(operator) if limited else potential(operator)
                    missing.append((operator, gain))
                    self.progress("bounds", number, len(unknown), "")
        except TimeUpError:
            return
        # The one with most to gain first: if the time ends early, the least is lost.
        missing.sort(key=lambda pair: -pair[1])
        gains = sum(gain for _, gain in missing)
        for number, (operator, gain) in enumerate(missing, 1):
            if self.interrupted or self.deadline.over:
                break
            limit_s = None
            place = f"{number}/{len(missing)}"
            self.progress(OVERALL, number, len(missing) + 2, "")
            if limited:
                left_s = self.deadline.left_s
                # Of 10 s left, an operator with 3 of 4 ms still to gain gets 7.5 s. What it does
                # not use is shared by the next ones, because `left_s` is measured anew each time.
                share = gain / gains if gains else 1.0
                # The check runs two kernels, the tuned one and at most the default, of about as
                # many instructions.
                check_s = 2 * CHECK_S * sizes.get(operator.piece.key, 0)
                limit_s = min(max(left_s * share, LEAST_S), left_s - check_s)
            gains -= gain
            if limit_s is None or limit_s > 0:
                self._search(operator, limit_s, place)

    def _known(self, operator: Tunable) -> bool:
        """Take an operator from the bank if that is what the settings ask for."""
        match = None if self.settings.repeat else self.knowledge.find(key_of(operator))
        if match is None or (self.settings.deeper and not match[0].proven):
            return False
        if self.knowledge.trials(self._run_id(operator)):  # an interrupted run goes on
            return False
        self.results[operator.name] = from_bank(operator, *match)
        self.outcomes.append("hit")
        return True

    def _run_id(self, operator: Tunable) -> str:
        return f"{key_of(operator).digest} {MODEL_VERSION} {self.settings}"

    def _search(self, operator: Tunable, limit_s: float | None, place: str) -> None:
        run_id = self._run_id(operator)
        earlier = {t.point: (t.cost, t.note) for t in self.knowledge.trials(run_id)}
        label = f"{place} {operator.op}"

        def on_trial(trial: Trial) -> None:
            if trial.point not in earlier:
                self.knowledge.save_trials(run_id, (trial,))
            self.progress(label, trial.number + 1, self.settings.budget, f"{trial.cost:.0f}")

        result = tune_operator(
            operator,
            self.settings,
            rules=Rules(
                workers=self.workers, time_limit_s=limit_s, known=earlier, on_trial=on_trial
            ),
            deadline=self.deadline,
            hints=suggestions(operator, self.knowledge),
            report=lambda stage, done, total: self.progress(f"{label}, {stage}", done, total, ""),
        )
        self.results[operator.name] = result
        if result.trace is None:
            return
        self.interrupted = result.trace.end == "interrupted"
        # An interrupted search without a gain says nothing about the rest of its space, so the bank
        # must not learn from it that the default is the best.
        worth = result.choice is not None if self.interrupted else result.source == "tuned"
        if worth and len(result.trace.failures) < result.trials:
            self.outcomes.append(settle(self.knowledge, entry_of(result, self.settings)))
            if not self.interrupted:
                self.knowledge.forget_trials(run_id)


def potential(operator: Tunable) -> float:
    """Return the cycles an operator could still gain in the network, at most."""
    try:
        bound, _ = job_of(operator).bound(())
    except AscendLabError:
        return 0.0
    return float(operator.count * max(operator.default_cycles - bound, 0))


def estimated(operator: Tunable) -> float:
    """Return about what `potential` does, without a space: from work, rates and cold operands."""
    chip = operator.chip
    graph = operator.piece.graph
    bound = bound_of(graph, chip)
    cold = sum(graph.types[n].size_bytes for n in graph.inputs if n not in operator.warm)
    memory_s = cold / chip.device_memory.rate_bytes_per_s
    # A kernel is as slow as its busiest unit, if all others hide behind it, plus its launch.
    busy_s = max(bound.cube, bound.vector, memory_s) + chip.launch_overhead_s
    return operator.count * max(operator.default_cycles - busy_s * chip.clock_hz, 0.0)


def together(
    compiled: Compiled, results: Sequence[Result], before_s: float
) -> tuple[Compiled, float, tuple[Result, ...]]:
    """Return the network with the choices that help it, its time, and the results as used.

    If all choices together gain less than they do alone, those whose kernels got slower in the
    network are left out, if that helps.
    """
    choices = {r.operator.piece.key: r.choice for r in results if r.choice}
    tuned = with_choices(compiled, choices)
    times = simulate_graph(tuned)
    after_s = times.time_s
    clock_hz = compiled.chip.clock_hz
    alone = sum(r.operator.count * (r.before_cycles - r.after_cycles) for r in results) / clock_hz
    # Up to 2 % is rounding of shared launches. More is lost where a kernel's new order of tiles
    # leaves other data in L2 than its successor expects.
    if before_s - after_s < 0.98 * alone:
        # Choices are judged by the network: a kernel may be quicker alone and slower behind its
        # neighbour.
        slower = slowed(compiled, simulate_graph(compiled), times)
        fewer = {k: c for k, c in choices.items() if k not in slower}
        trial = with_choices(compiled, fewer)
        trial_s = simulate_graph(trial).time_s
        if trial_s <= after_s:
            choices = fewer
            tuned = trial
            after_s = trial_s
    if not after_s < before_s:
        tuned = compiled
        after_s = before_s
        choices = {}
    note = "faster alone, but not in this network: the default stays"
    used = []
    for r in results:
        left_out = r.choice is not None and r.operator.piece.key not in choices
        kept = {"choice": None, "after_cycles": r.before_cycles, "note": note}
        used.append(replace(r, **kept) if left_out else r)  # type: ignore[arg-type]
    return tuned, after_s, tuple(used)


def slowed(compiled: Compiled, baseline: NetworkTimeline, tuned: NetworkTimeline) -> set[str]:
    """Return the keys of the pieces whose kernels take longer in one timeline than in another."""
    change: dict[str, float] = {}
    keys = {task.name: task.piece.key for task in compiled.tasks}
    for timed_before, timed_after in zip(baseline.operators, tuned.operators, strict=True):
        key = keys[timed_before.name]
        change[key] = change.get(key, 0.0) + timed_after.time_s - timed_before.time_s
    return {key for key, seconds in change.items() if seconds > 0}


def with_bank(compiled: Compiled, knowledge: Knowledge) -> NetworkResult:
    """Return a compiled network with the schedules that a bank knows; nothing is searched."""
    results = []
    for operator in operators_of(compiled):
        match = knowledge.find(key_of(operator)) if operator.unit else None
        note = operator.reason or "not in the bank"
        results.append(from_bank(operator, *match) if match else untuned(operator, note))
    before_s = simulate_graph(compiled).time_s
    tuned, after_s, kept = together(compiled, results, before_s)
    hits: list[Outcome] = ["hit" for r in results if r.source != "none"]
    return NetworkResult(tuned, before_s, after_s, kept, tuple(hits))
