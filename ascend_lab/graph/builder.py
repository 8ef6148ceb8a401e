"""Building graphs by hand: one call a node, named after the operator.

net = GraphBuilder("net")
x = net.input("x", (1, 3, 32, 32))
net.output(net.relu(net.conv2d(x, net.weight((8, 3, 3, 3)), pad=1)))
graph = net.build()
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ascend_lab.errors import GraphError
from ascend_lab.graph.infer import infer, operator_of, verify
from ascend_lab.graph.ir import Constant, Data, Fill, Graph, Node, Seeded, TensorType
from ascend_lab.ops.formats import format_of


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor while a graph is built: its name and type."""

    name: str
    type: TensorType

    @property
    def shape(self) -> tuple[int, ...]:
        """Its logical shape."""
        return self.type.shape


class GraphBuilder:
    """A graph under construction; every operator of the library is a method of that name."""

    def __init__(self, name: str, dtype: str = "fp32") -> None:
        self.name, self.dtype = name, dtype
        self._inputs: list[str] = []
        self._outputs: list[str] = []
        self._nodes: list[Node] = []
        self._types: dict[str, TensorType] = {}
        self._constants: dict[str, Constant] = {}
        self._counts: dict[str, int] = {}

    def unique(self, wanted: str) -> str:
        """Return `wanted`, with a number behind it if a tensor has that name."""
        if wanted not in self._types and wanted not in self._counts:
            return wanted
        while True:
            self._counts[wanted] = self._counts.get(wanted, 0) + 1
            name = f"{wanted}_{self._counts[wanted]}"
            if name not in self._types:
                return name

    def _add(self, name: str, kind: TensorType) -> Value:
        if name in self._types:
            raise GraphError(f"{self.name}: a new name", name, "names are written once")
        self._types[name] = kind
        return Value(name, kind)

    def input(self, name: str, shape: Sequence[int], dtype: str | None = None) -> Value:
        """Declare an input."""
        self._inputs.append(name)
        return self._add(name, TensorType(tuple(shape), dtype or self.dtype))

    def constant(self, data: Data, kind: TensorType | None = None, name: str = "const") -> Value:
        """Declare a constant: an array, or data of a stated type."""
        if kind is None:
            array = np.asarray(data)
            kind = TensorType(array.shape, format_of(array))
        value = self._add(self.unique(name), kind)
        self._constants[value.name] = Constant(kind, data)
        return value

    def weight(
        self, shape: Sequence[int], name: str = "weight", *, scale: float | None = None
    ) -> Value:
        """Declare seeded weights: normal, variance 2 / inputs of each output (He et al. 2015)."""
        name = self.unique(name)
        fan_in = math.prod(shape[1:]) if len(shape) > 1 else shape[0]
        data = Seeded(zlib.crc32(f"{self.name}/{name}".encode()), scale or math.sqrt(2 / fan_in))
        return self.constant(data, TensorType(tuple(shape), self.dtype), name)

    def fill(self, shape: Sequence[int], value: float, name: str = "fill") -> Value:
        """Declare a constant with one number everywhere."""
        return self.constant(Fill(value), TensorType(tuple(shape), self.dtype), name)

    def add_node(self, op: str, *inputs: Value, name: str = "", **attrs: Any) -> Any:
        """Append a node; return its output, or a tuple of several. Raises like the operator."""
        found = infer(op, [v.type for v in inputs], attrs)
        title = name or self.unique(op)
        names = [self.unique(title if i == 0 else f"{title}_{i}") for i in range(len(found))]
        outs = tuple(self._add(n, t) for n, t in zip(names, found, strict=True))
        reads = tuple(v.name for v in inputs)
        self._nodes.append(Node(title, op, reads, tuple(names), given_attrs(op, attrs)))
        return outs if len(outs) > 1 else outs[0]

    def __getattr__(self, op: str) -> Callable[..., Any]:
        """Return the method that appends a node of operator `op`."""
        if op.startswith("_"):
            raise AttributeError(op)
        found = op if op == "trans_data" else operator_of(op.removesuffix("_")).name

        def append(*inputs: Value, name: str = "", **attrs: Any) -> Any:
            return self.add_node(found, *inputs, name=name, **attrs)

        operator = operator_of(found)
        append.__name__ = found
        append.__doc__ = (
            f"{operator.summary}\n\nInputs {operator.inputs}, attributes {operator.attrs}."
        )
        return append

    def output(self, *values: Value) -> None:
        """Declare outputs."""
        self._outputs += [v.name for v in values]

    def build(self) -> Graph:
        """Return the verified graph."""
        outs = tuple(self._outputs)
        if not outs:
            raise GraphError(f"{self.name}: an output", "none", "call output(value)")
        nodes, types = tuple(self._nodes), dict(self._types)
        return verify(Graph(self.name, tuple(self._inputs), outs, nodes, types, self._constants))


def plain(value: Any) -> Any:
    """Return an attribute value as the text form writes it: numbers, strings, tuples, None."""
    if isinstance(value, (list, tuple, np.ndarray)):
        return tuple(plain(v) for v in value)
    return value.item() if isinstance(value, np.generic) else value


def given_attrs(op: str, attrs: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes in plain form, those left out that equal the operator's default."""
    defaults = operator_of(op).attrs
    values = {key: plain(value) for key, value in attrs.items()}
    return {k: v for k, v in values.items() if not (k in defaults and plain(defaults[k]) == v)}
