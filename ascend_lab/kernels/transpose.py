"""Transpose and permute: strided copies, or blocks turned in UB, shared out over all cores.

Two axes matter: the one whose elements are neighbours in x and the one whose elements are
neighbours in y. If they are the same, runs stay runs and a strided copy is good. If not, a strided
copy moves single elements, 32 bytes on the wires for each. The block method reads runs, turns a
tile on the vector unit and writes runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.errors import InputError, ShapeError
from ascend_lab.isa import Launch, Part, binding_of
from ascend_lab.kernels.plane_writer import Plane, PlaneWriter, Share
from ascend_lab.kernels.strided import copy_launch, row_major
from ascend_lab.kernels.turns import turn_of
from ascend_lab.layout.boxes import Dim, merged
from ascend_lab.sim import simulate

METHODS = ("auto", "strided", "blocks")


@dataclass(frozen=True, slots=True)
class Permutation:
    """What a permute really does, with axes that move together joined.

    `dims` are counters with both strides, y's innermost last; `kept_run` is the number of elements
    that stay neighbours.
    """

    dims: tuple[Dim, ...]
    kept_run: int

    @property
    def column(self) -> Dim:
        """The counter along which x is contiguous."""
        return min(self.dims, key=lambda d: d.source)

    @property
    def row(self) -> Dim:
        """The counter along which y is contiguous."""
        return self.dims[-1]


def permutation(shape: Sequence[int], perm: Sequence[int]) -> Permutation:
    """Return the joined counters of y = x.transpose(perm). Raises `ShapeError`."""
    if sorted(perm) != list(range(len(shape))) or min(shape, default=1) < 1:
        raise ShapeError(
            f"a permutation of axes 0..{len(shape) - 1} and sizes of 1 or more",
            f"{tuple(perm)} of {tuple(shape)}",
            "name each axis once",
        )
    source, target = row_major(shape), row_major([shape[p] for p in perm])
    steps = zip((shape[p] for p in perm), (source[p] for p in perm), target, strict=True)
    dims = merged([Dim(*step) for step in steps])
    last = dims[-1]
    return Permutation(dims, last.count if last.source == last.target == 1 else 1)


def transpose_launch(
    chip: Chip, shape: Sequence[int], perm: Sequence[int], dtype: str, method: str = "auto"
) -> Launch:
    """y = x.transpose(perm) on all vector cores; tensors x and y, row-major.

    `method`: "strided" copies runs or single elements; "blocks" turns tiles in UB, and needs both
    moved axes to be at least one unit long (16 x 16 for 2 bytes, 128 rows x 8 columns for 4, 32 x
    32 for 1); "auto" takes the one that `simulate` finds faster. Raises `ShapeError`, `InputError`.
    """
    if method not in METHODS:
        raise InputError(f"a method of {', '.join(METHODS)}", repr(method), "choose one")
    plan = permutation(shape, perm)
    turn = turn_of(dtype)
    fits = plan.kept_run == 1 and plan.row.count >= turn.rows and plan.column.count >= turn.columns
    if method == "blocks" and not fits:
        raise ShapeError(
            f"blocks: two axes that change places, {turn.rows} rows and {turn.columns} columns",
            f"{plan.row.count} and {plan.column.count}, runs of {plan.kept_run}",
            'use method="auto"',
        )
    if method == "auto" and fits:
        both = [transpose_launch(chip, shape, perm, dtype, how) for how in ("blocks", "strided")]
        return min(both, key=lambda launch: simulate(launch, chip).cycles)
    if method == "strided" or not fits:
        dims = plan.dims
        sizes, total = [d.count for d in dims], math.prod(shape)
        steps = [d.source for d in dims], [d.target for d in dims]
        lengths = {"source_elements": total, "target_elements": total}
        return copy_launch(chip, dtype, sizes, *steps, **lengths, name="transpose")
    return block_launch(chip, dtype, plan, math.prod(shape))


def block_launch(
    chip: Chip, dtype: str, plan: Permutation, elements: int, *, relu: bool = False
) -> Launch:
    """Cut over the cores an outer counter, y's rows or y's columns: whichever keeps them busiest.

    Rows may end ragged on any core; the last core's columns take the ragged end as well, so
    that a block written twice is written by one core. With `relu` the tiles are rectified too.
    """
    turn, cores = turn_of(dtype), chip.core_count * chip.vector_cores_per_core
    outer = [d for d in plan.dims if d not in (plan.row, plan.column)]
    units = [d.count for d in outer]
    units += [plan.column.count // turn.columns, plan.row.count // turn.rows]
    along = max(range(len(units)), key=lambda i: (_busy(units[i], cores), -i))
    per = -(-units[along] // cores)
    full = units[along] // per
    step = [1] * len(outer) + [turn.columns, turn.rows]
    counts = [d.count for d in (*outer, plan.column, plan.row)]
    plane = Plane(dtype, elements, tuple(outer), plan.column, plan.row, relu)
    left = counts[along] - full * per * step[along]
    if left and left < step[along]:
        full, left = full - 1, left + per * step[along]
    groups = [(0, full, per * step[along]), (full, 1, left)]
    parts = []
    for first, count, size in groups:
        if count and size:
            share = Share(along, per * step[along], first, size)
            program = PlaneWriter(chip, plane, share, count).program()
            parts.append(Part(program, tuple(binding_of({"core": i}) for i in range(count))))
    return Launch("transpose", tuple(parts))


def _busy(units: int, cores: int) -> float:
    """Share of the cores' time that is work when `units` equal pieces are dealt out."""
    return units / (cores * -(-units // cores))
