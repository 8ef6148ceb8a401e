"""`run(machine, program, inputs)`: pick the rule that belongs to the machine and the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from ascend_lab.errors import MachineError
from ascend_lab.machines.cube import Cube, cube_kernel, cube_matmul
from ascend_lab.machines.library import sample_inputs
from ascend_lab.machines.occupancy import Simt
from ascend_lab.machines.program import Array, Kernel, Matmul, Program
from ascend_lab.machines.result import Run
from ascend_lab.machines.scalar import Scalar, scalar_kernel, scalar_matmul
from ascend_lab.machines.simd import Simd, simd_kernel, simd_matmul
from ascend_lab.machines.simt import simt_kernel
from ascend_lab.machines.simt_matmul import simt_matmul
from ascend_lab.machines.systolic import Systolic, systolic_kernel, systolic_matmul

Machine: TypeAlias = Scalar | Simd | Simt | Systolic | Cube
Rule: TypeAlias = Callable[[Any, Any, Mapping[str, Array]], Run]

RULES: Mapping[type, tuple[Rule, Rule]] = MappingProxyType(
    {
        Scalar: (scalar_kernel, scalar_matmul),
        Simd: (simd_kernel, simd_matmul),
        Simt: (simt_kernel, simt_matmul),
        Systolic: (systolic_kernel, systolic_matmul),
        Cube: (cube_kernel, cube_matmul),
    }
)
"""Kind of machine -> how it runs a `Kernel`, how it runs a `Matmul`."""


def run(machine: Machine, program: Program, inputs: Mapping[str, Array] | None = None) -> Run:
    """Execute a program on a machine: values, cycles, their causes, counters.

    Without inputs, small random whole numbers are used (`sample_inputs`). Raises `MachineError`
    for inputs that do not fit the program and for programs the machine has no instructions for.
    """
    if type(machine) not in RULES:
        known = ", ".join(kind.__name__ for kind in RULES)
        raise MachineError(f"run needs a machine: {known}", repr(machine), "build one of these")
    if not isinstance(program, Kernel | Matmul):
        raise MachineError("run needs a Kernel or a Matmul", repr(program), "see machines.saxpy")
    rule = RULES[type(machine)][isinstance(program, Matmul)]
    return rule(machine, program, sample_inputs(program) if inputs is None else inputs)
