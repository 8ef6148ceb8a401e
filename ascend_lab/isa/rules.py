"""What every instruction must keep on a chip; each error gives needed, got and a remedy."""

from __future__ import annotations

from ascend_lab.chip import BLOCK_BYTES, Chip
from ascend_lab.errors import AlignmentError, CapacityError, PathError, ProgramError
from ascend_lab.isa.memory import Affine, Buffer, Region
from ascend_lab.isa.opcodes import (
    CUBE_OUTPUT,
    FLAGS,
    MOVES,
    PIPES,
    REDUCING,
    TAKES_SCALAR,
    VECTOR_OPS,
    source_counts,
)
from ascend_lab.isa.program import Instruction

FRACTAL_BYTES = 512


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
    if op == "data_copy":
        _check_copy(chip, instruction, dst, src)
    elif op == "fixpipe":
        _check_fixpipe(instruction, dst, src)
    elif op == "load2d":
        _check_load2d(chip, dst, src)
    elif op == "load3d":
        _check_load3d(instruction, dst, src)
    elif op == "mmad":
        _check_mmad(chip, instruction, dst)
    else:
        _check_vector(chip, instruction, dst)


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
    one_each = instruction.dst is not None and len(instruction.srcs) == 1
    if instruction.regions and (not one_each or any(r.elements != 1 for r in instruction.regions)):
        raise ProgramError(
            "scalar: no region, or one element to copy and one place for it",
            ", ".join(map(str, instruction.regions)),
            "give both or neither",
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


def _check_same(op: str, dst: Region, src: Region, *, cast: bool = False) -> None:
    if dst.sizes != src.sizes:
        raise ProgramError(
            f"{op}: equal shapes", f"{src.sizes} -> {dst.sizes}", "reshape one region"
        )
    if dst.buffer.dtype != src.buffer.dtype and not cast:
        raise ProgramError(
            f"{op}: one number format",
            f"{src.buffer.dtype} -> {dst.buffer.dtype}",
            "cast with vconv or on the way out of L0C",
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


def _check_fixpipe(instruction: Instruction, dst: Region, src: Region) -> None:
    _check_same("fixpipe", dst, src, cast=True)
    if instruction.pipe != "FIX" or src.space != "L0C":
        raise PathError("fixpipe: a path out of L0C on the FIX pipe", instruction.pipe, "copy to UB")


def _check_load2d(chip: Chip, dst: Region, src: Region) -> None:
    _check_load(dst, src, "load2d")
    repeat, fractal = dst.sizes[0], dst.size_bytes // dst.sizes[0]
    if fractal != FRACTAL_BYTES or dst.sizes != src.sizes:
        raise ProgramError(
            f"load2d: fractals of {FRACTAL_BYTES} bytes, equal shapes",
            f"{fractal} bytes, {src.sizes} -> {dst.sizes}",
            "make the regions (repeat, 16, C0)",
        )
    _check_repeat(chip, repeat, "load2d")


def _check_load(dst: Region, src: Region, op: str) -> None:
    if src.space != "L1" or dst.space not in ("L0A", "L0B"):
        got = f"{src.space}->{dst.space}"
        raise PathError(f"{op}: a path from L1 to L0A or L0B", got, "use data_copy elsewhere")
    _check_aligned(dst, FRACTAL_BYTES, op)
    _check_aligned(src, BLOCK_BYTES, op)
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


def _check_window(src: Region, values: dict[str, object]) -> None:
    kernel, pad, dilation = values["kernel"], values["pad"], values["dilation"]
    assert isinstance(kernel, tuple) and isinstance(pad, tuple) and isinstance(dilation, tuple)
    sizes = (src.sizes[1] + pad[0] + pad[1], src.sizes[2] + pad[2] + pad[3])
    reach = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    if reach[0] > sizes[0] or reach[1] > sizes[1]:
        raise ProgramError(
            f"load3d: a kernel within the padded image {sizes}", str(reach), "add rows or padding"
        )


def _check_repeat(chip: Chip, repeat: int, op: str) -> None:
    if repeat > chip.max_repeat:
        raise CapacityError(
            f"{op}: at most {chip.max_repeat} repeats", str(repeat), "split it with a loop"
        )


def _check_mmad(chip: Chip, instruction: Instruction, c: Region) -> None:
    a, b = instruction.srcs[:2]
    spaces = (c.space, a.space, b.space)
    if spaces != ("L0C", "L0A", "L0B"):
        raise PathError("mmad: C in L0C, A in L0A, B in L0B", str(spaces), "load the tiles first")
    formats = (a.buffer.dtype, b.buffer.dtype, c.buffer.dtype)
    if formats[0] not in chip.cube or formats[1] != formats[0] or (
        formats[2] not in CUBE_OUTPUT[formats[0]]
    ):
        raise PathError(
            f"mmad: a number format of the {chip.name} cube",
            f"{formats[0]} x {formats[1]} -> {formats[2]}",
            "use fp16 -> fp32 or int8 -> int32",
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


def _check_bias(bias: Region, c: Region, columns: int) -> None:
    if bias.space != "BT":
        raise PathError("mmad: a bias in BT, the bias table", bias.space, "copy it L1->BT")
    if bias.elements != columns or bias.buffer.dtype != c.buffer.dtype:
        raise ProgramError(
            f"mmad: a bias of {columns} {c.buffer.dtype}",
            f"{bias.elements} {bias.buffer.dtype}",
            "one number per column of C",
        )


def _check_vector(chip: Chip, instruction: Instruction, dst: Region) -> None:
    op, reducing = instruction.op, instruction.op in REDUCING
    main = instruction.srcs[0] if reducing else dst
    _check_repeat(chip, main.sizes[0], op)
    _check_attributes(instruction, main)
    for region in instruction.regions:
        if region.space not in ("UB", "L0C"):
            raise PathError(f"{op}: operands in UB", region.space, "copy the tile to UB first")
        if region is not dst or not reducing:
            _check_aligned(region, BLOCK_BYTES, op)
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
    lanes = main.elements // main.sizes[0]
    mask = instruction.attr("mask", 1)
    if not isinstance(mask, int) or not 0 < mask < 1 << lanes:
        raise ProgramError(
            f"{op}: a mask with a bit for each of {lanes} lanes", repr(mask), "(1 << n) - 1 for n"
        )
