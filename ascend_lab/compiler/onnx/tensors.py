"""Defines tensors during import, their element types, and a model's inputs.

A tensor is known if its values do not depend on the inputs; all others become tensors of the graph.
Each ONNX element type has a number format in a graph: int64 becomes int32 (values are checked: see
`Graph.narrowed`), bool becomes 0 or 1 in the format of the node that computes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.compiler import draft, ir
from ascend_lab.errors import GraphError, InputError, UnsupportedError
from ascend_lab.machine.isa.memory import numpy_type

if TYPE_CHECKING:
    from onnx import GraphProto, ValueInfoProto


Values = np.ndarray
Shape = tuple[int, ...]

ELEMENT_TYPES: dict[int, tuple[str, Any]] = {
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
}
"""Element type and NumPy type by their number in `TensorProto.DataType`."""
with suppress(ImportError):  # a browser may lack ml_dtypes: such files are refused there
    ELEMENT_TYPES[16] = ("bfloat16", numpy_type("bf16"))
NUMPY: dict[str, np.dtype[Any]] = {name: np.dtype(kind) for name, kind in ELEMENT_TYPES.values()}
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
"""Format in a graph by element type; tensors of other types must be known during import."""
TYPES_WITHOUT_FORMAT = ("int64", "bool")
"""Element types that have no format of their own: the graph stores them in `Graph.elements`."""
FLOATS = ("float32", "float16", "bfloat16")
"""Types of operators on real numbers, such as Exp."""
NUMBERS = (*FLOATS, "int32", "int64")
"""Types of operators that have no form for 8-bit integers, such as Sum and CumSum."""
COMPUTED_TYPES = (*NUMBERS, "int8", "uint8")
"""Types of operators that take 8-bit integers as well, such as Add, Max and Less."""
GRAPH_TYPES = tuple(FORMATS)
"""Types that a graph can hold, for operators that only move or compare elements."""
ALL_TYPES = tuple(NUMPY)
"""Types that a known tensor may have; those without a format cannot become a graph's tensor."""
INTEGERS = ("int64", "int32")
"""Integers that a graph stores in 32 bits; also the types of indices, axes and counts."""
BITWISE_TYPES = ("int32", "int8", "uint8")
"""Integer types for operators on bits: a graph holds only 32 bits of int64."""
MAX_FOLDED_ELEMENTS = 2**18
"""Most elements of a tensor that is computed while importing."""
MAX_ELEMENTS = 2**28
"""Most elements of any tensor."""


def in_type(values: Any, type_name: str) -> Any:
    """Return an array in an ONNX element type, such as an output's.

    Raises `GraphError` for integers that exceed the type.
    """
    array = np.asarray(values)
    if type_name == "bool":
        # a graph holds truth values as int32
        return array != 0
    dtype = NUMPY.get(type_name, array.dtype)
    if dtype.kind in "iu" and array.dtype.kind in "iu" and array.size:
        low = int(array.min())
        high = int(array.max())
        if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
            raise GraphError(
                f"an output in {type_name}", f"numbers from {low} to {high}", "cast it"
            )
    return array.astype(dtype, copy=False)


def beyond_32_bits(array: Values) -> str:
    """Return the range of integers that do not fit in 32 bits as text; "" if they fit."""
    # int8 and int16 always fit; 2^31 in uint32 does not
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 4 or not array.size:
        return ""
    low = int(array.min())
    high = int(array.max())
    return f"{low} .. {high}" if low < -(2**31) or high >= 2**31 else ""


def free_name(base_name: str, used_names: set[str]) -> str:
    """Return a name that is not taken yet, and take it."""
    name = draft.free_name(base_name, used_names)
    used_names.add(name)
    return name


Known = Values | ir.Fill | Callable[[], Values]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the model: its type, and either the graph's value or known numbers.

    `roots` names the graph inputs from which it is computed, `name` is that of an initialiser.
    """

    elem: str
    shape: Shape
    value: draft.Value | None = None
    known: Known | None = None
    roots: frozenset[str] = frozenset()
    name: str = ""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def array(self) -> Values:
        """Return the values of a known tensor; a fill or a lazily read one is computed now."""
        if isinstance(self.known, ir.Fill):
            return np.full(self.shape, self.known.value, NUMPY[self.elem])
        array = self.known() if callable(self.known) else self.known
        return np.asarray(array, NUMPY[self.elem]).reshape(self.shape)

    def mapped(self, shape: Shape, change: Callable[[Values], Values]) -> Tensor:
        """Return a known tensor moved or cut by `change`; lazily read tensors are not read yet."""
        mapped_known: Known
        if isinstance(self.known, ir.Fill):
            # one number everywhere: where elements move to makes no difference
            mapped_known = self.known
        elif callable(self.known):
            mapped_known = partial(_changed, self, change)
        else:
            mapped_known = change(self.array())
        return Tensor(self.elem, shape, known=mapped_known)


def _changed(tensor: Tensor, change: Callable[[Values], Values]) -> Values:
    return change(tensor.array())


def known(array: Any, elem: str | None = None) -> Tensor:
    """Return an array as a known tensor, cast to the element type `elem` if that is given."""
    values = np.asarray(array, NUMPY[elem] if elem else None)
    type_name = elem or next(name for name, dtype in NUMPY.items() if dtype == values.dtype)
    return Tensor(type_name, values.shape, known=values)


def check_size(where: str, shape: tuple[int, ...]) -> None:
    """Raise `InputError` for negative sizes, `UnsupportedError` for too many elements."""
    if any(n < 0 for n in shape) or len(shape) > 16:
        raise InputError(f"{where}: sizes of at least 0", str(shape)[:80], "correct the model")
    if math.prod(shape) > MAX_ELEMENTS:
        needed = f"{where}: at most {MAX_ELEMENTS} elements"
        raise UnsupportedError(needed, str(shape)[:80], "use smaller tensors")


# -- inputs: their types, symbolic sizes pinned, values given instead of them ----------------------
Sizes = tuple[int | str, ...] | None
"""Sizes of an input: numbers, names of symbolic ones ("" for unknown); None: rank unknown."""
NO_NAME = re.compile(
    r"[?*_\s]*|none|null|nan|any|dyn(amic)?|unk(nown)?[_\d]*|[-+]?\d+"
    r"|.*dynamic_axes_\d+|(p2o\.)?dynamicdimension\.\d+",
    re.IGNORECASE,
)
"""What exporters write for a size without a name; equal ones need not be equal sizes."""
BATCH_NAME = re.compile(r".*batch.*|n|b|bs", re.IGNORECASE)


def inputs_of(graph: GraphProto) -> list[ValueInfoProto]:
    """Return a model's inputs that are not initialisers."""
    weights = {tensor.name for tensor in graph.initializer}
    return [entry for entry in graph.input if entry.name not in weights]


def element_of(entry: ValueInfoProto) -> str:
    """Return an input's element type; raise `UnsupportedError` if a graph cannot hold it."""
    type_proto = entry.type
    if not type_proto.HasField("tensor_type"):
        got = type_proto.WhichOneof("value") or "no type"
        raise UnsupportedError(f"{entry.name}: a tensor", str(got), "export another")
    number = type_proto.tensor_type.elem_type
    elem = ELEMENT_TYPES[number][0] if number in ELEMENT_TYPES else f"type {number}"
    if elem not in FORMATS:
        raise UnsupportedError(f"{entry.name} in {', '.join(FORMATS)}", elem, "export it in one")
    return elem


def sizes_of(entry: ValueInfoProto) -> Sizes:
    """Return the sizes that the model states; "" for sizes without a name, 0 and -1."""
    tensor_type = entry.type.tensor_type
    if not tensor_type.HasField("shape"):
        return None
    named = (
        "" if NO_NAME.fullmatch(d.dim_param) else str(d.dim_param) for d in tensor_type.shape.dim
    )
    return tuple(
        name if d.dim_value in (-1, 0) else int(d.dim_value)
        for d, name in zip(tensor_type.shape.dim, named, strict=True)
    )


def pinned_shapes(
    entries: Sequence[ValueInfoProto],
    shapes: Mapping[str, Sequence[int]],
    batch: int | None,
) -> dict[str, Shape]:
    """Return a shape of numbers for each input.

    Raises `UnsupportedError` naming the input and a remedy if a size remains unknown, `InputError`
    for names and sizes that do not fit the model.
    """
    stated = {entry.name: sizes_of(entry) for entry in entries}
    for name in shapes:
        if name not in stated:
            known_names = ", ".join(stated) or "none"
            raise InputError(f"an input of the model ({known_names})", name, "check the name")
    if batch is not None and batch < 1:
        raise InputError("a batch of at least 1", str(batch), "raise it")
    shapes_of = {
        name: _with_stated_sizes(name, sizes, shapes.get(name)) for name, sizes in stated.items()
    }
    if batch is not None:
        shapes_of = _with_batch(stated, shapes_of, batch, shapes)
    size_of_symbol: dict[str, int] = {}
    first_input: dict[str, str] = {}
    for name, sizes in stated.items():
        for axis, symbol, size in _symbols_with_sizes(sizes, shapes_of[name]):
            # "batch" of two inputs must be one number: 2 (x axis 0) and 4 (mask axis 0) raise an
            # error
            first_place = first_input.setdefault(symbol, f"{name} axis {axis}")
            if size_of_symbol.setdefault(symbol, size) != size:
                got = f"{size_of_symbol[symbol]} ({first_place}) and {size} ({name} axis {axis})"
                raise InputError(f"one size for {symbol}", got, "check the input shape")
    return {
        name: _without_symbols(name, sizes, size_of_symbol) for name, sizes in shapes_of.items()
    }


def _symbols_with_sizes(stated: Sizes, pinned: Sizes) -> Iterator[tuple[int, str, int]]:
    """Yield (axis, symbol, size) for each symbol of the model whose size is a number by now."""
    # ("batch", 3, "h") pinned to (2, 3, "h"): axis 0, "batch", 2
    for axis, (symbol, size) in enumerate(zip(stated or (), pinned or (), strict=False)):
        if symbol and isinstance(symbol, str) and not isinstance(size, str):
            yield axis, symbol, size


def _with_stated_sizes(name: str, sizes: Sizes, given: Sequence[int] | None) -> Sizes:
    """Return the sizes with those that the caller gives; sizes fixed in the model must agree."""
    if given is None:
        return sizes
    given_sizes = tuple(int(n) for n in given)
    if sizes is not None and len(sizes) != len(given_sizes):
        needed = f"{len(sizes)} sizes, as in {_text(sizes)}"
        got = f"{len(given_sizes)}: {given_sizes}"
        raise InputError(f"input {name}: {needed}", got, "check the input shape")
    for axis, (size, given_size) in enumerate(zip(sizes or given_sizes, given_sizes, strict=True)):
        if isinstance(size, int) and size != given_size:
            where = (
                f"input {name}: a size of {size} at axis {axis} of {_text(sizes or given_sizes)}"
            )
            raise InputError(where, str(given_size), "check the input shape")
    return given_sizes


def _text(sizes: Sequence[int | str]) -> str:
    return f"({', '.join(str(size) or '?' for size in sizes)})"


def _with_batch(
    stated: Mapping[str, Sizes],
    sizes_of_inputs: Mapping[str, Sizes],
    batch: int,
    given: Mapping[str, Any],
) -> dict[str, Sizes]:
    """Return the sizes with the batch as first size, where that is symbolic or fixed alike in all.

    Raises `InputError` naming the inputs if it is not clear which first sizes are the batch.
    """
    first_sizes = {name: sizes[0] for name, sizes in stated.items() if sizes}
    # first sizes "batch" and "seq": the one whose name looks like a batch is taken
    first_symbols = {
        first_size
        for first_size in first_sizes.values()
        if isinstance(first_size, str) and first_size
    }
    if len(first_symbols) > 1:
        batch_symbols = {symbol for symbol in first_symbols if BATCH_NAME.fullmatch(symbol)}
        first_symbols = batch_symbols if len(batch_symbols) == 1 else first_symbols
    chosen = [n for n, size in first_sizes.items() if size == "" or size in first_symbols]
    if None in stated.values() and not chosen:
        chosen = [name for name, sizes in stated.items() if sizes is None and name in given]
    if not chosen and fixed_batch(stated):
        chosen = list(first_sizes)
    if not chosen or len(first_symbols) > 1:
        got = ", ".join(f"{name} {_text(sizes)}" for name, sizes in stated.items() if sizes)
        remedy = "state each shape instead of a batch"
        raise InputError("inputs of one first size for a batch", got or "none", remedy)
    for name in chosen:
        if name in given and tuple(given[name])[:1] != (batch,):
            got = _text(tuple(given[name]))
            raise InputError(f"input {name}: a size of {batch} at axis 0", got, "drop the batch")
    return {n: (batch, *s[1:]) if s and n in chosen else s for n, s in sizes_of_inputs.items()}


def fixed_batch(sizes_of_inputs: Mapping[str, Sizes]) -> int:
    """Return the first size if a model fixes it and it is equal for all inputs, else 0."""
    # inputs (1, 3, 224, 224) and (1, 10) fix a batch of 1; (1, 10) and (2, 10) do not fix one
    first_sizes = {sizes[0] for sizes in sizes_of_inputs.values() if sizes}
    first_size = first_sizes.pop() if len(first_sizes) == 1 else 0
    return first_size if isinstance(first_size, int) else 0


def _without_symbols(name: str, sizes: Sizes, size_of_symbol: Mapping[str, int]) -> Shape:
    """Return sizes with numbers for symbols; raise `UnsupportedError` if one is unknown."""
    # ("batch", 3, "h", "w") with batch = 1 is (1, 3, "h", "w"), with unknown sizes
    sizes_with_numbers = [
        size_of_symbol.get(s, s) if isinstance(s, str) else s for s in sizes or ()
    ]
    if sizes is None or any(isinstance(s, str) for s in sizes_with_numbers):
        text = "unknown rank" if sizes is None else str(list(sizes)).replace("''", "?")
        only_batch_open = sizes is not None and not any(isinstance(s, str) for s in sizes[1:])
        got = text.replace("'", "")
        remedy = f"pin them: shapes={{{name!r}: {_example_shape(sizes)}}}"
        if only_batch_open:
            remedy += " or batch=1"
        raise UnsupportedError(f"input {name}: sizes that are numbers", got, remedy)
    shape = tuple(int(s) for s in sizes_with_numbers)
    check_size(f"input {name}", shape)
    return shape


def _example_shape(sizes: Sizes) -> Shape:
    """Return a shape of numbers that an error can propose: (1, 3, 224, 224) for images."""
    if sizes is None:
        return (1, 3, 224, 224)
    example_sizes = (1, 3, 224, 224) if len(sizes) == 4 else (1,) * len(sizes)
    # ("batch", 3, "h", "w") becomes (1, 3, 224, 224).
    return tuple(
        size if isinstance(size, int) else example
        for size, example in zip(sizes, example_sizes, strict=True)
    )


def pinned_tensor(name: str, elem: str, sizes: Sizes, value: Any) -> Tensor:
    """Return a graph input as a known tensor, with a value given before the graph is built."""
    array = np.asarray(value)
    dtype = NUMPY[elem]
    if array.dtype.kind not in "biuf" and array.dtype != dtype:
        raise InputError(f"input {name} in {elem}", str(array.dtype), "pass numbers")
    # 2.0 may be given for int64, 2.5 may not: the cast must not change the value
    cast = array.astype(dtype)
    if dtype.kind in "biu" and not np.array_equal(cast, array):
        raise InputError(f"input {name} in {elem}", f"values of {array.dtype}", "pass whole ones")
    _with_stated_sizes(name, sizes, array.shape)
    return Tensor(elem, array.shape, known=cast, name=name)
