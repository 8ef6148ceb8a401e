"""Executes programs for their values, on NumPy arrays in the hardware's number formats.

On-chip memory is one byte array per space. At the start every byte is 0xFF, which is NaN in fp16
and fp32 (the memory is "poisoned"): a wrong address or a missing copy then gives a wrong result,
where zeros might give the right one by chance.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ascend_lab.errors import InputError, SimulationError
from ascend_lab.machine.chip import BLOCK_BYTES, Chip
from ascend_lab.machine.isa import Buffer, Instruction, Program, Region, as_kernel, launch
from ascend_lab.machine.isa.instructions import check_instruction, check_program
from ascend_lab.machine.isa.memory import numpy_type
from ascend_lab.machine.isa.program import (
    CROSS,
    FLAGS,
    REDUCING,
    WHOLE_BLOCKS,
    WITH_SCALAR,
    index_of,
)
from ascend_lab.machine.isa.walk import Core, Pick, Step, first, interleave, interleave_cores

Values = np.ndarray
POISON_BYTE = 0xFF
"""Every byte of memory that nobody has written: 0xFFFF is NaN in fp16, -1 in int16."""
MAX_SHARED_STEPS = 50_000
"""The order of so many steps at most is stored for other cores that run the same program."""
MAX_EVENTS = 2_000_000
"""Largest number of instructions to execute."""


def execute(
    program: launch.Runnable,
    tensors: Mapping[str, Values],
    chip: Chip,
    *,
    seed: int | None = None,
    overflow: Callable[[], None] = lambda: None,
) -> dict[str, Values]:
    """Run a program on arrays and return every GM tensor after it, by name.

    Phases run in order over the same GM tensors. `tensors` gives the tensors that are read, in any
    shape with the right number of elements, in C order; a missing tensor starts with every byte
    0xFF. With `seed`, pipes advance in a random order that the flags allow: without races the
    values are the same. `overflow` is called when a finite number leaves the range of its format.
    Raises `InputError` for wrong tensors, `SyncError` on deadlock.
    """
    kernel = as_kernel(program)
    events = kernel.executed_count
    if events > MAX_EVENTS:
        needed = f"at most {MAX_EVENTS} instructions to execute"
        raise SimulationError(needed, str(events), "use a smaller shape")
    memory = {b.name: _tensor(b, tensors) for b in kernel.tensors}
    for name in tensors:
        if name not in memory:
            raise InputError("a tensor of the program", name, f"it has {', '.join(memory)}")
    for phase in kernel.phases:
        _check_phase(phase, chip)
    pick = first if seed is None else random.Random(seed).choice
    places = dict[int, Place]()
    # The hardware has no exceptions: overflow gives infinity, 0 / 0 gives NaN, both silently.
    with np.errstate(all="ignore", over="call", call=lambda what, flag: overflow()):
        for phase in kernel.phases:
            crews = launch.crews(phase)
            orders = dict[int, list[Step]]()
            for crew in crews:
                cores = [_Core(chip, memory, places) for _ in crew]
                # 32 cores that run one program, each by itself, need its order of steps only once.
                if seed is None and len(crew) == 1 < len(crews):
                    _run_alone(cores[0], *crew[0], orders)
                else:
                    _run_crew(cores, crew, pick, phase.mix or 1)
    shapes = {name: np.shape(value) for name, value in tensors.items()}
    return {n: v.reshape(shapes[n]) if n in shapes else v for n, v in memory.items()}


def _check_phase(phase: launch.Launch, chip: Chip) -> None:
    """Check programs that no builder has checked, such as those read from text."""
    launch.check_launch(chip, phase)
    for part in phase.parts:
        for instruction, _ in part.program.instructions():
            check_instruction(chip, instruction)
        check_program(chip, part.program)


def _run_crew(cores: Sequence["_Core"], crew: Sequence[Core], pick: Pick, team: int) -> None:
    """Run cores that wait for each other, step by step in an order that the flags allow."""
    for number, _, instruction, env in interleave_cores(crew, pick, team):
        action = _ACTIONS.get(instruction.op, _vector)
        action(cores[number], instruction, env)


def _run_alone(
    core: "_Core", program: Program, binding: Mapping[str, int], orders: dict[int, list[Step]]
) -> None:
    """Run a core that waits for no other; all cores with the same program take the same steps.

    `orders` keeps the steps of each program, or an empty list if they are too many to keep.
    """
    if id(program) not in orders:
        fits = sum(runs for _, runs in program.instructions()) <= MAX_SHARED_STEPS
        orders[id(program)] = list(interleave(program, {})) if fits else []
    for instruction, loops in orders[id(program)] or interleave(program, {}):
        _ACTIONS.get(instruction.op, _vector)(core, instruction, {**loops, **binding})


def _tensor(buffer: Buffer, tensors: Mapping[str, Values]) -> Values:
    """Return a flat copy of the caller's tensor for a GM buffer, or poison if there is none."""
    dtype = numpy_type(buffer.dtype)
    if buffer.name not in tensors:
        return np.full(buffer.size_bytes, POISON_BYTE, np.uint8).view(dtype)
    try:
        array = np.ascontiguousarray(tensors[buffer.name])
    except ValueError as error:
        raise InputError(f"tensor {buffer.name}: an array", str(error), "stack its rows") from error
    if array.nbytes != buffer.size_bytes or array.dtype != dtype:
        needed = f"tensor {buffer.name}: {buffer.elements} elements of {buffer.dtype}"
        raise InputError(needed, f"{array.size} of {array.dtype}", "check shape and format")
    return array.reshape(-1).copy()


# -- one core --------------------------------------------------------------------------------------
Place = tuple[str, range, int, np.dtype[Any], tuple[int, ...]]
"""Where a region is: memory, first byte of each slot, bytes of a slot, format, strides in bytes.

Two slots of 32 KB from address 0 of UB on: ("UB ", range(0, 65536, 32768), 32768, fp16, (512, 2)).
"""


def _place(region: Region) -> Place:
    """Return where a region is, without slot and offset, which depend on loop counters."""
    buffer = region.buffer
    dtype = np.dtype(numpy_type(region.buffer.dtype))
    memory, low = (buffer.name, 0) if buffer.space == "GM" else ("", buffer.address)
    starts = range(low, low + buffer.slots * buffer.slot_bytes, buffer.slot_bytes)
    strides = tuple(stride * buffer.itemsize for stride in region.strides)
    return f"{buffer.space} {memory}", starts, buffer.elements * buffer.itemsize, dtype, strides


class _Core:
    """The memory of one core: GM tensors, shared with other cores, and its own on-chip memories."""

    def __init__(self, chip: Chip, tensors: dict[str, Values], places: dict[int, Place]) -> None:
        self.chip = chip
        self.tensors = tensors
        self.places = places
        self.memories: dict[str, Values] = {}

    def _memory(self, name: str, buffer: Buffer) -> Values:
        """Return the bytes of a memory; one on the chip is made when it is first used."""
        if buffer.space == "GM":
            memory = self.tensors[buffer.name].view(np.uint8)
        else:
            memory = np.full(self.chip.buffers[buffer.space], POISON_BYTE, np.uint8)
        self.memories[name] = memory
        return memory

    def view(self, region: Region, env: Mapping[str, int], shift: int = 0) -> Values:
        """Return a NumPy view of the region's elements, shaped by its sizes.

        `env` holds the loop counters, `shift` elements are added to the region's offset.
        """
        place = self.places.get(id(region))
        if place is None:
            place = _place(region)
            self.places[id(region)] = place
        name, slot_starts, slot_bytes, dtype, strides = place
        memory = self.memories.get(name)
        if memory is None:
            memory = self._memory(name, region.buffer)
        low = slot_starts[region.slot.at(env) % len(slot_starts)]  # slots are used in turn
        flat = memory[low : low + slot_bytes]
        start = region.offset.at(env) + shift
        try:
            return np.ndarray(region.sizes, dtype, flat, start * dtype.itemsize, strides)
        except ValueError:
            # The region is partly outside its slot; the values will show whether that does harm.
            return as_strided(flat.view(dtype)[start:], region.sizes, strides)


def _nothing(core: _Core, instruction: Instruction, env: Mapping[str, int]) -> None:
    """Do nothing: flags and barriers have no values, and `isa.walk` has put the steps in order."""


def _copy(core: _Core, instruction: Instruction, env: Mapping[str, int]) -> None:
    """Copy a region to another one; to GM also by adding, element by element."""
    src = instruction.srcs[0]
    dst = instruction.out
    shift = _row_shift(core, instruction, env)
    values = core.view(src, env, shift if src.space == "GM" else 0)
    if dst.space != "GM":
        values = np.maximum(values, 0) if instruction.int_attr("relu") else values
        store(core.view(dst, env), values)
    elif instruction.attr("atomic") == "add":
        # add.at, not +=: an element that the region covers twice must get both values.
        elements = _element_numbers(dst, dst.offset.at(env) + shift)
        np.add.at(core.tensors[dst.buffer.name], elements, values)
    else:
        store(core.view(dst, env, shift), values)


def _row_shift(core: _Core, instruction: Instruction, env: Mapping[str, int]) -> int:
    """Return the elements by which an indexed copy moves its GM side: index * pitch.

    With `from_end`, index -1 is the last row: of 100 rows, row 99.
    """
    index_region = index_of(instruction)
    if index_region is None:
        return 0
    index = int(core.view(index_region, env).reshape(-1)[0])
    bound = instruction.int_attr("bound")
    lowest = -bound if instruction.int_attr("from_end") else 0
    if not lowest <= index < bound:
        where = ", ".join(f"{name}={value}" for name, value in env.items()) or "no loop"
        needed = (
            f"{instruction.op}: an index of {lowest}..{bound - 1}, "
            f"read from {index_region.buffer.name}"
        )
        raise SimulationError(needed, f"{index} at {where}", "check the indices before the launch")
    row = index + bound if index < 0 else index
    return row * instruction.int_attr("pitch")


def _element_numbers(region: Region, start: int) -> Values:
    """Return the numbers of the elements a region covers in its tensor, shaped by its sizes."""
    elements = np.full(region.sizes, start, np.int64)
    for axis, (size, stride) in enumerate(zip(region.sizes, region.strides, strict=True)):
        shape = [1] * len(region.sizes)
        shape[axis] = size
        elements += (np.arange(size) * stride).reshape(shape)
    return elements


def _fixpipe(core: _Core, instruction: Instruction, env: Mapping[str, int]) -> None:
    """Copy sums out of L0C: scale, then ReLU, then one cast to the format of the destination."""
    values = core.view(instruction.srcs[0], env).astype(np.float64)
    scale: Any = instruction.attr("scale", 1.0)
    values = values * scale
    if instruction.int_attr("relu"):
        values = np.maximum(values, 0.0)
    store(core.view(instruction.out, env), values)


def _vdeq(core: _Core, instruction: Instruction, env: Mapping[str, int]) -> None:
    """Dequantise: (sums + bias) * scale, then ReLU; an int8 result is rounded, then offset added.

    Sums and bias are integers; scaling is in fp32.
    """
    sums, scale, *bias = (core.view(region, env) for region in instruction.srcs)
    blocks, _, halves, lanes = sums.shape
    per_column = (blocks, 1, halves, lanes)  # a value per column, the same for all rows
    if bias:
        sums = sums + bias[0].reshape(per_column)
    values = sums.astype(np.float32) * scale.reshape(per_column)
    if instruction.int_attr("relu"):
        values = np.maximum(values, np.float32(0))
    dst = core.view(instruction.out, env)
    is_integer = dst.dtype.kind == "i"
    store(dst, np.rint(values) + instruction.int_attr("offset") if is_integer else values)


def _mmad(core: _Core, instruction: Instruction, env: Mapping[str, int]) -> None:
    """Multiply a (m1, k1, m0, k0) by b (k1, n1, n0, k0) into c (n1, m1, m0, n0), all fractals."""
    a, b = (core.view(r, env) for r in instruction.srcs[:2])
    wide = np.int32 if a.dtype.kind == "i" else np.float32
    m1, k1, m0, k0 = a.shape
    n1 = b.shape[1]
    n0 = b.shape[2]
    # One product per block of m0 rows: BLAS does not divide products as small as these among
    # threads, which would wait for each other longer than they work.
    a_rows = a.transpose(0, 2, 1, 3).astype(wide, order="C").reshape(m1, m0, k1 * k0)
    b_matrix = b.transpose(0, 3, 1, 2).astype(wide, order="C").reshape(k1 * k0, n1 * n0)
    tile = np.matmul(a_rows, b_matrix).reshape(m1, m0, n1, n0).transpose(2, 0, 1, 3)
    c = core.view(instruction.out, env)
    if instruction.attr_at("accumulate", env):
        np.add(c, tile, out=c)
        return
    if len(instruction.srcs) > 2:
        bias = core.view(instruction.srcs[2], env).reshape(n1, 1, 1, n0)
        tile = tile + bias.astype(wide)
    store(c, tile)


def _load3d(core: _Core, instruction: Instruction, env: Mapping[str, int]) -> None:
    """Write the im2col matrix of an image in L1 (5HD): a row per output, a column block per tap."""
    image = core.view(instruction.srcs[0], env)
    c1, height, width, c0 = image.shape
    dst = core.view(instruction.out, env)
    m1, k1, m0, lanes = dst.shape
    taps_per_block = lanes // c0  # an image of C0 = 4 in fp16: 4 taps fill the 16 lanes of a block
    first_output = instruction.attr_at("m_start", env)
    first_tap = instruction.attr_at("k_start", env) // c0
    settings: Any = tuple(map(instruction.attr, ("kernel", "stride", "pad", "dilation")))
    counts = (m1 * m0, k1 * taps_per_block)
    pixels, padding, beyond = _windows(
        (c1, height, width), (first_output, first_tap), counts, settings
    )
    tile = image.reshape(-1, c0).take(pixels, axis=0)
    tile[padding] = instruction.int_attr("pad_value")
    tile[beyond] = 0
    store(dst, tile.reshape(m1, m0, k1, lanes).transpose(0, 2, 1, 3))


@lru_cache(4096)
def _windows(
    image: tuple[int, int, int],
    starts: tuple[int, int],
    counts: tuple[int, int],
    settings: tuple[tuple[int, ...], ...],
) -> tuple[Values, Any, Any]:
    """Return the pixel that each (output, tap) reads, which read padding, and which do not exist.

    The pixels of all channel blocks are numbered consecutively. The last two results are indices
    into the (output, tap) array: those that read padding around the image, and outputs or taps
    beyond the last one, which only fill up fractals. `image` is (blocks, rows, columns); `starts`
    are the first output and tap, `counts` their numbers; `settings` are kernel, stride, padding and
    dilation.
    """
    (kh, kw), (sh, sw), (top, bottom, left_pad, right_pad), (dh, dw) = settings
    c1, height, width = image
    out_h = (height + top + bottom - dh * (kh - 1) - 1) // sh + 1
    out_w = (width + left_pad + right_pad - dw * (kw - 1) - 1) // sw + 1
    m = (starts[0] + np.arange(counts[0]))[:, None]
    k = (starts[1] + np.arange(counts[1]))[None, :]
    beyond = (m >= out_h * out_w) | (k >= c1 * kh * kw)
    # Output m is at (m // out_w, m % out_w). Tap k = 14 of a 3 x 3 kernel is in channel block 1 (of
    # 9 taps each), kernel row 1, kernel column 2.
    rows = m // out_w * sh + k // kw % kh * dh - top
    columns = m % out_w * sw + k % kw * dw - left_pad
    padding = (rows < 0) | (rows >= height) | (columns < 0) | (columns >= width)
    pixels = (k // (kh * kw) * height + rows) * width + columns
    return np.where(beyond | padding, 0, pixels), np.nonzero(padding), np.nonzero(beyond)


def _scalar(core: _Core, instruction: Instruction, env: Mapping[str, int]) -> None:
    """Copy one element, if the instruction has regions; other scalar work has no values."""
    if instruction.dst is not None and instruction.srcs:
        _copy(core, instruction, env)


def _vector(core: _Core, instruction: Instruction, env: Mapping[str, int]) -> None:
    sources = [core.view(r, env) for r in instruction.srcs]
    run_vector(instruction, core.view(instruction.out, env), sources)


_ACTIONS: Mapping[str, Callable[[_Core, Instruction, Mapping[str, int]], None]] = {
    **dict.fromkeys((*FLAGS, *CROSS, "barrier"), _nothing),
    **dict.fromkeys(("data_copy", "load2d"), _copy),
    "load3d": _load3d,
    "fixpipe": _fixpipe,
    "mmad": _mmad,
    "vdeq": _vdeq,
    "scalar": _scalar,
}


# -- the vector unit -------------------------------------------------------------------------------
ELEMENTWISE: Mapping[str, Callable[..., Values]] = {
    "vadd": np.add,
    "vsub": np.subtract,
    "vmul": np.multiply,
    "vdiv": np.divide,
    "vadds": np.add,
    "vmuls": np.multiply,
    "vmaxs": np.maximum,
    "vmins": np.minimum,
    "vmax": np.maximum,
    "vmin": np.minimum,
    "vabs": np.abs,
    "vexp": np.exp,
    "vln": np.log,
    "vsqrt": np.sqrt,
    "vrelu": lambda x: np.maximum(x, x.dtype.type(0)),
    "vrsqrt": lambda x: 1.0 / np.sqrt(x),
    "vrec": lambda x: 1.0 / x,
    "vconv": lambda x: x,
    "vcopy": lambda x: x,
    "vand": np.bitwise_and,
    "vor": np.bitwise_or,
    "vnot": np.bitwise_not,
}
COMPARE: Mapping[str, Callable[..., Values]] = {
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
ROUND: Mapping[str, Callable[..., Values]] = {"floor": np.floor, "ceil": np.ceil, "trunc": np.trunc}
_REDUCE: Mapping[str, Any] = {
    "vcadd": np.add,
    "vcgadd": np.add,
    "vcmax": np.maximum,
    "vcgmax": np.maximum,
    "vcmin": np.minimum,
}


def store(dst: Values, values: Values, mask: Values | None = None) -> None:
    """Write with the hardware's cast: round to nearest even, saturate integers."""
    if dst.dtype.kind in "iu" and values.dtype != dst.dtype:
        info = np.iinfo(dst.dtype)
        rounded = np.nan_to_num(np.rint(values.astype(np.float64)))
        values = np.clip(rounded, info.min, info.max)
    np.copyto(dst, values.astype(dst.dtype, copy=False), where=True if mask is None else mask)


def run_vector(instruction: Instruction, dst: Values, srcs: Sequence[Values]) -> None:
    """Execute one vector instruction: read the views `srcs`, write the view `dst`.

    Sums and functions are computed in fp32 (integers: exactly) and cast once, at the end.
    """
    op = instruction.op
    if op in WHOLE_BLOCKS:
        # vtranspose swaps the axes of 16 x 16 blocks; vbrcb fills a block with each element.
        blocks = srcs[0].swapaxes(-1, -2) if op == "vtranspose" else srcs[0][:, None]
        store(dst, np.broadcast_to(blocks, dst.shape))
        return
    if op in REDUCING:
        _reduce(op, dst, srcs[0], _mask(instruction, srcs[0]))
        return
    mask = _mask(instruction, dst).reshape((1, *dst.shape[1:]))
    shaped = [s.reshape(dst.shape) for s in srcs]
    if op == "vdup":
        store(dst, np.full(dst.shape, instruction.attr("scalar"), np.float64), mask)
    elif op == "vsel":
        # With two sources the mask chooses between them; with three the first one does, where a
        # value other than 0 takes the second.
        condition, (a, b) = (mask, shaped) if len(shaped) == 2 else (shaped[0] != 0, shaped[1:])
        store(dst, np.where(condition, a, b))
    else:
        store(dst, _elementwise(instruction, shaped), mask)


def _mask(instruction: Instruction, main: Values) -> Values:
    """Return which lanes of a repeat take part: those whose mask bit is 1, by default all."""
    bits = instruction.attr("mask", -1)
    assert isinstance(bits, int)
    return _lanes(bits, main.size // main.shape[0])


@lru_cache(4096)
def _lanes(bits: int, count: int) -> Values:
    """Return the lowest `count` bits of a mask as truth values: 0b101 of 4 is 1, 0, 1, 0."""
    return np.array([bits >> i & 1 for i in range(count)], bool)


def _elementwise(instruction: Instruction, srcs: list[Values]) -> Values:
    """Return the result of an element-wise instruction, in the format of its first source."""
    op = instruction.op
    dtype = srcs[0].dtype
    if op in ("vand", "vor", "vnot"):  # on the bits, whatever the format
        bits = np.dtype(f"u{dtype.itemsize}")
        return ELEMENTWISE[op](*(s.astype(dtype).view(bits) for s in srcs)).view(dtype)
    if op == "vcopy":
        return srcs[0]
    if op == "vconv":
        rounding = str(instruction.attr("round", "rint"))
        return ROUND[rounding](srcs[0].astype(np.float64)) if rounding in ROUND else srcs[0]
    if op == "vcmp":
        return COMPARE[str(instruction.attr("op"))](*srcs).astype(dtype)
    wide: Any = dtype if dtype.kind in "iu" else np.float32
    values = [s.astype(wide) for s in srcs]
    if op == "vaxpy":
        scaled = values[1] * np.asarray(instruction.attr("scalar"), dtype).astype(wide)
        total: np.ndarray = (values[0] + scaled).astype(dtype)
        return total
    if op in WITH_SCALAR:
        values.append(np.asarray(instruction.attr("scalar"), dtype).astype(wide))
    result: Values = ELEMENTWISE[op](*values).astype(dtype)
    return result


def _reduce(op: str, dst: Values, src: Values, mask: Values) -> None:
    """Reduce each repeat, or each 32-byte block (vcg...): in fp32 or int64, then one cast."""
    wide: Any = np.int64 if src.dtype.kind in "iu" else np.float32
    low = -np.inf
    high = np.inf
    if wide is np.int64:
        low = np.iinfo(src.dtype).min
        high = np.iinfo(src.dtype).max
    # Inactive lanes get the neutral element: 0 for a sum, the largest number for a minimum.
    fill = {"vcadd": 0, "vcgadd": 0, "vcmin": high}.get(op, low)
    rows = np.where(mask, src.reshape(src.shape[0], -1).astype(wide), wide(fill))
    if op.startswith("vcg"):
        rows = rows.reshape(src.shape[0], -1, BLOCK_BYTES // src.dtype.itemsize)
    store(dst, _REDUCE[op].reduce(rows, axis=-1).reshape(dst.shape))
