"""The dynamic batcher of the HTTP server, which joins waiting requests into one batch.

A free instance of the model takes the oldest request and the ones after it as long as their rows
fit into a batch. With a delay it first waits for more rows; the delay begins with the arrival of
the oldest request. An instance is a thread, with a task of the event loop that gives it batches.
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
    """The queue is full."""


@dataclass(slots=True)
class QueuedRequest:
    """A request in the queue, and the future for its answer."""

    since_ns: int
    rows: int
    inputs: Arrays
    answer: asyncio.Future[Arrays]


@dataclass(slots=True)
class Batcher:
    """A model's queue and its instances; all methods run in the thread of the event loop."""

    model: Model
    policy: Policy
    statistics: Statistics
    queue: deque[QueuedRequest] = field(default_factory=deque)
    wake_up: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    closed: bool = False
    threads: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.threads = ThreadPoolExecutor(self.policy.instances, "instance")

    def check(self) -> None:
        """Raise `FullError` if the queue is full."""
        limit = self.policy.levels[0].queue_limit
        if limit and len(self.queue) >= limit:
            raise FullError

    async def ask(self, inputs: Arrays) -> Arrays:
        """Return the outputs of a request; raises `FullError` and the errors of the model."""
        self.check()
        # Tasks need a running event loop, so they are not started in __post_init__.
        if all(task.done() for task in self.tasks):
            self.tasks = [asyncio.create_task(self._serve()) for _ in range(self.policy.instances)]
        answer: asyncio.Future[Arrays] = asyncio.get_running_loop().create_future()
        rows = self.model.rows_of(inputs)
        self.queue.append(QueuedRequest(time.perf_counter_ns(), rows, inputs, answer))
        self.wake_up.set()
        return await answer

    def close(self) -> None:
        """Let the instances end when the queue is empty."""
        self.closed = True
        self.wake_up.set()

    async def _serve(self) -> None:
        """Run batches on one instance until the batcher is closed and the queue is empty."""
        while True:
            if not self.queue:
                if self.closed:
                    return
                self.wake_up.clear()
                await self.wake_up.wait()
            elif (remaining_s := self._remaining_delay_s()) > 0 and not self.closed:
                self.wake_up.clear()
                try:
                    await asyncio.wait_for(self.wake_up.wait(), remaining_s)
                # The delay is over: the next iteration takes the waiting requests.
                except TimeoutError:
                    continue
            elif batch := self._next_batch():
                await self._run(batch)

    def _remaining_delay_s(self) -> float:
        """Return the remaining seconds in which the oldest request may wait for others."""
        # A full batch does not wait.
        if sum(waiting.rows for waiting in self.queue) >= self.model.max_batch:
            return 0.0
        waited_s = (time.perf_counter_ns() - self.queue[0].since_ns) * 1e-9
        return self.policy.max_delay_s - waited_s

    def _next_batch(self) -> list[QueuedRequest]:
        """Return the next batch; requests of disconnected clients are dropped."""
        batch: list[QueuedRequest] = []
        rows = 0
        while self.queue:
            # The future of a disconnected client has been cancelled.
            if self.queue[0].answer.done():
                self.queue.popleft()
                continue
            if batch and rows + self.queue[0].rows > self.model.max_batch:
                break
            batch.append(self.queue.popleft())
            rows += batch[-1].rows
        return batch

    async def _run(self, batch: list[QueuedRequest]) -> None:
        """Run a batch in a thread; after an error, run its requests one by one."""
        start_ns = time.perf_counter_ns()
        loop = asyncio.get_running_loop()
        try:
            request_outputs, spent_ns = await loop.run_in_executor(
                self.threads, self._run_joined, batch
            )
        except Exception as error:
            if len(batch) > 1:
                for waiting in batch:
                    await self._run([waiting])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        self.statistics.executed(sum(waiting.rows for waiting in batch), len(batch), spent_ns)
        for waiting, share in zip(batch, request_outputs, strict=True):
            self.statistics.parts["queue"].add(start_ns - waiting.since_ns)
            # The client may have disconnected in the meantime.
            if not waiting.answer.done():
                waiting.answer.set_result(share)

    def _run_joined(self, batch: list[QueuedRequest]) -> tuple[list[Arrays], dict[str, int]]:
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
        request_outputs = []
        first_row = 0
        for waiting in batch:
            # Requests of 2 and 3 rows get rows 0 to 1 and rows 2 to 4 of the outputs.
            rows = slice(first_row, first_row + waiting.rows) if self.model.batched else ...
            request_outputs.append({name: array[rows] for name, array in outputs.items()})
            first_row += waiting.rows
        spent_ns = {
            "compute_input": joined_ns - start_ns,
            "compute_infer": computed_ns - joined_ns,
            "compute_output": time.perf_counter_ns() - computed_ns,
        }
        return request_outputs, spent_ns
