"""Imports ONNX operators on integers (quotients, remainders, bits) and on quantised tensors.

A graph divides in fp64 and rounds to the nearest integer; ONNX truncates toward zero, so quotients
are corrected by 1. Products and sums wrap at 32 bits: differences of close numbers stay exact.
"""

import numpy as np

from ascend_lab.compiler.draft import Value
from ascend_lab.compiler.onnx import export_writer, windows
from ascend_lab.compiler.onnx.context import Context, converter
from ascend_lab.compiler.onnx.tensors import BITWISE_TYPES, ELEMENT_TYPES, FLOATS, Shape
from ascend_lab.operators.ops.quantised import OFFSETS, SCALES

_NARROW = ("int8", "uint8")


def _have_opposite_signs(ctx: Context, x: Value, y: Value) -> Value:
    """Return 1 where two numbers have different signs and neither is 0, else 0."""
    return ctx.emit("less", _sign_of_product(ctx, x, y), ctx.constant_array(0, "int32", "zero"))


def _sign_of_product(ctx: Context, x: Value, y: Value) -> Value:
    """Return -1, 0 or 1, the sign of x y; the product itself might exceed 32 bits."""
    return ctx.emit("mul", ctx.emit("sign", x), ctx.emit("sign", y))


def divided(ctx: Context, x: Value, y: Value) -> tuple[Value, Value]:
    """Return x / y truncated toward zero, and the remainder with the sign of x, in int32."""
    x = ctx.cast(x, "int32")
    y = ctx.cast(y, "int32")
    # -7 / 2: the nearest integer is -4 (halves to even), with the remainder 1; its sign is not that
    # of x, so both are corrected: -3 and -1
    nearest = ctx.emit("div", x, y)
    remainder = ctx.emit("sub", x, ctx.emit("mul", nearest, y))
    # the rounded quotient is too far from zero by 1 if remainder and x have different signs
    step = ctx.emit("mul", _have_opposite_signs(ctx, remainder, x), _sign_of_product(ctx, x, y))
    return ctx.emit("sub", nearest, step), ctx.emit("add", remainder, ctx.emit("mul", step, y))


def modulo(ctx: Context, x: Value, y: Value) -> Value:
    """Return the remainder with the sign of y, in int32."""
    # -7 modulo 2: the remainder -1 has not the sign of 2, so it becomes -1 + 2 = 1
    remainder = divided(ctx, x, y)[1]
    y = ctx.cast(y, "int32")
    return ctx.choose(
        _have_opposite_signs(ctx, remainder, y), ctx.emit("add", remainder, y), remainder
    )


def wrapped(ctx: Context, x: Value, dtype: str) -> Value:
    """Return the last eight bits of integers as int8 or uint8, as the standard casts."""
    half = ctx.constant_array(128 if dtype == "int8" else 0, "int32", "half")
    raised = ctx.emit("add", ctx.cast(x, "int32"), half)
    # 200 as int8: (200 + 128) and 255 = 72, minus 128 is -56
    low = ctx.emit("and", raised, ctx.constant_array(255, "int32", "byte"))
    return ctx.cast(ctx.emit("sub", low, half), dtype)


@converter("BitwiseXor", types=(BITWISE_TYPES,), since=18)
def _xor(ctx: Context) -> Value:
    """Return the bits that are in one operand only: (x or y) - (x and y)."""
    x = ctx.input(0)
    y = ctx.input(1)
    # 6 and 3: 7 - 2 = 5
    return ctx.emit("sub", ctx.emit("or", x, y), ctx.emit("and", x, y))


@converter("BitShift", types=(BITWISE_TYPES,), since=11)
def _shift(ctx: Context) -> Value:
    """Return a shift: a product with a power of two, or a quotient by one, rounded down.

    Shifts by the number of bits or more leave 0, or -1 for negative numbers shifted right.
    """
    x = ctx.input(0, "int32")
    y = ctx.input(1, "int32")
    # a shift is a product with, or a quotient by, a power of two from a table
    is_left = ctx.attr("direction") == "LEFT"
    dtype = ctx.input(0).type.dtype
    if not is_left and ctx.attr("direction") != "RIGHT":
        ctx.unsupported("direction LEFT or RIGHT", str(ctx.attr("direction")))
    largest_shift = (32 if dtype == "int32" else 8) - (1 if is_left or dtype != "int32" else 2)
    powers = (2 ** np.arange(largest_shift + 1, dtype=np.int64)).astype(np.int32)
    shift = ctx.emit("clip", y, low=0, high=largest_shift)
    power = ctx.emit("gather", ctx.constant_array(powers, "int32", "powers"), shift, axis=0)
    zero = ctx.constant_array(0, "int32", "zero")
    if is_left:
        moved = ctx.emit("mul", x, power)
        sign = zero
    else:
        # -5 to the right by 1: (-5 - 1) / 2 = -3, rounded down as a shift does
        moved = ctx.emit("div", ctx.emit("sub", x, modulo(ctx, x, power)), power)
        # a negative number shifted right by all its bits is -1
        sign = ctx.emit("neg", ctx.emit("less", x, zero))
    inside = ctx.emit("equal", y, shift)
    shifted = ctx.choose(inside, moved, sign)
    return shifted if dtype == "int32" else wrapped(ctx, shifted, dtype)


# -- quantised tensors: integers q that mean (q - zero point) * scale -----------------------------
def _in_broadcast_shape(ctx: Context, i: int, shape: Shape) -> Value:
    """Return a scale or zero point shaped to broadcast: one for all, each row or each block."""
    numbers = ctx.input(i)
    block = ctx.attr("block_size")
    if numbers.type.elements == 1 and not block:
        return ctx.reshape(numbers, ())
    axis = ctx.axis(ctx.attr("axis"), len(shape))
    if not block:
        if numbers.shape != (shape[axis],):
            ctx.unsupported(f"{shape[axis]} scales along axis {axis}", str(numbers.shape))
        sides = (shape[axis], *(1,) * (len(shape) - axis - 1))
        if ctx.tensor(i).known is None:
            return ctx.reshape(numbers, sides)
        return ctx.constant_array(ctx.const(i).reshape(sides), numbers.type.dtype, "scales")
    # 10 rows in blocks of 4 have 3 scales; row 9 has scale 9 // 4 = 2
    block_shape = tuple(-(-n // block) if d == axis else n for d, n in enumerate(shape))
    if numbers.shape != block_shape:
        ctx.unsupported(f"scales {block_shape} for blocks of {block}", str(numbers.shape))
    rows = ctx.constant_array(np.arange(shape[axis]) // block, "int32", "blocks")
    return ctx.emit("gather", numbers, rows, axis=axis)


def _known_scale(ctx: Context) -> tuple[float, int] | None:
    """Return scale and zero point if there is one of each and they are known, else None."""
    operands = [i for i in (1, 2) if ctx.has(i)]
    if any(ctx.tensor(i).known is None or ctx.tensor(i).elements != 1 for i in operands):
        return None
    scale = float(ctx.scalar(1))
    offset = int(ctx.scalar(2)) if ctx.has(2) else 0
    fits = SCALES[0] <= scale <= SCALES[1] and OFFSETS[0] <= offset <= OFFSETS[1]
    return (scale, offset) if fits and not ctx.attr("block_size") else None


@converter("QuantizeLinear", types=((*FLOATS, "int32"), FLOATS, _NARROW), since=10)
def _quantize(ctx: Context) -> Value:
    """Return round(x / scale) + zero point: one operator for a known scale, several otherwise."""
    if ctx.attr("precision"):
        ctx.unsupported("the scale's precision", f"precision {ctx.attr('precision')}")
    output_dtype = ctx.attr("output_dtype")
    elem = ctx.elem(2) if ctx.has(2) else "uint8"
    ctx.result = ELEMENT_TYPES[output_dtype][0] if output_dtype in ELEMENT_TYPES else elem
    if ctx.result not in _NARROW or (output_dtype and output_dtype not in ELEMENT_TYPES):
        ctx.unsupported(
            "output in int8 or uint8", ctx.result if not output_dtype else str(output_dtype)
        )
    x = ctx.input(0)
    if known := _known_scale(ctx):
        number, offset = known
        return ctx.emit("quantise", x, scale=number, offset=offset, dtype=ctx.result)
    scale = _in_broadcast_shape(ctx, 1, x.shape)
    ratio = ctx.emit("div", ctx.cast(x, scale.type.dtype), scale)
    rounded = ctx.cast(ctx.emit("round", ratio), "fp32")
    if ctx.has(2):
        rounded = ctx.emit("add", rounded, ctx.cast(_in_broadcast_shape(ctx, 2, x.shape), "fp32"))
    return ctx.cast(rounded, ctx.result)


@converter("DequantizeLinear", types=((*_NARROW, "int32"), FLOATS, (*_NARROW, "int32")), since=10)
def _dequantize(ctx: Context) -> Value:
    """Return (x - zero point) scale: one operator if scale and zero point allow it."""
    output_dtype = ctx.attr("output_dtype")
    known = _known_scale(ctx)
    ctx.result = ctx.elem(1)
    if output_dtype and ELEMENT_TYPES.get(output_dtype, ("",))[0] != ctx.result:
        ctx.unsupported("output in the scale's type", f"output_dtype {output_dtype}")
    if known:
        number, offset = known
        dtype = ctx.input(1).type.dtype
        return ctx.emit("dequantise", ctx.input(0), scale=number, offset=offset, dtype=dtype)
    scale = _in_broadcast_shape(ctx, 1, ctx.shape(0))
    if not ctx.has(2) or (ctx.tensor(2).known is not None and not ctx.const(2).any()):
        wide = ctx.cast(scale, "fp32")  # no zero point, one scale for each channel
        return ctx.emit("dequantise", ctx.input(0), wide, dtype=scale.type.dtype)
    x = ctx.input(0, "int32")
    if ctx.has(2):
        x = ctx.emit("sub", x, ctx.cast(_in_broadcast_shape(ctx, 2, x.shape), "int32"))
    return ctx.emit("mul", ctx.cast(x, scale.type.dtype), scale)


def _zero_point(ctx: Context, place: int, *, allows_several: bool = False) -> Value | int:
    """Return a zero point: 0 if there is none, a number if it is known, else an int32 tensor.

    Raises `UnsupportedError` for several zero points, unless `allows_several`.
    """
    if not ctx.has(place):
        return 0
    tensor = ctx.tensor(place)
    points = np.unique(ctx.const(place)) if tensor.known is not None else np.zeros(0)
    if points.size == 1:
        return int(points[0])
    if tensor.elements == 1:
        return ctx.reshape(ctx.input(place, "int32"), ())
    if not allows_several:
        ctx.unsupported(f"input {place}: one zero point", str(tensor.shape))
    return ctx.input(place, "int32")


def _in_int8(ctx: Context, i: int, point: Value | int) -> tuple[Value, Value | int]:
    """Return input i in int8 and its zero point; for uint8 both are 128 lower."""
    x = ctx.input(i)
    if x.type.dtype == "int8":
        return x, point
    # the cube multiplies int8: (a - 128) - (point - 128) is the same difference
    half = ctx.constant_array(128, "int32", "half")
    moved = ctx.cast(ctx.emit("sub", ctx.cast(x, "int32"), half), "int8")
    return moved, point - 128 if isinstance(point, int) else ctx.emit("sub", point, half)


def _minus_product(ctx: Context, total: Value, sums: Value, point: Value | int) -> Value:
    """Return total - sums x point."""
    number = ctx.constant_array(point, "int32", "point") if isinstance(point, int) else point
    return ctx.emit("sub", total, ctx.emit("mul", sums, number))


def _product(ctx: Context, factors: tuple[int, int], zeros: tuple[int, int]) -> Value:
    """Return sum (a - za) (b - zb) of the inputs `factors` and their zero points `zeros`.

    The cube multiplies int8 numbers: the result is sum a b - za sum b - zb sum (a - za).
    """
    a_shape, b_shape = (ctx.shape(place) for place in factors)
    if min(len(a_shape), len(b_shape)) < 2:
        ctx.unsupported("matrices", f"{a_shape} and {b_shape}")
    op = "matmul" if len(a_shape) == len(b_shape) == 2 else "batch_matmul"
    a, a_point = _in_int8(ctx, factors[0], _zero_point(ctx, zeros[0], allows_several=True))
    b, b_point = _in_int8(ctx, factors[1], _zero_point(ctx, zeros[1], allows_several=True))
    if not isinstance(a_point, int) and len(a_point.shape) == 1:  # one zero point for each row
        a_point = ctx.reshape(a_point, (*a_point.shape, 1))
    total = ctx.emit(op, a, b)
    if a_point != 0:
        columns = ctx.emit("reduce_sum", ctx.cast(b, "int32"), axis=-2, keepdims=True)
        total = _minus_product(ctx, total, columns, a_point)
    if b_point != 0:
        sums = ctx.emit("reduce_sum", ctx.cast(a, "int32"), axis=-1, keepdims=True)
        if a_point != 0:
            terms = ctx.constant_array(a_shape[-1], "int32", "terms")
            sums = _minus_product(ctx, sums, terms, a_point)
        total = _minus_product(ctx, total, sums, b_point)
    return total


@converter("MatMulInteger", types=(_NARROW,), result="int32", since=10)
def _matmul_integer(ctx: Context) -> Value:
    return _product(ctx, (0, 1), (2, 3))


def _convolved(
    ctx: Context, factors: tuple[int, int], zeros: tuple[int, int], *bias: Value
) -> Value:
    """Return the convolution in int32 of the inputs `factors` minus their zero points `zeros`.

    The cube multiplies int8 numbers: with zero points zx and zw the result is
    sum (x - zx) w - zw sum (x - zx); the last sum is a convolution whose weights are ones.
    """
    i, j = factors
    x, x_point = _in_int8(ctx, i, _zero_point(ctx, zeros[0]))
    w, w_points = _in_int8(ctx, j, _zero_point(ctx, zeros[1], allows_several=True))
    total = _convolved_from_zero(ctx, x, x_point, w, *bias)
    if w_points == 0:
        return total
    if not isinstance(w_points, int) and w_points.shape:  # one zero point for each channel
        w_points = ctx.reshape(w_points, (w_points.type.elements, *(1,) * (len(w.shape) - 2)))
    # sum x over each window, as a convolution with ones
    ones = ctx.constant_array(np.ones(w.shape), "int8", "ones")
    return _minus_product(ctx, total, _convolved_from_zero(ctx, x, x_point, ones), w_points)


def _convolved_from_zero(
    ctx: Context, x: Value, zero_point: Value | int, w: Value, *bias: Value
) -> Value:
    """Return sum (x - z) w + bias of int8 tensors with zero point z, where padding counts as 0.

    A known z pads the image, and the bias of the layer contains -z sum w. If z is not known, it is
    multiplied with the sums of the weights that lie on the image, and the product is subtracted.
    """
    if not isinstance(zero_point, int):
        inside = ctx.constant_array(np.ones((1, *x.shape[1:])), "int8", "inside")
        counts = windows.convolved(ctx, inside, w)
        return _minus_product(ctx, windows.convolved(ctx, x, w, *bias), counts, zero_point)
    if zero_point:
        # -z sum w for each filter: one number, so that it fits in the bias
        axes = tuple(range(1, len(w.shape)))
        sums = ctx.emit("reduce_sum", ctx.cast(w, "int32"), axis=axes, keepdims=False)
        border_sums = ctx.emit("mul", sums, ctx.constant_array(-zero_point, "int32", "point"))
        bias = (ctx.emit("add", bias[0], border_sums) if bias else border_sums,)
    return windows.convolved(ctx, x, w, *bias, border=zero_point)


@converter("ConvInteger", types=(_NARROW,), result="int32", since=10)
def _conv_integer(ctx: Context) -> Value:
    return _convolved(ctx, (0, 1), (2, 3))


def _rescaled(ctx: Context, total: Value, added_axes: tuple[int, int]) -> Value:
    """Return sums in the output's scale: times a b / y, rounded, plus the zero point, clipped.

    a, b and y are the scales. `added_axes` are the numbers of axes to append to scales of a and of
    b that have one number for each row or channel.
    """
    scales = []
    for i, axis_count in zip((1, 4, 6), (*added_axes, 0), strict=True):
        scale = ctx.input(i, "fp32")
        is_single = scale.type.elements == 1
        shape = () if is_single else (*scale.shape, *(1,) * axis_count)
        scales.append(ctx.reshape(scale, shape))
    # scales 0.02 and 0.01 of the factors, 0.05 of the result: sums times 0.004
    ratio = ctx.emit("div", ctx.emit("mul", scales[0], scales[1]), scales[2])
    rounded = ctx.emit("round", ctx.emit("mul", ctx.cast(total, "fp32"), ratio))
    point = ctx.reshape(ctx.input(7, "fp32"), ())
    ctx.result = ctx.elem(7)
    return ctx.cast(ctx.emit("add", rounded, point), ctx.result)


_QLINEAR_TYPES = (_NARROW, FLOATS, _NARROW, _NARROW, FLOATS, _NARROW, FLOATS, _NARROW)


@converter("QLinearMatMul", types=_QLINEAR_TYPES, since=10)
def _qlinear_matmul(ctx: Context) -> Value:
    total = _product(ctx, (0, 3), (2, 5))
    return _rescaled(ctx, total, (1 if len(ctx.shape(1)) == 1 else 0, 0))


@converter("QLinearConv", types=(*_QLINEAR_TYPES, ("int32",)), since=10)
def _qlinear_conv(ctx: Context) -> Value:
    total = _convolved(ctx, (0, 3), (2, 5), *((ctx.input(8),) if ctx.has(8) else ()))
    return _rescaled(ctx, total, (0, len(ctx.shape(0)) - 2))


# -- export ---------------------------------------------------------------------------------------
def _quantised_from(site: export_writer.Site, x: str, dtype: str) -> str:
    attrs = site.attrs
    step = site.writer.number(attrs["scale"] if "dtype" in attrs else 1.0, "fp32")
    return site.one("QuantizeLinear", x, step, site.writer.number(attrs["offset"], dtype))


def _as_float(site: export_writer.Site, x: str, dtype: str, *bias: str) -> str:
    """Return (x + bias - offset) scale in fp32; ONNX's zero point has x's type, 0 for int32."""
    attrs = site.attrs
    # a zero point of -7 fits in int8, 200 does not; int32 has no zero point
    lowest_byte = {"int8": -128, "uint8": 0}.get(dtype, 256)
    is_integer = float(attrs["offset"]).is_integer()
    if not bias and is_integer and lowest_byte <= attrs["offset"] < lowest_byte + 256:
        point = site.writer.number(attrs["offset"], dtype)
        return site.one("DequantizeLinear", x, site.writer.number(attrs["scale"], "fp32"), point)
    if bias:
        x = site.one("Add", x if dtype == "int32" else site.cast(x, "int32"), *bias)
    wide = site.cast(x, "fp32")
    if "relu" not in attrs and attrs["offset"]:
        wide = site.one("Sub", wide, site.writer.number(attrs["offset"], "fp32"))
    return site.one("Mul", wide, site.writer.number(attrs["scale"], "fp32"))


@export_writer.rule("quantise")
def _quantised_out(site: export_writer.Site) -> export_writer.Result:
    return _quantised_from(site, site.in_fp32()[0], site.attrs["dtype"])


@export_writer.rule("dequantise", "requantise")
def _scaled_out(site: export_writer.Site) -> export_writer.Result:
    scaled = _as_float(site, site.inputs[0], site.dtype, *site.inputs[2:])
    scaled = site.one("Mul", scaled, site.inputs[1]) if len(site.inputs) > 1 else scaled
    if site.op == "dequantise":
        return site.from_fp32(scaled)
    scaled = site.one("Relu", scaled) if site.attrs["relu"] else scaled
    return _quantised_from(site, scaled, "int8")


@export_writer.rule("add_dequantised")
def _sum_out(site: export_writer.Site) -> export_writer.Result:
    total = site.one("Add", site.in_fp32()[0], _as_float(site, site.inputs[1], "int8"))
    return site.from_fp32(total)
