"""Figures of chapter 9: a matrix coloured by address, one element in four layouts, padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from ascend_lab.lab.figures import style as st
from ascend_lab.layout import AddressMap, Piece, address, address_map, addresses, element_at

COLOURS = "cividis"
FORMATS = {"ND": "ND", "zZ": "FRACTAL_ZZ", "zN": "FRACTAL_ZN", "nZ": "FRACTAL_NZ"}
"""Short name in the book and name in the documentation."""

SMALL = 64
"""Up to this many elements every cell shows its address."""


def matrix_maps(rows: int = 32, columns: int = 48, dtype: str = "fp16") -> dict[str, AddressMap]:
    """Return the maps of one matrix in ND, zZ, zN and nZ, by the book's short names."""
    return {s: address_map(name, (rows, columns), dtype) for s, name in FORMATS.items()}


@st.styled
def fig_addresses(maps: Mapping[str, AddressMap]) -> st.LabFigure:
    """Draw one matrix in up to four layouts, each element coloured by its address.

    Small matrices show every address; large ones number the fractals in storage order, and an
    arrow runs along the first elements of each.
    """
    fig, axes = st.new_figure(nrows=2, ncols=2, height_in=_height(maps))
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
        ax.plot(
            [column], [row], "o", ms=7, color=st.VERMILLION, markeredgecolor="#FFFFFF", zorder=5
        )
        ax.set_xlim(-0.5, padded[1] - 0.5)
        ax.set_ylim(padded[0] - 0.5, -0.5)
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
    ax.set_xlim(0, most + 1)
    ax.set_ylim(0, 1)
    ax.set_xticks(range(0, most + 1, 16))
    ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    ax.set_xlabel("channels")
    ax.set_ylabel("padding")
    ax.legend(loc="upper right")
    return st.finish(fig, alt="Share of padding in NC1HWC0, saw teeth. " + "; ".join(said) + ".")


def padded_share(channels: int, dtype: str) -> float:
    """Return the share of NC1HWC0 that is padding for images of `channels` channels."""
    return address_map("NC1HWC0", (1, channels, 1, 1), dtype).padded_share


def _height(maps: Mapping[str, AddressMap]) -> float:
    small = all(layout.elements <= SMALL for layout in maps.values())
    return 3.6 if small else 4.6


def _words(layout: AddressMap) -> list[str]:
    """Name the stored axes of a map: M1, M0, N for an axis in two pieces and one in one."""
    names = []
    for piece in layout.pieces:
        single = len(layout.of_axis(piece.axis)) == 1
        names.append(layout.axes[piece.axis] if single else _half(layout, piece))
    return names


def _half(layout: AddressMap, piece: Piece) -> str:
    return layout.axes[piece.axis] + ("0" if piece.step == 1 else "1")


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
    for side in ax.spines.values():
        side.set_visible(False)
    return image


def _fractal(layout: AddressMap) -> tuple[int, int]:
    """Return rows and columns of a fractal, or of the whole matrix where none is cut."""
    sizes = [layout.of_axis(axis)[-1].count for axis in range(2)]
    return sizes[0], sizes[1]


def _write_addresses(ax: Any, layout: AddressMap) -> None:
    for (row, column), place in np.ndenumerate(addresses(layout)):
        dark = place < 0.45 * layout.elements
        ax.text(
            column,
            row,
            str(place),
            ha="center",
            va="center",
            fontsize=8,
            color="#FFFFFF" if dark else st.INK,
        )


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
                box = {"facecolor": st.PAPER, "edgecolor": "none", "pad": 1.5}
                ax.text(*at, str(number), ha="center", va="center", bbox=box)


def _arrow(ax: Any, layout: AddressMap, start: int, length: int) -> None:
    """Draw an arrow along the first run of a fractal."""
    first, last = element_at(layout, start), element_at(layout, start + length - 1)
    if first is None or last is None:
        return
    down, right = (1.5, 0.0) if last[1] > first[1] else (0.0, 1.5)
    ends = [(column + right, row + down) for row, column in (first, last)]
    ax.annotate(
        "",
        xy=ends[1],
        xytext=ends[0],
        arrowprops={"arrowstyle": "-|>", "color": "#FFFFFF", "linewidth": 1.2},
    )


def _hatch_padding(ax: Any, layout: AddressMap) -> None:
    (rows, columns), (height, width) = layout.shape, layout.padded_shape
    right = Rectangle((columns - 0.5, -0.5), width - columns, height)
    below = Rectangle((-0.5, rows - 0.5), columns, height - rows)
    for patch in (right, below):
        patch.set(facecolor=st.LIGHT, edgecolor=st.GREY, hatch="////", linewidth=0.0)
        ax.add_patch(patch)
