"""Topologies by name: servers of NPUs as built, clusters of them, and three shapes to think with.

Rates and latencies of links are the chip's own (`ascend_lab/chip/presets`, with sources). What no
source states is assumed as follows. A rate holds in each direction; nothing is taken off for
protocols. HCCS and PCIe cost their latency a link; the chip's RoCE latency is from NPU to NPU over
one switch, half of it a hop. Switches are never the bottleneck. Adding a received byte reads two
bytes and writes one: gamma = 3 / memory rate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from ascend_lab.chip import Chip, load_chip
from ascend_lab.chip.model import Link as ChipLink
from ascend_lab.cluster.files import read_topology
from ascend_lab.cluster.topology import Link, Topology, both_ways, full_mesh, ring, star
from ascend_lab.errors import ClusterError

SERVER_DEVICES = 8
HALF_DEVICES = 4
"""NPUs of one HCCS full mesh in a 910 server."""
TEACHING_ALPHA_S, TEACHING_BETA_S_PER_BYTE = 5e-6, 1e-10
"""Round numbers: 5 us and 10 GB/s."""
ETHERNET_BETA_S_PER_BYTE = 8 / 25e9
ETHERNET_ALPHA_S = 30e-6
"""TCP through two hosts: all-reduce on 16 servers by 10G Ethernet starts in 908 us = 2 * 15 alpha
(Shi et al. 2019, MG-WFBP)."""
BYTES_PER_ADD = 3


@dataclass(frozen=True, slots=True)
class Preset:
    """A named topology: most devices (0: no N), builder, one line, where the numbers come from."""

    name: str
    limit: int
    build: Callable[[int], Topology]
    summary: str
    source: str


def load_topology(text: str | Path) -> Topology:
    """Return a preset ("910b-server", "910a-roce:64", "star:8") or read a .toml file.

    Raises `ClusterError` for unknown names, counts outside the preset's range and wrong files.
    """
    name = str(text)
    if name.endswith(".toml"):
        return read_topology(name)
    kind, colon, count = name.partition(":")
    preset = TOPOLOGIES.get(kind)
    if preset is None:
        raise ClusterError("a topology by name or a .toml file", repr(name), _suggestion(kind))
    if not preset.limit:
        if colon:
            raise ClusterError(f"{kind} without a count", repr(name), f"write {kind}")
        return _built(kind, SERVER_DEVICES)
    if not (count.isascii() and count.isdigit() and 1 <= int(count[:9]) <= preset.limit):
        what = f"{kind}:N with N from 1 to {preset.limit}"
        raise ClusterError(what, repr(name), f"for example {kind}:8")
    return _built(kind, int(count))


@cache
def _built(kind: str, count: int) -> Topology:
    return TOPOLOGIES[kind].build(count)


def _suggestion(kind: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(kind.lower(), TOPOLOGIES, 1)
    asked = f"did you mean {usage(close[0])}? " if close else ""
    return f"{asked}there are {', '.join(map(usage, TOPOLOGIES))}"


def usage(kind: str) -> str:
    """Return how a preset is written: with :N where it takes a count."""
    return f"{kind}:N" if TOPOLOGIES[kind].limit else kind


# -- servers and clusters -------------------------------------------------------------------------
def _cable(a: int, b: int, kind: ChipLink, hops: int = 1, lanes: int = 1) -> tuple[Link, Link]:
    """Return a cable of `lanes` of the chip's links that has its latency over `hops` of them."""
    return both_ways(a, b, kind.latency_s / hops, 1.0 / (kind.rate_bytes_per_s * lanes))


def _mesh(devices: range, kind: ChipLink) -> list[Link]:
    return [x for a in devices for b in devices if a < b for x in _cable(a, b, kind)]


def _two_meshes(group: range, chip: Chip, hosts: tuple[int, int]) -> list[Link]:
    """Return two full meshes of up to four; every NPU on its host by PCIe, the hosts joined."""
    pcie = chip.links["pcie"]
    links = list(_cable(*hosts, pcie))
    for host, mesh in zip(hosts, (group[:HALF_DEVICES], group[HALF_DEVICES:]), strict=True):
        links += _mesh(mesh, chip.links["hccs"])
        links += [x for device in mesh for x in _cable(device, host, pcie)]
    return links


def _room(name: str, count: int, chip: Chip, network: Sequence[str] = ()) -> Topology:
    """Return servers of eight (the last may be smaller), wired inside, and network switches.

    NPUs with three HCCS links (910A) form two meshes, joined over their hosts; those with seven
    one mesh. Switches are numbered: the two hosts of every server, then those of `network`.
    """
    groups = [
        range(start, min(start + SERVER_DEVICES, count))
        for start in range(0, count, SERVER_DEVICES)
    ]
    hosts: list[str] = []
    links: list[Link] = []
    for i, group in enumerate(groups):
        if chip.links["hccs"].count < SERVER_DEVICES - 1:
            links += _two_meshes(group, chip, (count + len(hosts), count + len(hosts) + 1))
            hosts += [f"host{i}.0", f"host{i}.1"]
        else:
            links += _mesh(group, chip.links["hccs"])
    devices = tuple(f"npu{d}" for d in range(count))
    gamma = BYTES_PER_ADD / chip.device_memory.rate_bytes_per_s
    return Topology(
        name, devices, (*hosts, *network), tuple(links), tuple(map(tuple, groups)), gamma
    )


def _roce(name: str, count: int, chip: Chip, rails: int) -> Topology:
    """Return servers whose NPU d has its port on rail switch d mod `rails`; a spine joins those."""
    used = min(rails, count)
    names = [f"rail{r}" for r in range(used)] + (["spine"] if used > 1 else [])
    inside = _room(f"{name}:{count}", count, chip, names)
    port, first = chip.links["roce"], count + len(inside.switches) - len(names)
    links = [x for d in range(count) for x in _cable(d, first + d % rails, port, 2, port.count)]
    for r in range(used if used > 1 else 0):
        ports = len(range(r, count, rails)) * port.count
        links += _cable(first + r, first + used, port, 2, ports)
    return replace(inside, links=(*inside.links, *links))


def _ethernet(count: int) -> Topology:
    """Return 910 servers with one card each, on the first host, to one switch."""
    room = _room(f"ethernet-25g:{count}", count, load_chip("Ascend910A"), ["ethernet"])
    switch, cards = count + len(room.switches) - 1, range(len(room.groups))
    half, beta = ETHERNET_ALPHA_S / 2, ETHERNET_BETA_S_PER_BYTE
    links = [x for i in cards for x in both_ways(count + 2 * i, switch, half, beta)]
    return replace(room, links=(*room.links, *links))


TEACHING = (TEACHING_ALPHA_S, TEACHING_BETA_S_PER_BYTE)
CHIP_910A, CHIP_910B = "chip file Ascend910A", "chip file Ascend910B2"
ROUND = "round numbers, chosen: 5 us, 10 GB/s a direction, adding is free"
_ALL = (
    Preset(
        "910a-server",
        0,
        lambda n: _room("910a-server", n, load_chip("Ascend910A")),
        "8 Ascend 910: two HCCS full meshes of 4, joined over PCIe and two hosts",
        f"{CHIP_910A} (HCCS 30 GB/s each way, the hosts joined as fast as PCIe: both assumed)",
    ),
    Preset(
        "910b-server",
        0,
        lambda n: _room("910b-server", n, load_chip("Ascend910B2")),
        "8 Ascend 910B in one HCCS full mesh, 28 GB/s a link and direction",
        f"{CHIP_910B} (56 GB/s a link both directions together); no efficiency taken off",
    ),
    Preset(
        "910a-roce",
        1024,
        lambda n: _roce("910a-roce", n, load_chip("Ascend910A"), HALF_DEVICES),
        "910a-servers; NPU d of each on RoCE rail d mod 4, rails joined by a spine",
        f"{CHIP_910A} (100 Gbit/s a NPU); spine without oversubscription: assumed",
    ),
    Preset(
        "910b-roce",
        1024,
        lambda n: _roce("910b-roce", n, load_chip("Ascend910B2"), SERVER_DEVICES),
        "910b-servers; NPU d of each on RoCE rail d mod 8, rails joined by a spine",
        f"{CHIP_910B} (200 Gbit/s a NPU); spine without oversubscription: assumed",
    ),
    Preset(
        "ethernet-25g",
        1024,
        _ethernet,
        "910a-servers; each server's 8 NPUs share one 25 Gbit/s Ethernet card on the first host",
        f"{CHIP_910A}; 30 us from host to host, from MG-WFBP's fit on 16 servers (2019)",
    ),
    Preset("star", 1024, lambda n: star(n, *TEACHING), "N devices around one switch", ROUND),
    Preset("mesh", 256, lambda n: full_mesh(n, *TEACHING), "N devices, each linked to each", ROUND),
    Preset(
        "ring", 1024, lambda n: ring(n, *TEACHING), "N devices in a circle, linked both ways", ROUND
    ),
)
TOPOLOGIES: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _ALL})
"""Every preset by the name it is loaded with (before the colon)."""
