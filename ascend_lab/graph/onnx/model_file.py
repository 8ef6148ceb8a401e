"""Reading a model file: limits before work, damaged files, and what the model says of itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.errors import GraphError, InputError, UnsupportedError
from ascend_lab.graph.onnx import tensors as kinds
from ascend_lab.graph.onnx.converter import NEWEST_OPSET, find, title
from ascend_lab.graph.onnx.tensors import Limits, Shape, Tensor, check_size, tensor_of

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto


NEWEST_IR = 14
"""The newest version of the file format that is read."""


def load(source: str | Path | bytes | ModelProto, limits: Limits) -> tuple[ModelProto, Path | None]:
    """Return the model and the folder its external data may lie in.

    Raises `InputError` for a file that cannot be read, is too large or is no model.
    """
    if not isinstance(source, str | Path | bytes):
        return source, None
    data = source if isinstance(source, bytes) else _bytes(Path(source), limits)
    if len(data) > limits.file_bytes:
        raise InputError(f"a model of at most {limits.file_bytes} bytes", str(len(data)), "split")
    where = "bytes" if isinstance(source, bytes) else str(source)
    folder = None if isinstance(source, bytes) else Path(source).resolve().parent
    return _parsed(data, where), folder


def _bytes(path: Path, limits: Limits) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise InputError("a model file", f"{path}, which is none", "give the file's path")
        size = path.stat().st_size
        if size > limits.file_bytes:
            needed = f"a model file of at most {limits.file_bytes} bytes"
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
        remedy = "export it again: damaged or another format"
        raise InputError("an ONNX model", got, remedy) from None
    if not model.HasField("graph") or not model.graph.output:
        raise InputError("an ONNX model with a graph", f"{where}: none", "export it again")
    return model


def opset_of(model: ModelProto) -> int:
    """Return the version of the standard's operators; raise `UnsupportedError` for a newer one."""
    if model.ir_version > NEWEST_IR:
        needed = f"ONNX files of IR version {NEWEST_IR} or older"
        raise UnsupportedError(needed, str(model.ir_version), "export anew")
    found = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if len(set(found)) > 1:
        raise InputError("one version of the standard's operators", str(found), "keep one")
    version = found[0] if found else 1
    if not 1 <= version <= NEWEST_OPSET:
        needed = f"operators of opset 1 to {NEWEST_OPSET}"
        raise UnsupportedError(needed, str(version), "export with an older opset")
    return int(version)


# -- before any work: names written once, nothing missing, no cycle --------------------------------
def checked_nodes(model: ModelProto, opset: int, limits: Limits) -> Sequence[NodeProto]:
    """Return the nodes in an order in which each reads what is there.

    Raises `UnsupportedError` for too many nodes or one that cannot be converted, `GraphError` for
    names written twice, names nothing writes and cycles.
    """
    nodes = _sound_nodes(model, limits)
    for node in model.graph.node:
        find(node, opset)
    return nodes


def _sound_nodes(model: ModelProto, limits: Limits) -> Sequence[NodeProto]:
    """Return the nodes in order, whatever they compute; raises as `checked_nodes`."""
    graph = model.graph
    if len(graph.node) > limits.nodes:
        raise UnsupportedError(f"at most {limits.nodes} nodes", str(len(graph.node)), "split it")
    if graph.sparse_initializer:
        raise UnsupportedError("dense initialisers", "a sparse one", "store it densely")
    _check_text(graph)
    return _ordered(graph, _names(graph))


@dataclass(frozen=True, slots=True)
class Parts:
    """A sound model: its nodes in order, its inputs that are no initialisers."""

    model: ModelProto
    nodes: Sequence[NodeProto]
    inputs: Sequence[ValueInfoProto]

    def constants(self) -> dict[str, Any]:
        """Return the initialisers' values by name."""
        from onnx import numpy_helper

        return {tensor.name: numpy_helper.to_array(tensor)
                for tensor in self.model.graph.initializer}  # fmt: skip


def whole_parts(source: str | Path | bytes | ModelProto, limits: Limits) -> Parts:
    """Return a model whose operators nobody has looked at; raises as `import_onnx` for files.

    Its nodes have titles of their own, its own functions are written out, external data are read.
    """
    import onnx
    from onnx import inliner, numpy_helper

    model, folder = load(source, limits)
    if isinstance(source, onnx.ModelProto):
        model = onnx.ModelProto()
        model.CopyFrom(source)
    if model.functions:
        model = inliner.inline_local_functions(model)
    for tensor in model.graph.initializer:
        if tensor.data_location == kinds.EXTERNAL:
            array = tensor_of(tensor, folder, limits).array()
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    ordered = onnx.GraphProto(node=_sound_nodes(model, limits))
    del model.graph.node[:]
    model.graph.node.extend(ordered.node)
    seen: Counter[str] = Counter()
    for node in model.graph.node:
        name = title(node)
        node.name = f"{name}_{seen[name]}" if seen[name] else name
        seen[name] += 1
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [entry for entry in model.graph.input if entry.name not in weights]
    return Parts(model, list(model.graph.node), inputs)


def _names(graph: GraphProto) -> set[str]:
    """Return the names there are before the first node; raise `GraphError` for repeats."""
    entries, weights, outs = (
        [one.name for one in part] for part in (graph.input, graph.initializer, graph.output)
    )
    for what, names in (("graph input", entries), ("initialiser", weights)):
        if len(set(names)) < len(names) or "" in names:
            twice = Counter(names).most_common(1)[0][0] if "" not in names else ""
            raise GraphError(f"{what} names, each once", repr(twice), "rename one")
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


def _check_text(graph: GraphProto) -> None:
    """Raise `InputError` for names that are not text: damaged files hold any bytes."""
    nodes = (text for n in graph.node for text in (n.name, n.op_type, *n.input, *n.output))
    ends = (entry.name for entry in (*graph.input, *graph.output, *graph.initializer))
    for name in (graph.name, *ends, *nodes):
        if not isinstance(name, str) or not name.isprintable():
            raise InputError("names of printable text", repr(name)[:40], "export the model again")


def _ordered(graph: GraphProto, ready: set[str]) -> Sequence[NodeProto]:
    """Return the nodes as they stand if that order works, else sorted."""
    there, sound = set(ready), True
    for node in graph.node:
        sound = sound and all(not name or name in there for name in node.input)
        there.update(node.output)
    if sound:
        return list(graph.node)
    writer = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    reads = ([writer[n] for n in node.input if n in writer] for node in graph.node)
    before = dict(enumerate(reads))
    try:
        return [graph.node[i] for i in TopologicalSorter(before).static_order()]
    except CycleError as error:
        loop = [title(graph.node[i]) for i in error.args[1]]
        text = " -> ".join(loop if len(loop) < 8 else [*loop[:3], "...", *loop[-3:]])
        raise GraphError("a model without cycles", text, "cut one edge") from None


# -- inputs: their types, symbolic sizes pinned, values given instead of them ----------------------
Sizes = tuple[int | str, ...] | None
"""Sizes of an input: numbers, names of symbolic ones ("" for unknown); None: rank unknown."""
NO_NAME = re.compile(
    r"[?*_\s]*|none|null|nan|any|dyn(amic)?|unk(nown)?[_\d]*|[-+]?\d+"
    r"|.*dynamic_axes_\d+|(p2o\.)?dynamicdimension\.\d+",
    re.IGNORECASE,
)
"""What exporters write where a size has no name; each stands for a size of its own."""
BATCH_NAME = re.compile(r".*batch.*|n|b|bs", re.IGNORECASE)


def element_of(entry: ValueInfoProto) -> str:
    """Return an input's element type; raise `UnsupportedError` for what no graph holds."""
    kind = entry.type
    if not kind.HasField("tensor_type"):
        got = kind.WhichOneof("value") or "no type"
        raise UnsupportedError(f"{entry.name}: a tensor", str(got), "export another")
    number = kind.tensor_type.elem_type
    elem = kinds.ELEMENTS[number][0] if number in kinds.ELEMENTS else f"type {number}"
    if elem not in kinds.FORMATS:
        raise UnsupportedError(
            f"{entry.name} in {', '.join(kinds.FORMATS)}", elem, "export it in one"
        )
    return elem


def sizes_of(entry: ValueInfoProto) -> Sizes:
    """Return the sizes as the model states them; what has no name, 0 and -1 are ""."""
    kind = entry.type.tensor_type
    if not kind.HasField("shape"):
        return None
    named = ("" if NO_NAME.fullmatch(d.dim_param) else str(d.dim_param) for d in kind.shape.dim)
    return tuple(
        name if d.dim_value in (-1, 0) else int(d.dim_value)
        for d, name in zip(kind.shape.dim, named, strict=True)
    )


def pinned_shapes(
    entries: Sequence[ValueInfoProto],
    shapes: Mapping[str, Sequence[int]],
    batch: int | None,
    limits: Limits,
) -> dict[str, Shape]:
    """Return a shape of numbers for each input.

    Raises `UnsupportedError` naming the input and a remedy if a size stays open, `InputError` for
    names and sizes that do not fit the model.
    """
    stated = {entry.name: sizes_of(entry) for entry in entries}
    for name in shapes:
        if name not in stated:
            known = ", ".join(stated) or "none"
            raise InputError(f"an input of the model ({known})", name, "check the name")
    if batch is not None and batch < 1:
        raise InputError("a batch of at least 1", str(batch), "raise it")
    found = {name: _given(name, sizes, shapes.get(name)) for name, sizes in stated.items()}
    if batch is not None:
        found = _batched(stated, found, batch, shapes)
    bound: dict[str, int] = {}
    first: dict[str, str] = {}
    for name, sizes in stated.items():
        for axis, (symbol, size) in enumerate(zip(sizes or (), found[name] or (), strict=False)):
            if not symbol or isinstance(symbol, int) or isinstance(size, str):
                continue
            place = first.setdefault(symbol, f"{name} axis {axis}")
            if bound.setdefault(symbol, size) != size:
                got = f"{bound[symbol]} ({place}) and {size} ({name} axis {axis})"
                raise InputError(f"one size for {symbol}", got, "check the input shape")
    return {name: _closed(name, sizes, bound, limits) for name, sizes in found.items()}


def _given(name: str, sizes: Sizes, wanted: Sequence[int] | None) -> Sizes:
    """Return the sizes with the caller's in place; fixed ones must agree."""
    if wanted is None:
        return sizes
    given = tuple(int(n) for n in wanted)
    if sizes is not None and len(sizes) != len(given):
        needed, got = f"{len(sizes)} sizes, as in {_text(sizes)}", f"{len(given)}: {given}"
        raise InputError(f"input {name}: {needed}", got, "check the input shape")
    for axis, (size, asked) in enumerate(zip(sizes or given, given, strict=True)):
        if isinstance(size, int) and size != asked:
            where = f"input {name}: a size of {size} at axis {axis} of {_text(sizes or given)}"
            raise InputError(where, str(asked), "check the input shape")
    return given


def _text(sizes: Sequence[int | str]) -> str:
    return f"({', '.join(str(size) or '?' for size in sizes)})"


def _batched(
    stated: Mapping[str, Sizes], found: Mapping[str, Sizes], batch: int, given: Mapping[str, Any]
) -> dict[str, Sizes]:
    """Return the sizes with the batch first wherever a first size is open, or all fixed agree.

    Raises `InputError` naming the inputs where it is not clear which first sizes are the batch.
    """
    heads = {name: sizes[0] for name, sizes in stated.items() if sizes}
    symbols = {head for head in heads.values() if isinstance(head, str) and head}
    if len(symbols) > 1:
        likely = {symbol for symbol in symbols if BATCH_NAME.fullmatch(symbol)}
        symbols = likely if len(likely) == 1 else symbols
    chosen = [name for name, head in heads.items() if head == "" or head in symbols]
    if None in stated.values() and not chosen:
        chosen = [name for name, sizes in stated.items() if sizes is None and name in given]
    if not chosen and fixed_batch(stated):
        chosen = list(heads)
    if not chosen or len(symbols) > 1:
        got = ", ".join(f"{name} {_text(sizes)}" for name, sizes in stated.items() if sizes)
        remedy = "state each shape instead of a batch"
        raise InputError("inputs of one first size for a batch", got or "none", remedy)
    for name in chosen:
        if name in given and tuple(given[name])[:1] != (batch,):
            got = _text(tuple(given[name]))
            raise InputError(f"input {name}: a size of {batch} at axis 0", got, "drop the batch")
    return {n: (batch, *s[1:]) if s and n in chosen else s for n, s in found.items()}


def fixed_batch(found: Mapping[str, Sizes]) -> int:
    """Return the first size that a model fixes for all its inputs alike, or 0."""
    heads = {sizes[0] for sizes in found.values() if sizes}
    head = heads.pop() if len(heads) == 1 else 0
    return head if isinstance(head, int) else 0


def _closed(name: str, sizes: Sizes, bound: Mapping[str, int], limits: Limits) -> Shape:
    """Return sizes with numbers for symbols; raise `UnsupportedError` where one stays open."""
    filled = [bound.get(s, s) if isinstance(s, str) else s for s in sizes or ()]
    if sizes is None or any(isinstance(s, str) for s in filled):
        text = "unknown rank" if sizes is None else str(list(sizes)).replace("''", "?")
        given = (1, 3, 224, 224) if sizes is None else sizes
        likely = (1, 3, 224, 224) if len(given) == 4 else (1,) * len(given)
        example = tuple(s if isinstance(s, int) else n for s, n in zip(given, likely, strict=True))
        first_only = sizes is not None and not any(isinstance(s, str) for s in sizes[1:])
        got = text.replace("'", "")
        remedy = f"pin them: shapes={{{name!r}: {example}}}{' or batch=1' * first_only}"
        raise UnsupportedError(f"input {name}: sizes that are numbers", got, remedy)
    shape = tuple(int(s) for s in filled)
    check_size(f"input {name}", shape, limits)
    return shape


def pinned_tensor(name: str, elem: str, sizes: Sizes, given: Any) -> Tensor:
    """Return a graph input whose value is given before the graph is built."""
    array = np.asarray(given)
    wanted = kinds.NUMPY[elem]
    if array.dtype.kind not in "biuf" and array.dtype != wanted:
        raise InputError(f"input {name} in {elem}", str(array.dtype), "pass numbers")
    cast = array.astype(wanted)
    if wanted.kind in "biu" and not np.array_equal(cast, array):
        raise InputError(f"input {name} in {elem}", f"values of {array.dtype}", "pass whole ones")
    _given(name, sizes, array.shape)
    return Tensor(elem, array.shape, known=cast, name=name)
