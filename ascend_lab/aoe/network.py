"""Job 2, a whole network: every distinct operator from the bank or by search, then all together.

Time is shared by the operators in proportion to what they can still gain: count x (cycles - bound).
Operators are tuned alone; the network decides: a schedule that makes it slower is not taken.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ascend_lab.aoe.bank import MODEL_VERSION, BankEntry, BankKey, Knowledge, Outcome, settle
from ascend_lab.aoe.drive import OVERALL, Progress, Settings, Trial
from ascend_lab.aoe.operators import Tunable, operators_of
from ascend_lab.aoe.tuning import NOT_REACHED, Result, job_of, tune_operator, untuned
from ascend_lab.aoe.vector.space import TAUGHT, learn
from ascend_lab.aoe.workers import Deadline, TimeUpError, Workers
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.graph import Compiled, NetworkTimeline, bound_of, simulate_graph
from ascend_lab.graph.lower import Choice, choice_of
from ascend_lab.graph.tasks import with_choices

Chosen = Callable[[Tunable], bool]
"""Whether the user wants an operator tuned."""
LEAST_S = 1.0
"""Seconds of a limited time that the search of an operator gets at least."""
CHECK_S = 40e-6
"""Assumed seconds to check the values of a kernel, per instruction it executes."""
NEAR = 3
"""Schedules of like shapes that a search begins with."""
SIZES = ("base_m", "base_n", "base_k", "step_k", "grid_rows", "grid_cols")
"""What a tiling must have; the rest of it is checked when it is lowered."""


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

    @property
    def bound_s(self) -> float:
        """Seconds that no schedules of these kernels beat; those without a bound as they are."""
        cycles = sum(r.operator.count * (r.bound_cycles or r.after_cycles) for r in self.results)
        return cycles / self.compiled.chip.clock_hz


def tune_network(
    compiled: Compiled,
    settings: Settings | None = None,
    knowledge: Knowledge | None = None,
    *,
    workers: Workers | None = None,
    wanted: Chosen | None = None,
    progress: Progress | None = None,
    deadline: Deadline | None = None,
) -> NetworkResult:
    """Tune the operators of a compiled network; Ctrl-C and the deadline keep what was found.

    The deadline is that of the settings from now on, unless it is given. Operators that it leaves
    out keep their defaults, and their results say so.
    """
    settings, knowledge = settings or Settings(), knowledge or Knowledge(None, None)
    deadline = deadline or Deadline.of(settings.time_limit_s)
    run = _Operators(settings, knowledge, workers, progress or (lambda *_: None), deadline)
    operators = operators_of(compiled)
    asked = [op for op in operators if op.unit and (wanted is None or wanted(op))]
    refused = {op.name: op.reason or "not asked for" for op in operators if op not in asked}
    sizes = {t.piece.key: t.lowered.kernel.event_count for t in compiled.tasks if t.lowered}
    try:
        run.tune(asked, sizes)
    except KeyboardInterrupt:  # between two searches; those that ended are kept
        run.interrupted = True
    missed = "interrupted" if run.interrupted else NOT_REACHED
    found = [run.results.get(op.name) or untuned(op, refused.get(op.name, missed))
             for op in operators]  # fmt: skip
    before_s = simulate_graph(compiled).time_s
    tuned, after_s, kept = together(compiled, found, before_s)
    return NetworkResult(tuned, before_s, after_s, kept, tuple(run.outcomes), run.interrupted)


@dataclass
class _Operators:
    """The operators of one network, as far as they are tuned."""

    settings: Settings
    knowledge: Knowledge
    workers: Workers | None
    progress: Progress
    deadline: Deadline

    def __post_init__(self) -> None:
        self.results: dict[str, Result] = {}
        self.outcomes: list[Outcome] = []
        self.interrupted = False
        self.policy = learn(self.knowledge.entries()) if self.settings.prior else None

    def tune(self, operators: Sequence[Tunable], sizes: Mapping[str, int]) -> None:
        """Take each from the bank or search, the one with most to gain first.

        `sizes` are instructions of the default kernels by piece. With a limited time, an operator
        whose values could not be checked in it is left out.
        """
        limited = math.isfinite(self.deadline.end)
        try:
            with self.deadline.cut():
                unknown, missing = [op for op in operators if not self._known(op)], []
                for number, operator in enumerate(unknown, 1):
                    gain = estimated(operator) if limited else potential(operator)
                    missing.append((operator, gain))
                    self.progress("bounds", number, len(unknown), "")
        except TimeUpError:
            return
        missing.sort(key=lambda pair: -pair[1])
        gains = sum(gain for _, gain in missing)
        for number, (operator, gain) in enumerate(missing, 1):
            if self.interrupted or self.deadline.over:
                break
            limit_s, place = None, f"{number}/{len(missing)}"
            self.progress(OVERALL, number, len(missing) + 2, "")
            if limited:
                left_s = self.deadline.left_s
                share = gain / gains if gains else 1.0
                check_s = 2 * CHECK_S * sizes.get(operator.piece.key, 0)
                limit_s = min(max(left_s * share, LEAST_S), left_s - check_s)
            gains -= gain
            if limit_s is None or limit_s > 0:
                self._search(operator, limit_s, place)

    def _known(self, operator: Tunable) -> bool:
        """Take an operator from the bank if that is what the settings ask for."""
        found = None if self.settings.repeat else self.knowledge.find(key_of(operator))
        if found is None or (self.settings.deeper and not found[0].proven):
            return False
        if self.knowledge.trials(self._run_id(operator)):  # an interrupted run goes on
            return False
        self.results[operator.name] = from_bank(operator, *found)
        self.outcomes.append("hit")
        return True

    def _run_id(self, operator: Tunable) -> str:
        return f"{key_of(operator).digest} {MODEL_VERSION} {self.settings}"

    def _search(self, operator: Tunable, limit_s: float | None, place: str) -> None:
        run_id = self._run_id(operator)
        known = {t.point: (t.cost, t.note) for t in self.knowledge.trials(run_id)}
        label = f"{place} {operator.op}"

        def on_trial(trial: Trial) -> None:
            if trial.point not in known:
                self.knowledge.save_trials(run_id, (trial,))
            self.progress(label, trial.number + 1, self.settings.budget, f"{trial.cost:.0f}")

        found = tune_operator(
            operator, self.settings, workers=self.workers, time_limit_s=limit_s,
            deadline=self.deadline, known=known, near=suggestions(operator, self.knowledge),
            policy=self.policy, on_trial=on_trial,
            told=lambda what, done, of: self.progress(f"{label}, {what}", done, of, ""),
        )  # fmt: skip
        self.results[operator.name] = found
        if found.trace is None:
            return
        self.interrupted = found.trace.end == "interrupted"
        worth = found.choice is not None if self.interrupted else found.source == "tuned"
        if worth and len(found.trace.failures) < found.trials:
            self.outcomes.append(settle(self.knowledge, entry_of(found, self.settings)))
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
    chip, graph = operator.chip, operator.piece.graph
    least = bound_of(graph, chip)
    cold = sum(graph.types[n].size_bytes for n in graph.inputs if n not in operator.warm)
    memory_s = cold / chip.device_memory.rate_bytes_per_s
    busy_s = max(least.cube, least.vector, memory_s) + chip.launch_overhead_s
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
    after_s, clock_hz = times.time_s, compiled.chip.clock_hz
    alone = sum(r.operator.count * (r.before_cycles - r.after_cycles) for r in results) / clock_hz
    if before_s - after_s < 0.98 * alone:
        slower = slowed(compiled, simulate_graph(compiled), times)
        fewer = {k: c for k, c in choices.items() if k not in slower}
        trial = with_choices(compiled, fewer)
        trial_s = simulate_graph(trial).time_s
        if trial_s <= after_s:
            choices, tuned, after_s = fewer, trial, trial_s
    if not after_s < before_s:
        tuned, after_s, choices = compiled, before_s, {}
    note, used = "faster alone, but not in this network: the default stays", []
    for r in results:
        left_out = r.choice is not None and r.operator.piece.key not in choices
        kept = {"choice": None, "after_cycles": r.before_cycles, "note": note}
        used.append(replace(r, **kept) if left_out else r)  # type: ignore[arg-type]
    return tuned, after_s, tuple(used)


def slowed(compiled: Compiled, before: NetworkTimeline, after: NetworkTimeline) -> set[str]:
    """Return the keys of the pieces whose kernels take longer in one timeline than in another."""
    change: dict[str, float] = {}
    keys = {task.name: task.piece.key for task in compiled.tasks}
    for old, new in zip(before.operators, after.operators, strict=True):
        key = keys[old.name]
        change[key] = change.get(key, 0.0) + new.time_s - old.time_s
    return {key for key, seconds in change.items() if seconds > 0}


# -- between tuning and the bank ------------------------------------------------------------------


def key_of(operator: Tunable) -> BankKey:
    """Return the bank's key of an operator."""
    return BankKey.of(operator.chip, "op", operator.op, operator.problem)


def features_of(operator: Tunable) -> tuple[float, ...]:
    """Return the base-2 logarithms of all sizes of what an operator reads and writes."""
    graph = operator.piece.graph
    types = [graph.types[n] for n in (*graph.inputs, *graph.outputs)]
    return tuple(math.log2(max(size, 1)) for kind in types for size in kind.shape)


def entry_of(result: Result, settings: Settings) -> BankEntry:
    """Return what the bank keeps of a result; without a schedule the default is the best known."""
    choice = result.choice.as_dict() if result.choice else {}
    if choice and result.decisions:
        choice |= {TAUGHT: result.decisions}
    return BankEntry(
        key_of(result.operator), choice, result.before_cycles, result.after_cycles,
        result.bound_cycles, result.proven, result.search, settings.seed, result.trials,
        features=features_of(result.operator),
    )  # fmt: skip


def from_bank(operator: Tunable, entry: BankEntry, origin: str) -> Result:
    """Return a bank's entry timed again here; one that no longer fits or helps is not used."""
    before, choice, note = operator.default_cycles, None, ""
    after = before
    if entry.schedule:
        try:
            choice = _choice(entry, operator)
            found = operator.cycles_of(choice)
            choice, after = (choice, found) if found < before else (None, before)
        except AscendLabError as error:
            choice, note = None, f"the bank's schedule does not fit: {error}"
    bound = min(entry.bound_cycles, after) if entry.bound_cycles is not None else None
    proven = entry.proven and after == entry.after_cycles
    return Result(operator, choice, before, after, bound, proven, origin, note, entry.search)


def with_bank(compiled: Compiled, knowledge: Knowledge) -> NetworkResult:
    """Return a compiled network with the schedules that a bank knows; nothing is searched."""
    results = []
    for operator in operators_of(compiled):
        found = knowledge.find(key_of(operator)) if operator.unit else None
        note = operator.reason or "not in the bank"
        results.append(from_bank(operator, *found) if found else untuned(operator, note))
    before_s = simulate_graph(compiled).time_s
    tuned, after_s, kept = together(compiled, results, before_s)
    hits: list[Outcome] = ["hit" for r in results if r.source != "none"]
    return NetworkResult(tuned, before_s, after_s, kept, tuple(hits))


def suggestions(operator: Tunable, knowledge: Knowledge) -> list[Choice]:
    """Return the schedules of the nearest shapes that a bank knows."""
    found = []
    for entry in knowledge.nearest(key_of(operator), features_of(operator), NEAR):
        with suppress(AscendLabError):  # a bank that others wrote may hold anything
            found += [_choice(entry, operator)] if entry.schedule else []
    return found


def _choice(entry: BankEntry, operator: Tunable) -> Choice:
    """Return the choice an entry keeps; raise `InputError` if it is none."""
    choice = choice_of(entry.schedule, operator.chip.name)
    numbers = [getattr(choice.tiling, name) for name in SIZES] if choice.tiling else []
    if any(type(n) is not int or n < 1 for n in numbers):
        raise InputError("a tiling of whole numbers", str(numbers), "tune it again")
    return choice
