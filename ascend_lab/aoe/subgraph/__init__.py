"""The subgraph tuner: operators in slices, so that what one leaves in L2 the next finds there."""

# fmt: off
# isort: off
from ascend_lab.aoe.subgraph.segments import Segments, cheapest, compiled, even, every, prepared
from ascend_lab.aoe.subgraph.slicing import Region, SlicePlan, ranges_of, sliced
from ascend_lab.aoe.subgraph.tune import SubgraphResult, plan_time, planned, tune_subgraph

__all__ = [
    "Region", "Segments", "SlicePlan", "SubgraphResult", "cheapest", "compiled", "even",
    "every", "plan_time", "planned", "prepared", "ranges_of", "sliced", "tune_subgraph",
]
