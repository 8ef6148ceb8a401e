"""The verb `ascend-lab topologies`: list the clusters there are, or show one."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ascend_lab.cluster import Topology

Emit = Callable[[str | None, Any, str], None]
SHOWN = 12
"""Kinds of links printed at most; JSON has every link."""


def add_topologies(verbs: Any, emit: Emit) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser("topologies", help="list clusters, or show one with its links")
    verb.add_argument("name", nargs="?", help="such as 910a-roce:64, or your own .toml file")
    verb.add_argument("--json", metavar="F", help="write JSON to F, or print it with -")
    verb.set_defaults(run=lambda arguments: _topologies(arguments, emit))


def _topologies(arguments: argparse.Namespace, emit: Emit) -> int:
    from ascend_lab.cluster import TOPOLOGIES, load_topology
    from ascend_lab.cluster.presets import usage

    if arguments.name is None:
        data: Any = {
            usage(name): {
                "summary": preset.summary,
                "source": preset.source,
                "most_devices": preset.limit or None,
            }
            for name, preset in TOPOLOGIES.items()
        }
        rows = [
            f"{name:<15} {about['summary']}\n{'':<15} {about['source']}"
            for name, about in data.items()
        ]
        text = "\n".join(rows)
    else:
        topology = load_topology(arguments.name)
        data = topology_dict(topology)
        text = "\n".join(_lines(topology, data))
    emit(arguments.json, data, text)
    return 0


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


def link_kinds(topology: Topology) -> list[tuple[str, float, float, int]]:
    """Return the kinds of links: what they join, latency, bytes a second, how many; fastest last.

    Nodes are named without their numbers: npu, host, rail.
    """
    kinds: Counter[tuple[str, float, float]] = Counter()
    for link, rate in zip(topology.links, topology.rate_bytes_per_s, strict=True):
        ends = sorted(_family(topology.label(node)) for node in (link.source, link.target))
        kinds[" - ".join(ends), link.alpha_s, round(float(rate), 3)] += 1
    return sorted((*kind, count) for kind, count in kinds.items())


def _family(label: str) -> str:
    return label.rstrip("0123456789.") or label


def _lines(topology: Topology, data: dict[str, Any]) -> list[str]:
    kinds = link_kinds(topology)
    lines = [
        f"{topology.name}: {topology.size} devices in {len(topology.groups)} servers, "
        f"{len(topology.switches)} switches",
        f"  bisection {_rate(data['bisection_bytes_per_s'])}, adding "
        f"{topology.gamma_s_per_byte * 1e12:.3g} ps/B",
        "  links, each a direction:",
    ]
    for ends, alpha_s, rate, count in kinds[:SHOWN]:
        lines.append(f"    {count:6} {ends:<18} {alpha_s * 1e6:7.3f} us  {_rate(rate)}")
    if len(kinds) > SHOWN:
        lines.append(f"    and {len(kinds) - SHOWN} kinds more (--json has all links)")
    return lines


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.4g} GB/s" if math.isfinite(bytes_per_s) else "no limit"
