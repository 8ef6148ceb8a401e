"""Tensors from formulas: `te.compute`, and what a formula may use on elements."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ascend_lab.dsl import tensor
from ascend_lab.errors import ShapeError
from ascend_lab.isa import var

AXES = "ijklmnpq"


def check_shape(shape: Sequence[int] | int, what: str = "shape") -> tensor.Shape:
    """Return a shape as a tuple of whole numbers >= 1; raise `ShapeError` otherwise."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(not isinstance(n, int) and not hasattr(n, "__index__") for n in sizes):
        raise ShapeError(f"{what}: whole numbers", str(sizes), "give static sizes")
    sizes = tuple(int(n) for n in sizes)
    if not sizes or any(n < 1 for n in sizes):
        raise ShapeError(
            f"{what}: at least one dimension, sizes >= 1", str(sizes), "use (1,) for a scalar"
        )
    return sizes


def placeholder(shape: Sequence[int], dtype: str = "fp16", name: str = "") -> tensor.Tensor:
    """Return an input tensor."""
    return tensor.Tensor(
        name, check_shape(shape, name or "placeholder"), tensor.dtype_of(dtype), None, "x"
    )


def reduce_axis(extent: int, name: str = "k") -> tensor.Axis:
    """Return an axis to fold over."""
    return tensor.Axis(name, check_shape((extent,), f"reduce axis {name}")[0], True)


@dataclass(frozen=True, slots=True)
class Fold:
    """A reduction while a formula is written: te.sum(a[i, k], axis=k)."""

    kind: str
    expr: tensor.Expr
    axes: tuple[tensor.Axis, ...]

    def _refuse(self, other: object) -> "Fold":
        """Refuse arithmetic: a fold is the whole of a formula."""
        needed = f"te.{self.kind}(...) as the whole formula"
        got = "arithmetic around it"
        raise ShapeError(needed, got, "make the fold a tensor of its own and compute with that")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse


def compute(
    shape: Sequence[int],
    formula: Callable[..., tensor.Expr | Fold],
    name: str = "",
    hint: str = "y",
) -> tensor.Tensor:
    """Return out[i, j, ...] = formula(i, j, ...); the axes take the lambda's parameter names."""
    sizes = check_shape(shape, name or hint)
    names = list(inspect.signature(formula).parameters)
    if len(names) != len(sizes):
        needed = f"{name or hint}: a formula of {len(sizes)} indices for shape {sizes}"
        raise ShapeError(needed, str(len(names)), "give one parameter per dimension")
    return computed(sizes, names, formula(*(var(n) for n in names)), name, hint)


def computed(
    sizes: tensor.Shape, names: Sequence[str], value: tensor.Expr | Fold, name: str, hint: str
) -> tensor.Tensor:
    """Return the tensor of a formula already applied to its axes `names`."""
    axes = tuple(tensor.Axis(n, size) for n, size in zip(names, sizes, strict=True))
    if isinstance(value, Fold):
        body = tensor.Compute(axes, value.expr, value.kind, value.axes)
        clash = {a.name for a in axes} & {a.name for a in value.axes}
        if clash:
            raise ShapeError("different names for axes", str(sorted(clash)), "rename one")
    elif isinstance(value, tensor.Expr):
        body = tensor.Compute(axes, value)
    else:
        raise ShapeError("a formula of tensor elements", repr(value), "write a[i] + b[i]")
    _check_bounds(body, name or hint)
    return tensor.Tensor(name, sizes, body.expr.dtype, body, hint)


def axis_names(count: int) -> list[str]:
    """Names of the axes of a whole-tensor operation: i, j, k, ..."""
    return list(AXES[:count]) if count <= len(AXES) else [f"i{n}" for n in range(count)]


def copied(a: tensor.Load, shape: tensor.Shape, names: Sequence[str], hint: str) -> tensor.Tensor:
    """Return the tensor whose elements are copies of a[...]."""
    return computed(shape, names, tensor.Call("vcopy", (a,), a.dtype), "", hint)


def _check_bounds(body: tensor.Compute, what: str) -> None:
    ranges = {a.name: a.extent for a in (*body.axes, *body.reduce)}
    for element in tensor.leaves(body.expr):
        assert isinstance(element, tensor.Load)
        shape = element.view or element.tensor.shape
        for number, (index, size) in enumerate(zip(element.index, shape, strict=True)):
            for name, _ in index.terms:
                if name not in ranges:
                    needed = f"{what}: indices of its own axes {', '.join(ranges)}"
                    raise ShapeError(needed, name, "fold over it with te.sum(..., axis=...)")
            low, high = index.bounds(ranges)
            if low < 0 or high >= size:
                needed = f"{what}: index {number} of {element.tensor.label} within 0..{size - 1}"
                raise ShapeError(needed, f"{low}..{high}", "shrink the axis or pad the tensor")


def _fold(kind: str) -> Callable[[tensor.Expr, tensor.Axis | Sequence[tensor.Axis]], Fold]:
    def fold(expr: tensor.Expr, axis: tensor.Axis | Sequence[tensor.Axis]) -> Fold:
        axes = (axis,) if isinstance(axis, tensor.Axis) else tuple(axis)
        bad = next((a for a in axes if not isinstance(a, tensor.Axis) or not a.reduce), None)
        if bad is not None or not axes:
            raise ShapeError(f"te.{kind}: axes from te.reduce_axis", repr(bad), "make one")
        return Fold(kind, expr, axes)

    fold.__name__ = kind
    fold.__doc__ = f"Return the {kind} of an element over axes made by `reduce_axis`."
    return fold


sum, max, min, prod = (_fold(kind) for kind in ("sum", "max", "min", "prod"))  # noqa: A001


def _function(op: str, result: str) -> Callable[[tensor.Expr], tensor.Call]:
    def function(value: tensor.Expr) -> tensor.Call:
        return tensor.unary(op, value)

    function.__doc__ = f"Return {result} of an element."
    return function


exp, log = _function("vexp", "exp"), _function("vln", "the natural logarithm")
sqrt, rsqrt = _function("vsqrt", "the square root"), _function("vrsqrt", "1 / sqrt")
relu = _function("vrelu", "max(x, 0)")
absolute = _function("vabs", "the absolute value")


def maximum(left: tensor.Expr, right: tensor.Expr | float) -> tensor.Call:
    """Return the larger of two elements, or of an element and a number."""
    return tensor.binary("vmax", left, right)


def minimum(left: tensor.Expr, right: tensor.Expr | float) -> tensor.Call:
    """Return the smaller of two elements, or of an element and a number."""
    return tensor.binary("vmin", left, right)
