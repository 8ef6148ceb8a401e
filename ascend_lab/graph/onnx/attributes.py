"""Attributes of a node: read, checked against what its converter understands, defaults added."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ascend_lab.errors import GraphError, UnsupportedError
from ascend_lab.graph.onnx.registry import CONVERTERS, NEWEST_OPSET, Converter

if TYPE_CHECKING:
    from onnx import AttributeProto, NodeProto

_FIELDS = {1: "f", 2: "i", 3: "s", 4: "t", 6: "floats", 7: "ints", 8: "strings"}
"""Field of `AttributeProto` by its number in `AttributeType`; graphs and others are refused."""
_LISTS = ("floats", "ints", "strings")


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
        raise UnsupportedError(
            f"{where}: one of {len(CONVERTERS)} operators of the standard", name, remedy
        )
    if opset < found.since:
        raise UnsupportedError(
            f"{where} ({node.op_type}): operators of version {found.since} to {NEWEST_OPSET}",
            f"opset {opset}",
            "convert the model to a newer opset",
        )
    most = len(node.input) if found.most is None else found.most
    if not found.least <= len(node.input) <= most:
        raise UnsupportedError(
            f"{where} ({node.op_type}): {found.least} to {most} inputs", str(len(node.input)), ""
        )
    return found


def attributes(node: NodeProto, how: Converter) -> Mapping[str, Any]:
    """Return the attributes of a node, defaults filled in; refuse one that is not understood."""
    where = f"node {title(node)} ({node.op_type})"
    found = dict(how.attrs)
    for attribute in node.attribute:
        if attribute.name not in how.attrs:
            known = ", ".join(how.attrs) or "none"
            raise UnsupportedError(f"{where}: attributes {known}", attribute.name, "remove it")
        value = read(attribute, where)
        default = how.attrs[attribute.name]
        if default is not None and not _same_kind(value, default):
            raise GraphError(
                f"{where}: attribute {attribute.name} like {default!r}", repr(value)[:40], "mend it"
            )
        found[attribute.name] = value
    return found


def _same_kind(value: Any, default: Any) -> bool:
    if isinstance(default, float):
        return isinstance(value, float)
    return isinstance(value, type(default))


def read(attribute: AttributeProto, where: str) -> Any:
    """Return the value: a number, a string, a tuple, or the `TensorProto` itself."""
    kind = attribute.type
    if kind == 0:  # files before IR version 2 leave the type out
        present = [n for n, field in _FIELDS.items() if _present(attribute, field)]
        kind = present[0] if len(present) == 1 else 0  # type: ignore[assignment]
    field = _FIELDS.get(int(kind))
    if field is None:
        raise UnsupportedError(f"{where}: {attribute.name}: numbers, text or a tensor", str(kind))
    value = getattr(attribute, field)
    if field in _LISTS:
        return tuple(_text(v) for v in value)
    return _text(value)


def _present(attribute: AttributeProto, field: str) -> bool:
    if field in _LISTS:
        return bool(len(getattr(attribute, field)))
    return bool(attribute.HasField(field))


def _text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
