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
