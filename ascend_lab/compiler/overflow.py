"""Finds nodes whose finite numbers a number format rounds to infinity, such as 70,000 in fp16."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ascend_lab.compiler import ir
from ascend_lab.compiler.evaluate import evaluate, evaluate_all
from ascend_lab.operators.ops import formats

LARGEST_FINITE = {"fp16": 65504.0, "bf16": 3.3895313892515355e38}
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
        """Return the overflow as plain data."""
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
            f"{self.largest:.6g}, leave {self.dtype} ({LARGEST_FINITE[self.dtype]:g})"
        )


def overflow_of(
    node: ir.Node,
    arrays: Sequence[ir.Values],
    exact_values: Sequence[ir.Values],
    dtypes: Sequence[str],
) -> Overflow | None:
    """Return a node's exact values that overflow the format of an output, None if all fit.

    Attention masks add the lowest number of a format, -65504 in fp16, to the scores of forbidden
    keys. The sum may be -infinity; softmax turns both into 0, so this does not count as overflow.
    """
    for exact, dtype in zip(exact_values, dtypes, strict=True):
        if dtype not in LARGEST_FINITE or not exact.size:
            continue
        # 70,000 is finite in fp64 and infinite in fp16: an overflow; infinity in fp64 is not one
        with np.errstate(all="ignore"):
            exact_fp64 = exact.astype(np.float64)
            overflowed = np.isfinite(exact_fp64) & ~np.isfinite(
                formats.round_to(exact_fp64, dtype).astype(float)
            )
        if node.op in ("add", "sub") and overflowed.any():
            for array in arrays:
                # a lane whose operand is the lowest (or largest) number is masked: no overflow
                is_lowest = np.abs(array.astype(np.float64)) >= LARGEST_FINITE[dtype]
                overflowed &= ~np.broadcast_to(is_lowest, overflowed.shape)
        if overflowed.any():
            largest = float(np.abs(exact_fp64[overflowed]).max())
            return Overflow(node.name, node.op, dtype, largest, float(overflowed.mean()))
    return None


MASKING_OPS = frozenset({"add", "sub", "select"})
"""Operators in which a very negative constant may mean minus infinity: a mask."""


def _float_constants(
    graph: ir.Graph,
) -> Iterator[tuple[str, ir.Values, Sequence[ir.Node]]]:
    """Yield name, values in fp64 and readers of the float constants that some node reads."""
    for name, constant in graph.constants.items():
        readers = graph.readers.get(name, ())
        if readers and formats.is_float(constant.type.dtype):
            yield name, constant.array().astype(np.float64), readers


def _constant_line(name: str, readers: Sequence[ir.Node], fault: str) -> str:
    """Return a fault of a constant as a line that names the constant and its first reader."""
    return f"constant {name}, read by node {readers[0].name} ({readers[0].op}): {fault}"


def constants_beyond(graph: ir.Graph, dtype: str) -> list[Overflow]:
    """Return the constants of a model that hold finite numbers beyond a format's range.

    Kernels read the format's largest number instead. In a mask this changes nothing: the softmax of
    -65504 is 0, as is that of -1e9. So negative constants that are only masks are not returned.
    """
    overflows = []
    for name, values, readers in _float_constants(graph):
        overflowed = np.isfinite(values) & (np.abs(values) > LARGEST_FINITE[dtype])
        if all(node.op in MASKING_OPS for node in readers):
            # a large negative number in a mask means -infinity
            overflowed &= values > 0
        if overflowed.any():
            largest = float(np.abs(values[overflowed]).max())
            overflows.append(Overflow(name, "constant", dtype, largest, float(overflowed.mean())))
    return overflows


MAY_READ_INFINITY = MASKING_OPS | {"min", "max", "clip", "less", "greater", "equal", "pad"}
"""Operators that models give an infinite constant on purpose, such as a bound that never holds."""


def broken_constants(graph: ir.Graph) -> list[str]:
    """Return a line for each constant that holds NaN, or an infinity no operator has a use for.

    Every kernel that reads such a weight computes NaN or infinities, without an error.
    """
    lines = []
    for name, values, readers in _float_constants(graph):
        broken = np.isnan(values)
        if not all(node.op in MAY_READ_INFINITY for node in readers):
            broken |= np.isinf(values)
        if broken.any():
            fault = f"{broken.sum():,} of its numbers not finite"
            lines.append(_constant_line(name, readers, fault))
    return lines


def vanished_constants(graph: ir.Graph, dtype: str) -> list[str]:
    """Return a line for each constant most of whose numbers a format rounds to zero.

    Weights of 1e-9 are 0 in fp16, whose least number is 6e-8: what reads them computes zeros.
    """
    lines = []
    for name, values, readers in _float_constants(graph):
        if all(node.op in ("add", "sub") for node in readers):
            continue  # to add 1e-9 or 0 is nearly the same: a bias, the epsilon of a norm
        with np.errstate(all="ignore"):
            rounded = formats.round_to(values, dtype).astype(np.float64)
        nonzero = np.count_nonzero(values)
        vanished = np.count_nonzero((values != 0) & (rounded == 0))
        if 2 * vanished > nonzero:
            fault = f"{vanished:,} of its {nonzero:,} numbers other than 0 are 0 in {dtype}"
            lines.append(f"{_constant_line(name, readers, fault)}; scale the weights")
    return lines


def overflows_in(graph: ir.Graph, inputs: Mapping[str, Any], dtype: str) -> list[Overflow]:
    """Return the nodes of a graph whose floats would overflow a narrower format."""
    # all tensors become outputs, so that evaluation returns their values
    names = (*graph.inputs, *graph.producers)
    values = evaluate(replace(graph, outputs=names), inputs)
    overflows = []
    for node in graph.nodes:
        arrays = [values[n] if n in values else graph.constants[n].array() for n in node.inputs]
        exact = [values[name] for name in node.outputs]
        # whole numbers keep their format; only floats are converted
        kinds = [dtype if formats.is_float(k.dtype) else k.dtype for k in graph.out_types(node)]
        if overflow := overflow_of(node, arrays, exact, kinds):
            overflows.append(overflow)
    return overflows


def not_finite_from(graph: ir.Graph, inputs: Mapping[str, Any]) -> str | None:
    """Return the origin of infinities or NaN in a graph's outputs; None if all are finite.

    The origin is the first node that reads only finite numbers and writes infinities or NaN; if
    there is none, it is an input or a weight.
    """
    values = evaluate_all(graph, inputs)
    not_finite = {
        n for n, array in values.items() if not np.isfinite(array.astype(np.float64)).all()
    }
    if not_finite.isdisjoint(graph.outputs):
        return None
    for node in graph.nodes:
        # e.g. a division by zero, or the logarithm of a negative number
        if not_finite.isdisjoint(node.inputs) and not not_finite.isdisjoint(node.outputs):
            return f"node {node.name} ({node.op}) makes them of finite numbers"
    for name in graph.inputs:
        if name in not_finite:
            return f"input {name} is not finite already"
    # what is left are constants: an infinity that only some operators have a use for, or NaN
    return next(iter(broken_constants(graph)), "a weight is not finite already")
