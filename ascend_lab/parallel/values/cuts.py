"""What a plan does to one weight: how it is cut, and over whom its gradient is summed."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.errors import ClusterError
from ascend_lab.parallel.plans.plan import Plan
from ascend_lab.parallel.values.group import Group, grid
from ascend_lab.parallel.values.pieces import Piece, Shard
from ascend_lab.parallel.values.traffic import Traffic

Segments = tuple[tuple[int, int], ...]
"""(first, last), both included, of the gradients in backward order."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """A plan, and the gradients that plain data parallelism all-reduces together.

    `segments` None: each weight's gradient alone.
    """

    plan: Plan
    segments: Segments | None = None

    def __post_init__(self) -> None:
        """Check that choices fit together."""
        if self.segments and self.plan.zero_stage:
            what = "segments only where gradients are all-reduced"
            raise ClusterError(what, f"ZeRO stage {self.plan.zero_stage}", "drop one")
        if self.plan.expert > 1 and self.plan.sequence:
            what = "whole sequences for experts, whose capacity counts a sequence's tokens"
            raise ClusterError(what, "a split sequence", "drop one")

    def groups(self, traffic: Traffic) -> dict[str, Group]:
        """Return the groups of a stage's ranks; "data" is "replica" x "expert"."""
        plan = self.plan
        inner = {"tensor": plan.tensor}
        outer = {"replica": plan.data // plan.expert, "expert": plan.expert}
        return {**grid({**outer, **inner}, traffic), **grid({"data": plan.data, **inner}, traffic)}

    def shard(self, piece: Piece, name: str) -> Shard | None:
        """Return how a weight is cut, or None if every rank of a stage has all of it."""
        shard = piece.shards.get(name)
        whole = shard is None or (shard.group == "expert" and self.plan.expert == 1)
        return None if whole else shard

    def sums(self, piece: Piece, name: str) -> tuple[str, ...]:
        """Return the groups whose ranks each have only part of a weight's gradient."""
        shard = self.shard(piece, name)
        found = ["tensor"] if self.plan.sequence and shard is None else []
        found.append("replica" if shard is not None and shard.group == "expert" else "data")
        return tuple(found)
