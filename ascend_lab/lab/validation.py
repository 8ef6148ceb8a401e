"""Compares the model's times with published measurements, row by row, hits and misses alike.

An error is that of the time: +0.10 means that the model is 10 % slower than what was measured. No
constant of the model is fitted to a row.

- Kernels have the published tiling.
- Products have default schedules, or the best grid for a published tile. Their chips are variants
  of one: cores and clock are as published, all else is the preset's.
- Networks are compiled by the default compiler, without the passes that the measured compiler did
  not have. First layers read pixels of 4 channels only where the source says so. Every row has a
  ledger, which splits its time into the bound and the causes of what is above it.
- Training is SGD with momentum, in fp16 with weights kept in fp32, on eight devices of the preset
  910A server, which add up their gradients in buckets of 25 MiB.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from ascend_lab import cluster
from ascend_lab.cluster.train import StepProfile, all_reduce_cost, profile_training, step_timeline
from ascend_lab.compiler import bound, zoo
from ascend_lab.compiler.compile import Layouts, Road, ledger
from ascend_lab.compiler.rules import SMALL_FIRST_LAYERS
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.operators import kernels
from ascend_lab.operators.kernels import conv, conv_shape, flash_shape, flash_split, gemm
from ascend_lab.operators.ops.matmul import (
    default_product,
    product_kernel,
    split_k_schedules,
    warm_cycles,
)


def published(package: str) -> dict[str, Any]:
    """Return a package's file of published numbers; "compiler" stands for ascend_lab.compiler."""
    text = (resources.files(f"ascend_lab.{package}") / "published.toml").read_text("utf-8")
    return tomllib.loads(text)


# -- kernels --------------------------------------------------------------------------------------
TIME_LIMIT = 0.15
"""The goal for a kernel's time: an error of at most 15 %."""
SHARE_LIMIT = 0.10
"""The goal for the busy share of a pipe: off by at most 10 points."""
PIPES = ("cube", "mte1", "mte2", "store")
"""The published names of the pipes M, MTE1, MTE2 and FIX."""
GEMM_SCHEDULE = kernels.GemmSchedule(128, 64, 256, 4, 4, 6)
CONV_SCHEDULE = kernels.GemmSchedule(128, 48, 256, 3, 4, 6)


@dataclass(frozen=True, slots=True)
class Timed:
    """A published time and the model's answer, both in seconds."""

    name: str
    published_s: float
    model_s: float

    @property
    def time_error(self) -> float:
        """model / published - 1."""
        return self.model_s / self.published_s - 1.0

    @property
    def off_s(self) -> float:
        """model - published."""
        return self.model_s - self.published_s


@dataclass(frozen=True, slots=True)
class ValidationRow(Timed):
    """A published kernel: its times, and by pipe the share of the time in which it is busy."""

    published_busy: dict[str, float]
    model_busy: dict[str, float]

    @property
    def share_errors(self) -> dict[str, float]:
        """model - published, per pipe."""
        return {p: self.model_busy[p] - share for p, share in self.published_busy.items()}

    @property
    def misses(self) -> tuple[str, ...]:
        """What is outside the goal: 15 % of time, 10 points of a pipe's busy share."""
        missed = ["time"] if abs(self.time_error) > TIME_LIMIT else []
        for pipe, error in self.share_errors.items():
            if abs(error) > SHARE_LIMIT:
                missed.append(pipe)
        return tuple(missed)


def validation_rows() -> list[ValidationRow]:
    """Simulate every published row on Ascend910B2 with the published tiling."""
    chip = load_chip("Ascend910B2")
    data = published("operators.kernels")
    rows = []
    for entry in data["gemm"]:
        size = entry["size"]
        launch = gemm.gemm_launch(kernels.GemmShape(size, size, size), chip, GEMM_SCHEDULE)
        rows.append(_row(f"gemm {size}", entry, launch, chip))
    for entry in data["conv"]:
        n, c1, h, w, c0 = entry["x"]
        shape = conv_shape.ConvShape(
            n=n, c=c1 * c0, h=h, w=w, k=entry["channels_out"], r=3, s=3, stride=1, pad=1
        )
        launch = conv.conv_launch(shape, chip, CONV_SCHEDULE)
        rows.append(_row(f"conv {n}x{c1 * c0}x{h}x{w}", entry, launch, chip))
    return rows


def published_flash() -> list[ValidationRow]:
    """Simulate every published FlashAttention: operands in L2, the kernel in the device's queue."""
    chip = load_chip("Ascend910B2")
    rows = []
    for entry in published("operators.kernels")["flash"]:
        length = entry["length"]
        shape = flash_shape.FlashShape(1, length, length, 128, 128, flash_shape.default_scale(128))
        kernel = isa.as_kernel(flash_split.flash_pipeline_launch(shape, chip))
        memory = sim.DeviceMemory.holding(chip, kernel.tensors, ("q", "k", "v"))
        timeline = replace(sim.simulate_kernel(kernel, chip, memory), start="queued")
        rows.append(
            ValidationRow(f"flash {length}", entry["time_us"] * 1e-6, timeline.time_s, {}, {})
        )
    return rows


def _row(name: str, entry: dict[str, Any], launch: isa.Launch, chip: Chip) -> ValidationRow:
    """Time a kernel that was run again and again: L2 still holds what fits of its operands."""
    kernel = isa.as_kernel(launch)
    memory = sim.DeviceMemory.holding(chip, kernel.tensors, [b.name for b in kernel.tensors])
    timeline = sim.simulate_kernel(kernel, chip, memory)
    pipes = zip(PIPES, ("M", "MTE1", "MTE2", "FIX"), strict=True)
    busy = {p: timeline.busy.get(pipe, 0.0) for p, pipe in pipes}
    published = {p: entry[p] / 100.0 for p in PIPES}
    return ValidationRow(name, entry["time_ms"] * 1e-3, timeline.time_s, published, busy)


def validation_table(rows: list[ValidationRow]) -> str:
    """Return the rows as text: times, error, busy shares as model/published; a star is a miss."""
    head = f"{'row':<17}{'model':>9}{'publ.':>9}{'time error':>11} "
    lines = [(head + "".join(f"{pipe:>9} " for pipe in PIPES)).rstrip()]
    for row in rows:
        shares = [f"{row.model_busy[p]:.0%}/{row.published_busy[p]:.0%}" for p in PIPES]
        stars = ["*" if what in row.misses else " " for what in ("time", *PIPES)]
        share_cells = "".join(f"{s:>9}{mark}" for s, mark in zip(shares, stars[1:], strict=True))
        times = f"{row.model_s * 1e3:>7.4f}ms{row.published_s * 1e3:>7.4f}ms"
        lines.append(
            f"{row.name:<17}{times}{row.time_error:>+11.1%}{stars[0]}{share_cells}".rstrip()
        )
    return "\n".join(lines)


# -- products -------------------------------------------------------------------------------------
GOAL = 0.15
"""The goal for a product's time: an error of at most 15 %."""
STAGES = 4
"""Base tiles along K in a slot of L1, where the source gives only the tile."""


@dataclass(frozen=True, slots=True)
class ProductRow(Timed):
    """A product of `size` (m, n, k), its times with the launch; `parts` is how often K is split."""

    device: str
    size: tuple[int, int, int]
    parts: int


def product_rows() -> Iterator[ProductRow]:
    """Yield the published rows with the model's times, in the file's order."""
    data = published("operators.ops")
    preset = load_chip("Ascend910B2")
    for row in data["product"]:
        device = data["device"][row["device"]]
        (m, n, k) = row["size"]
        chip = replace(
            preset, name=row["device"], core_count=device["cores"], clock_hz=device["hz"]
        )
        shape = kernels.GemmShape(m, k, n, row.get("dtype", "fp16"))
        if row.get("divided"):
            schedules = [way for _, way in split_k_schedules(shape, chip, float("inf"))]
            schedule = min(schedules, key=lambda way: _warm(shape, chip, way))
        elif "tile" in row:
            base_m, base_k, base_n = row["tile"]
            base_schedule = kernels.GemmSchedule(base_m, base_k, base_n, STAGES, 1, 1)
            schedule = kernels.best_grid(shape, chip, base_schedule)
        else:
            schedule = default_product(shape, chip)
        yield ProductRow(
            name=row["name"],
            published_s=row["time_us"] * 1e-6,
            model_s=_warm(shape, chip, schedule) / chip.clock_hz,
            device=row["device"],
            size=(m, n, k),
            parts=schedule.split_k,
        )


def _warm(shape: kernels.GemmShape, chip: Chip, schedule: kernels.GemmSchedule) -> float:
    """Return the cycles of a product that was run before, so that L2 holds what fits."""
    kernel = product_kernel(shape, chip, schedule)
    return warm_cycles(kernel, chip, [b.name for b in kernel.tensors])


def product_table(rows: Iterable[ProductRow]) -> str:
    """Return the rows as text: times, error, what was published; a star where it misses."""
    lines = [f"{'m x n x k':<17}{'chip':<12}{'model':>9}{'publ.':>9}{'time error':>11}  what"]
    for row in rows:
        size = "x".join(map(str, row.size))
        mark = " *" if abs(row.time_error) > GOAL else ""
        lines.append(
            f"{size:<17}{row.device.removeprefix('Ascend'):<12}{row.model_s * 1e6:>7.1f}us"
            f"{row.published_s * 1e6:>7.1f}us{row.time_error:>+11.0%}  {row.name}{mark}"
        )
    return "\n".join(lines)


# -- networks -------------------------------------------------------------------------------------
GOALS = {"dense": 1.3, "light": 1.5}
"""How many times too slow or too fast the model may be, by kind of network."""


@dataclass(frozen=True, slots=True)
class NetworkRow(Timed):
    """The time of a batch on a chip; `terms` is the model's ledger in seconds."""

    chip: str
    batch: int
    kind: str
    terms: dict[str, float]

    @property
    def model_per_s(self) -> float:
        """The model's rate."""
        return self.batch / self.model_s

    @property
    def misses(self) -> bool:
        """Whether the model is further off than the goal for networks of its kind, either way."""
        times = 1.0 + self.time_error
        return max(times, 1.0 / times) > GOALS[self.kind]

    @property
    def cause(self) -> str:
        """The largest term above the bound, and its share of the time."""
        above = {name: s for name, s in self.terms.items() if name != "bound"}
        name = max(above, key=lambda term: above[term])
        return f"{name} {above[name] / sum(self.terms.values()):.0%}"


def network_rows(names: Iterable[str] = ()) -> Iterator[NetworkRow]:
    """Yield each published network at batch 1 and at its best batch; of all names, or some."""
    wanted_names = set(names)
    for entry in published("compiler")["network"]:
        rates = {int(batch): float(rate) for batch, rate in entry["per_s"].items()}
        best_batch = max(rates, key=lambda batch: rates[batch])
        if wanted_names and entry["name"] not in wanted_names:
            continue
        for batch in sorted({1, best_batch} & set(rates)):
            chip = load_chip(entry["chip"])
            graph = zoo.build(entry["name"], batch=batch, **entry.get("settings", {}))
            passes = [name for name in Road().passes if name not in entry.get("without", ())]
            small_channel = entry.get("small_channel", False)
            left_out = frozenset() if small_channel else frozenset({SMALL_FIRST_LAYERS})
            stages = Road(passes, layouts=Layouts(left_out=left_out)).stages(graph, chip)
            times = stages.timeline()
            terms = ledger(times, bound.bound_of(stages.rewritten, chip))
            yield NetworkRow(
                name=entry["name"],
                published_s=batch / rates[batch],
                model_s=times.time_s,
                chip=chip.name,
                batch=batch,
                kind=entry["kind"],
                terms=terms,
            )


def network_table(rows: Iterable[NetworkRow]) -> str:
    """Return rows as text: rates, error of the time (a star: too large), time off, over bound."""
    head = f"{'network':<15}{'chip':<7}{'batch':>5}{'model/s':>9}{'publ./s':>9}{'time error':>11} "
    lines = [f"{head}{'off':>9}{'/bound':>7}  largest above"]
    for row in rows:
        over = sum(row.terms.values()) / row.terms["bound"]
        lines.append(
            f"{row.name:<15}{row.chip.removeprefix('Ascend'):<7}{row.batch:>5}"
            f"{row.model_per_s:>9.0f}{row.batch / row.published_s:>9.0f}{row.time_error:>+11.0%}"
            f"{'*' if row.misses else ' '}{row.off_s * 1e6:>+7.0f}us{over:>7.2f}  {row.cause}"
        )
    return "\n".join(lines)


# -- training -------------------------------------------------------------------------------------
CHIP = "Ascend910A"
SERVER = "910a-server"
NORMS = (".bn",)
"""Parts of the names that the zoo gives to batch norms."""


@dataclass(frozen=True, slots=True)
class TrainingRow(Timed):
    """The time of a training step on some devices.

    `model_efficiency` is the step's time without the exchange of gradients over that with it, and
    `norms_s` the time of the kernels of batch norms.
    """

    devices: int
    batch_per_device: int
    model_efficiency: float
    norms_s: float


def training_validation_rows(
    profiles: Mapping[int, StepProfile] | None = None,
) -> list[TrainingRow]:
    """Return all rows with the model's numbers; `profiles` by batch save the simulation."""
    chip = load_chip(CHIP)
    known_profiles = dict(profiles or {})
    cost = all_reduce_cost(cluster.load_topology(SERVER))
    rows = []
    for row in published("cluster.train")["row"]:
        batch = row["batch_per_device"]
        devices = row["devices"]
        if batch not in known_profiles:
            known_profiles[batch] = profile_training(
                zoo.build(row["model"], batch), chip, optimizer="sgd"
            )
        profile = known_profiles[batch]
        step_s = step_timeline(profile, cost).step_s if devices > 1 else profile.step_s
        training_row = TrainingRow(
            name=row["name"],
            published_s=devices * batch / row["images_per_s"],
            model_s=step_s,
            devices=devices,
            batch_per_device=batch,
            model_efficiency=profile.step_s / step_s,
            norms_s=norms_s(profile),
        )
        rows.append(training_row)
    return rows


def norms_s(profile: StepProfile) -> float:
    """Return the seconds of kernels that begin with a node of a batch norm."""
    rows = profile.operators
    return sum(row.time_s for row in rows if any(mark in row.nodes[0] for mark in NORMS))


def training_validation_table(rows: list[TrainingRow] | None = None) -> str:
    """Return the rows as text: images per second, error of the time, milliseconds, scaling.

    The published scaling is what the published rates give, with as many digits as the model's.
    """
    rows = training_validation_rows() if rows is None else rows
    head = f"{'row':<33}{'model/s':>8}{'publ./s':>8}{'error':>6}"
    lines = [f"{head}{'step':>9}{'norms':>9}{'scaling':>8}{'publ.':>7}"]
    single_device_s = {
        row.batch_per_device: row.published_s for row in reversed(rows) if row.devices == 1
    }
    for row in rows:
        single_s = single_device_s.get(row.batch_per_device) if row.devices > 1 else None
        published_scaling = f"{single_s / row.published_s:.3f}" if single_s else "-"
        images = row.devices * row.batch_per_device
        rates = f"{images / row.model_s:>8.0f}{images / row.published_s:>8.0f}"
        times = f"{row.time_error:>+6.0%}{row.model_s * 1e3:>7.2f}ms{row.norms_s * 1e3:>7.2f}ms"
        lines.append(
            f"{row.name:<33}{rates}{times}{row.model_efficiency:>8.3f}{published_scaling:>7}"
        )
    return "\n".join(lines)
