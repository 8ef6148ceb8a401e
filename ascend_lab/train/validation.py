"""The training model held against published measurements, row by row, hits and misses alike.

SGD with momentum, fp16 with fp32 masters; eight devices share gradients in buckets of 25 MiB over
the preset 910A server. No constant of the model is fitted to a row.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ascend_lab.chip import Chip, load_chip
from ascend_lab.cluster import load_topology
from ascend_lab.graph import zoo
from ascend_lab.train.profile import StepProfile, profile_training
from ascend_lab.train.timeline import all_reduce_cost, step_timeline

CHIP, SERVER = "Ascend910A", "910a-server"
NORMS = (".bn",)


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One published row and the model's answer.

    `norms_s` are the kernels with batch norms in them.
    """

    name: str
    devices: int
    batch_per_device: int
    published_images_per_s: float
    model_images_per_s: float
    published_efficiency: float | None
    model_efficiency: float
    norms_s: float

    @property
    def error(self) -> float:
        """model / published - 1, of images per second."""
        return self.model_images_per_s / self.published_images_per_s - 1.0

    @property
    def model_s(self) -> float:
        """Seconds of the model's step."""
        return self.devices * self.batch_per_device / self.model_images_per_s


def published_rows() -> list[dict[str, Any]]:
    """Return the published rows as they are written down."""
    text = (resources.files("ascend_lab.train") / "published.toml").read_text("utf-8")
    rows: list[dict[str, Any]] = tomllib.loads(text)["row"]
    return rows


def training_validation_rows(
    profiles: Mapping[int, StepProfile] | None = None, chip: Chip | None = None
) -> list[TrainingRow]:
    """Return all rows with the model's numbers; `profiles` by batch save the simulation."""
    chip = chip or load_chip(CHIP)
    known = dict(profiles or {})
    cost = all_reduce_cost(load_topology(SERVER))
    found = []
    for row in published_rows():
        batch, devices = row["batch_per_device"], row["devices"]
        if batch not in known:
            known[batch] = profile_training(zoo.build(row["model"], batch), chip, optimizer="sgd")
        profile = known[batch]
        step_s = step_timeline(profile, cost).step_s if devices > 1 else profile.step_s
        found.append(
            TrainingRow(
                row["name"], devices, batch, row["images_per_s"], devices * batch / step_s,
                row.get("efficiency"), profile.step_s / step_s,
                norms_s(profile),
            )
        )  # fmt: skip
    return found


def norms_s(profile: StepProfile) -> float:
    """Return the seconds of kernels with nodes of batch norms in them, running averages too."""
    rows = profile.operators
    return sum(r.time_s for r in rows if any(m in name for m in NORMS for name in r.nodes))


def training_validation_table(rows: list[TrainingRow] | None = None) -> str:
    """Return the rows as text: images per second and their error, milliseconds, scaling."""
    rows = training_validation_rows() if rows is None else rows
    head = f"{'row':<33}{'model/s':>8}{'publ./s':>8}{'error':>6}"
    lines = [f"{head}{'step':>10}{'norms':>10}{'scaling':>8}{'publ.':>6}"]
    for row in rows:
        wanted = "-" if row.published_efficiency is None else f"{row.published_efficiency:.2f}"
        rates = f"{row.model_images_per_s:>8.0f}{row.published_images_per_s:>8.0f}"
        times = f"{row.error:>+6.0%}{row.model_s * 1e3:>8.2f}ms{row.norms_s * 1e3:>8.2f}ms"
        lines.append(f"{row.name:<33}{rates}{times}{row.model_efficiency:>8.2f}{wanted:>6}")
    return "\n".join(lines)
