"""Converts arrays to and from the tensors of requests and answers, in JSON or in bytes.

A `Port` is one input or output of a model in the terms of KServe v2. It converts a tensor

    {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [[1, 2, 3], [4, 5, 6]]}

into an array, or refuses it. `data` is flat, row after row, or nested exactly as `shape` says: 3
lists of 2 numbers are refused for shape [2, 3].

Bytes are little endian, row after row, without gaps; a BOOL is one byte, 0 or 1.

Lists are read and written in chunks of `CHUNK_NUMBERS` numbers. Between two chunks Python lets
other threads run, so that a long tensor does not delay all other requests.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from ascend_lab.compiler.onnx.tensors import MAX_ELEMENTS, NUMPY
from ascend_lab.errors import InputError
from ascend_lab.limits import shown

Arrays = dict[str, np.ndarray]
DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "double": "FP64",
    "bfloat16": "BF16",
    "string": "BYTES",
}
"""KServe's name of each ONNX element type."""
TEXT = "string"
"""The element type of texts, which the metadata list but the server does not accept."""
CHUNK_NUMBERS = 2**14
"""Numbers of a list that are read or written at once, in about 2 ms."""

BOOLEANS = "true and false"
INTEGERS = "whole numbers"
FRACTIONS = "fractions"
TEXTS = "values, text among them"
VALUE_NAMES = {bool: BOOLEANS, int: INTEGERS, float: FRACTIONS, str: TEXTS}
"""Python type -> the name of such values in messages."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a model: its name, ONNX element type and shape (-1: any size).

    If it is `batched`, the first size is the number of rows of a batch.
    """

    name: str
    element: str
    shape: tuple[int, ...]
    batched: bool

    @property
    def datatype(self) -> str:
        """KServe's name of the element type."""
        return DATATYPES[self.element]

    def described(self) -> dict[str, Any]:
        """Return name, datatype and shape as in the protocol's metadata."""
        shape = [-1, *self.shape[1:]] if self.batched else list(self.shape)
        return {"name": self.name, "datatype": self.datatype, "shape": shape}

    def read(
        self, tensor: Mapping[str, Any], max_rows: int, binary: memoryview | None = None
    ) -> np.ndarray:
        """Return the array of a request's tensor, with values from its `data` or from `binary`.

        Raises `InputError` if datatype, shape or values do not fit this port.
        """
        self.refuse_text("input")
        if tensor.get("datatype") != self.datatype:
            got = shown(tensor.get("datatype"))
            raise InputError(f"input {shown(self.name)}: datatype {self.datatype}", got)
        shape = self._shape_of(tensor.get("shape"), max_rows)
        if binary is not None:
            return self.from_bytes(binary, shape)
        return self._from_json(tensor.get("data"), shape)

    def refuse_text(self, what: str) -> None:
        """Raise `InputError` if this is a tensor of texts."""
        if self.element == TEXT:
            needed = f"{what} {shown(self.name)}: a tensor of numbers"
            raise InputError(needed, "BYTES, which is not served", "use `ascend-lab run`")

    def _shape_of(self, stated_shape: object, max_rows: int) -> tuple[int, ...]:
        """Return a request's shape; raises `InputError` if the model does not accept it."""
        sizes: list[int] = []
        if isinstance(stated_shape, list):
            # isinstance(True, int) holds, so `isinstance` would accept true as 1.
            sizes = [
                size for size in stated_shape if type(size) is int and 0 <= size <= MAX_ELEMENTS
            ]
        fits = isinstance(stated_shape, list) and len(sizes) == len(stated_shape) == len(self.shape)
        expected = self.described()["shape"]
        fits = fits and all(
            open_size in (-1, size) for open_size, size in zip(expected, sizes, strict=True)
        )
        if not fits or (self.batched and not 1 <= sizes[0] <= max_rows):
            hint = f" (at most {max_rows} in the first)" if self.batched else ""
            raise InputError(
                f"input {shown(self.name)}: shape {expected}{hint}", shown(stated_shape)
            )
        return tuple(sizes)

    # -- JSON -------------------------------------------------------------------------------------
    def _from_json(self, data: object, shape: tuple[int, ...]) -> np.ndarray:
        """Return the array of a list of numbers, converted chunk by chunk."""
        values = self._flat(data, shape)
        array = np.empty(len(values), NUMPY[self.element])
        for start in range(0, len(values), CHUNK_NUMBERS):
            piece = values[start : start + CHUNK_NUMBERS]
            array[start : start + CHUNK_NUMBERS] = self._converted(piece)
        return array.reshape(shape)

    def _flat(self, data: object, shape: tuple[int, ...]) -> list[Any]:
        """Return the values row by row; raise `InputError` for a wrong count, nesting or type."""
        name = shown(self.name)
        value_count = math.prod(shape)
        needed = f"input {name}: data, a list of {value_count} {self._accepted_values_name()}"
        # A tensor without axes has one value, which may be given without a list.
        if shape == () and not isinstance(data, list):
            data = [data]
        if not isinstance(data, list):
            raise InputError(needed, shown(data))
        values = data
        if any(type(value) is list for value in data):
            nested = flatten_nested(data, shape)
            if nested is None:
                expected = f"input {name}: data flat, or nested as shape {list(shape)} says"
                raise InputError(expected, describe_nesting(data))
            values = nested
        kinds = set(map(type, values))
        if len(values) != value_count or not kinds <= self._accepted_types():
            raise InputError(needed, describe_values(values, kinds) or shown(data))
        return values

    def _accepted_types(self) -> set[type]:
        """Return the Python types of JSON values that the element type accepts."""
        kind = NUMPY[self.element].kind
        if kind == "b":
            return {bool}
        # JSON's 1.0 is refused for integers, but 1 is accepted for floating-point types.
        return {int} if kind in "iu" else {int, float}

    def _accepted_values_name(self) -> str:
        """Return the name of the accepted values for messages."""
        kind = NUMPY[self.element].kind
        if kind == "b":
            return BOOLEANS
        return INTEGERS if kind in "iu" else "numbers"

    def _converted(self, piece: list[Any]) -> np.ndarray:
        """Return some values in the element type; raises `InputError` if they exceed its range."""
        numpy_type = NUMPY[self.element]
        if numpy_type.kind == "b":
            return np.array(piece, numpy_type)
        if numpy_type.kind in "iu":
            # Checked first, as some versions of NumPy wrap 300 to 44 in UINT8.
            limits = np.iinfo(numpy_type)
            low = min(piece)
            high = max(piece)
            if low < limits.min or high > limits.max:
                raise self._range_error(f"{low} .. {high}"[:80])
            return np.array(piece, numpy_type)
        try:
            # Converted through 64 bits: that 70000 exceeds FP16 is visible only afterwards.
            wide = np.array(piece, np.float64)
        except OverflowError:
            raise self._range_error("a whole number of too many digits") from None
        with np.errstate(all="ignore"):
            array = wide.astype(numpy_type)
            overflowed = ~np.isfinite(array.astype(np.float64))
        if overflowed.any():
            raise self._range_error(f"{wide[overflowed][0]:g}")
        return array

    def _range_error(self, got: str) -> InputError:
        """Return the error for a value outside the range of the element type."""
        return InputError(f"input {shown(self.name)}: values that {self.datatype} holds", got)

    # -- bytes ------------------------------------------------------------------------------------
    def from_bytes(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        """Return the array of some bytes; raises `InputError` for a wrong number of them."""
        numpy_type = NUMPY[self.element]
        size_bytes = math.prod(shape) * numpy_type.itemsize
        name = shown(self.name)
        if len(data) != size_bytes:
            needed = f"input {name}: {size_bytes} bytes for shape {list(shape)} in {self.datatype}"
            raise InputError(needed, str(len(data)))
        if numpy_type.kind == "b":
            # NumPy takes any byte except 0 as true; the protocol allows only 0 and 1.
            flags = np.frombuffer(data, np.uint8)
            if flags.size and flags.max() > 1:
                raise InputError(f"input {name}: bytes 0 and 1 in BOOL", str(flags.max()))
            return flags.astype(numpy_type).reshape(shape)
        # A copy is aligned and writable; a view of the body is neither.
        array = np.frombuffer(data, numpy_type).copy()
        return swap_if_big_endian(array).reshape(shape)


def describe_values(values: list[Any], kinds: set[type]) -> str:
    """Return number and type of a list's values in words, or "" for lists and objects in it."""
    # The widest type stands for all: [1, 2.5] is "2 fractions", [1, "a"] "2 values, text among
    # them".
    for kind in (str, float, int, bool):
        if kind in kinds and kinds <= VALUE_NAMES.keys():
            return f"{len(values)} {VALUE_NAMES[kind]}"
    return "" if kinds else "0 values"


def flatten_nested(data: list[Any], shape: tuple[int, ...]) -> list[Any] | None:
    """Return the values of nested lists row after row, or None if the nesting is not the shape."""
    # Level by level: [[1, 2], [3, 4]] -> [1, 2], [3, 4] -> 1, 2, 3, 4.
    level: list[Any] = [data]
    for size in shape:
        if not all(type(entry) is list and len(entry) == size for entry in level):
            return None
        level = list(chain.from_iterable(level))
    return level


def describe_nesting(data: object) -> str:
    """Return the nesting of lists in words, from the first entry of each."""
    sizes = []
    while isinstance(data, list):
        sizes.append(str(len(data)))
        data = data[0] if data and len(sizes) < 20 else None
    return f"lists of {' x '.join(sizes)}" if len(sizes) > 1 else f"a list of {sizes[0]}, uneven"


# -- writing --------------------------------------------------------------------------------------
def json_text(array: np.ndarray) -> str:
    """Return the values of an array as a flat JSON list; null stands for nan and infinity."""
    flat = array.ravel()
    pieces = []
    for start in range(0, flat.size, CHUNK_NUMBERS):
        piece = flat[start : start + CHUNK_NUMBERS]
        values = piece.tolist()
        if piece.dtype.kind not in "biu":
            # JSON has no infinity.
            wide = piece.astype(np.float64)
            values = wide.tolist()
            if not np.isfinite(wide).all():
                values = [value if math.isfinite(value) else None for value in values]
        pieces.append(json.dumps(values)[1:-1])
    return f"[{', '.join(pieces)}]"


def to_bytes(array: np.ndarray) -> bytes:
    """Return the values of an array as little-endian bytes, row after row."""
    return swap_if_big_endian(np.ascontiguousarray(array)).tobytes()


def swap_if_big_endian(array: np.ndarray) -> np.ndarray:
    """Return an array with swapped bytes on a big-endian machine, and as it is on others."""
    return array if sys.byteorder == "little" else array.byteswap()
