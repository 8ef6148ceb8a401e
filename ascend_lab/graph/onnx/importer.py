"""ONNX models as graphs: `import_onnx`, and `import_model` that also keeps the element types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_lab.errors import InputError
from ascend_lab.graph.draft import Value, pruned
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.onnx import (
    elementwise,
    indexing,
    moves,
    products,
    quantised,
    recurrent,
    reductions,
    shapes,
    signals,
    windows,
)
from ascend_lab.graph.onnx.context import Builder, Context
from ascend_lab.graph.onnx.converter import attributes, find, title
from ascend_lab.graph.onnx.model_file import (
    checked_nodes,
    element_of,
    fixed_batch,
    load,
    opset_of,
    pinned_shapes,
    pinned_tensor,
    sizes_of,
)
from ascend_lab.graph.onnx.nodes import tensors_of
from ascend_lab.graph.onnx.tensors import FORMATS, Limits, Tensor, check_size, tensor_of
from ascend_lab.limits import refuse_above

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

FAMILIES = (
    elementwise, indexing, moves, products, quantised, recurrent, reductions, shapes, signals,
    windows,
)  # fmt: skip
"""Modules whose import fills `CONVERTERS`."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A graph and the ONNX element types ("int64", "bool", ...) of its inputs and outputs."""

    graph: Graph
    input_types: Mapping[str, str]
    output_types: Mapping[str, str]


def import_onnx(
    source: str | Path | bytes | ModelProto,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    batch: int | None = None,
    pinned: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
) -> Graph:
    """Return an ONNX model as a graph; names and formats are the model's, int64 is int32.

    `shapes` and `batch` pin symbolic sizes of inputs, `pinned` gives inputs a fixed value. A batch
    also replaces a first size that the model fixes; constant reshapes that begin with the old one
    then begin with the new. Raises
    `InputError` for a file that is no sound model, `GraphError` for a malformed graph,
    `UnsupportedError` for an operator, a case of one, or a type that is not supported.
    """
    found = import_model(source, shapes=shapes, batch=batch, pinned=pinned, limits=limits)
    return found.graph


def import_model(
    source: str | Path | bytes | ModelProto,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    batch: int | None = None,
    pinned: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
) -> Imported:
    """Return the graph of a model and its element types; arguments and errors as `import_onnx`."""
    bounds = limits or Limits()
    try:
        model, folder = load(source, bounds)
        importer = _Importer(model, folder, bounds)
        importer.enter(shapes or {}, batch, pinned or {})
        for node in importer.nodes:
            importer.node(node)
        return importer.finish()
    except UnicodeDecodeError as error:
        raise InputError("an ONNX model with readable names", str(error), "export again") from None


class _Importer:
    """A model on its way into a graph: the tensors known so far by the model's names."""

    def __init__(self, model: ModelProto, folder: Path | None, limits: Limits) -> None:
        self.proto, self.limits, self.folder = model.graph, limits, folder
        self.opset = opset_of(model)
        self.nodes = checked_nodes(model, self.opset, limits)
        self.tensors: dict[str, Tensor] = {
            proto.name: tensor_of(proto, folder, limits) for proto in self.proto.initializer
        }
        reserved = {name for node in self.nodes for name in (*node.input, *node.output)}
        reserved |= {entry.name for entry in (*self.proto.input, *self.proto.output)}
        self.net = Builder(self.proto.name or "model", reserved)
        self.types: dict[str, str] = {}
        self.rebatch: tuple[int, int] | None = None
        self.read = {name for node in self.nodes for name in node.input}
        self.read |= {entry.name for entry in self.proto.output}

    def enter(
        self, shapes: Mapping[str, Sequence[int]], batch: int | None, pinned: Mapping[str, Any]
    ) -> None:
        """Declare the graph inputs that are no initialisers."""
        entries = [e for e in self.proto.input if e.name not in self.tensors]
        elems = {entry.name: element_of(entry) for entry in entries}
        for name in pinned:
            if name not in elems:
                raise InputError(f"an input ({', '.join(elems)}) to pin", name, "check the name")
        for entry in entries:
            name = entry.name
            if name in pinned:
                sizes = sizes_of(entry)
                self.tensors[name] = pinned_tensor(name, elems[name], sizes, pinned[name])
        free = [entry for entry in entries if entry.name not in pinned]
        old = fixed_batch({entry.name: sizes_of(entry) for entry in free})
        self.rebatch = (old, batch) if batch and old and not shapes else None
        open_shapes = {n: s for n, s in shapes.items() if n not in pinned}
        for name, shape in pinned_shapes(free, open_shapes, batch, self.limits).items():
            value = self.net.input(name, shape, FORMATS[elems[name]])
            self.tensors[name] = Tensor(elems[name], shape, value, roots=frozenset((name,)))
            self.types[name] = elems[name]

    def node(self, node: NodeProto) -> None:
        """Convert one node and name what it writes."""
        most = max(len(node.input), len(node.output))
        refuse_above(f"{title(node)}: operands", most, self.limits.operands, "split the node")
        how = find(node, self.opset)
        inputs = [self.tensors[name] if name else None for name in node.input]
        ctx = Context(
            how.op, title(node), self.opset, self.net, inputs, attributes(node, self.opset),
            len(node.output), "", self.limits, self.folder, self.rebatch,
        )  # fmt: skip
        start = self.net.node_count
        results = tensors_of(ctx)
        for name in node.output[len(results) :]:
            if name in self.read:
                ctx.unsupported(f"{len(results)} outputs", f"{name} is used")
        self._name(ctx, start, dict(zip(node.output, results, strict=False)))

    def _name(self, ctx: Context, start: int, results: Mapping[str, Tensor]) -> None:
        """Enter the results under the model's names; the graph's tensors take them over."""
        wanted: dict[str, str] = {}
        for name, found in results.items():
            if name and found.value is not None:
                wanted.setdefault(found.value.name, name)
        for kind in self.net.written_since(start):
            check_size(ctx.where, kind.shape, self.limits)
        renamed = self.net.settle(start, ctx.name, wanted)
        for name, found in results.items():
            if found.value is not None:
                value = renamed.get(found.value.name, found.value)
                self.tensors[name] = replace(found, value=value)
            else:
                self.tensors[name] = found if found.name else replace(found, name=name)
            check_size(f"{ctx.where}: output", found.shape, self.limits)

    def finish(self) -> Imported:
        """Return the graph with the model's outputs."""
        elems: dict[str, str] = {}
        for entry in self.proto.output:
            tensor = self.tensors[entry.name]
            self.net.output(self._output(entry.name, tensor))
            elems[entry.name] = tensor.elem
        graph = self.net.build()
        return Imported(pruned(graph), self.types, elems)

    def _output(self, name: str, tensor: Tensor) -> Value:
        """Return an output under its own name, copied if the tensor has another."""
        if tensor.value is not None and tensor.value.name == name:
            return tensor.value
        ctx = Context("output", name, self.opset, self.net, [tensor], {}, 1, "", self.limits)
        value = ctx.value(tensor)
        return value if value.name == name else self.net.copy(value, name)
