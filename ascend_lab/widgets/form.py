"""A box to type a prediction into; the page works without it through `checks.predict`."""

from __future__ import annotations

import ipywidgets  # type: ignore[import-untyped]

from ascend_lab.checks.prediction import Prediction


class PredictForm(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """The question and a number box; `prediction` is what stands in the box now."""

    def __init__(self, question: str, guess: float, unit: str) -> None:
        self.question = question
        self.unit = unit
        self.box = ipywidgets.FloatText(value=guess, description=unit or "guess")
        super().__init__([ipywidgets.Label(question), self.box])

    @property
    def prediction(self) -> Prediction:
        """Return the present content of the box, for `checks.compare`."""
        return Prediction(self.question, float(self.box.value), self.unit)

    def __repr__(self) -> str:
        return f"predict form: {self.prediction}"


def predict_form(question: str, guess: float = 1.0, unit: str = "") -> PredictForm:
    """Return an input form for a guess; read it with `.prediction`."""
    return PredictForm(question, guess, unit)
