"""The layout of a loop nest: how its axes are divided into shares and tiles, and what it needs.

A nest is the loops in which one or more stages of a vector operator are computed together. Its
4,096 rows may be divided into shares of 512, one a core, and a share into tiles of 64 rows, which
are loaded, computed and stored one after another. A layout needs on-chip memory (UB), and queues
between the pipes of a core.
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


def lay_out(s: schedule.Schedule, nest: Nest, layout: Layout) -> schedule.Schedule:
    """Return the schedule with a layout for one more nest; raise `ScheduleError` if impossible."""
    phase = nest.phase
    core_loops = []
    tile_loops = []
    leaves = []
    name = phase.root
    extents = {a.name: a.extent for a in s.state.stage(name).axes}
    # 4,096 rows, shares of 512, tiles of 64: split by 512 (i_o: 8 cores), then by 64 (i_i_o: 8
    # tiles).
    for axis, share, width in layout.cuts:
        leaf = axis
        if share < extents[axis]:
            s = steps.split(s, name, leaf, share)
            core_loops.append(f"{leaf}_o")
            leaf = f"{leaf}_i"
        if width < share or (width == 1 and axis in nest.rows):
            tail = "guard" if axis == layout.guard else "cut"
            s = steps.split(s, name, leaf, width, tail=tail)
            tile_loops.append(f"{leaf}_o")
            leaf = f"{leaf}_i"
        leaves.append(leaf)
    folds = dict(layout.folds)
    s, fold_loops, fold_leaves = auto_tile.fold_loops(s, name, s.state.stage(name).reduce, folds)
    s = steps.reorder(s, name, *core_loops, *tile_loops, *fold_loops, *leaves, *fold_leaves)
    for loop in core_loops:
        s = steps.bind(s, name, loop)
    s = steps.vectorise(s, name, leaves[0])
    # Tiles of the nest are computed in its innermost loop in front of the vector instructions.
    if phase.tiles or phase.outputs:
        s = auto_tile.attach_tiles(s, phase, [*core_loops, *tile_loops], folds, layout.depth)
    for stage_name in (name, *phase.outputs):
        s = steps.double_buffer(s, stage_name, layout.depth)
    return s


def read_layout(state: State, phase: auto_fuse.Phase) -> Layout:
    """Return the layout of a nest that has one already: the inverse of `lay_out`."""
    root = state.stage(phase.root)
    cuts = []
    for axis in root.axes:
        # i_o over the cores, i_i_o over tiles, i_i_i inside a tile: the loops of axis i
        loops = [loop for loop in root.loops if loop.root == axis.name]
        core_shares = [loop.width for loop in loops if loop.name in root.bound]
        share = core_shares[0] if core_shares else axis.extent
        tile_widths = [loop.width for loop in loops[:-1] if loop.name not in root.bound]
        width = min(share, tile_widths[-1]) if tile_widths else share
        cuts.append((axis.name, share, width))
    folds = []
    for name in (*phase.tiles, phase.root):
        stage = state.stage(name)
        for axis in stage.reduce if stage.fold else ():
            loops = [loop for loop in stage.loops if loop.root == axis.name]
            if len(loops) > 1:
                folds.append((f"{name}.{axis.name}", loops[0].width))
    return Layout(tuple(cuts), tuple(folds), root.depth)


# -- estimates of the memory and queues of a nest, before its program is written -------------------


def nest_needs(state: State, root: str, chip: Chip) -> tuple[int, int, int]:
    """Return (bytes of UB with one slot per tile, bytes of every further slot, queues)."""
    completed = schedule.complete(state, root)
    ub_bytes = []
    # Bytes grow linearly with the slots: two points give the slope.
    for depth in (1, 2):
        stages = (replace(s, depth=depth) if isinstance(s, Stage) else s for s in completed.stages)
        ub_bytes.append(boxes.ub_bytes(replace(completed, stages=tuple(stages)), root, chip))
    return ub_bytes[0], ub_bytes[1] - ub_bytes[0], queues(completed)


def queues(state: State) -> int:
    """Return the largest number of queues between two pipes in a nest.

    A tile that is loaded has a queue from MTE2 to the vector unit, one that is stored a queue from
    there to MTE3; tiles that are filled in the same loop share one.
    """
    attached_at: dict[tuple[bool, bool], set[object]] = {}
    for stage in state.stages:
        if not isinstance(stage, Stage) or stage.scope != "UB":
            continue
        source = state.find(stage.sources[0]) if stage.sources else None
        loaded = stage.is_copy and getattr(source, "scope", "GM") == "GM"
        readers = state.readers(stage.name)
        stored = any(getattr(reader, "scope", "GM") == "GM" for reader in readers)
        if loaded or stored:
            attached_at.setdefault((loaded, stored), set()).add(stage.attach)
    return max(map(len, attached_at.values()), default=0)
