"""Costs of communication and work for strategy problems: from a topology, from a chip's peaks."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.cluster import Topology, collective_time
from ascend_lab.errors import ClusterError
from ascend_lab.graph import Graph
from ascend_lab.graph import Node as GraphNode
from ascend_lab.graph.zoo.counts import node_macs
from ascend_lab.parallel.redistribution import Cost

TRAINING = 3
"""Forward and backward together, in units of forward: backward does about twice the work."""


def on_topology(topology: Topology) -> Cost:
    """Return the seconds of a collective of the first devices of a topology, quickest algorithm.

    Groups are charged as if alone: those that run at the same time do not share links.
    """

    @lru_cache(None)
    def cost(operation: str, devices: int, size_bytes: float) -> float:
        if devices > topology.size:
            raise ClusterError(f"at most {topology.size} devices", str(devices))
        placement = range(devices)
        return collective_time(operation, topology, size_bytes, placement=placement).time_s

    return cost


def roofline(chip: Chip) -> Callable[[Graph, GraphNode], float]:
    """Return the seconds of an operator in training: the larger of arithmetic and memory traffic.

    At the chip's peaks, so it is a bound from below.
    """
    peak = chip.peak_ops_per_s("fp16")
    memory_bytes_per_s = chip.device_memory.rate_bytes_per_s

    def work_s(graph: Graph, node: GraphNode) -> float:
        kinds = (*graph.in_types(node), *graph.out_types(node))
        moved = sum(kind.elements * DTYPE_BYTES[kind.dtype] for kind in kinds)
        return TRAINING * max(2 * node_macs(graph, node) / peak, moved / memory_bytes_per_s)

    return work_s
