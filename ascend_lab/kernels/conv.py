"""A hand-written convolution as a matrix product whose A matrix is never stored.

M = output pixels, K = (C1, kh, kw, C0), N = output channels. The feature map (N, C1, H, W, C0) goes
to L1 as rows, `load3d` forms tiles of the im2col matrix on the way to L0A, weights come in
FRACTAL_Z (C1*kh*kw, N1, 16, C0), the result leaves as (N, Cout1, OH*OW, 16).

The cores form a grid: rows share the pixels, columns the output channels. Pixel tiles never span
two images. Tiles that see the same window of rows (only moved) are one loop. Groups are bundled
until they fill channel blocks; each bundle is a product of its own.

Where one stage holds all channel blocks, rows stay in L1 for all output channels of their pixels;
where moreover a core has one tile of output channels, weights stay for all its pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ascend_lab.chip import Chip
from ascend_lab.isa import Affine, KernelBuilder, Launch, Part, Program, binding_of
from ascend_lab.kernels.conv_default import conv_schedule
from ascend_lab.kernels.conv_place import Placement, plain_placement
from ascend_lab.kernels.conv_plan import check_conv, takes_strips
from ascend_lab.kernels.conv_shape import Bundles, ConvShape, bundles_of
from ascend_lab.kernels.conv_split import RowShare, Tiles, row_shares
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
from ascend_lab.kernels.epilogue import Epilogue, check_epilogue
from ascend_lab.kernels.epilogue_emit import held_channels
from ascend_lab.kernels.epilogue_plan import chip_left, demand_of
from ascend_lab.kernels.gemm_schedule import ACCUMULATOR, FRACTAL, GemmSchedule
from ascend_lab.kernels.tiles import by_size, chunks, repeat, segments
from ascend_lab.kernels.windows import runs_of, tiles_per_image


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
    for share, share_ids in _shares(bundles_of(shape), schedule).items():
        cols = chunks(share.n1, schedule.base_n // FRACTAL, share.columns)
        for piece in pieces:
            for col_size, col_ids in by_size(cols).items():
                counts = (col_ids[-1] + 1, share_ids[-1] + 1)
                program = _program(job, piece, (share, col_size), cols[0], counts)
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
    job: _Job, piece: RowShare, own: tuple[_Share, int], col_pitch: int, counts: tuple[int, int]
) -> Program:
    share, n_own = own
    conv = new_conv(job.shape, job.schedule, job.chip, n_own, job.place, job.strip, job.epilogue)
    k, bundle = conv.builder, bundles_of(job.shape)
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
    k, tile_n = conv.builder, min(job.schedule.base_n // FRACTAL, n_own)
    once = conv.c1_stage >= bundle.c1
    n = (base[2], n_own)
    with (
        held_channels(conv.finish, n, bundle.index * bundles_of(job.shape).n1, None) as channels,
        held_weights(conv, bundle, n, once and n_own <= tile_n) as weights,
    ):
        held = Held(weights, channels)
        for image, first, last in _images(k, tiles, job.per_image):
            for run in runs_of(job.shape, job.tile, first, last, strip=job.strip):
                with repeat(k, "run", run.count) as turn:
                    for pixel, window in run.tiles:
                        at = Where(base[0] + image, bundle, n, pixel, window, turn, run, base[1])
                        _columns(conv, at, tile_n, once, held)


def _columns(conv: Conv, at: Where, tile_n: int, once: bool, held: Held) -> None:
    """The tiles of one group of pixels, one per tile of output channels; `once`: rows stay."""
    with held_rows(conv, at, once) as rows:
        for n_at, n_size in segments(conv.builder, "n", at.n[1], tile_n):
            tile(conv, replace(at, n=(at.n[0] + n_at, n_size)), rows, held)


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
