"""The vector unit while a kernel is written: scratch tiles and loops; an instruction's name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ascend_lab.chip import BLOCK_BYTES, DTYPE_BYTES
from ascend_lab.dsl.views import Memory, View
from ascend_lab.isa import Affine, Buffer, KernelBuilder


@dataclass(slots=True)
class Unit:
    """The vector unit while a kernel is written: its builder, scratch tiles, names of loops."""

    builder: KernelBuilder
    free: dict[tuple[str, int], list[Buffer]] = field(default_factory=dict)
    loops: int = 0
    buffers: int = 0

    def take(self, dtype: str, elements: int) -> Buffer:
        """Return a scratch tile for at least `elements`; give it back with `give`."""
        for (kind, size), tiles in self.free.items():
            if kind == dtype and size >= elements and tiles:
                return tiles.pop()
        self.buffers += 1
        unit = BLOCK_BYTES // DTYPE_BYTES[dtype]
        rounded = -(-elements // unit) * unit
        return self.builder.buffer(f"scratch{self.buffers}", "UB", dtype, rounded)

    def give(self, tile: Memory) -> None:
        """Return a scratch tile for reuse; other memories are ignored."""
        if isinstance(tile, Buffer) and tile.name.startswith("scratch"):
            self.free.setdefault((tile.dtype, tile.elements), []).append(tile)

    @contextmanager
    def repeat(self, count: int) -> Iterator[Affine]:
        """A loop of `count` passes, or the body alone where it runs once."""
        if count == 1:
            yield Affine()
            return
        self.loops += 1
        with self.builder.loop(f"v{self.loops}", count) as index:
            yield index

    def parts(self, total: int, size: int) -> Iterator[tuple[Affine, int]]:
        """Yield (start, length): a loop over whole parts of `size`, then the rest."""
        whole = total // size
        if whole:
            with self.repeat(whole) as index:
                yield index * size, size
        if total % size:
            yield Affine(whole * size), total % size

    def over(self, counts: Sequence[int], views: Sequence[View]) -> Iterator[Sequence[View]]:
        """Yield the views inside loops over their outermost axes, one per count."""
        if not counts:
            yield views
            return
        with self.repeat(counts[0]) as index:
            inner = [v.moved(0, index).inner() for v in views]
            yield from self.over(counts[1:], inner)


@dataclass(frozen=True, slots=True)
class Op:
    """A vector instruction without its operands."""

    name: str
    number: float | None = None
    mode: str = ""
