"""The kernel that computes the gates of squeeze and excite, one per channel, on the vector units.

The arithmetic is in fp32:

    hidden (images, mid) = f1(means (images, c) @ squeeze (c, mid) + bias1)
    gates (images, c)    = f2(hidden @ excite (mid, c) + bias2)

    unfused        means -> GM; product, f1 -> GM; product, f2 -> GM             three kernels
    fused          phase 1: pixels -> a core's addends of the first product -> GM
                   phase 2: all addends -> hidden -> a core's gates -> GM        one kernel

The first product is linear, so a core need not know whole means: from some rows of some channels it
computes what these contribute to `hidden`. In phase 2 every core adds up these contributions,
`parts` (16 cores x 48 hidden numbers are 3 KB), and computes the gates of its own channels. With
`rows` the same kernel also scales the weights of the next convolution by the gates (see `gates`).

A matrix times a vector is a lane-by-lane product, 64 columns per repeat, then two steps that each
sum 8 lanes.
"""

from dataclasses import dataclass, replace

from ascend_lab.fused.channel_sums_kernel import LANES, SMALL, TILES, fold_rows
from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, Affine, Buffer, KernelBuilder, Region, Tile, ceil_div
from ascend_lab.operators.kernels import epilogue, epilogue_emit, epilogue_plan
from ascend_lab.operators.kernels.planes import PlaneShare, deal_planes, plane_launch
from ascend_lab.operators.kernels.tiles import chunks, repeat, segments, sum_queue

AREA = FRACTAL * FRACTAL
"""Elements of a fractal of fp16, 16 x 16."""
LOAD_FRACTALS = 28
"""Fractals that one load brings to L0B, at most."""
FOLD_LANES = 8
"""Lanes that `vcgadd` adds up to one."""
PIXEL_BYTES = 12
"""UB bytes per pixel and channel: two slots in fp16 (2 x 2) and two sums in fp32 (2 x 4)."""
Place = tuple[Tile | Buffer, Affine | int]
"""A memory and the element in it at which something begins."""


@dataclass(frozen=True, slots=True)
class Excitation:
    """Squeeze and excite of images (n, c, h, w) in fp16 with `mid` hidden numbers.

    `functions` are f1 and f2. If `rows` is not 0 the gates scale weights, of which each channel
    block has `rows` rows of 16.
    """

    n: int
    c: int
    h: int
    w: int
    mid: int
    functions: tuple[epilogue.Epilogue, epilogue.Epilogue]
    rows: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of 16 channels."""
        return ceil_div(self.c, FRACTAL)

    @property
    def hidden(self) -> int:
        """Hidden numbers, in whole blocks: 10 become 16."""
        return ceil_div(self.mid, FRACTAL) * FRACTAL


def excitation_launches(job: Excitation, chip: Chip) -> tuple[isa.Launch, isa.Launch]:
    """Return both phases; raise `CapacityError` if UB is too small.

    Tensors: x in NC1HWC0, squeeze (hidden, channels), excite (channels, hidden), fp32 bias1, bias2
    and `parts`; y, a gate per image and channel, or with `rows` these times `weight`.
    """
    sizes = _divided(job, chip)
    # one image has a part for each share of channels and each share of rows
    part_count = len(sizes[0]) * len(sizes[2])
    squeeze_launch = plane_launch("squeeze", sizes, lambda share: _squeeze(job, share, sizes, chip))
    # the second phase has other shares: no rows are left to divide
    gate_shares = deal_planes((job.blocks, job.n, 1), chip.cores_of("vector"))
    return squeeze_launch, plane_launch(
        "excite", gate_shares, lambda share: _Gates(job, share, part_count, chip).program()
    )


def _divided(job: Excitation, chip: Chip) -> tuple[list[int], list[int], list[int]]:
    """Divide channel blocks, images and rows over cores so that the busiest core ends first.

    Return the sizes of the shares along each of the three. The estimate of a core's cycles counts
    the pixels of each block, one (with a cube 3) per cycle; 4 cycles per hidden number and 64
    channels for the first product; the parts to add in phase 2, one per share of channels and rows;
    and half a cycle per weight row of the second product.
    """
    cores = chip.cores_of("vector")
    pixels_per_cycle = 3 if chip.combined else 1

    def cycles(grid: tuple[int, int, int]) -> int:
        block_cores, image_cores, row_cores = grid
        blocks = ceil_div(job.blocks, block_cores)
        images = ceil_div(job.n, image_cores)
        rows = ceil_div(job.h, row_cores)
        parts = block_cores * row_cores
        product_cycles = job.hidden * (4 * ceil_div(blocks, LANES // FRACTAL) + parts // 32)
        image_cycles = rows * job.w * blocks // pixels_per_cycle + product_cycles
        return images * image_cycles + job.hidden * blocks // 2

    grids: list[tuple[int, int, int]] = []
    for block_cores in range(1, min(job.blocks, cores) + 1):
        for image_cores in range(1, min(job.n, cores) + 1):
            # 16 cores, 4 along channels and 2 along images: at most 16 // 8 = 2 along rows
            most_row_cores = min(job.h, cores // (block_cores * image_cores))
            row_choices = range(1, most_row_cores + 1)
            grids.extend((block_cores, image_cores, rows) for rows in row_choices)
    block_cores, image_cores, row_cores = min(grids, key=cycles)
    return (
        chunks(job.blocks, 1, block_cores),
        chunks(job.n, 1, image_cores),
        chunks(job.h, 1, row_cores),
    )


class _Matrix:
    """A matrix (rows, width) in UB in fp32, which is multiplied by vectors."""

    def __init__(self, k: KernelBuilder, name: str, rows: int, width: int) -> None:
        """Allocate buffers; `name` is the name of the matrix's tensor."""
        self.k = k
        self.rows = rows
        self.width = width
        size = rows * width
        self.narrow = k.queue(f"{name}_ub", "UB", "fp16", size, src="MTE2", dst="V", depth=1)
        self.wide = k.buffer(f"{name}_wide", "UB", "fp32", size)
        self.sums = k.buffer(f"{name}_sums", "UB", "fp32", rows * LANES)
        self.products = k.buffer(f"{name}_products", "UB", "fp32", rows * LANES)

    def load(self, source: Region) -> None:
        """Copy the matrix to UB and convert it to fp32; unused lanes of its sums become 0."""
        k = self.k
        k.copy(self.narrow.alloc().region(0, source.sizes), source)
        self.narrow.enqueue()
        if self.width < LANES:
            k.each("vdup", self.rows * LANES, (self.sums, 0), scalar=0.0)
        k.each("vconv", self.rows * self.width, (self.wide, 0), (self.narrow.dequeue(), 0))
        self.narrow.free()

    def times(self, vector: Buffer, to: Place) -> None:
        """Write the product of the matrix and a vector to `to`.

        64 columns at a time are multiplied lane by lane and added to 64 sums a row; the 64 sums of
        a row are then added up in two steps of 8: 64 -> 8 -> 1.
        """
        k = self.k
        for start in range(0, self.width, LANES):
            lanes = min(LANES, self.width - start)
            target = self.products if start else self.sums
            for row, rows in segments(k, "row", self.rows, k.chip.max_repeat):
                partial_place = (row * LANES, (rows, lanes), (LANES, 1))
                sizes = (rows, lanes)
                columns = self.wide.region(row * self.width + start, sizes, (self.width, 1))
                # stride 0: every row meets the same 64 numbers of the vector
                numbers = vector.region(start, sizes, (0, 1))
                k.vector("vmul", target.region(*partial_place), columns, numbers)
                if start:
                    sums = self.sums.region(*partial_place)
                    k.vector("vadd", sums, sums, target.region(*partial_place))
        self._eighths((self.products, 0), self.sums, self.rows * FOLD_LANES)
        self._eighths(to, self.products, self.rows)

    def _eighths(self, to: Place, source: Buffer, count: int) -> None:
        """Write `count` sums of 8 neighbours each."""
        memory, start = to
        for index, (repeats, lanes) in self.k.runs(count, FOLD_LANES):
            values = source.region(index * FOLD_LANES, (repeats, lanes * FOLD_LANES))
            self.k.vector("vcgadd", memory.region(start + index, (repeats, lanes)), values)


# -- first phase: sums of pixels, and what they add to the hidden numbers -------------------------
def _squeeze(
    job: Excitation, share: PlaneShare, sizes: tuple[list[int], ...], chip: Chip
) -> isa.Program:
    """Return the program of the first phase, for all cores whose shares have one size."""
    k = KernelBuilder("squeeze", chip)
    row = job.w * FRACTAL
    bands = len(sizes[2])
    (block_count, block_pitch, cores) = share.channels
    (images, image_pitch, batches) = share.images
    lanes = block_count * FRACTAL
    width = job.blocks * FRACTAL
    plane = job.h * row
    first_row = share.rows[0] * row
    x = k.tensor("x", "fp16", job.n * job.blocks * plane)
    squeeze = k.tensor("squeeze", "fp16", job.hidden * width)
    parts = k.tensor("parts", "fp32", len(sizes[0]) * bands * job.n * job.hidden)
    core = k.param("channel", cores)
    batch = k.param("batch", batches) * image_pitch
    matrix = _Matrix(k, "squeeze", job.hidden, lanes)
    out = k.queue("parts_ub", "UB", "fp32", job.hidden, src="V", dst="MTE3")
    pixels = (share.rows[1] - share.rows[0]) * job.w
    # the cube adds up 16 pixels at a time; fewer pixels are left to the vector unit
    summing_class = _ByCube if chip.combined and pixels >= FRACTAL else _ByVector
    planes = summing_class(k, x, (block_count, pixels, plane))
    matrix.load(squeeze.region(core * (block_pitch * FRACTAL), (job.hidden, lanes), (width, 1)))
    with repeat(k, "image", images) as turn:
        image = batch + turn
        means_place = (planes.sums, 0)
        planes.add((image * job.blocks + core * block_pitch) * plane + first_row)
        # divided by all pixels of an image, not of the core's rows: the parts add up to the mean
        k.each("vmuls", lanes, means_place, means_place, scalar=1.0 / (job.h * job.w))
        matrix.times(planes.sums, (out.alloc(), 0))
        out.enqueue()
        # parts (divisions of channels, bands of rows, images, hidden), in this order in GM
        place = ((core * bands + share.band) * job.n + image) * job.hidden
        k.copy(parts.region(place, job.hidden), out.dequeue().region())
        out.free()
    return k.finish()


class _ByVector:
    """Sums of `pixels` pixels of `count` planes by the vector unit, tile by tile.

    A tile holds `tile_pixels` pixels of all planes, one row of lanes per pixel. All tiles are added
    to the first one lane by lane; then half of its rows are added to the other half, and so on.
    """

    def __init__(self, k: KernelBuilder, x: Buffer, sizes: tuple[int, int, int]) -> None:
        """Allocate; `sizes` are (count, pixels, elements from plane to plane)."""
        self.k = k
        self.x = x
        self.count, self.pixels, self.plane = sizes
        lanes = self.lanes = self.count * FRACTAL
        pixels_that_fit = (k.chip.buffers["UB"] - k.used_bytes("UB")) // (PIXEL_BYTES * lanes)
        # 1 / TILES of the pixels, so that loads and sums overlap, but no tile under SMALL numbers
        useful_pixels = max(ceil_div(self.pixels, TILES), SMALL // lanes)
        tile_pixels = max(1, min(self.pixels, pixels_that_fit, useful_pixels))
        self.tile_pixels = tile_pixels
        size = tile_pixels * lanes
        self.loaded = k.queue("x_ub", "UB", "fp16", size, src="MTE2", dst="V")
        self.sums = k.buffer("sums", "UB", "fp32", size)
        # if one tile holds all pixels nothing is added to it
        self.wide = k.buffer("wide", "UB", "fp32", size if tile_pixels < self.pixels else LANES)

    def add(self, start: Affine) -> None:
        """Sum planes from `start` on."""
        k = self.k
        sums_place = (self.sums, 0)
        self._widen(start, self.tile_pixels, self.sums)
        for at, count in segments(k, "pixels", self.pixels - self.tile_pixels, self.tile_pixels):
            self._widen(start + (at + self.tile_pixels) * FRACTAL, count, self.wide)
            k.each("vadd", count * self.lanes, sums_place, sums_place, (self.wide, 0))
        fold_rows(k, self.sums, self.tile_pixels, self.lanes)

    def _widen(self, start: Affine, pixels: int, to: Buffer) -> None:
        """Load pixels to UB, their planes side by side, and convert them to fp32."""
        shape = (self.count, pixels, FRACTAL)
        by_pixels = (FRACTAL, self.lanes, 1)
        source = self.x.region(start, shape, (self.plane, FRACTAL, 1))
        self.k.copy(self.loaded.alloc().region(0, shape, by_pixels), source)
        self.loaded.enqueue()
        self.k.each("vconv", pixels * self.lanes, (to, 0), (self.loaded.dequeue(), 0))
        self.loaded.free()


class _ByCube:
    """Sums of `pixels` pixels of `count` planes by the cube: ones (1, pixels) @ x (pixels, 16).

    The last fractal begins 16 pixels before the end and may overlap the one before it; the ones
    that belong to pixels already counted are then 0. 50 pixels: fractals at 0, 16, 32 and at 34,
    the last with 14 zeros.
    """

    def __init__(self, k: KernelBuilder, x: Buffer, sizes: tuple[int, int, int]) -> None:
        """Allocate; `sizes` are (count, pixels, elements from plane to plane)."""
        self.k = k
        self.x = x
        self.count, self.pixels, self.plane = sizes
        # 50 pixels: fractals at 0, 16, 32; 48 pixels: at 0, 16; the last one is counted separately
        self.whole_fractals = ceil_div(self.pixels, FRACTAL) - 1
        self.depth = max(1, min(self.whole_fractals, LOAD_FRACTALS))
        line = self.pixels * FRACTAL
        self.tile_planes = (
            self.count if self.count * line <= SMALL * TILES else ceil_div(self.count, TILES)
        )
        self.loaded = k.queue("x_l1", "L1", "fp16", self.tile_planes * line, src="MTE2", dst="MTE1")
        self.right = k.queue("x_l0", "L0B", "fp16", self.depth * AREA, src="MTE1", dst="M")
        self.plane_sums = sum_queue(k, "plane_sums", "fp32", 1, self.count)
        self.sums = k.buffer("sums", "UB", "fp32", self.count * FRACTAL)
        self._make_ones()

    def _make_ones(self) -> None:
        """Load fractals of ones to L0A, where they stay, and behind them the one with zeros."""
        k = self.k
        size = (self.depth + 1) * AREA
        ones_ub = k.queue("ones_ub", "UB", "fp16", 2 * AREA, src="V", dst="MTE3", depth=1)
        ones_l1 = k.queue("ones_l1", "L1", "fp16", 2 * AREA, src="MTE3", dst="MTE1", depth=1)
        ones_l0 = k.queue("ones_l0", "L0A", "fp16", size, src="MTE1", dst="M", depth=1)
        slot = ones_ub.alloc()
        sizes = (self.depth, AREA)
        k.each("vdup", 2 * AREA, (slot, 0), scalar=1.0)
        # 50 pixels: -50 % 16 = 14 zeros
        if missing := -self.pixels % FRACTAL:
            # in every row of 16 the first `missing` numbers become 0
            lanes = k.chip.vector_bytes_per_repeat // 2
            mask = sum(1 << lane for lane in range(lanes) if lane % FRACTAL < missing)
            k.vector("vdup", slot.region(AREA, (AREA // lanes, lanes)), scalar=0.0, mask=mask)
        ones_ub.enqueue()
        k.copy(ones_l1.alloc().region(), ones_ub.dequeue().region())
        ones_ub.free()
        ones_l1.enqueue()
        ones = ones_l1.dequeue()
        self.ones = ones_l0.alloc()
        k.load2d(self.ones.region(0, sizes), ones.region(0, sizes, (0, 1)))
        k.load2d(self.ones.region(self.depth * AREA, (1, AREA)), ones.region(AREA, (1, AREA)))
        ones_l1.free()
        ones_l0.enqueue()
        ones_l0.dequeue()
        ones_l0.free()

    def add(self, start: Affine) -> None:
        """Sum planes from `start` on."""
        k = self.k
        sums = self.plane_sums.alloc()
        plane_size = self.pixels * FRACTAL
        for low, count in segments(k, "planes", self.count, self.tile_planes):
            source = self.x.region(start + low * self.plane, (count, plane_size), (self.plane, 1))
            k.copy(self.loaded.alloc().region(0, (count, plane_size)), source)
            self.loaded.enqueue()
            x = self.loaded.dequeue()
            with repeat(k, "plane", count) as plane:
                to = sums.region((low + plane) * AREA, (1, 1, FRACTAL, FRACTAL))
                offset = plane * plane_size
                for at, depth in segments(k, "fractals", self.whole_fractals, self.depth):
                    self._product(to, x.region(offset + at * AREA, depth * AREA), 0, at)
                tail = x.region(offset + plane_size - AREA, AREA)
                self._product(to, tail, self.depth, Affine(self.whole_fractals))
            self.loaded.free()
        self.plane_sums.enqueue()
        rows = self.count, FRACTAL
        k.copy(self.sums.region(0, rows), self.plane_sums.dequeue().region(0, rows, (AREA, 1)))
        self.plane_sums.free()

    def _product(self, to: Region, x: Region, ones_at: int, fractals_before: Affine) -> None:
        """Multiply pixels by ones from fractal `ones_at` on; add to the sum of earlier fractals.

        With `fractals_before` = 0 the product starts a new sum.
        """
        k = self.k
        sides = (FRACTAL, FRACTAL)
        count = x.elements // AREA
        # load2d transposes each fractal: pixels become the dimension that the cube sums over
        transposed = replace(x, sizes=(count, *sides), strides=(AREA, 1, FRACTAL))
        k.load2d(self.right.alloc().region(0, (count, *sides)), transposed)
        self.right.enqueue()
        ones_operand = self.ones.region(ones_at * AREA, (1, count, *sides))
        pixels_operand = self.right.dequeue()
        k.mmad(
            to,
            ones_operand,
            pixels_operand.region(0, (count, 1, *sides)),
            accumulate=fractals_before,
        )
        self.right.free()


# -- second phase: gates ---------------------------------------------------------------------------
class _Gates:
    """The second phase, for cores with shares of one size; each core adds `part_count` parts."""

    def __init__(self, job: Excitation, share: PlaneShare, part_count: int, chip: Chip) -> None:
        """Allocate all buffers and queues."""
        k = KernelBuilder("excite", chip)
        hidden = job.hidden
        blocks = share.channels[0]
        self.k = k
        self.job = job
        self.share = share
        self.lanes = blocks * FRACTAL
        lanes = self.lanes
        # elements of y per channel block, and those stored at once: the scaled weights of a block,
        # or all gates of the core
        self.block_size = job.rows * FRACTAL if job.rows else FRACTAL
        self.line = self.block_size if job.rows else lanes
        parts_size = (part_count + 1) * hidden
        self.excite = k.tensor("excite", "fp16", job.blocks * FRACTAL * hidden)
        self.parts = k.tensor("parts", "fp32", part_count * job.n * hidden)
        self.bias1 = k.tensor("bias1", "fp32", hidden)
        self.bias2 = k.tensor("bias2", "fp32", job.blocks * FRACTAL)
        self.y = k.tensor("y", "fp16", job.n * job.blocks * self.block_size)
        self.loaded = k.queue("parts_ub", "UB", "fp32", parts_size, src="MTE2", dst="V", depth=1)
        self.out = k.queue("y_ub", "UB", "fp16", self.line, src="V", dst="MTE3")
        self.matrix = _Matrix(k, "excite", lanes, hidden)
        self.added = Tile(self.matrix.narrow.join("bias2_ub", "fp32", lanes), Affine())
        self.wide = k.buffer("hidden", "UB", "fp32", hidden)
        self.sums = k.buffer("sums", "UB", "fp32", lanes)
        if job.rows:
            self.weight = k.tensor("weight", "fp16", job.blocks * self.block_size)
            self.unscaled_weights = k.queue(
                "w_ub", "UB", "fp16", blocks * self.block_size, src="MTE2", dst="V", depth=1
            )

    def program(self) -> isa.Program:
        """Return the program: for each image the hidden numbers, from all parts, then the gates."""
        k = self.k
        hidden = self.job.hidden
        lanes = self.lanes
        sums = (self.sums, 0)
        (_, block_pitch, cores) = self.share.channels
        (images, image_pitch, batches) = self.share.images
        first_block = k.param("channel", cores) * block_pitch
        first_image = k.param("batch", batches) * image_pitch
        k.copy(self.added.region(0, lanes), self.bias2.region(first_block * FRACTAL, lanes))
        self.matrix.load(self.excite.region(first_block * (FRACTAL * hidden), lanes * hidden))
        with repeat(k, "image", images) as turn:
            tile = self._load(first_image + turn, first_block)
            # parts and bias are rows of one matrix: their sum is one number a column
            fold_rows(k, tile, self.loaded.buffer.elements // hidden, hidden)
            values = _applied(k, "f1", self.job.functions[0], (tile, 0), hidden)
            k.each("vconv", hidden, (self.wide, 0), (values, 0))
            self.loaded.free()
            self.matrix.times(self.wide, sums)
            k.each("vadd", lanes, sums, sums, (self.added, 0))
            gates = _applied(k, "f2", self.job.functions[1], sums, lanes)
            self._store(gates, (first_image + turn) * self.job.blocks + first_block)
        return k.finish()

    def _load(self, image: Affine, first_block: Affine) -> Tile:
        """Load the parts of an image, the bias behind them, and the weights to be scaled.

        The bias is one more row under the parts, so that one sum adds it, too.
        """
        k = self.k
        hidden = self.job.hidden
        slot = self.loaded.alloc()
        # one row less than the buffer has: the last is the bias
        sizes = self.loaded.buffer.elements // hidden - 1, hidden
        k.copy(slot.region(sizes[0] * hidden, hidden), self.bias1.region(0, hidden))
        source = self.parts.region(image * hidden, sizes, (self.job.n * hidden, 1))
        k.copy(slot.region(0, sizes), source)
        self.loaded.enqueue()
        if self.job.rows:
            weights = self.weight.region(
                first_block * self.line, self.unscaled_weights.buffer.elements
            )
            k.copy(self.unscaled_weights.alloc().region(), weights)
            self.unscaled_weights.enqueue()
        return self.loaded.dequeue()

    def _store(self, gates: Buffer, block: Affine) -> None:
        """Store gates, or the weights that they scale; `block` is the first channel block in GM."""
        k = self.k
        line = self.line
        rows = self.job.rows
        weights = self.unscaled_weights.dequeue() if rows else self.added
        with repeat(k, "block", self.share.channels[0] if rows else 1) as turn:
            slot = self.out.alloc()
            if not rows:
                k.each("vcopy", line, (slot, 0), (gates, 0))
            for offset, (repeats, lanes) in k.runs(line if rows else 0, 2 * LANES):
                sizes = repeats, lanes // FRACTAL, FRACTAL
                # strides of 0: the same 16 gates meet every row of 16 weights
                gate = gates.region(turn * FRACTAL, sizes, (0, 0, 1))
                k.vector(
                    "vmul",
                    slot.region(offset, sizes),
                    weights.region(turn * line + offset, sizes),
                    gate,
                )
            self.out.enqueue()
            to = self.y.region((block + turn) * self.block_size, line)
            k.copy(to, self.out.dequeue().region(0, line))
            self.out.free()
        if rows:
            self.unscaled_weights.free()


def _applied(
    k: KernelBuilder, name: str, function: epilogue.Epilogue, sums: Place, size: int
) -> Buffer:
    """Apply f1 or f2 to `size` sums in fp32, in fp16, and return the buffer of the results."""
    plan = epilogue_plan.plan_of(function, "fp16")
    tiles = [k.buffer(f"{name}.{i}", "UB", dtype, size) for i, dtype in enumerate(plan.tiles)]
    k.each("vconv", size, (tiles[plan.start], 0), sums)
    epilogue_emit.write_steps(k, plan, epilogue_emit.Piece(tiles, {}, {}, Affine(), 1, size))
    return tiles[0]
