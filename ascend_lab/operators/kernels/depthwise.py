"""Depthwise convolution on the vector unit: a multiply for each kernel tap, and additions.

In NC1HWC0 a block of 32 bytes holds the channels of one pixel, so one repeat multiplies 8
neighbouring pixels by the weights of one tap (a stride of 0 repeats them). A 3 x 3 kernel takes 9
multiplications and 8 additions. Products and sums are fp16 and round once each. An epilogue (bias,
activation) runs on the sums in UB; its operands per channel are loaded with the taps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ascend_lab import errors
from ascend_lab.machine import isa
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.machine.layout import address_map, pack
from ascend_lab.operators.kernels import epilogue_emit, epilogue_plan, planes
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.epilogue import Epilogue, Operand, pattern, step_formats
from ascend_lab.operators.kernels.rows import Lines, RowWriter, most_rows

SUM_DTYPE = "fp16"
"""The format of sums on the vector unit."""


def lines_of(shape: ConvShape, chip: Chip) -> Lines:
    """Return the quickest distances of image rows and of output rows in UB.

    Either output rows are whole repeats, one behind the other, or they are as far apart as image
    rows, so that one instruction runs over all rows and the gaps between them.
    """
    line = planes.columns_seen(shape)[0]
    (oh, ow) = shape.out_hw
    # 28 columns are 4 repeats of 8 pixels: 32.
    output_line = isa.ceil_div(ow, planes.PIXELS) * planes.PIXELS
    candidates = [Lines(line, output_line, output_line)]
    if shape.strides[0] == shape.strides[1]:
        candidates.append(Lines(line, line, ow))
    return min(candidates, key=lambda lines: lines.grid(shape, oh).best_sweeps(chip)[0])


def depthwise_launch(
    shape: ConvShape, chip: Chip, *, dense: bool = False, epilogue: Epilogue | None = None
) -> isa.Launch:
    """Return the launch that convolves each channel with its own kernel on all vector cores.

    Tensors are x (N, C1, H, W, C0), weight (C1, r, s, C0) and y (N, C1, pixels, C0), pixels
    rounded up to 16 as the cube's convolution leaves them (`unpack_conv` reads them), or exactly
    OH * OW if `dense`. `epilogue` is applied to the fp16 sums. Raises `InputError` unless every
    channel is a group of its own in fp16, `CapacityError` where one output row does not fit UB,
    `PathError` for an epilogue that a depthwise kernel cannot apply (see `epilogue_obstacle`).
    """
    each_channel_alone = shape.groups == shape.c == shape.k
    if not each_channel_alone or (shape.dtype, shape.out_dtype) != ("fp16", "fp16"):
        needed = "fp16 and as many groups as input and output channels"
        got = f"{shape.dtype}, {shape.groups} groups, {shape.c} and {shape.k} channels"
        raise errors.InputError(needed, got, "use conv_launch")
    obstacle = epilogue_obstacle(epilogue) if epilogue else ""
    if obstacle:
        needed_epilogue = f"an epilogue of a depthwise kernel on {chip.name}"
        raise errors.PathError(needed_epilogue, obstacle, "run the steps as a kernel of their own")
    name = f"depthwise_{shape.n}x{shape.c}x{shape.h}x{shape.w}"

    lines = lines_of(shape, chip)
    blocks_per_pixel, fixed_blocks = _epilogue_blocks(epilogue)
    # Two slots of taps, one block of 32 bytes for each of 9 taps of a 3 x 3 kernel.
    rows_that_fit = most_rows(
        shape, chip, lines, blocks_per_result=blocks_per_pixel, fixed=fixed_blocks + 2 * shape.taps
    )

    def program(share: planes.PlaneShare) -> isa.Program:
        rows = planes.rows_per_block(share, rows_that_fit)
        return _Writer(shape, chip, lines, rows, dense, epilogue).program(share)

    return planes.plane_launch(name, planes.image_sizes(shape, chip), program)


def pack_depthwise(
    shape: ConvShape, x: NDArray[Any], weight: NDArray[Any]
) -> dict[str, NDArray[Any]]:
    """Lay x (n, c, h, w) and weights (c, 1, r, s) out as the kernel reads them."""
    if x.shape != (shape.n, shape.c, shape.h, shape.w):
        raise errors.InputError("x as (n, c, h, w)", str(x.shape), "reshape it")
    if weight.shape != (shape.c, 1, shape.r, shape.s):
        raise errors.InputError("weight as (c, 1, r, s)", str(weight.shape), "reshape it")
    images = {"x": x, "weight": weight.reshape(1, shape.c, shape.r, shape.s)}
    return {
        name: pack(address_map("NC1HWC0", image.shape, shape.dtype), image)
        for name, image in images.items()
    }


# -- the epilogue ---------------------------------------------------------------------------------
def epilogue_obstacle(epilogue: Epilogue) -> str:
    """Return "" if a depthwise convolution can fuse the epilogue, otherwise the reason."""
    try:
        step_formats(epilogue, SUM_DTYPE)
    except errors.TypeMismatchError as error:
        return str(error)
    if epilogue.of_kind("tile"):
        return "a depthwise kernel keeps rows with gaps in UB, a tile operand has none"
    if epilogue.out_dtype != SUM_DTYPE:
        return f"a depthwise kernel stores {SUM_DTYPE}, not {epilogue.out_dtype}"
    return ""


def _epilogue_blocks(epilogue: Epilogue | None) -> tuple[int, int]:
    """Return the 32-byte blocks of UB that the epilogue adds: (per output pixel, in all)."""
    if epilogue is None:
        return 0, 0
    # Bytes per element times 16 channels, in blocks of 32 bytes: 2 bytes are one block a pixel.
    scratch_tiles = epilogue_plan.plan_of(epilogue, SUM_DTYPE).tiles[1:]
    scratch_bytes = sum(DTYPE_BYTES[dtype] for dtype in scratch_tiles)
    fixed_bytes = sum(2 * pattern(o.dtype) * DTYPE_BYTES[o.dtype] for o in epilogue.operands)
    return scratch_bytes * isa.FRACTAL // BLOCK_BYTES, fixed_bytes // BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class _VectorEpilogue:
    """An epilogue in one kernel; its operands (tensor, buffer in UB) come with the taps."""

    plan: epilogue_plan.Plan
    operands: tuple[tuple[Operand, isa.Buffer, isa.Buffer], ...]
    scratch: tuple[isa.Buffer, ...]

    @classmethod
    def make(
        cls, k: isa.KernelBuilder, epilogue: Epilogue, taps: isa.Queue, c1: int, elements: int
    ) -> "_VectorEpilogue":
        """Allocate operands and scratch tiles for blocks of `elements` sums."""
        plan = epilogue_plan.plan_of(epilogue, SUM_DTYPE)
        operands = []
        for o in epilogue.operands:
            tensor = k.tensor(o.name, o.dtype, c1 * isa.FRACTAL)
            operands.append((o, tensor, taps.join(f"{o.name}_ub", o.dtype, pattern(o.dtype))))
        scratch = [
            k.buffer(f"value.{i}", "UB", dtype, elements)
            for i, dtype in enumerate(plan.tiles[1:], 1)
        ]
        return cls(plan, tuple(operands), tuple(scratch))

    def load(self, k: isa.KernelBuilder, taps: isa.Tile, channel: isa.Affine) -> None:
        """Load the epilogue's numbers of one channel block to the slot of its taps."""
        for operand, tensor, slots in self.operands:
            slot = isa.Tile(slots, taps.slot)
            epilogue_emit.load_channels(k, slot, tensor, (channel, 1), pattern(operand.dtype))

    def write(self, k: isa.KernelBuilder, sums: isa.Tile, taps: isa.Tile, elements: int) -> None:
        """Write the steps on the sums of one block of rows, in place."""
        # Numbers per channel lie in the slot of the taps they came with.
        channel_tiles = {
            operand.name: isa.Tile(slots, taps.slot) for operand, _, slots in self.operands
        }
        piece = epilogue_emit.Piece(
            (sums, *self.scratch), {}, channel_tiles, isa.Affine(), 1, elements
        )
        epilogue_emit.write_steps(k, self.plan, piece)


# -- one core -------------------------------------------------------------------------------------
class _Writer(RowWriter):
    """Writes the program of one core: sums of products with the taps of a channel block at a time.

    The taps of a channel block stay in UB while the block's planes, one per image, are computed.
    """

    def __init__(
        self,
        shape: ConvShape,
        chip: Chip,
        lines: Lines,
        rows: int,
        dense: bool,
        epilogue: Epilogue | None,
    ) -> None:
        """Declare tensors, allocate queues for blocks of `rows` output rows."""
        super().__init__("depthwise", shape, chip, lines, rows, 0.0)
        k = self.k
        c1 = shape.blocks[0]
        taps = shape.taps * planes.C0
        if not dense:
            # The cube's convolution pads planes to 16 pixels: 49 become 64.
            self.plane = isa.ceil_div(self.plane, isa.FRACTAL) * isa.FRACTAL
        self.weight = k.tensor("weight", "fp16", c1 * taps)
        self.taps = k.queue("taps", "UB", "fp16", taps, src="MTE2", dst="V")
        self.epilogue = epilogue and _VectorEpilogue.make(
            k, epilogue, self.taps, c1, self.results.buffer.elements
        )
        self.resident_taps: isa.Tile | None = None

    @contextmanager
    def around_planes(self, channel: isa.Affine) -> Iterator[None]:
        """Keep the taps of one channel block in UB while its planes are computed."""
        size = self.shape.taps * planes.C0
        tile = self.taps.alloc()
        self.k.copy(tile.region(), self.weight.region(channel * size, size))
        if self.epilogue:
            self.epilogue.load(self.k, tile, channel)
        self.taps.enqueue()
        self.resident_taps = self.taps.dequeue()
        yield
        self.taps.free()

    def compute(self, x: isa.Tile, results: isa.Tile, block: planes.RowBlock) -> None:
        """Sum over the taps, then do the epilogue."""
        assert self.resident_taps is not None
        (down, right) = self.shape.dilations
        line = self.lines.line
        for run in self.lines.grid(self.shape, block.rows).runs(self.k):
            total = run.written(results)
            # The first tap's product is the first sum; others are written to the scratch buffer
            # and added from there.
            product = run.written(self.scratch)
            for tap in range(self.shape.taps):
                i, j = divmod(tap, self.shape.s)
                # Strides of 0: 16 channels of one tap for all pixels.
                weight = self.resident_taps.region(tap * planes.C0, total.sizes, (0, 0, 1))
                source = run.read(x, i * down * line + j * right)
                self.k.vector("vmul", product if tap else total, source, weight)
                if tap:
                    self.k.vector("vadd", total, total, product)
        if self.epilogue:
            self.epilogue.write(
                self.k,
                results,
                self.resident_taps,
                self.lines.output_pixels(block.rows) * planes.C0,
            )
