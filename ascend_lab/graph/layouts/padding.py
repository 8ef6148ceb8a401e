"""What lies in the padding of blocked layouts, where work runs over whole blocks.

A conversion pads with zeros, and so does the cube. Elementwise work makes other numbers of them:
adds(x, 1) leaves ones in lanes that hold no element. A cube multiplies these by the zeros that pad
the other operand, which harms nobody as long as they are finite, and as one operand has zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np

from ascend_lab.graph.infer import operator_of
from ascend_lab.graph.ir import Graph, Node, TensorType
from ascend_lab.graph.lower.rows import ROW_WISE
from ascend_lab.ops.formats import round_to

BLOCK = 16
Bounds = tuple[float, float]
"""Least and largest number in the padding lanes of a tensor."""


def padding_after(graph: Graph, node: Node, known: Mapping[str, Bounds]) -> Bounds:
    """Return the bounds behind an elementwise node on images; infinite or NaN if it overflows.

    The extremes of the operands are tried: right for every operator whose largest results, as
    those of a square, belong to them. What is not `known` holds zeros.
    """
    out = graph.types[node.output]
    sides = [_bounds(graph, name, out, known) for name in node.inputs]
    settings = operator_of(node.op).settings(node.attrs)
    with np.errstate(all="ignore"):
        found = [
            operator_of(node.op).formula(*map(np.float64, numbers), **settings)
            for numbers in product(*sides)
        ]
        narrow = round_to(np.array(found, np.float64), out.dtype).astype(np.float64)
    return float(narrow.min()), float(narrow.max())


def _bounds(graph: Graph, name: str, out: TensorType, known: Mapping[str, Bounds]) -> Bounds:
    """Return the bounds of an operand beside `out`; a constant is repeated where it is shorter."""
    constant = graph.constants.get(name)
    if constant is None:
        return known.get(name, (0.0, 0.0))
    shape = (1, 1, 1, *constant.type.shape)
    if shape[-3] == out.shape[1]:
        return 0.0, 0.0
    values = constant.array().astype(np.float64)
    return float(values.min()), float(values.max())


def dirties_columns(graph: Graph, node: Node, written: str) -> bool:
    """Tell whether a product may leave numbers, not zeros, in the columns that pad its result.

    Its columns are the rows of b when b is read transposed. What was `written` in fractals holds
    anything in rows that pad it; row-wise operators may yet be moved there.
    """
    b = node.inputs[1]
    maker = graph.producers.get(b)
    fractal = written == "FRACTAL_NZ" or (maker is not None and maker.op in ROW_WISE)
    ragged = graph.types[b].shape[-2] % BLOCK != 0
    return bool(node.attr("trans_b", False)) and ragged and fractal
