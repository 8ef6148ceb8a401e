"""Products and convolutions in int8: quantise, multiply in int8, sum in int32, scale back.

y = (sx sw) (qx qw + qb), qx = round(x / sx), symmetric, one scale per tensor: sx = max|x| / 127.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.graph.edit import Draft
from ascend_lab.graph.evaluate import evaluate, random_inputs
from ascend_lab.graph.ir import Constant, Graph, Node, TensorType
from ascend_lab.graph.passes.rewrite import Pass, derived, settings, sweep

HEAVY = ("conv2d", "matmul", "gemm")
STEPS = 127
"""Largest number used: symmetric around 0, so that -128 is left out."""


def weighted(graph: Graph) -> list[Node]:
    """Return the nodes that can run in int8: floats times constant weights."""
    return [
        node
        for node in graph.nodes
        if node.op in HEAVY
        and all(name in graph.constants for name in node.inputs[1:])
        and graph.types[node.inputs[0]].dtype != "int8"
        and not node.attr("trans_a")
        and graph.types[node.output].dtype == graph.types[node.inputs[0]].dtype
    ]


def measured_scales(graph: Graph, seed: int = 0) -> dict[str, float]:
    """Return max|x| / 127 of what those nodes read, in one run on seeded inputs."""
    names = tuple(dict.fromkeys(node.inputs[0] for node in weighted(graph)))
    values = evaluate(replace(graph, outputs=names), random_inputs(graph, seed)) if names else {}
    return {name: scale_of(array) for name, array in values.items()}


def scale_of(values: NDArray[Any]) -> float:
    """Return the step of a symmetric int8 scale that holds all values; 1 if all are 0."""
    most = float(np.max(np.abs(values.astype(np.float64)), initial=0.0))
    return most / STEPS if most > 0 and np.isfinite(most) else 1.0


def quantise(graph: Graph, scales: Mapping[str, float] | None = None) -> tuple[Graph, int]:
    """Run convolutions and products with constant weights in int8.

    `scales` gives the step of each tensor they read; None measures it on seeded inputs.
    """
    known = measured_scales(graph) if scales is None else scales
    names = {node.name for node in weighted(graph) if node.inputs[0] in known}
    if not names:
        return graph, 0

    def rule(rw: Draft, node: Node) -> bool:
        return node.name in names and _in_int8(rw, node, known[graph.node(node.name).inputs[0]])

    return sweep(rule, *HEAVY)(graph)


def _in_int8(rw: Draft, node: Node, step: float) -> bool:
    weight = rw.constant(node.inputs[1])
    assert weight is not None
    out = rw.type(node.output)
    scale = scale_of(weight.array())
    low = _quantised(rw, node, step)
    packed = derived(TensorType(weight.type.shape, "int8"), partial(_rounded, scale), weight)
    inputs = [low, rw.add(packed, f"{node.inputs[1]}_int8")]
    options = settings(node)
    if node.op == "conv2d" and len(node.inputs) > 2:
        inputs.append(_bias(rw, node, step * scale))
    drop = ("out_dtype", "alpha", "beta") if node.op == "gemm" else ("out_dtype",)
    attrs = {key: value for key, value in options.items() if key not in drop}
    op = "matmul" if node.op == "gemm" else node.op
    sums = rw.insert(op, inputs, attrs, f"{node.name}_sums")
    wide = rw.insert("cast", [sums], {"dtype": "fp32"}, f"{node.name}_wide")
    factor = step * scale * float(options.get("alpha", 1.0))
    if node.op != "gemm" and out.dtype == "fp32":
        return rw.become(node, "muls", [wide], {"number": factor})
    y = rw.insert("muls", [wide], {"number": factor}, f"{node.name}_scaled")
    if node.op == "gemm":
        y = rw.insert("add", [y, _summand(rw, node)], {}, f"{node.name}_sum")
    return rw.become(node, "cast", [y], {"dtype": out.dtype})


def _quantised(rw: Draft, node: Node, step: float) -> str:
    """Return round(x / step) in int8, made once for all readers."""
    x = node.inputs[0]
    cast = rw.maker(f"{x}_int8")
    steps = None if cast is None or cast.op != "cast" else rw.maker(cast.inputs[0])
    if cast is not None and steps is not None and steps.inputs == (x,):
        return cast.output
    scaled = rw.insert("muls", [x], {"number": 1 / step}, f"{x}_steps")
    return rw.insert("cast", [scaled], {"dtype": "int8"}, f"{x}_int8")


def _rounded(scale: float, values: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = np.clip(np.rint(values.astype(np.float64) / scale), -STEPS, STEPS)
    return found


def _bias(rw: Draft, node: Node, step: float) -> str:
    """Return round(b / (sx sw)) in int32, as the sums are."""
    bias = rw.constant(node.inputs[2])
    assert bias is not None

    def whole(values: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = np.clip(
            np.rint(values.astype(np.float64) / step), -(2**31), 2**31 - 1
        )
        return found

    made: Constant = derived(TensorType(bias.type.shape, "int32"), whole, bias)
    return rw.add(made, f"{node.inputs[2]}_int32")


def _summand(rw: Draft, node: Node) -> str:
    """Return a gemm's beta * bias in fp32."""
    bias = rw.constant(node.inputs[2])
    assert bias is not None
    beta = float(settings(node)["beta"])
    kind = TensorType(bias.type.shape, "fp32")
    made = derived(kind, lambda values: values.astype(np.float64) * beta, bias)
    return rw.add(made, f"{node.inputs[2]}_fp32")


INT8 = Pass(
    "Int8ConversionPass",
    "precision",
    quantise,
    "runs convolutions and products with constant weights in int8",
    "changed",
)
