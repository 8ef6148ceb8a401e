"""The roofline, one roof per memory level, and programs as dots under each roof.

A program that does `ops` operations and moves `bytes` through a level cannot be faster than

    ops_per_s <= min(peak_ops_per_s, ops / bytes * rate_bytes_per_s)          (Williams et al. 2009)

and every level gives such a bound with its own bytes. The lowest one binds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ascend_lab.errors import MachineError


@dataclass(frozen=True, slots=True)
class Level:
    """A memory level (or a path) and the bytes per second it delivers."""

    name: str
    rate_bytes_per_s: float

    def __post_init__(self) -> None:
        """Refuse a rate that is not positive."""
        _positive(f"level {self.name}", "rate_bytes_per_s", self.rate_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Dot:
    """One program that was run: its operations, its bytes through each level, its time."""

    name: str
    ops: float
    bytes_per_level: Mapping[str, float]
    time_s: float

    def __post_init__(self) -> None:
        """Refuse empty work, and freeze the mapping."""
        _positive(f"dot {self.name}", "ops", self.ops)
        _positive(f"dot {self.name}", "time_s", self.time_s)
        for level, moved in self.bytes_per_level.items():
            if not 0 <= moved < math.inf:
                raise MachineError(
                    f"dot {self.name} needs bytes of at least 0 at {level}", str(moved), "check it"
                )
        object.__setattr__(self, "bytes_per_level", MappingProxyType(dict(self.bytes_per_level)))

    @property
    def ops_per_s(self) -> float:
        """Return the operations per second reached."""
        return self.ops / self.time_s

    def ops_per_byte(self, level: str) -> float:
        """Return operations per byte moved through a level; infinite where nothing moves."""
        moved = self.bytes_per_level.get(level, 0.0)
        return self.ops / moved if moved else math.inf


def attainable(ops_per_byte: float, peak_ops_per_s: float, level: Level) -> float:
    """Return min(peak, ops_per_byte * rate): the operations per second a level allows."""
    _positive("attainable", "peak_ops_per_s", peak_ops_per_s)
    return min(peak_ops_per_s, ops_per_byte * level.rate_bytes_per_s)


def ridge_point(peak_ops_per_s: float, level: Level) -> float:
    """Return the operations per byte at which a level stops limiting: peak / rate."""
    _positive("ridge_point", "peak_ops_per_s", peak_ops_per_s)
    return peak_ops_per_s / level.rate_bytes_per_s


def binding_level(dot: Dot, peak_ops_per_s: float, levels: Sequence[Level]) -> tuple[str, float]:
    """Return the name of the lowest roof over a program ("peak" if none) and its height."""
    roofs = {"peak": peak_ops_per_s}
    for level in levels:
        roofs[level.name] = attainable(dot.ops_per_byte(level.name), peak_ops_per_s, level)
    name = min(roofs, key=lambda key: roofs[key])
    return name, roofs[name]


def roof_share(dot: Dot, peak_ops_per_s: float, levels: Sequence[Level]) -> float:
    """Return how much of its lowest roof a program reaches, 0 to 1 if model and program agree."""
    return dot.ops_per_s / binding_level(dot, peak_ops_per_s, levels)[1]


def _positive(who: str, what: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise MachineError(f"{who} needs {what} above 0", str(value), "check it")
