"""What can be asked of a graph: its values, its counts, a table of its nodes, its text read back.

`evaluate` computes values in NumPy: the oracle for passes, compiled programs and importers. Counts
are multiply-accumulates and parameters. People read the text form, and tests compare it:

    graph "toy" (x: fp16[1, 3, 8, 8]) -> (y) {
      w: fp16[4, 3, 3, 3] = seeded(7, 0.1)
      y: fp16[1, 4, 8, 8] = conv2d(x, w) {pad = 1} "first"
    }

A line is a constant or a node. A constant is written as numbers in brackets, as `fill`, `seeded`,
or `data` if it is too long to write. A node is written as the tensors it writes with their
types, its operator, the tensors it reads, its attributes and its name.
"""

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ascend_lab.compiler import ir
from ascend_lab.errors import AscendLabError, GraphError, InputError
from ascend_lab.operators.ops import formats
from ascend_lab.operators.ops.casts import ROUNDINGS


def evaluate(graph: ir.Graph, inputs: Mapping[str, Any]) -> dict[str, ir.Values]:
    """Return the outputs by name: each node in fp64 (whole numbers int64), rounded to its type.

    Tensors that are int64 in the model (`Graph.narrowed`) are int64 here, too. Raises `InputError`
    for inputs that are missing or of another shape, and `GraphError` naming a node whose whole
    numbers do not fit in 64 bits.
    """
    # `live` holds the tensors that some node still has to read: a deep network would not fit in
    # memory otherwise
    live = dict(checked_inputs(graph, inputs, wide=True))
    keep = set(graph.outputs)
    unread = {name: len(readers) for name, readers in graph.readers.items()}
    outputs = {name: live[name] for name in keep.intersection(live)}
    outputs |= {name: graph.constants[name].array() for name in keep.intersection(graph.constants)}
    for node in graph.nodes:
        arrays = [live[n] if n in live else graph.constants[n].array() for n in node.inputs]
        values = compute(graph, node, arrays, wide=True)
        results = dict(zip(node.outputs, values, strict=True))
        outputs |= {name: value for name, value in results.items() if name in keep}
        live |= results
        for name in dict.fromkeys(node.inputs):  # forget what has had its last reader
            unread[name] -= 1
            if not unread[name]:
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
    arrays = [formats.widen(array) for array in arrays]
    int64_result = None
    if any(name in graph.narrowed for name in node.outputs):
        int64_result = _int64_values(node, arrays, settings)
    elif node.op == "cast" and graph.types[node.inputs[0]].dtype == "int32":
        _check_cast(node, arrays[0], settings["dtype"])
    try:
        operator.check_indices(arrays, settings)
        with np.errstate(all="ignore"):
            result = operator.formula(*arrays, **settings) if int64_result is None else int64_result
    except AscendLabError as error:
        raise GraphError(f"{node.name}: {error.needed}", error.got, error.remedy) from error
    results = result if isinstance(result, tuple) else (result,)
    return tuple(map(np.asarray, results))


# -- int64 of a model ------------------------------------------------------------------------------
EXACT = 2.0**53
"""fp64 holds every whole number up to here."""
ARITHMETIC = (
    *("add", "sub", "mul", "neg", "abs", "square", "pow", "scatter_add", "reduce_sum"),
    *("reduce_prod", "matmul", "batch_matmul"),
)
"""Operators whose results may be larger than all they read; others choose, move or compare."""


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
    if node.op == "div" and float(np.abs(arrays[0].astype(np.float64)).max(initial=0.0)) > EXACT:
        if not np.all(arrays[1]):
            raise GraphError(f"{node.name}: divisors other than 0", "0", "rewrite the model")
        return np.asarray(np.floor_divide(*arrays))
    if node.op == "pow" and np.any(arrays[1] < 0):
        got = str(int(arrays[1].min()))
        raise GraphError(f"{node.name}: whole exponents of at least 0", got, "cast to float")
    if node.op in ARITHMETIC:
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
    if not np.all((rounded >= -(2.0**63)) & (rounded < 2.0**63)):  # False for NaN, too
        needed = f"{node.name}: int64 numbers that fit in 64 bits"
        raise GraphError(needed, _span(values), "keep what it reads smaller")
    return rounded.astype(np.int64)


def _in_32_bits(node: ir.Node, integers: ir.Values) -> ir.Values:
    """Return int64 numbers as int32; raise `GraphError` naming the node if some do not fit."""
    if integers.size and (integers.min() < -(2**31) or integers.max() >= 2**31):
        needed = f"{node.name}: int64 numbers that fit in 32 bits, as kernels hold them"
        raise GraphError(needed, _span(integers), REMEDY_64)
    return integers.astype(np.int32)


REMEDY_64 = "evaluate the graph in place of its kernels: there int64 has 64 bits"


def _check_cast(node: ir.Node, values: ir.Values, dtype: str) -> None:
    """Raise `GraphError` if some numbers of a cast to int32 do not fit in 32 bits."""
    too_large = values.size and (values.min() < -(2**31) or values.max() >= 2**31)
    if too_large and dtype == "int32":
        needed = f"{node.name}: numbers that fit in int32, which they are cast to"
        raise GraphError(needed, _span(values), "keep them in int64")


def _span(values: ir.Values) -> str:
    """Return the smallest and largest number in words, or "NaN" if some are."""
    if np.isnan(values).any():
        return "NaN"
    return f"numbers from {values.min()} to {values.max()}"


# -- numbers that a format does not hold -----------------------------------------------------------
MOST = {"fp16": 65504.0, "bf16": 3.3895313892515355e38}
"""The largest finite number of each format that networks are converted to."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """Finite numbers of a node that its number format rounds to infinity.

    `largest` is the largest absolute value among them, `share` their fraction of the node's
    numbers. Both are None where the overflow happens inside a kernel and cannot be seen.
    """

    node: str
    op: str
    dtype: str
    largest: float | None
    share: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "node": self.node,
            "op": self.op,
            "format": self.dtype,
            "largest": self.largest,
            "share": self.share,
        }

    def __str__(self) -> str:
        """Return the overflow as one line."""
        if self.largest is None or self.share is None:
            return f"node {self.node} ({self.op}): numbers beyond {self.dtype} inside its kernel"
        return (
            f"node {self.node} ({self.op}): {self.share:.3%} of its numbers, the largest "
            f"{self.largest:.6g}, leave {self.dtype} ({MOST[self.dtype]:g})"
        )


def overflow_of(
    node: ir.Node, arrays: Sequence[ir.Values], found: Sequence[ir.Values], dtypes: Sequence[str]
) -> Overflow | None:
    """Return a node's exact values that overflow the format of an output, None if all fit.

    Attention masks add the lowest number of a format, -65504 in fp16, to the scores of forbidden
    keys. The sum may be -infinity, and softmax makes 0 of either: that is no overflow.
    """
    for exact, dtype in zip(found, dtypes, strict=True):
        if dtype not in MOST or not exact.size:
            continue
        with np.errstate(all="ignore"):
            wide = exact.astype(np.float64)
            overflowed = np.isfinite(wide) & ~np.isfinite(
                formats.round_to(wide, dtype).astype(float)
            )
        if node.op in ("add", "sub") and overflowed.any():
            for array in arrays:
                # a lane whose operand is already the lowest number is masked: no overflow
                is_lowest = np.abs(array.astype(np.float64)) >= MOST[dtype]
                overflowed &= ~np.broadcast_to(is_lowest, overflowed.shape)
        if overflowed.any():
            largest = float(np.abs(wide[overflowed]).max())
            return Overflow(node.name, node.op, dtype, largest, float(overflowed.mean()))
    return None


MASKING = frozenset({"add", "sub", "select"})
"""Operators in which a very negative constant may mean minus infinity: a mask."""


def constants_beyond(graph: ir.Graph, dtype: str) -> list[Overflow]:
    """Return the constants of a model whose finite numbers a format does not hold.

    Kernels read the largest number of the format instead. In a mask, that is as good: the softmax
    of -65504 is 0, as is that of -1e9. So negative constants that only mask are not returned.
    """
    overflows = []
    for name, constant in graph.constants.items():
        readers = graph.readers.get(name, ())
        if not readers or not formats.is_float(constant.type.dtype):
            continue
        wide = constant.array().astype(np.float64)
        overflowed = np.isfinite(wide) & (np.abs(wide) > MOST[dtype])
        if all(node.op in MASKING for node in readers):
            # a large negative number in a mask means -infinity
            overflowed &= wide > 0
        if overflowed.any():
            largest = float(np.abs(wide[overflowed]).max())
            overflows.append(Overflow(name, "constant", dtype, largest, float(overflowed.mean())))
    return overflows


def overflows_in(graph: ir.Graph, inputs: Mapping[str, Any], dtype: str) -> list[Overflow]:
    """Return the nodes of a graph whose floats would leave a narrower format."""
    names = (*graph.inputs, *graph.producers)
    values = evaluate(replace(graph, outputs=names), inputs)
    overflows = []
    for node in graph.nodes:
        arrays = [values[n] if n in values else graph.constants[n].array() for n in node.inputs]
        exact = [values[name] for name in node.outputs]
        kinds = [dtype if formats.is_float(k.dtype) else k.dtype for k in graph.out_types(node)]
        if overflow := overflow_of(node, arrays, exact, kinds):
            overflows.append(overflow)
    return overflows


def not_finite_from(graph: ir.Graph, inputs: Mapping[str, Any]) -> str | None:
    """Return the origin of infinities or NaN in a graph's outputs; None if all are finite.

    The origin is the first node that reads finite numbers only and writes others; if there is none,
    an input or a weight.
    """
    values = evaluate_all(graph, inputs)
    not_finite = {
        n for n, array in values.items() if not np.isfinite(array.astype(np.float64)).all()
    }
    if not_finite.isdisjoint(graph.outputs):
        return None
    for node in graph.nodes:
        if not_finite.isdisjoint(node.inputs) and not not_finite.isdisjoint(node.outputs):
            return f"node {node.name} ({node.op}), which reads finite numbers"
    return "inputs or weights that are not finite"


# -- inputs ----------------------------------------------------------------------------------------
def checked_inputs(
    graph: ir.Graph, inputs: Mapping[str, Any], *, wide: bool = False
) -> dict[str, ir.Values]:
    """Return the inputs as arrays of the graph's types; raise `InputError` where they differ.

    Inputs that are int64 in the model become int64 if `wide`, else int32, and must fit.
    """
    missing = [name for name in graph.inputs if name not in inputs]
    extra = [name for name in inputs if name not in graph.inputs]
    if missing or extra:
        needed = f"{graph.name}: inputs {', '.join(graph.inputs)}"
        got = f"missing {missing}" if missing else f"unknown {extra}"
        raise InputError(needed, got, "pass every input by name")
    int64_names = graph.narrowed if wide else ()
    return {n: as_type(n, inputs[n], graph.types[n], wide=n in int64_names) for n in graph.inputs}


def as_type(name: str, value: Any, wanted: ir.TensorType, *, wide: bool = False) -> ir.Values:
    """Return an array in a tensor's format; raise `InputError` unless its shape and kind fit.

    `wide` asks for int64 where the type says int32.
    """
    array = np.asarray(value)
    if array.shape != wanted.shape:
        same = array.ndim == len(wanted.shape)
        pairs = enumerate(zip(array.shape, wanted.shape, strict=True)) if same else ()
        axis = next((f" at axis {i}" for i, (a, b) in pairs if a != b), "")
        got = f"{array.shape}, which differs{axis}"
        raise InputError(f"input {name} of shape {wanted.shape}", got, "reshape it")
    kind = np.dtype(np.int64) if wide else formats.numpy_type(wanted.dtype)
    word = "int64" if wide else wanted.dtype
    # NumPy's kinds: bool, signed, unsigned, float
    if array.dtype.kind not in "biuf" and array.dtype != kind:
        raise InputError(f"input {name} in {word}", str(array.dtype), "use numbers")
    if kind.kind in "iu":
        if array.dtype.kind == "f":
            raise InputError(f"input {name} in {word}", str(array.dtype), "use astype")
        info = np.iinfo(kind)
        if array.size and (int(array.min()) < info.min or int(array.max()) > info.max):
            got = f"values from {array.min()} to {array.max()}"
            remedy = REMEDY_64 if array.dtype == np.int64 else "scale it"
            raise InputError(f"input {name} within {word}", got, remedy)
    with np.errstate(all="ignore"):
        return array.astype(kind, copy=False)


def random_inputs(graph: ir.Graph, seed: int = 0) -> dict[str, ir.Values]:
    """Return seeded inputs: normal floats, and integers from 0 that are valid as indices."""
    rng = np.random.default_rng(seed)
    limits = dict[str, int]()
    arrays = dict[str, ir.Values]()
    for node in graph.nodes:
        operator = ir.operator_of(node.op)
        if operator.index_bounds:
            shapes = [t.shape for t in graph.in_types(node)]
            settings = operator.settings(node.attrs)
            for place, limit in operator.index_limits(shapes, settings).items():
                name = node.inputs[place]
                # an index read by two gathers must be valid for the smaller table
                limits[name] = min(limit, limits.get(name, limit))
    for name in graph.inputs:
        kind = formats.numpy_type(graph.types[name].dtype)
        shape = graph.types[name].shape
        if kind.kind in "iu":
            arrays[name] = rng.integers(0, limits.get(name, 2), shape).astype(kind)
        else:
            arrays[name] = rng.standard_normal(shape, np.float32).astype(kind)
    return arrays


# -- parameters, products -------------------------------------------------------------------------
STATISTICS = (3, 4)
"""Operands of a batch norm that no gradient changes: running mean and running variance."""


def parameters(graph: ir.Graph) -> int:
    """Return the trainable parameters of a model of the zoo, counted as published.

    Every `Seeded` constant that some node reads counts once, even if several nodes share it.
    Running statistics of batch norms, masks and other constants that are no weights do not count.
    """
    read = {
        name
        for node in graph.nodes
        for place, name in enumerate(node.inputs)
        if not (node.op == "batch_norm" and place in STATISTICS)
    }
    seeded = ((name, c) for name, c in graph.constants.items() if isinstance(c.data, ir.Seeded))
    return sum(c.type.elements for name, c in seeded if name in read)


def node_macs(graph: ir.Graph, node: ir.Node) -> int:
    """Return the multiply-accumulates of one node; 0 unless it multiplies matrices or convolves."""
    kinds = graph.in_types(node)
    out = graph.types[node.output].elements
    if node.op in ("conv2d", "depthwise_conv2d"):
        return out * math.prod(kinds[1].shape[1:])
    # a convolution's output sums Ci / groups * Kh * Kw products; each input of a transposed one is
    # in Co / groups * Kh * Kw
    if node.op == "conv_transpose2d":
        return kinds[0].elements * math.prod(kinds[1].shape[1:])
    if node.op in ("matmul", "batch_matmul", "gemm"):
        return out * kinds[0].shape[-2 if node.attr("trans_a") else -1]
    if node.op == "attention":
        (*_, d), (*_, t, _), (*_, e) = (kind.shape for kind in kinds[:3])
        # Q K^T takes s t d products, (s, t) times V another s t e; out / e = batch heads s
        return out // e * t * (d + e)
    return 0


def macs(graph: ir.Graph) -> int:
    """Return the multiply-accumulates of convolutions and matrix products of a graph."""
    return sum(node_macs(graph, node) for node in graph.nodes)


def published_macs(graph: ir.Graph) -> int:
    """Return the multiply-accumulates of a model of the zoo, counted as published.

    Products with a fixed matrix do not count: papers take the interpolation of a resize as free.
    """
    fixed = {name for name, c in graph.constants.items() if not isinstance(c.data, ir.Seeded)}
    return sum(node_macs(graph, node) for node in graph.nodes if node.inputs[-1] not in fixed)


# -- a graph as a table ---------------------------------------------------------------------------
HEAD = ("node", "operator", "writes", "weights", "MACs")


def table(graph: ir.Graph, *, limit: int | None = None) -> str:
    """Return aligned columns: a line for each of the first `limit` nodes, then the totals.

    Weights are the elements of constants, counted at the first node that reads them; a 0 is left
    blank.
    """
    seen: set[str] = set()
    rows: list[tuple[tuple[str, str, str], int, int]] = []
    for node in graph.nodes:
        first_read = set(node.inputs) - seen
        weights = sum(graph.types[n].elements for n in first_read if n in graph.constants)
        writes = ", ".join(map(str, graph.out_types(node)))
        rows.append(((node.name, node.op, writes), weights, node_macs(graph, node)))
        seen |= first_read
    lines: list[tuple[str, ...]] = [HEAD]
    for texts, *counts in rows[:limit]:
        lines.append((*texts, *(f"{n:,}" if n else "" for n in counts)))
    if len(lines) <= len(rows):
        lines.append((f"... {len(rows) + 1 - len(lines)} more", "", "", "", ""))
    sums = (f"{sum(row[1] for row in rows):,}", f"{sum(row[2] for row in rows):,}")
    lines.append((graph.name, f"{len(rows)} nodes", "", *sums))
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(f"{c:{s}{w}}" for c, s, w in zip(line, "<<<>>", widths, strict=True)).rstrip()
        for line in lines
    )


# -- the text form, read back ---------------------------------------------------------------------
_NAME = r'(?:[A-Za-z_][\w.]*|"(?:[^"\\]|\\.)*")'
_TYPE = r"\w+\[[\d, ]*\](?:@\w+(?::\d+)?)?"
_TYPED = re.compile(rf"({_NAME}): (\w+)\[([\d, ]*)\](?:@(\w+(?::\d+)?))?")
_NAMES = rf"(?:{_NAME}(?:, {_NAME})*)?"
_INPUTS = rf"{_NAME}: {_TYPE}(?:, {_NAME}: {_TYPE})*"
_HEAD = re.compile(rf"graph ({_NAME}) \(((?:{_INPUTS})?)\) -> \(({_NAMES})\) \{{$")
_LINE = re.compile(rf"({_INPUTS}) = (.*)$")
_NODE = re.compile(rf"(\w+)\(({_NAMES})\)(?: \{{(.*)\}})? ({_NAME})$")


def from_text(text: str, data: Mapping[str, ir.Values] | None = None) -> ir.Graph:
    """Return the verified graph of a text form; `data` holds the arrays the text leaves out.

    Raises `GraphError` naming the line.
    """
    lines = [line.strip() for line in text.splitlines()]
    rows = [(n, line) for n, line in enumerate(lines, 1) if line and not line.startswith("#")]
    head = _HEAD.match(rows[0][1]) if rows else None
    if head is None or rows[-1][1] != "}":
        raise GraphError('graph "name" (inputs) -> (outputs) { ... }', text[:40], "see to_text")
    reader = _Reader(data or {})
    inputs = reader.types(head[2])
    for number, line in rows[1:-1]:
        try:
            reader.line(line)
        except (ValueError, SyntaxError, KeyError, TypeError) as error:
            raise GraphError(f"line {number}: a constant or a node", line, str(error)) from error
    return ir.verify(
        ir.Graph(
            _plain(head[1]),
            inputs,
            _names(head[3]),
            tuple(reader.nodes),
            reader.known,
            reader.constants,
        )
    )


def _plain(name: str) -> str:
    return str(json.loads(name)) if name.startswith('"') else name


def _names(text: str) -> tuple[str, ...]:
    return tuple(_plain(name) for name in re.findall(_NAME, text))


class _Reader:
    """The types, constants and nodes of the lines read so far."""

    def __init__(self, data: Mapping[str, ir.Values]) -> None:
        self.data = data
        self.known: dict[str, ir.TensorType] = {}
        self.constants: dict[str, ir.Constant] = {}
        self.nodes: list[ir.Node] = []

    def types(self, text: str) -> tuple[str, ...]:
        names = []
        for quoted, dtype, sizes, layout in _TYPED.findall(text):
            name = _plain(quoted)
            shape = tuple(int(n) for n in sizes.split(",") if n.strip())
            if name in self.known:
                raise GraphError("every name once", f"{name} twice", "rename one")
            self.known[name] = ir.TensorType(shape, dtype, layout or "ND")
            names.append(name)
        return tuple(names)

    def line(self, line: str) -> None:
        match = _LINE.match(line)
        if match is None:
            raise ValueError("write name: type[shape] = ...")
        names = self.types(match[1])
        body = match[2]
        node = _NODE.match(body)
        if node is None:
            (name,) = names
            self.constants[name] = ir.Constant(self.known[name], self.constant(name, body))
            return
        attrs = _attrs(node[3] or "")
        self.nodes.append(ir.Node(_plain(node[4]), node[1], _names(node[2]), names, attrs))

    def constant(self, name: str, body: str) -> ir.Data:
        kind = formats.numpy_type(self.known[name].dtype)
        shape = self.known[name].shape
        if body == "data":
            if name not in self.data:
                raise KeyError(f"pass data={{{name!r}: array}}")
            return np.asarray(self.data[name])
        if body.startswith("["):
            return np.array(json.loads(body)).astype(kind).reshape(shape)
        maker, _, arguments = body.partition("(")
        numbers = ast.literal_eval(f"({arguments.removesuffix(')')},)")
        return ir.Fill(*numbers) if maker == "fill" else {"seeded": ir.Seeded}[maker](*numbers)


def _attrs(text: str) -> dict[str, Any]:
    """Read `key = literal, ...`; literals are Python's."""
    call = ast.parse(f"dict({text})", mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError("key = literal, ...")
    return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
