"""Whole networks and FlashAttention beside published figures: part of `lab.py bench`."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_lab.lab.validation import GOALS, network_rows, published_flash
from bench.table import Figure


def published_figures() -> Iterator[Figure]:
    """Yield the error of the time of each published network, and its largest cause."""
    yield Figure("published rates of networks", "time, model - published", "", None)
    for row in network_rows():
        goal = GOALS[row.kind]
        name = f"  {row.name} x{row.batch} {row.chip.removeprefix('Ascend')}"
        got = f"{row.time_error:+.0%}, {row.cause}"
        limit = f"within {goal:g} times"
        yield Figure(name, got, limit, not row.misses)


def flash_figures() -> Iterator[Figure]:
    """Yield the time of each published FlashAttention on the 910B2, operands in L2."""
    yield Figure("published FlashAttention, 910B2", "model - published", "", None)
    for row in published_flash():
        got = f"{row.model_s * 1e6:.1f} us, {row.time_error:+.0%}"
        yield Figure(f"  {row.name}", got, "within 20%", abs(row.time_error) <= 0.2)
