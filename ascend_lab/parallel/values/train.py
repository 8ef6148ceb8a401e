"""A run of pieces on one stage: forward and backward passes of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.errors import ClusterError
from ascend_lab.parallel.plans.pipeline import BACKWARD, FORWARD, Task, orders
from ascend_lab.parallel.plans.plan import Plan
from ascend_lab.parallel.values.group import Group, Ranked, Traffic, Values, part, same, send
from ascend_lab.parallel.values.layers import Batch, Model, Net, Piece, Shard
from ascend_lab.parallel.values.tape import Tape, Var
from ascend_lab.parallel.values.weights import Cuts, Optimizer, Replicas, Segments, Sharded


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


# The machine behind every plan: chunks of a model on their stages, and messages between them.


class Trainer:
    """The chunks of a model on their stages, and the messages between them."""

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        cuts: Cuts,
        order: Sequence[Sequence[Task]] | None = None,
    ) -> None:
        self.model, self.cuts, self.plan, self.traffic = model, cuts, cuts.plan, Traffic()
        plan, self.groups = cuts.plan, cuts.groups(self.traffic)
        made = orders(plan.schedule, plan.pipeline, plan.micro_batches, plan.virtual)
        self.order = made if order is None else order
        if [set(row) for row in self.order] != [set(row) for row in made]:
            what = f"for each of {plan.pipeline} stages all its tasks"
            raise ClusterError(what, "others", "reorder what `orders` gives")
        count = plan.pipeline * plan.virtual
        if count > len(model.pieces):
            what = f"at least {count} pieces for {plan.pipeline} stages x {plan.virtual} chunks"
            raise ClusterError(what, str(len(model.pieces)), "use fewer stages")
        parts_of = np.array_split(np.arange(len(model.pieces)), count)
        self.chunks = [
            Chunk([model.pieces[i] for i in own], self.groups, cuts, optimizer) for own in parts_of
        ]
        self.flights = [0] * plan.pipeline
        self.outputs = [0] * plan.pipeline
        self.held: dict[str, int] = {}

    # -- one batch ------------------------------------------------------------------------------
    def pass_through(self, batch: Batch) -> float:
        """Run every stage's tasks, each as soon as its input is there; return the mean loss."""
        inputs, targets = self._shared(batch.inputs), self._shared(batch.targets)
        inbox = {Task(0, m, FORWARD): x for m, x in enumerate(inputs)}
        losses: list[Ranked] = []
        waiting = [list(row) for row in self.order]
        while any(waiting):
            done = 0
            for stage, row in enumerate(waiting):
                while row and row[0] in inbox:
                    self._run(row.pop(0), inbox, targets, losses, batch.targets.size)
                    self._count(stage)
                    done += 1
            if not done:
                first = [str(row[0]) for row in waiting if row]
                raise ClusterError("tasks in an order that can run", ", ".join(first), "mend it")
        leaders = [r for r in range(len(targets[0])) if self.groups["tensor"].place(r) == 0]
        return sum(float(loss[r].sum()) for loss in losses for r in leaders) / batch.targets.size

    def _run(
        self,
        task: Task,
        inbox: dict[Task, Ranked],
        targets: list[Ranked],
        losses: list[Ranked],
        tokens: int,
    ) -> None:
        """Run a task and put its result where the next one finds it."""
        chunk, micro, last = task.stage, task.micro_batch, len(self.chunks) - 1
        given = inbox.pop(task)
        if task.phase == BACKWARD:
            grads = self.chunks[chunk].backward(micro, given)
            if chunk > 0 and grads is not None:
                inbox[Task(chunk - 1, micro, BACKWARD)] = self._send(grads)
            return
        out = self.chunks[chunk].forward(micro, given, targets[micro])
        if chunk < last:
            inbox[Task(chunk + 1, micro, FORWARD)] = self._send(out)
        else:
            losses.append(out)
            # mean over all tokens of the batch: gradients of parts are simply added
            inbox[Task(last, micro, BACKWARD)] = [np.full_like(one, 1 / tokens) for one in out]

    def _send(self, arrays: Ranked) -> Ranked:
        return send(arrays, self.traffic) if self.plan.pipeline > 1 else arrays

    def _count(self, stage: int) -> None:
        """Note the most micro-batches, and elements of outputs, that a stage has held."""
        flights = [f for c in self.chunks[stage :: self.plan.pipeline] for f in c.flights.values()]
        self.flights[stage] = max(self.flights[stage], len(flights))
        elements = sum(flight.tape.elements for flight in flights)
        self.outputs[stage] = max(self.outputs[stage], elements)

    def _shared(self, array: Values) -> list[Ranked]:
        """Return each micro-batch of each rank."""
        data = self.groups["data"]
        found: list[Ranked] = [[] for _ in range(self.plan.micro_batches)]
        for r in range(data.ranks * self.groups["tensor"].ranks):
            rows = part(array, data.ranks, data.place(r), 0, "a batch")
            for m, micro in enumerate(found):
                micro.append(part(rows, self.plan.micro_batches, m, 0, "a rank's batch"))
        return found

    # -- the end of a step ----------------------------------------------------------------------
    def update(self, number: int) -> dict[str, Values]:
        """Add gradients up, take the optimiser's step, return the gradients."""
        self.held = self.chunks[0].store.held()
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
                key, shard = f"{piece.name}.{name}", self.cuts.shard(piece, name)
                group = self.groups[shard.group] if shard else None
                found[key] = _whole(ranked[key], group, shard, key)
        return found


def _whole(ranked: Ranked, group: Group | None, shard: Shard | None, key: str) -> Values:
    """Return one array from all ranks' parts; raise `ClusterError` if copies differ."""
    if group is None or shard is None:
        copies, whole = ranked, ranked[0]
    else:
        copies = [ranked[r] for r in range(len(ranked)) if group.place(r) == 0]
        whole = np.concatenate([ranked[r] for r in group.members[0]], shard.axis)
    if not same(copies):
        raise ClusterError(
            f"{key}: equal copies on every rank", "copies that differ", "add them up"
        )
    return whole


# Train a small model on one device or under a plan: losses, gradients, parameters, traffic.


@dataclass(frozen=True, slots=True)
class Run:
    """What training gave: a loss and all gradients a step, the parameters after the last one.

    `traffic` counts messages; `held` elements on the first rank of the first stage when the last
    backward pass has ended: parameters, gradients, state. Of each stage: `flights` the most
    micro-batches, `outputs` the most elements of operators' outputs held for the backward pass.
    """

    losses: tuple[float, ...]
    gradients: tuple[dict[str, Values], ...]
    parameters: dict[str, Values]
    traffic: Traffic = field(default_factory=Traffic)
    held: dict[str, int] = field(default_factory=dict)
    flights: tuple[int, ...] = (1,)
    outputs: tuple[int, ...] = ()


def loss_and_gradients(
    model: Model, weights: Mapping[str, Values], batch: Batch
) -> tuple[float, dict[str, Values]]:
    """Return the mean loss of a batch and its gradient for every weight, on one device."""
    groups = Cuts(Plan()).groups(Traffic())
    tape, x = Tape(), Var([batch.inputs])
    found = {key: Var([weight]) for key, weight in weights.items()}
    for piece in model.pieces:
        own = {name: found[f"{piece.name}.{name}"] for name in piece.weights}
        x = piece.forward(Net(tape, own, groups), x, [batch.targets])
    losses = x.values[0]
    tape.backward(x, [np.full_like(losses, 1 / batch.targets.size)])
    grads = {key: var.grads[0] for key, var in found.items() if var.grads is not None}
    return float(losses.mean()), grads


def train_single(model: Model, batches: Sequence[Batch], optimizer: Optimizer) -> Run:
    """Train on one device: what every plan must reproduce. One step a batch."""
    weights = model.weights
    states = {key: optimizer.start(weight) for key, weight in weights.items()}
    losses, gradients = [], []
    for number, batch in enumerate(batches, 1):
        loss, grads = loss_and_gradients(model, weights, batch)
        losses.append(loss)
        gradients.append(grads)
        for key, grad in grads.items():
            weights[key], states[key] = optimizer.update(weights[key], grad, states[key], number)
    return Run(tuple(losses), tuple(gradients), weights)


def train(
    model: Model,
    batches: Sequence[Batch],
    optimizer: Optimizer,
    plan: Plan,
    *,
    segments: Segments | None = None,
    order: Sequence[Sequence[Task]] | None = None,
) -> Run:
    """Take one step a batch under a plan; raise `ClusterError` where something does not divide.

    `segments`: gradients all-reduced together, in backward order; `order`: each stage's tasks,
    instead of those of the plan's schedule. The plan's `recompute` and `axes` matter for time and
    memory, not for values: they are ignored here.
    """
    trainer = Trainer(model, optimizer, Cuts(plan, segments), order)
    losses, gradients = [], []
    for number, batch in enumerate(batches, 1):
        losses.append(trainer.pass_through(batch))
        gradients.append(trainer.update(number))
    return Run(
        tuple(losses),
        tuple(gradients),
        trainer.assembled([chunk.store.whole_weights() for chunk in trainer.chunks]),
        trainer.traffic,
        trainer.held,
        tuple(trainer.flights),
        tuple(trainer.outputs),
    )
