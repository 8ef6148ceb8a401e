"""Open loops of a builder, and a ring of slots in GM.

Tiles pass between the cube core and the vector cores of an AI core. The producer waits for an empty
slot, stores a tile and tells that it is ready; the consumer waits for that, loads it and tells that
the slot is empty. What the cores exchange stays in L2. Source of the protocol:
hw-native-sys/pto-isa, TPush.hpp (with one message a tile).

Slots of queues and rings are numbered over the turns of the loops a builder has open.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class RingEnd:
    """One end of a ring in the program of one core: `fills` slots, or empties them."""

    chip: Chip
    emit: Callable[[Instruction], None]
    ring: Ring
    start: Affine
    pipe: str
    fills: bool
    counts: dict[str, int] = field(init=False)
    members: list[Buffer] = field(init=False, default_factory=list)
    flags: dict[str, Instruction] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Start empty; build the flag instructions once."""
        chip, ring = self.chip, self.ring
        waits, sets = (ring.empty, ring.ready) if self.fills else (ring.ready, ring.empty)
        names = ("alloc", "enqueue") if self.fills else ("dequeue", "free")
        steps = cross_wait(chip, waits), cross_set(chip, BETWEEN, self.pipe, sets)
        self.flags = dict(zip(names, steps, strict=True))
        self.counts = dict.fromkeys(names, 0)

    @property
    def buffer(self) -> Buffer:
        """The tensor in GM."""
        return self.ring.buffer

    @property
    def opening(self) -> list[Instruction]:
        """What the program begins with: all slots are empty."""
        return [] if self.fills else [self.flags["free"]] * self.ring.slots

    @property
    def closing(self) -> list[Instruction]:
        """What the program ends with: all slots are empty again."""
        return [self.flags["alloc"]] * self.ring.slots if self.fills else []

    def _step(self, what: str) -> RingTile:
        self.emit(self.flags[what])
        self.counts[what] += 1
        return RingTile(self.ring, self.counts[what] - 1, self.start)

    def alloc(self) -> RingTile:
        """Wait for an empty slot and return it; holds up all that is written behind."""
        return self._step("alloc")

    def enqueue(self) -> None:
        """Tell the other side that the slot is full."""
        self._step("enqueue")

    def dequeue(self) -> RingTile:
        """Wait for a full slot and return it; holds up all that is written behind."""
        return self._step("dequeue")

    def free(self) -> None:
        """Give the slot back to the other side."""
        self._step("free")
