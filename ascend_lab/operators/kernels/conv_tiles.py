"""Which tiles of a convolution a core makes, in which order, and a stage of one.

The programs of a cube core, and of the vector cores behind it, walk through the same tiles. A stage
brings rows of the image to sums in L0C.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.operators.kernels import conv_windows, epilogue_emit, gemm_schedule, mix
from ascend_lab.operators.kernels.conv_shape import ConvShape, bundles_of, units_of
from ascend_lab.operators.kernels.conv_windows import Pixels, Window, area_of
from ascend_lab.operators.kernels.epilogue import Epilogue
from ascend_lab.operators.kernels.tiles import Area, Span, chunks, repeat, segments


# -- shares of cores ------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class BundleShare:
    """The bundles of one core: `full` ones, and the short last one if `tail`; `n1` blocks each.

    `columns` cores divide each bundle; `pitch` bundles lie between cores (0: there is one share).
    """

    full: int
    tail: bool
    n1: int
    columns: int
    pitch: int


def bundle_shares(shape: ConvShape, grid_cols: int) -> dict[BundleShare, list[int]]:
    """Divide bundles over the columns of the core grid; columns left over divide each bundle."""
    bundle = bundles_of(shape)
    sizes = chunks(bundle.count, 1, min(grid_cols, bundle.count))
    columns = max(1, grid_cols // len(sizes))
    pitch = sizes[0] if len(sizes) > 1 else 0
    uneven = (bundle.c1, bundle.n1) != (bundle.last_c1, bundle.last_n1)
    shares: dict[BundleShare, list[int]] = {}
    for index, size in enumerate(sizes):
        tail = uneven and index == len(sizes) - 1
        full = size - tail
        n1 = bundle.n1 if full else bundle.last_n1
        shares.setdefault(BundleShare(full, tail, n1, columns, pitch), []).append(index)
    return shares


@dataclass(frozen=True, slots=True)
class BundlePlace:
    """A bundle of groups: its number, input and output blocks, its place among those of a core."""

    index: isa.Affine
    c1: int
    n1: int
    place: isa.Affine


# -- the order of tiles ---------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Job:
    """What all programs of a launch have in common; each has `turns` pixel tiles at least.

    `epilogue` is what the cube's core does, `after` is left to its vector cores. `ahead` slots of
    L1 hold rows and weights of a stage together (0: each has its own).
    """

    shape: ConvShape
    schedule: gemm_schedule.GemmSchedule
    chip: Chip
    strip: bool
    place: conv_windows.Placement
    epilogue: Epilogue | None
    after: mix.After | None = None
    turns: int = 1
    ahead: int = 0

    @property
    def tile(self) -> int:
        """Fractals of pixels of a tile."""
        return self.schedule.base_m // isa.FRACTAL

    def sides(self, n_own: int) -> tuple[int, int]:
        """Return the fractals of the tiles of a core that owns `n_own` output blocks."""
        (oh, ow) = self.shape.out_hw
        across = self.schedule.base_n // isa.FRACTAL
        return min(self.tile, isa.up(ow if self.strip else oh * ow, isa.FRACTAL)), min(
            across, n_own
        )

    @property
    def elements(self) -> int:
        """Elements of the result."""
        planes = self.shape.images * self.shape.blocks[1]
        return planes * self.place.plane * isa.FRACTAL

    @property
    def even(self) -> bool:
        """Tell whether vector cores share all tiles evenly, each stored in one piece."""
        (oh, ow) = self.shape.out_hw
        place = self.place
        cores = self.chip.vector_cores_per_core
        whole = (place.row_pitch, place.step, place.mixed[0]) == (ow, 1, 1)
        alike = isa.FRACTAL % cores == 0 and (ow if self.strip else oh * ow) % cores == 0
        return alike and (self.strip or whole)


@dataclass(frozen=True, slots=True)
class Held:
    """What a loop outside holds: weights and rows of all channel blocks, numbers per channel.

    `near` are weights, and the bias that the cube adds, in L0B.
    """

    weights: isa.Tile | None
    near: isa.Tile | None
    channels: epilogue_emit.Channels | None
    rows: isa.Tile | None = None


Weights = tuple[isa.Tile | None, isa.Tile | None]
"""All weights of some tiles, in L1 and in L0B, where they stay there."""


class Walk:
    """The tiles of cores that own `n_own` output blocks, in order: one program after another."""

    finish: epilogue_emit.Finish | None

    def __init__(self, job: Job, n_own: int, name: str) -> None:
        """Begin a kernel."""
        self.job = job
        self.shape = job.shape
        self.n_own = n_own
        self.bundle, self.k = bundles_of(job.shape), isa.KernelBuilder(name, job.chip)

    def begin(self, share: BundleShare, first: isa.Affine, col: isa.Affine) -> None:
        """Do what comes before all tiles of a program."""

    def hold_weights(
        self, at: BundlePlace, n: Span, col: isa.Affine, *, across: bool
    ) -> AbstractContextManager[Weights]:
        """Hold weights of a bundle for all tiles inside, or, `across`, for all its pixels."""
        return nullcontext((None, None))

    def hold_rows(self, at: BundlePlace, pixels: Pixels) -> AbstractContextManager[isa.Tile | None]:
        """Hold rows of all channel blocks for all tiles inside."""
        return nullcontext()

    def tile(self, bundle: BundlePlace, at: Pixels, n: Span, col: isa.Affine, held: Held) -> None:
        """Do one tile of the core's blocks, which begin at `col`."""
        raise NotImplementedError

    def plane(self, at: Pixels, n: Span, before: isa.Affine) -> tuple[isa.Affine, isa.Affine]:
        """Return where the plane of a tile's first block begins, and the tile's row in it."""
        first = at.image * (self.shape.blocks[1] * self.shape.mixed)
        row = at.turn * (at.run.pixels // self.shape.out_hw[1]) + at.down
        return (first + before + n[0]) * self.job.place.plane, row

    def area(self, at: Pixels, n: Span, before: isa.Affine) -> Area:
        """Return where a tile goes."""
        wide = self.finish.width if self.finish else isa.FRACTAL
        (plane, row) = self.plane(at, n, before)
        what = (at.pixel, n[1], at.window)
        return area_of(self.shape, self.job.place, plane, row, what, wide)

    def program(
        self,
        piece: conv_windows.RowShare,
        share: BundleShare,
        col_pitch: int,
        counts: tuple[int, int],
    ) -> isa.Program:
        """Return the program of the cores with these pixel tiles and bundles."""
        k = self.k
        bundle = self.bundle
        k.restart()
        image = k.param("row", max(piece.images) + 1) * piece.image_pitch
        down = k.param("down", max(piece.downs) + 1) * piece.step if piece.step else isa.Affine()
        col = k.param("col", counts[0]) * col_pitch
        first = k.param("share", counts[1]) * share.pitch if share.pitch else isa.Affine()
        base = (image, down)
        if self.job.after:
            k.param("core", self.job.after.grid[1])
        self.begin(share, first, col)
        if share.full:
            with repeat(k, "bundle", share.full) as index:
                at = BundlePlace(first + index, bundle.c1, bundle.n1, index)
                self._bundle(at, piece.tiles, base, (col, self.n_own))
        if share.tail:
            last = isa.Affine(bundle.count - 1), bundle.last_c1, bundle.last_n1
            at = BundlePlace(*last, isa.Affine(share.full))
            own = bundle.last_n1 if share.full else self.n_own
            self._bundle(at, piece.tiles, base, (col, own))
        return k.finish()

    def _bundle(
        self, at: BundlePlace, tiles: tuple[int, int], base: tuple[isa.Affine, isa.Affine], n: Span
    ) -> None:
        """All output tiles of one bundle on one core; `base`: images and rows before it."""
        before = at.index * self.bundle.n1
        tile_n = min(self.job.schedule.base_n // isa.FRACTAL, n[1])

        def across() -> Iterator[Span]:
            for start, size in segments(self.k, "n", n[1], tile_n):
                yield n[0] + start, size

        with epilogue_emit.held_channels(self.finish, n, before, None) as channels:
            if self.job.schedule.order == "mn" or tiles[1] - tiles[0] == 1:
                with self.hold_weights(at, n, n[0], across=n[1] > tile_n) as stay:
                    for pixels in self._pixels(tiles, base):
                        with self.hold_rows(at, pixels) as rows:
                            for some in across():
                                self.tile(at, pixels, some, n[0], Held(*stay, channels, rows))
                return
            for some in across():
                with (
                    epilogue_emit.held_channels(self.finish, some, before, channels) as own,
                    self.hold_weights(at, some, n[0], across=False) as stay,
                ):
                    for pixels in self._pixels(tiles, base):
                        self.tile(at, pixels, some, n[0], Held(*stay, own))

    def _pixels(
        self, tiles: tuple[int, int], base: tuple[isa.Affine, isa.Affine]
    ) -> Iterator[Pixels]:
        """Loop over the tiles of pixels."""
        job = self.job
        for image, first, last in self._images(tiles):
            for run in conv_windows.runs_of(self.shape, job.tile, first, last, strip=job.strip):
                with repeat(self.k, "run", run.count) as turn:
                    for pixel, windows in run.tiles:
                        yield Pixels(base[0] + image, pixel, windows, run, turn, base[1])

    def _images(self, tiles: tuple[int, int]) -> Iterator[tuple[isa.Affine, int, int]]:
        """Yield (image, first tile, last tile): a part image, a loop over whole ones, a part."""
        per_image = conv_windows.tiles_per_image(self.shape, self.job.tile, strip=self.job.strip)
        at, end = tiles
        if at % per_image:
            stop = min(end, at - at % per_image + per_image)
            yield isa.Affine(at // per_image), at % per_image, at % per_image + stop - at
            at = stop
        if whole := (end - at) // per_image:
            with self.k.loop("image", whole) as image:
                yield image + at // per_image, 0, per_image
            at += whole * per_image
        if at < end:
            yield isa.Affine(at // per_image), 0, end - at


# -- a stage --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Feeds:
    """The queues of both matrices in L0, and how many fractals deep their tiles are."""

    left: isa.Queue
    right: isa.Queue
    depth: int


def keep_near(
    k: isa.KernelBuilder, right: isa.Queue, weights: isa.Tile, count: int, bias: isa.Region | None
) -> None:
    """Bring `count` fractals of weights from L1 to a slot of L0B, a bias for the cube behind."""
    area = isa.FRACTAL * isa.c0_of(weights.buffer.dtype)
    slot = right.alloc()
    fractals = (count, area)
    k.load2d(slot.region(0, fractals), weights.region(0, fractals))
    if bias is not None:
        k.load2d(slot.region(count * area, bias.sizes), bias)
    right.enqueue()


def add_stage(
    k: isa.KernelBuilder,
    shape: ConvShape,
    feeds: Feeds,
    c: isa.Tile,
    windows: tuple[Window, ...],
    sources: tuple[isa.Tile, isa.Tile, isa.Tile | None],
    sizes: tuple[int, isa.Affine, int],
    bias: isa.Region | None,
    starts: tuple[int, int],
    *,
    begun: bool,
) -> None:
    """Add the products of a stage, `sizes` (output blocks, first unit, units), and those beside.

    `sources` are rows and weights in L1, and weights in L0B if they stay there. What is beside has
    its rows, and its sums (0: the same ones) at `starts`. The first product begins the sums unless
    they are `begun`.
    """
    (n, at, count) = sizes
    units = units_of(shape)
    other = shape.beside
    own = n, at * units.c1, count * units.c1
    x, *weights = sources
    view = view_of(shape, x, windows[0], 0, own[2])
    first = k, shape, feeds, c, windows[0], view, (*weights,), own, bias
    add_products(*first, (0, 0), begun=begun)
    if other:
        start = own[2] * shape.taps * n * isa.FRACTAL * isa.c0_of(shape.dtype)
        own = n, at * units.beside if starts[1] else isa.Affine(1), count * units.beside
        view = view_of(other, x, windows[1], starts[0], own[2])
        places = start, starts[1]
        add_products(k, other, feeds, c, windows[1], view, (*weights,), own, None, places)


def windows_of(shape: ConvShape, window: Window) -> dict[str, Any]:
    """Return how load3d sees the rows of a window."""
    rows = window.rows
    columns = window.columns
    return {
        "kernel": (shape.r, shape.s),
        "stride": shape.strides,
        "pad": (rows.before, rows.after, columns.before, columns.after),
        "dilation": (shape.dilations[0] * shape.mixed, shape.dilations[1]),
        "m_start": window.m_start,
        "pad_value": shape.pad_value,
    }


def view_of(shape: ConvShape, x: isa.Tile, window: Window, start: int, blocks: int) -> isa.Region:
    """Return the rows of a window in L1, those of channel blocks one behind the other."""
    return x.region(start, (blocks, window.rows.count, window.columns.count, shape.c0))


def add_products(
    k: isa.KernelBuilder,
    shape: ConvShape,
    feeds: Feeds,
    c: isa.Tile,
    window: Window,
    view: isa.Region,
    weights: Sequence[isa.Tile | None],
    sizes: tuple[int, isa.Affine, int],
    bias: isa.Region | None,
    starts: tuple[isa.Affine | int, isa.Affine | int],
    *,
    begun: bool = False,
) -> None:
    """Add the products of channel blocks, `sizes` (output blocks, first channel block, blocks).

    load3d forms tiles of the im2col rows of `view`. `weights` are those in L1, and in L0B if they
    stay there; they and the sums begin at `starts`.
    """
    (w, near) = weights
    (n, c_at, c_size) = sizes
    left = feeds.left
    right = feeds.right
    c0 = isa.c0_of(shape.dtype)
    m = window.fractals
    windows = windows_of(shape, window)
    area = isa.FRACTAL * c0
    for k_at, depth in segments(k, "k", c_size * shape.taps, feeds.depth):
        to = left.alloc().region(0, (m, depth, isa.FRACTAL, c0))
        k.emit(isa.load3d(k.chip, to, view, **windows, k_start=k_at * c0))
        left.enqueue()
        start = k_at * (n * area) + starts[0]
        fractals = (depth * n, area)
        if near is None:
            assert w is not None
            k.load2d(right.alloc().region(0, fractals), w.region(start, fractals))
            right.enqueue()
        a = left.dequeue().region(0, (m, depth, isa.FRACTAL, c0))
        tile, start = (near, start) if near else (right.dequeue(), isa.Affine())
        sums = c.region(starts[1], (n, m, isa.FRACTAL, isa.FRACTAL))
        done = c_at * shape.taps + k_at
        b = tile.region(start, (depth, n, isa.FRACTAL, c0))
        k.mmad(sums, a, b, accumulate=1 if begun else done, bias=bias)
        left.free()
        if near is None:
            right.free()
