"""Fold one axis on many cores: each core folds a part, then the partial results are folded.

    two_pass   partial folds, then one fold of all of them             2 phases
    tree       partial folds, then rounds that halve their number      1 + log2(parts) phases

Between two phases all cores wait for each other. `kept` is the fold without such a step: the cores
share the axes that stay. Sums that memory itself adds up are in `memory_adds`. Source of rfactor:
Suriana, Adams, Kamil, "Parallel associative reductions in Halide", CGO 2017.
"""

from __future__ import annotations

from dataclasses import replace

from ascend_lab.chip import Chip
from ascend_lab.dsl import schedule as steps
from ascend_lab.dsl.auto_axes import merge_axes, row_axes
from ascend_lab.dsl.auto_fuse import Phase, fuse_stages
from ascend_lab.dsl.auto_tile import arrange, largest
from ascend_lab.dsl.schedule import Schedule
from ascend_lab.dsl.stages import Stage
from ascend_lab.dsl.tensor import Tensor
from ascend_lab.errors import ScheduleError


def vector_cores(chip: Chip) -> int:
    """Return the cores of a chip that run vector programs."""
    return chip.cores_of("core" if chip.combined else "vector")


def kept(output: Tensor, chip: Chip, cores: int | None = None) -> Schedule:
    """Return the schedule in which `cores` share the axes that stay, in blocks of 32 bytes.

    before: `y[i] = fold over k of x[i, k]`   after: core c: `y[i in part c] = fold over k`

    Raises `ScheduleError` for another number of folds than one, or of cores than the chip has.
    """
    s, _, phase = _fold_of(output, chip)
    return _scheduled(s, phase, core_limit(chip, cores))


def two_pass(
    output: Tensor, chip: Chip, cores: int | None = None, *, last_cores: int | None = None
) -> Schedule:
    """Return the schedule that folds a part of the axis per core, then the partial results.

    before: `y[i] = fold over k`
    after: core c: `y_rf[c, i] = fold over k in part c`, then `y[i] = fold over c of y_rf[c, i]`

    `last_cores` share the axes that stay in the second pass; default: all of the chip. Raises
    `ScheduleError` as `kept`, and if `cores` does not divide the axis.
    """
    s, _, phase = _partials(output, chip, core_limit(chip, cores))
    return _scheduled(s, phase, core_limit(chip, last_cores))


def tree(output: Tensor, chip: Chip, cores: int | None = None) -> Schedule:
    """Return the schedule that folds a part per core, then pairs of partial results, and so on.

    before: `y[i] = fold over c of y_rf[c, i]`
    after: `y_rf_2[p, i] = fold over c in 2 of y_rf[2 p + c, i]`, half as many each round

    Rounds go on while the number is even and more than 2. Raises what `two_pass` raises.
    """
    parts = core_limit(chip, cores)
    s, fold, phase = _partials(output, chip, parts)
    while parts > 2 and parts % 2 == 0:
        s, partial = _factored(s, fold, parts // 2)
        parts //= 2
        s = _scheduled(s, Phase(partial), parts)
    return _scheduled(s, phase, vector_cores(chip))


# -- pieces of schedules ------------------------------------------------------------------------


def core_limit(chip: Chip, cores: int | None) -> int:
    """Return `cores`, or all vector cores; raise `ScheduleError` if the chip has fewer."""
    most = vector_cores(chip)
    if cores is None:
        return most
    if not 1 <= cores <= most:
        raise ScheduleError(f"1 to {most} vector cores on {chip.name}", str(cores), "choose one")
    return cores


def _fold_of(output: Tensor, chip: Chip) -> tuple[Schedule, str, Phase]:
    """Return the fused schedule of an output, the name of its only fold, and its phase."""
    s, phases = fuse_stages(steps.create_schedule(output, chip))
    folds = [x.name for x in s.state.stages if isinstance(x, Stage) and x.fold]
    if len(folds) != 1 or len(phases) != 1:
        raise ScheduleError(
            f"{output.label}: one fold and elementwise operations, in one phase",
            f"{len(folds)} folds, {len(phases)} phases",
            "schedule it by hand with rfactor",
        )
    return s, folds[0], phases[0]


def _scheduled(s: Schedule, phase: Phase, cores: int) -> Schedule:
    """Return the schedule with the default nest of a phase, made for fewer cores."""
    narrow = replace(s.chip, core_count=cores, vector_cores_per_core=1)
    trial = merge_axes(replace(s, chip=narrow), phase)
    rows = row_axes(trial.state, phase)
    best = largest(trial, phase, rows)
    if best is None:
        raise ScheduleError(
            f"{phase.root}: a tile that fits in UB",
            f"{s.chip.buffers['UB']} bytes on {s.chip.name}",
            "reshape the tensor so that an axis can be cut",
        )
    return replace(arrange(trial, phase, rows, *best), chip=s.chip)


def _partials(output: Tensor, chip: Chip, parts: int) -> tuple[Schedule, str, Phase]:
    """Return a schedule whose first phase folds one of `parts` equal parts of the axis per core."""
    s, fold, phase = _fold_of(output, chip)
    s = merge_axes(s, phase)
    s, partial = _factored(s, fold, parts)
    return _scheduled(s, Phase(partial), parts), fold, phase


def _factored(s: Schedule, fold: str, parts: int) -> tuple[Schedule, str]:
    """Return the schedule with a fold cut into `parts` partial folds, and the name of these."""
    stage = s.state.stage(fold)
    axis = max(stage.reduce, key=lambda a: a.extent)
    if axis.extent % parts:
        raise ScheduleError(
            f"{fold}: a number of parts that divides {axis.extent}",
            str(parts),
            "use fewer cores, or pad the axis",
        )
    before = {x.name for x in s.state.stages}
    s = steps.split(s, fold, axis.name, axis.extent // parts)
    s = steps.rfactor(s, fold, f"{axis.name}_o")
    return s, next(x.name for x in s.state.stages if x.name not in before)
