"""Kernels as plain data and back: programs in their text form, all else in numbers and names."""

from collections.abc import Mapping, Sequence
from typing import Any

from ascend_lab.graph.ai_cpu import CpuKernel
from ascend_lab.isa import Kernel
from ascend_lab.isa.memory import Buffer
from ascend_lab.isa.program import Launch, Part
from ascend_lab.isa.text import parse_program


def kernel_data(kernel: Kernel) -> dict[str, Any]:
    """Return a kernel, or an operator of another engine, as data for JSON."""
    if isinstance(kernel, CpuKernel):
        sides = (kernel.reads, kernel.writes)
        reads, writes = ([[b.name, b.dtype, b.elements] for b in side] for side in sides)
        return {"name": kernel.name, "reads": reads, "writes": writes,
                "rest": [kernel.factor_bytes, kernel.reason, kernel.engine]}  # fmt: skip
    phases = [[p.name, [[str(part.program), part.bindings] for part in p.parts], p.mix]
              for p in kernel.phases]  # fmt: skip
    return {"name": kernel.name, "phases": phases}


def kernel_of(data: Mapping[str, Any]) -> Kernel:
    """Return the kernel that `kernel_data` wrote."""
    if "phases" not in data:
        reads, writes = (tuple(map(_tensor, data[side])) for side in ("reads", "writes"))
        return CpuKernel(data["name"], (), reads, writes, *data["rest"])
    phases = tuple(Launch(name, tuple(_part(*part) for part in parts), *mix)
                   for name, parts, *mix in data["phases"])  # fmt: skip
    return Kernel(data["name"], phases)


def _tensor(data: Sequence[Any]) -> Buffer:
    name, dtype, elements = data
    return Buffer(name, "GM", dtype, elements)


def _part(text: str, bindings: Sequence[Sequence[Sequence[Any]]]) -> Part:
    cores = tuple(tuple((name, value) for name, value in core) for core in bindings)
    return Part(parse_program(text), cores)
