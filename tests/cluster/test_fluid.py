"""Fair shares: against exact filling, the max-min property, and bytes that are conserved."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.cluster.schedule import Uses, fair_rates, finish_times

Case = tuple[list[list[int]], list[int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Return paths over at most 5 resources, each used once a path, and whole capacities."""
    resources = draw(st.integers(1, 5))
    path = st.lists(st.integers(0, resources - 1), min_size=1, max_size=3, unique=True)
    paths = draw(st.lists(path, min_size=1, max_size=7))
    capacity = draw(st.lists(st.integers(1, 12), min_size=resources, max_size=resources))
    return paths, capacity


def filled(paths: list[list[int]], capacity: list[int]) -> list[Fraction]:
    """Raise all rates together; a flow stops when a resource of its path is full."""
    rates = [Fraction(0)] * len(paths)
    rising = set(range(len(paths)))
    while rising:
        room = []
        for r, limit in enumerate(capacity):
            users = [f for f in rising if r in paths[f]]
            if users:
                used = sum((rates[f] for f in range(len(paths)) if r in paths[f]), Fraction(0))
                room.append((limit - used) / len(users))
        step = min(room)
        for f in rising:
            rates[f] += step
        full = {
            r
            for r, limit in enumerate(capacity)
            if sum((rates[f] for f in range(len(paths)) if r in paths[f]), Fraction(0)) == limit
        }
        rising = {f for f in rising if not full & set(paths[f])}
    return rates


@settings(max_examples=60)
@given(cases())
def test_rates_equal_exact_filling_and_are_max_min_fair(case: Case) -> None:
    paths, capacity = case
    rates = fair_rates(Uses.of(paths), np.array(capacity, float))
    np.testing.assert_allclose(rates, [float(r) for r in filled(paths, capacity)], rtol=1e-9)
    load = [sum(rates[f] for f in range(len(paths)) if r in paths[f]) for r in range(len(capacity))]
    assert all(used <= limit * (1 + 1e-9) for used, limit in zip(load, capacity, strict=True))
    for f, path in enumerate(paths):
        # Somewhere on its way a resource is full and nobody there is faster.
        assert any(
            load[r] >= capacity[r] * (1 - 1e-9)
            and all(rates[g] <= rates[f] * (1 + 1e-9) for g in range(len(paths)) if r in paths[g])
            for r in path
        )


@settings(max_examples=60)
@given(cases(), st.data())
def test_every_flow_carries_its_bytes_between_its_start_and_its_end(
    case: Case, data: st.DataObject
) -> None:
    paths, capacity = case
    count = len(paths)
    starts = np.array(data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)), float)
    sizes = np.array(data.draw(st.lists(st.integers(0, 20), min_size=count, max_size=count)), float)
    uses, limits = Uses.of(paths), np.array(capacity, float)
    ends = finish_times(starts, sizes, uses, limits)
    assert (ends[sizes == 0] == starts[sizes == 0]).all()
    assert (ends[sizes > 0] > starts[sizes > 0]).all()
    moments = np.unique(np.concatenate([starts, ends]))
    carried = np.zeros(count)
    for begin, end in pairwise(moments):
        running = (starts <= begin) & (ends >= end) & (ends > starts)
        carried += fair_rates(uses, limits, running) * (end - begin)
    np.testing.assert_allclose(carried, sizes, atol=1e-6)


def test_two_flows_share_a_link_and_the_later_one_ends_when_the_link_has_carried_all() -> None:
    uses = Uses.of([[0], [0]])
    ends = finish_times(np.array([0.0, 1.0]), np.array([4.0, 4.0]), uses, np.array([2.0]))
    assert ends.tolist() == [3.0, 4.0]


def test_what_uses_nothing_has_no_limit_and_a_dead_link_never_ends() -> None:
    uses = Uses.of([[], [0], [1], [2]])
    capacity = np.array([0.0, np.inf, 5.0])
    assert fair_rates(uses, capacity).tolist() == [np.inf, 0.0, np.inf, 5.0]
    ends = finish_times(np.zeros(4), np.array([1.0, 1.0, 1.0, 10.0]), uses, capacity)
    assert ends.tolist() == [0.0, np.inf, 0.0, 2.0]
