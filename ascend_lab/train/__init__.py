"""Training: the step as a graph, its precision, recomputation, and what it costs."""

from ascend_lab.train.autodiff import TrainingGraph, training_graph
from ascend_lab.train.compiling import compile_training, training_layouts
from ascend_lab.train.precision import DynamicLossScale, found_inf
from ascend_lab.train.profile import GradientRow, StepProfile, profile_training
from ascend_lab.train.recompute import cuts, every
from ascend_lab.train.repeated import profile_layers
from ascend_lab.train.stepping import StepResult, at_step, first_values, run_step
from ascend_lab.train.timeline import StepTimeline, scaling_curve, step_timeline

__all__ = [
    "DynamicLossScale",
    "GradientRow",
    "StepProfile",
    "StepResult",
    "StepTimeline",
    "TrainingGraph",
    "at_step",
    "compile_training",
    "cuts",
    "every",
    "first_values",
    "found_inf",
    "profile_layers",
    "profile_training",
    "run_step",
    "scaling_curve",
    "step_timeline",
    "training_graph",
    "training_layouts",
]
