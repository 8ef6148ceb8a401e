"""Copies between GM and UB: at most two axes an instruction, ragged rows by what the chip has."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_lab.dsl.unit import Unit
from ascend_lab.dsl.views import View, coalesce, with_dims
from ascend_lab.isa import c0_of


def main_part(unit: Unit, dst: View, src: View, sizes: Sequence[int]) -> None:
    """Emit the copy of a box; on chips without padding copies only its whole 32-byte blocks."""
    views, counts, contiguous = _walked(dst, src, sizes)
    block = c0_of(dst.dtype)
    rest = counts[-1] % block if contiguous else 1
    padded = bool(rest) and not unit.builder.chip.combined
    if rest and not padded:
        if not contiguous or counts[-1] < block:
            return
        counts[-1] -= rest
    for inner in unit.over(counts[:-2], views):
        to, what = (v.memory.region(v.offset, counts[-2:], v.strides) for v in inner)
        unit.builder.copy(to, what, pad=padded)


def leftover(unit: Unit, dst: View, src: View, sizes: Sequence[int]) -> None:
    """Emit, one by one on the scalar unit, the elements `main_part` left out.

    Each waits for L2 once (its latency), as in the copies of `layout` and `kernels`.
    """
    chip = unit.builder.chip
    views, counts, contiguous = _walked(dst, src, sizes)
    rest = counts[-1] % c0_of(dst.dtype) if contiguous else counts[-1]
    if not rest or not chip.combined:
        return
    wait = chip.l2.latency_cycles // max(chip.scalar_cycles, 1)
    moved = [v.moved(len(counts) - 1, counts[-1] - rest) for v in views]
    for inner in unit.over([*counts[:-1], rest], moved):
        to, what = (v.memory.region(v.offset, 1) for v in inner)
        unit.builder.scalar(to, what, steps=max(wait, 1))


def _walked(dst: View, src: View, sizes: Sequence[int]) -> tuple[list[View], list[int], bool]:
    """Return operands and sizes of the merged axes, and if the one in UB is contiguous."""
    dims = coalesce(sizes, (dst, src)) or [(1, (1, 1))]
    views = with_dims((dst, src), dims)
    on_chip = views[0] if dst.memory.region(0, 1).space == "UB" else views[1]
    return views, [size for size, _ in dims], on_chip.strides[-1] == 1
