"""Primitives that change loops: split, reorder, fuse. Each checks that it is legal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ascend_lab.dsl.expr import Expr, Read, rewrite
from ascend_lab.dsl.stages import (
    Leaf,
    Stage,
    State,
)
from ascend_lab.dsl.tensor import Axis
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import Affine


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
