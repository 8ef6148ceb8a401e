"""A new version beside the old one: who gets which, and when it is all called off.

A router splits users by a hash, so that one user sees one version while the share stands, and who
saw the new one keeps it when the share grows. After every window of the new version's answers a
guard looks at their errors and their p95: the share grows by a stage, or goes back to 0 for good.
Requests already sent are answered by whom they were sent to: both versions stay loaded.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BUCKETS = 10_000
"""Of a hash: shares are multiples of one in so many."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a model that errs on a share of its requests."""

    name: str
    error_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Canary:
    """Shares the new version gets, one a window of its answers, and what stops it.

    `users` send the requests, each as often as the others.
    """

    stages: tuple[float, ...] = (0.05, 0.25, 1.0)
    window: int = 200
    max_error_rate: float = 0.01
    max_p95_s: float = float("inf")
    users: int = 1000
    salt: str = "canary"


def bucket_of(user: int | str, salt: str = "canary") -> int:
    """Return a user's place among `BUCKETS`: the same on every machine, another for each salt."""
    digest = hashlib.blake2b(f"{salt}:{user}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % BUCKETS


def guard(latency_s: Sequence[float], failed: Sequence[bool], canary: Canary) -> str:
    """Return why a window of answers breaks the canary's limits, "" if it does not."""
    if (rate := float(np.mean(failed))) > canary.max_error_rate:
        return f"error rate {rate:.4f} above {canary.max_error_rate:g}"
    if (p95_s := float(np.percentile(latency_s, 95))) > canary.max_p95_s:
        return f"p95 {p95_s:.6g} s above {canary.max_p95_s:g} s"
    return ""


@dataclass(slots=True)
class Rollout:
    """A canary on its way: `route` says who answers (0 the old, 1 the new), `answered` listens."""

    versions: tuple[Version, ...]
    canary: Canary
    rng: np.random.Generator
    total: int
    stage: int = 0
    ended: str = ""
    sent: dict[int, int] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    answers: list[int] = field(default_factory=lambda: [0, 0])
    errors: list[int] = field(default_factory=lambda: [0, 0])
    users: list[int] = field(init=False)
    fails: list[float] = field(init=False)
    places: list[int] = field(init=False)
    window: tuple[list[float], list[bool]] = field(default_factory=lambda: ([], []))

    def __post_init__(self) -> None:
        self.users = self.rng.integers(0, self.canary.users, self.total).tolist()
        self.fails = self.rng.random(self.total).tolist()
        self.places = [bucket_of(n, self.canary.salt) for n in range(self.canary.users)]

    @property
    def share(self) -> float:
        """Share of the users that the new version gets now."""
        return 0.0 if self.ended == "rolled back" else self.canary.stages[self.stage]

    def route(self, job: int) -> int:
        """Return which version answers a request."""
        self.sent[job] = int(self.places[self.users[job]] < round(self.share * BUCKETS))
        return self.sent[job]

    def answered(self, now: float, job: int, place: int, latency_s: float) -> None:
        """Take note of an answer; after a window of the new version's, decide."""
        failed = self.fails[job] < self.versions[place].error_rate
        self.answers[place] += 1
        self.errors[place] += failed
        if not place or self.ended:
            return
        self.window[0].append(latency_s)
        self.window[1].append(failed)
        if len(self.window[0]) < self.canary.window:
            return
        why, share = guard(*self.window, self.canary), self.share
        self.window = ([], [])
        if why:
            self.ended = "rolled back"
        elif self.stage + 1 == len(self.canary.stages):
            self.ended = "promoted"
        else:
            self.stage += 1
        said = why or self.ended or f"share raised to {self.share:g}"
        self.history.append({"time_s": now, "share": share, "decision": said})

    def summary(self) -> dict[str, Any]:
        """Return the outcome as plain data."""
        rows = {
            version.name: {"answered": self.answers[n], "errors": self.errors[n]}
            for n, version in enumerate(self.versions)
        }
        outcome = self.ended or "undecided"
        return {"outcome": outcome, "share": self.share, "versions": rows, "history": self.history}
