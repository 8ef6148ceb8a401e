"""Schedules: output tensors plus a list of steps, records that can be printed, stored and replayed.

A step is one primitive with its arguments: split(y, i, 128) makes two loops of the loop i of tensor
y. A stage is a tensor with its loops, its nest these loops with all that is computed inside them.
`complete` adds the tiles that a schedule leaves implicit: one in UB for every tensor that the
vector unit reads or writes.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from inspect import BoundArguments, Parameter, Signature, signature
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec

from ascend_lab.errors import ScheduleError
from ascend_lab.machine.chip import DTYPE_BYTES, Chip, load_chip
from ascend_lab.machine.isa import Affine, c0_of
from ascend_lab.operators.dsl.fractals import role_of, with_conversions
from ascend_lab.operators.dsl.stages import (
    Fixed,
    Input,
    Stage,
    State,
    copied_element,
    copy_of,
    identity,
    initial_state,
    loops_of_axes,
    redirect,
)
from ascend_lab.operators.dsl.tensor import Call, Expr, Read, Shape, Tensor, swap

Arguments = ParamSpec("Arguments")
POSITIONAL = Parameter.POSITIONAL_OR_KEYWORD
PRIMITIVES: dict[str, tuple[Callable[..., State], Signature]] = {}
"""Per primitive: the function that changes the state, and the signature of its other arguments."""


def primitive(
    change: Callable[Concatenate[State, Arguments], State],
) -> Callable[Concatenate["Schedule", Arguments], "Schedule"]:
    """Turn a function on states into a function on schedules that adds a step of the same name."""
    name = change.__name__
    # `split(state, stage, axis, factor)` becomes the step `split(s, stage, axis, factor)` of a
    # schedule.
    change_signature = signature(change)
    _, *parameters = change_signature.parameters.values()
    PRIMITIVES[name] = change, Signature(parameters)

    @wraps(change)
    def step(s: Schedule, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Schedule:
        call = PRIMITIVES[name][1].bind(*args, **kwargs)
        # Steps are stored complete, so that a changed default does not change an old schedule.
        call.apply_defaults()
        return s.then(name, *call.arguments.values())

    step_parameters = [Parameter("s", POSITIONAL, annotation="Schedule"), *parameters]
    step.__signature__ = change_signature.replace(  # type: ignore[attr-defined]
        parameters=step_parameters, return_annotation="Schedule"
    )
    return step


@cache
def _flat(name: str) -> Signature:
    """Return the signature of a primitive with all arguments positional, as steps store them."""
    return Signature([Parameter(key, POSITIONAL) for key in PRIMITIVES[name][1].parameters])


@dataclass(frozen=True, slots=True)
class Step:
    """One primitive with its arguments, e.g. split(y, i, 128, cut)."""

    primitive: str
    arguments: tuple[Any, ...]

    def apply(self, state: State) -> State:
        """Return the state after this step."""
        # `Step("split", ("y", "i", 128, "cut"))` calls split(state, "y", "i", 128, tail="cut").
        change, parameters = PRIMITIVES[self.primitive]
        try:
            call = BoundArguments(parameters, _flat(self.primitive).bind(*self.arguments).arguments)
            return change(state, *call.args, **call.kwargs)
        except (TypeError, ValueError, AttributeError) as error:
            needed = f"{self.primitive}({', '.join(parameters.parameters)})"
            got = f"{self} ({error})"
            raise ScheduleError(needed, got, "give each argument its kind") from error

    def __str__(self) -> str:
        """Print as the call that made it."""
        return f"{self.primitive}({', '.join(map(_show, self.arguments))})"


def _show(value: Any) -> str:
    return "(" + ", ".join(map(str, value)) + ")" if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, eq=False)
class Schedule:
    """Outputs, the chip, the steps so far, and the state to which these lead.

    Two schedules are equal if outputs, chip name and steps are equal.
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
        return Schedule(self.outputs, self.chip, (*self.steps, step), step.apply(self.state))

    def to_json(self) -> str:
        """Return the steps as JSON text."""
        rows = [[s.primitive, *s.arguments] for s in self.steps]
        return json.dumps({"chip": self.chip.name, "steps": rows})

    def __repr__(self) -> str:
        """Return one line per step."""
        head = f"Schedule of {', '.join(o.label for o in self.outputs)} for {self.chip.name}"
        return "\n".join([head, *(f"  {step}" for step in self.steps)])


def create_schedule(outputs: Tensor | Sequence[Tensor], chip: Chip | str) -> Schedule:
    """Return the empty schedule of one or several outputs: each stage is a separate nest in GM."""
    chip = load_chip(chip) if isinstance(chip, str) else chip
    tensors = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    return Schedule(tensors, chip, (), with_conversions(initial_state(tensors)))


def replay(outputs: Tensor | Sequence[Tensor], chip: Chip, steps: Sequence[Step] | str) -> Schedule:
    """Return the schedule that `steps` (records, or JSON from `Schedule.to_json`) build."""
    schedule = create_schedule(outputs, chip)
    # Each step checks again that it is legal: steps of another shape fail here and not in the
    # program.
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
            names = ", ".join(PRIMITIVES)
            got = repr(step.primitive)
            raise ScheduleError(f"a primitive ({names})", got, "check the name")
    return steps


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


# -- implicit loops and tiles ----------------------------------------------------------------------
def loop_count(state: State, stage: Stage) -> int:
    """Return how many loops of a stage become loops of the program, outside its instructions.

    All loops in front of `vector_at`. Without it, all up to the last one that is bound to cores,
    has a tile computed inside it, or takes several elements a step.
    """
    if stage.vector_at:
        return stage.position(stage.vector_at)
    # for i_o in 8: for i_i in 64: for j in 100, with a tile computed at i_o: i_o is a loop of the
    # program, i_i and j are one instruction over 64 x 100 elements.
    loops_with_tiles = {guest.attach[1] for guest in state.guests(stage.name) if guest.attach}
    count = 0
    for position, leaf in enumerate(stage.loops):
        if leaf.width > 1 or leaf.name in stage.bound or leaf.name in loops_with_tiles:
            count = position + 1
    return count


def members(state: State, root: str) -> list[str]:
    """Return the stages computed inside the nest of `root`, in order, the root last."""

    def inside(stage: Stage | Fixed) -> bool:
        if stage.name == root or isinstance(stage, Fixed):
            return stage.name == root
        if stage.attach is not None:
            return inside(state.stage(stage.attach[0]))
        return stage.scope != "GM" and any(map(inside, state.readers(stage.name)))

    return [s.name for s in state.stages if inside(s)]


def roots(state: State) -> list[Stage | Fixed]:
    """Return the stages that have their own phase (in GM, not attached), in order of execution.

    A phase runs after all phases whose tensors a stage of its nest reads: where y1 = g(t) is
    computed in the nest of y0 = f(x), the phase of y0 waits for that of t. Raises `ScheduleError`
    where phases wait for each other in a circle.
    """
    phases = [
        s for s in state.stages if isinstance(s, Fixed) or (s.scope == "GM" and s.attach is None)
    ]
    # A tensor computed in another's nest exists once that nest has run.
    members_of = {phase.name: members(state, phase.name) for phase in phases}
    phase_of = {name: phase for phase, names in members_of.items() for name in names}
    order: list[Stage | Fixed] = []
    waiting = list(phases)
    while waiting:  # the first phase whose inputs are all there runs next: a topological order
        finished = {phase.name for phase in order}
        for phase in waiting:
            sources = {
                source for name in members_of[phase.name] for source in state.find(name).sources
            }
            needed = {phase_of[source] for source in sources if source in phase_of} - {phase.name}
            if needed <= finished:
                break
        else:
            names = ", ".join(phase.name for phase in waiting)
            needed_order = "phases of which one can come first"
            raise ScheduleError(needed_order, f"{names} in a circle", "compute_at fewer of them")
        order.append(phase)
        waiting.remove(phase)
    return order


def moves_only(state: State, stage: Stage) -> bool:
    """True for an unscheduled stage that only moves elements between GM tensors."""
    unscheduled_copy = (
        stage.is_copy and stage.loops == loops_of_axes(stage.axes) and not stage.vector_at
    )
    return (
        unscheduled_copy
        and _in_gm(state, stage.sources[0])
        and members(state, stage.name) == [stage.name]
    )


def complete(state: State, root: str) -> State:
    """Return the stages of the phase of `root`, with every implicit tile made explicit.

    Tensors of other phases are inputs of this one.
    """
    names = members(state, root)
    outside = [s for s in state.stages if s.name not in names]
    outside_tensors = tuple(Input(s.name, s.dtype, s.shape) for s in outside)
    stages = tuple(s for s in state.stages if s.name in names)
    state = State((*state.inputs, *outside_tensors), stages)
    for name in members(state, root):
        stage = state.stage(name)
        if stage.scope != "GM" and stage.attach is None:
            state = state.put(replace(stage, attach=(root, "")))  # in front of the root's loops
    for name in members(state, root):
        stage = state.stage(name)
        # The vector unit computes in UB only, and readers in the nest take the tile, not GM.
        inside = {r.name for r in state.readers(name)} & set(members(state, root))
        if stage.scope == "GM" and not role_of(state, stage) and (inside or not stage.is_copy):
            state = _compute_in_tile(state, stage, root)
    for name in members(state, root):
        stage = state.stage(name)
        loads = stage.scope == "UB" and stage.is_copy and _in_gm(state, stage.sources[0])
        if stage.scope in ("UB", "GM") and not loads:
            state = _load_through_tiles(state, stage)
    return _align_rows_to_one_unit(state)


def _align_rows_to_one_unit(state: State) -> State:
    """Round rows of all tiles in UB up to one number of elements, whatever their format.

    A block of 32 bytes holds 16 elements in fp16 and 8 in fp32. With rows of 20 elements, both
    tiles get rows of 32 (24 would do in fp32), so an instruction over whole rows fits both.
    """
    in_ub = [s for s in state.stages if isinstance(s, Stage) and s.scope == "UB"]
    tiles = [s for s in in_ub if not role_of(state, s) and DTYPE_BYTES[s.dtype] > 1]
    unit = max((c0_of(s.dtype) for s in tiles), default=1)
    if not any(tile.shape[-1] % unit for tile in tiles):
        return state
    for tile in tiles:
        state = state.put(replace(tile, align=math.lcm(tile.align, unit)))
    return state


def _in_gm(state: State, name: str) -> bool:
    return state.find(name).scope == "GM"


def _compute_in_tile(state: State, stage: Stage, root: str) -> State:
    """Split an output into a tile in UB that is computed and a stage that copies it to GM."""
    count = loop_count(state, stage)
    inside = [n for n in members(state, root) if stage.name in state.stage(n).sources]
    if stage.attach and count and inside:
        raise ScheduleError(
            f"{stage.name}: an attached output without loops of its own, as others read its tile",
            ", ".join(x.name for x in stage.loops[:count]),
            f"split {stage.attach[0]} instead",
        )
    # Loops from the first fold loop on belong to the tile: sums are stored once, after the fold.
    # for i_o: for k_o (fold): the store comes after the loop k_o, inside i_o.
    first_fold = next((n for n, x in enumerate(stage.loops[:count]) if x.reduce), count)
    outer_loops = stage.loops[:first_fold]
    inner_loops = stage.loops[first_fold:]
    innermost_outer = (stage.name, outer_loops[-1].name if outer_loops else "")
    tile_vector_at = inner_loops[0].name if inner_loops and stage.vector_at else ""
    # y = f(x) becomes y_ub = f(x) in UB, with the inner loops, and a copy of y_ub to y.
    local = replace(
        stage,
        name=state.new_name(f"{stage.name}_ub"),
        scope="UB",
        output=False,
        attach=innermost_outer if outer_loops or stage.attach is None else stage.attach,
        loops=inner_loops,
        bound=(),
        vector_at=stage.vector_at if first_fold < count else tile_vector_at,
    )
    inner_names = [x.name for x in inner_loops]
    guests = state.guests(stage.name, *inner_names) if inner_names else ()
    for guest in guests:
        loop = guest.attach[1] if guest.attach else ""
        state = state.put(replace(guest, attach=(local.name, loop)))
    copy = Call("vcopy", (Read(local.name, stage.dtype, identity(stage.axes)),), stage.dtype)
    tile_loops = tuple(replace(x, name=f"{x.name}_tile") for x in loops_of_axes(stage.axes))
    loops = (*outer_loops, *tile_loops)
    vector_at = tile_loops[0].name
    store = replace(stage, expr=copy, fold="", reduce=(), loops=loops, vector_at=vector_at)
    state = state.put(store).insert(local, before=stage.name)
    for name in inside:
        state = state.put(redirect(state.stage(name), stage.name, local.name))
    return state


def _load_through_tiles(state: State, stage: Stage) -> State:
    """Replace each read of a GM tensor by the read of a tile in UB that is loaded from it."""
    loops = stage.loops[: loop_count(state, stage)]
    attach = (stage.name, loops[-1].name) if loops else stage.attach or (stage.name, "")
    extents = {a.name: a.extent for a in (*stage.axes, *stage.reduce)}
    for gm_read in dict.fromkeys(stage.reads):
        if not _in_gm(state, gm_read.source):
            continue
        read = _axes_apart(gm_read, gm_read.view or state.find(gm_read.source).shape, extents)
        # x[i, j] + x[i, j] * y[i, j] loads x once.
        tile = next((t for t in state.stages if _serves(state, stage, t, read, attach)), None)
        if tile is None:
            name = state.new_name(f"{read.source}_ub")
            # The tile is loaded in the innermost loop, where the least of it is needed at a time.
            load = copy_of(name, state.find(read.source), read.view)
            tile = replace(load, attach=attach, depth=stage.depth)
            state = state.insert(tile, before=stage.name)
        tile_read = Read(tile.name, read.format, read.index)
        stage = replace(stage, expr=swap(stage.expr, gm_read, tile_read))
        state = state.put(stage)
    return state


def _serves(
    state: State, stage: Stage, tile: Stage | Fixed, read: Read, attach: tuple[str, str]
) -> bool:
    """True if a tile that is already loaded can serve the read of `stage`.

    The tile must copy the same tensor in the same loop, for readers on the same pipe (MTE3 stores,
    the vector unit computes), and other reads of it must move in the same steps. x[i, j + 1] needs
    a second tile beside x[i, j]: only there do its rows begin at a block.
    """
    if not isinstance(tile, Stage) or tile.attach != attach or tile.scope != "UB":
        return False
    tile_source = copied_element(tile.expr) if tile.is_copy else None
    if tile_source is None or (tile_source.source, tile_source.view) != (read.source, read.view):
        return False
    are_stores = {r.scope == "GM" for r in state.readers(tile.name)}
    movements = {_movement(r) for r in stage.reads if r.source == tile.name}
    return are_stores <= {stage.scope == "GM"} and movements <= {_movement(read)}


def _movement(read: Read) -> tuple[object, ...]:
    """Return how an index moves with the axes, and at which element of a row it starts."""
    return (*(i.terms for i in read.index), read.index[-1].const)


def _axes_apart(read: Read, shape: Shape, extents: Mapping[str, int]) -> Read:
    """Give every axis of a mixed index a separate dimension, so that rows can be aligned.

    x[8 i + j] with j < 8 and 32 elements becomes x[i, j] in a view of shape (4, 8).
    """
    index: list[Affine] = []
    view: list[int] = []
    for entry, size in zip(read.index, shape, strict=True):
        terms = sorted(entry.terms, key=lambda t: -t[1])
        # x[800 i + 8 j + k] of 6,400 elements, j < 100, k < 8: strides 800, 8, 1, the view (8, 100,
        # 8).
        strides = [c for _, c in terms]
        # 8 i + j: the step of i, 8, must be a multiple of that of j, and j must stay below it.
        inner = zip(terms[1:], strides, strict=False)
        nested = all(step % c == 0 and extents[name] * c <= step for (name, c), step in inner)
        if len(terms) < 2 or entry.const or strides[-1] != 1 or not nested or size % strides[0]:
            index.append(entry)
            view.append(size)
            continue
        index += [Affine(0, ((name, 1),)) for name, _ in terms]
        view += [size // strides[0], *(a // b for a, b in pairwise(strides))]
    unchanged = tuple(view) == tuple(shape)
    return read if unchanged else replace(read, index=tuple(index), view=tuple(view))


# -- nests as text --------------------------------------------------------------------------------
def show(schedule: Schedule, *, tiles: bool = True) -> str:
    """Return the loop nests as text; with `tiles`, also those that `complete` adds."""
    lines: list[str] = []
    for number, stage in enumerate(roots(schedule.state)):
        lines.append(f"phase {number + 1}: {stage.name} {tuple(stage.shape)} {stage.dtype}")
        if isinstance(stage, Fixed):
            lines.append(f"  {stage.kind}({', '.join(stage.sources)}), a hand-written kernel")
            continue
        state = complete(schedule.state, stage.name) if tiles else schedule.state
        lines += _nest(state, state.stage(stage.name), "  ")
    return "\n".join(lines)


def _nest(state: State, stage: Stage, indent: str) -> list[str]:
    """Return the lines of one stage: its loops, the stages inside them, then its own statement."""
    loops = stage.loops[: loop_count(state, stage)]
    lines: list[str] = []
    for leaf in loops:
        if leaf.name in stage.bound:
            lines.append(f"{indent}cores {leaf.name} in {leaf.extent}:")
            indent += "  "
    for guest in state.guests(stage.name, "", *stage.bound):
        lines += _guest(state, guest, indent)
    for leaf in loops:
        if leaf.name not in stage.bound:
            tail_mark = " guard" if leaf.tail == "guard" and leaf.width > 1 else ""
            fold_mark = " (fold)" if leaf.reduce else ""
            lines.append(f"{indent}for {leaf.name} in {leaf.extent}{tail_mark}:{fold_mark}")
            indent += "  "
            for guest in state.guests(stage.name, leaf.name):
                lines += _guest(state, guest, indent)
    fold_text = (
        f"{stage.fold} over {', '.join(a.name for a in stage.reduce)} of " if stage.fold else ""
    )
    index = ", ".join(a.name for a in stage.axes)
    return [*lines, f"{indent}{stage.name}[{index}] = {fold_text}{_text(stage.expr)}"]


def _guest(state: State, stage: Stage, indent: str) -> list[str]:
    slots = f", {stage.depth} slots" if stage.depth > 1 else ""
    scope_text = "" if stage.scope == "GM" else f"   # tile in {stage.scope}{slots}"
    lines = _nest(state, stage, indent)
    lines[0 if loop_count(state, stage) else -1] += scope_text
    return lines


def _text(expr: Expr) -> str:
    """Return an expression without copies and modes, e.g. vadd(a[i, j], b[j])."""
    if not isinstance(expr, Call):
        return str(expr)
    if expr.op == "vcopy" and isinstance(expr.args[0], Read):
        return str(expr.args[0])
    scalars = [f"{expr.number:g}"] if expr.number is not None else []
    scalars += [expr.format] if expr.op == "vconv" else []
    return f"{expr.op}({', '.join([*map(_text, expr.args), *scalars])})"
