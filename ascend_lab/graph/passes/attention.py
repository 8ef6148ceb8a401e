"""FlashAttention rewriting: product, softmax and product become one attention operator."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ascend_lab.errors import AscendLabError
from ascend_lab.graph.edit import Draft
from ascend_lab.graph.infer import infer
from ascend_lab.graph.ir import Node, TensorType
from ascend_lab.graph.passes.rewrite import Pass, settings, sweep
from ascend_lab.ops.registry import OPERATORS
from ascend_lab.ops.shapes import axis_of

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
