"""Chips as data: five presets and a loader for your own TOML file."""

# fmt: off
# isort: off
from ascend_lab.chip.loader import PRESETS, chip_from_dict, load_chip, presets
from ascend_lab.chip.model import (
    BLOCK_BYTES, DTYPE_BYTES, Chip, Fact, Link, Memory, Path, VectorCost,
)

__all__ = [
    "BLOCK_BYTES", "DTYPE_BYTES", "PRESETS", "Chip", "Fact", "Link", "Memory", "Path",
    "VectorCost", "chip_from_dict", "load_chip", "presets",
]
