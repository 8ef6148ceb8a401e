"""What every collective must compute, by NumPy alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.cluster import Schedule, Topology, execute
from ascend_lab.cluster.schedule import ALGORITHMS, LEVELS

Values = NDArray[Any]
CASES = [(op, name) for op, names in ALGORITHMS.items() for name in names]
FLAT = [(op, name) for op, name in CASES if name not in LEVELS]
LEVELLED = [(op, name) for op, name in CASES if name in LEVELS]


def slowed(topology: Topology, device: int, factor: float) -> Topology:
    """Return the topology with all links of one device `factor` times slower."""
    links = (
        replace(x, beta_s_per_byte=x.beta_s_per_byte * factor)
        if device in (x.source, x.target)
        else x
        for x in topology.links
    )
    return replace(topology, links=tuple(links))


RANKS = (*range(1, 9), 11, 16, 17)
"""Powers of two, one beside them, primes."""


def divisors(p: int) -> list[int]:
    return [d for d in range(1, p + 1) if p % d == 0]


def rows(p: int, each: int) -> list[list[int]]:
    return np.arange(p).reshape(-1, each).tolist()


def inputs(op: str, p: int, count: int, seed: int, kind: str = "int64") -> list[Values]:
    rng = np.random.default_rng(seed)
    size = count * p if op == "all_to_all" else count
    return [rng.integers(-99, 100, size).astype(kind) for _ in range(p)]


def check(schedule: Schedule, arrays: Sequence[Values], exact: bool = True) -> None:
    """Execute a schedule and compare every rank that matters with NumPy."""
    got = execute(schedule, arrays)
    p = schedule.ranks
    root = schedule.root
    total = np.sum(arrays, axis=0)
    wanted = {
        "all_reduce": lambda r: total,
        "all_gather": lambda r: np.concatenate(arrays),
        "broadcast": lambda r: arrays[root],
        "all_to_all": lambda r: np.concatenate([a.reshape(p, -1)[r] for a in arrays]),
    }
    compare = np.testing.assert_array_equal if exact else np.testing.assert_allclose
    if schedule.op == "reduce":
        compare(got[root], total)
    elif schedule.op == "reduce_scatter":
        compare(np.concatenate(got), total)
    else:
        for rank in range(p):
            compare(got[rank], wanted[schedule.op](rank))
