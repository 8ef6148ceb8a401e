"""Where weights, gradients and optimiser state live: replicas, and gradients all-reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ascend_lab.errors import ClusterError
from ascend_lab.parallel.values.cuts import Cuts, Segments
from ascend_lab.parallel.values.group import Group, Ranked, Values, parts
from ascend_lab.parallel.values.optimizers import Optimizer, State
from ascend_lab.parallel.values.pieces import Piece
from ascend_lab.parallel.values.tape import Tape, Var

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
