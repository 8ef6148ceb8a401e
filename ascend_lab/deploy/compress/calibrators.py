"""Calibration rules, which choose the range of an activation that the whole numbers cover.

A wide range cuts nothing off but makes the steps between levels coarse; a narrow one has fine
steps but clips the tails. Each rule weighs the two differently:

minmax        the range from the least to the largest number: nothing is clipped
percentile    all but a few numbers, found in a histogram (ONNX Runtime)
ifmr          the largest number times 0.70, 0.71, ... 1.29: least squared error (AMCT)
hfmg          a histogram, its thinner tail cut first: least squared error (AMCT)
kl            512 bins, 20 candidates: least divergence (AMCT's AdaRound, for weights there)
tensorrt      2048 bins of |x|, every candidate: least divergence (TensorRT)
entropy       a window about 0 that grows: least divergence (ONNX Runtime)

A rule gets the batches in fp32, the number of bits, and whether an offset is allowed. All rules
join the batches to one array, except hfmg, which merges their histograms.

The divergence is that of Kullback and Leibler, D(P||Q) = sum p ln(p / q). P is the histogram with
the mass that is clipped added to its end bins. Q is the same mass put into as many levels as the
whole numbers have, and spread evenly again over those bins of a level that are not empty.

The three forms differ in the windows that they try, in where clipped mass counts, in the widths of
the levels, and in what an empty bin counts (ORT is ONNX Runtime):

form       windows               clipped mass       levels                 empty bins
AMCT       both sides, 20 steps  in P and in Q      255 of unequal widths  1e-4, others gain too
TensorRT   of |x|, every bin     in P only          128 of unequal widths  0
ORT        about 0, every bin    in P only          of equal widths        1e-4, taken from others
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
"""Bins of the histogram of `kl`."""
CANDIDATES = 20
"""Ranges that `kl` tries: 0 to 19 bins cut off at each side."""
EMPTY = 1e-4
"""Count that an empty bin gets, so that ln(p / q) exists there."""
RATIOS = np.arange(70, 130, dtype=np.float32) / np.float32(100)
"""Shares of the largest number that `ifmr` tries: 0.70, 0.71, ... 1.29."""


def calibrate(
    values: Any, method: str = "ifmr", *, bits: int = 8, asymmetric: bool = False, **options: Any
) -> Scale:
    """Return the scale of a tensor, chosen by a rule from samples: an array, or one for each batch.

    `options` are those of the rule (bins, percent, ...). Raises `InputError` for an unknown method,
    samples that are empty, NaN or infinite, bits outside 2 to 16, and for an offset with a rule
    that is symmetric.
    """
    if method not in METHODS:
        raise InputError(f"a method among {', '.join(METHODS)}", repr(method), "choose one")
    if not 2 <= bits <= 16:
        raise InputError("bits from 2 to 16", str(bits), "8 is usual")
    if asymmetric and method in SYMMETRIC:
        raise InputError(f"{method} without an offset", "asymmetric", "it is symmetric")
    samples = values if isinstance(values, list | tuple) else [values]
    if not samples:
        raise InputError("values: at least one batch", "none")
    return METHODS[method]([checked(batch) for batch in samples], bits, asymmetric, **options)


def _joined(batches: Batches) -> Values:
    """Return the numbers of all batches as one array."""
    return np.concatenate([batch.ravel() for batch in batches])


def minmax(batches: Batches, bits: int, asymmetric: bool) -> Scale:
    """Return the scale that clips nothing."""
    return scale_between(
        min(batch.min() for batch in batches),
        max(batch.max() for batch in batches),
        bits,
        asymmetric,
    )


def percentile(
    batches: Batches, bits: int, asymmetric: bool, percent: float = 99.999, bins: int = 2048
) -> Scale:
    """Return the scale that clips |x| beyond a percentile, or with an offset both tails equally.

    With an offset, 99.999 % clips 0.0005 % at each end.
    """
    low, high = percentile_range(_joined(batches), percent, bins, not asymmetric)
    return scale_between(low, high, bits, asymmetric)


def percentile_range(
    x: Values, percent: float, bins: int = 2048, absolute: bool = False
) -> tuple[float, float]:
    """Return the ends of the range that holds `percent` of the numbers, rounded down to bin edges.

    `absolute`: the histogram is of |x| and the range is symmetric.
    """
    if not 0 <= percent <= 100:
        raise InputError("percent from 0 to 100", str(percent))
    low = float(x.min())
    high = float(x.max())
    largest = max(abs(low), abs(high))
    start = float(abs(x).min()) if absolute else -largest
    counts, edges = histogram(abs(x) if absolute else x, bins, start, largest)
    edges = edges.astype(np.float32)
    share = np.cumsum(counts / counts.sum())
    # The clipped part is one tail of |x|, or half of it at each of two ends: 200 = 2 x 100 %.
    tail = (100 - percent) / (100 if absolute else 200)
    high_edge = float(edges[np.searchsorted(share, 1 - tail)])
    low_edge = -high_edge if absolute else float(edges[np.searchsorted(share, tail)])
    # An edge may lie outside the numbers, since the histogram reaches from -largest to largest.
    return max(low_edge, low), min(high_edge, high)


def ifmr(
    batches: Batches,
    bits: int,
    asymmetric: bool,
    shares: tuple[float, float] = (0.999999, 0.999999),
    ratios: Any = RATIOS,
) -> Scale:
    """Return the scale of least squared error among `ratios` of the largest number (IFMR).

    `shares` of the numbers decide what counts as largest, at the upper and the lower end. With an
    offset only the upper end moves.
    """
    x = np.sort(_joined(batches))
    # 0.999999 of 5,000,000 numbers: the largest is the 5th from the end, so 4 outliers do not count
    high_rank, low_rank = (max(1, len(x) - int(share * len(x))) for share in shares)
    high = max(x[-high_rank], np.float32(0))
    low = min(x[low_rank - 1], np.float32(0))
    largest = max(high, -low)
    # Steps between the ends: 255 of 8 bits with an offset. Without one they are counted from 0:
    # 127 up to the largest number, but 128 if it is negative, because int8 has -128 but not 128.
    if asymmetric:
        levels = 2**bits - 1
    else:
        levels = 2 ** (bits - 1) - 1 if abs(high) >= abs(low) else 2 ** (bits - 1)
    best = (math.inf, 1.0, low)  # squared error, step, lower end
    for end in np.asarray(ratios, np.float32) * (high if asymmetric else largest):
        start = low if asymmetric else -end
        step = (end - start if asymmetric else end) / np.float32(levels)
        if step < EPSILON:
            step = np.float32(1)
        rounded = np.rint(np.clip(x, start, end) / step) * step
        loss = float(np.mean((rounded - x) ** 2))
        if loss < best[0]:
            best = (loss, float(step), start)
    # The lower end becomes the least whole number: -128 = low / step + offset.
    offset = -round(float(low) / best[1]) - 2 ** (bits - 1) if asymmetric else 0
    return Scale(best[1], offset, bits)


# -- HFMG -----------------------------------------------------------------------------------------
def hfmg(batches: Batches, bits: int, asymmetric: bool, bins: int = 4096) -> Scale:
    """Return the scale of least squared error as a histogram's thinner tail is cut again and again.

    The histograms of the batches are added up (HFMG), so that no batch has to be kept.
    """
    low = float(batches[0].min())
    high = float(batches[0].max())
    counts = histogram(batches[0], bins, low, high)[0]
    for batch in batches[1:]:
        old_ends = (low, high)
        low = min(low, float(batch.min()))
        high = max(high, float(batch.max()))
        counts = rebinned(counts, old_ends, (low, high)) + histogram(batch, bins, low, high)[0]
    if not high > low:
        return scale_between(low, high, bits, asymmetric)
    first_bin, last_bin = best_range(counts, 2**bits)
    width = (high - low) / bins
    # bins 10 to 19 of width 0.5 from low = -8 on: the range is -3 to 2
    return scale_between(low + first_bin * width, low + (last_bin + 1) * width, bits, asymmetric)


def rebinned(
    counts: Values, old_ends: tuple[float, float], new_ends: tuple[float, float]
) -> Values:
    """Return a histogram moved to a wider range with as many bins, so that its bins get wider.

    An old bin that lies across the edge of two new ones is split between them in proportion.
    """
    bins = len(counts)
    low_moves = abs(old_ends[0] - new_ends[0])
    high_moves = abs(old_ends[1] - new_ends[1])
    if max(low_moves, high_moves) <= EPSILON:
        return counts
    old_width = (old_ends[1] - old_ends[0]) / bins
    new_width = (new_ends[1] - new_ends[0]) / bins
    old_edges = old_ends[0] + np.arange(bins) * old_width
    first_bin = ((old_edges - new_ends[0]) // new_width).astype(int)
    last_bin = np.minimum((old_edges + old_width - new_ends[0]) // new_width, bins - 1).astype(int)
    # The share of an old bin below the upper edge of the first new bin that it touches; if the new
    # bin contains the whole old bin, the share is not used.
    low_share = (new_ends[0] + (first_bin + 1) * new_width - old_edges) / (old_width or 1.0)
    low_counts = np.where(first_bin == last_bin, counts, (counts * low_share).astype(int))
    wider = np.bincount(first_bin, low_counts, bins)
    wider = wider + np.bincount(last_bin, counts - low_counts, bins)
    return wider.astype(int)


def tail_cuts(counts: Values) -> list[tuple[int, int]]:
    """Return the ranges of bins (first, last) that cutting visits, down to a quarter of the bins.

    At each step one end moves far enough to drop one in 100,000 samples: the end whose tail is
    thinner, so that it has to move further. If both move equally far, the upper end moves. With up
    to 100,000 samples one sample is dropped at a time, and the upper end always moves: the first
    bin holds the least number and is never empty.
    """
    min_bins = math.ceil(len(counts) / 4)
    drop = max(1, math.ceil(counts.sum() / 100_000))
    first_bin = 0
    last_bin = len(counts) - 1
    ranges = []
    bin_counts = counts.tolist()
    while last_bin - first_bin > min_bins:
        next_first = first_bin
        next_last = last_bin
        dropped = 0
        while next_first < next_last and dropped < drop:
            dropped += bin_counts[next_first]
            next_first += 1
        dropped = 0
        while next_first < next_last and dropped < drop:
            dropped += bin_counts[next_last]
            next_last -= 1
        if last_bin - next_last >= next_first - first_bin:
            last_bin = next_last
        else:
            first_bin = next_first
        ranges.append((first_bin, last_bin))
    return ranges


def best_range(counts: Values, levels: int) -> tuple[int, int]:
    """Return the range of bins with the least squared error among those of `tail_cuts`.

    Of equally good ranges it is the first. Ranges shrink: once clipping alone costs more than the
    best range, no later one is better.
    """
    moments = moments_of(counts)
    bins = len(counts)
    least_loss = math.inf
    best_bins = (0, bins - 1)
    for first_bin, last_bin in tail_cuts(counts):
        edges = np.array([first_bin, last_bin + 1.0])
        count, total, squares = map(np.diff, moments(np.array([0, *edges, bins])))
        # clipping to the edge e costs sum (x - e)^2 = sum x^2 - 2 e sum x + e^2 sum 1, at both ends
        outside = squares[::2] - 2 * edges * total[::2] + edges**2 * count[::2]
        if outside.sum() >= least_loss:
            break
        loss = histogram_loss(moments, bins, first_bin, last_bin, levels)
        if loss < least_loss:
            least_loss = loss
            best_bins = (first_bin, last_bin)
    return best_bins


def moments_of(counts: Values) -> Callable[[Values], list[Values]]:
    """Return the function of t that gives the sums of 1, x and x^2 over a histogram up to t.

    Every bin has width 1, and its counts are spread evenly in it: a bin from i to i + 1 with c
    counts adds c, c ((i + 1)^2 - i^2) / 2 and c ((i + 1)^3 - i^3) / 3.
    """
    # the integrals of 1, x and x^2 from 0 to each edge
    powers = [np.arange(len(counts) + 1.0) ** k / k for k in (1, 2, 3)]
    sums = [np.append(0.0, np.cumsum(counts * np.diff(power))) for power in powers]
    padded = np.append(counts, 0.0)

    def moments(t: Values) -> list[Values]:
        """Return the sums of x^0, x^1 and x^2 over the histogram up to t."""
        bins = t.astype(int)
        integrals = [t**k / k for k in (1, 2, 3)]
        # all bins below t, and the part up to t of the bin that contains t
        return [
            full_bins[bins] + padded[bins] * (integral - power[bins])
            for full_bins, integral, power in zip(sums, integrals, powers, strict=True)
        ]

    return moments


def histogram_loss(
    moments: Callable[[Values], list[Values]], bins: int, first_bin: int, last_bin: int, levels: int
) -> float:
    """Return the squared error of a histogram if `levels` levels cover first to last bin evenly.

    A level with the centre c costs sum x^2 - 2 c sum x + c^2 sum 1 over its numbers; numbers
    outside the range belong to the two end levels.
    """
    width = (last_bin - first_bin + 1) / levels
    edges = first_bin + width * np.arange(levels + 1)
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
    """Return D(P||Q) of two histograms in nats; infinite if Q is 0 in a bin where P is not."""
    p_share = p / p.sum()
    q_share = q / q.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p_share > 0, p_share * np.log(p_share / q_share), 0.0)
    return float(terms.sum())


def levelled(mass: Values, is_filled: Values, edges: Values) -> Values:
    """Return mass summed between edges, then spread evenly over the bins that are filled there.

    Mass (4, 0, 2, 2) with one edge in the middle becomes (4, 0, 2, 2): the first level gives all to
    its only bin that is not empty. (3, 1, 2, 2) becomes (2, 2, 2, 2).
    """
    level_of_bin = np.searchsorted(edges[1:], np.arange(len(mass)), side="right")
    count = len(edges) - 1
    level_mass = np.bincount(level_of_bin, mass, count)
    shares = level_mass / np.maximum(np.bincount(level_of_bin, is_filled, count), 1)
    spread: Values = np.where(is_filled, shares[level_of_bin], 0.0)
    return spread


def _empty_added(counts: Values) -> Values:
    """Return counts with empty bins at 1e-4, and the other bins raised by 1e-4 zeros / nonzeros.

    In AMCT the other bins gain as well; ONNX Runtime takes the 1e-4 from them (`_empty_taken`).
    """
    empty = counts == 0
    extra = EMPTY * empty.sum() / max(1, (~empty).sum())
    return counts if extra >= 1 else np.where(empty, EMPTY, counts + extra)


def tensorrt_threshold(counts: Values, levels: int = 128) -> int:
    """Return how many bins of |x| to keep: the last number among those of least divergence."""
    bins = counts.astype(float)
    # After a ReLU half of all numbers are exactly 0, which any scale represents without an error:
    # they must not decide (as in Nvidia's Model Optimizer).
    bins[0] = bins[1]
    cuts = range(levels, len(bins) + 1)
    losses = []
    for cut in cuts:
        inside = bins[:cut]
        q = levelled(inside, inside > 0, np.ceil(np.arange(levels + 1) * (cut / levels)))
        # Q is made of the kept bins alone, while P has the clipped counts in its last bin: the more
        # is clipped, the more they differ.
        p = inside.copy()
        p[-1] += bins[cut:].sum()
        losses.append(divergence(p, q) if q.any() else np.inf)
    if not losses:
        return len(bins)
    # argmin takes the first of equals; of the reversed list that is the last
    last_best = len(losses) - 1 - int(np.argmin(losses[::-1]))
    return cuts[last_best]


def entropy_range(x: Values, bins: int, levels: int) -> tuple[float, float]:
    """Return the range by ONNX Runtime's form of the divergence, within the least and largest x."""
    low = float(x.min())
    high = float(x.max())
    largest = max(abs(low), abs(high))
    counts, edges = histogram(x, bins, -largest, largest)
    edges = edges.astype(np.float32)
    middle = bins // 2  # the bin that holds 0
    least_loss = np.inf
    ends = (low, high)
    for i in range(levels // 2, middle + 1):
        start = middle - i
        end = min(middle + i + 1, bins)
        inside = counts[start:end]
        p = inside.copy()
        p[0] += counts[:start].sum()
        p[-1] += counts[end:].sum()
        loss = divergence(_empty_taken(p), _empty_taken(_equal_levels(inside, p > 0, levels)))
        if loss < least_loss:
            least_loss = loss
            ends = (float(edges[start]), float(edges[end]))
    return max(ends[0], low), min(ends[1], high)


def _equal_levels(mass: Values, is_filled: Values, levels: int) -> Values:
    """Return mass spread evenly in levels of equal width, as whole counts (ONNX Runtime's form).

    Bins beyond the last whole level add to its mass but get none: of 10 bins in 4 levels, two each,
    bins 8 and 9.
    """
    width = len(mass) // levels
    level_of_bin = np.minimum(np.arange(len(mass)) // width, levels - 1)
    level_mass = np.bincount(level_of_bin, mass, levels)
    inside = np.arange(len(mass)) < levels * width
    level_bins = np.bincount(level_of_bin, is_filled & inside, levels)
    per_bin = np.floor(level_mass / np.maximum(level_bins, 1))
    levelled_mass: Values = np.where(
        inside & (level_bins > 0)[level_of_bin], per_bin[level_of_bin], 0.0
    )
    return levelled_mass


def _empty_taken(counts: Values) -> Values:
    """Return counts with empty bins at 1e-4, which the other bins lose in equal shares."""
    empty = counts == 0
    return np.where(empty, EMPTY, counts - EMPTY * empty.sum() / max(1, (~empty).sum()))


def kl(batches: Batches, bits: int, asymmetric: bool) -> Scale:
    """Return the scale of least divergence, 0 to 19 of 512 bins cut off at each side (AMCT's form).

    Zeros alone have the scale 1.
    """
    x = _joined(batches)
    largest = np.abs(x).max()
    if largest == 0:
        return Scale(1.0, 0, bits)
    counts = histogram(x, BINS, -float(largest), float(largest))[0]
    losses = []
    for i in range(CANDIDATES):
        p = counts[i : BINS - i].copy()
        p[0] += counts[:i].sum()
        p[-1] += counts[BINS - i :].sum()
        edges = np.ceil(np.arange(2**bits) * (len(p) / (2**bits - 1)))
        edges[-1] = len(p)
        losses.append(divergence(_empty_added(p), _empty_added(levelled(p, p > 0, edges))))
    # the first candidate is the full range; each next one ends a bin earlier
    width = 2 * largest / np.float32(BINS)
    end = largest - np.float32(int(np.argmin(losses))) * width
    scale = float(end / np.float32(2 ** (bits - 1)))
    return Scale(scale if scale >= EPSILON else 1.0, 0, bits)


def tensorrt(batches: Batches, bits: int, asymmetric: bool, bins: int = 2048) -> Scale:
    """Return the scale that clips |x| at the least divergence, as in TensorRT."""
    x = _joined(batches)
    low = float(x.min())
    high = float(x.max())
    largest = max(abs(low), abs(high))
    if largest < EPSILON:
        return scale_between(low, high, bits, asymmetric)
    counts, edges = histogram(abs(x), bins, 0.0, largest)
    # without negative numbers an offset gives all 2^b levels to |x|, otherwise half of them
    unsigned = asymmetric and low >= 0
    end = float(edges[tensorrt_threshold(counts, 2**bits if unsigned else 2 ** (bits - 1))])
    ends = (max(-end, low), min(end, high)) if asymmetric else (-end, end)
    return scale_between(*ends, bits, asymmetric)


def entropy(
    batches: Batches, bits: int, asymmetric: bool, bins: int = 2048, levels: int = 128
) -> Scale:
    """Return the scale of the window about 0 with the least divergence, in ONNX Runtime's form.

    The defaults of ONNX Runtime, 128 bins and 128 levels, leave one candidate, which is min-max;
    2048 bins give the rule more candidates.
    """
    return scale_between(*entropy_range(_joined(batches), bins, levels), bits, asymmetric)


METHODS: Mapping[str, Callable[..., Scale]] = {
    rule.__name__: rule for rule in (minmax, percentile, ifmr, hfmg, kl, tensorrt, entropy)
}
"""Every rule by name."""
SYMMETRIC = ("kl",)
"""Rules without an offset."""
