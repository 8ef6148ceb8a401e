"""The algorithms of collective communication: schedules, their choice, their closed forms."""

from ascend_lab.cluster.collectives.catalogue import ALGORITHMS, LEVELS, make, op_name, parse_name
from ascend_lab.cluster.collectives.choice import choose, collective_time, compare

__all__ = [
    "ALGORITHMS",
    "LEVELS",
    "choose",
    "collective_time",
    "compare",
    "make",
    "op_name",
    "parse_name",
]
