"""From `name=(low, high, step)` or `name=[choices]` to an ipywidgets control."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import ipywidgets  # type: ignore[import-untyped]

from ascend_lab.errors import AscendLabError

_LABEL = {"description_width": "initial"}
_WIDE = {"width": "26em"}


class WidgetError(AscendLabError):
    """A control that cannot be made, or that the figure function does not have."""


def parameters_of(fig_fn: Callable[..., Any]) -> dict[str, Any]:
    """Return parameter name -> default of a figure function (`Parameter.empty`: none)."""
    return {name: p.default for name, p in signature(fig_fn).parameters.items()}


def make_control(name: str, spec: object, default: Any) -> Any:
    """Return the control for one parameter, set to its default where that is legal.

    `(low, high, step)`: a slider, whole numbers if all three are; `[a, b, c]`: a choice;
    `True` or `False`: a box to tick.
    """
    look: dict[str, Any] = {
        "description": name.replace("_", " "),
        "style": _LABEL,
        "layout": _WIDE,
    }
    if isinstance(spec, bool):
        start = default if isinstance(default, bool) else spec
        return ipywidgets.Checkbox(value=start, **look)
    if isinstance(spec, tuple) and len(spec) == 3 and all(_is_number(part) for part in spec):
        return _slider(name, spec, default, look)
    if isinstance(spec, list) and spec:
        first = default if default in spec else spec[0]
        options = [(str(choice), choice) for choice in spec]
        return ipywidgets.Dropdown(options=options, value=first, **look)
    raise WidgetError(
        f"control {name!r} needs (low, high, step), a list of choices, True or False", repr(spec)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _slider(name: str, spec: tuple[Any, ...], default: Any, look: dict[str, Any]) -> Any:
    low, high, step = spec
    if not low < high or step <= 0:
        raise WidgetError(
            f"slider {name!r} needs low < high and step > 0",
            f"low {low}, high {high}, step {step}",
            "correct the range",
        )
    inside = default is not Parameter.empty and _is_number(default) and low <= default <= high
    whole = all(isinstance(part, int) for part in spec)
    kind = ipywidgets.IntSlider if whole else ipywidgets.FloatSlider
    # One redraw when the slider is let go: a figure takes longer to draw than a drag event.
    return kind(
        value=default if inside else low,
        min=low,
        max=high,
        step=step,
        continuous_update=False,
        **look,
    )
