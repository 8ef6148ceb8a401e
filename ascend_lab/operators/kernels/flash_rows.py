"""The vector cores' part of FlashAttention on chips with separate cores: softmax and weighted sums.

A tile of scores lies in UB as (keys / 16, rows, 16). Maxima and sums are taken first over its
columns, half of them combined with the other half, and so on, then over its 16 lanes. The results
are stored as one number per row: maximum m, sum l, factor f. To combine them with a tile, they are
first copied to 16 lanes.

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
    ceil_div,
)
from ascend_lab.operators.kernels.flash_causal import (
    CausalTiles,
    Diagonal,
    lanes_from,
    staircase_rows,
)
from ascend_lab.operators.kernels.flash_nest import Nest, Place
from ascend_lab.operators.kernels.flash_shape import FlashShape, Tensors
from ascend_lab.operators.kernels.flash_softmax import LANES, LEAST
from ascend_lab.operators.kernels.tiles import repeat, segments

GROUP = 8
"""Rows that one repeat of vcgmax or vcgadd folds, 8 lanes of each; slices are multiples of it."""


def slice_rows(shape: FlashShape, chip: Chip, rows: int, keys: int, slots: int) -> int:
    """Return how many of a vector core's rows its UB holds at a time, 0 if not even 8."""
    width = shape.fractals[3] * FRACTAL
    # 64 rows in 1, 2, 3, ... slices of whole groups of 8: 64, 32, 24, 16, ... rows.
    for parts in range(1, rows // GROUP + 1):
        size = ceil_div(rows, GROUP * parts) * GROUP
        # Each row of a slice has a tile twice in fp32, twice in 2 bytes, and the folded columns.
        row_bytes = 12 * max(keys, width) + 4 * FRACTAL * (ceil_div(keys, 2 * FRACTAL) + 1) + 4
        mask_bytes = {"": 0, "rows": 8 * keys, "full": size * (4 * keys + 4 * FRACTAL)}[shape.mask]
        mask_bytes += 4 * FRACTAL * staircase_rows(shape, 2 * rows)
        # Every row, in a slice or not, has its sums, its maximum, and totals and factors in flight.
        state_bytes = rows * 4 * (width + 1 + 2 * slots)
        if size * row_bytes + state_bytes + mask_bytes <= chip.buffers["UB"]:
            return size
    return 0


@dataclass(frozen=True, slots=True)
class RowState:
    """Buffers of UB in fp32 that keep the state of a block's rows from tile to tile of keys.

    `peak`, `total` and `factor` hold one number per row, `sums` slices of (width / 16, rows, 16);
    totals and factors have a slot for each tile or block in flight. For one slice, `work` holds
    columns that are folded, `wide` 16 equal lanes per row, `row` one number per row.
    """

    sums: Buffer
    work: Buffer
    wide: Buffer
    row: Buffer
    peak: Buffer
    total: Buffer
    factor: Buffer


@dataclass(frozen=True, slots=True)
class Rows:
    """A vector core's half of the rows of every block, and the buffers through which they pass.

    The vector core takes up to `slice_rows` of them at a time. `tiles` has slots for tiles that
    arrive, `out` for results that leave.
    """

    k: KernelBuilder
    shape: FlashShape
    gm: Tensors
    nest: Nest | CausalTiles
    aiv: Affine
    slice_rows: int
    tiles: Queue
    out: Queue
    state: RowState

    @classmethod
    def make(
        cls, k: KernelBuilder, shape: FlashShape, nest: Nest | CausalTiles, rows: int, keys: int
    ) -> "Rows":
        """Allocate for halves of `rows` rows and tiles of `keys` keys."""
        width = shape.fractals[3] * FRACTAL
        slots = nest.in_flight
        rows_at_once = slice_rows(shape, k.chip, rows, keys, slots)
        size = rows_at_once * max(keys, width)

        def buffer(name: str, elements: int, slots: int = 1) -> Buffer:
            return k.buffer(name, "UB", "fp32", elements, slots)

        gm = Tensors.declare(k, shape, ("y", "mask"))
        aiv = k.param("aiv", 2)
        tiles = k.queue("tile", "UB", "fp32", size, src="MTE2", dst="V")
        out = k.queue("out", "UB", shape.dtype, size, src="V", dst="MTE3")
        state = RowState(
            sums=buffer("sums", rows * width),
            # The first fold of a tile's columns halves them: 256 keys leave 8 columns of 16.
            work=buffer("work", rows_at_once * FRACTAL * ceil_div(keys, 2 * FRACTAL)),
            wide=buffer("wide", rows_at_once * FRACTAL),
            row=buffer("row", rows_at_once),
            peak=buffer("peak", rows),
            total=buffer("total", rows, slots),
            factor=buffer("factor", rows, slots),
        )
        return cls(
            k,
            shape,
            gm,
            nest,
            aiv,
            slice_rows=rows_at_once,
            tiles=tiles,
            out=out,
            state=state,
        )

    # -- slices ---------------------------------------------------------------------------------
    def slices(self, half: int) -> Iterator[tuple[Affine, int]]:
        """Yield (first row, rows) of the slices of a half."""
        for at, size in segments(self.k, "slice", half // GROUP, self.slice_rows // GROUP):
            yield at * GROUP, size * GROUP

    def take(self, src: Region) -> Tile:
        """Load a slice of a ring's slot to UB."""
        self.k.copy(self.tiles.alloc().region(0, src.sizes), src)
        self.tiles.enqueue()
        return self.tiles.dequeue()

    def put(self, to: Region) -> None:
        """Pass the finished slice to MTE3, which stores it to `to` in GM."""
        self.out.enqueue()
        self.k.copy(to, self.out.dequeue().region(0, to.sizes))
        self.out.free()

    # -- one number per row, and its 16 lanes ------------------------------------------------------
    def across(self, op: str, source: Buffer | Tile, rows: int) -> Region:
        """Emit row = max or sum over 16 lanes of `source` (rows, 16); return it as one repeat."""
        halves = [
            source.region(at, (rows // GROUP, GROUP, 8), (GROUP * FRACTAL, FRACTAL, 1))
            for at in (0, 8)
        ]
        self.k.vector(op, halves[0], *halves)
        fold = {"vmax": "vcgmax", "vadd": "vcgadd"}[op]
        self.k.vector(fold, self.state.row.region(0, rows), halves[0])
        return self.state.row.region(0, (1, rows))

    def spread(self, numbers: Region) -> None:
        """Emit wide (rows, 16) = `numbers`, in every lane."""
        count = numbers.elements
        source = replace(numbers, sizes=(count,), strides=(1,))
        for at in (0, 8):
            self.k.vector("vbrcb", self.state.wide.region(at, (count, 8), (FRACTAL, 1)), source)

    def rowwise(
        self, op: str, memory: Buffer | Tile, start: Affine, columns: int, rows: int
    ) -> None:
        """Emit tile = tile op wide for a tile (columns, rows, 16), by columns or groups of rows."""
        groups = rows * FRACTAL // LANES
        pitch = rows * FRACTAL
        if groups >= columns:
            # One instruction per column: it takes all groups of 4 rows, each with its own 64 lanes.
            wide = self.state.wide.region(0, (groups, LANES), (LANES, 1))
            with repeat(self.k, "step", columns) as i:
                tile = memory.region(start + i * pitch, (groups, LANES), (LANES, 1))
                self.k.vector(op, tile, tile, wide)
            return
        # There are fewer groups than columns: one instruction per group for all columns.
        with repeat(self.k, "step", groups) as i:
            tile = memory.region(start + i * LANES, (columns, LANES), (pitch, 1))
            lanes_of_group = self.state.wide.region(i * LANES, (columns, LANES), (0, 1))
            self.k.vector(op, tile, tile, lanes_of_group)

    def fold(
        self, op: str, source: Buffer | Tile, to: Buffer | Tile, columns: int, rows: int
    ) -> None:
        """Emit the first column of `to` = max or sum over a tile's columns, by repeated halving."""
        column = rows * FRACTAL
        # 5 columns: two pairs are combined into `to`, so the fifth must be copied there, too.
        if to is not source and columns % 2:
            middle = columns // 2 * column
            self.k.each("vcopy", column, (to, middle), (source, middle))
        columns_left = columns
        folded = source
        while columns_left > 1:
            half = columns_left // 2
            columns_left -= half
            second_half = columns_left * column
            self.k.each(op, half * column, (to, 0), (folded, 0), (folded, second_half))
            folded = to


class Weigh:
    """Stage P: a ring of scores becomes a ring of weights, and the statistics of their rows."""

    def __init__(self, rows: Rows, scores: RingEnd, weights: RingEnd, pitch: int) -> None:
        """Read `scores` and write `weights`, whose columns lie `pitch` elements apart."""
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
        r.k.vector("vdup", r.state.peak.region(0, (1, half)), scalar=LEAST)
        total = r.state.total.region(0, (1, half), slot=r.nest.number(at))
        r.k.vector("vdup", total, scalar=0.0)

    def close(self, at: Place) -> None:
        """Do nothing: the other stage uses the statistics."""

    def tile(self, at: Place) -> None:
        """Wait for a tile of scores, and write its weights to the other ring."""
        r = self.rows
        half = at[1].size * GROUP
        scores = self.scores.dequeue()
        weights = self.weights.alloc()
        for line, rows in r.slices(half):
            slice_start = (r.aiv * half + line) * FRACTAL
            place = slice_start, (at[2].size, rows * FRACTAL), (self.pitch, 1)
            tile = r.take(scores.region(*place))
            if self.mask:
                self.mask.add(tile, at, r.aiv * half + line, rows)
            # The diagonal also drops the padding behind the last key.
            if self.diagonal:
                self.diagonal.drop(tile, at, r.aiv * half + line, rows)
            else:
                self._drop_padding(tile, at, rows)
            self._weigh(tile, at, line, rows)
            r.tiles.free()
            r.put(weights.region(*place))
        self.scores.free()
        self.weights.enqueue()

    def _drop_padding(self, tile: Tile, at: Place, rows: int) -> None:
        """Emit LEAST for the scores of the padding behind the last key."""
        ragged_keys = self.rows.shape.keys % FRACTAL
        keys = at[2]
        # With 100 keys, lanes 4 to 15 of the seventh column are padding.
        if keys.is_partial and ragged_keys:
            bits = lanes_from(ragged_keys)
            last_column = (keys.size - 1) * rows * FRACTAL
            self.rows.k.each("vdup", rows * FRACTAL, (tile, last_column), scalar=LEAST, mask=bits)

    def _weigh(self, tile: Tile, at: Place, line: Affine, rows: int) -> None:
        """Emit p = exp(s - m') of a slice, and update m, f and l."""
        r = self.rows
        k = self.rows.k
        columns = at[2].size
        size = at[2].size * rows * FRACTAL
        r.fold("vmax", tile, r.state.work, columns, rows)
        new_peak = r.across("vmax", r.state.work, rows)
        one_repeat = (1, rows)
        peak = r.state.peak.region(line, one_repeat)
        factor = r.state.factor.region(line, one_repeat, slot=r.nest.number(at))
        total = r.state.total.region(line, one_repeat, slot=r.nest.number(at[:2]))
        # m' = max(m, max(s)), f = exp(m - m')
        k.vector("vmax", new_peak, new_peak, peak)
        k.vector("vsub", factor, peak, new_peak)
        k.vector("vexp", factor, factor)
        k.vector("vcopy", peak, new_peak)
        # p = exp(s - m'), rounded to 2 bytes for the cube
        r.spread(new_peak)
        r.rowwise("vsub", tile, Affine(), columns, rows)
        k.each("vexp", size, (tile, 0), (tile, 0))
        k.each("vconv", size, (r.out.alloc(), 0), (tile, 0))
        # l' = f l + sum(p)
        r.fold("vadd", tile, tile, columns, rows)
        sum_of_tile = r.across("vadd", tile, rows)
        k.vector("vmul", total, total, factor)
        k.vector("vadd", total, total, sum_of_tile)


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask that is added to the scores: a queue in its 2-byte format, and a buffer in fp32."""

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
        if kind == "rows":
            size = keys
            wide_size = keys
        else:
            size = rows.slice_rows * keys
            wide_size = rows.slice_rows * FRACTAL  # one column of keys at a time
        queue = k.queue("mask_ub", "UB", rows.shape.dtype, size, src="MTE2", dst="V")
        return cls(rows, queue, k.buffer("mask_wide", "UB", "fp32", wide_size))

    def add(self, tile: Tile, at: Place, line: Affine, rows: int) -> None:
        """Emit s += mask in fp32 for a slice that begins at row `line` of its block."""
        matrix, block, keys = at
        k = self.rows.k
        column = rows * FRACTAL
        first_row = block.start * FRACTAL + line
        src = self.rows.gm.mask(matrix.matrix, (first_row, rows), (keys.start, keys.size))
        k.copy(self.queue.alloc().region(0, src.sizes), src)
        self.queue.enqueue()
        mask = self.queue.dequeue()
        groups = column // LANES
        one_row = self.rows.shape.mask == "rows"
        if one_row:
            all_keys = (keys.size, FRACTAL)
            k.vector("vconv", self.wide.region(0, all_keys), mask.region(0, all_keys))
        with repeat(k, "column", keys.size) as n:
            if one_row:
                # One row of 16 keys for all rows: strides of 0.
                shape = (groups, LANES // FRACTAL, FRACTAL)
                wide = self.wide.region(n * FRACTAL, shape, (0, 0, 1))
            else:
                wide = self.wide.region(0, (groups, LANES))
                k.vector("vconv", wide, mask.region(n * column, (groups, LANES)))
            scores = tile.region(n * column, (groups, LANES))
            k.vector("vadd", scores, scores, wide)
        self.queue.free()


class Gather:
    """Stage GU: products of weights and values are added up, and divided by l at the end."""

    def __init__(self, rows: Rows, products: RingEnd, pitch: int) -> None:
        """Read the ring `products`, in whose tiles columns lie `pitch` elements apart."""
        self.rows = rows
        self.products = products
        self.pitch = pitch

    def open(self, at: Place) -> None:
        """Begin with o = 0."""
        size = at[1].size * GROUP * self.rows.shape.fractals[3] * FRACTAL
        self.rows.k.each("vdup", size, (self.rows.state.sums, 0), scalar=0.0)

    def tile(self, at: Place) -> None:
        """Emit o = f o + p v."""
        r = self.rows
        half = at[1].size * GROUP
        width = self.rows.shape.fractals[3]
        products = self.products.dequeue()
        for line, rows in r.slices(half):
            slice_start = (r.aiv * half + line) * FRACTAL
            tile = r.take(products.region(slice_start, (width, rows * FRACTAL), (self.pitch, 1)))
            first_sum = line * (width * FRACTAL)
            r.spread(r.state.factor.region(line, (1, rows), slot=r.nest.number(at)))
            r.rowwise("vmul", r.state.sums, first_sum, width, rows)
            sums = (r.state.sums, first_sum)
            r.k.each("vadd", width * rows * FRACTAL, sums, sums, (tile, 0))
            r.tiles.free()
        self.products.free()

    def close(self, at: Place) -> None:
        """Emit y = o / l."""
        r = self.rows
        half = at[1].size * GROUP
        width = self.rows.shape.fractals[3]
        for line, rows in r.slices(half):
            first_sum = line * (width * FRACTAL)
            r.spread(r.state.total.region(line, (1, rows), slot=r.nest.number(at)))
            r.rowwise("vdiv", r.state.sums, first_sum, width, rows)
            r.k.each("vconv", width * rows * FRACTAL, (r.out.alloc(), 0), (r.state.sums, first_sum))
            first_row = at[1].start * FRACTAL + r.aiv * half + line
            r.put(r.gm.lines("y", at[0].matrix, (first_row, rows)))
