"""What passes are made of: a pass with its name, and rules that rewrite one node at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ascend_lab.graph.edit import SMALL, Draft
from ascend_lab.graph.infer import operator_of
from ascend_lab.graph.ir import Constant, Graph, Node, TensorType
from ascend_lab.ops.formats import round_to

Values = NDArray[Any]


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


Rule = Callable[[Draft, Node], bool]


def sweep(rule: Rule, *ops: str) -> Callable[[Graph], tuple[Graph, int]]:
    """Return the pass that offers every node (of `ops`, if given) to a rule once, in order."""

    def apply(graph: Graph) -> tuple[Graph, int]:
        names = [node.name for node in graph.nodes if not ops or node.op in ops]
        if not names:
            return graph, 0
        draft, count = Draft(graph), 0
        for name in names:
            if name in draft.nodes:
                node = draft.current(name)
                count += (not ops or node.op in ops) and bool(rule(draft, node))
        return (draft.finish(), count) if count else (graph, 0)

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
