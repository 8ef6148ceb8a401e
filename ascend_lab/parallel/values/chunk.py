"""A run of pieces on one stage: forward and backward passes of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ascend_lab.parallel.values.cuts import Cuts
from ascend_lab.parallel.values.group import Group, Ranked
from ascend_lab.parallel.values.optimizers import Optimizer
from ascend_lab.parallel.values.pieces import Net, Piece
from ascend_lab.parallel.values.stores import Replicas
from ascend_lab.parallel.values.tape import Tape, Var
from ascend_lab.parallel.values.zero import Sharded


@dataclass(frozen=True, slots=True)
class Flight:
    """A micro-batch between its forward and backward pass through a chunk."""

    tape: Tape
    first: Var
    last: Var


class Chunk:
    """Consecutive pieces on the data x tensor ranks of one stage."""

    def __init__(
        self, pieces: Sequence[Piece], groups: dict[str, Group], cuts: Cuts, optimizer: Optimizer
    ) -> None:
        self.pieces, self.groups, self.cuts = pieces, groups, cuts
        kind = Sharded if cuts.plan.zero_stage else Replicas
        self.store = kind(pieces, groups, cuts, optimizer)
        self.flights: dict[int, Flight] = {}

    def forward(self, micro: int, x: Ranked, targets: Ranked) -> Ranked:
        """Run the pieces and keep what the backward pass needs."""
        tape, first = Tape(), Var(x)
        last = first
        for piece in self.pieces:
            weights = self.store.fetch(tape, piece)
            net = Net(tape, weights, self.groups, self.cuts.plan.sequence)
            last = piece.forward(net, last, targets)
            self.store.release(tape, piece, weights)
        self.flights[micro] = Flight(tape, first, last)
        return last.values

    def backward(self, micro: int, grads: Ranked) -> Ranked | None:
        """Return the gradient of the chunk's input, if it has one; weights keep theirs."""
        flight = self.flights.pop(micro)
        flight.tape.backward(flight.last, grads)
        return flight.first.grads
