"""Train a small model on one device or under a plan: losses, gradients, parameters, traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.parallel.plans.pipeline import Task
from ascend_lab.parallel.plans.plan import Plan
from ascend_lab.parallel.values.cuts import Cuts, Segments
from ascend_lab.parallel.values.engine import Trainer
from ascend_lab.parallel.values.group import Values
from ascend_lab.parallel.values.optimizers import Optimizer
from ascend_lab.parallel.values.pieces import Batch, Model, Net
from ascend_lab.parallel.values.tape import Tape, Var
from ascend_lab.parallel.values.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Run:
    """What training gave: a loss and all gradients a step, the parameters after the last one.

    `traffic` counts messages; `held` elements on the first rank of the first stage when the last
    backward pass has ended: parameters, gradients, state. Of each stage: `flights` the most
    micro-batches, `outputs` the most elements of operators' outputs held for the backward pass.
    """

    losses: tuple[float, ...]
    gradients: tuple[dict[str, Values], ...]
    parameters: dict[str, Values]
    traffic: Traffic = field(default_factory=Traffic)
    held: dict[str, int] = field(default_factory=dict)
    flights: tuple[int, ...] = (1,)
    outputs: tuple[int, ...] = ()


def loss_and_gradients(
    model: Model, weights: Mapping[str, Values], batch: Batch
) -> tuple[float, dict[str, Values]]:
    """Return the mean loss of a batch and its gradient for every weight, on one device."""
    groups = Cuts(Plan()).groups(Traffic())
    tape, x = Tape(), Var([batch.inputs])
    found = {key: Var([weight]) for key, weight in weights.items()}
    for piece in model.pieces:
        own = {name: found[f"{piece.name}.{name}"] for name in piece.weights}
        x = piece.forward(Net(tape, own, groups), x, [batch.targets])
    losses = x.values[0]
    tape.backward(x, [np.full_like(losses, 1 / batch.targets.size)])
    grads = {key: var.grads[0] for key, var in found.items() if var.grads is not None}
    return float(losses.mean()), grads


def train_single(model: Model, batches: Sequence[Batch], optimizer: Optimizer) -> Run:
    """Train on one device: what every plan must reproduce. One step a batch."""
    weights = model.weights
    states = {key: optimizer.start(weight) for key, weight in weights.items()}
    losses, gradients = [], []
    for number, batch in enumerate(batches, 1):
        loss, grads = loss_and_gradients(model, weights, batch)
        losses.append(loss)
        gradients.append(grads)
        for key, grad in grads.items():
            weights[key], states[key] = optimizer.update(weights[key], grad, states[key], number)
    return Run(tuple(losses), tuple(gradients), weights)


def train(
    model: Model,
    batches: Sequence[Batch],
    optimizer: Optimizer,
    plan: Plan,
    *,
    segments: Segments | None = None,
    order: Sequence[Sequence[Task]] | None = None,
) -> Run:
    """Take one step a batch under a plan; raise `ClusterError` where something does not divide.

    `segments`: gradients all-reduced together, in backward order; `order`: each stage's tasks,
    instead of those of the plan's schedule. The plan's `recompute` and `axes` matter for time and
    memory, not for values: they are ignored here.
    """
    trainer = Trainer(model, optimizer, Cuts(plan, segments), order)
    losses, gradients = [], []
    for number, batch in enumerate(batches, 1):
        losses.append(trainer.pass_through(batch))
        gradients.append(trainer.update(number))
    return Run(
        tuple(losses),
        tuple(gradients),
        trainer.assembled([chunk.store.whole_weights() for chunk in trainer.chunks]),
        trainer.traffic,
        trainer.held,
        tuple(trainer.flights),
        tuple(trainer.outputs),
    )
