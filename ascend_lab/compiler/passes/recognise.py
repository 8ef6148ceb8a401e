"""What a model spells out in small operators becomes one: norms, activations, biases, attention."""

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
_SHIFTED = ("sub", "x", ("reduce_mean", "x", {"axis": "$axis", "keepdims": True}))
_SPREAD = ("reduce_mean", ("square", _SHIFTED), {"axis": "$axis", "keepdims": True})
_VARIANCE = ("adds", _SPREAD, {"number": "$epsilon"})
_ROOT = ("sqrt", _VARIANCE)
_NORMAL = (
    ("div", _SHIFTED, _ROOT),
    ("mul", _SHIFTED, ("rec", _ROOT)),
    ("mul", _SHIFTED, ("rsqrt", _VARIANCE)),
)
LAYER_NORM = tuple(("add", ("mul", normal, "scale"), "bias") for normal in _NORMAL)


@rewrites("LayerNormFusionPass", "add", beside="reduce_mean", values="rounded")
def layer_norm(draft: Draft, node: Node) -> bool:
    """Recognise a layer norm spelled out in nine operators."""
    found = match(draft, node, *LAYER_NORM)
    if found is None:
        return False
    kind = draft.type(found["x"])
    rank = len(kind.shape)
    axes = axes_of("layer_norm", found["axis"], kind.shape)
    if axes != tuple(range(axes[0], rank)):
        return False
    tail = TensorType(kind.shape[axes[0] :], kind.dtype)
    parameters = [_as_tail(draft, found[name], tail) for name in ("scale", "bias")]
    attrs = {"axis": axes[0] - rank, "epsilon": found["epsilon"]}
    reads = (found["x"], *filter(None, parameters))
    return None not in parameters and draft.become(node, "layer_norm", reads, attrs)


def _as_tail(draft: Draft, name: str, kind: TensorType) -> str | None:
    """Return a parameter in the shape of the normalised axes; None if it cannot have it."""
    if draft.type(name) == kind:
        return name
    constant = draft.constant(name)
    if constant is None or constant.type.elements != kind.elements:
        return None
    return draft.add(derived(kind, lambda v: v.reshape(kind.shape), constant), f"{name}_tail")


# -- activations ----------------------------------------------------------------------------------
def _halves(inner: Any) -> tuple[Any, ...]:
    """Return the ways to write x / 2 * (1 + inner)."""
    one = _plus(inner, 1.0)
    return (
        _times(("mul", "x", one), 0.5),
        ("mul", _times("x", 0.5), one),
        ("mul", "x", _times(one, 0.5)),
    )


_CUBES = (("pow", "x", 3.0), ("mul", ("square", "x"), "x"))
_SCALED = tuple(
    _times(("add", "x", _times(cube, 0.044715)), math.sqrt(2 / math.pi)) for cube in _CUBES
)
GELU = tuple(form for inner in _SCALED for form in _halves(("tanh", inner)))
_ROOTS = (_times("x", math.sqrt(0.5)), ("div", "x", math.sqrt(2.0)))
GELU_ERF = tuple(form for inner in _ROOTS for form in _halves(("erf", inner)))
_CLIPPED = (("relu6", _plus("x", 3.0)), ("clip", _plus("x", 3.0), {"low": 0.0, "high": 6.0}))
_SIXTH = (lambda form: _times(form, 1 / 6), lambda form: ("div", form, 6.0))
ACTIVATIONS = {
    "silu": (("mul", "x", ("sigmoid", "x")),),
    "hard_swish": (
        ("mul", "x", ("hard_sigmoid", "x")),
        *(sixth(("mul", "x", clipped)) for clipped, sixth in product(_CLIPPED, _SIXTH)),
    ),
    "hard_sigmoid": tuple(sixth(clipped) for clipped, sixth in product(_CLIPPED, _SIXTH)),
}


@rewrites("GeluFusionPass", "mul", "muls", values="rounded")
def gelu(draft: Draft, node: Node) -> bool:
    """Recognise the tanh form of gelu spelled out: x / 2 (1 + tanh(sqrt(2/pi) (x + c x^3)))."""
    found = match(draft, node, *GELU)
    return found is not None and draft.become(node, "gelu", [found["x"]])


@rewrites("GeluErfToTanhPass", "mul", "muls", stage="opt-in", values="changed")
def gelu_erf(draft: Draft, node: Node) -> bool:
    """Compute the erf form of gelu, x / 2 (1 + erf(x / sqrt(2))), by its tanh form.

    They are up to 0.0005 apart.
    """
    found = match(draft, node, *GELU_ERF)
    return found is not None and draft.become(node, "gelu", [found["x"]])


@rewrites("ActivationFusionPass", "mul", "muls", "div", values="rounded")
def activation(draft: Draft, node: Node) -> bool:
    """Recognise silu, hard sigmoid and hard swish spelled out."""
    for op, patterns in ACTIVATIONS.items():
        found = match(draft, node, *patterns)
        if found is not None:
            return draft.become(node, op, [found["x"]])
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
    rows = (math.prod(a.shape[:-1]), a.shape[-1])
    flat = draft.insert("reshape", node.inputs[:1], {"shape": rows}, f"{node.name}_rows")
    made = draft.insert("matmul", (flat, node.inputs[1]), node.attrs, f"{node.name}_product")
    return draft.become(node, "reshape", [made], {"shape": draft.type(node.output).shape})


@rewrites("MatMulBiasAddFusionPass", "add", beside="matmul", values="rounded")
def product_bias(draft: Draft, node: Node) -> bool:
    """Make a product and its bias a gemm, also through a reshape that only splits the rows."""
    for value, bias in (node.inputs, node.inputs[::-1]):
        if draft.type(value) == draft.type(node.output):
            made = draft.only(value, "matmul", "reshape")
            inner = draft.only(made.inputs[0], "matmul") if made and made.op == "reshape" else made
            if inner is not None and _gemm(draft, node, inner, bias, split=inner is not made):
                return True
    return False


def _gemm(draft: Draft, node: Node, product: Node, bias: str, *, split: bool) -> bool:
    """Let one gemm compute product + bias if formats and shapes fit; `split`: reshaped between."""
    kind = draft.type(product.output)
    wanted = draft.type(node.output)
    shape = draft.type(bias).shape
    if kind.dtype != draft.type(product.inputs[0]).dtype or kind.dtype not in FLOATS:
        return False
    attrs = {key: product.attr(key, False) for key in ("trans_a", "trans_b")}
    reads = (*product.inputs, bias)
    if split:
        columns = kind.shape[1:]
        if shape not in (columns, ()) or wanted.shape[-1:] != columns:  # () once it is a scalar
            return False
        made = draft.insert("gemm", reads, attrs, f"{node.name}_product")
        return draft.become(node, "reshape", [made], {"shape": wanted.shape})
    try:
        fits = broadcast_shape("bias", wanted.shape, shape) == wanted.shape
    except AscendLabError:
        return False
    return fits and draft.become(node, "gemm", reads, attrs)


# -- attention ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Scores:
    """What is known of softmax's operand: scale q k^T + mask."""

    product: Node
    scale: float = 1.0
    mask: str | None = None


@rewrites("FlashAttentionFusionPass", *PRODUCTS, "attention_context", values="rounded")
def attention(draft: Draft, node: Node) -> bool:
    """Make softmax(scale q k^T + mask) v one attention, whose scores stay on the core."""
    if node.attr("trans_a") or node.attr("trans_b") or node.attr("out_dtype"):
        return False
    weights = draft.only(node.inputs[0], "softmax", "masked_softmax")
    scores = None if weights is None else _scores_of(draft, weights)
    if scores is None or scores.product.attr("trans_a"):
        return False
    q, k = scores.product.inputs
    rest = (node.inputs[1], *([scores.mask] if scores.mask else []))
    kinds = [draft.type(name) for name in (q, k, *rest)]
    turned = scores.product.attr("trans_b", False)
    sizes = kinds[1].shape
    if not turned:
        kinds[1] = replace(kinds[1], shape=(*sizes[:-2], sizes[-1], sizes[-2]))
    try:
        if infer("flash_attention", kinds, {"scale": 1.0})[0] != draft.type(node.output):
            return False
    except AscendLabError:
        return False
    if not turned:
        rank = len(sizes)
        perm = (*range(rank - 2), rank - 1, rank - 2)
        k = draft.insert("transpose", [k], {"perm": perm}, f"{node.name}_keys")
    return draft.become(node, "flash_attention", (q, k, *rest), {"scale": scores.scale})


def _scores_of(draft: Draft, weights: Node) -> _Scores | None:
    """Walk back from softmax over mask and scale to the product."""
    shape = draft.type(weights.output).shape
    name = weights.inputs[0]
    if weights.op == "masked_softmax":
        found = _scaled_product(draft, name)
        return None if found is None else replace(found, mask=weights.inputs[1])
    if axis_of("softmax", settings(weights)["axis"], shape) + 1 != len(shape):
        return None
    added = draft.only(name, "add")
    if added is None:
        return _scaled_product(draft, name)
    for value, mask in (added.inputs, added.inputs[::-1]):
        found = _scaled_product(draft, value)
        if found is not None:
            return replace(found, mask=mask)
    return None


def _scaled_product(draft: Draft, name: str) -> _Scores | None:
    """Walk back over factors and quotients that are one number."""
    scale = 1.0
    while True:
        node = draft.only(name, "muls", "div", "mul", "attention_scores", *PRODUCTS)
        if node is None:
            return None
        if node.op in PRODUCTS:
            plain = draft.type(node.output).dtype == draft.type(node.inputs[0]).dtype
            return _Scores(node, scale) if plain else None
        if node.op == "attention_scores":
            own = settings(node)["scale"]
            own = 1 / math.sqrt(draft.type(node.inputs[0]).shape[-1]) if own is None else own
            return _Scores(replace(node, attrs={"trans_b": True}), scale * own)
        name = node.inputs[0]
        other = node.inputs[-1]
        number = settings(node)["number"] if node.op == "muls" else draft.number(other)
        if number is None and node.op == "mul":
            name = node.inputs[1]
            number = draft.number(node.inputs[0])
        widens = draft.type(name).shape != draft.type(node.output).shape
        if not number or widens:
            return None
        scale *= 1 / number if node.op == "div" else number
