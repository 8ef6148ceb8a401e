"""Who computes a node as the standard says: ONNX Runtime, its reference evaluator, our own graphs.

Each of them is wrong, or silent, for some nodes. `FAULTS` is the one place that says for which: it
decides from a node's attributes, its inputs that are left out and the version of its operator,
never from sizes. Where an evaluator and the standard's text differ, the text decides; where it is
open, two of three independent evaluators (PyTorch among them). The order is fixed: ONNX Runtime,
then the reference evaluator, then a graph of our own, each unless a row accuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

RUNTIME = "ONNX Runtime"
REFERENCE = "the reference evaluator"
GRAPH = "a graph of our own"
ORDER = (RUNTIME, REFERENCE, GRAPH)
STANDARD = ("", "ai.onnx")
WITNESSED = {
    "ai.onnx.ml": ("ArrayFeatureExtractor", "Binarizer", "LabelEncoder", "TreeEnsemble"),
    "ai.onnx.preview": ("FlexAttention",),
    "ai.onnx.preview.training": ("Adagrad", "Adam", "Momentum"),
}
"""Operators of the standard's other domains for which it has tests, that the reference passes."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A node as the rows of the table see it."""

    node: NodeProto
    opset: int

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute as given, texts decoded, or `default`."""
        from onnx import helper

        for attribute in self.node.attribute:
            if attribute.name == name:
                value = helper.get_attribute_value(attribute)
                return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        return default

    def has(self, place: int) -> bool:
        """Tell whether an input is given."""
        return place < len(self.node.input) and bool(self.node.input[place])

    def writes(self, place: int) -> bool:
        """Tell whether an output is asked for."""
        return place < len(self.node.output) and bool(self.node.output[place])

    @property
    def same(self) -> bool:
        """Whether the pads are the standard's SAME."""
        return str(self.attr("auto_pad", "")).startswith("SAME")

    @property
    def gaps(self) -> bool:
        """Whether windows of SAME leave elements out: a stride beyond the kernel."""
        kernel = self.attr("kernel_shape") or ()
        strides = self.attr("strides") or (1,) * len(kernel)
        if not kernel:  # of a convolution: its weights say it, so any stride may be too long
            return self.same and any(s > 1 for s in strides)
        return self.same and any(s > k for s, k in zip(strides, kernel, strict=False))


@dataclass(frozen=True, slots=True)
class Fault:
    """A row: which evaluator is wrong for which operators, in which cases, and what it does."""

    evaluator: str
    ops: tuple[str, ...]
    does: str
    when: Callable[[Asked], Any] = lambda asked: True


FAULTS: tuple[Fault, ...] = (
    Fault(REFERENCE, ("RNN", "GRU", "LSTM"),
          "runs on behind a sequence's end and knows only the usual activations",
          lambda a: a.has(4) or a.attr("activations") or a.attr("clip") or a.attr("input_forget")
          or a.attr("direction", "forward") != "forward" or a.attr("layout")),
    Fault(REFERENCE, ("MaxPool",), "gives other places and other windows beyond two axes",
          lambda a: a.writes(1) or a.attr("ceil_mode") or a.attr("auto_pad", "NOTSET") != "NOTSET"
          or len(a.attr("kernel_shape") or ()) != 2),
    Fault(REFERENCE, ("AveragePool",), "takes other windows at the end of the ceiling mode",
          lambda a: a.attr("ceil_mode") or a.attr("auto_pad", "NOTSET") != "NOTSET"),
    Fault(REFERENCE, ("LpPool",), "takes other windows and other powers"),
    Fault(REFERENCE, ("GlobalMaxPool",), "takes the largest along the wrong axes"),
    Fault(REFERENCE, ("Resize", "Upsample"), "rounds sizes down from products in fp64"),
    Fault(REFERENCE, ("GridSample",), "takes other pixels beyond a border",
          lambda a: a.attr("mode", "linear") in ("cubic", "bicubic")),
    Fault(REFERENCE, ("Softmax", "LogSoftmax", "Hardmax"), "takes old versions for that of now",
          lambda a: a.opset < 13),
    Fault(REFERENCE, ("BatchNormalization",), "learns in inference before version 14",
          lambda a: a.opset < 14),
    Fault(REFERENCE, ("Conv", "ConvInteger", "QLinearConv", "ConvTranspose"), "pads SAME otherwise",
          lambda a: a.same),
    Fault(RUNTIME, ("Conv", "ConvInteger", "QLinearConv", "MaxPool", "AveragePool", "LpPool",
                    "ConvTranspose"),
          "moves the windows of SAME whose stride is beyond the kernel", lambda a: a.gaps),
    Fault(RUNTIME, ("Resize",), "moves half_pixel_symmetric by a wrong share",
          lambda a: a.attr("coordinate_transformation_mode") == "half_pixel_symmetric"),
)  # fmt: skip
"""What each evaluator has wrong."""


def evaluators(node: NodeProto, opset: int) -> tuple[str, ...]:
    """Return the evaluators that are right for a node and all in its branches, in order."""
    graphs = list(inner_graphs(node))
    if graphs:
        nodes = [inner for graph in graphs for inner in graph.node]
        shared = [set(evaluators(inner, opset)) for inner in nodes]
        return tuple(e for e in (RUNTIME, REFERENCE) if all(e in one for one in shared))
    if node.op_type in WITNESSED.get(node.domain, ()):
        return RUNTIME, REFERENCE
    if node.domain not in STANDARD:
        return (RUNTIME,)
    return tuple(e for e in ORDER if fault_of(node, opset, e) is None)


def fault_of(node: NodeProto, opset: int, evaluator: str) -> Fault | None:
    """Return the row that accuses an evaluator of a node, or None."""
    asked = Asked(node, opset)
    for fault in FAULTS:
        if fault.evaluator == evaluator and node.op_type in fault.ops and fault.when(asked):
            return fault
    return None


def faults_within(node: NodeProto, opset: int, evaluator: str) -> Iterator[tuple[NodeProto, Fault]]:
    """Yield the nodes that an evaluator has wrong: the node, or those of its branches."""
    for graph in inner_graphs(node):
        for inner in graph.node:
            yield from faults_within(inner, opset, evaluator)
    fault = fault_of(node, opset, evaluator) if node.domain in STANDARD else None
    if fault is not None:
        yield node, fault


def inner_graphs(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the branches and bodies that are attributes of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs
