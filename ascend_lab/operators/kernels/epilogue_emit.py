"""Drain a tile of sums through an epilogue: UB and the vector unit, or bias table and fix pipe."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ascend_lab import errors
from ascend_lab.machine import chip
from ascend_lab.machine.isa import FRACTAL, Affine, Buffer, KernelBuilder, Queue, Region, Tile
from ascend_lab.operators.kernels.epilogue import (
    Deq,
    Epilogue,
    Fix,
    Operand,
    check_epilogue,
    fix_of,
    pattern,
)
from ascend_lab.operators.kernels.epilogue_plan import (
    Placed,
    Plan,
    channel_blocks,
    demand_of,
    drain_plan,
)
from ascend_lab.operators.kernels.tiles import Area, Span, repeat, segments, store_area

Memory = Tile | Buffer
REPEATS = 6
"""Repeats of a vector instruction take about as long as a head."""


# -- the steps on a piece of a tile ---------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a tile in UB: `count` blocks of `run` elements.

    `tiles` are those of the plan, `named` operands per element, `rates` operands per channel, whose
    block `first` belongs to the piece's first.
    """

    tiles: Sequence[Memory]
    named: Mapping[str, Memory]
    rates: Mapping[str, Tile]
    first: Affine
    count: int
    run: int


def load_channels(k: KernelBuilder, slot: Tile, tensor: Buffer, blocks: Span, unit: int) -> None:
    """Bring the numbers of `blocks` (first, count) of 16 channels, each repeated to `unit`."""
    first, count = blocks
    source = tensor.region(first * FRACTAL, (count, FRACTAL))
    for turn in range(unit // FRACTAL):
        k.copy(slot.region(turn * FRACTAL, (count, FRACTAL), (unit, 1)), source)


def write_steps(k: KernelBuilder, plan: Plan, t: Piece) -> None:
    """Write the instructions of all steps: flat, or by blocks or across where channels differ."""
    for step in plan.steps:
        write = _StepWriter(k, step, t)
        parts = -(-t.run // write.lanes)
        if not any(write.rates):
            write.run(Affine(), t.count * t.run, Affine())
        elif parts < t.count <= k.chip.max_repeat:
            for start in range(0, t.run, write.lanes):
                shape = (t.count, min(write.lanes, t.run - start))
                write.instruction(Affine(start), shape, t.run, t.first, 1)
        else:
            with repeat(k, "block", t.count) as block:
                write.run(block * t.run, t.run, t.first + block)


class _StepWriter:
    """Writes the instructions of one step: `views` are tiles, `rates` numbers per channel."""

    def __init__(self, k: KernelBuilder, step: Placed, t: Piece) -> None:
        self.k = k
        self.step = step
        names = (step.to, *step.sources)
        self.views = [t.tiles[s] if isinstance(s, int) else t.named.get(s) for s in names]
        pairs = zip(self.views, names, strict=True)
        self.rates = [None if view else t.rates[str(name)] for view, name in pairs]
        every = [v for v in (*self.views, *self.rates) if v]
        sizes = [(v if isinstance(v, Buffer) else v.buffer).itemsize for v in every]
        self.lanes = k.chip.vector_bytes_per_repeat // max(sizes)

    def run(self, start: Affine, elements: int, block: Affine) -> None:
        """Neighbouring elements of one block (or of all, where no operand is per channel)."""
        lanes = self.lanes
        most = self.k.chip.max_repeat
        for at, repeats in segments(self.k, "repeat", elements // lanes, most):
            self.instruction(start + at * lanes, (repeats, lanes), lanes, block, 0)
        done = elements // lanes * lanes
        if done < elements:
            self.instruction(start + done, (1, elements - done), lanes, block, 0)

    def instruction(
        self, start: Affine, shape: tuple[int, int], pitch: int, block: Affine, step: int
    ) -> None:
        """`shape` repeats and lanes; `pitch` elements and `step` blocks from repeat to repeat."""
        regions = []
        for view, rate in zip(self.views, self.rates, strict=True):
            if rate is None:
                assert view is not None
                regions.append(view.region(start, shape, (pitch, 1)))
                continue
            unit = pattern(rate.buffer.dtype)
            sizes: tuple[int, ...] = shape
            strides: tuple[int, ...] = (step * unit, 1)
            if unit == FRACTAL:  # one block for 16 lanes, again and again
                sizes = (shape[0], shape[1] // FRACTAL, FRACTAL)
                strides = (step * unit, 0, 1)
            regions.append(rate.region(block * unit, sizes, strides))
        self.k.vector(self.step.op, *regions, scalar=self.step.number)


# -- an epilogue in one kernel --------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Group:
    """Operands of one kind: their tensors in GM, and the queue whose slots they share."""

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
        first, *rest = operands
        queue = k.queue(f"{first.name}_ub", "UB", first.dtype, slots[0], src="MTE2", dst="V")
        for operand, size in zip(rest, slots[1:], strict=True):
            queue.join(f"{operand.name}_ub", operand.dtype, size)
        return cls(tuple(operands), tensors, queue, blocks)

    def held(self, tile: Tile) -> dict[str, Tile]:
        """Return the slot of each operand, by name."""
        buffers = (self.queue.buffer, *self.queue.members)
        pairs = zip(self.operands, buffers, strict=True)
        return {o.name: Tile(buffer, tile.slot) for o, buffer in pairs}


@dataclass(frozen=True, slots=True)
class Finish:
    """An epilogue in one kernel: `tiles` and `channels` are its operands, `out` the way to GM.

    `units` are the elements of a block of each operand per channel; `second` are the sums beside:
    how they leave, their name, their place in UB, and where they begin in a tile of L0C.

    On chips with a fix pipe `fix` says what that does, and `table` passes the bias to the cube.
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
    second: tuple[Deq, str, Buffer, int] | None = None
    width: int = FRACTAL
    units: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Channels:
    """Numbers per channel in a slot, from block `first` of the product on."""

    first: Affine
    tile: Tile


@dataclass(frozen=True, slots=True)
class Sizes:
    """Fractals of a tile, output blocks a core owns, blocks and elements of the whole output.

    Of several epilogues in one kernel each has a `prefix` for its buffers, and one of `shares` of
    UB, of which other things have `taken` some bytes.
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
    blocks = channel_blocks(demand, k.chip, sizes.n_own, sizes.tile_n)
    if not k.chip.combined:
        return _new_fix(k, epilogue, sizes, blocks)
    plan = drain_plan(epilogue, sums)
    operands = epilogue.of_kind("channel")
    units = {o.name: epilogue.unit(o) for o in operands}
    pair = demand.columns
    if sizes.tile_n % pair or sizes.blocks % pair or sizes.n_own % pair:
        got = f"tiles of {sizes.tile_n}, {sizes.n_own} a core, {sizes.blocks} in all"
        raise errors.CapacityError(f"blocks of 16 channels in multiples of {pair}", got, "pad them")
    slots = [blocks * units[o.name] for o in operands]
    channels = Group.make(k, operands, slots, sizes.blocks * FRACTAL, blocks)
    left = (k.chip.buffers["UB"] - sizes.taken) // sizes.shares - 2 * blocks * demand.block_bytes
    columns = left // (sizes.tile_m * FRACTAL * FRACTAL * demand.tile_bytes)
    columns = max(pair, min(sizes.tile_n, columns) // pair * pair)
    elements = columns * sizes.tile_m * FRACTAL * FRACTAL
    operands = epilogue.of_kind("tile")
    tiles = Group.make(k, operands, [elements] * len(operands), sizes.elements, 0)
    out = k.queue(f"{sizes.prefix}y_ub", "UB", epilogue.out_dtype, elements, src="V", dst="MTE3")
    scratch = tuple(
        k.buffer(f"{sizes.prefix}value.{i}", "UB", dtype, elements)
        for i, dtype in enumerate(plan.tiles[1:], 1)
    )
    second = None
    for operand in epilogue.of_kind("sums"):
        assert epilogue.second is not None
        place = k.buffer(operand.name, "UB", operand.dtype, elements)
        area = sizes.tile_m * sizes.tile_n * FRACTAL * FRACTAL
        second = epilogue.second, operand.name, place, area
    return Finish(
        k,
        plan,
        out,
        scratch,
        tiles,
        channels,
        deq=epilogue.deq,
        second=second,
        width=epilogue.width,
        units=units,
    )


def _new_fix(k: KernelBuilder, epilogue: Epilogue, sizes: Sizes, blocks: int) -> Finish:
    """Allocate the way of the bias: GM to L1 to the bias table."""
    fix = fix_of(epilogue)
    assert isinstance(fix, Fix)
    plan = Plan((), (epilogue.out_dtype,), 0)
    if not fix.bias:
        return Finish(k, plan, fix=fix)
    (bias,) = epilogue.operands
    tensor = k.tensor(bias.name, bias.dtype, sizes.blocks * FRACTAL)
    size = blocks * FRACTAL
    queue = k.queue(f"{bias.name}_l1", "L1", bias.dtype, size, src="MTE2", dst="MTE1")
    depth = 2 if 2 * size * chip.DTYPE_BYTES[bias.dtype] <= k.chip.buffers["BT"] else 1
    table = k.queue(f"{bias.name}_bt", "BT", bias.dtype, size, src="MTE1", dst="M", depth=depth)
    group = Group((bias,), (tensor,), queue, blocks)
    return Finish(k, plan, channels=group, fix=fix, table=table)


@contextmanager
def held_channels(
    finish: Finish | None, n: Span, before: Affine, held: Channels | None
) -> Iterator[Channels | None]:
    """Load numbers per channel once, for all tiles inside.

    `n` are output blocks (start, count), `before` the blocks in front of the product. Nothing is
    loaded where a slot is too small for them, or some are `held` already.
    """
    group = finish.channels if finish else None
    if finish is None or group is None or held or n[1] > group.blocks:
        yield held
        return
    k = finish.builder
    queue = group.queue
    slots = group.held(queue.alloc())
    for operand, tensor in zip(group.operands, group.tensors, strict=True):
        unit = FRACTAL if finish.table else finish.units[operand.name]
        load_channels(k, slots[operand.name], tensor, (before + n[0], n[1]), unit)
    queue.enqueue()
    tile = queue.dequeue()
    if finish.table is not None:
        k.copy(finish.table.alloc().region(0, n[1] * FRACTAL), tile.region(0, n[1] * FRACTAL))
        queue.free()
        finish.table.enqueue()
        queue = finish.table
        tile = finish.table.dequeue()
    yield Channels(n[0], tile)
    queue.free()


def bias_of(finish: Finish | None, held: Channels | None, n: Span) -> Region | None:
    """Return what the cube adds from the bias table for output blocks n (start, count)."""
    if finish is None or finish.table is None or held is None:
        return None
    return held.tile.region((n[0] - held.first) * FRACTAL, n[1] * FRACTAL)


def drain(
    finish: Finish,
    acc: Queue,
    y: Memory,
    area: Area,
    n: Affine,
    held: Channels | None,
    also: Sequence[tuple[Tile, Area]] = (),
) -> None:
    """Move a finished (N1, M1) tile of L0C through the epilogue to `area`; `n`: its first block.

    From UB it goes to other places `also`.
    """
    if finish.out is None:
        fix = finish.fix or Fix()
        store_area(finish.builder, acc, None, y, area, fix.relu, fix.scale)
        return
    k = finish.builder
    run = _run(finish, area)
    c = acc.dequeue()
    most = min(finish.out.buffer.elements // run, area.blocks)
    whole = most == area.blocks
    pieces = [(Affine(), most)] if whole else segments(k, "column", area.blocks, most)
    for at, count in pieces:
        if finish.tiles:
            load_tiles(finish.tiles, k, area, at, count)
        memories: list[Memory] = [finish.out.alloc(), *finish.scratch]
        rates = finish.channels.held(held.tile) if finish.channels and held else {}
        first = n + at * (area.width // FRACTAL) - held.first if held else at
        _arrive(finish, memories[finish.plan.start], c, area, (at, count, run), (rates, first))
        named: dict[str, Memory] = {}
        if finish.second:
            deq, name, named[name], start = finish.second
            _scaled(finish, deq, named[name], (c, start), area, (at, count), (rates, first))
        if whole:
            acc.free()
        if finish.tiles:
            named |= finish.tiles.held(finish.tiles.queue.dequeue())
        write_steps(k, finish.plan, Piece(memories, named, rates, first, count, run))
        if finish.tiles:
            finish.tiles.queue.free()
        leave(k, finish.out, ((y, area), *also), run, (at, count))
    if not whole:
        acc.free()


def leave(
    k: KernelBuilder, out: Queue, places: Sequence[tuple[Memory, Area]], run: int, blocks: Span
) -> None:
    """Bring `blocks` of `run` elements from UB to all places."""
    out.enqueue()
    tile = out.dequeue()
    for memory, area in places:
        for there, here in area.pairs(memory, tile, run, *blocks):
            k.copy(there, here)
    out.free()


def _run(finish: Finish, area: Area) -> int:
    """Return the elements from block to block in UB: those of the pixels, or up to whole repeats.

    More repeats are quicker than one more instruction for the rest; rows of L0C hold something.
    """
    run = area.pixels * area.width
    lanes = finish.builder.chip.vector_bytes_per_repeat // 2
    full = -(-run // lanes) * lanes
    more = (area.blocks * full - area.blocks * run) // lanes
    return run if finish.tiles or finish.deq or more > REPEATS else full


def _arrive(
    finish: Finish,
    to: Memory,
    c: Tile,
    area: Area,
    blocks: tuple[Affine, int, int],
    channels: tuple[Mapping[str, Tile], Affine],
) -> None:
    """Bring `blocks` (first, count, elements) of the sums to UB, dequantised if that is asked."""
    k = finish.builder
    (at, count, run) = blocks
    size = area.fractals * FRACTAL * FRACTAL
    if finish.deq is None:
        source = c.region(at * size, (count, run), (size, 1))
        k.copy(to.region(0, (count, run)), source, relu=finish.plan.relu)
        return
    _scaled(finish, finish.deq, to, (c, 0), area, (at, count), channels)


def _scaled(
    finish: Finish,
    deq: Deq,
    to: Memory,
    source: tuple[Tile, int],
    area: Area,
    blocks: Span,
    channels: tuple[Mapping[str, Tile], Affine],
) -> None:
    """Bring `blocks` of the sums that begin at `source` in L0C to UB, dequantised."""
    (c, start) = source
    (at, count) = blocks
    (rates, first) = channels
    halves = area.width // FRACTAL
    size = area.fractals * FRACTAL * FRACTAL
    sizes = (count, area.pixels, halves, FRACTAL)
    sums = c.region(at * (size * halves) + start, sizes, (size * halves, FRACTAL, size, 1))
    numbers = [rates[n].region(first * FRACTAL, count * area.width) for n in deq.names]
    finish.builder.vdeq(to.region(0, sizes), sums, *numbers, relu=deq.relu, offset=deq.offset)


def load_tiles(group: Group, k: KernelBuilder, area: Area, at: Affine, count: int) -> None:
    """Bring the operands' part that lies where `area` will be stored."""
    slots = group.held(group.queue.alloc())
    run = area.pixels * area.width
    for operand, tensor in zip(group.operands, group.tensors, strict=True):
        for there, here in area.pairs(tensor, slots[operand.name], run, at, count):
            k.copy(here, there)
    group.queue.enqueue()
