"""Figures of data layouts: a matrix coloured by address, padding; and of convolutions: im2col."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, Normalize

from ascend_lab.lab.figures import style as st
from ascend_lab.lab.kernels.convolution_ways import explicit_conv, im2col_reference
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, c0_of, ceil_div
from ascend_lab.machine.layout import (
    AddressMap,
    Piece,
    address,
    address_map,
    addresses,
    element_at,
)
from ascend_lab.machine.sim import DeviceMemory, simulate, simulate_kernel
from ascend_lab.operators.kernels import ConvShape, conv_launch, depthwise_launch

COLOURS = "cividis"
FORMATS = {"ND": "ND", "zZ": "FRACTAL_ZZ", "zN": "FRACTAL_ZN", "nZ": "FRACTAL_NZ"}
"""Short name in the book and name in the documentation."""
SMALL = 64
"""Up to this many elements every cell shows its address."""


def matrix_maps(rows: int = 32, columns: int = 48, dtype: str = "fp16") -> dict[str, AddressMap]:
    """Return the maps of one matrix in ND, zZ, zN and nZ, by the book's short names."""
    return {
        short_name: address_map(name, (rows, columns), dtype)
        for short_name, name in FORMATS.items()
    }


def small_maps(rows: int = 4, columns: int = 6, side: int = 2) -> dict[str, AddressMap]:
    """Return the maps of a matrix in fractals of `side` x `side`, few enough to read each address.

    >>> maps = small_maps()
    >>> [int(address(maps[order], (0, 2))) for order in ("ND", "zZ", "zN", "nZ")]
    [2, 4, 4, 8]
    """
    # Axis, step and count of each half of an axis: rows of fractals, rows inside, ...
    halves = {
        "M1": (0, side, rows // side),
        "M0": (0, 1, side),
        "N1": (1, side, columns // side),
        "N0": (1, 1, side),
    }
    orders = {"ND": "M1 M0 N1 N0", "zZ": "M1 N1 M0 N0", "zN": "M1 N1 N0 M0", "nZ": "N1 M1 M0 N0"}
    maps = {}
    for name, order in orders.items():
        stored = [halves[half] for half in order.split()]
        counts = tuple(count for _, _, count in stored)
        strides = [prod(counts[place + 1 :]) for place in range(len(counts))]
        pieces = tuple(Piece(*half, stride=t) for half, t in zip(stored, strides, strict=True))
        maps[name] = AddressMap(name, ("M", "N"), (rows, columns), "fp16", pieces, counts)
    return maps


def fig_address_maps(maps: Mapping[str, AddressMap]) -> st.LabFigure:
    """Draw one matrix in up to four layouts, each element coloured by its address."""
    small = all(layout.elements <= SMALL for layout in maps.values())
    fig, axes = st.new_figure(nrows=2, ncols=2, height_in=3.6 if small else 4.6)
    top = max(layout.elements for layout in maps.values()) - 1
    alt_parts = []
    image = None
    for ax, (name, layout) in zip(axes.flat, maps.items(), strict=False):
        image = _colour(ax, layout, top)
        stored_axes = []  # M1 and M0 for an axis in two pieces, N for one in a single piece
        for piece in layout.pieces:
            half = "0" if piece.step == 1 else "1"
            if len(layout.of_axis(piece.axis)) == 1:
                half = ""
            stored_axes.append(layout.axes[piece.axis] + half)
        ax.set_title(f"{name}: {' '.join(stored_axes)}")
        if layout.elements <= SMALL:
            for (row, column), place in np.ndenumerate(addresses(layout)):
                colour = "#FFFFFF" if place < 0.45 * layout.elements else st.INK
                st.put(ax, column, row, str(place), color=colour)
        else:
            _number_fractals(ax, layout)
        second = element_at(layout, 1)
        last = address(layout, (0, layout.shape[1] - 1))
        alt_parts.append(f"{name}: address 1 holds {second}, the end of row 0 has address {last}")
    for ax in axes.flat[len(maps) :]:
        ax.axis("off")
    if image is not None and top >= SMALL:
        fig.colorbar(image, ax=axes, label="address in elements", shrink=0.7, aspect=30)
    shape = next(iter(maps.values())).shape
    alt = f"A matrix of {shape[0]} x {shape[1]} coloured by address. "
    return st.finish(fig, alt=alt + "; ".join(alt_parts) + ".")


def fig_element(row: int = 17, column: int = 21, dtype: str = "fp16") -> st.LabFigure:
    """Mark one element of a ragged matrix in ND, zZ, zN and nZ, with its address in each."""
    rows = 28
    columns = 44
    maps = matrix_maps(rows, columns, dtype)
    fig, axes = st.new_figure(nrows=2, ncols=2, height_in=4.9)
    padded = np.array([layout.padded_shape for layout in maps.values()]).max(axis=0)
    look = {"facecolor": st.LIGHT, "edgecolor": st.GREY, "hatch": "////", "linewidth": 0.0}
    alt_parts = []
    for ax, (name, layout) in zip(axes.flat, maps.items(), strict=True):
        _colour(ax, layout, layout.elements - 1)
        height, width = layout.padded_shape
        st.box(ax, columns - 0.5, -0.5, width - columns, height, **look)
        st.box(ax, -0.5, rows - 0.5, columns, height - rows, **look)
        place = address(layout, (row, column))
        ax.axhline(row, color=st.VERMILLION, linewidth=0.7)
        ax.axvline(column, color=st.VERMILLION, linewidth=0.7)
        ax.plot([column], [row], "o", ms=7, color=st.VERMILLION, mec="#FFFFFF", zorder=5)
        ax.set(xlim=(-0.5, padded[1] - 0.5), ylim=(padded[0] - 0.5, -0.5))
        text = f"{name}: address {place:,}, {100 * layout.padded_share:.0f} % padding"
        ax.set_title(text)
        alt_parts.append(text)
    fig.suptitle(f"element ({row}, {column}) of {rows} x {columns} in {dtype}")
    alt = f"Element ({row}, {column}) of a {rows} x {columns} matrix in {dtype}. "
    return st.finish(fig, alt=alt + "; ".join(alt_parts) + ".")


def fig_padding(most: int = 96) -> st.LabFigure:
    """Draw which share of NC1HWC0 is padding, against the number of channels."""
    fig, ax = st.new_figure(height_in=2.7)
    channels = np.arange(1, most + 1)
    alt_parts = []
    for dtype, colour, style in (("fp16", st.BLUE, "-"), ("int8", st.VERMILLION, "--")):
        shares = [padded_share(int(c), dtype) for c in channels]
        ax.plot(channels, shares, color=colour, linestyle=style, label=dtype)
        ax.plot([3], [shares[2]], marker="o", color=colour)
        ax.plot([3, 9], [shares[2]] * 2, color=colour, linestyle="-", linewidth=0.7)
        ax.text(9.5, shares[2], f"3 channels, {dtype}: {100 * shares[2]:.0f} %", va="center")
        none = f"none with {channels[shares.index(0)]} and multiples"
        alt_parts.append(f"{dtype}: {100 * shares[2]:.0f} % with 3 channels, {none}")
    ax.set(xlim=(0, most + 1), ylim=(0, 1), xlabel="channels", ylabel="padding")
    ax.set_xticks(range(0, most + 1, 16))
    ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    ax.legend(loc="upper right")
    return st.finish(
        fig, alt="Share of padding in NC1HWC0, saw teeth. " + "; ".join(alt_parts) + "."
    )


def padded_share(channels: int, dtype: str) -> float:
    """Return the share of NC1HWC0 that is padding for images of `channels` channels."""
    return address_map("NC1HWC0", (1, channels, 1, 1), dtype).padded_share


def _colour(ax: Any, layout: AddressMap, top: int) -> Any:
    """Colour each element by its address, from 0 to `top`, with white lines around fractals."""
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


def _number_fractals(ax: Any, layout: AddressMap) -> None:
    """Write each fractal's number in memory, and an arrow along the elements it begins with."""
    rows, columns = _fractal(layout)
    is_one_piece = (rows, columns) == layout.shape
    length = columns if is_one_piece else min(rows, columns)
    look = {"arrowstyle": "-|>", "color": "#FFFFFF", "linewidth": 1.2}
    for place in product(*map(range, (0, 0), layout.shape, (rows, columns))):
        start = int(address(layout, place))
        first = element_at(layout, start)
        last = element_at(layout, start + length - 1)
        if first is not None and last is not None:  # an arrow along the first run of the fractal
            # drawn beside the elements: below a row, to the right of a column
            down, right = (1.5, 0.0) if last[1] > first[1] else (0.0, 1.5)
            tail = (first[1] + right, first[0] + down)
            tip = (last[1] + right, last[0] + down)
            ax.annotate("", xy=tip, xytext=tail, arrowprops=look)
        if not is_one_piece:
            x = place[1] + (columns - 1) / 2
            y = place[0] + (rows - 1) / 2
            paper = {"facecolor": st.PAPER, "edgecolor": "none", "pad": 1.5}
            st.put(ax, x, y, str(start // (rows * columns)), fontsize=9, bbox=paper)


# -- convolutions: windows as rows of a matrix, the matrix stored or not, reuse, groups ------------
Grid = np.ndarray
TINTS = LinearSegmentedColormap.from_list("copies", ["#EAF2F8", st.SKY, st.BLUE])
NUMBERED = (26, 12)
"""Rows and columns up to which cells carry their number."""


def _look(colour: str, hatch: str) -> dict[str, Any]:
    """Return the look of bars."""
    return {"facecolor": colour, "hatch": hatch, "edgecolor": st.INK, "linewidth": 0.6}


WAYS = (_look(st.VERMILLION, "xx"), _look(st.ORANGE, "//"), _look(st.BLUE, ""))
"""Looks of three kernels: writing the matrix, multiplying it, and never storing it."""


def copies_of(shape: ConvShape) -> tuple[Grid, Grid]:
    """Return the im2col matrix as pixel numbers (from 1; 0 is padding) and copies per pixel."""
    pixels = np.arange(1, shape.h * shape.w + 1).reshape(1, 1, shape.h, shape.w)
    kernel = (shape.r, shape.s)
    matrix = im2col_reference(pixels, kernel, shape.strides, shape.pads, shape.dilations)
    copies = np.bincount(matrix.reshape(-1), minlength=shape.h * shape.w + 1)
    return matrix.astype(np.int64), copies.astype(np.int64)


def matrix_sizes(shape: ConvShape) -> dict[str, int]:
    """Return elements of the image and of the im2col matrix as the cube reads it, by origin.

    `pixels` and `blocks` (channels rounded up) make the image; `distinct`, `copies`, `padding` and
    `fractals` (rows and channels rounded up) the matrix.
    """
    (matrix, copies) = copies_of(shape)
    c0 = c0_of(shape.dtype)
    padded_channels = ceil_div(shape.c, c0) * c0
    pixels = shape.h * shape.w
    inside = int(copies[1:].sum())
    distinct = int((copies[1:] > 0).sum())
    stored_elements = ceil_div(len(matrix), FRACTAL) * FRACTAL * shape.taps * padded_channels
    return {
        "pixels": shape.c * pixels,
        "blocks": (padded_channels - shape.c) * pixels,
        "distinct": shape.c * distinct,
        "copies": shape.c * (inside - distinct),
        "padding": shape.c * int(copies[0]),
        "fractals": stored_elements - shape.c * matrix.size,
    }


def fig_windows(
    side: int = 5,
    kernel: int = 3,
    stride: int = 1,
    pad: int = 0,
    dilation: int = 1,
    channels: int = 16,
) -> st.LabFigure:
    """Draw an image and its im2col matrix, cells tinted by how often their pixel is copied."""
    shape = ConvShape(
        n=1,
        c=channels,
        h=side,
        w=side,
        k=16,
        r=kernel,
        s=kernel,
        stride=stride,
        pad=pad,
        dilation=dilation,
    )
    matrix, copies = copies_of(shape)
    sizes = matrix_sizes(shape)
    fig, axes = st.new_figure(2, 2, 4.3, width_ratios=(1, 1.35), height_ratios=(5, 1.15))
    image = np.pad(np.arange(1, side * side + 1).reshape(side, side), pad)
    marked = int(np.argmax(copies[1:])) + 1
    most_copies = int(copies[1:].max())
    norm = Normalize(0, max(most_copies, 1))
    for ax, cells in ((axes[0, 0], image), (axes[0, 1], matrix)):
        _cells(ax, cells, copies, norm, marked)
    axes[0, 0].set_title(f"image {side}x{side}" + (f", pad {pad}" if pad else ""))
    title = f"matrix: {matrix.shape[0]} windows x {matrix.shape[1]} taps"
    axes[0, 1].set(title=title, aspect="auto", ylabel="window", xlabel="tap")
    _copies_bar(fig, axes[0], most_copies)
    _balance(_joined_row(fig, axes), sizes)
    used = sizes["distinct"] + sizes["copies"]
    zeros = sizes["padding"] + sizes["fractals"]
    alt = (
        f"A {side}x{side} image with a {kernel}x{kernel} kernel, stride {stride}, pad {pad}, "
        f"dilation {dilation} becomes a matrix of {matrix.shape[0]} rows and {matrix.shape[1]} "
        f"columns. A pixel is copied {copies[1:].min()} to {most_copies} times; pixel {marked} is "
        f"framed in both. With {channels} channels the matrix holds "
        f"{used / sizes['pixels']:.2f} times the image and is {zeros / (used + zeros):.0%} zeros."
    )
    return st.finish(fig, alt=alt)


def _joined_row(fig: st.LabFigure, axes: Any) -> Any:
    """Replace the axes of the second row by a single one, as wide as all of them."""
    for ax in axes[1]:
        ax.remove()
    return fig.add_subplot(axes[0, 0].get_gridspec()[1, :])


def _copies_bar(fig: st.LabFigure, axes: Any, most_copies: int) -> None:
    """Draw the colours of numbers of copies beside the image and the matrix."""
    bar = fig.colorbar(axes[1].images[0], ax=axes, shrink=0.75, pad=0.02)
    bar.set_label("copies of the pixel")
    bar.set_ticks(list(range(0, most_copies + 1, max(1, most_copies // 8))))


def _cells(ax: Any, cells: Grid, copies: Grid, norm: Normalize, marked: int) -> None:
    """Draw cells by the copies of their pixel, padding grey and dotted, one pixel framed."""
    tint = np.ma.masked_where(cells == 0, copies[cells])
    ax.imshow(tint, cmap=TINTS, norm=norm, aspect="equal", interpolation="nearest")
    ax.set(facecolor=st.LIGHT, xticks=[], yticks=[])
    rows, columns = cells.shape
    numbers = rows <= NUMBERED[0] and columns <= NUMBERED[1]
    for (y, x), pixel in np.ndenumerate(cells):
        if numbers and pixel:
            dark = norm(copies[pixel]) > 0.7
            colour = "#FFFFFF" if dark else st.INK
            size = 8 if rows <= 10 else 6
            st.put(ax, x, y, str(pixel), fontsize=size, color=colour)
        if pixel == marked:
            box = st.box(ax, x - 0.5, y - 0.5, 1, 1, fill=False, edgecolor=st.VERMILLION, zorder=3)
            box.set_linewidth(2.2 if rows <= 16 else 1.0)
    if numbers:
        ax.set_xticks(np.arange(0.5, columns - 1), minor=True)
        ax.set_yticks(np.arange(0.5, rows - 1), minor=True)
        ax.grid(which="minor", color="#FFFFFF", linewidth=0.8)
        ax.tick_params(which="minor", length=0)


def _balance(ax: Any, sizes: Mapping[str, int]) -> None:
    """Draw the elements of image and matrix in multiples of the image."""
    pixels = _look(st.BLUE, "")
    copies = _look(st.SKY, "//")
    pads = _look(st.LIGHT, "..")
    blocks = _look(st.GREY, "xx")
    rows = {
        "image": {"pixels": pixels, "blocks": blocks},
        "matrix": {"distinct": pixels, "copies": copies, "padding": pads, "fractals": blocks},
    }
    for y, looks in enumerate(rows.values()):
        st.stack(ax, y, [(sizes[name] / sizes["pixels"], look) for name, look in looks.items()])
    st.name_rows(ax, rows)
    ax.set_xlabel("elements / elements of the image")
    words = {"pixels": pixels, "copies": copies, "zeros of the pads": pads}
    words["zeros that fill 16 x C0 blocks"] = blocks
    st.key(ax, words, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 0.98), fontsize=7)


def fig_stored(shape: ConvShape, chip: Chip) -> st.LabFigure:
    """Draw bytes of device memory and time with the matrix stored and not, per kernel side."""
    fig, (left, right) = st.new_figure(1, 2, 2.9)
    alt_parts = []
    kernels = (1, 3, 5, 7)
    for x, side in enumerate(kernels):
        layer = replace(shape, r=side, s=side, pad=side // 2)
        memory = DeviceMemory.of(chip)
        formed = _timed(layer, chip)
        stored = simulate_kernel(explicit_conv(layer, chip), chip, memory)
        runs = (*stored.phases, formed)
        us = 1e6 / chip.clock_hz
        moved = [r.memory_bytes / 1e6 for r in runs]
        times = [r.cycles * us for r in runs]
        for ax, (first, second, single) in ((left, moved), (right, times)):
            ax.bar(x - 0.2, first, 0.38, **WAYS[0])
            ax.bar(x - 0.2, second, 0.38, bottom=first, **WAYS[1])
            ax.bar(x + 0.2, single, 0.38, **WAYS[2])
        ratio = stored.cycles / formed.cycles
        right.text(x - 0.2, sum(times[:2]), f"{ratio:.1f}x", ha="center", va="bottom")
        bytes_text = f"{sum(moved[:2]):.1f} against {moved[2]:.1f} MB"
        alt_parts.append(f"{side}x{side}: {bytes_text}, {ratio:.1f} times the cycles")
    for ax, word in ((left, "device memory, MB"), (right, "time, us")):
        ax.set_xticks(range(len(kernels)), [f"{k}x{k}" for k in kernels])
        ax.set(xlabel="kernel", ylabel=word)
    words = ("write the matrix", "multiply the stored matrix", "never store it")
    st.key(left, dict(zip(words, WAYS, strict=True)), loc="upper left")
    return st.finish(
        fig, alt=f"Stored against not stored on {chip.name}. " + "; ".join(alt_parts) + "."
    )


def _timed(shape: ConvShape, chip: Chip) -> Any:
    """Return the timeline of a convolution whose matrix is never stored."""
    return simulate(conv_launch(shape, chip), chip)


def fig_reuse(series: Mapping[str, Mapping[int, ConvShape]], chip: Chip) -> st.LabFigure:
    """Draw share of the cube peak and operations per byte into L1, one column per knob.

    `series` maps the name of a knob to its values and their layers; every marker is a program.
    """
    fig, axes = st.new_figure(2, len(series), 3.6, sharex=False)
    alt_parts = []
    for column, (knob, shapes) in enumerate(series.items()):
        peak_shares = []
        ops_per_byte = []
        for shape in shapes.values():
            run = _timed(shape, chip)
            peak = chip.peak_ops_per_s(shape.dtype) / chip.clock_hz
            peak_shares.append(100 * shape.ops / run.cycles / peak)
            ops_per_byte.append(shape.ops / run.path_bytes["GM", "L1"])
        ticks = range(len(shapes))
        looks = (
            (axes[0, column], peak_shares, st.BLUE, "o"),
            (axes[1, column], ops_per_byte, st.GREEN, "s"),
        )
        for ax, values, colour, marker in looks:
            ax.plot(ticks, values, color=colour, marker=marker, linestyle="-")
            ax.set_xticks(list(ticks), [str(v) for v in shapes])
        axes[1, column].set_xlabel(knob)
        shares, each = (
            ", ".join(f"{x:.0f}" for x in values) for values in (peak_shares, ops_per_byte)
        )
        summary = f"{shares} % of peak, {each} operations a byte"
        alt_parts.append(f"{knob} {', '.join(map(str, shapes))}: {summary}")
    for row, word, top in ((0, "% of cube peak", 100), (1, "ops / byte into L1", None)):
        high = top or 1.08 * max(line.get_ydata().max() for ax in axes[1] for line in ax.lines)
        for column, ax in enumerate(axes[row]):
            ax.set_ylim(0, high)
            ax.set_yticklabels([]) if column else ax.set_ylabel(word)
    return st.finish(fig, alt=f"On {chip.name}. " + "; ".join(alt_parts) + ".")


def fig_groups(shape: ConvShape, chip: Chip) -> st.LabFigure:
    """Draw the time of a layer against channels per group, beside what its work would cost."""
    widths = [w for w in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if shape.c % w == 0]
    runs = {w: _timed(replace(shape, groups=shape.c // w), chip) for w in widths}
    dense = _timed(shape, chip)
    scale = 1e6 / chip.clock_hz
    cube = [runs[w].cycles * scale for w in widths]
    fair = [dense.cycles * scale * w / shape.c for w in widths]
    vector = simulate(depthwise_launch(replace(shape, groups=shape.c), chip), chip).cycles * scale
    fig, ax = st.new_figure(height_in=2.9)
    ax.plot(widths, cube, color=st.VERMILLION, marker="o", linestyle="-", label="cube, simulated")
    ax.plot(widths, fair, color=st.GREY, linestyle="--", label="in proportion to the work")
    ax.plot([1], [vector], color=st.GREEN, marker="D", linestyle="", label="vector unit, simulated")
    ax.axvline(FRACTAL, color=st.INK, linewidth=0.8, linestyle=":")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(widths, [str(w) for w in widths])
    ax.set(xlabel="channels per group", ylabel="time, us")
    ax.legend()
    pairs = "; ".join(f"{w}: {c:.1f}" for w, c in zip(widths, cube, strict=True))
    alt = f"Time of a grouped layer on {chip.name} in us by channels per group: {pairs}. In "
    alt += f"proportion to the work, 1 channel would take {fair[0]:.2f} us. The vector unit takes "
    return st.finish(fig, alt=f"{alt}{vector:.1f} us for 1 channel per group.")
