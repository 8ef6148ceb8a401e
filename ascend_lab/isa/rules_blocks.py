"""Rules of the vector instructions that work on whole blocks: vbrcb and vtranspose."""

from __future__ import annotations

from ascend_lab.chip import BLOCK_BYTES, Chip
from ascend_lab.errors import CapacityError, PathError, ProgramError
from ascend_lab.isa.memory import Region
from ascend_lab.isa.program import Instruction
from ascend_lab.isa.rules_moves import check_aligned

BLOCKS_PER_REPEAT = 8
"""Blocks a vector repeat writes: 8 x 32 bytes."""


def check_whole_blocks(chip: Chip, instruction: Instruction, dst: Region) -> None:
    """Raise unless `vbrcb` or `vtranspose` has operands of the right shape in UB."""
    op, src = instruction.op, instruction.srcs[0]
    for region in (dst, src):
        if region.space != "UB":
            raise PathError(f"{op}: operands in UB", region.space, "copy the tile to UB first")
        check_aligned(region, BLOCK_BYTES, op)
    if src.buffer.dtype != dst.buffer.dtype:
        formats = f"{src.buffer.dtype} -> {dst.buffer.dtype}"
        raise ProgramError(f"{op}: one number format", formats, "cast with vconv")
    if instruction.attrs:
        names = ", ".join(name for name, _ in instruction.attrs)
        raise ProgramError(f"{op}: no attributes", names, "leave them out")
    if op == "vbrcb":
        _check_brcb(chip, dst, src)
    else:
        _check_transpose(dst, src)


def _check_brcb(chip: Chip, dst: Region, src: Region) -> None:
    """dst (n, C0) <- src (n): n whole blocks, evenly spaced, from n neighbours."""
    item = dst.buffer.itemsize
    if item == 1:
        raise PathError(
            "vbrcb: elements of 2 or 4 bytes", dst.buffer.dtype, "convert to fp16 with vconv"
        )
    c0, n = BLOCK_BYTES // item, src.elements
    spread = len(dst.sizes) == 2 and (dst.strides[0] * item % BLOCK_BYTES or dst.strides[1] != 1)
    if src.sizes != (n,) or (n > 1 and src.strides != (1,)) or dst.sizes != (n, c0) or spread:
        raise ProgramError(
            f"vbrcb: n neighbours (n,) into n blocks (n, {c0})",
            f"{src.sizes}:{src.strides} -> {dst.sizes}:{dst.strides}",
            f"give each source element a block of {c0}",
        )
    limit = chip.max_repeat * BLOCKS_PER_REPEAT
    if n > limit:
        raise CapacityError(
            f"vbrcb: at most {chip.max_repeat} repeats of {BLOCKS_PER_REPEAT} blocks, {limit}",
            f"{n} blocks",
            "split it with a loop",
        )


def _check_transpose(dst: Region, src: Region) -> None:
    """One block of 16 x 16 elements of 2 bytes, 512 bytes in one piece on both sides."""
    if dst.buffer.itemsize != 2:
        raise PathError(
            "vtranspose: elements of 2 bytes",
            dst.buffer.dtype,
            "transpose other formats with a strided copy",
        )
    for region in (dst, src):
        if (region.sizes, region.strides) != ((16, 16), (16, 1)):
            raise ProgramError(
                "vtranspose: one block (16, 16) of 512 bytes in one piece",
                f"{region.sizes}:{region.strides} of {region.buffer.name}",
                "lay the tile out in blocks of 16 x 16 on the way to UB",
            )
