"""Write the program of one core of a strided copy: tiles in and out, fills, single elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ascend_lab.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.errors import TypeMismatchError
from ascend_lab.isa import Affine, Buffer, KernelBuilder, Program, Queue, Region
from ascend_lab.layout.boxes import Box, Dim
from ascend_lab.layout.writer import whole_blocks

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
