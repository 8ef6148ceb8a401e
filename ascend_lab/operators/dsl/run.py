"""Execute a schedule on arrays: its kernel on the simulator, or its loop nests in NumPy.

`run(schedule, {"x": array})["y"]` is the output y that the kernel computes from x. `interpret` is
the reference for what a schedule computes: it uses no instructions, pipes or addresses. A tile is
an array with the index at which it begins, so that a nest that needs an element outside its tile
fails here instead of reading a neighbouring tile.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ascend_lab.errors import InputError, ScheduleError
from ascend_lab.machine.isa.memory import numpy_type
from ascend_lab.machine.layout import pack, unpack
from ascend_lab.machine.sim import execute
from ascend_lab.machine.sim.values import COMPARE, ELEMENTWISE, ROUND
from ascend_lab.operators.dsl import fractals, stages
from ascend_lab.operators.dsl.boxes import Box, Range, needed_box, whole_box
from ascend_lab.operators.dsl.emit_folds import neutral_number
from ascend_lab.operators.dsl.lower import lower
from ascend_lab.operators.dsl.schedule import Schedule, complete, loop_count, roots
from ascend_lab.operators.dsl.tensor import Call, Expr, Read, Shape, topological, unique_names

Values = np.ndarray
FRACTAL_STEP = 32
"""Cube stages read whole fractals, at most 32 elements long: zeros behind the operands."""

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **ELEMENTWISE,
    "mac": np.multiply,
    "vsel": lambda condition, a, b: np.where(np.not_equal(condition, 0), a, b),
}
FOLDS: Mapping[str, Any] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}


def run(schedule: Schedule, arrays: Mapping[str, Values]) -> dict[str, Values]:
    """Execute a schedule on row-major arrays and return its outputs, row-major, by name.

    Operands of the cube are packed into fractals, its results unpacked. Raises `InputError` for
    arrays of a wrong name, size or format.
    """
    names = unique_names(topological(schedule.outputs))
    tensors = {name: tensor for tensor, name in names.items()}
    _check_inputs({name: t.shape for name, t in tensors.items() if t.body is None}, arrays)
    # Operands of the cube lie in GM as fractals: arrays are packed on the way in, and out again.
    fractal = {
        name: fractals.matrix_map(tensors[name].shape, matrix, tensors[name].dtype)
        for name, matrix in fractals.matrices(schedule.state).items()
        if name in tensors
    }
    feed = {name: np.asarray(array) for name, array in arrays.items()}
    feed |= {name: pack(fractal[name], feed[name]) for name in feed if name in fractal}
    memory = execute(lower(schedule), feed, schedule.chip)
    outputs = {}
    for tensor in schedule.outputs:
        name = names[tensor]
        flat = memory[name].reshape(-1)
        if name in fractal:
            outputs[name] = unpack(fractal[name], flat)
        else:
            outputs[name] = flat.reshape(tensor.shape)
    return outputs


def _check_inputs(inputs: Mapping[str, Shape], arrays: Mapping[str, Values]) -> None:
    """Raise `InputError` unless every input is there, in its shape, and nothing else."""
    for name, shape in inputs.items():
        if name not in arrays:
            raise InputError(f"an array for {name} {shape}", "none", "pass every input by its name")
        if np.shape(arrays[name]) != shape:
            needed = f"{name}: an array of shape {shape}"
            raise InputError(needed, str(np.shape(arrays[name])), "reshape it")
    for extra in arrays:
        if extra not in inputs:
            raise InputError(f"the inputs {', '.join(inputs)}", extra, "leave it out")


def interpret(schedule: Schedule, arrays: Mapping[str, Values]) -> dict[str, Values]:
    """Return the outputs of a schedule by name, from row-major arrays of its inputs.

    Loops, tails, attached tiles and folds run in the same order as in the lowered program, except
    that one core runs after the other.
    Raises `InputError` for missing arrays, `ScheduleError` for stages with a hand-written kernel.
    """
    memory = _inputs(schedule, arrays)
    with np.errstate(all="ignore"):
        for stage in roots(schedule.state):
            if isinstance(stage, stages.Fixed):
                kernel = f"the hand-written kernel {stage.kind}"
                raise ScheduleError(f"{stage.name}: a stage with loops", kernel, "use te.run")
            nest = complete(schedule.state, stage.name)
            _Walk(nest, memory).cores(nest.stage(stage.name))
    out = {}
    for tensor, name in unique_names(topological(schedule.outputs)).items():
        if tensor in schedule.outputs:
            values = memory[name].values
            if values.size == tensor.elements:
                out[name] = values.reshape(tensor.shape)
            else:  # padded to fractals
                out[name] = values[tuple(slice(0, n) for n in tensor.shape)]
    return out


def _inputs(schedule: Schedule, arrays: Mapping[str, Values]) -> dict[str, "PlacedValues"]:
    """Return the inputs as arrays; operands of the cube are padded to whole fractals with zeros."""
    memory = {}
    fractal = fractals.matrices(schedule.state)
    for entry in schedule.state.inputs:
        array = np.asarray(arrays.get(entry.name, ()))
        if array.size != np.prod(entry.shape):
            needed = f"an array {entry.name} of shape {entry.shape}"
            got = f"shape {array.shape}" if entry.name in arrays else "none"
            raise InputError(needed, got, "pass one array per input")
        values = array.astype(numpy_type(entry.dtype)).reshape(entry.shape)
        if entry.name in fractal:
            # A matrix of 100 x 60 becomes 112 x 64 with zeros, which change no sum.
            edge = [(0, -n % FRACTAL_STEP) for n in values.shape[-2:]]
            values = np.pad(values, [(0, 0)] * (values.ndim - 2) + edge)
        memory[entry.name] = PlacedValues(entry.name, values, (0,) * values.ndim)
    return memory


# -- nests, step by step --------------------------------------------------------------------------
def steps(leaf: stages.Leaf, box: Range) -> Iterator[Range]:
    """Yield the parts of a range over which a loop steps: whole ones, then the tail."""
    full_steps, remainder = divmod(box.count, leaf.width)
    for trip in range(full_steps):
        yield Range(box.start + trip * leaf.width, leaf.width)
    if remainder and full_steps and leaf.tail == "guard":
        yield Range(box.start + (box.count - leaf.width), leaf.width)
    elif remainder:
        yield Range(box.start + full_steps * leaf.width, remainder)


@dataclass(slots=True)
class _Walk:
    """The execution of one phase of a schedule: a nest of loops, run step by step.

    `memory` holds the tensors and the tiles that exist now, `active` the box of each stage whose
    loops are being run.
    """

    state: stages.State
    memory: dict[str, "PlacedValues"]
    active: dict[str, Box] = field(default_factory=dict)

    def loops(self, stage: stages.Stage) -> list[stages.Leaf]:
        """Return the loops in front of the whole-tile statement, without those bound to cores."""
        front = stage.loops[: loop_count(self.state, stage)]
        return [leaf for leaf in front if leaf.name not in stage.bound]

    def cores(self, root: stages.Stage) -> None:
        """Run the root nest once per core, in any order; here one after another."""
        self.memory[root.name] = poison(root, whole_box(root))

        def run_share(bound: Sequence[stages.Leaf], box: Box) -> None:
            """Run the nest for each combination of steps of the bound loops."""
            if not bound:
                self.run(root, box)
                return
            for step_range in steps(bound[0], box[bound[0].root]):
                run_share(bound[1:], box | {bound[0].root: step_range})

        run_share([leaf for leaf in root.loops if leaf.name in root.bound], whole_box(root))

    def run(self, stage: stages.Stage, box: Box) -> None:
        """Run the nest of a stage for a box of it."""
        self.active[stage.name] = box
        self.produce(stage, ("", *stage.bound))
        loops = self.loops(stage)
        if any(leaf.reduce for leaf in loops):
            self.memory[stage.name].part(stage, box)[...] = neutral_number(stage.fold, stage.dtype)
        self.level(stage, loops)
        del self.active[stage.name]

    def level(self, stage: stages.Stage, loops: Sequence[stages.Leaf]) -> None:
        """Run one loop with its body; run the statement if no loop is left."""
        if not loops:
            self.statement(stage)
            return
        leaf = loops[0]
        box = self.active[stage.name]
        for step_range in steps(leaf, box[leaf.root]):
            self.active[stage.name] = box | {leaf.root: step_range}
            self.produce(stage, (leaf.name,))
            self.level(stage, loops[1:])
        self.active[stage.name] = box

    def produce(self, host: stages.Stage, places: Sequence[str]) -> None:
        """Compute the stages attached to some places of the host's nest, outputs last."""
        # Outputs last: they may copy tiles that are computed at the same place.
        for stage in sorted(self.state.guests(host.name, *places), key=lambda s: s.scope == "GM"):
            box = needed_box(self.state, stage, self.active)
            if stage.scope != "GM":
                self.memory[stage.name] = poison(stage, box)
            elif stage.name not in self.memory:
                self.memory[stage.name] = poison(stage, whole_box(stage))
            self.run(stage, box)

    def fetch(self, read: Read, ranges: Mapping[str, Range]) -> Values:
        """Return the values of a read; raise `ScheduleError` if they are not computed yet."""
        name = read.source
        if name not in self.memory:
            needed = f"{name} computed before it is read"
            raise ScheduleError(needed, "nothing", "attach it further out")
        return self.memory[name].read(read, ranges)

    def statement(self, stage: stages.Stage) -> None:
        """Compute the active box of a stage, or fold it into the values in the tile."""
        box = self.active[stage.name]
        ranges = {a.name: box[a.name] for a in (*stage.axes, *stage.reduce)}
        # Whole boxes at once, with one dimension per axis: NumPy broadcasts what does not depend on
        # an axis.
        value = value_of(stage.expr, lambda read: self.fetch(read, ranges))
        out = self.memory[stage.name].part(stage, box)
        if stage.fold:
            sizes = [r.count for r in ranges.values()]
            axes = tuple(range(len(stage.axes), len(sizes)))
            value = FOLDS[stage.fold].reduce(np.broadcast_to(widen(value), sizes), axis=axes)
        if any(leaf.reduce for leaf in self.loops(stage)):
            value = FOLDS[stage.fold](widen(out), value)
        out[...] = round_to(value, stage.dtype)


# -- values ---------------------------------------------------------------------------------------
@dataclass(slots=True)
class PlacedValues:
    """A tile as an array: along each dimension it holds a tensor's elements from `start` on."""

    name: str
    values: Values
    start: tuple[int, ...]

    def part(self, stage: stages.Stage, box: Box) -> Values:
        """Return the view of these elements that a box of their own stage covers."""
        ranges = [box[a.name] for a in stage.axes]
        first = [r.start.const - start for r, start in zip(ranges, self.start, strict=True)]
        slices = [slice(n, n + r.count) for n, r in zip(first, ranges, strict=True)]
        return self.values[tuple(slices)]

    def read(self, read: Read, box: Mapping[str, Range]) -> Values:
        """Return the values of a read over a box: one dimension per axis, of size 1 if constant."""
        values = self.values.reshape(read.view) if read.view else self.values
        starts = (0,) * len(read.view) if read.view else self.start
        axis_slices = [slice(r.start.const, r.start.const + r.count) for r in box.values()]
        # x[2 i + 1] over i in 3..5: the index array 2 * [3, 4, 5] + 1.
        axis_values = dict(zip(box, np.ogrid[tuple(axis_slices)], strict=True))
        ones = np.ones((1,) * len(box), int)
        index = []
        for affine, first in zip(read.index, starts, strict=True):
            terms = (factor * axis_values[name] for name, factor in affine.terms)
            index.append(sum(terms, ones * (affine.const - first)))
        for positions, size in zip(index, values.shape, strict=True):
            if positions.min() < 0 or positions.max() >= size:
                raise ScheduleError(
                    f"{self.name}: {size} elements that its reader needs",
                    f"indices {positions.min()}..{positions.max()} of the tile",
                    "attach it where its reader needs no more than that",
                )
        return np.asarray(values[tuple(index)])


def poison(stage: stages.Stage, box: Box) -> PlacedValues:
    """Return a tile for a box of a stage, full of NaN or of the smallest whole number."""
    kind = numpy_type(stage.dtype)
    # An element that is read before it is written shows up in the result.
    fill = np.iinfo(kind).min if np.dtype(kind).kind in "iu" else np.nan
    ranges = [box[a.name] for a in stage.axes]
    values = np.full([r.count for r in ranges], fill, kind)
    return PlacedValues(stage.name, values, tuple(r.start.const for r in ranges))


def value_of(expr: Expr, fetch: Callable[[Read], Values]) -> Values:
    """Return the value of a formula in the hardware's formats: fp32 inside, one cast per operation.

    `fetch` returns the values of a read.
    """
    if isinstance(expr, Read):
        return fetch(expr)
    assert isinstance(expr, Call)
    args = [value_of(arg, fetch) for arg in expr.args]
    if expr.op == "vcopy":
        return args[0]
    # The vector unit computes in fp32 and rounds the result once to fp16.
    wide = [widen(arg) for arg in args]
    if expr.op == "vconv":
        is_integer = np.dtype(numpy_type(expr.format)).kind in "iu"
        value = ROUND.get(expr.mode, np.rint)(wide[0]) if is_integer else args[0]
        return round_to(value, expr.format)
    if expr.number is not None:
        wide.append(widen(numpy_type(expr.args[0].dtype)(expr.number)))
    function = COMPARE[expr.mode] if expr.op == "vcmp" else FUNCTIONS[expr.op]
    value = function(*wide)
    return value if expr.op == "mac" else round_to(value, expr.format)


def widen(values: Any) -> Any:
    """Return values in the format arithmetic is done in: fp32, or 64-bit whole numbers."""
    array = np.asarray(values)
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)


def round_to(values: Values, dtype: str) -> Values:
    """Return values in a number format: rounded to nearest even, whole numbers saturate."""
    kind = numpy_type(dtype)
    if np.dtype(kind).kind in "iu":
        limits = np.iinfo(kind)
        values = np.clip(np.nan_to_num(np.rint(values)), limits.min, limits.max)
    return np.asarray(values.astype(kind))
