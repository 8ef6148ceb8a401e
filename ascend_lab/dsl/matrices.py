"""Stages of a matrix product: which operand each one holds, and how that is stored in fractals."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.dsl.expr import Call, Expr, Read
from ascend_lab.dsl.stages import FRACTAL, Stage, State
from ascend_lab.isa import c0_of

CUBE_SCOPES = ("L1", "L0A", "L0B", "L0C")


@dataclass(frozen=True, slots=True)
class Matrix:
    """Which dimensions of a tensor are a matrix for the cube, in the order it is stored.

    `major` counts fractal columns (k, or n of C), `minor` fractal rows; units in elements.
    """

    major: int
    minor: int
    major_unit: int
    minor_unit: int
    batch: tuple[int, ...]

    @property
    def area(self) -> int:
        """Elements of one fractal."""
        return self.major_unit * self.minor_unit


def is_fractal(state: State, stage: Stage) -> bool:
    """True if the stage is part of a matrix product."""
    return role_of(state, stage) != ""


def role_of(state: State, stage: Stage) -> str:
    """Return "A", "B" or "C" for the operand a stage holds, or nothing."""
    if stage.is_cube:
        return "C"
    if stage.scope in ("L0A", "L0B"):
        return stage.scope[-1]
    if stage.scope == "L1":
        below = state.readers(stage.name)
        return role_of(state, below[0]) if below and isinstance(below[0], Stage) else ""
    if not stage.is_copy and plain_read(stage.expr) is None:
        return ""
    source = state.find(stage.sources[0])
    if not isinstance(source, Stage) or source.scope == "GM":
        return ""
    return role_of(state, source)


def plain_read(expr: Expr) -> Read | None:
    """Return the element behind casts, copies and a ReLU on the way out of L0C."""
    while isinstance(expr, Call) and expr.op in ("vcopy", "vconv", "vrelu") and len(expr.args) == 1:
        expr = expr.args[0]
    return expr if isinstance(expr, Read) else None


def has_relu(expr: Expr) -> bool:
    """True if a ReLU is applied on the way."""
    return isinstance(expr, Call) and (expr.op == "vrelu" or any(map(has_relu, expr.args)))


def product_of(state: State, stage: Stage) -> Stage:
    """Return the cube stage a stage belongs to."""
    if stage.is_cube:
        return stage
    if stage.scope in CUBE_SCOPES:
        below = state.readers(stage.name)[0]
        assert isinstance(below, Stage)
        return product_of(state, below)
    return product_of(state, state.stage(stage.sources[0]))


def matrix_of(cube: Stage, role: str) -> Matrix:
    """Return how operand "A", "B" or "C" of a cube stage is stored."""
    c0 = c0_of(cube.reads[0].dtype)
    if role == "C":
        names = [a.name for a in cube.axes]
        major, minor = names.index("n"), names.index("m")
        return Matrix(major, minor, FRACTAL, FRACTAL, _others(len(names), major, minor))
    read = cube.reads[0] if role == "A" else cube.reads[1]
    dims = {dict(i.terms).popitem()[0]: d for d, i in enumerate(read.index) if i.terms}
    major, minor = dims["k"], dims["m" if role == "A" else "n"]
    return Matrix(major, minor, c0, FRACTAL, _others(len(read.index), major, minor))


def _others(rank: int, major: int, minor: int) -> tuple[int, ...]:
    return tuple(d for d in range(rank) if d not in (major, minor))


def stored_elements(shape: tuple[int, ...], matrix: Matrix) -> int:
    """Return the elements a tensor takes in fractal layout."""
    count = matrix.area
    for dim, unit in ((matrix.major, matrix.major_unit), (matrix.minor, matrix.minor_unit)):
        count *= -(-shape[dim] // unit)
    for dim in matrix.batch:
        count *= shape[dim]
    return count
