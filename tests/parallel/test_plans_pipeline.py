"""Pipelines: bubbles as closed forms, held micro-batches, orders that can run."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.errors import ClusterError
from ascend_lab.parallel.plans.pipeline import (
    BACKWARD,
    FORWARD,
    Task,
    bubble_share,
    orders,
    run_pipeline,
)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@settings(max_examples=30, deadline=None)
@given(stages=st.integers(1, 8), micro_batches=st.integers(1, 20), ratio=st.floats(0.5, 3.0))
def test_the_bubble_of_equal_stages_is_the_formula(
    schedule: str, stages: int, micro_batches: int, ratio: float
) -> None:
    lists = orders(schedule, stages, micro_batches)
    found = run_pipeline(lists, [1.0] * stages, [ratio] * stages)
    assert found.end_s == pytest.approx((micro_batches + stages - 1) * (1 + ratio))
    assert found.bubble == pytest.approx(bubble_share(stages, micro_batches), abs=1e-9)


@pytest.mark.parametrize(
    ("stages", "groups", "virtual"), [(2, 1, 2), (4, 2, 2), (4, 3, 3), (8, 2, 4)]
)
def test_interleaving_divides_the_bubble(stages: int, groups: int, virtual: int) -> None:
    m = stages * groups
    lists = orders("interleaved", stages, m, virtual)
    chunks = stages * virtual
    found = run_pipeline(lists, [1.0 / virtual] * chunks, [2.0 / virtual] * chunks)
    assert found.end_s == pytest.approx(3.0 * m + 3.0 * (stages - 1) / virtual)
    assert found.bubble == pytest.approx(bubble_share(stages, m, virtual))


@settings(max_examples=40, deadline=None)
@given(stages=st.integers(1, 8), micro_batches=st.integers(1, 20))
def test_held_micro_batches(stages: int, micro_batches: int) -> None:
    few = orders("1f1b", stages, micro_batches)
    many = orders("gpipe", stages, micro_batches)
    times = [1.0] * stages
    held = [sum(h.values()) for h in run_pipeline(few, times, times).peak_held]
    assert held == [min(stages - i, micro_batches) for i in range(stages)]
    held = [sum(h.values()) for h in run_pipeline(many, times, times).peak_held]
    assert held == [micro_batches] * stages


@pytest.mark.parametrize(("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3)])
def test_every_micro_batch_goes_both_ways_through_every_stage(schedule: str, virtual: int) -> None:
    lists = orders(schedule, 4, 8, virtual)
    found = [task for tasks in lists for task in tasks]
    wanted = {Task(s, m, way) for s in range(4 * virtual) for m in range(8)
              for way in (FORWARD, BACKWARD)}  # fmt: skip
    assert len(found) == len(wanted) and set(found) == wanted
    for device, tasks in enumerate(lists):
        assert {task.stage % 4 for task in tasks} == {device}


def test_transfers_and_a_slow_stage_make_it_longer() -> None:
    lists = orders("1f1b", 4, 8)
    plain = run_pipeline(lists, [1.0] * 4, [2.0] * 4)
    far = run_pipeline(lists, [1.0] * 4, [2.0] * 4, [0.1] * 3)
    slow = run_pipeline(lists, [1.0, 1.0, 1.5, 1.0], [2.0, 2.0, 3.0, 2.0])
    assert far.end_s >= plain.end_s + 6 * 0.1 - 1e-9
    assert slow.end_s >= 8 * 4.5 > plain.busy_s[0]


def test_tasks_do_not_overlap_and_wait_for_their_input() -> None:
    found = run_pipeline(orders("interleaved", 2, 4, 2), [1.0] * 4, [2.0] * 4, [0.25] * 3)
    ends = {t.task: t.end_s for t in found.tasks}
    for timed in found.tasks:
        task = timed.task
        if task.phase == FORWARD and task.stage:
            assert timed.start_s >= ends[Task(task.stage - 1, task.micro_batch, FORWARD)] + 0.25
    for device in range(2):
        own = sorted((t.start_s, t.end_s) for t in found.tasks if t.device == device)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))


@pytest.mark.parametrize(
    "arguments",
    [("other", 2, 2), ("1f1b", 0, 2), ("1f1b", 2, 0), ("1f1b", 2, 4, 2), ("interleaved", 4, 6, 2)],
)
def test_schedules_that_cannot_be(arguments: tuple[str, int, int]) -> None:
    with pytest.raises(ClusterError):
        orders(*arguments)


def test_a_deadlock_is_said() -> None:
    lists = orders("1f1b", 2, 2)
    with pytest.raises(ClusterError, match="deadlock"):
        run_pipeline([lists[0][::-1], lists[1]], [1.0] * 2, [1.0] * 2)
