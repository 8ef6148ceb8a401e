"""Tensors: placeholders, and tensors computed by one formula over their indices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.dsl.expr import Expr, Load, Read, leaves, rewrite, substitute
from ascend_lab.errors import ScheduleError, ShapeError
from ascend_lab.isa import Affine, var

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop of a formula: its name and trip count; `reduce` if the formula folds over it."""

    name: str
    extent: int
    reduce: bool = False

    @property
    def affine(self) -> Affine:
        """The axis as an index expression."""
        return var(self.name)

    def __add__(self, other: Affine | Axis | int) -> Affine:
        """Return axis + other, an index."""
        return self.affine + getattr(other, "affine", other)

    __radd__ = __add__

    def __mul__(self, factor: int) -> Affine:
        """Return axis * factor, an index."""
        return self.affine * factor

    __rmul__ = __mul__

    def __sub__(self, other: Affine | Axis | int) -> Affine:
        """Return axis - other, an index."""
        return self.affine - other  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Compute:
    """out[axes] = expr, or the fold ("sum", "max", "min", "prod") of expr over `reduce`."""

    axes: tuple[Axis, ...]
    expr: Expr
    fold: str = ""
    reduce: tuple[Axis, ...] = ()


@dataclass(frozen=True, slots=True)
class Template:
    """An operator with a hand-written kernel of its own: conv2d, transpose, gather, pad, ..."""

    kind: str
    inputs: tuple[Tensor, ...]
    attrs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor by name, shape, number format and the formula that computes it (None: an input)."""

    name: str
    shape: Shape
    dtype: str
    body: Compute | Template | None = None
    hint: str = field(default="", repr=False)

    def __getitem__(self, index: Any) -> Load:
        """Return the element at an index of axes, affine expressions and numbers."""
        given = index if isinstance(index, tuple) else (index,)
        if len(given) != len(self.shape):
            raise ShapeError(
                f"{self.label}: {len(self.shape)} indices for shape {self.shape}",
                str(len(given)),
                "give one index per dimension",
            )
        return Load(self, tuple(_index(i) for i in given))

    def __repr__(self) -> str:
        """Return name, shape and number format."""
        return f"Tensor({self.label}, {self.shape}, {self.dtype})"

    def __getattr__(self, name: str) -> Any:
        """Explain the commonest slip: a tensor where a schedule belongs."""
        if name in ("then", "state", "steps"):
            raise ScheduleError(
                "a schedule",
                f"the tensor {self.label}",
                "te.create_schedule(tensor, chip) makes one",
            )
        raise AttributeError(name)

    @property
    def label(self) -> str:
        """The name, or what it is called until it has one."""
        return self.name or self.hint or "tensor"

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes in GM."""
        return self.elements * DTYPE_BYTES[self.dtype]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors its formula reads, each once, in order of appearance."""
        if isinstance(self.body, Template):
            return tuple(dict.fromkeys(self.body.inputs))
        if self.body is None:
            return ()
        found = [e.tensor for e in leaves(self.body.expr) if isinstance(e, Load)]
        return tuple(dict.fromkeys(found))


def _index(value: Any) -> Affine:
    if isinstance(value, Axis):
        return var(value.name)
    return value if isinstance(value, Affine) else Affine(int(value))


def renamed(tensor: Tensor, name: str) -> Tensor:
    """Return the tensor under another name."""
    return replace(tensor, name=name)


def topological(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return every tensor the outputs need, producers first."""
    order: dict[Tensor, None] = {}

    def visit(tensor: Tensor) -> None:
        if tensor not in order:
            for source in tensor.inputs:
                visit(source)
            order[tensor] = None

    for tensor in outputs:
        visit(tensor)
    return tuple(order)


def unique_names(tensors: Sequence[Tensor]) -> dict[Tensor, str]:
    """Give every tensor a name of its own: the given one, else the operation's with a number."""
    taken: set[str] = set()
    for tensor in tensors:
        if tensor.name and tensor.name in taken:
            raise ShapeError("one name per tensor", tensor.name, "rename one")
        taken.add(tensor.name)
    names: dict[Tensor, str] = {}
    for tensor in tensors:
        name, number = tensor.name or tensor.hint, 1
        while not tensor.name and name in taken:
            number += 1
            name = f"{tensor.hint}_{number}"
        taken.add(name)
        names[tensor] = name
    return names


def apply_index(expr: Expr, values: Mapping[str, Affine]) -> Expr:
    """Return an expression with its axes replaced by affine expressions."""

    def leaf(element: Read) -> Expr:
        return replace(element, index=tuple(substitute(i, values) for i in element.index))

    return rewrite(expr, leaf)
