"""Simulates clusters of NPUs: topologies, collective operations on real arrays, and their times.

Begin with these:

- `load_topology`: a cluster by name, such as "910a-roce:64", or from a TOML file.
- `Topology`, `ring`, `star`, `full_mesh`: build a topology of your own.
- `collective_time`: the quickest algorithm of a collective on a topology, and its time.
- `compare`: all algorithms that apply, the quickest first.
- `make`: the schedule of one algorithm; `execute` moves arrays by it, `time_collective` times it.
- `fit_collective`: latency and rate of links from measured times.

Schedules prepared for a topology are cached, so that timing them for another size takes
microseconds to milliseconds. Data-parallel training all-reduces gradients in buckets of about 25
MiB, which `buckets` forms. Training graphs are in `train`, parallel plans in `parallel`.

Four ranks add up their arrays along a ring; on a cluster of 16 devices 100 MB take milliseconds:

>>> import numpy as np
>>> from ascend_lab.cluster import collective_time, execute, load_topology, make
>>> schedule = make("all_reduce", "ring", 4)
>>> execute(schedule, [np.full(8, rank) for rank in range(4)])[0]
array([6, 6, 6, 6, 6, 6, 6, 6])
>>> best = collective_time("all_reduce", load_topology("910a-roce:16"), size_bytes=100e6)
>>> best.lower_bound_s <= best.time_s < 0.1
True
"""

from ascend_lab.cluster.build import make
from ascend_lab.cluster.fit import fit_collective
from ascend_lab.cluster.loader import load_topology
from ascend_lab.cluster.quickest import collective_time, compare
from ascend_lab.cluster.schedule import Schedule, execute
from ascend_lab.cluster.timing import time_collective
from ascend_lab.cluster.topology import Topology, full_mesh, ring, star
from ascend_lab.facade import names_of

__all__ = [
    "Schedule",
    "Topology",
    "collective_time",
    "compare",
    "execute",
    "fit_collective",
    "full_mesh",
    "load_topology",
    "make",
    "ring",
    "star",
    "time_collective",
]

__getattr__ = names_of(__name__, {})
