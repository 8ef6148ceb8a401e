"""Tuners, named after CANN's AOE: they search for fast schedules and bound the possible gain.

Begin with these:

- `tune`, `Settings`: tune a network for a chip; `Report` says how far from optimal the result is.
- `tune_operator`: tune one operator.
- `Knowledge`, `open_knowledge`: the knowledge bank, which stores results for later runs.
- `Space`, `TableSpace`, `Point`: search spaces, also of your own measurements.
- `drive`, `search_named`: one search over one space; `SEARCHES` names them all.

Submodules are imported when one of their names is used: a worker process that only measures starts
without loading the compiler.

A genetic search that may time 20 of 36 tilings; a formula stands in for the measurement:

>>> from ascend_lab.aoe import TableSpace, drive, search_named
>>> tilings = [(rows, columns) for rows in range(1, 7) for columns in range(1, 7)]
>>> space = TableSpace(("rows", "columns"), list(zip(*tilings)))
>>> trace = drive(search_named("genetic"), space, lambda t: abs(t[0] * t[1] - 12), budget=20)
>>> len(trace.trials)
20
>>> trace.best.cost
0.0
"""

from ascend_lab.aoe.drive import Bars, Rules, Settings, Trace, Trial, drive
from ascend_lab.facade import names_of

_SUBMODULES = {
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

__getattr__ = names_of(__name__, _SUBMODULES)
