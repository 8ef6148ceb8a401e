"""A training graph on a chip: the stages of any graph, without those that undo what training wants.

The number formats are already those of the step, so no conversion runs: it would make the fp32
masters fp16 too. Merging equal expressions would merge recomputed activations with the first ones
and keep them in memory after all, so it is left out where something is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ascend_lab.chip import Chip, load_chip
from ascend_lab.graph import Graph, Stages
from ascend_lab.graph.canonical import canonical
from ascend_lab.graph.layouts import cancel_trans_data
from ascend_lab.graph.layouts.stay import stay_in_fractals
from ascend_lab.graph.passes import DEFAULT, run_passes
from ascend_lab.graph.pipeline import Front, finish_stages
from ascend_lab.train.deconvolutions import as_convolutions
from ascend_lab.train.images import batch_norms_apart, casts_apart, images_in_blocks
from ascend_lab.train.step import TrainingGraph

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
    laid_out = training_layouts(rewritten, chip)
    front = Front(report.matches, rewritten, stay_in_fractals(laid_out, chip))
    return finish_stages(front, chip, fusion=fusion)


def training_layouts(graph: Graph, chip: Chip) -> Graph:
    """Return a graph of a step after passes, in operators that have kernels, with layouts."""
    for rewrite in (batch_norms_apart, as_convolutions, casts_apart):
        graph = rewrite(graph)
    plain = canonical(graph, chip)
    return cancel_trans_data(images_in_blocks(plain))
