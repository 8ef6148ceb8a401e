"""Executes a kernel in groups of lanes, and counts what each group does to the memory.

A scalar, a vector and a warp machine are one machine with a different width: one lane, the lanes of
a vector register, the 32 threads of a warp. Device memory is read in sectors of 32 bytes, four to a
line of 128 bytes; on-chip shared memory is divided into banks that serve one word each per cycle
(NVIDIA Nsight Compute documentation). `blocking` and `tiled` are for products of matrices: the
tiles that fit on chip, the bytes that then move, and the time.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ascend_lab.lab.machines import program as pr


@dataclass(frozen=True, slots=True)
class Port:
    """The way to device memory that all machines of a comparison share.

    `rate_bytes_per_cycle` counts reads and writes together; `latency_cycles` passes between the
    request for a byte and its arrival, however few bytes are asked for.
    """

    rate_bytes_per_cycle: float = 32.0
    latency_cycles: int = 300
    sector_bytes: int = 32
    line_bytes: int = 128


def units_touched(addresses: pr.Array, active: pr.Array, unit_bytes: int) -> pr.Array:
    """Return per group how many distinct aligned units of `unit_bytes` its active lanes touch.

    `addresses` (bytes) and `active` have shape (groups, lanes); the result has shape (groups,).
    With unit_bytes = 32 these are the sectors of a coalesced access.
    """
    return np.asarray(np.count_nonzero(_units(addresses, active, unit_bytes)[1], axis=1))


def _units(addresses: pr.Array, active: pr.Array, unit_bytes: int) -> tuple[pr.Array, pr.Array]:
    """Return the units of each group, sorted, and a mask of the first of each run of equal ones.

    Idle lanes have the unit -1 and are not in the mask.
    """
    units = np.sort(np.where(active, addresses // unit_bytes, np.int64(-1)), axis=1)
    is_new = np.diff(units, axis=1, prepend=-1) != 0
    return units, is_new & (units >= 0)


def bank_ways(addresses: pr.Array, active: pr.Array) -> pr.Array:
    """Return per group how many cycles a shared-memory access takes: 1 without a conflict.

    A bank serves one word of 4 bytes per cycle, to every lane that wants that same word, so
    the answer is the largest number of distinct words wanted from one bank (0 for an idle group).
    """
    banks = 32
    (words, is_new) = _units(addresses, active, 4)
    group_numbers = np.broadcast_to(np.arange(words.shape[0])[:, None], words.shape)
    # bank 5 of group 2 has the number 2 * 32 + 5
    bank_of_group = (group_numbers * banks + words % banks)[is_new]
    per_bank = np.bincount(bank_of_group.astype(np.intp), minlength=words.shape[0] * banks)
    return np.asarray(per_bank.reshape(words.shape[0], banks).max(axis=1, initial=0))


# -- a kernel in groups of lanes ------------------------------------------------------------------
# Lanes of a group share the instruction; a branch turns some of them off. The Python loop runs over
# the instructions of the body, and NumPy works on all groups at once.
@dataclass(frozen=True, slots=True)
class Timing:
    """What an instruction costs a group: issue slots and cycles until its result can be used.

    With `slot_bytes` a memory access takes one issue slot per aligned unit of that size it
    touches; 0 means one slot whatever it touches. With `cache_bytes` distinct lines of that size
    are counted over the whole run. With `branches` a group skips a side of an `if` that none of its
    lanes takes; without, every group issues both sides under masks, and the memory accesses of all
    its lanes count.
    """

    arith_cycles: int
    load_cycles: int
    slot_bytes: int = 0
    cache_bytes: int = 0
    branches: bool = True


@dataclass(frozen=True, slots=True)
class Issue:
    """One instruction of the body, and how many groups issued it.

    `ops` counts operations of active lanes. Of a load or store, `bytes_used` are the bytes of
    active lanes, and `sectors` and `lines` what had to be touched for them in `array`.
    """

    text: str
    kind: str
    groups: int
    ops: int = 0
    array: str = ""
    bytes_used: int = 0
    sectors: int = 0
    lines: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """The result of a kernel: values, issues, and per group the slots it used and its stalls.

    `summand` holds, by group and lane, the values that a closing `Total` adds up, and `active`
    marks the lanes with an element.
    """

    values: dict[str, pr.Array]
    issues: tuple[Issue, ...]
    slots: pr.Array
    stalls: pr.Array
    divergent_groups: int
    summand: pr.Array | None
    active: pr.Array

    def total(self, field_name: str) -> int:
        """Return the sum of one field over the issues."""
        return sum(getattr(issue, field_name) for issue in self.issues)


@dataclass(slots=True)
class _State:
    """A kernel in execution.

    `regs` are the registers, by group and lane; `ready` says for each when its value can be used,
    by group. `clock` is the cycle of each group, `slots` its issue slots so far.
    """

    kernel: pr.Kernel
    inputs: pr.Arrays
    width: int
    port: Port
    timing: Timing
    dtype: np.dtype[Any]
    element: pr.Array
    regs: dict[str, pr.Array] = field(default_factory=dict)
    ready: dict[str, pr.Array] = field(default_factory=dict)
    values: dict[str, pr.Array] = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)
    divergent: int = 0
    summand: pr.Array | None = None
    clock: pr.Array = field(init=False)
    slots: pr.Array = field(init=False)

    def __post_init__(self) -> None:
        self.clock, self.slots = np.zeros((2, len(self.element)), np.int64)


def execute(kernel: pr.Kernel, inputs: pr.Arrays, width: int, port: Port, timing: Timing) -> Trace:
    """Run the kernel in groups of `width` lanes and return values and counts."""
    groups = -(-kernel.n // width)
    element = np.arange(groups * width, dtype=np.int64).reshape(groups, width)
    state = _State(
        kernel=kernel,
        inputs=inputs,
        width=width,
        port=port,
        timing=timing,
        dtype=pr.number_format(kernel, inputs),
        element=element,
    )
    active = element < kernel.n
    with np.errstate(over="ignore", invalid="ignore"):  # fp16 and int8 overflow as hardware does
        _run(state, kernel.body, active, np.ones(groups, bool))
    return Trace(
        values=state.values,
        issues=tuple(state.issues),
        slots=state.slots,
        stalls=state.clock - state.slots,
        divergent_groups=state.divergent,
        summand=state.summand,
        active=active,
    )


def _run(state: _State, body: tuple[pr.Instr, ...], active: pr.Array, issued: pr.Array) -> None:
    """Execute instructions in the active lanes; `issued` marks the groups that issue them."""
    for instr in body:
        if isinstance(instr, pr.Load):
            array = state.inputs[instr.array]
            index = _read(state, instr.index) if instr.index else instr.stride * state.element
            counts = _access(state, instr.array, index, array.itemsize, active)
            _issue(state, instr, active, issued, **counts)
            value = array[np.where(active, index, 0)]
            _write(state, instr.dst, value, active, issued, state.timing.load_cycles)
        elif isinstance(instr, pr.Store):
            _store(state, instr, active, issued)
        elif isinstance(instr, pr.Arith):
            op = pr.OPS[instr.op]
            value = np.broadcast_to(op.apply(*(_read(state, a) for a in instr.args)), active.shape)
            _issue(state, instr, active, issued, ops=op.ops)
            _write(state, instr.dst, value, active, issued, state.timing.arith_cycles)
        elif isinstance(instr, pr.Branch):
            _branch(state, instr, active, issued)
        elif isinstance(instr, pr.Total):
            state.summand = _read(state, instr.src)
            state.values[instr.array] = np.zeros(1, state.summand.dtype)
            _issue(state, instr, active, issued, ops=1)


def _store(state: _State, instr: pr.Store, active: pr.Array, issued: pr.Array) -> None:
    """Write the active lanes' values to an array, of which the first store makes a copy."""
    value = _read(state, instr.src)
    if instr.array not in state.values:
        initial = state.inputs.get(instr.array, np.zeros(state.kernel.n, value.dtype))
        state.values[instr.array] = initial.copy()
    state.values[instr.array][state.element[active]] = value[active]
    counts = _access(state, instr.array, state.element, value.itemsize, active)
    _issue(state, instr, active, issued, **counts)


def _branch(state: _State, instr: pr.Branch, active: pr.Array, issued: pr.Array) -> None:
    """Execute both sides of an `if`, each in the lanes that take it."""
    cond = _read(state, instr.cond).astype(bool)
    _issue(state, instr, active, issued)
    sides = [(instr.then, active & cond), (instr.other, active & ~cond)]
    groups_taking = [mask.any(axis=1) for _, mask in sides]
    if instr.then and instr.other:
        state.divergent += int(np.count_nonzero(groups_taking[0] & groups_taking[1]))
    for (body, mask), taken in zip(sides, groups_taking, strict=True):
        _run(state, body, mask, taken if state.timing.branches else issued)


def _read(state: _State, name: pr.Operand) -> pr.Array:
    """Return the value of a register, a parameter or a number."""
    if isinstance(name, str) and name in state.regs:
        return state.regs[name]
    return np.asarray(state.inputs[name] if isinstance(name, str) else name, state.dtype)


def _write(
    state: _State, name: str, value: pr.Array, active: pr.Array, issued: pr.Array, cycles: int
) -> None:
    """Write a register in the active lanes; it can be used `cycles` after its issue."""
    old_value = state.regs.get(name)
    state.regs[name] = value if old_value is None else np.where(active, value, old_value)
    ready_at = state.clock + cycles - 1
    state.ready[name] = np.where(issued, ready_at, state.ready.get(name, np.int64(0)))


def _issue(
    state: _State,
    instr: pr.Instr,
    active: pr.Array,
    issued: pr.Array,
    ops: int = 0,
    slots: pr.Array | int = 1,
    **counts: Any,
) -> None:
    """Advance the clock of every issuing group and record the instruction."""
    start = state.clock
    for name in pr.sources(instr):
        start = np.maximum(start, state.ready.get(name, np.int64(0)))
    state.clock = np.where(issued, start + slots, state.clock)
    state.slots = state.slots + np.where(issued, slots, 0)
    groups = int(np.count_nonzero(issued))
    lanes = int(np.count_nonzero(active))
    kind = type(instr).__name__.lower()
    state.issues.append(Issue(pr.text(instr), kind, groups, ops * lanes, **counts))


def _access(
    state: _State, array: str, index: pr.Array, itemsize: int, active: pr.Array
) -> dict[str, Any]:
    """Count what one memory instruction touches: bytes used, sectors, lines, issue slots."""
    timing = state.timing
    address = index * itemsize
    touched = active if timing.branches else state.element < state.kernel.n
    counts: dict[str, Any] = {
        "array": array,
        "bytes_used": itemsize * int(np.count_nonzero(active)),
        "sectors": int(units_touched(address, touched, state.port.sector_bytes).sum()),
    }
    if timing.slot_bytes:
        counts["slots"] = np.maximum(units_touched(address, touched, timing.slot_bytes), 1)
    if timing.cache_bytes:
        counts["lines"] = np.unique(address[touched] // timing.cache_bytes).size
    return counts


# -- matmuls: how one is cut so that its tiles fit on chip, and the bytes that then move -----------
SUMS: Mapping[str, str] = {"float16": "float32", "int8": "int32"}
"""Number format of the inputs -> format of the sums, where that is another one."""


@dataclass(frozen=True, slots=True)
class Blocking:
    """Output tiles of `rows` x `columns` elements, how many there are, and the bytes they move."""

    rows: int
    columns: int
    tiles: int
    bytes_in: int
    bytes_out: int


def blocking(
    program: pr.Matmul, in_bytes: int, out_bytes: int, local_bytes: int, unit: int = 1
) -> Blocking:
    """Return the largest tiling, square or longer, whose three tiles fit in `local_bytes`.

    A is read once per column of tiles and B once per row of tiles:
    bytes_in = in_bytes * (m k ceil(n / columns) + k n ceil(m / rows)). Tiles are multiples of
    `unit`; where C is narrower than the square, the free bytes make the other side longer.
    """
    square = math.isqrt(local_bytes // (2 * in_bytes + out_bytes)) // unit * unit
    rows_needed, columns_needed = (-(-side // unit) * unit for side in (program.m, program.n))
    depth = min(program.k, square)

    def longest(other: int) -> int:
        """Return the longest side that fits beside another side."""
        free = local_bytes - in_bytes * other * depth
        return max(square, free // (in_bytes * depth + out_bytes * other) // unit * unit)

    rows = square
    columns = square
    if columns_needed < square:
        rows = longest(columns_needed)
    if rows_needed < square:
        columns = longest(rows_needed)
    rows = min(rows, rows_needed)
    columns = min(columns, columns_needed)
    down = -(-program.m // rows)
    across = -(-program.n // columns)
    read_elements = program.m * program.k * across + program.k * program.n * down
    return Blocking(
        rows, columns, down * across, in_bytes * read_elements, out_bytes * program.m * program.n
    )


def item_bytes(inputs: pr.Arrays) -> tuple[int, int]:
    """Return the bytes of an element of A and B, and of one of C."""
    dtype = inputs["A"].dtype
    return dtype.itemsize, np.dtype(SUMS.get(str(dtype), dtype)).itemsize


def product_run(
    machine: str,
    program: pr.Matmul,
    inputs: pr.Arrays,
    timed: tuple[int, pr.Breakdown],
    stream: Iterable[pr.Line],
    **counts: int,
) -> pr.Run:
    """Return the run of C = A B; `timed` is its cycles and their parts.

    The order of the sums is NumPy's, not the machine's.
    """
    a = inputs["A"]
    b = inputs["B"]
    sums = SUMS.get(str(a.dtype), a.dtype)
    c = np.asarray(np.matmul(a.astype(sums), b.astype(sums)))
    cycles, parts = timed
    return pr.Run(
        machine=machine,
        program=program.name,
        values={"C": c},
        cycles=cycles,
        parts=parts,
        counters={"ops": program.ops, "bytes_used": a.nbytes + b.nbytes + c.nbytes, **counts},
        stream=tuple(stream),
    )


BUFFERS = 2
"""Tiles that are on chip at once, so that the next travels while one is computed."""


def tiled(port: Port, compute: float, moved_bytes: float, tiles: int) -> tuple[int, pr.Breakdown]:
    """Time `tiles` equal tiles that are moved in, computed and moved out.

    After the first tile one more finishes every max(move, compute, (latency + move + compute) /
    BUFFERS) cycles (all per tile). `compute` and `moved_bytes` are those of all tiles.
    """
    move = moved_bytes / port.rate_bytes_per_cycle
    latency = port.latency_cycles
    wait = latency * (1 + (tiles - 1) / BUFFERS)
    parts = pr.Breakdown(pr.whole(compute), pr.whole(move), pr.whole(wait))
    tile_move = move / tiles
    tile_compute = compute / tiles
    tile_cycles = latency + (move + compute) / tiles
    period = max(tile_move, tile_compute, tile_cycles / BUFFERS)
    # The three parts are rounded one by one: the time must not exceed their sum.
    cycles = min(pr.whole(tile_cycles + (tiles - 1) * period), parts.total)
    return cycles, parts
