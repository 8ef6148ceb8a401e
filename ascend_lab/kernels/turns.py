"""Transpose one tile in UB on the vector unit, in 16 x 16 blocks of 2-byte elements.

A unit of a tile is `rows` of the source by `columns`; a tile is (b1, a1) units. Each way of turning
says how the tile must lie in UB before; it leaves (b1, a1 * columns, rows), row-major: pieces of
the transposed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ascend_lab.isa import Buffer, KernelBuilder, Region, Tile
from ascend_lab.kernels.move_writer import item_bytes

BLOCK = 16
"""Side of the block vtranspose turns."""


@dataclass(frozen=True, slots=True)
class Desk:
    """What a turn works with: the tile before and after, and scratch buffers made once.

    `scratch` belongs to the turn that asked for it; `loop` names a loop variable nobody uses.
    """

    k: KernelBuilder
    source: Tile
    target: Tile
    scratch: tuple[Buffer, ...]
    units: tuple[int, int]
    loop: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A way to transpose tiles.

    `order` lists (count, source rows, source columns) for the counters of a unit as it is loaded,
    outermost first; empty: the tile is loaded row by row. `scratch_items` counts elements of 2
    bytes of scratch per element of the tile; `prepare` makes the buffers from the tile's two queue
    buffers and its size.
    """

    rows: int
    columns: int
    order: tuple[tuple[int, int, int], ...]
    scratch_items: int
    prepare: Callable[[KernelBuilder, Buffer, Buffer, int], tuple[Buffer, ...]]
    emit: Callable[[Desk], None]


def turn_of(dtype: str) -> Turn:
    """Return the way to transpose tiles of a number format.

    2 bytes: blocks of 16 x 16. 4 bytes: units of 128 x 8 in two rounds over halves of elements.
    1 byte: blocks of 32 x 32 through fp16, which holds every int8 and uint8.
    """
    size = item_bytes(dtype)
    if size == 2:
        return Turn(16, 16, ((16, 1, 0), (16, 0, 1)), 0, lambda *_: (), _turn_halves)
    if size == 4:
        order = ((8, 1, 0), (16, 8, 0), (8, 0, 1))
        return Turn(128, 8, order, 2, _prepare_words, _turn_words)
    return Turn(32, 32, (), 2, _prepare_bytes, _turn_bytes)


def _turn_halves(desk: Desk) -> None:
    _turn_blocks(desk, desk.target.region(), desk.source.region())


def _turn_blocks(desk: Desk, target: Region, source: Region) -> None:
    """Turn every 512-byte block of `source`: block i of `target` is its transpose."""
    area = BLOCK * BLOCK
    blocks, side = desk.units[0] * desk.units[1] * _blocks_a_unit(desk), (BLOCK, BLOCK)
    with desk.k.loop(desk.loop, blocks) as i:
        after = target.buffer.region(i * area, side, slot=target.slot)
        desk.k.vector("vtranspose", after, source.buffer.region(i * area, side, slot=source.slot))


def _blocks_a_unit(desk: Desk) -> int:
    return {2: 1, 4: 8, 1: 4}[desk.source.buffer.itemsize]


def _prepare_words(
    k: KernelBuilder, before: Buffer, after: Buffer, size: int
) -> tuple[Buffer, ...]:
    views = k.view(before, "before_halves", "fp16"), k.view(after, "after_halves", "fp16")
    return *views, k.buffer("halves", "UB", "fp16", 2 * size)


def _turn_words(desk: Desk) -> None:
    """(q, p, (j, h)) -> (q, (j, h), p) -> (j, (q, h), p) -> (j, p, (q, h)), row = 8 p + q.

    Row p, q of column j is two halves h. The first round of blocks brings h in front of p, a copy
    of whole 32-byte blocks brings (q, h) together, the second round puts h last again.
    """
    before, after, halves = desk.scratch
    units = desk.units[0] * desk.units[1]
    first = before.region(slot=desk.source.slot)
    _turn_blocks(desk, halves.region(), first)
    sizes = (units, 8, 8, 2, BLOCK)
    blocks = halves.region(0, sizes, (2048, 32, 256, 16, 1))
    desk.k.copy(before.region(0, sizes, slot=desk.source.slot), blocks)
    _turn_blocks(desk, after.region(slot=desk.target.slot), first)


def _prepare_bytes(
    k: KernelBuilder, before: Buffer, after: Buffer, size: int
) -> tuple[Buffer, ...]:
    return k.buffer("wide", "UB", "fp16", size), k.buffer("blocks", "UB", "fp16", size)


def _turn_bytes(desk: Desk) -> None:
    """To fp16, into blocks, turn, back into rows, to bytes."""
    wide, blocks = desk.scratch
    rows, columns = desk.units[0] * 2, desk.units[1] * 2
    lanes = (rows * columns * 2, 128)
    desk.k.vector("vconv", wide.region(0, lanes), desk.source.region(0, lanes))
    sizes = (rows, columns, BLOCK, BLOCK)
    width = columns * BLOCK
    lines = wide.region(0, sizes, (BLOCK * width, BLOCK, width, 1))
    desk.k.copy(blocks.region(0, sizes), lines)
    _turn_blocks(desk, wide.region(), blocks.region())
    sizes, strip = (desk.units[0], width, 2, BLOCK), width * BLOCK
    pieces = wide.region(0, sizes, (2 * strip, BLOCK, strip, 1))
    desk.k.copy(blocks.region(0, sizes), pieces)
    desk.k.vector("vconv", desk.target.region(0, lanes), blocks.region(0, lanes))
