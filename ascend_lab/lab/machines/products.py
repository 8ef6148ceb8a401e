"""How a matmul is cut so that its tiles fit on chip, and the bytes that then move."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ascend_lab.errors import MachineError
from ascend_lab.lab.machines import program as pr

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
    program: pr.Matmul, in_bytes: int, out_bytes: int, local_bytes: int, unit: int = 1
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


def operands(
    program: pr.Matmul, inputs: Mapping[str, pr.Array]
) -> tuple[pr.Array, pr.Array, np.dtype]:
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
        needed = f"{program.name} needs A and B in one format of {', '.join(ACCUMULATE)}"
        raise MachineError(needed, f"{a.dtype} and {b.dtype}", "convert them")
    return a, b, np.dtype(ACCUMULATE[str(a.dtype)])


def product(a: pr.Array, b: pr.Array, accumulate: np.dtype) -> pr.Array:
    """Return A B with sums in `accumulate`; the order of the sums is NumPy's, not the machine's."""
    return np.asarray(np.matmul(a.astype(accumulate), b.astype(accumulate)))


# Elementwise work as a matmul: what a machine that can only multiply matrices must do with it.
#
# If every output is a sum of inputs times numbers, out = c1*x1 + c2*x2 + ..., it is the product of
# a small matrix of numbers with the stacked inputs. With the elements folded into r rows,
#
#     out (r x n/r) = [c1*I | c2*I | ...] (r x p*r)  @  [X1; X2; ...] (p*r x n/r).


Form = dict[str, float]
"""Array name -> its factor; the empty name is a plain number."""


@dataclass(frozen=True, slots=True)
class AsMatmul:
    """The matmul that stands for a kernel, and where its result belongs."""

    a: pr.Array
    b: pr.Array
    output: str
    is_total: bool


def as_matmul(
    kernel: pr.Kernel, inputs: Mapping[str, pr.Array], rows: int, machine: str
) -> AsMatmul:
    """Return the matmul that computes the kernel, with its elements folded into `rows` rows.

    Raises `MachineError` for a kernel that is not a sum of inputs times numbers.
    """
    pr.check_inputs(kernel, inputs)
    dtype = pr.number_format(kernel, inputs)
    if rows < 1:
        raise MachineError("fold needs at least one row", str(rows), "use 1")
    last = kernel.body[-1]
    if not isinstance(last, pr.Store | pr.Total):
        raise _refuse(kernel, pr.text(last), machine)
    form = _linear_form(kernel, inputs, last.src, machine)
    stacked = [np.asarray(inputs[name])[: kernel.n] for name in form]
    factors = np.array(list(form.values()), dtype)
    if isinstance(last, pr.Total):
        a = np.concatenate(stacked)[None, :]
        return AsMatmul(a, np.repeat(factors, kernel.n)[:, None], last.array, True)
    columns = -(-kernel.n // rows)
    b = np.zeros((len(form), rows * columns), dtype)
    b[:, : kernel.n] = stacked
    a = np.kron(factors[None, :], np.eye(rows, dtype=dtype))
    return AsMatmul(a, b.reshape(len(form) * rows, columns), last.array, False)


def unfold(kernel: pr.Kernel, c: pr.Array, matmul: AsMatmul) -> dict[str, pr.Array]:
    """Return the kernel's outputs from the product, rounded to the format of the inputs."""
    flat = c.astype(matmul.b.dtype).ravel()
    return {matmul.output: flat[:1] if matmul.is_total else flat[: kernel.n]}


def _linear_form(kernel: pr.Kernel, inputs: Mapping[str, pr.Array], out: str, machine: str) -> Form:
    regs: dict[str, Form] = {}

    def value(arg: pr.Operand) -> Form:
        if not isinstance(arg, str):
            return {"": float(arg)}
        return regs[arg] if arg in regs else {"": float(inputs[arg])}

    for instr in kernel.body:
        if isinstance(instr, pr.Load) and (instr.stride, instr.offset, instr.index) == (1, 0, ""):
            regs[instr.dst] = {instr.array: 1.0}
        elif isinstance(instr, pr.Arith):
            form = _combine(instr.op, [value(arg) for arg in instr.args])
            if form is None:
                raise _refuse(kernel, pr.text(instr), machine)
            regs[instr.dst] = form
        elif not isinstance(instr, pr.Store | pr.Total) or instr is not kernel.body[-1]:
            raise _refuse(kernel, pr.text(instr), machine)
    form = value(out)
    if form.get("", 0.0) or not form.keys() - {""}:
        raise _refuse(kernel, "a constant term", machine)
    return {name: factor for name, factor in form.items() if name}


def _combine(op: str, forms: list[Form]) -> Form | None:
    """Return the form of one operation, or None where the result is not linear."""
    if op in ("add", "sub"):
        sign = 1.0 if op == "add" else -1.0
        return _plus(forms[0], {name: sign * factor for name, factor in forms[1].items()})
    if op in ("mul", "mad"):
        first, second = forms[0], forms[1]
        if first.keys() - {""}:
            first, second = second, first
        if first.keys() - {""}:
            return None
        scaled = {name: first.get("", 0.0) * factor for name, factor in second.items()}
        return scaled if op == "mul" else _plus(scaled, forms[2])
    return None


def _plus(left: Form, right: Form) -> Form:
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in {**left, **right}}


def _refuse(kernel: pr.Kernel, what: str, machine: str) -> MachineError:
    return MachineError(
        f"{machine} multiplies matrices and nothing else; {kernel.name} must be a sum of whole "
        "arrays times numbers",
        what,
        "run it on a machine with a vector unit",
    )
