"""A hand-written matrix multiplication for every chip: C = A @ B on all cores.

Operands lie in GM in the private layouts the cube reads fastest (16 x C0 fractals, C0 = 32 bytes):
A as (K1, M1, 16, C0), B as (K1, N1, 16, C0) with the last two axes (n, k), C as (N1, M1, 16, 16).
Converting from row-major is not part of the time. The tiling is the published one of the PTO GEMM
example: base tiles in L0, `step_k` of them staged in L1, double buffers, cores in a grid. Where
the grid is there `split_k` times, each takes its share of K and stores sums of its own.
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
    Share,
    Tile,
)
from ascend_lab.operators.kernels import default_schedules, epilogue_emit, gemm_schedule, tiles
from ascend_lab.operators.kernels.epilogue import Epilogue, check_epilogue, halves
from ascend_lab.operators.kernels.mix import AREA, After, VectorWriter, to_ring
from ascend_lab.operators.kernels.tiles import (
    Area,
    Fractals,
    Span,
    chunks,
    feed_a,
    feed_b,
    segments,
)

Kept = tuple[isa.Tile | None, isa.Tile | None]
"""All K of A's rows and of B's columns, where a loop outside holds them in L1."""
Keeper = Callable[[int, Span], AbstractContextManager[isa.Tile | None]]


def gemm_launch(
    shape: gemm_schedule.GemmShape,
    chip: Chip,
    schedule: gemm_schedule.GemmSchedule | None = None,
    epilogue: Epilogue | None = None,
    area: gemm_schedule.Stretches | None = None,
) -> isa.Launch:
    """Return the kernel as a launch: full cores and tail cores are separate parts.

    `epilogue` is done to the sums before they are stored; its operands are tensors of the launch.
    With `split_k` the launch writes "partial", in the accumulator's format, for each share of K.
    `area`: the rows and columns of C to do, by default all.
    """
    head, tail = halves(epilogue, chip, ACCUMULATOR[shape.dtype])
    check_epilogue(head, chip, ACCUMULATOR[shape.dtype])
    chosen = schedule or default_schedules.default_schedule(shape, chip, head)
    if chosen.window:
        raise InputError("no window for a matrix product", chosen.window, "convolutions have it")
    if epilogue and chosen.split_k > 1:
        raise InputError("no epilogue behind a part of K", "one", "do it to the whole sums")
    gemm_schedule.check_schedule(shape, chosen, chip)
    m1, k1, n1 = shape.fractals
    rows, cols = area = area or ((0, m1), (0, n1))
    grid = {
        "row": chunks(rows[1], chosen.base_m // FRACTAL, chosen.grid_rows),
        "col": chunks(cols[1], chosen.base_n // FRACTAL, chosen.grid_cols),
    }
    if chosen.split_k > 1:
        grid["part"] = chunks(k1, 1, chosen.split_k)

    def program(*own: Share) -> Program | tuple[Program, ...]:
        if tail is None:
            return _Writer(shape, chosen, chip, own, area, head).program()
        cores = len(grid["row"]), len(grid["col"])
        sides = chosen.base_m // FRACTAL, chosen.base_n // FRACTAL
        arrives = head.out_dtype if head else ACCUMULATOR[shape.dtype]
        after = After(tail, arrives, sides, cores, n1, n1 * m1 * AREA)
        cube = _Writer(shape, chosen, chip, own, area, head, after).program()
        behind = chip.vector_cores_per_core
        if FRACTAL % behind == 0:  # shares are alike
            return cube, *[_after(shape, chosen, chip, own, area, after)] * behind
        return cube, *(_after(shape, chosen, chip, own, area, after, i) for i in range(behind))

    return isa.spread(f"gemm_{shape.m}x{shape.k}x{shape.n}", grid, program)


def tiles_in_order(
    finish: epilogue_emit.Finish | None,
    k: isa.KernelBuilder,
    schedule: gemm_schedule.GemmSchedule,
    own: tuple[isa.Share, isa.Share],
    base: tuple[isa.Affine, isa.Affine],
    keep: Keeper = lambda side, at: nullcontext(),
) -> Iterator[tuple[tuple[Span, Span], Kept, epilogue_emit.Channels | None]]:
    """Loop over a core's tiles of C in the schedule's order, the tails last.

    Yields (along m, along n), what `keep` holds of A (side 0) or B for all tiles of the loop
    inside, and the numbers per column loaded before.
    """

    def spans(side: int) -> Iterator[Span]:
        width = (schedule.base_n if side else schedule.base_m) // isa.FRACTAL
        for at, size in segments(k, "mn"[side], own[side][0], width):
            yield base[side] + at, size

    with epilogue_emit.held_channels(finish, (base[1], own[1][0]), isa.Affine(), None) as held:
        if schedule.order == "mn":
            for m in spans(0):
                with keep(0, m) as a:
                    for n in spans(1):
                        yield (m, n), (a, None), held
            return
        for n in spans(1):
            with (
                epilogue_emit.held_channels(finish, n, isa.Affine(), held) as channels,
                keep(1, n) as b,
            ):
                for m in spans(0):
                    yield (m, n), (None, b), channels


def _after(
    shape: gemm_schedule.GemmShape,
    schedule: gemm_schedule.GemmSchedule,
    chip: Chip,
    own: Sequence[Share],
    area: gemm_schedule.Stretches,
    after: After,
    number: int | None = None,
) -> Program:
    """Return the program of a vector core, or of all: the tiles in the order of the cube core."""
    rows, cols = own
    k = isa.KernelBuilder(f"after_{shape.m}x{shape.n}", chip)
    row = k.param("row", rows[2])
    col = k.param("col", cols[2])
    member = k.param("aiv", chip.vector_cores_per_core) if number is None else number
    write = VectorWriter(k, after, "c", after.core(row, col), member, (rows[0], cols[0]))
    m1 = shape.fractals[0]
    base = (row * rows[1] + area[0][0], col * cols[1] + area[1][0])
    for (m, n), _, held in tiles_in_order(write.finish, k, schedule, (rows, cols), base):
        piece = (0, m[0] * FRACTAL, m[1] * FRACTAL)
        tile = Area(n[0] * (m1 * AREA), (piece,), n[1], m1 * FRACTAL, 1, m[1], m[1] * FRACTAL)
        write.tile(tile, n, Affine(), held)
    return k.finish()


@dataclass(frozen=True, slots=True)
class _Operand:
    """A or B: its tensor of `whole` fractals a row, its way through L1 (or not) to L0."""

    tensor: Buffer
    whole: int
    l1: Queue | None
    l0: Queue
    keep: bool


def parts_of(shape: gemm_schedule.GemmShape, schedule: gemm_schedule.GemmSchedule) -> int:
    """Return how many partial results the cores write; 1: the whole one."""
    return len(chunks(shape.fractals[1], 1, schedule.split_k))


class _Writer:
    """The program of cores that own equally much of C's rows, columns, and of K; in fractals."""

    def __init__(
        self,
        shape: gemm_schedule.GemmShape,
        schedule: gemm_schedule.GemmSchedule,
        chip: Chip,
        own: Sequence[Share],
        area: gemm_schedule.Stretches,
        epilogue: Epilogue | None,
        after: After | None = None,
    ) -> None:
        """Declare tensors, allocate queues for `area`; tiles leave by a ring if work is `after`."""
        self.schedule = schedule
        (rows, cols, *share) = own
        self.rows = rows
        self.cols = cols
        self.share = share
        m1, all_k, n1 = self.m1, _, self.n1 = shape.fractals
        self.k1 = k1 = share[0][0] if share else all_k
        self.area = FRACTAL * isa.c0_of(shape.dtype)
        sides = schedule.base_m // FRACTAL, schedule.base_n // FRACTAL
        m = min(sides[0], rows[0])
        n = min(sides[1], cols[0])
        self.tile_k = min(schedule.base_k // isa.c0_of(shape.dtype), k1)
        self.stage_k = min(self.tile_k * schedule.step_k, k1)
        self.k = k = isa.KernelBuilder(f"gemm_{rows[0] * FRACTAL}x{cols[0] * FRACTAL}", chip)
        sums = ACCUMULATOR[shape.dtype]
        name = "c"
        blocks = n1
        out_dtype = epilogue.out_dtype if epilogue else shape.out_dtype
        if share:
            out_dtype = sums
            name = "partial"
            blocks = parts_of(shape, schedule) * area[1][1]
        a, b = (k.tensor(x, shape.dtype, y * all_k * self.area) for x, y in (("a", m1), ("b", n1)))
        row, col = core = k.param("row", rows[2]), k.param("col", cols[2])
        self.base = row * rows[1] + area[0][0], col * cols[1] + area[1][0]
        self.ring = k.ring_out(after.ring, after.core(*core), "FIX") if after else None
        if not after:
            self.c = k.tensor(name, out_dtype, blocks * m1 * 256)
        self.first_k, self.first_c = self._share(*area[1])
        self.operands = (
            _Operand(a, m1, self._l1(a, m), self._l0(a, m), schedule.keep == "a"),
            _Operand(b, n1, self._l1(b, n), self._l0(b, n), schedule.keep == "b"),
        )
        self.acc = tiles.sum_queue(k, "c_l0", sums, m, n, schedule.c_l0_slots)
        self.out = tiles.out_queue(k, out_dtype, m, n) if chip.combined and not epilogue else None
        sizes = epilogue_emit.Sizes(m, n, cols[0], n1, n1 * m1 * 256)
        self.finish = epilogue_emit.new_finish(k, epilogue, sums, sizes)

    def _l1(self, tensor: Buffer, side: int) -> Queue | None:
        """Allocate slots of tensor a or b in L1, none where it bypasses L1."""
        name = tensor.name
        s = self.schedule
        if name in s.bypass:
            return None
        size = (self.k1 if s.keep == name else self.stage_k) * side * self.area
        slots = s.a_l1_slots if name == "a" else s.b_l1_slots
        name = f"{name}_l1"
        return self.k.queue(name, "L1", tensor.dtype, size, src="MTE2", dst="MTE1", depth=slots)

    def _l0(self, tensor: Buffer, side: int) -> Queue:
        """Allocate slots of tensor a or b in L0A or L0B."""
        name = tensor.name
        s = self.schedule
        pipe = "MTE2" if name in s.bypass else "MTE1"
        space = "L0" + name.upper()
        slots = s.a_l0_slots if name == "a" else s.b_l0_slots
        name = f"{name}_l0"
        size = side * self.tile_k * self.area
        return self.k.queue(name, space, tensor.dtype, size, src=pipe, dst="M", depth=slots)

    def _share(self, first: int, columns: int) -> tuple[Affine, Affine]:
        """Return where their share of K begins, and their sums of `columns` from `first` on."""
        if not self.share:
            return Affine(), Affine()
        _, size, count = self.share[0]
        part = self.k.param("part", count)
        return part * size, (part * columns - first) * (self.m1 * 256)

    def program(self) -> Program:
        """Walk the tiles of C in the order of the schedule."""
        own = self.rows, self.cols
        walk = tiles_in_order(self.finish, self.k, self.schedule, own, self.base, self._kept)
        for at, kept, held in walk:
            self._tile(at, kept, held)
        return self.k.finish()

    def _tile(self, at: tuple[Span, Span], kept: Kept, held: epilogue_emit.Channels | None) -> None:
        """One tile of C; `held` are numbers per column loaded before."""
        (m_at, m), (n_at, n) = at
        with epilogue_emit.held_channels(self.finish, at[1], Affine(), held) as channels:
            c = self.acc.alloc()
            self._reduce(c, at, kept, epilogue_emit.bias_of(self.finish, channels, at[1]))
            self.acc.enqueue()
            if self.ring is not None:
                to_ring(self.k, self.acc, self.ring, self.finish, (m, n), m * FRACTAL)
                return
            start = self.first_c + n_at * (self.m1 * 256)
            rows = m * FRACTAL
            if self.finish is None:
                start += m_at * 256
                tiles.store_tile(self.k, self.acc, self.out, self.c, (m, n), start, self.m1)
                return
            wide = self.finish.width
            plane = self.m1 * FRACTAL
            piece = (0, m_at * FRACTAL, rows)
            n = n * FRACTAL // wide
            area = Area(start, (piece,), n, plane, 1, m, rows, wide)
            epilogue_emit.drain(self.finish, self.acc, self.c, area, n_at, channels)

    def _stage(self, operand: _Operand, at: Span, depth: Span) -> None:
        """Bring a piece of A or B to L1: `at` along m or n, `depth` along k."""
        assert operand.l1 is not None
        src = operand.tensor.region(
            ((self.first_k + depth[0]) * operand.whole + at[0]) * self.area,
            (depth[1], at[1] * self.area),
            (operand.whole * self.area, 1),
        )
        self.k.copy(operand.l1.alloc().region(0, src.sizes), src)
        operand.l1.enqueue()

    @contextmanager
    def _kept(self, side: int, at: Span) -> Iterator[Tile | None]:
        """Load all K of A (side 0) or B once, for all tiles of C inside, where it is kept."""
        operand = self.operands[side]
        if not operand.keep or operand.l1 is None:
            yield None
            return
        self._stage(operand, at, (Affine(), self.k1))
        yield operand.l1.dequeue()
        operand.l1.free()

    def _reduce(self, c: Tile, at: tuple[Span, Span], kept: Kept, bias: Region | None) -> None:
        """C tile = sum over k (+ bias): stages GM -> L1, tiles L1 -> L0, mmad."""
        sides = list(zip(self.operands, at, kept, strict=True))
        staged = [(o, span) for o, span, tile in sides if tile is None and o.l1 is not None]
        for stage_at, size in segments(self.k, "stage", self.k1, self.stage_k):
            for operand, span in staged:
                self._stage(operand, span, (stage_at, size))
            sources = [self._source(*side, stage_at) for side in sides]
            for k_at, depth in segments(self.k, "k", size, self.tile_k):
                sizes = (at[0][1], depth, at[1][1])
                self._multiply(c, [s.down(k_at) for s in sources], sizes, stage_at + k_at, bias)
            for operand, _ in staged:
                assert operand.l1 is not None
                operand.l1.free()

    def _source(self, operand: _Operand, at: Span, kept: Tile | None, stage_at: Affine) -> Fractals:
        """Return where the stage at `stage_at` of an operand begins: a slot of L1, or GM."""
        if operand.l1 is None:
            pitch = operand.whole * self.area
            start = (self.first_k + stage_at) * pitch + at[0] * self.area
            return Fractals(operand.tensor, start, pitch)
        pitch = at[1] * self.area
        if kept is not None:
            return Fractals(kept, stage_at * pitch, pitch)
        return Fractals(operand.l1.dequeue(), Affine(), pitch)

    def _multiply(
        self,
        c: Tile,
        sources: Sequence[Fractals],
        sizes: tuple[int, int, int],
        done: Affine,
        bias: Region | None,
    ) -> None:
        """Load a tile of A and of B to L0 and add their product to c; the first where done is 0."""
        (m, depth, n) = sizes
        c0 = self.area // FRACTAL
        qa, qb = (operand.l0 for operand in self.operands)
        feed_a(self.k, qa.alloc(), sources[0], m, depth)
        qa.enqueue()
        feed_b(self.k, qb.alloc(), sources[1], n, depth)
        qb.enqueue()
        a = qa.dequeue().region(0, (m, depth, FRACTAL, c0))
        b = qb.dequeue().region(0, (depth, n, FRACTAL, c0))
        self.k.mmad(c.region(0, (n, m, FRACTAL, FRACTAL)), a, b, accumulate=done, bias=bias)
        qa.free()
        qb.free()
