"""Numbers of real machines, each with its source and trust, and machines built from them.

The numbers live in `facts.toml`, read when first asked for.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, cast

from ascend_lab.errors import MachineError
from ascend_lab.lab.machines.lanes import Port
from ascend_lab.lab.machines.matrix_units import Cube, Systolic
from ascend_lab.lab.machines.simd import Scalar, Simd
from ascend_lab.lab.machines.warps import Simt

Trust = Literal["published", "derived", "assumed"]


@dataclass(frozen=True, slots=True)
class MachineFact:
    """One number of a real machine: value (unit in its key), source key, trust."""

    value: float
    source: str
    trust: Trust


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
    trust: Trust

    @property
    def tops_per_watt(self) -> float | None:
        """Return peak_tops / power_w, or None where either is missing."""
        if self.peak_tops is None or self.power_w is None:
            return None
        return self.peak_tops / self.power_w


@cache
def _data() -> dict[str, Any]:
    file = resources.files("ascend_lab").joinpath("lab", "machines", "facts.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def real_machines() -> list[str]:
    """Return the names of the real machines of the data file."""
    return list(_data()["machine"])


def facts_of(machine: str) -> Mapping[str, MachineFact]:
    """Return every number of one real machine, by key."""
    table = _data()["machine"]
    if machine not in table:
        raise MachineError(
            f"facts are kept for {', '.join(table)}", repr(machine), "choose one of them"
        )
    entries = {key: entry for key, entry in table[machine].items() if isinstance(entry, dict)}
    return {
        key: MachineFact(entry["value"], entry["source"], entry["trust"])
        for key, entry in entries.items()
        if "value" in entry
    }


def fact(machine: str, key: str) -> float:
    """Return one number of a real machine; `MachineError` names what is known about it."""
    facts = facts_of(machine)
    if key not in facts:
        raise MachineError(
            f"{machine} has {', '.join(facts)}", repr(key), "no source gives it, or misspelt"
        )
    return facts[key].value


def source_text(key: str) -> str:
    """Return the full reference behind a source key."""
    return str(_data()["sources"][key])


def tops_per_watt() -> tuple[Efficiency, ...]:
    """Return the rows of the TOPS/W table, in the order of the data file."""
    rows = []
    for entry in _data()["efficiency"]:
        machine = entry["machine"]
        facts = facts_of(machine)
        used = [facts[key] for key in (entry["peak"], "power_w") if key in facts]
        peak = facts.get(entry["peak"])
        power = facts.get("power_w")
        rank = {"published": 0, "derived": 1, "assumed": 2}
        trust = max((f.trust for f in used), key=lambda t: rank[t], default="published")
        rows.append(
            Efficiency(
                machine,
                _data()["machine"][machine]["title"],
                entry["kind"],
                entry["format"],
                peak.value if peak else None,
                power.value if power else None,
                tuple(f.source for f in used),
                cast(Trust, trust),
            )
        )
    return tuple(rows)


def preset_names() -> list[str]:
    """Return the names that `preset` knows."""
    return [*_TOYS, *_data()["preset"]]


_TOYS: dict[str, type[Scalar | Simd | Simt | Systolic | Cube]] = {
    "scalar": Scalar,
    "simd": Simd,
    "simt": Simt,
    "systolic": Systolic,
    "cube": Cube,
}


def preset(name: str) -> Scalar | Simd | Simt | Systolic | Cube:
    """Return a machine by name: the toys, or a core of a real chip built from the data file.

    A real core gets its share of the chip's memory rate: rate / (cores * clock).
    """
    if name in _TOYS:
        return _TOYS[name]()
    if name not in _data()["preset"]:
        raise MachineError(
            f"presets are {', '.join(preset_names())}", repr(name), "choose one of them"
        )
    entry = _data()["preset"][name]
    machine = entry["machine"]
    port = Port(bytes_per_cycle(machine), int(fact(machine, "memory_latency_cycles")))
    if entry["kind"] == "simt":
        return Simt(
            name=name,
            lanes=int(fact(machine, "fp32_lanes") / fact(machine, "cores")),
            max_warps=int(fact(machine, "max_warps_per_core")),
            registers=int(fact(machine, "register_file_bytes")) // 4,
            shared_bytes=int(fact(machine, "shared_bytes")),
            arith_cycles=int(fact(machine, "arith_cycles")),
            shared_cycles=int(fact(machine, "shared_latency_cycles")),
            port=port,
        )
    if entry["kind"] == "cube":
        return Cube(name=name, local_bytes=int(fact(machine, "l1_bytes")), port=port)
    return Simd(
        name=name,
        vector_bytes=int(fact(machine, "vector_bytes")),
        cycles_per_repeat=int(fact(machine, "cycles_per_repeat")),
        startup_cycles=int(fact(machine, "vector_startup_cycles")),
        local_bytes=int(fact(machine, "ub_bytes")),
        port=port,
    )


def bytes_per_cycle(machine: str) -> float:
    """Return a core's share of the memory rate: rate / (cores * clock), in bytes per cycle."""
    rate = fact(machine, "memory_rate_bytes_per_s")
    return rate / (fact(machine, "cores") * fact(machine, "clock_hz"))
