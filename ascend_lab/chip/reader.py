"""Reads a parsed chip file number by number, and refuses what cannot be true."""

from __future__ import annotations

from typing import Any

from ascend_lab.chip.model import Fact
from ascend_lab.errors import ChipError
from ascend_lab.limits import shown

# Largest credible value by the last word of a key: a slip of units (bits, MHz) lands above it.
LIMITS = {
    "hz": 1e10,
    "bytes": 1e14,
    "rate_bytes_per_cycle": 1e5,
    "rate_bytes_per_s": 1e14,
    "cycles": 1e5,
    "s": 1.0,
    "count": 4096,
    "w": 1e4,
    "energy_pj_per_byte": 1e5,
    "energy_pj": 1e5,
    "vector_per_core": 64,
    "m": 1024,
    "k": 1024,
    "n": 1024,
}
BUFFER_LIMIT_BYTES = 1e8
"""On-chip memories are megabytes; the simulator allocates them."""

# Slower than this no instruction would end: again a slip of units.
LEAST = {"hz": 1e3, "rate_bytes_per_cycle": 1e-3, "rate_bytes_per_s": 1e3}
ZERO_ALLOWED = ("_cycles", "latency_s", "overhead_s")
VALUE_KEYS = {"value", "source", "trust"}


class Reader:
    """Walks the parsed file, checks as it reads, and remembers every fact."""

    def __init__(self, file: str, data: dict[str, Any]) -> None:
        self.file, self.data = file, data
        self.facts: dict[str, Fact] = {}
        self.sources: dict[str, str] = {}
        self.sources = self.table("sources")
        for name, text in self.sources.items():
            if not isinstance(text, str):
                raise self.fail(f"sources.{name}", "a text", text, "say where the numbers are from")

    def fail(self, key: str, needed: str, got: object, remedy: str) -> ChipError:
        """Return the error for `key`: what it needs, what it got, what to do."""
        return ChipError(f"{self.file}: {key} needs {needed}", shown(got), remedy)

    def table(self, key: str, known: set[str] | None = None) -> dict[str, Any]:
        """Return the table at dotted `key`; refuse unknown names in it."""
        node: Any = self.data
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise self.fail(key, "a table", node, "copy the section from a preset chip file")
        if known is not None:
            for name in node:
                if name not in known:
                    raise self.fail(
                        f"{key}.{name}",
                        "a known key",
                        name,
                        f"known keys: {', '.join(sorted(known))}",
                    )
        return node

    def number(self, key: str) -> float:
        """Return the number at dotted `key`, finite, credible and with a known source."""
        parent, _, leaf = key.rpartition(".")
        entry = self.table(parent).get(leaf)
        if not isinstance(entry, dict) or set(entry) != VALUE_KEYS:
            raise self.fail(
                key, '{value = ..., source = "...", trust = "..."}', entry, "give all three"
            )
        value, source, trust = entry["value"], entry["source"], entry["trust"]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value != value:
            raise self.fail(key, "a number", value, "write it without quotes")
        zero_ok = any(leaf.endswith(z) for z in ZERO_ALLOWED)
        if value < 0 or (value == 0 and not zero_ok):
            raise self.fail(key, "a positive number", value, "check the sign and the unit")
        least, limit = _range(key)
        if not least <= value <= limit:
            needed = f"at most {limit:g}" if value > limit else f"at least {least:g}"
            raise self.fail(key, needed, value, "check the unit in the key's name")
        if trust not in ("published", "derived", "assumed"):
            raise self.fail(key, "trust published, derived or assumed", trust, "choose one")
        if not isinstance(source, str) or source not in self.sources:
            raise self.fail(key, "a source listed in [sources]", source, "add it to [sources]")
        self.facts[key] = Fact(float(value), source, trust)
        return float(value)

    def integer(self, key: str) -> int:
        """Return the whole number at dotted `key`."""
        value = self.number(key)
        if value != int(value):
            raise self.fail(key, "a whole number", value, "round it")
        return int(value)


def _range(key: str) -> tuple[float, float]:
    """Return the credible range of a number from the last word of its key."""
    leaf = key.rpartition(".")[2]
    if key.startswith("buffer."):
        return 0.0, BUFFER_LIMIT_BYTES
    limit = next((v for k, v in LIMITS.items() if leaf == k or leaf.endswith("_" + k)), 1e15)
    return LEAST.get(leaf, 0.0), limit
