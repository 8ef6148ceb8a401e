"""Checks of chapter 22: a crossover, rounds of a reduce-scatter, chunks of a chain, two levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ascend_lab.cluster import Round, Schedule, execute
from ascend_lab.errors import ClusterError
from ascend_lab.lab.checks import core as ex


def crossover_bytes(ranks: int, alpha_s: float, beta_s_per_byte: float) -> float:
    """Return n where 2 (p-1) a + 2 (p-1)/p n b = lg p (a + n b), infinity if there is none."""
    steps = math.log2(ranks)
    saved = (steps - 2 * (ranks - 1) / ranks) * beta_s_per_byte
    return (2 * (ranks - 1) - steps) * alpha_s / saved if saved > 0 else math.inf


def check_ex_22_2(fn: Any, *, seed: int = ex.DEFAULT_SEED) -> ex.CheckResult:
    """Check `fn(ranks)`: rounds of a reduce-scatter, lists of (source, target, block).

    Right values, ranks - 1 rounds, and one block sent and received by each rank in each round.
    """

    def draw(rng: np.random.Generator) -> ex.Case:
        return {"ranks": int(rng.integers(2, 12))}

    def judge(got: Any, case: ex.Case) -> str | None:
        return _judge_rounds(got, int(case["ranks"]), np.random.default_rng(seed))

    return ex.check_property("ex_22_2", fn, judge, draw, edge_cases=[{"ranks": 2}], seed=seed)


def _judge_rounds(got: Any, ranks: int, rng: np.random.Generator) -> str | None:
    try:
        steps = [[tuple(map(int, message)) for message in step] for step in got]
        if len(steps) == ranks - 1:
            rounds = tuple(_round(step) for step in steps)
    except (TypeError, ValueError):
        return "expected a list of rounds, each a list of (source, target, block)"
    if len(steps) != ranks - 1:
        return f"expected {ranks - 1} rounds, not {len(steps)}"
    for number, step in enumerate(steps):
        if any(sorted(m[i] for m in step) != list(range(ranks)) for i in (0, 1)):
            return f"expected every rank to send one block and receive one in round {number}"
        if any(not 0 <= block < ranks for _, _, block in step):
            return f"expected blocks 0 to {ranks - 1}"
    arrays = [rng.integers(-9, 10, 3 * ranks) for _ in range(ranks)]
    try:
        found = execute(Schedule("reduce_scatter", "yours", ranks, ranks, rounds), arrays)
    except ClusterError as error:
        return f"which fails: {error}"
    wanted = np.sum(arrays, axis=0).reshape(ranks, 3)
    for rank, (one, two) in enumerate(zip(found, wanted, strict=True)):
        if not np.array_equal(one, two):
            return f"with which rank {rank} ends with {ex.show(one)}, expected {ex.show(two)}"
    return None


def _round(step: Sequence[Sequence[int]]) -> Round:
    sources, targets, blocks = zip(*step, strict=True)
    return Round.of(sources, targets, [[b] for b in blocks], True)


def chain_s(
    chunks: int, ranks: int, size_bytes: float, alpha_s: float, beta_s_per_byte: float
) -> float:
    """Return the seconds of a broadcast along a chain."""
    return (ranks - 2 + chunks) * (alpha_s + size_bytes * beta_s_per_byte / chunks)


def best_chunks(ranks: int, size_bytes: float, alpha_s: float, beta_s_per_byte: float) -> int:
    """Return the count of chunks of the least time, by search: the time falls, then rises."""
    given = ranks, size_bytes, alpha_s, beta_s_per_byte
    guess = math.sqrt(max(ranks - 2, 0) * size_bytes * beta_s_per_byte / alpha_s)
    near = range(max(1, int(guess) - 2), int(guess) + 4)
    return min(near, key=lambda k: chain_s(k, *given))


def two_levels_s(
    servers: int,
    each: int,
    size_bytes: float,
    inner: tuple[float, float],
    outer: tuple[float, float],
) -> float:
    """Return reduce-scatter inside + all-reduce of a share between servers + all-gather inside."""
    inside = 2 * (each - 1) * (inner[0] + size_bytes / each * inner[1])
    between = 2 * (servers - 1) * (outer[0] + size_bytes / each / servers * outer[1])
    return inside + between


@ex.against(
    crossover_bytes,
    edges=ex.rows("ranks alpha_s beta_s_per_byte", (2, 1e-6, 1e-10), (4, 1e-6, 1e-10)),
    rel_tol=1e-9,
)
def check_ex_22_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(ranks, alpha_s, beta_s_per_byte)`: bytes above which the ring is faster.

    Against recursive doubling, for powers of two; infinite where that always wins.
    """
    return {
        "ranks": 2 ** int(rng.integers(1, 9)),
        "alpha_s": float(rng.uniform(1e-6, 1e-4)),
        "beta_s_per_byte": float(rng.uniform(1e-11, 1e-9)),
    }


def _judge_22_3(got: Any, case: ex.Case) -> str | None:
    if not isinstance(got, int | np.integer) or got < 1:
        return "expected a whole number (int) of at least 1"
    best = best_chunks(**case)
    least, time = chain_s(best, **case), chain_s(int(got), **case)
    if time > least * (1 + 1e-9):
        return f"which takes {1e6 * time:.4f} µs, expected {best} with {1e6 * least:.4f}"
    return None


@ex.judged(
    _judge_22_3,
    edges=ex.rows(
        "ranks size_bytes alpha_s beta_s_per_byte", (2, 2**20, 1e-6, 1e-10), (9, 8, 1e-6, 1e-10)
    ),
)
def check_ex_22_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(ranks, size_bytes, alpha_s, beta_s_per_byte)`: chunks of the fastest chain.

    A broadcast along a chain of p ranks in k chunks takes (p - 2 + k) (a + n b / k). Any count
    whose time is the least passes.
    """
    return {
        "ranks": int(rng.integers(2, 40)),
        "size_bytes": int(2 ** rng.uniform(8, 28)),
        "alpha_s": float(rng.uniform(1e-6, 2e-5)),
        "beta_s_per_byte": float(rng.uniform(1e-11, 1e-9)),
    }


EDGE_4 = {"size_bytes": 2**20, "inner": (1e-6, 1e-11), "outer": (1e-5, 1e-10)}


@ex.against(
    two_levels_s,
    edges=[{"servers": 1, "each": 8, **EDGE_4}, {"servers": 16, "each": 1, **EDGE_4}],
    rel_tol=1e-9,
)
def check_ex_22_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(servers, each, size_bytes, inner, outer)`: seconds of a two-level all-reduce.

    `inner` and `outer` are (alpha_s, beta_s_per_byte); rings at both levels, one rail for each
    device of a server.
    """
    pairs = rng.uniform((1e-6, 1e-11), (2e-5, 1e-9), (2, 2))
    return {
        "servers": int(rng.integers(1, 65)),
        "each": int(rng.integers(1, 17)),
        "size_bytes": int(2 ** rng.uniform(10, 30)),
        "inner": tuple(map(float, pairs[0])),
        "outer": tuple(map(float, pairs[1])),
    }
