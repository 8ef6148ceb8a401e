"""Transposes and reshapes: two become one, and a matrix product reads its operand transposed."""

from __future__ import annotations

from ascend_lab.graph.edit import Draft
from ascend_lab.graph.ir import Node, Shape
from ascend_lab.graph.passes.rewrite import Pass, settings, sweep

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
