"""The checks and figures of chapter 16, and what its prose claims."""

import numpy as np
import pytest

from ascend_lab.lab.checks.chapter15_16 import keys_outside, merge
from ascend_lab.lab.figures import fig_online_softmax
from ascend_lab.lab.figures.flash import flash_traffic, separate_traffic
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import simulate
from ascend_lab.operators.kernels.flash import flash_launch
from ascend_lab.operators.kernels.flash_shape import FlashShape, FlashTiling, traffic_bytes

A910 = load_chip("Ascend910A")
HEAD = FlashShape(1, 4096, 4096, 64, 64, 0.125)


# -- exercises -------------------------------------------------------------------------------------
def test_merging_is_associative():
    rng = np.random.default_rng(0)
    a, b, c = ((float(m), 1.5, rng.normal(size=2)) for m in (1, -3, 2))
    left = merge(merge(a, b), c)
    right = merge(a, merge(b, c))
    assert left[:2] == pytest.approx(right[:2])
    np.testing.assert_allclose(left[2], right[2])


# -- figures ---------------------------------------------------------------------------------------
def test_the_toy_ends_with_the_softmax():
    scores = np.array([1.0, 3.0, 2.0, 5.0])
    weights = np.exp(scores) / np.exp(scores).sum()
    for block in (1, 2, 3, 4):
        alt = fig_online_softmax(scores, block).alt_text
        assert ", ".join(f"{w:.3f}" for w in weights) in alt
    assert "m 3, l 1.135, factor 0.000; m 5, l 1.203, factor 0.135" in fig_online_softmax().alt_text


# -- claims ----------------------------------------------------------------------------------------
def test_bytes_and_cycles_of_the_introduction():
    apart = separate_traffic(HEAD, A910)
    flash = flash_traffic(HEAD, A910)
    least = 4 * 2 * 4096 * 64
    assert least * 16 == 2 * 4096 * 4096
    assert apart.gm_bytes > 200 * least
    assert apart.cycles > 2.5 * flash.cycles
    # the first core's keys and values come from device memory, all other reads from L2
    assert flash.memory_bytes == 3 * least // 4


def test_three_perfect_operators_move_four_times_as_much():
    ratio = 8 * 4096**2 / traffic_bytes(HEAD, FlashTiling(128, 128))
    assert ratio == pytest.approx(2 * 128 / 64, rel=0.04)


def test_the_vector_unit_is_always_busy_and_the_cube_rarely():
    shape = FlashShape(1, 128, 1024, 64, 64, 0.125)
    line = simulate(flash_launch(shape, A910, FlashTiling(128, 128)), A910)
    products = [s.start for s in line.spans if s.name == "mmad"]
    turns = [after - one for one, after in zip(products[8:], products[11:-3], strict=False)]
    assert set(turns) == {2163}  # three products a block, and V works all the time
    assert line.busy_cycles["V"] > 0.84 * line.cycles  # all but the first and the last
    assert line.busy_cycles["M"] == pytest.approx(0.3 * line.cycles, rel=0.1)


def test_the_other_loop_order_moves_more_than_twice_as_much():
    rows_outside = traffic_bytes(HEAD, FlashTiling(128, 128))
    assert keys_outside(4096, 4096, 64, 128) > 2 * rows_outside
