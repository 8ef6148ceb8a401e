"""The best schedule of a small graph: every sequence of subgraphs, copies and residency too."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ascend_lab.aoe.contest.bound import compute_time
from ascend_lab.aoe.contest.partition import bits
from ascend_lab.aoe.contest.price import NOTHING, Kept, Prices

MOST_OPERATIONS = 8
SHARE = 0.5
"""The part of the budget after which the exact search gives up."""
Path = tuple[tuple[int, Kept], ...]
State = tuple[int, int, Kept]


def best_sequence(prices: Prices, known: float = float("inf")) -> Path | None:
    """Return the cheapest sequence of (group, retained tensors) below a known cost.

    A* over states (operations run, results in slow memory, resident tensors) with the compute of
    what has not run as the bound: the first complete state taken from the heap is optimal for the
    candidate tiles. The path is empty when nothing beats `known`, None when the budget ran out.
    """
    relations = prices.relations
    groups = [group for group in range(1, relations.everything + 1) if prices.legal(group)]
    compute = [compute_time(prices.problem, op) for op in range(len(relations.makers))]

    def least(mask: int) -> float:
        return sum(compute[op] for op in bits(mask))

    start: State = (0, 0, NOTHING)
    best = {start: 0.0}
    heap: list[tuple[float, int, State, Path]] = [(least(relations.everything), 0, start, ())]
    limit, number = known * (1 - 1e-9), 0
    while heap:
        _, _, state, path = heapq.heappop(heap)
        cost = best[state]
        if state[0] == relations.everything and not relations.results & ~state[1]:
            return path
        for group in groups:
            if prices.spent or prices.progress > SHARE:
                return None
            rest = least(relations.everything & ~(state[0] | group))
            if cost + least(group) + rest >= limit:
                continue
            for retain, after in _next(prices, group, state):
                total = cost + prices.price(group, state[2], retain)
                if total < best.get(after, float("inf")) and total + rest < limit:
                    best[after] = total
                    number += 1
                    heapq.heappush(heap, (total + rest, number, after, (*path, (group, retain))))
    return ()


def _next(prices: Prices, group: int, state: State) -> Iterator[tuple[Kept, State]]:
    """Yield what a group may retain and the state it leads to."""
    relations, problem = prices.relations, prices.problem
    done, stored, resident = state
    needs, leaves = relations.ends(group)
    held = 0
    for tensor in resident:
        held |= 1 << problem.producer[tensor]
    if needs & ~(stored | held) or not leaves & ~stored:
        return
    able = list(bits(leaves & ~relations.results))
    for choice in range(1 << len(able)):
        keep = [op for place, op in enumerate(able) if choice >> place & 1]
        retain = frozenset(t for op in keep for t in problem.operations[op].outputs)
        if sum(map(problem.size, retain)) < problem.capacity:
            mask = sum(1 << op for op in keep)
            yield retain, (done | group, stored | (leaves & ~mask), retain)
