"""Where a compiled network's tensors lie: lifetimes to the memory planner, offsets back.

A tensor that an elementwise kernel reads for the last time may be overwritten by what the kernel
writes: each tile is read before it is written, by the same core.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

from ascend_lab.graph.compiled import Compiled, Task
from ascend_lab.graph.fusion.automatic import kind_of
from ascend_lab.graph.lifetimes import (
    ALIGN_BYTES,
    aliases_of,
    constant_bytes,
    lifetimes,
    owners,
    tensor_bytes,
)
from ascend_lab.graph.memory import Buffer, Plan, plan, share


def buffers_of(compiled: Compiled) -> list[Buffer]:
    """Return all activations and workspaces as buffers; time counts tasks."""
    return [Buffer(x.name, x.first, x.last + 1, x.size_bytes) for x in lifetimes(compiled)]


def plan_network(
    compiled: Compiled, method: str = "best of", *, in_place: bool = True, time_limit_s: float = 1.0
) -> Plan:
    """Return an offset for every activation and workspace; raises as `memory.plan`."""
    buffers = buffers_of(compiled)
    pairs = in_place_pairs(compiled) if in_place else []
    merged = share(buffers, pairs)
    found = plan(merged, method=method, time_limit_s=time_limit_s, alignment_bytes=ALIGN_BYTES)
    offsets = dict(found.offsets)
    for kept, gone in pairs:
        offsets[gone] = offsets[kept]
    return replace(found, offsets=offsets)


def in_place_pairs(compiled: Compiled) -> list[tuple[str, str]]:
    """Return (tensor read for the last time, tensor written over it) of elementwise kernels."""
    graph, owner = compiled.graph, owners(compiled)
    last = {life.name: life.last for life in lifetimes(compiled)}
    sizes = tensor_bytes(compiled)
    pairs = []
    for i, task in enumerate(compiled.tasks):
        if not _is_elementwise(task, compiled):
            continue
        target = task.writes[0]
        for name in task.reads:
            source = owner.get(name, name)
            free = source in last and last[source] == i and source not in graph.inputs
            same = sizes[source] == sizes[target] == sizes[name]
            if free and target not in owner and same:
                pairs.append((source, target))
                break
    return pairs


def _is_elementwise(task: Task, compiled: Compiled) -> bool:
    """Tell whether a kernel computes every element from the elements at the same address."""
    nodes = task.piece.graph.nodes
    if task.lowered is None or len(task.writes) > 1 or len(task.lowered.kernel.phases) > 1:
        return False
    return all(kind_of(node) == "elementwise" for node in nodes)


def places_of(compiled: Compiled, offsets: Mapping[Hashable, int]) -> dict[str, tuple[int, int]]:
    """Return (address, bytes) of every tensor: activations by `offsets`, constants behind them."""
    sizes = {life.name: life.size_bytes for life in lifetimes(compiled)}
    found = {name: (offsets[name], size) for name, size in sizes.items()}
    top = max((low + size for low, size in found.values()), default=0)
    for name, size in constant_bytes(compiled).items():
        top = -(-top // ALIGN_BYTES) * ALIGN_BYTES
        found[name] = (top, size)
        top += size
    for name, alias in aliases_of(compiled).items():
        if alias.owner in found:
            low = found[alias.owner][0] + alias.offset_bytes
            found[name] = (low, compiled.graph.types[name].size_bytes)
    return found
