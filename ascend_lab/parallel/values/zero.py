"""ZeRO: optimiser state (1), gradients (2) and parameters (3) cut among the data ranks.

The weights of a piece are one flat vector, padded to a multiple of the ranks; each rank updates
its part. Stages 1 and 2 reduce-scatter gradients and all-gather new parameters: the bytes of one
all-reduce. Stage 3 (FSDP) keeps only parts: a piece is gathered before its forward pass, dropped,
and gathered again before its backward pass, which makes half as many bytes more.
Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.parallel.values.cuts import Cuts
from ascend_lab.parallel.values.group import Ranked, part
from ascend_lab.parallel.values.optimizers import Optimizer, State
from ascend_lab.parallel.values.pieces import Piece
from ascend_lab.parallel.values.stores import Groups, Replicas, flatten, unflatten
from ascend_lab.parallel.values.tape import Tape, Var


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
