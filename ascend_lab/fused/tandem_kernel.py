"""A pointwise convolution and the depthwise one that reads it, in one kernel.

What lies between, the widest tensor of an inverted residual block, stays in L1. A channel of the
depthwise convolution reads one channel of the pointwise one, so that a core that owns a block of
channels needs no other core:

    GM -x-> L1 -> cube -> epilogue -> UB -> L1 -> cube -> epilogue -> UB -> GM
           all channels    pointwise        16 channels    depthwise

Cores divide channel blocks, images and output rows; rows at a border are computed twice. A core
takes some channel blocks at once. Tile by tile, the depthwise part of these takes turns with the
pointwise part of the next: one has more work for the cube, the other for the vector unit. So planes
in L1 have two slots. Either the rows of an image stay in L1 for all channel blocks, or the weights
of channel blocks for all images.

Source: L1 fusion of the vendor's operator library; Sandler et al., MobileNetV2 (2018), section 5.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

from ascend_lab.fused import means, tandem_shape
from ascend_lab.fused.tandem_shape import (
    AREA,
    SUMS,
    Band,
    Half,
    Tandem,
    TandemSchedule,
    bands_of,
)
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import FRACTAL, Affine, KernelBuilder, Launch, Program, Tile, up
from ascend_lab.operators.kernels import conv_windows
from ascend_lab.operators.kernels.conv_tiles import load_l0b_weights
from ascend_lab.operators.kernels.epilogue_emit import Channels, Memory, drain, held_channels
from ascend_lab.operators.kernels.planes import Own, plane_launch
from ascend_lab.operators.kernels.tiles import Area, chunks, repeat, segments, sum_queue


def tandem_launch(tandem: Tandem, chip: Chip, schedule: TandemSchedule) -> Launch:
    """Return the kernel as a launch; raise `CapacityError` if a band does not fit L1.

    Tensors are x, weight, depth_weight and y in NC1HWC0, planes without gaps, and the epilogues'
    operands.
    """
    tandem_shape.check_tandem(tandem, chip)
    tandem_shape.check_division(tandem, chip, schedule)
    shape = tandem.depth
    tandem = tandem.of(schedule.images)
    totals = shape.blocks[1], shape.n // schedule.images, shape.out_hw[0]
    channels, images, rows = (chunks(t, 1, g) for t, g in zip(totals, schedule.grid, strict=True))

    def program(own: Own) -> Program:
        return _Writer(tandem, chip, schedule, own).program()

    name = f"tandem_{shape.n}x{shape.c}x{shape.h}x{shape.w}"
    return plane_launch(name, (channels, images, rows), program)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A tile behind, and its place among all: that of a tile `between`, too, if there is one.

    A loop moves it `rows` image rows and `down` output rows on.
    """

    place: Affine
    pixel: int
    window: conv_windows.Window
    rows: Affine
    down: Affine
    between: bool
    last: bool


# -- both on a core -------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Unit:
    """Channel blocks from `at` on of the core's, which begin at `col`, in a band of an image.

    What stays for several units is given: rows, or a half's weights; so are numbers per channel.
    """

    band: Band
    col: Affine
    at: Affine
    image: Affine
    number: Affine
    held: tuple[Channels | None, Channels | None]
    x: Tile | None = None
    weights_l0b: Tile | None = None


class _Writer:
    """The program of the cores that own equally much."""

    def __init__(self, tandem: Tandem, chip: Chip, schedule: TandemSchedule, own: Own) -> None:
        """Allocate tensors and queues."""
        self.tandem = tandem
        self.schedule = schedule
        self.own = own
        k = self.k = KernelBuilder("tandem", chip)
        count = own.channels[0]
        (c1, n1) = tandem.point.blocks
        self.blocks = max(b for b in range(1, schedule.blocks + 1) if count % b == 0)
        self.bands = bands_of(tandem, own.rows, schedule)
        shape = tandem.depth
        lines = max(band.pixels for band in self.bands) * FRACTAL
        tiles = max(band.tile for band in self.bands), schedule.tile
        self.plane, groups = math.prod(shape.out_hw) // shape.mixed, count // self.blocks
        self.means: means.Means | None = None
        if tandem.means:
            units = groups * own.images[0]
            self.means = means.Means(k, tandem, self.bands, units, self.blocks, max(tiles))
        self.x = k.tensor("x", "fp16", shape.images * c1 * tandem.point.plane)
        self.y = k.tensor("y", "fp16", shape.images * n1 * self.plane * FRACTAL)
        size = self.blocks * lines
        self.planes = k.queue("planes", "L1", "fp16", size, src="MTE3", dst="MTE1")
        halves = zip(tandem.halves, tiles, (1, 2), strict=True)
        both = [
            Half(k, job, (count, self.blocks), tile, self.y.elements, shares)
            for job, tile, shares in reversed([*halves])  # tiles in between are no smaller
        ]
        self.point, self.depth = both = both[::-1]
        most = max(half.weight_fractals for half in both) * AREA
        self.weights = k.queue("w_l1", "L1", "fp16", most, src="MTE2", dst="MTE1")
        for half, slots in zip(both, self._near_slots(chip), strict=True):
            size = half.weight_fractals * AREA
            name = f"{half.prefix}w_l0"
            half.weights_l0b = k.queue(name, "L0B", "fp16", size, src="MTE1", dst="M", depth=slots)
        twice = 2 * c1 * lines * DTYPE_BYTES["fp16"]
        slots = 2 if twice <= chip.buffers["L1"] - k.used_bytes("L1") else 1
        self.rows = k.queue("x_l1", "L1", "fp16", c1 * lines, src="MTE2", dst="MTE1", depth=slots)
        self._l0(chip, tiles)

    def _l0(self, chip: Chip, tiles: tuple[int, int]) -> None:
        """Allocate L0A, ones for a bias among it, and L0C."""
        k = self.k
        both = (self.point, self.depth)
        added = any(half.bias for half in both)
        self.ones = (
            self.means.image_rows_l0 if self.means and self.tandem.depth.mixed == 1 else None
        )
        if added and not self.ones:
            self.ones = k.buffer("ones_l0", "L0A", "fp16", max(tiles) * AREA)
        room = (chip.buffers["L0A"] - k.used_bytes("L0A")) // (2 * AREA * DTYPE_BYTES["fp16"])
        parts = [t * half.sum_depth for t, half in zip(tiles, both, strict=True)]
        most = max(*tiles, *(min(part, room) for part in parts))
        self.left = k.queue("x_l0", "L0A", "fp16", most * AREA, src="MTE1", dst="M")
        four = 4 * AREA * DTYPE_BYTES[SUMS] * max(tiles) * self.blocks
        # two for each half
        slots = 4 if four <= chip.buffers["L0C"] - k.used_bytes("L0C") else 0
        self.acc = sum_queue(k, "sums", SUMS, max(tiles), self.blocks, slots)

    def _near_slots(self, chip: Chip) -> tuple[int, int]:
        """Return the slots in L0B for weights of each half: two where they fit, and have flags."""
        one = self.point.weight_fractals
        two = self.depth.weight_fractals
        room = (chip.buffers["L0B"] - self.k.used_bytes("L0B")) // (AREA * DTYPE_BYTES["fp16"])
        flags = chip.event_ids - (4 if self.means else 2)
        ways = [w for w in ((2, 2), (2, 1)) if w[0] * one + w[1] * two <= room and sum(w) <= flags]
        return (*ways, (1, 1))[0]

    def program(self) -> Program:
        """Return the program: bands, then images or groups of channel blocks outside."""
        k = self.k
        own = self.own
        (c, c_pitch, c_count) = own.channels
        (n, n_pitch, n_count) = own.images
        col = k.param("channel", c_count) * c_pitch
        first = k.param("batch", n_count) * n_pitch
        self._load_bias(col)
        with (
            held_channels(self.point.finish, (col, c), Affine(), None) as one,
            held_channels(self.depth.finish, (col, c), Affine(), None) as two,
        ):
            if self.means:
                self.means.begin()
            groups = c // self.blocks
            for at, band in enumerate(self.bands):
                start = Affine(at * groups * n)
                self._pipe(_Unit(band, col, Affine(), first, start, (one, two)), n)
            if self.means:
                self.means.add(Affine(len(self.bands) * groups * n))
                place = first * (self.tandem.depth.mixed * self.tandem.depth.blocks[1]) + col
                apart = (groups, 1) if self.schedule.stay == "rows" else (1, n)
                self.means.end(len(self.bands), place, (n, groups), apart)
        return k.finish()

    def _load_bias(self, col: Affine) -> None:
        """Bring what the cube adds to L1, and ones for it to L0A, in the first slot of weights."""
        for half in (self.point, self.depth):
            if half.bias:
                half.load_bias(col)
        biases = [half.bias for half in (self.point, self.depth) if half.bias]
        if self.ones and biases and not (self.means and self.ones is self.means.image_rows_l0):
            self.k.copy(self.weights.alloc().region(0, AREA), biases[0].numbers.region(0, AREA))
            self.weights.enqueue()
            sizes = self.ones.elements // AREA, AREA
            again = self.weights.dequeue().region(0, sizes, (0, 1))
            self.k.load2d(self.ones.region(0, sizes), again)
            self.weights.free()

    def _pipe(self, unit: _Unit, images: int) -> None:
        """Do the first half of each unit while the second half of the one before is done.

        An image after the other, or a group of channel blocks, is done with what stays for it.
        """
        rows = self.schedule.stay == "rows"
        groups = self.own.channels[0] // self.blocks
        outer, inner = (images, groups) if rows else (groups, images)
        start = Affine()
        last = Affine(inner - 1)

        def of(out: Affine, i: Affine, held: Tile | None = None) -> _Unit:
            image, group = (out, i) if rows else (i, out)
            place = unit.image + image
            number = unit.number + out * inner + i
            some = replace(unit, image=place, at=group * self.blocks, number=number)
            return replace(some, x=held) if rows else replace(some, weights_l0b=held)

        def load(half: Half, out: Affine) -> Tile | None:
            if rows:
                return None if half.is_depthwise else self._load_rows(of(out, start))
            return self._load_near(of(out, start), half)

        def begun(out: Affine) -> None:
            for i, _ in segments(self.k, "unit", inner - 1, 1):
                self._turns(of(out, i + 1, one), of(out, i, two))
            (self.rows if rows else self.point.weights_l0b).free()

        def ended(out: Affine, following: _Unit | None) -> None:
            self._turns(following, of(out, last, two))
            if not rows:
                self.depth.weights_l0b.free()

        one = load(self.point, start)
        self._turns(of(start, start, one), None)
        two = load(self.depth, start)
        for out, _ in segments(self.k, "next", outer - 1, 1):
            begun(out)
            one = load(self.point, out + 1)
            ended(out, of(out + 1, start, one))
            two = load(self.depth, out + 1)
        # what the loop's last pass has loaded: slots are numbered from its first pass on
        one, two = (t and replace(t, slot=t.slot + max(0, outer - 2)) for t in (one, two))
        begun(Affine(outer - 1))
        ended(Affine(outer - 1), None)

    def _turns(self, one: _Unit | None, two: _Unit | None) -> None:
        """Do tiles of the first half of a unit and of the second half of another, in turns."""
        some = one or two
        second = None
        assert some is not None
        with ExitStack() as after, ExitStack() as before:
            first = one and before.enter_context(self._first(one))
            for turn in self._tiles(some.band):
                if first and turn.between:
                    first(turn)
                if turn.last:
                    before.close()
                if two and not second:  # by then the last tiles have arrived in L1
                    second = after.enter_context(self._second(two))
                if second:
                    second(turn)
        if two and self.means:  # what has left UB long ago
            self.means.add(two.number)

    def _tiles(self, band: Band) -> Iterator[_Turn]:
        """Loop over the tiles of a band; the first, the last and a short one are in no loop."""
        shape = band.depth
        tile = self.schedule.tile
        side = band.tile * FRACTAL
        place = 0
        count = conv_windows.tiles_per_image(shape, tile)
        for run in conv_windows.runs_of(shape, tile, 0, count):
            each = len(run.tiles)
            ends = band.pixels // side, up(band.pixels, side) + each - 1
            whole, some = (min(max(end - place, 0) // each, run.count) for end in ends)
            end = run.count - (place + run.count * each == count)
            cuts = {0, int(place == 0), *range(whole, some + 1), end, run.count}
            for low, high in pairwise(sorted(cuts)):
                with repeat(self.k, "run", high - low) as turn:
                    for i, (pixel, (window,)) in enumerate(run.tiles):
                        at = turn + low
                        rows = at * run.rows
                        down = at * (run.pixels // shape.out_hw[1])
                        where = at * each + place + i
                        between = low < some and where.const * side < band.pixels
                        last = where == Affine(count - 1)
                        yield _Turn(where, pixel, window, rows, down, between, last)
            place += run.count * each

    # -- what is done to a tile -------------------------------------------------------------------
    @contextmanager
    def _first(self, unit: _Unit) -> Iterator[Callable[[_Turn], None]]:
        """Fill a slot of planes, tile by tile: all are one row of pixels."""
        half = self.point
        band = unit.band
        first = unit.col + unit.at
        c1 = half.shape.blocks[0]
        side = band.tile * FRACTAL
        planes = self.planes.alloc()
        with self._rows(unit) as x, self._inside(half, unit) as (near, held):

            def tile(turn: _Turn) -> None:
                pixel = turn.place * side
                size = side if pixel.terms else min(side, band.pixels - pixel.const)
                m = up(size, FRACTAL)
                columns = conv_windows.Seen(0, size, 0, 0, 0)
                window = conv_windows.Window(conv_windows.Seen(0, 1, 0, 0, 0), columns, 0, m, size)
                strides = (band.pixels * FRACTAL, size * FRACTAL, FRACTAL, 1)
                view = x.region(pixel * FRACTAL, (c1, 1, size, FRACTAL), strides)
                half.add(self.acc, (self.left, self.ones), window, view, near)
                pieces = ((0, pixel, size),)
                area = Area(Affine(), pieces, self.blocks, band.pixels, 1, m, size)
                drain(half.finish, self.acc, ((planes, area),), first, held)

            yield tile
        self.planes.enqueue()

    @contextmanager
    def _second(self, unit: _Unit) -> Iterator[Callable[[_Turn], None]]:
        """Empty a slot of planes, tile by tile."""
        half = self.depth
        band = unit.band
        first = unit.col + unit.at
        shape = band.depth
        planes = self.planes.dequeue()
        line = shape.w * FRACTAL
        ow = shape.out_hw[1]
        apart = shape.blocks[1] * self.plane
        place = conv_windows.Placement(band.low * ow, ow, 1, self.plane, mixed=(shape.mixed, apart))
        plane = unit.image * (apart * shape.mixed) + first * self.plane
        slot = self.means.slot(math.prod(shape.out_hw)) if self.means else None
        with self._inside(half, unit) as (near, held):

            def tile(turn: _Turn) -> None:
                window = turn.window
                apart = band.pixels * FRACTAL
                sizes = (1, window.rows.count, shape.w, FRACTAL)
                start = (turn.rows + window.rows.first) * line
                view = planes.region(start, sizes, (apart, line, FRACTAL, 1))
                half.add(self.acc, (self.left, self.ones), window, view, near)
                own = turn.pixel, self.blocks, window
                area = conv_windows.area_of(shape, place, plane, turn.down, own)
                places: tuple[tuple[Memory, Area], ...] = ((self.y, area),)
                if self.means and slot:
                    pixel = turn.down * ow + turn.pixel
                    places += ((slot, self.means.place(area, pixel)),)
                drain(half.finish, self.acc, places, first, held)

            yield tile
        self.planes.free()
        if self.means:
            self.means.results.enqueue()

    @contextmanager
    def _inside(self, half: Half, unit: _Unit) -> Iterator[tuple[Tile, Channels | None]]:
        """Hold weights in L0B and numbers per channel."""
        n = unit.col + unit.at, self.blocks
        with (
            self._near(unit, half) as near,
            held_channels(half.finish, n, Affine(), unit.held[half.is_depthwise]) as held,
        ):
            yield near, held

    @contextmanager
    def _rows(self, unit: _Unit) -> Iterator[Tile]:
        """Hold the rows that a band sees of an image, in all channels."""
        yield unit.x or self._load_rows(unit)
        if not unit.x:
            self.rows.free()

    def _load_rows(self, unit: _Unit) -> Tile:
        point = self.tandem.point
        band = unit.band
        c1 = point.blocks[0]
        m = point.mixed
        seen = (
            conv_windows.Seen(band.first_seen * m, band.depth.h * m, 0, 0, 0),
            conv_windows.Seen(0, point.w, 0, 0, 0),
        )
        blocks = unit.image * (c1 * m), c1
        source = conv_windows.rows_of(
            point, self.x, conv_windows.Window(*seen, 0, 0, 0), blocks, Affine()
        )
        self.k.copy(self.rows.alloc().region(0, source.sizes), source)
        self.rows.enqueue()
        return self.rows.dequeue()

    @contextmanager
    def _near(self, unit: _Unit, half: Half) -> Iterator[Tile]:
        """Hold in L0B the weights of a unit, and a bias behind them."""
        yield unit.weights_l0b or self._load_near(unit, half)
        if not unit.weights_l0b:
            half.weights_l0b.free()

    def _load_near(self, unit: _Unit, half: Half) -> Tile:
        source = half.weights(unit.col + unit.at)
        self.k.copy(self.weights.alloc().region(0, source.sizes), source)
        self.weights.enqueue()
        bias = half.bias.blocks((unit.at, half.blocks)) if half.bias else None
        load_l0b_weights(
            self.k, half.weights_l0b, self.weights.dequeue(), half.sum_depth * half.blocks, bias
        )
        self.weights.free()
        return half.weights_l0b.dequeue()
