"""Lower a schedule to a kernel: one phase per loop nest, one program for all cores of equal shares.

100 rows in steps of 32, one step for each of four cores, become two programs: one for the three
cores with 32 rows, another for the core with 4. A tile is the part of a stage's tensor that lies in
an on-chip buffer during one step of a loop.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product

from ascend_lab import errors
from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.operators.dsl import emit_cube, emit_vector
from ascend_lab.operators.dsl.boxes import Box, Range, needed_box, row_piece_bytes, whole_box
from ascend_lab.operators.dsl.emit_folds import neutral_number
from ascend_lab.operators.dsl.emit_formula import TileWork, compute_tile, whole_row_sizes
from ascend_lab.operators.dsl.emit_rows import (
    EmitCopy,
    copy_leftover,
    copy_main_part,
    rows_of_box,
    shift_loaded_ends,
    shift_stored_ends,
)
from ascend_lab.operators.dsl.fractals import stored
from ascend_lab.operators.dsl.schedule import (
    Schedule,
    complete,
    loop_count,
    members,
    moves_only,
    roots,
)
from ascend_lab.operators.dsl.stages import Fixed, Leaf, Stage, State, copied_element
from ascend_lab.operators.dsl.tiles import Group, Tiles

CoreShare = tuple[int, int, int]
"""First step of a bound loop, number of steps with as many elements, elements of each."""


def lower(schedule: Schedule) -> isa.Kernel:
    """Return the kernel of a schedule on its chip, one phase per stage that is kept in GM.

    Raises `ScheduleError` for nests that no program can express and `CapacityError` for tiles that
    do not fit in their buffer; both messages give the numbers.
    """
    state = schedule.state
    chip = schedule.chip
    phases: list[isa.Launch] = []
    tensors = tuple(stored(state).items())
    for stage in roots(state):
        phases += _launches(state, stage, chip, tensors)
    return isa.Kernel(schedule.outputs[0].label, tuple(phases))


def lower_stage(schedule: Schedule, name: str) -> tuple[isa.Launch, ...]:
    """Return the launches of one stage; none if it is computed inside another nest."""
    state = schedule.state
    stage = next((s for s in roots(state) if s.name == name), None)
    return _launches(state, stage, schedule.chip, tuple(stored(state).items())) if stage else ()


def _launches(
    state: State, stage: Stage | Fixed, chip: Chip, tensors: tuple[tuple[str, int], ...]
) -> tuple[isa.Launch, ...]:
    if isinstance(stage, Fixed):
        return emit_cube.handwritten(state, stage, chip)
    # A copy between two tensors in GM needs no tile: a hand-written kernel moves it.
    if moves_only(state, stage):
        return (emit_cube.copied(state, stage, chip),)
    try:
        return (_phase(complete(state, stage.name), stage.name, chip, tensors),)
    except errors.AlignmentError as error:
        raise errors.ScheduleError(
            f"{stage.name}: tiles that begin at 32-byte blocks ({error.needed})",
            error.got,
            "split by multiples of 16 elements, or vectorise a loop further out",
        ) from error


@lru_cache(maxsize=16)
def _phase(state: State, root: str, chip: Chip, tensors: tuple[tuple[str, int], ...]) -> isa.Launch:
    """Return the launch of one nest: cores with full shares, then those with a shorter last one.

    The automatic schedule lowers nests to compare them, and `lower` needs the best of them once
    more: the cache saves that second time.
    """
    stage = state.stage(root)
    bound = [leaf for leaf in stage.loops if leaf.name in stage.bound]
    shares = [_shares(stage, leaf) for leaf in bound]
    if stage.last_fold_extent and stage.axes[-1].name not in {leaf.root for leaf in bound}:
        needed = f"{root}: {stage.axes[-1].name} bound to cores, its last step is shorter"
        raise errors.ScheduleError(needed, "a loop", "bind it")
    # Shares of several bound loops combine: 3 rows of cores x 8 columns of cores are 24 cores.
    used_cores = math.prod(sum(count for _, count, _ in share) for share in shares)
    has_cube = any(s.is_cube for s in map(state.stage, members(state, root)))
    available_cores = chip.core_count * (1 if has_cube else chip.vector_cores_per_core)
    if used_cores > available_cores:
        limit = f"at most {available_cores} steps, one per core of {chip.name}"
        remedy = "split with a larger factor before bind"
        raise errors.ScheduleError(f"{root}: bound loops of {limit}", str(used_cores), remedy)
    # 100 rows in steps of 32 over 4 cores: one program for the three cores with 32 rows, another
    # for the core with 4.
    parts = [
        _part(Nest(state, root, chip, dict(tensors)), bound, core_shares)
        for core_shares in product(*shares)
    ]
    return isa.Launch(root, tuple(parts))


def _part(nest: "Nest", bound: Sequence[Leaf], core_shares: Sequence[CoreShare]) -> isa.Part:
    """Return the program of the cores with these shares of the bound loops, and their bindings."""
    stage = nest.state.stage(nest.root)
    box = whole_box(stage)
    for leaf, (first, count, elements) in zip(bound, core_shares, strict=True):
        # The core's number is a parameter of the program, so that all cores with equal shares run
        # one.
        start = nest.builder.param(leaf.name, first + count) * leaf.width
        counts_parts = stage.last_fold_extent and leaf.root == stage.axes[-1].name
        if counts_parts and first + 1 == leaf.extent:
            # the last part of a row, which is shorter: its core has a program of its own
            start = isa.Affine(first)
        box[leaf.root] = Range(start, elements)
    nest.run(stage, box)
    program = nest.builder.finish()
    steps = [range(first, first + count) for first, count, _ in core_shares]
    names = [leaf.name for leaf in bound]
    # Two bound loops of 2 and 3 steps: six bindings, (0, 0), (0, 1), ... (1, 2), one for each core.
    bindings = (dict(zip(names, values, strict=True)) for values in product(*steps))
    return isa.Part(program, tuple(map(isa.binding_of, bindings)))


def _shares(stage: Stage, leaf: Leaf) -> list[CoreShare]:
    """Return (first step, number of steps, elements of each) of a bound loop, per share size.

    100 elements in steps of 32 give [(0, 3, 32), (3, 1, 4)]: three full cores and one of 4.
    """
    extent = next(a.extent for a in stage.axes if a.name == leaf.root)
    for coarser in stage.loops:
        if coarser.root == leaf.root and coarser.width > leaf.width:
            needed = f"bind {stage.name}.{leaf.name}: the outermost part of {leaf.root}"
            raise errors.ScheduleError(needed, f"{coarser.name} is outside", "bind that one")
    full_steps, last_elements = divmod(extent, leaf.width)
    if stage.last_fold_extent and leaf.root == stage.axes[-1].name:
        # The last step folds fewer elements, so its core needs a separate program.
        if leaf.width > 1:
            needed = f"{stage.name}: a core for each step of {leaf.root}, the last one is shorter"
            raise errors.ScheduleError(needed, f"{leaf.width} of them", "split by 1 before bind")
        return [(0, full_steps - 1, 1), (full_steps - 1, 1, 1)]
    shares: list[CoreShare] = []
    if full_steps:
        shares.append((0, full_steps, leaf.width))
    if last_elements:
        shares.append((full_steps, 1, last_elements))
    return shares


# -- a nest: loops, tiles, whole-tile instructions ------------------------------------------------
class Nest:
    """The program of all cores that have equal shares of the phase of one root stage.

    - active: the box of each stage whose loops are open
    - pending: of such a stage, the loops that are not open yet
    - counts: how many loops of a stage are loops of the program
    - guests: by (stage, loop), the stages that are computed inside that loop, in order
    - emit_copy: the function that writes a copy between GM and UB: usually its main part, now and
      then what the ends of its rows need (see `emit_rows`)
    """

    def __init__(self, state: State, root: str, chip: Chip, tensors: Mapping[str, int]) -> None:
        self.state = state
        self.root = root
        self.builder = isa.KernelBuilder(root, chip)
        self.unit = emit_vector.Unit(self.builder)
        self.tiles = Tiles(state, root, self.unit, tensors)
        self.active: dict[str, Box] = {}
        self.pending: dict[str, Sequence[Leaf]] = {}
        self.emit_copy: EmitCopy = copy_main_part
        stages = [s for s in state.stages if isinstance(s, Stage)]
        self.counts = {s.name: loop_count(state, s) for s in stages}
        self.guests: dict[tuple[str, str], list[Stage]] = defaultdict(list)
        for stage in sorted(stages, key=self._order):
            if stage.attach is not None:
                self.guests[stage.attach].append(stage)

    def _order(self, stage: Stage) -> int:
        """Return the place of a stage among those of one loop: loads, computed tiles, stores."""
        return 2 if stage.scope == "GM" else int(self.tiles.filling_pipe(stage) == "V")

    # -- loops ----------------------------------------------------------------------------------
    def run(self, stage: Stage, box: Box) -> None:
        """Write the nest of a stage for the part of it in `box`."""
        self.active[stage.name] = box
        # Tiles at loops bound to cores are computed once per core, in front of all other loops.
        places = ("", *stage.bound)
        guests = [g for place in places for g in self.guests[stage.name, place]]
        loops = [x for x in stage.loops[: self.counts[stage.name]] if x.name not in stage.bound]
        self.pending[stage.name] = loops
        self.produce(guests)
        if stage.fold and not stage.is_cube and any(x.reduce for x in loops):
            # Sums start at 0, maxima at -inf, before the first step of the loops that fold.
            sizes = [box[a.name].count for a in stage.axes]
            init = emit_vector.Op("vdup", neutral_number(stage.fold, stage.dtype))
            out = self.tiles.output_view(stage, box)
            block_sizes = None
            if self.tiles.is_narrow(stage):
                block_sizes = whole_row_sizes(sizes, stage.align, (out,))
            emit_vector.apply(self.unit, init, out, (), block_sizes or sizes)
        self.level(stage, loops, [])
        self.release(guests)
        del self.active[stage.name]

    def level(self, stage: Stage, loops: Sequence[Leaf], folds: list[isa.Affine]) -> None:
        """Write the first of some loops with its body; without loops, the instructions.

        `folds` are the step numbers of the enclosing fold loops.
        """
        if not loops:
            self.instructions(stage, folds)
            return
        leaf = loops[0]
        box = self.active[stage.name]
        guests = self.guests[stage.name, leaf.name]
        for step_range, step_number in self.steps(stage, leaf, box[leaf.root]):
            self.active[stage.name] = box | {leaf.root: step_range}
            self.pending[stage.name] = loops[1:]
            self.produce(guests)
            # The cube needs the step numbers of fold loops: in the first step of all it overwrites
            # its sums.
            self.level(stage, loops[1:], [*folds, step_number] if leaf.reduce else folds)
            self.release(guests)
        self.active[stage.name] = box

    def steps(self, stage: Stage, leaf: Leaf, span: Range) -> Iterator[tuple[Range, isa.Affine]]:
        """Yield (range, step number) of a loop: all full steps as one, then the last, shorter one.

        100 elements in steps of 32: a loop over 0..95, then 96..99 (cut) or 68..99 (guard).
        """
        full_steps, last_elements = divmod(span.count, leaf.width)
        name = f"{stage.name}_{leaf.name}" if stage.name != self.root else leaf.name
        if full_steps == 1:
            yield Range(span.start, leaf.width), isa.Affine()
        elif full_steps:
            with self.builder.loop(name, full_steps) as index:
                yield Range(span.start + index * leaf.width, leaf.width), index
        # The last step is moved back until it is whole: 68..99 computes 68..95 a second time.
        if last_elements and leaf.tail == "guard" and full_steps:
            first_moved_back = isa.Affine(span.count - leaf.width)
            yield Range(span.start + first_moved_back, leaf.width), isa.Affine(full_steps)
        elif last_elements:
            yield (
                Range(span.start + full_steps * leaf.width, last_elements),
                isa.Affine(full_steps),
            )

    # -- tiles ----------------------------------------------------------------------------------
    def produce(self, stages: Sequence[Stage]) -> None:
        """Load or compute the tiles attached to one loop; store those that are outputs.

        A tile that only other tiles of this loop read is released after the last of them.
        """
        if self.emit_copy is not copy_main_part:
            return  # only the ends of rows are being copied: the tiles are there
        readers = {s.name: {r.name for r in self.state.readers(s.name)} for s in stages}
        for stage in stages:
            box = needed_box(self.state, stage, self.active)
            if stage.scope == "GM":
                self.run(stage, box)
                self.note_read(stage.name, readers)
                continue
            self.reserve(stage, box)
            self.run(stage, box)
            group = self.tiles.fill(stage.name)
            # All tiles of the group are full: the ends of their rows are repaired, then their
            # readers may start.
            if group is not None:
                self.pass_to_readers(group, stage)
            self.note_read(stage.name, readers)

    def reserve(self, stage: Stage, box: Box) -> None:
        """Reserve a slot for a tile."""
        ranges = [box[a.name] for a in stage.axes]
        self.tiles.open(stage, tuple(r.start for r in ranges), tuple(r.count for r in ranges))

    def note_read(self, reader: str, readers: dict[str, set[str]]) -> None:
        """Note that a stage has read its tiles; release those of which it was the last reader."""
        for pending_readers in readers.values():
            pending_readers.discard(reader)
        for name in [n for n, pending_readers in readers.items() if not pending_readers]:
            group = self.tiles.groups.get(name)
            if not any(readers.get(n) for n in (group.names if group else ())):
                self.tiles.release(name)

    def pass_to_readers(self, group: Group, filled_last: Stage) -> None:
        """Pass full tiles to their readers, after repairing the ends of ragged rows.

        Copies move whole 32-byte blocks, so a row of 197 elements needs help at its end (see
        `emit_rows`). The vector unit shifts these elements in computed tiles before they are
        stored, and in loaded tiles after they have arrived. In all other tiles the scalar unit
        copies them one by one, between the two.
        """
        tiles = list(map(self.state.stage, group.filled))
        is_computed = self.tiles.filling_pipe(filled_last) == "V"
        readers = {r.name: r for tile in tiles for r in self.state.readers(tile.name)}
        stores = [r for r in readers.values() if isinstance(r, Stage) and r.scope == "GM"]
        may_be_ragged = not (self.tiles.has_whole_blocks or self.tiles.fractal_stages)
        # Before the store: elements behind the row's last whole block, at the place where GM wants
        # them.
        if is_computed and may_be_ragged:
            self.repeat_copies(stores, shift_stored_ends)
        if group.queue.middle is not None:
            group.queue.hand()  # to the scalar unit, which copies single elements
            loaded = tiles if self.tiles.filling_pipe(filled_last) == "MTE2" else []
            self.repeat_copies([*loaded, *stores], copy_leftover)
        self.tiles.pass_on(group)
        # After the load: the last block has arrived where it ends in GM, and moves to where the row
        # ends.
        if may_be_ragged and self.tiles.filling_pipe(filled_last) == "MTE2":
            self.repeat_copies(tiles, shift_loaded_ends)

    def repeat_copies(self, stages: Sequence[Stage], copy_ends: EmitCopy) -> None:
        """Write the loops of some copies once more, with `copy_ends` for the ends of their rows."""
        if not self.builder.chip.combined:
            return  # such a chip copies ragged rows exactly
        self.emit_copy = copy_ends
        for stage in stages:
            self.repeat_loops(stage)
        self.emit_copy = copy_main_part

    def repeat_loops(self, stage: Stage) -> None:
        """Write the loops of a copy from the current loop inwards, for the elements left over."""
        if stage.name in self.active:  # inside its nest: only the loops not yet entered
            box = self.active[stage.name]
            loops = self.pending[stage.name]
            self.level(stage, loops, [])
            self.active[stage.name] = box
            self.pending[stage.name] = loops
            return
        self.active[stage.name] = needed_box(self.state, stage, self.active)
        self.level(stage, stage.loops[: self.counts[stage.name]], [])
        del self.active[stage.name]

    def release(self, stages: Sequence[Stage]) -> None:
        """Release the tiles attached to one loop."""
        if self.emit_copy is copy_main_part:
            for stage in stages:
                self.tiles.release(stage.name)

    # -- instructions ---------------------------------------------------------------------------
    def instructions(self, stage: Stage, folds: list[isa.Affine]) -> None:
        """Write the whole-tile instructions of a stage for its active box."""
        box = self.active[stage.name]
        if stage.name in self.tiles.fractal_stages:
            emit_cube.instructions(self.tiles, stage, box, folds)
        elif stage.scope == "GM" or self.tiles.filling_pipe(stage) == "MTE2":
            self._write_copy(stage, box)
        else:
            self._write_vector_work(stage, box, is_partial=bool(folds))

    def _write_copy(self, stage: Stage, box: Box) -> None:
        """Write the copy of a box between GM and UB."""
        read = copied_element(stage.expr)
        assert read is not None
        dst = self.tiles.exact_output_view(stage, box)
        src = self.tiles.view(read, box, stage.axes)
        tile = self.state.stage(read.source) if stage.scope == "GM" else stage
        assert isinstance(tile, Stage)
        sizes = [box[a.name].count for a in stage.axes]
        block = tile.align if self.tiles.can_copy_by_blocks(tile) else 0
        rows = rows_of_box(dst, src, sizes, block)
        # The padding of rows that were loaded by whole blocks may be read, so instructions may
        # include it.
        if rows.by_blocks and rows.is_load:
            self.tiles.with_padding.add(tile.name)
        self.tiles.check_ends(tile, rows.has_leftover)
        self.emit_copy(self.unit, rows)

    def _write_vector_work(self, stage: Stage, box: Box, *, is_partial: bool) -> None:
        """Write a stage's formula on a box; if `is_partial`, it is folded into earlier results."""
        axes = (*stage.axes, *stage.reduce)
        views = {r: self.tiles.view(r, box, axes) for r in stage.reads}
        out = self.tiles.output_view(stage, box)
        is_narrow = self.tiles.is_narrow(stage)
        block_sizes = whole_row_sizes([box[a.name].count for a in stage.axes], stage.align, (out,))
        # Stores of narrow rows write whole blocks, so the padding of a row must be initialised.
        if is_narrow and block_sizes and not is_partial:
            emit_vector.apply(self.unit, emit_vector.Op("vdup", 0.0), out, (), block_sizes)
        sizes = [box[a.name].count for a in axes]
        piece_bytes = row_piece_bytes(self.state, stage, sizes, self.builder.chip)
        work = TileWork(stage, sizes, out, views, is_partial, piece_bytes)
        has_filled_rows = compute_tile(self.unit, work)
        if has_filled_rows or (is_narrow and block_sizes):
            self.tiles.with_padding.add(stage.name)
