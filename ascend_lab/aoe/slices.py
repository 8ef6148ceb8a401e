"""Job 1, a whole network: its slicing from the bank or by search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from ascend_lab import __version__
from ascend_lab.aoe.bank import (
    BankEntry,
    BankKey,
    Decision,
    Knowledge,
    Outcome,
    chip_digest,
    decide,
    settle,
)
from ascend_lab.aoe.clock import Deadline
from ascend_lab.aoe.settings import Progress, Settings
from ascend_lab.aoe.subgraph import SlicePlan, SubgraphResult, network_bound, tune_subgraph
from ascend_lab.aoe.subgraph.plans import plan_time
from ascend_lab.aoe.subgraph.slicing import sliced
from ascend_lab.chip import Chip
from ascend_lab.errors import AscendLabError
from ascend_lab.graph import Graph
from ascend_lab.graph.canonical import canonical
from ascend_lab.graph.lower import piece_of
from ascend_lab.graph.pipeline import Front


def slice_network(
    front: Front,
    chip: Chip,
    settings: Settings,
    knowledge: Knowledge,
    progress: Progress | None = None,
    deadline: Deadline | None = None,
) -> tuple[SubgraphResult, Outcome | None]:
    """Return the slicing of a network, and what became of the bank; raises as `tune_subgraph`.

    A search that the user stopped leaves nothing in the bank, so that the next run goes on.
    """
    deadline = deadline or Deadline.of(settings.time_limit_s)
    graph = canonical(front.rewritten, chip)
    key = key_of_graph(graph, chip)
    decision = decide(knowledge, key, settings.repeat)
    if not decision.tune and (known := _from_bank(graph, chip, decision)):
        return known, settle(knowledge, decision)
    try:
        found = tune_subgraph(
            front,
            chip,
            time_limit_s=None if math.isinf(deadline.end) else deadline.left_s,
            seed=settings.seed,
            progress=progress,
        )
    except KeyboardInterrupt:  # before any plan was timed
        time_s = plan_time(graph, SlicePlan(), chip)
        bound_s = network_bound(graph, chip)
        found = SubgraphResult(SlicePlan(), graph, time_s, time_s, bound_s, 0, interrupted=True)
    if found.interrupted:
        return found, None
    return found, settle(knowledge, decision, _entry(key, graph, found, chip, settings))


def key_of_graph(graph: Graph, chip: Chip) -> BankKey:
    """Return the bank's key of a network.

    Equal networks have one, whatever their names are, and however a reshape spells its result.
    """
    nodes = [
        replace(node, attrs={**node.attrs, "shape": graph.types[node.output].shape})
        if node.op == "reshape"
        else node
        for node in graph.nodes
    ]
    problem = piece_of(graph, nodes).key
    return BankKey(chip.name, chip_digest(chip), chip.core_count, "graph", "network", problem)


def numbered(plan: SlicePlan, graph: Graph) -> list[dict[str, Any]]:
    """Return a plan as the bank keeps it: nodes by their place in the graph."""
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    return [
        {**row, "first": place[row["first"]], "last": place[row["last"]]} for row in plan.plain()
    ]


def named(rows: Sequence[Mapping[str, Any]], graph: Graph) -> SlicePlan:
    """Return the plan that `numbered` wrote, for a graph with these nodes in this order."""
    names = [node.name for node in graph.nodes]
    return SlicePlan.of(
        {**row, "first": names[row["first"]], "last": names[row["last"]]} for row in rows
    )


def _from_bank(graph: Graph, chip: Chip, decision: Decision) -> SubgraphResult | None:
    """Return the plan of a bank, timed again; None if it is slower than the whole network now."""
    assert decision.entry is not None
    before_s = plan_time(graph, SlicePlan(), chip)
    try:
        plan = named(decision.entry.schedule, graph)
        after_s = plan_time(graph, plan, chip) if plan.regions else before_s
    except (AscendLabError, LookupError, TypeError):  # a plan for another graph, or none at all
        return None
    if after_s > before_s:
        return None
    bound_s = network_bound(graph, chip)
    return SubgraphResult(plan, sliced(graph, plan), before_s, after_s, bound_s, 0)


def _entry(
    key: BankKey, graph: Graph, found: SubgraphResult, chip: Chip, settings: Settings
) -> BankEntry:
    before, after, bound = (
        round(t * chip.clock_hz) for t in (found.before_s, found.after_s, found.bound_s)
    )
    return BankEntry(
        key,
        numbered(found.plan, graph),
        before,
        min(after, before),
        min(bound, after),
        False,
        "dynamic programming, annealing",
        settings.seed,
        found.tried,
        __version__,
        datetime.now(UTC).isoformat(timespec="seconds"),
    )
