"""The program of a tandem: a pointwise convolution and the depthwise one that reads it.

The tensor between the two, the widest of an inverted residual block, stays in L1. A channel of the
depthwise convolution reads one channel of the pointwise one, so that a core that owns a block of
channels needs no other core:

    unfused    GM -x-> L1 -> cube -> epilogue -> UB -> GM    then another kernel:
               GM -> L1 -> cube -> epilogue -> UB -> GM
    fused      GM -x-> L1 -> cube -> epilogue -> UB -> L1 -> cube -> epilogue -> UB -> GM
                   all channels    pointwise       some channel blocks    depthwise

The arrow "-x->" carries x, the input of the pointwise convolution.

The cores divide channel blocks, images and output rows. At the border of two cores' rows a 3 x 3
window reads a row of the other core: such rows are computed twice.

A unit of work is some channel blocks in a band (a range of output rows) of an image. Each of the
two convolutions is called a half. Tile by tile, the depthwise half of a unit alternates with the
pointwise half of the next unit: one has more work for the cube, the other for the vector unit. So
the tensor between them has two slots in L1, each for the planes (the pixels of a channel block) of
one unit. Either the rows of an image stay in L1 for all channel blocks, or the weights of channel
blocks stay for all images.

With means (see `means`) the kernel also computes the mean of each channel of the result, for the
squeeze and excitation that follows.

Source: L1 fusion of the vendor's operator library; Sandler et al., MobileNetV2 (2018), section 5.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

from ascend_lab.fused import means as channel_means, tandem_shape
from ascend_lab.fused.tandem_half import Half
from ascend_lab.fused.tandem_shape import AREA, SUMS, Band, Tandem, TandemSchedule, bands_of
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import FRACTAL, Affine, KernelBuilder, Launch, Program, Tile, ceil_div
from ascend_lab.operators.kernels import conv_windows
from ascend_lab.operators.kernels.conv_tiles import load_l0b_weights
from ascend_lab.operators.kernels.epilogue_emit import Channels, Memory, drain, held_channels
from ascend_lab.operators.kernels.planes import PlaneShare, plane_launch
from ascend_lab.operators.kernels.tiles import Area, chunks, repeat, segments, sum_queue

FRACTAL_BYTES = AREA * DTYPE_BYTES["fp16"]
"""Bytes of a fractal of an operand: 16 x 16 x 2 = 512."""


def tandem_launch(tandem: Tandem, chip: Chip, schedule: TandemSchedule) -> Launch:
    """Return the kernel as a launch; raise `CapacityError` if a band does not fit L1.

    Tensors are x, weight, depth_weight and y in NC1HWC0, planes without gaps, and the epilogues'
    operands.
    """
    tandem_shape.check_tandem(tandem, chip)
    tandem_shape.check_division(tandem, chip, schedule)
    shape = tandem.depth
    interleaved = tandem.of(schedule.images)
    channel_cores, image_cores, row_cores = schedule.grid
    shares = (
        chunks(shape.blocks[1], 1, channel_cores),
        chunks(shape.n // schedule.images, 1, image_cores),
        chunks(shape.out_hw[0], 1, row_cores),
    )

    def program(share: PlaneShare) -> Program:
        return _TandemWriter(interleaved, chip, schedule, share).program()

    name = f"tandem_{shape.n}x{shape.c}x{shape.h}x{shape.w}"
    return plane_launch(name, shares, program)


@dataclass(frozen=True, slots=True)
class _TilePair:
    """A tile of the depthwise half, and the pointwise tile with the same number.

    number              of the tile in its band
    pixel, window       its first output pixel and the rows it reads, in the first pass of a loop
    input_row_shift     how many input rows further down the tile of this pass reads
    output_row_shift    how many output rows further down it writes
    has_pointwise       whether there is such a pointwise tile: the depthwise half may have more
    is_last             it is the last tile of the band
    """

    number: Affine
    pixel: int
    window: conv_windows.Window
    input_row_shift: Affine
    output_row_shift: Affine
    has_pointwise: bool
    is_last: bool


# -- both halves on a core ------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Unit:
    """A unit of work: some channel blocks in a band of an image.

    core_block     the first channel block of the core; `block` counts from there
    number         of the unit among all of the core
    channels       numbers per channel (scales, biases) in UB, if they stay there for all units
    x              rows in L1, if they stay for several units
    weights_l0b    weights of one half, if they stay
    """

    band: Band
    core_block: Affine
    block: Affine
    image: Affine
    number: Affine
    channels: tuple[Channels | None, Channels | None]
    x: Tile | None = None
    weights_l0b: Tile | None = None


class _TandemWriter:
    """Writes the program of all cores whose shares have the same size."""

    def __init__(
        self, tandem: Tandem, chip: Chip, schedule: TandemSchedule, share: PlaneShare
    ) -> None:
        """Declare tensors and allocate queues.

        The order of allocations matters: later ones take the room that is left.
        """
        self.tandem = tandem
        self.schedule = schedule
        self.share = share
        k = self.k = KernelBuilder("tandem", chip)
        count = share.channels[0]
        (c1, n1) = tandem.point.blocks
        # all units of a core are equal: 6 blocks with 4 at once become 3 and 3
        self.blocks = max(b for b in range(1, schedule.blocks + 1) if count % b == 0)
        self.bands = bands_of(tandem, share.rows, schedule)
        shape = tandem.depth
        # slots hold the longest band
        plane_size = max(band.pixels for band in self.bands) * FRACTAL
        # fractals of a tile of the pointwise half, of the depthwise half
        tile_fractals = max(band.tile for band in self.bands), schedule.tile
        self.plane_elements = math.prod(shape.out_hw) // shape.mixed
        self.mean_sums = self._new_mean_sums(max(tile_fractals)) if tandem.means else None
        self.x = k.tensor("x", "fp16", shape.images * c1 * tandem.point.plane)
        self.y = k.tensor("y", "fp16", shape.images * n1 * self.plane_elements * FRACTAL)
        planes_size = self.blocks * plane_size
        self.planes_queue = k.queue("planes", "L1", "fp16", planes_size, src="MTE3", dst="MTE1")
        block_counts = (count, self.blocks)
        # The depthwise half takes at most half of UB. The pointwise half, whose tiles are at least
        # as large, takes the rest.
        pointwise_job, depthwise_job = tandem.halves
        self.depthwise_half = Half(
            k, depthwise_job, block_counts, tile_fractals[1], self.y.elements, 2
        )
        self.pointwise_half = Half(
            k, pointwise_job, block_counts, tile_fractals[0], self.y.elements, 1
        )
        self._allocate_weights(chip)
        # if there is room, a second slot for rows of x, so that the next rows are loaded early
        two_slots_bytes = 2 * c1 * plane_size * DTYPE_BYTES["fp16"]
        slots = 2 if two_slots_bytes <= chip.buffers["L1"] - k.used_bytes("L1") else 1
        self.rows_queue = k.queue(
            "x_l1", "L1", "fp16", c1 * plane_size, src="MTE2", dst="MTE1", depth=slots
        )
        self._allocate_l0(chip, tile_fractals)

    def _new_mean_sums(self, tile_fractals: int) -> channel_means.Means:
        """Allocate what the means of channels need; the largest tile has `tile_fractals`."""
        units = self.share.channels[0] // self.blocks * self.share.images[0]
        return channel_means.Means(
            self.k, self.tandem, self.bands, units, self.blocks, tile_fractals
        )

    def _allocate_weights(self, chip: Chip) -> None:
        """Allocate weights in L1, a queue that both halves use, and in L0B, a queue for each."""
        k = self.k
        halves = (self.pointwise_half, self.depthwise_half)
        unit_weights = max(half.weight_fractals for half in halves) * AREA
        self.weights_queue = k.queue("w_l1", "L1", "fp16", unit_weights, src="MTE2", dst="MTE1")
        for half, slots in zip(halves, self._weight_slots(chip), strict=True):
            size = half.weight_fractals * AREA
            name = f"{half.prefix}w_l0"
            half.weights_l0b = k.queue(name, "L0B", "fp16", size, src="MTE1", dst="M", depth=slots)

    def _allocate_l0(self, chip: Chip, tile_fractals: tuple[int, int]) -> None:
        """Allocate L0A, with the ones by which a bias is multiplied, and L0C."""
        k = self.k
        halves = (self.pointwise_half, self.depthwise_half)
        cube_adds_bias = any(half.bias for half in halves)
        # the means of single images need ones, too: both use the same fractals
        shares_ones = self.mean_sums and self.tandem.depth.mixed == 1
        self.ones = self.mean_sums.image_rows_l0 if self.mean_sums and shares_ones else None
        if cube_adds_bias and not self.ones:
            self.ones = k.buffer("ones_l0", "L0A", "fp16", max(tile_fractals) * AREA)
        # two slots; a slot needs no more than a tile in the full depth of its sum
        slot_bytes = (chip.buffers["L0A"] - k.used_bytes("L0A")) // 2
        free_fractals = slot_bytes // FRACTAL_BYTES
        full_depths = [t * half.sum_depth for t, half in zip(tile_fractals, halves, strict=True)]
        slot_fractals = max(
            *tile_fractals, *(min(full_depth, free_fractals) for full_depth in full_depths)
        )
        self.l0a_queue = k.queue("x_l0", "L0A", "fp16", slot_fractals * AREA, src="MTE1", dst="M")
        # two slots of sums for each half, so that neither waits for the other's drain
        four_slots_bytes = 4 * AREA * DTYPE_BYTES[SUMS] * max(tile_fractals) * self.blocks
        # with 0, `sum_queue` decides
        slots = 4 if four_slots_bytes <= chip.buffers["L0C"] - k.used_bytes("L0C") else 0
        self.sums_queue = sum_queue(k, "sums", SUMS, max(tile_fractals), self.blocks, slots)

    def _weight_slots(self, chip: Chip) -> tuple[int, int]:
        """Return the slots in L0B for weights of each half: two if room and event ids suffice."""
        pointwise_fractals = self.pointwise_half.weight_fractals
        depthwise_fractals = self.depthwise_half.weight_fractals
        free_fractals = (chip.buffers["L0B"] - self.k.used_bytes("L0B")) // FRACTAL_BYTES
        # MTE1 and the cube signal each slot with an event; other queues between them take 2 or 4
        free_events = chip.event_ids - (4 if self.mean_sums else 2)
        for slots in ((2, 2), (2, 1)):
            fractals = slots[0] * pointwise_fractals + slots[1] * depthwise_fractals
            if fractals <= free_fractals and sum(slots) <= free_events:
                return slots
        return 1, 1

    def program(self) -> Program:
        """Return the program: band by band, all units of a core in a pipeline."""
        k = self.k
        share = self.share
        (channel_blocks, c_pitch, c_count) = share.channels
        (images, n_pitch, n_count) = share.images
        core_block = k.param("channel", c_count) * c_pitch
        first_image = k.param("batch", n_count) * n_pitch
        self._load_bias(core_block)
        core_blocks = (core_block, channel_blocks)
        with (
            held_channels(
                self.pointwise_half.finish, core_blocks, Affine(), None
            ) as point_channels,
            held_channels(
                self.depthwise_half.finish, core_blocks, Affine(), None
            ) as depth_channels,
        ):
            channels = (point_channels, depth_channels)
            if self.mean_sums:
                self.mean_sums.begin()
            groups = channel_blocks // self.blocks
            for index, band in enumerate(self.bands):
                first_unit = Affine(index * groups * images)
                unit = _Unit(band, core_block, Affine(), first_image, first_unit, channels)
                _Pipeline(self, unit, images).write()
            if self.mean_sums:
                # means are summed one unit late: the last unit is still missing
                self.mean_sums.add(Affine(len(self.bands) * groups * images))
                image_blocks = self.tandem.depth.mixed * self.tandem.depth.blocks[1]
                first_mean = first_image * image_blocks + core_block
                unit_strides = (groups, 1) if self.schedule.resident == "rows" else (1, images)
                self.mean_sums.end(len(self.bands), first_mean, (images, groups), unit_strides)
        return k.finish()

    def _load_bias(self, core_block: Affine) -> None:
        """Load biases that the cube adds to L1, and ones to L0A through a slot of weights."""
        for half in (self.pointwise_half, self.depthwise_half):
            if half.bias:
                half.load_bias(core_block)
        biases = [half.bias for half in (self.pointwise_half, self.depthwise_half) if half.bias]
        if (
            self.ones
            and biases
            and not (self.mean_sums and self.ones is self.mean_sums.image_rows_l0)
        ):
            self.k.copy(
                self.weights_queue.alloc().region(0, AREA), biases[0].numbers.region(0, AREA)
            )
            self.weights_queue.enqueue()
            sizes = self.ones.elements // AREA, AREA
            # stride 0: one fractal of ones, written to all of L0A's
            repeated = self.weights_queue.dequeue().region(0, sizes, (0, 1))
            self.k.load2d(self.ones.region(0, sizes), repeated)
            self.weights_queue.free()

    def take_turns(self, pointwise_unit: _Unit | None, depthwise_unit: _Unit | None) -> None:
        """Alternate tiles of the pointwise half of one unit and of the depthwise half of another.

        One of them has more work for the cube, the other for the vector unit. Three tiles of each
        (p: pointwise, d: depthwise), with the points at which a half takes and gives back buffers:

            open p, p0, open d, d0, p1, d1, p2, close p, d2, close d
        """
        any_unit = pointwise_unit or depthwise_unit
        depthwise_tile = None
        assert any_unit is not None
        with ExitStack() as depthwise_stack, ExitStack() as pointwise_stack:
            pointwise_tile = (
                pointwise_stack.enter_context(self._pointwise(pointwise_unit))
                if pointwise_unit
                else None
            )
            for pair in self._tiles(any_unit.band):
                if pointwise_tile and pair.has_pointwise:
                    pointwise_tile(pair)
                if pair.is_last:
                    # all planes of this unit are in L1: the next call may start its depthwise half
                    pointwise_stack.close()
                # only now: the last tiles of the depthwise unit's planes have arrived in L1 by then
                if depthwise_unit and not depthwise_tile:
                    depthwise_tile = depthwise_stack.enter_context(self._depthwise(depthwise_unit))
                if depthwise_tile:
                    depthwise_tile(pair)
        # add up the means of the unit before, whose tiles are already in L1
        if depthwise_unit and self.mean_sums:
            self.mean_sums.add(depthwise_unit.number)

    def _tiles(self, band: Band) -> Iterator[_TilePair]:
        """Loop over the tiles of a band.

        A loop repeats tiles that differ by a shift. These tiles are not in a loop: the first one,
        at which the depthwise half takes its operands; the last one, at which the pointwise half
        ends; and all those from the first pointwise tile on that is not full.
        """
        shape = band.depth
        tile_pixels = band.tile * FRACTAL
        full_tiles = band.pixels // tile_pixels
        all_tiles = ceil_div(band.pixels, tile_pixels)
        first_tile = 0
        count = conv_windows.tiles_per_image(shape, self.schedule.tile)
        for run in conv_windows.runs_of(shape, self.schedule.tile, 0, count):
            period = len(run.tiles)
            # Passes of the run with full pointwise tiles only, and with any pointwise tile: with 10
            # pointwise tiles, 7 of them full, in a run of period 2 from tile 0 on they are 3 and 5.
            full_passes = min(max(full_tiles - first_tile, 0) // period, run.count)
            passes = min(max(all_tiles + period - 1 - first_tile, 0) // period, run.count)
            is_first_run = first_tile == 0
            is_last_run = first_tile + run.count * period == count
            # passes with a pointwise tile that is not full stand alone
            pointwise_cuts = range(full_passes, passes + 1)
            for low, high in _loops(run.count, is_first_run, is_last_run, pointwise_cuts):
                with repeat(self.k, "run", high - low) as pass_index:
                    for i, (pixel, (window,)) in enumerate(run.tiles):
                        pass_number = pass_index + low
                        number = pass_number * period + first_tile + i
                        yield _TilePair(
                            number,
                            pixel,
                            window,
                            input_row_shift=pass_number * run.rows,
                            output_row_shift=pass_number * (run.pixels // shape.out_hw[1]),
                            has_pointwise=low < passes and number.const * tile_pixels < band.pixels,
                            is_last=number == Affine(count - 1),
                        )
            first_tile += run.count * period

    # -- what is done to a tile -------------------------------------------------------------------
    @contextmanager
    def _pointwise(self, unit: _Unit) -> Iterator[Callable[[_TilePair], None]]:
        """Open a slot of planes and yield the function that computes a tile into it.

        A 1 x 1 convolution sees no neighbours: all pixels of the band are one row of an image.
        """
        half = self.pointwise_half
        band = unit.band
        first_block = unit.core_block + unit.block
        c1 = half.shape.blocks[0]
        tile_pixels = band.tile * FRACTAL
        planes = self.planes_queue.alloc()
        with self._rows(unit) as x, self._operands(half, unit) as (weights, channels):

            def write_tile(pair: _TilePair) -> None:
                pixel = pair.number * tile_pixels
                # in a loop all tiles are full (see `_tiles`); the last one may be shorter
                size = tile_pixels
                if not pixel.terms:
                    size = min(tile_pixels, band.pixels - pixel.const)
                m = ceil_div(size, FRACTAL)
                # no padding, no rows above or below
                columns = conv_windows.InputRange(0, size, 0, 0, 0)
                rows = conv_windows.InputRange(0, 1, 0, 0, 0)
                window = conv_windows.Window(rows, columns, 0, m, size)
                strides = (band.pixels * FRACTAL, size * FRACTAL, FRACTAL, 1)
                view = x.region(pixel * FRACTAL, (c1, 1, size, FRACTAL), strides)
                half.add(self.sums_queue, (self.l0a_queue, self.ones), window, view, weights)
                # the epilogue takes the sums through UB into the slot of planes in L1
                pieces = ((0, pixel, size),)
                area = Area(
                    base=Affine(),
                    pieces=pieces,
                    blocks=self.blocks,
                    plane=band.pixels,
                    step=1,
                    fractals=m,
                    pixels=size,
                )
                drain(half.finish, self.sums_queue, ((planes, area),), first_block, channels)

            yield write_tile
        self.planes_queue.enqueue()

    @contextmanager
    def _depthwise(self, unit: _Unit) -> Iterator[Callable[[_TilePair], None]]:
        """Take a slot of planes and yield the function that computes a tile of the result from it.

        With means the tile also goes to a slot in L1, where the cube sums it a unit later.
        """
        half = self.depthwise_half
        band = unit.band
        first_block = unit.core_block + unit.block
        shape = band.depth
        planes = self.planes_queue.dequeue()
        line = shape.w * FRACTAL
        ow = shape.out_hw[1]
        image_stride = shape.blocks[1] * self.plane_elements
        place = conv_windows.Placement(
            band.low * ow, ow, 1, self.plane_elements, mixed=(shape.mixed, image_stride)
        )
        plane_start = unit.image * (image_stride * shape.mixed) + first_block * self.plane_elements
        mean_slot = self.mean_sums.slot(math.prod(shape.out_hw)) if self.mean_sums else None
        with self._operands(half, unit) as (weights, channels):

            def write_tile(pair: _TilePair) -> None:
                window = pair.window
                sizes = (1, window.rows.count, shape.w, FRACTAL)
                start = (pair.input_row_shift + window.rows.first) * line
                view = planes.region(start, sizes, (band.pixels * FRACTAL, line, FRACTAL, 1))
                half.add(self.sums_queue, (self.l0a_queue, self.ones), window, view, weights)
                tile_output = pair.pixel, self.blocks, window
                area = conv_windows.area_of(
                    shape, place, plane_start, pair.output_row_shift, tile_output
                )
                places: tuple[tuple[Memory, Area], ...] = ((self.y, area),)
                if self.mean_sums and mean_slot:
                    pixel = pair.output_row_shift * ow + pair.pixel
                    places += ((mean_slot, self.mean_sums.place(area, pixel)),)
                drain(half.finish, self.sums_queue, places, first_block, channels)

            yield write_tile
        self.planes_queue.free()
        if self.mean_sums:
            self.mean_sums.results.enqueue()

    @contextmanager
    def _operands(self, half: Half, unit: _Unit) -> Iterator[tuple[Tile, Channels | None]]:
        """Hold a unit's weights in L0B, and its numbers per channel (scales, biases) in UB."""
        unit_blocks = unit.core_block + unit.block, self.blocks
        resident = unit.channels[half.is_depthwise]
        with (
            self._weights(unit, half) as weights,
            held_channels(half.finish, unit_blocks, Affine(), resident) as channels,
        ):
            yield weights, channels

    @contextmanager
    def _rows(self, unit: _Unit) -> Iterator[Tile]:
        """Hold in L1 the rows of an image that a band reads, in all channels."""
        yield unit.x or self.load_rows(unit)
        if not unit.x:
            self.rows_queue.free()

    def load_rows(self, unit: _Unit) -> Tile:
        """Load a band's rows to L1; with several images as one, the rows of all of them."""
        point = self.tandem.point
        band = unit.band
        c1 = point.blocks[0]
        images = point.mixed
        rows = conv_windows.InputRange(band.first_seen * images, band.depth.h * images, 0, 0, 0)
        columns = conv_windows.InputRange(0, point.w, 0, 0, 0)
        window = conv_windows.Window(rows, columns, 0, 0, 0)
        block_range = unit.image * (c1 * images), c1
        source = conv_windows.rows_of(point, self.x, window, block_range, Affine())
        self.k.copy(self.rows_queue.alloc().region(0, source.sizes), source)
        self.rows_queue.enqueue()
        return self.rows_queue.dequeue()

    @contextmanager
    def _weights(self, unit: _Unit, half: Half) -> Iterator[Tile]:
        """Hold in L0B the weights of a unit, followed by the bias if the cube adds it."""
        yield unit.weights_l0b or self.load_weights(unit, half)
        if not unit.weights_l0b:
            half.weights_l0b.free()

    def load_weights(self, unit: _Unit, half: Half) -> Tile:
        """Load a unit's weights to L0B, followed by the bias if the cube adds it."""
        source = half.weights(unit.core_block + unit.block)
        self.k.copy(self.weights_queue.alloc().region(0, source.sizes), source)
        self.weights_queue.enqueue()
        bias = half.bias.blocks((unit.block, half.blocks)) if half.bias else None
        load_l0b_weights(
            self.k,
            half.weights_l0b,
            self.weights_queue.dequeue(),
            half.sum_depth * half.blocks,
            bias,
        )
        self.weights_queue.free()
        return half.weights_l0b.dequeue()


def _loops(
    passes: int, is_first_run: bool, is_last_run: bool, pointwise_cuts: range
) -> Iterator[tuple[int, int]]:
    """Return the ranges [low, high) of a run's passes, each of which is written as one loop.

    The first pass of the first run and the last pass of the last run are loops of their own, and so
    is each pass between two neighbours of `pointwise_cuts`: with 8 passes in the only run and the
    cuts 3, 4 and 5 the ranges start at 0, 1, 3, 4, 5 and 7.
    """
    cuts = {0, passes, *pointwise_cuts}
    if is_first_run:
        cuts.add(1)
    if is_last_run:
        cuts.add(passes - 1)
    return pairwise(sorted(cuts))


def _slots_later(tile: Tile | None, slots: int) -> Tile | None:
    """Return the tile that is `slots` slots later in its queue; None for None."""
    return tile and replace(tile, slot=tile.slot + slots)


class _Pipeline:
    """The units of a band: the pointwise half of each with the depthwise half of the one before.

    With 2 images of 3 groups of blocks, whose rows stay (p: pointwise, d: depthwise half):

        p00 | p01 d00 | p02 d01 | p10 d02 | p11 d10 | p12 d11 | d12

    The outer loop is over what stays in L1 or L0B: rows of an image, or weights of a group.
    """

    def __init__(self, writer: _TandemWriter, first_unit: _Unit, images: int) -> None:
        """Prepare the loops over `images` images and over the core's groups of blocks."""
        self.writer = writer
        self.first_unit = first_unit
        self.rows_stay = writer.schedule.resident == "rows"
        groups = writer.share.channels[0] // writer.blocks
        self.outer, self.inner = (images, groups) if self.rows_stay else (groups, images)

    def write(self) -> None:
        """Write all units."""
        writer = self.writer
        start = Affine()
        # what stays for the pointwise half, and for the depthwise half
        pointwise = self._load(writer.pointwise_half, start)
        writer.take_turns(self._unit(start, start, pointwise), None)
        depthwise = self._load(writer.depthwise_half, start)
        for outer_index, _ in segments(writer.k, "next", self.outer - 1, 1):
            self._inner_units(outer_index, pointwise, depthwise)
            pointwise = self._load(writer.pointwise_half, outer_index + 1)
            self._last_unit(outer_index, self._unit(outer_index + 1, start, pointwise), depthwise)
            depthwise = self._load(writer.depthwise_half, outer_index + 1)
        self._last_pass(pointwise, depthwise)

    def _last_pass(self, pointwise: Tile | None, depthwise: Tile | None) -> None:
        """Write the last pass of the outer loop, with what the loop loaded for it."""
        # After the loop the queue slots are those of its last pass, `outer` - 2 slots after those
        # of the first.
        later_slots = max(0, self.outer - 2)
        last_index = Affine(self.outer - 1)
        last_depthwise = _slots_later(depthwise, later_slots)
        self._inner_units(last_index, _slots_later(pointwise, later_slots), last_depthwise)
        self._last_unit(last_index, None, last_depthwise)

    def _unit(self, outer_index: Affine, i: Affine, resident: Tile | None = None) -> _Unit:
        """Return unit `i` of the inner loop, with what stays for it."""
        first = self.first_unit
        image, group = (outer_index, i) if self.rows_stay else (i, outer_index)
        unit = replace(
            first,
            image=first.image + image,
            block=group * self.writer.blocks,
            number=first.number + outer_index * self.inner + i,
        )
        return replace(unit, x=resident) if self.rows_stay else replace(unit, weights_l0b=resident)

    def _load(self, half: Half, outer_index: Affine) -> Tile | None:
        """Load what stays for one half; rows are read by the pointwise half alone."""
        unit = self._unit(outer_index, Affine())
        if not self.rows_stay:
            return self.writer.load_weights(unit, half)
        return None if half.is_depthwise else self.writer.load_rows(unit)

    def _inner_units(
        self, outer_index: Affine, pointwise: Tile | None, depthwise: Tile | None
    ) -> None:
        """Write a pass but its last unit; the pointwise half then needs no more of what stays."""
        writer = self.writer
        for i, _ in segments(writer.k, "unit", self.inner - 1, 1):
            writer.take_turns(
                self._unit(outer_index, i + 1, pointwise), self._unit(outer_index, i, depthwise)
            )
        queue = writer.rows_queue if self.rows_stay else writer.pointwise_half.weights_l0b
        queue.free()

    def _last_unit(
        self, outer_index: Affine, following: _Unit | None, depthwise: Tile | None
    ) -> None:
        """Write the last depthwise half of a pass, with the first pointwise half of the next."""
        self.writer.take_turns(
            following, self._unit(outer_index, Affine(self.inner - 1), depthwise)
        )
        if not self.rows_stay:
            self.writer.depthwise_half.weights_l0b.free()
