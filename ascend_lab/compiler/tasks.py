"""A graph as kernels in order, lowered once per kind of piece; `graph.values` runs them on arrays.

Operators without a kernel are computed by the processor cores beside the NPU's, the AI CPU:

    time = launch + (bytes read + bytes written) / rate

Both numbers stand in the chip file. A product or convolution of whole numbers that no cube takes
counts as reading both factors of every multiplication; of floating point none is placed here. The
AI CPU reads and writes through L2 as kernels do, but is not faster for what it finds there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

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

NAME = "AI CPU"
LOADER = "AIPP"
CUBE = (*CONVOLUTIONS, *PRODUCTS, "conv_transpose2d", "conv2d_grad_weight", "flash_attention")
"""Operators of many multiplications a byte."""


@dataclass(frozen=True, slots=True)
class CpuKernel(isa.Kernel):
    """An operator on the AI CPU: no program, only the tensors it reads and writes, and why."""

    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    factor_bytes: int
    reason: str
    engine: str = NAME

    def __post_init__(self) -> None:
        """Have nothing to check: there are no phases."""

    @property
    def tensors(self) -> tuple[Buffer, ...]:
        """GM tensors, each once."""
        return (*self.reads, *self.writes)


@dataclass(frozen=True, slots=True)
class CpuTimeline(sim.KernelTimeline):
    """Time of an operator on the AI CPU, in cycles of the NPU's clock."""

    read_bytes: int
    written_bytes: int
    factor_bytes: int
    memory_bytes: int = 0
    l2_hit_rate: float = 0.0
    engine: str = NAME
    core_count: int = 1
    seconds: tuple[float, float] | None = field(default=None, kw_only=True)
    """Of a launch and of the work itself, where the chip file does not say them: on the host."""

    @property
    def cycles(self) -> int:
        """Cycles of moving the bytes."""
        if self.seconds is not None:
            return math.ceil(self.seconds[1] * self.chip.clock_hz)
        moved = self.read_bytes
        rate = self.chip.device_memory.rate_bytes_per_s
        if self.engine == NAME:
            moved = max(self.read_bytes, self.factor_bytes) + self.written_bytes
            rate = self.chip.ai_cpu_rate_bytes_per_s
        return math.ceil(moved / rate * self.chip.clock_hz)

    @property
    def launch_cycles(self) -> int:
        """Cycles until the AI CPU starts; the core's own loader has nothing to start."""
        launch_s = self.chip.ai_cpu_overhead_s * (self.engine == NAME)
        return round((self.seconds[0] if self.seconds else launch_s) * self.chip.clock_hz)

    @property
    def busy_cycles(self) -> Mapping[str, int]:
        """Cycles it works, under its name as pipes have theirs."""
        return {self.engine: self.cycles}

    @property
    def path_bytes(self) -> Mapping[tuple[str, str], int]:
        """Bytes moved per (src, dst)."""
        return {("GM", self.engine): self.read_bytes, (self.engine, "GM"): self.written_bytes}

    @property
    def energy_j(self) -> float:
        """Energy of moving the bytes of device memory; computing is left out."""
        return self.memory_bytes * self.chip.device_memory.energy_pj_per_byte * 1e-12

    @property
    def bound_by(self) -> str:
        """Return "launch" or the AI CPU."""
        return "launch" if self.launch_cycles > self.cycles else self.engine


def on_ai_cpu(piece: Piece, chip: Chip, why: errors.AscendLabError) -> Lowered:
    """Return a single operator that no kernel computes, on the AI CPU.

    Raises `why` for floating-point work of the cube, a format the chip lacks, a fault, and on a
    chip whose file knows no AI CPU.
    """
    node = piece.graph.nodes[0]
    types = piece.graph.types
    engine = LOADER if node.has("frames") else NAME
    foreign = any(kind.dtype == "bf16" for kind in types.values()) and "bf16" not in chip.cube
    fault = isinstance(why, errors.GraphError) or len(piece.graph.nodes) > 1
    whole = node.op in (*CONVOLUTIONS, *PRODUCTS) and types[node.inputs[0]].dtype == "int32"
    missing = engine == NAME and not chip.ai_cpu_rate_bytes_per_s
    if fault or foreign or missing or (node.op in CUBE and not whole):
        raise why
    reads, writes = (
        tuple(
            Buffer(name, "GM", types[name].dtype, math.prod(types[name].stored_shape))
            for name in names
            if types[name].elements
        )
        for names in (piece.graph.inputs, piece.graph.outputs)
    )
    factors = 0
    if whole:  # both factors of all multiplications
        x, weight = (types[name] for name in node.inputs[:2])
        depth = math.prod(weight.shape[1:])
        if node.op in PRODUCTS:
            depth = x.shape[-2 if node.attr("trans_a", False) else -1]
        each = DTYPE_BYTES[x.dtype] + DTYPE_BYTES[weight.dtype]
        factors = piece.output.elements * depth * each
    title = f"{node.op} on the {engine}"
    return Lowered(CpuKernel(title, (), reads, writes, factors, str(why), engine))


def time_cpu(kernel: CpuKernel, chip: Chip, memory: DeviceMemory | None = None) -> CpuTimeline:
    """Return the time of an operator on the AI CPU; with `memory` its tensors pass through L2."""
    memory = memory or DeviceMemory.of(chip)
    places = memory.addresses(kernel.tensors)
    accesses = [Access(b.name, places[b.name], b.size_bytes) for b in kernel.reads]
    accesses += [Access(b.name, places[b.name], b.size_bytes, is_write=True) for b in kernel.writes]
    outcome = memory.l2.touch(accesses)
    read, written = (sum(b.size_bytes for b in side) for side in (kernel.reads, kernel.writes))
    hit = sum(b.size_bytes * outcome.hits.get(b.name, 0.0) for b in kernel.reads)
    from_memory = read - round(hit) + outcome.write_back_bytes
    share = hit / read if read else 0.0
    moved = (read, written, kernel.factor_bytes, from_memory)
    return CpuTimeline(kernel.name, chip, (), *moved, share, kernel.engine)


# -- tasks in order --------------------------------------------------------------------------------
REMEMBERED = 4096
"""Kernels and times remembered: more than a large network has."""


@dataclass(frozen=True, slots=True)
class Task:
    """One kernel of a network, or a view, whose kernel is None: new names for the same bytes.

    An operator without a kernel runs on the AI CPU: its kernel is a `CpuKernel`.
    """

    name: str
    op: str
    nodes: tuple[str, ...]
    piece: Piece
    lowered: Lowered | None

    def value(self, name: str) -> str:
        """Return what a tensor of the kernel is called in the network; itself if it is its own."""
        return self.piece.names.get(name.partition(".")[0], f"{self.name}/{name}")

    @property
    def reads(self) -> tuple[str, ...]:
        """Network names read."""
        return tuple(self.piece.names[n] for n in self.piece.graph.inputs)

    @property
    def writes(self) -> tuple[str, ...]:
        """Network names written."""
        return tuple(self.piece.names[n] for n in self.piece.graph.outputs)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A graph with layouts, and the tasks that compute it on a chip.

    Tasks first .. stop-1 of a scope are one super kernel: one launch, barriers between; an operator
    on the AI CPU ends the launch. `prefetch`: weights come into a cache before their kernel runs.
    `spilled` tensors are never put into a buffer. `bare`: constants lie only as kernels read them.
    Without `hints` a cache is not told what is read for the last time.
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
    """Compile groups of nodes, in order, to one task each, kernels to be started so.

    Raises `GraphError` naming the node.
    """
    return Compiled(graph, chip, tuple(_task(graph, chip, group, start) for group in groups))


def _task(graph: ir.Graph, chip: Chip, group: Sequence[ir.Node], start: Start) -> Task:
    piece = lowering.piece_of(graph, group)
    lowered = None
    if not (len(group) == 1 and group[0].name in aliases.view_nodes(graph)):
        try:
            lowered = lowered_once(piece, chip, start=start)
        except errors.AscendLabError as error:
            try:
                lowered = on_ai_cpu(piece, chip, error)
            except errors.AscendLabError:
                needed = f"{group[0].name}: {error.needed}"
                raise type(error)(needed, error.got, error.remedy) from error
    names = tuple(node.name for node in group)
    attention = lowering.attention_in(group)
    title = attention.op if attention else "+".join(node.op for node in group)
    return Task(names[-1], title, names, piece, lowered)


def with_choices(compiled: Compiled, choices: Mapping[str, Choice]) -> Compiled:
    """Return the network with the kernels of some pieces, by `Piece.key`, as a tuner chose."""
    chip = compiled.chip
    tasks = tuple(
        replace(task, lowered=lowered_once(task.piece, chip, choices[task.piece.key]))
        if task.lowered is not None and task.piece.key in choices
        else task
        for task in compiled.tasks
    )
    return replace(compiled, tasks=tasks)


# -- remembered -----------------------------------------------------------------------------------
def lowered_once(
    piece: Piece, chip: Chip, choice: Choice | None = None, start: Start = "queued"
) -> Lowered:
    """Return the kernel of a piece, from memory if an equal one was lowered for the chip."""
    return _lowered(piece, chip, choice, _operators(piece), _price(piece, chip, start))


def cycles_started(piece: Piece, chip: Chip, start: Start, *, warm: bool = False) -> int:
    """Return the cycles of a piece's kernel and of what starts it; the former are remembered.

    L2 is cold, or holds the tensors that other kernels have written, unless one fills half of it.
    """
    price = _price(piece, chip, start)
    cycles, mix_cycles = _cycles(piece, chip, _operators(piece), warm, price)
    start = "both" if start == "across" and mix_cycles else start
    return cycles + start_cycles(chip, start, mix_cycles)


def _price(piece: Piece, chip: Chip, start: Start) -> Start:
    """Return the start at whose price a kernel is chosen: all are alike but for mix kernels."""
    head, *rest = piece.graph.nodes
    mixes = head.has("product") or (bool(rest) and head.has("convolution"))
    launched = start in ("cold", "queued") or chip.combined
    return "across" if mixes and not launched else "queued"


def _operators(piece: Piece) -> tuple[Operator, ...]:
    """Return what the nodes name: an operator that was registered anew is lowered anew."""
    return tuple(ir.operator_of(node.op) for node in piece.graph.nodes)


@lru_cache(REMEMBERED)
def _lowered(
    piece: Piece,
    chip: Chip,
    choice: Choice | None,
    operators: tuple[Operator, ...],
    start: Start,
) -> Lowered:
    def known(other: Piece) -> Lowered:
        return _lowered(other, chip, choice, operators, start)

    found = lower(piece, chip, choice, start, known)
    own = {*piece.graph.inputs, *piece.graph.outputs} - piece.constants
    for buffer in found.kernel.tensors:
        if buffer.name in own:
            stored = math.prod(piece.type(buffer.name).stored_shape)
            if stored != buffer.elements:
                what = f"{buffer.elements} elements of {piece.names[buffer.name]}"
                raise errors.GraphError(what, str(stored), "lower it for the tensor's layout")
    return found


@lru_cache(REMEMBERED)
def _cycles(
    piece: Piece, chip: Chip, operators: tuple[Operator, ...], warm: bool, start: Start
) -> tuple[int, int]:
    lowered = _lowered(piece, chip, None, operators, start)
    memory = None
    if warm and lowered.near is not None:
        return lowered.near
    if warm:
        memory = near_memory(lowered.kernel, piece, chip)
    timeline = sim.simulate_kernel(lowered.kernel, chip, memory)
    return timeline.cycles, timeline.mix_cycles
