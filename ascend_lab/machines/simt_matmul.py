"""The tiled matmul of a GPU course: tiles in shared memory, one thread per result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ascend_lab.machines.blocking import operands, product
from ascend_lab.machines.occupancy import Simt, WarpLoad, occupancy, warp_parts
from ascend_lab.machines.program import Array, Matmul
from ascend_lab.machines.result import Breakdown, Line, Run, whole

TILE = 16
"""Side of the tile of C that one block computes, and of the tiles of A and B it stages."""

STEP_OVERHEAD = 8
"""Warp instructions per k-tile besides the products: 2 loads, 2 shared stores, 2 barriers, loop."""


def simt_matmul(machine: Simt, program: Matmul, inputs: Mapping[str, Array]) -> Run:
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
    times = [whole(t) for t in warp_parts(machine, load, resident)]
    counts = {
        "instructions": warps * slots,
        "ops": program.ops,
        "bytes_used": a.nbytes + b.nbytes + program.m * program.n * accumulate.itemsize,
        "bytes_moved": bytes_moved,
        "warps": warps,
        "resident_warps": min(resident, warps),
    }
    stream = (
        Line("ld tiles of A, B", 2 * warps * k_tiles),
        Line("ld.shared a, b", 2 * TILE * warps * k_tiles),
        Line("mad c, a, b", TILE * warps * k_tiles),
        Line("st C", warps),
    )
    values = {"C": product(a, b, accumulate)}
    return Run(machine.name, program.name, values, times[3], Breakdown(*times[:3]), counts, stream)


def _stall(machine: Simt) -> int:
    """Return what one warp waits per k-tile when alone: the loads, shared memory, the mad chain."""
    chain = TILE * max(0, machine.arith_cycles - 3)
    return machine.port.latency_cycles + machine.shared_cycles + chain


def _bytes(machine: Simt, program: Matmul, in_bytes: int, out_bytes: int) -> int:
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
