"""The machine behind every plan: chunks of a model on their stages, and messages between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ascend_lab.errors import ClusterError
from ascend_lab.parallel.plans.pipeline import BACKWARD, FORWARD, Task, orders
from ascend_lab.parallel.values.chunk import Chunk
from ascend_lab.parallel.values.cuts import Cuts
from ascend_lab.parallel.values.group import Group, Ranked, Values, part, same, send
from ascend_lab.parallel.values.optimizers import Optimizer
from ascend_lab.parallel.values.pieces import Batch, Model, Shard
from ascend_lab.parallel.values.traffic import Traffic


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
