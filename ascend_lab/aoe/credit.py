"""Who earned it? Credit for what several techniques reach together, whatever their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from math import comb, exp, log

Value = Callable[[frozenset[str]], float]
"""What a set of techniques is worth."""
Times = Mapping[frozenset[str], float]
"""Seconds for every set of techniques."""


def shares(value: Value, names: Sequence[str]) -> dict[str, float]:
    """Return the Shapley value of each name: what it adds to `value`, mean over all orders.

        share(i) = sum over S without i of (value(S + i) - value(S)) / (n C(n - 1, |S|))

    Shares add up to value(all) - value(none). Source: Shapley 1953.
    """
    return {
        name: sum(
            (value(before | {name}) - value(before))
            / (len(names) * comb(len(names) - 1, len(before)))
            for before in others(name, names)
        )
        for name in names
    }


def others(name: str, names: Sequence[str]) -> Iterator[frozenset[str]]:
    """Yield every set of the other names."""
    rest = [n for n in names if n != name]
    for size in range(len(rest) + 1):
        yield from map(frozenset, combinations(rest, size))


def factors(times: Times, names: Sequence[str]) -> dict[str, float]:
    """Return how many times faster each name makes it: its share of the logarithm of the speed.

    Speed-ups multiply and their logarithms add, so that the factors multiply to
    time(none) / time(all).
    """
    found = shares(lambda on: -log(times[on]), names)
    return {name: exp(share) for name, share in found.items()}


def factor_range(times: Times, name: str, names: Sequence[str]) -> tuple[float, float]:
    """Return the least and the largest factor of a name, over all sets that may stand before it."""
    found = [times[before] / times[before | {name}] for before in others(name, names)]
    return min(found), max(found)
