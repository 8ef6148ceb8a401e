"""Presets take their numbers from the chips; files of the reader's own are checked by entry."""

import json
from pathlib import Path

import pytest

from ascend_lab.cli import ascend_lab as main
from ascend_lab.cluster import Topology, load_topology
from ascend_lab.cluster.loader import TOPOLOGIES, usage
from ascend_lab.errors import ClusterError
from ascend_lab.machine.chip import load_chip

GBYTES_PER_S = 1e9


def rate(topology: Topology, a: str, b: str) -> float:
    nodes = (*topology.devices, *topology.switches)
    link = topology.between[nodes.index(a), nodes.index(b)]
    return float(topology.rate_bytes_per_s[link])


@pytest.mark.parametrize("kind", list(TOPOLOGIES))
@pytest.mark.parametrize("count", [1, 5, 64])
def test_every_preset_joins_all_its_devices(kind: str, count: int) -> None:
    limit = TOPOLOGIES[kind].limit
    topology = load_topology(f"{kind}:{count}" if limit else kind)
    assert topology.size == (count if limit else 8)
    assert topology.name == (f"{kind}:{count}" if limit else kind)
    for target in range(1, topology.size):
        assert topology.route(0, target)
        assert topology.route(target, 0)


def test_a_910_server_is_two_meshes_joined_over_the_hosts() -> None:
    chip = load_chip("Ascend910A")
    server = load_topology("910a-server")
    hccs = chip.links["hccs"].rate_bytes_per_s
    pcie = chip.links["pcie"].rate_bytes_per_s
    direct = [pair for pair in server.between if max(pair) < 8]
    assert len(direct) == 2 * 4 * 3
    assert all((a < 4) == (b < 4) for a, b in direct)
    assert rate(server, "npu0", "npu3") == pytest.approx(hccs)
    assert server.bisection_bytes_per_s() == pytest.approx(pcie)
    assert server.groups == (tuple(range(8)),)
    assert server.gamma_s_per_byte == 3 / chip.device_memory.rate_bytes_per_s


def test_a_910b_server_is_one_mesh_of_seven_links_each() -> None:
    chip = load_chip("Ascend910B2")
    server = load_topology("910b-server")
    assert chip.links["hccs"].count == 7
    leaving = list(server.leaving[0])
    assert sum(server.rated_bytes_per_s[leaving]) == pytest.approx(196 * GBYTES_PER_S)
    assert sum(server.rate_bytes_per_s[leaving]) == pytest.approx(119 * GBYTES_PER_S, rel=1e-3)
    assert server.bisection_bytes_per_s() == pytest.approx(16 * 17 * GBYTES_PER_S, rel=1e-3)
    assert server.switches == ()
    assert (server.alpha_s == chip.links["hccs"].latency_s).all()


@pytest.mark.parametrize(("kind", "chip", "rails"), [("910a", "910A", 4), ("910b", "910B2", 8)])
def test_roce_takes_the_ports_latency_over_one_rail_and_its_rate(
    kind: str, chip: str, rails: int
) -> None:
    port = load_chip(f"Ascend{chip}").links["roce"]
    cluster = load_topology(f"{kind}-roce:64")
    path = cluster.route(0, 8)
    assert sum(cluster.alpha_s[i] for i in path) == pytest.approx(port.latency_s)
    assert cluster.rated_bytes_per_s[list(path)].min() == pytest.approx(port.rate_bytes_per_s)
    share = {"910a": 1.0, "910b": 22 / 25}[kind]
    arrives = cluster.rate_bytes_per_s[list(path)].min()
    assert arrives == pytest.approx(share * port.rate_bytes_per_s)
    assert sum(name.startswith("rail") for name in cluster.switches) == rails
    assert cluster.bisection_bytes_per_s() == pytest.approx(32 * share * port.rate_bytes_per_s)
    assert cluster.groups[3] == tuple(range(24, 32))


def test_dies_of_an_a3_pod_reach_each_other_as_published() -> None:
    """Point to point 119 GB/s; 0.2 us inside a package, 0.5 in a server, 5.5 between servers."""
    pod = load_topology("a3-pod:48")
    for target, latency_us, gbytes in ((1, 0.2, 136), (2, 0.5, 119), (16, 5.5, 119)):
        path = list(pod.route(0, target))
        assert sum(pod.alpha_s[path]) == pytest.approx(latency_us * 1e-6)
        assert pod.rate_bytes_per_s[path].min() == pytest.approx(gbytes * GBYTES_PER_S, rel=1e-3)
    assert pod.groups[2] == tuple(range(32, 48))
    assert load_topology("a3-pod:16").switches == ("server0",)
    assert pod.bisection_bytes_per_s() == pytest.approx(24 * 119 * GBYTES_PER_S, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("910b-srver", "did you mean 910b-server"),
        ("", "there are 910a-server"),
        ("910b-server:8", "without a count"),
        ("star", "star:N with N from 1 to 1024"),
        ("star:0", "N from 1"),
        ("star:-3", "N from 1"),
        ("star:2.5", "N from 1"),
        ("star:\u0663", "N from 1"),
        ("910a-roce:1025", "to 1024"),
        ("mesh:" + "9" * 5000, "to 256"),
        ("nowhere/at-all.toml", "a readable topology file"),
    ],
)
def test_names_that_mean_nothing_are_refused(name: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        load_topology(name)


# -- files ----------------------------------------------------------------------------------------
GOOD = """
name = "two boxes"
devices = ["a", "b", "c", "d"]
switches = ["sw"]
servers = [["a", "b"], ["c", "d"]]
gamma_s_per_byte = 2e-12
[[links]]
from = ["a", "b", "c", "d"]
to = "sw"
alpha_us = 2
gbytes_per_s = 12.5
[[links]]
from = "a"
to = "b"
alpha_s = 1e-6
beta_s_per_byte = 1e-11
one_way = true
"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "room.toml"
    path.write_text(GOOD, "utf-8")
    return path


def test_a_file_becomes_a_topology(written: Path) -> None:
    room = load_topology(written)
    assert (room.name, room.devices, room.switches) == ("two boxes", tuple("abcd"), ("sw",))
    assert room.groups == ((0, 1), (2, 3))
    assert room.gamma_s_per_byte == 2e-12
    assert len(room.links) == 9
    assert (rate(room, "a", "sw"), rate(room, "sw", "a")) == pytest.approx((12.5e9, 12.5e9))
    assert rate(room, "a", "b") == pytest.approx(1e11)
    assert {x.alpha_s for x in room.links} == {2e-6, 1e-6}
    assert len(room.route(1, 0)) == 2


def test_a_file_needs_little(written: Path) -> None:
    written.write_text("devices = 1\n", "utf-8")
    room = load_topology(str(written))
    assert (room.name, room.devices, room.links) == ("room", ("npu0",), ())


# -- command line ---------------------------------------------------------------------------------
def test_the_command_lists_and_shows(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topologies", "--json", "-"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert list(listed) == [usage(kind) for kind in TOPOLOGIES]
    assert all(entry["summary"] and entry["source"] for entry in listed.values())
    assert main(["topologies"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name} " in text for name in listed)
    assert main(["topologies", str(written), "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (len(shown["links"]), shown["bisection_bytes_per_s"]) == (9, pytest.approx(25e9))
    assert main(["topologies", "910a-roce:64"]) == 0
    text = capsys.readouterr().out
    assert "910a-roce:64: 64 devices in 8 servers, 21 switches" in text
    assert "bisection 400 GB/s" in text
    assert "192 npu - npu" in text
    assert main(["topologies", "star:x"]) == 2
    assert capsys.readouterr().err.startswith("ascend-lab: star:N with N from 1")
