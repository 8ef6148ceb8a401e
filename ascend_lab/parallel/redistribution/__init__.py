"""Tensor layouts on a matrix of devices, and the steps from one layout to another."""

from __future__ import annotations

from ascend_lab.parallel.redistribution.layout import Layout, all_layouts, layout, unified
from ascend_lab.parallel.redistribution.search import (
    Comparison,
    cheapest,
    compare,
    greedy,
    price,
    redistribute,
)
from ascend_lab.parallel.redistribution.steps import Cost, Step, execute, step, steps_from

__all__ = [
    "Comparison",
    "Cost",
    "Layout",
    "Step",
    "all_layouts",
    "cheapest",
    "compare",
    "execute",
    "greedy",
    "layout",
    "price",
    "redistribute",
    "step",
    "steps_from",
    "unified",
]
