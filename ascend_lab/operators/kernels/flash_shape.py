"""Describe a FlashAttention problem: sizes, blocks, division over cores, tensors in GM.

All tensors lie in GM as FRACTAL_NZ, (columns / 16, rows, 16); a mask of one row is a vector.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ascend_lab.errors import CapacityError, InputError, PathError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, Affine, Buffer, KernelBuilder, Region, Share, ceil_div
from ascend_lab.operators.kernels.tiles import Span, chunks

CoreShares = tuple[Share, ...]
"""A core's shares along the axes of the grid: entries of the batch, rows and heads."""
Matrix = tuple[Affine, Affine]
"""An entry of the batch, and one of its heads."""
GRID = ("group", "row", "heads")
"""Axes of the grid of cores."""
MASKS = ("", "rows", "full")
"""Masks of the scores: none, one row for all queries, or a number for every score."""
TENSORS = ("q", "k", "v", "mask")
AREA = FRACTAL * FRACTAL
"""Elements of a fractal: 16 x 16."""
SCALES = 2.0**-11, 16.0
"""Scales that coupled cores can have: differences of products that count are finite in fp16."""


class FlashView(NamedTuple):
    """Strides in elements between batch entries, between heads and between columns of fractals."""

    entry: int
    head: int
    column: int

    @classmethod
    def of(cls, shape: Sequence[int], digits: Iterable[tuple[int, int]]) -> "FlashView | None":
        """Return the strides of matrices (entry, head, row, column), or None if rows have gaps.

        `digits` are pairs: a stride in a contiguous tensor, and the stride that replaces it here.
        """
        matrix_elements = shape[-2] * shape[-1]
        # Steps of an address from entry to entry, head to head, column to column of fractals, row
        # to row.
        steps = (math.prod(shape[-3:]), matrix_elements, shape[-2] * FRACTAL, 1)
        scaled_steps = {1: 1}
        for packed_stride, stride in digits:
            # A counter over every second head has stride 2048 where heads are 1024 apart; if its
            # stride is 128 here, heads are 64 apart.
            step = next(step for step in steps if step <= packed_stride)
            scaled_step = scaled_steps.setdefault(step, stride * step // packed_stride)
            if stride * step != packed_stride * scaled_step:
                return None
        return cls(
            scaled_steps.get(steps[0], 0),
            scaled_steps.get(matrix_elements, 0),
            scaled_steps.get(steps[2], steps[2]),
        )


@dataclass(frozen=True, slots=True)
class FlashShape:
    """softmax(scale q k^T + mask) v for `batch` pairs of q (rows, depth) and k (keys, depth).

    v is (keys, width). `mask` is "" (none), "rows" (one row for all of q) or "full". Tensors named
    in `shared` have one matrix for the whole batch; others have `heads` matrices per batch entry,
    one after another unless `views` tells where those of q, k, v or y lie. All tensors are in
    `dtype`: bf16 needs separate vector cores.

    If `causal` is 0, every row sees all keys. Otherwise `causal` is the number of heads per query
    that share keys: the rows are these heads, query by query, and each query sees the keys up to
    its own position, the last query all of them.
    """

    batch: int
    rows: int
    keys: int
    depth: int
    width: int
    scale: float
    mask: str = ""
    shared: tuple[str, ...] = ()
    heads: int = 1
    views: tuple[tuple[str, FlashView], ...] = ()
    dtype: str = "fp16"
    causal: int = 0

    def __post_init__(self) -> None:
        """Check sizes, mask and names."""
        sizes = (self.batch, self.rows, self.keys, self.depth, self.width)
        out_of_range = (
            min(*sizes, self.heads) < 1 or self.batch % self.heads or self.mask not in MASKS
        )
        if out_of_range or not set(self.shared) <= set(TENSORS):
            needed = "sizes of at least 1, heads that divide the batch, a mask of"
            needed = f"{needed} {MASKS}, shared tensors among {TENSORS}"
            got = f"{sizes}, {self.heads} heads, {self.mask!r}, {self.shared}"
            raise InputError(needed, got, "check the shape")
        if self.causal and (self.rows % self.causal or self.queries > self.keys):
            needed = f"whole queries of {self.causal} heads, at most {self.keys}, one a key"
            raise InputError(needed, f"{self.rows} rows", "give each query a key to see")

    @property
    def queries(self) -> int:
        """Number of queries of a causal shape, each of which sees a different number of keys."""
        return self.rows // max(self.causal, 1)

    def seen(self, row: int) -> int:
        """Return how many keys a row sees; rows behind the last one, which are padding, see all."""
        if not self.causal:
            return self.keys
        return min(self.keys, row // self.causal + 1 + self.keys - self.queries)

    @property
    def fractals(self) -> tuple[int, int, int, int]:
        """(rows, keys, depth, width) in fractals of 16, rounded up."""
        return (
            ceil_div(self.rows, FRACTAL),
            ceil_div(self.keys, FRACTAL),
            ceil_div(self.depth, FRACTAL),
            ceil_div(self.width, FRACTAL),
        )

    @property
    def ops(self) -> int:
        """Useful operations of the two products, 2 (d + e) for each key that a row sees."""
        # A causal query sees between 1 + t - s and t keys, on average t - (s - 1) / 2.
        twice_mean_keys = 2 * self.keys - (self.queries - 1 if self.causal else 0)
        return self.batch * self.rows * twice_mean_keys * (self.depth + self.width)


@dataclass(frozen=True, slots=True)
class FlashTiling:
    """Rows of Q, and of K and V, in a block; the grid of cores over entries, row blocks, heads."""

    rows: int
    keys: int
    grid_batch: int = 1
    grid_rows: int = 1
    grid_heads: int = 1

    @property
    def cores(self) -> tuple[int, int, int]:
        """The grid of cores."""
        return self.grid_batch, self.grid_rows, self.grid_heads


def tile_bytes(shape: FlashShape, tiling: FlashTiling) -> dict[str, int]:
    """Return the bytes each on-chip memory needs; see `kernels.flash` for the buffers.

    UB holds a tile of scores or outputs in fp32, two slots of results in fp16, the maxima of every
    8 keys, 16 lanes and 24 bytes of statistics per row, and a full mask.
    """
    depth = shape.fractals[2] * FRACTAL
    width = (shape.fractals[3] + 1) * FRACTAL
    rows = tiling.rows
    keys = tiling.keys
    one_row = shape.mask == "rows"
    # A mask of one row is one more fractal of depth, with a constant fractal of its own.
    mask_depth = FRACTAL if one_row else 0
    constant_fractals = 2 if one_row else 1
    masked_depth = depth + mask_depth
    widest = max(keys, width)
    # A slot of L1 has a block of q, of k and of v with its column of ones.
    block_elements = rows * depth + keys * (depth + width + mask_depth)
    l1_elements = key_slots(shape, tiling) * block_elements
    # Two slots of weights, and the maxima as two fractal columns.
    l1_elements += 2 * rows * (keys + FRACTAL) + constant_fractals * AREA
    # Per row: 4 bytes in fp32 and twice 2 bytes in fp16 for each element of the widest tile, half a
    # byte a key for maxima of 8 keys, and 16 lanes.
    work_bytes = rows * (8 * widest + keys // 2 + 4 * FRACTAL) + 24 * row_lanes(rows)
    # Two slots in fp16 and a copy in fp32.
    mask_bytes = 8 * rows * keys if shape.mask == "full" else 0
    return {
        "L1": 2 * l1_elements,
        "L0A": 4 * rows * max(masked_depth, keys, 2 * FRACTAL),
        "L0B": 4 * keys * max(masked_depth, width),
        "L0C": 4 * rows * (keys + width),
        "UB": work_bytes + mask_bytes,
    }


def row_lanes(rows: int) -> int:
    """Return the lanes that one number per row takes: whole repeats, if more than one repeat."""
    # A repeat of fp32 is 64 lanes: 80 rows take 2 repeats, 128 lanes.
    return rows if rows < 64 else ceil_div(rows, 64) * 64


def key_slots(shape: FlashShape, tiling: FlashTiling) -> int:
    """Return the slots of K and V in L1: 3 if the number of blocks is a multiple of 4, else 4.

    Q lies in the slot of its first block of keys. With 4 slots and a multiple of 4 blocks, the Q of
    the next rows would need the slot in which the Q of these rows still lies.
    """
    blocks = ceil_div(shape.keys, tiling.keys)
    return 3 if blocks % 4 == 0 else 4


def traffic_bytes(shape: FlashShape, tiling: FlashTiling) -> int:
    """Return the bytes between GM and the cores: q and y once, k and v once per block of rows.

    They are 2 (n d + n e + ceil(n / r) t (d + e)) per matrix for blocks of r rows, all sizes in
    whole fractals. A mask of one row is read as often as k, a full mask once. With blocks as tall
    as an on-chip memory of M bytes allows, r ~ M / d, this is O(n t d^2 / M) (Dao et al. 2022).
    """
    rows, keys, depth, width = (n * FRACTAL for n in shape.fractals)
    blocks = ceil_div(rows, tiling.rows)
    mask = {"": 0, "rows": 2 * blocks * keys, "full": rows * keys}[shape.mask]
    return 2 * shape.batch * (rows * (depth + width) + blocks * keys * (depth + width) + mask)


def check_tiling(shape: FlashShape, tiling: FlashTiling, chip: Chip) -> None:
    """Raise `PathError`, `InputError` or `CapacityError` unless the chip can run the tiling."""
    if not chip.combined:
        raise PathError(
            f"paths L0C->UB and UB->L1 on one core of {chip.name}",
            "separate cube and vector cores",
            "use kernels.flash_split, whose cores meet in L2",
        )
    if shape.causal or shape.dtype != "fp16":
        needed = f"fp16, and a mask instead of causal, on {chip.name}"
        raise InputError(needed, f"{shape.dtype}, causal={shape.causal}", "add a mask")
    if min(tiling.rows, tiling.keys) < FRACTAL or (tiling.rows | tiling.keys) % FRACTAL:
        needed = f"blocks in multiples of {FRACTAL} rows"
        got = f"{tiling.rows}, {tiling.keys}"
        raise InputError(needed, got, "round them")
    if not SCALES[0] <= shape.scale <= SCALES[1]:
        needed = f"a scale of {SCALES[0]} to {SCALES[1]}"
        got = str(shape.scale)
        raise InputError(needed, got, "multiply q by a part of it, or use the operator attention")
    if min(tiling.cores) < 1 or math.prod(tiling.cores) > chip.core_count:
        needed = f"a grid of 1 to {chip.core_count} cores of {chip.name}"
        raise InputError(needed, "x".join(map(str, tiling.cores)), "change it")
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
    """Return the blocks that fit and need the fewest vector cycles on the busiest core.

    Among tilings within 3 % it is the one that moves the fewest bytes, then the one with the most
    keys per block, which updates maxima least often. Raises the errors of `check_tiling`.
    """
    check_tiling(shape, FlashTiling(FRACTAL, FRACTAL), chip)
    rows, keys = shape.fractals[:2]
    candidates = [FlashTiling(r, k) for r in _equal_blocks(rows) for k in _equal_blocks(keys)]
    blocks = [t for t in candidates if fits(shape, t, chip)]
    cores = ((t, grid(shape, ceil_div(rows * FRACTAL, t.rows), chip.core_count)) for t in blocks)
    tilings = [FlashTiling(t.rows, t.keys, *grids) for t, grids in cores]
    cycles = {t: vector_cycles(shape, t) for t in tilings}
    quick = [t for t in tilings if 32 * cycles[t] <= 33 * min(cycles.values())]
    return min(quick, key=lambda t: (traffic_bytes(shape, t), cycles[t], -t.keys, -t.rows))


def vector_cycles(shape: FlashShape, tiling: FlashTiling) -> int:
    """Estimate the vector unit's cycles on the busiest core, from instructions and repeats.

    A block takes 16 cycles per 16 x 16 scores, 20 more with a full mask, and some for its maxima. A
    block of rows takes 20 cycles per 16 x 16 outputs, and 16 for each block of keys after the
    first. Before the first block and after the last one the vector unit waits.
    """
    rows, keys, _, width = shape.fractals
    block_rows = tiling.rows // FRACTAL
    block_keys = tiling.keys // FRACTAL
    blocks = ceil_div(keys, block_keys)
    share = ceil_div(ceil_div(rows, block_rows), tiling.grid_rows) * block_rows
    # A core's last block may be lower: all its rows count once, the start of every block.
    core_rows = min(share, rows)
    starts = ceil_div(core_rows, block_rows)
    heads = ceil_div(shape.heads, tiling.grid_heads)
    matrices = ceil_div(shape.batch // shape.heads, tiling.grid_batch) * heads
    full_mask = shape.mask == "full"
    # Every block of keys except for the first multiplies the output by its factor.
    later_blocks = blocks - 1
    # For 16 rows: fractals of scores, maxima of each block of keys, the quotient at the end.
    cycles_per_row = (36 if full_mask else 16) * keys + blocks * 4 + keys + 20 * width + 6
    cycles_per_row += later_blocks * (16 * width + 12)
    # For a block of rows: start-up cycles of the instructions.
    scores_start = 180 + 10 * block_keys.bit_length() + (30 if full_mask else 0)
    cycles_per_start = scores_start * blocks + 20 + 10 * width + later_blocks * (77 + 10 * width)
    matrix_cycles = cycles_per_start * starts + cycles_per_row * core_rows
    return matrices * matrix_cycles + tiling.rows * tiling.keys // 6


def _equal_blocks(fractals: int) -> list[int]:
    """Return the sizes of blocks, in elements, that cut `fractals` fractals into equal parts."""
    return sorted({ceil_div(fractals, n) * FRACTAL for n in range(1, fractals + 1)})


def default_scale(depth: int) -> float:
    """Return 1 / sqrt(d)."""
    return 1.0 / math.sqrt(depth)


def mask_shares(scale: float) -> tuple[float, float]:
    """Return two positive fp16 numbers with the sum 1 / scale, so that infinities keep signs."""
    # 1 / scale = 8 for depth 64: 7.992 in fp16, and 0.008 more: both are positive.
    mantissa, exponent = math.frexp(1.0 / scale)
    high = math.ldexp(math.ceil(mantissa * 2048) - 1, exponent - 11)
    return high, 1.0 / scale - high


# -- cores -----------------------------------------------------------------------------------------
def grid(shape: FlashShape, blocks: int, cores: int) -> tuple[int, int, int]:
    """Return cores over entries, row blocks and heads: the fewest blocks for the busiest core.

    Among equal ones it is the grid with the most cores over matrices, then one in which a core has
    whole heads or whole entries.
    """
    entries = shape.batch // shape.heads

    def busiest(split: tuple[int, int]) -> tuple[int, int, int]:
        core_matrices = (ceil_div(entries, split[0]), ceil_div(shape.heads, split[1]))
        row_cores = cores // (split[0] * split[1])
        # 12 heads on 8 cores: 2 a core, so the busiest core has twice the blocks of one matrix.
        core_blocks = core_matrices[0] * core_matrices[1] * ceil_div(blocks, min(blocks, row_cores))
        return core_blocks, -split[0] * split[1], min(core_matrices)

    # Every way to deal entries and heads to at most `cores` cores.
    splits = [
        (e, h)
        for h in range(1, min(shape.heads, cores) + 1)
        for e in range(1, min(entries, cores // h) + 1)
    ]
    entry_cores, heads = min(splits, key=busiest)
    return entry_cores, min(blocks, cores // (entry_cores * heads)), heads


def shares(shape: FlashShape, block: int, cores: tuple[int, int, int]) -> dict[str, list[int]]:
    """Return the shares of the cores of a grid along entries, rows (in whole blocks) and heads."""
    axes = ((shape.batch // shape.heads, 1), (shape.fractals[0], block), (shape.heads, 1))
    return {
        name: chunks(*axis, cores_of_axis)
        for name, axis, cores_of_axis in zip(GRID, axes, cores, strict=True)
    }


# -- tensors ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors of a program by name: q, k, v, y and mask (a vector where it has one row)."""

    shape: FlashShape
    buffers: Mapping[str, Buffer]

    @classmethod
    def declare(cls, k: KernelBuilder, shape: FlashShape, names: Sequence[str]) -> "Tensors":
        """Declare the named tensors in GM; a mask only where the shape has one."""
        buffers = {}
        for name in names:
            if name == "mask" and not shape.mask:
                continue
            height, columns = _matrix(shape, name)
            matrix_elements = height * columns * AREA if height else columns * FRACTAL
            count = 1 if name in shape.shared else shape.batch
            buffers[name] = k.tensor(name, shape.dtype, count * matrix_elements)
        return cls(shape, buffers)

    def view(self, name: str) -> FlashView:
        """Return the strides between the matrices of a tensor."""
        if view := dict(self.shape.views).get(name):
            return view
        # A shared matrix is the same for every entry and head: a step of 0.
        step = 0 if name in self.shape.shared else self.buffers[name].elements // self.shape.batch
        return FlashView(self.shape.heads * step, step, _matrix(self.shape, name)[0] * AREA)

    def start(self, name: str, matrix: Matrix) -> Affine:
        """Return where a matrix begins."""
        view = self.view(name)
        return matrix[0] * view.entry + matrix[1] * view.head

    def block(self, name: str, matrix: Matrix, rows: Span, columns: Span | None = None) -> Region:
        """Return rows (in fractals) and `columns` of q, k, v or y: (columns / 16, rows x 16)."""
        all_columns = self.lines(name, matrix, (rows[0] * FRACTAL, rows[1] * FRACTAL))
        if columns is None:
            return all_columns
        strides = all_columns.strides
        start = self.start(name, matrix) + rows[0] * AREA + columns[0] * strides[0]
        return self.buffers[name].region(start, (columns[1], all_columns.sizes[1]), strides)

    def lines(self, name: str, matrix: Matrix, rows: Span) -> Region:
        """Return rows of a tensor, counted one by one, as (columns / 16, rows x 16)."""
        (_, columns) = _matrix(self.shape, name)
        (at, size) = rows
        start = self.start(name, matrix) + at * FRACTAL
        pitch = self.view(name).column
        return self.buffers[name].region(start, (columns, size * FRACTAL), (pitch, 1))

    def mask(self, matrix: Matrix, rows: Span, keys: Span) -> Region:
        """Return the mask of a block of scores, (keys / 16, rows x 16), or one row of keys.

        Rows are counted one by one, keys in fractals.
        """
        source = self.buffers["mask"]
        matrix_start = self.start("mask", matrix)
        (first_key, count) = keys
        if self.shape.mask == "rows":
            return source.region(matrix_start + first_key * FRACTAL, (count, FRACTAL))
        pitch = self.view("mask").column
        start = matrix_start + first_key * pitch + rows[0] * FRACTAL
        return source.region(start, (count, rows[1] * FRACTAL), (pitch, 1))


def _matrix(shape: FlashShape, name: str) -> tuple[int, int]:
    """Return rows and columns of a tensor in fractals; 0 rows for a mask of one row."""
    rows, keys, depth, width = shape.fractals
    mask = rows if shape.mask == "full" else 0, keys
    sizes = {"q": (rows, depth), "k": (keys, depth), "v": (keys, width), "y": (rows, width)}
    return sizes.get(name, mask)


def cut_keys(shape: FlashShape, block: int) -> tuple[int, int, int]:
    """Return full blocks of keys, fractals of the last one, and keys in its last fractal.

    The last block is counted separately if it is shorter than the others or ends inside a fractal;
    the second number is 0 if there is no such block, the third if it ends with a fractal.
    """
    # 100 keys in blocks of 2 fractals: 7 fractals are 3 full blocks and 1 fractal, of which 4 keys
    # count.
    full_blocks, last_fractals = divmod(shape.fractals[1], block)
    ragged = shape.keys % FRACTAL
    return (
        (full_blocks - 1, block, ragged)
        if ragged and not last_fractals
        else (full_blocks, last_fractals, ragged)
    )
