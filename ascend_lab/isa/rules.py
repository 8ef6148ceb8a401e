"""What every instruction must keep on a chip; each error gives needed, got and a remedy."""

from __future__ import annotations

from ascend_lab.chip import BLOCK_BYTES, Chip
from ascend_lab.errors import AlignmentError, CapacityError, PathError, ProgramError
from ascend_lab.isa.indexed import check_index
from ascend_lab.isa.memory import Buffer, Region
from ascend_lab.isa.opcodes import FLAGS, MOVES, PIPES, VECTOR_OPS, source_counts
from ascend_lab.isa.program import Instruction
from ascend_lab.isa.rules_compute import check_mmad, check_vector
from ascend_lab.isa.rules_moves import check_move


def check_instruction(chip: Chip, instruction: Instruction) -> Instruction:
    """Return `instruction` if the chip can run it; raise a `ProgramError` child otherwise."""
    for region in instruction.regions:
        _check_buffer(chip, region.buffer)
    op = instruction.op
    if op in FLAGS:
        _check_flag(chip, instruction)
    elif op == "barrier":
        if instruction.pipe not in (*PIPES, "ALL"):
            raise ProgramError("barrier: a pipe or ALL", instruction.pipe, "check the name")
    elif op == "scalar":
        _check_scalar(instruction)
    else:
        _check_work(chip, instruction)
    return instruction


def _check_work(chip: Chip, instruction: Instruction) -> None:
    dst, src = _operands(instruction)
    op = instruction.op
    pipe = "M" if op == "mmad" else "V"
    if op in MOVES:
        pipe = chip.path(src.space, dst.space).pipe
    if instruction.pipe != pipe:
        got = f"{instruction.pipe}, {src.space}->{dst.space}"
        raise PathError(f"{op}: an instruction of pipe {pipe} on {chip.name}", got, "mend it")
    if op in MOVES:
        check_move(chip, instruction, dst, src)
    elif op == "mmad":
        check_mmad(chip, instruction, dst)
    else:
        check_vector(chip, instruction, dst)


def _operands(instruction: Instruction) -> tuple[Region, Region]:
    """Return (destination, first source or destination); refuse wrong counts and names."""
    op, dst, count = instruction.op, instruction.dst, len(instruction.srcs)
    wanted = source_counts(op)
    if not wanted:
        known = ", ".join((*MOVES, "mmad", "scalar", *FLAGS, "barrier", *VECTOR_OPS))
        raise ProgramError("a known instruction", op, f"use one of {known}")
    if dst is None or count not in wanted:
        counts = " or ".join(map(str, wanted))
        raise ProgramError(
            f"{op}: one destination and {counts} source regions",
            f"{0 if dst is None else 1} and {count}",
            "add or drop regions",
        )
    return dst, instruction.srcs[0] if count else dst


def _check_flag(chip: Chip, instruction: Instruction) -> None:
    event = instruction.event
    if event is None:
        raise ProgramError(f"{instruction.op}: an event", "none", "name two pipes and an id")
    if event.src not in PIPES or event.dst not in PIPES:
        raise ProgramError("an event between two pipes", str(event), f"use {', '.join(PIPES)}")
    if event.src == event.dst:
        raise ProgramError(
            "an event between two different pipes", str(event), "a pipe is in order by itself"
        )
    if instruction.pipe != (event.src if instruction.op == "set_flag" else event.dst):
        raise ProgramError(f"{instruction.op} {event} on its own pipe", instruction.pipe, "mend it")
    if event.id < 0 or event.count < 1 or event.id + event.count > chip.event_ids:
        raise CapacityError(
            f"event ids 0..{chip.event_ids - 1} for {event.src}>{event.dst}",
            f"{event.id}..{event.id + event.count - 1}",
            "share an id between queues or use fewer slots",
        )


def _check_scalar(instruction: Instruction) -> None:
    if instruction.number("steps", 1) < 1:
        raise ProgramError(
            "scalar: steps >= 1", str(instruction.attr("steps")), "count its operations"
        )
    one_each = instruction.dst is not None and len(instruction.srcs) in (1, 2)
    if instruction.regions and (not one_each or any(r.elements != 1 for r in instruction.regions)):
        raise ProgramError(
            "scalar: no region, or one element to copy and one place for it",
            ", ".join(map(str, instruction.regions)),
            "give both or neither",
        )
    if instruction.dst is not None:
        check_index(instruction, instruction.dst, instruction.srcs[0])


def _check_buffer(chip: Chip, buffer: Buffer) -> None:
    if buffer.dtype == "bf16" and "bf16" not in chip.cube:
        raise PathError(
            f"{buffer.name}: a number format of {chip.name}",
            "bf16",
            "use fp16 or fp32, or a chip whose file has [cube.bf16] (Ascend910B2)",
        )
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
