"""Kernels as plain data for a file, and back: programs as text, all else as numbers and names."""

from collections.abc import Mapping
from typing import Any

from ascend_lab.compiler.tasks import CpuKernel
from ascend_lab.machine.isa import Buffer, Kernel, Launch, Part, parse_program


def kernel_data(kernel: Kernel) -> dict[str, Any]:
    """Return a kernel of a core, or of the AI CPU, as data for JSON."""
    if isinstance(kernel, CpuKernel):
        return {
            "name": kernel.name,
            "reads": [_buffer_data(buffer) for buffer in kernel.reads],
            "writes": [_buffer_data(buffer) for buffer in kernel.writes],
            "rest": [kernel.factor_bytes, kernel.reason, kernel.engine],
        }
    # a part is a program and, for each core that runs it, the values of its parameters
    phases = [
        [
            launch.name,
            [[str(core_part.program), core_part.bindings] for core_part in launch.parts],
            launch.mix,
        ]
        for launch in kernel.phases
    ]
    return {"name": kernel.name, "phases": phases}


def _buffer_data(buffer: Buffer) -> list[Any]:
    # without its memory: what the AI CPU reads and writes lies in global memory
    return [buffer.name, buffer.dtype, buffer.elements]


def kernel_of(data: Mapping[str, Any]) -> Kernel:
    """Return the kernel that `kernel_data` wrote."""
    if "phases" not in data:
        reads, writes = (
            tuple(Buffer(name, "GM", dtype, elements) for name, dtype, elements in data[side])
            for side in ("reads", "writes")
        )
        return CpuKernel(data["name"], (), reads, writes, *data["rest"])
    phases = []
    # "*mix": older files have phases of two entries, all of whose cores are of one kind
    for name, parts, *mix in data["phases"]:
        # JSON has lists only: bindings are tuples of (name, value) for each core
        core_parts = tuple(
            Part(parse_program(text), tuple(tuple(map(tuple, core)) for core in bindings))
            for text, bindings in parts
        )
        phases.append(Launch(name, core_parts, *mix))
    return Kernel(data["name"], tuple(phases))
