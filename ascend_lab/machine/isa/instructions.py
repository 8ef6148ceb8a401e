"""The instruction set: one constructor per instruction, which checks it against the chip's rules.

For example, a `data_copy` of 50 fp16 numbers to UB is refused: 100 bytes are no whole number of
32-byte blocks. `check_instruction` looks at one instruction alone (paths, alignment, shapes,
formats), `check_program` at the loops around it, which decide whether every access stays in its
buffer. Sources: Ascend C developer documentation (instruction parameters), hicann/runtime platform
files (data paths per chip).
"""

from ascend_lab.errors import AlignmentError, CapacityError, PathError, ProgramError
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.machine.isa import launch, operands, program as programs
from ascend_lab.machine.isa.memory import Affine, Buffer, Region, TripCounts, as_affine
from ascend_lab.machine.isa.program import (
    CROSS,
    FLAGS,
    MOVES,
    PIPES,
    AttrValue,
    Instruction,
    Loop,
    Program,
)


def check_instruction(chip: Chip, instruction: Instruction) -> Instruction:
    """Return `instruction` if the chip can run it; raise a `ProgramError` child otherwise."""
    for region in instruction.regions:
        _check_buffer(chip, region.buffer)
    op = instruction.op
    if op in FLAGS:
        _check_flag(chip, instruction)
    elif op in CROSS:
        launch.check_cross(chip, instruction)
    elif op == "barrier":
        if instruction.pipe not in (*PIPES, "ALL"):
            raise ProgramError("barrier: a pipe or ALL", instruction.pipe, "check the name")
    elif op == "scalar":
        _check_scalar(instruction)
    else:
        _check_work(chip, instruction)
    return instruction


def _check_work(chip: Chip, instruction: Instruction) -> None:
    """Check an instruction that moves or computes: operands, pipe, and the rules of its type."""
    dst, src = _operands(instruction)
    op = instruction.op
    pipe = "M" if op == "mmad" else "V"
    if op in MOVES:  # the chip's file says which pipe serves a path, e.g. MTE2 for GM->L1
        pipe = chip.path(src.space, dst.space).pipe
    if instruction.pipe != pipe:
        got = f"{instruction.pipe}, {src.space}->{dst.space}"
        raise PathError(f"{op}: an instruction of pipe {pipe} on {chip.name}", got, "correct it")
    if op in MOVES:
        operands.CHECK_MOVE[op](chip, instruction, dst, src)
    elif op == "mmad":
        operands.check_mmad(chip, instruction, dst)
    else:
        operands.check_vector(chip, instruction, dst)


def _operands(instruction: Instruction) -> tuple[Region, Region]:
    """Return the destination and the first source region of a move or a computation.

    For an instruction without a source (vdup) the destination is returned twice. Raises
    `ProgramError` for an unknown instruction and for a wrong number of regions.
    """
    op = instruction.op
    dst = instruction.dst
    count = len(instruction.srcs)
    allowed_counts = programs.SOURCES.get(op)
    if allowed_counts is None:
        known_ops = ", ".join((*MOVES, "mmad", "scalar", *FLAGS, "barrier", *programs.VECTOR_OPS))
        raise ProgramError("a known instruction", op, f"use one of {known_ops}")
    if dst is None or count not in allowed_counts:
        counts = " or ".join(map(str, allowed_counts))
        needed = f"{op}: one destination and {counts} source regions"
        raise ProgramError(needed, f"{0 if dst is None else 1} and {count}", "add or drop regions")
    return dst, instruction.srcs[0] if count else dst


def _check_flag(chip: Chip, instruction: Instruction) -> None:
    """Check a set_flag or wait_flag: its event, its pipe, and the range of its ids."""
    event = instruction.event
    if event is None:
        raise ProgramError(f"{instruction.op}: an event", "none", "name two pipes and an id")
    if event.src not in PIPES or event.dst not in PIPES:
        raise ProgramError("an event between two pipes", str(event), f"use {', '.join(PIPES)}")
    if event.src == event.dst:
        needed = "an event between two different pipes"
        raise ProgramError(needed, str(event), "a pipe is in order by itself")
    if instruction.pipe != (event.src if instruction.op == "set_flag" else event.dst):
        raise ProgramError(
            f"{instruction.op} {event} on its own pipe", instruction.pipe, "correct it"
        )
    if event.id < 0 or event.count < 1 or event.id + event.count > chip.event_ids:
        needed = f"event ids 0..{chip.event_ids - 1} for {event.src}>{event.dst}"
        got = f"{event.id}..{event.id + event.count - 1}"
        raise CapacityError(needed, got, "share an id between queues or use fewer slots")


def _check_scalar(instruction: Instruction) -> None:
    """Check an instruction of the scalar unit, which may copy a single element."""
    if instruction.int_attr("steps", 1) < 1:
        needed = "scalar: steps >= 1"
        raise ProgramError(needed, str(instruction.attr("steps")), "count its operations")
    # a second source is the index of an element picked at run time
    copies = instruction.dst is not None and len(instruction.srcs) in (1, 2)
    if instruction.regions and (not copies or any(r.elements != 1 for r in instruction.regions)):
        needed = "scalar: no region, or one element to copy and one place for it"
        got = ", ".join(map(str, instruction.regions))
        raise ProgramError(needed, got, "give both or neither")
    if instruction.dst is not None:
        operands.check_index(instruction, instruction.dst, instruction.srcs[0])


def _check_buffer(chip: Chip, buffer: Buffer) -> None:
    """Check that the chip has the memory and the number format, and that the buffer fits in it."""
    if buffer.dtype == "bf16" and "bf16" not in chip.cube:
        remedy = "use fp16 or fp32, or a chip whose file has [cube.bf16] (Ascend910B2)"
        raise PathError(f"{buffer.name}: a number format of {chip.name}", "bf16", remedy)
    if buffer.space == "GM":
        return
    if buffer.space not in chip.buffers:
        needed = f"a buffer {chip.name} has"
        raise PathError(needed, buffer.space, f"use GM, {', '.join(chip.buffers)}")
    end = buffer.address + buffer.size_bytes
    capacity = chip.buffers[buffer.space]
    if end > capacity:
        needed = f"{buffer.name}: bytes {buffer.address}..{end - 1} of {buffer.space}"
        got = f"{capacity} bytes on {chip.name}"
        raise CapacityError(needed, got, "make the tile smaller or use fewer slots")
    # every slot must start aligned, so the distance of slots counts as well as the first address
    unit = chip.alignment.get(buffer.space, BLOCK_BYTES)
    if buffer.address % unit or (buffer.slots > 1 and buffer.slot_bytes % unit):
        needed = f"{buffer.name}: {buffer.space} addresses in multiples of {unit} bytes"
        got = f"address {buffer.address}, slot pitch {buffer.slot_bytes}"
        raise AlignmentError(needed, got, "round them up")


# -- one constructor per instruction ---------------------------------------------------------------
# An attribute with its default value is not stored: the text form of a program stays short, and
# data_copy(..., pad=False) equals data_copy(...).
def _without_none(**attrs: AttrValue | None) -> tuple[tuple[str, AttrValue], ...]:
    return tuple([(name, value) for name, value in attrs.items() if value is not None])


def _indexed_row_attrs(
    index: Region | None, pitch: int, bound: int, from_end: bool
) -> tuple[tuple[str, AttrValue], ...]:
    """Return the attributes of an instruction that picks a row at run time, or none for others.

    The row is number `index` of `bound` rows, which lie `pitch` elements apart.
    """
    # A pitch without an index is stored as well, so that `check_instruction` finds the mistake.
    if index is None and not pitch and not bound:
        return ()
    return (("pitch", pitch), ("bound", bound), *_without_none(from_end=int(from_end) or None))


# A constructor has one argument for each field of its instruction, some more than six: all except
# the regions are keywords with defaults.
def data_copy(
    chip: Chip,
    dst: Region,
    src: Region,
    *,
    pad: bool = False,
    atomic: str | None = None,
    index: Region | None = None,
    pitch: int = 0,
    bound: int = 0,
    from_end: bool = False,
    relu: bool = False,
) -> Instruction:
    """Copy src to dst along the chip's data path; shapes and formats are equal, strides arbitrary.

    On-chip runs are whole 32-byte blocks; `pad` allows ragged GM<->UB ends (chips with separate
    vector cores only). A copy between different strides turns ND into a fractal layout.
    `atomic="add"` adds to GM instead of overwriting it (UB->GM; fp32, fp16, int32). With `index`,
    one int32 in UB, the copy picks its row at run time: its GM side moves by `index * pitch`
    elements, 0 <= index < `bound`; with `from_end` an index below 0 counts from the end, like
    Python's -1. `relu` replaces negative sums by 0 on the path L0C->UB, which may also convert
    to a narrower format. Raises `PathError`, `AlignmentError`, `ProgramError`.
    Source of `relu`: Ascend C, enhanced DataCopy from CO1 to CO2 (developer documentation).
    """
    path = chip.path(src.space, dst.space)
    attrs = _without_none(pad=int(pad) or None, atomic=atomic, relu=int(relu) or None)
    attrs += _indexed_row_attrs(index, pitch, bound, from_end)
    srcs = (src,) if index is None else (src, index)
    return check_instruction(chip, Instruction("data_copy", path.pipe, dst, srcs, attrs))


def load2d(chip: Chip, dst: Region, src: Region) -> Instruction:
    """Move `repeat` fractals of 512 bytes from L1 (or GM) to L0A or L0B, one stride for all.

    Both regions are (repeat, ...) with 512 bytes behind the first axis. Inner strides that differ
    between the two transpose each fractal. Raises `PathError`, `CapacityError` (repeat > 255).
    """
    path = chip.path(src.space, dst.space)
    return check_instruction(chip, Instruction("load2d", path.pipe, dst, (src,)))


def load3d(
    chip: Chip,
    dst: Region,
    src: Region,
    *,
    kernel: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    pad: tuple[int, int, int, int] = (0, 0, 0, 0),
    dilation: tuple[int, int] = (1, 1),
    m_start: Affine | int = 0,
    k_start: Affine | int = 0,
    pad_value: int = 0,
) -> Instruction:
    """Build a tile of the im2col matrix in L0A from a feature map (C1, H, W, C0) in L1.

    Row m of the matrix is output pixel m, column k is (c1, kh, kw, c0). `dst` is (M1, K1, 16, C0),
    the tile that starts at (m_start, k_start); `pad` is (top, bottom, left, right), filled with
    `pad_value`, which in a quantised image is its zero point. An image (1, H, W, 4) has columns
    (kh, kw, 4): in fp16 four taps fill the 16 lanes of C0 (CANN operator sources, conv2d with
    FRACTAL_Z_C04).
    """
    path = chip.path(src.space, dst.space)
    attrs: tuple[tuple[str, AttrValue], ...] = (
        ("kernel", kernel),
        ("stride", stride),
        ("pad", pad),
        ("dilation", dilation),
        ("m_start", as_affine(m_start)),
        ("k_start", as_affine(k_start)),
        *_without_none(pad_value=pad_value or None),
    )
    return check_instruction(chip, Instruction("load3d", path.pipe, dst, (src,), attrs))


def mmad(
    chip: Chip,
    c: Region,
    a: Region,
    b: Region,
    *,
    accumulate: Affine | int = 0,
    bias: Region | None = None,
) -> Instruction:
    """Multiply-accumulate one tile: C = A @ B (+ bias), or C += A @ B where accumulate is not 0.

    A (M1, K1, 16, C0) in L0A as zZ, B (K1, N1, 16, C0) in L0B as zN, C (N1, M1, 16, 16) in L0C as
    nZ; fp16 -> fp32 or fp16, int8 -> int32, bf16 -> fp32 (where the chip has it).
    `accumulate` may be affine in loop variables: with accumulate=k the pass k = 0 of a reduction
    overwrites C and the later passes add to it.
    """
    # a bias lies in BT, the bias table, and has one number per column of C
    srcs = (a, b) if bias is None else (a, b, bias)
    attrs: tuple[tuple[str, AttrValue], ...] = (("accumulate", as_affine(accumulate)),)
    return check_instruction(chip, Instruction("mmad", "M", c, srcs, attrs))


def fixpipe(
    chip: Chip, dst: Region, src: Region, *, relu: bool = False, scale: float = 1.0
) -> Instruction:
    """Move a tile from L0C to GM or L1 on pipe FIX: scale, optional ReLU, cast to dst's format.

    Only chips with separate cube and vector cores have pipe FIX; others copy L0C to UB on pipe V.
    """
    attrs = _without_none(relu=int(relu) or None, scale=float(scale) if scale != 1.0 else None)
    return check_instruction(chip, Instruction("fixpipe", "FIX", dst, (src,), attrs))


def vdeq(
    chip: Chip,
    dst: Region,
    src: Region,
    scale: Region,
    bias: Region | None = None,
    *,
    relu: bool = False,
    offset: int = 0,
) -> Instruction:
    """Dequantise int32 sums from L0C to UB: dst = (sums + bias) * scale, with a scale per column.

    Regions are (blocks, rows, halves, 16). With 2 halves two fractals of 16 columns lie side by
    side and make the 32 channels of an int8 block. A result in int8 is rounded, shifted by
    `offset` and saturated. On the chip the bias is put into L0C before the first product; here
    this instruction adds it and its time includes that move.
    Source: Ascend C, CastDeq and the dequantising copy from CO1 (developer documentation).
    """
    path = chip.path("L0C", "UB")
    srcs = (src, scale) if bias is None else (src, scale, bias)
    attrs = _without_none(relu=int(relu) or None, offset=offset or None)
    return check_instruction(chip, Instruction("vdeq", path.pipe, dst, srcs, attrs))


def vector(
    chip: Chip,
    op: str,
    dst: Region,
    *srcs: Region,
    scalar: float | None = None,
    mask: int | None = None,
    compare: str | None = None,
    rounding: str | None = None,
) -> Instruction:
    """Make a vector instruction on UB: regions are (repeat, lanes...), up to 256 bytes a repeat.

    `mask` has a bit per lane (default: all lanes write). `scalar` belongs to vadds, vmuls, vmaxs,
    vmins, vdup and vaxpy (dst + src * scalar). `compare` (gt ge lt le eq ne) belongs to vcmp, which
    writes 1 or 0; `rounding` (rint floor ceil trunc) to a vconv into whole numbers.
    Reductions: vcadd, vcmax, vcmin write one element per repeat; vcgadd, vcgmax one per 32-byte
    block. vsel takes (a, b) and a mask, or (cond, a, b): a where cond is not 0. vbrcb spreads
    element i of (n,) over block i of (n, C0). vtranspose transposes 16 x 16 blocks of 2-byte
    elements, one a repeat; the rows of a block may lie apart.
    """
    number = None if scalar is None else float(scalar)
    # rint (to the nearest even) is the default of vconv, and defaults are not stored
    non_default = None if rounding == "rint" else rounding
    attrs = _without_none(scalar=number, mask=mask, op=compare, round=non_default)
    return check_instruction(chip, Instruction(op, "V", dst, srcs, attrs))


def scalar(
    chip: Chip,
    dst: Region | None = None,
    src: Region | None = None,
    *,
    steps: int = 1,
    index: Region | None = None,
    pitch: int = 0,
    bound: int = 0,
    from_end: bool = False,
) -> Instruction:
    """Make an instruction of `steps` operations on pipe S; with regions it also copies one element.

    With `index` the element on the GM side is picked at run time, as in `data_copy`.
    """
    srcs = tuple(region for region in (src, index) if region is not None)
    attrs: tuple[tuple[str, AttrValue], ...] = (("steps", steps),)
    attrs += _indexed_row_attrs(index, pitch, bound, from_end)
    return check_instruction(chip, Instruction("scalar", "S", dst, srcs, attrs))


def set_flag(chip: Chip, event: programs.Event) -> Instruction:
    """Let pipe event.src raise a flag for pipe event.dst once its earlier instructions are done."""
    return check_instruction(chip, Instruction("set_flag", event.src, event=event))


def wait_flag(chip: Chip, event: programs.Event) -> Instruction:
    """Let pipe event.dst wait until pipe event.src has raised the flag; the wait lowers it."""
    return check_instruction(chip, Instruction("wait_flag", event.dst, event=event))


def barrier(chip: Chip, pipe: str = "ALL") -> Instruction:
    """Make a pipe_barrier: wait until all earlier work on `pipe`, or on all pipes, has finished."""
    return check_instruction(chip, Instruction("barrier", pipe))


def mmad_shape(instruction: Instruction) -> tuple[int, int, int]:
    """Return (m, k, n) in elements of an mmad, from its operand regions."""
    a, b = instruction.srcs[:2]  # A (M1, K1, 16, C0), B (K1, N1, 16, C0)
    m1, k1, rows, c0 = a.sizes
    return m1 * rows, k1 * c0, b.sizes[1] * b.sizes[2]


def c0_of(dtype: str) -> int:
    """Return the length of the innermost axis C0 = 32 bytes / size: 16 for fp16, 32 for int8."""
    return BLOCK_BYTES // DTYPE_BYTES[dtype]


# -- whole programs --------------------------------------------------------------------------------
ON_ANY_CORE = ("barrier", "scalar", *CROSS)
"""Instructions that run on cube cores and on vector cores alike."""


def check_program(chip: Chip, program: Program) -> Program:
    """Return `program` if every access stays inside its buffer and one type of core can run it all.

    Raises `CapacityError` with the element touched and the size, `PathError` for cube and vector
    work in one program on a chip with separate cores, `ProgramError` for names that are used twice
    or unknown.
    """
    _check_names(program)
    units = set()
    for instruction, ranges in program.scoped():
        if instruction.event is not None:
            continue
        for region in instruction.regions:
            check_bounds(programs.reach_of(instruction, region), ranges, instruction.op)
        if instruction.op not in ON_ANY_CORE:
            units.add(unit_of(chip, instruction))
    # only chips with separate cores distinguish cube and vector; elsewhere every unit is "core"
    if len(units - {"core"}) > 1:
        needed = f"{program.name}: cube and vector work in separate programs on {chip.name}"
        got = "both in one program"
        raise PathError(needed, got, "exchange the data through GM between two programs")
    return program


def unit_of(chip: Chip, instruction: Instruction) -> str:
    """Return the type of core that runs an instruction: "core", "cube" or "vector".

    It is "core" on chips whose cores have both a cube and a vector unit.
    """
    if chip.combined:
        return "core"
    if instruction.op == "mmad":
        return "cube"
    if instruction.pipe == "V" or instruction.dst is None or not instruction.srcs:
        return "vector"
    # a move belongs to the core that owns the memories of its path
    return chip.path(instruction.srcs[0].space, instruction.dst.space).unit


def program_unit(chip: Chip, program: Program) -> str:
    """Return the type of core that a program runs on ("core", "cube" or "vector").

    The first instruction that only one type can run decides, because `check_program` rejects a
    program that needs both.
    """
    for instruction, _ in program.instructions():
        if instruction.event is None and instruction.op not in ON_ANY_CORE:
            return unit_of(chip, instruction)
    return "core" if chip.combined else "cube"


def check_bounds(region: Region, ranges: TripCounts, op: str) -> None:
    """Raise `CapacityError` if the region leaves its buffer for some values of the loop variables.

    Raises `ProgramError` for a variable of no loop around the instruction.
    """
    for name, _ in (*region.offset.terms, *region.slot.terms):
        if name not in ranges:
            needed = f"{op}: loop variables of the loops around it ({', '.join(ranges) or 'none'})"
            raise ProgramError(needed, name, "move the instruction into the loop")
    low, high = region.extent(ranges)
    if low < 0 or high >= region.buffer.elements:
        needed = f"{op}: elements 0..{region.buffer.elements - 1} of {region.buffer.name}"
        raise CapacityError(needed, f"{low}..{high}", "check offset, tile size and loop count")


def _check_names(program: Program) -> None:
    """Check that buffers have different names, and that no loop hides a variable."""
    names = [b.name for b in program.buffers]
    if len(set(names)) != len(names):
        raise ProgramError(f"{program.name}: one name per buffer", str(sorted(names)), "rename")
    _check_loops(program.name, program.body, frozenset(name for name, _ in program.params))


def _check_loops(name: str, nodes: tuple[programs.Node, ...], outer: frozenset[str]) -> None:
    for node in nodes:
        if isinstance(node, Loop):
            # two loops side by side may share a name; nested ones may not
            if node.var in outer:
                needed = f"{name}: a new name for a loop inside {', '.join(sorted(outer))}"
                raise ProgramError(needed, node.var, "the inner loop would hide the outer one")
            _check_loops(name, node.body, outer | {node.var})
