"""Ladders of numbers worth trying: shares of cores, widths of tiles, parts of folds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.dsl.stages import Stage
from ascend_lab.kernels.gemm_schedule import up

TILES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Tiles a share is cut into: each number about a half above the one before."""
FINE = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
"""The same where a nest has one axis to cut: each number about a sixth above the one before."""
WIDTHS = 8
"""Widths of a tile, at most; twice as many where a nest has one axis to cut."""
OUTERS = (1, 2, 4, 8, 16)


def result_bytes(stage: Stage) -> int:
    """Return the bytes of the result of a stage, or of what it folds if that is more."""
    read = max((DTYPE_BYTES[r.dtype] for r in stage.reads), default=1)
    own = math.prod(stage.shape) * DTYPE_BYTES[stage.dtype]
    return max(own, math.prod(stage.shape) * math.prod(a.extent for a in stage.reduce) * read)


def share_ladder(extent: int, cores: int, unit: int, least: int) -> list[int]:
    """Return what one core may take of an axis in multiples of `unit`, for most cores first.

    For all `cores`, three quarters, a half, a quarter and so on, but not fewer than `least`; and
    the most that get equal shares.
    """
    blocks = up(extent, unit)
    halves = {cores >> n for n in range(cores.bit_length())} | {3 * cores // 4}
    counts = {n for n in halves if n >= least}
    counts |= {max((d for d in range(1, min(cores, blocks) + 1) if blocks % d == 0), default=0)}
    found = {min(up(blocks, n) * unit, extent) for n in counts if 1 < n <= cores}
    long = {up(s, 8 * unit) * 8 * unit for s in found if unit > 1 and s >= 32 * unit}
    return sorted(s for s in found | long if s < extent)


def width_ladder(
    share: int, unit: int, repeat: int, fine: bool, good: Callable[[int], bool]
) -> list[int]:
    """Return widths of tiles below a share, the widest that fits first."""
    least = min(unit, share)
    if least >= share or not good(least):
        return []
    first = _first(share, unit, good)
    found: dict[int, None] = {}
    ladder = FINE if fine else TILES
    for tiles in (first, *(max(first, n) for n in ladder), *(n * first for n in ladder)):
        width = aligned(up(share, tiles), unit, repeat)
        if width < share and (tiles > first or good(width)):
            found[width] = None
    found = found or {least: None}
    return sorted(found, reverse=True)[: 2 * WIDTHS if fine else WIDTHS]


def _first(share: int, unit: int, good: Callable[[int], bool]) -> int:
    """Return the least number of tiles that fit, by bisection."""
    low, high = 1, up(share, unit)
    while low < high:
        middle = (low + high) // 2
        fits = good(min(share, up(up(share, middle), unit) * unit))
        low, high = (low, middle) if fits else (middle + 1, high)
    return low


def aligned(width: int, unit: int, repeat: int) -> int:
    """Return a width filled up to whole blocks, or to whole repeats where that adds little."""
    step = repeat if width >= 8 * repeat else unit
    return up(width, step) * step


def outer_ladder(share: int, good: Callable[[int], bool]) -> list[int]:
    """Return widths along the next axis outside: rows that share one tile."""
    found = [1]
    for width in (*OUTERS[1:], share):
        if found[-1] < width <= share and good(width):
            found.append(width)
    return found


def fold_ladder(extents: Mapping[str, int], unit: int) -> tuple[int, ...]:
    """Return how many elements folds may take at a time: all, half, ..., in whole blocks."""
    part = largest_fold(extents)
    found = [part]
    while part > min(unit, 2):
        half = up(part, 2)
        part = up(half, unit) * unit if half >= unit else half
        if part == found[-1]:
            break
        found.append(part)
        if part <= unit:
            break
    return tuple(found)


def largest_fold(extents: Mapping[str, int]) -> int:
    """Return the elements of the largest fold, all its axes together; 1 without folds."""
    found: dict[str, int] = {}
    for name, extent in extents.items():
        stage = name.split(".")[0]
        found[stage] = found.get(stage, 1) * extent
    return max(found.values(), default=1)


def fold_widths(extents: Mapping[str, int], elements: int) -> tuple[tuple[str, int], ...]:
    """Return the widths of folds that take `elements` at a time, inner axes filled first."""
    found: list[tuple[str, int]] = []
    left: dict[str, int] = {}
    for name, extent in reversed(list(extents.items())):
        stage = name.split(".")[0]
        now = left.get(stage, elements)
        if now < extent:
            found.append((name, max(now, 1)))
        left[stage] = now // extent
    return tuple(reversed(found))
