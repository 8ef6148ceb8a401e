"""The dynamic batcher of the real server: the rules of the simulated one, on asyncio's clock."""

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.serving.model import Arrays, Model
from ascend_lab.serving.station import Policy


class FullError(Exception):
    """As many requests wait as may."""


@dataclass(slots=True)
class Waiting:
    """A request in the queue."""

    since_s: float
    rows: int
    inputs: Arrays
    answer: asyncio.Future[Arrays]


@dataclass(slots=True)
class Batcher:
    """A model's queue and its instances, one thread each; `counts` are the metrics."""

    model: Model
    policy: Policy
    counts: Counter[str]
    queue: deque[Waiting] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    closed: bool = False

    def check(self) -> None:
        """Raise `FullError` if as many requests wait as may."""
        limit = self.policy.levels[0].queue_limit
        if limit and len(self.queue) >= limit:
            raise FullError

    async def ask(self, inputs: Arrays) -> Arrays:
        """Return the outputs of a request; raises as `check`."""
        self.check()
        if all(task.done() for task in self.tasks):
            self.tasks = [asyncio.create_task(self._serve()) for _ in range(self.policy.instances)]
        rows = len(next(iter(inputs.values()))) if self.model.batched else 1
        answer: asyncio.Future[Arrays] = asyncio.get_running_loop().create_future()
        self.queue.append(Waiting(time.perf_counter(), rows, inputs, answer))
        self.news.set()
        return await answer

    def close(self) -> None:
        """Let the instances end when nothing waits any more."""
        self.closed = True
        self.news.set()

    async def _serve(self) -> None:
        while True:
            if not self.queue:
                if self.closed:
                    return
                self.news.clear()
                await self.news.wait()
            elif (left_s := self._left_s()) > 0 and not self.closed:
                self.news.clear()
                try:
                    await asyncio.wait_for(self.news.wait(), left_s)
                except TimeoutError:
                    continue
            else:
                await self._run(self._take())

    def _left_s(self) -> float:
        """Return how long the oldest request may still wait for others."""
        if sum(one.rows for one in self.queue) >= self.model.max_batch:
            return 0.0
        return self.queue[0].since_s + self.policy.max_delay_s - time.perf_counter()

    def _take(self) -> list[Waiting]:
        batch = [self.queue.popleft()]
        rows = batch[0].rows
        while self.queue and rows + self.queue[0].rows <= self.model.max_batch:
            rows += self.queue[0].rows
            batch.append(self.queue.popleft())
        return batch

    async def _run(self, batch: list[Waiting]) -> None:
        """Run a batch in a thread; after an error each request alone, so that one spoils none."""
        start_s = time.perf_counter()
        try:
            found = await asyncio.to_thread(self._together, batch)
        except Exception as error:
            if len(batch) > 1:
                for one in batch:
                    await self._run([one])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        took_us = int((time.perf_counter() - start_s) * 1e6)
        self.counts["exec_count"] += 1
        first = 0
        for one in batch:
            self.counts["count"] += one.rows
            self.counts["compute_infer_duration_us"] += took_us
            self.counts["queue_duration_us"] += int((start_s - one.since_s) * 1e6)
            rows = slice(first, first + one.rows) if self.model.batched else ...
            first += one.rows
            if not one.answer.done():  # a client may have gone
                one.answer.set_result({name: array[rows] for name, array in found.items()})

    def _together(self, batch: list[Waiting]) -> Arrays:
        inputs = batch[0].inputs
        if len(batch) > 1:
            inputs = {name: np.concatenate([one.inputs[name] for one in batch]) for name in inputs}
        return self.model.run(inputs)
