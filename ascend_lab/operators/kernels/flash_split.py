"""FlashAttention where cube and vector cores are separate: four stages pass tiles through L2.

A block of rows of q stays in the L1 of a cube core while tiles of keys and values are loaded:

    QK  cube     s = scale q k^T in fp32, scaled on its way out by the fix pipe
    P   vectors  online softmax: p = exp(s - m) as fp16, and the factor f for earlier sums
    PV  cube     o = p v in fp32
    GU  vectors  sum = f sum + o; after the last tile y = sum / l

(QK, P, PV and GU are the names of the stages in the source.) Each stage writes its tiles to a ring,
a few slots of GM that are reused so soon that they stay in L2, and a flag says that a slot is
filled. The cube does QK some tiles ahead of PV, and the vector cores do P equally far ahead of GU,
so that no core waits while a tile goes through L2. If a matrix has few keys, the first stage is
whole blocks of rows, or whole matrices, ahead.

Source: hw-native-sys/pto-isa, kernels/manual/common/flash_atten (stages, preload, tile sizes).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ascend_lab import errors
from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, ceil_div
from ascend_lab.operators.kernels.flash import load_transposed, multiply
from ascend_lab.operators.kernels.flash_causal import CausalTiles, blocks_of_cores, causal_grid
from ascend_lab.operators.kernels.flash_nest import Axis, Nest, Place, axes, places
from ascend_lab.operators.kernels.flash_rows import Gather, Rows, Weigh, slice_rows
from ascend_lab.operators.kernels.flash_shape import (
    AREA,
    CoreShares,
    FlashShape,
    Tensors,
    cut_keys,
    grid,
    shares,
)
from ascend_lab.operators.kernels.tiles import Fractals, Span, feed_a, feed_b, segments

ROWS = 128
"""Rows of q in a block, as in the published kernel."""
KEYS = 256
"""Keys in a tile, as in the published kernel."""
AHEAD = 4
"""Tiles that QK is ahead of PV, as in the published kernel."""
MAX_IN_FLIGHT = 15
"""Most tiles begun and not finished: what the counter of a flag between cores holds."""


# -- tilings --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SplitTiling:
    """Rows of a block, keys of a tile, tiles that QK is ahead of PV, and slots of every L0."""

    rows: int
    keys: int
    ahead: int = AHEAD
    l0_slots: int = 2


class CubeParts(NamedTuple):
    """Sizes in fractals of one cube instruction and of one copy to L1; and the slots of q in L1.

    An instruction multiplies `keys` keys and `columns` of the depth (QK) or of the width (PV). A
    copy loads `k_rows` keys, or all keys of a tile in `v_columns` columns of v.
    """

    keys: int
    columns: int
    k_rows: int
    v_columns: int
    q_slots: int


COPIES = ((2, 1), (2, 2), (2, 4), (1, 1), (1, 2), (1, 4), (1, 8))
"""(slots of q in L1, copies that load a tile of keys or values), the best choice first.

Eight copies are short: only for widths that have no room otherwise (the 576 of latent heads).
"""


def cube_parts(shape: FlashShape, tiling: SplitTiling, chip: Chip) -> CubeParts | None:
    """Return the largest parts with which a tiling fits L0 and L1; None if it never fits.

    See `COPIES`.
    """
    operands = _l0_parts(shape, tiling, chip)
    if operands is None:
        return None
    depth, width = shape.fractals[2:]
    rows = tiling.rows // FRACTAL
    keys = tiling.keys // FRACTAL
    for q_slots, pieces in COPIES:
        k_rows = ceil_div(keys, pieces)
        v_columns = ceil_div(width, pieces)
        l1_fractals = q_slots * rows * depth
        # Two slots each of keys, values and weights.
        l1_fractals += 2 * (k_rows * depth + keys * v_columns + rows * keys)
        if 2 * l1_fractals * AREA <= chip.buffers["L1"]:
            return CubeParts(*operands, k_rows, v_columns, q_slots)
    return None


def _l0_parts(shape: FlashShape, tiling: SplitTiling, chip: Chip) -> tuple[int, int] | None:
    """Return the keys and columns of one matrix instruction, the largest that fit every L0."""
    rows = tiling.rows // FRACTAL
    widest = max(shape.fractals[2:])
    for pieces in (1, 2, 4, 5, 8):  # 5: the 36 fractals of latent heads as 8, 8, 8, 8, 4
        # Cut the width or the depth into more and more pieces until a product of some keys fits L0.
        columns = ceil_div(widest, pieces)
        for side in (8, 4, 2, 1):
            a_fractals = rows * max(side, columns)
            b_fractals = side * columns
            # Operands have 2 bytes; L0C holds scores or outputs in fp32.
            sizes = (("L0A", 2 * a_fractals), ("L0B", 2 * b_fractals), ("L0C", 4 * a_fractals))
            if all(tiling.l0_slots * n * AREA <= chip.buffers[space] for space, n in sizes):
                return min(side, tiling.keys // FRACTAL), columns
    return None


def fits_split(shape: FlashShape, tiling: SplitTiling, chip: Chip) -> bool:
    """Return whether all slots fit L0 and L1, and at least 8 rows of a block fit UB."""
    rows_at_once = slice_rows(shape, chip, tiling.rows // 2, tiling.keys, MAX_IN_FLIGHT)
    return rows_at_once > 0 and cube_parts(shape, tiling, chip) is not None


def split_tilings(shape: FlashShape, chip: Chip) -> list[SplitTiling]:
    """Return tilings that fit: for blocks of 128, 64, 32 and 16 rows the one with the most keys.

    They cut rows and keys into blocks of equal size. If one tile has all keys, no stage is ahead
    inside a block: then blocks have fewer rows, so that there is work for every core.
    """
    rows, keys = shape.fractals[:2]
    cores_per_matrix = chip.core_count // shape.batch if shape.keys <= KEYS else 1
    tilings = list[SplitTiling]()
    for most_rows in (ROWS, 64, 32, 16):
        row_blocks = max(ceil_div(rows * FRACTAL, most_rows), min(rows, cores_per_matrix))
        block_rows = ceil_div(rows, row_blocks) * FRACTAL
        for most_keys in (KEYS, 128, 64, 32, 16):
            key_tiles = ceil_div(keys * FRACTAL, most_keys)
            tiling = SplitTiling(block_rows, ceil_div(keys, key_tiles) * FRACTAL)
            if fits_split(shape, tiling, chip):
                if tiling not in tilings:
                    tilings.append(tiling)
                break
    return tilings


def split_tiling(shape: FlashShape, chip: Chip) -> SplitTiling:
    """Return the tiling with the most rows; raise `CapacityError` for matrices too wide."""
    for tiling in split_tilings(shape, chip):
        return tiling
    needed = f"blocks of 16 rows and width {max(shape.fractals[2:]) * FRACTAL} on chip"
    got = f"less room on {chip.name}"
    raise errors.CapacityError(needed, got, "use the operator attention")


def check_split(shape: FlashShape, t: SplitTiling, chip: Chip) -> None:
    """Raise `InputError` or `CapacityError` for a tiling with which the kernel cannot run."""
    sizes = (t.rows, t.keys)
    if min(sizes) < FRACTAL or any(n % FRACTAL for n in sizes) or not 0 <= t.ahead < MAX_IN_FLIGHT:
        needed = f"rows and keys in multiples of {FRACTAL}, 0 to {MAX_IN_FLIGHT - 1} tiles ahead"
        raise errors.InputError(needed, str(t), "round them")
    if not fits_split(shape, t, chip):
        raise errors.CapacityError(f"room for {t}", f"less on {chip.name}", "halve rows or keys")


# -- the launch -----------------------------------------------------------------------------------
def flash_pipeline_launch(
    shape: FlashShape, chip: Chip, tiling: SplitTiling | None = None
) -> isa.Launch:
    """Return attention as a launch of cube and vector cores together: GM tensors q, k, v, y.

    Further tensors are a mask, if there is one, and the rings s, p and o. Raises `CapacityError` if
    matrices are too wide, `InputError` for a wrong tiling.
    """
    t = tiling or split_tiling(shape, chip)
    check_split(shape, t, chip)
    side = t.rows // FRACTAL
    name = f"flash_{shape.batch}x{shape.rows}x{shape.keys}x{shape.depth}"
    if shape.causal:
        cores_of_axis = causal_grid(shape, side, chip.core_count)
    else:
        cores_of_axis = grid(shape, ceil_div(shape.fractals[0], side), chip.core_count)
    axis_shares = shares(shape, side, cores_of_axis)
    cores = (
        len(axis_shares["group"]),
        cores_of_axis[1] if shape.causal else len(axis_shares["row"]),
        len(axis_shares["heads"]),
    )

    def programs(*core_shares: isa.Share) -> tuple[isa.Program, isa.Program, isa.Program]:
        return Plan(shape, t, chip, core_shares, cores).programs()

    def causal_programs(
        group: isa.Share, heads: isa.Share, place: tuple[int, int, int]
    ) -> tuple[isa.Program, isa.Program, isa.Program]:
        # Each place along the rows has its own blocks (`blocks_of_cores`), so its own program.
        rows = (1, 1, place[0])
        return Plan(shape, t, chip, (group, rows, heads), cores).programs()

    if shape.causal:
        matrix_axes = {"group": axis_shares["group"], "heads": axis_shares["heads"]}
        return isa.spread(name, matrix_axes, causal_programs, apart=[1] * cores_of_axis[1])
    return isa.spread(name, axis_shares, programs)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the programs of an AI core have in common: shares, loops and rings."""

    shape: FlashShape
    tiling: SplitTiling
    chip: Chip
    core_shares: CoreShares
    cores: tuple[int, int, int]

    def programs(self) -> tuple[isa.Program, isa.Program, isa.Program]:
        """Return the programs of a cube core and of its two vector cores."""
        vector = self.vector()
        return self.cube(), vector, vector

    def nest(self, k: isa.KernelBuilder) -> tuple[Nest | CausalTiles, isa.Affine]:
        """Return the loops of an AI core, and its number."""
        if self.shape.causal:
            return self._causal_tiles(k)
        core = places(k, self.core_shares)
        keys = self.tiling.keys // FRACTAL
        full_tiles, last_fractals, _ = cut_keys(self.shape, keys)
        key = Axis("key", full_tiles, keys, last_fractals, isa.Affine())
        nest = (*axes(self.core_shares, core, self.tiling.rows // FRACTAL), key)
        return Nest.of(nest, self.tiling.ahead, MAX_IN_FLIGHT), self._number(core)

    def _causal_tiles(self, k: isa.KernelBuilder) -> tuple[CausalTiles, isa.Affine]:
        """Return the tiles of a core whose rows see different numbers of keys, and its number."""
        group, (_, _, place), heads = self.core_shares
        side = self.tiling.rows // FRACTAL
        core = (k.param("group", group[2]), isa.Affine(place), k.param("heads", heads[2]))
        matrices, _ = axes(self.core_shares, core, side)
        blocks = blocks_of_cores(self.shape, side, self.cores[1])[place]
        keys = self.tiling.keys // FRACTAL
        sequence = CausalTiles.of(self.shape, matrices, blocks, keys, self.tiling.ahead)
        return sequence, self._number(core)

    def _number(self, core: tuple[isa.Affine, ...]) -> isa.Affine:
        """Return the number of a core from its place in the grid."""
        # Place (1, 2, 0) in a grid of 2 x 4 x 3 is core (1 * 4 + 2) * 3 + 0 = 18.
        entry, row, head = core
        _, row_cores, head_cores = self.cores
        return (entry * row_cores + row) * head_cores + head

    def rings(self, nest: Nest | CausalTiles) -> tuple[isa.Ring, isa.Ring, isa.Ring]:
        """Return the rings of scores, weights and products."""
        rows = self.tiling.rows
        keys = self.tiling.keys
        width = self.shape.fractals[3] * FRACTAL
        sizes = (
            ("s", "fp32", rows * keys),
            ("p", self.shape.dtype, rows * keys),
            ("o", "fp32", rows * width),
        )
        # A slot for every tile that the first stage has begun and the second has not ended.
        slots = nest.in_flight
        cores = self.cores[0] * self.cores[1] * self.cores[2]
        s, p, o = (
            isa.Ring(*size, slots, cores, ready=2 * i, empty=2 * i + 1)
            for i, size in enumerate(sizes)
        )
        return s, p, o

    def cube(self) -> isa.Program:
        """Return the program of the cube core: QK and PV."""
        k = isa.KernelBuilder("cube", self.chip)
        nest, core = self.nest(k)
        s, p, o = self.rings(nest)
        parts = cube_parts(self.shape, self.tiling, self.chip)
        assert parts is not None  # checked before
        cube = Cube.make(k, self, parts)
        scores = Scores(cube, k.ring_out(s, core, "FIX"))
        products = Products(cube, k.ring_in(p, core, "MTE2"), k.ring_out(o, core, "FIX"))
        # QK is some tiles ahead of PV, so that P has time in between.
        nest.run(k, scores, products)
        return k.finish()

    def vector(self) -> isa.Program:
        """Return the program of both vector cores, half of the rows each: P and GU."""
        k = isa.KernelBuilder("vector", self.chip)
        nest, core = self.nest(k)
        s, p, o = self.rings(nest)
        rows = self.tiling.rows
        pitch = self.tiling.rows * FRACTAL
        # Each of the two vector cores has half of the rows of every block.
        half = Rows.make(k, self.shape, nest, rows // 2, self.tiling.keys)
        weigh = Weigh(half, k.ring_in(s, core, "MTE2"), k.ring_out(p, core, "MTE3"), pitch)
        nest.run(k, weigh, Gather(half, k.ring_in(o, core, "MTE2"), pitch))
        return k.finish()


# -- the cube core --------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Cube:
    """The queues of a cube core: four operands in L1, operands a and b in L0, sums c in L0C."""

    k: isa.KernelBuilder
    shape: FlashShape
    gm: Tensors
    sizes: CubeParts
    pitch: int
    q: isa.Queue
    keys: isa.Queue
    values: isa.Queue
    weights: isa.Queue
    a: isa.Queue
    b: isa.Queue
    c: isa.Queue

    @classmethod
    def make(cls, k: isa.KernelBuilder, plan: Plan, sizes: CubeParts) -> "Cube":
        """Allocate the queues for products and copies of the given sizes."""
        t = plan.tiling
        (_, _, depth, width) = plan.shape.fractals
        rows = t.rows // FRACTAL
        keys = t.keys // FRACTAL
        slots = t.l0_slots
        # The keys of one product are its k in P V, its n in Q K^T.
        side = sizes.keys
        columns = min(sizes.columns, max(depth, width))

        def queue(
            name: str, space: str, size: int, src: str, dst: str, depth: int = 2
        ) -> isa.Queue:
            dtype = "fp32" if space == "L0C" else plan.shape.dtype
            return k.queue(name, space, dtype, size * AREA, src=src, dst=dst, depth=depth)

        left_size = rows * max(side, columns)
        return cls(
            k=k,
            shape=plan.shape,
            gm=Tensors.declare(k, plan.shape, ("q", "k", "v")),
            sizes=sizes,
            pitch=t.rows * FRACTAL,
            q=queue("q_l1", "L1", rows * depth, "MTE2", "MTE1", sizes.q_slots),
            keys=queue("k_l1", "L1", sizes.k_rows * depth, "MTE2", "MTE1"),
            values=queue("v_l1", "L1", keys * sizes.v_columns, "MTE2", "MTE1"),
            weights=queue("p_l1", "L1", rows * keys, "MTE2", "MTE1"),
            a=queue("a_l0", "L0A", left_size, "MTE1", "M", slots),
            b=queue("b_l0", "L0B", side * columns, "MTE1", "M", slots),
            c=queue("c_l0", "L0C", left_size, "M", "FIX", slots),
        )

    def load(self, queue: isa.Queue, src: isa.Region) -> isa.Tile:
        """Load an operand from GM to L1."""
        self.k.copy(queue.alloc().region(0, src.sizes), src)
        queue.enqueue()
        return queue.dequeue()

    def parts(self, keys: int) -> Iterator[Span]:
        """Yield the keys of a tile as (first, count) of each matrix instruction, in fractals."""
        yield from segments(self.k, "part", keys, self.sizes.keys)

    def pieces(self, name: str, total: int, size: int) -> Iterator[Span]:
        """Yield (first, count) of pieces of `size` fractals; without a loop if there is one."""
        if total <= size:
            yield isa.Affine(), total
        else:
            yield from segments(self.k, name, total, size)

    def multiply(
        self, sums: isa.Tile, sizes: tuple[int, int, int], accumulate: isa.Affine | int
    ) -> None:
        """Multiply the operands that were loaded to L0A and L0B."""
        self.a.enqueue()
        self.b.enqueue()
        multiply(self.k, sums, self.a.dequeue(), self.b.dequeue(), sizes, accumulate)
        self.a.free()
        self.b.free()

    def store(self, to: isa.Region, scale: float = 1.0) -> None:
        """Send the finished sums to GM through the fix pipe."""
        self.c.enqueue()
        self.k.fixpipe(to, self.c.dequeue().region(0, to.sizes), scale=scale)
        self.c.free()


class Scores:
    """Stage QK: the block of q, which stays in L1, times a tile of keys, a few keys at a time."""

    def __init__(self, cube: Cube, ring: isa.RingEnd) -> None:
        """Send tiles to a ring."""
        self.cube = cube
        self.ring = ring

    def open(self, at: Place) -> None:
        """Load the block of q to L1."""
        matrix, block = at
        rows = block.start, block.size
        self.q = self.cube.load(self.cube.q, self.cube.gm.block("q", matrix.matrix, rows))

    def tile(self, at: Place) -> None:
        """Write s = scale q k^T of a tile."""
        c = self.cube
        (matrix, _, keys) = at

        def load_keys(start: isa.Affine, size: int) -> isa.Tile:
            return c.load(c.keys, c.gm.block("k", matrix.matrix, (keys.start + start, size)))

        in_one_copy = c.sizes.k_rows >= keys.size
        all_keys = load_keys(isa.Affine(), keys.size) if in_one_copy else None
        # Only after the first copy, which then need not wait for a free slot of the ring.
        ring = self.ring.alloc()
        for start, size in c.pieces("rows", keys.size, c.sizes.k_rows):
            keys_in_l1 = all_keys or load_keys(start, size)
            for first_key, count in c.parts(size):
                source = Fractals(keys_in_l1, first_key * AREA, size * AREA)
                self._product(at, source, count)
                place = (start + first_key) * c.pitch
                to = ring.region(place, (count, at[1].size * AREA), (c.pitch, 1))
                # The fix pipe multiplies by the scale on the way to the ring.
                c.store(to, c.shape.scale)
            c.keys.free()
        self.ring.enqueue()

    def _product(self, at: Place, key_fractals: Fractals, count: int) -> None:
        """Multiply the block of q by some keys, a part of the depth at a time."""
        c = self.cube
        rows = at[1].size
        depth = self.cube.shape.fractals[2]
        # Q lies in L1 as (depth, rows): a product takes some columns of it.
        q = Fractals(self.q, isa.Affine(), rows * AREA)
        sums = c.c.alloc()
        for first_column, columns in c.pieces("depth", depth, c.sizes.columns):
            feed_a(c.k, c.a.alloc(), q.from_row(first_column), rows, columns)
            feed_b(c.k, c.b.alloc(), key_fractals.from_row(first_column), count, columns)
            c.multiply(sums, (rows, columns, count), first_column)

    def close(self, at: Place) -> None:
        """Free the slot of q."""
        self.cube.q.free()


class Products:
    """Stage PV: the products of the weights of a tile and its values add up in L0C."""

    def __init__(self, cube: Cube, weights: isa.RingEnd, ring: isa.RingEnd) -> None:
        """Take weights from the ring `weights`, send products to `ring`."""
        self.cube = cube
        self.weights = weights
        self.ring = ring

    def open(self, at: Place) -> None:
        """Do nothing: the values of a block are loaded with each tile."""

    def tile(self, at: Place) -> None:
        """Write o = p v of a tile; its values are loaded before the weights arrive."""
        c = self.cube
        (matrix, block, keys) = at
        width = c.shape.fractals[3]
        # Wide values are loaded in parts: the weights must stay in L1 for all of them.
        if min(c.sizes.v_columns, c.sizes.columns) < width:
            self._in_parts(at)
            return
        values = c.load(c.values, c.gm.block("v", matrix.matrix, (keys.start, keys.size)))
        weights = self._weights(at)
        self._product(at, weights, Fractals(values, isa.Affine(), keys.size * AREA), width)
        c.values.free()
        c.weights.free()
        ring = self.ring.alloc()
        c.store(ring.region(0, (width, block.size * AREA), (c.pitch, 1)))
        self.ring.enqueue()

    def _weights(self, at: Place) -> isa.Tile:
        """Wait for the weights of a tile, and load them to L1."""
        _, block, keys = at
        weights = self.weights.dequeue()
        # The ring keeps the pitch of a full tile, whatever the size of this one.
        source = weights.region(0, (keys.size, block.size * AREA), (self.cube.pitch, 1))
        weights_in_l1 = self.cube.load(self.cube.weights, source)
        self.weights.free()
        return weights_in_l1

    def _in_parts(self, at: Place) -> None:
        """Write o = p v where v is too wide for one copy or one product: some columns at a time."""
        c = self.cube
        (matrix, block, keys) = at
        width = c.shape.fractals[3]
        weights = self._weights(at)
        ring = self.ring.alloc()
        for first_column, count in c.pieces("columns", width, c.sizes.v_columns):
            columns = first_column, count
            source = c.gm.block("v", matrix.matrix, (keys.start, keys.size), columns)
            values = Fractals(c.load(c.values, source), isa.Affine(), keys.size * AREA)
            for column, columns_at_once in c.pieces("width", count, c.sizes.columns):
                self._product(at, weights, values.from_row(column), columns_at_once)
                place = (first_column + column) * c.pitch
                c.store(ring.region(place, (columns_at_once, block.size * AREA), (c.pitch, 1)))
            c.values.free()
        c.weights.free()
        self.ring.enqueue()

    def _product(self, at: Place, weights: isa.Tile, values: Fractals, width: int) -> None:
        """Multiply the weights of a tile by some columns of its values, some keys at a time."""
        c = self.cube
        rows = at[1].size
        sums = c.c.alloc()
        for first_key, count in c.parts(at[2].size):
            source = Fractals(weights, first_key * (rows * AREA), rows * AREA)
            feed_a(c.k, c.a.alloc(), source, rows, count)
            # The cube needs values as (keys, width): load2d transposes each fractal.
            part_values = replace(values, start=values.start + first_key * AREA)
            load_transposed(c.k, c.b.alloc(), part_values, width, count)
            c.multiply(sums, (rows, count, width), first_key)

    def close(self, at: Place) -> None:
        """Do nothing: each tile has been stored."""
