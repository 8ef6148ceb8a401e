"""The algorithms of collective communication: schedules, their choice, their closed forms."""

from ascend_lab.cluster.collectives.catalogue import make
from ascend_lab.cluster.collectives.choice import choose, collective_time, compare
from ascend_lab.cluster.collectives.closed import closed_form_s
from ascend_lab.cluster.collectives.names import ALGORITHMS, LEVELS, op_name, parse_name

__all__ = [
    "ALGORITHMS",
    "LEVELS",
    "choose",
    "closed_form_s",
    "collective_time",
    "compare",
    "make",
    "op_name",
    "parse_name",
]
