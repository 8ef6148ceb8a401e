"""What passes are made of: a pass with its name, and rules that rewrite one node at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ascend_lab.graph.builder import given_attrs
from ascend_lab.graph.edit import Editor
from ascend_lab.graph.infer import operator_of
from ascend_lab.graph.ir import Constant, Fill, Graph, Node, TensorType
from ascend_lab.ops.formats import round_to

Values = NDArray[Any]
SMALL = 4096
"""Elements up to which constants are computed at once; larger ones when somebody asks."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A rewriting of graphs under a name; `apply` returns the graph and how often it matched.

    `values` says what happens to results: "exact" keeps every bit; "rounded" rounds at other
    places; "changed" computes something else, and is applied only when asked for.
    """

    name: str
    stage: str
    apply: Callable[[Graph], tuple[Graph, int]]
    summary: str
    values: Literal["exact", "rounded", "changed"] = "exact"

    @property
    def changes_values(self) -> bool:
        """Tell whether the new graph computes something else, beyond rounding."""
        return self.values == "changed"

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph; the same object if nothing matched."""
        return self.apply(graph)[0]


class Rewriter:
    """A graph under rewriting, in which every tensor knows its maker and its readers are counted.

    A node that nobody reads any more goes at once. Names of the graph's outputs stay.
    """

    def __init__(self, graph: Graph) -> None:
        self.edit, self.outputs = Editor(graph), frozenset(graph.outputs)
        self.made = {out: node.name for node in graph.nodes for out in node.outputs}
        self.uses = Counter(name for node in graph.nodes for name in set(node.inputs))
        self.uses.update(graph.outputs)

    # -- looking --------------------------------------------------------------------------------
    def maker(self, name: str) -> Node | None:
        """Return the node that writes a tensor; None for inputs and constants."""
        title = self.made.get(self.edit.resolve(name))
        return None if title is None else self.edit.current(title)

    def only(self, name: str, *ops: str) -> Node | None:
        """Return the maker of a tensor if it is one of `ops` and has no other reader."""
        node = self.maker(name)
        fits = node is not None and node.op in ops and len(node.outputs) == 1
        return node if fits and self.uses[self.edit.resolve(name)] == 1 else None

    def type(self, name: str) -> TensorType:
        """Return the type of a tensor."""
        return self.edit.types[self.edit.resolve(name)]

    def constant(self, name: str) -> Constant | None:
        """Return a tensor's constant, None if it is none."""
        return self.edit.constants.get(self.edit.resolve(name))

    def number(self, name: str) -> float | None:
        """Return the one number a floating-point constant holds, None if it holds several."""
        found = self.constant(name)
        if found is None or found.type.dtype not in ("fp16", "bf16", "fp32"):
            return None
        if isinstance(found.data, Fill):
            return float(replace(found, type=TensorType((1,), found.type.dtype)).array()[0])
        if not 0 < found.type.elements <= SMALL or not isinstance(found.data, np.ndarray):
            return None
        values = found.array().ravel()
        return float(values[0]) if bool(np.all(values == values[0])) else None

    # -- changing -------------------------------------------------------------------------------
    def add(self, constant: Constant, name: str) -> str:
        """Add a constant; return its name."""
        return self.edit.constant(constant, name)

    def insert(
        self, op: str, inputs: Sequence[str], attrs: Mapping[str, Any] | None = None, name: str = ""
    ) -> str:
        """Add a node; return its output."""
        out = self.edit.insert(op, inputs, attrs, name)
        node = self.edit.nodes[out]
        self.made.update(dict.fromkeys(node.outputs, node.name))
        self.uses.update(set(node.inputs))
        return out

    def become(
        self,
        node: Node,
        op: str,
        inputs: Sequence[str],
        attrs: Mapping[str, Any] | None = None,
        last: Node | None = None,
    ) -> bool:
        """Let a node compute something else; with `last` it writes what that node wrote."""
        given = tuple(map(self.edit.resolve, inputs))
        outs = (last or node).outputs
        self.uses.update(set(given))
        self.edit.put(Node(node.name, op, given, outs, given_attrs(op, dict(attrs or {}))))
        if last is not None and last.name != node.name:
            for name in node.outputs:
                del self.made[name]
            del self.edit.nodes[last.name]
            self._release(last.inputs)
        self.made.update(dict.fromkeys(outs, node.name))
        self._release(node.inputs)
        return True

    def forward(self, node: Node, value: str) -> bool:
        """Let readers of a node's output read `value`; False if two names of outputs collide."""
        old, new = node.output, self.edit.resolve(value)
        if old not in self.outputs:
            self.edit.replace(old, new)
            self.uses[new] += self.uses[old]
            self._drop(node)
            return True
        maker = self.made.get(new)
        if maker is None or new in self.outputs:
            return False
        source = self.edit.nodes[maker]
        outs = tuple(old if name == new else name for name in source.outputs)
        self.edit.nodes[maker] = replace(source, outputs=outs)
        self.edit.aliases[new] = old
        self.uses[old] += self.uses[new]
        self._drop(node)
        self.made[old] = maker
        self.edit.changes += 1
        return True

    def _drop(self, node: Node) -> None:
        self.edit.remove(node.name)
        for name in node.outputs:
            self.made.pop(name, None)
        self._release(node.inputs)

    def _release(self, names: Sequence[str]) -> None:
        """Count one reader less of each; drop the makers of what has none left."""
        todo = [self.edit.resolve(name) for name in set(names)]
        while todo:
            name = todo.pop()
            self.uses[name] -= 1
            maker = self.edit.nodes.get(self.made.get(name, ""))
            if self.uses[name] or maker is None or any(self.uses[n] for n in maker.outputs):
                continue
            self.edit.remove(maker.name)
            for out in maker.outputs:
                self.made.pop(out, None)
            todo += [self.edit.resolve(n) for n in set(maker.inputs)]

    def finish(self) -> Graph:
        """Return the verified graph, new nodes right before their first reader."""
        if not self.edit.changes:
            return self.edit.graph
        kept = self.edit.nodes
        self.edit.nodes, placed = {}, set[str]()
        current = {name: replace(n, inputs=tuple(map(self.edit.resolve, n.inputs)))
                   for name, n in kept.items()}  # fmt: skip
        made = {out: name for name, node in current.items() for out in node.outputs}
        for name in kept:
            stack = [name]
            while stack:
                node = current[stack[-1]]
                before = [made[n] for n in node.inputs if n in made and made[n] not in placed]
                if before:
                    stack += before[::-1]
                elif (title := stack.pop()) not in placed:
                    placed.add(title)
                    self.edit.nodes[title] = node
        return self.edit.finish()


Rule = Callable[[Rewriter, Node], bool]


def sweep(rule: Rule, *ops: str) -> Callable[[Graph], tuple[Graph, int]]:
    """Return the pass that offers every node (of `ops`, if given) to a rule once, in order."""

    def apply(graph: Graph) -> tuple[Graph, int]:
        names = [node.name for node in graph.nodes if not ops or node.op in ops]
        if not names:
            return graph, 0
        rewriter, count = Rewriter(graph), 0
        for name in names:
            if name in rewriter.edit.nodes:
                node = rewriter.edit.current(name)
                count += (not ops or node.op in ops) and bool(rule(rewriter, node))
        return (rewriter.finish(), count) if count else (graph, 0)

    return apply


def settings(node: Node) -> dict[str, Any]:
    """Return all attributes of a node, defaults filled in."""
    return operator_of(node.op).settings(node.attrs)


def derived(
    kind: TensorType, compute: Callable[..., Values], *sources: Constant, small: int = SMALL
) -> Constant:
    """Return the constant `compute(*arrays)`: now if everything is small, else when asked for."""

    def data() -> Values:
        wide = [source.array() for source in sources]
        with np.errstate(all="ignore"):
            return round_to(np.asarray(compute(*wide)), kind.dtype)

    lazy = Constant(kind, data)
    if max([kind.elements, *(s.type.elements for s in sources)]) > small:
        return lazy
    return Constant(kind, lazy.array())
