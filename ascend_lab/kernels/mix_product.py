"""A product whose epilogue runs on the vector cores while the cube works on the next tile.

Where cube and vector cores are separate, the fix pipe takes what it can of an epilogue: bias,
scale, ReLU, a conversion. The rest is split off: the cube core stores every tile of sums to a ring
of slots, which stays in L2, and each of its two vector cores takes half the rows of a tile, does
the steps on them and stores the result. Source of the pattern: Ascend C, matmul_gelu example.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ascend_lab import errors, isa
from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.kernels import epilogue, epilogue_emit, epilogue_plan, gemm_schedule
from ascend_lab.kernels.tiles import Area, Span, segments

SLOTS = 4
"""Tiles between a cube core and its vector cores (the published grouped product takes as many)."""
AREA = isa.FRACTAL * isa.FRACTAL
Kept = tuple[isa.Tile | None, isa.Tile | None]
"""All K of A's rows and of B's columns, where a loop outside holds them in L1."""
Keeper = Callable[[int, Span], AbstractContextManager[isa.Tile | None]]


@dataclass(frozen=True, slots=True)
class After:
    """What vector cores do after a product and its `head`, on a grid of AI cores."""

    shape: gemm_schedule.GemmShape
    schedule: gemm_schedule.GemmSchedule
    head: epilogue.Epilogue | None
    tail: epilogue.Epilogue
    grid: tuple[int, int]

    @property
    def plan(self) -> epilogue_plan.Plan:
        """The steps on tiles of UB."""
        sums = self.head.out_dtype if self.head else isa.ACCUMULATOR[self.shape.dtype]
        return epilogue_plan.plan_of(self.tail, sums)

    @property
    def ring(self) -> isa.Ring:
        """The ring of tiles, in the format the steps want: the fix pipe converts."""
        s, plan = self.schedule, self.plan
        dtype, cores = plan.tiles[plan.start], self.grid[0] * self.grid[1]
        return isa.Ring("tiles", dtype, s.base_m * s.base_n, SLOTS, cores, 0, 1)

    def core(self, row: isa.Affine, col: isa.Affine) -> isa.Affine:
        """Return the number of an AI core of the grid."""
        return row * self.grid[1] + col


def to_ring(
    k: isa.KernelBuilder,
    acc: isa.Queue,
    ring: isa.RingEnd,
    finish: epilogue_emit.Finish | None,
    sizes: tuple[int, int],
) -> None:
    """Move a finished (N1, M1) tile of L0C through the fix pipe to a slot."""
    (m, n), fix = sizes, (finish.fix if finish else None) or epilogue.Fix()
    c, slot = acc.dequeue(), ring.alloc()
    to = slot.region(0, (n, m * AREA))
    k.fixpipe(to, c.region(0, to.sizes), relu=fix.relu, scale=fix.scale)
    acc.free()
    ring.enqueue()


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


# -- the vector cores' program --------------------------------------------------------------------
class VectorWriter:
    """The program of a vector core: its half of the rows of every tile of its cube core."""

    def __init__(self, job: After, chip: Chip, own: Sequence[isa.Share]) -> None:
        """Declare tensors and allocate queues."""
        shape, tail, (self.rows, self.cols) = job.shape, job.tail, own
        self.schedule, self.plan = job.schedule, job.plan
        self.m1, _, self.n1 = shape.fractals
        self.k = k = isa.KernelBuilder(f"after_{shape.m}x{shape.n}", chip)
        sides = job.schedule.base_m // isa.FRACTAL, job.schedule.base_n // isa.FRACTAL
        m, n = min(sides[0], self.rows[0]), min(sides[1], self.cols[0])
        row, col = k.param("row", self.rows[2]), k.param("col", self.cols[2])
        self.half, self.base = k.param("aiv", 2), (row * self.rows[1], col * self.cols[1])
        self.c = k.tensor("c", tail.out_dtype, self.n1 * self.m1 * AREA)
        self.end: isa.RingEnd = k.ring_in(job.ring, job.core(row, col), "MTE2")
        self.finish, self.arrival = self._tiles_of(tail, m, n, self._channels(tail, n))

    def _channels(self, tail: epilogue.Epilogue, tile_n: int) -> epilogue_emit.Group | None:
        """Allocate numbers per channel: all of the core's where that is little, or a tile's."""
        operands, own = tail.of_kind("channel"), self.cols[0]
        each = sum(tail.unit(o) * DTYPE_BYTES[o.dtype] for o in operands)
        blocks = own if own * each <= self.k.chip.buffers["UB"] // isa.FRACTAL else tile_n
        slots = [blocks * tail.unit(o) for o in operands]
        return epilogue_emit.Group.make(self.k, operands, slots, self.n1 * isa.FRACTAL, blocks)

    def _tiles_of(
        self, tail: epilogue.Epilogue, m: int, n: int, channels: epilogue_emit.Group | None
    ) -> tuple[epilogue_emit.Finish, isa.Queue]:
        """Allocate UB for as many blocks of a tile as fit; raise `CapacityError` if none does."""
        k, plan, start = self.k, self.plan, self.plan.start
        others = [i for i in range(1, len(plan.tiles)) if i != start]
        operands, stored = tail.of_kind("tile"), DTYPE_BYTES[tail.out_dtype]
        each = 2 * stored + 2 * DTYPE_BYTES[plan.tiles[start]] if start else 3 * stored
        each += sum(DTYPE_BYTES[plan.tiles[i]] for i in others)
        each += 2 * sum(DTYPE_BYTES[o.dtype] for o in operands)
        held = channels.blocks * sum(
            2 * tail.unit(o) * DTYPE_BYTES[o.dtype] for o in channels.operands
        ) if channels else 0  # fmt: skip
        block = m * AREA // 2
        columns = min(n, (k.chip.buffers["UB"] - held) // (block * each))
        if columns < 1:
            needed = f"{block * each} bytes of UB for a block of half a tile's rows"
            raise errors.CapacityError(needed, str(k.chip.buffers["UB"] - held), "use a lower tile")
        size = columns * block
        tiles = epilogue_emit.Group.make(
            k, operands, [size] * len(operands), self.n1 * self.m1 * AREA, 0
        )
        if start:
            arrival = k.queue("sums_ub", "UB", plan.tiles[start], size, src="MTE2", dst="V")
            out = k.queue("y_ub", "UB", tail.out_dtype, size, src="V", dst="MTE3")
        else:
            arrival = out = k.queue("y_ub", "UB", tail.out_dtype, size,
                                    src="MTE2", via="V", dst="MTE3", depth=3)  # fmt: skip
        scratch = tuple(k.buffer(f"value.{i}", "UB", plan.tiles[i], size) for i in others)
        units = {o.name: tail.unit(o) for o in tail.of_kind("channel")}
        finish = epilogue_emit.Finish(k, plan, out, scratch, tiles, channels, units=units)
        return finish, arrival

    def program(self) -> isa.Program:
        """Walk the tiles in the order in which the cube core stores them."""
        own = (self.rows, self.cols)
        for (m, n), _, held in tiles_in_order(self.finish, self.k, self.schedule, own, self.base):
            self._tile(m, n, held)
        return self.k.finish()

    def _tile(self, m: Span, n: Span, held: epilogue_emit.Channels | None) -> None:
        """Do the steps on half the rows of a tile, some blocks of columns at a time."""
        k, rows = self.k, m[1] * isa.FRACTAL // 2
        run, mine = rows * isa.FRACTAL, self.half * rows
        piece = (0, m[0] * isa.FRACTAL + mine, rows)
        area = Area(n[0] * (self.m1 * AREA), (piece,), n[1], self.m1 * isa.FRACTAL, 1, m[1], rows)
        with epilogue_emit.held_channels(self.finish, n, isa.Affine(), held) as channels:
            slot, most = self.end.dequeue(), self.arrival.buffer.elements // run
            for at, count in segments(k, "column", n[1], min(most, n[1])):
                source = slot.region(
                    at * (2 * run) + mine * isa.FRACTAL, (count, run), (2 * run, 1)
                )
                k.copy(self.arrival.alloc().region(0, (count, run)), source)
                self._steps(area, at, count, n[0], channels)
            self.end.free()

    def _steps(
        self,
        area: Area,
        at: isa.Affine,
        count: int,
        first: isa.Affine,
        held: epilogue_emit.Channels | None,
    ) -> None:
        """Do the steps on blocks that arrive, and store them."""
        f, k, start, arrival = self.finish, self.k, self.plan.start, self.arrival
        assert f.out is not None
        if f.tiles:
            epilogue_emit.load_tiles(f.tiles, k, area, at, count)
        if start:
            arrival.enqueue()
            memories: dict[int, epilogue_emit.Memory] = {start: arrival.dequeue(), 0: f.out.alloc()}
        else:
            arrival.hand()
            memories = {0: isa.Tile(arrival.buffer, arrival.counts["alloc"] - 1)}
        spare = [i for i in range(len(self.plan.tiles)) if i not in memories]
        memories.update(zip(spare, f.scratch, strict=True))
        named = f.tiles.held(f.tiles.queue.dequeue()) if f.tiles else {}
        rates = f.channels.held(held.tile) if f.channels and held else {}
        block = first + at - held.first if held else at
        tiles, run = [memories[i] for i in sorted(memories)], area.pixels * area.width
        epilogue_emit.write_steps(
            k, self.plan, epilogue_emit.Piece(tiles, named, rates, block, count, run)
        )
        if f.tiles:
            f.tiles.queue.free()
        if start:
            arrival.free()
        f.out.enqueue()
        for there, here in area.pairs(self.c, f.out.dequeue(), run, at, count):
            k.copy(there, here)
        f.out.free()
