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

Array: TypeAlias = NDArray[Any]
Arrays = Mapping[str, Array]
Operand: TypeAlias = str | float
"""A register, a scalar parameter of the kernel, or a number."""


@dataclass(frozen=True, slots=True)
class Op:
    """An arithmetic operation: its cost in ops, and its meaning."""

    ops: int
    apply: Callable[..., Array]


OPS: Mapping[str, Op] = MappingProxyType(
    {"add": Op(1, np.add), "mad": Op(2, lambda a, b, c: np.add(np.multiply(a, b), c))}
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
    """The body of `for i in range(n)`; `params` are scalars handed in beside the arrays.

    No element may read what another one writes; a `Total` ends the body.
    """

    name: str
    n: int
    body: tuple[Instr, ...]
    params: tuple[str, ...] = ()

    @property
    def ops(self) -> int:
        """Arithmetic operations for n elements if every element took every side of a branch."""
        ops_per_element = 0
        for instr in walk(self.body):
            if isinstance(instr, Arith):
                ops_per_element += OPS[instr.op].ops
            elif isinstance(instr, Total):
                ops_per_element += 1
        return ops_per_element * self.n


@dataclass(frozen=True, slots=True)
class Matmul:
    """C = A B with A of shape (m, k), B of shape (k, n); 2 m k n operations."""

    m: int
    k: int
    n: int
    name: str = "matmul"

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


def sources(instr: Instr) -> tuple[str, ...]:
    """Return the registers and parameters an instruction reads."""
    if isinstance(instr, Arith):
        return tuple(arg for arg in instr.args if isinstance(arg, str))
    if isinstance(instr, Load):
        return (instr.index,) if instr.index else ()
    return (instr.cond if isinstance(instr, Branch) else instr.src,)


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


def number_format(kernel: Kernel, inputs: Arrays) -> np.dtype[Any]:
    """Return the one number format of the arrays that arithmetic works on."""
    loads = [instr for instr in walk(kernel.body) if isinstance(instr, Load)]
    indices = {load.index for load in loads}
    arrays = (inputs[load.array] for load in loads if load.dst not in indices)
    return next(array.dtype for array in arrays if array.dtype != np.bool_)


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
