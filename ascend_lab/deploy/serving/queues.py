"""Simulates the queues and instances of one served model.

    arrive -> queue of its level -> batcher -> free instance -> done
                  | full, timeout               | fails: its requests return to the front
                  v                             v
                 lost                          queue

When an instance ends a batch, it takes waiting requests before new requests that the answers cause.
The rules of the batcher are those of Triton (docs/user_guide/batcher.md and
dynamic_batch_scheduler.cc of triton-inference-server/core).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from ascend_lab.deploy.agenda import Agenda

Entry = tuple[float, int]
"""The time at which a request entered its queue, and its number."""
Event = Callable[[float, int], None]


@dataclass(frozen=True, slots=True)
class Level:
    """A priority level: its share of the requests, and the rules for requests that wait too long.

    After `timeout_s` in the queue (0: no timeout), a request is lost ("reject") or served after all
    others of its level ("delay"). At most `queue_limit` requests wait (0: no limit).
    """

    share: float = 1.0
    timeout_s: float = 0.0
    action: str = "reject"
    queue_limit: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of an instance at a time, and the seconds until it works again."""

    instance: int
    at_s: float
    repair_s: float


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of serving a model; `max_delay_s` begins with the oldest waiting request.

    Without `preferred` batch sizes the largest batch is preferred. With `loss`, a request is lost
    if no instance is free.
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
    """The requests of a simulation, with one entry of each request in every list."""

    level: list[int]
    items: list[int]
    waited_s: list[float]
    lost: list[bool]


@dataclass(slots=True)
class Batches:
    """The batches of a station, with one entry in each list, including interrupted ones."""

    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    items: list[int] = field(default_factory=list)


class Station:
    """A served model; it calls `done` or `lost` when a request is answered or given up."""

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
        # One queue for requests of failed instances, then two for each level: fresh requests, and
        # those that timed out with the action "delay". Earlier queues are served first.
        self.interrupted: deque[Entry] = deque()
        self.fresh: list[deque[Entry]] = [deque() for _ in policy.levels]
        self.delayed: list[deque[Entry]] = [deque() for _ in policy.levels]
        self.queues = (
            self.interrupted,
            *chain.from_iterable(zip(self.fresh, self.delayed, strict=True)),
        )
        self.free = list(range(policy.instances))[::-1]
        # Instance -> the start of its batch, its number of items, its requests.
        self.running: dict[int, tuple[float, int, list[Entry]]] = {}
        self.batches = Batches()
        # The time of the next scheduled `_start_batches`, to avoid scheduling it twice.
        self.next_look_s = -1.0
        self.has_timeouts = any(level.timeout_s for level in policy.levels)
        self.preferred = frozenset(policy.preferred or (policy.max_batch,))
        self.largest_preferred = max(self.preferred)
        # With one item a request and no rule except max_batch, counting requests is enough.
        self.counts_only = not (self.has_timeouts or policy.preferred or set(jobs.items) - {1})
        for failure in policy.failures:
            agenda.at(failure.at_s, self._fail_instance, failure)

    def arrive(self, now: float, job: int) -> None:
        """Put a request into the queue of its level, or lose it if too many wait."""
        priority = self.jobs.level[job]
        level = self.policy.levels[priority]
        queue = self.fresh[priority]
        if self.has_timeouts:
            self._expire(now)
            if level.timeout_s:
                self.agenda.at(now + level.timeout_s, self._start_batches)
        queue.append((now, job))
        if self.free:
            self._start_batches(now)
        # A request that a free instance took at once does not count as waiting.
        if (level.queue_limit or self.policy.loss) and queue and queue[-1][1] == job:
            late = len(self.delayed[priority])
            if len(queue) + late > (0 if self.policy.loss else level.queue_limit):
                queue.pop()
                self._lose(now, job)

    def _lose(self, now: float, job: int) -> None:
        """Mark a request as lost, and report it once."""
        # Another branch of an ensemble may have lost it already.
        if not self.jobs.lost[job]:
            self.jobs.lost[job] = True
            self.lost(now, job)

    def _expire(self, now: float) -> None:
        """Remove requests that have waited too long from their queues."""
        for level, queue, late in zip(self.policy.levels, self.fresh, self.delayed, strict=True):
            # All requests of a level have the same timeout, so the first one expires first.
            while level.timeout_s and queue and now >= queue[0][0] + level.timeout_s:
                entry = queue.popleft()
                if level.action == "delay":
                    late.append(entry)
                else:
                    self._lose(now, entry[1])

    def _start_batches(self, now: float, _: object = None) -> None:
        """Start batches while an instance is free and the batcher has a batch to send."""
        if self.has_timeouts:
            self._expire(now)
        while self.free and (size := self._choose(now)):
            self._start(now, size)

    def _choose(self, now: float) -> int:
        """Return how many of the first requests form a batch now; 0 to wait or if none waits."""
        policy = self.policy
        oldest_s = min((queue[0][0] for queue in self.queues if queue), default=-1.0)
        if oldest_s < 0:
            return 0
        if self.counts_only:
            fitting_count = 0
            for queue in self.queues:
                fitting_count += len(queue)
            preferred_count = 0
            is_full = fitting_count >= policy.max_batch
            if is_full:
                fitting_count = policy.max_batch
                preferred_count = fitting_count
        else:
            fitting_count, preferred_count, is_full = self._fitting()
        # Three cases: the oldest request has waited long enough; or a batch is ready without more
        # waiting; or this is decided again when the oldest will have waited long enough.
        due_s = oldest_s + policy.max_delay_s
        if policy.max_delay_s and now >= due_s:
            return fitting_count
        if preferred_count or is_full or not policy.max_delay_s:
            return preferred_count or fitting_count
        if self.next_look_s != due_s:
            self.next_look_s = due_s
            self.agenda.at(due_s, self._start_batches)
        return 0

    def _fitting(self) -> tuple[int, int, bool]:
        """Return how many requests fit in a batch, the preferred number, and whether it is full."""
        items = self.jobs.items
        total = 0
        count = 0
        preferred_count = 0
        for _, job in chain.from_iterable(self.queues):
            total_with_job = total + items[job]
            # Preferred sizes 4 and 8, requests of 3 items: 3 + 3 + 3 > 8, so two are sent.
            if count and total_with_job > self.largest_preferred and not preferred_count:
                preferred_count = count
            if total_with_job > self.policy.max_batch:
                return count, preferred_count, True
            total = total_with_job
            count = count + 1
            if total in self.preferred:
                preferred_count = count
        return count, preferred_count, False

    def _start(self, now: float, size: int) -> None:
        """Start a batch of the first requests on a free instance."""
        batch: list[Entry] = []
        for queue in self.queues:
            while queue and len(batch) < size:
                batch.append(queue.popleft())
        waited_s = self.jobs.waited_s
        # Added, not assigned, as a request of a failed instance waits twice.
        for since_s, job in batch:
            waited_s[job] += now - since_s
        items = size if self.counts_only else sum(self.jobs.items[job] for _, job in batch)
        instance = self.free.pop()
        self.running[instance] = (now, items, batch)
        self.agenda.at(now + self.draw_s(items), self._end, (instance, batch))

    def _end(self, now: float, instance_and_batch: tuple[int, list[Entry]]) -> None:
        """End a batch: its instance takes the next batch, and its requests are answered."""
        instance, batch = instance_and_batch
        # If the instance has failed, it is idle or has another batch now.
        running = self.running.get(instance)
        if running is None or running[2] is not batch:
            return
        self._stop(now, instance)
        self.free.append(instance)
        # In this order, so that requests caused by the answers are not in the next batch.
        self._start_batches(now)
        for _, job in batch:
            self.done(now, job)

    def _stop(self, now: float, instance: int) -> list[Entry]:
        """Record the batch of an instance that stops, and return its requests."""
        start_s, items, batch = self.running.pop(instance)
        self.batches.start_s.append(start_s)
        self.batches.end_s.append(now)
        self.batches.items.append(items)
        return batch

    def _fail_instance(self, now: float, failure: Failure) -> None:
        """Let an instance fail; its requests go to the front, even if queues are full."""
        if failure.instance in self.running:
            batch = self._stop(now, failure.instance)
            self.interrupted.extendleft((now, job) for _, job in reversed(batch))
        elif failure.instance in self.free:
            self.free.remove(failure.instance)
        else:
            return  # it has failed already
        self.agenda.at(now + failure.repair_s, self._repair_instance, failure.instance)
        self._start_batches(now)

    def _repair_instance(self, now: float, instance: int) -> None:
        """Let a repaired instance work again."""
        self.free.append(instance)
        self._start_batches(now)
