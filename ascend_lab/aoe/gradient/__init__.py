"""The gradient tuner (job 4): which gradients to send together, in data parallel training."""

from ascend_lab.aoe.gradient.baselines import BASELINES
from ascend_lab.aoe.gradient.cost import AlphaBeta, Cost, Piecewise, sampled
from ascend_lab.aoe.gradient.planning import GradientPlan, bound, end_of, plan
from ascend_lab.aoe.gradient.rows import Gradient, gradients_of
from ascend_lab.aoe.gradient.scenario import Scenario, evaluate
from ascend_lab.aoe.gradient.search import Improved, improve

__all__ = [
    "BASELINES",
    "AlphaBeta",
    "Cost",
    "Gradient",
    "GradientPlan",
    "Improved",
    "Piecewise",
    "Scenario",
    "bound",
    "end_of",
    "evaluate",
    "gradients_of",
    "improve",
    "plan",
    "sampled",
]
