"""Rules every instruction and program must keep; each error gives needed, got and a remedy."""

from __future__ import annotations

from ascend_lab.chip import BLOCK_BYTES, Chip
from ascend_lab.errors import AlignmentError, CapacityError, PathError, ProgramError
from ascend_lab.isa.memory import Buffer, Ranges, Region
from ascend_lab.isa.program import Instruction, Program

FRACTAL_BYTES = 512


def check_instruction(chip: Chip, instruction: Instruction) -> Instruction:
    """Return `instruction` if the chip can run it; raise a `ProgramError` child otherwise."""
    for region in instruction.regions:
        _check_buffer(chip, region.buffer)
    op = instruction.op
    if op == "data_copy":
        _check_copy(chip, instruction)
    elif op in ("load2d", "load3d"):
        _check_load(chip, instruction)
    elif op == "mmad":
        _check_mmad(chip, instruction)
    elif op not in ("set_flag", "wait_flag", "barrier", "scalar", "fixpipe"):
        _check_vector(chip, instruction)
    return instruction


def check_program(chip: Chip, program: Program) -> Program:
    """Return `program` if every access stays inside its buffer and all cores of a kind can run it.

    Raises `CapacityError` with the element touched and the size, `PathError` for a mix of cube and
    vector work on a chip whose cores are split.
    """
    units = set()
    for instruction, ranges in program.scoped():
        for region in instruction.regions:
            check_bounds(region, ranges, instruction.op)
        if instruction.event is None and instruction.op not in ("barrier", "scalar"):
            units.add(unit_of(chip, instruction))
    if len(units - {"core"}) > 1:
        raise PathError(
            f"{program.name}: cube and vector work in separate programs on {chip.name}",
            "both in one program",
            "exchange the data through GM between two programs",
        )
    _check_buffers_disjoint(program)
    return program


def unit_of(chip: Chip, instruction: Instruction) -> str:
    """Return which kind of core runs it: "core" on coupled chips, else "cube" or "vector"."""
    if chip.combined:
        return "core"
    if instruction.op == "mmad":
        return "cube"
    if instruction.pipe == "V":
        return "vector"
    assert instruction.dst is not None
    return chip.path(instruction.srcs[0].space, instruction.dst.space).unit


def program_unit(chip: Chip, program: Program) -> str:
    """Return the kind of core a program runs on ("core", "cube" or "vector")."""
    for instruction, _ in program.instructions():
        if instruction.event is None and instruction.op not in ("barrier", "scalar"):
            return unit_of(chip, instruction)
    return "core" if chip.combined else "cube"


def check_bounds(region: Region, ranges: Ranges, op: str) -> None:
    """Raise `CapacityError` if the region leaves its buffer for some loop values."""
    low, high = region.extent(ranges)
    if low < 0 or high >= region.buffer.elements:
        raise CapacityError(
            f"{op}: elements 0..{region.buffer.elements - 1} of {region.buffer.name}",
            f"{low}..{high}",
            "check offset, tile size and loop count",
        )


def _check_buffer(chip: Chip, buffer: Buffer) -> None:
    if buffer.space == "GM":
        return
    if buffer.space not in chip.buffers:
        raise PathError(
            f"a buffer {chip.name} has", buffer.space, f"use GM, {', '.join(chip.buffers)}"
        )
    end, size = buffer.address + buffer.size_bytes, chip.buffers[buffer.space]
    if end > size:
        raise CapacityError(
            f"{buffer.name}: bytes {buffer.address}..{end - 1} of {buffer.space}",
            f"{size} bytes on {chip.name}",
            "make the tile smaller or use fewer slots",
        )
    unit = chip.alignment.get(buffer.space, BLOCK_BYTES)
    if buffer.address % unit or (buffer.slots > 1 and buffer.slot_bytes % unit):
        raise AlignmentError(
            f"{buffer.name}: {buffer.space} addresses in multiples of {unit} bytes",
            f"address {buffer.address}, slot pitch {buffer.slot_bytes}",
            "round them up",
        )


def _check_buffers_disjoint(program: Program) -> None:
    names = [b.name for b in program.buffers]
    if len(set(names)) != len(names):
        raise ProgramError(f"{program.name}: one name per buffer", str(sorted(names)), "rename")


def _check_aligned(region: Region, unit: int, op: str) -> None:
    item = region.buffer.itemsize
    values = [region.offset.const, *(c for _, c in region.offset.terms)]
    bad = next((v for v in values if v * item % unit), None)
    if bad is not None:
        raise AlignmentError(
            f"{op}: {region.buffer.name} addresses in multiples of {unit} bytes",
            f"{bad * item} bytes",
            f"step by {max(unit // item, 1)} elements",
        )


def _check_copy(chip: Chip, instruction: Instruction) -> None:
    dst, src = instruction.dst, instruction.srcs[0]
    assert dst is not None
    cast = (src.space, dst.space) == ("L0C", "UB")
    if dst.buffer.dtype != src.buffer.dtype and not cast:
        raise ProgramError(
            "data_copy: one number format",
            f"{src.buffer.dtype} -> {dst.buffer.dtype}",
            "cast with vconv or on the way out of L0C",
        )
    padded = instruction.number("pad") == 1
    if padded and (chip.combined or {src.space, dst.space} != {"GM", "UB"}):
        raise PathError(
            f"a padding copy {src.space}->{dst.space} on {chip.name}",
            "none",
            "make the GM tensor a multiple of 32 bytes",
        )
    for region in (dst, src):
        if region.space == "GM":
            continue
        _check_aligned(region, BLOCK_BYTES, "data_copy")
        if region.run_bytes % BLOCK_BYTES and not padded:
            raise AlignmentError(
                f"data_copy: runs of whole {BLOCK_BYTES}-byte blocks in {region.buffer.name}",
                f"{region.run_bytes} bytes",
                "round the inner length up to a block",
            )


def _check_load(chip: Chip, instruction: Instruction) -> None:
    dst = instruction.dst
    assert dst is not None
    _check_aligned(dst, FRACTAL_BYTES, instruction.op)
    if dst.buffer.dtype != instruction.srcs[0].buffer.dtype:
        raise ProgramError(f"{instruction.op}: one number format", "two", "match the buffers")
    if instruction.op == "load3d":
        if dst.space != "L0A" or len(dst.sizes) != 4:
            raise ProgramError("load3d: a (M1, K1, 16, C0) tile in L0A", str(dst), "see load3d")
        return
    repeat, fractal = dst.sizes[0], dst.size_bytes // dst.sizes[0]
    if fractal != FRACTAL_BYTES or dst.sizes != instruction.srcs[0].sizes:
        raise ProgramError(
            f"load2d: fractals of {FRACTAL_BYTES} bytes, equal shapes",
            f"{fractal} bytes, {instruction.srcs[0].sizes} -> {dst.sizes}",
            "make the regions (repeat, 16, C0)",
        )
    _check_repeat(chip, repeat, "load2d")


def _check_repeat(chip: Chip, repeat: int, op: str) -> None:
    if repeat > chip.max_repeat:
        raise CapacityError(
            f"{op}: at most {chip.max_repeat} repeats", str(repeat), "split it with a loop"
        )


def _check_mmad(chip: Chip, instruction: Instruction) -> None:
    a, b = instruction.srcs[:2]
    c = instruction.dst
    assert c is not None
    spaces = (c.space, a.space, b.space)
    if spaces != ("L0C", "L0A", "L0B"):
        raise PathError("mmad: C in L0C, A in L0A, B in L0B", str(spaces), "load the tiles first")
    m0, k0, n0 = chip.cube_shape(a.buffer.dtype)
    m1, k1 = a.sizes[0], a.sizes[1]
    n1 = b.sizes[1] if len(b.sizes) == 4 else 0
    wanted = ((m1, k1, m0, k0), (k1, n1, n0, k0), (n1, m1, n0 and m0, n0))
    if (a.sizes, b.sizes, c.sizes) != wanted:
        raise ProgramError(
            "mmad: A (M1,K1,16,C0), B (K1,N1,16,C0), C (N1,M1,16,16)",
            f"{a.sizes}, {b.sizes}, {c.sizes}",
            "reshape the regions; K1, M1, N1 must agree",
        )


def _check_vector(chip: Chip, instruction: Instruction) -> None:
    reducing = instruction.op.startswith(("vcadd", "vcmax", "vcmin", "vcg"))
    main = instruction.srcs[0] if reducing else instruction.dst
    assert main is not None and instruction.dst is not None
    _check_repeat(chip, main.sizes[0], instruction.op)
    for region in instruction.regions:
        if region.space not in ("UB", "L0C"):
            raise PathError(
                f"{instruction.op}: operands in UB", region.space, "copy the tile to UB first"
            )
        if region is not instruction.dst or not reducing:
            _check_aligned(region, BLOCK_BYTES, instruction.op)
        per_repeat = region.size_bytes // region.sizes[0]
        if per_repeat > chip.vector_bytes_per_repeat:
            raise CapacityError(
                f"{instruction.op}: at most {chip.vector_bytes_per_repeat} bytes a repeat",
                f"{per_repeat} in {region.buffer.name}",
                "use more repeats of fewer lanes",
            )
        if not reducing and region.elements != main.elements:
            raise ProgramError(
                f"{instruction.op}: operands of {main.elements} elements",
                f"{region.elements} in {region.buffer.name}",
                "a stride of 0 broadcasts",
            )
