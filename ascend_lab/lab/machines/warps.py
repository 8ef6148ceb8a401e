"""How many warps live on a streaming multiprocessor at once, and what that hides."""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ascend_lab.errors import MachineError
from ascend_lab.lab.machines.lanes import Port
from ascend_lab.lab.machines.program import (
    Arith,
    Branch,
    Breakdown,
    Instr,
    Kernel,
    Load,
    Store,
    Total,
    text,
    whole,
)


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
            needed = f"threads_per_block must be a multiple of {self.warp_lanes} from 32 to 1024"
            raise MachineError(needed, str(self.threads_per_block), "round it up")

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


def warp_parts(machine: Simt, load: WarpLoad, resident: int) -> tuple[int, Breakdown]:
    """Return the cycles of one launch with `resident` warps at a time, and its parts.

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
    return whole(cycles), Breakdown(whole(compute), whole(move), whole(wait))


# A warp scheduler, cycle by cycle: the small truth behind the closed form of `occupancy`.
#
# It issues one instruction per cycle and scheduler slot to the warp that has waited longest, keeps
# a scoreboard per warp, and serves memory first come, first served. It is slow and exact; the
# closed form is fast and a bound. Tests hold the two against each other, and a figure draws this
# one.


MAX_ISSUES = 200_000


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of a warp: bytes it moves, cycles until its result, steps it depends on."""

    text: str
    moved_bytes: int
    latency_cycles: int
    needs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Warp `warp` issued `text` at cycle `start` and its result was ready at `ready`."""

    warp: int
    text: str
    start: int
    ready: int


def steps_of(kernel: Kernel, machine: Simt, itemsize: int = 4) -> tuple[Step, ...]:
    """Return the steps of one full warp of a kernel without branches, loads coalesced."""
    row_bytes = machine.warp_lanes * itemsize
    writer: dict[str, int] = {}
    steps = [Step("index", 0, 1, ()) for _ in range(machine.thread_instructions)]
    for instr in kernel.body:
        if isinstance(instr, Branch | Total):
            raise MachineError(
                "the drawn schedule needs straight-line code", text(instr), "leave it out"
            )
        needs = tuple(writer[name] for name in _sources(instr) if name in writer)
        memory = isinstance(instr, Load | Store)
        latency = machine.port.latency_cycles if isinstance(instr, Load) else machine.arith_cycles
        steps.append(Step(text(instr), row_bytes if memory else 0, latency, needs))
        if isinstance(instr, Load | Arith):
            writer[instr.dst] = len(steps) - 1
    return tuple(steps)


def _sources(instr: Instr) -> tuple[str, ...]:
    if isinstance(instr, Arith):
        return tuple(arg for arg in instr.args if isinstance(arg, str))
    if isinstance(instr, Store):
        return (instr.src,)
    return (instr.index,) if isinstance(instr, Load) and instr.index else ()


def schedule(
    kernel: Kernel, machine: Simt, warps: int, resident: int | None = None
) -> tuple[Span, ...]:
    """Return when every instruction of every warp was issued.

    At most `resident` warps run at once (default: what `occupancy` allows); a warp that ends makes
    room for the next. Raises `MachineError` beyond MAX_ISSUES instructions.
    """
    steps = steps_of(kernel, machine)
    if warps < 1 or warps * len(steps) > MAX_ISSUES:
        needed = f"a drawn schedule needs 1 to {MAX_ISSUES} instructions"
        raise MachineError(needed, str(warps * len(steps)), "use fewer warps")
    limit = occupancy(machine)["all"] if resident is None else resident
    return _simulate(steps, machine, warps, limit)


def _simulate(steps: Sequence[Step], machine: Simt, warps: int, resident: int) -> tuple[Span, ...]:
    """Step from issue to issue; the queue holds (cycle at which a warp can issue, order, warp)."""
    spans: list[Span] = []
    ready = [[0] * len(steps) for _ in range(warps)]
    position = [0] * warps
    queue = [(0, warp, warp) for warp in range(min(resident, warps))]
    waiting, order = len(queue), warps
    issue_at, port_free = 0.0, 0.0
    gap = 1 / machine.warps_per_cycle
    while queue:
        can, _, warp = heapq.heappop(queue)
        issue_at = max(issue_at, can)
        step = steps[position[warp]]
        start = int(issue_at)
        if step.moved_bytes:
            port_free = max(port_free, start) + step.moved_bytes / machine.port.rate_bytes_per_cycle
        done = start + step.latency_cycles
        if step.moved_bytes:
            done = max(done, math.ceil(port_free))
        ready[warp][position[warp]] = done
        spans.append(Span(warp, step.text, start, done))
        position[warp] += 1
        issue_at += gap
        order += 1
        if position[warp] < len(steps):
            needs = steps[position[warp]].needs
            can = max([start + 1, *(ready[warp][need] for need in needs)])
            heapq.heappush(queue, (can, order, warp))
        elif waiting < warps:
            heapq.heappush(queue, (start + 1, order, waiting))
            waiting += 1
    return tuple(spans)


def finish(spans: Sequence[Span]) -> int:
    """Return the cycle at which the last instruction has left and the last byte has moved."""
    return max(span.ready if span.text.startswith("st") else span.start + 1 for span in spans)
