"""Where a compiled network's tensors lie: lifetimes to the memory planner, offsets back.

Task i writes and reads at time i. A tensor lives from the task that writes it to the last that
reads it; inputs from the start, outputs to the end. A view is bytes of its source; what is joined
without a copy lives, from the first part written, as the whole. A tensor that an elementwise kernel
reads for the last time may be overwritten by what the kernel writes: each tile is read before it is
written, by the same core. Constants have memory of their own and are not planned.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from ascend_lab.graph.aliases import Alias, aliases
from ascend_lab.graph.fusion import kind_of
from ascend_lab.graph.memory import Buffer, Plan, plan, share
from ascend_lab.graph.memory.buffers import aligned
from ascend_lab.graph.tasks import Compiled, Task

ALIGN_BYTES = 512


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A tensor with memory of its own: needed by tasks first .. last, both included."""

    name: str
    first: int
    last: int
    size_bytes: int


# -- lifetimes ------------------------------------------------------------------------------------
def aliases_of(compiled: Compiled) -> Mapping[str, Alias]:
    """Return, for every tensor without memory of its own, where it lies in another."""
    return aliases(compiled.graph, {t.nodes[0] for t in compiled.tasks if t.lowered is None})


def owners(compiled: Compiled) -> dict[str, str]:
    """Return, for every tensor without memory of its own, the tensor whose memory it is."""
    return {name: alias.owner for name, alias in aliases_of(compiled).items()}


def lifetimes(compiled: Compiled) -> list[Lifetime]:
    """Return the lifetimes of all activations, workspaces of kernels included."""
    graph, owner, sizes = compiled.graph, owners(compiled), tensor_bytes(compiled)
    end = max(len(compiled.tasks) - 1, 0)
    span: dict[str, list[int]] = {name: [0, 0] for name in graph.inputs}
    for i, task in enumerate(compiled.tasks):
        for name in (*task.writes, *workspaces(task)):
            span.setdefault(owner.get(name, name), [i, i])
        for name in (*task.reads, *task.writes):
            if name not in graph.constants:
                span[owner.get(name, name)][1] = i
    for name in graph.outputs:
        if owner.get(name, name) in span:
            span[owner.get(name, name)][1] = end
    return [Lifetime(n, a, b, sizes[n]) for n, (a, b) in span.items() if n not in graph.constants]


def workspaces(task: Task) -> tuple[str, ...]:
    """Return the network names of what a kernel uses only inside, constants of its own included."""
    if task.lowered is None:
        return ()
    known = {*task.piece.graph.inputs, *task.piece.graph.outputs}
    names = (b.name for b in task.lowered.kernel.tensors)
    return tuple(task.value(n) for n in names if n.partition(".")[0] not in known)


def tensor_bytes(compiled: Compiled) -> dict[str, int]:
    """Return the bytes of every tensor, workspaces included, as kernels and types state them."""
    types = compiled.graph.types
    stated = {name: kind.size_bytes for name, kind in types.items()}
    return {**{n: size for n, size in _buffer_bytes(compiled) if n not in types}, **stated}


def constant_bytes(compiled: Compiled) -> Mapping[str, int]:
    """Return the bytes of every constant as the kernel that reads it stores it."""
    found: dict[str, int] = {}
    for name, size in _buffer_bytes(compiled):
        if name in compiled.graph.constants:
            found[name] = max(found.get(name, 0), size)
    return found


def _buffer_bytes(compiled: Compiled) -> list[tuple[str, int]]:
    return [
        (task.value(buffer.name), buffer.size_bytes)
        for task in compiled.tasks
        if task.lowered is not None
        for buffer in task.lowered.kernel.tensors
    ]


# -- places ---------------------------------------------------------------------------------------
def buffers_of(compiled: Compiled) -> list[Buffer]:
    """Return all activations and workspaces as buffers; time counts tasks."""
    return [Buffer(x.name, x.first, x.last + 1, x.size_bytes) for x in lifetimes(compiled)]


def plan_network(
    compiled: Compiled, method: str = "best of", *, in_place: bool = True, time_limit_s: float = 1.0
) -> Plan:
    """Return an offset for every activation and workspace; raises as `memory.plan`."""
    pairs = in_place_pairs(compiled) if in_place else []
    merged = share(buffers_of(compiled), pairs)
    found = plan(merged, method=method, time_limit_s=time_limit_s, alignment_bytes=ALIGN_BYTES)
    offsets = dict(found.offsets)
    for kept, gone in pairs:
        offsets[gone] = offsets[kept]
    return replace(found, offsets=offsets)


def in_place_pairs(compiled: Compiled) -> list[tuple[str, str]]:
    """Return (tensor read for the last time, tensor written over it) of elementwise kernels."""
    graph, owner, sizes = compiled.graph, owners(compiled), tensor_bytes(compiled)
    last = {life.name: life.last for life in lifetimes(compiled)}
    pairs = []
    for i, task in enumerate(compiled.tasks):
        if not _is_elementwise(task):
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


def _is_elementwise(task: Task) -> bool:
    """Tell whether a kernel computes every element from the elements at the same address."""
    if task.lowered is None or len(task.writes) > 1 or len(task.lowered.kernel.phases) > 1:
        return False
    return all(kind_of(node) == "elementwise" for node in task.piece.graph.nodes)


def places_of(compiled: Compiled, offsets: Mapping[Hashable, int]) -> dict[str, tuple[int, int]]:
    """Return (address, bytes) of every tensor: activations by `offsets`, constants behind them."""
    found = {x.name: (offsets[x.name], x.size_bytes) for x in lifetimes(compiled)}
    top = max((low + size for low, size in found.values()), default=0)
    for name, size in constant_bytes(compiled).items():
        top = aligned(top, ALIGN_BYTES)
        found[name] = (top, size)
        top += size
    for name, alias in aliases_of(compiled).items():
        if alias.owner in found:
            low = found[alias.owner][0] + alias.offset_bytes
            found[name] = (low, compiled.graph.types[name].size_bytes)
    return found
