"""Figures of a Da Vinci core: its map with the paths that data may take, and what cores share."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Any

import numpy as np
from matplotlib.patches import FancyArrowPatch
from matplotlib.path import Path as Outline
from matplotlib.patheffects import Normal, Stroke

from ascend_lab.errors import CapacityError, PathError
from ascend_lab.lab.figures import style as st
from ascend_lab.lab.machines import roofline as rf
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.sim import Timeline

Hop = tuple[str, str]
"""One path, as (source space, destination space)."""
KIB = 1024
WHITE = "#FFFFFF"
WIDTH = 100.0
HEIGHT = 58.0
BOXES: Mapping[str, tuple[float, float, float, float]] = st.LOOKS["boxes"]
"""Left, bottom, width, height of every box; the canvas is 100 wide and 58 high."""
WAYS: Mapping[Hop, tuple[tuple[st.Point, ...], st.Point]] = {
    (name.partition("->")[0], name.partition("->")[2]): arrow
    for name, arrow in st.LOOKS["ways"].items()
}
"""Corner points of every arrow and where its label stands; an unlisted path is a straight line."""


@dataclass(frozen=True, slots=True)
class Move:
    """A move over one path: cycles its pipe is taken, and cycles more until the data are there."""

    hop: Hop
    pipe: str
    rate_bytes_per_cycle: float
    startup_cycles: int
    occupied_cycles: int
    latency_cycles: int


def move_over(chip: Chip, hop: Hop, size_bytes: int) -> Move:
    """Return what moving `size_bytes` over one path costs when one core is active.

        occupied = startup + ceil(size / rate)

    The rate is the path's, or the memory's where that is slower; data from GM come from device
    memory, as at a first touch. Raises `PathError`.
    """
    src, dst = hop
    path = chip.path(src, dst)
    rate = path.rate_bytes_per_cycle
    latency = path.latency_cycles
    if src == "GM":
        rate = min(rate, chip.shared_rate_bytes_per_cycle("memory", 1))
        latency += chip.device_memory.latency_cycles
    elif dst == "GM":
        rate = min(rate, chip.shared_rate_bytes_per_cycle("L2", 1))
        latency += chip.l2.latency_cycles
    occupied = path.startup_cycles + math.ceil(size_bytes / rate - 1e-9)
    return Move(hop, path.pipe, rate, path.startup_cycles, occupied, latency)


def find_route(chip: Chip, src: str, dst: str, size_bytes: int) -> list[Move]:
    """Return the moves of the shortest chain of paths, the quickest among equals.

    Raises `PathError` for a buffer the chip lacks or that no chain reaches.
    """
    spaces = ["GM", *chip.buffers]
    if unknown := {src, dst} - {*spaces}:
        needed = f"a memory of {chip.name}"
        remedy = f"use one of {', '.join(spaces)}"
        raise PathError(needed, min(unknown), remedy)
    for length in range(len(spaces) - 1):
        chains = []
        for spaces_between in permutations(spaces, length):
            hops = list(pairwise((src, *spaces_between, dst)))
            if set(hops) <= set(chip.paths):
                chains.append([move_over(chip, hop, size_bytes) for hop in hops])
        if chains:
            return min(chains, key=lambda chain: sum(move.occupied_cycles for move in chain))
    raise PathError(f"a chain of paths {src}->{dst} on {chip.name}", "none", "choose other buffers")


def _box(ax: Any, name: str, text: str, pipe: str = "", *, thick: bool = False) -> None:
    """Draw a box of the map: a buffer, or with `pipe` a unit in its colours."""
    x, y, width, height = BOXES[name]
    look: dict[str, Any] = {"facecolor": st.LIGHT if name == "GM" else WHITE, "edgecolor": st.INK}
    look |= st.PIPE_STYLE[pipe].patch_args() if pipe else {"linewidth": 2.6 if thick else 1.0}
    st.box(ax, x, y, width, height, zorder=3, **look)
    style = st.PIPE_STYLE[pipe].text_args() if pipe else {"color": st.INK}
    st.put(ax, x + width / 2, y + height / 2, text, zorder=4, linespacing=1.25, **style)


def _arrow(ax: Any, points: Sequence[st.Point], pipe: str, width_pt: float, *, dim: bool) -> None:
    """Draw an arrow along points in the colour of a pipe, or pale if `dim`."""
    colour = st.LIGHT if dim else st.PIPE_STYLE[pipe].colour
    look: dict[str, Any] = {"color": colour, "joinstyle": "miter", "capstyle": "butt"}
    look |= {"mutation_scale": 9 + width_pt, "linewidth": width_pt, "zorder": 1.5 if dim else 2}
    head = FancyArrowPatch(path=Outline(points), arrowstyle="-|>", **look)
    # A pale edge keeps crossing arrows apart.
    head.set_path_effects([Stroke(linewidth=width_pt + 2.5, foreground=st.PAPER), Normal()])
    ax.add_patch(head)


def _straight(hop: Hop) -> tuple[tuple[st.Point, ...], st.Point]:
    """Return the ends of a straight arrow between two boxes, and its middle."""

    def middle_of(name: str) -> st.Point:
        """Return the middle of a box."""
        x, y, width, height = BOXES[name]
        return (x + width / 2, y + height / 2)

    start = middle_of(hop[0])
    end = middle_of(hop[1])
    return (start, end), ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)


def _draw_paths(ax: Any, chip: Chip, chosen: Collection[Hop] | None) -> None:
    """Draw all paths with pipe and rate; those not in `chosen` are pale."""
    for hop, path in chip.paths.items():
        points, label_point = WAYS.get(hop) or _straight(hop)
        dim = chosen is not None and hop not in chosen
        width_pt = 0.9 + 0.11 * math.sqrt(path.rate_bytes_per_cycle)
        _arrow(ax, points, path.pipe, width_pt, dim=dim)
        if hop == ("UB", "UB"):
            _arrow(ax, [(84, 3.5), (71, 3.5)], path.pipe, width_pt, dim=dim)
        if not dim:
            text = f"{path.pipe} {path.rate_bytes_per_cycle:g}"
            box = {"facecolor": st.PAPER, "edgecolor": "none", "pad": 0.8}
            st.put(ax, *label_point, text, zorder=2.5, bbox=box)
    # operands and result of the cube
    ends = [((71, 45), (84, 42)), ((71, 33), (84, 37)), ((88, 33), (88, 28)), ((94, 28), (94, 33))]
    if "BT" in chip.buffers:
        ends.append(((71, 27), (85, 33)))
    for end in ends:
        _arrow(ax, end, "M", 1.6, dim=chosen is not None)


def _draw_frame(ax: Any, chip: Chip, unit: str, bottom: float, top: float) -> None:
    """Draw the border of one core, its scalar unit and the queues the scalar unit feeds."""
    edge: dict[str, Any] = {"facecolor": "none", "edgecolor": st.GREY, "linestyle": (0, (4, 2))}
    st.box(ax, 14, bottom, 85.5, top - bottom, zorder=0, linewidth=1.0, **edge)
    row = top - 5.0
    arrow = {"arrowstyle": "-|>", "color": st.INK}
    ax.annotate("", (28, row + 2), (24.5, row + 2), arrowprops=arrow, zorder=2)
    unit_pipes = {path.pipe for path in chip.paths.values() if path.unit == unit}
    unit_pipes |= {"core": {"M", "V"}, "cube": {"M"}, "vector": {"V"}}[unit]
    pipes = [pipe for pipe in st.PIPE_STYLE if pipe in unit_pipes]
    queues = [(pipe, 28 + 8.6 * i, 8, pipe, 2) for i, pipe in enumerate(pipes)]
    for pipe, x, width, text, text_height in (("S", 15.5, 9, "scalar S", 1.9), *queues):
        look = st.PIPE_STYLE[pipe]
        st.box(ax, x, row, width, 4, zorder=3, **look.patch_args())
        st.put(ax, x + width / 2, row + text_height, text, zorder=4, **look.text_args())
    kind = {"core": "cores", "cube": "cube cores", "vector": "vector cores"}[unit]
    count = chip.cores_of(unit)
    ax.text(98.5, row + 2, f"{count} {kind}", ha="right", va="center", fontsize=8)


def memory_size_text(size_bytes: int) -> str:
    """Return a size in the unit in which its source states it.

    >>> memory_size_text(64 * 2**30), memory_size_text(32 * 10**9)
    ('64 GiB', '32 GB')
    """
    gib, remainder = divmod(size_bytes, 2**30)
    return f"{size_bytes / 1e9:.0f} GB" if remainder else f"{gib} GiB"


def _draw_core(ax: Any, chip: Chip, chosen: Collection[Hop] | None = None) -> None:
    """Draw the map of a core; boxes on the chosen paths have thick edges."""
    ax.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    ax.set_axis_off()
    if chip.combined:
        _draw_frame(ax, chip, "core", 0.5, 57.5)
    else:
        _draw_frame(ax, chip, "cube", 19, 57.5)
        _draw_frame(ax, chip, "vector", 0.5, 17)
    memory = memory_size_text(chip.device_memory.size_bytes)
    text = f"GM\n\nL2\n{chip.l2.size_bytes / KIB**2:.0f} MiB\n\ndevice\nmemory\n{memory}"
    on_the_way = {space for hop in chosen or () for space in hop}
    _box(ax, "GM", text, thick="GM" in on_the_way)
    for name, size in chip.buffers.items():
        gap = " " if name in ("BT", "UB") else "\n"
        _box(ax, name, f"{name}{gap}{size / KIB:.0f} KiB", thick=name in on_the_way)
    _box(ax, "M", "cube M\n" + "×".join(map(str, chip.cube["fp16"])), "M")
    _box(ax, "V", f"vector V\n{chip.vector_bytes_per_repeat} bytes", "V")
    _draw_paths(ax, chip, chosen)


def fig_core_map(chip_names: Sequence[str] = ("Ascend910A", "Ascend910B2")) -> st.LabFigure:
    """Draw the cores of chips (preset names or chip files) one below the other."""
    chips = [load_chip(name) for name in chip_names]
    fig, axes = st.new_figure(nrows=len(chips), height_in=3.85 * len(chips))
    texts = []
    for ax, chip in zip(st.panels(axes), chips, strict=True):
        kind = "cube and vector in one core" if chip.combined else "cube and vector in split cores"
        ax.set_title(f"{chip.name}: {kind}, {chip.clock_hz / 1e9:g} GHz", loc="left")
        _draw_core(ax, chip)
        hops = chip.paths.items()
        paths = ", ".join(f"{a} to {b} {p.pipe} {p.rate_bytes_per_cycle:g}" for (a, b), p in hops)
        texts.append(f"{chip.name} has {kind} and {len(chip.paths)} paths: {paths}.")
    return st.finish(fig, alt="Paths with pipe and bytes per cycle. " + " ".join(texts))


def fig_core_path(
    chip_name: str = "Ascend910A", src: str = "L1", dst: str = "L0A", size_kib: int = 32
) -> st.LabFigure:
    """Answer on the map: is there a path src -> dst, by which pipe, how many cycles for n KiB?"""
    chip = load_chip(chip_name)
    moves = find_route(chip, src, dst, size_kib * KIB)
    for space in {src, *(move.hop[1] for move in moves)} - {"GM"}:
        if size_kib * KIB > chip.buffers[space]:
            needed = f"{size_kib} KiB of {space} for {src}->{dst}"
            got = f"{chip.buffers[space] // KIB} KiB on {chip.name}"
            raise CapacityError(needed, got, "move smaller pieces")
    direct = len(moves) == 1
    answer = f"one path, pipe {moves[0].pipe}" if direct else f"no path, {len(moves)} moves instead"
    lines = [f"{chip.name}, {size_kib} KiB from {src} to {dst}: {answer}"]
    for move in moves:
        sum_text = f"{move.startup_cycles} + {size_kib * KIB:,} / {move.rate_bytes_per_cycle:g}"
        line = f"{move.pipe} {move.hop[0]} to {move.hop[1]}: {sum_text} = {move.occupied_cycles:,}"
        delay_text = f", visible {move.latency_cycles} later" if move.latency_cycles else ""
        lines.append(f"{line} cycles{delay_text}")
    fig, ax = st.new_figure(height_in=4.0 + 0.16 * len(moves))
    fig.suptitle(lines[0], x=0.01, ha="left", fontweight="bold", fontsize=9)
    ax.set_title("\n".join(lines[1:]), loc="left", fontweight="normal")
    _draw_core(ax, chip, chosen={move.hop for move in moves})
    return st.finish(fig, alt="; ".join(lines) + ".")


# -- what cores share: rates, residency in L2, energy ----------------------------------------------
def fig_sharing(
    chip: Chip, cores: Sequence[int], memory_rates: Sequence[float], l2_rates: Sequence[float]
) -> st.LabFigure:
    """Draw the total rate n cores read with: marks measured, lines n * min(port, shared / n).

    Rates in bytes/cycle of all cores together.
    """
    fig, ax = st.new_figure(height_in=2.8)
    port = chip.path("GM", "UB").rate_bytes_per_cycle
    n = np.arange(1, max(cores) + 1)
    series = (
        ("later touches, from L2", "L2", l2_rates, st.BLUE, "s", "--"),
        ("first touch, from memory", "memory", memory_rates, st.INK, "o", "-."),
    )
    facts = []
    for label, level, rates, colour, marker, style in series:
        shared = chip.shared_rate_bytes_per_cycle(level, 1)
        ax.plot(n, np.minimum(n * port, shared), color=colour, linestyle=style, linewidth=1.2)
        ax.plot(cores, rates, marker, color=colour, markeredgecolor=st.INK, mew=0.8, label=label)
        ends = (
            f"{rates[0]:.0f} bytes per cycle with {cores[0]} core, {rates[-1]:.0f} with {cores[-1]}"
        )
        formula_rate = min(cores[-1] * port, shared)
        facts.append(f"{label}: {ends}, where the formula gives {formula_rate:.0f}")
    ax.set(xlabel="cores that read at once", ylabel="bytes per cycle, all cores")
    ax.set(xlim=(0, max(cores) + 1), ylim=(0, None))
    ax.grid(axis="y")
    ax.legend(loc="upper left")
    return st.finish(fig, alt=f"Read rate of {chip.name}. " + "; ".join(facts) + ".")


def fig_working_set(
    sides: Sequence[int], runs: Sequence[Timeline], strip_rows: int
) -> st.LabFigure:
    """Draw memory traffic and share of peak of a layer against the side of its square weights.

    A pass over the weights also touches `strip_rows` rows of the input and of the result.
    """
    chip = runs[0].chip
    fig, (upper, lower) = st.new_figure(nrows=2, height_in=3.6, sharex=True)
    # 2 side^2 bytes of weights and 2 x 2 strip_rows side bytes of strips fill L2.
    full_side = math.sqrt(chip.l2.size_bytes / 2 + strip_rows**2) - strip_rows
    memory_mb = [run.memory_bytes / 1e6 for run in runs]
    requested_mb = [run.path_bytes["GM", "L1"] / 1e6 for run in runs]
    peak_percent = [100 * run.peak_share for run in runs]
    look = {"markeredgecolor": st.INK, "markeredgewidth": 0.6}
    upper.plot(sides, requested_mb, "s--", color=st.BLUE, label="asked for by the cores", **look)
    upper.plot(sides, memory_mb, "o-", color=st.INK, label="moved by memory", **look)
    upper.set_ylabel("MB")
    upper.legend(loc="upper left")
    lower.plot(sides, peak_percent, "o-", color=st.VERMILLION, **look)
    lower.set(ylabel="% of cube peak", xlabel="side of the square weight matrix", ylim=(0, 100))
    for ax in (upper, lower):
        ax.axvline(full_side, color=st.INK, linestyle=":", linewidth=1.2)
        ax.grid(axis="y")
    lower.text(full_side, 4, "weights and strips fill L2 ", ha="right", va="bottom", fontsize=8)
    rows = zip(sides, memory_mb, requested_mb, peak_percent, strict=True)
    points = "; ".join(
        f"{side}: {moved:.0f} MB of {requested:.0f} MB asked for, {percent:.0f} % of peak"
        for side, moved, requested, percent in rows
    )
    return st.finish(fig, alt=f"Weight side on {chip.name}, memory traffic and speed: {points}.")


def fig_energy(timelines: Mapping[str, Timeline]) -> st.LabFigure:
    """Draw picojoules per multiply-accumulate of each program, split by where they go."""
    fig, ax = st.new_figure(height_in=0.9 + 0.4 * len(timelines))
    colours = (st.VERMILLION, st.SKY, st.BLUE, st.INK, st.PURPLE)
    pairs = zip(colours, ("", "\\\\", "xx", "", "--"), strict=True)
    looks = [{"facecolor": c, "hatch": h, "edgecolor": st.INK} for c, h in pairs]
    facts = []
    for row, (name, run) in enumerate(timelines.items()):
        parts = rf.energy_parts(run)
        total_pj = st.stack(ax, row, zip(parts.values(), looks, strict=True))
        summary = ", ".join(f"{part} {value:.2f}" for part, value in parts.items())
        facts.append(f"{name} {total_pj:.2f} pJ per MAC ({summary})")
    st.name_rows(ax, timelines)
    ax.set_xlabel("pJ per multiply-accumulate")
    if timelines:
        st.key(fig, dict(zip(parts, looks, strict=True)), loc="outside lower center", ncols=5)
    return st.finish(fig, alt="Energy by place: " + "; ".join(facts) + ".")
