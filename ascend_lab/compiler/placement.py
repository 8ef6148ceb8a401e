"""Gives each tensor of a compiled network an address in device memory, and models what L2 holds.

Task i reads and writes at time i. A tensor lives from the task that writes it to the last task that
reads it; inputs live from the start, outputs to the end. A view shares its source's memory. A
concat without a copy lives from the time when its first operand is written. An elementwise
kernel may write its result over an operand that nobody reads later: the same core reads each tile
before it writes it. Constants have memory of their own, outside the plan.

L2 is a cache or a scratch buffer. A cache takes hints: the compiler tells it what a kernel reads
for the last time, and the cache drops these lines without writing them to memory, immediately if
the kernel reads each line once, else at the kernel's end. A buffer holds only the tensors that the
compiler puts into it. Its allocator is that of the Ascend310 (`hicann/ge`,
l2_optimizer/l2_fusion_allocation.cc), with pages of 128 KiB and at most eight tensors. For each
operator, in order, it does four things:

1. drop the tensors that no later operator reads,
2. keep the others,
3. count one reader less for each input: the kernel finds it in L2 if it was kept,
4. keep each output, in order, if a place and enough pages are left; else it goes to memory.

It never keeps weights, inputs and outputs of the network, or tensors of the AI CPU. It evicts and
fetches nothing. The workspace of a kernel counts as an output that no operator reads.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ascend_lab.compiler import fusion, memory
from ascend_lab.compiler.aliases import Alias, aliases
from ascend_lab.compiler.buffers import Buffer
from ascend_lab.compiler.ir import Graph, pixels
from ascend_lab.compiler.memory import Plan, plan, share
from ascend_lab.compiler.tasks import Compiled, CpuKernel, Task
from ascend_lab.machine.isa import Kernel
from ascend_lab.machine.sim import DeviceMemory, KernelTimeline
from ascend_lab.machine.sim.l2 import L2, Access, Scratch
from ascend_lab.operators.ops.slicing import Range

ALIGNMENT_BYTES = 512
"""Addresses of tensors are multiples of this number."""


# -- live bytes, before anything is compiled -------------------------------------------------------
def weight_bytes(graph: Graph) -> int:
    """Return the bytes of all constants that nodes read."""
    return sum(c.type.size_bytes for name, c in graph.constants.items() if graph.readers[name])


def node_spans(graph: Graph) -> dict[str, Range]:
    """Return the first and the last node, by position, during which each activation lives."""
    spans = dict.fromkeys(graph.inputs, (0, 0))
    for i, node in enumerate(graph.nodes):
        spans.update((name, (i, i)) for name in node.outputs)
        for name in node.inputs:
            if name in spans:
                spans[name] = (spans[name][0], i)
    last_position = max(len(graph.nodes) - 1, 0)
    spans.update((n, (spans[n][0], last_position)) for n in graph.outputs if n in spans)
    return spans


def live_bytes(graph: Graph) -> list[int]:
    """Return for each node the bytes of the activations alive while it runs, results included."""
    # differences between neighbouring nodes; their running sum is the number of live bytes
    change = [0] * (max(len(graph.nodes), 1) + 1)
    for name, (first_node, last_node) in node_spans(graph).items():
        size = graph.types[name].size_bytes
        change[first_node] += size
        change[last_node + 1] -= size
    return list(accumulate(change))[:-1]


def peak_bytes(graph: Graph) -> int:
    """Return the largest number of bytes alive while the nodes run in order, weights included.

    Each node's result counts as new memory; fusion, in-place results and views will save some.
    """
    return weight_bytes(graph) + max(live_bytes(graph))


KERNEL_PIXELS = 2**24
"""Largest number of pixels that one convolution writes: the rows of its matrix product."""


def too_large(graph: Graph, limit_bytes: int, most_pixels: int | None = KERNEL_PIXELS) -> list[int]:
    """Return the positions of nodes that need too many bytes alive or write too many pixels.

    `most_pixels` limits the pixels of one convolution, all images of a batch together.
    """
    free_bytes = limit_bytes - weight_bytes(graph)
    live_at = live_bytes(graph)
    return [
        i
        for i, node in enumerate(graph.nodes)
        if live_at[i] > free_bytes or (most_pixels and pixels(graph, node) > most_pixels)
    ]


# -- lifetimes ------------------------------------------------------------------------------------
def aliases_of(compiled: Compiled) -> Mapping[str, Alias]:
    """Return, for every tensor that lies inside another tensor's memory, its place there."""
    return aliases(compiled.graph, {t.nodes[0] for t in compiled.tasks if t.lowered is None})


def owners(compiled: Compiled) -> dict[str, str]:
    """Return, for every tensor that lies inside another tensor's memory, that other tensor."""
    return {name: alias.owner for name, alias in aliases_of(compiled).items()}


def buffers_of(compiled: Compiled) -> list[Buffer]:
    """Return all activations and workspaces as buffers; their times are positions of tasks."""
    graph = compiled.graph
    owner = owners(compiled)
    sizes = tensor_bytes(compiled)
    last_index = max(len(compiled.tasks) - 1, 0)
    lifetimes: dict[str, list[int]] = {name: [0, 0] for name in graph.inputs}
    for i, task in enumerate(compiled.tasks):
        for name in (*task.writes, *workspaces(task)):
            lifetimes.setdefault(owner.get(name, name), [i, i])
        for name in (*task.reads, *task.writes):
            if name not in graph.constants:
                lifetimes[owner.get(name, name)][1] = i
    for name in graph.outputs:
        if owner.get(name, name) in lifetimes:
            lifetimes[owner.get(name, name)][1] = last_index
    buffers = ((n, lifetimes[n]) for n in lifetimes if n not in graph.constants)
    return [Buffer(n, birth, last_task + 1, sizes[n]) for n, (birth, last_task) in buffers]


def workspaces(task: Task) -> tuple[str, ...]:
    """Return the names of tensors that only this task's kernel uses, its constants included."""
    if task.lowered is None:
        return ()
    graph_tensors = {*task.piece.graph.inputs, *task.piece.graph.outputs}
    names = (b.name for b in task.lowered.kernel.tensors)
    return tuple(task.value(n) for n in names if n.partition(".")[0] not in graph_tensors)


def tensor_bytes(compiled: Compiled) -> dict[str, int]:
    """Return the bytes of every tensor from its type, and of every workspace from its kernel."""
    types = compiled.graph.types
    stated = {name: kind.size_bytes for name, kind in types.items()}
    return {**{n: size for n, size in _buffer_bytes(compiled) if n not in types}, **stated}


def constant_bytes(compiled: Compiled) -> Mapping[str, int]:
    """Return the bytes of every constant as the kernel that reads it stores it."""
    sizes: dict[str, int] = {}
    for name, size in _buffer_bytes(compiled):
        if name in compiled.graph.constants:
            sizes[name] = max(sizes.get(name, 0), size)
    return sizes


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
    merged_plan = plan(
        merged, method=method, time_limit_s=time_limit_s, alignment_bytes=ALIGNMENT_BYTES
    )
    offsets = dict(merged_plan.offsets)
    # a result that overwrites its operand has the operand's offset
    for operand, result in pairs:
        offsets[result] = offsets[operand]
    return replace(merged_plan, offsets=offsets)


def in_place_pairs(compiled: Compiled) -> list[tuple[str, str]]:
    """Return pairs (operand, result) where an elementwise kernel may overwrite its operand.

    The kernel must be the last reader, and both must have as many bytes, at the same address.
    """
    graph = compiled.graph
    owner = owners(compiled)
    sizes = tensor_bytes(compiled)
    last_task = {life.id: life.upper - 1 for life in buffers_of(compiled)}
    pairs = []
    for i, task in enumerate(compiled.tasks):
        nodes = task.piece.graph.nodes
        if task.lowered is None or len(task.writes) > 1 or len(task.lowered.kernel.phases) > 1:
            continue
        # only an elementwise kernel reads and writes each element at the same address
        if any(fusion.kind_of(node) != "elementwise" for node in nodes):
            continue
        target = task.writes[0]
        for name in task.reads:
            source = owner.get(name, name)
            # an input of the network belongs to the caller and is not overwritten
            is_last_reader = (
                source in last_task and last_task[source] == i and source not in graph.inputs
            )
            same_size = sizes[source] == sizes[target] == sizes[name]
            if is_last_reader and target not in owner and same_size:
                pairs.append((source, target))
                break
    return pairs


def places_of(compiled: Compiled, offsets: Mapping[Hashable, int]) -> dict[str, tuple[int, int]]:
    """Return (address, bytes) of every tensor: activations at `offsets`, then constants."""
    places = {str(b.id): (offsets[b.id], b.size_bytes) for b in buffers_of(compiled)}
    next_address = max((address + size for address, size in places.values()), default=0)
    for name, size in constant_bytes(compiled).items():
        next_address = memory.aligned(next_address, ALIGNMENT_BYTES)
        places[name] = (next_address, size)
        next_address += size
    for name, alias in aliases_of(compiled).items():
        if alias.owner in places:
            address = places[alias.owner][0] + alias.offset_bytes
            places[name] = (address, compiled.graph.types[name].size_bytes)
    return places


# -- in L2 -----------------------------------------------------------------------------------------
PAGE_BYTES = 128 * 1024
"""Unit in which a buffer's space is given out: 300 KiB take three pages."""
MAX_BUFFER_TENSORS = 8
"""Largest number of tensors that a buffer holds."""
Places = Mapping[str, tuple[int, int]]
"""(address, bytes) by name."""


@dataclass(frozen=True, slots=True)
class Use:
    """The tensors that one operator reads and writes, without repetition."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


def allocate(
    uses: Sequence[Use], sizes: Mapping[str, int], memory_only: set[str], size_bytes: int
) -> list[frozenset[str]]:
    """Return the tensors that a buffer of `size_bytes` holds during each operator.

    The module's docstring has the algorithm. `sizes` are bytes by name; tensors in `memory_only`
    stay in memory.
    """
    readers = Counter(name for use in uses for name in set(use.reads))
    pages_of: dict[str, int] = {}
    contents = []
    in_memory = set(memory_only)
    for use in uses:
        pages_of = {name: pages for name, pages in pages_of.items() if readers[name]}
        readers.subtract(set(use.reads))
        for name in use.writes:
            # 300 KiB take 3 pages of 128 KiB
            pages = -(-sizes[name] // PAGE_BYTES)
            free = size_bytes // PAGE_BYTES
            if name in in_memory or name in pages_of:
                continue
            if len(pages_of) < MAX_BUFFER_TENSORS and pages <= free - sum(pages_of.values()):
                pages_of[name] = pages
            else:
                # a tensor that was written to memory once stays there
                in_memory.add(name)
        contents.append(frozenset(pages_of))
    return contents


# -- a compiled network ----------------------------------------------------------------------------
def kernels_in_memory(
    compiled: Compiled,
    l2: L2,
    places: Places,
    written: Sequence[str] = (),
    passed: Sequence[str] = (),
    hints: bool = True,
) -> Iterator[tuple[Task, Kernel, DeviceMemory]]:
    """Yield the kernels in order, each with the device memory that it finds.

    All kernels share `l2` if it is a cache; a buffer is given to each kernel with its contents.
    `written` names inputs that are in L2 as if just written, in this order; `passed` names outputs
    that a later part of the network reads. The caller must time each kernel before it asks for the
    next, as its accesses change the cache.
    """
    is_buffer = compiled.chip.l2.kind == "buffer"
    in_buffer = _buffer_contents(compiled, written, passed)
    owner = owners(compiled)
    dead_after = _last_reads(compiled, places) if hints and not is_buffer else {}
    for name in () if is_buffer else written:
        l2.touch([Access(name, *places[name], is_write=True)])
    for task in compiled.tasks:
        if task.lowered is None:
            continue
        names = {b.name: task.value(b.name) for b in task.lowered.kernel.tensors}
        in_buffer_now = in_buffer.get(task.name, frozenset())
        in_l2 = frozenset(
            n for n, value in names.items() if owner.get(value, value) in in_buffer_now
        )
        kernel_places = {name: places[value] for name, value in names.items()}
        dead_tensors = dead_after.get(task.name, {})
        last_read = frozenset(
            n for n, value in names.items() if owner.get(value, value) in dead_tensors
        )
        kernel_l2 = Scratch(in_l2) if is_buffer else l2
        yield task, task.lowered.kernel, DeviceMemory(kernel_l2, kernel_places, last=last_read)
        # after the kernel: lines that it read more than once
        for place in dead_tensors.values():
            l2.discard(*place)


def uses_of(compiled: Compiled) -> dict[str, Use]:
    """Return the activations that each kernel reads and writes; for a view, its source."""
    graph = compiled.graph
    owner = owners(compiled)

    def activations(names: Sequence[str]) -> tuple[str, ...]:
        uses = dict.fromkeys(owner.get(name, name) for name in names)
        return tuple(name for name in uses if name not in graph.constants)

    uses = {}
    for task in compiled.tasks:
        if task.lowered is not None:  # the kernel's own constants are not written
            extra = {task.value(name) for name in task.lowered.extra}
            written_inside = (name for name in workspaces(task) if name not in extra)
            uses[task.name] = Use(
                activations(task.reads), activations((*task.writes, *written_inside))
            )
    return uses


def _buffer_contents(
    compiled: Compiled, written: Sequence[str], passed: Sequence[str]
) -> dict[str, frozenset[str]]:
    """Return, by kernel, the tensors that L2 holds if it is a buffer; {} if it is a cache."""
    chip = compiled.chip
    graph = compiled.graph
    owner = owners(compiled)
    if chip.l2.kind != "buffer":
        return {}
    uses = uses_of(compiled)
    read_later = {owner.get(n, n) for n in passed}
    memory_only = (
        {owner.get(n, n) for n in (*graph.inputs, *graph.outputs)} - {*written} - read_later
    )
    memory_only.update(owner.get(n, n) for n in compiled.spilled)
    for task in compiled.tasks:
        if task.lowered is not None and isinstance(task.lowered.kernel, CpuKernel):
            memory_only.update(uses[task.name].reads, uses[task.name].writes)
    # one operator before the network writes the inputs, one after it reads the outputs
    order = [Use((), tuple(written)), *uses.values(), Use(tuple(read_later), ())]
    in_scratch = allocate(order, tensor_bytes(compiled), memory_only, chip.l2.size_bytes)
    return dict(zip(uses, in_scratch[1:], strict=False))


def _last_reads(compiled: Compiled, places: Places) -> dict[str, dict[str, tuple[int, int]]]:
    """Return, by kernel, (address, bytes) of the tensors that no later kernel needs."""
    graph = compiled.graph
    owner = owners(compiled)
    last_task = dict[str, str]()
    for task in (task for task in compiled.tasks if task.lowered is not None):
        names = (*task.reads, *task.writes, *workspaces(task))
        last_task.update((owner.get(name, name), task.name) for name in names)
    needed_later = {owner.get(n, n) for n in graph.outputs}
    # if a kernel overwrites its operand, the operand's lines then hold the result
    reused = {source for source, _ in in_place_pairs(compiled)}
    dead_after: dict[str, dict[str, tuple[int, int]]] = {}
    for name, task_name in last_task.items():
        if name in places and name not in needed_later and name not in reused:
            dead_after.setdefault(task_name, {})[name] = places[name]
    return dead_after


# -- prefetch --------------------------------------------------------------------------------------
class Prefetch:
    """Prefetches weights into the cache before their kernel runs, while device memory is idle.

    Memory is idle during the start of a kernel, and while a kernel runs without using it:
    cycles * rate - bytes moved. In this time the weights of later kernels are fetched, in order,
    as far as the tensors of the running kernel leave room in L2:

        inputs + outputs + workspace + fetched weights <= L2

    A part of a weight is useful, too. Lines that a fetch evicts use memory in the same time.
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
        """Fetch as much as the idle time before a kernel allows, its start included."""
        rate = self.chip.device_memory.rate_bytes_per_s / self.chip.clock_hz
        self._idle_bytes += start_cycles * rate
        rank = self._rank[task.name]
        # drop the weights of kernels that have run; the next weight is the last entry of the list
        while self._queue and self._queue[-1][0] < rank:
            self._queue.pop()
        room = self.chip.l2.size_bytes - self._working - sum(self._ready.values())
        while self._queue and self._idle_bytes >= 1.0 and room > 0:
            reader_rank, name, address, size = self._queue.pop()
            # bytes of this weight that both the idle time and the room allow
            fetched = min(size, int(self._idle_bytes), room)
            evicted = l2.touch([Access(name, address, fetched)]).write_back_bytes
            self._ready[name] = self._ready.get(name, 0) + fetched
            self.fetched_bytes += fetched + evicted
            self._idle_bytes -= fetched + evicted
            room -= fetched
            if fetched < size:
                self._queue.append((reader_rank, name, address + fetched, size - fetched))
        # idle time cannot be saved for later; a fetch that took too long stays a debt
        self._idle_bytes = min(self._idle_bytes, 0.0)

    def after(self, task: Task, kernel: Kernel, timeline: KernelTimeline) -> None:
        """Add the time in which a kernel left memory idle; forget its weights, which are used."""
        rate = self.chip.device_memory.rate_bytes_per_s / self.chip.clock_hz
        self._idle_bytes += max(0.0, timeline.cycles * rate - timeline.memory_bytes)
        self._working = sum(buffer.size_bytes for buffer in kernel.tensors)
        for name in task.reads:
            self._ready.pop(name, None)
