"""Rows on the vector unit: defaults over their certified bounds, part of `lab.py bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ascend_lab.aoe.vector.bound import vector_bound
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.sim import simulate_kernel
from ascend_lab.operators import dsl as te
from bench.operators import layer_norm, softmax
from bench.table import CHIPS, Figure, times

EVEN = ((8192, 1024), (64, 32768))
RAGGED = ((1000, 1000), (197, 197), (77, 1001), (3, 50257), (12, 197, 197), (1, 1000), (8192, 30))
LIMITS = {EVEN: 1.3, RAGGED: 1.6}


def log_softmax(x: te.Tensor) -> te.Tensor:
    """Return the logarithm of the softmax of the last axis."""
    shifted = te.vsub(x, te.broadcast(te.reduce_max(x, -1, True), x.shape))
    total = te.vlog(te.reduce_sum(te.vexp(shifted), -1, True))
    return te.vsub(shifted, te.broadcast(total, x.shape))


def rms_norm(x: te.Tensor) -> te.Tensor:
    """Return rows whose mean square is 1, in fp32 inside."""
    wide = te.cast_to(x, "fp32")
    mean = te.vmuls(te.reduce_sum(te.vmul(wide, wide), -1, True), 1.0 / x.shape[-1])
    factor = te.broadcast(te.vrsqrt(te.vadds(mean, 1e-5)), x.shape)
    return te.cast_to(te.vmul(wide, factor), x.dtype)


ROWS: Mapping[str, Callable[[te.Tensor], te.Tensor]] = {
    "softmax": softmax,
    "log-softmax": log_softmax,
    "layer norm": layer_norm,
    "RMS norm": rms_norm,
    "sum": lambda x: te.reduce_sum(x, -1),
    "max": lambda x: te.reduce_max(x, -1),
}


def over_bound(y: te.Tensor, chip: Chip) -> float:
    """Return time / certified bound of a default schedule, the launch on both sides."""
    kernel = te.lower(te.auto_schedule(y, chip))
    return simulate_kernel(kernel, chip).time_s * chip.clock_hz / vector_bound(y, chip)


def row_figures() -> Iterator[Figure]:
    """Yield, per operator and kind of shape, the worst default of four chips over its bound."""
    for name, of in ROWS.items():
        for shapes, limit in LIMITS.items():
            found = [
                (over_bound(of(te.placeholder(shape, name="x")), load_chip(chip)), chip, shape)
                for chip in CHIPS
                for shape in shapes
            ]
            ratio, chip, shape = max(found)
            text = "x".join(map(str, shape))
            kind = "rows" if shapes is EVEN else "ragged"
            label = f"{name}, {kind} / bound"
            yield times(label, ratio, limit)
            yield Figure(f"  worst: {text}", chip.removeprefix("Ascend"), "", None)
