"""What a group of lanes does to a memory: sectors touched, banks hit, bytes that move.

Device memory is read in sectors of 32 bytes, four to a line of 128 bytes; on-chip shared memory
is cut into banks that serve one word each per cycle (NVIDIA Nsight Compute documentation).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ascend_lab.errors import MachineError
from ascend_lab.machines.program import Array


@dataclass(frozen=True, slots=True)
class Port:
    """The way to device memory that all machines of a comparison share.

    `rate_bytes_per_cycle` counts reads and writes together; `latency_cycles` passes between the
    request for a byte and its arrival, however few bytes are asked for.
    """

    rate_bytes_per_cycle: float = 32.0
    latency_cycles: int = 300
    sector_bytes: int = 32
    line_bytes: int = 128

    def __post_init__(self) -> None:
        """Refuse rates and sizes that no memory has."""
        if self.rate_bytes_per_cycle <= 0 or self.latency_cycles < 0:
            raise MachineError(
                "a port needs a positive rate and a latency of at least 0",
                f"{self.rate_bytes_per_cycle} bytes/cycle, {self.latency_cycles} cycles",
                "correct them",
            )
        if self.sector_bytes < 1 or self.line_bytes % self.sector_bytes:
            raise MachineError(
                "a line must be a whole number of sectors",
                f"{self.line_bytes} and {self.sector_bytes} bytes",
                "use 128 and 32, for example",
            )


def units_touched(addresses: Array, active: Array, unit_bytes: int) -> Array:
    """Return per group how many distinct aligned units of `unit_bytes` its active lanes touch.

    `addresses` (bytes) and `active` have shape (groups, lanes); the result has shape (groups,).
    With unit_bytes = 32 these are the sectors of a coalesced access.
    """
    idle = np.int64(-1)
    units = np.sort(np.where(active, addresses // unit_bytes, idle), axis=1)
    fresh = np.ones_like(units, dtype=bool)
    fresh[:, 1:] = units[:, 1:] != units[:, :-1]
    return np.asarray(np.count_nonzero(fresh & (units != idle), axis=1))


def distinct_units(addresses: Array, active: Array, unit_bytes: int) -> int:
    """Return how many distinct units all active lanes touch together: a cache that never evicts."""
    return int(np.unique(addresses[active] // unit_bytes).size)


def bank_ways(addresses: Array, active: Array, banks: int = 32, bank_bytes: int = 4) -> Array:
    """Return per group how many cycles a shared-memory access takes: 1 without a conflict.

    A bank serves one word of `bank_bytes` per cycle, to every lane that wants that same word, so
    the answer is the largest number of distinct words wanted from one bank (0 for an idle group).
    """
    words = np.where(active, addresses // bank_bytes, np.int64(-1))
    words = np.sort(words, axis=1)
    fresh = np.ones_like(words, dtype=bool)
    fresh[:, 1:] = words[:, 1:] != words[:, :-1]
    fresh &= words >= 0
    groups = np.broadcast_to(np.arange(words.shape[0])[:, None], words.shape)
    slots = (groups * banks + words % banks)[fresh]
    per_bank = np.bincount(slots, minlength=words.shape[0] * banks)
    return np.asarray(per_bank.reshape(words.shape[0], banks).max(axis=1, initial=0))
