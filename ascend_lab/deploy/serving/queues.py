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
    """A priority: its share of the requests, and what happens to those that wait too long.

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
    """How a model is served; the delay counts from the arrival of the oldest waiting request.

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
    """The requests, one entry each in every list: level and items, time waited, lost or not."""

    level: list[int]
    items: list[int]
    waited_s: list[float]
    lost: list[bool]


@dataclass(slots=True)
class Batches:
    """The batches that a station ran, one entry each in every list; those cut short included."""

    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    items: list[int] = field(default_factory=list)


class Station:
    """A model being served; it calls `done` or `lost` when a request is answered or given up."""

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
        # a queue for requests of instances that died, then two for each level: fresh requests,
        # and late ones that timed out with the action "delay"; earlier queues are served first
        self.interrupted: deque[Entry] = deque()
        self.fresh: list[deque[Entry]] = [deque() for _ in policy.levels]
        self.late: list[deque[Entry]] = [deque() for _ in policy.levels]
        self.queues = (
            self.interrupted,
            *chain.from_iterable(zip(self.fresh, self.late, strict=True)),
        )
        self.free = list(range(policy.instances))[::-1]
        # by instance: when its batch began, how many items it has, its requests
        self.running: dict[int, tuple[float, int, list[Entry]]] = {}
        self.batches = Batches()
        # the time for which the batcher has entered its next look, not to enter it twice
        self.timer_s = -1.0
        self.timed = any(level.timeout_s for level in policy.levels)
        self.preferred = frozenset(policy.preferred or (policy.max_batch,))
        self.largest_preferred = max(self.preferred)
        # requests of one item each and no rule but max_batch: counting entries is enough
        self.counts_only = not (self.timed or policy.preferred or set(jobs.items) - {1})
        for failure in policy.failures:
            agenda.at(failure.at_s, self._die, failure)

    def arrive(self, now: float, job: int) -> None:
        """Put a request into the queue of its level, or lose it if too many wait."""
        priority = self.jobs.level[job]
        level = self.policy.levels[priority]
        queue = self.fresh[priority]
        if self.timed:
            self._expire(now)
            if level.timeout_s:
                self.agenda.at(now + level.timeout_s, self._look)
        queue.append((now, job))
        if self.free:
            self._look(now)
        # a request that a free instance took at once never waited: the limit does not count it
        if (level.queue_limit or self.policy.loss) and queue and queue[-1][1] == job:
            late = len(self.late[priority])
            if len(queue) + late > (0 if self.policy.loss else level.queue_limit):
                queue.pop()
                self._lose(now, job)

    def _lose(self, now: float, job: int) -> None:
        """Mark a request as lost, and report it once."""
        # another branch of an ensemble may have lost it already
        if not self.jobs.lost[job]:
            self.jobs.lost[job] = True
            self.lost(now, job)

    def _expire(self, now: float) -> None:
        """Take requests that waited too long out of their queues."""
        for level, queue, late in zip(self.policy.levels, self.fresh, self.late, strict=True):
            # requests of a level have one timeout: the first in its queue is the first to time out
            while level.timeout_s and queue and now >= queue[0][0] + level.timeout_s:
                entry = queue.popleft()
                if level.action == "delay":
                    late.append(entry)
                else:
                    self._lose(now, entry[1])

    def _look(self, now: float, _: object = None) -> None:
        """Start batches while an instance is free and the batcher has a batch to send."""
        if self.timed:
            self._expire(now)
        while self.free and (size := self._choose(now)):
            self._start(now, size)

    def _choose(self, now: float) -> int:
        """Return how many of the first requests to send now: 0 to wait, or if there are none."""
        policy = self.policy
        oldest_s = min((queue[0][0] for queue in self.queues if queue), default=-1.0)
        if oldest_s < 0:
            return 0
        if self.counts_only:
            fitting = 0
            for queue in self.queues:
                fitting += len(queue)
            best = 0
            is_full = fitting >= policy.max_batch
            if is_full:
                fitting = policy.max_batch
                best = fitting
        else:
            fitting, best, is_full = self._fitting()
        # three cases: the oldest has waited long enough, or there is a batch that needs no waiting,
        # or the next look is entered for the time at which the oldest will have waited long enough
        due_s = oldest_s + policy.max_delay_s
        if policy.max_delay_s and now >= due_s:
            return fitting
        if best or is_full or not policy.max_delay_s:
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
            total_with_job = total + items[job]
            # preferred 4 and 8, requests of 3 items: 3 + 3 + 3 = 9 is above 8, so two are sent
            if number and total_with_job > self.largest_preferred and not best:
                best = number
            if total_with_job > self.policy.max_batch:
                return number, best, True
            total = total_with_job
            number = number + 1
            if total in self.preferred:
                best = number
        return number, best, False

    def _start(self, now: float, size: int) -> None:
        """Start a batch of the first requests on a free instance."""
        batch: list[Entry] = []
        for queue in self.queues:
            while queue and len(batch) < size:
                batch.append(queue.popleft())
        waited_s = self.jobs.waited_s
        # added, not set: a request whose instance died waits twice
        for since_s, job in batch:
            waited_s[job] += now - since_s
        items = size if self.counts_only else sum(self.jobs.items[job] for _, job in batch)
        instance = self.free.pop()
        self.running[instance] = (now, items, batch)
        self.agenda.at(now + self.draw_s(items), self._end, (instance, batch))

    def _end(self, now: float, started: tuple[int, list[Entry]]) -> None:
        """End a batch: its instance takes the next one, its requests are answered."""
        instance, batch = started
        # if the instance died meanwhile it is idle, or works on another batch by now
        running = self.running.get(instance)
        if running is None or running[2] is not batch:
            return
        self._stop(now, instance)
        self.free.append(instance)
        # in this order: requests that an answer brings about are not in the batch that starts now
        self._look(now)
        for _, job in batch:
            self.done(now, job)

    def _stop(self, now: float, instance: int) -> list[Entry]:
        """Record the batch of an instance that stops now, and return its requests."""
        start_s, items, batch = self.running.pop(instance)
        self.batches.start_s.append(start_s)
        self.batches.end_s.append(now)
        self.batches.items.append(items)
        return batch

    def _die(self, now: float, failure: Failure) -> None:
        """Let an instance die: its requests are served first, whatever the limits of queues say."""
        if failure.instance in self.running:
            batch = self._stop(now, failure.instance)
            self.interrupted.extendleft((now, job) for _, job in reversed(batch))
        elif failure.instance in self.free:
            self.free.remove(failure.instance)
        else:
            return  # dead already
        self.agenda.at(now + failure.repair_s, self._rise, failure.instance)
        self._look(now)

    def _rise(self, now: float, instance: int) -> None:
        """Let a repaired instance work again."""
        self.free.append(instance)
        self._look(now)
