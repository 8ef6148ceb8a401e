"""Tensors from formulas on elements: `te.compute`, and the operations that go element by element.

`te.compute((64, 100), lambda i, j: te.exp(a[i, j]) + b[j])` is a tensor of 64 x 100 numbers. The
functions on elements (exp, maximum, te.sum, ...) are for such formulas. The others take and return
whole tensors, under the published names of TBE: vadd, vrelu, broadcast, ...
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ascend_lab.errors import ShapeError, TypeMismatchError
from ascend_lab.machine.isa import Affine, var
from ascend_lab.operators.dsl import tensor
from ascend_lab.operators.dsl.tensor import FLOATS, Call, Expr, Shape, Tensor, binary, unary

Operation = TypeVar("Operation", bound=Callable[..., Any])
AXES = "ijklmnpq"


def check_shape(shape: Sequence[int] | int, what: str = "shape") -> Shape:
    """Return a shape as a tuple of whole numbers >= 1; raise `ShapeError` otherwise."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    # NumPy's integers have `__index__`, floats such as 4.0 do not
    if any(not isinstance(n, int) and not hasattr(n, "__index__") for n in sizes):
        raise ShapeError(f"{what}: whole numbers", str(sizes), "give static sizes")
    sizes = tuple(int(n) for n in sizes)
    if not sizes or any(n < 1 for n in sizes):
        needed = f"{what}: at least one dimension, sizes >= 1"
        raise ShapeError(needed, str(sizes), "use (1,) for a scalar")
    return sizes


def placeholder(shape: Sequence[int], dtype: str = "fp16", name: str = "") -> Tensor:
    """Return an input tensor."""
    return Tensor(
        name, check_shape(shape, name or "placeholder"), tensor.dtype_of(dtype), None, "x"
    )


def reduce_axis(extent: int, name: str = "k") -> tensor.Axis:
    """Return an axis to fold over."""
    return tensor.Axis(name, check_shape((extent,), f"reduce axis {name}")[0], True)


@dataclass(frozen=True, slots=True)
class Fold:
    """A reduction inside a formula: te.sum(a[i, k], axis=k)."""

    kind: str
    expr: Expr
    axes: tuple[tensor.Axis, ...]

    def _refuse(self, other: object) -> "Fold":
        """Refuse arithmetic: a fold must be the entire formula."""
        needed = f"te.{self.kind}(...) as the whole formula"
        got = "arithmetic around it"
        raise ShapeError(needed, got, "make the fold a tensor of its own and compute with that")

    # te.sum(...) * 2 would need a second operation behind the fold
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse


def compute(
    shape: Sequence[int],
    formula: Callable[..., Expr | Fold],
    name: str = "",
    hint: str = "y",
) -> Tensor:
    """Return out[i, j, ...] = formula(i, j, ...); the axes are named as the lambda's parameters."""
    sizes = check_shape(shape, name or hint)
    # lambda i, j: a[i, j] + b[j] names the axes i and j.
    names = list(inspect.signature(formula).parameters)
    # A formula of two indices for a matrix, of three for a batch of matrices.
    if len(names) != len(sizes):
        needed = f"{name or hint}: a formula of {len(sizes)} indices for shape {sizes}"
        raise ShapeError(needed, str(len(names)), "give one parameter per dimension")
    return computed(sizes, names, formula(*(var(n) for n in names)), name, hint)


def computed(
    sizes: Shape, names: Sequence[str], value: Expr | Fold, name: str, hint: str
) -> Tensor:
    """Return the tensor of a formula already applied to its axes `names`."""
    axes = tuple(tensor.Axis(n, size) for n, size in zip(names, sizes, strict=True))
    if isinstance(value, Fold):
        body = tensor.Compute(axes, value.expr, value.kind, value.axes)
        # y[i] = sum over i of x[i] would mean two different things by i.
        repeated_names = {a.name for a in axes} & {a.name for a in value.axes}
        if repeated_names:
            raise ShapeError("different names for axes", str(sorted(repeated_names)), "rename one")
    elif isinstance(value, Expr):
        body = tensor.Compute(axes, value)
    else:
        raise ShapeError("a formula of tensor elements", repr(value), "write a[i] + b[i]")
    _check_bounds(body, name or hint)
    return Tensor(name, sizes, body.expr.dtype, body, hint)


def axis_names(count: int) -> list[str]:
    """Return the names of the axes of a whole-tensor operation: i, j, k, ..."""
    return list(AXES[:count]) if count <= len(AXES) else [f"i{n}" for n in range(count)]


def copied(a: tensor.Load, shape: Shape, names: Sequence[str], hint: str) -> Tensor:
    """Return the tensor whose elements are copies of a[...]."""
    return computed(shape, names, Call("vcopy", (a,), a.dtype), "", hint)


def _check_bounds(body: tensor.Compute, label: str) -> None:
    """Raise `ShapeError` unless every index stays within its tensor for all values of the axes.

    With i < 8, x[2 i + 1] covers 1..15, so x needs at least 16 elements.
    """
    extents = {a.name: a.extent for a in (*body.axes, *body.reduce)}
    for element in tensor.leaves(body.expr):
        assert isinstance(element, tensor.Load)
        shape = element.view or element.tensor.shape
        for dimension, (index, size) in enumerate(zip(element.index, shape, strict=True)):
            for name, _ in index.terms:
                if name not in extents:
                    needed = f"{label}: indices of its own axes {', '.join(extents)}"
                    raise ShapeError(needed, name, "fold over it with te.sum(..., axis=...)")
            low, high = index.bounds(extents)
            if low < 0 or high >= size:
                needed = (
                    f"{label}: index {dimension} of {element.tensor.label} within 0..{size - 1}"
                )
                raise ShapeError(needed, f"{low}..{high}", "shrink the axis or pad the tensor")


def _fold_function(kind: str) -> Callable[[Expr, tensor.Axis | Sequence[tensor.Axis]], Fold]:
    """Return the function te.sum, te.max, ... that folds an element over one or several axes."""

    def fold(expr: Expr, axis: tensor.Axis | Sequence[tensor.Axis]) -> Fold:
        axes = (axis,) if isinstance(axis, tensor.Axis) else tuple(axis)
        invalid_axis = next(
            (a for a in axes if not isinstance(a, tensor.Axis) or not a.reduce), None
        )
        if invalid_axis is not None or not axes:
            raise ShapeError(f"te.{kind}: axes from te.reduce_axis", repr(invalid_axis), "make one")
        return Fold(kind, expr, axes)

    fold.__name__ = kind
    fold.__doc__ = f"Return the {kind} of an element over axes made by `reduce_axis`."
    return fold


fold_sum, fold_max, fold_min, fold_prod = map(_fold_function, ("sum", "max", "min", "prod"))


def _element_function(op: str, result: str) -> Callable[[Expr], Call]:
    """Return the function of one element that the vector operation `op` computes."""

    def function(value: Expr) -> Call:
        # writing te.exp(a) instead of te.exp(a[i, j]) is the most common mistake
        if isinstance(value, Tensor):
            needed = f"{op}: an element, such as a[i, j]"
            got = f"the tensor {value.label}"
            raise TypeMismatchError(needed, got, "te.vexp, te.vrelu and their like take tensors")
        return unary(op, value)

    function.__doc__ = f"Return {result} of an element."
    return function


exp = _element_function("vexp", "exp")
log = _element_function("vln", "the natural logarithm")
sqrt = _element_function("vsqrt", "the square root")
rsqrt = _element_function("vrsqrt", "1 / sqrt")
relu = _element_function("vrelu", "max(x, 0)")
absolute = _element_function("vabs", "the absolute value")


def maximum(left: Expr, right: Expr | float) -> Call:
    """Return the larger of two elements, or of an element and a number."""
    return binary("vmax", left, right)


def minimum(left: Expr, right: Expr | float) -> Call:
    """Return the smaller of two elements, or of an element and a number."""
    return binary("vmin", left, right)


# -- whole tensors, element by element -------------------------------------------------------------
def _elementwise(name: str, tensors: Sequence[Tensor], formula: Callable[..., Expr]) -> Tensor:
    """Return out[index] = formula(a[index], b[index], ...) for tensors of one shape."""
    example = tensors[0]
    for operand in tensors:
        if not isinstance(operand, Tensor):
            raise TypeMismatchError(
                f"{name}: tensors", repr(operand), "use vadds, vmuls for numbers"
            )
        if operand.shape != example.shape:
            needed = f"{name}: operands of one shape"
            got = f"{example.label} {example.shape} and {operand.label} {operand.shape}"
            raise ShapeError(needed, got, "broadcast them to one shape first")
    names = axis_names(len(example.shape))
    index = tuple(map(var, names))
    return computed(example.shape, names, formula(*(t[index] for t in tensors)), "", name)


def _with_name(name: str, doc: str) -> Callable[[Operation], Operation]:
    """Return a decorator that gives an operation its published name and docstring."""

    def rename(operation: Operation) -> Operation:
        operation.__name__ = name
        operation.__doc__ = doc
        return operation

    return rename


def _check_whole_numbers(op: str, a: Tensor, whole_numbers: bool) -> None:
    if whole_numbers and a.dtype in FLOATS:
        raise TypeMismatchError(f"{op}: a whole-number format", a.dtype, "cast to int32")


def _binary_operation(
    op: str, description: str, whole_numbers: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    @_with_name(op, f"Return {op}(a, b) {description}.")
    def operation(a: Tensor, b: Tensor) -> Tensor:
        _check_whole_numbers(op, a, whole_numbers)
        return _elementwise(op, (a, b), lambda x, y: binary(op, x, y))

    return operation


def _unary_operation(
    op: str, name: str = "", whole_numbers: bool = False
) -> Callable[[Tensor], Tensor]:
    name = name or op

    @_with_name(name, f"Return {name}(a) element by element.")
    def operation(a: Tensor) -> Tensor:
        _check_whole_numbers(op, a, whole_numbers)
        return _elementwise(name, (a,), lambda x: unary(op, x))

    return operation


def _scalar_operation(op: str) -> Callable[[Tensor, float], Tensor]:
    @_with_name(f"{op}s", f"Return {op}(a, number) element by element.")
    def operation(a: Tensor, number: float) -> Tensor:
        return _elementwise(f"{op}s", (a,), lambda x: binary(op, x, number))

    return operation


def _rounding_operation(name: str, mode: str) -> Callable[[Tensor], Tensor]:
    @_with_name(name, f"Return {name}(a) as int32.")
    def operation(a: Tensor) -> Tensor:
        if a.dtype not in FLOATS:
            raise TypeMismatchError(f"{name}: a float format", a.dtype, "it is whole already")
        return _elementwise(name, (a,), lambda x: unary("vconv", x, mode=mode, dtype="int32"))

    return operation


vadd, vsub, vmul, vdiv, vmax, vmin = (
    _binary_operation(op, "element by element; equal shapes and formats")
    for op in ("vadd", "vsub", "vmul", "vdiv", "vmax", "vmin")
)
vand, vor = (
    _binary_operation(op, "bit by bit; whole-number formats", True) for op in ("vand", "vor")
)
vadds, vmuls, vmaxs, vmins = map(_scalar_operation, ("vadd", "vmul", "vmax", "vmin"))
vabs, vexp, vsqrt, vrsqrt = map(_unary_operation, ("vabs", "vexp", "vsqrt", "vrsqrt"))
vrec, vrelu = map(_unary_operation, ("vrec", "vrelu"))
vlog = _unary_operation("vln", "vlog")
vnot = _unary_operation("vnot", whole_numbers=True)
floor = _rounding_operation("floor", "floor")
ceil = _rounding_operation("ceil", "ceil")
round = _rounding_operation("round", "rint")  # noqa: A001 - the published name


def vcmp(a: Tensor, b: Tensor, op: str) -> Tensor:
    """Return 1 where a op b holds, else 0, in a's format; op is gt, ge, lt, le, eq or ne."""
    if op not in ("gt", "ge", "lt", "le", "eq", "ne"):
        raise TypeMismatchError("vcmp: gt, ge, lt, le, eq or ne", repr(op), "choose one")
    return _elementwise(
        "vcmp", (a, b), lambda x, y: replace(_call_of_one_format("vcmp", x, y), mode=op)
    )


def select(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return a where the condition is not 0, else b; all three have one number format."""
    return _elementwise(
        "vsel", (condition, a, b), lambda c, x, y: _call_of_one_format("vsel", c, x, y)
    )


def _call_of_one_format(op: str, *args: Expr) -> Call:
    """Return op(args); raise `TypeMismatchError` unless all operands have one number format."""
    formats = [arg.dtype for arg in args]
    if len(set(formats)) > 1:
        raise TypeMismatchError(f"{op}: one number format", " and ".join(formats), "cast one")
    return Call(op, args, formats[0])


def cast_to(a: Tensor, dtype: str) -> Tensor:
    """Return a in another number format, rounded to nearest even; whole numbers saturate."""
    target = tensor.dtype_of(dtype)
    if target == a.dtype:
        return a
    return _elementwise("cast_to", (a,), lambda x: unary("vconv", x, mode="rint", dtype=target))


def broadcast_shapes(a: Sequence[int], b: Sequence[int]) -> Shape:
    """Return the shape two shapes broadcast to (NumPy rule); raise `ShapeError` with both."""
    rank = max(len(a), len(b))  # (3, 1) and (4,): both of rank 2, (3, 1) and (1, 4) -> (3, 4)
    a_shape = (1,) * (rank - len(a)) + tuple(a)
    b_shape = (1,) * (rank - len(b)) + tuple(b)
    for x, y in zip(a_shape, b_shape, strict=True):
        # sizes 3 and 1 can be broadcast, 3 and 4 cannot
        if x != y and 1 not in (x, y):
            needed = "shapes that broadcast: equal sizes, or 1, from the right"
            got = f"{tuple(a)} and {tuple(b)}"
            raise ShapeError(needed, got, f"{x} and {y} do not go together")
    return tuple(max(x, y) if 0 not in (x, y) else 0 for x, y in zip(a_shape, b_shape, strict=True))


def broadcast(a: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a repeated to `shape` (NumPy rule); raise `ShapeError` with both shapes."""
    target = check_shape(shape, "broadcast")
    if target == a.shape:
        return a
    # (3, 1) to (4,) would broadcast to (3, 4), which is not the target
    if len(a.shape) > len(target) or broadcast_shapes(a.shape, target) != target:
        needed = f"broadcast: a shape that repeats to {target}"
        raise ShapeError(needed, f"{a.label} {a.shape}", "sizes 1 repeat")
    names = axis_names(len(target))
    # (4,) to (3, 4): its only axis is j, as shapes are aligned at the right
    source_axes = names[len(target) - len(a.shape) :]
    # (1, 4) to (3, 4): element [i, j] reads a[0, j], as an axis of size 1 has the index 0 only.
    index = tuple(
        Affine() if size == 1 else var(n) for n, size in zip(source_axes, a.shape, strict=True)
    )
    return copied(a[index], target, names, "broadcast")
