"""Tuners: spaces of schedules, searches over them, and how far from optimal they end.

What needs the compiler is imported when it is asked for: processes that measure begin without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ascend_lab.aoe.drive import Bars, Settings, Trace, Trial, drive
from ascend_lab.aoe.space import (
    Point,
    Space,
    TableSpace,
    completed,
    crossed,
    mutated,
    nearest,
    random_completion,
)
from ascend_lab.aoe.workers import Workers, workers_of

if TYPE_CHECKING:
    from ascend_lab.aoe.bank import Knowledge, open_knowledge
    from ascend_lab.aoe.cube.job import CubeJob
    from ascend_lab.aoe.engine import Tuning, tune
    from ascend_lab.aoe.network import NetworkResult, tune_network
    from ascend_lab.aoe.operators import Tunable, operators_of
    from ascend_lab.aoe.report import Report
    from ascend_lab.aoe.search import SEARCHES, Annealing, Genetic, Mcts, random_order, search_named
    from ascend_lab.aoe.tuning import Result, tune_operator
    from ascend_lab.aoe.vector import VectorJob, VectorMeasure

_HOMES = {
    "bank": ("Knowledge", "open_knowledge"),
    "cube.job": ("CubeJob",),
    "engine": ("Tuning", "tune"),
    "network": ("NetworkResult", "tune_network"),
    "operators": ("Tunable", "operators_of"),
    "report": ("Report",),
    "search": ("SEARCHES", "Annealing", "Genetic", "Mcts", "random_order", "search_named"),
    "tuning": ("Result", "tune_operator"),
    "vector": ("VectorJob", "VectorMeasure"),
}

__all__ = [
    "SEARCHES", "Annealing", "Bars", "CubeJob", "Genetic", "Knowledge", "Mcts", "NetworkResult",
    "Point", "Report", "Result", "Settings", "Space", "TableSpace", "Trace", "Trial", "Tunable",
    "Tuning", "VectorJob", "VectorMeasure", "Workers", "completed", "crossed", "drive",
    "mutated", "nearest", "open_knowledge", "operators_of", "random_completion", "random_order",
    "search_named", "tune", "tune_network", "tune_operator", "workers_of",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Return a word of the facade from where it is at home."""
    for home, words in _HOMES.items():
        if name in words:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
