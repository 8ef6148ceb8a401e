"""What the vector cores do in FlashAttention on split chips: softmax of scores, and their sums.

A tile of scores lies in UB as (keys / 16, rows, 16). Maxima and sums fold its columns, half onto
half, then its 16 lanes; what is left, one number a row, stays one number a row: maximum m, sum l,
factor f. Before it meets a tile, 16 lanes take it.

    P:   m' = max(m, max(s)),  f = exp(m - m'),  p = exp(s - m'),  l' = f l + sum(p)
    GU:  o' = f o + p v,  in the end y = o / l

Sources: Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022 (FlashAttention).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import (
    FRACTAL,
    Affine,
    Buffer,
    KernelBuilder,
    Queue,
    Region,
    RingEnd,
    Tile,
    up,
)
from ascend_lab.operators.kernels.flash_causal import Diagonal, Sequence, lanes_from, staircase_rows
from ascend_lab.operators.kernels.flash_shape import FlashShape, Tensors
from ascend_lab.operators.kernels.flash_steps import LANES, LEAST, Nest, Place
from ascend_lab.operators.kernels.tiles import repeat, segments

GROUP = 8
"""Rows whose 8 lanes one instruction folds: slices come in multiples of it."""


def slice_rows(shape: FlashShape, chip: Chip, rows: int, keys: int, slots: int) -> int:
    """Return how many of a vector core's rows its UB holds at a time (0: not even 8)."""
    width = shape.fractals[3] * FRACTAL
    for parts in range(1, rows // GROUP + 1):
        size = up(rows, GROUP * parts) * GROUP
        a_row = 12 * max(keys, width) + 4 * FRACTAL * (up(keys, 2 * FRACTAL) + 1) + 4
        mask = {"": 0, "rows": 8 * keys, "full": size * (4 * keys + 4 * FRACTAL)}[shape.mask]
        mask += 4 * FRACTAL * staircase_rows(shape, 2 * rows)
        if size * a_row + rows * 4 * (width + 1 + 2 * slots) + mask <= chip.buffers["UB"]:
            return size
    return 0


@dataclass(frozen=True, slots=True)
class Rows:
    """UB of a vector core for a half of every block: tiles on their way, and the state of rows.

    `peak`, `total` and `factor` hold a number a row, `sums` slices of (width / 16, rows, 16);
    totals and factors have a slot for everything in flight.
    """

    k: KernelBuilder
    shape: FlashShape
    gm: Tensors
    nest: Nest | Sequence
    aiv: Affine
    most: int
    tiles: Queue
    out: Queue
    sums: Buffer
    work: Buffer
    wide: Buffer
    row: Buffer
    peak: Buffer
    total: Buffer
    factor: Buffer

    @classmethod
    def make(
        cls, k: KernelBuilder, shape: FlashShape, nest: Nest | Sequence, rows: int, keys: int
    ) -> "Rows":
        """Allocate for halves of `rows` rows and tiles of `keys` keys."""
        width = shape.fractals[3] * FRACTAL
        slots = nest.in_flight
        most = slice_rows(shape, k.chip, rows, keys, slots)
        size = most * max(keys, width)

        def buffer(name: str, elements: int, slots: int = 1) -> Buffer:
            return k.buffer(name, "UB", "fp32", elements, slots)

        return cls(
            k,
            shape,
            Tensors.declare(k, shape, ("y", "mask")),
            nest,
            k.param("aiv", 2),
            most,
            k.queue("tile", "UB", "fp32", size, src="MTE2", dst="V"),
            k.queue("out", "UB", shape.dtype, size, src="V", dst="MTE3"),
            buffer("sums", rows * width),
            buffer("work", most * FRACTAL * up(keys, 2 * FRACTAL)),
            buffer("wide", most * FRACTAL),
            buffer("row", most),
            buffer("peak", rows),
            buffer("total", rows, slots),
            buffer("factor", rows, slots),
        )

    # -- slices ---------------------------------------------------------------------------------
    def slices(self, half: int) -> Iterator[tuple[Affine, int]]:
        """Yield (first row, rows) of the slices of a half."""
        for at, size in segments(self.k, "slice", half // GROUP, self.most // GROUP):
            yield at * GROUP, size * GROUP

    def take(self, src: Region) -> Tile:
        """Bring a slice of a ring to UB."""
        self.k.copy(self.tiles.alloc().region(0, src.sizes), src)
        self.tiles.enqueue()
        return self.tiles.dequeue()

    def put(self, to: Region) -> None:
        """Hand the finished slice on, and move it to GM."""
        self.out.enqueue()
        self.k.copy(to, self.out.dequeue().region(0, to.sizes))
        self.out.free()

    # -- a number a row, and its 16 lanes ----------------------------------------------------------
    def across(self, op: str, source: Buffer | Tile, rows: int) -> Region:
        """Emit row = max or sum over 16 lanes of `source` (rows, 16); return it as one repeat."""
        halves = [
            source.region(at, (rows // GROUP, GROUP, 8), (GROUP * FRACTAL, FRACTAL, 1))
            for at in (0, 8)
        ]
        self.k.vector(op, halves[0], *halves)
        fold = {"vmax": "vcgmax", "vadd": "vcgadd"}[op]
        self.k.vector(fold, self.row.region(0, rows), halves[0])
        return self.row.region(0, (1, rows))

    def spread(self, numbers: Region) -> None:
        """Emit wide (rows, 16) = `numbers`, in every lane."""
        count = numbers.elements
        source = replace(numbers, sizes=(count,), strides=(1,))
        for at in (0, 8):
            self.k.vector("vbrcb", self.wide.region(at, (count, 8), (FRACTAL, 1)), source)

    def rowwise(
        self, op: str, memory: Buffer | Tile, start: Affine, columns: int, rows: int
    ) -> None:
        """Emit tile = tile op wide for a tile (columns, rows, 16), by columns or groups of rows."""
        groups = rows * FRACTAL // LANES
        pitch = rows * FRACTAL
        count = columns
        step = pitch
        shape = (groups, LANES)
        strides = (LANES, 1)
        again = (LANES, 1)
        further = 0
        if groups < columns:
            count = groups
            step = LANES
            shape = (columns, LANES)
            strides = (pitch, 1)
            again = (0, 1)
            further = LANES
        with repeat(self.k, "step", count) as i:
            tile = memory.region(start + i * step, shape, strides)
            self.k.vector(op, tile, tile, self.wide.region(i * further, shape, again))

    def fold(
        self, op: str, source: Buffer | Tile, to: Buffer | Tile, columns: int, rows: int
    ) -> None:
        """Emit the first column of `to` = max or sum over the columns of a tile, half onto half."""
        column = rows * FRACTAL
        if to is not source and columns % 2:
            middle = columns // 2 * column
            self.k.each("vcopy", column, (to, middle), (source, middle))
        while columns > 1:
            half = columns // 2
            far = (columns - half) * column
            self.k.each(op, half * column, (to, 0), (source, 0), (source, far))
            columns = columns - half
            source = to


class Weigh:
    """Stage P: a ring of scores becomes a ring of weights, and the statistics of their rows."""

    def __init__(self, rows: Rows, scores: RingEnd, weights: RingEnd, pitch: int) -> None:
        """Pass tiles on whose columns lie `pitch` elements apart."""
        self.rows = rows
        self.scores = scores
        self.weights = weights
        self.pitch = pitch
        self.mask = Mask.make(rows, scores.ring.elements // pitch * FRACTAL)
        self.diagonal: Diagonal | None = None
        if rows.shape.causal:
            self.diagonal = Diagonal.make(rows.k, rows.shape, pitch // FRACTAL)

    def open(self, at: Place) -> None:
        """Begin with m = LEAST and l = 0."""
        r = self.rows
        half = at[1].size * GROUP
        r.k.vector("vdup", r.peak.region(0, (1, half)), scalar=LEAST)
        total = r.total.region(0, (1, half), slot=r.nest.number(at))
        r.k.vector("vdup", total, scalar=0.0)

    def close(self, at: Place) -> None:
        """Leave the statistics to the other stage."""

    def tile(self, at: Place) -> None:
        """Wait for a tile of scores, and send their weights."""
        r = self.rows
        half = at[1].size * GROUP
        scores = self.scores.dequeue()
        weights = self.weights.alloc()
        for line, rows in r.slices(half):
            there = (r.aiv * half + line) * FRACTAL
            place = there, (at[2].size, rows * FRACTAL), (self.pitch, 1)
            tile = r.take(scores.region(*place))
            if self.mask:
                self.mask.add(tile, at, r.aiv * half + line, rows)
            if self.diagonal:  # it drops what stands behind the last key, too
                self.diagonal.drop(tile, at, r.aiv * half + line, rows)
            else:
                self._drop_padding(tile, at, rows)
            self._weigh(tile, at, line, rows)
            r.tiles.free()
            r.put(weights.region(*place))
        self.scores.free()
        self.weights.enqueue()

    def _drop_padding(self, tile: Tile, at: Place, rows: int) -> None:
        """Emit LEAST for the scores of the keys behind the last one."""
        kept = self.rows.shape.keys % FRACTAL
        keys = at[2]
        if keys.is_rest and kept:
            bits = lanes_from(kept)
            last = (keys.size - 1) * rows * FRACTAL
            self.rows.k.each("vdup", rows * FRACTAL, (tile, last), scalar=LEAST, mask=bits)

    def _weigh(self, tile: Tile, at: Place, line: Affine, rows: int) -> None:
        """Emit p = exp(s - m') of a slice, and bring m, f and l up to date."""
        r = self.rows
        k = self.rows.k
        columns = at[2].size
        size = at[2].size * rows * FRACTAL
        r.fold("vmax", tile, r.work, columns, rows)
        row = r.across("vmax", r.work, rows)
        one = (1, rows)
        peak = r.peak.region(line, one)
        factor = r.factor.region(line, one, slot=r.nest.number(at))
        total = r.total.region(line, one, slot=r.nest.number(at[:2]))
        k.vector("vmax", row, row, peak)
        k.vector("vsub", factor, peak, row)
        k.vector("vexp", factor, factor)
        k.vector("vcopy", peak, row)
        r.spread(row)
        r.rowwise("vsub", tile, Affine(), columns, rows)
        k.each("vexp", size, (tile, 0), (tile, 0))
        k.each("vconv", size, (r.out.alloc(), 0), (tile, 0))
        r.fold("vadd", tile, tile, columns, rows)
        row = r.across("vadd", tile, rows)
        k.vector("vmul", total, total, factor)
        k.vector("vadd", total, total, row)


@dataclass(frozen=True, slots=True)
class Mask:
    """What is added to the scores: a queue of it in 2 bytes, and room for some of it in fp32."""

    rows: Rows
    queue: Queue
    wide: Buffer

    @classmethod
    def make(cls, rows: Rows, keys: int) -> "Mask | None":
        """Allocate for slices of tiles of `keys` keys; None without a mask."""
        k = rows.k
        kind = rows.shape.mask
        if not kind:
            return None
        size, lanes = (keys, keys) if kind == "rows" else (rows.most * keys, rows.most * FRACTAL)
        queue = k.queue("mask_ub", "UB", rows.shape.dtype, size, src="MTE2", dst="V")
        return cls(rows, queue, k.buffer("mask_wide", "UB", "fp32", lanes))

    def add(self, tile: Tile, at: Place, line: Affine, rows: int) -> None:
        """Emit s += mask in fp32 for a slice that begins at row `line` of its block."""
        matrix, block, keys = at
        k = self.rows.k
        column = rows * FRACTAL
        first = block.start * FRACTAL + line
        src = self.rows.gm.mask(matrix.matrix, (first, rows), (keys.start, keys.size))
        k.copy(self.queue.alloc().region(0, src.sizes), src)
        self.queue.enqueue()
        mask = self.queue.dequeue()
        groups = column // LANES
        if self.rows.shape.mask == "rows":
            every = (keys.size, FRACTAL)
            k.vector("vconv", self.wide.region(0, every), mask.region(0, every))
        with repeat(k, "column", keys.size) as n:
            wide = self.wide.region(0, (groups, LANES))
            if self.rows.shape.mask == "rows":
                shape = (groups, LANES // FRACTAL, FRACTAL)
                wide = self.wide.region(n * FRACTAL, shape, (0, 0, 1))
            else:
                k.vector("vconv", wide, mask.region(n * column, (groups, LANES)))
            scores = tile.region(n * column, (groups, LANES))
            k.vector("vadd", scores, scores, wide)
        self.queue.free()


class Gather:
    """Stage GU: products of weights and values are added to what came before, and divided."""

    def __init__(self, rows: Rows, products: RingEnd, pitch: int) -> None:
        """Read a ring of tiles whose columns lie `pitch` elements apart."""
        self.rows = rows
        self.products = products
        self.pitch = pitch

    def open(self, at: Place) -> None:
        """Begin with o = 0."""
        size = at[1].size * GROUP * self.rows.shape.fractals[3] * FRACTAL
        self.rows.k.each("vdup", size, (self.rows.sums, 0), scalar=0.0)

    def tile(self, at: Place) -> None:
        """Emit o = f o + p v."""
        r = self.rows
        half = at[1].size * GROUP
        width = self.rows.shape.fractals[3]
        products = self.products.dequeue()
        for line, rows in r.slices(half):
            there = (r.aiv * half + line) * FRACTAL
            tile = r.take(products.region(there, (width, rows * FRACTAL), (self.pitch, 1)))
            first = line * (width * FRACTAL)
            r.spread(r.factor.region(line, (1, rows), slot=r.nest.number(at)))
            r.rowwise("vmul", r.sums, first, width, rows)
            sums = (r.sums, first)
            r.k.each("vadd", width * rows * FRACTAL, sums, sums, (tile, 0))
            r.tiles.free()
        self.products.free()

    def close(self, at: Place) -> None:
        """Emit y = o / l."""
        r = self.rows
        half = at[1].size * GROUP
        width = self.rows.shape.fractals[3]
        for line, rows in r.slices(half):
            first = line * (width * FRACTAL)
            r.spread(r.total.region(line, (1, rows), slot=r.nest.number(at)))
            r.rowwise("vdiv", r.sums, first, width, rows)
            r.k.each("vconv", width * rows * FRACTAL, (r.out.alloc(), 0), (r.sums, first))
            own = at[1].start * FRACTAL + r.aiv * half + line
            r.put(r.gm.lines("y", at[0].matrix, (own, rows)))
