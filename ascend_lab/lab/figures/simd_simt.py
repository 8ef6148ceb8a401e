"""Figures of chapter 1 that compare machines: streams with bars, the bracket, TOPS per watt."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.lines import Line2D

from ascend_lab.lab import machines as mc
from ascend_lab.lab.figures import style as st

CAUSES: dict[str, dict[str, Any]] = {
    "compute": {"facecolor": st.BLUE, "hatch": "", "edgecolor": st.INK},
    "move": {"facecolor": st.ORANGE, "hatch": "//", "edgecolor": st.INK},
    "wait": {"facecolor": st.LIGHT, "hatch": "..", "edgecolor": st.INK},
}
"""Look of each cause of a cycle, the same in every figure of the chapter."""
UNIT_MARKS = {"scalar": ("v", st.ORANGE), "vector": ("s", st.GREEN), "matrix": ("o", st.PURPLE)}


def fig_streams(runs: Sequence[mc.Run], peaks: Sequence[float], elements: int) -> st.LabFigure:
    """Draw one column per run: its instruction stream, how its time divides, and how long it is.

    `peaks` are the machines' operations per cycle, `elements` the size of the program.
    """
    fig, axes = st.new_figure(2, len(runs), height_in=4.5, height_ratios=(4.0, 1.9))
    grid = axes[1, 0].get_gridspec()
    for ax in axes[1]:
        ax.remove()
    for ax, run, peak in zip(axes[0], runs, peaks, strict=True):
        _stream_column(ax, run, peak, elements)
    below = fig.add_subplot(grid[1, :])
    shortest = min(one.cycles for one in runs)
    looks = {cause: {**look, "height": 0.62, "linewidth": 0.4} for cause, look in CAUSES.items()}
    for row, run in enumerate(runs):
        parts = [(getattr(run.bar, cause) / elements, look) for cause, look in looks.items()]
        end = st.stack(below, row, parts)
        below.text(end, row, f"  {run.cycles / shortest:.1f}x", va="center", fontsize=8)
    st.name_rows(below, [one.machine for one in runs])
    below.set_xlim(0, max(one.cycles for one in runs) / elements * 1.09)
    below.set_xlabel("cycles per element, all four to one scale")
    st.key(fig, CAUSES, loc="outside upper center", ncols=3)
    alt_parts = []
    for run, peak in zip(runs, peaks, strict=True):
        shares = ", ".join(f"{getattr(run.bar, c) / run.cycles:.0%} {c}" for c in CAUSES)
        took = f"{run.instructions:,} instructions, {run.cycles / elements:.2f} cycles per element"
        reach = f"{run.ops_per_cycle / peak:.1%} of its peak of {peak:g} operations per cycle"
        alt_parts.append(f"{run.machine}: {took} ({shares}), {reach}")
    alt = f"{runs[0].program} of {elements:,} elements on each machine. {'; '.join(alt_parts)}."
    return st.finish(fig, alt=alt)


def _stream_column(ax: Any, run: mc.Run, peak: float, elements: int) -> None:
    """Write the instructions from the top down and end in the bar of where the time went."""
    ax.set_axis_off()
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.text(0, 1, run.machine, weight="bold", va="top")
    ax.text(0, 0.93, f"peak {peak:,.0f} ops/cycle", va="top", fontsize=8)
    small = {"va": "top", "fontsize": 6.5, "family": "DejaVu Sans Mono"}
    for row, line in enumerate(run.stream):
        y = 0.82 - 0.09 * row
        ax.text(0, y, line.text, **small)
        ax.text(1.0, y, f"x{line.count:,}", ha="right", color=st.BLUE, **small)
    looks = {cause: {**look, "height": 0.12, "linewidth": 0.6} for cause, look in CAUSES.items()}
    st.stack(ax, 0.13, [(getattr(run.bar, c) / run.cycles, look) for c, look in looks.items()])
    ax.text(0.5, 0.05, f"{run.cycles / elements:.2f} cycles/element", ha="center", va="top")


def mask_of(n: int, density: float, run_length: int) -> np.ndarray:
    """Return n booleans, a share `density` of them true, equal in runs of `run_length`."""
    rng = np.random.default_rng(0)
    runs = rng.permutation(-(-n // run_length)) < round(density * -(-n // run_length))
    return np.repeat(runs, run_length)[:n]


def fig_bound(
    lanes: int = 64, mask_density: float = 0.5, run_length: int = 1, bytes_per_cycle: int = 32
) -> st.LabFigure:
    """Draw the parts, the bracket from longest part to their sum, and the time of a branchy kernel.

    The kernel has 8 multiply-adds on each side of an `if`, for 65,536 elements; `run_length`
    neighbours take the same side.
    """
    kernel = mc.two_sided(65536)
    inputs = mc.sample_inputs(kernel) | {"mask": mask_of(kernel.n, mask_density, run_length)}
    port = mc.Port(rate_bytes_per_cycle=bytes_per_cycle)
    machines = (mc.Simd(vector_bytes=4 * lanes, port=port), mc.Simt(lanes=lanes, port=port))
    runs = [mc.run(machine, kernel, inputs) for machine in machines]
    fig, axes = st.new_figure(2, 1, height_in=3.4, sharex=True)
    alt_parts = [_bracket(ax, run, kernel.n) for ax, run in zip(axes, runs, strict=True)]
    axes[1].set_xlim(0, max(one.parts.total for one in runs) / kernel.n * 1.45)
    axes[1].set_xlabel("cycles per element")
    diverged = runs[1].counters["divergent_warps"] / runs[1].counters["warps"]
    setting = (
        f"{lanes} lanes, {mask_density:.0%} of the mask set in runs of {run_length}, "
        f"{bytes_per_cycle} bytes per cycle; {diverged:.0%} of the warps diverge."
    )
    return st.finish(fig, alt=" ".join([setting, *alt_parts]))


def _bracket(ax: Any, run: mc.Run, elements: int) -> str:
    """Draw the parts of a run and its bracket; return them in words."""
    for row, (cause, look) in enumerate(CAUSES.items()):
        ax.barh(row, getattr(run.parts, cause) / elements, height=0.6, linewidth=0.6, **look)
    ends = [run.parts.longest / elements, run.parts.total / elements]
    ax.plot(ends, [3, 3], color=st.GREY, linewidth=5, solid_capstyle="butt")
    ax.plot(run.cycles / elements, 3, marker="D", color=st.INK, markersize=6)
    ax.text(ends[1], 3, f"  {run.cycles / elements:.3f}, {run.parts.bound_by} bound", va="center")
    ax.set_yticks(range(4), [*CAUSES, "bracket"])
    ax.set_ylim(3.6, -0.6)
    ax.set_title(run.machine, loc="left")
    parts = ", ".join(f"{cause} {getattr(run.parts, cause) / elements:.3f}" for cause in CAUSES)
    took = f"it takes {run.cycles / elements:.3f}, {run.parts.bound_by} bound."
    return f"{run.machine}: {parts} cycles per element; {took}"


def fig_tops_per_watt() -> st.LabFigure:
    """Draw peak operations per second and watt of real chips, by kind of unit and number format."""
    rows = mc.tops_per_watt()
    fig, ax = st.new_figure(height_in=4.0)
    for y, row in enumerate(rows):
        marker, colour = UNIT_MARKS[row.kind]
        value = row.tops_per_watt
        if value is None:
            ax.text(0.0023, y, "in none of our sources", va="center", fontsize=8, color=st.GREY)
            continue
        face = "#FFFFFF" if row.trust == "assumed" else colour
        ax.plot(value, y, marker=marker, color=colour, markerfacecolor=face, markersize=7)
        ax.text(value * 1.18, y, f"{value:.2g}", va="center", fontsize=8)
    st.name_rows(ax, [f"{row.title}, {row.number_format}" for row in rows])
    ax.set(xscale="log", xlim=(0.002, 5), xlabel="peak TOPS per watt of the whole chip")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.grid(axis="x")
    marks = {f"{kind} unit": (mark, c, c) for kind, (mark, c) in UNIT_MARKS.items()}
    marks["hollow: assumed"] = ("s", st.GREY, "#FFFFFF")
    for label, (marker, colour, face) in marks.items():
        ax.plot([], [], marker=marker, color=colour, mfc=face, linestyle="none", label=label)
    fig.legend(loc="outside lower center", ncols=4)
    value_texts = (
        "in none of our sources" if r.tops_per_watt is None else f"{r.tops_per_watt:.2g}"
        for r in rows
    )
    pairs = zip(rows, value_texts, strict=True)
    alt = "; ".join(f"{row.title} {row.kind} unit {row.number_format} {v}" for row, v in pairs)
    return st.finish(fig, alt=f"Peak TOPS per watt: {alt}.")


# -- figures of chapter 1 that look inside a machine: lanes, sectors, warps, a systolic array ------
WARP = 32
SIDES: dict[str, dict[str, Any]] = {
    "all": {"facecolor": st.GREY, "hatch": ""},
    "then": {"facecolor": st.BLUE, "hatch": ""},
    "else": {"facecolor": st.ORANGE, "hatch": "///"},
}


def fig_divergence(mask: Sequence[bool], depth: int = 3) -> st.LabFigure:
    """Draw the instructions of two warps, lane by lane, for a mask as given and sorted."""
    mask_as_given = np.asarray(mask, bool)[: 2 * WARP]
    orders = {
        "mask as it comes": mask_as_given,
        "the same mask, sorted": np.sort(mask_as_given)[::-1],
    }
    fig, axes = st.new_figure(1, 2, height_in=2.7, sharey=True)
    counts = []
    for ax, (title, lanes) in zip(axes, orders.items(), strict=True):
        counts.append(0)
        for warp, takes_then in enumerate(np.split(lanes, 2)):
            rows = [("all", np.ones_like(takes_then))]  # what the warp issues: side, lanes
            for side, taken in (("then", takes_then), ("else", ~takes_then)):
                if taken.any():
                    rows += [(side, taken)] * depth
            _lane_rows(ax, warp, rows)
            counts[-1] += len(rows)
        ax.set(xlim=(-1, 2 * WARP + 3), ylim=(2 * depth + 1.6, -1.2), xticks=[])
        ax.set_title(f"{title}: {counts[-1]} issues", loc="left")
        ax.spines[["left", "bottom"]].set_visible(False)
    axes[0].set_ylabel("issue slot of the warp")
    axes[0].set_yticks(np.arange(2 * depth + 1) + 0.5, range(1, 2 * depth + 2))
    labels = {"all": "the test, all lanes", "then": "then side", "else": "else side"}
    looks = {labels[s]: {"edgecolor": st.INK, "linewidth": 0.6, **SIDES[s]} for s in SIDES}
    looks["lane switched off"] = {"facecolor": "#FFFFFF", "edgecolor": st.GREY}
    st.key(fig, looks, loc="outside lower center", ncols=4)
    alt = (
        f"Two warps of {WARP} lanes run an if with {depth} instructions on each side; "
        f"{int(mask_as_given.sum())} of {mask_as_given.size} lanes take the then side. In the "
        f"order given they issue {counts[0]} instructions, with the mask sorted {counts[1]}."
    )
    return st.finish(fig, alt=alt)


def _lane_rows(ax: Any, warp: int, rows: Sequence[tuple[str, np.ndarray]]) -> None:
    """Draw the issues of a warp from top to bottom, a cell for each lane."""
    start = warp * (WARP + 2)
    ax.text(start + WARP / 2, -0.25, f"warp {warp}", ha="center", fontsize=8)
    for y, (side, lanes) in enumerate(rows):
        on = SIDES[side] | {"edgecolor": st.INK}
        off = {"facecolor": "#FFFFFF", "edgecolor": st.LIGHT}
        for lane, active in enumerate(lanes):
            st.box(ax, start + lane, y + 0.1, 1, 0.8, linewidth=0.3, **(on if active else off))


def fig_sectors(patterns: Mapping[str, np.ndarray]) -> st.LabFigure:
    """Draw which 32-byte sectors one warp touches for each pattern of 32 element numbers."""
    fig, ax = st.new_figure(height_in=0.75 + 0.42 * len(patterns))
    sentences = []
    size = 1024
    item_bytes = 4
    for row, (name, elements) in enumerate(patterns.items()):
        address = np.asarray(elements).reshape(1, -1) * item_bytes
        sectors = int(mc.units_touched(address, np.ones_like(address, bool), 32)[0])
        used_share = len(elements) * item_bytes / (32 * sectors)
        for sector in range(size // 32):
            hit = bool((address // 32 == sector).any())
            face, hatch = (st.SKY, "//") if hit else ("#FFFFFF", "")
            look = {"edgecolor": st.GREY, "linewidth": 0.5, "facecolor": face, "hatch": hatch}
            st.box(ax, 32 * sector, row - 0.3, 32, 0.6, **look)
        for lane_address in address[0]:
            st.box(ax, lane_address, row - 0.3, item_bytes, 0.6, facecolor=st.INK, linewidth=0)
        text = f"{sectors} sectors, {100 * used_share:.3g}%"
        ax.text(size + 12, row, f"{text} used", va="center", fontsize=8)
        sentences.append(f"{name}: {text} of the bytes used")
    ax.set_yticks(range(len(patterns)), list(patterns))
    ax.set(xlim=(0, size * 1.36), ylim=(len(patterns) - 0.4, -0.6), xticks=range(0, size + 1, 128))
    ax.set(xlabel="byte address; black: asked for, hatched: moved (whole 32-byte sectors)")
    ax.spines["left"].set_visible(False)
    ax.tick_params(left=False)
    return st.finish(fig, alt=f"Sectors touched by the 32 lanes of a warp. {'; '.join(sentences)}.")


def fig_warps(machine: mc.Simt, residents: Sequence[int]) -> st.LabFigure:
    """Draw the same eight warps of saxpy with more and more of them resident at a time."""
    warps = 8
    kernel = mc.saxpy(warps * machine.warp_lanes)
    plans = {count: mc.simt.schedule(kernel, machine, warps, count) for count in residents}
    ends = {count: mc.simt.last_cycle(spans) for count, spans in plans.items()}
    fig, axes = st.new_figure(len(plans), 1, height_in=0.8 + 0.85 * len(plans), sharex=True)
    for ax, (count, spans) in zip(axes, plans.items(), strict=True):
        for span in spans:
            if span.text.startswith("ld"):
                length = span.ready - span.start
                ax.barh(span.warp, length, left=span.start, height=0.14, color=st.GREY)
            ax.barh(span.warp, 1, left=span.start, height=0.85, color=st.BLUE)
        plural = "warps" if count > 1 else "warp"
        ax.set_title(f"{count} {plural} at a time: {ends[count]} cycles", loc="left")
        ax.axvline(ends[count], color=st.INK, linewidth=0.8, linestyle=":")
        ax.set(ylim=(warps - 0.4, -0.6), yticks=[])
    axes[-1].set_xlabel("cycle")
    axes[len(plans) // 2].set_ylabel("one row per warp")
    load = Line2D([], [], label="a load is on its way", color=st.GREY, linewidth=1.5)
    issue = {"an instruction issues": {"facecolor": st.BLUE}}
    st.key(fig, issue, load, loc="outside lower center", ncols=2)
    times = ", ".join(f"{count} resident {ends[count]} cycles" for count in residents)
    alt = (
        f"{warps} warps of saxpy with a load latency of {machine.port.latency_cycles} cycles: "
        f"{times}. Blue issue cells fill the gaps that the grey load lines leave."
    )
    return st.finish(fig, alt=alt)


def fig_systolic(a: np.ndarray, b: np.ndarray) -> st.LabFigure:
    """Draw every cycle of a small weight-stationary array: what enters, sums, and leaves."""
    states = mc.matrix_units.frames(a, b)
    fig, axes = st.new_figure(1, len(states), height_in=1.75)
    for step, (ax, (values, sums)) in enumerate(zip(axes, states, strict=True)):
        _array(ax, step, values, sums, a, b)
    product = a @ b
    rows = "; ".join(" ".join(f"{value:g}" for value in row) for row in product)
    alt = (
        f"A {b.shape[0]} by {b.shape[1]} array multiplies a {a.shape[0]} by {a.shape[1]} matrix in "
        f"{len(states)} cycles. Values enter each row one cycle later than the row above, move "
        f"right, and partial sums move down; at the bottom appears the product {rows}."
    )
    return st.finish(fig, alt=alt)


def _array(
    ax: Any, step: int, values: np.ndarray, sums: np.ndarray, a: np.ndarray, b: np.ndarray
) -> None:
    """Draw one cycle: weight small in the corner, arriving value and the sum it makes."""
    rows, columns = b.shape
    ax.set_axis_off()
    ax.set(xlim=(-0.75, columns + 0.1), ylim=(rows + 0.75, -0.5), aspect="equal")
    ax.set_title(f"cycle {step}")
    for r in range(rows):
        if 0 <= step - r < a.shape[0]:
            ax.text(-0.12, r + 0.5, f"{a[step - r, r]:g}→", ha="right", va="center", fontsize=8)
        for c in range(columns):
            m = step - r - c
            busy = 0 <= m < a.shape[0]
            face = st.SKY if busy else "#FFFFFF"
            st.box(ax, c, r, 1, 1, facecolor=face, edgecolor=st.INK, linewidth=0.8)
            ax.text(c + 0.08, r + 0.26, f"×{b[r, c]:g}", fontsize=6)
            if busy:
                st.put(ax, c + 0.55, r + 0.68, f"{sums[r, c]:g}", fontsize=9)
    for c in range(columns):
        m = step - (rows - 1) - c
        if 0 <= m < a.shape[0]:
            st.put(ax, c + 0.5, rows + 0.4, f"↓{sums[rows - 1, c]:g}", fontsize=9)
