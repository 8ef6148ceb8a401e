"""Sphinx extension: a widget moves on the page, between the frames that the build drew of it.

`ascend_lab.lab.page_frames` says what a chapter saves. The page gets a control for each parameter
and all frames, packed; its script, `_static/interactive.js`, unpacks and switches them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

FRAMES_MIME = "application/vnd.ascend-lab.frames+json"
SAYS = "The figure at the chosen setting; the text below it says what it shows."


def control(key: str, saved: Mapping[str, Any], place: int) -> str:
    """Return one control, set to the value at `place`."""
    values = [escape(value) for value in saved["values"]]
    shown = ""
    if saved["kind"] == "box":
        field = f'<input id="{key}" type="checkbox"{" checked" if values[place] == "yes" else ""}>'
    elif saved["kind"] == "choice":
        options = [
            f'<option value="{i}"{" selected" if i == place else ""}>{value}</option>'
            for i, value in enumerate(values)
        ]
        field = f'<select id="{key}">{"".join(options)}</select>'
    else:
        field = (
            f'<input id="{key}" type="range" min="0" max="{len(values) - 1}" step="1" '
            f'value="{place}" '
            f'aria-valuetext="{values[place]}" aria-describedby="{key}-values">'
        )
        shown = (
            f'<span class="lab-value">{values[place]}</span>'
            f'<span class="lab-values" id="{key}-values">of {", ".join(values)}</span>'
        )
    label = f'<label for="{key}">{escape(saved["label"])}</label>'
    return f'<div class="lab-control">{label}{field}{shown}</div>'


def explorer(key: str, saved: Mapping[str, Any], svg: str, caption: str) -> str:
    """Return the controls, the first picture, what it says, and all frames."""
    start = saved["settings"][saved["start"]]
    controls = [
        control(f"{key}-{i}", described, place)
        for i, (described, place) in enumerate(zip(saved["controls"], start, strict=True))
    ]
    possible = "; ".join(
        f"{described['label']} {described['all']}" for described in saved["controls"]
    )
    picture = base64.b64encode(svg.encode()).decode()
    data = json.dumps({name: saved[name] for name in ("controls", "settings", "frames")})
    return (
        f'<div class="lab-explore"><fieldset disabled>'
        f"<legend>Settings, {len(saved['settings'])} on this page</legend>{''.join(controls)}"
        f'<p class="lab-snapped" role="status"></p></fieldset>'
        f'<img alt="{SAYS}" src="data:image/svg+xml;base64,{picture}">'
        f'<p class="lab-caption" aria-live="polite">{escape(caption)}</p>'
        f'<p class="lab-possible">In the notebook: {escape(possible)}.</p>'
        f'<script type="application/json">{data}</script></div>'
    )


def add_explorers(cells: Sequence[Mapping[str, Any]]) -> None:
    """Give every output with frames its form on the page."""
    for number, cell in enumerate(cells):
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if FRAMES_MIME in data:
                svg = "".join(data.pop("image/svg+xml"))
                caption = "".join(data["text/plain"]).partition("Figure: ")[2]
                data["text/html"] = explorer(
                    f"explore-{number}", data.pop(FRAMES_MIME), svg, caption
                )


def read(_app: Any, docname: str, source: list[str]) -> None:
    """Change a chapter as it is read."""
    if docname.startswith("notebooks/"):
        notebook = json.loads(source[0])
        add_explorers(notebook["cells"])
        source[0] = json.dumps(notebook)


def setup(app: Any) -> dict[str, bool]:
    """Run when a page is read."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
