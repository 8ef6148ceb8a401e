"""Which constants of a graph are parameters that training changes.

A floating-point constant is a parameter if its data are `Seeded` (models of the zoo draw weights
so, and nothing else), or if they are an array in a place where weights stand: an operand of a
matrix product or convolution, scale or bias of a norm, an embedding's table, or one number per
channel that is added or multiplied. Constants filled with one number (masks, scales), statistics
of batch norms and arrays of several axes that are added (masks, fixed positions) are not.
"""

from __future__ import annotations

from collections.abc import Sequence

from ascend_lab.errors import InputError
from ascend_lab.graph import Constant, Fill, Graph, Node, Seeded
from ascend_lab.ops.formats import is_float

STATISTICS = (3, 4)
"""Inputs of a batch norm that are averages: mean and variance."""
WEIGHTS = {
    "matmul": (0, 1), "batch_matmul": (0, 1), "gemm": (0, 1, 2), "conv2d": (1, 2),
    "conv_transpose2d": (1, 2), "depthwise_conv2d": (1,), "batch_norm": (1, 2),
    "batch_norm_training": (1, 2), "layer_norm": (1, 2), "rms_norm": (1,), "embedding": (0,),
    "gather": (0,),
}  # fmt: skip
"""Places of each operator's inputs where weights stand."""
NORMS = ("batch_norm", "batch_norm_training")


def is_parameter(graph: Graph, name: str) -> bool:
    """Tell whether training changes a constant, by the rule above."""
    constant = graph.constants[name]
    if not is_float(constant.type.dtype) or isinstance(constant.data, Fill):
        return False
    readers = graph.readers[name]
    places = [(node, i) for node in readers for i, one in enumerate(node.inputs) if one == name]
    trained = [(n, i) for n, i in places if not (n.op in NORMS and i in STATISTICS)]
    if isinstance(constant.data, Seeded):
        return bool(trained)
    return any(_is_weight(constant, node, place) for node, place in trained)


def _is_weight(constant: Constant, node: Node, place: int) -> bool:
    """Tell whether an array stands where weights do, or holds one number per channel."""
    if place in WEIGHTS.get(node.op, ()):
        return True
    wide = [n for n in constant.type.shape if n != 1]
    return node.op in ("add", "mul") and len(wide) == 1


def trainable(graph: Graph, chosen: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the parameters of a graph in the order in which it reads them.

    `chosen` names them instead of the rule; raises `InputError` for a name that is no
    floating-point constant of the graph.
    """
    for name in chosen or ():
        known = graph.constants.get(name)
        if known is None or not is_float(known.type.dtype):
            got = "no constant" if known is None else known.type.dtype
            raise InputError(f"parameter {name}: a floating-point constant", got, "check the name")
    read = dict.fromkeys(n for node in graph.nodes for n in node.inputs if n in graph.constants)
    if chosen is not None:
        return tuple(name for name in read if name in chosen)
    return tuple(name for name in read if is_parameter(graph, name))
