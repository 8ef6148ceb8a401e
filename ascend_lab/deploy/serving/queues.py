"""Who waits for a server: one model's scheduler on a simulated clock, and what theory says of it.

    arrive -> queue of its level -> batcher -> free instance -> done
                  | full, too late              | dies: its requests come first again
                  v                             v
                 lost                          queue

Nothing is scheduled but what must happen: an agenda holds (time, tick, action, argument), the tick
breaks ties in the order of writing. At one moment an instance that ends takes what waits before
its answers bring new requests, so late arrivals wait. The rules of the batcher are Triton's
(docs/user_guide/batcher.md and dynamic_batch_scheduler.cc of triton-inference-server/core).

The closed forms are oracles of the simulator, and rules of thumb: l is the arrival rate, mu the
rate of one server, r = l/mu or the utilisation. Times W count from arrival to answer, Wq in the
queue; L and Lq count requests: L = l W (Little). Textbook formulas (Kleinrock, Queueing Systems I,
1975) unless another source stands beside them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, count
from typing import Any

import numpy as np

from ascend_lab.errors import InputError

Entry = tuple[float, int]
"""When a request came to this queue, and its number."""
Event = Callable[[float, int], None]


class Agenda:
    """What will happen, in order of time and, at one time, of writing."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self.ticks = count()

    def at(self, time_s: float, act: Callable[[float, Any], None], what: Any = None) -> None:
        """Write down that `act(time_s, what)` is to be called."""
        heappush(self.heap, (time_s, next(self.ticks), act, what))

    def run(self, arrivals: Sequence[float], send: Event) -> None:
        """Send every arrival at its time, and let everything happen until nothing is left."""
        heap = self.heap
        for job, time_s in enumerate(arrivals):
            while heap and heap[0][0] <= time_s:
                now, _, act, what = heappop(heap)
                act(now, what)
            send(time_s, job)
        while heap:
            now, _, act, what = heappop(heap)
            act(now, what)


@dataclass(frozen=True, slots=True)
class Level:
    """A priority: its share of the requests, and what befalls those that wait too long.

    `timeout_s` (0: none) counts time in the queue only; then the request is lost ("reject") or
    served after all of its level ("delay"). `queue_limit` (0: none) is the most that wait.
    """

    share: float = 1.0
    timeout_s: float = 0.0
    action: str = "reject"
    queue_limit: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """An instance dies at a time, and comes back later."""

    instance: int
    at_s: float
    repair_s: float


@dataclass(frozen=True, slots=True)
class Policy:
    """How a model is served; the delay counts from the oldest request that waits.

    Without `preferred` sizes the largest batch is preferred; `loss`: nobody waits for an instance.
    """

    instances: int = 1
    max_batch: int = 1
    max_delay_s: float = 0.0
    preferred: tuple[int, ...] = ()
    levels: tuple[Level, ...] = (Level(),)
    failures: tuple[Failure, ...] = ()
    loss: bool = False


@dataclass(slots=True)
class Jobs:
    """What the stations know of the requests: level and items, and the time they waited."""

    level: list[int]
    items: list[int]
    waited_s: list[float]
    lost: list[bool]


@dataclass(slots=True)
class Batches:
    """What the instances of a station did: one entry a batch; a batch cut short died."""

    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    items: list[int] = field(default_factory=list)


class Station:
    """A model being served; `done` and `lost` are told what becomes of its requests."""

    def __init__(
        self,
        agenda: Agenda,
        policy: Policy,
        batch_s: Callable[[int], float],
        noise: Iterator[float],
        jobs: Jobs,
        done: Event,
        lost: Event,
    ) -> None:
        self.agenda = agenda
        self.policy = policy
        self.jobs = jobs
        self.done = done
        self.lost = lost
        self.mean_s = [0.0, *(batch_s(n + 1) for n in range(policy.max_batch))]
        self.noise = noise
        self.again: deque[Entry] = deque()
        self.fresh: list[deque[Entry]] = [deque() for _ in policy.levels]
        self.late: list[deque[Entry]] = [deque() for _ in policy.levels]
        self.queues = (self.again, *chain.from_iterable(zip(self.fresh, self.late, strict=True)))
        self.free = list(range(policy.instances))[::-1]
        self.running: dict[int, tuple[float, int, list[Entry]]] = {}
        self.batches = Batches()
        self.timer_s = -1.0
        self.timed = any(level.timeout_s for level in policy.levels)
        self.preferred = frozenset(policy.preferred or (policy.max_batch,))
        self.largest = max(self.preferred)
        self.plain = not (self.timed or policy.preferred or set(jobs.items) - {1})
        for one in policy.failures:
            agenda.at(one.at_s, self._die, one)

    def arrive(self, now: float, job: int) -> None:
        """Take a request in, or lose it if too many wait."""
        place = self.jobs.level[job]
        level = self.policy.levels[place]
        queue = self.fresh[place]
        if self.timed:
            self._expire(now)
            if level.timeout_s:
                self.agenda.at(now + level.timeout_s, self._look)
        queue.append((now, job))
        if self.free:
            self._look(now)
        if (level.queue_limit or self.policy.loss) and queue and queue[-1][1] == job:
            late = len(self.late[place])
            if len(queue) + late > (0 if self.policy.loss else level.queue_limit):
                queue.pop()
                self._lose(now, job)

    def _lose(self, now: float, job: int) -> None:
        if not self.jobs.lost[job]:  # in another branch of an ensemble
            self.jobs.lost[job] = True
            self.lost(now, job)

    def _expire(self, now: float) -> None:
        """Take out who waited too long: a level's requests have one timeout, the first leads."""
        for level, queue, late in zip(self.policy.levels, self.fresh, self.late, strict=True):
            while level.timeout_s and queue and now >= queue[0][0] + level.timeout_s:
                entry = queue.popleft()
                if level.action == "delay":
                    late.append(entry)
                else:
                    self._lose(now, entry[1])

    def _look(self, now: float, _: object = None) -> None:
        """Start batches while there are instances and the batcher has one to send."""
        if self.timed:
            self._expire(now)
        while self.free and (size := self._choose(now)):
            self._start(now, size)

    def _choose(self, now: float) -> int:
        """Return how many of the first requests are to be sent now; 0: wait, or none is there."""
        policy = self.policy
        oldest = min((queue[0][0] for queue in self.queues if queue), default=-1.0)
        if oldest < 0:
            return 0
        if self.plain:
            fitting = best = 0
            for queue in self.queues:
                fitting += len(queue)
            if full := fitting >= policy.max_batch:
                best = fitting = policy.max_batch
        else:
            fitting, best, full = self._fitting()
        due_s = oldest + policy.max_delay_s
        if policy.max_delay_s and now >= due_s:
            return fitting
        if best or full or not policy.max_delay_s:
            return best or fitting
        if self.timer_s != due_s:
            self.timer_s = due_s
            self.agenda.at(due_s, self._look)
        return 0

    def _fitting(self) -> tuple[int, int, bool]:
        """Return how many requests fit in a batch, how many to prefer, and whether it is full."""
        items = self.jobs.items
        total = 0
        number = 0
        best = 0
        for _, job in chain.from_iterable(self.queues):
            more = total + items[job]
            if number and more > self.largest and not best:
                best = number
            if more > self.policy.max_batch:
                return number, best, True
            total = more
            number = number + 1
            if total in self.preferred:
                best = number
        return number, best, False

    def _start(self, now: float, size: int) -> None:
        """Give the first requests to a free instance."""
        batch: list[Entry] = []
        for queue in self.queues:
            while queue and len(batch) < size:
                batch.append(queue.popleft())
        waited_s = self.jobs.waited_s
        for since_s, job in batch:
            waited_s[job] += now - since_s
        items = size if self.plain else sum(self.jobs.items[job] for _, job in batch)
        instance = self.free.pop()
        self.running[instance] = (now, items, batch)
        self.agenda.at(now + self.mean_s[items] * next(self.noise), self._end, (instance, batch))

    def _end(self, now: float, what: tuple[int, list[Entry]]) -> None:
        instance, batch = what
        found = self.running.get(instance)
        if found is None or found[2] is not batch:
            return  # the instance died meanwhile
        self._note(now, instance)
        self.free.append(instance)
        self._look(now)
        for _, job in batch:
            self.done(now, job)

    def _note(self, now: float, instance: int) -> list[Entry]:
        start_s, items, batch = self.running.pop(instance)
        self.batches.start_s.append(start_s)
        self.batches.end_s.append(now)
        self.batches.items.append(items)
        return batch

    def _die(self, now: float, failure: Failure) -> None:
        """Stop an instance: what it worked on is first in the queue, whatever the limits say."""
        if failure.instance in self.running:
            batch = self._note(now, failure.instance)
            self.again.extendleft((now, job) for _, job in reversed(batch))
        elif failure.instance in self.free:
            self.free.remove(failure.instance)
        else:
            return  # it is dead already
        self.agenda.at(now + failure.repair_s, self._rise, failure.instance)
        self._look(now)

    def _rise(self, now: float, instance: int) -> None:
        self.free.append(instance)
        self._look(now)


# -- what theory says -----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Queue:
    """Averages in equilibrium: times in s, numbers of requests; `blocked` is the lost share."""

    Wq: float
    W: float
    Lq: float
    L: float
    utilisation: float
    blocked: float = 0.0
    mean_batch: float = 1.0


def _queue(rate: float, wq: float, w: float, busy: float, **more: float) -> Queue:
    return Queue(wq, w, rate * wq, rate * w, busy, **more)


def _stable(utilisation: float) -> None:
    if not 0 < utilisation < 1:
        got = f"a load of {utilisation:.4g}"
        raise InputError("more capacity than work, and some work", got, "lower the rate")


def mg1(rate: float, mean_s: float, cv2: float = 1.0) -> Queue:
    """Return M/G/1: Wq = l E[S^2] / (2 (1 - r)); cv2 of S is 1 for M/M/1 and 0 for M/D/1."""
    r = rate * mean_s
    _stable(r)
    wq = rate * mean_s**2 * (1 + cv2) / (2 * (1 - r))
    return _queue(rate, wq, wq + mean_s, r)


def erlang_b(load: float, servers: int) -> float:
    """Return the share lost of `load` erlang at servers where nobody waits."""
    lost = 1.0
    for n in range(1, servers + 1):
        lost = load * lost / (n + load * lost)
    return lost


def mmc(rate: float, mean_s: float, servers: int) -> Queue:
    """Return M/M/c: Wq = P(wait) S / (c - a) with a = l S, P(wait) after Erlang C."""
    load = rate * mean_s
    _stable(load / servers)
    lost = erlang_b(load, servers)
    waits = lost / (1 - load / servers * (1 - lost))
    wq = waits * mean_s / (servers - load)
    return _queue(rate, wq, wq + mean_s, load / servers)


def mm1k(rate: float, mean_s: float, places: int) -> Queue:
    """Return M/M/1 with `places` in all, the one being served included; averages of those let in.

    The policy's `queue_limit` counts who waits: it is places - 1.
    """
    weights = (rate * mean_s) ** np.arange(places + 1)
    p = weights / weights.sum()
    let_in = rate * float(1 - p[-1])
    w = float(p @ np.arange(places + 1)) / let_in
    return _queue(let_in, w - mean_s, w, let_in * mean_s, blocked=float(p[-1]))


def priorities(rates: Sequence[float], mean_s: float, cv2: float = 1.0) -> list[float]:
    """Return Wq of each level, the first served first, none interrupted (Cobham, 1954)."""
    _stable(sum(rates) * mean_s)
    rest_s = sum(rates) * mean_s**2 * (1 + cv2) / 2
    sums = [sum(rates[:n]) * mean_s for n in range(len(rates) + 1)]
    return [rest_s / ((1 - sums[n]) * (1 - sums[n + 1])) for n in range(len(rates))]


def shared(rate: float, mean_s: float, own_s: float) -> float:
    """Return W of a request of `own_s` work where all share the server: x / (1 - r)."""
    _stable(rate * mean_s)
    return own_s / (1 - rate * mean_s)


def batch_root(rate: float, mean_s: float, most: int) -> float:
    """Return the root in (0, 1) of mu r^(K+1) - (l + mu) r + l = 0."""
    _stable(rate * mean_s / most)
    mu = 1 / mean_s
    low = 0.0
    high = 1 - 1e-12
    for _ in range(200):
        r = (low + high) / 2
        low, high = (r, high) if mu * r ** (most + 1) - (rate + mu) * r + rate > 0 else (low, r)
    return low


def batches(rate: float, mean_s: float, most: int) -> Queue:
    """Return a server of exponential batches, as long whatever their size.

    A free server takes all that waits, at most K, and late arrivals wait: the dynamic batcher
    without delay. With the root r: Lq = (1 - idle) r/(1 - r), idle = mu(1-r) / (l + mu(1-r)).
    """
    r = batch_root(rate, mean_s, most)
    mu = 1 / mean_s
    idle = mu * (1 - r) / (rate + mu * (1 - r))
    wq = (1 - idle) * r / (1 - r) / rate
    return _queue(rate, wq, wq + mean_s, 1 - idle, mean_batch=rate * mean_s / (1 - idle))


def growing_batches(
    rate: float, per_item_s: float, mean_s: float, most: int, waiting: int = 300
) -> Queue:
    """Return a server of exponential batches of mean `per_item_s * b + mean_s`.

    A free server takes all that waits, at most `most`. From the Markov chain (batch, who waits),
    cut where `waiting` wait.
    """
    tau = per_item_s * np.arange(most + 1) + mean_s
    _stable(rate * float(tau[most]) / most)
    states = [(0, 0), *((b, n) for b in range(1, most + 1) for n in range(waiting))]
    place = {state: k for k, state in enumerate(states)}
    flow = np.zeros((len(states), len(states)))
    for (b, n), k in place.items():
        flow[k, place[(b, min(n + 1, waiting - 1)) if b else (1, 0)]] += rate
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
    """Return the shares of time of a chain's states, from its rates or chances."""
    balance = (flow - np.diag(flow.sum(1))).T
    balance[-1] = 1.0
    return np.linalg.solve(balance, np.eye(len(flow))[-1])


def take_all(rate: float, per_item_s: float, mean_s: float, most: int = 800) -> Queue:
    """Return batches of `per_item_s * b + mean_s` exactly, all that waits in one (Inoue, 2021).

    The next batch is the number A that came meanwhile, 1 if none did: a chain, here cut at `most`.
    W = a + t0 + (1 + 2 l a)(E[B^2] - E[B]) / (2 l E[B]) (Performance Evaluation 147; arXiv
    1912.06322).
    """
    a = per_item_s
    t0 = mean_s
    la = rate * per_item_s
    if not la < 1:
        raise InputError("rate * per_item_s below 1", f"{la:.4g}", "lower the rate")
    b = np.arange(1, most + 1)
    came = np.arange(most + 1)
    load = rate * (a * b + t0)
    logs = np.concatenate(([0.0], np.cumsum(np.log(b))))
    chances = np.exp(came * np.log(load)[:, None] - load[:, None] - logs)
    none = chances[:, 0].copy()
    chances = chances[:, 1:]
    chances[:, 0] += none
    p = _equilibrium(chances)
    mean = float(p @ b)
    square = float(p @ b**2)
    w = a + t0 + (1 + 2 * la) * (square - mean) / (2 * rate * mean)
    work_s = a * mean + t0
    busy = work_s / (work_s + float(p @ none) / rate)
    return _queue(rate, w - work_s, w, busy, mean_batch=mean)
