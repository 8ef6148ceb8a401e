"""Attention on a chip: one kernel that keeps the scores on the core, or products and a softmax."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from ascend_lab.chip import Chip
from ascend_lab.graph.draft import Draft, pruned
from ascend_lab.graph.ir import Constant, Graph, Node, TensorType, Values
from ascend_lab.graph.layout import ELEMENTWISE
from ascend_lab.graph.lower import CONVOLUTIONS
from ascend_lab.ops.operator import Call, get

FLASH = "flash_attention"


def attention_apart(graph: Graph, chip: Chip) -> Graph:
    """Return the graph with attention, or its halves, as the chip computes them."""
    edit = Draft(graph)
    for node in edit:
        if node.op in ("attention", FLASH):
            edit.replace(node.output, attention_parts(edit, node, chip))
        elif node.op == "attention_context":
            edit.replace(node.output, edit.insert("batch_matmul", node.inputs, {}, node.name))
        elif node.op == "attention_scores":
            edit.replace(node.output, _scores(edit, node.name, node))
    return edit.finish()


def attention_parts(edit: Draft, node: Node, chip: Chip) -> str:
    """Insert what computes a node of attention on a chip; return the tensor of its result."""
    q, k, v, *mask = node.inputs
    if flash_applies(edit, node, chip):
        whole = [_whole(edit, name, node) for name in mask]
        return edit.insert(FLASH, (q, k, v, *whole), {"scale": _scale(edit, node)}, node.name)
    scores = _scores(edit, f"{node.name}_scores", node)
    for name in mask:
        scores = edit.insert("add", (scores, name), {}, f"{node.name}_masked")
    shares = edit.insert("softmax", (scores,), {"axis": -1}, f"{node.name}_softmax")
    return edit.insert("batch_matmul", (shares, v), {}, node.name)


def _scale(edit: Draft, node: Node) -> float:
    scale = node.attr("scale")
    width = edit.types[node.inputs[0]].shape[-1]
    return 1.0 / math.sqrt(width) if scale is None else float(scale)


def _scores(edit: Draft, name: str, node: Node) -> str:
    scores = edit.insert("batch_matmul", node.inputs[:2], {"trans_b": True}, name)
    return edit.insert("muls", (scores,), {"number": _scale(edit, node)}, f"{node.name}_scaled")


def flash_applies(edit: Draft, node: Node, chip: Chip) -> bool:
    """Tell whether the chip has the kernel for a node's shapes and a mask it can read."""
    operator = get(FLASH)
    types = [edit.types[n] for n in node.inputs]
    shapes = tuple(t.shape for t in types)
    call = Call(
        shapes,
        tuple(t.dtype for t in types),
        operator.settings(node.attrs),
        operator.infer(*shapes, **node.attrs),
    )
    ragged = len(shapes) > 3 and shapes[3][-1] % 16 and node.inputs[3] not in edit.constants
    assert operator.template is not None
    return not ragged and operator.template.applies(call, chip)


def _whole(edit: Draft, mask: str, node: Node) -> str:
    """Return a mask with a matrix for every pair of batch and head, unless one serves all."""
    shape, batch = edit.types[mask].shape, edit.types[node.output].shape[:-2]
    if math.prod(shape[:-2]) in (1, math.prod(batch)):
        return mask
    return stretched(edit, mask, (*batch, *shape[-2:]))


def stretched(edit: Draft, name: str, shape: tuple[int, ...]) -> str:
    """Return a tensor repeated along the axes in which `shape` is longer; constants stay so."""
    kind = edit.types[name]
    if kind.shape == shape:
        return name
    if name in edit.constants:
        data = partial(_repeated, edit.constants[name], shape)
        return edit.add(Constant(replace(kind, shape=shape), data), f"{name}_whole")
    return edit.insert("expand", (name,), {"shape": shape}, f"{name}_whole")


def _repeated(constant: Constant, shape: tuple[int, ...]) -> Values:
    return np.broadcast_to(constant.array(), shape)


# The last rewrites before layouts: operators without a kernel of their own become those that
# have.
#
# gemm(a, b, c)          matmul, add
# batch_norm             mul and add by constants per channel
# (.., k) @ (k, n)       one product of flat matrices, reshapes around it
# elementwise(reshape)   reshape(elementwise), so that what follows a product stays beside it


def canonical(graph: Graph, chip: Chip) -> Graph:
    """Return the graph in the operators that lowering knows; values are those of the parts."""
    return _sink(_flatten(_expand(attention_apart(pruned(graph), chip))))


def _expand(graph: Graph) -> Graph:
    edit = Draft(graph)
    for node in edit:
        if node.op == "gemm":
            edit.replace(node.output, _gemm(edit, node))
        elif node.op == "batch_matmul" and _batches(edit, node):
            a, b = _batches(edit, node)
            sides = [stretched(edit, n, s) for n, s in zip(node.inputs, (a, b), strict=True)]
            edit.replace(node.output, edit.insert(node.op, sides, node.attrs, node.name))
        elif len(node.inputs) > 2 and _takes_no_bias(edit, node):
            edit.replace(node.output, _bias_apart(edit, node))
        elif node.op == "batch_norm" and all(n in edit.constants for n in node.inputs[1:]):
            edit.replace(node.output, _batch_norm(edit, node))
    return edit.finish()


def _gemm(edit: Draft, node: Node) -> str:
    a, b, *bias = node.inputs
    sides = {key: node.attr(key, False) for key in ("trans_a", "trans_b")}
    y = edit.insert("matmul", (a, b), sides, node.name)
    if node.attr("alpha", 1.0) != 1.0:
        y = edit.insert("muls", (y,), {"number": node.attr("alpha")}, f"{node.name}_alpha")
    if not bias:
        return y
    added = bias[0]
    if node.attr("beta", 1.0) != 1.0:
        added = edit.insert("muls", bias, {"number": node.attr("beta")}, f"{node.name}_beta")
    return edit.insert("add", (y, added), {}, f"{node.name}_bias")


def _batches(edit: Draft, node: Node) -> tuple[tuple[int, ...], ...]:
    """Return the operands' shapes with all batch axes written out; () if they are."""
    batch = edit.types[node.output].shape[:-2]
    shapes = [edit.types[n].shape for n in node.inputs]
    flat = len(shapes[1]) == 2 and node.inputs[1] in edit.constants
    if all(s[:-2] == batch for s in shapes) or (flat and not node.attr("trans_a", False)):
        return ()
    return tuple((*batch, *s[-2:]) for s in shapes)


def _takes_no_bias(edit: Draft, node: Node) -> bool:
    """Tell whether a convolution's bias has to be added by a node of its own."""
    fixed = node.inputs[2] in edit.constants
    return node.op == "conv_transpose2d" or (node.op in CONVOLUTIONS and not fixed)


def _bias_apart(edit: Draft, node: Node) -> str:
    """Return the convolution of x and w, plus bias, one number per channel."""
    x, weight, bias = node.inputs
    y = edit.insert(node.op, (x, weight), node.attrs, node.name)
    column = edit.insert("reshape", (bias,), {"shape": (*edit.types[bias].shape, 1, 1)})
    if bias in edit.constants:
        kind = TensorType((*edit.types[bias].shape, 1, 1), edit.types[bias].dtype)
        column = edit.add(Constant(kind, partial(_column, edit.constants[bias])), bias)
    return edit.insert("add", (y, column), {}, f"{node.name}_bias")


def _column(bias: Constant) -> Values:
    return bias.array().reshape(-1, 1, 1)


def _batch_norm(edit: Draft, node: Node) -> str:
    """Return x * (scale / sqrt(variance + epsilon)) + the rest, per channel."""
    x, *parts = node.inputs
    kind, constants = edit.types[x], [edit.constants[n] for n in parts]
    shape = (edit.types[parts[0]].shape[0], *(1,) * (len(kind.shape) - 2))
    epsilon = float(node.attr("epsilon", 1e-5))
    both = TensorType(shape, kind.dtype)
    scale = edit.add(
        Constant(both, partial(_slope, constants, epsilon, shape)), f"{node.name}_scale"
    )
    shift = edit.add(
        Constant(both, partial(_shift, constants, epsilon, shape)), f"{node.name}_shift"
    )
    y = edit.insert("mul", (x, scale), {}, node.name)
    return edit.insert("add", (y, shift), {}, f"{node.name}_add")


def _factor(parts: list[Constant], epsilon: float) -> Values:
    scale, _, _, variance = (p.array().astype(np.float64) for p in parts)
    found: Values = scale / np.sqrt(variance + epsilon)
    return found


def _slope(parts: list[Constant], epsilon: float, shape: tuple[int, ...]) -> Values:
    return _factor(parts, epsilon).reshape(shape)


def _shift(parts: list[Constant], epsilon: float, shape: tuple[int, ...]) -> Values:
    bias, mean = (p.array().astype(np.float64) for p in parts[1:3])
    found: Values = bias - mean * _factor(parts, epsilon)
    return found.reshape(shape)


def _flatten(graph: Graph) -> Graph:
    """Make one product of flat matrices of every (.., k) @ constant (k, n)."""
    edit = Draft(graph)
    for node in edit:
        if node.op not in ("matmul", "batch_matmul") or node.attr("trans_a", False):
            continue
        a, b = (edit.types[n].shape for n in node.inputs)
        if len(a) <= 2 or len(b) != 2 or node.inputs[1] not in edit.constants:
            continue
        flat = edit.insert(
            "reshape", node.inputs[:1], {"shape": (math.prod(a[:-1]), a[-1])}, f"{node.name}_flat"
        )
        y = edit.insert("matmul", (flat, node.inputs[1]), node.attrs, node.name)
        shape = edit.types[node.output].shape
        edit.replace(node.output, edit.insert("reshape", (y,), {"shape": shape}, f"{node.name}_nd"))
    return edit.finish()


def _sink(graph: Graph) -> Graph:
    """Move reshapes that only split rows behind the elementwise nodes that read nothing else."""
    edit = Draft(graph)
    flat = dict(_row_splits(graph))
    for node in edit:
        if node.op not in ELEMENTWISE or not any(n in flat for n in node.inputs):
            continue
        rows = [flat.get(n) or _row(edit, n) for n in node.inputs]
        if all(rows):
            y = edit.insert(node.op, [str(n) for n in rows], node.attrs, node.name)
            shape = {"shape": edit.types[node.output].shape}
            made = edit.insert("reshape", (y,), shape, f"{node.name}_nd")
            edit.replace(node.output, made)
            flat[made] = y
    return edit.finish()


def _row_splits(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield (tensor, matrix) for every reshape of a matrix (m, n) to (.., n)."""
    for node in graph.nodes:
        if node.op == "reshape":
            source, shape = graph.types[node.inputs[0]].shape, graph.types[node.output].shape
            if len(source) == 2 and len(shape) > 2 and source[-1] == shape[-1]:
                yield node.output, node.inputs[0]


def _row(edit: Draft, name: str) -> str | None:
    """Return a constant that is the same for every row, or None."""
    shape = edit.types[name].shape
    return name if name in edit.constants and len(shape) <= 1 else None
