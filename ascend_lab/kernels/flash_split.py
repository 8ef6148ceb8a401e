"""FlashAttention where cube and vector cores are separate: pieces of the scores pass through L2.

Scores cannot stay on a core, because no path leads from UB to L1. So batch and rows of q are cut
into chunks whose scores fit in half of L2, and every chunk takes four phases:

    cube:   s = scale q k^T in fp32, scaled by the fix pipe
    vector: m = max(s) in a first pass; in a second p = exp(s - m) as fp16, and l = sum(p)
    cube:   o = p v in fp32
    vector: y = o / l as fp16

The next chunk overwrites the workspaces s, p, o and l (16 partial sums a row), so that they need
not reach device memory. All are FRACTAL_NZ with 16 columns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ascend_lab.chip import Chip
from ascend_lab.errors import CapacityError
from ascend_lab.isa import (
    Affine,
    Buffer,
    Kernel,
    KernelBuilder,
    Launch,
    Program,
    Queue,
    Region,
    Share,
    Tile,
    spread,
)
from ascend_lab.kernels import flash_softmax as soft
from ascend_lab.kernels.flash import load_turned, multiply
from ascend_lab.kernels.flash_shape import (
    AREA,
    FlashShape,
    Tensors,
    grid,
    key_blocks,
    shares,
    walk,
)
from ascend_lab.kernels.gemm_schedule import FRACTAL, up
from ascend_lab.kernels.tiles import Span, load_a, segments

SCORE_BYTES = 6
"""A score in fp32 and its weight in fp16."""
MOST_ROWS, VECTOR_KEYS = 8, 4
"""Fractals of a block at most, and of the keys in a block of the vector unit."""


# -- chunks ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Chunk:
    """Matrices and rows (in fractals) computed at a time; `room` is the most of both."""

    shape: FlashShape
    chip: Chip
    first: int
    count: int
    top: int
    rows: int
    room: tuple[int, int]

    def tensors(self, k: KernelBuilder, *names: str) -> Tensors:
        """Declare tensors of the operator."""
        return Tensors.declare(k, self.shape, names)

    def space(self, k: KernelBuilder, name: str, dtype: str, columns: int) -> Buffer:
        """Declare a workspace of `columns` fractals a row."""
        return k.tensor(name, dtype, self.room[0] * columns * self.room[1] * AREA)

    def piece(self, space: Buffer, matrix: Affine, rows: Span, columns: Span) -> Region:
        """Return a block of a workspace: (columns, rows x 16)."""
        (count, height), (at, size) = self.room, rows
        each, pitch = space.elements // count, height * AREA
        start = matrix * each + columns[0] * pitch + at * AREA
        return space.region(start, (columns[1], size * AREA), (pitch, 1))

    def moved(self, matrix: Affine, rows: Span) -> tuple[Affine, Span]:
        """Return matrix and rows as the operator's tensors count them."""
        return matrix + self.first, (rows[0] + self.top, rows[1])


def chunks_of(shape: FlashShape, chip: Chip) -> list[Chunk]:
    """Cut the batch, or the rows of each matrix, into even chunks that fit in half of L2."""
    rows, keys, _, _ = shape.fractals
    lines = max(1, chip.l2.size_bytes // 2 // (keys * AREA * SCORE_BYTES))
    count = max(1, min(shape.batch, lines // rows))
    count = up(shape.batch, up(shape.batch, count))
    height = up(rows, up(rows, lines))
    found = []
    for first in range(0, shape.batch, count):
        for top in range(0, rows, height):
            some = min(count, shape.batch - first), top, min(height, rows - top)
            found.append(Chunk(shape, chip, first, *some, (count, height)))
    return found


def widest(chip: Chip) -> int:
    """Return the widest matrices, in fractals, of which two blocks of 16 rows fit every L0."""
    operands = min(chip.buffers["L0A"], chip.buffers["L0B"]) // (4 * AREA)
    return min(operands, chip.buffers["L0C"] // (8 * AREA))


def cube_block(shape: FlashShape, chip: Chip) -> int:
    """Return the side of a block of scores, in fractals, with two of everything in L0.

    Raises `CapacityError` if not even one fractal fits.
    """
    wide, room = max(shape.fractals[2:]), widest(chip)
    for side in (8, 4, 2, 1):
        if side * max(wide, side) <= room:
            return side
    needed = f"blocks of 16 rows and width {wide * FRACTAL} twice in L0"
    got = f"room for width {room * FRACTAL} on {chip.name}"
    raise CapacityError(needed, got, "use the operator attention")


# -- phases ---------------------------------------------------------------------------------------
def split_kernel(shape: FlashShape, chip: Chip) -> Kernel:
    """Return attention as phases over chunks: tensors q, k, v (, mask), y, and workspaces.

    Raises `CapacityError` for matrices too wide for L0.
    """
    phases: list[Launch] = []
    for chunk in chunks_of(shape, chip):
        cube, wide = cube_block(shape, chip), shape.fractals[3]
        narrow = max(1, chip.buffers["UB"] // (3 * AREA * 4 * (wide + 2)))
        phases += [
            _launch(chunk, "scores", _scores, cube, "cube"),
            _launch(chunk, "weights", _weights, MOST_ROWS, "vector"),
            _launch(chunk, "sums", _sums, cube, "cube"),
            _launch(chunk, "quotient", _quotient, narrow, "vector"),
        ]
    return Kernel(f"flash_{shape.batch}x{shape.rows}x{shape.keys}x{shape.depth}", tuple(phases))


Blocks = Iterator[tuple[Affine, Span]]
Writer = Callable[[Chunk, KernelBuilder, Blocks, int], None]


def _launch(chunk: Chunk, name: str, write: Writer, most: int, unit: str) -> Launch:
    """Return a phase in blocks that give the busiest core least to do."""
    cores = chunk.chip.cores_of(unit)

    def busiest(side: int) -> tuple[int, int]:
        over, by = grid(chunk.count, up(chunk.rows, side), cores)
        blocks = up(chunk.count, over) * up(up(chunk.rows, side), by)
        return blocks * (2 + side), -side  # a block costs as much to begin as two fractals

    side = min(range(1, min(most, MOST_ROWS) + 1), key=busiest)
    own = grid(chunk.count, up(chunk.rows, side), cores)

    def program(group: Share, rows: Share) -> Program:
        k = KernelBuilder(name, chunk.chip)
        write(chunk, k, walk(k, (group, rows), side), side)
        return k.finish()

    return spread(name, shares(chunk.count, chunk.rows, side, own), program)


@dataclass(frozen=True, slots=True)
class _Cube:
    """Two slots of everything a cube core needs: both operands in L1 and L0, sums in L0C."""

    k: KernelBuilder
    left: Queue
    right: Queue
    a: Queue
    b: Queue
    c: Queue

    @classmethod
    def make(cls, k: KernelBuilder, left: int, right: int, sums: int) -> "_Cube":
        """Allocate slots of these sizes in fractals."""
        return cls(
            k,
            k.queue("left_l1", "L1", "fp16", left * AREA, src="MTE2", dst="MTE1"),
            k.queue("right_l1", "L1", "fp16", right * AREA, src="MTE2", dst="MTE1"),
            k.queue("a_l0", "L0A", "fp16", left * AREA, src="MTE1", dst="M"),
            k.queue("b_l0", "L0B", "fp16", right * AREA, src="MTE1", dst="M"),
            k.queue("c_l0", "L0C", "fp32", sums * AREA, src="M", dst="FIX"),
        )

    def load_left(self, src: Region, m: int, depth: int) -> None:
        """Bring a left operand (depth, m) from GM through L1 to L0A."""
        self.k.copy(self.left.alloc().region(0, src.sizes), src)
        self.left.enqueue()
        load_a(self.k, self.a.alloc(), self.left.dequeue(), m, depth)
        self.left.free()
        self.a.enqueue()

    def load_right(self, src: Region, *, turned: int = 0) -> None:
        """Bring a right operand from GM through L1 to L0B, `turned` if it has that many keys."""
        self.k.copy(self.right.alloc().region(0, src.sizes), src)
        self.right.enqueue()
        tile, to = self.right.dequeue(), self.b.alloc()
        if turned:
            load_turned(self.k, to, tile, src.sizes[0], turned)
        else:
            fractals = (src.elements // AREA, AREA)
            self.k.load2d(to.region(0, fractals), tile.region(0, fractals))
        self.right.free()
        self.b.enqueue()

    def drain(self, to: Region, scale: float = 1.0) -> None:
        """Move the finished sums to GM through the fix pipe."""
        self.c.enqueue()
        self.k.fixpipe(to, self.c.dequeue().region(0, to.sizes), scale=scale)
        self.c.free()


def _scores(c: Chunk, k: KernelBuilder, blocks: Blocks, side: int) -> None:
    """s = scale q k^T: a block of q stays in L0A while the keys pass by."""
    (_, all_keys, depth, _), block = c.shape.fractals, cube_block(c.shape, c.chip)
    gm, out = c.tensors(k, "q", "k"), c.space(k, "s", "fp32", all_keys)
    cube = _Cube.make(k, side * depth, block * depth, side * block)
    for matrix, rows in blocks:
        there, lines = c.moved(matrix, rows)
        cube.load_left(gm.block("q", there, lines), rows[1], depth)
        a = cube.a.dequeue()
        for keys in segments(k, "key", all_keys, block):
            cube.load_right(gm.block("k", there, keys))
            sums, b = cube.c.alloc(), cube.b.dequeue()
            multiply(k, sums, a, b, (rows[1], depth, keys[1]))
            cube.b.free()
            cube.drain(c.piece(out, matrix, rows, keys), c.shape.scale)
        cube.a.free()


def _sums(c: Chunk, k: KernelBuilder, blocks: Blocks, side: int) -> None:
    """o = p v: the products of all blocks of keys add up in L0C."""
    (_, all_keys, _, wide), block = c.shape.fractals, cube_block(c.shape, c.chip)
    gm, p = c.tensors(k, "v"), c.space(k, "p", "fp16", all_keys)
    out = c.space(k, "o", "fp32", wide)
    cube = _Cube.make(k, side * block, block * wide, side * wide)
    for matrix, rows in blocks:
        there, _ = c.moved(matrix, rows)
        sums = cube.c.alloc()
        for keys in segments(k, "key", all_keys, block):
            cube.load_left(c.piece(p, matrix, rows, keys), rows[1], keys[1])
            cube.load_right(gm.block("v", there, keys), turned=keys[1])
            a, b = cube.a.dequeue(), cube.b.dequeue()
            multiply(k, sums, a, b, (rows[1], keys[1], wide), keys[0])
            cube.a.free()
            cube.b.free()
        cube.drain(c.piece(out, matrix, rows, (Affine(), wide)))


class _Weights:
    """p = exp(s - max(s)) and l: all keys pass twice, for the maximum and for the weights."""

    def __init__(self, c: Chunk, k: KernelBuilder, side: int) -> None:
        keys, block = c.shape.fractals[1], side * VECTOR_KEYS * AREA
        mask = {"": 0, "rows": VECTOR_KEYS * FRACTAL, "full": block}[c.shape.mask]
        self.c, self.k, self.gm = c, k, c.tensors(k, "mask")
        self.s, self.p = c.space(k, "s", "fp32", keys), c.space(k, "p", "fp16", keys)
        self.l16 = c.space(k, "l", "fp32", 1)
        self.scores = k.queue("scores", "UB", "fp32", block, src="MTE2", dst="V")
        self.out = k.queue("out", "UB", "fp16", block, src="V", dst="MTE3")
        self.total = k.queue("total", "UB", "fp32", side * AREA, src="V", dst="MTE3", depth=1)
        self.mask: Queue | None = None
        if mask:
            self.mask = k.queue("mask_ub", "UB", "fp16", mask, src="MTE2", dst="V")
        self.state = soft.State.small(k, c.shape, side, VECTOR_KEYS)

    def write(self, matrix: Affine, rows: Span) -> None:
        """Write the program of one block of rows."""
        c, k, state, height = self.c, self.k, self.state, rows[1]
        peak = soft.lanes(state.peak, height)
        k.vector("vdup", soft.lanes(state.work, height), scalar=soft.LEAST)
        for keys, ragged in key_blocks(k, c.shape, VECTOR_KEYS):
            held = self._take(matrix, rows, keys, ragged)
            soft.largest(held, soft.lanes(held.work, height), height, keys[1])
            self.scores.free()
        soft.across(state, "max", height, peak)
        total = self.total.alloc()
        k.vector("vdup", soft.lanes(total, height), scalar=0.0)
        for keys, ragged in key_blocks(k, c.shape, VECTOR_KEYS):
            held = replace(self._take(matrix, rows, keys, ragged), total=total)
            soft.weigh(held, self.out.alloc(), height, keys[1], peak)
            self.scores.free()
            _put(k, self.out, c.piece(self.p, matrix, rows, keys))
        _put(k, self.total, c.piece(self.l16, matrix, rows, (Affine(), 1)))

    def _take(self, matrix: Affine, rows: Span, keys: Span, ragged: int) -> soft.State:
        """Load a block of scores, add the mask, drop padding; return the state with them."""
        c, k = self.c, self.k
        src = c.piece(self.s, matrix, rows, keys)
        k.copy(self.scores.alloc().region(0, src.sizes), src)
        self.scores.enqueue()
        if self.mask is not None:
            far = self.gm.mask(*c.moved(matrix, rows), keys)
            k.copy(self.mask.alloc().region(0, far.sizes), far)
            self.mask.enqueue()
        state = replace(self.state, scores=self.scores.dequeue())
        if self.mask is not None:
            one_row = c.shape.mask == "rows"
            soft.add_mask(state, self.mask.dequeue(), rows[1], keys[1], one_row=one_row)
            self.mask.free()
        if ragged:
            soft.drop_padding(state, rows[1], keys[1], ragged)
        return state


def _weights(c: Chunk, k: KernelBuilder, blocks: Blocks, side: int) -> None:
    """Write the weights of all blocks."""
    writer = _Weights(c, k, side)
    for matrix, rows in blocks:
        writer.write(matrix, rows)


def _put(k: KernelBuilder, queue: Queue, to: Region) -> None:
    """Hand a finished tile on, and move it to GM."""
    queue.enqueue()
    k.copy(to, queue.dequeue().region(0, to.sizes))
    queue.free()


def _quotient(c: Chunk, k: KernelBuilder, blocks: Blocks, side: int) -> None:
    """y = o / l."""
    wide = c.shape.fractals[3]
    gm, o, l16 = c.tensors(k, "y"), c.space(k, "o", "fp32", wide), c.space(k, "l", "fp32", 1)
    sums = k.queue("sums", "UB", "fp32", side * wide * AREA, src="MTE2", dst="V")
    totals = sums.join("total", "fp32", side * AREA)
    out = k.queue("out", "UB", "fp16", side * wide * AREA, src="V", dst="MTE3")
    state = soft.State.small(k, c.shape, side, VECTOR_KEYS)
    for matrix, rows in blocks:
        tile = sums.alloc()
        for src, to in (
            (c.piece(o, matrix, rows, (Affine(), wide)), tile),
            (c.piece(l16, matrix, rows, (Affine(), 1)), Tile(totals, tile.slot)),
        ):
            k.copy(to.region(0, src.sizes), src)
        sums.enqueue()
        tile = sums.dequeue()
        held = replace(state, out=tile, total=Tile(totals, tile.slot))
        soft.finish(held, out.alloc(), rows[1], wide)
        sums.free()
        _put(k, out, gm.block("y", *c.moved(matrix, rows)))
