"""The cube unit: one instruction, one block of a matrix product per cycle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.errors import MachineError
from ascend_lab.machines.blocking import blocking, operands, product
from ascend_lab.machines.linear import as_matmul, unfold
from ascend_lab.machines.memory import Port
from ascend_lab.machines.program import Array, Kernel, Matmul
from ascend_lab.machines.result import Line, Run, tiled


@dataclass(frozen=True, slots=True)
class Block:
    """What a cube unit multiplies at once: (m x k) by (k x n) in a format, in some cycles."""

    dtype: str
    m: int
    k: int
    n: int
    cycles: int = 1


BLOCKS = (
    Block("float16", 16, 16, 16),
    Block("int8", 16, 32, 16),
    Block("float32", 16, 8, 16, cycles=2),
)
"""Block per input format (Ascend platform files; float32 as on the 910B, pto-isa cost model)."""


@dataclass(frozen=True, slots=True)
class Cube:
    """A matrix unit fed from an on-chip memory of `local_bytes`.

    An instruction multiplies a tile block by block and takes `startup_cycles` more. Operands live
    in memory as whole blocks, zeros included, as in a fractal layout; `pads_in_memory=False`
    moves only the useful bytes and adds the zeros on the way in. Elementwise work is folded into
    `fold` rows (see `machines.linear`).
    """

    name: str = "cube"
    blocks: tuple[Block, ...] = BLOCKS
    startup_cycles: int = 6
    local_bytes: int = 1024 * 1024
    buffers: int = 2
    fold: int = 1
    pads_in_memory: bool = True
    port: Port = field(default_factory=Port)

    def peak_ops_per_cycle(self, dtype: str = "float32") -> float:
        """Return 2 m k n operations of a block over its cycles."""
        block = self.block(dtype)
        return 2 * block.m * block.k * block.n / block.cycles

    def block(self, dtype: str) -> Block:
        """Return the block of a number format, or raise `MachineError`."""
        for block in self.blocks:
            if block.dtype == dtype:
                return block
        known = ", ".join(block.dtype for block in self.blocks)
        raise MachineError(f"{self.name} multiplies {known}", dtype, "convert the inputs")


def cube_kernel(machine: Cube, kernel: Kernel, inputs: Mapping[str, Array]) -> Run:
    """Execute an elementwise kernel or a reduction as the matmul it is equal to."""
    matmul = as_matmul(kernel, inputs, machine.fold, machine.name)
    shape = Matmul(matmul.a.shape[0], matmul.a.shape[1], matmul.b.shape[1], kernel.name)
    used = sum(np.asarray(inputs[name]).nbytes for name in inputs if np.ndim(inputs[name]))
    run = cube_matmul(machine, shape, {"A": matmul.a, "B": matmul.b})
    values = unfold(kernel, run.values["C"], matmul)
    used += sum(value.nbytes for value in values.values())
    counters = {**run.counters, "ops": kernel.ops, "bytes_used": used}
    return Run(machine.name, kernel.name, values, run.cycles, run.parts, counters, run.stream)


def cube_matmul(machine: Cube, program: Matmul, inputs: Mapping[str, Array]) -> Run:
    """Execute C = A B in whole blocks; parts of a block that hold no data cost the same."""
    a, b, accumulate = operands(program, inputs)
    block = machine.block(str(a.dtype))
    m1, k1, n1 = (
        -(-size // unit)
        for size, unit in zip(
            (program.m, program.k, program.n), (block.m, block.k, block.n), strict=True
        )
    )
    shape = program
    if machine.pads_in_memory:
        shape = Matmul(m1 * block.m, k1 * block.k, n1 * block.n, program.name)
    room = machine.local_bytes // machine.buffers
    cut = blocking(shape, a.itemsize, accumulate.itemsize, room, max(block.m, block.n))
    bytes_moved = cut.bytes_in + cut.bytes_out
    steps = m1 * k1 * n1
    compute = steps * block.cycles + machine.startup_cycles * cut.tiles
    counts = {
        "instructions": 4 * cut.tiles,
        "ops": program.ops,
        "bytes_used": a.nbytes + b.nbytes + program.m * program.n * accumulate.itemsize,
        "bytes_moved": bytes_moved,
        "blocks": steps,
        "macs_issued": steps * block.m * block.k * block.n,
        "macs_used": program.ops // 2,
        "tiles": cut.tiles,
    }
    stream = (
        Line("load A, B", 2 * cut.tiles),
        Line(f"mmad {block.m}x{block.k}x{block.n}", steps),
        Line("store C", cut.tiles),
    )
    move = bytes_moved / machine.port.rate_bytes_per_cycle
    timed = tiled(compute, move, machine.port.latency_cycles, cut.tiles, machine.buffers)
    values = {"C": product(a, b, accumulate)}
    return Run(machine.name, program.name, values, *timed, counts, stream)
