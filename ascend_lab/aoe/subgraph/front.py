"""Where slicing stands in the compiler: behind rewriting and number formats, before layouts.

There every operator is one that lowering knows, no layout hides an axis, and equal slices become
equal pieces, which are lowered once.
"""

from __future__ import annotations

from dataclasses import replace

from ascend_lab.chip import Chip
from ascend_lab.graph import Compiled, Graph, pruned
from ascend_lab.graph.canonical import canonical
from ascend_lab.graph.compiled import compile_tasks
from ascend_lab.graph.fusion import fuse
from ascend_lab.graph.layouts import assign_layouts, cancel_trans_data
from ascend_lab.graph.layouts.stay import stay_in_fractals
from ascend_lab.graph.passes import DEFAULT, run_passes
from ascend_lab.graph.pipeline import in_format


def prepared(graph: Graph, chip: Chip, *, dtype: str = "fp16") -> Graph:
    """Return a model's graph as slicing takes it: rewritten, in a number format, canonical."""
    return canonical(in_format(run_passes(graph, DEFAULT)[0], dtype), chip)


def laid_out(graph: Graph, chip: Chip) -> Graph:
    """Return a prepared graph with layouts."""
    return stay_in_fractals(cancel_trans_data(assign_layouts(graph)), chip)


def compiled(graph: Graph, chip: Chip) -> Compiled:
    """Return the kernels of a prepared graph, sliced or not; raises as `compile_stages`."""
    laid = laid_out(graph, chip)
    return compile_tasks(laid, chip, fuse(laid, chip).groups)


def compiled_part(part: Graph, laid: Graph, chip: Chip) -> Compiled:
    """Return the kernels of a part of a network, its inputs and outputs as `laid` has them.

    So no conversions stand at the ends of a part that the network does not make there.
    """
    types = dict(part.types)
    for name in part.inputs:
        if name in laid.types:
            types[name] = replace(types[name], layout=laid.types[name].layout)
    own = laid_out(replace(part, types=types), chip)
    outs = []
    for wanted, name in zip(part.outputs, own.outputs, strict=True):
        node = own.producers.get(name)
        inner = node is not None and node.op == "trans_data" and wanted not in laid.outputs
        outs.append(node.inputs[0] if node is not None and inner else name)
    own = pruned(replace(own, outputs=tuple(outs)))
    return compile_tasks(own, chip, fuse(own, chip).groups)
