"""Rooflines with one roof per memory level, under which programs are dots.

A program that does `ops` operations and moves `bytes` through a level cannot be faster than

    ops_per_s <= min(peak_ops_per_s, ops / bytes * rate_bytes_per_s)          (Williams et al. 2009)

and every level gives such a bound with its own bytes. The lowest one binds.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, get_args

from ascend_lab.errors import MachineError
from ascend_lab.machine.chip import Chip, model
from ascend_lab.machine.sim import Timeline


@dataclass(frozen=True, slots=True)
class Level:
    """A memory level (or a path) and the bytes per second it delivers."""

    name: str
    rate_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Dot:
    """One program that was run: its operations, its bytes through each level, its time."""

    name: str
    ops: float
    bytes_per_level: Mapping[str, float]
    time_s: float

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
    return min(peak_ops_per_s, ops_per_byte * level.rate_bytes_per_s)


def ridge_point(peak_ops_per_s: float, level: Level) -> float:
    """Return the operations per byte at which a level stops limiting: peak / rate."""
    return peak_ops_per_s / level.rate_bytes_per_s


def binding_level(dot: Dot, peak_ops_per_s: float, levels: Sequence[Level]) -> tuple[str, float]:
    """Return the name of the lowest roof over a program ("peak" if none) and its height."""
    roofs = {"peak": peak_ops_per_s}
    for level in levels:
        roofs[level.name] = attainable(dot.ops_per_byte(level.name), peak_ops_per_s, level)
    name = min(roofs, key=lambda key: roofs[key])
    return name, roofs[name]


# -- a simulated launch under one roofline per memory level ---------------------------------------
# Levels are named by their connections: "L1→L0" fills L0A and L0B, "L2→L1" fills L1, "memory→L2" is
# device memory, both directions. For each of them  time >= bytes / rate, and time >= ops / peak.
INTO_L0 = "L1→L0"
INTO_L1 = "L2→L1"
INTO_L2 = "memory→L2"
L0_PATHS = (("L1", "L0A"), ("L1", "L0B"))


def level_dot(name: str, timeline: Timeline) -> Dot:
    """Return the launch as a dot: its cube operations, its bytes across each level, its time."""
    bytes_of_level = {
        INTO_L0: sum(timeline.path_bytes.get(path, 0) for path in L0_PATHS),
        INTO_L1: timeline.path_bytes.get(("GM", "L1"), 0),
        INTO_L2: timeline.memory_bytes,
    }
    return Dot(name, 2.0 * timeline.macs, bytes_of_level, timeline.time_s)


def levels_of(timeline: Timeline) -> tuple[Level, Level, Level]:
    """Return the bytes/s each level delivers to all cores of a launch together.

    rate into L0 = bytes / sum(bytes_path / rate_path), since A and B take turns on one pipe;
    rate into L1 = n * min(port, L2 / n); rate into L2 = the rate of device memory.
    """
    moved_bytes = [timeline.path_bytes.get(path, 0) for path in L0_PATHS]
    if not sum(moved_bytes):
        raise MachineError("a launch that fills L0", timeline.name, "take a matmul or convolution")
    return chip_levels(timeline.chip, timeline.core_count, moved_bytes[0] / sum(moved_bytes))


def chip_levels(chip: Chip, cores: int = 0, share_of_a: float = 0.5) -> tuple[Level, Level, Level]:
    """Return the three levels of a chip with `cores` at work (0: all).

    `share_of_a` is the share of the bytes into L0 that goes to L0A, between 0 and 1.
    """
    cores = cores or chip.core_count
    to_a, to_b = (chip.path(*path).rate_bytes_per_cycle for path in L0_PATHS)
    l2 = chip.shared_rate_bytes_per_cycle("L2", cores)
    port = min(chip.path("GM", "L1").rate_bytes_per_cycle, l2)
    per_cycle = 1.0 / (share_of_a / to_a + (1.0 - share_of_a) / to_b)
    return (
        Level(INTO_L0, per_cycle * cores * chip.clock_hz),
        Level(INTO_L1, port * cores * chip.clock_hz),
        Level(INTO_L2, chip.device_memory.rate_bytes_per_s),
    )


def energy_parts(timeline: Timeline) -> dict[str, float]:
    """Return pJ per multiply-accumulate by place: cube, each level, and moving C out.

    A byte between GM and a core pays for its path and for L2, a byte of device memory for that.
    """
    chip = timeline.chip
    if not timeline.macs:
        raise MachineError("a launch that multiplies", timeline.name, "take a matmul")
    l2 = chip.l2.energy_pj_per_byte
    energy_of_path = {}
    for path, path_bytes in timeline.path_bytes.items():
        pj_per_byte = chip.paths[path].energy_pj_per_byte
        if "GM" in path:
            pj_per_byte += l2
        energy_of_path[path] = path_bytes * pj_per_byte
    totals = {
        "cube": timeline.macs * chip.mac_energy_pj[timeline.dtype],
        INTO_L0: sum(energy_of_path.pop(path, 0.0) for path in L0_PATHS),
        INTO_L1: energy_of_path.pop(("GM", "L1"), 0.0),
        INTO_L2: timeline.memory_bytes * chip.device_memory.energy_pj_per_byte,
        "C out": sum(energy_of_path.values()),
    }
    return {place: total / timeline.macs for place, total in totals.items()}


# -- numbers of real machines, each with its source and trust, from `facts.toml` ------------------
@dataclass(frozen=True, slots=True)
class Efficiency:
    """Peak operations per second and watt of one kind of unit; None where no source says.

    `kind` is scalar, vector or matrix; `power_w` is the power the whole chip is specified for, not
    a measurement while this unit runs.
    """

    machine: str
    title: str
    kind: str
    number_format: str
    peak_tops: float | None
    power_w: float | None
    sources: tuple[str, ...]
    trust: model.Trust

    @property
    def tops_per_watt(self) -> float | None:
        """Return peak_tops / power_w, or None where either is missing."""
        if self.peak_tops is None or self.power_w is None:
            return None
        return self.peak_tops / self.power_w


@cache
def _data() -> dict[str, Any]:
    """Return the contents of `facts.toml`, which is read once."""
    file = resources.files("ascend_lab").joinpath("lab", "machines", "facts.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def facts_of(machine: str) -> Mapping[str, model.Fact]:
    """Return every number of one real machine, by key; its unit stands in the key."""
    return {
        key: model.Fact(entry["value"], entry["source"], entry["trust"])
        for key, entry in _data()["machine"][machine].items()
        if isinstance(entry, dict) and "value" in entry
    }


def fact(machine: str, key: str) -> float:
    """Return one number of a real machine."""
    return facts_of(machine)[key].value


def source_text(key: str) -> str:
    """Return the full reference behind a source key."""
    return str(_data()["sources"][key])


def tops_per_watt() -> tuple[Efficiency, ...]:
    """Return the rows of the TOPS/W table, in the order of the data file."""
    rows = []
    for entry in _data()["efficiency"]:
        machine = entry["machine"]
        facts = facts_of(machine)
        peak = facts.get(entry["peak"])
        power = facts.get("power_w")
        stated = [fact for fact in (peak, power) if fact]
        rank = get_args(model.Trust).index
        weakest: model.Trust = max((f.trust for f in stated), key=rank, default="published")
        row = Efficiency(
            machine=machine,
            title=_data()["machine"][machine]["title"],
            kind=entry["kind"],
            number_format=entry["format"],
            peak_tops=peak.value if peak else None,
            power_w=power.value if power else None,
            sources=tuple(fact.source for fact in stated),
            trust=weakest,
        )
        rows.append(row)
    return tuple(rows)
