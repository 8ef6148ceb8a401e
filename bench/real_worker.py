"""One of the processes of `real-cluster`: measures all-reduces, computes, and steps a small model.

Started by `bench.real_cluster`, never by hand; rank 0 writes what was measured as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
AllReduce = Callable[[Floats, str], None]
"""In place, of a contiguous array; "sum" or "max"."""

FLOAT_BYTES = 4
READY_BYTES = 4
SIZES_BYTES = tuple(2**k for k in range(12, 24))
"""4 KiB to 8 MiB."""
WARM_UP = 2
REPEATS = 15
WIDTHS = (256, 512, 512, 512, 512, 512, 10)
BATCH = 64
CAPS_BYTES = (0, 2**21, 2**40)
"""A bucket is closed when it holds so many bytes: every tensor alone, 2 MiB, all in one."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a worker is told: place among the workers, way to the others, where to write."""

    backend: str
    rank: int
    ranks: int
    folder: str
    limit_s: float


def main(settings: Settings) -> None:
    """Join the others, measure, let rank 0 write `result.json`, and leave."""
    watchdog = threading.Timer(settings.limit_s, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    rank, reduce, leave = (_torch if settings.backend == "torch" else _mpi)(settings)
    try:
        found = measure(reduce, rank)
    finally:
        leave()
    if rank == 0:
        Path(settings.folder, "result.json").write_text(json.dumps(found), "utf-8")


def measure(reduce: AllReduce, rank: int) -> dict[str, Any]:
    """Return seconds of all-reduces by bytes, of computing alone, and of a step by bucket cap.

    Computing alone ends with an all-reduce of `READY_BYTES`: a step too waits for the slowest rank.
    """
    model = Model(rank)
    ways = [model.buckets(cap) for cap in CAPS_BYTES]
    for buckets in ways:
        model.check(reduce, buckets)
    tensors = [np.zeros(size // FLOAT_BYTES, np.float32) for size in SIZES_BYTES]
    works: list[Callable[[], None]] = [partial(reduce, values, "sum") for values in tensors]
    works.append(partial(model.alone, reduce))
    works += [partial(model.step, reduce, buckets) for buckets in ways]
    times_s = medians_s(reduce, works)
    count = len(SIZES_BYTES)
    return {
        "rows": list(zip(SIZES_BYTES, times_s[:count], strict=True)),
        "compute_s": times_s[count],
        "steps": [
            {"buckets_bytes": _sizes(buckets), "time_s": time_s}
            for buckets, time_s in zip(ways, times_s[count + 1 :], strict=True)
        ],
    }


def medians_s(reduce: AllReduce, works: Sequence[Callable[[], None]]) -> list[float]:
    """Time works that begin on all ranks together: medians of the slowest rank's seconds.

    They take turns, so that what else the machine does falls on all of them alike.
    """
    ready = np.zeros(READY_BYTES // FLOAT_BYTES, np.float32)
    times = np.zeros((len(works), WARM_UP + REPEATS), np.float32)
    for turn in range(WARM_UP + REPEATS):
        for i, work in enumerate(works):
            reduce(ready, "sum")
            started = time.perf_counter()
            work()
            times[i, turn] = time.perf_counter() - started
    reduce(times, "max")
    return [float(median) for median in np.median(times[:, WARM_UP:], axis=1)]


def _sizes(buckets: Sequence[slice]) -> list[int]:
    return [(bucket.stop - bucket.start) * FLOAT_BYTES for bucket in buckets]


# -- a small model --------------------------------------------------------------------------------
class Model:
    """A perceptron of six layers with ReLU; its gradients lie in one array, last layer first."""

    def __init__(self, rank: int) -> None:
        """Draw weights alike on all ranks and a batch of this rank's own."""
        rng = np.random.default_rng(0)
        own = np.random.default_rng(1 + rank)
        shapes = list(pairwise(WIDTHS))
        self.weights = [
            rng.standard_normal(s, np.float32) / np.float32(s[0] ** 0.5) for s in shapes
        ]
        self.x = own.standard_normal((BATCH, WIDTHS[0]), np.float32)
        self.target = own.standard_normal((BATCH, WIDTHS[-1]), np.float32)
        sizes = [a * b for a, b in reversed(shapes)]
        self.edges = [0, *np.cumsum(sizes).tolist()]
        self.flat = np.zeros(self.edges[-1], np.float32)

    def backward(self, ready: Callable[[int], None] = lambda tensor: None) -> None:
        """Fill the gradients of a squared error; `ready(i)` is told of each as it is there."""
        inputs = [self.x]
        for weight in self.weights[:-1]:
            inputs.append(np.maximum(inputs[-1] @ weight, 0))
        error = (inputs[-1] @ self.weights[-1] - self.target) / BATCH
        for i, layer in enumerate(reversed(range(len(self.weights)))):
            place = self.flat[self.edges[i] : self.edges[i + 1]]
            np.matmul(inputs[layer].T, error, out=place.reshape(self.weights[layer].shape))
            ready(i)
            if layer:
                error = (error @ self.weights[layer].T) * (inputs[layer] > 0)

    def buckets(self, cap_bytes: int) -> list[slice]:
        """Return slices of the gradients, each closed once it holds `cap_bytes`."""
        found = []
        start = 0
        for edge in self.edges[1:]:
            if (edge - start) * FLOAT_BYTES >= cap_bytes or edge == self.edges[-1]:
                found.append(slice(start, edge))
                start = edge
        return found

    def step(self, reduce: AllReduce, buckets: Sequence[slice]) -> None:
        """Compute the gradients and add each bucket over all ranks as soon as it is full."""
        closing = {bucket.stop: bucket for bucket in buckets}

        def ready(tensor: int) -> None:
            bucket = closing.get(self.edges[tensor + 1])
            if bucket is not None:
                reduce(self.flat[bucket], "sum")

        self.backward(ready)

    def alone(self, reduce: AllReduce) -> None:
        """Compute the gradients and wait until all ranks have."""
        self.backward()
        reduce(np.zeros(READY_BYTES // FLOAT_BYTES, np.float32), "sum")

    def check(self, reduce: AllReduce, buckets: Sequence[slice]) -> None:
        """Raise `RuntimeError` unless the buckets' sums are those of one all-reduce of all."""
        self.backward()
        whole = self.flat.copy()
        reduce(whole, "sum")
        self.step(reduce, buckets)
        if not np.allclose(self.flat, whole, rtol=1e-4, atol=1e-6):
            raise RuntimeError("buckets and one all-reduce disagree")


# -- ways to the others ---------------------------------------------------------------------------
def _torch(settings: Settings) -> tuple[int, AllReduce, Callable[[], None]]:
    """Join by gloo: the ranks meet in a file and talk over the loopback interface."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    kinds = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
    dist.init_process_group(
        "gloo",
        init_method=Path(settings.folder, "meeting").as_uri(),
        rank=settings.rank,
        world_size=settings.ranks,
        timeout=timedelta(seconds=settings.limit_s),
    )

    def reduce(values: Floats, kind: str) -> None:
        dist.all_reduce(torch.from_numpy(values), kinds[kind])

    return settings.rank, reduce, dist.destroy_process_group


def _mpi(settings: Settings) -> tuple[int, AllReduce, Callable[[], None]]:
    """Join by MPI, whose launcher gave every process its rank."""
    from mpi4py import MPI

    kinds = {"sum": MPI.SUM, "max": MPI.MAX}
    world = MPI.COMM_WORLD

    def reduce(values: Floats, kind: str) -> None:
        world.Allreduce(MPI.IN_PLACE, values, kinds[kind])

    return world.Get_rank(), reduce, lambda: None


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
