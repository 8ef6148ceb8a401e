"""Sphinx extension: a chapter's number is the one its file begins with.

Parts of the book that are not written yet leave gaps; the numbers of later chapters, of their
sections, figures and exercises stay what they will be. A chapter added between two others has the
number of the one before it and a letter: 06a is chapter 6a.
"""

from __future__ import annotations

import re
from typing import Any

CHAPTER = re.compile(r"notebooks/(\d\d)([a-z]?)_")


def number_of(docname: str) -> str | None:
    """Return the number of a chapter, "6" or "6a", or None for other pages."""
    found = CHAPTER.match(docname)
    return f"{int(found[1])}{found[2]}" if found else None


def renumber(app: Any, env: Any) -> list[str]:
    """Give every chapter its own number in place of its place among the chapters."""
    changed = []
    for docname, sections in env.toc_secnumbers.items():
        number = number_of(docname)
        if number is None or not any(n and str(n[0]) != number for n in sections.values()):
            continue
        changed.append(docname)
        for anchor, numbers in sections.items():
            sections[anchor] = _moved(numbers, number)
        env.titles[docname]["secnumber"] = _moved(env.titles[docname].get("secnumber"), number)
        for node in env.tocs[docname].findall():
            if hasattr(node, "get") and node.get("secnumber"):
                node["secnumber"] = _moved(node["secnumber"], number)
        for figures in env.toc_fignumbers.get(docname, {}).values():
            for name, numbers in figures.items():
                figures[name] = _moved(numbers, number)
    return changed


def _moved(numbers: Any, first: str) -> Any:
    return type(numbers)([first, *numbers[1:]]) if numbers else numbers


def setup(app: Any) -> dict[str, bool]:
    """Run behind Sphinx' own numbering."""
    app.connect("env-get-updated", renumber, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
