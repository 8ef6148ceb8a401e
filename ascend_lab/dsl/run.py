"""Tensors and tiles as NumPy arrays that know which index they begin at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.dsl.boxes import Box, Range, needed, whole
from ascend_lab.dsl.emit_formula import start_of
from ascend_lab.dsl.fractals import Matrix, matrices, matrix_map
from ascend_lab.dsl.lower import lower
from ascend_lab.dsl.nests import complete, loop_count, roots
from ascend_lab.dsl.schedule import Schedule
from ascend_lab.dsl.stages import Fixed, Leaf, Stage, State
from ascend_lab.dsl.tensor import Call, Expr, Read, topological, unique_names
from ascend_lab.errors import InputError, ScheduleError
from ascend_lab.isa import Affine
from ascend_lab.layout import pack, unpack
from ascend_lab.sim import execute
from ascend_lab.sim.values import numpy_type

Values = NDArray[Any]


@dataclass(slots=True)
class Held:
    """The elements `start`, `start + 1`, ... of every dimension of a tensor."""

    name: str
    values: Values
    start: tuple[int, ...]

    def part(self, stage: Stage, box: Box) -> Values:
        """Return the view of what a box of its own stage covers."""
        places = []
        for axis, first in zip(stage.axes, self.start, strict=True):
            low = box[axis.name].start.const - first
            places.append(slice(low, low + box[axis.name].count))
        return self.values[tuple(places)]

    def read(self, read: Read, box: Mapping[str, Range]) -> Values:
        """Return what a read gives over a box: one dimension per axis, 1 where it is constant."""
        values = self.values.reshape(read.view) if read.view else self.values
        start = (0,) * len(read.view) if read.view else self.start
        index = [_places(a, first, box) for a, first in zip(read.index, start, strict=True)]
        for place, size in zip(index, values.shape, strict=True):
            if place.min() < 0 or place.max() >= size:
                raise ScheduleError(
                    f"{self.name}: {size} elements that its reader needs",
                    f"indices {place.min()}..{place.max()} of the tile",
                    "attach it where its reader needs no more than that",
                )
        picked: Values = values[tuple(index)]
        return picked


def held(memory: Mapping[str, Held], name: str) -> Held:
    """Return what is alive under a name; raise `ScheduleError` if nothing computed it yet."""
    if name not in memory:
        raise ScheduleError(
            f"{name} computed before it is read", "nothing", "attach it further out"
        )
    return memory[name]


def _places(index: Affine, first: int, box: Mapping[str, Range]) -> Values:
    names = list(box)
    place = np.full((1,) * len(names), index.const - first)
    for name, factor in index.terms:
        shape = [1] * len(names)
        shape[names.index(name)] = box[name].count
        here = box[name].start.const + np.arange(box[name].count)
        place = place + factor * here.reshape(shape)
    return place


def poisoned(stage: Stage, box: Box) -> Held:
    """Return a tile for a box of a stage, full of NaN or of the smallest whole number."""
    kind = numpy_type(stage.dtype)
    poison = np.iinfo(kind).min if np.dtype(kind).kind in "iu" else np.nan
    ranges = [box[a.name] for a in stage.axes]
    values = np.full([r.count for r in ranges], poison, kind)
    return Held(stage.name, values, tuple(r.start.const for r in ranges))


def padded(name: str, values: Values, unit: int) -> Held:
    """Return a tensor with zeros up to a multiple of `unit` in its last two dimensions."""
    widths = [(0, 0)] * (values.ndim - 2) + [(0, -n % unit) for n in values.shape[-2:]]
    return Held(name, np.pad(values, widths) if unit > 1 else values, (0,) * values.ndim)


def restored(values: Values, shape: Sequence[int]) -> Values:
    """Return a result in the shape of its tensor: fused axes apart, padding of fractals gone."""
    if values.size == math.prod(shape):
        return values.reshape(tuple(shape))
    return values[tuple(slice(0, n) for n in shape)]


# Formulas on NumPy arrays in the hardware's formats, without instructions: fp32 inside, one cast.
#
# Written apart from the simulator's vector unit on purpose: two implementations check each other.


FOLDS: Mapping[str, Any] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}
"""What combines two partial results of a fold."""

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "vadd": np.add,
    "vadds": np.add,
    "vsub": np.subtract,
    "vmul": np.multiply,
    "vmuls": np.multiply,
    "mac": np.multiply,
    "vdiv": np.divide,
    "vmax": np.maximum,
    "vmaxs": np.maximum,
    "vmin": np.minimum,
    "vmins": np.minimum,
    "vabs": np.abs,
    "vrelu": lambda x: np.maximum(x, 0),
    "vexp": np.exp,
    "vln": np.log,
    "vsqrt": np.sqrt,
    "vrsqrt": lambda x: 1 / np.sqrt(x),
    "vrec": lambda x: 1 / x,
    "vand": np.bitwise_and,
    "vor": np.bitwise_or,
    "vnot": np.bitwise_not,
    "vsel": lambda condition, a, b: np.where(np.not_equal(condition, 0), a, b),
}
_COMPARE: Mapping[str, Callable[..., Values]] = {
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_ROUND: Mapping[str, Callable[..., Values]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "rint": np.rint,
}


def evaluated(expr: Expr, fetch: Callable[[Read], Values]) -> Values:
    """Return the value of a formula; `fetch` gives what each of its reads stands for."""
    if isinstance(expr, Read):
        return fetch(expr)
    assert isinstance(expr, Call)
    args = [evaluated(arg, fetch) for arg in expr.args]
    if expr.op == "vcopy":
        return args[0]
    if expr.op == "vconv":
        whole = numpy_type(expr.format)(0).dtype.kind in "iu"
        value = _ROUND[expr.mode or "rint"](widened(args[0])) if whole else args[0]
        return narrowed(value, expr.format)
    wide = [widened(arg) for arg in args]
    if expr.number is not None:
        wide.append(widened(numpy_type(expr.args[0].dtype)(expr.number)))
    function = _COMPARE[expr.mode] if expr.op == "vcmp" else _FUNCTIONS[expr.op]
    value = function(*wide)
    return value if expr.op == "mac" else narrowed(value, expr.format)


def widened(values: Any) -> Any:
    """Return values in the format arithmetic is done in: fp32, or 64-bit whole numbers."""
    array = np.asarray(values)
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)


def narrowed(values: Values, dtype: str) -> Values:
    """Return values in a number format: rounded to nearest even, whole numbers saturate."""
    kind = numpy_type(dtype)
    if np.dtype(kind).kind in "iu":
        limits = np.iinfo(kind)
        values = np.clip(np.nan_to_num(np.rint(values)), limits.min, limits.max)
    result: Values = values.astype(kind)
    return result


# Run the loop nests of a schedule in NumPy, tile by tile: the oracle of what a schedule computes.
#
# No instructions, no pipes, no addresses: a tile is an array and the index it begins at, so a
# nest
# that needs an element its tile does not hold fails here instead of reading a neighbour.


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


# Execute a schedule on ordinary arrays.


def run(schedule: Schedule, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Execute a schedule on row-major arrays and return its outputs, row-major, by name.

    Operands of the cube are packed into fractals, its results unpacked. Raises `InputError` for
    arrays of a wrong name, size or format.
    """
    stored = matrices(schedule.state)
    _check_inputs(schedule, arrays)
    feed = {}
    for name, array in arrays.items():
        feed[name] = np.asarray(array)
        if name in stored:
            entry = schedule.state.find(name)
            where = matrix_map(entry.shape, stored[name], entry.dtype)
            feed[name] = pack(where, feed[name].reshape(entry.shape))
    memory = execute(lower(schedule), feed, schedule.chip)
    names = unique_names(topological(schedule.outputs))
    return {
        names[t]: _fetched(names[t], t.shape, t.dtype, memory[names[t]], stored)
        for t in schedule.outputs
    }


def _check_inputs(schedule: Schedule, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise `InputError` unless every input is there, in its shape, and nothing else."""
    names = unique_names(topological(schedule.outputs))
    inputs = {names[t]: t.shape for t in names if t.body is None}
    for name, shape in inputs.items():
        if name not in arrays:
            raise InputError(f"an array for {name} {shape}", "none", "pass every input by its name")
        if np.shape(arrays[name]) != shape:
            raise InputError(
                f"{name}: an array of shape {shape}", str(np.shape(arrays[name])), "reshape it"
            )
    extra = next((name for name in arrays if name not in inputs), None)
    if extra is not None:
        raise InputError(f"the inputs {', '.join(inputs)}", extra, "leave it out")


def _fetched(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    array: NDArray[Any],
    stored: Mapping[str, Matrix],
) -> NDArray[Any]:
    if name not in stored:
        return array.reshape(shape)
    return unpack(matrix_map(shape, stored[name], dtype), array.reshape(-1))
