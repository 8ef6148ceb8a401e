"""SIMD: one instruction, many elements. A vector unit with repeats and masks on a local buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.errors import MachineError
from ascend_lab.machines.blocking import blocking, operands, product
from ascend_lab.machines.inputs import number_format
from ascend_lab.machines.lanes import Timing, Trace, execute
from ascend_lab.machines.memory import Port
from ascend_lab.machines.program import Array, Kernel, Load, Matmul, Store, walk
from ascend_lab.machines.result import Line, Run, tiled
from ascend_lab.machines.scalar import kernel_total
from ascend_lab.machines.vector_unit import REPEAT_BYTES, VectorOp, instruction_count


@dataclass(frozen=True, slots=True)
class Simd:
    """A vector unit over a local buffer of `local_bytes`, filled and emptied by copies.

    An instruction with r repeats takes `startup_cycles + cycles_per_repeat * r`, each repeat on
    `vector_bytes` bytes. `buffers` 2 lets the next tile travel while one is computed. There are no
    branches: both sides of an `if` are issued for all lanes, under a mask.
    """

    name: str = "SIMD"
    vector_bytes: int = REPEAT_BYTES
    cycles_per_repeat: int = 2
    startup_cycles: int = 24
    local_bytes: int = 256 * 1024
    buffers: int = 2
    port: Port = field(default_factory=Port)

    def lanes(self, dtype: str = "float32") -> int:
        """Return elements of a format per repeat."""
        return self.vector_bytes // np.dtype(dtype).itemsize

    def peak_ops_per_cycle(self, dtype: str = "float32") -> float:
        """Return two operations per lane and repeat, start-up left out."""
        return 2 * self.lanes(dtype) / self.cycles_per_repeat


def vector_cycles(machine: Simd, ops: list[VectorOp]) -> int:
    """Return the cycles of a list of vector instructions, each waiting for the one before."""
    per_op = (machine.startup_cycles + machine.cycles_per_repeat * op.repeats for op in ops)
    return sum(per_op)


def simd_kernel(machine: Simd, kernel: Kernel, inputs: Mapping[str, Array]) -> Run:
    """Execute the kernel tile by tile in the local buffer."""
    if any(isinstance(instr, Load) and instr.index for instr in walk(kernel.body)):
        raise MachineError(
            f"{machine.name} copies regular tiles and has no instruction to gather by index, "
            f"which {kernel.name} needs",
            "a load with an index register",
            "sort the data first, or run it on a SIMT machine",
        )
    itemsize = number_format(kernel, inputs).itemsize
    width = max(1, machine.vector_bytes // itemsize)
    trace = execute(kernel, inputs, width, machine.port, Timing(1, 1, branches=False))
    values = dict(trace.values)
    tile = _tile(machine, kernel, itemsize, width)
    full, rest = divmod(kernel.n, tile)
    tiles = full + (rest > 0)
    per_op = full * instruction_count(tile, width) + instruction_count(rest, width)
    repeats = -(-kernel.n // width)
    vector_ops = sum(issue.kind in ("arith", "branch", "total") for issue in trace.issues)
    copies = sum(issue.kind in ("load", "store") for issue in trace.issues)
    instructions, passes = vector_ops * per_op, vector_ops * repeats
    if trace.summand is not None:
        values[kernel_total(kernel)][0] = lane_sum(trace.summand, trace.active)
        folds = (width - 1).bit_length()
        instructions, passes = instructions + folds, passes + folds
    cycles = instructions * machine.startup_cycles + passes * machine.cycles_per_repeat
    bytes_moved = trace.count("sectors") * machine.port.sector_bytes
    counts = {
        "instructions": instructions + copies * tiles,
        "ops": trace.count("ops"),
        "bytes_used": trace.count("bytes_used"),
        "bytes_moved": bytes_moved,
        "lanes_issued": vector_ops * repeats * width,
        "lanes_active": trace.count("lanes", "arith", "branch", "total"),
        "tiles": tiles,
    }
    move = bytes_moved / machine.port.rate_bytes_per_cycle
    timed = tiled(cycles, move, machine.port.latency_cycles, tiles, machine.buffers)
    stream = _stream(trace, tiles, per_op)
    return Run(machine.name, kernel.name, values, *timed, counts, stream)


def simd_matmul(machine: Simd, program: Matmul, inputs: Mapping[str, Array]) -> Run:
    """Execute C[i, :] += A[i, k] * B[k, :] with one masked instruction series per (i, k)."""
    a, b, accumulate = operands(program, inputs)
    width = max(1, machine.vector_bytes // accumulate.itemsize)
    rows = program.m * program.k
    instructions = rows * instruction_count(program.n, width)
    repeats = rows * -(-program.n // width)
    cut = blocking(program, a.itemsize, accumulate.itemsize, machine.local_bytes // machine.buffers)
    bytes_moved = cut.bytes_in + cut.bytes_out
    cycles = instructions * machine.startup_cycles + repeats * machine.cycles_per_repeat
    counts = {
        "instructions": instructions + 3 * cut.tiles,
        "ops": program.ops,
        "bytes_used": a.nbytes + b.nbytes + cut.bytes_out,
        "bytes_moved": bytes_moved,
        "lanes_issued": repeats * width,
        "lanes_active": program.ops // 2,
        "tiles": cut.tiles,
    }
    stream = (
        Line("copy A, B in", cut.tiles),
        Line(f"mad C[i,:], A[i,k], B[k,:] x{min(width, program.n)}", instructions),
        Line("copy C out", cut.tiles),
    )
    move = bytes_moved / machine.port.rate_bytes_per_cycle
    timed = tiled(cycles, move, machine.port.latency_cycles, cut.tiles, machine.buffers)
    values = {"C": product(a, b, accumulate)}
    return Run(machine.name, program.name, values, *timed, counts, stream)


def lane_sum(values: Array, active: Array) -> Array:
    """Return the sum as a vector unit makes it: down each lane first, then across by halving.

    `values` and `active` have shape (repeats, lanes); rounding is in the format of the values.
    """
    masked = np.where(active, values, values.dtype.type(0))
    lanes = np.cumsum(masked, axis=0, dtype=values.dtype)[-1]
    while lanes.size > 1:
        half = (lanes.size + 1) // 2
        low = lanes[:half].copy()
        low[: lanes.size - half] += lanes[half:]
        lanes = low
    return lanes[0]  # type: ignore[no-any-return]


def _tile(machine: Simd, kernel: Kernel, itemsize: int, width: int) -> int:
    """Return the elements of a tile: as many whole repeats as fit in every buffer."""
    arrays = {i.array for i in walk(kernel.body) if isinstance(i, Load | Store)}
    room = machine.local_bytes // (machine.buffers * itemsize * max(1, len(arrays)))
    tile = room // width * width
    if tile < width:
        raise MachineError(
            f"{machine.name} needs room for one repeat of {len(arrays)} arrays",
            f"{room} elements",
            "enlarge local_bytes",
        )
    return tile


def _stream(trace: Trace, tiles: int, per_op: int) -> tuple[Line, ...]:
    lines = []
    for issue in trace.issues:
        if issue.kind in ("load", "store"):
            way = "in" if issue.kind == "load" else "out"
            lines.append(Line(f"copy {issue.array} {way}", tiles))
        else:
            lines.append(Line(issue.text.replace("if ", "mask "), per_op))
    return tuple(lines)
