"""What queueing theory says of a server: formulas in closed form, and two small Markov chains.

They are oracles of the simulator, and rules of thumb. In the letters of the textbooks l is the
arrival rate, mu = 1/S the rate of one server whose mean service takes S, a = l S the offered load,
r the utilisation. W is the mean time from arrival to answer, Wq the part of it in the queue; L and
Lq are the mean numbers of requests there: L = l W (Little's law).

Textbook formulas (Kleinrock, Queueing Systems I, 1975) unless another source stands beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.errors import InputError


@dataclass(frozen=True, slots=True)
class Queue:
    """Means in equilibrium: times in s, numbers of requests; `blocked` is the share lost."""

    Wq: float
    W: float
    Lq: float
    L: float
    utilisation: float
    blocked: float = 0.0
    mean_batch: float = 1.0


def _queue(rate: float, wq: float, w: float, busy: float, **further: float) -> Queue:
    """Return the means of a queue from its two times; the numbers follow by Little's law."""
    return Queue(wq, w, rate * wq, rate * w, busy, **further)


def _stable(utilisation: float) -> None:
    """Raise `InputError` for a server with nothing to do, or with more than it can do."""
    if not 0 < utilisation < 1:
        got = f"a load of {utilisation:.4g}"
        raise InputError("more capacity than work, and some work", got, "lower the rate")


def mg1(rate: float, mean_s: float, cv2: float = 1.0) -> Queue:
    """Return M/G/1: Wq = l E[S^2] / (2 (1 - r)); cv2 of S is 1 for M/M/1 and 0 for M/D/1."""
    # E[S^2] = (1 + cv2) S^2; with l = 0.8 and S = 1: Wq = 4 for M/M/1, 2 for M/D/1
    r = rate * mean_s
    _stable(r)
    wq = rate * mean_s**2 * (1 + cv2) / (2 * (1 - r))
    return _queue(rate, wq, wq + mean_s, r)


def erlang_b(load: float, servers: int) -> float:
    """Return the share lost of a load in erlang at servers where nobody waits."""
    # by recursion over servers: the formula itself divides numbers as large as a^c / c!
    lost = 1.0
    for n in range(1, servers + 1):
        lost = load * lost / (n + load * lost)
    return lost


def mmc(rate: float, mean_s: float, servers: int) -> Queue:
    """Return M/M/c: Wq = P(wait) S / (c - a) with a = l S, P(wait) after Erlang C."""
    load = rate * mean_s
    _stable(load / servers)
    # Erlang C from Erlang B, so that no factorials are needed here, either
    lost = erlang_b(load, servers)
    waits = lost / (1 - load / servers * (1 - lost))
    wq = waits * mean_s / (servers - load)
    return _queue(rate, wq, wq + mean_s, load / servers)


def mm1k(rate: float, mean_s: float, places: int) -> Queue:
    """Return M/M/1 with `places` in all, the one being served included; averages of those let in.

    The `queue_limit` of a policy counts requests that wait: it is places - 1.
    """
    # p_n is proportional to r^n for n = 0 .. places, also with r of 1 or more
    weights = (rate * mean_s) ** np.arange(places + 1)
    p = weights / weights.sum()
    let_in = rate * float(1 - p[-1])
    w = float(p @ np.arange(places + 1)) / let_in
    return _queue(let_in, w - mean_s, w, let_in * mean_s, blocked=float(p[-1]))


def priorities(rates: Sequence[float], mean_s: float, cv2: float = 1.0) -> list[float]:
    """Return Wq of each level, the first served first, none interrupted (Cobham, 1954)."""
    _stable(sum(rates) * mean_s)
    # an arrival waits for what is left of the service at work, in the mean l E[S^2] / 2
    residual_s = sum(rates) * mean_s**2 * (1 + cv2) / 2
    sums = [sum(rates[:n]) * mean_s for n in range(len(rates) + 1)]
    return [residual_s / ((1 - sums[n]) * (1 - sums[n + 1])) for n in range(len(rates))]


def shared(rate: float, mean_s: float, own_s: float) -> float:
    """Return W of a request of work x = `own_s` where all share the server: x / (1 - r)."""
    _stable(rate * mean_s)
    return own_s / (1 - rate * mean_s)


def batch_root(rate: float, mean_s: float, most: int) -> float:
    """Return the root in (0, 1) of mu r^(K+1) - (l + mu) r + l = 0."""
    _stable(rate * mean_s / most)
    mu = 1 / mean_s
    low = 0.0
    high = 1 - 1e-12
    # bisection: 1 is a root, too, and the expression is positive below the one looked for
    for _ in range(200):
        r = (low + high) / 2
        low, high = (r, high) if mu * r ** (most + 1) - (rate + mu) * r + rate > 0 else (low, r)
    return low


def batches(rate: float, mean_s: float, most: int) -> Queue:
    """Return a server whose batches take exponential times of one mean, whatever their size.

    A free server takes all requests that wait, at most K, and later arrivals wait: the dynamic
    batcher without delay. With the root r of `batch_root`:

        Lq = (1 - idle) r / (1 - r)        idle = mu (1 - r) / (l + mu (1 - r))
    """
    r = batch_root(rate, mean_s, most)
    mu = 1 / mean_s
    idle = mu * (1 - r) / (rate + mu * (1 - r))
    wq = (1 - idle) * r / (1 - r) / rate
    return _queue(rate, wq, wq + mean_s, 1 - idle, mean_batch=rate * mean_s / (1 - idle))


def growing_batches(
    rate: float, per_item_s: float, mean_s: float, most: int, waiting: int = 300
) -> Queue:
    """Return a server whose batches of b take exponential times of mean `per_item_s * b + mean_s`.

    A free server takes all requests that wait, at most `most`. Computed from the Markov chain
    (batch size, number waiting), cut off at `waiting` requests.
    """
    tau = per_item_s * np.arange(most + 1) + mean_s
    _stable(rate * float(tau[most]) / most)
    states = [(0, 0), *((b, n) for b in range(1, most + 1) for n in range(waiting))]
    place = {state: k for k, state in enumerate(states)}
    flow = np.zeros((len(states), len(states)))
    for (b, n), k in place.items():
        # an arrival waits, or is a batch of its own if the server is idle (b = 0)
        flow[k, place[(b, min(n + 1, waiting - 1)) if b else (1, 0)]] += rate
        # a batch ends: the next one takes up to `most` of those that wait
        if b:
            flow[k, place[min(n, most), max(n - most, 0)]] += 1 / tau[b]
    p = _equilibrium(flow)
    batch, waits = np.array(states).T
    lq = float(p @ waits)
    inside = float(p @ batch)
    ends = np.where(batch > 0, p / tau[batch], 0.0)
    busy = float(p[batch > 0].sum())
    size = float(ends @ batch / ends.sum())
    return _queue(rate, lq / rate, (lq + inside) / rate, busy, mean_batch=size)


def _equilibrium(flow: np.ndarray) -> np.ndarray:
    """Return the share of time that a Markov chain spends in each state, from its rates."""
    # p Q = 0 leaves one equation too few; the last row says instead that the shares sum to 1
    balance = (flow - np.diag(flow.sum(1))).T
    balance[-1] = 1.0
    return np.linalg.solve(balance, np.eye(len(flow))[-1])


def take_all(rate: float, per_item_s: float, mean_s: float, most: int = 800) -> Queue:
    """Return a server whose batches of b take exactly `per_item_s * b + mean_s` (Inoue, 2021).

    A batch takes all requests that wait: the number A that came during the batch before, or 1 if
    none did. The sizes are a Markov chain, cut off at `most`.
    W = a + t0 + (1 + 2 l a)(E[B^2] - E[B]) / (2 l E[B]) (Performance Evaluation 147; arXiv
    1912.06322).
    """
    a = per_item_s
    t0 = mean_s
    la = rate * per_item_s
    if not la < 1:
        raise InputError("rate * per_item_s below 1", f"{la:.4g}", "lower the rate")
    b = np.arange(1, most + 1)
    arrivals = np.arange(most + 1)
    load = rate * (a * b + t0)
    # Poisson chances l^n e^-l / n! through logarithms: 800! is no floating-point number
    logs = np.concatenate(([0.0], np.cumsum(np.log(b))))
    chances = np.exp(arrivals * np.log(load)[:, None] - load[:, None] - logs)
    none_came = chances[:, 0].copy()
    # after none the next batch is a single request, so that chance joins that of one arrival
    chances = chances[:, 1:]
    chances[:, 0] += none_came
    p = _equilibrium(chances)
    mean = float(p @ b)
    square = float(p @ b**2)
    w = a + t0 + (1 + 2 * la) * (square - mean) / (2 * rate * mean)
    work_s = a * mean + t0
    busy = work_s / (work_s + float(p @ none_came) / rate)
    return _queue(rate, w - work_s, w, busy, mean_batch=mean)
