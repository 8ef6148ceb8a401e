"""What a program computes: NumPy values in the hardware's number formats.

On-chip memory is one byte array per space, poisoned at the start (NaN in fp16 and fp32), so a
wrong address or a missing copy gives a wrong answer instead of a lucky one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ascend_lab.chip import Chip
from ascend_lab.errors import InputError, SimulationError
from ascend_lab.isa.legality import check_program
from ascend_lab.isa.memory import Affine, Buffer, Region
from ascend_lab.isa.program import Instruction, Launch, Program, as_launch
from ascend_lab.isa.rules import check_instruction
from ascend_lab.isa.walk import first, interleave

Values = NDArray[Any]
NUMPY_TYPES: Mapping[str, Any] = {
    "fp16": np.float16,
    "fp32": np.float32,
    "int8": np.int8,
    "uint8": np.uint8,
    "int32": np.int32,
}
POISON = 0xFF
MAX_EVENTS = 2_000_000


class _Core:
    """Memory of one core: GM tensors shared with the others, on-chip spaces of its own."""

    def __init__(self, chip: Chip, tensors: dict[str, Values]) -> None:
        self.tensors = tensors
        self.spaces = {
            name: np.full(size, POISON, np.uint8) for name, size in chip.buffers.items()
        }

    def view(self, region: Region, env: Mapping[str, int]) -> Values:
        """Return a NumPy view of the region's elements, shaped by its sizes."""
        buffer = region.buffer
        start = region.offset.at(env)
        if buffer.space == "GM":
            flat = self.tensors[buffer.name]
        else:
            low = buffer.address + (region.slot.at(env) % buffer.slots) * buffer.slot_bytes
            high = low + buffer.elements * buffer.itemsize
            flat = self.spaces[buffer.space][low:high].view(NUMPY_TYPES[buffer.dtype])
        item = buffer.itemsize
        strides = tuple(s * item for s in region.strides)
        return as_strided(flat[start:], region.sizes, strides)


def execute(
    program: Program | Launch,
    tensors: Mapping[str, Values],
    chip: Chip,
    *,
    seed: int | None = None,
) -> dict[str, Values]:
    """Run a program on arrays and return every GM tensor after it, by name.

    `tensors` gives the GM tensors the program reads (any shape, C order, right element count);
    tensors that are missing start poisoned. With `seed`, pipes advance in a random order that the
    flags still allow: a program free of races gives the same values for every seed. Raises
    `InputError` for wrong tensors, `SyncError` on deadlock.
    """
    launch = as_launch(program)
    events = sum(p.program.event_count * p.core_count for p in launch.parts)
    if events > MAX_EVENTS:
        raise SimulationError(
            f"at most {MAX_EVENTS} instructions to execute", str(events), "use a smaller shape"
        )
    memory = {b.name: _tensor(b, tensors) for b in launch.tensors}
    for name in tensors:
        if name not in memory:
            raise InputError("a tensor of the program", name, f"it has {', '.join(memory)}")
    for part in launch.parts:
        for instruction, _ in part.program.instructions():
            check_instruction(chip, instruction)
        check_program(chip, part.program)
    rng = random.Random(seed)
    pick = first if seed is None else rng.choice
    for part in launch.parts:
        for binding in part.bindings:
            core = _Core(chip, memory)
            for instruction, env in interleave(part.program, dict(binding), pick):
                action = _ACTIONS.get(instruction.op, _vector)
                action(core, instruction, env)
    shapes = {name: np.shape(value) for name, value in tensors.items()}
    return {n: v.reshape(shapes[n]) if n in shapes else v for n, v in memory.items()}


def _tensor(buffer: Buffer, tensors: Mapping[str, Values]) -> Values:
    dtype = NUMPY_TYPES[buffer.dtype]
    if buffer.name not in tensors:
        return np.full(buffer.elements * buffer.itemsize, POISON, np.uint8).view(dtype)
    given = np.ascontiguousarray(tensors[buffer.name])
    if given.size != buffer.elements or given.dtype != dtype:
        raise InputError(
            f"tensor {buffer.name}: {buffer.elements} elements of {buffer.dtype}",
            f"{given.size} of {given.dtype}",
            "check shape and format",
        )
    return given.reshape(-1).copy()


def _nothing(core: _Core, instruction: Instruction, env: Mapping[str, int]) -> None:
    """Flags and barriers have no values."""


def _copy(core: _Core, instruction: Instruction, env: Mapping[str, int]) -> None:
    assert instruction.dst is not None
    dst, src = core.view(instruction.dst, env), core.view(instruction.srcs[0], env)
    _store(dst, src)


def _store(dst: Values, values: Values, mask: Values | None = None) -> None:
    """Write with the hardware's cast: round to nearest even, saturate integers."""
    if dst.dtype.kind in "iu" and values.dtype.kind == "f":
        info = np.iinfo(dst.dtype)
        rounded = np.nan_to_num(np.rint(values.astype(np.float64)))
        values = np.clip(rounded, info.min, info.max)
    with np.errstate(over="ignore", invalid="ignore"):
        if mask is None:
            dst[...] = values.astype(dst.dtype, copy=values.dtype == dst.dtype)
        else:
            dst[...] = np.where(mask, values.astype(dst.dtype), dst)


def _fixpipe(core: _Core, instruction: Instruction, env: Mapping[str, int]) -> None:
    assert instruction.dst is not None
    values = core.view(instruction.srcs[0], env).astype(np.float64)
    scale = instruction.attr("scale", 1.0)
    assert isinstance(scale, int | float)
    values = values * scale
    if instruction.number("relu"):
        values = np.maximum(values, 0.0)
    _store(core.view(instruction.dst, env), values)


def _mmad(core: _Core, instruction: Instruction, env: Mapping[str, int]) -> None:
    assert instruction.dst is not None
    a, b = (core.view(r, env) for r in instruction.srcs[:2])
    wide = np.int32 if a.dtype.kind == "i" else np.float32
    m1, k1, m0, k0 = a.shape
    n1, n0 = b.shape[1], b.shape[2]
    left = a.transpose(0, 2, 1, 3).reshape(m1 * m0, k1 * k0).astype(wide)
    right = b.transpose(0, 3, 1, 2).reshape(k1 * k0, n1 * n0).astype(wide)
    with np.errstate(over="ignore", invalid="ignore"):
        product = left @ right
    tile = product.reshape(m1, m0, n1, n0).transpose(2, 0, 1, 3)
    c = core.view(instruction.dst, env)
    accumulate = instruction.attr("accumulate")
    adds = accumulate.at(env) if isinstance(accumulate, Affine) else accumulate
    if adds:
        tile = tile + c
    elif len(instruction.srcs) > 2:
        bias = core.view(instruction.srcs[2], env).reshape(n1, 1, 1, n0)
        tile = tile + bias.astype(wide)
    _store(c, tile)


def _load3d(core: _Core, instruction: Instruction, env: Mapping[str, int]) -> None:
    assert instruction.dst is not None
    image = core.view(instruction.srcs[0], env)
    c1, height, width, c0 = image.shape
    (kh, kw), (sh, sw), (top, bottom, left, right), (dh, dw) = (
        _ints(instruction, name) for name in ("kernel", "stride", "pad", "dilation")
    )
    out_h = (height + top + bottom - dh * (kh - 1) - 1) // sh + 1
    out_w = (width + left + right - dw * (kw - 1) - 1) // sw + 1
    padded = np.zeros((c1, height + top + bottom, width + left + right, c0), image.dtype)
    padded[:, top : top + height, left : left + width] = image
    dst = core.view(instruction.dst, env)
    m1, k1, m0, _ = dst.shape
    m = _start(instruction, "m_start", env) + np.arange(m1 * m0)
    k = _start(instruction, "k_start", env) // c0 + np.arange(k1)
    valid_m, valid_k = m < out_h * out_w, k < c1 * kh * kw
    m, k = np.where(valid_m, m, 0), np.where(valid_k, k, 0)
    rows = (m // out_w * sh)[:, None] + (k // kw % kh * dh)[None, :]
    columns = (m % out_w * sw)[:, None] + (k % kw * dw)[None, :]
    tile = padded[(k // (kh * kw))[None, :], rows, columns]
    tile[~(valid_m[:, None] & valid_k[None, :])] = 0
    _store(dst, tile.reshape(m1, m0, k1, c0).transpose(0, 2, 1, 3))


def _ints(instruction: Instruction, name: str) -> tuple[int, ...]:
    value = instruction.attr(name)
    assert isinstance(value, tuple)
    return value


def _start(instruction: Instruction, name: str, env: Mapping[str, int]) -> int:
    value = instruction.attr(name)
    return value.at(env) if isinstance(value, Affine) else int(value)  # type: ignore[arg-type]


def _scalar(core: _Core, instruction: Instruction, env: Mapping[str, int]) -> None:
    if instruction.dst is not None and instruction.srcs:
        _store(core.view(instruction.dst, env), core.view(instruction.srcs[0], env))


_ELEMENTWISE: Mapping[str, Callable[..., Values]] = {
    "vadd": np.add,
    "vsub": np.subtract,
    "vmul": np.multiply,
    "vdiv": np.divide,
    "vmax": np.maximum,
    "vmin": np.minimum,
    "vabs": np.abs,
    "vrelu": lambda x: np.maximum(x, x.dtype.type(0)),
    "vexp": np.exp,
    "vln": np.log,
    "vsqrt": np.sqrt,
    "vrsqrt": lambda x: 1.0 / np.sqrt(x),
    "vrec": lambda x: 1.0 / x,
    "vconv": lambda x: x,
    "vcopy": lambda x: x,
    "vadds": np.add,
    "vmuls": np.multiply,
    "vmaxs": np.maximum,
    "vmins": np.minimum,
    "vand": np.bitwise_and,
    "vor": np.bitwise_or,
    "vnot": np.bitwise_not,
}
_REDUCE: Mapping[str, Any] = {
    "vcadd": np.add,
    "vcgadd": np.add,
    "vcmax": np.maximum,
    "vcgmax": np.maximum,
    "vcmin": np.minimum,
}


def _vector(core: _Core, instruction: Instruction, env: Mapping[str, int]) -> None:
    assert instruction.dst is not None
    dst = core.view(instruction.dst, env)
    srcs = [core.view(r, env) for r in instruction.srcs]
    op = instruction.op
    lanes = (srcs[0] if srcs else dst).reshape(dst.shape[0], -1).shape[1]
    mask_bits = instruction.attr("mask", -1)
    assert isinstance(mask_bits, int)
    mask = np.array([mask_bits >> i & 1 for i in range(lanes)], bool)
    with np.errstate(all="ignore"):
        if op in _REDUCE:
            _reduce(op, dst, srcs[0], mask)
            return
        if op == "vdup":
            result = np.full(dst.shape, instruction.attr("scalar"), dst.dtype)
        elif op == "vsel":
            result = np.where(mask.reshape((1, *dst.shape[1:])), *(s.reshape(dst.shape) for s in srcs))
            mask = np.ones(lanes, bool)
        else:
            result = _elementwise(instruction, srcs).reshape(dst.shape)
    full = None if mask.all() else mask.reshape((1, *dst.shape[1:]))
    _store(dst, result, full)


def _elementwise(instruction: Instruction, srcs: list[Values]) -> Values:
    op = instruction.op
    kind = srcs[0].dtype
    if op in ("vand", "vor", "vnot"):
        bits = np.uint16 if kind.itemsize == 2 else np.uint32
        return _ELEMENTWISE[op](*(s.astype(kind).view(bits) for s in srcs)).view(kind)
    if op in ("vconv", "vcopy"):
        return srcs[0]
    wide = np.float32 if kind.kind == "f" else kind
    values = [s.astype(wide) for s in srcs]
    scalar = instruction.attr("scalar", 0.0)
    if op in ("vadds", "vmuls", "vmaxs", "vmins"):
        values.append(np.asarray(scalar, kind).astype(wide))
    result: Values = _ELEMENTWISE[op](*values).astype(kind)
    return result


def _reduce(op: str, dst: Values, src: Values, mask: Values) -> None:
    fill = {"vcadd": 0, "vcgadd": 0, "vcmin": np.inf}.get(op, -np.inf)
    rows = np.where(mask, src.reshape(src.shape[0], -1).astype(np.float32), np.float32(fill))
    if op.startswith("vcg"):
        rows = rows.reshape(src.shape[0], -1, 32 // src.dtype.itemsize)
    result = _REDUCE[op].reduce(rows, axis=-1)
    _store(dst, result.reshape(dst.shape))


_ACTIONS: Mapping[str, Callable[[_Core, Instruction, Mapping[str, int]], None]] = {
    "set_flag": _nothing,
    "wait_flag": _nothing,
    "barrier": _nothing,
    "data_copy": _copy,
    "load2d": _copy,
    "load3d": _load3d,
    "fixpipe": _fixpipe,
    "mmad": _mmad,
    "scalar": _scalar,
}
