"""Two sums over each channel of images in NC1HWC0, on the vector unit: sum(a) and sum(a b).

In NC1HWC0 all pixels of a channel lie in the same one of 16 lanes. So all tiles of pixels are
added lane by lane, in fp32, to one tile of sums; at the end all its rows of 16 lanes are added to
the first row. Channel blocks, images and rows are divided over the cores. Each core writes its
partial sums; a second phase adds them and computes the results of the operator:

    a = b = x:        mean = sum(x) / m,  variance = sum(x x) / m - mean^2     (m per channel)
    a = grad, b = x:  dscale = (sum(a b) - mean sum(a)) / sqrt(variance + epsilon), dbias = sum(a)

So batch norm reads its images once for the statistics, and once for both gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ascend_lab.machine import isa
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.operators.kernels import planes, tiles

LANES = 64
"""fp32 lanes of a repeat."""
TILES = 4
"""Tiles that a core should have, so that loads and sums overlap."""
C0 = planes.C0
SPARE_BYTES = 4096
"""Bytes of UB that are left for the sums of a block and other small buffers."""
SMALL = 4096
"""Elements up to which a tile is not made smaller only to have several of them."""


@dataclass(frozen=True, slots=True)
class ChannelSums:
    """Images (n, c, h, w) in a 2-byte format; without `epsilon` statistics, else gradients."""

    n: int
    c: int
    h: int
    w: int
    dtype: str = "fp16"
    epsilon: float | None = None

    @property
    def blocks(self) -> int:
        """Blocks of 16 channels."""
        return isa.ceil_div(self.c, C0)

    @property
    def images(self) -> tuple[str, ...]:
        """Names of the tensors that are read: a, and b if it is another."""
        return ("x",) if self.epsilon is None else ("grad", "x")


def channel_sums_kernel(job: ChannelSums, chip: Chip) -> isa.Kernel:
    """Return the kernel: x, or grad, x, mean and variance, to y0 and y1, one fp32 per channel.

    Numbers per channel are stored as (1, C1, 1, 1, 16). Raises `CapacityError` if UB is too small.
    """
    cores = chip.cores_of("vector")
    sizes = planes.deal_planes((job.blocks, job.n, job.h), cores, large_folds=True)
    bands = len(sizes[2])
    slots = len(sizes[1]) * bands
    partial_launch = planes.plane_launch(
        "partial", sizes, lambda share: _partial(job, share, bands, slots, chip)
    )
    # Each core takes whole channel blocks: 12 blocks on 8 cores are 2 per core, so 6 cores work.
    core_count = isa.ceil_div(job.blocks, isa.ceil_div(job.blocks, cores))
    channels = [C0 * size for size in tiles.chunks(job.blocks, 1, core_count)]
    final_launch = isa.spread(
        "final", {"channel": channels}, lambda share: _final(job, slots, share, chip)
    )
    return isa.Kernel("channel_sums", (partial_launch, final_launch))


# -- first phase: partial sums --------------------------------------------------------------------
def _tile_elements(job: ChannelSums, run: int, images: int, chip: Chip) -> tuple[int, int]:
    """Return the elements of a tile per image, and the images in it (1 if one image is cut).

    `run` is the elements of one image that a core adds up. For each element UB holds two queue
    slots and an fp32 copy of every operand, and two sums in fp32.
    """
    # Statistics of fp16: 2 * 2 + 4 + 8 = 16 bytes an element; gradients of two images: 24.
    element_bytes = len(job.images) * (2 * DTYPE_BYTES[job.dtype] + 4) + 8
    elements_that_fit = (chip.buffers["UB"] - SPARE_BYTES) // element_bytes
    max_elements = min(elements_that_fit // LANES, chip.max_repeat) * LANES
    if run > max_elements:
        # A run that is too long is cut into equal tiles: 100,000 elements where 16,320 fit become 7
        # tiles of 14,336.
        tile_count = isa.ceil_div(run, max_elements)
        return isa.ceil_div(isa.ceil_div(run, tile_count), LANES) * LANES, 1
    # Short runs of several images go together, but a core should have TILES tiles to overlap.
    useful_images = max(isa.ceil_div(images, TILES), isa.ceil_div(SMALL, run))
    tile_images = min(max_elements // run, images, useful_images)
    return tile_images * run, tile_images


def _partial(
    job: ChannelSums, share: planes.PlaneShare, bands: int, slots: int, chip: Chip
) -> isa.Program:
    """Return the program that sums one core's tiles, and their products with the other operand.

    For statistics the other operand is the same image, so that the products are squares.
    """
    k = isa.KernelBuilder("channel_sums", chip)
    row = job.w * C0
    total = job.blocks * C0
    plane = job.h * row
    band_start = share.rows[0] * row
    band_elements = share.rows[1] * row - band_start
    # Elements from one image to the next; a band is `share.rows` rows of one plane.
    pitch = job.blocks * plane
    size, tile_images = _tile_elements(job, band_elements, share.images[0], chip)
    tensors = [k.tensor(x, job.dtype, job.n * pitch) for x in job.images]
    partial = k.tensor("partial", "fp32", slots * 2 * total)
    buffers = _TileBuffers.allocate(k, job, size)
    # 16 lanes of sums, then 16 of products.
    out = k.queue("out", "UB", "fp32", 2 * C0, src="V", dst="MTE3")
    first_block = k.param("channel", share.channels[2]) * share.channels[1]
    batch = k.param("batch", share.images[2])
    image_start = batch * (share.images[1] * pitch) + band_start
    with tiles.repeat(k, "c", share.channels[0]) as c:
        buffers.clear(k)
        block = first_block + c
        for image, at, sizes in _tiles(k, share.images[0], band_elements, tile_images, size):
            start = image_start + block * plane + image * pitch + at
            sources = [tensor.region(start, sizes, (pitch, 1)) for tensor in tensors]
            buffers.add(k, sources)
        tile = out.alloc()
        for number, sums in enumerate(buffers.sums):
            fold_rows(k, sums, size // C0, C0)
            k.each("vcopy", C0, (tile, number * C0), (sums, 0))
        out.enqueue()
        # Partial sums lie as (image share and band, 2, channels).
        place = (batch * bands + share.band) * (2 * total) + block * C0
        k.copy(partial.region(place, (2, C0), (total, 1)), out.dequeue().region(0, (2, C0)))
        out.free()
    return k.finish()


@dataclass(frozen=True, slots=True)
class _TileBuffers:
    """Buffers of UB for a tile of each operand, loaded and in fp32, and for sums and products."""

    loaded: isa.Queue
    wide: list[isa.Buffer]
    sums: list[isa.Buffer]

    @classmethod
    def allocate(cls, k: isa.KernelBuilder, job: ChannelSums, size: int) -> "_TileBuffers":
        """Allocate buffers for tiles of `size` elements."""
        loaded = k.queue("a_ub", "UB", job.dtype, size, src="MTE2", dst="V")
        for name in job.images[1:]:
            loaded.join(f"{name}_ub", job.dtype, size)
        wide = [k.buffer(f"{name}_wide", "UB", "fp32", size) for name in job.images]
        sums = [k.buffer(name, "UB", "fp32", size) for name in ("sums", "products")]
        return cls(loaded, wide, sums)

    def clear(self, k: isa.KernelBuilder) -> None:
        """Emit zeros for both sums."""
        for sums in self.sums:
            k.each("vdup", sums.elements, (sums, 0), scalar=0.0)

    def add(self, k: isa.KernelBuilder, sources: list[isa.Region]) -> None:
        """Load a tile of each operand; add the first, and its products with the last, to sums."""
        loaded = self.loaded
        operands = (loaded.buffer, *loaded.members)
        slot = loaded.alloc().slot
        for source, buffer in zip(sources, operands, strict=True):
            k.copy(isa.Tile(buffer, slot).region(0, source.sizes), source)
        loaded.enqueue()
        count = sources[0].elements
        loaded_slot = loaded.dequeue().slot
        for buffer, wide in zip(operands, self.wide, strict=True):
            k.each("vconv", count, (wide, 0), (isa.Tile(buffer, loaded_slot), 0))
        loaded.free()
        a = (self.wide[0], 0)
        b = (self.wide[-1], 0)
        sums, products = ((buffer, 0) for buffer in self.sums)
        k.each("vadd", count, sums, sums, a)
        k.each("vmul", count, b, a, b)
        k.each("vadd", count, products, products, b)


def _tiles(
    k: isa.KernelBuilder, images: int, run: int, tile_images: int, size: int
) -> Iterator[tuple[isa.Affine, isa.Affine, tuple[int, int]]]:
    """Yield for each tile its first image, its first element and (images, elements of each)."""
    if size >= run:
        for at, count in tiles.segments(k, "image", images, tile_images):
            yield at, isa.Affine(), (count, run)
        return
    with tiles.repeat(k, "image", images) as image:
        for at, count in tiles.segments(k, "pixels", run, size):
            yield image, at, (1, count)


# -- second phase: sums of the cores' sums --------------------------------------------------------
def _final(job: ChannelSums, slots: int, share: isa.Share, chip: Chip) -> isa.Program:
    """Return the program that adds partial sums of a core's channels and computes both results."""
    k = isa.KernelBuilder("channel_totals", chip)
    total = job.blocks * C0
    count = share[0]
    start = k.param("channel", share[2]) * share[1]
    partial = k.tensor("partial", "fp32", slots * 2 * total)
    statistics = [
        k.tensor(x, "fp32", total) for x in ("mean", "variance") if job.epsilon is not None
    ]
    loaded = k.queue("sums", "UB", "fp32", slots * count, src="MTE2", dst="V", depth=1)
    inputs = [loaded.buffer, loaded.join("products", "fp32", slots * count)]
    inputs += [loaded.join(f"{x.name}_ub", "fp32", count) for x in statistics]
    slot = loaded.alloc().slot
    for number, sums in enumerate(inputs[:2]):
        rows = partial.region(start + number * total, (slots, count), (2 * total, 1))
        k.copy(isa.Tile(sums, slot).region(0, (slots, count)), rows)
    for tensor, buffer in zip(statistics, inputs[2:], strict=True):
        k.copy(isa.Tile(buffer, slot).region(0, count), tensor.region(start, count))
    loaded.enqueue()
    loaded.dequeue()
    for sums in inputs[:2]:
        fold_rows(k, sums, slots, count)
    _store_results(k, job, inputs, start, count)
    loaded.free()
    return k.finish()


def _store_results(
    k: isa.KernelBuilder, job: ChannelSums, inputs: list[isa.Buffer], start: isa.Affine, count: int
) -> None:
    """Compute the two results of `count` channels from `start` on, and store them."""
    results = [k.tensor(x, "fp32", job.blocks * C0) for x in ("y0", "y1")]
    out = k.queue("y0_ub", "UB", "fp32", count, src="V", dst="MTE3", depth=1)
    outs = [out.buffer, out.join("y1_ub", "fp32", count)]
    out.alloc()
    _results(k, job, inputs, outs, count)
    out.enqueue()
    out.dequeue()
    for tensor, tile in zip(results, outs, strict=True):
        k.copy(tensor.region(start, count), tile.region(0, count))
    out.free()


def _results(
    k: isa.KernelBuilder,
    job: ChannelSums,
    inputs: list[isa.Buffer],
    outs: list[isa.Buffer],
    count: int,
) -> None:
    """Compute the two results from the sums, in the first row of each tile."""

    def put(op: str, *buffers: isa.Buffer, scalar: float | None = None) -> None:
        k.each(op, count, *((buffer, 0) for buffer in buffers), scalar=scalar)

    # The numbers per channel are few: all steps run once, on one tile.
    sums, products, y0, y1 = *inputs[:2], *outs
    if job.epsilon is None:
        count_inverse = 1.0 / (job.n * job.h * job.w)
        put("vmuls", y0, sums, scalar=count_inverse)
        put("vmul", sums, y0, y0)
        put("vmuls", products, products, scalar=count_inverse)
        put("vsub", y1, products, sums)
        put("vrelu", y1, y1)  # rounding may leave it slightly below 0
        return
    mean, variance = inputs[2:]
    put("vcopy", y1, sums)
    put("vmul", mean, mean, sums)
    put("vsub", products, products, mean)
    put("vadds", variance, variance, scalar=job.epsilon)
    put("vrsqrt", variance, variance)
    put("vmul", y0, products, variance)


def fold_rows(
    k: isa.KernelBuilder,
    memory: isa.Tile | isa.Buffer,
    rows: int,
    width: int,
) -> None:
    """Add all rows to the first one in place: the second half to the first half, and so on."""
    target = (memory, 0)
    rows_left = rows
    while rows_left > 1:
        # 7 rows: add the last 3 to the first 3, 4 remain; then 2, then 1.
        half = rows_left // 2
        rows_left -= half
        k.each("vadd", half * width, target, target, (memory, rows_left * width))
