"""What L2 holds from one kernel to the next: pieces of device memory, longest unused out first.

A write makes a piece dirty; dirty pieces are written to memory when they leave, so data that is
overwritten while it lies in L2 never gets there. The tensors of one phase stream side by side: when
a third of one is done, so is a third of every other. Of a piece L2 holds what was touched, so small
tensors take no more room than they need; neighbours become one range, dirty from the first byte
written to the last. What is read for the last time is dropped as it is read, and what of it was not
there is not kept either.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ascend_lab import errors
from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim.cost import Traffic, lowest_bytes

PIECES = 256
"""Pieces L2 is cut into by `L2.of`."""
ALIGN_BYTES = 512
Step = tuple[float, bool, int, int, int, int]
"""Position in the phase, written or read, rank of the access, piece, first byte, end."""
Held = tuple[int, int, int, int]
"""A range of a piece: first byte, end, first dirty byte, end of the dirty ones (equal: clean)."""


@dataclass(frozen=True, slots=True)
class Access:
    """A phase reads, or writes, bytes `address_bytes` .. `address_bytes + size_bytes - 1` once.

    `is_last`: nobody reads them again.
    """

    name: str
    address_bytes: int
    size_bytes: int
    is_write: bool = False
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What L2 did in one phase: share of each tensor's read bytes that hit, dirty bytes evicted."""

    hits: Mapping[str, float]
    write_back_bytes: int


class L2:
    """A cache of `size_bytes` over device memory, kept by pieces; `touch` changes its state."""

    def __init__(self, size_bytes: int, piece_bytes: int) -> None:
        """Start empty; raise `SimulationError` for a piece that is empty or does not fit."""
        if not 0 < piece_bytes <= size_bytes:
            needed = f"pieces of 1 to {size_bytes} bytes"
            raise errors.SimulationError(needed, str(piece_bytes), "use L2.of(chip)")
        self.size_bytes = size_bytes
        self.piece_bytes = piece_bytes
        self.held_bytes = 0
        # the ranges held of each piece, the longest unused in front
        self._pieces: OrderedDict[int, tuple[Held, ...]] = OrderedDict()

    @classmethod
    def of(cls, chip: Chip) -> "L2":
        """Return the empty L2 of a chip in at most PIECES pieces."""
        return cls(chip.l2.size_bytes, -(-chip.l2.size_bytes // PIECES))

    def touch(self, accesses: Sequence[Access]) -> Outcome:
        """Run one phase: all accesses side by side, reads before writes of the same place.

        Between what evicts everything older and what is still there at the end nothing can hit;
        in phases much larger than L2 those pieces are not visited one by one.
        """
        used = [a for a in accesses if a.size_bytes > 0]
        edge = self._edge(used)
        hit: dict[str, int] = {}
        written = self._run(used, 0.0, edge, hit)
        if edge < 0.5:
            written += self.flush()
            self._pieces.clear()
            self.held_bytes = 0
            written += sum(self._skipped(a, edge) for a in used if a.is_write)
            written += self._run(used, 1.0 - edge, 1.0, hit)
        read: dict[str, int] = {}
        for a in used:
            if not a.is_write:
                read[a.name] = read.get(a.name, 0) + a.size_bytes
        return Outcome({n: min(1.0, hit.get(n, 0) / size) for n, size in read.items()}, written)

    def discard(self, address_bytes: int, size_bytes: int) -> None:
        """Forget bytes that nobody reads again: dirty ones are never written to memory."""
        low = address_bytes
        stop = address_bytes + size_bytes
        pieces = self._pieces
        keys = range(low // self.piece_bytes, -(-stop // self.piece_bytes))
        for key in keys if len(keys) < len(pieces) else [key for key in pieces if key in keys]:
            if key not in pieces:
                continue
            left = tuple(part for held in pieces[key] for part in _without(held, low, stop))
            self.held_bytes += sum(b - a for a, b, _, _ in left)
            self.held_bytes -= sum(b - a for a, b, _, _ in pieces[key])
            if left:
                pieces[key] = left
            else:
                del pieces[key]

    def flush(self) -> int:
        """Return the dirty bytes, written to memory now; they stay in L2, clean."""
        dirty = sum(d - c for held in self._pieces.values() for _, _, c, d in held)
        for key, held in self._pieces.items():
            self._pieces[key] = tuple((a, b, a, a) for a, b, _, _ in held)
        return dirty

    def copy(self) -> "L2":
        """Return an L2 of its own with the same contents."""
        other = L2(self.size_bytes, self.piece_bytes)
        other.held_bytes, other._pieces = self.held_bytes, self._pieces.copy()
        return other

    def _edge(self, accesses: Sequence[Access]) -> float:
        """Return the share of a phase after which nothing older is left; 1.0 unless below 0.5."""
        different = [0, 0]
        for is_write in (False, True):
            sizes: dict[int, int] = {}
            for a in accesses:
                if a.is_write is is_write and not a.is_last:
                    sizes[a.address_bytes] = max(a.size_bytes, sizes.get(a.address_bytes, 0))
            different[is_write] = sum(sizes.values())
        enough = self.size_bytes + (len(accesses) + 1) * self.piece_bytes
        return enough / max(different) if 2 * enough < max(different) else 1.0

    def _keys(self, a: Access, begin: float, end: float) -> range:
        """Return the pieces of an access from one share of it to another, whole pieces only."""
        first = a.address_bytes // self.piece_bytes
        piece = self.piece_bytes
        last = -(-(a.address_bytes + a.size_bytes) // piece)
        cuts = [a.address_bytes + int(share * a.size_bytes) for share in (begin, end)]
        start = first if begin == 0.0 else -(-cuts[0] // piece)
        return range(start, last if end == 1.0 else -(-cuts[1] // piece))

    def _skipped(self, a: Access, edge: float) -> int:
        """Return the bytes of an access between the two ends that are visited."""
        keys = self._keys(a, edge, 1.0 - edge)
        stop = min(a.address_bytes + a.size_bytes, keys.stop * self.piece_bytes)
        return max(0, stop - keys.start * self.piece_bytes)

    def _steps(self, accesses: Sequence[Access], begin: float, end: float) -> Iterator[Step]:
        piece = self.piece_bytes
        for rank, a in enumerate(accesses):
            stop = a.address_bytes + a.size_bytes
            for key in self._keys(a, begin, end):
                low = max(a.address_bytes, key * piece)
                at = (low - a.address_bytes) / a.size_bytes
                yield at, a.is_write, rank, key, low, min(stop, (key + 1) * piece)

    def _run(
        self, accesses: Sequence[Access], begin: float, end: float, hit: dict[str, int]
    ) -> int:
        """Use the pieces in order; add to the bytes hit per tensor, return the bytes evicted."""
        written = 0
        pieces = self._pieces
        for _, is_write, rank, key, low, stop in sorted(self._steps(accesses, begin, end)):
            held = pieces.pop(key, ())
            near = held
            rest = held[:0]
            if len(held) > 1 or (held and not _touch(held[0], low, stop)):
                near = tuple(r for r in held if _touch(r, low, stop))
                rest = tuple(r for r in held if not _touch(r, low, stop))
            found = 0
            for a, b, _, _ in near:
                found += max(0, min(b, stop) - max(a, low))
                self.held_bytes -= b - a
            if not is_write:
                name = accesses[rank].name
                hit[name] = hit.get(name, 0) + found
            if accesses[rank].is_last:
                merged = tuple(part for held in near for part in _without(held, low, stop))
            else:
                merged = (_merged(near, low, stop, is_write),)
            for a, b, _, _ in merged:
                self.held_bytes += b - a
            if left := (*rest, *merged):
                pieces[key] = left
            while self.held_bytes > self.size_bytes:
                for a, b, c, d in pieces.popitem(last=False)[1]:
                    self.held_bytes -= b - a
                    written += d - c
        return written


def _touch(held: Held, low: int, stop: int) -> bool:
    """Tell whether a range and bytes low .. stop-1 overlap, or have less than a block between."""
    return held[0] <= stop + ALIGN_BYTES and low <= held[1] + ALIGN_BYTES


def _merged(near: Sequence[Held], low: int, stop: int, is_write: bool) -> Held:
    """Return the range that holds all of `near`, and bytes low .. stop-1."""
    first = low
    end = stop
    dirty, clean = (low, stop) if is_write else (0, 0)
    for a, b, c, d in near:
        first = min(first, a)
        end = max(end, b)
        if c < d:
            dirty, clean = (min(dirty, c), max(clean, d)) if dirty < clean else (c, d)
    return (first, end, dirty, clean) if dirty < clean else (first, end, first, first)


def _without(held: Held, low: int, stop: int) -> Iterator[Held]:
    """Yield what is left of a range without bytes low .. stop-1."""
    first, end, dirty, clean = held
    for a, b in ((first, min(end, low)), (max(first, stop), end)):
        if a < b:
            c = max(a, dirty)
            d = min(b, clean)
            yield (a, b, c, d) if c < d else (a, b, a, a)


@dataclass(frozen=True, slots=True)
class Scratch:
    """An L2 that is a buffer, during one kernel: it holds the tensors that were put there."""

    names: frozenset[str]

    def touch(self, accesses: Sequence[Access]) -> Outcome:
        """Run one phase: what is not held is read from memory, and written there."""
        hits = {a.name: float(a.name in self.names) for a in accesses if not a.is_write}
        away = (a.size_bytes for a in accesses if a.is_write and a.name not in self.names)
        return Outcome(hits, sum(away))


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """L2, and where the tensors of the next kernel lie: name to (address, size) in bytes.

    It is the `last` kernel that reads some of them.

    Tensors without an address stand one after another from `workspace_bytes` on, by default behind
    the highest that has one.
    """

    l2: L2 | Scratch
    tensors: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    workspace_bytes: int | None = None
    last: frozenset[str] = frozenset()

    @classmethod
    def of(cls, chip: Chip, workspace_bytes: int | None = None) -> "DeviceMemory":
        """Return the memory of a chip with an empty L2."""
        return cls(L2.of(chip), {}, workspace_bytes)

    @classmethod
    def holding(
        cls, chip: Chip, tensors: Sequence[isa.Buffer], names: Collection[str]
    ) -> "DeviceMemory":
        """Return the memory of a chip whose L2 has read those `tensors` that `names` lists."""
        memory = cls.of(chip)
        addresses = memory.addresses(tensors)
        held = [b for b in tensors if b.name in names]
        memory.l2.touch([Access(b.name, addresses[b.name], b.size_bytes) for b in held])
        return memory

    def at(self, tensors: Mapping[str, tuple[int, int]]) -> "DeviceMemory":
        """Return the same memory, L2 included, with the tensors of another kernel."""
        return replace(self, tensors=tensors)

    def addresses(self, buffers: Sequence[isa.Buffer]) -> dict[str, int]:
        """Return the first byte of every tensor.

        Raises `SimulationError` if one has no room, or an address belongs to none of them.
        """
        names = [buffer.name for buffer in buffers]
        if unknown := sorted(self.tensors.keys() - set(names)):
            needed = f"addresses of {', '.join(names)}"
            raise errors.SimulationError(needed, ", ".join(unknown), "name them as the kernel does")
        top = max((low + size for low, size in self.tensors.values()), default=0)
        top = top if self.workspace_bytes is None else self.workspace_bytes
        found = {}
        for buffer in buffers:
            if buffer.name not in self.tensors:
                found[buffer.name] = top = -(-top // ALIGN_BYTES) * ALIGN_BYTES
                top += buffer.size_bytes
                continue
            low, size = self.tensors[buffer.name]
            if low < 0 or size < buffer.size_bytes:
                raise errors.SimulationError(
                    f"{buffer.size_bytes} bytes at 0 or above for tensor {buffer.name}",
                    f"{size} at {low}",
                    "plan the memory for this kernel's tensors",
                )
            found[buffer.name] = low
        return found


def accesses_of(
    launch: isa.Launch,
    traffic: Traffic,
    addresses: Mapping[str, int],
    last: frozenset[str] = frozenset(),
) -> tuple[Access, ...]:
    """Return what a launch touches in L2: the different bytes of each tensor, reads first.

    A tensor of `last` is dropped as it is read, if this reads every byte once.
    """
    lowest = lowest_bytes(launch)
    dropped = {name for name in last if traffic.reads_once(name)}
    return tuple(
        Access(
            name,
            addresses[name] + lowest[name, is_write],
            size,
            is_write,
            name in dropped and not is_write,
        )
        for is_write, sizes in ((False, traffic.read_once), (True, traffic.write_once))
        for name, size in sizes.items()
    )
