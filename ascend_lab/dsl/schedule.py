"""Schedules: tensors plus a list of steps, each a frozen record that prints, stores and replays."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

from ascend_lab.chip import Chip, load_chip
from ascend_lab.dsl import primitives_loops as loops
from ascend_lab.dsl import primitives_loops as units
from ascend_lab.dsl import primitives_tiles as tiles
from ascend_lab.dsl.fractals import with_conversions
from ascend_lab.dsl.stages import State, initial_state
from ascend_lab.dsl.tensor import Tensor
from ascend_lab.errors import ScheduleError

APPLY: Mapping[str, Callable[..., State]] = {
    "split": loops.split,
    "reorder": loops.reorder,
    "fuse": loops.fuse,
    "cache_read": tiles.cache_read,
    "cache_write": tiles.cache_write,
    "materialise": tiles.materialise,
    "compute_at": tiles.compute_at,
    "inline": tiles.inline,
    "double_buffer": tiles.double_buffer,
    "bind": units.bind,
    "vectorise": units.vectorise,
    "tensorize": units.tensorize,
    "storage_align": tiles.storage_align,
    "rfactor": units.rfactor,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One primitive with its arguments, e.g. split(y, i, 128, cut)."""

    primitive: str
    arguments: tuple[Any, ...]

    def apply(self, state: State) -> State:
        """Return the state after this step."""
        step = APPLY[self.primitive]
        try:
            signature(step).bind(state, *self.arguments)
            return step(state, *self.arguments)
        except (TypeError, ValueError, AttributeError) as error:
            names = ", ".join(list(signature(step).parameters)[1:])
            raise ScheduleError(
                f"{self.primitive}({names})", f"{self} ({error})", "give each argument its kind"
            ) from error

    def __str__(self) -> str:
        """Print as the call that made it."""
        return f"{self.primitive}({', '.join(map(_show, self.arguments))})"


def _show(value: Any) -> str:
    return "(" + ", ".join(map(str, value)) + ")" if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, eq=False)
class Schedule:
    """Outputs, the chip they are for, the steps so far, and the state these lead to.

    Two schedules are equal when outputs, chip name and steps are.
    """

    outputs: tuple[Tensor, ...]
    chip: Chip
    steps: tuple[Step, ...] = ()
    state: State = field(default=State((), ()), repr=False)

    def _key(self) -> tuple[object, ...]:
        return (self.outputs, self.chip.name, self.steps)

    def __eq__(self, other: object) -> bool:
        """Compare outputs, chip name and steps."""
        return isinstance(other, Schedule) and self._key() == other._key()

    def __hash__(self) -> int:
        """Hash outputs, chip name and steps."""
        return hash(self._key())

    def then(self, primitive: str, *arguments: Any) -> Schedule:
        """Return the schedule with one more step; raise `ScheduleError` if it is illegal."""
        step = Step(primitive, arguments)
        return replace(self, steps=(*self.steps, step), state=step.apply(self.state))

    def to_json(self) -> str:
        """Return the steps as JSON text."""
        rows = [[s.primitive, *s.arguments] for s in self.steps]
        return json.dumps({"chip": self.chip.name, "steps": rows})

    def __repr__(self) -> str:
        """Return one line per step."""
        head = f"Schedule of {', '.join(o.label for o in self.outputs)} for {self.chip.name}"
        return "\n".join([head, *(f"  {step}" for step in self.steps)])


def create_schedule(outputs: Tensor | Sequence[Tensor], chip: Chip | str) -> Schedule:
    """Return the empty schedule of one or several outputs: every stage a nest of its own in GM."""
    chip = load_chip(chip) if isinstance(chip, str) else chip
    tensors = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    return Schedule(tensors, chip, (), with_conversions(initial_state(tensors)))


def replay(outputs: Tensor | Sequence[Tensor], chip: Chip, steps: Sequence[Step] | str) -> Schedule:
    """Return the schedule that `steps` (records, or JSON from `Schedule.to_json`) build."""
    schedule = create_schedule(outputs, chip)
    for step in _steps(steps) if isinstance(steps, str) else steps:
        schedule = schedule.then(step.primitive, *step.arguments)
    return schedule


def _steps(text: str) -> list[Step]:
    try:
        data = json.loads(text)
        rows = data["steps"] if isinstance(data, Mapping) else data
        if not all(isinstance(row, list) and row for row in rows):
            raise ValueError("a step is a list: its primitive and arguments")
        steps = [Step(str(row[0]), tuple(_frozen(a) for a in row[1:])) for row in rows]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ScheduleError("steps as JSON", str(error), "write them with to_json") from error
    unknown = next((s.primitive for s in steps if s.primitive not in APPLY), None)
    if unknown is not None:
        raise ScheduleError(f"a primitive ({', '.join(APPLY)})", repr(unknown), "check the name")
    return steps


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


# -- one public function per primitive ----------------------------------------------------------


def split(s: Schedule, stage: str, axis: str, factor: int, *, tail: str = "cut") -> Schedule:
    """Split a loop into parts of `factor` steps.

    before: `for i in n: body(i)`
    after, tail="cut": `for i_o in n // f: for i_i in f: body(i_o * f + i_i)`, then the rest once
    after, tail="guard": the last part begins at n - f, so that all parts are whole
    """
    return s.then("split", stage, axis, factor, tail)


def reorder(s: Schedule, stage: str, *axes: str) -> Schedule:
    """Change the order of loops.

    before: `for i: for j: body`   after reorder(j, i): `for j: for i: body`
    """
    return s.then("reorder", stage, tuple(axes))


def fuse(s: Schedule, stage: str, first: str, second: str) -> Schedule:
    """Make one axis of two neighbours that are contiguous in every operand.

    before: `for i in m: for j in n: body(i, j)`   after: `for ij in m * n: body(ij // n, ij % n)`
    """
    return s.then("fuse", stage, first, second)


def tile(s: Schedule, stage: str, i: str, j: str, rows: int, columns: int) -> Schedule:
    """Walk a matrix in tiles: split both axes and put the tile loops inside.

    before: `for i: for j: body`   after: `for i_o: for j_o: for i_i: for j_i: body`
    """
    s = split(split(s, stage, i, rows), stage, j, columns)
    return reorder(s, stage, f"{i}_o", f"{j}_o", f"{i}_i", f"{j}_i")


def cache_read(s: Schedule, tensor: str, scope: str, *readers: str) -> Schedule:
    """Read a tensor through a tile in an on-chip buffer.

    before: `y[i] = f(x[i])`   after: `x_ub[i] = x[i]`, `y[i] = f(x_ub[i])`
    """
    return s.then("cache_read", tensor, scope, tuple(readers))


def cache_write(s: Schedule, stage: str, scope: str) -> Schedule:
    """Compute into a tile in an on-chip buffer and copy it out.

    before: `y[i] = f(x[i])`   after: `y_ub[i] = f(x[i])`, `y[i] = y_ub[i]`
    """
    return s.then("cache_write", stage, scope)


def materialise(s: Schedule, stage: str, number: int = 0) -> Schedule:
    """Store what a stage reads in the order it reads it (a strided copy through GM).

    before: `y[i, j] = f(x[j, i])`   after: `x_as_y[i, j] = x[j, i]`, `y[i, j] = f(x_as_y[i, j])`
    """
    return s.then("materialise", stage, number)


def compute_at(s: Schedule, stage: str, consumer: str, axis: str) -> Schedule:
    """Compute, inside a loop of the consumer, only the tile which that step needs.

    before: `for i: t[i] = ...` then `for i_o: for i_i: y[i] = t[i]`
    after: `for i_o: (for i_i: t[i_i] = ...; for i_i: y[i] = t[i_i])`
    """
    return s.then("compute_at", stage, consumer, axis)


def inline(s: Schedule, stage: str) -> Schedule:
    """Compute a value where it is used and nowhere else.

    before: `t[i] = a[i] + b[i]`, `y[i] = relu(t[i])`   after: `y[i] = relu(a[i] + b[i])`
    """
    return s.then("inline", stage)


def double_buffer(s: Schedule, stage: str, depth: int = 2) -> Schedule:
    """Give a tile several slots (ping-pong): load the next while the last is used.

    before: `load x; use x; load x; ...`   after: `load x[0]; load x[1] | use x[0]; ...`
    """
    return s.then("double_buffer", stage, depth)


def bind(s: Schedule, stage: str, axis: str) -> Schedule:
    """Run the steps of a loop on different cores.

    before: `for i_o in 8: body(i_o)`   after: core c: `body(c)`
    """
    return s.then("bind", stage, axis)


def vectorise(s: Schedule, stage: str, axis: str) -> Schedule:
    """Replace a loop, and all inside it, by vector instructions and copies of whole tiles.

    before: `for i_i in 1024: y[i_i] = a[i_i] + b[i_i]`   after: `vadd y, a, b` with 8 repeats
    """
    return s.then("vectorise", stage, axis)


def tensorize(s: Schedule, stage: str, axis: str) -> Schedule:
    """Replace a loop, and all inside it, by one cube instruction.

    before: `for m: for n: for k: c[m, n] += a[m, k] * b[k, n]`   after: `mmad c, a, b`
    """
    return s.then("tensorize", stage, axis)


def storage_align(s: Schedule, stage: str, factor: int) -> Schedule:
    """Let every row of a tile in UB begin at a multiple of `factor` elements.

    before: row r of 100 elements at 112 * r   after storage_align(128): at 128 * r
    """
    return s.then("storage_align", stage, factor)


def rfactor(s: Schedule, stage: str, axis: str) -> Schedule:
    """Fold in two steps, so that the first can run on many cores.

    before: `y = sum over k_o, k_i`   after: `y_rf[p] = sum over k_i`, `y = sum over p of y_rf[p]`
    """
    return s.then("rfactor", stage, axis)
