"""Sphinx extension: the fold over a cell's output (tag `hide-output`) is named an answer."""

from __future__ import annotations

from typing import Any

from docutils import nodes


def name_folds(app: Any, doctree: nodes.document) -> None:
    """Name the folds of a page: one over an output holds an answer, one over a source code."""
    for cell in doctree.findall(nodes.container):
        mode = cell.get("hide_mode")
        if mode in ("output", "input"):
            held = "answer" if mode == "output" else "code"
            cell["prompt_show"], cell["prompt_hide"] = f"Show the {held}", f"Hide the {held}"


def setup(app: Any) -> dict[str, bool]:
    """Run once a page is read, before its folds are made."""
    app.connect("doctree-read", name_folds)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
