"""Run the loop nests of a schedule in NumPy, tile by tile: the oracle of what a schedule computes.

No instructions, no pipes, no addresses: a tile is an array and the index it begins at, so a nest
that needs an element its tile does not hold fails here instead of reading a neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.dsl.arrays import Held, held, padded, poisoned, restored
from ascend_lab.dsl.boxes import Box, Range, needed, whole
from ascend_lab.dsl.complete import complete, loop_count, roots
from ascend_lab.dsl.emit_fold import start_of
from ascend_lab.dsl.evaluate import FOLDS, evaluated, narrowed, widened
from ascend_lab.dsl.lower import matrices
from ascend_lab.dsl.schedule import Schedule
from ascend_lab.dsl.stages import Fixed, Leaf, Stage, State
from ascend_lab.dsl.tensor import topological, unique_names
from ascend_lab.errors import InputError, ScheduleError
from ascend_lab.sim.number_formats import numpy_type

Values = NDArray[Any]
FRACTAL_STEP = 32
"""Cube stages read whole fractals, at most 32 elements long: zeros behind the operands."""


def interpret(schedule: Schedule, arrays: Mapping[str, Values]) -> dict[str, Values]:
    """Return the outputs of a schedule by name, from row-major arrays of its inputs.

    Loops, tails, attached tiles and folds are walked as the lowering walks them; cores take turns.
    Raises `InputError` for missing arrays, `ScheduleError` for stages with a hand-written kernel.
    """
    memory = _inputs(schedule, arrays)
    with np.errstate(all="ignore"):
        for stage in roots(schedule.state):
            if isinstance(stage, Fixed):
                what = f"the hand-written kernel {stage.kind}"
                raise ScheduleError(f"{stage.name}: a stage with loops", what, "use te.run")
            nest = complete(schedule.state, stage.name)
            _Walk(nest, memory).cores(nest.stage(stage.name))
    names = unique_names(topological(schedule.outputs))
    return {names[t]: restored(memory[names[t]].values, t.shape) for t in schedule.outputs}


def _inputs(schedule: Schedule, arrays: Mapping[str, Values]) -> dict[str, Held]:
    memory, fractal = {}, matrices(schedule.state)
    for entry in schedule.state.inputs:
        given = np.asarray(arrays.get(entry.name, ()))
        if given.size != np.prod(entry.shape):
            raise InputError(
                f"an array {entry.name} of shape {entry.shape}",
                f"shape {given.shape}" if entry.name in arrays else "none",
                "pass one array per input",
            )
        values = given.astype(numpy_type(entry.dtype)).reshape(entry.shape)
        unit = FRACTAL_STEP if entry.name in fractal else 1
        memory[entry.name] = padded(entry.name, values, unit)
    return memory


def steps(leaf: Leaf, box: Range) -> Iterator[Range]:
    """Yield the parts of a range a loop walks: whole ones, then the tail, cut or moved back."""
    full, rest = divmod(box.count, leaf.width)
    for trip in range(full):
        yield Range(box.start + trip * leaf.width, leaf.width)
    if rest and full and leaf.tail == "guard":
        yield Range(box.start + (box.count - leaf.width), leaf.width)
    elif rest:
        yield Range(box.start + full * leaf.width, rest)


@dataclass(slots=True)
class _Walk:
    """One phase: the tensors and tiles alive, and the box every active stage is at."""

    state: State
    memory: dict[str, Held]
    active: dict[str, Box] = field(default_factory=dict)

    def loops(self, stage: Stage) -> list[Leaf]:
        """Return the loops in front of the whole-tile statement, without those bound to cores."""
        front = stage.loops[: loop_count(self.state, stage)]
        return [leaf for leaf in front if leaf.name not in stage.bound]

    def cores(self, root: Stage) -> None:
        """Run the root nest once per core, in any order; here one after another."""
        self.memory[root.name] = poisoned(root, whole(root))

        def share(bound: Sequence[Leaf], box: Box) -> None:
            if not bound:
                self.run(root, box)
            for part in steps(bound[0], box[bound[0].root]) if bound else ():
                share(bound[1:], box | {bound[0].root: part})

        share([leaf for leaf in root.loops if leaf.name in root.bound], whole(root))

    def run(self, stage: Stage, box: Box) -> None:
        """Run the nest of a stage for a box of it."""
        self.active[stage.name] = box
        self.produce(stage, ("", *stage.bound))
        loops = self.loops(stage)
        if any(leaf.reduce for leaf in loops):
            self.memory[stage.name].part(stage, box)[...] = start_of(stage.fold, stage.dtype)
        self.level(stage, loops)
        del self.active[stage.name]

    def level(self, stage: Stage, loops: Sequence[Leaf]) -> None:
        """Run one loop and what is inside it; the statement where no loop is left."""
        if not loops:
            self.statement(stage)
            return
        leaf, box = loops[0], self.active[stage.name]
        for part in steps(leaf, box[leaf.root]):
            self.active[stage.name] = box | {leaf.root: part}
            self.produce(stage, (leaf.name,))
            self.level(stage, loops[1:])
        self.active[stage.name] = box

    def produce(self, host: Stage, places: Sequence[str]) -> None:
        """Compute what is attached to a place of the nest, outputs last."""
        wanted = {(host.name, place) for place in places}
        guests = [s for s in self.state.stages if isinstance(s, Stage) and s.attach in wanted]
        for stage in sorted(guests, key=lambda s: s.scope == "GM"):
            box = needed(self.state, stage, self.active)
            if stage.scope != "GM":
                self.memory[stage.name] = poisoned(stage, box)
            elif stage.name not in self.memory:
                self.memory[stage.name] = poisoned(stage, whole(stage))
            self.run(stage, box)

    def statement(self, stage: Stage) -> None:
        """Compute the active box of a stage, or fold it into what the tile holds."""
        box = self.active[stage.name]
        ranges = {a.name: box[a.name] for a in (*stage.axes, *stage.reduce)}
        value = evaluated(stage.expr, lambda r: held(self.memory, r.source).read(r, ranges))
        out = self.memory[stage.name].part(stage, box)
        if stage.fold:
            sizes = [r.count for r in ranges.values()]
            axes = tuple(range(len(stage.axes), len(sizes)))
            value = FOLDS[stage.fold].reduce(np.broadcast_to(widened(value), sizes), axis=axes)
        if any(leaf.reduce for leaf in self.loops(stage)):
            value = FOLDS[stage.fold](widened(out), value)
        out[...] = narrowed(value, stage.dtype)
