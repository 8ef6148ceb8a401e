"""The gradient tuner (job 4): which gradients to send together, in data parallel training."""

# fmt: off
# isort: off
from ascend_lab.aoe.gradient.planning import BASELINES, GradientPlan, bound, end_of, plan
from ascend_lab.aoe.gradient.scenario import Improved, Scenario, evaluate, improve
from ascend_lab.aoe.gradient.splits import AlphaBeta, Gradient, Piecewise, gradients_of, sampled
from ascend_lab.cluster.choice import Cost

__all__ = [
    "BASELINES", "AlphaBeta", "Cost", "Gradient", "GradientPlan", "Improved", "Piecewise",
    "Scenario", "bound", "end_of", "evaluate", "gradients_of", "improve", "plan", "sampled",
]
