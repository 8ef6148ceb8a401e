"""The gradient tuner, job 4: a network, a chip and a cluster in; which gradients to send together,
and when, in data parallel training, out.

What the knowledge bank keeps is the profile, what backward is like, not how it was split: a split
holds for one cluster, the profile of a network on one device for every cluster, so that another
number of devices is planned at once, without simulating again.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ascend_lab import __version__
from ascend_lab.aoe.bank import BankEntry, BankKey, Knowledge, canonical, records
from ascend_lab.aoe.gradient import planning
from ascend_lab.aoe.gradient.planning import BASELINES, Forms, GradientPlan, bound, end_of, plan
from ascend_lab.aoe.gradient.scenario import Improved, Scenario, evaluate, improve
from ascend_lab.aoe.gradient.splits import AlphaBeta, Gradient, Piecewise, gradients_of, sampled
from ascend_lab.cluster import Cost, Topology, collective_time, load_topology
from ascend_lab.compiler import Graph, lower
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip, load_chip

__all__ = [
    "BASELINES",
    "AlphaBeta",
    "Cost",
    "Gradient",
    "GradientPlan",
    "GradientTuning",
    "Improved",
    "Piecewise",
    "ProfileSource",
    "Scenario",
    "bound",
    "end_of",
    "evaluate",
    "gradients_of",
    "improve",
    "plan",
    "sampled",
    "tune_gradients",
]
PROFILE_VERSION = 1
"""Raised whenever training steps are profiled in another way: older profiles are no hits then."""
Profiler = Callable[..., Any]
"""(graph, chip, **settings) -> forward_s, backward_s, update_s and gradients (`train.profile`)."""
PER_OCTAVE = 2
MOST_ROWS = 40
LEAST_CAP_MIB = 2**-10
"""Caps below it (1 KiB) get a warning."""
FORMULA = "(before - after) / after"
DEFAULT = "hccl_default"
"""What improvements are counted from: HCCL's split where nobody tunes it."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One training step on one device: seconds, and the gradients in backward order."""

    forward_s: float
    backward_s: float
    update_s: float
    gradients: tuple[Gradient, ...]

    def step_s(self, end_s: float) -> float:
        """Return the time of a step whose gradients are all exchanged `end_s` into backward."""
        return self.forward_s + max(self.backward_s, end_s) + self.update_s


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
        plan_step_s = self.step_s()
        return (self.step_s(baseline) - plan_step_s) / plan_step_s if plan_step_s else 0.0


@dataclass(frozen=True, slots=True)
class ProfileSource:
    """Where the profile of a training step comes from: a bank that has it, else a profiler.

    `repeat` profiles even what the bank has. `settings` say how the network is trained, for
    instance {"dtype": "fp16", "optimizer": "sgd"}; the `profiler` takes them
    (`train.profile_training` by default).
    """

    knowledge: Knowledge = field(default_factory=lambda: Knowledge(None))
    repeat: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    profiler: Profiler | None = None


def tune_gradients(
    graph: Graph,
    chip: Chip | str,
    topology: Topology | str,
    *,
    max_segments: int | None = planning.HCCL_SEGMENTS,
    source: ProfileSource | None = None,
    cost: Cost | None = None,
) -> GradientTuning:
    """Return the best split of a network's gradients for data parallel training on a cluster.

    The training step is profiled on one device. All-reduces cost what `cluster.collective_time`
    says, from a table of sizes, unless `cost` is given. At most `max_segments` all-reduces are
    sent (HCCL takes 8). Raises as the profiler, `load_topology` and `plan`.
    """
    started = time.monotonic()
    chip = load_chip(chip) if isinstance(chip, str) else chip
    topology = load_topology(topology) if isinstance(topology, str) else topology
    source = source or ProfileSource()
    profile, outcome = profiled(graph, chip, source)
    rows = profile.gradients
    if not rows:
        raise InputError(f"{graph.name}: parameters to train", "none", "train another network")
    table = cost or cluster_cost(topology, float(sum(row.size_bytes for row in rows)))
    best = plan(rows, table, max_segments)
    cost_error = 0.0 if cost else _error(best, profile, table, topology)
    forms = planning.forms_of(best, rows, table)
    least_s = bound(rows, table)
    spent_s = time.monotonic() - started
    warnings = tuple(source.knowledge.warnings)
    return GradientTuning(
        graph.name,
        chip,
        topology,
        profile,
        best,
        forms,
        least_s,
        cost_error,
        outcome,
        spent_s,
        warnings,
        dict(source.settings),
    )


# -- what an all-reduce costs on a cluster --------------------------------------------------------
def cluster_cost(topology: Topology, most_bytes: float) -> Cost:
    """Return what an all-reduce of up to `most_bytes` takes on a cluster, as a table.

    The table reaches to 1 GiB or the next power of two, so that networks share it.
    """
    # One table of up to 1 GiB serves all networks with fewer parameters than that: it is cached.
    return _table(topology, 2.0 ** max(30, int(most_bytes - 1).bit_length()))


@lru_cache(maxsize=64)
def _table(topology: Topology, most_bytes: float) -> Piecewise:
    return sampled(_exact(topology), most_bytes, per_octave=PER_OCTAVE)


def _exact(topology: Topology) -> Cost:
    return lambda size_bytes: float(collective_time("all_reduce", topology, size_bytes).time_s)


def _error(plan: GradientPlan, profile: Profile, table: Cost, topology: Topology) -> float:
    """Return the largest relative error of the table at the sizes the plan sends."""
    rows = profile.gradients
    exact = _exact(topology)
    # Only the sizes that the plan sends matter: elsewhere the table may err.
    sizes = {float(sum(g.size_bytes for g in rows[a : b + 1])) for a, b in plan.segments}
    times = [(table(size), exact(size)) for size in sizes]
    return max(abs(a / b - 1) if b else 0.0 for a, b in times)


# -- profiles and the bank ------------------------------------------------------------------------
def profiled(graph: Graph, chip: Chip, source: ProfileSource) -> tuple[Profile, str]:
    """Return a network's training profile, and what became of it in the bank.

    The latter is "hit" if the bank had it, else "add", "update" or "reserved".
    """
    training = dict(source.settings)
    knowledge = source.knowledge
    profiler = source.profiler
    # A network trained in bf16, or with another optimizer, has another profile.
    key = key_of_profile(graph, chip, " ".join(f"{k}={v}" for k, v in sorted(training.items())))
    stored = None if source.repeat else known_profile(knowledge, key)
    if stored is not None:
        return stored, "hit"
    if profiler is None:
        from ascend_lab.cluster.train import profile_training

        profiler = profile_training
    step = profiler(graph, chip, **training)
    rows = gradients_of(step.gradients, training.get("dtype", "fp16"))
    profile = Profile(step.forward_s, step.backward_s, step.update_s, rows)
    return profile, _keep(knowledge, key, profile, chip.clock_hz)


def key_of_profile(graph: Graph, chip: Chip, settings: str) -> BankKey:
    """Return the bank's key: the network with its batch, the chip, and how it is trained.

    Equal networks have one key, whatever they and their nodes are called.
    """
    # The text of a network has megabytes; its digest tells two networks apart as well.
    network = records.digest(lower.piece_of(graph, graph.nodes).key)
    problem = canonical({"graph": network, "training": settings, "version": PROFILE_VERSION})
    return BankKey.of(chip, "profile", "training", problem)


def _keep(knowledge: Knowledge, key: BankKey, profile: Profile, clock_hz: float) -> str:
    """Write a profile to the custom bank and return what that was: "add", "update", "reserved"."""
    times = [profile.forward_s, profile.backward_s, profile.update_s]
    cycles = round((profile.forward_s + profile.backward_s + profile.update_s) * clock_hz)
    rows = [[g.name, g.ready_s, g.size_bytes, g.dtype] for g in profile.gradients]
    total = sum(g.size_bytes for g in profile.gradients)
    # Number of gradients and total bytes: networks of like size are near each other.
    features = tuple(math.log2(max(n, 1)) for n in (len(rows), total))
    data = {"times_s": times, "gradients": rows}
    # A profile is no schedule and beats no default: before and after are the step itself.
    entry = BankEntry(key, data, cycles, cycles, None, False, "simulated", 0, 1, features=features)
    return knowledge.keep(entry)


def known_profile(knowledge: Knowledge, key: BankKey) -> Profile | None:
    """Return the profile stored under a key, or None if no readable one exists."""
    match = knowledge.find(key)
    if match is None:
        return None
    data: Any = match[0].schedule
    try:
        forward_s, backward_s, update_s = map(float, data["times_s"])
        rows = tuple(Gradient(str(n), float(r), int(s), str(d)) for n, r, s, d in data["gradients"])
    except (KeyError, TypeError, ValueError, InputError):
        return None
    return Profile(forward_s, backward_s, update_s, rows)


# -- as text and as a section of the report -------------------------------------------------------
def plan_table(plan: GradientPlan, rows: Sequence[Gradient], marked: str = "") -> list[str]:
    """Return, as lines, the segments, and the baselines with what the plan gains over them.

    `marked`: the baseline that improvements are counted from, to be marked.
    """
    lines = [f"{'segment':>7} {'first':>6} {'last':>6} {'bytes':>14}  last gradient"]
    for number, (first, last) in enumerate(plan.segments):
        # A network of 400 parameters in 400 segments would fill the screen.
        if number == MOST_ROWS:
            lines.append(f"... and {len(plan.segments) - MOST_ROWS} more")
            break
        size = sum(row.size_bytes for row in rows[first : last + 1])
        lines.append(f"{number:>7} {first:>6} {last:>6} {size:>14,}  {rows[last].name[:44]}")
    lines.append(
        f"{len(rows)} gradients in {len(plan.segments)} segments: optimal (among {_limits(plan)})"
        f", end {plan.end_s * 1e6:.3f} us, tail {plan.tail_s * 1e6:.3f} us"
    )
    large = sum(plan.max_bytes is not None and row.size_bytes > plan.max_bytes for row in rows)
    if large:
        lines.append(
            f"  {large} gradients are larger than {plan.max_bytes:.9g} bytes: each is a segment "
            "by itself"
        )
    lines.append("other ways to split, when they end, and what the plan gains over them:")
    for name, end in plan.baselines.items():
        note = "  (= before)" if name == marked else ""
        note += f"  (breaks the limit: not among {_limits(plan)})" * (name in plan.over_limit)
        lines.append(f"  {name:<15} {end * 1e6:>14.3f} us  {plan.gain(name):>+9.2%}{note}")
    return lines


def _limits(plan: GradientPlan) -> str:
    """Return which splits were allowed, in words."""
    count = plan.max_segments
    size = plan.max_bytes
    if count is None and size is None:
        return "all splits"
    segments = "segments" if count is None else f"at most {count} segments"
    return f"splits into {segments}" + ("" if size is None else f" of at most {size:.9g} bytes")


def bound_text(bound_s: float) -> str:
    """Return what no split beats, as a line."""
    return (
        f"a bound that needs no search, for any number of segments: {bound_s * 1e6:.3f} us "
        "(no split ends earlier; the best may end later)"
    )


def forms_text(forms: Forms) -> list[str]:
    """Return the plan's forms as lines to copy."""
    buckets = len(forms.ddp_segments)
    ddp = f"{buckets} buckets, end {forms.ddp_end_s * 1e6:.3f} us"
    if forms.ddp_cap_mib < LEAST_CAP_MIB:
        alone = ": every gradient by itself" if buckets == forms.by_idx[-1] + 1 else ""
        ddp += f"; smaller than any useful cap{alone}"
    large = "  # segments larger than asked: HCCL takes 8" if forms.hccl_too_large else ""
    dropped = len(forms.by_idx) - len(forms.by_size)
    shares = f"  # {dropped} segments too small for a share are joined with a neighbour"
    return [
        f"set_split_strategy_by_idx({list(forms.by_idx)}){large}",
        f"set_split_strategy_by_size({list(forms.by_size)}){shares * bool(dropped)}",
        f"all_reduce_fusion_config={list(forms.mindspore)}",
        f"DistributedDataParallel(bucket_cap_mb={forms.ddp_cap_mib:.9g})  # {ddp}",
    ]


def tuning_text(tuning: GradientTuning) -> list[str]:
    """Return what job 4 found as lines."""
    t = tuning
    p = tuning.profile
    default_step_s = t.step_s(DEFAULT)
    plan_step_s = t.step_s()
    where = f"{t.topology.size} devices of {t.topology.name}"
    times = {"forward": p.forward_s, "backward": p.backward_s, "update": p.update_s}
    shares = ", ".join(f"{name} {time_s * 1e3:.4f} ms" for name, time_s in times.items())
    gain = (
        f"{t.gain(DEFAULT):.2%}, {default_step_s * 1e3:.4f} ms -> {plan_step_s * 1e3:.4f} ms a step"
    )
    source = "from the bank" if t.outcome == "hit" else "timed anew"
    count = len(p.gradients)
    spent = f"{t.spent_s:.1f} s, profile {source}"
    return [
        f"{t.name}: {count} gradients on {where}, {spent}",
        f"gdat process finished. Performance improved by {gain}",
        f"  = {FORMULA}; gdat is gradient tuning: which gradients share an all-reduce",
        f"  before: with {DEFAULT}, HCCL's split where nobody tunes it; after: with this plan",
        f"  {shares}; {t.scaling:.1%} of one device's speed is left",
        *plan_table(t.plan, p.gradients, DEFAULT),
        bound_text(t.bound_s),
        *forms_text(t.forms),
    ]


def section(tuning: GradientTuning) -> dict[str, Any]:
    """Return what job 4 found as a section of the report, in the published form and our own."""
    t = tuning
    p = tuning.profile
    default_step_s = t.step_s(DEFAULT)
    plan_step_s = t.step_s()
    return {
        "basic": {"tuning_name": t.name, "tuning_time(s)": round(t.spent_s)},
        "GDAT": {
            "model_baseline_performance(ms)": round(default_step_s * 1e3, 9),
            "model_performance_improvement": f"{t.gain(DEFAULT):.2%}",
            "model_result_performance(ms)": round(plan_step_s * 1e3, 9),
            "gdat_tuning_result": "tuning successful",
        },
        "ascend_lab": {
            "note": "times are results of the model, not measurements",
            "chip": t.chip.name,
            "core_count": t.chip.core_count,
            "cluster": t.topology.name,
            "devices": t.topology.size,
            "tool_version": __version__,
            "improvement_formula": FORMULA,
            "improvement_from": DEFAULT,
            "profile": t.outcome,
            "settings": {k: str(v) for k, v in t.settings.items()},
            "forward(us)": p.forward_s * 1e6,
            "backward(us)": p.backward_s * 1e6,
            "update(us)": p.update_s * 1e6,
            "gradients": len(p.gradients),
            "gradient_bytes": sum(row.size_bytes for row in p.gradients),
            "scaling": t.scaling,
            "bound_us": t.bound_s * 1e6,
            "cost_table_error": t.cost_error,
            "step_gain": {name: t.gain(name) for name in t.plan.baselines},
            **t.plan.as_dict(),
            "forms": t.forms.as_dict(),
            "warnings": list(t.warnings),
        },
    }
