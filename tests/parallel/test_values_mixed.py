"""Mixed precision: near fp64 training, scales that react, steps skipped by all ranks together."""

from functools import cache

import numpy as np
import pytest

from ascend_lab.errors import ClusterError
from ascend_lab.parallel import values
from ascend_lab.parallel.values import MixedRun
from ascend_lab.train import DynamicLossScale

ADAM = values.Adam(lr=0.01)
MODEL, DATA = values.transformer(layers=1), values.sentences(12)


@cache
def mixed(ranks: int, start: float, interval: int = 1000) -> MixedRun:
    scale = DynamicLossScale(start, growth_interval=interval)
    return values.train_mixed(MODEL, DATA, ADAM, ranks, scale)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_follow_those_of_fp64(ranks: int) -> None:
    wanted = values.train_single(MODEL, DATA, ADAM).losses
    found = mixed(ranks, 2.0**10)
    assert not any(found.skipped)
    np.testing.assert_allclose(found.losses, wanted, rtol=0.01)
    assert all(w.dtype == np.float32 for w in found.parameters.values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_overflow_skips_the_step_on_all_ranks_and_halves_the_scale(ranks: int) -> None:
    run = mixed(ranks, 2.0**24)
    skips = run.skipped.index(False)
    assert 0 < skips < len(DATA) and not any(run.skipped[skips:])
    assert run.scales == tuple(2.0 ** (24 - min(n, skips)) for n in range(len(DATA)))
    # skipped steps leave no trace: training as if it began there, with the scale it ended at
    later = values.train_mixed(
        MODEL, DATA[skips:], ADAM, ranks, DynamicLossScale(2.0 ** (24 - skips))
    )
    assert later.losses == run.losses[skips:]
    for key, weight in later.parameters.items():
        np.testing.assert_array_equal(run.parameters[key], weight)


def test_ranks_agree_in_one_number_a_step() -> None:
    assert mixed(2, 2.0**24).traffic.of("data", "all_reduce").size_bytes == 4 * len(DATA)


def test_good_steps_double_the_scale() -> None:
    assert mixed(1, 2.0**8, interval=4).scales == (256.0,) * 4 + (512.0,) * 4 + (1024.0,) * 4


def test_small_gradients_vanish_without_a_scale() -> None:
    grads = {"w": np.array([0.0, 1e-9, 1e-7, 1e-3])}
    assert values.vanishing(grads) == pytest.approx(1 / 3)
    assert values.vanishing(grads, 2.0**10) == 0.0


def test_a_scale_that_is_too_small_loses_the_gradients() -> None:
    assert mixed(1, 2.0**-16).zeros[0] > 0.1 + mixed(1, 2.0**10).zeros[0]
    lost = mixed(1, 2.0**-26)
    assert set(lost.zeros) == {1.0}
    for key, weight in MODEL.weights.items():
        np.testing.assert_array_equal(lost.parameters[key], weight.astype(np.float32))


def test_messages_are_half_as_long_as_in_fp32() -> None:
    run = mixed(2, 2.0**10)
    for op in ("reduce_scatter", "all_gather"):
        assert run.traffic.of("data", op).size_bytes == 2 * MODEL.elements * len(DATA)


def test_a_batch_that_ranks_do_not_divide() -> None:
    with pytest.raises(ClusterError, match="a batch divisible by 3"):
        mixed(3, 1.0)
