"""Loads the description of a chip: a preset such as the Ascend910B2, or a file of your own.

A chip file is TOML. Every number states its source and how far it can be trusted:

    [clock]
    hz = { value = 1.8e9, source = "...", trust = "published" }

The loader checks each entry and returns a `Chip`. A file may name another chip as its `base`; then
it contains only the entries that differ.
"""

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from importlib import resources
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any, TypeVar, get_args

# fmt: off
# isort: off
from ascend_lab.machine.chip.model import (
    BLOCK_BYTES, DTYPE_BYTES, Chip, Fact, Link, Memory, Path, Trust, VectorCost,
)
from ascend_lab.errors import ChipError
from ascend_lab.limits import shown, toml_of
# fmt: on
# isort: on

__all__ = [
    "BLOCK_BYTES",
    "DTYPE_BYTES",
    "PRESETS",
    "Chip",
    "Fact",
    "Link",
    "Memory",
    "Path",
    "VectorCost",
    "chip_from_dict",
    "load_chip",
    "presets",
]

MAX_VALUES = {
    "hz": 1e10,
    "bytes": 1e14,
    "rate_bytes_per_cycle": 1e5,
    "rate_bytes_per_s": 1e14,
    "peak_bytes_per_s": 1e14,
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
"""End of a key -> its largest credible value: a rate of 1.2e12 bytes per cycle is surely meant per
second."""
BUFFER_LIMIT_BYTES = 1e8
"""Largest size of an on-chip memory, which the simulator allocates as an array."""
MIN_VALUES = {"hz": 1e3, "rate_bytes_per_cycle": 1e-3, "rate_bytes_per_s": 1e3}
"""Last part of a key -> its smallest credible value: a clock of 910 Hz is surely meant in MHz, and
a simulation would never end."""
ZERO_ALLOWED = ("_cycles", "latency_s", "overhead_s", "queued_s", "barrier_s")
"""Ends of keys whose value may be 0, such as costs; rates, sizes and counts must be above 0."""
VALUE_KEYS = {"value", "source", "trust"}


class Reader:
    """Reads entries of a parsed chip file, checks each, and collects them as facts."""

    def __init__(self, file: str, data: dict[str, Any]) -> None:
        self.file = file
        self.data = data
        self.facts: dict[str, Fact] = {}
        self.sources: dict[str, str] = self.table("sources")
        for name, text in self.sources.items():
            if not isinstance(text, str):
                raise self.error(
                    f"sources.{name}", "a string", text, "say where the numbers are from"
                )
        # about.SOURCE lists the chips that a source is about; for others its numbers are borrowed
        self.about = self.table("about", set(self.sources)) if "about" in data else {}
        for name, chips in self.about.items():
            if not isinstance(chips, list):
                raise self.error(f"about.{name}", "a list of chips", chips, "put it in brackets")

    def error(self, key: str, needed: str, got: object, remedy: str) -> ChipError:
        """Return the error for `key`: what is needed, what was given, and a remedy."""
        return ChipError(f"{self.file}: {key} needs {needed}", shown(got), remedy)

    def table(self, key: str, known: set[str] | None = None) -> dict[str, Any]:
        """Return the table at dotted `key`; raise `ChipError` for a name that is not `known`."""
        node: Any = self.data
        for name in key.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise self.error(key, "a table", node, "copy the section from a preset chip file")
        for name in node:
            if known is not None and name not in known:
                remedy = f"known keys: {', '.join(sorted(known))}"
                raise self.error(f"{key}.{name}", "a known key", name, remedy)
        return node

    def number(self, key: str) -> float:
        """Return the number at dotted `key`, finite, credible and with a known source."""
        parent, _, leaf = key.rpartition(".")
        entry = self.table(parent).get(leaf)
        if not isinstance(entry, dict) or set(entry) != VALUE_KEYS:
            raise self.error(
                key, '{value = ..., source = "...", trust = "..."}', entry, "give all three"
            )
        value = entry["value"]
        source = entry["source"]
        trust = entry["trust"]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (isinstance(value, float) and math.isnan(value)):
            raise self.error(key, "a number", value, "write digits, without quotes")
        may_be_zero = any(leaf.endswith(end) for end in ZERO_ALLOWED)
        if value < 0 or (value == 0 and not may_be_zero):
            raise self.error(key, "a positive number", value, "check the sign and the unit")
        minimum, maximum = _credible_range(key)
        if not minimum <= value <= maximum:
            needed = f"at most {maximum:g}" if value > maximum else f"at least {minimum:g}"
            raise self.error(key, needed, value, "check the unit in the key's name")
        if trust not in get_args(Trust):
            needed = "trust published, derived, borrowed or assumed"
            raise self.error(key, needed, trust, "choose one")
        if not isinstance(source, str) or source not in self.sources:
            raise self.error(key, "a source listed in [sources]", source, "add it to [sources]")
        chip_name = self.data.get("name")
        is_borrowed = chip_name not in self.about.get(source, [chip_name])
        # A number of another chip counts as borrowed, unless it is only assumed, which is weaker.
        effective_trust: Trust = "borrowed" if is_borrowed and trust != "assumed" else trust
        self.facts[key] = Fact(float(value), source, effective_trust)
        return float(value)

    def integer(self, key: str) -> int:
        """Return the whole number at dotted `key`."""
        value = self.number(key)
        if value != int(value):
            raise self.error(key, "a whole number", value, "round it")
        return int(value)


def _credible_range(key: str) -> tuple[float, float]:
    """Return the smallest and the largest credible value of a number.

    The largest follows from the end of the key, the smallest from the exact last part of the key.
    """
    leaf = key.rpartition(".")[2]
    if key.startswith("buffer."):
        return 0.0, BUFFER_LIMIT_BYTES
    maximum = 1e15
    for key_end, value in MAX_VALUES.items():
        if leaf == key_end or leaf.endswith("_" + key_end):
            maximum = value
            break
    return MIN_VALUES.get(leaf, 0.0), maximum


# -- the chip --------------------------------------------------------------------------------------
PRESETS = (
    *("Ascend310", "Ascend310DK", "Ascend310P3", "Ascend910A"),
    *("Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910B4", "Ascend910C", "Ascend950PR"),
    "Toy",
)
PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")
SPACES = ("GM", "L1", "L0A", "L0B", "L0C", "UB", "BT")
REQUIRED_BUFFERS = ("L1", "L0A", "L0B", "L0C", "UB")

Record = TypeVar("Record", Path, Memory, Link, VectorCost)
CUBE_FORMATS = ("fp16", "int8", "bf16", "fp32")
"""Number formats that a cube can multiply."""
OPTIONAL_CUBE_FORMATS = ("bf16", "fp32")
"""Formats among them that a chip may lack."""

AI_CPU = ("overhead_s", "rate_bytes_per_s")
SECTIONS = {
    "core": {"count", "vector_per_core"},
    "clock": {"hz"},
    "cube": {"head_cycles"} | set(CUBE_FORMATS) | {f"{d}_energy_pj" for d in CUBE_FORMATS},
    "vector": {"repeat_bytes", "energy_pj_per_byte"},
    "scalar": {"cycles"},
    "sync": {
        "flag_cycles",
        "barrier_cycles",
        "all_cores_cycles",
        "cross_flag_cycles",
        "event_ids_count",
    },
    "launch": {"overhead_s", "queued_s", "barrier_s", "mix_s", "library_fetch_s"},
    "ai_cpu": set(AI_CPU),
    "power": {"typical_w"},
}
"""Sections of a chip file with a fixed set of keys -> these keys."""
OPTIONAL_SECTIONS = {"ai_cpu", "power", "power.typical_w", "link", "base", "about"}


def _merge(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a base chip, overridden by those of a file.

    Tables are merged key by key. An empty table in the file removes that of the base. A number
    replaces a number together with its source and trust.
    """
    merged = dict(base)
    for key, value in overrides.items():
        base_value = merged.get(key)
        is_fact = isinstance(value, dict) and "value" in value
        if isinstance(base_value, dict) and isinstance(value, dict) and value and not is_fact:
            merged[key] = _merge(base_value, value)
        else:
            merged[key] = value
    return merged


def _cube_shapes(reader: Reader) -> dict[str, tuple[int, int, int]]:
    """Read, by number format, the sides (m, k, n) of the product that the cube does in a cycle."""
    shapes = {}
    for dtype in CUBE_FORMATS:
        if dtype in OPTIONAL_CUBE_FORMATS and dtype not in reader.table("cube"):
            continue
        reader.table(f"cube.{dtype}", {"m", "k", "n"})
        fractal = (16, BLOCK_BYTES // DTYPE_BYTES[dtype], 16)  # k is 16 in fp16, 32 in int8
        m, k, n = (reader.integer(f"cube.{dtype}.{axis}") for axis in "mkn")
        for axis, side, got in zip("mkn", fractal, (m, k, n), strict=True):
            # fp32 takes a fractal in several steps of k: 4 of its 8 columns a cycle on the 910B
            is_partial_k = dtype == "fp32" and axis == "k" and 0 < got < side and side % got == 0
            if got != side and not is_partial_k:
                needed = f"{side}, the side of a fractal"
                raise reader.error(f"cube.{dtype}.{axis}", needed, got, "layouts have no other")
        shapes[dtype] = (m, k, n)
    return shapes


def _buffer_sizes(reader: Reader, section: str) -> dict[str, int]:
    """Read `size_bytes` of each on-chip memory in the section "buffer" or "alignment".

    Raises `ChipError` if a buffer is missing that every chip has.
    """
    sizes = {}
    for name in reader.table(section, set(SPACES) - {"GM"}):
        reader.table(f"{section}.{name}", {"size_bytes"})
        sizes[name] = reader.integer(f"{section}.{name}.size_bytes")
    if section == "buffer":
        for name in REQUIRED_BUFFERS:
            if name not in sizes:
                raise reader.error(f"buffer.{name}", "an entry", None, "add its size_bytes")
    return sizes


def _paths(reader: Reader) -> dict[tuple[str, str], Path]:
    """Read the data paths; raise `ChipError` if one is missing that every program needs."""
    paths = {}
    for name in reader.table("path"):
        src, arrow, dst = name.partition("->")
        key = f"path.{name}"
        if not arrow or src not in SPACES or dst not in SPACES:
            raise reader.error(key, f"SRC->DST of {', '.join(SPACES)}", name, "correct the name")
        entry = reader.table(key, {field.name for field in fields(Path)})
        pipe = entry.get("pipe")
        unit = entry.get("unit")
        if pipe not in PIPES:
            raise reader.error(f"{key}.pipe", f"one of {', '.join(PIPES)}", pipe, "correct it")
        if unit not in ("core", "cube", "vector"):
            raise reader.error(f"{key}.unit", "core, cube or vector", unit, "correct it")
        paths[src, dst] = _record(reader, Path, key, pipe=pipe, unit=unit)
    # On combined cores the vector unit reads the cube's results from L0C. On separate cores they
    # are copied to GM, where the vector cores read them.
    out_of_l0c = ("L0C", "UB" if reader.data["combined"] else "GM")
    to_cube = (("GM", "L1"), ("L1", "L0A"), ("L1", "L0B"))
    for hop in (("GM", "UB"), ("UB", "GM"), *to_cube, out_of_l0c):
        if hop not in paths:
            raise reader.error(f"path.{'->'.join(hop)}", "an entry", None, "add the path")
    return paths


def _record(reader: Reader, kind: type[Record], key: str, /, **texts: Any) -> Record:
    """Read a record of type `kind`, whose fields are the entries of the table at `key`.

    All fields are numbers, except those in `texts`, which the caller has read and checked.
    """
    types = {field.name: field.type for field in fields(kind)}
    # `peak_bytes_per_s` is read by `_peak_rate`
    other_keys = {"peak_bytes_per_s"} if key == "memory" else set()
    reader.table(key, set(types) | other_keys)
    read_as: dict[Any, Callable[[str], Any]] = {int: reader.integer, float: reader.number}
    numbers = {}
    for name, number_type in types.items():
        if name not in texts:
            numbers[name] = read_as[number_type](f"{key}.{name}")
    return kind(**texts, **numbers)


def _memory(reader: Reader, key: str, *kinds: str) -> Memory:
    """Read a memory that all cores share; its type is by default the first of `kinds`."""
    kind = reader.table(key).get("kind", kinds[0])
    if kind not in kinds:
        raise reader.error(f"{key}.kind", " or ".join(kinds), kind, "correct it")
    return _record(reader, Memory, key, kind=kind)


def _peak_rate(reader: Reader) -> float:
    """Read the peak rate of the memory interface, by default the rate that kernels reach."""
    reached = reader.number("memory.rate_bytes_per_s")
    if "peak_bytes_per_s" not in reader.table("memory"):
        return reached
    peak = reader.number("memory.peak_bytes_per_s")
    if peak < reached:
        needed = f"at least memory.rate_bytes_per_s, {reached:g}"
        raise reader.error("memory.peak_bytes_per_s", needed, peak, "correct one of them")
    return peak


def _launch_costs(
    reader: Reader, paths: Mapping[tuple[str, str], Path], l2: Memory
) -> dict[str, float]:
    """Read the costs of starting kernels; two of them have defaults from other numbers of the file.

    A queued start costs by default as much as a cold one. The barrier inside a super kernel costs
    by default as much as that between the phases of a kernel. Combined cores cannot set each
    other's flags, so that they synchronise through memory: every core stores a word, then reads the
    words of all cores until they are there.
    """
    cold = reader.number("launch.overhead_s")
    clock_hz = reader.number("clock.hz")
    barrier = reader.integer("sync.all_cores_cycles") / clock_hz
    if reader.data["combined"]:
        store = paths["UB", "GM"]
        load = paths["GM", "UB"]
        words_bytes = BLOCK_BYTES * reader.integer("core.count")  # a block for each core's word
        store_cycles = store.startup_cycles + l2.latency_cycles
        poll_cycles = (
            load.startup_cycles + words_bytes / load.rate_bytes_per_cycle + l2.latency_cycles
        )
        # two polls: the first one comes too early, before all words are there
        barrier = (store_cycles + 2 * poll_cycles) / clock_hz
    launch_s = {"overhead_s": cold}
    default = {"queued_s": cold, "barrier_s": barrier}
    for name, value in default.items():
        key = f"launch.{name}"
        launch_s[name] = reader.number(key) if name in reader.table("launch") else value
        reader.facts.setdefault(key, Fact(value, "OWN", "assumed"))
    reader.sources["OWN"] = "Derived from other numbers of the same file as it is read"
    has_ai_cpu = "ai_cpu" in reader.data
    has_fetch = "library_fetch_s" in reader.table("launch")
    return {
        "launch_overhead_s": cold,
        # No start costs more than a cold one, even if a file lowers only the cold start.
        "queued_launch_s": min(cold, launch_s["queued_s"]),
        "barrier_s": min(cold, launch_s["barrier_s"]),
        "mix_start_s": 0.0 if reader.data["combined"] else reader.number("launch.mix_s"),
        "library_fetch_s": reader.number("launch.library_fetch_s") if has_fetch else 0.0,
        **{f"ai_cpu_{n}": reader.number(f"ai_cpu.{n}") if has_ai_cpu else 0.0 for n in AI_CPU},
    }


def _vector_unit(reader: Reader) -> tuple[int, int]:
    """Read the bytes of a vector repeat and the vector cores of an AI core."""
    size = reader.integer("vector.repeat_bytes")
    count = reader.integer("core.vector_per_core")
    if size % BLOCK_BYTES:
        raise reader.error("vector.repeat_bytes", f"a multiple of {BLOCK_BYTES}", size, "round it")
    if reader.data["combined"] and count != 1:
        raise reader.error("core.vector_per_core", "1 where combined = true", count, "correct one")
    return size, count


def _vector_costs(reader: Reader) -> dict[str, VectorCost]:
    """Read the cost of each vector instruction; those without an entry take that of `default`."""
    known = set(tomllib.loads(_preset_text("common"))["vector_op"])
    names = reader.table("vector_op", known)
    costs = {op: _record(reader, VectorCost, f"vector_op.{op}") for op in names}
    if "default" not in costs:
        raise reader.error("vector_op.default", "an entry", None, "add the default cost")
    return costs


def _links(reader: Reader) -> dict[str, Link]:
    """Read the links between devices; there are none if the file has no section about them."""
    names = reader.table("link") if "link" in reader.data else {}
    return {name: _record(reader, Link, f"link.{name}") for name in names}


def _check_sections(reader: Reader) -> None:
    """Check that all sections and their keys are known; check name, summary and `combined`."""
    known_names = set(SECTIONS) | OPTIONAL_SECTIONS
    known_names |= {"name", "summary", "combined", "sources", "buffer"}
    known_names |= {"alignment", "path", "l2", "memory", "vector_op"}
    for name in reader.data:
        if name not in known_names:
            remedy = f"known: {', '.join(sorted(known_names))}"
            raise reader.error(name, "a known section", name, remedy)
    for section, keys in SECTIONS.items():
        if section in reader.data or section not in OPTIONAL_SECTIONS:
            reader.table(section, keys)
    for key in ("name", "summary"):
        if not isinstance(reader.data.get(key), str):
            raise reader.error(key, "a string", reader.data.get(key), "add it")
    if not isinstance(reader.data.get("combined"), bool):
        raise reader.error("combined", "true or false", reader.data.get("combined"), "correct it")


def chip_from_dict(data: dict[str, Any], file: str = "chip", family: str = "") -> Chip:
    """Build a `Chip` from parsed TOML; raise `ChipError` with file, key and remedy.

    `family` is the preset that the chip is made from, by default the chip's own name.
    """
    reader = Reader(file, data)
    _check_sections(reader)
    buffers = _buffer_sizes(reader, "buffer")
    repeat_bytes, vector_cores = _vector_unit(reader)
    cube = _cube_shapes(reader)
    paths = _paths(reader)
    l2 = _memory(reader, "l2", "cache", "buffer")
    return Chip(
        name=data["name"],
        family=family or data["name"],
        summary=data["summary"],
        combined=data["combined"],
        core_count=reader.integer("core.count"),
        vector_cores_per_core=vector_cores,
        clock_hz=reader.number("clock.hz"),
        cube=MappingProxyType(cube),
        cube_head_cycles=reader.integer("cube.head_cycles"),
        vector_bytes_per_repeat=repeat_bytes,
        vector_costs=MappingProxyType(_vector_costs(reader)),
        scalar_cycles=reader.integer("scalar.cycles"),
        flag_cycles=reader.integer("sync.flag_cycles"),
        barrier_cycles=reader.integer("sync.barrier_cycles"),
        all_cores_cycles=reader.integer("sync.all_cores_cycles"),
        max_repeat=255,  # the repeat count of a vector instruction is a byte
        event_ids=reader.integer("sync.event_ids_count"),
        cross_flag_cycles=0 if data["combined"] else reader.integer("sync.cross_flag_cycles"),
        **_launch_costs(reader, paths, l2),
        buffers=MappingProxyType(buffers),
        alignment=MappingProxyType(_buffer_sizes(reader, "alignment")),
        paths=MappingProxyType(paths),
        l2=l2,
        device_memory=_memory(reader, "memory", "memory"),
        memory_peak_bytes_per_s=_peak_rate(reader),
        mac_energy_pj=MappingProxyType({d: reader.number(f"cube.{d}_energy_pj") for d in cube}),
        vector_energy_pj_per_byte=reader.number("vector.energy_pj_per_byte"),
        power_w=reader.number("power.typical_w") if "power" in data else None,
        links=MappingProxyType(_links(reader)),
        facts=MappingProxyType(reader.facts),
        sources=MappingProxyType(reader.sources),
    )


def _with_base(data: dict[str, Any], file: str) -> dict[str, Any]:
    """Return a file's tables, merged over those of the preset that its `base` names.

    `borrows = true` in the file says that the base is another chip: its numbers count as borrowed.
    """
    base = data.pop("base", None)
    borrows = data.pop("borrows", False)
    if not isinstance(borrows, bool) or (borrows and base is None):
        needed = f"{file}: borrows as true or false, true beside a base"
        raise ChipError(needed, shown(borrows), "correct or remove it")
    if base is None:
        return data
    if base not in (*PRESETS, "common"):
        raise ChipError(f"{file}: base names a preset", shown(base), f"use {', '.join(PRESETS)}")
    return _merge(_preset(base, as_borrowed=borrows), data)


def _with_borrowed_trust(node: Any) -> Any:
    """Return a table of a chip file with the trust of every number lowered to "borrowed".

    Assumed numbers are less trusted than borrowed ones and stay as they are.
    """
    if not isinstance(node, dict):
        return node
    if "value" in node and node.get("trust") != "assumed":
        return {**node, "trust": "borrowed"}
    return {key: _with_borrowed_trust(value) for key, value in node.items()}


def _preset_text(name: str) -> str:
    """Return the TOML text of a preset."""
    return (resources.files("ascend_lab.machine.chip") / "presets" / f"{name}.toml").read_text(
        "utf-8"
    )


def _preset(name: str, as_borrowed: bool = False) -> dict[str, Any]:
    """Return the tables of a preset, merged over those of its own base."""
    data = tomllib.loads(_preset_text(name))
    return _with_base(_with_borrowed_trust(data) if as_borrowed else data, f"{name}.toml")


@cache
def _load_preset(name: str) -> Chip:
    return chip_from_dict(_preset(name), f"{name}.toml")


def load_chip(name_or_file: str | FilePath) -> Chip:
    """Return a preset by name ("Ascend910A") or a chip read from a .toml file of your own.

    Raises `ChipError` for an unknown name, an unreadable file or a wrong entry.
    """
    name = str(name_or_file)
    if name in PRESETS:
        return _load_preset(name)
    if not name.endswith(".toml"):
        raise ChipError("a preset name or a .toml file", repr(name), _suggestion(name))
    data = toml_of(name, "a readable chip file", ChipError)
    if data.get("base") in PRESETS and "name" not in data:
        # With the name of its base, its times could be taken for those of the base.
        raise ChipError(f"{name}: name", "none", "give your chip a name of its own")
    # A chip with borrowed numbers is another one than its base.
    base = data.get("base")
    family = base if base in PRESETS and not data.get("borrows") else ""
    if base in PRESETS:
        # The base's own summary would speak of its cores, not of those of the file.
        data.setdefault("summary", f"based on {base}")
    return chip_from_dict(_with_base(data, name), name, family)


def _suggestion(name: str) -> str:
    """Return a remedy for an unknown name: the most similar preset, then all of them."""
    from difflib import get_close_matches

    # Without "ascend", which nearly all share: "Ascend999" would be similar to every preset.
    by_suffix = {preset.lower().removeprefix("ascend"): preset for preset in PRESETS}
    close = get_close_matches(name.lower().removeprefix("ascend"), by_suffix, 1)
    question = f"did you mean {by_suffix[close[0]]}? " if close else ""
    return f"{question}presets: {', '.join(PRESETS)}"


def presets() -> Mapping[str, Chip]:
    """Return all preset chips by name."""
    return {name: _load_preset(name) for name in PRESETS}
