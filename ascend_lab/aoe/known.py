"""Between tuning and the bank: keys of operators, entries of results, what a bank suggests."""

from __future__ import annotations

import math
from contextlib import suppress
from datetime import UTC, datetime

from ascend_lab import __version__
from ascend_lab.aoe.bank import BankEntry, BankKey, Knowledge, chip_digest
from ascend_lab.aoe.operators import Operator
from ascend_lab.aoe.settings import Settings
from ascend_lab.aoe.tuning import Result
from ascend_lab.aoe.vector.prior import DECISIONS
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.graph.lower import Choice, choice_of

NEAR = 3
"""Schedules of like shapes that a search begins with."""


SIZES = ("base_m", "base_n", "base_k", "step_k", "grid_rows", "grid_cols")
"""What a tiling must have; the rest of it is checked when it is lowered."""


def key_of(operator: Operator) -> BankKey:
    """Return the bank's key of an operator."""
    chip = operator.chip
    return BankKey(
        chip.name, chip_digest(chip), chip.core_count, "op", operator.op, operator.problem
    )


def features_of(operator: Operator) -> tuple[float, ...]:
    """Return the base-2 logarithms of all sizes of what an operator reads and writes."""
    graph = operator.piece.graph
    types = [graph.types[n] for n in (*graph.inputs, *graph.outputs)]
    return tuple(math.log2(max(size, 1)) for kind in types for size in kind.shape)


def entry_of(result: Result, settings: Settings) -> BankEntry:
    """Return what the bank keeps of a result; without a schedule the default is the best known."""
    choice = result.choice.as_dict() if result.choice else {}
    if choice and result.decisions:
        choice |= {DECISIONS: result.decisions}
    return BankEntry(
        key_of(result.operator),
        choice,
        result.before_cycles,
        result.after_cycles,
        result.bound_cycles,
        result.proven,
        result.search,
        settings.seed,
        result.trials,
        __version__,
        datetime.now(UTC).isoformat(timespec="seconds"),
        features=features_of(result.operator),
    )


def from_bank(operator: Operator, entry: BankEntry, origin: str) -> Result:
    """Return a bank's entry as a result, timed again on this operator.

    A schedule that no longer lowers, or is no longer faster, is not used, and the result says so.
    """
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


def suggestions(operator: Operator, knowledge: Knowledge) -> list[Choice]:
    """Return the schedules of the nearest shapes that a bank knows."""
    found = []
    for entry in knowledge.nearest(key_of(operator), features_of(operator), NEAR):
        with suppress(AscendLabError):  # a bank that others wrote may hold anything
            found += [_choice(entry, operator)] if entry.schedule else []
    return found


def _choice(entry: BankEntry, operator: Operator) -> Choice:
    """Return the choice an entry keeps; raise `InputError` if it is none."""
    choice = choice_of(entry.schedule, operator.chip.name)
    numbers = [getattr(choice.tiling, name) for name in SIZES] if choice.tiling else []
    if any(type(n) is not int or n < 1 for n in numbers):
        raise InputError("a tiling of whole numbers", str(numbers), "tune it again")
    return choice
