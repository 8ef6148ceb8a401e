"""How the pixels of a convolution are divided over rows of cores, and which may share a program."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.tiles import chunks
from ascend_lab.kernels.windows import Run, runs_of, tiles_per_image

Tiles = tuple[int, int]
"""Pixel tiles first .. last-1, counted over all images."""


@dataclass(frozen=True, slots=True)
class RowShare:
    """Pixel tiles of one row of cores, and where other rows have the same, only moved.

    Core row i starts `images[i] * image_pitch` images and `downs[i] * step` output rows after
    `tiles`. A step of 0 means that none is moved down.
    """

    tiles: Tiles
    image_pitch: int
    images: tuple[int, ...]
    step: int
    downs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Owner:
    """One row of cores: its image, its first output row there, its tiles."""

    image: int
    row: int
    tiles: Tiles


@lru_cache(maxsize=256)
def row_shares(shape: ConvShape, tile: int, grid_rows: int, *, strip: bool) -> tuple[RowShare, ...]:
    """Divide all pixel tiles evenly; rows of cores whose windows differ by a shift are one share.

    Rows that own whole images are alike, and so are those that own the same kind of piece of an
    image. A row whose tiles begin in one image and end in another is a share of its own.
    """
    per_image = tiles_per_image(shape, tile, strip=strip)
    sizes = chunks(shape.n * per_image, 1, grid_rows)
    pitch = sizes[0] // per_image if sizes[0] % per_image == 0 else 0
    groups: dict[Hashable, list[_Owner]] = {}
    for index, size in enumerate(sizes):
        image, first = divmod(index * sizes[0], per_image)
        key: Hashable
        if pitch:
            key, owner = size, _Owner(index, 0, (0, size))
        elif first + size <= per_image:
            runs = runs_of(shape, tile, first, first + size, strip=strip)
            row = runs[0].tiles[0][0] // shape.out_hw[1]
            key, owner = _unmoved(shape, runs, row), _Owner(image, row, (first, first + size))
        else:
            start = index * sizes[0]
            key, owner = ("across", start), _Owner(0, 0, (start, start + size))
        groups.setdefault(key, []).append(owner)
    return tuple([_share(owners, pitch or 1) for owners in groups.values()])


def _unmoved(shape: ConvShape, runs: list[Run], row: int) -> tuple[Run, ...]:
    """Return the runs as if they began in output row 0."""
    pixels, rows = row * shape.out_hw[1], row * shape.strides[0]
    return tuple(
        replace(r, tiles=tuple((pixel - pixels, w.moved(-rows)) for pixel, w in r.tiles))
        for r in runs
    )


def _share(owners: list[_Owner], pitch: int) -> RowShare:
    top = min(owners, key=lambda owner: owner.row)
    step = gcd(*(owner.row - top.row for owner in owners))
    downs = tuple((owner.row - top.row) // step if step else 0 for owner in owners)
    return RowShare(top.tiles, pitch, tuple(o.image for o in owners), step, downs)
