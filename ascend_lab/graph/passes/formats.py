"""Another number format for a whole graph: inputs, constants, nodes; casts only where needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.graph.draft import Draft, given_attrs, pruned
from ascend_lab.graph.evaluate import evaluate, random_inputs
from ascend_lab.graph.ir import (
    Constant,
    Fill,
    Graph,
    Node,
    Seeded,
    TensorType,
    infer,
    operator_of,
    verify,
)
from ascend_lab.graph.passes.rewrite import Pass, derived, settings, sweep
from ascend_lab.ops.formats import FLOATS

LARGEST = {"fp16": 65504.0, "bf16": 3.3895313892515355e38, "fp32": 3.4028234663852886e38}


def convert(graph: Graph, dtype: str, source: str = "fp32") -> tuple[Graph, int]:
    """Compute in `dtype` what is computed in `source`: inputs, constants and outputs change too.

    What an operator keeps in a format of its own stays (batch norm's statistics in fp32, indices),
    and so does what scales int32 sums, which only fp32 holds; constants beyond the largest number
    of `dtype` become that number.
    """
    if not any(kind.dtype == source for kind in graph.types.values()):
        return graph, 0
    state = _Conversion(graph, dtype, source)
    for node in graph.nodes:
        state.node(node)
    if not state.count:
        return graph, 0
    for name in graph.outputs:
        if graph.types[name].dtype == source and state.types[name].dtype == source:
            state.cast_output(name)
    nodes, types = tuple(state.nodes), state.types
    made = replace(graph, nodes=nodes, types=types, constants=state.constants)
    return verify(pruned(made)), state.count


class _Conversion:
    """The graph converted so far; `names` holds each tensor in each format it exists in."""

    def __init__(self, graph: Graph, dtype: str, source: str) -> None:
        self.graph, self.dtype, self.source = graph, dtype, source
        self.nodes: list[Node] = []
        self.count = 0
        self.constants = dict(graph.constants)
        self.types = {name: graph.types[name] for name in (*graph.inputs, *graph.constants)}
        self.names: dict[tuple[str, str], str] = {}
        self.sums: set[str] = set()
        self.titles = {node.name for node in graph.nodes}
        for name in graph.inputs:
            kind = graph.types[name]
            if kind.dtype == source:
                self.types[name] = TensorType(kind.shape, dtype, kind.layout)
                self.count += 1

    def free(self, wanted: str) -> str:
        """Return a name nobody has."""
        name, number = wanted, 0
        while name in self.types or name in self.graph.types or name in self.titles:
            number += 1
            name = f"{wanted}_{number}"
        return name

    def wanted(self, name: str, dtype: str) -> str:
        """Return the name of a tensor in a format: itself, a converted constant, or a cast."""
        kind = self.types[name]
        if kind.dtype == dtype:
            return name
        if (name, dtype) not in self.names:
            new = self.free(f"{name}_{dtype}")
            self.names[name, dtype] = new
            self.types[new] = TensorType(kind.shape, dtype, kind.layout)
            if name in self.constants:
                self.constants[new] = in_format(self.constants[name], dtype)
                self.count += 1
            else:
                self.nodes.append(Node(new, "cast", (name,), (new,), {"dtype": dtype}))
        return self.names[name, dtype]

    def node(self, node: Node) -> None:
        """Append a node in the format it computes in now, its inputs cast where they differ."""
        operator = operator_of(node.op)
        names, rule = operator.names(len(node.inputs)), operator.types
        before = tuple(t.dtype for t in self.graph.in_types(node))
        main = rule.main(names, before)
        attrs = operator.settings(node.attrs)
        kept = self.scales_sums(node, before)
        if not kept:
            attrs = {k: self.dtype if v == self.source else v for k, v in attrs.items()}
        if node.op == "cast" or kept:
            formats = tuple(self.types[name].dtype for name in node.inputs)
        else:
            moves = main == self.source and self.dtype in rule.allowed
            self.count += moves
            main = self.dtype if moves else main
            formats = rule.inputs(names, main, attrs)
        inputs = tuple(map(self.wanted, node.inputs, formats))
        kinds = infer(node.op, [self.types[name] for name in inputs], attrs)
        self.types.update(zip(node.outputs, kinds, strict=True))
        self.nodes.append(Node(node.name, node.op, inputs, node.outputs,
                               given_attrs(node.op, attrs)))  # fmt: skip

    def cast_output(self, name: str) -> None:
        """Let a graph output that is still in the old format be written by a cast."""
        old = self.free(f"{name}_{self.source}")
        self.types[old] = self.types[name]
        if name in self.constants:
            self.constants[old] = self.constants.pop(name)

        def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(old if one == name else one for one in names)

        self.nodes = [
            replace(node, inputs=renamed(node.inputs), outputs=renamed(node.outputs))
            for node in self.nodes
        ]
        cast = Node(self.free(f"{name}_cast"), "cast", (old,), (name,), {"dtype": self.dtype})
        self.types[name] = replace(self.types[name], dtype=self.dtype)
        self.nodes.append(cast)

    def scales_sums(self, node: Node, before: tuple[str, ...]) -> bool:
        """Tell whether a node casts int32 to the old format, or scales what such a cast gave."""
        casts = node.op == "cast" and before[0] == "int32" and node.attr("dtype") == self.source
        found = casts or (node.op == "muls" and node.inputs[0] in self.sums)
        if casts:
            self.sums.add(node.output)
        return found


def in_format(constant: Constant, dtype: str) -> Constant:
    """Return a constant in another format: floats saturate; large ones convert when asked for."""
    kind = TensorType(constant.type.shape, dtype, constant.type.layout)
    most = LARGEST.get(dtype, np.inf)
    if isinstance(constant.data, Seeded) and dtype in FLOATS:
        return Constant(kind, constant.data)
    if isinstance(constant.data, Fill):
        return Constant(kind, Fill(min(max(constant.data.value, -most), most)))

    def converted(values: NDArray[Any]) -> NDArray[Any]:
        wide: NDArray[Any] = values.astype(np.float64)
        return np.where(np.isfinite(wide), np.clip(wide, -most, most), wide)

    return derived(kind, converted, constant)


FP16 = Pass(
    "Fp16ConversionPass",
    "precision",
    lambda graph: convert(graph, "fp16"),
    "computes fp32 graphs in fp16",
    "changed",
)
BF16 = Pass(
    "Bf16ConversionPass",
    "precision",
    lambda graph: convert(graph, "bf16"),
    "computes fp32 graphs in bf16",
    "changed",
)


# Products and convolutions in int8: quantise, multiply in int8, sum in int32, scale back.
#
# y = (sx sw) (qx qw + qb), qx = round(x / sx), symmetric, one scale per tensor: sx = max|x| /
# 127.


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
