"""What FlashAttention computes and how it is cut: problem, blocks, cores, GM tensors.

All tensors lie in GM as FRACTAL_NZ, (columns / 16, rows, 16); a mask of one row is a vector.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.errors import CapacityError, InputError, PathError
from ascend_lab.isa import FRACTAL, Affine, Buffer, KernelBuilder, Region, Share, up
from ascend_lab.kernels.tiles import Span, chunks

Own = tuple[Share, Share]
"""What a part owns of the batch and of the rows."""
MASKS = ("", "rows", "full")
TENSORS = ("q", "k", "v", "mask")
AREA = FRACTAL * FRACTAL


@dataclass(frozen=True, slots=True)
class FlashShape:
    """softmax(scale q k^T + mask) v for `batch` pairs of q (rows, depth) and k (keys, depth).

    v is (keys, width). `mask` is "" (none), "rows" (one row for all of q) or "full". Tensors named
    in `shared` have one matrix for the whole batch. All tensors are fp16.
    """

    batch: int
    rows: int
    keys: int
    depth: int
    width: int
    scale: float
    mask: str = ""
    shared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check sizes, mask and names."""
        sizes = (self.batch, self.rows, self.keys, self.depth, self.width)
        if min(sizes) < 1 or self.mask not in MASKS or not set(self.shared) <= set(TENSORS):
            wanted = f"sizes of at least 1, a mask of {MASKS}, shared tensors among {TENSORS}"
            raise InputError(wanted, f"{sizes}, {self.mask!r}, {self.shared}", "check the shape")

    @property
    def fractals(self) -> tuple[int, int, int, int]:
        """(rows, keys, depth, width) in fractals of 16, rounded up."""
        return (
            up(self.rows, FRACTAL),
            up(self.keys, FRACTAL),
            up(self.depth, FRACTAL),
            up(self.width, FRACTAL),
        )

    @property
    def ops(self) -> int:
        """Useful operations of the two products, 2 n t (d + e) a matrix."""
        return 2 * self.batch * self.rows * self.keys * (self.depth + self.width)


@dataclass(frozen=True, slots=True)
class FlashTiling:
    """Rows of Q and of K and V in a block, and the grid of cores over batch and row blocks."""

    rows: int
    keys: int
    grid_batch: int = 1
    grid_rows: int = 1


def tile_bytes(shape: FlashShape, tiling: FlashTiling) -> dict[str, int]:
    """Return the bytes each on-chip memory needs; see `kernels.flash` for the buffers.

    UB: scores and running output, 5 times 16 lanes and one number a row of statistics, two tiles
    on their way out, and the mask.
    """
    depth, width = shape.fractals[2] * FRACTAL, (shape.fractals[3] + 1) * FRACTAL
    rows, keys = tiling.rows, tiling.keys
    wide = max(keys, width)
    mask = {"": 0, "rows": 2 * keys, "full": rows * keys}[shape.mask]
    return {
        "L1": 2 * (rows * depth + 3 * keys * (depth + width) + 2 * rows * keys),
        "L0A": 4 * rows * max(depth, keys),
        "L0B": 4 * keys * max(depth, width),
        "L0C": 8 * rows * wide,
        "UB": 4 * (rows * (keys + width + 5 * FRACTAL + 1 + wide) + mask),
    }


def traffic_bytes(shape: FlashShape, tiling: FlashTiling) -> int:
    """Return the bytes between GM and the cores: q and y once, k and v once a block of rows.

    2 (n d + n e + ceil(n / r) t (d + e)) a matrix for blocks of r rows, all sizes in whole
    fractals; a mask is read as often as k, or once in all if it has all rows. With blocks as tall
    as an on-chip memory of M bytes allows, r ~ M / d, this is O(n t d^2 / M)  (Dao et al. 2022).
    """
    rows, keys, depth, width = (n * FRACTAL for n in shape.fractals)
    blocks = up(rows, tiling.rows)
    mask = {"": 0, "rows": blocks * keys, "full": rows * keys}[shape.mask]
    return 2 * shape.batch * (rows * (depth + width) + blocks * keys * (depth + width) + mask)


def check_tiling(shape: FlashShape, tiling: FlashTiling, chip: Chip) -> None:
    """Raise `PathError`, `InputError` or `CapacityError` unless the chip can run the tiling."""
    if not chip.combined:
        raise PathError(
            f"paths L0C->UB and UB->L1 on one core of {chip.name}",
            "separate cube and vector cores",
            "use kernels.flash_split, whose cores meet in L2",
        )
    if min(tiling.rows, tiling.keys) < FRACTAL or (tiling.rows | tiling.keys) % FRACTAL:
        wanted, got = f"blocks in multiples of {FRACTAL} rows", f"{tiling.rows}, {tiling.keys}"
        raise InputError(wanted, got, "round them")
    cores = tiling.grid_batch * tiling.grid_rows
    if min(tiling.grid_batch, tiling.grid_rows) < 1 or cores > chip.core_count:
        wanted = f"a grid of 1 to {chip.core_count} cores of {chip.name}"
        raise InputError(wanted, f"{tiling.grid_batch}x{tiling.grid_rows}", "change it")
    for space, size in tile_bytes(shape, tiling).items():
        if size > chip.buffers[space]:
            raise CapacityError(
                f"{space} for blocks of {tiling.rows} rows and {tiling.keys} keys of width "
                f"{max(shape.depth, shape.width)}: {size} bytes",
                f"{chip.buffers[space]} on {chip.name}",
                "halve a block, or use the operator attention",
            )


def fits(shape: FlashShape, tiling: FlashTiling, chip: Chip) -> bool:
    """Tell whether the blocks fit every on-chip memory."""
    return all(size <= chip.buffers[s] for s, size in tile_bytes(shape, tiling).items())


def default_tiling(shape: FlashShape, chip: Chip) -> FlashTiling:
    """Return the blocks that fit and keep the busiest core's vector unit busy least.

    Among equals those of the most keys, whose maxima are brought up to date least. Raises as
    `check_tiling`.
    """
    check_tiling(shape, FlashTiling(FRACTAL, FRACTAL), chip)
    rows, keys = shape.fractals[:2]
    some = [FlashTiling(r, k) for r in _parts(rows) for k in _parts(keys)]
    blocks = [t for t in some if fits(shape, t, chip)]
    cores = ((t, grid(shape.batch, up(rows * FRACTAL, t.rows), chip.core_count)) for t in blocks)
    found = [FlashTiling(t.rows, t.keys, *grids) for t, grids in cores]
    return min(found, key=lambda t: (vector_cycles(shape, t), -t.keys, -t.rows))


def vector_cycles(shape: FlashShape, tiling: FlashTiling) -> int:
    """Estimate the vector unit's cycles on the busiest core: instructions times their length.

    A block takes 5 instructions for 16 keys, 2 for 16 columns of v and its ones, and as much as 5
    for its statistics; one instruction 12 cycles to start and about 2 a repeat of 4 rows. A core's
    only block waits for its own product, about a cycle for 12 scores on their way to the cube.
    """
    rows, keys, _, width = shape.fractals
    blocks = up(keys * FRACTAL, tiling.keys)
    count = 5 * keys + blocks * (2 * width + 7)
    share = up(up(rows * FRACTAL, tiling.rows), tiling.grid_rows) * tiling.rows
    # a core's last block may be lower: all its rows count once, the start of every block
    own = min(share, rows * FRACTAL)
    starts, matrices = up(own, tiling.rows), up(shape.batch, tiling.grid_batch)
    alone = tiling.rows * tiling.keys // 12 if matrices * starts * blocks == 1 else 0
    return matrices * count * (12 * starts + own // 2) + alone


def _parts(fractals: int) -> list[int]:
    """Return the sizes of blocks, in elements, that cut so many fractals into equal parts."""
    return sorted({up(fractals, n) * FRACTAL for n in range(1, fractals + 1)})


def default_scale(depth: int) -> float:
    """Return 1 / sqrt(d)."""
    return 1.0 / math.sqrt(depth)


# -- cores -----------------------------------------------------------------------------------------
def grid(batch: int, blocks: int, cores: int) -> tuple[int, int]:
    """Return cores over the batch and over row blocks: the fewest blocks for the busiest core."""

    def busiest(over: int) -> tuple[int, int]:
        return up(batch, over) * up(blocks, min(blocks, cores // over)), -over

    over = min(range(1, min(batch, cores) + 1), key=busiest)
    return over, min(blocks, cores // over)


def shares(batch: int, rows: int, block: int, cores: tuple[int, int]) -> dict[str, list[int]]:
    """Return what the cores of a grid own: matrices of the batch, and rows in blocks."""
    return {"group": chunks(batch, 1, cores[0]), "row": chunks(rows, block, cores[1])}


# -- tensors ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors of a program by name: q, k, v, y and mask (a vector where it has one row)."""

    shape: FlashShape
    buffers: Mapping[str, Buffer]

    @classmethod
    def declare(cls, k: KernelBuilder, shape: FlashShape, names: Sequence[str]) -> "Tensors":
        """Declare the named tensors in GM; a mask only where the shape has one."""
        rows, keys, _, _ = shape.fractals
        buffers = {}
        for name in names:
            if name != "mask":
                height, columns = _matrix(shape, name)
                each = height * columns * AREA
            elif shape.mask:
                each = keys * FRACTAL if shape.mask == "rows" else rows * keys * AREA
            else:
                continue
            buffers[name] = k.tensor(
                name, "fp16", (1 if name in shape.shared else shape.batch) * each
            )
        return cls(shape, buffers)

    def start(self, name: str, matrix: Affine) -> Affine:
        """Return where the matrix of one batch entry begins."""
        if name in self.shape.shared:
            return Affine()
        return matrix * (self.buffers[name].elements // self.shape.batch)

    def block(self, name: str, matrix: Affine, rows: Span) -> Region:
        """Return rows, in fractals, of q, k, v or y: (columns / 16, rows x 16)."""
        return self.lines(name, matrix, (rows[0] * FRACTAL, rows[1] * FRACTAL))

    def lines(self, name: str, matrix: Affine, rows: Span) -> Region:
        """Return the same of single rows."""
        (height, columns), (at, size) = _matrix(self.shape, name), rows
        start = self.start(name, matrix) + at * FRACTAL
        return self.buffers[name].region(start, (columns, size * FRACTAL), (height * AREA, 1))

    def mask(self, matrix: Affine, rows: Span, keys: Span) -> Region:
        """Return the mask of scores, (keys / 16, rows x 16), or one row of keys.

        Rows are counted one by one, keys in fractals.
        """
        source, start, (at, size) = self.buffers["mask"], self.start("mask", matrix), keys
        if self.shape.mask == "rows":
            return source.region(start + at * FRACTAL, size * FRACTAL)
        pitch = self.shape.fractals[0] * AREA
        start = start + at * pitch + rows[0] * FRACTAL
        return source.region(start, (size, rows[1] * FRACTAL), (pitch, 1))


def _matrix(shape: FlashShape, name: str) -> tuple[int, int]:
    rows, keys, depth, width = shape.fractals
    return {"q": (rows, depth), "k": (keys, depth), "v": (keys, width), "y": (rows, width)}[name]


def cut_keys(shape: FlashShape, block: int) -> tuple[int, int, int]:
    """Return full blocks of keys, fractals of the last one, and keys in its last fractal.

    The last is a block of its own where it is shorter (0: it is not) or ends inside a fractal (0:
    it does not).
    """
    full, rest = divmod(shape.fractals[1], block)
    ragged = shape.keys % FRACTAL
    return (full - 1, block, ragged) if ragged and not rest else (full, rest, ragged)
