"""Activations and norms that a model spells out in small operators become one operator."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ascend_lab.errors import AscendLabError
from ascend_lab.graph.draft import Draft
from ascend_lab.graph.ir import Node, TensorType, infer
from ascend_lab.graph.passes.rewrite import Pass, derived, match, settings, sweep
from ascend_lab.ops.operator import OPERATORS
from ascend_lab.ops.shapes import axes_of, axis_of, broadcast_shape

_SHIFTED = ("sub", "x", ("reduce_mean", "x", {"axis": "$axis", "keepdims": True}))
_SPREAD = ("reduce_mean", ("square", _SHIFTED), {"axis": "$axis", "keepdims": True})
_ROOT = ("sqrt", ("adds", _SPREAD, {"number": "$epsilon"}))
_NORMAL = (
    ("div", _SHIFTED, _ROOT),
    ("mul", _SHIFTED, ("rec", _ROOT)),
    ("mul", _SHIFTED, ("rsqrt", _ROOT[1])),
)
LAYER_NORM = tuple(("add", ("mul", normal, "scale"), "bias") for normal in _NORMAL)
_CUBES = (("pow", "x", 3.0), ("mul", ("square", "x"), "x"))


def _halves(inner: Any) -> tuple[Any, ...]:
    """Return the ways to write x / 2 * (1 + inner)."""
    one = ("adds", inner, {"number": 1.0})
    return (
        ("muls", ("mul", "x", one), {"number": 0.5}),
        ("mul", ("muls", "x", {"number": 0.5}), one),
        ("mul", "x", ("muls", one, {"number": 0.5})),
    )


GELU = tuple(
    form
    for cube in _CUBES
    for form in _halves(
        (
            "tanh",
            (
                "muls",
                ("add", "x", ("muls", cube, {"number": 0.044715})),
                {"number": math.sqrt(2 / math.pi)},
            ),
        )
    )
)
GELU_ERF = tuple(
    form
    for inner in (("muls", "x", {"number": math.sqrt(0.5)}), ("div", "x", math.sqrt(2.0)))
    for form in _halves(("erf", inner))
)
_CLIPPED = (
    ("relu6", ("adds", "x", {"number": 3.0})),
    ("clip", ("adds", "x", {"number": 3.0}), {"low": 0.0, "high": 6.0}),
)
HARD_SIGMOID = tuple(
    form
    for clipped in _CLIPPED
    for form in (("muls", clipped, {"number": 1 / 6}), ("div", clipped, 6.0))
)
_PRODUCTS = {
    "silu": ("mul", "x", ("sigmoid", "x")),
    "hard_swish": ("mul", "x", ("hard_sigmoid", "x")),
}
_SIXTHS = tuple(
    form
    for clipped in _CLIPPED
    for form in (
        ("muls", ("mul", "x", clipped), {"number": 1 / 6}),
        ("div", ("mul", "x", clipped), 6.0),
    )
)


def to_layer_norm(rw: Draft, node: Node) -> bool:
    """Turn (x - mean) / sqrt(mean((x - mean)^2) + epsilon) * scale + bias into layer_norm."""
    found = match(rw, node, *LAYER_NORM)
    if found is None:
        return False
    shape = rw.type(found["x"]).shape
    axes = axes_of("layer_norm", found["axis"], shape)
    if axes != tuple(range(axes[0], len(shape))):
        return False
    tail = TensorType(shape[axes[0] :], rw.type(found["x"]).dtype)
    parameters = [_as_tail(rw, found[name], tail) for name in ("scale", "bias")]
    if None in parameters:
        return False
    attrs = {"axis": axes[0] - len(shape), "epsilon": found["epsilon"]}
    return rw.become(node, "layer_norm", (found["x"], *map(str, parameters)), attrs)


def _as_tail(rw: Draft, name: str, kind: TensorType) -> str | None:
    """Return a parameter in the shape of the normalised axes; None if it cannot have it."""
    if rw.type(name) == kind:
        return name
    constant = rw.constant(name)
    if constant is None or constant.type.elements != kind.elements:
        return None
    return rw.add(derived(kind, lambda v: v.reshape(kind.shape), constant), f"{name}_tail")


def to_gelu(rw: Draft, node: Node) -> bool:
    """Turn x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) into gelu."""
    found = match(rw, node, *GELU)
    return found is not None and rw.become(node, "gelu", [found["x"]])


def erf_to_gelu(rw: Draft, node: Node) -> bool:
    """Turn x / 2 (1 + erf(x / sqrt(2))) into gelu, its tanh form: off by up to 0.0005."""
    found = match(rw, node, *GELU_ERF)
    return found is not None and rw.become(node, "gelu", [found["x"]])


def to_activation(rw: Draft, node: Node) -> bool:
    """Turn x sigmoid(x) into silu, x hard_sigmoid(x) into hard_swish, and their pieces likewise."""
    if node.op == "mul":
        for op, pattern in _PRODUCTS.items():
            found = match(rw, node, pattern)
            if found is not None:
                return rw.become(node, op, [found["x"]])
        return False
    for op, patterns in (("hard_swish", _SIXTHS), ("hard_sigmoid", HARD_SIGMOID)):
        found = match(rw, node, *patterns)
        if found is not None:
            return rw.become(node, op, [found["x"]])
    return False


LAYER_NORM_PASS = Pass(
    "LayerNormFusionPass",
    "fuse",
    sweep(to_layer_norm, "add"),
    "recognises a layer norm spelled out in nine operators",
    "rounded",
)
GELU_PASS = Pass(
    "GeluFusionPass",
    "fuse",
    sweep(to_gelu, "mul", "muls"),
    "recognises the tanh form of gelu spelled out",
    "rounded",
)
GELU_ERF_PASS = Pass(
    "GeluErfToTanhPass",
    "opt-in",
    sweep(erf_to_gelu, "mul", "muls"),
    "computes the erf form of gelu by its tanh form, off by up to 0.0005",
    "changed",
)
ACTIVATION_PASS = Pass(
    "ActivationFusionPass",
    "fuse",
    sweep(to_activation, "mul", "muls", "div"),
    "recognises silu, hard sigmoid and hard swish spelled out",
    "rounded",
)


# FlashAttention rewriting: product, softmax and product become one attention operator.


PRODUCTS = ("matmul", "batch_matmul")


@dataclass(frozen=True, slots=True)
class _Scores:
    """What is known of softmax's operand: scale q k^T + mask."""

    product: Node
    scale: float = 1.0
    mask: str | None = None


def to_attention(rw: Draft, node: Node) -> bool:
    """Turn softmax(scale q k^T + mask) v, of products and sums, into one operator."""
    if node.attr("trans_a") or node.attr("trans_b") or node.attr("out_dtype"):
        return False
    weights = rw.only(node.inputs[0], "softmax", "masked_softmax")
    scores = None if weights is None else _scores_of(rw, weights)
    if scores is None or scores.product.attr("trans_a"):
        return False
    q, k = scores.product.inputs
    shape = rw.type(node.output)
    inputs = (q, k, node.inputs[1], *([scores.mask] if scores.mask else []))
    op = "flash_attention" if "flash_attention" in OPERATORS else "attention"
    turned = scores.product.attr("trans_b", False)
    if not _fits(rw, op, inputs, turned, shape):
        return False
    if not turned:
        rank = len(rw.type(k).shape)
        perm = (*range(rank - 2), rank - 1, rank - 2)
        k = rw.insert("transpose", [k], {"perm": perm}, f"{node.name}_keys")
    return rw.become(node, op, (q, k, *inputs[2:]), {"scale": scores.scale})


def _fits(rw: Draft, op: str, inputs: tuple[str, ...], turned: bool, wanted: TensorType) -> bool:
    """Tell whether the operator takes these tensors and gives the wanted type."""
    kinds = [rw.type(name) for name in inputs]
    if not turned:
        k = kinds[1].shape
        kinds[1] = replace(kinds[1], shape=(*k[:-2], k[-1], k[-2]))
    try:
        return infer(op, kinds, {"scale": 1.0})[0] == wanted
    except AscendLabError:
        return False


def _scores_of(rw: Draft, weights: Node) -> _Scores | None:
    """Walk back from softmax over mask and scale to the product."""
    shape = rw.type(weights.output).shape
    if weights.op == "softmax" and axis_of("softmax", settings(weights)["axis"], shape) + 1 != len(
        shape
    ):
        return None
    name = weights.inputs[0]
    if weights.op == "masked_softmax":
        found = _scaled_product(rw, name)
        return None if found is None else replace(found, mask=weights.inputs[1])
    added = rw.only(name, "add")
    if added is None:
        return _scaled_product(rw, name)
    for value, mask in (added.inputs, added.inputs[::-1]):
        found = _scaled_product(rw, value)
        if found is not None:
            return replace(found, mask=mask)
    return None


def _scaled_product(rw: Draft, name: str) -> _Scores | None:
    """Walk back over factors and quotients that are one number."""
    scale = 1.0
    while True:
        node = rw.only(name, "muls", "div", "mul", "attention_scores", *PRODUCTS)
        if node is None:
            return None
        if node.op in PRODUCTS:
            plain = rw.type(node.output).dtype == rw.type(node.inputs[0]).dtype
            return _Scores(node, scale) if plain else None
        if node.op == "attention_scores":
            own = settings(node)["scale"]
            width = rw.type(node.inputs[0]).shape[-1]
            own = 1 / math.sqrt(width) if own is None else own
            return _Scores(replace(node, attrs={"trans_b": True}), scale * own)
        name, other = node.inputs[0], node.inputs[-1]
        number = settings(node)["number"] if node.op == "muls" else rw.number(other)
        if number is None and node.op == "mul":
            name, number = node.inputs[1], rw.number(node.inputs[0])
        if not number:
            return None
        scale *= 1 / number if node.op == "div" else number


ATTENTION = Pass(
    "FlashAttentionFusionPass",
    "fuse",
    sweep(to_attention, *PRODUCTS, "attention_context"),
    "makes product, softmax and product one attention, whose scores stay on the core",
    "rounded",
)


# Matrix products in canonical form: a bias makes a gemm, one matrix for all batches a matmul.


FLOATS = ("fp16", "bf16", "fp32")


def flatten_batches(rw: Draft, node: Node) -> bool:
    """Turn (..., m, k) (k, n) into one product (... m, k) (k, n) between two reshapes."""
    a, b = (rw.type(name) for name in node.inputs)
    if len(b.shape) != 2 or node.attr("trans_a") or a.dtype not in FLOATS:
        return False
    if len(a.shape) == 2:
        return rw.become(node, "matmul", node.inputs, node.attrs)
    rows = (math.prod(a.shape[:-1]), a.shape[-1])
    flat = rw.insert("reshape", node.inputs[:1], {"shape": rows}, f"{node.name}_rows")
    made = rw.insert("matmul", (flat, node.inputs[1]), node.attrs, f"{node.name}_product")
    return rw.become(node, "reshape", [made], {"shape": rw.type(node.output).shape})


def add_bias(rw: Draft, node: Node) -> bool:
    """Turn product + bias into gemm, also through a reshape that only splits the rows."""
    for value, bias in (node.inputs, node.inputs[::-1]):
        if rw.type(value) != rw.type(node.output):
            continue
        product = rw.only(value, "matmul")
        if product is not None and _gemm(rw, node, product, bias):
            return True
        reshape = rw.only(value, "reshape")
        inner = rw.only(reshape.inputs[0], "matmul") if reshape else None
        if inner is not None and _gemm_before_reshape(rw, node, inner, bias):
            return True
    return False


def _takes(rw: Draft, product: Node) -> bool:
    """Tell whether the operands' format is that of the result and one gemm computes."""
    same = rw.type(product.output).dtype == rw.type(product.inputs[0]).dtype
    return same and rw.type(product.output).dtype in FLOATS


def _gemm(rw: Draft, node: Node, product: Node, bias: str) -> bool:
    out = rw.type(node.output).shape
    try:
        fits = broadcast_shape("bias", out, rw.type(bias).shape) == out
    except AscendLabError:
        return False
    attrs = {key: product.attr(key, False) for key in ("trans_a", "trans_b")}
    ready = fits and _takes(rw, product)
    return ready and rw.become(node, "gemm", (*product.inputs, bias), attrs)


def _gemm_before_reshape(rw: Draft, node: Node, product: Node, bias: str) -> bool:
    shape, out = rw.type(bias).shape, rw.type(product.output).shape
    if not _takes(rw, product) or shape not in ((out[1],), ()):
        return False
    if rw.type(node.output).shape[-1] != out[1]:
        return False
    attrs = {key: product.attr(key, False) for key in ("trans_a", "trans_b")}
    made = rw.insert("gemm", (*product.inputs, bias), attrs, f"{node.name}_product")
    return rw.become(node, "reshape", [made], {"shape": rw.type(node.output).shape})


def without_bias(rw: Draft, node: Node) -> bool:
    """Turn a gemm that adds nothing into matmul."""
    options = settings(node)
    nothing = options["beta"] == 0 or rw.number(node.inputs[2]) == 0
    if options["alpha"] != 1 or not nothing:
        return False
    attrs = {key: options[key] for key in ("trans_a", "trans_b")}
    return rw.become(node, "matmul", node.inputs[:2], attrs)


BATCHES = Pass(
    "BatchMatMulToMatMulPass",
    "fuse",
    sweep(flatten_batches, "batch_matmul"),
    "multiplies all batches by one matrix in one product",
)
BIAS = Pass(
    "MatMulBiasAddFusionPass",
    "fuse",
    sweep(add_bias, "add"),
    "makes a product and its bias a gemm",
    "rounded",
)
NO_BIAS = Pass("GemmToMatMulPass", "fuse", sweep(without_bias, "gemm"), "drops a bias that is zero")
