"""Products and convolutions run on a chip against NumPy, with an epilogue or without."""

from dataclasses import replace

import numpy as np
import pytest
from dsl_oracles import BINARY, SCALAR, UNARY

from ascend_lab.lab.kernels import conv2d_reference
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import as_kernel, sanitize
from ascend_lab.machine.layout import address_map, pack
from ascend_lab.machine.sim import execute, simulate_kernel
from ascend_lab.operators.kernels import (
    conv_launch,
    gemm_launch,
    pack_conv,
    pack_gemm,
    unpack_conv,
    unpack_gemm,
)
from ascend_lab.operators.kernels.conv_windows import dense_placement
from ascend_lab.operators.ops.matmul import product_kernel

CHIPS = ("Toy", "Ascend310", "Ascend310P3", "Ascend910A", "Ascend910B2")
TYPES = {"fp16": np.float16, "fp32": np.float32, "int32": np.int32, "int8": np.int8}
FORMATS = {kind: name for name, kind in TYPES.items()}
SELECT = {"vsel": lambda mask, x, y: np.where(mask != 0, x, y)}
FUNCTIONS = BINARY | SCALAR | UNARY | SELECT


def on(*names):
    """Return the chips as cases: a coupled and a split one by default, all with `-m full`."""
    return [pytest.param(n, marks=() if "910" in n else pytest.mark.full) for n in names]


def few_cores(name):
    """Return a chip with four cores at most, which have more tiles each and take less time."""
    chip = load_chip(name)
    return replace(chip, core_count=min(chip.core_count, 4))


def numbers(rng, size, dtype):
    """Random numbers whose products and sums are exact: small wholes, or eighths of them."""
    return (rng.integers(-16, 17, size) / (1 if dtype.startswith("int") else 8)).astype(
        TYPES[dtype]
    )


def bytes_or_numbers(rng, size, dtype):
    """Random operands: any bytes, or exact numbers."""
    if dtype == "int8":
        return rng.integers(-128, 128, size).astype(np.int8)
    return numbers(rng, size, dtype)


def operands_of(epilogue, rng, channels, tile):
    """Random numbers for what the steps read."""
    return {
        o.name: numbers(rng, channels if o.kind == "channel" else tile, o.dtype)
        for o in (epilogue.operands if epilogue else ())
    }


def conv_operands(shape, seed=0, draw=bytes_or_numbers):
    """Random x and weights of a convolution."""
    rng = np.random.default_rng(seed)
    weight = (shape.k, shape.c // shape.groups, shape.r, shape.s)
    return [draw(rng, s, shape.dtype) for s in ((shape.n, shape.c, shape.h, shape.w), weight)]


def conv_sums(shape, x, weight):
    """The convolution in NumPy, exactly."""
    return conv2d_reference(x, weight, shape.strides, shape.pads, shape.dilations, shape.groups)


def pack_pixels(shape, values, *, dense=False):
    """Lay values (n, k, oh, ow) out as the convolution's output: a tile operand."""
    if dense:
        return pack(address_map("NC1HWC0", values.shape, FORMATS[values.dtype.type], c0=16), values)
    rows = values.reshape(shape.n, shape.k, -1).transpose(0, 2, 1)
    return pack_rows(np.ascontiguousarray(rows))


def pack_rows(values):
    """Lay matrices (.., m, n) out as a product's output C: a tile operand."""
    layout = address_map("FRACTAL_NZ", values.shape, FORMATS[values.dtype.type], c0=16)
    return pack(layout, values)


def pack_channels(values):
    """Lay a number per output channel out as (n1, 16), zeros behind the last."""
    return np.pad(values, (0, -len(values) % 16)).reshape(-1, 16)


def values(epilogue, sums, operands):
    """Do the steps in NumPy: compute in fp32 (whole numbers: exactly), round once a step."""
    made = {"sums": sums, **operands}
    with np.errstate(all="ignore"):
        for index, step in enumerate(epilogue.steps):
            sources = [made[s] for s in step.sources]
            if step.op == "vconv":
                made[index] = sources[0].astype(TYPES[step.dtype])
                continue
            kind = sources[0].dtype
            wide = [s.astype(np.float32 if kind.kind == "f" else kind) for s in sources]
            if step.number is not None:
                wide.append(np.asarray(step.number, kind).astype(wide[0].dtype))
            made[index] = FUNCTIONS[step.op](*wide).astype(kind)
    return made[len(epilogue.steps) - 1]


def run_checked(kernel, tensors, chip, *, seed=0, filled=None):
    """Execute a kernel; there is no race, and both engines give it the same cycles."""
    kernel = as_kernel(kernel)
    assert sanitize(kernel, chip, filled=filled) == []
    fast, slow = (simulate_kernel(kernel, chip, engine=e).cycles for e in ("fast", "reference"))
    assert fast == slow > 0
    return execute(kernel, tensors, chip, seed=seed)


def _finished(epilogue, dtype, sums, extra, got):
    """Compare with the sums, after the epilogue if there is one."""
    wanted = sums.astype(got.dtype)
    if epilogue:
        narrow = sums.astype(np.int32 if dtype == "int8" else np.float32)
        wanted = values(epilogue, narrow, extra)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)


def assert_conv(shape, chip, schedule=None, epilogue=None, *, dense=None, seed=0):
    """Run a convolution, compare it with NumPy; return the launch."""
    dense = bool(epilogue) if dense is None else dense
    x, weight = conv_operands(shape, seed, numbers if epilogue else bytes_or_numbers)
    tile = (shape.n, shape.k, *shape.out_hw)
    extra = operands_of(epilogue, np.random.default_rng(seed + 1), shape.k, tile)
    place = dense_placement(shape) if dense else None
    launch = conv_launch(shape, chip, schedule, place, epilogue)
    tensors = pack_conv(shape, x, weight)
    for name, array in extra.items():
        one = array.ndim == 1
        tensors[name] = pack_channels(array) if one else pack_pixels(shape, array, dense=dense)
    got = unpack_conv(shape, run_checked(launch, tensors, chip, seed=seed), dense=dense)
    wide = {n: v[:, None, None] if v.ndim == 1 else v for n, v in extra.items()}
    _finished(epilogue, shape.dtype, conv_sums(shape, x, weight), wide, got)
    return launch


def assert_gemm(shape, chip, schedule=None, epilogue=None, *, seed=0):
    """Run a product, compare it with NumPy; return the launch, or its phases."""
    rng = np.random.default_rng(seed)
    draw = numbers if epilogue else bytes_or_numbers
    a, b = (draw(rng, s, shape.dtype) for s in ((shape.m, shape.k), (shape.k, shape.n)))
    extra = operands_of(epilogue, rng, shape.n, (shape.m, shape.n))
    phased = schedule is not None and schedule.split_k > 1
    launch = (product_kernel if phased else gemm_launch)(shape, chip, schedule, epilogue)
    tensors = pack_gemm(shape, a, b)
    for name, array in extra.items():
        tensors[name] = pack_channels(array) if array.ndim == 1 else pack_rows(array)
    got = unpack_gemm(shape, run_checked(launch, tensors, chip, seed=seed))
    wide = np.int64 if shape.dtype == "int8" else np.float64
    _finished(epilogue, shape.dtype, a.astype(wide) @ b.astype(wide), extra, got)
    return launch
