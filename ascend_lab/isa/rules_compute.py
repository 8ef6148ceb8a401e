"""Rules of the instructions that compute: mmad on the cube, everything on the vector unit."""

from __future__ import annotations

import math

from ascend_lab.chip import BLOCK_BYTES, Chip
from ascend_lab.errors import AlignmentError, CapacityError, PathError, ProgramError
from ascend_lab.isa.memory import Region
from ascend_lab.isa.opcodes import (
    COMPARISONS,
    CUBE_OUTPUT,
    REDUCING,
    ROUNDINGS,
    TAKES_SCALAR,
    WHOLE_BLOCKS,
)
from ascend_lab.isa.program import Instruction
from ascend_lab.isa.rules_blocks import check_whole_blocks
from ascend_lab.isa.rules_moves import check_aligned, check_repeat


def check_mmad(chip: Chip, instruction: Instruction, c: Region) -> None:
    """Raise unless the operands are fractal tiles of matching sizes in the cube's formats."""
    a, b = instruction.srcs[:2]
    spaces = (c.space, a.space, b.space)
    if spaces != ("L0C", "L0A", "L0B"):
        raise PathError("mmad: C in L0C, A in L0A, B in L0B", str(spaces), "load the tiles first")
    formats = (a.buffer.dtype, b.buffer.dtype, c.buffer.dtype)
    if (
        formats[0] not in chip.cube
        or formats[1] != formats[0]
        or (formats[2] not in CUBE_OUTPUT[formats[0]])
    ):
        raise PathError(
            f"mmad: a number format of the {chip.name} cube",
            f"{formats[0]} x {formats[1]} -> {formats[2]}",
            f"use {_products(chip)}",
        )
    m0, k0, n0 = chip.cube_shape(formats[0])
    wanted = None
    if len(a.sizes) == len(b.sizes) == 4:
        m1, k1, n1 = a.sizes[0], a.sizes[1], b.sizes[1]
        wanted = ((m1, k1, m0, k0), (k1, n1, n0, k0), (n1, m1, m0, n0))
    if (a.sizes, b.sizes, c.sizes) != wanted:
        raise ProgramError(
            "mmad: A (M1,K1,16,C0), B (K1,N1,16,C0), C (N1,M1,16,16)",
            f"{a.sizes}, {b.sizes}, {c.sizes}",
            "reshape the regions; K1, M1, N1 must agree",
        )
    if len(instruction.srcs) == 3:
        _check_bias(instruction.srcs[2], c, b.sizes[1] * n0)


def _products(chip: Chip) -> str:
    """Spell out what the cube multiplies: fp16 -> fp32 or int8 -> int32."""
    return " or ".join(f"{dtype} -> {CUBE_OUTPUT[dtype][0]}" for dtype in chip.cube)


def _check_bias(bias: Region, c: Region, columns: int) -> None:
    if bias.space != "BT":
        raise PathError("mmad: a bias in BT, the bias table", bias.space, "copy it L1->BT")
    if bias.elements != columns or bias.buffer.dtype != c.buffer.dtype:
        raise ProgramError(
            f"mmad: a bias of {columns} {c.buffer.dtype}",
            f"{bias.elements} {bias.buffer.dtype}",
            "one number per column of C",
        )


def check_vector(chip: Chip, instruction: Instruction, dst: Region) -> None:
    """Raise unless the operands are equally long, aligned tiles of UB in one format."""
    op, reducing = instruction.op, instruction.op in REDUCING
    main = instruction.srcs[0] if reducing else dst
    _check_attributes(instruction, main)
    _check_choices(instruction, dst)
    if op in WHOLE_BLOCKS:
        check_whole_blocks(chip, instruction, dst)
        return
    check_repeat(chip, main.sizes[0], op)
    for region in instruction.regions:
        if region.space not in ("UB", "L0C"):
            raise PathError(f"{op}: operands in UB", region.space, "copy the tile to UB first")
        if region is not dst or not reducing:
            check_aligned(region, BLOCK_BYTES, op)
        per_repeat = region.size_bytes // region.sizes[0]
        if per_repeat > chip.vector_bytes_per_repeat:
            raise CapacityError(
                f"{op}: at most {chip.vector_bytes_per_repeat} bytes a repeat",
                f"{per_repeat} in {region.buffer.name}",
                "use more repeats of fewer lanes",
            )
        wanted = _reduced(op, main) if reducing and region is dst else main.elements
        if region.elements != wanted:
            raise ProgramError(
                f"{op}: {wanted} elements",
                f"{region.elements} in {region.buffer.name}",
                "a stride of 0 broadcasts",
            )
        if region.buffer.dtype != dst.buffer.dtype and op != "vconv":
            formats = f"{region.buffer.dtype} -> {dst.buffer.dtype}"
            raise ProgramError(f"{op}: one number format", formats, "cast with vconv")


def _reduced(op: str, src: Region) -> int:
    """Elements a reduction writes: one a repeat, or one a 32-byte block of it."""
    if not op.startswith("vcg"):
        return src.sizes[0]
    blocks, rest = divmod(src.size_bytes // src.sizes[0], BLOCK_BYTES)
    if rest:
        raise AlignmentError(f"{op}: whole 32-byte blocks a repeat", f"{rest} bytes over", "pad it")
    return src.sizes[0] * blocks


def _check_attributes(instruction: Instruction, main: Region) -> None:
    op = instruction.op
    names = [name for name, _ in instruction.attrs]
    if ("scalar" in names) != (op in TAKES_SCALAR):
        wanted = "a scalar" if op in TAKES_SCALAR else "no scalar"
        raise ProgramError(f"{op}: {wanted}", str(instruction.attr("scalar", "none")), "mend it")
    value = instruction.attr("scalar")
    whole = isinstance(value, int | float) and math.isfinite(value) and value == int(value)
    if main.buffer.dtype in ("int8", "uint8", "int32") and not whole:
        raise ProgramError(f"{op}: a whole scalar for {main.buffer.dtype}", str(value), "round it")
    lanes = main.elements // main.sizes[0]
    mask = instruction.attr("mask", 1)
    if not isinstance(mask, int) or not 0 < mask < 1 << lanes:
        raise ProgramError(
            f"{op}: a mask with a bit for each of {lanes} lanes", repr(mask), "(1 << n) - 1 for n"
        )


def _check_choices(instruction: Instruction, dst: Region) -> None:
    """Check the attributes that are one of a few words: vcmp's `op`, vconv's `round`."""
    op, attrs = instruction.op, dict(instruction.attrs)
    if ("op" in attrs) != (op == "vcmp") or attrs.get("op", "gt") not in COMPARISONS:
        wanted = f"op as one of {', '.join(COMPARISONS)}" if op == "vcmp" else "no comparison"
        raise ProgramError(f"{op}: {wanted}", repr(attrs.get("op")), "mend it")
    if "round" in attrs:
        whole = dst.buffer.dtype in ("int8", "uint8", "int32")
        if op != "vconv" or not whole or attrs["round"] not in ROUNDINGS:
            raise ProgramError(
                f"{op}: round ({', '.join(ROUNDINGS)}) only in a vconv to whole numbers",
                f"{attrs['round']!r} to {dst.buffer.dtype}",
                "leave it out, or convert to int32",
            )
    if op == "vsel" and len(instruction.srcs) == 3 and "mask" in attrs:
        raise ProgramError(
            "vsel: a condition tile or a mask", "both", "drop the mask, or the first source"
        )
