"""`run` and `simulate` of ONNX models with operators that no graph holds: placed, named, timed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.cli.common import chip_with, refuse_idle, shapes_of
from ascend_lab.errors import UnsupportedError

if TYPE_CHECKING:
    from ascend_lab.graph.hosted import Hosted

WHOLE = "for models whose operators the compiler takes"


def placed(
    arguments: argparse.Namespace, given: Mapping[str, Any] | None, error: UnsupportedError
) -> Hosted:
    """Return the model of the arguments placed on core, AI CPU and host; raise `error` if not."""
    from ascend_lab.graph.hosted import place_model
    from ascend_lab.media import UNITS

    if not arguments.model.endswith(".onnx"):
        raise error
    refuse_idle(arguments, WHOLE, "--tuned", "--bank")
    chip = chip_with(arguments)
    vpc = UNITS.get(chip.name, {}).get("VPC")
    try:
        return place_model(
            arguments.model, chip, given=given, shapes=shapes_of(arguments),
            batch=arguments.batch, dtype=getattr(arguments, "dtype", "fp16"),
            seed=getattr(arguments, "seed", 0),
            media_pixels_per_s=vpc.pixels_per_s if vpc else 0.0,
        )  # fmt: skip
    except UnsupportedError as other:
        raise error from other


def values_of(hosted: Hosted) -> dict[str, Any]:
    """Return the outputs as arrays that a file can hold; raise `UnsupportedError` for lists."""
    found = {}
    for name, value in hosted.run().items():
        if not isinstance(value, np.ndarray | np.generic):
            kind = type(value).__name__
            raise UnsupportedError(f"{hosted.name}: outputs that are tensors", f"{name}, a {kind}")
        array = np.asarray(value)
        found[name] = array.astype(str) if array.dtype.kind == "O" else array
    return found
