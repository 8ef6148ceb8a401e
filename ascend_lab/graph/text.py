"""The text form of a graph: what a person reads, a test compares, and `from_text` reads back.

    graph "toy" (x: fp16[1, 3, 8, 8]) -> (y) {
      w: fp16[4, 3, 3, 3] = seeded(7, 0.1)
      y: fp16[1, 4, 8, 8] = conv2d(x, w) {pad = 1} "first"
    }

A line is a constant (numbers in brackets, `fill`, `seeded`, or `data` for what is too long to
write) or a node: the types it writes, operator, names it reads, attributes, its own name.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import GraphError
from ascend_lab.graph.evaluate import node_macs
from ascend_lab.graph.ir import Constant, Data, Fill, Graph, Node, Seeded, TensorType, verify
from ascend_lab.ops.formats import numpy_type

_NAME = r'(?:[A-Za-z_][\w.]*|"(?:[^"\\]|\\.)*")'
_TYPE = r"\w+\[[\d, ]*\](?:@\w+(?::\d+)?)?"
_TYPED = re.compile(rf"({_NAME}): ({_TYPE})")
_NAMES = rf"(?:{_NAME}(?:, {_NAME})*)?"
_INPUTS = rf"(?:{_NAME}: {_TYPE}(?:, {_NAME}: {_TYPE})*)?"
_HEAD = re.compile(rf"graph ({_NAME}) \(({_INPUTS})\) -> \(({_NAMES})\) \{{$")
_NODE = re.compile(rf"(\w+)\(({_NAMES})\)(?: \{{(.*)\}})? ({_NAME})$")


def from_text(text: str, data: Mapping[str, NDArray[Any]] | None = None) -> Graph:
    """Return the verified graph of a text form; `data` holds the arrays the text leaves out.

    Raises `GraphError` naming the line.
    """
    lines = [line.strip() for line in text.splitlines()]
    rows = [(n, line) for n, line in enumerate(lines, 1) if line and not line.startswith("#")]
    head = _HEAD.match(rows[0][1]) if rows else None
    if head is None or rows[-1][1] != "}":
        raise GraphError('graph "name" (inputs) -> (outputs) { ... }', text[:40], "see to_text")
    reader = _Reader(data or {})
    inputs = reader.types(head[2])
    for number, line in rows[1:-1]:
        try:
            reader.line(line)
        except (ValueError, SyntaxError, KeyError, TypeError) as error:
            raise GraphError(f"line {number}: a constant or a node", line, str(error)) from error
    return verify(
        Graph(_plain(head[1]), inputs, _names(head[3]), tuple(reader.nodes), reader.known,
              reader.constants)
    )  # fmt: skip


def _plain(name: str) -> str:
    return str(json.loads(name)) if name.startswith('"') else name


def _names(text: str) -> tuple[str, ...]:
    return tuple(_plain(found) for found in re.findall(_NAME, text))


def _type(text: str) -> TensorType:
    dtype, _, rest = text.partition("[")
    sizes, _, layout = rest.partition("]")
    shape = tuple(int(n) for n in sizes.split(",") if n.strip())
    return TensorType(shape, dtype, layout.removeprefix("@") or "ND")


class _Reader:
    """What the lines read so far amount to."""

    def __init__(self, data: Mapping[str, NDArray[Any]]) -> None:
        self.data = data
        self.known: dict[str, TensorType] = {}
        self.constants: dict[str, Constant] = {}
        self.nodes: list[Node] = []

    def types(self, text: str) -> tuple[str, ...]:
        found = [(_plain(name), _type(kind)) for name, kind in _TYPED.findall(text)]
        for name, kind in found:
            if name in self.known:
                raise GraphError("every name once", f"{name} twice", "rename one")
            self.known[name] = kind
        return tuple(name for name, _ in found)

    def line(self, line: str) -> None:
        last = None
        for last in _TYPED.finditer(line):
            if line[last.end() : last.end() + 3] == " = ":
                break
        if last is None or line[last.end() : last.end() + 3] != " = ":
            raise ValueError("write name: type[shape] = ...")
        names = self.types(line[: last.end()])
        body = line[last.end() + 3 :]
        node = _NODE.match(body)
        if node is None:
            (name,) = names
            self.constants[name] = Constant(self.known[name], self.constant(name, body))
            return
        attrs = _attrs(node[3] or "")
        self.nodes.append(Node(_plain(node[4]), node[1], _names(node[2]), names, attrs))

    def constant(self, name: str, body: str) -> Data:
        kind, shape = numpy_type(self.known[name].dtype), self.known[name].shape
        if body == "data":
            if name not in self.data:
                raise KeyError(f"pass data={{{name!r}: array}}")
            return np.asarray(self.data[name])
        if body.startswith("["):
            return np.array(json.loads(body)).astype(kind).reshape(shape)
        maker, _, rest = body.partition("(")
        numbers = ast.literal_eval(f"({rest.removesuffix(')')},)")
        return Fill(*numbers) if maker == "fill" else {"seeded": Seeded}[maker](*numbers)


def _attrs(text: str) -> dict[str, Any]:
    """Read `key = literal, ...`; literals are Python's."""
    if not text:
        return {}
    call = ast.parse(f"dict({text})", mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError("key = literal, ...")
    return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}


# -- a graph as a table ---------------------------------------------------------------------------
HEAD = ("node", "operator", "writes", "weights", "MACs")


@dataclass(frozen=True, slots=True)
class Row:
    """One node: name, operator, types written, elements of constants read, multiply-accumulates."""

    name: str
    op: str
    writes: str
    weights: int
    macs: int


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
        """Return aligned columns, at most `limit` nodes; zeros are left empty."""
        shown = self.rows if self.limit is None else self.rows[: self.limit]
        lines: list[tuple[str, ...]] = [HEAD]
        for row in shown:
            counts = (f"{n:,}" if n else "" for n in (row.weights, row.macs))
            lines.append((row.name, row.op, row.writes, *counts))
        if len(shown) < len(self.rows):
            lines.append((f"... {len(self.rows) - len(shown)} more", "", "", "", ""))
        sums = (sum(row.weights for row in self), sum(row.macs for row in self))
        lines.append((self.title, f"{len(self)} nodes", "", *(f"{n:,}" for n in sums)))
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
        sides = "<<<>>"
        return "\n".join(
            "  ".join(f"{c:{s}{w}}" for c, s, w in zip(line, sides, widths, strict=True)).rstrip()
            for line in lines
        )

    __repr__ = __str__


def table(graph: Graph, *, limit: int | None = None) -> Table:
    """Return the table of a graph; weights that several nodes read count where first read."""
    seen: set[str] = set()
    rows = []
    for node in graph.nodes:
        new = {name for name in node.inputs if name not in seen}
        weights = sum(graph.types[n].elements for n in new if n in graph.constants)
        writes = ", ".join(map(str, graph.out_types(node)))
        rows.append(Row(node.name, node.op, writes, weights, node_macs(graph, node)))
        seen.update(node.inputs)
    return Table(graph.name, tuple(rows), limit)
