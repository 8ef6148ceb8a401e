"""What a converter sees of its node: inputs, attributes with defaults, the graph being built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ascend_lab.errors import GraphError, UnsupportedError
from ascend_lab.graph.builder import Value
from ascend_lab.graph.ir import Data, Fill, TensorType
from ascend_lab.graph.onnx.names import Builder
from ascend_lab.graph.onnx.tensors import FORMATS, NUMPY, Known, Limits, Shape, Tensor, Values

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

    @property
    def where(self) -> str:
        """The node as messages name it."""
        return f"node {self.name} ({self.op})"

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

    def number(self, value: float, dtype: str) -> Value:
        """Return a constant scalar."""
        kind = TensorType((), dtype)
        return self.net.lasting(np.array(value), kind, f"{self.name}/number")

    def unsupported(self, needed: str, got: str, remedy: str = "rewrite the model") -> NoReturn:
        """Raise `UnsupportedError` naming the node."""
        raise UnsupportedError(f"{self.where}: {needed}", got, remedy)
