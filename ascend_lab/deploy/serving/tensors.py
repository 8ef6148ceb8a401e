"""The tensors of requests and answers: read from JSON numbers or bytes, and written as either.

A `Port` is one input or output of a model in the words of KServe v2. It reads what a request says

    {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [[1, 2, 3], [4, 5, 6]]}

into an array, or refuses it. `data` is flat, row after row, or nested exactly as `shape` says: a
list of 3 x 2 numbers for shape [2, 3] has its numbers in other places, and is refused.

Bytes are little endian, row after row, without gaps; a BOOL is one byte, 0 or 1.

Lists are read and written in pieces of `PIECE` numbers: between two pieces Python lets other
threads run, so that one long tensor does not stop all other requests.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from ascend_lab.compiler.onnx.tensors import MOST_ELEMENTS, NUMPY
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
"""The one element type that is announced but not served."""
PIECE = 2**14
"""Numbers of a list that are read or written at once: about 2 ms."""

BOOLEANS = "true and false"
WHOLES = "whole numbers"
FRACTIONS = "fractions"
TEXTS = "values, text among them"
CALLED = {bool: BOOLEANS, int: WHOLES, float: FRACTIONS, str: TEXTS}
"""What messages call the values of a list, by their type."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a model: its ONNX element type, and its sizes, -1 for any size.

    If it is `batched`, the first size counts the rows of a batch.
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
        """Return name, datatype and shape as the metadata of the protocol lists them."""
        shape = [-1, *self.shape[1:]] if self.batched else list(self.shape)
        return {"name": self.name, "datatype": self.datatype, "shape": shape}

    def read(
        self, tensor: Mapping[str, Any], most_rows: int, binary: memoryview | None = None
    ) -> np.ndarray:
        """Return the array of a request's tensor, its values in `data` or in `binary`.

        Raises `InputError` unless datatype, shape and values fit.
        """
        self.refuse_text("input")
        if tensor.get("datatype") != self.datatype:
            got = shown(tensor.get("datatype"))
            raise InputError(f"input {shown(self.name)}: datatype {self.datatype}", got)
        shape = self._shape_of(tensor.get("shape"), most_rows)
        if binary is not None:
            return self.from_bytes(binary, shape)
        return self._from_json(tensor.get("data"), shape)

    def refuse_text(self, what: str) -> None:
        """Raise `InputError` if this is a tensor of texts."""
        if self.element == TEXT:
            needed = f"{what} {shown(self.name)}: a tensor of numbers"
            raise InputError(needed, "BYTES, which is not served", "use `ascend-lab run`")

    def _shape_of(self, stated: object, most_rows: int) -> tuple[int, ...]:
        """Return a request's shape; raise `InputError` unless the model takes it."""
        sizes: list[int] = []
        if isinstance(stated, list):
            # type(True) is bool, not int: `isinstance` would let true pass for 1
            sizes = [size for size in stated if type(size) is int and 0 <= size <= MOST_ELEMENTS]
        fits = isinstance(stated, list) and len(sizes) == len(stated) == len(self.shape)
        expected = self.described()["shape"]
        fits = fits and all(
            open_size in (-1, size) for open_size, size in zip(expected, sizes, strict=True)
        )
        if not fits or (self.batched and not 1 <= sizes[0] <= most_rows):
            hint = f" (at most {most_rows} in the first)" if self.batched else ""
            raise InputError(f"input {shown(self.name)}: shape {expected}{hint}", shown(stated))
        return tuple(sizes)

    # -- JSON -------------------------------------------------------------------------------------
    def _from_json(self, data: object, shape: tuple[int, ...]) -> np.ndarray:
        """Return the array of a list of numbers, converted piece by piece."""
        values = self._flat(data, shape)
        array = np.empty(len(values), NUMPY[self.element])
        for start in range(0, len(values), PIECE):
            piece = values[start : start + PIECE]
            array[start : start + PIECE] = self._converted(piece)
        return array.reshape(shape)

    def _flat(self, data: object, shape: tuple[int, ...]) -> list[Any]:
        """Return the values row by row; raise `InputError` for a wrong count, nesting or type."""
        name = shown(self.name)
        value_count = math.prod(shape)
        needed = f"input {name}: data, a list of {value_count} {self._wanted_kind()}"
        # a tensor without axes has one value, which may stand without a list around it
        if shape == () and not isinstance(data, list):
            data = [data]
        if not isinstance(data, list):
            raise InputError(needed, shown(data))
        values = data
        if any(type(value) is list for value in data):
            nested = unnested(data, shape)
            if nested is None:
                expected = f"input {name}: data flat, or nested as shape {list(shape)} says"
                raise InputError(expected, nesting(data))
            values = nested
        kinds = set(map(type, values))
        if len(values) != value_count or not kinds <= self._wanted_types():
            raise InputError(needed, counted(values, kinds) or shown(data))
        return values

    def _wanted_types(self) -> set[type]:
        """Return the Python types of JSON values that the element type accepts."""
        kind = NUMPY[self.element].kind
        if kind == "b":
            return {bool}
        # 1.0 is no whole number in JSON, but 1 is a fine fraction
        return {int} if kind in "iu" else {int, float}

    def _wanted_kind(self) -> str:
        """Return what messages call the values that the element type accepts."""
        kind = NUMPY[self.element].kind
        if kind == "b":
            return BOOLEANS
        return WHOLES if kind in "iu" else "numbers"

    def _converted(self, piece: list[Any]) -> np.ndarray:
        """Return some values in the element type; raise `InputError` for those it cannot hold."""
        kind = NUMPY[self.element]
        if kind.kind == "b":
            return np.array(piece, kind)
        if kind.kind in "iu":
            # asked first, as some versions of NumPy wrap 300 to 44 in UINT8
            limits = np.iinfo(kind)
            low = min(piece)
            high = max(piece)
            if low < limits.min or high > limits.max:
                raise self._unheld(f"{low} .. {high}"[:80])
            return np.array(piece, kind)
        try:
            # through 64 bits: whether FP16 holds 70000 is seen only after the conversion
            wide = np.array(piece, np.float64)
        except OverflowError:
            raise self._unheld("a whole number of too many digits") from None
        with np.errstate(all="ignore"):
            array = wide.astype(kind)
            lost = ~np.isfinite(array.astype(np.float64))
        if lost.any():
            raise self._unheld(f"{wide[lost][0]:g}")
        return array

    def _unheld(self, got: str) -> InputError:
        """Return the error for a value outside the range of the element type."""
        return InputError(f"input {shown(self.name)}: values that {self.datatype} holds", got)

    # -- bytes ------------------------------------------------------------------------------------
    def from_bytes(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        """Return the array that some bytes hold; raise `InputError` for a wrong number of them."""
        kind = NUMPY[self.element]
        size_bytes = math.prod(shape) * kind.itemsize
        name = shown(self.name)
        if len(data) != size_bytes:
            needed = f"input {name}: {size_bytes} bytes for shape {list(shape)} in {self.datatype}"
            raise InputError(needed, str(len(data)))
        if kind.kind == "b":
            # any byte but 0 counts as true in NumPy; the protocol allows 0 and 1
            flags = np.frombuffer(data, np.uint8)
            if flags.size and flags.max() > 1:
                raise InputError(f"input {name}: bytes 0 and 1 in BOOL", str(flags.max()))
            return flags.astype(kind).reshape(shape)
        # a copy is aligned and may be written to; a view of the body is neither
        array = np.frombuffer(data, kind).copy()
        return native(array).reshape(shape)


def counted(values: list[Any], kinds: set[type]) -> str:
    """Return in words how many values of what kind a list has; "" if there are no words for it."""
    # the widest kind names all: [1, 2.5] is "2 fractions", [1, "a"] "2 values, text among them"
    for kind in (str, float, int, bool):
        if kind in kinds and kinds <= CALLED.keys():
            return f"{len(values)} {CALLED[kind]}"
    return "" if kinds else "0 values"


def unnested(data: list[Any], shape: tuple[int, ...]) -> list[Any] | None:
    """Return the values of nested lists row after row; None unless they are nested as a shape."""
    # one level at a time: [[1, 2], [3, 4]] -> [1, 2], [3, 4] -> 1, 2, 3, 4
    level: list[Any] = [data]
    for size in shape:
        if not all(type(entry) is list and len(entry) == size for entry in level):
            return None
        level = list(chain.from_iterable(level))
    return level


def nesting(data: object) -> str:
    """Return in words how lists are nested, judged by the first entry of each."""
    sizes = []
    while isinstance(data, list):
        sizes.append(str(len(data)))
        data = data[0] if data and len(sizes) < 20 else None
    return f"lists of {' x '.join(sizes)}" if len(sizes) > 1 else f"a list of {sizes[0]}, uneven"


# -- out ------------------------------------------------------------------------------------------
def json_text(array: np.ndarray) -> str:
    """Return the values of an array as a flat JSON list; null stands for nan and infinity."""
    flat = array.ravel()
    pieces = []
    for start in range(0, flat.size, PIECE):
        piece = flat[start : start + PIECE]
        values = piece.tolist()
        if piece.dtype.kind not in "biu":
            # JSON knows neither FP16 nor infinity
            wide = piece.astype(np.float64)
            values = wide.tolist()
            if not np.isfinite(wide).all():
                values = [value if math.isfinite(value) else None for value in values]
        pieces.append(json.dumps(values)[1:-1])
    return f"[{', '.join(pieces)}]"


def to_bytes(array: np.ndarray) -> bytes:
    """Return the values of an array as little-endian bytes, row after row."""
    return native(np.ascontiguousarray(array)).tobytes()


def native(array: np.ndarray) -> np.ndarray:
    """Return an array with its bytes in little-endian order, or back in that of this machine."""
    return array if sys.byteorder == "little" else array.byteswap()
