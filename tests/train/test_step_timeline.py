"""Two lanes: buckets wait for gradients and each other; many devices."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.cluster import star
from ascend_lab.cluster.choice import Interpolated
from ascend_lab.errors import InputError
from ascend_lab.train.profile import GradientRow, StepProfile
from ascend_lab.train.timeline import all_reduce_cost, bucketed, step_timeline

ROWS = tuple(GradientRow(f"g{i}", 0.001 * (i + 1), 10**6 * (i + 1)) for i in range(4))
STEP = StepProfile("step", "chip", 0.002, 0.004, 0.001, ROWS)


def cost(size_bytes: float) -> float:
    """Return 0.1 ms + 1 ns a byte."""
    return 1e-4 + 1e-9 * size_bytes


def test_one_bucket_is_a_tail() -> None:
    found = step_timeline(STEP, cost, ((0, len(ROWS) - 1),))
    assert found.tail_s == pytest.approx(cost(10**7)) == found.exposed_s
    assert found.step_s == pytest.approx(0.007 + cost(10**7))
    assert found.hidden_share == pytest.approx(0.0)


def test_separate_buckets_by_hand() -> None:
    found = step_timeline(STEP, cost, [(i, i) for i in range(len(ROWS))])
    # ready 3, 4, 5, 6 ms after the start of the step; 1.1, 2.1, 3.1, 4.1 ms long
    spans = [
        (round(s.start_s * 1e3, 6), round(s.end_s * 1e3, 6)) for s in found.lane("communication")
    ]
    assert spans == [(3.0, 4.1), (4.1, 6.2), (6.2, 9.3), (9.3, 13.4)]
    assert found.step_s == pytest.approx(0.0144)
    assert found.tail_s == pytest.approx(0.0074) == found.exposed_s
    assert found.hidden_share == pytest.approx(1 - 7.4 / 10.4)


@settings(max_examples=40, deadline=None)
@given(cuts=st.sets(st.integers(1, 3)), beta=st.floats(0, 1e-8))
def test_lanes_never_overlap_and_bandwidth_never_hurts(cuts: set[int], beta: float) -> None:
    edges = [0, *sorted(cuts), 4]
    segments = [(a, b - 1) for a, b in itertools.pairwise(edges)]
    found = step_timeline(STEP, lambda n: 1e-5 + beta * n, segments)
    quick = step_timeline(STEP, lambda n: 1e-5 + beta / 2 * n, segments)
    assert quick.step_s <= found.step_s
    for lane in ("compute", "communication"):
        spans = found.lane(lane)
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(spans))
    assert STEP.step_s <= found.step_s <= STEP.step_s + found.communication_s + 1e-12
    assert -1e-9 <= found.hidden_share <= 1 + 1e-9
    assert found.exposed_s == pytest.approx(found.tail_s)


@pytest.mark.parametrize("segments", [[(0, 1)], [(0, 1), (3, 3)], [(1, 3)], [(0, 3), (3, 3)], []])
def test_segments_that_leave_gaps(segments: list[tuple[int, int]]) -> None:
    with pytest.raises(InputError):
        step_timeline(STEP, cost, segments)


def test_buckets_close_when_they_are_full() -> None:
    assert bucketed(ROWS, 5 * 10**6, 10**6) == ((0, 0), (1, 2), (3, 3))
    assert bucketed(ROWS) == ((0, 1), (2, 3))
    assert bucketed(()) == ()


def test_nothing_to_exchange_is_the_step_alone() -> None:
    found = step_timeline(STEP, lambda n: 0.0)
    assert found.step_s == pytest.approx(STEP.step_s) and found.hidden_share == 1.0


def test_the_cost_of_an_all_reduce_keeps_to_its_bound() -> None:
    found = all_reduce_cost(star(4, 1e-6, 1e-9))
    for size in (10.0**4, 10.0**6, 10.0**8):
        assert found(size) >= 2 * 3 / 4 * size * 1e-9
    assert all_reduce_cost(star(1, 1e-6, 1e-9))(1e9) == 0.0


@settings(max_examples=30, deadline=None)
@given(size=st.floats(1.0, 1e9))
def test_straight_lines_are_interpolated_exactly(size: float) -> None:
    calls: list[float] = []

    def line(n: float) -> float:
        calls.append(n)
        return 1e-5 + 1e-9 * n

    found = Interpolated(line)
    assert found(size) == pytest.approx(line(size))
    found(size)
    assert len(calls) == 3 and found(0) == 0.0
