"""Chapters 17, 18 and 18a: the references of their checks, and what the figures say."""

import numpy as np
import pytest

from ascend_lab.deploy.compress import calibrate
from ascend_lab.deploy.media import Station, csc_of, simulate_card
from ascend_lab.deploy.runtime import pipeline_programs, run_streams
from ascend_lab.lab.checks.chapter17_18 import four_taps, latencies
from ascend_lab.lab.checks.chapter18a import best_cost, streams_s
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
    rows = {"per tensor": {3: [0.4, 0.5], 8: [0.9]}, "per channel": {3: [0.5], 8: [0.91]}}
    fig = fig_bits(rows, 0.92)
    assert "per tensor: 40.0 to 50.0% at 3, 90.0 to 90.0% at 8" in repr(fig)


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


def test_the_camera_sends_the_scene():
    frame = camera_frame()
    assert frame.size == 96 * 64 * 3 // 2 and scene().shape == (3, 64, 96)
    off = errors()
    near, *wrong = off.values()
    assert near < 5 and min(wrong) > 2 * near and off["U and V swapped"] > 50
    assert csc_of("601 narrow", "RGB").matrix[0] == (298, 0, 409)


def test_the_exercise_plays_pictures_as_the_package_does():
    pairs = [(2, 0.02), (1, 0.004)]
    stations = [Station(f"s{i}", *pair) for i, pair in enumerate(pairs)]
    gaps = np.random.default_rng(3).exponential(1 / 80, 200)
    played = simulate_card(stations, 80.0, 200, seed=3).latencies_s
    np.testing.assert_allclose(latencies(np.cumsum(gaps).tolist(), pairs), played)


@pytest.mark.parametrize("streams", [1, 2, 3, 5])
@pytest.mark.parametrize("steps", [(1.0, 2.0, 0.5), (2.0, 1.0, 2.5), (1.5, 1.5, 1.5)])
def test_streams_take_as_long_as_the_runtime_says(streams, steps):
    spans = run_streams(pipeline_programs(9, streams, *steps))
    assert streams_s(9, streams, *steps) == pytest.approx(max(span.end_s for span in spans))


def test_of_two_operators_that_must_stay_together_the_sum_decides():
    assert best_cost([(1.0, 3.0), (4.0, 1.0)], [(0, 1, 9.0)]) == 4.0
