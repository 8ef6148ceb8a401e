"""Addresses as data: affine expressions of loop variables, buffers, and strided regions of them."""

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
Ranges = Mapping[str, int]
"""Trip count of every loop variable in scope."""


def whole(value: object, what: str) -> int:
    """Return a whole number as int; raise `ProgramError` that names `what` for anything else."""
    if type(value) is int:
        return value
    try:
        return operator.index(cast(SupportsIndex, value))
    except TypeError:
        raise ProgramError(f"{what}: a whole number", repr(value), "divide with //") from None


def up(value: int, unit: int) -> int:
    """Return value / unit rounded up."""
    return -(-value // unit)


@dataclass(frozen=True, slots=True)
class Affine:
    """const + sum(coefficient * loop variable): every address the hardware loops produce."""

    const: int = 0
    terms: tuple[tuple[str, int], ...] = ()

    def __add__(self, other: Affine | int) -> Affine:
        """Return the sum; anything with an `affine` form counts as an affine expression."""
        if not isinstance(other, Affine):
            if type(other) is not int and hasattr(other, "affine"):
                return self + cast(Affine, other.affine)
            step = other if type(other) is int else whole(other, "an address")
            return Affine(self.const + step, self.terms) if step else self
        if not other.terms:
            return Affine(self.const + other.const, self.terms) if other.const else self
        if not self.terms:
            return Affine(self.const + other.const, other.terms) if self.const else other
        merged = dict(self.terms)
        for var, coefficient in other.terms:
            merged[var] = merged.get(var, 0) + coefficient
        kept = sorted([(v, c) for v, c in merged.items() if c])
        return Affine(self.const + other.const, tuple(kept))

    __radd__ = __add__

    def __neg__(self) -> Affine:
        """Return the expression with its sign turned."""
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
            factor = whole(factor, "a factor of an address")
        if factor == 1 or not (self.const or self.terms):
            return self
        terms = tuple([(v, c * factor) for v, c in self.terms]) if factor else ()
        return Affine(self.const * factor, terms)

    __rmul__ = __mul__

    def modulo(self, n: int) -> Affine:
        """Return an expression with the same value modulo n and coefficients in 0 .. n-1."""
        terms = tuple([(v, c % n) for v, c in self.terms if c % n])
        return Affine(self.const % n, terms) if terms else constant(self.const % n)

    def at(self, env: Mapping[str, int]) -> int:
        """Return the value for loop variables `env`."""
        value = self.const
        for name, factor in self.terms:
            value += factor * env[name]
        return value

    def bounds(self, ranges: Ranges) -> tuple[int, int]:
        """Return the smallest and largest value over 0 <= variable < trip count."""
        low = high = self.const
        for name, factor in self.terms:
            step = factor * max(ranges[name] - 1, 0)
            low, high = (low + step, high) if step < 0 else (low, high + step)
        return low, high

    def __str__(self) -> str:
        """Print as `2*i+j+5`; the text form of programs reads it back."""
        parts = [v if c == 1 else f"{c}*{v}" for v, c in self.terms]
        if self.const or not parts:
            parts.append(str(self.const))
        return "+".join(parts).replace("+-", "-")


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
    return value if isinstance(value, Affine) else constant(whole(value, "an address"))


@cache
def numpy_type(dtype: str) -> Any:
    """Return the NumPy type of a number format such as "fp16"; raise `InputError` for others.

    "bf16" is `ml_dtypes.bfloat16`: fp32 with the lower 16 bits rounded away, to nearest even.
    """
    if dtype not in DTYPE_BYTES:
        raise InputError("a number format", repr(dtype), f"use {', '.join(DTYPE_BYTES)}")
    name = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}.get(dtype, dtype)
    return getattr(import_module("ml_dtypes" if dtype == "bf16" else "numpy"), name)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named array in one memory space: a GM tensor, or `slots` equal pieces of on-chip memory.

    `elements` counts one slot; slot s starts at byte `address + s * slot_bytes` (GM tensors have
    an address space of their own and one slot).
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
            raise ProgramError("a buffer name of letters, digits, _ and .", repr(self.name), "mend")
        for field in ("elements", "slots", "address", "slot_bytes"):
            if type(getattr(self, field)) is not int:
                count = whole(getattr(self, field), f"buffer {self.name}: {field}")
                object.__setattr__(self, field, count)
        if self.dtype not in DTYPE_BYTES:
            needed = f"buffer {self.name}: a number format"
            raise ProgramError(needed, self.dtype, f"use {', '.join(DTYPE_BYTES)}")
        if self.elements < 1 or self.slots < 1 or self.address < 0:
            needed = f"buffer {self.name}: elements >= 1, slots >= 1, address >= 0"
            got = f"{self.elements}, {self.slots}, {self.address}"
            raise ProgramError(needed, got, "check the tile size")
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
        """Bytes of all slots."""
        return self.slot_bytes * (self.slots - 1) + self.elements * self.itemsize

    def region(
        self, offset: Index = 0, sizes: Sizes = None, strides: Strides = None, slot: Index = 0
    ) -> Region:
        """Return a strided region; default: the whole slot, contiguous.

        `sizes`/`strides` count elements, outermost first; default strides are row-major.
        """
        if sizes is None:
            sizes = (self.elements,)
        shape = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        if strides is None:
            strides = _row_major(shape)
        return Region(self, as_affine(offset), shape, tuple(strides), as_affine(slot))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous array: each the product of the sizes behind it."""
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
        """Check that sizes and strides belong together; keep the slot modulo the slots."""
        sizes = self.sizes
        strides = self.strides
        if {type(sizes), type(strides), *map(type, sizes), *map(type, strides)} != {tuple, int}:
            for field, given in (("sizes", sizes), ("strides", strides)):
                counts = tuple(whole(n, f"region of {self.buffer.name}: {field}") for n in given)
                object.__setattr__(self, field, counts)
        if self.slot.terms or not 0 <= self.slot.const < self.buffer.slots:
            object.__setattr__(self, "slot", self.slot.modulo(self.buffer.slots))
        if not 0 < len(self.sizes) == len(self.strides) or min(self.sizes) < 1:
            needed = f"region of {self.buffer.name}: one stride per size, sizes >= 1"
            got = f"sizes {self.sizes}, strides {self.strides}"
            raise ProgramError(needed, got, "check the tile shape")

    def byte_at(self, env: Mapping[str, int]) -> int:
        """Return the byte of the memory, or of the tensor in GM, that the region begins with."""
        buffer = self.buffer
        slot = self.slot.at(env) % buffer.slots * buffer.slot_bytes if buffer.slots > 1 else 0
        return buffer.address + slot + self.offset.at(env) * buffer.itemsize

    def turned(self, by: Affine) -> Region:
        """Return the region `by` slots further."""
        return self._with(self.buffer, self.offset, (self.slot + by).modulo(self.buffer.slots))

    def on(self, buffer: Buffer, first: int = 0) -> Region:
        """Return the region in another buffer of as many slots, `first` elements further."""
        return self._with(buffer, self.offset + first, self.slot)

    def _with(self, buffer: Buffer, offset: Affine, slot: Affine) -> Region:
        # What is checked stays as it is: a program writes thousands of these.
        other = object.__new__(Region)
        put = object.__setattr__
        put(other, "buffer", buffer)
        put(other, "offset", offset)
        put(other, "sizes", self.sizes)
        put(other, "strides", self.strides)
        put(other, "slot", slot)
        return other

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
        """Length of the contiguous runs the region falls into: its burst length."""
        run = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size == 1:
                continue
            if stride != run:
                break
            run *= size
        return run * self.buffer.itemsize

    def extent(self, ranges: Ranges) -> tuple[int, int]:
        """Return the lowest and highest element touched over all iterations."""
        low, high = self.offset.bounds(ranges)
        for stride, size in zip(self.strides, self.sizes, strict=True):
            step = stride * (size - 1)
            low, high = (low + step, high) if step < 0 else (low, high + step)
        return low, high

    def __str__(self) -> str:
        """Print as `name[slot | offset | sizes:strides]`."""
        dims = ",".join(f"{n}:{s}" for n, s in zip(self.sizes, self.strides, strict=True))
        slot = f"{self.slot} | " if self.buffer.slots > 1 else ""
        return f"{self.buffer.name}[{slot}{self.offset} | {dims}]"


@dataclass(frozen=True, slots=True)
class Tile:
    """One slot of a queue, held between alloc/enqueue or dequeue/free."""

    buffer: Buffer
    slot: Index

    def region(self, offset: Index = 0, sizes: Sizes = None, strides: Strides = None) -> Region:
        """Return a region of this slot, as `Buffer.region`."""
        return self.buffer.region(offset, sizes, strides, slot=self.slot)
