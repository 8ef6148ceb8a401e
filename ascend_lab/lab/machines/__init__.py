"""Small machines that run the same programs: scalar, SIMD, SIMT, systolic array, cube unit.

`run(machine, program, inputs)` executes a program for its values and times the very instructions
that were counted while executing. All cycles are those of a teaching model: numbers that belong
to real machines are in `facts.toml` with their sources.
"""

# fmt: off
# isort: off
from ascend_lab.lab.machines.lanes import Port, bank_ways, units_touched
from ascend_lab.lab.machines.library import (
    Machine, gather, masked_add, reference, run, sample_inputs, saxpy, strided_copy, total,
    two_sided,
)
from ascend_lab.lab.machines.matrix_units import Block, Cube, Systolic, array_cycles
from ascend_lab.lab.machines.program import (
    Arith, Branch, Breakdown, Kernel, Line, Load, Matmul, Run, Store, Total,
)
from ascend_lab.lab.machines.roofline import fact, tops_per_watt
from ascend_lab.lab.machines.simd import (
    Scalar, Simd, VectorOp, plain_ops, run_vector, vector_cycles,
)
from ascend_lab.lab.machines.warps import Simt, occupancy

__all__ = [
    "Arith", "Block", "Branch", "Breakdown", "Cube", "Kernel", "Line", "Load", "Machine",
    "Matmul", "Port", "Run", "Scalar", "Simd", "Simt", "Store", "Systolic", "Total", "VectorOp",
    "array_cycles", "bank_ways", "fact", "gather", "masked_add", "occupancy", "plain_ops",
    "reference", "run", "run_vector", "sample_inputs", "saxpy", "strided_copy", "tops_per_watt",
    "total", "two_sided", "units_touched", "vector_cycles",
]
