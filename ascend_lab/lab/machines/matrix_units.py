"""Two machines that multiply matrices: the cube unit and the systolic array.

The cube unit multiplies one block, such as 16 x 16 by 16 x 16, per cycle. In the systolic array
values move one element further in each cycle. `as_matmul` writes an elementwise kernel as a matrix
product, since neither machine can do anything else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ascend_lab.errors import MachineError
from ascend_lab.lab.machines import program as pr
from ascend_lab.lab.machines.lanes import BUFFERS, Port, blocking, item_bytes, product_run, tiled
from ascend_lab.lab.machines.simd import kernel_total


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
    in memory as whole blocks, zeros included, as in a fractal layout. Elementwise work is folded
    into `fold` rows (see `as_matmul`).
    """

    name: str = "cube"
    blocks: tuple[Block, ...] = BLOCKS
    startup_cycles: int = 6
    local_bytes: int = 1024 * 1024
    fold: int = 1
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


def cube_matmul(machine: Cube, program: pr.Matmul, inputs: pr.Arrays) -> pr.Run:
    """Execute C = A B in whole blocks; parts of a block that hold no data cost the same."""
    in_bytes, out_bytes = item_bytes(inputs)
    block = machine.block(str(inputs["A"].dtype))
    m1, k1, n1 = (-(-getattr(program, side) // getattr(block, side)) for side in "mkn")
    shape = pr.Matmul(m1 * block.m, k1 * block.k, n1 * block.n, program.name)
    room = machine.local_bytes // BUFFERS
    cut = blocking(shape, in_bytes, out_bytes, room, max(block.m, block.n))
    steps = m1 * k1 * n1
    compute = steps * block.cycles + machine.startup_cycles * cut.tiles
    counts = {
        "instructions": 4 * cut.tiles,
        "bytes_moved": cut.bytes_in + cut.bytes_out,
        "macs_issued": steps * block.m * block.k * block.n,
        "macs_used": program.ops // 2,
    }
    stream = (
        pr.Line("load A, B", 2 * cut.tiles),
        pr.Line(f"mmad, {steps // cut.tiles} blocks", cut.tiles),
        pr.Line("store C", cut.tiles),
    )
    timed = tiled(machine.port, compute, counts["bytes_moved"], cut.tiles)
    return product_run(machine.name, program, inputs, timed, stream, **counts)


# -- a weight-stationary systolic array: values move one element further per cycle ----------------
# Element (r, c) of the array keeps one weight B[r, c]. Row r of the array receives A[m, r] at cycle
# m + r; values travel right, partial sums travel down, and C[m, c] leaves the bottom of column c at
# cycle m + (R - 1) + c. A tile of M rows therefore takes M + R + C - 2 cycles, and R more to load
# its weights.
@dataclass(frozen=True, slots=True)
class Systolic:
    """An array of `rows` x `columns` multiply-add elements beside an on-chip memory."""

    name: str = "systolic"
    rows: int = 16
    columns: int = 16
    local_bytes: int = 1024 * 1024
    fold: int = 1
    port: Port = field(default_factory=Port)

    def peak_ops_per_cycle(self, dtype: str = "float32") -> float:
        """Return two operations per element and cycle."""
        return 2.0 * self.rows * self.columns


def array_cycles(machine: Systolic, program: pr.Matmul) -> int:
    """Return (R + M + R + C - 2) cycles for each of ceil(k/R) * ceil(n/C) weight tiles."""
    tiles = -(-program.k // machine.rows) * -(-program.n // machine.columns)
    return tiles * (2 * machine.rows + program.m + machine.columns - 2)


def systolic_matmul(machine: Systolic, program: pr.Matmul, inputs: pr.Arrays) -> pr.Run:
    """Time C = A B in whole weight tiles; `frames` moves every value of a small one."""
    tiles = -(-program.k // machine.rows) * -(-program.n // machine.columns)
    tiling = blocking(program, *item_bytes(inputs), machine.local_bytes)
    bytes_moved = tiling.bytes_in + tiling.bytes_out
    latency = machine.port.latency_cycles
    busy = tiles * program.m
    array_time = array_cycles(machine, program)
    move = pr.whole(bytes_moved / machine.port.rate_bytes_per_cycle)
    parts = pr.Breakdown(busy, move, array_time - busy + latency)
    stream = (
        pr.Line(f"load weights {machine.rows}x{machine.columns}", tiles),
        pr.Line("stream rows of A", busy),
    )
    timed = (max(array_time, move) + latency, parts)
    counts = {"instructions": 2 * tiles, "bytes_moved": bytes_moved}
    return product_run(machine.name, program, inputs, timed, stream, **counts)


def advance(
    state: tuple[pr.Array, pr.Array], weights: pr.Array, streams: pr.Array, step: int
) -> tuple[pr.Array, pr.Array]:
    """Return one cycle later the values travelling right and the partial sums travelling down.

    `streams` has shape (..., M, R): row m of A enters array row r at step m + r.
    """
    values, sums = state
    rows = weights.shape[-2]
    length = streams.shape[-2]
    entering_row = step - np.arange(rows)
    inside = (entering_row >= 0) & (entering_row < length)
    entering = np.where(
        inside, streams[..., np.clip(entering_row, 0, length - 1), np.arange(rows)], 0
    )
    moved_values = np.empty_like(values)
    moved_values[..., 1:] = values[..., :-1]
    moved_values[..., 0] = entering
    moved_sums = np.zeros_like(sums)
    moved_sums[..., 1:, :] = sums[..., :-1, :]
    return moved_values, moved_sums + moved_values * weights


def frames(a: pr.Array, b: pr.Array) -> list[tuple[pr.Array, pr.Array]]:
    """Return the state of an array as large as B after each cycle, for small A and B (a figure)."""
    rows, columns = b.shape
    state = (np.zeros((rows, columns)), np.zeros((rows, columns)))
    result = []
    for step in range(a.shape[0] + rows + columns - 2):
        state = advance(state, b.astype(float), a.astype(float), step)
        result.append(state)
    return result


# -- elementwise work as a matrix product ---------------------------------------------------------
# If every output is a sum of inputs times numbers, out = c1*x1 + c2*x2 + ..., it is the product of
# a small matrix of numbers with the stacked inputs. With the elements folded into r rows,
#
#     out (r x n/r) = [c1*I | c2*I | ...] (r x p*r)  @  [X1; X2; ...] (p*r x n/r).
Form = dict[str, float]
"""Array name -> its factor; the empty name is a plain number."""


def as_matmul(
    kernel: pr.Kernel, inputs: pr.Arrays, rows: int, machine: str
) -> tuple[pr.Array, pr.Array]:
    """Return the factors whose product is the kernel, its elements folded into `rows` rows.

    Raises `MachineError` for a kernel that is not a sum of inputs times numbers.
    """
    dtype = pr.number_format(kernel, inputs)
    form = _linear_form(kernel, inputs, machine)
    stacked = [inputs[name][: kernel.n] for name in form]
    factors = np.array(list(form.values()), dtype)
    if isinstance(kernel.body[-1], pr.Total):
        return np.concatenate(stacked)[None, :], np.repeat(factors, kernel.n)[:, None]
    columns = -(-kernel.n // rows)
    b = np.zeros((len(form), rows * columns), dtype)
    b[:, : kernel.n] = stacked
    a = np.kron(factors[None, :], np.eye(rows, dtype=dtype))
    return a, b.reshape(len(form) * rows, columns)


def matrix_kernel(machine: Cube | Systolic, kernel: pr.Kernel, inputs: pr.Arrays) -> pr.Run:
    """Execute an elementwise kernel or a reduction as the matmul it is equal to.

    A systolic array keeps the small factor and streams the elements past it.
    """
    a, b = as_matmul(kernel, inputs, machine.fold, machine.name)
    last = kernel.body[-1]
    dtype = b.dtype
    is_transposed = isinstance(machine, Systolic) and not isinstance(last, pr.Total)
    if is_transposed:
        a, b = b.T, a.T
    shape = pr.Matmul(a.shape[0], a.shape[1], b.shape[1], kernel.name)
    multiply: Callable[..., pr.Run] = (
        systolic_matmul if isinstance(machine, Systolic) else cube_matmul
    )
    run = multiply(machine, shape, {"A": a, "B": b})
    c = run.values["C"].T if is_transposed else run.values["C"]
    flat = c.astype(dtype).ravel()[: 1 if isinstance(last, pr.Total) else kernel.n]
    arrays = [np.asarray(value) for value in inputs.values()]
    bytes_used = flat.nbytes + sum(array.nbytes for array in arrays if array.ndim)
    counts = {**run.counters, "ops": kernel.ops, "bytes_used": bytes_used}
    return replace(run, values={kernel_total(kernel): flat}, counters=counts)


def _linear_form(kernel: pr.Kernel, inputs: pr.Arrays, machine: str) -> Form:
    """Return the result of a kernel as a sum of arrays times numbers, or raise `MachineError`."""
    regs: dict[str, Form] = {name: {"": float(inputs[name])} for name in kernel.params}
    for instr in kernel.body[:-1]:
        if isinstance(instr, pr.Load) and (instr.stride, instr.index) == (1, ""):
            regs[instr.dst] = {instr.array: 1.0}
            continue
        args = instr.args if isinstance(instr, pr.Arith) else ()
        form = _combine([regs[a] if isinstance(a, str) else {"": a} for a in args])
        if not isinstance(instr, pr.Arith) or form is None:
            raise MachineError(
                f"{machine} multiplies matrices and nothing else; {kernel.name} must be a sum of "
                "whole arrays times numbers",
                pr.text(instr),
                "run it on a machine with a vector unit",
            )
        regs[instr.dst] = form
    return regs[pr.sources(kernel.body[-1])[0]]


def _combine(forms: list[Form]) -> Form | None:
    """Return the form of a sum, or of a product and a sum; None where it is not linear."""
    if len(forms) < 3:
        return _plus(*forms) if forms else None
    number, scaled, added = forms
    if number.keys() - {""}:
        number, scaled = scaled, number
    if number.keys() - {""}:
        return None
    return _plus({name: number[""] * factor for name, factor in scaled.items()}, added)


def _plus(left: Form, right: Form) -> Form:
    """Return the form of a sum."""
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in {**left, **right}}
