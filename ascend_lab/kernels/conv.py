"""A hand-written convolution as a matrix product whose A matrix is never stored.

M = output pixels, K = (C1, kh, kw, C0), N = output channels. The feature map (N, C1, H, W, C0) goes
to L1 as rows, `load3d` forms tiles of the im2col matrix on the way to L0A, weights come in
FRACTAL_Z (C1*kh*kw, N1, 16, C0), the result leaves as (N, Cout1, OH*OW, 16).

The cores form a grid: rows share the pixels, columns the output channels. Pixel tiles end with
their image, unless rows of several images take turns (`stacked`). Tiles that see the same window of
rows (only moved) are one loop. Groups are bundled until they fill channel blocks;
each bundle is a product of its own. Weights of several pixel tiles that fit L0B twice, all taps and
channel blocks of them, stay there.

Where one stage holds all channel blocks, rows stay in L1 for all output channels of their pixels;
where moreover a core has one tile of output channels, weights stay for all its pixels. In order
"nm" it is the other way round: weights stay for all pixels, rows where there is one pixel tile.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from ascend_lab import isa
from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.isa import ACCUMULATOR, FRACTAL, up
from ascend_lab.kernels import conv_schedules, epilogue_emit, tiles as steps
from ascend_lab.kernels.conv_shape import ConvShape, bundles_of, units_of
from ascend_lab.kernels.conv_stage import (
    BundlePlace,
    BundleShare,
    CubeBias,
    Feeds,
    add_stage,
    bundle_shares,
    keep_near,
)
from ascend_lab.kernels.conv_windows import (
    Pixels,
    Placement,
    RowShare,
    area_of,
    plain_placement,
    row_shares,
    rows_of,
    runs_of,
    tiles_per_image,
    unit_elements,
)
from ascend_lab.kernels.epilogue import Epilogue, check_epilogue
from ascend_lab.kernels.epilogue_plan import chip_left, demand_of
from ascend_lab.kernels.gemm_schedule import GemmSchedule
from ascend_lab.kernels.rows import Pooled, check_pool
from ascend_lab.kernels.tiles import Span, by_size, chunks, out_queue, repeat, segments, store_area


def conv_launch(
    shape: ConvShape,
    chip: Chip,
    schedule: GemmSchedule | None = None,
    place: Placement | None = None,
    epilogue: Epilogue | None = None,
) -> isa.Launch:
    """Return the kernel as a launch; raise `CapacityError` if a stage or the epilogue does not fit.

    `place` says where the output pixels go; the default fills the output row by row. `epilogue`
    is done to the sums before they are stored; its operands are tensors of the launch.
    """
    check_epilogue(epilogue, chip, ACCUMULATOR[shape.dtype])
    check_pool(shape, chip, epilogue)
    schedule = schedule or conv_schedules.conv_schedule(shape, chip, epilogue)
    if schedule.window == "stacked":
        shape, place = conv_schedules.as_one_image(shape, place)
    left = chip_left(chip, demand_of(epilogue, chip, ACCUMULATOR[shape.dtype]))
    conv_schedules.check_conv(shape, schedule, left)
    strip = conv_schedules.takes_strips(shape, schedule, left)
    job = _Job(shape, schedule, chip, strip, place or plain_placement(shape), epilogue)
    pieces = row_shares(shape, job.tile, schedule.grid_rows, strip=strip)
    job = replace(job, turns=min(last - first for first, last in (p.tiles for p in pieces)))
    parts: list[isa.Part] = []
    writers: dict[int, _Writer] = {}
    for share, share_ids in bundle_shares(shape, schedule.grid_cols).items():
        cols = chunks(share.n1, schedule.base_n // FRACTAL, share.columns)
        for piece in pieces:
            for size, ids in by_size(cols).items():
                counts = (ids[-1] + 1, share_ids[-1] + 1)
                if size not in writers:
                    writers[size] = _Writer(job, size)
                program = writers[size].program(piece, share, cols[0], counts)
                names = [name for name, _ in program.params]
                places = [
                    {"row": i, "down": d, "col": c, "share": s}
                    for i, d in zip(piece.images, piece.downs, strict=True)
                    for s in share_ids
                    for c in ids
                ]
                binds = tuple(isa.binding_of({name: at[name] for name in names}) for at in places)
                parts.append(isa.Part(program, binds))
    return isa.Launch(f"conv_{shape.n}x{shape.c}x{shape.h}x{shape.w}", tuple(parts))


@dataclass(frozen=True, slots=True)
class _Job:
    """What all programs of a launch have in common; each has `turns` pixel tiles at least."""

    shape: ConvShape
    schedule: GemmSchedule
    chip: Chip
    strip: bool
    place: Placement
    epilogue: Epilogue | None
    turns: int = 1

    @property
    def tile(self) -> int:
        """Fractals of pixels of a tile."""
        return self.schedule.base_m // FRACTAL


@dataclass(frozen=True, slots=True)
class _Held:
    """What a loop outside holds: weights and rows of all channel blocks, numbers per channel.

    `near` are weights, and the bias that the cube adds, in L0B.
    """

    weights: isa.Tile | None
    near: isa.Tile | None
    channels: epilogue_emit.Channels | None
    rows: isa.Tile | None = None


class _Writer:
    """Buffers of the cores that own `n_own` output blocks, and their programs one after another."""

    def __init__(self, job: _Job, n_own: int) -> None:
        """Allocate tensors and queues."""
        shape, schedule, chip = job.shape, job.schedule, job.chip
        self.job, self.shape, self.n_own, self.c0 = job, shape, n_own, isa.c0_of(shape.dtype)
        self.bundle, self.area = bundles_of(shape), FRACTAL * self.c0
        (oh, ow), dtype, n1 = shape.out_hw, shape.dtype, shape.blocks[1]
        tile_m = min(job.tile, up(ow if job.strip else oh * ow, FRACTAL))
        tile_n = min(schedule.base_n // FRACTAL, n_own)
        stage, units = conv_schedules.c1_stage(shape, schedule), units_of(shape)
        self.units, self.stage = units, stage
        self.tile_k = tile_k = min(schedule.base_k // self.c0, stage * units.depth)
        self.image, more = (stage * n for n in unit_elements(shape, job.tile, strip=job.strip))
        image, weights = self.image + more, stage * units.depth * tile_n * self.area
        k = self.k = isa.KernelBuilder(f"conv_{n_own * FRACTAL}", chip)
        out_dtype = job.epilogue.out_dtype if job.epilogue else shape.out_dtype
        self._declare_operands()
        self.y = k.tensor("y", out_dtype, shape.images * n1 * job.place.plane * FRACTAL)
        a, b = schedule.a_l1_slots, schedule.b_l1_slots
        self.rows = k.queue("x_l1", "L1", dtype, image, src="MTE2", dst="MTE1", depth=a)
        self.weights = k.queue("w_l1", "L1", dtype, weights, src="MTE2", dst="MTE1", depth=b)
        a, b = schedule.a_l0_slots, schedule.b_l0_slots
        left, right = (side * tile_k * self.area for side in (tile_m, tile_n))
        bias = job.epilogue.bias if job.epilogue else ""
        every = (units.every + bool(bias)) * tile_n * self.area
        fits = (b or 2) * every * DTYPE_BYTES[dtype] <= chip.buffers["L0B"]
        self.near = job.turns > 1 and stage >= units.count and fits
        right = max(right, every) if self.near else right
        self.left = k.queue("x_l0", "L0A", dtype, left, src="MTE1", dst="M", depth=a)
        self.right = k.queue("w_l0", "L0B", dtype, right, src="MTE1", dst="M", depth=b)
        sums = ACCUMULATOR[dtype]
        two = tile_n * shape.sums
        self.acc = steps.sum_queue(k, "y_l0", sums, tile_m, two, schedule.c_l0_slots)
        self.second = (shape.sums - 1) * tile_m * tile_n * FRACTAL**2
        plain = chip.combined and job.epilogue is None
        self.out = out_queue(k, shape.out_dtype, tile_m, tile_n) if plain else None
        sizes = epilogue_emit.Sizes(tile_m, tile_n, n_own, n1, self.y.elements)
        self.pooled = Pooled(k, shape, job.epilogue, sizes, job.tile) if shape.pool else None
        own = None if self.pooled else epilogue_emit.new_finish(k, job.epilogue, sums, sizes)
        self.finish = self.pooled.finish if self.pooled else own
        self.bias = CubeBias.make(k, bias, shape, n_own) if bias else None

    def _declare_operands(self) -> None:
        """Declare the tensors of images and weights."""
        k, shape, bundle, other = self.k, self.shape, self.bundle, self.shape.beside
        (c1, n1), last = shape.blocks, bundle.last_c1 * bundle.last_n1
        taps = shape.phase[0] * shape.s or shape.taps
        fractals = ((bundle.count - 1) * bundle.c1 * bundle.n1 + last) * taps
        self.x = k.tensor("x", shape.dtype, shape.images * c1 * shape.plane)
        self.weight = k.tensor(self.job.place.weight, shape.dtype, fractals * self.area)
        self.other_x, self.other_weight = self.x, self.weight
        if other and not shape.phase[0]:
            blocks = other.blocks[0]
            self.other_x = k.tensor("beside", shape.dtype, other.images * blocks * other.plane)
            self.other_weight = k.tensor("beside_weight", shape.dtype, blocks * n1 * self.area)

    # -- loops ------------------------------------------------------------------------------------
    def program(
        self, piece: RowShare, share: BundleShare, col_pitch: int, counts: tuple[int, int]
    ) -> isa.Program:
        """Return the program of the cores with these pixel tiles and bundles."""
        k, bundle = self.k, self.bundle
        k.restart()
        image = k.param("row", max(piece.images) + 1) * piece.image_pitch
        down = k.param("down", max(piece.downs) + 1) * piece.step if piece.step else isa.Affine()
        col = k.param("col", counts[0]) * col_pitch
        first = k.param("share", counts[1]) * share.pitch if share.pitch else isa.Affine()
        base = (image, down)
        if self.bias:
            self.bias.load(share, first, col)
        if self.pooled:
            self.pooled.begin()
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
        count, before = at.c1 // self.units.c1, at.index * self.bundle.n1
        once = self.stage >= count
        tile_n = min(self.job.schedule.base_n // FRACTAL, n[1])

        def across() -> Iterator[Span]:
            for start, size in segments(self.k, "n", n[1], tile_n):
                yield n[0] + start, size

        every = isa.Affine(), count

        def load_weights(some: Span) -> Callable[[], None]:
            return partial(self._stage_weights, at, some, every)

        with epilogue_emit.held_channels(self.finish, n, before, None) as channels:
            if self.job.schedule.order == "mn" or tiles[1] - tiles[0] == 1:
                keep = once and n[1] <= tile_n
                with self._weights(at, n, n[0], load_weights(n) if keep else None) as stay:
                    for pixels in self._pixels(tiles, base):
                        load = partial(self._stage_rows, at, pixels, every) if once else None
                        with self._kept(self.rows, load) as rows:
                            for some in across():
                                held = _Held(*stay, channels, rows)
                                self._tile(at, pixels, some, n[0], held)
                return
            for some in across():
                with (
                    epilogue_emit.held_channels(self.finish, some, before, channels) as own,
                    self._weights(at, some, n[0], load_weights(some) if once else None) as stay,
                ):
                    for pixels in self._pixels(tiles, base):
                        self._tile(at, pixels, some, n[0], _Held(*stay, own))

    def _pixels(
        self, tiles: tuple[int, int], base: tuple[isa.Affine, isa.Affine]
    ) -> Iterator[Pixels]:
        """Loop over the tiles of pixels."""
        job = self.job
        for image, first, last in self._images(tiles):
            for run in runs_of(self.shape, job.tile, first, last, strip=job.strip):
                with repeat(self.k, "run", run.count) as turn:
                    for pixel, windows in run.tiles:
                        yield Pixels(base[0] + image, pixel, windows, run, turn, base[1])

    def _images(self, tiles: tuple[int, int]) -> Iterator[tuple[isa.Affine, int, int]]:
        """Yield (image, first tile, last tile): a part image, a loop over whole ones, a part."""
        per_image = tiles_per_image(self.shape, self.job.tile, strip=self.job.strip)
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

    # -- one tile ---------------------------------------------------------------------------------
    def _tile(self, bundle: BundlePlace, at: Pixels, n: Span, col: isa.Affine, held: _Held) -> None:
        """One tile of the core's blocks, which begin at `col`: sum over taps and blocks, store."""
        before = bundle.index * self.bundle.n1
        with epilogue_emit.held_channels(self.finish, n, before, held.channels) as channels:
            c = self.acc.alloc()
            bias = epilogue_emit.bias_of(self.finish, channels, n)
            for stage in segments(self.k, "stage", bundle.c1 // self.units.c1, self.stage):
                if held.rows is None:
                    self._stage_rows(bundle, at, stage)
                if held.weights is None:
                    self._stage_weights(bundle, n, stage)
                x, w = held.rows or self.rows.dequeue(), held.weights or self.weights.dequeue()
                feeds, starts = Feeds(self.left, self.right, self.tile_k), (self.image, self.second)
                sources, sizes = (x, w, held.near), (n[1], *stage)
                add_stage(self.k, self.shape, feeds, c, at.windows, sources, sizes, bias, starts)
                for queue, tile in ((self.rows, held.rows), (self.weights, held.weights)):
                    if tile is None:
                        queue.free()
            if self.bias:
                blocks, near = (self._place(bundle, n, col), n[1]), None
                if held.near:
                    start = self._depth(bundle) * n[1] * self.area
                    near = held.near.region(start, (1, n[1], FRACTAL, self.c0))
                self.bias.add(c, (self.left, self.right), at.window.fractals, blocks, near)
            self.acc.enqueue()
            self._store(at, n, before, channels)

    def _depth(self, bundle: BundlePlace) -> int:
        """Return the fractals of depth of a bundle."""
        return bundle.c1 // self.units.c1 * self.units.depth

    def _place(self, bundle: BundlePlace, n: Span, col: isa.Affine) -> isa.Affine:
        """Return the place of blocks `n` among those whose bias is in L1."""
        return bundle.place * self.n_own + n[0] - col

    @contextmanager
    def _weights(
        self, at: BundlePlace, n: Span, col: isa.Affine, stage: Callable[[], None] | None
    ) -> Iterator[tuple[isa.Tile | None, isa.Tile | None]]:
        """Hold the weights that `stage` loads for all tiles inside, in L1 and, if they fit, L0B."""

        def load() -> None:
            assert weights is not None
            blocks = self._place(at, n, col), n[1]
            bias = self.bias.blocks(blocks) if self.bias else None
            keep_near(self.k, self.right, weights, self._depth(at) * n[1], bias)

        with (
            self._kept(self.weights, stage) as weights,
            self._kept(self.right, load if stage and self.near else None) as near,
        ):
            yield weights, near

    @contextmanager
    def _kept(
        self, queue: isa.Queue, stage: Callable[[], None] | None
    ) -> Iterator[isa.Tile | None]:
        """Hold what `stage` loads for all tiles inside; without it they load their own."""
        if stage is None:
            yield None
            return
        stage()
        yield queue.dequeue()
        queue.free()

    def _stage_rows(self, bundle: BundlePlace, at: Pixels, stage: Span) -> None:
        """Bring windows of some units to L1."""
        shape, other, units, to = self.shape, self.shape.beside, self.units, self.rows.alloc()
        first = at.image * (shape.blocks[0] * shape.mixed) + bundle.index * self.bundle.c1
        down = at.turn * at.run.rows + at.down * shape.strides[0]
        blocks = first + stage[0] * units.c1, stage[1] * units.c1
        source = rows_of(shape, self.x, at.window, blocks, down)
        self.k.copy(to.region(0, source.sizes), source)
        if other:
            first = at.image * (other.blocks[0] * other.mixed) + stage[0] * units.beside
            blocks = first, stage[1] * units.beside
            down = at.turn * (at.run.pixels // shape.out_hw[1]) + at.down
            source = rows_of(other, self.other_x, at.windows[1], blocks, down)
            self.k.copy(to.region(self.image, source.sizes), source)
        self.rows.enqueue()

    def _stage_weights(self, at: BundlePlace, n: Span, stage: Span) -> None:
        """Bring the weights of some units and output blocks to L1."""
        shape, other, units, to = self.shape, self.shape.beside, self.units, self.weights.alloc()
        start, row, width = isa.Affine(), at.n1 * self.area, n[1] * self.area
        first = at.index * (self.bundle.c1 * shape.taps * self.bundle.n1 * self.area)
        parts = [(self.weight, shape, units.c1)]
        parts += [(self.other_weight, other, units.beside)] if other else []
        for tensor, one, blocks in parts:
            depth, (rows, tap, _), line = blocks * one.taps, one.phase, one.s * row
            first += stage[0] * (blocks * (rows * one.s or one.taps) * row) + n[0] * self.area
            weights = tensor.region(first, (stage[1] * depth, width), (row, 1))
            if rows:
                sizes = stage[1] * blocks, one.r, one.s, width
                strides = rows * line, one.stored[1] * line, row, 1
                weights = tensor.region(first + tap * line, sizes, strides)
            self.k.copy(to.region(start, weights.sizes), weights)
            first, start = isa.Affine(), start + stage[1] * depth * width
        self.weights.enqueue()

    def _store(
        self, at: Pixels, n: Span, before: isa.Affine, channels: epilogue_emit.Channels | None
    ) -> None:
        """Write the tile as one run where the plane is filled in order, else row by row."""
        place, ow, acc, out = self.job.place, self.shape.out_hw[1], self.acc, self.out
        first = at.image * (self.shape.blocks[1] * self.shape.mixed)
        plane = (first + before + n[0]) * place.plane
        plain = not self.job.strip and place == plain_placement(self.shape)
        if plain and self.finish is None:
            start = (plane + at.turn * at.run.pixels + at.down * ow + at.pixel) * FRACTAL
            sizes = (at.window.fractals, n[1])
            steps.store_tile(self.k, acc, out, self.y, sizes, start, place.plane // FRACTAL)
            return
        row = at.turn * (at.run.pixels // ow) + at.down
        if self.pooled:
            tile = n[1], at.window.fractals, at.windows[1]
            self.pooled.drain(acc, self.y, (plane, row), tile, n[0], channels)
            return
        wide = self.finish.width if self.finish else FRACTAL
        area = area_of(self.shape, place, plane, row, (at.pixel, n[1], at.window), wide)
        if self.finish is None:
            store_area(self.k, acc, out, self.y, area)
        else:
            epilogue_emit.drain(self.finish, acc, self.y, area, n[0], channels)
