"""Checks the operands of an instruction: memories, alignment, shapes, number formats.

For example, a `vadd` whose source begins at byte 40 of UB is refused, because vector operands begin
at multiples of 32 bytes. The file begins with the checks that all instructions share; then come
moves, vector instructions on whole blocks, and computation (mmad and other vector instructions).
Every check raises a subclass of
`ProgramError` that says what is needed, what was given, and a remedy.
"""

import math
from collections.abc import Callable, Mapping

from ascend_lab.errors import AlignmentError, CapacityError, PathError, ProgramError
from ascend_lab.machine.chip import BLOCK_BYTES, Chip
from ascend_lab.machine.isa.memory import Affine, Region
from ascend_lab.machine.isa.program import (
    REDUCING,
    TAKES_SCALAR,
    WHOLE_BLOCKS,
    Instruction,
    index_of,
)

COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
"""Comparisons of two lanes that vcmp's attribute `op` may name."""
ROUNDINGS = ("rint", "floor", "ceil", "trunc")
"""Ways in which vconv rounds to a whole number; rint, to nearest even, is the default."""
ATOMIC_FORMATS = ("fp32", "fp16", "int32")
"""Number formats in which a copy with atomic="add" can add to GM."""
CUBE_OUTPUT = {
    "fp16": ("fp32", "fp16"),
    "bf16": ("fp32",),
    "int8": ("int32",),
    "fp32": ("fp32",),
}
"""Accumulator formats per input format (hardware facts, mmad types)."""
ACCUMULATOR = {dtype: formats[0] for dtype, formats in CUBE_OUTPUT.items()}
"""The accumulator format that kernels use for an input format."""
FRACTAL = 16
"""Rows of a fractal, the smallest tile that the cube multiplies."""
FRACTAL_BYTES = 512  # 16 rows of 32 bytes: 16 x 16 elements in fp16, 16 x 32 in int8
SMALL_C0 = 4
"""Channels per pixel that `load3d` accepts besides C0: RGB images padded to 4, in a first layer."""


def check_index(instruction: Instruction, dst: Region, src: Region) -> None:
    """Raise a subclass of `ProgramError` unless index, pitch and bound of a copy fit together."""
    op = instruction.op
    index = index_of(instruction)
    attrs = dict(instruction.attrs)
    row_attrs = [name for name in ("pitch", "bound") if name in attrs]
    if index is None:
        if row_attrs:
            needed = f"{op}: pitch and bound only beside an index"
            got = ", ".join(row_attrs)
            raise ProgramError(needed, got, "add index=")
        return
    if {src.space, dst.space} != {"GM", "UB"}:
        path = f"{src.space}->{dst.space}"
        raise PathError(f"{op}: an index between GM and UB", path, "go through UB")
    if index.space != "UB" or index.buffer.dtype != "int32" or index.elements != 1:
        got = f"{index.elements} {index.buffer.dtype} in {index.space}"
        remedy = "copy the indices to UB and take one element"
        raise ProgramError(f"{op}: an index of one int32 element in UB", got, remedy)
    # a pitch of 0 is legal: every index then picks the same row
    if (
        len(row_attrs) != 2
        or instruction.int_attr("bound") < 1
        or instruction.int_attr("pitch") < 0
    ):
        got = ", ".join(f"{name}={instruction.attr(name, 'none')}" for name in ("pitch", "bound"))
        needed = f"{op}: a pitch of 0 or more elements and a bound of 1 or more rows"
        raise ProgramError(needed, got, "correct it")


def check_aligned(region: Region, unit: int, op: str) -> None:
    """Raise `AlignmentError` unless the region starts at a multiple of `unit` bytes in every pass.

    The start is const + sum(coefficient * variable): it is aligned for all values of the loop
    variables exactly if the constant and every coefficient are.
    """
    item = region.buffer.itemsize
    # 16*i + 8 in fp16: the step of 32 bytes is aligned, the start at byte 16 is not
    for value in (region.offset.const, *[c for _, c in region.offset.terms]):
        if value * item % unit:
            needed = f"{op}: {region.buffer.name} addresses in multiples of {unit} bytes"
            got = f"{value * item} bytes"
            raise AlignmentError(needed, got, f"step by {max(unit // item, 1)} elements")


def check_repeat(chip: Chip, repeat: int, op: str) -> None:
    """Raise `CapacityError` if `repeat` exceeds what the instruction's field can hold (255)."""
    if repeat > chip.max_repeat:
        needed = f"{op}: at most {chip.max_repeat} repeats"
        raise CapacityError(needed, str(repeat), "split it with a loop")


def _check_format(op: str, dst: Region, src: Region, remedy: str = "cast with vconv") -> None:
    if src.buffer.dtype != dst.buffer.dtype:
        formats = f"{src.buffer.dtype} -> {dst.buffer.dtype}"
        raise ProgramError(f"{op}: one number format", formats, remedy)


def _check_shapes(op: str, dst: Region, src: Region) -> None:
    if dst.sizes != src.sizes:
        raise ProgramError(f"{op}: equal shapes", f"{src.sizes} -> {dst.sizes}", "reshape one")


# -- moves: data_copy, fixpipe, load2d, load3d, vdeq ----------------------------------------------
def _check_copy(chip: Chip, instruction: Instruction, dst: Region, src: Region) -> None:
    _check_shapes("data_copy", dst, src)
    # only a copy out of L0C converts formats (fp32 sums to fp16) and can apply a ReLU
    if (src.space, dst.space) != ("L0C", "UB"):
        _check_format("data_copy", dst, src, "cast with vconv or on the way out of L0C")
        if instruction.int_attr("relu"):
            got = f"{src.space}->{dst.space}"
            raise PathError("data_copy: relu on the path L0C->UB", got, "use vrelu elsewhere")
    if dst.space in ("L0A", "L0B"):
        raise PathError(f"data_copy: not into {dst.space}", str(dst), "use load2d or load3d")
    has_padding = instruction.int_attr("pad") == 1
    if has_padding and (chip.combined or {src.space, dst.space} != {"GM", "UB"}):
        needed = f"a padding copy {src.space}->{dst.space} on {chip.name}"
        raise PathError(needed, "none", "make the GM tensor a multiple of 32 bytes")
    _check_atomic(instruction, dst, src)
    check_index(instruction, dst, src)
    for region in (dst, src):
        if region.space == "GM":  # GM is addressed byte by byte
            continue
        check_aligned(region, BLOCK_BYTES, "data_copy")
        if region.run_bytes % BLOCK_BYTES and not has_padding:
            needed = f"data_copy: runs of whole {BLOCK_BYTES}-byte blocks in {region.buffer.name}"
            raise AlignmentError(needed, f"{region.run_bytes} bytes", "round the inner length up")


def _check_atomic(instruction: Instruction, dst: Region, src: Region) -> None:
    names = [name for name, _ in instruction.attrs]
    if "atomic" not in names:
        return
    if instruction.attr("atomic") != "add" or (src.space, dst.space) != ("UB", "GM"):
        needed = 'data_copy: atomic="add" on the path UB->GM'
        got = f"{instruction.attr('atomic')!r}, {src.space}->{dst.space}"
        raise PathError(needed, got, "leave atomic out elsewhere")
    if dst.buffer.dtype not in ATOMIC_FORMATS:
        needed = f"data_copy: an atomic add in {', '.join(ATOMIC_FORMATS)}"
        raise PathError(needed, dst.buffer.dtype, "convert with vconv first")


def _check_fixpipe(chip: Chip, instruction: Instruction, dst: Region, src: Region) -> None:
    _check_shapes("fixpipe", dst, src)
    if instruction.pipe != "FIX" or src.space != "L0C":
        raise PathError("fixpipe: a path out of L0C on pipe FIX", instruction.pipe, "copy to UB")


def _check_load2d(chip: Chip, instruction: Instruction, dst: Region, src: Region) -> None:
    _check_load(dst, src, "load2d")
    repeat = dst.sizes[0]
    # (4, 16, 16) in fp16 has 2048 bytes: 4 fractals of 512
    fractal = dst.size_bytes // dst.sizes[0]
    if fractal != FRACTAL_BYTES or dst.sizes != src.sizes:
        needed = f"load2d: fractals of {FRACTAL_BYTES} bytes, equal shapes"
        got = f"{fractal} bytes, {src.sizes} -> {dst.sizes}"
        raise ProgramError(needed, got, "make the regions (repeat, 16, C0)")
    check_repeat(chip, repeat, "load2d")


def _check_load(dst: Region, src: Region, op: str) -> None:
    origins = ("L1", "GM") if op == "load2d" else ("L1",)
    if src.space not in origins or dst.space not in ("L0A", "L0B"):
        got = f"{src.space}->{dst.space}"
        needed = f"{op}: a path from {' or '.join(origins)} to L0A or L0B"
        raise PathError(needed, got, "use data_copy elsewhere")
    check_aligned(dst, FRACTAL_BYTES, op)
    if src.space != "GM":
        check_aligned(src, BLOCK_BYTES, op)
    _check_format(op, dst, src, "match the buffers")


def _check_load3d(chip: Chip, instruction: Instruction, dst: Region, src: Region) -> None:
    _check_load(dst, src, "load3d")
    c0 = BLOCK_BYTES // dst.buffer.itemsize
    if dst.space != "L0A" or len(dst.sizes) != 4 or dst.sizes[2:] != (16, c0):
        raise ProgramError(f"load3d: a (M1, K1, 16, {c0}) tile in L0A", str(dst), "see load3d")
    if len(src.sizes) != 4 or src.sizes[3] not in (c0, SMALL_C0):
        raise ProgramError(f"load3d: an image (C1, H, W, {c0}) in L1", str(src), "see load3d")
    # pad: rows above and below, columns left and right
    lengths = {"kernel": 2, "stride": 2, "pad": 4, "dilation": 2}
    values = {name: instruction.attr(name) for name in lengths}
    for name, length in lengths.items():
        value = values[name]
        minimum = 0 if name == "pad" else 1
        if not isinstance(value, tuple) or len(value) != length or min(value) < minimum:
            needed = f"load3d: {name} as {length} numbers of at least {minimum}"
            raise ProgramError(needed, repr(value), "correct it")
    _check_window(src, values)
    k_start = instruction.attr("k_start")
    # The tile starts at const + sum(coefficient * variable): at a whole block of C0 columns for
    # all loop variables exactly if the constant and every coefficient are multiples of C0.
    terms = (k_start.const, *(c for _, c in k_start.terms)) if isinstance(k_start, Affine) else ()
    if any(term % c0 for term in terms):
        raise AlignmentError(f"load3d: k_start in multiples of {c0}", str(k_start), "round it")


def _check_window(src: Region, values: Mapping[str, object]) -> None:
    """Raise `ProgramError` if the dilated kernel is larger than the padded image."""
    kernel = values["kernel"]
    pad = values["pad"]
    dilation = values["dilation"]
    assert isinstance(kernel, tuple) and isinstance(pad, tuple) and isinstance(dilation, tuple)
    padded_image = (src.sizes[1] + pad[0] + pad[1], src.sizes[2] + pad[2] + pad[3])
    # 3 taps with dilation 2 span 2 * (3 - 1) + 1 = 5 pixels
    window = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    if window[0] > padded_image[0] or window[1] > padded_image[1]:
        needed = f"load3d: a kernel within the padded image {padded_image}"
        raise ProgramError(needed, str(window), "add rows or padding")


def _check_vdeq(chip: Chip, instruction: Instruction, dst: Region, src: Region) -> None:
    if (src.space, dst.space, src.buffer.dtype) != ("L0C", "UB", "int32"):
        got = f"{src.buffer.dtype} {src.space}->{dst.space}"
        raise PathError("vdeq: int32 sums from L0C to UB", got, "copy other formats")
    if dst.buffer.dtype not in ("int8", "fp16", "fp32"):
        raise ProgramError("vdeq: a result in int8, fp16 or fp32", dst.buffer.dtype, "convert it")
    _check_shapes("vdeq", dst, src)
    if len(dst.sizes) != 4 or dst.sizes[2:] not in ((1, 16), (2, 16)):
        needed = "vdeq: (blocks, rows, 1, 16), or 2 fractals side by side"
        raise ProgramError(needed, str(dst.sizes), "see vdeq")
    check_aligned(dst, BLOCK_BYTES, "vdeq")
    # after the sums come the scale and, if there is one, the bias
    for region, dtype in zip(instruction.srcs[1:], ("fp32", "int32"), strict=False):
        # (4, 100, 1, 16) are 4 blocks of 100 rows: 6400 elements in 64 columns
        columns = dst.elements // dst.sizes[1]
        if (region.space, region.buffer.dtype, region.elements) != ("UB", dtype, columns):
            got = f"{region.elements} {region.buffer.dtype} in {region.space}"
            raise ProgramError(f"vdeq: {columns} {dtype} in UB, one a column", got, "load them")


CHECK_MOVE: Mapping[str, Callable[[Chip, Instruction, Region, Region], None]] = {
    "data_copy": _check_copy,
    "fixpipe": _check_fixpipe,
    "load2d": _check_load2d,
    "load3d": _check_load3d,
    "vdeq": _check_vdeq,
}
"""The check of each move; it raises a subclass of `ProgramError` if the chip cannot make it."""


# -- whole blocks: vbrcb and vtranspose ------------------------------------------------------------
BLOCKS_PER_REPEAT = 8
"""32-byte blocks in one vector repeat: 8 x 32 = 256 bytes."""


def check_whole_blocks(chip: Chip, instruction: Instruction, dst: Region) -> None:
    """Raise unless `vbrcb` or `vtranspose` has operands of the right shape in UB."""
    op = instruction.op
    src = instruction.srcs[0]
    for region in (dst, src):
        if region.space != "UB":
            raise PathError(f"{op}: operands in UB", region.space, "copy the tile to UB first")
        check_aligned(region, BLOCK_BYTES, op)
    _check_format(op, dst, src)
    if instruction.attrs:
        names = ", ".join(name for name, _ in instruction.attrs)
        raise ProgramError(f"{op}: no attributes", names, "leave them out")
    if op == "vbrcb":
        _check_brcb(chip, dst, src)
    else:
        _check_transpose(chip, dst, src)


def _check_brcb(chip: Chip, dst: Region, src: Region) -> None:
    """Check dst (n, C0) <- src (n,): n neighbours into n whole blocks at one stride."""
    item = dst.buffer.itemsize
    if item == 1:
        needed = "vbrcb: elements of 2 or 4 bytes"
        raise PathError(needed, dst.buffer.dtype, "convert to fp16 with vconv")
    c0 = BLOCK_BYTES // item
    n = src.elements
    is_contiguous = src.sizes == (n,) and (n == 1 or src.strides == (1,))
    has_blocks = dst.sizes == (n, c0)
    if has_blocks:
        has_blocks = dst.strides[0] * item % BLOCK_BYTES == 0 and dst.strides[1] == 1
    if not is_contiguous or not has_blocks:
        needed = f"vbrcb: n neighbours (n,) into n blocks (n, {c0})"
        got = f"{src.sizes}:{src.strides} -> {dst.sizes}:{dst.strides}"
        raise ProgramError(needed, got, f"give each source element a block of {c0}")
    # 255 repeats of 8 blocks are 2040 blocks
    limit = chip.max_repeat * BLOCKS_PER_REPEAT
    if n > limit:
        needed = f"vbrcb: at most {chip.max_repeat} repeats of {BLOCKS_PER_REPEAT} blocks, {limit}"
        raise CapacityError(needed, f"{n} blocks", "split it with a loop")


def _check_transpose(chip: Chip, dst: Region, src: Region) -> None:
    """Check blocks of 16 x 16 elements of 2 bytes, one per repeat; a row is one 32-byte block."""
    if dst.buffer.itemsize != 2:
        needed = "vtranspose: elements of 2 bytes"
        raise PathError(needed, dst.buffer.dtype, "transpose other formats with a strided copy")
    same_shape = dst.sizes == src.sizes and dst.sizes[0] <= chip.max_repeat
    for region in (dst, src):
        square = region.sizes in ((16, 16), (region.sizes[0], 16, 16)) and region.strides[-1] == 1
        # a stride of 16 elements of 2 bytes is one block of 32 bytes
        if not (same_shape and square) or any(stride % 16 for stride in region.strides[:-1]):
            raise ProgramError(
                f"vtranspose: one block (16, 16) to {chip.max_repeat}, rows whole blocks, alike",
                f"{region.sizes}:{region.strides} of {region.buffer.name}",
                "lay the tile out in blocks of 16 x 16 on the way to UB",
            )


# -- computing: mmad on the cube, everything on the vector unit ------------------------------------
def check_mmad(chip: Chip, instruction: Instruction, c: Region) -> None:
    """Raise unless the operands are fractal tiles of matching sizes in the cube's formats."""
    a, b = instruction.srcs[:2]
    spaces = (c.space, a.space, b.space)
    if spaces != ("L0C", "L0A", "L0B"):
        raise PathError("mmad: C in L0C, A in L0A, B in L0B", str(spaces), "load the tiles first")
    a_type = a.buffer.dtype
    b_type = b.buffer.dtype
    c_type = c.buffer.dtype
    if a_type not in chip.cube or b_type != a_type or c_type not in CUBE_OUTPUT[a_type]:
        needed = f"mmad: a number format of the {chip.name} cube"
        got = f"{a_type} x {b_type} -> {c_type}"
        raise PathError(needed, got, f"use {_products(chip)}")
    c0 = BLOCK_BYTES // a.buffer.itemsize
    fractal_shapes = None
    if len(a.sizes) == len(b.sizes) == 4:
        m1 = a.sizes[0]
        k1 = a.sizes[1]
        n1 = b.sizes[1]
        # M, K and N are counted in fractals: m1 = M / 16, k1 = K / C0, n1 = N / 16
        fractal_shapes = ((m1, k1, FRACTAL, c0), (k1, n1, FRACTAL, c0), (n1, m1, FRACTAL, FRACTAL))
    if (a.sizes, b.sizes, c.sizes) != fractal_shapes:
        needed = "mmad: A (M1,K1,16,C0), B (K1,N1,16,C0), C (N1,M1,16,16)"
        got = f"{a.sizes}, {b.sizes}, {c.sizes}"
        raise ProgramError(needed, got, "reshape the regions; K1, M1, N1 must agree")
    if len(instruction.srcs) == 3:
        _check_bias(instruction.srcs[2], c, b.sizes[1] * FRACTAL)


def _products(chip: Chip) -> str:
    """Spell out the formats of the cube for messages: "fp16 -> fp32 or int8 -> int32"."""
    return " or ".join(f"{dtype} -> {CUBE_OUTPUT[dtype][0]}" for dtype in chip.cube)


def _check_bias(bias: Region, c: Region, columns: int) -> None:
    if bias.space != "BT":
        raise PathError("mmad: a bias in BT, the bias table", bias.space, "copy it L1->BT")
    if bias.elements != columns or bias.buffer.dtype != c.buffer.dtype:
        needed = f"mmad: a bias of {columns} {c.buffer.dtype}"
        got = f"{bias.elements} {bias.buffer.dtype}"
        raise ProgramError(needed, got, "one number per column of C")


def check_vector(chip: Chip, instruction: Instruction, dst: Region) -> None:
    """Raise unless the operands are equally long, aligned tiles of UB in one format."""
    op = instruction.op
    is_reduction = instruction.op in REDUCING
    # the operand that sets repeats and lanes: that of a reduction is its source, not its result
    main = instruction.srcs[0] if is_reduction else dst
    _check_attributes(instruction, main)
    _check_choices(instruction, dst)
    if op in WHOLE_BLOCKS:
        check_whole_blocks(chip, instruction, dst)
        return
    check_repeat(chip, main.sizes[0], op)
    # vaxpy adds to its result (dst + src * scalar), so that dst must be the first source as well
    if op == "vaxpy" and instruction.srcs[0] != dst:
        raise ProgramError("vaxpy: a sum in place", str(instruction.srcs[0]), "name dst first")
    for region in instruction.regions:
        if region.space != "UB":
            raise PathError(f"{op}: operands in UB", region.space, "copy the tile to UB first")
        if region is not dst or not is_reduction:
            check_aligned(region, BLOCK_BYTES, op)
            _check_stride(region, op)
        # the outermost axis counts repeats: (10, 64) in fp32 takes 256 bytes a repeat
        per_repeat = region.size_bytes // region.sizes[0]
        if per_repeat > chip.vector_bytes_per_repeat:
            needed = f"{op}: at most {chip.vector_bytes_per_repeat} bytes a repeat"
            got = f"{per_repeat} in {region.buffer.name}"
            raise CapacityError(needed, got, "use more repeats of fewer lanes")
        is_result = is_reduction and region is dst
        needed_elements = _reduced_elements(op, main) if is_result else main.elements
        if region.elements != needed_elements:
            got = f"{region.elements} in {region.buffer.name}"
            raise ProgramError(f"{op}: {needed_elements} elements", got, "a stride of 0 broadcasts")
        if op != "vconv":
            _check_format(op, dst, region)


def _check_stride(region: Region, op: str) -> None:
    """Raise `AlignmentError` unless the distance between rows is a multiple of 32 bytes.

    The strides in an instruction count blocks of 32 bytes. An axis inside a contiguous run (its
    step is below `run_bytes`) needs no stride; the outermost axis, the repeats, always does.
    """
    for axis, (size, stride) in enumerate(zip(region.sizes, region.strides, strict=True)):
        step_bytes = stride * region.buffer.itemsize
        # rows of 64 numbers in fp16 may lie 80 numbers apart, 160 bytes, but not 72, 144 bytes
        if size > 1 and step_bytes % BLOCK_BYTES and (axis == 0 or step_bytes >= region.run_bytes):
            needed = f"{op}: rows of {region.buffer.name} multiples of {BLOCK_BYTES} bytes apart"
            raise AlignmentError(needed, f"{step_bytes} bytes", "pad the rows to whole blocks")


def _reduced_elements(op: str, src: Region) -> int:
    """Return the number of elements that a reduction writes.

    That is one per repeat, or for vcgadd and vcgmax one per 32-byte block of a repeat.
    """
    if not op.startswith("vcg"):
        return src.sizes[0]
    # a repeat of 256 bytes has 8 blocks: vcgadd writes 8 sums for it
    blocks, extra_bytes = divmod(src.size_bytes // src.sizes[0], BLOCK_BYTES)
    if extra_bytes:
        needed = f"{op}: whole 32-byte blocks a repeat"
        raise AlignmentError(needed, f"{extra_bytes} bytes over", "pad it")
    return src.sizes[0] * blocks


def _check_attributes(instruction: Instruction, main: Region) -> None:
    """Check the scalar and the mask against the operand `main` that sets repeats and lanes."""
    op = instruction.op
    names = [name for name, _ in instruction.attrs]
    if ("scalar" in names) != (op in TAKES_SCALAR):
        needed = "a scalar" if op in TAKES_SCALAR else "no scalar"
        raise ProgramError(f"{op}: {needed}", str(instruction.attr("scalar", "none")), "correct it")
    value = instruction.attr("scalar")
    is_integer = isinstance(value, int | float) and math.isfinite(value) and value == int(value)
    if main.buffer.dtype in ("int8", "uint8", "int32") and not is_integer:
        raise ProgramError(f"{op}: a whole scalar for {main.buffer.dtype}", str(value), "round it")
    lanes = main.elements // main.sizes[0]
    mask = instruction.attr("mask", 1)
    # 128 lanes: the mask 0b1111 computes the first 4 of them, 1 << 128 would need a lane more
    if not isinstance(mask, int) or not 0 < mask < 1 << lanes:
        needed = f"{op}: a mask with a bit for each of {lanes} lanes"
        raise ProgramError(needed, repr(mask), "(1 << n) - 1 for n")


def _check_choices(instruction: Instruction, dst: Region) -> None:
    """Check the attributes whose value is a word: vcmp's `op`, vconv's `round`."""
    op = instruction.op
    attrs = dict(instruction.attrs)
    if ("op" in attrs) != (op == "vcmp") or attrs.get("op", "gt") not in COMPARISONS:
        needed = f"op as one of {', '.join(COMPARISONS)}" if op == "vcmp" else "no comparison"
        raise ProgramError(f"{op}: {needed}", repr(attrs.get("op")), "correct it")
    if "round" in attrs:
        to_integer = dst.buffer.dtype in ("int8", "uint8", "int32")
        if op != "vconv" or not to_integer or attrs["round"] not in ROUNDINGS:
            needed = f"{op}: round ({', '.join(ROUNDINGS)}) only in a vconv to whole numbers"
            got = f"{attrs['round']!r} to {dst.buffer.dtype}"
            raise ProgramError(needed, got, "leave it out, or convert to int32")
    if op == "vsel" and len(instruction.srcs) == 3 and "mask" in attrs:
        needed = "vsel: a condition tile or a mask"
        raise ProgramError(needed, "both", "drop the mask, or the first source")
