"""The dynamic batcher of a real server: requests that wait together run together.

A free instance takes the oldest request and, in order, those behind it while their rows fit. With
a delay it first waits for more rows; the delay counts from the arrival of the oldest request. An
instance is a thread, and a task of the event loop that hands batches to it.
"""

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.deploy.serving.opened import Model
from ascend_lab.deploy.serving.queues import Policy
from ascend_lab.deploy.serving.statistics import Statistics
from ascend_lab.deploy.serving.tensors import Arrays


class FullError(Exception):
    """As many requests wait as are allowed to."""


@dataclass(slots=True)
class Waiting:
    """A request in the queue, and the future in which its client waits for the answer."""

    since_ns: int
    rows: int
    inputs: Arrays
    answer: asyncio.Future[Arrays]


@dataclass(slots=True)
class Batcher:
    """A model's queue and its instances; all methods belong to the event loop's thread."""

    model: Model
    policy: Policy
    statistics: Statistics
    queue: deque[Waiting] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    closed: bool = False
    threads: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.threads = ThreadPoolExecutor(self.policy.instances, "instance")

    def check(self) -> None:
        """Raise `FullError` if as many requests wait as are allowed to."""
        limit = self.policy.levels[0].queue_limit
        if limit and len(self.queue) >= limit:
            raise FullError

    async def ask(self, inputs: Arrays) -> Arrays:
        """Return the outputs of a request; raises as `check` and as the model does."""
        self.check()
        # started here and not in __post_init__: tasks need the loop, which runs only by now
        if all(task.done() for task in self.tasks):
            self.tasks = [asyncio.create_task(self._serve()) for _ in range(self.policy.instances)]
        answer: asyncio.Future[Arrays] = asyncio.get_running_loop().create_future()
        rows = self.model.rows_of(inputs)
        self.queue.append(Waiting(time.perf_counter_ns(), rows, inputs, answer))
        self.news.set()
        return await answer

    def close(self) -> None:
        """Let the instances end once the queue is empty."""
        self.closed = True
        self.news.set()

    async def _serve(self) -> None:
        """Run batches on one instance until the batcher is closed and the queue is empty."""
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
                # the delay is over: the next round sees that, and takes what there is
                except TimeoutError:
                    continue
            elif batch := self._take():
                await self._run(batch)

    def _left_s(self) -> float:
        """Return how long the oldest request may still wait for others."""
        # a full batch has nothing to wait for
        if sum(waiting.rows for waiting in self.queue) >= self.model.max_batch:
            return 0.0
        waited_s = (time.perf_counter_ns() - self.queue[0].since_ns) * 1e-9
        return self.policy.max_delay_s - waited_s

    def _take(self) -> list[Waiting]:
        """Return the next batch; requests whose clients have gone are dropped."""
        batch: list[Waiting] = []
        rows = 0
        while self.queue:
            # its client has gone: the future was cancelled together with the task that waited
            if self.queue[0].answer.done():
                self.queue.popleft()
                continue
            if batch and rows + self.queue[0].rows > self.model.max_batch:
                break
            batch.append(self.queue.popleft())
            rows += batch[-1].rows
        return batch

    async def _run(self, batch: list[Waiting]) -> None:
        """Run a batch in a thread; after an error each request alone: only the faulty one fails."""
        start_ns = time.perf_counter_ns()
        loop = asyncio.get_running_loop()
        try:
            shares, spent_ns = await loop.run_in_executor(self.threads, self._together, batch)
        except Exception as error:
            if len(batch) > 1:
                for waiting in batch:
                    await self._run([waiting])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        self.statistics.executed(sum(waiting.rows for waiting in batch), len(batch), spent_ns)
        for waiting, share in zip(batch, shares, strict=True):
            self.statistics.parts["queue"].add(start_ns - waiting.since_ns)
            # its client may have gone meanwhile
            if not waiting.answer.done():
                waiting.answer.set_result(share)

    def _together(self, batch: list[Waiting]) -> tuple[list[Arrays], dict[str, int]]:
        """Return the outputs of each request of a batch, and its nanoseconds by part."""
        start_ns = time.perf_counter_ns()
        inputs = batch[0].inputs
        if len(batch) > 1:
            inputs = {
                name: np.concatenate([waiting.inputs[name] for waiting in batch]) for name in inputs
            }
        joined_ns = time.perf_counter_ns()
        outputs = self.model.run(inputs)
        computed_ns = time.perf_counter_ns()
        shares = []
        first_row = 0
        for waiting in batch:
            # requests of 2 and 3 rows get rows 0 to 1 and 2 to 4 of the outputs
            rows = slice(first_row, first_row + waiting.rows) if self.model.batched else ...
            shares.append({name: array[rows] for name, array in outputs.items()})
            first_row += waiting.rows
        spent_ns = {
            "compute_input": joined_ns - start_ns,
            "compute_infer": computed_ns - joined_ns,
            "compute_output": time.perf_counter_ns() - computed_ns,
        }
        return shares, spent_ns
