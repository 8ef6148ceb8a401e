"""The step while it is written: a graph builder that knows phases, kept and recomputed tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ascend_lab.graph import Constant, Fill, Graph, GraphBuilder, Node, TensorType, Value, infer
from ascend_lab.ops.shapes import Shape

NARROW = ("fp16", "bf16")
PHASES = ("forward", "recompute", "backward", "update")


class Tape(GraphBuilder):
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

    def number(self, value: float, kind: TensorType) -> Value:
        """Return the constant that holds one number everywhere; equal ones are one."""
        key = (value, kind.shape, kind.dtype)
        if key not in self._fills:
            self._fills[key] = self.constant(Fill(value), replace(kind, layout="ND"), "number")
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

    # -- short words of the rules -----------------------------------------------------------------
    def wide(self, x: Value) -> Value:
        """Return x in fp32 if its format is narrower."""
        return self.in_format(x, "fp32") if x.type.dtype in NARROW else x

    def in_format(self, x: Value, dtype: str) -> Value:
        """Return x in a format, cast where it has another."""
        out: Value = x if x.type.dtype == dtype else self.cast(x, dtype=dtype)
        return out

    def shaped(self, x: Value, shape: Sequence[int]) -> Value:
        """Return x in another shape of as many elements."""
        out: Value = x if x.shape == tuple(shape) else self.reshape(x, shape=tuple(shape))
        return out

    def stretched(self, x: Value, shape: Shape) -> Value:
        """Return x repeated along its axes of size 1."""
        out: Value = x if x.shape == shape else self.expand(x, shape=shape)
        return out

    def summed_to(self, x: Value, shape: Shape) -> Value:
        """Return x summed over the axes along which a tensor of `shape` was repeated."""
        lead = len(x.shape) - len(shape)
        axes = [*range(lead)]
        axes += [i + lead for i, n in enumerate(shape) if n == 1 and x.shape[i + lead] != 1]
        if axes:
            x = self.reduce_sum(x, axis=tuple(axes), keepdims=False)
        return self.shaped(x, shape)

    def channel_sums(self, x: Value) -> Value:
        """Return the sum of each channel of (n, c, h, w) as (1, c, 1, 1): columns, then the rest.

        In the first step rows of pixels, of which every core has some, are added to each other.
        """
        inner = tuple(range(2, len(x.shape)))
        if inner[:-1]:
            x = self.reduce_sum(x, axis=inner[:-1], keepdims=True)
        out: Value = self.reduce_sum(x, axis=(0, *inner[-1:]), keepdims=True)
        return out

    def scaled(self, x: Value, number: float) -> Value:
        """Return x times a number."""
        out: Value = x if number == 1.0 else self.muls(x, number=float(number))
        return out

    def finished(self, outputs: Sequence[str], names: Mapping[str, str]) -> Graph:
        """Return the verified graph with these outputs, tensors renamed by `names`."""
        self._outputs = list(outputs)
        graph = self.build()

        def new(found: Sequence[str]) -> tuple[str, ...]:
            return tuple(names.get(name, name) for name in found)

        nodes = tuple(replace(n, inputs=new(n.inputs), outputs=new(n.outputs)) for n in graph.nodes)
        types = {names.get(name, name): kind for name, kind in graph.types.items()}
        return replace(graph, nodes=nodes, types=types, outputs=new(graph.outputs))
