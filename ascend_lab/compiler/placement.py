"""Where a compiled network's tensors lie: offsets in memory, and what is in L2 beside a kernel.

Task i writes and reads at time i. A tensor lives from the task that writes it to the last that
reads it; inputs from the start, outputs to the end. A view is bytes of its source; what is joined
without a copy lives, from the first part written, as the whole. A tensor that an elementwise kernel
reads for the last time may be overwritten by what the kernel writes: each tile is read before it is
written, by the same core. Constants have memory of their own and are not planned.

L2 is a cache, which takes hints, or a scratch buffer of pages. A cache is told what is read for the
last time: the lines are dropped, at once if the kernel reads each but once, else at its end, and
never written to memory. A buffer holds the tensors that the compiler puts there, and those only.
The allocator is that of the Ascend310 (`hicann/ge`, l2_optimizer/l2_fusion_allocation.cc): 128 KiB
pages, at most eight tensors; operators in order,

1. drop the tensors that no later operator reads,
2. keep the others,
3. count one reader less for each input: it is found in L2 if it was kept,
4. keep each output, in order, if a place and enough pages are left; else it goes to memory.

Weights, inputs and outputs of the network, and what the AI CPU touches, are never kept. Nothing is
evicted, nothing fetched. What a kernel uses only inside is an output that nobody reads.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ascend_lab.compiler import fusion, memory
from ascend_lab.compiler.aliases import Alias, aliases
from ascend_lab.compiler.ir import Graph, pixels
from ascend_lab.compiler.memory import Buffer, Plan, plan, share
from ascend_lab.compiler.tasks import Compiled, CpuKernel, Task
from ascend_lab.machine.isa import Kernel
from ascend_lab.machine.sim import DeviceMemory, KernelTimeline
from ascend_lab.machine.sim.l2 import L2, Access, Scratch
from ascend_lab.operators.ops.slicing import Range

ALIGN_BYTES = 512


# -- bytes alive, before anything is compiled ------------------------------------------------------
def weight_bytes(graph: Graph) -> int:
    """Return the bytes of all constants that nodes read."""
    return sum(c.type.size_bytes for name, c in graph.constants.items() if graph.readers[name])


def spans(graph: Graph) -> dict[str, Range]:
    """Return, for every activation, the first and the last node that needs it to be there."""
    found = dict.fromkeys(graph.inputs, (0, 0))
    for i, node in enumerate(graph.nodes):
        found.update((name, (i, i)) for name in node.outputs)
        for name in node.inputs:
            if name in found:
                found[name] = (found[name][0], i)
    end = max(len(graph.nodes) - 1, 0)
    found.update((n, (found[n][0], end)) for n in graph.outputs if n in found)
    return found


def live_bytes(graph: Graph) -> list[int]:
    """Return the bytes of the activations that exist while each node runs, its own included."""
    change = [0] * (max(len(graph.nodes), 1) + 1)
    for name, (first, last) in spans(graph).items():
        size = graph.types[name].size_bytes
        change[first] += size
        change[last + 1] -= size
    return list(accumulate(change))[:-1]


def peak_bytes(graph: Graph) -> int:
    """Return the most bytes alive along the nodes in order: activations, and all weights.

    Every node writes a tensor of its own: fusion, in-place results and views save some of it.
    """
    return weight_bytes(graph) + max(live_bytes(graph))


KERNEL_PIXELS = 2**24
"""Most pixels of a feature map that one convolution computes: rows of its matrix product."""


def too_large(graph: Graph, limit_bytes: int, most_pixels: int | None = KERNEL_PIXELS) -> list[int]:
    """Return the places of nodes that need more bytes alive, or write more pixels, than they may.

    `most_pixels` are of all images together, in one convolution; None: any number.
    """
    room = limit_bytes - weight_bytes(graph)
    live = live_bytes(graph)
    return [
        i
        for i, node in enumerate(graph.nodes)
        if live[i] > room or (most_pixels and pixels(graph, node) > most_pixels)
    ]


# -- lifetimes ------------------------------------------------------------------------------------
def aliases_of(compiled: Compiled) -> Mapping[str, Alias]:
    """Return, for every tensor without memory of its own, where it lies in another."""
    return aliases(compiled.graph, {t.nodes[0] for t in compiled.tasks if t.lowered is None})


def owners(compiled: Compiled) -> dict[str, str]:
    """Return, for every tensor without memory of its own, the tensor whose memory it is."""
    return {name: alias.owner for name, alias in aliases_of(compiled).items()}


def buffers_of(compiled: Compiled) -> list[Buffer]:
    """Return all activations, workspaces of kernels included, as buffers; time counts tasks."""
    graph = compiled.graph
    owner = owners(compiled)
    sizes = tensor_bytes(compiled)
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
    own = ((n, span[n]) for n in span if n not in graph.constants)
    return [Buffer(n, first, last + 1, sizes[n]) for n, (first, last) in own]


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
def planned_bytes(compiled: Compiled) -> int:
    """Return the most bytes alive while a compiled network runs, constants included."""
    return sum(constant_bytes(compiled).values()) + memory.peak_live_bytes(buffers_of(compiled))


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
    graph = compiled.graph
    owner = owners(compiled)
    sizes = tensor_bytes(compiled)
    last = {life.id: life.upper - 1 for life in buffers_of(compiled)}
    pairs = []
    for i, task in enumerate(compiled.tasks):
        parts = task.piece.graph.nodes
        if task.lowered is None or len(task.writes) > 1 or len(task.lowered.kernel.phases) > 1:
            continue
        if any(fusion.kind_of(node) != "elementwise" for node in parts):  # at the same address
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


def places_of(compiled: Compiled, offsets: Mapping[Hashable, int]) -> dict[str, tuple[int, int]]:
    """Return (address, bytes) of every tensor: activations by `offsets`, constants behind them."""
    found = {str(b.id): (offsets[b.id], b.size_bytes) for b in buffers_of(compiled)}
    top = max((low + size for low, size in found.values()), default=0)
    for name, size in constant_bytes(compiled).items():
        top = memory.aligned(top, ALIGN_BYTES)
        found[name] = (top, size)
        top += size
    for name, alias in aliases_of(compiled).items():
        if alias.owner in found:
            low = found[alias.owner][0] + alias.offset_bytes
            found[name] = (low, compiled.graph.types[name].size_bytes)
    return found


# -- in L2 -----------------------------------------------------------------------------------------
PAGE_BYTES = 128 * 1024
TENSORS = 8
"""Tensors that a buffer holds at most."""
Places = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Use:
    """Tensors that one operator reads and writes, each once."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


def allocate(
    uses: Sequence[Use], sizes: Mapping[str, int], never: set[str], size_bytes: int
) -> list[frozenset[str]]:
    """Return the tensors that a buffer of `size_bytes` holds during each operator; see the module.

    `sizes` in bytes by name; those of `never` stay in memory.
    """
    readers = Counter(name for use in uses for name in set(use.reads))
    kept: dict[str, int] = {}
    found = []
    out = set(never)
    for use in uses:
        kept = {name: pages for name, pages in kept.items() if readers[name]}
        readers.subtract(set(use.reads))
        for name in use.writes:
            pages = -(-sizes[name] // PAGE_BYTES)
            free = size_bytes // PAGE_BYTES
            if name in out or name in kept:
                continue
            if len(kept) < TENSORS and pages <= free - sum(kept.values()):
                kept[name] = pages
            else:
                out.add(name)  # a part of it is in memory, wherever the others go
        found.append(frozenset(kept))
    return found


# -- a compiled network ----------------------------------------------------------------------------
def kernels_in_memory(
    compiled: Compiled,
    l2: L2,
    places: Places,
    written: Sequence[str] = (),
    passed: Sequence[str] = (),
    hints: bool = True,
) -> Iterator[tuple[Task, Kernel, DeviceMemory]]:
    """Yield the kernels in order, each with the memory at its tensors' places.

    An `l2` that is a cache is theirs, one after another; a buffer is each kernel's own. `written`
    are inputs that lie in L2 as if just written, in that order; `passed`, outputs that what comes
    after this part of a network reads. The user times a kernel before the next one.
    """
    buffer = compiled.chip.l2.kind == "buffer"
    held = _held(compiled, written, passed)
    owner = owners(compiled)
    dead = _last_reads(compiled, places) if hints and not buffer else {}
    for name in () if buffer else written:
        l2.touch([Access(name, *places[name], is_write=True)])
    for task in compiled.tasks:
        if task.lowered is None:
            continue
        names = {b.name: task.value(b.name) for b in task.lowered.kernel.tensors}
        stay = held.get(task.name, frozenset())
        near = frozenset(n for n, value in names.items() if owner.get(value, value) in stay)
        at = {name: places[value] for name, value in names.items()}
        over = dead.get(task.name, {})
        last = frozenset(n for n, value in names.items() if owner.get(value, value) in over)
        where = Scratch(near) if buffer else l2
        yield task, task.lowered.kernel, DeviceMemory(where, at, last=last)
        for place in over.values():
            l2.discard(*place)


def uses_of(compiled: Compiled) -> dict[str, Use]:
    """Return, by kernel, what of its activations each reads and writes, views as their owners."""
    graph = compiled.graph
    owner = owners(compiled)

    def own(names: Sequence[str]) -> tuple[str, ...]:
        found = dict.fromkeys(owner.get(name, name) for name in names)
        return tuple(name for name in found if name not in graph.constants)

    found = {}
    for task in compiled.tasks:
        if task.lowered is not None:  # constants of its own are not written
            extra = {task.value(name) for name in task.lowered.extra}
            inner = (name for name in workspaces(task) if name not in extra)
            found[task.name] = Use(own(task.reads), own((*task.writes, *inner)))
    return found


def _held(
    compiled: Compiled, written: Sequence[str], passed: Sequence[str]
) -> dict[str, frozenset[str]]:
    """Return, by kernel, the tensors that an L2 which is a buffer holds; {} for a cache."""
    chip = compiled.chip
    graph = compiled.graph
    owner = owners(compiled)
    if chip.l2.kind != "buffer":
        return {}
    uses = uses_of(compiled)
    later = {owner.get(n, n) for n in passed}
    never = {owner.get(n, n) for n in (*graph.inputs, *graph.outputs)} - {*written} - later
    never.update(owner.get(n, n) for n in compiled.spilled)
    for task in compiled.tasks:
        if task.lowered is not None and isinstance(task.lowered.kernel, CpuKernel):
            never.update(uses[task.name].reads, uses[task.name].writes)
    order = [Use((), tuple(written)), *uses.values(), Use(tuple(later), ())]
    found = allocate(order, tensor_bytes(compiled), never, chip.l2.size_bytes)
    return dict(zip(uses, found[1:], strict=False))


def _last_reads(compiled: Compiled, places: Places) -> dict[str, dict[str, tuple[int, int]]]:
    """Return, by kernel, what nobody needs after it: names, and their (address, bytes)."""
    graph = compiled.graph
    owner = owners(compiled)
    last = dict[str, str]()
    for task in (task for task in compiled.tasks if task.lowered is not None):
        names = (*task.reads, *task.writes, *workspaces(task))
        last.update((owner.get(name, name), task.name) for name in names)
    alive = {owner.get(n, n) for n in graph.outputs}
    reused = {source for source, _ in in_place_pairs(compiled)}  # written over while it is read
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name, task_name in last.items():
        if name in places and name not in alive and name not in reused:
            found.setdefault(task_name, {})[name] = places[name]
    return found


# -- prefetch --------------------------------------------------------------------------------------
class Prefetch:
    """Weights fetched into a cache before their kernel runs, while memory has nothing else to do.

    A kernel leaves memory idle for the cycles that are not its own traffic's; so does the start of
    the next one. In that time weights of later kernels come in, in order, as far as they fit beside
    what the kernel that runs touches: in + out + workspace + weights <= L2. Part of a weight is of
    use too. What this pushes out of L2 takes the same memory's time.
    """

    def __init__(self, compiled: Compiled, places: Places) -> None:
        """Queue the constants in the order in which kernels first read them."""
        self.chip = compiled.chip
        self.fetched_bytes = 0
        self._idle_bytes = 0.0
        self._queue: list[tuple[int, str, int, int]] = []
        self._rank = {task.name: i for i, task in enumerate(compiled.tasks)}
        self._ready: dict[str, int] = {}
        seen = set[str]()
        for i, task in enumerate(compiled.tasks):
            for name in task.reads if task.lowered else ():
                if name in compiled.graph.constants and name in places and name not in seen:
                    seen.add(name)
                    self._queue.append((i, name, *places[name]))
        self._queue.reverse()
        self._working = 0

    def before(self, task: Task, l2: L2, start_cycles: int) -> None:
        """Fetch what idle memory allows until a kernel begins, its start's cycles included."""
        rate = self.chip.device_memory.rate_bytes_per_s / self.chip.clock_hz
        self._idle_bytes += start_cycles * rate
        rank = self._rank[task.name]
        while self._queue and self._queue[-1][0] < rank:
            self._queue.pop()
        room = self.chip.l2.size_bytes - self._working - sum(self._ready.values())
        while self._queue and self._idle_bytes >= 1.0 and room > 0:
            at, name, low, size = self._queue.pop()
            part = min(size, int(self._idle_bytes), room)
            gone = l2.touch([Access(name, low, part)]).write_back_bytes
            self._ready[name] = self._ready.get(name, 0) + part
            self.fetched_bytes += part + gone
            self._idle_bytes -= part + gone
            room -= part
            if part < size:
                self._queue.append((at, name, low + part, size - part))
        self._idle_bytes = min(self._idle_bytes, 0.0)

    def after(self, task: Task, kernel: Kernel, timeline: KernelTimeline) -> None:
        """Note how long a kernel left memory idle, and that its weights are used."""
        rate = self.chip.device_memory.rate_bytes_per_s / self.chip.clock_hz
        self._idle_bytes += max(0.0, timeline.cycles * rate - timeline.memory_bytes)
        self._working = sum(buffer.size_bytes for buffer in kernel.tensors)
        for name in task.reads:
            self._ready.pop(name, None)
