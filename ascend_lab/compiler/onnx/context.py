"""Defines converters of ONNX operators, and the `Context` in which a converter handles one node.

    @converter("LeakyRelu", types=(FLOATS,))
    def _leaky_relu(ctx: Context) -> Value:
        return ctx.emit("leaky_relu", ctx.input(0), alpha=ctx.attr("alpha"))

Nodes with attributes, numbers of inputs or element types that a converter does not declare raise an
error before it runs. A converter handles every other node, or raises an error itself. The builder
of an imported graph keeps the model's names for the model's tensors.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ascend_lab.compiler.draft import GraphBuilder, Value
from ascend_lab.compiler.evaluate import evaluate
from ascend_lab.compiler.ir import Constant, Data, Fill, Graph, Node, TensorType
from ascend_lab.compiler.onnx import tensors as kinds
from ascend_lab.errors import GraphError, InputError, UnsupportedError
from ascend_lab.operators.ops.formats import numpy_type

MAX_PINNED_ELEMENTS = 1024
"""Most elements of a graph input whose values the import may need to know."""
MAX_CONSTANT_ELEMENTS = 2**20
"""Most elements of a constant whose values a converter may read."""


class Builder(GraphBuilder):
    """A graph under construction; new names are never among those in `reserved`."""

    def __init__(self, name: str, reserved: Iterable[str]) -> None:
        super().__init__(name)
        self._reserved = frozenset(reserved)
        self._titles: set[str] = set()
        self.emitted: dict[int, tuple[Value, Any]] = {}
        """By id(tensor): its constant in the graph, and the tensor, so that the id stays unique."""
        self._narrowed: set[str] = set()
        self.boolean_names: set[str] = set()
        """Names of numeric tensors that hold only 0 and 1: the model casts them from booleans."""

    def add_constant(self, data: Data, tensor_type: TensorType, name: str) -> Value:
        """Declare a constant with the model's name for it, or with a free name."""
        can_keep_name = name in self._reserved and name not in self._types
        value = self._add(name if can_keep_name else self.unique(name), tensor_type)
        self._constants[value.name] = Constant(tensor_type, data)
        return value

    def type_of(self, name: str) -> TensorType:
        """Return the type of a tensor by name."""
        return self._types[name]

    def fold_nodes(
        self, start: int, results: Iterable[str], *, int64: bool = False
    ) -> dict[str, Any]:
        """Evaluate the nodes from `start` on, which read only constants; remove them.

        Returns their results. With `int64`, integer results are evaluated in 64 bits.
        """
        nodes = tuple(self._nodes[start:])
        output_names = tuple(dict.fromkeys(results))
        written = self.written(start)
        names = {*written, *output_names, *(name for node in nodes for name in node.inputs)}
        types = {name: self._types[name] for name in names}
        constants = {name: self._constants[name] for name in names if name in self._constants}
        int64_names = self._int32_names(written) if int64 else frozenset[str]()
        graph = Graph(
            name=self.name,
            inputs=(),
            outputs=output_names,
            nodes=nodes,
            types=types,
            constants=constants,
            narrowed=int64_names,
        )
        values = evaluate(graph, {})
        del self._nodes[start:]
        for name in written:
            del self._types[name]
        self._numbers.clear()
        return values

    def written(self, start: int) -> list[str]:
        """Return the names of the tensors that the nodes from `start` on write."""
        return [name for node in self._nodes[start:] for name in node.outputs]

    def _int32_names(self, names: Iterable[str]) -> frozenset[str]:
        return frozenset(name for name in names if self._types[name].dtype == "int32")

    def mark_int64_results(self, start: int, others: Iterable[str] = ()) -> None:
        """Mark the int32 results of the nodes from `start` on, except `others`, as int64.

        They are int64 in the model; the graph computes them in 32 bits.
        """
        self._narrowed |= self._int32_names(self.written(start)).difference(others)

    def mark_int64_input(self, name: str) -> None:
        """Mark a graph input as int64 in the model."""
        self._narrowed.add(name)

    def build(self) -> Graph:
        """Return the verified graph."""
        return replace(super().build(), narrowed=frozenset(self._narrowed))

    @property
    def node_count(self) -> int:
        """The number of nodes so far."""
        return len(self._nodes)

    def rename_outputs(
        self, start: int, title: str, model_names: dict[str, str]
    ) -> dict[str, Value]:
        """Give tensors written by the nodes from `start` on the names that the model gives them.

        `model_names` maps present names to the model's; the result maps present names to the
        renamed values.
        The node that writes the first tensor is called `title`; the names of others begin with it.
        """
        written = set(self.written(start))
        # a model's HardSwish "act" may be several nodes: the one that writes the output is called
        # "act", another one "act/muls"
        new_names = {
            old_name: name for old_name, name in model_names.items() if old_name in written
        }
        if new_names:
            self._numbers.clear()
        for old_name, name in new_names.items():
            self._types[name] = self._types.pop(old_name)
            for names in (self._narrowed, self.boolean_names):
                if old_name in names:
                    names.remove(old_name)
                    names.add(name)
        main_name = next(iter(new_names), "")
        for position, node in enumerate(self._nodes[start:], start):
            node_title = title if main_name in node.outputs else f"{title}/{node.op}"
            node_title = kinds.free_name(node_title, self._titles)
            inputs = tuple(new_names.get(n, n) for n in node.inputs)
            outputs = tuple(new_names.get(n, n) for n in node.outputs)
            self._nodes[position] = Node(node_title, node.op, inputs, outputs, node.attrs)
        return {old_name: Value(name, self._types[name]) for old_name, name in new_names.items()}

    def copy(self, value: Value, name: str) -> Value:
        """Return a copy of a tensor with a new name, for an output that no node writes."""
        if not value.type.elements:  # nothing to copy, and reshape does not take empty tensors
            return self.add_constant(np.zeros(value.shape), value.type, name)
        title = kinds.free_name(name, self._titles)
        attrs = {"shape": value.shape}
        self._types[name] = value.type
        self._nodes.append(Node(title, "reshape", (value.name,), (name,), attrs))
        return Value(name, value.type)


class NeedsConstant(UnsupportedError):  # noqa: N818 - what it says, not that it failed
    """Raised if a shape, an axis or a bound depends on graph inputs: fix these and import again."""

    def __init__(self, where: str, names: tuple[str, ...]) -> None:
        """Build the message; `names` are the graph inputs whose values are needed."""
        self.names = names
        super().__init__(
            f"{where}: known before the graph runs",
            f"computed from graph input {', '.join(names)}",
            f"make it a constant, or pass its value: pinned={{{names[0]!r}: array}}",
        )


@dataclass(slots=True)
class Context:
    """One node during import: its inputs and attributes, and methods that append to the graph."""

    op: str
    name: str
    opset: int
    net: Builder
    inputs: Sequence[kinds.Tensor | None]
    attrs: Mapping[str, Any]
    out_count: int
    result: str
    """Element type of the outputs; a converter may set it."""
    folder: Path | None = None
    rebatch: tuple[int, int] | None = None
    """The batch that the model fixes, and the batch for which it is imported instead."""
    within: str = ""
    """The model's operator whose function body this node belongs to.

    Empty for a node of the model itself.
    """

    @property
    def where(self) -> str:
        """The node's name in messages."""
        inner = f", its {self.op}" if self.within else ""
        return f"node {self.name} ({self.within or self.op}){inner}"

    # -- inputs -----------------------------------------------------------------------------------
    def has(self, i: int) -> bool:
        """Tell whether input i is given; optional ones may be left out."""
        return i < len(self.inputs) and self.inputs[i] is not None

    def tensor(self, i: int) -> kinds.Tensor:
        """Return input i, in the graph or known; raise `GraphError` if it is missing."""
        tensor = self.inputs[i] if i < len(self.inputs) else None
        if tensor is None:
            raise GraphError(f"{self.where}: input {i}", "none", "the standard requires it")
        return tensor

    def shape(self, i: int) -> kinds.Shape:
        """Return the shape of input i."""
        return self.tensor(i).shape

    def elem(self, i: int) -> str:
        """Return the ONNX element type of input i, such as "float32" or "int64"."""
        return self.tensor(i).elem

    def input(self, i: int, dtype: str = "") -> Value:
        """Return input i as a value of the graph, cast to a number format if one is named."""
        return self.cast(self.value(self.tensor(i)), dtype)

    def in_one_format(self, *indices: int) -> list[Value]:
        """Return inputs (default: all) in one number format; those of booleans may differ."""
        values = [self.input(i) for i in indices or range(len(self.inputs))]
        # the boolean result of an fp16 comparison is stored as fp16, a boolean input as int32:
        # both are cast to int32
        formats = {v.type.dtype for v in values}
        if len(formats) > 1:
            if {self.elem(i) for i in indices or range(len(self.inputs))} != {"bool"}:
                self.unsupported("inputs of one type", ", ".join(sorted(formats)))
            return [self.cast(v, "int32") for v in values]
        return values

    def cast(self, value: Value, dtype: str) -> Value:
        """Return a value cast to `dtype`; the value itself if it has that format or it is ""."""
        if not dtype or value.type.dtype == dtype:
            return value
        return self.emit("cast", value, dtype=dtype)

    # -- known inputs -----------------------------------------------------------------------------
    def const(self, i: int) -> kinds.Values:
        """Return the values of input i; raise `NeedsConstant` if they depend on graph inputs."""
        tensor = self.tensor(i)
        if tensor.known is None:
            self.needs(i)
        if tensor.elements > MAX_CONSTANT_ELEMENTS:
            self.unsupported(
                f"input {i} of at most {MAX_CONSTANT_ELEMENTS} elements", str(tensor.shape)
            )
        return tensor.array()

    def needs(self, i: int) -> NoReturn:
        """Raise `NeedsConstant` for input i."""
        # a shape computed from inputs "h" and "w": both must be fixed; large inputs, such as
        # images, cannot be
        names = tuple(sorted(self.tensor(i).roots))
        types = [self.net.type_of(name) for name in names]
        if not names or any(t.elements > MAX_PINNED_ELEMENTS for t in types):
            self.unsupported(f"input {i} known before the graph runs", "computed from data")
        raise NeedsConstant(f"{self.where}: input {i}", names)

    def ints(self, i: int) -> tuple[int, ...]:
        """Return the integers of input i (axes, a shape, pads); for a scalar, one integer."""
        array = self.const(i)
        if array.dtype.kind not in "iu":
            raise GraphError(f"{self.where}: input {i} of whole numbers", str(array.dtype), "cast")
        return tuple(int(n) for n in array.ravel())

    def scalar(self, i: int) -> Any:
        """Return the single number of input i."""
        array = self.const(i)
        if array.size != 1:
            needed = f"{self.where}: input {i}: one number"
            raise GraphError(needed, f"shape {array.shape}", "give a single number")
        return array.reshape(()).item()

    # -- attributes -------------------------------------------------------------------------------
    def attr(self, key: str) -> Any:
        """Return an attribute or the standard's default; None if the opset has neither."""
        return self.attrs.get(key)

    # -- results and errors -----------------------------------------------------------------------
    def emit(self, op: str, *inputs: Value, **attrs: Any) -> Value:
        """Append a node of the operator library; return its (first) output."""
        return self.emit_all(op, *inputs, **attrs)[0]

    def emit_all(self, op: str, *inputs: Value, **attrs: Any) -> tuple[Value, ...]:
        """Append a node of the operator library; return its outputs."""
        values = self.net.add_node(op, *inputs, **attrs)
        return values if isinstance(values, tuple) else (values,)

    def value(self, tensor: kinds.Tensor) -> Value:
        """Return a tensor as a value of the graph; a known tensor becomes one constant."""
        if tensor.value is not None:
            return tensor.value
        assert tensor.known is not None
        dtype = kinds.FORMATS.get(tensor.elem)
        if dtype is None:
            self.unsupported(f"one of the types {', '.join(kinds.FORMATS)}", tensor.elem)
        # a weight that two nodes read is one constant
        emitted = self.net.emitted.get(id(tensor))
        if emitted is None:
            data = self._data(tensor.known, tensor)
            tensor_type = TensorType(tensor.shape, dtype)
            name = tensor.name or f"{self.name}/constant"
            emitted = (self.net.add_constant(data, tensor_type, name), tensor)
            self.net.emitted[id(tensor)] = emitted
        return emitted[0]

    def _data(self, data: kinds.Known, tensor: kinds.Tensor) -> Data:
        """Return constant data in the graph's format; raise an error for int64 beyond 32 bits.

        Small data are read now: passes look into arrays, but not into data that are read later.
        """
        if tensor.elem != "int64":
            is_small = callable(data) and tensor.elements <= MAX_PINNED_ELEMENTS
            return np.array(tensor.array()) if is_small else data
        if tensor.elements > MAX_CONSTANT_ELEMENTS * 16 and not isinstance(data, Fill):
            self.unsupported("int64 constants of at most 16 Mi elements", str(tensor.shape))
        array = np.array(data.value) if isinstance(data, Fill) else tensor.array()
        if range_text := kinds.beyond_32_bits(array):
            self.unsupported("int64 numbers that fit in 32 bits", range_text)
        return data if isinstance(data, Fill) else array.astype(np.int32)

    def known_tensor(self, array: Any, elem: str) -> kinds.Tensor:
        """Return a result that is known before the graph runs."""
        return kinds.known(array, elem)

    def constant_array(self, array: Any, dtype: str, name: str = "table") -> Value:
        """Return a constant of the graph with these numbers."""
        values = np.asarray(array).astype(numpy_type(dtype))
        return self.net.add_constant(values, TensorType(values.shape, dtype), f"{self.name}/{name}")

    def constant_scalar(self, value: float, dtype: str) -> Value:
        """Return a constant scalar."""
        return self.net.add_constant(np.array(value), TensorType((), dtype), f"{self.name}/number")

    # -- shapes -----------------------------------------------------------------------------------
    def axis(self, axis: int, rank: int) -> int:
        """Return an axis counted from 0; raise an error if the tensor does not have it."""
        if not -rank <= axis < rank:
            self.unsupported(f"an axis of a tensor of {rank} axes", str(axis))
        return axis % rank

    def reshape(self, x: Value, shape: kinds.Shape) -> Value:
        """Return x in another shape; x itself if it has that shape."""
        return x if x.shape == shape else self.emit("reshape", x, shape=shape)

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        """Return x with its axes permuted; x itself if their order stays."""
        order = tuple(int(p) for p in perm)
        return x if order == tuple(range(len(order))) else self.emit("transpose", x, perm=order)

    def part(self, x: Value, axis: int, begin: int, end: int) -> Value:
        """Return a range of one axis; x itself if that is all of it."""
        cut_axis = axis % len(x.shape)
        if (begin, end) == (0, x.shape[cut_axis]):
            return x
        # axis 1 of (8, 512, 4), 128 to 256: begin (0, 128, 0), end (8, 256, 4)
        begins = [0] * len(x.shape)
        ends = list(x.shape)
        begins[cut_axis] = begin
        ends[cut_axis] = end
        return self.emit("slice", x, begin=tuple(begins), end=tuple(ends))

    def choose(self, condition: Value, x: Value, y: Value) -> Value:
        """Return x where the condition (0 or 1, any format) holds, else y of x's format."""
        return self.emit("select", self.cast(condition, x.type.dtype), x, y)

    def arange_along(self, size: int, axis: int, rank: int) -> Value:
        """Return 0, 1, ... size - 1 along one axis of a tensor of `rank` axes, size 1 elsewhere."""
        # size 3, axis 1 of 3: 0, 1, 2 as (1, 3, 1), which broadcasts to tensors with 3 axes
        shape = tuple(size if i == axis else 1 for i in range(rank))
        return self.constant_array(np.arange(size).reshape(shape), "int32", "counting")

    def with_elem(self, value: Value, elem: str) -> kinds.Tensor:
        """Return a value as an output with an element type other than `result`."""
        roots = frozenset().union(*(t.roots for t in self.inputs if t))
        return kinds.Tensor(elem, value.shape, value, roots=roots)

    def unsupported(self, needed: str, got: str, remedy: str = "rewrite the model") -> NoReturn:
        """Raise `UnsupportedError` naming the node."""
        raise UnsupportedError(f"{self.where}: {needed}", got, remedy)


# -- converters ----------------------------------------------------------------------------------
Result = Value | kinds.Tensor
Convert = Callable[[Context], Result | Sequence[Result]]


@dataclass(frozen=True, slots=True)
class Converter:
    """The converter of one ONNX operator; its inputs and attributes are those of the standard.

    `types` are the element types of each input, the last also of all that follow; `result` is the
    element type of the outputs (None: that of the first input); `since` is the first opset.
    """

    op: str
    convert: Convert
    types: tuple[tuple[str, ...], ...] = (kinds.ALL_TYPES,)
    result: str | None = None
    since: int = 1


CONVERTERS: dict[str, Converter] = {}
"""The converters of all ONNX operators that can be imported, by operator."""


def converter(*names: str, **fields: Any) -> Callable[[Convert], Convert]:
    """Register a function as the converter of the operators `names`.

    `fields` are further fields of `Converter`.
    """

    def register(convert: Convert) -> Convert:
        for name in names:
            if name in CONVERTERS:
                raise InputError("an operator without converter", name, "register it once")
            CONVERTERS[name] = Converter(name, convert, **fields)
        return convert

    return register
