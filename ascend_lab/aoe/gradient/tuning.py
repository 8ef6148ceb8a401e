"""Job 4: a network, a chip and a cluster in; which gradients to send together, and when, out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ascend_lab.aoe.bank import Knowledge
from ascend_lab.aoe.gradient.cost import Cost, Piecewise, sampled
from ascend_lab.aoe.gradient.forms import HCCL_SEGMENTS, Forms, forms_of
from ascend_lab.aoe.gradient.planning import GradientPlan, bound, plan
from ascend_lab.aoe.gradient.profiles import (
    Profile,
    keep_profile,
    key_of_profile,
    known_profile,
    profile_of,
)
from ascend_lab.chip import Chip, load_chip
from ascend_lab.cluster import Topology, load_topology
from ascend_lab.errors import InputError
from ascend_lab.graph import Graph

Profiler = Callable[..., Any]
"""(graph, chip, **settings) -> forward_s, backward_s, update_s and gradients."""
PER_OCTAVE = 2


@dataclass(frozen=True, slots=True)
class GradientTuning:
    """A network's gradients split for a cluster (model results).

    `outcome`: "hit" if the profile came from the bank, else what became of it there. `cost_error`:
    largest relative error of the cost table at the sizes of the plan's buckets.
    """

    name: str
    chip: Chip
    topology: Topology
    profile: Profile
    plan: GradientPlan
    forms: Forms
    bound_s: float
    cost_error: float
    outcome: str
    spent_s: float
    warnings: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def step_s(self, baseline: str = "") -> float:
        """Return the time of a training step with this plan, or with a named baseline."""
        return self.profile.step_s(self.plan.baselines[baseline] if baseline else self.plan.end_s)

    @property
    def single_s(self) -> float:
        """A step of one device alone."""
        return self.profile.step_s(0.0)

    @property
    def scaling(self) -> float:
        """Share of the devices' own speed that is left: step of one / step of all."""
        return self.single_s / self.step_s() if self.step_s() else 1.0

    def gain(self, baseline: str) -> float:
        """Return (before - after) / after of the whole step, as the published reports do."""
        after = self.step_s()
        return (self.step_s(baseline) - after) / after if after else 0.0


def tune_gradients(
    graph: Graph,
    chip: Chip | str,
    topology: Topology | str,
    *,
    max_segments: int | None = HCCL_SEGMENTS,
    max_bytes: float | None = None,
    knowledge: Knowledge | None = None,
    repeat: bool = False,
    profiler: Profiler | None = None,
    cost: Cost | None = None,
    settings: Mapping[str, Any] | None = None,
) -> GradientTuning:
    """Return the best split of a network's gradients for data parallel training on a cluster.

    The training step is profiled on one device (by `train.profile_training` with `settings`, such
    as `dtype` and `optimizer`, unless `profiler` is given), or taken from the banks; `repeat`
    profiles anew. All-reduces cost what
    `cluster.collective_time` says, from a table of sizes, unless `cost` is given. At most
    `max_segments` (HCCL takes 8). Raises as the profiler, `load_topology` and `plan`.
    """
    started, given = time.monotonic(), dict(settings or {})
    chip = load_chip(chip) if isinstance(chip, str) else chip
    topology = load_topology(topology) if isinstance(topology, str) else topology
    bank = knowledge if knowledge is not None else Knowledge(None)
    profile, outcome = profiled(graph, chip, bank, repeat, profiler, given)
    rows = profile.gradients
    if not rows:
        raise InputError(f"{graph.name}: parameters to train", "none", "train another network")
    table = cost or cluster_cost(topology, float(sum(row.size_bytes for row in rows)))
    found = plan(rows, table, max_segments, max_bytes=max_bytes)
    error = 0.0 if cost else _error(found, profile, table, topology)
    forms = forms_of(found, rows, table, max_bytes=max_bytes)
    least_s = bound(rows, table, max_bytes=max_bytes)
    spent_s, warnings = time.monotonic() - started, tuple(bank.warnings)
    return GradientTuning(
        graph.name, chip, topology, profile, found, forms, least_s, error, outcome, spent_s,
        warnings, given,
    )  # fmt: skip


def profiled(
    graph: Graph,
    chip: Chip,
    knowledge: Knowledge,
    repeat: bool = False,
    profiler: Profiler | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[Profile, str]:
    """Return a network's training profile, from the banks if they know it, and its outcome."""
    given = dict(settings or {})
    key = key_of_profile(graph, chip, " ".join(f"{k}={v}" for k, v in sorted(given.items())))
    known = None if repeat else known_profile(knowledge, key)
    if known is not None:
        return known, "hit"
    if profiler is None:
        from ascend_lab.train.profile import profile_training

        profiler = profile_training
    found = profile_of(profiler(graph, chip, **given), given.get("dtype", "fp16"))
    return found, keep_profile(knowledge, key, found, chip.clock_hz)


def cluster_cost(topology: Topology, most_bytes: float) -> Cost:
    """Return what an all-reduce of up to `most_bytes` takes on a cluster, as a table.

    The table reaches to 1 GiB or the next power of two, so that networks share it.
    """
    return _table(topology, 2.0 ** max(30, int(most_bytes - 1).bit_length()))


@lru_cache(maxsize=64)
def _table(topology: Topology, most_bytes: float) -> Piecewise:
    return sampled(_exact(topology), most_bytes, per_octave=PER_OCTAVE)


def _exact(topology: Topology) -> Cost:
    from ascend_lab.cluster import collective_time

    return lambda size_bytes: float(collective_time("all_reduce", topology, size_bytes).time_s)


def _error(found: GradientPlan, profile: Profile, table: Cost, topology: Topology) -> float:
    """Return the largest relative error of the table at the sizes the plan sends."""
    rows, exact = profile.gradients, _exact(topology)
    sizes = {float(sum(g.size_bytes for g in rows[a : b + 1])) for a, b in found.segments}
    times = [(table(size), exact(size)) for size in sizes]
    return max(abs(a / b - 1) if b else 0.0 for a, b in times)
