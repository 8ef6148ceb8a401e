"""Reports of a tuning run: the published fields, and how far from optimal each result is.

Published reports print improvements as (before - after) / after; so do these, and they say so.
All times are of the model, not measured; only `tuning_time(s)` is read from a clock.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ascend_lab import __version__
from ascend_lab.aoe.bank import BankKey, Outcome, repo_summary
from ascend_lab.aoe.drive import Settings, Trace
from ascend_lab.aoe.engine import Tuning
from ascend_lab.aoe.network import NetworkResult, key_of
from ascend_lab.aoe.subgraph import SubgraphResult
from ascend_lab.aoe.subgraph.slicing import HOW
from ascend_lab.aoe.tuning import CERTAINTIES, Result
from ascend_lab.output import write_whole

FORMULA = "(before - after) / after"
GAP_FORMULA = "after / bound - 1"
TUNED = ("tuned", "custom", "builtin")
"""Sources of results that a search or a bank gave."""
LONGEST = 44
"""Characters of an operator's name in the table; the front is left out."""
Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """What one tuning run found, as tables and as the published JSON.

    `written` says what became of the entries in the custom bank, by key (see `Knowledge.written`);
    without it every improved operator counts as added.
    """

    name: str
    tuning: Tuning
    settings: Settings = field(default_factory=Settings)
    written: Mapping[BankKey, Outcome] | None = None

    def table(self) -> str:
        """Return the operators as a table, and the totals."""
        t, chip = self.tuning, self.tuning.compiled.chip
        lines = [f"{self.name} on {chip.core_count} cores of {chip.name} (model results)"]
        if t.operators is not None:
            lines += [_HEAD, *map(_row, t.operators.results), self.shares()]
        total = (
            f"total {t.baseline_s * 1e3:.4f} ms -> {t.result_s * 1e3:.4f} ms, improved by "
            f"{t.gain:.2%} = {FORMULA}; network bound {t.bound_s * 1e3:.4f} ms, gap {t.gap:.2%} "
            "(it counts no waits and one launch)"
        )
        return "\n".join([*lines, total])

    def top(self, count: int) -> str:
        """Return the operators that take the most time as a table, and the shares of the time."""
        found = self.tuning.operators
        if found is None:
            return ""
        rows = sorted(found.results, key=lambda r: -r.operator.count * r.after_cycles)
        more = [f"... and {len(rows) - count} more"] if len(rows) > count else []
        return "\n".join([_HEAD, *map(_row, rows[:count]), *more, self.shares()])

    def shares(self) -> str:
        """Return how much of the kernels' time is proven optimal, bounded, or neither."""
        found = self.tuning.operators
        results = found.results if found is not None else ()
        gap = max((r.gap for r in results if r.gap is not None and not r.proven), default=0.0)
        tenths = _tenths(results)
        kinds = [
            f"{t / 10:.1f} % {kind}" for kind, t in tenths.items() if t or kind in CERTAINTIES[:2]
        ]
        text = ", ".join(kinds) or "no kernels"
        return f"time of the kernels: {text}".replace("bounded", f"within {gap:.2%} of a bound")

    def as_dict(self) -> Data:
        """Return a section per job: "sgat" for the subgraph tuner, "opat" for the operators'."""
        t, found = self.tuning, {}
        basic = {"tuning_name": self.name, "tuning_time(s)": round(t.spent_s)}
        outcome = "tuning incomplete" if t.interrupted else "tuning successful"
        if t.subgraph is not None:
            found["sgat"] = {"basic": basic, **self._sgat(t.subgraph, outcome)}
        if t.operators is not None:
            found["opat"] = {"basic": basic, **self._opat(t.operators, outcome)}
        return found

    def _sgat(self, sliced: SubgraphResult, outcome: str) -> Data:
        times = _performance(sliced.before_s, sliced.after_s)
        return {
            "SGAT": {**times, "sgat_tuning_result": outcome},
            "ascend_lab": {
                **self._own(),
                "repo_summary": dict(repo_summary(self.tuning.outcomes)),
                "tried": sliced.tried,
                "slices": [str(region) for region in sliced.plan.regions],
                **{name: getattr(sliced.plan, name) for name in HOW},
                "plan": sliced.plan.plain(),
            },
        }

    def _opat(self, found: NetworkResult, outcome: str) -> Data:
        modified: dict[str, list[Data]] = {"add": [], "update": []}
        for r in found.results:
            if how := self._modified(r):  # listed with its times, and the axis that was tuned
                schedule = {"Schedule": {**_times(r), "update_mode": how}}
                modified[how].append({**_named(r), **_times(r), "tune_performance": schedule})
        tuned = [r for r in found.results if r.source in TUNED]
        return {
            "OPAT": {
                **_performance(found.before_s, found.after_s),
                "opat_tuning_result": outcome,
                "repo_modified_operators": {
                    f"{how}_repo_operators": rows for how, rows in modified.items()
                },
                "repo_summary": dict(repo_summary(found.outcomes)),
                "tune_failed_operators": [_named(r) for r in found.results if failed(r)],
            },
            "ascend_lab": {
                **self._own(),
                "operators_tuned": len(tuned),
                "operators_proven": sum(r.proven for r in tuned),
                "operators": [_detail(r) for r in tuned],
                "untuned_operators": [
                    {**_named(r), "reason": r.note} for r in found.results if r.source not in TUNED
                ],
            },
        }

    def _modified(self, result: Result) -> str:
        """Return whether an operator was added to the bank ("add"), updated there, or neither."""
        if result.source != "tuned":
            return ""
        new = "add" if result.choice else ""
        how = new if self.written is None else self.written.get(key_of(result.operator), "")
        return how if how in ("add", "update") else ""

    def _own(self) -> Data:
        """Return what the published report lacks."""
        t = self.tuning
        return {
            "note": "times are results of the model, not measurements",
            "chip": t.compiled.chip.name,
            "core_count": t.compiled.chip.core_count,
            "jobs": list(t.jobs),
            "tool_version": __version__,
            "seed": self.settings.seed,
            "budget": self.settings.budget,
            "improvement_formula": FORMULA,
            "baseline(ms)": _ms(t.baseline_s),
            "result(ms)": _ms(t.result_s),
            "improvement": f"{t.gain:.2%}",
            "bound(ms)": _ms(t.bound_s),
            "gap_to_bound": f"{t.gap:.2%}",
            "gap_formula": GAP_FORMULA,
            "bound_s": t.bound_s,
            "gap": t.gap,
            "ledger_before": dict(t.ledger_before),
            "ledger_after": dict(t.ledger_after),
            "warnings": list(t.warnings),
        }


def _tenths(results: Sequence[Result]) -> dict[str, int]:
    """Return thousandths of the time by kind, 1000 in all: the largest has what rounding leaves."""
    cycles = dict.fromkeys(CERTAINTIES, 0)
    for result in results:
        cycles[result.certainty] += result.operator.count * result.after_cycles
    total = sum(cycles.values())
    if not total:
        return {}
    found = {kind: round(1000 * part / total) for kind, part in cycles.items()}
    largest = max(cycles, key=lambda kind: cycles[kind])
    found[largest] += 1000 - sum(found.values())
    return found


def failed(result: Result) -> bool:
    """Tell whether no candidate of an operator could be built."""
    trials = result.trace.trials if result.trace is not None else ()
    return bool(trials) and all(math.isinf(trial.cost) for trial in trials)


def ticks_best(trace: Trace) -> list[list[float]]:
    """Return the best-so-far curve as its steps: [trials done, cycles]."""
    steps: list[list[float]] = []
    for number, best in enumerate(trace.best_so_far, 1):
        if math.isfinite(best) and (not steps or best < steps[-1][1]):
            steps.append([number, best])
    return steps


def write_report(
    folder: str | Path, job: str, sections: Sequence[Data], now: datetime | None = None
) -> Path:
    """Write `aoe_result_{job}_{time}_pid{id}.json`, a section a network; raises `InputError`."""
    stamp = f"{now or datetime.now():%Y%m%d%H%M%S%f}"
    path = Path(folder) / f"aoe_result_{job}_{stamp}_pid{os.getpid()}.json"
    text = json.dumps(sections, indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(path, text + "\n")
    return path


def _ms(time_s: float) -> float:
    return round(time_s * 1e3, 9)


def _performance(before_s: float, after_s: float) -> Data:
    return {
        "model_baseline_performance(ms)": _ms(before_s),
        "model_performance_improvement": f"{(before_s - after_s) / after_s:.2%}",
        "model_result_performance(ms)": _ms(after_s),
    }


def _named(result: Result) -> Data:
    return {"op_name": result.operator.name, "op_type": result.operator.op}


def _times(result: Result) -> Data:
    us = 1e6 / result.operator.chip.clock_hz
    return {
        "performance_before_tune(us)": round(result.before_cycles * us, 6),
        "performance_after_tune(us)": round(result.after_cycles * us, 6),
        "performance_improvement": f"{result.gain:.2%}",
    }


def _detail(result: Result) -> Data:
    us = 1e6 / result.operator.chip.clock_hz
    bound, gap = result.bound_cycles, result.gap
    failures = result.trace.failures if result.trace else ()
    return {
        **_named(result),
        "count": result.operator.count,
        "unit": result.operator.unit,
        **_times(result),
        "bound(us)": None if bound is None else round(bound * us, 6),
        "gap_to_bound": None if gap is None else f"{gap:.2%}",
        "proven": result.proven,
        "source": result.source,
        "search": result.search,
        "trials": result.trials,
        "failed_trials": len(failures),
        "first_failure": failures[0].note if failures else "",
        "end": result.trace.end if result.trace else "",
        "note": result.note,
        "schedule": result.choice.as_dict() if result.choice else None,
        "ticks_best(cycles)": ticks_best(result.trace) if result.trace else [],
    }


_HEAD = (
    f"{'kernel':{LONGEST}} {'count':>5} {'before us':>10} {'after us':>10} {'gain':>8} "
    f"{'gap':>8} {'trials':>6}  found by"
)


def _row(result: Result) -> str:
    op, us = result.operator, 1e6 / result.operator.chip.clock_hz
    name = f"{op.name} ({op.op})"
    if len(name) > LONGEST:
        name = f"...{name[3 - LONGEST :]}"
    gap = "proven" if result.proven else "-" if result.gap is None else f"{result.gap:.2%}"
    how = f"{result.search} {result.source}".strip() if result.source != "none" else "default"
    note = f": {result.note}" if result.note else ""
    return (
        f"{name:{LONGEST}} {op.count:>5} {result.before_cycles * us:>10.3f} "
        f"{result.after_cycles * us:>10.3f} {result.gain:>8.2%} {gap:>8} "
        f"{result.trials:>6}  {how}{note}"
    )
