"""The minutes that a chapter takes to read, from what stands in it; `lab.py refresh` writes them.

Words at the rate of reading to remember, 138 a minute (Carver 1992), 5 seconds for a line of code,
a minute for a figure or a slider. Exercises are not in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WORDS_PER_MINUTE = 138
SECONDS_PER_LINE = 5
MINUTES_PER_FIGURE = 1
STATED = re.compile(r"about (\d+) minutes")
FENCED = re.compile(r"^(`{3,})\w*\n.*?^\1", re.MULTILINE | re.DOTALL)
MACHINERY = re.compile(
    r"^(?:[`:]{3,}|:[\w-]+:).*$|\{(?!glue|term)[\w:]+\}`[^`]*`|<!--.*?-->", re.MULTILINE
)
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
Cell = Mapping[str, Any]


def read_cells(cells: Sequence[Cell]) -> Iterator[tuple[Cell, str]]:
    """Yield the cells that a reader reads, with their text; the exercises are left out."""
    solving = False
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            kept = []
            for i, part in enumerate(HEADING.split(text)):
                if i % 2:
                    solving = part.strip() == "Exercises"
                elif not solving:
                    kept.append(part)
            yield cell, "\n".join(kept)
        elif not solving and not {"remove-input", "remove-cell"} & set(tags_of(cell)):
            yield cell, text


def tags_of(cell: Cell) -> Sequence[str]:
    """Return the tags of a cell."""
    return cell["metadata"].get("tags", ())


def minutes_of(cells: Sequence[Cell]) -> float:
    """Return the minutes that the chapter with these cells takes to read."""
    words = lines = figures = 0
    for cell, text in read_cells(cells):
        if cell["cell_type"] == "markdown":
            words += len(MACHINERY.sub(" ", FENCED.sub("", text)).split())
        else:
            rows = (row.strip() for row in text.splitlines())
            lines += sum(1 for row in rows if row and not row.startswith("#"))
            figures += "figure" in cell["metadata"].get("mystnb", {}) or "explore(" in text
    return words / WORDS_PER_MINUTE + lines * SECONDS_PER_LINE / 60 + figures * MINUTES_PER_FIGURE


def rounded(minutes: float) -> int:
    """Return whole minutes, in fives where that is no further off than a tenth."""
    fives = 5 * round(minutes / 5)
    return fives if abs(fives - minutes) <= 0.1 * minutes else round(minutes)


def state(cells: Sequence[dict[str, Any]]) -> None:
    """Write the minutes into the first sentence of a chapter that says 'about N minutes'."""
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and STATED.search(text):
            said = f"about {rounded(minutes_of(cells))} minutes"
            cell["source"] = STATED.sub(said, text, count=1)
            return


def complaints(cells: Sequence[Cell]) -> list[str]:
    """Return what is wrong with the time that a chapter states, which is within a tenth."""
    texts = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    found = next(filter(None, map(STATED.search, texts)), None)
    minutes = minutes_of(cells)
    if found is None:
        return ["no sentence says 'about N minutes'"]
    off = abs(int(found[1]) - minutes) > 0.1 * minutes
    return [f"says {found[0]}; it is {minutes:.1f}: python3 lab.py refresh"] if off else []
