"""Synchronous and asynchronous training: who waits, and gradients of weights that are out of date.

Asynchronous workers take the weights from a server, compute a gradient and give it back; the
server applies each at once. In the meantime others have changed the weights: the number of changes
is the staleness of the gradient. Dean et al., "Large scale distributed deep networks", 2012.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ascend_lab.errors import ClusterError
from ascend_lab.parallel.values.group import Values, part
from ascend_lab.parallel.values.layers import Batch, Model
from ascend_lab.parallel.values.training import loss_and_gradients


@dataclass(frozen=True, slots=True)
class AsyncRun:
    """Of each update: its batch's loss, its staleness, and when it was applied."""

    losses: tuple[float, ...]
    staleness: tuple[int, ...]
    ends_s: tuple[float, ...]
    parameters: dict[str, Values]


def train_asynchronous(
    model: Model, batches: Sequence[Batch], lr: float, times_s: Sequence[float]
) -> AsyncRun:
    """Apply one gradient step a batch; worker i takes `times_s[i]` for a gradient.

    Batches are handed out in the order in which workers ask. Raises `ClusterError` for times that
    are not positive.
    """
    if not times_s or min(times_s) <= 0:
        raise ClusterError("a positive time for each worker", str(times_s), "give seconds")
    weights, version = model.weights, 0
    asked = 0
    rows: list[tuple[float, int, float]] = []
    at_work: list[tuple[float, int, int, Batch, dict[str, Values]]] = []

    def ask(now_s: float, worker: int) -> None:
        nonlocal asked
        if asked < len(batches):
            job = (now_s + times_s[worker], worker, version, batches[asked], weights)
            heapq.heappush(at_work, job)
            asked += 1

    for worker in range(len(times_s)):
        ask(0.0, worker)
    while at_work:
        now_s, worker, taken, batch, old = heapq.heappop(at_work)
        loss, grads = loss_and_gradients(model, old, batch)
        weights = {key: weight - lr * grads[key] for key, weight in weights.items()}
        rows.append((loss, version - taken, now_s))
        version += 1
        ask(now_s, worker)
    losses, staleness, ends_s = zip(*rows, strict=True)
    return AsyncRun(losses, staleness, ends_s, weights)


def train_synchronous(
    model: Model, batches: Sequence[Batch], lr: float, times_s: Sequence[Sequence[float]]
) -> AsyncRun:
    """Apply one step a batch, when all workers have given the gradient of their part.

    `times_s[step][worker]`; gradients are added in the order in which they arrive. However slow a
    worker is, the weights are those of data parallel training: a straggler costs time alone.
    """
    weights, losses = model.weights, []
    for batch, row in zip(batches, times_s, strict=True):
        arrived = [int(worker) for worker in np.argsort(row, kind="stable")]
        total, mean = {key: np.zeros_like(w) for key, w in weights.items()}, 0.0
        for worker in arrived:
            inputs = part(batch.inputs, len(row), worker, 0, "a batch")
            targets = part(batch.targets, len(row), worker, 0, "a batch")
            loss, grads = loss_and_gradients(model, weights, Batch(inputs, targets))
            mean += loss / len(row)
            total = {key: total[key] + grads[key] / len(row) for key in total}
        weights = {key: weight - lr * total[key] for key, weight in weights.items()}
        losses.append(mean)
    ends_s = tuple(accumulate(max(row) for row in times_s))
    return AsyncRun(tuple(losses), (0,) * len(losses), ends_s, weights)


def delayed_descent(rate: float, staleness: int, steps: int, start: float = 1.0) -> Values:
    """Return w_0 ... w_steps of w_{t+1} = w_t - rate w_{t-staleness} (w = start before t = 0).

    This is gradient descent on curvature/2 w^2 with rate = step size x curvature.
    """
    found = np.full(staleness + steps + 1, start)
    for t in range(staleness, staleness + steps):
        found[t + 1] = found[t] - rate * found[t - staleness]
    return found[staleness:]


def stable_rate(staleness: int) -> float:
    """Return the rate below which `delayed_descent` converges: 2 sin(pi / (2 (2 tau + 1))).

    At the limit z = e^(i x) solves z^(tau+1) - z^tau + rate = 0: the sizes give rate = 2 sin(x/2),
    the angles (tau + 1/2) x = pi/2. Fresh gradients: 2; one step old: 1; then about pi / (2 tau).
    """
    return 2.0 * math.sin(math.pi / (2 * (2 * staleness + 1)))
