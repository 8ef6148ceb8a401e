"""Fusion: rules propose, lowering and the clock dispose.

A proposal takes effect if it can be lowered to one kernel (buffers, formats, paths) and that kernel
is not slower than its nodes one by one, launches counted. Otherwise the longest leading part that
does takes effect, and what is left over is tried on its own: where conv + add + relu does not fit,
conv + add may, or add + relu.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ascend_lab.chip import Chip
from ascend_lab.errors import InputError
from ascend_lab.graph.fusion.automatic import automatic_groups
from ascend_lab.graph.fusion.rules import AUTOMATIC, RULES, Rule
from ascend_lab.graph.fusion.switches import Switches
from ascend_lab.graph.ir import Graph, Node
from ascend_lab.graph.layouts.stay import pays


@dataclass(frozen=True, slots=True)
class Count:
    """How often a rule matched, and how often that took effect."""

    match_times: int = 0
    effect_times: int = 0


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


def fuse(graph: Graph, chip: Chip, switches: Switches | None = None) -> Fused:
    """Return the groups of a graph with layouts for a chip."""
    on = (switches or Switches()).is_on
    work = _Fuser(graph, chip)
    for rule in RULES:
        if on(rule.name):
            for node in graph.nodes:
                if node.name not in work.taken:
                    work.propose(rule.name, proposal(rule, graph, node))
    if on(AUTOMATIC):
        for group in automatic_groups(graph, list(work.taken)):
            work.propose(AUTOMATIC, group)
    return Fused(work.in_order(), work.counts)


def proposal(rule: Rule, graph: Graph, node: Node) -> Sequence[Node]:
    """Return what a rule proposes; raise `InputError` naming it if that is no list of nodes."""
    found = rule.match(graph, node)
    if found is None:
        return ()
    if not isinstance(found, list | tuple) or not all(isinstance(n, Node) for n in found):
        needed = f"{rule.name}: a list of nodes of the graph, or None"
        raise InputError(needed, repr(found)[:60], "return node objects, not names")
    return found


class _Fuser:
    """Groups that took effect so far; `taken` names their nodes."""

    def __init__(self, graph: Graph, chip: Chip) -> None:
        self.graph, self.chip = graph, chip
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
            count = next((c for c in counts if pays(self.graph, tuple(rest[:c]), self.chip)), 1)
            if count > 1:
                self.taken.update(
                    dict.fromkeys((n.name for n in rest[:count]), tuple(rest[:count]))
                )
                effect = 1
            rest = rest[count:]
        old = self.counts.get(name, Count())
        self.counts[name] = Count(old.match_times + 1, old.effect_times + effect)

    def in_order(self) -> tuple[tuple[Node, ...], ...]:
        """Return all groups by the place of their last node."""
        singles: Iterable[tuple[Node, ...]] = (
            (node,) for node in self.graph.nodes if node.name not in self.taken
        )
        groups = {g[-1].name: g for g in (*self.taken.values(), *singles)}
        return tuple(sorted(groups.values(), key=lambda g: self.place[g[-1].name]))
