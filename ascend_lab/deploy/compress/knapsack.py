"""Chooses a number format for each layer: the least time within a budget of error, exactly.

    minimise sum of time(layer, format)   where   sum of error(layer, format) <= budget

This is a multiple-choice knapsack: exactly one option is taken for each layer. Dynamic programming
goes layer by layer and keeps states (time, error) of the layers so far. It drops a state if

- another state is not worse in both, or
- even with fractions of options for the other layers it cannot be faster than a known mix.

So the result is exact. Source: Kellerer, Pferschy, Pisinger: Knapsack Problems (2004), chapter 11.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ascend_lab.compiler import ir
from ascend_lab.errors import InputError

MAX_STATES = 2_000_000
"""Most states that are kept at once; a problem that needs more is refused."""


# -- the options of each layer --------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Option:
    """A format for a layer: its seconds, and the squared error it adds to the output."""

    format: str
    time_s: float
    error: float


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and the formats it may have."""

    name: str
    options: tuple[Option, ...]

    def __post_init__(self) -> None:
        numbers = [n for option in self.options for n in (option.time_s, option.error)]
        if not self.options or not all(math.isfinite(n) and n >= 0 for n in numbers):
            raise InputError(f"{self.name}: options of finite times and errors", str(numbers)[:60])


@dataclass(frozen=True, slots=True)
class Mix:
    """A format for each layer, and the sums of times and errors."""

    formats: Mapping[str, str]
    time_s: float
    error: float


def mix_of(layers: Sequence[Layer], choices: Sequence[int]) -> Mix:
    """Return the mix with the option number `choices[i]` for layer i."""
    options = [layer.options[choice] for layer, choice in zip(layers, choices, strict=True)]
    formats = {layer.name: option.format for layer, option in zip(layers, options, strict=True)}
    return Mix(
        formats,
        math.fsum(option.time_s for option in options),
        math.fsum(option.error for option in options),
    )


# -- the search -----------------------------------------------------------------------------------
def fastest(layers: Sequence[Layer], budget: float) -> Mix:
    """Return the mix of least time with at most `budget` of error; of equals that of least error.

    Raises `InputError` if even the most exact formats exceed the budget.
    """
    least_error = math.fsum(min(o.error for o in layer.options) for layer in layers)
    if not budget >= least_error * (1 - 1e-12):
        needed = "a budget that the exact formats keep"
        raise InputError(needed, f"{budget:g} below {least_error:g}")
    hulls = _remaining_hulls(layers)
    known_time = _greedy_time(layers, budget)
    # Sums of floats depend on their order in the last digits: states within these margins of a
    # bound are kept, so that rounding cannot lose the best one. The margin of time
    # adds seconds and errors as plain numbers.
    time_margin = 1e-9 * (known_time + budget)
    error_margin = 1e-12 * budget
    times = np.zeros(1)
    errors = np.zeros(1)
    steps: list[tuple[ir.Values, ir.Values]] = []
    for number, layer in enumerate(layers):
        option_count = len(layer.options)
        option_times = np.array([o.time_s for o in layer.options])
        option_errors = np.array([o.error for o in layer.options])
        # every state with every option: state i with option j stands at i * option_count + j
        new_times = (times[:, None] + option_times).ravel()
        new_errors = (errors[:, None] + option_errors).ravel()
        error_left = budget + error_margin - new_errors
        hull_errors, hull_times = hulls[number + 1]
        # the least time of the later layers, with fractions of options; infinite if none fits
        remaining_times = np.where(
            error_left < hull_errors[0], np.inf, np.interp(error_left, hull_errors, hull_times)
        )
        promising = np.flatnonzero(new_times + remaining_times <= known_time + time_margin)
        survivors = promising[_undominated(new_times[promising], new_errors[promising])]
        if len(survivors) > MAX_STATES:
            needed = f"at most {MAX_STATES} states"
            raise InputError(needed, str(len(survivors)), "round the errors")
        times = new_times[survivors]
        errors = new_errors[survivors]
        steps.append((survivors // option_count, survivors % option_count))
    return mix_of(layers, _choices(steps, int(np.lexsort((errors, times))[0])))


def _choices(steps: Sequence[tuple[ir.Values, ir.Values]], state: int) -> list[int]:
    """Return the option of each layer on the way to a last state, walking back from it.

    Each step holds, for the states that it kept, the previous state and the option taken.
    """
    choices = []
    for previous_states, options in reversed(steps):
        choices.append(int(options[state]))
        state = int(previous_states[state])
    return choices[::-1]


def _undominated(times: ir.Values, errors: ir.Values) -> ir.Values:
    """Return the indices, by time, of states that no other beats; of equal ones the first."""
    # by time, a state is worth keeping if its error is below all errors of faster states
    order = np.lexsort((errors, times))
    least_before = np.minimum.accumulate(np.append(np.inf, errors[order]))[:-1]
    return order[errors[order] < least_before]


# -- bounds ---------------------------------------------------------------------------------------
def _hull(layer: Layer) -> list[tuple[float, float]]:
    """Return the points (error, time) on the lower convex hull of a layer's options, by error.

    With fractions of options every point on the hull's edges can be reached, and none below them.
    """
    points: list[tuple[float, float]] = []
    for error, time in sorted((o.error, o.time_s) for o in layer.options):
        if points and time >= points[-1][1]:
            continue  # neither more exact nor faster than the point before
        while len(points) > 1:
            (e0, t0), (e1, t1) = points[-2:]
            # the middle point stays if the slope grows there: (t1-t0)/(e1-e0) < (t-t1)/(e-e1)
            if (t1 - t0) * (error - e1) < (time - t1) * (e1 - e0):
                break
            points.pop()
        points.append((error, time))
    return points


def _remaining_hulls(layers: Sequence[Layer]) -> list[tuple[ir.Values, ir.Values]]:
    """Return the least time of the later layers over their error, for each number of layers done.

    Each is a falling curve of corners (errors, times) between which times are interpolated: it
    starts with the most exact options; the first exchange of an option is the one that saves most
    time for its error.
    """
    hulls = [(np.zeros(1), np.zeros(1))]
    error = 0.0
    time = 0.0
    exchanges: list[tuple[float, float, float]] = []  # (ratio, added error, saved seconds)
    for layer in reversed(layers):
        corners = _hull(layer)
        error = error + corners[0][0]
        time = time + corners[0][1]
        for (e0, t0), (e1, t1) in pairwise(corners):
            exchanges.append(((t0 - t1) / max(e1 - e0, 1e-300), e1 - e0, t0 - t1))
        exchanges.sort(key=lambda exchange: -exchange[0])
        added_errors = np.cumsum([0.0, *(e for _, e, _ in exchanges)])
        saved_times = np.cumsum([0.0, *(t for _, _, t in exchanges)])
        hulls.append((error + added_errors, time - saved_times))
    return hulls[::-1]


def _greedy_time(layers: Sequence[Layer], budget: float) -> float:
    """Return the time of a greedy mix within the budget: exchanges that save most come first."""
    chosen = [min(layer.options, key=lambda o: (o.error, o.time_s)) for layer in layers]
    error_left = budget - math.fsum(option.error for option in chosen)
    exchanges = [
        ((chosen[i].time_s - o.time_s) / max(o.error - chosen[i].error, 1e-300), i, j)
        for i, layer in enumerate(layers)
        for j, o in enumerate(layer.options)
        if o.time_s < chosen[i].time_s
    ]
    for _, i, j in sorted(exchanges, reverse=True):
        option = layers[i].options[j]
        added_error = option.error - chosen[i].error
        if option.time_s < chosen[i].time_s and added_error <= error_left:
            error_left -= added_error
            chosen[i] = option
    return math.fsum(option.time_s for option in chosen)
