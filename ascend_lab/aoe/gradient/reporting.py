"""Job 4's results as text and as a section of the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ascend_lab import __version__
from ascend_lab.aoe.gradient.forms import Forms
from ascend_lab.aoe.gradient.planning import GradientPlan
from ascend_lab.aoe.gradient.rows import Gradient
from ascend_lab.aoe.gradient.tuning import GradientTuning

MOST_ROWS = 40
LEAST_CAP_MIB = 2**-10
"""Caps below it (1 KiB) get a warning."""
FORMULA = "(before - after) / after"
DEFAULT = "hccl_default"
"""What improvements are counted from: HCCL's split where nobody tunes it."""


def plan_table(found: GradientPlan, rows: Sequence[Gradient], before: str = "") -> list[str]:
    """Return, as lines, the segments, and the baselines with what the plan gains over them.

    `before`: the baseline that improvements are counted from, to be marked.
    """
    lines = [f"{'segment':>7} {'first':>6} {'last':>6} {'bytes':>14}  last gradient"]
    for number, (first, last) in enumerate(found.segments):
        if number == MOST_ROWS:
            lines.append(f"... and {len(found.segments) - MOST_ROWS} more")
            break
        size = sum(row.size_bytes for row in rows[first : last + 1])
        lines.append(f"{number:>7} {first:>6} {last:>6} {size:>14,}  {rows[last].name[:44]}")
    best = "optimal" if found.optimal else "best found"
    lines.append(
        f"{len(rows)} gradients in {len(found.segments)} segments: {best} (among {_limits(found)}),"
        f" end {found.end_s * 1e6:.3f} us, tail {found.tail_s * 1e6:.3f} us"
    )
    large = sum(found.max_bytes is not None and row.size_bytes > found.max_bytes for row in rows)
    if large:
        lines.append(
            f"  {large} gradients are larger than {found.max_bytes:.9g} bytes: each is a segment "
            "by itself"
        )
    lines.append("other ways to split, when they end, and what the plan gains over them:")
    for name, end in found.baselines.items():
        note = "  (= before)" if name == before else ""
        note += f"  (breaks the limit: not among {_limits(found)})" * (name in found.over_limit)
        lines.append(f"  {name:<15} {end * 1e6:>14.3f} us  {found.gain(name):>+9.2%}{note}")
    return lines


def _limits(found: GradientPlan) -> str:
    """Return which splits were allowed, in words."""
    count, size = found.max_segments, found.max_bytes
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
    shares = (
        f"  # {dropped} segments too small for a share are joined with a neighbour"
        if dropped
        else ""
    )
    return [
        f"set_split_strategy_by_idx({list(forms.by_idx)}){large}",
        f"set_split_strategy_by_size({list(forms.by_size)}){shares}",
        f"all_reduce_fusion_config={list(forms.mindspore)}",
        f"DistributedDataParallel(bucket_cap_mb={forms.ddp_cap_mib:.9g})  # {ddp}",
    ]


def tuning_text(found: GradientTuning) -> list[str]:
    """Return what job 4 found as lines."""
    t, p = found, found.profile
    before, after = t.step_s(DEFAULT), t.step_s()
    where = f"{t.topology.size} devices of {t.topology.name}"
    times = (p.forward_s, p.backward_s, p.update_s)
    parts = zip(("forward", "backward", "update"), times, strict=True)
    shares = ", ".join(f"{name} {time_s * 1e3:.4f} ms" for name, time_s in parts)
    gain = f"{t.gain(DEFAULT):.2%} = {FORMULA}, {before * 1e3:.4f} ms -> {after * 1e3:.4f} ms"
    count, spent = len(p.gradients), f"{t.spent_s:.1f} s, profile: {t.outcome}"
    return [
        f"{t.name}: {count} gradients on {where}, {spent}",
        f"gdat process finished. Performance improved by {gain} a step",
        f"  before: with {DEFAULT}, HCCL's split where nobody tunes it; after: with this plan",
        f"  {shares}; {t.scaling:.1%} of one device's speed is left",
        *plan_table(t.plan, p.gradients, DEFAULT),
        bound_text(t.bound_s),
        *forms_text(t.forms),
    ]


def section(found: GradientTuning) -> dict[str, Any]:
    """Return what job 4 found as a section of the report, in the published form and our own."""
    t, p = found, found.profile
    before, after = t.step_s(DEFAULT), t.step_s()
    return {
        "basic": {"tuning_name": t.name, "tuning_time(s)": round(t.spent_s)},
        "GDAT": {
            "model_baseline_performance(ms)": round(before * 1e3, 9),
            "model_performance_improvement": f"{t.gain(DEFAULT):.2%}",
            "model_result_performance(ms)": round(after * 1e3, 9),
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
