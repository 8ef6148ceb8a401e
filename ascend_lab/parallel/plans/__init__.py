"""Parallel plans: who computes and keeps what, memory and time of it, and the search for the best.

A `Plan` cuts a model over the axes data, tensor, pipeline (and experts); `plan_time` says how long
a step takes and what a device keeps; `best_plans` tries all plans of a topology.
"""

# fmt: off
# isort: off
from ascend_lab.parallel.plans.model import GraphModel, model_of
from ascend_lab.parallel.plans.pipeline import bubble_share, orders, run_pipeline
from ascend_lab.parallel.plans.plan import FixedModel, Plan, Unit, state_bytes
from ascend_lab.parallel.plans.search import Ranking, best_plans, placements
from ascend_lab.parallel.plans.timing import PlanTime, TopologyCosts, cut_model, plan_time

__all__ = [
    "FixedModel", "GraphModel", "Plan", "PlanTime", "Ranking", "TopologyCosts", "Unit",
    "best_plans", "bubble_share", "cut_model", "model_of", "orders", "placements", "plan_time",
    "run_pipeline", "state_bytes",
]
