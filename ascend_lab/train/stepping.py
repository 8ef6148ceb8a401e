"""Running a training graph step by step on arrays, as a loop of training would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from ascend_lab.errors import InputError
from ascend_lab.graph import evaluate
from ascend_lab.train.precision import found_inf
from ascend_lab.train.step import TrainingGraph

Values = NDArray[Any]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gives: the loss, parameters and states for the next one.

    After an overflow the values are the old ones: the step is skipped.
    """

    loss: float
    values: Mapping[str, Values]
    overflow: bool


def first_values(step: TrainingGraph) -> dict[str, Values]:
    """Return the values with which parameters and states start."""
    return {name: constant.array() for name, constant in step.initial.items()}


def run_step(
    step: TrainingGraph, values: Mapping[str, Values], data: Mapping[str, Values], number: int = 1
) -> StepResult:
    """Compute one step in NumPy: `data` are inputs and targets, `number` counts from 1 (for Adam).

    Raises `InputError` for a graph without an optimiser, or inputs that are missing.
    """
    if not set(step.parameters) <= step.updates.keys():
        raise InputError("a training graph with an optimiser", "gradients only", "name one")
    found = evaluate(at_step(step, number).graph, {**values, **data})
    new = {name: found[output] for name, output in step.updates.items()}
    overflow = found_inf(new)
    return StepResult(float(found[step.loss][0]), dict(values) if overflow else new, overflow)


def at_step(step: TrainingGraph, number: int) -> TrainingGraph:
    """Return the graph as it is at a step counted from 1: Adam's averages start at zero."""
    if number == 1 or not any(node.op == "adam" for node in step.graph.nodes):
        return step
    nodes = tuple(
        replace(node, attrs={**node.attrs, "step": number}) if node.op == "adam" else node
        for node in step.graph.nodes
    )
    return replace(step, graph=replace(step.graph, nodes=nodes))
