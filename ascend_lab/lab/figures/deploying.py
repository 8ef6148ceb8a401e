"""Figures of deploying: quantisation, camera images, cards for a load, a server, validation."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.ticker import MaxNLocator

from ascend_lab.deploy.compress import Scale, calibrate
from ascend_lab.deploy.media import (
    Aipp,
    Station,
    aipp,
    cards_needed,
    convert,
    csc_of,
    simulate_card,
)
from ascend_lab.deploy.media.colours import Image
from ascend_lab.deploy.serving import (
    Arrivals,
    Policy,
    Scenario,
    Served,
    Service,
    Step,
    simulate_serving,
)
from ascend_lab.lab.figures import style as st
from ascend_lab.lab.validation import PIPES, SHARE_LIMIT, TIME_LIMIT, ValidationRow

MARKS = ("o", "s", "^", "D", "v", "P", "X")


def clipping_errors(values: np.ndarray, bits: int, ends: Iterable[float]) -> list[float]:
    """Return the mean squared error of symmetric rounding with each largest number kept."""
    levels = 2 ** (bits - 1) - 1
    errors = []
    for end in ends:
        scale = Scale(float(end) / levels, 0, bits)
        rounded = scale.fake_quantise(np.clip(values, -end, end))
        errors.append(float(np.mean((rounded - values) ** 2)))
    return errors


def fig_clipping(values: np.ndarray, bits: int = 4) -> st.LabFigure:
    """Draw the error of rounding against the largest number kept, and where methods cut.

    Above lies the histogram of the values.
    """
    largest = float(np.abs(values).max())
    fig, (top, ax) = st.new_figure(nrows=2, height_in=3.9, sharex=True, height_ratios=(1, 2))
    top.hist(np.abs(values), bins=80, range=(0, largest), color=st.SKY, edgecolor=st.INK, lw=0.3)
    top.set(yscale="log", ylabel="how many")
    ends = np.linspace(0.05, 1.2, 116) * largest
    errors = clipping_errors(values, bits, ends)
    clip_errors = np.array([np.mean(np.maximum(np.abs(values) - end, 0) ** 2) for end in ends])
    ax.plot(ends, errors, color=st.INK, ls="-", label="error")
    ax.plot(ends, errors - clip_errors, color=st.BLUE, ls="--", label="of it: rounding")
    ax.plot(ends, clip_errors, color=st.VERMILLION, ls=":", lw=2, label="of it: cutting off")
    alt_parts = []
    for mark, method in zip(MARKS, ("minmax", "percentile", "ifmr", "kl"), strict=False):
        end = calibrate(values, method, bits=bits).scale * (2 ** (bits - 1) - 1)
        (error,) = clipping_errors(values, bits, [end])
        ax.plot(end, error, mark, color=st.ORANGE, mec=st.INK, ms=8, ls="none", label=method)
        alt_parts.append(f"{method} at {end:.2f} with {error:.2g}")
    least_error = min(errors)
    ax.set(ylim=(0, max(6 * least_error, 1.1 * errors[-1])), xlim=(0, 1.2 * largest))
    ax.set(xlabel="largest number kept", ylabel="mean squared error")
    ax.legend(ncols=2)
    best_end = float(ends[int(np.argmin(errors))])
    alt = (
        f"Error of {bits}-bit rounding against the largest number kept: falls while less is cut "
        f"off, lowest {least_error:.2g} at {best_end:.2f}, then rises with the step. Methods cut: "
        f"{', '.join(alt_parts)}. The largest value is {largest:.2f}."
    )
    return st.finish(fig, alt=alt)


def fig_bits(
    rows: Mapping[str, Mapping[int, Sequence[float]]], float_accuracy: float
) -> st.LabFigure:
    """Draw accuracies against bits, a curve a way of choosing, and that of the float network.

    A point is the mean of the accuracies of several calibrations; a bar goes from least to most.
    """
    fig, ax = st.new_figure(height_in=3.0)
    alt_parts = []
    for place, ((name, by_bits), mark) in enumerate(zip(rows.items(), MARKS, strict=False)):
        # a little apart, so that bars of one number of bits do not hide each other
        x = [bits + 0.08 * (place - 1) for bits in by_bits]
        shares = [100 * np.asarray(accuracies) for accuracies in by_bits.values()]
        means = np.array([percents.mean() for percents in shares])
        least = np.array([percents.min() for percents in shares])
        largest = np.array([percents.max() for percents in shares])
        bars = [means - least, largest - means]
        ax.errorbar(x, means, yerr=bars, marker=mark, capsize=3, label=name)
        ranges = (
            f"{low:.1f} to {high:.1f}% at {bits}"
            for bits, low, high in zip(by_bits, least, largest, strict=True)
        )
        alt_parts.append(f"{name}: {', '.join(ranges)}")
    ax.axhline(100 * float_accuracy, color=st.GREY, lw=1, ls="-")
    bits = sorted({b for by_bits in rows.values() for b in by_bits})
    ax.text(
        bits[-1], 100 * float_accuracy + 1, "in floating point", ha="right", va="bottom", fontsize=8
    )
    ax.set(xlabel="bits of weights and activations", ylabel="test digits right, %", ylim=(0, 108))
    ax.set_xticks(bits)
    ax.legend(loc="lower right")
    alt = f"Accuracy by bits; in floating point {float_accuracy:.1%}. {'. '.join(alt_parts)}."
    return st.finish(fig, alt=alt)


WIDTH = 96
HEIGHT = 64


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


def camera_frame() -> Image:
    """Return the scene as a camera sends it: flat NV12, chroma of every second pixel and row."""
    yuv = convert(scene()[None], csc_of("601 narrow", "YUV"))[0]
    pairs = yuv[1:, ::2, ::2].transpose(1, 2, 0)
    return np.concatenate([yuv[0].reshape(-1), pairs.reshape(-1)])


def readings() -> dict[str, Aipp]:
    """Return ways to read such a frame, the right one first."""
    correct = Aipp("YUV420SP_U8", WIDTH, HEIGHT, csc_of("601 narrow", "RGB"))
    return {
        "as sent": correct,
        "default rows (BGR)": replace(correct, csc=csc_of("601 narrow", "BGR")),
        "U and V swapped": replace(correct, rbuv_swap=True),
        "BT.709": replace(correct, csc=csc_of("709 narrow", "RGB")),
        "JPEG": replace(correct, csc=csc_of("601 wide", "RGB")),
    }


def errors() -> dict[str, float]:
    """Return the mean error of each reading, in steps of 255."""
    frame = camera_frame()
    exact = scene().astype(float)
    images = {name: aipp(frame, settings)[0].astype(float) for name, settings in readings().items()}
    return {name: float(np.abs(image - exact).mean()) for name, image in images.items()}


def fig_readings() -> st.LabFigure:
    """Draw the same bytes as five configurations read them, and how far each is off."""
    mean_errors = errors()
    fig, axes = st.new_figure(ncols=len(mean_errors), height_in=1.35)
    for ax, (name, settings) in zip(axes, readings().items(), strict=True):
        image = aipp(camera_frame(), settings, dtype="uint8")[0]
        ax.imshow(image.transpose(1, 2, 0), interpolation="nearest")
        ax.set_title(name, fontsize=7)
        ax.set_xlabel(f"off by {mean_errors[name]:.0f}", fontsize=7)
        ax.set(xticks=[], yticks=[])
    summary = ", ".join(f"{name} {value:.0f}" for name, value in mean_errors.items())
    alt = (
        "Five copies of a small scene, a red house on a green meadow under a blue sky. Right as "
        "sent; with BGR rows and with swapped chroma the house is blue and the sky orange; with "
        f"the two other matrices colours shift a little. Mean errors: {summary}."
    )
    return st.finish(fig, alt=alt)


def fig_cards(
    stations: Sequence[Station], rate_per_s: float = 3000.0, pictures: int = 3000
) -> st.LabFigure:
    """Draw the cards each station needs, and what pictures wait for with a few less and more."""
    needed = cards_needed(stations, rate_per_s)
    fig, (cards_ax, latency_ax) = st.new_figure(ncols=2, height_in=2.4, width_ratios=(1.0, 1.3))
    names = list(needed.by_station)
    hatches = ("//", "", "\\\\", "..", "xx")
    for i, count in enumerate(needed.by_station.values()):
        cards_ax.barh(i, count, color=st.PALETTE[i], hatch=hatches[i % 5], edgecolor=st.INK)
        cards_ax.text(count, i, f" {count}", va="center")
    cards_ax.set_yticks(range(len(names)), names)
    cards_ax.set(xlim=(0, needed.cards * 1.2), xlabel="cards that it asks for")
    cards_ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    counts = range(max(1, needed.cards - 2), needed.cards + 5)
    latencies_by_cards = {
        n: simulate_card(stations, rate_per_s / n, pictures).latencies_s for n in counts
    }
    p99_ms = {
        n: 1e3 * float(np.quantile(latencies_s, 0.99))
        for n, latencies_s in latencies_by_cards.items()
    }
    latency_ax.plot(list(p99_ms), list(p99_ms.values()), marker="o", color=st.BLUE)
    latency_ax.axvline(needed.cards, color=st.VERMILLION, linestyle="--", label="by the formula")
    latency_ax.set(yscale="log", xlabel="cards", ylabel="ms until 99 % are through")
    latency_ax.legend()
    cards_text = ", ".join(f"{name} {n}" for name, n in needed.by_station.items())
    summary = ", ".join(f"{n}: {ms:.0f}" for n, ms in p99_ms.items())
    alt = (
        f"Cards for {rate_per_s:.0f} pictures a second: {cards_text}. Milliseconds until 99 % of "
        f"{pictures} pictures that come at random are through, by cards: {summary}."
    )
    return st.finish(fig, alt=alt)


LOADS = (0.1, 0.3, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Shares of a server's capacity at which it is simulated."""
TICKS_MS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


def fig_knee(
    seconds: Sequence[float], max_batch: int = 8, delay_ms: float = 0.0, instances: int = 1
) -> st.LabFigure:
    """Return mean and p99 by rate, one at a time and in batches of service times `seconds`."""
    fig, ax = st.new_figure(height_in=3.0)
    batched = Policy(instances, max_batch, delay_ms / 1e3)
    servers = {"one at a time": Policy(), f"up to {max_batch}": batched}
    service = Service(seconds=tuple(seconds))
    alt_parts = []
    highest_ms = 1.0
    for (name, policy), colour in zip(servers.items(), (st.VERMILLION, st.BLUE), strict=True):
        max_size = policy.max_batch
        capacity = policy.instances * max_size / service.batch_s(max_size)
        rates = [load * capacity for load in LOADS]
        latencies_ms = []
        for rate in rates:
            scenario = Scenario(
                arrivals=Arrivals(rate_per_s=rate),
                steps=(Step("m", service, policy),),
                requests=12_000,
                seed=1,
                warmup=2000,
            )
            latencies_ms.append(simulate_serving(scenario).latency_s * 1e3)
        mean_ms = [samples_ms.mean() for samples_ms in latencies_ms]
        ax.plot(rates, mean_ms, "o-", color=colour, label=f"{name}: mean")
        p99_ms = [float(np.percentile(x, 99)) for x in latencies_ms]
        highest_ms = max(highest_ms, *p99_ms)
        ax.plot(rates, p99_ms, "s--", color=colour, label=f"{name}: p99")
        ax.axvline(capacity, color=colour, linestyle=":", linewidth=1, label=f"{name}: capacity")
        alt_parts.append(
            f"{name} p99 {p99_ms[0]:.1f} ms at {rates[0]:.0f} a second, {p99_ms[-1]:.0f} ms at "
            f"{rates[-1]:.0f}, capacity {capacity:.0f}"
        )
    ax.set(xlabel="requests a second", ylabel="time to the answer (ms)", yscale="log")
    st.numbered(ax.yaxis, TICKS_MS)
    ax.set_ylim(0.8e3 * service.batch_s(1), 1.3 * highest_ms)
    ax.legend()
    return st.finish(fig, alt=f"Times that rise slowly, then like a wall. {'; '.join(alt_parts)}.")


def fig_served(served: Served) -> st.LabFigure:
    """Return the share of requests answered within a time, and the histogram of batches."""
    fig, (latency_ax, batch_ax) = st.new_figure(ncols=2, height_in=2.6, width_ratios=(3, 2))
    times_s = np.sort(served.latency_s)
    shares = np.arange(1, len(times_s) + 1) / max(len(times_s), 1)
    sample_places = np.linspace(0, max(len(times_s) - 1, 0), min(len(times_s), 400)).astype(int)
    latency_ax.plot(times_s[sample_places], shares[sample_places], color=st.BLUE)
    alt_parts = []
    for percent in (50, 95, 99) if len(times_s) else ():
        value = float(np.percentile(times_s, percent))
        latency_ax.axvline(value, color=st.VERMILLION, linestyle=":", linewidth=1)
        latency_ax.text(value, percent / 100 - 0.12, f" p{percent}", color=st.INK, fontsize=8)
        alt_parts.append(f"p{percent} {value:.4g} s")
    latency_ax.set(xlabel="time to the answer (s)", ylabel="share of requests", ylim=(0, 1.02))
    sizes, counts = np.unique(served.batches(), return_counts=True)
    batch_ax.bar(sizes, counts / max(counts.sum(), 1), color=st.BLUE, hatch="//", edgecolor=st.INK)
    batch_ax.set(xlabel="items in a batch", ylabel="share of batches")
    mean = f"{sizes @ counts / counts.sum():.3g}" if len(sizes) else "none"
    return st.finish(
        fig, alt=f"Answers within a time: {', '.join(alt_parts)}; mean batch {mean} items."
    )


# -- the model against published measurements ------------------------------------------------------
def fig_validation(rows: Sequence[ValidationRow]) -> st.LabFigure:
    """Draw, per published row, the error of the time and of each pipe's busy share."""
    all_rows = list(rows)
    fig, (time_ax, share_ax) = st.new_figure(
        1, 2, height_in=0.9 + 0.26 * len(all_rows), sharey=True
    )
    for y, row in enumerate(all_rows):
        shares = [(share_ax, row.share_errors[pipe], SHARE_LIMIT) for pipe in PIPES]
        errors = zip(
            ((time_ax, row.time_error, TIME_LIMIT), *shares), _MARKS[:1] + _MARKS, strict=True
        )
        for (ax, error, limit), (colour, marker) in errors:
            look = {"marker": marker, "color": colour, "linestyle": "none"}
            face = colour if abs(error) <= limit else "#FFFFFF"
            ax.plot([100 * error], [y], markerfacecolor=face, **look)
    times = time_ax, TIME_LIMIT, "time: model / published - 1, %"
    for ax, limit, label in (times, (share_ax, SHARE_LIMIT, "busy share: model - publ., points")):
        ax.axvspan(-100 * limit, 100 * limit, color=st.LIGHT, zorder=0)
        ax.axvline(0, color=st.GREY, linewidth=0.8)
        ax.set_xlabel(label)
    st.name_rows(time_ax, [row.name for row in all_rows])
    for pipe, (colour, marker) in zip(PIPES, _MARKS, strict=True):
        share_ax.plot([], [], marker=marker, color=colour, linestyle="none", label=pipe)
    fig.legend(loc="outside upper right", ncols=len(PIPES))
    inside_count = sum(not row.misses for row in all_rows)
    time_text = ", ".join(f"{row.name} {row.time_error:+.0%}" for row in all_rows)
    share_errors = ((row.name, p, e) for row in all_rows for p, e in row.share_errors.items())
    outside_texts = (
        f"{p} of {name} {e:+.0%}" for name, p, e in share_errors if abs(e) > SHARE_LIMIT
    )
    alt = (
        f"Errors of the model on {len(all_rows)} published rows, {inside_count} of them inside "
        "both bands. "
        f"Times: {time_text}. Shares outside: {', '.join(outside_texts) or 'none'}."
    )
    return st.finish(fig, alt=alt)


_MARKS = ((st.BLUE, "o"), (st.ORANGE, "s"), (st.GREEN, "^"), (st.PURPLE, "D"))
