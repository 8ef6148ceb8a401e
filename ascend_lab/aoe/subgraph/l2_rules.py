"""Estimates what L2 holds while the kernels of a slice run: for caches, and for buffers.

A slice is a part of the batch, for example 4 of 32 images, for which a segment of the network (some
consecutive nodes) is computed at once. A rule is called with the kernel launches of a slice in
order. For each it says which tensors the launch finds in L2, and how many bytes are written to
memory meanwhile. Tensors are in L2 as a whole or not at all.

- `Cache`: an L2 that loads what is read and evicts what was used least recently.
- `Buffer`: the L2 of the Ascend310, in which the compiler places tensors ahead of time (see
  `compiler.placement`). Weights, and tensors from outside the slice, are never in it.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ascend_lab.compiler.placement import Use, allocate


@dataclass(frozen=True, slots=True)
class LaunchTraffic:
    """The bytes that one launch reads and writes, by tensor."""

    reads: Mapping[str, int]
    writes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class L2Hits:
    """The tensors that a launch finds in L2, and the bytes that L2 writes to memory meanwhile."""

    hits: frozenset[str]
    written_bytes: int


@dataclass
class Cache:
    """An L2 cache of whole tensors; its contents stay from one slice to the next.

    `contents` are the bytes by tensor, the least recently used first. `dirty` are the bytes that
    were changed and not yet written to memory.
    """

    size_bytes: int
    contents: OrderedDict[str, int] = field(default_factory=OrderedDict)
    dirty: dict[str, int] = field(default_factory=dict)

    def write(self, sizes: Mapping[str, int]) -> None:
        """Write tensors one after another, as the kernels before the segment did."""
        for name, size in sizes.items():
            self._use(name, size)
            self.dirty[name] = size
            self._evict()

    def forget(self, names: Collection[str]) -> None:
        """Drop tensors without writing them to memory."""
        for name in names:
            self.contents.pop(name, None)
            self.dirty.pop(name, None)

    def __call__(
        self, launches: Sequence[LaunchTraffic], needed_after: Collection[str]
    ) -> Iterator[L2Hits]:
        """Yield the hits of each launch; the tensors `needed_after` are read after the slice."""
        written = {name for launch in launches for name in launch.writes}
        remaining_reads = Counter(name for launch in launches for name in launch.reads)
        for launch in launches:
            hits = frozenset(self.contents).intersection(launch.reads)
            remaining_reads.subtract(launch.reads.keys())
            # what is read again takes no more room, but what a slice writes of an output is added
            # to the parts that earlier slices have written
            for name, size in launch.reads.items():
                self._use(name, max(size, self.contents.get(name, 0)))
            for name, size in launch.writes.items():
                self._use(name, size + self.contents.get(name, 0))
                self.dirty[name] = self.contents[name]
            written_bytes = self._evict()
            # Tensors that this slice wrote and no later kernel reads are dropped without a write to
            # memory. Weights and inputs stay until something evicts them: the next slice reads them
            # again.
            used = {*launch.reads, *launch.writes}
            inner_tensors = written.difference(needed_after).intersection(used)
            self.forget([name for name in inner_tensors if not remaining_reads[name]])
            yield L2Hits(hits, written_bytes)

    def _use(self, name: str, size: int) -> None:
        self.contents[name] = size
        self.contents.move_to_end(name)

    def _evict(self) -> int:
        """Evict tensors until the others fit, the least recently used first; return dirty bytes."""
        written_bytes = 0
        total = sum(self.contents.values())
        while total > self.size_bytes:
            name, size = self.contents.popitem(last=False)
            total -= size
            written_bytes += self.dirty.pop(name, 0)
        return written_bytes


@dataclass
class Buffer(Cache):
    """An L2 buffer: a slice finds in it only tensors that it wrote itself and that had room."""

    def write(self, sizes: Mapping[str, int]) -> None:
        """Do nothing: no tensor from before the segment is in the buffer."""

    def __call__(
        self, launches: Sequence[LaunchTraffic], needed_after: Collection[str]
    ) -> Iterator[L2Hits]:
        """Yield the hits of each launch; the tensors `needed_after` are read after the slice."""
        uses = [Use(tuple(launch.reads), tuple(launch.writes)) for launch in launches]
        sizes = Counter[str]()
        for launch in launches:
            sizes.update(launch.writes)
        placed = allocate(uses, sizes, {*needed_after}, self.size_bytes)
        previous_contents = frozenset[str]()
        for launch, contents in zip(launches, placed, strict=True):
            written_bytes = sum(
                size for name, size in launch.writes.items() if name not in contents
            )
            yield L2Hits(previous_contents & contents & launch.reads.keys(), written_bytes)
            previous_contents = contents
