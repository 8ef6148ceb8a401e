"""A hand-written matrix multiplication for every chip: C = A @ B on all cores.

Operands lie in GM in the layouts that the cube reads fastest (fractals of 16 x C0, where C0 numbers
are 32 bytes): A as (K1, M1, 16, C0), B as (K1, N1, 16, C0) with the last two axes (n, k), C as
(N1, M1, 16, 16). The kernel's time excludes conversion from row-major. The tiling is that of the
PTO GEMM example: base tiles in L0, `step_k` of them in a slot (a stage) of L1, double buffers,
cores in a grid. With `split_k` > 1 there are `split_k` such grids: each takes a share of K and
stores partial sums.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from ascend_lab.errors import InputError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import (
    ACCUMULATOR,
    FRACTAL,
    Affine,
    Buffer,
    Program,
    Queue,
    Region,
    RingEnd,
    Share,
    Tile,
)
from ascend_lab.operators.kernels import default_schedules, epilogue_emit, gemm_schedule, tiles
from ascend_lab.operators.kernels.epilogue import Epilogue, check_epilogue, halves
from ascend_lab.operators.kernels.epilogue_emit import SumsOutput
from ascend_lab.operators.kernels.tiles import (
    Area,
    Fractals,
    MatrixFeed,
    Span,
    Sums,
    accumulate,
    chunks,
    segments,
    sums_region,
)
from ascend_lab.operators.kernels.vector_tail import AREA, VectorTail, tail_programs

OutputArea = tuple[tuple[int, int], tuple[int, int]]
"""(start, size) of rows and of columns of C, in fractals."""
ResidentTiles = tuple[isa.Tile | None, isa.Tile | None]
"""The L1 tiles with all K of A's rows and of B's columns; None where no outer loop keeps them."""
LoadKept = Callable[[int, Span], AbstractContextManager[isa.Tile | None]]
"""A context that loads all K of a span of A (side 0) or of B (side 1), if it stays in L1.

It is called with the side and the span (first, count).
"""


@dataclass(frozen=True, slots=True)
class Job:
    """What all programs of a launch have in common.

    They compute `area` of C; the core with the cube applies `epilogue`.
    """

    shape: gemm_schedule.GemmShape
    schedule: gemm_schedule.GemmSchedule
    chip: Chip
    area: OutputArea
    epilogue: Epilogue | None


def gemm_launch(
    shape: gemm_schedule.GemmShape,
    chip: Chip,
    schedule: gemm_schedule.GemmSchedule | None = None,
    epilogue: Epilogue | None = None,
    area: OutputArea | None = None,
) -> isa.Launch:
    """Return the kernel as a launch; cores with smaller shares are separate parts of it.

    The kernel applies `epilogue` to the sums before it stores them; the epilogue's operands are
    tensors of the launch. With `split_k` the launch writes "partial", in the accumulator's format,
    for each share of K. `area` gives the rows and columns of C to compute, by default all.
    """
    # The cube core's fix pipe does the head of the epilogue; where vector cores are separate from
    # it, they do the tail, on tiles that reach them through a ring of slots in GM.
    head, tail = halves(epilogue, chip, ACCUMULATOR[shape.dtype])
    check_epilogue(head, chip, ACCUMULATOR[shape.dtype])
    chosen = schedule or default_schedules.default_schedule(shape, chip, head)
    if chosen.window:
        raise InputError("no window for a matrix product", chosen.window, "convolutions have it")
    if epilogue and chosen.split_k > 1:
        raise InputError("no epilogue behind a part of K", "one", "do it to the whole sums")
    gemm_schedule.check_schedule(shape, chosen, chip)
    m1, _, n1 = shape.fractals
    job = Job(shape, chosen, chip, area or ((0, m1), (0, n1)), head)
    grid = _shares_of_axes(job)

    def program(*shares: Share) -> Program | tuple[Program, ...]:
        if tail is None:
            return _Writer(job, shares).program()
        cores = len(grid["row"]), len(grid["col"])
        sides = chosen.base_m // FRACTAL, chosen.base_n // FRACTAL
        arriving_dtype = head.out_dtype if head else ACCUMULATOR[shape.dtype]
        vector_tail = VectorTail(tail, arriving_dtype, sides, cores, n1, n1 * m1 * AREA)
        cube = _Writer(job, shares, vector_tail).program()
        return cube, *tail_programs("product")(job, shares, vector_tail)

    return isa.spread(f"gemm_{shape.m}x{shape.k}x{shape.n}", grid, program)


def _shares_of_axes(job: Job) -> dict[str, list[int]]:
    """Return the fractals of each core along every axis of the grid of cores.

    32 x 32 fractals on a grid of 4 x 5 in tiles of 4 x 4: rows 8, 8, 8, 8; columns 8, 8, 8, 8, and
    the fifth column of cores gets nothing.
    """
    schedule = job.schedule
    (_, rows), (_, cols) = job.area
    grid = {
        "row": chunks(rows, schedule.base_m // FRACTAL, schedule.grid_rows),
        "col": chunks(cols, schedule.base_n // FRACTAL, schedule.grid_cols),
    }
    if schedule.split_k > 1:
        grid["part"] = chunks(job.shape.fractals[1], 1, schedule.split_k)
    return grid


def tiles_in_order(
    finish: epilogue_emit.Finish | None,
    k: isa.KernelBuilder,
    schedule: gemm_schedule.GemmSchedule,
    shares: tuple[isa.Share, isa.Share],
    base: tuple[isa.Affine, isa.Affine],
    keep: LoadKept = lambda side, at: nullcontext(),
) -> Iterator[tuple[tuple[Span, Span], ResidentTiles, epilogue_emit.Channels | None]]:
    """Loop over a core's tiles of C in the schedule's order, with the smaller tiles last.

    Yields the tile's (span of rows, span of columns), the L1 tiles of A and B that `keep` holds
    for the inner loop, and the epilogue's numbers per column if they are already loaded.
    """

    def spans(side: int) -> Iterator[Span]:
        # Side 0 is m, side 1 is n. A share of 10 fractals in tiles of 4 yields (4 i, 4) in a loop
        # over i = 0, 1, then (8, 2).
        tile_side = (schedule.base_n if side else schedule.base_m) // isa.FRACTAL
        for at, size in segments(k, "mn"[side], shares[side][0], tile_side):
            yield base[side] + at, size

    # If UB has room, numbers per column are loaded for all columns of the core; else order "nm"
    # loads them once per n tile, and in order "mn" each tile loads its own.
    with epilogue_emit.held_channels(
        finish, (base[1], shares[1][0]), isa.Affine(), None
    ) as core_channels:
        if schedule.order == "mn":
            for m in spans(0):
                with keep(0, m) as a:
                    for n in spans(1):
                        yield (m, n), (a, None), core_channels
            return
        for n in spans(1):
            with (
                epilogue_emit.held_channels(
                    finish, n, isa.Affine(), core_channels
                ) as tile_channels,
                keep(1, n) as b,
            ):
                for m in spans(0):
                    yield (m, n), (None, b), tile_channels


@dataclass(frozen=True, slots=True)
class _Operand:
    """A or B: its tensor, and its queues in L1 (None where it bypasses L1) and L0.

    The tensor has `row_fractals` fractals for each C0 of k: M1 for A, N1 for B.
    """

    tensor: Buffer
    row_fractals: int
    l1: Queue | None
    l0: Queue
    keep: bool


def partial_count(shape: gemm_schedule.GemmShape, schedule: gemm_schedule.GemmSchedule) -> int:
    """Return how many partial results the cores write: 1 if every core sums over all of K."""
    return len(chunks(shape.fractals[1], 1, schedule.split_k))


class _Writer:
    """Writes the program of cores with equal shares of C's rows, of its columns and of K.

    All sizes are in fractals. A share is (size, step from core to core, cores).
    """

    def __init__(
        self, job: Job, shares: Sequence[Share], vector_tail: VectorTail | None = None
    ) -> None:
        """Declare the tensors; allocate the queues.

        If vector cores do a `vector_tail` of the epilogue, tiles are written to a ring of slots.
        """
        shape = job.shape
        schedule = self.schedule = job.schedule
        (rows, cols, *k_share) = shares
        self.rows = rows
        self.cols = cols
        self.k_share = k_share
        m1, all_k, n1 = shape.fractals
        self.m1 = m1
        self.n1 = n1
        # `k_share` holds one share if the schedule splits K, else it is empty.
        self.k1 = k_share[0][0] if k_share else all_k
        # Elements of a fractal: 16 rows of C0, 256 in fp16 (512 bytes), 512 in int8.
        self.area = FRACTAL * isa.c0_of(shape.dtype)
        # A tile of 8 x 16 fractals on a core that has 5 rows of them is 5 x 16.
        tile_m = min(schedule.base_m // FRACTAL, rows[0])
        tile_n = min(schedule.base_n // FRACTAL, cols[0])
        self.tile_k = min(schedule.base_k // isa.c0_of(shape.dtype), self.k1)
        self.stage_k = min(self.tile_k * schedule.step_k, self.k1)
        k = isa.KernelBuilder(f"gemm_{rows[0] * FRACTAL}x{cols[0] * FRACTAL}", job.chip)
        self.k = k
        # A is (K1, M1, 16, C0), B is (K1, N1, 16, C0): all of K, whatever share of it a core takes.
        a = k.tensor("a", shape.dtype, m1 * all_k * self.area)
        b = k.tensor("b", shape.dtype, n1 * all_k * self.area)
        ring, c = self._declare_result(job, vector_tail)
        self.first_k, self.first_c = self._share_starts(*job.area[1])
        self.operands = (
            _Operand(a, m1, self._l1(a, tile_m), self._l0(a, tile_m), schedule.keep == "a"),
            _Operand(b, n1, self._l1(b, tile_n), self._l0(b, tile_n), schedule.keep == "b"),
        )
        self._allocate_output(job, c, ring, (tile_m, tile_n))

    def _declare_result(
        self, job: Job, vector_tail: VectorTail | None
    ) -> tuple[RingEnd | None, Buffer | None]:
        """Declare the core's place in C, and the ring or the tensor to which it stores tiles."""
        k = self.k
        (first_row, _), (first_col, _) = job.area
        row = k.param("row", self.rows[2])
        col = k.param("col", self.cols[2])
        self.base = row * self.rows[1] + first_row, col * self.cols[1] + first_col
        if vector_tail:
            # Vector cores store the result.
            return k.ring_out(vector_tail.ring, vector_tail.core(row, col), "FIX"), None
        return None, self._result(job)

    def _allocate_output(
        self, job: Job, c: Buffer | None, ring: RingEnd | None, tile: tuple[int, int]
    ) -> None:
        """Allocate L0C for the sums of a tile (rows, columns), and the buffers for storing them."""
        k = self.k
        tile_m, tile_n = tile
        schedule = job.schedule
        sums = ACCUMULATOR[job.shape.dtype]
        self.acc = tiles.sum_queue(k, "c_l0", sums, tile_m, tile_n, schedule.c_l0_slots)
        out: Queue | None = None
        # Without an epilogue, sums pass through UB unchanged if the core has a vector unit.
        if c is not None and job.chip.combined and not job.epilogue:
            out = tiles.out_queue(k, c.dtype, tile_m, tile_n)
        elements = self.n1 * self.m1 * 256
        sizes = epilogue_emit.Sizes(tile_m, tile_n, self.cols[0], self.n1, elements)
        self.finish = epilogue_emit.new_finish(k, job.epilogue, sums, sizes)
        self.output = SumsOutput(k, self.acc, c, out, self.finish, ring)

    def _result(self, job: Job) -> Buffer:
        """Declare the tensor of C, or that of all partial sums where the schedule splits K."""
        shape = job.shape
        # A block of 16 columns of C has m1 fractals of 16 x 16 elements.
        block_elements = self.m1 * 256
        if self.k_share:
            blocks = partial_count(shape, job.schedule) * job.area[1][1]
            return self.k.tensor("partial", ACCUMULATOR[shape.dtype], blocks * block_elements)
        out_dtype = job.epilogue.out_dtype if job.epilogue else shape.out_dtype
        return self.k.tensor("c", out_dtype, self.n1 * block_elements)

    def _l1(self, tensor: Buffer, side: int) -> Queue | None:
        """Allocate slots of tensor a or b in L1; None if it bypasses L1."""
        operand = tensor.name
        schedule = self.schedule
        if operand in schedule.bypass:
            return None
        # A kept operand takes all its K at once: K = 4096 in fp16 is 256 fractals, not 4 or 8.
        size = (self.k1 if schedule.keep == operand else self.stage_k) * side * self.area
        slots = schedule.a_l1_slots if operand == "a" else schedule.b_l1_slots
        name = f"{operand}_l1"
        return self.k.queue(name, "L1", tensor.dtype, size, src="MTE2", dst="MTE1", depth=slots)

    def _l0(self, tensor: Buffer, side: int) -> Queue:
        """Allocate slots of tensor a or b in L0A or L0B."""
        operand = tensor.name
        schedule = self.schedule
        pipe = "MTE2" if operand in schedule.bypass else "MTE1"
        space = "L0" + operand.upper()
        slots = schedule.a_l0_slots if operand == "a" else schedule.b_l0_slots
        name = f"{operand}_l0"
        size = side * self.tile_k * self.area
        return self.k.queue(name, space, tensor.dtype, size, src=pipe, dst="M", depth=slots)

    def _share_starts(self, first: int, columns: int) -> tuple[Affine, Affine]:
        """Return the first fractal of K of the share, and the first element of its partial sums.

        Each share stores all `columns` of C to compute, which begin at column `first` of C.
        """
        if not self.k_share:
            return Affine(), Affine()
        _, size, count = self.k_share[0]
        share = self.k.param("part", count)
        return share * size, (share * columns - first) * (self.m1 * 256)

    def program(self) -> Program:
        """Return the program, which loops over the tiles of C in the order of the schedule."""
        shares = self.rows, self.cols
        tiles_of_c = tiles_in_order(
            self.finish, self.k, self.schedule, shares, self.base, self._resident_tile
        )
        for spans, resident, channels in tiles_of_c:
            self._tile(spans, resident, channels)
        return self.k.finish()

    def _tile(
        self,
        spans: tuple[Span, Span],
        resident: ResidentTiles,
        loaded: epilogue_emit.Channels | None,
    ) -> None:
        """Compute and store the tile of C at `spans`.

        `resident` and `loaded` are what `tiles_in_order` yields with it.
        """
        with epilogue_emit.held_channels(self.finish, spans[1], Affine(), loaded) as channels:
            c = self.acc.alloc()
            self._reduce(c, spans, resident, epilogue_emit.bias_of(self.finish, channels, spans[1]))
            self.acc.enqueue()
            self.output.store(self._area(spans), spans[1][0], channels)

    def _area(self, spans: tuple[Span, Span]) -> Area:
        """Return where the tile at `spans` lies in C."""
        (m_at, m), (n_at, n) = spans
        # C is (N1, M1, 16, 16): a block of 16 columns holds m1 fractals of 256 elements.
        start = self.first_c + n_at * (self.m1 * 256)
        rows = m * FRACTAL
        piece = (0, m_at * FRACTAL, rows)
        # An int8 result has blocks of 32 channels: half as many as of 16.
        width = self.finish.width if self.finish else FRACTAL
        return Area(
            base=start,
            pieces=(piece,),
            blocks=n * FRACTAL // width,
            plane=self.m1 * FRACTAL,
            step=1,
            fractals=m,
            pixels=rows,
            width=width,
        )

    def _stage(self, operand: _Operand, at: Span, depth: Span) -> None:
        """Load a piece of A or B to L1: `at` along m or n, `depth` along k."""
        assert operand.l1 is not None
        src = operand.tensor.region(
            ((self.first_k + depth[0]) * operand.row_fractals + at[0]) * self.area,
            (depth[1], at[1] * self.area),
            (operand.row_fractals * self.area, 1),
        )
        self.k.copy(operand.l1.alloc().region(0, src.sizes), src)
        operand.l1.enqueue()

    @contextmanager
    def _resident_tile(self, side: int, at: Span) -> Iterator[Tile | None]:
        """If A (side 0) or B is kept, load all its K once for all tiles of C in the loop inside."""
        operand = self.operands[side]
        if not operand.keep or operand.l1 is None:
            yield None
            return
        self._stage(operand, at, (Affine(), self.k1))
        yield operand.l1.dequeue()
        operand.l1.free()

    def _reduce(
        self, c: Tile, spans: tuple[Span, Span], resident: ResidentTiles, bias: Region | None
    ) -> None:
        """Write a C tile = sum over k (+ bias): stages GM -> L1, tiles L1 -> L0, mmad."""
        sides = list(zip(self.operands, spans, resident, strict=True))
        # An operand that an outer loop keeps, or that bypasses L1, is not loaded in stages.
        staged = [
            (o, span)
            for o, span, resident_tile in sides
            if resident_tile is None and o.l1 is not None
        ]
        for stage_at, size in segments(self.k, "stage", self.k1, self.stage_k):
            for operand, span in staged:
                self._stage(operand, span, (stage_at, size))
            a_feed, b_feed = (self._feed(*side, stage_at) for side in sides)
            sums = Sums(sums_region(c, spans[0][1], spans[1][1]), stage_at, bias)
            accumulate(self.k, sums, a_feed, b_feed, size, self.tile_k)
            for operand, _ in staged:
                assert operand.l1 is not None
                operand.l1.free()

    def _feed(
        self, operand: _Operand, at: Span, resident: Tile | None, stage_at: Affine
    ) -> MatrixFeed:
        """Return what loads the operand's tiles of a stage to L0."""
        source = self._source(operand, at, resident, stage_at)
        return MatrixFeed(self.k, operand.l0, at[1], source)

    def _source(
        self, operand: _Operand, at: Span, resident: Tile | None, stage_at: Affine
    ) -> Fractals:
        """Return where the operand's fractals of the stage at `stage_at` begin.

        They lie in GM if it bypasses L1, in the middle of the resident tile if an outer loop loaded
        all of K, else at the beginning of the stage's slot.
        """
        if operand.l1 is None:
            # In GM a row of fractals has all M1 (or N1) of the operand, in L1 only those of the
            # tile.
            gm_pitch = operand.row_fractals * self.area
            start = (self.first_k + stage_at) * gm_pitch + at[0] * self.area
            return Fractals(operand.tensor, start, gm_pitch)
        l1_pitch = at[1] * self.area
        if resident is not None:
            return Fractals(resident, stage_at * l1_pitch, l1_pitch)
        return Fractals(operand.l1.dequeue(), Affine(), l1_pitch)
