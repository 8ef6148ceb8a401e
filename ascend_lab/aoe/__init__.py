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

from ascend_lab.aoe.drive import Settings, drive
from ascend_lab.facade import names_of

_SUBMODULES = {
    "bank": "Knowledge open_knowledge",
    "engine": "tune",
    "saved": "Report",
    "search": "SEARCHES search_named",
    "space": "Point Space TableSpace",
    "tuning": "tune_operator",
}
__all__ = [
    "SEARCHES",
    "Knowledge",
    "Point",
    "Report",
    "Settings",
    "Space",
    "TableSpace",
    "drive",
    "open_knowledge",
    "search_named",
    "tune",
    "tune_operator",
]

__getattr__ = names_of(__name__, _SUBMODULES)
