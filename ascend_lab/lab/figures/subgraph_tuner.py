"""Figures of the subgraph tuner: bands through L2, times by number of slices, rows of a halo."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from matplotlib.axes import Axes

from ascend_lab.aoe.subgraph.slicing import HALOS, Region, even, ranges_of
from ascend_lab.errors import InputError
from ascend_lab.graph import Graph
from ascend_lab.graph.slice import part_of
from ascend_lab.lab.figures import style as st

FROM_L2, FROM_MEMORY, LAUNCH = 1, 4, 4
"""Times of the model of two operators: a row to or from L2, one to or from memory, a kernel."""
LOOKS = {
    "miss": (st.VERMILLION, "xx", "read, from memory"),
    "hit": (st.GREEN, "", "read, hits L2"),
    "write": (st.SKY, "", "written to L2"),
    "back": (st.PURPLE, "//", "dirty, back to memory"),
}
Event = tuple[str, int, int, int]
"""Kind, address in rows, start, end."""


@dataclass
class Bands:
    """Two operators y = f(x), z = g(y) row by row through an L2 that holds the rows used last.

    A row of z needs the rows of y up to `halo` away. Rows of y that two slices need are computed
    twice, or kept if `stored`; else all slices of y lie at the same addresses.
    """

    rows: int
    l2_rows: int
    sizes: tuple[int, ...]
    halo: int = 0
    stored: bool = False
    now: int = 0
    events: list[Event] = field(default_factory=list)
    stays: list[tuple[int, int, int]] = field(default_factory=list)
    """Address, and from when to when its row is in L2."""

    def __post_init__(self) -> None:
        """Run all slices, one after another."""
        self._held: OrderedDict[int, tuple[int, bool]] = OrderedDict()
        ends = list(pairwise([0, *accumulate(self.sizes)]))
        needs = [(max(0, a - self.halo), min(self.rows, b + self.halo)) for a, b in ends]
        self.y_rows = self.rows if self.stored else max(high - low for low, high in needs)
        done = 0
        for (a, b), (low, high) in zip(ends, needs, strict=True):
            self._slice(a, b, low, high, max(low, done) if self.stored else low)
            done = high
        self.stays += [(at, since, self.now) for at, (since, _) in self._held.items()]

    @property
    def base(self) -> tuple[int, int]:
        """First address of y and of z."""
        return self.rows, self.rows + self.y_rows

    def count(self, kind: str) -> int:
        """Return how often something happened."""
        return sum(event[0] == kind for event in self.events)

    @property
    def memory_rows(self) -> int:
        """Rows to and from memory, what is left dirty in L2 at the end included."""
        dirty = sum(d for _, d in self._held.values())
        return self.count("miss") + self.count("back") + dirty

    def _slice(self, a: int, b: int, low: int, high: int, first: int) -> None:
        y, z = self.base
        y -= 0 if self.stored else low
        self._event("launch", 0, LAUNCH)
        for row in range(first, high):
            self._touch(row)
            self._touch(y + row, write=True)
        self._event("launch", 0, LAUNCH)
        read = low
        for row in range(a, b):
            stop = min(high, row + self.halo + 1)
            for other in range(read, stop):
                self._touch(y + other)
            read = stop
            self._touch(z + row, write=True)

    def _touch(self, at: int, write: bool = False) -> None:
        held = at in self._held
        kind = "write" if write else "hit" if held else "miss"
        self._event(kind, at, FROM_MEMORY if kind == "miss" else FROM_L2)
        since, dirty = self._held.pop(at, (self.now, False))
        self._held[at] = since, dirty or write
        while len(self._held) > self.l2_rows:
            gone, (since, dirty) = self._held.popitem(last=False)
            self.stays.append((gone, since, self.now))
            if dirty:
                self._event("back", gone, FROM_MEMORY)

    def _event(self, kind: str, at: int, length: int) -> None:
        self.events.append((kind, at, self.now, self.now + length))
        self.now += length


def two_operators(
    rows: int = 12, l2_rows: int = 8, slices: int = 1, halo: int = 0, stored: bool = False
) -> Bands:
    """Return two operators in equal slices; raise `InputError` for more slices than rows."""
    if not 1 <= slices <= rows:
        raise InputError(f"1 to {rows} slices", str(slices), "cut no row in two")
    if l2_rows < 2:
        raise InputError("an L2 of at least 2 rows", str(l2_rows), "take a larger one")
    return Bands(rows, l2_rows, even(rows, slices), halo, stored)


@st.styled
def fig_bands(
    slices: int = 3, l2_rows: int = 9, halo: int = 0, stored: bool = False, rows: int = 12
) -> st.LabFigure:
    """Draw two operators whole and in slices: time across, addresses of x, y and z down.

    Shaded is what L2 holds. Raises as `two_operators`.
    """
    cases = {
        "whole": two_operators(rows, l2_rows, 1, halo, stored),
        f"{slices} slices": two_operators(rows, l2_rows, slices, halo, stored),
    }
    heights = [case.base[1] + case.rows for case in cases.values()]
    fig, axes = st.new_figure(2, 1, 0.9 + 0.075 * sum(heights), sharex=True, height_ratios=heights)
    told = []
    for ax, (name, case) in zip(axes, cases.items(), strict=True):
        _draw_bands(ax, case)
        hits, misses = case.count("hit"), case.count("miss")
        said = f"{hits} rows hit, {misses} from memory, {case.memory_rows} rows moved"
        ax.set_title(f"{name}: time {case.now}; {said}", loc="left")
        told.append(f"{name}: {said}, time {case.now}")
    axes[1].set_xlabel("time (one row of L2 = 1)")
    axes[1].set_xlim(0, 1.01 * max(case.now for case in cases.values()))
    looks = {label: {"fc": c, "hatch": h, "ec": st.INK} for c, h, label in LOOKS.values()}
    looks |= {"is in L2": {"fc": st.LIGHT}, "launch": {"fc": st.GREY}}
    st.key(fig, looks, loc="outside lower center", ncols=3)
    kept = "stored" if stored else "recomputed"
    alt = f"Two operators on {rows} rows, an L2 of {l2_rows} rows, halo {halo} {kept}."
    return st.finish(fig, alt=f"{alt} {'; '.join(told)}.")


def _draw_bands(ax: Axes, case: Bands) -> None:
    y, z = case.base
    top = z + case.rows
    for at, since, until in case.stays:
        st.box(ax, since, at, until - since, 1, fc=st.LIGHT, lw=0)
    for kind, at, start, end in case.events:
        if kind == "launch":
            st.box(ax, start, 0, end - start, top, fc=st.GREY, alpha=0.45, lw=0)
            continue
        colour, hatch, _ = LOOKS[kind]
        st.box(ax, start, at, end - start, 1, fc=colour, hatch=hatch, ec=st.INK, lw=0.4)
    for edge in (y, z):
        ax.axhline(edge, color=st.INK, lw=0.8)
    ax.set_ylim(top, 0)
    ax.set_yticks([y / 2, (y + z) / 2, (z + top) / 2], ["x", "y", "z"])
    ax.tick_params(axis="y", length=0)


@st.styled
def fig_slice_times(
    times: Mapping[int, float], floor: float, launches: float, fits: int | None = None
) -> st.LabFigure:
    """Draw microseconds by number of slices (1: whole), and what all hits and launches come to.

    `floor` is the time of the whole if everything hit, `launches` what one more slice costs, `fits`
    the least number at which the live set fits into L2. Raises `InputError` without times.
    """
    if not times or 1 not in times:
        raise InputError("times by number of slices, from 1 on", str(list(times)))
    counts = sorted(times)
    fig, ax = st.new_figure(height_in=2.7)
    x = range(len(counts))
    low = [floor + (n - 1) * launches for n in counts]
    look: dict[str, Any] = {"ec": st.INK, "lw": 0.6, "width": 0.6}
    ax.bar(x, [times[n] for n in counts], color=st.SKY, label="simulated", **look)
    ax.bar(x, low, color=st.GREEN, label="if everything hit L2", **look)
    extra = [(n - 1) * launches for n in counts]
    ax.bar(x, extra, color=st.GREY, hatch="//", label="extra starts", **look)
    ax.axhline(times[1], color=st.VERMILLION, ls="--", lw=1, label="whole")
    for i, n in enumerate(counts):
        ax.text(i, times[n], f"{times[n]:,.0f}", ha="center", va="bottom", fontsize=8)
    if fits is not None:
        ax.axvline(sum(n < fits for n in counts) - 0.5, color=st.INK, ls=":", lw=1)
        at = sum(n < fits for n in counts) - 0.46, 1.17 * max(times.values())
        ax.text(*at, "live set fits", fontsize=8, va="top")
    ax.set_ylim(0, 1.2 * max(times.values()))
    ax.set_xticks(list(x), [str(n) for n in counts])
    ax.set(xlabel="slices", ylabel="time (µs)")
    fig.legend(loc="outside upper center", ncols=4)
    said = ", ".join(f"{n}: {times[n]:,.0f}" for n in counts)
    alt = f"Microseconds by number of slices: {said}. With all reads hitting, {floor:,.0f} whole"
    return st.finish(fig, alt=f"{alt}, and {launches:,.0f} more for each further slice.")


@st.styled
def fig_halo(graph: Graph, parts: Sequence[int], axis: str = "height") -> st.LabFigure:
    """Draw which rows of each result each slice computes, halo recomputed and stored.

    Elementwise nodes are left out. Raises as `ranges_of`.
    """
    part = part_of(graph, graph.nodes, graph.name)
    fig, axes = st.new_figure(ncols=2, height_in=2.8, sharey=True)
    told = []
    for ax, halo in zip(axes, HALOS, strict=True):
        region = Region(graph.nodes[0].name, graph.nodes[-1].name, axis, tuple(parts), halo=halo)
        found = ranges_of(part, region)
        names = [n.name for n in part.nodes if not n.has("lanes")]
        total = 0
        for x, name in enumerate(names):
            spans = [found.spans.get((name, i)) for i in range(len(parts))]
            total += _draw_spans(ax, x, spans)
        ax.set_xticks(range(len(names)), names, rotation=30, ha="right", rotation_mode="anchor")
        ax.set_title(f"{halo}: {total} rows computed", loc="left")
        told.append(f"{halo}: {total} rows of {len(names)} results computed")
    axes[0].set_ylabel("row")
    axes[0].invert_yaxis()
    sizes = "+".join(map(str, parts))
    alt = f"Rows each slice of {sizes} computes of each result. {'; '.join(told)}."
    return st.finish(fig, alt=alt)


def _draw_spans(ax: Axes, x: int, spans: Sequence[tuple[int, int] | None]) -> int:
    """Draw one column of ranges, side by side, and return the rows they have together."""
    total, width = 0, 0.8 / len(spans)
    colours = (st.BLUE, st.ORANGE, st.GREEN, st.PURPLE, *st.PALETTE)
    for i, span in enumerate(spans):
        if span:
            look: dict[str, Any] = {"color": colours[i % len(colours)], "ec": st.INK, "lw": 0.4}
            at, rows = x - 0.4 + (i + 0.5) * width, span[1] - span[0]
            ax.bar(at, rows, width, span[0], **look)
            total += rows
    return total
