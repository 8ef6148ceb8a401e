"""Open loops of a builder, and a ring of slots in GM.

Tiles pass between the cube core and the vector cores of an AI core. The producer waits for an empty
slot, stores a tile and tells that it is ready; the consumer waits for that, loads it and tells that
the slot is empty. What the cores exchange stays in L2. Source of the protocol:
hw-native-sys/pto-isa, TPush.hpp (with one message a tile).

Slots of queues and rings are numbered over the turns of the loops a builder has open.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ascend_lab.chip import Chip
from ascend_lab.errors import CapacityError
from ascend_lab.isa.cross import LIMIT, cross_set, cross_wait
from ascend_lab.isa.memory import Affine, Buffer, Region, var
from ascend_lab.isa.program import Instruction, Loop, Node

Place = tuple[str, int | str]
"""Memory space and address: a buffer and its views share one; in GM the name."""


def place_of(buffer: Buffer) -> Place:
    """Return where a buffer lies."""
    return buffer.space, buffer.name if buffer.space == "GM" else buffer.address


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """A loop while it is written: its body so far, and how many slots its queues move on a pass."""

    loop: Loop
    body: "list[Instruction | OpenLoop]"
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
            loop, inner = node.loop, dict(turns)
            for place, step in node.steps.items():
                inner[place] = inner.get(place, Affine()) + var(loop.var) * step
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


# -- slots -----------------------------------------------------------------------------------------
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
        self.emit, self.buffer, self.flags, self.size = emit, buffer, flags, size
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


# -- a ring of slots -------------------------------------------------------------------------------
BETWEEN = 2
"""The mode of flags between a cube core and its vector cores."""


@dataclass(frozen=True, slots=True)
class Ring:
    """`slots` tiles of `elements` for each of `cores` AI cores, and its two flag ids.

    `ready` tells that a slot is full, `empty` that it is free again.
    """

    name: str
    dtype: str
    elements: int
    slots: int
    cores: int
    ready: int
    empty: int

    def __post_init__(self) -> None:
        """Check that the counters can hold all slots."""
        if not 1 <= self.slots <= LIMIT or self.ready == self.empty:
            needed = f"ring {self.name}: 1 to {LIMIT} slots, and two different flag ids"
            got = f"{self.slots} slots, ids {self.ready} and {self.empty}"
            raise CapacityError(needed, got, "use fewer slots, other ids")

    @property
    def buffer(self) -> Buffer:
        """The tensor in GM: slot by slot, AI core by AI core."""
        return Buffer(self.name, "GM", self.dtype, self.elements * self.cores, self.slots)


@dataclass(frozen=True, slots=True)
class RingTile:
    """A slot of one AI core's ring, held between alloc/enqueue or dequeue/free."""

    ring: Ring
    slot: int
    start: Affine

    def region(
        self,
        offset: Affine | int = 0,
        sizes: Sequence[int] | int | None = None,
        strides: Sequence[int] | None = None,
    ) -> Region:
        """Return a region of the tile, as `Buffer.region`; default: the whole tile."""
        sizes = self.ring.elements if sizes is None else sizes
        return self.ring.buffer.region(self.start + offset, sizes, strides, slot=self.slot)


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
        self.ring, self.start = ring, start

    def tile(self, slot: int) -> RingTile:
        """Return a slot of the AI core's own."""
        return RingTile(self.ring, slot, self.start)
