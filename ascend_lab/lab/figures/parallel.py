"""Figures of parallel training: devices and pipeline, memory, loss scales, placement, buckets."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from ascend_lab.aoe.gradient import AlphaBeta, Cost, Gradient, end_of, plan
from ascend_lab.aoe.gradient.planning import MIB, by_cap
from ascend_lab.aoe.gradient.splits import Split, table_of
from ascend_lab.cluster.buckets import checked
from ascend_lab.cluster.parallel import timing, values
from ascend_lab.cluster.parallel.plan import (
    FORWARD,
    DeviceMemory,
    PipelineTime,
    orders,
    run_pipeline,
)
from ascend_lab.lab.checks.chapter23_26 import sent_bytes
from ascend_lab.lab.figures import style as st

DEPTH = (0.42, 0.34)
"""How far right and up a step along the data axis is drawn."""
AXIS_STYLE = {"tensor": (st.VERMILLION, "-"), "data": (st.BLUE, "--"), "pipeline": (st.GREEN, ":")}


def fig_plan_cube(
    data: int = 2,
    tensor: int = 2,
    pipeline: int = 2,
    micro_batches: int = 4,
    schedule: str = "1f1b",
) -> st.LabFigure:
    """Draw the devices of a plan, what one sends along each axis, and its pipeline in time."""
    degrees = {"data": data, "tensor": tensor, "pipeline": pipeline}
    batch = 256
    sent = sent_bytes(data, tensor, pipeline, layers=48, width=2560, length=512, batch=batch)
    traffic = dict(zip(("data", "tensor", "pipeline"), sent, strict=True))
    lists = orders(schedule, pipeline, micro_batches)
    timed = run_pipeline(lists, [1.0] * pipeline, [2.0] * pipeline)
    fig, (left, right) = st.new_figure(ncols=2, height_in=2.9, width_ratios=(1, 1.45))
    _cube(left, degrees, traffic)
    _timeline(right, timed)
    devices = data * tensor * pipeline
    summary = ", ".join(f"{_amount(b)} along {axis}" for axis, b in traffic.items())
    text = (
        f"{devices} devices, {data} data x {tensor} tensor x {pipeline} pipeline. In a step of"
        f" {batch} sequences the busiest sends {summary}. {pipeline} stages take {micro_batches}"
        f" micro-batches in {timed.end_s:g} units of time, {timed.bubble:.0%} of which is bubble."
    )
    return st.finish(fig, alt=text)


def _at(d: int, t: int, p: int) -> tuple[float, float]:
    """Return where a device stands on paper; stages go down, as rows of the timeline do."""
    return t + DEPTH[0] * d, DEPTH[1] * d - 1.1 * p


def _cube(ax: Any, degrees: Mapping[str, int], traffic: Mapping[str, float]) -> None:
    """Draw the devices with their numbers, the edges of each axis, and the bytes along it."""
    names = ("data", "tensor", "pipeline")
    counts = [degrees[name] for name in names]
    for place in product(*(range(n) for n in counts)):
        for i, name in enumerate(names):
            if place[i] + 1 < counts[i]:
                neighbour = list(place)
                neighbour[i] += 1
                (x0, y0) = _at(*place)
                (x1, y1) = _at(*neighbour)
                colour, line = AXIS_STYLE[name]
                ax.plot((x0, x1), (y0, y1), color=colour, ls=line, lw=2.2, zorder=1)
        number = place[1] + counts[1] * (place[0] + counts[0] * place[2])
        disc = {"boxstyle": "circle,pad=0.25", "facecolor": "#FFFFFF", "edgecolor": st.INK}
        st.put(ax, *_at(*place), str(number), zorder=2, bbox=disc)
    last = _at(counts[0] - 1, counts[1] - 1, counts[2] - 1)
    first = _at(0, 0, 0)
    below = _at(0, counts[1] - 1, counts[2] - 1)
    labels = (
        ("tensor", below[0] / 2, below[1] - 0.2, "center", "top", 0),
        ("data", (below[0] + last[0]) / 2 + 0.14, (below[1] + last[1]) / 2 - 0.1, "left", "top", 0),
        ("pipeline", first[0] - 0.2, (first[1] + below[1]) / 2, "right", "center", 90),
    )
    for name, x, y, ha, va, turn in labels:
        if degrees[name] > 1:
            text = f"{name}\n{_amount(traffic[name])}"
            ax.text(x, y, text, ha=ha, va=va, rotation=turn, fontsize=8.5)
    ax.set(title="sent by a device in a step", aspect="equal")
    ax.margins(0.12)
    ax.axis("off")


def _timeline(ax: Any, timed: PipelineTime) -> None:
    """Draw when each stage works on which micro-batch."""
    for job in timed.tasks:
        span = job.end_s - job.start_s
        look = {"fc": st.SKY if job.task.phase == FORWARD else st.ORANGE, "ec": st.INK, "lw": 0.5}
        ax.barh(job.device, span, left=job.start_s, height=0.72, **look)
        middle = job.start_s + span / 2
        st.put(ax, middle, job.device, str(job.task.micro_batch), fontsize=7)
    stages = range(len(timed.busy_s))
    idle = {"fc": st.LIGHT, "hatch": "//", "ec": st.GREY, "lw": 0, "zorder": 0}
    ax.barh(stages, timed.end_s, height=0.72, **idle)
    ax.set_yticks(stages, [f"stage {i}" for i in stages])
    ax.set(ylim=(len(stages) - 0.4, -0.6), xlim=(0, timed.end_s))
    ax.set_xlabel("time (forward 1, backward 2)")
    ax.set_title(f"forward, backward, and {timed.bubble:.0%} bubble")


def _amount(size_bytes: float) -> str:
    """Return bytes as a short text."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes:.0f} B"


def fig_plan_memory(
    memories: Mapping[str, DeviceMemory], capacity_bytes: float | None = None
) -> st.LabFigure:
    """Draw what a device holds under each plan, by purpose, and its memory as a line."""
    kinds = {
        "weights_bytes": ("weights", st.BLUE),
        "gradients_bytes": ("gradients", st.SKY),
        "optimizer_bytes": ("optimiser", st.YELLOW),
        "activations_bytes": ("activations", st.PURPLE),
    }
    fig, ax = st.new_figure(height_in=0.95 + 0.27 * len(memories))
    parts = {
        label: ([getattr(m, name) / 1e9 for m in memories.values()], colour, "")
        for name, (label, colour) in kinds.items()
    }
    totals = _stacked(ax, list(memories), parts, ".1f")
    if capacity_bytes is not None:
        ax.axvline(capacity_bytes / 1e9, color=st.VERMILLION, ls="--", lw=1.2, label="a device has")
    ax.set_xlabel("GB a device")
    ax.legend(loc="lower right")
    summary = ", ".join(
        f"{name} {total:.1f} GB" for name, total in zip(memories, totals, strict=True)
    )
    limit = f" A device has {capacity_bytes / 1e9:.0f} GB." if capacity_bytes else ""
    return st.finish(fig, alt=f"What a device must hold, by plan: {summary}.{limit}")


def _stacked(
    ax: Any, names: Sequence[str], parts: Mapping[str, tuple[Sequence[float], str, str]], form: str
) -> np.ndarray:
    """Draw a bar a name, of parts: label -> (lengths, colour, hatch); return their totals."""
    totals = np.zeros(len(names))
    for label, (lengths, colour, hatch) in parts.items():
        look = {"fc": colour, "hatch": hatch, "ec": st.INK, "lw": 0.4, "label": label}
        ax.barh(range(len(names)), lengths, left=totals, height=0.7, **look)
        totals += lengths
    for row, total in enumerate(totals):
        ax.text(total, row, f" {total:{form}}", va="center", fontsize=8)
    st.name_rows(ax, names)
    ax.margins(x=0.09)
    return totals


def fig_loss_scale(gradients: Mapping[str, np.ndarray]) -> st.LabFigure:
    """Draw which share of gradients fp16 loses for each scale of the loss: too small, too large."""
    largest = max(float(np.abs(g).max()) for g in gradients.values())
    powers = range(-32, 33, 2)
    gradients_above_noise = {name: g[np.abs(g) > 1e-15 * largest] for name, g in gradients.items()}
    flat = np.concatenate([g.ravel() for g in gradients_above_noise.values()])
    vanishing_percent = [100 * values.vanishing(gradients_above_noise, 2.0**k) for k in powers]
    too_large = float(np.finfo(np.float16).max)
    overflow_percent = [100 * float(np.mean(np.abs(flat) * 2.0**k > too_large)) for k in powers]
    fig, ax = st.new_figure(height_in=2.4)
    ax.plot(powers, vanishing_percent, marker="o", ms=3, label="vanish")
    ax.plot(powers, overflow_percent, marker="s", ms=3, label="overflow")
    safe = [
        k
        for k, a, b in zip(powers, vanishing_percent, overflow_percent, strict=True)
        if a < 1 and b == 0
    ]
    if safe:
        ax.axvspan(safe[0], safe[-1], color=st.LIGHT, zorder=0, label="< 1 % vanish, none overflow")
    ax.set(xlabel="scale, a power of 2", ylabel="% of gradients")
    ax.set_xticks([k for k in powers if k % 8 == 0], [f"$2^{{{k}}}$" for k in powers if k % 8 == 0])
    ax.legend(loc="center", bbox_to_anchor=(0.44, 0.6))
    zone = f"from 2^{safe[0]} to 2^{safe[-1]}" if safe else "for no scale shown"
    text = (
        f"Of {flat.size} gradients {vanishing_percent[0]:.0f} % vanish at 2^{powers[0]},"
        f" {overflow_percent[-1]:.0f} % overflow at 2^{powers[-1]}; fewer than 1 % vanish and none"
        f" overflow {zone}."
    )
    return st.finish(fig, alt=text)


def fig_placements(plans: Sequence[timing.PlanTime]) -> st.LabFigure:
    """Draw the step of each plan as a bar: work, exchanges, waiting, and what comes after."""
    fig, ax = st.new_figure(height_in=1.0 + 0.27 * len(plans))
    waits = [t.pipeline_s - t.compute_s - t.exchange_s for t in plans]
    parts = {
        "compute": ([1e3 * t.compute_s for t in plans], st.SKY, ""),
        "tensor exchanges": ([1e3 * t.exchange_s for t in plans], st.VERMILLION, "//"),
        "bubble and transfers": ([1e3 * wait_s for wait_s in waits], st.LIGHT, ""),
        "gradients and update": ([1e3 * t.exposed_s for t in plans], st.BLUE, "xx"),
    }
    names = [", ".join(t.plan.axes) for t in plans]
    totals = _stacked(ax, names, parts, ".0f")
    ax.set_xlabel("ms a step")
    fig.legend(loc="outside upper center", ncols=4, columnspacing=1.2)
    summary = "; ".join(f"{name} {total:.0f} ms" for name, total in zip(names, totals, strict=True))
    first = plans[0].plan
    text = f"Degrees {first.data} x {first.tensor} x {first.pipeline} (data, tensor, pipeline)"
    return st.finish(fig, alt=f"{text}, axes from the innermost outwards: {summary}.")


# -- the gradient tuner: buckets under backward, and what size of bucket does ----------------------
def lanes_of(split: Split, rows: Sequence[Gradient], cost: Cost) -> list[tuple[float, float]]:
    """Return when each bucket starts to be sent and how long that takes, in seconds."""
    table = table_of(rows)
    end = 0.0
    sends = []
    for (_, last), size in zip(split, table.sizes_bytes(split), strict=True):
        start = max(end, float(table.ready_s[last]))
        time_s = float(cost(float(size)))
        sends.append((start, time_s))
        end = start + time_s
    return sends


def fig_buckets(
    rows: Sequence[Gradient], cost: Cost, splits: Mapping[str, Sequence[Sequence[int]]]
) -> st.LabFigure:
    """Draw backward, and below it when each split sends its buckets; a dot where one is ready."""
    table = table_of(rows)
    backward = float(table.ready_s[-1])
    fig, ax = st.new_figure(height_in=0.9 + 0.42 * len(splits))
    ax.barh(0, 1e3 * backward, height=0.6, fc=st.SKY, ec=st.INK, lw=0.5)
    st.put(ax, 1e3 * backward / 2, 0, "backward")
    alt_parts = []
    for row, (name, cuts) in enumerate(splits.items(), 1):
        split = checked(cuts, len(rows))
        for i, (start, time_s) in enumerate(lanes_of(split, rows, cost)):
            look = {"ec": st.INK, "lw": 0.3, "fc": (st.BLUE, st.ORANGE)[i % 2]}
            ax.barh(row, 1e3 * time_s, left=1e3 * start, height=0.6, **look)
        end = end_of(split, rows, cost)
        ax.text(1e3 * end, row, f" {1e3 * end:.1f}", va="center", fontsize=8)
        alt_parts.append(f"{name} {len(split)} buckets, end {1e3 * end:.2f} ms")
    ax.axvline(1e3 * backward, color=st.VERMILLION, lw=1, ls="--", zorder=0)
    st.name_rows(ax, ["compute", *splits])
    ax.margins(x=0.09)
    ax.set(xlabel="ms from the start of backward", xlim=(0, None))
    ax.spines[["top", "right"]].set_visible(False)
    return st.finish(fig, alt=f"Backward takes {1e3 * backward:.2f} ms; {'; '.join(alt_parts)}.")


def fig_caps(
    rows: Sequence[Gradient], alpha_us: float = 400.0, gbytes_per_s: float = 1.0
) -> st.LabFigure:
    """Draw when all is sent if buckets close at a size, over that size, beside the best split."""
    cost = AlphaBeta(1e-6 * alpha_us, 1e-9 / gbytes_per_s)
    table = table_of(rows)
    total = float(table.sums_bytes[-1])
    caps = np.geomspace(max(total / 4000, 1.0), total, 41)
    ends = [1e3 * end_of(by_cap(table, float(cap)), rows, cost) for cap in caps]
    best = plan(rows, cost)
    fig, ax = st.new_figure(height_in=2.6)
    ax.plot(caps / MIB, ends, color=st.BLUE, ls="-", marker="o", ms=3)
    ax.axhline(1e3 * best.end_s, color=st.VERMILLION, ls="--", lw=1.2)
    ax.text(caps[0] / MIB, 1e3 * best.end_s, "best split", va="bottom", fontsize=8)
    ax.axhline(1e3 * best.ready_s, color=st.GREY, ls=":", lw=1.2)
    ax.text(caps[0] / MIB, 1e3 * best.ready_s, "backward", va="top", fontsize=8)
    ax.set(xscale="log", xlabel="bucket closed at (MiB)")
    ax.set(ylabel="all sent (ms)", ylim=(0, max(ends) * 1.05))
    ax.grid(color=st.LIGHT, lw=0.6)
    low = int(np.argmin(ends))
    text = f"alpha {alpha_us:g} us, {gbytes_per_s:g} GB/s: best single size {caps[low] / MIB:.2f}"
    text += f" MiB with {ends[low]:.2f} ms; smallest {ends[0]:.2f}, one bucket {ends[-1]:.2f}"
    alt = f"{text}; best split {1e3 * best.end_s:.2f}; backward {1e3 * best.ready_s:.2f}."
    return st.finish(fig, alt=alt)
