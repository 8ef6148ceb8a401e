"""Executes parallel plans on NumPy arrays, to check that they give the values of one device.

`train_single` trains a small model on one device; `train(model, batches, optimizer, plan)` must
reproduce its values on many ranks, and counts the messages that they send.
"""

# fmt: off
# isort: off
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.cluster.buckets import Segments
from ascend_lab import errors
from ascend_lab.cluster.parallel.plan import BACKWARD, FORWARD, Plan, Task, orders, run_pipeline
from ascend_lab.cluster.parallel.values.group import (
    Batch, Group, Model, Net, Piece, Ranked, Shard, Tape, Traffic, Values, Var, part, parts, same,
    send,
)
from ascend_lab.cluster.parallel.values.models import (
    Routing, experts_transformer, sentences, transformer,
)
from ascend_lab.cluster.parallel.values.weights import (
    Adam, Sharding, Optimizer, Replicas, Sgd, Sharded, flatten, unflatten,
)
from ascend_lab.cluster.train.step import DynamicLossScale

__all__ = [
    "Adam", "Batch", "Group", "MixedRun", "Model", "Net", "Piece", "Plan", "Routing", "Run", "Sgd",
    "Shard", "Tape", "Traffic", "Var", "experts_transformer", "loss_and_gradients",
    "sentences", "train", "train_mixed", "train_single", "transformer", "vanishing",
]
# fmt: on
# isort: on


@dataclass(frozen=True, slots=True)
class Run:
    """The result of training: loss and gradients of each step, and the final parameters.

    `traffic` counts messages. `held` counts the elements of parameters, gradients and optimiser
    state on the first rank of the first stage when the last backward pass has ended. For each
    stage, `flights` is the largest number of micro-batches, and `outputs` the largest number
    of elements of operator outputs, that were held for the backward pass at one time.
    """

    losses: tuple[float, ...]
    gradients: tuple[dict[str, Values], ...]
    parameters: dict[str, Values]
    traffic: Traffic = field(default_factory=Traffic)
    held: dict[str, int] = field(default_factory=dict)
    flights: tuple[int, ...] = (1,)
    outputs: tuple[int, ...] = ()


def forward_and_backward(
    model: Model,
    weights: Mapping[str, Ranked],
    groups: dict[str, Group],
    inputs: Ranked,
    targets: Ranked,
    seed: float,
) -> tuple[float, dict[str, Ranked]]:
    """Return the sum of all tokens' losses, and `seed` times its gradient for every weight.

    Every rank runs all pieces (layers) of the model; its gradients are those of its own tokens.
    """
    tape = Tape()
    x = Var(inputs)
    variables = {key: Var(ranked) for key, ranked in weights.items()}
    for piece in model.pieces:
        piece_weights = {name: variables[f"{piece.name}.{name}"] for name in piece.weights}
        x = piece.forward(Net(tape, piece_weights, groups), x, targets)
    tape.backward(x, [np.full_like(losses, seed) for losses in x.values])
    loss = sum(float(losses.sum()) for losses in x.values)
    return loss, {key: var.grads for key, var in variables.items() if var.grads is not None}


def loss_and_gradients(
    model: Model, weights: Mapping[str, Values], batch: Batch
) -> tuple[float, dict[str, Values]]:
    """Return the mean loss of a batch and its gradient for every weight, on one device."""
    groups = Sharding(Plan()).groups(Traffic())
    tokens = batch.targets.size
    ranked = {key: [weight] for key, weight in weights.items()}
    loss, grads = forward_and_backward(
        model, ranked, groups, [batch.inputs], [batch.targets], 1 / tokens
    )
    return loss / tokens, {key: copies[0] for key, copies in grads.items()}


def train_single(model: Model, batches: Sequence[Batch], optimizer: Optimizer) -> Run:
    """Train on one device, one step per batch; every plan must reproduce the result."""
    weights = model.weights
    states = {key: optimizer.start(weight) for key, weight in weights.items()}
    losses = []
    gradients = []
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
    """Train under a plan, one step per batch; raise `ClusterError` if a size does not divide.

    `segments` says which gradients, in backward order, are all-reduced together. `order` lists each
    stage's tasks, in place of the plan's schedule. The plan's `recompute` and `axes` are ignored,
    because they affect only time and memory.
    """
    trainer = _Trainer(model, optimizer, Sharding(plan, segments), order)
    losses = []
    gradients = []
    for number, batch in enumerate(batches, 1):
        losses.append(trainer.pass_through(batch))
        gradients.append(trainer.update(number))
    return Run(
        losses=tuple(losses),
        gradients=tuple(gradients),
        parameters=trainer.assembled([chunk.store.whole_weights() for chunk in trainer.chunks]),
        traffic=trainer.traffic,
        held=trainer.held,
        flights=tuple(trainer.flights),
        outputs=tuple(trainer.outputs),
    )


# -- execution of a plan --------------------------------------------------------------------------
class _Chunk:
    """Consecutive pieces (layers) on the data x tensor ranks of one pipeline stage."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        groups: dict[str, Group],
        sharding: Sharding,
        optimizer: Optimizer,
    ) -> None:
        self.pieces = pieces
        self.groups = groups
        self.sharding = sharding
        kind = Sharded if sharding.plan.zero_stage else Replicas
        self.store = kind(pieces, groups, sharding, optimizer)
        # by micro-batch: the tape, the chunk's input and its output
        self.flights: dict[int, tuple[Tape, Var, Var]] = {}

    def forward(self, micro_batch: int, x: Ranked, targets: Ranked) -> Ranked:
        """Run the pieces on a micro-batch and store what the backward pass needs."""
        tape = Tape()
        chunk_input = Var(x)
        chunk_output = chunk_input
        for piece in self.pieces:
            weights = self.store.fetch(tape, piece)
            net = Net(tape, weights, self.groups, self.sharding.plan.sequence)
            chunk_output = piece.forward(net, chunk_output, targets)
            self.store.release(tape, piece, weights)
        self.flights[micro_batch] = (tape, chunk_input, chunk_output)
        return chunk_output.values

    def backward(self, micro_batch: int, grads: Ranked) -> Ranked | None:
        """Return the gradient of the chunk's input, or None; gradients of weights are stored."""
        tape, chunk_input, chunk_output = self.flights.pop(micro_batch)
        tape.backward(chunk_output, grads)
        return chunk_input.grads


class _Trainer:
    """The chunks of a model on their stages, and the messages between them."""

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        sharding: Sharding,
        order: Sequence[Sequence[Task]] | None = None,
    ) -> None:
        self.model = model
        self.sharding = sharding
        self.plan = sharding.plan
        self.traffic = Traffic()
        plan = sharding.plan
        self.groups = sharding.groups(self.traffic)
        task_lists = orders(plan.schedule, plan.pipeline, plan.micro_batches, plan.virtual)
        self.order = task_lists if order is None else order
        if [set(row) for row in self.order] != [set(row) for row in task_lists]:
            needed = f"for each of {plan.pipeline} stages all its tasks"
            raise errors.ClusterError(needed, "others", "reorder what `orders` gives")
        count = plan.pipeline * plan.virtual
        if count > len(model.pieces):
            needed = f"at least {count} pieces for {plan.pipeline} stages x {plan.virtual} chunks"
            raise errors.ClusterError(needed, str(len(model.pieces)), "use fewer stages")
        # 5 pieces on 2 chunks: 0 .. 2 and 3, 4.
        self.chunks = []
        for indices in np.array_split(np.arange(len(model.pieces)), count):
            pieces = [model.pieces[i] for i in indices]
            self.chunks.append(_Chunk(pieces, self.groups, sharding, optimizer))
        self.flights = [0] * plan.pipeline
        self.outputs = [0] * plan.pipeline
        self.held: dict[str, int] = {}

    def pass_through(self, batch: Batch) -> float:
        """Run every stage's tasks, each as soon as its input exists; return the mean loss."""
        inputs = self._shared(batch.inputs)
        targets = self._shared(batch.targets)
        inbox = {Task(0, m, FORWARD): x for m, x in enumerate(inputs)}
        losses: list[Ranked] = []
        # Any times give the same values: only the order of tasks matters here.
        equal = [1.0] * len(self.chunks)
        for timed in run_pipeline(self.order, equal, equal).tasks:
            self._run(timed.task, inbox, targets, losses, batch.targets.size)
            self._count(timed.device)
        # Ranks of a tensor group have the same tokens and the same losses: count them once.
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
        """Run a task and put its result into `inbox`, where the next task finds it."""
        chunk = task.stage
        micro_batch = task.micro_batch
        last_chunk = len(self.chunks) - 1
        received = inbox.pop(task)
        if task.phase == BACKWARD:
            grads = self.chunks[chunk].backward(micro_batch, received)
            if chunk > 0 and grads is not None:
                inbox[Task(chunk - 1, micro_batch, BACKWARD)] = self._send(grads)
            return
        out = self.chunks[chunk].forward(micro_batch, received, targets[micro_batch])
        if chunk < last_chunk:
            inbox[Task(chunk + 1, micro_batch, FORWARD)] = self._send(out)
        else:
            losses.append(out)
            # the loss is the mean over all tokens of the batch, so that gradients of parts add up
            inbox[Task(last_chunk, micro_batch, BACKWARD)] = [
                np.full_like(rank_loss, 1 / tokens) for rank_loss in out
            ]

    def _send(self, arrays: Ranked) -> Ranked:
        return send(arrays, self.traffic) if self.plan.pipeline > 1 else arrays

    def _count(self, stage: int) -> None:
        """Update the largest numbers of micro-batches and output elements that a stage has
        held."""
        # two stages of two chunks: stage 0 has chunks 0 and 2
        stage_chunks = self.chunks[stage :: self.plan.pipeline]
        tapes = [tape for chunk in stage_chunks for tape, _, _ in chunk.flights.values()]
        self.flights[stage] = max(self.flights[stage], len(tapes))
        self.outputs[stage] = max(self.outputs[stage], sum(tape.elements for tape in tapes))

    def _shared(self, array: Values) -> list[Ranked]:
        """Return the part of an array for each micro-batch and rank."""
        # 8 rows on 2 data ranks, 2 micro-batches: 2 rows each
        rows = parts(array, self.groups["data"], 0, "a batch")
        count = self.plan.micro_batches

        def share(number: int) -> Ranked:
            return [part(r, count, number, 0, "a rank's batch") for r in rows]

        return [share(number) for number in range(count)]

    def update(self, number: int) -> dict[str, Values]:
        """Sum the gradients over ranks, take the optimiser's step, and return the gradients."""
        stores = [chunk.store for chunk in self.chunks]
        self.held = stores[0].element_counts()
        for store in stores:
            store.reduce()
        gradients = self.assembled([store.whole_grads() for store in stores])
        for store in stores:
            store.step(number)
            store.clear()
        return gradients

    def assembled(self, stores: Sequence[dict[str, Ranked]]) -> dict[str, Values]:
        """Return whole arrays, joined from ranks' parts; raise `ClusterError` if copies differ."""
        ranked = {key: arrays for store in stores for key, arrays in store.items()}
        assembled = {}
        for piece in self.model.pieces:
            for name in piece.weights:
                key = f"{piece.name}.{name}"
                shard = self.sharding.shard(piece, name)
                assembled[key] = self._whole(ranked[key], shard, key)
        return assembled

    def _whole(self, ranked: Ranked, shard: Shard | None, key: str) -> Values:
        """Return a weight joined from the ranks' parts; raise `ClusterError` if copies differ."""
        copies = ranked
        full_array = ranked[0]
        if shard is not None:
            group = self.groups[shard.group]
            copies = [array for r, array in enumerate(ranked) if group.place(r) == 0]
            full_array = np.concatenate([ranked[r] for r in group.members[0]], shard.axis)
        if not same(copies):
            needed = f"{key}: equal copies on every rank"
            raise errors.ClusterError(needed, "copies that differ", "add them up")
        return full_array


# -- mixed precision ------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class MixedRun:
    """The result of `train_mixed`, with the loss, scale, skip and share of zeros of each step."""

    losses: tuple[float, ...]
    scales: tuple[float, ...]
    skipped: tuple[bool, ...]
    zeros: tuple[float, ...]
    parameters: dict[str, Values]
    traffic: Traffic


def train_mixed(
    model: Model,
    batches: Sequence[Batch],
    optimizer: Optimizer,
    ranks: int = 1,
    scale: DynamicLossScale | None = None,
) -> MixedRun:
    """Train data-parallel in fp16; each rank has a part of the fp32 master weights (ZeRO stage 1).

    The loss is multiplied by a scale so that small gradients do not vanish in fp16, and gradients
    are divided by it in fp32. A gradient that overflows, which shows only in some ranks' part of
    it, makes all ranks skip the step and halve the scale; many good steps in a row double it.
    Micikevicius et al., "Mixed precision training", 2018.
    """
    scale = scale or DynamicLossScale()
    traffic = Traffic()
    group = Sharding(Plan(data=ranks)).groups(traffic)["data"]
    flat = flatten([w.astype(np.float32) for w in model.weights.values()], ranks)
    masters = parts(flat, group, 0)
    states = [optimizer.start(master) for master in masters]
    fp16_weights = [flat.astype(np.float16)] * ranks
    step_count = 0
    # loss, scale, whether the step is skipped, share of zeros
    rows: list[tuple[float, float, bool, float]] = []
    for batch in batches:
        with np.errstate(all="ignore"):  # fp16 may overflow: that is what the scale reacts to
            loss, grads = _half_pass(model, fp16_weights, batch, scale.scale)
            # 10 gradients on 4 ranks: -10 % 4 = 2 zeros behind them make equal parts of 3
            shards = group.reduce_scatter([np.pad(g, (0, -len(g) % ranks)) for g in grads])
        # A rank sees only its own part of the gradient, so all ranks must ask each other.
        flags = [np.array([float(not np.isfinite(g).all())], np.float32) for g in shards]
        overflowed = bool(group.all_reduce(flags)[0][0] > 0)
        zero_share = float(np.mean([g == 0 for g in grads]))
        rows.append((loss, scale.scale, overflowed, zero_share))
        if not overflowed:
            # skipped steps do not count as steps of the optimiser
            step_count += 1
            for r in range(ranks):
                grad = shards[r].astype(np.float32) / np.float32(scale.scale)
                masters[r], states[r] = optimizer.update(masters[r], grad, states[r], step_count)
        fp16_weights = group.all_gather([master.astype(np.float16) for master in masters])
        scale = scale.next(overflowed)
    losses, scales, skipped, zero_shares = zip(*rows, strict=True)
    parameters = _named(model, np.concatenate(masters))
    return MixedRun(losses, scales, skipped, zero_shares, parameters, traffic)


def vanishing(gradients: Mapping[str, Values], scale: float = 1.0) -> float:
    """Return the share of the nonzero gradients that become 0 in fp16 after scaling."""
    flat = flatten(list(gradients.values()))
    with np.errstate(all="ignore"):
        return float(np.mean((flat[flat != 0] * scale).astype(np.float16) == 0))


def _named(model: Model, flat: Values) -> dict[str, Values]:
    shapes = [w.shape for w in model.weights.values()]
    return dict(zip(model.weights, unflatten(flat, shapes), strict=True))


def _half_pass(
    model: Model, flat_weights: Ranked, batch: Batch, scale: float
) -> tuple[float, Ranked]:
    """Return the mean loss and every rank's flat fp16 gradients, multiplied by the scale."""
    ranks = len(flat_weights)
    tokens = batch.targets.size
    groups = Sharding(Plan(data=ranks)).groups(Traffic())
    inputs = parts(batch.inputs, groups["data"], 0, "a batch")
    targets = parts(batch.targets, groups["data"], 0, "a batch")
    named = [_named(model, flat) for flat in flat_weights]
    weights = {key: [arrays[key] for arrays in named] for key in model.weights}
    loss, grads = forward_and_backward(model, weights, groups, inputs, targets, scale / tokens)
    flat_grads = [flatten([ranked[r] for ranked in grads.values()]) for r in range(ranks)]
    return loss / tokens, flat_grads
