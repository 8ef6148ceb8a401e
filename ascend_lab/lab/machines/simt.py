"""SIMT: one instruction per warp of threads. Divergence, coalescing, and warps that hide stalls."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ascend_lab.lab.machines import program as pr
from ascend_lab.lab.machines.lanes import Timing, Trace, bank_ways, execute
from ascend_lab.lab.machines.products import operands, product
from ascend_lab.lab.machines.simd import kernel_total
from ascend_lab.lab.machines.warps import Simt, WarpLoad, occupancy, warp_parts


def simt_kernel(machine: Simt, kernel: pr.Kernel, inputs: Mapping[str, pr.Array]) -> pr.Run:
    """Execute one thread per element; a closing `Total` adds passes over the partial sums."""
    port = machine.port
    timing = Timing(machine.arith_cycles, port.latency_cycles, slot_bytes=port.line_bytes)
    trace = execute(kernel, inputs, machine.warp_lanes, port, timing)
    if trace.summand is not None:
        return _reduce(machine, kernel, trace)
    load, resident = _load(machine, trace), occupancy(machine)["all"]
    timed = warp_parts(machine, load, resident)
    stream = (
        pr.Line("i = thread, i < n", (machine.thread_instructions - 1) * load.warps),
        *(pr.Line(issue.text, issue.groups) for issue in trace.issues),
        pr.Line("exit", load.warps),
    )
    counts = _counts(machine, trace, load, resident)
    return pr.Run(machine.name, kernel.name, trace.values, *timed, counts, stream)


def _load(machine: Simt, trace: Trace) -> WarpLoad:
    slots = trace.slots + machine.thread_instructions
    return WarpLoad(
        warps=slots.size,
        slots=int(slots.sum()),
        stalls=int(trace.stalls.sum()),
        max_slots=int(slots.max()),
        max_stalls=int(trace.stalls.max()),
        bytes_moved=trace.count("sectors") * machine.port.sector_bytes,
    )


def _counts(machine: Simt, trace: Trace, load: WarpLoad, resident: int) -> dict[str, int]:
    return {
        "instructions": trace.count("groups") + machine.thread_instructions * load.warps,
        "ops": trace.count("ops"),
        "bytes_used": trace.count("bytes_used"),
        "bytes_moved": load.bytes_moved,
        "sectors": trace.count("sectors"),
        "lanes_issued": trace.count("groups") * machine.warp_lanes,
        "lanes_active": trace.count("lanes"),
        "warps": load.warps,
        "resident_warps": min(resident, load.warps),
        "divergent_warps": trace.divergent_groups,
        "bank_conflict_cycles": 0,
    }


def tree_steps(machine: Simt) -> list[tuple[int, int]]:
    """Return warps and cycles per shared-memory access for each step of one block's sum.

    In every step half of the partial sums is added to the other half. Thread t adds element
    t + half to element t; the interleaved order adds 2*s*t + s to 2*s*t instead, with s = 1, 2,
    4, ..., and its strides fall on few banks.
    """
    threads, lanes = machine.threads_per_block, machine.warp_lanes
    thread = np.arange(threads).reshape(-1, lanes)
    steps, half = [], threads // 2
    while half >= 1:
        stride = threads // (2 * half)
        element = 2 * stride * thread if machine.interleaved else thread
        active = thread < half
        ways = bank_ways(element * 4, active)
        steps.append((int(np.count_nonzero(active.any(axis=1))), int(ways.max())))
        half //= 2
    return steps


def _tree_cost(machine: Simt) -> dict[str, int]:
    """Return what one block's tree costs: per block in all, and for warp 0, which never rests.

    A step is two shared loads, an add and a shared store per active warp, then a barrier that
    every warp of the block meets.
    """
    warps = machine.threads_per_block // machine.warp_lanes
    steps = tree_steps(machine)
    return {
        "instructions": sum(4 * active + warps for active, _ in steps),
        "slots": sum(active * (3 * ways + 1) + warps for active, ways in steps),
        "conflicts": sum(3 * active * (ways - 1) for active, ways in steps),
        "warp_slots": sum(3 * ways + 2 for _, ways in steps),
        "warp_stalls": len(steps) * (machine.shared_cycles + machine.arith_cycles - 2),
    }


def _reduce(machine: Simt, kernel: pr.Kernel, trace: Trace) -> pr.Run:
    """Sum inside each block by a tree in shared memory; pass again over the partial sums."""
    assert trace.summand is not None
    threads = machine.threads_per_block
    flat = np.where(trace.active, trace.summand, trace.summand.dtype.type(0)).ravel()
    blocks = -(-flat.size // threads)
    padded = np.zeros(blocks * threads, flat.dtype)
    padded[: flat.size] = flat
    part = padded.reshape(blocks, threads)
    while part.shape[1] > 1:
        half = part.shape[1] // 2
        part = part[:, :half] + part[:, half:]
    first = _pass_run(machine, kernel, trace, blocks)
    if blocks == 1:
        return replace(first, values={**trace.values, kernel_total(kernel): part[0].copy()})
    name = kernel_total(kernel)
    rest = pr.Kernel(kernel.name, blocks, (pr.Load("x", "partial"), pr.Total(name, "x")))
    return _then(first, simt_kernel(machine, rest, {"partial": part[:, 0]}))


def _pass_run(machine: Simt, kernel: pr.Kernel, trace: Trace, blocks: int) -> pr.Run:
    load, tree = _load(machine, trace), _tree_cost(machine)
    warps = blocks * machine.threads_per_block // machine.warp_lanes
    load = WarpLoad(
        warps,
        load.slots + blocks * tree["slots"],
        load.stalls + warps * tree["warp_stalls"],
        load.max_slots + tree["warp_slots"],
        load.max_stalls + tree["warp_stalls"],
        load.bytes_moved + blocks * machine.port.sector_bytes,
    )
    resident = occupancy(machine, trace.slots.itemsize * machine.threads_per_block)["all"]
    timed = warp_parts(machine, load, resident)
    counts = _counts(machine, trace, load, resident)
    counts["instructions"] += blocks * tree["instructions"]
    counts["bank_conflict_cycles"] = blocks * tree["conflicts"]
    stream = (
        *(pr.Line(issue.text, issue.groups) for issue in trace.issues if issue.kind != "total"),
        pr.Line("tree in shared memory", blocks * tree["instructions"]),
        pr.Line("st partial[block]", blocks),
    )
    return pr.Run(machine.name, kernel.name, {}, *timed, counts, stream)


def _then(first: pr.Run, second: pr.Run) -> pr.Run:
    """Return two launches, one after the other, as one run with the values of the second."""
    parts = pr.Breakdown(
        first.parts.compute + second.parts.compute,
        first.parts.move + second.parts.move,
        first.parts.wait + second.parts.wait,
    )
    peaks = {"resident_warps", "warps"}
    counts = {
        key: max(first.counters[key], second.counters[key])
        if key in peaks
        else first.counters[key] + second.counters[key]
        for key in first.counters
    }
    counts["ops"] = first.counters["ops"]  # the tree's additions are the same sum, regrouped
    return replace(
        second,
        cycles=first.cycles + second.cycles,
        parts=parts,
        counters=counts,
        stream=(*first.stream, *second.stream),
    )


# -- the tiled matmul of a GPU course: tiles in shared memory, one thread per result ---------------
TILE = 16
"""Side of the tile of C that one block computes, and of the tiles of A and B it stages."""

STEP_OVERHEAD = 8
"""Warp instructions per k-tile besides the products: 2 loads, 2 shared stores, 2 barriers, loop."""


def simt_matmul(machine: Simt, program: pr.Matmul, inputs: Mapping[str, pr.Array]) -> pr.Run:
    """Execute C = A B in blocks of TILE x TILE threads; each product costs two shared loads."""
    a, b, accumulate = operands(program, inputs)
    block = replace(machine, threads_per_block=TILE * TILE)
    blocks = -(-program.m // TILE) * -(-program.n // TILE)
    warps = blocks * (TILE * TILE // machine.warp_lanes)
    k_tiles = -(-program.k // TILE)
    slots = k_tiles * (STEP_OVERHEAD + 3 * TILE) + machine.thread_instructions + 1
    stalls = k_tiles * _stall(machine)
    shared_bytes = 2 * TILE * TILE * a.itemsize
    resident = occupancy(block, shared_bytes)["all"]
    bytes_moved = _bytes(machine, program, a.itemsize, accumulate.itemsize)
    load = WarpLoad(warps, warps * slots, warps * stalls, slots, stalls, bytes_moved)
    timed = warp_parts(machine, load, resident)
    counts = {
        "instructions": warps * slots,
        "ops": program.ops,
        "bytes_used": a.nbytes + b.nbytes + program.m * program.n * accumulate.itemsize,
        "bytes_moved": bytes_moved,
        "warps": warps,
        "resident_warps": min(resident, warps),
    }
    stream = (
        pr.Line("ld tiles of A, B", 2 * warps * k_tiles),
        pr.Line("ld.shared a, b", 2 * TILE * warps * k_tiles),
        pr.Line("mad c, a, b", TILE * warps * k_tiles),
        pr.Line("st C", warps),
    )
    values = {"C": product(a, b, accumulate)}
    return pr.Run(machine.name, program.name, values, *timed, counts, stream)


def _stall(machine: Simt) -> int:
    """Return what one warp waits per k-tile when alone: the loads, shared memory, the mad chain."""
    chain = TILE * max(0, machine.arith_cycles - 3)
    return machine.port.latency_cycles + machine.shared_cycles + chain


def _bytes(machine: Simt, program: pr.Matmul, in_bytes: int, out_bytes: int) -> int:
    """Return the bytes in whole sectors: every tile row of A, B and C is one segment."""
    sector = machine.port.sector_bytes

    def rows_of(length: int, itemsize: int) -> int:
        full, rest = divmod(length, TILE)
        per_tile = -(-TILE * itemsize // sector)
        return (full * per_tile + -(-rest * itemsize // sector)) * sector

    across, down = -(-program.n // TILE), -(-program.m // TILE)
    loads = program.m * rows_of(program.k, in_bytes) * across
    loads += program.k * rows_of(program.n, in_bytes) * down
    return loads + program.m * rows_of(program.n, out_bytes)
