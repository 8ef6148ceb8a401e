"""How one nest is laid out: what a core takes, how wide its tiles are, how many slots they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ascend_lab.dsl import schedule as steps
from ascend_lab.dsl.auto_fuse import Phase
from ascend_lab.dsl.auto_tile import attach_tiles, fold_loops
from ascend_lab.dsl.schedule import Schedule
from ascend_lab.dsl.stages import Leaf, Stage, State


@dataclass(frozen=True, slots=True)
class Layout:
    """Numbers of a nest.

    `cuts`: (axis, elements a core takes, elements of a tile); `folds`: (stage.axis, width) of the
    folds walked in parts; `depth`: slots of every tile that is loaded or stored; `guard`: the axis
    whose last tile is moved back so that it is whole, or nothing.
    """

    cuts: tuple[tuple[str, int, int], ...]
    folds: tuple[tuple[str, int], ...] = ()
    depth: int = 2
    guard: str = ""

    def sizes(self, extents: Mapping[str, int]) -> tuple[int, ...]:
        """Return what the bytes grow with: widths of axes and folds of `extents`, and slots."""
        folds = {**extents, **dict(self.folds)}
        return (*(width for _, _, width in self.cuts), *folds.values(), self.depth)


@dataclass(frozen=True, slots=True)
class Nest:
    """Stages computed in one nest, and the axes of its root that may be cut."""

    phase: Phase
    rows: tuple[str, ...]


def lay(s: Schedule, nest: Nest, layout: Layout) -> Schedule:
    """Return the schedule with one more nest laid out.

    Raises `ScheduleError` for numbers that no nest can have.
    """
    phase, bound, loops, tiles = nest.phase, [], [], []
    name = phase.root
    extents = {a.name: a.extent for a in s.state.stage(name).axes}
    for axis, share, width in layout.cuts:
        leaf = axis
        if share < extents[axis]:
            s = steps.split(s, name, leaf, share)
            bound.append(f"{leaf}_o")
            leaf = f"{leaf}_i"
        if width < share or (width == 1 and axis in nest.rows):
            tail = "guard" if axis == layout.guard else "cut"
            s = steps.split(s, name, leaf, width, tail=tail)
            loops.append(f"{leaf}_o")
            leaf = f"{leaf}_i"
        tiles.append(leaf)
    folds = dict(layout.folds)
    s, inner, rest = fold_loops(s, name, folds)
    s = steps.reorder(s, name, *bound, *loops, *inner, *tiles, *rest)
    for loop in bound:
        s = steps.bind(s, name, loop)
    s = steps.vectorise(s, name, tiles[0])
    if phase.tiles or phase.outputs:
        s = attach_tiles(s, phase, [*bound, *loops], folds, layout.depth)
    for each in (name, *phase.outputs):
        s = steps.double_buffer(s, each, layout.depth)
    return s


def read_layout(state: State, phase: Phase) -> Layout:
    """Return the numbers of a nest that is laid out already: the inverse of `lay`."""
    root = state.stage(phase.root)
    cuts = []
    for axis in root.axes:
        outer = [x for x in root.loops if x.root == axis.name]
        share = next((x.width for x in outer if x.name in root.bound), axis.extent)
        cuts.append((axis.name, share, min(share, _inner(outer, root.bound, share))))
    folded = [state.stage(n) for n in (*phase.tiles, phase.root)]
    folds = [f for stage in folded if stage.fold for f in _folds(stage)]
    return Layout(tuple(cuts), tuple(folds), root.depth)


def _inner(leaves: Sequence[Leaf], bound: Sequence[str], share: int) -> int:
    """Return the width of a tile: the last loop over parts of an axis says it."""
    widths = [x.width for x in leaves[:-1] if x.name not in bound]
    return widths[-1] if widths else share


def _folds(stage: Stage) -> list[tuple[str, int]]:
    found = []
    for axis in stage.reduce:
        leaves = [x for x in stage.loops if x.root == axis.name]
        if len(leaves) > 1:
            found.append((f"{stage.name}.{axis.name}", leaves[0].width))
    return found
