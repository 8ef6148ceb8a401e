"""How large a number is worth keeping: rules that choose the range of activations.

minmax        everything
percentile    all but a few, by a histogram (ONNX Runtime)
ifmr          the largest times 0.70, 0.71, ... 1.29: least squared error (AMCT)
hfmg          histogram, thinner tail cut first: least squared error (AMCT)
kl            512 bins, 20 candidates: least divergence (AMCT's AdaRound, for weights there)
tensorrt      2048 bins of |x|, every candidate: least divergence (TensorRT)
entropy       window about 0 that grows: least divergence (ONNX Runtime)

A rule gets the batches in fp32, bits, and whether an offset is allowed. Several are one after
another for all but hfmg, which merges their histograms. The divergence is Kullback and Leibler's:
P is the histogram with what is cut off added to its ends, Q the same mass put into as many levels
as the whole numbers have and spread again over the bins of a level that are not empty.

form       window                mass cut off       levels                 empty bins
AMCT       both sides, 20 steps  in P and in Q      255 of unequal widths  +1e-4; others gain too
TensorRT   of |x|, every bin     in P only          128 of unequal widths  ignored
ORT        about 0, every bin    in P only          equal widths, a rest   +1e-4; others lose it
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ascend_lab.compiler.ir import Values
from ascend_lab.deploy.compress.scales import EPSILON, Scale, checked, scale_between
from ascend_lab.errors import InputError

Batches = Sequence[Values]
BINS = 512
CANDIDATES = 20
EMPTY = 1e-4
RATIOS = np.arange(70, 130, dtype=np.float32) / np.float32(100)


def calibrate(
    values: Any, method: str = "ifmr", *, bits: int = 8, asymmetric: bool = False, **options: Any
) -> Scale:
    """Return the scale of a tensor from samples of it: an array, or a list of them, one a batch.

    `options` are the rule's own (bins, percentile, ...). Raises `InputError` for an unknown method,
    samples that are empty, NaN or infinite, bits outside 2 to 16, and an offset where the rule
    knows none.
    """
    if method not in METHODS:
        raise InputError(f"a method among {', '.join(METHODS)}", repr(method), "choose one")
    if not 2 <= bits <= 16:
        raise InputError("bits from 2 to 16", str(bits), "8 is usual")
    if asymmetric and method in SYMMETRIC:
        raise InputError(f"{method} without an offset", "asymmetric", "it is symmetric")
    given = values if isinstance(values, list | tuple) else [values]
    if not given:
        raise InputError("values: at least one batch", "none")
    return METHODS[method]([checked(one) for one in given], bits, asymmetric, **options)


def _joined(batches: Batches) -> Values:
    return np.concatenate([one.ravel() for one in batches])


def minmax(batches: Batches, bits: int, asymmetric: bool) -> Scale:
    """Keep everything."""
    return scale_between(
        min(one.min() for one in batches), max(one.max() for one in batches), bits, asymmetric
    )


def percentile(
    batches: Batches, bits: int, asymmetric: bool, percent: float = 99.999, bins: int = 2048
) -> Scale:
    """Drop the tails beyond a percentile: of |x|, or half of the rest at each end."""
    return scale_between(
        *percentile_range(_joined(batches), percent, bins, not asymmetric), bits, asymmetric
    )


def percentile_range(
    x: Values, percent: float, bins: int = 2048, absolute: bool = False
) -> tuple[float, float]:
    """Return the left edges of the bins where the cumulated shares pass the percentiles."""
    if not 0 <= percent <= 100:
        raise InputError("percent from 0 to 100", str(percent))
    low = float(x.min())
    high = float(x.max())
    most = max(abs(low), abs(high))
    least = float(abs(x).min()) if absolute else -most
    counts, edges = histogram(abs(x) if absolute else x, bins, least, most)
    edges = edges.astype(np.float32)
    share = np.cumsum(counts / counts.sum())
    tail = (100 - percent) / (100 if absolute else 200)
    right = float(edges[np.searchsorted(share, 1 - tail)])
    left = -right if absolute else float(edges[np.searchsorted(share, tail)])
    return max(left, low), min(right, high)


def ifmr(
    batches: Batches,
    bits: int,
    asymmetric: bool,
    shares: tuple[float, float] = (0.999999, 0.999999),
    ratios: Any = RATIOS,
) -> Scale:
    """Search the range with the least squared error around the (nearly) largest number.

    With an offset only the upper end moves.
    """
    x = np.sort(_joined(batches))
    above, below = (max(1, len(x) - int(share * len(x))) for share in shares)
    high = max(x[-above], np.float32(0))
    low = min(x[below - 1], np.float32(0))
    most = max(high, -low)
    levels = 2**bits - 1 if asymmetric else 2 ** (bits - 1) - (abs(high) >= abs(low))
    best = (math.inf, 1.0, low)
    for end in np.asarray(ratios, np.float32) * (high if asymmetric else most):
        start = low if asymmetric else -end
        step = (end - start if asymmetric else end) / np.float32(levels)
        step = step if step >= EPSILON else np.float32(1)
        loss = float(np.mean((np.rint(np.clip(x, start, end) / step) * step - x) ** 2))
        if loss < best[0]:
            best = (loss, float(step), start)
    offset = -round(float(low) / best[1]) - 2 ** (bits - 1) if asymmetric else 0
    return Scale(best[1], offset, bits)


# -- HFMG -----------------------------------------------------------------------------------------
def hfmg(batches: Batches, bits: int, asymmetric: bool, bins: int = 4096) -> Scale:
    """Cut the thinner tail of a histogram step by step; keep the range with the least error."""
    low = float(batches[0].min())
    high = float(batches[0].max())
    counts = histogram(batches[0], bins, low, high)[0]
    for one in batches[1:]:
        ends = (low, high), (min(low, float(one.min())), max(high, float(one.max())))
        low, high = ends[1]
        counts = rebinned(counts, *ends) + histogram(one, bins, low, high)[0]
    if not high > low:
        return scale_between(low, high, bits, asymmetric)
    left, right = best_range(counts, 2**bits)
    width = (high - low) / bins
    return scale_between(low + left * width, low + (right + 1) * width, bits, asymmetric)


def rebinned(counts: Values, old: tuple[float, float], new: tuple[float, float]) -> Values:
    """Return a histogram on a wider range: a bin that straddles an edge is split in proportion."""
    bins = len(counts)
    if max(abs(a - b) for a, b in zip(old, new, strict=True)) <= EPSILON:
        return counts
    step = (old[1] - old[0]) / bins
    width = (new[1] - new[0]) / bins
    lower = old[0] + np.arange(bins) * step
    first = ((lower - new[0]) // width).astype(int)
    last = np.minimum((lower + step - new[0]) // width, bins - 1).astype(int)
    share = (new[0] + (first + 1) * width - lower) / (step or 1.0)
    kept = np.where(first == last, counts, (counts * share).astype(int))
    found = np.bincount(first, kept, bins) + np.bincount(last, counts - kept, bins)
    return found.astype(int)


def tail_cuts(counts: Values) -> list[tuple[int, int]]:
    """Return the ranges of bins (first, last) that cutting visits, down to a quarter of the bins.

    At each step the end that has to move further to drop one in 100,000 samples moves, the upper
    one in doubt. Up to 100,000 samples that is always the upper: the first bin is never empty.
    """
    least = math.ceil(len(counts) / 4)
    step = max(1, math.ceil(counts.sum() / 100_000))
    left = 0
    right = len(counts) - 1
    found = []
    counts = counts.tolist()
    while right - left > least:
        ahead = left
        behind = right
        dropped = 0
        while ahead < behind and dropped < step:
            dropped += counts[ahead]
            ahead += 1
        dropped = 0
        while ahead < behind and dropped < step:
            dropped += counts[behind]
            behind -= 1
        if right - behind >= ahead - left:
            right = behind
        else:
            left = ahead
        found.append((left, right))
    return found


def best_range(counts: Values, levels: int) -> tuple[int, int]:
    """Return the visited range of bins with the least squared error, the first of equals.

    Ranges shrink: once what lies outside alone costs more than the best, no later one is better.
    """
    moments = moments_of(counts)
    bins = len(counts)
    best = math.inf
    found = (0, bins - 1)
    for left, right in tail_cuts(counts):
        edges = np.array([left, right + 1.0])
        count, total, squares = map(np.diff, moments(np.array([0, *edges, bins])))
        outside = squares[::2] - 2 * edges * total[::2] + edges**2 * count[::2]
        if outside.sum() >= best:
            break
        loss = histogram_loss(moments, bins, left, right, levels)
        if loss < best:
            best = loss
            found = (left, right)
    return found


def moments_of(counts: Values) -> Callable[[Values], list[Values]]:
    """Return the function of t that gives the sums of 1, x and x^2 over a histogram up to t.

    Every bin is one wide and its counts are spread evenly in it.
    """
    powers = [np.arange(len(counts) + 1.0) ** k / k for k in (1, 2, 3)]
    sums = [np.append(0.0, np.cumsum(counts * np.diff(power))) for power in powers]
    padded = np.append(counts, 0.0)

    def moments(t: Values) -> list[Values]:
        bins = t.astype(int)
        grown = [t**k / k for k in (1, 2, 3)]
        return [
            done[bins] + padded[bins] * (end - power[bins])
            for done, end, power in zip(sums, grown, powers, strict=True)
        ]

    return moments


def histogram_loss(
    moments: Callable[[Values], list[Values]], bins: int, left: int, right: int, levels: int
) -> float:
    """Return the squared error of a histogram if bins left to right share so many levels.

    What lies outside goes to the end levels: sum x^2 - 2 c sum x + c^2 sum 1 with their centres c.
    """
    width = (right - left + 1) / levels
    edges = left + width * np.arange(levels + 1)
    centres = edges[:-1] + width / 2
    edges[0] = 0
    edges[-1] = bins
    count, total, squares = map(np.diff, moments(edges))
    return float(np.sum(squares - 2 * centres * total + centres**2 * count))


# -- divergence -----------------------------------------------------------------------------------
def histogram(x: Values, bins: int, low: float, high: float) -> tuple[Values, Values]:
    """Return counts in bins of equal width from low to high, and the edges of the bins."""
    counts, edges = np.histogram(x.astype(np.float64), bins, (low, high))
    return counts.astype(float), edges


def divergence(p: Values, q: Values) -> float:
    """Return D(P||Q) of two histograms in nats; infinite where Q lacks what P has."""
    one = p / p.sum()
    two = q / q.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(one > 0, one * np.log(one / two), 0.0)
    return float(terms.sum())


def levelled(mass: Values, seen: Values, edges: Values) -> Values:
    """Return mass summed between edges and spread evenly over the bins seen there."""
    level = np.searchsorted(edges[1:], np.arange(len(mass)), side="right")
    count = len(edges) - 1
    total = np.bincount(level, mass, count)
    shares = total / np.maximum(np.bincount(level, seen, count), 1)
    found: Values = np.where(seen, shares[level], 0.0)
    return found


def _gained(counts: Values) -> Values:
    """Return counts with empty bins at 1e-4; the others gain 1e-4 zeros / nonzeros."""
    empty = counts == 0
    extra = EMPTY * empty.sum() / max(1, (~empty).sum())
    return counts if extra >= 1 else np.where(empty, EMPTY, counts + extra)


def tensorrt_threshold(counts: Values, levels: int = 128) -> int:
    """Return the number of bins of |x| to keep: the last of those with the least divergence.

    The first bin counts as the second: exact zeros must not weigh (Model Optimizer).
    """
    bins = counts.astype(float)
    bins[0] = bins[1]
    cuts = range(levels, len(bins) + 1)
    losses = []
    for cut in cuts:
        inside = bins[:cut]
        q = levelled(inside, inside > 0, np.ceil(np.arange(levels + 1) * (cut / levels)))
        p = inside.copy()
        p[-1] += bins[cut:].sum()
        losses.append(divergence(p, q) if q.any() else np.inf)
    return cuts[len(losses) - 1 - int(np.argmin(losses[::-1]))] if losses else len(bins)


def entropy_range(x: Values, bins: int, levels: int) -> tuple[float, float]:
    """Return the range of ONNX Runtime's form, within what was seen."""
    low = float(x.min())
    high = float(x.max())
    most = max(abs(low), abs(high))
    counts, edges = histogram(x, bins, -most, most)
    edges = edges.astype(np.float32)
    middle = bins // 2
    best = np.inf
    found = (low, high)
    for i in range(levels // 2, middle + 1):
        start = middle - i
        end = min(middle + i + 1, bins)
        inside = counts[start:end]
        p = inside.copy()
        p[0] += counts[:start].sum()
        p[-1] += counts[end:].sum()
        loss = divergence(_lost(p), _lost(_equal_levels(inside, p > 0, levels)))
        if loss < best:
            best = loss
            found = (float(edges[start]), float(edges[end]))
    return max(found[0], low), min(found[1], high)


def _equal_levels(mass: Values, seen: Values, levels: int) -> Values:
    """Return mass in levels of equal width, whole counts; the last level has the rest too."""
    width = len(mass) // levels
    level = np.minimum(np.arange(len(mass)) // width, levels - 1)
    total = np.bincount(level, mass, levels)
    inside = np.arange(len(mass)) < levels * width
    count = np.bincount(level, seen & inside, levels)
    spread = np.floor(total / np.maximum(count, 1))
    found: Values = np.where(inside & (count > 0)[level], spread[level], 0.0)
    return found


def _lost(counts: Values) -> Values:
    """Return counts with empty bins at 1e-4, taken from the others."""
    empty = counts == 0
    return np.where(empty, EMPTY, counts - EMPTY * empty.sum() / max(1, (~empty).sum()))


def kl(batches: Batches, bits: int, asymmetric: bool) -> Scale:
    """Trim up to 19 of 512 bins a side: least divergence in AMCT's form; 1 for zeros."""
    x = _joined(batches)
    most = np.abs(x).max()
    if most == 0:
        return Scale(1.0, 0, bits)
    counts = histogram(x, BINS, -float(most), float(most))[0]
    losses = []
    for i in range(CANDIDATES):
        p = counts[i : BINS - i].copy()
        p[0] += counts[:i].sum()
        p[-1] += counts[BINS - i :].sum()
        edges = np.ceil(np.arange(2**bits) * (len(p) / (2**bits - 1)))
        edges[-1] = len(p)
        losses.append(divergence(_gained(p), _gained(levelled(p, p > 0, edges))))
    width = 2 * most / np.float32(BINS)
    end = most - np.float32(int(np.argmin(losses))) * width
    scale = float(end / np.float32(2 ** (bits - 1)))
    return Scale(scale if scale >= EPSILON else 1.0, 0, bits)


def tensorrt(batches: Batches, bits: int, asymmetric: bool, bins: int = 2048) -> Scale:
    """Cut |x| where the divergence is least, in TensorRT's form."""
    x = _joined(batches)
    low = float(x.min())
    high = float(x.max())
    most = max(abs(low), abs(high))
    if most < EPSILON:
        return scale_between(low, high, bits, asymmetric)
    counts, edges = histogram(abs(x), bins, 0.0, most)
    unsigned = asymmetric and low >= 0
    end = float(edges[tensorrt_threshold(counts, 2**bits if unsigned else 2 ** (bits - 1))])
    ends = (max(-end, low), min(end, high)) if asymmetric else (-end, end)
    return scale_between(*ends, bits, asymmetric)


def entropy(
    batches: Batches, bits: int, asymmetric: bool, bins: int = 2048, levels: int = 128
) -> Scale:
    """Widen a window about 0 to the least divergence, in ONNX Runtime's form.

    Its own defaults, 128 bins and levels, leave one candidate: min-max.
    """
    return scale_between(*entropy_range(_joined(batches), bins, levels), bits, asymmetric)


METHODS: Mapping[str, Callable[..., Scale]] = {
    rule.__name__: rule for rule in (minmax, percentile, ifmr, hfmg, kl, tensorrt, entropy)
}
"""Every rule by name."""
SYMMETRIC = ("kl",)
"""Rules without an offset."""
