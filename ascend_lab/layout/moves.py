"""Write the program of one core of a strided copy: tiles in and out, fills, single elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ascend_lab.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.errors import ShapeError, TypeMismatchError
from ascend_lab.isa import (
    Affine,
    Buffer,
    KernelBuilder,
    Launch,
    Part,
    Program,
    Queue,
    Region,
    binding_of,
)
from ascend_lab.layout.boxes import Box, Dim, merged
from ascend_lab.layout.conversion import whole_blocks

TILES = 4
"""Tiles a core should have at least, so that loads and stores overlap."""

SMALL_TILE_BYTES = 2048
"""Below this a tile is not cut further: starting the copy would cost more than it hides."""


def item_bytes(dtype: str) -> int:
    """Return the bytes of an element; raise `TypeMismatchError` for an unknown number format."""
    if dtype not in DTYPE_BYTES:
        raise TypeMismatchError("a number format", repr(dtype), f"use {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Job:
    """One core's share of a move: the box of core 0, and how far the box moves per core.

    `each.count` steps of `each.source` and `each.target` elements lead to the next core's box. An
    empty `source` fills the target with `value`.
    """

    box: Box
    each: Dim
    target: str
    source: str
    value: float = 0.0


def write_moves(
    name: str,
    chip: Chip,
    dtype: str,
    tensors: Mapping[str, int],
    jobs: Sequence[Job],
    cores: int,
) -> Program:
    """Return the program that does `jobs`; its param `core` counts the cores that run it."""
    writer = MoveWriter(name, chip, dtype, tensors, jobs)
    core = writer.k.param("core", cores)
    for job in jobs:
        source = core * (job.each.count * job.each.source) + job.box.source
        target = core * (job.each.count * job.each.target) + job.box.target
        writer.emit(job, job.box.dims, source, target)
    return writer.k.finish()


class MoveWriter:
    """Holds the builder, the tensors, the queue of tiles and a tile per fill value."""

    def __init__(
        self,
        name: str,
        chip: Chip,
        dtype: str,
        tensors: Mapping[str, int],
        jobs: Sequence[Job],
    ) -> None:
        """Declare the tensors the jobs use; make fill tiles, and tiles that fit what is left."""
        self.k, self.chip = KernelBuilder(name, chip), chip
        self.item = item_bytes(dtype)
        self.c0 = BLOCK_BYTES // self.item
        self.loops = 0
        used = {n for job in jobs for n in (job.source, job.target)}
        self.gm = {n: self.k.tensor(n, dtype, size) for n, size in tensors.items() if n in used}
        ub = chip.buffers["UB"]
        fills = {job.value: 0 for job in jobs if not job.source}
        for job in jobs:
            if not job.source:
                fills[job.value] = max(fills[job.value], job.box.elements)
        self.fills = {
            value: self._fill(f"fill{i}", dtype, value, most, ub // 4 // len(fills))
            for i, (value, most) in enumerate(fills.items())
        }
        room = ub - sum(b.elements for b in self.fills.values()) * self.item
        largest = max((job.box.elements for job in jobs if job.source), default=0)
        wanted = max(-(-largest // TILES) * self.item, SMALL_TILE_BYTES)
        self.cap = min(room // 2 // BLOCK_BYTES, -(-wanted // BLOCK_BYTES)) * self.c0
        self.queue: Queue | None = None
        if largest:
            self.queue = self.k.queue("tile", "UB", dtype, self.cap, src="MTE2", dst="MTE3")
        if self.fills:
            for pipe in ("MTE3", "S"):
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

    def emit(self, job: Job, dims: Sequence[Dim], source: Affine, target: Affine) -> None:
        """Move a box: loop over its outer counters until a tile fits."""
        cap = self.cap if job.source else self.fills[job.value].elements
        if math.prod(d.count for d in dims) <= cap:
            self._tile(job, dims, source, target)
            return
        outer, rest = dims[0], tuple(dims[1:])
        inside = math.prod(d.count for d in rest)
        chunk, step = max(cap // inside, 1), self.c0 // math.gcd(self.c0, inside)
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
        whole, rest = [Box(tuple(dims), 0, 0)], list[Box]()
        if self.chip.combined:
            whole, rest = whole_blocks(dims, self.c0)
        for box in whole:
            self._copy(job, box.dims, source + box.source, target + box.target)
        for box in rest:
            self._single(job, box.dims, source + box.source, target + box.target)

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
        """Move element by element on S, which reads and writes GM at the latency of L2."""
        if dims:
            outer = dims[0]
            self.loops += 1
            with self.k.loop(f"i{self.loops}", outer.count) as i:
                at = source + i * outer.source, target + i * outer.target
                self._single(job, dims[1:], *at)
            return
        src: Region = self.gm[job.source].region(source, 1) if job.source else self._one(job)
        self.k.scalar(self.gm[job.target].region(target, 1), src, steps=self._wait(job))

    def _one(self, job: Job) -> Region:
        return self.fills[job.value].region(0, 1)

    def _wait(self, job: Job) -> int:
        """Scalar steps of one element: a trip to L2 for the store, one more for a load."""
        trips = 2 if job.source else 1
        return max(trips * self.chip.l2.latency_cycles // max(self.chip.scalar_cycles, 1), 1)


# Strided copies on all cores: slice, concat, split, pad, reshape, permute are lists of moves.
#
# A move takes an affine view of one tensor to an affine view of another, tile by tile through UB.
# A
# chip whose copies need whole 32-byte blocks in UB gets the largest part of every tile that is
# whole
# blocks; the elements left over go one by one through the scalar unit, at the latency of L2. A
# chip
# with padding copies moves ragged ends like the rest. The values are right for any size; the time
# is
# good for runs of whole blocks.


@dataclass(frozen=True, slots=True)
class View:
    """Elements offset + sum(i_d * strides[d]) of the GM tensor `tensor`; strides may be <= 0."""

    tensor: str
    strides: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the box `sizes` from `source` to `target`; without a source, fill it with `value`."""

    sizes: tuple[int, ...]
    target: View
    source: View | None = None
    value: float = 0.0

    @property
    def box(self) -> Box:
        """The same move as counters with both strides, joined where they can be."""
        zero = View("", (0,) * len(self.sizes))
        source = self.source or zero
        steps = zip(self.sizes, source.strides, self.target.strides, strict=True)
        return Box(merged([Dim(*step) for step in steps]), source.offset, self.target.offset)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor: stride_d = product of the sizes behind d."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def copy_launch(
    chip: Chip,
    dtype: str,
    sizes: Sequence[int],
    source_strides: Sequence[int],
    target_strides: Sequence[int],
    *,
    source_offset: int = 0,
    target_offset: int = 0,
    source_elements: int | None = None,
    target_elements: int | None = None,
    name: str = "copy",
) -> Launch:
    """Copy a strided view of tensor `x` to a strided view of tensor `y`, on all vector cores.

    The tensors are as long as the views reach unless their lengths are given. Raises `ShapeError`
    for views of different rank or that leave their tensor, `PathError` for a wrong format.
    """
    source = View("x", tuple(source_strides), source_offset)
    target = View("y", tuple(target_strides), target_offset)
    lengths = {"x": source_elements, "y": target_elements}
    move = Move(tuple(sizes), target, source)
    for view in (source, target):
        if lengths[view.tensor] is None:
            lengths[view.tensor] = _reach(move.sizes, view)[1] + 1
    tensors = {name: length for name, length in lengths.items() if length is not None}
    return moves_launch(chip, dtype, tensors, [move], name=name)


def moves_launch(
    chip: Chip, dtype: str, tensors: Mapping[str, int], moves: Sequence[Move], *, name: str
) -> Launch:
    """Share the moves out over all vector cores; `tensors` gives elements by name.

    Moves must not write the same element twice. Each move is cut along its longest counter; the
    next one is dealt from the last core backwards, so that short moves meet idle cores.
    """
    for move in moves:
        _check(move, tensors)
    cores = chip.core_count * chip.vector_cores_per_core
    c0 = BLOCK_BYTES // item_bytes(dtype)
    real = [move for move in moves if math.prod(move.sizes)]
    shares = [_share(move, cores, c0, i % 2 == 1) for i, move in enumerate(real)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for core in range(cores):
        work = tuple(share.count_on(core, cores) for share in shares)
        if any(work):
            groups.setdefault(work, []).append(core)
    if not groups:
        raise ShapeError(f"{name}: an element to move", "none", "leave the operator out")
    lists = groups.items()
    parts = (_part(name, chip, dtype, tensors, shares, work, mine) for work, mine in lists)
    return Launch(name, tuple(parts))


def _check(move: Move, tensors: Mapping[str, int]) -> None:
    for view in (move.target, *([move.source] if move.source else ())):
        if len(view.strides) != len(move.sizes) or min(move.sizes, default=1) < 0:
            raise ShapeError(
                f"a stride of {view.tensor} for each of the sizes {move.sizes}, none negative",
                str(view.strides),
                "check the rank of the view",
            )
        if math.prod(move.sizes) == 0:
            continue
        low, high = _reach(move.sizes, view)
        if low < 0 or high >= tensors[view.tensor]:
            raise ShapeError(
                f"a view inside the {tensors[view.tensor]} elements of {view.tensor}",
                f"{low}..{high}",
                "check offset, sizes and strides",
            )


def _reach(sizes: Sequence[int], view: View) -> tuple[int, int]:
    if len(view.strides) != len(sizes):
        return 0, 0
    steps = [(n - 1) * s for n, s in zip(sizes, view.strides, strict=True)]
    return (
        view.offset + sum(s for s in steps if s < 0),
        view.offset + sum(s for s in steps if s > 0),
    )


@dataclass(frozen=True, slots=True)
class _Share:
    """A move cut over cores along the counter `along`, `per` steps each, the last has the rest."""

    move: Move
    box: Box
    along: int
    per: int
    backwards: bool

    def turn(self, core: int, cores: int) -> int:
        return cores - 1 - core if self.backwards else core

    def count_on(self, core: int, cores: int) -> int:
        left = self.box.dims[self.along].count - self.turn(core, cores) * self.per
        return max(min(left, self.per), 0)


def _share(move: Move, cores: int, c0: int, backwards: bool) -> _Share:
    """Cut along the longest counter; the innermost only if it leaves long runs or is alone."""
    box = move.box
    sizes = [d.count for d in box.dims]
    inner = len(sizes) - 1
    along = max(range(len(sizes)), key=lambda i: (i != inner or inner == 0, sizes[i]))
    if sizes[along] < cores and sizes[inner] >= 8 * c0 * cores:
        along = inner
    step = c0 // math.gcd(c0, math.prod(sizes) // sizes[along])
    per = -(-sizes[along] // cores)
    if step <= sizes[along]:
        per = -(-per // step) * step
    return _Share(move, box, along, per, backwards)


def _part(
    name: str,
    chip: Chip,
    dtype: str,
    tensors: Mapping[str, int],
    shares: Sequence[_Share],
    work: tuple[int, ...],
    cores: Sequence[int],
) -> Part:
    """Return the program of the neighbouring cores that take the same `work`."""
    total = chip.core_count * chip.vector_cores_per_core
    jobs = []
    for share, count in zip(shares, work, strict=True):
        if count:
            dims = list(share.box.dims)
            dim = dims[share.along]
            start = share.turn(cores[0], total) * share.per
            dims[share.along] = replace(dim, count=count)
            source, target = share.box.source, share.box.target
            box = Box(tuple(dims), source + start * dim.source, target + start * dim.target)
            each = Dim(-share.per if share.backwards else share.per, dim.source, dim.target)
            view = share.move.source
            tensor = view.tensor if view else ""
            jobs.append(Job(box, each, share.move.target.tensor, tensor, share.move.value))
    program = write_moves(name, chip, dtype, tensors, jobs, len(cores))
    return Part(program, tuple(binding_of({"core": i}) for i in range(len(cores))))
