"""The same question put to CP-SAT, the constraint solver of OR-tools, where that is installed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec

from ascend_lab.graph.memory.buffers import Buffer, Offsets


def cpsat_available() -> bool:
    """Return whether OR-tools is installed (`pip install ascend-lab[exact]`)."""
    return find_spec("ortools") is not None


def pack_cpsat(
    buffers: Sequence[Buffer], capacity_bytes: int, time_limit_s: float, seed: int = 0
) -> Offsets | None:
    """Return offsets within the capacity, or None when there are none, with one thread.

    Buffers are rectangles, address by time, that must not overlap. A redundant constraint says
    that at no address they need more time than there is: without it the solver is far slower.
    Raises TimeoutError without an answer.
    """
    from ortools.sat.python import cp_model

    filled = [b for b in buffers if b.size_bytes]
    offsets: Offsets = {b.id: 0 for b in buffers}
    if not filled:
        return offsets
    unit = math.gcd(*(b.size_bytes for b in filled))
    rows = capacity_bytes // unit
    section = {t: k for k, t in enumerate(sorted({t for b in filled for t in (b.lower, b.upper)}))}
    model = cp_model.CpModel()
    starts, spans, lives, widths = [], [], [], []
    for b in filled:
        size, width = b.size_bytes // unit, section[b.upper] - section[b.lower]
        if size > rows:
            return None
        starts.append(model.new_int_var(0, rows - size, f"{b.id}"))
        spans.append(model.new_fixed_size_interval_var(starts[-1], size, f"{b.id} space"))
        life = model.new_fixed_size_interval_var(section[b.lower], width, f"{b.id} time")
        lives.append(life)
        widths.append(width)
    model.add_no_overlap_2d(spans, lives)
    model.add_cumulative(spans, widths, len(section) - 1)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise TimeoutError(f"no answer within {time_limit_s} s")
    found = {b.id: solver.value(at) * unit for b, at in zip(filled, starts, strict=True)}
    return offsets | found
