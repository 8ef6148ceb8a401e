"""Plan an epilogue: the tiles of UB that its values need, and what it costs in cycles and bytes.

For example relu(sums + bias) in fp32, rounded to fp16, needs one tile in fp32 and one in fp16. The
sums arrive in the first one and each step writes over it; the last step writes the second one.

The last section is about another way to add a bias, by the cube, as one more step of K. This is
used where the vector unit has more to do than the cube:

    sums (pixels, channels) += ones (pixels, 1) @ bias (1, channels)

In fp16 the first column of the left fractal is 1, the first row of the right fractal is the bias,
and the rest of both is 0. An int8 fractal is 32 deep and holds numbers up to 127 only: there the
other 31 columns of the left fractal are 127, and an integer bias is b = l + 127 (h1 + ... + h31).
The bias is copied to L1 before everything else, so that a pipe that waits for rows or weights has
also waited for the bias: it needs no flag of its own. Some chips have few flags.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import CapacityError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.operators.kernels.conv_shape import ConvShape, bundles_of
from ascend_lab.operators.kernels.epilogue import SUMS, Epilogue, halves, step_formats
from ascend_lab.operators.kernels.gemm_schedule import Array, Tilings
from ascend_lab.operators.kernels.tiles import (
    Feed,
    OrderedFeed,
    SlotFeed,
    Span,
    Sums,
    multiply,
    sums_region,
)

Source = int | str
"""An operand's name, or a number: of a value (0: the sums, i + 1: the result of step i) before
tiles are given out, of a tile afterwards."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A step on tiles of UB: it reads tiles or operands `sources` and writes tile `to`."""

    op: str
    sources: tuple[Source, ...]
    number: float | None
    to: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of an epilogue on as few tiles of UB as possible.

    `tiles` are the tiles' formats; tile 0 is stored. The copy out of L0C writes the sums to tile
    `start` in its format; with `relu` it also sets negative sums to 0.
    """

    steps: tuple[Placed, ...]
    tiles: tuple[str, ...]
    start: int
    relu: bool = False


def plan_of(epilogue: Epilogue, sums: str) -> Plan:
    """Return a plan: each value takes the tile of a source that is read no more, or a new tile.

    If all steps that read the sums convert them to one narrower format, the copy out of L0C does
    that.
    """
    formats = [epilogue.deq.dtype if epilogue.deq else sums, *step_formats(epilogue, sums)]
    reads = _reads_of_steps(epilogue)
    narrowing_values = [] if epilogue.deq else _narrowing_values(epilogue, reads, formats)
    if narrowing_values:
        formats[0] = formats[narrowing_values[0]]
        reads = [_replaced(sources, narrowing_values, 0) for sources in reads]
    last_value = 0 if len(reads) in narrowing_values else len(reads)
    needed_values = _needed_values(reads, last_value)
    last_reader = _last_readers(reads, needed_values)
    # Tile 0 is in the stored format, and free until a value of that format takes it.
    tiles = [epilogue.out_dtype]
    free_tiles = [0]
    tile_of = {0: _take_tile(formats[0], tiles, free_tiles)}
    steps: list[Placed] = []
    for value in sorted(needed_values - {0}):
        sources = reads[value - 1]
        value_sources = [source for source in sources if isinstance(source, int)]
        tile_sources = tuple(
            tile_of[source] if isinstance(source, int) else source for source in sources
        )
        # A step may write over a source: the last reader frees the source's tile, then takes one.
        read_no_more = [source for source in value_sources if last_reader[source] == value]
        free_tiles += sorted({tile_of[source] for source in read_no_more})
        tile_of[value] = 0 if value == last_value else _take_tile(formats[value], tiles, free_tiles)
        step = epilogue.steps[value - 1]
        steps.append(Placed(step.op, tile_sources, step.number, tile_of[value]))
    return Plan(_with_axpy(steps) if epilogue.deq else tuple(steps), tuple(tiles), tile_of[0])


def _reads_of_steps(epilogue: Epilogue) -> list[tuple[Source, ...]]:
    """Return what each step reads: operands by name, values by number (0: the sums)."""

    def source_of(source: str | int) -> Source:
        if isinstance(source, int):
            return source + 1
        return 0 if source == SUMS else source

    return [tuple(map(source_of, step.sources)) for step in epilogue.steps]


def _replaced(sources: tuple[Source, ...], old: list[int], new: int) -> tuple[Source, ...]:
    """Return sources with `new` instead of every value in `old`."""
    return tuple(new if source in old else source for source in sources)


def drain_plan(epilogue: Epilogue, sums: str) -> Plan:
    """Return the plan for sums copied from L0C to UB, where the copy does a ReLU that comes first.

    If another step reads the sums too, the ReLU writes a separate tile and stays a step.
    """
    plan = plan_of(epilogue, sums)
    first_step = plan.steps[0] if plan.steps and not epilogue.deq else None
    if first_step is None:
        return plan
    is_relu = first_step.op == "vrelu" or (first_step.op, first_step.number) == ("vmaxs", 0.0)
    is_in_place = (first_step.sources, first_step.to) == ((plan.start,), plan.start)
    if is_relu and is_in_place:
        return replace(plan, steps=plan.steps[1:], relu=True)
    return plan


def _with_axpy(steps: list[Placed]) -> tuple[Placed, ...]:
    """Return the steps with the first x + r * number as one instruction, `vaxpy`.

    It adds in place, to the tile of x; r must not be read again. Source: Ascend C, Axpy (developer
    documentation).
    """
    for index, (scale, add) in enumerate(pairwise(steps)):
        x = add.sources[:1]
        product = add.sources[1:]
        scales_then_adds = (scale.op, add.op, product) == ("vmuls", "vadd", (scale.to,))
        if (
            scales_then_adds
            and x[0] != scale.to
            and isinstance(x[0], int)
            and scale.sources == product
        ):
            # The sum now lies in the tile of x: later steps swap that with the addition's tile.
            swapped_tiles: dict[Source, int] = {add.to: x[0], x[0]: add.to}
            axpy = Placed("vaxpy", (*x, *product), scale.number, x[0])
            later_steps = [_on_tiles(step, swapped_tiles) for step in steps[index + 2 :]]
            # Tile 0 leaves the core, so it cannot be swapped.
            keeps_result_tile = 0 not in swapped_tiles.values()
            return (*steps[:index], axpy, *later_steps) if keeps_result_tile else tuple(steps)
    return tuple(steps)


def _on_tiles(step: Placed, new_tile: dict[Source, int]) -> Placed:
    """Return a step on other tiles: those in `new_tile` instead of its keys."""
    sources = tuple(new_tile.get(source, source) for source in step.sources)
    return replace(step, sources=sources, to=new_tile.get(step.to, step.to))


def _narrowing_values(
    epilogue: Epilogue, reads: list[tuple[Source, ...]], formats: list[str]
) -> list[int]:
    """Return the values that are the sums in one narrower format, if only they read the sums."""
    readers = [value for value, sources in enumerate(reads, 1) if 0 in sources]
    reader_formats = {formats[v] for v in readers}
    if len(reader_formats) != 1:
        return []
    all_convert = all(epilogue.steps[v - 1].op == "vconv" for v in readers)
    narrows = DTYPE_BYTES[reader_formats.pop()] < DTYPE_BYTES[formats[0]]
    return readers if all_convert and narrows else []


def _needed_values(reads: list[tuple[Source, ...]], last_value: int) -> set[int]:
    """Return the values that the last one depends on, itself and the sums included."""
    needed = {0, last_value}
    for value in range(last_value, 0, -1):
        if value in needed:
            needed |= {s for s in reads[value - 1] if isinstance(s, int)}
    return needed


def _last_readers(reads: list[tuple[Source, ...]], needed: set[int]) -> dict[int, int]:
    """Return, for every value, the last of the needed values that is computed from it."""
    # Later readers overwrite earlier ones in the dictionary.
    return {
        source: reader
        for reader in sorted(needed - {0})
        for source in reads[reader - 1]
        if isinstance(source, int)
    }


def _take_tile(dtype: str, tiles: list[str], free_tiles: list[int]) -> int:
    """Return the free tile of a format that was freed last, or a new tile if there is none."""
    for tile in reversed(free_tiles):
        if tiles[tile] == dtype:
            free_tiles.remove(tile)
            return tile
    tiles.append(dtype)
    return len(tiles) - 1


@dataclass(frozen=True, slots=True)
class Demand:
    """What an epilogue costs a core that computes a product in tiles.

    Per element of a tile: `tile_bytes` of UB, `cycles` of the vector unit, `loaded_bytes` from and
    `stored_bytes` to memory. Per 16 channels: `block_bytes` of UB or of the bias table for one
    slot. Per piece of a tile: vector `instructions`. A tile has a multiple of `columns` fractals of
    channels. A bias that the cube adds takes `l1_bytes`. Where vector cores follow a cube core,
    `cycles` are those of their slowest pipe, and `stored_bytes` go to them.
    """

    tile_bytes: int
    block_bytes: int
    cycles: float
    loaded_bytes: int
    stored_bytes: float
    instructions: int
    columns: int = 1
    l1_bytes: int = 0


def demand_of(epilogue: Epilogue | None, chip: Chip, sums: str) -> Demand | None:
    """Return the demand of an epilogue that the chip supports; None without one."""
    if epilogue is None:
        return None
    if not chip.combined:
        return _split_demand(epilogue, chip, sums)
    stored_bytes = DTYPE_BYTES[epilogue.out_dtype]
    channels = epilogue.of_kind("channel")
    plan = drain_plan(epilogue, sums)
    loaded_bytes = sum(DTYPE_BYTES[o.dtype] for o in epilogue.of_kind("tile"))
    second_sum_bytes = [DTYPE_BYTES[o.dtype] for o in epilogue.of_kind("sums")]
    scratch_bytes = sum(second_sum_bytes) + sum(DTYPE_BYTES[dtype] for dtype in plan.tiles[1:])
    # A dequantising copy takes as long for int8 as for fp16.
    least_bytes = 2 if epilogue.deq else 1
    # The second tile of sums leaves L0C like the first.
    sum_bytes = (DTYPE_BYTES[plan.tiles[plan.start]], *second_sum_bytes)
    arriving_bytes = sum(max(size, least_bytes) for size in sum_bytes)
    cycles = arriving_bytes / chip.path("L0C", "UB").rate_bytes_per_cycle
    for deq in epilogue.deqs:
        if deq.bias:
            cycles += DTYPE_BYTES[sums] / chip.path("UB", "L0C").rate_bytes_per_cycle
    cycles += _step_cycles(plan, chip)
    return Demand(
        # Two slots each for what leaves and what is loaded.
        tile_bytes=2 * stored_bytes + scratch_bytes + 2 * loaded_bytes,
        block_bytes=sum(epilogue.unit(o) * DTYPE_BYTES[o.dtype] for o in channels),
        cycles=cycles,
        loaded_bytes=loaded_bytes,
        stored_bytes=stored_bytes,
        instructions=len(plan.steps) + sum(len(deq.names) for deq in epilogue.deqs),
        columns=epilogue.width // isa.FRACTAL,
        l1_bytes=epilogue.bias_bytes,
    )


def _split_demand(epilogue: Epilogue, chip: Chip, sums: str) -> Demand:
    """Return the demand where cube and vector cores are separate: mainly the vector cores' time."""
    head, tail = halves(epilogue, chip, sums)
    bias_count = len(head.operands) if head else 0
    demand = Demand(
        tile_bytes=0,
        block_bytes=isa.FRACTAL * DTYPE_BYTES[sums] * bias_count,
        cycles=0.0,
        loaded_bytes=0,
        stored_bytes=DTYPE_BYTES[epilogue.out_dtype],
        instructions=0,
    )
    if tail is None:
        return demand
    plan = plan_of(tail, head.out_dtype if head else sums)
    arriving_bytes = DTYPE_BYTES[plan.tiles[plan.start]]
    loaded_bytes = arriving_bytes + sum(DTYPE_BYTES[o.dtype] for o in tail.of_kind("tile"))
    load = loaded_bytes / chip.path("GM", "UB").rate_bytes_per_cycle
    store = DTYPE_BYTES[epilogue.out_dtype] / chip.path("UB", "GM").rate_bytes_per_cycle
    return replace(
        demand,
        # The slowest of load, steps and store, shared by the vector cores.
        cycles=max(load, store, _step_cycles(plan, chip)) / chip.vector_cores_per_core,
        stored_bytes=arriving_bytes,
        instructions=len(plan.steps),
    )


def _step_cycles(plan: Plan, chip: Chip) -> float:
    """Return the cycles of the vector unit per element: the widest format sets a repeat's lanes."""
    cycles = 0.0
    for step in plan.steps:
        formats = [plan.tiles[t] for t in (step.to, *step.sources) if isinstance(t, int)]
        widest = max(DTYPE_BYTES[dtype] for dtype in formats)
        cost = chip.vector_costs.get(step.op, chip.vector_costs["default"])
        cycles += cost.slope_cycles * widest / chip.vector_bytes_per_repeat
    return cycles


def channel_blocks(demand: Demand, chip: Chip, n_own: int, tile_n: int) -> int:
    """Return the blocks of 16 channels in a slot: a core's if they take little UB, or a tile's."""
    # 1/16 of UB: 16 KiB of 256, or 1024 channels in fp32 that a step reads (4 x 64 bytes for 16).
    room = chip.buffers["UB"] // 16 if chip.combined else 0
    return n_own if n_own <= tile_n or n_own * demand.block_bytes <= room else tile_n


def chip_left(chip: Chip, demand: Demand | None) -> Chip:
    """Return the chip with less L1: without the bytes of a bias for the cube or the bias table."""
    uses_bias_table = bool(demand and demand.block_bytes and not chip.combined)
    if not demand or not (uses_bias_table or demand.l1_bytes):
        return chip
    buffers = dict(chip.buffers)
    buffers["L1"] -= 2 * buffers["BT"] if uses_bias_table else demand.l1_bytes
    return replace(chip, buffers=buffers)


def fitting(demand: Demand | None, chip: Chip, t: Tilings) -> NDArray[np.int64]:
    """Return the indices of the tilings that leave room for the epilogue.

    Raises `CapacityError` if there are tilings, but none does.
    """
    if demand is None:
        return np.arange(len(t.m))
    places = np.flatnonzero(_fits(demand, chip, t.m, t.n) & (t.n % demand.columns == 0))
    if len(t.m) and not len(places):
        space = "UB" if chip.combined else "BT"
        raise CapacityError(
            f"{isa.FRACTAL**2 * demand.tile_bytes} bytes of {space} for the epilogue of one "
            f"16x16 tile, and {2 * demand.block_bytes} for its channels",
            f"{chip.buffers[space]} on {chip.name}",
            "use fewer operands or steps that live at the same time",
        )
    return places


def _fits(demand: Demand, chip: Chip, m: Array, n: Array) -> NDArray[np.bool_]:
    """Return which tiles of m x n fractals leave room in UB (or the bias table) for an epilogue."""
    if not chip.combined:
        return n * demand.block_bytes <= (chip.buffers["BT"] if demand.block_bytes else 0)
    # Two slots for a tile's channels; `channel_blocks` may take 1/16 of UB for each.
    least_bytes = chip.buffers["UB"] // 16 if demand.block_bytes else 0
    channel_bytes = 2 * np.maximum(n * demand.block_bytes, least_bytes)
    needed_bytes: Array = m * isa.FRACTAL * isa.FRACTAL * demand.tile_bytes + channel_bytes
    return needed_bytes <= chip.buffers["UB"]


# -- a bias that the cube adds --------------------------------------------------------------------
LARGEST_INT8 = 127
"""The largest int8."""
LARGEST_BIAS = LARGEST_INT8 * LARGEST_INT8 * (2 * isa.FRACTAL - 1) + LARGEST_INT8 // 2
"""The largest integer bias that one int8 fractal adds: 127 * 127 * 31 + 63 = 500,062."""


def bias_bytes(shape: ConvShape) -> int:
    """Return the bytes of L1 that the bias of all output blocks takes."""
    return isa.FRACTAL * 2 * isa.FRACTAL * (1 + shape.blocks[1])


def pack_bias(shape: ConvShape, bias: np.ndarray) -> np.ndarray:
    """Return a bias (k,) as fractals: one of ones, then one for each block of output channels."""
    blocks = shape.blocks[1]
    c0 = isa.c0_of(shape.dtype)
    dtype = np.dtype(np.int8) if shape.dtype == "int8" else bias.dtype
    # 100 channels fill 7 blocks: 12 zeros follow.
    padded = np.zeros(blocks * isa.FRACTAL, bias.dtype)
    padded[: bias.size] = bias.reshape(-1)
    packed = np.zeros((1 + blocks, isa.FRACTAL, c0), dtype)
    packed[0, :, 0] = 1
    if shape.dtype != "int8":
        packed[1:, :, 0] = padded.reshape(blocks, isa.FRACTAL)
        return packed.reshape(-1)
    packed[0, :, 1:] = LARGEST_INT8
    # b = low + 127 * high with |low| <= 63; high is the sum of 31 digits, as equal as can be.
    high = np.rint(padded / LARGEST_INT8).astype(np.int64)
    quotient, remainder = np.divmod(np.abs(high)[:, None], c0 - 1)
    # high = 70 in 31 digits: 8 digits of 3 and 23 of 2.
    digits = np.sign(high)[:, None] * (quotient + (np.arange(c0 - 1) < remainder))
    packed[1:, :, 0] = (padded - LARGEST_INT8 * high).reshape(blocks, isa.FRACTAL)
    packed[1:, :, 1:] = digits.reshape(blocks, isa.FRACTAL, c0 - 1)
    return packed.reshape(-1)


@dataclass(frozen=True, slots=True)
class OnesFeed(SlotFeed):
    """The left operand: the first fractal of `l1`, the same for all fractals of pixels."""

    l1: isa.Buffer

    def fill(self, slot: isa.Tile, k_at: isa.Affine, depth: int) -> None:
        """Load one fractal `side` times."""
        sizes = (self.side, isa.FRACTAL * isa.c0_of(self.l1.dtype))
        # A stride of 0 repeats the fractal.
        self.k.load2d(slot.region(0, sizes), self.l1.region(0, sizes, (0, 1)))


@dataclass(frozen=True, slots=True)
class CubeBias:
    """The bias of a core's output blocks in L1, `n_own` of each of its bundles of groups.

    MTE1 learns from `queue` that the bias has arrived, or else from what MTE2 copies after it.
    """

    k: isa.KernelBuilder
    numbers: isa.Buffer
    l1: isa.Buffer
    shape: ConvShape
    n_own: int
    queue: isa.Queue | None = None

    @classmethod
    def make(
        cls,
        k: isa.KernelBuilder,
        name: str,
        shape: ConvShape,
        n_own: int,
        *,
        has_queue: bool = False,
    ) -> "CubeBias":
        """Declare the tensor `name` and allocate L1, as a queue or as a plain buffer."""
        fractal = isa.FRACTAL * isa.c0_of(shape.dtype)
        most_blocks = bundles_of(shape).count * n_own
        numbers = k.tensor(name, shape.dtype, (1 + shape.blocks[1]) * fractal)
        buffer_args = f"{name}_l1", "L1", shape.dtype, (1 + most_blocks) * fractal
        if not has_queue:
            return cls(k, numbers, k.buffer(*buffer_args), shape, n_own)
        queue = k.queue(*buffer_args, src="MTE2", dst="MTE1", depth=1)
        return cls(k, numbers, queue.buffer, shape, n_own, queue)

    def load(
        self, full_bundles: int, has_tail: bool, first_bundle: isa.Affine, col: isa.Affine
    ) -> None:
        """Copy the ones and the bias to L1.

        The bias is that of `full_bundles` from `first_bundle` on, and of the short last one if
        `has_tail`; `col` is the core's first output block in each.
        """
        bundle = bundles_of(self.shape)
        n_own = self.n_own
        fractal = isa.FRACTAL * isa.c0_of(self.shape.dtype)
        if self.queue:
            self.queue.alloc()
        self.k.copy(self.l1.region(0, fractal), self.numbers.region(0, fractal))
        # A core that has only the short bundle has n_own blocks of it.
        tail_blocks = bundle.last_n1 if full_bundles else n_own
        if full_bundles:
            self._load_bundles(first_bundle, full_bundles, n_own, 0, col)
        if has_tail:
            last_bundle = isa.Affine(bundle.count - 1)
            self._load_bundles(last_bundle, 1, tail_blocks, n_own * full_bundles, col)
        if self.queue:  # the bias never moves: the queue only signals that it has arrived
            self.queue.enqueue()
            self.queue.dequeue()
            self.queue.free()

    def _load_bundles(
        self, first_bundle: isa.Affine, count: int, blocks: int, l1_block: int, col: isa.Affine
    ) -> None:
        """Copy `blocks` blocks of each of `count` bundles to L1, from its block `l1_block` on."""
        bundle = bundles_of(self.shape)
        fractal = isa.FRACTAL * isa.c0_of(self.shape.dtype)
        sizes = (count, blocks * fractal)
        start = (1 + first_bundle * bundle.n1 + col) * fractal
        source = self.numbers.region(start, sizes, (bundle.n1 * fractal, 1))
        target = self.l1.region((1 + l1_block) * fractal, sizes, (self.n_own * fractal, 1))
        self.k.copy(target, source)

    def blocks(self, n: Span) -> isa.Region:
        """Return the region of L1 with blocks `n` (index, count); the ones come before block 0."""
        fractal = isa.FRACTAL * isa.c0_of(self.shape.dtype)
        return self.l1.region((n[0] + 1) * fractal, (n[1], fractal))

    def add(
        self,
        c: isa.Tile,
        feeds: tuple[isa.Queue, isa.Queue],
        m: int,
        n: Span,
        l0b_bias: Feed | None = None,
    ) -> None:
        """Begin sums of `m` fractals of pixels with the bias of blocks `n` (index in L1, count).

        `l0b_bias` is the bias in L0B, if it stays there.
        """
        fractal = isa.FRACTAL * isa.c0_of(self.shape.dtype)
        ones = OnesFeed(self.k, feeds[0], m, self.l1)
        # The ones are the first fractal, so block 0 is the second.
        bias = l0b_bias or OrderedFeed(self.k, feeds[1], n[1], self.l1, (n[0] + 1) * fractal)
        multiply(self.k, Sums(sums_region(c, m, n[1])), ones, bias, (isa.Affine(), 1))
