"""Loads cluster topologies by name or from a TOML file, and prints them.

The names are those of real NPU servers, of clusters of them, and of three simple shapes (ring,
star, full mesh). Rates and latencies of links come from the chip files
(`ascend_lab/machine/chip/presets`, with sources). For the A2 and A3 series, `rates.toml` states the
share of a link's rate that is reached and the fixed costs of a collective, with sources. For the
first generation no such numbers are known: links reach their rated rate, and calls and rounds have
no fixed cost. Where no source states a number, these assumptions hold. A rate holds in each
direction. Each HCCS or PCIe link adds its latency; the chip's RoCE latency is from NPU to NPU over
one switch, half of it per hop. Switches are never the bottleneck. Adding a received byte reads two
bytes and writes one: gamma = 3 / memory rate.

A file is checked entry by entry; book/bring_your_own.md describes its keys, with an example.
"""

import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from itertools import combinations, product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ascend_lab.cluster.topology import Link, Topology, both_ways, checked, full_mesh, ring, star
from ascend_lab.errors import ClusterError
from ascend_lab.limits import LINKS, refuse_above, shown, toml_of
from ascend_lab.machine.chip import Chip, load_chip, model

SERVER_DEVICES = 8
HALF_DEVICES = 4
"""NPUs of one HCCS full mesh in a 910 server."""
SIMPLE_ALPHA_BETA = 5e-6, 1e-10
"""alpha and beta of the simple shapes, in round numbers: 5 us and 10 GB/s."""
ETHERNET_BETA_S_PER_BYTE = 8 / 25e9
ETHERNET_ALPHA_S = 30e-6
"""TCP through two hosts: all-reduce on 16 servers by 10G Ethernet starts in 908 us = 2 * 15 alpha
(Shi et al. 2019, MG-WFBP)."""
BYTES_PER_ADD = 3
POD_SERVER_DIES = 16
"""Dies of one server of an A3 pod: eight packages of two dies, each of which is a device."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A named topology: largest number of devices (0: fixed), builder, summary and source."""

    name: str
    limit: int
    build: Callable[[int], Topology]
    summary: str
    source: str


def load_topology(text: str | Path) -> Topology:
    """Return a preset ("910b-server", "910a-roce:64", "star:8") or read a .toml file.

    Raises `ClusterError` for unknown names, counts outside the preset's range and wrong files.
    """
    # "910a-roce:64" is the preset 910a-roce with the count 64; "910b-server" has no count.
    name = str(text)
    if name.endswith(".toml"):
        return read_topology(name)
    kind, colon, count = name.partition(":")
    preset = TOPOLOGIES.get(kind)
    if preset is None:
        close = get_close_matches(kind.lower(), TOPOLOGIES, 1)
        asked = f"did you mean {usage(close[0])}? " if close else ""
        known_topologies = f"{asked}there are {', '.join(map(usage, TOPOLOGIES))}"
        raise ClusterError("a topology by name or a .toml file", repr(name), known_topologies)
    if not preset.limit:
        if colon:
            raise ClusterError(f"{kind} without a count", repr(name), f"write {kind}")
        return _built(kind, SERVER_DEVICES)
    if not (count.isascii() and count.isdigit() and 1 <= int(count[:9]) <= preset.limit):
        needed = f"{kind}:N with N from 1 to {preset.limit}"
        raise ClusterError(needed, repr(name), f"for example {kind}:8")
    return _built(kind, int(count))


@cache
def _built(kind: str, count: int) -> Topology:
    return TOPOLOGIES[kind].build(count)


def usage(kind: str) -> str:
    """Return how a preset's name is written, with ":N" if it takes a number of devices."""
    return f"{kind}:N" if TOPOLOGIES[kind].limit else kind


# -- servers and clusters -------------------------------------------------------------------------
def _cable(a: int, b: int, kind: model.Link, hops: int = 1, lanes: int = 1) -> tuple[Link, Link]:
    """Return both directions of a cable made of `lanes` links of a chip.

    The latency of the link is divided by `hops`, the number of such cables on a path.
    """
    # RoCE of a 910A: 1.5 us from NPU to NPU over one switch, so 0.75 us per hop; 12.5 GB/s per
    # port.
    return both_ways(a, b, kind.latency_s / hops, 1.0 / (kind.rate_bytes_per_s * lanes))


def _mesh(devices: range, kind: model.Link) -> list[Link]:
    return [x for a, b in combinations(devices, 2) for x in _cable(a, b, kind)]


def _two_meshes(group: range, chip: Chip, hosts: tuple[int, int]) -> list[Link]:
    """Return two full meshes of up to four NPUs, each NPU linked to its host, the hosts linked."""
    pcie = chip.links["pcie"]
    links = list(_cable(*hosts, pcie))
    for host, mesh in zip(hosts, (group[:HALF_DEVICES], group[HALF_DEVICES:]), strict=True):
        links += _mesh(mesh, chip.links["hccs"])
        links += [x for device in mesh for x in _cable(device, host, pcie)]
    return links


@cache
def rates() -> Mapping[str, model.Fact]:
    """Return the numbers of `rates.toml`, with source and trust, by dotted key ("share.hccs")."""
    data = tomllib.loads(Path(__file__).with_name("rates.toml").read_text("utf-8"))
    sources = data.pop("sources")
    rates_by_name = {}
    for section, entries in data.items():
        for key, entry in entries.items():
            source = sources[entry["source"]]
            rates_by_name[f"{section}.{key}"] = model.Fact(entry["value"], source, entry["trust"])
    return MappingProxyType(rates_by_name)


def _achieved(topology: Topology, direct: str, by_switch: str) -> Topology:
    """Return an A2 or A3 topology with the achieved rates of its links and the fixed costs.

    `direct` names the type of the links between devices, `by_switch` the type of all other links.
    """
    measured = rates()
    links = []
    for link in topology.links:
        # Switches are numbered after the devices: both ends below `size` make a direct link.
        between_devices = max(link.source, link.target) < topology.size
        # 910B by HCCS: 28 GB/s * 0.607 = 17 GB/s; by RoCE 25 GB/s * 0.88 = 22 GB/s.
        share = measured[f"share.{direct if between_devices else by_switch}"].value
        links.append(replace(link, beta_s_per_byte=link.beta_s_per_byte / share, share=share))
    call_s = measured["call.time_s"].value
    round_s = measured["round.time_s"].value
    return replace(topology, links=tuple(links), call_s=call_s, round_s=round_s)


def _servers_of_eight(name: str, count: int, chip: Chip, network: Sequence[str] = ()) -> Topology:
    """Return servers of eight NPUs (the last may be smaller), with their links, and switches.

    NPUs with three HCCS links (910A) form two meshes, connected over their hosts; NPUs with seven
    links form one mesh. Nodes after the devices are the two hosts of every server, then the
    switches named in `network`.
    """
    groups = [
        # 20 NPUs are servers of 8, 8 and 4.
        range(start, min(start + SERVER_DEVICES, count))
        for start in range(0, count, SERVER_DEVICES)
    ]
    hosts: list[str] = []
    links: list[Link] = []
    for i, group in enumerate(groups):
        # A full mesh of 8 needs 7 links per device. The 910A has 3: enough for a mesh of 4.
        if chip.links["hccs"].count < SERVER_DEVICES - 1:
            links += _two_meshes(group, chip, (count + len(hosts), count + len(hosts) + 1))
            hosts += [f"host{i}.0", f"host{i}.1"]
        else:
            links += _mesh(group, chip.links["hccs"])
    gamma = _gamma(chip)
    devices = tuple(f"npu{i}" for i in range(count))
    servers = tuple(map(tuple, groups))
    return Topology(name, devices, (*hosts, *network), tuple(links), servers, gamma)


def _gamma(chip: Chip) -> float:
    # 910A: 3 bytes / 1200 GB/s = 2.5 ps for each byte added.
    return BYTES_PER_ADD / chip.device_memory.rate_bytes_per_s


def _roce(name: str, count: int, chip: Chip, rails: int) -> Topology:
    """Return servers whose NPU d is linked to switch d mod `rails`; a spine links the switches."""
    rail_count = min(rails, count)
    names = [f"rail{r}" for r in range(rail_count)] + (["spine"] if rail_count > 1 else [])
    inside = _servers_of_eight(f"{name}:{count}", count, chip, names)
    port = chip.links["roce"]
    # 910a-roce:16: devices 0 .. 15, hosts 16 .. 19, rail switches 20 .. 23, spine 24.
    first_switch = count + len(inside.switches) - len(names)
    spine = first_switch + rail_count
    links: list[Link] = []
    for device in range(count):
        links += _cable(device, first_switch + device % rails, port, 2, port.count)
    if rail_count > 1:
        for rail in range(rail_count):
            # 910a-roce:16 has 4 rails of 4 NPUs: 4 * 12.5 = 50 GB/s from each rail switch to the
            # spine.
            ports = len(range(rail, count, rails)) * port.count
            links += _cable(first_switch + rail, spine, port, 2, ports)
    return replace(inside, links=(*inside.links, *links))


def _server_910b(count: int) -> Topology:
    return _achieved(
        _servers_of_eight("910b-server", count, load_chip("Ascend910B2")), "hccs", "hccs"
    )


def _roce_910b(count: int) -> Topology:
    rated = _roce("910b-roce", count, load_chip("Ascend910B2"), SERVER_DEVICES)
    return _achieved(rated, "hccs", "roce")


def _pod(count: int) -> Topology:
    """Return the dies of A3 servers, linked in pairs; a switch per server, and a spine above them.

    A real server has a switch for each port of a die and spreads a message over all of them. They
    are modelled as one switch with the rate of all ports. The network above has the same rate.
    """
    chip = load_chip("Ascend910C")
    measured = rates()
    hccs = chip.links["hccs"]
    near_s = measured["a3.near_latency_s"].value
    far_s = measured["a3.far_latency_s"].value
    port = replace(hccs, latency_s=near_s)
    # Inside a server a message takes two hops of 0.25 us over one switch. Between servers it takes
    # these two and two hops of 2.5 us through the spine, together the 5.5 us measured.
    up = replace(hccs, latency_s=(far_s - near_s) / 2)
    sio_rate = measured["a3.sio_rate_bytes_per_s"].value
    sio_s = measured["a3.sio_latency_s"].value
    sio = model.Link(sio_rate, sio_s, 1)
    servers = [
        range(start, min(start + POD_SERVER_DIES, count))
        for start in range(0, count, POD_SERVER_DIES)
    ]
    switches = [f"server{i}" for i in range(len(servers))]
    links: list[Link] = []
    for i, dies in enumerate(servers):
        switch = count + i
        # the dies of a package: 0 and 1, 2 and 3, ...
        for die in dies[:-1:2]:
            links += _cable(die, die + 1, sio)
        for die in dies:
            links += _cable(die, switch, port, 2, port.count)
        if len(servers) > 1:
            # No oversubscription: 16 dies of 119 GB/s below the switch, 1904 GB/s above it.
            links += _cable(switch, count + len(servers), up, 1, port.count * len(dies))
    switches += ["spine"] if len(servers) > 1 else []
    devices = tuple(f"npu{i}" for i in range(count))
    groups = tuple(map(tuple, servers))
    name = f"a3-pod:{count}"
    rated = Topology(name, devices, tuple(switches), tuple(links), groups, _gamma(chip))
    return _achieved(rated, "sio", "hccs")


def _ethernet(count: int) -> Topology:
    """Return 910 servers around one switch, each linked by one network card at its first host."""
    topology = _servers_of_eight(
        f"ethernet-25g:{count}", count, load_chip("Ascend910A"), ["ethernet"]
    )
    switch = count + len(topology.switches) - 1
    cards = range(len(topology.groups))
    half = ETHERNET_ALPHA_S / 2
    beta = ETHERNET_BETA_S_PER_BYTE
    # Each server has two hosts, count + 2 i and count + 2 i + 1; the card is on the first.
    links = [x for i in cards for x in both_ways(count + 2 * i, switch, half, beta)]
    return replace(topology, links=(*topology.links, *links))


# -- the named topologies -------------------------------------------------------------------------
CHIP_910A = "chip file Ascend910A"
CHIP_910B = "chip file Ascend910B2"
ACHIEVED = "point to point 119 of 196 GB/s by HCCS, 22 of 25 by RoCE; a call 10 us, a round 5.85"
ROUND = "round numbers, chosen: 5 us, 10 GB/s a direction, adding is free"
_ALL = (
    Preset(
        "910a-server",
        0,
        lambda n: _servers_of_eight("910a-server", n, load_chip("Ascend910A")),
        "8 Ascend 910: two HCCS full meshes of 4, joined over PCIe and two hosts",
        f"{CHIP_910A} (HCCS 30 GB/s each way, the hosts joined as fast as PCIe: both assumed)",
    ),
    Preset(
        "910b-server",
        0,
        _server_910b,
        "8 Ascend 910B in one HCCS full mesh, 28 GB/s a link and direction, of which 17 arrive",
        f"{CHIP_910B} (56 GB/s a link both directions together); {ACHIEVED}",
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
        _roce_910b,
        "910b-servers; NPU d of each on RoCE rail d mod 8, rails joined by a spine",
        f"{CHIP_910B} (200 Gbit/s a NPU); {ACHIEVED}; spine without oversubscription: assumed",
    ),
    Preset(
        "a3-pod",
        768,
        _pod,
        "dies of 910C, 16 a server; each 7 HCCS ports to switches: 119 of 196 GB/s arrive",
        f"chip file Ascend910C; {ACHIEVED}; network without oversubscription: assumed",
    ),
    Preset(
        "ethernet-25g",
        1024,
        _ethernet,
        "910a-servers; each server's 8 NPUs share one 25 Gbit/s Ethernet card on the first host",
        f"{CHIP_910A}; 30 us from host to host, from MG-WFBP's fit on 16 servers (2019)",
    ),
    Preset(
        "star", 1024, lambda n: star(n, *SIMPLE_ALPHA_BETA), "N devices around one switch", ROUND
    ),
    Preset(
        "mesh",
        256,
        lambda n: full_mesh(n, *SIMPLE_ALPHA_BETA),
        "N devices, each linked to each",
        ROUND,
    ),
    Preset(
        "ring",
        1024,
        lambda n: ring(n, *SIMPLE_ALPHA_BETA),
        "N devices in a circle, linked both ways",
        ROUND,
    ),
)
TOPOLOGIES: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _ALL})
"""Every preset by the name it is loaded with (before the colon)."""


# -- from a file ----------------------------------------------------------------------------------
TIMES = ("gamma_s_per_byte", "call_s", "round_s")
KEYS = ("name", "devices", "switches", "servers", *TIMES, "links")
LINK_KEYS = ("from", "to", "alpha_us", "alpha_s", "gbytes_per_s", "beta_s_per_byte", "one_way")
DEVICE_LIMIT = 1024
"""Largest number of devices, and of switches: routes are stored for every pair."""
LARGEST_NUMBER = 1e15
"""Largest credible number in a file: a larger one is a mistake in the unit."""


def read_topology(file: str) -> Topology:
    """Return the topology that a TOML file describes.

    Raises `ClusterError`, which names file and entry, if the file is missing or not TOML, has
    unknown keys or nodes, times that are not numbers >= 0, no devices, or devices without a path
    between them.
    """
    data = toml_of(file, "a readable topology file", ClusterError)
    _check_keys(file, data, KEYS)
    devices = _devices(file, data.get("devices"))
    switches = _names(f"{file}: switches", data.get("switches", []))
    refuse_above(f"{file}: switches", len(switches), DEVICE_LIMIT, "use fewer", ClusterError)
    # Devices a, b and a switch s are the nodes 0, 1 and 2.
    nodes = {name: i for i, name in enumerate((*devices, *switches))}
    if len(nodes) < len(devices) + len(switches):
        raise ClusterError(f"{file}: every node under a name of its own", "one twice", "rename it")
    title = data.get("name", Path(file).stem)
    if not isinstance(title, str):
        raise ClusterError(f"{file}: name as a text", shown(title), 'write name = "..."')
    entries = data.get("links", [])
    if not isinstance(entries, list):
        raise ClusterError(f"{file}: links as [[links]] entries", shown(entries), "correct it")
    links: list[Link] = []
    for i, entry in enumerate(entries):
        links += _links(f"{file}: links[{i}]", entry, nodes)
        refuse_above(f"{file}: links", len(links), LINKS, "join nodes by switches", ClusterError)
    times = {key: checked(f"{file}: {key}", data.get(key, 0.0), LARGEST_NUMBER) for key in TIMES}
    groups = _servers(file, data.get("servers"), nodes, len(devices))
    topology = Topology(title, devices, switches, tuple(links), groups, **times)
    _check_reach(file, topology)
    return topology


def _devices(file: str, value: Any) -> tuple[str, ...]:
    """Return the names of the devices, which the file lists or counts."""
    where = f"{file}: devices, names or a count from 1 to {DEVICE_LIMIT}"
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= DEVICE_LIMIT:
            raise ClusterError(where, shown(value), "devices = 8 makes npu0 to npu7")
        return tuple(f"npu{i}" for i in range(value))
    names = _names(where, value)
    if not 1 <= len(names) <= DEVICE_LIMIT:
        raise ClusterError(where, f"{len(names)} names", "name the devices")
    return names


def _names(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(n, str) and n for n in value):
        raise ClusterError(f"{where}: a list of names", shown(value), 'write ["a", "b"]')
    return tuple(value)


def _check_keys(where: str, entry: Any, keys: Sequence[str]) -> None:
    """Raise `ClusterError` for an entry that is no table or has an unknown key."""
    if not isinstance(entry, dict):
        raise ClusterError(f"{where}: a table", shown(entry), "correct it")
    for key in entry:
        if key not in keys:
            raise ClusterError(f"{where}: a known key", shown(key), f"known: {', '.join(keys)}")


def _links(where: str, entry: Any, nodes: dict[str, int]) -> list[Link]:
    """Return the links of one entry: each node in `from` is linked to each node in `to`."""
    _check_keys(where, entry, LINK_KEYS)
    key, alpha_s = _one_of(where, entry, "alpha_us", "alpha_s")
    alpha_s *= 1e-6 if key == "alpha_us" else 1.0
    key, beta = _one_of(where, entry, "gbytes_per_s", "beta_s_per_byte")
    if key == "gbytes_per_s":
        if beta == 0:
            raise ClusterError(f"{where}: gbytes_per_s above 0", "0", "leave a dead link out")
        # 25 GB/s: 1e-9 / 25 = 4e-11 s per byte.
        beta = 1e-9 / beta
    one_way = entry.get("one_way", False)
    if not isinstance(one_way, bool):
        raise ClusterError(f"{where}: one_way as true or false", shown(one_way), "write it so")
    links: list[Link] = []
    # from = ["a", "b"], to = "s" are two cables, four directed links.
    sources, targets = (_ends(where, entry, key, nodes) for key in ("from", "to"))
    count = len(sources) * len(targets)
    refuse_above(f"{where}: links", count, LINKS, "join nodes by switches", ClusterError)
    is_mesh = len(sources) > 1 and sorted(sources) == sorted(targets)
    for a, b in product(sources, targets):
        # The same list on both sides is a full mesh: a cable a pair, none to itself.
        if is_mesh and (a == b or (a > b and not one_way)):
            continue
        if a == b:
            raise ClusterError(
                f"{where}: a link between two nodes", "one node", "correct from or to"
            )
        forward, backward = both_ways(a, b, alpha_s, beta)
        links += [forward] if one_way else [forward, backward]
    return links


def _ends(where: str, entry: dict[str, Any], key: str, nodes: dict[str, int]) -> list[int]:
    """Return the nodes at one end of an entry's links, given as a name or a list of names."""
    value = entry.get(key)
    names = _names(f"{where}: {key}", [value] if isinstance(value, str) else value)
    for name in names:
        if name not in nodes:
            node_names = ", ".join(list(nodes)[:10])
            raise ClusterError(f"{where}: {key} names a node", shown(name), f"nodes: {node_names}")
    return [nodes[name] for name in names]


def _one_of(where: str, entry: dict[str, Any], *pair: str) -> tuple[str, float]:
    """Return which of the two keys in `pair` an entry has, and the number there."""
    present = [key for key in pair if key in entry]
    if len(present) != 1:
        got = " and ".join(present) or "neither"
        raise ClusterError(f"{where}: one of {pair[0]} and {pair[1]}", got, "give one")
    return present[0], checked(f"{where}: {present[0]}", entry[present[0]], LARGEST_NUMBER)


def _servers(
    file: str, value: Any, nodes: dict[str, int], devices: int
) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each server; raise `ClusterError` unless each device is in one."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ClusterError(f"{file}: servers as lists of names", shown(value), "correct it")
    groups = []
    for i, names in enumerate(value):
        where = f"{file}: servers[{i}]"
        members = [nodes.get(name, devices) for name in _names(where, names)]
        if not members or max(members) >= devices:
            raise ClusterError(f"{where}: names of devices", shown(names), "correct it")
        groups.append(tuple(members))
    if sorted(d for group in groups for d in group) != list(range(devices)):
        needed = f"{file}: servers, every device in exactly one"
        raise ClusterError(needed, shown(value), "list each device once")
    return tuple(groups)


def _check_reach(file: str, topology: Topology) -> None:
    """Raise `ClusterError` if a device cannot be reached from device 0 or cannot reach it."""
    targets_of = defaultdict[int, set[int]](set)
    sources_of = defaultdict[int, set[int]](set)
    for link in topology.links:
        targets_of[link.source].add(link.target)
        sources_of[link.target].add(link.source)
    # Two searches from device 0, along the links and against them: if it reaches all, and all reach
    # it, then every device reaches every other through device 0.
    for edges, verb, opposite in ((targets_of, "to", "from"), (sources_of, "from", "to")):
        reached = {0}
        stack = [0]
        while stack:
            new_nodes = edges[stack.pop()] - reached
            reached |= new_nodes
            stack += new_nodes
        unreached = [topology.devices[d] for d in range(topology.size) if d not in reached]
        if unreached:
            needed = f"{file}: a way {verb} every device {opposite} {topology.devices[0]}"
            raise ClusterError(needed, f"none {verb} {', '.join(unreached[:5])}", "add links")


# -- as text and as plain data --------------------------------------------------------------------
MAX_PRINTED_TYPES = 12
"""Largest number of link types in the text form; the data form has every link."""
Kind = tuple[str, float, float]
"""A type of link: the nodes that it connects, latency in seconds, bytes per second."""


def kind_of(topology: Topology, link: int) -> Kind:
    """Return the type of a link, in which nodes are named without numbers: npu, host, rail."""
    cable = topology.links[link]
    ends = sorted(family(topology.label(node)) for node in (cable.source, cable.target))
    rate = float(topology.rate_bytes_per_s[link])
    return " - ".join(ends), cable.alpha_s, float(f"{rate:.6g}")


def family(label: str) -> str:
    """Return a node's name without the number at its end."""
    # npu12 is npu, host3.1 is host; a node called 7 stays 7.
    return label.rstrip("0123456789.") or label


def link_kinds(topology: Topology) -> dict[Kind, int]:
    """Return the number of directed links of each type."""
    kinds = Counter(kind_of(topology, i) for i in range(len(topology.links)))
    return dict(sorted(kinds.items()))


def topology_dict(topology: Topology) -> dict[str, Any]:
    """Return a topology as a dictionary for JSON: nodes, servers, links, bisection, gamma."""
    label = topology.label
    return {
        "name": topology.name,
        "devices": list(topology.devices),
        "switches": list(topology.switches),
        "servers": [[label(d) for d in group] for group in topology.groups],
        **{key: getattr(topology, key) for key in TIMES},
        "bisection_bytes_per_s": topology.bisection_bytes_per_s(),
        "links": [
            {
                "from": label(link.source),
                "to": label(link.target),
                "alpha_s": link.alpha_s,
                "beta_s_per_byte": link.beta_s_per_byte,
            }
            for link in topology.links
        ],
    }


def topology_text(topology: Topology) -> list[str]:
    """Return lines of text that describe a topology: counts, bisection, types of links."""
    kinds = list(link_kinds(topology).items())
    gamma_ps = topology.gamma_s_per_byte * 1e12
    counts = f"{topology.size} devices in {len(topology.groups)} servers"
    lines = [f"{topology.name}: {counts}, {len(topology.switches)} switches"]
    across = rate_text(topology.bisection_bytes_per_s())
    lines.append(f"  bisection {across}, adding {gamma_ps:.3g} ps/B")
    if topology.call_s or topology.round_s:
        call_us = topology.call_s * 1e6
        round_us = topology.round_s * 1e6
        lines.append(f"  before a call {call_us:.3g} us, before each round {round_us:.3g} us")
    lines.append("  links, each a direction:")
    for (ends, alpha_s, rate), count in kinds[:MAX_PRINTED_TYPES]:
        lines.append(f"    {count:6} {ends:<18} {alpha_s * 1e6:7.3f} us  {rate_text(rate)}")
    if len(kinds) > MAX_PRINTED_TYPES:
        lines.append(
            f"    and {len(kinds) - MAX_PRINTED_TYPES} kinds more (the JSON has all links)"
        )
    return lines


def rate_text(bytes_per_s: float) -> str:
    """Return a rate in GB/s."""
    return f"{bytes_per_s / 1e9:.4g} GB/s" if math.isfinite(bytes_per_s) else "no limit"
