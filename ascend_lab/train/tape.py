"""The step while it is written: a graph builder that knows phases, kept and recomputed tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ascend_lab.graph import Constant, Fill, Graph, GraphBuilder, Node, TensorType, Value, infer
from ascend_lab.graph.ir import operator_of
from ascend_lab.ops.formats import Shape
from ascend_lab.ops.gradients import Site, Writer, written


class Tape(GraphBuilder, Writer):
    """A builder whose nodes carry a phase; `prefix` is what unnamed nodes are called after.

    Tensors in `dropped` are not kept for backward: `kept` writes their producers once more.
    """

    def __init__(self, name: str, dtype: str, dropped: frozenset[str] = frozenset()) -> None:
        super().__init__(name, dtype)
        self.phase, self.prefix, self.dropped = "forward", "", dropped
        self.phases: dict[str, str] = {}
        self.forward: list[Node] = []
        self._makers: dict[str, Node] = {}
        self._copies: dict[str, Value] = {}
        self._fills: dict[tuple[float, Shape, str], Value] = {}

    # -- nodes ------------------------------------------------------------------------------------
    def add_node(self, op: str, *inputs: Value, name: str = "", **attrs: Any) -> Any:
        """Append a node of the present phase, as `GraphBuilder.add_node` does."""
        title = name or (f"{self.prefix}.{op}" if self.prefix else op)
        made = super().add_node(op, *inputs, name=self.unique(title), **attrs)
        self._record(self._nodes[-1])
        return made

    def copy(self, node: Node) -> None:
        """Append a node with the names it has."""
        kinds = infer(node.op, [self._types[name] for name in node.inputs], node.attrs)
        for name, kind in zip(node.outputs, kinds, strict=True):
            self._add(name, kind)
        self._nodes.append(node)
        self._record(node)

    def _record(self, node: Node) -> None:
        self.phases[node.name] = self.phase
        if self.phase == "forward":
            self.forward.append(node)
            self._makers.update(dict.fromkeys(node.outputs, node))

    def kind(self, name: str) -> TensorType:
        """Return the type of a tensor, without computing it again."""
        return self._types[name]

    def known(self, name: str) -> bool:
        """Tell whether a tensor has that name."""
        return name in self._types

    def value(self, name: str) -> Value:
        """Return a tensor by name."""
        return Value(name, self._types[name])

    def put_constant(self, name: str, constant: Constant) -> Value:
        """Declare a constant under its own name."""
        return self.constant(constant.data, constant.type, name)

    def number(self, value: float, shape: Shape, dtype: str) -> Value:
        """Return the constant that holds one number everywhere; equal ones are one."""
        key = (value, shape, dtype)
        if key not in self._fills:
            self._fills[key] = self.constant(Fill(value), TensorType(shape, dtype), "number")
        return self._fills[key]

    # -- recomputation ----------------------------------------------------------------------------
    def kept(self, name: str) -> Value:
        """Return a tensor of the forward pass: kept, or computed again at its first use."""
        if name not in self.dropped:
            return self.value(name)
        ahead = [name]
        while ahead:
            node = self._makers[ahead[-1]]
            missing = [n for n in node.inputs if n in self.dropped and n not in self._copies]
            if missing:
                ahead += missing
                continue
            self._again(node)
            ahead.pop()
        return self._copies[name]

    def _again(self, node: Node) -> None:
        if node.output in self._copies:
            return
        phase, self.phase = self.phase, "recompute"
        reads = (self._copies[n].name if n in self.dropped else n for n in node.inputs)
        title = self.unique(f"{node.name}.again")
        outs = tuple(self.unique(f"{name}.again") for name in node.outputs)
        self.copy(Node(title, node.op, tuple(reads), outs, node.attrs))
        copies = zip(node.outputs, map(self.value, outs), strict=True)
        self._copies.update(copies)
        self.phase = phase

    def finished(self, outputs: Sequence[str], names: Mapping[str, str]) -> Graph:
        """Return the verified graph with these outputs, tensors renamed by `names`."""
        self._outputs = list(outputs)
        graph = self.build()

        def new(found: Sequence[str]) -> tuple[str, ...]:
            return tuple(names.get(name, name) for name in found)

        nodes = tuple(replace(n, inputs=new(n.inputs), outputs=new(n.outputs)) for n in graph.nodes)
        types = {names.get(name, name): kind for name, kind in graph.types.items()}
        return replace(graph, nodes=nodes, types=types, outputs=new(graph.outputs))


def gradients(
    net: Tape, node: Node, grads: tuple[Value | None, ...], wanted: tuple[bool, ...]
) -> list[Value | None]:
    """Append what computes the gradients of a node's inputs; None where none is wanted or is.

    Raises `UnsupportedError` for an operator without a rule.
    """
    net.prefix = f"{node.name}.grad"
    operator = operator_of(node.op)
    full = operator.settings(node.attrs)
    tensors = (node.inputs, node.outputs)
    return written(
        operator, Site(net, node.op, node.name, *tensors, grads, wanted, full, operator.wide)
    )
