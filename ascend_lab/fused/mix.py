"""A product or convolution whose epilogue runs on the vector cores while the cube goes on.

Where cube and vector cores are separate (910B), the cube core's fix pipe does what it can of the
epilogue: bias, scale, ReLU, a conversion. The rest, a GELU for instance, runs on vector cores:

    unfused        cube -> GM;  GM -> GELU on vector cores -> GM          two kernels
    fused          cube -> ring of slots in L2 -> GELU -> GM             one kernel
    saved          the GELU runs while the cube makes the next tile; one kernel start

The cube core stores each tile of sums to the ring. Each of its vector cores reads a share of the
tile's rows, applies the rest of the epilogue and stores the result. In a convolution a row is a
pixel: a product's tensors lie like those of a 1 x 1 convolution. Source of the pattern: Ascend C,
matmul_gelu example.
"""

from collections.abc import Sequence
from dataclasses import replace

from ascend_lab import errors
from ascend_lab.machine import isa
from ascend_lab.machine.chip import DTYPE_BYTES
from ascend_lab.operators.kernels import conv_tiles, epilogue, epilogue_emit, gemm
from ascend_lab.operators.kernels.conv_windows import Pixels
from ascend_lab.operators.kernels.tiles import Area, Span, segments
from ascend_lab.operators.kernels.vector_tail import AREA, VectorTail


def share_of(area: Area, number: isa.Affine | int, cores: int) -> tuple[Area, isa.Affine | int]:
    """Return where a vector core's share of a tile goes, and the first row of it in the tile.

    `number` may be an affine expression only if the area is one piece and `cores` divides its rows.
    """
    # 100 rows on 2 vector cores: 50 each; 49 rows: 25 and 24.
    share_rows = -(-area.pixels // cores)
    if isinstance(number, isa.Affine):
        share_place = area.pieces[0][1] + number * (share_rows * area.step)
        share = replace(area, pieces=((0, share_place, share_rows),), pixels=share_rows)
        return share, number * share_rows
    first_row = min(number * share_rows, area.pixels)
    end = min((number + 1) * share_rows, area.pixels)
    pieces = list[tuple[int, isa.Affine, int]]()
    for piece_row, place, size in area.pieces:
        # The rows that this core shares with this piece: [low, high).
        low = max(piece_row, first_row)
        high = min(piece_row + size, end)
        if low < high:
            pieces.append((low - first_row, place + (low - piece_row) * area.step, high - low))
    return replace(area, pieces=tuple(pieces), pixels=end - first_row), first_row


class TailWriter:
    """Writes the epilogue's tail for vector core `number` of AI core `core`."""

    def __init__(
        self,
        k: isa.KernelBuilder,
        vector_tail: VectorTail,
        name: str,
        core: isa.Affine,
        number: isa.Affine | int,
        core_blocks: tuple[int, int],
    ) -> None:
        """Allocate queues for a core that owns `core_blocks` (high, wide).

        The result is called `name`.
        """
        (m, n) = map(min, zip(vector_tail.tile, core_blocks, strict=True))
        self.k = k
        self.plan = vector_tail.plan
        self.vector_tail = vector_tail
        self.number = number
        self.core_columns = core_blocks[1]
        self.y = k.tensor(name, vector_tail.tail.out_dtype, vector_tail.elements)
        self.ring: isa.RingEnd = k.ring_in(vector_tail.ring, core, "MTE2")
        self.finish, self.arrival = self._tiles_of(
            vector_tail.tail, m, n, self._channels(vector_tail.tail, n)
        )

    def _channels(self, tail: epilogue.Epilogue, tile_n: int) -> epilogue_emit.Group | None:
        """Allocate numbers per channel: all those of the core if they are few, else of one tile."""
        operands = tail.of_kind("channel")
        core_columns = self.core_columns
        block_bytes = sum(tail.unit(o) * DTYPE_BYTES[o.dtype] for o in operands)
        core_channels_fit = core_columns * block_bytes <= self.k.chip.buffers["UB"] // 16
        blocks = core_columns if core_channels_fit else tile_n
        slots = [blocks * tail.unit(o) for o in operands]
        return epilogue_emit.Group.make(
            self.k, operands, slots, self.vector_tail.blocks * isa.FRACTAL, blocks
        )

    def _tiles_of(
        self, tail: epilogue.Epilogue, m: int, n: int, channels: epilogue_emit.Group | None
    ) -> tuple[epilogue_emit.Finish, isa.Queue]:
        """Allocate UB for as many blocks of a tile as fit; raise `CapacityError` if none fits."""
        k = self.k
        plan = self.plan
        start = self.plan.start
        # Tile 0 is stored, tile `start` arrives: the other tiles of the plan never leave UB.
        scratch_tiles = [i for i in range(1, len(plan.tiles)) if i != start]
        operands = tail.of_kind("tile")
        stored = DTYPE_BYTES[tail.out_dtype]
        # Two slots each for what arrives and what leaves; where the plan's start is the stored
        # tile, three slots serve both.
        element_bytes = 2 * stored + 2 * DTYPE_BYTES[plan.tiles[start]] if start else 3 * stored
        element_bytes += sum(DTYPE_BYTES[plan.tiles[i]] for i in scratch_tiles)
        element_bytes += 2 * sum(DTYPE_BYTES[o.dtype] for o in operands)
        channel_bytes = 0
        if channels:
            # Two slots of numbers for every block of 16 channels.
            unit_bytes = sum(tail.unit(o) * DTYPE_BYTES[o.dtype] for o in channels.operands)
            channel_bytes = 2 * channels.blocks * unit_bytes
        # A block of a share: m fractals of 16 rows, divided by the vector cores, times 16 channels.
        block_elements = -(-m * isa.FRACTAL // k.chip.vector_cores_per_core) * isa.FRACTAL
        block_bytes = block_elements * element_bytes
        free_bytes = k.chip.buffers["UB"] - channel_bytes
        columns = min(n, free_bytes // block_bytes)
        if columns < 1:
            needed = f"{block_bytes} bytes of UB for a block of a share of a tile's rows"
            raise errors.CapacityError(needed, str(free_bytes), "use a lower tile")
        size = columns * block_elements
        sizes = [size] * len(operands)
        tiles = epilogue_emit.Group.make(k, operands, sizes, self.vector_tail.elements, 0)
        if start:
            arrival = k.queue("sums_ub", "UB", plan.tiles[start], size, src="MTE2", dst="V")
            out = k.queue("y_ub", "UB", tail.out_dtype, size, src="V", dst="MTE3")
        else:
            # The steps write over what arrived: one queue from MTE2 by V to MTE3.
            arrival = out = k.queue(
                "y_ub", "UB", tail.out_dtype, size, src="MTE2", via="V", dst="MTE3", depth=3
            )
        scratch = tuple(k.buffer(f"value.{i}", "UB", plan.tiles[i], size) for i in scratch_tiles)
        units = {o.name: tail.unit(o) for o in tail.of_kind("channel")}
        finish = epilogue_emit.Finish(k, plan, out, scratch, tiles, channels, units=units)
        return finish, arrival

    def tile(
        self,
        tile_area: Area,
        n: Span,
        first_block: isa.Affine,
        loaded: epilogue_emit.Channels | None,
    ) -> None:
        """Write the epilogue steps on this core's rows of a tile, some blocks at a time.

        `tile_area` is where the tile lies; `n` are its output blocks, counted from block
        `first_block` of the result.
        """
        k = self.k
        cores = self.k.chip.vector_cores_per_core
        area, first_row = share_of(tile_area, self.number, cores)
        run = area.pixels * isa.FRACTAL
        # In the ring a block of 16 columns has all rows of the tile, of which this core takes some.
        pitch = tile_area.pixels * isa.FRACTAL
        with epilogue_emit.held_channels(self.finish, n, first_block, loaded) as channels:
            slot = self.ring.dequeue()
            piece_blocks = self.arrival.buffer.elements // run if run else 0
            for at, count in segments(k, "column", n[1], min(piece_blocks, n[1])) if run else ():
                source = slot.region(at * pitch + first_row * isa.FRACTAL, (count, run), (pitch, 1))
                k.copy(self.arrival.alloc().region(0, (count, run)), source)
                self._steps(area, at, count, n[0], channels)
            self.ring.free()

    def _steps(
        self,
        area: Area,
        at: isa.Affine,
        count: int,
        first_block: isa.Affine,
        loaded: epilogue_emit.Channels | None,
    ) -> None:
        """Load `count` blocks, write the epilogue steps on them, and store the results."""
        f = self.finish
        assert f.out is not None
        if f.tiles:
            epilogue_emit.load_tiles(f.tiles, self.k, area, at, count)
        tiles = self._take_tiles()
        run = area.pixels * area.width
        channel_operands = f.channels.tiles_by_name(loaded.tile) if f.channels and loaded else {}
        piece = epilogue_emit.Piece(
            tiles=tiles,
            element_operands=f.tiles.tiles_by_name(f.tiles.queue.dequeue()) if f.tiles else {},
            channel_operands=channel_operands,
            first_block=first_block + at - loaded.first_block if loaded else at,
            count=count,
            run=run,
        )
        epilogue_emit.write_steps(self.k, self.plan, piece)
        if f.tiles:
            f.tiles.queue.free()
        if self.plan.start:
            self.arrival.free()
        f.out.enqueue()
        for target, source in area.pairs(self.y, f.out.dequeue(), run, at, count):
            self.k.copy(target, source)
        f.out.free()

    def _take_tiles(self) -> list[epilogue_emit.Memory]:
        """Take the sums that have arrived; return the tiles of the plan by number."""
        f = self.finish
        assert f.out is not None
        memories: dict[int, epilogue_emit.Memory] = {}
        if self.plan.start:
            self.arrival.enqueue()
            memories[self.plan.start] = self.arrival.dequeue()
            memories[0] = f.out.alloc()
        else:
            self.arrival.hand()
            # The tile that V has just been handed is the one that it writes.
            memories[0] = isa.Tile(self.arrival.buffer, self.arrival.counts["alloc"] - 1)
        # What neither arrives nor leaves is scratch.
        scratch_numbers = [i for i in range(len(self.plan.tiles)) if i not in memories]
        memories.update(zip(scratch_numbers, f.scratch, strict=True))
        return [memories[i] for i in sorted(memories)]


# -- behind a product ------------------------------------------------------------------------------
def product_programs(
    job: gemm.Job, shares: Sequence[isa.Share], vector_tail: VectorTail
) -> tuple[isa.Program, ...]:
    """Return the programs of all vector cores behind a product."""
    vector_cores = job.chip.vector_cores_per_core
    # 2 vector cores take 8 of a fractal's 16 rows each, by one program; 3 would need three.
    if isa.FRACTAL % vector_cores == 0:
        return (_product_program(job, shares, vector_tail),) * vector_cores
    return tuple(_product_program(job, shares, vector_tail, i) for i in range(vector_cores))


def _product_program(
    job: gemm.Job, shares: Sequence[isa.Share], vector_tail: VectorTail, number: int | None = None
) -> isa.Program:
    """Return the program of vector core `number`, by default one program that fits them all.

    It takes the tiles in the order in which its cube core makes them.
    """
    rows, cols = shares
    shape = job.shape
    area = job.area
    k = isa.KernelBuilder(f"after_{shape.m}x{shape.n}", job.chip)
    row = k.param("row", rows[2])
    col = k.param("col", cols[2])
    vector_core = k.param("aiv", job.chip.vector_cores_per_core) if number is None else number
    writer = TailWriter(
        k, vector_tail, "c", vector_tail.core(row, col), vector_core, (rows[0], cols[0])
    )
    m1 = shape.fractals[0]
    base = (row * rows[1] + area[0][0], col * cols[1] + area[1][0])
    for (m, n), _, channels in gemm.tiles_in_order(
        writer.finish, k, job.schedule, (rows, cols), base
    ):
        # C is (N1, M1, 16, 16): the rows of a tile are neighbours in each block of 16 columns.
        tile = Area(
            base=n[0] * (m1 * AREA),
            pieces=((0, m[0] * isa.FRACTAL, m[1] * isa.FRACTAL),),
            blocks=n[1],
            plane=m1 * isa.FRACTAL,
            step=1,
            fractals=m[1],
            pixels=m[1] * isa.FRACTAL,
        )
        writer.tile(tile, n, isa.Affine(), channels)
    return k.finish()


# -- behind a convolution --------------------------------------------------------------------------
def convolution_writers(job: conv_tiles.Job, n_own: int) -> list[conv_tiles.TileWalk]:
    """Return the writers of the vector cores' programs: one if their shares of tiles are equal."""
    count = job.chip.vector_cores_per_core
    if job.even:
        return [_ConvolutionWriter(job, n_own, isa.var("aiv"))]
    return [_ConvolutionWriter(job, n_own, number) for number in range(count)]


class _ConvolutionWriter(conv_tiles.TileWalk):
    """The programs of a vector core: the epilogue's tail on its share of every tile."""

    def __init__(self, job: conv_tiles.Job, n_own: int, number: isa.Affine | int) -> None:
        """Allocate queues."""
        super().__init__(job, n_own, f"after_{n_own * isa.FRACTAL}")
        assert job.vector_tail is not None
        sizes = job.sides(n_own)[0], n_own
        self.tail_writer = TailWriter(self.k, job.vector_tail, "y", isa.var("core"), number, sizes)
        self.finish = self.tail_writer.finish

    def begin(
        self, share: conv_tiles.BundleShare, first_bundle: isa.Affine, col: isa.Affine
    ) -> None:
        """Declare the vector core's number, if the program has it as a parameter."""
        if isinstance(self.tail_writer.number, isa.Affine):
            self.k.param("aiv", self.job.chip.vector_cores_per_core)

    def tile(
        self,
        bundle: conv_tiles.BundlePlace,
        pixels: Pixels,
        n_span: Span,
        col: isa.Affine,
        resident: conv_tiles.Resident,
    ) -> None:
        """Write the steps on the core's share of a tile."""
        first_block = bundle.index * self.bundle.n1
        self.tail_writer.tile(
            self.area(pixels, n_span, first_block), n_span, first_block, resident.channels
        )


TAIL_PROGRAMS = [("product", product_programs), ("convolution", convolution_writers)]
