"""Topologies: what they hold, how their routes go, and their figure."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from matplotlib.patches import Circle, Rectangle

from ascend_lab.cluster import Topology, full_mesh, load_topology, ring, star
from ascend_lab.cluster.topology import ROUTE_BYTES, Link
from ascend_lab.errors import ClusterError
from ascend_lab.lab.figures import fig_topology
from ascend_lab.lab.figures.style import LabFigure

RATE = 1e10
ALPHA_S = 1e-6
BETA_S_PER_BYTE = 1 / RATE


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


def least_cut(topology: Topology) -> float:
    """Return the least rate over a cut between the halves, over all places for the switches."""
    half = topology.size // 2
    size = topology.size
    cuts = []
    for sides in itertools.product((True, False), repeat=len(topology.switches)):
        near = {*range(half), *(size + i for i, side in enumerate(sides) if side)}
        pairs = [pair for pair in topology.between if pair[0] in near and pair[1] not in near]
        cuts.append(sum(topology.rate_bytes_per_s[topology.between[p]] for p in pairs))
    return min(cuts)


@settings(max_examples=100)
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


def nodes_on(topology: Topology, a: int, b: int) -> list[str]:
    path = topology.route(a, b)
    ends = [(topology.links[i].source, topology.links[i].target) for i in path]
    assert ends[0][0] == a
    assert ends[-1][1] == b
    assert all(one[1] == two[0] for one, two in itertools.pairwise(ends))
    return [topology.label(target) for _, target in ends]


@st.composite
def rooms(draw: st.DrawFn) -> Topology:
    """Return two devices and up to four switches with links at random."""
    switches = draw(st.integers(1, 4))
    pairs = [(a, b) for a in range(2 + switches) for b in range(2 + switches) if a != b]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=14))
    microseconds = st.integers(1, 50)
    links = tuple(Link(a, b, 1e-6 * draw(microseconds), 0.0) for a, b in chosen)
    return Topology("room", ("a", "b"), tuple(f"s{i}" for i in range(switches)), links)


def quickest(topology: Topology) -> float | None:
    """Return the least latency from device 0 to 1 by trying every order of switches."""
    if (0, 1) in topology.between:
        return topology.links[topology.between[0, 1]].alpha_s
    costs = []
    switches = range(2, 2 + len(topology.switches))
    for count in range(1, len(topology.switches) + 1):
        for middle in itertools.permutations(switches, count):
            hops = list(itertools.pairwise([0, *middle, 1]))
            if all(hop in topology.between for hop in hops):
                costs.append(sum(topology.links[topology.between[h]].alpha_s for h in hops))
    return min(costs, default=None)


@settings(max_examples=100)
@given(rooms())
def test_a_route_is_as_quick_as_the_best_of_all_ways(topology: Topology) -> None:
    best = quickest(topology)
    if best is None:
        with pytest.raises(ClusterError, match="a way from a to b"):
            topology.route(0, 1)
        return
    path = topology.route(0, 1)
    assert sum(topology.links[i].alpha_s for i in path) == pytest.approx(best)


def test_bytes_weigh_as_well_as_latency() -> None:
    slow = 1.0 / ROUTE_BYTES
    fast = 0.1 / ROUTE_BYTES
    links = [Link(0, 2, 0.0, slow), Link(2, 1, 0.0, slow)]
    links += [Link(0, 3, 0.4, fast), Link(3, 1, 0.4, fast)]
    room = Topology("room", ("a", "b"), ("slow", "fast"), tuple(links))
    assert nodes_on(room, 0, 1) == ["fast", "b"]
    late = [replace(link, alpha_s=link.alpha_s * 3) for link in links]
    assert nodes_on(replace(room, links=tuple(late)), 0, 1) == ["slow", "b"]


def test_a_910a_server_crosses_its_hosts_and_a_cluster_its_rails() -> None:
    cluster = load_topology("910a-roce:16")
    assert nodes_on(cluster, 0, 3) == ["npu3"]
    assert nodes_on(cluster, 0, 4) == ["host0.0", "host0.1", "npu4"]
    assert nodes_on(cluster, 0, 12) == ["rail0", "npu12"]
    assert nodes_on(cluster, 0, 9) == ["rail0", "spine", "rail1", "npu9"]


def texts(fig: LabFigure) -> list[str]:
    return [text.get_text() for text in fig.axes[0].texts]


def drawn(fig: LabFigure, kind: type) -> int:
    return sum(isinstance(patch, kind) for patch in fig.axes[0].patches)


def test_a_server_shows_every_device_and_every_cable() -> None:
    fig = fig_topology(load_topology("910b-server"))
    assert drawn(fig, Circle) == 8
    assert len(fig.axes[0].lines) == 28
    assert {str(d) for d in range(8)} <= set(texts(fig))
    (label,) = [text.get_text() for text in fig.legends[0].get_texts()]
    assert label == "npu - npu: 17 GB/s, 0.5 µs (56 links)"
    assert "56 links npu - npu of 17 GB/s" in fig.alt_text
    assert "271.9 GB/s between the halves" in fig.alt_text


def test_1024_devices_are_drawn_by_three_servers() -> None:
    fig = fig_topology(load_topology("910b-roce:1024"))
    said = texts(fig)
    titles = [text for text in said if text.startswith("server")]
    assert titles == [f"server {s}: 8 devices" for s in (0, 1, 127)]
    assert drawn(fig, Circle) == 24
    assert drawn(fig, Rectangle) == 9
    assert "···" in said
    assert {"0", "15", "1023", "rail7", "spine"} <= set(said)
    assert "1024 devices in 128 servers" in fig.alt_text
    assert fig.to_svg().startswith("<svg")


LONELY = Topology("lonely", ("a", "b"), ("s",), ())
ONE_WAY = Topology("one way", ("a", "b"), (), (Link(0, 1, 0.0, 0.0),))
MANY = Topology(
    "many switches",
    ("a", "b"),
    tuple(f"s{i}" for i in range(12)),
    tuple(Link(d, 2 + i, i * 1e-6, 1e-9) for i in range(12) for d in (0, 1)),
    ((0,), (1,)),
)


@pytest.mark.parametrize(
    ("topology", "lines"),
    [
        (LONELY, 0),
        (ONE_WAY, 1),
        (MANY, 2 * 8),
        (load_topology("ring:64"), 11),
        (load_topology("star:1024"), 12),
        (load_topology("910a-roce:1"), 3),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_odd_topologies_are_drawn(topology: Topology, lines: int) -> None:
    fig = fig_topology(topology)
    assert len(fig.axes[0].lines) == lines
    assert fig.to_svg().startswith("<svg")
