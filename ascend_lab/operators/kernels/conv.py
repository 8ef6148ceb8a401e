"""A hand-written convolution kernel: a matrix product whose left matrix (im2col) is never stored.

The product has M = output pixels, K = (C1, kh, kw, C0), N = output channels. The feature map
(N, C1, H, W, C0) is copied to L1 as rows, `load3d` forms tiles of the im2col matrix on the way to
L0A, weights lie in FRACTAL_Z (C1*kh*kw, N1, 16, C0), the result is (N, Cout1, OH*OW, 16).

Terms:
- stage: the part of K that one slot of L1 holds
- beside: a 1 x 1 convolution of a second image, whose result is added to that of the first; int8
  keeps two sets of sums, as the scales differ
- unit: the smallest part of K that a stage can hold, whole channel blocks of both images
- bundle: as many groups as fill whole channel blocks; each bundle is a separate product
- strip: a pixel tile within one row of the output
- stacked: several images whose rows are interleaved, so that they count as one image

The cores form a grid: its rows divide the pixels, its columns the output channels. A pixel tile
ends with its image, unless images are stacked. Tiles whose windows differ by a shift are one loop.

What stays on the core:
- If one stage holds all channel blocks, rows stay in L1 for all output channels of their pixels. If
  moreover a core has only one tile of output channels, weights stay for all its pixels.
- In order "nm" it is the other way round: weights stay for all pixels, and rows only if there is
  only one pixel tile.
- Weights that several pixel tiles use stay in L0B, if one stage holds all channel blocks and the
  slots of L0B (`b_l0_slots`) can hold them with all their taps.
- If a tile takes several stages, the rows and weights of a stage share a slot of L1, of which there
  are up to four (`stages_ahead`): a tile waits for memory once, not once a stage.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product

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
from ascend_lab.operators.kernels.conv_tiles import (
    Addend,
    BundlePlace,
    BundleShare,
    Job,
    Operands,
    Resident,
    TileWalk,
    WindowFeed,
    load_l0b_weights,
    rows_view,
)
from ascend_lab.operators.kernels.conv_windows import Pixels, Window
from ascend_lab.operators.kernels.epilogue import Epilogue, check_epilogue, halves
from ascend_lab.operators.kernels.epilogue_emit import SumsOutput
from ascend_lab.operators.kernels.epilogue_plan import CubeBias, chip_left, demand_of
from ascend_lab.operators.kernels.gemm_schedule import GemmSchedule
from ascend_lab.operators.kernels.pooled_sums import Pooled, check_pool
from ascend_lab.operators.kernels.tiles import (
    ResidentFeed,
    Span,
    Sums,
    accumulate,
    by_size,
    chunks,
    out_queue,
    segments,
    sums_region,
)
from ascend_lab.operators.kernels.vector_tail import VectorTail, tail_programs


def conv_launch(
    shape: ConvShape,
    chip: Chip,
    schedule: GemmSchedule | None = None,
    place: conv_windows.Placement | None = None,
    epilogue: Epilogue | None = None,
) -> isa.Launch:
    """Return the kernel as a launch; raise `CapacityError` if a stage or the epilogue does not fit.

    `place` says where the output pixels go; the default fills the output row by row. The kernel
    applies `epilogue` to the sums before it stores them; its operands are tensors of the launch.
    """
    sums = isa.ACCUMULATOR[shape.dtype]
    # The cube's own core does the head, by its fix pipe or vector unit; separate vector cores, if
    # any, do the tail.
    head, tail = halves(epilogue, chip, sums)
    check_epilogue(head, chip, sums)
    check_pool(shape, chip, epilogue)
    tiling = schedule or conv_schedules.conv_schedule(shape, chip, epilogue)
    conv = shape
    placement = place
    if tiling.window == "stacked":
        conv, placement = conv_schedules.as_stacked(shape, place)
    # A bias takes some of L1, and the tiling must fit the rest.
    free_chip = chip_left(chip, demand_of(epilogue, chip, sums))
    conv_schedules.check_conv(conv, tiling, free_chip)
    strip = conv_schedules.takes_strips(conv, tiling, free_chip)
    # A pair of pipes has few event ids, one for each slot between them; the bias queue takes one.
    has_bias = bool(head and head.bias)
    events = chip.event_ids - 1 if has_bias else chip.event_ids
    job = Job(
        conv,
        tiling,
        chip,
        strip,
        placement or conv_windows.plain_placement(conv),
        head,
        stages_ahead=conv_schedules.stages_ahead(conv, tiling, free_chip, events, strip=strip),
    )
    if tail:
        arriving_dtype = head.out_dtype if head else sums
        job = replace(job, vector_tail=_vector_tail(job, tail, arriving_dtype))
    return isa.Launch(f"conv_{conv.n}x{conv.c}x{conv.h}x{conv.w}", *_programs_of_cores(job))


def _vector_tail(job: Job, tail: Epilogue, arriving_dtype: str) -> VectorTail:
    """Return the work of the vector cores, which are numbered as one row of cores."""
    cores = job.schedule.grid_rows * job.schedule.grid_cols
    n1 = job.shape.blocks[1]
    return VectorTail(tail, arriving_dtype, job.sides(n1), (1, cores), n1, job.elements)


def _programs_of_cores(job: Job) -> tuple[tuple[isa.Part, ...], int]:
    """Return the programs of all cores, and the number of programs per AI core.

    The number is 0 for a launch on cube cores only.
    """
    schedule = job.schedule
    parts = list[isa.Part]()
    cores = 0
    vector_cores = job.chip.vector_cores_per_core if job.vector_tail else 0
    row_shares = conv_windows.row_shares(job.shape, job.tile, schedule.grid_rows, strip=job.strip)
    # The fewest pixel tiles of any core; with 1, keeping weights in L0B saves nothing.
    fewest_tiles = min(share.tiles[1] - share.tiles[0] for share in row_shares)
    counted_job = replace(job, pixel_tiles=fewest_tiles)
    writers: dict[int, tuple[TileWalk, ...]] = {}
    for share, share_ids in conv_tiles.bundle_shares(job.shape, schedule.grid_cols).items():
        col_sizes = chunks(share.n1, schedule.base_n // isa.FRACTAL, share.columns)
        for row_share in row_shares:
            for n_own, column_ids in by_size(col_sizes).items():
                counts = (column_ids[-1] + 1, share_ids[-1] + 1)
                # Cores with equally many output blocks have the same buffers: one writer for all.
                if n_own not in writers:
                    writers[n_own] = _writers_of(counted_job, n_own)
                programs = [
                    writer.program(row_share, share, col_sizes[0], counts)
                    for writer in writers[n_own]
                ]
                # One program may serve all vector cores: repeat it, so that there is one for each.
                while len(programs) < vector_cores + 1:
                    programs.append(programs[1])
                parameters = _parameters_of_cores(row_share, share_ids, column_ids)
                # The cube core's program comes first, hence -1; vector cores count from 0.
                for aiv, program in enumerate(programs, -1):
                    parts.append(_part_of(program, parameters, cores, aiv))
                cores += len(parameters)
    return tuple(parts), 1 + vector_cores if vector_cores else 0


def _parameters_of_cores(
    row_share: conv_windows.RowShare, share_ids: Sequence[int], column_ids: Sequence[int]
) -> list[dict[str, int]]:
    """Return the values of the parameters of each core that runs the same program."""
    core_rows = zip(row_share.images, row_share.downs, strict=True)
    return [
        {"row": image, "down": down, "col": column, "share": share_id}
        for (image, down), share_id, column in product(core_rows, share_ids, column_ids)
    ]


def _writers_of(job: Job, n_own: int) -> tuple[TileWalk, ...]:
    """Return the writers of the cube core's program and of those of its vector cores."""
    cube_writer = _CubeProgramWriter(job, n_own)
    if job.vector_tail is None:
        return (cube_writer,)
    return cube_writer, *tail_programs("convolution")(job, n_own)


def _part_of(
    program: isa.Program, parameters: list[dict[str, int]], first_core: int, aiv: int
) -> isa.Part:
    """Return a program with the values of its parameters on each of its cores.

    `parameters` has the values of each core, from core `first_core` on; `aiv` is the number of the
    vector core in its AI core, -1 for the cube core.
    """
    names = [name for name, _ in program.params]
    bindings = []
    for core, core_parameters in enumerate(parameters, first_core):
        values = {**core_parameters, "core": core, "aiv": aiv}
        bindings.append(isa.binding_of({name: values[name] for name in names}))
    return isa.Part(program, tuple(bindings))


class _CubeProgramWriter(TileWalk):
    """Writes the programs of cube cores that own `n_own` output blocks; has tensors and queues."""

    def __init__(self, job: Job, n_own: int) -> None:
        """Allocate tensors and queues."""
        super().__init__(job, n_own, f"conv_{n_own * isa.FRACTAL}")
        shape = job.shape
        schedule = job.schedule
        c0 = isa.c0_of(shape.dtype)
        self.fractal_elements = isa.FRACTAL * c0  # 256 in fp16, 512 in int8
        tile_m1, tile_n1 = job.sides(n_own)
        units = units_of(shape)
        units_per_stage = conv_schedules.c1_stage(shape, schedule)
        self.units = units
        self.units_per_stage = units_per_stage
        self.tile_k1 = min(schedule.base_k // c0, units_per_stage * units.depth)
        own_elements, beside_elements = conv_windows.unit_elements(shape, job.tile, strip=job.strip)
        # A slot has rows of the image, then rows of the second image (`beside`), if there is one.
        self.image_elements = units_per_stage * own_elements
        row_elements = units_per_stage * (own_elements + beside_elements)
        weight_elements = units_per_stage * units.depth * tile_n1 * self.fractal_elements
        # Start of the second convolution's sums in a tile of L0C; 0 if it adds to the first one's.
        self.second_sums_start = (shape.sums - 1) * tile_m1 * tile_n1 * isa.FRACTAL**2
        self._declare_tensors()
        self._allocate_l1(row_elements, weight_elements)
        self._allocate_l0(tile_m1, tile_n1)
        self._allocate_output(tile_m1, tile_n1)

    def _allocate_l1(self, row_elements: int, weight_elements: int) -> None:
        """Allocate slots of L1 for the rows and weights of a stage, in one queue or in two."""
        k = self.k
        dtype = self.shape.dtype
        a_slots = self.job.schedule.a_l1_slots
        b_slots = self.job.schedule.b_l1_slots
        stages_ahead = self.job.stages_ahead
        slots = stages_ahead or a_slots
        self.rows_queue = k.queue(
            "x_l1", "L1", dtype, row_elements, src="MTE2", dst="MTE1", depth=slots
        )
        self.weights_beside_rows: isa.Buffer | None = None
        if stages_ahead:
            self.weights_beside_rows = self.rows_queue.join("w_l1", dtype, weight_elements)
        else:
            self.weights_queue = k.queue(
                "w_l1", "L1", dtype, weight_elements, src="MTE2", dst="MTE1", depth=b_slots
            )

    def _allocate_l0(self, tile_m1: int, tile_n1: int) -> None:
        """Allocate slots of L0A and L0B for steps of a tile of `tile_m1` x `tile_n1` fractals."""
        job = self.job
        k = self.k
        units = self.units
        dtype = self.shape.dtype
        a_slots = job.schedule.a_l0_slots
        b_slots = job.schedule.b_l0_slots
        a_elements = tile_m1 * self.tile_k1 * self.fractal_elements
        b_elements = tile_n1 * self.tile_k1 * self.fractal_elements
        # Weights stay in L0B for several pixel tiles if the whole depth fits, and a row of bias.
        has_bias = bool(job.epilogue and job.epilogue.bias)
        all_depth = units.total_depth + 1 if has_bias else units.total_depth
        all_weight_elements = all_depth * tile_n1 * self.fractal_elements
        fits = b_slots * all_weight_elements * DTYPE_BYTES[dtype] <= job.chip.buffers["L0B"]
        one_stage = self.units_per_stage >= units.count
        self.weights_stay_in_l0b = job.pixel_tiles > 1 and one_stage and fits
        if self.weights_stay_in_l0b:
            b_elements = max(b_elements, all_weight_elements)
        self.a_l0 = k.queue("x_l0", "L0A", dtype, a_elements, src="MTE1", dst="M", depth=a_slots)
        self.b_l0 = k.queue("w_l0", "L0B", dtype, b_elements, src="MTE1", dst="M", depth=b_slots)

    def _allocate_output(self, tile_m1: int, tile_n1: int) -> None:
        """Allocate sums in L0C, and the buffers of the epilogue, of pooling and of the bias."""
        self._allocate_sums(tile_m1, tile_n1)
        out = self._allocate_epilogue(tile_m1, tile_n1)
        self._allocate_bias()
        self.output = SumsOutput(self.k, self.acc, self.y, out, self.finish, self.ring)

    def _allocate_sums(self, tile_m1: int, tile_n1: int) -> None:
        """Allocate one or two tiles of sums in L0C."""
        k = self.k
        shape = self.shape
        # Two tiles of sums if they fit: 1024 bytes for each fractal of fp32 or int32.
        l0c_bytes = self.job.chip.buffers["L0C"] - k.used_bytes("L0C")
        two_fit = 2 * tile_m1 * tile_n1 * shape.sums * 1024 <= l0c_bytes
        slots = self.job.schedule.c_l0_slots or (2 if two_fit else 1)
        sums = isa.ACCUMULATOR[shape.dtype]
        self.acc = tiles.sum_queue(k, "y_l0", sums, tile_m1, tile_n1 * shape.sums, slots)

    def _allocate_epilogue(self, tile_m1: int, tile_n1: int) -> isa.Queue | None:
        """Allocate the buffers of the epilogue and of pooling.

        Return the queue in UB for a result without an epilogue, on chips whose cube and vector unit
        share a core.
        """
        job = self.job
        k = self.k
        shape = self.shape
        ub_bytes = k.used_bytes("UB")
        out = None
        if job.chip.combined and job.epilogue is None:
            out = out_queue(k, shape.out_dtype, tile_m1, tile_n1)
        sizes = epilogue_emit.Sizes(
            tile_m1, tile_n1, self.n_own, shape.blocks[1], job.elements, taken=ub_bytes
        )
        self.pooled: Pooled | None = None
        if shape.pool:
            self.pooled = Pooled(k, shape, job.epilogue, sizes, job.tile)
            self.finish = self.pooled.finish
        else:
            sums = isa.ACCUMULATOR[shape.dtype]
            self.finish = epilogue_emit.new_finish(k, job.epilogue, sums, sizes)
        return out

    def _allocate_bias(self) -> None:
        """Allocate the buffers of a bias that the cube adds."""
        self.bias: CubeBias | None = None
        bias = self.job.epilogue.bias if self.job.epilogue else ""
        if bias:
            several_stages = self.units_per_stage < self.units.count
            self.bias = CubeBias.make(
                self.k, bias, self.shape, self.n_own, has_queue=several_stages
            )

    def _declare_tensors(self) -> None:
        """Declare the tensors of images, weights and, unless vector cores store it, the result."""
        k = self.k
        shape = self.shape
        bundle = self.bundle
        beside = self.shape.beside
        (c1, n1) = shape.blocks
        # The last bundle may be smaller than the others.
        last_blocks = bundle.last_c1 * bundle.last_n1
        vector_tail = self.job.vector_tail
        fractals = ((bundle.count - 1) * bundle.c1 * bundle.n1 + last_blocks) * shape.taps
        x = k.tensor("x", shape.dtype, shape.images * c1 * shape.plane)
        weight = k.tensor(self.job.place.weight, shape.dtype, fractals * self.fractal_elements)
        cube_adds_bias = bool(self.job.epilogue and self.job.epilogue.bias)
        first = Addend(
            shape=shape,
            x=x,
            weight=weight,
            unit_blocks=self.units.c1,
            rows_start=0,
            sums_start=0,
            sums_begun=cube_adds_bias,
        )
        self.addends = [first]
        if beside:
            blocks = beside.blocks[0]
            beside_x = k.tensor("beside", shape.dtype, beside.images * blocks * beside.plane)
            beside_weight = k.tensor(
                "beside_weight", shape.dtype, blocks * n1 * self.fractal_elements
            )
            second = Addend(
                shape=beside,
                x=beside_x,
                weight=beside_weight,
                unit_blocks=self.units.beside,
                rows_start=self.image_elements,
                sums_start=self.second_sums_start,
                sums_begun=not self.second_sums_start,
            )
            self.addends.append(second)
        self.ring = k.ring_out(vector_tail.ring, isa.var("core"), "FIX") if vector_tail else None
        out_dtype = self.job.epilogue.out_dtype if self.job.epilogue else shape.out_dtype
        self.y = None if vector_tail else k.tensor("y", out_dtype, self.job.elements)

    # -- one tile ---------------------------------------------------------------------------------
    def begin(self, share: BundleShare, first_bundle: isa.Affine, col: isa.Affine) -> None:
        """Load the bias that the cube adds; write the border around the plane to be pooled."""
        if self.bias:
            self.bias.load(share.full_bundles, share.has_tail, first_bundle, col)
        if self.pooled:
            self.pooled.begin()

    def tile(
        self, bundle: BundlePlace, pixels: Pixels, n_span: Span, col: isa.Affine, resident: Resident
    ) -> None:
        """Write a tile: sum over taps and channel blocks, stage by stage, then store."""
        first_block = bundle.index * self.bundle.n1
        with epilogue_emit.held_channels(
            self.finish, n_span, first_block, resident.channels
        ) as channels:
            sums_tile = self.acc.alloc()
            bias = epilogue_emit.bias_of(self.finish, channels, n_span)
            begin_sums = partial(
                self._begin_sums, sums_tile, bundle, pixels, (n_span, col), resident.l0b_weights
            )
            # MTE1 reads the bias from L1, so the bias must have arrived. With several stages it has
            # its own queue; weights or rows that are resident were copied after it. Otherwise the
            # sums begin when the rows of the only stage, which are copied after it, have arrived.
            has_bias_arrived = (
                self.units_per_stage < self.units.count or resident.weights or resident.rows
            )
            if has_bias_arrived:
                begin_sums()
            for stage in segments(
                self.k, "stage", bundle.c1 // self.units.c1, self.units_per_stage
            ):
                rows_tile, weights_tile = self._take_stage(bundle, pixels, n_span, stage, resident)
                if not has_bias_arrived:
                    begin_sums()
                operands = Operands(rows_tile, weights_tile, resident.l0b_weights)
                self._add_stage(sums_tile, pixels.windows, n_span[1], stage, operands, bias)
                self._free_stage(resident)
            self.acc.enqueue()
            self._store(pixels, n_span, first_block, channels)

    def _take_stage(
        self, bundle: BundlePlace, pixels: Pixels, n_span: Span, stage: Span, resident: Resident
    ) -> tuple[isa.Tile, isa.Tile]:
        """Return a stage's rows and weights in L1; load those that an outer loop does not keep."""
        if resident.rows is None:
            self._stage_rows(bundle, pixels, stage, n_span)
        if resident.weights is None and not self.weights_beside_rows:
            self._stage_weights(bundle, n_span, stage)
        rows_tile = resident.rows or self.rows_queue.dequeue()
        if self.weights_beside_rows:
            return rows_tile, isa.Tile(self.weights_beside_rows, rows_tile.slot)
        return rows_tile, resident.weights or self.weights_queue.dequeue()

    def _free_stage(self, resident: Resident) -> None:
        """Free the slots of a stage that no outer loop keeps."""
        if resident.rows is None:
            self.rows_queue.free()
        if resident.weights is None and not self.weights_beside_rows:
            self.weights_queue.free()

    def _begin_sums(
        self,
        sums_tile: isa.Tile,
        bundle: BundlePlace,
        pixels: Pixels,
        n_place: tuple[Span, isa.Affine],
        l0b_weights: isa.Tile | None,
    ) -> None:
        """Begin the sums of a tile with the bias, if the cube adds it as a product.

        Where weights stay in L0B the bias lies behind them.
        """
        if self.bias is None:
            return
        n_span, col = n_place
        (_, n_blocks) = n_span
        blocks = (self._bias_index(bundle, n_span, col), n_blocks)
        l0b_bias = None
        if l0b_weights:
            start = self._depth(bundle) * n_blocks * self.fractal_elements
            l0b_bias = ResidentFeed(l0b_weights, n_blocks, start)
        self.bias.add(sums_tile, (self.a_l0, self.b_l0), pixels.window.fractals, blocks, l0b_bias)

    def _add_stage(
        self,
        sums_tile: isa.Tile,
        windows: tuple[Window, ...],
        n_blocks: int,
        stage: Span,
        operands: Operands,
        bias: isa.Region | None,
    ) -> None:
        """Add the products of the units in `stage` to the sums of `n_blocks` output blocks."""
        (first_unit, unit_count) = stage
        weights_start = 0
        for addend, window in zip(self.addends, windows, strict=False):
            conv = addend.shape
            blocks = unit_count * addend.unit_blocks
            depth = blocks * conv.taps
            view = rows_view(conv, operands.rows, window, blocks, addend.rows_start)
            pixel_feed = WindowFeed(self.k, self.a_l0, window.fractals, conv, window, view)
            weight_feed = operands.weights_from(self.k, self.b_l0, n_blocks, weights_start)
            depth_before = first_unit * (addend.unit_blocks * conv.taps)
            # Sums that begin with a bias, or with another convolution's products, are never
            # overwritten: so mmad is told that there was depth before.
            if addend.sums_begun:
                depth_before = isa.Affine(1)
            # The bias table adds its bias with the first product.
            table_bias = None if weights_start else bias
            region = sums_region(sums_tile, window.fractals, n_blocks, addend.sums_start)
            accumulate(
                self.k,
                Sums(region, depth_before, table_bias),
                pixel_feed,
                weight_feed,
                depth,
                self.tile_k1,
            )
            weights_start += depth * n_blocks * self.fractal_elements

    def _depth(self, bundle: BundlePlace) -> int:
        """Return the depth of a bundle in fractals, over all its taps and channel blocks."""
        return bundle.c1 // self.units.c1 * self.units.depth

    def _bias_index(self, bundle: BundlePlace, n_span: Span, col: isa.Affine) -> isa.Affine:
        """Return the index of the first of blocks `n_span` among the blocks whose bias is in L1."""
        return bundle.place * self.n_own + n_span[0] - col

    @contextmanager
    def hold_weights(
        self, bundle: BundlePlace, n_span: Span, col: isa.Affine, *, several_n_tiles: bool
    ) -> Iterator[conv_tiles.Weights]:
        """Keep all weights of blocks `n_span` in L1 and, if they fit, in L0B, for the loop inside.

        Only one stage of L1 is kept: weights do not stay if they take several stages, or if the
        loop inside goes over `several_n_tiles`.
        """
        unit_count = bundle.c1 // self.units.c1
        all_units = isa.Affine(), unit_count
        one_stage = self.units_per_stage >= unit_count
        stays = one_stage and not several_n_tiles and not self.weights_beside_rows
        if not stays:
            yield None, None
            return
        load_l1 = partial(self._stage_weights, bundle, n_span, all_units)
        with self._kept(self.weights_queue, load_l1) as weights_tile:
            load_l0b = None
            if self.weights_stay_in_l0b:
                assert weights_tile is not None
                load_l0b = partial(self._load_l0b, weights_tile, bundle, n_span, col)
            with self._kept(self.b_l0, load_l0b) as l0b_weights:
                yield weights_tile, l0b_weights

    def _load_l0b(
        self, weights_tile: isa.Tile, bundle: BundlePlace, n_span: Span, col: isa.Affine
    ) -> None:
        """Load all weights of blocks `n_span` from L1 to L0B, and their bias behind them."""
        (_, n_blocks) = n_span
        blocks = self._bias_index(bundle, n_span, col), n_blocks
        bias = self.bias.blocks(blocks) if self.bias else None
        load_l0b_weights(self.k, self.b_l0, weights_tile, self._depth(bundle) * n_blocks, bias)

    def hold_rows(
        self, bundle: BundlePlace, pixels: Pixels
    ) -> AbstractContextManager[isa.Tile | None]:
        """Keep a pixel tile's rows in L1 for the loop inside, if one stage has all blocks."""
        unit_count = bundle.c1 // self.units.c1
        stays = self.units_per_stage >= unit_count and not self.weights_beside_rows
        load = None
        if stays:
            load = partial(self._stage_rows, bundle, pixels, (isa.Affine(), unit_count))
        return self._kept(self.rows_queue, load)

    @contextmanager
    def _kept(self, queue: isa.Queue, load: Callable[[], None] | None) -> Iterator[isa.Tile | None]:
        """Run `load` and keep its slot for the loop inside; yield None if there is no `load`."""
        if load is None:
            yield None
            return
        load()
        yield queue.dequeue()
        queue.free()

    def _stage_rows(
        self, bundle: BundlePlace, pixels: Pixels, stage: Span, n_span: Span | None = None
    ) -> None:
        """Copy the rows of a tile's windows, of the units in `stage`, to a slot of L1.

        Rows of the second image (`beside`) follow. If weights share the slot, the weights of output
        blocks `n_span` come after them.
        """
        slot = self.rows_queue.alloc()
        (first_unit, unit_count) = stage
        # Output rows to move down: the loop's turn, and those of the core before the tile.
        output_rows = pixels.turn * (pixels.run.pixels // self.shape.out_hw[1]) + pixels.down
        for addend, window in zip(self.addends, pixels.windows, strict=False):
            conv = addend.shape
            # NC1HWC0: the channel blocks of an image follow one another, those of an image before
            # it come first.
            image_blocks = (
                pixels.image * (conv.blocks[0] * conv.mixed) + bundle.index * self.bundle.c1
            )
            blocks = image_blocks + first_unit * addend.unit_blocks, unit_count * addend.unit_blocks
            down = output_rows * conv.strides[0]
            source = conv_windows.rows_of(conv, addend.x, window, blocks, down)
            self.k.copy(slot.region(addend.rows_start, source.sizes), source)
        if self.weights_beside_rows and n_span:
            self._copy_weights(bundle, n_span, stage, isa.Tile(self.weights_beside_rows, slot.slot))
        self.rows_queue.enqueue()

    def _stage_weights(self, bundle: BundlePlace, n_span: Span, stage: Span) -> None:
        """Copy the weights of a stage and of output blocks `n_span` to a separate slot."""
        self._copy_weights(bundle, n_span, stage, self.weights_queue.alloc())
        self.weights_queue.enqueue()

    def _copy_weights(self, bundle: BundlePlace, n_span: Span, stage: Span, slot: isa.Tile) -> None:
        """Copy the weights of a stage and of output blocks `n_span` to a slot of L1.

        Weights of the second convolution (`beside`) follow.
        """
        (first_block, n_blocks) = n_span
        (first_unit, unit_count) = stage
        # FRACTAL_Z is (depth, N1, 16, C0): one row has all output blocks of the bundle, of which
        # the slot gets n_blocks.
        row_elements = bundle.n1 * self.fractal_elements
        slot_row_elements = n_blocks * self.fractal_elements
        bundle_start = bundle.index * (
            self.bundle.c1 * self.shape.taps * self.bundle.n1 * self.fractal_elements
        )
        # Weights of the second convolution are a separate tensor with one bundle, so they start at
        # 0.
        starts = (bundle_start, isa.Affine())
        slot_start = 0
        for addend, first_weight in zip(self.addends, starts, strict=False):
            depth = addend.unit_blocks * addend.shape.taps
            weight_start = first_weight + first_unit * (depth * row_elements)
            weight_start += first_block * self.fractal_elements
            sizes = (unit_count * depth, slot_row_elements)
            weights = addend.weight.region(weight_start, sizes, (row_elements, 1))
            self.k.copy(slot.region(slot_start, sizes), weights)
            slot_start += unit_count * depth * slot_row_elements

    def _store(
        self,
        pixels: Pixels,
        n_span: Span,
        first_block: isa.Affine,
        channels: epilogue_emit.Channels | None,
    ) -> None:
        """Store a finished tile: to vector cores, pooled, or to its place in the result."""
        if self.pooled:
            assert self.y is not None
            plane = self.plane(pixels, n_span, first_block)
            tile = (n_span[1], pixels.window.fractals, pixels.windows[1])
            self.pooled.drain(self.acc, self.y, plane, tile, n_span[0], channels)
            return
        area = self.area(pixels, n_span, first_block)
        plain = conv_windows.plain_placement(self.shape)
        in_whole_fractals = self.finish is None and not self.job.strip and self.job.place == plain
        # Planes are padded to 16 pixels: store the last fractal whole, rather than 1 row of 49
        # = 3 * 16 + 1 apart.
        stored_area = area.in_whole_fractals() if in_whole_fractals else area
        self.output.store(stored_area, n_span[0], channels)
