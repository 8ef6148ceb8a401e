"""Training: the step as a graph, its precision, recomputation, and what it costs."""

from ascend_lab.train.autodiff import TrainingGraph, training_graph
from ascend_lab.train.compiling import compile_training, training_layouts
from ascend_lab.train.precision import DynamicLossScale, found_inf
from ascend_lab.train.recompute import cuts, every
from ascend_lab.train.rules import RULES, Site, rule
from ascend_lab.train.stepping import StepResult, at_step, first_values, run_step

__all__ = [
    "RULES",
    "DynamicLossScale",
    "Site",
    "StepResult",
    "TrainingGraph",
    "at_step",
    "compile_training",
    "cuts",
    "every",
    "first_values",
    "found_inf",
    "rule",
    "run_step",
    "training_graph",
    "training_layouts",
]
