"""Choose how a tandem is divided: estimate every plausible schedule, yield the best few kernels.

A tandem is a pointwise convolution and the depthwise one that reads it, in one kernel:

    otherwise      each of the two convolutions has its own schedule
    here           one schedule for both, as they share cores, L1, L0 and UB

The estimate is the time of the busiest pipe of a core, plus the work that overlaps with nothing:

    unit   = max(vector, cube, MTE1, MTE3)            a unit: some channel blocks of a band
    total  = max(GM traffic, units * unit)            whichever limits the core
             + weights to L0B, once for each change   they wait until the old ones are used
             + first rows + first weights + unit / 2  nothing can overlap with the very first half
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
"""Channel blocks of a unit that are tried."""
BANDS = (1, 2, 3, 4, 6, 8)
"""Numbers of bands that are tried."""
TILES = (16, 32, 64, 80)
"""Fractals of sums of a tile, about, that are tried: 64 fractals of fp32 are 64 KB of L0C."""
TIMED = 8
"""Schedules whose kernels are written."""
LINE = isa.FRACTAL * DTYPE_BYTES["fp16"]
"""Bytes of a pixel of a channel block."""
FRACTAL_BYTES = isa.FRACTAL * LINE
"""Bytes of 16 pixels of a channel block."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What a core does under a schedule.

    units           units of work: a group of channel blocks in one band of one image each
    row_loads       bands of all its images, for each of which rows of x are loaded to L1
    pixels_between  pixels of a unit's planes between the two convolutions
    pixels_out      pixels of a unit's planes of the result
    store_pieces    pieces in which a unit's result is stored if images are interleaved, else 0
    """

    units: int
    row_loads: int
    pixels_between: int
    pixels_out: int
    store_pieces: int


def tandem_launches(tandem: Tandem, chip: Chip) -> Iterator[isa.Launch]:
    """Yield the first `TIMED` kernels of the ranking that can be written.

    Raises `CapacityError` if a row does not fit L1, and `UnsupportedError` as `check_tandem` does.
    """
    check_tandem(tandem, chip)
    needed = f"for a tandem a row of {tandem.point.blocks[0]} channel blocks in L1"
    error_to_raise = errors.CapacityError(needed, f"{chip.buffers['L1']} bytes", "use two kernels")
    launch_count = 0
    for schedule in ranked(tandem, chip):
        try:
            yield tandem_launch(tandem, chip, schedule)
            launch_count += 1
        except errors.CapacityError as error:
            error_to_raise = error
        # the caller times all of these; each costs a simulation
        if launch_count == TIMED:
            return
    if not launch_count:
        raise error_to_raise


@lru_cache(64)
def ranked(tandem: Tandem, chip: Chip) -> tuple[TandemSchedule, ...]:
    """Return the schedules that seem to fit, in the order of their estimated cycles."""
    demands = [demand_of(e or epilogue.PLAIN, chip, SUMS) for _, e in tandem.halves]
    pointwise, depthwise = (demand for demand in demands if demand)
    cycles_of = {
        schedule: _estimate(tandem, chip, schedule, (pointwise, depthwise))
        for schedule in _schedules(tandem, chip)
    }
    return tuple(sorted(cycles_of, key=lambda schedule: cycles_of[schedule]))


def _schedules(tandem: Tandem, chip: Chip) -> Iterator[TandemSchedule]:
    """Yield all schedules that are tried."""
    shape = tandem.depth
    (oh, ow) = shape.out_hw
    channel_blocks = shape.blocks[1]
    # the mean of a channel needs all rows of an image on one core
    rows_to_divide = 1 if tandem.means else oh
    for images in tandem_shape.mixed_counts(shape):
        # an image with more pixels wastes next to nothing in its last tile: no need to interleave
        if images > 1 and images * oh * ow > LARGEST_TILE:
            continue
        totals = (channel_blocks, shape.n // images, rows_to_divide)
        for grid in _grids(totals, chip.core_count):
            core_blocks = isa.ceil_div(channel_blocks, grid[0])
            for blocks in BLOCKS:
                if core_blocks % blocks == 0:
                    yield from _divided(tandem.of(images), chip, grid, blocks)


def _divided(
    tandem: Tandem, chip: Chip, grid: tuple[int, int, int], blocks: int
) -> Iterator[TandemSchedule]:
    """Yield the schedules of a grid with `blocks` blocks per unit, with as few bands as fit L1.

    More bands than needed only compute more rows twice.
    """
    bands = next((b for b in BANDS if _fits(tandem, chip, grid, b, blocks)), 0)
    for sums in TILES if bands else ():
        tile = _tile(_work(tandem, grid, bands, blocks).pixels_out, sums, blocks)
        for stay in ("rows", "weights"):
            yield TandemSchedule(grid, bands, blocks, tile, stay, tandem.depth.mixed)


def _grids(totals: tuple[int, int, int], cores: int) -> Iterator[tuple[int, int, int]]:
    """Yield grids (cores along channel blocks, images and rows) in which no core's share is empty.

    10 blocks over 4 cores are shares of 3, 3, 3, 1; over 6 cores they would be 2, 2, 2, 2, 2, 0,
    which 5 cores do as quickly.
    """
    for channel_cores in range(1, min(totals[0], cores) + 1):
        for image_cores in range(1, min(totals[1], cores // channel_cores) + 1):
            free_cores = min(totals[2], cores // (channel_cores * image_cores))
            row_cores = _cores_in_use(totals[2], free_cores)
            if (
                _cores_in_use(totals[0], channel_cores) == channel_cores
                and _cores_in_use(totals[1], image_cores) == image_cores
            ):
                yield channel_cores, image_cores, row_cores


def _cores_in_use(total: int, cores: int) -> int:
    """Return how many cores get a share of `total` if all shares but the last are equal."""
    return isa.ceil_div(total, isa.ceil_div(total, cores))


def _tile(pixels: int, sums: int, blocks: int) -> int:
    """Return the fractals of pixels of a tile: equal tiles, about `sums` fractals in all blocks."""
    fractals = isa.ceil_div(pixels, isa.FRACTAL)
    return isa.ceil_div(fractals, isa.ceil_div(fractals, max(1, sums // blocks)))


def _work(tandem: Tandem, grid: tuple[int, int, int], bands: int, blocks: int) -> _Work:
    """Return what the core with the largest share does."""
    shape = tandem.depth
    m = tandem.depth.mixed
    core_blocks = isa.ceil_div(shape.blocks[1], grid[0])
    # images, rows and blocks of the core with the largest share
    images = isa.ceil_div(shape.n, grid[1])
    rows = isa.ceil_div(isa.ceil_div(shape.out_hw[0] // m, grid[2]), bands)
    # 8 output rows of a 3 x 3 window with a stride of 2 see 7 x 2 + 3 = 17 rows
    rows_seen = min(shape.h, (rows - 1) * shape.strides[0] + shape.reach[0])
    units = images * bands * (core_blocks // blocks)
    ow = shape.out_hw[1]
    store_pieces = m * rows if m > 1 else 0
    return _Work(units, images * bands, m * rows_seen * shape.w, m * rows * ow, store_pieces)


def _fits(tandem: Tandem, chip: Chip, grid: tuple[int, int, int], bands: int, blocks: int) -> bool:
    """Tell whether L1 holds a band's rows of x, two slots of planes and, for means, of results."""
    work = _work(tandem, grid, bands, blocks)
    pixels = (tandem.point.blocks[0] + 2 * blocks) * work.pixels_between
    pixels += 2 * blocks * work.pixels_out if tandem.means else 0
    # an eighth of L1 is left for weights
    return pixels * LINE <= chip.buffers["L1"] * 7 / 8


def _estimate(
    tandem: Tandem, chip: Chip, s: TandemSchedule, demands: tuple[Demand, Demand]
) -> float:
    """Estimate the cycles of the busiest core (by the formula in the module's docstring)."""
    work = _work(tandem.of(s.images), s.grid, s.bands, s.blocks)
    unit_cycles = _unit_cycles(tandem, chip, s, work, demands)
    input_blocks = tandem.point.blocks[0]
    # bytes per unit: pointwise weights, depthwise taps, and a fractal of bias for each
    weight_bytes = s.blocks * (input_blocks + tandem.depth.taps + 2) * FRACTAL_BYTES
    l1_to_l0b_cycles = weight_bytes / chip.path("L1", "L0B").rate_bytes_per_cycle
    gm_rate = chip.path("GM", "L1").rate_bytes_per_cycle
    rows_cycles = input_blocks * work.pixels_between * LINE / gm_rate
    # the resident operand is loaded once, the other one for each unit
    group_count = work.units // work.row_loads
    row_loads = work.row_loads if s.resident == "rows" else work.units
    weight_loads = work.units if s.resident == "rows" else group_count
    gm_cycles = row_loads * rows_cycles + weight_loads * weight_bytes / gm_rate
    cycles = max(gm_cycles, work.units * unit_cycles)
    # Weights of a unit go to L0B once those of the unit before are used up. The first half of the
    # first unit and the second half of the last one overlap with nothing: half a unit more.
    cycles += weight_loads * l1_to_l0b_cycles
    return cycles + rows_cycles + weight_bytes / gm_rate + unit_cycles / 2


def _unit_cycles(
    tandem: Tandem, chip: Chip, s: TandemSchedule, work: _Work, demands: tuple[Demand, Demand]
) -> float:
    """Return the cycles of a unit on its busiest pipe."""
    input_blocks = tandem.point.blocks[0]
    taps = tandem.depth.taps
    pixels = work.pixels_between, work.pixels_out
    fractals = [isa.ceil_div(count, isa.FRACTAL) for count in pixels]
    tiles = isa.ceil_div(fractals[1], s.tile)
    # vector unit: cycles per element, and start-up cycles of the instructions of every tile
    head_cycles = chip.vector_costs["default"].head_cycles
    vector_cycles = sum(
        count * isa.FRACTAL * s.blocks * demand.cycles
        + tiles * (demand.instructions + 1) * head_cycles
        for count, demand in zip(pixels, demands, strict=True)
    )
    # L0A has two slots; a tile of the depthwise half loads as many taps at once as a slot holds
    slot_fractals = chip.buffers["L0A"] // (2 * FRACTAL_BYTES) - s.tile // 2
    loads = tiles * (1 + s.blocks * isa.ceil_div(taps, max(1, slot_fractals // s.tile)))
    # cube: one cycle per product of fractals; sums over input blocks or taps, and a bias
    cube_cycles = s.blocks * (fractals[0] * (input_blocks + 1) + fractals[1] * (taps + 1))
    cube_cycles += (loads + 2 * tiles) * chip.cube_head_cycles
    # MTE1 loads L0A: pointwise pixels are loaded once for all blocks, depthwise ones per block
    l1_to_l0a = chip.path("L1", "L0A")
    loaded_fractals = fractals[0] * input_blocks + s.blocks * fractals[1] * taps
    mte1_cycles = loaded_fractals * FRACTAL_BYTES / l1_to_l0a.rate_bytes_per_cycle
    mte1_cycles += loads * l1_to_l0a.startup_cycles
    # MTE3 copies from UB: planes between the two halves to L1, results to GM
    ub_to_gm = chip.path("UB", "GM")
    mte3_cycles = s.blocks * LINE * pixels[0] / chip.path("UB", "L1").rate_bytes_per_cycle
    mte3_cycles += s.blocks * LINE * pixels[1] / ub_to_gm.rate_bytes_per_cycle
    mte3_cycles += work.store_pieces * ub_to_gm.startup_cycles
    if tandem.means:  # what leaves UB goes to L1, too, and is summed
        summed = s.blocks * fractals[1]
        cube_cycles += summed
        mte1_cycles += summed * FRACTAL_BYTES / chip.path("L1", "L0B").rate_bytes_per_cycle
        mte3_cycles += summed * FRACTAL_BYTES / chip.path("UB", "L1").rate_bytes_per_cycle
    return max(vector_cycles, cube_cycles, mte1_cycles, mte3_cycles)
