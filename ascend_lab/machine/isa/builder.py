"""Builds programs the way Ascend C does: with queues of tiles, for which it inserts the flags.

With `q = k.queue("a", "UB", "fp16", 128, src="MTE2", dst="V")`, MTE2 fills one slot of 128 numbers
while V works on the other. One pipe allocates a slot, fills it and enqueues it; another pipe
dequeues, uses and frees it. Each of the four steps emits one flag instruction. Which slot of a
queue a step means is known only when the loops around it are closed: it depends on how many slots
one pass of each loop uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from ascend_lab.errors import CapacityError, PathError, ProgramError, SyncError
from ascend_lab.limits import INSTRUCTIONS, refuse_above
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import instructions as ins
from ascend_lab.machine.isa.launch import (
    MODE_CUBE_AND_VECTOR,
    Ring,
    RingTile,
    cross_set,
    cross_wait,
)
from ascend_lab.machine.isa.memory import Affine, Buffer, Region, Tile, as_affine, var, whole_number
from ascend_lab.machine.isa.program import Event, Instruction, Loop, Node, Program

Place = tuple[str, int | str]
"""A memory space and the byte address in it, or in GM the tensor's name; views share a place."""


def place_of(buffer: Buffer) -> Place:
    """Return the key of a buffer's memory: a queue and its views have the same key."""
    return buffer.space, buffer.name if buffer.space == "GM" else buffer.address


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """A loop that is still being written.

    `slots_per_pass` says how many slots of each queue one pass uses, modulo the queue's depth: a
    pass that uses all slots ends at the slot where it began, which counts as 0.
    """

    loop: Loop
    body: list[Instruction | OpenLoop]
    slots_per_pass: dict[Place, int]


def close_loops(
    nodes: Sequence[Instruction | OpenLoop], moved: dict[Place, Affine] | None = None
) -> tuple[Node, ...]:
    """Turn open loops into `Loop`s, and give every region of a queue its slot in each pass.

    `moved` holds, for each queue, the number of slots that earlier passes of the loops around have
    used, as an expression of the loop variables.
    """
    moved = moved or {}
    closed: list[Node] = []
    for node in nodes:
        if isinstance(node, OpenLoop):
            loop = node.loop
            moved_inside = dict(moved)
            # Pass i begins i * slots further on: a queue of depth 2 that each pass of loop i uses
            # once, and each pass of the loop j around it 3 times, stands at slot (i + j) mod 2.
            for place, slots in node.slots_per_pass.items():
                moved_by_loop = Affine(0, ((loop.var, slots),))
                moved_outside = moved_inside.get(place)
                if moved_outside is None:
                    moved_inside[place] = moved_by_loop
                else:
                    moved_inside[place] = moved_outside + moved_by_loop
            closed.append(Loop(loop.var, loop.count, close_loops(node.body, moved_inside)))
        elif moved and node.regions:
            dst = None if node.dst is None else _at_moved_slot(node.dst, moved)
            srcs = tuple([_at_moved_slot(region, moved) for region in node.srcs])
            closed.append(Instruction(node.op, node.pipe, dst, srcs, node.attrs))
        else:
            closed.append(node)
    return tuple(closed)


def _at_moved_slot(region: Region, moved: dict[Place, Affine]) -> Region:
    buffer = region.buffer
    by_slots = moved.get(place_of(buffer)) if buffer.slots > 1 else None
    return region if by_slots is None else region.slots_further(by_slots)


Emit = Callable[[Instruction], None]
T = TypeVar("T")


class Slots(Generic[T]):
    """Slots of a queue, which a producer fills and a consumer empties, and the flags between them.

    `flags` holds the instruction that each step emits ("alloc", "enqueue", "dequeue", "free"),
    `counts` how often each was emitted. `members` are further buffers whose slots are filled and
    emptied together with these.
    """

    def __init__(
        self, emit: Emit, buffer: Buffer, flags: dict[str, Instruction], size: int
    ) -> None:
        """Start empty."""
        self.emit = emit
        self.buffer = buffer
        self.flags = flags
        self.size = size
        self.counts = dict.fromkeys(flags, 0)
        self.members: list[Buffer] = []

    def tile(self, slot: int) -> T:
        """Return a slot by its number."""
        raise NotImplementedError

    @property
    def opening(self) -> list[Instruction]:
        """Flags at the start of the program: every slot is handed to the producer as empty."""
        return [self.flags["free"]] * self.size if "free" in self.flags else []

    @property
    def closing(self) -> list[Instruction]:
        """Flags at the end of the program: wait until every slot is empty again."""
        return [self.flags["alloc"]] * self.size if "alloc" in self.flags else []

    def _emit_step(self, step: str) -> int:
        """Emit the flag of a step; return its number, which counts slots over the whole program."""
        self.emit(self.flags[step])
        self.counts[step] += 1
        return self.counts[step] - 1

    def alloc(self) -> T:
        """Wait (on the producer) for an empty slot and return it."""
        return self.tile(self._emit_step("alloc"))

    def enqueue(self) -> None:
        """Tell the consumer that the slot is full."""
        self._emit_step("enqueue")

    def dequeue(self) -> T:
        """Wait (on the consumer) for a full slot and return it."""
        return self.tile(self._emit_step("dequeue"))

    def free(self) -> None:
        """Give the slot back to the producer."""
        self._emit_step("free")


Start = tuple[Buffer | Tile, Affine | int]
"""The first element of a run: the buffer or tile that holds it, and its offset in there."""


class Queue(Slots[Tile]):
    """A queue of `depth` slots from one pipe to another: full flags go one way, empty flags back.

    `middle` is None or the event from the producer to a third pipe, which works on the slot before
    the consumer does; then the third pipe raises `full`.
    """

    def __init__(
        self,
        builder: KernelBuilder,
        buffer: Buffer,
        full: Event,
        empty: Event,
        middle: Event | None = None,
    ) -> None:
        """Start empty; build the four flag instructions once."""
        chip = builder.chip
        flags = {
            "alloc": ins.wait_flag(chip, empty),
            "enqueue": ins.set_flag(chip, full),
            "dequeue": ins.wait_flag(chip, full),
            "free": ins.set_flag(chip, empty),
        }
        super().__init__(builder.emit, buffer, flags, empty.count)
        self.builder = builder
        self.full = full
        self.middle = middle

    def tile(self, slot: int) -> Tile:
        """Return a slot of the buffer."""
        return Tile(self.buffer, slot)

    def join(self, name: str, dtype: str, elements: int) -> Buffer:
        """Allocate another buffer whose slots are filled and emptied together with this queue's.

        One flag then covers both, e.g. a tile of values and a tile of their scales.
        """
        space = self.buffer.space
        slots = self.buffer.slots
        self.members.append(self.builder.buffer(name, space, dtype, elements, slots))
        return self.members[-1]

    def hand(self) -> None:
        """Pass the slot from the producer to the pipe in between (`via`), which enqueues it."""
        assert self.middle is not None
        for flag in (ins.set_flag, ins.wait_flag):
            self.emit(flag(self.builder.chip, self.middle))


class RingEnd(Slots[RingTile]):
    """One end of a ring in the program of one core, which fills the slots or empties them.

    A ring passes tiles through GM from one core to another (see `launch`). Its wait (`cross_wait`)
    holds up all later instructions of the core, on every pipe; a wait of a queue holds up one pipe.
    """

    def __init__(
        self, chip: Chip, emit: Emit, ring: Ring, start: Affine, pipe: str, fills: bool
    ) -> None:
        """Start empty; build the flag instructions once."""
        # The producer waits for an empty slot and reports a full one; the consumer the reverse.
        waits, sets = (ring.empty, ring.ready) if fills else (ring.ready, ring.empty)
        names = ("alloc", "enqueue") if fills else ("dequeue", "free")
        flags = cross_wait(chip, waits), cross_set(chip, MODE_CUBE_AND_VECTOR, pipe, sets)
        super().__init__(emit, ring.buffer, dict(zip(names, flags, strict=True)), ring.slots)
        self.ring = ring
        self.start = start
        self.fills = fills

    def tile(self, slot: int) -> RingTile:
        """Return a slot of this AI core, whose elements begin at `start` in every slot."""
        return RingTile(self.ring, slot, self.start)


# -- the builder -----------------------------------------------------------------------------------
Options = ParamSpec("Options")


def _emitting(
    make: Callable[Concatenate[Chip, Options], Instruction],
) -> Callable[Concatenate[KernelBuilder, Options], None]:
    """Turn a constructor of `isa.instructions` into a builder method that emits its result."""

    def emit(builder: KernelBuilder, /, *args: Options.args, **options: Options.kwargs) -> None:
        builder.emit(make(builder.chip, *args, **options))

    emit.__doc__ = f"Emit `{make.__name__}`; see `isa.instructions`."
    return emit


class KernelBuilder:
    """Collects buffers, loops and instructions into a checked `Program` for one chip."""

    def __init__(self, name: str, chip: Chip) -> None:
        """Start an empty kernel `name` for `chip`."""
        self.name = name
        self.chip = chip
        self._emitted = 0
        self._buffers: list[Buffer] = []
        self._params: list[tuple[str, int]] = []
        self._body: list[Instruction | OpenLoop] = []
        self._queues: list[Queue | RingEnd] = []
        self._used_bytes: dict[str, int] = {}
        self._used_ids: dict[tuple[str, str], int] = {}

    def restart(self) -> None:
        """Begin another program with the same buffers and queues; to be called after `finish`."""
        self._params = []
        self._body = []
        for queue in self._queues:
            queue.counts = dict.fromkeys(queue.counts, 0)

    # -- memory ---------------------------------------------------------------------------------
    def tensor(self, name: str, dtype: str, elements: int) -> Buffer:
        """Declare a tensor in GM."""
        return self._add(Buffer(name, "GM", dtype, elements))

    def buffer(self, name: str, space: str, dtype: str, elements: int, slots: int = 1) -> Buffer:
        """Allocate `slots` equal pieces of on-chip memory, after the buffers already in `space`.

        Raises `CapacityError`, which says how many bytes are needed and how many are free.
        """
        if space not in self.chip.buffers:
            remedy = f"use {', '.join(self.chip.buffers)}, or tensor() for GM"
            raise PathError(f"{name}: on-chip memory of {self.chip.name}", space, remedy)
        unit = self.chip.alignment.get(space, 32)
        elements = whole_number(elements, f"{name}: elements")
        # 20 fp16 elements are 40 bytes: in UB, in blocks of 32, slots lie 64 bytes apart.
        slot_bytes = -(-elements * DTYPE_BYTES.get(dtype, 1) // unit) * unit
        address = self._used_bytes.get(space, 0)
        capacity = self.chip.buffers[space]
        if address + slot_bytes * slots > capacity:
            needed_bytes = slot_bytes * slots
            needed = f"{name} ({slots} x {elements} {dtype}) needs {needed_bytes} bytes of {space}"
            got = f"{capacity - address} of {capacity} bytes left on {self.chip.name}"
            raise CapacityError(needed, got, "use a smaller tile or fewer slots")
        self._used_bytes[space] = address + slot_bytes * slots
        buffer = Buffer(
            name, space, dtype, elements, slots=slots, address=address, slot_bytes=slot_bytes
        )
        return self._add(buffer)

    def used_bytes(self, space: str) -> int:
        """Return how many bytes of an on-chip memory are allocated so far."""
        return self._used_bytes.get(space, 0)

    def view(self, buffer: Buffer, name: str, dtype: str) -> Buffer:
        """Give the bytes of an on-chip buffer a second name, in another number format."""
        elements = buffer.elements * buffer.itemsize // DTYPE_BYTES[dtype]
        return self._add(replace(buffer, name=name, dtype=dtype, elements=elements))

    def _add(self, buffer: Buffer) -> Buffer:
        if any(b.name == buffer.name for b in self._buffers):
            raise ProgramError(f"{self.name}: one buffer per name", buffer.name, "rename one")
        self._buffers.append(buffer)
        return buffer

    def queue(
        self,
        name: str,
        space: str,
        dtype: str,
        elements: int,
        *,
        src: str,
        dst: str,
        depth: int = 2,
        via: str = "",
    ) -> Queue:
        """Allocate a queue of `depth` slots filled by pipe `src` and emptied by pipe `dst`.

        With `via`, that pipe works on a slot in between: src -> via -> dst.
        """
        # The first four arguments are those of `buffer`, the others name the pipes.
        buffer = self.buffer(name, space, dtype, elements, depth)
        enqueuing = via or src
        # `full` goes forward with each filled slot, `empty` goes back with each emptied one.
        full = Event(enqueuing, dst, self._take_ids(enqueuing, dst, depth), depth)
        empty = Event(dst, src, self._take_ids(dst, src, depth), depth)
        middle = Event(src, via, self._take_ids(src, via, depth), depth) if via else None
        queue = Queue(self, buffer, full, empty, middle)
        self._queues.append(queue)
        return queue

    def ring_out(self, ring: Ring, core: Affine | int, pipe: str) -> RingEnd:
        """Return the producer's end of a ring; `pipe` fills the slots of AI core `core`."""
        return self._ring_end(ring, core, pipe, fills=True)

    def ring_in(self, ring: Ring, core: Affine | int, pipe: str) -> RingEnd:
        """Return the consumer's end of a ring; `pipe` empties the slots of AI core `core`."""
        return self._ring_end(ring, core, pipe, fills=False)

    def _ring_end(self, ring: Ring, core: Affine | int, pipe: str, *, fills: bool) -> RingEnd:
        self._add(ring.buffer)
        end = RingEnd(self.chip, self.emit, ring, as_affine(core) * ring.elements, pipe, fills)
        self._queues.append(end)
        return end

    def _take_ids(self, src: str, dst: str, count: int) -> int:
        """Reserve `count` consecutive event ids for a pair of pipes; return the first."""
        first_id = self._used_ids.get((src, dst), 0)
        id_count = first_id + count
        self._used_ids[src, dst] = id_count
        if id_count > self.chip.event_ids:
            raise CapacityError(
                f"{self.name}: {id_count} event ids for {src}>{dst}",
                str(self.chip.event_ids),
                "use fewer queues or a smaller depth between these pipes",
            )
        return first_id

    # -- control --------------------------------------------------------------------------------
    def param(self, name: str, count: int) -> Affine:
        """Declare a parameter that the launch sets per core, 0 .. count-1; return its value."""
        self._params.append((name, count))
        return var(name)

    @contextmanager
    def loop(self, name: str, count: int) -> Iterator[Affine]:
        """Repeat the instructions written inside the `with` block.

        One pass must fill and empty each queue equally often; raises `SyncError` otherwise.
        """
        opened = OpenLoop(Loop(name, count, ()), [], {})
        outer_body = self._body
        self._body = opened.body
        entry_counts = [queue.counts.copy() for queue in self._queues]
        yield var(name)
        self._body = outer_body
        # A queue that was allocated inside the loop had no steps when the loop began.
        new_queues = self._queues[len(entry_counts) :]
        entry_counts += [dict.fromkeys(queue.counts, 0) for queue in new_queues]
        for queue, at_entry in zip(self._queues, entry_counts, strict=True):
            if queue.counts == at_entry:
                continue
            steps = {key: now - at_entry[key] for key, now in queue.counts.items()}
            slots_per_pass, *unequal = set(steps.values())
            if unequal:
                needed = f"loop {name}: as many {_step_names(queue)} of {queue.buffer.name}"
                raise SyncError(needed, str(steps), "pair them inside the loop body")
            # A queue of 2 slots of which a pass uses 3: each pass begins 1 slot further on.
            if moved := slots_per_pass % queue.buffer.slots:
                buffers = (queue.buffer, *queue.members)
                opened.slots_per_pass.update((place_of(buffer), moved) for buffer in buffers)
            # The body is written once and runs `count` times: add the slots of the other passes.
            other_passes = slots_per_pass * (opened.loop.count - 1)
            queue.counts = {key: now + other_passes for key, now in queue.counts.items()}
        self._body.append(opened)

    def emit(self, instruction: Instruction) -> None:
        """Append an instruction that a constructor of `isa.instructions` has made."""
        self._emitted += 1
        refuse_above(f"{self.name}: instructions", self._emitted, INSTRUCTIONS, kind=CapacityError)
        self._body.append(instruction)

    # -- instructions ---------------------------------------------------------------------------
    copy = _emitting(ins.data_copy)
    load2d = _emitting(ins.load2d)
    load3d = _emitting(ins.load3d)
    mmad = _emitting(ins.mmad)
    fixpipe = _emitting(ins.fixpipe)
    vector = _emitting(ins.vector)
    vdeq = _emitting(ins.vdeq)
    scalar = _emitting(ins.scalar)
    barrier = _emitting(ins.barrier)
    cross_set = _emitting(cross_set)
    cross_wait = _emitting(cross_wait)

    def copy_row(
        self, dst: Region, src: Region, index: Region, pitch: int, bound: int, **options: Any
    ) -> None:
        """Emit a `data_copy` whose GM side is row `index` of `bound`, `pitch` elements apart."""
        self.copy(dst, src, index=index, pitch=pitch, bound=bound, **options)

    def runs(self, elements: int, lanes: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield (first element, (repeats, lanes)) for `elements` contiguous elements.

        An entry has at most `max_repeat` whole repeats; the last one may be the lanes that remain.

        300 elements with 128 lanes (fp16): (0, (2, 128)), then (256, (1, 44)).
        """
        start = 0
        while start < elements:
            repeats = min((elements - start) // lanes, self.chip.max_repeat)
            shape = (repeats, lanes) if repeats else (1, elements - start)
            yield start, shape
            start += shape[0] * shape[1]

    def each(self, op: str, elements: int, *operands: Start, **options: Any) -> None:
        """Emit a vector instruction on a run of `elements` of each operand, destination first.

        An operand is a pair (buffer or tile, offset of its first element).
        """
        buffers = [m.buffer if isinstance(m, Tile) else m for m, _ in operands]
        # The widest format decides: 256 bytes a repeat are 64 lanes as soon as one operand is fp32.
        lanes = self.chip.vector_bytes_per_repeat // max(buffer.itemsize for buffer in buffers)
        for start, shape in self.runs(elements, lanes):
            regions = [memory.region(offset + start, shape) for memory, offset in operands]
            self.vector(op, *regions, **options)

    def set_flag(self, src: str, dst: str, event_id: int) -> None:
        """Emit a `set_flag` outside any queue."""
        self.emit(ins.set_flag(self.chip, Event(src, dst, event_id)))

    def wait_flag(self, src: str, dst: str, event_id: int) -> None:
        """Emit a `wait_flag` outside any queue."""
        self.emit(ins.wait_flag(self.chip, Event(src, dst, event_id)))

    def finish(self) -> Program:
        """Return the checked program; all slots start empty and must end empty."""
        for queue in self._queues:
            if len(set(queue.counts.values())) != 1:
                needed = f"{self.name}: as many {_step_names(queue)} of {queue.buffer.name}"
                raise SyncError(needed, str(queue.counts), "pair them")
        # An unused queue needs no flags: another program on the same builder may use it.
        used_queues = [q for q in self._queues if any(q.counts.values())]
        opening = [flag for q in used_queues for flag in q.opening]
        closing = [flag for q in used_queues for flag in q.closing]
        # A depth of 2 opens with two set_flags from consumer to producer, so that the first two
        # allocs do not wait, and closes with two wait_flags: no flag stays up after the program.
        body = (*opening, *close_loops(self._body), *closing)
        program = Program(self.name, tuple(self._buffers), body, tuple(self._params))
        return ins.check_program(self.chip, program)


def _step_names(queue: Queue | RingEnd) -> str:
    """Return the steps of a queue as messages list them: "alloc, enqueue, dequeue and free"."""
    *first_names, last_name = queue.counts
    return f"{', '.join(first_names)} and {last_name}"
