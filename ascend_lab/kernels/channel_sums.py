"""Two sums over each channel of images in NC1HWC0, on the vector unit: sum(a) and sum(a b).

In NC1HWC0 all pixels of a channel lie in the same one of 16 lanes. So tiles of any pixels are
added lane by lane, in fp32, to a tile of sums; at the end its rows of 16 lanes are folded onto the
first. Channel blocks, images and rows are divided over the cores. Each writes its partial sums; a
second phase adds them and computes what is wanted of them:

    a = b = x:        mean = sum(x) / m,  variance = sum(x x) / m - mean^2     (m per channel)
    a = grad, b = x:  dscale = (sum(a b) - mean sum(a)) / sqrt(variance + epsilon), dbias = sum(a)

so that batch norm reads its images once for the statistics, and once for both gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.isa import (
    Affine,
    Buffer,
    Kernel,
    KernelBuilder,
    Launch,
    Part,
    Program,
    Queue,
    Region,
    Tile,
    binding_of,
)
from ascend_lab.kernels.gemm_schedule import up
from ascend_lab.kernels.planes import vector_cores
from ascend_lab.kernels.tiles import by_size, chunks, repeat, segments

C0, LANES, TILES = 16, 64, 4
SPARE_BYTES = 4096
SMALL = 4096
"""Elements up to which a tile is not made smaller only to have several of them."""
Place = tuple[Buffer | Tile, int]
"""A run of elements: what it lies in, its first element."""


@dataclass(frozen=True, slots=True)
class ChannelSums:
    """Images (n, c, h, w) in a 2-byte format; `epsilon` of the gradients, None: the statistics."""

    n: int
    c: int
    h: int
    w: int
    dtype: str = "fp16"
    epsilon: float | None = None

    @property
    def blocks(self) -> int:
        """Blocks of 16 channels."""
        return up(self.c, C0)

    @property
    def images(self) -> tuple[str, ...]:
        """Names of the tensors that are read: a, and b if it is another."""
        return ("x",) if self.epsilon is None else ("grad", "x")


@dataclass(frozen=True, slots=True)
class _Share:
    """A core's part: (size, pitch, positions) of channel blocks and of images, rows low .. high-1.

    `bands` and `band`: how many bands of rows there are, and which this is.
    """

    c: tuple[int, int, int]
    n: tuple[int, int, int]
    rows: tuple[int, int]
    bands: int
    band: int


def channel_sums_kernel(job: ChannelSums, chip: Chip) -> Kernel:
    """Return the kernel: x, or grad, x, mean and variance, to y0 and y1, one fp32 per channel.

    Numbers per channel are stored as (1, C1, 1, 1, 16). Raises `CapacityError` where UB is small.
    """
    totals = (job.blocks, job.n, job.h)
    grid = _grid(totals, vector_cores(chip))
    c_sizes, n_sizes, bands = (chunks(t, 1, g) for t, g in zip(totals, grid, strict=True))
    slots, parts = len(n_sizes) * len(bands), []
    for (c, c_at), (n, n_at) in product(by_size(c_sizes).items(), by_size(n_sizes).items()):
        for band, size in enumerate(bands):
            low = band * bands[0]
            share = _Share(
                (c, c_sizes[0], c_at[-1] + 1), (n, n_sizes[0], n_at[-1] + 1),
                (low, low + size), len(bands), band,
            )  # fmt: skip
            binds = [binding_of({"channel": i, "batch": j}) for i in c_at for j in n_at]
            parts.append(Part(_partial(job, share, slots, chip), tuple(binds)))
    return Kernel("channel_sums", (Launch("partial", tuple(parts)), _finish(job, slots, chip)))


def _grid(totals: tuple[int, int, int], cores: int) -> tuple[int, int, int]:
    """Return how many cores divide blocks, images, rows: least work, fewest bands, then folds."""
    options = []
    for c in range(1, min(totals[0], cores) + 1):
        for n in range(1, min(totals[1], cores // c) + 1):
            rows = min(totals[2], cores // (c * n))
            folds = up(totals[0], c)
            work = folds * up(totals[1], n) * up(totals[2], rows)
            options.append((work, rows, folds, (c, n, rows)))
    return min(options)[3]


# -- first phase: partial sums --------------------------------------------------------------------
def _tile_elements(job: ChannelSums, run: int, images: int, chip: Chip) -> tuple[int, int]:
    """Return the elements of a tile and the images in it, the latter 1 where it is cut.

    Per element and image UB holds two slots and a copy in fp32, and two sums in fp32.
    """
    sides = len(job.images)
    each = sides * (2 * DTYPE_BYTES[job.dtype] + 4) + 8
    most = (chip.buffers["UB"] - SPARE_BYTES) // each
    most = min(most // LANES, chip.max_repeat) * LANES
    if run > most:
        return up(up(run, up(run, most)), LANES) * LANES, 1
    together = min(most // run, images, max(up(images, TILES), up(SMALL, run)))
    return together * run, together


def _partial(job: ChannelSums, share: _Share, slots: int, chip: Chip) -> Program:
    k, row, total = KernelBuilder("channel_sums", chip), job.w * C0, job.blocks * C0
    plane, low = job.h * row, share.rows[0] * row
    run = share.rows[1] * row - low
    size, together = _tile_elements(job, run, share.n[0], chip)
    tensors = [k.tensor(x, job.dtype, job.n * job.blocks * plane) for x in job.images]
    partial = k.tensor("partial", "fp32", slots * 2 * total)
    loaded = k.queue("a_ub", "UB", job.dtype, size, src="MTE2", dst="V")
    slot_of = [loaded.buffer, *(loaded.join(f"{x}_ub", job.dtype, size) for x in job.images[1:])]
    wide = [k.buffer(f"{x}_wide", "UB", "fp32", size) for x in job.images]
    sums = [k.buffer(x, "UB", "fp32", size) for x in ("sums", "products")]
    out = k.queue("out", "UB", "fp32", 2 * C0, src="V", dst="MTE3")
    c_at = k.param("channel", share.c[2]) * share.c[1]
    batch = k.param("batch", share.n[2])
    slot = batch * share.bands + share.band
    with repeat(k, "c", share.c[0]) as c:
        for one in sums:
            _each(k, "vdup", size, (one, 0), scalar=0.0)
        block = c_at + c
        for at, sizes in _tiles(k, share.n[0], run, together, size):
            start = (batch * (share.n[1] * job.blocks) + block) * plane + at[0] * (
                job.blocks * plane) + (at[1] + low)  # fmt: skip
            place = loaded.alloc().slot
            for tensor, buffer in zip(tensors, slot_of, strict=True):
                source = tensor.region(start, sizes, (job.blocks * plane, 1))
                k.copy(Tile(buffer, place).region(0, sizes), source)
            loaded.enqueue()
            _add(k, loaded, slot_of, wide, sums, sizes[0] * sizes[1])
        start = slot * (2 * total) + block * C0
        _store(k, sums, size, out, partial.region(start, (2, C0), (total, 1)))
    return k.finish()


def _tiles(
    k: KernelBuilder, images: int, run: int, together: int, size: int
) -> Iterator[tuple[tuple[Affine, Affine], tuple[int, int]]]:
    """Yield where each tile starts (image, element) and its (images, elements of each)."""
    if size >= run:
        for at, count in segments(k, "image", images, together):
            yield (at, Affine()), (count, run)
        return
    with repeat(k, "image", images) as image:
        for at, count in segments(k, "pixels", run, size):
            yield (image, at), (1, count)


def _add(
    k: KernelBuilder,
    loaded: Queue,
    slot_of: list[Buffer],
    wide: list[Buffer],
    sums: list[Buffer],
    count: int,
) -> None:
    """Add a tile to the sums, and its products with the other one, or with itself."""
    slot = loaded.dequeue().slot
    for buffer, to in zip(slot_of, wide, strict=True):
        _each(k, "vconv", count, (to, 0), (Tile(buffer, slot), 0))
    loaded.free()
    a, b = (wide[0], 0), (wide[-1], 0)
    _each(k, "vadd", count, (sums[0], 0), (sums[0], 0), a)
    _each(k, "vmul", count, b, a, b)
    _each(k, "vadd", count, (sums[1], 0), (sums[1], 0), b)


def _store(k: KernelBuilder, sums: list[Buffer], size: int, out: Queue, to: Region) -> None:
    """Fold the sums onto their first 16 lanes and write these."""
    tile = out.alloc()
    for number, one in enumerate(sums):
        _fold(k, one, size // C0, C0)
        _each(k, "vcopy", C0, (tile, number * C0), (one, 0))
    out.enqueue()
    held = out.dequeue()
    k.copy(to, held.region(0, (2, C0)))
    out.free()


# -- second phase: sums of the cores' sums --------------------------------------------------------
def _finish(job: ChannelSums, slots: int, chip: Chip) -> Launch:
    each = up(job.blocks, vector_cores(chip))
    sizes, parts = chunks(job.blocks, 1, up(job.blocks, each)), []
    for size, places in by_size(sizes).items():
        program = _final(job, slots, (size * C0, each * C0, places[-1] + 1), chip)
        parts.append(Part(program, tuple(binding_of({"channel": i}) for i in places)))
    return Launch("final", tuple(parts))


def _final(job: ChannelSums, slots: int, share: tuple[int, int, int], chip: Chip) -> Program:
    """Return the program for `share`: channels of a core, pitch, positions."""
    k, total, count = KernelBuilder("channel_totals", chip), job.blocks * C0, share[0]
    start = k.param("channel", share[2]) * share[1]
    partial = k.tensor("partial", "fp32", slots * 2 * total)
    given = [k.tensor(x, "fp32", total) for x in ("mean", "variance") if job.epsilon is not None]
    results = [k.tensor(x, "fp32", total) for x in ("y0", "y1")]
    loaded = k.queue("sums", "UB", "fp32", slots * count, src="MTE2", dst="V", depth=1)
    tiles = [loaded.buffer, loaded.join("products", "fp32", slots * count)]
    tiles += [loaded.join(f"{x.name}_ub", "fp32", count) for x in given]
    out = k.queue("y0_ub", "UB", "fp32", count, src="V", dst="MTE3", depth=1)
    outs = [out.buffer, out.join("y1_ub", "fp32", count)]
    slot = loaded.alloc().slot
    for number, tile in enumerate(tiles[:2]):
        rows = partial.region(start + number * total, (slots, count), (2 * total, 1))
        k.copy(Tile(tile, slot).region(0, (slots, count)), rows)
    for tensor, tile in zip(given, tiles[2:], strict=True):
        k.copy(Tile(tile, slot).region(0, count), tensor.region(start, count))
    loaded.enqueue()
    loaded.dequeue()
    out.alloc()
    for tile in tiles[:2]:
        _fold(k, tile, slots, count)
    _results(k, job, tiles, outs, count)
    loaded.free()
    out.enqueue()
    out.dequeue()
    for tensor, tile in zip(results, outs, strict=True):
        k.copy(tensor.region(start, count), tile.region(0, count))
    out.free()
    return k.finish()


def _results(
    k: KernelBuilder, job: ChannelSums, tiles: list[Buffer], outs: list[Buffer], count: int
) -> None:
    """Compute the two results from the sums, in the first row of each tile."""
    sums, products, y0, y1 = ((x, 0) for x in (*tiles[:2], *outs))

    def put(op: str, *places: Place, scalar: float | None = None) -> None:
        _each(k, op, count, *places, scalar=scalar)

    if job.epsilon is None:
        share = 1.0 / (job.n * job.h * job.w)
        put("vmuls", y0, sums, scalar=share)
        put("vmul", sums, y0, y0)
        put("vmuls", products, products, scalar=share)
        put("vsub", y1, products, sums)
        put("vrelu", y1, y1)  # rounding may leave it slightly below 0
        return
    mean, variance = ((x, 0) for x in tiles[2:])
    put("vcopy", y1, sums)
    put("vmul", mean, mean, sums)
    put("vsub", products, products, mean)
    put("vadds", variance, variance, scalar=job.epsilon)
    put("vrsqrt", variance, variance)
    put("vmul", y0, products, variance)


# -- instructions ---------------------------------------------------------------------------------
def _each(
    k: KernelBuilder, op: str, count: int, *places: Place, scalar: float | None = None
) -> None:
    """Emit an instruction on runs of `count` elements: whole repeats, then the last lanes."""
    done = 0
    while done < count:
        repeats = min((count - done) // LANES, k.chip.max_repeat)
        sizes = (repeats, LANES) if repeats else (1, count - done)
        regions = [memory.region(at + done, sizes) for memory, at in places]
        k.vector(op, *regions, scalar=scalar)
        done += sizes[0] * sizes[1]


def _fold(k: KernelBuilder, buffer: Buffer, rows: int, width: int) -> None:
    """Add all rows onto the first, half of them at a time."""
    while rows > 1:
        half = rows // 2
        first, last = (buffer, 0), (buffer, (rows - half) * width)
        _each(k, "vadd", half * width, first, first, last)
        rows -= half
