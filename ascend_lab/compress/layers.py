"""The layers of a graph that can be quantised, how each is to be, and what was chosen for it."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ascend_lab.compress.calibrators import SYMMETRIC
from ascend_lab.compress.scales import LayerScales
from ascend_lab.compress.weights import Rounding
from ascend_lab.errors import InputError
from ascend_lab.graph import Draft, Graph, Node
from ascend_lab.graph.passes.images import into_convolution
from ascend_lab.graph.passes.rewrite import sweep

CONVOLUTIONS = ("conv2d", "depthwise_conv2d", "conv_transpose2d")
PRODUCTS = ("matmul", "gemm", "batch_matmul")
TYPES: Mapping[str, tuple[str, ...]] = {
    **{op: (op,) for op in (*CONVOLUTIONS, *PRODUCTS)},
    **dict.fromkeys(("Conv2d", "Conv"), ("conv2d", "depthwise_conv2d")),
    **dict.fromkeys(("ConvTranspose2d", "ConvTranspose"), ("conv_transpose2d",)),
    "Linear": PRODUCTS,
    "MatMul": ("matmul", "batch_matmul"),
    "Gemm": ("gemm", "matmul"),
}
"""Operators by the names that frameworks, ONNX and this library have for types of layers."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """How a layer is to be quantised; `options` are those of the method.

    `strength` is that of the balance with what the layer reads, None for no balance; `rounding`
    None rounds weights to the nearest.
    """

    method: str = "ifmr"
    asymmetric: bool = True
    bits: int = 8
    weight_bits: int = 8
    channel_wise: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    strength: float | None = None
    rounding: Rounding | None = None

    @property
    def with_offset(self) -> bool:
        """Tell whether activations get an offset: never by a rule that knows none."""
        return self.asymmetric and self.method not in SYMMETRIC


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with each layer: a layer's own plan beats its type's, that the common one."""

    common: LayerPlan = field(default_factory=LayerPlan)
    types: Mapping[str, LayerPlan] = field(default_factory=dict)
    layers: Mapping[str, LayerPlan] = field(default_factory=dict)
    skip_layers: frozenset[str] = frozenset()
    skip_types: frozenset[str] = frozenset()
    fold: bool = True
    unfolded: frozenset[str] = frozenset()
    batches: int | None = None

    def of(self, node: Node) -> LayerPlan | None:
        """Return the plan of a layer; None if it is to stay as it is."""
        if node.name in self.skip_layers or any(node.op in TYPES[t] for t in self.skip_types):
            return None
        if node.name in self.layers:
            return self.layers[node.name]
        return next((p for t, p in self.types.items() if node.op in TYPES[t]), self.common)

    def check(self, graph: Graph) -> None:
        """Raise `InputError` for a layer or a type of layers that is named and not there."""
        known = {node.name for node in graph.nodes}
        for name in (*self.layers, *self.skip_layers, *self.unfolded):
            if name not in known:
                near = difflib.get_close_matches(name, known, 3)
                remedy = f"did you mean {' or '.join(near)}?" if near else "check it"
                raise InputError(f"{graph.name}: a layer of the graph", repr(name), remedy)
        for kind in (*self.types, *self.skip_types):
            if kind not in TYPES:
                raise InputError(f"a type of layers among {', '.join(TYPES)}", repr(kind))


@dataclass(frozen=True, slots=True)
class Quantised:
    """A graph in fp32 made ready (norms folded, balanced, rounded), and the scales of its layers.

    Nodes without scales stay in floating point.
    """

    graph: Graph
    layers: tuple[LayerScales, ...]


def folded(graph: Graph, keep: frozenset[str] = frozenset()) -> Graph:
    """Return the graph with batch norms folded into convolutions, but not into those to keep."""

    def rule(draft: Draft, node: Node) -> bool:
        conv = draft.maker(node.inputs[0])
        return (conv is None or conv.name not in keep) and into_convolution(draft, node)

    return sweep(rule, "batch_norm")(graph)[0]


def layers_of(graph: Graph) -> tuple[Node, ...]:
    """Return the convolutions and products of fp32 tensors with constant weights, in order."""
    return tuple(
        node
        for node in graph.nodes
        if node.op in (*CONVOLUTIONS, *PRODUCTS)
        and node.inputs[1] in graph.constants
        and node.inputs[0] not in graph.constants
        and all(graph.types[name].dtype == "fp32" for name in (*node.inputs[:2], node.output))
        and not node.attr("trans_a")
    )


def channel_axis(node: Node, graph: Graph) -> int | None:
    """Return the axis of a layer's weights along which its output channels lie.

    None for a transposed convolution in groups, whose channels lie along two axes.
    """
    if node.op in CONVOLUTIONS[:2]:
        return 0
    if node.op == "conv_transpose2d":
        return 1 if node.attr("groups", 1) == 1 else None
    rank = len(graph.types[node.inputs[1]].shape)
    return rank - 2 if node.attr("trans_b") else rank - 1


def input_axes(node: Node, graph: Graph) -> tuple[int, int] | None:
    """Return the axes of a layer's input and weights along which input channels lie.

    None where they cannot be balanced: groups, whose weights see only some of the channels.
    """
    if node.op in PRODUCTS:
        rank = len(graph.types[node.inputs[1]].shape)
        last = len(graph.types[node.inputs[0]].shape) - 1
        return last, rank - 1 if node.attr("trans_b") else rank - 2
    grouped = node.op == "depthwise_conv2d" or node.attr("groups", 1) != 1
    return None if grouped else (1, 0 if node.op == "conv_transpose2d" else 1)
