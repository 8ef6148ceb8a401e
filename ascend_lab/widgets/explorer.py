"""`explore(fig_fn, ...)`: sliders over a figure function, drawn as a picture and its alt text."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets  # type: ignore[import-untyped]

from ascend_lab.figures.style import LabFigure
from ascend_lab.widgets.controls import WidgetError, make_control, parameters_of


class Explorer(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """Controls, the picture they produce, and its alt text below.

    `controls` maps parameter names to ipywidgets controls: tests and pages may set their values.
    """

    def __init__(
        self, fig_fn: Callable[..., LabFigure], controls: dict[str, Any], fixed: dict[str, Any]
    ) -> None:
        self.fig_fn = fig_fn
        self.fixed = dict(fixed)
        self.controls = dict(controls)
        self.figure: LabFigure | None = None
        self.picture = ipywidgets.Image(format="png", layout={"max_width": "100%"})
        self.caption = ipywidgets.HTML()
        box = ipywidgets.VBox(list(self.controls.values()))
        super().__init__([box, self.picture, self.caption])
        self._draw()
        if self.figure is None:
            raise WidgetError(f"the first frame failed: {self.failure}; correct the start values")
        for control in self.controls.values():
            control.observe(self._redraw, names="value")

    def _draw(self) -> None:
        """Draw the present values; a refused setting leaves the old picture and says why."""
        self.failure = ""
        try:
            values = {name: control.value for name, control in self.controls.items()}
            figure = self.fig_fn(**self.fixed, **values)
            png = figure.to_png()
        except Exception as error:  # shown to the reader: an exception in a callback is lost
            self.failure = f"{type(error).__name__}: {error}"
            self.caption.value = f"<p><strong>{escape(self.failure)}</strong></p>"
            return
        self.figure = figure
        self.picture.value = png
        self.caption.value = f"<p><small>{escape(figure.alt_text)}</small></p>"

    def _redraw(self, _change: object) -> None:
        self._draw()

    def __repr__(self) -> str:
        return f"explore {self.fig_fn.__name__}: {self.figure!r}"

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, object]:
        """Add the still frame to the widget's own form, for viewers that run no widgets."""
        bundle = dict(super()._repr_mimebundle_() or {})
        bundle["text/plain"] = repr(self)
        bundle["image/png"] = bytes(self.picture.value)
        return bundle


def explore(
    fig_fn: Callable[..., LabFigure], *, fixed: dict[str, Any] | None = None, **controls: Any
) -> Explorer:
    """Return a widget over a figure function: `explore(fig_x, tile=(16, 256, 16), kind=["a"])`.

    Each keyword names a parameter of `fig_fn` and gives its range `(low, high, step)`, its choices
    as a list, or True/False; the parameter's default is the start where it is legal. `fixed` are
    arguments that stay. Raises `WidgetError` for a parameter that the function does not have.
    """
    parameters = parameters_of(fig_fn)
    for name in [*controls, *(fixed or {})]:
        if name not in parameters:
            raise WidgetError(
                f"{fig_fn.__name__} has no parameter {name!r}; it has: {', '.join(parameters)}"
            )
    made = {name: make_control(name, spec, parameters[name]) for name, spec in controls.items()}
    return Explorer(fig_fn, made, fixed or {})
