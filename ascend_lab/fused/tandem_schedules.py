"""How a tandem is divided: every plausible way estimated, the best few written, to be timed.

The estimate is the time of the busiest pipe of a core, and what it waits for at the beginning:

    cycles = max over pipes (bytes / rate, products, vector work + heads) + first tile
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ascend_lab import errors
from ascend_lab.fused import tandem_shape
from ascend_lab.fused.tandem_kernel import tandem_launch
from ascend_lab.fused.tandem_shape import SUMS, Tandem, TandemSchedule, check_tandem
from ascend_lab.machine import isa
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.operators.kernels import epilogue
from ascend_lab.operators.kernels.conv_shape import LARGEST_TILE
from ascend_lab.operators.kernels.epilogue_plan import Demand, demand_of

BLOCKS = (1, 2, 3, 4, 5, 6, 8)
BANDS = (1, 2, 3, 4, 6, 8)
TILES = (16, 32, 64, 80)
"""Fractals of sums of a tile, about."""
TIMED = 8
"""Candidates that are written."""
LINE = isa.FRACTAL * DTYPE_BYTES["fp16"]
"""Bytes of a pixel of a channel block."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What a core does under a schedule: units, and of each the pixels before and after.

    They leave in so many `pieces`.
    """

    units: int
    loads: int
    before: int
    after: int
    pieces: int


def tandem_launches(tandem: Tandem, chip: Chip) -> Iterator[isa.Launch]:
    """Yield the kernels that the estimate puts first, as far as they can be written.

    Raises `CapacityError` if a row does not fit L1, `UnsupportedError` as `check_tandem`.
    """
    check_tandem(tandem, chip)
    wanted = f"for a tandem a row of {tandem.point.blocks[0]} channel blocks in L1"
    why = errors.CapacityError(wanted, f"{chip.buffers['L1']} bytes", "use two kernels")
    count = 0
    for schedule in ranked(tandem, chip):
        try:
            yield tandem_launch(tandem, chip, schedule)
            count += 1
        except errors.CapacityError as error:
            why = error
        if count == TIMED:
            return
    if not count:
        raise why


@lru_cache(64)
def ranked(tandem: Tandem, chip: Chip) -> tuple[TandemSchedule, ...]:
    """Return schedules that seem to fit, the one of least estimated cycles first."""
    demands = [demand_of(e or epilogue.PLAIN, chip, SUMS) for _, e in tandem.halves]
    one, two = (d for d in demands if d)
    every = {s: _estimate(tandem, chip, s, (one, two)) for s in _schedules(tandem, chip)}
    return tuple(sorted(every, key=lambda s: every[s]))


def _schedules(tandem: Tandem, chip: Chip) -> Iterator[TandemSchedule]:
    shape = tandem.depth
    (oh, ow) = shape.out_hw
    c1 = shape.blocks[1]
    for images in (m for m in tandem_shape.ways_of(shape) if m == 1 or m * oh * ow <= LARGEST_TILE):
        for grid in _grids((c1, shape.n // images, 1 if tandem.means else oh), chip.core_count):
            own = isa.up(c1, grid[0])
            for blocks in (b for b in BLOCKS if own % b == 0):
                yield from _divided(tandem.of(images), chip, grid, blocks)


def _divided(
    tandem: Tandem, chip: Chip, grid: tuple[int, int, int], blocks: int
) -> Iterator[TandemSchedule]:
    """Yield schedules of a grid and so many blocks at once, in as few bands as fit."""
    bands = next((b for b in BANDS if _fits(tandem, chip, grid, b, blocks)), 0)
    for sums in TILES if bands else ():
        tile = _tile(_work(tandem, grid, bands, blocks).after, sums, blocks)
        for stay in ("rows", "weights"):
            yield TandemSchedule(grid, bands, blocks, tile, stay, tandem.depth.mixed)


def _grids(totals: tuple[int, int, int], cores: int) -> Iterator[tuple[int, int, int]]:
    """Yield divisions of channel blocks, images and rows over the cores, none with idle shares."""
    for c in range(1, min(totals[0], cores) + 1):
        for n in range(1, min(totals[1], cores // c) + 1):
            rows = isa.up(totals[2], isa.up(totals[2], min(totals[2], cores // (c * n))))
            if all(isa.up(t, isa.up(t, g)) == g for t, g in zip(totals, (c, n), strict=False)):
                yield c, n, rows


def _tile(pixels: int, sums: int, blocks: int) -> int:
    """Return fractals of pixels of a tile: even ones, about `sums` fractals with all blocks."""
    fractals = isa.up(pixels, isa.FRACTAL)
    return isa.up(fractals, isa.up(fractals, max(1, sums // blocks)))


def _work(tandem: Tandem, grid: tuple[int, int, int], bands: int, blocks: int) -> _Work:
    shape = tandem.depth
    m = tandem.depth.mixed
    own = isa.up(shape.blocks[1], grid[0])
    images = isa.up(shape.n, grid[1])
    rows = isa.up(isa.up(shape.out_hw[0] // m, grid[2]), bands)
    seen = min(shape.h, (rows - 1) * shape.strides[0] + shape.reach[0])
    units = images * bands * (own // blocks)
    ow = shape.out_hw[1]
    pieces = m * rows if m > 1 else 0
    return _Work(units, images * bands, m * seen * shape.w, m * rows * ow, pieces)


def _fits(tandem: Tandem, chip: Chip, grid: tuple[int, int, int], bands: int, blocks: int) -> bool:
    """Tell whether a band's rows, two slots of planes, and of what is summed, fit L1."""
    work = _work(tandem, grid, bands, blocks)
    lines = (tandem.point.blocks[0] + 2 * blocks) * work.before
    lines += 2 * blocks * work.after if tandem.means else 0
    return lines * LINE <= chip.buffers["L1"] * 7 / 8


def _estimate(
    tandem: Tandem, chip: Chip, s: TandemSchedule, demands: tuple[Demand, Demand]
) -> float:
    """Return about the cycles of the busiest core."""
    work = _work(tandem.of(s.images), s.grid, s.bands, s.blocks)
    c1 = tandem.point.blocks[0]
    taps = tandem.depth.taps
    pixels = work.before, work.after
    fractals = [isa.up(p, isa.FRACTAL) for p in pixels]
    turns = isa.up(fractals[1], s.tile)
    head = chip.vector_costs["default"].head_cycles
    vector = sum(
        p * isa.FRACTAL * s.blocks * d.cycles + turns * (d.instructions + 1) * head
        for p, d in zip(pixels, demands, strict=True)
    )
    area = isa.FRACTAL * LINE
    room = chip.buffers["L0A"] // (2 * isa.FRACTAL * LINE) - s.tile // 2
    loads = turns * (1 + s.blocks * isa.up(taps, max(1, room // s.tile)))
    cube = s.blocks * (fractals[0] * (c1 + 1) + fractals[1] * (taps + 1))
    cube += (loads + 2 * turns) * chip.cube_head_cycles
    weights = s.blocks * (c1 + taps + 2) * area
    near = weights / chip.path("L1", "L0B").rate_bytes_per_cycle
    left = chip.path("L1", "L0A")
    fed = fractals[0] * c1 + s.blocks * fractals[1] * taps
    mte1 = fed * area / left.rate_bytes_per_cycle + loads * left.startup_cycles
    mte3 = s.blocks * LINE * pixels[0] / chip.path("UB", "L1").rate_bytes_per_cycle
    out = chip.path("UB", "GM")
    mte3 += s.blocks * LINE * pixels[1] / out.rate_bytes_per_cycle
    mte3 += work.pieces * out.startup_cycles
    if tandem.means:  # what leaves UB goes to L1, too, and is summed
        summed = s.blocks * fractals[1]
        cube += summed
        mte1 += summed * area / chip.path("L1", "L0B").rate_bytes_per_cycle
        mte3 += summed * area / chip.path("UB", "L1").rate_bytes_per_cycle
    rate = chip.path("GM", "L1").rate_bytes_per_cycle
    rows = c1 * pixels[0] * LINE / rate
    groups = work.units // work.loads
    times = (work.loads, work.units) if s.stay == "rows" else (work.units, groups)
    memory = times[0] * rows + times[1] * weights / rate
    busy = max(vector, cube, mte1, mte3)
    # weights of a unit come to L0B when those of the one before are done with; the first half of
    # the first unit and the second half of the last one stand alone
    return max(memory, work.units * busy) + times[1] * near + rows + weights / rate + busy / 2
