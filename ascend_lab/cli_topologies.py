"""The verb `ascend-lab topologies`: list the clusters there are, or show one."""

from __future__ import annotations

import argparse
from typing import Any

from ascend_lab.cli_common import add_json, emit
from ascend_lab.cli_words import CLUSTER_FILE


def add_topologies(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser(
        "topologies", help="list clusters, or show one with its links", epilog=CLUSTER_FILE
    )
    verb.add_argument("name", nargs="?", help="such as 910a-roce:64, or your own .toml file")
    add_json(verb)
    verb.set_defaults(run=_topologies)


def _topologies(arguments: argparse.Namespace) -> int:
    from ascend_lab.cluster import TOPOLOGIES, load_topology
    from ascend_lab.cluster.presets import usage
    from ascend_lab.cluster.report import topology_dict, topology_text

    if arguments.name is not None:
        topology = load_topology(arguments.name)
        emit(arguments.json, topology_dict(topology), topology_text(topology))
        return 0
    data: dict[str, Any] = {}
    lines = []
    for preset in TOPOLOGIES.values():
        name, most = usage(preset.name), preset.limit or None
        data[name] = {"summary": preset.summary, "source": preset.source, "most_devices": most}
        lines += [f"{name:<15} {preset.summary}", f"{'':<15} {preset.source}"]
    emit(arguments.json, data, lines)
    return 0
