"""Reads an ONNX file and checks it: limits, damaged files, nodes, attributes and stored tensors.

ONNX's schema for the model's opset says which inputs and attributes a node may have.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.compiler.onnx.context import CONVERTERS, Converter
from ascend_lab.compiler.onnx.tensors import ELEMENT_TYPES, NUMPY, Tensor, Values, check_size
from ascend_lab.errors import GraphError, InputError, UnsupportedError

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto


NEWEST_OPSET = 28
"""The newest version of the standard's operators for which the converters were written."""
NEWEST_IR = 14
"""The newest version of the file format that is read."""
MAX_BYTES = 2**31
MAX_NODES = 20_000
"""The limits of a file's bytes and nodes; more raise an error before anything is converted."""


def load(source: str | Path | bytes | ModelProto) -> tuple[ModelProto, Path | None]:
    """Return the model and the folder of its external data.

    Raises `InputError` for a file that cannot be read, is too large or is not a model.
    """
    if not isinstance(source, str | Path | bytes):
        return source, None
    data = source if isinstance(source, bytes) else _bytes(Path(source))
    if len(data) > MAX_BYTES:
        raise InputError(f"a model of at most {MAX_BYTES} bytes", str(len(data)), "split")
    where = "bytes" if isinstance(source, bytes) else str(source)
    folder = None if isinstance(source, bytes) else Path(source).resolve().parent
    return _parsed(data, where), folder


def _bytes(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise InputError("a model file", f"{path}, which is none", "give the file's path")
        size = path.stat().st_size
        if size > MAX_BYTES:
            needed = f"a model file of at most {MAX_BYTES} bytes"
            raise InputError(needed, f"{size} bytes in {path}", "move its weights out")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError("a model file", f"{path}: {reason}", "check the path") from None


def _parsed(data: bytes, where: str) -> ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        got = f"{where}: {str(error).strip() or 'not a model'}"
        export_again = "export it again: damaged or another format"
        remedy = "give the .onnx file that it is from" if where.endswith(".alm") else export_again
        raise InputError("an ONNX model", got, remedy) from None
    if not model.HasField("graph") or not model.graph.output:
        raise InputError("an ONNX model with outputs", f"{where}: none", "export it again")
    return model


def opset_of(model: ModelProto) -> int:
    """Return the version of the standard's operators; raise `UnsupportedError` for a newer one."""
    if model.ir_version > NEWEST_IR:
        needed = f"ONNX files of IR version {NEWEST_IR} or older"
        raise UnsupportedError(needed, str(model.ir_version), "export anew")
    # both "" and "ai.onnx" are names of the standard's domain
    versions = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if len(set(versions)) > 1:
        raise InputError("one version of the standard's operators", str(versions), "keep one")
    version = versions[0] if versions else 1
    if not 1 <= version <= NEWEST_OPSET:
        needed = f"operators of opset 1 to {NEWEST_OPSET}"
        raise UnsupportedError(needed, str(version), "export with an older opset")
    return int(version)


# -- before any work: names written once, nothing missing, no cycle -------------------------------
def checked_nodes(model: ModelProto, opset: int) -> Sequence[NodeProto]:
    """Return the nodes in an order in which each reads only tensors that exist already.

    Raises `UnsupportedError` for too many nodes or one that cannot be converted, and `GraphError`
    for names that are written twice or never, and for cycles.
    """
    nodes = sound_nodes(model)
    for node in model.graph.node:
        find(node, opset)
    return nodes


def sound_nodes(model: ModelProto) -> Sequence[NodeProto]:
    """Return the nodes in order, also those without a converter; else raises as `checked_nodes`."""
    graph = model.graph
    if len(graph.node) > MAX_NODES:
        raise UnsupportedError(f"at most {MAX_NODES} nodes", str(len(graph.node)), "split it")
    if graph.sparse_initializer:
        raise UnsupportedError("dense initialisers", "a sparse one", "store it densely")
    nodes = (text for n in graph.node for text in (n.name, n.op_type, *n.input, *n.output))
    ends = (entry.name for entry in (*graph.input, *graph.output, *graph.initializer))
    for name in (graph.name, *ends, *nodes):  # in damaged files a name may hold any bytes
        if not isinstance(name, str) or not name.isprintable():
            raise InputError("names of printable text", repr(name)[:40], "export the model again")
    return _ordered(graph, _names(graph))


def _names(graph: GraphProto) -> set[str]:
    """Return the names of inputs and initialisers; raise `GraphError` for repeated ones."""
    entries = [entry.name for entry in graph.input]
    weights = [tensor.name for tensor in graph.initializer]
    outs = [entry.name for entry in graph.output]
    for kind, names in (("graph input", entries), ("initialiser", weights)):
        if len(set(names)) < len(names) or "" in names:
            twice = Counter(names).most_common(1)[0][0] if "" not in names else ""
            raise GraphError(f"{kind} names, each once", repr(twice), "rename one")
    written = {*entries, *weights}
    for node in graph.node:
        for name in filter(None, node.output):
            if name in written:
                raise GraphError(f"node {title(node)}: a new name", f"{name} twice", "rename one")
            written.add(name)
    for node in graph.node:
        if missing := [name for name in node.input if name and name not in written]:
            needed = f"node {title(node)} ({node.op_type}): input {missing[0]}"
            got = "nothing writes it: no initialiser, no graph input, no node"
            raise GraphError(needed, got, "export the model with its weights")
    if missing := [name for name in outs if name not in written]:
        raise GraphError(f"output {missing[0]}", "nothing writes it", "check the name")
    if len(set(outs)) < len(outs):
        raise InputError("each output name once", ", ".join(outs)[:80], "drop the repeat")
    return {*entries, *weights}


def _ordered(graph: GraphProto, ready: set[str]) -> Sequence[NodeProto]:
    """Return the nodes in the file's order if that is topological, else sorted."""
    available = set(ready)
    in_order = True
    for node in graph.node:
        in_order = in_order and all(not name or name in available for name in node.input)
        available.update(node.output)
    if in_order:
        return list(graph.node)
    # if node 0 reads a tensor that node 2 writes, sorting puts 2 before 0
    writer = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    reads = ([writer[n] for n in node.input if n in writer] for node in graph.node)
    writers_read = dict(enumerate(reads))
    try:
        return [graph.node[i] for i in TopologicalSorter(writers_read).static_order()]
    except CycleError as error:
        loop = [title(graph.node[i]) for i in error.args[1]]
        text = " -> ".join(loop if len(loop) < 8 else [*loop[:3], "...", *loop[-3:]])
        raise GraphError("a model without cycles", text, "cut one edge") from None


# -- attributes of a node, and the standard's schema ----------------------------------------------
_KINDS = {1: "f", 2: "i", 3: "s", 4: "t", 6: "floats", 7: "ints", 8: "strings"}
"""Field of `AttributeProto` by its number in `AttributeType`; other types raise an error."""
_LISTS = ("floats", "ints", "strings")


@dataclass(frozen=True, slots=True)
class Signature:
    """An operator in one opset: numbers of inputs, and attributes' defaults and types."""

    min_inputs: int
    max_inputs: int
    defaults: Mapping[str, Any]
    kinds: Mapping[str, int]
    required: frozenset[str]


@cache
def signature(op: str, opset: int) -> Signature | None:
    """Return the standard's signature of an operator, None if the opset does not have it."""
    from onnx import defs

    try:
        schema = defs.get_schema(op, opset)
        if schema.deprecated and not schema.max_input:  # deprecated: take the version before
            schema = defs.get_schema(op, schema.since_version - 1)
    except defs.SchemaError:
        return None
    defaults: dict[str, Any] = {}
    kinds: dict[str, int] = {}
    stated: dict[str, Any] = schema.attributes
    for name, attribute in stated.items():
        kinds[name] = int(attribute.type)
        default = attribute.default_value
        # a missing list is empty, but not for `Constant`, which needs to know what is missing
        empty = () if _KINDS.get(kinds[name]) in _LISTS and op != "Constant" else None
        defaults[name] = read_with_kind(default, op)[1] if default.name else empty
    required = frozenset(n for n, a in schema.attributes.items() if a.required)
    return Signature(schema.min_input, schema.max_input, defaults, kinds, required)


def title(node: NodeProto) -> str:
    """Return a node's name in messages: its own, or that of the first tensor it writes."""
    return node.name or next((name for name in node.output if name), node.op_type)


def is_own(node: NodeProto) -> bool:
    """Tell whether a node's operator is of a domain that is not the standard's."""
    return node.domain not in ("", "ai.onnx")


def full_name(node: NodeProto) -> str:
    """Return an operator's name, with its domain if that is not the standard's: my.lab.Swish."""
    return f"{node.domain}.{node.op_type}" if is_own(node) else node.op_type


def find(node: NodeProto, opset: int) -> Converter:
    """Return a node's converter; raise `UnsupportedError`, with similar names, if it has none."""
    where = f"node {title(node)}"
    name = full_name(node)
    known_converter = CONVERTERS.get(name)
    if known_converter is not None and is_own(node):
        return known_converter  # the standard has no schema for operators of other domains
    if known_converter is None:
        suggestions = difflib.get_close_matches(node.op_type, CONVERTERS, 3)
        remedy = (
            f"near it: {', '.join(suggestions)}"
            if suggestions
            else "compiler.onnx.CONVERTERS lists them"
        )
        if is_own(node):
            remedy = f'register one: @converter("{name}") of ascend_lab.compiler.onnx'
        needed = f"{where}: one of the {len(CONVERTERS)} ONNX operators with kernels here"
        raise UnsupportedError(needed, name, remedy)
    standard = signature(node.op_type, opset)
    if opset < known_converter.since or standard is None:
        versions = f"{known_converter.since} to {NEWEST_OPSET}"
        needed = f"{where} ({node.op_type}): operators of version {versions}"
        raise UnsupportedError(needed, f"opset {opset}", "convert the model to a newer opset")
    if not standard.min_inputs <= len(node.input) <= standard.max_inputs:
        count = (
            f"{standard.min_inputs} to {standard.max_inputs}"
            if standard.min_inputs < standard.max_inputs
            else f"{standard.max_inputs}"
        )
        plural = "s" if standard.max_inputs > 1 else ""
        needed = f"{where} ({node.op_type}): {count} input{plural}"
        raise UnsupportedError(needed, str(len(node.input)), "correct the node")
    return known_converter


def attributes(
    node: NodeProto, opset: int, outer: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Return the attributes of a node with defaults; `outer` are those of the function around it.

    Raises `UnsupportedError` for an unknown attribute, `GraphError` for one of another type.
    """
    where = f"node {title(node)} ({node.op_type})"
    if is_own(node):  # attributes of any name and type, without defaults
        return {a.name: read_with_kind(a, where)[1] for a in node.attribute}
    standard = signature(node.op_type, opset)
    assert standard is not None
    values = dict(standard.defaults)
    for attribute in node.attribute:
        name = attribute.name
        # inside a function an attribute may refer to one of the function's node
        if outer is not None and attribute.ref_attr_name:
            value = outer[attribute.ref_attr_name]
            values[name] = values[name] if value is None else value
            continue
        if name not in values and not _in_any_opset(node.op_type, name):
            known_names = ", ".join(values) or "none"
            raise UnsupportedError(f"{where}: attributes {known_names}", name, "remove it")
        kind, value = read_with_kind(attribute, where)
        if kind != standard.kinds.get(name, kind):
            kind_name = _KINDS.get(standard.kinds[name], "other")
            raise GraphError(
                f"{where}: attribute {name} as {kind_name}", repr(value)[:40], "correct it"
            )
        values[name] = value
    for name in standard.required:
        if values[name] in (None, ()) and name not in {a.name for a in node.attribute}:
            raise GraphError(f"{where}: attribute {name}", "none", "the standard requires it")
    return values


def _in_any_opset(op: str, name: str) -> bool:
    """Tell whether some version of an operator has an attribute, as exporters write old ones."""
    from onnx import defs

    schemas = defs.get_all_schemas_with_history()
    return any(s.name == op and not s.domain and name in s.attributes for s in schemas)


def read_with_kind(attribute: AttributeProto, where: str) -> tuple[int, Any]:
    """Return an attribute's type and value: a number, a string, a tuple, or the `TensorProto`."""
    kind = int(attribute.type)
    if kind == 0:  # files before IR version 2 do not state the type
        set_fields = {descriptor.name for descriptor, _ in attribute.ListFields()}
        present = [n for n, field in _KINDS.items() if field in set_fields]
        kind = present[0] if len(present) == 1 else 0
    field = _KINDS.get(kind)
    if field is None:
        raise UnsupportedError(f"{where}: {attribute.name}: numbers, text or a tensor", str(kind))
    value = getattr(attribute, field)
    return kind, tuple(map(_decoded, value)) if field in _LISTS else _decoded(value)


def _decoded(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


# -- stored tensors: checked now, read when needed ------------------------------------------------
_FIELDS = {"float32": "float_data", "double": "double_data", "int64": "int64_data"}
_FIELDS |= {"uint32": "uint64_data", "uint64": "uint64_data"}
"""Field of numbers that are not in `raw_data`, by type; other types use `int32_data`."""
EXTERNAL = 1


def tensor_of(proto: TensorProto, folder: Path | None) -> Tensor:
    """Return a stored tensor; its size is checked now, its values are read when needed.

    Raises `InputError` if sizes do not match the data, `UnsupportedError` for unknown types.
    """
    where = f"tensor {proto.name or '(unnamed)'}"
    if proto.data_type not in ELEMENT_TYPES:
        raise UnsupportedError(f"{where}: a numeric type", f"type {proto.data_type}", "cast it")
    elem = ELEMENT_TYPES[proto.data_type][0]
    shape = tuple(int(n) for n in proto.dims)
    check_size(where, shape)
    if proto.HasField("segment"):
        raise UnsupportedError(f"{where}: in one piece", "a segment", "store it whole")
    if proto.data_location == EXTERNAL:
        return Tensor(elem, shape, known=_external(proto, folder), name=proto.name)
    count = math.prod(shape)
    if proto.HasField("raw_data"):
        got = len(proto.raw_data)
        # (3, 4) of float16: 24 bytes
        needed = count * NUMPY[elem].itemsize
    else:
        got = len(getattr(proto, _FIELDS.get(elem, "int32_data")))
        needed = count
    if got != needed:
        needed_text = f"{where}: {needed} bytes or numbers for {shape} of {elem}"
        raise InputError(needed_text, str(got), "export again")

    def read_values() -> Values:
        from onnx import numpy_helper

        return numpy_helper.to_array(proto)

    return Tensor(elem, shape, known=read_values, name=proto.name)


def _external(proto: TensorProto, folder: Path | None) -> Callable[[], Values]:
    """Return a function that reads a tensor from another file; its location is checked now.

    The file must be in the folder of the model: absolute paths, ".." and links out of it raise an
    error.
    """
    kind = NUMPY[ELEMENT_TYPES[proto.data_type][0]]
    shape = tuple(proto.dims)
    # {"location": "model.data", "offset": "4096", "length": "1200"}
    entries = {entry.key: entry.value for entry in proto.external_data}
    where = f"external data of {proto.name}"
    if folder is None:
        raise InputError(f"{where}: a model file", "bytes or a proto", "pass the file's path")
    path = _inside(where, folder, entries.get("location", ""))
    size_bytes = math.prod(shape) * kind.itemsize
    offset = _number(where, entries.get("offset", "0"))
    length = _number(where, entries.get("length", str(size_bytes)))
    file_bytes = path.stat().st_size
    if length != size_bytes or offset + length > file_bytes:
        needed = f"{where}: {size_bytes} bytes from {offset} on in {path.name}"
        got = f"length {length} in a file of {file_bytes}"
        raise InputError(needed, got, "copy the whole data file beside the model")

    def read() -> Values:
        if not size_bytes:
            return np.zeros(shape, kind)
        try:
            flat: Values = np.memmap(path, np.uint8, "r", offset, (size_bytes,))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: readable", str(error), "check the file") from None
        return np.frombuffer(flat, kind).reshape(shape)

    return read


def _number(where: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InputError(f"{where}: offset and length in bytes", repr(text)[:40], "export again")
    return int(text)


def _inside(where: str, folder: Path, location: str) -> Path:
    """Return the file; raise `InputError` unless, links resolved, it is in the model's folder."""
    relative = Path(location)
    needed = f"{where}: a file in the model's folder"
    is_outside = (
        not location or "\0" in location or relative.is_absolute() or ".." in relative.parts
    )
    if is_outside or location[:1] == "\\" or ":" in location[:2]:
        raise InputError(needed, repr(location)[:80], "move it")
    # a file in the folder may be a link to another folder: its target has to be inside, too
    path = (folder / relative).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise InputError(needed, f"a link to {path}", "copy it")
    if not path.is_file():
        raise InputError(f"{where}: a file {location} beside the model", "none", "copy it there")
    return path
