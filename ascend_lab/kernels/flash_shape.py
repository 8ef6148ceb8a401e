"""What FlashAttention computes and how it is cut: problem, blocks, and what fits on a chip."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.errors import CapacityError, InputError, PathError
from ascend_lab.kernels.flash_grid import grid
from ascend_lab.kernels.gemm_schedule import FRACTAL, up

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
            raise InputError(
                f"sizes of at least 1, a mask of {MASKS}, shared tensors among {TENSORS}",
                f"{sizes}, {self.mask!r}, {self.shared}",
                "check the shape",
            )

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

    UB: scores and running output, 6 times 16 lanes and one number a row of statistics, two tiles
    on their way out, and the mask.
    """
    _, _, depth, width = (n * FRACTAL for n in shape.fractals)
    rows, keys = tiling.rows, tiling.keys
    wide = max(keys, width)
    mask = {"": 0, "rows": 2 * keys, "full": rows * keys}[shape.mask]
    return {
        "L1": 2 * (rows * depth + 3 * keys * (depth + width) + 2 * rows * keys),
        "L0A": 4 * rows * max(depth, keys),
        "L0B": 4 * keys * max(depth, width),
        "L0C": 8 * rows * wide,
        "UB": 4 * (rows * (keys + width + 6 * FRACTAL + 1 + wide) + mask),
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
            "use kernels.flash_split, whose phases meet in L2",
        )
    if min(tiling.rows, tiling.keys) < FRACTAL or (tiling.rows | tiling.keys) % FRACTAL:
        raise InputError(
            f"blocks in multiples of {FRACTAL} rows", f"{tiling.rows}, {tiling.keys}", "round them"
        )
    cores = tiling.grid_batch * tiling.grid_rows
    if min(tiling.grid_batch, tiling.grid_rows) < 1 or cores > chip.core_count:
        raise InputError(
            f"a grid of 1 to {chip.core_count} cores of {chip.name}",
            f"{tiling.grid_batch}x{tiling.grid_rows}",
            "change it",
        )
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

    Among equals the tallest blocks: bytes from GM fall with their rows. Raises as `check_tiling`.
    """
    check_tiling(shape, FlashTiling(FRACTAL, FRACTAL), chip)
    rows, keys = (n * FRACTAL for n in shape.fractals[:2])
    share = up(shape.batch * rows // FRACTAL, chip.core_count) * FRACTAL
    sizes = sorted({*_halves(rows), *_halves(min(rows, share))})
    blocks = [(r, k) for r in sizes for k in _halves(keys) if fits(shape, FlashTiling(r, k), chip)]
    found = [FlashTiling(r, k, *grid(shape.batch, up(rows, r), chip.core_count)) for r, k in blocks]
    return min(found, key=lambda t: (vector_cycles(shape, t), -t.rows, -t.keys))


def vector_cycles(shape: FlashShape, tiling: FlashTiling) -> int:
    """Estimate the vector unit's cycles on the busiest core: instructions times their length.

    A block takes 6 instructions for 16 keys, 2 for 16 columns of v, and as much as 6 for its
    statistics; one instruction 12 cycles to start and about 2 a repeat of 4 rows.
    """
    rows, keys, _, width = shape.fractals
    blocks = up(keys * FRACTAL, tiling.keys)
    count = 6 * keys + blocks * (2 * width + 6)
    share = up(up(rows * FRACTAL, tiling.rows), tiling.grid_rows) * tiling.rows
    # a core's last block may be lower: all its rows count once, the start of every block
    own = min(share, rows * FRACTAL)
    starts = up(own, tiling.rows)
    return up(shape.batch, tiling.grid_batch) * count * (12 * starts + own // 2)


def _halves(most: int) -> Iterator[int]:
    """Yield `most` and the powers of two below it, down to a fractal."""
    yield most
    size = 1 << ((most - 1).bit_length() - 1)
    while size >= FRACTAL:
        yield size
        size //= 2


def default_scale(depth: int) -> float:
    """Return 1 / sqrt(d)."""
    return 1.0 / math.sqrt(depth)
