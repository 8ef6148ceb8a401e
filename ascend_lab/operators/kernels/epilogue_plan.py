"""What an epilogue asks of a core: tiles of UB for its values, cycles, bytes, room.

A bias may be one more step of depth: the cube adds it where the vector unit has more to do.

    sums (pixels, channels) += ones (pixels, 1) @ bias (1, channels)

Ones fill the first column of the left matrix, numbers the first row of the right one; the rest of
both fractals is 0. Bytes hold small numbers only, so 127 fills the other 31 columns, and a whole
bias is b = l + 127 (h1 + ... + h31). They come to L1 before all else, so that whoever waits for
rows or weights has waited for them: no flag of their own, of which some chips have few.
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
from ascend_lab.operators.kernels.tiles import Span

Source = int | str
"""A value (0: the sums, i + 1: the result of step i), later a tile; or an operand's name."""
LARGEST = 127
MOST_WHOLE = LARGEST * LARGEST * (2 * isa.FRACTAL - 1) + LARGEST // 2
"""The largest whole bias that one fractal of bytes adds."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A step on tiles: the tile it writes, the tiles or operands it reads."""

    op: str
    sources: tuple[Source, ...]
    number: float | None
    to: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps on few tiles of UB: `tiles` are their formats, tile 0 is stored.

    The sums arrive in tile `start`, converted to its format on the way out of L0C, where `relu`
    makes negative ones 0.
    """

    steps: tuple[Placed, ...]
    tiles: tuple[str, ...]
    start: int
    relu: bool = False


def plan_of(epilogue: Epilogue, sums: str) -> Plan:
    """Give every value a tile: that of a source that nothing reads any more, or a new one.

    Where all steps that read the sums narrow them to one format, the copy out of L0C does it.
    """
    formats = [epilogue.deq.dtype if epilogue.deq else sums, *step_formats(epilogue, sums)]
    numbers = {SUMS: 0} | {i: i + 1 for i in range(len(epilogue.steps))}
    read = [tuple(numbers.get(s, s) for s in step.sources) for step in epilogue.steps]
    on_the_way = [] if epilogue.deq else _narrowed(epilogue, read, formats)
    if on_the_way:
        formats[0] = formats[on_the_way[0]]
        read = [tuple(0 if s in on_the_way else s for s in sources) for sources in read]
    last = 0 if len(read) in on_the_way else len(read)
    needed = _needed(read, last)
    end = {s: v for v in sorted(needed) if v for s in read[v - 1] if isinstance(s, int)}
    tiles = [epilogue.out_dtype]
    free = [0]
    place = {0: _take(formats[0], tiles, free)}
    steps: list[Placed] = []
    for value in sorted(needed - {0}):
        sources = read[value - 1]
        where = tuple(place[s] if isinstance(s, int) else s for s in sources)
        free += sorted({place[s] for s in sources if isinstance(s, int) and end[s] == value})
        place[value] = 0 if value == last else _take(formats[value], tiles, free)
        step = epilogue.steps[value - 1]
        steps.append(Placed(step.op, where, step.number, place[value]))
    return Plan(_added(steps) if epilogue.deq else tuple(steps), tuple(tiles), place[0])


def drain_plan(epilogue: Epilogue, sums: str) -> Plan:
    """Return the plan for sums that leave L0C for UB: a ReLU that comes first is done on the way.

    One whose sums another step reads too has a tile of its own, and stays.
    """
    plan = plan_of(epilogue, sums)
    first = plan.steps[0] if plan.steps and not epilogue.deq else None
    least = first and (first.op == "vrelu" or (first.op, first.number) == ("vmaxs", 0.0))
    if first and least and (first.sources, first.to) == ((plan.start,), plan.start):
        return replace(plan, steps=plan.steps[1:], relu=True)
    return plan


def _added(steps: list[Placed]) -> tuple[Placed, ...]:
    """Return the steps with x + r number in one, in the tile of x, where r is not read again.

    Source: Ascend C, Axpy (developer documentation).
    """
    for at, (scale, add) in enumerate(pairwise(steps)):
        x = add.sources[:1]
        other = add.sources[1:]
        plain = (scale.op, add.op, other) == ("vmuls", "vadd", (scale.to,))
        if plain and x[0] != scale.to and isinstance(x[0], int) and scale.sources == other:
            turn: dict[Source, int] = {add.to: x[0], x[0]: add.to}
            one = Placed("vaxpy", (*x, *other), scale.number, x[0])
            rest = [
                replace(
                    s, sources=tuple(turn.get(t, t) for t in s.sources), to=turn.get(s.to, s.to)
                )
                for s in steps[at + 2 :]
            ]
            keeps = 0 not in turn.values()
            return (*steps[:at], one, *rest) if keeps else tuple(steps)
    return tuple(steps)


def _narrowed(epilogue: Epilogue, read: list[tuple[Source, ...]], formats: list[str]) -> list[int]:
    """Return the values that are the sums in one narrower format, if no other step reads sums."""
    readers = [value for value, sources in enumerate(read, 1) if 0 in sources]
    kinds = {formats[v] for v in readers}
    plain = all(epilogue.steps[v - 1].op == "vconv" for v in readers)
    narrow = len(kinds) == 1 and DTYPE_BYTES[kinds.pop()] < DTYPE_BYTES[formats[0]]
    return readers if plain and narrow else []


def _needed(read: list[tuple[Source, ...]], last: int) -> set[int]:
    """Values the last one depends on, itself and the sums included."""
    needed = {0, last}
    for value in range(last, 0, -1):
        if value in needed:
            needed |= {s for s in read[value - 1] if isinstance(s, int)}
    return needed


def _take(dtype: str, tiles: list[str], free: list[int]) -> int:
    """Return a free tile of a format, the one freed last; make one if there is none."""
    for tile in reversed(free):
        if tiles[tile] == dtype:
            free.remove(tile)
            return tile
    tiles.append(dtype)
    return len(tiles) - 1


@dataclass(frozen=True, slots=True)
class Demand:
    """What an epilogue asks of a core that tiles a product.

    `tile_bytes` of UB per element of a piece of the tile, `block_bytes` of UB (or the bias table)
    per 16 channels for one slot; `cycles` of the vector unit and `loaded_bytes` from memory per
    element, `stored_bytes` to memory; vector instructions per piece. A tile has a multiple of
    `columns` fractals of channels. A bias that the cube adds takes `l1_bytes`. Where vector cores
    follow a cube core, `cycles` are those of their slowest pipe, and `stored_bytes` go to them.
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
    """Return the demand of an epilogue the chip supports."""
    if epilogue is None:
        return None
    if not chip.combined:
        return _split_demand(epilogue, chip, sums)
    stored = DTYPE_BYTES[epilogue.out_dtype]
    channels = epilogue.of_kind("channel")
    plan = drain_plan(epilogue, sums)
    loaded = sum(DTYPE_BYTES[o.dtype] for o in epilogue.of_kind("tile"))
    beside = [DTYPE_BYTES[o.dtype] for o in epilogue.of_kind("sums")]
    kept = sum(beside) + sum(DTYPE_BYTES[dtype] for dtype in plan.tiles[1:])
    least = 2 if epilogue.deq else 1
    arrival = sum(max(n, least) for n in (DTYPE_BYTES[plan.tiles[plan.start]], *beside))
    cycles = arrival / chip.path("L0C", "UB").rate_bytes_per_cycle
    for _ in filter(None, (deq.bias for deq in epilogue.deqs)):
        cycles += DTYPE_BYTES[sums] / chip.path("UB", "L0C").rate_bytes_per_cycle
    cycles += _step_cycles(plan, chip)
    return Demand(
        2 * stored + kept + 2 * loaded,
        sum(epilogue.unit(o) * DTYPE_BYTES[o.dtype] for o in channels),
        cycles,
        loaded,
        stored,
        len(plan.steps) + sum(len(deq.names) for deq in epilogue.deqs),
        epilogue.width // isa.FRACTAL,
        epilogue.bias_bytes,
    )


def _split_demand(epilogue: Epilogue, chip: Chip, sums: str) -> Demand:
    """Return what the cube core does itself, what it stores for vector cores, and their pace."""
    head, tail = halves(epilogue, chip, sums)
    stored = DTYPE_BYTES[epilogue.out_dtype]
    pace = 0.0
    count = 0
    if tail:
        plan = plan_of(tail, head.out_dtype if head else sums)
        arrives = DTYPE_BYTES[plan.tiles[plan.start]]
        count = len(plan.steps)
        loaded = arrives + sum(DTYPE_BYTES[o.dtype] for o in tail.of_kind("tile"))
        load = loaded / chip.path("GM", "UB").rate_bytes_per_cycle
        store = stored / chip.path("UB", "GM").rate_bytes_per_cycle
        pace = max(load, store, _step_cycles(plan, chip)) / chip.vector_cores_per_core
        stored = arrives
    biases = len(head.operands) if head else 0
    table = isa.FRACTAL * DTYPE_BYTES[sums] * biases
    return Demand(0, table, pace, 0, stored, count)


def _step_cycles(plan: Plan, chip: Chip) -> float:
    """Return the cycles of the vector unit per element."""
    cycles = 0.0
    for step in plan.steps:
        formats = [plan.tiles[t] for t in (step.to, *step.sources) if isinstance(t, int)]
        widest = max(DTYPE_BYTES[dtype] for dtype in formats)
        cost = chip.vector_costs.get(step.op, chip.vector_costs["default"])
        cycles += cost.slope_cycles * widest / chip.vector_bytes_per_repeat
    return cycles


def channel_blocks(demand: Demand, chip: Chip, n_own: int, tile_n: int) -> int:
    """Blocks of 16 channels a slot holds: all of the core's where that is little, or a tile's."""
    room = chip.buffers["UB"] // 16 if chip.combined else 0
    return n_own if n_own <= tile_n or n_own * demand.block_bytes <= room else tile_n


def chip_left(chip: Chip, demand: Demand | None) -> Chip:
    """Return the chip without what of L1 holds a bias for the cube or for its bias table."""
    table = bool(demand and demand.block_bytes and not chip.combined)
    if not demand or not (table or demand.l1_bytes):
        return chip
    buffers = dict(chip.buffers)
    buffers["L1"] -= 2 * buffers["BT"] if table else demand.l1_bytes
    return replace(chip, buffers=buffers)


def fitting(demand: Demand | None, chip: Chip, t: Tilings) -> NDArray[np.int64]:
    """Return the places of the tilings that leave room for the epilogue.

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
    if not chip.combined:
        return n * demand.block_bytes <= (chip.buffers["BT"] if demand.block_bytes else 0)
    held = 2 * n * demand.block_bytes
    if demand.block_bytes:
        held = np.maximum(held, 2 * (chip.buffers["UB"] // 16))
    room: Array = m * isa.FRACTAL * isa.FRACTAL * demand.tile_bytes + held
    return room <= chip.buffers["UB"]


# -- a bias that the cube adds --------------------------------------------------------------------
def bias_bytes(shape: ConvShape) -> int:
    """Return the bytes of L1 that the bias of all output blocks takes."""
    return isa.FRACTAL * 2 * isa.FRACTAL * (1 + shape.blocks[1])


def pack_bias(shape: ConvShape, bias: np.ndarray) -> np.ndarray:
    """Return a bias (k,) as fractals: one of ones, then one a block of output channels."""
    blocks = shape.blocks[1]
    c0 = isa.c0_of(shape.dtype)
    dtype = np.dtype(np.int8) if shape.dtype == "int8" else bias.dtype
    wide = np.zeros(blocks * isa.FRACTAL, bias.dtype)
    wide[: bias.size] = bias.reshape(-1)
    packed = np.zeros((1 + blocks, isa.FRACTAL, c0), dtype)
    packed[0, :, 0] = 1
    if shape.dtype != "int8":
        packed[1:, :, 0] = wide.reshape(blocks, isa.FRACTAL)
        return packed.reshape(-1)
    packed[0, :, 1:] = LARGEST
    high = np.rint(wide / LARGEST).astype(np.int64)
    each, rest = np.divmod(np.abs(high)[:, None], c0 - 1)
    digits = np.sign(high)[:, None] * (each + (np.arange(c0 - 1) < rest))
    packed[1:, :, 0] = (wide - LARGEST * high).reshape(blocks, isa.FRACTAL)
    packed[1:, :, 1:] = digits.reshape(blocks, isa.FRACTAL, c0 - 1)
    return packed.reshape(-1)


@dataclass(frozen=True, slots=True)
class CubeBias:
    """The bias of a core's blocks in L1, `own` of each of its bundles of groups.

    MTE1 is told by `queue` that it has come, or by what comes behind it.
    """

    k: isa.KernelBuilder
    numbers: isa.Buffer
    held: isa.Buffer
    shape: ConvShape
    own: int
    queue: isa.Queue | None = None

    @classmethod
    def make(
        cls, k: isa.KernelBuilder, name: str, shape: ConvShape, own: int, *, told: bool = False
    ) -> "CubeBias":
        """Declare the tensor `name` and allocate its place in L1."""
        area = isa.FRACTAL * isa.c0_of(shape.dtype)
        most = bundles_of(shape).count * own
        numbers = k.tensor(name, shape.dtype, (1 + shape.blocks[1]) * area)
        where = f"{name}_l1", "L1", shape.dtype, (1 + most) * area
        if not told:
            return cls(k, numbers, k.buffer(*where), shape, own)
        queue = k.queue(*where, src="MTE2", dst="MTE1", depth=1)
        return cls(k, numbers, queue.buffer, shape, own, queue)

    def load(self, full: int, tail: bool, first: isa.Affine, col: isa.Affine) -> None:
        """Bring the ones, and the bias of blocks from `col` on of bundles from `first` on.

        Those are `full` bundles, and the short last one if `tail`.
        """
        bundle = bundles_of(self.shape)
        own = self.own
        area = isa.FRACTAL * isa.c0_of(self.shape.dtype)
        if self.queue:
            self.queue.alloc()
        self.k.copy(self.held.region(0, area), self.numbers.region(0, area))
        short = bundle.last_n1 if full else own
        last = (isa.Affine(bundle.count - 1), int(tail), short, own * full)
        for index, count, blocks, place in ((first, full, own, 0), last):
            if count:
                sizes = (count, blocks * area)
                start = (1 + index * bundle.n1 + col) * area
                source = self.numbers.region(start, sizes, (bundle.n1 * area, 1))
                to = self.held.region((1 + place) * area, sizes, (own * area, 1))
                self.k.copy(to, source)
        if self.queue:  # nothing else comes there
            self.queue.enqueue()
            self.queue.dequeue()
            self.queue.free()

    def blocks(self, n: Span) -> isa.Region:
        """Return the fractals of blocks `n` (place, count) in L1."""
        area = isa.FRACTAL * isa.c0_of(self.shape.dtype)
        return self.held.region((n[0] + 1) * area, (n[1], area))

    def add(
        self,
        c: isa.Tile,
        feeds: tuple[isa.Queue, isa.Queue],
        m: int,
        n: Span,
        near: isa.Region | None = None,
    ) -> None:
        """Begin sums of `m` fractals of pixels with the bias of blocks `n` (place in L1, count).

        `near`: its fractals in L0B, if they are there.
        """
        k = self.k
        (left, right) = feeds
        c0 = isa.c0_of(self.shape.dtype)
        area = isa.FRACTAL * c0
        sizes = (m, area)
        k.load2d(left.alloc().region(0, sizes), self.held.region(0, sizes, (0, 1)))
        left.enqueue()
        if near is None:
            k.load2d(right.alloc().region(0, (n[1], area)), self.blocks(n))
            right.enqueue()
        a = left.dequeue().region(0, (m, 1, isa.FRACTAL, c0))
        b = near or right.dequeue().region(0, (1, n[1], isa.FRACTAL, c0))
        k.mmad(c.region(0, (n[1], m, isa.FRACTAL, isa.FRACTAL)), a, b, accumulate=0)
        left.free()
        if near is None:
            right.free()
