"""The scheduler of one model on a simulated clock: who waits, in what batch, for which instance.

    arrive -> queue of its level -> batcher -> free instance -> done
                  | full, too late              | dies: its requests come first again
                  v                             v
                 lost                          queue

At one moment an instance that ends takes what waits before its answers bring new requests, so late
arrivals wait. The rules of the batcher are Triton's (docs/user_guide/batcher.md and
dynamic_batch_scheduler.cc of triton-inference-server/core).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from ascend_lab.deploy.agenda import Agenda

Entry = tuple[float, int]
"""When a request came to this queue, and its number."""
Event = Callable[[float, int], None]


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
        draw_s: Callable[[int], float],
        jobs: Jobs,
        done: Event,
        lost: Event,
    ) -> None:
        self.agenda = agenda
        self.policy = policy
        self.jobs = jobs
        self.done = done
        self.lost = lost
        self.draw_s = draw_s
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
        self.agenda.at(now + self.draw_s(items), self._end, (instance, batch))

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
