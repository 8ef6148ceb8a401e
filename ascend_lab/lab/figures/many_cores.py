"""Figures of work on many cores: how even the shares are, ways to fold, ways to scatter."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.ticker import MaxNLocator

from ascend_lab.lab.figures import style as st
from ascend_lab.lab.kernels import cross_core_folds
from ascend_lab.machine import sim
from ascend_lab.machine.chip import BLOCK_BYTES, Chip, load_chip
from ascend_lab.machine.isa import Kernel, c0_of
from ascend_lab.operators import dsl as te

WAYS: Mapping[str, tuple[str, str, str]] = {
    "kept": (st.BLUE, "-", ""),
    "two_pass": (st.VERMILLION, "--", "s"),
    "tree": (st.GREEN, "-.", "^"),
    "chain": (st.PURPLE, ":", "D"),
    "atomic": (st.ORANGE, "--", "v"),
}
"""Colour, line and marker of each way to fold: `kept`, without partial results, and the others."""
LABELS = {"kept": "kept axis cut", "two_pass": "two-pass", "atomic": "atomic add"}
Shape = tuple[int, int]


def unit_shares(units: int, cores: int, block: int = 1) -> list[int]:
    """Return the units of each core: all take equally many blocks, until none are left.

    100 units in blocks of 16 on 4 cores: 32, 32, 32 and 4.
    """
    per_core = -(-units // (block * cores)) * block
    return [max(0, min(per_core, units - per_core * core)) for core in range(cores)]


def balance(units: int, cores: int) -> float:
    """Return the efficiency of equal shares: units / (cores * ceil(units / cores))."""
    return units / (cores * -(-units // cores))


def row_sums(rows: int, columns: int, *, wide: bool = False) -> te.Tensor:
    """Return y, the sums of the rows of x (rows, columns), fp16, added in fp32, fp32 if `wide`."""
    x = te.placeholder((rows, columns), name="x")
    return te.renamed(te.reduce_sum(te.cast_to(x, "fp32") if wide else x, axis=1), "y")


def fold_time(
    chip: Chip, shape: Shape, way: str, cores: int, *, wide: bool = False
) -> sim.KernelTimeline:
    """Return the timeline of row sums of a matrix by one of `WAYS` on `cores` cores."""
    program = getattr(cross_core_folds, way)(row_sums(*shape, wide=wide), chip, cores)
    return sim.simulate_kernel(program if isinstance(program, Kernel) else te.lower(program), chip)


def fig_many_cores() -> st.LabFigure:
    """Draw the efficiency of row sums over the number of cores of an Ascend910A, two shapes.

    efficiency = cycles on one core / (cores * cycles); every point is a simulated program. Ways
    that cut the folded axis are drawn where the number of cores divides it and leaves each core
    whole 32-byte blocks. Sums of no more rows than cores are fp32. The grey area, with its teeth,
    is `balance`: the efficiency of equal shares of the blocks of results.
    """
    chip = load_chip("Ascend910A")
    shapes = ((1000, 1024), (8, 131072))
    ways = ("kept", "two_pass", "tree", "chain")
    most_cores = cross_core_folds.vector_cores(chip)
    fig, axes = st.new_figure(ncols=len(shapes), height_in=3.1, sharey=True)
    panels = st.panels(axes)
    alt_parts = [
        _panel(ax, chip, s, ways, most_cores) for ax, s in zip(panels, shapes, strict=True)
    ]
    panels[0].set(ylabel="efficiency", ylim=(0, 1.09))
    lines, names = panels[0].get_legend_handles_labels()
    fig.legend(lines, names, loc="outside upper center", ncols=len(names), columnspacing=1.2)
    return st.finish(
        fig, alt=f"Efficiency of row sums on 1 to {most_cores} cores. " + " ".join(alt_parts)
    )


def _panel(ax: Any, chip: Chip, shape: Shape, ways: Sequence[str], most_cores: int) -> str:
    """Draw the efficiency of one shape over the number of cores; return its ends in words."""
    rows, columns = shape
    has_few_rows = rows <= most_cores
    counts = range(1, most_cores + 1)
    units = rows if has_few_rows else -(-rows // c0_of("fp16"))
    single_core_cycles = fold_time(chip, shape, "kept", 1, wide=has_few_rows).cycles
    even_efficiency = [balance(units, n) for n in counts]
    ax.fill_between(counts, even_efficiency, color=st.LIGHT, step=None, zorder=0)
    ax.plot(counts, even_efficiency, color=st.GREY, lw=0.9, ls="-", label="even shares")
    end_texts = []
    for way in ways:
        colour, line, marker = WAYS[way]
        used_counts = counts if way == "kept" else cuttable(columns, most_cores)
        values = [
            single_core_cycles / (n * fold_time(chip, shape, way, n, wide=has_few_rows).cycles)
            for n in used_counts
        ]
        label = LABELS.get(way, way)
        size = 3.2 if way == "kept" else 5.5
        ax.plot(
            used_counts, values, color=colour, ls=line, marker=marker or "o", ms=size, label=label
        )
        end_texts.append(f"{label} {values[-1]:.2f}")
    for n in range(max(6, most_cores // 4), most_cores + 1):
        if even_efficiency[n - 1] > max(0.95, even_efficiency[n - 2]):
            ax.text(
                n, even_efficiency[n - 1] + 0.015, str(n), ha="center", fontsize=8, color=st.INK
            )
    ax.set_title(f"{rows:,} rows of {columns:,}", loc="left")
    ax.set(xlabel="cores", xlim=(0, most_cores + 1), xticks=[1, *range(8, most_cores + 1, 8)])
    return f"{rows:,} rows of {columns:,} on {most_cores} cores: {', '.join(end_texts)}."


def cuttable(columns: int, most_cores: int) -> list[int]:
    """Return the numbers of cores that cut fp16 rows into equal parts of whole 32-byte blocks."""
    return [
        n
        for n in range(1, most_cores + 1)
        if columns % n == 0 and columns // n % c0_of("fp16") == 0
    ]


def fig_fold_crossover(
    rows: Sequence[int], cycles: Mapping[str, Sequence[float]], floor_cycles: float
) -> st.LabFigure:
    """Draw cycles of ways to fold a matrix of a fixed number of elements over its rows."""
    fig, ax = st.new_figure(height_in=2.9)
    for name, values in cycles.items():
        colour, line, marker = WAYS[name]
        label = LABELS.get(name, name)
        ax.plot(rows, values, color=colour, ls=line, marker=marker or "o", ms=5, label=label)
    ax.axhline(floor_cycles, color=st.GREY, lw=1)
    note = {"fontsize": 8, "color": st.INK, "ha": "right", "va": "bottom"}
    ax.text(rows[-1], floor_cycles * 1.04, "memory needs this", **note)
    st.doubling(ax, rows)
    ax.set_yscale("log", base=2)
    top = max(map(max, cycles.values()))
    ticks = [1000 * 2**k for k in range(20) if floor_cycles * 0.7 < 1000 * 2**k < 1.5 * top]
    st.numbered(ax.yaxis, ticks)
    ax.set(xlabel="rows (results); the number of elements stays the same", ylabel="cycles")
    ax.legend(loc="upper center", ncols=2)
    ends = ((LABELS.get(name, name), values[0], values[-1]) for name, values in cycles.items())
    parts = [f"{name} {first:,.0f} to {last:,.0f}" for name, first, last in ends]
    alt = f"Cycles from {rows[0]:,} to {rows[-1]:,} rows: {'; '.join(parts)}. "
    return st.finish(fig, alt=alt + f"Memory alone needs {floor_cycles:,.0f}.")


def fig_shares(
    rows: int = 1000, columns: int = 1024, axis: str = "rows", cores: int = 32, aligned: bool = True
) -> st.LabFigure:
    """Draw which core adds up which part of a matrix of fp16 numbers, and what that takes.

    `axis` "rows": cores make whole results, 16 at a time if `aligned`; "columns": cores make a part
    of every result, as many equal parts as there are cores at most, of 16 columns if `aligned`.
    """
    chip = load_chip("Ascend910A")
    extent = rows if axis == "rows" else columns
    block = c0_of("fp16") if aligned else 1
    if axis == "columns":
        parts = max(n for n in range(1, cores + 1) if n == 1 or extent % (n * block) == 0)
        counts = [extent // parts] * parts + [0] * (cores - parts)
    else:
        counts = unit_shares(extent, cores, block)
    shape = rows, columns
    if axis == "columns":
        cycles = fold_time(chip, shape, "two_pass", sum(n > 0 for n in counts)).cycles
    else:
        s = te.inline(te.create_schedule(row_sums(*shape), chip), "cast_to")
        s = te.bind(te.split(s, "y", "i", counts[0]), "y", "i_o")
        s = te.split(s, "y", "i_i", max(1, min(counts[0], 16, 2**14 // columns)))
        s = te.compute_at(te.double_buffer(s, "reduce_sum"), "reduce_sum", "y", "i_i_o")
        cycles = sim.simulate_kernel(te.lower(te.double_buffer(s, "y")), chip).cycles
    fig, (left, right) = st.new_figure(ncols=2, height_in=2.9, width_ratios=(1, 1.4))
    _bands(left, counts, axis)
    left.set_title(f"{rows:,} rows, {columns:,} columns", loc="left")
    busy = sum(n > 0 for n in counts)
    even = extent / cores
    _work(right, counts, even, f"{axis} of a core")
    share = even / max(counts)
    right.set_title(f"{busy} of {cores} cores, {share:.0%} even, {cycles:,} cycles", loc="left")
    alt = (
        f"A matrix of {rows:,} rows and {columns:,} columns cut by {axis} for {cores} cores in "
        f"blocks of {block}: {busy} cores work, the most loaded has {max(counts):,} {axis} where "
        f"even shares would have {even:.4g}, an efficiency of {share:.0%}. The sums of its rows "
        f"take {cycles:,} cycles on {chip.name}."
    )
    return st.finish(fig, alt=alt)


def _bands(ax: Any, counts: Sequence[int], axis: str) -> None:
    """Draw the matrix as a square, a band per core that works."""
    start = 0.0
    extent = sum(counts)
    for core, count in enumerate(counts):
        size = count / extent
        band = (0.0, start, 1.0, size) if axis == "rows" else (start, 0.0, size, 1.0)
        face, ink = (st.SKY, st.INK) if core % 2 else (st.BLUE, "white")
        if count:
            st.box(ax, *band, facecolor=face, edgecolor="white", lw=0.5)
        if size > 0.06:
            st.put(ax, band[0] + band[2] / 2, band[1] + band[3] / 2, str(core), color=ink)
        start += size
    ax.set(xlim=(-0.02, 1.02), ylim=(1.02, -0.02), aspect="equal")
    ax.axis("off")


def _work(ax: Any, counts: Sequence[int], even: float, label: str) -> None:
    """Draw the work of each core and the line of even shares."""
    colours = [st.SKY if core % 2 else st.BLUE for core in range(len(counts))]
    ax.bar(range(len(counts)), counts, color=colours, width=0.85)
    for core in (core for core, count in enumerate(counts) if not count):
        ax.plot(core, 0, marker="x", color=st.VERMILLION, ms=5, clip_on=False)
    ax.axhline(even, color=st.INK, lw=1, ls="--")
    top = max(counts)
    for line in (ax.xaxis, ax.yaxis):
        line.set_major_locator(MaxNLocator("auto", integer=True))
    ax.text(len(counts) - 0.5, top * 1.13, "dashed: even shares", ha="right", fontsize=8)
    ax.set(xlim=(-0.7, len(counts) - 0.3), ylim=(0, top * 1.25))
    ax.set(xlabel="core (x: idle)", ylabel=label)


# -- the transpose and scatter chapter: block shapes, conflicts, ways to scatter -------------------
SIDES = (1, 2, 4, 8, 16, 32, 64)
SCATTERS = {"owner": (st.BLUE, "o"), "atomic": (st.VERMILLION, "s"), "sorted": (st.GREEN, "^")}
HEAT = LinearSegmentedColormap.from_list("heat", [st.PAPER, "#f3c98b", "#d55e00"])


def wire_ratio(rows: int, columns: int, itemsize: int) -> float:
    """Return the bytes transferred per byte needed to transpose a matrix in rows x columns blocks.

    A block is loaded in bursts of `columns` elements and stored in bursts of `rows`; every burst
    takes whole 32-byte blocks. The mean of load and store.
    """
    bursts = [side * itemsize for side in (rows, columns)]
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES / size for size in bursts) / 2


def draw_indices(updates: int, rows: int, duplicates: float, seed: int = 0) -> np.ndarray:
    """Return `updates` row numbers, a share `duplicates` of them repeating an earlier one."""
    distinct_count = updates - round(duplicates * updates)
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(rows)[:distinct_count]
    repeated = rng.choice(chosen, updates - distinct_count)
    return rng.permutation(np.concatenate([chosen, repeated]))


def conflicts(index: np.ndarray, cores: int) -> dict[int, list[int]]:
    """Return the rows that several cores write, with those cores; all have as many updates."""
    updates_per_core = -(-len(index) // cores)
    writers: dict[int, set[int]] = {}
    for position, row in enumerate(index):
        writers.setdefault(int(row), set()).add(position // updates_per_core)
    return {row: sorted(w) for row, w in sorted(writers.items()) if len(w) > 1}


def fig_blocks_and_conflicts(
    block_rows: int = 16,
    block_columns: int = 16,
    duplicates: float = 0.25,
    cores: int = 4,
    updates: int = 16,
    itemsize: int = 2,
) -> st.LabFigure:
    """Draw wire bytes over block shapes beside the cores and rows of a scatter."""
    rows = 16
    index = draw_indices(updates, rows, duplicates)
    fig, (left, right) = st.new_figure(ncols=2, height_in=3.3, width_ratios=(1.15, 1))
    _heat(left, (block_rows, block_columns), itemsize)
    shared_rows = _graph(right, index, cores, rows)
    ratio = wire_ratio(block_rows, block_columns, itemsize)
    corners = wire_ratio(1, 1, itemsize), wire_ratio(16, 16, itemsize)
    named = [f"row {row} by cores {', '.join(map(str, who))}" for row, who in shared_rows.items()]
    alt = (
        f"Left: bytes on the wires per byte moved for blocks of 1 to 64 rows and columns, from "
        f"{corners[0]:.3g} for single elements to {corners[1]:.3g} for 16 x 16; the framed block "
        f"{block_rows} x {block_columns} needs {ratio:.3g}. Right: {updates} updates of "
        f"{cores} cores to {len(set(index.tolist()))} of {rows} rows; {len(shared_rows)} rows are "
        f"written by more than one core{': ' if named else ''}{'; '.join(named[:6])}."
    )
    return st.finish(fig, alt=alt)


def _heat(ax: Any, chosen: tuple[int, int], itemsize: int) -> None:
    """Draw `wire_ratio` for all shapes of blocks, with a frame around the chosen one."""
    grid = np.array([[wire_ratio(r, c, itemsize) for c in SIDES] for r in SIDES])
    ax.imshow(grid, cmap=HEAT, norm=LogNorm(1, BLOCK_BYTES / itemsize), origin="lower")
    for i, row in enumerate(grid):
        for j, value in enumerate(row):
            text = f"{value:.2g}" if value < 9.95 else f"{value:.0f}"
            st.put(ax, j, i, text, fontsize=7, color="black")
    row, column = (float(np.log2(side)) - 0.5 for side in chosen)
    st.box(ax, column, row, 1, 1, fill=False, edgecolor="black", linewidth=2.2)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks(range(len(SIDES)), labels=[str(s) for s in SIDES])
    ax.set(xlabel="columns of a block (burst of the load)", ylabel="rows (burst of the store)")
    ax.set_title("bytes on the wires per byte", loc="left")
    ax.tick_params(length=0)


def _graph(ax: Any, index: np.ndarray, cores: int, rows: int) -> dict[int, list[int]]:
    """Draw an edge from core to row for each update, and return the rows with several cores."""
    shared_rows = conflicts(index, cores)
    updates_per_core = -(-len(index) // cores)
    height = float(max(rows - 1, 1))

    def core_y(core: int) -> float:
        return height * (1 - (core + 0.5) / cores)

    for position, row in enumerate(index):
        is_shared = int(row) in shared_rows
        colour, width, line = (st.VERMILLION, 1.8, "-") if is_shared else (st.GREY, 0.9, "--")
        place = [core_y(position // updates_per_core), height - int(row)]
        ax.plot([0, 1], place, color=colour, lw=width, ls=line, zorder=1)
    for core in range(cores):
        ax.plot(0, core_y(core), marker="s", ms=15, mfc=st.PAPER, mec=st.BLUE, mew=1.4, zorder=2)
        st.put(ax, 0, core_y(core), str(core), color="black")
    for row in range(rows):
        shared_look = (st.VERMILLION, st.VERMILLION, "X")
        face, edge, marker = shared_look if row in shared_rows else (st.PAPER, st.GREEN, "o")
        ax.plot(1, height - row, marker=marker, ms=6.5, mfc=face, mec=edge, zorder=2)
        ax.text(1.07, height - row, str(row), va="center", fontsize=7, color=st.INK)
    ax.text(0, height + 1.1, "cores", ha="center", color=st.INK)
    ax.text(1, height + 1.1, "rows", ha="center", color=st.INK)
    ax.set_title(f"{len(shared_rows)} torn rows", loc="left")
    ax.set(xlim=(-0.2, 1.25), ylim=(-0.8, height + 2))
    ax.axis("off")
    return shared_rows


def fig_scatter_ways(
    times_each: Sequence[int],
    moved_bytes: Mapping[str, Sequence[float]],
    cycles: Mapping[str, Sequence[float]],
) -> st.LabFigure:
    """Draw bytes and cycles of ways to scatter over how often each row is updated.

    `moved_bytes` and `cycles` give per way (owner, atomic, sorted) one number per entry of
    `times_each`.
    """
    fig, (left, right) = st.new_figure(ncols=2, height_in=2.6)
    panels = ((left, moved_bytes, "kB through memory"), (right, cycles, "kilocycles"))
    for ax, data, label in panels:
        for name, values in data.items():
            colour, marker = SCATTERS[name]
            scaled = [v * 1e-3 for v in values]
            ax.plot(times_each, scaled, color=colour, marker=marker, ms=5, label=name)
        st.doubling(ax, times_each)
        ax.set(xlabel="updates of each row", ylabel=label)
    left.set_ylim(bottom=0)
    right.set_yscale("log")
    right.legend(loc="center right")
    parts = []
    for name, values in moved_bytes.items():
        kb = [value / 1e3 for value in values]
        clock = cycles[name]
        took = f"{clock[0]:,.0f} to {clock[-1]:,.0f} cycles"
        parts.append(f"{name} {kb[0]:.0f} to {kb[-1]:.0f} kB and {took}")
    span = f"from {times_each[0]} to {times_each[-1]} updates of each row"
    return st.finish(fig, alt=f"Bytes and cycles of a scatter {span}: {'; '.join(parts)}.")
