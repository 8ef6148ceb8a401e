"""The two decisions that need the clock: which groups are one kernel, which rows stay in fractals.

Both are made before the network is lowered, so candidates are lowered and timed here, alone, on
cold L2; kernels are remembered, so that what is taken is not written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ascend_lab.chip import Chip
from ascend_lab.errors import AscendLabError
from ascend_lab.graph.draft import Draft
from ascend_lab.graph.ir import Graph, Node
from ascend_lab.graph.lower import piece_of
from ascend_lab.graph.lower.vector import ROW_WISE
from ascend_lab.graph.tasks import is_view, lowered_once, timed_once

FRACTAL = "FRACTAL_NZ"


def pays(graph: Graph, group: Sequence[Node], chip: Chip) -> bool:
    """Tell whether a group becomes one kernel no slower than its nodes apart, launches counted."""
    if len(piece_of(graph, group).graph.outputs) != 1:
        return False
    together = _group_cycles(graph, group, chip)
    if together is None:
        return False
    apart = [_group_cycles(graph, (node,), chip) for node in group]
    return all(c is not None for c in apart) and together <= sum(c for c in apart if c)


def _group_cycles(graph: Graph, group: Sequence[Node], chip: Chip) -> int | None:
    """Return the cycles of a group's kernel, launch included; None if there is none."""
    if len(group) == 1 and is_view(graph, group[0]):
        return 0
    try:
        return timed_once(lowered_once(piece_of(graph, group), chip).kernel, chip)
    except AscendLabError:
        return None


def stay_in_fractals(graph: Graph, chip: Chip) -> Graph:
    """Return the graph with row-wise operators on fractals where the programs say so.

    A layer norm between two matrix products is quickest row-major, but going there and back takes
    two conversions, each a launch: both ways are timed.
    """
    for name in [node.name for node in graph.nodes if node.op in ROW_WISE]:
        found = _moved(graph, graph.node(name))
        if found is not None:
            there, new = found
            if _cycles(there, new, chip) < _cycles(graph, name, chip):
                graph = there
    return graph


def _moved(graph: Graph, node: Node) -> tuple[Graph, str] | None:
    """Return the graph with one operator on fractals, and its name there.

    None if its operand does not come from fractals, or a row has padding.
    """
    source = graph.producers.get(node.inputs[0])
    if source is None or source.op != "trans_data" or graph.types[node.output].shape[-1] % 16:
        return None
    fractal, last = source.inputs[0], len(graph.types[node.output].shape) - 1
    constants = all(n in graph.constants for n in node.inputs[1:])
    if graph.types[fractal].layout != FRACTAL or not constants:
        return None
    if node.attr("axis", -1) % (last + 1) != last:
        return None
    edit = Draft(graph)
    y = edit.new_name(f"{node.output}.rows")
    edit.types[y] = replace(graph.types[node.output], layout=FRACTAL)
    moved = replace(node, name=y, inputs=(fractal, *node.inputs[1:]), outputs=(y,))
    edit.nodes[y] = moved
    edit.changes += 1
    for reader in graph.readers[node.output]:
        if reader.op == "trans_data" and reader.attr("layout") == FRACTAL:
            edit.replace(reader.output, y)
    edit.replace(node.output, edit.insert("trans_data", (y,), {"layout": "ND"}, f"{y}.ND"))
    return edit.finish(), y


def _cycles(graph: Graph, name: str, chip: Chip) -> float:
    """Return the cycles of an operator and of the conversions it alone needs, with launches."""
    node = graph.node(name)
    before = graph.producers.get(node.inputs[0])
    near = [n for n in graph.readers[node.output] if n.op == "trans_data"]
    if before is not None and before.op == "trans_data" and len(graph.readers[before.output]) == 1:
        near.append(before)
    try:
        kernels = [lowered_once(piece_of(graph, (n,)), chip).kernel for n in (node, *near)]
    except AscendLabError:
        return float("inf")
    return sum(timed_once(kernel, chip) for kernel in kernels)
