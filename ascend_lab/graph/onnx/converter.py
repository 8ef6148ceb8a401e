"""How nodes of one ONNX operator enter a graph, and what the standard says of them.

    @converter("LeakyRelu", types=(FLOATS,))
    def _leaky_relu(ctx: Context) -> Value:
        return ctx.emit("leaky_relu", ctx.input(0), alpha=ctx.attr("alpha"))

Inputs and attributes, their kinds and defaults, are those of ONNX's own schema in the model's
opset. What is not stated is refused before the converter runs: another attribute, another number
of inputs, another element type. So a converter computes each case it is given, or refuses.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ascend_lab.errors import GraphError, InputError, UnsupportedError
from ascend_lab.graph.draft import Value
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.tensors import EVERY, Tensor

if TYPE_CHECKING:
    from onnx import AttributeProto, NodeProto

Result = Value | Tensor
Convert = Callable[[Context], Result | Sequence[Result]]
NEWEST_OPSET = 28
"""The newest version of the standard's operators these converters were written for."""


@dataclass(frozen=True, slots=True)
class Converter:
    """How nodes of one ONNX operator enter a graph; inputs and attributes are the standard's.

    `types` are the element types of each input, the last for all that follow; `result` the element
    type of the outputs (None: that of the first input); `since` the first opset.
    """

    op: str
    convert: Convert
    types: tuple[tuple[str, ...], ...] = (EVERY,)
    result: str | None = None
    since: int = 1


CONVERTERS: dict[str, Converter] = {}
"""Every ONNX operator that can be imported."""


def converter(*names: str, **how: Any) -> Callable[[Convert], Convert]:
    """Register a function as the converter of the operators `names`; `how` as in `Converter`."""

    def register(convert: Convert) -> Convert:
        for name in names:
            if name in CONVERTERS:
                raise InputError("an operator without converter", name, "register it once")
            CONVERTERS[name] = Converter(name, convert, **how)
        return convert

    return register


_FIELDS = {1: "f", 2: "i", 3: "s", 4: "t", 6: "floats", 7: "ints", 8: "strings"}
"""Field of `AttributeProto` by its number in `AttributeType`; graphs and others are refused."""
_LISTS = ("floats", "ints", "strings")


@dataclass(frozen=True, slots=True)
class Signature:
    """An operator in one opset: how many inputs, defaults (None or () without) and kinds."""

    least: int
    most: int
    defaults: Mapping[str, Any]
    kinds: Mapping[str, int]
    required: frozenset[str]


@cache
def signature(op: str, opset: int) -> Signature | None:
    """Return what the standard says of an operator, or None if the opset has none."""
    from onnx import defs

    try:
        schema = defs.get_schema(op, opset)
        if schema.deprecated and not schema.max_input:  # withdrawn, its form is the one before
            schema = defs.get_schema(op, schema.since_version - 1)
    except defs.SchemaError:
        return None
    defaults: dict[str, Any] = {}
    kinds: dict[str, int] = {}
    stated: dict[str, Any] = schema.attributes
    for name, attribute in stated.items():
        kinds[name] = int(attribute.type)
        given = attribute.default_value
        empty = () if _FIELDS.get(kinds[name]) in _LISTS and op != "Constant" else None
        defaults[name] = read(given, op) if given.name else empty
    required = frozenset(n for n, a in schema.attributes.items() if a.required)
    return Signature(schema.min_input, schema.max_input, defaults, kinds, required)


def title(node: NodeProto) -> str:
    """Return what messages call a node: its name, or the first tensor it writes."""
    return node.name or next((name for name in node.output if name), node.op_type)


def find(node: NodeProto, opset: int) -> Converter:
    """Return a node's converter; raise `UnsupportedError` with near operators if there is none."""
    where = f"node {title(node)}"
    found = CONVERTERS.get(node.op_type)
    if node.domain not in ("", "ai.onnx") or found is None:
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        near = difflib.get_close_matches(node.op_type, CONVERTERS, 3)
        remedy = f"near it: {', '.join(near)}" if near else "see graph.onnx.CONVERTERS"
        needed = f"{where}: one of {len(CONVERTERS)} operators of the standard"
        raise UnsupportedError(needed, name, remedy)
    says = signature(node.op_type, opset)
    if opset < found.since or says is None:
        needed = f"{where} ({node.op_type}): operators of version {found.since} to {NEWEST_OPSET}"
        raise UnsupportedError(needed, f"opset {opset}", "convert the model to a newer opset")
    if not says.least <= len(node.input) <= says.most:
        needed = f"{where} ({node.op_type}): {says.least} to {says.most} inputs"
        raise UnsupportedError(needed, str(len(node.input)), "")
    return found


def attributes(
    node: NodeProto, opset: int, outer: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Return the attributes of a node, defaults filled in; `outer` are those of its function.

    Raises `UnsupportedError` for one that is not the operator's, `GraphError` for another kind.
    """
    where, says = f"node {title(node)} ({node.op_type})", signature(node.op_type, opset)
    assert says is not None
    found = dict(says.defaults)
    for attribute in node.attribute:
        name = attribute.name
        if outer is not None and attribute.ref_attr_name:
            value = outer[attribute.ref_attr_name]
            found[name] = found[name] if value is None else value
            continue
        if name not in found and not _in_any_opset(node.op_type, name):
            known = ", ".join(found) or "none"
            raise UnsupportedError(f"{where}: attributes {known}", name, "remove it")
        kind, value = read_with_kind(attribute, where)
        if kind != says.kinds.get(name, kind):
            wanted = _FIELDS.get(says.kinds[name], "other")
            raise GraphError(f"{where}: attribute {name} as {wanted}", repr(value)[:40], "mend it")
        found[name] = value
    for name in says.required:
        if found[name] in (None, ()) and name not in {a.name for a in node.attribute}:
            raise GraphError(f"{where}: attribute {name}", "none", "the standard requires it")
    return found


def _in_any_opset(op: str, name: str) -> bool:
    """Tell whether some version of an operator has an attribute: exporters keep old ones."""
    from onnx import defs

    every = defs.get_all_schemas_with_history()
    return any(s.name == op and not s.domain and name in s.attributes for s in every)


def read_with_kind(attribute: AttributeProto, where: str) -> tuple[int, Any]:
    """Return an attribute's kind and value: a number, text, a tuple, or the `TensorProto`."""
    kind = int(attribute.type)
    if kind == 0:  # files before IR version 2 leave the type out
        there = {descriptor.name for descriptor, _ in attribute.ListFields()}
        present = [n for n, field in _FIELDS.items() if field in there]
        kind = present[0] if len(present) == 1 else 0
    field = _FIELDS.get(kind)
    if field is None:
        raise UnsupportedError(f"{where}: {attribute.name}: numbers, text or a tensor", str(kind))
    value = getattr(attribute, field)
    return kind, tuple(map(_text, value)) if field in _LISTS else _text(value)


def read(attribute: AttributeProto, where: str) -> Any:
    """Return the value of an attribute."""
    return read_with_kind(attribute, where)[1]


def _text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
