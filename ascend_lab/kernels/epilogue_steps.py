"""The vector instructions of an epilogue on a piece of a tile in UB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ascend_lab.isa import Affine, Buffer, KernelBuilder, Tile
from ascend_lab.kernels.epilogue_plan import Placed, Plan, pattern
from ascend_lab.kernels.gemm_schedule import FRACTAL
from ascend_lab.kernels.tiles import repeat, segments

Memory = Tile | Buffer


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a tile in UB: `count` blocks of `run` elements.

    `tiles` are those of the plan, `named` operands per element, `rates` operands per channel, whose
    block `first` belongs to the piece's first.
    """

    tiles: Sequence[Memory]
    named: Mapping[str, Tile]
    rates: Mapping[str, Tile]
    first: Affine
    count: int
    run: int


def load_channels(
    k: KernelBuilder, slot: Tile, tensor: Buffer, blocks: tuple[Affine, int], unit: int
) -> None:
    """Bring the numbers of `blocks` (first, count) of 16 channels, each repeated to `unit`."""
    first, count = blocks
    source = tensor.region(first * FRACTAL, (count, FRACTAL))
    for turn in range(unit // FRACTAL):
        k.copy(slot.region(turn * FRACTAL, (count, FRACTAL), (unit, 1)), source)


def write_steps(k: KernelBuilder, plan: Plan, piece: Piece) -> None:
    """Write the instructions of all steps on one piece."""
    for step in plan.steps:
        _step(k, step, piece)


def _step(k: KernelBuilder, step: Placed, t: Piece) -> None:
    """One step on a piece: flat, or by blocks or across them where channel numbers differ."""
    views = [t.tiles[s] if isinstance(s, int) else t.named.get(s) for s in (step.to, *step.sources)]
    rates = [None if v else t.rates[str(s)] for v, s in zip(views[1:], step.sources, strict=True)]
    write = _Writer(k, step, views, [None, *rates])
    if not any(rates):
        write.run(Affine(), t.count * t.run, Affine())
        return
    lanes = write.lanes
    parts = -(-t.run // lanes)
    if parts < t.count <= k.chip.max_repeat:
        for start in range(0, t.run, lanes):
            shape = (t.count, min(lanes, t.run - start))
            write.instruction(Affine(start), shape, t.run, t.first, 1)
        return
    with repeat(k, "block", t.count) as block:
        write.run(block * t.run, t.run, t.first + block)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the instructions of one step: `views` are tiles, `rates` numbers per channel."""

    k: KernelBuilder
    step: Placed
    views: Sequence[Memory | None]
    rates: Sequence[Tile | None]

    @property
    def lanes(self) -> int:
        """Elements of a repeat."""
        sizes = [_buffer(v).itemsize for v in (*self.views, *self.rates) if v]
        return self.k.chip.vector_bytes_per_repeat // max(sizes)

    def run(self, start: Affine, elements: int, block: Affine) -> None:
        """Neighbouring elements of one block (or of all, where no operand is per channel)."""
        lanes, most = self.lanes, self.k.chip.max_repeat
        for at, repeats in segments(self.k, "repeat", elements // lanes, most):
            self.instruction(start + at * lanes, (repeats, lanes), lanes, block, 0)
        done = elements // lanes * lanes
        if done < elements:
            self.instruction(start + done, (1, elements - done), lanes, block, 0)

    def instruction(
        self, start: Affine, shape: tuple[int, int], pitch: int, block: Affine, step: int
    ) -> None:
        """`shape` repeats and lanes; `pitch` elements and `step` blocks from repeat to repeat."""
        regions = []
        for view, rate in zip(self.views, self.rates, strict=True):
            if rate is None:
                assert view is not None
                regions.append(view.region(start, shape, (pitch, 1)))
                continue
            unit = pattern(rate.buffer.dtype)
            if unit == FRACTAL:  # one block for 16 lanes, again and again
                sizes: tuple[int, ...] = (shape[0], shape[1] // FRACTAL, FRACTAL)
                strides: tuple[int, ...] = (step * unit, 0, 1)
            else:
                sizes, strides = shape, (step * unit, 1)
            regions.append(rate.region(block * unit, sizes, strides))
        self.k.vector(self.step.op, *regions, scalar=self.step.number)


def _buffer(memory: Memory) -> Buffer:
    return memory if isinstance(memory, Buffer) else memory.buffer
