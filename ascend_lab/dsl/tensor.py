"""Tensors: placeholders, and tensors computed by one formula over their indices."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.dsl.expr import Expr, Load, dtype_of, leaves, rewrite, substitute
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


def check_shape(shape: Sequence[int] | int, what: str = "shape") -> Shape:
    """Return a shape as a tuple of whole numbers >= 1; raise `ShapeError` otherwise."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(not isinstance(n, int) and not hasattr(n, "__index__") for n in sizes):
        raise ShapeError(f"{what}: whole numbers", str(sizes), "give static sizes")
    sizes = tuple(int(n) for n in sizes)
    if not sizes or min(sizes) < 1:
        raise ShapeError(
            f"{what}: at least one dimension, sizes >= 1", str(sizes), "use (1,) for a scalar"
        )
    return sizes


def placeholder(shape: Sequence[int], dtype: str = "fp16", name: str = "") -> Tensor:
    """Return an input tensor."""
    return Tensor(name, check_shape(shape, name or "placeholder"), dtype_of(dtype), None, "x")


def reduce_axis(extent: int, name: str = "k") -> Axis:
    """Return an axis to fold over."""
    return Axis(name, check_shape((extent,), f"reduce axis {name}")[0], True)


@dataclass(frozen=True, slots=True)
class Fold:
    """A reduction while a formula is written: te.sum(a[i, k], axis=k)."""

    kind: str
    expr: Expr
    axes: tuple[Axis, ...]

    def _refuse(self, other: object) -> Fold:
        """Refuse arithmetic: a fold is the whole of a formula."""
        raise ShapeError(
            f"te.{self.kind}(...) as the whole formula",
            "arithmetic around it",
            "make the fold a tensor of its own and compute with that",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse


def compute(
    shape: Sequence[int], formula: Callable[..., Expr | Fold], name: str = "", hint: str = "y"
) -> Tensor:
    """Return out[i, j, ...] = formula(i, j, ...); the axes take the lambda's parameter names."""
    sizes = check_shape(shape, name or hint)
    names = list(inspect.signature(formula).parameters)
    if len(names) != len(sizes):
        raise ShapeError(
            f"{name or hint}: a formula of {len(sizes)} indices for shape {sizes}",
            str(len(names)),
            "give one parameter per dimension",
        )
    return computed(sizes, names, formula(*(var(n) for n in names)), name, hint)


def computed(
    sizes: Shape, names: Sequence[str], value: Expr | Fold, name: str, hint: str
) -> Tensor:
    """Return the tensor of a formula already applied to its axes `names`."""
    axes = tuple(Axis(n, size) for n, size in zip(names, sizes, strict=True))
    if isinstance(value, Fold):
        body = Compute(axes, value.expr, value.kind, value.axes)
        clash = {a.name for a in axes} & {a.name for a in value.axes}
        if clash:
            raise ShapeError("different names for axes", str(sorted(clash)), "rename one")
    elif isinstance(value, Expr):
        body = Compute(axes, value)
    else:
        raise ShapeError("a formula of tensor elements", repr(value), "write a[i] + b[i]")
    _check_bounds(body, name or hint)
    return Tensor(name, sizes, body.expr.dtype, body, hint)


def _check_bounds(body: Compute, what: str) -> None:
    ranges = {a.name: a.extent for a in (*body.axes, *body.reduce)}
    for element in leaves(body.expr):
        assert isinstance(element, Load)
        for number, (index, size) in enumerate(
            zip(element.index, element.view or element.tensor.shape, strict=True)
        ):
            unknown = next((n for n, _ in index.terms if n not in ranges), None)
            if unknown is not None:
                raise ShapeError(
                    f"{what}: indices of its own axes {', '.join(ranges)}",
                    unknown,
                    "fold over it with te.sum(..., axis=...)",
                )
            low, high = index.bounds(ranges)
            if low < 0 or high >= size:
                raise ShapeError(
                    f"{what}: index {number} of {element.tensor.label} within 0..{size - 1}",
                    f"{low}..{high}",
                    "shrink the axis or pad the tensor",
                )


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
    taken: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.name:
            if tensor.name in taken:
                raise ShapeError("one name per tensor", tensor.name, "rename one")
            taken[tensor.name] = tensor
    names: dict[Tensor, str] = {}
    for tensor in tensors:
        name, number = tensor.name or tensor.hint, 1
        while not tensor.name and name in taken:
            number += 1
            name = f"{tensor.hint}_{number}"
        taken[name] = tensor
        names[tensor] = name
    return names


def apply_index(expr: Expr, values: Mapping[str, Affine]) -> Expr:
    """Return an expression with its axes replaced by affine expressions."""
    table = dict(values)

    def leaf(element: Any) -> Expr:
        index = tuple(substitute(i, table) for i in element.index)
        result: Expr = replace(element, index=index)
        return result

    return rewrite(expr, leaf)
