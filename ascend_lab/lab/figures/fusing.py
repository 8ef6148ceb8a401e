"""Figures of fusing: which tensors cross which level of memory, before and after."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.patches import Polygon

from ascend_lab.lab.figures import style as st
from ascend_lab.machine import sim
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.isa import Kernel, Launch
from ascend_lab.operators import dsl


@dataclass(frozen=True, slots=True)
class Crossing:
    """An operand of a vector instruction, all its tiles together: to the unit (`up`) or from it.

    `tensor` is its name in GM, "" if it lives in UB only. Bytes of all cores: between UB and the
    vector unit, between L2 and UB, between memory and L2.
    """

    tensor: str
    up: bool
    port_bytes: int
    path_bytes: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """A vector operation of a nest, all its tiles together: UB buffers and bytes per operand.

    The last entry of both is the result.
    """

    op: str
    buffers: tuple[str, ...]
    sizes: tuple[int, ...]


def operations(launch: Launch) -> list[Operation]:
    """Return the vector operations of a launch in order.

    Instructions on other parts of the same buffers belong to one operation; one on the very same
    part is the next operation.
    """
    by_key: dict[tuple[Any, ...], Operation] = {}
    for part in launch.parts:
        repeats: Counter[str] = Counter()
        for step, times in part.program.instructions():
            if step.pipe != "V" or step.dst is None or not step.srcs:
                continue
            regions = (*step.srcs, step.dst)
            names = tuple(r.buffer.name for r in regions)
            sizes = tuple(r.size_bytes * times * part.core_count for r in regions)
            place = f"{step.op} {names} {step.dst}"
            key = (step.op, *names, repeats[place])
            repeats[place] += 1
            previous = by_key.get(
                key, Operation(step.op.removeprefix("v"), names, (0,) * len(names))
            )
            total_sizes = tuple(a + b for a, b in zip(previous.sizes, sizes, strict=True))
            by_key[key] = replace(previous, sizes=total_sizes)
    return list(by_key.values())


def crossings(kernel: Kernel, chip: Chip) -> list[Crossing]:
    """Return the operands and the result of every vector operation, in order."""
    return [crossing for launch in kernel.phases for crossing in _of_launch(launch, chip)]


def _of_launch(launch: Launch, chip: Chip) -> list[Crossing]:
    """Return the crossings of one launch.

    The first operation that reads a loaded tile counts its load, the last that writes a stored
    tile its store.
    """
    traffic = sim.analyse(launch, chip)
    loads = _copies(launch, "MTE2")
    stores = _copies(launch, "MTE3")
    ops = operations(launch)
    last_write = {op.buffers[-1]: number for number, op in enumerate(ops)}
    found_crossings: list[Crossing] = []
    for number, op in enumerate(ops):
        for name, size in zip(op.buffers[:-1], op.sizes, strict=False):
            found_crossings.append(
                _in_memory(Crossing("", True, size), loads.pop(name, None), traffic)
            )
        result = op.buffers[-1]
        store = stores.get(result) if last_write[result] == number else None
        found_crossings.append(_in_memory(Crossing("", False, op.sizes[-1]), store, traffic))
    return found_crossings


def _in_memory(crossing: Crossing, copy: tuple[str, int] | None, traffic: sim.Traffic) -> Crossing:
    """Add what a tile's copy from or to GM moves, if it has one."""
    if copy is None:
        return crossing
    tensor, size = copy
    # the part of these bytes that passes on between L2 and memory
    if crossing.up:
        share = traffic.memory_share.get(tensor, 1.0)
    else:
        share = 1.0 if traffic.memory_write_bytes > 0 else 0.0
    return replace(crossing, tensor=tensor, path_bytes=size, memory_bytes=round(share * size))


def _copies(launch: Launch, pipe: str) -> dict[str, tuple[str, int]]:
    """Return, by UB buffer, the GM tensor it is copied from or to, and the bytes of all cores."""
    copies: dict[str, tuple[str, int]] = {}
    for part in launch.parts:
        for step, times in part.program.instructions():
            if step.pipe == pipe and step.dst is not None and step.srcs:
                source_and_target = (step.srcs[0].buffer.name, step.dst.buffer.name)
                tensor, tile = source_and_target if pipe == "MTE2" else source_and_target[::-1]
                size_so_far = copies.get(tile, (tensor, 0))[1]
                size = min(step.dst.size_bytes, step.srcs[0].size_bytes)
                copies[tile] = (tensor, size_so_far + size * times * part.core_count)
    return copies


# -- the fusion chapter: bytes per level before and after, and what long chains gain ---------------
MIB = 2**20
BANDS = {"memory": (0.0, 0.5), "L2": (1.35, 1.85), "UB": (2.7, 3.2), "V": (4.05, 4.6)}
"""Each level of memory is drawn as a horizontal band: its lower and upper edge."""
GAPS = {"memory": (0.5, 1.35), "L2": (1.85, 2.7), "UB": (3.2, 4.05)}
"""The gap above each band, which the arrows cross."""
LOOKS = ((st.BLUE, "o"), (st.GREEN, "^"), (st.ORANGE, "D"), (st.VERMILLION, "s"), (st.PURPLE, "v"))


def chain_kernels(chip: Chip, length: int, elements: int, operator: str) -> tuple[Kernel, Kernel]:
    """Return a chain of elementwise operators as one phase per operator, and fused.

    The first is h1 = a + b. The others are a ReLU each (`operator` "relu") or add one more input
    ("add"). Every phase has the default schedule.
    """
    a, b = (dsl.placeholder((elements,), name=name) for name in "ab")
    fused_result = dsl.vadd(a, b)
    phases: list[Launch] = []
    for number in range(1, length + 1):
        name = f"h{number}" if number < length else "y"
        next_input = dsl.placeholder(
            (elements,), name="abcdefg"[number] if number < 7 else f"x{number}"
        )
        previous = dsl.placeholder((elements,), name=f"h{number - 1}") if number > 1 else a
        if operator == "relu" and number > 1:
            result = dsl.vrelu(previous)
            fused_result = dsl.vrelu(fused_result)
        else:
            result = dsl.vadd(previous, next_input)
            fused_result = dsl.vadd(fused_result, next_input) if number > 1 else fused_result
        result = dsl.renamed(result, name)
        phases += dsl.lower(dsl.auto_schedule(result, chip)).phases
    fused = dsl.lower(dsl.auto_schedule(dsl.renamed(fused_result, "y"), chip))
    return Kernel("apart", tuple(phases)), fused


def fig_levels(before: Kernel, after: Kernel, chip: Chip) -> st.LabFigure:
    """Draw the bytes that cross every level, before fusing and after."""
    runs = [sim.simulate_kernel(kernel, chip) for kernel in (before, after)]
    crossings_of = [crossings(kernel, chip) for kernel in (before, after)]
    largest_bytes = max(c.port_bytes for kernel_crossings in crossings_of for c in kernel_crossings)
    fig, axes = st.new_figure(nrows=2, ncols=2, height_in=5.0, width_ratios=(3.1, 1))
    axes[1, 1].sharex(axes[0, 1])
    for row, (run, kernel_crossings) in enumerate(zip(runs, crossings_of, strict=True)):
        # below, arrows of the first kernel that are gone are drawn as outlines
        is_comparable = row == 1 and len(crossings_of[0]) == len(kernel_crossings)
        _draw_bands(axes[row, 0], [operations(p) for p in (before, after)[row].phases])
        for column, crossing in enumerate(kernel_crossings):
            earlier = crossings_of[0][column] if is_comparable else None
            _draw_column(axes[row, 0], column + 0.5, crossing, earlier, largest_bytes)
        axes[row, 0].set_title(_title(run), loc="left", pad=4)
        _draw_totals(axes[row, 1], kernel_crossings)
    axes[0, 1].set_title("bytes (MiB)", loc="left", pad=4)
    levels = ("UB and the vector unit", "L2 and UB", "memory and L2")
    parts = []
    for run, kernel_crossings in zip(runs, crossings_of, strict=True):
        sizes = zip(_totals(kernel_crossings).values(), levels, strict=True)
        summary = ", ".join(f"{size / MIB:.4g} MiB between {level}" for size, level in sizes)
        parts.append(f"{_title(run)}: {summary}")
    return st.finish(fig, alt=f"Bytes across the levels of {chip.name}. {'; '.join(parts)}.")


def _title(run: sim.KernelTimeline) -> str:
    """Return what a kernel consists of, its cycles, and what limits its longest phase."""
    count = len(run.phases)
    subject = f"{count} operators apart" if count > 1 else "one kernel"
    limit = max(run.phases, key=lambda phase: phase.cycles).limit
    return f"{subject}: {run.cycles:,} cycles, limit {limit}"


def _totals(kernel_crossings: Sequence[Crossing]) -> dict[str, int]:
    """Return the bytes that cross the gap above each level."""
    return {
        "UB": sum(crossing.port_bytes for crossing in kernel_crossings),
        "L2": sum(crossing.path_bytes for crossing in kernel_crossings),
        "memory": sum(crossing.memory_bytes for crossing in kernel_crossings),
    }


def _draw_bands(ax: Any, phases: Sequence[Sequence[Operation]]) -> None:
    """Draw the levels as bands and the operations above; UB is cut where a phase ends."""
    columns = sum(len(op.buffers) for phase in phases for op in phase)
    ax.set(xlim=(-0.13 * max(columns, 5) - 0.3, columns), ylim=(-0.05, 4.65))
    ax.axis("off")
    for name, (low, high) in BANDS.items():
        label = "vector" if name == "V" else name
        ax.text(-0.02 * columns, (low + high) / 2, label, ha="right", va="center", fontsize=8)
        if name in ("L2", "memory"):
            st.box(ax, 0, low, columns, high - low, facecolor=st.LIGHT)
    left = 0.0
    for phase in phases:
        first = left
        for op in phase:
            low, high = BANDS["V"]
            look = st.PIPE_STYLE["V"]
            width = len(op.buffers)
            st.box(ax, left + 0.06, low, width - 0.12, high - low, **look.patch_args())
            st.put(ax, left + width / 2, (low + high) / 2, op.op, **look.text_args())
            left += width
        low, high = BANDS["UB"]
        st.box(ax, first + 0.06, low, left - first - 0.12, high - low, fc=st.LIGHT)


def _draw_column(
    ax: Any, x: float, crossing: Crossing, earlier: Crossing | None, largest_bytes: int
) -> None:
    """Draw the arrows of one operand or result; those of `earlier` that are gone as outlines."""
    up = crossing.up
    _arrow(ax, x, GAPS["UB"], up, crossing.port_bytes / largest_bytes, st.GREEN)
    colour = st.BLUE if up else st.PURPLE
    sizes = {"L2": crossing.path_bytes, "memory": crossing.memory_bytes}
    earlier_sizes = {"L2": earlier.path_bytes, "memory": earlier.memory_bytes} if earlier else {}
    for level, size in sizes.items():
        if size:
            _arrow(ax, x, GAPS[level], up, size / largest_bytes, colour)
        elif earlier_sizes.get(level):
            _arrow(ax, x, GAPS[level], up, earlier_sizes[level] / largest_bytes, "")
    name = crossing.tensor or (earlier.tensor if earlier else "")
    named_levels = ["UB"]
    if sizes["L2"]:
        named_levels.append("memory" if sizes["memory"] else "L2")
    for level in named_levels:
        st.put(ax, x, sum(BANDS[level]) / 2, name)


def _arrow(ax: Any, x: float, gap: st.Point, up: bool, share: float, colour: str) -> None:
    """Draw an arrow across a gap, as wide as its share of bytes; without a colour, an outline."""
    low = gap[0] + 0.07
    high = gap[1] - 0.07
    half = 0.17 * share
    head = 0.32
    neck, tip, tail = (high - head, high, low) if up else (low + head, low, high)
    half_head = half + 0.13
    left_corners = [(x - half, tail), (x - half, neck), (x - half_head, neck)]
    right_corners = [(2 * x - left, y) for left, y in reversed(left_corners)]
    corners = [*left_corners, (x, tip), *right_corners]
    look: dict[str, Any] = {"facecolor": colour, "edgecolor": st.INK, "linewidth": 0.6}
    if not colour:
        look = {"fc": "none", "ec": st.GREY, "linewidth": 0.9, "linestyle": (0, (3, 2))}
    ax.add_patch(Polygon(corners, closed=True, **look))


def _draw_totals(ax: Any, kernel_crossings: Sequence[Crossing]) -> None:
    """Draw the bytes that cross each gap as bars at its height."""
    total = _totals(kernel_crossings)
    colours = {"UB": st.GREEN, "L2": st.BLUE, "memory": st.GREY}
    for level, size in total.items():
        middle = sum(GAPS[level]) / 2
        ax.barh(middle, size / MIB, height=0.5, facecolor=colours[level], edgecolor=st.INK)
        place = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
        ax.annotate(f"{size / MIB:.4g}", (size / MIB, middle), **place)
    ax.set(ylim=(-0.05, 4.65), xticks=[], yticks=[])
    ax.margins(x=0.3)
    ax.set_facecolor("none")
    ax.spines["bottom"].set_visible(False)


def fig_fusion(
    length: int = 2, mib: int = 32, ub_kib: int = 256, each: str = "relu", chip: str = "Ascend910A"
) -> st.LabFigure:
    """Draw `fig_levels` for a chain of `length` operators on tensors of `mib` MiB of fp16.

    `ub_kib` replaces the size of UB.
    """
    base = load_chip(chip)
    small = replace(base, buffers={**base.buffers, "UB": 1024 * ub_kib})
    separate, fused = chain_kernels(small, length, mib * MIB // 2, each)
    return fig_levels(separate, fused, small)


def fig_chain_lengths(lengths: Sequence[int], gains: Mapping[str, Sequence[float]]) -> st.LabFigure:
    """Draw how many times faster one kernel is than a chain's operators apart, over its length.

    `gains` holds one number per length under each label.
    """
    fig, ax = st.new_figure(height_in=2.9)
    alt_parts = []
    for (label, values), (colour, marker) in zip(gains.items(), LOOKS, strict=False):
        ax.plot(lengths, values, color=colour, marker=marker, ms=4.5)
        place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        ax.annotate(label, (lengths[-1], values[-1]), color=colour, fontsize=8, **place)
        best = max(range(len(values)), key=lambda place: values[place])
        best_text = f"{values[best]:.2f} at best, with {lengths[best]} additions"
        alt_parts.append(f"{label}: {best_text}, {values[-1]:.2f} with {lengths[-1]}")
    ax.hlines(1.0, lengths[0], lengths[-1], color=st.INK, linewidth=0.8)
    st.doubling(ax, lengths)
    ax.margins(x=0.03)
    ax.set_xlim(right=lengths[-1] * 1.5)
    ax.set(xlabel="additions in the chain, each with an input of its own")
    ax.set_ylabel("times faster than apart")
    return st.finish(fig, alt=f"Gain of fusing a chain of additions. {'; '.join(alt_parts)}.")


# -- which core makes which number, of operators that split along different axes -------------------
TITLES = {"h": "reduce", "u": "transpose", "y": "scatter", "fused": "one kernel"}


def fig_owners(maps: Mapping[str, np.ndarray]) -> st.LabFigure:
    """Draw who makes every number of reduce, transpose and scatter, and in one kernel for all.

    `maps` is what `split_conflict.owner_maps` returns; points run to the right,
    channels down, and each core has a shade. Under the pictures stands the share of the numbers
    that stay on their core when the next operator takes them.
    """
    fig, axes = st.new_figure(ncols=len(maps), height_in=2.3)
    names = list(maps)
    cores = int(max(m.max() for m in maps.values())) + 1
    alt_parts = []
    for place, (ax, name) in enumerate(zip(axes, names, strict=True)):
        owners = maps[name]
        ax.imshow(owners.T, cmap="cividis", vmin=0, vmax=cores - 1, aspect="auto")
        ax.set_title(TITLES.get(name, name), loc="left")
        ax.set(xticks=[], yticks=[], facecolor="none")
        for spine in ax.spines.values():
            spine.set(visible=True, color=st.INK, linewidth=0.6)
        cut_axes = [
            n for i, n in enumerate(("points", "channels")) if np.diff(owners, axis=i).any()
        ]
        alt_parts.append(
            f"{TITLES.get(name, name)} is cut along the {' and '.join(cut_axes) or 'nothing'}"
        )
        if place + 1 < len(names) and names[place + 1] != "fused":
            share = float(np.mean(owners == maps[names[place + 1]]))
            ax.set_xlabel(f"{share:.1%} stay")
            alt_parts[-1] += f", {share:.1%} of its numbers stay on their core"
        elif name == "fused":
            ax.set_xlabel("all stay")
    axes[0].set_ylabel("channels")
    fig.supxlabel("points", fontsize=9)
    return st.finish(fig, alt=f"Owners among {cores} cores: {'; '.join(alt_parts)}.")
