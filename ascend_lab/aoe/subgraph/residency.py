"""What stays in L2 while slices run, tensor by tensor: the tuner's quick view of residency.

`Step` is one launch: the tensors it reads and writes, each byte once. A rule says of every step of
a slice what it finds in L2 and how many bytes go to memory. A *buffer* (the Ascend310's) is
allocated ahead (see `graph.residency`); weights and what crosses the border of the slice are never
there. A *cache* keeps what was used last, weights of the slice before included, and drops what
nobody reads again.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ascend_lab.chip import Chip
from ascend_lab.graph.placement import Use, allocate


@dataclass(frozen=True, slots=True)
class Step:
    """One launch of a slice: bytes that it reads and writes of each tensor."""

    reads: Mapping[str, int]
    writes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Met:
    """What a step finds in L2 whole, and the bytes that go to memory meanwhile."""

    found: frozenset[str]
    written_bytes: int

    def memory_bytes(self, step: Step) -> int:
        """Return the bytes of a step that cross the memory interface."""
        missed = sum(size for name, size in step.reads.items() if name not in self.found)
        return missed + self.written_bytes


@dataclass
class Buffer:
    """The rule of a buffer: a slice finds what it has written itself, if that was kept."""

    size_bytes: int
    held: Mapping[str, int] = field(default_factory=dict)

    def left(self, names: Mapping[str, int]) -> None:
        """Let tensors lie there that were just written: none, of what is read in slices."""

    def passed(self, names: Collection[str]) -> None:
        """Forget tensors of which the next slice reads another part."""

    def __call__(self, steps: Sequence[Step], kept: Collection[str]) -> Iterator[Met]:
        """Yield what each step meets; `kept` are needed behind the slice."""
        uses = [Use(tuple(step.reads), tuple(step.writes)) for step in steps]
        sizes = Counter[str]()
        for step in steps:
            sizes.update(step.writes)
        before = frozenset[str]()
        for step, held in zip(steps, allocate(uses, sizes, {*kept}, self.size_bytes), strict=True):
            out = sum(size for name, size in step.writes.items() if name not in held)
            yield Met(before & held & step.reads.keys(), out)
            before = held


@dataclass
class Cache:
    """The rule of a cache of whole tensors; it remembers what one slice leaves for the next."""

    size_bytes: int
    held: OrderedDict[str, int] = field(default_factory=OrderedDict)
    dirty: dict[str, int] = field(default_factory=dict)

    def left(self, names: Mapping[str, int]) -> None:
        """Let tensors lie there as writing them one after another leaves them."""
        for name, size in names.items():
            self._use(name, size)
            self.dirty[name] = size
            self._shrink()

    def passed(self, names: Collection[str]) -> None:
        """Forget tensors of which the next slice reads another part."""
        for name in names:
            self.held.pop(name, None)
            self.dirty.pop(name, None)

    def __call__(self, steps: Sequence[Step], kept: Collection[str]) -> Iterator[Met]:
        """Yield what each step meets."""
        written = {name for step in steps for name in step.writes}
        left = Counter(name for step in steps for name in step.reads)
        for step in steps:
            found = frozenset(self.held).intersection(step.reads)
            left.subtract(step.reads.keys())
            for name, size in step.reads.items():
                self._use(name, max(size, self.held.get(name, 0)))
            for name, size in step.writes.items():
                self._use(name, size + self.held.get(name, 0))
                self.dirty[name] = self.held[name]
            out = self._shrink()
            inner = written.difference(kept).intersection({*step.reads, *step.writes})
            self.passed([name for name in inner if not left[name]])
            yield Met(found, out)

    def _use(self, name: str, size: int) -> None:
        self.held[name] = size
        self.held.move_to_end(name)

    def _shrink(self) -> int:
        """Throw out what was unused for longest until the rest fits; return the dirty bytes."""
        out, total = 0, sum(self.held.values())
        while total > self.size_bytes:
            name, size = self.held.popitem(last=False)
            total -= size
            out += self.dirty.pop(name, 0)
        return out


def rule_of(chip: Chip) -> Buffer | Cache:
    """Return the rule of a chip's L2, empty."""
    return Buffer(chip.l2.size_bytes) if chip.l2.kind == "buffer" else Cache(chip.l2.size_bytes)
