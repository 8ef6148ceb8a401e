"""The subgraph tuner: operators in slices, so that what one leaves in L2 the next finds there."""

# fmt: off
# isort: off
from ascend_lab.aoe.subgraph.segments import Segments
from ascend_lab.aoe.subgraph.slicing import Region, SlicePlan, even, ranges_of, sliced
from ascend_lab.aoe.subgraph.tune import (
    SubgraphResult, cheapest, compiled, every, plan_time, planned, prepared, tune_subgraph,
)

__all__ = [
    "Region", "Segments", "SlicePlan", "SubgraphResult", "cheapest", "compiled", "even",
    "every", "plan_time", "planned", "prepared", "ranges_of", "sliced", "tune_subgraph",
]
