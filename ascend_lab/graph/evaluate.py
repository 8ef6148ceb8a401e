"""What a graph computes, in NumPy: the oracle for passes, compiled programs and importers."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ascend_lab.errors import AscendLabError, GraphError, InputError
from ascend_lab.graph.ir import Graph, Node, TensorType, Values, operator_of
from ascend_lab.ops.formats import numpy_type, round_to, widen


def evaluate(graph: Graph, inputs: Mapping[str, Any]) -> dict[str, Values]:
    """Return the outputs by name: each node in fp64 (whole numbers int64), rounded to its type.

    Raises `InputError` for inputs that are missing or of another shape.
    """
    values = dict(_steps(graph, inputs, set(graph.outputs)))
    return {name: values[name] for name in graph.outputs}


def evaluate_all(graph: Graph, inputs: Mapping[str, Any]) -> dict[str, Values]:
    """Return every tensor of the graph by name, to see where two graphs part."""
    return dict(_steps(graph, inputs, set(graph.types)))


def _steps(graph: Graph, inputs: Mapping[str, Any], keep: set[str]) -> Iterator[tuple[str, Values]]:
    """Yield the tensors in `keep` in order; others are forgotten after their last reader."""
    live = dict(checked_inputs(graph, inputs))
    left = {name: len(readers) for name, readers in graph.readers.items()}
    for name in (*graph.inputs, *graph.constants):
        if name in keep:
            yield name, live[name] if name in live else graph.constants[name].array()
    for node in graph.nodes:
        arrays = [live[n] if n in live else graph.constants[n].array() for n in node.inputs]
        for name, value in zip(node.outputs, compute(graph, node, arrays), strict=True):
            if name in keep:
                yield name, value
            live[name] = value
        for name in dict.fromkeys(node.inputs):
            left[name] -= 1
            if not left[name]:
                live.pop(name, None)


def compute(graph: Graph, node: Node, arrays: list[Values]) -> tuple[Values, ...]:
    """Return what one node writes, rounded once to the types the graph states."""
    operator = operator_of(node.op)
    settings = operator.settings(node.attrs)
    try:
        operator.check_indices(arrays, settings)
        with np.errstate(all="ignore"):
            found = operator.formula(*map(widen, arrays), **settings)
    except AscendLabError as error:
        raise GraphError(f"{node.name}: {error.needed}", error.got, error.remedy) from error
    many = found if isinstance(found, tuple) else (found,)
    types = graph.out_types(node)
    for name, value in zip(node.outputs, map(np.asarray, many), strict=True):
        if name in graph.narrowed and value.size:
            low, high = value.min(), value.max()
            if low < -(2**31) or high >= 2**31:
                needed = f"{name}: int64 numbers that fit in 32 bits"
                raise GraphError(needed, f"numbers from {low} to {high}", "rewrite the model")
    return tuple(
        round_to(np.asarray(value), t.dtype).reshape(t.shape)
        for value, t in zip(many, types, strict=True)
    )


def checked_inputs(graph: Graph, inputs: Mapping[str, Any]) -> dict[str, Values]:
    """Return the inputs as arrays of the graph's types; raise `InputError` where they differ."""
    missing = [name for name in graph.inputs if name not in inputs]
    extra = [name for name in inputs if name not in graph.inputs]
    if missing or extra:
        needed = f"{graph.name}: inputs {', '.join(graph.inputs)}"
        got = f"missing {missing}" if missing else f"unknown {extra}"
        raise InputError(needed, got, "pass every input by name")
    return {name: as_type(name, inputs[name], graph.types[name]) for name in graph.inputs}


def as_type(name: str, value: Any, wanted: TensorType) -> Values:
    """Return an array in a tensor's format; raise `InputError` unless its shape and kind fit."""
    array = np.asarray(value)
    if array.shape != wanted.shape:
        same = array.ndim == len(wanted.shape)
        pairs = enumerate(zip(array.shape, wanted.shape, strict=True)) if same else ()
        axis = next((f" at axis {i}" for i, (a, b) in pairs if a != b), "")
        got = f"{array.shape}, which differs{axis}"
        raise InputError(f"input {name} of shape {wanted.shape}", got, "reshape it")
    kind = numpy_type(wanted.dtype)
    if array.dtype.kind not in "biuf" and array.dtype != kind:
        raise InputError(f"input {name} in {wanted.dtype}", str(array.dtype), "use numbers")
    if kind.kind in "iu":
        if array.dtype.kind == "f":
            raise InputError(f"input {name} in {wanted.dtype}", str(array.dtype), "use astype")
        info = np.iinfo(kind)
        if array.size and (int(array.min()) < info.min or int(array.max()) > info.max):
            got = f"values from {array.min()} to {array.max()}"
            raise InputError(f"input {name} within {wanted.dtype}", got, "scale it")
    return array.astype(kind, copy=False)


def random_inputs(graph: Graph, seed: int = 0) -> dict[str, Values]:
    """Return seeded inputs: normal numbers; whole numbers from 0, inside what indexes allow."""
    rng = np.random.default_rng(seed)
    limits = _index_limits(graph)
    found: dict[str, Values] = {}
    for name in graph.inputs:
        kind, shape = numpy_type(graph.types[name].dtype), graph.types[name].shape
        if kind.kind in "iu":
            found[name] = rng.integers(0, limits.get(name, 2), shape).astype(kind)
        else:
            found[name] = rng.standard_normal(shape, np.float32).astype(kind)
    return found


def _index_limits(graph: Graph) -> dict[str, int]:
    """Return the first index that is too large for inputs that nodes use as indices."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        shapes = [t.shape for t in graph.in_types(node)]
        operator = operator_of(node.op)
        if not operator.index_bounds:
            continue
        for place, limit in operator.index_limits(shapes, operator.settings(node.attrs)).items():
            name = node.inputs[place]
            found[name] = min(limit, found.get(name, limit))
    return found
