"""Quantities in public data carry their unit in their name."""

import dataclasses
import importlib
import inspect
import pkgutil

import pytest

import ascend_lab
from ascend_lab.machine.chip import load_chip

UNITS = {
    "size": ("_bytes", "_kib"),
    "rate": (
        "_bytes_per_cycle",
        "_bytes_per_s",
        "rate_per_s",
        "error_rate",
        "hit_rate",
        "learning_rate",
    ),
    "bandwidth": ("_bytes_per_cycle", "_bytes_per_s"),
    "time": ("_s",),
    "clock": ("_hz",),
    "latency": ("_cycles", "_s"),
    "startup": ("_cycles", "_s"),
    "overhead": ("_s", "_cycles"),
    "energy": ("_pj", "_j", "_pj_per_byte"),
    "power": ("_w",),
}
"""A name with the word on the left ends in one of the units on the right."""
NUMBERS = ("int", "float", "int | None", "float | None")


def numeric_fields() -> list[tuple[str, str]]:
    found = []
    for info in pkgutil.walk_packages(ascend_lab.__path__, "ascend_lab."):
        module = importlib.import_module(info.name)
        for name, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == info.name and dataclasses.is_dataclass(cls):
                found += [
                    (f"{info.name}.{name}", field.name)
                    for field in dataclasses.fields(cls)
                    if getattr(field.type, "__name__", str(field.type)) in NUMBERS
                ]
    return found


def complaint(name: str) -> str:
    """Return what is wrong with a name, or nothing."""
    words = name.strip("_").split("_")
    for word, units in UNITS.items():
        if word in words and not name.endswith(units):
            return f"{name}: {word} needs one of {', '.join(units)}"
    return ""


def test_numeric_fields_say_their_unit() -> None:
    fields = numeric_fields()
    assert len(fields) > 100
    assert not [f"{owner}.{complaint(name)}" for owner, name in fields if complaint(name)]


@pytest.mark.parametrize("chip", ["Toy", "Ascend310", "Ascend310P3", "Ascend910A", "Ascend910B2"])
def test_numbers_of_chip_files_say_their_unit(chip: str) -> None:
    leaves = [key.rpartition(".")[2] for key in load_chip(chip).facts]
    assert not [complaint(leaf) for leaf in leaves if complaint(leaf)]


def test_a_name_without_unit_is_caught() -> None:
    assert complaint("buffer_size") and complaint("rate") and complaint("latency_ns")
    assert not complaint("buffer_size_bytes") and not complaint("rows")
