"""Checks of chapter 16: merged states, loop orders, causal blocks, attention in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import InputError
from ascend_lab.lab.checks import core as ex

Values = NDArray[np.float64]
State = tuple[float, float, Values]
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


class KeyBlocks:
    """Blocks (k, v) that pass once: when the next one comes, the memory of the last is reused."""

    def __init__(self, blocks: list[tuple[Values, Values]]) -> None:
        """Keep the blocks; copies are handed out."""
        self._blocks, self._passed = blocks, False

    def __iter__(self) -> Iterator[tuple[Values, Values]]:
        """Yield copies, each filled with NaN when the next one is asked for."""
        if self._passed:
            raise InputError("one pass over the blocks", "a second", "keep a state instead")
        self._passed = True
        for block in self._blocks:
            k, v = (x.copy() for x in block)
            yield k, v
            k.fill(math.nan)
            v.fill(math.nan)

    def __repr__(self) -> str:
        """Return the number of keys in each block."""
        return f"blocks of {', '.join(str(len(k)) for k, _ in self._blocks)} keys"

    def whole(self) -> tuple[Values, Values]:
        """Return all keys and all values."""
        ks, vs = zip(*self._blocks, strict=True)
        return np.concatenate(ks), np.concatenate(vs)


def check_ex_16_4(fn: Any, *, seed: int = ex.DEFAULT_SEED) -> ex.CheckResult:
    """Check `fn(q, blocks)`: softmax(q k^T / sqrt(d)) v with k and v in blocks that pass once."""

    def draw(rng: np.random.Generator) -> ex.Case:
        counts = rng.integers(1, 9, int(rng.integers(1, 6)))
        n, d, e = (int(x) for x in rng.integers(1, 7, 3))
        spread = float(rng.choice([1.0, 30.0]))
        return _stream(rng, n, d, e, [int(c) for c in counts], spread)

    rng = np.random.default_rng(16)
    edges = [_stream(rng, 1, 1, 1, [1], 1.0), _stream(rng, 3, 4, 2, [4, 4, 1], 1.0)]
    edges.append(_stream(rng, 3, 4, 2, [2, 2, 2], 60.0))
    return ex.check_property("ex_16_4", fn, _judge_stream, draw, edge_cases=edges, seed=seed)


def _stream(
    rng: np.random.Generator, n: int, d: int, e: int, counts: list[int], spread: float
) -> ex.Case:
    blocks = [(rng.normal(0, spread, (c, d)), rng.normal(0, 1, (c, e))) for c in counts]
    return {"q": rng.normal(0, spread, (n, d)), "blocks": KeyBlocks(blocks)}


def _judge_stream(got: Any, case: ex.Case) -> str | None:
    q, (k, v) = case["q"], case["blocks"].whole()
    scores = q @ k.T / math.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    right = weights / weights.sum(axis=1, keepdims=True) @ v
    if not isinstance(got, np.ndarray) or got.shape != right.shape:
        return f"expected an array of shape {right.shape}"
    if np.isnan(got).any():
        return "expected no NaN: did e^s overflow, or did you look at a block that has gone by?"
    wrong = float(np.abs(got - right).max())
    return None if wrong <= 1e-9 else f"expected softmax(q k^T / sqrt(d)) v, off by {wrong:.3g}"


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
    n, t, d = (int(rng.integers(1, m)) for m in (5000, 5000, 257))
    return {"n": n, "t": t, "d": d, "keys": int(rng.integers(1, 600))}


@ex.against(
    causal_blocks,
    edges=ex.rows("n rows keys", (8, 2, 2), (100, 100, 7), (100, 7, 100), (33, 16, 16)),
)
def check_ex_16_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(n, rows, keys)`: blocks with a score whose key is not behind its query."""
    return {
        "n": int(rng.integers(1, 300)),
        "rows": int(rng.integers(1, 100)),
        "keys": int(rng.integers(1, 100)),
    }
