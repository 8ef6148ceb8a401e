"""Thresholds by Kullback-Leibler divergence, in the three forms in use, which differ in details.

P is the histogram with what is cut off added to its ends, Q the same mass put into as many levels
as the whole numbers have and spread again over the bins of a level that are not empty.

form       window                mass cut off       levels                 empty bins
AMCT       both sides, 20 steps  in P and in Q      255 of unequal widths  +1e-4; others gain too
TensorRT   of |x|, every bin     in P only          128 of unequal widths  ignored
ORT        about 0, every bin    in P only          equal widths, a rest   +1e-4; others lose it
"""

import numpy as np

from ascend_lab.graph.ir import Values

BINS, CANDIDATES = 512, 20
EMPTY = 1e-4


def histogram(x: Values, bins: int, low: float, high: float) -> tuple[Values, Values]:
    """Return counts in bins of equal width from low to high, and the edges of the bins."""
    counts, edges = np.histogram(x.astype(np.float64), bins, (low, high))
    return counts.astype(float), edges


def divergence(p: Values, q: Values) -> float:
    """Return D(P||Q) of two histograms in nats; infinite where Q lacks what P has."""
    one, two = p / p.sum(), q / q.sum()
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


def ada_scale(x: Values, bits: int = 8) -> float:
    """Return the symmetric scale of AMCT's form; 1 for zeros."""
    most = np.abs(x).max()
    if most == 0:
        return 1.0
    counts = histogram(x, BINS, -float(most), float(most))[0]
    losses = []
    for i in range(CANDIDATES):
        p = counts[i : BINS - i].copy()
        p[0] += counts[:i].sum()
        p[-1] += counts[BINS - i :].sum()
        edges = np.ceil(np.arange(2**bits) * (len(p) / (2**bits - 1)))
        edges[-1] = len(p)
        q = levelled(p, p > 0, edges)
        losses.append(divergence(_gained(p), _gained(q)))
    width = 2 * most / np.float32(BINS)
    return float((most - np.float32(int(np.argmin(losses))) * width) / np.float32(2 ** (bits - 1)))


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
    low, high = float(x.min()), float(x.max())
    most = max(abs(low), abs(high))
    counts, edges = histogram(x, bins, -most, most)
    edges, middle = edges.astype(np.float32), bins // 2
    best, found = np.inf, (low, high)
    for i in range(levels // 2, middle + 1):
        start, end = middle - i, min(middle + i + 1, bins)
        inside = counts[start:end]
        p = inside.copy()
        p[0] += counts[:start].sum()
        p[-1] += counts[end:].sum()
        loss = divergence(_lost(p), _lost(_equal_levels(inside, p > 0, levels)))
        if loss < best:
            best, found = loss, (float(edges[start]), float(edges[end]))
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
