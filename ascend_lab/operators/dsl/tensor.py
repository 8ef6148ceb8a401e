"""Tensors, and the scalar expressions that compute their elements.

The tensor y[i] = exp(x[i]) + 1 has the axis i and an expression of two calls, vexp and vadds, on
the element x[i]. Each call is one operation of the vector unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

from ascend_lab.errors import ScheduleError, ShapeError, TypeMismatchError
from ascend_lab.machine.chip import DTYPE_BYTES
from ascend_lab.machine.isa import Affine, var

Shape = tuple[int, ...]


FLOATS = ("fp16", "bf16", "fp32")
DTYPES = (*FLOATS, "int8", "uint8", "int32")
ALIASES = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
}
# Smallest and largest value of the whole-number formats.
WHOLE = {"int8": (-128, 127), "uint8": (0, 255), "int32": (-(2**31), 2**31 - 1)}
# Vector operations that the chip has in float formats only.
FLOAT_ONLY = ("vexp", "vln", "vsqrt", "vrsqrt", "vrec", "vdiv")


def dtype_of(name: str) -> str:
    """Return the short name of a number format ("float16" -> "fp16")."""
    short = ALIASES.get(name, name)
    if short not in DTYPES:
        raise TypeMismatchError("a number format", repr(name), f"use one of {', '.join(DTYPES)}")
    return short


class Expr:
    """Base class of expressions, on which `+ - * /` and unary minus build vector operations."""

    __slots__ = ()

    @property
    def dtype(self) -> str:
        """Number format of the value."""
        raise NotImplementedError

    def __add__(self, other: Expr | float) -> Call:
        return binary("vadd", self, other)

    __radd__ = __add__

    def __sub__(self, other: Expr | float) -> Call:
        return binary("vsub", self, other)

    def __rsub__(self, other: float) -> Call:
        return binary("vadd", -self, other)  # number - x = -x + number

    def __mul__(self, other: Expr | float) -> Call:
        return binary("vmul", self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Expr | float) -> Call:
        return binary("vdiv", self, other)

    def __rtruediv__(self, other: float) -> Call:
        return binary("vmul", unary("vrec", self), other)  # number / x = (1 / x) * number

    def __neg__(self) -> Call:
        return binary("vmul", self, -1.0)

    def __lt__(self, other: object) -> bool:
        """Refuse: elements have no values while a formula is written."""
        remedy = "use te.maximum, te.minimum, or te.vcmp and te.select on whole tensors"
        raise TypeMismatchError("a formula without comparisons by < and >", str(self), remedy)

    __gt__ = __le__ = __ge__ = __lt__


@dataclass(frozen=True, slots=True)
class Load(Expr):
    """An element of a tensor while an expression is written: `a[i, j + 1]`.

    `view` is the shape the index refers to, where it is not the tensor's own (a reshape).
    """

    tensor: Tensor
    index: tuple[Affine, ...]
    view: tuple[int, ...] = ()

    @property
    def dtype(self) -> str:
        """Number format of the tensor."""
        return self.tensor.dtype


@dataclass(frozen=True, slots=True)
class Read(Expr):
    """An element of a tensor inside a schedule, in which tensors are known by their names.

    `format` is the number format, `view` as in `Load`.
    """

    source: str
    format: str
    index: tuple[Affine, ...]
    view: tuple[int, ...] = ()

    @property
    def dtype(self) -> str:
        """Number format of the tensor."""
        return self.format

    @property
    def axis_names(self) -> set[str]:
        """Names of the axes in the index: i and j for x[8 i + j, 0]."""
        return {name for entry in self.index for name, _ in entry.terms}

    def __str__(self) -> str:
        return f"{self.source}[{', '.join(map(str, self.index))}]"


@dataclass(frozen=True, slots=True)
class Call(Expr):
    """One vector operation; `number` is its scalar operand, `mode` a rounding or comparison.

    `elements` is derived from the operands: the tensor elements the operation reads, left to right.
    """

    op: str
    args: tuple[Expr, ...]
    format: str
    number: float | None = None
    mode: str = ""
    elements: tuple[Load | Read, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Collect the elements of all operands once, since every stage asks for them often."""
        # The class is frozen: a derived field is set past its own check.
        object.__setattr__(self, "elements", tuple([e for a in self.args for e in leaves(a)]))

    @property
    def dtype(self) -> str:
        """Number format of the result."""
        return self.format

    def __str__(self) -> str:
        scalars = [self.mode] if self.mode else []
        if self.number is not None:
            scalars.append(f"{self.number:g}")
        if self.op == "vconv":
            scalars.append(self.format)
        return f"{self.op}({', '.join([*map(str, self.args), *scalars])})"


def binary(op: str, left: Expr, right: Expr | float) -> Call:
    """Return left op right; a number on the right becomes the scalar form of the operation."""
    if isinstance(right, Expr):
        if left.dtype != right.dtype:
            needed = f"{op}: operands of one number format"
            got = f"{left.dtype} and {right.dtype}"
            raise TypeMismatchError(needed, got, "cast one with cast_to")
        _check_float(op, left)
        return Call(op, (left, right), left.dtype)
    scalar = float(right)
    # x + 2 needs no tensor of twos: the number is a part of the instruction.
    scalar_forms = {"vadd": "vadds", "vmul": "vmuls", "vmax": "vmaxs", "vmin": "vmins"}
    # The chip has no scalar subtraction or division: x - 2 = x + (-2), and x / 2 = x * 0.5.
    scalar_op = op
    if op == "vsub":
        scalar_op = "vadd"
        scalar = -scalar
    if op == "vdiv":
        _check_float(op, left)
        scalar_op = "vmul"
        scalar = 1.0 / scalar
    low, high = WHOLE.get(left.dtype, (-math.inf, math.inf))
    # x * 0.5 of an int32 tensor would round 0.5 to 0 and return zeros.
    if left.dtype in WHOLE and not (low <= scalar <= high and scalar == int(scalar)):
        needed = f"{scalar_op}: a whole number from {low} to {high} for {left.dtype}"
        raise TypeMismatchError(needed, f"{scalar:g}", "cast to a float format first")
    return Call(scalar_forms[scalar_op], (left,), left.dtype, scalar)


def unary(op: str, value: Expr, *, mode: str = "", dtype: str = "") -> Call:
    """Return op(value); `dtype` is the result's format where it differs (a cast, vconv)."""
    _check_float(op, value)
    return Call(op, (value,), dtype or value.dtype, None, mode)


def _check_float(op: str, value: Expr) -> None:
    if op in FLOAT_ONLY and value.dtype not in FLOATS:
        needed = f"{op}: a float format ({', '.join(FLOATS)})"
        raise TypeMismatchError(needed, value.dtype, "cast with cast_to")


def leaves(expr: Expr) -> tuple[Load | Read, ...]:
    """Return the tensor elements an expression reads, left to right."""
    if isinstance(expr, Call):
        return expr.elements
    return (expr,) if isinstance(expr, Load | Read) else ()


def rewrite(expr: Expr, leaf: Callable[[Any], Expr]) -> Expr:
    """Return the expression with every tensor element, a Load or a Read, replaced by leaf(it)."""
    if isinstance(expr, Call):
        args = tuple([rewrite(arg, leaf) for arg in expr.args])
        unchanged = all(map(is_, args, expr.args))  # an untouched operation keeps its identity
        return expr if unchanged else Call(expr.op, args, expr.format, expr.number, expr.mode)
    return leaf(expr) if isinstance(expr, Load | Read) else expr


def swap(expr: Expr, replaced: Read, replacement: Read) -> Expr:
    """Return the expression in which the element `replacement` replaces the element `replaced`."""
    return rewrite(expr, lambda element: replacement if element == replaced else element)


def apply_index(expr: Expr, values: Mapping[str, Affine]) -> Expr:
    """Return an expression with some of its axes replaced by affine expressions.

    x[2 i + 1] with {"i": 16 o + l} becomes x[32 o + 2 l + 1].
    """

    def substituted(index: Affine) -> Affine:
        # An axis that is not replaced stands for itself.
        terms = (values.get(n, Affine(0, ((n, 1),))) * factor for n, factor in index.terms)
        return sum(terms, Affine(index.const))

    def leaf(element: Read) -> Expr:
        return replace(element, index=tuple(map(substituted, element.index)))

    return rewrite(expr, leaf)


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop of a formula: its name and trip count; `reduce` if the formula folds over it."""

    name: str
    extent: int
    reduce: bool = False

    @property
    def affine(self) -> Affine:
        """The axis as an index."""
        return var(self.name)

    def __add__(self, other: Affine | Axis | int) -> Affine:
        return self.affine + getattr(other, "affine", other)

    __radd__ = __add__

    def __mul__(self, factor: int) -> Affine:
        return self.affine * factor

    __rmul__ = __mul__

    def __sub__(self, other: Affine | Axis | int) -> Affine:
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
    """An operator with a hand-written kernel: conv2d, transpose, gather, pad, ..."""

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
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) != len(self.shape):
            needed = f"{self.label}: {len(self.shape)} indices for shape {self.shape}"
            raise ShapeError(needed, str(len(indices)), "give one index per dimension")
        entries: list[Any] = [getattr(i, "affine", i) for i in indices]
        return Load(self, tuple(i if isinstance(i, Affine) else Affine(int(i)) for i in entries))

    def __repr__(self) -> str:
        return f"Tensor({self.label}, {self.shape}, {self.dtype})"

    def __getattr__(self, name: str) -> Any:
        """Raise an error that explains a common mistake: a tensor in place of a schedule."""
        if name in ("then", "state", "steps"):
            remedy = "te.create_schedule(tensor, chip) makes one"
            raise ScheduleError("a schedule", f"the tensor {self.label}", remedy)
        raise AttributeError(name)

    @property
    def label(self) -> str:
        """The name; without one, the operation that made the tensor (for messages)."""
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
        sources = [e.tensor for e in leaves(self.body.expr) if isinstance(e, Load)]
        return tuple(dict.fromkeys(sources))


def renamed(tensor: Tensor, name: str) -> Tensor:
    """Return the tensor under another name."""
    return replace(tensor, name=name)


def topological(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return every tensor the outputs need, producers first."""
    order: dict[Tensor, None] = {}

    def visit(tensor: Tensor) -> None:
        if tensor not in order:
            # Producers first; a tensor that two others read is visited once.
            for source in tensor.inputs:
                visit(source)
            order[tensor] = None

    for tensor in outputs:
        visit(tensor)
    return tuple(order)


def unique_names(tensors: Sequence[Tensor]) -> dict[Tensor, str]:
    """Give every tensor a unique name: the user's, else its operation's with a number (exp_2)."""
    taken: set[str] = set()
    for tensor in tensors:
        if tensor.name and tensor.name in taken:
            raise ShapeError("one name per tensor", tensor.name, "rename one")
        taken.add(tensor.name)
    names: dict[Tensor, str] = {}
    for tensor in tensors:
        name = tensor.name or tensor.hint
        number = 1
        # Two results of te.vexp without names become vexp and vexp_2; only the user's own names may
        # not repeat.
        while not tensor.name and name in taken:
            number += 1
            name = f"{tensor.hint}_{number}"
        taken.add(name)
        names[tensor] = name
    return names
