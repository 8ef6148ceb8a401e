"""The instruction set: one constructor per instruction, each checked against the chip.

Sources: Ascend C developer documentation (instruction parameters), hicann/runtime platform files
(data paths per chip).
"""

from __future__ import annotations

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.isa.memory import Affine, Region, as_affine
from ascend_lab.isa.program import AttrValue, Event, Instruction
from ascend_lab.isa.rules import check_instruction


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
) -> Instruction:
    """Move src to dst along the chip's path: bursts of any stride, equal shapes and formats.

    On-chip runs are whole 32-byte blocks; `pad` allows ragged GM<->UB ends (chips with separate
    vector cores only). A copy between different strides is how ND becomes a fractal layout.
    `atomic="add"` adds to GM instead of overwriting it (UB->GM; fp32, fp16, int32). With `index`,
    one int32 in UB, the GM side moves by `index * pitch` elements, 0 <= index < `bound`: a row
    picked at run time. Raises `PathError`, `AlignmentError`, `ProgramError`.
    """
    path = chip.path(src.space, dst.space)
    attrs: tuple[tuple[str, AttrValue], ...] = (("pad", 1),) if pad else ()
    if atomic is not None:
        attrs += (("atomic", atomic),)
    if index is not None or pitch or bound:
        attrs += (("pitch", pitch), ("bound", bound))
    srcs = (src,) if index is None else (src, index)
    return check_instruction(chip, Instruction("data_copy", path.pipe, dst, srcs, attrs))


def load2d(chip: Chip, dst: Region, src: Region) -> Instruction:
    """Move `repeat` fractals of 512 bytes from L1 (or GM) to L0A or L0B, one stride for all.

    Regions are (repeat, ...) with 512 bytes behind the first axis; inner strides may differ, which
    transposes each fractal. Raises `PathError`, `CapacityError` (repeat > 255).
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
) -> Instruction:
    """Build a tile of the im2col matrix in L0A from a feature map (C1, H, W, C0) in L1.

    Row m of the matrix is output pixel m, column k is (c1, kh, kw, c0). `dst` is (M1, K1, 16, C0),
    the tile that starts at (m_start, k_start); `pad` is (top, bottom, left, right).
    """
    path = chip.path(src.space, dst.space)
    attrs: tuple[tuple[str, AttrValue], ...] = (
        ("kernel", kernel),
        ("stride", stride),
        ("pad", pad),
        ("dilation", dilation),
        ("m_start", as_affine(m_start)),
        ("k_start", as_affine(k_start)),
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
    `accumulate` may be affine in loop variables: the first pass of a reduction writes, the others
    add.
    """
    srcs = (a, b) if bias is None else (a, b, bias)
    attrs: tuple[tuple[str, AttrValue], ...] = (("accumulate", as_affine(accumulate)),)
    return check_instruction(chip, Instruction("mmad", "M", c, srcs, attrs))


def fixpipe(
    chip: Chip, dst: Region, src: Region, *, relu: bool = False, scale: float = 1.0
) -> Instruction:
    """Drain L0C through the fix pipe to GM or L1: scale, optional ReLU, cast to dst's format.

    Only chips with separate cube and vector cores have it; others copy L0C to UB on the V pipe.
    """
    attrs: tuple[tuple[str, AttrValue], ...] = ()
    if relu:
        attrs += (("relu", 1),)
    if scale != 1.0:
        attrs += (("scale", float(scale)),)
    return check_instruction(chip, Instruction("fixpipe", "FIX", dst, (src,), attrs))


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
    """One vector instruction on UB: regions are (repeat, lanes...), at most 256 bytes a repeat.

    `mask` is a bit per lane (default: all lanes write); `scalar` belongs to vadds, vmuls, vmaxs,
    vmins and vdup. Reductions (vcadd, vcmax, vcmin) write one element a repeat, vcgadd and vcgmax
    one a 32-byte block. `compare` (gt ge lt le eq ne) belongs to vcmp, which writes 1 or 0;
    `rounding` (rint floor ceil trunc) to vconv into whole numbers. vsel takes (a, b) and a mask,
    or (cond, a, b): a where cond is not 0. vbrcb spreads element i of (n,) over block i of
    (n, C0); vtranspose turns one 16 x 16 block of 2-byte elements.
    """
    attrs: tuple[tuple[str, AttrValue], ...] = ()
    if scalar is not None:
        attrs += (("scalar", float(scalar)),)
    if mask is not None:
        attrs += (("mask", mask),)
    if compare is not None:
        attrs += (("op", compare),)
    if rounding is not None and rounding != "rint":
        attrs += (("round", rounding),)
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
) -> Instruction:
    """Scalar work of `steps` operations on S; with regions it also copies one element.

    With `index` the element's GM side moves by `index * pitch`, as in `data_copy`.
    """
    srcs = tuple(region for region in (src, index) if region is not None)
    attrs: tuple[tuple[str, AttrValue], ...] = (("steps", steps),)
    if index is not None or pitch or bound:
        attrs += (("pitch", pitch), ("bound", bound))
    return check_instruction(chip, Instruction("scalar", "S", dst, srcs, attrs))


def set_flag(chip: Chip, event: Event) -> Instruction:
    """Let pipe event.src raise a flag for pipe event.dst when all before it has finished."""
    return check_instruction(chip, Instruction("set_flag", event.src, event=event))


def wait_flag(chip: Chip, event: Event) -> Instruction:
    """Let pipe event.dst stand still until pipe event.src has raised the flag; lower it."""
    return check_instruction(chip, Instruction("wait_flag", event.dst, event=event))


def barrier(chip: Chip, pipe: str = "ALL") -> Instruction:
    """pipe_barrier: wait until everything before it on `pipe` (or on all pipes) has finished."""
    return check_instruction(chip, Instruction("barrier", pipe))


def mmad_shape(instruction: Instruction) -> tuple[int, int, int]:
    """Return (m, k, n) in elements of an mmad, from its operand regions."""
    a, b = instruction.srcs[:2]
    m1, k1, rows, c0 = a.sizes
    return m1 * rows, k1 * c0, b.sizes[1] * b.sizes[2]


def c0_of(dtype: str) -> int:
    """Length of the innermost axis C0 = 32 bytes / size: 16 for fp16, 32 for int8."""
    return 32 // DTYPE_BYTES[dtype]
