"""Who comes after a node on every path to the outputs: the post-dominator tree.

Node d post-dominates n if every path from n to an output passes d. Fusing n with everything up to
its immediate post-dominator leaves nothing in between that somebody outside could want.
"""

from __future__ import annotations

from collections.abc import Mapping

from ascend_lab.graph.ir import Graph, Node


def immediate_post_dominators(graph: Graph) -> Mapping[str, str | None]:
    """Return, by node name, the nearest node on all its paths to outputs; None: there is none.

    Readers come first: ipdom(n) is the deepest common ancestor of n's readers in the tree so far.
    """
    found: dict[str, str | None] = {}
    depth: dict[str | None, int] = {None: 0}
    outputs = set(graph.outputs)
    for node in reversed(graph.nodes):
        readers = [r.name for name in node.outputs for r in graph.readers[name]]
        if outputs.intersection(node.outputs) or not readers:
            meet: str | None = None
        else:
            meet = readers[0]
            for other in readers[1:]:
                meet = _common(meet, other, found, depth)
        found[node.name] = meet
        depth[node.name] = depth[meet] + 1
    return found


def _common(
    one: str | None,
    two: str | None,
    parents: Mapping[str, str | None],
    depth: Mapping[str | None, int],
) -> str | None:
    """Return the deepest common ancestor of two nodes."""
    while one != two:
        if one is None or two is None:
            return None
        if depth[one] >= depth[two]:
            one = parents[one]
        else:
            two = parents[two]
    return one


def between(graph: Graph, first: Node, last: str, most: int) -> list[Node]:
    """Return every node on a path from `first` to its post-dominator `last`, `last` included.

    Of more than `most` nodes only some are found: never fewer than `most`.
    """
    seen: dict[str, Node] = {}
    ahead = [first]
    while ahead and len(seen) < most:
        node = ahead.pop()
        for name in node.outputs:
            for reader in graph.readers[name]:
                if reader.name not in seen:
                    seen[reader.name] = reader
                    if reader.name != last:
                        ahead.append(reader)
    return list(seen.values())
