"""Imports ONNX models as graphs and exports graphs: `import_onnx`, `import_model`, `export_onnx`.

`import_model` also returns the ONNX element types of inputs and outputs. A node is computed at once
if all its inputs are known and small; else its converter appends nodes to the graph. ONNX defines
many operators as functions: the nodes of such a function's body are converted in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.compiler import draft, ir
from ascend_lab.errors import AscendLabError, GraphError, InputError, UnsupportedError

# fmt: off
# isort: off
from ascend_lab.compiler.onnx import (
    elementwise, model_file as file, moves, quantised, sequences, shapes, signals, sums,
    tensors as kinds, windows,
)
from ascend_lab.compiler.onnx.context import (
    CONVERTERS, Builder, Context, Converter, NeedsConstant, Result, converter,
)
# fmt: on
from ascend_lab.compiler.onnx.tensors import Tensor, check_size
from ascend_lab.limits import refuse_above

if TYPE_CHECKING:
    from onnx import FunctionProto, ModelProto, NodeProto

__all__ = [
    "CONVERTERS",
    "Context",
    "Converter",
    "Imported",
    "NeedsConstant",
    "converter",
    "export_onnx",
    "import_model",
    "import_onnx",
    "import_pinning",
    "save_onnx",
]


def __getattr__(name: str) -> Any:
    """Load the exporter when a name of it is first used: it imports the package onnx."""
    if name not in ("export_onnx", "save_onnx"):
        raise AttributeError(name)
    from ascend_lab.compiler.onnx import export

    return getattr(export, name)


CONVERTER_MODULES = (elementwise, moves, quantised, sequences, shapes, signals, sums, windows)
"""Modules whose import fills `CONVERTERS`."""
MAX_OPERANDS = 4096
"""Most inputs or outputs of a node."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A graph and the ONNX element types ("int64", "bool", ...) of its inputs and outputs."""

    graph: ir.Graph
    input_types: Mapping[str, str]
    output_types: Mapping[str, str]


def import_onnx(
    source: str | Path | bytes | ModelProto,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    batch: int | None = None,
    pinned: Mapping[str, Any] | None = None,
) -> ir.Graph:
    """Return an ONNX model as a graph; names and formats are the model's, int64 is int32.

    `shapes` and `batch` set symbolic sizes of inputs, `pinned` gives inputs a fixed value. A batch
    also replaces a first size that the model fixes; reshapes to a constant shape that begins with
    the old batch then begin with the new one. Raises
    `InputError` for a file that is not a valid model, `GraphError` for a malformed graph, and
    `UnsupportedError` for an operator, attributes of an operator, or a type without support.
    """
    return import_model(source, shapes=shapes, batch=batch, pinned=pinned).graph


def import_model(
    source: str | Path | bytes | ModelProto,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    batch: int | None = None,
    pinned: Mapping[str, Any] | None = None,
) -> Imported:
    """Return the graph of a model and its element types; arguments and errors as `import_onnx`."""
    try:
        model, folder = file.load(source)
        importer = _Importer(model, folder)
        importer.enter(shapes or {}, batch, pinned or {})
        for node in importer.nodes:
            importer.node(node)
        return importer.finish()
    except UnicodeDecodeError as error:
        raise InputError("an ONNX model with readable names", str(error), "export again") from None


def import_pinning(
    source: str | Path | bytes | ModelProto,
    values: Mapping[str, Any],
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    batch: int | None = None,
) -> Imported:
    """Return what `import_model` returns; inputs that decide shapes are fixed to their `values`."""
    pinned: dict[str, Any] = {}
    while True:
        try:
            return import_model(source, shapes=shapes, batch=batch, pinned=pinned)
        except NeedsConstant as error:
            # fix the inputs that decide this node's shape, and import the model again
            newly_pinned = {name: values[name] for name in error.names if name in values}
            if not newly_pinned.keys() - pinned.keys():
                raise
            pinned |= newly_pinned


class _Importer:
    """Converts a model's nodes one by one; holds the tensors made so far by the model's names."""

    def __init__(self, model: ModelProto, folder: Path | None) -> None:
        self.proto = model.graph
        self.folder = folder
        self.opset = file.opset_of(model)
        self.nodes = file.checked_nodes(model, self.opset)
        self.tensors: dict[str, Tensor] = {
            proto.name: file.tensor_of(proto, folder) for proto in self.proto.initializer
        }
        # names of the file are kept for its own tensors; those inside a node get others
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
        """Declare the inputs of the graph: the model's inputs that are not initialisers."""
        entries = {entry.name: entry for entry in kinds.inputs_of(self.proto)}
        element_types = {name: kinds.element_of(entry) for name, entry in entries.items()}
        for name, value in pinned.items():
            if name not in element_types:
                raise InputError(
                    f"an input ({', '.join(element_types)}) to pin", name, "check the name"
                )
            sizes = kinds.sizes_of(entries[name])
            self.tensors[name] = kinds.pinned_tensor(name, element_types[name], sizes, value)
        unpinned = [entry for name, entry in entries.items() if name not in pinned]
        stated_batch = kinds.fixed_batch({entry.name: kinds.sizes_of(entry) for entry in unpinned})
        # A file with inputs (1, 3, 224, 224), imported with batch 8: (1, 8), so that Reshape to (1,
        # -1) becomes (8, -1).
        self.rebatch = (stated_batch, batch) if batch and stated_batch and not shapes else None
        open_shapes = {n: s for n, s in shapes.items() if n not in pinned}
        for name, shape in kinds.pinned_shapes(unpinned, open_shapes, batch).items():
            graph_input = self.net.input(name, shape, kinds.FORMATS[element_types[name]])
            self.tensors[name] = Tensor(
                element_types[name], shape, graph_input, roots=frozenset((name,))
            )
            self.types[name] = element_types[name]
            if element_types[name] == "int64":
                self.net.mark_int64_input(graph_input.name)

    def node(self, node: NodeProto) -> None:
        """Convert one node and name what it writes."""
        operand_count = max(len(node.input), len(node.output))
        refuse_above(f"{file.title(node)}: operands", operand_count, MAX_OPERANDS, "split the node")
        signature = file.find(node, self.opset)
        inputs = [self.tensors[name] if name else None for name in node.input]
        ctx = Context(
            op=signature.op,
            name=file.title(node),
            opset=self.opset,
            net=self.net,
            inputs=inputs,
            attrs=file.attributes(node, self.opset),
            out_count=len(node.output),
            result="",
            folder=self.folder,
            rebatch=self.rebatch,
        )
        start = self.net.node_count
        results = tensors_of(ctx)
        # a node may name optional outputs that its converter does not compute if no node reads them
        for name in node.output[len(results) :]:
            if name in self.read:
                ctx.unsupported(f"{len(results)} outputs", f"{name} is used")
        self._name(ctx, start, dict(zip(node.output, results, strict=False)))

    def _name(self, ctx: Context, first_node: int, results: Mapping[str, Tensor]) -> None:
        """Enter the results under the model's names, and give the graph's tensors these names."""
        # HardSwish may write "act/mul": the model calls that tensor "y", and so does the graph from
        # here.
        model_names: dict[str, str] = {}
        for name, tensor in results.items():
            if name and tensor.value is not None:
                model_names.setdefault(tensor.value.name, name)
        for name in self.net.written(first_node):
            check_size(ctx.where, self.net.type_of(name).shape)
        renamed = self.net.rename_outputs(first_node, ctx.name, model_names)
        for name, tensor in results.items():
            if tensor.value is not None:
                value = renamed.get(tensor.value.name, tensor.value)
                self.tensors[name] = replace(tensor, value=value)
            else:
                self.tensors[name] = tensor if tensor.name else replace(tensor, name=name)
            check_size(f"{ctx.where}: output", tensor.shape)

    def finish(self) -> Imported:
        """Return the graph with the model's outputs."""
        element_types: dict[str, str] = {}
        for entry in self.proto.output:
            name = entry.name
            tensor = self.tensors[entry.name]
            ctx = Context(
                op="output",
                name=name,
                opset=self.opset,
                net=self.net,
                inputs=[tensor],
                attrs={},
                out_count=1,
                result="",
            )
            value = ctx.value(tensor)
            self.net.output(value if value.name == name else self.net.copy(value, name))
            element_types[name] = tensor.elem
        boundary_types = {
            n: e
            for n, e in {**self.types, **element_types}.items()
            if e in kinds.TYPES_WITHOUT_FORMAT
        }
        graph = replace(draft.pruned(self.net.build()), elements=boundary_types)
        return Imported(graph, self.types, element_types)


# -- one node -------------------------------------------------------------------------------------
_MALFORMED = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, MemoryError)
"""What converters raise for attributes whose type or size the standard does not allow."""


def tensors_of(ctx: Context) -> list[Tensor]:
    """Return what a node writes; integers computed from known integers are computed at once."""
    # the nodes from here on are those of this ONNX node
    start = ctx.net.node_count
    ctx.result = CONVERTERS[ctx.op].result or next((t.elem for t in ctx.inputs if t), "")
    converted_results = _convert_node(ctx)
    is_int64 = _is_int64(ctx)
    results = _folded_integers(ctx, start, converted_results, is_int64)
    if is_int64:
        graph_values = (r for r in results if isinstance(r, draft.Value))
        ctx.net.mark_int64_results(
            start, () if ctx.result == "int64" else [r.name for r in graph_values]
        )
    return [_tensor(ctx, result) for result in results]


def _is_int64(ctx: Context) -> bool:
    """Tell whether a node computes in int64: whether its result or an operand has that type.

    A cast to a shorter type keeps only the last bits, as the standard says.
    """
    reads = any(t is not None and t.elem == "int64" and t.known is None for t in ctx.inputs)
    return ctx.result == "int64" or (reads and ctx.op not in ("Cast", "CastLike"))


def _convert_node(ctx: Context) -> Sequence[Result]:
    """Return what the node writes: computed now if its inputs are known and small, or converted."""
    try:
        folded_result = elementwise.folded(ctx)
        if folded_result is not None:
            return (folded_result,)
        allowed_types = CONVERTERS[ctx.op].types
        for i, tensor in enumerate(ctx.inputs):
            # types of (FLOATS, INTEGERS) and 4 inputs: the last three are integers.
            allowed = allowed_types[min(i, len(allowed_types) - 1)]
            if tensor is not None and tensor.elem not in allowed:
                ctx.unsupported(f"input {i} in {' or '.join(allowed)}", tensor.elem, "cast it")
        results = CONVERTERS[ctx.op].convert(ctx)
    except UnsupportedError:
        raise
    except AscendLabError as error:
        # tensors without elements are legal in ONNX; kernels have none of size 0
        if any(t is not None and not t.elements for t in ctx.inputs):
            raise UnsupportedError(f"{ctx.where}: {error.needed}", error.got, "skip it") from error
        if error.needed.startswith("node "):
            raise
        raise GraphError(f"{ctx.where}: {error.needed}", error.got, error.remedy) from error
    except _MALFORMED as error:
        got = f"{type(error).__name__}: {error}"
        raise GraphError(f"{ctx.where}: attributes that fit", got, "correct the node") from error
    return (results,) if isinstance(results, draft.Value | Tensor) else tuple(results)


def _folded_integers(
    ctx: Context, start: int, results: Sequence[Result], is_int64: bool
) -> Sequence[Result]:
    """Compute integers whose operands are known and return them as constants: shapes need them."""
    new_names = [result.name for result in results if isinstance(result, draft.Value)]
    sizes = [
        t.elements if t.known is not None else kinds.MAX_FOLDED_ELEMENTS + 1
        for t in ctx.inputs
        if t
    ]
    sizes += [ctx.net.type_of(name).elements for name in new_names]
    if not new_names or not any(ctx.inputs) or ctx.result not in (*kinds.INTEGERS, "bool"):
        return results
    if sum(sizes) > kinds.MAX_FOLDED_ELEMENTS:
        return results
    # Shape -> Gather -> Mul -> Reshape: the product is computed now, so that the Reshape has its
    # sizes.
    arrays = ctx.net.fold_nodes(start, new_names, int64=is_int64)
    return tuple(
        ctx.known_tensor(arrays[result.name], ctx.result)
        if isinstance(result, draft.Value)
        else result
        for result in results
    )


# -- functions of the standard --------------------------------------------------------------------
_ALLOWED_WORDS = {"reduction": ("none", "sum", "mean"), "activation": ("none", "silu", "swish")}
"""The words that attributes may have; a function's body would treat any other as one of these."""
_ELEMENTWISE = ("Celu", "Mish", "Shrink", "Softsign", "SwiGLU", "ThresholdedRelu")
"""Functions whose result has the shape of their input."""
_NUMBERS = {name: number for number, (name, _) in kinds.ELEMENT_TYPES.items()}


@converter("SwiGLU", "CausalConvWithState", types=(kinds.FLOATS,))
@converter(
    "NegativeLogLikelihoodLoss",
    "SoftmaxCrossEntropyLoss",
    types=(kinds.FLOATS, kinds.INTEGERS, kinds.FLOATS),
)
@converter("HannWindow", "HammingWindow", "BlackmanWindow", types=(kinds.INTEGERS,))
@converter("RotaryEmbedding", types=(kinds.FLOATS, kinds.FLOATS, kinds.FLOATS, ("int64",)))
@converter("DynamicQuantizeLinear", types=(("float32",),))
@converter("CenterCropPad")
def inlined(ctx: Context) -> Sequence[Tensor]:
    """Convert the nodes of the function's body instead of the node."""
    return _inlined(ctx)


def _inlined(ctx: Context) -> list[Tensor]:
    """Return what the nodes of the function's body write."""
    for key, words in _ALLOWED_WORDS.items():
        if ctx.attrs.get(key, words[0]) not in words:
            needed = f"{key} {', '.join(words[:-1])} or {words[-1]}"
            ctx.unsupported(needed, str(ctx.attr(key)))
    body = _body(ctx)
    opset = body.opset_import[0].version
    # the function's formal inputs are the node's inputs: X is "conv3/out"
    tensor_of_name = dict(zip(body.input, ctx.inputs, strict=False))
    for node in body.node:
        signature = file.find(node, opset)
        inner = replace(
            ctx,
            op=signature.op,
            opset=opset,
            inputs=[tensor_of_name.get(name) for name in node.input],
            attrs=file.attributes(node, opset, ctx.attrs),
            out_count=len(node.output),
            within=ctx.within or ctx.op,
        )
        tensor_of_name |= zip(node.output, tensors_of(inner), strict=False)
    results = [tensor for name in body.output if (tensor := tensor_of_name.get(name)) is not None]
    if ctx.op in _ELEMENTWISE:  # a body's constants have one axis, the node's input may have none
        shape = np.broadcast_shapes(*(t.shape for t in ctx.inputs if t))
        results = [_tensor(ctx, shapes.reshaped(ctx, results[0], shape))]
    return results


def _tensor(ctx: Context, result: Result) -> Tensor:
    return result if isinstance(result, Tensor) else ctx.with_elem(result, ctx.result)


@converter("Celu", "Mish", "Shrink", "Softsign", "ThresholdedRelu", types=(kinds.FLOATS,))
def inlined_lanes(ctx: Context) -> Sequence[Result]:
    """Convert the body of an elementwise function; its result has the shape of its operand.

    Some bodies hold constants as lists of one number: a scalar operand would become a list.
    """
    (result,) = _inlined(ctx)
    if result.shape == ctx.shape(0):
        return (result,)
    return (ctx.reshape(ctx.value(result), ctx.shape(0)),)


def _body(ctx: Context) -> FunctionProto:
    """Return the standard's function; some are made for the node's attributes and types."""
    from onnx import FunctionProto, defs, helper

    schema: Any = defs.get_schema(ctx.op, ctx.opset)
    body = FunctionProto()
    if schema.has_function:
        version = max(schema.function_opset_versions)
        body.ParseFromString(schema.get_function_with_opset_version(version))
        return body
    inputs = [f"x{i}" if tensor else "" for i, tensor in enumerate(ctx.inputs)]
    outputs = [f"y{i}" for i in range(ctx.out_count)]
    attrs = {name: value for name, value in ctx.attrs.items() if value not in (None, ())}
    node = helper.make_node(ctx.op, inputs, outputs, **attrs).SerializeToString()
    type_protos = [
        helper.make_tensor_type_proto(_NUMBERS[t.elem], t.shape).SerializeToString() if t else b""
        for t in ctx.inputs
    ]
    version = max(schema.context_dependent_function_opset_versions)
    function = schema.get_context_dependent_function_with_opset_version(version, node, type_protos)
    body.ParseFromString(function)
    if not body.node:
        ctx.unsupported("attributes that the standard has a function for", str(attrs))
    return body
