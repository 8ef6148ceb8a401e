"""Converts results of operator tuning to entries of the knowledge bank, and entries to results.

If the bank has an entry for the same operator, shape and chip, a later run times its schedule again
and uses it. If not, the schedules of similar shapes are the first points of the search.
"""

import math
from contextlib import suppress

from ascend_lab.aoe.bank import BankEntry, BankKey, Knowledge
from ascend_lab.aoe.drive import Settings
from ascend_lab.aoe.operators import Tunable
from ascend_lab.aoe.tuning import Result
from ascend_lab.compiler.lower import Choice, choice_of
from ascend_lab.errors import AscendLabError, InputError

HINT_COUNT = 3
"""A search begins with the schedules of this many similar shapes."""
POSITIVE_FIELDS = ("base_m", "base_n", "base_k", "step_k", "grid_rows", "grid_cols")
"""The fields that must be positive integers; lowering checks the other fields of a tiling."""


def key_of(operator: Tunable) -> BankKey:
    """Return the bank's key of an operator."""
    return BankKey.of(operator.chip, "op", operator.op, operator.problem)


def features_of(operator: Tunable) -> tuple[float, ...]:
    """Return the base-2 logarithms of all tensor sizes that an operator reads and writes."""
    graph = operator.piece.graph
    # A product of (512, 1024) by (1024, 256) into (512, 256) has the features 9, 10, 10, 8, 9, 8.
    # Twice the rows (1024, 1024) change two of them by 1.
    types = [graph.types[n] for n in (*graph.inputs, *graph.outputs)]
    sizes = [size for tensor_type in types for size in tensor_type.shape]
    return tuple(math.log2(max(size, 1)) for size in sizes)


def entry_of(result: Result, settings: Settings) -> BankEntry:
    """Return a result as an entry of the bank; an empty schedule means that the default is best."""
    choice = result.choice.as_dict() if result.choice else {}
    return BankEntry(
        key=key_of(result.operator),
        schedule=choice,
        before_cycles=result.before_cycles,
        after_cycles=result.after_cycles,
        bound_cycles=result.bound_cycles,
        proven=result.proven,
        search=result.search,
        seed=settings.seed,
        trials=result.trials,
        features=features_of(result.operator),
    )


def from_bank(operator: Tunable, entry: BankEntry, origin: str) -> Result:
    """Return an entry of the bank as the result of an operator; its schedule is timed again.

    A schedule that cannot be lowered or is not faster than the default is dropped. `origin` is
    "custom" or "builtin". An entry marked as proven stays proven only if the time is unchanged.
    """
    default_cycles = operator.default_cycles
    choice = None
    note = ""
    best_cycles = default_cycles
    if entry.schedule:
        try:
            stored_choice = _choice(entry, operator)
            cycles = operator.cycles_of(stored_choice)
            if cycles < default_cycles:
                choice = stored_choice
                best_cycles = cycles
        except AscendLabError as error:
            note = f"the bank's schedule does not fit: {error}"
    # A lower bound cannot be above a time that was reached.
    bound = min(entry.bound_cycles, best_cycles) if entry.bound_cycles is not None else None
    proven = entry.proven and best_cycles == entry.after_cycles
    return Result(
        operator=operator,
        choice=choice,
        before_cycles=default_cycles,
        after_cycles=best_cycles,
        bound_cycles=bound,
        proven=proven,
        source=origin,
        note=note,
        search=entry.search,
    )


def suggestions(operator: Tunable, knowledge: Knowledge) -> list[Choice]:
    """Return the schedules that the bank stores for the most similar shapes."""
    choices = []
    for entry in knowledge.nearest(key_of(operator), features_of(operator), HINT_COUNT):
        with suppress(AscendLabError):  # a bank written by another version may hold any schedule
            choices += [_choice(entry, operator)] if entry.schedule else []
    return choices


def _choice(entry: BankEntry, operator: Tunable) -> Choice:
    """Return the choice in an entry; raise `InputError` unless its tiling has positive integers."""
    choice = choice_of(entry.schedule, operator.chip.name)
    numbers = [getattr(choice.tiling, name) for name in POSITIVE_FIELDS] if choice.tiling else []
    if any(type(n) is not int or n < 1 for n in numbers):
        raise InputError("a tiling of whole numbers", str(numbers), "tune it again")
    return choice
