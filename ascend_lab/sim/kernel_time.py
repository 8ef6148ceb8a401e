"""How long a kernel of several phases takes: the timelines of its phases, one after another.

    cycles = sum of the phases' cycles + (phases - 1) * barrier over all cores

The host launches once. Without more, every phase starts with nothing of its input in L2: what one
phase leaves there for the next is not counted, so a kernel whose phases pass small tensors on is
timed too slow. Given a `DeviceMemory`, phases find what earlier ones left, those of kernels timed
before on the same memory too: a network is a loop over its kernels.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ascend_lab.chip import Chip
from ascend_lab.isa.kernel import Kernel, as_kernel
from ascend_lab.isa.program import Launch, Program
from ascend_lab.sim.l2 import DeviceMemory, accesses_of
from ascend_lab.sim.simulate import Engine, simulate, time_launch
from ascend_lab.sim.timeline import Timeline
from ascend_lab.sim.traffic import analyse

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class KernelTimeline:
    """Time of a kernel: `phases` holds one timeline per phase; the sums stand here.

    Pipes of the cube phase and of the vector phase of one kernel are counted together by name.
    """

    name: str
    chip: Chip
    phases: tuple[Timeline, ...]

    @property
    def sync_cycles(self) -> int:
        """Cycles of the barriers over all cores between the phases."""
        return (len(self.phases) - 1) * self.chip.all_cores_cycles

    @property
    def cycles(self) -> int:
        """Cycles of all phases and of the barriers between them, without the launch."""
        return sum(phase.cycles for phase in self.phases) + self.sync_cycles

    @property
    def launch_cycles(self) -> int:
        """Host overhead, paid once, in cycles."""
        return self.phases[0].launch_cycles

    @property
    def total_cycles(self) -> int:
        """Kernel plus launch overhead."""
        return self.cycles + self.launch_cycles

    @property
    def time_s(self) -> float:
        """Seconds from launch to end: total_cycles / clock."""
        return self.total_cycles / self.chip.clock_hz

    @property
    def core_count(self) -> int:
        """Cores of the phase that uses most of them."""
        return max(phase.core_count for phase in self.phases)

    @property
    def busy_cycles(self) -> Mapping[str, int]:
        """Cycles each pipe works, on the slowest core of every phase."""
        return _total([phase.busy_cycles for phase in self.phases])

    @property
    def busy(self) -> dict[str, float]:
        """Share of the total time each pipe spends working."""
        return {p: c / self.total_cycles for p, c in self.busy_cycles.items()}

    @property
    def path_bytes(self) -> Mapping[tuple[str, str], int]:
        """Bytes moved per (src, dst) by all cores."""
        return _total([phase.path_bytes for phase in self.phases])

    @property
    def memory_bytes(self) -> int:
        """Bytes read from and written to device memory."""
        return sum(phase.memory_bytes for phase in self.phases)

    @property
    def l2_hit_rate(self) -> float:
        """Share of the bytes read from GM that L2 serves: re-read in a phase, or left there."""
        read = sum(n for (src, _), n in self.path_bytes.items() if src == "GM")
        return sum(phase.l2_bytes for phase in self.phases) / read if read else 0.0

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the cube; zeros that pad fractals count."""
        return sum(phase.macs for phase in self.phases)

    @property
    def ops_per_s(self) -> float:
        """Cube operations per second, 1 MAC = 2 ops."""
        return 2.0 * self.macs / self.time_s

    @property
    def energy_j(self) -> float:
        """Energy of moving and computing, all cores (assumed figures; leakage left out)."""
        return sum(phase.energy_j for phase in self.phases)

    @property
    def bound_by(self) -> str:
        """What limits most of the cycles: "launch", "sync", "memory", or a pipe."""
        if self.launch_cycles > self.cycles:
            return "launch"
        limits = _total([{phase.limit: phase.cycles} for phase in self.phases])
        limits["sync"] = self.sync_cycles
        return max(limits, key=lambda name: limits[name])

    def summary(self) -> dict[str, object]:
        """Return the numbers as plain data, ready for JSON."""
        return {
            "name": self.name,
            "chip": self.chip.name,
            "cycles": self.cycles,
            "launch_cycles": self.launch_cycles,
            "time_s": self.time_s,
            "cores": self.core_count,
            "busy": self.busy,
            "bound_by": self.bound_by,
            "bytes": {f"{a}->{b}": n for (a, b), n in self.path_bytes.items()},
            "memory_bytes": self.memory_bytes,
            "energy_j": self.energy_j,
            "phases": [
                {"name": p.name, "cycles": p.cycles, "cores": p.core_count, "bound_by": p.limit}
                for p in self.phases
            ],
        }

    def __repr__(self) -> str:
        """Return one line."""
        shares = ", ".join(f"{p} {s:.1%}" for p, s in self.busy.items())
        return (
            f"KernelTimeline({self.name}: {len(self.phases)} phases, {self.cycles} cycles + "
            f"{self.launch_cycles} launch = {self.time_s * 1e6:.2f} us, "
            f"busy {shares}, bound by {self.bound_by})"
        )


def _total(parts: Sequence[Mapping[Key, int]]) -> dict[Key, int]:
    out: dict[Key, int] = {}
    for part in parts:
        for key, value in part.items():
            out[key] = out.get(key, 0) + value
    return out


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
