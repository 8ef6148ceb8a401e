"""Predict, then look: write a number down before the model says its own, then compare."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from ascend_lab.errors import AscendLabError

CLOSE = 0.05


class PredictionError(AscendLabError):
    """A guess or a model value that is not a finite number."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A question, the reader's guess (None: not yet), and its unit as text."""

    question: str
    guess: float | None
    unit: str = ""

    def __str__(self) -> str:
        if self.guess is None:
            return f"{self.question} No guess yet: put a number in place of None."
        return f"{self.question} Your guess: {_with_unit(self.guess, self.unit)}."


def predict(question: str, guess: float | None = None, unit: str = "") -> Prediction:
    """Store and print a guess; `compare` it later with what the model says."""
    if guess is not None:
        guess = _finite(guess, "guess")
    prediction = Prediction(question, guess, unit)
    print(prediction)
    return prediction


def compare(prediction: Prediction, model_value: float) -> None:
    """Print, in one sentence, how far the guess was from the model value (in the guess's unit)."""
    model_value = _finite(model_value, "model value")
    print(_verdict(prediction, model_value))


def _verdict(prediction: Prediction, model_value: float) -> str:
    model = f"the model says {_with_unit(model_value, prediction.unit)}"
    guess = prediction.guess
    if guess is None:
        return f"You made no guess; {model}."
    text = f"You guessed {_with_unit(guess, prediction.unit)}; {model}: "
    if guess == model_value or abs(guess - model_value) <= CLOSE * abs(model_value):
        return text + f"within {CLOSE:.0%}, well predicted."
    if guess > 0 and model_value > 0:
        ratio = guess / model_value
        factor, side = (ratio, "high") if ratio > 1 else (1 / ratio, "low")
        return text + f"your guess is too {side} by a factor of {factor:.3g}."
    off = guess - model_value
    side = "high" if off > 0 else "low"
    return text + f"your guess is too {side} by {_with_unit(abs(off), prediction.unit)}."


def _with_unit(value: float, unit: str) -> str:
    """Write "2x", "15%" without and "3.2 us" with a space."""
    text = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if not unit:
        return text
    return f"{text}{unit}" if unit in {"x", "%"} else f"{text} {unit}"


def _finite(value: object, what: str) -> float:
    """Accept any finite real number, NumPy's included, and return it as a float."""
    if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise PredictionError(f"a {what} must be a finite number", repr(value), "write a number")
