"""Primitives that change loops: split, reorder, fuse. Each checks that it is legal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ascend_lab.dsl.stages import FRACTAL, Leaf, Stage, State, fresh, identity
from ascend_lab.dsl.tensor import Axis, Expr, Read, apply_index, rewrite
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import Affine, c0_of


def split(state: State, stage: str, axis: str, factor: int, tail: str) -> State:
    """Replace a loop by two: `axis_o` over parts, `axis_i` over the `factor` steps of a part."""
    s = state.stage(stage)
    leaf = s.loop(axis)
    check_free(state, s, leaf)
    if tail not in ("cut", "guard"):
        raise ScheduleError('split: tail "cut" or "guard"', repr(tail), "choose one")
    if not isinstance(factor, int) or not 1 <= factor <= leaf.extent:
        raise ScheduleError(
            f"split: a factor from 1 to {leaf.extent} for {stage}.{axis}", str(factor), "shrink it"
        )
    if tail == "guard" and leaf.reduce:
        raise ScheduleError(
            f'split: tail "cut" for the fold axis {axis}',
            "guard would fold some elements twice",
            'use tail="cut"',
        )
    outer = Leaf(
        f"{axis}_o",
        leaf.root,
        -(-leaf.extent // factor),
        leaf.width * factor,
        leaf.reduce,
        tail,
    )
    inner = replace(leaf, name=f"{axis}_i", extent=factor)
    at = s.position(axis)
    new = replace(s, loops=(*s.loops[:at], outer, inner, *s.loops[at + 1 :]))
    check_nest(state, new)
    return state.put(new)


def check_free(state: State, stage: Stage, leaf: Leaf) -> None:
    """Refuse to change a loop that something already hangs on."""
    here = (stage.name, leaf.name)
    guest = next((s.name for s in state.stages if getattr(s, "attach", None) == here), None)
    if guest is not None or leaf.name in stage.bound or leaf.name == stage.vector_at:
        why = f"{guest} is computed at it" if guest else "it is bound or vectorised"
        raise ScheduleError(f"a free loop {stage.name}.{leaf.name}", why, "do this step earlier")


def check_no_guests(state: State, stage: str, primitive: str) -> None:
    """Refuse to rebuild a nest in which other tiles are computed."""
    for s in state.stages:
        if isinstance(s, Stage) and s.attach and s.attach[0] == stage:
            raise ScheduleError(
                f"{primitive} {stage}: no tile computed in it", s.name, "do this step earlier"
            )


def reorder(state: State, stage: str, axes: Sequence[str]) -> State:
    """Put loops into a new order at the places they take together."""
    s = state.stage(stage)
    chosen = [s.loop(a) for a in axes]
    if len(set(axes)) < len(axes):
        raise ScheduleError(f"reorder {stage}: each loop once", str(tuple(axes)), "drop repeats")
    order = iter(chosen)
    loops = tuple(next(order) if leaf in chosen else leaf for leaf in s.loops)
    for place, leaf in enumerate(loops):
        finer = next(
            (x for x in loops[:place] if x.root == leaf.root and x.width < leaf.width), None
        )
        if finer is not None:
            raise ScheduleError(
                f"reorder {stage}: {leaf.name} outside {finer.name}",
                "the parts of one axis the other way round",
                "keep outer parts outside",
            )
    new = replace(s, loops=loops)
    check_nest(state, new)
    return state.put(new)


def check_nest(state: State, s: Stage) -> None:
    """Cores outermost, attached tiles in front of the vectorised part."""
    for place, name in enumerate(leaf.name for leaf in s.loops):
        if name in s.bound and any(x.name not in s.bound for x in s.loops[:place]):
            raise ScheduleError(
                f"{s.name}: loops bound to cores outermost", f"{name} inside", "reorder it first"
            )
    folds = [x.name for x in s.loops if x.reduce]
    for place, leaf in enumerate(s.loops):
        outside = [x for x in s.loops[:place] if x.name in folds]
        if s.fold and leaf.tail == "guard" and leaf.width > 1 and outside:
            raise ScheduleError(
                f"{s.name}: guarded loop {leaf.name} outside the fold loops",
                f"{outside[0].name} outside it: shared elements would be folded twice",
                'use tail="cut", or reorder',
            )
    if s.vector_at:
        inner = s.loops[s.position(s.vector_at) :]
        used = {
            x.attach[1]
            for x in state.stages
            if isinstance(x, Stage) and x.attach and x.attach[0] == s.name
        }
        bad = next((x.name for x in inner if x.name in used or x.name in s.bound), None)
        if bad is not None:
            raise ScheduleError(
                f"{s.name}: {bad} outside the vectorised loops", "inside", "vectorise further in"
            )


def fuse(state: State, stage: str, first: str, second: str) -> State:
    """Make one axis of two neighbours that lie contiguously in everything the stage touches."""
    s = state.stage(stage)
    a, b = s.loop(first), s.loop(second)
    if s.position(second) != s.position(first) + 1 or a.reduce != b.reduce:
        raise ScheduleError(
            f"fuse: {second} right inside {first}, both data or both fold loops",
            ", ".join(x.name for x in s.loops),
            "reorder first",
        )
    if a.root != first or b.root != second or a.width != 1 or b.width != 1:
        raise ScheduleError("fuse: two whole axes", f"{first}, {second}", "fuse before you split")
    check_free(state, s, a)
    check_free(state, s, b)
    group = s.reduce if a.reduce else s.axes
    names = [x.name for x in group]
    if names.index(second) != names.index(first) + 1:
        raise ScheduleError(
            f"fuse: neighbours of the tensor ({', '.join(names)})", f"{first}, {second}", "choose"
        )
    fused = f"{first}{second}"
    extent = a.extent * b.extent
    merge = _Merge(state, stage, first, second, b.extent, fused)
    expr = rewrite(s.expr, merge.element)
    axis = Axis(fused, extent, a.reduce)
    changed = _merged(group, names.index(first), axis)
    at = s.position(first)
    loops = (*s.loops[:at], Leaf(fused, fused, extent, 1, a.reduce), *s.loops[at + 2 :])
    key = "reduce" if a.reduce else "axes"
    fields: dict[str, tuple[Axis, ...]] = {key: changed}
    new = state.put(replace(s, expr=expr, loops=loops, **fields))  # type: ignore[arg-type]
    return new if a.reduce else _reindex(new, stage, names.index(first), b.extent)


def _merged(axes: tuple[Axis, ...], at: int, axis: Axis) -> tuple[Axis, ...]:
    return (*axes[:at], axis, *axes[at + 2 :])


class _Merge:
    """Rewrites the elements a stage reads so that first * size + second becomes one axis."""

    def __init__(
        self, state: State, stage: str, first: str, second: str, size: int, fused: str
    ) -> None:
        self.state, self.stage = state, stage
        self.first, self.second, self.size, self.fused = first, second, size, fused

    def element(self, element: Read) -> Expr:
        index, view = element.index, element.view or self.shape(element.source)
        a = next((d for d, i in enumerate(index) if self.first in dict(i.terms)), None)
        b = next((d for d, i in enumerate(index) if self.second in dict(i.terms)), None)
        if a is not None and b == a + 1 and self.may_merge(element.source):
            whole = index[a] * view[b] + index[b]
            index = (*index[:a], whole, *index[b + 1 :])
            view = (*view[:a], view[a] * view[b], *view[b + 1 :])
        merged = tuple(self.affine(i, element.source) for i in index)
        same = view == self.shape(element.source)
        return replace(element, index=merged, view=() if same else view)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.state.find(name).shape

    def may_merge(self, name: str) -> bool:
        entry = self.state.find(name)
        return getattr(entry, "scope", "GM") == "GM"

    def affine(self, index: Affine, source: str) -> Affine:
        terms = dict(index.terms)
        a, b = terms.pop(self.first, 0), terms.pop(self.second, 0)
        if a != b * self.size:
            raise ScheduleError(
                f"fuse {self.stage}: {self.first} and {self.second} contiguous in {source}",
                f"steps {a} and {b} for {self.size} elements",
                f"fuse the same axes of {source} first, or leave them apart",
            )
        if b:
            terms[self.fused] = b
        return Affine(index.const, tuple(sorted(terms.items())))


def _reindex(state: State, name: str, at: int, size: int) -> State:
    """Let the readers of a tensor use its fused axis."""
    shape = state.stage(name).shape

    def element(element: Read) -> Expr:
        if element.source != name:
            return element
        if element.view:
            return replace(element, view=()) if element.view == shape else element
        index = element.index
        whole = index[at] * size + index[at + 1]
        return replace(element, index=(*index[:at], whole, *index[at + 2 :]))

    stages = tuple(
        replace(s, expr=rewrite(s.expr, element)) if isinstance(s, Stage) else s
        for s in state.stages
    )
    return replace(state, stages=stages)


# Primitives that choose who works: bind, vectorise, tensorize, rfactor.


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
