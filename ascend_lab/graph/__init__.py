"""Graphs of operators: build or import, rewrite, fuse, lay out, plan memory, compile, time."""

from ascend_lab.graph.builder import GraphBuilder, Value
from ascend_lab.graph.edit import Editor, ordered, pruned
from ascend_lab.graph.evaluate import evaluate, evaluate_all, random_inputs
from ascend_lab.graph.infer import infer, verify
from ascend_lab.graph.ir import Constant, Fill, Graph, Node, Seeded, TensorType
from ascend_lab.graph.text import from_text, to_text

__all__ = [
    "Constant",
    "Editor",
    "Fill",
    "Graph",
    "GraphBuilder",
    "Node",
    "Seeded",
    "TensorType",
    "Value",
    "evaluate",
    "evaluate_all",
    "from_text",
    "infer",
    "ordered",
    "pruned",
    "random_inputs",
    "to_text",
    "verify",
]
