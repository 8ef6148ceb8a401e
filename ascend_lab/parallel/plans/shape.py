"""What a plan needs to know of a network: its units, for any micro-batch and tensor degree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ascend_lab.errors import ClusterError

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
