"""Routing of tokens to experts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from values_cases import SGD

from ascend_lab.parallel import values
from ascend_lab.parallel.values.models import capacity_of, route


def test_first_choices_and_earlier_tokens_come_first() -> None:
    chances = np.array([[[0.6, 0.4, 0.0], [0.7, 0.1, 0.2], [0.1, 0.5, 0.4]]])
    sent = route(chances, top=2, capacity=2)[0]
    # expert 0 is full with the first choices of tokens 0 and 1, expert 1 with 2's and 0's
    assert sent[:, 0].tolist() == [[1, 0], [0, 1], [0, 0]]
    assert sent[:, 1].tolist() == [[0, 1], [0, 0], [1, 0]]
    assert sent[:, 2].tolist() == [[0, 0], [1, 0], [0, 1]]


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 6))
def test_slots_hold_one_token_and_tokens_go_to_their_best(
    seed: int, top: int, capacity: int
) -> None:
    chances = np.random.default_rng(seed).random((2, 7, 4))
    sent = route(chances, top, capacity)
    assert sent.sum(axis=1).max() <= 1
    went = sent.sum(axis=-1)
    assert went.max() <= 1 and went.sum(axis=-1).max() <= top
    best = np.argsort(-chances, axis=-1)[..., :top]
    allowed = np.zeros_like(went)
    np.put_along_axis(allowed, best, 1, axis=-1)
    assert (went <= allowed).all()
    # a token is dropped only where the expert is full
    full = sent.sum(axis=(1, 3)) == capacity
    assert (full[:, None] | (went == allowed)).all()


@pytest.mark.parametrize(("factor", "slots"), [(1.0, 4), (1.25, 5), (0.01, 1), (2.0, 8)])
def test_capacity(factor: float, slots: int) -> None:
    assert capacity_of(tokens=8, experts=4, top=2, factor=factor) == slots


def test_room_for_all_makes_no_difference_to_more_room() -> None:
    data = values.sentences(1)
    runs = [
        values.train_single(values.experts_transformer(factor=f), data, SGD) for f in (4.0, 8.0)
    ]
    tight = values.train_single(values.experts_transformer(factor=0.5), data, SGD)
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-12)
    assert tight.losses[0] != pytest.approx(runs[0].losses[0], rel=1e-6)
