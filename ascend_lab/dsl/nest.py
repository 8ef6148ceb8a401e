"""Walk a completed nest and write its program: loops, tiles, whole-tile instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ascend_lab.chip import Chip
from ascend_lab.dsl import emit_copy, emit_cube
from ascend_lab.dsl.boxes import Box, Range, needed
from ascend_lab.dsl.complete import loop_count
from ascend_lab.dsl.emit_expr import compute_tile
from ascend_lab.dsl.emit_fold import start_of
from ascend_lab.dsl.emit_vector import apply
from ascend_lab.dsl.expr import Read
from ascend_lab.dsl.stages import Leaf, Stage, State, bare
from ascend_lab.dsl.tiles import Group, Tiles
from ascend_lab.dsl.unit import Op, Unit
from ascend_lab.dsl.views import View
from ascend_lab.isa import Affine, KernelBuilder

Copy = Callable[[Unit, View, View, Sequence[int]], None]


class Nest:
    """The program of one kind of core for the phase of one root stage."""

    def __init__(self, state: State, root: str, chip: Chip, tensors: Mapping[str, int]) -> None:
        self.state, self.root = state, root
        self.builder = KernelBuilder(root, chip)
        self.unit = Unit(self.builder)
        self.tiles = Tiles(state, root, self.unit, tensors)
        self.active: dict[str, Box] = {}
        self.guests: dict[tuple[str, str], list[Stage]] = {}
        self.counts: dict[str, int] = {}
        self.pending: dict[str, Sequence[Leaf]] = {}
        self.how: Copy = emit_copy.main_part
        for stage in state.stages:
            if isinstance(stage, Stage):
                self.counts[stage.name] = loop_count(state, stage)
                if stage.attach is not None:
                    self.guests.setdefault(stage.attach, []).append(stage)
        for found in self.guests.values():
            found.sort(key=self._turn)

    def _turn(self, stage: Stage) -> int:
        """Loads first, stores last, what is computed in between."""
        if stage.scope == "GM":
            return 2
        return 1 if self.tiles.writer(stage) == "V" else 0

    # -- loops ----------------------------------------------------------------------------------
    def run(self, stage: Stage, box: Box) -> None:
        """Write the nest of a stage for a box of it."""
        self.active[stage.name] = box
        places = ("", *stage.bound)
        guests = [g for place in places for g in self.guests.get((stage.name, place), ())]
        loops = [x for x in stage.loops[: self.counts[stage.name]] if x.name not in stage.bound]
        self.pending[stage.name] = loops
        self.produce(guests)
        if stage.fold and not stage.is_cube and any(x.reduce for x in loops):
            sizes = [box[a.name].count for a in stage.axes]
            begin = Op("vdup", start_of(stage.fold, stage.dtype))
            apply(self.unit, begin, self.tiles.own_view(stage, box), (), sizes)
        self.level(stage, loops, [])
        self.release(guests)
        del self.active[stage.name]

    def level(self, stage: Stage, loops: Sequence[Leaf], folds: list[Affine]) -> None:
        """Write one loop and what is inside it; `folds` are the fold loops around."""
        if not loops:
            self.instructions(stage, folds)
            return
        leaf, box = loops[0], self.active[stage.name]
        guests = self.guests.get((stage.name, leaf.name), ())
        for part, trip in self.steps(stage, leaf, box[leaf.root]):
            self.active[stage.name] = box | {leaf.root: part}
            self.pending[stage.name] = loops[1:]
            self.produce(guests)
            self.level(stage, loops[1:], [*folds, trip] if leaf.reduce else folds)
            self.release(guests)
        self.active[stage.name] = box

    def steps(self, stage: Stage, leaf: Leaf, whole: Range) -> Iterator[tuple[Range, Affine]]:
        """Yield (range, trip) of a loop: over full parts, then the last one (cut or moved back)."""
        full, rest = divmod(whole.count, leaf.width)
        name = f"{stage.name}_{leaf.name}" if stage.name != self.root else leaf.name
        if full == 1:
            yield Range(whole.start, leaf.width), Affine()
        elif full:
            with self.builder.loop(name, full) as index:
                yield Range(whole.start + index * leaf.width, leaf.width), index
        if rest and leaf.tail == "guard" and full:
            back = Affine(whole.count - leaf.width)
            yield Range(whole.start + back, leaf.width), Affine(full)
        elif rest:
            yield Range(whole.start + full * leaf.width, rest), Affine(full)

    # -- tiles ----------------------------------------------------------------------------------
    def produce(self, stages: Sequence[Stage]) -> None:
        """Load or compute the tiles attached at a place; outputs among them are stored."""
        for stage in stages if self.how is emit_copy.main_part else ():
            box = needed(self.state, stage, self.active)
            if stage.scope == "GM":
                self.run(stage, box)
                continue
            ranges = [box[a.name] for a in stage.axes]
            self.tiles.open(stage, tuple(r.start for r in ranges), tuple(r.count for r in ranges))
            self.run(stage, box)
            group = self.tiles.fill(stage.name)
            if group is not None:
                self.hand_over(group, stage)

    def hand_over(self, group: Group, last: Stage) -> None:
        """Pass full tiles to their readers; single elements go by the scalar unit in between."""
        if group.queue.middle is not None:
            group.queue.hand()
            self.how = emit_copy.leftover
            tiles = [self.state.stage(name) for name in group.filled]
            for tile in tiles if self.tiles.writer(last) == "MTE2" else ():
                self.walk(tile)
            readers = {r.name: r for tile in tiles for r in self.state.readers(tile.name)}
            for reader in readers.values():
                if isinstance(reader, Stage) and reader.scope == "GM":
                    self.walk(reader)
            self.how = emit_copy.main_part
        self.tiles.pass_on(group)

    def walk(self, stage: Stage) -> None:
        """Write once more the loops of a copy from here on, for the elements it leaves over."""
        if stage.name in self.active:
            box, loops = self.active[stage.name], self.pending[stage.name]
            self.level(stage, loops, [])
            self.active[stage.name], self.pending[stage.name] = box, loops
            return
        self.active[stage.name] = needed(self.state, stage, self.active)
        self.level(stage, stage.loops[: self.counts[stage.name]], [])
        del self.active[stage.name]

    def release(self, stages: Sequence[Stage]) -> None:
        """Give up the tiles attached at a place."""
        for stage in stages if self.how is emit_copy.main_part else ():
            self.tiles.release(stage.name)

    # -- instructions ---------------------------------------------------------------------------
    def instructions(self, stage: Stage, folds: list[Affine]) -> None:
        """Write the whole-tile instructions of a stage for its active box."""
        box = self.active[stage.name]
        if stage.name in self.tiles.fractal:
            emit_cube.instructions(self.tiles, stage, box, folds)
        elif stage.scope == "GM" or self.tiles.writer(stage) == "MTE2":
            self.copy(stage, box)
        else:
            axes = (*stage.axes, *stage.reduce)
            views = {r: self.tiles.view(r, box, axes) for r in stage.reads}
            compute_tile(self.unit, stage, box, self.tiles.own_view(stage, box), views, bool(folds))

    def copy(self, stage: Stage, box: Box) -> None:
        """Move a box between GM and UB: its main part, or what that leaves over."""
        read = bare(stage.expr) or stage.expr
        assert isinstance(read, Read)
        sizes = [box[a.name].count for a in stage.axes]
        self.how(
            self.unit,
            self.tiles.own_view(stage, box),
            self.tiles.view(read, box, stage.axes),
            sizes,
        )
