"""Tunes a whole network for a chip, and compares the result with a lower bound on its time.

Job 1 (subgraph) cuts tensors into slices that fit into the L2 cache. Job 2 (operators) searches a
schedule for every distinct kernel. Both first ask the knowledge bank, which stores the results of
earlier runs. If both jobs are asked for, slicing runs first, because it changes operators' shapes.

A limited time is divided among the operators in proportion to what each can still gain, which is
count x (cycles - lower bound): an operator that runs 12 times, 1,000 cycles above its bound, may
gain 12,000 cycles. Every operator is tuned alone. At the end the whole network is timed with the
new schedules, and those that make it slower are dropped.
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
from ascend_lab.compiler import Graph, bound_of, simulate_graph
from ascend_lab.compiler.compile import Front, Road, finish_stages, front_stages, ledger
from ascend_lab.compiler.network import NetworkTimeline
from ascend_lab.compiler.tasks import Compiled, with_choices
from ascend_lab.errors import AscendLabError
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.sim import few_collections

RESERVED_SHARE = 0.5
"""Time reserved for the last compile and for saving, as a share of the time of the first one."""
SLICING_SHARE = 0.9
"""Largest share of a limited time that slicing may take when operators are tuned after it."""
OperatorFilter = Callable[[Tunable], bool]
"""Returns whether the user wants an operator tuned."""
MIN_SEARCH_S = 1.0
"""The search of an operator gets at least this many seconds, even if its share is smaller."""
CHECK_S_PER_INSTRUCTION = 40e-6
"""Assumed time to compute a kernel's values, per instruction: 25,000 instructions take 1 s."""
_TOO_LATE_MESSAGE = "reading and compiling took the time limit of {:g} s: nothing was tuned"


@dataclass(frozen=True, slots=True)
class NetworkResult:
    """A network whose operators were tuned, and its time before and after.

    `outcomes` say for each operator what happened in the knowledge bank ("hit", "add", "update").
    `interrupted` is True if the user pressed Ctrl-C.
    """

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
    """How a tuning run is carried out: who measures, which operators it tunes, when it must end.

    `executor` measures candidates: "serial", "processes:N", "dask:ADDRESS", or workers that are
    already open. `dtype` is the number format of the network. `chosen` returns whether to tune an
    operator (None: tune all). `progress` is called as the run advances. The run ends at the
    `deadline`; without one the time limit of the settings counts from the start of the run.
    """

    executor: Workers | str = "serial"
    dtype: str = "fp16"
    chosen: OperatorFilter | None = None
    progress: Progress = lambda label, done, total, best: None
    deadline: Deadline | None = None

    @contextmanager
    def opened(self, settings: Settings) -> Iterator[tuple[Workers, Deadline]]:
        """Yield the workers and the deadline; workers that were opened here are closed again."""
        deadline = self.deadline or Deadline.of(settings.time_limit_s)
        # Whoever opened the workers closes them: a second network may use them next.
        if isinstance(self.executor, Workers):
            yield self.executor, deadline
            return
        with workers_of(self.executor) as workers:
            yield workers, deadline


DEFAULT_SESSION = Session()


class Ledgers(NamedTuple):
    """How a network's time divides by cause (see `compiler.ledger`), before and after tuning."""

    before: Mapping[str, float]
    after: Mapping[str, float]


NO_LEDGERS = Ledgers({}, {})


@dataclass(frozen=True, slots=True)
class Tuning:
    """A tuned network: the result of each job, and its simulated times before and after.

    `bound_s` is a time that no slicing and no schedule beats; `spent_s` is how long tuning took.
    `subgraph` and `operators` are None for a job that was not asked for. `outcomes` say what
    happened to the bank's entry for the slicing; `warnings` come from the bank and the time limit.
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
        """Whether the user pressed Ctrl-C."""
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
    session: Session = DEFAULT_SESSION,
) -> Tuning:
    """Tune a graph for a chip and return the tuned network with its times.

    `job` is "1" (subgraph), "2" (operators) or "1,2" (both). `bank` is the file of the user's own
    knowledge bank; without one results are not stored, but the built-in bank is still read. Ctrl-C
    and the time limit end the run with the best results so far; the first compile always finishes.
    Raises what `compile_stages` raises, and `InputError` for unknown jobs or executors.
    """
    jobs = jobs_of(job)
    settings = settings or Settings()
    chip = load_chip(chip) if isinstance(chip, str) else chip
    with ExitStack() as opened_here:
        workers, deadline = opened_here.enter_context(session.opened(settings))
        if not isinstance(bank, Knowledge):
            bank = opened_here.enter_context(Knowledge(bank))
        session = replace(session, executor=workers, deadline=deadline)
        return _TuningRun(chip, jobs, settings, bank, session, deadline).tune(graph)


@dataclass(frozen=True, slots=True)
class _TuningRun:
    """One run of the tuner: the chip, the jobs, the bank it reads and writes, and the deadline."""

    chip: Chip
    jobs: tuple[str, ...]
    settings: Settings
    knowledge: Knowledge
    session: Session
    deadline: Deadline

    def tune(self, graph: Graph) -> Tuning:
        """Compile the graph, run the jobs on it one after another, and time the result."""
        started = time.monotonic()
        front, baseline, baseline_times = self._compile_and_time(graph)
        # At the end the same network is compiled again and saved. If the first compile took 20 s,
        # 10 s are reserved for that.
        deadline = self.deadline.reserving(RESERVED_SHARE * (time.monotonic() - started))
        # A limit shorter than the first compile leaves no time for tuning: the network is returned
        # unchanged.
        limit_s = self.settings.time_limit_s
        too_late = (_TOO_LATE_MESSAGE.format(limit_s),) if deadline.has_passed else ()
        compiled = baseline
        sliced = None
        operators = None
        outcome = None
        if "1" in self.jobs:
            sliced, outcome = self._slice(front, deadline)
            # The empty plan is the network as it was compiled already: nothing to compile again.
            if sliced.plan != SlicePlan():
                graph = sliced.graph if sliced.plan.regions else graph
                compiled = sliced.compiled
        if "2" in self.jobs and not (sliced and sliced.interrupted):
            session = replace(self.session, deadline=deadline)
            operators = tune_network(compiled, self.settings, self.knowledge, session=session)
            compiled = operators.compiled
        result_times = simulate_graph(compiled)
        # The bound is that of the network before slicing: it holds for every way to slice it.
        bound = bound_of(front.rewritten, self.chip)
        return Tuning(
            graph=graph,
            compiled=compiled,
            jobs=self.jobs,
            subgraph=sliced,
            operators=operators,
            baseline_s=baseline_times.time_s,
            result_s=result_times.time_s,
            bound_s=bound.time_s,
            spent_s=time.monotonic() - started,
            outcomes=(outcome,) if outcome else (),
            warnings=(*self.knowledge.warnings, *too_late),
            ledgers=Ledgers(ledger(baseline_times, bound), ledger(result_times, bound)),
        )

    def _slice(self, front: Front, deadline: Deadline) -> tuple[SubgraphResult, Outcome | None]:
        """Run job 1; if job 2 follows and the time is limited, time is left for it."""
        if "2" in self.jobs and not math.isinf(deadline.end):
            deadline = deadline.within(SLICING_SHARE * deadline.remaining_s)
        return slice_network(
            front, self.chip, self.settings, self.knowledge, self.session.progress, deadline
        )

    def _compile_and_time(self, graph: Graph) -> tuple[Front, Compiled, NetworkTimeline]:
        """Return the network after the first passes, compiled with default schedules, and timed."""
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
    session: Session = DEFAULT_SESSION,
) -> NetworkResult:
    """Tune the operators of a compiled network and return it with the schedules that help.

    Ctrl-C and the deadline end the run with the results so far. Operators that were not reached
    keep their default schedules; the note in their results says so.
    """
    settings = settings or Settings()
    knowledge = knowledge or Knowledge(None, None)
    operators = operators_of(compiled)
    is_chosen = session.chosen or (lambda operator: True)
    chosen = [op for op in operators if op.unit and is_chosen(op)]
    refused = {op.name: op.reason or "not asked for" for op in operators if op not in chosen}
    sizes = {t.piece.key: t.lowered.kernel.executed_count for t in compiled.tasks if t.lowered}
    with session.opened(settings) as (workers, deadline):
        run = _OperatorRun(settings, knowledge, workers, session.progress, deadline)
        try:
            run.tune(chosen, sizes)
        except KeyboardInterrupt:  # a search handles Ctrl-C itself: this came between two searches
            run.interrupted = True
    # An operator without a result was either refused, for a reason known here, or not reached.
    not_reached_note = "interrupted" if run.interrupted else NOT_REACHED
    results = []
    for op in operators:
        note = refused.get(op.name, not_reached_note)
        results.append(run.results.get(op.name) or untuned(op, note))
    before_s = simulate_graph(compiled).time_s
    tuned, after_s, used_results = with_useful_choices(compiled, results, before_s)
    outcomes = tuple(run.outcomes)
    return NetworkResult(tuned, before_s, after_s, used_results, outcomes, run.interrupted)


@dataclass
class _OperatorRun:
    """One run over the operators of a network: results by operator name, outcomes for the bank."""

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
        """Take each operator from the bank or search it, starting with the largest possible gain.

        `sizes` maps the key of a piece to the number of instructions of its default kernel. Under a
        time limit, an operator is left out if too little time remains to check its values.
        """
        is_limited = math.isfinite(self.deadline.end)
        try:
            with self.deadline.cut():
                queue = self._untuned(operators, is_limited)
        except TimeUpError:
            return
        queued_gain = sum(gain for _, gain in queue)
        for number, (operator, gain) in enumerate(queue, 1):
            if self.interrupted or self.deadline.has_passed:
                break
            limit_s = None
            position = f"{number}/{len(queue)}"
            self.progress(OVERALL, number, len(queue) + 2, "")
            if is_limited:
                remaining_s = self.deadline.remaining_s
                # With 10 s left, an operator with 3 of 4 ms still to gain gets 7.5 s. Time that it
                # does not use goes to the next operators: `remaining_s` is measured each time.
                share = gain / queued_gain if queued_gain else 1.0
                # The check runs two kernels, the tuned one and at most the default, of about as
                # many instructions.
                check_s = 2 * CHECK_S_PER_INSTRUCTION * sizes.get(operator.piece.key, 0)
                limit_s = min(max(remaining_s * share, MIN_SEARCH_S), remaining_s - check_s)
            queued_gain -= gain
            if limit_s is None or limit_s > 0:
                self._search(operator, limit_s, position)

    def _untuned(
        self, operators: Sequence[Tunable], is_limited: bool
    ) -> list[tuple[Tunable, float]]:
        """Return the operators that the bank lacks, with possible gains, the largest first.

        If the time ends early, the least is lost.
        """
        # the certified bound builds the space first, which takes time
        gain_of = estimated_gain_cycles if is_limited else gain_limit_cycles
        unknown = [op for op in operators if not self._take_from_bank(op)]
        queue = []
        for number, operator in enumerate(unknown, 1):
            queue.append((operator, gain_of(operator)))
            self.progress("bounds", number, len(unknown), "")
        return sorted(queue, key=lambda pair: -pair[1])

    def _take_from_bank(self, operator: Tunable) -> bool:
        """Take an operator's result from the bank; return False if it has to be searched.

        It is searched if the bank has no entry, if the settings say `repeat`, if they say `deeper`
        and the entry is not proven optimal, or if an interrupted search of it can be resumed.
        """
        match = None if self.settings.repeat else self.knowledge.find(key_of(operator))
        if match is None or (self.settings.deeper and not match[0].proven):
            return False
        if self.knowledge.trials(self._run_id(operator)):
            return False
        self.results[operator.name] = from_bank(operator, *match)
        self.outcomes.append("hit")
        return True

    def _run_id(self, operator: Tunable) -> str:
        return f"{key_of(operator).digest} {MODEL_VERSION} {self.settings}"

    def _search(self, operator: Tunable, limit_s: float | None, position: str) -> None:
        """Search one operator for at most `limit_s` seconds; store its result, also in the bank.

        `position` says which operator of the queue it is: "3/7".
        """
        run_id = self._run_id(operator)
        earlier = {t.point: (t.cost, t.note) for t in self.knowledge.trials(run_id)}
        label = f"{position} {operator.op}"

        def on_trial(trial: Trial) -> None:
            if trial.point not in earlier:
                self.knowledge.save_trials(run_id, (trial,))
            self.progress(label, trial.number + 1, self.settings.budget, f"{trial.cost:.0f}")

        rules = Rules(workers=self.workers, time_limit_s=limit_s, known=earlier, on_trial=on_trial)
        result = tune_operator(
            operator,
            self.settings,
            rules=rules,
            deadline=self.deadline,
            hints=suggestions(operator, self.knowledge),
            report=lambda stage, done, total: self.progress(f"{label}, {stage}", done, total, ""),
        )
        self.results[operator.name] = result
        if result.trace is None:
            return
        self.interrupted = result.trace.end == "interrupted"
        # An interrupted search without a gain says nothing about the points it has not tried, so
        # the bank must not learn from it that the default is the best.
        if self.interrupted:
            is_worth_storing = result.choice is not None
        else:
            is_worth_storing = result.source == "tuned"
        if is_worth_storing and len(result.trace.failures) < result.trials:
            self.outcomes.append(settle(self.knowledge, entry_of(result, self.settings)))
            if not self.interrupted:
                self.knowledge.forget_trials(run_id)


def gain_limit_cycles(operator: Tunable) -> float:
    """Return the most cycles that tuning an operator can save in the network.

    That is count x (default cycles - certified lower bound), or 0 where the space cannot be built.
    """
    try:
        bound, _ = job_of(operator).bound(())
    except AscendLabError:
        return 0.0
    return float(operator.count * max(operator.default_cycles - bound, 0))


def estimated_gain_cycles(operator: Tunable) -> float:
    """Return roughly what `gain_limit_cycles` returns, without building the space of schedules.

    The lower bound is replaced by the time of the busiest unit: work / peak rate for cube and
    vector unit, bytes not yet in L2 / rate for the memory.
    """
    chip = operator.chip
    graph = operator.piece.graph
    bound = bound_of(graph, chip)
    cold_bytes = sum(graph.types[n].size_bytes for n in graph.inputs if n not in operator.warm)
    memory_s = cold_bytes / chip.device_memory.rate_bytes_per_s
    # The units work at the same time, so that the busiest one decides; the launch comes on top.
    kernel_s = max(bound.cube, bound.vector, memory_s) + chip.launch_overhead_s
    return operator.count * max(operator.default_cycles - kernel_s * chip.clock_hz, 0.0)


def with_useful_choices(
    compiled: Compiled, results: Sequence[Result], before_s: float
) -> tuple[Compiled, float, tuple[Result, ...]]:
    """Return the network with the schedules that help it, its time, and the results as used.

    A kernel that is faster alone may slow down its successor. If all schedules together gain less
    than the sum of what each gained alone, the network is also timed without those whose kernels
    got slower in it, and the faster of the two is returned.
    """
    choices = {r.operator.piece.key: r.choice for r in results if r.choice}
    tuned = with_choices(compiled, choices)
    times = simulate_graph(tuned)
    after_s = times.time_s
    clock_hz = compiled.chip.clock_hz
    saved_cycles = sum(r.operator.count * (r.before_cycles - r.after_cycles) for r in results)
    # A difference of up to 2 % is ignored. More is lost where a kernel's new order of tiles leaves
    # other data in L2 than its successor reads first.
    if before_s - after_s < 0.98 * saved_cycles / clock_hz:
        slower_keys = keys_of_slower_pieces(compiled, simulate_graph(compiled), times)
        fewer_choices = {k: c for k, c in choices.items() if k not in slower_keys}
        candidate = with_choices(compiled, fewer_choices)
        candidate_s = simulate_graph(candidate).time_s
        if candidate_s <= after_s:
            choices = fewer_choices
            tuned = candidate
            after_s = candidate_s
    if not after_s < before_s:
        tuned = compiled
        after_s = before_s
        choices = {}
    note = "faster alone, but not in this network: the default stays"
    used_results = []
    for result in results:
        is_dropped = result.choice is not None and result.operator.piece.key not in choices
        if is_dropped:
            result_with_default = replace(
                result, choice=None, after_cycles=result.before_cycles, note=note
            )
            used_results.append(result_with_default)
        else:
            used_results.append(result)
    return tuned, after_s, tuple(used_results)


def keys_of_slower_pieces(
    compiled: Compiled, baseline: NetworkTimeline, tuned: NetworkTimeline
) -> set[str]:
    """Return the keys of the pieces whose kernels take longer in `tuned` than in `baseline`.

    Kernels with equal pieces share a schedule, so their times are added before they are compared.
    """
    change_s: dict[str, float] = {}
    keys = {task.name: task.piece.key for task in compiled.tasks}
    for baseline_op, tuned_op in zip(baseline.operators, tuned.operators, strict=True):
        key = keys[baseline_op.name]
        change_s[key] = change_s.get(key, 0.0) + tuned_op.time_s - baseline_op.time_s
    return {key for key, seconds in change_s.items() if seconds > 0}


def with_stored_schedules(compiled: Compiled, knowledge: Knowledge) -> NetworkResult:
    """Return a compiled network with the schedules that the bank stores, without any search."""
    results = []
    for operator in operators_of(compiled):
        match = knowledge.find(key_of(operator)) if operator.unit else None
        note = operator.reason or "not in the bank"
        results.append(from_bank(operator, *match) if match else untuned(operator, note))
    before_s = simulate_graph(compiled).time_s
    tuned, after_s, used_results = with_useful_choices(compiled, results, before_s)
    hits: list[Outcome] = ["hit" for r in results if r.source != "none"]
    return NetworkResult(tuned, before_s, after_s, used_results, tuple(hits))
