"""The cube's part of FlashAttention: V turned on its way to L0B, products of blocks."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.isa import Affine, Buffer, KernelBuilder, Launch, Program, Queue, Region, Tile
from ascend_lab.kernels import flash_softmax as soft
from ascend_lab.kernels.flash_shape import (
    AREA,
    FlashShape,
    FlashTiling,
    Own,
    Span,
    Tensors,
    check_tiling,
    cut_keys,
    default_tiling,
    spread,
    walk,
)
from ascend_lab.kernels.gemm_schedule import FRACTAL
from ascend_lab.kernels.tiles import load_a, repeat

Sizes = tuple[int, int, int]
"""(m, k, n) of a product, in fractals."""


def load_turned(k: KernelBuilder, dst: Tile, src: Tile, width: int, keys: int) -> None:
    """Emit V (width, keys) fractals of L1 to (keys, width) of L0B, each fractal transposed."""
    sizes, strides = (width, FRACTAL, FRACTAL), (keys * AREA, 1, FRACTAL)
    with repeat(k, "fractal", keys) as i:
        k.load2d(dst.region(i * (width * AREA), sizes), src.region(i * AREA, sizes, strides))


def multiply(
    k: KernelBuilder, c: Tile, a: Tile, b: Tile, sizes: Sizes, accumulate: Affine | int = 0
) -> None:
    """Emit c = a b, or c += a b where `accumulate` is not 0."""
    m, depth, n = sizes
    k.mmad(
        c.region(0, (n, m, FRACTAL, FRACTAL)),
        a.region(0, (m, depth, FRACTAL, FRACTAL)),
        b.region(0, (depth, n, FRACTAL, FRACTAL)),
        accumulate=accumulate,
    )


@dataclass(frozen=True, slots=True)
class CubeQueues:
    """Two slots of everything a cube core needs: both operands in L1 and L0, sums in L0C."""

    left: Queue
    right: Queue
    a: Queue
    b: Queue
    c: Queue

    @classmethod
    def make(cls, k: KernelBuilder, left: int, right: int, sums: int) -> CubeQueues:
        """Allocate slots of these sizes in fractals."""
        return cls(
            k.queue("left_l1", "L1", "fp16", left * AREA, src="MTE2", dst="MTE1"),
            k.queue("right_l1", "L1", "fp16", right * AREA, src="MTE2", dst="MTE1"),
            k.queue("a_l0", "L0A", "fp16", left * AREA, src="MTE1", dst="M"),
            k.queue("b_l0", "L0B", "fp16", right * AREA, src="MTE1", dst="M"),
            k.queue("c_l0", "L0C", "fp32", sums * AREA, src="M", dst="FIX"),
        )

    def load_left(self, k: KernelBuilder, src: Region, m: int, depth: int) -> None:
        """Bring a left operand (depth, m) from GM through L1 to L0A."""
        k.copy(self.left.alloc().region(0, src.sizes), src)
        self.left.enqueue()
        load_a(k, self.a.alloc(), self.left.dequeue(), m, depth, Affine())
        self.left.free()
        self.a.enqueue()

    def load_right(self, k: KernelBuilder, src: Region, *, turned: int = 0) -> None:
        """Bring a right operand from GM through L1 to L0B, `turned` if it has that many keys."""
        k.copy(self.right.alloc().region(0, src.sizes), src)
        self.right.enqueue()
        tile, to = self.right.dequeue(), self.b.alloc()
        if turned:
            load_turned(k, to, tile, src.sizes[0], turned)
        else:
            fractals = (src.elements // AREA, AREA)
            k.load2d(to.region(0, fractals), tile.region(0, fractals))
        self.right.free()
        self.b.enqueue()

    def drain(self, k: KernelBuilder, to: Region, scale: float = 1.0) -> None:
        """Move the finished sums to GM through the fix pipe."""
        self.c.enqueue()
        k.fixpipe(to, self.c.dequeue().region(0, to.sizes), scale=scale)
        self.c.free()


# FlashAttention for cores with cube and vector unit together: scores never reach GM.
#
# A block of rows of Q stays in L1 while blocks of K and V pass by. For each: S = Q K^T on the
# cube
# into L0C, online softmax in UB, P as fp16 through L1 back to the cube, P V into L0C, added to
# the
# running output in UB. The product P V of a block is issued behind the scores of the next one, so
# that the vector unit never waits for the cube.
#
# All tensors lie in GM as FRACTAL_NZ (columns / 16, rows, 16); a mask of one row is a vector.
# Source: Dao et al. 2022, "FlashAttention".


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What the steps of one core's kernel share."""

    builder: KernelBuilder
    shape: FlashShape
    tiling: FlashTiling
    gm: Tensors
    q: Queue
    keys: Queue
    values: Buffer
    left: Queue
    right: Queue
    product: Queue
    result: Queue
    weights: Queue
    mask: Queue | None
    state: soft.State


def flash_launch(shape: FlashShape, chip: Chip, tiling: FlashTiling | None = None) -> Launch:
    """Return attention as a launch over batch and row blocks: GM tensors q, k, v (, mask), y.

    Raises `PathError` on chips with separate vector cores, `CapacityError` where blocks do not fit.
    """
    tiling = tiling or default_tiling(shape, chip)
    check_tiling(shape, tiling, chip)
    return spread(
        f"flash_{shape.batch}x{shape.rows}x{shape.keys}x{shape.depth}",
        shape.batch,
        shape.fractals[0],
        tiling.rows // FRACTAL,
        (tiling.grid_batch, tiling.grid_rows),
        lambda own: _program(shape, tiling, chip, own),
    )


def _program(shape: FlashShape, tiling: FlashTiling, chip: Chip, own: Own) -> Program:
    f = _kernel(shape, tiling, chip)
    for matrix, rows in walk(f.builder, own, tiling.rows // FRACTAL):
        _rows(f, matrix, rows)
    return f.builder.finish()


def _kernel(shape: FlashShape, tiling: FlashTiling, chip: Chip) -> _Kernel:
    """Declare the tensors, allocate queues and state.

    Two blocks of K and V are in use, a third is on its way; they share their flags, because a pair
    of pipes may have only 4 event ids.
    """
    k = KernelBuilder(f"flash_{tiling.rows}x{tiling.keys}", chip)
    rows, keys, (_, _, depth1, width1) = tiling.rows, tiling.keys, shape.fractals
    depth, width = depth1 * FRACTAL, width1 * FRACTAL
    wide = rows * max(keys, width)
    loaded = k.queue("k_l1", "L1", "fp16", keys * depth, src="MTE2", dst="MTE1", depth=3)
    mask = {"": 0, "rows": keys, "full": rows * keys}[shape.mask]
    return _Kernel(
        k,
        shape,
        tiling,
        Tensors.declare(k, shape, ("q", "k", "v", "y", "mask")),
        k.queue("q_l1", "L1", "fp16", rows * depth, src="MTE2", dst="MTE1", depth=1),
        loaded,
        loaded.join("v_l1", "fp16", keys * width),
        k.queue("a_l0", "L0A", "fp16", rows * max(depth, keys), src="MTE1", dst="M"),
        k.queue("b_l0", "L0B", "fp16", keys * max(depth, width), src="MTE1", dst="M"),
        k.queue("c_l0", "L0C", "fp32", wide, src="M", dst="V"),
        k.queue("out", "UB", "fp16", wide, src="V", dst="MTE3"),
        k.queue("p_l1", "L1", "fp16", rows * keys, src="MTE3", dst="MTE1"),
        k.queue("mask_ub", "UB", "fp16", mask, src="MTE2", dst="V") if mask else None,
        soft.State.make(k, shape, tiling),
    )


def _rows(f: _Kernel, matrix: Affine, rows: Span) -> None:
    """One block of rows of Q: all blocks of K and V, then the quotient to GM."""
    k, width = f.builder, f.shape.fractals[3]
    _load(f, f.q.alloc(), "q", matrix, rows)
    f.q.enqueue()
    q = f.q.dequeue()
    soft.begin(f.state, rows[1], width)
    block = f.tiling.keys // FRACTAL
    full, rest, ragged = cut_keys(f.shape, block)
    if full:
        _scores(f, q, matrix, rows, (Affine(), block), Affine())
        if full > 1:
            with k.loop("key", full - 1) as j:
                _scores(f, q, matrix, rows, ((j + 1) * block, block), j + 1)
                _product(f, rows[1], block, j)
    if rest:
        _scores(f, q, matrix, rows, (Affine(full * block), rest), Affine(full), ragged)
    if full:
        _product(f, rows[1], block, Affine(full - 1))
    if rest:
        _product(f, rows[1], rest, Affine(full))
    f.q.free()
    _store(f, matrix, rows)


def _load(f: _Kernel, tile: Tile, name: str, matrix: Affine, rows: Span) -> None:
    """Rows of q, k or v from GM to a tile, in FRACTAL_NZ on both sides."""
    region = f.gm.block(name, matrix, rows)
    f.builder.copy(tile.region(0, region.sizes), region)


def _scores(
    f: _Kernel, q: Tile, matrix: Affine, rows: Span, keys: Span, block: Affine, ragged: int = 0
) -> None:
    """One block of scores, from K in GM to P in L1; `ragged`: keys in its last fractal."""
    k, depth = f.builder, f.shape.fractals[2]
    tile = f.keys.alloc()
    _load(f, tile, "k", matrix, keys)
    _load(f, Tile(f.values, tile.slot), "v", matrix, keys)
    f.keys.enqueue()
    tile = f.keys.dequeue()
    load_a(k, f.left.alloc(), q, rows[1], depth, Affine())
    f.left.enqueue()
    fractals = (depth * keys[1], AREA)
    k.load2d(f.right.alloc().region(0, fractals), tile.region(0, fractals))
    f.right.enqueue()
    _multiply(f, rows[1], depth, keys[1])
    soft.take_scores(f.state, f.product.dequeue(), rows[1], keys[1])
    f.product.free()
    if f.mask is not None:
        _mask(f, f.mask, matrix, rows, keys)
    if ragged:
        soft.drop_padding(f.state, rows[1], keys[1], ragged)
    soft.softmax_block(f.state, f.result.alloc(), rows[1], keys[1], block)
    f.result.enqueue()
    area = rows[1] * keys[1] * AREA
    k.copy(f.weights.alloc().region(0, area), f.result.dequeue().region(0, area))
    f.result.free()
    f.weights.enqueue()


def _mask(f: _Kernel, queue: Queue, matrix: Affine, rows: Span, keys: Span) -> None:
    """Bring the mask of a block to UB and add it."""
    src = f.gm.mask(matrix, rows, keys)
    f.builder.copy(queue.alloc().region(0, src.sizes), src)
    queue.enqueue()
    one_row = f.shape.mask == "rows"
    soft.add_mask(f.state, queue.dequeue(), rows[1], keys[1], one_row=one_row)
    queue.free()


def _product(f: _Kernel, rows: int, keys: int, block: Affine) -> None:
    """P V of one block: both to L0, multiply, add to the running output."""
    k, width = f.builder, f.shape.fractals[3]
    load_a(k, f.left.alloc(), f.weights.dequeue(), rows, keys, Affine())
    f.weights.free()
    f.left.enqueue()
    values, right = Tile(f.values, f.keys.counts["free"]), f.right.alloc()
    load_turned(k, right, values, width, keys)
    f.keys.free()
    f.right.enqueue()
    _multiply(f, rows, keys, width)
    soft.add_product(f.state, f.product.dequeue(), rows, width, block)
    f.product.free()


def _multiply(f: _Kernel, m: int, depth: int, n: int) -> None:
    """One matrix instruction on what waits in L0A and L0B; sizes in fractals."""
    a, b, c = f.left.dequeue(), f.right.dequeue(), f.product.alloc()
    multiply(f.builder, c, a, b, (m, depth, n))
    f.left.free()
    f.right.free()
    f.product.enqueue()


def _store(f: _Kernel, matrix: Affine, rows: Span) -> None:
    """o / l as fp16 to GM."""
    soft.finish(f.state, f.result.alloc(), rows[1], f.shape.fractals[3])
    f.result.enqueue()
    to = f.gm.block("y", matrix, rows)
    f.builder.copy(to, f.result.dequeue().region(0, to.sizes))
    f.result.free()
