"""Sums over the channels of images: values for odd shapes, and times near what the pipes allow."""

from dataclasses import replace

import numpy as np
import pytest

from ascend_lab.errors import AscendLabError
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.isa import Kernel, KernelBuilder, sanitize
from ascend_lab.machine.sim import execute, simulate, simulate_kernel
from ascend_lab.operators import dsl as te, ops
from ascend_lab.operators.dsl.emit_vector import View, rows_side_by_side
from ascend_lab.operators.kernels import ConvShape, GemmSchedule, conv_launch, dense_placement
from ascend_lab.operators.kernels.channel_sums import (
    ChannelSums,
    channel_sums_kernel,
    ones_and_diagonal,
    totals_launch,
)
from ascend_lab.operators.kernels.conv_shape import pack_conv, unpack_conv
from ascend_lab.operators.kernels.epilogue import PLAIN, Epilogue, Step

SHAPES = [(5, 70, 13, 9), (33, 35, 6, 5), (2, 600, 3, 3), (1, 16, 160, 130)]


@pytest.mark.parametrize("name", ["Ascend910A", "Ascend910B2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_and_gradients_equal_the_formulas(name: str, shape: tuple[int, ...]) -> None:
    chip, rng = load_chip(name), np.random.default_rng(sum(shape))
    x = (1.5 * rng.standard_normal(shape) + 0.7).astype(np.float16)
    grad = rng.standard_normal(shape).astype(np.float16)
    mean, variance = ops.run("bn_training_reduce", x, chip=chip)
    wide, slope = x.astype(np.float64), grad.astype(np.float64)
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
    chip, passes = load_chip("Ascend910A"), 4 if epsilon is None else 5
    run = simulate_kernel(channel_sums_kernel(ChannelSums(32, 256, 56, 56, "fp16", epsilon), chip),
                          chip)  # fmt: skip
    least = 32 * 256 * 56 * 56 / 64 / chip.core_count * passes * 2
    assert least < run.cycles < 1.1 * least
    read = (1 if epsilon is None else 2) * 32 * 256 * 56 * 56 * 2
    assert read <= run.memory_bytes < 1.01 * read


# -- sums of what a convolution stores -------------------------------------------------------------
SUMMED = replace(PLAIN, totals=True)


def summed(
    shape: ConvShape, chip: Chip, schedule: GemmSchedule | None = None, epilogue: Epilogue = SUMMED
) -> Kernel:
    """Return a convolution and the sums of its channels as one kernel."""
    first = conv_launch(shape, chip, schedule, dense_placement(shape), epilogue)
    return Kernel("summed", (first, totals_launch(first, shape, chip)))


@pytest.mark.parametrize("name", ["Ascend910A", "Ascend910B2"])
@pytest.mark.parametrize(
    ("sizes", "kernel", "stride", "tiling"),
    [
        ((2, 16, 8, 8, 16), 1, 1, None),
        ((40, 32, 14, 14, 64), 1, 1, None),
        ((8, 20, 15, 13, 70), 3, 2, None),
        ((3, 32, 9, 7, 48), 3, 1, GemmSchedule(32, 48, 48, 1, 2, 1)),
        ((6, 48, 12, 11, 100), 1, 1, GemmSchedule(48, 16, 64, 3, 3, 2)),
        ((2, 16, 24, 24, 16), 1, 1, GemmSchedule(288, 16, 16, 1, 2, 1)),
        ((4, 16, 20, 20, 128), 1, 1, GemmSchedule(208, 16, 128, 1, 2, 1, c_l0_slots=1)),
        ((8, 64, 7, 7, 128), 3, 1, GemmSchedule(32, 48, 64, 4, 4, 2, window="stacked")),
    ],
)
def test_a_convolution_sums_what_it_stores(
    sizes: tuple[int, ...], kernel: int, stride: int, tiling: GemmSchedule | None, name: str
) -> None:
    (n, c, h, w, k), chip = sizes, load_chip(name)
    rng = np.random.default_rng(sum(sizes))
    shape = ConvShape(n, c, h, w, k, kernel, kernel, stride, kernel // 2, "fp16", "fp16")
    x = rng.standard_normal((n, c, h, w)).astype(np.float16)
    weight = rng.standard_normal((k, c, kernel, kernel)).astype(np.float16)
    tensors, whole = pack_conv(shape, x, weight), summed(shape, chip, tiling)
    alone = Kernel("alone", (conv_launch(shape, chip, tiling, dense_placement(shape)),))
    got = execute(whole, tensors | {"ones": ones_and_diagonal()}, chip, seed=3)
    y = unpack_conv(shape, got, dense=True)
    np.testing.assert_array_equal(y, unpack_conv(shape, execute(alone, tensors, chip), dense=True))
    wide = y.astype(np.float64)
    np.testing.assert_allclose(got["y0"][:k], wide.mean(axis=(0, 2, 3)), atol=1e-5)
    np.testing.assert_allclose(got["y1"][:k], wide.var(axis=(0, 2, 3)), rtol=1e-5)
    assert sanitize(whole, chip) == []
    for phase in whole.phases:
        fast, slow = (simulate(phase, chip, engine=e).cycles for e in ("fast", "reference"))
        assert fast == slow


@pytest.mark.parametrize(("c", "k", "least"), [(64, 256, 0.6), (256, 64, 0.3), (128, 512, 0.6)])
def test_no_image_is_read_for_its_sums(c: int, k: int, least: float) -> None:
    """Sums cost a convolution that waits for memory next to nothing, and memory partial sums."""
    chip, size = load_chip("Ascend910A"), 56 if min(c, k) == 64 else 28
    shape = ConvShape(64, c, size, size, k, 1, 1, 1, 0, "fp16", "fp16")
    alone = Kernel("alone", (conv_launch(shape, chip, None, dense_placement(shape)),))
    one, other = (simulate_kernel(kernel, chip) for kernel in (summed(shape, chip), alone))
    apart = simulate_kernel(channel_sums_kernel(ChannelSums(64, k, size, size), chip), chip)
    assert other.cycles <= one.cycles < 1.05 * other.cycles
    assert one.cycles < (1.0 - least) * (other.cycles + apart.cycles)
    assert one.memory_bytes < 1.02 * other.memory_bytes


@pytest.mark.parametrize(
    ("changes", "tiling", "epilogue"),
    [
        ({}, GemmSchedule(32, 16, 16, 1, 2, 1), SUMMED),  # two tiles of output blocks
        ({"groups": 2}, None, SUMMED),
        ({}, None, Epilogue((), (Step("vconv", ("sums",), None, "fp32"),), "fp32", totals=True)),
    ],
)
@pytest.mark.parametrize("name", ["Ascend910A", "Ascend910B2"])
def test_what_cannot_be_summed_on_its_way_is_refused(
    changes: dict[str, int], tiling: GemmSchedule | None, epilogue: Epilogue, name: str
) -> None:
    shape = ConvShape(2, 16, 16, 16, 32, 3, 3, 1, 1, "fp16", "fp16")
    shape = replace(shape, **({"c": 64, "k": 64} if "groups" in changes else {}), **changes)
    with pytest.raises(AscendLabError, match=r"sum|totals"):
        summed(shape, load_chip(name), tiling, epilogue)


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
    chip, rng = load_chip("Ascend910A"), np.random.default_rng(0)
    y, tensors = _scaled(shape)
    schedule = te.auto_schedule(y, chip)
    x, scale, bias = (rng.uniform(0.5, 2, t.shape).astype(np.float32) for t in tensors)
    slope = scale / np.sqrt(scale + 1)
    (got,) = te.run(schedule, {"x": x, "scale": scale, "bias": bias}).values()
    np.testing.assert_allclose(got, x * slope + (bias - slope), rtol=1e-5)


def test_rows_of_sixteen_channels_fill_the_lanes() -> None:
    """A product and a sum, 2 cycles per 64 lanes each, though 14 x 14 pixels share a channel."""
    chip, shape = load_chip("Ascend910A"), (32, 64, 196, 16)
    kernel = te.lower(te.auto_schedule(_scaled(shape)[0], chip))
    text = "".join(str(p.program) for phase in kernel.phases for p in phase.parts)
    assert "S    scalar" not in text  # whole blocks move, no single elements
    least = np.prod(shape) / 64 / chip.core_count * 4
    assert least < simulate_kernel(kernel, chip).busy_cycles["V"] < 1.5 * least


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
