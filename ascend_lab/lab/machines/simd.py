"""Two machines of the chapter on parallel hardware: a scalar core (SISD) and a vector unit (SIMD).

The scalar core issues one instruction for one element, in order, and has a cache. The vector unit
works on many elements an instruction, with repeats and masks, on a local buffer that copies fill.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.errors import MachineError
from ascend_lab.lab.machines import lanes as ln, program as pr


@dataclass(frozen=True, slots=True)
class Scalar:
    """An in-order core that issues one instruction per cycle and stalls on a missing operand.

    `arith_cycles` and `load_cycles` (a cache hit) are latencies; a cache line that is touched for
    the first time costs the port's latency, divided by the `fetches_in_flight` that a prefetcher
    keeps going. The cache never evicts a line that is still needed.
    """

    name: str = "scalar"
    arith_cycles: int = 4
    load_cycles: int = 4
    fetches_in_flight: int = 4
    loop_instructions: int = 2
    local_bytes: int = 256 * 1024
    port: ln.Port = field(default_factory=ln.Port)

    def peak_ops_per_cycle(self, dtype: str = "float32") -> float:
        """Return the operations per cycle of one multiply-add after the other: 2."""
        return 2.0


def scalar_kernel(machine: Scalar, kernel: pr.Kernel, inputs: pr.Arrays) -> pr.Run:
    """Execute the loop one element at a time; nothing overlaps, so cycles are the sum of parts."""
    trace = ln.execute(kernel, inputs, 1, machine.port, _timing(machine))
    values = dict(trace.values)
    loop_instructions = machine.loop_instructions * kernel.n
    stalls = int(trace.stalls.sum())
    if trace.summand is not None:
        first_to_last = trace.summand[:, 0]  # every step rounds in the format of the values
        values[kernel_total(kernel)][0] = np.cumsum(first_to_last, dtype=first_to_last.dtype)[-1]
        per_element = int(trace.slots[0] + trace.stalls[0]) + machine.loop_instructions
        stalls += kernel.n * max(0, machine.arith_cycles - per_element)
    lines_read, lines_written = cache_lines(trace)
    instructions = trace.total("groups") + loop_instructions
    (cycles, parts), counts = _timed(machine, instructions, stalls, lines_read, lines_written)
    counts["ops"] = trace.total("ops")
    counts["bytes_used"] = trace.total("bytes_used")
    lines = (pr.Line(issue.text, issue.groups) for issue in trace.issues)
    return pr.Run(
        machine=machine.name,
        program=kernel.name,
        values=values,
        cycles=cycles,
        parts=parts,
        counters=counts,
        stream=(*lines, pr.Line("next i, jump", loop_instructions)),
    )


def scalar_matmul(machine: Scalar, program: pr.Matmul, inputs: pr.Arrays) -> pr.Run:
    """Execute three nested loops: two loads, a multiply-add and the loop per product."""
    steps = program.m * program.k * program.n
    results = program.m * program.n
    body = pr.Load("a", "A"), pr.Load("b", "B"), pr.Arith("c", "mad", ("a", "b", 0.0))
    one_element = np.ones(1, np.float32)
    inner = pr.Kernel("inner", 1, body)
    trace = ln.execute(
        inner, {"A": one_element, "B": one_element}, 1, machine.port, _timing(machine)
    )
    slots = int(trace.slots[0]) + machine.loop_instructions
    tiling = ln.blocking(program, *ln.item_bytes(inputs), machine.local_bytes)
    line_bytes = machine.port.line_bytes
    timed, counts = _timed(
        machine,
        instructions=slots * steps + results,
        stalls=int(trace.stalls[0]) * steps,
        lines_in=-(-tiling.bytes_in // line_bytes),
        lines_out=-(-tiling.bytes_out // line_bytes),
    )
    stream = [pr.Line(issue.text, steps) for issue in trace.issues]
    stream.append(pr.Line("next k, jump", machine.loop_instructions * steps))
    stream.append(pr.Line("st C[i,j], c", results))
    return ln.product_run(machine.name, program, inputs, timed, stream, **counts)


def cache_lines(trace: ln.Trace) -> tuple[int, int]:
    """Return the distinct lines read and written; an array read twice is fetched once."""
    lines = {"load": dict[str, int](), "store": dict[str, int]()}
    for issue in trace.issues:
        if issue.kind in lines:
            lines_of_array = lines[issue.kind]
            lines_of_array[issue.array] = max(lines_of_array.get(issue.array, 0), issue.lines)
    return sum(lines["load"].values()), sum(lines["store"].values())


def kernel_total(kernel: pr.Kernel) -> str:
    """Return the name of the array that the kernel's closing `Total` writes."""
    return str(getattr(kernel.body[-1], "array", ""))


def _timing(machine: Scalar) -> ln.Timing:
    """Return the latencies of the core, which counts the cache lines it touches."""
    return ln.Timing(machine.arith_cycles, machine.load_cycles, cache_bytes=machine.port.line_bytes)


def _timed(
    machine: Scalar, instructions: int, stalls: int, lines_in: int, lines_out: int
) -> tuple[tuple[int, pr.Breakdown], dict[str, int]]:
    """Return cycles with their parts, and the instructions and bytes moved."""
    port = machine.port
    bytes_moved = (lines_in + lines_out) * port.line_bytes
    misses = lines_in * port.latency_cycles / machine.fetches_in_flight
    move = pr.whole(bytes_moved / port.rate_bytes_per_cycle)
    parts = pr.Breakdown(instructions, move, pr.whole(stalls + misses))
    return (parts.total, parts), {"instructions": instructions, "bytes_moved": bytes_moved}


# -- one vector instruction: an operation, a mask, a repeat count and a stride --------------------
# One repeat works on up to 256 bytes, 8 blocks of 32 bytes; `mask` switches off lanes at its end;
# the next repeat starts `stride_blocks` blocks further on; one instruction repeats at most 255
# times (Ascend C documentation, vector instructions).
BLOCK_BYTES = 32
REPEAT_BYTES = 256
MAX_REPEATS = 255


@dataclass(frozen=True, slots=True)
class VectorOp:
    """`dst = op(a, b)` on `repeats` groups of `mask` elements, `stride_blocks` blocks apart."""

    op: str
    dst: int
    a: int
    b: int
    mask: int
    repeats: int = 1
    stride_blocks: int = REPEAT_BYTES // BLOCK_BYTES


def lanes_of(dtype: np.dtype[np.generic] | str) -> int:
    """Return the number of elements in one repeat: 64 of float32, 128 of float16."""
    return REPEAT_BYTES // np.dtype(dtype).itemsize


def elements(op: VectorOp, dtype: np.dtype[np.generic]) -> pr.Array:
    """Return the element numbers an instruction touches, relative to an operand's start.

    Shape (repeats, mask). Raises `MachineError` for a mask, repeat count or stride that the
    instruction cannot have.
    """
    lanes = lanes_of(dtype)
    block = BLOCK_BYTES // dtype.itemsize
    limits = {
        "mask": (op.mask, 1, lanes),
        "repeats": (op.repeats, 1, MAX_REPEATS),
        "stride_blocks": (op.stride_blocks, 0, MAX_REPEATS),
    }
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            needed = f"a vector instruction needs {name} from {low} to {high}"
            raise MachineError(needed, str(value), "split the work over several instructions")
    step = op.stride_blocks * block
    return np.arange(op.repeats)[:, None] * step + np.arange(op.mask)[None, :]


def run_vector(ops: Sequence[VectorOp], buffer: pr.Array) -> pr.Array:
    """Return the buffer after the instructions; the one handed in stays as it is.

    Raises `MachineError` if an operand leaves the buffer or starts off a 32-byte block.
    """
    result = buffer.copy()
    for op in ops:
        touched = elements(op, buffer.dtype)
        for start in (op.dst, op.a, op.b):
            last = start + int(touched.max())
            byte = start * buffer.itemsize
            if start < 0 or last >= buffer.size:
                needed = f"an operand needs elements {start} to {last}"
                got = f"a buffer of {buffer.size}"
                raise MachineError(needed, got, "reduce repeats or mask, or enlarge the buffer")
            if byte % BLOCK_BYTES:
                needed = f"an operand must start at a multiple of {BLOCK_BYTES} bytes"
                raise MachineError(needed, f"byte {byte}", "align it")
        value = pr.OPS[op.op].apply(result[op.a + touched], result[op.b + touched])
        result[op.dst + touched] = value
    return result


def plain_ops(
    op: str, n: int, dst: int, a: int, b: int, dtype: np.dtype[np.generic] | str
) -> list[VectorOp]:
    """Return instructions for n elements: up to 255 full repeats each, then one masked tail.

    1,000 elements of float32 are 15 repeats of 64, and one with a mask of 40.
    """
    lanes = lanes_of(dtype)
    full_repeats, tail = divmod(n, lanes)
    pieces = [  # (repeats before it, mask, repeats)
        (first, lanes, min(MAX_REPEATS, full_repeats - first))
        for first in range(0, full_repeats, MAX_REPEATS)
    ]
    if tail:
        pieces.append((full_repeats, tail, 1))
    ops = []
    for first, mask, repeats in pieces:
        offset = first * lanes
        ops.append(VectorOp(op, dst + offset, a + offset, b + offset, mask, repeats))
    return ops


def instruction_count(n: int, lanes: int) -> int:
    """Return how many instructions `plain_ops` issues for n elements, without building them."""
    full_repeats, tail = divmod(n, lanes)
    return -(-full_repeats // MAX_REPEATS) + (tail > 0)


# -- SIMD: a vector unit with repeats and masks on a local buffer ---------------------------------
@dataclass(frozen=True, slots=True)
class Simd:
    """A vector unit over a local buffer of `local_bytes`, filled and emptied by copies.

    An instruction with r repeats takes `startup_cycles + cycles_per_repeat * r`, each repeat on
    `vector_bytes` bytes. There are no branches: both sides of an `if` are issued for all lanes,
    under a mask.
    """

    name: str = "SIMD"
    vector_bytes: int = REPEAT_BYTES
    cycles_per_repeat: int = 2
    startup_cycles: int = 24
    local_bytes: int = 256 * 1024
    port: ln.Port = field(default_factory=ln.Port)

    def lanes(self, dtype: str = "float32") -> int:
        """Return elements of a format per repeat."""
        return self.vector_bytes // np.dtype(dtype).itemsize

    def peak_ops_per_cycle(self, dtype: str = "float32") -> float:
        """Return two operations per lane and repeat, start-up left out."""
        return 2 * self.lanes(dtype) / self.cycles_per_repeat


def vector_cycles(machine: Simd, ops: list[VectorOp]) -> int:
    """Return the cycles of a list of vector instructions, each waiting for the one before."""
    return sum(machine.startup_cycles + machine.cycles_per_repeat * op.repeats for op in ops)


def _refuse_gathers(machine: Simd, kernel: pr.Kernel) -> None:
    """Raise `MachineError` for a kernel that loads by index, which copies of tiles cannot do."""
    if any(isinstance(instr, pr.Load) and instr.index for instr in pr.walk(kernel.body)):
        raise MachineError(
            f"{machine.name} copies regular tiles and has no instruction to gather by index, "
            f"which {kernel.name} needs",
            "a load with an index register",
            "sort the data first, or run it on a SIMT machine",
        )


def _tile_of(machine: Simd, kernel: pr.Kernel, itemsize: int) -> int:
    """Return the elements of a tile: as many whole repeats as fit in every buffer."""
    width = machine.vector_bytes // itemsize
    arrays = {i.array for i in pr.walk(kernel.body) if isinstance(i, pr.Load | pr.Store)}
    buffer_elements = machine.local_bytes // (ln.BUFFERS * itemsize * len(arrays))
    return buffer_elements // width * width


def simd_kernel(machine: Simd, kernel: pr.Kernel, inputs: pr.Arrays) -> pr.Run:
    """Execute the kernel tile by tile in the local buffer."""
    _refuse_gathers(machine, kernel)
    itemsize = pr.number_format(kernel, inputs).itemsize
    width = machine.vector_bytes // itemsize
    trace = ln.execute(kernel, inputs, width, machine.port, ln.Timing(1, 1, branches=False))
    values = dict(trace.values)
    tile = _tile_of(machine, kernel, itemsize)
    full_tiles, last_elements = divmod(kernel.n, tile)
    tiles = full_tiles + (last_elements > 0)
    repeats = -(-kernel.n // width)
    per_op = full_tiles * instruction_count(tile, width) + instruction_count(last_elements, width)
    vector_ops = sum(issue.kind in ("arith", "branch", "total") for issue in trace.issues)
    copies = sum(issue.kind in ("load", "store") for issue in trace.issues)
    instructions = vector_ops * per_op
    passes = vector_ops * repeats
    if trace.summand is not None:
        values[kernel_total(kernel)][0] = lane_sum(trace.summand, trace.active)
        folds = (width - 1).bit_length()
        instructions = instructions + folds
        passes = passes + folds
    cycles = instructions * machine.startup_cycles + passes * machine.cycles_per_repeat
    bytes_moved = trace.total("sectors") * machine.port.sector_bytes
    counts = {
        "instructions": instructions + copies * tiles,
        "ops": trace.total("ops"),
        "bytes_used": trace.total("bytes_used"),
        "bytes_moved": bytes_moved,
    }
    total_cycles, parts = ln.tiled(machine.port, cycles, bytes_moved, tiles)
    return pr.Run(
        machine=machine.name,
        program=kernel.name,
        values=values,
        cycles=total_cycles,
        parts=parts,
        counters=counts,
        stream=_stream(trace, tiles, per_op),
    )


def simd_matmul(machine: Simd, program: pr.Matmul, inputs: pr.Arrays) -> pr.Run:
    """Execute C[i, :] += A[i, k] * B[k, :] with one masked instruction series per (i, k)."""
    in_bytes, out_bytes = ln.item_bytes(inputs)
    width = machine.vector_bytes // out_bytes
    rows = program.m * program.k
    instructions = rows * instruction_count(program.n, width)
    repeats = rows * -(-program.n // width)
    tiling = ln.blocking(program, in_bytes, out_bytes, machine.local_bytes // ln.BUFFERS)
    bytes_moved = tiling.bytes_in + tiling.bytes_out
    cycles = instructions * machine.startup_cycles + repeats * machine.cycles_per_repeat
    stream = (
        pr.Line("copy A, B in", tiling.tiles),
        pr.Line(f"mad C[i,:], A[i,k], B[k,:] x{min(width, program.n)}", instructions),
        pr.Line("copy C out", tiling.tiles),
    )
    timed = ln.tiled(machine.port, cycles, bytes_moved, tiling.tiles)
    counts = {"instructions": instructions + 3 * tiling.tiles, "bytes_moved": bytes_moved}
    return ln.product_run(machine.name, program, inputs, timed, stream, **counts)


def lane_sum(values: pr.Array, active: pr.Array) -> pr.Array:
    """Return the sum as a vector unit makes it: down each lane first, then across by halving."""
    masked = np.where(active, values, values.dtype.type(0))
    lanes = np.cumsum(masked, axis=0, dtype=values.dtype)[-1]
    while lanes.size > 1:
        half = (lanes.size + 1) // 2
        lanes = lanes[:half] + np.pad(lanes[half:], (0, 2 * half - lanes.size))
    return lanes[0]  # type: ignore[no-any-return]


def _stream(trace: ln.Trace, tiles: int, per_op: int) -> tuple[pr.Line, ...]:
    """Return the lines of the listing: a copy is issued per tile, an operation `per_op` times."""
    directions = {"load": "in", "store": "out"}
    lines = []
    for issue in trace.issues:
        if issue.kind in directions:
            lines.append(pr.Line(f"copy {issue.array} {directions[issue.kind]}", tiles))
        else:
            lines.append(pr.Line(issue.text.replace("if ", "mask "), per_op))
    return tuple(lines)
