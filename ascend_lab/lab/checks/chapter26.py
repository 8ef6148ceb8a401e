"""Checks of chapter 26: waits, the batcher's decision, devices, who stays, a whole server."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ascend_lab.lab.checks import core as ex
from ascend_lab.serving import Arrivals, Policy, Scenario, Service, Step, simulate_serving

CLOSE = 1e-9


def waits(gaps: Sequence[float], services: Sequence[float]) -> list[float]:
    """Return how long each request waits: W' = max(W + S - gap, 0), the first not at all."""
    found = [0.0]
    for gap, service in zip(gaps, services, strict=False):
        found.append(max(found[-1] + service - gap, 0.0))
    return found


def decide(ages: Sequence[float], max_batch: int, delay: float) -> int:
    """Return how many of the waiting requests to send now, the oldest first; 0: wait."""
    full = len(ages) >= max_batch
    return min(len(ages), max_batch) if full or (ages and ages[0] >= delay) else 0


def devices_for(rate: float, a: float, t0: float, most: int, target: float) -> int:
    """Return the devices whose full batches bear a rate at a share of their capacity."""
    return math.ceil(rate * (a * most + t0) / most / target - 1e-9)


def who_stays(lengths: Sequence[int], block: int, blocks: int) -> int:
    """Return how many, first come first, can all get one more token within the blocks."""
    total = 0
    for kept, length in enumerate(lengths):
        total += -(-(length + 1) // block)
        if total > blocks:
            return kept
    return len(lengths)


def finishes(
    times: Sequence[float], t0: float, a: float, most: int, delay: float
) -> list[float]:  # fmt: skip
    """Return when each request is answered by one instance with a dynamic batcher."""
    step = Step("model", Service("deterministic", t0, a), Policy(1, most, delay))
    scenario = Scenario(Arrivals(times_s=tuple(times)), (step,), len(times))
    found: list[float] = simulate_serving(scenario).finish_s.tolist()
    return found


def _floats(rng: ex.Rng, mean: float, count: int) -> list[float]:
    return [float(x) for x in rng.exponential(mean, count)]


@ex.against(waits, edges=ex.rows("gaps services", ([], [1.0]), ([1.0], [3.0, 1.0])), rel_tol=CLOSE)
def check_ex_26_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(gaps, services)`: how long each request waits for a single server."""
    count = int(rng.integers(1, 12))
    return {"gaps": _floats(rng, 1.0, count - 1), "services": _floats(rng, 0.9, count)}


@ex.against(
    decide,
    edges=ex.rows(
        "ages max_batch delay", ([], 4, 0.0), ([0.0], 4, 0.0), ([0.0], 1, 5.0),
        ([5.0, 1.0], 4, 5.0), ([4.0, 1.0], 4, 5.0), ([9.0, 8.0, 7.0], 2, 5.0),
    ),
)  # fmt: skip
def check_ex_26_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(ages, max_batch, delay)`: how many requests a free instance takes now."""
    ages = sorted(_floats(rng, 2.0, int(rng.integers(0, 9))), reverse=True)
    delay = float(rng.choice([0.0, 1.0, 3.0]))
    return {"ages": ages, "max_batch": int(rng.integers(1, 9)), "delay": delay}


@ex.against(devices_for, edges=ex.rows("rate a t0 most target", (1000.0, 0.001, 0.001, 1, 1.0)))
def check_ex_26_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(rate, a, t0, most, target)`: devices for a rate, at a share of their capacity."""
    return {
        "rate": float(rng.uniform(100, 9000)), "a": float(rng.uniform(1e-4, 2e-3)),
        "t0": float(rng.uniform(1e-4, 5e-3)), "most": int(rng.integers(1, 33)),
        "target": float(rng.uniform(0.5, 0.95)),
    }  # fmt: skip


@ex.against(
    who_stays,
    edges=ex.rows(
        "lengths block blocks", ([], 4, 2), ([4, 4], 4, 3), ([3, 4], 4, 3), ([7, 1, 1], 4, 2),
    ),
)  # fmt: skip
def check_ex_26_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(lengths, block, blocks)`: how many sequences, in order, get another token."""
    lengths = [int(n) for n in rng.integers(1, 40, int(rng.integers(1, 9)))]
    return {
        "lengths": lengths,
        "block": int(rng.integers(1, 9)),
        "blocks": int(rng.integers(8, 40)),
    }


def _judge_26_5(got: Any, case: ex.Case) -> str | None:
    expected = finishes(*case.values())
    try:
        found = np.array(got, float)
    except (TypeError, ValueError):
        return "expected a time for each request"
    if found.shape != (len(expected),):
        return f"expected {len(expected)} times"
    wrong = np.flatnonzero(~np.isclose(found, expected, rtol=1e-9, atol=1e-9))
    if len(wrong):
        n = int(wrong[0])
        return f"whose request {n} ends at {found[n]:.4f}, expected {expected[n]:.4f}"
    return None


_TIMES = [0.0, 0.1, 0.2, 3.0, 3.1, 9.0]


@ex.judged(
    _judge_26_5,
    edges=ex.rows("times t0 a most delay", (_TIMES, 1.0, 0.1, 2, 0.0), (_TIMES, 1.0, 0.1, 4, 0.5),
                  (_TIMES, 4.0, 0.0, 2, 0.15), ([1.0], 1.0, 0.1, 4, 2.0)),
)  # fmt: skip
def check_ex_26_5(rng: ex.Rng) -> ex.Case:
    """Check `fn(times, t0, a, most, delay)`: when a batching server answers each request."""
    times = np.cumsum(rng.exponential(0.5, int(rng.integers(1, 30))))
    return {
        "times": [float(t) for t in times], "t0": float(rng.uniform(0.1, 1.5)),
        "a": float(rng.uniform(0, 0.4)), "most": int(rng.integers(1, 6)),
        "delay": float(rng.choice([0.0, 0.2, 1.0])),
    }  # fmt: skip
