"""A graph as a table: one row a node, what it writes, its weights and its products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ascend_lab.graph.ir import Graph, Node
from ascend_lab.graph.zoo.counts import node_macs

HEAD = ("node", "operator", "writes", "weights", "MACs")


@dataclass(frozen=True, slots=True)
class Row:
    """One node: name, operator, types written, elements of constants read, multiply-accumulates."""

    name: str
    op: str
    writes: str
    weights: int
    macs: int

    def cells(self) -> tuple[str, ...]:
        """Return the row as a table prints it; zeros are left empty."""
        counts = (f"{n:,}" if n else "" for n in (self.weights, self.macs))
        return (self.name, self.op, self.writes, *counts)


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a graph; its text form is the table, the last line the totals."""

    title: str
    rows: tuple[Row, ...]
    limit: int | None = None

    def __iter__(self) -> Iterator[Row]:
        """Walk all rows."""
        return iter(self.rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __str__(self) -> str:
        """Return aligned columns, at most `limit` nodes."""
        shown = self.rows if self.limit is None else self.rows[: self.limit]
        lines = [HEAD, *(row.cells() for row in shown)]
        if len(shown) < len(self.rows):
            lines.append((f"... {len(self.rows) - len(shown)} more", "", "", "", ""))
        sums = (sum(row.weights for row in self), sum(row.macs for row in self))
        lines.append((self.title, f"{len(self)} nodes", "", *(f"{n:,}" for n in sums)))
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
        return "\n".join(_aligned(line, widths) for line in lines)

    __repr__ = __str__


def table(graph: Graph, *, limit: int | None = None) -> Table:
    """Return the table of a graph; weights that several nodes read count where first read."""
    seen: set[str] = set()
    rows = []
    for node in graph.nodes:
        rows.append(_row(graph, node, seen))
        seen.update(node.inputs)
    return Table(graph.name, tuple(rows), limit)


def _row(graph: Graph, node: Node, seen: set[str]) -> Row:
    new = (name for name in dict.fromkeys(node.inputs) if name not in seen)
    weights = sum(graph.types[n].elements for n in new if n in graph.constants)
    writes = ", ".join(map(str, graph.out_types(node)))
    return Row(node.name, node.op, writes, weights, node_macs(graph, node))


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    left = (f"{c:<{w}}" for c, w in zip(cells[:3], widths[:3], strict=True))
    right = (f"{c:>{w}}" for c, w in zip(cells[3:], widths[3:], strict=True))
    return "  ".join((*left, *right)).rstrip()
