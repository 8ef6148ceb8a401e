"""The graph compiler: from a network's graph of operators to kernels, memory plan and time.

Begin with these:

- `GraphBuilder`: write a graph by hand; `zoo` has networks, `onnx` reads files.
- `Graph`, `Node`, `TensorType`: what a graph consists of.
- `evaluate`, `random_inputs`: what a graph computes, in NumPy, and inputs to try it with.
- `compile_stages`, `compile_graph`: the graph after every stage, or after the last.
- `run_compiled`: what the graph's kernels compute; `simulate_graph`: how long they take.
- `bound_of`: a lower bound of the graph's time, which holds for every schedule.
- `fusion_rule`: add a rule of your own.

A convolution and a ReLU become one kernel, whose values are those of the graph:

>>> import numpy as np
>>> from ascend_lab.compiler import (
...     GraphBuilder, compile_stages, evaluate, random_inputs, run_compiled,
... )
>>> net = GraphBuilder("net")
>>> x = net.input("x", (1, 16, 8, 8))
>>> net.output(net.relu(net.conv2d(x, net.weight((16, 16, 3, 3)), pad=1), name="y"))
>>> graph = net.build()
>>> stages = compile_stages(graph, "Ascend310")
>>> [task.op for task in stages.compiled.tasks]
['trans_data', 'conv2d+relu', 'trans_data']
>>> inputs = random_inputs(graph)
>>> exact = evaluate(graph, inputs)["y"]
>>> bool(np.allclose(run_compiled(graph, inputs, "Ascend310")["y"], exact, atol=0.05))
True
>>> 1e-6 < stages.timeline().time_s < 1e-4
True
"""

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
