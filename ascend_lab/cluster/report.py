"""Topologies as text and plain data."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from ascend_lab.cluster.topology import Topology

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
