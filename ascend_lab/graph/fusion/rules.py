"""Fusion rules: named functions that propose nodes to compute in one kernel.

A rule looks at one node and returns the nodes, itself included, that should run together, or None.
Names follow the published passes of the vendor's compiler, so that its switch files work here.
Users add rules with the decorator `fusion_rule`; a later rule comes before earlier ones.

Source: CANN documentation, UB fusion patterns; GE, buffer_fusion_constant.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ascend_lab.errors import InputError
from ascend_lab.graph.ir import Graph, Node
from ascend_lab.graph.layouts.assign import ELEMENTWISE
from ascend_lab.graph.lower import PRODUCTS
from ascend_lab.graph.lower.rearrange import MOVES

Match = Callable[[Graph, Node], Sequence[Node] | None]
AUTOMATIC = "AutomaticUbFusion"
"""The name of fusion by dominators, which comes after all rules."""
LONGEST = 29
"""Elementwise operators in one group at most (AutomaticUbFusion of GE)."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A fusion rule: the name a switch file knows it by, and what it proposes."""

    name: str
    match: Match


RULES: list[Rule] = []
"""The rules in order of priority; `fuse` tries the first first."""


def fusion_rule(name: str) -> Callable[[Match], Match]:
    """Register a function `match(graph, node) -> nodes or None` as the rule of highest priority.

    The graph is the one after passes, with layouts (`Stages.laid_out`): a sigmoid and a product
    may have become a silu there. Rules are asked in order of priority, node by node; nodes that an
    earlier rule took are not proposed again. A proposal may take effect in parts.
    Raises `InputError` if there is a rule of that name.
    """
    if name == AUTOMATIC or any(rule.name == name for rule in RULES):
        raise InputError("a new rule name", name, "choose another, or switch the old one off")

    def register(match: Match) -> Match:
        RULES.insert(0, Rule(name, match))
        return match

    return register


@contextmanager
def rules_restored() -> Iterator[None]:
    """Forget the rules registered inside when done: for notebooks and tests."""
    before = list(RULES)
    try:
        yield
    finally:
        RULES[:] = before


def only_reader(graph: Graph, node: Node) -> Node | None:
    """Return the one node that reads what `node` writes, unless others or the outputs do too."""
    if len(node.outputs) > 1 or node.output in graph.outputs:
        return None
    readers = graph.readers[node.output]
    return readers[0] if len(readers) == 1 else None


def elementwise_chain(graph: Graph, node: Node, most: int = LONGEST) -> list[Node]:
    """Return the elementwise nodes behind a node, each the only reader of the one before."""
    found: list[Node] = []
    current = only_reader(graph, node)
    while current is not None and current.op in ELEMENTWISE and len(found) < most:
        found.append(current)
        current = only_reader(graph, current)
    return found


def _headed(name: str, heads: Sequence[str], followers: Sequence[str] = ()) -> None:
    """Register the rule: one of `heads`, then elementwise nodes (of `followers` if given)."""

    def match(graph: Graph, node: Node) -> Sequence[Node] | None:
        if node.op not in heads:
            return None
        chain = elementwise_chain(graph, node)
        if followers:
            ops = tuple(n.op for n in chain[: len(followers)])
            chain = chain[: len(followers)] if ops == tuple(followers) else []
        return [node, *chain] if chain else None

    match.__doc__ = f"{' or '.join(heads)}, then {', '.join(followers) or 'elementwise nodes'}."
    RULES.append(Rule(name, match))


def moves(graph: Graph, node: Node) -> Sequence[Node] | None:
    """Propose a chain of conversions, reshapes and transposes: one copy does them all."""
    chain = [node]
    while chain[-1].op in MOVES:
        after = only_reader(graph, chain[-1])
        if after is None or after.op not in MOVES:
            break
        chain.append(after)
    while chain and chain[-1].op == "reshape":
        chain.pop()
    return chain if len(chain) > 1 and node.op in MOVES[:1] + MOVES[2:] else None


RULES.append(Rule("ConfusionTransposeTransDataFusionPass", moves))
_headed("TbeConv2dAddRelu6MulMulFusionPass", ("conv2d",), ("adds", "relu6", "mul", "muls"))
_headed("TbeConvDoubleInFusionPass", ("conv2d",), ("add", "relu"))
_headed("TbeConvElemwiseFusionPass", ("conv2d",))
_headed("TbeDepthwiseConvElemwiseFusionPass", ("depthwise_conv2d",))
_headed("ATbeMatMulElemwiseFusionPass", PRODUCTS[:1])
_headed("TbeBatchMatmulElementWiseFusionPass", PRODUCTS[1:])
