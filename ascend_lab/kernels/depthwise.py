"""Depthwise convolution on the vector unit: one multiply and one add per kernel tap.

In NC1HWC0 a block of 32 bytes holds the channels of one pixel, so one repeat multiplies 8
neighbouring pixels by the weights of one tap (a stride of 0 repeats them). Products and sums are
fp16 and round once each. An epilogue runs where the sums lie already; its operands per channel come
with the taps. The largest of each window comes about in the same way, without weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from ascend_lab.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.errors import CapacityError, InputError, PathError, TypeMismatchError
from ascend_lab.isa import Affine, Buffer, KernelBuilder, Launch, Program, Queue, Region, Tile
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.epilogue import Epilogue, Operand, pattern, step_formats
from ascend_lab.kernels.epilogue_emit import Piece, load_channels, write_steps
from ascend_lab.kernels.epilogue_plan import Plan, plan_of
from ascend_lab.kernels.gemm_schedule import FRACTAL, up
from ascend_lab.kernels.planes import (
    C0,
    PIXELS,
    Own,
    RowBlock,
    columns_seen,
    image_sizes,
    plane_launch,
    row_blocks,
    rows_per_block,
    walk,
)
from ascend_lab.kernels.tiles import repeat
from ascend_lab.layout import address_map, pack

SUM = "fp16"
"""The format of sums on the vector unit."""
LEAST = -65504.0
"""What stands around an image whose largest numbers are sought."""


@dataclass(frozen=True, slots=True)
class Lines:
    """How rows lie in UB, in pixels: `line` a row of the image, `pitch` from output to output row.

    Flat: one instruction runs over all rows of a block; it needs equal strides, and computes
    garbage between the rows that is not stored. Otherwise each output row is an instruction.
    """

    line: int
    pitch: int
    flat: bool

    def outputs(self, rows: int, ow: int) -> int:
        """Pixels of sums for `rows` output rows, whole repeats."""
        return _whole((rows - 1) * self.pitch + ow) if self.flat else rows * self.pitch

    def seen(self, shape: ConvShape, rows: int) -> int:
        """Pixels of image rows, with what whole repeats read past the last row."""
        (sh, sw), (down, right) = shape.strides, shape.reach
        start = 0 if self.flat else (rows - 1) * sh * self.line
        run = self.outputs(rows, shape.out_hw[1]) if self.flat else self.pitch
        last = start + (down - 1) * self.line + right - 1 + (run - 1) * sw
        return max(last + 1, ((rows - 1) * sh + down) * self.line)


def _whole(pixels: int) -> int:
    return up(pixels, PIXELS) * PIXELS


def lines_of(shape: ConvShape, chip: Chip) -> Lines:
    """Take the flat form where it costs fewer cycles a row than an instruction of its own."""
    line, ow, cost = columns_seen(shape)[0], shape.out_hw[1], chip.vector_costs["vmul"]
    by_row = cost.head_cycles + cost.slope_cycles * up(ow, PIXELS)
    equal = shape.strides[0] == shape.strides[1]
    if equal and cost.slope_cycles * line / PIXELS < by_row:
        return Lines(line, line, True)
    return Lines(line, _whole(ow), False)


def depthwise_launch(
    shape: ConvShape, chip: Chip, *, dense: bool = False, epilogue: Epilogue | None = None
) -> Launch:
    """Convolve each channel with its own kernel on all vector cores.

    Tensors are x (N, C1, H, W, C0), weight (C1, r, s, C0) and y (N, C1, pixels, C0), pixels
    rounded up to 16 as the cube's convolution leaves them (`unpack_conv` reads them), or exactly
    OH * OW if `dense`. `epilogue` is done to the fp16 sums. Raises `InputError` unless every
    channel is a group of its own in fp16, `CapacityError` where one output row does not fit UB,
    `PathError` for an epilogue that `supported_after` refuses.
    """
    if not shape.groups == shape.c == shape.k or (shape.dtype, shape.out_dtype) != ("fp16",) * 2:
        needed = "fp16 and as many groups as input and output channels"
        got = f"{shape.dtype}, {shape.groups} groups, {shape.c} and {shape.k} channels"
        raise InputError(needed, got, "use conv_launch")
    if reason := supported_after(epilogue) if epilogue else "":
        wanted = f"an epilogue of a depthwise kernel on {chip.name}"
        raise PathError(wanted, reason, "run the steps as a kernel of their own")
    name = f"depthwise_{shape.n}x{shape.c}x{shape.h}x{shape.w}"

    def program(own: Own) -> Program:
        rows = rows_per_block(own, _most_rows(shape, chip, epilogue))
        return _Writer.make(shape, chip, rows, dense, epilogue).program(own, rows)

    return plane_launch(name, image_sizes(shape, chip), program)


def max_pool_launch(shape: ConvShape, chip: Chip) -> Launch:
    """Return the largest number of each window, x (N, C1, H, W, C0) to y, on all vector cores.

    The windows are those of a depthwise convolution in fp16. Raises as `depthwise_launch`.
    """

    def program(own: Own) -> Program:
        rows = rows_per_block(own, _most_rows(shape, chip, None))
        return _Writer.make(shape, chip, rows, True, None, LEAST).program(own, rows)

    return plane_launch(f"max_pool_{shape.n}x{shape.c}", image_sizes(shape, chip), program)


def pack_depthwise(
    shape: ConvShape, x: NDArray[Any], weight: NDArray[Any]
) -> dict[str, NDArray[Any]]:
    """Lay x (n, c, h, w) and weights (c, 1, r, s) out as the kernel reads them."""
    if x.shape != (shape.n, shape.c, shape.h, shape.w):
        raise InputError("x as (n, c, h, w)", str(x.shape), "reshape it")
    if weight.shape != (shape.c, 1, shape.r, shape.s):
        raise InputError("weight as (c, 1, r, s)", str(weight.shape), "reshape it")
    images = {"x": x, "weight": weight.reshape(1, shape.c, shape.r, shape.s)}
    return {
        name: pack(address_map("NC1HWC0", image.shape, shape.dtype), image)
        for name, image in images.items()
    }


def _most_rows(shape: ConvShape, chip: Chip, epilogue: Epilogue | None) -> int:
    """Most output rows of a block: image rows and sums twice, products once, weights twice."""
    lines, (oh, ow) = lines_of(shape, chip), shape.out_hw
    more, fixed = _after_blocks(epilogue)
    room = chip.buffers["UB"] // BLOCK_BYTES - 2 * shape.taps - fixed

    def needed(rows: int) -> int:
        return 2 * lines.seen(shape, rows) + (3 + more) * lines.outputs(rows, ow)

    rows = 0
    while rows < oh and needed(rows + 1) <= room:
        rows += 1
    if not rows:
        raise CapacityError(
            f"UB for one output row of {ow} pixels: {needed(1)} blocks of 32 bytes",
            f"{room} on {chip.name}",
            "cut the image into columns or use conv_launch",
        )
    return rows


# -- the epilogue ---------------------------------------------------------------------------------
def supported_after(epilogue: Epilogue) -> str:
    """Return "" if a depthwise convolution can fuse the epilogue, otherwise the reason."""
    try:
        step_formats(epilogue, SUM)
    except TypeMismatchError as error:
        return str(error)
    if epilogue.of_kind("tile"):
        return "a depthwise kernel keeps rows with gaps in UB, a tile operand has none"
    if epilogue.out_dtype != SUM:
        return f"a depthwise kernel stores {SUM}, not {epilogue.out_dtype}"
    return ""


def _after_blocks(epilogue: Epilogue | None) -> tuple[int, int]:
    """Return 32-byte blocks of UB: (per output pixel, once) that the epilogue adds."""
    if epilogue is None:
        return 0, 0
    scratch = sum(DTYPE_BYTES[dtype] for dtype in plan_of(epilogue, SUM).tiles[1:])
    fixed = sum(2 * pattern(o.dtype) * DTYPE_BYTES[o.dtype] for o in epilogue.operands)
    return scratch * FRACTAL // BLOCK_BYTES, fixed // BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class _After:
    """An epilogue in one kernel: its operands (tensor, slots) share the slots of the taps."""

    plan: Plan
    operands: tuple[tuple[Operand, Buffer, Buffer], ...]
    scratch: tuple[Buffer, ...]

    @classmethod
    def make(
        cls, k: KernelBuilder, epilogue: Epilogue, taps: Queue, c1: int, elements: int
    ) -> "_After":
        """Allocate operands and scratch tiles for blocks of `elements` sums."""
        plan = plan_of(epilogue, SUM)
        operands = []
        for o in epilogue.operands:
            tensor = k.tensor(o.name, o.dtype, c1 * FRACTAL)
            operands.append((o, tensor, taps.join(f"{o.name}_ub", o.dtype, pattern(o.dtype))))
        scratch = [
            k.buffer(f"value.{i}", "UB", dtype, elements)
            for i, dtype in enumerate(plan.tiles[1:], 1)
        ]
        return cls(plan, tuple(operands), tuple(scratch))

    def load(self, k: KernelBuilder, taps: Tile, channel: Affine) -> None:
        """Bring the numbers of one channel block beside its taps."""
        for operand, tensor, slots in self.operands:
            slot = Tile(slots, taps.slot)
            load_channels(k, slot, tensor, (channel, 1), pattern(operand.dtype))

    def write(self, k: KernelBuilder, sums: Tile, taps: Tile, elements: int) -> None:
        """Write the steps on the sums of one block of rows, in place."""
        rates = {operand.name: Tile(slots, taps.slot) for operand, _, slots in self.operands}
        piece = Piece((sums, *self.scratch), {}, rates, Affine(), 1, elements)
        write_steps(k, self.plan, piece)


# -- one core -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Writer:
    """What the parts of one core's kernel share."""

    shape: ConvShape
    k: KernelBuilder
    x: Buffer
    weight: Buffer | None
    y: Buffer
    rows: Queue
    taps: Queue | None
    sums: Queue
    products: Buffer
    lines: Lines
    plane: int
    around: float
    after: _After | None = None

    @classmethod
    def make(
        cls,
        shape: ConvShape,
        chip: Chip,
        rows: int,
        dense: bool,
        epilogue: Epilogue | None,
        around: float = 0.0,
    ) -> "_Writer":
        """Declare tensors, allocate queues for blocks of `rows` output rows.

        `around` stands beside the image; `LEAST`: the largest of each window, no taps.
        """
        largest = around == LEAST
        k, lines = (
            KernelBuilder("max_pool" if largest else "depthwise", chip),
            lines_of(shape, chip),
        )
        (oh, ow), (c1, _) = shape.out_hw, shape.blocks
        outputs, seen = lines.outputs(rows, ow) * C0, lines.seen(shape, rows) * C0
        plane = oh * ow if dense else up(oh * ow, FRACTAL) * FRACTAL
        made = cls(
            shape,
            k,
            k.tensor("x", "fp16", shape.n * c1 * shape.h * shape.w * C0),
            None if largest else k.tensor("weight", "fp16", c1 * shape.taps * C0),
            k.tensor("y", "fp16", shape.n * c1 * plane * C0),
            k.queue("rows", "UB", "fp16", seen, src="MTE2", dst="V"),
            None
            if largest
            else k.queue("taps", "UB", "fp16", shape.taps * C0, src="MTE2", dst="V"),
            k.queue("sums", "UB", "fp16", outputs, src="V", dst="MTE3"),
            k.buffer("products", "UB", "fp16", outputs),
            lines,
            plane,
            around,
        )
        if epilogue is None or made.taps is None:
            return made
        return replace(made, after=_After.make(k, epilogue, made.taps, c1, outputs))

    def program(self, own: Own, size: int) -> Program:
        """Walk the planes in blocks of `size` rows; borders are zeroed once, loads skip them."""
        buffer, held = self.rows.buffer, list[Tile]()
        for slot in range(buffer.slots):
            self.k.each("vdup", buffer.elements, (Tile(buffer, slot), 0), scalar=self.around)
        self.k.barrier()
        for channel, image in walk(self.k, own, lambda c: self._weights(c, held)):
            for block, turn in row_blocks(self.k, self.shape, own, size):
                plane = image * self.shape.blocks[0] + channel
                self._block(plane, block, turn, held[-1] if held else None)
        return self.k.finish()

    @contextmanager
    def _weights(self, channel: Affine, held: list[Tile]) -> Iterator[None]:
        """Hold the taps of one channel block while its planes are walked."""
        if self.weight is None or self.taps is None:
            yield
            return
        size = self.shape.taps * C0
        source = self.weight.region(channel * size, size)
        tile = self.taps.alloc()
        self.k.copy(tile.region(), source)
        if self.after:
            self.after.load(self.k, tile, channel)
        self.taps.enqueue()
        held.append(self.taps.dequeue())
        yield
        held.pop()
        self.taps.free()

    def _block(self, plane: Affine, block: RowBlock, turn: Affine, weights: Tile | None) -> None:
        """Load rows, sum over the taps, store the pixels of the block."""
        k, lines, ow = self.k, self.lines, self.shape.out_hw[1]
        self._load(plane, block, turn)
        x, sums, row = self.rows.dequeue(), self.sums.alloc(), lines.line * C0
        if block.before:
            k.each("vdup", block.before * row, (x, 0), scalar=self.around)
        if block.after:
            first = (block.seen - block.after) * row
            k.each("vdup", block.after * row, (x, first), scalar=self.around)
        flat = lines.flat
        turns, pixels = (1, lines.outputs(block.rows, ow)) if flat else (block.rows, lines.pitch)
        down = self.shape.strides[0] * lines.line
        with repeat(k, "row", turns) as i:
            fold = self._sum if weights else self._largest
            fold((x, sums, weights or sums), (i * down, i * lines.pitch), pixels)
        self.rows.free()
        if self.after and weights:
            self.after.write(k, sums, weights, turns * pixels * C0)
        self.sums.enqueue()
        pixel = plane * self.plane + turn * (block.rows * ow) + block.start * ow
        target = _rows(self.y, pixel * C0, block.rows, ow, ow)
        source = self.sums.dequeue().region(0, target.sizes, (lines.pitch * C0, 1))
        k.copy(target, source)
        self.sums.free()

    def _load(self, plane: Affine, block: RowBlock, turn: Affine) -> None:
        """Bring the image rows of a block to their place between the zeros."""
        shape, line = self.shape, self.lines.line
        _, left, columns = columns_seen(shape)
        tile = self.rows.alloc()
        if block.count and columns:
            first = turn * (block.rows * shape.strides[0]) + block.first
            start = (plane * (shape.h * shape.w) + first * shape.w) * C0
            source = _rows(self.x, start, block.count, columns, shape.w)
            place = (block.before * line + left) * C0
            self.k.copy(tile.region(place, (block.count, columns * C0), (line * C0, 1)), source)
        self.rows.enqueue()

    def _sum(self, tiles: tuple[Tile, Tile, Tile], at: tuple[Affine, Affine], pixels: int) -> None:
        """Sum the taps for a run of output pixels; `at` is its first pixel in x and in the sums."""
        for first, count, sources in self._seen(tiles[0], at[0], pixels):
            sizes = (count, PIXELS, C0)
            total = tiles[1].region((at[1] + first) * C0, sizes)
            product = self.products.region((at[1] + first) * C0, sizes)
            for tap, source in enumerate(sources):
                weight = tiles[2].region(tap * C0, sizes, (0, 0, 1))
                self.k.vector("vmul", product if tap else total, source, weight)
                if tap:
                    self.k.vector("vadd", total, total, product)

    def _largest(
        self, tiles: tuple[Tile, Tile, Tile], at: tuple[Affine, Affine], pixels: int
    ) -> None:
        """Find the largest of the taps for a run of output pixels."""
        for first, count, (one, *others) in self._seen(tiles[0], at[0], pixels):
            total = tiles[1].region((at[1] + first) * C0, (count, PIXELS, C0))
            for number, source in enumerate(others or [one]):
                self.k.vector("vmax", total, total if number else one, source)

    def _seen(self, x: Tile, at: Affine, pixels: int) -> Iterator[tuple[int, int, list[Region]]]:
        """Yield (first pixel, repeats, what each tap reads) of a run of output pixels."""
        shape, step = self.shape, self.shape.strides[1]
        (down, right), strides = shape.dilations, (PIXELS * step * C0, step * C0, 1)
        for first, (count, _) in self.k.runs(pixels, PIXELS):
            taps = (divmod(tap, shape.s) for tap in range(shape.taps))
            places = (first * step + i * down * self.lines.line + j * right for i, j in taps)
            sizes = (count, PIXELS, C0)
            yield first, count, [x.region((at + place) * C0, sizes, strides) for place in places]


def _rows(tensor: Buffer, start: Affine, rows: int, pixels: int, pitch: int) -> Region:
    return tensor.region(start, (rows, pixels * C0), (pitch * C0, 1))
