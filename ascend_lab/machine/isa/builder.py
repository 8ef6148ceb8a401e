"""Write a kernel the way Ascend C does: queues of tiles; the builder inserts the flags.

Slots of queues and rings are numbered over the turns of the loops a builder has open.
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
from ascend_lab.machine.isa.launch import BETWEEN, Ring, RingTile, cross_set, cross_wait
from ascend_lab.machine.isa.memory import Affine, Buffer, Region, Tile, as_affine, var, whole
from ascend_lab.machine.isa.program import Event, Instruction, Loop, Node, Program

Place = tuple[str, int | str]
"""Memory space and address: a buffer and its views share one; in GM the name."""


def place_of(buffer: Buffer) -> Place:
    """Return where a buffer lies."""
    return buffer.space, buffer.name if buffer.space == "GM" else buffer.address


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """A loop while it is written: its body so far, and the slots by which a pass moves its queues.

    Whole turns of a queue count as none.
    """

    loop: Loop
    body: list[Instruction | OpenLoop]
    steps: dict[Place, int]


def closed(
    nodes: Sequence[Instruction | OpenLoop], turns: dict[Place, Affine] | None = None
) -> tuple[Node, ...]:
    """Close the loops and number the slots: pass i of a loop starts `steps` * i slots further.

    `turns` is how far each queue has moved in the loops around.
    """
    turns = turns or {}
    out: list[Node] = []
    for node in nodes:
        if isinstance(node, OpenLoop):
            loop = node.loop
            inner = dict(turns)
            for place, step in node.steps.items():
                turn = Affine(0, ((loop.var, step),))
                inner[place] = inner[place] + turn if place in inner else turn
            out.append(Loop(loop.var, loop.count, closed(node.body, inner)))
        elif turns and node.regions:
            dst = None if node.dst is None else _turned(node.dst, turns)
            srcs = tuple([_turned(region, turns) for region in node.srcs])
            out.append(Instruction(node.op, node.pipe, dst, srcs, node.attrs))
        else:
            out.append(node)
    return tuple(out)


def _turned(region: Region, turns: dict[Place, Affine]) -> Region:
    buffer = region.buffer
    turn = turns.get(place_of(buffer)) if buffer.slots > 1 else None
    return region if turn is None else region.turned(turn)


Emit = Callable[[Instruction], None]
T = TypeVar("T")


class Slots(Generic[T]):
    """Slots that a producer fills and a consumer empties: its flags, and how often each was used.

    `members` are further buffers whose slots are filled and emptied together with these.
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
        """What the program begins with: all slots are empty."""
        return [self.flags["free"]] * self.size if "free" in self.flags else []

    @property
    def closing(self) -> list[Instruction]:
        """What the program ends with: all slots are empty again."""
        return [self.flags["alloc"]] * self.size if "alloc" in self.flags else []

    def _step(self, what: str) -> int:
        self.emit(self.flags[what])
        self.counts[what] += 1
        return self.counts[what] - 1

    def alloc(self) -> T:
        """Wait (on the producer) for an empty slot and return it."""
        return self.tile(self._step("alloc"))

    def enqueue(self) -> None:
        """Tell the consumer that the slot is full."""
        self._step("enqueue")

    def dequeue(self) -> T:
        """Wait (on the consumer) for a full slot and return it."""
        return self.tile(self._step("dequeue"))

    def free(self) -> None:
        """Give the slot back to the producer."""
        self._step("free")


Start = tuple[Buffer | Tile, Affine | int]
"""Where a run of elements begins: in which memory, at which element."""


class Queue(Slots[Tile]):
    """`depth` slots passed from one pipe to another: full flags one way, empty flags back."""

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
        """Allocate another buffer whose slots are filled and emptied together with this queue's."""
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
    """One end of a ring in the program of one core: `fills` slots, or empties them.

    Its waits hold up all that is written behind them.
    """

    def __init__(
        self, chip: Chip, emit: Emit, ring: Ring, start: Affine, pipe: str, fills: bool
    ) -> None:
        """Start empty; build the flag instructions once."""
        waits, sets = (ring.empty, ring.ready) if fills else (ring.ready, ring.empty)
        names = ("alloc", "enqueue") if fills else ("dequeue", "free")
        steps = cross_wait(chip, waits), cross_set(chip, BETWEEN, pipe, sets)
        super().__init__(emit, ring.buffer, dict(zip(names, steps, strict=True)), ring.slots)
        self.ring = ring
        self.start = start
        self.fills = fills

    def tile(self, slot: int) -> RingTile:
        """Return a slot of the AI core's own."""
        return RingTile(self.ring, slot, self.start)


# -- the builder -----------------------------------------------------------------------------------
Options = ParamSpec("Options")


def _emitting(
    make: Callable[Concatenate[Chip, Options], Instruction],
) -> Callable[Concatenate[KernelBuilder, Options], None]:
    """Return the method of a builder that emits what `make` makes on its chip."""

    def emit(k: KernelBuilder, /, *args: Options.args, **options: Options.kwargs) -> None:
        k.emit(make(k.chip, *args, **options))

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
        """Begin another program on the same buffers and queues, once one is finished."""
        self._params = []
        self._body = []
        for queue in self._queues:
            queue.counts = dict.fromkeys(queue.counts, 0)

    # -- memory ---------------------------------------------------------------------------------
    def tensor(self, name: str, dtype: str, elements: int) -> Buffer:
        """Declare a tensor in GM."""
        return self._add(Buffer(name, "GM", dtype, elements))

    def buffer(self, name: str, space: str, dtype: str, elements: int, slots: int = 1) -> Buffer:
        """Allocate `slots` on-chip pieces behind what is already allocated in `space`.

        Raises `CapacityError` with the bytes needed and left.
        """
        if space not in self.chip.buffers:
            remedy = f"use {', '.join(self.chip.buffers)}, or tensor() for GM"
            raise PathError(f"{name}: on-chip memory of {self.chip.name}", space, remedy)
        unit = self.chip.alignment.get(space, 32)
        elements = whole(elements, f"{name}: elements")
        pitch = -(-elements * DTYPE_BYTES.get(dtype, 1) // unit) * unit
        start = self._used_bytes.get(space, 0)
        size = self.chip.buffers[space]
        if start + pitch * slots > size:
            needed = f"{name} ({slots} x {elements} {dtype}) needs {pitch * slots} bytes of {space}"
            got = f"{size - start} of {size} bytes left on {self.chip.name}"
            raise CapacityError(needed, got, "use a smaller tile or fewer slots")
        self._used_bytes[space] = start + pitch * slots
        return self._add(Buffer(name, space, dtype, elements, slots, start, pitch))

    def used_bytes(self, space: str) -> int:
        """Return the bytes of an on-chip memory that are allocated."""
        return self._used_bytes.get(space, 0)

    def view(self, buffer: Buffer, name: str, dtype: str) -> Buffer:
        """Name the bytes of an on-chip buffer once more, in another number format."""
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
        buffer = self.buffer(name, space, dtype, elements, depth)
        last = via or src
        full = Event(last, dst, self._take_ids(last, dst, depth), depth)
        empty = Event(dst, src, self._take_ids(dst, src, depth), depth)
        middle = Event(src, via, self._take_ids(src, via, depth), depth) if via else None
        queue = Queue(self, buffer, full, empty, middle)
        self._queues.append(queue)
        return queue

    def ring_out(self, ring: Ring, core: Affine | int, pipe: str) -> RingEnd:
        """Return the end of a ring that `pipe` fills, of AI core number `core` of the launch."""
        return self._ring_end(ring, core, pipe, fills=True)

    def ring_in(self, ring: Ring, core: Affine | int, pipe: str) -> RingEnd:
        """Return the end of a ring that `pipe` empties, of AI core number `core` of the launch."""
        return self._ring_end(ring, core, pipe, fills=False)

    def _ring_end(self, ring: Ring, core: Affine | int, pipe: str, *, fills: bool) -> RingEnd:
        self._add(ring.buffer)
        end = RingEnd(self.chip, self.emit, ring, as_affine(core) * ring.elements, pipe, fills)
        self._queues.append(end)
        return end

    def _take_ids(self, src: str, dst: str, count: int) -> int:
        first = self._used_ids.get((src, dst), 0)
        self._used_ids[src, dst] = first + count
        if first + count > self.chip.event_ids:
            raise CapacityError(
                f"{self.name}: {first + count} event ids for {src}>{dst}",
                str(self.chip.event_ids),
                "use fewer queues or a smaller depth between these pipes",
            )
        return first

    # -- control --------------------------------------------------------------------------------
    def param(self, name: str, count: int) -> Affine:
        """Declare a value set per core at launch, 0 .. count-1, and return it."""
        self._params.append((name, count))
        return var(name)

    @contextmanager
    def loop(self, name: str, count: int) -> Iterator[Affine]:
        """Repeat what is written inside; queues must be left as full as they were found."""
        opened = OpenLoop(Loop(name, count, ()), [], {})
        outer = self._body
        self._body = opened.body
        before = [queue.counts.copy() for queue in self._queues]
        yield var(name)
        self._body = outer
        before += [dict.fromkeys(q.counts, 0) for q in self._queues[len(before) :]]
        for queue, start in zip(self._queues, before, strict=True):
            if queue.counts == start:
                continue
            steps = {key: now - start[key] for key, now in queue.counts.items()}
            step, *others = set(steps.values())
            if others:
                needed = f"loop {name}: as many {_steps(queue)} of {queue.buffer.name}"
                raise SyncError(needed, str(steps), "pair them inside the loop body")
            if slots := step % queue.buffer.slots:
                held = (queue.buffer, *queue.members)
                opened.steps.update((place_of(b), slots) for b in held)
            further = step * (opened.loop.count - 1)
            queue.counts = {key: now + further for key, now in queue.counts.items()}
        self._body.append(opened)

    def emit(self, instruction: Instruction) -> None:
        """Append any instruction (raw mode: build it with `isa.instructions`)."""
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
        """Yield (first element, (repeats, lanes)) over a run: whole repeats, then last lanes."""
        done = 0
        while done < elements:
            repeats = min((elements - done) // lanes, self.chip.max_repeat)
            shape = (repeats, lanes) if repeats else (1, elements - done)
            yield done, shape
            done += shape[0] * shape[1]

    def each(self, op: str, elements: int, *places: Start, **options: Any) -> None:
        """Emit a vector instruction on runs of neighbours; `places` are (buffer or tile, first).

        The destination stands first; a repeat holds as many elements as of the widest format fit.
        """
        buffers = [m.buffer if isinstance(m, Tile) else m for m, _ in places]
        lanes = self.chip.vector_bytes_per_repeat // max(buffer.itemsize for buffer in buffers)
        for at, shape in self.runs(elements, lanes):
            regions = [memory.region(first + at, shape) for memory, first in places]
            self.vector(op, *regions, **options)

    def set_flag(self, src: str, dst: str, event_id: int) -> None:
        """Emit `set_flag` by hand."""
        self.emit(ins.set_flag(self.chip, Event(src, dst, event_id)))

    def wait_flag(self, src: str, dst: str, event_id: int) -> None:
        """Emit `wait_flag` by hand."""
        self.emit(ins.wait_flag(self.chip, Event(src, dst, event_id)))

    def finish(self) -> Program:
        """Return the checked program; all slots start empty and must end empty."""
        for queue in self._queues:
            if len(set(queue.counts.values())) != 1:
                needed = f"{self.name}: as many {_steps(queue)} of {queue.buffer.name}"
                raise SyncError(needed, str(queue.counts), "pair them")
        used = [q for q in self._queues if any(q.counts.values())]
        opening = [flag for q in used for flag in q.opening]
        closing = [flag for q in used for flag in q.closing]
        body = (*opening, *closed(self._body), *closing)
        program = Program(self.name, tuple(self._buffers), body, tuple(self._params))
        return ins.check_program(self.chip, program)


def _steps(queue: Queue | RingEnd) -> str:
    *names, last = queue.counts
    return f"{', '.join(names)} and {last}"
