"""Clusters: topologies, collectives that move real arrays, and how long they take."""

from ascend_lab.cluster.choice import choose, collective_time, compare
from ascend_lab.cluster.closed_forms import closed_form_s
from ascend_lab.cluster.collectives import ALGORITHMS, LEVELS, make, op_name, parse_name
from ascend_lab.cluster.fluid import Uses, fair_rates, finish_times
from ascend_lab.cluster.presets import TOPOLOGIES, load_topology
from ascend_lab.cluster.schedule import OPS, Round, Schedule, execute, together
from ascend_lab.cluster.timing import CollectiveTime, lower_bound_s, time_collective
from ascend_lab.cluster.topology import Link, Router, Topology, full_mesh, ring, router_of, star

# The algorithms of collective communication: schedules, their choice, their closed forms.


__all__ = [
    "ALGORITHMS",
    "LEVELS",
    "OPS",
    "TOPOLOGIES",
    "CollectiveTime",
    "Link",
    "Round",
    "Router",
    "Schedule",
    "Topology",
    "Uses",
    "choose",
    "closed_form_s",
    "collective_time",
    "compare",
    "execute",
    "fair_rates",
    "finish_times",
    "full_mesh",
    "load_topology",
    "lower_bound_s",
    "make",
    "op_name",
    "parse_name",
    "ring",
    "router_of",
    "star",
    "time_collective",
    "together",
]
