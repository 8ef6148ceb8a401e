"""Reads a graph from its text form: the inverse of `ir.to_text`.

An example of the text form:

    graph "toy" (x: fp16[1, 3, 8, 8]) -> (y) {
      w: fp16[4, 3, 3, 3] = seeded(7, 0.1)
      y: fp16[1, 4, 8, 8] = conv2d(x, w) {pad = 1} "first"
    }

A line is a constant or a node. A constant is written as numbers in brackets, as `fill`, `seeded`,
or `data` if it is too long to write. A node is written as the tensors it writes with their
types, its operator, the tensors it reads, its attributes and its name.
"""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ascend_lab.compiler import ir
from ascend_lab.errors import GraphError
from ascend_lab.operators.ops import formats

# a name that is not an identifier, such as "conv3/out", is quoted as in JSON
_NAME = r'(?:[A-Za-z_][\w.]*|"(?:[^"\\]|\\.)*")'
_TYPE = r"\w+\[[\d, ]*\](?:@\w+(?::\d+)?)?"
_TYPED = re.compile(rf"({_NAME}): (\w+)\[([\d, ]*)\](?:@(\w+(?::\d+)?))?")
_NAMES = rf"(?:{_NAME}(?:, {_NAME})*)?"
_INPUTS = rf"{_NAME}: {_TYPE}(?:, {_NAME}: {_TYPE})*"
_HEAD = re.compile(rf"graph ({_NAME}) \(((?:{_INPUTS})?)\) -> \(({_NAMES})\) \{{$")
_LINE = re.compile(rf"({_INPUTS}) = (.*)$")
_NODE = re.compile(rf"(\w+)\(({_NAMES})\)(?: \{{(.*)\}})? ({_NAME})$")


def from_text(text: str, data: Mapping[str, ir.Values] | None = None) -> ir.Graph:
    """Return the verified graph of a text form; `data` holds, by name, the arrays not in the text.

    Raises `GraphError` naming the line.
    """
    lines = [line.strip() for line in text.splitlines()]
    # lines are numbered as in the file, so that messages name the right one
    rows = [(n, line) for n, line in enumerate(lines, 1) if line and not line.startswith("#")]
    header = _HEAD.match(rows[0][1]) if rows else None
    if header is None or rows[-1][1] != "}":
        raise GraphError('graph "name" (inputs) -> (outputs) { ... }', text[:40], "see to_text")
    reader = _LineReader(data or {})
    inputs = reader.types(header[2])
    for number, line in rows[1:-1]:
        try:
            reader.line(line)
        except (ValueError, SyntaxError, KeyError, TypeError) as error:
            raise GraphError(f"line {number}: a constant or a node", line, str(error)) from error
    return ir.verify(
        ir.Graph(
            _unquoted(header[1]),
            inputs,
            _names(header[3]),
            tuple(reader.nodes),
            reader.known,
            reader.constants,
        )
    )


def _unquoted(name: str) -> str:
    return str(json.loads(name)) if name.startswith('"') else name


def _names(text: str) -> tuple[str, ...]:
    return tuple(_unquoted(name) for name in re.findall(_NAME, text))


class _LineReader:
    """The types, constants and nodes of the lines read so far."""

    def __init__(self, data: Mapping[str, ir.Values]) -> None:
        self.data = data
        self.known: dict[str, ir.TensorType] = {}
        self.constants: dict[str, ir.Constant] = {}
        self.nodes: list[ir.Node] = []

    def types(self, text: str) -> tuple[str, ...]:
        """Enter the types of "x: fp16[1, 8], y: int32[4]"; return the names."""
        names = []
        for quoted, dtype, sizes, layout in _TYPED.findall(text):
            name = _unquoted(quoted)
            shape = tuple(int(n) for n in sizes.split(",") if n.strip())
            if name in self.known:
                raise GraphError("every name once", f"{name} twice", "rename one")
            self.known[name] = ir.TensorType(shape, dtype, layout or "ND")
            names.append(name)
        return tuple(names)

    def line(self, line: str) -> None:
        """Read a line: enter the tensors that it declares, and its constant or node."""
        match = _LINE.match(line)
        if match is None:
            raise ValueError("write name: type[shape] = ...")
        names = self.types(match[1])
        expression = match[2]
        node = _NODE.match(expression)
        # every other line is a constant: numbers in brackets, `data`, fill(...) or seeded(...)
        if node is None:
            (name,) = names
            self.constants[name] = ir.Constant(self.known[name], self.constant(name, expression))
            return
        attrs = _attrs(node[3] or "")
        self.nodes.append(ir.Node(_unquoted(node[4]), node[1], _names(node[2]), names, attrs))

    def constant(self, name: str, expression: str) -> ir.Data:
        """Return a constant's data as `ir.to_text` writes them: numbers, fill(...) and so on."""
        kind = formats.numpy_type(self.known[name].dtype)
        shape = self.known[name].shape
        if expression == "data":
            if name not in self.data:
                raise KeyError(f"pass data={{{name!r}: array}}")
            return np.asarray(self.data[name])
        if expression.startswith("["):
            return np.array(json.loads(expression)).astype(kind).reshape(shape)
        # "seeded(7, 0.1)": the kind of data, and the numbers (7, 0.1)
        kind_name, _, arguments = expression.partition("(")
        numbers = ast.literal_eval(f"({arguments.removesuffix(')')},)")
        if kind_name == "fill":
            return ir.Fill(*numbers)
        if kind_name == "seeded":
            return ir.Seeded(*numbers)
        raise KeyError(kind_name)


def _attrs(text: str) -> dict[str, Any]:
    """Read `key = literal, ...`; literals are Python's."""
    # parsed as Python and never run: `literal_eval` accepts literals only
    call = ast.parse(f"dict({text})", mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError("key = literal, ...")
    return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
