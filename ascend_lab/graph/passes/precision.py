"""Another number format for a whole graph: inputs, constants, nodes; casts only where needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.graph.builder import given_attrs
from ascend_lab.graph.edit import pruned
from ascend_lab.graph.infer import infer, operator_of, verify
from ascend_lab.graph.ir import Constant, Fill, Graph, Node, Seeded, TensorType
from ascend_lab.graph.passes.rewrite import Pass, derived
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
