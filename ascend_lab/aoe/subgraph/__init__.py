"""The subgraph tuner: operators in slices, so that what one leaves in L2 the next finds there."""

from ascend_lab.aoe.subgraph.regions import Region, SlicePlan
from ascend_lab.aoe.subgraph.segments import compiled, prepared
from ascend_lab.aoe.subgraph.slicing import sliced
from ascend_lab.aoe.subgraph.tune import SubgraphResult, network_bound, tune_subgraph

__all__ = [
    "Region",
    "SlicePlan",
    "SubgraphResult",
    "compiled",
    "network_bound",
    "prepared",
    "sliced",
    "tune_subgraph",
]
