"""The gradient tuner (job 4): decide which gradients share an all-reduce in data parallel training.

The backward pass produces gradients one after another. Sending each by itself pays the latency of
an all-reduce every time; sending all at the end overlaps nothing with the computation. The tuner
splits the gradients, in the order in which they are ready, into segments with one all-reduce each,
so that the last all-reduce ends as early as possible.

The knowledge bank stores the profile of a training step on one device: the times of forward,
backward and update, and when each gradient is ready. The split itself is not stored: it depends on
the cluster and is quick to compute from the profile.
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
from ascend_lab.cluster import Topology, collective_time, load_topology
from ascend_lab.cluster.cost import Cost
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
"""Increased whenever training steps are profiled in another way: older profiles no longer match."""
Profiler = Callable[..., Any]
"""(graph, chip, **settings) -> forward_s, backward_s, update_s and gradients (`train.profile`)."""
SAMPLES_PER_OCTAVE = 2
"""The table of all-reduce times has two sizes per doubling: 1, 1.41, 2, 2.83, 4 MiB, ..."""
MAX_TABLE_ROWS = 40
"""The printed table stops after this many segments."""
MIN_USEFUL_CAP_MIB = 2**-10
"""Bucket caps (PyTorch DDP) below this size, 1 KiB, get a warning."""
GAIN_FORMULA = "(before - after) / after"
DEFAULT_BASELINE = "hccl_default"
"""Improvements are counted from the split that HCCL uses if nobody sets one."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One training step on one device: seconds, and the gradients in backward order."""

    forward_s: float
    backward_s: float
    update_s: float
    gradients: tuple[Gradient, ...]

    def step_s(self, end_s: float) -> float:
        """Return the time of a step whose gradients are all exchanged `end_s` into backward."""
        # backward of 10 ms, exchange until 12: the step is 2 ms longer than on one device
        return self.forward_s + max(self.backward_s, end_s) + self.update_s


@dataclass(frozen=True, slots=True)
class GradientTuning:
    """The best split of a network's gradients for a cluster, with simulated times.

    `outcome` is "hit" if the profile came from the bank, else how it was stored there ("add",
    "update" or "reserved"). `forms` are the split in the notation of HCCL, MindSpore and PyTorch.
    `bound_s` is when the last all-reduce ends at the earliest with any split. `cost_error` is the
    largest relative error of the cost table at the sizes of the plan's segments.
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
        """The time of a training step on one device, which exchanges no gradients."""
        return self.profile.step_s(0.0)

    @property
    def scaling(self) -> float:
        """Weak-scaling efficiency: step time of one device / step time of the cluster."""
        return self.single_s / self.step_s() if self.step_s() else 1.0

    def gain(self, baseline: str) -> float:
        """Return (before - after) / after of the whole step, as the published reports do."""
        plan_step_s = self.step_s()
        return (self.step_s(baseline) - plan_step_s) / plan_step_s if plan_step_s else 0.0


@dataclass(frozen=True, slots=True)
class ProfileSource:
    """Where the profile of a training step comes from: the bank if it has one, else a profiler.

    With `repeat` the step is profiled even if the bank has it. `settings` say how the network is
    trained, such as {"dtype": "fp16", "optimizer": "sgd"}; they are passed to the `profiler`
    (None: `train.profile_training`).
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

    The training step is profiled on one device. `cost` maps the bytes of an all-reduce to its
    time; None takes `cluster.collective_time`, interpolated in a table of sizes. There are at most
    `max_segments` all-reduces (HCCL allows 8). Raises what the profiler, `load_topology` and `plan`
    raise.
    """
    started = time.monotonic()
    chip = load_chip(chip) if isinstance(chip, str) else chip
    topology = load_topology(topology) if isinstance(topology, str) else topology
    source = source or ProfileSource()
    profile, outcome = training_profile(graph, chip, source)
    gradients = profile.gradients
    if not gradients:
        raise InputError(f"{graph.name}: parameters to train", "none", "train another network")
    total_bytes = sum(gradient.size_bytes for gradient in gradients)
    # the largest bucket has all gradients: no split needs a cost beyond that size
    table = cost or cluster_cost(topology, float(total_bytes))
    best_plan = plan(gradients, table, max_segments)
    # a cost that the caller gives is exact by definition
    cost_error = 0.0 if cost else _largest_table_error(best_plan, profile, table, topology)
    forms = planning.forms_of(best_plan, gradients, table)
    return GradientTuning(
        name=graph.name,
        chip=chip,
        topology=topology,
        profile=profile,
        plan=best_plan,
        forms=forms,
        bound_s=bound(gradients, table),
        cost_error=cost_error,
        outcome=outcome,
        spent_s=time.monotonic() - started,
        warnings=tuple(source.knowledge.warnings),
        settings=dict(source.settings),
    )


# -- what an all-reduce costs on a cluster --------------------------------------------------------
def cluster_cost(topology: Topology, max_bytes: float) -> Cost:
    """Return a function from the bytes of an all-reduce, up to `max_bytes`, to its time.

    It interpolates in a table that ends at 1 GiB, or for larger networks at the next power of two.
    """
    # The table is cached by its largest size: all networks below 1 GiB of gradients share one.
    # 1.5 GiB needs 31 bits: its table ends at 2 GiB; exactly 1 GiB still takes the table of 1 GiB
    return _cost_table(topology, 2.0 ** max(30, int(max_bytes - 1).bit_length()))


@lru_cache(maxsize=64)
def _cost_table(topology: Topology, max_bytes: float) -> Piecewise:
    return sampled(_simulated_cost(topology), max_bytes, per_octave=SAMPLES_PER_OCTAVE)


def _simulated_cost(topology: Topology) -> Cost:
    return lambda size_bytes: float(collective_time("all_reduce", topology, size_bytes).time_s)


def _largest_table_error(
    chosen_plan: GradientPlan, profile: Profile, table: Cost, topology: Topology
) -> float:
    """Return the largest relative error of the table at the sizes that a plan sends."""
    simulated = _simulated_cost(topology)
    largest_error = 0.0
    for first_index, last_index in chosen_plan.segments:
        segment = profile.gradients[first_index : last_index + 1]
        size_bytes = float(sum(gradient.size_bytes for gradient in segment))
        simulated_s = simulated(size_bytes)
        error = abs(table(size_bytes) / simulated_s - 1) if simulated_s else 0.0
        largest_error = max(largest_error, error)
    return largest_error


# -- profiles and the bank ------------------------------------------------------------------------
def training_profile(graph: Graph, chip: Chip, source: ProfileSource) -> tuple[Profile, str]:
    """Return a network's training profile, and "hit" if it came from the bank.

    A profile that was simulated here is stored in the bank; the second value is then "add",
    "update" or, if the bank keeps another entry, "reserved".
    """
    training = dict(source.settings)
    knowledge = source.knowledge
    profiler = source.profiler
    # A network trained in bf16, or with another optimizer, has another profile.
    key = profile_key(graph, chip, " ".join(f"{k}={v}" for k, v in sorted(training.items())))
    stored = None if source.repeat else stored_profile(knowledge, key)
    if stored is not None:
        return stored, "hit"
    if profiler is None:
        from ascend_lab.cluster.train import profile_training

        profiler = profile_training
    step = profiler(graph, chip, **training)
    gradients = gradients_of(step.gradients, training.get("dtype", "fp16"))
    profile = Profile(step.forward_s, step.backward_s, step.update_s, gradients)
    return profile, _store_profile(knowledge, key, profile, chip.clock_hz)


def profile_key(graph: Graph, chip: Chip, settings: str) -> BankKey:
    """Return the bank's key of a profile: the network with its batch, the chip, the training.

    The key does not depend on the names of the network and its nodes.
    """
    # The text of a network has megabytes; its digest distinguishes two networks just as well.
    network = records.digest(lower.piece_of(graph, graph.nodes).key)
    problem = canonical({"graph": network, "training": settings, "version": PROFILE_VERSION})
    return BankKey.of(chip, "profile", "training", problem)


def _store_profile(knowledge: Knowledge, key: BankKey, profile: Profile, clock_hz: float) -> str:
    """Write a profile to the custom bank and return how: "add", "update" or "reserved"."""
    times = [profile.forward_s, profile.backward_s, profile.update_s]
    cycles = round((profile.forward_s + profile.backward_s + profile.update_s) * clock_hz)
    rows = [[g.name, g.ready_s, g.size_bytes, g.dtype] for g in profile.gradients]
    total_bytes = sum(g.size_bytes for g in profile.gradients)
    # Features are coordinates of an entry in the bank; here number of gradients and total bytes,
    # as powers of two: 161 gradients of 51 MB have (7.3, 25.6).
    features = tuple(math.log2(max(n, 1)) for n in (len(rows), total_bytes))
    data = {"times_s": times, "gradients": rows}
    # A profile is not a schedule that beats a default: before and after are the step itself.
    entry = BankEntry(
        key=key,
        schedule=data,
        before_cycles=cycles,
        after_cycles=cycles,
        bound_cycles=None,
        proven=False,
        search="simulated",
        seed=0,
        trials=1,
        features=features,
    )
    return knowledge.keep(entry)


def stored_profile(knowledge: Knowledge, key: BankKey) -> Profile | None:
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
    """Return lines of text: a table of the segments, then what the plan gains over each baseline.

    `marked` is the baseline that improvements are counted from; its line says "= before".
    """
    lines = [f"{'segment':>7} {'first':>6} {'last':>6} {'bytes':>14}  last gradient"]
    for number, (first_index, last_index) in enumerate(plan.segments):
        # A network of 400 parameters in 400 segments would fill the screen.
        if number == MAX_TABLE_ROWS:
            lines.append(f"... and {len(plan.segments) - MAX_TABLE_ROWS} more")
            break
        size_bytes = sum(row.size_bytes for row in rows[first_index : last_index + 1])
        name = rows[last_index].name[:44]
        lines.append(f"{number:>7} {first_index:>6} {last_index:>6} {size_bytes:>14,}  {name}")
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
        if name in plan.over_limit:
            note += f"  (breaks the limit: not among {_limits(plan)})"
        lines.append(f"  {name:<15} {end * 1e6:>14.3f} us  {plan.gain(name):>+9.2%}{note}")
    return lines


def _limits(plan: GradientPlan) -> str:
    """Return which splits were allowed, in words: "splits into at most 8 segments"."""
    count = plan.max_segments
    size = plan.max_bytes
    if count is None and size is None:
        return "all splits"
    segments = "segments" if count is None else f"at most {count} segments"
    return f"splits into {segments}" + ("" if size is None else f" of at most {size:.9g} bytes")


def bound_text(bound_s: float) -> str:
    """Return the earliest possible end of the exchange as a line of text."""
    return (
        f"a bound that needs no search, for any number of segments: {bound_s * 1e6:.3f} us "
        "(no split ends earlier; the best may end later)"
    )


def forms_text(forms: Forms) -> list[str]:
    """Return the plan as lines to copy: calls of HCCL, a MindSpore option, a PyTorch DDP option."""
    buckets = len(forms.ddp_segments)
    ddp = f"{buckets} buckets, end {forms.ddp_end_s * 1e6:.3f} us"
    if forms.ddp_cap_mib < MIN_USEFUL_CAP_MIB:
        # gradients count from 0: the last index + 1 is their number
        alone = ": every gradient by itself" if buckets == forms.by_idx[-1] + 1 else ""
        ddp += f"; smaller than any useful cap{alone}"
    idx_note = "  # segments larger than asked: HCCL takes 8" if forms.hccl_too_large else ""
    # 5 segments but 4 shares: one segment was too small for a share
    dropped = len(forms.by_idx) - len(forms.by_size)
    size_note = f"  # {dropped} segments too small for a share are joined with a neighbour"
    size_note = size_note if dropped else ""
    return [
        f"set_split_strategy_by_idx({list(forms.by_idx)}){idx_note}",
        f"set_split_strategy_by_size({list(forms.by_size)}){size_note}",
        f"all_reduce_fusion_config={list(forms.mindspore)}",
        f"DistributedDataParallel(bucket_cap_mb={forms.ddp_cap_mib:.9g})  # {ddp}",
    ]


def tuning_text(tuning: GradientTuning) -> list[str]:
    """Return the result of the gradient tuner as lines of text."""
    profile = tuning.profile
    default_step_s = tuning.step_s(DEFAULT_BASELINE)
    plan_step_s = tuning.step_s()
    where = f"{tuning.topology.size} devices of {tuning.topology.name}"
    times = {
        "forward": profile.forward_s,
        "backward": profile.backward_s,
        "update": profile.update_s,
    }
    shares = ", ".join(f"{name} {time_s * 1e3:.6g} ms" for name, time_s in times.items())
    baseline_gloss = "HCCL's split where nobody tunes it"
    step_times = f"{default_step_s * 1e3:.6g} ms -> {plan_step_s * 1e3:.6g} ms a step"
    gain = f"{tuning.gain(DEFAULT_BASELINE):.2%}, {step_times}"
    source = "from the bank" if tuning.outcome == "hit" else "timed anew"
    count = len(profile.gradients)
    spent = f"{tuning.spent_s:.1f} s, profile {source}"
    return [
        f"{tuning.name}: {count} gradients on {where}, {spent}",
        f"gdat process finished. Performance improved by {gain}",
        f"  = {GAIN_FORMULA}; gdat is gradient tuning: which gradients share an all-reduce",
        f"  before: with {DEFAULT_BASELINE}, {baseline_gloss}; after: with this plan",
        f"  {shares}; {tuning.scaling:.1%} of one device's speed is left",
        *plan_table(tuning.plan, profile.gradients, DEFAULT_BASELINE),
        bound_text(tuning.bound_s),
        *forms_text(tuning.forms),
    ]


def section(tuning: GradientTuning) -> dict[str, Any]:
    """Return the result as a section of the JSON report.

    "basic" and "GDAT" have the keys of CANN's report; "ascend_lab" adds what only we compute.
    """
    profile = tuning.profile
    default_step_s = tuning.step_s(DEFAULT_BASELINE)
    plan_step_s = tuning.step_s()
    return {
        "basic": {"tuning_name": tuning.name, "tuning_time(s)": round(tuning.spent_s)},
        "GDAT": {
            "model_baseline_performance(ms)": round(default_step_s * 1e3, 9),
            "model_performance_improvement": f"{tuning.gain(DEFAULT_BASELINE):.2%}",
            "model_result_performance(ms)": round(plan_step_s * 1e3, 9),
            "gdat_tuning_result": "tuning successful",
        },
        "ascend_lab": {
            "note": "times are results of the model, not measurements",
            "chip": tuning.chip.name,
            "core_count": tuning.chip.core_count,
            "cluster": tuning.topology.name,
            "devices": tuning.topology.size,
            "tool_version": __version__,
            "improvement_formula": GAIN_FORMULA,
            "improvement_from": DEFAULT_BASELINE,
            "profile": tuning.outcome,
            "settings": {k: str(v) for k, v in tuning.settings.items()},
            "forward(us)": profile.forward_s * 1e6,
            "backward(us)": profile.backward_s * 1e6,
            "update(us)": profile.update_s * 1e6,
            "gradients": len(profile.gradients),
            "gradient_bytes": sum(row.size_bytes for row in profile.gradients),
            "scaling": tuning.scaling,
            "bound_us": tuning.bound_s * 1e6,
            "cost_table_error": tuning.cost_error,
            "step_gain": {name: tuning.gain(name) for name in tuning.plan.baselines},
            **tuning.plan.as_dict(),
            "forms": tuning.forms.as_dict(),
            "warnings": list(tuning.warnings),
        },
    }
