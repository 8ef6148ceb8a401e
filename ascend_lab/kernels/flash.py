"""FlashAttention for cores with cube and vector unit together: scores never reach GM.

A block of rows of Q stays in L1 while blocks of K and V pass by. For each: S = Q K^T on the cube
into L0C, online softmax in UB, P as fp16 through L1 back to the cube, P V into L0C, added to the
running output in UB. The product P V of a block is issued behind the scores of the next one, be it
of the next rows, so that the vector unit never waits for the cube. V has 16 columns more, of ones:
the cube adds up the rows of P as well.

Source: Dao et al. 2022, "FlashAttention".
"""

from ascend_lab.chip import Chip
from ascend_lab.isa import FRACTAL, Affine, KernelBuilder, Launch, Program, Queue, Tile, spread
from ascend_lab.kernels import flash_shape, flash_steps as soft
from ascend_lab.kernels.tiles import Fractals, Span, load_a, repeat


def flash_launch(
    shape: flash_shape.FlashShape, chip: Chip, tiling: flash_shape.FlashTiling | None = None
) -> Launch:
    """Return attention as a launch over batch and row blocks: GM tensors q, k, v (, mask), y.

    Raises `PathError` on chips with separate vector cores, `CapacityError` where blocks do not fit.
    """
    t = tiling or flash_shape.default_tiling(shape, chip)
    flash_shape.check_tiling(shape, t, chip)
    return spread(
        f"flash_{shape.batch}x{shape.rows}x{shape.keys}x{shape.depth}",
        flash_shape.shares(shape, t.rows // FRACTAL, t.cores),
        lambda *own: _Writer(shape, t, chip).program(own),
    )


def load_turned(k: KernelBuilder, dst: Tile, src: Fractals, width: int, keys: int) -> None:
    """Emit V (width, keys) fractals of L1 to (keys, width) of L0B, each fractal transposed."""
    sizes, strides = (width, FRACTAL, FRACTAL), (src.pitch, 1, FRACTAL)
    with repeat(k, "fractal", keys) as i:
        fractal = src.memory.region(src.start + i * flash_shape.AREA, sizes, strides)
        k.load2d(dst.region(i * (width * flash_shape.AREA), sizes), fractal)


def multiply(
    k: KernelBuilder,
    c: Tile,
    a: Tile,
    b: Tile,
    sizes: tuple[int, int, int],
    accumulate: Affine | int = 0,
) -> None:
    """Emit c = a b, or c += a b where `accumulate` is not 0; sizes (m, k, n) in fractals."""
    m, depth, n = sizes
    k.mmad(
        c.region(0, (n, m, FRACTAL, FRACTAL)),
        a.region(0, (m, depth, FRACTAL, FRACTAL)),
        b.region(0, (depth, n, FRACTAL, FRACTAL)),
        accumulate=accumulate,
    )


class _Writer:
    """The program of cores with equal shares; its steps take sizes in fractals."""

    def __init__(
        self, shape: flash_shape.FlashShape, tiling: flash_shape.FlashTiling, chip: Chip
    ) -> None:
        """Declare the tensors, allocate queues and state.

        Two blocks of K and V are in use, a third is on its way; they share their flags, because a
        pair of pipes may have only 4 event ids.
        """
        rows, keys, (_, _, depth1, width1) = tiling.rows, tiling.keys, shape.fractals
        depth, width = depth1 * FRACTAL, (width1 + 1) * FRACTAL
        wide, mask = rows * max(keys, width), {"": 0, "rows": keys, "full": rows * keys}[shape.mask]
        k = self.k = KernelBuilder(f"flash_{rows}x{keys}", chip)
        self.shape, self.tiling, self.depth, self.width = shape, tiling, depth1, width1 + 1
        self.block = keys // FRACTAL
        self.cut = flash_shape.cut_keys(shape, self.block)
        self.keys = k.queue("k_l1", "L1", "fp16", keys * depth, src="MTE2", dst="MTE1", depth=3)
        self.gm = flash_shape.Tensors.declare(k, shape, ("q", "k", "v", "y", "mask"))
        self.q = k.queue("q_l1", "L1", "fp16", rows * depth, src="MTE2", dst="MTE1", depth=1)
        self.values = self.keys.join("v_l1", "fp16", keys * width)
        most = rows * max(depth, keys), keys * max(depth, width)
        self.left = k.queue("a_l0", "L0A", "fp16", most[0], src="MTE1", dst="M")
        self.right = k.queue("b_l0", "L0B", "fp16", most[1], src="MTE1", dst="M")
        self.product = k.queue("c_l0", "L0C", "fp32", wide, src="M", dst="V")
        self.result = k.queue("out", "UB", "fp16", wide, src="V", dst="MTE3")
        self.weights = k.queue("p_l1", "L1", "fp16", rows * keys, src="MTE3", dst="MTE1")
        self.mask: Queue | None = None
        if mask:
            self.mask = k.queue("mask_ub", "UB", "fp16", mask, src="MTE2", dst="V")
        self.state = soft.State.make(k, shape, tiling)

    def program(self, own: flash_shape.Own) -> Program:
        """Walk the blocks of rows of Q, the first scores of each before the last product behind."""
        self._ones()
        side = self.tiling.rows // FRACTAL
        matrices, blocks = soft.axes(own, soft.places(self.k, own), side)
        steps, alone = (self._begin, self._go_on, self._end), blocks.count == 1
        outer, inner = (blocks, matrices) if alone else (matrices, blocks)
        for piece in outer.pieces(self.k):
            for step, other in inner.overlapped(self.k):
                matrix, rows = (other, piece) if alone else (piece, other)
                steps[step](matrix.matrix, (rows.start, rows.size))
        return self.k.finish()

    def _ones(self) -> None:
        """Fill the last 16 columns of every slot of V in L1 with ones."""
        size = self.tiling.keys * FRACTAL
        self.k.each("vdup", size, (self.result.alloc(), 0), scalar=1.0)
        self.result.enqueue()
        source = self.result.dequeue().region(0, size)
        for slot in range(self.keys.buffer.slots):
            to = Tile(self.values, slot).region((self.width - 1) * size, size)
            self.k.copy(to, source)
        self.result.free()

    def _begin(self, matrix: flash_shape.Matrix, rows: Span) -> None:
        """Bring a block of rows of Q, and take its first scores."""
        self._load(self.q.alloc(), "q", matrix, rows)
        self.q.enqueue()
        self.q.dequeue()
        full, rest, ragged = self.cut
        size, kept = (self.block, 0) if full else (rest, ragged)
        self._scores(matrix, rows, (Affine(), size), Affine(), kept)

    def _go_on(self, matrix: flash_shape.Matrix, rows: Span) -> None:
        """Take all other scores, and the products of all blocks of K and V but the last."""
        block, (full, rest, ragged) = self.block, self.cut
        if full > 1:  # the first product begins the output, so that the loop starts behind it
            self._scores(matrix, rows, (Affine(block), block), Affine(1))
            self._add(rows[1], Affine())
        if full > 2:
            with self.k.loop("key", full - 2) as j:
                self._scores(matrix, rows, ((j + 2) * block, block), j + 2)
                self._add(rows[1], j + 1)
        if full and rest:
            last = Affine(full * block), rest
            self._scores(matrix, rows, last, Affine(full), ragged)
            self._add(rows[1], Affine(full - 1))
        self.q.free()

    def _end(self, matrix: flash_shape.Matrix, rows: Span) -> None:
        """The last product, and the quotient to GM."""
        full, rest, _ = self.cut
        sums = self._product(rows[1], rest or self.block)
        if full + (rest > 0) > 1:
            soft.add_product(self.state, sums, rows[1], self.width, Affine(full - (not rest)))
            self.product.free()
            soft.finish(self.state, self.state.out, self.result.alloc(), rows[1], self.width)
        else:
            soft.finish(self.state, sums, self.result.alloc(), rows[1], self.width)
            self.product.free()
        self.result.enqueue()
        to = self.gm.block("y", matrix, rows)
        self.k.copy(to, self.result.dequeue().region(0, to.sizes))
        self.result.free()

    def _load(self, tile: Tile, name: str, matrix: flash_shape.Matrix, rows: Span) -> None:
        """Rows of q, k or v from GM to a tile, in FRACTAL_NZ on both sides."""
        region = self.gm.block(name, matrix, rows)
        pitch = (self.block if name == "v" else rows[1]) * flash_shape.AREA
        self.k.copy(tile.region(0, region.sizes, (pitch, 1)), region)

    def _scores(
        self, matrix: flash_shape.Matrix, rows: Span, keys: Span, block: Affine, ragged: int = 0
    ) -> None:
        """One block of scores, from K in GM to P in L1; `ragged`: keys in its last fractal."""
        k, state = self.k, self.state
        tile = self.keys.alloc()
        self._load(tile, "k", matrix, keys)
        self._load(Tile(self.values, tile.slot), "v", matrix, keys)
        self.keys.enqueue()
        tile = self.keys.dequeue()
        q = Tile(self.q.buffer, self.q.counts["free"])
        load_a(k, self.left.alloc(), q, rows[1], self.depth)
        self.left.enqueue()
        fractals = (self.depth * keys[1], flash_shape.AREA)
        k.load2d(self.right.alloc().region(0, fractals), tile.region(0, fractals))
        self.right.enqueue()
        self._multiply(rows[1], self.depth, keys[1])
        soft.take_scores(state, self.product.dequeue(), rows[1], keys[1])
        self.product.free()
        if self.mask is not None:
            src = self.gm.mask(matrix, (rows[0] * FRACTAL, rows[1] * FRACTAL), keys)
            k.copy(self.mask.alloc().region(0, src.sizes), src)
            self.mask.enqueue()
            one_row = self.shape.mask == "rows"
            soft.add_mask(state, self.mask.dequeue(), rows[1], keys[1], one_row=one_row)
            self.mask.free()
        if ragged:
            soft.drop_padding(state, rows[1], keys[1], ragged)
        soft.softmax_block(state, self.result.alloc(), rows[1], keys[1], block)
        self.result.enqueue()
        area = rows[1] * keys[1] * flash_shape.AREA
        k.copy(self.weights.alloc().region(0, area), self.result.dequeue().region(0, area))
        self.result.free()
        self.weights.enqueue()

    def _add(self, rows: int, block: Affine) -> None:
        """Add the product of a full block to the running output."""
        soft.add_product(self.state, self._product(rows, self.block), rows, self.width, block)
        self.product.free()

    def _product(self, rows: int, keys: int) -> Tile:
        """P V of one block: both to L0, and multiplied."""
        load_a(self.k, self.left.alloc(), self.weights.dequeue(), rows, keys)
        self.weights.free()
        self.left.enqueue()
        values = Tile(self.values, self.keys.counts["free"])
        source = Fractals(values, Affine(), self.block * flash_shape.AREA)
        load_turned(self.k, self.right.alloc(), source, self.width, keys)
        self.keys.free()
        self.right.enqueue()
        self._multiply(rows, keys, self.width)
        return self.product.dequeue()

    def _multiply(self, m: int, depth: int, n: int) -> None:
        """One matrix instruction on what waits in L0A and L0B."""
        a, b, c = self.left.dequeue(), self.right.dequeue(), self.product.alloc()
        multiply(self.k, c, a, b, (m, depth, n))
        self.left.free()
        self.right.free()
        self.product.enqueue()
