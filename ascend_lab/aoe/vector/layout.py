"""The layout of a loop nest: how its axes are divided into shares and tiles, and what it needs.

A nest is the loops in which one or more stages of a vector operator are computed together. A
layout needs on-chip memory (UB) and event ids of a core.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ascend_lab.machine.chip import Chip
from ascend_lab.operators import dsl as steps
from ascend_lab.operators.dsl import auto_fuse, auto_tile, boxes, schedule
from ascend_lab.operators.dsl.stages import Stage, State


@dataclass(frozen=True, slots=True)
class Layout:
    """The numbers that describe how a nest's axes are divided.

    - cuts: for each axis that is divided, (axis, elements per core, elements of a tile)
    - folds: (stage.axis, width) of the reductions that are computed in parts of `width` elements
    - depth: the number of slots of every tile that is loaded or stored
    - guard: the axis whose last tile is moved back so that it is whole, or ""
    """

    cuts: tuple[tuple[str, int, int], ...]
    folds: tuple[tuple[str, int], ...] = ()
    depth: int = 2
    guard: str = ""

    def sizes(self, extents: Mapping[str, int]) -> tuple[int, ...]:
        """Return the numbers with which bytes in UB grow: widths of axes and folds, and slots."""
        folds = {**extents, **dict(self.folds)}
        return (*(width for _, _, width in self.cuts), *folds.values(), self.depth)


@dataclass(frozen=True, slots=True)
class Nest:
    """Stages that are computed in one loop nest, and the axes of its root that may be cut."""

    phase: auto_fuse.Phase
    rows: tuple[str, ...]


def lay(s: schedule.Schedule, nest: Nest, layout: Layout) -> schedule.Schedule:
    """Return the schedule with a layout for one more nest; raise `ScheduleError` if impossible."""
    phase = nest.phase
    bound = []
    loops = []
    tiles = []
    name = phase.root
    extents = {a.name: a.extent for a in s.state.stage(name).axes}
    # 4,096 rows, shares of 512, tiles of 64: split by 512 (i_o: 8 cores), then by 64 (i_i_o: 8
    # tiles).
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
    s, inner, fold_leaves = auto_tile.fold_loops(s, name, s.state.stage(name).reduce, folds)
    s = steps.reorder(s, name, *bound, *loops, *inner, *tiles, *fold_leaves)
    for loop in bound:
        s = steps.bind(s, name, loop)
    s = steps.vectorise(s, name, tiles[0])
    # Tiles of the nest are computed in its innermost loop in front of the vector instructions.
    if phase.tiles or phase.outputs:
        s = auto_tile.attach_tiles(s, phase, [*bound, *loops], folds, layout.depth)
    for stage_name in (name, *phase.outputs):
        s = steps.double_buffer(s, stage_name, layout.depth)
    return s


def read_layout(state: State, phase: auto_fuse.Phase) -> Layout:
    """Return the layout of a nest that has one already: the inverse of `lay`."""
    root = state.stage(phase.root)
    cuts = []
    for axis in root.axes:
        outer = [x for x in root.loops if x.root == axis.name]
        share = next((x.width for x in outer if x.name in root.bound), axis.extent)
        # the last loop over parts of an axis gives the width of a tile
        widths = [x.width for x in outer[:-1] if x.name not in root.bound]
        cuts.append((axis.name, share, min([share, *widths[-1:]])))
    folds = []
    for stage in (state.stage(n) for n in (*phase.tiles, phase.root)):
        for fold in stage.reduce if stage.fold else ():
            leaves = [x for x in stage.loops if x.root == fold.name]
            if len(leaves) > 1:
                folds.append((f"{stage.name}.{fold.name}", leaves[0].width))
    return Layout(tuple(cuts), tuple(folds), root.depth)


# -- estimates of the memory and queues of a nest, before its program is written -------------------


def nest_needs(laid: State, root: str, chip: Chip) -> tuple[int, int, int]:
    """Return (bytes of UB with one slot per tile, bytes of every further slot, queues)."""
    done = schedule.complete(laid, root)
    sizes = []
    # Bytes grow linearly with the slots: two points give the slope.
    for depth in (1, 2):
        stages = (replace(s, depth=depth) if isinstance(s, Stage) else s for s in done.stages)
        sizes.append(boxes.ub_bytes(replace(done, stages=tuple(stages)), root, chip))
    return sizes[0], sizes[1] - sizes[0], queues(done)


def queues(done: State) -> int:
    """Return the largest number of queues between two pipes in a nest; a queue per filled tile."""
    places: dict[tuple[bool, bool], set[object]] = {}
    for stage in done.stages:
        if isinstance(stage, Stage) and stage.scope == "UB":
            source = done.find(stage.sources[0]) if stage.sources else None
            loaded = stage.is_copy and getattr(source, "scope", "GM") == "GM"
            stored = any(getattr(r, "scope", "GM") == "GM" for r in done.readers(stage.name))
            if loaded or stored:
                places.setdefault((loaded, stored), set()).add(stage.attach)
    return max(map(len, places.values()), default=0)
