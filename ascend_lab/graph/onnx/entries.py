"""Graph inputs: their types, symbolic sizes pinned, values given instead of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.graph.onnx.loading import Limits
from ascend_lab.graph.onnx.tensors import ELEMENTS, FORMATS, NUMPY, Shape, Tensor
from ascend_lab.graph.onnx.weights import check_size

if TYPE_CHECKING:
    from onnx import ValueInfoProto

Sizes = tuple[int | str, ...] | None
"""Sizes of an input: numbers, names of symbolic ones ("" for unknown); None: rank unknown."""


def element_of(entry: ValueInfoProto) -> str:
    """Return an input's element type; raise `UnsupportedError` for what no graph holds."""
    kind = entry.type
    if not kind.HasField("tensor_type"):
        got = kind.WhichOneof("value") or "no type"
        raise UnsupportedError(f"{entry.name}: a tensor", str(got), "export another")
    number = kind.tensor_type.elem_type
    elem = ELEMENTS[number][0] if number in ELEMENTS else f"type {number}"
    if elem not in FORMATS:
        raise UnsupportedError(f"{entry.name} in {', '.join(FORMATS)}", elem, "export it in one")
    return elem


def sizes_of(entry: ValueInfoProto) -> Sizes:
    """Return the sizes as the model states them."""
    kind = entry.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return tuple(
        int(d.dim_value) if d.HasField("dim_value") else str(d.dim_param) for d in kind.shape.dim
    )


def pinned_shapes(
    entries: Sequence[ValueInfoProto],
    shapes: Mapping[str, Sequence[int]],
    batch: int | None,
    limits: Limits,
) -> dict[str, Shape]:
    """Return a shape of numbers for each input.

    Raises `UnsupportedError` naming the input and a remedy if a size stays open, `InputError` for
    names and sizes that do not fit the model.
    """
    stated = {entry.name: sizes_of(entry) for entry in entries}
    for name in shapes:
        if name not in stated:
            known = ", ".join(stated) or "none"
            raise InputError(f"an input of the model ({known})", name, "check the name")
    if batch is not None and batch < 1:
        raise InputError("a batch of at least 1", str(batch), "raise it")
    found = {name: _given(name, sizes, shapes.get(name)) for name, sizes in stated.items()}
    for name, shape in shapes.items():
        if batch is not None and tuple(shape)[:1] != (batch,):
            raise InputError(f"{name}: a first size of {batch}", str(shape), "drop one of both")
    if batch is not None:
        found = _batched(found, batch)
    bound: dict[str, int] = {}
    for name, sizes in stated.items():
        for symbol, size in zip(sizes or (), found[name] or (), strict=False):
            if not symbol or isinstance(symbol, int) or isinstance(size, str):
                continue
            if bound.setdefault(symbol, size) != size:
                got = f"{bound[symbol]} and {size}"
                raise InputError(f"one size for {symbol}", got, "check the input shape")
    return {name: _closed(name, sizes, bound, limits) for name, sizes in found.items()}


def _given(name: str, sizes: Sizes, wanted: Sequence[int] | None) -> Sizes:
    """Return the sizes with the caller's in place; fixed ones must agree."""
    if wanted is None:
        return sizes
    given = tuple(int(n) for n in wanted)
    fits = sizes is None or (
        len(sizes) == len(given)
        and all(isinstance(s, str) or s == g for s, g in zip(sizes, given, strict=True))
    )
    if not fits:
        raise InputError(f"{name}: a shape that fits {sizes}", str(given), "check the input shape")
    return given


def _batched(found: Mapping[str, Sizes], batch: int) -> dict[str, Sizes]:
    """Return the sizes with open first ones set to the batch, or else fixed ones that agree."""
    old = fixed_batch(found)
    return {
        name: (batch, *sizes[1:]) if sizes and (isinstance(sizes[0], str) or old) else sizes
        for name, sizes in found.items()
    }


def fixed_batch(found: Mapping[str, Sizes]) -> int:
    """Return the first size that a model fixes for all its inputs alike, or 0."""
    heads = {sizes[0] for sizes in found.values() if sizes}
    head = heads.pop() if len(heads) == 1 else 0
    return head if isinstance(head, int) else 0


def _closed(name: str, sizes: Sizes, bound: Mapping[str, int], limits: Limits) -> Shape:
    text = "unknown rank" if sizes is None else str(list(sizes)).replace("''", "?")
    filled = None if sizes is None else tuple(bound.get(s, -1) if isinstance(s, str) else s
                                              for s in sizes)  # fmt: skip
    opened = sizes is None or any(isinstance(s, str) and s not in bound for s in sizes)
    if filled is None or opened:
        given = (1, 3, 224, 224) if sizes is None else sizes
        example = tuple(s if isinstance(s, int) else 1 for s in given)
        raise UnsupportedError(
            f"input {name}: sizes that are numbers",
            text.replace("'", ""),
            f"pin them: shapes={{{name!r}: {example}}} or batch=1",
        )
    check_size(f"input {name}", filled, limits)
    return filled


def pinned_tensor(name: str, elem: str, sizes: Sizes, given: Any) -> Tensor:
    """Return a graph input whose value is given before the graph is built."""
    array = np.asarray(given)
    wanted = NUMPY[elem]
    if array.dtype.kind not in "biuf" and array.dtype != wanted:
        raise InputError(f"input {name} in {elem}", str(array.dtype), "pass numbers")
    cast = array.astype(wanted)
    if wanted.kind in "biu" and not np.array_equal(cast, array):
        raise InputError(f"input {name} in {elem}", f"values of {array.dtype}", "pass whole ones")
    _given(name, sizes, array.shape)
    return Tensor(elem, array.shape, known=cast, name=name)
