"""Write the instructions that move a tile of sums out of L0C, through its epilogue, to GM.

Where cube and vector unit share a core, sums go through UB, where the vector unit does the steps.
Where they are separate, the bias table and the fix pipe do the steps that they support.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ascend_lab import errors
from ascend_lab.machine import chip
from ascend_lab.machine.isa import (
    FRACTAL,
    Affine,
    Buffer,
    KernelBuilder,
    Queue,
    Region,
    RingEnd,
    Tile,
)
from ascend_lab.operators.kernels.epilogue import (
    UNCHANGED,
    Deq,
    Epilogue,
    Fix,
    Operand,
    check_epilogue,
    fix_of,
    pattern,
)
from ascend_lab.operators.kernels.epilogue_plan import (
    Demand,
    Placed,
    Plan,
    channel_blocks,
    demand_of,
    drain_plan,
)
from ascend_lab.operators.kernels.tiles import Area, Span, repeat, segments, store_area

Memory = Tile | Buffer
REPEATS_PER_START = 6
"""Number of repeats of a vector instruction that take about as long as starting another one."""


# -- the steps on a piece of a tile ---------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a tile in UB: `count` blocks of `run` elements.

    `tiles` are the tiles of the plan, `element_operands` the operands with a number per element,
    `channel_operands` those with a number per channel, by name. Block `first_block` of the latter
    belongs to the first block of the piece.
    """

    tiles: Sequence[Memory]
    element_operands: Mapping[str, Memory]
    channel_operands: Mapping[str, Tile]
    first_block: Affine
    count: int
    run: int


def load_channels(k: KernelBuilder, slot: Tile, tensor: Buffer, blocks: Span, unit: int) -> None:
    """Copy the numbers of `blocks` (first, count) of 16 channels to UB, each block repeated.

    A block fills `unit` elements: 64 for fp32 are the same 16 numbers four times.
    """
    first_block, count = blocks
    source = tensor.region(first_block * FRACTAL, (count, FRACTAL))
    for repetition in range(unit // FRACTAL):
        k.copy(slot.region(repetition * FRACTAL, (count, FRACTAL), (unit, 1)), source)


def write_steps(k: KernelBuilder, plan: Plan, piece: Piece) -> None:
    """Write the vector instructions of all steps.

    A step without channel operands runs over the piece as if it were flat. Others take one block at
    a time, or, where a block has few repeats, one repeat of every block at a time.
    """
    for step in plan.steps:
        write = _StepWriter(k, step, piece)
        repeats_per_block = -(-piece.run // write.lanes)
        # No number per channel: the blocks are one long row of elements.
        if not any(write.channel_tiles):
            write.run(Affine(), piece.count * piece.run, Affine())
        # 2 repeats a block and 8 blocks: 2 instructions across all blocks instead of 8 along each.
        elif repeats_per_block < piece.count <= k.chip.max_repeat:
            # One repeat of every block: 64 lanes of each in fp32.
            for start in range(0, piece.run, write.lanes):
                shape = (piece.count, min(write.lanes, piece.run - start))
                write.instruction(Affine(start), shape, piece.run, piece.first_block, 1)
        else:
            with repeat(k, "block", piece.count) as block:
                write.run(block * piece.run, piece.run, piece.first_block + block)


class _StepWriter:
    """Writes the instructions of one step.

    For the result and every source, `tiles` has its tile, or None where `channel_tiles` has its
    numbers per channel.
    """

    def __init__(self, k: KernelBuilder, step: Placed, piece: Piece) -> None:
        self.k = k
        self.step = step
        self.tiles: list[Memory | None] = []
        self.channel_tiles: list[Tile | None] = []
        for source in (step.to, *step.sources):
            if isinstance(source, int):
                tile: Memory | None = piece.tiles[source]
            else:
                tile = piece.element_operands.get(source)
            self.tiles.append(tile)
            self.channel_tiles.append(None if tile else piece.channel_operands[str(source)])
        operands = [operand for operand in (*self.tiles, *self.channel_tiles) if operand]
        item_bytes = [
            (operand if isinstance(operand, Buffer) else operand.buffer).itemsize
            for operand in operands
        ]
        # The widest operand decides how many elements a repeat takes: 64 in fp32, 128 in fp16.
        self.lanes = k.chip.vector_bytes_per_repeat // max(item_bytes)

    def run(self, start: Affine, elements: int, block: Affine) -> None:
        """Write the step on neighbouring elements, of one block or of several."""
        lanes = self.lanes
        max_repeat = self.k.chip.max_repeat
        for at, repeats in segments(self.k, "repeat", elements // lanes, max_repeat):
            self.instruction(start + at * lanes, (repeats, lanes), lanes, block, 0)
        in_full_repeats = elements // lanes * lanes
        if in_full_repeats < elements:
            self.instruction(
                start + in_full_repeats, (1, elements - in_full_repeats), lanes, block, 0
            )

    def instruction(
        self, start: Affine, shape: tuple[int, int], pitch: int, block: Affine, step: int
    ) -> None:
        """Write one instruction of `shape` (repeats, lanes).

        From repeat to repeat tiles advance by `pitch` elements, channel numbers by `step` blocks.
        """
        regions = []
        for tile, channel_tile in zip(self.tiles, self.channel_tiles, strict=True):
            if channel_tile is not None:
                regions.append(_channel_region(channel_tile, shape, block, step))
            else:
                assert tile is not None
                regions.append(tile.region(start, shape, (pitch, 1)))
        self.k.vector(self.step.op, *regions, scalar=self.step.number)


def _channel_region(tile: Tile, shape: tuple[int, int], block: Affine, step: int) -> Region:
    """Return the numbers per channel for an instruction of `shape` (repeats, lanes).

    The first repeat reads block `block`, each later one `step` blocks further on. One pattern of
    numbers serves all lanes of a repeat: 128 lanes of fp16 are 8 pixels of 16 channels.
    """
    repeats, lanes = shape
    unit = pattern(tile.buffer.dtype)
    if unit == FRACTAL:
        # A stride of 0: one block of 16 numbers for every 16 lanes.
        sizes = (repeats, lanes // FRACTAL, FRACTAL)
        return tile.region(block * unit, sizes, (step * unit, 0, 1))
    return tile.region(block * unit, shape, (step * unit, 1))


# -- an epilogue in one kernel --------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Group:
    """Operands of one kind, their tensors in GM, and the queue in whose slots they arrive together.

    Slots of channel operands hold `blocks` blocks; 0 for operands per element.
    """

    operands: tuple[Operand, ...]
    tensors: tuple[Buffer, ...]
    queue: Queue
    blocks: int = 0

    @classmethod
    def make(
        cls,
        k: KernelBuilder,
        operands: Sequence[Operand],
        slots: list[int],
        elements: int,
        blocks: int,
    ) -> "Group | None":
        """Declare operands and allocate two slots for each in UB."""
        if not operands:
            return None
        tensors = tuple(k.tensor(o.name, o.dtype, elements) for o in operands)
        first_operand, *other_operands = operands
        queue = k.queue(
            f"{first_operand.name}_ub", "UB", first_operand.dtype, slots[0], src="MTE2", dst="V"
        )
        # All operands of a kind arrive together: one queue, whose slots have a part for each.
        for operand, size in zip(other_operands, slots[1:], strict=True):
            queue.join(f"{operand.name}_ub", operand.dtype, size)
        return cls(tuple(operands), tensors, queue, blocks)

    def tiles_by_name(self, tile: Tile) -> dict[str, Tile]:
        """Return the tile of each operand in the slot of `tile`, by name."""
        buffers = (self.queue.buffer, *self.queue.members)
        pairs = zip(self.operands, buffers, strict=True)
        return {o.name: Tile(buffer, tile.slot) for o, buffer in pairs}


@dataclass(frozen=True, slots=True)
class SecondSums:
    """The second tile of sums in L0C, that of a second convolution (`beside`).

    It begins at element `start` of a tile of L0C, is dequantised as `deq` says, and is copied to
    `buffer` in UB, where steps read it by `name`.
    """

    deq: Deq
    name: str
    buffer: Buffer
    start: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The buffers of an epilogue in one kernel.

    `tiles` and `channels` are its operands per element and per channel, `out` are the slots of UB
    from which results leave, `scratch` the other tiles of the plan. `units` are the elements of a
    block of each channel operand. `second` is the second tile of sums, if there is one.

    On chips with a fix pipe `fix` is its setting, and `table` passes the bias to the cube.
    """

    builder: KernelBuilder
    plan: Plan
    out: Queue | None = None
    scratch: tuple[Buffer, ...] = ()
    tiles: Group | None = None
    channels: Group | None = None
    fix: Fix | None = None
    table: Queue | None = None
    deq: Deq | None = None
    second: SecondSums | None = None
    width: int = FRACTAL
    units: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Channels:
    """Numbers per channel that are loaded: `tile` has those from output block `first_block` on."""

    first_block: Affine
    tile: Tile


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes on which an epilogue's buffers depend.

    A tile has `tile_m` x `tile_n` fractals, a core owns `n_own` output blocks, the whole output has
    `blocks` and `elements`. If a kernel has several epilogues, each has a `prefix` for the names of
    its buffers, and gets 1 / `shares` of UB after the bytes `taken` by other buffers.
    """

    tile_m: int
    tile_n: int
    n_own: int
    blocks: int
    elements: int
    prefix: str = ""
    shares: int = 1
    taken: int = 0


def new_finish(
    k: KernelBuilder, epilogue: Epilogue | None, sums: str, sizes: Sizes
) -> Finish | None:
    """Allocate what an epilogue needs; raise `CapacityError` if it does not fit."""
    if epilogue is None:
        return None
    check_epilogue(epilogue, k.chip, sums)
    demand = demand_of(epilogue, k.chip, sums)
    assert demand is not None
    # Blocks of 16 channels in a slot: all of the core's, or those of one tile.
    blocks = channel_blocks(demand, k.chip, sizes.n_own, sizes.tile_n)
    if not k.chip.combined:
        return _new_fix(k, epilogue, sizes, blocks)
    plan = drain_plan(epilogue, sums)
    channel_operands = epilogue.of_kind("channel")
    units = {o.name: epilogue.unit(o) for o in channel_operands}
    _check_multiple(demand.columns, sizes)
    slots = [blocks * units[o.name] for o in channel_operands]
    channels = Group.make(k, channel_operands, slots, sizes.blocks * FRACTAL, blocks)
    elements = _piece_elements(k, demand, sizes, blocks)
    tile_operands = epilogue.of_kind("tile")
    tiles = Group.make(k, tile_operands, [elements] * len(tile_operands), sizes.elements, 0)
    # The result leaves from two slots: one is stored while the steps fill the other.
    out = k.queue(f"{sizes.prefix}y_ub", "UB", epilogue.out_dtype, elements, src="V", dst="MTE3")
    scratch = tuple(
        k.buffer(f"{sizes.prefix}value.{i}", "UB", dtype, elements)
        for i, dtype in enumerate(plan.tiles[1:], 1)
    )
    second = _new_second_sums(k, epilogue, sizes, elements)
    return Finish(
        builder=k,
        plan=plan,
        out=out,
        scratch=scratch,
        tiles=tiles,
        channels=channels,
        deq=epilogue.deq,
        second=second,
        width=epilogue.width,
        units=units,
    )


def _check_multiple(multiple: int, sizes: Sizes) -> None:
    """Raise `CapacityError` unless tiles, cores and the result have whole blocks of channels."""
    if sizes.tile_n % multiple or sizes.blocks % multiple or sizes.n_own % multiple:
        got = f"tiles of {sizes.tile_n}, {sizes.n_own} a core, {sizes.blocks} in all"
        raise errors.CapacityError(
            f"blocks of 16 channels in multiples of {multiple}", got, "pad them"
        )


def _new_second_sums(
    k: KernelBuilder, epilogue: Epilogue, sizes: Sizes, elements: int
) -> SecondSums | None:
    """Allocate UB for the second tile of sums, if the epilogue reads one."""
    operands = epilogue.of_kind("sums")
    if not operands:
        return None
    (operand,) = operands
    assert epilogue.second is not None
    buffer = k.buffer(operand.name, "UB", operand.dtype, elements)
    # In L0C the second tile of sums lies behind the first one.
    start = sizes.tile_m * sizes.tile_n * FRACTAL * FRACTAL
    return SecondSums(epilogue.second, operand.name, buffer, start)


def _piece_elements(k: KernelBuilder, demand: Demand, sizes: Sizes, blocks: int) -> int:
    """Return the elements of a tile that the epilogue has in UB at a time.

    They are as many columns of fractals as fit UB together with two slots of numbers for `blocks`
    blocks of channels.
    """
    ub_bytes = (k.chip.buffers["UB"] - sizes.taken) // sizes.shares
    ub_bytes -= 2 * blocks * demand.block_bytes
    # A tile 8 fractals high with 6 bytes an element: 12,288 bytes a column, 21 columns in 256 KiB.
    column_elements = sizes.tile_m * FRACTAL * FRACTAL
    columns = min(sizes.tile_n, ub_bytes // (column_elements * demand.tile_bytes))
    whole_blocks = columns // demand.columns * demand.columns
    return max(demand.columns, whole_blocks) * column_elements


def _new_fix(k: KernelBuilder, epilogue: Epilogue, sizes: Sizes, blocks: int) -> Finish:
    """Allocate what the fix pipe needs: only a bias has buffers, in L1 and in the bias table."""
    fix = fix_of(epilogue)
    assert isinstance(fix, Fix)
    plan = Plan((), (epilogue.out_dtype,), 0)
    if not fix.bias:
        return Finish(k, plan, fix=fix)
    (bias,) = epilogue.operands
    tensor = k.tensor(bias.name, bias.dtype, sizes.blocks * FRACTAL)
    size = blocks * FRACTAL
    queue = k.queue(f"{bias.name}_l1", "L1", bias.dtype, size, src="MTE2", dst="MTE1")
    # The bias table is small (1 KiB: 256 numbers in fp32), so two slots may not fit.
    depth = 2 if 2 * size * chip.DTYPE_BYTES[bias.dtype] <= k.chip.buffers["BT"] else 1
    table = k.queue(f"{bias.name}_bt", "BT", bias.dtype, size, src="MTE1", dst="M", depth=depth)
    group = Group((bias,), (tensor,), queue, blocks)
    return Finish(k, plan, channels=group, fix=fix, table=table)


@contextmanager
def held_channels(
    finish: Finish | None, n: Span, first_block: Affine, loaded: Channels | None
) -> Iterator[Channels | None]:
    """Load numbers per channel once for all tiles of the loop inside; yield what is loaded.

    `n` are output blocks (start, count) counted from `first_block`. Nothing is loaded if a slot is
    too small for n blocks, or if an outer loop has `loaded` some.
    """
    group = finish.channels if finish else None
    if finish is None or group is None or loaded or n[1] > group.blocks:
        yield loaded
        return
    k = finish.builder
    queue = group.queue
    slots = group.tiles_by_name(queue.alloc())
    for operand, tensor in zip(group.operands, group.tensors, strict=True):
        # The bias table repeats numbers by itself; in UB a block of fp32 stands there four times.
        unit = FRACTAL if finish.table else finish.units[operand.name]
        load_channels(k, slots[operand.name], tensor, (first_block + n[0], n[1]), unit)
    queue.enqueue()
    tile = queue.dequeue()
    if finish.table is None:
        yield Channels(n[0], tile)
        queue.free()
        return
    # On its way to the cube a bias goes on from L1 to the bias table.
    size = n[1] * FRACTAL
    k.copy(finish.table.alloc().region(0, size), tile.region(0, size))
    queue.free()
    finish.table.enqueue()
    yield Channels(n[0], finish.table.dequeue())
    finish.table.free()


def bias_of(finish: Finish | None, loaded: Channels | None, n: Span) -> Region | None:
    """Return the region of the bias table that the cube adds to output blocks n (start, count)."""
    if finish is None or finish.table is None or loaded is None:
        return None
    return loaded.tile.region((n[0] - loaded.first_block) * FRACTAL, n[1] * FRACTAL)


def drain(
    finish: Finish,
    acc: Queue,
    places: Sequence[tuple[Memory, Area]],
    n: Affine,
    channels: Channels | None,
) -> None:
    """Move a finished (N1, M1) tile of L0C through the epilogue; `n`: its first output block.

    `places` are where it goes, the first one the tile's own area of the result. On chips with a fix
    pipe there is one place.
    """
    (y, area) = places[0]
    if finish.out is None:
        store_area(finish.builder, acc, None, y, area, finish.fix or UNCHANGED)
        return
    k = finish.builder
    pitch = _block_elements(finish, area)
    sums = acc.dequeue()
    piece_blocks = min(finish.out.buffer.elements // pitch, area.blocks)
    if piece_blocks == area.blocks:
        # In one piece L0C is free as soon as its sums are copied.
        piece = _arriving_piece(finish, sums, area, (Affine(), piece_blocks, pitch), n, channels)
        acc.free()
        _finish_piece(finish, places, piece, Affine())
        return
    for block, count in segments(k, "column", area.blocks, piece_blocks):
        piece = _arriving_piece(finish, sums, area, (block, count, pitch), n, channels)
        _finish_piece(finish, places, piece, block)
    acc.free()


def _arriving_piece(
    finish: Finish,
    sums: Tile,
    area: Area,
    blocks: tuple[Affine, int, int],
    n: Affine,
    channels: Channels | None,
) -> Piece:
    """Copy `blocks` (first, count, pitch) of sums to UB; return the piece with its operands.

    The tile's first output block is `n`. Operands with a number per element are being loaded, too.
    """
    assert finish.out is not None
    (block, count, pitch) = blocks
    if finish.tiles:
        load_tiles(finish.tiles, finish.builder, area, block, count)
    tiles: list[Memory] = [finish.out.alloc(), *finish.scratch]
    channel_operands: Mapping[str, Tile] = {}
    first_block = block
    if channels:
        # The channel operands are in blocks of 16, the tile may be in blocks of 32.
        first_block = n + block * (area.width // FRACTAL) - channels.first_block
        if finish.channels:
            channel_operands = finish.channels.tiles_by_name(channels.tile)
    numbers = (channel_operands, first_block)
    _copy_sums(finish, tiles[finish.plan.start], sums, area, blocks, numbers)
    element_operands = _copy_second_sums(finish, sums, area, (block, count), numbers)
    return Piece(tiles, element_operands, channel_operands, first_block, count, pitch)


def _finish_piece(
    finish: Finish, places: Sequence[tuple[Memory, Area]], piece: Piece, first: Affine
) -> None:
    """Write the epilogue's steps on a piece whose first block is `first`, and store it."""
    assert finish.out is not None
    k = finish.builder
    if finish.tiles:
        loaded = finish.tiles.tiles_by_name(finish.tiles.queue.dequeue())
        all_operands = {**piece.element_operands, **loaded}
        write_steps(k, finish.plan, replace(piece, element_operands=all_operands))
        finish.tiles.queue.free()
    else:
        write_steps(k, finish.plan, piece)
    copy_out(k, finish.out, places, piece.run, (first, piece.count))


def copy_out(
    k: KernelBuilder, out: Queue, places: Sequence[tuple[Memory, Area]], run: int, blocks: Span
) -> None:
    """Copy `blocks` (first, count), `run` elements apart, from UB to all places."""
    out.enqueue()
    tile = out.dequeue()
    for memory, area in places:
        for target, source in area.pairs(memory, tile, run, *blocks):
            k.copy(target, source)
    out.free()


def _block_elements(finish: Finish, area: Area) -> int:
    """Return the elements from block to block in UB: those of the pixels, or rounded up to repeats.

    A few more repeats are quicker than another instruction for the remainder. The added rows of
    L0C hold sums that belong to no pixel and are never stored.
    """
    run = area.pixels * area.width
    lanes = finish.builder.chip.vector_bytes_per_repeat // 2
    rounded_up = -(-run // lanes) * lanes
    # 49 pixels of 16 channels: 784 elements a block, rounded up to 7 repeats of 128 = 896. In 8
    # blocks these are 8 * 112 / 128 = 7 more repeats.
    extra_repeats = (area.blocks * rounded_up - area.blocks * run) // lanes
    must_be_exact = bool(finish.tiles or finish.deq)
    return run if must_be_exact or extra_repeats > REPEATS_PER_START else rounded_up


def _copy_sums(
    finish: Finish,
    target: Memory,
    c: Tile,
    area: Area,
    blocks: tuple[Affine, int, int],
    channels: tuple[Mapping[str, Tile], Affine],
) -> None:
    """Copy `blocks` (first, count, pitch) of the sums to UB, dequantised if `finish` says so."""
    k = finish.builder
    (first_block, count, block_elements) = blocks
    size = area.fractals * FRACTAL * FRACTAL
    if finish.deq is None:
        source = c.region(first_block * size, (count, block_elements), (size, 1))
        k.copy(target.region(0, (count, block_elements)), source, relu=finish.plan.relu)
        return
    sums = _block_pairs(c, area, (first_block, count), 0)
    _dequantise(k, finish.deq, target, sums, channels)


def _copy_second_sums(
    finish: Finish,
    c: Tile,
    area: Area,
    blocks: Span,
    channels: tuple[Mapping[str, Tile], Affine],
) -> dict[str, Memory]:
    """Copy `blocks` (first, count) of a second tile of sums to UB; return its buffer by name."""
    second = finish.second
    if second is None:
        return {}
    sums = _block_pairs(c, area, blocks, second.start)
    _dequantise(finish.builder, second.deq, second.buffer, sums, channels)
    return {second.name: second.buffer}


def _block_pairs(c: Tile, area: Area, blocks: Span, start: int) -> Region:
    """Return `blocks` (first, count) of sums that begin at element `start` of a tile of L0C.

    A block of 32 channels is two neighbouring fractals of L0C, a block of 16 channels is one.
    """
    (first_block, count) = blocks
    halves = area.width // FRACTAL
    # A column of fractals in L0C: all pixels of 16 channels. The next 16 channels lie behind it.
    fractal_column = area.fractals * FRACTAL * FRACTAL
    sizes = (count, area.pixels, halves, FRACTAL)
    strides = (fractal_column * halves, FRACTAL, fractal_column, 1)
    return c.region(first_block * (fractal_column * halves) + start, sizes, strides)


def _dequantise(
    k: KernelBuilder,
    deq: Deq,
    target: Memory,
    sums: Region,
    channels: tuple[Mapping[str, Tile], Affine],
) -> None:
    """Copy sums to UB in floats: each plus the bias of its channel, times its scale."""
    (channel_operands, first_block) = channels
    count, _, halves, _ = sums.sizes
    elements = count * halves * FRACTAL
    # Scale and bias for every channel of these blocks: 32 numbers a block of an int8 result.
    numbers = [channel_operands[name].region(first_block * FRACTAL, elements) for name in deq.names]
    k.vdeq(target.region(0, sums.sizes), sums, *numbers, relu=deq.relu, offset=deq.offset)


def load_tiles(group: Group, k: KernelBuilder, area: Area, at: Affine, count: int) -> None:
    """Copy blocks at .. at+count-1 of the tile operands to UB: the elements stored at `area`."""
    slots = group.tiles_by_name(group.queue.alloc())
    block_elements = area.pixels * area.width
    for operand, tensor in zip(group.operands, group.tensors, strict=True):
        for source, target in area.pairs(tensor, slots[operand.name], block_elements, at, count):
            k.copy(target, source)
    group.queue.enqueue()


# -- all paths out of L0C -------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SumsOutput:
    """How a kernel's finished tiles of sums leave the slots `acc` of L0C.

    They go unchanged to GM, through an epilogue to GM, or through a ring of slots to vector cores.

    If there is a `ring`, vector cores read it and store the result, so that `result` is None.
    `finish` has the buffers of an epilogue. `out` has slots of UB for unchanged sums on chips
    without a fix pipe.
    """

    k: KernelBuilder
    acc: Queue
    result: Buffer | None
    out: Queue | None
    finish: Finish | None
    ring: RingEnd | None

    def store(self, area: Area, n: Affine, channels: Channels | None) -> None:
        """Store the next finished tile at `area`; `n` is its first output block."""
        if self.ring is not None:
            self._to_ring(self.ring, area)
            return
        assert self.result is not None
        if self.finish is None:
            store_area(self.k, self.acc, self.out, self.result, area)
        else:
            drain(self.finish, self.acc, ((self.result, area),), n, channels)

    def _to_ring(self, ring: RingEnd, area: Area) -> None:
        """Move a tile of L0C to a slot of the ring, without the rows that pad its last fractal."""
        fix = (self.finish.fix if self.finish else None) or UNCHANGED
        # 49 pixels fill 3 fractals and 1 row of a fourth: the other 15 rows stay behind.
        sizes = area.blocks, area.pixels * FRACTAL
        # Blocks lie whole fractals apart in L0C, but side by side in the ring.
        source = self.acc.dequeue().region(0, sizes, (area.fractals * FRACTAL * FRACTAL, 1))
        self.k.fixpipe(ring.alloc().region(0, sizes), source, relu=fix.relu, scale=fix.scale)
        self.acc.free()
        ring.enqueue()
