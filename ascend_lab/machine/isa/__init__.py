"""Programs for a Da Vinci core as data: instructions, loops, the kernel builder, the sanitizer.

Read `memory` (addresses) and `program` (instructions and loops) first, then `instructions` and
`operands` (what a chip can run), `builder` (how kernels are written), `launch` (programs on several
cores), `walk` (an order that the flags allow) and `sanitizer` (races and other faults).
"""

# fmt: off
# isort: off
from ascend_lab.machine.isa.builder import KernelBuilder, Queue, RingEnd
from ascend_lab.machine.isa.instructions import (
    barrier, c0_of, check_instruction, check_program, data_copy, fixpipe, load2d, load3d, mmad,
    mmad_shape, program_unit, scalar, set_flag, unit_of, vector, wait_flag,
)
from ascend_lab.machine.isa.launch import (
    Kernel, Launch, Part, Ring, RingTile, Share, as_kernel, as_launch, binding_of, cross_set,
    cross_wait, renamed, spread,
)
from ascend_lab.machine.isa.memory import Affine, Buffer, Region, Tile, ceil_div, var
from ascend_lab.machine.isa.operands import ACCUMULATOR, FRACTAL, SMALL_C0
from ascend_lab.machine.isa.program import Event, Instruction, Loop, Node, Program, parse_program
from ascend_lab.machine.isa.sanitizer import Finding, sanitize
from ascend_lab.machine.isa.walk import interleave, pipe_stream

__all__ = [
    "ACCUMULATOR", "FRACTAL", "SMALL_C0", "Affine", "Buffer", "Event", "Finding", "Instruction",
    "Kernel", "KernelBuilder", "Launch", "Loop", "Node", "Part", "Program", "Queue", "Region",
    "Ring", "RingEnd", "RingTile", "Share", "Tile", "as_kernel", "as_launch", "barrier",
    "binding_of", "c0_of", "ceil_div", "check_instruction", "check_program", "cross_set",
    "cross_wait", "data_copy", "fixpipe", "interleave", "load2d", "load3d", "mmad", "mmad_shape",
    "parse_program", "pipe_stream", "program_unit", "renamed", "sanitize", "scalar", "set_flag",
    "spread", "unit_of", "var", "vector", "wait_flag",
]
