"""Gradients of operators: each rule computes the inputs' gradients by other operators.

For example, the rule of `exp` is mul(g, y), with g the gradient of the output y. A rule gets a
`Site`, the use of the operator in a graph, and returns a gradient or None for each input. It
computes the gradients of weights before those of activations, so that weights can be updated early.
The rule does not know how its operators are executed: a training graph adds them as nodes, while
`gradient` computes them directly on arrays. Rules marked `wide` compute in fp32 in all formats.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ascend_lab.errors import UnsupportedError
from ascend_lab.operators.ops import expressions, formats
from ascend_lab.operators.ops.operator import OPERATORS, Grads, Operator, get, resolve


class Writer:
    """The interface for gradient rules: every operator is a method, and there are some helpers."""

    def add_node(self, op: str, *inputs: Any, **attrs: Any) -> Any:
        """Execute or record an operator; return its output, or a tuple of several."""
        raise NotImplementedError

    def __getattr__(self, op: str) -> Callable[..., Any]:
        """Return the method of operator `op`."""
        return partial(self.add_node, get(op).name)

    def constant(self, data: formats.Values, *, name: str = "const") -> Any:
        """Return a constant array."""
        raise NotImplementedError

    def number(self, value: float, shape: formats.Shape, dtype: str) -> Any:
        """Return a constant with one number everywhere."""
        raise NotImplementedError

    def kept(self, tensor: Any) -> Any:
        """Return a tensor of the forward pass."""
        return tensor

    def kind(self, tensor: Any) -> Any:
        """Return the type of a tensor of the forward pass: shape and dtype."""
        return tensor.type

    def wide(self, x: Any) -> Any:
        """Return x in fp32 if its format is narrower."""
        return self.in_format(x, "fp32") if x.type.dtype in expressions.NARROW else x

    def in_format(self, x: Any, dtype: str) -> Any:
        """Return x in a format, cast if needed."""
        return x if x.type.dtype == dtype else self.cast(x, dtype=dtype)

    def shaped(self, x: Any, shape: Sequence[int]) -> Any:
        """Return x reshaped to a shape with the same number of elements."""
        return x if x.shape == tuple(shape) else self.reshape(x, shape=tuple(shape))

    def stretched(self, x: Any, shape: formats.Shape) -> Any:
        """Return x repeated along its axes of size 1."""
        return x if x.shape == shape else self.expand(x, shape=shape)

    def summed_to(self, x: Any, shape: formats.Shape) -> Any:
        """Return x summed over the axes along which a tensor of `shape` was repeated."""
        # A bias (1, 5) was repeated to (2, 3, 5): axis 0 is new, axis 1 had size 1; both are
        # summed.
        lead = len(x.shape) - len(shape)
        axes = [*range(lead)]
        axes += [i + lead for i, n in enumerate(shape) if n == 1 and x.shape[i + lead] != 1]
        if axes:
            x = self.reduce_sum(x, axis=tuple(axes), keepdims=False)
        return self.shaped(x, shape)

    def channel_sums(self, x: Any) -> Any:
        """Return the sum of each channel of (n, c, h, w) as (1, c, 1, 1), in two steps.

        The first step adds up rows of pixels, (n, c, h, w) -> (n, c, 1, w). Its n * c * w sums are
        independent, so that all cores are used. The second step adds up the remaining axes.
        """
        # (n, c, h, w): first over axis 2, then over axes 0 and 3.
        inner = tuple(range(2, len(x.shape)))
        if inner[:-1]:
            x = self.reduce_sum(x, axis=inner[:-1], keepdims=True)
        return self.reduce_sum(x, axis=(0, *inner[-1:]), keepdims=True)

    def scaled(self, x: Any, number: float) -> Any:
        """Return x times a number."""
        return x if number == 1.0 else self.muls(x, number=float(number))

    def one_minus(self, x: Any) -> Any:
        """Return 1 - x."""
        return self.adds(self.muls(x, number=-1.0), number=1.0)

    def like(self, value: float, x: Any) -> Any:
        """Return a number as a tensor of one element that broadcasts with x, in its format."""
        return self.number(value, (1,) * min(1, len(x.shape)), x.type.dtype)

    def where(self, mask: Any, x: Any) -> Any:
        """Return x where the mask is not 0, else 0."""
        return self.select(mask, x, self.like(0.0, x))


@dataclass(frozen=True, slots=True)
class Site:
    """The use of an operator in a graph, with the gradients of its outputs.

    `net` executes or records the operators of the rule. `op` and `name` are the operator and the
    node in the graph. `grads` has an entry for each output, None where the loss does not depend on
    it; `needs_gradient` is true for the inputs whose gradients are used.
    """

    net: Writer
    op: str
    name: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    grads: tuple[Any, ...]
    needs_gradient: tuple[bool, ...]
    attrs: dict[str, Any]
    wide: bool = False

    def _widened(self, value: Any) -> Any:
        return self.net.wide(value) if self.wide else value

    def x(self, place: int = 0) -> Any:
        """Return an input of the forward pass."""
        return self._widened(self.net.kept(self.inputs[place]))

    def y(self, place: int = 0) -> Any:
        """Return an output of the forward pass."""
        return self._widened(self.net.kept(self.outputs[place]))

    @property
    def g(self) -> Any:
        """The gradient of the first output."""
        if self.grads[0] is None:
            needed = f"a gradient of the first output of {self.name}"
            raise UnsupportedError(needed, "of others only", "use the first output in the loss")
        return self._widened(self.grads[0])

    def kind(self, place: int = 0) -> Any:
        """Return the type of an input."""
        return self.net.kind(self.inputs[place])

    def shape(self, place: int = 0) -> formats.Shape:
        """Return the shape of an input."""
        shape: formats.Shape = self.kind(place).shape
        return shape

    def out_kind(self, place: int = 0) -> Any:
        """Return the type of an output."""
        return self.net.kind(self.outputs[place])


def input_gradients(operator: Operator, site: Site) -> list[Any]:
    """Return the gradients of an operator's inputs, each in the format of its input.

    An entry is None if the gradient is not used or does not exist. Raises `UnsupportedError` for an
    operator without a rule.
    """
    if operator.backward is None:
        raise UnsupportedError(
            f"a gradient rule for operator {site.op} of node {site.name}",
            f"rules for {sum(o.backward is not None for o in OPERATORS.values())} operators",
            "rewrite the graph, or give the operator a rule: backward=",
        )
    input_grads: Grads = operator.backward(site)
    return [
        site.net.in_format(grad, site.kind(i).dtype) if is_used and grad is not None else None
        for i, (grad, is_used) in enumerate(zip(input_grads, site.needs_gradient, strict=True))
    ]


def scatter_gradient(s: Site, grad: Any, indices: Any, axis: int, size: int) -> Any:
    """Return the gradient of a gather: zeros of `size` along `axis`, with `grad` added at indices.

    Gradients of equal indices are added up: a row that was gathered twice gets both.
    """
    net = s.net
    index_rank = len(indices.shape)
    # x (3, 11, 8), indices (4,) on axis 1: the gradient (3, 4, 8) is turned to (4, 3, 8), added to
    # zeros (11, 3, 8), and turned back to (3, 11, 8).
    rank = len(grad.shape)
    # scatter_add works on axis 0 only: bring the axes of the indices to the front, and the result
    # back at the end
    if axis:
        indexed_first = (
            *range(axis, axis + index_rank),
            *range(axis),
            *range(axis + index_rank, rank),
        )
        grad = net.transpose(grad, perm=indexed_first)
    # Table (100, 16), indices (2, 7): the gradient (2, 7, 16) is added to zeros (100, 16).
    shape: formats.Shape = (size, *grad.shape[index_rank:])
    zeros = net.number(0.0, shape, grad.type.dtype)
    total: Any = net.scatter_add(zeros, indices, grad)
    if axis:
        perm = (*range(1, axis + 1), 0, *range(axis + 1, len(shape)))
        total = net.transpose(total, perm=perm)
    return total


# -- gradients computed immediately on NumPy arrays ------------------------------------------------
@dataclass(frozen=True, slots=True)
class _ArrayType:
    shape: formats.Shape
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class _Array:
    """An array that looks like a tensor of a graph."""

    values: formats.Values

    @property
    def shape(self) -> formats.Shape:
        return self.values.shape

    @property
    def type(self) -> _ArrayType:
        return _ArrayType(self.values.shape, formats.format_of(self.values))


class _ArrayWriter(Writer):
    """Computes each operator directly: on fp64 arrays by the formula, else by the reference."""

    def add_node(self, op: str, *inputs: _Array, **attrs: Any) -> Any:
        operator = get(op)
        arrays = [x.values for x in inputs]
        if any(a.dtype == np.float64 for a in arrays):
            wide_arrays = (a if a.dtype == np.float64 else formats.widen(a) for a in arrays)
            results = operator.formula(*wide_arrays, **{**operator.attrs, **attrs})
        else:
            results = operator.reference(*arrays, **attrs)
        if isinstance(results, tuple):
            return tuple(map(_Array, results))
        return _Array(np.asarray(results))

    def constant(self, data: formats.Values, *, name: str = "const") -> _Array:
        return _Array(data)

    def number(self, value: float, shape: formats.Shape, dtype: str) -> _Array:
        return _Array(np.full(shape, value, formats.numpy_type(dtype)))


def gradient(
    operator: Operator | str,
    grads: Sequence[formats.Values | None],
    inputs: Sequence[formats.Values],
    outputs: Sequence[formats.Values],
    **attrs: Any,
) -> tuple[formats.Values | None, ...]:
    """Return d(loss)/d(input) for each input, computed from d(loss)/d(output) on arrays.

    An entry is None if the input has no gradient. Raises `UnsupportedError` for an operator without
    a rule.
    """
    op = resolve(operator)
    input_tensors = tuple(map(_Array, inputs))
    output_tensors = tuple(map(_Array, outputs))
    output_grads = tuple(None if g is None else _Array(g) for g in grads)
    # Indices and labels are whole numbers: they have no slope.
    needs_gradient = tuple(a.dtype.kind not in "iu" for a in inputs)
    settings = op.settings(attrs)
    site = Site(
        net=_ArrayWriter(),
        op=op.name,
        name=op.name,
        inputs=input_tensors,
        outputs=output_tensors,
        grads=output_grads,
        needs_gradient=needs_gradient,
        attrs=settings,
        wide=op.wide,
    )
    with np.errstate(all="ignore"):
        return tuple(
            None if input_grad is None else input_grad.values
            for input_grad in input_gradients(op, site)
        )
