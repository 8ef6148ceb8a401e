"""Machines that multiply matrices, and what they must make of elementwise work.

The cube unit: one instruction, one block of a matrix product per cycle. The systolic array: one
step of every value per cycle. And the matmul that an elementwise kernel is for either.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ascend_lab.errors import MachineError
from ascend_lab.lab.machines import program as pr
from ascend_lab.lab.machines.lanes import Port, blocking, operands, product


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
    buffers: int = 2
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
    a, b, accumulate = operands(program, inputs)
    block = machine.block(str(a.dtype))
    m1, k1, n1 = (-(-getattr(program, side) // getattr(block, side)) for side in "mkn")
    shape = pr.Matmul(m1 * block.m, k1 * block.k, n1 * block.n, program.name)
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
        pr.Line("load A, B", 2 * cut.tiles),
        pr.Line(f"mmad, {steps // cut.tiles} blocks", cut.tiles),
        pr.Line("store C", cut.tiles),
    )
    move = bytes_moved / machine.port.rate_bytes_per_cycle
    timed = pr.tiled(compute, move, machine.port.latency_cycles, cut.tiles, machine.buffers)
    values = {"C": product(a, b, accumulate)}
    return pr.Run(machine.name, program.name, values, *timed, counts, stream)


# A weight-stationary systolic array: values that really move, one step per cycle.
#
# Element (r, c) of the array keeps one weight B[r, c]. Row r of the array receives A[m, r] at cycle
# m + r; values travel right, partial sums travel down, and C[m, c] leaves the bottom of column c at
# cycle m + (R - 1) + c. A tile of M rows therefore takes M + R + C - 2 cycles, and R more to load
# its weights.
CHUNK_ROWS = 256
"""Rows of A simulated in one batch; rows do not influence each other."""


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
    """Execute C = A B by moving every value through the array."""
    a, b, accumulate = operands(program, inputs)
    tiles = -(-program.k // machine.rows) * -(-program.n // machine.columns)
    cut = blocking(program, a.itemsize, accumulate.itemsize, machine.local_bytes)
    bytes_moved = cut.bytes_in + cut.bytes_out
    busy = tiles * program.m
    move = pr.whole(bytes_moved / machine.port.rate_bytes_per_cycle)
    inside = array_cycles(machine, program)
    latency = machine.port.latency_cycles
    parts = pr.Breakdown(busy, move, inside - busy + latency)
    counts = {
        "instructions": 2 * tiles,
        "ops": program.ops,
        "bytes_used": a.nbytes + b.nbytes + program.m * program.n * accumulate.itemsize,
        "bytes_moved": bytes_moved,
        "weight_tiles": tiles,
        "macs_issued": inside * machine.rows * machine.columns,
        "macs_used": program.ops // 2,
    }
    stream = (
        pr.Line(f"load weights {machine.rows}x{machine.columns}", tiles),
        pr.Line("stream rows of A", busy),
    )
    values = {"C": systolic_product(a, b, machine.rows, machine.columns, accumulate)}
    cycles = max(inside, move) + latency
    return pr.Run(machine.name, program.name, values, cycles, parts, counts, stream)


def systolic_product(
    a: pr.Array, b: pr.Array, rows: int, columns: int, accumulate: np.dtype
) -> pr.Array:
    """Return A B by stepping an array of rows x columns elements; all weight tiles in one batch."""
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    k1, n1 = -(-k // rows), -(-n // columns)
    chunk = min(m, CHUNK_ROWS)
    m1 = -(-m // chunk)
    streams = np.zeros((m1 * chunk, k1 * rows), accumulate)
    streams[:m, :k] = a
    weights = np.zeros((k1 * rows, n1 * columns), accumulate)
    weights[:k, :n] = b
    streams = streams.reshape(m1, 1, chunk, k1, 1, rows).transpose(0, 1, 3, 4, 2, 5)[:, 0]
    weights = weights.reshape(k1, rows, n1, columns).transpose(0, 2, 1, 3)[None]
    out = np.zeros((m1, k1, n1, chunk, columns), accumulate)
    state = (np.zeros((m1, k1, n1, rows, columns), accumulate),) * 2
    for step in range(chunk + rows + columns - 2):
        state = advance(state, weights, streams, step)
        for_rows = step - (rows - 1) - np.arange(columns)
        column = np.flatnonzero((for_rows >= 0) & (for_rows < chunk))
        out[..., for_rows[column], column] = state[1][..., rows - 1, column]
    partial = out.sum(axis=1, dtype=accumulate)
    whole_tiles = partial.transpose(0, 2, 1, 3).reshape(m1 * chunk, n1 * columns)
    return np.asarray(whole_tiles[:m, :n])


def advance(
    state: tuple[pr.Array, pr.Array], weights: pr.Array, streams: pr.Array, step: int
) -> tuple[pr.Array, pr.Array]:
    """Return one cycle later the values travelling right and the partial sums travelling down.

    `streams` has shape (..., M, R): row m of A enters array row r at step m + r.
    """
    values, sums = state
    rows, length = weights.shape[-2], streams.shape[-2]
    at = step - np.arange(rows)
    inside = (at >= 0) & (at < length)
    entering = np.where(inside, streams[..., np.clip(at, 0, length - 1), np.arange(rows)], 0)
    moved = np.empty_like(values)
    moved[..., 1:] = values[..., :-1]
    moved[..., 0] = entering
    down = np.zeros_like(sums)
    down[..., 1:, :] = sums[..., :-1, :]
    return moved, down + moved * weights


def frames(a: pr.Array, b: pr.Array) -> list[tuple[pr.Array, pr.Array]]:
    """Return the state of an array as large as B after each cycle, for small A and B (a figure).

    Raises `MachineError` beyond 64 cycles.
    """
    rows, columns = b.shape
    steps = a.shape[0] + rows + columns - 2
    if steps > 64:
        raise MachineError("a drawing needs at most 64 cycles", str(steps), "use smaller matrices")
    state, result = (np.zeros((rows, columns)),) * 2, []
    for step in range(steps):
        state = advance(state, b.astype(float), a.astype(float), step)
        result.append(state)
    return result


# Elementwise work as a matmul: what a machine that can only multiply matrices must do with it.
#
# If every output is a sum of inputs times numbers, out = c1*x1 + c2*x2 + ..., it is the product of
# a small matrix of numbers with the stacked inputs. With the elements folded into r rows,
#
#     out (r x n/r) = [c1*I | c2*I | ...] (r x p*r)  @  [X1; X2; ...] (p*r x n/r).
Form = dict[str, float]
"""Array name -> its factor; the empty name is a plain number."""


@dataclass(frozen=True, slots=True)
class AsMatmul:
    """The matmul that stands for a kernel, and where its result belongs."""

    a: pr.Array
    b: pr.Array
    output: str
    is_total: bool


def as_matmul(kernel: pr.Kernel, inputs: pr.Arrays, rows: int, machine: str) -> AsMatmul:
    """Return the matmul that computes the kernel, with its elements folded into `rows` rows.

    Raises `MachineError` for a kernel that is not a sum of inputs times numbers.
    """
    pr.check_inputs(kernel, inputs)
    dtype = pr.number_format(kernel, inputs)
    if rows < 1:
        raise MachineError("fold needs at least one row", str(rows), "use 1")
    last = kernel.body[-1]
    if not isinstance(last, pr.Store | pr.Total):
        raise _refuse(kernel, pr.text(last), machine)
    form = _linear_form(kernel, inputs, last.src, machine)
    stacked = [np.asarray(inputs[name])[: kernel.n] for name in form]
    factors = np.array(list(form.values()), dtype)
    if isinstance(last, pr.Total):
        a = np.concatenate(stacked)[None, :]
        return AsMatmul(a, np.repeat(factors, kernel.n)[:, None], last.array, True)
    columns = -(-kernel.n // rows)
    b = np.zeros((len(form), rows * columns), dtype)
    b[:, : kernel.n] = stacked
    a = np.kron(factors[None, :], np.eye(rows, dtype=dtype))
    return AsMatmul(a, b.reshape(len(form) * rows, columns), last.array, False)


def matrix_kernel(machine: Cube | Systolic, kernel: pr.Kernel, inputs: pr.Arrays) -> pr.Run:
    """Execute an elementwise kernel or a reduction as the matmul it is equal to.

    A systolic array keeps the small factor and streams the elements past it.
    """
    matmul, is_cube = (
        as_matmul(kernel, inputs, machine.fold, machine.name),
        isinstance(machine, Cube),
    )
    turned = not is_cube and not matmul.is_total
    a, b = (matmul.b.T, matmul.a.T) if turned else (matmul.a, matmul.b)
    shape = pr.Matmul(a.shape[0], a.shape[1], b.shape[1], kernel.name)
    multiply: Callable[..., pr.Run] = cube_matmul if is_cube else systolic_matmul
    run = multiply(machine, shape, {"A": a, "B": b})
    c = run.values["C"].T if turned else run.values["C"]
    flat = c.astype(b.dtype).ravel()[: 1 if matmul.is_total else kernel.n]
    used = flat.nbytes + sum(x.nbytes for x in map(np.asarray, inputs.values()) if x.ndim)
    counts = {**run.counters, "ops": kernel.ops} | ({"bytes_used": used} if is_cube else {})
    return replace(run, values={matmul.output: flat}, counters=counts)


def _linear_form(kernel: pr.Kernel, inputs: pr.Arrays, out: str, machine: str) -> Form:
    regs: dict[str, Form] = {}

    def value(arg: pr.Operand) -> Form:
        if not isinstance(arg, str):
            return {"": float(arg)}
        return regs[arg] if arg in regs else {"": float(inputs[arg])}

    for instr in kernel.body:
        if isinstance(instr, pr.Load) and (instr.stride, instr.index) == (1, ""):
            regs[instr.dst] = {instr.array: 1.0}
        elif isinstance(instr, pr.Arith):
            form = _combine(instr.op, [value(arg) for arg in instr.args])
            if form is None:
                raise _refuse(kernel, pr.text(instr), machine)
            regs[instr.dst] = form
        elif not isinstance(instr, pr.Store | pr.Total) or instr is not kernel.body[-1]:
            raise _refuse(kernel, pr.text(instr), machine)
    form = value(out)
    if form.get("", 0.0) or not form.keys() - {""}:
        raise _refuse(kernel, "a constant term", machine)
    return {name: factor for name, factor in form.items() if name}


def _combine(op: str, forms: list[Form]) -> Form | None:
    """Return the form of one operation, or None where the result is not linear."""
    if op in ("add", "sub"):
        sign = 1.0 if op == "add" else -1.0
        return _plus(forms[0], {name: sign * factor for name, factor in forms[1].items()})
    if op in ("mul", "mad"):
        first, second = forms[0], forms[1]
        if first.keys() - {""}:
            first, second = second, first
        if first.keys() - {""}:
            return None
        scaled = {name: first.get("", 0.0) * factor for name, factor in second.items()}
        return scaled if op == "mul" else _plus(scaled, forms[2])
    return None


def _plus(left: Form, right: Form) -> Form:
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in {**left, **right}}


def _refuse(kernel: pr.Kernel, what: str, machine: str) -> MachineError:
    return MachineError(
        f"{machine} multiplies matrices and nothing else; {kernel.name} must be a sum of whole "
        "arrays times numbers",
        what,
        "run it on a machine with a vector unit",
    )
