"""Imports elementwise ONNX operators: activations, arithmetic, comparisons, logic, running sums.

If all inputs of a node are known and small, `folded` computes the node at once, in NumPy.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ascend_lab.compiler.draft import Value
from ascend_lab.compiler.onnx import quantised, tensors as kinds
from ascend_lab.compiler.onnx.context import Context, Result, converter
from ascend_lab.compiler.onnx.tensors import (
    BITWISE_TYPES,
    COMPUTED_TYPES,
    FLOATS,
    INTEGERS,
    NUMBERS,
    Tensor,
    Values,
)
from ascend_lab.errors import GraphError

FLOAT_OPERATORS = {
    "Exp": "exp",
    "Log": "log",
    "Sqrt": "sqrt",
    "Reciprocal": "rec",
    "Floor": "floor",
    "Ceil": "ceil",
    "Round": "round",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "Erf": "erf",
    "Softplus": "softplus",
    "HardSwish": "hard_swish",
}
NUMBER_OPERATORS = {"Relu": "relu", "Abs": "abs", "Neg": "neg", "Sign": "sign"}
BIT_OPERATORS = {"BitwiseNot": "not", "BitwiseAnd": "and", "BitwiseOr": "or"}
ORDER_COMPARISONS = {
    "Greater": "greater",
    "GreaterOrEqual": "greater_equal",
    "Less": "less",
    "LessOrEqual": "less_equal",
}
COMPARISONS = {"Equal": "equal", **ORDER_COMPARISONS}
ARITHMETIC_OPERATORS = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div"}
LIBRARY_OPERATORS = {
    **FLOAT_OPERATORS,
    **NUMBER_OPERATORS,
    **BIT_OPERATORS,
    **ARITHMETIC_OPERATORS,
    "Pow": "pow",
    "Max": "max",
    "Min": "min",
    **COMPARISONS,
}
"""ONNX operators that one operator of the library equals; import and export both use this."""


# -- one operand ----------------------------------------------------------------------------------
@converter(*FLOAT_OPERATORS, types=(FLOATS,), since=6)
@converter(*NUMBER_OPERATORS, types=(NUMBERS,), since=6)
@converter(*BIT_OPERATORS, types=(BITWISE_TYPES,))
@converter(*ORDER_COMPARISONS, types=(COMPUTED_TYPES,), result="bool", since=7)
def _same_operator(ctx: Context) -> Result:
    if ctx.op in ("Round", "Floor", "Ceil") and ctx.input(0).name in ctx.net.boolean_names:
        return ctx.tensor(0)
    return ctx.emit(LIBRARY_OPERATORS[ctx.op], *(ctx.input(i) for i in range(len(ctx.inputs))))


@converter("LeakyRelu", "Elu", types=(FLOATS,), since=6)
def _elu(ctx: Context) -> Value:
    op = "elu" if ctx.op == "Elu" else "leaky_relu"
    return ctx.emit(op, ctx.input(0), alpha=ctx.attr("alpha"))


@converter("Selu", types=(FLOATS,), since=6)
def _selu(ctx: Context) -> Value:
    elu = ctx.emit("elu", ctx.input(0), alpha=ctx.attr("alpha"))
    return ctx.emit("muls", elu, number=ctx.attr("gamma"))


@converter("PRelu", types=(FLOATS,), since=6)
def _prelu(ctx: Context) -> Value:
    """Return relu(x) + slope min(x, 0); opset 6 has one slope, or one for each channel."""
    x = ctx.input(0)
    slope = ctx.input(1)
    if ctx.opset < 7 and slope.type.elements > 1 and len(x.shape) > 2:
        slope = ctx.emit("reshape", slope, shape=(x.shape[1], *(1,) * (len(x.shape) - 2)))
    if np.broadcast_shapes(x.shape, slope.shape) != x.shape:
        ctx.unsupported(f"a slope that broadcasts to {x.shape}", str(slope.shape))
    # x = -4, slope 0.25: 0 + 0.25 * -4 = -1.
    negative_part = ctx.emit("min", x, ctx.constant_scalar(0, x.type.dtype))
    return ctx.emit("add", ctx.emit("relu", x), ctx.emit("mul", slope, negative_part))


@converter("HardSigmoid", types=(FLOATS,), since=6)
def _hard_sigmoid(ctx: Context) -> Value:
    alpha = ctx.attr("alpha")
    beta = ctx.attr("beta")
    if np.float32(alpha) == np.float32(1 / 6) and beta == 0.5:
        return ctx.emit("hard_sigmoid", ctx.input(0))
    # The standard's defaults, 0.2 x + 0.5, are not those of the operator here, x / 6 + 0.5.
    line = ctx.emit("adds", ctx.emit("muls", ctx.input(0), number=alpha), number=beta)
    return ctx.emit("clip", line, low=0.0, high=1.0)


@converter("Swish", types=(FLOATS,))
def _swish(ctx: Context) -> Value:
    x = ctx.input(0)
    alpha = ctx.attr("alpha")
    if alpha == 1:
        return ctx.emit("silu", x)
    return ctx.emit("mul", x, ctx.emit("sigmoid", ctx.emit("muls", x, number=alpha)))


@converter("Gelu", types=(FLOATS,))
def _gelu(ctx: Context) -> Value:
    """Return a gelu: the tanh form as one node, x (1 + erf(x / sqrt 2)) / 2 as several."""
    x = ctx.input(0)
    approximation = ctx.attr("approximate")
    if approximation == "tanh":
        return ctx.emit("gelu", x)
    if approximation != "none":
        ctx.unsupported("approximate none or tanh", approximation)
    # x / 2 (1 + erf(x / sqrt(2)))
    erf = ctx.emit("erf", ctx.emit("muls", x, number=math.sqrt(0.5)))
    half_x = ctx.emit("muls", x, number=0.5)
    return ctx.emit("mul", half_x, ctx.emit("adds", erf, number=1.0))


@converter("Sinh", "Cosh", types=(FLOATS,), since=9)
def _hyperbolic(ctx: Context) -> Value:
    """Return sinh or cosh: half the difference, or sum, of e^x and e^-x."""
    x = ctx.input(0, "fp32")
    growing = ctx.emit("exp", x)
    decaying = ctx.emit("exp", ctx.emit("neg", x))
    combined = ctx.emit("sub" if ctx.op == "Sinh" else "add", growing, decaying)
    return ctx.cast(ctx.emit("muls", combined, number=0.5), ctx.input(0).type.dtype)


@converter("Sin", "Cos", types=(FLOATS,))
def _sine(ctx: Context) -> Value:
    ctx.unsupported("an operand known before the graph runs", "one computed from data")


@converter("Clip", types=(COMPUTED_TYPES,), since=6)
def _clip(ctx: Context) -> Result:
    """Limit x to bounds: attributes before opset 11, since then inputs that hold one number."""
    unlimited: dict[str, float] = {"low": -math.inf, "high": math.inf}
    if ctx.opset < 11:
        return ctx.emit("clip", ctx.input(0), low=_bound(ctx, "min"), high=_bound(ctx, "max"))
    value = ctx.input(0)
    limits = dict(unlimited)
    for i, key, op in ((1, "low", "max"), (2, "high", "min")):
        if not ctx.has(i):
            continue
        if ctx.tensor(i).elements != 1:
            ctx.unsupported("bounds that are scalars", str(ctx.shape(i)))
        if ctx.tensor(i).known is not None:
            limits[key] = ctx.scalar(i)
            continue
        # a bound that is computed: a known lower bound applies before it, as the standard limits
        # x from below first
        if limits != unlimited:
            value = ctx.emit("clip", value, **limits)
            limits = dict(unlimited)
        value = ctx.emit(op, value, ctx.emit("reshape", ctx.input(i), shape=()))
    if limits != unlimited:
        return ctx.emit("clip", value, **limits)
    return value if value.name != ctx.input(0).name else ctx.tensor(0)


def _bound(ctx: Context, name: str) -> float:
    """Return a bound of opset 6; the default, the largest number of fp32, limits nothing."""
    number: float = ctx.attr(name)
    return number if abs(number) < np.finfo(np.float32).max else math.copysign(math.inf, number)


@converter("IsNaN", types=(FLOATS,), result="bool")
def _is_nan(ctx: Context) -> Value:
    return ctx.emit("not_equal", ctx.input(0), ctx.input(0))


@converter("IsInf", types=(FLOATS,), result="bool")
def _is_inf(ctx: Context) -> Value:
    x = ctx.input(0)
    low = ctx.attr("detect_negative")
    high = ctx.attr("detect_positive")
    if not low and not high:
        ctx.unsupported("infinities of a sign to look for", "none")
    x = ctx.emit("abs", x) if low and high else x
    return ctx.emit("equal", x, ctx.constant_scalar(math.inf if high else -math.inf, x.type.dtype))


# -- two operands and more ------------------------------------------------------------------------
@converter(*ARITHMETIC_OPERATORS, types=(COMPUTED_TYPES,), since=6)
def _arithmetic(ctx: Context) -> Value:
    x = ctx.input(0)
    y = _second_operand(ctx)
    if ctx.op == "Div" and ctx.elem(0) not in FLOATS:
        return ctx.cast(quantised.divided(ctx, x, y)[0], x.type.dtype)
    return ctx.emit(LIBRARY_OPERATORS[ctx.op], x, y)


def _second_operand(ctx: Context, dtype: str = "") -> Value:
    """Return the second operand; in opset 6 its axes may start at an axis of the first."""
    y = ctx.input(1, dtype)
    axis = ctx.attr("axis")
    shape = ctx.shape(0)
    if ctx.opset >= 7 or not ctx.attr("broadcast"):
        if axis is not None or ctx.attr("broadcast"):
            ctx.unsupported("axis and broadcast in opset 6 only", f"opset {ctx.opset}")
        if ctx.opset < 7 and y.shape != shape:
            ctx.unsupported("operands of one shape, or broadcast = 1", f"{shape} and {y.shape}")
        return y
    if axis is None:
        return y
    position = axis + len(shape) if axis < 0 else axis
    # (2, 3, 4, 5) and an operand (3, 4) at axis 1: it becomes (3, 4, 1).
    trailing_axes = len(shape) - position - len(y.shape)
    if position < 0 or trailing_axes < 0:
        ctx.unsupported(f"an operand that fits {shape} at axis {axis}", str(y.shape))
    return ctx.reshape(y, (*y.shape, *(1,) * trailing_axes))


@converter("Mod", types=((*INTEGERS, "int8", "uint8"),))
def _mod(ctx: Context) -> Value:
    """Return the remainder of x / y, with the sign of y or, with the attribute fmod, of x."""
    x = ctx.input(0)
    y = ctx.input(1)
    # -7 and 3: -1 with fmod, 2 without.
    remainder = quantised.divided(ctx, x, y)[1] if ctx.attr("fmod") else quantised.modulo(ctx, x, y)
    return ctx.cast(remainder, x.type.dtype)


@converter("Pow", types=(FLOATS, NUMBERS), since=6)
def _pow(ctx: Context) -> Result:
    """Return powers; those with small integer exponents by multiplication, which is faster."""
    x = ctx.input(0)
    y = ctx.tensor(1)
    if y.known is None:
        return ctx.emit("pow", x, _second_operand(ctx, x.type.dtype))
    extra_axes = len(y.shape) - len(x.shape)
    if y.elements == 1 and extra_axes > 0:
        x = ctx.reshape(x, (1,) * extra_axes + x.shape)
    exponent = float(ctx.scalar(1)) if y.elements == 1 else None
    named = {2.0: "square", 0.5: "sqrt", -1.0: "rec", -0.5: "rsqrt"}
    if exponent == 1:
        return x if extra_axes > 0 else ctx.tensor(0)
    if exponent in named:
        return ctx.emit(named[exponent], x)
    if exponent in (3.0, 4.0):
        square = ctx.emit("square", x)
        return ctx.emit("mul", square, x if exponent == 3 else square)
    return ctx.emit("pow", x, _second_operand(ctx, x.type.dtype))


@converter("Sum", types=(NUMBERS,), since=6)
@converter("Max", "Min", types=(COMPUTED_TYPES,), since=6)
@converter("Mean", types=(FLOATS,), since=6)
def _fold_left(ctx: Context) -> Result:
    """Combine the inputs from left to right; a single input is the result itself."""
    count = len(ctx.inputs)
    if count == 1:
        return ctx.tensor(0)
    total = ctx.input(0)
    for i in range(1, count):
        total = ctx.emit(LIBRARY_OPERATORS.get(ctx.op, "add"), total, ctx.input(i))
    if ctx.op == "Mean":
        return ctx.emit("div", total, ctx.constant_scalar(count, total.type.dtype))
    return total


@converter("And", "Or", "Xor", types=(("bool",),), result="bool", since=7)
@converter("Equal", types=(kinds.GRAPH_TYPES,), result="bool", since=7)
def _logic(ctx: Context) -> Value:
    """Return a logical operation; true is 1 and false 0, so And is min and Or is max."""
    op = {"And": "min", "Or": "max", "Xor": "not_equal", "Equal": "equal"}[ctx.op]
    return ctx.emit(op, *ctx.in_one_format())


@converter("Not", types=(("bool",),), result="bool")
def _not(ctx: Context) -> Value:
    x = ctx.input(0)
    return ctx.emit("sub", ctx.constant_scalar(1, x.type.dtype), x)


@converter("Where", types=(("bool",), kinds.GRAPH_TYPES))
def _where(ctx: Context) -> Value:
    x, y = ctx.in_one_format(1, 2)
    ctx.result = ctx.elem(1)
    return ctx.emit("select", ctx.input(0, x.type.dtype), x, y)


# -- running sums and products --------------------------------------------------------------------
@converter("CumSum", "CumProd", types=(NUMBERS, INTEGERS), since=11)
def _running_sum(ctx: Context) -> Value:
    """Return running sums or products by a parallel prefix scan (Hillis and Steele).

    Each element is combined with the one 1 place before it, then 2, 4, ... places before it.
    """
    # the neutral number fills the places before the first element
    op, neutral = ("add", 0) if ctx.op == "CumSum" else ("mul", 1)
    running = ctx.input(0)
    axis = ctx.axis(int(ctx.scalar(1)), len(running.shape))
    if not running.type.elements:
        ctx.unsupported("elements", str(running.shape))
    if ctx.attr("exclusive"):
        running = _shifted(ctx, running, axis, 1, neutral)
    # (1, 2, 3, 4): with 1 before (1, 3, 5, 7), with 2 before (1, 3, 6, 10): log2(n) rounds.
    step = 1
    while step < running.shape[axis]:
        running = ctx.emit(op, running, _shifted(ctx, running, axis, step, neutral))
        step *= 2
    return running


def _shifted(ctx: Context, x: Value, axis: int, step: int, fill_number: float) -> Value:
    """Return x shifted by `step` along an axis, backward if `reverse` is set.

    `fill_number` fills the places that become free.
    """
    is_reverse = bool(ctx.attr("reverse"))
    size = x.shape[axis]
    pads = [(0, 0)] * len(x.shape)
    if step >= size:
        return ctx.emit(
            "expand", ctx.constant_array(fill_number, x.type.dtype, "fill"), shape=x.shape
        )
    # (1, 2, 3, 4) moved by 1: (0, 1, 2, 3), or back (2, 3, 4, 0).
    pads[axis] = (0, step) if is_reverse else (step, 0)
    remaining = ctx.part(x, axis, step, size) if is_reverse else ctx.part(x, axis, 0, size - step)
    return ctx.emit("pad", remaining, pads=tuple(pads), value=fill_number)


# -- folding: nodes whose inputs are all known and small, in NumPy ---------------------------------
# ONNX's reference evaluator computes the same, but takes 0.4 s to load.
UFUNCS: dict[str, np.ufunc] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Pow": np.power,
    "Neg": np.negative,
    "Abs": np.abs,
    "Sqrt": np.sqrt,
    "Exp": np.exp,
    "Log": np.log,
    "Sin": np.sin,
    "Cos": np.cos,
    "Reciprocal": np.reciprocal,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.rint,
    "Sign": np.sign,
    "Sum": np.add,
    "Max": np.maximum,
    "Min": np.minimum,
    "Equal": np.equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
    "Not": np.logical_not,
}
"""NumPy's functions for the elementwise operators that compute shapes, indices and masks."""
WRAPPING_OPERATORS = ("Add", "Sub", "Mul", "Pow", "Sum", "Neg", "Abs")
"""Operators whose int64 results wrap around if they exceed 64 bits."""
FOLDED_MOVES = ("Range", "Concat", "Gather", "CumSum", "NonZero")
"""Further operators that are computed at once: they make, move or count elements."""


def _broadcast_elements(arrays: Sequence[Values]) -> int:
    """Return the elements of the shape that arrays are broadcast to, as an exact integer."""
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    return math.prod(shape)


def folded(ctx: Context) -> Tensor | None:
    """Return the result of a node if its inputs are known and they and the result are small."""
    known_inputs = [t for t in ctx.inputs if t is not None and t.known is not None]
    if (
        not known_inputs
        or len(known_inputs) < len(ctx.inputs)
        or sum(t.elements for t in known_inputs) > kinds.MAX_FOLDED_ELEMENTS
    ):
        return None
    if ctx.op not in (*UFUNCS, "Div", "Mod", "Where", *FOLDED_MOVES):
        return None
    arrays = [t.array() for t in known_inputs]
    with np.errstate(all="ignore"):
        if ctx.op in FOLDED_MOVES:
            values = _move_folded(ctx, *arrays)
        elif _broadcast_elements(arrays) > kinds.MAX_FOLDED_ELEMENTS:
            values = None
        else:
            values = _element_by_element(ctx, *arrays)
            _check_64_bits(ctx, values, *arrays)
    return None if values is None else kinds.known(values)


def _check_64_bits(ctx: Context, integers: Values, *arrays: Values) -> None:
    """Raise `GraphError` if NumPy's int64 overflowed: then the result in fp64 differs much."""
    if integers.dtype != np.int64 or ctx.op not in WRAPPING_OPERATORS:
        return
    # 2^62 + 2^62 wraps to -2^63 in int64, and is 9.2e18 in fp64: far apart, so this is an error
    fp64_values = _element_by_element(ctx, *(array.astype(np.float64) for array in arrays))
    if not np.allclose(fp64_values, integers.astype(np.float64), rtol=1e-9, atol=0.5):
        got = f"numbers from {fp64_values.min():g} to {fp64_values.max():g}"
        raise GraphError("int64 numbers that fit in 64 bits", got, "correct the model")


def _element_by_element(ctx: Context, x: Values, *more: Values) -> Values:
    """Return the result of an elementwise node, its operands being x and `more`."""
    if ctx.op == "Where":
        return np.where(x, *more)
    if ctx.op in ("Div", "Mod") and x.dtype.kind in "iu" and not np.all(more[0]):
        raise GraphError("a divisor that is not 0", "0", "correct the model")
    if ctx.op == "Div" and x.dtype.kind in "iu":
        # truncated toward zero, -7 / 2: (-7 - fmod(-7, 2)) // 2 = (-7 + 1) // 2 = -3.
        return np.asarray((x - np.fmod(x, *more)) // more[0])
    if ctx.op == "Div":
        return np.asarray(x / more[0])
    if ctx.op == "Mod":
        return np.asarray(np.fmod(x, *more) if ctx.attr("fmod") else np.mod(x, *more))
    total = UFUNCS[ctx.op](x, *more[:1])
    for array in more[1:]:
        total = UFUNCS[ctx.op](total, array)
    return np.asarray(total if total.dtype == np.bool_ else total.astype(x.dtype))


def _move_folded(ctx: Context, x: Values, *more: Values) -> Values | None:
    """Return the result of one of `FOLDED_MOVES`; None for a gather that is too large."""
    if ctx.op == "Concat":
        return np.concatenate((x, *more), ctx.attr("axis"))
    if ctx.op == "NonZero":
        return np.array(np.nonzero(x), np.int64)
    if ctx.op == "Range":
        return _number_range(ctx, *(v.reshape(()).item() for v in (x, *more))).astype(x.dtype)
    if ctx.op == "CumSum":  # exclusive: without the element itself; reverse: from the end
        axis = int(more[0].reshape(()).item())
        flipped = np.flip(x, axis) if ctx.attr("reverse") else x
        total = np.cumsum(flipped, axis, dtype=x.dtype)
        total = total - flipped if ctx.attr("exclusive") else total
        return np.asarray(np.flip(total, axis) if ctx.attr("reverse") else total)
    indices = more[0]
    axis = ctx.attr("axis")
    size = x.shape[axis]
    if indices.size * (x.size // max(1, size)) > kinds.MAX_FOLDED_ELEMENTS:
        return None
    if indices.size and (indices.min() < -size or indices.max() >= size):
        raise GraphError(
            f"indices from {-size} to {size - 1}", str(indices)[:40], "correct the model"
        )
    return np.take(x, indices, axis)


def _number_range(ctx: Context, start: Any, stop: Any, step: Any) -> Values:
    if step == 0:
        raise GraphError("a step that is not 0", "0", "correct the model")
    # From 0 to 10 by 3: ceil(10 / 3) = 4 numbers, 0, 3, 6, 9.
    count = max(0, int(-(-(stop - start) // step)))
    if count > kinds.MAX_FOLDED_ELEMENTS:
        ctx.unsupported(f"a range of at most {kinds.MAX_FOLDED_ELEMENTS} numbers", str(count))
    return np.asarray(start + step * np.arange(count))
