"""How a matmul is cut so that its tiles fit on chip, and the bytes that then move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ascend_lab.errors import MachineError
from ascend_lab.machines.program import Array, Matmul

ACCUMULATE: Mapping[str, str] = {
    "float16": "float32",
    "float32": "float32",
    "float64": "float64",
    "int8": "int32",
    "int32": "int32",
}
"""Number format of the inputs -> format of the sums."""


@dataclass(frozen=True, slots=True)
class Blocking:
    """Output tiles of `rows` x `columns` elements, and the traffic they cause."""

    rows: int
    columns: int
    tiles: int
    bytes_in: int
    bytes_out: int


def blocking(
    program: Matmul, in_bytes: int, out_bytes: int, local_bytes: int, unit: int = 1
) -> Blocking:
    """Return the largest square tiling whose three tiles fit in `local_bytes`.

    A is read once per column of tiles and B once per row of tiles:
    bytes_in = in_bytes * (m k ceil(n / columns) + k n ceil(m / rows)). Tiles are multiples of
    `unit`; where C is narrower than the square, the room goes to the other side.
    """
    square = math.isqrt(local_bytes // (2 * in_bytes + out_bytes)) // unit * unit
    if square < unit:
        raise MachineError(
            f"one {unit} x {unit} tile of A, B and C needs "
            f"{unit * unit * (2 * in_bytes + out_bytes)} bytes of on-chip memory",
            f"{local_bytes} bytes",
            "enlarge local_bytes",
        )
    high, wide = (-(-side // unit) * unit for side in (program.m, program.n))
    deep = min(program.k, square)

    def longest(other: int) -> int:
        free = local_bytes - in_bytes * other * deep
        return max(square, free // (in_bytes * deep + out_bytes * other) // unit * unit)

    rows = min(high, square if wide >= square else longest(wide))
    columns = min(wide, square if high >= square else longest(high))
    down, across = -(-program.m // rows), -(-program.n // columns)
    moved = program.m * program.k * across + program.k * program.n * down
    return Blocking(
        rows, columns, down * across, in_bytes * moved, out_bytes * program.m * program.n
    )


def operands(program: Matmul, inputs: Mapping[str, Array]) -> tuple[Array, Array, np.dtype]:
    """Return A, B and the accumulation format; raise `MachineError` for a wrong shape or format."""
    wanted = {"A": (program.m, program.k), "B": (program.k, program.n)}
    for name, shape in wanted.items():
        got = np.shape(inputs[name]) if name in inputs else "no such input"
        if got != shape:
            raise MachineError(
                f"{program.name} needs {name} of shape {shape}", str(got), "pass it in inputs"
            )
    a, b = np.asarray(inputs["A"]), np.asarray(inputs["B"])
    if a.dtype != b.dtype or str(a.dtype) not in ACCUMULATE:
        raise MachineError(
            f"{program.name} needs A and B in one format of {', '.join(ACCUMULATE)}",
            f"{a.dtype} and {b.dtype}",
            "convert them",
        )
    return a, b, np.dtype(ACCUMULATE[str(a.dtype)])


def product(a: Array, b: Array, accumulate: np.dtype) -> Array:
    """Return A B with sums in `accumulate`; the order of the sums is NumPy's, not the machine's."""
    return np.asarray(np.matmul(a.astype(accumulate), b.astype(accumulate)))
