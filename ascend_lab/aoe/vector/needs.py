"""What a nest takes of a core before its program is written: bytes of UB, and queues."""

from __future__ import annotations

from dataclasses import replace

from ascend_lab.chip import Chip
from ascend_lab.dsl.complete import complete
from ascend_lab.dsl.footprint import ub_bytes
from ascend_lab.dsl.stages import Stage, State


def nest_needs(laid: State, root: str, chip: Chip) -> tuple[int, int, int]:
    """Return bytes of UB with one slot a tile, bytes of every further slot, and queues."""
    done = complete(laid, root)
    one, two = (ub_bytes(_deep(done, depth), root, chip) for depth in (1, 2))
    return one, two - one, queues(done)


def along_lanes(stage: Stage) -> bool:
    """True if a fold walks its source along the axis that lies contiguously."""
    last = stage.reduce[-1].name
    return any(dict(r.index[-1].terms).get(last) == 1 for r in stage.reads if r.index)


def _deep(done: State, depth: int) -> State:
    """Return a completed nest with so many slots a tile."""
    stages = (replace(s, depth=depth) if isinstance(s, Stage) else s for s in done.stages)
    return replace(done, stages=tuple(stages))


def queues(done: State) -> int:
    """Return the most queues of a completed nest between two pipes: one a place that is filled."""
    found: dict[tuple[bool, bool], set[object]] = {}
    for stage in done.stages:
        if isinstance(stage, Stage) and stage.scope == "UB":
            source = done.find(stage.sources[0]) if stage.sources else None
            loaded = stage.is_copy and getattr(source, "scope", "GM") == "GM"
            stored = any(getattr(r, "scope", "GM") == "GM" for r in done.readers(stage.name))
            if loaded or stored:
                found.setdefault((loaded, stored), set()).add(stage.attach)
    return max(map(len, found.values()), default=0)
