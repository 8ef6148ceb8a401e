"""Addresses as data: affine expressions of loop variables, buffers, and strided buffer regions.

Element (i0, i1) of a region with strides (s0, s1) lies at offset + i0 s0 + i1 s1 of its buffer; the
offset is affine in the variables of the loops around, e.g. 256*i + 16*j + 8.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, SupportsIndex, cast

from ascend_lab.errors import InputError, ProgramError
from ascend_lab.machine.chip import DTYPE_BYTES

NAME = re.compile(r"[\w.]+")
TripCounts = Mapping[str, int]
"""Trip count of every loop variable in scope."""


def whole_number(value: object, subject: str) -> int:
    """Return a whole number as int; for anything else raise `ProgramError` about the `subject`.

    NumPy integers are accepted; 4.0 is not.
    """
    if type(value) is int:
        return value
    # whatever can index a list counts as whole: np.int64(4) does, 4.0 and "4" do not
    try:
        return operator.index(cast(SupportsIndex, value))
    except TypeError:
        raise ProgramError(f"{subject}: a whole number", repr(value), "divide with //") from None


def ceil_div(value: int, unit: int) -> int:
    """Return value / unit rounded up."""
    # // rounds down: -7 // 2 = -4, so 7 / 2 rounded up is 4
    return -(-value // unit)


@dataclass(frozen=True, slots=True)
class Affine:
    """const + sum(coefficient * loop variable): the form of every address in a loop nest.

    `terms` are sorted by variable and hold no coefficient of 0, so that equal expressions compare
    equal.
    """

    const: int = 0
    terms: tuple[tuple[str, int], ...] = ()

    def __add__(self, other: Affine | int) -> Affine:
        """Return the sum; an object with an attribute `affine` is replaced by that expression."""
        if not isinstance(other, Affine):
            if type(other) is not int and hasattr(other, "affine"):
                return self + cast(Affine, other.affine)
            number = other if type(other) is int else whole_number(other, "an address")
            return Affine(self.const + number, self.terms) if number else self
        # the most frequent sums have a constant on one side: no terms to merge
        if not other.terms:
            return Affine(self.const + other.const, self.terms) if other.const else self
        if not self.terms:
            return Affine(self.const + other.const, other.terms) if self.const else other
        # (i + 2*j) + (-i + j) = 3*j: the coefficient of i is 0 and is dropped
        merged = dict(self.terms)
        for var, coefficient in other.terms:
            merged[var] = merged.get(var, 0) + coefficient
        nonzero = sorted([(v, c) for v, c in merged.items() if c])
        return Affine(self.const + other.const, tuple(nonzero))

    __radd__ = __add__

    def __neg__(self) -> Affine:
        """Return the negative of the expression."""
        return self * -1

    def __sub__(self, other: Affine | int) -> Affine:
        """Return the difference of two affine expressions."""
        return self + -1 * getattr(other, "affine", other)

    def __rsub__(self, other: int) -> Affine:
        """Return an integer minus the expression."""
        return -self + other

    def __mul__(self, factor: int) -> Affine:
        """Return the expression scaled by an integer."""
        if type(factor) is not int:
            factor = whole_number(factor, "a factor of an address")
        if factor == 1 or not (self.const or self.terms):
            return self
        terms = tuple([(v, c * factor) for v, c in self.terms]) if factor else ()
        return Affine(self.const * factor, terms)

    __rmul__ = __mul__

    def modulo(self, n: int) -> Affine:
        """Return an expression with the same value modulo n and coefficients in 0 .. n-1.

        For n = 2, 3*i + 2*j + 5 becomes i + 1.
        """
        # Python's % is never negative: for n = 4, -1*i becomes 3*i
        terms = tuple([(v, c % n) for v, c in self.terms if c % n])
        return Affine(self.const % n, terms) if terms else constant(self.const % n)

    def at(self, env: Mapping[str, int]) -> int:
        """Return the value for loop variables `env`."""
        value = self.const
        for name, factor in self.terms:
            value += factor * env[name]
        return value

    def bounds(self, ranges: TripCounts) -> tuple[int, int]:
        """Return the smallest and largest value over 0 <= variable < trip count.

        Each term is least at one end of its range and greatest at the other: -2*i + 8 with i < 4
        goes from 2 to 8.
        """
        low = self.const
        high = self.const
        for name, factor in self.terms:
            # a loop of no passes has no last value: it counts as if its variable were 0
            reach = factor * max(ranges[name] - 1, 0)
            low += min(reach, 0)
            high += max(reach, 0)
        return low, high

    def __str__(self) -> str:
        """Print as `2*i+j+5`; the text form of programs reads it back."""
        summands = [v if c == 1 else f"{c}*{v}" for v, c in self.terms]
        if self.const or not summands:
            summands.append(str(self.const))
        # i + -2*j is printed as i-2*j
        return "+".join(summands).replace("+-", "-")


@lru_cache(4096)
def constant(value: int) -> Affine:
    """Return a number as an affine expression."""
    return Affine(value)


@lru_cache(4096)
def var(name: str) -> Affine:
    """Return the loop variable `name` as an affine expression."""
    return Affine(0, ((name, 1),))


Index = Affine | int
Sizes = Sequence[int] | int | None
Strides = Sequence[int] | None


def as_affine(value: Index) -> Affine:
    """Return `value` unchanged if affine, else the constant."""
    return value if isinstance(value, Affine) else constant(whole_number(value, "an address"))


@cache
def numpy_type(dtype: str) -> Any:
    """Return the NumPy type of a number format such as "fp16"; raise `InputError` for others.

    "bf16" is `ml_dtypes.bfloat16`: an fp32 number rounded, to nearest even, to its upper 16 bits.
    """
    if dtype not in DTYPE_BYTES:
        raise InputError("a number format", repr(dtype), f"use {', '.join(DTYPE_BYTES)}")
    # `dtype` itself serves where both names agree: int8, uint8, int32
    name = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}.get(dtype, dtype)
    return getattr(import_module("ml_dtypes" if dtype == "bf16" else "numpy"), name)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named array in one memory space: a GM tensor, or `slots` equal pieces of on-chip memory.

    `elements` counts one slot; slot s starts at byte `address + s * slot_bytes`. A GM tensor has
    one slot (a ring has several), and a separate address space that begins at 0.
    """

    name: str
    space: str
    dtype: str
    elements: int
    slots: int = 1
    address: int = 0
    slot_bytes: int = 0

    def __post_init__(self) -> None:
        """Check name, counts and number format; fill in the default slot pitch."""
        if not NAME.fullmatch(self.name):
            raise ProgramError(
                "a buffer name of letters, digits, _ and .", repr(self.name), "correct"
            )
        for field in ("elements", "slots", "address", "slot_bytes"):
            if type(getattr(self, field)) is not int:
                count = whole_number(getattr(self, field), f"buffer {self.name}: {field}")
                object.__setattr__(self, field, count)
        if self.dtype not in DTYPE_BYTES:
            needed = f"buffer {self.name}: a number format"
            raise ProgramError(needed, self.dtype, f"use {', '.join(DTYPE_BYTES)}")
        if self.elements < 1 or self.slots < 1 or self.address < 0:
            needed = f"buffer {self.name}: elements >= 1, slots >= 1, address >= 0"
            got = f"{self.elements}, {self.slots}, {self.address}"
            raise ProgramError(needed, got, "check the tile size")
        # no pitch: each slot begins where the one before ends
        if self.slot_bytes == 0:
            object.__setattr__(self, "slot_bytes", self.elements * self.itemsize)
        if self.slot_bytes < self.elements * self.itemsize:
            raise ProgramError(
                f"buffer {self.name}: slots at least {self.elements * self.itemsize} bytes apart",
                str(self.slot_bytes),
                "leave the pitch out",
            )

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes from the first slot to the end of the last, which needs no padding behind it."""
        # 3 slots of 100 bytes with a pitch of 128 take 2 * 128 + 100 = 356 bytes
        return self.slot_bytes * (self.slots - 1) + self.elements * self.itemsize

    def region(
        self, offset: Index = 0, sizes: Sizes = None, strides: Strides = None, slot: Index = 0
    ) -> Region:
        """Return a strided region; default: the whole slot, contiguous.

        `sizes`/`strides` count elements, outermost first; default strides are row-major. A slot
        beyond the last one wraps around: slot 5 of a queue of 2 is slot 1.
        """
        if sizes is None:
            sizes = (self.elements,)
        shape = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        if strides is None:
            strides = _row_major(shape)
        return Region(self, as_affine(offset), shape, tuple(strides), as_affine(slot))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous array: (12, 4, 1) for the sizes (2, 3, 4)."""
    # from the last size to the second: the outermost size is a factor of no stride
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(strides[::-1])


@dataclass(frozen=True, slots=True)
class Region:
    """Elements offset + sum(index_d * strides[d]) of slot (slot mod slots) of a buffer."""

    buffer: Buffer
    offset: Affine
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    slot: Affine = Affine()

    def __post_init__(self) -> None:
        """Check that sizes and strides belong together; reduce the slot modulo `slots`."""
        sizes = self.sizes
        strides = self.strides
        # tuples of plain ints, the usual case, are recognised by a single comparison
        if {type(sizes), type(strides), *map(type, sizes), *map(type, strides)} != {tuple, int}:
            for field, values in (("sizes", sizes), ("strides", strides)):
                subject = f"region of {self.buffer.name}: {field}"
                counts = tuple(whole_number(n, subject) for n in values)
                object.__setattr__(self, field, counts)
        if self.slot.terms or not 0 <= self.slot.const < self.buffer.slots:
            object.__setattr__(self, "slot", self.slot.modulo(self.buffer.slots))
        if not 0 < len(self.sizes) == len(self.strides) or min(self.sizes) < 1:
            needed = f"region of {self.buffer.name}: one stride per size, sizes >= 1"
            got = f"sizes {self.sizes}, strides {self.strides}"
            raise ProgramError(needed, got, "check the tile shape")

    def byte_at(self, env: Mapping[str, int]) -> int:
        """Return the region's first byte, counted from the start of the memory or GM tensor."""
        buffer = self.buffer
        slot_start = self.slot.at(env) % buffer.slots * buffer.slot_bytes if buffer.slots > 1 else 0
        return buffer.address + slot_start + self.offset.at(env) * buffer.itemsize

    def slots_further(self, by: Affine) -> Region:
        """Return the same region in the slot `by` slots further on, modulo the number of slots."""
        return self._copy(self.buffer, self.offset, (self.slot + by).modulo(self.buffer.slots))

    def in_buffer(self, buffer: Buffer, first: int = 0) -> Region:
        """Return the region in another buffer with as many slots, `first` elements further on."""
        return self._copy(buffer, self.offset + first, self.slot)

    def _copy(self, buffer: Buffer, offset: Affine, slot: Affine) -> Region:
        # Without `__post_init__`, because a program has thousands of regions: sizes and strides
        # are those of a checked region, and both callers pass a slot below the buffer's `slots`.
        copy = object.__new__(Region)
        put = object.__setattr__
        put(copy, "buffer", buffer)
        put(copy, "offset", offset)
        put(copy, "sizes", self.sizes)
        put(copy, "strides", self.strides)
        put(copy, "slot", slot)
        return copy

    @property
    def space(self) -> str:
        """The memory space the region lies in."""
        return self.buffer.space

    @property
    def elements(self) -> int:
        """Number of elements addressed."""
        return math.prod(self.sizes)

    @property
    def size_bytes(self) -> int:
        """Number of bytes addressed."""
        return self.elements * self.buffer.itemsize

    @property
    def run_bytes(self) -> int:
        """Length of the contiguous runs that the region consists of: its burst length.

        Sizes (4, 2, 16) with strides (64, 16, 1) are 4 runs of 2 x 16 elements: 64 bytes in fp16.
        """
        run = 1
        # innermost axis first: a run goes on while the next stride is its length so far
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size == 1:  # an axis of one element takes no step, whatever its stride
                continue
            if stride != run:
                break
            run *= size
        return run * self.buffer.itemsize

    def extent(self, ranges: TripCounts) -> tuple[int, int]:
        """Return the lowest and highest element touched over all iterations of the loops."""
        low, high = self.offset.bounds(ranges)
        # sizes (4, 16) with strides (64, 1): the last element is 3 * 64 + 15 = 207 after the first
        for stride, size in zip(self.strides, self.sizes, strict=True):
            reach = stride * (size - 1)
            low += min(reach, 0)
            high += max(reach, 0)
        return low, high

    def __str__(self) -> str:
        """Print as `name[slot | offset | sizes:strides]`."""
        dims = ",".join(f"{n}:{s}" for n, s in zip(self.sizes, self.strides, strict=True))
        slot = f"{self.slot} | " if self.buffer.slots > 1 else ""
        return f"{self.buffer.name}[{slot}{self.offset} | {dims}]"


@dataclass(frozen=True, slots=True)
class Tile:
    """One slot of a queue; the producer has it from alloc to enqueue, the consumer until free."""

    buffer: Buffer
    slot: Index

    def region(self, offset: Index = 0, sizes: Sizes = None, strides: Strides = None) -> Region:
        """Return a region of this slot, as `Buffer.region`."""
        return self.buffer.region(offset, sizes, strides, slot=self.slot)
