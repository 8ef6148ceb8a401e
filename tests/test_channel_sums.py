"""Sums over the channels of images: values for odd shapes, and times near what the pipes allow."""

import numpy as np
import pytest

from ascend_lab.fused.channel_sums_kernel import ChannelSums, channel_sums_kernel
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import KernelBuilder
from ascend_lab.machine.sim import simulate_kernel
from ascend_lab.operators import dsl as te, ops
from ascend_lab.operators.dsl.emit_vector import View, rows_side_by_side

SHAPES = [(5, 70, 13, 9), (33, 35, 6, 5), (2, 600, 3, 3), (1, 16, 160, 130)]


@pytest.mark.parametrize("name", ["Ascend910A", "Ascend910B2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_and_gradients_equal_the_formulas(name: str, shape: tuple[int, ...]) -> None:
    chip = load_chip(name)
    rng = np.random.default_rng(sum(shape))
    x = (1.5 * rng.standard_normal(shape) + 0.7).astype(np.float16)
    grad = rng.standard_normal(shape).astype(np.float16)
    mean, variance = ops.run("bn_training_reduce", x, chip=chip)
    wide = x.astype(np.float64)
    slope = grad.astype(np.float64)
    over = {"axis": (0, 2, 3), "keepdims": True}
    np.testing.assert_allclose(mean, wide.mean(**over), atol=1e-5)
    np.testing.assert_allclose(variance, wide.var(**over), rtol=1e-5)
    found = ops.run("bn_training_update_grad", grad, x, mean, variance, chip=chip, epsilon=1e-3)
    rate = 1 / np.sqrt(variance + 1e-3)
    dscale = (slope * (wide - mean)).sum(**over) * rate
    np.testing.assert_allclose(found[0], dscale, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(found[1], slope.sum(**over), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("epsilon", [None, 1e-5])
def test_a_kernel_takes_hardly_longer_than_its_vector_work(epsilon: float | None) -> None:
    """Statistics: widen, add, square, add, 2 cycles per 64 lanes each; gradients widen two."""
    chip = load_chip("Ascend910A")
    passes = 4 if epsilon is None else 5
    run = simulate_kernel(channel_sums_kernel(ChannelSums(32, 256, 56, 56, "fp16", epsilon), chip),
                          chip)  # fmt: skip
    least = 32 * 256 * 56 * 56 / 64 / chip.core_count * passes * 2
    assert least < run.cycles < 1.1 * least
    read = (1 if epsilon is None else 2) * 32 * 256 * 56 * 56 * 2
    assert read <= run.memory_bytes < 1.01 * read


# -- numbers per channel beside images in fp32 ----------------------------------------------------
def _scaled(shape: tuple[int, ...]) -> tuple[te.Tensor, list[te.Tensor]]:
    x, scale, bias = (te.placeholder(s, "fp32", n) for s, n in (
        (shape, "x"), ((1, shape[1], 1, 16), "scale"), ((1, shape[1], 1, 16), "bias")))  # fmt: skip
    slope = te.vmul(scale, te.vrsqrt(te.vadds(scale, 1.0)))
    offset = te.vsub(bias, slope)
    return te.vadd(te.vmul(x, te.broadcast(slope, shape)), te.broadcast(offset, shape)), [
        x, scale, bias]  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 3, 49, 16), (1, 1, 7, 16), (3, 2, 8, 16), (32, 4, 98, 16)])
def test_rows_of_sixteen_channels_have_the_right_values(shape: tuple[int, ...]) -> None:
    chip = load_chip("Ascend910A")
    rng = np.random.default_rng(0)
    y, tensors = _scaled(shape)
    schedule = te.auto_schedule(y, chip)
    x, scale, bias = (rng.uniform(0.5, 2, t.shape).astype(np.float32) for t in tensors)
    slope = scale / np.sqrt(scale + 1)
    (got,) = te.run(schedule, {"x": x, "scale": scale, "bias": bias}).values()
    np.testing.assert_allclose(got, x * slope + (bias - slope), rtol=1e-5)


def test_which_rows_are_taken_side_by_side() -> None:
    chip = load_chip("Ascend910A")
    buffer = KernelBuilder("rows", chip).buffer("a", "UB", "fp32", 4096)

    def factor(rows: int, last: int, *steps: tuple[int, int]) -> int:
        views = [View(buffer, "fp32", 0, s) for s in steps]
        return rows_side_by_side(views, [rows, last], chip.vector_bytes_per_repeat)

    assert factor(8, 16, (16, 1), (16, 1), (0, 1)) == 4
    assert factor(7, 16, (16, 1), (16, 1), (0, 1)) == 1  # too few rows
    assert factor(8, 16, (32, 1), (32, 1), (0, 1)) == 1  # gaps between rows
    assert factor(8, 24, (24, 1), (24, 1), (0, 1)) == 1  # no fraction of 64 lanes
    assert factor(8, 16, (16, 1), (16, 1), (16, 1)) == 1  # nothing repeats
    assert factor(8, 8, (8, 1), (8, 1), (0, 1)) == 1  # blocks: an instruction repeats those itself
