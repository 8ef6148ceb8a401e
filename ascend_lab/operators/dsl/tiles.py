"""Tiles of a loop nest: where they lie, which pipes fill and empty them, and who waits for whom.

For y = a + b the tiles of a and b are filled by MTE2 and emptied by the vector unit, that of y is
filled by the vector unit and emptied by MTE3. Tiles in UB that the same pipes fill and empty in the
same loop share one queue: one flag says that all of them are full, another that all are free.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ascend_lab.errors import ScheduleError
from ascend_lab.machine import isa, layout
from ascend_lab.operators.dsl import boxes, fractals, schedule
from ascend_lab.operators.dsl.emit_vector import Memory, Unit, View
from ascend_lab.operators.dsl.stages import Leaf, Stage, State, identity, overwrites
from ascend_lab.operators.dsl.tensor import Axis, Read

PIPE_INTO = {"L1": "MTE2", "L0A": "MTE1", "L0B": "MTE1", "L0C": "M"}


@dataclass(frozen=True, slots=True)
class OpenTile:
    """A tile while it is in use: its memory, the indices it holds, the stride of every axis."""

    memory: Memory
    dtype: str
    starts: tuple[isa.Affine, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(slots=True)
class Group:
    """Tiles that share a queue: `names` lists them all, `filled` those full in this step."""

    queue: isa.Queue
    names: tuple[str, ...]
    buffers: dict[str, isa.Buffer]
    slot: isa.Tile | None = None
    filled: list[str] = field(default_factory=list)

    def tile(self, name: str, slot: isa.Tile) -> isa.Tile:
        """Return the tile of one member in a slot of the queue."""
        return isa.Tile(self.buffers[name], slot.slot)


class Tiles:
    """All tiles of one program, and the GM tensors that they are copied from or to.

    - elements: the size of each GM tensor; `tensors` holds those that the program has used so far
    - first_boxes: the box of each stage in its first step (empty until it is needed)
    - has_whole_blocks: whether all rows of all tiles are whole blocks
    - fractal_stages: the names of the stages of a matrix product, whose tiles are fractals
    - open_tiles: the tiles that are in use now, by stage
    - with_padding: the tiles whose padding behind each row has been written, so that it may be read
    - groups: the queue that each of the tiles with a queue belongs to
    """

    def __init__(self, state: State, root: str, unit: Unit, elements: Mapping[str, int]) -> None:
        self.state = state
        self.root = root
        self.unit = unit
        self.builder = unit.builder
        self.elements = elements
        self.tensors: dict[str, isa.Buffer] = {}
        self.first_boxes: dict[str, boxes.Box] = {}
        stages = [s for s in state.stages if isinstance(s, Stage)]
        block = math.lcm(32, *(s.align for s in stages))
        self.has_whole_blocks = all(_whole_blocks(state, s, block) for s in stages)
        self.fractal_stages = {s.name for s in stages if fractals.role_of(state, s)}
        self.open_tiles: dict[str, OpenTile] = {}
        self.with_padding: set[str] = set()
        self.groups: dict[str, Group] = {}

    # -- operands -------------------------------------------------------------------------------
    def tile_of(self, name: str, view: tuple[int, ...] = ()) -> OpenTile:
        """Return a tile, or a GM tensor as if it were one, under the shape `view` if given."""
        if name in self.open_tiles:
            return self.open_tiles[name]
        # A tensor in GM is a tile that holds everything: it starts at 0 in every dimension.
        entry = self.state.find(name)
        if entry.scope != "GM":
            needed = f"{name}: there before what reads it"
            raise ScheduleError(needed, "computed in a loop behind", "compute_at its reader there")
        if name not in self.tensors:
            self.tensors[name] = self.builder.tensor(name, entry.dtype, self.elements[name])
        shape = view or entry.shape
        starts = (isa.Affine(),) * len(shape)
        return OpenTile(self.tensors[name], entry.dtype, starts, shape, layout.row_major(shape))

    def view(self, read: Read, box: boxes.Box, axes: Sequence[Axis]) -> View:
        """Return what `read` addresses while `axes` run through a box."""
        tile = self.tile_of(read.source, read.view)
        offset = isa.Affine()
        strides = dict.fromkeys((a.name for a in axes), 0)
        padded_row = boxes.row_of(tile.sizes) if read.source in self.with_padding else -1
        row_elements = 0
        for axis, (index, tile_start, stride) in enumerate(
            zip(read.index, tile.starts, tile.strides, strict=True)
        ):
            # A tile of columns 64..127 holds column 70 at 6 strides from its start.
            start = boxes.index_range(index, box).start
            if start != tile_start:
                offset = offset + (start - tile_start) * stride
            elif axis == padded_row:
                row_elements = tile.sizes[padded_row]
            # x[8 i + j] moves by 8 strides with i and by one with j.
            for name, coefficient in index.terms:
                strides[name] += coefficient * stride
        # A tile whose rows are one block of equal numbers is read as this block, repeatedly along
        # the row.
        repeats = getattr(self.state.find(read.source), "repeats", False)
        return View(
            tile.memory,
            tile.dtype,
            offset,
            tuple(strides.values()),
            blocks=repeats and not read.index[-1].terms,
            row=row_elements,
        )

    def output_view(self, stage: Stage, box: boxes.Box) -> View:
        """Return where a stage writes; whole rows are marked, whose padding may be written, too."""
        view = self.exact_output_view(stage, box)
        tile = self.tile_of(stage.name)
        row = boxes.row_of(tile.sizes)
        start = box[stage.axes[row].name].start
        size = tile.sizes[row]
        has_whole_rows = start == tile.starts[row] and box[stage.axes[row].name].count == size
        return replace(view, row=size if has_whole_rows and stage.align > 1 else 0)

    def exact_output_view(self, stage: Stage, box: boxes.Box) -> View:
        """Return where a stage writes, without the padding of rows."""
        return self.view(Read(stage.name, stage.dtype, identity(stage.axes)), box, stage.axes)

    # -- slots ----------------------------------------------------------------------------------
    def open(self, stage: Stage, starts: tuple[isa.Affine, ...], sizes: tuple[int, ...]) -> None:
        """Reserve a slot for a tile and note what it will hold."""
        strides, elements = boxes.row_steps(stage, sizes)
        if stage.name in self.fractal_stages:
            elements = math.prod(sizes)
        # b = exp(a) may take the memory of a, if nobody reads a afterwards.
        overwritten = overwrites(self.state, stage)
        old_tile = None if overwritten in self.groups else self.open_tiles.get(overwritten)
        # In place needs equal bytes: same format, sizes and strides, of tiles only vectors touch.
        may_overwrite = (
            sizes[-1] > 1 and self.filling_pipe(stage) == self.emptying_pipe(stage) == "V"
        )
        memory: Memory
        if (
            may_overwrite
            and old_tile
            and old_tile == OpenTile(old_tile.memory, stage.dtype, starts, sizes, strides)
        ):
            memory = old_tile.memory
        elif stage.name in self.groups:
            memory = self._slot(self.groups[stage.name], stage.name)
        else:
            memory = self._allocate(stage, sizes, elements)
        self.open_tiles[stage.name] = OpenTile(memory, stage.dtype, starts, sizes, strides)
        self.with_padding.discard(stage.name)

    def _slot(self, group: Group, name: str) -> isa.Tile:
        """Return the tile of `name` in the group's slot; the first tile asked for reserves it."""
        if group.slot is None:
            group.slot = group.queue.alloc()
        return group.tile(name, group.slot)

    def _allocate(self, stage: Stage, sizes: tuple[int, ...], elements: int) -> Memory:
        """Return scratch for a tile only the vector unit touches, else a slot of its queue."""
        filling_pipe = self.filling_pipe(stage)
        emptying_pipe = self.emptying_pipe(stage)
        if emptying_pipe == filling_pipe == "V":
            return self.unit.take(stage.dtype, elements)
        partners = self._partners(stage, filling_pipe, emptying_pipe)
        group = next((self.groups[n] for n in partners if n in self.groups), None)
        if group is None:
            needs_scalar_unit = any(self._needs_scalar_copy(self.state.stage(n)) for n in partners)
            queue = self.builder.queue(
                stage.name,
                stage.scope,
                stage.dtype,
                elements,
                src=filling_pipe,
                dst=emptying_pipe,
                depth=stage.depth,
                via="S" if needs_scalar_unit else "",
            )
            group = Group(queue, partners, {stage.name: queue.buffer})
        else:
            group.buffers[stage.name] = group.queue.join(stage.name, stage.dtype, elements)
        self.groups[stage.name] = group
        return self._slot(group, stage.name)

    def _partners(self, stage: Stage, filling_pipe: str, emptying_pipe: str) -> tuple[str, ...]:
        """Return the tiles that share a queue with this one, itself included."""
        if stage.scope != "UB" or stage.name in self.fractal_stages:
            return (stage.name,)
        return tuple(
            s.name
            for s in self.state.stages
            if isinstance(s, Stage)
            # All tiles that are loaded in one loop share a flag: with separate flags three operands
            # would need three of the few event ids.
            and (s.scope, s.attach, s.depth) == ("UB", stage.attach, stage.depth)
            and (self.filling_pipe(s), self.emptying_pipe(s)) == (filling_pipe, emptying_pipe)
            and s.name not in self.fractal_stages
        )

    def _needs_scalar_copy(self, stage: Stage) -> bool:
        """True if the scalar unit has to copy single elements of a tile.

        It does on chips whose copies move whole blocks only, if a row may end inside a block and
        the vector unit cannot repair that end (`can_copy_by_blocks`).
        """
        if (
            not self.builder.chip.combined
            or stage.name in self.fractal_stages
            or self.has_whole_blocks
        ):
            return False
        row_sizes = self._row_sizes(stage)
        if not any(n % isa.c0_of(stage.dtype) for n, _ in row_sizes):
            return False
        return not self.can_copy_by_blocks(stage) or min(n for _, n in row_sizes) < stage.align

    def can_copy_by_blocks(self, stage: Stage) -> bool:
        """True if ragged rows can be copied by whole blocks and repaired by the vector unit.

        Besides the copy, only the vector unit may touch the tile, and a stored tile must not be
        read again, by the vector unit or for another row of the output. No step of the copy may
        move a row that another step has moved: the second shift of the end of a row would take
        elements that the first one wrote.
        """
        readers = [r for r in self.state.readers(stage.name) if isinstance(r, Stage)]
        stores = [r for r in readers if r.scope == "GM"]
        copies = stores if self.filling_pipe(stage) == "V" else [stage]
        # The last step of a guarded loop is moved back over the step before it.
        if any(leaf.tail == "guard" and leaf.width > 1 for copy in copies for leaf in copy.loops):
            return False
        for copy in stores:
            used_axes = set[str]().union(*(read.axis_names for read in copy.reads))
            # y[i, j] = t[j] stores one row of the tile for every i: again after it was shifted.
            if any(a.extent > 1 and a.name not in used_axes for a in copy.axes):
                return False
        # A computed tile may only be stored, a loaded tile may only be computed with.
        if self.filling_pipe(stage) == "V":
            has_other_readers = len(stores) < len(readers)
        else:
            has_other_readers = bool(stores)
        return stage.dtype in ("fp16", "fp32") and stage.align > 1 and not has_other_readers

    def is_narrow(self, stage: Stage) -> bool:
        """True for a tile with rows shorter than a block that is stored by whole blocks."""
        row = stage.shape[boxes.row_of(stage.shape)]
        is_stored = any(getattr(r, "scope", "") == "GM" for r in self.state.readers(stage.name))
        needs_blocks = self.builder.chip.combined and stage.name not in self.fractal_stages
        return needs_blocks and is_stored and row < stage.align and self.can_copy_by_blocks(stage)

    def check_ends(self, stage: Stage, has_leftover: bool) -> None:
        """Raise `ScheduleError` if elements need the scalar unit, which the queue leaves out."""
        group = self.groups.get(stage.name)
        # The queue was made without the scalar unit between its pipes: it cannot be added now.
        scalar_takes_part = group is None or group.queue.middle is not None
        if has_leftover and self.builder.chip.combined and not scalar_takes_part:
            needed = f"rows of {stage.name} in whole blocks"
            raise ScheduleError(needed, str(stage.shape), "split by multiples of 16 elements")

    def _row_sizes(self, stage: Stage) -> set[tuple[int, int]]:
        """Return (elements of a row, elements that lie together in GM) of every tile shape.

        A row that is cut lies alone; a whole row lies together with the rows next to it.

        A loop over 100 columns in steps of 32 makes tiles with rows of 32 and, at its end, of 4.
        """
        if not self.first_boxes:
            self.first_boxes = boxes.first_boxes(self.state, self.root)
        row_sizes: set[tuple[int, int]] = set()
        row = boxes.row_of(stage.shape)
        for host in self.first_boxes:
            if host == stage.name:
                continue
            for cut_box in self._cut_boxes(host):
                # In the loops of the root no other nest is active.
                other_boxes = {} if host == self.root else self.first_boxes
                sizes = boxes.tile_sizes(self.state, stage, {**other_boxes, host: cut_box})
                is_cut = sizes[row] < stage.shape[row]
                first_axis = row if is_cut else max(row - 1, 0)
                row_sizes.add((sizes[row], math.prod(sizes[first_axis : row + 1])))
        return row_sizes

    def _cut_boxes(self, host: str) -> Iterator[boxes.Box]:
        """Yield the first box of a stage with each axis as long as one step of its loops takes."""
        nest = self.state.stage(host)
        loops = nest.loops[: schedule.loop_count(self.state, nest)]
        for axis in (*nest.axes, *nest.reduce):
            for width in _parts(loops, axis):
                yield self.first_boxes[host] | {axis.name: boxes.Range(isa.Affine(), width)}

    def filling_pipe(self, stage: Stage) -> str:
        """Return the pipe that fills the tile of a stage."""
        if stage.scope != "UB":
            return PIPE_INTO[stage.scope]
        is_load = stage.is_copy and self.state.find(stage.sources[0]).scope == "GM"
        return "MTE2" if is_load else "V"

    def emptying_pipe(self, stage: Stage) -> str:
        """Return the pipe that empties the tile of a stage: "V" if only the vector unit uses it."""
        pipes = {self._pipe_of(r, stage) for r in self.state.readers(stage.name)}
        reading_pipes = pipes - {self.filling_pipe(stage)}
        if len(reading_pipes) > 1:
            needed = f"{stage.name}: readers on one pipe"
            raise ScheduleError(needed, ", ".join(sorted(reading_pipes)), "cache it twice")
        return reading_pipes.pop() if reading_pipes else self.filling_pipe(stage)

    def _pipe_of(self, reader: object, tile: Stage) -> str:
        """Return the pipe on which a stage reads a tile; only L0C leaves through the fix pipe."""
        assert isinstance(reader, Stage)
        if reader.scope != "GM":
            return self.filling_pipe(reader)
        return "FIX" if tile.scope == "L0C" else "MTE3"

    def fill(self, name: str) -> Group | None:
        """Note that a tile is full; return its group once all tiles of the group are full."""
        group = self.groups.get(name)
        if group is None:
            return None
        # Three operands in one group: the flag is set when the third has arrived.
        group.filled.append(name)
        return group if len(group.filled) == len(group.names) else None

    def pass_on(self, group: Group) -> None:
        """Signal the readers that all tiles of a group are full."""
        # From here on only the readers' pipe may use the memory, until it frees the slot.
        group.queue.enqueue()
        slot = group.queue.dequeue()
        for name in group.filled:
            self.open_tiles[name] = replace(self.open_tiles[name], memory=group.tile(name, slot))

    def release(self, name: str) -> None:
        """Release a tile; a group frees its slot when its first tile is released.

        A tile that only the vector unit touches becomes scratch again, unless another tile was
        computed in its memory.
        """
        tile = self.open_tiles.pop(name, None)
        if tile is not None and all(t.memory is not tile.memory for t in self.open_tiles.values()):
            self.unit.give(tile.memory)
        group = self.groups.get(name)
        if group is not None and group.slot is not None:
            group.queue.free()
            group.slot = None
            group.filled = []


def _parts(loops: Sequence[Leaf], axis: Axis) -> set[int]:
    """Return how many elements of an axis one step of its loops may take.

    100 elements in steps of 32, and these in steps of 8: {100, 32, 4, 8}; 4 is the last step's.
    """
    counts = {axis.extent}
    for leaf in loops:
        if leaf.root != axis.name:
            continue
        # 100 in steps of 32: steps of 32 and a last one of 4.
        for count in tuple(counts):
            counts.add(min(count, leaf.width))
            if count % leaf.width:
                counts.add(count % leaf.width)
    return counts


def _whole_blocks(state: State, stage: Stage, block_elements: int) -> bool:
    """True if all rows of all tiles of a stage are multiples of `block_elements`, for certain.

    It is certain if every width of a loop is such a multiple, and no index of the stage is shifted
    or strided.
    """
    widths = [x.width for x in stage.loops[: schedule.loop_count(state, stage)]]
    indices = [i for r in stage.reads for i in r.index]
    # x[j + 1] begins its rows one element behind a block, whatever the width.
    unshifted = all(not i.const and [c for _, c in i.terms] == [1] for i in indices)
    return unshifted and all(n % block_elements == 0 for n in (*widths, stage.shape[-1]))
