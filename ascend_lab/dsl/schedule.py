"""Schedules: tensors plus a list of steps, each a frozen record that prints, stores and replays."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from inspect import BoundArguments, Parameter, Signature, signature
from typing import Any, Concatenate, ParamSpec

from ascend_lab.chip import Chip, load_chip
from ascend_lab.dsl.fractals import with_conversions
from ascend_lab.dsl.stages import State, initial_state
from ascend_lab.dsl.tensor import Tensor
from ascend_lab.errors import ScheduleError

P = ParamSpec("P")
POSITIONAL = Parameter.POSITIONAL_OR_KEYWORD
PRIMITIVES: dict[str, tuple[Callable[..., State], Signature]] = {}
"""Per primitive: the change of state, and the signature of the step behind its first argument."""


def primitive(
    change: Callable[Concatenate[State, P], State],
) -> Callable[Concatenate["Schedule", P], "Schedule"]:
    """Turn a change of state into a step of schedules that bears its name and arguments."""
    name, whole = change.__name__, signature(change)
    _, *own = whole.parameters.values()
    PRIMITIVES[name] = change, Signature(own)

    @wraps(change)
    def step(s: Schedule, /, *args: P.args, **kwargs: P.kwargs) -> Schedule:
        given = PRIMITIVES[name][1].bind(*args, **kwargs)
        given.apply_defaults()
        return s.then(name, *given.arguments.values())

    shown = [Parameter("s", POSITIONAL, annotation="Schedule"), *own]
    step.__signature__ = whole.replace(  # type: ignore[attr-defined]
        parameters=shown, return_annotation="Schedule"
    )
    return step


@cache
def _flat(name: str) -> Signature:
    """Return the signature of a primitive's arguments as steps list them, by position."""
    return Signature([Parameter(own, POSITIONAL) for own in PRIMITIVES[name][1].parameters])


@dataclass(frozen=True, slots=True)
class Step:
    """One primitive with its arguments, e.g. split(y, i, 128, cut)."""

    primitive: str
    arguments: tuple[Any, ...]

    def apply(self, state: State) -> State:
        """Return the state after this step."""
        change, own = PRIMITIVES[self.primitive]
        try:
            call = BoundArguments(own, _flat(self.primitive).bind(*self.arguments).arguments)
            return change(state, *call.args, **call.kwargs)
        except (TypeError, ValueError, AttributeError) as error:
            needed = f"{self.primitive}({', '.join(own.parameters)})"
            got = f"{self} ({error})"
            raise ScheduleError(needed, got, "give each argument its kind") from error

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

    def then(self, primitive: str, *arguments: Any) -> "Schedule":
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
        steps = [Step(str(row[0]), tuple(map(_frozen, row[1:]))) for row in rows]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ScheduleError("steps as JSON", str(error), "write them with to_json") from error
    for step in steps:
        if step.primitive not in PRIMITIVES:
            known, got = ", ".join(PRIMITIVES), repr(step.primitive)
            raise ScheduleError(f"a primitive ({known})", got, "check the name")
    return steps


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
