"""Passes that recognise norms, activations, biases and attention written in small operators.

A model may write a layer norm as nine operators (mean, subtraction, square, ...). Its pattern
matches them, and one `layer_norm` takes their place, which is one kernel.
"""

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.ir import Node, TensorType, infer
from ascend_lab.compiler.passes.rewrite import derived, match, rewrites, settings
from ascend_lab.errors import AscendLabError
from ascend_lab.operators.ops.formats import FLOATS, axes_of, axis_of, broadcast_shape

PRODUCTS = ("matmul", "batch_matmul")


def _times(value: Any, number: float) -> Any:
    return ("muls", value, {"number": number})


def _plus(value: Any, number: float) -> Any:
    return ("adds", value, {"number": number})


# -- norms ----------------------------------------------------------------------------------------
# patterns of (x - mean) / sqrt(variance + epsilon) scale + bias, beginning with the inner terms
_SHIFTED = ("sub", "x", ("reduce_mean", "x", {"axis": "$axis", "keepdims": True}))
_MEAN_SQUARE = ("reduce_mean", ("square", _SHIFTED), {"axis": "$axis", "keepdims": True})
_VARIANCE = ("adds", _MEAN_SQUARE, {"number": "$epsilon"})
_DEVIATION = ("sqrt", _VARIANCE)
_NORMALISED = (
    ("div", _SHIFTED, _DEVIATION),
    ("mul", _SHIFTED, ("rec", _DEVIATION)),
    ("mul", _SHIFTED, ("rsqrt", _VARIANCE)),
)
LAYER_NORM = tuple(("add", ("mul", normal, "scale"), "bias") for normal in _NORMALISED)


@rewrites("LayerNormFusionPass", "add", needs="reduce_mean", values="rounded")
def layer_norm(draft: Draft, node: Node) -> bool:
    """Recognise a layer norm spelled out in nine operators."""
    bindings = match(draft, node, *LAYER_NORM)
    if bindings is None:
        return False
    kind = draft.type(bindings["x"])
    rank = len(kind.shape)
    axes = axes_of("layer_norm", bindings["axis"], kind.shape)
    # a layer norm takes the mean over the last axes; a mean over others does not match
    if axes != tuple(range(axes[0], rank)):
        return False
    parameter_type = TensorType(kind.shape[axes[0] :], kind.dtype)
    parameters = [
        _in_parameter_shape(draft, bindings[name], parameter_type) for name in ("scale", "bias")
    ]
    # axes 1 and 2 of 3 are the axes from -2 on
    attrs = {"axis": axes[0] - rank, "epsilon": bindings["epsilon"]}
    reads = (bindings["x"], *filter(None, parameters))
    return None not in parameters and draft.become(node, "layer_norm", reads, attrs)


def _in_parameter_shape(draft: Draft, name: str, kind: TensorType) -> str | None:
    """Return a parameter in the shape of the normalised axes; None if it cannot have it."""
    if draft.type(name) == kind:
        return name
    constant = draft.constant(name)
    if constant is None or constant.type.elements != kind.elements:
        return None
    return draft.add(derived(kind, lambda v: v.reshape(kind.shape), constant), f"{name}_tail")


# -- activations ----------------------------------------------------------------------------------
def _halves(inner: Any) -> tuple[Any, ...]:
    """Return the patterns of x / 2 * (1 + inner): exporters put the factor 1/2 in three places."""
    one_plus = _plus(inner, 1.0)
    return (
        _times(("mul", "x", one_plus), 0.5),
        ("mul", _times("x", 0.5), one_plus),
        ("mul", "x", _times(one_plus, 0.5)),
    )


# x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
_X_CUBED = (("pow", "x", 3.0), ("mul", ("square", "x"), "x"))
_TANH_ARGUMENTS = tuple(
    _times(("add", "x", _times(cube, 0.044715)), math.sqrt(2 / math.pi)) for cube in _X_CUBED
)
GELU = tuple(form for inner in _TANH_ARGUMENTS for form in _halves(("tanh", inner)))
_ERF_ARGUMENTS = (_times("x", math.sqrt(0.5)), ("div", "x", math.sqrt(2.0)))
GELU_ERF = tuple(form for inner in _ERF_ARGUMENTS for form in _halves(("erf", inner)))
# hard sigmoid: min(max(x + 3, 0), 6) / 6
_CLIPPED_X_PLUS_3 = (
    ("relu6", _plus("x", 3.0)),
    ("clip", _plus("x", 3.0), {"low": 0.0, "high": 6.0}),
)
_DIVIDED_BY_6 = (lambda form: _times(form, 1 / 6), lambda form: ("div", form, 6.0))
ACTIVATIONS = {
    "silu": (("mul", "x", ("sigmoid", "x")),),
    "hard_swish": (
        ("mul", "x", ("hard_sigmoid", "x")),
        *(
            sixth(("mul", "x", clipped))
            for clipped, sixth in product(_CLIPPED_X_PLUS_3, _DIVIDED_BY_6)
        ),
    ),
    "hard_sigmoid": tuple(
        sixth(clipped) for clipped, sixth in product(_CLIPPED_X_PLUS_3, _DIVIDED_BY_6)
    ),
}


@rewrites("GeluFusionPass", "mul", "muls", values="rounded")
def gelu(draft: Draft, node: Node) -> bool:
    """Recognise the tanh form of gelu spelled out: x / 2 (1 + tanh(sqrt(2/pi) (x + c x^3)))."""
    bindings = match(draft, node, *GELU)
    return bindings is not None and draft.become(node, "gelu", [bindings["x"]])


@rewrites("GeluErfToTanhPass", "mul", "muls", stage="opt-in", values="changed")
def gelu_erf(draft: Draft, node: Node) -> bool:
    """Replace the erf form of gelu, x / 2 (1 + erf(x / sqrt(2))), by its tanh form.

    Their values differ by up to 0.0005.
    """
    bindings = match(draft, node, *GELU_ERF)
    return bindings is not None and draft.become(node, "gelu", [bindings["x"]])


@rewrites("ActivationFusionPass", "mul", "muls", "div", values="rounded")
def activation(draft: Draft, node: Node) -> bool:
    """Recognise silu, hard sigmoid and hard swish spelled out."""
    for op, patterns in ACTIVATIONS.items():
        bindings = match(draft, node, *patterns)
        if bindings is not None:
            return draft.become(node, op, [bindings["x"]])
    return False


# -- products -------------------------------------------------------------------------------------
@rewrites("BatchMatMulToMatMulPass", "batch_matmul")
def flat_product(draft: Draft, node: Node) -> bool:
    """Multiply all batches by one matrix in one product: (.., m, k) (k, n) as (.. m, k) (k, n)."""
    a, b = (draft.type(name) for name in node.inputs)
    if len(b.shape) != 2 or node.attr("trans_a") or a.dtype not in FLOATS:
        return False
    if len(a.shape) == 2:
        return draft.become(node, "matmul", node.inputs, node.attrs)
    # (8, 12, 64) times (64, 32): one product (96, 64) (64, 32) instead of eight with 12 rows
    rows = (math.prod(a.shape[:-1]), a.shape[-1])
    flat = draft.insert("reshape", node.inputs[:1], {"shape": rows}, f"{node.name}_rows")
    product_rows = draft.insert(
        "matmul", (flat, node.inputs[1]), node.attrs, f"{node.name}_product"
    )
    return draft.become(node, "reshape", [product_rows], {"shape": draft.type(node.output).shape})


@rewrites("MatMulBiasAddFusionPass", "add", needs="matmul", values="rounded")
def product_bias(draft: Draft, node: Node) -> bool:
    """Make a product and its bias a gemm, also through a reshape that only splits the rows."""
    for value, bias in (node.inputs, node.inputs[::-1]):
        if draft.type(value) == draft.type(node.output):
            producer = draft.only(value, "matmul", "reshape")
            product_node = (
                draft.only(producer.inputs[0], "matmul")
                if producer and producer.op == "reshape"
                else producer
            )
            if product_node is not None and _gemm(
                draft, node, product_node, bias, split=product_node is not producer
            ):
                return True
    return False


def _gemm(draft: Draft, node: Node, product_node: Node, bias: str, *, split: bool) -> bool:
    """Let one gemm compute product + bias if formats and shapes fit.

    With `split`, a reshape that splits the rows is between product and bias.
    """
    kind = draft.type(product_node.output)
    result = draft.type(node.output)
    shape = draft.type(bias).shape
    if kind.dtype != draft.type(product_node.inputs[0]).dtype or kind.dtype not in FLOATS:
        return False
    attrs = {key: product_node.attr(key, False) for key in ("trans_a", "trans_b")}
    reads = (*product_node.inputs, bias)
    if split:
        columns = kind.shape[1:]
        # a bias has a number for each column, or is a scalar with the shape ()
        if shape not in (columns, ()) or result.shape[-1:] != columns:
            return False
        gemm_rows = draft.insert("gemm", reads, attrs, f"{node.name}_product")
        return draft.become(node, "reshape", [gemm_rows], {"shape": result.shape})
    try:
        fits = broadcast_shape("bias", result.shape, shape) == result.shape
    except AscendLabError:
        return False
    return fits and draft.become(node, "gemm", reads, attrs)


# -- attention ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Scores:
    """The recognised parts of a softmax's operand: scale q k^T + mask."""

    product: Node
    scale: float = 1.0
    mask: str | None = None


@rewrites("FlashAttentionFusionPass", *PRODUCTS, "attention_context", values="rounded")
def attention(draft: Draft, node: Node) -> bool:
    """Turn softmax(scale q k^T + mask) v into one `flash_attention`."""
    if node.attr("trans_a") or node.attr("trans_b") or node.attr("out_dtype"):
        return False
    weights = draft.only(node.inputs[0], "softmax", "masked_softmax")
    scores = None if weights is None else _scores_of(draft, weights)
    if scores is None or scores.product.attr("trans_a"):
        return False
    q, k = scores.product.inputs
    value_and_mask = (node.inputs[1], *([scores.mask] if scores.mask else []))
    kinds = [draft.type(name) for name in (q, k, *value_and_mask)]
    transposed = scores.product.attr("trans_b", False)
    key_shape = kinds[1].shape
    if not transposed:
        # the product reads k^T: check the types with this transposed back to k
        kinds[1] = replace(kinds[1], shape=(*key_shape[:-2], key_shape[-1], key_shape[-2]))
    try:
        if infer("flash_attention", kinds, {"scale": 1.0})[0] != draft.type(node.output):
            return False
    except AscendLabError:
        return False
    if not transposed:
        rank = len(key_shape)
        perm = (*range(rank - 2), rank - 1, rank - 2)
        k = draft.insert("transpose", [k], {"perm": perm}, f"{node.name}_keys")
    return draft.become(node, "flash_attention", (q, k, *value_and_mask), {"scale": scores.scale})


def _scores_of(draft: Draft, weights: Node) -> _Scores | None:
    """Follow operands back from the softmax over mask and scale to the product; None if absent."""
    shape = draft.type(weights.output).shape
    name = weights.inputs[0]
    if weights.op == "masked_softmax":
        scores = _scaled_product(draft, name)
        return None if scores is None else replace(scores, mask=weights.inputs[1])
    if axis_of("softmax", settings(weights)["axis"], shape) + 1 != len(shape):
        return None
    added = draft.only(name, "add")
    if added is None:
        return _scaled_product(draft, name)
    for value, mask in (added.inputs, added.inputs[::-1]):
        scores = _scaled_product(draft, value)
        if scores is not None:
            return replace(scores, mask=mask)
    return None


def _scaled_product(draft: Draft, name: str) -> _Scores | None:
    """Follow operands back over scalar factors and divisors to the product; None if absent."""
    scale = 1.0
    followed = name
    while True:
        node = draft.only(followed, "muls", "div", "mul", "attention_scores", *PRODUCTS)
        if node is None:
            return None
        if node.op in PRODUCTS:
            keeps_format = draft.type(node.output).dtype == draft.type(node.inputs[0]).dtype
            return _Scores(node, scale) if keeps_format else None
        if node.op == "attention_scores":
            # `attention_scores` includes a scale, by default 1 / sqrt(depth): 1 / 8 for depth 64
            stated_scale = settings(node)["scale"]
            depth = draft.type(node.inputs[0]).shape[-1]
            node_scale = 1 / math.sqrt(depth) if stated_scale is None else stated_scale
            return _Scores(replace(node, attrs={"trans_b": True}), scale * node_scale)
        followed = node.inputs[0]
        factor = node.inputs[-1]
        number = settings(node)["number"] if node.op == "muls" else draft.number(factor)
        if number is None and node.op == "mul":
            followed = node.inputs[1]
            number = draft.number(node.inputs[0])
        changes_shape = draft.type(followed).shape != draft.type(node.output).shape
        if not number or changes_shape:
            return None
        # x / 8 is a factor of 1/8
        scale *= 1 / number if node.op == "div" else number
