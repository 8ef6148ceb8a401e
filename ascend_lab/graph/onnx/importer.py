"""ONNX models as graphs: `import_onnx`, and `import_model` that also keeps the element types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_lab.errors import AscendLabError, GraphError, InputError, UnsupportedError
from ascend_lab.graph.draft import Value, pruned
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.onnx import (
    composed,
)
from ascend_lab.graph.onnx import (
    elementwise as convert_activation,
)
from ascend_lab.graph.onnx import (
    elementwise as convert_math,
)
from ascend_lab.graph.onnx import (
    moves as convert_move,
)
from ascend_lab.graph.onnx import (
    products as convert_nn,
)
from ascend_lab.graph.onnx import (
    reductions as convert_norm,
)
from ascend_lab.graph.onnx import (
    reductions as convert_reduce,
)
from ascend_lab.graph.onnx import (
    shapes as convert_known,
)
from ascend_lab.graph.onnx import (
    shapes as convert_shape,
)
from ascend_lab.graph.onnx import (
    windows as convert_pool,
)
from ascend_lab.graph.onnx import (
    windows as convert_resize,
)
from ascend_lab.graph.onnx.converter import Context, Converter, Result, attributes, find, title
from ascend_lab.graph.onnx.fold import folded
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
from ascend_lab.graph.onnx.names import Builder
from ascend_lab.graph.onnx.tensors import (
    FORMATS,
    INTEGERS,
    SMALL,
    Limits,
    Tensor,
    check_size,
    tensor_of,
)
from ascend_lab.limits import refuse_above

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

CATEGORIES = (
    composed,
    convert_math,
    convert_activation,
    convert_nn,
    convert_norm,
    convert_pool,
    convert_reduce,
    convert_resize,
    convert_shape,
    convert_move,
    convert_known,
)
"""Modules whose import fills `CONVERTERS`."""


_MALFORMED = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, MemoryError)
"""What attributes of other kinds or sizes than the standard's lead to inside a converter."""


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
            len(node.output), how.result or next((t.elem for t in inputs if t), ""), self.limits,
            self.folder, self.rebatch,
        )  # fmt: skip
        start = self.net.node_count
        results = self._early(ctx, start, _converted(ctx, how))
        for name in node.output[len(results) :]:
            if name in self.read:
                ctx.unsupported(f"{len(results)} outputs", f"{name} is used")
        self._name(ctx, start, dict(zip(node.output, results, strict=False)))

    def _early(self, ctx: Context, start: int, results: Sequence[Result]) -> Sequence[Result]:
        """Return whole numbers computed from what is known as known: shapes depend on them."""
        fresh = [found.name for found in results if isinstance(found, Value)]
        sizes = [t.elements if t.known is not None else SMALL + 1 for t in ctx.inputs if t]
        sizes += [self.net.type_of(name).elements for name in fresh]
        if not fresh or not any(ctx.inputs) or ctx.result not in (*INTEGERS, "bool"):
            return results
        if sum(sizes) > SMALL:
            return results
        arrays = self.net.computed(start, fresh)
        return tuple(
            ctx.known(arrays[found.name], ctx.result) if isinstance(found, Value) else found
            for found in results
        )

    def _name(self, ctx: Context, start: int, results: Mapping[str, Result]) -> None:
        """Enter the results under the model's names; the graph's tensors take them over."""
        roots = frozenset().union(*(t.roots for t in ctx.inputs if t))
        wanted: dict[str, str] = {}
        for name, found in results.items():
            if name and isinstance(found, Value):
                wanted.setdefault(found.name, name)
        for kind in self.net.written_since(start):
            check_size(ctx.where, kind.shape, self.limits)
        renamed = self.net.settle(start, ctx.name, wanted)
        if ctx.result == "int64":
            self.net.narrow(start)
        for name, found in results.items():
            if isinstance(found, Tensor):
                self.tensors[name] = found if found.name or found.value else _named(found, name)
            else:
                value = renamed.get(found.name, found)
                self.tensors[name] = Tensor(ctx.result, value.shape, value, roots=roots)
            check_size(f"{ctx.where}: output", self.tensors[name].shape, self.limits)

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


def _named(tensor: Tensor, name: str) -> Tensor:
    return replace(tensor, name=name)


def _check_types(ctx: Context, how: Converter) -> None:
    """Raise `UnsupportedError` unless each input has a type it may have."""
    for i, tensor in enumerate(ctx.inputs):
        allowed = how.types[min(i, len(how.types) - 1)]
        if tensor is not None and tensor.elem not in allowed:
            ctx.unsupported(f"input {i} in {' or '.join(allowed)}", tensor.elem, "cast it")


def _converted(ctx: Context, how: Converter) -> Sequence[Result]:
    """Return what the node writes: folded if all is known and small, else converted."""
    try:
        early = folded(ctx)
        if early is not None:
            return (early,)
        _check_types(ctx, how)
        found = how.convert(ctx)
    except UnsupportedError:
        raise
    except AscendLabError as error:
        if any(t is not None and not t.elements for t in ctx.inputs):
            raise UnsupportedError(f"{ctx.where}: {error.needed}", error.got, "skip it") from error
        if error.needed.startswith("node "):
            raise
        raise GraphError(f"{ctx.where}: {error.needed}", error.got, error.remedy) from error
    except _MALFORMED as error:
        got = f"{type(error).__name__}: {error}"
        raise GraphError(f"{ctx.where}: attributes that fit", got, "mend the node") from error
    return (found,) if isinstance(found, Value | Tensor) else tuple(found)
