"""Small machines that run the same programs: scalar, SIMD, SIMT, systolic array, cube unit.

`run(machine, program, inputs)` executes a program for its values and times the very instructions
that were counted while executing. All cycles are those of a teaching model: numbers that belong
to real machines are in `facts.toml` with their sources.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from ascend_lab.lab.machines import matrix_units, program as pr, simd

# fmt: off
# isort: off
from ascend_lab.lab.machines.lanes import Port, bank_ways, units_touched
from ascend_lab.lab.machines.matrix_units import Block, Cube, Systolic, array_cycles
from ascend_lab.lab.machines.program import (
    Arith, Branch, Breakdown, Kernel, Line, Load, Matmul, Program, Run, Store, Total, walk,
)
from ascend_lab.lab.machines.roofline import fact, tops_per_watt
from ascend_lab.lab.machines.simd import (
    Scalar, Simd, VectorOp, plain_ops, run_vector, vector_cycles,
)
from ascend_lab.lab.machines.simt import Simt, occupancy, simt_kernel, simt_matmul

__all__ = [
    "Arith", "Block", "Branch", "Breakdown", "Cube", "Kernel", "Line", "Load", "Machine",
    "Matmul", "Port", "Run", "Scalar", "Simd", "Simt", "Store", "Systolic", "Total", "VectorOp",
    "array_cycles", "bank_ways", "fact", "gather", "masked_add", "occupancy", "plain_ops",
    "run", "run_vector", "sample_inputs", "saxpy", "strided_copy", "tops_per_watt", "total",
    "two_sided", "units_touched", "vector_cycles",
]
# fmt: on
def saxpy(n: int) -> Kernel:
    """Return y = a*x + y over n elements: 2 operations and 3 memory accesses per element."""
    body = (Load("x", "x"), Load("y", "y"), Arith("y", "mad", ("a", "x", "y")), Store("y", "y"))
    return Kernel("saxpy", n, body, ("a",))


def masked_add(n: int) -> Kernel:
    """Return y = x + y where mask is set, else y unchanged."""
    add = Branch("m", then=(Load("x", "x"), Arith("y", "add", ("x", "y"))))
    return Kernel("masked add", n, (Load("m", "mask"), Load("y", "y"), add, Store("y", "y")))


def total(n: int) -> Kernel:
    """Return s[0] = sum of x: a reduction."""
    return Kernel("reduction", n, (Load("x", "x"), Total("s", "x")))


def two_sided(n: int, depth: int = 8) -> Kernel:
    """Return a branch with `depth` mads on each side: the cost of divergence in the open."""
    sides = ((Arith("y", "mad", (factor, "x", "y")),) * depth for factor in "ab")
    loads = Load("m", "mask"), Load("x", "x"), Load("y", "y")
    body = *loads, Branch("m", *sides), Store("y", "y")
    return Kernel("two-sided branch", n, body, ("a", "b"))


def strided_copy(n: int, stride: int) -> Kernel:
    """Return y[i] = x[stride*i]: n useful elements from an array of stride*n."""
    return Kernel("strided copy", n, (Load("x", "x", stride), Store("y", "x")))


def gather(n: int) -> Kernel:
    """Return y[i] = x[idx[i]]: addresses that are data."""
    return Kernel("gather", n, (Load("j", "idx"), Load("x", "x", index="j"), Store("y", "x")))


def sample_inputs(
    program: Program, seed: int = 0, dtype: DTypeLike = np.float32, density: float = 0.5
) -> dict[str, pr.Array]:
    """Return random inputs of the right shapes, with small whole values that no format rounds.

    `density` is the share of ones in arrays named `mask`; arrays named `idx` hold element numbers.
    """
    rng = np.random.default_rng(seed)
    if isinstance(program, Matmul):
        shapes = {"A": (program.m, program.k), "B": (program.k, program.n)}
        return {name: rng.integers(-2, 3, shape).astype(dtype) for name, shape in shapes.items()}
    inputs: dict[str, pr.Array] = {name: np.asarray(2, dtype) for name in program.params}
    for instr in walk(program.body):
        if not isinstance(instr, Load) or instr.array in inputs:
            continue
        size = instr.stride * (program.n - 1) + 1
        if instr.array == "mask":
            inputs[instr.array] = rng.random(size) < density
        elif instr.array == "idx":
            inputs[instr.array] = rng.integers(0, program.n, size)
        else:
            inputs[instr.array] = rng.integers(-4, 5, size).astype(dtype)
    return inputs


# -- `run(machine, program, inputs)`: pick the rule that belongs to the machine and the program ----
Machine: TypeAlias = Scalar | Simd | Simt | Systolic | Cube
Rule: TypeAlias = Callable[[Any, Any, pr.Arrays], Run]
RULES: Mapping[type, tuple[Rule, Rule]] = MappingProxyType(
    {
        Scalar: (simd.scalar_kernel, simd.scalar_matmul),
        Simd: (simd.simd_kernel, simd.simd_matmul),
        Simt: (simt_kernel, simt_matmul),
        Systolic: (matrix_units.matrix_kernel, matrix_units.systolic_matmul),
        Cube: (matrix_units.matrix_kernel, matrix_units.cube_matmul),
    }
)
"""Kind of machine -> how it runs a `Kernel`, how it runs a `Matmul`."""


def run(machine: Machine, program: Program, inputs: pr.Arrays | None = None) -> Run:
    """Execute a program on a machine: values, cycles, their causes, counters.

    Without inputs, small random whole numbers are used (`sample_inputs`). Raises `MachineError`
    for programs the machine has no instructions for.
    """
    rule = RULES[type(machine)][isinstance(program, Matmul)]
    return rule(machine, program, sample_inputs(program) if inputs is None else inputs)
