"""Small machines that run the same programs: scalar, SIMD, SIMT, systolic array, cube unit.

`run(machine, program, inputs)` executes a program for its values and times the very instructions
that were counted while executing. All cycles are those of a teaching model: numbers that belong
to real machines are in `facts.toml` with their sources.
"""

from ascend_lab.machines.cube import Block, Cube
from ascend_lab.machines.dispatch import Machine, run
from ascend_lab.machines.facts import fact, preset, preset_names, tops_per_watt
from ascend_lab.machines.library import (
    gather,
    masked_add,
    reference,
    sample_inputs,
    saxpy,
    strided_copy,
    total,
    two_sided,
)
from ascend_lab.machines.memory import Port, bank_ways, units_touched
from ascend_lab.machines.occupancy import Simt, occupancy
from ascend_lab.machines.program import Arith, Branch, Kernel, Load, Matmul, Store, Total
from ascend_lab.machines.result import Breakdown, Line, Run
from ascend_lab.machines.scalar import Scalar
from ascend_lab.machines.simd import Simd, vector_cycles
from ascend_lab.machines.systolic import Systolic
from ascend_lab.machines.vector_unit import VectorOp, plain_ops, run_vector

__all__ = [
    "Arith",
    "Block",
    "Branch",
    "Breakdown",
    "Cube",
    "Kernel",
    "Line",
    "Load",
    "Machine",
    "Matmul",
    "Port",
    "Run",
    "Scalar",
    "Simd",
    "Simt",
    "Store",
    "Systolic",
    "Total",
    "VectorOp",
    "bank_ways",
    "fact",
    "gather",
    "masked_add",
    "occupancy",
    "plain_ops",
    "preset",
    "preset_names",
    "reference",
    "run",
    "run_vector",
    "sample_inputs",
    "saxpy",
    "strided_copy",
    "tops_per_watt",
    "total",
    "two_sided",
    "units_touched",
    "vector_cycles",
]
