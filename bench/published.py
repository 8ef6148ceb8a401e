"""Whole networks beside published rates: part of `lab.py bench`."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_lab.graph.validation import GOALS, network_rows
from bench.table import Figure


def published_figures() -> Iterator[Figure]:
    """Yield the rate of each published network over the published one, and its largest cause."""
    yield Figure("published rates of networks", "model - published", "", None)
    for row in network_rows():
        goal, name = GOALS[row.kind], f"  {row.name} x{row.batch} {row.chip.removeprefix('Ascend')}"
        yield Figure(name, f"{row.error:+.0%}, {row.cause}", f"within {goal:.0%}", not row.misses)
