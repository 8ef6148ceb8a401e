"""Figures of chapter 9: a matrix coloured by address, one element in four layouts, padding."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from numpy.typing import NDArray

from ascend_lab.chip import BLOCK_BYTES
from ascend_lab.errors import InputError
from ascend_lab.lab.figures import style as st
from ascend_lab.layout import AddressMap, address, address_map, addresses, element_at

COLOURS = "cividis"
FORMATS = {"ND": "ND", "zZ": "FRACTAL_ZZ", "zN": "FRACTAL_ZN", "nZ": "FRACTAL_NZ"}
"""Short name in the book and name in the documentation."""

SMALL = 64
"""Up to this many elements every cell shows its address."""


def matrix_maps(rows: int = 32, columns: int = 48, dtype: str = "fp16") -> dict[str, AddressMap]:
    """Return the maps of one matrix in ND, zZ, zN and nZ, by the book's short names."""
    return {s: address_map(name, (rows, columns), dtype) for s, name in FORMATS.items()}


@st.styled
def fig_address_maps(maps: Mapping[str, AddressMap]) -> st.LabFigure:
    """Draw one matrix in up to four layouts, each element coloured by its address.

    Small matrices show every address; large ones number the fractals in storage order, and an
    arrow runs along the first elements of each.
    """
    small = all(layout.elements <= SMALL for layout in maps.values())
    fig, axes = st.new_figure(nrows=2, ncols=2, height_in=3.6 if small else 4.6)
    top = max(layout.elements for layout in maps.values()) - 1
    said, image = [], None
    for ax, (name, layout) in zip(axes.flat, maps.items(), strict=False):
        image = _colour(ax, layout, top)
        ax.set_title(f"{name}: {' '.join(_words(layout))}")
        if layout.elements <= SMALL:
            _write_addresses(ax, layout)
        else:
            _number_fractals(ax, layout)
        second, last = element_at(layout, 1), _place(layout, 0, layout.shape[1] - 1)
        said.append(f"{name}: address 1 holds {second}, the end of row 0 has address {last}")
    for ax in axes.flat[len(maps) :]:
        ax.axis("off")
    if image is not None and top >= SMALL:
        fig.colorbar(image, ax=axes, label="address in elements", shrink=0.7, aspect=30)
    shape = next(iter(maps.values())).shape
    alt = f"A matrix of {shape[0]} x {shape[1]} coloured by address. "
    return st.finish(fig, alt=alt + "; ".join(said) + ".")


@st.styled
def fig_element(
    row: int = 17, column: int = 21, dtype: str = "fp16", rows: int = 28, columns: int = 44
) -> st.LabFigure:
    """Mark one element of a ragged matrix in ND, zZ, zN and nZ, with its address in each.

    Hatched cells are padding. Raises `LayoutError` for an element outside the matrix.
    """
    maps = matrix_maps(rows, columns, dtype)
    fig, axes = st.new_figure(nrows=2, ncols=2, height_in=4.9)
    padded = np.array([layout.padded_shape for layout in maps.values()]).max(axis=0)
    said = []
    for ax, (name, layout) in zip(axes.flat, maps.items(), strict=True):
        _colour(ax, layout, layout.elements - 1)
        _hatch_padding(ax, layout)
        place = address(layout, (row, column))
        ax.axhline(row, color=st.VERMILLION, linewidth=0.7)
        ax.axvline(column, color=st.VERMILLION, linewidth=0.7)
        ax.plot([column], [row], "o", ms=7, color=st.VERMILLION, mec="#FFFFFF", zorder=5)
        ax.set(xlim=(-0.5, padded[1] - 0.5), ylim=(padded[0] - 0.5, -0.5))
        text = f"{name}: address {place:,}, {100 * layout.padded_share:.0f} % padding"
        ax.set_title(text)
        said.append(text)
    fig.suptitle(f"element ({row}, {column}) of {rows} x {columns} in {dtype}")
    alt = f"Element ({row}, {column}) of a {rows} x {columns} matrix in {dtype}. "
    return st.finish(fig, alt=alt + "; ".join(said) + ".")


@st.styled
def fig_padding(most: int = 96, dtypes: Sequence[str] = ("fp16", "int8")) -> st.LabFigure:
    """Draw which share of NC1HWC0 is padding, against the number of channels."""
    fig, ax = st.new_figure(height_in=2.7)
    channels = np.arange(1, most + 1)
    said = []
    for dtype, colour, style in zip(dtypes, (st.BLUE, st.VERMILLION), ("-", "--"), strict=False):
        shares = [padded_share(int(c), dtype) for c in channels]
        ax.plot(channels, shares, color=colour, linestyle=style, label=dtype)
        ax.plot([3], [shares[2]], marker="o", color=colour)
        ax.plot([3, 9], [shares[2]] * 2, color=colour, linestyle="-", linewidth=0.7)
        ax.text(9.5, shares[2], f"3 channels, {dtype}: {100 * shares[2]:.0f} %", va="center")
        none = [int(c) for c, share in zip(channels, shares, strict=True) if share == 0]
        said.append(
            f"{dtype}: {100 * shares[2]:.0f} % with 3 channels, none with {none[0]} and multiples"
        )
    ax.set(xlim=(0, most + 1), ylim=(0, 1), xlabel="channels", ylabel="padding")
    ax.set_xticks(range(0, most + 1, 16))
    ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    ax.legend(loc="upper right")
    return st.finish(fig, alt="Share of padding in NC1HWC0, saw teeth. " + "; ".join(said) + ".")


def padded_share(channels: int, dtype: str) -> float:
    """Return the share of NC1HWC0 that is padding for images of `channels` channels."""
    return address_map("NC1HWC0", (1, channels, 1, 1), dtype).padded_share


def _words(layout: AddressMap) -> list[str]:
    """Name the stored axes of a map: M1, M0, N for an axis in two pieces and one in one."""
    names = []
    for piece in layout.pieces:
        single = len(layout.of_axis(piece.axis)) == 1
        half = "" if single else "0" if piece.step == 1 else "1"
        names.append(layout.axes[piece.axis] + half)
    return names


def _place(layout: AddressMap, row: int, column: int) -> int:
    return int(address(layout, (row, column)))


def _colour(ax: Any, layout: AddressMap, top: int) -> Any:
    image = ax.imshow(addresses(layout), cmap=COLOURS, vmin=0, vmax=top, aspect="equal")
    rows, columns = _fractal(layout)
    height, width = layout.padded_shape
    ax.hlines([e - 0.5 for e in range(rows, height, rows)], -0.5, width - 0.5, "#FFFFFF", "-", lw=1)
    edges = [e - 0.5 for e in range(columns, width, columns)]
    ax.vlines(edges, -0.5, height - 0.5, "#FFFFFF", "-", lw=1)
    ax.set_xticks(range(0, width, columns if columns < width else max(width // 3, 1)))
    ax.set_yticks(range(0, height, rows if rows < height else max(height // 2, 1)))
    ax.spines[:].set_visible(False)
    return image


def _fractal(layout: AddressMap) -> tuple[int, int]:
    """Return rows and columns of a fractal, or of the whole matrix where none is cut."""
    sizes = [layout.of_axis(axis)[-1].count for axis in range(2)]
    return sizes[0], sizes[1]


def _write_addresses(ax: Any, layout: AddressMap) -> None:
    for (row, column), place in np.ndenumerate(addresses(layout)):
        dark = place < 0.45 * layout.elements
        st.put(ax, column, row, str(place), color="#FFFFFF" if dark else st.INK)


def _number_fractals(ax: Any, layout: AddressMap) -> None:
    rows, columns = _fractal(layout)
    whole = (rows, columns) == layout.shape
    for row in range(0, layout.shape[0], rows):
        for column in range(0, layout.shape[1], columns):
            start = _place(layout, row, column)
            number = start // (rows * columns)
            _arrow(ax, layout, start, columns if whole else min(rows, columns))
            if not whole:
                at = (column + (columns - 1) / 2, row + (rows - 1) / 2)
                paper = {"facecolor": st.PAPER, "edgecolor": "none", "pad": 1.5}
                st.put(ax, *at, str(number), fontsize=9, bbox=paper)


def _arrow(ax: Any, layout: AddressMap, start: int, length: int) -> None:
    """Draw an arrow along the first run of a fractal."""
    first, last = element_at(layout, start), element_at(layout, start + length - 1)
    if first is None or last is None:
        return
    down, right = (1.5, 0.0) if last[1] > first[1] else (0.0, 1.5)
    ends = [(column + right, row + down) for row, column in (first, last)]
    look = {"arrowstyle": "-|>", "color": "#FFFFFF", "linewidth": 1.2}
    ax.annotate("", xy=ends[1], xytext=ends[0], arrowprops=look)


def _hatch_padding(ax: Any, layout: AddressMap) -> None:
    (rows, columns), (height, width) = layout.shape, layout.padded_shape
    look = {"facecolor": st.LIGHT, "edgecolor": st.GREY, "hatch": "////", "linewidth": 0.0}
    st.box(ax, columns - 0.5, -0.5, width - columns, height, **look)
    st.box(ax, -0.5, rows - 0.5, columns, height - rows, **look)


# -- the transpose and scatter chapter: block shapes, conflicts, ways to scatter -------------------
SIDES = (1, 2, 4, 8, 16, 32, 64)
WAYS = {"owner": (st.BLUE, "o"), "atomic": (st.VERMILLION, "s"), "sorted": (st.GREEN, "^")}
HEAT = LinearSegmentedColormap.from_list("heat", [st.PAPER, "#f3c98b", "#d55e00"])


def wire_ratio(rows: int, columns: int, itemsize: int) -> float:
    """Bytes on the wires per byte moved when a matrix is transposed in rows x columns blocks.

    A block is loaded in bursts of `columns` elements and stored in bursts of `rows`; every burst
    takes whole 32-byte blocks. The mean of load and store.
    """
    bursts = [side * itemsize for side in (rows, columns)]
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES / size for size in bursts) / 2


def draw_indices(updates: int, rows: int, duplicates: float, seed: int = 0) -> NDArray[np.int64]:
    """Return `updates` row numbers, a share `duplicates` of them repeating an earlier one.

    Raises `InputError` unless the others find a row of their own.
    """
    fresh = updates - round(duplicates * updates)
    if not 1 <= fresh <= rows:
        raise InputError(
            f"between 1 and {rows} different rows", str(fresh), "change updates or duplicates"
        )
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(rows)[:fresh]
    again = rng.choice(chosen, updates - fresh)
    return rng.permutation(np.concatenate([chosen, again]))


def conflicts(index: NDArray[Any], cores: int) -> dict[int, list[int]]:
    """Return the rows that several cores write: row -> cores, updates dealt out in equal parts."""
    per = -(-len(index) // cores)
    writers: dict[int, set[int]] = {}
    for position, row in enumerate(index):
        writers.setdefault(int(row), set()).add(position // per)
    return {row: sorted(w) for row, w in sorted(writers.items()) if len(w) > 1}


@st.styled
def fig_blocks_and_conflicts(
    block_rows: int = 16,
    block_columns: int = 16,
    duplicates: float = 0.25,
    cores: int = 4,
    updates: int = 16,
    rows: int = 16,
    itemsize: int = 2,
    seed: int = 0,
) -> st.LabFigure:
    """Draw wire bytes over block shapes beside the cores and rows of a scatter.

    Left: every cell is a shape of block in which a matrix is transposed; the chosen one is framed.
    Right: an edge per update from the core that makes it to the row it changes; rows that more than
    one core changes are conflicts.
    """
    index = draw_indices(updates, rows, duplicates, seed)
    fig, (left, right) = st.new_figure(ncols=2, height_in=3.3, width_ratios=(1.15, 1))
    _heat(left, (block_rows, block_columns), itemsize)
    torn = _graph(right, index, cores, rows)
    ratio = wire_ratio(block_rows, block_columns, itemsize)
    corners = wire_ratio(1, 1, itemsize), wire_ratio(16, 16, itemsize)
    alt = (
        f"Left: bytes on the wires per byte moved for blocks of 1 to 64 rows and columns, from "
        f"{corners[0]:.3g} for single elements to {corners[1]:.3g} for 16 x 16; the framed block "
        f"{block_rows} x {block_columns} needs {ratio:.3g}. Right: {updates} updates of "
        f"{cores} cores to {len(set(index.tolist()))} of {rows} rows; {len(torn)} rows are written "
        f"by more than one core{_named(torn)}."
    )
    return st.finish(fig, alt=alt)


def _named(torn: Mapping[int, Sequence[int]]) -> str:
    parts = [f"row {row} by cores {', '.join(map(str, who))}" for row, who in torn.items()]
    return ": " + "; ".join(parts[:6]) if parts else ""


def _heat(ax: Any, chosen: tuple[int, int], itemsize: int) -> None:
    grid = np.array([[wire_ratio(r, c, itemsize) for c in SIDES] for r in SIDES])
    ax.imshow(grid, cmap=HEAT, norm=LogNorm(1, BLOCK_BYTES / itemsize), origin="lower")
    for i, row in enumerate(grid):
        for j, value in enumerate(row):
            text = f"{value:.2g}" if value < 9.95 else f"{value:.0f}"
            st.put(ax, j, i, text, fontsize=7, color="black")
    places = [float(np.log2(side)) for side in chosen]
    corner = places[1] - 0.5, places[0] - 0.5
    st.box(ax, *corner, 1, 1, fill=False, edgecolor="black", linewidth=2.2)
    ticks = range(len(SIDES))
    ax.set_xticks(ticks, [str(s) for s in SIDES])
    ax.set_yticks(ticks, [str(s) for s in SIDES])
    ax.set(xlabel="columns of a block (burst of the load)", ylabel="rows (burst of the store)")
    ax.set_title("bytes on the wires per byte", loc="left")
    ax.tick_params(length=0)


def _graph(ax: Any, index: NDArray[Any], cores: int, rows: int) -> dict[int, list[int]]:
    torn = conflicts(index, cores)
    per = -(-len(index) // cores)
    height = float(max(rows - 1, 1))

    def core_y(core: int) -> float:
        return height * (1 - (core + 0.5) / cores)

    for position, row in enumerate(index):
        core, bad = position // per, int(row) in torn
        colour, width = (st.VERMILLION, 1.8) if bad else (st.GREY, 0.9)
        line = "-" if bad else "--"
        place = [core_y(core), height - int(row)]
        ax.plot([0, 1], place, color=colour, lw=width, ls=line, zorder=1)
    for core in range(cores):
        ax.plot(0, core_y(core), marker="s", ms=15, mfc=st.PAPER, mec=st.BLUE, mew=1.4, zorder=2)
        st.put(ax, 0, core_y(core), str(core), color="black")
    for row in range(rows):
        bad = row in torn
        face, edge = (st.VERMILLION, st.VERMILLION) if bad else (st.PAPER, st.GREEN)
        marker = "X" if bad else "o"
        ax.plot(1, height - row, marker=marker, ms=6.5, mfc=face, mec=edge, zorder=2)
        ax.text(1.07, height - row, str(row), va="center", fontsize=7, color=st.INK)
    ax.text(0, height + 1.1, "cores", ha="center", color=st.INK)
    ax.text(1, height + 1.1, "rows", ha="center", color=st.INK)
    ax.set_title(f"{len(torn)} torn rows", loc="left")
    ax.set(xlim=(-0.2, 1.25), ylim=(-0.8, height + 2))
    ax.axis("off")
    return torn


@st.styled
def fig_scatter_ways(
    times_each: Sequence[int],
    moved_bytes: Mapping[str, Sequence[float]],
    cycles: Mapping[str, Sequence[float]],
) -> st.LabFigure:
    """Draw bytes and cycles of ways to scatter over how often each row is updated.

    `moved_bytes` and `cycles` give per way (owner, atomic, sorted) one number per entry of
    `times_each`. Raises `InputError` for another way or other lengths.
    """
    for name, values in (*moved_bytes.items(), *cycles.items()):
        if name not in WAYS or len(values) != len(times_each):
            needed = f"{len(times_each)} numbers for each of {', '.join(WAYS)}"
            raise InputError(needed, f"{name}: {len(values)}", "give one per entry of times_each")
    fig, (left, right) = st.new_figure(ncols=2, height_in=2.6)
    panels = ((left, moved_bytes, 1e-3, "kB through memory"), (right, cycles, 1e-3, "kilocycles"))
    for ax, data, factor, label in panels:
        for name, values in data.items():
            colour, marker = WAYS[name]
            scaled = [v * factor for v in values]
            ax.plot(times_each, scaled, color=colour, marker=marker, ms=5, label=name)
        st.doubling(ax, times_each)
        ax.set(xlabel="updates of each row", ylabel=label)
    left.set_ylim(bottom=0)
    right.set_yscale("log")
    right.legend(loc="center right")
    parts = []
    for name, values in moved_bytes.items():
        first, last = values[0] / 1e3, values[-1] / 1e3
        clock = cycles[name]
        parts.append(
            f"{name} {first:.0f} to {last:.0f} kB and {clock[0]:,.0f} to {clock[-1]:,.0f} cycles"
        )
    span = f"from {times_each[0]} to {times_each[-1]} updates of each row"
    return st.finish(fig, alt=f"Bytes and cycles of a scatter {span}: {'; '.join(parts)}.")
