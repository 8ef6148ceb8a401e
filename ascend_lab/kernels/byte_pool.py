"""The largest of each window of an int8 image in NC1HWC0, blocks of 32 channels.

The vector unit compares halves, so bytes are converted: a block of image rows at once, before rows
are folded. Columns are folded 16 channels at a time: eight pixels of 32 bytes a repeat, whatever
lies between them. Cores share the planes, and where there are fewer of those, their rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.errors import CapacityError
from ascend_lab.isa import Affine, Buffer, KernelBuilder, Launch, Part, Program, binding_of
from ascend_lab.kernels.gemm_schedule import FRACTAL, up

PAIR = 2 * FRACTAL
LOWEST = -128.0
BLOCKS = 8
"""Blocks of 32 bytes in a repeat."""
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BytePool:
    """What to pool: planes of 32 channels, their size, kernel, stride, pads, outputs a plane."""

    planes: int
    size: Pair
    kernel: Pair
    stride: Pair
    pads: tuple[Pair, Pair]
    out: Pair

    @property
    def wide(self) -> int:
        """Columns of an image row with its padding."""
        return self.size[1] + sum(self.pads[1])

    def rows(self, first: int, count: int) -> Pair:
        """Return the image rows (first, count) that some output rows need."""
        low = first * self.stride[0] - self.pads[0][0]
        high = low + (count - 1) * self.stride[0] + self.kernel[0]
        low, high = max(low, 0), min(high, self.size[0])
        return low, high - low

    def bytes_for(self, count: int) -> int:
        """Return the bytes of UB for so many output rows at a time, two slots of each queue."""
        rows = min((count - 1) * self.stride[0] + self.kernel[0], self.size[0])
        image, out = rows * self.size[1], count * self.out[1]
        return PAIR * (4 * image + 4 * out + 2 * self.wide)


def byte_pool_launch(pool: BytePool, chip: Chip) -> Launch:
    """Return the kernel; raise `CapacityError` if one output row does not fit UB."""
    fits = [n for n in range(1, pool.out[0] + 1) if pool.bytes_for(n) <= chip.buffers["UB"]]
    if not fits:
        needed = f"{pool.bytes_for(1)} bytes of UB for the windows of a row"
        raise CapacityError(needed, str(chip.buffers["UB"]), "pool a narrower image")
    parts_of_rows = min(up(chip.core_count, pool.planes), pool.out[0])
    across = min(pool.planes, chip.core_count // parts_of_rows or 1)
    each, share = up(pool.planes, across), up(pool.out[0], parts_of_rows)
    parts = []
    for top in range(0, pool.out[0], share):
        span = (top, min(share, pool.out[0] - top))
        for count in dict.fromkeys((each, pool.planes % each or each)):
            places = [
                i
                for i in range(up(pool.planes, each))
                if min(each, pool.planes - i * each) == count
            ]
            program = _program(pool, chip, span, (count, each, len(places) and places[-1] + 1),
                               max(fits))  # fmt: skip
            parts.append(Part(program, tuple(binding_of({"core": i}) for i in places)))
    return Launch("byte_pool", tuple(parts))


def _program(
    pool: BytePool, chip: Chip, span: Pair, planes: tuple[int, int, int], most: int
) -> Program:
    """Return the program of cores with `planes` (own, apart, places) and output rows `span`."""
    (h, w), (oh, ow) = pool.size, pool.out
    k = KernelBuilder(f"pool_{planes[0]}x{span[1]}", chip)
    x = k.tensor("x", "int8", pool.planes * h * w * PAIR)
    y = k.tensor("y", "int8", pool.planes * oh * ow * PAIR)
    rows = max(pool.rows(at, min(most, sum(span) - at))[1] for at in range(*_steps(span, most)))
    held = k.queue("x_ub", "UB", "int8", rows * w * PAIR, src="MTE2", dst="V")
    count = min(most, span[1])
    out = k.queue("y_ub", "UB", "int8", count * ow * PAIR, src="V", dst="MTE3")
    image = k.buffer("image", "UB", "fp16", rows * w * PAIR)
    row = k.buffer("row", "UB", "fp16", pool.wide * PAIR)
    best = k.buffer("best", "UB", "fp16", count * ow * PAIR)
    k.each("vdup", pool.wide * PAIR, (row, 0), scalar=LOWEST)
    first = k.param("core", planes[2]) * planes[1]
    with k.loop("plane", planes[0]) as index:
        plane = first + index
        for at in range(*_steps(span, most)):
            some = min(most, sum(span) - at)
            low, high = pool.rows(at, some)
            size = high * w * PAIR
            k.copy(held.alloc().region(0, size), x.region((plane * h + low) * (w * PAIR), size))
            held.enqueue()
            k.each("vconv", size, (image, 0), (held.dequeue(), 0))
            held.free()
            for i in range(some):
                _row(k, pool, (image, row, best), (at + i, low, low + high), i * ow * PAIR)
            k.each("vconv", some * ow * PAIR, (out.alloc(), 0), (best, 0))
            out.enqueue()
            to = y.region((plane * oh + at) * (ow * PAIR), some * ow * PAIR)
            k.copy(to, out.dequeue().region(0, some * ow * PAIR))
            out.free()
    return k.finish()


def _steps(span: Pair, most: int) -> tuple[int, int, int]:
    return span[0], span[0] + span[1], most


def _row(
    k: KernelBuilder,
    pool: BytePool,
    buffers: tuple[Buffer, Buffer, Buffer],
    place: tuple[int, int, int],
    to: int,
) -> None:
    """Fold image rows, then columns, into the output row `place` (row, first held, end held)."""
    (image, row, best), (at, low, end), w = buffers, place, pool.size[1]
    top = at * pool.stride[0] - pool.pads[0][0]
    taps = range(max(top, low), min(top + pool.kernel[0], end))
    sources = [(image, (tap - low) * w * PAIR) for tap in taps]
    own = (row, pool.pads[1][0] * PAIR)
    if len(sources) == 1:
        k.each("vcopy", w * PAIR, own, sources[0])
    else:
        k.each("vmax", w * PAIR, own, *sources[:2])
    for source in sources[2:]:
        k.each("vmax", w * PAIR, own, own, source)
    for half in range(2):
        _columns(k, pool, row, best, (half * FRACTAL, to + half * FRACTAL))


def _columns(k: KernelBuilder, pool: BytePool, row: Buffer, best: Buffer, starts: Pair) -> None:
    """Fold the columns of 16 channels: `starts` are their places in both buffers."""
    step, done = pool.stride[1] * PAIR, 0
    while done < pool.out[1]:
        left = pool.out[1] - done
        repeats, blocks = (min(left // BLOCKS, k.chip.max_repeat), BLOCKS)
        repeats, blocks = (repeats, blocks) if repeats else (1, left)
        sizes = (repeats, blocks, FRACTAL)
        to = best.region(starts[1] + done * PAIR, sizes, (blocks * PAIR, PAIR, 1))
        taps = [
            row.region(Affine(starts[0] + done * step + s * PAIR), sizes, (blocks * step, step, 1))
            for s in range(pool.kernel[1])
        ]
        if len(taps) == 1:
            k.vector("vcopy", to, taps[0])
        else:
            k.vector("vmax", to, *taps[:2])
        for tap in taps[2:]:
            k.vector("vmax", to, to, tap)
        done += repeats * blocks
