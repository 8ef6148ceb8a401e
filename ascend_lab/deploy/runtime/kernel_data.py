"""Converts kernels to the JSON data of an offline model, and back.

A program is stored as its text, such as "vadd ...", and everything else as numbers and names.
"""

from collections.abc import Mapping
from typing import Any

from ascend_lab.compiler.tasks import CpuKernel
from ascend_lab.machine.isa import Buffer, Kernel, Launch, Part, parse_program


def kernel_data(kernel: Kernel) -> dict[str, Any]:
    """Return a kernel of the AI cores, or of the AI CPU, as data for JSON."""
    if isinstance(kernel, CpuKernel):
        return {
            "name": kernel.name,
            "reads": [_buffer_data(buffer) for buffer in kernel.reads],
            "writes": [_buffer_data(buffer) for buffer in kernel.writes],
            "rest": [kernel.factor_bytes, kernel.reason, kernel.engine],
        }
    # A part is a program, with values of its parameters for each core that runs it.
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
    """Return a buffer as plain data."""
    # The memory is left out, as the AI CPU reads and writes global memory only.
    return [buffer.name, buffer.dtype, buffer.elements]


def kernel_of(data: Mapping[str, Any]) -> Kernel:
    """Return the kernel of data from `kernel_data`."""
    if "phases" not in data:
        reads, writes = (
            tuple(Buffer(name, "GM", dtype, elements) for name, dtype, elements in data[side])
            for side in ("reads", "writes")
        )
        return CpuKernel(data["name"], (), reads, writes, *data["rest"])
    phases = []
    # Older files have no third entry: all cores of a phase are of one kind.
    for name, parts, *mix_entries in data["phases"]:
        # Bindings are tuples of (name, value) for each core; JSON has turned them into lists.
        core_parts = tuple(
            Part(parse_program(text), tuple(tuple(map(tuple, core)) for core in bindings))
            for text, bindings in parts
        )
        phases.append(Launch(name, core_parts, *mix_entries))
    return Kernel(data["name"], tuple(phases))
