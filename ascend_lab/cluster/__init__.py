"""Clusters: topologies, collectives that move real arrays, and how long they take."""

from ascend_lab.cluster.collectives import (
    ALGORITHMS,
    choose,
    closed_form_s,
    collective_time,
    compare,
    make,
)
from ascend_lab.cluster.execute import execute
from ascend_lab.cluster.fluid import Uses, fair_rates, finish_times
from ascend_lab.cluster.presets import TOPOLOGIES, load_topology
from ascend_lab.cluster.routing import Router, router_of
from ascend_lab.cluster.schedule import OPS, Round, Schedule, together
from ascend_lab.cluster.timing import CollectiveTime, lower_bound_s, time_collective
from ascend_lab.cluster.topology import Link, Topology, full_mesh, ring, star

__all__ = [
    "ALGORITHMS",
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
    "ring",
    "router_of",
    "star",
    "time_collective",
    "together",
]
