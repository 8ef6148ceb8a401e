"""Builds graphs of measured kernels that hold a matrix product and the steps around it.

    quant_matmul                y = (x w + bias) scale [token]                   x, w in int8
    grouped-int8, matmul-relu   y = x w, then what `epilogue` names, one after another
    mla_prolog                  queries and keys of latent attention, made from hidden states
    conv_3d_backprop_filter     dw = sum over images of dy x, one plane of taps after another

Scales and biases are constants; the factors of products are inputs, so that no compiler computes
the product beforehand. Inputs of the cube have the layout that it reads, as for an operator that
is timed alone; its results keep the layout that it writes.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ascend_lab.compare.rows import Shape, Work
from ascend_lab.compiler import Graph, GraphBuilder, TensorType
from ascend_lab.compiler.draft import Value
from ascend_lab.compiler.ir import Seeded
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import shown
from ascend_lab.machine.chip import BLOCK_BYTES

FLOATS = ("fp16", "bf16")
SCALE = Seeded(1, 1e-3, 1e-2)
"""Scales of sums of int8 products, which bring the sums into the range of fp16."""
WHOLE_BIAS = Seeded(2, 100.0)
FLOAT_BIAS = Seeded(3)


def known_words(work: Work, known: Collection[str]) -> None:
    """Raise `UnsupportedError` for an attribute of a row whose meaning is unknown here."""
    for word, value in work.attributes.items():
        if word not in known:
            needed = f"{work.operator}: attributes {', '.join(known) or '(none)'}"
            raise UnsupportedError(needed, f"{word}={shown(value)}", "what it changes is unknown")


def one_dtype_each(work: Work) -> tuple[str, ...]:
    """Return a number format for each input; raise `InputError` where their number differs."""
    if len(work.dtypes) != len(work.shapes):
        needed = f"{work.operator}: a dtype for each of {len(work.shapes)} inputs"
        raise InputError(needed, str(len(work.dtypes)), "correct that row")
    return work.dtypes


def in_fractals(graph: Graph, layouts: Mapping[str, str]) -> Graph:
    """Return a graph in which the inputs named in `layouts` have those layouts."""
    types = dict(graph.types)
    for name, layout in layouts.items():
        types[name] = replace(types[name], layout=layout)
    return replace(graph, types=types)


def product_of(work: Work) -> tuple[Shape, Shape]:
    """Return x and w of a product of two matrices, or of batches of them.

    If w is a single matrix, the rows of a batch x form one matrix. Raises `InputError` for others.
    """
    x, w = work.shapes[:2]
    # (4, 128, 64) by (64, 32): 512 rows by one matrix
    if len(w) == 2 and len(x) > 2:
        x = (math.prod(x[:-1]), x[-1])
    if len(x) != len(w) or len(x) < 2 or x[-1] != w[-2] or x[:-2] != w[:-2]:
        needed = f"{work.operator}: x (..., m, k) and w (..., k, n)"
        raise InputError(needed, f"{x} and {w}", "correct that row")
    return x, w


def column(work: Work, shape: Shape, columns: int, dtype: str) -> TensorType:
    """Return the type of a number per column; raise `InputError` for other sizes."""
    if shape not in ((columns,), (1,), (1, columns)):
        needed = f"{work.operator}: one number, or one for each of {columns} columns"
        raise InputError(needed, str(shape), "correct that row")
    return TensorType((columns,), dtype)


# -- int8 times int8 -------------------------------------------------------------------------------
def quant_matmul(work: Work) -> Graph:
    """Return y = (x w + bias) scale, then times a number per row: x (.., m, k), w (.., k, n).

    The attribute `with` names the inputs after x and w, joined by "+": scale, bias, pertoken.
    """
    known_words(work, ("out_dtype", "with"))
    dtypes = one_dtype_each(work)
    parts = str(work.attributes.get("with", "scale")).split("+")
    if len(work.shapes) != 2 + len(parts) or set(parts) - {"scale", "bias", "pertoken"}:
        needed = f"{work.operator}: inputs x, w and {', '.join(parts)}"
        raise InputError(needed, f"{len(work.shapes)} shapes", "correct that row")
    if dtypes[:2] != ("int8", "int8") or "scale" not in parts:
        raise UnsupportedError(
            f"{work.operator}: bytes and a scale", str(dtypes), "none is guessed"
        )
    x, w = product_of(work)
    # "scale+pertoken" names the third and the fourth input
    operands = dict(zip(parts, zip(work.shapes[2:], dtypes[2:], strict=True), strict=True))
    net = GraphBuilder(work.operator)
    op = "matmul" if len(x) == 2 else "batch_matmul"
    # int8 times int8 in int32, exact up to 2^31
    sums = net.add_node(op, net.input("x", x, "int8"), net.input("w", w, "int8"))
    out = str(work.attributes.get("out_dtype", "fp16"))
    read = {"x": x, "w": w}
    layouts = {name: CUBE_READS[name] for name, shape in read.items() if _in_blocks(shape)}
    return in_fractals(_dequantised(net, work, sums, operands, out), layouts)


CUBE_READS = {"x": "FRACTAL_NZ", "w": "FRACTAL_ZN"}


def _in_blocks(shape: Shape) -> bool:
    """Tell whether rows of int8 begin at multiples of a block, so that the cube loads them as is.

    Other rows are converted first, by a kernel of their own.
    """
    return shape[-1] % BLOCK_BYTES == 0


OperandsByName = Mapping[str, tuple[Shape, str]]


def _dequantised(
    net: GraphBuilder, work: Work, sums: Value, operands: OperandsByName, out: str
) -> Graph:
    """Return the graph of sums scaled by column and by row; a bias in int32 is one of the sums."""
    columns = sums.shape[-1]
    numbers = list[Value]()
    shape, _ = operands["scale"]
    numbers.append(net.constant(SCALE, column(work, shape, columns, "fp32"), "scale"))
    shape, dtype = operands.get("bias", ((1,), ""))
    # an int32 bias joins the sums before the scale, a float one comes after it
    if dtype == "int32":
        numbers.append(net.constant(WHOLE_BIAS, column(work, shape, columns, dtype), "bias"))
    # steps in fp32 follow the scale, so that rounding to fp16 has to wait for them
    rounds_late = "pertoken" in operands or dtype in ("fp32", *FLOATS)
    y = net.add_node("dequantise", sums, *numbers, dtype="fp32" if rounds_late else out)
    if "pertoken" in operands:
        rows, _ = operands["pertoken"]
        if rows != (sums.shape[-2],):
            needed = f"{work.operator}: a number for each of {sums.shape[-2]} rows"
            raise InputError(needed, str(rows), "correct that row")
        y = net.mul(y, net.input("token", (*rows, 1), "fp32"))
    if dtype in ("fp32", *FLOATS):
        kind = column(work, shape, columns, "fp32")
        y = net.add(y, net.constant(FLOAT_BIAS, kind, "bias"))
    net.output(net.cast(y, dtype=out) if rounds_late else y)
    return net.build()


# -- one product and the steps in its attribute `epilogue` -----------------------------------------
STEPS = ("dequantise", "relu", "gelu", "cast")
KERNEL_KEYS = ("base", "single", "mix", "depth", "cores")
"""Attributes on how a measured kernel was written; only `cores` is used, by the model."""


def with_epilogue(work: Work) -> Graph:
    """Return y = x w and the steps that `epilogue` names: x (m, k), w (k, n) of one format.

    Sums of int8 products are scaled by column to fp32 first; a cast goes to fp16, or the format of
    x.
    """
    measured_words = [word for word in work.attributes if word.endswith(("_us", "_share"))]
    known_words(work, ("epilogue", *KERNEL_KEYS, *measured_words))
    steps = str(work.attributes.get("epilogue", "")).split("+")
    is_int8 = work.dtypes == ("int8",)
    unknown = [step for step in steps if step not in STEPS]
    if unknown or len(work.shapes) != 2 or is_int8 != (steps[0] == "dequantise"):
        needed = f"{work.operator}: x, w and an epilogue of {', '.join(STEPS)}, bytes dequantised"
        raise UnsupportedError(needed, f"{'+'.join(steps)}", "none is guessed")
    if len(work.dtypes) != 1 or work.dtypes[0] not in ("int8", *FLOATS):
        needed = f"{work.operator}: one of int8, {', '.join(FLOATS)}"
        raise UnsupportedError(needed, ", ".join(work.dtypes), "none is guessed")
    x, w = product_of(work)
    (main,) = work.dtypes
    net = GraphBuilder(work.operator)
    y = net.matmul(net.input("x", x, main), net.input("w", w, main))
    for step in steps:
        if step == "dequantise":
            scale = net.constant(SCALE, TensorType((w[-1],), "fp32"), "scale")
            y = net.add_node("dequantise", y, scale, dtype="fp32")
        elif step == "cast":
            y = net.cast(y, dtype="fp16" if is_int8 else main)
        else:
            y = net.add_node(step, y)
    net.output(y)
    return in_fractals(net.build(), CUBE_READS)


# -- latent attention, up to its queries and keys --------------------------------------------------
HALF = 2
"""Number of parts of a row: rotary embedding rotates the first half with the second."""


def mla_prolog(work: Work) -> Graph:
    """Return queries and keys of multi-head latent attention made from hidden states.

    Inputs: states (batch, tokens, hidden); weights down to a short query, up to all heads, from
    each head to the latent size, down to latent key and rotary key; scales of two norms; sine and
    cosine. Results: queries (tokens, heads, latent), their rotary part, latent keys, rotary keys.
    """
    known_words(work, ("heads",))
    if len(work.shapes) != 9 or len(work.dtypes) != 1 or work.dtypes[0] not in FLOATS:
        needed = f"{work.operator}: nine inputs in one of {', '.join(FLOATS)}"
        raise UnsupportedError(needed, f"{len(work.shapes)} in {work.dtypes}", "none is guessed")
    (batch, tokens, hidden), down, up, latent, down_key, *_, sine, cosine = work.shapes
    heads, size, width = latent
    rows = batch * tokens
    rotary_size = sine[-1]
    head_size = up[1] // heads
    sizes_in_row = (down[0], up[0], down_key, work.shapes[5], work.shapes[6], cosine)
    sizes_needed = (hidden, down[1], (hidden, width + rotary_size), (down[1],), (width,), sine)
    if (
        sizes_in_row != sizes_needed
        or head_size * heads != up[1]
        or head_size != size + rotary_size
    ):
        needed = f"{work.operator}: weights whose sizes go together"
        raise InputError(needed, str(work.shapes), "correct that row")
    net = GraphBuilder(work.operator, work.dtypes[0])
    x = net.input("x", (rows, hidden))
    sine_cosine = (
        net.input("sine", (rows, 1, rotary_size)),
        net.input("cosine", (rows, 1, rotary_size)),
    )
    # down to a short vector, its norm, up to all heads: fewer weights than one large matrix
    short = net.rms_norm(net.matmul(x, net.weight(down, "down")), _ones(net, down[1]))
    queries = net.reshape(net.matmul(short, net.weight(up, "up")), shape=(rows, heads, head_size))
    plain_queries = net.transpose(_cut(net, queries, 0, size), perm=(1, 0, 2))
    # latent attention: queries are brought to the size of the compressed keys, a matrix per head
    latent_queries = net.batch_matmul(plain_queries, net.weight(latent, "latent"))
    net.output(net.transpose(latent_queries, perm=(1, 0, 2)))
    net.output(_rotated(net, _cut(net, queries, size, head_size), *sine_cosine))
    keys = net.matmul(x, net.weight(down_key, "down_key"))
    net.output(net.rms_norm(_cut(net, keys, 0, width), _ones(net, width)))
    rotary = net.reshape(_cut(net, keys, width, width + rotary_size), shape=(rows, 1, rotary_size))
    net.output(_rotated(net, rotary, *sine_cosine))
    return in_fractals(net.build(), {"x": "FRACTAL_NZ"})


def _ones(net: GraphBuilder, size: int) -> Value:
    """Return the scales of a norm."""
    return net.fill((size,), 1.0, "scale")


def _cut(net: GraphBuilder, x: Value, first: int, end: int) -> Value:
    """Return columns of the last axis."""
    leading_axes = len(x.shape) - 1
    begin = (*(0,) * leading_axes, first)
    columns: Value = net.slice(x, begin=begin, end=(*x.shape[:-1], end))
    return columns


def _rotated(net: GraphBuilder, x: Value, sine: Value, cosine: Value) -> Value:
    """Return x cosine + (-x2, x1) sine, for the halves x1 and x2 of each row."""
    # (x1, x2) -> (x1, x2) cos + (-x2, x1) sin
    middle = x.shape[-1] // HALF
    end = x.shape[-1]
    swapped = net.concat(net.neg(_cut(net, x, middle, end)), _cut(net, x, 0, middle), axis=-1)
    rotated: Value = net.add(net.mul(x, cosine), net.mul(swapped, sine))
    return rotated


# -- weight gradients of convolutions in three dimensions ------------------------------------------
def filter_gradient(work: Work) -> Graph:
    """Return dw (planes of taps) of a 3-D convolution: x (n, c, d, h, w), dy (n, k, d', h', w').

    A plane of taps is the weight gradient of images: dw[t] = sum over frames f of dy[f] with
    x[f stride + t dilation - pad]. Images of a frame are adjacent, like blocks of channels.
    """
    known_words(work, ("strides", "pads", "dilations", "filter"))
    if len(work.shapes) != 2 or len(work.dtypes) != 1 or work.dtypes[0] not in FLOATS:
        needed = f"{work.operator}: x and dy in one of {', '.join(FLOATS)}"
        raise UnsupportedError(needed, f"{len(work.shapes)} in {work.dtypes}", "none is guessed")
    (n, c, depth, *image_size), (_, k, frames, *gradient_size) = work.shapes
    words = {"strides": 3, "pads": 6, "dilations": 3, "filter": 5}
    stride, pads, dilation, taps = (_numbers(work, word, size) for word, size in words.items())
    if taps[:2] != (k, c):
        raise InputError(f"{work.operator}: a filter of {k}, {c}", str(taps), "correct that row")
    net = GraphBuilder(work.operator, work.dtypes[0])
    x = net.input("x", (depth * n, c, *image_size))
    dy = net.input("dy", (frames * n, k, *gradient_size))
    window: dict[str, Any] = {"kernel": taps[3:], "stride": stride[1:], "dilation": dilation[1:]}
    window["pad"] = (pads[2:4], pads[4:6])
    # frame f of dy meets frame f stride + shift of x
    shifts = [tap * dilation[0] - pads[0] for tap in range(taps[2])]
    # at the borders a shift leads outside x: those frames of dy have no term
    frames_of_shift = {}
    for shift in shifts:
        inside = [f for f in range(frames) if 0 <= f * stride[0] + shift < depth]
        frames_of_shift[shift] = inside
    planes: dict[int, Value] = {}
    # the shift with most frames first: the others use slices of its converted frames
    for shift in sorted(shifts, key=lambda shift: -len(frames_of_shift[shift])):
        count = len(frames_of_shift[shift])
        if not count:
            raise UnsupportedError(f"{work.operator}: taps inside x", str(taps), "none is guessed")
        first_frame = frames_of_shift[shift][0]
        images = _frames(net, x, (first_frame * stride[0] + shift, count, stride[0]), n)
        gradients = _frames(net, dy, (first_frame, count, 1), n)
        planes[shift] = net.conv2d_grad_weight(images, gradients, **window)
    for shift in shifts:
        net.output(planes[shift])
    return net.build()


def _frames(net: GraphBuilder, x: Value, frames: tuple[int, int, int], images: int) -> Value:
    """Return (first, count, step) frames of x (frames x images, ...)."""
    first_frame, count, step = frames
    if (first_frame, count * images, step) == (0, x.shape[0], 1):
        return x
    if step == 1:
        begin = first_frame * images
        end = (first_frame + count) * images
        run: Value = net.slice(x, begin=(begin, 0, 0, 0), end=(end, *x.shape[1:]))
        return run
    single_frames = [_frames(net, x, (first_frame + i * step, 1, 1), images) for i in range(count)]
    joined: Value = single_frames[0] if count == 1 else net.concat(*single_frames, axis=0)
    return joined


def _numbers(work: Work, word: str, count: int) -> tuple[int, ...]:
    """Return the whole numbers of an attribute; raise `InputError` for anything else."""
    numbers = work.attributes.get(word)
    if (
        not isinstance(numbers, tuple)
        or len(numbers) != count
        or not all(type(v) is int for v in numbers)
    ):
        raise InputError(
            f"{work.operator}: {word}, {count} whole numbers", shown(numbers), "correct it"
        )
    return numbers


BUILDERS = {
    "quant_matmul": quant_matmul,
    "grouped-int8": with_epilogue,
    "matmul-relu": with_epilogue,
    "mla_prolog": mla_prolog,
    "conv_3d_backprop_filter": filter_gradient,
}
