"""Tails of split loops, and a schedule put together from five choices."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import MaxNLocator

from ascend_lab import dsl as te
from ascend_lab.chip import Chip, load_chip
from ascend_lab.dsl import Schedule
from ascend_lab.dsl.boxes import Range
from ascend_lab.dsl.interpret import steps
from ascend_lab.figures.nests import draw_nest, height_of
from ascend_lab.figures.schedules import compact, gm_bytes
from ascend_lab.figures.style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    SKY,
    LabFigure,
    finish,
    new_figure,
    styled,
)
from ascend_lab.isa import Affine
from ascend_lab.sim import simulate_kernel


@styled
def fig_tails(n: int = 22, factor: int = 8) -> LabFigure:
    """Draw the parts of a loop of n steps split by `factor`, with tails "cut" and "guard"."""
    fig, ax = new_figure(height_in=1.7)
    said = []
    for line, tail in enumerate(("cut", "guard")):
        s = te.split(_line(n), "y", "i", factor, tail=tail)
        parts = list(steps(s.state.stage("y").loops[0], Range(Affine(), n)))
        ranges = [(part.start.const, part.count) for part in parts]
        twice = sum(count for _, count in ranges) - n
        for number, (start, count) in enumerate(ranges):
            moved = bool(twice) and number == len(ranges) - 1
            _draw_part(
                ax, 2.4 * line + moved, start, count, 2 if moved else number % 2, twice * moved
            )
        if twice:
            shared = {"facecolor": "none", "edgecolor": INK, "hatch": "////", "linewidth": 0}
            ax.barh(2.4 * line + 0.5, twice, 1.8, n - factor, **shared)
        counts = ", ".join(str(count) for _, count in ranges)
        said.append(f"{tail}: parts of {counts}, {twice} elements computed twice")
    ax.set_yticks([0, 2.9], ["cut", "guard"])
    ax.set_ylim(4.1, -0.7)
    ax.set_xlim(-0.05, n + 0.05)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel(f"element of y, n = {n}, split by {factor} (hatched: computed twice)")
    return finish(fig, alt=f"A loop of {n} steps split by {factor}. " + "; ".join(said))


def _draw_part(ax: Any, low: float, start: int, count: int, colour: int, hidden: int) -> None:
    """Draw one part of a split loop; its label keeps out of the first `hidden` elements."""
    face, ink = ((BLUE, "#FFFFFF"), (SKY, INK), (ORANGE, INK))[colour]
    ax.barh(low, count, 0.8, start, facecolor=face, edgecolor=INK, linewidth=0.8)
    middle = start + hidden + (count - hidden) / 2
    ax.text(middle, low, f"{count} from {start}", ha="center", va="center", fontsize=8, color=ink)


def _line(n: int) -> Schedule:
    x = te.placeholder((n,), name="x")
    return te.create_schedule(te.compute((n,), lambda i: x[i] * 2.0, name="y"), load_chip("Toy"))


# -- choices -------------------------------------------------------------------------------------


def add_relu(chip: Chip, n: int) -> te.Tensor:
    """Return y = relu(a + b) for vectors of n half-precision numbers."""
    a, b = te.placeholder((n,), name="a"), te.placeholder((n,), name="b")
    return te.renamed(te.vrelu(te.vadd(a, b)), "y")


def chosen(
    chip: Chip, n: int, *, inline: bool, tile: int, tail: str, slots: int, cores: int
) -> Schedule:
    """Return the schedule of relu(a + b) that five choices make; the share of a core is cut."""
    s = te.create_schedule(add_relu(chip, n), chip)
    if inline:
        s = te.inline(s, "vadd")
    for name in [stage.name for stage in s.state.stages]:
        loop = "i"
        if cores > 1:
            s = te.split(s, name, loop, -(-n // (128 * cores)) * 128)
            s, loop = te.bind(s, name, "i_o"), "i_i"
        s = te.split(s, name, loop, tile, tail=tail)
        s = te.double_buffer(s, name, slots)
    return s


@styled
def fig_choices(
    inline: bool = False,
    tile: int = 1024,
    tail: str = "cut",
    slots: int = 1,
    cores: int = 1,
    *,
    n: int = 1_000_000,
    chip: str = "Ascend910B2",
) -> LabFigure:
    """Draw the nest of relu(a + b) under five choices, and its cycles beside the default's."""
    machine = load_chip(chip)
    schedule = chosen(machine, n, inline=inline, tile=tile, tail=tail, slots=slots, cores=cores)
    run = simulate_kernel(te.lower(schedule), machine)
    default = te.auto_schedule(add_relu(machine, n), machine)
    best = simulate_kernel(te.lower(default), machine)
    fig, (left, right) = new_figure(1, 2, 2.9, width_ratios=(3, 2))
    draw_nest(left, compact(schedule), rows=max(height_of(compact(schedule)), 11.0), size=8)
    left.set_xlim(-0.01, 1.01)
    bars = {"yours": (run.cycles, BLUE), "default": (best.cycles, GREY)}
    for place, (name, (cycles, colour)) in enumerate(bars.items()):
        right.plot([cycles], [place], "o", color=colour, markersize=9, markeredgecolor=INK)
        right.text(1200, place - 0.3, f"{name}: {cycles:,} cycles", fontsize=8, va="center")
    right.set_xscale("log")
    right.set_xlim(1000, 1e7)
    right.set_ylim(1.5, -0.7)
    right.set_yticks([])
    right.grid(axis="x")
    right.set_xlabel(f"cycles; {gm_bytes(run) / 1e6:.2f} MB cross the GM interface")
    text = (
        f"relu(a + b) on {n:,} elements of {chip}, inline {inline}, tile {tile}, tail {tail}, "
        f"{slots} slots, {cores} cores: {run.cycles:,} cycles and {gm_bytes(run):,} bytes to and "
        f"from GM; the default schedule takes {best.cycles:,} cycles"
    )
    return finish(fig, alt=text)
