"""Programs for every small machine: what to compute for element i, and nothing about how.

A `Kernel` is the body of `for i in range(n)`; a `Matmul` is C = A B. Both are plain data. Each
machine reads the same object, turns it into its own instructions, and counts those.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import MachineError

Array: TypeAlias = NDArray[Any]
Arrays = Mapping[str, Array]
Operand: TypeAlias = str | float
"""A register, a scalar parameter of the kernel, or a number."""
MAX_ELEMENTS = 1 << 27


@dataclass(frozen=True, slots=True)
class Op:
    """An arithmetic operation: its number of operands, its cost in ops, and its meaning."""

    operands: int
    ops: int
    apply: Callable[..., Array]


OPS: Mapping[str, Op] = MappingProxyType(
    {
        "add": Op(2, 1, np.add),
        "sub": Op(2, 1, np.subtract),
        "mul": Op(2, 1, np.multiply),
        "max": Op(2, 1, np.maximum),
        "min": Op(2, 1, np.minimum),
        "lt": Op(2, 1, np.less),
        "ge": Op(2, 1, np.greater_equal),
        "mad": Op(3, 2, lambda a, b, c: np.add(np.multiply(a, b), c)),
    }
)
"""`mad` is a*b + c and counts as two operations. It rounds twice, as NumPy does; the fused
multiply-add of real hardware rounds once, which can change the last bit."""


@dataclass(frozen=True, slots=True)
class Load:
    """`dst = array[stride*i]`, or `dst = array[index]` with the register `index`."""

    dst: str
    array: str
    stride: int = 1
    index: str = ""


@dataclass(frozen=True, slots=True)
class Store:
    """`array[i] = src`."""

    array: str
    src: str


@dataclass(frozen=True, slots=True)
class Arith:
    """`dst = op(*args)` in the number format of the operands."""

    dst: str
    op: str
    args: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """`if cond: then, else: other`, decided per element."""

    cond: str
    then: tuple["Instr", ...]
    other: tuple["Instr", ...] = ()


@dataclass(frozen=True, slots=True)
class Total:
    """`array[0] = sum of src over all i`; the order of the sum is the machine's own."""

    array: str
    src: str


Instr: TypeAlias = Load | Store | Arith | Branch | Total


@dataclass(frozen=True, slots=True)
class Kernel:
    """The body of `for i in range(n)`; `params` are scalars handed in beside the arrays."""

    name: str
    n: int
    body: tuple[Instr, ...]
    params: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse sizes, operations and addresses that make no sense."""
        if not 1 <= self.n <= MAX_ELEMENTS:
            needed = f"kernel {self.name} needs 1 to {MAX_ELEMENTS} elements"
            raise MachineError(needed, str(self.n), "change n")
        for instr in walk(self.body):
            _check(instr, self.name)
        _check_independent(self)
        totals = [instr for instr in walk(self.body) if isinstance(instr, Total)]
        if len(totals) > 1 or (totals and self.body[-1] != totals[0]):
            needed = f"kernel {self.name} may end in one Total, outside any Branch"
            raise MachineError(needed, f"{len(totals)} in the body", "split it into two kernels")

    @property
    def ops(self) -> int:
        """Arithmetic operations for n elements if every element took every side of a branch."""
        body = walk(self.body)
        each = (OPS[i.op].ops if isinstance(i, Arith) else isinstance(i, Total) for i in body)
        return sum(each) * self.n


@dataclass(frozen=True, slots=True)
class Matmul:
    """C = A B with A of shape (m, k), B of shape (k, n); 2 m k n operations."""

    m: int
    k: int
    n: int
    name: str = "matmul"

    def __post_init__(self) -> None:
        """Refuse an empty or a monstrous shape."""
        if min(self.m, self.k, self.n) < 1 or self.m * self.k * self.n > 1 << 36:
            needed = "matmul needs m, k, n of at least 1 and at most 2**36 multiply-adds"
            raise MachineError(needed, f"{self.m} x {self.k} x {self.n}", "choose another shape")

    @property
    def ops(self) -> int:
        """Multiplications and additions, 2 m k n."""
        return 2 * self.m * self.k * self.n


Program: TypeAlias = Kernel | Matmul


def walk(body: tuple[Instr, ...]) -> Iterator[Instr]:
    """Yield every instruction of a body, the sides of its branches included."""
    for instr in body:
        yield instr
        if isinstance(instr, Branch):
            yield from walk(instr.then)
            yield from walk(instr.other)


def _check(instr: Instr, name: str) -> None:
    if isinstance(instr, Arith):
        op = OPS.get(instr.op)
        if op is None:
            needed = f"kernel {name} needs an operation of {', '.join(OPS)}"
            raise MachineError(needed, repr(instr.op), "use one")
        if len(instr.args) != op.operands:
            needed = f"kernel {name}: {instr.op} needs {op.operands} operands"
            raise MachineError(needed, str(len(instr.args)), "correct the instruction")
    if isinstance(instr, Load) and instr.stride < 1:
        needed = f"kernel {name} needs a stride of at least 1"
        raise MachineError(needed, f"stride {instr.stride}", "correct the address")


def _check_independent(kernel: Kernel) -> None:
    """Refuse a kernel in which one element may read what another one writes."""
    stored = {i.array for i in walk(kernel.body) if isinstance(i, Store)}
    for instr in walk(kernel.body):
        if isinstance(instr, Load) and instr.array in stored and (instr.stride > 1 or instr.index):
            needed = f"kernel {kernel.name} needs every access to the stored array {instr.array!r}"
            raise MachineError(f"{needed} at element i", text(instr), "store into another array")


def text(instr: Instr) -> str:
    """Return one instruction as a short line: `mad y, a, x, y`."""
    if isinstance(instr, Load):
        scaled = "i" if instr.stride == 1 else f"{instr.stride}*i"
        return f"ld {instr.dst}, {instr.array}[{instr.index or scaled}]"
    if isinstance(instr, Store):
        return f"st {instr.array}[i], {instr.src}"
    if isinstance(instr, Arith):
        return f"{instr.op} {instr.dst}, {', '.join(str(arg) for arg in instr.args)}"
    if isinstance(instr, Branch):
        return f"if {instr.cond}"
    return f"sum {instr.array}, {instr.src}"


# -- check the inputs of a kernel before anything runs ---------------------------------------------
def check_inputs(kernel: Kernel, inputs: Arrays) -> None:
    """Raise `MachineError` unless every parameter and every array is there and long enough."""
    for name in kernel.params:
        if name not in inputs or np.ndim(inputs[name]) != 0:
            raise MachineError(f"{kernel.name} needs a number {name!r}", _have(inputs), "add it")
    for instr in walk(kernel.body):
        if not isinstance(instr, Load):
            continue
        need = 1 if instr.index else instr.stride * (kernel.n - 1) + 1
        array = inputs.get(instr.array)
        if array is None or np.ndim(array) != 1 or len(array) < need:
            got = _have(inputs) if array is None else f"shape {np.shape(array)}"
            needed = f"{kernel.name} needs an array {instr.array!r} of one axis and {need} elements"
            raise MachineError(needed, got, "pass it in inputs")


def _have(inputs: Arrays) -> str:
    return "inputs " + (", ".join(sorted(inputs)) or "that are empty")


def number_format(kernel: Kernel, inputs: Arrays) -> np.dtype[Any]:
    """Return the one number format of the arrays that arithmetic works on."""
    loads = [instr for instr in walk(kernel.body) if isinstance(instr, Load)]
    indices = {load.index for load in loads}
    names = [load.array for load in loads if load.dst not in indices]
    kinds = {np.dtype(inputs[n].dtype) for n in names if inputs[n].dtype != np.bool_}
    if len(kinds) > 1:
        needed = f"{kernel.name} needs all its arrays in one number format"
        got = ", ".join(sorted(str(kind) for kind in kinds))
        raise MachineError(needed, got, "convert them first")
    return kinds.pop() if kinds else np.dtype(np.float32)


# -- the outcome of a run: values, cycles, and cycles by cause -------------------------------------
@dataclass(frozen=True, slots=True)
class Breakdown:
    """Cycles of compute, of moving bytes, and of waiting for a latency that nothing covers."""

    compute: int
    move: int
    wait: int

    @property
    def longest(self) -> int:
        """The largest part: no schedule of the same instructions can be faster."""
        return max(self.compute, self.move, self.wait)

    @property
    def total(self) -> int:
        """The sum of the parts: what a machine that overlaps nothing needs."""
        return self.compute + self.move + self.wait

    @property
    def bound_by(self) -> str:
        """The name of the largest part."""
        return max(self.__slots__, key=lambda name: getattr(self, name))


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction of the machine's own stream, and how often it is issued."""

    text: str
    count: int


@dataclass(frozen=True, slots=True)
class Run:
    """What one machine did with one program.

    `parts` are the cycles each cause would need alone, so
    `parts.longest <= cycles <= parts.total`; `bar` splits the cycles that really passed.
    `counters` holds whole numbers: instructions, ops, bytes_used, bytes_moved and the machine's
    own, such as divergent warps.
    """

    machine: str
    program: str
    values: Arrays
    cycles: int
    parts: Breakdown
    counters: Mapping[str, int]
    stream: tuple[Line, ...]

    def __post_init__(self) -> None:
        """Refuse a time outside its bracket, and freeze the mappings."""
        if not self.parts.longest <= self.cycles <= self.parts.total:
            raise MachineError(
                f"{self.machine}: cycles must lie between the longest part and the sum of parts",
                f"{self.cycles} for {self.parts}",
                "the machine's timing rule is wrong: report it",
            )
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))
        object.__setattr__(self, "counters", MappingProxyType(dict(self.counters)))

    @property
    def bar(self) -> Breakdown:
        """The cycles that passed: computing, else only moving, else neither; they add up."""
        move = min(self.parts.move, self.cycles - self.parts.compute)
        return Breakdown(self.parts.compute, move, self.cycles - self.parts.compute - move)

    @property
    def instructions(self) -> int:
        """Instructions fetched and issued, whatever number of elements each one touches."""
        return self.counters["instructions"]

    @property
    def ops_per_cycle(self) -> float:
        """Useful arithmetic operations per cycle reached."""
        return self.counters["ops"] / self.cycles


def whole(cycles: float) -> int:
    """Round a time up to whole cycles, forgiving the dust of floating-point sums."""
    return math.ceil(round(cycles, 6))


def tiled(
    compute: float, move: float, latency_cycles: float, tiles: int, buffers: int
) -> tuple[int, Breakdown]:
    """Time `tiles` equal tiles that are moved in, computed and moved out.

    With one buffer each tile waits for the one before: everything adds up. With b > 1 buffers the
    next tiles travel while one is computed, so after the first tile one more finishes every
    max(move, compute, (latency + move + compute) / b) cycles (all per tile).
    """
    wait = latency_cycles * (1 + (tiles - 1) / buffers)
    parts = Breakdown(whole(compute), whole(move), whole(wait))
    if buffers == 1:
        return parts.total, parts
    per_tile = latency_cycles + (move + compute) / tiles
    period = max(move / tiles, compute / tiles, per_tile / buffers)
    return min(whole(per_tile + (tiles - 1) * period), parts.total), parts
