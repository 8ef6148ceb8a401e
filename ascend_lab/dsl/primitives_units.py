"""Primitives that choose who works: bind, vectorise, tensorize, rfactor."""

from __future__ import annotations

from dataclasses import replace

from ascend_lab.dsl.expr import Read
from ascend_lab.dsl.primitives_loops import check_nest, check_no_guests
from ascend_lab.dsl.stages import (
    FRACTAL,
    Leaf,
    Stage,
    State,
    fresh,
    identity,
)
from ascend_lab.dsl.tensor import Axis, apply_index
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import Affine, c0_of


def bind(state: State, stage: str, axis: str) -> State:
    """Spread the steps of a loop over the cores: core c runs step c."""
    s = state.stage(stage)
    leaf = s.loop(axis)
    if leaf.reduce:
        raise ScheduleError(
            f"bind {stage}: a data loop",
            f"{axis}, which is folded: every core would hold a part of the sum",
            "make the parts a tensor with rfactor, and fold it in a second step",
        )
    if axis in s.bound:
        raise ScheduleError(f"bind {stage}: a loop not bound yet", axis, "bind each loop once")
    if s.attach is not None:
        raise ScheduleError(
            "bind: a stage with a nest of its own",
            f"{stage} is attached",
            "bind the stage it is attached to",
        )
    if leaf.tail == "guard" and leaf.width > 1:
        raise ScheduleError(
            f'bind {stage}.{axis}: a loop split with tail="cut"',
            "guard: two cores would write the elements they share",
            'use tail="cut"',
        )
    new = replace(s, bound=(*s.bound, axis))
    check_nest(state, new)
    return state.put(new)


def vectorise(state: State, stage: str, axis: str) -> State:
    """Do a loop and everything inside it by instructions on whole tiles."""
    s = state.stage(stage)
    s.loop(axis)
    if s.is_cube:
        raise ScheduleError(f"vectorise {stage}: a vector stage", "a cube stage", "use tensorize")
    new = replace(s, vector_at=axis)
    check_nest(state, new)
    return state.put(new)


def tensorize(state: State, stage: str, axis: str) -> State:
    """Do a loop and everything inside it by one mmad: tiles of whole fractals."""
    s = state.stage(stage)
    if not s.is_cube or s.scope != "L0C":
        what = "a vector stage" if not s.is_cube else f"one in {s.scope}"
        raise ScheduleError(
            f"tensorize {stage}: a sum of products in L0C", what, 'cache_write it to "L0C" first'
        )
    inner = s.loops[s.position(axis) :]
    units = {a.name: FRACTAL for a in s.axes if a.name in ("m", "n")}
    units |= {a.name: c0_of(s.reads[0].dtype) for a in s.reduce}
    for name, unit in units.items():
        sizes = [x.extent * x.width for x in inner if x.root == name]
        if not sizes or max(sizes) % unit:
            raise ScheduleError(
                f"tensorize {stage}: {name} in multiples of {unit} inside {axis}",
                str(max(sizes, default=1)),
                f"split {name} by a multiple of {unit}",
            )
    if any(x.root not in units for x in inner):
        raise ScheduleError(
            f"tensorize {stage}: only m, n and k inside {axis}", "a batch", "reorder"
        )
    new = replace(s, vector_at=axis, tensorized=True)
    check_nest(state, new)
    return state.put(new)


def rfactor(state: State, stage: str, axis: str) -> State:
    """Fold in two steps: a new stage holds one partial result per step of `axis`.

    The loop `axis` (the outer part of a split fold axis) becomes a data axis of `stage_rf`.
    """
    s = state.stage(stage)
    check_no_guests(state, stage, "rfactor")
    leaf = s.loop(axis)
    whole = next((a for a in s.reduce if a.name == leaf.root), None)
    if whole is None or not s.fold or s.is_cube:
        raise ScheduleError(f"rfactor {stage}: a loop of a fold", axis, "split a fold axis first")
    if leaf.width == 1 or whole.extent % leaf.width or len(_parts(s, leaf.root)) != 2:
        raise ScheduleError(
            f"rfactor {stage}: {leaf.root} split once, by a divisor of {whole.extent}",
            f"parts of {leaf.width}",
            "choose a factor that divides it",
        )
    taken = {a.name for a in (*s.axes, *s.reduce)}
    label = next(n for n in ("p", *(f"p{d}" for d in range(2, 99))) if n not in taken)
    part, rest = Axis(label, whole.extent // leaf.width), Axis(whole.name, leaf.width, True)
    index = Affine(0, ((label, leaf.width), (whole.name, 1)))
    inner = tuple(rest if a is whole else a for a in s.reduce)
    name = state.new_name(f"{stage}_rf")
    table = {whole.name: index} | {a.name: Affine(0, ((a.name, 1),)) for a in s.axes}
    expr = apply_index(s.expr, table)
    axes = (part, *s.axes)
    partial = Stage(name, s.dtype, axes, expr, s.fold, inner, fresh(axes, inner))
    again = Axis(label, part.extent, True)
    read = Read(name, s.dtype, (Affine(0, ((label, 1),)), *identity(s.axes)))
    last = replace(s, expr=read, reduce=(again,), loops=fresh(s.axes, (again,)))
    return state.put(last).insert(partial, before=stage)


def _parts(stage: Stage, root: str) -> list[Leaf]:
    return [leaf for leaf in stage.loops if leaf.root == root]
