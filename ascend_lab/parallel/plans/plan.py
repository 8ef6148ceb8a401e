"""A parallel plan: how many devices along each axis, and what each keeps and when it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ascend_lab.errors import ClusterError, InputError
from ascend_lab.parallel.plans.pipeline import SCHEDULES

AXES = ("tensor", "data", "pipeline")
"""From the innermost outwards, unless a plan says otherwise: neighbours exchange most."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Devices = data * tensor * pipeline; `expert` devices of the data axis share the experts.

    `sequence`: what tensor parallelism computes alike everywhere is cut along the tokens instead
    ({cite}`korthikanti2022`). `zero_stage`: 1 spreads the optimiser's state over the data axis, 2
    the gradients too, 3 the weights too ({cite}`zero2020`). `recompute`: keep only what each layer
    reads and compute it once more on the way back ({cite}`chen2016sublinear`). `axes`: the order
    in which devices are counted, the fastest first. Raises `ClusterError` for what cannot be.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    sequence: bool = False
    zero_stage: int = 0
    micro_batches: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    recompute: bool = False
    axes: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        """Check counts, names, and what excludes what."""
        counts = (self.data, self.tensor, self.pipeline, self.expert, self.micro_batches)
        if min(*counts, self.virtual) < 1:
            raise ClusterError("a plan with counts of at least 1", self.label, "raise them")
        if self.schedule not in SCHEDULES or sorted(self.axes) != sorted(AXES):
            got = f"{self.schedule}, {self.axes}"
            raise ClusterError(f"a schedule of {SCHEDULES} and all axes {AXES}", got, "choose")
        if self.zero_stage not in range(4):
            raise ClusterError("a ZeRO stage from 0 to 3", str(self.zero_stage), "choose one")
        if self.data % self.expert:
            what = "experts spread over a divisor of the data axis"
            raise ClusterError(what, f"{self.expert} of {self.data}", "change one")
        if self.virtual > 1 and (self.pipeline == 1 or self.micro_batches % self.pipeline):
            what = "virtual stages with P > 1 and a multiple of P micro-batches"
            raise ClusterError(what, self.label, "change one")

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.data * self.tensor * self.pipeline

    @property
    def label(self) -> str:
        """The plan in a few letters: "D4 T2 P2 1f1b m8 Z1 recompute"."""
        parts = [f"D{self.data}", f"T{self.tensor}", f"P{self.pipeline}"]
        parts += [f"E{self.expert}"] if self.expert > 1 else []
        if self.pipeline > 1:
            parts.append(self.schedule + (f" v{self.virtual}" if self.virtual > 1 else ""))
        parts += [f"m{self.micro_batches}"] if self.micro_batches > 1 else []
        parts += [f"Z{self.zero_stage}"] if self.zero_stage else []
        parts += ["sequence"] if self.sequence else []
        parts += ["recompute"] if self.recompute else []
        parts += ["<".join(a[0].upper() for a in self.axes)] if self.axes != AXES else []
        return " ".join(parts)

    def micro_batch(self, batch: int) -> int:
        """Return the samples of one micro-batch; raise `ClusterError` if they do not come out."""
        pieces = self.data * self.micro_batches
        if batch % pieces or batch < pieces:
            what = f"{self.label}: a batch that is a multiple of {pieces}"
            raise ClusterError(what, str(batch), "change the batch")
        return batch // pieces

    def place(self, tensor: int, data: int, pipeline: int) -> int:
        """Return the number of the device at these coordinates."""
        at = {"tensor": tensor, "data": data, "pipeline": pipeline}
        sizes = {"tensor": self.tensor, "data": self.data, "pipeline": self.pipeline}
        number, stride = 0, 1
        for axis in self.axes:
            number += at[axis] * stride
            stride *= sizes[axis]
        return number

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return all groups of devices along an axis, which communicate at the same time.

        The groups of axis "pipeline" list the stages in order. Axis "expert": neighbours of the
        data axis, `expert` at a time; axis "replica": devices that hold the same experts.
        """
        if axis in ("expert", "replica"):
            return [part for group in self.groups("data") for part in self._experts(group, axis)]
        sizes = {"tensor": self.tensor, "data": self.data, "pipeline": self.pipeline}
        others = [a for a in AXES if a != axis]
        return [
            tuple(self.place(**{axis: k, others[0]: i, others[1]: j}) for k in range(sizes[axis]))
            for i in range(sizes[others[0]])
            for j in range(sizes[others[1]])
        ]

    def _experts(self, group: tuple[int, ...], axis: str) -> list[tuple[int, ...]]:
        if axis == "expert":
            return [group[i : i + self.expert] for i in range(0, len(group), self.expert)]
        return [group[i :: self.expert] for i in range(self.expert)]


# What a plan needs to know of a network: its units, for any micro-batch and tensor degree.


HALF_BYTES = 2
"""Bytes of a number in fp16 or bf16."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Layers that stay on one stage, as one device of a tensor group sees one micro-batch.

    `parameters` and `expert_parameters` are the device's own (experts: of all experts, before they
    are spread); `activation_bytes` is kept from forward to backward, `input_bytes` of it is what
    the unit reads, `boundary_bytes` what it hands on. Each way, it takes `exchanges` all-reduces
    of `exchange_bytes` in its tensor group and `dispatches` all-to-alls of `dispatch_bytes` in its
    expert group.
    """

    name: str
    parameters: int
    forward_s: float
    backward_s: float
    activation_bytes: float
    input_bytes: float
    boundary_bytes: float
    exchanges: int = 0
    exchange_bytes: float = 0.0
    expert_parameters: int = 0
    dispatches: int = 0
    dispatch_bytes: float = 0.0


class Model(Protocol):
    """A network that plans can cut."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def update_s_per_parameter(self) -> float:
        """Seconds the optimiser takes a parameter."""
        ...

    def units(self, micro_batch: int, tensor: int, sequence: bool) -> tuple[Unit, ...]:
        """Return the units in order; raise `ClusterError` for what the network does not allow."""
        ...

    def tensor_degrees(self) -> tuple[int, ...]:
        """Return the tensor degrees the network allows; 1 is always there."""
        ...


@dataclass(frozen=True, slots=True)
class FixedModel:
    """Units of one sample each, all of it in proportion to the micro-batch; tensor degree 1."""

    name: str
    samples: tuple[Unit, ...]
    update_s_per_parameter: float = 0.0

    def units(self, micro_batch: int, tensor: int, sequence: bool) -> tuple[Unit, ...]:
        """Return the units times the micro-batch."""
        if tensor > 1 or sequence:
            raise ClusterError(f"{self.name}: tensor degree 1", str(tensor), "use a transformer")
        return tuple(_times(unit, micro_batch) for unit in self.samples)

    def tensor_degrees(self) -> tuple[int, ...]:
        """Return 1."""
        return (1,)


def _times(unit: Unit, micro_batch: int) -> Unit:
    scaled = {
        name: getattr(unit, name) * micro_batch
        for name in ("forward_s", "backward_s", "activation_bytes", "input_bytes",
                     "boundary_bytes", "exchange_bytes", "dispatch_bytes")
    }  # fmt: skip
    return replace(unit, **scaled)


def transformer_activation_bytes(
    tokens: int,
    width: int,
    heads: int,
    length: int,
    tensor: int = 1,
    *,
    sequence: bool = False,
    recompute: bool = False,
) -> float:
    """Return what one layer keeps for the backward pass, two-byte numbers, dropout masks included.

    tokens * width * (10 + 24 / t + 5 heads length / (width t)) bytes; with sequence parallelism
    (34 + 5 heads length / width) / t; with recomputation 2 ({cite}`korthikanti2022`).
    """
    if recompute:
        return 2.0 * tokens * width / (tensor if sequence else 1)
    whole = 0.0 if sequence else 10.0
    cut = (24.0 if not sequence else 34.0) + 5.0 * heads * length / width
    return tokens * width * (whole + cut / tensor)


def split_units(costs: Sequence[float], pieces: int) -> list[range]:
    """Return consecutive ranges of units, one a piece, the dearest as cheap as possible.

    Exact dynamic programming over prefixes, O(pieces * units^2). Raises `ClusterError` if there
    are fewer units than pieces.
    """
    n = len(costs)
    if pieces > n:
        raise ClusterError(f"{pieces} stages of at least one unit", f"{n} units", "fewer stages")
    prefix = np.concatenate([[0.0], np.cumsum(costs)])
    last = prefix[:, None] - prefix[None, :]
    last[np.tri(n + 1, dtype=bool).T] = np.inf  # a piece starts before it ends
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    cut = []
    for _ in range(pieces):
        dearest = np.maximum(best[None, :], last)
        cut.append(dearest.argmin(axis=1))
        best = dearest.min(axis=1)
    ranges: list[range] = []
    end = n
    for starts in reversed(cut):
        ranges.append(range(int(starts[end]), end))
        end = int(starts[end])
    return ranges[::-1]


# Bytes a device needs for a plan: weights, gradients, optimiser state, activations.


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
