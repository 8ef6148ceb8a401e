"""The verb `ascend-lab collective`: how long a collective takes on a topology."""

from __future__ import annotations

import argparse
import math
import re
from typing import TYPE_CHECKING, Any

from ascend_lab.cli_common import add_json, emit, refuse_idle
from ascend_lab.cli_words import CLUSTER_FILE
from ascend_lab.errors import InputError
from ascend_lab.limits import count

if TYPE_CHECKING:
    from ascend_lab.cluster import CollectiveTime, Topology

_SIZE = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)(?:([kmgt])(ib|b)?|b)?")
HUGE_BYTES = 1e18
ROOTED = ("broadcast", "reduce")


def add_collective(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser(
        "collective", help="time a collective on a cluster by one algorithm", epilog=CLUSTER_FILE
    )
    verb.add_argument("--op", required=True, help="allreduce, reduce_scatter, all_to_all, ...")
    verb.add_argument("--algorithm", default="auto", metavar="A", help="ring, nhr, ... (auto)")
    verb.add_argument("--bytes", required=True, metavar="N", help="1e6, 64M (* 2^20) or 64MB")
    verb.add_argument("--topology", required=True, metavar="T", help="see `topologies`, or .toml")
    verb.add_argument("--ranks", type=count, metavar="P", help="use the first P devices (all)")
    verb.add_argument("--root", type=count, default=0, metavar="R", help="of broadcast, reduce (0)")
    add_json(verb)
    verb.set_defaults(run=_collective)


def parse_bytes(text: str) -> float:
    """Return the bytes a text means: 1e6, 64M = 64MiB = 64 * 2^20 (as in nccl-tests), 64MB = 64e6.

    Raises `InputError` for anything else.
    """
    found = _SIZE.fullmatch(text.strip().lower())
    try:
        size = float(found[1]) if found else math.nan
    except ValueError:
        size = math.nan
    if found and found[2]:
        size *= (1000 if found[3] == "b" else 1024) ** ("kmgt".index(found[2]) + 1)
    if not 0 <= size <= HUGE_BYTES:
        raise InputError(f"bytes from 0 to {HUGE_BYTES:g}", repr(text), "write 1e6, 64M or 64MB")
    return size


def _collective(arguments: argparse.Namespace) -> int:
    from ascend_lab.cluster import collective_time, compare, load_topology
    from ascend_lab.cluster.collectives.names import op_name

    size_bytes, topology = parse_bytes(arguments.bytes), load_topology(arguments.topology)
    ranks = topology.size if arguments.ranks is None else arguments.ranks
    if not 1 <= ranks <= topology.size:
        raise InputError(f"--ranks from 1 to {topology.size}", str(ranks))
    if not 0 <= arguments.root < ranks:
        raise InputError(f"--root below {ranks}", str(arguments.root))
    places, root = range(ranks), arguments.root
    op = op_name(arguments.op)
    if op not in ROOTED:
        refuse_idle(arguments, f"with --op {' or '.join(ROOTED)}", "--root")
    if arguments.algorithm == "auto":
        times = compare(arguments.op, topology, size_bytes, places, root)
    else:
        algorithm = arguments.algorithm
        times = (collective_time(arguments.op, topology, size_bytes, algorithm, places, root),)
    data = {**time_dict(times[0]), "topology": topology.name}
    if arguments.algorithm == "auto":
        data["candidates"] = {one.algorithm: one.time_s for one in times}
    emit(arguments.json, data, _table(times, topology))
    return 0


def time_dict(found: CollectiveTime) -> dict[str, Any]:
    """Return a timed collective as plain data; bandwidths in bytes a second."""
    return {
        "op": found.op,
        "algorithm": found.algorithm,
        "ranks": found.ranks,
        "bytes": found.size_bytes,
        "time_s": found.time_s,
        "algorithm_bandwidth": found.algorithm_bandwidth,
        "bus_bandwidth": found.bus_bandwidth,
        "steps": len(found.rounds_s),
        "lower_bound_s": found.lower_bound_s,
    }


def _table(times: tuple[CollectiveTime, ...], topology: Topology) -> list[str]:
    first = times[0]
    what = f"{first.op} of {first.size_bytes:.0f} bytes, {first.ranks} ranks"
    rows = [
        f"{what} on {topology.name} (model result)",
        f"{'algorithm':<40} {'steps':>5} {'time us':>12} {'alg GB/s':>9} {'bus GB/s':>9}",
    ]
    rows += [
        f"{one.algorithm:<40} {len(one.rounds_s):5} {one.time_s * 1e6:12.2f} "
        f"{one.algorithm_bandwidth / 1e9:9.3f} {one.bus_bandwidth / 1e9:9.3f}"
        for one in times
    ]
    return [*rows, f"no schedule is faster than {first.lower_bound_s * 1e6:.2f} us"]
