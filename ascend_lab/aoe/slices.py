"""Job 1, a whole network: its slicing from the bank or by search."""

from __future__ import annotations

from datetime import UTC, datetime

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
from ascend_lab.aoe.settings import Progress, Settings
from ascend_lab.aoe.subgraph import SlicePlan, SubgraphResult, network_bound, tune_subgraph
from ascend_lab.aoe.subgraph.plans import plan_time
from ascend_lab.aoe.subgraph.slicing import sliced
from ascend_lab.chip import Chip
from ascend_lab.errors import AscendLabError
from ascend_lab.graph import Graph, to_text
from ascend_lab.graph.canonical import canonical
from ascend_lab.graph.pipeline import Front


def slice_network(
    front: Front,
    chip: Chip,
    settings: Settings,
    knowledge: Knowledge,
    progress: Progress | None = None,
) -> tuple[SubgraphResult, Outcome]:
    """Return the slicing of a network, and what became of the bank; raises as `tune_subgraph`."""
    graph = canonical(front.rewritten, chip)
    key = BankKey(
        chip.name, chip_digest(chip), chip.core_count, "graph", graph.name, to_text(graph)
    )
    decision = decide(knowledge, key, settings.repeat)
    if not decision.tune and (known := _from_bank(graph, chip, decision)):
        return known, settle(knowledge, decision)
    found = tune_subgraph(
        front,
        chip,
        time_limit_s=settings.time_limit_s,
        seed=settings.seed,
        progress=progress,
    )
    return found, settle(knowledge, decision, _entry(key, found, chip, settings))


def _from_bank(graph: Graph, chip: Chip, decision: Decision) -> SubgraphResult | None:
    """Return the plan of a bank, timed again; None if it is slower than the whole network now."""
    assert decision.entry is not None
    plan = SlicePlan.of(decision.entry.schedule)
    before_s = plan_time(graph, SlicePlan(), chip)
    try:
        after_s = plan_time(graph, plan, chip) if plan.regions else before_s
    except AscendLabError:
        return None
    if after_s > before_s:
        return None
    bound_s = network_bound(graph, chip)
    return SubgraphResult(plan, sliced(graph, plan), before_s, after_s, bound_s, 0)


def _entry(key: BankKey, found: SubgraphResult, chip: Chip, settings: Settings) -> BankEntry:
    before, after, bound = (
        round(t * chip.clock_hz) for t in (found.before_s, found.after_s, found.bound_s)
    )
    return BankEntry(
        key,
        found.plan.plain(),
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
