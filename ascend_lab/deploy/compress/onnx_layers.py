"""Finds the layers of a graph in the ONNX model from which it was read.

A layer is found by the name of its node, by the name of the ONNX operator that it is a part of, or
by the tensor that it writes: reading keeps these, while passes may change everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ascend_lab.compiler import Graph, Node
from ascend_lab.compiler.onnx.model_file import title
from ascend_lab.deploy.compress.config import Plan
from ascend_lab.deploy.compress.layers import HEAVY, why_not

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""ONNX operators that have weights and may read pairs of QuantizeLinear and DequantizeLinear."""
OTHERS = ("RNN", "GRU", "LSTM", "Einsum", "Attention")
"""Other operators of ONNX that multiply."""


def _outer(name: str) -> str:
    """Return the name of the operator that a graph's node is a part of: "lstm" of "lstm/sums"."""
    return name.rpartition("/")[0]


class Places:
    """An index of a model's operators, to find the operator from which a graph's node comes."""

    def __init__(self, model: ModelProto) -> None:
        """Index the nodes by name and by the tensors that they write."""
        self.titles = {title(node): node for node in model.graph.node}
        self.makers = {name: node for node in model.graph.node for name in node.output if name}

    def candidates(self, node: Node) -> Iterator[NodeProto]:
        """Yield the operators that a graph's node may come from, the likeliest first."""
        for name in (node.name, _outer(node.name)):
            if name in self.titles:
                yield self.titles[name]
        if node.output in self.makers:
            yield self.makers[node.output]

    def of(self, node: Node, *ops: str) -> NodeProto | None:
        """Return the operator of a type in `ops` from which a graph's node comes, or None."""
        return next((n for n in self.candidates(node) if n.op_type in ops), None)

    def layer(self, node: Node) -> NodeProto | None:
        """Return the operator with weights from which a layer comes, or None."""
        return self.of(node, *LAYERS)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An operator that multiplies or convolves and stays in floating point, and why."""

    name: str
    op: str
    reason: str


def left_out(
    model: ModelProto, graph: Graph, plan: Plan
) -> tuple[tuple[LeftOut, ...], frozenset[str]]:
    """Return the operators that stay in floating point, and the layers that a plan has to skip.

    A plan has to skip layers of the graph (prepared for quantisation) that have no operator of
    their own in the model. A recurrent network, for instance, is many products in a graph and one
    operator in a file: the file has no place for its scales.
    """
    places = Places(model)
    not_in_file = set[str]()
    quantised_names = set[str]()
    reasons: dict[str, LeftOut] = {}
    for node in graph.nodes:
        if node.op not in HEAVY:
            continue
        # readers of the report look for the operator of the file, not for the graph's node
        owner = next(places.candidates(node), None)
        name, op = (title(owner), owner.op_type) if owner is not None else (node.name, node.op)
        reason = why_not(node, graph)
        if not reason and plan.of(node) is None:
            reason = "the configuration skips it"
        elif not reason and places.layer(node) is None:
            reason = f"a file has no form of {op} in eight bits"
            not_in_file.add(node.name)
        if reason:  # the first reason of an operator with many nodes is reported
            reasons.setdefault(name, LeftOut(name, op, reason))
        else:
            quantised_names.add(name)
    # The graph has no nodes for the other operators: constants were computed during preparation.
    for operator in model.graph.node:
        name = title(operator)
        if (
            operator.op_type in (*LAYERS, *OTHERS)
            and name not in reasons
            and name not in quantised_names
        ):
            reason = "what it computes is known before the network runs"
            reasons[name] = LeftOut(name, operator.op_type, reason)
    return tuple(reasons.values()), frozenset(not_in_file)
