"""How long a kernel of several phases takes: the timelines of its phases, one after another.

The host launches once. Without more, every phase starts with nothing of its input in L2: what one
phase leaves there for the next is not counted, so a kernel whose phases pass small tensors on is
timed too slow. Given a `DeviceMemory`, phases find what earlier ones left, those of kernels timed
before on the same memory too: a network is a loop over its kernels.
"""

from __future__ import annotations

from collections.abc import Mapping

from ascend_lab.chip import Chip
from ascend_lab.isa.kernel import Kernel, as_kernel
from ascend_lab.isa.program import Launch, Program
from ascend_lab.sim.l2 import DeviceMemory, accesses_of
from ascend_lab.sim.simulate import Engine, simulate, time_launch
from ascend_lab.sim.timeline import KernelTimeline, Timeline
from ascend_lab.sim.traffic import analyse


def simulate_kernel(
    kernel: Program | Launch | Kernel,
    chip: Chip,
    memory: DeviceMemory | None = None,
    *,
    engine: Engine = "fast",
) -> KernelTimeline:
    """Time a kernel phase by phase; raises what `simulate` raises for one of its phases.

    With `memory`, L2 is as earlier kernels left it, keeps what this one leaves, and writes to
    memory what it evicts. Raises `SimulationError` if a tensor has no room at its address.
    """
    whole = as_kernel(kernel)
    if memory is None:
        phases = tuple(simulate(phase, chip, engine=engine) for phase in whole.phases)
        return KernelTimeline(whole.name, chip, phases)
    addresses = memory.addresses(whole.tensors)
    timed = (_on_memory(phase, chip, memory, addresses, engine) for phase in whole.phases)
    return KernelTimeline(whole.name, chip, tuple(timed))


def _on_memory(
    launch: Launch,
    chip: Chip,
    memory: DeviceMemory,
    addresses: Mapping[str, int],
    engine: Engine,
) -> Timeline:
    """Time one phase on what L2 holds, and leave there what the phase touched."""
    traffic = analyse(launch, chip)
    outcome = memory.l2.touch(accesses_of(launch, traffic, addresses))
    warmed = traffic.warmed(outcome.hits, outcome.write_back_bytes)
    return time_launch(launch, chip, warmed, engine)
