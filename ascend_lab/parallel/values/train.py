"""Train a model under a plan: losses, gradients and parameters, and what was communicated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.errors import ClusterError
from ascend_lab.parallel.values.group import Group, Ranked, Traffic, Values, grid, part, same, send
from ascend_lab.parallel.values.optimizers import Optimizer
from ascend_lab.parallel.values.pieces import Batch, Model, Net, Piece
from ascend_lab.parallel.values.pipeline import Order, Task, order_named
from ascend_lab.parallel.values.plan import Plan
from ascend_lab.parallel.values.stores import Replicas
from ascend_lab.parallel.values.tape import Tape, Var
from ascend_lab.parallel.values.zero import Sharded


@dataclass(frozen=True, slots=True)
class Run:
    """What training gave: a loss and all gradients a step, the parameters after the last one.

    `traffic` counts messages; `held` elements on the first rank of the first stage when a backward
    pass has ended: parameters, gradients, state; `flights` the most micro-batches each stage held.
    """

    losses: tuple[float, ...]
    gradients: tuple[dict[str, Values], ...]
    parameters: dict[str, Values]
    traffic: Traffic
    held: dict[str, int]
    flights: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class Flight:
    """A micro-batch between its forward and backward pass through a chunk."""

    tape: Tape
    first: Var
    last: Var


class Chunk:
    """Consecutive pieces on the data x context x tensor ranks of one stage."""

    def __init__(
        self, pieces: Sequence[Piece], groups: dict[str, Group], plan: Plan, optimizer: Optimizer
    ) -> None:
        self.pieces, self.groups, self.plan = pieces, groups, plan
        kind = Sharded if plan.zero else Replicas
        self.store = kind(pieces, groups, plan, optimizer)
        self.flights: dict[int, Flight] = {}

    def forward(self, micro: int, x: Ranked, targets: Ranked) -> Ranked:
        """Run the pieces and keep what the backward pass needs."""
        tape, first = Tape(), Var(x)
        last = first
        for piece in self.pieces:
            weights = self.store.fetch(tape, piece)
            net = Net(tape, weights, self.groups, self.plan.sequence)
            last = piece.forward(net, last, targets)
            self.store.release(tape, piece, weights)
        self.flights[micro] = Flight(tape, first, last)
        return last.values

    def backward(self, micro: int, grads: Ranked) -> Ranked | None:
        """Return the gradient of the chunk's input, if it has one; weights keep theirs."""
        flight = self.flights.pop(micro)
        flight.tape.backward(flight.last, grads)
        return flight.first.grads


def train(model: Model, batches: Sequence[Batch], optimizer: Optimizer, plan: Plan) -> Run:
    """Take one step a batch under a plan; raise `ClusterError` where something does not divide."""
    trainer = Trainer(model, optimizer, plan)
    losses, gradients = [], []
    for number, batch in enumerate(batches, 1):
        losses.append(trainer.pass_through(batch))
        trainer.held = trainer.chunks[0].store.held()
        gradients.append(trainer.update(number))
    parameters = trainer.assembled([c.store.whole_weights() for c in trainer.chunks])
    return Run(
        tuple(losses),
        tuple(gradients),
        parameters,
        trainer.traffic,
        trainer.held,
        tuple(trainer.flights),
    )


class Trainer:
    """The chunks of a model on their stages, and the messages between them."""

    def __init__(self, model: Model, optimizer: Optimizer, plan: Plan) -> None:
        self.model, self.plan, self.traffic = model, plan, Traffic()
        sizes = {"data": plan.data, "context": plan.context, "tensor": plan.tensor}
        self.groups = grid(sizes, self.traffic)
        self.order: Order = order_named(
            plan.schedule, plan.stages, plan.micro_batches, plan.chunks
        )
        count = plan.stages * plan.chunks
        if count > len(model.pieces):
            what = f"at least {count} pieces for {plan.stages} stages x {plan.chunks} chunks"
            raise ClusterError(what, str(len(model.pieces)), "use fewer stages")
        cuts = np.array_split(np.arange(len(model.pieces)), count)
        self.chunks = [
            Chunk([model.pieces[i] for i in cut], self.groups, plan, optimizer) for cut in cuts
        ]
        self.flights = [0] * plan.stages
        self.held: dict[str, int] = {}

    # -- one batch ------------------------------------------------------------------------------
    def pass_through(self, batch: Batch) -> float:
        """Run every stage's tasks, each as soon as its input is there; return the mean loss."""
        inputs, targets = self._shared(batch.inputs), self._shared(batch.targets)
        inbox = {(False, m, 0): x for m, x in enumerate(inputs)}
        losses: list[Ranked] = []
        places = [0] * self.plan.stages
        while any(place < len(row) for place, row in zip(places, self.order, strict=True)):
            before = list(places)
            for stage, row in enumerate(self.order):
                while places[stage] < len(row):
                    task = row[places[stage]]
                    if (task.backward, task.micro, task.chunk) not in inbox:
                        break
                    self._run(task, inbox, targets, losses, batch.targets.size)
                    places[stage] += 1
                    self._count(stage)
            if places == before:
                raise ClusterError("an order in which no stage waits for itself", str(places), "")
        leaders = [r for r in range(len(targets[0])) if self.groups["tensor"].place(r) == 0]
        return sum(float(loss[r].sum()) for loss in losses for r in leaders) / batch.targets.size

    def _run(
        self,
        task: Task,
        inbox: dict[tuple[bool, int, int], Ranked],
        targets: list[Ranked],
        losses: list[Ranked],
        tokens: int,
    ) -> None:
        """Run a task and put its result where the next one finds it."""
        chunk, last = self.chunks[task.chunk], len(self.chunks) - 1
        given = inbox.pop((task.backward, task.micro, task.chunk))
        if task.backward:
            grads = chunk.backward(task.micro, given)
            if task.chunk > 0 and grads is not None:
                inbox[True, task.micro, task.chunk - 1] = self._send(grads)
            return
        out = chunk.forward(task.micro, given, targets[task.micro])
        if task.chunk < last:
            inbox[False, task.micro, task.chunk + 1] = self._send(out)
        else:
            losses.append(out)
            # mean over all tokens of the batch: gradients of parts are simply added
            inbox[True, task.micro, last] = [np.full_like(one, 1 / tokens) for one in out]

    def _send(self, arrays: Ranked) -> Ranked:
        return send(arrays, self.traffic) if self.plan.stages > 1 else arrays

    def _count(self, stage: int) -> None:
        held = sum(len(c.flights) for c in self.chunks[stage :: self.plan.stages])
        self.flights[stage] = max(self.flights[stage], held)

    def _shared(self, array: Values) -> list[Ranked]:
        """Return each micro-batch of each rank: rows by data rank, sequence by context rank."""
        data, context = self.groups["data"], self.groups["context"]
        found: list[Ranked] = [[] for _ in range(self.plan.micro_batches)]
        for r in range(data.ranks * context.ranks * self.groups["tensor"].ranks):
            rows = part(array, data.ranks, data.place(r), 0, "a batch")
            if context.ranks > 1:
                rows = part(rows, context.ranks, context.place(r), 1, "a sequence")
            for m, micro in enumerate(found):
                micro.append(part(rows, self.plan.micro_batches, m, 0, "a rank's batch"))
        return found

    # -- the end of a step ----------------------------------------------------------------------
    def update(self, number: int) -> dict[str, Values]:
        """Add gradients up, take the optimiser's step, return the gradients."""
        for chunk in self.chunks:
            chunk.store.reduce()
        found = self.assembled([chunk.store.whole_grads() for chunk in self.chunks])
        for chunk in self.chunks:
            chunk.store.step(number)
            chunk.store.clear()
        return found

    def assembled(self, stores: Sequence[dict[str, Ranked]]) -> dict[str, Values]:
        """Return full arrays from ranks' parts; raise `ClusterError` if copies differ."""
        ranked = {key: arrays for store in stores for key, arrays in store.items()}
        found = {}
        for piece in self.model.pieces:
            for name in piece.weights:
                key, shard = f"{piece.name}.{name}", self.plan.shard(piece, name)
                found[key] = _whole(ranked[key], shard and self.groups[shard.group], shard, key)
        return found
