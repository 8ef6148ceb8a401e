"""Passes: rewritings of a graph that keep what it computes, each in a file of its own.

`run_passes(graph)` runs the default ones until nothing changes; `PASSES` holds all by name.
"""

from ascend_lab.graph.edit import Draft as Rewriter
from ascend_lab.graph.passes.int8 import measured_scales, quantise
from ascend_lab.graph.passes.manager import Report, Step, run_passes
from ascend_lab.graph.passes.order import (
    MODES,
    moved_bytes,
    peak_live_bytes,
    topological_order,
)
from ascend_lab.graph.passes.pattern import match
from ascend_lab.graph.passes.precision import convert
from ascend_lab.graph.passes.registry import DEFAULT, PASSES, get_pass, register_pass
from ascend_lab.graph.passes.rewrite import Pass, derived, settings, sweep

__all__ = [
    "DEFAULT",
    "MODES",
    "PASSES",
    "Pass",
    "Report",
    "Rewriter",
    "Step",
    "convert",
    "derived",
    "get_pass",
    "match",
    "measured_scales",
    "moved_bytes",
    "peak_live_bytes",
    "quantise",
    "register_pass",
    "run_passes",
    "settings",
    "sweep",
    "topological_order",
]
