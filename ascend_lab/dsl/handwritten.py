"""Phases with hand-written kernels: transpose, concat, pad, gather, scatter, conv2d."""

from __future__ import annotations

from ascend_lab.chip import Chip
from ascend_lab.dsl.stages import Fixed, State
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import Launch


def handwritten(state: State, stage: Fixed, chip: Chip) -> tuple[Launch, ...]:
    """Return the launches of a stage that has a kernel of its own."""
    raise ScheduleError(f"a kernel for {stage.kind}", "none", "use another operation")
