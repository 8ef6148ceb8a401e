"""Algebraic simplification: identities that hold to the last bit, and some that round."""

from __future__ import annotations

import math

from ascend_lab.graph.draft import Draft
from ascend_lab.graph.ir import Node, Shape
from ascend_lab.graph.passes.rewrite import Pass, settings, sweep

LIMITS = {"relu": (0.0, math.inf), "relu6": (0.0, 6.0)}
NOT_NEGATIVE = ("abs", "exp", "sigmoid", "softmax", "sqrt", "relu", "relu6", "hard_sigmoid")
ODD_SIGN = ("abs", "square")
"""Operators that do not see their operand's sign."""


def simplify(rw: Draft, node: Node) -> bool:
    """Apply the first exact identity that fits a node."""
    if node.op in ("add", "sub"):
        return _sum_with_negative(rw, node)
    if node.op in ("clip", "relu", "relu6"):
        return _limits(rw, node)
    source = rw.maker(node.inputs[0])
    if source is None:
        return False
    if node.op == "neg" and source.op == "neg":
        return rw.forward(node, source.inputs[0])
    if node.op in ODD_SIGN and source.op == "neg":
        return rw.become(node, node.op, source.inputs)
    if node.op == "abs" and source.op in (*NOT_NEGATIVE, "square"):
        return rw.forward(node, node.inputs[0])
    return node.op == "muls" and _negation(rw, node)


def _negation(rw: Draft, node: Node) -> bool:
    return node.attr("number") == -1 and rw.become(node, "neg", node.inputs)


def _sum_with_negative(rw: Draft, node: Node) -> bool:
    """Turn x + (-y) into x - y and x - (-y) into x + y."""
    x, y = node.inputs
    for first, second in ((x, y), (y, x)) if node.op == "add" else ((x, y),):
        maker = rw.maker(second)
        if maker is not None and maker.op == "neg":
            other = "sub" if node.op == "add" else "add"
            return rw.become(node, other, (first, maker.inputs[0]))
    return False


def _bounds(node: Node) -> tuple[float, float] | None:
    if node.op == "clip":
        options = settings(node)
        return float(options["low"]), float(options["high"])
    return LIMITS.get(node.op)


def _limits(rw: Draft, node: Node) -> bool:
    """Merge two limits on a value into one; drop a relu of what is never negative."""
    source = rw.maker(node.inputs[0])
    outer = _bounds(node)
    if source is None or outer is None:
        return False
    if node.op == "relu" and source.op in (*NOT_NEGATIVE, "square"):
        return rw.forward(node, node.inputs[0])
    inner = _bounds(source)
    if inner is None:
        return False
    low, high = (min(max(end, outer[0]), outer[1]) for end in inner)
    if (low, high) == inner:
        return rw.forward(node, node.inputs[0])
    return rw.become(node, "clip", source.inputs, {"low": low, "high": high})


def reassociate(rw: Draft, node: Node) -> bool:
    """Merge constants of two steps: (x a) b = x (a b), (x + a) + b = x + (a + b), x / a = x (1/a).

    One rounding instead of two: the last digit may differ.
    """
    if node.op == "div":
        number = rw.number(node.inputs[1])
        if not number or rw.type(node.inputs[0]) != rw.type(node.output):
            return False
        return rw.become(node, "muls", node.inputs[:1], {"number": 1 / number})
    source = rw.only(node.inputs[0], node.op)
    if source is None:
        return False
    a, b = settings(source)["number"], settings(node)["number"]
    both = a + b if node.op == "adds" else a * b
    return math.isfinite(both) and rw.become(node, node.op, source.inputs, {"number": both})


ALGEBRA = Pass(
    "AlgebraicSimplificationPass",
    "prepare",
    sweep(simplify, "add", "sub", "neg", "abs", "square", "clip", "relu", "relu6", "muls"),
    "double negations, sums with negatives, limits of limits: exact identities",
)
REASSOCIATION = Pass(
    "ReassociationPass",
    "prepare",
    sweep(reassociate, "muls", "adds", "div"),
    "merges successive constant factors and summands; divides by multiplying",
    "rounded",
)


# Identity elimination: nodes whose output is their input.


BROADCASTING = ("add", "sub", "mul", "div", "max", "min", "pow")


def remove_identity(rw: Draft, node: Node) -> bool:
    """Forward the input of a node that changes neither values, shape nor format."""
    if len(node.outputs) > 1:
        return False
    if node.op in BROADCASTING:
        return _without_expand(rw, node) or _neutral_operand(rw, node)
    source = node.inputs[0]
    if rw.type(source) != rw.type(node.output) or not _is_identity(rw, node):
        return False
    return rw.forward(node, source)


def _is_identity(rw: Draft, node: Node) -> bool:
    """Tell whether a node that keeps its input's type keeps its values."""
    options = settings(node)
    if node.op in ("reshape", "expand", "cast", "split", "trans_data", "pad", "slice"):
        return True  # with the type kept there is nothing left to change
    if node.op in ("concat", "max_pool2d", "avg_pool2d", "global_avg_pool", "global_max_pool"):
        window = options.get("kernel", 1)
        single = window in (1, (1, 1)) and options.get("stride") in (None, 1, (1, 1))
        return len(node.inputs) == 1 and single and _whole_image(rw, node)
    if node.op == "transpose":
        rank = len(rw.type(node.output).shape)
        perm = options["perm"] or tuple(range(rank))[::-1]
        return tuple(p % rank for p in perm) == tuple(range(rank))
    return (node.op, options.get("number")) in (("adds", 0), ("muls", 1))


def _whole_image(rw: Draft, node: Node) -> bool:
    shape = rw.type(node.inputs[0]).shape
    return not node.op.startswith("global") or shape[2:] == (1, 1)


def _neutral_operand(rw: Draft, node: Node) -> bool:
    """Remove x + 0, x - 0, x * 1, x / 1, x ^ 1 whose constant does not enlarge x."""
    neutral = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0, "pow": 1.0}.get(node.op)
    pairs = [(node.inputs[0], node.inputs[1])]
    if node.op in ("add", "mul"):
        pairs.append((node.inputs[1], node.inputs[0]))
    for value, other in pairs:
        same = neutral is not None and rw.type(value) == rw.type(node.output)
        if same and rw.number(other) == neutral:
            return rw.forward(node, value)
    return False


def _without_expand(rw: Draft, node: Node) -> bool:
    """Let a broadcasting node repeat its operand itself where the other one has the full shape."""
    for place in (0, 1):
        maker = rw.maker(node.inputs[place])
        other = node.inputs[1 - place]
        full = rw.type(other).shape == rw.type(node.output).shape
        if full and maker is not None and maker.op == "expand":
            inputs = (maker.inputs[0], other) if place == 0 else (other, maker.inputs[0])
            return rw.become(node, node.op, inputs, node.attrs)
    return False


IDENTITY = Pass(
    "IdentityEliminationPass",
    "prepare",
    sweep(remove_identity),
    "removes reshapes, casts, pads, slices, sums and products that change nothing",
)


# Operands that are one number become attributes: x + 2 is `adds`, max(x, 0) is `relu`.


POWERS = {2.0: "square", 0.5: "sqrt", -1.0: "rec"}


def is_power_of_two(number: float) -> bool:
    """Tell whether dividing by a number is exactly multiplying by its reciprocal."""
    return number != 0 and math.isfinite(number) and abs(math.frexp(number)[0]) == 0.5


def take_scalar(rw: Draft, node: Node) -> bool:
    """Replace a node whose second operand is one number (the first too where they commute)."""
    if node.op == "clip":
        return _named_clip(rw, node)
    x, other = node.inputs
    number = rw.number(other)
    if number is None and node.op in ("add", "mul", "max", "min"):
        x, other, number = other, x, rw.number(x)
    kind = rw.type(node.output)
    if number is None or rw.type(x) != kind or kind.dtype not in ("fp16", "bf16", "fp32"):
        return _reciprocal(rw, node)
    if node.op in ("add", "sub"):
        return rw.become(node, "adds", [x], {"number": number if node.op == "add" else -number})
    if node.op == "mul" or (node.op == "div" and is_power_of_two(number)):
        return rw.become(node, "muls", [x], {"number": number if node.op == "mul" else 1 / number})
    if node.op == "pow" and number in POWERS:
        return rw.become(node, POWERS[number], [x])
    if node.op in ("max", "min") and not math.isnan(number):
        low, high = (number, math.inf) if node.op == "max" else (-math.inf, number)
        return rw.become(node, "clip", [x], {"low": low, "high": high})
    return False


def _reciprocal(rw: Draft, node: Node) -> bool:
    """Replace 1 / x, and x x by the square."""
    x, y = node.inputs
    kind = rw.type(node.output)
    if node.op == "div" and rw.number(x) == 1.0 and rw.type(y) == kind:
        return rw.become(node, "rec", [y])
    if node.op == "mul" and x == y and kind.dtype != "int32":
        return rw.become(node, "square", [x])
    return False


def _named_clip(rw: Draft, node: Node) -> bool:
    low, high = (settings(node)[key] for key in ("low", "high"))
    named = {(0.0, math.inf): "relu", (0.0, 6.0): "relu6"}.get((low, high))
    return named is not None and rw.become(node, named, node.inputs)


SCALARS = Pass(
    "ScalarOperandPass",
    "prepare",
    sweep(take_scalar, "add", "sub", "mul", "div", "pow", "max", "min", "clip"),
    "turns operands that are one number into attributes: adds, muls, square, relu, clip",
)


# Cast removal: a pair of casts whose first step loses nothing is one cast, or none.
#
# ONNX rounds the number of x * number to x's format; a model that must not writes fp16 -> fp32,
# times the number, -> fp16. Ours keeps the number in fp32 anyway, so that no cast is needed.


HOLDS = {
    "fp32": ("fp16", "bf16", "int8", "uint8"),
    "fp16": ("int8", "uint8"),
    "bf16": ("int8", "uint8"),
    "int32": ("int8", "uint8"),
}
"""Formats all of whose numbers another format holds exactly."""


def remove_cast(rw: Draft, node: Node) -> bool:
    """Let a cast read what a lossless cast before it read."""
    if rw.type(node.inputs[0]) == rw.type(node.output):
        return rw.forward(node, node.inputs[0])
    source = rw.maker(node.inputs[0])
    if source is None or source.op != "cast":
        return _around_number(rw, node)
    start = source.inputs[0]
    if rw.type(start).dtype not in HOLDS.get(rw.type(source.output).dtype, ()):
        return False
    if rw.type(start) == rw.type(node.output):
        return rw.forward(node, start)
    return rw.become(node, "cast", source.inputs, settings(node))


def _around_number(rw: Draft, node: Node) -> bool:
    """Turn fp16 -> fp32, muls or adds, -> fp16 into muls or adds, which round once as well."""
    middle = rw.only(node.inputs[0], "muls", "adds")
    wide = None if middle is None else rw.maker(middle.inputs[0])
    if middle is None or wide is None or wide.op != "cast":
        return False
    start = wide.inputs[0]
    narrow = rw.type(start).dtype in ("fp16", "bf16") and rw.type(wide.output).dtype == "fp32"
    if not narrow or rw.type(start) != rw.type(node.output):
        return False
    return rw.become(node, middle.op, [start], middle.attrs)


CASTS = Pass(
    "CastRemovePass",
    "prepare",
    sweep(remove_cast, "cast"),
    "removes casts to the same format, pairs that lose nothing, and those around x * number",
)


# Transposes and reshapes: two become one, and a matrix product reads its operand transposed.


PRODUCTS = ("matmul", "batch_matmul", "gemm")
POINTWISE = (
    *("relu", "relu6", "clip", "leaky_relu", "elu", "sigmoid", "tanh", "gelu", "silu", "softplus"),
    *("hard_sigmoid", "hard_swish", "adds", "muls", "neg", "abs", "exp", "sqrt", "square", "cast"),
)
"""Operators of one tensor, element by element: they do not see where elements lie."""


def order_of(rw: Draft, node: Node) -> tuple[int, ...]:
    """Return a transpose's permutation, counted from 0."""
    rank = len(rw.type(node.output).shape)
    perm = settings(node)["perm"]
    return tuple(range(rank))[::-1] if perm is None else tuple(int(p) % rank for p in perm)


def permute(rw: Draft, node: Node) -> bool:
    """Merge transposes, also around a pointwise node; fold them into products and reshapes."""
    if node.op in PRODUCTS:
        return _transposed_operand(rw, node)
    source = rw.maker(node.inputs[0])
    order = order_of(rw, node)
    if source is not None and source.op == "transpose":
        first = order_of(rw, source)
        merged = tuple(first[axis] for axis in order)
        if merged == tuple(range(len(order))) and rw.forward(node, source.inputs[0]):
            return True
        return rw.become(node, "transpose", source.inputs, {"perm": merged})
    if source is not None and _around(rw, node, order):
        return True
    shape = rw.type(node.inputs[0]).shape
    moved = [axis for axis in order if shape[axis] != 1]
    if moved == sorted(moved) and order != tuple(range(len(order))):
        return rw.become(node, "reshape", node.inputs, {"shape": _sizes(rw, node)})
    return False


def _around(rw: Draft, node: Node, order: tuple[int, ...]) -> bool:
    """Turn transpose, pointwise, transpose into pointwise, transpose."""
    middle = rw.only(node.inputs[0], *POINTWISE)
    first = None if middle is None else rw.only(middle.inputs[0], "transpose")
    if middle is None or first is None:
        return False
    inner = order_of(rw, first)
    rw.become(middle, middle.op, first.inputs, middle.attrs)
    merged = tuple(inner[axis] for axis in order)
    return rw.become(node, "transpose", [middle.output], {"perm": merged})


def _sizes(rw: Draft, node: Node) -> Shape:
    return rw.type(node.output).shape


def _transposed_operand(rw: Draft, node: Node) -> bool:
    """Drop a transpose of the last two axes in front of a product: it has an attribute for it."""
    for place, key in ((0, "trans_a"), (1, "trans_b")):
        maker = rw.maker(node.inputs[place])
        if maker is None or maker.op != "transpose":
            continue
        order = order_of(rw, maker)
        last = len(order) - 1
        if order == (*range(last - 1), last, last - 1):
            inputs = list(node.inputs)
            inputs[place] = maker.inputs[0]
            attrs = {**node.attrs, key: not node.attr(key, False)}
            return rw.become(node, node.op, inputs, attrs)
    return False


def merge_reshapes(rw: Draft, node: Node) -> bool:
    """Let a reshape of a reshape read the first one's input."""
    source = rw.maker(node.inputs[0])
    if source is None or source.op != "reshape":
        return False
    sizes = _sizes(rw, node)
    if rw.type(source.inputs[0]) == rw.type(node.output) and rw.forward(node, source.inputs[0]):
        return True
    return rw.become(node, "reshape", source.inputs, {"shape": sizes})


PERMUTE = Pass(
    "PermutePass",
    "prepare",
    sweep(permute, "transpose", *PRODUCTS),
    "merges transposes, and folds them into matrix products",
)
RESHAPES = Pass(
    "ReshapeRemovePass",
    "prepare",
    sweep(merge_reshapes, "reshape"),
    "merges reshapes of reshapes",
)
