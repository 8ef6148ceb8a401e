"""Gantt charts, the figures of the overlap chapter, and its two coded exercises."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ascend_lab.lab import figures
from ascend_lab.lab.checks.chapter03_04 import max_plus_product
from ascend_lab.lab.figures import gantt
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.isa import KernelBuilder, Program
from ascend_lab.machine.sim import Timeline, simulate

TOY = load_chip("Toy")
TILE = 2048


def with_latency(cycles: int) -> Chip:
    memory = replace(TOY.device_memory, latency_cycles=cycles, rate_bytes_per_s=2e11)
    return replace(TOY, device_memory=memory, l2=replace(TOY.l2, latency_cycles=0))


QUIET = with_latency(0)
FAR = with_latency(200)


def work(chip: Chip, degrees: Sequence[int] = (3,), depth: int = 2, rounds: int = 8) -> Program:
    """Load, `degree` pairs of vector instructions, store: the chapter's kernel in short."""
    k = KernelBuilder("work", chip)
    size = rounds * len(degrees) * TILE
    x = k.tensor("x", "fp16", size)
    y = k.tensor("y", "fp16", size)
    x_in = k.queue("x_in", "UB", "fp16", TILE, src="MTE2", dst="V", depth=depth)
    y_out = k.queue("y_out", "UB", "fp16", TILE, src="V", dst="MTE3", depth=depth)
    with k.loop("i", rounds) as i:
        for j, degree in enumerate(degrees):
            at = (i * len(degrees) + j) * TILE
            k.copy(x_in.alloc().region(), x.region(at, TILE))
            x_in.enqueue()
            a = x_in.dequeue().region(0, (TILE // 128, 128))
            b = y_out.alloc().region(0, (TILE // 128, 128))
            for step in range(degree):
                k.vector("vmul", b, b if step else a, a)
                k.vector("vadds", b, b, scalar=1.0)
            x_in.free()
            y_out.enqueue()
            k.copy(y.region(at, TILE), y_out.dequeue().region())
            y_out.free()
    return k.finish()


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return simulate(work(FAR), FAR)


# --- Gantt ----------------------------------------------------------------------------------------
def bars(ax: Any) -> list[tuple[int, float, float, tuple[float, ...]]]:
    """Return (row, start, end, colour) of every bar in the axes."""
    return [
        (round(p.get_y() + p.get_height() / 2), p.get_x(), p.get_x() + p.get_width(), p.get_fc())
        for p in ax.patches
    ]


def test_bars_are_the_spans_and_stalls_look_different(timeline: Timeline) -> None:
    (ax,) = figures.fig_gantt(timeline, critical=False).axes
    drawn = bars(ax)
    for row, pipe in enumerate(gantt.pipes_of([timeline])):
        spans = [s for s in timeline.spans if s.pipe == pipe]
        worked = {(s.start, s.end) for s in spans if "flag" not in s.name}
        stalled = {(s.start, s.start + s.stall_cycles) for s in spans if s.stall_cycles}
        own = [bar for bar in drawn if bar[0] == row]
        assert {bar[1:3] for bar in own} == worked | stalled
        colours = [{bar[3] for bar in own if bar[1:3] in kind} for kind in (worked, stalled)]
        assert len(colours[0]) == len(colours[1]) == 1
        assert colours[0] != colours[1]


# --- figures of the chapter -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("times", "slowest"),
    [((300, 100, 0, 0, 2), "load"), ((100, 300, 50, 9, 2), "compute"), ((9, 9, 90, 0, 3), "slots")],
)
def test_the_slowest_circuit_is_bold(times: tuple[int, ...], slowest: str) -> None:
    fig = figures.fig_circuits(*times)
    assert fig.alt_text.endswith(f"The slowest is {slowest}.")
    bold = [t.get_text() for t in fig.axes[0].texts if t.get_fontweight() == "bold"]
    load, compute, _, _, buffers = times
    rate = {"load": load, "compute": compute, "slots": sum(times[:4]) / buffers}[slowest]
    assert [text for text in bold if text.endswith(f"= {rate:.4g} cycles a tile")]
    tokens = [line for line in fig.axes[0].lines if line.get_marker() == "o"]
    assert len(tokens) == 2 + buffers


@pytest.mark.parametrize("chip", [QUIET, FAR], ids=["quiet", "far"])
@pytest.mark.parametrize("degree", [1, 3, 6])
def test_d_buffers_give_at_most_a_factor_d(chip: Chip, degree: int) -> None:
    one = gantt.steady_cycles(work, chip, (degree,), 1, rounds=12)
    before = one
    for depth in (2, 3, 4):
        now = gantt.steady_cycles(work, chip, (degree,), depth, rounds=12)
        assert one / depth <= now <= before
        before = now


# --- exercises ------------------------------------------------------------------------------------
def test_max_plus_product_is_the_longest_path() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 99, (2, 4, 4)).astype(float)
    c = max_plus_product(a, b)
    for i in range(4):
        for j in range(4):
            assert c[i, j] == max(a[i, k] + b[k, j] for k in range(4))
    one = np.full((4, 4), -np.inf)
    np.fill_diagonal(one, 0.0)
    assert (max_plus_product(one, a) == a).all()
