"""Builds graphs of measured vector kernels: activations, tensor lists, norms, quantised rows.

Narrow formats are computed in fp32 and rounded once at the end, as in our operators and in the
vendor's kernels. Each builder says what its graph leaves out.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ascend_lab.compare.rows import Shape, Work
from ascend_lab.compiler import Graph, GraphBuilder, Node
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import shown
from ascend_lab.operators.dsl.tensor import ALIASES
from ascend_lab.operators.ops import formats as forms

FORMATS = {**ALIASES, "bool": "uint8"}
"""Other names of number formats; a truth value is a byte of 0 or 1."""
LARGEST_BYTE = 127.0
LEAST_SCALE = 2.0**-126
"""The least normal number of fp32: rows of zeros are divided by it and stay zeros."""
LONGEST_INDEX = 2**24
"""fp32 holds all whole numbers up to here."""
MAX_POWER_AS_PRODUCT = 8
"""Whole powers up to here are products, as in p-norms of 3 or 5; others e^(p ln x)."""


# -- attributes and formats of a row ---------------------------------------------------------------
def _refuse_others(work: Work, *words: str) -> None:
    """Raise `UnsupportedError` for an attribute that the graph does not know."""
    for word, value in work.attributes.items():
        if word not in words and not word.endswith("_us"):
            needed = f"{work.operator}: attributes among {', '.join(words) or '(none)'}"
            raise UnsupportedError(needed, f"{word}={shown(value)}", "what it changes is unknown")


def _number(work: Work, word: str, usual: float | None = None) -> float:
    """Return an attribute that is a number, inf and nan among them."""
    value = work.attributes.get(word, usual)
    try:
        if isinstance(value, bool) or value is None:
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        needed = f"{work.operator}: {word} a number"
        raise InputError(needed, shown(value), "correct that row") from None


def _dtypes(work: Work, count: int) -> tuple[str, ...]:
    """Return a number format for each of `count` tensors; a row may give one format for all."""
    dtypes = tuple(FORMATS.get(dtype, dtype) for dtype in work.dtypes)
    if len(dtypes) == 1:
        dtypes = dtypes * count
    if len(dtypes) != count:
        needed = f"{work.operator}: one number format, or {count}"
        raise InputError(needed, str(len(work.dtypes)), "correct that row")
    return dtypes


def _only_shape(work: Work) -> Shape:
    if len(work.shapes) != 1:
        raise InputError(f"{work.operator}: one tensor", str(len(work.shapes)), "correct that row")
    return work.shapes[0]


def _wide(net: GraphBuilder, x: Any) -> Any:
    return net.cast(x, dtype="fp32") if x.type.dtype != "fp32" else x


def _narrow(net: GraphBuilder, x: Any, dtype: str) -> Any:
    return net.cast(x, dtype=dtype) if x.type.dtype != dtype else x


# -- element by element ----------------------------------------------------------------------------
def mish(work: Work) -> Graph:
    """Return y = x tanh(ln(1 + e^x)) of one tensor, without overflow.

    Like the vendor's kernel it computes two quotients for all numbers, then selects by x's sign.
    With e = e^-|x| and s = e^-2|x| they are (1 + 2 e) / (1 + 2 e + 2 s) above 0 and
    (2 e + s) / (2 + 2 e + s) below. That takes 22 instructions; our softplus, tanh and product
    would take 15.
    Source: CANN toolkit, TBE operator Mish in its default mode (tbe/impl/dynamic/mish.py).
    """
    _refuse_others(work)
    net = GraphBuilder(work.operator)
    x = net.input("x", _only_shape(work), _dtypes(work, 1)[0])
    wide = _wide(net, x)
    zero = net.fill((1,), 0.0)
    # for x > 0 with e^-x, which cannot overflow
    decay, decay_squared = _two_powers(net, wide, -1.0)
    twice = net.muls(decay, number=2.0)
    numerator = net.adds(twice, number=1.0)
    denominator = net.adds(net.add(twice, net.muls(decay_squared, number=2.0)), number=1.0)
    if_positive = net.select(net.greater(wide, zero), net.div(numerator, denominator), zero)
    # for x <= 0 with e^x
    growth, growth_squared = _two_powers(net, wide, 1.0)
    sum_below = net.add(net.muls(growth, number=2.0), growth_squared)
    quotient = net.div(sum_below, net.adds(sum_below, number=2.0))
    if_negative = net.select(net.less_equal(wide, zero), quotient, zero)
    y = net.mul(wide, net.add(if_positive, if_negative))
    net.output(_narrow(net, y, x.type.dtype))
    return net.build()


def _two_powers(net: GraphBuilder, x: Any, sign: float) -> tuple[Any, Any]:
    """Return e^(sign x) and e^(2 sign x)."""
    return net.exp(net.muls(x, number=sign)), net.exp(net.muls(x, number=2.0 * sign))


POWER_KEYS = ("base", "scale", "shift")
"""Attributes of a row that make it more than the operator exp."""


def exp(work: Work) -> Graph:
    """Return y = base^(scale x + shift), a base of -1 meaning e.

    Scale, shift and ln(base) are tensors of one element, as for the measured kernels Mul and Add:
    their values do not change the time, and even a scale of 1 is multiplied. The measured chain has
    no product by ln(base) if base is e or 1; for 1 a scale and a shift of 0 give 1^x = e^0.
    """
    _refuse_others(work, *POWER_KEYS)
    base = _number(work, "base", -1.0)
    if base <= 0 and base != -1:
        raise InputError("exp: base -1, or a number above 0", shown(base), "correct that row")
    (dtype,) = _dtypes(work, 1)
    net = GraphBuilder(work.operator)
    x = net.input("x", _only_shape(work), dtype)
    # tensors, not numbers: a constant 1 would be folded away, and the measured chain has it
    exponent = net.mul(x, net.input("scale", (1,), dtype))
    exponent = net.add(exponent, net.input("shift", (1,), dtype))
    if base not in (-1.0, 1.0):
        exponent = net.mul(exponent, net.input("ln_base", (1,), dtype))
    net.output(net.exp(exponent))
    return net.build()


def masked_scale(work: Work) -> Graph:
    """Return y = x mask scale; the mask has its own format, the scale is a tensor of one element.

    A product of two formats is in the wider one, and that of fp16 and bf16 in fp32, as in PyTorch,
    from which the kernels were called; a float format counts as wider than any integer format.
    """
    _refuse_others(work, "scale")
    if len(work.shapes) != 2:
        raise InputError("masked_scale: x and mask", str(len(work.shapes)), "correct that row")
    dtypes = _dtypes(work, 2)
    floats = {dtype for dtype in dtypes if forms.is_float(dtype)}
    # bool x uint8 stays a byte; fp16 x bf16 needs fp32, as neither holds the other
    product_dtype = "fp32"
    if not floats:
        product_dtype = dtypes[0]
    elif len(floats) == 1:
        product_dtype = floats.pop()
    net = GraphBuilder(work.operator)
    x = net.input("x", work.shapes[0], dtypes[0])
    mask = net.input("mask", work.shapes[1], dtypes[1])
    product = net.mul(_narrow(net, x, product_dtype), _narrow(net, mask, product_dtype))
    net.output(net.mul(product, net.input("scale", (1,), product_dtype)))
    return net.build()


def addcdiv(work: Work) -> Graph:
    """Return y = x1 + scalar x2 / x3 of three lists of tensors, one list after the other.

    The tensors of a list are concatenated into one tensor: one program serves a list of any
    shapes. The scalar may be NaN and is a tensor of one element.
    """
    _refuse_others(work, "scalar", "tensors")
    count, left_over = divmod(len(work.shapes), 3)
    lists = [work.shapes[place * count : (place + 1) * count] for place in range(3)]
    if left_over or not count or lists.count(lists[0]) < 3:
        needed = f"{work.operator}: three lists of tensors of the same shapes"
        raise InputError(needed, f"{len(work.shapes)} tensors", "correct that row")
    dtype = _one_format(work)
    elements = sum(forms.elements(shape) for shape in lists[0])
    net = GraphBuilder(work.operator)
    # 3 lists of tensors with 100 and 50 elements: three tensors of 150
    x1, x2, x3 = (net.input(name, (elements,), dtype) for name in ("x1", "x2", "x3"))
    # fp32, rounded once at the end
    share = net.div(_wide(net, x2), _wide(net, x3))
    step = net.mul(share, net.input("scalar", (1,), "fp32"))
    net.output(_narrow(net, net.add(_wide(net, x1), step), dtype))
    return net.build()


def _one_format(work: Work) -> str:
    kinds = set(_dtypes(work, len(work.shapes)))
    if len(kinds) != 1:
        needed = f"{work.operator}: one number format"
        raise UnsupportedError(needed, ", ".join(sorted(kinds)), "a list has one")
    return kinds.pop()


def _halves(net: GraphBuilder, x: Any) -> tuple[Any, Any]:
    """Return both halves, (rows, 1, n) each, of a tensor (rows, 2, n)."""
    rows, _, half = x.shape
    front = net.slice(x, begin=(0, 0, 0), end=(rows, 1, half))
    back = net.slice(x, begin=(0, 1, 0), end=(rows, 2, half))
    return front, back


def swi_glu(work: Work) -> Graph:
    """Return y = silu(left half) right half of a tensor cut along an axis.

    It is read as (rows, 2, n): rows are the product of the axes before the cut axis, 1 if that is
    the first. If the axis has an odd size, the last element is sliced off first. A row of an even
    size that names the kernel Slice does not say what was sliced: we assume a last axis longer by
    one, because a slice of other axes is contiguous and needs no kernel.
    """
    _refuse_others(work, "axis")
    shape = _only_shape(work)
    axis = _glu_axis(work)
    half = shape[axis] // 2
    if not half:
        needed = f"{work.operator}: an axis of at least 2"
        raise InputError(needed, str(shape[axis]), "there are no halves")
    (dtype,) = _dtypes(work, 1)
    rows = forms.elements(shape[:axis])
    inner = forms.elements(shape[axis + 1 :])
    net = GraphBuilder(work.operator)
    # 7 columns: the last one is dropped, halves of 3
    if shape[axis] % 2:
        longer = net.input("x", (rows, shape[axis] * inner), dtype)
        even = net.slice(longer, begin=(0, 0), end=(rows, 2 * half * inner))
        x = net.reshape(even, shape=(rows, 2, half * inner))
    elif _names_slice(work):
        lines = forms.elements(shape[:-1])
        longer = net.input("x", (lines, shape[-1] + 1), dtype)
        sliced = net.slice(longer, begin=(0, 0), end=(lines, shape[-1]))
        x = net.reshape(sliced, shape=(rows, 2, half * inner))
    else:
        x = net.input("x", (rows, 2, half * inner), dtype)
    front, back = _halves(net, x)
    y = net.mul(net.silu(_wide(net, front)), _wide(net, back))
    out = (*shape[:axis], half, *shape[axis + 1 :])
    net.output(net.reshape(_narrow(net, y, dtype), shape=out))
    return net.build()


def _names_slice(work: Work) -> bool:
    return "Slice" in work.kernels.split("+")


def _glu_axis(work: Work) -> int:
    return forms.axis_of(work.operator, work.attributes.get("axis", -1), _only_shape(work))


# -- norms of lists --------------------------------------------------------------------------------
def foreach_norm(work: Work) -> Graph:
    """Return (sum |x|^p)^(1 / p) of each tensor of a list; p may be infinite.

    With p = 0 numbers that are not 0 are counted. If one kernel served the list and the shapes are
    equal, the tensors become the rows of one matrix.
    """
    _refuse_others(work, "p", "tensors")
    count = work.attributes.get("tensors", len(work.shapes))
    if not work.shapes or count != len(work.shapes):
        needed = f"{work.operator}: as many shapes as tensors"
        raise InputError(needed, f"tensors={shown(count)}", "correct that row")
    power = _number(work, "p", 2.0)
    if math.isnan(power):
        raise InputError(f"{work.operator}: a power p", "nan", "correct that row")
    dtype = _one_format(work)
    sizes = [forms.elements(shape) for shape in work.shapes]
    net = GraphBuilder(work.operator)
    if not work.kernels and len(set(sizes)) == 1:
        tensors = [net.input("x", (len(sizes), sizes[0]), dtype)]
    else:
        tensors = [net.input(f"x{place}", (1, size), dtype) for place, size in enumerate(sizes)]
    for x in tensors:
        net.output(_narrow(net, _norm_of_rows(net, _wide(net, x), power), dtype))
    return net.build()


def _norm_of_rows(net: GraphBuilder, x: Any, power: float) -> Any:
    """Return the p-norms of the rows of a matrix."""
    # the number of elements that are not 0, by convention
    if power == 0:
        return net.reduce_sum(net.not_equal(x, net.fill((1,), 0.0)), axis=1)
    if power == 1:
        return net.reduce_sum(net.abs(x), axis=1)
    if power == 2:
        return net.sqrt(net.reduce_sum(net.square(x), axis=1))
    if math.isinf(power):
        # p = infinity: the largest size; -infinity: the smallest
        fold = net.reduce_max if power > 0 else net.reduce_min
        return fold(net.abs(x), axis=1)
    total = net.reduce_sum(_to_the(net, net.abs(x), power), axis=1)
    if power == -1:
        return net.rec(total)
    return net.exp(net.muls(net.log(total), number=1.0 / power))


def _to_the(net: GraphBuilder, x: Any, power: float) -> Any:
    """Return x^power of x >= 0: by squares and products where that is whole, x^5 = (x^2)^2 x."""
    size = abs(power)
    if not size.is_integer() or size > MAX_POWER_AS_PRODUCT:
        return net.exp(net.muls(net.log(x), number=power))
    result = x
    # 5 is 101 in binary: x, squared, squared again and times x
    for digit in f"{int(size):b}"[1:]:
        result = net.square(result)
        if digit == "1":
            result = net.mul(result, x)
    return net.rec(result) if power < 0 else result


# -- the index of the largest number ---------------------------------------------------------------
def arg_max(work: Work) -> Graph:
    """Return the index of the first largest number along an axis, int32.

    Indices are counted in fp32; the vendor's are int64.
    """
    _refuse_others(work, "axis")
    shape = _only_shape(work)
    axis = forms.axis_of(work.operator, work.attributes.get("axis", -1), shape)
    count = shape[axis]
    if count > LONGEST_INDEX:
        needed = f"{work.operator}: at most {LONGEST_INDEX} numbers along the axis"
        raise UnsupportedError(needed, str(count), "fp32 counts no further")
    along = tuple(n if at == axis else 1 for at, n in enumerate(shape))
    net = GraphBuilder(work.operator)
    x = _wide(net, net.input("x", shape, _dtypes(work, 1)[0]))
    # index of each largest number, `count` elsewhere; the least of these is the first
    hits = net.equal(x, net.reduce_max(x, axis=axis, keepdims=True))
    indices = net.constant(np.arange(count, dtype=np.float32).reshape(along))
    beyond = net.constant(np.full((1,) * len(shape), count, np.float32))
    first_index = net.reduce_min(net.select(hits, indices, beyond), axis=axis)
    net.output(net.cast(first_index, dtype="int32"))
    return net.build()


# -- quantised rows --------------------------------------------------------------------------------
def _quantised_rows(net: GraphBuilder, x: Any, shape: Shape) -> None:
    """Declare the outputs for rows in fp32, along the last axis: int8 of a shape, a scale per row.

    scale = max |row| / 127, q = round(x / scale).
    """
    top = net.reduce_max(net.abs(x), axis=-1, keepdims=True)
    scale = net.muls(top, number=1.0 / LARGEST_BYTE)
    # a row of zeros would divide by 0
    scale = net.clip(scale, low=LEAST_SCALE, high=math.inf)
    q = net.cast(net.mul(x, net.rec(scale)), dtype="int8")
    net.output(net.reshape(q, shape=shape))
    net.output(scale)


def dynamic_quant(work: Work) -> Graph:
    """Return the rows of a tensor in int8 and a scale for each, which its largest number sets."""
    _refuse_others(work)
    shape = _only_shape(work)
    net = GraphBuilder(work.operator)
    x = net.input("x", (forms.elements(shape[:-1]), shape[-1]), _dtypes(work, 1)[0])
    _quantised_rows(net, _wide(net, x), shape)
    return net.build()


def dequant_swiglu_quant(work: Work) -> Graph:
    """Return silu(one half of a row) times the other in int8, and a scale for each row.

    A matrix (rows, columns) of int32 comes with factors (1, columns) and (rows,), by which it is
    multiplied first; every matrix may come with a factor (1, columns / 2), which multiplies the
    result before it is quantised. The matrix is read as (rows, 2, columns / 2).
    """
    _refuse_others(work, "activate_left")
    shapes = work.shapes
    dtypes = _dtypes(work, len(work.shapes))
    if not shapes or len(shapes[0]) != 2 or shapes[0][1] % 2:
        needed = f"{work.operator}: a matrix of an even number of columns first"
        raise InputError(needed, shown(shapes[:1]), "correct that row")
    rows, columns = shapes[0]
    input_factors = ((1, columns), (rows,)) if dtypes[0] == "int32" else ()
    output_factor = ((1, columns // 2),)
    if shapes[1:] not in (input_factors, input_factors + output_factor):
        needed = f"{work.operator}: factors of shapes {input_factors}, and {output_factor} or none"
        raise InputError(needed, shown(shapes[1:]), "correct that row")
    net = GraphBuilder(work.operator)
    x = net.input("x", (rows, 2, columns // 2), dtypes[0])
    halves = [_wide(net, half) for half in _halves(net, x)]
    if input_factors:
        by_column = net.input("by_column", (1, 2, columns // 2), dtypes[1])
        by_row = net.input("by_row", (rows, 1, 1), dtypes[2])
        parts = zip(halves, _halves(net, by_column), strict=True)
        halves = [net.mul(net.mul(half, factor), by_row) for half, factor in parts]
    # by default the second half goes through silu
    gate, linear = halves if work.attributes.get("activate_left", False) else halves[::-1]
    y = net.mul(net.silu(gate), linear)
    if len(shapes) > 1 + len(input_factors):
        y = net.mul(y, net.input("smooth", (1, 1, columns // 2), dtypes[-1]))
    _quantised_rows(net, y, (rows, columns // 2))
    return net.build()


# -- kernels ---------------------------------------------------------------------------------------
def _one_kernel(work: Work, graph: Graph) -> Sequence[Sequence[Node]]:
    """Return all nodes as one kernel, as the measured one was."""
    return [graph.nodes]


def _as_named(work: Work, graph: Graph) -> Sequence[Sequence[Node]]:
    """Return one kernel, or one for each node if the row names several kernels."""
    return [[node] for node in graph.nodes] if work.kernels else [graph.nodes]


def _each_tensor(work: Work, graph: Graph) -> Sequence[Sequence[Node]]:
    """Return a kernel for each input, with the nodes from this input to its result."""
    group_of: dict[str, list[Node]] = {name: [] for name in graph.inputs}
    for node in graph.nodes:
        group = group_of[node.inputs[0]]
        group.append(node)
        group_of.update(dict.fromkeys(node.outputs, group))
    return [group_of[name] for name in graph.inputs]


def _sliced_before(work: Work, graph: Graph) -> Sequence[Sequence[Node]]:
    """Return one kernel, or two if the row names Slice, which comes first."""
    if not _names_slice(work):
        return [graph.nodes]
    place = next(i for i, node in enumerate(graph.nodes) if node.op == "slice")
    return [graph.nodes[: place + 1], graph.nodes[place + 1 :]]


def _cast_after(work: Work, graph: Graph) -> Sequence[Sequence[Node]]:
    """Return one kernel, or two if the row names several: then the last one is a Cast."""
    return [graph.nodes[:-1], graph.nodes[-1:]] if work.kernels else [graph.nodes]


KERNELS = {
    "arg_max": _cast_after,
    "mish": _one_kernel,
    "exp": _as_named,
    "masked_scale": _as_named,
    "foreach_addcdiv_scalar": _one_kernel,
    "swi_glu": _sliced_before,
    "foreach_norm": _each_tensor,
    "dynamic_quant": _one_kernel,
    "dequant_swiglu_quant": _one_kernel,
}
"""The same names -> the functions that cut their graphs into kernels."""
ALSO_OPERATORS = {"exp": POWER_KEYS}
"""Names that our operators have, too -> the attributes that make a row a chain of kernels."""
BUILDERS = {
    "arg_max": arg_max,
    "mish": mish,
    "exp": exp,
    "masked_scale": masked_scale,
    "foreach_addcdiv_scalar": addcdiv,
    "swi_glu": swi_glu,
    "foreach_norm": foreach_norm,
    "dynamic_quant": dynamic_quant,
    "dequant_swiglu_quant": dequant_swiglu_quant,
}
"""The table's names for kernels that the vector unit ran -> their builders."""
