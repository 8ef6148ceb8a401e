"""The checks and figures of chapter 23, and what its prose claims."""

import numpy as np
import pytest

from ascend_lab.cluster.parallel.values import (
    Plan,
    Sgd,
    group as pieces,
    sentences,
    train,
    train_single,
    transformer,
)
from ascend_lab.errors import ClusterError
from ascend_lab.lab.checks.chapter23_26 import sent_bytes


# -- the closed forms, and messages between arrays -------------------------------------------------
def test_closed_bytes_are_those_of_executed_messages() -> None:
    """A layer more of the small transformer (fp64, biases and norms beside the matrices)."""
    width = 16
    length = 8
    batch = 8
    layers = 1
    plan = Plan(2, 2)
    more, less = (train(transformer(n), sentences(1), Sgd(), plan).traffic for n in (3, 2))
    wanted = sent_bytes(2, 2, 1, layers, width, length, batch)
    assert more.sent_bytes("tensor") - less.sent_bytes("tensor") == 4 * wanted[1]
    others = 8 * (7 * width / 2 + 6 * width)  # biases cut in two; norms and two biases whole
    assert more.sent_bytes("data") - less.sent_bytes("data") == 4 * wanted[0] + others


@pytest.mark.parametrize(("stages", "ways"), [(2, 1), (4, 2)])
def test_a_stage_in_the_middle_sends_both_ways(stages: int, ways: int) -> None:
    wanted = sent_bytes(1, 1, stages, 4, 16, 8, 8)[2]
    assert wanted == ways * 2 * 8 * 8 * 16
    run = train(transformer(), sentences(1), Sgd(), Plan(pipeline=stages, micro_batches=2))
    # counted over all boundaries: an activation forward and a slope back, 8 bytes a number
    assert run.traffic.sent_bytes("stage") == (stages - 1) * 2 * 8 * (8 * 8 * 16)


def test_a_forgotten_all_reduce_shows_in_copies_and_not_in_the_first_loss(monkeypatch) -> None:
    model = transformer()
    data = sentences(1)
    one = train_single(model, data, Sgd())
    monkeypatch.setattr(pieces, "copy_in", lambda tape, x, group: x)
    with pytest.raises(ClusterError, match="copies that differ"):
        train(model, data, Sgd(), Plan(tensor=2))
    monkeypatch.setattr("ascend_lab.cluster.parallel.values.same", lambda copies: True)
    blind = train(model, data, Sgd(), Plan(tensor=2))
    assert blind.losses[0] == pytest.approx(one.losses[0], rel=1e-12)
    key = "layer0.attention.norm.scale"
    assert not np.allclose(blind.gradients[0][key], one.gradients[0][key])
