"""Job 2, a whole network: every distinct operator from the bank or by search, then all together.

Time is shared by the operators in proportion to what they can still gain, count x (cycles - bound).
Operators are tuned alone; the network decides: a schedule that makes it slower is not taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ascend_lab.aoe.bank import MODEL_VERSION, Knowledge, Outcome, decide, settle
from ascend_lab.aoe.jobs import job_of
from ascend_lab.aoe.known import entry_of, from_bank, key_of, suggestions
from ascend_lab.aoe.operators import Operator, operators_of
from ascend_lab.aoe.settings import Progress, Settings
from ascend_lab.aoe.trace import Trial
from ascend_lab.aoe.tuning import Result, tune_operator, untuned
from ascend_lab.aoe.vector.prior import learn
from ascend_lab.aoe.workers import Workers
from ascend_lab.errors import AscendLabError
from ascend_lab.graph import Compiled, NetworkTimeline, simulate_graph
from ascend_lab.graph.compiled import with_choices
from ascend_lab.graph.lower import Choice

Chosen = Callable[[Operator], bool]
"""Whether the user wants an operator tuned."""


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
        """Seconds that no schedules of these kernels beat: their bounds added up.

        Kernels without a bound count as they are; L2 as each operator is tuned on it.
        """
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
) -> NetworkResult:
    """Tune the operators of a compiled network; Ctrl-C keeps what was found."""
    settings, knowledge = settings or Settings(), knowledge or Knowledge(None, None)
    run = _Run(settings, knowledge, workers, progress)
    operators = operators_of(compiled)
    asked = [op for op in operators if op.unit and (wanted is None or wanted(op))]
    refused = {op.name: op.reason or "not asked for" for op in operators if op not in asked}
    try:
        run.tune(asked)
    except KeyboardInterrupt:  # between two searches; those that ended are kept
        run.interrupted = True
    found = [run.results.get(op.name) or untuned(op, refused.get(op.name, "interrupted"))
             for op in operators]  # fmt: skip
    before_s = simulate_graph(compiled).time_s
    tuned, after_s, kept = together(compiled, found, before_s)
    return NetworkResult(tuned, before_s, after_s, kept, tuple(run.outcomes), run.interrupted)


@dataclass
class _Run:
    """The operators of one network, as far as they are tuned."""

    settings: Settings
    knowledge: Knowledge
    workers: Workers | None
    progress: Progress | None

    def __post_init__(self) -> None:
        self.results: dict[str, Result] = {}
        self.outcomes: list[Outcome] = []
        self.interrupted = False
        self.policy = learn(self.knowledge.entries()) if self.settings.prior else None

    def tune(self, operators: Sequence[Operator]) -> None:
        """Take each from the bank or search, the one with most to gain first."""
        missing = []
        for operator in operators:
            decision = decide(self.knowledge, key_of(operator), self.settings.repeat)
            unproven = decision.entry is not None and not decision.entry.proven
            if decision.tune or (self.settings.deeper and unproven):
                missing.append(operator)
                continue
            assert decision.entry is not None and decision.origin is not None
            self.results[operator.name] = from_bank(operator, decision.entry, decision.origin)
            self.outcomes.append(settle(self.knowledge, decision))
        room = {op.name: potential(op) for op in missing}
        missing.sort(key=lambda op: -room[op.name])
        end = time.monotonic() + (self.settings.time_limit_s or float("inf"))
        for number, operator in enumerate(missing):
            if self.interrupted:
                break
            left = sum(room[op.name] for op in missing[number:])
            share = room[operator.name] / left if left else 1.0
            limit_s = (end - time.monotonic()) * share if self.settings.time_limit_s else None
            self._search(operator, limit_s, f"{number + 1}/{len(missing)}")

    def _search(self, operator: Operator, limit_s: float | None, place: str) -> None:
        run_id = f"{key_of(operator).digest} {MODEL_VERSION} {self.settings}"
        known = {t.point: (t.cost, t.note) for t in self.knowledge.trials(run_id)}

        def on_trial(trial: Trial) -> None:
            if trial.point not in known:
                self.knowledge.save_trials(run_id, (trial,))
            if self.progress:
                label = f"{place} {operator.op}"
                self.progress(label, trial.number + 1, self.settings.budget, f"{trial.cost:.0f}")

        found = tune_operator(
            operator,
            self.settings,
            workers=self.workers,
            time_limit_s=limit_s,
            known=known,
            near=suggestions(operator, self.knowledge),
            policy=self.policy,
            on_trial=on_trial,
        )
        self.results[operator.name] = found
        if found.trace is None:
            return
        self.interrupted = found.trace.end == "interrupted"
        if not self.interrupted and len(found.trace.failures) < found.trials:
            decision = decide(self.knowledge, key_of(operator), True)
            self.outcomes.append(settle(self.knowledge, decision, entry_of(found, self.settings)))
            self.knowledge.forget_trials(run_id)


def potential(operator: Operator) -> float:
    """Return the cycles an operator could still gain in the network, at most."""
    try:
        bound, _ = job_of(operator).bound(())
    except AscendLabError:
        return 0.0
    return float(operator.count * max(operator.default_cycles - bound, 0))


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
    return tuned, after_s, tuple(_as_used(r, choices) for r in results)


def slowed(compiled: Compiled, before: NetworkTimeline, after: NetworkTimeline) -> set[str]:
    """Return the keys of the pieces whose kernels take longer in one timeline than in another."""
    change: dict[str, float] = {}
    keys = {task.name: task.piece.key for task in compiled.tasks}
    for old, new in zip(before.operators, after.operators, strict=True):
        key = keys[old.name]
        change[key] = change.get(key, 0.0) + new.time_s - old.time_s
    return {key for key, seconds in change.items() if seconds > 0}


def _as_used(result: Result, choices: Mapping[str, Choice]) -> Result:
    if result.choice is None or result.operator.piece.key in choices:
        return result
    note = "faster alone, but not in this network: the default stays"
    return replace(result, choice=None, after_cycles=result.before_cycles, note=note)
