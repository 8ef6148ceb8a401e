"""Training: the step as a graph, its precision, recomputation, and what it costs."""

# fmt: off
# isort: off
from ascend_lab.train.autodiff import training_graph
from ascend_lab.train.compile import compile_training
from ascend_lab.train.profile import (
    GradientRow, StepProfile, StepTimeline, profile_layers, profile_training, step_timeline,
)
from ascend_lab.train.step import (
    DynamicLossScale, StepResult, TrainingGraph, at_step, cuts, every, first_values, found_inf,
    run_step,
)

__all__ = [
    "DynamicLossScale", "GradientRow", "StepProfile", "StepResult", "StepTimeline",
    "TrainingGraph", "at_step", "compile_training", "cuts", "every", "first_values",
    "found_inf", "profile_layers", "profile_training", "run_step",
    "step_timeline", "training_graph",
]
