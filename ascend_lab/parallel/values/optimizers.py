"""Optimisers that update any slice of a weight: element by element, so a shard is enough."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ascend_lab import ops
from ascend_lab.parallel.values.group import Values

State = tuple[Values, ...]


@dataclass(frozen=True, slots=True)
class Sgd:
    """Stochastic gradient descent with momentum: one number of state a weight."""

    lr: float = 0.1
    momentum: float = 0.9

    def start(self, weight: Values) -> State:
        """Return the state before the first step."""
        return (np.zeros_like(weight),)

    def update(self, weight: Values, grad: Values, state: State, step: int) -> tuple[Values, State]:
        """Return weight and state after a step, counted from 1."""
        new, *rest = ops.get("sgd_momentum").reference(
            weight, grad, *state, lr=self.lr, momentum=self.momentum
        )
        return new, tuple(rest)


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam: mean and mean square of the gradient, two numbers of state a weight."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999

    def start(self, weight: Values) -> State:
        """Return the state before the first step."""
        return np.zeros_like(weight), np.zeros_like(weight)

    def update(self, weight: Values, grad: Values, state: State, step: int) -> tuple[Values, State]:
        """Return weight and state after a step, counted from 1."""
        settings = {"lr": self.lr, "beta1": self.beta1, "beta2": self.beta2, "step": step}
        new, *rest = ops.get("adam").reference(weight, grad, *state, **settings)
        return new, tuple(rest)


Optimizer = Sgd | Adam
