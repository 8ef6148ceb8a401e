"""What a plan does to one weight: how it is cut, and over whom its gradient is summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab import ops
from ascend_lab.errors import ClusterError
from ascend_lab.parallel.plans.plan import Plan
from ascend_lab.parallel.values.group import Group, Ranked, Traffic, Values, grid, part, parts
from ascend_lab.parallel.values.layers import Piece, Shard
from ascend_lab.parallel.values.tape import Tape, Var

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


# Optimisers that update any slice of a weight: element by element, so a shard is enough.


State = tuple[Values, ...]


@dataclass(frozen=True, slots=True)
class Sgd:
    """Stochastic gradient descent with momentum: one number of state a weight."""

    lr: float = 0.1
    momentum: float = 0.9

    def start(self, weight: Values) -> State:
        """Return the state before the first step."""
        return (np.zeros_like(weight),)

    def update(self, weight: Values, grad: Values, state: State, step: int) -> tuple[Values, State]:
        """Return weight and state after a step, counted from 1."""
        new, *rest = ops.get("sgd_momentum").reference(
            weight, grad, *state, lr=self.lr, momentum=self.momentum
        )
        return new, tuple(rest)


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam: mean and mean square of the gradient, two numbers of state a weight."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999

    def start(self, weight: Values) -> State:
        """Return the state before the first step."""
        return np.zeros_like(weight), np.zeros_like(weight)

    def update(self, weight: Values, grad: Values, state: State, step: int) -> tuple[Values, State]:
        """Return weight and state after a step, counted from 1."""
        settings = {"lr": self.lr, "beta1": self.beta1, "beta2": self.beta2, "step": step}
        new, *rest = ops.get("adam").reference(weight, grad, *state, **settings)
        return new, tuple(rest)


Optimizer = Sgd | Adam


# Where weights, gradients and optimiser state live: replicas, and gradients all-reduced.


Groups = Mapping[str, Group]


def flatten(arrays: Sequence[Values], multiple: int = 1) -> Values:
    """Return arrays one behind the other, zeros at the end up to a multiple of elements."""
    flat = np.concatenate([a.ravel() for a in arrays])
    return np.pad(flat, (0, -len(flat) % multiple))


def unflatten(flat: Values, shapes: Sequence[tuple[int, ...]]) -> list[Values]:
    """Return arrays of given shapes from one behind the other."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    cut = np.split(flat[: ends[-1]], ends[:-1])
    return [a.reshape(shape) for a, shape in zip(cut, shapes, strict=True)]


def summed(arrays: list[Ranked], group: Group) -> list[Ranked]:
    """Return each array's sum over a group, from one all-reduce of all of them together."""
    shapes = [one[0].shape for one in arrays]
    flat = group.all_reduce([flatten(rank) for rank in zip(*arrays, strict=True)])
    return [list(one) for one in zip(*(unflatten(f, shapes) for f in flat), strict=True)]


def local_weights(pieces: Sequence[Piece], groups: Groups, cuts: Cuts) -> dict[str, Ranked]:
    """Return every rank's part of the weights by "piece.weight"; raises `ClusterError`."""
    ranks, found = cuts.plan.data * cuts.plan.tensor, {}
    for piece in pieces:
        for name, full in piece.weights.items():
            shard, key = cuts.shard(piece, name), f"{piece.name}.{name}"
            if shard is None:
                found[key] = [full] * ranks
            else:
                what = f"axis {shard.axis} of {key} {full.shape}"
                found[key] = parts(full, groups[shard.group], shard.axis, what)
    return found


class Replicas:
    """Every data rank keeps all weights, gradients and state of its stage (ZeRO stage 0)."""

    def __init__(
        self, pieces: Sequence[Piece], groups: Groups, cuts: Cuts, optimizer: Optimizer
    ) -> None:
        self.cuts, self.groups, self.optimizer = cuts, groups, optimizer
        self.weights = local_weights(pieces, groups, cuts)
        self.sums = {f"{p.name}.{n}": cuts.sums(p, n) for p in pieces for n in p.weights}
        self.grads: dict[str, Ranked] = {}
        self.states: dict[str, list[State]] = {
            key: [optimizer.start(w) for w in ranked] for key, ranked in self.weights.items()
        }

    def fetch(self, tape: Tape, piece: Piece) -> dict[str, Var]:
        """Return a piece's weights for one forward pass; their gradients are kept afterwards."""
        found = {name: Var(self.weights[f"{piece.name}.{name}"]) for name in piece.weights}

        def keep() -> None:
            for name, var in found.items():
                self.keep(f"{piece.name}.{name}", var)

        tape.steps.append(keep)
        return found

    def release(self, tape: Tape, piece: Piece, found: dict[str, Var]) -> None:
        """Say that a piece's forward pass is over; replicas keep their weights."""

    def keep(self, key: str, var: Var) -> None:
        """Add a weight's gradient of one micro-batch."""
        if var.grads is not None:
            old = self.grads.get(key)
            self.grads[key] = (
                [a + b for a, b in zip(old, var.grads, strict=True)] if old else var.grads
            )

    def reduce(self) -> None:
        """Add gradients up over all ranks that saw other tokens; data ranks in segments."""
        for axis in ("tensor", "replica"):
            names = [key for key in self.states if axis in self.sums[key]]
            if names:
                self._sum(names, self.groups[axis])
        names = [key for key in reversed(self.states) if "data" in self.sums[key]]
        for first, last in checked(self.cuts.segments, len(names)):
            self._sum(names[first : last + 1], self.groups["data"])

    def _sum(self, names: list[str], group: Group) -> None:
        found = summed([self.grads[name] for name in names], group)
        self.grads.update(zip(names, found, strict=True))

    def step(self, number: int) -> None:
        """Update every weight on every rank."""
        for key, states in self.states.items():
            rows = zip(self.weights[key], self.grads[key], states, strict=True)
            new = [self.optimizer.update(w, g, s, number) for w, g, s in rows]
            self.weights[key] = [weight for weight, _ in new]
            self.states[key] = [state for _, state in new]

    def clear(self) -> None:
        """Forget the gradients."""
        self.grads = {}

    def whole_weights(self) -> dict[str, Ranked]:
        """Return every rank's weights."""
        return self.weights

    def whole_grads(self) -> dict[str, Ranked]:
        """Return every rank's gradients after `reduce`."""
        return self.grads

    def held(self) -> dict[str, int]:
        """Return numbers of elements on the first rank: parameters, gradients, state."""
        return {
            "parameters": sum(one[0].size for one in self.weights.values()),
            "gradients": sum(one[0].size for one in self.grads.values()),
            "state": sum(a.size for one in self.states.values() for a in one[0]),
        }


def checked(segments: Segments | None, count: int) -> Segments:
    """Return segments that cover `count` gradients in order; raise `ClusterError` for others."""
    if segments is None:
        return tuple((i, i) for i in range(count))
    covered = [i for first, last in segments for i in range(first, last + 1)]
    if covered != list(range(count)):
        what = f"segments that cover gradients 0 to {count - 1} once and in order"
        raise ClusterError(what, str(segments), "see names in backward order")
    return segments


# ZeRO: optimiser state (1), gradients (2) and parameters (3) cut among the data ranks.
#
# The weights of a piece are one flat vector, padded to a multiple of the ranks; each rank updates
# its part. Stages 1 and 2 reduce-scatter gradients and all-gather new parameters: the bytes of
# one
# all-reduce. Stage 3 (FSDP) keeps only parts: a piece is gathered before its forward pass,
# dropped,
# and gathered again before its backward pass, which makes half as many bytes more.
# Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
# 2020.


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights of a piece that are cut together; `sums`: groups their gradients are summed over.

    The last of these are the ranks they are cut among: "data", for experts "replica".
    """

    keys: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sums: tuple[str, ...]

    @property
    def group(self) -> str:
        """The group the unit is cut among."""
        return self.sums[-1]


class Sharded(Replicas):
    """Weights that ranks share are cut among them (plan.zero_stage says what of them)."""

    def __init__(
        self, pieces: Sequence[Piece], groups: Groups, cuts: Cuts, optimizer: Optimizer
    ) -> None:
        super().__init__(pieces, groups, cuts, optimizer)
        self.states = {}
        self.zero = cuts.plan.zero_stage
        self.units = {piece.name: self._units(piece) for piece in pieces}
        self.all_units = [unit for units in self.units.values() for unit in units]
        self.shards: dict[Unit, Ranked] = {}
        self.shard_grads: dict[Unit, Ranked] = {}
        self.shard_states: dict[Unit, list[State]] = {}
        for unit in self.all_units:
            own = self._own(unit, self.weights)
            self.shard_states[unit] = [optimizer.start(shard) for shard in own]
            if self.zero == 3:
                self.shards[unit] = own
                self._drop(unit)

    def _units(self, piece: Piece) -> tuple[Unit, ...]:
        keys = [f"{piece.name}.{name}" for name in piece.weights]
        kinds = dict.fromkeys(self.sums[key] for key in keys)
        found = []
        for kind in kinds:
            some = tuple(key for key in keys if self.sums[key] == kind)
            found.append(Unit(some, tuple(self.weights[key][0].shape for key in some), kind))
        return tuple(found)

    # -- flat vectors ---------------------------------------------------------------------------
    def _flat(self, unit: Unit, arrays: dict[str, Ranked]) -> Ranked:
        rows = zip(*(arrays[key] for key in unit.keys), strict=True)
        return [flatten(row, self.groups[unit.group].ranks) for row in rows]

    def _own(self, unit: Unit, arrays: dict[str, Ranked]) -> Ranked:
        """Return every rank's part of a unit."""
        flat, group = self._flat(unit, arrays), self.groups[unit.group]
        return [part(f, group.ranks, group.place(r), 0) for r, f in enumerate(flat)]

    @staticmethod
    def _named(unit: Unit, flat: Ranked) -> dict[str, Ranked]:
        """Return the arrays of a unit by key from every rank's flat vector."""
        rows = [unflatten(f, unit.shapes) for f in flat]
        return {key: [row[i] for row in rows] for i, key in enumerate(unit.keys)}

    def _drop(self, unit: Unit) -> None:
        for key in unit.keys:
            del self.weights[key]

    # -- one pass -------------------------------------------------------------------------------
    def fetch(self, tape: Tape, piece: Piece) -> dict[str, Var]:
        """Return a piece's weights; from stage 2 on its gradients leave once they are made."""
        units = self.units[piece.name]
        if self.zero > 1:
            tape.steps.append(lambda: self._scatter(units))  # met last on the way back
        if self.zero == 3:
            for unit in units:
                flat = self.groups[unit.group].all_gather(self.shards[unit])
                self.weights.update(self._named(unit, flat))
        return super().fetch(tape, piece)

    def release(self, tape: Tape, piece: Piece, found: dict[str, Var]) -> None:
        """Stage 3: drop a piece's weights now, and gather them again before its backward pass."""
        if self.zero < 3:
            return
        units, start = self.units[piece.name], len(piece.name) + 1

        def gather_again() -> None:
            for unit in units:
                flat = self.groups[unit.group].all_gather(self.shards[unit])
                for key, values in self._named(unit, flat).items():
                    found[key[start:]].values = values

        for unit in units:
            self._drop(unit)
            for key in unit.keys:
                found[key[start:]].values = []
        tape.steps.append(gather_again)  # met first on the way back

    def _scatter(self, units: Sequence[Unit]) -> None:
        """Add whole gradients up over the ranks that share them; each keeps its part."""
        for unit in units:
            found = self.groups[unit.group].reduce_scatter(self._flat(unit, self.grads))
            old = self.shard_grads.get(unit)
            self.shard_grads[unit] = (
                [a + b for a, b in zip(old, found, strict=True)] if old else found
            )
            for key in unit.keys:
                del self.grads[key]

    # -- the end of a step ----------------------------------------------------------------------
    def reduce(self) -> None:
        """Finish the sums: stage 1 scatters here, once; then the groups inside a replica."""
        if self.zero == 1:
            self._scatter(self.all_units)
        for unit in self.all_units:
            if "tensor" in unit.sums:
                self.shard_grads[unit] = self.groups["tensor"].all_reduce(self.shard_grads[unit])

    def step(self, number: int) -> None:
        """Update each rank's part; stages 1 and 2 then gather the new parameters."""
        for unit in self.all_units:
            own = self.shards[unit] if self.zero == 3 else self._own(unit, self.weights)
            rows = zip(own, self.shard_grads[unit], self.shard_states[unit], strict=True)
            new = [self.optimizer.update(w, g, s, number) for w, g, s in rows]
            self.shard_states[unit] = [state for _, state in new]
            shards = [weight for weight, _ in new]
            if self.zero == 3:
                self.shards[unit] = shards
            else:
                flat = self.groups[unit.group].all_gather(shards)
                self.weights.update(self._named(unit, flat))

    def clear(self) -> None:
        """Forget the gradients."""
        super().clear()
        self.shard_grads = {}

    # -- for the report -------------------------------------------------------------------------
    def _joined(self, unit: Unit, shards: Ranked) -> dict[str, Ranked]:
        """Return whole arrays for the reader, without any message between ranks."""
        team = {r: members for members in self.groups[unit.group].members for r in members}
        flat = [np.concatenate([shards[m] for m in team[r]]) for r in range(len(shards))]
        return self._named(unit, flat)

    def whole_weights(self) -> dict[str, Ranked]:
        """Return every rank's weights, put together from parts where needed."""
        found = dict(self.weights)
        for unit, shards in self.shards.items():
            found.update(self._joined(unit, shards))
        return found

    def whole_grads(self) -> dict[str, Ranked]:
        """Return every rank's gradients, put together from parts."""
        found = dict(self.grads)
        for unit, shards in self.shard_grads.items():
            found.update(self._joined(unit, shards))
        return found

    def held(self) -> dict[str, int]:
        """Return numbers of elements on the first rank: parameters, gradients, state."""
        found = super().held()
        found["parameters"] += sum(one[0].size for one in self.shards.values())
        found["gradients"] += sum(one[0].size for one in self.shard_grads.values())
        found["state"] += sum(a.size for one in self.shard_states.values() for a in one[0])
        return found
