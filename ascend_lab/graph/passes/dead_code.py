"""Dead code elimination: what no output needs goes."""

from __future__ import annotations

from ascend_lab.graph.edit import pruned
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.passes.rewrite import Pass


def remove_dead_code(graph: Graph) -> tuple[Graph, int]:
    """Drop nodes, constants and types that no output of the graph depends on."""
    kept = pruned(graph)
    gone = len(graph.nodes) - len(kept.nodes) + len(graph.constants) - len(kept.constants)
    return (kept, gone) if gone else (graph, 0)


DEAD_CODE = Pass(
    "DeadCodeEliminationPass", "prepare", remove_dead_code, "drops what no output depends on"
)
