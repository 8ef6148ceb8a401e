"""Matrix products in canonical form: a bias makes a gemm, one matrix for all batches a matmul."""

from __future__ import annotations

import math

from ascend_lab.errors import AscendLabError
from ascend_lab.graph.edit import Draft
from ascend_lab.graph.ir import Node
from ascend_lab.graph.passes.rewrite import Pass, settings, sweep
from ascend_lab.ops.shapes import broadcast_shape

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
