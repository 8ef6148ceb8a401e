"""Which tensors lie in L2 while a kernel runs: hints for a cache, pages for a scratch buffer.

A cache is told what is read for the last time: the lines are dropped, at once if the kernel reads
each but once, else at its end, and never written to memory. A buffer holds the tensors that the
compiler puts there, and those only. The allocator is that of the Ascend310 (`hicann/ge`,
l2_optimizer/l2_fusion_allocation.cc): 128 KiB pages, at most eight tensors; operators in order,

1. drop the tensors that no later operator reads,
2. keep the others,
3. count one reader less for each input: it is found in L2 if it was kept,
4. keep each output, in order, if a place and enough pages are left; else it goes to memory.

Weights, inputs and outputs of the network, and what the AI CPU touches, are never kept. Nothing is
evicted, nothing fetched. What a kernel uses only inside is an output that nobody reads.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ascend_lab.graph.ai_cpu import CpuKernel
from ascend_lab.graph.placement import in_place_pairs, owners, tensor_bytes, workspaces
from ascend_lab.graph.tasks import Compiled, Task
from ascend_lab.isa import Kernel
from ascend_lab.sim import DeviceMemory
from ascend_lab.sim.l2 import L2, Access, Scratch
from ascend_lab.sim.timeline import KernelTimeline

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
    found, out = [], set(never)
    for use in uses:
        kept = {name: pages for name, pages in kept.items() if readers[name]}
        readers.subtract(set(use.reads))
        for name in use.writes:
            pages, free = -(-sizes[name] // PAGE_BYTES), size_bytes // PAGE_BYTES
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
    held, owner = _held(compiled, written, passed), owners(compiled)
    dead = _last_reads(compiled, places) if hints and not buffer else {}
    for name in () if buffer else written:
        l2.touch([Access(name, *places[name], is_write=True)])
    for task in compiled.tasks:
        if task.lowered is None:
            continue
        names = {b.name: task.value(b.name) for b in task.lowered.kernel.tensors}
        stay = held.get(task.name, frozenset())
        near = frozenset(n for n, value in names.items() if owner.get(value, value) in stay)
        at, over = {name: places[value] for name, value in names.items()}, dead.get(task.name, {})
        last = frozenset(n for n, value in names.items() if owner.get(value, value) in over)
        where = Scratch(near) if buffer else l2
        yield task, task.lowered.kernel, DeviceMemory(where, at, last=last)
        for place in over.values():
            l2.discard(*place)


def uses_of(compiled: Compiled) -> dict[str, Use]:
    """Return, by kernel, what of its activations each reads and writes, views as their owners."""
    graph, owner = compiled.graph, owners(compiled)

    def own(names: Sequence[str]) -> tuple[str, ...]:
        found = dict.fromkeys(owner.get(name, name) for name in names)
        return tuple(name for name in found if name not in graph.constants)

    tasks = (task for task in compiled.tasks if task.lowered is not None)
    return {task.name: Use(own(task.reads), own((*task.writes, *_inner(task)))) for task in tasks}


def _inner(task: Task) -> tuple[str, ...]:
    """Return what a kernel writes and reads again; constants of its own are not that."""
    extra = {task.value(name) for name in task.lowered.extra} if task.lowered else set()
    return tuple(name for name in workspaces(task) if name not in extra)


def _held(
    compiled: Compiled, written: Sequence[str], passed: Sequence[str]
) -> dict[str, frozenset[str]]:
    """Return, by kernel, the tensors that an L2 which is a buffer holds; {} for a cache."""
    chip, graph, owner = compiled.chip, compiled.graph, owners(compiled)
    if chip.l2.kind != "buffer":
        return {}
    uses, later = uses_of(compiled), {owner.get(n, n) for n in passed}
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
    graph, owner, last = compiled.graph, owners(compiled), dict[str, str]()
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
        self.chip, self.fetched_bytes, self._idle_bytes = compiled.chip, 0, 0.0
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
