"""From a schedule to a kernel: one phase per nest, one program per kind of core."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from ascend_lab.chip import Chip
from ascend_lab.dsl.boxes import Box, Range, whole
from ascend_lab.dsl.complete import complete, members, moves_only, roots
from ascend_lab.dsl.handwritten import copied, handwritten
from ascend_lab.dsl.matrices import Matrix, matrix_of, stored_elements
from ascend_lab.dsl.nest import Nest
from ascend_lab.dsl.schedule import Schedule
from ascend_lab.dsl.stages import Fixed, Leaf, Stage, State
from ascend_lab.errors import AlignmentError, ScheduleError
from ascend_lab.isa import Kernel, Launch, Part, binding_of, var


@dataclass(frozen=True, slots=True)
class Share:
    """Which steps of a bound loop a kind of core takes: first step, how many, elements of each."""

    leaf: Leaf
    first: int
    count: int
    elements: int


def lower(schedule: Schedule) -> Kernel:
    """Return the kernel of a schedule on its chip, one phase per stage that is kept in GM.

    Raises `ScheduleError` for nests that cannot be written, `CapacityError` for tiles that do not
    fit, both with the numbers.
    """
    state, chip = schedule.state, schedule.chip
    phases: list[Launch] = []
    tensors = stored(state)
    for stage in roots(state):
        phases += _launches(state, stage, chip, tensors)
    return Kernel(schedule.outputs[0].label, tuple(phases))


def lower_stage(schedule: Schedule, name: str) -> tuple[Launch, ...]:
    """Return the launches of one stage; none if it is computed inside another nest."""
    state = schedule.state
    stage = next((s for s in roots(state) if s.name == name), None)
    return _launches(state, stage, schedule.chip, stored(state)) if stage else ()


def _launches(
    state: State, stage: Stage | Fixed, chip: Chip, tensors: dict[str, int]
) -> tuple[Launch, ...]:
    if isinstance(stage, Fixed):
        return handwritten(state, stage, chip)
    if moves_only(state, stage):
        return (copied(state, stage, chip),)
    try:
        return (_phase(complete(state, stage.name), stage.name, chip, tensors),)
    except AlignmentError as error:
        raise ScheduleError(
            f"{stage.name}: tiles that begin at 32-byte blocks ({error.needed})",
            error.got,
            "split by multiples of 16 elements, or vectorise a loop further out",
        ) from error


def stored(state: State) -> dict[str, int]:
    """Return the elements every GM tensor takes; operands of the cube are stored in fractals."""
    sizes = {e.name: math.prod(e.shape) for e in (*state.inputs, *state.stages)}
    for name, matrix in matrices(state).items():
        sizes[name] = stored_elements(state.find(name).shape, matrix)
    return sizes


def matrices(state: State) -> dict[str, Matrix]:
    """Return the GM tensors that are kept in fractal layout, and how."""
    found: dict[str, Matrix] = {}
    for cube in state.stages:
        if not isinstance(cube, Stage) or not cube.is_cube:
            continue
        for read, role in zip(cube.reads, "AB", strict=True):
            found[_origin(state, read.source)] = matrix_of(cube, role)
        out: Stage = cube
        while out.scope != "GM":
            below = state.readers(out.name)[0]
            assert isinstance(below, Stage)
            out = below
        found[out.name] = matrix_of(cube, "C")
    for stage in state.stages:
        if isinstance(stage, Fixed) and stage.kind == "to_fractal":
            found[stage.name] = dict(stage.attrs)["matrix"]
    return found


def _origin(state: State, name: str) -> str:
    """Return the GM tensor behind on-chip copies."""
    while getattr(state.find(name), "scope", "GM") != "GM":
        name = state.stage(name).sources[0]
    return name


def _phase(state: State, root: str, chip: Chip, tensors: dict[str, int]) -> Launch:
    """Return the launch of one nest: cores with full shares, then those with a rest."""
    stage = state.stage(root)
    shares = [_shares(stage, leaf) for leaf in stage.loops if leaf.name in stage.bound]
    used = math.prod(sum(x.count for x in share) for share in shares)
    there = _cores(state, stage, chip)
    if used > there:
        raise ScheduleError(
            f"{root}: bound loops of at most {there} steps, one per core of {chip.name}",
            str(used),
            "split with a larger factor before bind",
        )
    parts = []
    for chosen in product(*shares):
        nest = Nest(state, root, chip, tensors)
        box = _own_box(nest, stage, chosen)
        nest.run(stage, box)
        bindings = _bindings(chosen)
        parts.append(Part(nest.builder.finish(), bindings))
    return Launch(root, tuple(parts))


def _cores(state: State, stage: Stage, chip: Chip) -> int:
    cube = any(s.is_cube for s in map(state.stage, members(state, stage.name)))
    return chip.core_count * (1 if cube else chip.vector_cores_per_core)


def _shares(stage: Stage, leaf: Leaf) -> list[Share]:
    extent = next(a.extent for a in stage.axes if a.name == leaf.root)
    coarser = [x for x in stage.loops if x.root == leaf.root and x.width > leaf.width]
    if coarser:
        raise ScheduleError(
            f"bind {stage.name}.{leaf.name}: the outermost part of {leaf.root}",
            f"{coarser[0].name} is outside",
            "bind that one",
        )
    full, rest = divmod(extent, leaf.width)
    found = [Share(leaf, 0, full, leaf.width)] if full else []
    if rest:
        found.append(Share(leaf, full, 1, rest))
    return found


def _own_box(nest: Nest, stage: Stage, chosen: tuple[Share, ...]) -> Box:
    box = whole(stage)
    for share in chosen:
        leaf = share.leaf
        nest.builder.param(leaf.name, share.first + share.count)
        box[leaf.root] = Range(var(leaf.name) * leaf.width, share.elements)
    return box


def _bindings(chosen: tuple[Share, ...]) -> tuple[tuple[tuple[str, int], ...], ...]:
    steps = [range(s.first, s.first + s.count) for s in chosen]
    names = [s.leaf.name for s in chosen]
    return tuple(binding_of(dict(zip(names, values, strict=True))) for values in product(*steps))
