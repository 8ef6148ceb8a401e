"""What stays in fast memory between subgraphs: exact for a given sequence of groups."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_lab.aoe.contest.partition import bits
from ascend_lab.aoe.contest.price import NOTHING, Kept, Prices

MOST_OPTIONS = 8
Trail = tuple["Trail", Kept] | None
"""What was retained so far, the latest last."""


def last_reads(prices: Prices, groups: Sequence[int]) -> dict[int, int]:
    """Return for each operation the place of the last group that reads its results from outside."""
    return {
        op: place
        for place, group in enumerate(groups)
        for op in bits(prices.relations.ends(group)[0])
    }


def options(prices: Prices, groups: Sequence[int], place: int, last: dict[int, int]) -> list[Kept]:
    """Return what the group at a place may leave resident for the next: sets of whole tensors.

    A tensor may stay when only the next group needs it from outside and it fits with space left.
    """
    if place + 1 >= len(groups):
        return [NOTHING]
    problem, relations = prices.problem, prices.relations
    following = groups[place + 1]
    found = []
    for op in bits(relations.ends(groups[place])[1] & relations.ends(following)[0]):
        if last[op] > place + 1:
            continue
        tensors = problem.operations[op].outputs
        wanted = all(tensor in problem.consumers for tensor in tensors)
        if wanted and sum(map(problem.size, tensors)) < problem.capacity:
            found.append(frozenset(tensors))
    together = frozenset[int]().union(*found)
    return list(dict.fromkeys([NOTHING, *found[:MOST_OPTIONS], together]))


def resident_tensors(prices: Prices, groups: Sequence[int]) -> list[Kept]:
    """Return what each group retains so that the whole sequence is cheapest.

    Dynamic programming over the sequence; the state is what the group before left resident. When
    the budget runs out nothing more is retained.
    """
    states: dict[Kept, tuple[float, Trail]] = {NOTHING: (0.0, None)}
    last = last_reads(prices, groups)
    for place, group in enumerate(groups):
        following: dict[Kept, tuple[float, Trail]] = {}
        for retain in options(prices, groups, place, last):
            for resident, (cost, trail) in states.items():
                if (retain or resident) and prices.spent:
                    continue
                total = cost + prices.price(group, resident, retain)
                if retain not in following or total < following[retain][0]:
                    following[retain] = (total, (trail, retain))
        states = following
    trail, found = states[NOTHING][1], list[Kept]()
    while trail is not None:
        trail, kept = trail
        found.append(kept)
    return found[::-1]
