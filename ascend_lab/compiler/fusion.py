"""Fusion: rules propose nodes for one kernel, lowering and the clock dispose.

A rule looks at one node and returns the nodes, itself included, that should run together, or None.
A proposal takes effect if it can be lowered to one kernel (buffers, formats, paths) and that kernel
is not slower than its nodes one by one, starts counted (`decide.pays`). Otherwise the longest
leading part that does takes effect, and what is left over is tried on its own: where conv + add +
relu does not fit, conv + add may, or add + relu.

Names follow the published passes of the vendor's compiler, so that its switch files work here.
Users add rules with the decorator `fusion_rule`; a later rule comes before earlier ones. What no
rule takes is fused by kind of operator, up to the post-dominator:

    kind        may be followed, in its kernel, by
    cube        elementwise                 (sums leave through the vector unit)
    elementwise elementwise, reduce
    reduce      elementwise, reduce         (rows stay on chip; the scheduler cuts phases)
    other       nothing: it moves data or has a kernel of its own

Source: CANN documentation, UB fusion patterns; GE, buffer_fusion_constant.h.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from ascend_lab.compiler.decide import pays
from ascend_lab.compiler.ir import Graph, Node, moves_behind, only_reader, operator_of
from ascend_lab.compiler.rules import Match, Rule, special_rules
from ascend_lab.compiler.switches import Switches
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim.timeline import Start

Kind = Literal["cube", "elementwise", "reduce", "other"]
AUTOMATIC = "AutomaticUbFusion"
LONGEST = 29
"""Fusion by dominators, which comes after all rules, and the most operators of a group (GE)."""
FOLLOWERS: Mapping[Kind, tuple[Kind, ...]] = {
    "cube": ("elementwise",),
    "elementwise": ("elementwise", "reduce"),
    "reduce": ("elementwise", "reduce"),
}


# -- rules ----------------------------------------------------------------------------------------
def elementwise_chain(graph: Graph, node: Node) -> list[Node]:
    """Return the elementwise nodes behind a node, each the only reader of the one before."""
    found: list[Node] = []
    current = only_reader(graph, node)
    while current and (current.has("lanes") or current.op == "select") and len(found) < LONGEST:
        found.append(current)
        current = only_reader(graph, current)
    return found


def moves(graph: Graph, node: Node) -> Sequence[Node] | None:
    """Propose a chain of conversions, reshapes and transposes: one copy, which pads nothing."""
    chain = [node, *moves_behind(graph, node)] if node.op in ("trans_data", "transpose") else []
    while chain and chain[-1].op == "reshape":
        chain.pop()
    while chain and graph.types[chain[-1].output].map.padding_bytes:
        chain.pop()
    return chain


def _headed(name: str, head: str, *followers: str) -> Rule:
    """Return the rule: `head`, then elementwise nodes (exactly `followers` if given)."""

    def match(graph: Graph, node: Node) -> Sequence[Node] | None:
        if node.op != head:
            return None
        chain = elementwise_chain(graph, node)[: len(followers) or None]
        fits = not followers or tuple(n.op for n in chain) == followers
        return [node, *chain] if chain and fits else None

    match.__doc__ = f"{head}, then {', '.join(followers) or 'elementwise nodes'}."
    return Rule(name, match)


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
"""The rules in order of priority; `fuse` tries the first first."""


def rules() -> list[Rule]:
    """Return all rules in order of priority, those of special kernels included."""
    # a user's rules come first, then those of special kernels
    at = next(i for i, rule in enumerate(RULES) if rule.name == FIRST_PLAIN)
    return [*RULES[:at], *special_rules(), *RULES[at:]]


def fusion_rule(name: str) -> Callable[[Match], Match]:
    """Register a function `match(graph, node) -> nodes or None` as the rule of highest priority.

    The graph is the one after passes, with layouts (`Stages.laid_out`): a sigmoid and a product
    may have become a silu there. Rules are asked in order of priority, node by node; nodes that an
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
    """Forget the rules registered inside when done: for notebooks and tests."""
    before = list(RULES)
    try:
        yield
    finally:
        RULES[:] = before


# -- groups by kind, up to the post-dominator -----------------------------------------------------
def kind_of(node: Node) -> Kind:
    """Return how a node takes part in fusion."""
    if node.has("convolution", "product"):
        return "cube"
    if node.has("reduction"):
        return "reduce"
    operator = operator_of(node.op)
    plain = operator.slicing is None and operator.template is None and node.op != "trans_data"
    return "elementwise" if plain or node.op == "cast" else "other"


def immediate_post_dominators(graph: Graph) -> Mapping[str, str | None]:
    """Return, by node name, the nearest node on all its paths to outputs; None: there is none.

    Node d post-dominates n if every path from n to an output passes d: fusing n with everything up
    to d leaves nothing in between that somebody outside could want. Readers come first: ipdom(n)
    is the deepest common ancestor of n's readers in the tree so far.
    """
    found: dict[str, str | None] = {}
    depth: dict[str | None, int] = {None: 0}

    def common(one: str | None, two: str | None) -> str | None:
        while one != two and one is not None and two is not None:
            if depth[one] >= depth[two]:
                one = found[one]
            else:
                two = found[two]
        return one if one == two else None

    outputs = set(graph.outputs)
    for node in reversed(graph.nodes):
        readers = [r.name for name in node.outputs for r in graph.readers[name]]
        meet: str | None = None
        if readers and outputs.isdisjoint(node.outputs):
            meet = readers[0]
            for other in readers[1:]:
                meet = common(meet, other)
        found[node.name] = meet
        depth[node.name] = depth[meet] + 1
    return found


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


def automatic_groups(graph: Graph, taken: Iterable[str]) -> list[list[Node]]:
    """Return groups of at least two nodes, in order, of the nodes not `taken` by a rule."""
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    kinds = {node.name: kind_of(node) for node in graph.nodes}
    kinds.update((name, "other") for name in taken)
    parents = immediate_post_dominators(graph)
    group = {node.name: [node] for node in graph.nodes}

    def fusable(node: Node, path: Sequence[Node]) -> bool:
        """Tell whether `node` and its path may be one kernel: kinds follow, layouts agree."""
        own = group[node.name]
        cube = any(kinds[n.name] == "cube" for n in own)
        allowed = FOLLOWERS["cube" if cube else kinds[node.name]]
        return all(
            kinds[n.name] in allowed
            and _blocks(graph, n) == _blocks(graph, node)
            and (group[n.name] is own or all(kinds[m.name] != "cube" for m in group[n.name]))
            for n in path
        )

    for node in graph.nodes:
        last = parents[node.name]
        if last is None or kinds[node.name] == "other":
            continue
        path = between(graph, node, last, LONGEST)
        if len(path) < LONGEST and fusable(node, path):
            merged = {n.name: n for n in (node, *path) for n in group[n.name]}
            if len(merged) <= LONGEST:
                nodes = sorted(merged.values(), key=lambda n: place[n.name])
                group.update(dict.fromkeys(merged, nodes))
    found = {id(nodes): nodes for nodes in group.values() if len(nodes) > 1}
    return sorted(found.values(), key=lambda nodes: place[nodes[-1].name])


def _blocks(graph: Graph, node: Node) -> str:
    """Return the layout a node writes; how many channels a block has does not matter."""
    return graph.types[node.output].layout.partition(":")[0]


# -- what takes effect ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Count:
    """How often a rule matched, and how often that took effect."""

    match_times: int = 0
    effect_times: int = 0

    def __add__(self, other: Count) -> Count:
        """Return both counts together."""
        return Count(self.match_times + other.match_times, self.effect_times + other.effect_times)


@dataclass(frozen=True, slots=True)
class Fused:
    """The nodes of a graph in groups, one kernel each, in an order that can run; and the report."""

    groups: tuple[tuple[Node, ...], ...]
    counts: Mapping[str, Count] = field(default_factory=dict)

    def result_json(self, passes: Mapping[str, int] | None = None) -> str:
        """Return the report, and the matches of graph passes, as the vendor's fusion_result.json.

        A graph pass that matches takes effect.
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
    """Return every node as a group of its own."""
    return Fused(tuple((node,) for node in graph.nodes))


def fuse(
    graph: Graph, chip: Chip, switches: Switches | None = None, start: Start = "queued"
) -> Fused:
    """Return the groups of a graph with layouts for a chip, whose kernels are started so."""
    on = (switches or Switches()).is_on
    work = _Fuser(graph, chip, start)
    for rule in rules():
        if on(rule.name) and (start != "queued" or not rule.needs_shared_launch):
            for node in graph.nodes:
                if node.name not in work.taken:
                    work.propose(rule.name, rule.propose(graph, node))
    for group in automatic_groups(graph, list(work.taken)) if on(AUTOMATIC) else ():
        work.propose(AUTOMATIC, group)
    singles = ((node,) for node in graph.nodes if node.name not in work.taken)
    groups = {group[-1].name: group for group in (*work.taken.values(), *singles)}
    order = sorted(groups, key=lambda last: work.place[last])
    return Fused(tuple(groups[last] for last in order), work.counts)


class _Fuser:
    """Groups that took effect so far; `taken` names their nodes."""

    def __init__(self, graph: Graph, chip: Chip, start: Start) -> None:
        self.graph = graph
        self.chip = chip
        self.start = start
        self.taken: dict[str, tuple[Node, ...]] = {}
        self.counts: dict[str, Count] = {}
        self.place = {node.name: i for i, node in enumerate(graph.nodes)}

    def propose(self, name: str, nodes: Sequence[Node]) -> None:
        """Take the longest parts of a proposal that pay; raise `InputError` for foreign nodes."""
        foreign = next((n.name for n in nodes if n.name not in self.place), None)
        if foreign is not None:
            known = f"{name}: nodes of the graph {self.graph.name}"
            raise InputError(known, foreign, "return nodes of the graph that is passed")
        rest = sorted({n.name: n for n in nodes}.values(), key=lambda n: self.place[n.name])
        if len(rest) < 2 or any(n.name in self.taken for n in rest):
            return
        effect = 0
        while len(rest) > 1:
            counts = range(len(rest), 1, -1)
            count = next(
                (c for c in counts if pays(self.graph, rest[:c], self.chip, self.start)), 1
            )
            if count > 1:
                group = tuple(rest[:count])
                self.taken.update((node.name, group) for node in group)
                effect = 1
            rest = rest[count:]
        self.counts[name] = self.counts.get(name, Count()) + Count(1, effect)
