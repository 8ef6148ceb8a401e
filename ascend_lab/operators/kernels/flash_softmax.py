"""Online softmax of FlashAttention on one block of scores, for cores with cube and vector unit.

Scores lie in L0C as (keys / 16, rows, 16). The vector unit copies them twice, first for their
maxima, then as fp16, and in between the cube subtracts the maxima. Maximum m and factor f are one
number per row; m is stored as a sum of two fp16 numbers, high and low. To subtract m the cube adds,
for each of the two, 16 products of 16 equal numbers with -128. The last 16 columns of v are ones,
so that those of o are l, the sum of the weights of a row.

    m' = max(m, max(s)),  p = exp(c (s - m')),  f = exp(c (m - m')),  o' = f o + p v,  y = o / l

c scales products to scores. For the first block of keys m' = max(s), but finite, and o' = p v.
s - m' is rounded to fp16 before its exponential is taken. The error of e^-x is at most
x e^-x 2^-11, no more than 1.8e-4, while rounding p itself may cost 2.4e-4; it is three times as
large if c is not a power of two.

Sources: Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022 (FlashAttention).
"""

from dataclasses import dataclass

from ascend_lab.machine.isa import FRACTAL, Affine, Buffer, KernelBuilder, Region, Tile, ceil_div
from ascend_lab.operators.kernels import flash_shape, tiles
from ascend_lab.operators.kernels.flash_shape import AREA, FlashShape, FlashTiling

Memory = Buffer | Tile
LANES = 64
"""fp32 lanes of a repeat: 4 rows of 16."""
LEAST = -1.0e30
"""Stands for minus infinity, but finite: the difference of two of them is 0, not NaN."""
STEP = 2048.0
"""Maxima are counted in these, so that their halves reach to 2^27."""
LOWEST = -65504.0
"""The least maximum of a row, in steps: finite in fp16."""


@dataclass(frozen=True, slots=True)
class State:
    """Buffers of UB that only the vector unit uses, in fp32 except for `halves`.

    wide        a tile of L0C: scores or outputs
    best        a maximum of every 8 keys of a row
    work        16 numbers per row
    peak        the maximum m of each row, before and after a block of keys
    factor      f of each row, for two blocks of keys
    remainder   what rounding m to fp16 takes away
    halves      m as two fp16 numbers per row
    mask        a full mask in fp32
    """

    builder: KernelBuilder
    wide: Buffer
    best: Buffer
    work: Buffer
    peak: Buffer
    factor: Buffer
    remainder: Buffer
    halves: Buffer
    mask: Buffer
    scale: float

    @classmethod
    def make(cls, k: KernelBuilder, shape: FlashShape, tiling: FlashTiling) -> "State":
        """Allocate the buffers for blocks of a tiling."""
        rows = tiling.rows
        row_elements = flash_shape.row_lanes(tiling.rows)
        # A tile of scores, or of the output with its column of ones.
        widest = max(tiling.keys, (shape.fractals[3] + 1) * FRACTAL)

        def buffer(name: str, elements: int, slots: int = 1, dtype: str = "fp32") -> Buffer:
            return k.buffer(name, "UB", dtype, elements, slots)

        work = buffer("work", rows * FRACTAL)
        return cls(
            builder=k,
            wide=buffer("wide", rows * widest),
            best=buffer("best", rows * tiling.keys // 8),
            work=work,
            peak=buffer("peak", row_elements, 2),
            factor=buffer("factor", row_elements, 2),
            remainder=buffer("left", row_elements),
            halves=buffer("halves", row_elements, 2, "fp16"),
            # Without a full mask the field is not used.
            mask=buffer("mask_wide", rows * tiling.keys) if shape.mask == "full" else work,
            scale=shape.scale,
        )


def repeats_of(buffer: Memory, rows: int, at: Affine | int = 0) -> Region:
    """Return `rows` fractals (rows x 256 elements) from fractal `at` on as vector repeats."""
    return buffer.region(at * AREA, (rows * AREA // LANES, LANES))


def add_mask(state: State, mask: Tile, fractals: int) -> None:
    """Emit scores in UB += mask / c in fp32, both (keys / 16, rows, 16)."""
    k = state.builder
    count = fractals * AREA
    wide = (state.mask, 0)
    scores = (state.wide, 0)
    k.each("vconv", count, wide, (mask, 0))
    # The scale is applied to all scores later: divide the mask by it.
    k.each("vaxpy", count, scores, scores, wide, scalar=1.0 / state.scale)


def drop_padding(state: State, rows: int, keys: int, ragged_keys: int) -> None:
    """Emit LEAST for the scores of padding: lanes from `ragged_keys` on of the last fractal."""
    # 4 keys in the last fractal: lanes 4 to 15 of every 16.
    fractal = ((1 << FRACTAL) - 1) >> ragged_keys << ragged_keys
    bits = sum(fractal << at for at in range(0, LANES, FRACTAL))
    last_column = repeats_of(state.wide, rows, (keys - 1) * rows)
    state.builder.vector("vdup", last_column, scalar=LEAST, mask=bits)


def compute_peaks(state: State, out: Tile, rows: int, keys: int, block: Affine) -> None:
    """Emit m' of the scores in UB, divided by STEP, and to `out` its high and low parts."""
    k = state.builder
    lanes_of_rows = flash_shape.row_lanes(rows * FRACTAL)
    best = (state.best, 0)
    remainder = (state.remainder, 0)
    fold_maxima(state, rows, keys)
    # Maxima in steps of 2048: the largest that fp16 holds is 65504 * 2048, about 2^27.
    k.each("vmuls", lanes_of_rows, best, best, scalar=1.0 / STEP)
    new_peak = (Tile(state.peak, block + 1), 0)
    if block == Affine():
        k.each("vmaxs", lanes_of_rows, new_peak, best, scalar=LOWEST)
    else:
        k.each("vmax", lanes_of_rows, new_peak, best, (Tile(state.peak, block), 0))
    high, low = (Tile(state.halves, Affine(half)) for half in (0, 1))
    k.each("vconv", lanes_of_rows, (high, 0), new_peak)
    k.each("vconv", lanes_of_rows, remainder, (high, 0))
    # m = high + low: high is m rounded to fp16, low what the rounding took away.
    k.each("vsub", lanes_of_rows, remainder, new_peak, remainder)
    k.each("vconv", lanes_of_rows, (low, 0), remainder)
    for half, number in enumerate((high, low)):
        to = out.region(half * rows * AREA, (rows * FRACTAL, FRACTAL))
        k.vector("vbrcb", to, number.region(0, rows * FRACTAL))


def fold_maxima(state: State, rows: int, keys: int) -> None:
    """Emit best (rows) = the maxima over keys: of 8 lanes at once, then by repeated halving."""
    k = state.builder
    # vcgmax leaves a maximum of 8 lanes: two for each fractal of 16 keys.
    maxima_per_row = 2 * keys
    repeats = 2 * rows * keys
    # 600 repeats where 255 fit an instruction: 3 instructions of 200.
    instructions = ceil_div(repeats, k.chip.max_repeat)
    repeats_per_instruction = ceil_div(repeats, instructions)
    for half in (0, 1):
        for at, size in tiles.segments(k, "part", repeats, repeats_per_instruction):
            source = state.wide.region(at * 128 + half * 8, (size, 8, 8), (128, FRACTAL, 1))
            k.vector("vcgmax", state.best.region((at + half * repeats) * 8, size * 8), source)
    # 5 maxima: the last 2 are folded into the first 2, 3 remain; then 2, then 1.
    while maxima_per_row > 1:
        folded = maxima_per_row // 2
        maxima_per_row -= folded
        folded_lanes = folded * rows * FRACTAL
        second_half = maxima_per_row * rows * FRACTAL
        k.each("vmax", folded_lanes, (state.best, 0), (state.best, 0), (state.best, second_half))


def compute_factor(state: State, rows: int, block: Affine) -> None:
    """Emit f of block `block`, one number per row; two blocks are in progress at a time."""
    k = state.builder
    count = flash_shape.row_lanes(rows * FRACTAL)
    factor = (Tile(state.factor, block), 0)
    old_peak, new_peak = ((Tile(state.peak, at), 0) for at in (block, block + 1))
    k.each("vsub", count, factor, old_peak, new_peak)
    k.each("vmuls", count, factor, factor, scalar=STEP * state.scale)
    k.each("vexp", count, factor, factor)


def exponentiate(state: State, out: Tile, fractals: int) -> None:
    """Emit p = exp(c x) of the fp16 numbers in `out`, in place."""
    k = state.builder
    count = fractals * AREA
    place = (out, 0)
    if state.scale != 1.0:
        k.each("vmuls", count, place, place, scalar=state.scale)
    k.each("vexp", count, place, place)


def rescale(state: State, out: Tile, rows: int, width: int, block: Affine) -> None:
    """Emit o = f o, from L0C to UB and back, with the factor of block `block`."""
    k = state.builder
    count = rows * FRACTAL
    all_sums = (0, width * rows * AREA)
    k.copy(state.wide.region(*all_sums), out.region(*all_sums))
    for at in (0, 8):
        # vbrcb writes 8 equal lanes: twice, for the 16 of a row.
        spread = state.work.region(at, (count, 8), (FRACTAL, 1))
        k.vector("vbrcb", spread, Tile(state.factor, block).region(0, count))
    multiply_columns(state, rows, width)
    k.copy(out.region(*all_sums), state.wide.region(*all_sums))


def multiply_columns(state: State, rows: int, width: int) -> None:
    """Emit wide *= the 16 lanes of each row in `work`, for `width` columns of fractals."""
    k = state.builder
    with tiles.repeat(k, "column", width) as e:
        column = repeats_of(state.wide, rows, e * rows)
        k.vector("vmul", column, column, repeats_of(state.work, rows))


def finish(state: State, sums: Tile, out: Tile, rows: int, width: int) -> None:
    """Emit out = o / l as fp16; `sums` are o, and l in the last of `width` columns of 16."""
    k = state.builder
    size = (width - 1) * rows * AREA
    all_sums = (0, width * rows * AREA)
    k.copy(state.wide.region(*all_sums), sums.region(*all_sums))
    # l stands in the last column of 16: multiply by 1 / l instead of dividing.
    k.vector("vrec", repeats_of(state.work, rows), repeats_of(state.wide, rows, (width - 1) * rows))
    multiply_columns(state, rows, width - 1)
    k.each("vconv", size, (out, 0), (state.wide, 0))
