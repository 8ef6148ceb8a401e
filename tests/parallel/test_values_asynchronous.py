"""Workers that wait, workers that do not, and how stale gradients limit the step."""

import numpy as np
import pytest
from values_cases import apart, perceptron, points

from ascend_lab.errors import ClusterError
from ascend_lab.parallel import values

MODEL, DATA = perceptron(), points(40)
LR = 0.1
PLAIN = values.Sgd(lr=LR, momentum=0.0)


def test_stragglers_cost_time_and_no_value() -> None:
    single = values.train_single(MODEL, DATA[:4], PLAIN)
    rng = np.random.default_rng(0)
    times_s = rng.uniform(1, 9, size=(4, 8)).tolist()
    run = values.train_synchronous(MODEL, DATA[:4], LR, times_s)
    assert apart(run.parameters, single.parameters) < 1e-10
    assert run.losses == pytest.approx(single.losses, rel=1e-12)
    np.testing.assert_allclose(run.ends_s, np.cumsum(np.max(times_s, axis=1)))


def test_one_worker_is_one_device() -> None:
    run = values.train_asynchronous(MODEL, DATA[:4], LR, [2.0])
    single = values.train_single(MODEL, DATA[:4], PLAIN)
    assert apart(run.parameters, single.parameters) < 1e-12
    assert run.staleness == (0,) * 4 and run.ends_s == (2.0, 4.0, 6.0, 8.0)


@pytest.mark.parametrize("workers", [2, 4])
def test_equal_workers_are_out_of_date_by_all_the_others(workers: int) -> None:
    run = values.train_asynchronous(MODEL, DATA, LR, [1.0] * workers)
    ramp = tuple(range(workers))
    assert run.staleness == ramp + (workers - 1,) * (len(DATA) - workers)
    assert run.ends_s[-1] == len(DATA) / workers


def test_stale_gradients_change_values_but_the_loss_still_falls() -> None:
    fresh, stale = (values.train_asynchronous(MODEL, DATA, LR, [1.0] * n) for n in (1, 4))
    assert apart(stale.parameters, fresh.parameters) > 1e-3
    assert np.mean(stale.losses[-8:]) < 0.7 * np.mean(stale.losses[:8])


def test_nobody_waits_for_a_straggler() -> None:
    run = values.train_asynchronous(MODEL, DATA, LR, [1.0, 1.0, 1.0, 5.0])
    assert max(run.staleness) > 10
    rows = values.train_synchronous(MODEL, DATA[:10], LR, [[1.0, 1.0, 1.0, 5.0]] * 10)
    assert run.ends_s[-1] < rows.ends_s[-1]  # 40 gradients of either


@pytest.mark.parametrize("times_s", [[], [1.0, 0.0], [-1.0]])
def test_times_that_cannot_be(times_s: list[float]) -> None:
    with pytest.raises(ClusterError, match="positive time"):
        values.train_asynchronous(MODEL, DATA, LR, times_s)


# -- the quadratic --------------------------------------------------------------------------------
@pytest.mark.parametrize("staleness", [0, 1, 2, 3, 7])
def test_the_largest_stable_rate(staleness: int) -> None:
    limit = values.stable_rate(staleness)
    below, above = (values.delayed_descent(f * limit, staleness, 5000) for f in (0.99, 1.01))
    assert np.abs(below[-50:]).max() < 0.1 < 5 < np.abs(above[-50:]).max()
    # independently: the largest root of z^(tau+1) - z^tau + rate is on the unit circle
    roots = np.roots([1.0, -1.0, *[0.0] * (staleness - 1), limit] if staleness else [1, limit - 1])
    assert np.abs(roots).max() == pytest.approx(1.0, abs=1e-9)


def test_stable_rates_by_hand() -> None:
    assert values.stable_rate(0) == pytest.approx(2.0)
    assert values.stable_rate(1) == pytest.approx(1.0)
    assert values.delayed_descent(0.5, 1, 3).tolist() == [1.0, 0.5, 0.0, -0.25]
