"""Topologies from a TOML file of the reader's own, checked entry by entry; and as text and data.

The keys stand in book/bring_your_own.md, with an example.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ascend_lab.cluster.topology import Link, Topology, both_ways, checked
from ascend_lab.errors import ClusterError
from ascend_lab.limits import LINKS, refuse_above, shown, toml_of

KEYS = ("name", "devices", "switches", "servers", "gamma_s_per_byte", "links")
LINK_KEYS = ("from", "to", "alpha_us", "alpha_s", "gbytes_per_s", "beta_s_per_byte", "one_way")
DEVICE_LIMIT = 1024
"""Also of switches: routes are kept for every pair."""
LARGEST = 1e15
"""Of any number in a file: beyond it a slip of units."""


def read_topology(file: str | Path) -> Topology:
    """Return the topology a TOML file describes.

    Raises `ClusterError` naming file and entry: no such file, no TOML, unknown keys or nodes,
    times that are not numbers >= 0, no devices, devices without a way between them.
    """
    name = str(file)
    return topology_from_dict(toml_of(name, "a readable topology file", ClusterError), name)


def topology_from_dict(data: dict[str, Any], file: str = "topology") -> Topology:
    """Return the topology of a parsed file; raises as `read_topology`."""
    _known(file, data, KEYS)
    devices = _devices(file, data.get("devices"))
    switches = _names(f"{file}: switches", data.get("switches", []))
    refuse_above(f"{file}: switches", len(switches), DEVICE_LIMIT, "use fewer", ClusterError)
    nodes = {name: i for i, name in enumerate((*devices, *switches))}
    if len(nodes) < len(devices) + len(switches):
        raise ClusterError(f"{file}: every node under a name of its own", "one twice", "rename it")
    title = data.get("name", Path(file).stem)
    if not isinstance(title, str):
        raise ClusterError(f"{file}: name as a text", shown(title), 'write name = "..."')
    entries = data.get("links", [])
    if not isinstance(entries, list):
        raise ClusterError(f"{file}: links as [[links]] entries", shown(entries), "mend it")
    links: list[Link] = []
    for i, entry in enumerate(entries):
        links += _links(f"{file}: links[{i}]", entry, nodes)
        refuse_above(f"{file}: links", len(links), LINKS, "join nodes by switches", ClusterError)
    gamma = checked(f"{file}: gamma_s_per_byte", data.get("gamma_s_per_byte", 0.0), LARGEST)
    groups = _servers(file, data.get("servers"), nodes, len(devices))
    found = Topology(title, devices, switches, tuple(links), groups, gamma)
    _check_reach(file, found)
    return found


def _devices(file: str, given: Any) -> tuple[str, ...]:
    where = f"{file}: devices, names or a count from 1 to {DEVICE_LIMIT}"
    if isinstance(given, int) and not isinstance(given, bool):
        if not 1 <= given <= DEVICE_LIMIT:
            raise ClusterError(where, shown(given), "devices = 8 makes npu0 to npu7")
        return tuple(f"npu{i}" for i in range(given))
    names = _names(where, given)
    if not 1 <= len(names) <= DEVICE_LIMIT:
        raise ClusterError(where, f"{len(names)} names", "name the devices")
    return names


def _names(where: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(n, str) and n for n in given):
        raise ClusterError(f"{where}: a list of names", shown(given), 'write ["a", "b"]')
    return tuple(given)


def _known(where: str, entry: Any, keys: Sequence[str]) -> None:
    if not isinstance(entry, dict):
        raise ClusterError(f"{where}: a table", shown(entry), "mend it")
    for key in entry:
        if key not in keys:
            raise ClusterError(f"{where}: a known key", shown(key), f"known: {', '.join(keys)}")


def _links(where: str, entry: Any, nodes: dict[str, int]) -> list[Link]:
    """Return the links of one entry: each of `from` with each of `to`."""
    _known(where, entry, LINK_KEYS)
    alpha_s, beta = _alpha_s(where, entry), _beta_s_per_byte(where, entry)
    one_way = entry.get("one_way", False)
    if not isinstance(one_way, bool):
        raise ClusterError(f"{where}: one_way as true or false", shown(one_way), "write it so")
    found: list[Link] = []
    sources, targets = (_ends(where, entry, key, nodes) for key in ("from", "to"))
    count = len(sources) * len(targets)
    refuse_above(f"{where}: links", count, LINKS, "join nodes by switches", ClusterError)
    for a, b in product(sources, targets):
        if a == b:
            raise ClusterError(f"{where}: a link between two nodes", "one node", "mend from or to")
        there, back = both_ways(a, b, alpha_s, beta)
        found += [there] if one_way else [there, back]
    return found


def _ends(where: str, entry: dict[str, Any], key: str, nodes: dict[str, int]) -> list[int]:
    given = entry.get(key)
    names = _names(f"{where}: {key}", [given] if isinstance(given, str) else given)
    for name in names:
        if name not in nodes:
            known = ", ".join(list(nodes)[:10])
            raise ClusterError(f"{where}: {key} names a node", shown(name), f"nodes: {known}")
    return [nodes[name] for name in names]


def _one_of(where: str, entry: dict[str, Any], pair: tuple[str, str]) -> str:
    given = [key for key in pair if key in entry]
    if len(given) != 1:
        got = " and ".join(given) or "neither"
        raise ClusterError(f"{where}: one of {pair[0]} and {pair[1]}", got, "give one")
    return given[0]


def _alpha_s(where: str, entry: dict[str, Any]) -> float:
    key = _one_of(where, entry, ("alpha_us", "alpha_s"))
    value = checked(f"{where}: {key}", entry[key], LARGEST)
    return value * 1e-6 if key == "alpha_us" else value


def _beta_s_per_byte(where: str, entry: dict[str, Any]) -> float:
    key = _one_of(where, entry, ("gbytes_per_s", "beta_s_per_byte"))
    value = checked(f"{where}: {key}", entry[key], LARGEST)
    if key == "beta_s_per_byte":
        return value
    if value == 0:
        raise ClusterError(f"{where}: gbytes_per_s above 0", "0", "leave a dead link out")
    return 1e-9 / value


def _servers(
    file: str, given: Any, nodes: dict[str, int], devices: int
) -> tuple[tuple[int, ...], ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        raise ClusterError(f"{file}: servers as lists of names", shown(given), "mend it")
    groups = []
    for i, names in enumerate(given):
        where = f"{file}: servers[{i}]"
        members = [nodes.get(name, devices) for name in _names(where, names)]
        if not members or max(members) >= devices:
            raise ClusterError(f"{where}: names of devices", shown(names), "mend it")
        groups.append(tuple(members))
    if sorted(d for group in groups for d in group) != list(range(devices)):
        what = f"{file}: servers, every device in exactly one"
        raise ClusterError(what, shown(given), "list each device once")
    return tuple(groups)


def _check_reach(file: str, topology: Topology) -> None:
    """Refuse devices that device 0 cannot reach or that cannot reach it."""
    onward: dict[int, set[int]] = {}
    back: dict[int, set[int]] = {}
    for link in topology.links:
        onward.setdefault(link.source, set()).add(link.target)
        back.setdefault(link.target, set()).add(link.source)
    for edges, verb in ((onward, "to"), (back, "from")):
        seen, todo = {0}, [0]
        while todo:
            new = edges.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        lost = [topology.devices[d] for d in range(topology.size) if d not in seen]
        if lost:
            what = f"{file}: a way {verb} every device {'from' if verb == 'to' else 'to'} "
            what += topology.devices[0]
            raise ClusterError(what, f"none {verb} {', '.join(lost[:5])}", "add links")


# -- as text and as plain data --------------------------------------------------------------------
SHOWN = 12
"""Kinds of links in the text at most; the data have every link."""
Kind = tuple[str, float, float]
"""What a link joins, its latency in seconds, its bytes a second."""


def kind_of(topology: Topology, link: int) -> Kind:
    """Return a link's kind; nodes are named without their numbers: npu, host, rail."""
    found = topology.links[link]
    ends = sorted(family(topology.label(node)) for node in (found.source, found.target))
    rate = float(topology.rate_bytes_per_s[link])
    return " - ".join(ends), found.alpha_s, float(f"{rate:.6g}")


def family(label: str) -> str:
    """Return a node's name without the number at its end."""
    return label.rstrip("0123456789.") or label


def link_kinds(topology: Topology) -> dict[Kind, int]:
    """Return how many links, each a direction, there are of each kind."""
    kinds = Counter(kind_of(topology, i) for i in range(len(topology.links)))
    return dict(sorted(kinds.items()))


def topology_dict(topology: Topology) -> dict[str, Any]:
    """Return a topology as plain data: nodes, servers, every link, bisection, gamma."""
    label = topology.label
    return {
        "name": topology.name,
        "devices": list(topology.devices),
        "switches": list(topology.switches),
        "servers": [[label(d) for d in group] for group in topology.groups],
        "gamma_s_per_byte": topology.gamma_s_per_byte,
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
    """Return a topology as lines: counts, bisection, kinds of links."""
    kinds, gamma_ps = list(link_kinds(topology).items()), topology.gamma_s_per_byte * 1e12
    counts = f"{topology.size} devices in {len(topology.groups)} servers"
    lines = [f"{topology.name}: {counts}, {len(topology.switches)} switches"]
    across = rate_text(topology.bisection_bytes_per_s())
    lines.append(f"  bisection {across}, adding {gamma_ps:.3g} ps/B")
    lines.append("  links, each a direction:")
    for (ends, alpha_s, rate), count in kinds[:SHOWN]:
        lines.append(f"    {count:6} {ends:<18} {alpha_s * 1e6:7.3f} us  {rate_text(rate)}")
    if len(kinds) > SHOWN:
        lines.append(f"    and {len(kinds) - SHOWN} kinds more (the JSON has all links)")
    return lines


def rate_text(bytes_per_s: float) -> str:
    """Return a rate in GB/s."""
    return f"{bytes_per_s / 1e9:.4g} GB/s" if math.isfinite(bytes_per_s) else "no limit"
