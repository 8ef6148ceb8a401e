"""Writes nodes and tensors of an ONNX graph under unique names, for the rules of `export`.

Each operator has a rule. It gets a `Site` (a node of the graph, with its inputs and types), emits
ONNX nodes, and returns the names they write. Operators that compute in a wider format than they
store (fp16 products summed in fp32, a factor that fp16 cannot hold) add casts.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.compiler.ir import TensorType
from ascend_lab.compiler.onnx.tensors import free_name
from ascend_lab.operators.ops.formats import numpy_type

if TYPE_CHECKING:
    import onnx

ONNX_TYPES = {
    "fp16": 10,
    "bf16": 16,
    "fp32": 1,
    "int8": 3,
    "uint8": 2,
    "int32": 6,
    "int64": 7,
    "bool": 9,
}
"""`TensorProto.DataType` of each format, and of int64 and bool, which graphs do not have."""


class Writer:
    """Collects nodes and initialisers; the nodes of one operator lie between begin and finish."""

    def __init__(self, taken: Collection[str]) -> None:
        from onnx import helper  # imported here, as users of the rules alone need no onnx

        self._onnx = helper
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self._names = set(taken)
        self._known: dict[tuple[Any, ...], str] = {}
        self._title = ""
        self._start = 0

    def begin(self, title: str) -> None:
        """Start the nodes of one operator, named after it."""
        self._title, self._start = title, len(self.nodes)

    def emit(self, op: str, *inputs: str, outputs: int = 1, **attrs: Any) -> tuple[str, ...]:
        """Append an ONNX node; return the names of its outputs."""
        names = tuple(free_name(f"{self._title}/{op}", self._names) for _ in range(outputs))
        self.nodes.append(self._onnx.make_node(op, list(inputs), list(names), names[0], **attrs))
        return names

    def finish(self, written_names: Sequence[str], tensor_names: Sequence[str]) -> None:
        """Rename what the nodes since `begin` write, `written_names`, to `tensor_names`."""
        # a rule of two nodes, Sqrt and Reciprocal: the output of the last one gets the name of the
        # graph's tensor
        new_nodes = self.nodes[self._start :]
        new_names = {name for node in new_nodes for name in node.output}
        for name, target in zip(written_names, tensor_names, strict=True):
            if name not in new_names:
                self.nodes.append(self._onnx.make_node("Identity", [name], [target], target))
                continue
            # inputs, too: later nodes of the rule read the renamed tensor
            for node in new_nodes:
                node.input[:] = [target if n == name else n for n in node.input]
                node.output[:] = [target if n == name else n for n in node.output]
        for name in new_names.intersection(written_names):
            # the replaced names are no longer used: they are free again
            self._names.discard(name)

    def tensor(self, name: str, array: np.ndarray, dtype: str) -> None:
        """Add an initialiser: the array's bytes, little-endian."""
        data = np.ascontiguousarray(array).tobytes()
        kind = ONNX_TYPES[dtype]
        self.tensors.append(self._onnx.make_tensor(name, kind, array.shape, data, raw=True))

    def fill(self, name: str, kind: TensorType, value: float) -> None:
        """Add a ConstantOfShape node that makes a tensor with one number everywhere."""
        # one stored number instead of millions: a fill of (4096, 4096) takes a few bytes
        element = np.full((1,), value, numpy_type(kind.dtype)).tobytes()
        number = self._onnx.make_tensor("value", ONNX_TYPES[kind.dtype], (1,), element, raw=True)
        shape = self.ints(kind.shape)
        node = self._onnx.make_node("ConstantOfShape", [shape], [name], name, value=number)
        self.nodes.append(node)

    def number(self, value: float | Sequence[float], dtype: str) -> str:
        """Return the name of an initialiser, a scalar or a list; equal ones are shared."""
        kind = np.dtype(np.int64) if dtype == "int64" else numpy_type(dtype)
        return self._shared(np.asarray(value).astype(kind), dtype)

    def ints(self, values: Sequence[int]) -> str:
        """Return the name of an int64 initialiser: a shape, axes or bounds."""
        return self._shared(np.asarray(values, np.int64).reshape(-1), "int64")

    def _shared(self, array: np.ndarray, dtype: str) -> str:
        # the key has the bytes, as 0.0 and -0.0 compare equal
        key = (dtype, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = free_name(f"{dtype}_constant", self._names)
            self.tensor(self._known[key], array, dtype)
        return self._known[key]


NARROW = ("fp16", "bf16")
Result = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """One node being exported: the writer, the node's inputs, outputs, types and attributes."""

    op: str
    writer: Writer
    inputs: tuple[str, ...]
    in_types: tuple[TensorType, ...]
    out_types: tuple[TensorType, ...]
    attrs: dict[str, Any]

    def one(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Append a node with one output; return the output's name."""
        return self.writer.emit(op, *inputs, **attrs)[0]

    @property
    def dtype(self) -> str:
        """Format of the first input."""
        return self.in_types[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first input."""
        return self.in_types[0].shape

    def cast(self, name: str, dtype: str) -> str:
        """Append a Cast of a tensor to a format; return the result's name."""
        return self.one("Cast", name, to=ONNX_TYPES[dtype])

    def in_fp32(self) -> list[str]:
        """Return the names of the inputs; those in fp16 or bf16 are cast to fp32."""
        return [
            self.cast(name, "fp32") if kind.dtype in NARROW else name
            for name, kind in zip(self.inputs, self.in_types, strict=True)
        ]

    def factors(self) -> list[str]:
        """Return the inputs, cast to fp32 if an fp16 or bf16 product has an fp32 result."""
        # ONNX's MatMul of fp16 gives fp16: for fp32 sums the factors are cast first
        grows = self.dtype in NARROW and self.out_types[0].dtype == "fp32"
        return self.in_fp32() if grows else list(self.inputs)

    def from_fp32(self, name: str) -> str:
        """Return an fp32 tensor cast to the node's output format."""
        dtype = self.out_types[0].dtype
        return name if dtype == "fp32" else self.cast(name, dtype)


Rule = Callable[[Site], Result]
RULES: dict[str, Rule] = {}
"""The rule of each operator; add your own for operators you register."""


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register a rule under the names of operators."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, function))
        return function

    return add
