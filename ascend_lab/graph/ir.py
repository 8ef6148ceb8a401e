"""The graph: operators that read and write named, typed tensors.

A graph is frozen data in static single assignment: every name is written once, by an input, a
constant or one node, and nodes stand in an order in which each reads only what is already there.
What a node computes is said by `ops.OPERATORS[node.op]`; its attributes are that operator's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.errors import GraphError
from ascend_lab.layout import AddressMap, address_map
from ascend_lab.ops.formats import numpy_type

Values = NDArray[Any]
Shape = tuple[int, ...]
_map = lru_cache(4096)(address_map)
CUBE_LAYOUTS = ("NC1HWC0", "FRACTAL_NZ")
"""Layouts in which the cube's results lie."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape, number format and layout of a tensor; "ND" is row-major.

    The shape is the logical one in every layout; a layout that works in blocks stores more. Blocks
    of one- and two-byte numbers fill 32 bytes; those of four bytes have the 16 channels the cube
    writes. ":16" behind a layout says 16 where it would be more: int8 just cast from fp16.
    """

    shape: Shape
    dtype: str
    layout: str = "ND"

    @property
    def elements(self) -> int:
        """Logical elements."""
        return math.prod(self.shape)

    @property
    def stored_shape(self) -> Shape:
        """Shape of the row-major array that lies in memory, padding included."""
        return self.shape if self.layout == "ND" else self.map.storage_shape

    @property
    def map(self) -> AddressMap:
        """Where every element lies."""
        name, _, lanes = self.layout.partition(":")
        wide = "16" if DTYPE_BYTES[self.dtype] == 4 and name in CUBE_LAYOUTS else lanes
        c0 = int(wide) if wide else None
        return _map(name, self.shape or (1,), self.dtype, c0=c0)

    @property
    def size_bytes(self) -> int:
        """Bytes in memory, padding of blocks included."""
        return math.prod(self.stored_shape) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        """Return it as the text form writes it: fp16[1, 3, 8, 8]@NC1HWC0."""
        end = "" if self.layout == "ND" else f"@{self.layout}"
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{end}"


@dataclass(frozen=True, slots=True)
class Fill:
    """Constant data: one number everywhere."""

    value: float


@dataclass(frozen=True, slots=True)
class Seeded:
    """Constant data drawn from a seed: normal with standard deviation `scale` around `mean`."""

    seed: int
    scale: float = 1.0
    mean: float = 0.0


Data = Values | Fill | Seeded | Callable[[], Values]


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A tensor known when the graph is built; large data are made only when asked for."""

    type: TensorType
    data: Data

    def array(self) -> Values:
        """Return the values, an array of the type's shape and format."""
        kind, shape = numpy_type(self.type.dtype), self.type.shape
        if isinstance(self.data, Fill):
            return np.full(shape, self.data.value, kind)
        if isinstance(self.data, Seeded):
            rng = np.random.default_rng(self.data.seed)
            drawn = rng.standard_normal(shape, np.float32) * np.float32(self.data.scale)
            return (drawn + np.float32(self.data.mean)).astype(kind)
        found = np.asarray(self.data() if callable(self.data) else self.data)
        if found.shape != shape:
            raise GraphError(f"constant data of shape {shape}", str(found.shape), "fix the data")
        return found.astype(kind, copy=False)


Attrs = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Node:
    """One use of an operator: names read, names written, attributes other than the defaults."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Attrs = field(default_factory=dict)

    @property
    def output(self) -> str:
        """The first name written."""
        return self.outputs[0]

    def attr(self, key: str, default: Any = None) -> Any:
        """Return an attribute, or `default` where the node does not set it."""
        return self.attrs.get(key, default)


@dataclass(frozen=True)
class Graph:
    """A network: inputs, outputs, nodes in order, the type of every name, constants by name.

    `narrowed` names int32 tensors that were int64 in a model: numbers beyond 32 bits are a fault.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    narrowed: frozenset[str] = frozenset()

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that writes each name; inputs and constants have none."""
        return {out: node for node in self.nodes for out in node.outputs}

    @cached_property
    def readers(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that read each name, in order, each once; () for names nobody reads."""
        found: dict[str, list[Node]] = {name: [] for name in self.types}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                found.setdefault(name, []).append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    def type_of(self, name: str) -> TensorType:
        """Return the type of a tensor; raise `GraphError` for an unknown name."""
        if name not in self.types:
            raise GraphError(f"{self.name}: a tensor of the graph", repr(name), "check the name")
        return self.types[name]

    def node(self, name: str) -> Node:
        """Return a node by name; raise `GraphError` for an unknown one."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise GraphError(f"{self.name}: a node of the graph", repr(name), "check the name")

    def in_types(self, node: Node) -> tuple[TensorType, ...]:
        """Return the types a node reads."""
        return tuple(self.types[name] for name in node.inputs)

    def out_types(self, node: Node) -> tuple[TensorType, ...]:
        """Return the types a node writes."""
        return tuple(self.types[name] for name in node.outputs)

    @property
    def parameter_count(self) -> int:
        """Elements of all constants of floating point that nodes read: weights and biases."""
        read = {name for node in self.nodes for name in node.inputs}
        return sum(
            c.type.elements
            for name, c in self.constants.items()
            if name in read and c.type.dtype in ("fp16", "bf16", "fp32")
        )

    def renamed(self, name: str) -> Graph:
        """Return the same graph under another name."""
        return replace(self, name=name)

    def __repr__(self) -> str:
        """Return one line."""
        return (
            f"Graph({self.name}: {len(self.nodes)} nodes, {len(self.inputs)} inputs, "
            f"{len(self.outputs)} outputs, {self.parameter_count:,} parameters)"
        )

    def __str__(self) -> str:
        """Return the text form; see `graph.text`."""
        return to_text(self)


LONGEST = 64
"""Elements of a constant that are still written out."""
_PLAIN = re.compile(r"[A-Za-z_][\w.]*$")


def to_text(graph: Graph) -> str:
    """Return the text form; `from_text` of it is the same graph."""
    entries = ", ".join(_typed(graph, name) for name in graph.inputs)
    results = ", ".join(map(_name, graph.outputs))
    lines = [f"graph {_name(graph.name)} ({entries}) -> ({results}) {{"]
    for name, constant in graph.constants.items():
        lines.append(f"  {_typed(graph, name)} = {_data(constant)}")
    for node in graph.nodes:
        outs = ", ".join(_typed(graph, name) for name in node.outputs)
        reads = ", ".join(map(_name, node.inputs))
        attrs = ", ".join(f"{key} = {_literal(value)}" for key, value in sorted(node.attrs.items()))
        middle = f" {{{attrs}}}" if attrs else ""
        lines.append(f"  {outs} = {node.op}({reads}){middle} {_name(node.name)}")
    return "\n".join([*lines, "}"]) + "\n"


def _literal(value: object) -> str:
    """Spell an attribute as a Python literal; infinity, which has none, as 1e999."""
    return re.sub(r"\binf\b", "1e999", repr(value)) if "inf" in repr(value) else repr(value)


def _name(text: str) -> str:
    return text if _PLAIN.match(text) else json.dumps(text)


def _typed(graph: Graph, name: str) -> str:
    return f"{_name(name)}: {graph.types[name]}"


def _data(constant: Constant) -> str:
    data = constant.data
    if isinstance(data, Fill):
        return f"fill({_literal(data.value)})"
    if isinstance(data, Seeded):
        return f"seeded({data.seed}, {_literal(data.scale)}, {_literal(data.mean)})"
    if constant.type.elements > LONGEST:
        return "data"
    numbers = json.dumps(constant.array().ravel().astype(np.float64).tolist())
    return numbers.replace(".0,", ",").replace("-0,", "-0.0,")
