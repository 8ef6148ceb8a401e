"""Programs for a Da Vinci core as data: instructions, loops, the kernel builder, the sanitizer."""

from ascend_lab.isa.builder import KernelBuilder, Queue, Share, Tile, spread
from ascend_lab.isa.instructions import (
    barrier,
    c0_of,
    data_copy,
    fixpipe,
    load2d,
    load3d,
    mmad,
    mmad_shape,
    scalar,
    set_flag,
    vector,
    wait_flag,
)
from ascend_lab.isa.kernel import Kernel, as_kernel
from ascend_lab.isa.legality import check_program, program_unit, unit_of
from ascend_lab.isa.memory import Affine, Buffer, Region, var
from ascend_lab.isa.program import (
    Event,
    Instruction,
    Launch,
    Loop,
    Node,
    Part,
    Program,
    as_launch,
    binding_of,
)
from ascend_lab.isa.rules import check_instruction
from ascend_lab.isa.sanitizer import Finding, sanitize
from ascend_lab.isa.text import parse_program
from ascend_lab.isa.walk import interleave, pipe_stream

__all__ = [
    "Affine",
    "Buffer",
    "Event",
    "Finding",
    "Instruction",
    "Kernel",
    "KernelBuilder",
    "Launch",
    "Loop",
    "Node",
    "Part",
    "Program",
    "Queue",
    "Region",
    "Share",
    "Tile",
    "as_kernel",
    "as_launch",
    "barrier",
    "binding_of",
    "c0_of",
    "check_instruction",
    "check_program",
    "data_copy",
    "fixpipe",
    "interleave",
    "load2d",
    "load3d",
    "mmad",
    "mmad_shape",
    "parse_program",
    "pipe_stream",
    "program_unit",
    "sanitize",
    "scalar",
    "set_flag",
    "spread",
    "unit_of",
    "var",
    "vector",
    "wait_flag",
]
