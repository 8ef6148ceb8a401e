"""What a graph computes, in NumPy, and what it counts: bytes alive, products, parameters.

The values are the oracle for passes, compiled programs and importers.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import numpy as np

from ascend_lab.errors import AscendLabError, GraphError, InputError
from ascend_lab.graph.ir import Graph, Node, Seeded, TensorType, Values, operator_of
from ascend_lab.ops.formats import numpy_type, round_to, widen
from ascend_lab.ops.slicing import Range


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


# -- counts ----------------------------------------------------------------------------------------
STATISTICS = (3, 4)
"""Inputs of a batch norm that training averages but no gradient changes: mean and variance."""


# -- bytes -----------------------------------------------------------------------------------------
def weight_bytes(graph: Graph) -> int:
    """Return the bytes of all constants that nodes read."""
    read = {name for node in graph.nodes for name in node.inputs}
    return sum(c.type.size_bytes for name, c in graph.constants.items() if name in read)


def spans(graph: Graph) -> dict[str, Range]:
    """Return, for every activation, the first and the last node that needs it to be there."""
    found = dict.fromkeys(graph.inputs, (0, 0))
    for i, node in enumerate(graph.nodes):
        found.update((name, (i, i)) for name in node.outputs)
        for name in node.inputs:
            if name in found:
                found[name] = (found[name][0], i)
    end = max(len(graph.nodes) - 1, 0)
    found.update((n, (found[n][0], end)) for n in graph.outputs if n in found)
    return found


def live_bytes(graph: Graph) -> list[int]:
    """Return the bytes of the activations that exist while each node runs, its own included."""
    change = [0] * (max(len(graph.nodes), 1) + 1)
    for name, (first, last) in spans(graph).items():
        size = graph.types[name].size_bytes
        change[first] += size
        change[last + 1] -= size
    return list(accumulate(change))[:-1]


def peak_bytes(graph: Graph) -> int:
    """Return the most bytes alive along the nodes in order: activations, and all weights.

    Every node writes a tensor of its own: fusion, in-place results and views save some of it.
    """
    return weight_bytes(graph) + max(live_bytes(graph))


# -- pixels, parameters, products -----------------------------------------------------------------
def pixels(graph: Graph, node: Node) -> int:
    """Return the pixels of all images that a convolution writes; 0 for other operators."""
    if node.has("convolution") or node.op == "conv_transpose2d":
        n, _, h, w = graph.types[node.output].shape
        return n * h * w
    return 0


def parameters(graph: Graph) -> int:
    """Return the trainable parameters of a model of the zoo, counted as published.

    Every `Seeded` constant that a node reads, once however often it is read; not the running
    statistics of batch norms, nor masks and other constants that are no weights.
    """
    read = {
        name
        for node in graph.nodes
        for place, name in enumerate(node.inputs)
        if not (node.op == "batch_norm" and place in STATISTICS)
    }
    found = ((name, c) for name, c in graph.constants.items() if isinstance(c.data, Seeded))
    return sum(c.type.elements for name, c in found if name in read)


def node_macs(graph: Graph, node: Node) -> int:
    """Return the multiply-accumulates of one node; 0 unless it multiplies matrices or convolves."""
    given = graph.in_types(node)
    out = graph.types[node.output].elements
    if node.op in ("conv2d", "depthwise_conv2d"):
        return out * math.prod(given[1].shape[1:])
    if node.op == "conv_transpose2d":
        return given[0].elements * math.prod(given[1].shape[1:])
    if node.op in ("matmul", "batch_matmul", "gemm"):
        return out * given[0].shape[-2 if node.attr("trans_a") else -1]
    if node.op == "attention":
        (*_, d), (*_, t, _), (*_, e) = (kind.shape for kind in given[:3])
        return out // e * t * (d + e)
    return 0


def macs(graph: Graph) -> int:
    """Return the multiply-accumulates of convolutions and matrix products of a graph."""
    return sum(node_macs(graph, node) for node in graph.nodes)


def published_macs(graph: Graph) -> int:
    """Return the multiply-accumulates of a model of the zoo, counted as published.

    All but those with a fixed matrix, which is no weight: the interpolation of a resize is free.
    """
    fixed = {name for name, c in graph.constants.items() if not isinstance(c.data, Seeded)}
    return sum(node_macs(graph, node) for node in graph.nodes if node.inputs[-1] not in fixed)
