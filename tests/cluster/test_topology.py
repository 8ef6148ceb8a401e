"""Topologies: makers, checks, what can be taken away, and the rate across the middle."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.cluster import Link, Topology, full_mesh, ring, star
from ascend_lab.errors import ClusterError

RATE = 1e10
ALPHA_S, BETA_S_PER_BYTE = 1e-6, 1 / RATE


@pytest.mark.parametrize(
    ("topology", "links", "across"),
    [
        (full_mesh(8, ALPHA_S, BETA_S_PER_BYTE), 56, 16),  # each of four to each of four
        (star(8, ALPHA_S, BETA_S_PER_BYTE), 16, 4),  # four links into the switch
        (ring(8, ALPHA_S, BETA_S_PER_BYTE), 16, 2),  # cut in two places
        (full_mesh(5, ALPHA_S, BETA_S_PER_BYTE), 20, 6),
        (ring(2, ALPHA_S, BETA_S_PER_BYTE), 2, 1),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_bisections_count_the_links_that_cross(topology: Topology, links: int, across: int) -> None:
    assert len(topology.links) == links
    assert topology.bisection_bytes_per_s() == pytest.approx(across * RATE)


def test_one_device_has_no_links_to_count() -> None:
    for maker in (star, full_mesh, ring):
        lonely = maker(1, ALPHA_S, BETA_S_PER_BYTE)
        assert lonely.size == 1
        assert math.isinf(lonely.bisection_bytes_per_s())


def least_cut(topology: Topology) -> float:
    """Return the least rate over a cut between the halves, over all places for the switches."""
    half, size = topology.size // 2, topology.size
    cuts = []
    for sides in itertools.product((True, False), repeat=len(topology.switches)):
        near = {*range(half), *(size + i for i, side in enumerate(sides) if side)}
        pairs = [pair for pair in topology.between if pair[0] in near and pair[1] not in near]
        cuts.append(sum(topology.rate_bytes_per_s[topology.between[p]] for p in pairs))
    return min(cuts)


@settings(max_examples=60)
@given(st.data())
def test_the_bisection_is_the_least_cut(data: st.DataObject) -> None:
    """Ford and Fulkerson: the greatest flow is the least cut."""
    pairs = [(a, b) for a in range(7) for b in range(7) if a != b]
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=20))
    links = tuple(Link(a, b, 0.0, 1 / data.draw(st.integers(1, 9))) for a, b in chosen)
    topology = Topology("room", ("a", "b", "c", "d"), ("s", "t", "u"), links)
    assert topology.bisection_bytes_per_s() == pytest.approx(least_cut(topology))


def test_links_in_parallel_count_as_the_fastest() -> None:
    links = (Link(0, 1, 2e-6, 1e-9), Link(0, 1, 1e-6, 1e-9), Link(0, 1, 0.0, 2e-9))
    topology = Topology("pair", ("a", "b"), (), links)
    assert topology.between == {(0, 1): 1}


@pytest.mark.parametrize(
    ("link", "said"),
    [
        (Link(0, 5, 0.0, 0.0), "nodes 0 to 2"),
        (Link(-1, 0, 0.0, 0.0), "nodes 0 to 2"),
        (Link(1, 1, 0.0, 0.0), "one node"),
        (Link(0, 1, -1e-6, 0.0), "alpha"),
        (Link(0, 1, math.nan, 0.0), "alpha"),
        (Link(0, 1, 0.0, -1e-9), "beta"),
        (Link(0, 1, 0.0, math.inf), "beta"),
    ],
)
def test_impossible_links_are_refused(link: Link, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        Topology("room", ("a", "b"), ("s",), (link,))


def test_devices_groups_and_gamma_are_checked() -> None:
    with pytest.raises(ClusterError, match="at least one device"):
        Topology("none", (), (), ())
    with pytest.raises(ClusterError, match="one server"):
        Topology("room", ("a", "b"), (), (), ((0,), (0, 1)))
    with pytest.raises(ClusterError, match="gamma"):
        Topology("room", ("a",), (), (), (), -1.0)
    for count in (0, -1, 2.0):
        with pytest.raises(ClusterError, match="a count of devices"):
            star(count, ALPHA_S, BETA_S_PER_BYTE)  # type: ignore[arg-type]


def test_what_is_cut_is_a_new_topology() -> None:
    mesh = full_mesh(4, ALPHA_S, BETA_S_PER_BYTE)
    cut = mesh.without((0, 3))
    assert len(cut.links) == len(mesh.links) - 1
    assert cut.bisection_bytes_per_s() == pytest.approx(3 * RATE)
    np.testing.assert_allclose(mesh.rate_bytes_per_s, RATE)
    with pytest.raises(ClusterError, match="a link to cut"):
        cut.without((0, 3))
