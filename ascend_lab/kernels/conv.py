"""A hand-written convolution as a matrix product whose A matrix is never stored.

M = output pixels, K = (C1, kh, kw, C0), N = output channels. The feature map (N, C1, H, W, C0) goes
to L1 as rows, `load3d` forms tiles of the im2col matrix on the way to L0A, weights come in
FRACTAL_Z (C1*kh*kw, N1, 16, C0), the result leaves as (N, Cout1, OH*OW, 16).

The cores form a grid: rows share the pixels, columns the output channels. Pixel tiles never span
two images. Tiles that see the same window of rows (only moved) are one loop. Groups are bundled
until they fill channel blocks; each bundle is a product of its own.

Where one stage holds all channel blocks, rows stay in L1 for all output channels of their pixels;
where moreover a core has one tile of output channels, weights stay for all its pixels. In order
"nm" it is the other way round: weights stay for all pixels, rows where there is one pixel tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ascend_lab.chip import Chip
from ascend_lab.isa import Affine, KernelBuilder, Launch, Part, Program, binding_of
from ascend_lab.kernels.conv_shape import Bundles, ConvShape, bundles_of
from ascend_lab.kernels.conv_tile import (
    At,
    Conv,
    Held,
    Where,
    held_rows,
    held_weights,
    new_conv,
    tile,
)
from ascend_lab.kernels.conv_windows import (
    Placement,
    RowShare,
    Tiles,
    plain_placement,
    row_shares,
    runs_of,
    tiles_per_image,
)
from ascend_lab.kernels.default_schedules import check_conv, conv_schedule, takes_strips
from ascend_lab.kernels.epilogue import Epilogue, check_epilogue, chip_left, demand_of
from ascend_lab.kernels.epilogue_emit import Channels, held_channels
from ascend_lab.kernels.gemm_schedule import ACCUMULATOR, FRACTAL, GemmSchedule
from ascend_lab.kernels.tiles import by_size, chunks, repeat, segments


def conv_launch(
    shape: ConvShape,
    chip: Chip,
    schedule: GemmSchedule | None = None,
    place: Placement | None = None,
    epilogue: Epilogue | None = None,
) -> Launch:
    """Return the kernel as a launch; raise `CapacityError` if a stage or the epilogue does not fit.

    `place` says where the output pixels go; the default fills the output row by row. `epilogue`
    is done to the sums before they are stored; its operands are tensors of the launch.
    """
    check_epilogue(epilogue, chip, ACCUMULATOR[shape.dtype])
    schedule = schedule or conv_schedule(shape, chip, epilogue)
    left = chip_left(chip, demand_of(epilogue, chip, ACCUMULATOR[shape.dtype]))
    check_conv(shape, schedule, left)
    strip = takes_strips(shape, schedule, left)
    job = _Job(shape, schedule, chip, strip, place or plain_placement(shape), epilogue)
    pieces = row_shares(shape, job.tile, schedule.grid_rows, strip=strip)
    parts: list[Part] = []
    kernels: dict[int, Conv] = {}
    for share, share_ids in _shares(bundles_of(shape), schedule).items():
        cols = chunks(share.n1, schedule.base_n // FRACTAL, share.columns)
        for piece in pieces:
            for col_size, col_ids in by_size(cols).items():
                counts = (col_ids[-1] + 1, share_ids[-1] + 1)
                if col_size not in kernels:
                    kernels[col_size] = job.kernel(col_size)
                conv = kernels[col_size]
                program = _program(conv, job, piece, (share, col_size), cols[0], counts)
                binds = [
                    _binding(program, {"row": i, "down": d, "col": c, "share": s})
                    for i, d in zip(piece.images, piece.downs, strict=True)
                    for s in share_ids
                    for c in col_ids
                ]
                parts.append(Part(program, tuple(binds)))
    return Launch(f"conv_{shape.n}x{shape.c}x{shape.h}x{shape.w}", tuple(parts))


def _binding(program: Program, values: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Bind the params that the program has."""
    return binding_of({name: values[name] for name, _ in program.params})


@dataclass(frozen=True, slots=True)
class _Job:
    """What all programs of a launch have in common."""

    shape: ConvShape
    schedule: GemmSchedule
    chip: Chip
    strip: bool
    place: Placement
    epilogue: Epilogue | None

    @property
    def tile(self) -> int:
        return self.schedule.base_m // FRACTAL

    @property
    def per_image(self) -> int:
        return tiles_per_image(self.shape, self.tile, strip=self.strip)

    def kernel(self, n_own: int) -> Conv:
        """Allocate the buffers of a core that owns `n_own` output blocks."""
        more = (self.place, self.strip, self.epilogue)
        return new_conv(self.shape, self.schedule, self.chip, n_own, *more)


@dataclass(frozen=True, slots=True)
class _Share:
    """The bundles of one core: `full` ones, and the short last one if `tail`; `n1` blocks each.

    `columns` cores divide each bundle; `pitch` bundles lie between cores (0: there is one share).
    """

    full: int
    tail: bool
    n1: int
    columns: int
    pitch: int


def _shares(bundle: Bundles, schedule: GemmSchedule) -> dict[_Share, list[int]]:
    """Divide bundles over the columns of the core grid; columns left over divide each bundle."""
    sizes = chunks(bundle.count, 1, min(schedule.grid_cols, bundle.count))
    columns = max(1, schedule.grid_cols // len(sizes))
    pitch = sizes[0] if len(sizes) > 1 else 0
    uneven = (bundle.c1, bundle.n1) != (bundle.last_c1, bundle.last_n1)
    shares: dict[_Share, list[int]] = {}
    for index, size in enumerate(sizes):
        tail = uneven and index == len(sizes) - 1
        full = size - tail
        n1 = bundle.n1 if full else bundle.last_n1
        shares.setdefault(_Share(full, tail, n1, columns, pitch), []).append(index)
    return shares


def _program(
    conv: Conv,
    job: _Job,
    piece: RowShare,
    own: tuple[_Share, int],
    col_pitch: int,
    counts: tuple[int, int],
) -> Program:
    share, n_own = own
    k, bundle = conv.builder, bundles_of(job.shape)
    k.restart()
    image = k.param("row", max(piece.images) + 1) * piece.image_pitch
    down = k.param("down", max(piece.downs) + 1) * piece.step if piece.step else Affine()
    col = k.param("col", counts[0]) * col_pitch
    first = k.param("share", counts[1]) * share.pitch if share.pitch else Affine()
    tiles, base = piece.tiles, (image, down, col)
    if share.full:
        with repeat(k, "bundle", share.full) as index:
            _bundle(conv, job, tiles, At(first + index, bundle.c1, bundle.n1), base, n_own)
    if share.tail:
        at = At(Affine(bundle.count - 1), bundle.last_c1, bundle.last_n1)
        _bundle(conv, job, tiles, at, base, bundle.last_n1 if share.full else n_own)
    return k.finish()


def _bundle(
    conv: Conv,
    job: _Job,
    tiles: Tiles,
    bundle: At,
    base: tuple[Affine, Affine, Affine],
    n_own: int,
) -> None:
    """All output tiles of one bundle on one core; `base`: images, rows and blocks before it."""
    n = (base[2], n_own)
    walk = _Walk(conv, job, tiles, bundle, base[:2], n)
    with held_channels(conv.finish, n, walk.blocks_before, None) as channels:
        if job.schedule.order == "mn" or tiles[1] - tiles[0] == 1:
            _pixels_outside(walk, channels)
        else:
            _channels_outside(walk, channels)


@dataclass(frozen=True, slots=True)
class _Walk:
    """The output tiles of one bundle on one core; `base`: images and rows before it."""

    conv: Conv
    job: _Job
    tiles: Tiles
    bundle: At
    base: tuple[Affine, Affine]
    n: tuple[Affine, int]

    @property
    def once(self) -> bool:
        """Whether one stage holds all channel blocks."""
        return self.conv.c1_stage >= self.bundle.c1

    @property
    def tile_n(self) -> int:
        return min(self.job.schedule.base_n // FRACTAL, self.n[1])

    @property
    def blocks_before(self) -> Affine:
        return self.bundle.index * bundles_of(self.job.shape).n1

    def across(self) -> Iterator[tuple[Affine, int]]:
        """Loop over the tiles of output channels."""
        for at, size in segments(self.conv.builder, "n", self.n[1], self.tile_n):
            yield self.n[0] + at, size

    def down(self, n: tuple[Affine, int]) -> Iterator[Where]:
        """Loop over the tiles of pixels."""
        k, job = self.conv.builder, self.job
        for image, first, last in _images(k, self.tiles, job.per_image):
            for run in runs_of(job.shape, job.tile, first, last, strip=job.strip):
                with repeat(k, "run", run.count) as turn:
                    for pixel, window in run.tiles:
                        at = self.base[0] + image
                        yield Where(at, self.bundle, n, pixel, window, turn, run, self.base[1])


def _pixels_outside(walk: _Walk, channels: Channels | None) -> None:
    """For each tile of pixels all output channels; rows stay, and weights where they are one."""
    hold = walk.once and walk.n[1] <= walk.tile_n
    with held_weights(walk.conv, walk.bundle, walk.n, hold) as weights:
        for at in walk.down(walk.n):
            with held_rows(walk.conv, at, walk.once) as rows:
                for n in walk.across():
                    tile(walk.conv, replace(at, n=n), rows, Held(weights, channels))


def _channels_outside(walk: _Walk, channels: Channels | None) -> None:
    """For each tile of output channels all pixels; weights stay."""
    conv = walk.conv
    for n in walk.across():
        with (
            held_channels(conv.finish, n, walk.blocks_before, channels) as held,
            held_weights(conv, walk.bundle, n, walk.once) as weights,
        ):
            for at in walk.down(n):
                tile(conv, at, None, Held(weights, held))


def _images(k: KernelBuilder, tiles: Tiles, per_image: int) -> Iterator[tuple[Affine, int, int]]:
    """Yield (image, first tile, last tile): a part image, a loop over whole ones, a part."""
    at, end = tiles
    if at % per_image:
        stop = min(end, at - at % per_image + per_image)
        yield Affine(at // per_image), at % per_image, at % per_image + stop - at
        at = stop
    whole = (end - at) // per_image
    if whole:
        with k.loop("image", whole) as image:
            yield image + at // per_image, 0, per_image
        at += whole * per_image
    if at < end:
        yield Affine(at // per_image), 0, end - at
