"""Simulates a canary release: a new version gets a growing share of users or is withdrawn.

A router splits users by a hash, so that a user sees one version as long as the share is constant,
and users of the new version keep it when the share grows. After every window of answers of the new
version, a guard checks their error rate and their 95th percentile: the share grows by a stage, or
goes back to 0 for good. Requests that were sent already are answered by the version they were sent
to, as both versions stay loaded.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ascend_lab.deploy.serving.scenario import Canary, Scenario, Version

BUCKETS = 10_000
"""Number of values of a user's hash: shares are multiples of 1 / 10,000."""


def bucket_of(user: int | str, salt: str = "canary") -> int:
    """Return a user's hash below `BUCKETS`: the same on every machine, another for each salt."""
    # Python's hash() of texts is different in every process.
    digest = hashlib.blake2b(f"{salt}:{user}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % BUCKETS


def guard(latency_s: Sequence[float], failed: Sequence[bool], canary: Canary) -> str:
    """Return the reason why a window of answers exceeds the canary's limits, "" if it does not."""
    # With 200 answers and a limit of 0.01, three errors are too many: 0.015 > 0.01.
    if (rate := float(np.mean(failed))) > canary.max_error_rate:
        return f"error rate {rate:.4f} above {canary.max_error_rate:g}"
    if (p95_s := float(np.percentile(latency_s, 95))) > canary.max_p95_s:
        return f"p95 {p95_s:.6g} s above {canary.max_p95_s:g} s"
    return ""


@dataclass(slots=True)
class Rollout:
    """The state of a canary release: its stage, the routes of requests and counts of answers.

    `users` and `failure_draws` have a user and a random number for each request, `buckets` the hash
    of each user. In lists of two, the first entry is the old version, the second the new one.
    """

    versions: tuple[Version, ...]
    canary: Canary
    users: list[int]
    failure_draws: list[float]
    buckets: list[int]
    stage: int = 0
    ended: str = ""
    sent: dict[int, int] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    answers: list[int] = field(default_factory=lambda: [0, 0])
    errors: list[int] = field(default_factory=lambda: [0, 0])
    window: tuple[list[float], list[bool]] = field(default_factory=lambda: ([], []))

    @property
    def share(self) -> float:
        """Return the present share of users of the new version."""
        return 0.0 if self.ended == "rolled back" else self.canary.stages[self.stage]

    def route(self, job: int) -> int:
        """Return the version that answers a request: 0 for the old one, 1 for the new one."""
        # A share of 5 % has buckets 0 to 499, one of 25 % buckets 0 to 2,499: users of the new
        # version at 5 % keep it at 25 %.
        self.sent[job] = int(self.buckets[self.users[job]] < round(self.share * BUCKETS))
        return self.sent[job]

    def count_answer(self, now: float, job: int, version: int, latency_s: float) -> None:
        """Count an answer; after a window of the new version's answers, decide about its share."""
        failed = self.failure_draws[job] < self.versions[version].error_rate
        self.answers[version] += 1
        self.errors[version] += failed
        if version == 0 or self.ended:
            return
        self.window[0].append(latency_s)
        self.window[1].append(failed)
        if len(self.window[0]) == self.canary.window:
            self._decide(now)

    def _decide(self, now: float) -> None:
        """Raise the share, promote the new version or roll it back, by the last window."""
        reason = guard(*self.window, self.canary)
        share = self.share
        self.window = ([], [])
        if reason:
            self.ended = "rolled back"
        elif self.stage + 1 == len(self.canary.stages):
            self.ended = "promoted"
        else:
            self.stage += 1
        decision = reason or self.ended or f"share raised to {self.share:g}"
        self.history.append({"time_s": now, "share": share, "decision": decision})

    def summary(self) -> dict[str, Any]:
        """Return the outcome as plain data."""
        rows = {
            version.name: {"answered": self.answers[n], "errors": self.errors[n]}
            for n, version in enumerate(self.versions)
        }
        outcome = self.ended or "undecided"
        return {"outcome": outcome, "share": self.share, "versions": rows, "history": self.history}


def rollout_of(scenario: Scenario, canary: Canary, rng: np.random.Generator) -> Rollout:
    """Return the canary release of a scenario before its first request."""
    total = scenario.warmup + scenario.requests
    users: list[int] = rng.integers(0, canary.users, total).tolist()
    failure_draws: list[float] = rng.random(total).tolist()
    buckets = [bucket_of(user, canary.salt) for user in range(canary.users)]
    return Rollout(scenario.versions, canary, users, failure_draws, buckets)
