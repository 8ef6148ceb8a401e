"""A product with int8 weights: vector cores convert the weights, the cube multiplies.

    y = x ((w + offset) scale) + bias        x in fp16 or bf16, w in int8, the others by column

Weights are read from memory as bytes. Tile by tile, each vector core of an AI core converts its
share of the rows to fp16, adds the offsets and multiplies by the scales. If x is in bf16, this is
done in fp32, because no vector instruction multiplies bf16. Tiles go to the cube core through a
ring of slots that stays in L2, in blocks of 16 columns; the cube multiplies some tiles while the
vector cores convert others.

x (K1, M1, 16, 16) and y (N1, M1, 16, 16) are fractals. w is row-major, filled up with zeros to
whole fractals of rows and blocks of 32 columns: two fractals side by side.

Source: Ascend C, aclnnWeightQuantBatchMatmulV2 (developer documentation): the formula.
"""

from dataclasses import dataclass

from ascend_lab.errors import InputError, PathError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import FRACTAL, Affine, ceil_div
from ascend_lab.operators.kernels import epilogue_emit, tiles
from ascend_lab.operators.kernels.epilogue import PAIR, SUMS, Epilogue, Operand, Step
from ascend_lab.operators.kernels.flash import load_transposed
from ascend_lab.operators.kernels.tiles import Area, Fractals, Span, chunks, feed_a, segments
from ascend_lab.operators.kernels.vector_tail import AREA, SLOTS

SCALED_IN = {"fp16": "fp16", "bf16": "fp32"}
"""Format of x -> the format in which weights are multiplied by their scales."""
ROWS = 8
"""Most fractals of rows of a tile of sums."""
COLUMNS = 16
"""Most fractals of columns of a tile of sums: 8 x 16 of them fill L0C."""
DEPTHS = (8, 4, 2)
"""Fractals of K in a slot of the ring that are tried, the most first."""


@dataclass(frozen=True, slots=True)
class WeightQuantShape:
    """Sizes, format of x and y, and whether there are offsets and a bias besides the scales.

    Raises `InputError` for a size below 1 or another format.
    """

    m: int
    k: int
    n: int
    dtype: str = "fp16"
    offset: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        """Check sizes and format."""
        if min(self.m, self.k, self.n) < 1 or self.dtype not in SCALED_IN:
            needed = f"sizes of at least 1, x in {', '.join(SCALED_IN)}"
            got = f"{self.m}, {self.k}, {self.n} in {self.dtype}"
            raise InputError(needed, got, "convert x, or give positive sizes")

    @property
    def fractals(self) -> tuple[int, int, int]:
        """(M1, K1, N1): N1 is even."""
        return ceil_div(self.m, FRACTAL), ceil_div(self.k, FRACTAL), 2 * ceil_div(self.n, PAIR)

    @property
    def epilogue(self) -> Epilogue:
        """The epilogue that the fix pipe applies to the sums."""
        rounded = Step("vconv", (0 if self.bias else SUMS,), dtype=self.dtype)
        if not self.bias:
            return Epilogue((), (rounded,), self.dtype)
        bias = Operand("bias", "channel", "fp32")
        return Epilogue((bias,), (Step("vadd", (SUMS, bias.name)), rounded), self.dtype)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Fractals of a tile of sums (high, wide) and of K in a slot; cores along m and n."""

    m: int
    n: int
    k: int
    grid: tuple[int, int]


def _tiling(shape: WeightQuantShape, chip: Chip) -> _Tiling:
    """Return tiles 8 fractals high, as wide as the columns of a core, and as deep as UB allows.

    Cores divide the rows of x by tiles; further cores divide the columns, as each core converts the
    weights of its own columns.
    """
    m1, k1, n1 = shape.fractals
    # Tiles are 8 fractals high: 128 rows of x.
    rows = min(ceil_div(m1, ROWS), chip.core_count)
    # Blocks of 32 columns per core, from which tiles of equal width are made.
    core_pairs = ceil_div(n1 // 2, min(n1 // 2, chip.core_count // rows))
    tile_columns = 2 * ceil_div(core_pairs, ceil_div(2 * core_pairs, COLUMNS))
    grid = rows, ceil_div(n1 // 2, core_pairs)
    # Two slots of bytes, two of 2-byte weights; for bf16 a copy in fp16 and one in fp32.
    element_bytes = 2 + 4 + (6 if SCALED_IN[shape.dtype] == "fp32" else 0)
    # Two slots each of scales and offsets.
    number_bytes = 2 * 2 * tile_columns * FRACTAL * DTYPE_BYTES["fp32"]
    room = (chip.buffers["UB"] - number_bytes) * chip.vector_cores_per_core
    depths_that_fit = [d for d in DEPTHS if d * tile_columns * AREA * element_bytes <= room]
    depth = depths_that_fit[0] if depths_that_fit else 1
    return _Tiling(min(ROWS, m1), tile_columns, min(depth, k1), grid)


def weight_quant_launch(shape: WeightQuantShape, chip: Chip) -> isa.Launch:
    """Return the kernel: GM tensors x, w, scale (, offset, bias), y and the ring.

    Raises `PathError` on chips whose vector unit shares the cube's core, or that lack the format.
    """
    if chip.combined or shape.dtype not in chip.cube:
        needed = f"vector cores apart from the cube, and {shape.dtype}"
        raise PathError(needed, chip.name, "convert the weights with a cast, then multiply")
    tiling = _tiling(shape, chip)
    m1, _, n1 = shape.fractals
    # Columns are dealt in pairs of fractals: a block of 32 bytes of w has 32 columns.
    axes = {
        "row": chunks(m1, tiling.m, tiling.grid[0]),
        "col": chunks(n1, 2, tiling.grid[1]),
    }
    cores = len(axes["row"]), len(axes["col"])

    def programs(rows: isa.Share, cols: isa.Share) -> tuple[isa.Program, ...]:
        plan = _Plan(shape, chip, tiling, cores, rows, cols)
        vector = _Vector(plan).program()
        return _Cube(plan).program(), *[vector] * chip.vector_cores_per_core

    return isa.spread(f"weight_quant_{shape.m}x{shape.k}x{shape.n}", axes, programs)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the programs of an AI core have in common."""

    shape: WeightQuantShape
    chip: Chip
    tiling: _Tiling
    cores: tuple[int, int]
    rows: isa.Share
    cols: isa.Share

    @property
    def tile(self) -> tuple[int, int, int]:
        """Fractals of the largest tile of this core: of m, of n, and of K in a slot."""
        t = self.tiling
        # A core with fewer rows or columns than a tile has smaller tiles.
        return min(t.m, self.rows[0]), min(t.n, self.cols[0]), t.k

    def place(self, k: isa.KernelBuilder) -> tuple[Affine, Affine, Affine]:
        """Return the number of an AI core, and where its rows and columns begin."""
        row = k.param("row", self.rows[2])
        col = k.param("col", self.cols[2])
        return row * self.cores[1] + col, row * self.rows[1], col * self.cols[1]

    @property
    def ring(self) -> isa.Ring:
        """The ring of tiles of weights."""
        size = self.tiling.n * self.tiling.k * AREA
        cores = self.cores[0] * self.cores[1]
        return isa.Ring("tiles", self.shape.dtype, size, SLOTS, cores, ready=0, empty=1)


class _Vector:
    """Writes the program of both vector cores, each of which converts its share of the rows."""

    def __init__(self, plan: _Plan) -> None:
        """Allocate UB."""
        self.plan = plan
        shape = plan.shape
        k = self.k = isa.KernelBuilder("weights", plan.chip)
        core, self.row, self.col = plan.place(k)
        self.member = k.param("aiv", plan.chip.vector_cores_per_core)
        self.ring = k.ring_out(plan.ring, core, "MTE3")
        _, k1, n1 = shape.fractals
        _, n, depth = plan.tile
        self.pitch = n1 * FRACTAL
        elements = n * FRACTAL
        self.w = k.tensor("w", "int8", k1 * FRACTAL * self.pitch)
        size = n * depth * AREA // plan.chip.vector_cores_per_core
        self.bytes = k.queue("w_ub", "UB", "int8", size, src="MTE2", dst="V")
        self.out = k.queue("weights_ub", "UB", shape.dtype, size, src="V", dst="MTE3")
        scale_dtype = SCALED_IN[shape.dtype]
        self.numbers = k.queue("scale_ub", "UB", scale_dtype, elements, src="MTE2", dst="V")
        self.columns = {self.numbers.buffer: k.tensor("scale", scale_dtype, self.pitch)}
        self.offset: isa.Buffer | None = None
        if shape.offset:
            self.offset = self.numbers.join("offset_ub", "fp16", elements)
            self.columns[self.offset] = k.tensor("offset", "fp16", self.pitch)
        # For bf16: weights in fp16, then in fp32.
        self.halves: isa.Buffer | None = None
        self.singles: isa.Buffer | None = None
        if scale_dtype == "fp32":
            self.halves = k.buffer("half_ub", "UB", "fp16", size)
            self.singles = k.buffer("single_ub", "UB", "fp32", size)

    def program(self) -> isa.Program:
        """Return the program, which converts tiles in the order in which the cube uses them."""
        plan = self.plan
        k = self.k
        m, n, max_depth = plan.tile
        for n_at, columns in segments(k, "n", plan.cols[0], n):
            loaded_slot = self.numbers.alloc().slot
            for place, tensor in self.columns.items():
                source = tensor.region((self.col + n_at) * FRACTAL, columns * FRACTAL)
                k.copy(isa.Tile(place, loaded_slot).region(0, columns * FRACTAL), source)
            self.numbers.enqueue()
            slot = self.numbers.dequeue().slot
            # Each tile of rows of x needs all weights again: the cube keeps none.
            for _ in segments(k, "m", plan.rows[0], m):
                for at, depth in segments(k, "k", plan.shape.fractals[1], max_depth):
                    self._tile((self.col + n_at, columns), (at, depth), slot)
            self.numbers.free()
        return k.finish()

    def _tile(self, n: Span, depth: Span, number_slot: Affine | int) -> None:
        """Convert some rows of a tile with the scales and offsets in slot `number_slot`."""
        k = self.k
        width = n[1] * FRACTAL
        rows = depth[1] * FRACTAL // self.plan.chip.vector_cores_per_core
        # Each vector core makes its share of the rows of a tile: rows 0 .. 63 and 64 .. 127.
        first_row = depth[0] * FRACTAL + self.member * rows
        source = self.w.region(
            first_row * self.pitch + n[0] * FRACTAL, (rows, width), (self.pitch, 1)
        )
        k.copy(self.bytes.alloc().region(0, (rows, width)), source)
        self.bytes.enqueue()
        loaded = self.bytes.dequeue()
        out = self.out.alloc()
        # fp16 results are computed in place; for bf16 the fp16 numbers need a separate buffer.
        halves = self.halves or out
        scale = isa.Tile(self.numbers.buffer, number_slot)
        k.each("vconv", rows * width, (halves, 0), (loaded, 0))
        self.bytes.free()
        if self.offset:
            self._by_column("vadd", halves, isa.Tile(self.offset, number_slot), (rows, width))
        # bf16 has no multiplication: scale in fp32, then round.
        if self.singles:
            k.each("vconv", rows * width, (self.singles, 0), (halves, 0))
            self._by_column("vmul", self.singles, scale, (rows, width))
            k.each("vconv", rows * width, (out, 0), (self.singles, 0))
        else:
            self._by_column("vmul", out, scale, (rows, width))
        self.out.enqueue()
        finished = self.out.dequeue()
        slot = self.ring.alloc()
        sizes = n[1], rows, FRACTAL
        # In the ring a block of 16 columns has all rows of the tile.
        block = depth[1] * AREA
        place = slot.region(self.member * (rows * FRACTAL), sizes, (block, FRACTAL, 1))
        k.copy(place, finished.region(0, sizes, (FRACTAL, width, 1)))
        self.out.free()
        self.ring.enqueue()

    def _by_column(
        self, op: str, values: isa.Tile | isa.Buffer, numbers: isa.Tile, sizes: tuple[int, int]
    ) -> None:
        """Apply `op` to values (rows, columns) and one number per column, one repeat per row."""
        rows, width = sizes
        lanes = self.k.chip.vector_bytes_per_repeat // numbers.buffer.itemsize
        for at in range(0, width, lanes):
            # A stride of 0 repeats the numbers for every row.
            sizes_of_repeat = rows, min(lanes, width - at)
            piece = values.region(at, sizes_of_repeat, (width, 1))
            self.k.vector(op, piece, piece, numbers.region(at, sizes_of_repeat, (0, 1)))


class _Cube:
    """Writes the program of the cube core: x times the tiles that come through the ring."""

    def __init__(self, plan: _Plan) -> None:
        """Allocate slots in L1 and L0, and buffers for the bias."""
        self.plan = plan
        shape = plan.shape
        m, n, depth = plan.tile
        m1, k1, n1 = shape.fractals
        k = self.k = isa.KernelBuilder("products", plan.chip)
        core, self.row, self.col = plan.place(k)
        self.ring = k.ring_in(plan.ring, core, "MTE2")
        self.x = k.tensor("x", shape.dtype, k1 * m1 * AREA)
        self.y = k.tensor("y", shape.dtype, n1 * m1 * AREA)

        def queue(name: str, space: str, fractals: int, src: str, dst: str) -> isa.Queue:
            return k.queue(name, space, shape.dtype, fractals * AREA, src=src, dst=dst)

        sides = (("L0A", m), ("L0B", n))
        # Bytes of a fractal in two slots.
        slot = 2 * AREA * DTYPE_BYTES[shape.dtype]
        # As much of K as two slots of L0A and of L0B hold.
        self.step = min(
            depth, *(plan.chip.buffers[space] // (slot * side) for space, side in sides)
        )
        self.x_l1 = queue("x_l1", "L1", m * depth, "MTE2", "MTE1")
        self.w_l1 = queue("w_l1", "L1", n * depth, "MTE2", "MTE1")
        self.x_l0 = queue("x_l0", "L0A", m * self.step, "MTE1", "M")
        self.w_l0 = queue("w_l0", "L0B", n * self.step, "MTE1", "M")
        self.acc = tiles.sum_queue(k, "y_l0", "fp32", m, n)
        sizes = epilogue_emit.Sizes(m, n, plan.cols[0], n1, n1 * m1 * AREA)
        self.finish = epilogue_emit.new_finish(k, shape.epilogue, "fp32", sizes)

    def program(self) -> isa.Program:
        """Return the program over the tiles of sums, with columns in the outer loop."""
        plan = self.plan
        k = self.k
        m, n, _ = plan.tile
        for n_at, columns in segments(k, "n", plan.cols[0], n):
            column_span = self.col + n_at, columns
            with epilogue_emit.held_channels(self.finish, column_span, Affine(), None) as channels:
                for m_at, rows in segments(k, "m", plan.rows[0], m):
                    self._sums((self.row + m_at, rows), column_span, channels)
        return k.finish()

    def _sums(self, m: Span, n: Span, channels: epilogue_emit.Channels | None) -> None:
        """Write one tile of y: the sum over K, one slot of the ring at a time."""
        k = self.k
        m1, k1, _ = self.plan.shape.fractals
        bias = epilogue_emit.bias_of(self.finish, channels, n)
        sums = self.acc.alloc()
        for at, depth in segments(k, "k", k1, self.plan.tile[2]):
            source = self.x.region((at * m1 + m[0]) * AREA, (depth, m[1] * AREA), (m1 * AREA, 1))
            self._load(self.x_l1, source)  # before the ring, which it need not wait for
            slot = self.ring.dequeue()
            self._load(self.w_l1, slot.region(0, n[1] * depth * AREA))
            self.ring.free()
            x = self.x_l1.dequeue()
            w = self.w_l1.dequeue()
            for first_k, step in segments(k, "step", depth, self.step):
                x_feed = Fractals(x, first_k * (m[1] * AREA), m[1] * AREA)
                feed_a(k, self.x_l0.alloc(), x_feed, m[1], step)
                self.x_l0.enqueue()
                w_feed = Fractals(w, first_k * AREA, depth * AREA)
                load_transposed(k, self.w_l0.alloc(), w_feed, n[1], step)
                self.w_l0.enqueue()
                k.mmad(
                    sums.region(0, (n[1], m[1], FRACTAL, FRACTAL)),
                    self.x_l0.dequeue().region(0, (m[1], step, FRACTAL, FRACTAL)),
                    self.w_l0.dequeue().region(0, (step, n[1], FRACTAL, FRACTAL)),
                    accumulate=at + first_k,
                    bias=bias,
                )
                self.x_l0.free()
                self.w_l0.free()
            self.x_l1.free()
            self.w_l1.free()
        self.acc.enqueue()
        area = Area(
            base=n[0] * (m1 * AREA),
            pieces=((0, m[0] * FRACTAL, m[1] * FRACTAL),),
            blocks=n[1],
            plane=m1 * FRACTAL,
            step=1,
            fractals=m[1],
            pixels=m[1] * FRACTAL,
        )
        assert self.finish is not None
        epilogue_emit.drain(self.finish, self.acc, ((self.y, area),), n[0], channels)

    def _load(self, queue: isa.Queue, source: isa.Region) -> None:
        """Load a part of an operand to L1."""
        self.k.copy(queue.alloc().region(0, source.sizes), source)
        queue.enqueue()
