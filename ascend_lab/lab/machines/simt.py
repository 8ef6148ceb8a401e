"""The SIMT machine of the chapter on parallel hardware: one instruction for a warp of 32 threads.

It counts divergence (lanes of a warp that take different sides of an `if`), coalescing (how few
sectors of memory a warp touches), and how resident warps hide each other's stalls. `warp_parts` is
a closed form for the time; `schedule` simulates the warps cycle by cycle.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ascend_lab.lab.machines import lanes as ln, program as pr, simd


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
    port: ln.Port = field(default_factory=ln.Port)

    def peak_ops_per_cycle(self, dtype: str = "float32") -> float:
        """Return two operations per lane and cycle."""
        return 2.0 * self.lanes

    @property
    def warps_per_cycle(self) -> float:
        """Warp instructions issued per cycle at best."""
        return self.lanes / self.warp_lanes


def occupancy(machine: Simt, shared_bytes_per_block: int = 0) -> Mapping[str, int]:
    """Return resident warps under each limit, and under all: keys warps, registers, shared, all.

    Only whole blocks become resident.
    """
    warps = machine.threads_per_block // machine.warp_lanes
    blocks = {"warps": machine.max_warps // warps}
    per_block = machine.registers_per_thread * machine.threads_per_block
    blocks["registers"] = machine.registers // per_block
    if shared_bytes_per_block:
        blocks["shared"] = machine.shared_bytes // shared_bytes_per_block
    result = {limit: count * warps for limit, count in blocks.items()}
    return result | {"all": min(result.values())}


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


def warp_parts(machine: Simt, load: WarpLoad, resident: int) -> tuple[int, pr.Breakdown]:
    """Return the cycles of one launch with `resident` warps at a time, and its parts.

    Warps hide each other's stalls, so three limits hold at once: the issue slots, the bytes, and
    the life of a warp, (slots + stalls) * warps / resident. The first two get the stalls of one
    warp on top: as a launch begins, no other warp has data to work on meanwhile.
    """
    together = min(resident, load.warps)
    compute = max(load.slots / min(machine.warps_per_cycle, together), load.max_slots)
    move = load.bytes_moved / machine.port.rate_bytes_per_cycle
    wait = max(load.stalls / together, load.max_stalls)
    life = max((load.slots + load.stalls) / together, load.max_slots + load.max_stalls)
    cycles = max(compute + load.max_stalls, move + load.max_stalls, life)
    return pr.whole(cycles), pr.Breakdown(pr.whole(compute), pr.whole(move), pr.whole(wait))


def simt_kernel(machine: Simt, kernel: pr.Kernel, inputs: pr.Arrays) -> pr.Run:
    """Execute one thread per element; a closing `Total` adds passes over the partial sums."""
    port = machine.port
    timing = ln.Timing(machine.arith_cycles, port.latency_cycles, slot_bytes=port.line_bytes)
    trace = ln.execute(kernel, inputs, machine.warp_lanes, port, timing)
    if trace.summand is not None:
        return _reduce(machine, kernel, trace)
    load = _load(machine, trace)
    resident = occupancy(machine)["all"]
    cycles, parts = warp_parts(machine, load, resident)
    stream = (
        pr.Line("i = thread, i < n", (machine.thread_instructions - 1) * load.warps),
        *(pr.Line(issue.text, issue.groups) for issue in trace.issues),
        pr.Line("exit", load.warps),
    )
    return pr.Run(
        machine=machine.name,
        program=kernel.name,
        values=trace.values,
        cycles=cycles,
        parts=parts,
        counters=_counts(machine, trace, load, resident),
        stream=stream,
    )


def _load(machine: Simt, trace: ln.Trace) -> WarpLoad:
    """Return what the warps of an executed kernel ask for."""
    slots = trace.slots + machine.thread_instructions
    stalls = trace.stalls
    return WarpLoad(
        warps=slots.size,
        slots=int(slots.sum()),
        stalls=int(stalls.sum()),
        max_slots=int(slots.max()),
        max_stalls=int(stalls.max()),
        bytes_moved=trace.total("sectors") * machine.port.sector_bytes,
    )


def _counts(machine: Simt, trace: ln.Trace, load: WarpLoad, resident: int) -> dict[str, int]:
    """Return the counters of a launch."""
    return {
        "instructions": trace.total("groups") + machine.thread_instructions * load.warps,
        "ops": trace.total("ops"),
        "bytes_used": trace.total("bytes_used"),
        "bytes_moved": load.bytes_moved,
        "warps": load.warps,
        "resident_warps": min(resident, load.warps),
        "divergent_warps": trace.divergent_groups,
    }


def tree_steps(machine: Simt) -> list[tuple[int, int]]:
    """Return warps and cycles per shared-memory access for each step of one block's sum.

    In every step half of the partial sums is added to the other half. Thread t adds element
    t + half to element t; the interleaved order adds 2*s*t + s to 2*s*t instead, with s = 1, 2,
    4, ..., and its strides fall on few banks.
    """
    threads = machine.threads_per_block
    lanes = machine.warp_lanes
    thread = np.arange(threads).reshape(-1, lanes)
    steps = []
    half = threads // 2
    while half >= 1:
        stride = threads // (2 * half)
        element = 2 * stride * thread if machine.interleaved else thread
        active = thread < half
        ways = ln.bank_ways(element * 4, active)
        steps.append((int(np.count_nonzero(active.any(axis=1))), int(ways.max())))
        half //= 2
    return steps


def _tree_cost(machine: Simt) -> dict[str, int]:
    """Return what one block's tree costs: per block in all, and for warp 0, active in all steps."""
    warps = machine.threads_per_block // machine.warp_lanes
    steps = tree_steps(machine)
    return {
        "instructions": sum(4 * active + warps for active, _ in steps),
        "slots": sum(active * (3 * ways + 1) + warps for active, ways in steps),
        "warp_slots": sum(3 * ways + 2 for _, ways in steps),
        "warp_stalls": len(steps) * (machine.shared_cycles + machine.arith_cycles - 2),
    }


def _reduce(machine: Simt, kernel: pr.Kernel, trace: ln.Trace) -> pr.Run:
    """Sum inside each block by a tree in shared memory; pass again over the partial sums."""
    assert trace.summand is not None
    threads = machine.threads_per_block
    flat = np.where(trace.active, trace.summand, trace.summand.dtype.type(0)).ravel()
    partial_sums = np.pad(flat, (0, -flat.size % threads)).reshape(-1, threads)
    blocks = len(partial_sums)
    while partial_sums.shape[1] > 1:
        half = partial_sums.shape[1] // 2
        partial_sums = partial_sums[:, :half] + partial_sums[:, half:]
    first_run = _pass_run(machine, kernel, trace, blocks)
    name = simd.kernel_total(kernel)
    if blocks == 1:
        return replace(first_run, values={**trace.values, name: partial_sums[0].copy()})
    second_pass = pr.Kernel(kernel.name, blocks, (pr.Load("x", "partial"), pr.Total(name, "x")))
    return _then(first_run, simt_kernel(machine, second_pass, {"partial": partial_sums[:, 0]}))


def _pass_run(machine: Simt, kernel: pr.Kernel, trace: ln.Trace, blocks: int) -> pr.Run:
    """Return the run of one launch: the kernel's body, then a tree of sums in each block."""
    body_load = _load(machine, trace)
    tree = _tree_cost(machine)
    warps = blocks * machine.threads_per_block // machine.warp_lanes
    load = WarpLoad(
        warps=warps,
        slots=body_load.slots + blocks * tree["slots"],
        stalls=body_load.stalls + warps * tree["warp_stalls"],
        max_slots=body_load.max_slots + tree["warp_slots"],
        max_stalls=body_load.max_stalls + tree["warp_stalls"],
        bytes_moved=body_load.bytes_moved + blocks * machine.port.sector_bytes,
    )
    resident = occupancy(machine, trace.slots.itemsize * machine.threads_per_block)["all"]
    cycles, parts = warp_parts(machine, load, resident)
    counts = _counts(machine, trace, load, resident)
    counts["instructions"] += blocks * tree["instructions"]
    stream = (
        *(pr.Line(issue.text, issue.groups) for issue in trace.issues if issue.kind != "total"),
        pr.Line("tree in shared memory", blocks * tree["instructions"]),
        pr.Line("st partial[block]", blocks),
    )
    return pr.Run(
        machine=machine.name,
        program=kernel.name,
        values={},
        cycles=cycles,
        parts=parts,
        counters=counts,
        stream=stream,
    )


def _then(first: pr.Run, second: pr.Run) -> pr.Run:
    """Return two launches, one after the other, as one run with the values of the second."""
    parts = pr.Breakdown(
        first.parts.compute + second.parts.compute,
        first.parts.move + second.parts.move,
        first.parts.wait + second.parts.wait,
    )
    counts = {key: count + second.counters[key] for key, count in first.counters.items()}
    for peak in ("resident_warps", "warps"):
        counts[peak] = max(first.counters[peak], second.counters[peak])
    counts["ops"] = first.counters["ops"]  # the tree's additions are the same sum, regrouped
    stream = (*first.stream, *second.stream)
    cycles = first.cycles + second.cycles
    return replace(second, cycles=cycles, parts=parts, counters=counts, stream=stream)


# -- the tiled matmul of a GPU course: tiles in shared memory, one thread per result ---------------
TILE = 16
"""Side of the tile of C that one block computes, and of the tiles of A and B it stages."""
STEP_OVERHEAD = 8
"""Warp instructions per k-tile besides the products: 2 loads, 2 shared stores, 2 barriers, loop."""


def simt_matmul(machine: Simt, program: pr.Matmul, inputs: pr.Arrays) -> pr.Run:
    """Execute C = A B in blocks of TILE x TILE threads; each product costs two shared loads."""
    in_bytes, out_bytes = ln.item_bytes(inputs)
    block = replace(machine, threads_per_block=TILE * TILE)
    blocks = -(-program.m // TILE) * -(-program.n // TILE)
    warps = blocks * (TILE * TILE // machine.warp_lanes)
    k_tiles = -(-program.k // TILE)
    slots = k_tiles * (STEP_OVERHEAD + 3 * TILE) + machine.thread_instructions + 1
    chain = TILE * max(0, machine.arith_cycles - 3)  # a warp alone waits: loads, shared, mads
    stalls = k_tiles * (machine.port.latency_cycles + machine.shared_cycles + chain)
    resident = occupancy(block, 2 * TILE * TILE * in_bytes)["all"]
    bytes_moved = _bytes(machine, program, in_bytes, out_bytes)
    load = WarpLoad(warps, warps * slots, warps * stalls, slots, stalls, bytes_moved)
    stream = (
        pr.Line("ld tiles of A, B", 2 * warps * k_tiles),
        pr.Line("ld.shared a, b", 2 * TILE * warps * k_tiles),
        pr.Line("mad c, a, b", TILE * warps * k_tiles),
        pr.Line("st C", warps),
    )
    timed = warp_parts(machine, load, resident)
    counts = {"instructions": warps * slots, "bytes_moved": bytes_moved}
    return ln.product_run(machine.name, program, inputs, timed, stream, **counts)


def _bytes(machine: Simt, program: pr.Matmul, in_bytes: int, out_bytes: int) -> int:
    """Return the bytes in whole sectors: every tile row of A, B and C is one segment."""
    sector = machine.port.sector_bytes

    def rows_of(length: int, itemsize: int) -> int:
        """Return the bytes of a row in whole sectors, tile by tile."""
        full_tiles, rest = divmod(length, TILE)
        sectors_per_tile = -(-TILE * itemsize // sector)
        return (full_tiles * sectors_per_tile + -(-rest * itemsize // sector)) * sector

    across = -(-program.n // TILE)
    down = -(-program.m // TILE)
    loads = program.m * rows_of(program.k, in_bytes) * across
    loads += program.k * rows_of(program.n, in_bytes) * down
    return loads + program.m * rows_of(program.n, out_bytes)


# -- a warp scheduler, cycle by cycle -------------------------------------------------------------
# It issues one instruction per cycle and scheduler slot to the warp that has waited longest, keeps
# a scoreboard per warp, and serves memory first come, first served. It is slow and exact; the
# closed form of `warp_parts` is fast and a bound. Tests compare the two; a figure draws this one.
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


def steps_of(kernel: pr.Kernel, machine: Simt) -> tuple[Step, ...]:
    """Return the steps of one full warp of a kernel without branches, loads coalesced."""
    row_bytes = 4 * machine.warp_lanes
    writer: dict[str, int] = {}
    steps = [Step("index", 0, 1, ()) for _ in range(machine.thread_instructions)]
    for instr in kernel.body:
        needs = tuple(writer[name] for name in pr.sources(instr) if name in writer)
        memory = isinstance(instr, pr.Load | pr.Store)
        load = isinstance(instr, pr.Load)
        latency = machine.port.latency_cycles if load else machine.arith_cycles
        steps.append(Step(pr.text(instr), row_bytes if memory else 0, latency, needs))
        if isinstance(instr, pr.Load | pr.Arith):
            writer[instr.dst] = len(steps) - 1
    return tuple(steps)


def schedule(
    kernel: pr.Kernel, machine: Simt, warps: int, resident: int | None = None
) -> tuple[Span, ...]:
    """Return when every instruction of every warp was issued.

    At most `resident` warps run at once (default: what `occupancy` allows); a warp that ends makes
    room for the next.
    """
    limit = occupancy(machine)["all"] if resident is None else resident
    return schedule_steps(steps_of(kernel, machine), machine, warps, limit)


def schedule_steps(
    steps: Sequence[Step], machine: Simt, warps: int, resident: int
) -> tuple[Span, ...]:
    """Return when the steps of every warp were issued, at most `resident` warps at once.

    It goes from issue to issue; the queue holds (cycle at which a warp can issue, order, warp).
    """
    spans: list[Span] = []
    ready = [[0] * len(steps) for _ in range(warps)]
    position = [0] * warps
    queue = [(0, warp, warp) for warp in range(min(resident, warps))]
    waiting = len(queue)
    order = warps
    issue_at = 0.0
    port_free = 0.0
    cycles_per_issue = 1 / machine.warps_per_cycle
    while queue:
        issuable_at, _, warp = heapq.heappop(queue)
        issue_at = max(issue_at, issuable_at)
        step = steps[position[warp]]
        start = int(issue_at)
        done = start + step.latency_cycles
        if step.moved_bytes:
            port_free = max(port_free, start) + step.moved_bytes / machine.port.rate_bytes_per_cycle
            done = max(done, math.ceil(port_free))
        ready[warp][position[warp]] = done
        spans.append(Span(warp, step.text, start, done))
        position[warp] += 1
        issue_at += cycles_per_issue
        order += 1
        if position[warp] < len(steps):
            needs = steps[position[warp]].needs
            issuable_at = max([start + 1, *(ready[warp][need] for need in needs)])
            heapq.heappush(queue, (issuable_at, order, warp))
        elif waiting < warps:
            heapq.heappush(queue, (start + 1, order, waiting))
            waiting += 1
    return tuple(spans)


def last_cycle(spans: Sequence[Span]) -> int:
    """Return the cycle at which the last instruction has left and the last byte has moved."""
    return max(span.ready if span.text.startswith("st") else span.start + 1 for span in spans)
