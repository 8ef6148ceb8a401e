"""Computes the values of a graph in NumPy, as the reference for passes, kernels and importers.

Each node is computed in fp64 (integers in int64) and rounded once to the type of its result:
1/3 in an fp16 graph is 0.33325195.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ascend_lab.compiler import ir
from ascend_lab.errors import AscendLabError, GraphError, InputError
from ascend_lab.operators.ops import formats
from ascend_lab.operators.ops.casts import ROUNDINGS


def evaluate(graph: ir.Graph, inputs: Mapping[str, Any]) -> dict[str, ir.Values]:
    """Return the outputs by name; each node is computed in fp64 or int64, rounded to its type.

    Tensors that are int64 in the model (`Graph.narrowed`) are int64 here, too. Raises `InputError`
    for inputs that are missing or of another shape, and `GraphError` naming a node whose whole
    numbers do not fit in 64 bits.
    """
    # `live` holds the tensors that some node still has to read: a deep network would not fit in
    # memory otherwise
    live = dict(checked_inputs(graph, inputs, wide=True))
    output_names = set(graph.outputs)
    unfinished_readers = {name: len(readers) for name, readers in graph.readers.items()}
    outputs = {name: live[name] for name in output_names.intersection(live)}
    outputs |= {
        name: graph.constants[name].array() for name in output_names.intersection(graph.constants)
    }
    for node in graph.nodes:
        arrays = [live[n] if n in live else graph.constants[n].array() for n in node.inputs]
        values = compute(graph, node, arrays, wide=True)
        results = dict(zip(node.outputs, values, strict=True))
        outputs |= {name: value for name, value in results.items() if name in output_names}
        live |= results
        # drop the tensors whose last reader is this node
        for name in dict.fromkeys(node.inputs):
            unfinished_readers[name] -= 1
            if not unfinished_readers[name]:
                live.pop(name, None)
    return {name: outputs[name] for name in graph.outputs}


def evaluate_all(graph: ir.Graph, inputs: Mapping[str, Any]) -> dict[str, ir.Values]:
    """Return every tensor of the graph by name, to see where two graphs begin to differ."""
    names = (*graph.inputs, *graph.constants, *graph.producers)
    return evaluate(replace(graph, outputs=names), inputs)


def compute(
    graph: ir.Graph, node: ir.Node, arrays: list[ir.Values], *, wide: bool = False
) -> tuple[ir.Values, ...]:
    """Return what one node writes, rounded once to the types the graph states.

    Tensors that are int64 in the model are checked: they are int32 as on a chip, or int64 if
    `wide`. Raises `GraphError` naming the node whose numbers do not fit.
    """
    exact = exact_values(graph, node, arrays)
    types = graph.out_types(node)
    rounded = []
    for name, value, kind in zip(node.outputs, exact, types, strict=True):
        if name in graph.narrowed and kind.dtype == "int32":
            integers = whole_numbers(node, value)
            if not wide:
                integers = _in_32_bits(node, integers)
            rounded.append(integers.reshape(kind.shape))
        else:
            rounded.append(formats.round_to(value, kind.dtype).reshape(kind.shape))
    return tuple(rounded)


def exact_values(graph: ir.Graph, node: ir.Node, arrays: list[ir.Values]) -> tuple[ir.Values, ...]:
    """Return what one node writes before it is rounded: fp64, or int64 for whole numbers.

    Raises `GraphError` naming the node at fault, also where int64 numbers would exceed 64 bits.
    """
    operator = ir.operator_of(node.op)
    settings = operator.settings(node.attrs)
    wide_arrays = [formats.widen(array) for array in arrays]
    int64_result = None
    if any(name in graph.narrowed for name in node.outputs):
        int64_result = _int64_values(node, wide_arrays, settings)
    elif node.op == "cast" and graph.types[node.inputs[0]].dtype == "int32":
        _check_cast(node, wide_arrays[0], settings["dtype"])
    try:
        operator.check_indices(wide_arrays, settings)
        result: Any = int64_result
        if int64_result is None:
            with np.errstate(all="ignore"):
                result = operator.formula(*wide_arrays, **settings)
    except AscendLabError as error:
        raise GraphError(f"{node.name}: {error.needed}", error.got, error.remedy) from error
    results = result if isinstance(result, tuple) else (result,)
    return tuple(map(np.asarray, results))


# -- int64 of a model ------------------------------------------------------------------------------
LARGEST_EXACT_INTEGER = 2.0**53
"""2^53: fp64 represents all whole numbers up to here exactly."""
GROWING_OPS = (
    *("add", "sub", "mul", "neg", "abs", "square", "pow", "scatter_add", "reduce_sum"),
    *("reduce_prod", "matmul", "batch_matmul"),
)
"""Operators whose results may exceed all operands; others choose, move or compare numbers."""


def _int64_values(
    node: ir.Node, arrays: list[ir.Values], settings: Mapping[str, Any]
) -> ir.Values | None:
    """Return an int64 result where the operator's own formula would be inexact, else None.

    Raises `GraphError` where 64 bits do not hold the result. NumPy's integers wrap around silently;
    so the arithmetic is repeated in fp64, which shows how large the result is.
    """
    all_integers = all(array.dtype.kind == "i" for array in arrays)
    if node.op == "cast":  # the operator's own cast saturates at 32 bits
        return arrays[0] if all_integers else ROUNDINGS[settings["round"]](arrays[0])
    if not all_integers or not arrays:
        return None
    # the formula divides in fp64: exact for quotients of numbers up to 2^53 only
    if (
        node.op == "div"
        and float(np.abs(arrays[0].astype(np.float64)).max(initial=0.0)) > LARGEST_EXACT_INTEGER
    ):
        if not np.all(arrays[1]):
            raise GraphError(f"{node.name}: divisors other than 0", "0", "rewrite the model")
        return np.asarray(np.floor_divide(*arrays))
    if node.op == "pow" and np.any(arrays[1] < 0):
        got = str(int(arrays[1].min()))
        raise GraphError(f"{node.name}: whole exponents of at least 0", got, "cast to float")
    if node.op in GROWING_OPS:
        formula = ir.operator_of(node.op).formula
        # operand 1 of scatter_add holds indices, which stay integers
        index_operands = (1,) if node.op == "scatter_add" else ()
        operands = [
            a if i in index_operands else a.astype(np.float64) for i, a in enumerate(arrays)
        ]
        with np.errstate(all="ignore"):
            # raises an error where the fp64 result exceeds 64 bits; the exact result follows in
            # int64
            whole_numbers(node, np.asarray(formula(*operands, **settings)))
    return None


def whole_numbers(node: ir.Node, values: ir.Values) -> ir.Values:
    """Return values as int64; raise `GraphError` naming the node where 64 bits do not hold them."""
    if values.dtype.kind in "iu":
        return values.astype(np.int64, copy=False)
    rounded = np.rint(values)
    # the comparison is False for NaN, too
    if not np.all((rounded >= -(2.0**63)) & (rounded < 2.0**63)):
        needed = f"{node.name}: int64 numbers that fit in 64 bits"
        raise GraphError(needed, _range_text(values), "keep what it reads smaller")
    return rounded.astype(np.int64)


def _in_32_bits(node: ir.Node, integers: ir.Values) -> ir.Values:
    """Return int64 numbers as int32; raise `GraphError` naming the node if some do not fit."""
    if integers.size and (integers.min() < -(2**31) or integers.max() >= 2**31):
        needed = f"{node.name}: int64 numbers that fit in 32 bits, as kernels hold them"
        raise GraphError(needed, _range_text(integers), REMEDY_64)
    return integers.astype(np.int32)


REMEDY_64 = "evaluate the graph in place of its kernels: there int64 has 64 bits"


def _check_cast(node: ir.Node, values: ir.Values, dtype: str) -> None:
    """Raise `GraphError` if some numbers of a cast to int32 do not fit in 32 bits."""
    too_large = values.size and (values.min() < -(2**31) or values.max() >= 2**31)
    if too_large and dtype == "int32":
        needed = f"{node.name}: numbers that fit in int32, which they are cast to"
        raise GraphError(needed, _range_text(values), "keep them in int64")


def _range_text(values: ir.Values) -> str:
    """Return the smallest and largest number as text, or "NaN" if there is a NaN."""
    if np.isnan(values).any():
        return "NaN"
    return f"numbers from {values.min()} to {values.max()}"


# -- inputs ----------------------------------------------------------------------------------------
def checked_inputs(
    graph: ir.Graph, inputs: Mapping[str, Any], *, wide: bool = False
) -> dict[str, ir.Values]:
    """Return the inputs as arrays of the graph's types; raise `InputError` where they differ.

    Inputs that are int64 in the model become int64 if `wide`, else int32, and must fit.
    """
    missing = [name for name in graph.inputs if name not in inputs]
    unknown = [name for name in inputs if name not in graph.inputs]
    if missing or unknown:
        needed = f"{graph.name}: inputs {', '.join(graph.inputs)}"
        got = f"missing {missing}" if missing else f"unknown {unknown}"
        raise InputError(needed, got, "pass every input by name")
    int64_names = graph.narrowed if wide else ()
    return {n: as_type(n, inputs[n], graph.types[n], wide=n in int64_names) for n in graph.inputs}


def as_type(name: str, value: Any, expected: ir.TensorType, *, wide: bool = False) -> ir.Values:
    """Return an array in a tensor's format; raise `InputError` unless its shape and dtype fit.

    With `wide` the array is int64 where the type is int32.
    """
    array = np.asarray(value)
    if array.shape != expected.shape:
        has_same_rank = array.ndim == len(expected.shape)
        pairs = enumerate(zip(array.shape, expected.shape, strict=True)) if has_same_rank else ()
        axis = next((f" at axis {i}" for i, (a, b) in pairs if a != b), "")
        got = f"{array.shape}, which differs{axis}"
        raise InputError(f"input {name} of shape {expected.shape}", got, "reshape it")
    kind = np.dtype(np.int64) if wide else formats.numpy_type(expected.dtype)
    type_name = "int64" if wide else expected.dtype
    # NumPy's kinds: bool, signed, unsigned, float
    if array.dtype.kind not in "biuf" and array.dtype != kind:
        raise InputError(f"input {name} in {type_name}", str(array.dtype), "use numbers")
    if kind.kind in "iu":
        if array.dtype.kind == "f":
            raise InputError(f"input {name} in {type_name}", str(array.dtype), "use astype")
        limits = np.iinfo(kind)
        if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            got = f"values from {array.min()} to {array.max()}"
            remedy = REMEDY_64 if array.dtype == np.int64 else "scale it"
            raise InputError(f"input {name} within {type_name}", got, remedy)
    with np.errstate(all="ignore"):
        return array.astype(kind, copy=False)


def random_inputs(graph: ir.Graph, seed: int = 0) -> dict[str, ir.Values]:
    """Return seeded inputs: normal floats, and integers from 0 that are valid as indices."""
    rng = np.random.default_rng(seed)
    index_limits = dict[str, int]()
    arrays = dict[str, ir.Values]()
    for node in graph.nodes:
        operator = ir.operator_of(node.op)
        if operator.index_bounds:
            shapes = [t.shape for t in graph.in_types(node)]
            settings = operator.settings(node.attrs)
            for place, limit in operator.index_limits(shapes, settings).items():
                name = node.inputs[place]
                # an index read by two gathers must be valid for the smaller table
                index_limits[name] = min(limit, index_limits.get(name, limit))
    for name in graph.inputs:
        kind = formats.numpy_type(graph.types[name].dtype)
        shape = graph.types[name].shape
        if kind.kind in "iu":
            arrays[name] = rng.integers(0, index_limits.get(name, 2), shape).astype(kind)
        else:
            arrays[name] = rng.standard_normal(shape, np.float32).astype(kind)
    return arrays
