"""Interprets the names in a measured row: the name of its chip and the keys of its attributes.

There are three sorts of attributes: those that the operator has, those that only describe the
measurement (they change no result, or are checked), and all others. A row with one of the others
is refused with a message that names it, since its effect on the time is unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ascend_lab.compare.rows import Work
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import shown
from ascend_lab.machine.chip import PRESETS, Chip, load_chip

# -- chips -----------------------------------------------------------------------------------------
NOT_PRINTED = "bin not printed"
"""The remark on a row whose source does not print the chip's bin (speed grade), such as B2 of B1 to
B4; such a row gets no bound, since another bin may have been measured."""
CHIP_ALIASES = {
    "A3 die, 24 cores": ("Ascend910C", ""),
    "Ascend950 (32 cores)": ("Ascend950PR", ""),
    "A3 die": ("Ascend910C", NOT_PRINTED),
    "A3 (pod)": ("Ascend910C", NOT_PRINTED),
    "A2, 20 cores": ("Ascend910B3", NOT_PRINTED),
    "A2, bin not named": ("Ascend910B2", NOT_PRINTED),
    "A2 (8 cards)": ("Ascend910B2", NOT_PRINTED),
    "unknown 910B4 class": ("Ascend910B4", f"{NOT_PRINTED}, class concluded from its times"),
    "310P class, not named": ("Ascend310P3", NOT_PRINTED),
}
"""A source's name for its chip -> the preset used to time it, and a remark on what is uncertain."""


def chip_of(name: str, own_chip: Chip | None) -> tuple[Chip, tuple[str, ...]]:
    """Return the chip of a row, and a remark if the row does not use a preset's name.

    A row that names the user's own chip, or none, is timed on `own_chip`. All others name a preset,
    or use one of CHIP_ALIASES. Raises `InputError` for unknown names: no chip is guessed.
    """
    # the user's chip may be a preset with a changed rate, under the preset's name
    if own_chip is not None and name in ("", own_chip.name):
        return own_chip, ()
    if name in PRESETS:
        return load_chip(name), ()
    if name in CHIP_ALIASES:
        # a doubt about the bin also takes away the row's bound (see `model.estimate`)
        preset, doubt = CHIP_ALIASES[name]
        return load_chip(preset), (f"chip: as {preset}" + (f", {doubt}" if doubt else ""),)
    raise InputError(f"chip: one of {', '.join(PRESETS)}", shown(name), "none is guessed")


# -- attributes ------------------------------------------------------------------------------------
DESCRIPTIVE_KEYS = ("heads", "kv_heads", "queries", "keys", "beta1", "beta2")
"""Keys that repeat what the shapes say, or change values but no time."""
SCHEDULE_KEYS = (
    *("base", "single", "tile", "grid", "step", "step_k", "mix", "depth", "swizzle", "stagger"),
    *("split_k", "a_in_l1", "kind", "nd2nz"),
)
"""Keys of the schedule of the measured kernel; ours is timed with its own schedule."""
MEASURED_SUFFIXES = ("_us", "_share")
"""Suffixes of keys that hold further measurements of the same run: `mac_us`, `cube_share`."""
PRINTED_PREFIXES = ("printed_", "peer_")
"""Prefixes of keys that hold other numbers which the source printed with its measurement."""
ALSO_CALLED = {("leaky_relu", "slope"): "alpha"}
"""(operator, key) -> the operator's own name of this attribute."""
SAME_AS_FIRST_SIZE = {"batch_matmul": "groups"}
"""Operators -> a key whose value must be the first size of their first input."""


def is_measurement(key: str) -> bool:
    """Tell whether a key is a further measurement of the same run, or a printed figure."""
    return key.endswith(MEASURED_SUFFIXES) or key.startswith(PRINTED_PREFIXES)


@dataclass(slots=True)
class Settings:
    """An operator's row sorted: the operator's attributes, its cores (None: all), and remarks."""

    attributes: dict[str, Any] = field(default_factory=dict)
    cores: int | None = None
    marks: list[str] = field(default_factory=list)


def settings_of(work: Work, chip: Chip, known: Mapping[str, Any]) -> Settings:
    """Sort the attributes of a row into those of the operator, the number of cores, and remarks.

    Raises `UnsupportedError` for an attribute that is none of these.
    """
    settings = Settings()
    schedule = []
    for key, value in work.attributes.items():
        # a row says slope=0.1 where the operator's attribute is alpha
        name = ALSO_CALLED.get((work.operator, key), key)
        if name in known:
            settings.attributes[name] = value
        elif key in SCHEDULE_KEYS:
            schedule.append(key)
        elif key in ("cores", "aiv_cores"):
            settings.cores = cores_of(chip, key, value)
        elif mark := _mark(work, key, value):
            settings.marks.append(mark)
    if schedule:
        # the row is kept with a remark: the schedule is not part of the work
        settings.marks.append(f"schedule of the source not taken ({', '.join(schedule)})")
    return settings


def _mark(work: Work, key: str, value: Any) -> str:
    """Return the remark on a key that is not an attribute of the operator, or "" without one.

    Raises `UnsupportedError` for a key whose effect on the time is unknown.
    """
    if key in DESCRIPTIVE_KEYS or is_measurement(key):
        return ""
    if key == SAME_AS_FIRST_SIZE.get(work.operator):
        _check_first_size(work, key, value)
        return ""
    if key == "layout":
        return f"measured on {value} tensors"
    if key == "approximate" and work.operator == "gelu":
        return "" if value == "tanh" else f"approximate={value} asked for, tanh form computed"
    needed = f"{work.operator}: attributes that the operator has"
    raise UnsupportedError(needed, f"{key}={shown(value)}", "what it changes is unknown")


def _check_first_size(work: Work, key: str, value: Any) -> None:
    """Raise `UnsupportedError` if an attribute contradicts the first size of the first input."""
    if not work.shapes or work.shapes[0][0] != value:
        first_size = work.shapes[0][0] if work.shapes else "none"
        needed = f"{work.operator}: {key} equal to the first size, {first_size}"
        raise UnsupportedError(needed, shown(value), "parts of other sizes have no operator")


def cores_of(chip: Chip, key: str, value: Any) -> int:
    """Return how many AI cores an attribute `cores` or `aiv_cores` means."""
    # a 910B has two vector cores per AI core: 40 of them are 20 AI cores
    per_core = chip.vector_cores_per_core if key == "aiv_cores" else 1
    count = chip.core_count * per_core
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not 1 <= value <= count or value % per_core:
        needed = f"{key} from {per_core} to {count}, what {chip.name} has, in steps of {per_core}"
        raise UnsupportedError(needed, shown(value), "another chip was measured")
    return int(value) // per_core
