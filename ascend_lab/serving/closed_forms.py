"""What queueing theory says of servers: the oracles of the simulator, and rules of thumb.

l is the arrival rate, mu the rate of one server, r = l/mu or the utilisation. Times W count from
arrival to answer, Wq in the queue; L and Lq count requests: L = l W (Little). Textbook formulas
(Kleinrock, Queueing Systems I, 1975) unless another source stands beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import InputError

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Queue:
    """Averages in equilibrium: times in s, numbers of requests; `blocked` is the lost share."""

    Wq: float
    W: float
    Lq: float
    L: float
    utilisation: float
    blocked: float = 0.0


def _stable(utilisation: float) -> None:
    if not 0 < utilisation < 1:
        got = f"a load of {utilisation:.4g}"
        raise InputError("more capacity than work, and some work", got, "lower the rate")


def mg1(rate: float, mean_s: float, cv2: float = 1.0) -> Queue:
    """Return M/G/1: Wq = l E[S^2] / (2 (1 - r)); cv2 of S is 1 for M/M/1 and 0 for M/D/1."""
    r = rate * mean_s
    _stable(r)
    wq = rate * mean_s**2 * (1 + cv2) / (2 * (1 - r))
    return Queue(wq, wq + mean_s, rate * wq, rate * (wq + mean_s), r)


def mm1_percentile(rate: float, mean_s: float, share: float) -> float:
    """Return the time in an M/M/1 that a share of the requests stays below: T is exponential."""
    return mg1(rate, mean_s).W * -math.log1p(-share)


def erlang_b(load: float, servers: int) -> float:
    """Return the share lost of `load` erlang at servers where nobody waits."""
    lost = 1.0
    for n in range(1, servers + 1):
        lost = load * lost / (n + load * lost)
    return lost


def erlang_c(load: float, servers: int) -> float:
    """Return the share that waits in M/M/c."""
    _stable(load / servers)
    lost = erlang_b(load, servers)
    return lost / (1 - load / servers * (1 - lost))


def mmc(rate: float, mean_s: float, servers: int) -> Queue:
    """Return M/M/c: Wq = P(wait) S / (c - a) with a = l S."""
    load = rate * mean_s
    wq = erlang_c(load, servers) * mean_s / (servers - load)
    return Queue(wq, wq + mean_s, rate * wq, rate * (wq + mean_s), load / servers)


def mm1k(rate: float, mean_s: float, places: int) -> Queue:
    """Return M/M/1 with `places` in all, the one being served included; averages of those let in.

    The policy's `queue_limit` counts who waits: it is places - 1.
    """
    r = rate * mean_s
    weights = [r**n for n in range(places + 1)]
    p = [w / sum(weights) for w in weights]
    number = sum(n * share for n, share in enumerate(p))
    let_in = rate * (1 - p[-1])
    w = number / let_in
    return Queue(w - mean_s, w, let_in * (w - mean_s), number, let_in * mean_s, p[-1])


def priorities(rates: Sequence[float], mean_s: float, cv2: float = 1.0) -> list[float]:
    """Return Wq of each level, the first served first, none interrupted (Cobham, 1954)."""
    _stable(sum(rates) * mean_s)
    rest_s = sum(rates) * mean_s**2 * (1 + cv2) / 2
    sums = [sum(rates[:n]) * mean_s for n in range(len(rates) + 1)]
    return [rest_s / ((1 - sums[n]) * (1 - sums[n + 1])) for n in range(len(rates))]


def tandem(rate: float, means_s: Sequence[float]) -> float:
    """Return W through M/M/1 servers one after another: the sum of theirs (Jackson, 1957)."""
    return sum(mg1(rate, mean_s).W for mean_s in means_s)


def shared(rate: float, mean_s: float, own_s: float) -> float:
    """Return W of a request of `own_s` work where all share the server: x / (1 - r)."""
    _stable(rate * mean_s)
    return own_s / (1 - rate * mean_s)


def machine_repair(clients: int, mean_s: float, think_s: float) -> float:
    """Return answers a second to clients that think exponentially and queue at one such server."""
    weight, total = 1.0, 1.0
    for n in range(clients):  # n at the server
        weight *= (clients - n) * mean_s / think_s if think_s else float(n == clients - 1)
        total += weight
    return (1 - 1 / total) / mean_s if think_s else 1 / mean_s


def batch_root(rate: float, mean_s: float, most: int) -> float:
    """Return the root in (0, 1) of mu r^(K+1) - (l + mu) r + l = 0."""
    _stable(rate * mean_s / most)
    mu, low, high = 1 / mean_s, 0.0, 1 - 1e-12
    for _ in range(200):
        r = (low + high) / 2
        low, high = (r, high) if mu * r ** (most + 1) - (rate + mu) * r + rate > 0 else (low, r)
    return low


def batches(rate: float, mean_s: float, most: int) -> tuple[Queue, float]:
    """Return a server of exponential batches, as long whatever their size, and the mean batch.

    A free server takes all that waits, at most K, and late arrivals wait: the dynamic batcher
    without delay. With the root r: Lq = (1 - idle) r/(1 - r), idle = mu(1-r) / (l + mu(1-r)).
    """
    r, mu = batch_root(rate, mean_s, most), 1 / mean_s
    idle = mu * (1 - r) / (rate + mu * (1 - r))
    lq = (1 - idle) * r / (1 - r)
    wq = lq / rate
    queue = Queue(wq, wq + mean_s, lq, lq + rate * mean_s, 1 - idle)
    return queue, rate * mean_s / (1 - idle)


def joined_batches(rate: float, mean_s: float, most: int, *, full: bool = False) -> float:
    """Return L if arrivals may join a running batch; `full`: if only batches of K are served."""
    r = batch_root(rate, mean_s, most)
    return r / (1 - r) + (most - 1) / 2 * full


def growing_batches(
    rate: float, per_item_s: float, mean_s: float, most: int, least: int = 1, waiting: int = 300
) -> tuple[Queue, float]:
    """Return exponential batches of mean `per_item_s * b + mean_s`, and the mean batch.

    A free server takes what waits, `least` to `most`. From the Markov chain (batch, who waits),
    cut where `waiting` wait.
    """
    tau = [per_item_s * b + mean_s for b in range(most + 1)]
    _stable(rate * tau[most] / most)
    states = [(0, n) for n in range(least)]
    states += [(b, n) for b in range(1, most + 1) for n in range(waiting)]
    place = {state: k for k, state in enumerate(states)}
    flow = np.zeros((len(states), len(states)))
    for (b, n), k in place.items():
        up = (b, min(n + 1, waiting - 1)) if b or n + 1 < least else (n + 1, 0)
        flow[k, place[up]] += rate
        if b:
            took = min(n, most)
            flow[k, place[(took, n - took) if n >= least else (0, n)]] += 1 / tau[b]
    p = _equilibrium(flow)
    batch, waits = np.array(states).T
    lq, inside = float(p @ waits), float(p @ batch)
    ends = np.where(batch > 0, p / np.array(tau)[batch], 0.0)
    size = float(ends @ batch / ends.sum())
    busy = float(p[batch > 0].sum())
    return Queue(lq / rate, (lq + inside) / rate, lq, lq + inside, busy), size


def _equilibrium(flow: Floats) -> Floats:
    """Return the shares of time of a chain's states, from its rates or chances."""
    balance = (flow - np.diag(flow.sum(1))).T
    balance[-1] = 1.0
    return np.linalg.solve(balance, np.eye(len(flow))[-1])


@dataclass(frozen=True, slots=True)
class Taken:
    """A server of deterministic batches without a maximum: batch, response time and busy share."""

    mean_batch: float
    W: float
    bound: float
    utilisation: float


def take_all(rate: float, per_item_s: float, mean_s: float, most: int = 800) -> Taken:
    """Return batches of `per_item_s * b + mean_s` exactly, all that waits in one (Inoue, 2021).

    The next batch is the number A that came meanwhile, 1 if none did: a chain, here cut at `most`.
    W = a + t0 + (1 + 2 l a)(E[B^2] - E[B]) / (2 l E[B]), at most the least of two bounds: the batch
    is at least 1, the idle share at least 0 (Performance Evaluation 147; arXiv 1912.06322).
    """
    a, t0, la = per_item_s, mean_s, rate * per_item_s
    if not la < 1:
        raise InputError("rate * per_item_s below 1", f"{la:.4g}", "lower the rate")
    b = np.arange(1, most + 1)
    load = rate * (a * b + t0)
    logs = np.concatenate(([0.0], np.cumsum(np.log(b))))
    came = np.arange(most + 1)
    chances = np.exp(came * np.log(load)[:, None] - load[:, None] - logs)
    none, chances = chances[:, 0].copy(), chances[:, 1:]
    chances[:, 0] += none
    p = _equilibrium(chances)
    mean, square = float(p @ b), float(p @ b**2)
    w = a + t0 + (1 + 2 * la) * (square - mean) / (2 * rate * mean)
    alone = (a + t0) / (2 * (1 - la)) * (1 + 2 * rate * t0 + (1 - rate * t0) / (1 + la))
    never_idle = 1.5 * t0 / (1 - la) + a / 2 * (la + 2) / (1 - la**2)
    work_s = a * mean + t0
    return Taken(mean, w, min(alone, never_idle), work_s / (work_s + float(p @ none) / rate))
