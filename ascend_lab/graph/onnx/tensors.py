"""Tensors while a model is imported: in the graph, or known before it runs.

ONNX element types by name, and the number format that stands for each in a graph: int64 narrows to
int32 (values are checked: see `Graph.narrowed`), bool is 0 or 1 in whatever format its producer
had.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ascend_lab.graph.builder import Value
from ascend_lab.graph.ir import Fill

Values = NDArray[Any]
Shape = tuple[int, ...]

ELEMENTS: dict[int, tuple[str, Any]] = {
    1: ("float32", np.float32),
    2: ("uint8", np.uint8),
    3: ("int8", np.int8),
    4: ("uint16", np.uint16),
    5: ("int16", np.int16),
    6: ("int32", np.int32),
    7: ("int64", np.int64),
    9: ("bool", np.bool_),
    10: ("float16", np.float16),
    11: ("double", np.float64),
    12: ("uint32", np.uint32),
    13: ("uint64", np.uint64),
    16: ("bfloat16", ml_dtypes.bfloat16),
}
"""Element type and NumPy type by their number in `TensorProto.DataType`."""
NUMPY: dict[str, np.dtype[Any]] = {name: np.dtype(kind) for name, kind in ELEMENTS.values()}
FORMATS = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int64": "int32",
    "int32": "int32",
    "int8": "int8",
    "uint8": "uint8",
    "bool": "int32",
}
"""Format in a graph; element types that are missing can be computed before it runs only."""
FLOATS = ("float32", "float16", "bfloat16")
NUMBERS = (*FLOATS, "int32", "int64")
"""Types a graph computes with; evaluation refuses int64 results that int32 does not hold."""
ANY = tuple(FORMATS)
EVERY = tuple(NUMPY)
"""Types a known tensor may have; those not in `ANY` must end before the graph runs."""
INTEGERS = ("int64", "int32")
BITS = ("int32", "int8", "uint8")
"""Types of whole numbers whose bits a graph holds: int64 does not fit."""
SMALL = 2**18
"""Most elements of a tensor that is computed while importing."""

Known = Values | Fill | Callable[[], Values]


@dataclass(frozen=True, slots=True)
class Limits:
    """What is refused before any work: larger files, longer models, larger tensors."""

    file_bytes: int = 2**31
    nodes: int = 20_000
    elements: int = 2**28
    operands: int = 4096


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the model: its type and either the graph's value or what is known of it.

    `roots` names the graph inputs it is computed from, `name` an initialiser.
    """

    elem: str
    shape: Shape
    value: Value | None = None
    known: Known | None = None
    roots: frozenset[str] = frozenset()
    name: str = ""

    @property
    def elements(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    def array(self) -> Values:
        """Return the values of a known tensor; a fill or a lazy one is made now."""
        if isinstance(self.known, Fill):
            return np.full(self.shape, self.known.value, NUMPY[self.elem])
        found = self.known() if callable(self.known) else self.known
        return np.asarray(found, NUMPY[self.elem]).reshape(self.shape)


def known(array: Any, elem: str | None = None) -> Tensor:
    """Return a tensor known before the graph runs; `elem` casts."""
    values = np.asarray(array, NUMPY[elem] if elem else None)
    name = elem or next(name for name, kind in NUMPY.items() if kind == values.dtype)
    return Tensor(name, values.shape, known=values)
