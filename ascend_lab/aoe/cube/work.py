"""What one core does under every tiling of a table, as arrays: sizes, trip counts, load costs.

The core is one that owns as much as any. Its tiles of pixels (or rows of A) are listed one after
another in `Sides`; `first` is where a tiling's list begins.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ascend_lab.aoe.cube.conv_space import seen_as, shares_of
from ascend_lab.aoe.cube.space import Array, Columns, Floats, Mask, area_of, same_rows, up, uses
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL
from ascend_lab.operators.kernels.conv_shape import Bundles, ConvShape, bundles_of
from ascend_lab.operators.kernels.conv_windows import tiles_per_image
from ascend_lab.operators.kernels.gemm_schedule import GemmShape
from ascend_lab.operators.kernels.tiles import chunks

_Record = TypeVar("_Record")


def rows_of(record: _Record, index: Array) -> _Record:
    """Return a record's entries of some tilings: every array at `index`, all else as it is."""
    assert is_dataclass(record) and not isinstance(record, type)
    found: dict[str, Any] = {}
    for f in fields(record):
        value = getattr(record, f.name)
        if isinstance(value, np.ndarray):
            found[f.name] = value[index]
        elif isinstance(value, CoreWork | Load):
            found[f.name] = rows_of(value, index)
    return replace(record, **found)


@dataclass(frozen=True, slots=True)
class Sides:
    """Tiles along m, lists of many tilings end to end: fractals, pixels, bytes a unit of depth.

    `runs` are the stretches of neighbouring pixels in memory: each is a copy of its own.
    """

    fractals: Array
    pixels: Array
    unit_bytes: Array
    runs: Array


@dataclass(frozen=True, slots=True)
class Load:
    """Loads of A or B from GM: cycles per byte, latency, and the bytes all cores fetch at least."""

    cycles_per_byte: Floats
    latency_cycles: Array
    fetched_bytes: Array


@dataclass(frozen=True, slots=True)
class CoreWork:
    """One core's work, one entry per tiling.

    Tiles along m and n, `bundles` times; depth in units of `taps` fractals of K, `stage` units a
    stage; `hold_a` / `hold_b`: what an outer loop keeps in L1 (`hold_all`: B for all m tiles, in
    order mn); `outer_n`: order nm. `n_own` blocks a core, in tiles of `n`, the last `n_last`.
    `ragged`: cores begin at various places of several images.
    """

    rows: Array
    cores: Array
    bundles: Array
    first: Array
    m_tiles: Array
    m: Array
    m_sum: Array
    pixel_sum: Array
    unit_sum: Array
    n_tiles: Array
    n: Array
    n_last: Array
    n_own: Array
    units: Array
    stage: Array
    k: Array
    outer_n: Mask
    hold_a: Mask
    hold_b: Mask
    hold_all: Mask
    by_a: Mask
    by_b: Mask
    a_l1: Array
    b_l1: Array
    a_l0: Array
    b_l0: Array
    ragged: Mask


@dataclass(frozen=True, slots=True)
class CubeWork:
    """The work of all tilings of a table, and what they share."""

    chip: Chip
    dtype: str
    taps: int
    is_conv: bool
    sides: Sides
    work: CoreWork
    a: Load
    b: Load
    out_pixels: int
    out_blocks: int

    @property
    def area_bytes(self) -> int:
        """Bytes of a fractal of A or B."""
        return area_of(self.dtype)


def load_of(chip: Chip, reads: Array, once: Array | int, cores: Array) -> Load:
    """Return the cost of `reads` bytes, `once` different ones: as in the simulator."""
    path = chip.path("GM", "L1")
    n = cores.astype(np.float64)
    fresh = np.minimum(1.0, once / np.maximum(reads, 1))
    own = 1.0 / path.rate_bytes_per_cycle
    hit = np.maximum(own, n * chip.clock_hz / chip.l2.rate_bytes_per_s)
    memory = np.maximum(own, n * chip.clock_hz / chip.device_memory.rate_bytes_per_s)
    extra = chip.device_memory.latency_cycles - chip.l2.latency_cycles
    latency = path.latency_cycles + chip.l2.latency_cycles + fresh * extra
    least = np.minimum(reads, once)
    per_byte = fresh * memory + (1.0 - fresh) * hit
    return Load(per_byte, np.rint(latency).astype(np.int64), least.astype(np.int64))


def gemm_work(shape: GemmShape, chip: Chip, t: Columns, warm: Collection[str] = ()) -> CubeWork:
    """Return the work of every tiling of a product's table; L2 holds the sides `warm`."""
    m1, k1, n1 = shape.fractals
    area = area_of(shape.dtype)
    cores = t["rows"] * t["cols"]
    m_all = up(m1, t["m"])
    n_all = up(n1, t["n"])
    m_own = np.minimum(up(m_all, t["rows"]) * t["m"], m1)
    n_own = np.minimum(up(n_all, t["cols"]) * t["n"], n1)
    m_tiles = up(m_own, t["m"])
    n_tiles = up(n_own, t["n"])
    keep_a = uses(t, "keep", "a")
    keep_b = uses(t, "keep", "b")
    sides, first = _listed(m_own, t["m"], area)
    reads_a = m1 * k1 * area * np.where(keep_a, t["cols"], n_all)
    reads_b = n1 * k1 * area * np.where(keep_b, t["rows"], m_all)
    no = np.zeros(len(cores), bool)
    work = CoreWork(
        t["rows"],
        cores,
        np.ones_like(cores),
        first,
        m_tiles,
        t["m"],
        m_own,
        m_own * FRACTAL,
        m_own * area,
        n_tiles,
        t["n"],
        n_own - (n_tiles - 1) * t["n"],
        n_own,
        np.full_like(cores, k1),
        np.minimum(t["k"] * t["step"], k1),
        t["k"],
        t["order"] == 1,
        keep_a,
        keep_b,
        no,
        uses(t, "bypass", "a"),
        uses(t, "bypass", "b"),
        t["a_l1"],
        t["b_l1"],
        t["a_l0"],
        t["b_l0"],
        no,
    )
    a = load_of(chip, reads_a, 0 if "a" in warm else m1 * k1 * area, cores)
    b = load_of(chip, reads_b, 0 if "b" in warm else n1 * k1 * area, cores)
    return CubeWork(chip, shape.dtype, 1, False, sides, work, a, b, m1 * FRACTAL, n1)


def _listed(own: Array, tile: Array, area: int) -> tuple[Sides, Array]:
    """List the tiles of every (own, tile) pair: full ones, then the tail."""
    (owns, tiles), _, which = same_rows([own, tile])
    counts = up(owns, tiles).astype(np.intp)
    starts = np.cumsum(counts) - counts
    sizes = np.repeat(tiles, counts)
    sizes[starts + counts - 1] = owns - (counts - 1) * tiles
    return Sides(sizes, sizes * FRACTAL, sizes * area, np.ones_like(sizes)), starts[which]


def conv_work(shape: ConvShape, chip: Chip, t: Columns, warm: Collection[str] = ()) -> CubeWork:
    """Return the work of every tiling of a convolution's table; L2 holds the sides `warm`."""
    bundle = bundles_of(shape)
    pixel = shape.pixel_bytes
    area = area_of(shape.dtype)
    shares, inside = shares_of(bundle, t["cols"])
    # the first share has no bundle of another size, unless it is the only one
    uneven = (bundle.c1, bundle.n1) != (bundle.last_c1, bundle.last_n1) and bundle.count > 1
    alone = max(1, bundle.count - uneven)
    bundles = np.where(shares > 1, up(bundle.count, shares), alone)
    n_all = up(bundle.n1, t["n"])
    n_own = np.minimum(up(n_all, inside) * t["n"], bundle.n1)
    n_tiles = up(n_own, t["n"])
    cores = t["rows"] * _columns_used(bundle, t["n"], shares, inside)
    inside = up(n_all, up(n_all, inside))
    sides, m = _pixels(shape, t)
    once = t["stage"] >= bundle.c1
    nm = (t["order"] == 1) & (m["tiles"] > 1)
    hold_a = once & ~nm
    hold_all = once & ~nm & (n_tiles == 1)
    c1 = (bundle.count - 1) * bundle.c1 + bundle.last_c1
    reads_x = m["read"] * c1 * pixel * np.where(once & (t["order"] == 0), inside, n_all)
    weights = ((bundle.count - 1) * bundle.c1 * bundle.n1 + bundle.last_c1 * bundle.last_n1) * (
        shape.taps * area
    )
    held_w = hold_all | (once & nm)
    reads_w = weights * np.where(held_w, t["rows"], m["all"])
    no = np.zeros(len(cores), bool)
    work = CoreWork(
        t["rows"],
        cores,
        bundles,
        m["first"],
        m["tiles"],
        t["m"],
        m["fractals"],
        m["pixels"],
        m["windows"] * pixel,
        n_tiles,
        t["n"],
        n_own - (n_tiles - 1) * t["n"],
        n_own,
        np.full_like(cores, bundle.c1),
        np.minimum(t["stage"], bundle.c1),
        t["k"],
        nm,
        hold_a,
        hold_all | (once & nm),
        hold_all,
        no,
        no,
        t["a_l1"],
        t["b_l1"],
        t["a_l0"],
        t["b_l0"],
        m["ragged"] > 0,
    )
    x = load_of(chip, reads_x, 0 if "a" in warm else m["touched"] * c1 * pixel, cores)
    w = load_of(chip, reads_w, 0 if "b" in warm else weights, cores)
    oh, ow = shape.out_hw
    pixels = shape.n * oh * ow
    blocks = (bundle.count - 1) * bundle.n1 + bundle.last_n1
    return CubeWork(chip, shape.dtype, shape.taps, True, sides, work, x, w, pixels, blocks)


def _columns_used(bundle: Bundles, n: Array, shares: Array, inside: Array) -> Array:
    """Return the columns of cores with work; a last share of a smaller bundle may use less."""
    used, last = (up(up(b, n), up(up(b, n), inside)) for b in (bundle.n1, bundle.last_n1))
    each = up(bundle.count, shares)
    smaller = (shares > 1) & (bundle.count - (shares - 1) * each == 1)
    return (shares - 1) * used + np.where(smaller, last, used)


PIXEL_COLUMNS = (
    "first",
    "tiles",
    "all",
    "read",
    "touched",
    "ragged",
    "fractals",
    "pixels",
    "windows",
)
"""Of the tiles of one row of cores: where its list begins, their number, and sums."""


def _pixels(shape: ConvShape, t: Columns) -> tuple[Sides, Columns]:
    """List the tiles of one row of cores, that with most to load, for each way to divide pixels."""
    ways, _, which = same_rows([t["window"], t["m"], t["rows"]])
    table: list[list[int]] = []
    lists: list[list[Array]] = []
    length = 0
    images: dict[tuple[int, int], tuple[Array, Array, Array, Array, int]] = {}
    for window, m, rows in np.stack(ways, axis=1).tolist():
        own, strip = seen_as(shape, window)
        if (window, m) not in images:
            images[window, m] = image_tiles(own, m, strip=strip)
        *listed, touched = images[window, m]
        every = [np.tile(column, own.n) for column in listed]
        sizes = np.array(chunks(len(every[0]), 1, rows), np.intp)
        ends: Array = np.cumsum(sizes)
        loads: Array = np.add.reduceat(every[2], ends - sizes)
        best = int(np.argmax(loads))
        part = slice(int(ends[best] - sizes[best]), int(ends[best]))
        lists.append([column[part] for column in every])
        # cores that begin at various places of various images: what all of them touch is counted
        # by the simulator as if their places were evenly spaced, which may be less
        each = len(listed[0])
        ragged = own.n > 1 and each % sizes[0] > 0 and sizes[0] % each > 0
        once = listed[2].max() if ragged else touched * own.n
        values = [length, sizes[best], len(every[0]), every[2].sum(), once, ragged]
        table.append([*values, every[0][part].sum(), every[1][part].sum(), loads[best]])
        length += int(sizes[best])
    fractals, pixels, windows, runs = map(np.concatenate, zip(*lists, strict=True))
    columns = np.array(table, np.int64)[which].T
    found = dict(zip(PIXEL_COLUMNS, columns, strict=True))
    return Sides(fractals, pixels, windows * shape.pixel_bytes, runs), found


def image_tiles(shape: ConvShape, m: int, *, strip: bool) -> tuple[Array, Array, Array, Array, int]:
    """Return per tile its fractals, pixels, image pixels loaded and runs; and pixels of all."""
    (oh, ow) = shape.out_hw
    side = m * FRACTAL
    t = np.arange(tiles_per_image(shape, m, strip=strip))
    if strip:
        each = -(-ow // side)
        row = t // each
        at = t % each * side
        pixels = np.minimum(side, ow - at)
        rows = (row, row)
        columns = (at, at + pixels - 1)
    else:
        pixels = np.minimum(side, oh * ow - t * side)
        rows = (t * side // ow, (t * side + pixels - 1) // ow)
        columns = (np.zeros_like(t), np.full_like(t, ow - 1))
    mixed = shape.mixed
    down = spans(shape, 0, *(row // mixed for row in rows))
    across = spans(shape, 1, *columns)
    touched = _covered(*down) * _covered(*across) * mixed
    runs = rows[1] - rows[0] + 1 if mixed > 1 else np.ones_like(t)
    return up(pixels, FRACTAL), pixels, down[1] * across[1] * mixed, runs, touched


def spans(shape: ConvShape, axis: int, first: Array, last: Array) -> tuple[Array, Array]:
    """Return (first, count) of what outputs first..last look at: `window_of` on arrays."""
    size = (shape.h, shape.w)[axis]
    stride = shape.strides[axis]
    low = first * stride - shape.pads[2 * axis]
    high = last * stride - shape.pads[2 * axis] + shape.reach[axis] - 1
    start = low - np.maximum(0, up(low - size + 1, stride)) * stride
    begin = np.maximum(start, 0)
    end = np.maximum(np.minimum(high, size - 1), begin)
    return begin, end - begin + 1


def _covered(first: Array, count: Array) -> int:
    """Count the places that spans cover together."""
    change = np.zeros(int((first + count).max()) + 1, np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, first + count, -1)
    return int((np.cumsum(change) > 0).sum())
