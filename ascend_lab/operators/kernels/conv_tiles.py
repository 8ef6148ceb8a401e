"""Which output tiles of a convolution a core computes, and in which order.

The programs of a cube core and of the vector cores that follow it loop over the same tiles. With 4
pixel tiles an image, a core with tiles 3 .. 12 does one tile of image 0, all tiles of images 1 and
2 in a loop, and one tile of image 3. A bundle is as many groups as fill whole channel blocks.

The last section loads operands to L0. The left matrix (im2col) is never stored: load3d forms a tile
of it from rows of the image in L1.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.operators.kernels import conv_windows, epilogue_emit, gemm_schedule
from ascend_lab.operators.kernels.conv_shape import ConvShape, bundles_of
from ascend_lab.operators.kernels.conv_windows import Pixels, Window, area_of
from ascend_lab.operators.kernels.epilogue import Epilogue
from ascend_lab.operators.kernels.tiles import (
    Area,
    Feed,
    OrderedFeed,
    ResidentFeed,
    SlotFeed,
    Span,
    chunks,
    repeat,
    segments,
)
from ascend_lab.operators.kernels.vector_tail import VectorTail


# -- shares of cores ------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class BundleShare:
    """The bundles of one core: `full_bundles` whole ones, plus the short last one if `has_tail`.

    A bundle has `n1` output blocks, which `columns` cores divide. The next core's bundles begin
    `pitch` bundles further on (0 if one share holds all bundles).
    """

    full_bundles: int
    has_tail: bool
    n1: int
    columns: int
    pitch: int


def bundle_shares(shape: ConvShape, grid_cols: int) -> dict[BundleShare, list[int]]:
    """Divide bundles over the columns of the core grid; more columns than bundles divide a bundle.

    On 8 columns 2 bundles leave 4 columns to each. The result maps every distinct share to the
    indices of the columns that have it.
    """
    bundle = bundles_of(shape)
    sizes = chunks(bundle.count, 1, min(grid_cols, bundle.count))
    columns = max(1, grid_cols // len(sizes))
    pitch = sizes[0] if len(sizes) > 1 else 0
    uneven = (bundle.c1, bundle.n1) != (bundle.last_c1, bundle.last_n1)
    shares: dict[BundleShare, list[int]] = {}
    for index, size in enumerate(sizes):
        # With 3 bundles, the last one short, on 2 columns: column 0 has 2 whole bundles, column 1
        # the short one only.
        has_tail = uneven and index == len(sizes) - 1
        full_bundles = size - 1 if has_tail else size
        n1 = bundle.n1 if full_bundles else bundle.last_n1
        share = BundleShare(full_bundles, has_tail, n1, columns, pitch)
        shares.setdefault(share, []).append(index)
    return shares


@dataclass(frozen=True, slots=True)
class BundlePlace:
    """A bundle of groups: its number, input and output blocks, its number in the core's share."""

    index: isa.Affine
    c1: int
    n1: int
    place: isa.Affine


# -- the order of tiles ---------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Job:
    """What all programs of a launch have in common; each has at least `pixel_tiles` pixel tiles.

    The cube core does `epilogue`, its vector cores `vector_tail`. `stages_ahead` slots of L1 hold
    rows and weights of a stage together (0: rows and weights have separate slots).
    """

    shape: ConvShape
    schedule: gemm_schedule.GemmSchedule
    chip: Chip
    strip: bool
    place: conv_windows.Placement
    epilogue: Epilogue | None
    vector_tail: VectorTail | None = None
    pixel_tiles: int = 1
    stages_ahead: int = 0

    @property
    def tile(self) -> int:
        """Fractals of pixels of a tile."""
        return self.schedule.base_m // isa.FRACTAL

    def sides(self, n_own: int) -> tuple[int, int]:
        """Return the fractals (pixels, channels) of tiles of a core with `n_own` output blocks."""
        # No tile is taller than an image (a strip: than a row) or wider than the core's blocks.
        tile_m = min(self.tile, isa.ceil_div(self._largest_tile_pixels, isa.FRACTAL))
        tile_n = min(self.schedule.base_n // isa.FRACTAL, n_own)
        return tile_m, tile_n

    @property
    def _largest_tile_pixels(self) -> int:
        """The pixels of an image, or of a row of it if tiles are strips."""
        (oh, ow) = self.shape.out_hw
        return ow if self.strip else oh * ow

    @property
    def elements(self) -> int:
        """Elements of the result."""
        planes = self.shape.images * self.shape.blocks[1]
        return planes * self.place.plane * isa.FRACTAL

    @property
    def even(self) -> bool:
        """Whether vector cores share all tiles evenly, each stored in one piece."""
        place = self.place
        cores = self.chip.vector_cores_per_core
        # A tile in one piece: its rows can be cut anywhere.
        ow = self.shape.out_hw[1]
        plane_in_order = (place.row_pitch, place.step, place.mixed[0]) == (ow, 1, 1)
        equal_rows = isa.FRACTAL % cores == 0 and self._largest_tile_pixels % cores == 0
        return equal_rows and (self.strip or plane_in_order)


@dataclass(frozen=True, slots=True)
class Resident:
    """What an outer loop has loaded for a tile; a field is None if the tile loads that itself.

    `weights` and `rows` lie in L1, with all channel blocks; `l0b_weights` lie in L0B, followed by
    the bias that the cube adds; `channels` are the epilogue's numbers per channel.
    """

    weights: isa.Tile | None
    l0b_weights: isa.Tile | None
    channels: epilogue_emit.Channels | None
    rows: isa.Tile | None = None


Weights = tuple[isa.Tile | None, isa.Tile | None]
"""All weights of a loop's tiles in L1 and in L0B, or None where they do not stay there."""


class TileWalk:
    """The order of the output tiles on cores that own `n_own` output blocks.

    Subclasses say what a cube core or a vector core does with a tile. One walk writes the programs
    of several shares, one after another.
    """

    finish: epilogue_emit.Finish | None

    def __init__(self, job: Job, n_own: int, name: str) -> None:
        """Begin a kernel."""
        self.job = job
        self.shape = job.shape
        self.n_own = n_own
        self.bundle = bundles_of(job.shape)
        self.k = isa.KernelBuilder(name, job.chip)

    def begin(self, share: BundleShare, first_bundle: isa.Affine, col: isa.Affine) -> None:
        """Write what comes before all tiles of a program."""

    def hold_weights(
        self, bundle: BundlePlace, n_span: Span, col: isa.Affine, *, several_n_tiles: bool
    ) -> AbstractContextManager[Weights]:
        """Keep the weights of output blocks `n_span` on the core for all tiles of the loop inside.

        `several_n_tiles`: the loop inside goes over several tiles of output channels.
        """
        return nullcontext((None, None))

    def hold_rows(
        self, bundle: BundlePlace, pixels: Pixels
    ) -> AbstractContextManager[isa.Tile | None]:
        """Keep a pixel tile's rows of all channel blocks in L1 for all its output blocks."""
        return nullcontext()

    def tile(
        self, bundle: BundlePlace, pixels: Pixels, n_span: Span, col: isa.Affine, resident: Resident
    ) -> None:
        """Write the tile at output blocks `n_span`; those of the core begin at `col`."""
        raise NotImplementedError

    def plane(
        self, pixels: Pixels, n_span: Span, first_block: isa.Affine
    ) -> tuple[isa.Affine, isa.Affine]:
        """Return where the plane of a tile's first block begins, and output rows before the tile.

        `first_block` is the first output block of the bundle, `n_span` counts from there.
        """
        # Output is (image, block of 16 channels, pixel, 16): count the blocks before the tile's.
        image_blocks = pixels.image * (self.shape.blocks[1] * self.shape.mixed)
        row = pixels.turn * (pixels.run.pixels // self.shape.out_hw[1]) + pixels.down
        return (image_blocks + first_block + n_span[0]) * self.job.place.plane, row

    def area(self, pixels: Pixels, n_span: Span, first_block: isa.Affine) -> Area:
        """Return where a tile goes in the result."""
        block_channels = self.finish.width if self.finish else isa.FRACTAL
        (plane, row) = self.plane(pixels, n_span, first_block)
        tile = (pixels.pixel, n_span[1], pixels.window)
        return area_of(self.shape, self.job.place, plane, row, tile, block_channels)

    def program(
        self,
        row_share: conv_windows.RowShare,
        share: BundleShare,
        col_pitch: int,
        counts: tuple[int, int],
    ) -> isa.Program:
        """Return the program of the cores with these pixel tiles and bundles.

        The cores differ in the program's parameters: `counts` are the numbers of columns and of
        shares; each column of cores begins `col_pitch` output blocks after the one before.
        """
        k = self.k
        bundle = self.bundle
        k.restart()
        # Cores that run this program differ in these parameters only: the image they begin with,
        # output rows down, output blocks across, bundles.
        image = k.param("row", max(row_share.images) + 1) * row_share.image_pitch
        down = isa.Affine()
        if row_share.step:
            down = k.param("down", max(row_share.downs) + 1) * row_share.step
        col = k.param("col", counts[0]) * col_pitch
        first_bundle = k.param("share", counts[1]) * share.pitch if share.pitch else isa.Affine()
        base = (image, down)
        if self.job.vector_tail:
            k.param("core", self.job.vector_tail.grid[1])
        self.begin(share, first_bundle, col)
        if share.full_bundles:
            # Whole bundles are alike: one loop, whose body is written once.
            with repeat(k, "bundle", share.full_bundles) as index:
                whole_bundle = BundlePlace(first_bundle + index, bundle.c1, bundle.n1, index)
                self._bundle(whole_bundle, row_share.tiles, base, (col, self.n_own))
        if share.has_tail:
            # The short last bundle comes after the whole ones: its place in the share is their
            # number.
            short_bundle = BundlePlace(
                index=isa.Affine(bundle.count - 1),
                c1=bundle.last_c1,
                n1=bundle.last_n1,
                place=isa.Affine(share.full_bundles),
            )
            short_n1 = bundle.last_n1 if share.full_bundles else self.n_own
            self._bundle(short_bundle, row_share.tiles, base, (col, short_n1))
        return k.finish()

    def _bundle(
        self,
        bundle: BundlePlace,
        tiles: tuple[int, int],
        base: tuple[isa.Affine, isa.Affine],
        n: Span,
    ) -> None:
        """Write all output tiles of one bundle.

        `base` are the images and output rows before them, `n` the core's output blocks (first,
        count).
        """
        first_block = bundle.index * self.bundle.n1
        with epilogue_emit.held_channels(self.finish, n, first_block, None) as channels:
            # Order "mn": each pixel tile loads its rows once for all output channels. With one
            # pixel tile, weights are loaded once in either order, and rows once only in this one.
            if self.job.schedule.order == "mn" or tiles[1] - tiles[0] == 1:
                self._pixels_outside(bundle, tiles, base, n, channels)
            else:
                self._channels_outside(bundle, tiles, base, n, channels)

    def _n_spans(self, n: Span) -> Iterator[Span]:
        """Yield the tiles of output blocks `n` as (first, count)."""
        tile_n = min(self.job.schedule.base_n // isa.FRACTAL, n[1])
        for start, size in segments(self.k, "n", n[1], tile_n):
            yield n[0] + start, size

    def _pixels_outside(
        self,
        bundle: BundlePlace,
        tiles: tuple[int, int],
        base: tuple[isa.Affine, isa.Affine],
        n: Span,
        channels: epilogue_emit.Channels | None,
    ) -> None:
        """Write tiles in order "mn": the loop over pixel tiles is outside."""
        several_n_tiles = n[1] * isa.FRACTAL > self.job.schedule.base_n
        with self.hold_weights(bundle, n, n[0], several_n_tiles=several_n_tiles) as weights:
            for pixels in self._pixels(tiles, base):
                with self.hold_rows(bundle, pixels) as rows:
                    resident = Resident(*weights, channels, rows)
                    for n_tile in self._n_spans(n):
                        self.tile(bundle, pixels, n_tile, n[0], resident)

    def _channels_outside(
        self,
        bundle: BundlePlace,
        tiles: tuple[int, int],
        base: tuple[isa.Affine, isa.Affine],
        n: Span,
        channels: epilogue_emit.Channels | None,
    ) -> None:
        """Write tiles in order "nm": the loop over tiles of output channels is outside."""
        first_block = bundle.index * self.bundle.n1
        for n_tile in self._n_spans(n):
            with (
                epilogue_emit.held_channels(
                    self.finish, n_tile, first_block, channels
                ) as n_channels,
                self.hold_weights(bundle, n_tile, n[0], several_n_tiles=False) as weights,
            ):
                resident = Resident(*weights, n_channels)
                for pixels in self._pixels(tiles, base):
                    self.tile(bundle, pixels, n_tile, n[0], resident)

    def _pixels(
        self, tiles: tuple[int, int], base: tuple[isa.Affine, isa.Affine]
    ) -> Iterator[Pixels]:
        """Yield the pixel tiles, in loops over images and over tiles that differ by a shift."""
        job = self.job
        for image, first_tile, end_tile in self._images(tiles):
            for run in conv_windows.runs_of(
                self.shape, job.tile, first_tile, end_tile, strip=job.strip
            ):
                with repeat(self.k, "run", run.count) as turn:
                    for pixel, windows in run.tiles:
                        yield Pixels(base[0] + image, pixel, windows, run, turn, base[1])

    def _images(self, tiles: tuple[int, int]) -> Iterator[tuple[isa.Affine, int, int]]:
        """Yield (image, first tile, end): part of an image, a loop over whole ones, another part.

        With 4 tiles an image, tiles 3 .. 12 are tile 3 of image 0, images 1 and 2 (one loop), and
        tile 0 of image 3.
        """
        per_image = conv_windows.tiles_per_image(self.shape, self.job.tile, strip=self.job.strip)
        first, end = tiles
        first_image, first_in_image = divmod(first, per_image)
        if first_in_image:
            # The share begins inside an image: it has the tiles up to that image's end.
            end_in_image = min(per_image, first_in_image + end - first)
            yield isa.Affine(first_image), first_in_image, end_in_image
            first_image += 1
        whole_images = max(0, end // per_image - first_image)
        if whole_images:
            with self.k.loop("image", whole_images) as image:
                yield image + first_image, 0, per_image
        last_image = first_image + whole_images
        tiles_left = end - last_image * per_image
        if tiles_left > 0:
            yield isa.Affine(last_image), 0, tiles_left


# -- operands on their way to L0 ------------------------------------------------------------------
def rows_view(shape: ConvShape, x: isa.Tile, window: Window, blocks: int, start: int) -> isa.Region:
    """Return the region of L1 with the rows of a window, one channel block after another."""
    return x.region(start, (blocks, window.rows.count, window.columns.count, shape.c0))


@dataclass(frozen=True, slots=True)
class Addend:
    """One of the convolutions whose results are added: its tensors, its places in L1 and L0C.

    A unit of depth has `unit_blocks` of its channel blocks. Its rows begin at element `rows_start`
    of a slot of L1, its sums at `sums_start` of a tile of L0C. `sums_begun` says that these sums
    are not empty before its first product.
    """

    shape: ConvShape
    x: isa.Buffer
    weight: isa.Buffer
    unit_blocks: int
    rows_start: int
    sums_start: int
    sums_begun: bool


@dataclass(frozen=True, slots=True)
class WindowFeed(SlotFeed):
    """Tiles of the im2col matrix, formed from the image rows `view` of a pixel tile's window."""

    shape: ConvShape
    window: Window
    view: isa.Region

    def fill(self, slot: isa.Tile, k_at: isa.Affine, depth: int) -> None:
        """Let load3d find the taps of the window in its rows."""
        shape = self.shape
        rows = self.window.rows
        columns = self.window.columns
        c0 = isa.c0_of(shape.dtype)
        self.k.load3d(
            slot.region(0, (self.side, depth, isa.FRACTAL, c0)),
            self.view,
            kernel=(shape.r, shape.s),
            stride=shape.strides,
            pad=(rows.before, rows.after, columns.before, columns.after),
            # Rows of m images are interleaved, so rows of one image are m apart: a dilation.
            dilation=(shape.dilations[0] * shape.mixed, shape.dilations[1]),
            m_start=self.window.m_start,
            pad_value=shape.pad_value,
            k_start=k_at * c0,
        )


@dataclass(frozen=True, slots=True)
class Operands:
    """Image rows and weights of a stage in L1, and the weights in L0B if they stay there."""

    rows: isa.Tile
    weights: isa.Tile
    l0b_weights: isa.Tile | None

    def weights_from(self, k: isa.KernelBuilder, queue: isa.Queue, n: int, start: int) -> Feed:
        """Return the feed of weights of `n` output blocks from element `start` on."""
        if self.l0b_weights:
            return ResidentFeed(self.l0b_weights, n, start)
        return OrderedFeed(k, queue, n, self.weights, start)


def load_l0b_weights(
    k: isa.KernelBuilder, queue: isa.Queue, weights: isa.Tile, count: int, bias: isa.Region | None
) -> None:
    """Copy `count` fractals of weights from L1 to a slot of L0B, and the bias behind them."""
    fractal = isa.FRACTAL * isa.c0_of(weights.buffer.dtype)
    slot = queue.alloc()
    # L1 has the weights in the order of L0B: one load2d copies all of them.
    sizes = (count, fractal)
    k.load2d(slot.region(0, sizes), weights.region(0, sizes))
    if bias is not None:
        k.load2d(slot.region(count * fractal, bias.sizes), bias)
    queue.enqueue()
