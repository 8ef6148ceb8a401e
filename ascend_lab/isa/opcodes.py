"""Names of the instructions, and how many regions each one takes."""

from __future__ import annotations

from functools import cache

BINARY = ("vadd", "vsub", "vmul", "vdiv", "vmax", "vmin", "vand", "vor")
UNARY = ("vabs", "vrelu", "vexp", "vln", "vsqrt", "vrsqrt", "vrec", "vnot", "vconv", "vcopy")
WITH_SCALAR = ("vadds", "vmuls", "vmaxs", "vmins")
REDUCING = ("vcadd", "vcmax", "vcmin", "vcgadd", "vcgmax")
WHOLE_BLOCKS = ("vbrcb", "vtranspose")
VECTOR_OPS = (*BINARY, *UNARY, *WITH_SCALAR, *REDUCING, "vdup", "vsel", "vcmp", *WHOLE_BLOCKS)
TAKES_SCALAR = (*WITH_SCALAR, "vdup")
MOVES = ("data_copy", "load2d", "load3d", "fixpipe")
FLAGS = ("set_flag", "wait_flag")
PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")

COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
"""What vcmp's attribute `op` may ask of two lanes."""

ROUNDINGS = ("rint", "floor", "ceil", "trunc")
"""How vconv reaches a whole number; rint, to nearest even, is the default."""

ATOMIC_FORMATS = ("fp32", "fp16", "int32")
"""Number formats a copy can add in memory."""

CUBE_OUTPUT = {"fp16": ("fp32", "fp16"), "int8": ("int32",), "bf16": ("fp32",)}
"""Accumulator formats per input format (hardware facts, mmad types)."""


@cache
def source_counts(op: str) -> tuple[int, ...]:
    """Return how many source regions `op` may have; () for an unknown name."""
    if op in BINARY or op == "vcmp":
        return (2,)
    if op == "vsel":
        return (2, 3)
    if op == "data_copy":
        return (1, 2)
    if op == "vdup":
        return (0,)
    if op == "mmad":
        return (2, 3)
    return (1,) if op in VECTOR_OPS or op in MOVES else ()
