"""Layouts as address maps: where an element lies, what is padding, what a conversion costs.

Strided data from GM to GM through UB, on all vector cores: conversions, slices, joints, pads.

A job moves a box: an affine view of one tensor to an affine view of another, or a fill. A chip
whose copies need whole 32-byte blocks in UB gets the largest part of every tile that is whole
blocks; the elements left over go one by one through the scalar unit, at the latency of L2. A chip
with padding copies moves ragged ends like the rest. Fills are written from a tile of UB. The values
are right for any size; the time is good for runs of whole blocks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

# fmt: off
# isort: off
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.errors import ShapeError, TypeMismatchError
from ascend_lab.machine.isa import (
    Affine, Buffer, KernelBuilder, Launch, Part, Program, Queue, binding_of,
)
from ascend_lab.machine.layout.maps import (
    FORMATS, AddressMap, Box, Dim, Format, Piece, address, address_map, addresses, burst_bytes,
    convert, copy_boxes, element_at, merged, pack, unpack, zero_boxes,
)
# fmt: on
# isort: on

__all__ = [
    "FORMATS",
    "AddressMap",
    "Box",
    "Dim",
    "Format",
    "Piece",
    "address",
    "address_map",
    "addresses",
    "burst_bytes",
    "conversion_launch",
    "convert",
    "copy_boxes",
    "element_at",
    "pack",
    "unpack",
    "zero_boxes",
]

TILES = 4
"""Tiles a core should have at least, so that loads and stores overlap."""

SMALL_TILE_BYTES = 2048
"""Below this a tile is not cut further: starting the copy would cost more than it hides."""


@dataclass(frozen=True, slots=True)
class View:
    """Elements offset + sum(i_d * strides[d]) of the GM tensor `tensor`; strides may be <= 0."""

    tensor: str
    strides: tuple[int, ...]
    offset: int = 0

    def reach(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the first and the last element of a view of these sizes."""
        steps = [(n - 1) * s for n, s in zip(sizes, self.strides, strict=True)]
        low = sum(s for s in steps if s < 0)
        high = sum(s for s in steps if s > 0)
        return self.offset + low, self.offset + high


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the box `sizes` from `source` to `target`; without a source, fill it with `value`."""

    sizes: tuple[int, ...]
    target: View
    source: View | None = None
    value: float = 0.0

    def check(self, tensors: Mapping[str, int]) -> None:
        """Raise `ShapeError` unless the views fit the sizes and stay inside their tensors."""
        for view in (self.target, *([self.source] if self.source else ())):
            if len(view.strides) != len(self.sizes) or min(self.sizes, default=1) < 0:
                raise ShapeError(
                    f"a stride of {view.tensor} for each of the sizes {self.sizes}, none negative",
                    str(view.strides),
                    "check the rank of the view",
                )
            low, high = view.reach(self.sizes) if math.prod(self.sizes) else (0, -1)
            if low < 0 or high >= tensors[view.tensor]:
                wanted = f"a view inside the {tensors[view.tensor]} elements of {view.tensor}"
                raise ShapeError(wanted, f"{low}..{high}", "check offset, sizes and strides")

    @property
    def job(self) -> "Job":
        """The same as counters with both strides, joined where they can be."""
        source = self.source or View("", (0,) * len(self.sizes))
        steps = zip(self.sizes, source.strides, self.target.strides, strict=True)
        box = Box(merged([Dim(*step) for step in steps]), source.offset, self.target.offset)
        return Job(box, self.target.tensor, source.tensor, self.value)


@dataclass(frozen=True, slots=True)
class Job:
    """A box that goes from tensor `source` to `target`; an empty source fills it with `value`."""

    box: Box
    target: str
    source: str = ""
    value: float = 0.0


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor: stride_d = product of the sizes behind d."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def item_bytes(dtype: str) -> int:
    """Return the bytes of an element; raise `TypeMismatchError` for an unknown number format."""
    if dtype not in DTYPE_BYTES:
        raise TypeMismatchError("a number format", repr(dtype), f"use {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def whole_blocks(dims: Sequence[Dim], c0: int) -> tuple[list[Box], list[Box]]:
    """Cut a box into boxes of whole blocks (element count a multiple of c0) and what is left.

    Axes that already contribute factors of two are kept; the longest axes are shortened by what is
    still needed, and what they lose is cut again.
    """
    sizes = [d.count for d in dims]
    if not math.prod(sizes) % c0:
        return [Box(tuple(dims), 0, 0)], []
    need = c0
    units = [1] * len(sizes)
    for i, size in enumerate(sizes):
        units[i] = math.gcd(need, size)
        need //= units[i]
    for i in sorted(range(len(sizes)), key=lambda i: -(sizes[i] // units[i])):
        factor = min(need, 1 << (sizes[i] // units[i]).bit_length() - 1)
        units[i] = units[i] * factor
        need = need // factor
    if need > 1:
        return [], [Box(tuple(dims), 0, 0)]
    kept = [size // unit * unit for size, unit in zip(sizes, units, strict=True)]
    found = [Box(_resized(dims, kept), 0, 0)], list[Box]()
    for i, dim in enumerate(dims):
        if kept[i] < dim.count:
            end = _resized(dims, [*kept[:i], dim.count - kept[i], *sizes[i + 1 :]])
            far = kept[i] * dim.source, kept[i] * dim.target
            for boxes, more in zip(found, whole_blocks(end, c0), strict=True):
                boxes.extend(Box(b.dims, b.source + far[0], b.target + far[1]) for b in more)
    return found


def _resized(dims: Sequence[Dim], sizes: Sequence[int]) -> tuple[Dim, ...]:
    return tuple(replace(d, count=n) for n, d in zip(sizes, dims, strict=True))


# -- launches -------------------------------------------------------------------------------------
def conversion_launch(
    shape: Sequence[int], dtype: str, source: str, target: str, chip: Chip
) -> Launch:
    """Convert tensor `x` (layout `source`) into tensor `y` (layout `target`) on all vector cores.

    `shape` is the logical shape. Values equal `convert`, padding of `y` is zero. Raises
    `LayoutError`, and `CapacityError` where UB cannot hold a tile.
    """
    maps = address_map(source, shape, dtype), address_map(target, shape, dtype)
    return maps_launch(*maps, chip, f"{source}_to_{target}")


def maps_launch(
    source: AddressMap, target: AddressMap, chip: Chip, name: str, but: Box | None = None
) -> Launch:
    """Move every element of tensor `x` from its address in one map to that in another, in `y`.

    The elements of box `but`, one of `copy_boxes`, are left to somebody else.
    """
    jobs = [Job(box, "y", "x") for box in copy_boxes(source, target) if box != but]
    jobs += [Job(box, "y") for box in zero_boxes(target)]
    tensors = {"x": source.elements, "y": target.elements}
    return _deal(name, chip, source.dtype, tensors, jobs, by_lanes=True)


def copy_launch(
    chip: Chip,
    dtype: str,
    sizes: Sequence[int],
    source_strides: Sequence[int],
    target_strides: Sequence[int],
    *,
    source_offset: int = 0,
    source_elements: int | None = None,
    target_elements: int | None = None,
    name: str = "copy",
) -> Launch:
    """Copy a strided view of tensor `x` to a strided view of tensor `y`, on all vector cores.

    The tensors are as long as the views reach unless their lengths are given. Raises `ShapeError`
    for views of different rank or that leave their tensor, `PathError` for a wrong format.
    """
    source = View("x", tuple(source_strides), source_offset)
    target = View("y", tuple(target_strides))
    move = Move(tuple(sizes), target, source)
    tensors = {}
    for view, length in ((source, source_elements), (target, target_elements)):
        fits = len(view.strides) == len(sizes)
        needed = view.reach(sizes)[1] + 1 if length is None and fits else 1
        tensors[view.tensor] = needed if length is None else length
    return moves_launch(chip, dtype, tensors, [move], name=name)


def moves_launch(
    chip: Chip, dtype: str, tensors: Mapping[str, int], moves: Sequence[Move], *, name: str
) -> Launch:
    """Share the moves out over all vector cores; `tensors` gives elements by name.

    Moves must not write the same element twice. Raises `ShapeError` as `Move.check` does.
    """
    for move in moves:
        move.check(tensors)
    jobs = [move.job for move in moves if math.prod(move.sizes)]
    if not jobs:
        raise ShapeError(f"{name}: an element to move", "none", "leave the operator out")
    return _deal(name, chip, dtype, tensors, jobs)


def _deal(
    name: str,
    chip: Chip,
    dtype: str,
    tensors: Mapping[str, int],
    jobs: Sequence[Job],
    *,
    by_lanes: bool = False,
) -> Launch:
    """Cut every job over the cores, every other one from the last core backwards.

    So short jobs meet idle cores. Cores with equal work share a program.
    """
    cores = chip.cores_of("vector")
    c0 = BLOCK_BYTES // item_bytes(dtype)
    shares = [_share(job, cores, c0, i % 2 == 1) for i, job in enumerate(jobs)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for core in range(cores):
        work = tuple(share.count_on(core, cores) for share in shares)
        if any(work):
            groups.setdefault(work, []).append(core)
    parts = []
    for work, mine in groups.items():
        pairs = zip(shares, work, strict=True)
        own = [share.of(mine[0], cores, count) for share, count in pairs if count]
        writer = MoveWriter(name, chip, dtype, tensors, [job for job, _ in own], by_lanes)
        program = writer.program(own, len(mine))
        parts.append(Part(program, tuple(binding_of({"core": i}) for i in range(len(mine)))))
    return Launch(name, tuple(parts))


@dataclass(frozen=True, slots=True)
class _Share:
    """A job cut over cores along the counter `along`, `per` steps each, the last has the rest."""

    job: Job
    along: int
    per: int
    backwards: bool

    def _first(self, core: int, cores: int) -> int:
        return (cores - 1 - core if self.backwards else core) * self.per

    def count_on(self, core: int, cores: int) -> int:
        """Return how many steps core `core` of `cores` takes."""
        left = self.job.box.dims[self.along].count - self._first(core, cores)
        return max(min(left, self.per), 0)

    def of(self, core: int, cores: int, count: int) -> tuple[Job, Dim]:
        """Return the job of one core that takes `count` steps, and the way to the next core's."""
        box = self.job.box
        start = self._first(core, cores)
        dims = list(box.dims)
        dim = box.dims[self.along]
        dims[self.along] = replace(dim, count=count)
        own = Box(tuple(dims), box.source + start * dim.source, box.target + start * dim.target)
        step = -self.per if self.backwards else self.per
        return replace(self.job, box=own), Dim(1, step * dim.source, step * dim.target)


def _share(job: Job, cores: int, c0: int, backwards: bool) -> _Share:
    """Cut along the longest counter, in steps that leave whole blocks where they can.

    The innermost counter is cut only if it leaves long runs or is alone.
    """
    sizes = [d.count for d in job.box.dims]
    inner = len(sizes) - 1
    along = max(range(len(sizes)), key=lambda i: (i != inner or inner == 0, sizes[i]))
    if sizes[along] < cores and sizes[inner] >= 8 * c0 * cores:
        along = inner
    step = c0 // math.gcd(c0, math.prod(sizes) // sizes[along])
    per = -(-sizes[along] // cores)
    if step <= sizes[along]:
        per = -(-per // step) * step
    return _Share(job, along, per, backwards)


# -- one core -------------------------------------------------------------------------------------
class MoveWriter:
    """Builder, tensors, queue of tiles, and a tile per fill value, of one core's program.

    Tiles are rounded up to blocks and cut where they hold whole ones; with `by_lanes` rounded down
    and cut at multiples of C0, which suits boxes whose inner counters are C0 already.
    """

    def __init__(
        self,
        name: str,
        chip: Chip,
        dtype: str,
        tensors: Mapping[str, int],
        jobs: Sequence[Job],
        by_lanes: bool = False,
    ) -> None:
        """Declare the tensors the jobs use; make fill tiles, and tiles that fit what is left."""
        self.k = KernelBuilder(name, chip)
        self.chip = chip
        self.by_lanes = by_lanes
        self.item, self.loops, ub = item_bytes(dtype), 0, chip.buffers["UB"]
        self.c0 = BLOCK_BYTES // self.item
        used = {n for job in jobs for n in (job.source, job.target)}
        self.gm = {n: self.k.tensor(n, dtype, size) for n, size in tensors.items() if n in used}
        most: dict[float, int] = {}
        for job in jobs:
            if not job.source:
                most[job.value] = max(most.get(job.value, 0), job.box.elements)
        room = ub // 4 // max(len(most), 1)
        self.fills = {
            v: self._fill(f"fill{i}", dtype, v, n, room) for i, (v, n) in enumerate(most.items())
        }
        left = ub - sum(b.elements for b in self.fills.values()) * self.item
        largest = max((job.box.elements for job in jobs if job.source), default=0)
        wanted = max(-(-largest // TILES) * self.item, SMALL_TILE_BYTES)
        wanted += 0 if by_lanes else BLOCK_BYTES - 1
        self.cap = min(left // 2, wanted) // BLOCK_BYTES * self.c0
        self.queue: Queue | None = None
        if largest:
            self.queue = self.k.queue("tile", "UB", dtype, self.cap, src="MTE2", dst="MTE3")
        for pipe in ("MTE3", "S") if self.fills else ():
            self.k.set_flag("V", pipe, 0)
            self.k.wait_flag("V", pipe, 0)

    def _fill(self, name: str, dtype: str, value: float, wanted: int, room_bytes: int) -> Buffer:
        """Fill a tile of UB with `value` on V, once."""
        lanes = self.chip.vector_bytes_per_repeat // self.item
        most = max(min(room_bytes // (lanes * self.item), self.chip.max_repeat), 1)
        repeats = min(-(-wanted // lanes), most)
        buffer = self.k.buffer(name, "UB", dtype, repeats * lanes)
        self.k.vector("vdup", buffer.region(0, (repeats, lanes)), scalar=value)
        return buffer

    def program(self, jobs: Sequence[tuple[Job, Dim]], cores: int) -> Program:
        """Do the jobs of the first core; its param `core` leads to those of the `cores`."""
        core = self.k.param("core", cores)
        for job, each in jobs:
            source = core * each.source
            target = core * each.target
            self.emit(job, job.box.dims, source + job.box.source, target + job.box.target)
        return self.k.finish()

    def emit(self, job: Job, dims: Sequence[Dim], source: Affine, target: Affine) -> None:
        """Move a box: loop over its outer counters until a tile fits."""
        cap = self.cap if job.source else self.fills[job.value].elements
        if math.prod(d.count for d in dims) <= cap:
            self._tile(job, dims, source, target)
            return
        outer = dims[0]
        rest = tuple(dims[1:])
        inside = math.prod(d.count for d in rest)
        chunk = max(cap // inside, 1)
        step = self.c0 if self.by_lanes else self.c0 // math.gcd(self.c0, inside)
        chunk -= chunk % step if chunk > step else 0
        times, tail = divmod(outer.count, chunk)
        inner = (Dim(chunk, outer.source, outer.target), *rest) if chunk > 1 else rest
        self.loops += 1
        with self.k.loop(f"i{self.loops}", times) as i:
            at = i * chunk
            self.emit(job, inner, source + at * outer.source, target + at * outer.target)
        if tail:
            done = times * chunk
            inner = (Dim(tail, outer.source, outer.target), *rest)
            self.emit(job, inner, source + done * outer.source, target + done * outer.target)

    def _tile(self, job: Job, dims: Sequence[Dim], source: Affine, target: Affine) -> None:
        whole = [Box(tuple(dims), 0, 0)]
        rest = list[Box]()
        if self.chip.combined:
            whole, rest = whole_blocks(dims, self.c0)
        for boxes, write in ((whole, self._copy), (rest, self._single)):
            for box in boxes:
                write(job, box.dims, source + box.source, target + box.target)

    def _copy(self, job: Job, dims: Sequence[Dim], source: Affine, target: Affine) -> None:
        sizes = tuple(d.count for d in dims)
        pad = math.prod(sizes) % self.c0 != 0
        y = self.gm[job.target].region(target, sizes, [d.target for d in dims])
        if not job.source:
            self.k.copy(y, self.fills[job.value].region(0, sizes), pad=pad)
            return
        assert self.queue is not None
        x = self.gm[job.source].region(source, sizes, [d.source for d in dims])
        self.k.copy(self.queue.alloc().region(0, sizes), x, pad=pad)
        self.queue.enqueue()
        self.k.copy(y, self.queue.dequeue().region(0, sizes), pad=pad)
        self.queue.free()

    def _single(self, job: Job, dims: Sequence[Dim], source: Affine, target: Affine) -> None:
        """Move element by element on S: a trip to L2 for the store, one more for a load."""
        if dims:
            outer = dims[0]
            self.loops += 1
            with self.k.loop(f"i{self.loops}", outer.count) as i:
                at = source + i * outer.source, target + i * outer.target
                self._single(job, dims[1:], *at)
            return
        fill = None if job.source else self.fills[job.value].region(0, 1)
        trips = (1 if fill else 2) * self.chip.l2.latency_cycles
        steps = max(trips // max(self.chip.scalar_cycles, 1), 1)
        src = fill or self.gm[job.source].region(source, 1)
        self.k.scalar(self.gm[job.target].region(target, 1), src, steps=steps)
