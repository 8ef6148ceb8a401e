"""Smaller models: where to cut a tensor, what bits cost, what a network weighs on a chip."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ascend_lab.compress import Scale, calibrate
from ascend_lab.errors import InputError
from ascend_lab.lab.figures import style as st

MARKS = ("o", "s", "^", "D", "v", "P", "X")


def clipping_errors(values: NDArray[np.float32], bits: int, ends: Iterable[float]) -> list[float]:
    """Return the mean squared error of symmetric rounding with each largest number kept."""
    levels = 2 ** (bits - 1) - 1
    found = []
    for end in ends:
        kept = Scale(float(end) / levels, 0, bits).fake(np.clip(values, -end, end))
        found.append(float(np.mean((kept - values) ** 2)))
    return found


@st.styled
def fig_clipping(
    values: NDArray[np.float32],
    bits: int = 4,
    methods: Sequence[str] = ("minmax", "percentile", "ifmr", "kl"),
) -> st.LabFigure:
    """Draw the error of rounding against the largest number kept, and where methods cut.

    Above lies the histogram of the values. Raises `InputError` for zeros.
    """
    most = float(np.abs(values).max())
    if not most > 0:
        raise InputError("values that are not all zero", str(most), "give others")
    fig, (top, ax) = st.new_figure(nrows=2, height_in=3.9, sharex=True, height_ratios=(1, 2))
    top.hist(np.abs(values), bins=80, range=(0, most), color=st.SKY, edgecolor=st.INK, lw=0.3)
    top.set(yscale="log", ylabel="how many")
    ends = np.linspace(0.05, 1.2, 116) * most
    errors = clipping_errors(values, bits, ends)
    cut = np.array([np.mean(np.maximum(np.abs(values) - end, 0) ** 2) for end in ends])
    ax.plot(ends, errors, color=st.INK, ls="-", label="error")
    ax.plot(ends, errors - cut, color=st.BLUE, ls="--", label="of it: rounding")
    ax.plot(ends, cut, color=st.VERMILLION, ls=":", lw=2, label="of it: cutting off")
    said = []
    for mark, method in zip(MARKS, methods, strict=False):
        end = calibrate(values, method, bits=bits).scale * (2 ** (bits - 1) - 1)
        (error,) = clipping_errors(values, bits, [end])
        ax.plot(end, error, mark, color=st.ORANGE, mec=st.INK, ms=8, ls="none", label=method)
        said.append(f"{method} at {end:.2f} with {error:.2g}")
    low = min(errors)
    ax.set(
        ylim=(0, max(6 * low, 1.1 * errors[-1])), xlim=(0, 1.2 * most),
        xlabel="largest number kept", ylabel="mean squared error",
    )  # fmt: skip
    ax.legend(ncols=2)
    best = float(ends[int(np.argmin(errors))])
    alt = (
        f"Error of {bits}-bit rounding against the largest number kept: falls while less is cut "
        f"off, lowest {low:.2g} at {best:.2f}, then rises with the step. Methods cut: "
        f"{', '.join(said)}. The largest value is {most:.2f}."
    )
    return st.finish(fig, alt=alt)


@st.styled
def fig_bits(rows: Mapping[str, Mapping[int, float]], before: float) -> st.LabFigure:
    """Draw accuracies against bits, a curve a way of choosing, and that of the float network.

    Raises `InputError` for no curve.
    """
    if not rows:
        raise InputError("a curve", "none", "give some")
    fig, ax = st.new_figure(height_in=3.0)
    said = []
    for (name, found), mark in zip(rows.items(), MARKS, strict=False):
        ax.plot(list(found), [100 * a for a in found.values()], marker=mark, label=name)
        said.append(f"{name}: {', '.join(f'{a:.1%} at {bits}' for bits, a in found.items())}")
    ax.axhline(100 * before, color=st.GREY, lw=1, ls="-")
    bits = sorted({b for found in rows.values() for b in found})
    ax.text(bits[0], 100 * before + 1, "in floating point", va="bottom", fontsize=8)
    ax.set(xlabel="bits of weights and activations", ylabel="test digits right, %", ylim=(0, 108))
    ax.set_xticks(bits)
    ax.legend(loc="lower right")
    alt = f"Accuracy by bits; in floating point {before:.1%}. {'. '.join(said)}."
    return st.finish(fig, alt=alt)
