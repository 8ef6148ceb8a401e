"""The default schedule: the rule a good engineer would write down, without a search.

1. Fuse: elementwise stages disappear into their readers, folds and values used twice become tiles
   of their reader, if a tile of whole rows fits in UB; otherwise a stage gets a phase of its own.
2. Make one axis of neighbours that are contiguous in everything a phase touches.
3. Share the outermost axes over all cores, in pieces of whole 32-byte blocks.
4. Take the largest tile that fits twice (double buffers), but leave every core several tiles, so
   that loads, arithmetic and stores overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

from ascend_lab.chip import Chip
from ascend_lab.dsl.auto_cube import schedule_product
from ascend_lab.dsl.auto_fuse import fuse_stages
from ascend_lab.dsl.auto_tile import schedule_phase
from ascend_lab.dsl.schedule import Schedule, create_schedule
from ascend_lab.dsl.tensor import Tensor


def auto_schedule(outputs: Tensor | Sequence[Tensor], chip: Chip) -> Schedule:
    """Return the default schedule of one or several outputs on a chip."""
    schedule, phases = fuse_stages(create_schedule(outputs, chip))
    for phase in phases:
        if schedule.state.stage(phase.root).is_cube:
            schedule = schedule_product(schedule, phase.root)
        else:
            schedule = schedule_phase(schedule, phase)
    return schedule
