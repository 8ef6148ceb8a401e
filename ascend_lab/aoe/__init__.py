"""Tuners: spaces of schedules, searches over them, and how far from optimal they end."""

from ascend_lab.aoe.bank import Knowledge, open_knowledge
from ascend_lab.aoe.drive import Trace, Trial, drive
from ascend_lab.aoe.engine import Tuning, tune
from ascend_lab.aoe.network import NetworkResult, tune_network
from ascend_lab.aoe.operators import Operator, operators_of
from ascend_lab.aoe.report import Report
from ascend_lab.aoe.search import SEARCHES, search_named
from ascend_lab.aoe.settings import Bars, Settings
from ascend_lab.aoe.space import Point, Space, TableSpace
from ascend_lab.aoe.tuning import Result, tune_operator
from ascend_lab.aoe.workers import Workers, workers_of

__all__ = [
    "SEARCHES",
    "Bars",
    "Knowledge",
    "NetworkResult",
    "Operator",
    "Point",
    "Report",
    "Result",
    "Settings",
    "Space",
    "TableSpace",
    "Trace",
    "Trial",
    "Tuning",
    "Workers",
    "drive",
    "open_knowledge",
    "operators_of",
    "search_named",
    "tune",
    "tune_network",
    "tune_operator",
    "workers_of",
]
