"""Times measured kernels that are handwritten programs here, and bounds them by their bytes.

Tensors with the same name are one tensor; a kernel reads from L2 what earlier kernels left there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ascend_lab.compare.estimates import Estimate, at_peak, of_tasks
from ascend_lab.compare.rows import Work
from ascend_lab.machine.chip import Chip

if TYPE_CHECKING:
    from ascend_lab.machine.isa import Kernel


@dataclass(frozen=True, slots=True)
class Programs:
    """A function that writes the kernels of a row for a chip, and the row's inputs and outputs.

    Tensors of `inputs` hold numbers beforehand; those of `outputs` are read afterwards.
    """

    write: Callable[[Chip], Sequence[Kernel]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def programs(work: Work, row_programs: Programs, chip: Chip) -> Estimate:
    """Time kernels that run one after another on one L2, each with a launch of its own.

    No schedule is quicker than moving the bytes of the inputs, and those of outputs that exceed L2,
    at the peak rate of memory:

        bound = (read + max(0, written - L2)) / peak
    """
    from ascend_lab.compiler.bound import Bound
    from ascend_lab.compiler.network import NetworkTimeline, OperatorTime
    from ascend_lab.machine.sim import DeviceMemory, simulate_kernel

    kernels = row_programs.write(chip)
    tensors = {tensor.name: tensor for kernel in kernels for tensor in kernel.tensors}
    memory = DeviceMemory.of(chip)
    # one place for each name: what kernel 1 writes as "y_rows" kernel 2 reads there, maybe from L2
    addresses = memory.addresses(tuple(tensors.values()))
    operators: list[OperatorTime] = []
    for kernel in kernels:
        address_of = {t.name: (addresses[t.name], t.size_bytes) for t in kernel.tensors}
        line = simulate_kernel(kernel, chip, memory.at(address_of))
        # the first kernel is started by the host, the others wait in the device's queue
        line = replace(line, start="queued" if operators else "cold")
        operators.append(OperatorTime(kernel.name, kernel.name, line))
    times = NetworkTimeline(work.operator, chip, tuple(operators), 0)
    read = sum(tensors[name].size_bytes for name in row_programs.inputs)
    written = sum(tensors[name].size_bytes for name in row_programs.outputs)
    # 40 MB read, 60 MB written, an L2 of 48 MB: 40 + 12 = 52 MB cross the interface
    crossing = read + max(0, written - chip.l2.size_bytes)
    peak = at_peak(chip).device_memory.rate_bytes_per_s
    bound = Bound(memory=crossing / peak, launch=chip.launch_overhead_s)
    marks = (f"kernels of ours: {len(kernels)}, cut as the source's",)
    return of_tasks(work, chip, times, bound, marks)
