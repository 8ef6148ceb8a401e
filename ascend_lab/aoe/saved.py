"""Writes and reads the files of a tuning run: a report, the tuned model, its schedules.

The report gives improvements as (before - after) / after, as CANN's published reports do, and adds
how far each result is from its lower bound. All times are simulated; only `tuning_time(s)` was
measured with a clock.

The tuned model is a graph in ONNX, `NAME_tuned.onnx`, which has no schedules. These are in a second
file: the first line of `NAME_tuned.jsonl` names the chip and the number format. Each
further line is one kernel: the text of its operators and shapes (the key), and its schedule.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ascend_lab import __version__, limits, output
from ascend_lab.aoe.bank import BankKey, Outcome, chip_digest, records, repo_summary
from ascend_lab.aoe.drive import Settings, Trace
from ascend_lab.aoe.engine import NetworkResult, Tuning
from ascend_lab.aoe.entries import key_of
from ascend_lab.aoe.subgraph import SlicePlan, SubgraphResult, slicing
from ascend_lab.aoe.tuning import CERTAINTIES, Result, time_shares_permille
from ascend_lab.compiler import lower, simulate_graph, tasks
from ascend_lab.compiler.compile import Road
from ascend_lab.compiler.tasks import Compiled
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.machine.chip import Chip

GAIN_FORMULA = "(before - after) / after"
GAP_FORMULA = "after / bound - 1"
TUNED_SOURCES = ("tuned", "custom", "builtin")
"""Sources of results that a search or a bank gave."""
NAME_WIDTH = 30
"""Characters of an operator's name in the table; longer names lose their end."""
Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a tuning run as tables of text, and as JSON with the keys of CANN's report.

    `written` says, by key, which entries were added to the custom bank or updated there (see
    `Knowledge.written`); without it every improved operator counts as added.
    """

    name: str
    tuning: Tuning
    settings: Settings = field(default_factory=Settings)
    written: Mapping[BankKey, Outcome] | None = None

    def table(self) -> str:
        """Return the operators as a table, and the totals."""
        tuning = self.tuning
        chip = tuning.compiled.chip
        lines = [f"{self.name} on {chip.core_count} cores of {chip.name} (model results)"]
        if tuning.operators is not None:
            lines += [_TABLE_HEADER, *map(_row, tuning.operators.results), self.shares()]
        times = f"{tuning.baseline_s * 1e3:.6g} ms -> {tuning.result_s * 1e3:.6g} ms"
        total = f"total {times}, improved by {tuning.gain:.2%} = {GAIN_FORMULA}"
        bound = f"bound {tuning.bound_s * 1e3:.6g} ms, gap {tuning.gap:.2%} = {GAP_FORMULA}"
        return "\n".join([*lines, total, f"{bound} (it counts one launch and few waits)"])

    def top(self, count: int) -> str:
        """Return the operators that take the most time as a table, and the shares of the time."""
        tuned = self.tuning.operators
        if tuned is None:
            return ""
        # A kernel of 10 us that runs 12 times matters more than one of 50 us that runs once.
        rows = sorted(tuned.results, key=lambda r: -r.operator.count * r.after_cycles)
        left_out = [f"... and {len(rows) - count} more"] if len(rows) > count else []
        return "\n".join([_TABLE_HEADER, *map(_row, rows[:count]), *left_out, self.shares()])

    def shares(self) -> str:
        """Return the shares of the kernels' time that are proven optimal, bounded, or neither."""
        tuned = self.tuning.operators
        results = tuned.results if tuned is not None else ()
        # a proven kernel has no gap: the text gives the largest of the others that have a bound
        gap = max((r.gap for r in results if r.gap is not None and not r.proven), default=0.0)
        # "proven optimal" and "bounded" are printed even if their share is 0
        always_printed = CERTAINTIES[:2]
        share_texts = [
            f"{permille / 10:.1f} % {certainty}"
            for certainty, permille in time_shares_permille(results).items()
            if permille or certainty in always_printed
        ]
        text = ", ".join(share_texts) or "no kernels"
        text = text.replace("bounded", f"within {gap:.2%} of a bound")
        sliced = self.tuning.subgraph
        launch_note = " (all together have one)" if sliced and sliced.plan.one_launch else ""
        return f"time of the kernels, each alone with a launch of its own{launch_note}:\n  {text}"

    def as_dict(self) -> Data:
        """Return a section per job: "sgat" for the subgraph tuner, "opat" for the operators."""
        tuning = self.tuning
        sections = {}
        basic = {"tuning_name": self.name, "tuning_time(s)": round(tuning.spent_s)}
        outcome = "tuning incomplete" if tuning.interrupted else "tuning successful"
        if tuning.subgraph is not None:
            sections["sgat"] = {"basic": basic, **self._sgat(tuning.subgraph, outcome)}
        if tuning.operators is not None:
            sections["opat"] = {"basic": basic, **self._opat(tuning.operators, outcome)}
        return sections

    def _sgat(self, sliced: SubgraphResult, outcome: str) -> Data:
        """Return the section of the subgraph tuner, with the keys of CANN's report."""
        times = _performance(sliced)
        return {
            "SGAT": {**times, "sgat_tuning_result": outcome},
            "ascend_lab": {
                **self._common_fields(),
                "repo_summary": dict(repo_summary(self.tuning.outcomes)),
                "tried": sliced.tried,
                "slices": [str(region) for region in sliced.plan.regions],
                **{name: getattr(sliced.plan, name) for name in slicing.NETWORK_OPTIONS},
                "plan": sliced.plan.as_dict(),
            },
        }

    def _opat(self, network: NetworkResult, outcome: str) -> Data:
        """Return the section of the operator tuner, with the keys of CANN's report."""
        modified: dict[str, list[Data]] = {"add": [], "update": []}
        for r in network.results:
            if update_mode := self._modified(r):
                # CANN's report gives the times of an operator twice: once for the operator, and
                # again for each thing that was tuned. Here that is always its schedule.
                schedule = {"Schedule": {**_time_fields(r), "update_mode": update_mode}}
                row = {**_name_fields(r), **_time_fields(r), "tune_performance": schedule}
                modified[update_mode].append(row)
        tuned = [r for r in network.results if r.source in TUNED_SOURCES]
        return {
            "OPAT": {
                **_performance(network),
                "opat_tuning_result": outcome,
                "repo_modified_operators": {
                    f"{update_mode}_repo_operators": rows for update_mode, rows in modified.items()
                },
                "repo_summary": dict(repo_summary(network.outcomes)),
                "tune_failed_operators": [_name_fields(r) for r in network.results if failed(r)],
            },
            "ascend_lab": {
                **self._common_fields(),
                "operators_tuned": len(tuned),
                "operators_proven": sum(r.proven for r in tuned),
                "operators": [_detail(r) for r in tuned],
                "untuned_operators": [
                    {**_name_fields(r), "reason": r.note}
                    for r in network.results
                    if r.source not in TUNED_SOURCES
                ],
            },
        }

    def _modified(self, result: Result) -> str:
        """Return whether an operator was added to the bank ("add"), updated there, or neither."""
        if result.source != "tuned":
            return ""
        if self.written is None:
            return "add" if result.choice else ""
        outcome = self.written.get(key_of(result.operator), "")
        return outcome if outcome in ("add", "update") else ""

    def _common_fields(self) -> Data:
        """Return the fields that both jobs add to the published report."""
        tuning = self.tuning
        return {
            "note": "times are results of the model, not measurements",
            "chip": tuning.compiled.chip.name,
            "core_count": tuning.compiled.chip.core_count,
            "jobs": list(tuning.jobs),
            "tool_version": __version__,
            "seed": self.settings.seed,
            "budget": self.settings.budget,
            "improvement_formula": GAIN_FORMULA,
            "baseline(ms)": _ms(tuning.baseline_s),
            "result(ms)": _ms(tuning.result_s),
            "improvement": f"{tuning.gain:.2%}",
            "bound(ms)": _ms(tuning.bound_s),
            "gap_to_bound": f"{tuning.gap:.2%}",
            "gap_formula": GAP_FORMULA,
            "bound_s": tuning.bound_s,
            "gap": tuning.gap,
            "ledger_before": dict(tuning.ledgers.before),
            "ledger_after": dict(tuning.ledgers.after),
            "warnings": list(tuning.warnings),
        }


def failed(result: Result) -> bool:
    """Tell whether no candidate of an operator could be built."""
    trials = result.trace.trials if result.trace is not None else ()
    return bool(trials) and all(math.isinf(trial.cost) for trial in trials)


def ticks_best(trace: Trace) -> list[list[float]]:
    """Return the points where the best-so-far curve falls, each as [trials done, cycles]."""
    steps: list[list[float]] = []
    for number, best in enumerate(trace.best_so_far, 1):
        # A curve of 2,000 trials has a dozen steps: [1, 5200], [4, 4800], ...
        if math.isfinite(best) and (not steps or best < steps[-1][1]):
            steps.append([number, best])
    return steps


def write_report(
    folder: str | Path, job: str, sections: Sequence[Data], now: datetime | None = None
) -> Path:
    """Write `aoe_result_{job}_{time}_pid{id}.json`, one section per network, and return its path.

    Raises `InputError` if the file cannot be written.
    """
    # with microseconds, so that two runs within a second write two files
    stamp = f"{now or datetime.now():%Y%m%d%H%M%S%f}"
    path = Path(folder) / f"aoe_result_{job}_{stamp}_pid{os.getpid()}.json"
    text = json.dumps(sections, indent=2, ensure_ascii=False, allow_nan=False)
    output.write_whole(path, text + "\n")
    return path


def _ms(time_s: float) -> float:
    # 9 digits of a millisecond are picoseconds: finer than a cycle, and free of the noise of floats
    return round(time_s * 1e3, 9)


def _performance(result: SubgraphResult | NetworkResult) -> Data:
    """Return the times of a whole network, with the keys of CANN's report."""
    return {
        "model_baseline_performance(ms)": _ms(result.before_s),
        "model_performance_improvement": f"{result.gain:.2%}",
        "model_result_performance(ms)": _ms(result.after_s),
    }


def _name_fields(result: Result) -> Data:
    return {"op_name": result.operator.name, "op_type": result.operator.op}


def _time_fields(result: Result) -> Data:
    """Return an operator's times before and after tuning, with the keys of CANN's report."""
    us = 1e6 / result.operator.chip.clock_hz
    return {
        "performance_before_tune(us)": round(result.before_cycles * us, 6),
        "performance_after_tune(us)": round(result.after_cycles * us, 6),
        "performance_improvement": f"{result.gain:.2%}",
    }


def _detail(result: Result) -> Data:
    """Return what this package adds about an operator: bound, trials, schedule."""
    us = 1e6 / result.operator.chip.clock_hz
    bound = result.bound_cycles
    gap = result.gap
    failures = result.trace.failures if result.trace else ()
    return {
        **_name_fields(result),
        "count": result.operator.count,
        "unit": result.operator.unit,
        **_time_fields(result),
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


_TABLE_HEADER = (
    f"{'kernel':{NAME_WIDTH}} {'count':>5} {'us before':>9} {'after':>8} {'gain':>7} {'gap':>7}  "
    "found by, tried"
)


def _row(result: Result) -> str:
    """Return the table's row of a kernel; a note, if it has one, follows on a second line."""
    op = result.operator
    us = 1e6 / result.operator.chip.clock_hz
    name = limits.labelled(op.name, op.op, NAME_WIDTH)
    # "proven", the gap to a bound, or "-" where there is no bound
    gap = "proven" if result.proven else "-" if result.gap is None else f"{result.gap:.2%}"
    source = f"{result.search}, {result.trials}" if result.trials else result.source
    source = source if result.source != "none" else "default"
    note = f"\n    {result.note}" if result.note else ""
    return (
        f"{name:{NAME_WIDTH}} {op.count:>5} {result.before_cycles * us:>9.2f} "
        f"{result.after_cycles * us:>8.2f} {result.gain:>7.2%} {gap:>7}  {source}{note}"
    )


# -- the tuned model ------------------------------------------------------------------------------
FORMAT = "ascend_lab tuned schedules"
VERSION = 1
HEADER_FIELDS = {
    "format": (FORMAT,),
    "version": limits.Range(int, VERSION, VERSION),
    "chip": str,
    "chip_digest": str,
    "core_count": limits.Range(int, 1, limits.COUNT),
    "dtype": str,
}
"""Keys of the first line; the options of `slicing.NETWORK_OPTIONS` may follow."""
DEFAULT_PLAN = SlicePlan()
"""The plan in which no tensor is sliced and every kernel has a separate launch."""


@dataclass(frozen=True, slots=True)
class Schedules:
    """Schedules as read from a file, for a chip and a number format.

    `choices` are the schedules by the key of a kernel (`Piece.key`); `launches` says whether the
    kernels share a launch.
    """

    chip: str
    chip_digest: str
    core_count: int
    dtype: str
    choices: Mapping[str, lower.Choice]
    launches: SlicePlan = DEFAULT_PLAN

    def applied(self, compiled: Compiled) -> Compiled:
        """Return a compiled network with these schedules in place of its own.

        It must have been compiled on `launches.road`. Raises `InputError` if the schedules are for
        another chip, or if no kernel of the network has one.
        """
        chip = compiled.chip
        tuned_chip = (self.chip, self.core_count, self.chip_digest)
        this_chip = (chip.name, chip.core_count, chip_digest(chip))
        if tuned_chip != this_chip:
            # equal name and cores but another digest: somebody has edited the file of the chip
            numbers = "" if tuned_chip[:2] != this_chip[:2] else ", with other numbers in its file"
            needed = f"the chip these schedules are for, {self.core_count} cores of {self.chip}"
            got = f"{chip.core_count} cores of {chip.name}{numbers}"
            raise InputError(needed, got, "use that chip, or tune for this one")
        keys = {task.piece.key for task in compiled.tasks if task.lowered is not None}
        # A network that shares not a single kernel with the file is another model.
        if self.choices and not keys & self.choices.keys():
            got = f"schedules of {len(self.choices)} kernels, none of them in {compiled.graph.name}"
            raise InputError("schedules for this model", got, "simulate the tuned model beside it")
        return self.launches.with_launches(tasks.with_choices(compiled, self.choices))


@dataclass(frozen=True, slots=True)
class Saved:
    """The files of a tuned model, and its simulated time after both have been read back."""

    model: Path
    schedules: Path
    time_s: float


def save_tuned(folder: str | Path, name: str, tuning: Tuning, dtype: str = "fp16") -> Saved:
    """Write NAME_tuned.jsonl (schedules) and NAME_tuned.onnx (graph), and read both back to check.

    Raises `InputError` if a file cannot be written, and `UnsupportedError` for a graph that ONNX
    cannot express; the schedules are written even then. Neither file is left half written.
    """
    from ascend_lab.compiler.onnx import export_onnx, import_onnx

    model, schedules = (Path(folder) / f"{name}_tuned.{end}" for end in ("onnx", "jsonl"))
    chip = tuning.compiled.chip
    tuned = tuning.operators
    # Schedules that do not help the network are not part of the tuned model.
    helpful_results = tuned.results if tuned and tuned.after_s < tuned.before_s else ()
    choices = {r.operator.piece.key: r.choice for r in helpful_results if r.choice is not None}
    plan = tuning.subgraph.plan if tuning.subgraph else DEFAULT_PLAN
    write_schedules(schedules, choices, chip, dtype, plan)
    output.write_whole(model, export_onnx(tuning.graph, fill_nodes=True).SerializeToString())
    read_back = plan.road(chip, Road(dtype=dtype)).stages(import_onnx(model), chip).compiled
    named_choices = as_named_in(read_back, tuning.compiled, choices)
    # Some kernels have other keys when the ONNX file is read: the schedules are written under both.
    if named_choices.keys() - choices.keys():
        write_schedules(schedules, named_choices, chip, dtype, plan)
    tuned_network = plan.with_launches(tasks.with_choices(read_back, named_choices))
    return Saved(model, schedules, simulate_graph(tuned_network).time_s)


def as_named_in(
    read_back: Compiled, tuned: Compiled, choices: Mapping[str, lower.Choice]
) -> dict[str, lower.Choice]:
    """Return the choices, with further keys for kernels that get another key through ONNX.

    ONNX has, for instance, no product with a transposed constant: it is read back as a plain
    product, whose key differs. Kernels correspond by their order; a choice that does not fit the
    other form is left out.
    """
    renamed = dict(choices)
    # If the numbers of kernels differ, their order does not show which kernels correspond.
    if len(read_back.tasks) != len(tuned.tasks):
        return renamed
    for read_task, tuned_task in zip(read_back.tasks, tuned.tasks, strict=True):
        choice = choices.get(tuned_task.piece.key)
        key = read_task.piece.key
        if choice is None or read_task.op != tuned_task.op or key in renamed:
            continue
        with suppress(AscendLabError):  # raised by a choice that does not fit the other form
            tasks.with_choices(replace(read_back, tasks=(read_task,)), {key: choice})
            renamed[key] = choice
    return renamed


def write_schedules(
    file: Path,
    choices: Mapping[str, lower.Choice],
    chip: Chip,
    dtype: str,
    plan: SlicePlan = DEFAULT_PLAN,
) -> None:
    """Write schedules by `Piece.key`; raises `InputError` if that is not possible."""
    header: Data = {"format": FORMAT, "version": VERSION, "chip": chip.name}
    header |= {"chip_digest": chip_digest(chip), "core_count": chip.core_count, "dtype": dtype}
    header |= {name: getattr(plan, name) for name in slicing.NETWORK_OPTIONS}
    lines = [header]
    # sorted, so that equal schedules give equal files
    for key, choice in sorted(choices.items()):
        lines.append({"kernel": key, "schedule": choice.as_dict()})
    output.write_whole(file, "".join(json.dumps(line) + "\n" for line in lines))


def read_schedules(file: str | Path) -> Schedules:
    """Return the schedules in a file; raise `InputError` naming the line that is wrong."""
    try:
        lines = records.read_file(file).decode("utf-8").splitlines()
    except ValueError as error:
        raise InputError(f"a file of schedules: {file}", str(error), "check the name") from None
    header = _header(file, lines[0] if lines else "")
    choices = {}
    # lines are counted from 1, and the first is the header
    for number, line in enumerate(lines[1:], 2):
        where = f"{file} line {number}"
        data = limits.json_of(line, where, "tune the model again")
        try:
            choices[str(data["kernel"])] = lower.choice_of(data["schedule"], header["chip"])
        except (KeyError, TypeError, InputError) as error:
            needed = f"{where}: a kernel and its schedule"
            raise InputError(needed, str(error), "tune the model again") from None
    # Files of earlier versions lack the options that came later.
    options = {name: header.get(name, False) for name in slicing.NETWORK_OPTIONS}
    return Schedules(
        chip=header["chip"],
        chip_digest=header["chip_digest"],
        core_count=header["core_count"],
        dtype=header["dtype"],
        choices=choices,
        launches=SlicePlan((), **options),
    )


def _header(file: str | Path, line: str) -> Data:
    """Return the first line as a dict; raise `InputError` if a key is wrong or missing."""
    where = f"{file} line 1"
    header = limits.json_of(line, where, "name a NAME_tuned.jsonl")
    is_object = isinstance(header, dict)
    if not is_object or (header.get("format"), header.get("version")) != (FORMAT, VERSION):
        remedy = "name the NAME_tuned.jsonl that `aoe` wrote; a bank's export goes where banks go"
        raise InputError(f"{file}: a first line that says {FORMAT}, {VERSION}", "none", remedy)
    options = dict.fromkeys(slicing.NETWORK_OPTIONS, bool)
    decoded: Data = limits.decoded(HEADER_FIELDS | options, header, where)
    missing = [key for key in HEADER_FIELDS if key not in decoded]
    if missing:
        needed = f"{where}: {', '.join(HEADER_FIELDS)}"
        raise InputError(needed, f"no {missing[0]}", "tune the model again")
    return decoded
