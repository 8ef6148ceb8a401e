"""Simulates the L2 cache, whose contents stay from one kernel to the next.

Device memory is divided into pieces (192 KB for an L2 of 48 MB), and L2 evicts the piece that was
least recently used. A write makes bytes dirty. Dirty bytes are written to memory when their piece
is evicted, so that data which is overwritten while it is in L2 never gets there. The tensors of one
phase are accessed in parallel: when a third of one is done, so is a third of every other.

Of a piece L2 holds only the ranges of bytes that were touched, so that small tensors take no more
room than they need. Ranges that meet are merged; the result is dirty from the first byte written to
the last. Data that is read for the last time is dropped as it is read, and its misses are not kept.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ascend_lab import errors
from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim.cost import Traffic, lowest_bytes

PIECE_COUNT = 256
"""`L2.of` divides an L2 into this many pieces: 48 MB into pieces of 192 KB."""
# a workspace tensor begins at a multiple of 512 bytes: gaps between neighbours are smaller
ALIGN_BYTES = 512
PieceAccess = tuple[float, bool, int, int, int, int]
"""Position in the phase (0 .. 1), whether it writes, index of the access, piece, first byte, end.

Sorted, these tuples are in the order of time, with reads before writes of the same position.
"""
CachedRange = tuple[int, int, int, int]
"""A range of a piece: first byte, end, first dirty byte, end of the dirty bytes.

If the last two are equal, the range is clean.
"""


@dataclass(frozen=True, slots=True)
class Access:
    """A phase reads or writes the bytes `address_bytes` .. `address_bytes + size_bytes - 1` once.

    `is_last` says that the bytes are not read again.
    """

    name: str
    address_bytes: int
    size_bytes: int
    is_write: bool = False
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened in L2 during a phase.

    `hits` is, by tensor, the share of the bytes read that hit; `write_back_bytes` are the dirty
    bytes that were evicted.
    """

    hits: Mapping[str, float]
    write_back_bytes: int


class L2:
    """A cache of `size_bytes` over device memory, in pieces; `touch` changes its state."""

    def __init__(self, size_bytes: int, piece_bytes: int) -> None:
        """Start empty; raise `SimulationError` for a piece that is empty or does not fit."""
        if not 0 < piece_bytes <= size_bytes:
            needed = f"pieces of 1 to {size_bytes} bytes"
            raise errors.SimulationError(needed, str(piece_bytes), "use L2.of(chip)")
        self.size_bytes = size_bytes
        self.piece_bytes = piece_bytes
        self.held_bytes = 0
        # the cached ranges of each piece, the least recently used piece first
        self._pieces: OrderedDict[int, tuple[CachedRange, ...]] = OrderedDict()

    @classmethod
    def of(cls, chip: Chip) -> "L2":
        """Return the empty L2 of a chip in at most PIECE_COUNT pieces."""
        return cls(chip.l2.size_bytes, -(-chip.l2.size_bytes // PIECE_COUNT))

    def touch(self, accesses: Sequence[Access]) -> Outcome:
        """Run one phase: all accesses in parallel, reads before writes of the same position.

        In a phase much larger than L2 only two parts matter: the beginning, which evicts all older
        contents, and the end, whose data L2 holds afterwards. Between the two no access hits: these
        pieces are counted and not visited one by one.
        """
        nonempty = [a for a in accesses if a.size_bytes > 0]
        edge_share = self._edge_share(nonempty)
        hit_bytes: dict[str, int] = {}
        written = self._run(nonempty, 0.0, edge_share, hit_bytes)
        # 1 GB through an L2 of 48 MB: only the first and the last twentieth are run piece by piece.
        if edge_share < 0.5:
            written += self.flush()
            self._pieces.clear()
            self.held_bytes = 0
            written += sum(self._skipped_bytes(a, edge_share) for a in nonempty if a.is_write)
            written += self._run(nonempty, 1.0 - edge_share, 1.0, hit_bytes)
        read: dict[str, int] = {}
        for a in nonempty:
            if not a.is_write:
                read[a.name] = read.get(a.name, 0) + a.size_bytes
        hits = {n: min(1.0, hit_bytes.get(n, 0) / size) for n, size in read.items()}
        return Outcome(hits, written)

    def discard(self, address_bytes: int, size_bytes: int) -> None:
        """Drop bytes that are not read again, without writing the dirty ones to memory."""
        low = address_bytes
        stop = address_bytes + size_bytes
        pieces = self._pieces
        keys = range(low // self.piece_bytes, isa.ceil_div(stop, self.piece_bytes))
        # whichever is fewer is searched: the pieces of the range, or those that L2 holds
        if len(keys) < len(pieces):
            held_keys = [key for key in keys if key in pieces]
        else:
            held_keys = [key for key in pieces if key in keys]
        for key in held_keys:
            remaining = tuple(
                remainder for cached in pieces[key] for remainder in _without(cached, low, stop)
            )
            self.held_bytes += sum(end - first for first, end, _, _ in remaining)
            self.held_bytes -= sum(end - first for first, end, _, _ in pieces[key])
            if remaining:
                pieces[key] = remaining
            else:
                del pieces[key]

    def flush(self) -> int:
        """Write all dirty bytes to memory and return their number; they stay in L2 as clean."""
        dirty_bytes = sum(
            dirty_end - dirty
            for ranges in self._pieces.values()
            for _, _, dirty, dirty_end in ranges
        )
        for key, ranges in self._pieces.items():
            # a clean range has an empty dirty part, by convention at its first byte
            self._pieces[key] = tuple((first, end, first, first) for first, end, _, _ in ranges)
        return dirty_bytes

    def copy(self) -> "L2":
        """Return a second L2 with the same contents, which changes independently."""
        duplicate = L2(self.size_bytes, self.piece_bytes)
        duplicate.held_bytes = self.held_bytes
        # the copy of the dictionary is enough, because the tuples of ranges never change
        duplicate._pieces = self._pieces.copy()
        return duplicate

    def _edge_share(self, accesses: Sequence[Access]) -> float:
        """Return the share of a phase after which L2 holds no older data.

        It is 1.0 if that share would be 0.5 or more: then the beginning and the end of the phase
        would overlap, and the whole phase is visited.
        """
        distinct_bytes = [0, 0]  # numbers of different bytes that are read, and that are written
        for is_write in (False, True):
            sizes: dict[int, int] = {}
            for a in accesses:
                if a.is_write is is_write and not a.is_last:
                    # two reads of one weight fill L2 once: at an address only the largest counts
                    sizes[a.address_bytes] = max(a.size_bytes, sizes.get(a.address_bytes, 0))
            distinct_bytes[is_write] = sum(sizes.values())
        # One piece more for each access, because shares of accesses are rounded to whole pieces.
        filling_bytes = self.size_bytes + (len(accesses) + 1) * self.piece_bytes
        phase_bytes = max(distinct_bytes)
        # 50 MB fill an L2 of 48 MB for certain: of a phase of 1,000 MB that is a share of 0.05
        return filling_bytes / phase_bytes if 2 * filling_bytes < phase_bytes else 1.0

    def _keys(self, a: Access, begin: float, end: float) -> range:
        """Return the pieces of an access between two shares of it, from 0.0 to 1.0.

        A piece in which a share ends belongs to the part before it, so that no piece counts twice.
        """
        piece = self.piece_bytes
        # 1,000 bytes in pieces of 100: the share to 0.25 has pieces 0, 1, 2, the next begins at 3
        if begin == 0.0:
            first_key = a.address_bytes // piece
        else:
            first_key = isa.ceil_div(a.address_bytes + int(begin * a.size_bytes), piece)
        if end == 1.0:
            end_key = isa.ceil_div(a.address_bytes + a.size_bytes, piece)
        else:
            end_key = isa.ceil_div(a.address_bytes + int(end * a.size_bytes), piece)
        return range(first_key, end_key)

    def _skipped_bytes(self, a: Access, edge_share: float) -> int:
        """Return the bytes of an access that are neither in its first nor in its last share."""
        keys = self._keys(a, edge_share, 1.0 - edge_share)
        stop = min(a.address_bytes + a.size_bytes, keys.stop * self.piece_bytes)
        return max(0, stop - keys.start * self.piece_bytes)

    def _piece_accesses(
        self, accesses: Sequence[Access], begin: float, end: float
    ) -> Iterator[PieceAccess]:
        """Yield the accesses between two shares of a phase piece by piece, not yet in order."""
        piece = self.piece_bytes
        for index, a in enumerate(accesses):
            stop = a.address_bytes + a.size_bytes
            for key in self._keys(a, begin, end):
                low = max(a.address_bytes, key * piece)
                position = (low - a.address_bytes) / a.size_bytes
                yield position, a.is_write, index, key, low, min(stop, (key + 1) * piece)

    def _run(
        self, accesses: Sequence[Access], begin: float, end: float, hit_bytes: dict[str, int]
    ) -> int:
        """Touch the pieces in order of time; return the dirty bytes evicted meanwhile.

        Bytes of reads that hit are added to `hit_bytes` by tensor.
        """
        written = 0
        for _, is_write, index, key, low, stop in sorted(
            self._piece_accesses(accesses, begin, end)
        ):
            access = accesses[index]
            overlap_bytes = self._touch_piece(access, key, low, stop)
            if not is_write:
                hit_bytes[access.name] = hit_bytes.get(access.name, 0) + overlap_bytes
            if self.held_bytes > self.size_bytes:
                written += self._evict()
        return written

    def _touch_piece(self, access: Access, key: int, low: int, stop: int) -> int:
        """Read or write bytes low .. stop-1 of a piece; return how many of them L2 held before."""
        # Popped here and put back below, so that it becomes the most recently used piece.
        cached_ranges = self._pieces.pop(key, ())
        # usually a piece has one range and the access adjoins it: then no tuples are built
        adjoining = cached_ranges
        other_ranges = cached_ranges[:0]
        if len(cached_ranges) > 1 or (cached_ranges and not _adjoins(cached_ranges[0], low, stop)):
            adjoining = tuple(r for r in cached_ranges if _adjoins(r, low, stop))
            other_ranges = tuple(r for r in cached_ranges if not _adjoins(r, low, stop))
        overlap_bytes = 0
        for range_first, range_end, _, _ in adjoining:
            overlap_bytes += max(0, min(range_end, stop) - max(range_first, low))
            self.held_bytes -= range_end - range_first
        if access.is_last:
            updated = tuple(
                remainder for cached in adjoining for remainder in _without(cached, low, stop)
            )
        else:
            updated = (_merged(adjoining, low, stop, access.is_write),)
        for range_first, range_end, _, _ in updated:
            self.held_bytes += range_end - range_first
        if remaining := (*other_ranges, *updated):
            self._pieces[key] = remaining
        return overlap_bytes

    def _evict(self) -> int:
        """Evict the least recently used pieces until all fit; return their dirty bytes."""
        written = 0
        while self.held_bytes > self.size_bytes:
            # the first entry is the least recently used one
            evicted = self._pieces.popitem(last=False)[1]
            for range_first, range_end, dirty, dirty_end in evicted:
                self.held_bytes -= range_end - range_first
                written += dirty_end - dirty
        return written


def _adjoins(cached: CachedRange, low: int, stop: int) -> bool:
    """Tell whether a range and bytes low .. stop-1 are at most ALIGN_BYTES apart."""
    return cached[0] <= stop + ALIGN_BYTES and low <= cached[1] + ALIGN_BYTES


def _merged(adjoining: Sequence[CachedRange], low: int, stop: int, is_write: bool) -> CachedRange:
    """Return the range that covers all adjoining ranges and bytes low .. stop-1."""
    first = low
    end = stop
    dirty, dirty_end = (low, stop) if is_write else (0, 0)
    for range_first, range_end, range_dirty, range_dirty_end in adjoining:
        first = min(first, range_first)
        end = max(end, range_end)
        if range_dirty < range_dirty_end:
            if dirty < dirty_end:
                # Clean bytes between two dirty ranges become dirty: 0..99 and 200..299 make 0..299.
                dirty = min(dirty, range_dirty)
                dirty_end = max(dirty_end, range_dirty_end)
            else:
                dirty = range_dirty
                dirty_end = range_dirty_end
    return (first, end, dirty, dirty_end) if dirty < dirty_end else (first, end, first, first)


def _without(cached: CachedRange, low: int, stop: int) -> Iterator[CachedRange]:
    """Yield what remains of a range without bytes low .. stop-1: up to two ranges."""
    first, end, dirty, dirty_end = cached
    # 0..99 without 40..59 leaves 0..39 and 60..99; without 0..59 only the second.
    for left_first, left_end in ((first, min(end, low)), (max(first, stop), end)):
        if left_first < left_end:
            left_dirty = max(left_first, dirty)
            left_dirty_end = min(left_end, dirty_end)
            if left_dirty < left_dirty_end:
                yield left_first, left_end, left_dirty, left_dirty_end
            else:
                yield left_first, left_end, left_first, left_first


@dataclass(frozen=True, slots=True)
class Scratch:
    """An L2 used as a buffer: during one kernel it holds the tensors `names` and no others."""

    names: frozenset[str]

    def touch(self, accesses: Sequence[Access]) -> Outcome:
        """Run one phase: all other tensors are read from memory and written to memory."""
        hits = {a.name: float(a.name in self.names) for a in accesses if not a.is_write}
        memory_writes = (a.size_bytes for a in accesses if a.is_write and a.name not in self.names)
        return Outcome(hits, sum(memory_writes))


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """L2, and where the tensors of the next kernel are in device memory.

    `tensors` maps a name to (address, size) in bytes. Tensors without an address follow one another
    from `workspace_bytes` on (None: after the highest tensor that has an address). The tensors of
    `last` are not read after that kernel.
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
        """Return a chip's memory after L2 has read the `tensors` whose names are in `names`."""
        memory = cls.of(chip)
        addresses = memory.addresses(tensors)
        listed = [b for b in tensors if b.name in names]
        memory.l2.touch([Access(b.name, addresses[b.name], b.size_bytes) for b in listed])
        return memory

    def at(self, tensors: Mapping[str, tuple[int, int]]) -> "DeviceMemory":
        """Return the same memory, L2 included, with the tensors of another kernel."""
        return replace(self, tensors=tensors)

    def addresses(self, buffers: Sequence[isa.Buffer]) -> dict[str, int]:
        """Return the first byte of every tensor.

        Raises `SimulationError` if a tensor has no room at its address, or if this kernel has no
        tensor with the name of an address.
        """
        names = [buffer.name for buffer in buffers]
        if unknown := sorted(self.tensors.keys() - set(names)):
            needed = f"addresses of {', '.join(names)}"
            raise errors.SimulationError(needed, ", ".join(unknown), "name them as the kernel does")
        # tensors without an address are the kernel's workspace, after all planned tensors
        top = max((low + size for low, size in self.tensors.values()), default=0)
        top = top if self.workspace_bytes is None else self.workspace_bytes
        first_byte = {}
        for buffer in buffers:
            if buffer.name not in self.tensors:
                # 1,000 is rounded up to 1,024
                address = isa.ceil_div(top, ALIGN_BYTES) * ALIGN_BYTES
                first_byte[buffer.name] = address
                top = address + buffer.size_bytes
                continue
            low, size = self.tensors[buffer.name]
            if low < 0 or size < buffer.size_bytes:
                raise errors.SimulationError(
                    f"{buffer.size_bytes} bytes at 0 or above for tensor {buffer.name}",
                    f"{size} at {low}",
                    "plan the memory for this kernel's tensors",
                )
            first_byte[buffer.name] = low
        return first_byte


def accesses_of(
    launch: isa.Launch,
    traffic: Traffic,
    addresses: Mapping[str, int],
    last: frozenset[str] = frozenset(),
) -> tuple[Access, ...]:
    """Return the accesses of a launch to L2, one per tensor that is read or written, reads first.

    L2 drops a tensor of `last` as it is read, if the launch reads every byte of it only once.
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
