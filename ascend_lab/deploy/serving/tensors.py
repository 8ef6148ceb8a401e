"""Tensors on their way in and out of a server: as JSON numbers, or as bytes behind the JSON.

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

from ascend_lab.compiler.onnx.tensors import LARGEST, NUMPY
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
    """A tensor that goes in or out: its ONNX element type, and its sizes, -1 for any.

    If `batched` the first size counts the rows of a batch.
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
        """Return what the metadata says."""
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
            sizes = [size for size in stated if type(size) is int and 0 <= size <= LARGEST]
        fits = isinstance(stated, list) and len(sizes) == len(stated) == len(self.shape)
        wanted = self.described()["shape"]
        fits = fits and all(want in (-1, size) for want, size in zip(wanted, sizes, strict=True))
        if not fits or (self.batched and not 1 <= sizes[0] <= most_rows):
            limit = f" (at most {most_rows} in the first)" if self.batched else ""
            raise InputError(f"input {shown(self.name)}: shape {wanted}{limit}", shown(stated))
        return tuple(sizes)

    # -- JSON -------------------------------------------------------------------------------------
    def _from_json(self, data: object, shape: tuple[int, ...]) -> np.ndarray:
        values = self._flat(data, shape)
        array = np.empty(len(values), NUMPY[self.element])
        for first in range(0, len(values), PIECE):
            piece = values[first : first + PIECE]
            array[first : first + PIECE] = self._converted(piece)
        return array.reshape(shape)

    def _flat(self, data: object, shape: tuple[int, ...]) -> list[Any]:
        """Return the values row after row; raise `InputError` for other counts, nests and kinds."""
        name = shown(self.name)
        number = math.prod(shape)
        needed = f"input {name}: data, a list of {number} {self._wanted_kind()}"
        if shape == () and not isinstance(data, list):
            data = [data]
        if not isinstance(data, list):
            raise InputError(needed, shown(data))
        values = data
        if any(type(value) is list for value in data):
            nested = unnested(data, shape)
            if nested is None:
                wanted = f"input {name}: data flat, or nested as shape {list(shape)} says"
                raise InputError(wanted, nesting(data))
            values = nested
        kinds = set(map(type, values))
        if len(values) != number or not kinds <= self._wanted_types():
            raise InputError(needed, counted(values, kinds) or shown(data))
        return values

    def _wanted_types(self) -> set[type]:
        kind = NUMPY[self.element].kind
        if kind == "b":
            return {bool}
        return {int} if kind in "iu" else {int, float}

    def _wanted_kind(self) -> str:
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
            limits = np.iinfo(kind)
            low = min(piece)
            high = max(piece)
            if low < limits.min or high > limits.max:
                raise self._unheld(f"{low} .. {high}"[:80])
            return np.array(piece, kind)
        try:
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
        return InputError(f"input {shown(self.name)}: values that {self.datatype} holds", got)

    # -- bytes ------------------------------------------------------------------------------------
    def from_bytes(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        """Return the array that bytes mean; raise `InputError` for another number of them."""
        kind = NUMPY[self.element]
        size_bytes = math.prod(shape) * kind.itemsize
        name = shown(self.name)
        if len(data) != size_bytes:
            needed = f"input {name}: {size_bytes} bytes for shape {list(shape)} in {self.datatype}"
            raise InputError(needed, str(len(data)))
        if kind.kind == "b":
            flags = np.frombuffer(data, np.uint8)
            if flags.size and flags.max() > 1:
                raise InputError(f"input {name}: bytes 0 and 1 in BOOL", str(flags.max()))
            return flags.astype(kind).reshape(shape)
        array = np.frombuffer(data, kind).copy()  # aligned, and may be written to
        return native(array).reshape(shape)


def counted(values: list[Any], kinds: set[type]) -> str:
    """Return in words how many values of what kind stand in a list; "" without such words."""
    for kind in (str, float, int, bool):
        if kind in kinds and kinds <= CALLED.keys():
            return f"{len(values)} {CALLED[kind]}"
    return "" if kinds else "0 values"


def unnested(data: list[Any], shape: tuple[int, ...]) -> list[Any] | None:
    """Return the values of lists that are nested as a shape says, row after row; None if not."""
    level: list[Any] = [data]
    for size in shape:
        if not all(type(part) is list and len(part) == size for part in level):
            return None
        level = list(chain.from_iterable(level))
    return level


def nesting(data: object) -> str:
    """Return in words how lists are nested, along the first of each."""
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
    for first in range(0, flat.size, PIECE):
        piece = flat[first : first + PIECE]
        values = piece.tolist()
        if piece.dtype.kind not in "biu":
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
    """Return an array with its bytes between this machine's order and the little-endian one."""
    return array if sys.byteorder == "little" else array.byteswap()
