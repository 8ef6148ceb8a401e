"""Which part of a phase each core takes, and how evenly its tiles are cut."""

from __future__ import annotations

import math

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.dsl.auto_fuse import Phase
from ascend_lab.dsl.schedule import Schedule
from ascend_lab.dsl.stages import State
from ascend_lab.isa import c0_of
from ascend_lab.kernels.gemm_schedule import up

TILES_PER_CORE = 4
SMALL_BYTES = 32768
"""Tiles that take less of UB than this are not made smaller only to have several of them."""

Widths = dict[str, int]
"""Elements of a tile per axis."""


def core_count(s: Schedule) -> int:
    """Return the vector cores of the chip."""
    return s.chip.core_count * s.chip.vector_cores_per_core


def core_shares(s: Schedule, phase: Phase, rows: list[str]) -> Widths:
    """Return the elements of each axis that one core takes: whole blocks along the last one."""
    root = s.state.stage(phase.root)
    shares = {a.name: a.extent for a in root.axes}
    unit = block_elements(s.state, phase)
    last = root.axes[-1].name
    if long_rows(s.state, phase):
        unit = 1
    choice = [a for a in root.axes if a.name in rows and (a.name != last or a.extent >= 2 * unit)]
    if not choice:
        return shares
    one, two = choice[0], choice[1] if len(choice) > 1 else None
    best = (math.inf, one.extent, 0)
    for cores in range(1, core_count(s) + 1):
        first = _share(one.extent, cores, unit if one.name == last else 1)
        second = 1
        if two is not None:
            rest = max(1, core_count(s) // -(-one.extent // first))
            second = _share(two.extent, rest, unit if two.name == last else 1)
        best = min(best, (first * second, first, second))
    shares[one.name] = int(best[1])
    if two is not None:
        shares[two.name] = best[2]
    return shares


def long_rows(state: State, phase: Phase) -> bool:
    """True if one element of the result needs so many that sharing by blocks would idle cores."""
    folds = [state.stage(n) for n in (*phase.tiles, phase.root) if state.stage(n).fold]
    sizes = [
        math.prod(a.extent for a in f.reduce) * DTYPE_BYTES[r.dtype] for f in folds for r in f.reads
    ]
    return max(sizes, default=0) >= SMALL_BYTES // 4


def _share(extent: int, cores: int, unit: int) -> int:
    """Return what one of `cores` takes of an axis: whole units, eight where it is long."""
    share = -(-extent // cores)
    if unit > 1:
        unit = 8 * unit if share >= 32 * unit else unit
        share = -(-share // unit) * unit
    return min(share, extent)


def block_elements(state: State, phase: Phase) -> int:
    """Return the elements of a 32-byte block, for all formats of a phase at once."""
    return math.lcm(*(c0_of(d) for d in phase_formats(state, phase)))


def phase_formats(state: State, phase: Phase) -> set[str]:
    """Return the number formats a phase reads and writes."""
    names = (phase.root, *phase.outputs)
    found = {r.dtype for n in (*names, *phase.tiles) for r in state.stage(n).reads}
    return found | {state.stage(n).dtype for n in names}


def even(width: int, share: int, taken_bytes: int, unit: int, tiles: int) -> int:
    """Return a width not above `width` that cuts a share into `tiles` tiles of about one size.

    `taken_bytes` is what a tile of `width` takes of UB; widths are multiples of `unit`.
    """
    small = max(1, SMALL_BYTES * width // max(taken_bytes, 1))
    wanted = min(width, max(small, up(share, tiles)))
    if wanted >= share:
        return share
    unit = (8 * unit if wanted >= 64 * unit else unit) if width >= unit else 1
    parts = -(-share // wanted)
    each = up(up(share, parts), unit) * unit
    return min(each, max(width // unit * unit, 1), share)


def whole_tiles(extent: int, share: int, width: int) -> int:
    """Return the share filled up to whole tiles, if that costs no core its work."""
    filled = min(up(share, width) * width, extent)
    return filled if up(extent, filled) == up(extent, share) else share
