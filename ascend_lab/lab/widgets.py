"""Widgets: sliders and choices that redraw a figure, made by one line, `explore(fig_x, ...)`.

In a notebook, the running kernel redraws the figure. A page of the book has no kernel: it shows the
pictures that `page_frames` drew in advance.
"""

from collections.abc import Callable
from html import escape
from inspect import Parameter, signature
from typing import Any

import ipywidgets

from ascend_lab.errors import AscendLabError
from ascend_lab.lab.figures.style import LabFigure

# -- from `name=(low, high, step)` or `name=[choices]` to an ipywidgets control --------------------
_LABEL = {"description_width": "initial"}
_WIDE = {"width": "26em"}
Draw = Callable[..., LabFigure]


class WidgetError(AscendLabError):
    """A control that cannot be made, or that the figure function does not have."""


def make_control(name: str, spec: object, default: Any) -> Any:
    """Return the control for one parameter, set to its default where that is legal.

    `(low, high, step)`: a slider, whole numbers if all three are; `[a, b, c]`: a choice;
    `True` or `False`: a box to tick.
    """
    look: dict[str, Any] = {"description": name.replace("_", " "), "style": _LABEL, "layout": _WIDE}
    if isinstance(spec, bool):
        start = default if isinstance(default, bool) else spec
        return ipywidgets.Checkbox(value=start, **look)
    if isinstance(spec, tuple) and len(spec) == 3 and all(_is_number(part) for part in spec):
        low, high, step = spec
        if not low < high or step <= 0:
            needed = f"slider {name!r} needs low < high and step > 0"
            raise WidgetError(needed, f"low {low}, high {high}, step {step}", "correct the range")
        inside = default is not Parameter.empty and _is_number(default) and low <= default <= high
        is_whole = all(isinstance(part, int) for part in spec)
        slider = ipywidgets.IntSlider if is_whole else ipywidgets.FloatSlider
        # One redraw when the slider is let go: a figure takes longer to draw than a drag event.
        look |= {"min": low, "max": high, "step": step, "continuous_update": False}
        return slider(value=default if inside else low, **look)
    if isinstance(spec, list) and spec:
        first = default if default in spec else spec[0]
        options = [(str(choice), choice) for choice in spec]
        return ipywidgets.Dropdown(options=options, value=first, **look)
    needed = f"control {name!r} needs (low, high, step), a list of choices, True or False"
    raise WidgetError(needed, repr(spec))


def _is_number(value: object) -> bool:
    """Tell whether a value is a number, which True and False are not here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- `explore(fig_fn, ...)`: sliders over a figure function, drawn as a picture and its alt text ---
class Explorer(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """Controls, the picture they produce, and its alt text below."""

    def __init__(self, fig_fn: Draw, controls: dict[str, Any], fixed: dict[str, Any]) -> None:
        self.fig_fn = fig_fn
        self.fixed = dict(fixed)
        self.controls = dict(controls)
        self.figure: LabFigure | None = None
        self.picture = ipywidgets.Image(format="svg+xml", layout={"max_width": "100%"})
        self.caption = ipywidgets.HTML()
        box = ipywidgets.VBox(list(self.controls.values()))
        super().__init__([box, self.picture, self.caption])
        self._draw()
        if self.figure is None:
            raise WidgetError(f"the first frame failed: {self.failure}; correct the start values")
        for control in self.controls.values():
            control.observe(lambda _change: self._draw(), names="value")

    def _draw(self) -> None:
        """Draw the present values; at a refused setting the old picture stays, with the reason."""
        self.failure = ""
        try:
            values = {name: control.value for name, control in self.controls.items()}
            figure = self.fig_fn(**self.fixed, **values)
            svg = figure.to_svg()
        except Exception as error:  # shown to the reader: an exception in a callback is lost
            self.failure = f"{type(error).__name__}: {error}"
            self.caption.value = f"<p><strong>{escape(self.failure)}</strong></p>"
            return
        self.figure = figure
        self.picture.value = svg.encode()
        self.caption.value = f"<p><small>{escape(figure.alt_text)}</small></p>"

    def __repr__(self) -> str:
        return f"explore {self.fig_fn.__name__}: {self.figure!r}"

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, object]:
        """Add the first picture to the widget's own form, for viewers that run no widgets."""
        bundle = dict(super()._repr_mimebundle_() or {})
        bundle["text/plain"] = repr(self)
        bundle["image/svg+xml"] = bytes(self.picture.value).decode()
        return bundle


def explore(fig_fn: Draw, *, fixed: dict[str, Any] | None = None, **controls: Any) -> Explorer:
    """Return a widget over a figure function: `explore(fig_x, tile=(16, 256, 16), kind=["a"])`.

    Each keyword names a parameter of `fig_fn` and gives its range `(low, high, step)`, its choices
    as a list, or True/False; the parameter's default is the start where it is legal. `fixed` are
    arguments that stay. Raises `WidgetError` for a parameter that the function does not have.
    """
    parameters = {name: p.default for name, p in signature(fig_fn).parameters.items()}
    for name in [*controls, *(fixed or {})]:
        if name not in parameters:
            raise WidgetError(
                f"{fig_fn.__name__} has no parameter {name!r}; it has: {', '.join(parameters)}"
            )
    widgets = {name: make_control(name, spec, parameters[name]) for name, spec in controls.items()}
    return Explorer(fig_fn, widgets, fixed or {})


__all__ = ["Explorer", "WidgetError", "explore"]
