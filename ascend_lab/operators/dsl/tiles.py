"""Tiles of a nest: where they lie, which pipes fill and empty them, who waits for whom.

Tiles of UB that are filled and emptied by the same pipes at the same place of the nest share one
queue: one flag says that all of them are full, one that all are free.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ascend_lab.errors import ScheduleError
from ascend_lab.machine import isa, layout
from ascend_lab.operators.dsl import boxes, fractals, schedule
from ascend_lab.operators.dsl.emit_vector import Memory, Unit, View
from ascend_lab.operators.dsl.stages import Leaf, Stage, State, identity, overwrites
from ascend_lab.operators.dsl.tensor import Axis, Read

PIPE_INTO = {"L1": "MTE2", "L0A": "MTE1", "L0B": "MTE1", "L0C": "M"}


@dataclass(frozen=True, slots=True)
class Held:
    """A tile while it is in use: where it is, which indices it holds, its steps per axis."""

    memory: Memory
    dtype: str
    starts: tuple[isa.Affine, ...]
    sizes: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(slots=True)
class Group:
    """Tiles that share a queue: `names` in all, `filled` so far in this step of the loop."""

    queue: isa.Queue
    names: tuple[str, ...]
    buffers: dict[str, isa.Buffer]
    slot: isa.Tile | None = None
    filled: list[str] = field(default_factory=list)

    def tile(self, name: str, slot: isa.Tile) -> isa.Tile:
        """Return the tile of one member in a slot of the queue."""
        return isa.Tile(self.buffers[name], slot.slot)


class Tiles:
    """All tiles of one program, and the GM tensors behind them."""

    def __init__(self, state: State, root: str, unit: Unit, elements: Mapping[str, int]) -> None:
        self.state = state
        self.root = root
        self.unit = unit
        self.builder = unit.builder
        self.elements = elements
        self.tensors: dict[str, isa.Buffer] = {}
        self.first: dict[str, boxes.Box] = {}
        stages = [s for s in state.stages if isinstance(s, Stage)]
        block = math.lcm(32, *(s.align for s in stages))
        self.smooth = all(_whole_blocks(state, s, block) for s in stages)
        self.fractal = {s.name for s in stages if fractals.role_of(state, s)}
        self.held: dict[str, Held] = {}
        self.filled: set[str] = set()
        self.groups: dict[str, Group] = {}

    # -- operands -------------------------------------------------------------------------------
    def place(self, name: str, view: tuple[int, ...] = ()) -> Held:
        """Return a tile, or a GM tensor as if it were one; `view`: its shape, if not its own."""
        if name in self.held:
            return self.held[name]
        entry = self.state.find(name)
        if entry.scope != "GM":
            needed = f"{name}: there before what reads it"
            raise ScheduleError(needed, "computed in a loop behind", "compute_at its reader there")
        if name not in self.tensors:
            self.tensors[name] = self.builder.tensor(name, entry.dtype, self.elements[name])
        shape = view or entry.shape
        zero = (isa.Affine(),) * len(shape)
        return Held(self.tensors[name], entry.dtype, zero, shape, layout.row_major(shape))

    def view(self, read: Read, box: boxes.Box, axes: Sequence[Axis]) -> View:
        """Return what `read` addresses while `axes` run through a box."""
        held = self.place(read.source, read.view)
        offset = isa.Affine()
        strides = dict.fromkeys((a.name for a in axes), 0)
        row = boxes.row_of(held.sizes) if read.source in self.filled else -1
        elements = 0
        for place, (index, start, step) in enumerate(
            zip(read.index, held.starts, held.steps, strict=True)
        ):
            at = boxes.index_range(index, box).start
            if at != start:
                offset = offset + (at - start) * step
            elif place == row:
                elements = held.sizes[row]
            for name, coefficient in index.terms:
                strides[name] += coefficient * step
        alike = getattr(self.state.find(read.source), "repeats", False)
        blocks = alike and not read.index[-1].terms
        return View(held.memory, held.dtype, offset, tuple(strides.values()), blocks, elements)

    def room(self, stage: Stage, box: boxes.Box) -> View:
        """Return where a stage writes; what lies behind its rows may be written too."""
        own = self.own_view(stage, box)
        held = self.place(stage.name)
        row = boxes.row_of(held.sizes)
        at = box[stage.axes[row].name].start
        size = held.sizes[row]
        fills = at == held.starts[row] and box[stage.axes[row].name].count == size
        return replace(own, row=size if fills and stage.align > 1 else 0)

    def own_view(self, stage: Stage, box: boxes.Box) -> View:
        """Return where a stage writes."""
        return self.view(Read(stage.name, stage.dtype, identity(stage.axes)), box, stage.axes)

    # -- slots ----------------------------------------------------------------------------------
    def open(self, stage: Stage, starts: tuple[isa.Affine, ...], sizes: tuple[int, ...]) -> None:
        """Reserve a slot for a tile and note what it will hold."""
        steps, elements = boxes.row_steps(stage, sizes)
        if stage.name in self.fractal:
            elements = math.prod(sizes)
        memory: Memory
        over = overwrites(self.state, stage)
        old = None if over in self.groups else self.held.get(over)
        own = sizes[-1] > 1 and self.writer(stage) == self.reader(stage) == "V"
        if own and old and old == Held(old.memory, stage.dtype, starts, sizes, steps):
            memory = old.memory
        elif stage.name in self.groups:
            memory = self._slot(self.groups[stage.name], stage.name)
        else:
            memory = self._allocate(stage, sizes, elements)
        self.held[stage.name] = Held(memory, stage.dtype, starts, sizes, steps)
        self.filled.discard(stage.name)

    def _slot(self, group: Group, name: str) -> isa.Tile:
        if group.slot is None:
            group.slot = group.queue.alloc()
        return group.tile(name, group.slot)

    def _allocate(self, stage: Stage, sizes: tuple[int, ...], elements: int) -> Memory:
        writer = self.writer(stage)
        reader = self.reader(stage)
        if reader == writer == "V":
            return self.unit.take(stage.dtype, elements)
        partners = self._partners(stage, writer, reader)
        group = next((self.groups[n] for n in partners if n in self.groups), None)
        if group is None:
            via = any(self._by_scalar(self.state.stage(n)) for n in partners)
            pipes: dict[str, Any] = {"src": writer, "dst": reader, "via": "S" if via else ""}
            where = (stage.name, stage.scope, stage.dtype, elements)
            queue = self.builder.queue(*where, depth=stage.depth, **pipes)
            group = Group(queue, partners, {stage.name: queue.buffer})
        else:
            group.buffers[stage.name] = group.queue.join(stage.name, stage.dtype, elements)
        self.groups[stage.name] = group
        return self._slot(group, stage.name)

    def _partners(self, stage: Stage, writer: str, reader: str) -> tuple[str, ...]:
        """Return the tiles that share a queue with this one, itself included."""
        if stage.scope != "UB" or stage.name in self.fractal:
            return (stage.name,)
        return tuple(
            s.name
            for s in self.state.stages
            if isinstance(s, Stage)
            and (s.scope, s.attach, s.depth) == ("UB", stage.attach, stage.depth)
            and (self.writer(s), self.reader(s)) == (writer, reader)
            and s.name not in self.fractal
        )

    def _by_scalar(self, stage: Stage) -> bool:
        """True if single elements of a tile have to cross on the scalar unit."""
        if not self.builder.chip.combined or stage.name in self.fractal or self.smooth:
            return False
        rows = self._row_sizes(stage)
        whole = not any(n % isa.c0_of(stage.dtype) for n, _ in rows)
        return not whole and (not self.by_blocks(stage) or min(n for _, n in rows) < stage.align)

    def by_blocks(self, stage: Stage) -> bool:
        """True if the vector unit can bring the ends of ragged rows to where they belong.

        It is the only other one that touches the tile; what is stored is not read again, by it or
        for another row. No step of the copy moves a row that another step has moved: shifting the
        end of a row twice would take the second time what the first one wrote.
        """
        readers = [r for r in self.state.readers(stage.name) if isinstance(r, Stage)]
        stored = [r for r in readers if r.scope == "GM"]
        copies = stored if self.writer(stage) == "V" else [stage]
        if any(leaf.tail == "guard" and leaf.width > 1 for copy in copies for leaf in copy.loops):
            return False  # its last step is moved back over the one before
        for copy in stored:
            used = {name for r in copy.reads for i in r.index for name, _ in i.terms}
            if any(a.extent > 1 and a.name not in used for a in copy.axes):
                return False
        on_vector = len(stored) == len(readers) if self.writer(stage) == "V" else not stored
        return stage.dtype in ("fp16", "fp32") and stage.align > 1 and on_vector

    def is_narrow(self, stage: Stage) -> bool:
        """True for a tile of rows shorter than a block that is stored by blocks."""
        row = stage.shape[boxes.row_of(stage.shape)]
        stored = any(getattr(r, "scope", "") == "GM" for r in self.state.readers(stage.name))
        combined = self.builder.chip.combined and stage.name not in self.fractal
        return combined and stored and row < stage.align and self.by_blocks(stage)

    def check_ends(self, stage: Stage, has_leftover: bool) -> None:
        """Raise `ScheduleError` if elements need the scalar unit, which the queue leaves out."""
        group = self.groups.get(stage.name)
        through = group is None or group.queue.middle is not None
        if has_leftover and self.builder.chip.combined and not through:
            needed = f"rows of {stage.name} in whole blocks"
            raise ScheduleError(needed, str(stage.shape), "split by multiples of 16 elements")

    def _row_sizes(self, stage: Stage) -> set[tuple[int, int]]:
        """Return how long the rows of a tile may be, and all of neighbours, in parts of loops."""
        if not self.first:
            self.first = boxes.first_boxes(self.state, self.root)
        found: set[tuple[int, int]] = set()
        row = boxes.row_of(stage.shape)
        for host, box in self.first.items():
            nest = self.state.stage(host)
            for axis in (*nest.axes, *nest.reduce) if host != stage.name else ():
                for count in _parts(nest.loops[: schedule.loop_count(self.state, nest)], axis):
                    own = box | {axis.name: boxes.Range(isa.Affine(), count)}
                    around = {} if host == self.root else self.first
                    part = boxes.tile_sizes(self.state, stage, {**around, host: own})
                    first = row if part[row] < stage.shape[row] else max(row - 1, 0)
                    found.add((part[row], math.prod(part[first : row + 1])))
        return found

    def writer(self, stage: Stage) -> str:
        """Return the pipe that fills the tile of a stage."""
        if stage.scope != "UB":
            return PIPE_INTO[stage.scope]
        loads = stage.is_copy and self.state.find(stage.sources[0]).scope == "GM"
        return "MTE2" if loads else "V"

    def reader(self, stage: Stage) -> str:
        """Return the pipe that empties the tile of a stage; the vector unit if only it uses it."""
        found = {self._pipe_of(r, stage) for r in self.state.readers(stage.name)}
        others = found - {self.writer(stage)}
        if len(others) > 1:
            needed = f"{stage.name}: readers on one pipe"
            raise ScheduleError(needed, ", ".join(sorted(others)), "cache it twice")
        return others.pop() if others else self.writer(stage)

    def _pipe_of(self, reader: object, tile: Stage) -> str:
        assert isinstance(reader, Stage)
        if reader.scope != "GM":
            return self.writer(reader)
        return "FIX" if tile.scope == "L0C" else "MTE3"

    def fill(self, name: str) -> Group | None:
        """Note that a tile is full; return its group when all of the group are."""
        group = self.groups.get(name)
        if group is None:
            return None
        group.filled.append(name)
        return group if len(group.filled) == len(group.names) else None

    def pass_on(self, group: Group) -> None:
        """Tell the readers that all tiles of a group are full; from now on they hold them."""
        group.queue.enqueue()
        slot = group.queue.dequeue()
        for name in group.filled:
            self.held[name] = replace(self.held[name], memory=group.tile(name, slot))

    def release(self, name: str) -> None:
        """Give up a tile; the slot of a group is free when its first member goes.

        One that only the vector unit touches becomes scratch again.
        """
        held = self.held.pop(name, None)
        if held is not None and all(h.memory is not held.memory for h in self.held.values()):
            self.unit.give(held.memory)
        group = self.groups.get(name)
        if group is not None and group.slot is not None:
            group.queue.free()
            group.slot = None
            group.filled = []


def _parts(loops: Sequence[Leaf], axis: Axis) -> set[int]:
    """Return how many elements of an axis a step of its loops takes: all parts, last ones too."""
    found = {axis.extent}
    for leaf in loops:
        if leaf.root == axis.name:
            found |= {min(n, leaf.width) for n in found} | {n % leaf.width for n in found} - {0}
    return found


def _whole_blocks(state: State, stage: Stage, unit: int) -> bool:
    """True if every tile of a stage obviously has rows of whole units of so many elements."""
    widths = [x.width for x in stage.loops[: schedule.loop_count(state, stage)]]
    indices = [i for r in stage.reads for i in r.index]
    plain = all(not i.const and [c for _, c in i.terms] == [1] for i in indices)
    return plain and all(n % unit == 0 for n in (*widths, stage.shape[-1]))
