"""A model as a row of pieces, each a forward program over ranks; what a piece may ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ascend_lab.parallel.values.group import Group, Ranked, Values
from ascend_lab.parallel.values.tape import (
    Tape,
    Var,
    copy_in,
    gather_in,
    scatter_out,
    sum_out,
)

SEQUENCE = 1
"""Activations are (batch, sequence, width)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A weight that is cut along an axis among the ranks of a group: "tensor" or "data"."""

    group: str
    axis: int


@dataclass(frozen=True, slots=True)
class Net:
    """What a piece sees while it runs: the tape, its weights, the groups, and how x is split."""

    tape: Tape
    weights: Mapping[str, Var]
    groups: Mapping[str, Group]
    sequence: bool = False

    def __getitem__(self, name: str) -> Var:
        return self.weights[name]

    def apply(self, name: str, *inputs: Var, **attrs: Any) -> Var:
        """Apply an operator of the library."""
        return self.tape.apply(name, *inputs, **attrs)

    def enter(self, x: Var) -> Var:
        """Begin a tensor-parallel region: every rank gets all of x."""
        if self.sequence:
            return gather_in(self.tape, x, self.groups["tensor"], SEQUENCE)
        return copy_in(self.tape, x, self.groups["tensor"])

    def leave(self, x: Var) -> Var:
        """End it: x is each rank's part of a sum."""
        if self.sequence:
            return scatter_out(self.tape, x, self.groups["tensor"], SEQUENCE)
        return sum_out(self.tape, x, self.groups["tensor"])

    def linear(self, x: Var, weight: str, bias: str | None = None) -> Var:
        """Return x w, or x w + bias, with the rank's own columns or rows of w."""
        y = self.apply("batch_matmul", x, self[weight])
        return y if bias is None else self.apply("add", y, self[bias])

    def norm(self, x: Var, name: str) -> Var:
        """Return the layer norm of x with weights `name`.scale and `name`.bias."""
        return self.apply("layer_norm", x, self[f"{name}.scale"], self[f"{name}.bias"])


@dataclass(frozen=True, slots=True)
class Piece:
    """A layer: full weights, how they may be cut, and its program.

    `forward(net, x, targets)` returns y; the last piece of a model returns the loss of each token.
    """

    name: str
    weights: Mapping[str, Values]
    forward: Callable[[Net, Var, Ranked], Var]
    shards: Mapping[str, Shard] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Model:
    """Pieces in order; the first takes the inputs of a batch, the last gives losses."""

    pieces: tuple[Piece, ...]

    @property
    def weights(self) -> dict[str, Values]:
        """All weights by "piece.weight"."""
        return {f"{p.name}.{name}": w for p in self.pieces for name, w in p.weights.items()}

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return sum(w.size for w in self.weights.values())


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs (batch, ...) and targets, the class of each token, with the same leading axes."""

    inputs: Values
    targets: Values


def normal(rng: np.random.Generator, *shape: int) -> Values:
    """Return random matrices (..., rows, columns) of variance 1 / rows."""
    found: Values = rng.normal(size=shape) / np.sqrt(shape[-2])
    return found


def norm_weights(name: str, width: int, rng: np.random.Generator) -> dict[str, Values]:
    """Return scale and bias of a layer norm, near 1 and 0."""
    return {
        f"{name}.scale": 1.0 + 0.1 * rng.normal(size=width),
        f"{name}.bias": 0.1 * rng.normal(size=width),
    }
