"""Feed copies with indices: a batch to UB, the scalar unit looks at it, then the pipes may use it.

A copy's pipe cannot use indices the moment they arrive: S reads them first, one a step, and tells
the pipe by a flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.isa import Affine, Buffer, KernelBuilder, Queue, Region, Tile

BATCH = 256
"""Most indices of one batch: 1 KiB of UB."""


def l2_steps(chip: Chip) -> int:
    """Return scalar steps as long as one trip of S to L2."""
    return max(chip.l2.latency_cycles // max(chip.scalar_cycles, 1), 1)


@dataclass(slots=True)
class Feed:
    """Indices of the int32 tensor `tensor`, for loads (MTE2), stores (MTE3) or S alone.

    `batch` holds the indices; `look` tells MTE2 that S has looked at them.
    """

    k: KernelBuilder
    tensor: Buffer
    batch: Queue
    look: Queue | None
    held: Tile | None = None

    @classmethod
    def make(cls, k: KernelBuilder, tensor: Buffer, *pipes: str, most: int = BATCH) -> Feed:
        """Allocate a feed of batches of up to `most` indices for `pipes`, MTE2 and/or MTE3."""
        name, size = tensor.name, min(most, -(-tensor.elements // 8) * 8)
        via, end = ("S", "MTE3") if "MTE3" in pipes else ("", "S")
        batch = k.queue(f"{name}_batch", "UB", "int32", size, src="MTE2", dst=end, depth=1, via=via)
        look = None
        if "MTE2" in pipes:
            look = k.queue(f"{name}_look", "UB", "int32", 1, src="S", dst="MTE2", depth=1)
        return cls(k, tensor, batch, look)

    def open(self, start: Affine | int, count: int) -> None:
        """Bring `count` indices from `start` on and let S look at them.

        Counts that are no whole blocks go one by one through S on chips that cannot pad.
        """
        k, chip = self.k, self.k.chip
        pad = count % 8 != 0
        single = pad and chip.combined
        tile = self.batch.alloc()
        if not single:
            k.copy(tile.region(0, count), self.tensor.region(start, count), pad=pad)
        if self.batch.middle is not None:
            self.batch.hand()
        else:
            self.batch.enqueue()
            tile = self.batch.dequeue()
        if self.look is not None:
            self.look.alloc()
        if single:
            with k.loop("s", count) as s:
                source = self.tensor.region(start + s, 1)
                k.scalar(tile.region(s, 1), source, steps=l2_steps(chip))
        else:
            k.scalar(steps=count)
        if self.batch.middle is not None:
            self.batch.enqueue()
            tile = self.batch.dequeue()
        if self.look is not None:
            self.look.enqueue()
            self.look.dequeue()
        self.held = tile

    def take(self, i: Affine | int) -> Region:
        """Return the place of index i of the batch."""
        assert self.held is not None
        return self.held.region(i, 1)

    def close(self) -> None:
        """The batch is used up."""
        self.batch.free()
        if self.look is not None:
            self.look.free()


def batches(
    k: KernelBuilder, name: str, count: int, most: int
) -> Iterator[tuple[Affine | int, int]]:
    """Yield (first, length) of the batches of `count` things: a loop of full ones, then the rest.

    The rest is cut once more, so that at most 7 things are no whole block of indices.
    """
    full, rest = divmod(count, most)
    if full:
        with k.loop(name, full) as i:
            yield i * most, most
    whole = rest // 8 * 8
    if whole:
        yield full * most, whole
    if rest - whole:
        yield full * most + whole, rest - whole
