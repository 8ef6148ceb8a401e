"""Results of tuning as entries of the knowledge bank, and entries as results.

A later run takes the entry of the same problem as its result, after timing it again, and the
schedules of similar shapes as points to begin a search with.
"""

import math
from contextlib import suppress

from ascend_lab.aoe.bank import BankEntry, BankKey, Knowledge
from ascend_lab.aoe.drive import Settings
from ascend_lab.aoe.operators import Tunable
from ascend_lab.aoe.tuning import Result
from ascend_lab.compiler.lower import Choice, choice_of
from ascend_lab.errors import AscendLabError, InputError

NEAR = 3
"""A search begins with the schedules of this many similar shapes."""
SIZES = ("base_m", "base_n", "base_k", "step_k", "grid_rows", "grid_cols")
"""The fields that must be positive integers; lowering checks the other fields of a tiling."""


def key_of(operator: Tunable) -> BankKey:
    """Return the bank's key of an operator."""
    return BankKey.of(operator.chip, "op", operator.op, operator.problem)


def features_of(operator: Tunable) -> tuple[float, ...]:
    """Return the base-2 logarithms of all sizes of what an operator reads and writes."""
    graph = operator.piece.graph
    # A product of (512, 1024) by (1024, 256) into (512, 256) has the features 9, 10, 10, 8, 9, 8:
    # the nearest shapes of the bank are those that differ by the fewest doublings.
    types = [graph.types[n] for n in (*graph.inputs, *graph.outputs)]
    return tuple(math.log2(max(size, 1)) for kind in types for size in kind.shape)


def entry_of(result: Result, settings: Settings) -> BankEntry:
    """Return the bank's entry of a result; an empty schedule says that the default is the best."""
    choice = result.choice.as_dict() if result.choice else {}
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
        features=features_of(result.operator),
    )


def from_bank(operator: Tunable, entry: BankEntry, origin: str) -> Result:
    """Return the result of a bank's entry, timed again: one that does not fit or help is dropped.

    The bound stays valid. The proof does only if the time is still the one that was proven.
    """
    default_cycles = operator.default_cycles
    choice = None
    note = ""
    best_cycles = default_cycles
    if entry.schedule:
        try:
            choice = _choice(entry, operator)
            cycles = operator.cycles_of(choice)
            choice, best_cycles = (
                (choice, cycles) if cycles < default_cycles else (None, default_cycles)
            )
        except AscendLabError as error:
            choice = None
            note = f"the bank's schedule does not fit: {error}"
    # Another version of the chip file may run the schedule faster than the bound that was stored.
    bound = min(entry.bound_cycles, best_cycles) if entry.bound_cycles is not None else None
    proven = entry.proven and best_cycles == entry.after_cycles
    return Result(
        operator, choice, default_cycles, best_cycles, bound, proven, origin, note, entry.search
    )


def suggestions(operator: Tunable, knowledge: Knowledge) -> list[Choice]:
    """Return the schedules of the nearest shapes that a bank knows."""
    choices = []
    for entry in knowledge.nearest(key_of(operator), features_of(operator), NEAR):
        with suppress(AscendLabError):  # a bank that others wrote may hold anything
            choices += [_choice(entry, operator)] if entry.schedule else []
    return choices


def _choice(entry: BankEntry, operator: Tunable) -> Choice:
    """Return the choice in an entry; raise `InputError` if its tiling is not made of integers."""
    choice = choice_of(entry.schedule, operator.chip.name)
    numbers = [getattr(choice.tiling, name) for name in SIZES] if choice.tiling else []
    if any(type(n) is not int or n < 1 for n in numbers):
        raise InputError("a tiling of whole numbers", str(numbers), "tune it again")
    return choice
