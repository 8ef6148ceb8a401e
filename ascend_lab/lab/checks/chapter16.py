"""Checks of chapter 16: merged states, loop orders, causal blocks, a flash kernel."""

import math
import tracemalloc
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.lab.checks import core as ex

Array = NDArray[np.float64]
State = tuple[float, float, Array]
"""Maximum m, sum l of e^(s - m), and sum o of e^(s - m) v."""


def _state(rng: np.random.Generator, count: int, spread: float) -> State:
    scores, values = rng.normal(0, spread, count), rng.normal(0, 1, (count, 3))
    weights = np.exp(scores - scores.max())
    return float(scores.max()), float(weights.sum()), weights @ values


def merge(a: State, b: State) -> State:
    """Return the state of two blocks together: both brought to the larger maximum, and added."""
    m = max(a[0], b[0])
    if m == -math.inf:
        return a
    f, g = math.exp(a[0] - m), math.exp(b[0] - m)
    return m, f * a[1] + g * b[1], f * a[2] + g * b[2]


def keys_outside(n: int, t: int, d: int, keys: int) -> int:
    """Return the bytes of the loop order with keys outside."""
    blocks = -(-t // keys)
    state = 4 * n * (d + 2)
    return 2 * (2 * t * d) + blocks * 2 * n * d + 2 * (blocks - 1) * state + 2 * n * d


def causal_blocks(n: int, rows: int, keys: int) -> int:
    """Count the blocks with a score to compute, by looking at every one."""
    kept = np.tri(n, dtype=bool)
    return sum(
        bool(kept[i : i + rows, j : j + keys].any())
        for i in range(0, n, rows)
        for j in range(0, n, keys)
    )


def _on_core(fn: Any) -> Any:
    """Return the answer with rows that are loaded and stored, and all it allocates traced."""

    def run(q: Array, k: Array, v: Array, room: int) -> tuple[Array, int, int]:
        given, (n, d), moved = {"q": q, "k": k, "v": v}, q.shape, 0
        y = np.full((n, d), math.nan)

        def load(name: str, first: int, last: int) -> Array:
            nonlocal moved
            rows = given[name][first:last].copy()
            moved += rows.nbytes
            return rows

        def store(first: int, rows: Any) -> None:
            y[first : first + len(rows)] = rows

        tracemalloc.start()
        try:
            fn(load, store, n, len(k), d, room)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        return y, moved, peak

    return run


def _judge_16_4(got: Any, case: ex.Case) -> str | None:
    (y, moved, peak), (q, k, v, room) = got, case.values()
    (n, d), t = q.shape, len(k)
    scores = q @ k.T / math.sqrt(d)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    wrong = float(np.abs(y - weights / weights.sum(axis=1, keepdims=True) @ v).max())
    if not wrong <= 1e-9:
        stored = "rows that were never stored, or no numbers" if np.isnan(wrong) else f"{wrong:.3g}"
        return f"and what was stored is off: {stored}"
    if peak > room + SLACK_BYTES:
        return f"with {peak:,} bytes at a time, where the core has {room:,}"
    rows = (room // 8 - 32 * d) // (4 * d + 64)
    ours = 8 * (n * d + -(-n // rows) * 2 * t * d)
    return None if moved <= 1.2 * ours else f"after {moved:,} bytes loaded; ours loads {ours:,}"


def _heads(rng: np.random.Generator, n: int, t: int, d: int, rows: int, spread: float) -> ex.Case:
    q, k = (rng.normal(0, spread, (count, d)) for count in (n, t))
    room = 8 * (32 * d + rows * (4 * d + 64))
    return {"q": q, "k": k, "v": rng.normal(0, 1, (t, d)), "room": room}


EMPTY_1 = (-math.inf, 0.0, np.zeros(3))
SOME_1 = _state(np.random.default_rng(1), 4, 2.0)


@ex.against(
    merge,
    edges=[{"a": a, "b": b} for a, b in ((SOME_1, EMPTY_1), (EMPTY_1, SOME_1), (EMPTY_1, EMPTY_1))],
    rel_tol=1e-9,
)
def check_ex_16_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(a, b)`: the state (m, l, o) of two blocks of scores from the states of each.

    The state of no scores at all is (-inf, 0, 0).
    """
    spread = float(rng.choice([1.0, 400.0]))
    return {name: _state(rng, int(rng.integers(1, 9)), spread) for name in "ab"}


@ex.against(keys_outside, edges=ex.rows("n t d keys", (4096, 4096, 64, 128), (64, 100, 16, 128)))
def check_ex_16_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(n, t, d, keys)`: bytes of the order with the loop over blocks of keys outside.

    k and v (t, d) are read once. For each block of `keys` all of q (n, d) is read, and of all n
    rows o (d numbers), m and l in fp32 are read and written; the first block reads no state, the
    last writes the result in fp16 instead of a state. q, k, v are fp16.
    """
    rows = range(1, 5000)
    return ex.drawn(rng, n=rows, t=rows, d=range(1, 257), keys=range(1, 600))


@ex.against(
    causal_blocks,
    edges=ex.rows("n rows keys", (8, 2, 2), (100, 100, 7), (100, 7, 100), (33, 16, 16)),
)
def check_ex_16_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(n, rows, keys)`: blocks with a score whose key is not behind its query."""
    return ex.drawn(rng, n=range(1, 300), rows=range(1, 100), keys=range(1, 100))


RNG_16_4 = np.random.default_rng(16)
SLACK_BYTES = 4096
"""Python's own objects."""


@ex.judged(
    _judge_16_4,
    edges=[
        _heads(RNG_16_4, 64, 64, 16, 16, 1.0),
        _heads(RNG_16_4, 100, 333, 32, 24, 1.0),
        _heads(RNG_16_4, 65, 50, 16, 32, 60.0),
    ],
    cases=12,
    wrap=_on_core,
)
def check_ex_16_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(load, store, n, t, d, room)`: attention within `room` bytes, and few loads."""
    n, t = (int(x) for x in rng.integers(80, 400, 2))
    rows, spread = int(rng.integers(16, 64)), float(rng.choice([1.0, 30.0]))
    return _heads(rng, n, t, int(rng.choice([8, 16, 32, 64])), rows, spread)
