"""Chapters 17 and 18: the references of their checks, and what the figures say."""

import numpy as np
import pytest

from ascend_lab.deploy.compress import calibrate
from ascend_lab.deploy.media import csc_of
from ascend_lab.lab.checks.chapter17_18 import best_cost, four_taps
from ascend_lab.lab.figures import fig_bits, fig_clipping
from ascend_lab.lab.figures.deploying import camera_frame, errors, scene


def test_figures_say_what_they_show():
    values = np.random.default_rng(0).normal(size=4000).astype(np.float32)
    values[0] = 9
    fig = fig_clipping(values, bits=4)
    assert f"kl at {calibrate(values, 'kl', bits=4).scale * 7:.2f}" in repr(fig)
    ax = fig.axes[1]
    ends, errors = ax.lines[0].get_data()
    dots = [line for line in ax.lines if line.get_marker() not in ("None", None)]
    assert len(dots) == 4
    for dot in dots:
        x, y = (float(v[0]) for v in dot.get_data())
        assert y == pytest.approx(float(np.interp(x, ends, errors)), rel=0.2)
    rows = {"per tensor": {3: 0.4, 8: 0.9}, "per channel": {3: 0.5, 8: 0.91}}
    fig = fig_bits(rows, 0.92)
    assert "per tensor: 40.0% at 3, 90.0% at 8" in repr(fig)


def test_four_taps_a_step_give_the_same_sum():
    rng = np.random.default_rng(4)
    image = rng.standard_normal((1, 3, 5, 9))
    weights = rng.standard_normal((2, 3, 1, 5))
    taps = four_taps(weights)
    # lane 4d + c of a pixel is channel c of the pixel d to the right
    ahead = [np.pad(image[..., d : d + 9], ((0, 0), (0, 1), (0, 0), (0, d))) for d in range(4)]
    lanes = np.concatenate(ahead, axis=1)
    plain = sum(weights[0, :, 0, t] @ image[0, :, 2, t] for t in range(5))
    packed = sum(taps[0, :, 0, q] @ lanes[0, :, 2, 4 * q] for q in range(2))
    assert np.isclose(plain, packed)
    assert best_cost([(1.0, 3.0), (4.0, 1.0)], [(0, 1, 9.0)]) == 4.0


def test_the_camera_sends_the_scene():
    frame = camera_frame()
    assert frame.size == 96 * 64 * 3 // 2 and scene().shape == (3, 64, 96)
    off = errors()
    near, *wrong = off.values()
    assert near < 5 and min(wrong) > 2 * near and off["U and V swapped"] > 50
    assert csc_of("601 narrow", "RGB").matrix[0] == (298, 0, 409)
