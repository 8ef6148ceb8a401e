"""How many warps live on a streaming multiprocessor at once, and what that hides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ascend_lab.errors import MachineError
from ascend_lab.machines.memory import Port


@dataclass(frozen=True, slots=True)
class Simt:
    """A streaming multiprocessor: warps of 32 threads, each with its own program counter.

    `lanes / warp_lanes` warp instructions issue per cycle. `max_warps`, `registers` (32-bit) and
    `shared_bytes` limit how many blocks of `threads_per_block` threads are resident.
    `thread_instructions` is what each thread spends on finding its element number and leaving.
    `interleaved` picks the textbook's slow order of the shared-memory reduction.
    """

    name: str = "SIMT"
    warp_lanes: int = 32
    lanes: int = 64
    max_warps: int = 64
    threads_per_block: int = 256
    registers: int = 65536
    registers_per_thread: int = 32
    shared_bytes: int = 96 * 1024
    arith_cycles: int = 4
    shared_cycles: int = 20
    thread_instructions: int = 3
    interleaved: bool = False
    port: Port = field(default_factory=Port)

    def __post_init__(self) -> None:
        """Refuse a block that is not a whole number of warps."""
        if self.threads_per_block % self.warp_lanes or not 32 <= self.threads_per_block <= 1024:
            raise MachineError(
                f"threads_per_block must be a multiple of {self.warp_lanes} from 32 to 1024",
                str(self.threads_per_block),
                "round it up",
            )

    def peak_ops_per_cycle(self, dtype: str = "float32") -> float:
        """Return two operations per lane and cycle."""
        return 2.0 * self.lanes

    @property
    def warps_per_cycle(self) -> float:
        """Warp instructions issued per cycle at best."""
        return self.lanes / self.warp_lanes


def occupancy(machine: Simt, shared_bytes_per_block: int = 0) -> Mapping[str, int]:
    """Return resident warps under each limit, and under all: keys warps, registers, shared, all.

    Only whole blocks become resident. Raises `MachineError` when not even one block fits.
    """
    warps = machine.threads_per_block // machine.warp_lanes
    blocks = {"warps": machine.max_warps // warps}
    per_block = machine.registers_per_thread * machine.threads_per_block
    blocks["registers"] = machine.registers // per_block
    if shared_bytes_per_block:
        blocks["shared"] = machine.shared_bytes // shared_bytes_per_block
    for limit, count in blocks.items():
        if count < 1:
            raise MachineError(
                f"one block of {machine.threads_per_block} threads must fit on {machine.name}",
                f"no room in {limit}",
                "use fewer threads, registers or shared bytes per block",
            )
    result = {limit: count * warps for limit, count in blocks.items()}
    result["all"] = min(result.values())
    return result


@dataclass(frozen=True, slots=True)
class WarpLoad:
    """What the warps of one launch ask for: totals, and the largest of a single warp.

    `slots` are issue slots and `stalls` the cycles a warp would wait if it ran alone.
    """

    warps: int
    slots: int
    stalls: int
    max_slots: int
    max_stalls: int
    bytes_moved: int


def warp_parts(machine: Simt, load: WarpLoad, resident: int) -> tuple[float, float, float, float]:
    """Return compute, move, wait and cycles of one launch with `resident` warps at a time.

    Warps hide each other's stalls, so three limits hold at once: the issue slots, the bytes, and
    the life of a warp, (slots + stalls) * warps / resident. Each is paid with one stall on top,
    because the first warp has no one to hide behind.
    """
    together = min(resident, load.warps)
    compute = max(load.slots / min(machine.warps_per_cycle, together), load.max_slots)
    move = load.bytes_moved / machine.port.rate_bytes_per_cycle
    wait = max(load.stalls / together, load.max_stalls)
    life = max((load.slots + load.stalls) / together, load.max_slots + load.max_stalls)
    cycles = max(compute + load.max_stalls, move + load.max_stalls, life)
    return compute, move, wait, cycles
