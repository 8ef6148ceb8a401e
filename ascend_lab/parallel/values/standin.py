"""Temporary ring collectives."""

from __future__ import annotations

from ascend_lab.cluster import Round, Schedule


def make(op: str, algorithm: str, ranks: int) -> Schedule:
    """Return a ring schedule."""
    p = ranks
    every = range(p)
    right = [(r + 1) % p for r in every]
    if op == "all_to_all":
        rounds = tuple(
            Round.of(
                list(every), [(r + k) % p for r in every], [[r * p + (r + k) % p] for r in every]
            )
            for k in range(1, p)
        )
        return Schedule(op, algorithm, p, p * p, rounds)
    if op == "broadcast":
        return Schedule(
            op, algorithm, p, 1, tuple(Round.of([k], [k + 1], [[0]]) for k in range(p - 1))
        )
    scatter = tuple(
        Round.of(list(every), right, [[(r - k - 1) % p] for r in every], True) for k in range(p - 1)
    )
    gather = tuple(
        Round.of(list(every), right, [[(r - k) % p] for r in every]) for k in range(p - 1)
    )
    chosen = {"all_reduce": scatter + gather, "reduce_scatter": scatter, "all_gather": gather}[op]
    return Schedule(op, algorithm, p, p, chosen)
