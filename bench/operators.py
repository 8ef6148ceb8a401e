"""Speed of lowering, and default schedules against the rooflines: part of `lab.py bench`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.sim import execute, simulate, simulate_kernel
from ascend_lab.operators import dsl as te
from ascend_lab.operators.dsl.tensor import topological
from ascend_lab.operators.kernels import GemmSchedule
from bench.table import CHIPS, median_s


def product(side: int) -> te.Tensor:
    """Return a square fp16 matrix product."""
    a = te.placeholder((side, side), name="a")
    b = te.placeholder((side, side), name="b")
    return te.renamed(te.matmul(a, b), "c")


def chain(elements: int) -> te.Tensor:
    """Return relu(2 (a + b)) on vectors."""
    a = te.placeholder((elements,), name="a")
    b = te.placeholder((elements,), name="b")
    return te.renamed(te.vrelu(te.vmuls(te.vadd(a, b), 2.0)), "y")


def cube_candidate_s(side: int, chip: Chip) -> float:
    """Return seconds to lower and time one tiling with three tile levels."""
    tiling = GemmSchedule(128, 64, 256, 4, 4, 4)
    schedule = te.schedule_product(te.create_schedule(product(side), chip), "c", tiling)
    return median_s(lambda: simulate(te.lower(schedule).phases[0], chip).cycles)


def vector_candidate_s(elements: int, chip: Chip) -> float:
    """Return seconds to lower and time one fused vector schedule."""
    schedule = te.auto_schedule(chain(elements), chip)
    return median_s(lambda: simulate(te.lower(schedule).phases[0], chip).cycles)


def execute_s() -> tuple[float, float]:
    """Return seconds to execute a 256 cubed product and a fused chain on 2^20 elements."""
    chip = load_chip("Ascend910A")
    rng = np.random.default_rng(0)
    kernel = te.lower(te.auto_schedule(product(256), chip))
    matrix = rng.normal(size=256 * 256).astype(np.float16)
    cube = median_s(lambda: execute(kernel, {"a": matrix, "b": matrix}, chip), 3)
    fused = te.lower(te.auto_schedule(chain(1 << 20), chip))
    line = rng.normal(size=1 << 20).astype(np.float16)
    vector = median_s(lambda: execute(fused, {"a": line, "b": line}, chip), 3)
    return cube, vector


class Share(NamedTuple):
    """A default schedule on one chip: its time, and the share of its roofline it reaches."""

    name: str
    chip: str
    time_s: float
    roof: str
    roof_share: float
    bound_by: str


def softmax(x: te.Tensor) -> te.Tensor:
    """Return the softmax of the last axis."""
    top = te.broadcast(te.reduce_max(x, -1, True), x.shape)
    powers = te.vexp(te.vsub(x, top))
    return te.vdiv(powers, te.broadcast(te.reduce_sum(powers, -1, True), x.shape))


def layer_norm(x: te.Tensor) -> te.Tensor:
    """Return rows with mean 0 and variance 1, in fp32 inside."""
    wide = te.cast_to(x, "fp32")
    scale = 1.0 / x.shape[-1]
    mean = te.vmuls(te.reduce_sum(wide, -1, True), scale)
    centred = te.vsub(wide, te.broadcast(mean, x.shape))
    variance = te.vmuls(te.reduce_sum(te.vmul(centred, centred), -1, True), scale)
    factor = te.vrsqrt(te.vadds(variance, 1e-5))
    return te.cast_to(te.vmul(centred, te.broadcast(factor, x.shape)), x.dtype)


def elementwise_cases() -> dict[str, te.Tensor]:
    """Return operators without folds."""
    line = te.placeholder((1 << 24,), name="a")
    other = te.placeholder((1 << 24,), name="b")
    wide = te.placeholder((1 << 23,), "fp32", name="w")
    rows = te.placeholder((8192, 1024), name="x")
    bias = te.placeholder((1024,), name="bias")
    image = te.placeholder((32, 64, 56 * 56), name="x")
    channel = te.placeholder((64, 1), name="bias")
    short = te.placeholder((1 << 20,), name="s")
    odd = te.placeholder((1001, 1023), name="o")
    return {
        "add 2^24": te.vadd(line, other),
        "add fp32 2^23": te.vadds(wide, 1.0),
        "add 2^20": te.vadds(short, 1.0),
        "add 1001x1023": te.vadds(odd, 1.0),
        "relu 2^24": te.vrelu(line),
        "exp 2^24": te.vexp(line),
        "cast to fp32 2^24": te.cast_to(line, "fp32"),
        "add, scale, relu 2^24": te.vrelu(te.vmuls(te.vadd(line, other), 2.0)),
        "add row bias 8192x1024": te.vadd(rows, te.broadcast(bias, rows.shape)),
        "add channel bias 32x64x3136": te.vadd(image, te.broadcast(channel, image.shape)),
        "concat 2 x 8192x1024": te.concat([rows, te.placeholder((8192, 1024), name="z")], 1),
        "transpose 4096x4096": te.transpose(te.placeholder((4096, 4096), name="x"), (1, 0)),
    }


def row_cases() -> dict[str, te.Tensor]:
    """Return folds, and operators with folds inside."""
    rows = te.placeholder((8192, 1024), name="x")
    cube = te.placeholder((64, 512, 256), name="x")
    long = te.placeholder((64, 32768), name="x")
    odd = te.placeholder((1000, 1000), name="x")
    return {
        "max of rows 8192x1024": te.reduce_max(rows, 1),
        "max of columns 8192x1024": te.reduce_max(rows, 0),
        "sum of rows 8192x1024": te.reduce_sum(rows, 1),
        "sum of columns 8192x1024": te.reduce_sum(rows, 0),
        "sum of all 8192x1024": te.reduce_sum(rows, (0, 1)),
        "min of the middle 64x512x256": te.reduce_min(cube, 1),
        "softmax 8192x1024": softmax(rows),
        "softmax 64x32768": softmax(long),
        "softmax 1000x1000": softmax(odd),
        "layer norm 8192x1024": layer_norm(rows),
    }


def product_cases() -> dict[str, te.Tensor]:
    """Return products for the cube."""

    def of(a: tuple[int, ...], b: tuple[int, ...], dtype: str = "fp16") -> te.Tensor:
        return te.matmul(te.placeholder(a, dtype, name="a"), te.placeholder(b, dtype, name="b"))

    return {
        "matmul 512": product(512),
        "matmul 1024": product(1024),
        "matmul 4096": product(4096),
        "matmul 4097": product(4097),
        "matmul 2048x2048x256": of((2048, 256), (256, 2048)),
        "matmul 64x4096x4096": of((64, 4096), (4096, 4096)),
        "matmul 32 x 512x64x512": of((32, 512, 64), (32, 64, 512)),
    }


def share_of(name: str, tensor: te.Tensor, chip: Chip) -> Share:
    """Return the kernel time of the default schedule, and the higher of two rooflines over it.

    Memory: inputs and output once at the memory's rate, or L2's where all of them fit in it. Cube:
    the multiply-adds at the peak of all cores.
    """
    timeline = simulate_kernel(te.lower(te.auto_schedule(tensor, chip)), chip)
    tensors = [t for t in topological([tensor]) if t.body is None or t is tensor]
    moved = sum(t.size_bytes for t in tensors)
    rate = chip.device_memory.rate_bytes_per_s
    if moved <= chip.l2.size_bytes:
        reads = sum(t.size_bytes for t in tensors if t.body is None)
        memory_s = max(reads / rate, moved / chip.l2.rate_bytes_per_s)
    else:
        memory_s = moved / rate
    inner = tensor.inputs[0].shape[-1] if tensor.hint == "matmul" else 0
    cube_s = 2.0 * math.prod(tensor.shape) * inner / chip.peak_ops_per_s("fp16")
    roof = "cube" if cube_s > memory_s else "memory"
    seconds = timeline.cycles / chip.clock_hz
    best = max(cube_s, memory_s)
    longest = max(timeline.phases, key=lambda phase: phase.cycles)  # the launch left out
    return Share(name, chip.name, timeline.time_s, roof, best / seconds, longest.limit)


def table(shares: Sequence[Share]) -> str:
    """Return the table as text: a row per operator, a column per chip."""
    names = list(dict.fromkeys(s.name for s in shares))
    chips = list(dict.fromkeys(s.chip for s in shares))
    found = {(s.name, s.chip): s for s in shares}
    lines = [f"{'default schedule':<30}" + "".join(f"{c:>20}" for c in chips)]
    for name in names:
        cells = []
        for chip in chips:
            share = found[name, chip]
            cells.append(f"{share.roof_share:.0%} of {share.roof[:3]}, {share.bound_by}")
        lines.append(f"{name:<30}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


def all_shares() -> list[Share]:
    """Return the share of its roofline of every case on every chip."""
    cases = {**elementwise_cases(), **row_cases(), **product_cases()}
    return [share_of(n, t, load_chip(chip)) for chip in CHIPS for n, t in cases.items()]
