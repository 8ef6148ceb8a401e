"""Copies between GM and UB: at most two axes an instruction, ragged rows by what the chip has."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_lab.dsl.unit import Unit
from ascend_lab.dsl.views import View, coalesce, with_dims
from ascend_lab.isa import Region, c0_of


def main_part(unit: Unit, dst: View, src: View, sizes: Sequence[int]) -> None:
    """Emit the copy of a box; on chips without padding copies only its whole 32-byte blocks."""
    dims = coalesce(sizes, (dst, src)) or [(1, (1, 1))]
    views = with_dims((dst, src), dims)
    counts = [size for size, _ in dims]
    on_chip = 0 if _in_ub(dst) else 1
    block = c0_of(dst.dtype)
    contiguous = views[on_chip].strides[-1] == 1
    rest = counts[-1] % block if contiguous else 1
    padded = bool(rest)
    if rest and unit.builder.chip.combined:
        if not contiguous or counts[-1] < block:
            return
        counts[-1] -= rest
        padded = False
    _outer(unit, views, counts, padded)


def _in_ub(view: View) -> bool:
    return view.memory.region(0, 1).space == "UB"


def _outer(unit: Unit, views: list[View], counts: list[int], padded: bool) -> None:
    """Loop over all but the two innermost axes; one instruction for these."""
    if len(counts) > 2:
        with unit.repeat(counts[0]) as index:
            inner = []
            for v in views:
                moved = v.moved(0, index)
                inner.append(View(v.memory, v.dtype, moved.offset, v.strides[1:]))
            _outer(unit, inner, counts[1:], padded)
        return
    regions = [v.memory.region(v.offset, tuple(counts), v.strides) for v in views]
    unit.builder.copy(regions[0], regions[1], pad=padded)


def leftover(unit: Unit, dst: View, src: View, sizes: Sequence[int]) -> None:
    """Emit, one by one on the scalar unit, the elements `main_part` left out.

    Each waits for L2 once (its latency), as in the copies of `layout` and `kernels`.
    """
    if not unit.builder.chip.combined:
        return
    dims = coalesce(sizes, (dst, src)) or [(1, (1, 1))]
    views = with_dims((dst, src), dims)
    counts = [size for size, _ in dims]
    block = c0_of(dst.dtype)
    on_chip = 0 if _in_ub(dst) else 1
    contiguous = views[on_chip].strides[-1] == 1
    rest = counts[-1] % block if contiguous else counts[-1]
    if not rest:
        return
    start = counts[-1] - rest
    counts[-1] = rest
    moved = [v.moved(len(counts) - 1, start) for v in views]
    _elements(unit, moved, counts)


def _elements(unit: Unit, views: list[View], counts: list[int]) -> None:
    if not counts:
        regions: list[Region] = [v.memory.region(v.offset, 1) for v in views]
        chip = unit.builder.chip
        wait = chip.l2.latency_cycles // max(chip.scalar_cycles, 1)
        unit.builder.scalar(regions[0], regions[1], steps=max(wait, 1))
        return
    with unit.repeat(counts[0]) as index:
        inner = []
        for v in views:
            moved = v.moved(0, index)
            inner.append(View(v.memory, v.dtype, moved.offset, v.strides[1:]))
        _elements(unit, inner, counts[1:])
