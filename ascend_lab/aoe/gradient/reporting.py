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
FORMULA = "(before - after) / after"
DEFAULT = "hccl_default"
"""What improvements are counted from: HCCL's split where nobody tunes it."""


def plan_table(found: GradientPlan, rows: Sequence[Gradient]) -> str:
    """Return the segments, and the baselines with what the plan gains over them."""
    lines = [f"{'segment':>7} {'first':>6} {'last':>6} {'bytes':>14}  last gradient"]
    for number, (first, last) in enumerate(found.segments):
        if number == MOST_ROWS:
            lines.append(f"... and {len(found.segments) - MOST_ROWS} more")
            break
        size = sum(row.size_bytes for row in rows[first : last + 1])
        lines.append(f"{number:>7} {first:>6} {last:>6} {size:>14,}  {rows[last].name[:44]}")
    best = "optimal" if found.optimal else "best found"
    lines.append(
        f"{len(rows)} gradients in {len(found.segments)} segments: {best}, end "
        f"{found.end_s * 1e6:.3f} us, tail {found.tail_s * 1e6:.3f} us"
    )
    for name, end in found.baselines.items():
        note = "  (over the limit)" if name in found.over_limit else ""
        lines.append(f"  {name:<15} {end * 1e6:>14.3f} us  {found.gain(name):>+9.2%}{note}")
    return "\n".join(lines)


def forms_text(forms: Forms) -> str:
    """Return the plan's forms as lines to copy."""
    ddp = f"{len(forms.ddp_segments)} buckets, end {forms.ddp_end_s * 1e6:.3f} us"
    return "\n".join(
        [
            f"set_split_strategy_by_idx({list(forms.by_idx)})",
            f"set_split_strategy_by_size({list(forms.by_size)})",
            f"all_reduce_fusion_config={list(forms.mindspore)}",
            f"DistributedDataParallel(bucket_cap_mb={forms.ddp_cap_mib:.9g})  # {ddp}",
        ]
    )


def tuning_text(found: GradientTuning) -> str:
    """Return what job 4 found as text."""
    t, p = found, found.profile
    before, after = t.step_s(DEFAULT), t.step_s()
    where = f"{t.topology.size} devices of {t.topology.name}"
    times = (p.forward_s, p.backward_s, p.update_s)
    parts = zip(("forward", "backward", "update"), times, strict=True)
    shares = ", ".join(f"{name} {time_s * 1e3:.4f} ms" for name, time_s in parts)
    gain = f"{t.gain(DEFAULT):.2%} = {FORMULA}, {before * 1e3:.4f} ms -> {after * 1e3:.4f} ms"
    count, spent = len(p.gradients), f"{t.spent_s:.1f} s, profile: {t.outcome}"
    lines = [
        f"{t.name}: {count} gradients on {where}, {spent}",
        f"gdat process finished. Performance improved by {gain} a step",
        f"  {shares}; {t.scaling:.1%} of one device's speed is left",
        plan_table(t.plan, p.gradients),
        f"  no split ends before {t.bound_s * 1e6:.3f} us",
        forms_text(t.forms),
    ]
    return "\n".join(lines)


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
