"""The builder of an imported graph: it keeps the model's names for the model's tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ascend_lab.graph.draft import GraphBuilder, Value
from ascend_lab.graph.evaluate import evaluate
from ascend_lab.graph.ir import Constant, Data, Graph, Node, TensorType


class Builder(GraphBuilder):
    """A graph under construction whose own names never take those in `reserved`."""

    def __init__(self, name: str, reserved: Iterable[str]) -> None:
        super().__init__(name)
        self._reserved = frozenset(reserved)
        self._titles: set[str] = set()
        self.emitted: dict[int, tuple[Value, Any]] = {}
        """Known tensors that are constants of the graph by now, by identity."""
        self._narrowed: set[str] = set()

    def unique(self, wanted: str) -> str:
        """Return `wanted` or a numbered form that neither the graph nor the model uses."""
        if wanted in self._reserved:
            self._counts.setdefault(wanted, 0)
        while (name := super().unique(wanted)) in self._reserved:
            pass
        return name

    def lasting(self, data: Data, kind: TensorType, name: str) -> Value:
        """Declare a constant under the model's name for it, or a free one."""
        free = name in self._reserved and name not in self._types
        value = self._add(name if free else self.unique(name), kind)
        self._constants[value.name] = Constant(kind, data)
        return value

    def type_of(self, name: str) -> TensorType:
        """Return the type of a tensor by name."""
        return self._types[name]

    def computed(self, start: int, results: Iterable[str]) -> dict[str, Any]:
        """Return what the nodes from `start` on, which read only constants, compute; drop them."""
        nodes, outs = tuple(self._nodes[start:]), tuple(dict.fromkeys(results))
        written = [name for node in nodes for name in node.outputs]
        names = {*written, *outs, *(name for node in nodes for name in node.inputs)}
        types = {name: self._types[name] for name in names}
        constants = {name: self._constants[name] for name in names if name in self._constants}
        found = evaluate(Graph(self.name, (), outs, nodes, types, constants), {})
        del self._nodes[start:]
        for name in written:
            del self._types[name]
        return found

    def narrow(self, start: int) -> None:
        """Note that what the nodes from `start` on write is int64 in the model."""
        self._narrowed |= {name for node in self._nodes[start:] for name in node.outputs}

    def build(self) -> Graph:
        """Return the verified graph."""
        return replace(super().build(), narrowed=frozenset(self._narrowed))

    def written_since(self, start: int) -> list[TensorType]:
        """Return the types of what the nodes from `start` on write."""
        return [self._types[name] for node in self._nodes[start:] for name in node.outputs]

    @property
    def node_count(self) -> int:
        """Nodes so far."""
        return len(self._nodes)

    def settle(self, start: int, title: str, wanted: dict[str, str]) -> dict[str, Value]:
        """Give tensors written by the nodes from `start` on the names the model has for them.

        `wanted` maps present names to the model's; the result maps them to the renamed values.
        The node that writes the first is called `title`, its helpers after it.
        """
        fresh = self._nodes[start:]
        written = {name for node in fresh for name in node.outputs}
        new = {old: name for old, name in wanted.items() if old in written}
        for old, name in new.items():
            self._types[name] = self._types.pop(old)
            if old in self._narrowed:
                self._narrowed.remove(old)
                self._narrowed.add(name)
        main = next(iter(new), "")
        for at, node in enumerate(fresh, start):
            self._nodes[at] = replace(
                node,
                name=self._title(title if main in node.outputs else f"{title}/{node.op}"),
                inputs=tuple(new.get(n, n) for n in node.inputs),
                outputs=tuple(new.get(n, n) for n in node.outputs),
            )
        return {old: Value(name, self._types[name]) for old, name in new.items()}

    def _title(self, wanted: str) -> str:
        name, number = wanted, 0
        while name in self._titles:
            number += 1
            name = f"{wanted}_{number}"
        self._titles.add(name)
        return name

    def copy(self, value: Value, name: str) -> Value:
        """Return the same tensor under a name of its own: an output that no node writes."""
        if not value.type.elements:  # nothing to copy, and reshape takes no empty tensor
            return self.lasting(np.zeros(value.shape), value.type, name)
        title = self._title(name)
        self._types[name] = value.type
        attrs = {"shape": value.shape}
        self._nodes.append(Node(title, "reshape", (value.name,), (name,), attrs))
        return Value(name, value.type)
