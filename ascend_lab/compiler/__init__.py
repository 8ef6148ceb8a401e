"""Graphs of operators: build or import, rewrite, lay out, fuse, lower, plan memory, time."""

# fmt: off
# isort: off
from ascend_lab.compiler.bound import Bound, bound_of
from ascend_lab.compiler.compile import (
    Road, Stages, compile_graph, compile_stages, finish_stages, front_stages, ledger, run_compiled,
)
from ascend_lab.compiler.draft import Draft, GraphBuilder, Value, ordered, pruned
from ascend_lab.compiler.counts import table
from ascend_lab.compiler.evaluate import evaluate, evaluate_all, random_inputs
from ascend_lab.compiler.text_form import from_text
from ascend_lab.compiler.fusion import fusion_rule, rules_restored
from ascend_lab.compiler.ir import (
    Constant, Fill, Graph, Node, Seeded, TensorType, infer, rules_of, to_text, verify,
)
from ascend_lab.compiler.network import NetworkTimeline, OperatorTime, simulate_graph
from ascend_lab.compiler.placement import (
    buffers_of, constant_bytes, in_place_pairs, live_bytes, plan_network, weight_bytes,
)
from ascend_lab.compiler.switches import parse_switches
from ascend_lab.compiler.tasks import Compiled, Task
from ascend_lab.compiler.values import run_tasks

__all__ = [
    "Bound", "Compiled", "Constant", "Draft", "Fill", "Graph", "GraphBuilder",
    "NetworkTimeline", "Node", "OperatorTime", "Road", "Seeded", "Stages", "Task",
    "TensorType", "Value", "bound_of", "buffers_of", "compile_graph",
    "compile_stages",
    "constant_bytes", "evaluate", "evaluate_all", "finish_stages", "from_text", "front_stages",
    "fusion_rule", "in_place_pairs", "infer", "ledger", "live_bytes", "ordered",
    "parse_switches", "plan_network", "pruned", "random_inputs", "rules_of", "rules_restored",
    "run_compiled", "run_tasks", "simulate_graph", "table", "to_text", "verify", "weight_bytes",
]
