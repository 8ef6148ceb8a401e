"""Stores weights, gradients and optimiser state: replicated on all data ranks, or sharded (ZeRO).

Without sharding (ZeRO stage 0) every rank keeps everything and gradients are all-reduced. With
sharding, the weights of a piece (layer) form one flat vector, padded to a multiple of the number of
ranks, and each rank updates its part. Stages 1 and 2 reduce-scatter gradients and all-gather new
parameters: the bytes of one all-reduce. In stage 3 (FSDP) a rank keeps only its part of the
weights: a piece is gathered before its forward pass, dropped, and gathered again before its
backward pass, which adds 50 % to the bytes. Rajbhandari et al., "ZeRO: memory optimizations toward
training trillion parameter models", 2020.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from ascend_lab import errors
from ascend_lab.cluster.buckets import Segments, checked
from ascend_lab.cluster.parallel.plan import Plan
from ascend_lab.cluster.parallel.values import group as comm
from ascend_lab.cluster.parallel.values.group import (
    Group,
    Piece,
    Ranked,
    Shard,
    Tape,
    Values,
    Var,
    grid,
)
from ascend_lab.operators import ops

State = tuple[Values, ...]


# -- optimisers: they work element by element, so that each rank can update a part of a weight -----
@dataclass(frozen=True, slots=True)
class _Rule:
    """An optimiser: an operator of the library, and the numbers of state per weight."""

    operator: ClassVar[str]
    state_size: ClassVar[int]
    needs_step: ClassVar[bool] = False

    def start(self, weight: Values) -> State:
        """Return the state before the first step."""
        return tuple(np.zeros_like(weight) for _ in range(self.state_size))

    def update(self, weight: Values, grad: Values, state: State, step: int) -> tuple[Values, State]:
        """Return weight and state after step number `step`, counted from 1."""
        operator = ops.get(self.operator)
        settings = asdict(self)
        if self.needs_step:
            settings["step"] = step
        updated, *new_states = operator.reference(weight, grad, *state, **settings)
        return updated, tuple(new_states)


@dataclass(frozen=True, slots=True)
class Sgd(_Rule):
    """Stochastic gradient descent with momentum: one number of state per weight."""

    operator = "sgd_momentum"
    state_size = 1
    lr: float = 0.1
    momentum: float = 0.9


@dataclass(frozen=True, slots=True)
class Adam(_Rule):
    """Adam: mean and mean square of the gradient, two numbers of state per weight."""

    operator = "adam"
    state_size = 2
    needs_step = True
    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999


Optimizer = Sgd | Adam


# -- how a plan divides one weight -----------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Sharding:
    """How a plan shards each weight, and which gradients are all-reduced together.

    If `segments` is None, the gradient of each weight is all-reduced by itself.
    """

    plan: Plan
    segments: Segments | None = None

    def __post_init__(self) -> None:
        """Check that the choices fit together; raise an error otherwise."""
        if self.segments and self.plan.zero_stage:
            needed = "segments only where gradients are all-reduced"
            raise errors.ClusterError(needed, f"ZeRO stage {self.plan.zero_stage}", "drop one")
        if self.plan.expert > 1 and self.plan.sequence:
            needed = "whole sequences for experts, whose capacity counts a sequence's tokens"
            raise errors.ClusterError(needed, "a split sequence", "drop one")

    def groups(self, traffic: comm.Traffic) -> dict[str, Group]:
        """Return the groups of a stage's ranks by axis; "data" combines "replica" and "expert"."""
        plan = self.plan
        # 8 data ranks with expert = 4: 2 replicas of the experts, each spread over 4 ranks.
        inner = {"tensor": self.plan.tensor}
        outer = {"replica": plan.data // plan.expert, "expert": plan.expert}
        return {**grid({**outer, **inner}, traffic), **grid({"data": plan.data, **inner}, traffic)}

    def shard(self, piece: Piece, name: str) -> Shard | None:
        """Return how a weight is cut, or None if every rank of a stage has the whole weight."""
        shard = piece.shards.get(name)
        is_replicated = shard is None or (shard.group == "expert" and self.plan.expert == 1)
        return None if is_replicated else shard

    def reduction_groups(self, piece: Piece, name: str) -> tuple[str, ...]:
        """Return the groups over which a weight's gradient must be summed."""
        shard = self.shard(piece, name)
        # With a split sequence each tensor rank sees other tokens: the gradient of a weight that
        # all of them hold (a norm's scale) is a sum over them.
        axes = ["tensor"] if self.plan.sequence and shard is None else []
        axes.append("replica" if shard is not None and shard.group == "expert" else "data")
        return tuple(axes)

    def local_weights(
        self, pieces: Sequence[Piece], groups: Mapping[str, Group]
    ) -> dict[str, Ranked]:
        """Return every rank's part of each weight, by "piece.weight".

        Raises `ClusterError` for an axis that does not divide evenly.
        """
        shards = {}
        for piece in pieces:
            for name, full_array in piece.weights.items():
                shard = self.shard(piece, name)
                key = f"{piece.name}.{name}"
                if shard is None:
                    shards[key] = [full_array] * (self.plan.data * self.plan.tensor)
                else:
                    needed = f"axis {shard.axis} of {key} {full_array.shape}"
                    shards[key] = comm.parts(full_array, groups[shard.group], shard.axis, needed)
        return shards

    def segments_of(self, count: int) -> Segments:
        """Return the segments of `count` gradients; raise `InputError` if one is missing."""
        if self.segments is None:
            return tuple((i, i) for i in range(count))
        return checked(self.segments, count)


# -- flat vectors ---------------------------------------------------------------------------------
def flatten(arrays: Sequence[Values], multiple: int = 1) -> Values:
    """Return the arrays joined to one vector, padded with zeros to a multiple of `multiple`."""
    flat = np.concatenate([a.ravel() for a in arrays])
    # 10 elements for 4 ranks are padded to 12: -10 % 4 = 2.
    return np.pad(flat, (0, -len(flat) % multiple))


def unflatten(flat: Values, shapes: Sequence[tuple[int, ...]]) -> list[Values]:
    """Return the arrays of given shapes that `flatten` has joined to one vector."""
    # Shapes (2, 3) and (4,) end at elements 6 and 10; everything after 10 is padding.
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    cut = np.split(flat[: ends[-1]], ends[:-1])
    return [a.reshape(shape) for a, shape in zip(cut, shapes, strict=True)]


def added(old: Ranked | None, new: Ranked) -> Ranked:
    """Return old + new on every rank, or `new` if `old` is None."""
    return [a + b for a, b in zip(old, new, strict=True)] if old else new


def count_elements(
    weights: Mapping[Any, Ranked], grads: Mapping[Any, Ranked], states: Mapping[Any, list[State]]
) -> dict[str, int]:
    """Return the numbers of elements on the first rank, by parameters, gradients and state."""
    parameters = sum(copies[0].size for copies in weights.values())
    gradients = sum(copies[0].size for copies in grads.values())
    state = sum(a.size for copies in states.values() for a in copies[0])
    return {"parameters": parameters, "gradients": gradients, "state": state}


# -- stores ---------------------------------------------------------------------------------------
class Replicas:
    """Every data rank keeps all weights, gradients and state of its stage (ZeRO stage 0)."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        groups: Mapping[str, Group],
        sharding: Sharding,
        optimizer: Optimizer,
    ) -> None:
        self.sharding = sharding
        self.groups = groups
        self.optimizer = optimizer
        self.weights = sharding.local_weights(pieces, groups)
        self.reduction_groups = {
            f"{p.name}.{n}": sharding.reduction_groups(p, n) for p in pieces for n in p.weights
        }
        self.grads: dict[str, Ranked] = {}
        self.states: dict[str, list[State]] = {
            key: [optimizer.start(w) for w in ranked] for key, ranked in self.weights.items()
        }

    def fetch(self, tape: Tape, piece: Piece) -> dict[str, Var]:
        """Return a piece's weights for one forward pass; their gradients are kept afterwards."""
        variables = {name: Var(self.weights[f"{piece.name}.{name}"]) for name in piece.weights}

        def keep_gradients() -> None:
            for name, var in variables.items():
                self.keep(f"{piece.name}.{name}", var)

        tape.steps.append(keep_gradients)
        return variables

    def release(self, tape: Tape, piece: Piece, variables: dict[str, Var]) -> None:
        """Do nothing: replicas keep their weights after a piece's forward pass."""

    def keep(self, key: str, var: Var) -> None:
        """Add the gradient of a weight from one micro-batch to the stored sum."""
        if var.grads is not None:
            self.grads[key] = added(self.grads.get(key), var.grads)

    def reduce(self) -> None:
        """Sum gradients over all ranks that saw other tokens; over data ranks, per segment."""
        for axis in ("tensor", "replica"):
            keys = [key for key in self.states if axis in self.reduction_groups[key]]
            if keys:
                self._sum(keys, self.groups[axis])
        # Backward finishes the last weights first, so buckets are filled in reverse order.
        keys = [key for key in reversed(self.states) if "data" in self.reduction_groups[key]]
        for start, end in self.sharding.segments_of(len(keys)):
            self._sum(keys[start : end + 1], self.groups["data"])

    def _sum(self, keys: list[str], group: Group) -> None:
        """Replace gradients by their sums over a group, with one all-reduce for all of them."""
        arrays = [self.grads[key] for key in keys]
        shapes = [copies[0].shape for copies in arrays]
        flat = group.all_reduce([flatten(rank) for rank in zip(*arrays, strict=True)])
        rows = zip(*(unflatten(f, shapes) for f in flat), strict=True)
        self.grads.update(zip(keys, map(list, rows), strict=True))

    def step(self, number: int) -> None:
        """Update every weight on every rank."""
        for key, states in self.states.items():
            update_inputs = self.weights[key], self.grads[key], states
            self.weights[key], self.states[key] = self.updated(*update_inputs, number)

    def updated(
        self, weights: Ranked, grads: Ranked, states: list[State], number: int
    ) -> tuple[Ranked, list[State]]:
        """Return weights and states of every rank after the optimiser's step."""
        rows = zip(weights, grads, states, strict=True)
        updates = [self.optimizer.update(w, g, s, number) for w, g, s in rows]
        return [weight for weight, _ in updates], [state for _, state in updates]

    def clear(self) -> None:
        """Delete the gradients of the last step."""
        self.grads = {}

    def whole_weights(self) -> dict[str, Ranked]:
        """Return every rank's weights."""
        return self.weights

    def whole_grads(self) -> dict[str, Ranked]:
        """Return every rank's gradients after `reduce`."""
        return self.grads

    def element_counts(self) -> dict[str, int]:
        """Return the numbers of elements on the first rank, by parameters, gradients and state."""
        return count_elements(self.weights, self.grads, self.states)


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Weights of a piece that are sharded together, as one flat vector.

    `reduction_groups` names the groups over which their gradients are summed; the weights are cut
    among the ranks of the last one: "data", for experts "replica".
    """

    keys: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    reduction_groups: tuple[str, ...]


class Sharded(Replicas):
    """Weights that are sharded over the data ranks, as far as the plan's `zero_stage` says.

    Stage 1 shards the optimiser's state, stage 2 gradients too, stage 3 parameters too.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        groups: Mapping[str, Group],
        sharding: Sharding,
        optimizer: Optimizer,
    ) -> None:
        super().__init__(pieces, groups, sharding, optimizer)
        self.states = {}
        self.zero_stage = sharding.plan.zero_stage
        self.flats_by_piece = {piece.name: self._flats(piece) for piece in pieces}
        self.flats = [flat for flats in self.flats_by_piece.values() for flat in flats]
        self.shards: dict[FlatGroup, Ranked] = {}
        self.shard_grads: dict[FlatGroup, Ranked] = {}
        self.shard_states: dict[FlatGroup, list[State]] = {}
        for flat in self.flats:
            shards = self._own_shards(flat)
            self.shard_states[flat] = [optimizer.start(shard) for shard in shards]
            if self.zero_stage == 3:
                self.shards[flat] = shards
                self._drop(flat)

    def _flats(self, piece: Piece) -> tuple[FlatGroup, ...]:
        """Return the flat vectors into which the weights of a piece are joined."""
        keys = [f"{piece.name}.{name}" for name in piece.weights]
        flats = []
        # Weights whose gradients are summed over other groups (experts: over replicas only) need a
        # separate vector.
        for groups in dict.fromkeys(self.reduction_groups[key] for key in keys):
            group_keys = tuple(key for key in keys if self.reduction_groups[key] == groups)
            shapes = tuple(self.weights[key][0].shape for key in group_keys)
            flats.append(FlatGroup(group_keys, shapes, groups))
        return tuple(flats)

    def _group(self, flat: FlatGroup) -> Group:
        return self.groups[flat.reduction_groups[-1]]

    def _flat_vectors(self, flat: FlatGroup, arrays: dict[str, Ranked]) -> Ranked:
        rows = zip(*(arrays[key] for key in flat.keys), strict=True)
        return [flatten(row, self._group(flat).ranks) for row in rows]

    def _own_shards(self, flat: FlatGroup) -> Ranked:
        """Return every rank's part of the weights."""
        group = self._group(flat)
        # 10 weights on 4 ranks: 12 with padding, 3 for each rank.
        vectors = enumerate(self._flat_vectors(flat, self.weights))
        return [comm.part(vector, group.ranks, group.place(r), 0) for r, vector in vectors]

    def _gathered(self, flat: FlatGroup, shards: Ranked) -> dict[str, Ranked]:
        return _named(flat, self._group(flat).all_gather(shards))

    def _drop(self, flat: FlatGroup) -> None:
        for key in flat.keys:
            del self.weights[key]

    def fetch(self, tape: Tape, piece: Piece) -> dict[str, Var]:
        """Return a piece's weights; from stage 2 on, its gradients are reduce-scattered at once."""
        flats = self.flats_by_piece[piece.name]
        if self.zero_stage > 1:
            # the tape runs backwards: this step runs after all steps of the piece
            tape.steps.append(lambda: self._scatter(flats))
        if self.zero_stage == 3:
            for flat in flats:
                self.weights.update(self._gathered(flat, self.shards[flat]))
        return super().fetch(tape, piece)

    def release(self, tape: Tape, piece: Piece, variables: dict[str, Var]) -> None:
        """In stage 3, drop a piece's weights now and gather them again before its backward pass."""
        if self.zero_stage < 3:
            return
        flats = self.flats_by_piece[piece.name]
        start = len(piece.name) + 1

        def gather_again() -> None:
            for flat in flats:
                for key, values in self._gathered(flat, self.shards[flat]).items():
                    variables[key[start:]].values = values

        for flat in flats:
            self._drop(flat)
        for var in variables.values():
            var.values = []
        # the tape runs backwards: this step runs before all steps of the piece
        tape.steps.append(gather_again)

    def _scatter(self, flats: Sequence[FlatGroup]) -> None:
        """Sum whole gradients over the ranks that share them; each rank keeps its part."""
        for flat in flats:
            scattered = self._group(flat).reduce_scatter(self._flat_vectors(flat, self.grads))
            self.shard_grads[flat] = added(self.shard_grads.get(flat), scattered)
            for key in flat.keys:
                del self.grads[key]

    def reduce(self) -> None:
        """Finish the sums: stage 1 reduce-scatters here; then sum over groups inside a replica."""
        if self.zero_stage == 1:
            self._scatter(self.flats)
        for flat in self.flats:
            if "tensor" in flat.reduction_groups:
                self.shard_grads[flat] = self.groups["tensor"].all_reduce(self.shard_grads[flat])

    def step(self, number: int) -> None:
        """Update each rank's part; stages 1 and 2 then gather the new parameters."""
        for flat in self.flats:
            weight_shards = self.shards[flat] if self.zero_stage == 3 else self._own_shards(flat)
            update_inputs = weight_shards, self.shard_grads[flat], self.shard_states[flat]
            new_shards, self.shard_states[flat] = self.updated(*update_inputs, number)
            if self.zero_stage == 3:
                self.shards[flat] = new_shards
            else:
                self.weights.update(self._gathered(flat, new_shards))

    def clear(self) -> None:
        """Delete the gradients of the last step."""
        super().clear()
        self.shard_grads = {}

    def _with_parts(
        self, whole: dict[str, Ranked], shards: dict[FlatGroup, Ranked]
    ) -> dict[str, Ranked]:
        """Return whole arrays, for inspection only: no messages between ranks are counted."""
        merged = dict(whole)
        for flat, flat_shards in shards.items():
            members_by_rank = {r: members for members in self._group(flat).members for r in members}
            vectors = []
            for rank in range(len(flat_shards)):
                shards_of_group = [flat_shards[member] for member in members_by_rank[rank]]
                vectors.append(np.concatenate(shards_of_group))
            merged.update(_named(flat, vectors))
        return merged

    def whole_weights(self) -> dict[str, Ranked]:
        """Return every rank's weights, put together from parts where needed."""
        return self._with_parts(self.weights, self.shards)

    def whole_grads(self) -> dict[str, Ranked]:
        """Return every rank's gradients, put together from parts."""
        return self._with_parts(self.grads, self.shard_grads)

    def element_counts(self) -> dict[str, int]:
        """Return the numbers of elements on the first rank, by parameters, gradients and state."""
        local_counts = count_elements(self.shards, self.shard_grads, self.shard_states)
        return {
            kind: count + local_counts[kind] for kind, count in super().element_counts().items()
        }


def _named(flat: FlatGroup, vectors: Ranked) -> dict[str, Ranked]:
    """Return arrays by key from every rank's flat vector."""
    rows = [unflatten(vector, flat.shapes) for vector in vectors]
    return {key: [row[i] for row in rows] for i, key in enumerate(flat.keys)}
