"""What the standard's text says a quantised model computes, in NumPy, and how far off one may be.

Every tensor is a pair of arrays: the numbers in fp64, and a bound on how far a sound computation
may be from them. A bound starts with the rounding of the number format and grows as the operators
say; a quantised tensor may be another whole number only where a number within the bound rounds to
it. So most bounds of quantised tensors are 0, some one step: no tolerance is chosen by hand.

    q = clip(rint(x / s) + z)        bound: the farthest of the whole numbers x +- b rounds to
    (q - z) s                        b s
    sum x w + c                      sum b |w|, plus rounding of the products, plus half a step of
                                     sums sx sw where a compiler may keep the bias in whole numbers
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Array = np.ndarray


@dataclass(frozen=True)
class Format:
    """How a number is rounded: by a share of its size, and by a least distance of numbers."""

    share: float
    least: float

    def rounding(self, size: Array) -> Array:
        """Return how far rounding may move numbers of a size."""
        return self.share * np.abs(size) + self.least


FP32 = Format(2.0**-22, 1e-37)
FP16 = Format(2.0**-10, 2.0**-24)
"""Two roundings of each format: one where a tensor is stored, one where it is computed."""


@dataclass(frozen=True)
class Tensor:
    """Numbers, how far off they may be, and the steps they are whole numbers of, if they are."""

    value: Array
    bound: Array
    step: Array | None = None


def exact(value: Any) -> Tensor:
    """Return numbers that are what they are."""
    wide = np.asarray(value).astype(np.float64)
    return Tensor(wide, np.zeros_like(wide))


def witness(model: onnx.ModelProto, feed: Mapping[str, Array], form: Format) -> dict[str, Tensor]:
    """Return every tensor of a model by name."""
    known = {t.name: exact(numpy_helper.to_array(t)) for t in model.graph.initializer}
    kinds = {t.name: numpy_helper.to_array(t).dtype for t in model.graph.initializer}
    for name, array in feed.items():
        known[name] = Tensor(array.astype(np.float64), form.rounding(array.astype(np.float64)))
    for node in model.graph.node:
        follow(node, known, kinds, form)
    return known


def follow(
    node: onnx.NodeProto, known: dict[str, Tensor], kinds: dict[str, Any], form: Format
) -> None:
    """Compute one node."""
    attrs = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    inputs = [known[name] if name else None for name in node.input]
    if node.op_type == "QuantizeLinear":
        kinds[node.output[0]] = kinds[node.input[2]]
        attrs["range"] = np.iinfo(kinds[node.input[2]])
    found = RULES[node.op_type](form, attrs, *inputs)
    # what is off is rounded where it is, too
    more = form.share * found.bound if node.op_type != "QuantizeLinear" else 0.0
    known[node.output[0]] = Tensor(found.value, found.bound + more, found.step)


# -- whole numbers --------------------------------------------------------------------------------
def along(numbers: Array, axis: int, rank: int) -> Array:
    """Return one number, or numbers shaped to lie along an axis."""
    if numbers.size == 1:
        return numbers.reshape(())
    return numbers.reshape([-1 if i == axis % rank else 1 for i in range(rank)])


def quantised(
    form: Format, attrs: dict[str, Any], x: Tensor, scale: Tensor, zero: Tensor
) -> Tensor:
    limits = attrs["range"]
    rank = x.value.ndim
    step, offset = (along(t.value, attrs.get("axis", 1), rank) for t in (scale, zero))
    # a zero point is added before numbers are rounded to whole ones, at up to 128 in size
    slack = x.bound + form.rounding(x.value) + form.share * 64 * step

    def whole(numbers: Array) -> Array:
        return np.clip(np.rint(numbers / step) + offset, limits.min, limits.max)

    middle, low, high = (whole(x.value + side * slack) for side in (0, -1, 1))
    return Tensor(middle, np.maximum(high - middle, middle - low))


def dequantised(
    form: Format, attrs: dict[str, Any], q: Tensor, scale: Tensor, zero: Tensor | None = None
) -> Tensor:
    rank = q.value.ndim
    step = along(scale.value, attrs.get("axis", 1), rank)
    offset = along(zero.value, attrs.get("axis", 1), rank) if zero is not None else np.zeros(())
    value = (q.value - offset) * step
    # fp16 factors and products of bytes: 255 / 2048 of a step, however small the result
    bound = q.bound * step + form.rounding(value) + form.share * np.abs(offset) * step
    return Tensor(value, bound, _usual(step, value))


def _usual(step: Array, value: Array) -> Array:
    """Return the steps of channels, those of zeros at least as large as the others' are."""
    if step.size == 1:
        return step
    axes = tuple(i for i, n in enumerate(step.shape) if n == 1)
    idle = ~value.any(axes, keepdims=True)
    usual = np.median(step[~idle]) if not idle.all() else 0.0
    return np.where(idle, np.maximum(step, usual), step)


# -- products -------------------------------------------------------------------------------------
def windows(x: Array, attrs: dict[str, Any], kernel: tuple[int, ...], fill: float) -> Array:
    """Return (n, c, *out, taps): the elements under each place of a window."""
    rank = len(kernel)
    pads = attrs.get("pads", [0] * 2 * rank)
    strides = attrs.get("strides", [1] * rank)
    dilations = attrs.get("dilations", [1] * rank)
    around = [(0, 0), (0, 0), *((pads[i], pads[rank + i]) for i in range(rank))]
    padded = np.pad(x, around, constant_values=fill)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    out = [(n - r) // s + 1 for n, r, s in zip(padded.shape[2:], reach, strides, strict=True)]
    taps = []
    for place in itertools.product(*map(range, kernel)):
        cuts = [
            slice(p * d, p * d + (n - 1) * s + 1, s)
            for p, d, n, s in zip(place, dilations, out, strides, strict=True)
        ]
        taps.append(padded[(slice(None), slice(None), *cuts)])
    return np.stack(taps, -1)


def convolved(x: Array, w: Array, attrs: dict[str, Any]) -> Array:
    groups = attrs.get("group", 1)
    kernel = w.shape[2:]
    seen = windows(x, attrs, kernel, 0.0)
    n, c, *out, taps = seen.shape
    seen = seen.reshape(n, groups, c // groups, -1, taps)
    rows = w.reshape(groups, w.shape[0] // groups, c // groups, taps)
    return np.einsum("ngcpt,gkct->ngkp", seen, rows).reshape(n, w.shape[0], *out)


def summed(
    form: Format, product: Callable[[Array, Array], Array], x: Tensor, w: Tensor,
    bias: Array | None, channels: Callable[[Array], Array],
) -> Tensor:  # fmt: skip
    """Return x w + bias; `channels` shapes one number a channel for the result."""
    value = product(x.value, w.value) + (0.0 if bias is None else bias)
    size = product(np.abs(x.value), np.abs(w.value))
    bound = product(x.bound, np.abs(w.value)) + 4 * form.share * size + form.rounding(value)
    if x.step is not None and w.step is not None:
        bound = bound + 0.5 * x.step * channels(w.step)
    return Tensor(value, bound)


def conv(
    form: Format, attrs: dict[str, Any], x: Tensor, w: Tensor, bias: Tensor | None = None
) -> Tensor:
    column = (1, -1, *(1,) * (x.value.ndim - 2))
    return summed(
        form, lambda a, b: convolved(a, b, attrs), x, w,
        None if bias is None else bias.value.reshape(column),
        lambda steps: steps.reshape(column) if steps.size > 1 else steps,
    )  # fmt: skip


def matmul(
    form: Format, attrs: dict[str, Any], x: Tensor, w: Tensor, bias: Tensor | None = None
) -> Tensor:
    turned = bool(attrs.get("transB", 0))

    def product(a: Array, b: Array) -> Array:
        return a @ (b.T if turned else b)

    return summed(
        form, product, x, w, None if bias is None else bias.value,
        lambda steps: steps.reshape(-1) if steps.size > 1 else steps,
    )  # fmt: skip


def _less(q: Tensor, zero: Tensor | None) -> Tensor:
    return q if zero is None else Tensor(q.value - zero.value, q.bound)


def matmul_integer(form, attrs, a, b, a_zero=None, b_zero=None):
    x = _less(a, a_zero)
    w = _less(b, b_zero)
    return Tensor(x.value @ w.value, x.bound @ np.abs(w.value))


def conv_integer(form, attrs, x, w, x_zero=None, w_zero=None):
    a = _less(x, x_zero)
    b = _less(w, w_zero)
    return Tensor(convolved(a.value, b.value, attrs), convolved(a.bound, np.abs(b.value), attrs))


# -- the rest -------------------------------------------------------------------------------------
def added(form: Format, attrs: dict[str, Any], *sides: Tensor) -> Tensor:
    value = sum(t.value for t in sides)
    bound = sum(t.bound + form.rounding(t.value) for t in sides)
    return Tensor(value, bound + form.rounding(value))


def scaled(form: Format, attrs: dict[str, Any], x: Tensor, factor: Tensor) -> Tensor:
    value = x.value * factor.value
    return Tensor(value, x.bound * np.abs(factor.value) + form.rounding(value))


def clipped(form: Format, attrs: dict[str, Any], x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return Tensor(np.clip(x.value, low.value, high.value), x.bound + form.rounding(high.value))


def largest(form: Format, attrs: dict[str, Any], x: Tensor) -> Tensor:
    kernel = tuple(attrs["kernel_shape"])
    value = windows(x.value, attrs, kernel, -np.inf).max(-1)
    return Tensor(value, windows(x.bound, attrs, kernel, 0.0).max(-1))


def average(form: Format, attrs: dict[str, Any], x: Tensor) -> Tensor:
    kernel = tuple(attrs["kernel_shape"])
    count = windows(np.ones_like(x.value), attrs, kernel, float(attrs.get("count_include_pad", 0)))
    value, bound, size = (
        windows(a, attrs, kernel, 0.0).sum(-1) / count.sum(-1)
        for a in (x.value, x.bound, np.abs(x.value))
    )
    return Tensor(value, bound + 4 * form.rounding(size) + count.shape[-1] * form.least)


def mean(form: Format, attrs: dict[str, Any], x: Tensor) -> Tensor:
    axes = tuple(range(2, x.value.ndim))
    value, bound, size = (a.mean(axes, keepdims=True) for a in (x.value, x.bound, np.abs(x.value)))
    count = np.prod(x.value.shape[2:])  # numbers below the least normal one lose a step each
    return Tensor(value, bound + 4 * form.rounding(size) + count * form.least)


def moved(move: Callable[[dict[str, Any], Array], Array]) -> Callable[..., Tensor]:
    def rule(form: Format, attrs: dict[str, Any], x: Tensor, *others: Tensor) -> Tensor:
        step = x.step if x.step is not None and x.step.size == 1 else None
        return Tensor(move(attrs, x.value), move(attrs, x.bound), step)

    return rule


def joined(form: Format, attrs: dict[str, Any], *sides: Tensor) -> Tensor:
    axis = attrs["axis"]
    return Tensor(*(np.concatenate(part, axis) for part in (
        [t.value for t in sides], [t.bound for t in sides])))  # fmt: skip


RULES: dict[str, Callable[..., Tensor]] = {
    "QuantizeLinear": quantised,
    "DequantizeLinear": dequantised,
    "Conv": conv,
    "Gemm": matmul,
    "MatMul": matmul,
    "MatMulInteger": matmul_integer,
    "ConvInteger": conv_integer,
    "Add": added,
    "Mul": scaled,
    "Clip": clipped,
    "Relu": lambda form, attrs, x: Tensor(np.maximum(x.value, 0), x.bound),
    "MaxPool": largest,
    "AveragePool": average,
    "GlobalAveragePool": mean,
    "Concat": joined,
    "Flatten": moved(lambda attrs, a: a.reshape(a.shape[0], -1)),
    "Transpose": moved(lambda attrs, a: a.transpose(attrs["perm"])),
    "Cast": lambda form, attrs, x: Tensor(x.value, x.bound + form.rounding(x.value)),
}
