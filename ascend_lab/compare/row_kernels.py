"""Builds kernels of norms and quantisation with the structure of the vendor's, for 910B and 910C.

The rules are those of hicann/ops-nn @e5c3fa93 (op_host: tilings, op_kernel: kernels for arch22),
in this package's terms:

    operator                     rows at once              how
    rms_norm                     one                       one buffer, a scalar for 1 / rms
      up to 2000 columns         what UB holds             sums of all rows, no scalar
    dynamic_quant                what UB holds             two buffers, then row after row
      length a multiple of 8     what UB holds             one buffer, all rows at once
    add_rms_norm_dynamic_quant   up to 16                  two scalars a row
    dequant_swiglu_quant         what UB holds, or one     ReduceMax and a scalar a row

The library has more kernels for these operators: for rows that UB cannot hold, for few rows, with
offsets or groups. They are not written here, and such a row is timed by our own kernel.

These times leave out some microseconds for which the vendor gives no figure: 48 cores fetch their
code and the tiling from memory, one after another where the address is the same.
Source: Ascend C developer documentation, best practices 10_0018 (tiling data) and hardware
constraints 10_00048 (instruction cache).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ascend_lab.compare.row_writer import Rows, RowWriter, TileWriter, aligned, row_launch
from ascend_lab.compare.rows import Work
from ascend_lab.compare.unaligned import ARCH22_FAMILIES
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import Affine, Launch, ceil_div

HALF = ("fp16", "bf16")
RESERVED_BYTES = 1024
"""Bytes of UB that the tilings of RmsNorm and DynamicQuant do not use."""


def row_kernel(work: Work, chip: Chip) -> Launch | None:
    """Return the vendor's kernel for a row's work, or None if it is not written here."""
    if work.operator not in KERNELS or not chip.family.startswith(ARCH22_FAMILIES):
        return None
    if work.l2 == "warm" or work.kernels or "cores" in work.attributes:
        # such rows were not measured on this kernel alone
        return None  # operands in L2, a sum of several kernels, or a part of the chip
    x_shape = work.shapes[0]
    rows = Rows(math.prod(x_shape[:-1]), x_shape[-1], work.dtypes[0])
    return KERNELS[work.operator](work, rows, chip)


# -- RmsNorm ---------------------------------------------------------------------------------------
MERGED_COLUMNS = 2000
"""Rows of up to this many numbers are worked on many at a time."""
LONGEST_NORM = {"fp16": 12288, "bf16": 12288, "fp32": 10240}
"""By format, most numbers of a row that these kernels take; the library cuts longer rows."""
FEW_ROWS = 512
FEW_PLANES = 8
"""Limits of the first and the second axis of a decoding batch, for which the library has a kernel
of its own.
"""


def rms_norm(work: Work, rows: Rows, chip: Chip) -> Launch | None:
    """Return RmsNorm of rows as long as gamma: many at once if they are short.

    Source: norm/rms_norm, rms_norm_tiling.cpp, rms_norm.h and rms_norm_merge_n.h.
    """
    x, gamma = work.shapes
    dtype = rows.dtype
    columns = math.prod(gamma)
    normalised_rows = Rows(math.prod(x) // columns, columns, dtype)
    pitch = aligned(columns, dtype)
    cores = chip.cores_of("vector")
    if len(set(work.dtypes)) > 1 or pitch > LONGEST_NORM[dtype]:
        return None  # gamma in fp32 with x in 16 bits, or rows that are cut
    # Long rows go one at a time: their sum is folded within the row. Short ones go many at a time,
    # as a repeat of each row is added at once.
    if pitch > MERGED_COLUMNS:
        return row_launch("rms_norm", chip, normalised_rows, 1, _norm_of_one, cores)
    if dtype in HALF and len(gamma) == 1 and _is_few(x):
        return None
    # bytes of UB for a row, as the source's tiling counts them
    row_bytes = pitch * 16 + 260
    rows_at_once = (chip.buffers["UB"] - RESERVED_BYTES) // row_bytes
    return row_launch("rms_norm_merged", chip, normalised_rows, rows_at_once, _norm_of_many, cores)


def _is_few(shape: Sequence[int]) -> bool:
    """Tell whether a decoding batch has a kernel of its own: few rows in two or three axes."""
    few = shape[0] <= FEW_ROWS
    return few and (len(shape) == 2 or (len(shape) == 3 and shape[1] <= FEW_PLANES))


def _norm_of_one(w: RowWriter, rows_at_once: int) -> TileWriter:
    """Declare the tensors of RmsNorm; a tile is one row."""
    columns = w.rows.columns
    dtype = w.rows.dtype
    x = w.source("x", rows_at_once)
    y = w.result("y", columns, dtype, rows_at_once)
    w.constants("gamma", columns, dtype)

    def tile(row: Affine, count: int) -> None:
        x.load(row, count)
        if dtype in HALF:
            w.vectors("vconv", columns)
            x.free()  # the row lives on in fp32
        w.vectors("vmul", columns)
        w.halving_sum(columns)
        w.by_scalar(6)  # read, times 1 / columns, plus epsilon, root, divide, store
        w.vectors("vmuls", columns)
        if dtype not in HALF:
            x.free()
        y.alloc()
        if dtype in HALF:
            w.vectors("vconv vmul vconv", columns)  # gamma anew for each row, times it, back
        else:
            w.vectors("vmul", columns)
        y.store(row, count)

    return tile


def _norm_of_many(w: RowWriter, rows_at_once: int) -> TileWriter:
    """Declare the tensors of RmsNorm; each instruction works on all rows of a tile."""
    columns = w.rows.columns
    dtype = w.rows.dtype
    pitch = aligned(columns, dtype)
    x = w.source("x", rows_at_once)
    y = w.result("y", columns, dtype, rows_at_once)
    rstd = w.numbers("rstd", rows_at_once)
    w.constants("gamma", columns, dtype)
    if dtype in HALF:
        w.vectors("vconv", columns)
    w.vectors("vcopy", rows_at_once * pitch)  # a copy of gamma for each row

    def tile(row: Affine, count: int) -> None:
        elements = count * pitch
        x.load(row, count)
        if dtype in HALF:
            w.vectors("vconv", elements)
            x.free()
        w.vectors("vmul", elements)
        rstd.alloc()
        # sums start at 0, a repeat of lanes for each row
        w.vectors("vdup", count * w.lanes)
        for _ in range(ceil_div(columns, w.lanes)):
            w.vectors("vadd", count * w.lanes)  # a repeat of every row
        w.reduce("vcadd", count)
        w.vectors("vmuls vadds vsqrt vdup vdiv", count)
        rstd.store(row, count)
        w.to_blocks(count)
        w.vectors("vcopy vmul", elements)
        if dtype not in HALF:
            x.free()
        y.alloc()
        w.vectors("vmul", elements)
        if dtype in HALF:
            w.vectors("vconv", elements)
        y.store(row, count)

    return tile


# -- DynamicQuant ----------------------------------------------------------------------------------
SINGLE_ROWS = (4096, 5120, 10240)
"""Row lengths for which the library has a kernel of its own, with few rows."""
QUANT_BYTES = 11
"""Bytes of UB per number of a row: 2 of x, 8 of two copies in fp32, 1 of the result."""


def dynamic_quant(work: Work, rows: Rows, chip: Chip) -> Launch | None:
    """Return the symmetric DynamicQuant of rows of 16-bit floats.

    Source: quant/dynamic_quant, dynamic_quant_tiling.cpp, dynamic_quant_db.h and _multi_row.h.
    """
    columns = rows.columns
    if len(work.shapes) > 1 or rows.dtype not in HALF:
        return None
    # for these the library has a kernel of its own, which is not written here
    if columns in SINGLE_ROWS and 4 <= rows.count <= 384:
        return None
    cores = chip.cores_of("vector")
    free_bytes = chip.buffers["UB"] - RESERVED_BYTES
    # 192 KB of UB, rows of 4096 numbers of 11 bytes: 4 rows
    rows_at_once = min(255, free_bytes // (QUANT_BYTES * aligned(columns, rows.dtype)))
    # this kernel holds a whole tile in one repeat count: at most 255 x 64 numbers
    repeats = (free_bytes - 3392) // QUANT_BYTES // 64  # 3392 bytes of scales and constants
    longest = min(repeats, chip.max_repeat) * 64
    if 128 <= columns <= longest and columns % 8 == 0:
        rows_at_once = min(longest // columns, rows.count)
        cores = min(cores, rows.count // rows_at_once)  # full UBs come before more cores
        return row_launch("dynamic_quant_rows", chip, rows, rows_at_once, _quantise_many, cores)
    if not rows_at_once:
        return None
    return row_launch("dynamic_quant", chip, rows, rows_at_once, _quantise_each, cores)


def _quantise_each(w: RowWriter, rows_at_once: int) -> TileWriter:
    """Declare the tensors of DynamicQuant; the rows of a tile are quantised one after another."""
    columns = w.rows.columns
    dtype = w.rows.dtype
    x = w.source("x", rows_at_once, depth=2)
    y = w.result("y", columns, "int8", rows_at_once)
    scales = w.numbers("scale", rows_at_once)

    def tile(row: Affine, count: int) -> None:
        x.load(row, count)
        y.alloc()
        scales.alloc()
        with w.k.loop("row", count):
            if dtype == "bf16":
                w.vectors("vconv vabs", columns)
                w.folding_max(columns)
                w.wait()
            else:
                # rows of fp16 are folded as they are, rows of bf16 in fp32: the vector unit
                # has no maximum of bf16
                w.vector("vconv", columns, wait=False)
                w.vectors("vabs", columns, halves=True)
                w.folding_max(columns, halves=True)
                w.wait()
                w.vectors("vconv", 1)
            w.to_blocks(1)
            w.vectors("vdiv", 8)
            w.vectors("vmul vconv", columns)
            w.vectors("vconv", columns, halves=True)  # int16 to fp16
            w.vector("vmul", 8, reads=2, wait=False)
            w.vector("vconv", columns, halves=True, wait=False)
        x.free()
        y.store(row, count)
        scales.store(row, count)

    return tile


def _quantise_many(w: RowWriter, rows_at_once: int) -> TileWriter:
    """Declare the tensors of DynamicQuant; each instruction works on all rows of a tile."""
    columns = w.rows.columns
    x = w.source("x", rows_at_once, packed=True)
    y = w.result("y", columns, "int8", rows_at_once, pitch=columns)
    scales = w.numbers("scale", rows_at_once)

    def tile(row: Affine, count: int) -> None:
        elements = count * columns
        x.load(row, count)
        w.vectors("vconv", elements)
        x.free()
        w.vectors("vabs", elements)
        with w.k.loop("row", count):
            w.fold(columns)
        w.reduce("vcmax", count)
        w.vectors("vdiv", count)
        w.to_blocks(count)
        w.vectors("vcopy vmul vconv", elements)  # spread 127 / max, multiply, convert to int16
        w.vectors("vconv", elements, halves=True)
        y.alloc()
        scales.alloc()
        w.vector("vmul", count, reads=2, wait=False)
        w.vectors("vconv", elements, halves=True)
        scales.store(row, count)
        y.store(row, count)

    return tile


# -- AddRmsNormDynamicQuant ------------------------------------------------------------------------
MAX_ROWS = 16
"""Most rows that a core of AddRmsNormDynamicQuant holds at once."""


def add_rms_norm_dynamic_quant(work: Work, rows: Rows, chip: Chip) -> Launch | None:
    """Return the sum, its norm and its quantisation, without smoothing.

    Source: norm/add_rms_norm_dynamic_quant, arch22 tiling and _normal_kernel.h.
    """
    if len(work.shapes) != 3 or rows.dtype not in HALF:
        return None
    pitch = aligned(rows.columns, "int8")
    # both numbers of bytes as the source's tiling counts them
    constant_bytes = 3 * 2 * pitch + 768  # gamma and two optional rows of smoothing
    row_bytes = 16 * pitch + 8
    rows_at_once = (chip.buffers["UB"] - constant_bytes) // row_bytes
    if rows_at_once < 1:
        return None
    rows_at_once = min(rows_at_once, MAX_ROWS)
    cores = chip.cores_of("vector")
    return row_launch(
        "add_rms_norm_dynamic_quant", chip, rows, rows_at_once, _add_norm_quantise, cores
    )


def _add_norm_quantise(w: RowWriter, rows_at_once: int) -> TileWriter:
    """Declare the tensors of the sum, its norm and its quantisation."""
    columns = w.rows.columns
    dtype = w.rows.dtype
    pitch = aligned(columns, "int8")
    x1 = w.source("x1", rows_at_once)
    x2 = w.source("x2", rows_at_once)
    total = w.result("x", columns, dtype, rows_at_once)
    y = w.result("y", columns, "int8", rows_at_once)
    scales = w.numbers("scale", rows_at_once)
    w.constants("gamma", columns, dtype)

    def tile(row: Affine, count: int) -> None:
        elements = count * pitch
        x2.load(row, count)
        x1.load(row, count)
        w.vector("vconv", elements, wait=False)
        w.vectors("vconv vadd", elements)
        total.alloc()
        w.vectors("vconv", elements)
        total.store(row, count)
        _write_norm(w, elements, count)
        y.alloc()
        scales.alloc()
        _write_quantisation(w, elements, count)
        x1.free()  # its memory was the scratch of the quantisation
        x2.free()
        y.store(row, count)
        scales.store(row, count)

    return tile


def _write_norm(w: RowWriter, elements: int, count: int) -> None:
    """Write the instructions that normalise `count` rows and multiply each by gamma."""
    columns = w.rows.columns
    w.vectors("vmul", elements)
    with w.k.loop("norm", count):
        w.halving_sum(columns)
        w.by_scalar(6)
        w.vector("vmuls", columns, wait=False)
    w.wait()
    w.vectors("vconv", columns)  # gamma
    with w.k.loop("gamma_row", count):
        w.vectors("vmul", columns)


def _write_quantisation(w: RowWriter, elements: int, count: int) -> None:
    """Write the instructions that quantise `count` rows by scale = max |x| / 127 each."""
    columns = w.rows.columns
    with w.k.loop("copy", count):
        w.vector("vmuls", columns, wait=False)  # multiplies by 1 if there is no smoothing
    w.wait()
    w.vectors("vabs", elements)
    with w.k.loop("quantise", count):
        w.folding_max(columns)
        w.by_scalar(4)  # read, two divisions, store
        w.vector("vmuls", columns, wait=False)
    w.wait()
    w.vectors("vconv vconv", elements)  # int32, fp16
    w.vectors("vconv", elements, halves=True)


# -- DequantSwigluQuant ----------------------------------------------------------------------------
SHORT_HALF_COLUMNS = 1536
SHORT_ROWS = 128
SHORT_CORES = 12
"""With shorter halves of rows, and fewer rows, the library uses at most `SHORT_CORES` cores."""


def dequant_swiglu_quant(work: Work, rows: Rows, chip: Chip) -> Launch | None:
    """Return the dynamic quantisation of SwiGLU of 16-bit floats, or of int32 with two scales.

    Source: quant/dequant_swiglu_quant, tiling_base.cpp, dynamic_base.hpp and _performance.hpp.
    """
    half = rows.columns // 2
    is_int32 = rows.dtype == "int32"
    smoothing_inputs = len(work.shapes) - (3 if is_int32 else 1)
    if smoothing_inputs not in (0, 1) or not (is_int32 or rows.dtype in HALF):
        return None
    # bytes of UB for a number of a half row, as the source's tiling counts them
    number_bytes = 45 if is_int32 else 25
    longest = chip.buffers["UB"] // number_bytes // 32 * 32
    if half > longest:
        return None
    cores = chip.cores_of("vector")
    if half < SHORT_HALF_COLUMNS and rows.count < SHORT_ROWS:
        # a rule of the source for little work
        cores = min(cores, SHORT_CORES)
    rows_at_once = 1 if is_int32 else longest // aligned(half, "int8")
    # a rule of the source: short rows of int32 are loaded one row ahead
    ahead = is_int32 and half % 8 == 0 and half <= SHORT_HALF_COLUMNS
    start = partial(_swiglu, smooth=bool(smoothing_inputs), ahead=ahead)
    return row_launch("dequant_swiglu_quant", chip, rows, rows_at_once, start, cores)


SIGMOID = "vmuls vexp vadds vdiv"
"""The instructions of x / (1 + exp(-x))."""
SCALE = " vmul vmuls"
"""The instructions that multiply by the scale of the column, then by that of the row."""


def _swiglu(w: RowWriter, rows_at_once: int, *, smooth: bool, ahead: bool) -> TileWriter:
    """Declare the tensors; `ahead`: the next row is loaded while this one is worked on."""
    half = w.rows.columns // 2
    is_int32 = w.rows.dtype == "int32"
    pitch = aligned(half, "int8")
    gate, linear = w.halves("x", rows_at_once, pitch, depth=2 if ahead else 1)
    y = w.result("y", half, "int8", rows_at_once)
    if is_int32:
        w.constants("weight_scale", w.rows.columns, "fp32")
    if smooth:
        w.constants("smooth", half, "fp32")
    scale = SCALE if is_int32 else ""

    def tile(row: Affine, count: int) -> None:
        elements = count * pitch
        gate.load(row, count)
        linear.load(row, count)
        if is_int32 and not ahead:
            w.by_scalar(1, after="MTE2")  # the row's scale is read as a number
        w.vectors("vconv", elements)
        if not ahead:
            gate.free()
        w.vectors(f"{scale} {SIGMOID} vconv{scale}", elements)
        if not ahead:
            linear.free()
        w.vector("vmul", elements, reads=2, wait=smooth or ahead)
        if smooth:
            with w.k.loop("smoothed", count):
                w.vector("vmul", pitch, reads=2, wait=ahead)
        w.vectors("vabs", elements)
        with w.k.loop("row", count):
            w.staged_max(half)
            w.by_scalar(4, loads_wait=not ahead)
            w.vectors("vmuls", half)
        w.vectors("vconv", elements)
        w.vectors("vconv", elements, halves=True)
        y.alloc()
        w.vectors("vconv", elements, halves=True)
        if ahead:
            gate.free()
            linear.free()
        y.store(row, count)

    return tile


KERNELS: Mapping[str, Callable[[Work, Rows, Chip], Launch | None]] = {
    "rms_norm": rms_norm,
    "dynamic_quant": dynamic_quant,
    "add_rms_norm_dynamic_quant": add_rms_norm_dynamic_quant,
    "dequant_swiglu_quant": dequant_swiglu_quant,
}
"""The table's name for a kernel -> the function that builds the library's kernel."""
