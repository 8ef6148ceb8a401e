"""Tuners: spaces of schedules, searches over them, and how far from optimal they end.

What needs the compiler is imported when it is asked for: processes that measure begin without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ascend_lab.aoe.drive import Trace, Trial, drive
from ascend_lab.aoe.settings import Bars, Settings
from ascend_lab.aoe.space import Point, Space, TableSpace
from ascend_lab.aoe.workers import Workers, workers_of

if TYPE_CHECKING:
    from ascend_lab.aoe.bank import Knowledge, open_knowledge
    from ascend_lab.aoe.cube.job import CubeJob
    from ascend_lab.aoe.engine import Tuning, tune
    from ascend_lab.aoe.network import NetworkResult, tune_network
    from ascend_lab.aoe.operators import Tunable, operators_of
    from ascend_lab.aoe.report import Report
    from ascend_lab.aoe.search import SEARCHES, search_named
    from ascend_lab.aoe.subgraph import network_bound
    from ascend_lab.aoe.tuning import Result, tune_operator

_ROOMS = ("search", "bank", "operators", "cube.job", "subgraph", "tuning", "network", "engine",
          "report")  # fmt: skip

__all__ = [
    "SEARCHES",
    "Bars",
    "CubeJob",
    "Knowledge",
    "NetworkResult",
    "Point",
    "Report",
    "Result",
    "Settings",
    "Space",
    "TableSpace",
    "Trace",
    "Trial",
    "Tunable",
    "Tuning",
    "Workers",
    "drive",
    "network_bound",
    "open_knowledge",
    "operators_of",
    "search_named",
    "tune",
    "tune_network",
    "tune_operator",
    "workers_of",
]


def __getattr__(name: str) -> Any:
    """Return a word of the facade from the first room that has it."""
    for room in _ROOMS if name in __all__ else ():
        module = import_module(f"{__name__}.{room}")
        if name in vars(module):
            return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
