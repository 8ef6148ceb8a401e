"""Memory plans as rectangles, time across and address up, and what a plan saves behind L2."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ascend_lab.chip import load_chip
from ascend_lab.errors import InputError
from ascend_lab.graph import Compiled, buffers_of, compile_graph, plan_network
from ascend_lab.graph.memory import METHODS, Buffer, Plan
from ascend_lab.graph.zoo import build
from ascend_lab.lab.figures import style as st

CHIP = "Ascend910A"
NETWORKS = {"resnet50": 8, "bert_base": 8, "unet": 1}
"""Networks of the figures, and the batch each is drawn for."""
RULES = ("greedy-by-start", "greedy-by-size", "best of")
SHORT_TASKS = 2
"""A result that only the next task reads lives this long."""
TIME_LIMIT_S = 60.0
SOON: dict[str, Any] = {"facecolor": st.SKY, "edgecolor": st.INK, "hatch": ""}
WAITS: dict[str, Any] = {"facecolor": st.ORANGE, "edgecolor": st.INK, "hatch": "//"}


@cache
def network(name: str, batch: int) -> Compiled:
    """Return a network of the zoo as kernels of the Ascend910A, compiled once."""
    return compile_graph(build(name, batch=batch), load_chip(CHIP))


# -- plans as rectangles --------------------------------------------------------------------------
@st.styled
def fig_plans(buffers: Sequence[Buffer], plans: Mapping[str, Plan]) -> st.LabFigure:
    """Draw small plans of the same buffers side by side, every buffer with its id."""
    if not buffers or not plans:
        raise InputError("buffers, and at least one plan", f"{len(buffers)} and {len(plans)}")
    fig, axes = st.new_figure(ncols=len(plans), height_in=2.6, sharey=True)
    for ax, (name, plan) in zip(st.panels(axes), plans.items(), strict=True):
        _draw(ax, buffers, plan, labels=True)
        ax.set(title=f"{name}: {plan.height_bytes}", xlabel="task")
    top = max(plan.height_bytes for plan in plans.values())
    st.panels(axes)[0].set(ylabel="address (bytes)", ylim=(0, top * 1.03))
    bound = next(iter(plans.values())).lower_bound_bytes
    told = "; ".join(
        f"{name} needs {plan.height_bytes}: "
        + ", ".join(f"{b.id} at {plan.offsets[b.id]}" for b in buffers)
        for name, plan in plans.items()
    )
    alt = f"{len(buffers)} buffers, time by address; {bound} bytes live at the peak. {told}."
    return st.finish(fig, alt=alt)


@st.styled
def fig_arenas(
    networks: Mapping[str, int] | None = None, methods: Sequence[str] = RULES
) -> st.LabFigure:
    """Draw the plans of some networks (name: batch) in rows, one column a method, to one scale.

    Operators do not work in place here. Raises as `build` and `plan_network`.
    """
    chosen = networks or NETWORKS
    fig, axes = st.new_figure(len(chosen), len(methods), 0.7 + 1.55 * len(chosen))
    grid, told = np.reshape(axes, (len(chosen), -1)), []
    for row, (name, batch) in enumerate(chosen.items()):
        compiled = network(name, batch)
        buffers = buffers_of(compiled)
        plans = [_planned(compiled, method, in_place=False) for method in methods]
        top = max(plan.height_bytes for plan in plans) / 2**20
        for column, (method, plan) in enumerate(zip(methods, plans, strict=True)):
            ax = grid[row, column]
            _draw(ax, buffers, plan, unit=2**20)
            ax.set_ylim(0, top * 1.22)
            ax.set_title(f"{name}, {method}" if row == 0 or not column else method, fontsize=8)
            ax.text(0.98, 0.97, _verdict(plan), transform=ax.transAxes, ha="right", va="top")
            told.append(f"{name} of batch {batch} by {method} {_verdict(plan)}")
        grid[row, 0].set_ylabel("address (MiB)")
    for ax in grid[-1]:
        ax.set_xlabel("task")
    _legend(fig)
    alt = f"Heights of plans, and how far above the most live bytes: {'; '.join(told)}."
    return st.finish(fig, alt=alt)


@st.styled
def fig_arena(
    name: str = "resnet50", method: str = "greedy-by-size", batch: int = 8, in_place: bool = False
) -> st.LabFigure:
    """Draw one network's plan large; raises `InputError` for an unknown method, and as `build`."""
    if method not in METHODS:
        raise InputError(f"a method: {', '.join(METHODS)}", repr(method), "choose one")
    compiled = network(name, batch)
    plan = _planned(compiled, method, in_place=in_place)
    fig, ax = st.new_figure(height_in=3.6)
    _draw(ax, buffers_of(compiled), plan, unit=2**20)
    ax.set(ylim=(0, plan.height_bytes / 2**20 * 1.05), xlabel="task", ylabel="address (MiB)")
    sharing = "in place where allowed" if in_place else "nothing in place"
    ax.set_title(f"{name}, batch {batch}, {method}, {sharing}: {_verdict(plan)}")
    _legend(fig)
    bound = plan.lower_bound_bytes / 2**20
    alt = (
        f"{len(plan.offsets)} activations of {name}, batch {batch}, placed by {method}, {sharing}: "
        f"{_verdict(plan)}. At the peak {bound:.1f} MiB are alive."
    )
    return st.finish(fig, alt=alt)


def _planned(compiled: Compiled, method: str, in_place: bool) -> Plan:
    return plan_network(compiled, method, in_place=in_place, time_limit_s=TIME_LIMIT_S)


def _verdict(plan: Plan) -> str:
    above = f"+{plan.gap:.0%}" if plan.height_bytes > plan.lower_bound_bytes else "the bound"
    return f"{plan.height_bytes / 2**20:.1f} MiB, {above}"


def _legend(fig: st.LabFigure) -> None:
    """Explain the two kinds of rectangles and the line."""
    line = Line2D([], [], color=st.VERMILLION, linestyle="--", linewidth=1.4)
    line.set_label("most live bytes")
    looks = {"read by the next task only": SOON, "waits longer": WAITS}
    st.key(fig, looks, line, loc="outside lower center", ncols=3)


def _draw(
    ax: Axes, buffers: Sequence[Buffer], plan: Plan, unit: int = 1, labels: bool = False
) -> None:
    """Put the rectangles of a plan on the axes, and the lower bound as a dashed line."""
    for b in buffers:
        low, size = plan.offsets[b.id] / unit, b.size_bytes / unit
        look = WAITS if b.upper - b.lower > SHORT_TASKS else SOON
        line = 0.9 if labels else 0.4
        st.box(ax, b.lower, low, b.upper - b.lower, size, linewidth=line, **look)
        if labels:
            paper = {"facecolor": look["facecolor"], "edgecolor": "none", "pad": 1.0}
            x, y = (b.lower + b.upper) / 2, low + size / 2
            st.put(ax, x, y, str(b.id), fontsize=9, bbox=paper)
    ax.axhline(plan.lower_bound_bytes / unit, color=st.VERMILLION, linestyle="--", linewidth=1.4)
    ax.set_xlim(min(b.lower for b in buffers), max(b.upper for b in buffers))


# -- what L2 makes of it --------------------------------------------------------------------------
@st.styled
def fig_arena_traffic(
    sizes: Sequence[float], moved: Mapping[str, Sequence[float]], heights: Mapping[str, float]
) -> st.LabFigure:
    """Draw MiB through the memory interface per plan, over the MiB of L2.

    A dotted line stands where L2 is as large as the plan is high; `heights` may miss plans.
    Raises `InputError` for series of other lengths than `sizes`.
    """
    if not moved or any(len(values) != len(sizes) for values in moved.values()):
        got = ", ".join(f"{name}: {len(values)}" for name, values in moved.items())
        raise InputError(f"series of {len(sizes)} values", got or "none")
    fig, ax = st.new_figure(height_in=3.3)
    for i, (name, values) in enumerate(moved.items()):
        colour = st.PALETTE[i % len(st.PALETTE)]
        ax.plot(sizes, values, color=colour, marker="osD^v"[i % 5], label=name)
        if name in heights:
            ax.axvline(heights[name], color=colour, linestyle=":", linewidth=1.2)
            top = ax.get_xaxis_transform()
            ax.text(heights[name], 1.0, f"{heights[name]:.0f}", transform=top, ha="center")
    ax.set(xticks=sizes, xlabel="size of L2 (MiB)", ylabel="to and from memory (MiB)")
    ax.set_ylim(0)
    ax.legend(loc="lower left")
    told = "; ".join(
        f"{name} {', '.join(f'{value:.0f}' for value in values)}"
        + (f", {heights[name]:.1f} MiB high" if name in heights else "")
        for name, values in moved.items()
    )
    steps = ", ".join(f"{size:g}" for size in sizes)
    return st.finish(fig, alt=f"MiB to and from memory for an L2 of {steps} MiB: {told}.")
