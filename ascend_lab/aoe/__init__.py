"""Tuners: spaces of schedules, searches over them, and how far from optimal they end.

What needs the compiler is imported when it is asked for: processes that measure begin without it.
"""

from ascend_lab.aoe.drive import Bars, Rules, Settings, Trace, Trial, drive
from ascend_lab.facade import names_of

_HOMES = {
    "bank": "Knowledge open_knowledge",
    "cube": "CubeJob",
    "engine": "NetworkResult Session Tuning tune tune_network",
    "operators": "Tunable operators_of",
    "saved": "Report",
    "search": "SEARCHES Annealing Genetic Mcts random_order search_named",
    "space": "Point Space TableSpace completed crossed mutated nearest random_completion "
    "read_recorded",
    "tuning": "Result tune_operator",
    "vendor_bank": "Decision held_against",
    "vector": "VectorJob VectorMeasure",
    "workers": "Workers workers_of",
}
__all__ = [
    "SEARCHES",
    "Annealing",
    "Bars",
    "CubeJob",
    "Decision",
    "Genetic",
    "Knowledge",
    "Mcts",
    "NetworkResult",
    "Point",
    "Report",
    "Result",
    "Rules",
    "Session",
    "Settings",
    "Space",
    "TableSpace",
    "Trace",
    "Trial",
    "Tunable",
    "Tuning",
    "VectorJob",
    "VectorMeasure",
    "Workers",
    "completed",
    "crossed",
    "drive",
    "held_against",
    "mutated",
    "nearest",
    "open_knowledge",
    "operators_of",
    "random_completion",
    "random_order",
    "read_recorded",
    "search_named",
    "tune",
    "tune_network",
    "tune_operator",
    "workers_of",
]

__getattr__ = names_of(__name__, _HOMES)
