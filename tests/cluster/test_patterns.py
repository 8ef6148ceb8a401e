"""Prepared rounds give the times that the events of the fluid give."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.cluster import Round, load_topology, make, time_collective
from ascend_lab.cluster.schedule import Uses, finish_times
from ascend_lab.cluster.timing import pattern_of, prepare, routed

SHAPES = ("910a-server", "910b-roce:16", "910a-roce:16", "ethernet-25g:16", "star:6", "ring:5")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(1, 40), st.floats(1, 1e8), st.integers(0, 999))
def test_straight_lines_and_events_agree(
    shape: str, messages: int, block_bytes: float, seed: int
) -> None:
    topology, rng = load_topology(shape), np.random.default_rng(seed)
    sources = rng.integers(0, topology.size, messages)
    targets = (sources + rng.integers(1, topology.size, messages)) % topology.size
    blocks = [list(range(rng.integers(0, 5))) for _ in range(messages)]
    step = Round.of(sources, targets, blocks, rng.random(messages) < 0.5)
    places = tuple(rng.permutation(topology.size).tolist())
    pattern = pattern_of(step, topology, places)
    sizes = step.counts * block_bytes
    paths, starts = routed(step, topology, places)
    ends = finish_times(starts, sizes, Uses.of(paths), topology.rate_bytes_per_s)
    np.testing.assert_allclose(pattern.ends_s(block_bytes), ends, rtol=1e-7)
    added = np.bincount(targets[step.reduces], sizes[step.reduces], minlength=1).max()
    whole_s = ends.max() + added * topology.gamma_s_per_byte
    assert np.isclose(pattern.time_s(block_bytes, topology), whole_s, rtol=1e-7)
    last, first, busiest = pattern.floor(topology)
    assert max(last, first + busiest * block_bytes) <= ends.max() * (1 + 1e-7)


def test_components_join_flows_that_share_through_others() -> None:
    uses = Uses.of([[0], [1, 2], [3], [2, 4], [4, 5], [6]])
    assert uses.components().tolist() == [0, 1, 2, 1, 1, 5]
    chain = Uses.of([[i, i + 1] for i in reversed(range(50))])
    assert set(chain.components().tolist()) == {0}
    kept = uses.only(np.array([False, True, False, True, False, False]))
    assert kept.count == 2 and kept.flow.tolist() == [0, 0, 1, 1]
    assert kept.resource.tolist() == [1, 2, 2, 4]


def test_equal_rounds_are_prepared_once() -> None:
    topology, schedule = load_topology("star:16"), make("all_reduce", "ring", 16)
    ready = prepare(schedule, topology, tuple(range(16)))
    assert len(ready.rounds) == 30 and len(ready.patterns) == 2
    found = time_collective(schedule, topology, 1e6)
    assert np.isclose(ready.time_s(1e6), found.time_s) and len(set(found.rounds_s)) <= 2
