"""Write the program of one core of a conversion: tiles in, tiles out, zeros, single elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ascend_lab.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.isa import (
    Affine,
    Buffer,
    KernelBuilder,
    Launch,
    Part,
    Program,
    Queue,
    binding_of,
    scalar,
)
from ascend_lab.isa.instructions import data_copy
from ascend_lab.layout.boxes import Box, Dim, copy_boxes, zero_boxes
from ascend_lab.layout.maps import AddressMap, address_map, c0_of

Job = tuple[Box, Dim, bool]
"""A box of the first core, how far it moves per core, and whether it is padding to be zeroed."""

TILES = 4
"""Tiles a core should have at least, so that loads and stores overlap."""

SMALL_TILE_BYTES = 2048
"""Below this a tile is not cut further: starting the copy would cost more than it hides."""

ZEROS = "zeros"


def write_program(
    name: str, chip: Chip, dtype: str, sizes: tuple[int, int], jobs: Sequence[Job], cores: int
) -> Program:
    """Return the program that does `jobs`; its param `core` counts the cores that run it."""
    writer = _Writer(name, chip, dtype, sizes, jobs)
    core = writer.k.param("core", cores)
    for box, each, zero in jobs:
        source = core * (each.count * each.source) + box.source
        target = core * (each.count * each.target) + box.target
        writer.emit(box.dims, source, target, zero)
    return writer.k.finish()


class _Writer:
    """Holds the builder, the tensors, the queue and the tile of zeros of one program."""

    def __init__(
        self, name: str, chip: Chip, dtype: str, sizes: tuple[int, int], jobs: Sequence[Job]
    ) -> None:
        self.k = KernelBuilder(name, chip)
        self.chip, self.item = chip, DTYPE_BYTES[dtype]
        self.c0 = BLOCK_BYTES // self.item
        self.x, self.y = self.k.tensor("x", dtype, sizes[0]), self.k.tensor("y", dtype, sizes[1])
        ub = chip.buffers["UB"]
        largest = [max((b.elements for b, _, z in jobs if z == zero), default=0) for zero in (0, 1)]
        self.loops = 0
        self.zeros: Buffer | None = None
        self.zero_cap = self.cap = 0
        if largest[1]:
            self._make_zeros(dtype, largest[1])
        self.queue: Queue | None = None
        if largest[0]:
            room = (ub - self.zero_cap * self.item) // 2
            wanted = max(-(-largest[0] // TILES) * self.item, SMALL_TILE_BYTES)
            self.cap = min(room, wanted) // BLOCK_BYTES * self.c0
            self.queue = self.k.queue("tile", "UB", dtype, self.cap, src="MTE2", dst="MTE3")

    def _make_zeros(self, dtype: str, wanted: int) -> None:
        """Fill a tile with zeros on V and let MTE3 and S wait for it once."""
        lanes = self.chip.vector_bytes_per_repeat // self.item
        most = min(self.chip.buffers["UB"] // 4 // (lanes * self.item), self.chip.max_repeat)
        repeats = min(-(-wanted // lanes), most)
        self.zero_cap = repeats * lanes
        self.zeros = self.k.buffer(ZEROS, "UB", dtype, self.zero_cap)
        self.k.vector("vdup", self.zeros.region(0, (repeats, lanes)), scalar=0.0)
        for pipe in ("MTE3", "S"):
            self.k.set_flag("V", pipe, 0)
            self.k.wait_flag("V", pipe, 0)

    def emit(self, dims: Sequence[Dim], source: Affine, target: Affine, zero: bool) -> None:
        """Move a box, or write zeros to it: loop over its outer counters until a tile fits."""
        cap = self.zero_cap if zero else self.cap
        if math.prod(d.count for d in dims) <= cap:
            self._tile(dims, source, target, zero)
            return
        outer, rest = dims[0], tuple(dims[1:])
        chunk = max(cap // math.prod(d.count for d in rest), 1)
        chunk -= chunk % self.c0 if chunk > self.c0 else 0
        times, tail = divmod(outer.count, chunk)
        inner = (Dim(chunk, outer.source, outer.target), *rest) if chunk > 1 else rest
        with self.k.loop(self._name(), times) as i:
            step = i * chunk
            self.emit(inner, source + step * outer.source, target + step * outer.target, zero)
        if tail:
            done = times * chunk
            inner = (Dim(tail, outer.source, outer.target), *rest)
            self.emit(inner, source + done * outer.source, target + done * outer.target, zero)

    def _name(self) -> str:
        self.loops += 1
        return f"i{self.loops}"

    def _tile(self, dims: Sequence[Dim], source: Affine, target: Affine, zero: bool) -> None:
        blocks = not self.chip.combined or not math.prod(d.count for d in dims) % self.c0
        whole, rest = ([Box(tuple(dims), 0, 0)], []) if blocks else whole_blocks(dims, self.c0)
        for box in whole:
            self._copy(box.dims, source + box.source, target + box.target, zero)
        for box in rest:
            self._single(box.dims, source + box.source, target + box.target, zero)

    def _copy(self, dims: Sequence[Dim], source: Affine, target: Affine, zero: bool) -> None:
        sizes = tuple(d.count for d in dims)
        pad = math.prod(sizes) % self.c0 != 0
        y = self.y.region(target, sizes, [d.target for d in dims])
        if zero:
            assert self.zeros is not None
            self.k.emit(data_copy(self.chip, y, self.zeros.region(0, sizes), pad=pad))
            return
        assert self.queue is not None
        x = self.x.region(source, sizes, [d.source for d in dims])
        self.k.copy(self.queue.alloc().region(0, sizes), x, pad=pad)
        self.queue.enqueue()
        self.k.copy(y, self.queue.dequeue().region(0, sizes), pad=pad)
        self.queue.free()

    def _single(self, dims: Sequence[Dim], source: Affine, target: Affine, zero: bool) -> None:
        """Move element by element on S, which reads and writes GM at the latency of L2."""
        if dims:
            outer = dims[0]
            with self.k.loop(self._name(), outer.count) as i:
                at = source + i * outer.source, target + i * outer.target
                self._single(dims[1:], *at, zero)
            return
        waits = 1 if zero else 2
        steps = max(waits * self.chip.l2.latency_cycles // max(self.chip.scalar_cycles, 1), 1)
        src = self.x.region(source, 1)
        if zero:
            assert self.zeros is not None
            src = self.zeros.region(0, 1)
        self.k.emit(scalar(self.chip, self.y.region(target, 1), src, steps=steps))


def whole_blocks(dims: Sequence[Dim], c0: int) -> tuple[list[Box], list[Box]]:
    """Cut a box into boxes of whole blocks (element count a multiple of c0) and what is left.

    Axes that already contribute factors of two are kept; the longest axes are shortened by what is
    still needed, and what they lose is cut again.
    """
    sizes = [d.count for d in dims]
    if not math.prod(sizes) % c0:
        return [Box(tuple(dims), 0, 0)], []
    need, units = c0, [1] * len(sizes)
    for i, size in enumerate(sizes):
        units[i] = math.gcd(need, size)
        need //= units[i]
    for i in sorted(range(len(sizes)), key=lambda i: -(sizes[i] // units[i])):
        more = min(need, 1 << (sizes[i] // units[i]).bit_length() - 1)
        units[i], need = units[i] * more, need // more
    if need > 1:
        return [], [Box(tuple(dims), 0, 0)]
    kept = [size // unit * unit for size, unit in zip(sizes, units, strict=True)]
    whole, rest = [_piece_of(dims, [0] * len(dims), kept)], list[Box]()
    for i, (size, keep) in enumerate(zip(sizes, kept, strict=True)):
        if keep < size:
            start = [0] * i + [keep] + [0] * (len(sizes) - i - 1)
            end = _resized(dims, [*kept[:i], size - keep, *sizes[i + 1 :]])
            more_whole, more_rest = whole_blocks(end, c0)
            whole += (_moved(box, dims, start) for box in more_whole)
            rest += (_moved(box, dims, start) for box in more_rest)
    return whole, rest


def _resized(dims: Sequence[Dim], sizes: Sequence[int]) -> tuple[Dim, ...]:
    return tuple(Dim(n, d.source, d.target) for n, d in zip(sizes, dims, strict=True))


def _piece_of(dims: Sequence[Dim], start: Sequence[int], sizes: Sequence[int]) -> Box:
    return _moved(Box(_resized(dims, sizes), 0, 0), dims, start)


def _moved(box: Box, dims: Sequence[Dim], start: Sequence[int]) -> Box:
    source = sum(n * d.source for n, d in zip(start, dims, strict=True))
    target = sum(n * d.target for n, d in zip(start, dims, strict=True))
    return Box(box.dims, box.source + source, box.target + target)


# A conversion as a program: strided copies through UB, the boxes shared out over all cores.
#
# The rule for ragged shapes. A chip whose copies need whole 32-byte blocks in UB gets, out of
# every
# tile, the largest part that is whole blocks; the few elements left over go one by one through
# the
# scalar unit. A chip with padding copies moves the ragged end like the rest. Padding of the
# target
# is written from a tile of zeros in UB. The copies gather: they read short runs and write long
# ones.


@dataclass(frozen=True, slots=True)
class Share:
    """A box cut over cores along its dim `along`: `per` steps each, the last core may have less.

    Cores are counted from the first one, or from the last if `backwards`, so that short jobs meet
    idle cores.
    """

    box: Box
    zero: bool
    along: int
    per: int
    backwards: bool

    def count_on(self, core: int, cores: int) -> int:
        """Return how many steps core `core` of `cores` takes."""
        left = self.box.dims[self.along].count - self.turn(core, cores) * self.per
        return max(min(left, self.per), 0)

    def turn(self, core: int, cores: int) -> int:
        """Return the place of a core in the order in which the box is dealt out."""
        return cores - 1 - core if self.backwards else core

    def box_of(self, count: int) -> Box:
        """Return the piece of a core that takes `count` steps, where the box begins."""
        dims = list(self.box.dims)
        dims[self.along] = replace(dims[self.along], count=count)
        return replace(self.box, dims=tuple(dims))


def conversion_launch(
    shape: Sequence[int], dtype: str, source: str, target: str, chip: Chip
) -> Launch:
    """Convert tensor `x` (layout `source`) into tensor `y` (layout `target`) on all vector cores.

    `shape` is the logical shape. Values equal `convert`, padding of `y` is zero. Raises
    `LayoutError`, and `CapacityError` where UB cannot hold a tile.
    """
    maps = address_map(source, shape, dtype), address_map(target, shape, dtype)
    return maps_launch(*maps, chip, f"{source}_to_{target}")


def maps_launch(source: AddressMap, target: AddressMap, chip: Chip, name: str) -> Launch:
    """Move every element of tensor `x` from its address in one map to that in another, in `y`."""
    maps = source, target
    cores = chip.core_count * chip.vector_cores_per_core
    jobs = [(box, False) for box in copy_boxes(*maps)]
    jobs += [(box, True) for box in zero_boxes(maps[1])]
    shares = [share(b, z, cores, c0_of(maps[0].dtype), i % 2 == 1) for i, (b, z) in enumerate(jobs)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for core in range(cores):
        work = tuple(s.count_on(core, cores) for s in shares)
        if any(work):
            groups.setdefault(work, []).append(core)
    return Launch(name, tuple(_part(name, chip, maps, shares, w, c) for w, c in groups.items()))


def share(box: Box, zero: bool, cores: int, c0: int, backwards: bool = False) -> Share:
    """Cut a box over cores along its longest counter, in steps that leave whole blocks."""
    sizes = [d.count for d in box.dims]
    inner = len(sizes) - 1
    along = max(range(len(sizes)), key=lambda i: (i != inner or len(sizes) == 1, sizes[i]))
    if sizes[along] < cores and sizes[inner] > 8 * c0 * cores:
        along = inner
    others = math.prod(sizes) // sizes[along]
    step = c0 // math.gcd(c0, others)
    per = -(-sizes[along] // cores)
    if step <= sizes[along]:
        per = -(-per // step) * step
    return Share(box, zero, along, per, backwards)


def _part(
    name: str,
    chip: Chip,
    maps: tuple[AddressMap, AddressMap],
    shares: Sequence[Share],
    work: tuple[int, ...],
    cores: Sequence[int],
) -> Part:
    """Return the program of the neighbouring cores that take the same `work`."""
    total = chip.core_count * chip.vector_cores_per_core
    pieces = []
    for job, count in zip(shares, work, strict=True):
        if count:
            dim = job.box.dims[job.along]
            box, start = job.box_of(count), job.turn(cores[0], total) * job.per
            target = box.target + start * dim.target
            box = replace(box, source=box.source + start * dim.source, target=target)
            each = Dim(-job.per if job.backwards else job.per, dim.source, dim.target)
            pieces.append((box, each, job.zero))
    sizes = (maps[0].elements, maps[1].elements)
    program = write_program(name, chip, maps[0].dtype, sizes, pieces, len(cores))
    return Part(program, tuple(binding_of({"core": i}) for i in range(len(cores))))
