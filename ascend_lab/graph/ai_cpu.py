"""Operators without a kernel: the processor cores beside the NPU's compute them, the AI CPU.

    time = launch + (bytes read + bytes written) / rate

Both numbers stand in the chip file. A product or convolution of whole numbers that no cube takes
counts as reading both factors of every multiplication; of floating point none is placed here. The
AI CPU reads and writes through L2 as kernels do, but is not faster for what it finds there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import AscendLabError, GraphError
from ascend_lab.graph.evaluate import compute
from ascend_lab.graph.ir import Graph, Node, Values
from ascend_lab.graph.lower import CONVOLUTIONS, PRODUCTS, Lowered, Piece, packed
from ascend_lab.isa import Kernel
from ascend_lab.isa.memory import Buffer
from ascend_lab.layout import unpack
from ascend_lab.sim import KernelTimeline
from ascend_lab.sim.l2 import Access, DeviceMemory

NAME, LOADER = "AI CPU", "AIPP"
CUBE = (*CONVOLUTIONS, *PRODUCTS, "conv_transpose2d", "conv2d_grad_weight", "flash_attention")
"""Operators of many multiplications a byte."""


@dataclass(frozen=True, slots=True)
class CpuKernel(Kernel):
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
class CpuTimeline(KernelTimeline):
    """Time of an operator on the AI CPU, in cycles of the NPU's clock."""

    read_bytes: int
    written_bytes: int
    factor_bytes: int
    missed_bytes: int
    hit_share: float
    engine: str = NAME
    seconds: tuple[float, float] | None = None
    """Of a launch and of the work itself, where the chip file does not say them: on the host."""

    @property
    def cycles(self) -> int:
        """Cycles of moving the bytes."""
        if self.seconds is not None:
            return math.ceil(self.seconds[1] * self.chip.clock_hz)
        moved, rate = self.read_bytes, self.chip.device_memory.rate_bytes_per_s
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
    def core_count(self) -> int:
        """One core of the AI CPU."""
        return 1

    @property
    def busy_cycles(self) -> Mapping[str, int]:
        """Cycles it works, under its name as pipes have theirs."""
        return {self.engine: self.cycles}

    @property
    def path_bytes(self) -> Mapping[tuple[str, str], int]:
        """Bytes moved per (src, dst)."""
        return {("GM", self.engine): self.read_bytes, (self.engine, "GM"): self.written_bytes}

    @property
    def memory_bytes(self) -> int:
        """Bytes read from and written to device memory."""
        return self.missed_bytes

    @property
    def l2_hit_rate(self) -> float:
        """Share of the bytes read that L2 holds."""
        return self.hit_share

    @property
    def energy_j(self) -> float:
        """Energy of moving the bytes of device memory; computing is left out."""
        return self.memory_bytes * self.chip.device_memory.energy_pj_per_byte * 1e-12

    @property
    def bound_by(self) -> str:
        """Return "launch" or the AI CPU."""
        return "launch" if self.launch_cycles > self.cycles else self.engine


def on_ai_cpu(piece: Piece, chip: Chip, why: AscendLabError) -> Lowered:
    """Return a single operator that no kernel computes, on the AI CPU.

    Raises `why` for floating-point work of the cube, a format the chip lacks, a fault, and on a
    chip whose file knows no AI CPU.
    """
    node, types = piece.graph.nodes[0], piece.graph.types
    engine = LOADER if node.has("frames") else NAME
    foreign = any(kind.dtype == "bf16" for kind in types.values()) and "bf16" not in chip.cube
    fault = isinstance(why, GraphError) or len(piece.graph.nodes) > 1
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
    factors = kernel.factor_bytes
    moved = (read, written, factors, from_memory)
    return CpuTimeline(kernel.name, chip, (), *moved, share, kernel.engine)


def run_cpu(graph: Graph, node: Node, stored: Sequence[Values]) -> dict[str, Values]:
    """Return what a node writes, from and to flat arrays as they lie in memory."""
    arrays = [
        (flat if kind.layout == "ND" else unpack(kind.map, flat)).reshape(kind.shape)
        for kind, flat in zip(graph.in_types(node), stored, strict=True)
    ]
    found = compute(graph, node, arrays)
    return {
        n: packed(graph.types[n], np.asarray(v)) for n, v in zip(node.outputs, found, strict=True)
    }
