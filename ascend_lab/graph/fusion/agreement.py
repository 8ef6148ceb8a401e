"""One split for several operators in a row: the axis along which each may be shared out over cores.

Every core is to keep its pieces from the first operator to the last. So the walk starts at an axis
of the last result and goes backwards: the operator's slice rule says which axis of each operand
follows, that axis is the one its producer must be cut along, and so on. It fails where an operator
does not split along the axis, or where a piece would need all of a tensor made on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ascend_lab.errors import GraphError
from ascend_lab.graph.infer import operator_of
from ascend_lab.graph.ir import Graph, Node
from ascend_lab.ops.slicing import AxisRule, Window


@dataclass(frozen=True, slots=True)
class Split:
    """A split all operators agree on: the cut axis of every tensor; others are read whole."""

    axes: Mapping[str, int]

    def __str__(self) -> str:
        """Return it on one line."""
        return ", ".join(f"{name} along axis {axis}" for name, axis in self.axes.items())


@dataclass(frozen=True, slots=True)
class Agreement:
    """What comes of every axis of the last output: a split, or the reason why there is none."""

    splits: Mapping[int, Split]
    refusals: Mapping[int, str]

    def __str__(self) -> str:
        """Return a line per axis."""
        lines = {a: f"cut {s}" for a, s in self.splits.items()}
        lines |= {a: f"no: {why}" for a, why in self.refusals.items()}
        return "\n".join(f"axis {a}: {lines[a]}" for a in sorted(lines))


def common_split(graph: Graph, nodes: Sequence[Node]) -> Agreement:
    """Return along which axes of the last node's output all `nodes`, in order, may be cut.

    Pieces that overlap (halos) or come in grains are refused: a core would compute some of its
    neighbour's. Raises `GraphError` for no nodes.
    """
    if not nodes:
        raise GraphError("one node or more", "none", "pass the nodes in order")
    splits, refusals = {}, {}
    for axis in range(len(graph.types[nodes[-1].output].shape)):
        found = _walk(graph, nodes, axis)
        if isinstance(found, str):
            refusals[axis] = found
        else:
            splits[axis] = Split(found)
    return Agreement(splits, refusals)


def _walk(graph: Graph, nodes: Sequence[Node], axis: int) -> dict[str, int] | str:
    """Return the cut axis of every tensor, or why `axis` of the last output cannot be cut."""
    made = {name for node in nodes for name in node.outputs}
    wanted = {nodes[-1].output: axis}
    for node in reversed(nodes):
        if not any(name in wanted for name in node.outputs):
            continue
        rule = _rule(graph, node, wanted)
        if isinstance(rule, str):
            return rule
        for index, name in enumerate(node.inputs):
            axes = {s.axis for s in rule.sources if s.input == index}
            if not axes and name in made:
                return f"{node.name} ({node.op}): every piece needs all of {name}"
            for own in axes:
                if wanted.setdefault(name, own) != own:
                    return f"{name} is wanted along axis {wanted[name]} and along axis {own}"
    return wanted


def _rule(graph: Graph, node: Node, wanted: Mapping[str, int]) -> AxisRule | str:
    """Return the rule of the axis that readers want a node cut along, or why it cannot be."""
    known = operator_of(node.op)
    rules = known.slice_rules([t.shape for t in graph.in_types(node)], node.attrs)
    found = []
    for number, name in enumerate(node.outputs):
        if name in wanted:
            found += [r for r in rules.axes if r.joins[number] == wanted[name]]
    rule = found[0]
    place = f"{node.name} ({node.op}): axis {rule.axis}"
    if any(r is not rule for r in found):
        return f"{place} for one reader, axis {found[-1].axis} for another"
    if graph.types[node.output].shape[rule.axis] == 1:
        return f"{place} has one element"
    if not rule.splits:
        return f"{place} does not split: {rule.reason or rule.kind}"
    plain = all(s.window == Window() and s.grain == 1 for s in rule.sources)
    if rule.kind != "free" or rule.grain != 1 or not plain:
        return f"{place} splits, but pieces overlap or come in grains"
    return rule
