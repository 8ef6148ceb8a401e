"""Tensors while a model is imported: in the graph, or known before it runs.

ONNX element types by name, and the number format that stands for each in a graph: int64 narrows to
int32 (values are checked: see `Graph.narrowed`), bool is 0 or 1 in whatever format its producer
had.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import Fill
from ascend_lab.sim.values import numpy_type

if TYPE_CHECKING:
    from onnx import TensorProto


Values = NDArray[Any]
Shape = tuple[int, ...]

ELEMENTS: dict[int, tuple[str, Any]] = {
    1: ("float32", np.float32), 2: ("uint8", np.uint8), 3: ("int8", np.int8),
    4: ("uint16", np.uint16), 5: ("int16", np.int16), 6: ("int32", np.int32),
    7: ("int64", np.int64), 9: ("bool", np.bool_), 10: ("float16", np.float16),
    11: ("double", np.float64), 12: ("uint32", np.uint32), 13: ("uint64", np.uint64),
}  # fmt: skip
"""Element type and NumPy type by their number in `TensorProto.DataType`."""
with suppress(ImportError):  # a browser may lack ml_dtypes: such files are refused there
    ELEMENTS[16] = ("bfloat16", numpy_type("bf16"))
NUMPY: dict[str, np.dtype[Any]] = {name: np.dtype(kind) for name, kind in ELEMENTS.values()}
FORMATS = {
    "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int64": "int32", "int32": "int32",
    "int8": "int8", "uint8": "uint8", "bool": "int32",
}  # fmt: skip
"""Format in a graph; element types that are missing can be computed before it runs only."""
FLOATS = ("float32", "float16", "bfloat16")
NUMBERS = (*FLOATS, "int32", "int64")
"""Types a graph computes with; evaluation refuses int64 results that int32 does not hold."""
WHOLE = (*NUMBERS, "int8", "uint8")
"""Types of arithmetic and comparisons."""
ANY = tuple(FORMATS)
EVERY = tuple(NUMPY)
"""Types a known tensor may have; those not in `ANY` must end before the graph runs."""
INTEGERS = ("int64", "int32")
BITS = ("int32", "int8", "uint8")
"""Types of whole numbers whose bits a graph holds: int64 does not fit."""
SMALL = 2**18
"""Most elements of a tensor that is computed while importing."""


def in_type(values: Any, kind: str) -> Any:
    """Return an array in an ONNX element type, such as an output's."""
    if kind == "bool":
        return np.asarray(values) != 0
    return np.asarray(values).astype(NUMPY.get(kind, np.asarray(values).dtype), copy=False)


def beyond_32_bits(array: Values) -> str:
    """Return the range of whole numbers that 32 bits do not hold; "" where they do."""
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 4 or not array.size:
        return ""
    low, high = int(array.min()), int(array.max())
    return f"{low} .. {high}" if low < -(2**31) or high >= 2**31 else ""


def free_name(wanted: str, taken: set[str]) -> str:
    """Return `wanted`, with a number behind it if it is taken, and take it."""
    name, number = wanted, 0
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    taken.add(name)
    return name


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

    def mapped(self, shape: Shape, change: Callable[[Values], Values]) -> Tensor:
        """Return a known tensor moved or cut; a fill stays one, a lazy one is read when needed."""
        known: Known
        if isinstance(self.known, Fill):
            known = self.known
        elif callable(self.known):
            known = lambda: change(self.array())  # noqa: E731
        else:
            known = change(self.array())
        return Tensor(self.elem, shape, known=known)


def known(array: Any, elem: str | None = None) -> Tensor:
    """Return a tensor known before the graph runs; `elem` casts."""
    values = np.asarray(array, NUMPY[elem] if elem else None)
    name = elem or next(name for name, kind in NUMPY.items() if kind == values.dtype)
    return Tensor(name, values.shape, known=values)


# -- stored tensors: checked now, read when asked for ---------------------------------------------
_FIELDS = {"float32": "float_data", "double": "double_data", "int64": "int64_data"}
_FIELDS |= {"uint32": "uint64_data", "uint64": "uint64_data"}
"""Field that holds numbers outside `raw_data`; all other types use `int32_data`."""
EXTERNAL = 1


def tensor_of(proto: TensorProto, folder: Path | None, limits: Limits) -> Tensor:
    """Return a stored tensor, its size checked; its values are read when asked for.

    Raises `InputError` for sizes that do not fit, `UnsupportedError` for element types.
    """
    where = f"tensor {proto.name or '(unnamed)'}"
    if proto.data_type not in ELEMENTS:
        raise UnsupportedError(f"{where}: a numeric type", f"type {proto.data_type}", "cast it")
    elem = ELEMENTS[proto.data_type][0]
    shape = tuple(int(n) for n in proto.dims)
    check_size(where, shape, limits)
    if proto.HasField("segment"):
        raise UnsupportedError(f"{where}: in one piece", "a segment", "store it whole")
    if proto.data_location == EXTERNAL:
        return Tensor(elem, shape, known=_External(proto, folder).read, name=proto.name)
    count = math.prod(shape)
    if proto.HasField("raw_data"):
        got, needed = len(proto.raw_data), count * NUMPY[elem].itemsize
    else:
        got, needed = len(getattr(proto, _FIELDS.get(elem, "int32_data"))), count
    if got != needed:
        wanted = f"{where}: {needed} bytes or numbers for {shape} of {elem}"
        raise InputError(wanted, str(got), "export again")

    def made() -> Values:
        from onnx import numpy_helper

        return numpy_helper.to_array(proto)

    return Tensor(elem, shape, known=made, name=proto.name)


def check_size(where: str, shape: tuple[int, ...], limits: Limits) -> None:
    """Raise `InputError` for negative sizes, `UnsupportedError` for too many elements."""
    if any(n < 0 for n in shape) or len(shape) > 16:
        raise InputError(f"{where}: sizes of at least 0", str(shape)[:80], "mend the model")
    if math.prod(shape) > limits.elements:
        needed = f"{where}: at most {limits.elements} elements"
        raise UnsupportedError(needed, str(shape)[:80], "use smaller tensors")


class _External:
    """A tensor in a file beside the model; the constructor checks, `read` maps the file.

    Read is from the folder of the model only: no absolute path, no way up, no link out.
    """

    def __init__(self, proto: TensorProto, folder: Path | None) -> None:
        self.kind, self.shape = NUMPY[ELEMENTS[proto.data_type][0]], tuple(proto.dims)
        entries = {entry.key: entry.value for entry in proto.external_data}
        where = f"external data of {proto.name}"
        if folder is None:
            raise InputError(f"{where}: a model file", "bytes or a proto", "pass the file's path")
        self.path = _inside(where, folder, entries.get("location", ""))
        self.size_bytes = math.prod(self.shape) * self.kind.itemsize
        self.offset = _number(where, entries.get("offset", "0"))
        length = _number(where, entries.get("length", str(self.size_bytes)))
        there = self.path.stat().st_size
        if length != self.size_bytes or self.offset + length > there:
            needed = f"{where}: {self.size_bytes} bytes from {self.offset} on in {self.path.name}"
            got = f"length {length} in a file of {there}"
            raise InputError(needed, got, "copy the whole data file beside the model")

    def read(self) -> Values:
        if not self.size_bytes:
            return np.zeros(self.shape, self.kind)
        try:
            flat: Values = np.memmap(self.path, np.uint8, "r", self.offset, (self.size_bytes,))
        except (OSError, ValueError) as error:
            raise InputError(f"{self.path}: readable", str(error), "check the file") from None
        return np.frombuffer(flat, self.kind).reshape(self.shape)


def _number(where: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InputError(f"{where}: offset and length in bytes", repr(text)[:40], "export again")
    return int(text)


def _inside(where: str, folder: Path, location: str) -> Path:
    """Return the file; raise `InputError` unless it lies in the model's folder, links resolved."""
    relative, needed = Path(location), f"{where}: a file in the model's folder"
    bad = not location or "\0" in location or relative.is_absolute() or ".." in relative.parts
    if bad or location[:1] == "\\" or ":" in location[:2]:
        raise InputError(needed, repr(location)[:80], "move it")
    path = (folder / relative).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise InputError(needed, f"a link to {path}", "copy it")
    if not path.is_file():
        raise InputError(f"{where}: a file {location} beside the model", "none", "copy it there")
    return path
