"""Passes that remove work: nodes that are unused, constant, repeated or without effect.

Nodes without effect are identities such as x + 0, pairs that cancel, such as -(-x), and transposes,
reshapes and casts that can be merged. An operand that is one number becomes an attribute: x + c,
c = 3 everywhere, becomes `adds` with the number 3.
"""

import math
from collections.abc import Hashable

import numpy as np

from ascend_lab.compiler.draft import SMALL_ELEMENTS, Draft, pruned
from ascend_lab.compiler.evaluate import compute
from ascend_lab.compiler.ir import Constant, Fill, Graph, Node, Values
from ascend_lab.compiler.passes.rewrite import Pass, derived, rewrites, settings, sweep
from ascend_lab.operators.ops.formats import FLOATS


def remove_dead_code(graph: Graph) -> tuple[Graph, int]:
    """Drop nodes, constants and types that no output of the graph depends on."""
    live = pruned(graph)
    dropped = len(graph.nodes) - len(live.nodes) + len(graph.constants) - len(live.constants)
    return (live, dropped) if dropped else (graph, 0)


def fold_constants(draft: Draft, node: Node) -> bool:
    """Replace a node that reads only constants by its result, computed now if it is small.

    Large results are computed when they are read. A node whose result is far larger than its
    operands (an `expand`) stays, unless they are a `Fill`.
    """
    # an output of the graph must stay the output of a node
    if node.op == "trans_data" or not node.inputs or not draft.outputs.isdisjoint(node.outputs):
        return False
    constants = [constant for constant in map(draft.constant, node.inputs) if constant is not None]
    result_types = [draft.type(name) for name in node.outputs]
    # folding must not make the graph much larger: a result may have `SMALL_ELEMENTS` elements, or
    # as many as its operands have together
    limit = max(SMALL_ELEMENTS, sum(c.type.elements for c in constants))
    # a constant with one number everywhere has it in every order and shape
    is_fill = node.has("moves") and bool(constants) and isinstance(constants[0].data, Fill)
    is_fill = is_fill and (
        node.op != "concat" or all(c.data == constants[0].data for c in constants)
    )
    if len(constants) < len(node.inputs) or not (
        is_fill or sum(k.elements for k in result_types) <= limit
    ):
        return False
    for i, (name, kind) in enumerate(zip(node.outputs, result_types, strict=True)):
        folded = (
            Constant(kind, constants[0].data)
            if is_fill
            else _folded_result(draft, node, i, constants)
        )
        draft.replace(name, draft.add(folded, f"{name}_folded"))
    draft.remove(node.name)
    return True


def _folded_result(draft: Draft, node: Node, place: int, constants: list[Constant]) -> Constant:
    """Return output `place` of a node as a constant."""
    # `evaluate.compute` runs a graph of this node alone, and rounds as it would in the whole graph
    types = {name: draft.type(name) for name in (*node.inputs, *node.outputs)}
    single = Graph(node.name, (), node.outputs, (node,), types)

    def value(*arrays: Values) -> Values:
        return np.asarray(compute(single, node, list(arrays))[place])

    return derived(types[node.outputs[place]], value, *constants)


def merge_common(graph: Graph) -> tuple[Graph, int]:
    """Merge nodes with the same operator, inputs and attributes, and merge equal constants."""
    draft = Draft(graph)
    count = 0
    first_of: dict[Hashable, str] = {}
    for name, constant in graph.constants.items():
        first_name = first_of.setdefault(_content_key(constant), name)
        if first_name != name and name not in draft.outputs:
            draft.replace(name, first_name)
            count += 1
    node_of: dict[Hashable, str] = {}
    for node in draft:
        # two nodes with equal keys compute the same values
        key = (node.op, node.inputs, repr(sorted(node.attrs.items())))
        twin = draft.nodes[node_of.setdefault(key, node.name)]
        if twin.name == node.name:
            continue
        if len(node.outputs) == 1:
            count += draft.forward(node, twin.output)
        elif draft.outputs.isdisjoint(node.outputs):
            for old_name, new_name in zip(node.outputs, twin.outputs, strict=True):
                draft.replace(old_name, new_name)
            count += 1
    return (draft.finish(), count) if count else (graph, 0)


def _content_key(constant: Constant) -> Hashable:
    """Return a key that equal constants share; a large array is equal only to itself."""
    data = constant.data
    if not isinstance(data, np.ndarray):
        return constant.type, id(data) if callable(data) else data
    # comparing megabytes of weights in every round would take longer than all other passes
    large = constant.type.elements > SMALL_ELEMENTS
    return constant.type, id(data) if large else constant.array().tobytes()


DEAD_CODE = Pass(
    "DeadCodeEliminationPass", "prepare", remove_dead_code, "drops what no output depends on"
)
FOLDING = Pass(
    "ConstantFoldingPass",
    "prepare",
    sweep(fold_constants),
    "computes what depends on constants only",
)
COMMON = Pass(
    "CommonSubexpressionEliminationPass", "prepare", merge_common, "computes equal expressions once"
)


PRODUCT_OPS = ("matmul", "batch_matmul", "gemm")
RELU_LIMITS = {"relu": (0.0, math.inf), "relu6": (0.0, 6.0)}
OPERATOR_OF_POWER = {2.0: "square", 0.5: "sqrt", -1.0: "rec"}
NEUTRAL_NUMBER = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0, "pow": 1.0}
NARROWER_FORMATS = {
    "fp32": ("fp16", "bf16", "int8", "uint8"),
    "fp16": ("int8", "uint8"),
    "bf16": ("int8", "uint8"),
    "int32": ("int8", "uint8"),
}
"""By format, the narrower formats whose numbers it holds exactly."""


# -- identities -----------------------------------------------------------------------------------
@rewrites("IdentityEliminationPass", stage="prepare")
def identity(draft: Draft, node: Node) -> bool:
    """Remove reshapes, casts, pads, slices, sums and products that change nothing."""
    if len(node.outputs) > 1:
        return False
    if node.has("broadcasts"):
        return _remove_expand(draft, node) or _remove_neutral_operand(draft, node)
    operand = node.inputs[0]
    if draft.type(operand) != draft.type(node.output) or not _is_identity(draft, node):
        return False
    return draft.forward(node, operand)


def _is_identity(draft: Draft, node: Node) -> bool:
    """Tell whether a node whose result has its input's type also has its values."""
    options = settings(node)
    shape = draft.type(node.inputs[0]).shape
    if node.op in ("reshape", "expand", "cast", "split", "trans_data", "pad", "slice"):
        # these change only shape, format or layout, and the type has stayed the same
        return True
    if node.op in ("global_avg_pool", "global_max_pool"):
        return shape[2:] == (1, 1)
    if node.op in ("concat", "max_pool2d", "avg_pool2d"):
        single = options.get("kernel", 1) in (1, (1, 1))
        return len(node.inputs) == 1 and single and options.get("stride") in (None, 1, (1, 1))
    # a square matrix keeps its shape when it is transposed: here the type says nothing
    if node.op == "transpose":
        return order_of(draft, node) == tuple(range(len(shape)))
    return (node.op, options.get("number")) in (("adds", 0), ("muls", 1))


def _remove_neutral_operand(draft: Draft, node: Node) -> bool:
    """Remove x + 0, x - 0, x * 1, x / 1, x ^ 1 unless broadcasting enlarges x."""
    for x, operand in _operand_pairs(node):
        # (3,) + zeros of (2, 3) is (2, 3): not what x was
        keeps_type = node.op in NEUTRAL_NUMBER and draft.type(x) == draft.type(node.output)
        if keeps_type and draft.number(operand) == NEUTRAL_NUMBER[node.op]:
            return draft.forward(node, x)
    return False


def _operand_pairs(node: Node) -> list[tuple[str, str]]:
    """Return the pair of operands, and the swapped pair if the operator commutes."""
    x, y = node.inputs
    return [(x, y), (y, x)] if node.has("commutes") else [(x, y)]


def _remove_expand(draft: Draft, node: Node) -> bool:
    """Remove an `expand` in front of a broadcasting node that repeats the operand itself."""
    for place in (0, 1):
        maker = draft.maker(node.inputs[place])
        other_operand = node.inputs[1 - place]
        has_full_shape = draft.type(other_operand).shape == draft.type(node.output).shape
        # x + expand(y, shape of x): the addition itself repeats y
        if has_full_shape and maker is not None and maker.op == "expand":
            inputs = (
                (maker.inputs[0], other_operand) if place == 0 else (other_operand, maker.inputs[0])
            )
            return draft.become(node, node.op, inputs, node.attrs)
    return False


@rewrites("GemmToMatMulPass", "gemm")
def gemm_to_matmul(draft: Draft, node: Node) -> bool:
    """Turn a gemm with alpha = 1 and no bias (beta or the bias is 0) into a matmul."""
    options = settings(node)
    # gemm = alpha a b + beta c.
    has_no_bias = options["beta"] == 0 or draft.number(node.inputs[2]) == 0
    attrs = {key: options[key] for key in ("trans_a", "trans_b")}
    return (
        has_no_bias
        and options["alpha"] == 1
        and draft.become(node, "matmul", node.inputs[:2], attrs)
    )


# -- operands that are one number -----------------------------------------------------------------
@rewrites(
    "ScalarOperandPass", *("add", "sub", "mul", "div", "pow", "max", "min", "clip"), stage="prepare"
)
def scalar_operand(draft: Draft, node: Node) -> bool:
    """Turn operands that are one number into attributes: adds, muls, square, relu, clip."""
    if node.op == "clip":
        # clip(x, 0, inf) is a relu, clip(x, 0, 6) a relu6: kernels know these
        limits = tuple(settings(node)[key] for key in ("low", "high"))
        limit_op = next((op for op, bounds in RELU_LIMITS.items() if bounds == limits), "")
        return bool(limit_op) and draft.become(node, limit_op, node.inputs)
    x, scalar = node.inputs
    number = draft.number(scalar)
    if number is None and node.has("commutes"):
        x, scalar, number = scalar, x, draft.number(x)
    kind = draft.type(node.output)
    # the scalar forms exist for floats, and cannot enlarge x
    if number is None or draft.type(x) != kind or kind.dtype not in FLOATS:
        return _reciprocal(draft, node)
    if node.op in ("add", "sub"):
        return draft.become(node, "adds", [x], {"number": number if node.op == "add" else -number})
    # frexp(8) = (0.5, 4): for a power of two, multiplying by 1 / number is as exact as dividing
    power_of_two = abs(math.frexp(number)[0]) == 0.5
    if node.op == "mul" or (node.op == "div" and power_of_two):
        factor = number if node.op == "mul" else 1 / number
        return draft.become(node, "muls", [x], {"number": factor})
    if node.op == "pow" and number in OPERATOR_OF_POWER:
        return draft.become(node, OPERATOR_OF_POWER[number], [x])
    if node.op in ("max", "min") and not math.isnan(number):
        low, high = (number, math.inf) if node.op == "max" else (-math.inf, number)
        return draft.become(node, "clip", [x], {"low": low, "high": high})
    return False


def _reciprocal(draft: Draft, node: Node) -> bool:
    """Replace 1 / x by the reciprocal of x, and x * x by the square of x."""
    x, y = node.inputs
    kind = draft.type(node.output)
    if node.op == "div" and draft.number(x) == 1.0 and draft.type(y) == kind:
        return draft.become(node, "rec", [y])
    return (
        node.op == "mul" and x == y and kind.dtype != "int32" and draft.become(node, "square", [x])
    )


# -- algebra --------------------------------------------------------------------------------------
@rewrites(
    "AlgebraicSimplificationPass",
    *("add", "sub", "neg", "abs", "square", "clip", "relu", "relu6", "muls"),
    stage="prepare",
)
def algebra(draft: Draft, node: Node) -> bool:
    """Apply exact identities: double negations, sums with negatives, a clip of a clip.

    A ReLU behind max pooling moves in front of it, where the convolution's kernel computes it.
    """
    if node.op in ("add", "sub"):
        return _sum_with_negative(draft, node)
    source = draft.maker(node.inputs[0])
    if source is None:
        return False
    if node.op in ("relu", "abs") and (source.has("nonnegative") or source.op == "square"):
        return draft.forward(node, node.inputs[0])
    # relu(max pool(conv)) = max pool(relu(conv)): the order of maxima does not matter
    if node.op == "relu" and source.has("largest"):
        conv = draft.only(source.inputs[0]) if draft.only(node.inputs[0]) else None
        if conv is None or not conv.has("convolution"):
            return False
        limited = draft.insert("relu", source.inputs, name=f"{node.name}_before")
        return draft.become(node, source.op, (limited,), source.attrs)
    if node.op in ("clip", "relu", "relu6"):
        return _merge_limits(draft, node, source)
    if node.op == "neg" and source.op == "neg":
        return draft.forward(node, source.inputs[0])
    if node.has("even") and source.op == "neg":
        return draft.become(node, node.op, source.inputs)
    negates = node.op == "muls" and node.attr("number") == -1
    return negates and draft.become(node, "neg", node.inputs)


def _sum_with_negative(draft: Draft, node: Node) -> bool:
    """Turn x + (-y) into x - y and x - (-y) into x + y."""
    for summand, negative in _operand_pairs(node):
        maker = draft.maker(negative)
        if maker is not None and maker.op == "neg":
            opposite_op = "sub" if node.op == "add" else "add"
            return draft.become(node, opposite_op, (summand, maker.inputs[0]))
    return False


def _limits_of(node: Node) -> tuple[float, float] | None:
    if node.op == "clip":
        options = settings(node)
        return float(options["low"]), float(options["high"])
    return RELU_LIMITS.get(node.op)


def _merge_limits(draft: Draft, node: Node, source: Node) -> bool:
    """Merge two limits on a value into one."""
    outer = _limits_of(node)
    inner = _limits_of(source)
    if outer is None or inner is None:
        return False
    # clip(clip(x, 0, 6), 2, 9): the inner limits 0 and 6, clipped by the outer ones, are 2 and 6
    low, high = (min(max(end, outer[0]), outer[1]) for end in inner)
    if (low, high) == inner:
        return draft.forward(node, node.inputs[0])
    return draft.become(node, "clip", source.inputs, {"low": low, "high": high})


@rewrites("ReassociationPass", "muls", "adds", "div", stage="prepare", values="rounded")
def reassociation(draft: Draft, node: Node) -> bool:
    """Merge successive constant factors and summands; divide by multiplying.

    (x a) b = x (a b) and (x + a) + b = x + (a + b) round once instead of twice. x / a = x (1/a)
    rounds twice instead of once, and is faster. In all three the last digit may differ.
    """
    if node.op == "div":
        number = draft.number(node.inputs[1])
        if not number or draft.type(node.inputs[0]) != draft.type(node.output):
            return False
        return draft.become(node, "muls", node.inputs[:1], {"number": 1 / number})
    # if x a has a second reader, it has to be computed anyway
    source = draft.only(node.inputs[0], node.op)
    if source is None:
        return False
    inner_number = settings(source)["number"]
    outer_number = settings(node)["number"]
    # (x 2) 3 = x 6; a factor of 1e200 twice would be infinite: these stay two nodes
    merged = inner_number + outer_number if node.op == "adds" else inner_number * outer_number
    return math.isfinite(merged) and draft.become(node, node.op, source.inputs, {"number": merged})


# -- moves ----------------------------------------------------------------------------------------
def order_of(draft: Draft, node: Node) -> tuple[int, ...]:
    """Return a transpose's permutation, counted from 0."""
    rank = len(draft.type(node.output).shape)
    perm = settings(node)["perm"]
    return tuple(range(rank))[::-1] if perm is None else tuple(int(p) % rank for p in perm)


@rewrites("PermutePass", "transpose", *PRODUCT_OPS, stage="prepare")
def permute(draft: Draft, node: Node) -> bool:
    """Merge transposes, also around a pointwise node, and fold them into products and reshapes."""
    if node.op in PRODUCT_OPS:
        return _transposed_operand(draft, node)
    source = draft.maker(node.inputs[0])
    order = order_of(draft, node)
    identity_order = tuple(range(len(order)))
    if source is not None and source.op == "transpose":
        inner_order = order_of(draft, source)
        # the permutation of both: first that of `source`, then that of `node`
        merged_order = tuple(inner_order[axis] for axis in order)
        if merged_order == identity_order and draft.forward(node, source.inputs[0]):
            return True
        return draft.become(node, "transpose", source.inputs, {"perm": merged_order})
    if source is not None and _transpose_around_pointwise(draft, node, order):
        return True
    shape = draft.type(node.inputs[0]).shape
    # (1, 8, 1, 4) -> (8, 1, 4, 1): only axes of size 1 change places, so a reshape does it
    long_axes = [axis for axis in order if shape[axis] != 1]
    keeps_order = long_axes == sorted(long_axes) and order != identity_order
    sizes = {"shape": draft.type(node.output).shape}
    return keeps_order and draft.become(node, "reshape", node.inputs, sizes)


def _transpose_around_pointwise(draft: Draft, node: Node, order: tuple[int, ...]) -> bool:
    """Turn transpose, pointwise, transpose into pointwise and one transpose."""
    pointwise = draft.only(node.inputs[0])
    if pointwise is None or not pointwise.has("pointwise"):
        return False
    source = draft.only(pointwise.inputs[0], "transpose")
    if source is None:
        return False
    # NCHW -> NHWC, relu, NHWC -> NCHW: the order does not matter to the relu; both moves cancel
    inner_order = order_of(draft, source)
    draft.become(pointwise, pointwise.op, source.inputs, pointwise.attrs)
    merged_order = tuple(inner_order[axis] for axis in order)
    return draft.become(node, "transpose", [pointwise.output], {"perm": merged_order})


def _transposed_operand(draft: Draft, node: Node) -> bool:
    """Replace a transpose of the last two axes in front of a product by its attribute."""
    for place, key in ((0, "trans_a"), (1, "trans_b")):
        maker = draft.maker(node.inputs[place])
        if maker is None or maker.op != "transpose":
            continue
        # (0, 2, 1) of 3 axes exchanges the last two; (1, 0, 2) moves a batch axis, for which
        # products have no attribute
        order = order_of(draft, maker)
        last_axis = len(order) - 1
        if order == (*range(last_axis - 1), last_axis, last_axis - 1):
            inputs = list(node.inputs)
            # (A^T)^T is A: an attribute that is already set is cleared
            inputs[place] = maker.inputs[0]
            attrs = {**node.attrs, key: not node.attr(key, False)}
            return draft.become(node, node.op, inputs, attrs)
    return False


@rewrites("ReshapeRemovePass", "reshape", stage="prepare")
def reshapes(draft: Draft, node: Node) -> bool:
    """Merge reshapes of reshapes."""
    source = draft.maker(node.inputs[0])
    kind = draft.type(node.output)
    if source is None or source.op != "reshape":
        return False
    if draft.type(source.inputs[0]) == kind and draft.forward(node, source.inputs[0]):
        return True
    return draft.become(node, "reshape", source.inputs, {"shape": kind.shape})


# -- casts ----------------------------------------------------------------------------------------
@rewrites("CastRemovePass", "cast", stage="prepare")
def casts(draft: Draft, node: Node) -> bool:
    """Remove casts to the same format, pairs of casts that are exact, and those around x * c."""
    kind = draft.type(node.output)
    source = draft.maker(node.inputs[0])
    if draft.type(node.inputs[0]) == kind:
        return draft.forward(node, node.inputs[0])
    if source is None or source.op != "cast":
        return _casts_around_number(draft, node)
    # int8 -> fp16 -> fp32 loses nothing on the way; fp32 -> fp16 -> fp32 rounds, and stays
    original = source.inputs[0]
    if draft.type(original).dtype not in NARROWER_FORMATS.get(draft.type(source.output).dtype, ()):
        return False
    if draft.type(original) == kind:
        return draft.forward(node, original)
    return draft.become(node, "cast", source.inputs, settings(node))


def _casts_around_number(draft: Draft, node: Node) -> bool:
    """Remove the casts to fp32 and back to fp16 around a `muls` or `adds`, which rounds once, too.

    ONNX rounds the constant of x * c to x's format, so a model that needs the exact constant adds
    the casts. Here `muls` and `adds` keep their number in fp32 anyway.
    """
    scaling = draft.only(node.inputs[0], "muls", "adds")
    widening = None if scaling is None else draft.maker(scaling.inputs[0])
    if scaling is None or widening is None or widening.op != "cast":
        return False
    narrow_source = widening.inputs[0]
    is_narrow = (
        draft.type(narrow_source).dtype in ("fp16", "bf16")
        and draft.type(widening.output).dtype == "fp32"
    )
    if not is_narrow or draft.type(narrow_source) != draft.type(node.output):
        return False
    return draft.become(node, scaling.op, [narrow_source], scaling.attrs)
