"""A camera's bytes read in several ways, and cards against rates."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.ticker import MaxNLocator

from ascend_lab.lab.figures import style as st
from ascend_lab.media import Aipp, Station, aipp, cards_needed, convert, csc_of, play
from ascend_lab.media.colour import Image

WIDTH, HEIGHT = 96, 64


def scene() -> Image:
    """Return a small picture (3, h, w) in RGB: sky, sun, a house on a meadow."""
    row, column = np.mgrid[0:HEIGHT, 0:WIDTH]
    picture = np.stack([90 + row, 150 + row, 235 - row // 2]).astype(np.uint8)
    picture[:, row > 42] = np.array([[70], [150], [60]], np.uint8)
    picture[:, (row - 14) ** 2 + (column - 74) ** 2 < 90] = np.array([[250], [215], [60]], np.uint8)
    house = (abs(column - 32) < 14) & (row > 26) & (row < 50)
    picture[:, house] = np.array([[190], [50], [45]], np.uint8)
    picture[:, (abs(column - 32) < 4) & (row > 36) & (row < 50)] = 40
    return picture


def camera_frame(standard: str = "601 narrow") -> Image:
    """Return the scene as a camera sends it: flat NV12, chroma of every second pixel and row."""
    yuv = convert(scene()[None], csc_of(standard, "YUV"))[0]
    pairs = yuv[1:, ::2, ::2].transpose(1, 2, 0)
    return np.concatenate([yuv[0].reshape(-1), pairs.reshape(-1)])


def readings() -> dict[str, Aipp]:
    """Return ways to read such a frame, the right one first."""
    right = Aipp("YUV420SP_U8", WIDTH, HEIGHT, csc_of("601 narrow", "RGB"))
    return {
        "as sent": right,
        "default rows (BGR)": replace(right, csc=csc_of("601 narrow", "BGR")),
        "U and V swapped": replace(right, rbuv_swap=True),
        "BT.709": replace(right, csc=csc_of("709 narrow", "RGB")),
        "JPEG": replace(right, csc=csc_of("601 wide", "RGB")),
    }


def errors() -> dict[str, float]:
    """Return the mean error of each reading, in steps of 255."""
    frame, want = camera_frame(), scene().astype(float)
    found = {name: aipp(frame, how)[0].astype(float) for name, how in readings().items()}
    return {name: float(np.abs(image - want).mean()) for name, image in found.items()}


@st.styled
def fig_readings() -> st.LabFigure:
    """Draw the same bytes as five configurations read them, and how far each is off."""
    off = errors()
    fig, axes = st.new_figure(ncols=len(off), height_in=1.35)
    for ax, (name, how) in zip(axes, readings().items(), strict=True):
        image = aipp(camera_frame(), how, dtype="uint8")[0]
        ax.imshow(image.transpose(1, 2, 0), interpolation="nearest")
        ax.set_title(name, fontsize=7)
        ax.set_xlabel(f"off by {off[name]:.0f}", fontsize=7)
        ax.set(xticks=[], yticks=[])
    told = ", ".join(f"{name} {value:.0f}" for name, value in off.items())
    alt = (
        "Five copies of a small scene, a red house on a green meadow under a blue sky. Right as "
        "sent; with BGR rows and with swapped chroma the house is blue and the sky orange; with "
        f"the two other matrices colours shift a little. Mean errors: {told}."
    )
    return st.finish(fig, alt=alt)


@st.styled
def fig_cards(
    stations: Sequence[Station], rate_per_s: float = 3000.0, pictures: int = 3000
) -> st.LabFigure:
    """Draw the cards each station needs, and what pictures wait for with a few less and more."""
    answer = cards_needed(stations, rate_per_s)
    fig, (left, right) = st.new_figure(ncols=2, height_in=2.4, width_ratios=(1.0, 1.3))
    names, hatches = list(answer.by_station), ("//", "", "\\\\", "..", "xx")
    for i, name in enumerate(names):
        left.barh(i, answer.by_station[name], color=st.PALETTE[i], hatch=hatches[i % 5],
                  edgecolor=st.INK)  # fmt: skip
        left.text(answer.by_station[name], i, f" {answer.by_station[name]}", va="center")
    left.set_yticks(range(len(names)), names)
    left.set(xlim=(0, answer.cards * 1.2), xlabel="cards that it asks for")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    counts = range(max(1, answer.cards - 2), answer.cards + 5)
    late = {
        n: 1e3 * float(np.quantile(play(stations, rate_per_s / n, pictures).latencies_s, 0.99))
        for n in counts
    }
    right.plot(list(late), list(late.values()), marker="o", color=st.BLUE)
    right.axvline(answer.cards, color=st.VERMILLION, linestyle="--", label="by the formula")
    right.set(yscale="log", xlabel="cards", ylabel="ms until 99 % are through")
    right.legend()
    each = ", ".join(f"{name} {n}" for name, n in answer.by_station.items())
    told = ", ".join(f"{n}: {ms:.0f}" for n, ms in late.items())
    alt = (
        f"Cards for {rate_per_s:.0f} pictures a second: {each}. Milliseconds until 99 % of "
        f"{pictures} pictures that come at random are through, by cards: {told}."
    )
    return st.finish(fig, alt=alt)
