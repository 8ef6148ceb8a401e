"""Tuned networks: the waterfall from a naive compiler, credit, and where the rest of time goes."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ascend_lab.aoe.gradient import AlphaBeta, Cost, Gradient, end_of, plan
from ascend_lab.aoe.gradient.planning import MIB, by_cap
from ascend_lab.aoe.gradient.splits import Split, table_of
from ascend_lab.chip import load_chip
from ascend_lab.cluster.choice import checked
from ascend_lab.errors import InputError
from ascend_lab.graph import Graph, simulate_graph
from ascend_lab.graph.zoo.blocks import Net
from ascend_lab.lab.figures import style as st
from ascend_lab.lab.tuning import TECHNIQUES, Times, compile_with, factor_range, factors
from ascend_lab.lab.validation import PIPES, SHARE_LIMIT, TIME_LIMIT, ValidationRow

Steps = Sequence[tuple[str, float]]
"""(what was done, milliseconds after it), the first one before anything was done."""
VISIBLE = 0.005
"""Smaller shares are not drawn."""
TERM_STYLE: dict[str, dict[str, Any]] = {
    "bound": {"facecolor": st.GREY},
    "launches": {"facecolor": st.LIGHT, "hatch": ".."},
    "cube": {"facecolor": st.VERMILLION},
    "cube fill": {"facecolor": st.ORANGE, "hatch": "--"},
    "memory": {"facecolor": st.SKY, "hatch": "//"},
    "vector": {"facecolor": st.GREEN, "hatch": "\\\\"},
    "copies": {"facecolor": st.BLUE, "hatch": "xx"},
    "AI CPU": {"facecolor": st.PURPLE, "hatch": "oo"},
    "barriers": {"facecolor": st.LIGHT, "hatch": "||"},
    "waits": {"facecolor": st.PAPER, "hatch": "++"},
}
"""How the terms of `graph.ledger` are drawn."""


@st.styled
def fig_waterfall(networks: Mapping[str, tuple[Steps, float]]) -> st.LabFigure:
    """Draw the time of each network after one technique more, and its bound, in milliseconds.

    Heights are logarithmic: a bar is as tall as its factor is large. Raises `InputError` for none.
    """
    if not networks or any(not steps for steps, _ in networks.values()):
        raise InputError("a network with steps", str(networks), "give some")
    fig, axes = st.new_figure(nrows=len(networks), height_in=2.7 * len(networks))
    said = []
    for ax, (name, (steps, bound_ms)) in zip(st.panels(axes), networks.items(), strict=True):
        _waterfall(ax, steps, bound_ms)
        ax.set_title(name, loc="left")
        ax.set_ylabel("ms (model)")
        rows = ", ".join(f"{label} {ms:.3g}" for label, ms in steps)
        said.append(f"{name}: {rows}; bound {bound_ms:.3g}")
    return st.finish(fig, alt=f"Milliseconds after each technique. {'. '.join(said)}.")


def _waterfall(ax: Axes, steps: Steps, bound_ms: float) -> None:
    low, high = bound_ms / 1.3, steps[0][1] * 1.5
    ax.set(yscale="log", ylim=(low, high), xlim=(-0.6, len(steps) + 0.6))
    ax.bar(0, steps[0][1] - low, bottom=low, width=0.7, facecolor=st.GREY, edgecolor=st.INK)
    for at, ((_, before), (_, after)) in enumerate(pairwise(steps), 1):
        worse = after > before
        colour, hatch = (st.VERMILLION, "xx") if worse else (st.SKY, "")
        bottom, top = sorted((before, after))
        ax.bar(at, top - bottom, bottom=bottom, width=0.7, fc=colour, ec=st.INK, hatch=hatch)
        ax.text(at, bottom * 0.95, f"{before / after:.2f}x", ha="center", va="top", fontsize=8)
    end = len(steps)
    ax.bar(end, steps[-1][1] - low, bottom=low, width=0.7, facecolor=st.GREEN, edgecolor=st.INK)
    ax.axhline(bound_ms, color=st.INK, ls=(0, (3, 2)), lw=1)
    ax.text(0.5, bound_ms * 1.03, f"bound {bound_ms:.3g}", fontsize=8, va="bottom")
    for at, ms in ((0, steps[0][1]), (end, steps[-1][1])):
        up = ax.annotate(f"{ms:.3g}", (at, ms), (0, 3), textcoords="offset points", ha="center")
        up.set(fontsize=8, fontweight="bold")
    labels = [*(label for label, _ in steps), "what is left"]
    ax.set_xticks(range(end + 1), labels, rotation=25, ha="right")
    ax.tick_params(axis="x", length=0)
    ticks = [t for t in (1, 3, 10, 30, 100, 300, 1000, 3000) if low <= t <= high]
    ax.set_yticks(ticks, [f"{t:,}" for t in ticks])
    ax.minorticks_off()


@st.styled
def fig_credit(times: Times, names: Sequence[str] = TECHNIQUES) -> st.LabFigure:
    """Draw the factor each technique is credited with, and its range over all orders."""
    found = factors(times, names)
    fig, ax = st.new_figure(height_in=2.6)
    said = []
    for at, name in enumerate(names):
        least, most = factor_range(times, name, names)
        ax.plot([least, most], [at, at], color=st.GREY, lw=5, solid_capstyle="butt", ls="-")
        ax.plot(found[name], at, "o", color=st.VERMILLION, ms=8, mec=st.INK)
        ax.text(most * 1.03, at, f"{found[name]:.2f}x", va="center", fontsize=8)
        said.append(f"{name} {found[name]:.2f} ({least:.2f} to {most:.2f})")
    ax.axvline(1, color=st.INK, lw=0.8, ls=(0, (3, 2)))
    ax.set_xscale("log")
    ax.set_yticks(range(len(names)), names)
    low, high = ax.get_xlim()
    ticks = [t for t in (0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8) if low <= t <= high]
    ax.set_xticks(ticks, [f"{t:g}x" for t in ticks], minor=False)
    ax.minorticks_off()
    ax.set_xlim(low, high * 1.12)
    ax.invert_yaxis()
    ax.set_xlabel("times faster: least and most over all orders (grey), credit (dot)")
    return st.finish(fig, alt=f"Credit, and range over all orders: {', '.join(said)}.")


@st.styled
def fig_ledger(ledgers: Mapping[str, Mapping[str, float]], *, shares: bool = True) -> st.LabFigure:
    """Draw the ledger of each network as one bar: its terms as shares of its, or the longest, time.

    A ledger is what `graph.ledger` returns: seconds by term. Raises `InputError` for none.
    """
    if not ledgers or not all(sum(found.values()) > 0 for found in ledgers.values()):
        raise InputError("ledgers of networks that take time", str(dict(ledgers)), "give some")
    fig, ax = st.new_figure(height_in=0.45 * len(ledgers) + 1.5)
    said, used = [], set[str]()
    looks = {term: {"edgecolor": st.INK, **style} for term, style in TERM_STYLE.items()}
    longest_s = max(sum(found.values()) for found in ledgers.values())
    for at, (name, found) in enumerate(ledgers.items()):
        total_s = sum(found.values())
        scale = 1.0 if shares else total_s / longest_s
        shown = {term: s / total_s for term, s in found.items() if s >= VISIBLE * total_s}
        used |= shown.keys()
        st.stack(ax, at, [(scale * share, {"height": 0.6, **looks[t]})
                         for t, share in shown.items()])  # fmt: skip
        times = f"{total_s / found['bound']:.2g}x" if found["bound"] else ""
        ax.text(scale + 0.01, at, f"{total_s * 1e3:.3g} ms\n{times}", va="center", fontsize=8)
        split = ", ".join(f"{term} {share:.0%}" for term, share in shown.items())
        said.append(f"{name} {total_s * 1e3:.3g} ms: {split}")
    st.name_rows(ax, ledgers)
    whose = "the" if shares else "the longest"
    label = f"share of {whose} time; right: time, and how many times the bound"
    ax.set(xlim=(0, 1.13), xlabel=label)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    shades = {term: look for term, look in looks.items() if term in used}
    st.key(fig, shades, loc="outside upper center", ncols=4)
    return st.finish(fig, alt=f"Where the time goes. {'; '.join(said)}.")


@lru_cache(maxsize=4)
def one_block(batch: int = 16, size: int = 112, width: int = 64) -> Graph:
    """Return the first convolution of a ResNet, one block of two 3 x 3 ones, and a classifier."""
    net = Net("one_block", "fp32")
    x = net.conv_norm(net.images(batch, 3, size), width, 7, stride=2, name="stem")
    y = net.conv_norm(x, width, 3, name="1")
    y = net.conv_norm(y, width, 3, act="", name="2")
    return net.finish(net.head(net.act(net.add(y, x, name="add"), "relu", name="relu"), 10))


@st.styled
def fig_switches(
    rewriting: bool = True,
    layouts: bool = True,
    fusion: bool = True,
    large_tiles: bool = True,
    double_buffers: bool = True,
    chip: str = "Ascend310",
) -> st.LabFigure:
    """Draw the kernels of a small network by a compiler with these techniques, in their order."""
    given = (rewriting, layouts, fusion, large_tiles, double_buffers)
    on = [name for name, is_on in zip(TECHNIQUES, given, strict=True) if is_on]
    device = load_chip(chip)
    line = simulate_graph(compile_with(one_block(), device, on))
    best = simulate_graph(compile_with(one_block(), device, TECHNIQUES)).time_s
    fig, ax = st.new_figure(height_in=1.9)
    kinds = {"conv2d": "convolution", "trans_data": "conversion"}
    colours = {"convolution": st.VERMILLION, "conversion": st.PIPE_STYLE["MTE2"].colour}
    looks = {k: {"fc": c, "ec": st.INK} for k, c in (colours | {"other": st.GREEN}).items()}
    parts = [(o.time_s * 1e3, kinds.get(o.type.split("+")[0], "other")) for o in line.operators]
    left = st.stack(ax, 0, [(ms, {**looks[kind], "height": 0.6}) for ms, kind in parts])
    ax.axvline(best * 1e3, color=st.INK, lw=2, ls=(0, (3, 2)))
    ax.set(yticks=[], xlabel="ms (model); dashes: all techniques on", xlim=(0, left * 1.02))
    st.key(fig, looks, loc="outside lower center", ncols=3)
    factor = line.time_s / best
    ax.set_title(f"{len(line.operators)} kernels, {left:.2f} ms, {factor:.2f}x", loc="left")
    off = ", ".join(n for n in TECHNIQUES if n not in on)
    how = f"without {off}" if off else "with all techniques"
    return st.finish(
        fig,
        alt=f"A network of one block on {chip} {how}: {len(line.operators)} kernels, "
        f"{left:.2f} ms, {factor:.2f} times the {best * 1e3:.2f} ms of the default compiler.",
    )


# -- the gradient tuner: buckets under backward, and what size of bucket does ----------------------
def lanes_of(split: Split, rows: Sequence[Gradient], cost: Cost) -> list[tuple[float, float]]:
    """Return when each bucket starts to be sent and how long that takes, in seconds."""
    table, end, found = table_of(rows), 0.0, []
    for (_, last), size in zip(split, table.sizes_bytes(split), strict=True):
        start, time_s = max(end, float(table.ready_s[last])), float(cost(float(size)))
        found.append((start, time_s))
        end = start + time_s
    return found


@st.styled
def fig_buckets(
    rows: Sequence[Gradient], cost: Cost, splits: Mapping[str, Sequence[Sequence[int]]]
) -> st.LabFigure:
    """Draw backward, and below it when each split sends its buckets; a dot where one is ready.

    Raises `InputError` without a split.
    """
    if not splits:
        raise InputError("at least one split to draw", "none", "name one")
    table = table_of(rows)
    backward = float(table.ready_s[-1])
    fig, ax = st.new_figure(height_in=0.9 + 0.42 * len(splits))
    ax.barh(0, 1e3 * backward, height=0.6, fc=st.SKY, ec=st.INK, lw=0.5)
    st.put(ax, 1e3 * backward / 2, 0, "backward")
    said = []
    for row, (name, given) in enumerate(splits.items(), 1):
        split = checked(given, len(rows))
        for i, (start, time_s) in enumerate(lanes_of(split, rows, cost)):
            look = {"ec": st.INK, "lw": 0.3, "fc": (st.BLUE, st.ORANGE)[i % 2]}
            ax.barh(row, 1e3 * time_s, left=1e3 * start, height=0.6, **look)
        end = end_of(split, rows, cost)
        ax.text(1e3 * end, row, f" {1e3 * end:.1f}", va="center", fontsize=8)
        said.append(f"{name} {len(split)} buckets, end {1e3 * end:.2f} ms")
    ax.axvline(1e3 * backward, color=st.VERMILLION, lw=1, ls="--", zorder=0)
    st.name_rows(ax, ["compute", *splits])
    ax.margins(x=0.09)
    ax.set(xlabel="ms from the start of backward", xlim=(0, None))
    ax.spines[["top", "right"]].set_visible(False)
    return st.finish(fig, alt=f"Backward takes {1e3 * backward:.2f} ms; {'; '.join(said)}.")


@st.styled
def fig_caps(
    rows: Sequence[Gradient], alpha_us: float = 400.0, gbytes_per_s: float = 1.0, points: int = 41
) -> st.LabFigure:
    """Draw when all is sent if buckets close at a size, over that size, beside the best split."""
    if alpha_us < 0 or gbytes_per_s <= 0 or points < 2:
        got = f"{alpha_us} us, {gbytes_per_s} GB/s, {points} points"
        raise InputError("alpha of at least 0, a rate above 0, two points", got, "change them")
    cost, table = AlphaBeta(1e-6 * alpha_us, 1e-9 / gbytes_per_s), table_of(rows)
    total = float(table.sums_bytes[-1])
    caps = np.geomspace(max(total / 4000, 1.0), total, points)
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
    return st.finish(
        fig,
        alt=f"{text} MiB with {ends[low]:.2f} ms; smallest {ends[0]:.2f}, one bucket "
        f"{ends[-1]:.2f}; best split {1e3 * best.end_s:.2f}; backward {1e3 * best.ready_s:.2f}.",
    )


def toy_rows(ready: Sequence[float], sizes: Sequence[int]) -> tuple[Gradient, ...]:
    """Return gradients g0, g1, ... from ready times in seconds and sizes in bytes."""
    pairs: Any = zip(ready, sizes, strict=True)
    return tuple(Gradient(f"g{i}", float(r), int(s)) for i, (r, s) in enumerate(pairs))


# The model against published measurements, as a picture.
@st.styled
def fig_validation(rows: Sequence[ValidationRow]) -> st.LabFigure:
    """Draw, per published row, the error of the time and of each pipe's busy share.

    Shaded bands mark the goals; a filled marker lies inside its band, an open one outside.
    """
    shown = list(rows)
    fig, (left, right) = st.new_figure(1, 2, height_in=0.9 + 0.26 * len(shown), sharey=True)
    for y, row in enumerate(shown):
        _mark(left, 100 * row.time_error, y, st.BLUE, "o", abs(row.time_error) <= TIME_LIMIT)
        for pipe, (colour, marker) in zip(PIPES, _MARKS, strict=True):
            error = row.share_errors[pipe]
            _mark(right, 100 * error, y, colour, marker, abs(error) <= SHARE_LIMIT)
    for ax, limit, label in (
        (left, TIME_LIMIT, "time: model / published - 1, %"),
        (right, SHARE_LIMIT, "busy share: model - publ., points"),
    ):
        ax.axvspan(-100 * limit, 100 * limit, color=st.LIGHT, zorder=0)
        ax.axvline(0, color=st.GREY, linewidth=0.8)
        ax.set_xlabel(label)
    st.name_rows(left, [row.name for row in shown])
    _legend(fig, right)
    return st.finish(fig, alt=_alt(shown))


_MARKS = ((st.BLUE, "o"), (st.ORANGE, "s"), ("#009E73", "^"), ("#CC79A7", "D"))


def _mark(ax: Any, x: float, y: int, colour: str, marker: str, inside: bool) -> None:
    face = colour if inside else "#FFFFFF"
    ax.plot([x], [y], marker=marker, color=colour, markerfacecolor=face, linestyle="none")


def _legend(fig: Any, ax: Any) -> None:
    handles = [
        ax.plot([], [], marker=m, color=c, linestyle="none", label=pipe)[0]
        for pipe, (c, m) in zip(PIPES, _MARKS, strict=True)
    ]
    fig.legend(handles=handles, loc="outside upper right", ncols=len(handles))


def _alt(rows: Sequence[ValidationRow]) -> str:
    inside = sum(not row.misses for row in rows)
    times = ", ".join(f"{row.name} {row.time_error:+.0%}" for row in rows)
    wide = (f"{p} of {row.name} {e:+.0%}" for row in rows for p, e in row.share_errors.items()
            if abs(e) > SHARE_LIMIT)  # fmt: skip
    return (
        f"Errors of the model on {len(rows)} published rows, {inside} of them inside both bands. "
        f"Times: {times}. Shares outside: {', '.join(wide) or 'none'}."
    )
