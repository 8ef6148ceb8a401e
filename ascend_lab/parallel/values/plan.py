"""How many devices and what each of them does: the plan a training run follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ascend_lab.errors import ClusterError

if TYPE_CHECKING:
    from ascend_lab.parallel.values.pieces import Piece, Shard

Segments = tuple[tuple[int, int], ...]
"""(first, last), both included, of the gradients in backward order."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Ranks on each axis, and choices.

    `data` replicas, each of `stages` pipeline stages, each of `context` x `tensor` ranks.
    `chunks`: groups of layers a stage has (more than one only for "interleaved").
    `zero`: 0 replicas keep everything; 1 optimiser state is cut among them; 2 gradients too; 3
    parameters too. `segments`: gradients that are all-reduced together (none: each alone).
    `sequence`: split layer norms and sums among the tensor ranks. `experts`: one replica's share
    of experts on each data rank.
    """

    data: int = 1
    stages: int = 1
    context: int = 1
    tensor: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    zero: int = 0
    segments: Segments | None = None
    sequence: bool = False
    experts: bool = False

    def __post_init__(self) -> None:
        """Check that choices are known and fit together."""
        if min(self.data, self.stages, self.context, self.tensor) < 1:
            raise ClusterError("at least one rank on every axis", str(self), "use 1")
        if self.zero not in (0, 1, 2, 3):
            raise ClusterError("a ZeRO stage from 0 to 3", str(self.zero), "choose one")
        if self.zero and self.segments:
            raise ClusterError("segments for all-reduced gradients", "ZeRO", "drop one")
        if self.experts and (self.sequence or self.context > 1):
            what = "whole sequences for experts, whose capacity counts a sequence's tokens"
            raise ClusterError(what, "a split sequence", "drop one")

    @property
    def ranks(self) -> int:
        """Devices in all."""
        return self.data * self.stages * self.context * self.tensor

    def shard(self, piece: Piece, name: str) -> Shard | None:
        """Return how this plan cuts a weight, or None if every rank of a stage has all of it."""
        shard = piece.shards.get(name)
        if shard is None or (shard.group == "data" and not self.experts):
            return None
        return shard

    def sums(self, piece: Piece, name: str) -> tuple[str, ...]:
        """Return the groups over which a weight's gradient must be added up."""
        shard = self.shard(piece, name)
        axes = ["context"] if self.context > 1 else []
        if self.sequence and shard is None:
            axes.append("tensor")
        if shard is None or shard.group != "data":
            axes.append("data")
        return tuple(axes)
