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

from ascend_lab.compiler.bound import bound_of
from ascend_lab.compiler.compile import compile_graph, compile_stages, run_compiled
from ascend_lab.compiler.draft import GraphBuilder
from ascend_lab.compiler.evaluate import evaluate, random_inputs
from ascend_lab.compiler.fusion import fusion_rule
from ascend_lab.compiler.ir import Graph, Node, TensorType
from ascend_lab.compiler.network import simulate_graph
from ascend_lab.facade import names_of

__all__ = [
    "Graph",
    "GraphBuilder",
    "Node",
    "TensorType",
    "bound_of",
    "compile_graph",
    "compile_stages",
    "evaluate",
    "fusion_rule",
    "random_inputs",
    "run_compiled",
    "simulate_graph",
]

__getattr__ = names_of(__name__, {})
