"""The model held against published measurements, row by row, hits and misses alike.

Kernels with the published tiling; products by default schedules, on chips that are bins of one
(cores and clock are theirs, all else is the preset's; a row with a tile gets the best grid for it);
whole networks compiled operator by operator, as by our default compiler, whose first layers read
pixels of 4 channels only where the source says so, without what the compiler measured did not have,
and what a row has above its bound stands in its ledger; training by SGD with momentum, fp16 with
fp32 masters, eight devices that share gradients in buckets of 25 MiB over the preset 910A server.
No constant of the model is fitted to a row. Errors are of the time: above zero the model is too
slow.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from ascend_lab import cluster
from ascend_lab.cluster.train import StepProfile, all_reduce_cost, profile_training, step_timeline
from ascend_lab.compiler import Road, bound, ledger, zoo
from ascend_lab.compiler.compile import Layouts
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


def published(room: str) -> dict[str, Any]:
    """Return the published rows of a room of the package as they are written down."""
    text = (resources.files(f"ascend_lab.{room}") / "published.toml").read_text("utf-8")
    return tomllib.loads(text)


# -- kernels --------------------------------------------------------------------------------------
TIME_LIMIT = 0.15
SHARE_LIMIT = 0.10
PIPES = ("cube", "mte1", "mte2", "store")
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
    """A row with busy shares, 0..1, by pipe."""

    published_busy: dict[str, float]
    model_busy: dict[str, float]

    @property
    def share_errors(self) -> dict[str, float]:
        """model - published, per pipe."""
        return {p: self.model_busy[p] - share for p, share in self.published_busy.items()}

    @property
    def misses(self) -> tuple[str, ...]:
        """What is outside the goal: 15 % of time, 10 points of a pipe's busy share."""
        wide = [p for p, e in self.share_errors.items() if abs(e) > SHARE_LIMIT]
        return (*(("time",) if abs(self.time_error) > TIME_LIMIT else ()), *wide)


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
        shape = conv_shape.ConvShape(n, c1 * c0, h, w, entry["channels_out"], 3, 3, 1, 1)
        launch = conv.conv_launch(shape, chip, CONV_SCHEDULE)
        rows.append(_row(f"conv {n}x{c1 * c0}x{h}x{w}", entry, launch, chip))
    return rows


def published_flash() -> list[ValidationRow]:
    """Simulate every published FlashAttention: operands in L2, the kernel in the device's queue."""
    chip = load_chip("Ascend910B2")
    rows = []
    for entry in published("operators.kernels")["flash"]:
        n = entry["length"]
        shape = flash_shape.FlashShape(1, n, n, 128, 128, flash_shape.default_scale(128))
        kernel = isa.as_kernel(flash_split.flash_pipeline_launch(shape, chip))
        memory = sim.DeviceMemory.holding(chip, kernel.tensors, ("q", "k", "v"))
        line = replace(sim.simulate_kernel(kernel, chip, memory), start="queued")
        rows.append(ValidationRow(f"flash {n}", entry["time_us"] * 1e-6, line.time_s, {}, {}))
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
    lines = [(head + "".join(f"{p:>9} " for p in PIPES)).rstrip()]
    for row in rows:
        shares = [f"{row.model_busy[p]:.0%}/{row.published_busy[p]:.0%}" for p in PIPES]
        marks = ["*" if what in row.misses else " " for what in ("time", *PIPES)]
        told = "".join(f"{s:>9}{mark}" for s, mark in zip(shares, marks[1:], strict=True))
        times = f"{row.model_s * 1e3:>7.4f}ms{row.published_s * 1e3:>7.4f}ms"
        lines.append(f"{row.name:<17}{times}{row.time_error:>+11.1%}{marks[0]}{told}".rstrip())
    return "\n".join(lines)


# -- products -------------------------------------------------------------------------------------
GOAL = 0.15
STAGES = 4
"""Base tiles a stage of L1 has where the source gives a tile."""


@dataclass(frozen=True, slots=True)
class ProductRow(Timed):
    """A published time and the model's, both with the launch; (m, n, k), and parts of K."""

    device: str
    size: tuple[int, int, int]
    parts: int


def product_rows() -> Iterator[ProductRow]:
    """Yield the published rows with the model's times, in the file's order."""
    data = published("operators.ops")
    preset = load_chip("Ascend910B2")
    for row in data["product"]:
        own = data["device"][row["device"]]
        (m, n, k) = row["size"]
        chip = replace(preset, name=row["device"], core_count=own["cores"], clock_hz=own["hz"])
        shape = kernels.GemmShape(m, k, n, row.get("dtype", "fp16"))
        if row.get("divided"):
            ways = [way for _, way in split_k_schedules(shape, chip, float("inf"))]
            schedule = min(ways, key=lambda way: _warm(shape, chip, way))
        elif "tile" in row:
            base_m, base_k, base_n = row["tile"]
            given = kernels.GemmSchedule(base_m, base_k, base_n, STAGES, 1, 1)
            schedule = kernels.best_grid(shape, chip, given)
        else:
            schedule = default_product(shape, chip)
        times = row["time_us"] * 1e-6, _warm(shape, chip, schedule) / chip.clock_hz
        yield ProductRow(row["name"], *times, row["device"], (m, n, k), schedule.split_k)


def _warm(shape: kernels.GemmShape, chip: Chip, schedule: kernels.GemmSchedule) -> float:
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
    wanted = set(names)
    for entry in published("compiler")["network"]:
        rates = {int(batch): float(rate) for batch, rate in entry["per_s"].items()}
        best = max(rates, key=lambda batch: rates[batch])
        if wanted and entry["name"] not in wanted:
            continue
        for batch in sorted({1, best} & set(rates)):
            chip = load_chip(entry["chip"])
            graph = zoo.build(entry["name"], batch=batch, **entry.get("settings", {}))
            passes = [name for name in Road().passes if name not in entry.get("without", ())]
            small_channel = entry.get("small_channel", False)
            left_out = frozenset() if small_channel else frozenset({SMALL_FIRST_LAYERS})
            stages = Road(passes, layouts=Layouts(left_out=left_out)).stages(graph, chip)
            times = stages.timeline()
            terms = ledger(times, bound.bound_of(stages.rewritten, chip))
            both = batch / rates[batch], times.time_s
            yield NetworkRow(entry["name"], *both, chip.name, batch, entry["kind"], terms)


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


@dataclass(frozen=True, slots=True)
class TrainingRow(Timed):
    """The time of a step on some devices."""

    devices: int
    batch_per_device: int
    model_efficiency: float
    norms_s: float


def training_validation_rows(
    profiles: Mapping[int, StepProfile] | None = None,
) -> list[TrainingRow]:
    """Return all rows with the model's numbers; `profiles` by batch save the simulation."""
    chip = load_chip(CHIP)
    known = dict(profiles or {})
    cost = all_reduce_cost(cluster.load_topology(SERVER))
    found = []
    for row in published("cluster.train")["row"]:
        batch = row["batch_per_device"]
        devices = row["devices"]
        if batch not in known:
            known[batch] = profile_training(zoo.build(row["model"], batch), chip, optimizer="sgd")
        profile = known[batch]
        step_s = step_timeline(profile, cost).step_s if devices > 1 else profile.step_s
        times = devices * batch / row["images_per_s"], step_s
        shares = profile.step_s / step_s, norms_s(profile)
        found.append(TrainingRow(row["name"], *times, devices, batch, *shares))
    return found


def norms_s(profile: StepProfile) -> float:
    """Return the seconds of kernels that begin with a node of a batch norm."""
    rows = profile.operators
    return sum(r.time_s for r in rows if any(m in r.nodes[0] for m in NORMS))


def training_validation_table(rows: list[TrainingRow] | None = None) -> str:
    """Return the rows as text: images per second, error of the time, milliseconds, scaling.

    The published scaling is what the published rates give, with as many digits as the model's.
    """
    rows = training_validation_rows() if rows is None else rows
    head = f"{'row':<33}{'model/s':>8}{'publ./s':>8}{'error':>6}"
    lines = [f"{head}{'step':>9}{'norms':>9}{'scaling':>8}{'publ.':>7}"]
    alone = {row.batch_per_device: row.published_s for row in reversed(rows) if row.devices == 1}
    for row in rows:
        single_s = alone.get(row.batch_per_device) if row.devices > 1 else None
        wanted = f"{single_s / row.published_s:.3f}" if single_s else "-"
        images = row.devices * row.batch_per_device
        rates = f"{images / row.model_s:>8.0f}{images / row.published_s:>8.0f}"
        times = f"{row.time_error:>+6.0%}{row.model_s * 1e3:>7.2f}ms{row.norms_s * 1e3:>7.2f}ms"
        lines.append(f"{row.name:<33}{rates}{times}{row.model_efficiency:>8.3f}{wanted:>7}")
    return "\n".join(lines)
