"""A training graph on a chip: the stages of any graph, without those that undo what training wants.

The number formats are already those of the step, so no conversion runs: it would make the fp32
masters fp16 too. Merging equal expressions would merge recomputed activations with the first ones
and keep them in memory after all, so it is left out where something is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ascend_lab.chip import Chip, load_chip
from ascend_lab.graph import Stages
from ascend_lab.graph.canonical import canonical
from ascend_lab.graph.layouts import assign_layouts, cancel_trans_data
from ascend_lab.graph.layouts.stay import stay_in_fractals
from ascend_lab.graph.passes import DEFAULT, run_passes
from ascend_lab.graph.pipeline import Front, finish_stages
from ascend_lab.train.autodiff import TrainingGraph
from ascend_lab.train.deconvolutions import as_convolutions

MERGING = "CommonSubexpressionEliminationPass"


def compile_training(
    step: TrainingGraph, chip: Chip | str, *, passes: Sequence[str] = DEFAULT, fusion: bool = True
) -> Stages:
    """Return a training graph after every stage on a chip, given as a `Chip` or by name.

    Raises as `graph.compile_stages`; a step in fp32 has matrix products that no cube computes.
    """
    chip = load_chip(chip) if isinstance(chip, str) else chip
    again = "recompute" in step.phases.values()
    names = [name for name in passes if not (again and name == MERGING)]
    rewritten, report = run_passes(step.graph, names)
    plain = canonical(as_convolutions(rewritten), chip)
    laid_out = cancel_trans_data(assign_layouts(plain))
    front = Front(report.matches, rewritten, stay_in_fractals(laid_out, chip))
    return finish_stages(front, chip, fusion=fusion)
