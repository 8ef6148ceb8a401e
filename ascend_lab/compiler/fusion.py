"""Fusion: decides which nodes of a graph become one kernel.

    before    conv -> GM -> add -> GM -> relu -> GM        three kernels, three starts
    after     (conv, add, relu) -> GM                      one kernel, one start

A rule looks at one node and proposes a group of nodes that should run together, or None. The
proposal takes effect if it can be lowered to one kernel (buffers, formats, data paths) and that
kernel is not slower than its nodes one by one, starts counted (`decide.pays`). Otherwise the
longest prefix of the group that passes both tests takes effect, and the remaining nodes are tried
on their own: where conv + add + relu does not fit, conv + add may, or add + relu.

Names follow the published passes of the vendor's compiler, so that its switch files work here.
Users add rules with the decorator `fusion_rule`; a later rule comes before earlier ones. Nodes that
no rule takes are fused by the kind of their operators, up to the post-dominator:

    kind        may be followed, in its kernel, by
    cube        elementwise                 (sums leave through the vector unit)
    elementwise elementwise, reduce
    reduce      elementwise, reduce         (rows stay on chip; the scheduler cuts phases)
    other       nothing: it moves data or has a hand-written kernel

Source: CANN documentation, UB fusion patterns; GE, buffer_fusion_constant.h.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from ascend_lab.compiler.decide import pays
from ascend_lab.compiler.ir import Graph, Node, moves_after, only_reader, operator_of
from ascend_lab.compiler.rules import Match, Rule, special_rules
from ascend_lab.compiler.switches import Switches
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim.timeline import Start

Kind = Literal["cube", "elementwise", "reduce", "other"]
AUTOMATIC = "AutomaticUbFusion"
"""The name under which fusion by post-dominators, which comes after all rules, is switched off."""
# the limit of the vendor's graph engine (GE)
MAX_GROUP = 29
"""Most operators of a group."""
# reduce -> reduce: a softmax is a maximum, a difference, an exponential, a sum and a quotient
FOLLOWERS: Mapping[Kind, tuple[Kind, ...]] = {
    "cube": ("elementwise",),
    "elementwise": ("elementwise", "reduce"),
    "reduce": ("elementwise", "reduce"),
}


# -- rules ----------------------------------------------------------------------------------------
def elementwise_chain(graph: Graph, node: Node) -> list[Node]:
    """Return the elementwise nodes after a node, each the only reader of the one before.

    A result with two readers has to go to memory in any case, so the chain ends there.
    """
    chain: list[Node] = []
    current = only_reader(graph, node)
    while current and (current.has("lanes") or current.op == "select") and len(chain) < MAX_GROUP:
        chain.append(current)
        current = only_reader(graph, current)
    return chain


def moves(graph: Graph, node: Node) -> Sequence[Node] | None:
    """Propose a chain of conversions, reshapes and transposes, which one copy can do."""
    chain = [node, *moves_after(graph, node)] if node.op in ("trans_data", "transpose") else []
    # a reshape at the end is a view: it needs no kernel
    while chain and chain[-1].op == "reshape":
        chain.pop()
    # one copy for several moves cannot write padding
    while chain and graph.types[chain[-1].output].map.padding_bytes:
        chain.pop()
    return chain


def _headed(name: str, head: str, *followers: str) -> Rule:
    """Return the rule that proposes `head` and elementwise nodes (exactly `followers` if given)."""

    def match(graph: Graph, node: Node) -> Sequence[Node] | None:
        if node.op != head:
            return None
        chain = elementwise_chain(graph, node)[: len(followers) or None]
        fits = not followers or tuple(n.op for n in chain) == followers
        return [node, *chain] if chain and fits else None

    match.__doc__ = f"{head}, then {', '.join(followers) or 'elementwise nodes'}."
    return Rule(name, match)


# Rules of special kernels are inserted before this one, rules of users before all others.
FIRST_PLAIN = "ConfusionTransposeTransDataFusionPass"
RULES: list[Rule] = [
    Rule(FIRST_PLAIN, moves),
    _headed("TbeConv2dAddRelu6MulMulFusionPass", "conv2d", "adds", "relu6", "mul", "muls"),
    _headed("TbeConvDoubleInFusionPass", "conv2d", "add", "relu"),
    _headed("TbeConvElemwiseFusionPass", "conv2d"),
    _headed("TbeDepthwiseConvElemwiseFusionPass", "depthwise_conv2d"),
    _headed("TbeConv2DBackpropElemwiseFusionPass", "conv_transpose2d"),
    _headed("ATbeMatMulElemwiseFusionPass", "matmul"),
    _headed("TbeBatchMatmulElementWiseFusionPass", "batch_matmul"),
]
"""The rules in order of priority; `fuse` tries them in this order."""


def rules() -> list[Rule]:
    """Return all rules in order of priority, those of special kernels included."""
    # in this order: rules of users, rules of special kernels, the rules of this module
    first_plain = next(i for i, rule in enumerate(RULES) if rule.name == FIRST_PLAIN)
    return [*RULES[:first_plain], *special_rules(), *RULES[first_plain:]]


def fusion_rule(name: str) -> Callable[[Match], Match]:
    """Register a function `match(graph, node) -> nodes or None` as the rule of highest priority.

    The graph is the one after passes, with layouts (`Stages.laid_out`): a sigmoid and a product
    may have become a silu there. Rules run in order of priority, each on all nodes; nodes that an
    earlier rule took are not proposed again. A proposal may take effect in parts.
    Raises `InputError` if there is a rule of that name.
    """
    if name == AUTOMATIC or any(rule.name == name for rule in rules()):
        raise InputError("a new rule name", name, "choose another, or switch the old one off")

    def register(match: Match) -> Match:
        RULES.insert(0, Rule(name, match))
        return match

    return register


@contextmanager
def rules_restored() -> Iterator[None]:
    """Remove the rules registered inside the block at its end, for notebooks and tests."""
    registered = list(RULES)
    try:
        yield
    finally:
        RULES[:] = registered


# -- groups by kind, up to the post-dominator -----------------------------------------------------
def kind_of(node: Node) -> Kind:
    """Return the kind of a node, which decides what may follow the node in a kernel."""
    if node.has("convolution", "product"):
        return "cube"
    if node.has("reduction"):
        return "reduce"
    operator = operator_of(node.op)
    # an operator with slices or a template moves data, or has a hand-written kernel
    plain = operator.slicing is None and operator.template is None and node.op != "trans_data"
    return "elementwise" if plain or node.op == "cast" else "other"


def immediate_post_dominators(graph: Graph) -> Mapping[str, str | None]:
    """Return for each node, by name, its immediate post-dominator; None if it has none.

    Node d post-dominates n if every path from n to an output passes d. Fusing n with everything up
    to d means that no node outside reads a result in between. In

        n -> a -> d,  n -> b -> d

    it is d for n, a and b. Nodes are visited from the outputs back, so that readers come first:
    ipdom(n) is the deepest common ancestor of n's readers in the tree of post-dominators.
    """
    dominator_of: dict[str, str | None] = {}
    depth: dict[str | None, int] = {None: 0}

    def common(first_name: str | None, second_name: str | None) -> str | None:
        """Return the nearest ancestor of two nodes in the tree of dominators; None is its root."""
        one, other = first_name, second_name
        # replace the deeper of the two by its parent until they are equal
        while one != other and one is not None and other is not None:
            if depth[one] >= depth[other]:
                one = dominator_of[one]
            else:
                other = dominator_of[other]
        return one if one == other else None

    outputs = set(graph.outputs)
    for node in reversed(graph.nodes):
        readers = [r.name for name in node.outputs for r in graph.readers[name]]
        common_node: str | None = None
        # an output of the graph is read from outside: nothing post-dominates its node
        if readers and outputs.isdisjoint(node.outputs):
            common_node = readers[0]
            for reader in readers[1:]:
                common_node = common(common_node, reader)
        dominator_of[node.name] = common_node
        depth[node.name] = depth[common_node] + 1
    return dominator_of


def between(graph: Graph, start: Node, end: str, max_nodes: int) -> list[Node]:
    """Return every node on a path from `start` to its post-dominator `end`, with `end`.

    The search stops once it has `max_nodes` nodes: such a group is too large anyway.
    """
    seen: dict[str, Node] = {}
    ahead = [start]
    while ahead and len(seen) < max_nodes:
        node = ahead.pop()
        for name in node.outputs:
            for reader in graph.readers[name]:
                if reader.name not in seen:
                    seen[reader.name] = reader
                    if reader.name != end:
                        ahead.append(reader)
    return list(seen.values())


def automatic_groups(graph: Graph, taken: Iterable[str]) -> list[list[Node]]:
    """Return groups of at least two nodes, in order, among the nodes that no rule has taken.

    Groups grow node by node: a -> b becomes (a, b); if b -> c may follow, (a, b) and c are merged.
    """
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    kinds = {node.name: kind_of(node) for node in graph.nodes}
    kinds.update((name, "other") for name in taken)
    parents = immediate_post_dominators(graph)
    group = {node.name: [node] for node in graph.nodes}

    def fusable(node: Node, path: Sequence[Node]) -> bool:
        """Tell whether the kinds and layouts of `node` and its path allow one kernel."""
        node_group = group[node.name]
        # sums of the cube leave through the vector unit, which can only do elementwise work then
        cube = any(kinds[n.name] == "cube" for n in node_group)
        allowed = FOLLOWERS["cube" if cube else kinds[node.name]]
        for follower in path:
            fits = kinds[follower.name] in allowed
            if not fits or _blocks(graph, follower) != _blocks(graph, node):
                return False
            other_group = group[follower.name]
            has_cube = any(kinds[n.name] == "cube" for n in other_group)
            # a kernel has one product: two groups with a product each are not merged
            if other_group is not node_group and has_cube:
                return False
        return True

    for node in graph.nodes:
        dominator = parents[node.name]
        if dominator is None or kinds[node.name] == "other":
            continue
        path = between(graph, node, dominator, MAX_GROUP)
        if len(path) < MAX_GROUP and fusable(node, path):
            merged = {n.name: n for n in (node, *path) for n in group[n.name]}
            if len(merged) <= MAX_GROUP:
                nodes = sorted(merged.values(), key=lambda n: place[n.name])
                group.update(dict.fromkeys(merged, nodes))
    # all members of a group share one list
    distinct = {id(nodes): nodes for nodes in group.values() if len(nodes) > 1}
    return sorted(distinct.values(), key=lambda nodes: place[nodes[-1].name])


def _blocks(graph: Graph, node: Node) -> str:
    """Return the layout that a node writes, without a block size such as the ":4" of NC1HWC0:4."""
    return graph.types[node.output].layout.partition(":")[0]


# -- what takes effect ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Count:
    """How often a rule proposed a group, and how often a part of it became one kernel."""

    match_times: int = 0
    effect_times: int = 0

    def __add__(self, other: Count) -> Count:
        """Return both counts together."""
        return Count(self.match_times + other.match_times, self.effect_times + other.effect_times)


@dataclass(frozen=True, slots=True)
class Fused:
    """Groups of nodes, one kernel each, in an order that can run, and the counts of each rule."""

    groups: tuple[tuple[Node, ...], ...]
    counts: Mapping[str, Count] = field(default_factory=dict)

    def result_json(self, passes: Mapping[str, int] | None = None) -> str:
        """Return the counts in the form of the vendor's fusion_result.json.

        `passes` are the matches of graph passes; a graph pass that matches always takes effect.
        """
        graph = {name: Count(n, n) for name, n in (passes or {}).items()}
        entry = {
            "graph_fusion": _times(graph),
            "session_and_graph_id": "0_0",
            "ub_fusion": _times(self.counts),
        }
        return json.dumps([entry], indent=2)


def _times(counts: Mapping[str, Count]) -> dict[str, dict[str, str]]:
    return {
        name: {"effect_times": str(c.effect_times), "match_times": str(c.match_times)}
        for name, c in sorted(counts.items())
    }


def unfused(graph: Graph) -> Fused:
    """Return every node as a separate group."""
    return Fused(tuple((node,) for node in graph.nodes))


def fuse(
    graph: Graph, chip: Chip, switches: Switches | None = None, start: Start = "queued"
) -> Fused:
    """Return the groups of a graph with layouts on a chip.

    `start` is how kernels start there, which decides what a saved start is worth.
    """
    is_on = (switches or Switches()).is_on
    work = _Fuser(graph, chip, start)
    for rule in rules():
        if is_on(rule.name) and (start != "queued" or not rule.needs_shared_launch):
            for node in graph.nodes:
                if node.name not in work.taken:
                    work.propose(rule.name, rule.propose(graph, node))
    for group in automatic_groups(graph, list(work.taken)) if is_on(AUTOMATIC) else ():
        work.propose(AUTOMATIC, group)
    singles = ((node,) for node in graph.nodes if node.name not in work.taken)
    groups = {group[-1].name: group for group in (*work.taken.values(), *singles)}
    order = sorted(groups, key=lambda last_name: work.place[last_name])
    return Fused(tuple(groups[last_name] for last_name in order), work.counts)


class _Fuser:
    """The groups that took effect so far; `taken` maps each of their nodes to its group."""

    def __init__(self, graph: Graph, chip: Chip, start: Start) -> None:
        self.graph = graph
        self.chip = chip
        self.start = start
        self.taken: dict[str, tuple[Node, ...]] = {}
        self.counts: dict[str, Count] = {}
        self.place = {node.name: i for i, node in enumerate(graph.nodes)}

    def propose(self, name: str, nodes: Sequence[Node]) -> None:
        """Take the longest prefix of a proposal that pays, then go on with the remaining nodes.

        Raises `InputError` for nodes of another graph.
        """
        foreign = next((n.name for n in nodes if n.name not in self.place), None)
        if foreign is not None:
            needed = f"{name}: nodes of the graph {self.graph.name}"
            raise InputError(needed, foreign, "return nodes of the graph that is passed")
        remaining = sorted({n.name: n for n in nodes}.values(), key=lambda n: self.place[n.name])
        if len(remaining) < 2 or any(n.name in self.taken for n in remaining):
            return
        effect = 0
        while len(remaining) > 1:
            # try (conv, add, relu), then (conv, add); if neither pays, conv stays alone, and
            # (add, relu) is tried next
            counts = range(len(remaining), 1, -1)
            count = next(
                (c for c in counts if pays(self.graph, remaining[:c], self.chip, self.start)), 1
            )
            if count > 1:
                group = tuple(remaining[:count])
                self.taken.update((node.name, group) for node in group)
                effect = 1
            remaining = remaining[count:]
        self.counts[name] = self.counts.get(name, Count()) + Count(1, effect)
