"""The model held against published measurements, row by row, hits and misses alike."""

import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from ascend_lab.chip import Chip, load_chip
from ascend_lab.isa import Launch, as_kernel
from ascend_lab.kernels.conv import conv_launch
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.flash_shape import FlashShape, default_scale
from ascend_lab.kernels.flash_split import flash_pipeline_launch
from ascend_lab.kernels.gemm import gemm_launch
from ascend_lab.kernels.gemm_schedule import GemmSchedule, GemmShape
from ascend_lab.sim import DeviceMemory, simulate, simulate_kernel

TIME_LIMIT = 0.15
SHARE_LIMIT = 0.10
PIPES = ("cube", "mte1", "mte2", "store")
GEMM_SCHEDULE = GemmSchedule(128, 64, 256, 4, 4, 6)
CONV_SCHEDULE = GemmSchedule(128, 48, 256, 3, 4, 6)


@dataclass(frozen=True, slots=True)
class ValidationRow:
    """One published row and the model's answer: times in seconds, busy shares 0..1."""

    name: str
    published_s: float
    model_s: float
    published_busy: dict[str, float]
    model_busy: dict[str, float]

    @property
    def time_error(self) -> float:
        """model / published - 1."""
        return self.model_s / self.published_s - 1.0

    @property
    def share_errors(self) -> dict[str, float]:
        """model - published, per pipe."""
        return {p: self.model_busy[p] - share for p, share in self.published_busy.items()}

    @property
    def misses(self) -> tuple[str, ...]:
        """What is outside the goal: 15 % of time, 10 points of a pipe's busy share."""
        wide = [p for p, e in self.share_errors.items() if abs(e) > SHARE_LIMIT]
        return (*(("time",) if abs(self.time_error) > TIME_LIMIT else ()), *wide)


def validation_rows(chip: Chip | None = None) -> list[ValidationRow]:
    """Simulate every published row on Ascend910B2 (or `chip`) with the published tiling."""
    chip = chip or load_chip("Ascend910B2")
    data, rows = _published(), []
    for entry in data["gemm"]:
        size = entry["size"]
        launch = gemm_launch(GemmShape(size, size, size), chip, GEMM_SCHEDULE)
        rows.append(_row(f"gemm {size}", entry, launch, chip))
    for entry in data["conv"]:
        n, c1, h, w, c0 = entry["x"]
        shape = ConvShape(n, c1 * c0, h, w, entry["channels_out"], 3, 3, 1, 1)
        launch = conv_launch(shape, chip, CONV_SCHEDULE)
        rows.append(_row(f"conv {n}x{c1 * c0}x{h}x{w}", entry, launch, chip))
    return rows


def published_flash(chip: Chip | None = None) -> list[ValidationRow]:
    """Simulate every published FlashAttention: operands in L2, the kernel in the device's queue."""
    chip = chip or load_chip("Ascend910B2")
    rows = []
    for entry in _published()["flash"]:
        n = entry["length"]
        kernel = as_kernel(
            flash_pipeline_launch(FlashShape(1, n, n, 128, 128, default_scale(128)), chip)
        )
        memory = DeviceMemory.holding(chip, kernel.tensors, ("q", "k", "v"))
        line = replace(simulate_kernel(kernel, chip, memory), start="queued")
        rows.append(ValidationRow(f"flash {n}", entry["time_us"] * 1e-6, line.time_s, {}, {}))
    return rows


def _published() -> dict[str, Any]:
    text = (resources.files("ascend_lab.kernels") / "published.toml").read_text("utf-8")
    return tomllib.loads(text)


def _row(name: str, entry: dict[str, Any], launch: Launch, chip: Chip) -> ValidationRow:
    timeline = simulate(launch, chip)
    pipes = dict(zip(PIPES, ("M", "MTE1", "MTE2", "FIX"), strict=True))
    return ValidationRow(
        name,
        entry["time_ms"] * 1e-3,
        timeline.time_s,
        {p: entry[p] / 100.0 for p in PIPES},
        {p: timeline.busy.get(pipe, 0.0) for p, pipe in pipes.items()},
    )


def validation_table(rows: list[ValidationRow]) -> str:
    """Return the rows as text: times, error, busy shares as model/published; a star is a miss."""
    head = f"{'row':<17}{'model':>9}{'publ.':>9}{'error':>8} "
    lines = [(head + "".join(f"{p:>9} " for p in PIPES)).rstrip()]
    for row in rows:
        shares = [f"{row.model_busy[p]:.0%}/{row.published_busy[p]:.0%}" for p in PIPES]
        marks = ["*" if what in row.misses else " " for what in ("time", *PIPES)]
        told = "".join(f"{s:>9}{mark}" for s, mark in zip(shares, marks[1:], strict=True))
        times = f"{row.model_s * 1e3:>7.4f}ms{row.published_s * 1e3:>7.4f}ms"
        lines.append(f"{row.name:<17}{times}{row.time_error:>+8.1%}{marks[0]}{told}".rstrip())
    return "\n".join(lines)
