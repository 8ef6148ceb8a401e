"""A piece of a graph that becomes one kernel: its nodes as a small graph of its own.

Names inside are canonical (x0, x1, ... read; y0, ... written; v0, ... between), so that equal
pieces, such as the repeated blocks of a residual network, print the same text and are compiled
once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ascend_lab.graph.ir import Graph, Node, TensorType, Values, to_text
from ascend_lab.isa import Kernel

Form = Callable[[Values], Values]
"""From the logical array of a constant to the flat array that lies in device memory."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A small graph, which of its inputs are constants, and what its names are in the network."""

    graph: Graph
    constants: frozenset[str]
    names: Mapping[str, str]

    @property
    def key(self) -> str:
        """Text that is equal for equal pieces."""
        return to_text(self.graph) + " ".join(sorted(self.constants))

    @property
    def output(self) -> TensorType:
        """Type of the last tensor written."""
        return self.graph.types[self.graph.outputs[-1]]

    def type(self, name: str) -> TensorType:
        """Return the type of a canonical name."""
        return self.graph.types[name]


@dataclass(frozen=True, slots=True)
class Lowered:
    """The kernel of a piece: GM tensors bear canonical names.

    `forms` says how constants are stored where that is not their type's layout; `extra` are small
    tensors of the kernel's own.
    """

    kernel: Kernel
    forms: Mapping[str, Form] = field(default_factory=dict)
    extra: Mapping[str, Values] = field(default_factory=dict)


def piece_of(graph: Graph, nodes: Sequence[Node]) -> Piece:
    """Return the nodes, given in order, as a piece; it writes what is read outside."""
    inside = {node.name for node in nodes}
    written = [name for node in nodes for name in node.outputs]
    leaves = [
        n
        for n in written
        if n in graph.outputs or any(r.name not in inside for r in graph.readers[n])
    ]
    reads = [n for node in nodes for n in node.inputs if n not in written]
    names = {old: f"x{i}" for i, old in enumerate(dict.fromkeys(reads))}
    constants = frozenset(new for old, new in names.items() if old in graph.constants)
    inputs = tuple(names.values())
    for old in written:
        if old in leaves:
            names[old] = f"y{leaves.index(old)}"
        else:
            names[old] = f"v{len(names)}"
    canonical = tuple(
        replace(
            node,
            name=f"n{i}",
            inputs=tuple(names[n] for n in node.inputs),
            outputs=tuple(names[n] for n in node.outputs),
        )
        for i, node in enumerate(nodes)
    )
    types = {new: graph.types[old] for old, new in names.items()}
    small = Graph("piece", inputs, tuple(names[n] for n in leaves), canonical, types)
    return Piece(small, constants, {new: old for old, new in names.items()})
