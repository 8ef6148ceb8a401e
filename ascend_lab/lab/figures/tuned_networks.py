"""Figures of tuned networks: the time after each technique, its credit, ledgers, and slicing."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from matplotlib.axes import Axes

from ascend_lab.aoe.subgraph.slicing import HALOS, Region, even, ranges_of
from ascend_lab.compiler import Graph, simulate_graph
from ascend_lab.compiler.slice import part_of
from ascend_lab.compiler.zoo.blocks import Net
from ascend_lab.lab.figures import style as st
from ascend_lab.lab.tuning import TECHNIQUES, Times, compile_with, factor_range, factors
from ascend_lab.machine.chip import load_chip

Steps = Sequence[tuple[str, float]]
"""(what was done, milliseconds after it), the first one before anything was done."""
VISIBLE = 0.005
"""Smaller shares are not drawn."""
TERM_STYLE: dict[str, dict[str, Any]] = {
    term: {"facecolor": getattr(st, colour), "hatch": hatch}
    for term, (colour, hatch) in st.LOOKS["terms"].items()
}
"""How the terms of `compiler.compile.ledger` are drawn."""


def fig_waterfall(networks: Mapping[str, tuple[Steps, float]]) -> st.LabFigure:
    """Draw the time of each network after one technique more, and its bound, in milliseconds."""
    fig, axes = st.new_figure(nrows=len(networks), height_in=2.7 * len(networks))
    alt_parts = []
    for ax, (name, (steps, bound_ms)) in zip(st.panels(axes), networks.items(), strict=True):
        _waterfall(ax, steps, bound_ms)
        ax.set_title(name, loc="left")
        ax.set_ylabel("ms (model)")
        rows = ", ".join(f"{label} {ms:.3g}" for label, ms in steps)
        alt_parts.append(f"{name}: {rows}; bound {bound_ms:.3g}")
    return st.finish(fig, alt=f"Milliseconds after each technique. {'. '.join(alt_parts)}.")


def _waterfall(ax: Axes, steps: Steps, bound_ms: float) -> None:
    """Draw the first time, the change by each technique, the last time, and the bound as a line."""
    low = bound_ms / 1.3
    high = steps[0][1] * 1.5
    ax.set(yscale="log", ylim=(low, high), xlim=(-0.6, len(steps) + 0.6))
    ax.bar(0, steps[0][1] - low, bottom=low, width=0.7, facecolor=st.GREY, edgecolor=st.INK)
    for at, ((_, before), (_, after)) in enumerate(pairwise(steps), 1):
        worse = after > before
        colour, hatch = (st.VERMILLION, "xx") if worse else (st.SKY, "")
        bottom, top = sorted((before, after))
        ax.bar(at, top - bottom, bottom=bottom, width=0.7, fc=colour, ec=st.INK, hatch=hatch)
        summary = ax.text(at, bottom * 0.95, f"{before / after:.2f}x", ha="center", va="top")
        summary.set(fontsize=8, zorder=3, bbox={"fc": "w", "ec": "none", "pad": 0.6})
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
    st.numbered(ax.yaxis, [t for t in (1, 3, 5, 10, 30, 100, 300, 1000, 3000) if low <= t <= high])


LADDER = {
    "as documented": (st.VERMILLION, "s"),
    "ours": (st.BLUE, "o"),
    "tuned": (st.GREEN, "D"),
}
"""Compilers of `fig_compilers`, the slowest first -> colour and marker."""


def fig_compilers(times_s: Mapping[str, Mapping[str, float]]) -> st.LabFigure:
    """Draw how many times its bound a network takes by each compiler, a line a network.

    `times_s` has seconds by network, for each of LADDER and "bound".
    """
    fig, ax = st.new_figure(height_in=0.9 + 0.32 * len(times_s))
    alt_parts = []
    for row, (network, seconds) in enumerate(times_s.items()):
        shares = [seconds[name] / seconds["bound"] for name in LADDER]
        ax.plot(shares, [row] * len(shares), color=st.GREY, linewidth=1.0, zorder=1)
        for share, (colour, marker) in zip(shares, LADDER.values(), strict=True):
            ax.plot(share, row, marker=marker, color=colour, markeredgecolor=st.INK, zorder=2)
        steps = ", ".join(f"{n} {s:.1f}" for n, s in zip(LADDER, shares, strict=True))
        alt_parts.append(f"{network}: {steps}")
    for name, (colour, marker) in LADDER.items():
        ax.plot([], [], marker=marker, color=colour, linestyle="none", label=name)
    ax.axvline(1.0, color=st.INK, linewidth=0.8)
    ax.set(xscale="log", xlabel="times the bound")
    ax.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    ax.minorticks_off()
    st.name_rows(ax, list(times_s))
    fig.legend(loc="outside upper center", ncols=len(LADDER), fontsize=8)
    return st.finish(fig, alt=f"Time over bound by compiler. {'; '.join(alt_parts)}.")


def fig_credit(times: Times) -> st.LabFigure:
    """Draw the factor each technique is credited with, and its range over all orders."""
    names = TECHNIQUES
    credit_of = factors(times, TECHNIQUES)
    fig, ax = st.new_figure(height_in=2.6)
    alt_parts = []
    for row, name in enumerate(names):
        least, most = factor_range(times, name, names)
        ax.plot([least, most], [row, row], color=st.GREY, lw=5, solid_capstyle="butt", ls="-")
        ax.plot(credit_of[name], row, "o", color=st.VERMILLION, ms=8, mec=st.INK)
        ax.text(most * 1.03, row, f"{credit_of[name]:.2f}x", va="center", fontsize=8)
        alt_parts.append(f"{name} {credit_of[name]:.2f} ({least:.2f} to {most:.2f})")
    ax.axvline(1, color=st.INK, lw=0.8, ls=(0, (3, 2)))
    ax.set_xscale("log")
    ax.set_yticks(range(len(names)), names)
    low, high = ax.get_xlim()
    st.numbered(ax.xaxis, [t for t in (0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8) if low <= t <= high], "x")
    ax.set_xlim(low, high * 1.12)
    ax.invert_yaxis()
    ax.set_xlabel("times faster: least and most over all orders (grey), credit (dot)")
    return st.finish(fig, alt=f"Credit, and range over all orders: {', '.join(alt_parts)}.")


def fig_ledger(ledgers: Mapping[str, Mapping[str, float]], *, shares: bool = True) -> st.LabFigure:
    """Draw each network's ledger as one bar, terms as shares of its time or of the longest."""
    fig, ax = st.new_figure(height_in=0.45 * len(ledgers) + 1.5)
    alt_parts = []
    used_terms = set[str]()
    looks = {term: {"edgecolor": st.INK, **style} for term, style in TERM_STYLE.items()}
    longest_s = max(sum(ledger.values()) for ledger in ledgers.values())
    for row, (name, found) in enumerate(ledgers.items()):
        total_s = sum(found.values())
        scale = 1.0 if shares else total_s / longest_s
        shown = {term: s / total_s for term, s in found.items() if s >= VISIBLE * total_s}
        used_terms |= shown.keys()
        st.stack(
            ax, row, [(scale * share, {"height": 0.6, **looks[t]}) for t, share in shown.items()]
        )
        times = f"{total_s / found['bound']:.2g}x" if found["bound"] else ""
        ax.text(scale + 0.01, row, f"{total_s * 1e3:.3g} ms\n{times}", va="center", fontsize=8)
        split = ", ".join(f"{term} {share:.0%}" for term, share in shown.items())
        alt_parts.append(f"{name} {total_s * 1e3:.3g} ms: {split}")
    st.name_rows(ax, ledgers)
    whose = "the" if shares else "the longest"
    label = f"share of {whose} time; right: time, and how many times the bound"
    ax.set(xlim=(0, 1.13), xlabel=label)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    shades = {term: look for term, look in looks.items() if term in used_terms}
    st.key(fig, shades, loc="outside upper center", ncols=4)
    return st.finish(fig, alt=f"Where the time goes. {'; '.join(alt_parts)}.")


@cache
def one_block(batch: int = 16) -> Graph:
    """Return the first convolution of a ResNet, one block of two 3 x 3 ones, and a classifier."""
    net = Net("one_block", "fp32")
    x = net.conv_norm(net.images(batch, 3, 112), 64, 7, stride=2, name="stem")
    y = net.conv_norm(x, 64, 3, name="1")
    y = net.conv_norm(y, 64, 3, act="", name="2")
    return net.finish(net.head(net.act(net.add(y, x, name="add"), "relu", name="relu"), 10))


def fig_switches(
    rewriting: bool = True,
    layouts: bool = True,
    fusion: bool = True,
    large_tiles: bool = True,
    double_buffers: bool = True,
    chip: str = "Ascend310",
) -> st.LabFigure:
    """Draw the kernels of a small network by a compiler with these techniques, in their order."""
    switches = (rewriting, layouts, fusion, large_tiles, double_buffers)
    on = [name for name, is_on in zip(TECHNIQUES, switches, strict=True) if is_on]
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
    setting = f"without {off}" if off else "with all techniques"
    time_text = (
        f"{len(line.operators)} kernels, {left:.2f} ms, {factor:.2f} times the {best * 1e3:.2f} ms"
    )
    alt = f"A network of one block on {chip} {setting}: {time_text} of the default compiler."
    return st.finish(fig, alt=alt)


# -- the subgraph tuner: slices that pass through L2, their number, and the rows of a halo ---------
FROM_L2 = 1
"""Time of a row to or from L2, in the model of two operators."""
FROM_MEMORY = 4
"""Time of a row to or from memory."""
LAUNCH = 4
"""Time of the launch of a kernel."""
LOOKS = {
    "miss": (st.VERMILLION, "xx", "read, from memory"),
    "hit": (st.GREEN, "", "read, hits L2"),
    "write": (st.SKY, "", "written to L2"),
    "back": (st.PURPLE, "//", "dirty, back to memory"),
}
Event = tuple[str, int, int, int]
"""Kind (a key of `LOOKS`, or "launch"), address in rows, start, end."""


@dataclass
class Bands:
    """Two operators y = f(x), z = g(y), slice by slice, with an L2 that holds the rows used last.

    x has `rows` rows, which the slices divide into `sizes`; L2 holds `l2_rows` rows. A row of z
    needs the rows of y up to `halo` away. If `stored`, every row of y is computed once and kept in
    memory; else rows that two slices need are computed twice, and all slices of y lie at the same
    addresses. `now` is the time after the run, and `events` is what happened.
    """

    rows: int
    l2_rows: int
    sizes: tuple[int, ...]
    halo: int
    stored: bool
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
        computed = 0  # rows of y
        for z_range, (low, high) in zip(ends, needs, strict=True):
            first = max(low, computed) if self.stored else low
            self._slice(z_range, (low, high), first)
            computed = high
        for address, (since, _) in self._held.items():
            self.stays.append((address, since, self.now))

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
        dirty_rows = sum(is_dirty for _, is_dirty in self._held.values())
        return self.count("miss") + self.count("back") + dirty_rows

    def _slice(self, z_range: tuple[int, int], y_range: tuple[int, int], first: int) -> None:
        """Run both operators on a slice: rows of y from `first` on, then the rows of z."""
        y_base, z_base = self.base
        low, high = y_range
        if not self.stored:
            y_base -= low
        self._event("launch", 0, LAUNCH)
        for row in range(first, high):
            self._touch(row)
            self._touch(y_base + row, write=True)
        self._event("launch", 0, LAUNCH)
        next_read = low
        for row in range(*z_range):
            stop = min(high, row + self.halo + 1)
            for y_row in range(next_read, stop):
                self._touch(y_base + y_row)
            next_read = stop
            self._touch(z_base + row, write=True)

    def _touch(self, address: int, write: bool = False) -> None:
        """Read or write a row, which is then in L2; the row used longest ago may leave it."""
        kind = "hit" if address in self._held else "miss"
        if write:
            kind = "write"
        self._event(kind, address, FROM_MEMORY if kind == "miss" else FROM_L2)
        since, dirty = self._held.pop(address, (self.now, False))
        self._held[address] = since, dirty or write
        while len(self._held) > self.l2_rows:
            evicted, (since, dirty) = self._held.popitem(last=False)
            self.stays.append((evicted, since, self.now))
            if dirty:
                self._event("back", evicted, FROM_MEMORY)

    def _event(self, kind: str, address: int, length: int) -> None:
        """Record an event that takes some time."""
        self.events.append((kind, address, self.now, self.now + length))
        self.now += length


def fig_bands(
    slices: int = 3, l2_rows: int = 9, halo: int = 0, stored: bool = False
) -> st.LabFigure:
    """Draw two operators whole and in slices: time across, addresses of x, y and z down."""
    rows = 12
    counts = {"whole": 1, f"{slices} slices": slices}
    cases = {
        name: Bands(rows, l2_rows, even(rows, count), halo, stored)
        for name, count in counts.items()
    }
    heights = [case.base[1] + case.rows for case in cases.values()]
    fig, axes = st.new_figure(2, 1, 0.9 + 0.075 * sum(heights), sharex=True, height_ratios=heights)
    alt_parts = []
    for ax, (name, case) in zip(axes, cases.items(), strict=True):
        _draw_bands(ax, case)
        hits = case.count("hit")
        misses = case.count("miss")
        summary = f"{hits} rows hit, {misses} from memory, {case.memory_rows} rows moved"
        ax.set_title(f"{name}: time {case.now}; {summary}", loc="left")
        alt_parts.append(f"{name}: {summary}, time {case.now}")
    axes[1].set_xlabel("time (one row of L2 = 1)")
    axes[1].set_xlim(0, 1.01 * max(case.now for case in cases.values()))
    looks = {label: {"fc": c, "hatch": h, "ec": st.INK} for c, h, label in LOOKS.values()}
    looks |= {"is in L2": {"fc": st.LIGHT}, "launch": {"fc": st.GREY}}
    st.key(fig, looks, loc="outside lower center", ncols=3)
    halo_text = "stored" if stored else "recomputed"
    alt = f"Two operators on {rows} rows, an L2 of {l2_rows} rows, halo {halo} {halo_text}."
    return st.finish(fig, alt=f"{alt} {'; '.join(alt_parts)}.")


def _draw_bands(ax: Axes, case: Bands) -> None:
    """Draw the events as boxes over time and address, grey behind them while a row is in L2."""
    y, z = case.base
    top = z + case.rows
    for address, since, until in case.stays:
        st.box(ax, since, address, until - since, 1, fc=st.LIGHT, lw=0)
    for kind, address, start, end in case.events:
        if kind == "launch":
            st.box(ax, start, 0, end - start, top, fc=st.GREY, alpha=0.45, lw=0)
            continue
        colour, hatch, _ = LOOKS[kind]
        st.box(ax, start, address, end - start, 1, fc=colour, hatch=hatch, ec=st.INK, lw=0.4)
    for edge in (y, z):
        ax.axhline(edge, color=st.INK, lw=0.8)
    ax.set_ylim(top, 0)
    ax.set_yticks([y / 2, (y + z) / 2, (z + top) / 2], ["x", "y", "z"])
    ax.tick_params(axis="y", length=0)


def fig_slice_times(
    times: Mapping[int, float], floor: float, launches: float, fits: int | None = None
) -> st.LabFigure:
    """Draw microseconds by number of slices (1: whole), and what all hits and launches come to.

    `floor` is the time of the whole if everything hit, `launches` what one more slice costs, `fits`
    the least number at which the live set fits into L2.
    """
    counts = sorted(times)
    fig, ax = st.new_figure(height_in=2.7)
    x = range(len(counts))
    best_times = [floor + (n - 1) * launches for n in counts]
    look: dict[str, Any] = {"ec": st.INK, "lw": 0.6, "width": 0.6}
    ax.bar(x, [times[n] for n in counts], color=st.SKY, label="simulated", **look)
    ax.bar(x, best_times, color=st.GREEN, label="if everything hit L2", **look)
    extra = [(n - 1) * launches for n in counts]
    ax.bar(x, extra, color=st.GREY, hatch="//", label="extra starts", **look)
    ax.axhline(times[1], color=st.VERMILLION, ls="--", lw=1, label="whole")
    for i, n in enumerate(counts):
        ax.text(i, times[n], f"{times[n]:,.0f}", ha="center", va="bottom", fontsize=8)
    top = max(times.values())
    if fits is not None:
        first_fitting = sum(n < fits for n in counts)
        ax.axvline(first_fitting - 0.5, color=st.INK, ls=":", lw=1)
        ax.text(first_fitting - 0.46, 1.17 * top, "live set fits", fontsize=8, va="top")
    ax.set_xticks(list(x), [str(n) for n in counts])
    ax.set(xlabel="slices", ylabel="time (µs)", ylim=(0, 1.2 * top))
    fig.legend(loc="outside upper center", ncols=4)
    summary = ", ".join(f"{n}: {times[n]:,.0f}" for n in counts)
    alt = f"Microseconds by number of slices: {summary}. With all reads hitting, {floor:,.0f} whole"
    return st.finish(fig, alt=f"{alt}, and {launches:,.0f} more for each further slice.")


def fig_halo(graph: Graph, parts: Sequence[int]) -> st.LabFigure:
    """Draw which rows of each result each slice computes, halo recomputed and stored."""
    piece = part_of(graph, graph.nodes, graph.name)
    fig, axes = st.new_figure(ncols=2, height_in=2.8, sharey=True)
    alt_parts = []
    colours = (st.BLUE, st.ORANGE, st.GREEN, st.PURPLE, *st.PALETTE)
    for ax, halo in zip(axes, HALOS, strict=True):
        first = graph.nodes[0].name
        last = graph.nodes[-1].name
        ranges = ranges_of(piece, Region(first, last, "height", tuple(parts), halo=halo))
        names = [n.name for n in piece.nodes if not n.has("lanes")]
        columns = [[ranges.spans.get((n, i)) for i in range(len(parts))] for n in names]
        total = 0
        width = 0.8 / len(parts)
        for x, spans in enumerate(columns):
            for i, span in enumerate(spans):
                if span:
                    rows = span[1] - span[0]
                    bar_x = x - 0.4 + (i + 0.5) * width
                    colour = colours[i % len(colours)]
                    ax.bar(bar_x, rows, width, span[0], color=colour, ec=st.INK, lw=0.4)
                    total += rows
        ax.set_xticks(range(len(names)), names, rotation=30, ha="right", rotation_mode="anchor")
        ax.set_title(f"{halo}: {total} rows computed", loc="left")
        alt_parts.append(f"{halo}: {total} rows of {len(names)} results computed")
    axes[0].set_ylabel("row")
    axes[0].invert_yaxis()
    sizes = "+".join(map(str, parts))
    alt = f"Rows each slice of {sizes} computes of each result. {'; '.join(alt_parts)}."
    return st.finish(fig, alt=alt)
