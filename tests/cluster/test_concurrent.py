"""Collectives and computations that share links and memories."""

import numpy as np
import pytest

from ascend_lab.cluster import (
    Communication,
    Compute,
    Schedule,
    full_mesh,
    load_topology,
    make,
    run_together,
    star,
    time_collective,
)
from ascend_lab.cluster import concurrent as events
from ascend_lab.errors import ClusterError

ALPHA_S, BETA_S_PER_BYTE = 1e-6, 1e-10
PAIR = star(2, ALPHA_S, BETA_S_PER_BYTE)
SWAP = make("all_reduce", "ring", 2)
MEGA = 1e6
ALONE_S = 2 * ALPHA_S + MEGA * BETA_S_PER_BYTE


def ends(found: object) -> dict[str, float]:
    return {name: span.end_s for name, span in found.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["ring", "nhr", "mesh", "tree", "chain*4", "hierarchical"])
@pytest.mark.parametrize("shape", ["910a-server", "910b-roce:16", "star:5"])
def test_a_job_alone_takes_its_time(name: str, shape: str) -> None:
    topology = load_topology(shape)
    schedule = make("all_reduce", name, topology)
    alone_s = time_collective(schedule, topology, 1e7).time_s
    for memory in (None, 1e18):
        found = run_together([Communication("a", schedule, 1e7, 3e-3)], topology, memory)
        assert found["a"].start_s == 3e-3
        assert np.isclose(found["a"].end_s - 3e-3, alone_s, rtol=1e-9)


def test_two_on_one_link_share_its_bytes_and_overlap_their_latency() -> None:
    found = ends(run_together([Communication(n, SWAP, MEGA) for n in "ab"], PAIR))
    both_s = 2 * ALPHA_S + 2 * MEGA * BETA_S_PER_BYTE
    assert np.allclose([found["a"], found["b"]], both_s, rtol=1e-9)
    assert both_s < 2 * ALONE_S


def test_the_second_begins_later_or_after_the_first() -> None:
    late = ends(run_together([Communication("a", SWAP, MEGA), late_job(40e-6)], PAIR))
    assert ALONE_S < late["a"] < late["b"]
    moved_s = late["b"] - 2 * ALPHA_S
    assert moved_s <= 2 * MEGA * BETA_S_PER_BYTE + 40e-6
    after = run_together(
        [Communication("b", SWAP, MEGA, after=("a",)), Communication("a", SWAP, MEGA)], PAIR
    )
    assert np.isclose(after["b"].start_s, ALONE_S) and np.isclose(after["b"].end_s, 2 * ALONE_S)
    apart = ends(run_together([Communication("a", SWAP, MEGA), late_job(1.0)], PAIR))
    assert np.isclose(apart["a"], ALONE_S) and np.isclose(apart["b"], 1 + ALONE_S)


def late_job(start_s: float) -> Communication:
    return Communication("b", SWAP, MEGA, start_s)


def test_jobs_on_other_devices_do_not_meet() -> None:
    mesh = full_mesh(4, ALPHA_S, BETA_S_PER_BYTE)
    jobs = [
        Communication("a", SWAP, MEGA, placement=(0, 1)),
        Communication("b", SWAP, 3 * MEGA, placement=(3, 2)),
    ]
    found = ends(run_together(jobs, mesh))
    assert np.isclose(found["a"], ALONE_S)
    assert np.isclose(found["b"], ALONE_S + 2 * MEGA * BETA_S_PER_BYTE)


def test_sharing_loses_no_bytes() -> None:
    """One link never idle: whatever the sizes, the last ends when all bytes have gone."""
    one = make("broadcast", "star", 2)
    sizes = [1e6, 3e5, 2e6, 7e5]
    jobs = [Communication(str(i), one, n) for i, n in enumerate(sizes)]
    found = ends(run_together(jobs, PAIR))
    assert np.isclose(max(found.values()), ALPHA_S + sum(sizes) * BETA_S_PER_BYTE)
    assert sorted(found, key=lambda name: found[name]) == ["1", "3", "0", "2"]


def test_communication_slows_computing_by_the_memory() -> None:
    """Computing alone would fill the memory; the all-reduce takes its share of it."""
    rate = 3e10
    work = Compute("work", 0, 1e-3, memory_bytes=1e-3 * rate)
    swap = Communication("swap", SWAP, 4e6)
    free = ends(run_together([work, swap], PAIR))
    assert np.isclose(free["work"], 1e-3)
    shared = ends(run_together([work, swap], PAIR, rate))
    moved = 2 * 4e6  # 2 rounds, each reads n / 2 and writes n / 2
    assert np.isclose(shared["work"], 1e-3 + moved / rate, rtol=1e-6)
    elsewhere = Compute("work", 1, 1e-3, memory_bytes=0.0)
    assert np.isclose(ends(run_together([elsewhere, swap], PAIR, rate))["work"], 1e-3)
    roomy = ends(run_together([work, swap], PAIR, 10 * rate))
    assert np.isclose(roomy["work"], 1e-3)


def test_adding_takes_memory_too() -> None:
    gamma = 1e-10
    pair = star(2, ALPHA_S, BETA_S_PER_BYTE, gamma)
    alone_s = time_collective(SWAP, pair, MEGA).time_s
    assert np.isclose(
        ends(run_together([Communication("a", SWAP, MEGA)], pair, 1e15))["a"], alone_s
    )
    tight = ends(run_together([Communication("a", SWAP, MEGA)], pair, 1.5e10))["a"]
    assert np.isclose(
        tight - alone_s, (3 / 1.5e10 - gamma) * MEGA / 2 + MEGA * (2 / 1.5e10 - 1e-10)
    )


def test_a_job_alone_needs_no_events_inside_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("an event inside a round")

    topology, schedule = load_topology("910a-roce:64"), make("all_reduce", "ring", 64)
    monkeypatch.setattr(events, "fair_rates", never)
    jobs = [Communication("a", schedule, 1e8), Compute("timer", 3, 1e-9)]
    with pytest.raises(AssertionError, match="inside"):
        run_together([*jobs, Communication("b", schedule, 1e8)], topology)
    assert len(run_together(jobs[:1], topology)) == 1


def test_nothing_to_do_takes_no_time() -> None:
    jobs = [
        Communication("empty", SWAP, 0.0, 2.0),
        Communication("single", make("all_reduce", "ring", 1), 1e9, after=("empty",)),
        Compute("idle", 1, 0.0, after=("single",)),
    ]
    found = run_together(jobs, PAIR, 1e9)
    assert [(span.start_s, span.end_s) for span in found.values()] == [(2.0, 2.0)] * 3
    assert run_together([], PAIR) == {}


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([Compute("a", 0, 1.0), Compute("a", 1, 1.0)], "a name for each"),
        ([Compute("a", 0, 1.0, after=("b",))], "no b"),
        ([Compute("a", 0, 1.0, after=("b",)), Compute("b", 0, 1.0, after=("a",))], "each other"),
        ([Compute("a", 2, 1.0)], "device below 2"),
        ([Compute("a", 0, -1.0)], "at least 0"),
        ([Compute("a", 0, 1.0, start_s=-1.0)], "start >= 0"),
        ([Communication("a", SWAP, float("nan"))], "at least 0"),
        ([Communication("a", SWAP, 1.0, placement=(0, 0))], "different devices"),
    ],
)
def test_jobs_that_are_none(jobs: list[object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        run_together(jobs, PAIR)  # type: ignore[arg-type]


def test_a_memory_without_rate() -> None:
    with pytest.raises(ClusterError, match="memory rate"):
        run_together([], PAIR, 0.0)


def test_schedules_may_be_shared_by_jobs() -> None:
    assert isinstance(SWAP, Schedule)
    jobs = [Communication(str(i), SWAP, MEGA, after=(str(i - 1),) if i else ()) for i in range(5)]
    assert np.isclose(ends(run_together(jobs, PAIR))["4"], 5 * ALONE_S)
