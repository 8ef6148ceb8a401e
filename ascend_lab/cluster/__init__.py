"""Clusters: topologies, collectives that move real arrays, and how long they take."""

# fmt: off
# isort: off
from ascend_lab.cluster.choice import collective_time, compare, make
from ascend_lab.cluster.fit import fit_collective, held_out, mape, read_table
from ascend_lab.cluster.loader import TOPOLOGIES, load_topology
from ascend_lab.cluster.schedule import (
    ALGORITHMS, OPS, Round, Schedule, closed_form_s, execute, together,
)
from ascend_lab.cluster.timing import CollectiveTime, time_collective
from ascend_lab.cluster.topology import Link, Topology, full_mesh, ring, star

__all__ = [
    "ALGORITHMS", "OPS", "TOPOLOGIES", "CollectiveTime", "Link", "Round", "Schedule",
    "Topology", "closed_form_s", "collective_time", "compare", "execute", "fit_collective",
    "full_mesh", "held_out", "load_topology", "make", "mape", "read_table", "ring", "star",
    "time_collective", "together",
]
