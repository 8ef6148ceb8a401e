"""Sphinx extension: names and roles that the theme writes are those that a screen reader needs.

A voice command uses a control's name, so it must not hide the words that stand on the control.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

CORRECTED = {
    '<summary aria-label="Toggle hidden content">': "<summary>",
    'title="Search" aria-label="Search" data-bs-placement': 'title="Search" data-bs-placement',
    'role="doc-biblioentry"': 'role="listitem"',
}
"""What axe-core reports, and what stands there instead: one name hides "Show the answer", the other
the "Ctrl+K" beside "Search"; the role was given up, and stands inside a list."""


def correct_pages(app: Any, failed: Exception | None) -> None:
    """Correct the pages once all are written."""
    if failed or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        text = mended = page.read_text(encoding="utf-8")
        for wrong, right in CORRECTED.items():
            mended = mended.replace(wrong, right)
        if mended != text:
            page.write_text(mended, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Run after all pages are written."""
    app.connect("build-finished", correct_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
