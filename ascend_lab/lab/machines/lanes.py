"""What a group of lanes does to a memory: sectors touched, banks hit, bytes that move.

Device memory is read in sectors of 32 bytes, four to a line of 128 bytes; on-chip shared memory
is cut into banks that serve one word each per cycle (NVIDIA Nsight Compute documentation).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ascend_lab.errors import MachineError
from ascend_lab.lab.machines.program import (
    OPS,
    Arith,
    Array,
    Branch,
    Instr,
    Kernel,
    Load,
    Operand,
    Store,
    check_inputs,
    number_format,
    text,
)


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

    def __post_init__(self) -> None:
        """Refuse rates and sizes that no memory has."""
        if self.rate_bytes_per_cycle <= 0 or self.latency_cycles < 0:
            needed = "a port needs a positive rate and a latency of at least 0"
            got = f"{self.rate_bytes_per_cycle} bytes/cycle, {self.latency_cycles} cycles"
            raise MachineError(needed, got, "correct them")
        if self.sector_bytes < 1 or self.line_bytes % self.sector_bytes:
            needed = "a line must be a whole number of sectors"
            got = f"{self.line_bytes} and {self.sector_bytes} bytes"
            raise MachineError(needed, got, "use 128 and 32, for example")


def units_touched(addresses: Array, active: Array, unit_bytes: int) -> Array:
    """Return per group how many distinct aligned units of `unit_bytes` its active lanes touch.

    `addresses` (bytes) and `active` have shape (groups, lanes); the result has shape (groups,).
    With unit_bytes = 32 these are the sectors of a coalesced access.
    """
    return np.asarray(np.count_nonzero(_units(addresses, active, unit_bytes)[1], axis=1))


def _units(addresses: Array, active: Array, unit_bytes: int) -> tuple[Array, Array]:
    """Return the units of each group, sorted, and where a new one begins that a lane touches."""
    units = np.sort(np.where(active, addresses // unit_bytes, np.int64(-1)), axis=1)
    fresh = np.ones_like(units, dtype=bool)
    fresh[:, 1:] = units[:, 1:] != units[:, :-1]
    return units, fresh & (units >= 0)


def distinct_units(addresses: Array, active: Array, unit_bytes: int) -> int:
    """Return how many distinct units all active lanes touch together: a cache that never evicts."""
    return int(np.unique(addresses[active] // unit_bytes).size)


def bank_ways(addresses: Array, active: Array, banks: int = 32, bank_bytes: int = 4) -> Array:
    """Return per group how many cycles a shared-memory access takes: 1 without a conflict.

    A bank serves one word of `bank_bytes` per cycle, to every lane that wants that same word, so
    the answer is the largest number of distinct words wanted from one bank (0 for an idle group).
    """
    words, fresh = _units(addresses, active, bank_bytes)
    groups = np.broadcast_to(np.arange(words.shape[0])[:, None], words.shape)
    slots = (groups * banks + words % banks)[fresh]
    per_bank = np.bincount(slots.astype(np.intp), minlength=words.shape[0] * banks)
    return np.asarray(per_bank.reshape(words.shape[0], banks).max(axis=1, initial=0))


# Execute a kernel in groups of lanes: values, active masks, and what each group issued.
#
# Scalar, vector and warp machines are one machine with a different width: one lane, the lanes of a
# vector register, the 32 threads of a warp. Lanes of a group share the instruction; a branch turns
# some of them off. The Python loop runs over the body, NumPy over all groups at once, so the cost
# of executing does not depend on n in Python steps.


@dataclass(frozen=True, slots=True)
class Timing:
    """What an instruction costs a group: issue slots and cycles until its result can be used.

    With `slot_bytes` a memory access takes one issue slot per aligned unit of that size it
    touches; 0 means one slot whatever it touches. With `cache_bytes` distinct lines of that size
    are counted over the whole run. `branches`: a group none of whose lanes takes a side does not
    issue it; without them every group issues both sides under masks and moves all its lanes.
    """

    arith_cycles: int
    load_cycles: int
    slot_bytes: int = 0
    cache_bytes: int = 0
    branches: bool = True


@dataclass(frozen=True, slots=True)
class Issue:
    """One instruction of the body: how many groups issued it, with how many lanes active."""

    text: str
    kind: str
    groups: int
    lanes: int
    ops: int = 0
    array: str = ""
    bytes_used: int = 0
    sectors: int = 0
    lines: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """All that executing a kernel tells: values, issues, and per group slots and stalls."""

    values: dict[str, Array]
    issues: tuple[Issue, ...]
    slots: Array
    stalls: Array
    divergent_groups: int
    summand: Array | None
    active: Array

    def count(self, what: str, *kinds: str) -> int:
        """Add up one field of the issues, of the given kinds or of all."""
        return sum(getattr(i, what) for i in self.issues if not kinds or i.kind in kinds)


@dataclass(slots=True)
class _State:
    kernel: Kernel
    inputs: Mapping[str, Array]
    width: int
    port: Port
    timing: Timing
    dtype: np.dtype[Any]
    element: Array
    regs: dict[str, Array] = field(default_factory=dict)
    defined: dict[str, Array] = field(default_factory=dict)
    ready: dict[str, Array] = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)
    divergent: int = 0
    summand: Array | None = None
    clock: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    slots: Array = field(default_factory=lambda: np.zeros(0, np.int64))


def execute(
    kernel: Kernel, inputs: Mapping[str, Array], width: int, port: Port, timing: Timing
) -> Trace:
    """Run the kernel in groups of `width` lanes and return values and counts.

    Raises `MachineError` for missing or short inputs, a load past the end of an array, and a
    register that is read where no instruction has written it.
    """
    check_inputs(kernel, inputs)
    groups = -(-kernel.n // width)
    element = np.arange(groups * width, dtype=np.int64).reshape(groups, width)
    zeros = np.zeros(groups, np.int64)
    state = _State(kernel, inputs, width, port, timing, number_format(kernel, inputs), element)
    state.clock, state.slots = zeros, zeros.copy()
    active = element < kernel.n
    with np.errstate(over="ignore", invalid="ignore"):  # fp16 and int8 overflow as hardware does
        _run(state, kernel.body, active, np.ones(groups, bool))
    return Trace(
        state.values,
        tuple(state.issues),
        state.slots,
        state.clock - state.slots,
        state.divergent,
        state.summand,
        active,
    )


def _run(state: _State, body: tuple[Instr, ...], active: Array, issued: Array) -> None:
    for instr in body:
        if isinstance(instr, Load):
            _load(state, instr, active, issued)
        elif isinstance(instr, Store):
            _store(state, instr, active, issued)
        elif isinstance(instr, Arith):
            _arith(state, instr, active, issued)
        elif isinstance(instr, Branch):
            _branch(state, instr, active, issued)
        else:
            state.summand = _read(state, instr.src, active)
            src = state.summand
            state.values[instr.array] = np.zeros(1, src.dtype)
            _issue(state, instr, "total", active, issued, (instr.src,), ops=1)


def _load(state: _State, instr: Load, active: Array, issued: Array) -> None:
    array = state.inputs[instr.array]
    if instr.index:
        index = _read(state, instr.index, active).astype(np.int64)
        outside = active & ((index < 0) | (index >= len(array)))
        if outside.any():
            raise MachineError(
                f"{state.kernel.name}: {text(instr)} needs an index from 0 to {len(array) - 1}",
                str(int(index[outside][0])),
                "correct the index array",
            )
    else:
        index = instr.stride * state.element + instr.offset
    value = array[np.where(active, index, 0)]
    sources = (instr.index,) if instr.index else ()
    counts = _access(state, instr.array, index, array.itemsize, active)
    _issue(state, instr, "load", active, issued, sources, **counts)
    _write(state, instr.dst, value, active, issued, state.timing.load_cycles)


def _store(state: _State, instr: Store, active: Array, issued: Array) -> None:
    value = _read(state, instr.src, active)
    index = instr.stride * state.element + instr.offset
    if instr.array not in state.values:
        size = instr.stride * (state.kernel.n - 1) + instr.offset + 1
        old = state.inputs.get(instr.array)
        state.values[instr.array] = np.zeros(size, value.dtype) if old is None else old.copy()
    state.values[instr.array][index[active]] = value[active]
    counts = _access(state, instr.array, index, value.itemsize, active)
    _issue(state, instr, "store", active, issued, (instr.src,), **counts)


def _arith(state: _State, instr: Arith, active: Array, issued: Array) -> None:
    op = OPS[instr.op]
    value = op.apply(*(_read(state, arg, active) for arg in instr.args))
    sources = tuple(arg for arg in instr.args if isinstance(arg, str))
    _issue(state, instr, "arith", active, issued, sources, ops=op.ops)
    full = np.broadcast_to(value, active.shape)
    _write(state, instr.dst, full, active, issued, state.timing.arith_cycles)


def _branch(state: _State, instr: Branch, active: Array, issued: Array) -> None:
    cond = _read(state, instr.cond, active).astype(bool)
    _issue(state, instr, "branch", active, issued, (instr.cond,))
    sides = [(instr.then, active & cond), (instr.other, active & ~cond)]
    takes = [mask.any(axis=1) for _, mask in sides]
    if instr.then and instr.other:
        state.divergent += int(np.count_nonzero(takes[0] & takes[1]))
    for (body, mask), taken in zip(sides, takes, strict=True):
        _run(state, body, mask, taken if state.timing.branches else issued)


def _read(state: _State, name: Operand, active: Array) -> Array:
    if not isinstance(name, str):
        return np.asarray(name, state.dtype)
    if name in state.regs:
        if bool((active & ~state.defined[name]).any()):
            raise _undefined(state, name, "on some lanes only")
        return state.regs[name]
    if name in state.kernel.params:
        return np.asarray(state.inputs[name]).astype(state.dtype)
    raise _undefined(state, name, "nowhere")


def _undefined(state: _State, name: str, where: str) -> MachineError:
    return MachineError(
        f"{state.kernel.name} needs register {name!r} written before it is read",
        f"written {where}",
        "write it on every path that leads to the read",
    )


def _write(
    state: _State, name: str, value: Array, active: Array, issued: Array, latency_cycles: int
) -> None:
    old = state.regs.get(name)
    state.regs[name] = value if old is None else np.where(active, value, old)
    state.defined[name] = active if old is None else active | state.defined[name]
    done = state.clock + latency_cycles - 1
    state.ready[name] = np.where(issued, done, state.ready.get(name, np.int64(0)))


def _issue(
    state: _State,
    instr: Instr,
    kind: str,
    active: Array,
    issued: Array,
    sources: tuple[str, ...],
    ops: int = 0,
    slots: Array | int = 1,
    **counts: Any,
) -> None:
    """Advance the clock of every issuing group and record the instruction.

    A group issues in order: an instruction waits until the one before has left and its source
    registers are ready.
    """
    start = state.clock
    for name in sources:
        start = np.maximum(start, state.ready.get(name, np.int64(0)))
    state.clock = np.where(issued, start + slots, state.clock)
    state.slots = state.slots + np.where(issued, slots, 0)
    groups, lanes = int(np.count_nonzero(issued)), int(np.count_nonzero(active))
    state.issues.append(Issue(text(instr), kind, groups, lanes, ops * lanes, **counts))


def _access(
    state: _State, array: str, index: Array, itemsize: int, active: Array
) -> dict[str, Any]:
    """Count what one memory instruction touches: bytes used, sectors, lines, issue slots."""
    timing, address = state.timing, index * itemsize
    touched = active if timing.branches else state.element < state.kernel.n
    counts: dict[str, Any] = {
        "array": array,
        "bytes_used": itemsize * int(np.count_nonzero(active)),
        "sectors": int(units_touched(address, touched, state.port.sector_bytes).sum()),
    }
    if timing.slot_bytes:
        counts["slots"] = np.maximum(units_touched(address, touched, timing.slot_bytes), 1)
    if timing.cache_bytes:
        counts["lines"] = distinct_units(address, touched, timing.cache_bytes)
    return counts
