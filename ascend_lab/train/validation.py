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
EXPLANATION = """\
One kernel updates all parameters, another all running averages. Half of a step are the batch norms
and what is fused with them ("norms"), bound by memory and vector units: the sums read the tensor
once, the change of every element once more, forward and backward. What the vendor's kernels save
there (sums out of a convolution's own tile, masks of one bit) is not modelled. Scaling comes out
higher than published: reading images, waiting hosts and memory bandwidth shared by compute and
network are not modelled."""


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

    @property
    def published_s(self) -> float:
        """Seconds of the published step."""
        return self.devices * self.batch_per_device / self.published_images_per_s


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
    """Return the rows as text, and what explains the error."""
    rows = training_validation_rows() if rows is None else rows
    head = f"{'row':<36}{'model':>10}{'publ.':>10}{'error':>8}{'step':>11}{'publ.':>10}"
    lines = [f"{head}{'norms':>10}{'scaling':>9}{'publ.':>7}"]
    for row in rows:
        wanted = "-" if row.published_efficiency is None else f"{row.published_efficiency:.2f}"
        rates = f"{row.model_images_per_s:>6.0f}/s  {row.published_images_per_s:>6.0f}/s"
        steps = f"{row.model_s * 1e3:>8.2f} ms{row.published_s * 1e3:>7.2f} ms"
        rest = f"{row.norms_s * 1e3:>7.2f} ms{row.model_efficiency:>9.2f}{wanted:>7}"
        lines.append(f"{row.name:<36}{rates}  {row.error:>+6.0%}{steps}{rest}")
    return "\n".join([*lines, EXPLANATION])
