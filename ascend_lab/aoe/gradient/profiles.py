"""Profiles in the knowledge bank: what backward is like, not how it was split.

A split holds for one cluster; the profile of a network on one device holds for every cluster, so
that another number of devices is planned at once, without simulating again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from ascend_lab import __version__
from ascend_lab.aoe.bank import BankEntry, BankKey, Knowledge, canonical, chip_digest
from ascend_lab.aoe.bank.records import digest
from ascend_lab.aoe.gradient.rows import Gradient
from ascend_lab.chip import Chip
from ascend_lab.errors import InputError
from ascend_lab.graph import Graph
from ascend_lab.graph.lower import piece_of

PROFILE_VERSION = 1
"""Raised whenever training steps are profiled in another way: older profiles are no hits then."""


class StepTimes(Protocol):
    """What a profiler of training steps returns (see `train.profile`)."""

    @property
    def forward_s(self) -> float:
        """Seconds of forward."""

    @property
    def backward_s(self) -> float:
        """Seconds of backward."""

    @property
    def update_s(self) -> float:
        """Seconds of the optimiser."""

    @property
    def gradients(self) -> Iterable[Any]:
        """Rows with a name, `ready_s` and `size_bytes`, in backward order."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One training step on one device: seconds, and the gradients in backward order."""

    forward_s: float
    backward_s: float
    update_s: float
    gradients: tuple[Gradient, ...]

    def step_s(self, end_s: float) -> float:
        """Return the time of a step whose gradients are all exchanged `end_s` into backward."""
        return self.forward_s + max(self.backward_s, end_s) + self.update_s


def profile_of(step: StepTimes, dtype: str = "fp16") -> Profile:
    """Return a measured or simulated step as a profile; its gradients may carry a `dtype`."""
    rows = tuple(
        Gradient(row.name, float(row.ready_s), int(row.size_bytes), getattr(row, "dtype", dtype))
        for row in step.gradients
    )
    return Profile(step.forward_s, step.backward_s, step.update_s, rows)


def key_of_profile(graph: Graph, chip: Chip, settings: str) -> BankKey:
    """Return the bank's key: the network with its batch, the chip, and how it is trained.

    Equal networks have one key, whatever they and their nodes are called.
    """
    network = digest(piece_of(graph, graph.nodes).key)
    problem = canonical({"graph": network, "training": settings, "version": PROFILE_VERSION})
    return BankKey(chip.name, chip_digest(chip), chip.core_count, "profile", "training", problem)


def keep_profile(knowledge: Knowledge, key: BankKey, found: Profile, clock_hz: float) -> str:
    """Write a profile to the custom bank and return what that was: "add", "update", "reserved"."""
    cycles = round((found.forward_s + found.backward_s + found.update_s) * clock_hz)
    rows = [[g.name, g.ready_s, g.size_bytes, g.dtype] for g in found.gradients]
    times = [found.forward_s, found.backward_s, found.update_s]
    total = sum(g.size_bytes for g in found.gradients)
    features = tuple(math.log2(max(n, 1)) for n in (len(rows), total))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    data = {"times_s": times, "gradients": rows}
    entry = BankEntry(
        key, data, cycles, cycles, None, False, "simulated", 0, 1, __version__, now,
        features=features,
    )  # fmt: skip
    return knowledge.keep(entry)


def known_profile(knowledge: Knowledge, key: BankKey) -> Profile | None:
    """Return the profile the banks hold under a key, or None."""
    found = knowledge.find(key)
    return _profile(found[0].schedule) if found is not None else None


def _profile(data: Any) -> Profile | None:
    """Return the profile of an entry; None if it is none, so that it is made anew."""
    try:
        forward_s, backward_s, update_s = map(float, data["times_s"])
        rows = tuple(Gradient(str(n), float(r), int(s), str(d)) for n, r, s, d in data["gradients"])
    except (KeyError, TypeError, ValueError, InputError):
        return None
    return Profile(forward_s, backward_s, update_s, rows)
