"""Defines the records of a simulated server: arrivals, service times, steps and versions.

For example, 20 requests a second at a server whose batches of b take 5 + 2 b milliseconds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ascend_lab.deploy.serving.queues import Policy

Floats = NDArray[np.float64]
CHUNK = 4096
"""Random numbers drawn in one call of NumPy, to save time."""
LAWS: dict[str, Callable[[np.random.Generator, float, int], Floats]] = {
    "exponential": lambda rng, shape, n: rng.standard_exponential(n),
    "deterministic": lambda rng, shape, n: np.ones(n),
    # A gamma distribution of mean 1 has the scale 1 / shape.
    "erlang": lambda rng, shape, n: rng.gamma(shape, 1 / shape, n),
    "gamma": lambda rng, shape, n: rng.gamma(shape, 1 / shape, n),
}
"""Distributions with mean 1; the squared coefficient of variation of the last two is 1/shape."""


@dataclass(frozen=True, slots=True)
class Service:
    """The service time of batches: `mean_s + per_item_s * b` on average, with a distribution.

    `seconds`, listed by batch size from 1, replace that line.
    """

    law: str = "deterministic"
    mean_s: float = 0.0
    per_item_s: float = 0.0
    shape: float = 1.0
    seconds: tuple[float, ...] = ()

    def batch_s(self, items: int) -> float:
        """Return the mean seconds of a batch."""
        # Batch sizes begin with 1, indices with 0.
        if self.seconds:
            return self.seconds[items - 1]
        return self.mean_s + self.per_item_s * items

    def noise(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield random factors with mean 1, one for each batch."""
        # Endless, as the number of batches is not known in advance.
        while True:
            yield from LAWS[self.law](rng, self.shape, CHUNK).tolist()

    def sampler(self, rng: np.random.Generator, max_batch: int) -> Callable[[int], float]:
        """Return a function that draws the seconds of a batch, given its size."""
        # A table by batch size, as the same few sizes occur again and again.
        means_s = [0.0, *(self.batch_s(size) for size in range(1, max_batch + 1))]
        factors = self.noise(rng)
        return lambda items: means_s[items] * next(factors)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The arrivals of requests: a Poisson process, listed times, or a closed system of clients.

    In a closed system each client waits for its answer, thinks, and asks again. `items` lists the
    sizes of requests, all equally likely.
    """

    law: str = "poisson"
    rate_per_s: float = 1.0
    clients: int = 1
    think_s: float = 0.0
    think_law: str = "deterministic"
    items: tuple[int, ...] = (1,)
    times_s: tuple[float, ...] = ()


SINGLE_INSTANCE = Policy()
"""One instance that serves requests one by one."""


@dataclass(frozen=True, slots=True)
class Step:
    """A model of an ensemble, which gets a request when all steps listed in `after` have ended."""

    name: str
    service: Service
    policy: Policy = SINGLE_INSTANCE
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a model, which fails on a share of its requests."""

    name: str
    error_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Canary:
    """The rollout of a new version: its share of users in each stage, and limits that end it.

    A stage lasts for `window` answers of the new version. `users` is the number of users, who all
    send requests equally often.
    """

    stages: tuple[float, ...] = (0.05, 0.25, 1.0)
    window: int = 200
    max_error_rate: float = 0.01
    max_p95_s: float = float("inf")
    users: int = 1000
    # The salt of the hash determines which users see the new version first.
    salt: str = "canary"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A simulation: one or more steps of an ensemble, or two versions that a canary compares."""

    arrivals: Arrivals
    steps: tuple[Step, ...]
    requests: int
    seed: int = 0
    warmup: int = 0
    versions: tuple[Version, ...] = ()
    canary: Canary | None = None
