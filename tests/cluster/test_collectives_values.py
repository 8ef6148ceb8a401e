"""Every collective by every algorithm gives NumPy's values, for any number of ranks."""

import numpy as np
import pytest
from collective_cases import CASES, FLAT, LEVELLED, RANKS, check, divisors, inputs, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.cluster import execute, make
from ascend_lab.cluster.algorithms import CASTS, GATHERS
from ascend_lab.errors import ClusterError


@pytest.mark.parametrize(("op", "name"), FLAT)
def test_values_of_flat_algorithms(op: str, name: str) -> None:
    for p in RANKS:
        for count, chunks in ((0, 1), (1, 2), (max(p - 1, 1), 1), (3 * p + 1, 3)):
            schedule = make(op, name, p, root=(5 * p + count) % p, chunks=chunks)
            check(schedule, inputs(op, p, count, seed=p))


@pytest.mark.parametrize(("op", "name"), LEVELLED)
def test_values_of_algorithms_in_levels(op: str, name: str) -> None:
    for p in RANKS:
        for each in divisors(p):
            for count, chunks in ((1, 1), (3 * p + 1, 2)):
                made = make(op, name, p, root=p // 2, chunks=chunks, groups=rows(p, each))
                check(made, inputs(op, p, count, seed=each))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CASES), st.integers(1, 17), st.integers(0, 70), st.integers(1, 5), st.data())
def test_values_of_floats_of_any_size(
    case: tuple[str, str], p: int, count: int, chunks: int, data: st.DataObject
) -> None:
    each = data.draw(st.sampled_from(divisors(p)))
    root = data.draw(st.integers(0, p - 1))
    made = make(*case, p, root=root, chunks=chunks, groups=rows(p, each))
    check(made, inputs(case[0], p, count, seed=count, kind="float64"), exact=False)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]),
    st.sampled_from(sorted(GATHERS)),
    st.sampled_from(sorted(GATHERS)),
    st.sampled_from([(2, 3), (4, 4), (6, 2), (3, 5)]),
    st.integers(1, 40),
    st.permutations(range(3)),
)
def test_any_two_algorithms_make_two_levels(
    op: str, inside: str, between: str, shape: tuple[int, int], count: int, turn: list[int]
) -> None:
    p = shape[0] * shape[1]
    groups = np.roll(np.arange(p).reshape(shape), turn[0], axis=0).tolist()
    made = make(op, f"hierarchical({inside},{between})", p, groups=groups)
    assert made.algorithm == f"hierarchical({inside},{between})"
    check(made, inputs(op, p, count, seed=count))


@pytest.mark.parametrize("op", ["broadcast", "reduce"])
@pytest.mark.parametrize("inside", CASTS)
@pytest.mark.parametrize("between", CASTS)
def test_any_two_casts_make_two_levels(op: str, inside: str, between: str) -> None:
    for root in (0, 4, 11):
        made = make(op, f"hierarchical({inside},{between})*2", 12, root=root, groups=rows(12, 4))
        check(made, inputs(op, 12, 29, seed=root))


@pytest.mark.parametrize(("op", "name"), LEVELLED)
def test_parts_of_servers_are_servers_too(op: str, name: str) -> None:
    made = make(op, f"{name}(2)", 12, root=5, groups=rows(12, 4))
    assert made.algorithm.startswith(f"{name}(2")
    check(made, inputs(op, 12, 17, seed=3))
    twos = make(op, name, 12, root=5, groups=rows(12, 2))
    assert [r.targets.tolist() for r in made.rounds] == [r.targets.tolist() for r in twos.rounds]


def test_a_wrong_schedule_would_be_seen() -> None:
    good = make("all_reduce", "ring", 4)
    short = type(good)("all_reduce", "short", 4, good.blocks, good.rounds[:-1])
    with pytest.raises(AssertionError):
        check(short, inputs("all_reduce", 4, 9, seed=1))
    gather = make("all_gather", "nhr", 5)
    with pytest.raises(ClusterError, match="delivered"):
        execute(type(gather)("all_gather", "short", 5, 5, gather.rounds[:-1]), [np.ones(2)] * 5)


def test_every_rank_sends_the_fewest_bytes_in_nhr_and_few_rounds() -> None:
    for p in range(2, 40):
        made = make("all_reduce", "nhr", p)
        assert len(made.rounds) == 2 * (p - 1).bit_length()
        sent = sum(np.bincount(r.sources, r.counts, minlength=p) for r in made.rounds)
        np.testing.assert_array_equal(sent, np.full(p, 2 * (p - 1)))
        nearest = made.rounds[0].counts[0]
        assert nearest == max(r.counts.max() for r in made.rounds)


def test_only_a_share_of_the_bytes_leaves_a_server() -> None:
    made = make("all_reduce", "hierarchical", 32, groups=rows(32, 8))
    outside = sum(
        int(step.counts[step.sources // 8 != step.targets // 8].sum()) for step in made.rounds
    )
    assert outside == 2 * (4 - 1) * made.blocks, "8 rails, each an all-reduce of n / 8 by 4 ranks"
