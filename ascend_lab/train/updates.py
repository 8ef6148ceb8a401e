"""The last phase of a step: gradients become fp32 and unscaled, parameters and states new."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ascend_lab.errors import InputError
from ascend_lab.graph import Constant, Fill, TensorType, Value
from ascend_lab.ops.operator import Operator
from ascend_lab.ops.registry import get
from ascend_lab.train.tape import Tape

STATES = {"sgd": ("velocity",), "adam": ("mean", "square")}
"""What each optimiser remembers about a parameter."""
_OPERATORS = {"sgd": "sgd_momentum", "adam": "adam"}
RUNNING_MOMENTUM = 0.9
"""Share of the old running statistics of a batch norm that stays at each step."""


@dataclass(frozen=True, slots=True)
class Optimiser:
    """An optimiser and its attributes: lr, momentum, weight_decay, beta1, step, ..."""

    name: str
    attrs: Mapping[str, Any]

    @property
    def operator(self) -> Operator:
        """The operator that updates one parameter."""
        return get(_OPERATORS[self.name])

    @property
    def states(self) -> tuple[str, ...]:
        """What it remembers about a parameter."""
        return STATES[self.name]


def optimiser(name: str | None, attrs: Mapping[str, Any] | None) -> Optimiser | None:
    """Return an optimiser by name; raise `InputError` for an unknown one or attribute."""
    if name is None:
        if attrs:
            raise InputError("settings of an optimiser", "optimizer=None", "name the optimiser")
        return None
    if name not in STATES:
        raise InputError(f"optimizer {', '.join(STATES)} or None", repr(name), "choose one")
    found = Optimiser(name, dict(attrs or {}))
    found.operator.settings(found.attrs)
    return found


def declare_states(net: Tape, name: str, kind: TensorType, found: Optimiser) -> list[str]:
    """Declare an optimiser's states of a parameter as inputs; return their names."""
    states = [net.unique(f"{name}.{state}") for state in found.states]
    for state in states:
        net.input(state, kind.shape, kind.dtype)
    return states


def zeros(net: Tape, name: str) -> Constant:
    """Return the value with which a state starts."""
    return Constant(net.kind(name), Fill(0.0))


def unscaled(net: Tape, grad: Value, dtype: str, loss_scale: float) -> Value:
    """Return a gradient in a parameter's format, without the loss's scale."""
    found: Value = net.scaled(net.in_format(grad, dtype), 1.0 / loss_scale)
    return found


def update(
    net: Tape, name: str, grad: Value, states: list[str], found: Optimiser, loss_scale: float
) -> dict[str, str]:
    """Append a parameter's update; return the new tensor of the parameter and of each state."""
    net.prefix = f"{name}.update"
    old = net.value(name)
    grad = unscaled(net, grad, old.type.dtype, loss_scale)
    given = (old, grad, *map(net.value, states))
    made = net.add_node(found.operator.name, *given, **found.attrs)
    return {one: new.name for one, new in zip((name, *states), made, strict=True)}


def running(net: Tape, name: str, batch: str) -> str:
    """Append the new running statistic: share m of the old, 1 - m of the batch's; return it."""
    net.prefix = f"{name}.update"
    old = net.muls(net.value(name), number=RUNNING_MOMENTUM)
    new = net.muls(net.value(batch), number=1.0 - RUNNING_MOMENTUM)
    made: Value = net.add(old, new)
    return made.name
