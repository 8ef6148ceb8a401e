"""Finds a memory plan within a capacity by CP-SAT, the constraint solver of OR-tools.

A buffer is a rectangle, address by time; a buffer that is partly dead at times consists of several
rectangles that share an offset. OR-tools is optional (`pip install ascend-lab[exact]`).
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from ascend_lab.compiler.buffers import Buffer, Offsets, Rectangle


def cpsat_available() -> bool:
    """Return whether OR-tools is installed (`pip install ascend-lab[exact]`)."""
    return find_spec("ortools") is not None


def pack_cpsat(
    buffers: Sequence[Buffer], capacity_bytes: int, time_limit_s: float, seed: int = 0
) -> Offsets | None:
    """Return offsets within the capacity, or None if it is proven that there are none.

    Raises TimeoutError if the time ends without an answer.
    """
    from ortools.sat.python import cp_model

    filled = [b for b in buffers if b.size_bytes]
    offsets: Offsets = {b.id: b.offset or 0 for b in buffers}
    if not filled:
        return offsets
    rectangles = [(b, r) for b in filled for r in b.rectangles]
    unit = _common_unit_bytes(filled)
    rows = capacity_bytes // unit
    model = cp_model.CpModel()
    starts = _start_variables(model, filled, rows, unit)
    if starts is None:
        return None
    _forbid_overlaps(model, rectangles, starts, unit)
    solver = cp_model.CpSolver()
    # several threads would race, and the plan would differ from run to run
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise TimeoutError(f"no answer within {time_limit_s} s")
    return offsets | {name: solver.value(at) * unit for name, at in starts.items()}


def _forbid_overlaps(
    model: Any,
    rectangles: Sequence[tuple[Buffer, Rectangle]],
    starts: Mapping[Hashable, Any],
    unit: int,
) -> None:
    """Add the constraint that no two rectangles share an address at the same time."""
    times = sorted({t for _, r in rectangles for t in (r.lower, r.upper)})
    # between two times at which anything is born or dies nothing changes: time 3 of 0, 10, 40, 90
    # stands for 90
    index_of_time = {time: index for index, time in enumerate(times)}
    spans = []
    lives = []
    widths = []
    for number, (b, r) in enumerate(rectangles):
        name = f"{b.id} {number}"
        size = r.size_bytes // unit
        birth = index_of_time[r.lower]
        width = index_of_time[r.upper] - birth
        begin = starts[b.id] + r.first // unit
        spans.append(model.new_fixed_size_interval_var(begin, size, f"{name} space"))
        lives.append(model.new_fixed_size_interval_var(birth, width, f"{name} time"))
        widths.append(width)
    model.add_no_overlap_2d(spans, lives)
    # at no address are the lifetimes together longer than the total time: this follows from the
    # line above, but the solver is far slower without it
    model.add_cumulative(spans, widths, len(times) - 1)


def _start_variables(
    model: Any, buffers: Sequence[Buffer], rows: int, unit: int
) -> dict[Hashable, Any] | None:
    """Return where each buffer may start, in units; None if one does not fit into the rows.

    An aligned offset is a number of steps: with alignment 512 and units of 64 bytes, a step is 8
    units. A given offset is the only value of its variable.
    """
    starts: dict[Hashable, Any] = {}
    for b in buffers:
        size = b.size_bytes // unit
        step = max(b.alignment_bytes // unit, 1)
        last_step = (rows - size) // step
        given_step = None if b.offset is None else b.offset // unit // step
        if size > rows or (given_step is not None and given_step > last_step):
            return None
        steps = model.new_int_var(
            given_step or 0, last_step if given_step is None else given_step, f"{b.id}"
        )
        starts[b.id] = steps * step
    return starts


def _common_unit_bytes(buffers: Sequence[Buffer]) -> int:
    """Return the largest unit in which sizes, windows, offsets and alignments are whole numbers.

    If every buffer of a plan is moved down as far as possible, all offsets are multiples of this
    unit: no plan is lost.
    """
    unit = 0  # gcd(0, n) = n
    for b in buffers:
        windows = [bound for r in b.rectangles for bound in (r.first, r.last)]
        unit = math.gcd(unit, b.size_bytes, b.offset or 0, *windows)
    alignments = [b.alignment_bytes for b in buffers if b.alignment_bytes > 1]
    return math.gcd(unit, *alignments)
