"""Frames of a widget for a page without a kernel: the same figure at a small grid of settings.

The book's build calls `show_frames` after the last cell of a chapter, with the values that the
metadata of a cell ask for: "page_values": {"tile": [16, 64]}. What it saves has this form:

    {"start": 1, "controls": [{"label": "tile", "kind": "slider", "values": ["16", "64"],
     "all": "16 to 256 in steps of 16"}], "settings": [[0], [1]], "frames": "eJy..."}

Setting [1] is the second value of the only control. `frames` is JSON, deflated, in base 64:
{"pieces": ["<svg ...>", ...], "pictures": [[0, 1, 5], ...], "captions": ["...", ...]}. A picture is
its pieces one behind the other: 24 pictures of 75 kB share so many that they take 20 kB together.
"""

import base64
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import ipywidgets
from IPython.display import display

from ascend_lab.lab.widgets import Explorer, WidgetError

FRAMES_MIME = "application/vnd.ascend-lab.frames+json"
MAX_FRAMES = 24
MAX_COMBINED = 4
"""Controls that are combined with one another, if the cell names none; others move alone."""
VALUES_ALONE = 2
"""Further values of a control that moves alone."""
WIDE_RANGE = 8
"""Highest over lowest value from which the values of a slider grow by a factor, not by a step."""
BETWEEN_TAGS = re.compile(r"(?<=>)(?=<)")


def all_values(control: Any) -> list[Any]:
    """Return every value of a control, in its order."""
    if isinstance(control, ipywidgets.Checkbox):
        return [False, True]
    if isinstance(control, ipywidgets.Dropdown):
        return [value for _, value in control.options]
    count = round((control.max - control.min) / control.step) + 1
    values = [round(control.min + i * control.step, 9) for i in range(count)]
    return [value for value in values if value <= control.max]


def counts_of(sizes: Sequence[int], limit: int) -> list[int]:
    """Return how many values each control gets: of 256, 256 and 4 with at most 24: 4, 3 and 2."""
    counts = [1] * len(sizes)
    while True:
        fitting = [
            i
            for i, count in enumerate(counts)
            if count < sizes[i] and prod(counts) // count * (count + 1) <= limit
        ]
        if not fitting:
            return counts
        counts[min(fitting, key=counts.__getitem__)] += 1


def chosen_values(control: Any, count: int) -> list[Any]:
    """Return `count` values of a control, its present one among them, in its order."""
    values = all_values(control)
    start = values.index(min(values, key=lambda value: _distance(value, control.value)))
    if count >= len(values):
        return values
    end = len(values) - 1
    if isinstance(control, ipywidgets.Dropdown):
        # The first choices of a list are those that the text speaks of.
        chosen = {start, *[i for i in range(len(values)) if i != start][: count - 1]}
    elif count == 1:
        chosen = {start}
    elif count == 2:
        far_end = end if 2 * start < end else 0
        chosen = {start, (start + far_end + 1) // 2}
    else:
        chosen = _spread(values, count)
        chosen.remove(min(chosen, key=lambda i: abs(i - start)))
        chosen.add(start)
    return [values[i] for i in sorted(chosen)]


def _distance(value: Any, other: Any) -> float:
    """Return how far two values are apart; 0 or 1 for words."""
    return abs(value - other) if isinstance(value, int | float) else float(value != other)


def _spread(values: Sequence[float], count: int) -> set[int]:
    """Return the places of `count` values between the ends, evenly or by an even factor."""
    low = values[0]
    high = values[-1]
    steps = [i / (count - 1) for i in range(count)]
    if low > 0 and high >= WIDE_RANGE * low and len(values) > 2 * count:
        targets = [low * (high / low) ** step for step in steps]
    else:
        targets = [low + (high - low) * step for step in steps]
    places: set[int] = set()
    for target in targets:
        free_places = [i for i in range(len(values)) if i not in places]
        places.add(min(free_places, key=lambda i: abs(values[i] - target)))
    return places


def grid_values(
    controls: Mapping[str, Any], asked: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, list[Any]], list[str]]:
    """Return each control's values on the page, and the names of those that are combined."""
    unknown = set(asked) - set(controls)
    if unknown:
        raise WidgetError("page_values name controls of the widget", ", ".join(sorted(unknown)))
    combined = list(asked) or list(controls)[:MAX_COMBINED]
    limit = MAX_FRAMES - VALUES_ALONE * (len(controls) - len(combined))
    sizes = [len(all_values(controls[name])) for name in combined]
    counts = dict(zip(combined, counts_of(sizes, limit), strict=True))
    values = {}
    for name, control in controls.items():
        if name in asked:
            named = [*asked[name], control.value]
            values[name] = [value for value in all_values(control) if value in named]
        else:
            values[name] = chosen_values(control, counts.get(name, 1 + VALUES_ALONE))
    return values, combined


def settings_of(
    values: Mapping[str, Sequence[Any]], start: Mapping[str, Any], combined: Sequence[str]
) -> list[list[int]]:
    """Return the settings of a page, for each control the place of its value.

    The controls `combined` take all combinations of their values; each other control moves while
    all the rest are at their start.
    """
    start_places = [list(values[name]).index(start[name]) for name in values]
    ranges = [
        range(len(values[name])) if name in combined else [place]
        for name, place in zip(values, start_places, strict=True)
    ]
    settings = [list(setting) for setting in product(*ranges)]
    for i, name in enumerate(values):
        if name not in combined:
            other_places = [place for place in range(len(values[name])) if place != start_places[i]]
            settings += [
                [*start_places[:i], place, *start_places[i + 1 :]] for place in other_places
            ]
    return settings


def _described(control: Any, values: Sequence[Any]) -> dict[str, object]:
    """Return a control as plain data: label, kind, values shown, all values."""
    kind = {ipywidgets.Checkbox: "box", ipywidgets.Dropdown: "choice"}.get(type(control), "slider")
    if kind == "slider":
        possible = f"{control.min:,g} to {control.max:,g} in steps of {control.step:,g}"
        shown = [f"{value:,g}" for value in values]
    else:
        possible = ", ".join(map(_shown, all_values(control)))
        shown = [_shown(value) for value in values]
    return {"label": control.description, "kind": kind, "values": shown, "all": possible}


def _shown(choice: object) -> str:
    """Return a choice as a word."""
    if isinstance(choice, bool):
        return "yes" if choice else "no"
    return str(choice)


def frames_of(explorer: Explorer, asked: Mapping[str, Sequence[Any]]) -> dict[str, object]:
    """Draw the figure of a widget at every setting of its page; a refusal becomes a caption."""
    controls = explorer.controls
    values, combined = grid_values(controls, asked)
    start = {
        name: min(values[name], key=lambda value: _distance(value, control.value))
        for name, control in controls.items()
    }
    settings = settings_of(values, start, combined)
    places: dict[str, int] = {}
    pictures = []
    captions = []
    for setting in settings:
        arguments = {name: values[name][i] for name, i in zip(values, setting, strict=True)}
        svg, caption = _drawn(explorer, arguments)
        pieces = BETWEEN_TAGS.split(svg) if svg else []
        pictures.append([places.setdefault(piece, len(places)) for piece in pieces])
        captions.append(caption)
    frames = {"pieces": list(places), "pictures": pictures, "captions": captions}
    text = json.dumps(frames, separators=(",", ":"), ensure_ascii=False)
    start_places = [values[name].index(start[name]) for name in values]
    return {
        "start": settings.index(start_places),
        "controls": [_described(controls[name], values[name]) for name in values],
        "settings": settings,
        "frames": base64.b64encode(zlib.compress(text.encode(), 9)).decode(),
    }


def _drawn(explorer: Explorer, arguments: dict[str, Any]) -> tuple[str, str]:
    """Return picture and caption at one setting; no picture and the reason where it is refused."""
    try:
        figure = explorer.fig_fn(**explorer.fixed, **arguments)
        return figure.to_svg(), figure.alt_text
    except Exception as error:  # the page says so, as the widget does
        return "", f"{type(error).__name__}: {error}"


def show_frames(
    shown: Mapping[int, object], asked: Mapping[int, Mapping[str, Sequence[Any]]]
) -> None:
    """Display the frames of every widget that cells showed: `shown` is IPython's `Out`.

    `asked` has, by the number of such a cell, the values of its `page_values`.
    """
    for execution_count, value in list(shown.items()):
        if isinstance(value, Explorer):
            data = {FRAMES_MIME: frames_of(value, asked.get(execution_count, {}))}
            display(data, raw=True, metadata={"shown_by": execution_count})  # type: ignore[no-untyped-call]


__all__ = ["FRAMES_MIME", "frames_of", "show_frames"]
