"""One order of nodes for every file that states the same graph.

A file may list its nodes in any order in which each reads only what is already there. The order is
also that of the kernels: it says what L2 still holds when a tensor is read, and which of two groups
is fused first. So that a time belongs to the graph, not to the file, nodes are put into one order:

    outputs, the one with the shortest way from the inputs first
    before each node what it reads, operand by operand, each with all that it needs

Neither names nor places in the file take part: only edges, the order of a node's operands, and of
the graph's outputs. A branch is finished before the next one begins, so that few tensors live at a
time; of the outputs of a step backwards (gradients), the last layer's come first.
"""

from collections.abc import Iterator
from dataclasses import replace

from ascend_lab.graph.ir import Graph, Node


def canonical_order(graph: Graph) -> Graph:
    """Return the graph with its nodes in the canonical order; nodes nobody needs come last.

    Costs time in proportion to nodes and edges. The same object is returned if nothing moves.
    """
    depth = _depths(graph)
    ends = [graph.producers[name] for name in graph.outputs if name in graph.producers]
    ends.sort(key=lambda node: depth[node.name])
    done: dict[str, Node] = {}
    for end in (*ends, *graph.nodes):
        _visit(graph, end, done)
    nodes = tuple(done.values())
    same = all(one is other for one, other in zip(nodes, graph.nodes, strict=True))
    return graph if same else replace(graph, nodes=nodes)


def _depths(graph: Graph) -> dict[str, int]:
    """Return, by node name, the nodes on the longest way from an input to it, itself included."""
    depth: dict[str, int] = {}
    for node in graph.nodes:
        depth[node.name] = 1 + max((depth[maker.name] for maker in _makers(graph, node)), default=0)
    return depth


def _makers(graph: Graph, node: Node) -> Iterator[Node]:
    """Yield the nodes that write a node's operands, in the order of the operands."""
    for name in node.inputs:
        maker = graph.producers.get(name)
        if maker is not None:
            yield maker


def _visit(graph: Graph, end: Node, done: dict[str, Node]) -> None:
    """Add a node to those that are `done`, behind all it needs: depth first, without recursion."""
    ahead = [end]
    while ahead:
        node = ahead[-1]
        missing = [maker for maker in _makers(graph, node) if maker.name not in done]
        if missing:
            ahead.append(missing[0])
            continue
        done.setdefault(node.name, node)
        ahead.pop()
