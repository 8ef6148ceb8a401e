"""What a training graph is: the graph of a step, and what its names mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ascend_lab.graph import Constant, Graph, Value, pruned
from ascend_lab.train.tape import Tape


@dataclass(frozen=True)
class TrainingGraph:
    """A step of training as a graph, and what its names mean.

    `parameters` are inputs, in the order in which forward reads them; `gradients` names the tensor
    with each one's gradient, in the order in which backward writes them: in the format forward
    computes in and times `loss_scale`. `updates` maps every parameter and state to the output that
    replaces it in the next step (only statistics of batch norms without an optimiser). `phases`
    maps node names to forward, recompute, backward or update. `initial` holds the first values of
    parameters and states.
    """

    graph: Graph
    parameters: tuple[str, ...]
    gradients: Mapping[str, str]
    loss: str
    data: tuple[str, ...]
    targets: tuple[str, ...]
    states: tuple[str, ...]
    updates: Mapping[str, str]
    phases: Mapping[str, str]
    initial: Mapping[str, Constant]
    loss_scale: float

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters."""
        return sum(self.graph.types[name].elements for name in self.parameters)


def as_written(net: Tape, grads: Mapping[str, Value]) -> list[str]:
    """Return the parameters in the order in which their gradients are written."""
    order = {name: i for i, node in enumerate(net._nodes) for name in node.outputs}
    return sorted(grads, key=lambda name: order.get(grads[name].name, -1))


def telling_names(net: Tape, grads: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    """Return names that say what a tensor is: w.grad, w.new; a tensor of two meanings keeps its."""
    written = {name for node in net._nodes for name in node.outputs}
    found: dict[str, str] = {}
    for ending, pairs in (("grad", grads), ("new", new)):
        for name, tensor in pairs.items():
            if tensor in written and tensor not in found and tensor != f"{name}.{ending}":
                found[tensor] = net.unique(f"{name}.{ending}")
    return found


def without(graph: Graph, names: set[str]) -> Graph:
    """Return the graph without what no output needs and without inputs named."""
    graph = pruned(graph)
    inputs = tuple(name for name in graph.inputs if name not in names)
    return replace(graph, inputs=inputs)
