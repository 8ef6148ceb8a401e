"""Pooling by hand: means of planes on the cube, maxima beside padding; values and times."""

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from ascend_lab.fused.plane_means import PlaneMeans, ones_and_zeros, plane_means_launch
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa.sanitizer import sanitize
from ascend_lab.machine.sim import execute, simulate
from ascend_lab.operators.kernels import ConvShape
from ascend_lab.operators.kernels.pooling import max_pool_launch


@pytest.mark.parametrize("chip_name", ["Toy", "Ascend310", "Ascend910B2"])
@pytest.mark.parametrize(("planes", "pixels"), [(3, 49), (35, 49), (20, 1), (9, 1040), (50, 1030)])
def test_means_equal_numpy(chip_name: str, planes: int, pixels: int) -> None:
    """Planes with more pixels than a load, ragged ones, more than 16 a core, cores without."""
    chip = load_chip(chip_name)
    rng = np.random.default_rng(planes)
    x = rng.standard_normal((planes, pixels, 16)).astype(np.float16)
    # reach no other plane or channel
    x[0, 0, 0] = np.inf
    x[-1, -1, -1] = np.nan
    launch = plane_means_launch(PlaneMeans(planes, pixels), chip)
    given = {"x": x.ravel(), "ones": ones_and_zeros("float16").ravel()}
    found = execute(launch, given, chip)["y"].reshape(planes, 16).copy()
    exact = x.astype(np.float64).mean(axis=1)
    assert found[0, 0] == np.inf and np.isnan(found[-1, -1])
    found[0, 0] = found[-1, -1] = exact[0, 0] = exact[-1, -1] = 0
    np.testing.assert_allclose(found, exact, rtol=2.0**-10, atol=2.0**-20)


@st.composite
def pools(draw: st.DrawFn) -> ConvShape:
    """Draw windows of any stride and padding, planes of a row to more than UB holds."""
    (r, s), stride = (draw(st.tuples(*2 * [st.integers(1, 4)])) for _ in range(2))
    pads = tuple(draw(st.integers(0, size - 1)) for size in (r, r, s, s))
    h = max(draw(st.sampled_from((1, 2, 6, 9, 40, 300))), r)
    w = max(draw(st.sampled_from((1, 7, 8, 13, 30))), s)
    n = draw(st.integers(1, 2))
    c = draw(st.sampled_from((1, 16, 33)))
    return ConvShape(n, c, h, w, c, r, s, stride, pads, groups=c)


@given(pools(), st.sampled_from(["Toy", "Ascend310", "Ascend910B2"]))
@example(ConvShape(2, 20, 13, 11, 20, 3, 3, 2, 1, groups=20), "Toy")
@example(ConvShape(2, 33, 6, 6, 33, 2, 2, 2, 0, groups=33), "Ascend310")  # planes as one image
@example(ConvShape(1, 33, 6, 6, 33, 1, 1, 1, 0, groups=33), "Toy")
@example(ConvShape(1, 16, 600, 9, 16, 3, 3, 1, 1, groups=16), "Ascend310")  # 256 repeats
def test_maxima_equal_numpy(shape: ConvShape, chip_name: str) -> None:
    """All numbers are negative: neither zeros nor poison may stand around the image."""
    chip = load_chip(chip_name)
    (oh, ow) = shape.out_hw
    x = -np.random.default_rng(1).random((shape.n, shape.blocks[0], shape.h, shape.w, 16)) - 1
    tensors = {"x": x.astype(np.float16).ravel()}
    launch = max_pool_launch(shape, chip)
    found = execute(launch, tensors, chip)["y"]
    top, bottom, left, right = shape.pads
    sides = ((0, 0), (0, 0), (top, bottom), (left, right), (0, 0))
    wide = np.pad(x.astype(np.float16), sides, constant_values=-np.inf)
    down, across = shape.strides
    windows = np.lib.stride_tricks.sliding_window_view(wide, (shape.r, shape.s), axis=(2, 3))
    exact = windows[:, :, ::down, ::across].max(axis=(-1, -2))
    assert np.array_equal(found.reshape(exact.shape), exact) and exact.shape[2:4] == (oh, ow)
    assert sanitize(launch, chip) == []


@pytest.mark.parametrize(
    ("kernel", "stride", "taken"),
    [((3, 3), 2, 6), ((2, 2), 2, 3), ((3, 3), 1, 4), ((13, 13), 1, 24), ((1, 3), 1, 2)],
)
def test_rows_are_folded_once(kernel: tuple[int, int], stride: int, taken: int) -> None:
    """Vector cycles are those of `taken` comparisons a result, not of all but one of the window."""
    chip = load_chip("Ascend310")
    pad = tuple(size // 2 for size in kernel)
    shape = ConvShape(16, 64, 56, 56, 64, *kernel, stride, pad if stride == 1 else 0, groups=64)
    busy = simulate(max_pool_launch(shape, chip), chip).busy_cycles["V"]
    (oh, ow) = shape.out_hw
    cost = chip.vector_costs["vmax"].slope_cycles
    least = taken * 64 / 2 * oh * ow / 8 * cost  # 64 planes, 2 cores, 8 pixels a repeat
    assert least < busy < 1.8 * least


@pytest.mark.parametrize("chip_name", ["Ascend310", "Ascend310P3", "Ascend910A", "Ascend910B2"])
def test_a_padded_pool_reads_its_image_once(chip_name: str) -> None:
    chip = load_chip(chip_name)
    shape = ConvShape(16, 64, 112, 112, 64, 3, 3, 2, 1, groups=64)
    run = simulate(max_pool_launch(shape, chip), chip)
    moved = 2 * 16 * 64 * (112 * 112 + 56 * 56)
    assert run.memory_bytes <= 1.01 * moved
    assert run.cycles < 1.2 * moved / chip.device_memory.rate_bytes_per_s * chip.clock_hz
