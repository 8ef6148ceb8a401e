"""Training: the step as a graph, its precision, recomputation, and what it costs."""

from ascend_lab.train.autodiff import TrainingGraph, training_graph
from ascend_lab.train.precision import DynamicLossScale, found_inf
from ascend_lab.train.recompute import cuts, every
from ascend_lab.train.rules import RULES, Site, rule

__all__ = [
    "RULES",
    "DynamicLossScale",
    "Site",
    "TrainingGraph",
    "cuts",
    "every",
    "found_inf",
    "rule",
    "training_graph",
]
