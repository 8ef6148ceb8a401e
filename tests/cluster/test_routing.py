"""Routes: direct links first, then the quickest way through switches, then over devices."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.cluster import Link, Topology, full_mesh, load_topology, ring, star
from ascend_lab.cluster.topology import ROUTE_BYTES
from ascend_lab.errors import ClusterError


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


@settings(max_examples=60)
@given(rooms())
def test_a_route_is_as_quick_as_the_best_of_all_ways(topology: Topology) -> None:
    best = quickest(topology)
    if best is None:
        with pytest.raises(ClusterError, match="a way from a to b"):
            topology.route(0, 1)
        return
    path = topology.route(0, 1)
    assert sum(topology.links[i].alpha_s for i in path) == pytest.approx(best)


def test_shapes() -> None:
    assert nodes_on(full_mesh(4, 1e-6, 1e-10), 0, 3) == ["npu3"]
    assert nodes_on(star(4, 1e-6, 1e-10), 0, 3) == ["switch", "npu3"]
    assert nodes_on(ring(5, 1e-6, 1e-10), 0, 3) == ["npu4", "npu3"]


def test_bytes_weigh_as_well_as_latency() -> None:
    slow, fast = 1.0 / ROUTE_BYTES, 0.1 / ROUTE_BYTES
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


def test_a_dead_link_is_gone_round_and_a_device_cut_off_is_an_error() -> None:
    mesh = full_mesh(3, 1e-6, 1e-10).without((0, 1))
    assert nodes_on(mesh, 0, 1) == ["npu2", "npu1"]
    assert nodes_on(mesh, 1, 0) == ["npu0"]
    lonely = mesh.without((0, 2))
    with pytest.raises(ClusterError, match="npu0 to npu1"):
        lonely.route(0, 1)


def test_routes_are_found_once() -> None:
    topology = star(4, 1e-6, 1e-10)
    assert topology.route(0, 1) is topology.route(0, 1)
