"""Sphinx extension: names that the theme gives to its controls say what stands on them.

A voice command or a screen reader uses the name; axe-core reports one that hides the visible words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

MISNAMED = {
    '<summary aria-label="Toggle hidden content">': "<summary>",
    'title="Search" aria-label="Search" data-bs-placement': 'title="Search" data-bs-placement',
}
"""The name "Search" hides the "Ctrl+K" that stands beside it, the other one "Show the answer"."""


def mend(app: Any, failed: Exception | None) -> None:
    """Correct the pages once all are written."""
    if failed or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        text = mended = page.read_text(encoding="utf-8")
        for wrong, right in MISNAMED.items():
            mended = mended.replace(wrong, right)
        if mended != text:
            page.write_text(mended, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Run after all pages are written."""
    app.connect("build-finished", mend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
