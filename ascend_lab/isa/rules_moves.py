"""Rules of the instructions that move data: data_copy, fixpipe, load2d, load3d."""

from __future__ import annotations

from collections.abc import Mapping

from ascend_lab.chip import BLOCK_BYTES, Chip
from ascend_lab.errors import AlignmentError, CapacityError, PathError, ProgramError
from ascend_lab.isa.indexed import check_index
from ascend_lab.isa.memory import Affine, Region
from ascend_lab.isa.opcodes import ATOMIC_FORMATS
from ascend_lab.isa.program import Instruction

FRACTAL_BYTES = 512


def check_move(chip: Chip, instruction: Instruction, dst: Region, src: Region) -> None:
    """Raise a `ProgramError` child unless the chip can make this move."""
    op = instruction.op
    if op == "data_copy":
        _check_copy(chip, instruction, dst, src)
    elif op == "fixpipe":
        _check_fixpipe(instruction, dst, src)
    elif op == "load2d":
        _check_load2d(chip, dst, src)
    else:
        _check_load3d(instruction, dst, src)


def check_aligned(region: Region, unit: int, op: str) -> None:
    """Raise `AlignmentError` unless every address the offset takes is a multiple of `unit`."""
    item = region.buffer.itemsize
    for value in (region.offset.const, *[c for _, c in region.offset.terms]):
        if value * item % unit:
            raise AlignmentError(
                f"{op}: {region.buffer.name} addresses in multiples of {unit} bytes",
                f"{value * item} bytes",
                f"step by {max(unit // item, 1)} elements",
            )


def _check_same(op: str, dst: Region, src: Region, *, cast: bool = False) -> None:
    if dst.sizes != src.sizes:
        shapes = f"{src.sizes} -> {dst.sizes}"
        raise ProgramError(f"{op}: equal shapes", shapes, "reshape one region")
    if dst.buffer.dtype != src.buffer.dtype and not cast:
        formats = f"{src.buffer.dtype} -> {dst.buffer.dtype}"
        raise ProgramError(
            f"{op}: one number format", formats, "cast with vconv or on the way out of L0C"
        )


def _check_copy(chip: Chip, instruction: Instruction, dst: Region, src: Region) -> None:
    _check_same("data_copy", dst, src, cast=(src.space, dst.space) == ("L0C", "UB"))
    if dst.space in ("L0A", "L0B"):
        raise PathError(f"data_copy: not into {dst.space}", str(dst), "use load2d or load3d")
    padded = instruction.number("pad") == 1
    if padded and (chip.combined or {src.space, dst.space} != {"GM", "UB"}):
        raise PathError(
            f"a padding copy {src.space}->{dst.space} on {chip.name}",
            "none",
            "make the GM tensor a multiple of 32 bytes",
        )
    _check_atomic(instruction, dst, src)
    check_index(instruction, dst, src)
    for region in (dst, src):
        if region.space == "GM":
            continue
        check_aligned(region, BLOCK_BYTES, "data_copy")
        if region.run_bytes % BLOCK_BYTES and not padded:
            raise AlignmentError(
                f"data_copy: runs of whole {BLOCK_BYTES}-byte blocks in {region.buffer.name}",
                f"{region.run_bytes} bytes",
                "round the inner length up to a block",
            )


def _check_atomic(instruction: Instruction, dst: Region, src: Region) -> None:
    names = [name for name, _ in instruction.attrs]
    if "atomic" not in names:
        return
    if instruction.attr("atomic") != "add" or (src.space, dst.space) != ("UB", "GM"):
        raise PathError(
            'data_copy: atomic="add" on the path UB->GM',
            f"{instruction.attr('atomic')!r}, {src.space}->{dst.space}",
            "leave atomic out elsewhere",
        )
    if dst.buffer.dtype not in ATOMIC_FORMATS:
        raise PathError(
            f"data_copy: an atomic add in {', '.join(ATOMIC_FORMATS)}",
            dst.buffer.dtype,
            "convert with vconv first",
        )


def _check_fixpipe(instruction: Instruction, dst: Region, src: Region) -> None:
    _check_same("fixpipe", dst, src, cast=True)
    if instruction.pipe != "FIX" or src.space != "L0C":
        raise PathError("fixpipe: a path out of L0C on pipe FIX", instruction.pipe, "copy to UB")


def _check_load2d(chip: Chip, dst: Region, src: Region) -> None:
    _check_load(dst, src, "load2d")
    repeat, fractal = dst.sizes[0], dst.size_bytes // dst.sizes[0]
    if fractal != FRACTAL_BYTES or dst.sizes != src.sizes:
        raise ProgramError(
            f"load2d: fractals of {FRACTAL_BYTES} bytes, equal shapes",
            f"{fractal} bytes, {src.sizes} -> {dst.sizes}",
            "make the regions (repeat, 16, C0)",
        )
    check_repeat(chip, repeat, "load2d")


def _check_load(dst: Region, src: Region, op: str) -> None:
    origins = ("L1", "GM") if op == "load2d" else ("L1",)
    if src.space not in origins or dst.space not in ("L0A", "L0B"):
        got = f"{src.space}->{dst.space}"
        wanted = " or ".join(origins)
        raise PathError(f"{op}: a path from {wanted} to L0A or L0B", got, "use data_copy elsewhere")
    check_aligned(dst, FRACTAL_BYTES, op)
    if src.space != "GM":
        check_aligned(src, BLOCK_BYTES, op)
    if dst.buffer.dtype != src.buffer.dtype:
        formats = f"{src.buffer.dtype} -> {dst.buffer.dtype}"
        raise ProgramError(f"{op}: one number format", formats, "match the buffers")


def _check_load3d(instruction: Instruction, dst: Region, src: Region) -> None:
    _check_load(dst, src, "load3d")
    c0 = BLOCK_BYTES // dst.buffer.itemsize
    if dst.space != "L0A" or len(dst.sizes) != 4 or dst.sizes[2:] != (16, c0):
        raise ProgramError(f"load3d: a (M1, K1, 16, {c0}) tile in L0A", str(dst), "see load3d")
    if len(src.sizes) != 4 or src.sizes[3] != c0:
        raise ProgramError(f"load3d: an image (C1, H, W, {c0}) in L1", str(src), "see load3d")
    lengths = {"kernel": 2, "stride": 2, "pad": 4, "dilation": 2}
    values = {name: instruction.attr(name) for name in lengths}
    for name, length in lengths.items():
        value, least = values[name], 0 if name == "pad" else 1
        if not isinstance(value, tuple) or len(value) != length or min(value) < least:
            raise ProgramError(
                f"load3d: {name} as {length} numbers of at least {least}", repr(value), "mend it"
            )
    _check_window(src, values)
    k_start = instruction.attr("k_start")
    steps = (k_start.const, *(c for _, c in k_start.terms)) if isinstance(k_start, Affine) else ()
    if any(step % c0 for step in steps):
        raise AlignmentError(f"load3d: k_start in multiples of {c0}", str(k_start), "round it")


def _check_window(src: Region, values: Mapping[str, object]) -> None:
    kernel, pad, dilation = values["kernel"], values["pad"], values["dilation"]
    assert isinstance(kernel, tuple) and isinstance(pad, tuple) and isinstance(dilation, tuple)
    sizes = (src.sizes[1] + pad[0] + pad[1], src.sizes[2] + pad[2] + pad[3])
    reach = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    if reach[0] > sizes[0] or reach[1] > sizes[1]:
        raise ProgramError(
            f"load3d: a kernel within the padded image {sizes}", str(reach), "add rows or padding"
        )


def check_repeat(chip: Chip, repeat: int, op: str) -> None:
    """Raise `CapacityError` above the repeat count an instruction can hold."""
    if repeat > chip.max_repeat:
        raise CapacityError(
            f"{op}: at most {chip.max_repeat} repeats", str(repeat), "split it with a loop"
        )
