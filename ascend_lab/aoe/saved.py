"""The tuned model on disk: the graph as ONNX, and the schedules of its kernels as JSON Lines.

The first line of `NAME_tuned.jsonl` says for which chip and number format; each other line is one
kernel: its piece as text (the key, equal for equal kernels) and its schedule.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ascend_lab.aoe.bank import Knowledge, Outcome, chip_digest
from ascend_lab.aoe.bank.records import read_file, read_lines
from ascend_lab.aoe.engine import Tuning
from ascend_lab.aoe.network import NetworkResult, from_bank, key_of, together
from ascend_lab.aoe.operators import operators_of
from ascend_lab.aoe.subgraph import SlicePlan
from ascend_lab.aoe.subgraph.slicing import HOW
from ascend_lab.aoe.tuning import untuned
from ascend_lab.chip import Chip
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.graph import Compiled, Road, simulate_graph
from ascend_lab.graph.lower import Choice, choice_of
from ascend_lab.graph.tasks import with_choices
from ascend_lab.output import write_whole

FORMAT, VERSION = "ascend_lab tuned schedules", 1
WHOLE = SlicePlan()
"""Kernels launched as by default."""


@dataclass(frozen=True, slots=True)
class Schedules:
    """Schedules by `Piece.key`, what they were tuned for, and how kernels are launched."""

    chip: str
    chip_digest: str
    core_count: int
    dtype: str
    choices: Mapping[str, Choice]
    launches: SlicePlan = WHOLE

    def applied(self, compiled: Compiled) -> Compiled:
        """Return a network, compiled on `launches.road`, with these schedules.

        Raises `InputError` for other chips or kernels.
        """
        chip = compiled.chip
        mine = (self.chip, self.core_count, self.chip_digest)
        given = (chip.name, chip.core_count, chip_digest(chip))
        if mine != given:
            numbers = "" if mine[:2] != given[:2] else ", with other numbers in its file"
            needed = f"the chip these schedules are for, {self.core_count} cores of {self.chip}"
            got = f"{chip.core_count} cores of {chip.name}{numbers}"
            raise InputError(needed, got, "use that chip, or tune for this one")
        keys = {task.piece.key for task in compiled.tasks if task.lowered is not None}
        if self.choices and not keys & self.choices.keys():
            got = f"schedules of {len(self.choices)} kernels, none of them in {compiled.graph.name}"
            raise InputError("schedules for this model", got, "simulate the tuned model beside it")
        return self.launches.launched(with_choices(compiled, self.choices))


@dataclass(frozen=True, slots=True)
class Saved:
    """The files of a tuned model, and the time they give when they are read again."""

    model: Path
    schedules: Path
    time_s: float


def save_tuned(folder: str | Path, name: str, tuning: Tuning, dtype: str = "fp16") -> Saved:
    """Write NAME_tuned.jsonl and NAME_tuned.onnx, and read them again.

    Raises `InputError` if a file cannot be written, `UnsupportedError` for a graph that ONNX
    cannot hold; schedules are written then. Neither file is left half written.
    """
    from ascend_lab.graph.onnx import export_onnx, import_onnx

    model, schedules = (Path(folder) / f"{name}_tuned.{end}" for end in ("onnx", "jsonl"))
    chip, found = tuning.compiled.chip, tuning.operators
    better = found.results if found and found.after_s < found.before_s else ()
    choices = {r.operator.piece.key: r.choice for r in better if r.choice is not None}
    plan = tuning.subgraph.plan if tuning.subgraph else WHOLE
    write_schedules(schedules, choices, chip, dtype, plan)
    write_whole(model, export_onnx(tuning.graph, fill_nodes=True).SerializeToString())
    again = plan.road(chip, Road(dtype=dtype)).stages(import_onnx(model), chip).compiled
    own = as_named_in(again, tuning.compiled, choices)
    if own.keys() - choices.keys():
        write_schedules(schedules, own, chip, dtype, plan)
    tuned = plan.launched(with_choices(again, own))
    return Saved(model, schedules, simulate_graph(tuned).time_s)


def as_named_in(
    again: Compiled, tuned: Compiled, choices: Mapping[str, Choice]
) -> dict[str, Choice]:
    """Return the choices with those for kernels that a file states in other words.

    ONNX has no product with a transposed constant, for instance: it is read as the plain product.
    Kernels correspond by their order; a choice that does not suit the other words is left out.
    """
    found = dict(choices)
    if len(again.tasks) != len(tuned.tasks):
        return found
    for new, old in zip(again.tasks, tuned.tasks, strict=True):
        choice = choices.get(old.piece.key)
        if choice is not None and new.op == old.op and new.piece.key not in found:
            try:
                with_choices(replace(again, tasks=(new,)), {new.piece.key: choice})
            except AscendLabError:
                continue
            found[new.piece.key] = choice
    return found


def write_schedules(
    file: Path, choices: Mapping[str, Choice], chip: Chip, dtype: str, plan: SlicePlan = WHOLE
) -> None:
    """Write schedules by `Piece.key`; raises `InputError` if that is not possible."""
    head = {"format": FORMAT, "version": VERSION, "chip": chip.name}
    head |= {"chip_digest": chip_digest(chip), "core_count": chip.core_count, "dtype": dtype}
    head |= {name: getattr(plan, name) for name in HOW}
    lines = [head, *({"kernel": k, "schedule": c.as_dict()} for k, c in sorted(choices.items()))]
    write_whole(file, "".join(json.dumps(line) + "\n" for line in lines))


def read_schedules(file: str | Path) -> Schedules:
    """Return the schedules in a file; raise `InputError` naming the line that is wrong."""
    try:
        lines = read_file(file).decode("utf-8").splitlines()
    except (InputError, ValueError) as error:
        raise InputError(f"a file of schedules: {file}", str(error), "check the name") from None
    head = _record(file, 1, lines[0] if lines else "")
    if head.get("format") != FORMAT or head.get("version") != VERSION:
        remedy = "name the NAME_tuned.jsonl that `aoe` wrote; a bank's export goes where banks go"
        raise InputError(f"{file}: a first line that says {FORMAT}, {VERSION}", "none", remedy)
    choices = {}
    for number, line in enumerate(lines[1:], 2):
        data = _record(file, number, line)
        try:
            choices[str(data["kernel"])] = choice_of(data["schedule"], str(head["chip"]))
        except (KeyError, TypeError, InputError) as error:
            what = f"{file} line {number}: a kernel and its schedule"
            raise InputError(what, str(error), "tune the model again") from None
    try:
        words = [str(head[name]) for name in ("chip", "chip_digest", "dtype")]
        launches = SlicePlan((), **{name: head.get(name) is True for name in HOW})
        return Schedules(words[0], words[1], int(head["core_count"]), words[2], choices, launches)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{file} line 1: chip, chip_digest, core_count and dtype"
        raise InputError(what, str(error), "tune the model again") from None


def _record(file: str | Path, number: int, line: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
        if isinstance(data, dict):
            return data
        got = type(data).__name__
    except (ValueError, RecursionError) as error:
        got = str(error)
    raise InputError(f"{file} line {number}: a JSON object", got, "name a NAME_tuned.jsonl")


def bank_at(path: str | Path) -> Knowledge:
    """Return the bank in a file (of `aoe bank`, or exported as .jsonl), or of "builtin" alone.

    The built-in bank answers what a bank's file does not. What is read stays as it is. Rows and
    lines that are no entries are passed over with a warning. Raises `InputError` for anything else.
    """
    if str(path) == "builtin":
        return Knowledge(None)
    if Path(path).suffix == ".jsonl":
        knowledge = Knowledge(None)
        entries, wrong = read_lines(path)
        if wrong and not entries:
            raise wrong[0]
        for entry in entries:
            knowledge.keep(entry)
        passed = f"{len(wrong)} lines of {path} are no entries and are passed over"
        knowledge.warnings += [passed] if wrong else []
        return knowledge
    return Knowledge(path, write=False)


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
