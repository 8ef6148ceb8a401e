"""Formulas of queueing theory for a server, and two small Markov chains, to check the simulator.

The letters are those of the textbooks: l is the arrival rate, mu = 1/S the rate of one server with
mean service time S, a = l S the offered load, r the utilisation. W is the mean time from arrival to
answer, Wq its part in the queue. L and Lq are the mean numbers of requests there: L = l W (Little's
law).

Formulas without a source are from Kleinrock, Queueing Systems I, 1975.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.errors import InputError


@dataclass(frozen=True, slots=True)
class Queue:
    """Means in equilibrium: times in seconds, numbers of requests, and the share of lost ones."""

    Wq: float
    W: float
    Lq: float
    L: float
    utilisation: float
    blocked: float = 0.0
    mean_batch: float = 1.0


def _queue(rate: float, wq: float, w: float, busy: float, **other_means: float) -> Queue:
    """Return the means of a queue from its two times; the numbers follow by Little's law."""
    return Queue(wq, w, rate * wq, rate * w, busy, **other_means)


def _check_stable(utilisation: float) -> None:
    """Raise `InputError` unless the utilisation is above 0 and below 1."""
    if not 0 < utilisation < 1:
        got = f"a load of {utilisation:.4g}"
        raise InputError("more capacity than work, and some work", got, "lower the rate")


def mg1(rate: float, mean_s: float, cv2: float = 1.0) -> Queue:
    """Return M/G/1: Wq = l E[S^2] / (2 (1 - r)); cv2 of S is 1 for M/M/1 and 0 for M/D/1."""
    # E[S^2] = (1 + cv2) S^2; with l = 0.8 and S = 1: Wq = 4 for M/M/1, 2 for M/D/1
    r = rate * mean_s
    _check_stable(r)
    wq = rate * mean_s**2 * (1 + cv2) / (2 * (1 - r))
    return _queue(rate, wq, wq + mean_s, r)


def erlang_b(load: float, servers: int) -> float:
    """Return the share of lost requests if none can wait, for a load in erlang (Erlang B)."""
    # The recursion over servers avoids the large numbers a^c / c! of the formula.
    loss_share = 1.0
    for n in range(1, servers + 1):
        loss_share = load * loss_share / (n + load * loss_share)
    return loss_share


def mmc(rate: float, mean_s: float, servers: int) -> Queue:
    """Return M/M/c: Wq = P(wait) S / (c - a) with a = l S, P(wait) after Erlang C."""
    load = rate * mean_s
    _check_stable(load / servers)
    # Erlang C follows from Erlang B without factorials.
    loss_share = erlang_b(load, servers)
    wait_probability = loss_share / (1 - load / servers * (1 - loss_share))
    wq = wait_probability * mean_s / (servers - load)
    return _queue(rate, wq, wq + mean_s, load / servers)


def mm1k(rate: float, mean_s: float, places: int) -> Queue:
    """Return M/M/1 for at most `places` requests, including the one in service.

    Times are means over accepted requests. The `queue_limit` of a policy counts waiting requests:
    it is places - 1.
    """
    # p_n is proportional to r^n for n = 0 .. places, also for r >= 1.
    weights = (rate * mean_s) ** np.arange(places + 1)
    p = weights / weights.sum()
    accepted_rate = rate * float(1 - p[-1])
    w = float(p @ np.arange(places + 1)) / accepted_rate
    return _queue(accepted_rate, w - mean_s, w, accepted_rate * mean_s, blocked=float(p[-1]))


def priorities(rates: Sequence[float], mean_s: float, cv2: float = 1.0) -> list[float]:
    """Return Wq of each level without preemption, highest priority first (Cobham, 1954)."""
    _check_stable(sum(rates) * mean_s)
    # An arrival waits for the residual time of the present service, on average l E[S^2] / 2.
    residual_s = sum(rates) * mean_s**2 * (1 + cv2) / 2
    sums = [sum(rates[:n]) * mean_s for n in range(len(rates) + 1)]
    return [residual_s / ((1 - sums[n]) * (1 - sums[n + 1])) for n in range(len(rates))]


def shared(rate: float, mean_s: float, work_s: float) -> float:
    """Return W of a request with service time x = `work_s` under processor sharing: x / (1 - r)."""
    _check_stable(rate * mean_s)
    return work_s / (1 - rate * mean_s)


def batch_root(rate: float, mean_s: float, max_batch: int) -> float:
    """Return the root r in (0, 1) of mu r^(K+1) - (l + mu) r + l = 0, with K = `max_batch`."""
    _check_stable(rate * mean_s / max_batch)
    mu = 1 / mean_s
    low = 0.0
    high = 1 - 1e-12
    # Bisection: 1 is a root, too, and the expression is positive below the smaller root.
    for _ in range(200):
        r = (low + high) / 2
        value = mu * r ** (max_batch + 1) - (rate + mu) * r + rate
        if value > 0:
            low = r
        else:
            high = r
    return low


def batches(rate: float, mean_s: float, max_batch: int) -> Queue:
    """Return a server with exponential batch times, whose mean does not depend on the size.

    A free server takes all waiting requests, at most K; later arrivals wait. This is a dynamic
    batcher without delay. With the root r of `batch_root`:

        Lq = (1 - idle) r / (1 - r)        idle = mu (1 - r) / (l + mu (1 - r))
    """
    r = batch_root(rate, mean_s, max_batch)
    mu = 1 / mean_s
    idle = mu * (1 - r) / (rate + mu * (1 - r))
    wq = (1 - idle) * r / (1 - r) / rate
    return _queue(rate, wq, wq + mean_s, 1 - idle, mean_batch=rate * mean_s / (1 - idle))


def growing_batches(
    rate: float, per_item_s: float, mean_s: float, max_batch: int, waiting: int = 300
) -> Queue:
    """Return a server with exponential batch times of mean `per_item_s * b + mean_s`.

    As in `Service`, `mean_s` is the part of a batch's time that does not depend on its size b. A
    free server takes all waiting requests, at most `max_batch`. The means are computed from the
    Markov chain (batch size, number waiting), cut off at `waiting` requests.
    """
    tau = per_item_s * np.arange(max_batch + 1) + mean_s
    _check_stable(rate * float(tau[max_batch]) / max_batch)
    states = [(0, 0), *((b, n) for b in range(1, max_batch + 1) for n in range(waiting))]
    state_index = {state: k for k, state in enumerate(states)}
    flow = np.zeros((len(states), len(states)))
    for (b, n), k in state_index.items():
        # An arrival waits, or is a batch of 1 if the server is idle (b = 0).
        state_with_arrival = (b, min(n + 1, waiting - 1)) if b else (1, 0)
        flow[k, state_index[state_with_arrival]] += rate
        # A batch ends: the next one takes at most `max_batch` waiting requests.
        if b:
            state_of_next_batch = (min(n, max_batch), max(n - max_batch, 0))
            flow[k, state_index[state_of_next_batch]] += 1 / tau[b]
    p = _equilibrium(flow)
    batch, waiting_counts = np.array(states).T
    lq = float(p @ waiting_counts)
    mean_in_service = float(p @ batch)
    batch_end_rates = np.where(batch > 0, p / tau[batch], 0.0)
    busy = float(p[batch > 0].sum())
    mean_batch = float(batch_end_rates @ batch / batch_end_rates.sum())
    return _queue(rate, lq / rate, (lq + mean_in_service) / rate, busy, mean_batch=mean_batch)


def _equilibrium(flow: np.ndarray) -> np.ndarray:
    """Return the share of time that a Markov chain spends in each state, from its rates."""
    # One equation of p Q = 0 is redundant; sum(p) = 1 takes its place.
    balance = (flow - np.diag(flow.sum(1))).T
    balance[-1] = 1.0
    return np.linalg.solve(balance, np.eye(len(flow))[-1])


def take_all(rate: float, per_item_s: float, mean_s: float, max_batch: int = 800) -> Queue:
    """Return a server whose batches of b take exactly `per_item_s * b + mean_s` (Inoue, 2021).

    A batch takes all waiting requests: those that came during the previous batch, or 1 if none
    came. The batch sizes B are a Markov chain, cut off at `max_batch`. Here a is the time per item,
    `per_item_s`, not the offered load, and t0 is the fixed part, `mean_s`:

        W = a + t0 + (1 + 2 l a)(E[B^2] - E[B]) / (2 l E[B])

    Source: Performance Evaluation 147; arXiv 1912.06322.
    """
    a = per_item_s
    t0 = mean_s
    la = rate * per_item_s
    if not la < 1:
        raise InputError("rate * per_item_s below 1", f"{la:.4g}", "lower the rate")
    b = np.arange(1, max_batch + 1)
    arrivals = np.arange(max_batch + 1)
    expected_arrivals = rate * (a * b + t0)
    # Poisson probabilities x^n e^-x / n! of n arrivals where x are expected, by logarithms, as 800!
    # exceeds floating point.
    logs = np.concatenate(([0.0], np.cumsum(np.log(b))))
    probabilities = np.exp(
        arrivals * np.log(expected_arrivals)[:, None] - expected_arrivals[:, None] - logs
    )
    no_arrival = probabilities[:, 0].copy()
    # Without an arrival the next batch has one request, too: both probabilities are added.
    probabilities = probabilities[:, 1:]
    probabilities[:, 0] += no_arrival
    p = _equilibrium(probabilities)
    mean_batch = float(p @ b)
    mean_square = float(p @ b**2)
    w = a + t0 + (1 + 2 * la) * (mean_square - mean_batch) / (2 * rate * mean_batch)
    work_s = a * mean_batch + t0
    busy = work_s / (work_s + float(p @ no_arrival) / rate)
    return _queue(rate, w - work_s, w, busy, mean_batch=mean_batch)
