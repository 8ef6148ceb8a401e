"""Searches over partitions: exact intervals, merging, annealing; and what stays in fast memory."""

import math
import random
from collections.abc import Sequence

from ascend_lab.lab.contest.price import NOTHING, Kept, Prices
from ascend_lab.lab.contest.problem import Partition, bits

HEAT = 0.004
"""The first temperature of annealing, as a part of the cost."""
LEAST = 1e-9
"""A smaller gain is rounding."""


def intervals(prices: Prices, order: Sequence[int]) -> Partition:
    """Return the best cut of one topological order into subgraphs that follow each other.

    Exact among these by dynamic programming, f(j) = min over i of f(i) + price(i..j), as long as
    the budget lasts; then the cheapest with the intervals priced so far.
    """
    count = len(order)

    def fits(group: int) -> bool:
        return prices.relations.closed(group) and prices.legal(group)

    best = [0.0] + [math.inf] * count
    cut = list(range(-1, count))
    for end in range(1, count + 1):
        group = 0
        for start in range(end - 1, -1, -1):
            group |= 1 << order[start]
            alone = start == end - 1
            if not alone and prices.spent:
                break
            if not alone and not fits(group):
                continue
            total = best[start] + prices.price(group)
            if total < best[end] * (1 - 1e-12):
                best[end], cut[end] = total, start
    found, end = [], count
    while end > 0:
        found.append(sum(1 << op for op in order[cut[end] : end]))
        end = cut[end]
    return tuple(reversed(found))


def grown(prices: Prices, groups: Partition, seed: int) -> int:
    """Return the least legal union of groups that holds a set of operations, 0 without one.

    Grows the set until it is closed and no path leaves and enters it again.
    """
    while True:
        wide = prices.relations.hull(seed)
        for group in groups:
            if group & wide:
                wide |= group
        if wide == seed:
            return seed if prices.legal(seed) else 0
        seed = wide


def joined(prices: Prices, groups: Partition, seed: int) -> Partition | None:
    """Return the groups with those that a set of operations touches made one, if that is legal."""
    union = grown(prices, groups, seed)
    if not union:
        return None
    found = (*(group for group in groups if not group & union), union)
    return found if prices.relations.order(found) is not None else None


def neighbours(prices: Prices, groups: Partition) -> list[int]:
    """Return the unions of two groups with an edge between them or that read the same input."""
    relations = prices.relations
    home = {op: group for group in groups for op in bits(group)}
    found = set()
    for group in groups:
        near = 0
        for op in bits(group):
            near |= relations.beside[op]
        for op in bits(near & ~group):
            found.add(group | home[op])
    return sorted(found)


def merge(prices: Prices, groups: Partition) -> Partition:
    """Join neighbours until no pair gains: in each round those that gain most or half of that."""
    gains: dict[int, float] = {}

    def gain(seed: int) -> float:
        if not seed:
            return 0.0
        inside = [group for group in groups if group & seed]
        return prices.total(inside) - prices.price(seed) if len(inside) > 1 else 0.0

    while True:
        pairs = neighbours(prices, groups)
        for pair in pairs:
            if pair not in gains and not prices.spent:
                gains[pair] = gain(grown(prices, groups, pair))
        ranked = sorted(pairs, key=lambda pair: -gains.get(pair, 0.0))
        best, touched = max(gains.get(ranked[0], 0.0) if ranked else 0.0, 2 * LEAST), 0
        for pair in ranked:
            if gains.get(pair, 0.0) < best / 2:
                break
            found = None if pair & touched else joined(prices, groups, pair)
            if found and not found[-1] & touched and gain(found[-1]) > LEAST:
                groups, touched = found, touched | found[-1]
        if not touched or prices.spent:
            return groups


def anneal(
    prices: Prices, groups: Partition, rng: random.Random, rounds: int, goal: float = 0.0
) -> Partition:
    """Return the best partition seen by random joins, splits, moves and copies.

    A worse one is accepted with probability exp(-increase / T), T falling from HEAT of the best.
    Ends with the rounds, with the budget or at the goal.
    """
    now, cost = groups, prices.total(groups)
    best, least = now, cost
    for step in range(rounds):
        if prices.spent or least <= goal * (1 + 1e-12):
            break
        found = _changed(prices, now, rng)
        if found is None:
            continue
        total = prices.total(found)
        heat = HEAT * least * (1 - step / rounds) ** 2 + 1e-12
        if total <= cost or rng.random() < math.exp(max((cost - total) / heat, -700.0)):
            now, cost = found, total
            if cost < least * (1 - 1e-12):
                best, least = now, cost
    return best


def _changed(prices: Prices, groups: Partition, rng: random.Random) -> Partition | None:
    """Return a legal neighbour of a partition, or None when the move tried gives none."""
    relations = prices.relations
    group = rng.choice(groups)
    op = rng.choice(list(bits(group)))
    kind = rng.random()
    if kind < 0.35:
        near = [other for other in bits(relations.touching[op]) if not group >> other & 1]
        if not near:
            return None
        home = [other for other in groups if other >> rng.choice(near) & 1]
        return joined(prices, groups, group | rng.choice(home)) if home else None
    rest = [other for other in groups if other != group]
    if kind < 0.55:
        ahead = group & (relations.before[op] | 1 << op)
        parts = [ahead, group & ~ahead]
    elif kind < 0.75:
        near = list(bits(relations.beside[op] & group))
        part = relations.hull(1 << op | (1 << rng.choice(near) if near else 0)) & group
        parts = [part, group & ~part]
    elif kind < 0.9:
        near = [other for other in rest if relations.touching[op] & other]
        if not near:
            return None
        other = rng.choice(near)
        rest.remove(other)
        parts = [group & ~(1 << op), other | 1 << op]
    else:
        parts = _copied(prices, rest, group, op)
    return _checked(prices, rest, parts)


def _copied(prices: Prices, rest: list[int], group: int, op: int) -> list[int]:
    """Compute an operation again in every group that reads it, or only once if it is copied."""
    readers = prices.relations.readers[op]
    if not readers & ~group and group.bit_count() == 1:
        return [group]
    parts = [group & ~(1 << op)] if readers & ~group else [group]
    for other in list(rest):
        if other & readers and not other >> op & 1:
            rest.remove(other)
            parts.append(other | 1 << op)
        elif other == 1 << op:
            rest.remove(other)
    return parts


def _checked(prices: Prices, rest: list[int], parts: list[int]) -> Partition | None:
    """Return the groups with the joined pieces of some parts, or None when no order runs them."""
    pieces = [piece for part in parts for piece in prices.relations.components(part)]
    found = tuple(dict.fromkeys([*rest, *pieces]))
    ordered = prices.relations.order(found)
    if ordered is None or not prices.relations.covers(ordered):
        return None
    return found


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
