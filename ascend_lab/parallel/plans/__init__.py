"""Parallel plans: who computes and keeps what, memory and time of it, and the search for the best.

A `Plan` cuts a `Model` over the axes data, tensor, pipeline (and experts); `plan_time` says how
long a step takes and what a device keeps; `best_plans` tries all plans of a topology.
"""

from ascend_lab.parallel.plans.model import GraphModel, model_of
from ascend_lab.parallel.plans.pipeline import (
    PipelineTime,
    Task,
    bubble_share,
    orders,
    peak_held,
    run_pipeline,
)
from ascend_lab.parallel.plans.plan import (
    AXES,
    DeviceMemory,
    FixedModel,
    Model,
    Plan,
    Unit,
    split_units,
    stage_memory,
    state_bytes,
)
from ascend_lab.parallel.plans.search import Ranking, best_plans, placements, shapes
from ascend_lab.parallel.plans.timing import Costs, PlanTime, TopologyCosts, cut_model, plan_time

__all__ = [
    "AXES",
    "Costs",
    "DeviceMemory",
    "FixedModel",
    "GraphModel",
    "Model",
    "PipelineTime",
    "Plan",
    "PlanTime",
    "Ranking",
    "Task",
    "TopologyCosts",
    "Unit",
    "best_plans",
    "bubble_share",
    "cut_model",
    "model_of",
    "orders",
    "peak_held",
    "placements",
    "plan_time",
    "run_pipeline",
    "shapes",
    "split_units",
    "stage_memory",
    "state_bytes",
]
