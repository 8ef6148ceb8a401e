"""Which part of a tensor a step of a nest needs: ranges of indices, start affine, size fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ascend_lab.dsl.stages import Stage, State
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import Affine


@dataclass(frozen=True, slots=True)
class Range:
    """Indices start .. start + size - 1; the start may depend on loops around."""

    start: Affine
    count: int


Box = dict[str, Range]
"""A range per axis name of a stage."""

ZERO = Affine()


def whole(stage: Stage) -> Box:
    """Return the box of a complete stage."""
    return {a.name: Range(ZERO, a.extent) for a in (*stage.axes, *stage.reduce)}


def index_range(index: Affine, box: Mapping[str, Range]) -> Range:
    """Return the range an index expression covers while its axes run through a box."""
    if len(index.terms) == 1 and not index.const and index.terms[0][1] == 1:
        return box[index.terms[0][0]]
    start, size = Affine(index.const), 1
    for name, coefficient in index.terms:
        part = box[name]
        if coefficient < 0:
            raise ScheduleError("indices that grow with their axes", str(index), "turn the axis")
        start = start + part.start * coefficient
        size += coefficient * (part.count - 1)
    return Range(start, size)


def join(one: Range, two: Range) -> Range:
    """Return the smallest range that holds both; their starts must differ by a constant."""
    if one.start.terms != two.start.terms:
        raise ScheduleError(
            "tiles that move together", f"{one.start} and {two.start}", "compute them apart"
        )
    low = min(one.start.const, two.start.const)
    high = max(one.start.const + one.count, two.start.const + two.count)
    return Range(Affine(low, one.start.terms), high - low)


def needed(
    state: State, stage: Stage, active: Mapping[str, Box], known: dict[str, Box] | None = None
) -> Box:
    """Return the box of `stage` that its readers need, given the boxes of the active stages.

    Readers that are not active yet run later inside the same step, with all their own loops;
    `known` holds what was found for them, since many ways may lead there.
    """
    known = {} if known is None else known
    if stage.output and stage.attach is not None:
        host = state.stage(stage.attach[0])
        pairs = zip(stage.axes, host.axes, strict=True)
        return {mine.name: active[host.name][theirs.name] for mine, theirs in pairs}
    ranges: list[Range] | None = None
    for reader in state.readers(stage.name):
        assert isinstance(reader, Stage)
        box = active.get(reader.name)
        if box is None:
            if reader.name not in known:
                known[reader.name] = whole(reader) | needed(state, reader, active, known)
            box = known[reader.name]
        for read in reader.reads:
            if read.source != stage.name:
                continue
            if read.view:
                raise ScheduleError(
                    f"{reader.name} to read {stage.name} in its own shape {stage.shape}",
                    f"under shape {read.view}",
                    f"keep {stage.name} in GM",
                )
            found = [index_range(i, box) for i in read.index]
            ranges = found if ranges is None else list(map(join, ranges, found))
    if ranges is None:
        raise ScheduleError(f"a reader of {stage.name}", "none", "drop it")
    data = {a.name: r for a, r in zip(stage.axes, ranges, strict=True)}
    return data | {a.name: Range(ZERO, a.extent) for a in stage.reduce}
