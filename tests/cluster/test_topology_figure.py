"""The drawing of a topology: what is shown, what is left out, and that odd ones do not break it."""

import pytest
from matplotlib.patches import Circle, Rectangle

from ascend_lab.cluster import Link, Topology, load_topology
from ascend_lab.lab.figures import fig_topology
from ascend_lab.lab.figures.style import LabFigure


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
    assert label == "npu - npu: 28 GB/s, 0.5 µs (56 links)"
    assert "56 links npu - npu of 28 GB/s" in fig.alt_text
    assert "448 GB/s between the halves" in fig.alt_text


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


def test_hosts_stand_in_their_server_and_the_network_below() -> None:
    fig = fig_topology(load_topology("910a-roce:16"))
    at = {text.get_text(): text.get_position() for text in fig.axes[0].texts}
    assert at["0"][1] < at["host0.0"][1] < at["rail0"][1] < at["spine"][1]
    assert at["host0.1"][0] < at["host1.0"][0]


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
