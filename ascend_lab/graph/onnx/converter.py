"""What a converter sees of its node: inputs, attributes with defaults, the graph being built."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ascend_lab.errors import GraphError, InputError, UnsupportedError
from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import Data, Fill, TensorType
from ascend_lab.graph.onnx.names import Builder
from ascend_lab.graph.onnx.tensors import (
    EVERY,
    FORMATS,
    NUMPY,
    Known,
    Limits,
    Shape,
    Tensor,
    Values,
)
from ascend_lab.ops.formats import numpy_type

if TYPE_CHECKING:
    from onnx import AttributeProto, NodeProto


STEERING = 1024
"""Most elements of a graph input whose values may be asked for while importing."""
CONSTANT = 2**20
"""Most elements of a constant whose values a converter may ask for."""


class NeedsConstant(UnsupportedError):  # noqa: N818 - what it says, not that it failed
    """A shape, an axis or a bound is computed from graph inputs: import again with them pinned."""

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
    """One node during import."""

    op: str
    name: str
    opset: int
    net: Builder
    inputs: Sequence[Tensor | None]
    attrs: Mapping[str, Any]
    out_count: int
    result: str
    """Element type of the outputs; a converter may set it."""
    limits: Limits
    folder: Path | None = None
    rebatch: tuple[int, int] | None = None
    """The batch the model fixes, and the one it is imported with instead."""
    within: str = ""
    """The operator of the model whose function's body the node is of."""

    @property
    def where(self) -> str:
        """The node as messages name it."""
        inner = f", its {self.op}" if self.within else ""
        return f"node {self.name} ({self.within or self.op}){inner}"

    # -- inputs -----------------------------------------------------------------------------------
    def has(self, i: int) -> bool:
        """Tell whether input i is given; optional ones may be left out."""
        return i < len(self.inputs) and self.inputs[i] is not None

    def tensor(self, i: int) -> Tensor:
        """Return input i, in the graph or known; raise `GraphError` if it is left out."""
        found = self.inputs[i] if i < len(self.inputs) else None
        if found is None:
            raise GraphError(f"{self.where}: input {i}", "none", "the standard requires it")
        return found

    def shape(self, i: int) -> Shape:
        """Return the shape of input i."""
        return self.tensor(i).shape

    def elem(self, i: int) -> str:
        """Return the ONNX element type of input i, such as "float32" or "int64"."""
        return self.tensor(i).elem

    def input(self, i: int, dtype: str = "") -> Value:
        """Return input i as a value of the graph, cast to a number format if one is named."""
        return self.cast(self.value(self.tensor(i)), dtype)

    def optional(self, i: int, dtype: str = "") -> Value | None:
        """Return input i as a value of the graph, None if it is left out."""
        return self.input(i, dtype) if self.has(i) else None

    def alike(self, *which: int) -> list[Value]:
        """Return inputs (default: all) in one number format: booleans may differ in theirs."""
        values = [self.input(i) for i in which or range(len(self.inputs))]
        formats = {v.type.dtype for v in values}
        if len(formats) > 1:
            if {self.elem(i) for i in which or range(len(self.inputs))} != {"bool"}:
                self.unsupported("inputs of one type", ", ".join(sorted(formats)))
            return [self.cast(v, "int32") for v in values]
        return values

    def cast(self, value: Value, dtype: str) -> Value:
        """Return a value in a number format; the value itself if it has it or none is named."""
        if not dtype or value.type.dtype == dtype:
            return value
        return self.emit("cast", value, dtype=dtype)

    # -- known inputs -----------------------------------------------------------------------------
    def const(self, i: int) -> Values:
        """Return the values of input i; raise `NeedsConstant` if graph inputs decide them."""
        tensor = self.tensor(i)
        if tensor.known is None:
            self.needs(i)
        if tensor.elements > CONSTANT:
            self.unsupported(f"input {i} of at most {CONSTANT} elements", str(tensor.shape))
        return tensor.array()

    def needs(self, i: int) -> NoReturn:
        """Raise `NeedsConstant` for input i."""
        names = tuple(sorted(self.tensor(i).roots))
        types = [self.net.type_of(name) for name in names]
        if not names or any(t.elements > STEERING for t in types):
            self.unsupported(f"input {i} known before the graph runs", "computed from data")
        raise NeedsConstant(f"{self.where}: input {i}", names)

    def ints(self, i: int) -> tuple[int, ...]:
        """Return the whole numbers of input i (axes, a shape, pads), a scalar as one."""
        array = self.const(i)
        if array.dtype.kind not in "iu":
            raise GraphError(f"{self.where}: input {i} of whole numbers", str(array.dtype), "cast")
        return tuple(int(n) for n in array.ravel())

    def scalar(self, i: int) -> Any:
        """Return the single number of input i."""
        array = self.const(i)
        if array.size != 1:
            raise GraphError(f"{self.where}: input {i}: one number", f"shape {array.shape}", "mend")
        return array.reshape(()).item()

    # -- attributes -------------------------------------------------------------------------------
    def attr(self, key: str) -> Any:
        """Return an attribute, as given or the standard's default; None if the opset has none."""
        return self.attrs.get(key)

    # -- results and refusals ---------------------------------------------------------------------
    def emit(self, op: str, *inputs: Value, **attrs: Any) -> Value:
        """Append a node of the operator library; return its (first) output."""
        return self.emit_all(op, *inputs, **attrs)[0]

    def emit_all(self, op: str, *inputs: Value, **attrs: Any) -> tuple[Value, ...]:
        """Append a node of the operator library; return its outputs."""
        found = self.net.add_node(op, *inputs, **attrs)
        return found if isinstance(found, tuple) else (found,)

    def value(self, tensor: Tensor) -> Value:
        """Return a tensor as a value of the graph; a known one becomes a constant, once."""
        if tensor.value is not None:
            return tensor.value
        assert tensor.known is not None
        dtype = FORMATS.get(tensor.elem)
        if dtype is None:
            self.unsupported(f"one of the types {', '.join(FORMATS)}", tensor.elem)
        found = self.net.emitted.get(id(tensor))
        if found is None:
            data, kind = self._data(tensor.known, tensor), TensorType(tensor.shape, dtype)
            made = self.net.lasting(data, kind, tensor.name or f"{self.name}/constant")
            found = self.net.emitted[id(tensor)] = (made, tensor)
        return found[0]

    def _data(self, data: Known, tensor: Tensor) -> Data:
        """Return constant data in the graph's format; int64 beyond 32 bits is refused.

        Small data are read now: passes see the numbers of arrays, not of what is read later.
        """
        if tensor.elem != "int64":
            small = callable(data) and tensor.elements <= STEERING
            return np.array(tensor.array()) if small else data
        if tensor.elements > CONSTANT * 16 and not isinstance(data, Fill):
            self.unsupported("int64 constants of at most 16 Mi elements", str(tensor.shape))
        array = np.array(data.value) if isinstance(data, Fill) else tensor.array()
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        if low < -(2**31) or high >= 2**31:
            self.unsupported("int64 numbers that fit in 32 bits", f"{low} .. {high}")
        return data if isinstance(data, Fill) else array.astype(np.int32)

    def known(self, array: Any, elem: str) -> Tensor:
        """Return a result that is known before the graph runs."""
        values = np.asarray(array, NUMPY[elem])
        return Tensor(elem, values.shape, known=values)

    def table(self, array: Any, dtype: str, name: str = "table") -> Value:
        """Return a constant of the graph with these numbers."""
        values = np.asarray(array).astype(numpy_type(dtype))
        return self.net.lasting(values, TensorType(values.shape, dtype), f"{self.name}/{name}")

    def number(self, value: float, dtype: str) -> Value:
        """Return a constant scalar."""
        return self.net.lasting(np.array(value), TensorType((), dtype), f"{self.name}/number")

    # -- shapes -----------------------------------------------------------------------------------
    def axis(self, axis: int, rank: int) -> int:
        """Return an axis counted from 0; refuse one the tensor does not have."""
        if not -rank <= axis < rank:
            self.unsupported(f"an axis of a tensor of {rank} axes", str(axis))
        return axis % rank

    def reshape(self, x: Value, shape: Shape) -> Value:
        """Return x in another shape; itself if it has it."""
        return x if x.shape == shape else self.emit("reshape", x, shape=shape)

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        """Return x with its axes permuted; itself if none moves."""
        order = tuple(int(p) for p in perm)
        return x if order == tuple(range(len(order))) else self.emit("transpose", x, perm=order)

    def part(self, x: Value, axis: int, begin: int, end: int) -> Value:
        """Return a range of one axis; x itself if that is all of it."""
        axis %= len(x.shape)
        if (begin, end) == (0, x.shape[axis]):
            return x
        low, high = [0] * len(x.shape), list(x.shape)
        low[axis], high[axis] = begin, end
        return self.emit("slice", x, begin=tuple(low), end=tuple(high))

    def choose(self, condition: Value, x: Value, y: Value) -> Value:
        """Return x where the condition (0 or 1, any format) holds, else y of x's format."""
        return self.emit("select", self.cast(condition, x.type.dtype), x, y)

    def counting(self, size: int, axis: int, rank: int) -> Value:
        """Return 0, 1, ... size - 1 along one axis of a tensor of `rank` axes, size 1 elsewhere."""
        shape = tuple(size if i == axis else 1 for i in range(rank))
        return self.table(np.arange(size).reshape(shape), "int32", "counting")

    def typed(self, value: Value, elem: str) -> Tensor:
        """Return an output of an element type of its own."""
        roots = frozenset().union(*(t.roots for t in self.inputs if t))
        return Tensor(elem, value.shape, value, roots=roots)

    def unsupported(self, needed: str, got: str, remedy: str = "rewrite the model") -> NoReturn:
        """Raise `UnsupportedError` naming the node."""
        raise UnsupportedError(f"{self.where}: {needed}", got, remedy)


# How nodes of one ONNX operator enter a graph, and the table of all that can.


Result = Value | Tensor
Convert = Callable[["Context"], Result | Sequence[Result]]
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


def converter(
    *names: str,
    types: tuple[tuple[str, ...], ...] = (EVERY,),
    result: str | None = None,
    since: int = 1,
) -> Callable[[Convert], Convert]:
    """Register a function as the converter of the operators `names`."""

    def register(convert: Convert) -> Convert:
        for name in names:
            if name in CONVERTERS:
                raise InputError("an operator without converter", name, "register it once")
            CONVERTERS[name] = Converter(name, convert, types, result, since)
        return convert

    return register


# What the standard says of a node: its operator's inputs and attributes, read and checked.


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
        raise UnsupportedError(
            f"{where}: one of {len(CONVERTERS)} operators of the standard", name, remedy
        )
    says = signature(node.op_type, opset)
    if opset < found.since or says is None:
        raise UnsupportedError(
            f"{where} ({node.op_type}): operators of version {found.since} to {NEWEST_OPSET}",
            f"opset {opset}",
            "convert the model to a newer opset",
        )
    if not says.least <= len(node.input) <= says.most:
        raise UnsupportedError(
            f"{where} ({node.op_type}): {says.least} to {says.most} inputs",
            str(len(node.input)),
            "",
        )
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
        present = [n for n, field in _FIELDS.items() if _present(attribute, field)]
        kind = present[0] if len(present) == 1 else 0
    field = _FIELDS.get(kind)
    if field is None:
        raise UnsupportedError(f"{where}: {attribute.name}: numbers, text or a tensor", str(kind))
    value = getattr(attribute, field)
    return kind, tuple(map(_text, value)) if field in _LISTS else _text(value)


def read(attribute: AttributeProto, where: str) -> Any:
    """Return the value of an attribute."""
    return read_with_kind(attribute, where)[1]


def _present(attribute: AttributeProto, field: str) -> bool:
    if field in _LISTS:
        return bool(len(getattr(attribute, field)))
    return bool(attribute.HasField(field))


def _text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
