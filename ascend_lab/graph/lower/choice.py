"""How a piece is to be computed where the default is not wanted: what a tuner decides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ascend_lab.errors import InputError
from ascend_lab.kernels import GemmSchedule


@dataclass(frozen=True, slots=True)
class Choice:
    """A tiling of the cube's kernel, or the steps of a schedule (JSON of `dsl.Schedule`)."""

    tiling: GemmSchedule | None = None
    steps: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the choice as plain data."""
        if self.tiling is not None:
            return {"tiling": self.tiling.as_dict()}
        return {"steps": json.loads(self.steps)["steps"]}


def choice_of(data: Mapping[str, Any], chip_name: str) -> Choice:
    """Return the choice that `Choice.as_dict` wrote; raise `InputError` for anything else."""
    try:
        if "tiling" in data:
            return Choice(tiling=GemmSchedule(**data["tiling"]))
        return Choice(steps=json.dumps({"chip": chip_name, "steps": data["steps"]}))
    except (KeyError, TypeError) as error:
        raise InputError(
            "a tiling or the steps of a schedule", str(data)[:80], "tune it again"
        ) from error
