"""The default schedule: the rule a good engineer would write down, without a search.

1. Fuse: elementwise stages disappear into their readers, folds and values used twice become tiles
   of their reader, if a tile of whole rows fits in UB; otherwise a stage gets a phase of its own.
2. Make one axis of neighbours that are contiguous in everything a phase touches.
3. Share the outermost axes over all cores, in pieces of whole 32-byte blocks.
4. Take the largest tile that fits twice (double buffers), but leave every core several tiles, so
   that loads, arithmetic and stores overlap.

Where the vector unit cannot walk a fused nest (operands across the lanes, rows that cannot align),
the next simpler way is taken: axes apart, then stages apart, then operands copied into order first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ascend_lab.chip import Chip
from ascend_lab.dsl import schedule as steps
from ascend_lab.dsl.auto_cube import schedule_product
from ascend_lab.dsl.auto_fuse import Phase, fuse_stages
from ascend_lab.dsl.auto_tile import schedule_phase
from ascend_lab.dsl.lower import lower_stage
from ascend_lab.dsl.schedule import Schedule, create_schedule
from ascend_lab.dsl.tensor import Tensor
from ascend_lab.errors import AscendLabError, ProgramError, ScheduleError
from ascend_lab.kernels.gemm_schedule import GemmSchedule

Way = Callable[[Schedule, Phase], Schedule]


def auto_schedule(
    outputs: Tensor | Sequence[Tensor], chip: Chip | str, tiling: GemmSchedule | None = None
) -> Schedule:
    """Return the default schedule of one or several outputs on a chip.

    Products are tiled by the best tiling in closed form, or by the one given.
    """
    schedule, phases = fuse_stages(create_schedule(outputs, chip))
    for phase in phases:
        if schedule.state.stage(phase.root).is_cube:
            schedule = schedule_product(schedule, phase.root, tiling)
        else:
            schedule = _first_that_lowers(schedule, phase)
    return schedule


def _first_that_lowers(s: Schedule, phase: Phase) -> Schedule:
    """Return the schedule of the first way whose programs can be written for the chip."""
    failure: AscendLabError | None = None
    ways: tuple[Way, ...] = (_fused, _axes_apart, _stages_apart)
    for way in ways if phase.tiles or phase.outputs else (_fused, _axes_apart, _in_order):
        try:
            done = way(s, phase)
            known = {x.name for x in s.state.stages} - {phase.root, *phase.tiles, *phase.outputs}
            for stage in done.state.stages:
                if stage.name not in known:
                    lower_stage(done, stage.name)
            return done
        except (ScheduleError, ProgramError) as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _fused(s: Schedule, phase: Phase) -> Schedule:
    return schedule_phase(s, phase)


def _axes_apart(s: Schedule, phase: Phase) -> Schedule:
    return schedule_phase(s, phase, merge=False)


def _stages_apart(s: Schedule, phase: Phase) -> Schedule:
    """Give every stage a phase of its own."""
    for name in (*phase.tiles, *phase.outputs, phase.root):
        s = _first_that_lowers(s, Phase(name))
    return s


def _in_order(s: Schedule, phase: Phase) -> Schedule:
    """Copy every operand into the order in which the stage walks it, then schedule the stage."""
    reads = s.state.stage(phase.root).reads
    for number in range(len(reads)):
        s = steps.materialise(s, phase.root, number)
    return schedule_phase(s, phase)
