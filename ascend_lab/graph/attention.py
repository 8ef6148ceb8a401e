"""Attention on a chip: one kernel that keeps the scores on the core, or products and a softmax."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from ascend_lab.chip import Chip
from ascend_lab.graph.edit import Draft
from ascend_lab.graph.ir import Constant, Graph, Node, Values
from ascend_lab.ops.registry import get
from ascend_lab.ops.template import Call

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
