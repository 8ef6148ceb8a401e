"""Max pooling of a convolution's sums on the core, before they are stored.

A layer of 64 x 112 x 112 that is pooled to 64 x 56 x 56 then writes a quarter of the bytes. The
epilogue f comes last, on fewer numbers. The result is the same if f is increasing:
f(max(x, y)) = max(f(x), f(y)).

    L0C -> UB rows -> largest of each window -> epilogue -> GM
"""

from dataclasses import replace

from ascend_lab.errors import CapacityError, UnsupportedError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import BLOCK_BYTES, Chip
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.conv_windows import Window, divided, pooled_rows, rows_seen
from ascend_lab.operators.kernels.epilogue import PLAIN, Epilogue
from ascend_lab.operators.kernels.epilogue_emit import (
    Channels,
    Piece,
    Sizes,
    copy_out,
    new_finish,
    write_steps,
)
from ascend_lab.operators.kernels.epilogue_plan import channel_blocks, demand_of, plan_of
from ascend_lab.operators.kernels.planes import C0, PIXELS, columns_seen
from ascend_lab.operators.kernels.rows import LEAST, Grid, Place, fold_largest, largest_lines
from ascend_lab.operators.kernels.tiles import Area, Span, repeat, segments


def check_pool(shape: ConvShape, chip: Chip, epilogue: Epilogue | None) -> None:
    """Raise `UnsupportedError` if the core cannot pool the result of the convolution."""
    pool = shape.pool
    if pool is None:
        return
    plan = plan_of(epilogue or PLAIN, isa.ACCUMULATOR[shape.dtype])
    kinds = {shape.dtype, plan.tiles[plan.start], shape.out_dtype, (epilogue or PLAIN).out_dtype}
    needed = {
        f"cores that bring sums through UB, not {chip.name}": chip.combined,
        "steps that rise with the sums": epilogue and epilogue.is_increasing,
        "fp16 all the way": kinds == {"fp16"},
        "one convolution, image after image": not shape.beside and shape.mixed == 1,
        "images as it writes them": (pool.n, pool.c, pool.h, pool.w)
        == (shape.n, shape.k, *shape.out_hw),
    }
    for condition, fits in needed.items():
        if not fits:
            raise UnsupportedError(
                f"for pooling on the core {condition}", f"{shape}", "use two kernels"
            )


class Pooled:
    """Max pooling of tiles of sums before they are stored; a tile has some rows of windows.

    columns    channel blocks that UB holds at a time
    seen       rows of sums that the windows of a tile read
    x          these rows, with a border around the image
    folded     the largest of neighbours in each row
    """

    def __init__(
        self,
        k: isa.KernelBuilder,
        conv: ConvShape,
        epilogue: Epilogue | None,
        sizes: Sizes,
        tile: int,
    ) -> None:
        """Allocate; raise `CapacityError` if not even one channel block fits UB."""
        shape = conv.pool
        rows = int(pooled_rows(conv, tile))
        assert shape and epilogue
        self.k = k
        self.shape = shape
        self.lines = largest_lines(shape)
        self.seen = rows_seen(shape, rows)
        pixels = rows * shape.out_hw[1]
        lines = self.lines
        demand = demand_of(epilogue, k.chip, "fp32")
        assert demand
        channel_bytes = (
            2 * channel_blocks(demand, k.chip, sizes.n_own, sizes.tile_n) * demand.block_bytes
        )
        # The last repeat of 8 pixels reads and writes beyond the last row.
        spare_pixels = (PIXELS * shape.strides[1] + shape.s, PIXELS)
        # The epilogue runs on pooled pixels only: its tile is as high as those.
        pooled_sizes = replace(sizes, tile_m=isa.ceil_div(pixels, isa.FRACTAL))
        # A channel block in UB: the rows of sums, the folded rows, and the epilogue on the results.
        folded_pitch = lines.pitch if lines.folded else 0
        column_bytes = self.seen * (lines.line + folded_pitch) * BLOCK_BYTES
        column_bytes += pooled_sizes.tile_m * isa.FRACTAL * isa.FRACTAL * demand.tile_bytes
        room = k.chip.buffers["UB"] - channel_bytes - sum(spare_pixels) * BLOCK_BYTES
        self.columns = min(pooled_sizes.tile_n, room // column_bytes)
        if not self.columns:
            needed = f"UB for {self.seen} rows of a block and their windows: {column_bytes} bytes"
            raise CapacityError(needed, f"{room} on {k.chip.name}", "use a smaller base_m")
        row_count = self.columns * self.seen
        image_pixels = row_count * lines.line + spare_pixels[0]
        folded_pixels = row_count * folded_pitch + spare_pixels[1]
        self.x = k.buffer("rows", "UB", "fp16", image_pixels * C0)
        self.folded = k.buffer("folded", "UB", "fp16", folded_pixels * C0)
        finish = new_finish(k, epilogue, "fp32", replace(pooled_sizes, taken=k.used_bytes("UB")))
        assert finish and finish.out
        self.finish = finish
        self.out = finish.out

    def begin(self) -> None:
        """Write the border around the rows, which no tile overwrites."""
        # With a vertical stride of 1 instructions also read the gaps between folded rows.
        read_with_gaps = [self.folded] if self.shape.strides[0] == 1 else []
        for buffer in (self.x, *read_with_gaps):
            self.k.each("vdup", buffer.elements, (buffer, 0), scalar=LEAST)

    def drain(
        self,
        acc: isa.Queue,
        y: isa.Buffer,
        place: tuple[isa.Affine, isa.Affine],
        tile: tuple[int, int, Window],
        first_block: isa.Affine,
        loaded: Channels | None,
    ) -> None:
        """Pool a tile (blocks, fractals of each in L0C, windows) and store it at `place` in y.

        `first_block` and the numbers per channel, `loaded`, are as in `epilogue_emit.drain`.
        """
        k = self.k
        (plane, down) = place
        (blocks, fractals, window) = tile
        c = acc.dequeue()
        area = self._area(plane, down, blocks, window)
        piece_blocks = min(self.columns, blocks)
        pieces = (
            [(isa.Affine(), piece_blocks)]
            if piece_blocks == blocks
            else segments(k, "column", blocks, piece_blocks)
        )
        for at, count in pieces:
            self._copy_sums(c, fractals, window, (at, count))
            # L0C is free once all sums are copied: at once, if they are in one piece.
            if piece_blocks == blocks:
                acc.free()
            memories: list[Place] = [self.out.alloc(), *self.finish.scratch]
            self._fold(memories[self.finish.plan.start], window, count)
            group = self.finish.channels
            rates = group.tiles_by_name(loaded.tile) if group and loaded else {}
            block = first_block + at - loaded.first_block if loaded else at
            run = window.pixels * C0
            write_steps(k, self.finish.plan, Piece(memories, {}, rates, block, count, run))
            copy_out(k, self.out, ((y, area),), run, (at, count))
        if piece_blocks < blocks:
            acc.free()

    def _area(self, plane: isa.Affine, down: isa.Affine, blocks: int, window: Window) -> Area:
        """Where y keeps a tile's windows: `plane` and `down` as `drain`'s place."""
        (oh, pw) = self.shape.out_hw
        # The tile's first row of windows is its first image row, padding included, divided by the
        # stride.
        top_row = window.rows.first - window.rows.before + self.shape.pads[0]
        row = divided(down + top_row, self.shape.strides[0])
        return Area(
            base=plane * C0,
            pieces=((0, row * pw, window.pixels),),
            blocks=blocks,
            plane=oh * pw,
            step=1,
            fractals=0,  # not used: these pixels come from UB
            pixels=0,
        )

    def _copy_sums(self, c: isa.Tile, fractals: int, window: Window, blocks: Span) -> None:
        """Copy the rows of some channel blocks from L0C to their places inside the border.

        A block of 16 channels is `fractals` high in L0C.
        """
        seen = window.rows
        (at, count) = blocks
        (_, zeros_left, columns) = columns_seen(self.shape)
        line = self.lines.line * C0
        block_elements = fractals * isa.FRACTAL * isa.FRACTAL
        sizes = (count, seen.count, columns * C0)
        start = seen.before * line + zeros_left * C0
        target = self.x.region(start, sizes, (self.seen * line, line, 1))
        source = c.region(at * block_elements, sizes, (block_elements, self.shape.w * C0, 1))
        self.k.copy(target, source, relu=self.finish.plan.relu)

    def _fold(self, to: Place, window: Window, blocks: int) -> None:
        """Write the maximum of each window of some channel blocks, one plane after the other."""
        k = self.k
        shape = self.shape
        lines = self.lines
        seen = window.rows
        pw = self.lines.width
        line = lines.line
        (down, across) = shape.strides
        end = seen.before + seen.count
        for at, rows in ((0, seen.before), (end, seen.after)):
            if not rows:
                continue
            with repeat(k, "block", blocks) as block:
                start = (block * self.seen + at) * (line * C0)
                k.each("vdup", rows * line * C0, (self.x, start), scalar=LEAST)
        if lines.folded:
            # Blocks lie one behind the other: fold the rows of all of them at once.
            all_rows = Grid(blocks * self.seen, pw, line, lines.pitch, across)
            fold_largest(k, all_rows, list(range(shape.s)), self.x, self.folded)
            source = self.folded
            pitch = lines.pitch
            step = 1
            taps = [i * pitch for i in range(shape.r)]
        else:
            source = self.x
            pitch = line
            step = across
            taps = [i * line + j for i in range(shape.r) for j in range(shape.s)]
        grid = Grid(window.pixels // pw, pw, down * pitch, pw, step)
        with repeat(k, "block", blocks) as block:
            starts = (block * (self.seen * pitch), block * window.pixels)
            fold_largest(k, grid, taps, source, to, starts)
