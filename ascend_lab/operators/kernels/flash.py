"""FlashAttention for cores that have both a cube and a vector unit: scores never reach GM.

A block of rows of Q stays in L1 while blocks of K and V are loaded one after another. Each takes
three steps ("the cube:" and "VU:", the vector unit, say who does what):

    scores   the cube: S = Q K^T into L0C; VU: the maxima of its rows, through L1 back to the cube
    weights  the cube: S - m, in place; VU: P = exp(S - m) as fp16, through L1 back to the cube
    product  the cube: P V added to the running output in L0C, which VU has multiplied by f

The steps of three blocks alternate, so that the vector unit hardly ever waits for the cube: the
weights of a block, the scores of the next one (even if it belongs to the next rows), the product of
the one before. The matrix V gets 16 more columns, of ones, so that the cube also sums the rows of
P. The cube also adds a mask of one row to all rows of scores: K^T gets two more rows, the mask,
and Q two more columns, 1 / scale as a sum of two fp16 numbers.

Source: Dao et al. 2022, "FlashAttention".
"""

from typing import NamedTuple

from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, Affine, KernelBuilder, Queue, Region, Tile
from ascend_lab.operators.kernels import flash_nest, flash_shape, flash_softmax, tiles

ALL_LANES = (1 << 128) - 1
"""Vector mask of all 128 fp16 lanes of a repeat."""
FIRST_LANES = sum(1 << lane for lane in range(0, 128, FRACTAL))
"""Vector mask of the first of every 16 lanes: the first column of a fractal."""


def flash_launch(
    shape: flash_shape.FlashShape, chip: Chip, tiling: flash_shape.FlashTiling | None = None
) -> isa.Launch:
    """Return attention as a launch over batch and row blocks: GM tensors q, k, v (, mask), y.

    Rows whose largest q k exceeds 2^27 become NaN. Raises `PathError` on chips with separate vector
    cores, `CapacityError` where blocks do not fit, `InputError` for scales beyond `SCALES`.
    """
    t = tiling or flash_shape.default_tiling(shape, chip)
    flash_shape.check_tiling(shape, t, chip)
    return isa.spread(
        f"flash_{shape.batch}x{shape.rows}x{shape.keys}x{shape.depth}",
        flash_shape.shares(shape, t.rows // FRACTAL, t.cores),
        lambda *share: _Writer(shape, t, chip).program(share),
    )


def load_transposed(
    k: KernelBuilder, dst: Tile, src: tiles.Fractals, width: int, keys: int
) -> None:
    """Emit V (width, keys) fractals of L1 to (keys, width) of L0B, each fractal transposed."""
    sizes = (width, FRACTAL, FRACTAL)
    strides = (src.pitch, 1, FRACTAL)
    with tiles.repeat(k, "fractal", keys) as i:
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


Place = tuple[flash_nest.Piece, flash_nest.Piece]
"""A matrix and a block of its rows."""


class Block(NamedTuple):
    """A block of scores: its matrix, rows (first, count) and keys (first, count), in fractals.

    `number` counts the blocks of keys of the same rows. `ragged` keys are in the last fractal of
    the block, 0 if it is full.
    """

    matrix: flash_shape.Matrix
    rows: tiles.Span
    keys: tiles.Span
    number: Affine
    ragged: int
    is_last: bool


class _Writer:
    """The program of cores with equal shares; its steps take sizes in fractals."""

    def __init__(
        self, shape: flash_shape.FlashShape, tiling: flash_shape.FlashTiling, chip: Chip
    ) -> None:
        """Declare the tensors, allocate queues and state.

        Two blocks of K and V are in use while others are loaded; Q is loaded with the first block
        of its keys. All share their flags, because a pair of pipes may have only 4 event ids.
        Scores have one slot: the cube subtracts in place.
        """
        rows = tiling.rows
        keys = tiling.keys
        (_, _, depth1, width1) = shape.fractals
        depth = depth1 * FRACTAL
        width = (width1 + 1) * FRACTAL
        one_row = shape.mask == "rows"
        k = self.k = KernelBuilder(f"flash_{rows}x{keys}", chip)
        self.shape = shape
        self.tiling = tiling
        self.depth = depth1
        self.width = width1 + 1
        self.block_keys = keys // FRACTAL
        self.cut = flash_shape.cut_keys(shape, self.block_keys)
        slots = flash_shape.key_slots(shape, tiling)
        self.keys = k.queue("k_l1", "L1", "fp16", keys * depth, src="MTE2", dst="MTE1", depth=slots)
        self.gm = flash_shape.Tensors.declare(k, shape, ("q", "k", "v", "y", "mask"))
        self.q = self.keys.join("q_l1", "fp16", rows * depth)
        self.values = self.keys.join("v_l1", "fp16", keys * width)
        # A mask of one row is one more fractal of depth.
        masked_depth = depth + FRACTAL if one_row else depth
        # L0A takes Q, with the shares of a mask; weights; or the halves of maxima.
        a_elements = rows * max(masked_depth, keys, 2 * FRACTAL)
        b_elements = keys * max(masked_depth, width)
        self.a_l0 = k.queue("a_l0", "L0A", "fp16", a_elements, src="MTE1", dst="M")
        self.b_l0 = k.queue("b_l0", "L0B", "fp16", b_elements, src="MTE1", dst="M")
        self.scores = k.queue("s_l0", "L0C", "fp32", rows * keys, src="M", dst="V", depth=1)
        self.product = k.queue("c_l0", "L0C", "fp32", rows * width, src="M", dst="V", depth=1)
        self.result = k.queue("out", "UB", "fp16", rows * max(keys, width), src="V", dst="MTE3")
        self.weights = k.queue("p_l1", "L1", "fp16", rows * keys, src="MTE3", dst="MTE1")
        # Maxima as two halves, each in 16 equal lanes a row: two fractals for 16 rows.
        peaks_size = 2 * rows * FRACTAL
        self.peaks = k.queue("m_l1", "L1", "fp16", peaks_size, src="MTE3", dst="MTE1", depth=1)
        # A fractal of -128: 16 equal halves of m times -2048 / 16 are -2048 m.
        self.minus = k.buffer("minus_l1", "L1", "fp16", flash_shape.AREA)
        self._allocate_mask()
        self.state = flash_softmax.State.make(k, shape, tiling)

    def _allocate_mask(self) -> None:
        """Allocate buffers of a mask: the vector unit adds a full one, the cube one of one row."""
        k = self.k
        keys = self.tiling.keys
        self.mask: Queue | None = None
        if self.shape.mask == "full":
            elements = self.tiling.rows * keys
            self.mask = k.queue("mask_ub", "UB", "fp16", elements, src="MTE2", dst="V")
        if self.shape.mask == "rows":
            self.row = self.keys.join("mask_l1", "fp16", keys * FRACTAL)
            self.share = k.buffer("share_l1", "L1", "fp16", flash_shape.AREA)

    def program(self, share: flash_shape.CoreShares) -> isa.Program:
        """Return the program, which goes over the blocks of keys, three of them at a time."""
        self._constants()
        side = self.tiling.rows // FRACTAL
        matrices, blocks = flash_nest.axes(share, flash_nest.places(self.k, share), side)
        # Where a core has one block of each matrix, the next block of rows is that of the next
        # matrix.
        if blocks.count == 1:
            for block in blocks.pieces(self.k):
                for three_matrices in matrices.threes(self.k):
                    self._walk(*(matrix and (matrix, block) for matrix in three_matrices))
        else:
            for matrix in matrices.pieces(self.k):
                for three_blocks in blocks.threes(self.k):
                    self._walk(*(block and (matrix, block) for block in three_blocks))
        return self.k.finish()

    def _walk(self, previous: Place | None, place: Place | None, following: Place | None) -> None:
        """Write the turns of the rows at `place`, with the block before and the first one after."""
        full_blocks = self.cut[0]
        last_number = self._last_number()
        previous_block = previous and self._block(previous, last_number)
        following_block = following and self._block(following, 0)
        if place is None:
            self._turn(previous_block, None, following_block)
            return

        def block(number: Affine | int) -> Block:
            return self._block(place, number)

        def block_after(number: int) -> Block | None:
            return block(number + 1) if number < last_number else following_block

        self._turn(previous_block, block(0), block_after(0))
        if full_blocks > 2:
            with self.k.loop("key", full_blocks - 2) as j:
                self._turn(block(j), block(j + 1), block(j + 2))
        for number in range(max(1, full_blocks - 1), last_number + 1):
            self._turn(block(number - 1), block(number), block_after(number))

    def _last_number(self) -> int:
        """Return the number of the last block of keys; 3 full blocks and a remainder give 3."""
        full_blocks, last_fractals, _ = self.cut
        return full_blocks if last_fractals else full_blocks - 1

    def _block(self, place: Place, number: Affine | int) -> Block:
        """Return block `number` of the keys that belong to the rows of `place`."""
        (matrix, rows) = place
        (full_blocks, last_fractals, ragged) = self.cut
        block_number = Affine() + number
        is_remainder = block_number == Affine(full_blocks)
        return Block(
            matrix=matrix.matrix,
            rows=(rows.start, rows.size),
            keys=(
                block_number * self.block_keys,
                last_fractals if is_remainder else self.block_keys,
            ),
            number=block_number,
            ragged=ragged if is_remainder else 0,
            is_last=block_number == Affine(self._last_number()),
        )

    def _turn(self, previous: Block | None, current: Block | None, following: Block | None) -> None:
        """Write the weights of a block, the scores of the next, the product of the one before."""
        if current:
            self._weights(current)
        if following:
            self._scores(following)
        if previous:
            self._product(previous)
        if previous and previous.is_last:
            self._finish(previous)
        if current and current.number != Affine():
            flash_softmax.rescale(
                self.state, self.product.dequeue(), current.rows[1], self.width, current.number
            )
            self.product.free()

    def _constants(self) -> None:
        """Write constants to L1: rows of a mask, factors of mask and maxima, the ones behind V."""
        size = self.tiling.keys * FRACTAL
        area = flash_shape.AREA
        self.peaks.alloc()
        slots = [Affine(slot) for slot in range(self.keys.buffer.slots)]
        if self.shape.mask == "rows":
            self._fill([Tile(self.row, slot).region(0, size) for slot in slots], (0.0, ALL_LANES))
            # MTE2 loads masks to the same places, but only after these zeros are written.
            self.k.set_flag("MTE3", "MTE2", 0)
            self.k.wait_flag("MTE3", "MTE2", 0)
            high, low = flash_shape.mask_shares(self.shape.scale)
            # A fractal: the first lane of each row is the high part of 1 / scale, the second the
            # low part.
            shares = (0.0, ALL_LANES), (high, FIRST_LANES), (low, FIRST_LANES << 1)
            self._fill([self.share.region(0, area)], *shares)
        self._fill([self.minus.region(0, area)], (-flash_softmax.STEP / FRACTAL, ALL_LANES))
        # The last 16 columns of V: their sums are l.
        ones = [Tile(self.values, slot).region((self.width - 1) * size, size) for slot in slots]
        self._fill(ones, (1.0, ALL_LANES))
        self.peaks.enqueue()
        self.peaks.dequeue()
        self.peaks.free()

    def _fill(self, places: list[Region], *numbers: tuple[float, int]) -> None:
        """Write to each of `places` in L1 every number at the lanes whose bits are set."""
        tile = self.result.alloc()
        for number, mask in numbers:
            self.k.each("vdup", places[0].elements, (tile, 0), scalar=number, mask=mask)
        self.result.enqueue()
        source = self.result.dequeue()
        for to in places:
            self.k.copy(to, source.region(0, to.sizes))
        self.result.free()

    def _send(self, to: Region) -> None:
        """Copy the tile that the vector unit has written to `to`."""
        self.result.enqueue()
        self.k.copy(to, self.result.dequeue().region(0, to.sizes))
        self.result.free()

    def _load(self, tile: Tile, name: str, block: Block, rows: tiles.Span) -> None:
        """Load rows of q, k or v from GM to a tile, in FRACTAL_NZ on both sides."""
        region = self.gm.block(name, block.matrix, rows)
        pitch = (self.block_keys if name == "v" else rows[1]) * flash_shape.AREA
        self.k.copy(tile.region(0, region.sizes, (pitch, 1)), region)

    def _scores(self, block: Block) -> None:
        """Write a block's scores to L0C and their maxima to L1; the first block also loads Q."""
        k = self.k
        state = self.state
        one_row = self.shape.mask == "rows"
        (_, rows) = block.rows
        (_, keys) = block.keys
        tile = self.keys.alloc()
        self._load(tile, "k", block, block.keys)
        self._load(Tile(self.values, tile.slot), "v", block, block.keys)
        if one_row:
            self._load_mask(block, tile.slot)
        if block.number == Affine():
            self._load(Tile(self.q, tile.slot), "q", block, block.rows)
        self.keys.enqueue()
        tile = self.keys.dequeue()
        # Q was loaded with the first of these blocks of keys, `block.number` slots earlier.
        q = Tile(self.q, tile.slot - block.number)
        a_slot = self.a_l0.alloc()
        b_slot = self.b_l0.alloc()
        tiles.load_a(k, a_slot, q, rows, self.depth)
        fractals = (self.depth * keys, flash_shape.AREA)
        k.load2d(b_slot.region(0, fractals), tile.region(0, fractals))
        if one_row:
            self._feed_mask(a_slot, b_slot, rows, keys, tile.slot)
        self._multiply(self.scores, (rows, self.depth, keys))
        self._complete(self.scores.dequeue(), block)
        self.scores.free()
        flash_softmax.compute_peaks(state, self.result.alloc(), rows, keys, block.number)
        self._send(self.peaks.alloc().region(0, 2 * rows * flash_shape.AREA))
        self.peaks.enqueue()
        if block.number != Affine():
            flash_softmax.compute_factor(state, rows, block.number)

    def _load_mask(self, block: Block, slot: Affine | int) -> None:
        """Load a mask of one row to the first two rows of fractals in L1."""
        src = self.gm.mask(block.matrix, block.rows, block.keys)
        for row in (0, 1):
            target = row * FRACTAL, src.sizes, (flash_shape.AREA, 1)
            self.k.copy(Tile(self.row, slot).region(*target), src)

    def _feed_mask(
        self, a_slot: Tile, b_slot: Tile, rows: int, keys: int, slot: Affine | int
    ) -> None:
        """Load a mask's factors behind Q in L0A, and its fractals, transposed, behind K in L0B."""
        area = flash_shape.AREA
        sizes = (rows, flash_shape.AREA)
        square = (FRACTAL, FRACTAL)
        shares = self.share.region(0, sizes, (0, 1))
        self.k.load2d(a_slot.region(rows * self.depth * area, sizes), shares)
        mask = Tile(self.row, slot).region(0, (keys, *square), (area, 1, FRACTAL))
        self.k.load2d(b_slot.region(keys * self.depth * area, (keys, *square)), mask)

    def _complete(self, tile: Tile, block: Block) -> None:
        """Copy scores to UB; copy back those that a full mask or the end of the keys changes."""
        k = self.k
        (start, rows) = block.rows
        (_, keys) = block.keys
        wide = self.state.wide
        area = rows * keys * flash_shape.AREA
        # Only the last fractal of keys, unless a mask changes all scores.
        first_changed = 0 if self.mask else (keys - 1) * rows * flash_shape.AREA
        k.copy(wide.region(0, area), tile.region(0, area))
        if self.mask:
            src = self.gm.mask(block.matrix, (start * FRACTAL, rows * FRACTAL), block.keys)
            k.copy(self.mask.alloc().region(0, src.sizes), src)
            self.mask.enqueue()
            flash_softmax.add_mask(self.state, self.mask.dequeue(), rows * keys)
            self.mask.free()
        if block.ragged:
            flash_softmax.drop_padding(self.state, rows, keys, block.ragged)
        if block.ragged or self.mask:
            changed = first_changed, area - first_changed
            k.copy(tile.region(*changed), wide.region(*changed))

    def _weights(self, block: Block) -> None:
        """Subtract the maxima from a block's scores, and write the weights to L1."""
        k = self.k
        (_, rows) = block.rows
        (_, keys) = block.keys
        sizes = (2 * keys, flash_shape.AREA)
        k.load2d(self.b_l0.alloc().region(0, sizes), self.minus.region(0, sizes, (0, 1)))
        tiles.load_a(k, self.a_l0.alloc(), self.peaks.dequeue(), rows, 2)
        self.peaks.free()
        self._multiply(self.scores, (rows, 2, keys), 1)
        area = rows * keys * flash_shape.AREA
        out = self.result.alloc()
        k.copy(out.region(0, area), self.scores.dequeue().region(0, area))
        self.scores.free()
        # p = exp(c (s - m))
        flash_softmax.exponentiate(self.state, out, rows * keys)
        self._send(self.weights.alloc().region(0, area))
        self.weights.enqueue()

    def _product(self, block: Block) -> None:
        """Load P and V of a block to L0 and multiply them; the first product begins the output."""
        (_, rows) = block.rows
        (_, keys) = block.keys
        # V lies in the slot of K that is freed next.
        values = Tile(self.values, self.keys.counts["free"])
        source = tiles.Fractals(values, Affine(), self.block_keys * flash_shape.AREA)
        load_transposed(self.k, self.b_l0.alloc(), source, self.width, keys)
        self.keys.free()
        tiles.load_a(self.k, self.a_l0.alloc(), self.weights.dequeue(), rows, keys)
        self.weights.free()
        self._multiply(self.product, (rows, keys, self.width), block.number)

    def _finish(self, block: Block) -> None:
        """Divide the output of a block of rows by its sums, and store it to GM."""
        flash_softmax.finish(
            self.state, self.product.dequeue(), self.result.alloc(), block.rows[1], self.width
        )
        self.product.free()
        self._send(self.gm.block("y", block.matrix, block.rows))

    def _multiply(
        self, sums: Queue, sizes: tuple[int, int, int], accumulate: Affine | int = 0
    ) -> None:
        """Multiply the operands in L0A and L0B; a mask lies behind Q and K."""
        self.a_l0.enqueue()
        self.b_l0.enqueue()
        a = self.a_l0.dequeue()
        b = self.b_l0.dequeue()
        c = sums.alloc()
        multiply(self.k, c, a, b, sizes, accumulate)
        # The mask is one more step of depth: its row of keys times the shares of 1 / scale.
        if sums is self.scores and not accumulate and self.shape.mask == "rows":
            m, depth, n = sizes
            self.k.mmad(
                c.region(0, (n, m, FRACTAL, FRACTAL)),
                a.region(m * depth * flash_shape.AREA, (m, 1, FRACTAL, FRACTAL)),
                b.region(n * depth * flash_shape.AREA, (1, n, FRACTAL, FRACTAL)),
                accumulate=1,
            )
        self.a_l0.free()
        self.b_l0.free()
        sums.enqueue()
