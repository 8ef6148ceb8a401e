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
Where a tile takes several stages, rows and weights of one fill a slot of L1 together, of up to four
(`stages_ahead`): memory is late once, not once a stage. A bias that the cube adds begins the sums.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

from ascend_lab.machine import isa
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.operators.kernels import (
    conv_schedules,
    conv_tiles,
    conv_windows,
    epilogue_emit,
    tiles,
)
from ascend_lab.operators.kernels.conv_shape import ConvShape, units_of
from ascend_lab.operators.kernels.conv_tiles import BundlePlace, BundleShare, Feeds, Held, Job, Walk
from ascend_lab.operators.kernels.conv_windows import Pixels
from ascend_lab.operators.kernels.epilogue import Epilogue, check_epilogue, halves
from ascend_lab.operators.kernels.epilogue_plan import CubeBias, chip_left, demand_of
from ascend_lab.operators.kernels.gemm_schedule import GemmSchedule
from ascend_lab.operators.kernels.mix import After, VectorWriter, to_ring
from ascend_lab.operators.kernels.rows import Pooled, check_pool
from ascend_lab.operators.kernels.tiles import (
    Span,
    by_size,
    chunks,
    out_queue,
    segments,
    store_area,
)


def conv_launch(
    shape: ConvShape,
    chip: Chip,
    schedule: GemmSchedule | None = None,
    place: conv_windows.Placement | None = None,
    epilogue: Epilogue | None = None,
) -> isa.Launch:
    """Return the kernel as a launch; raise `CapacityError` if a stage or the epilogue does not fit.

    `place` says where the output pixels go; the default fills the output row by row. `epilogue`
    is done to the sums before they are stored; its operands are tensors of the launch.
    """
    sums = isa.ACCUMULATOR[shape.dtype]
    head, tail = halves(epilogue, chip, sums)
    check_epilogue(head, chip, sums)
    check_pool(shape, chip, epilogue)
    schedule = schedule or conv_schedules.conv_schedule(shape, chip, epilogue)
    if schedule.window == "stacked":
        shape, place = conv_schedules.as_stacked(shape, place)
    left = chip_left(chip, demand_of(epilogue, chip, sums))
    conv_schedules.check_conv(shape, schedule, left)
    strip = conv_schedules.takes_strips(shape, schedule, left)
    place = place or conv_windows.plain_placement(shape)
    ids = chip.event_ids
    ids -= bool(head and head.bias)
    ahead = conv_schedules.stages_ahead(shape, schedule, left, ids, strip=strip)
    job = Job(shape, schedule, chip, strip, place, head, ahead=ahead)
    if tail:
        cores = schedule.grid_rows * schedule.grid_cols
        arrives = head.out_dtype if head else sums
        size = job.elements
        n1 = shape.blocks[1]
        after = After(tail, arrives, job.sides(shape.blocks[1]), (1, cores), n1, size)
        job = replace(job, after=after)
    return isa.Launch(f"conv_{shape.n}x{shape.c}x{shape.h}x{shape.w}", *_parts(job))


def _parts(job: Job) -> tuple[tuple[isa.Part, ...], int]:
    """Return the programs of all cores, and how many of them make an AI core of a mix launch."""
    schedule = job.schedule
    parts = list[isa.Part]()
    cores = 0
    after = job.chip.vector_cores_per_core if job.after else 0
    pieces = conv_windows.row_shares(job.shape, job.tile, schedule.grid_rows, strip=job.strip)
    job = replace(job, turns=min(last - first for first, last in (p.tiles for p in pieces)))
    writers: dict[int, tuple[Walk, ...]] = {}
    for share, share_ids in conv_tiles.bundle_shares(job.shape, schedule.grid_cols).items():
        cols = chunks(share.n1, schedule.base_n // isa.FRACTAL, share.columns)
        for piece in pieces:
            for size, ids in by_size(cols).items():
                counts = (ids[-1] + 1, share_ids[-1] + 1)
                if size not in writers:
                    writers[size] = (_Writer(job, size), *_after(job, size))
                made = [w.program(piece, share, cols[0], counts) for w in writers[size]]
                made += made[1:] * (after + 1 - len(made))
                places = [
                    {"row": i, "down": d, "col": c, "share": s}
                    for i, d in zip(piece.images, piece.downs, strict=True)
                    for s in share_ids
                    for c in ids
                ]
                for aiv, program in enumerate(made, -1):
                    every = [{**at, "core": cores + i, "aiv": aiv} for i, at in enumerate(places)]
                    names = [name for name, _ in program.params]
                    binds = tuple(isa.binding_of({n: at[n] for n in names}) for at in every)
                    parts.append(isa.Part(program, binds))
                cores += len(places)
    return tuple(parts), after and 1 + after


def _after(job: Job, n_own: int) -> list[Walk]:
    """Return what writes the programs of vector cores: one for all where their shares are alike."""
    count = job.chip.vector_cores_per_core if job.after else 0
    if job.even and count:
        return [_AfterWriter(job, n_own, isa.var("aiv"))]
    return [_AfterWriter(job, n_own, number) for number in range(count)]


class _AfterWriter(Walk):
    """The programs of a vector core: the steps on its share of every tile of its cube core."""

    def __init__(self, job: Job, n_own: int, number: isa.Affine | int) -> None:
        """Allocate queues."""
        super().__init__(job, n_own, f"after_{n_own * isa.FRACTAL}")
        assert job.after is not None
        own = job.sides(n_own)[0], n_own
        self.write = VectorWriter(self.k, job.after, "y", isa.var("core"), number, own)
        self.finish = self.write.finish

    def begin(self, share: BundleShare, first: isa.Affine, col: isa.Affine) -> None:
        """Declare the number of the core."""
        if isinstance(self.write.number, isa.Affine):
            self.k.param("aiv", self.job.chip.vector_cores_per_core)

    def tile(self, bundle: BundlePlace, at: Pixels, n: Span, col: isa.Affine, held: Held) -> None:
        """Do the steps on a share of a tile."""
        before = bundle.index * self.bundle.n1
        self.write.tile(self.area(at, n, before), n, before, held.channels)


class _Writer(Walk):
    """Buffers of the cores that own `n_own` output blocks, and their programs one after another."""

    def __init__(self, job: Job, n_own: int) -> None:
        """Allocate tensors and queues."""
        super().__init__(job, n_own, f"conv_{n_own * isa.FRACTAL}")
        shape = job.shape
        schedule = job.schedule
        chip = job.chip
        k = self.k
        self.c0, dtype, sums = isa.c0_of(shape.dtype), shape.dtype, isa.ACCUMULATOR[shape.dtype]
        self.fractal, (tile_m, tile_n) = isa.FRACTAL * self.c0, job.sides(n_own)
        stage = self.stage = conv_schedules.c1_stage(shape, schedule)
        units = self.units = units_of(shape)
        self.tile_k = min(schedule.base_k // self.c0, stage * units.depth)
        each, more = conv_windows.unit_elements(shape, job.tile, strip=job.strip)
        self.image = stage * each
        image = stage * (each + more)
        weights = stage * units.depth * tile_n * self.fractal
        self._declare_tensors()
        a = schedule.a_l1_slots
        b = schedule.b_l1_slots
        ahead = job.ahead
        self.rows = k.queue("x_l1", "L1", dtype, image, src="MTE2", dst="MTE1", depth=ahead or a)
        self.with_rows = self.rows.join("w_l1", dtype, weights) if ahead else None
        if not ahead:
            self.weights = k.queue("w_l1", "L1", dtype, weights, src="MTE2", dst="MTE1", depth=b)
        a = schedule.a_l0_slots
        b = schedule.b_l0_slots
        left, right = (side * self.tile_k * self.fractal for side in (tile_m, tile_n))
        bias = job.epilogue.bias if job.epilogue else ""
        every = (units.every + bool(bias)) * tile_n * self.fractal
        fits = (b or 2) * every * DTYPE_BYTES[dtype] <= chip.buffers["L0B"]
        self.near = job.turns > 1 and stage >= units.count and fits
        right = max(right, every) if self.near else right
        self.left = k.queue("x_l0", "L0A", dtype, left, src="MTE1", dst="M", depth=a)
        self.right = k.queue("w_l0", "L0B", dtype, right, src="MTE1", dst="M", depth=b)
        left = chip.buffers["L0C"] - k.used_bytes("L0C")
        slots = schedule.c_l0_slots or 1 + (2 * tile_m * tile_n * shape.sums * 1024 <= left)
        self.acc = tiles.sum_queue(k, "y_l0", sums, tile_m, tile_n * shape.sums, slots)
        self.second = (shape.sums - 1) * tile_m * tile_n * isa.FRACTAL**2
        plain = chip.combined and job.epilogue is None
        ub = k.used_bytes("UB")
        self.out = out_queue(k, shape.out_dtype, tile_m, tile_n) if plain else None
        sizes = epilogue_emit.Sizes(tile_m, tile_n, n_own, shape.blocks[1], job.elements, taken=ub)
        self.pooled = Pooled(k, shape, job.epilogue, sizes, job.tile) if shape.pool else None
        finish = None if self.pooled else epilogue_emit.new_finish(k, job.epilogue, sums, sizes)
        self.finish = self.pooled.finish if self.pooled else finish
        self.bias = CubeBias.make(k, bias, shape, n_own, told=stage < units.count) if bias else None

    def _declare_tensors(self) -> None:
        """Declare the tensors of images, weights and, unless others store it, the result."""
        k = self.k
        shape = self.shape
        bundle = self.bundle
        other = self.shape.beside
        (c1, n1) = shape.blocks
        last = bundle.last_c1 * bundle.last_n1
        after = self.job.after
        fractals = ((bundle.count - 1) * bundle.c1 * bundle.n1 + last) * shape.taps
        self.x = k.tensor("x", shape.dtype, shape.images * c1 * shape.plane)
        self.weight = k.tensor(self.job.place.weight, shape.dtype, fractals * self.fractal)
        if other:
            blocks = other.blocks[0]
            self.other_x = k.tensor("beside", shape.dtype, other.images * blocks * other.plane)
            self.other_weight = k.tensor("beside_weight", shape.dtype, blocks * n1 * self.fractal)
        self.ring = after and k.ring_out(after.ring, isa.var("core"), "FIX")
        if not after:
            out_dtype = self.job.epilogue.out_dtype if self.job.epilogue else shape.out_dtype
            self.y = k.tensor("y", out_dtype, self.job.elements)

    # -- one tile ---------------------------------------------------------------------------------
    def begin(self, share: BundleShare, first: isa.Affine, col: isa.Affine) -> None:
        """Load the bias that the cube adds; surround what is pooled."""
        if self.bias:
            self.bias.load(share.full, share.tail, first, col)
        if self.pooled:
            self.pooled.begin()

    def tile(self, bundle: BundlePlace, at: Pixels, n: Span, col: isa.Affine, held: Held) -> None:
        """One tile of the core's blocks, which begin at `col`: sum over taps and blocks, store."""
        before = bundle.index * self.bundle.n1
        with epilogue_emit.held_channels(self.finish, n, before, held.channels) as channels:
            c = self.acc.alloc()
            bias = epilogue_emit.bias_of(self.finish, channels, n)
            there = self.stage < self.units.count or held.weights or held.rows
            if there:
                self._begin_sums(c, bundle, at, (n, col), held.near)
            for stage in segments(self.k, "stage", bundle.c1 // self.units.c1, self.stage):
                if held.rows is None:
                    self._stage_rows(bundle, at, stage, n)
                if held.weights is None and not self.with_rows:
                    self._stage_weights(bundle, n, stage)
                x = held.rows or self.rows.dequeue()
                if self.with_rows:
                    w = isa.Tile(self.with_rows, x.slot)
                else:
                    w = held.weights or self.weights.dequeue()
                if not there:
                    self._begin_sums(c, bundle, at, (n, col), held.near)
                feeds = Feeds(self.left, self.right, self.tile_k)
                starts = (self.image, self.second)
                sources = (x, w, held.near)
                sizes = (n[1], *stage)
                begun = bool(self.bias)
                places = at.windows, sources, sizes, bias, starts
                conv_tiles.add_stage(self.k, self.shape, feeds, c, *places, begun=begun)
                if held.rows is None:
                    self.rows.free()
                if held.weights is None and not self.with_rows:
                    self.weights.free()
            self.acc.enqueue()
            self._store(at, n, before, channels)

    def _begin_sums(
        self,
        c: isa.Tile,
        at: BundlePlace,
        pixels: Pixels,
        n: tuple[Span, isa.Affine],
        near: isa.Tile | None,
    ) -> None:
        """Begin a tile with the bias that the cube adds, which is there before the first rows."""
        if self.bias is None:
            return
        blocks = (self._place(at, *n), n[0][1])
        bias = None
        if near:
            start = self._depth(at) * n[0][1] * self.fractal
            bias = near.region(start, (1, n[0][1], isa.FRACTAL, self.c0))
        self.bias.add(c, (self.left, self.right), pixels.window.fractals, blocks, bias)

    def _depth(self, bundle: BundlePlace) -> int:
        """Return the fractals of depth of a bundle."""
        return bundle.c1 // self.units.c1 * self.units.depth

    def _place(self, bundle: BundlePlace, n: Span, col: isa.Affine) -> isa.Affine:
        """Return the place of blocks `n` among those whose bias is in L1."""
        return bundle.place * self.n_own + n[0] - col

    @contextmanager
    def hold_weights(
        self, at: BundlePlace, n: Span, col: isa.Affine, *, across: bool
    ) -> Iterator[conv_tiles.Weights]:
        """Hold all weights of blocks `n` in L1 and, if they fit, L0B, where one stage has them."""
        every = isa.Affine(), at.c1 // self.units.c1
        once = self.stage >= every[1] and not across and not self.with_rows

        def load() -> None:
            assert weights is not None
            blocks = self._place(at, n, col), n[1]
            bias = self.bias.blocks(blocks) if self.bias else None
            conv_tiles.keep_near(self.k, self.right, weights, self._depth(at) * n[1], bias)

        if not once:
            yield None, None
            return
        with (
            self._kept(self.weights, partial(self._stage_weights, at, n, every)) as weights,
            self._kept(self.right, load if self.near else None) as near,
        ):
            yield weights, near

    def hold_rows(self, at: BundlePlace, pixels: Pixels) -> AbstractContextManager[isa.Tile | None]:
        """Hold rows of all channel blocks, where one stage has them."""
        every = isa.Affine(), at.c1 // self.units.c1
        once = self.stage >= every[1] and not self.with_rows
        return self._kept(self.rows, partial(self._stage_rows, at, pixels, every) if once else None)

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

    def _stage_rows(
        self, bundle: BundlePlace, at: Pixels, stage: Span, n: Span | None = None
    ) -> None:
        """Bring windows of some units to L1."""
        shape = self.shape
        other = self.shape.beside
        units = self.units
        to = self.rows.alloc()
        first = at.image * (shape.blocks[0] * shape.mixed) + bundle.index * self.bundle.c1
        down = at.turn * at.run.rows + at.down * shape.strides[0]
        blocks = first + stage[0] * units.c1, stage[1] * units.c1
        source = conv_windows.rows_of(shape, self.x, at.window, blocks, down)
        self.k.copy(to.region(0, source.sizes), source)
        if other:
            first = at.image * (other.blocks[0] * other.mixed) + stage[0] * units.beside
            blocks = first, stage[1] * units.beside
            down = at.turn * (at.run.pixels // shape.out_hw[1]) + at.down
            source = conv_windows.rows_of(other, self.other_x, at.windows[1], blocks, down)
            self.k.copy(to.region(self.image, source.sizes), source)
        if self.with_rows and n:
            self._copy_weights(bundle, n, stage, isa.Tile(self.with_rows, to.slot))
        self.rows.enqueue()

    def _stage_weights(self, at: BundlePlace, n: Span, stage: Span) -> None:
        """Bring the weights of some units and output blocks to L1."""
        self._copy_weights(at, n, stage, self.weights.alloc())
        self.weights.enqueue()

    def _copy_weights(self, at: BundlePlace, n: Span, stage: Span, to: isa.Tile) -> None:
        """Bring the weights of some units and output blocks to a slot of L1."""
        shape = self.shape
        other = self.shape.beside
        units = self.units
        start = isa.Affine()
        row = at.n1 * self.fractal
        width = n[1] * self.fractal
        first = at.index * (self.bundle.c1 * shape.taps * self.bundle.n1 * self.fractal)
        parts = [(self.weight, shape, units.c1)]
        parts += [(self.other_weight, other, units.beside)] if other else []
        for tensor, one, blocks in parts:
            depth = blocks * one.taps
            first += stage[0] * (depth * row) + n[0] * self.fractal
            weights = tensor.region(first, (stage[1] * depth, width), (row, 1))
            self.k.copy(to.region(start, weights.sizes), weights)
            first = isa.Affine()
            start = start + stage[1] * depth * width

    def _store(
        self, at: Pixels, n: Span, before: isa.Affine, channels: epilogue_emit.Channels | None
    ) -> None:
        """Write the tile as one run where the plane is filled in order, else row by row."""
        place = self.job.place
        acc = self.acc
        out = self.out
        if self.ring:
            sizes = (at.window.fractals, n[1])
            to_ring(self.k, acc, self.ring, self.finish, sizes, at.window.pixels)
            return
        if self.pooled:
            where = self.plane(at, n, before)
            tile = (n[1], at.window.fractals, at.windows[1])
            self.pooled.drain(acc, self.y, where, tile, n[0], channels)
            return
        area = self.area(at, n, before)
        plain = not self.job.strip and place == conv_windows.plain_placement(self.shape)
        if plain and self.finish is None:
            sizes = (at.window.fractals, n[1])
            start = area.base + area.pieces[0][1] * isa.FRACTAL
            tiles.store_tile(self.k, acc, out, self.y, sizes, start, place.plane // isa.FRACTAL)
        elif self.finish is None:
            store_area(self.k, acc, out, self.y, area)
        else:
            epilogue_emit.drain(self.finish, acc, self.y, area, n[0], channels)
