"""Bytes a device needs for a plan: weights, gradients, optimiser state, activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ascend_lab.errors import InputError
from ascend_lab.parallel.plans.plan import Plan
from ascend_lab.parallel.plans.shape import HALF_BYTES, Unit

STATE_BYTES = {"sgd": 8, "adam": 12}
"""Optimiser state a parameter, fp32: master copy and momentum; Adam has two moments."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device of a stage, by what they are for."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of them; workspaces of kernels are not counted."""
        state = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return state + self.activations_bytes

    def as_dict(self) -> dict[str, float]:
        """Return them by name, ready for JSON."""
        return {
            "weights_bytes": self.weights_bytes,
            "gradients_bytes": self.gradients_bytes,
            "optimizer_bytes": self.optimizer_bytes,
            "activations_bytes": self.activations_bytes,
            "total_bytes": self.total_bytes,
        }


def state_bytes(
    parameters: float, sharers: int, zero_stage: int = 0, optimizer: str = "adam"
) -> tuple[float, float, float]:
    """Return weights, gradients and optimiser state of a device in mixed precision.

    2 + 2 bytes a parameter in fp16 and K in fp32, K = 12 for Adam (16 in all); ZeRO stage 1
    divides K by the `sharers`, 2 the gradients too, 3 the weights too ({cite}`zero2020`).
    """
    if optimizer not in STATE_BYTES:
        raise InputError(f"an optimiser of {', '.join(STATE_BYTES)}", repr(optimizer), "choose one")
    weights = gradients = float(HALF_BYTES * parameters)
    state = float(STATE_BYTES[optimizer] * parameters)
    return (
        weights / sharers if zero_stage >= 3 else weights,
        gradients / sharers if zero_stage >= 2 else gradients,
        state / sharers if zero_stage >= 1 else state,
    )


def stage_memory(
    chunks: Sequence[Sequence[Unit]],
    held: Mapping[int, int],
    plan: Plan,
    optimizer: str = "adam",
) -> DeviceMemory:
    """Return the memory of a device with these chunks (virtual stages) of units.

    `held[i]`: micro-batches of chunk i held when most are. Kept is what each unit writes for its
    backward; with recomputation only what units read, and one unit's activations whole.
    """
    units = [unit for chunk in chunks for unit in chunk]
    plain = sum(u.parameters for u in units)
    experts = sum(u.expert_parameters for u in units) / plan.expert
    parts = [0.0, 0.0, 0.0]
    for parameters, sharers in ((plain, plan.data), (experts, plan.data // plan.expert)):
        for i, size in enumerate(state_bytes(parameters, sharers, plan.zero_stage, optimizer)):
            parts[i] += size
    if plan.zero_stage == 3:
        whole = max((u.parameters + u.expert_parameters / plan.expert for u in units), default=0)
        parts[0] += HALF_BYTES * whole * (1 - 1 / plan.data)
    activations = 0.0
    for i, chunk in enumerate(chunks):
        kept = sum(u.input_bytes if plan.recompute else u.activation_bytes for u in chunk)
        activations += held.get(i, 0) * kept
    if plan.recompute:
        activations += max((u.activation_bytes - u.input_bytes for u in units), default=0.0)
    return DeviceMemory(parts[0], parts[1], parts[2], activations)
