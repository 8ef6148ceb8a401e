"""Rewriting a graph: a mutable copy that passes edit, and the checked graph it becomes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ascend_lab.errors import GraphError
from ascend_lab.graph.builder import given_attrs
from ascend_lab.graph.infer import infer, verify
from ascend_lab.graph.ir import Constant, Graph, Node, TensorType


class Editor:
    """A graph being rewritten; `finish` sorts it, drops what nobody reads and verifies it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: dict[str, Node] = {node.name: node for node in graph.nodes}
        self.types: dict[str, TensorType] = dict(graph.types)
        self.constants: dict[str, Constant] = dict(graph.constants)
        self.outputs: list[str] = list(graph.outputs)
        self.aliases: dict[str, str] = {}
        self.changes = 0

    def __iter__(self) -> Iterator[Node]:
        """Walk the nodes of the graph at the start that are still there, inputs resolved."""
        for node in self.graph.nodes:
            if node.name in self.nodes:
                yield self.current(node.name)

    def current(self, name: str) -> Node:
        """Return a node as it is now."""
        node = self.nodes[name]
        return replace(node, inputs=tuple(map(self.resolve, node.inputs)))

    def resolve(self, name: str) -> str:
        """Return the tensor that stands for `name` after the replacements so far."""
        while name in self.aliases:
            name = self.aliases[name]
        return name

    def new_name(self, wanted: str) -> str:
        """Return a tensor and node name that is free."""
        name, number = wanted, 0
        while name in self.types or name in self.nodes:
            number += 1
            name = f"{wanted}_{number}"
        return name

    def constant(self, constant: Constant, name: str = "const") -> str:
        """Add a constant; return its name."""
        name = self.new_name(name)
        self.types[name], self.constants[name] = constant.type, constant
        self.changes += 1
        return name

    def insert(
        self, op: str, inputs: Sequence[str], attrs: Mapping[str, Any] | None = None, name: str = ""
    ) -> str:
        """Add a node with types inferred; return its first output."""
        given = tuple(map(self.resolve, inputs))
        kinds = infer(op, [self.types[n] for n in given], attrs or {})
        title = self.new_name(name or op)
        outs = tuple(title if i == 0 else self.new_name(f"{title}_{i}") for i in range(len(kinds)))
        self.types.update(zip(outs, kinds, strict=True))
        self.nodes[title] = Node(title, op, given, outs, given_attrs(op, dict(attrs or {})))
        self.changes += 1
        return outs[0]

    def replace(self, old: str, new: str) -> None:
        """Let all readers of `old`, and the graph's outputs, read `new` instead."""
        new = self.resolve(new)
        if old != new:
            self.aliases[old] = new
            self.changes += 1

    def put(self, node: Node) -> None:
        """Replace the node of that name; its outputs' types are inferred again."""
        given = [self.types[self.resolve(n)] for n in node.inputs]
        kinds = infer(node.op, given, node.attrs)
        self.types.update(zip(node.outputs, kinds, strict=True))
        self.nodes[node.name] = node
        self.changes += 1

    def remove(self, name: str) -> None:
        """Remove a node; its outputs must have been replaced."""
        del self.nodes[name]
        self.changes += 1

    def finish(self) -> Graph:
        """Return the rewritten graph; the same object if nothing changed."""
        if not self.changes:
            return self.graph
        outs = tuple(map(self.resolve, self.outputs))
        nodes = tuple(self.current(name) for name in self.nodes)
        graph = replace(self.graph, outputs=outs, nodes=nodes, types=self.types,
                        constants=self.constants)  # fmt: skip
        return verify(pruned(ordered(graph)))


def ordered(graph: Graph) -> Graph:
    """Return the graph with its nodes in an order in which each reads what is there.

    Nodes stay in the order given, a node that is read too early moves in front of its first
    reader. Raises `GraphError` naming the nodes of a cycle.
    """
    done: dict[str, Node] = {}
    for node in graph.nodes:
        _place(graph, node, done)
    if len(done) == len(graph.nodes) and all(map(operator.is_, done.values(), graph.nodes)):
        return graph
    return replace(graph, nodes=tuple(done.values()))


def _place(graph: Graph, node: Node, done: dict[str, Node]) -> None:
    """Append a node to `done`, what it reads before it."""
    ahead = [node]
    open_: dict[str, None] = {}
    while ahead:
        current = ahead[-1]
        made = (graph.producers.get(name) for name in current.inputs)
        missing = [n for n in made if n is not None and n.name not in done]
        if current.name in done or not missing:
            done.setdefault(current.name, current)
            open_.pop(current.name, None)
            ahead.pop()
            continue
        open_[current.name] = None
        for before in reversed(missing):
            if before.name in open_:
                names = list(open_)
                loop = " -> ".join([*names[names.index(before.name) :], before.name])
                raise GraphError(f"{graph.name}: a graph without cycles", loop, "cut one edge")
            ahead.append(before)


def pruned(graph: Graph) -> Graph:
    """Return the graph without nodes, constants and types that no output needs."""
    needed = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    written = {name for node in kept for name in node.outputs}
    names = needed | written | set(graph.inputs)
    return replace(
        graph,
        nodes=tuple(reversed(kept)),
        types={n: t for n, t in graph.types.items() if n in names},
        constants={n: c for n, c in graph.constants.items() if n in needed},
    )
