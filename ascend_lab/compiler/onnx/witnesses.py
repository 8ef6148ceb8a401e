"""Says which evaluators compute an ONNX node correctly: ONNX Runtime, ONNX's reference, or ours.

Ours means importing the node as a graph and evaluating that. Each evaluator is wrong, or fails, for
some nodes; only the table `FAULTS` says for which. A row looks at a node's attributes, its missing
inputs and the version of its operator, never at sizes. If an evaluator and the standard's text
differ, the text decides; if the text is ambiguous, two of three independent evaluators (PyTorch is
one) decide. The first evaluator without a fault is taken: ONNX Runtime, the reference, ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ascend_lab.compiler.onnx.sound import STANDARD

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

RUNTIME = "ONNX Runtime"
REFERENCE = "the reference evaluator"
GRAPH = "a graph of our own"
ORDER = (RUNTIME, REFERENCE, GRAPH)
WITNESSED = {
    "ai.onnx.ml": ("ArrayFeatureExtractor", "Binarizer", "LabelEncoder", "TreeEnsemble"),
    "ai.onnx.preview": ("FlexAttention",),
    "ai.onnx.preview.training": ("Adagrad", "Adam", "Momentum"),
}
"""Operators of the standard's other domains whose tests the reference evaluator passes."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node in the form that the rows of `FAULTS` read."""

    node: NodeProto
    opset: int

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute, with strings decoded, or `default` if the node does not have it."""
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
        """Tell whether the node writes an output, given by its position."""
        return place < len(self.node.output) and bool(self.node.output[place])

    @property
    def pads_same(self) -> bool:
        """Whether the attribute auto_pad is SAME_UPPER or SAME_LOWER."""
        return str(self.attr("auto_pad", "")).startswith("SAME")

    @property
    def pads_automatically(self) -> bool:
        """Whether pads are computed: SAME or VALID."""
        return self.attr("auto_pad", "NOTSET") not in ("NOTSET", "")

    @property
    def has_gaps(self) -> bool:
        """Whether windows of SAME skip elements: the stride is larger than the kernel."""
        kernel = self.attr("kernel_shape") or ()
        strides = self.attr("strides") or (1,) * len(kernel)
        if not kernel:  # a convolution's kernel is known from its weights: any stride may skip
            return self.pads_same and any(s > 1 for s in strides)
        return self.pads_same and any(s > k for s, k in zip(strides, kernel, strict=False))


@dataclass(frozen=True, slots=True)
class Fault:
    """A row: the evaluator that is wrong, for which operators, what it does, and in which cases."""

    evaluator: str
    ops: tuple[str, ...]
    does: str
    when: Callable[[NodeView], Any] = lambda node: True


# fmt: off
FAULTS: tuple[Fault, ...] = (
    # -- the reference evaluator ------------------------------------------------------------------
    Fault(REFERENCE, ("RNN", "GRU", "LSTM"),
          "runs on behind a sequence's end, one way, with the usual activations only",
          lambda a: a.has(4) or a.attr("activations") or a.attr("clip") or a.attr("input_forget")
          or a.attr("direction", "forward") != "forward" or a.attr("layout")),
    Fault(REFERENCE, ("MaxPool",), "gives other places, and other windows at the borders",
          lambda a: a.writes(1) or a.attr("ceil_mode") or any(a.attr("pads") or ())
          or a.pads_automatically or len(a.attr("kernel_shape") or ()) != 2),
    Fault(REFERENCE, ("AveragePool",), "takes other windows at the end of the ceiling mode",
          lambda a: a.attr("ceil_mode") or a.pads_automatically),
    Fault(REFERENCE, ("LpPool",), "takes other windows and other powers"),
    Fault(REFERENCE, ("GlobalMaxPool",), "takes the largest along the wrong axes"),
    Fault(REFERENCE, ("ConvTranspose",), "takes other places for groups and pads",
          lambda a: a.pads_same or any(a.attr("pads") or ()) or a.attr("group", 1) != 1),
    Fault(REFERENCE, ("Resize", "Upsample"), "rounds sizes down from products in fp64"),
    Fault(REFERENCE, ("GridSample",), "takes other pixels beyond a border",
          lambda a: a.attr("mode", "linear") in ("cubic", "bicubic")),
    Fault(REFERENCE, ("AffineGrid",), "answers in fp32, and takes another middle of one pixel"),
    Fault(REFERENCE, ("RoiAlign",), "takes version 10 for that of now", lambda a: a.opset < 16),
    Fault(REFERENCE, ("Softmax", "LogSoftmax", "Hardmax"), "takes old versions for that of now",
          lambda a: a.opset < 13),
    Fault(REFERENCE, ("BatchNormalization",), "learns in inference before version 14",
          lambda a: a.opset < 14),
    Fault(REFERENCE, ("LayerNormalization",), "gives mean and rate in the type of the input",
          lambda a: a.writes(1) or a.writes(2)),
    Fault(REFERENCE, ("LRN",), "leaves channels out of the sums"),
    Fault(REFERENCE, ("LpNormalization",), "sums numbers of both signs where p is 1",
          lambda a: a.attr("p", 2) == 1),
    Fault(REFERENCE, ("ReduceSumSquare",), "answers in int64 for int32"),
    Fault(REFERENCE, ("Attention",), "gives scores of another stage", lambda a: a.writes(3)),
    Fault(REFERENCE, ("Split",), "makes pieces of sizes that are not allowed",
          lambda a: not a.has(1) and not a.attr("split")),
    Fault(REFERENCE, ("Unique",), "sorts what must keep its order",
          lambda a: not a.attr("sorted", 1)
          and (a.attr("axis") is not None or not a.writes(3))),
    # -- ONNX Runtime -----------------------------------------------------------------------------
    Fault(RUNTIME, ("MaxPool", "AveragePool", "LpPool", "ConvTranspose"),
          "moves the windows of SAME whose stride is beyond the kernel", lambda a: a.has_gaps),
    Fault(RUNTIME, ("Resize",), "copies what half_pixel_symmetric mixes where no size changes",
          lambda a: a.attr("coordinate_transformation_mode") == "half_pixel_symmetric"),
    Fault(RUNTIME, ("Col2Im",), "leaves out the dilation of rows",
          lambda a: len(a.attr("dilations") or ()) == 1 and a.attr("dilations") != [1]),
    Fault(RUNTIME, ("MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv"),
          "limits sums of two products to 16 bits on processors without a dot product of bytes"),
    Fault(RUNTIME, ("Attention",), "hides the past from causal queries",
          lambda a: a.attr("is_causal") and a.has(4)),
    Fault(RUNTIME, ("Attention",), "gives scores of another stage",
          lambda a: a.writes(3) and a.attr("qk_matmul_output_mode", 0)),
)
# fmt: on
"""The known faults of each evaluator."""


def evaluators(node: NodeProto, opset: int) -> tuple[str, ...]:
    """Return the evaluators that are correct for a node and its branches, in order."""
    graphs = list(inner_graphs(node))
    if graphs:
        nodes = [inner for graph in graphs for inner in graph.node]
        # an If is computed as a whole: the evaluator must be correct for each node of both
        # branches
        shared = [set(evaluators(inner, opset)) for inner in nodes]
        return tuple(e for e in (RUNTIME, REFERENCE) if all(e in allowed for allowed in shared))
    if node.op_type in WITNESSED.get(node.domain, ()):
        return RUNTIME, REFERENCE
    if node.domain not in STANDARD:
        return (RUNTIME,)
    # keep the evaluators without a fault for this node
    return tuple(e for e in ORDER if fault_of(node, opset, e) is None)


def fault_of(node: NodeProto, opset: int, evaluator: str) -> Fault | None:
    """Return the row that says that an evaluator is wrong for a node, or None."""
    view = NodeView(node, opset)
    for fault in FAULTS:
        if fault.evaluator == evaluator and node.op_type in fault.ops and fault.when(view):
            return fault
    return None


def faults_within(node: NodeProto, opset: int, evaluator: str) -> Iterator[tuple[NodeProto, Fault]]:
    """Yield the nodes for which an evaluator is wrong, with the row: the node or its branches'."""
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
