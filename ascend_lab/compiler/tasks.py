"""Compiles groups of nodes to tasks, one kernel each, in the order in which they run.

Equal groups are lowered once. The AI CPU (ordinary processor cores on the NPU chip) computes the
operators without a kernel:

    time = launch + (bytes read + bytes written) / rate

The chip file has both numbers, launch and rate. Products and convolutions in int32, which no cube
takes, count as reading both factors of every multiplication; those in floating point never run on
the AI CPU. It reads and writes through L2 as kernels do, but a hit in L2 makes it no faster.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import ModuleType

from ascend_lab import errors
from ascend_lab.compiler import aliases, ir, lower as lowering
from ascend_lab.compiler.lower import CONVOLUTIONS, PRODUCTS, Choice, Lowered, Piece, lower
from ascend_lab.compiler.lower.piece import near_memory
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa.memory import Buffer
from ascend_lab.machine.sim.l2 import Access, DeviceMemory
from ascend_lab.machine.sim.timeline import Start, start_cycles
from ascend_lab.operators.ops.operator import Operator
from ascend_lab.plugins import plugins

AI_CPU = "AI CPU"
AIPP = "AIPP"
CUBE_OPS = (*CONVOLUTIONS, *PRODUCTS, "conv_transpose2d", "conv2d_grad_weight", "flash_attention")
"""Operators with many multiplications per byte: the AI CPU is too slow for them."""


@dataclass(frozen=True, slots=True)
class CpuKernel(isa.Kernel):
    """An operator on the AI CPU, without a program: its tensors, and why it has no NPU kernel."""

    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    factor_bytes: int
    reason: str
    engine: str = AI_CPU

    def __post_init__(self) -> None:
        """Skip the checks of a kernel: there are no phases to check."""

    @property
    def tensors(self) -> tuple[Buffer, ...]:
        """The tensors in device memory, each once."""
        return (*self.reads, *self.writes)


@dataclass(frozen=True, slots=True)
class CpuTimeline(sim.KernelTimeline):
    """Time of an operator on the AI CPU, in cycles of the NPU's clock."""

    read_bytes: int
    written_bytes: int
    factor_bytes: int
    memory_bytes: int = 0
    l2_hit_rate: float = 0.0
    engine: str = AI_CPU
    core_count: int = 1
    seconds: tuple[float, float] | None = field(default=None, kw_only=True)
    """Seconds of launch and work of an operator on the host; None on the AI CPU."""

    @property
    def cycles(self) -> int:
        """Cycles of moving the bytes."""
        if self.seconds is not None:
            return math.ceil(self.seconds[1] * self.chip.clock_hz)
        moved_bytes = self.read_bytes
        rate_bytes_per_s = self.chip.device_memory.rate_bytes_per_s
        if self.engine == AI_CPU:
            # an int32 product reads its factors again for every multiplication
            moved_bytes = max(self.read_bytes, self.factor_bytes) + self.written_bytes
            rate_bytes_per_s = self.chip.ai_cpu_rate_bytes_per_s
        return math.ceil(moved_bytes / rate_bytes_per_s * self.chip.clock_hz)

    @property
    def launch_cycles(self) -> int:
        """Cycles until the AI CPU starts; 0 for AIPP, the core's image loader."""
        launch_s = 0.0  # of AIPP, which is part of the core
        if self.seconds is not None:
            launch_s = self.seconds[0]
        elif self.engine == AI_CPU:
            launch_s = self.chip.ai_cpu_overhead_s
        return round(launch_s * self.chip.clock_hz)

    @property
    def busy_cycles(self) -> Mapping[str, int]:
        """Cycles of work by engine; a kernel has them by pipe."""
        return {self.engine: self.cycles}

    @property
    def path_bytes(self) -> Mapping[tuple[str, str], int]:
        """Bytes moved per (src, dst)."""
        return {("GM", self.engine): self.read_bytes, (self.engine, "GM"): self.written_bytes}

    @property
    def energy_j(self) -> float:
        """Energy of the bytes that device memory moves; the AI CPU's own energy is not counted."""
        return self.memory_bytes * self.chip.device_memory.energy_pj_per_byte * 1e-12

    @property
    def bound_by(self) -> str:
        """What takes longest: "launch", or the name of the engine."""
        return "launch" if self.launch_cycles > self.cycles else self.engine


def on_ai_cpu(piece: Piece, chip: Chip, error: errors.AscendLabError) -> Lowered:
    """Return a single operator that no kernel computes, placed on the AI CPU.

    `error` is the one that lowering raised. It is raised again if the AI CPU cannot help:
    floating-point work of the cube, bf16 on a chip without it, a fault in the graph, a chip file
    without an AI CPU.
    """
    node = piece.graph.nodes[0]
    types = piece.graph.types
    # AIPP loads camera frames; everything else goes to the AI CPU
    engine = AIPP if node.has("frames") else AI_CPU
    lacks_bf16 = any(kind.dtype == "bf16" for kind in types.values()) and "bf16" not in chip.cube
    # a fault in the graph is an error on every engine; a fused group is more than one operator
    is_fault = isinstance(error, errors.GraphError) or len(piece.graph.nodes) > 1
    is_int32_product = (
        node.op in (*CONVOLUTIONS, *PRODUCTS) and types[node.inputs[0]].dtype == "int32"
    )
    lacks_ai_cpu = engine == AI_CPU and not chip.ai_cpu_rate_bytes_per_s
    if is_fault or lacks_bf16 or lacks_ai_cpu or (node.op in CUBE_OPS and not is_int32_product):
        raise error
    kernel = CpuKernel(
        f"{node.op} on the {engine}",
        (),
        reads=_buffers(types, piece.graph.inputs),
        writes=_buffers(types, piece.graph.outputs),
        factor_bytes=_factor_bytes(piece) if is_int32_product else 0,
        reason=str(error),
        engine=engine,
    )
    return Lowered(kernel)


def _buffers(types: Mapping[str, ir.TensorType], names: Iterable[str]) -> tuple[Buffer, ...]:
    """Return buffers in global memory for the tensors that are not empty."""
    return tuple(
        Buffer(name, "GM", types[name].dtype, math.prod(types[name].stored_shape))
        for name in names
        if types[name].elements
    )


def _factor_bytes(piece: Piece) -> int:
    """Return the bytes of both factors of all multiplications of a product or convolution."""
    node = piece.graph.nodes[0]
    x, weight = (piece.type(name) for name in node.inputs[:2])
    # multiplications per result: Ci * Kh * Kw of a convolution, K of a product
    depth = math.prod(weight.shape[1:])
    if node.op in PRODUCTS:
        depth = x.shape[-2 if node.attr("trans_a", False) else -1]
    pair_bytes = DTYPE_BYTES[x.dtype] + DTYPE_BYTES[weight.dtype]
    return piece.output.elements * depth * pair_bytes


def time_cpu(kernel: CpuKernel, chip: Chip, memory: DeviceMemory | None = None) -> CpuTimeline:
    """Return the time of an operator on the AI CPU; with `memory` its tensors pass through L2."""
    device_memory = memory or DeviceMemory.of(chip)
    addresses = device_memory.addresses(kernel.tensors)
    accesses = [Access(b.name, addresses[b.name], b.size_bytes) for b in kernel.reads]
    accesses += [
        Access(b.name, addresses[b.name], b.size_bytes, is_write=True) for b in kernel.writes
    ]
    outcome = device_memory.l2.touch(accesses)
    read_bytes = sum(b.size_bytes for b in kernel.reads)
    written_bytes = sum(b.size_bytes for b in kernel.writes)
    hit_bytes = sum(b.size_bytes * outcome.hits.get(b.name, 0.0) for b in kernel.reads)
    # hits stay inside the chip; dirty lines that the tensors evict go to memory
    memory_bytes = read_bytes - round(hit_bytes) + outcome.write_back_bytes
    return CpuTimeline(
        kernel.name,
        chip,
        (),
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        factor_bytes=kernel.factor_bytes,
        memory_bytes=memory_bytes,
        l2_hit_rate=hit_bytes / read_bytes if read_bytes else 0.0,
        engine=kernel.engine,
    )


# -- tasks in order --------------------------------------------------------------------------------
CACHE_SIZE = 4096
"""Kernels and times that are cached: more than a large network has."""


@dataclass(frozen=True, slots=True)
class Task:
    """One kernel of a network, or a view; a view has no kernel, it gives existing bytes a new name.

    An operator on the AI CPU has a `CpuKernel`.
    """

    name: str
    op: str
    nodes: tuple[str, ...]
    piece: Piece
    lowered: Lowered | None

    def value(self, name: str) -> str:
        """Return the network's name of a kernel's tensor; one inside the kernel gets a prefix."""
        return self.piece.names.get(name.partition(".")[0], f"{self.name}/{name}")

    @property
    def reads(self) -> tuple[str, ...]:
        """Names, in the network, of the tensors that the task reads."""
        return tuple(self.piece.names[n] for n in self.piece.graph.inputs)

    @property
    def writes(self) -> tuple[str, ...]:
        """Names, in the network, of the tensors that the task writes."""
        return tuple(self.piece.names[n] for n in self.piece.graph.outputs)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A graph with layouts, and the tasks that compute it on a chip.

    - scopes: (first, stop): tasks first .. stop-1 are one super kernel, with one launch and
      barriers between tasks; an operator on the AI CPU ends the launch
    - prefetch: load weights into L2, if that is a cache, before their kernel runs
    - spilled: tensors that are never kept in a buffer
    - bare: the compiled network holds no values of constants, only their packed forms
    - hints: tell the cache when a tensor is read for the last time
    """

    graph: ir.Graph
    chip: Chip
    tasks: tuple[Task, ...]
    scopes: tuple[tuple[int, int], ...] = ()
    prefetch: bool = False
    spilled: frozenset[str] = frozenset()
    bare: bool = False
    hints: bool = True


def compile_tasks(
    graph: ir.Graph, chip: Chip, groups: Sequence[Sequence[ir.Node]], start: Start = "queued"
) -> Compiled:
    """Return groups of nodes compiled, in order, to one task each; `start` is how kernels start.

    Raises `GraphError` naming the node.
    """
    return Compiled(graph, chip, tuple(_task(graph, chip, group, start) for group in groups))


def _task(graph: ir.Graph, chip: Chip, group: Sequence[ir.Node], start: Start) -> Task:
    """Return the task of a group: a view, a kernel, or a single operator on the AI CPU."""
    piece = lowering.piece_of(graph, group)
    lowered = None
    # a view needs no kernel
    if not (len(group) == 1 and group[0].name in aliases.view_nodes(graph)):
        try:
            lowered = lowered_once(piece, chip, start=start)
        except errors.AscendLabError as error:
            try:
                # no kernel for this operator: the AI CPU may compute it
                lowered = on_ai_cpu(piece, chip, error)
            except errors.AscendLabError:
                needed = f"{group[0].name}: {error.needed}"
                raise type(error)(needed, error.got, error.remedy) from error
    names = tuple(node.name for node in group)
    # moves that are part of a cube operator's kernel are not in the title
    by_cube = any(node.op in CUBE_OPS for node in group)
    title = "+".join(node.op for node in group if not (by_cube and node.op in ir.MOVES))
    return Task(names[-1], title, names, piece, lowered)


def with_choices(compiled: Compiled, choices: Mapping[str, Choice]) -> Compiled:
    """Return the network with a tuner's kernels for some pieces, given by `Piece.key`."""
    chip = compiled.chip
    tasks = tuple(
        replace(task, lowered=lowered_once(task.piece, chip, choices[task.piece.key]))
        if task.lowered is not None and task.piece.key in choices
        else task
        for task in compiled.tasks
    )
    return replace(compiled, tasks=tasks)


# -- cached kernels and times ---------------------------------------------------------------------
def lowered_once(
    piece: Piece, chip: Chip, choice: Choice | None = None, start: Start = "queued"
) -> Lowered:
    """Return the kernel of a piece; an equal piece is lowered for a chip only once."""
    return _lowered(piece, chip, choice, _dependencies(piece), _priced_start(piece, chip, start))


def cycles_started(piece: Piece, chip: Chip, start: Start, *, warm: bool = False) -> int:
    """Return the cycles of a piece's kernel plus those of its start; the kernel's are cached.

    L2 is empty; if `warm` it holds the tensors that other kernels have written, except those larger
    than half of it.
    """
    price = _priced_start(piece, chip, start)
    cycles, mix_cycles = _cycles(piece, chip, _dependencies(piece), warm, price)
    # inside a super kernel a mix kernel starts with a barrier over "both" types of cores
    barrier: Start = "both" if start == "across" and mix_cycles else start
    return cycles + start_cycles(chip, barrier, mix_cycles)


def _priced_start(piece: Piece, chip: Chip, start: Start) -> Start:
    """Return the start that is assumed when a kernel is chosen; it matters to mix kernels only.

    A mix kernel (on cube and vector cores) inside a super kernel starts with a barrier "across"
    both types of cores. All other kernels are cached with one start, which saves entries.
    """
    first_node, *followers = piece.graph.nodes
    may_mix = first_node.has("product") or (bool(followers) and first_node.has("convolution"))
    launched = start in ("cold", "queued") or chip.combined
    return "across" if may_mix and not launched else "queued"


Dependencies = tuple[tuple[Operator, ...], tuple[ModuleType, ...]]


def _dependencies(piece: Piece) -> Dependencies:
    """Return the operators and special kernels that a kernel depends on, as part of a cache key.

    So a node is lowered again after its operator has been registered again.
    """
    return tuple(ir.operator_of(node.op) for node in piece.graph.nodes), plugins()


@lru_cache(CACHE_SIZE)
def _lowered(
    piece: Piece,
    chip: Chip,
    choice: Choice | None,
    dependencies: Dependencies,
    start: Start,
) -> Lowered:
    """Return the kernel of a piece; raise `GraphError` if it stores a tensor in another layout."""

    def cached(other_piece: Piece) -> Lowered:
        return _lowered(other_piece, chip, choice, dependencies, start)

    lowered = lower(piece, chip, choice, start, cached)
    # constants may be packed for the kernel; activations must have their type's layout
    activations = {*piece.graph.inputs, *piece.graph.outputs} - piece.constants
    for buffer in lowered.kernel.tensors:
        if buffer.name in activations:
            stored = math.prod(piece.type(buffer.name).stored_shape)
            if stored != buffer.elements:
                written = f"{buffer.elements} elements of {piece.names[buffer.name]}"
                raise errors.GraphError(written, str(stored), "lower it for the tensor's layout")
    return lowered


@lru_cache(CACHE_SIZE)
def _cycles(
    piece: Piece, chip: Chip, dependencies: Dependencies, warm: bool, start: Start
) -> tuple[int, int]:
    """Return a kernel's cycles, and those that a launch on cube and vector cores adds."""
    lowered = _lowered(piece, chip, None, dependencies, start)
    memory = None
    if warm and lowered.near is not None:
        return lowered.near
    if warm:
        memory = near_memory(lowered.kernel, piece, chip)
    timeline = sim.simulate_kernel(lowered.kernel, chip, memory)
    return timeline.cycles, timeline.mix_cycles
