"""Graphs of operators: build or import, rewrite, fuse, lay out, plan memory, compile, time."""

from ascend_lab.graph.compile import Stages, compile_graph, compile_stages, run_compiled
from ascend_lab.graph.draft import Draft, GraphBuilder, Value, ordered, pruned
from ascend_lab.graph.evaluate import evaluate, evaluate_all, random_inputs
from ascend_lab.graph.ir import (
    Constant,
    Fill,
    Graph,
    Node,
    Seeded,
    TensorType,
    infer,
    to_text,
    verify,
)
from ascend_lab.graph.network import NetworkTimeline, OperatorTime, simulate_graph
from ascend_lab.graph.tasks import Compiled, Task, run_tasks
from ascend_lab.graph.text import Table, from_text, table

__all__ = [
    "Compiled",
    "Constant",
    "Draft",
    "Fill",
    "Graph",
    "GraphBuilder",
    "NetworkTimeline",
    "Node",
    "OperatorTime",
    "Seeded",
    "Stages",
    "Table",
    "Task",
    "TensorType",
    "Value",
    "compile_graph",
    "compile_stages",
    "evaluate",
    "evaluate_all",
    "from_text",
    "infer",
    "ordered",
    "pruned",
    "random_inputs",
    "run_compiled",
    "run_tasks",
    "simulate_graph",
    "table",
    "to_text",
    "verify",
]
