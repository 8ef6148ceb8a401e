"""What a graph says when asked: its values, its counts, its rows as a table, its text read back.

Values are computed in NumPy, the oracle for passes, compiled programs and importers. Counts are
products and parameters. The text form is what a person reads, and a test compares:

    graph "toy" (x: fp16[1, 3, 8, 8]) -> (y) {
      w: fp16[4, 3, 3, 3] = seeded(7, 0.1)
      y: fp16[1, 4, 8, 8] = conv2d(x, w) {pad = 1} "first"
    }

A line is a constant (numbers in brackets, `fill`, `seeded`, or `data` for what is too long to
write) or a node: the types it writes, operator, names it reads, attributes, its own name.
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

    What is int64 in the model (`Graph.narrowed`) is int64 here, too. Raises `InputError` for inputs
    that are missing or of another shape, `GraphError` naming the node whose int64 numbers leave 64
    bits.
    """
    live = dict(checked_inputs(graph, inputs, wide=True))
    keep = set(graph.outputs)
    left = {name: len(readers) for name, readers in graph.readers.items()}
    found = {name: live[name] for name in keep.intersection(live)}
    found |= {name: graph.constants[name].array() for name in keep.intersection(graph.constants)}
    for node in graph.nodes:
        arrays = [live[n] if n in live else graph.constants[n].array() for n in node.inputs]
        values = compute(graph, node, arrays, wide=True)
        written = dict(zip(node.outputs, values, strict=True))
        found |= {name: value for name, value in written.items() if name in keep}
        live |= written
        for name in dict.fromkeys(node.inputs):  # forget what has had its last reader
            left[name] -= 1
            if not left[name]:
                live.pop(name, None)
    return {name: found[name] for name in graph.outputs}


def evaluate_all(graph: ir.Graph, inputs: Mapping[str, Any]) -> dict[str, ir.Values]:
    """Return every tensor of the graph by name, to see where two graphs part."""
    names = (*graph.inputs, *graph.constants, *graph.producers)
    return evaluate(replace(graph, outputs=names), inputs)


def compute(
    graph: ir.Graph, node: ir.Node, arrays: list[ir.Values], *, wide: bool = False
) -> tuple[ir.Values, ...]:
    """Return what one node writes, rounded once to the types the graph states.

    Tensors that are int64 in the model are checked: they are int32 as on a chip, or int64 if
    `wide`. Raises `GraphError` naming the node whose numbers do not fit.
    """
    found = exact_values(graph, node, arrays)
    types = graph.out_types(node)
    rounded = []
    for name, value, kind in zip(node.outputs, found, types, strict=True):
        if name in graph.narrowed and kind.dtype == "int32":
            whole = whole_numbers(node, value)
            if not wide:
                whole = _in_32_bits(node, whole)
            rounded.append(whole.reshape(kind.shape))
        else:
            rounded.append(formats.round_to(value, kind.dtype).reshape(kind.shape))
    return tuple(rounded)


def exact_values(graph: ir.Graph, node: ir.Node, arrays: list[ir.Values]) -> tuple[ir.Values, ...]:
    """Return what one node writes before it is rounded: fp64, or int64 for whole numbers.

    Raises `GraphError` naming the node, for int64 numbers of the model beyond 64 bits, too.
    """
    operator = ir.operator_of(node.op)
    settings = operator.settings(node.attrs)
    arrays = [formats.widen(array) for array in arrays]
    special = None
    if any(name in graph.narrowed for name in node.outputs):
        special = _int64_values(node, arrays, settings)
    elif node.op == "cast" and graph.types[node.inputs[0]].dtype == "int32":
        _check_cast(node, arrays[0], settings["dtype"])
    try:
        operator.check_indices(arrays, settings)
        with np.errstate(all="ignore"):
            found = operator.formula(*arrays, **settings) if special is None else special
    except AscendLabError as error:
        raise GraphError(f"{node.name}: {error.needed}", error.got, error.remedy) from error
    many = found if isinstance(found, tuple) else (found,)
    return tuple(map(np.asarray, many))


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
    """Return a result of int64 numbers where the operator's formula loses some; None elsewhere.

    Raises `GraphError` where 64 bits do not hold the result: NumPy's whole numbers wrap silently,
    so that arithmetic is done in fp64, too, which tells how large a result is.
    """
    whole = all(array.dtype.kind == "i" for array in arrays)
    if node.op == "cast":  # the operator's own cast saturates at 32 bits
        return arrays[0] if whole else ROUNDINGS[settings["round"]](arrays[0])
    if not whole or not arrays:
        return None
    if node.op == "div" and float(np.abs(arrays[0].astype(np.float64)).max(initial=0.0)) > EXACT:
        if not np.all(arrays[1]):
            raise GraphError(f"{node.name}: divisors other than 0", "0", "rewrite the model")
        return np.asarray(np.floor_divide(*arrays))
    if node.op == "pow" and np.any(arrays[1] < 0):
        got = str(int(arrays[1].min()))
        raise GraphError(f"{node.name}: whole exponents of at least 0", got, "cast to float")
    if node.op in ARITHMETIC:
        formula = ir.operator_of(node.op).formula
        places = (1,) if node.op == "scatter_add" else ()
        sides = [a if i in places else a.astype(np.float64) for i, a in enumerate(arrays)]
        with np.errstate(all="ignore"):
            whole_numbers(node, np.asarray(formula(*sides, **settings)))
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


def _in_32_bits(node: ir.Node, whole: ir.Values) -> ir.Values:
    """Return int64 numbers as int32; raise `GraphError` naming the node where that loses some."""
    if whole.size and (whole.min() < -(2**31) or whole.max() >= 2**31):
        needed = f"{node.name}: int64 numbers that fit in 32 bits, as kernels hold them"
        raise GraphError(needed, _span(whole), REMEDY_64)
    return whole.astype(np.int32)


REMEDY_64 = "evaluate the graph in place of its kernels: there int64 has 64 bits"


def _check_cast(node: ir.Node, values: ir.Values, dtype: str) -> None:
    """Raise `GraphError` where a cast of int64 numbers to int32 would lose some."""
    beyond = values.size and (values.min() < -(2**31) or values.max() >= 2**31)
    if beyond and dtype == "int32":
        needed = f"{node.name}: numbers that fit in int32, which they are cast to"
        raise GraphError(needed, _span(values), "keep them in int64")


def _span(values: ir.Values) -> str:
    """Say how far numbers reach, and that some are NaN."""
    if np.isnan(values).any():
        return "NaN"
    return f"numbers from {values.min()} to {values.max()}"


# -- numbers that a format does not hold -----------------------------------------------------------
MOST = {"fp16": 65504.0, "bf16": 3.3895313892515355e38}
"""The largest number of formats that networks are converted to."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """Finite numbers of a node that its format turns into infinities.

    `largest` is the largest of them in size, `share` their part of the node's numbers; None where
    the kernel does not tell.
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
        """Return it as a line."""
        if self.largest is None or self.share is None:
            return f"node {self.node} ({self.op}): numbers beyond {self.dtype} inside its kernel"
        return (
            f"node {self.node} ({self.op}): {self.share:.3%} of its numbers, the largest "
            f"{self.largest:.6g}, leave {self.dtype} ({MOST[self.dtype]:g})"
        )


def overflow_of(
    node: ir.Node, arrays: Sequence[ir.Values], found: Sequence[ir.Values], dtypes: Sequence[str]
) -> Overflow | None:
    """Return what of a node's exact values leaves the formats of its outputs, None if all fit.

    Where a mask adds the lowest number of the format, minus infinity is what it means.
    """
    for exact, dtype in zip(found, dtypes, strict=True):
        if dtype not in MOST or not exact.size:
            continue
        with np.errstate(all="ignore"):
            wide = exact.astype(np.float64)
            lost = np.isfinite(wide) & ~np.isfinite(formats.round_to(wide, dtype).astype(float))
        if node.op in ("add", "sub") and lost.any():
            for array in arrays:
                ends = np.abs(array.astype(np.float64)) >= MOST[dtype]
                lost &= ~np.broadcast_to(ends, lost.shape)
        if lost.any():
            largest = float(np.abs(wide[lost]).max())
            return Overflow(node.name, node.op, dtype, largest, float(lost.mean()))
    return None


MASKING = frozenset({"add", "sub", "select"})
"""Operators in which a very negative constant may mean minus infinity: a mask."""


def constants_beyond(graph: ir.Graph, dtype: str) -> list[Overflow]:
    """Return the constants of a model whose finite numbers a format does not hold.

    Kernels read the largest number of the format in their place. Negative ones that only mask are
    as good so.
    """
    found = []
    for name, constant in graph.constants.items():
        readers = graph.readers.get(name, ())
        if not readers or not formats.is_float(constant.type.dtype):
            continue
        wide = constant.array().astype(np.float64)
        lost = np.isfinite(wide) & (np.abs(wide) > MOST[dtype])
        if all(node.op in MASKING for node in readers):
            lost &= wide > 0
        if lost.any():
            largest = float(np.abs(wide[lost]).max())
            found.append(Overflow(name, "constant", dtype, largest, float(lost.mean())))
    return found


def overflows_in(graph: ir.Graph, inputs: Mapping[str, Any], dtype: str) -> list[Overflow]:
    """Return the nodes of a graph whose floats would leave a narrower format."""
    names = (*graph.inputs, *graph.producers)
    values = evaluate(replace(graph, outputs=names), inputs)
    found = []
    for node in graph.nodes:
        arrays = [values[n] if n in values else graph.constants[n].array() for n in node.inputs]
        exact = [values[name] for name in node.outputs]
        kinds = [dtype if formats.is_float(k.dtype) else k.dtype for k in graph.out_types(node)]
        if one := overflow_of(node, arrays, exact, kinds):
            found.append(one)
    return found


def not_finite_from(graph: ir.Graph, inputs: Mapping[str, Any]) -> str | None:
    """Return where infinities or NaN of a graph's outputs come from; None if all are finite.

    The first node that makes some of finite numbers, or else what the graph reads.
    """
    values = evaluate_all(graph, inputs)
    wrong = {n for n, array in values.items() if not np.isfinite(array.astype(np.float64)).all()}
    if wrong.isdisjoint(graph.outputs):
        return None
    for node in graph.nodes:
        if wrong.isdisjoint(node.inputs) and not wrong.isdisjoint(node.outputs):
            return f"node {node.name} ({node.op}), which reads finite numbers"
    return "inputs or weights that are not finite"


# -- inputs ----------------------------------------------------------------------------------------
def checked_inputs(
    graph: ir.Graph, inputs: Mapping[str, Any], *, wide: bool = False
) -> dict[str, ir.Values]:
    """Return the inputs as arrays of the graph's types; raise `InputError` where they differ.

    Inputs that are int64 in the model are int64 if `wide`, else int32, and must fit.
    """
    missing = [name for name in graph.inputs if name not in inputs]
    extra = [name for name in inputs if name not in graph.inputs]
    if missing or extra:
        needed = f"{graph.name}: inputs {', '.join(graph.inputs)}"
        got = f"missing {missing}" if missing else f"unknown {extra}"
        raise InputError(needed, got, "pass every input by name")
    long = graph.narrowed if wide else ()
    return {n: as_type(n, inputs[n], graph.types[n], wide=n in long) for n in graph.inputs}


def as_type(name: str, value: Any, wanted: ir.TensorType, *, wide: bool = False) -> ir.Values:
    """Return an array in a tensor's format; raise `InputError` unless its shape and kind fit.

    `wide`: in int64 in place of int32.
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
    """Return seeded inputs: normal numbers; whole numbers from 0, inside what indexes allow."""
    rng = np.random.default_rng(seed)
    limits = dict[str, int]()
    found = dict[str, ir.Values]()
    for node in graph.nodes:
        operator = ir.operator_of(node.op)
        if operator.index_bounds:
            shapes = [t.shape for t in graph.in_types(node)]
            settings = operator.settings(node.attrs)
            for place, limit in operator.index_limits(shapes, settings).items():
                name = node.inputs[place]
                limits[name] = min(limit, limits.get(name, limit))
    for name in graph.inputs:
        kind = formats.numpy_type(graph.types[name].dtype)
        shape = graph.types[name].shape
        if kind.kind in "iu":
            found[name] = rng.integers(0, limits.get(name, 2), shape).astype(kind)
        else:
            found[name] = rng.standard_normal(shape, np.float32).astype(kind)
    return found


# -- parameters, products -------------------------------------------------------------------------
STATISTICS = (3, 4)
"""Inputs of a batch norm that training averages but no gradient changes: mean and variance."""


def parameters(graph: ir.Graph) -> int:
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
    found = ((name, c) for name, c in graph.constants.items() if isinstance(c.data, ir.Seeded))
    return sum(c.type.elements for name, c in found if name in read)


def node_macs(graph: ir.Graph, node: ir.Node) -> int:
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


def macs(graph: ir.Graph) -> int:
    """Return the multiply-accumulates of convolutions and matrix products of a graph."""
    return sum(node_macs(graph, node) for node in graph.nodes)


def published_macs(graph: ir.Graph) -> int:
    """Return the multiply-accumulates of a model of the zoo, counted as published.

    All but those with a fixed matrix, which is no weight: the interpolation of a resize is free.
    """
    fixed = {name for name, c in graph.constants.items() if not isinstance(c.data, ir.Seeded)}
    return sum(node_macs(graph, node) for node in graph.nodes if node.inputs[-1] not in fixed)


# -- a graph as a table ---------------------------------------------------------------------------
HEAD = ("node", "operator", "writes", "weights", "MACs")


def table(graph: ir.Graph, *, limit: int | None = None) -> str:
    """Return aligned columns, a line for each node (of the first `limit`), the last the totals.

    Weights are elements of constants, counted where they are first read; zeros are left empty.
    """
    seen: set[str] = set()
    rows: list[tuple[tuple[str, str, str], int, int]] = []
    for node in graph.nodes:
        new = set(node.inputs) - seen
        weights = sum(graph.types[n].elements for n in new if n in graph.constants)
        writes = ", ".join(map(str, graph.out_types(node)))
        rows.append(((node.name, node.op, writes), weights, node_macs(graph, node)))
        seen |= new
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
    return tuple(_plain(found) for found in re.findall(_NAME, text))


class _Reader:
    """What the lines read so far amount to."""

    def __init__(self, data: Mapping[str, ir.Values]) -> None:
        self.data = data
        self.known: dict[str, ir.TensorType] = {}
        self.constants: dict[str, ir.Constant] = {}
        self.nodes: list[ir.Node] = []

    def types(self, text: str) -> tuple[str, ...]:
        names = []
        for found, dtype, sizes, layout in _TYPED.findall(text):
            name = _plain(found)
            shape = tuple(int(n) for n in sizes.split(",") if n.strip())
            if name in self.known:
                raise GraphError("every name once", f"{name} twice", "rename one")
            self.known[name] = ir.TensorType(shape, dtype, layout or "ND")
            names.append(name)
        return tuple(names)

    def line(self, line: str) -> None:
        halves = _LINE.match(line)
        if halves is None:
            raise ValueError("write name: type[shape] = ...")
        names = self.types(halves[1])
        body = halves[2]
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
        maker, _, rest = body.partition("(")
        numbers = ast.literal_eval(f"({rest.removesuffix(')')},)")
        return ir.Fill(*numbers) if maker == "fill" else {"seeded": ir.Seeded}[maker](*numbers)


def _attrs(text: str) -> dict[str, Any]:
    """Read `key = literal, ...`; literals are Python's."""
    call = ast.parse(f"dict({text})", mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError("key = literal, ...")
    return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
