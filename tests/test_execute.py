"""What programs compute: number formats, every instruction, poison, and any order of the pipes."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from message_lists import assert_messages
from strategies import kernels, launches, vector_values, without_flags

from ascend_lab.lab.kernels import im2col_reference
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import (
    Buffer,
    Event,
    Instruction,
    KernelBuilder,
    Launch,
    Loop,
    Part,
    Program,
)
from ascend_lab.machine.sim import execute, simulate
from ascend_lab.operators.kernels import (
    GemmShape,
    elementwise_launch,
    elementwise_program,
    gemm_launch,
)

TOY = load_chip("Toy")
SPLIT = load_chip("Ascend910B2")
FORMATS = {"float16": "fp16", "float32": "fp32", "int32": "int32", "int8": "int8", "uint8": "uint8"}
SEEDS = (None, 1, 2, 3, 4, 5)


def same(a, b) -> None:
    """Equal bit by bit, poison included."""
    assert a.dtype == b.dtype
    assert a.tobytes() == b.tobytes()


def run_vector(op, out, *arrays, chip=TOY, **options):
    """Run one vector instruction on (repeat, lanes) arrays; `out` is the destination before it."""
    k = KernelBuilder(op, chip)
    buffers = []
    regions = []
    tensors = {}
    for index, array in enumerate((out, *arrays)):
        dtype = FORMATS[array.dtype.name]
        pitch = max(array.shape[1], 32 // array.itemsize)
        tensor = k.tensor(f"t{index}", dtype, array.shape[0] * pitch)
        local = k.buffer(f"u{index}", "UB", dtype, array.shape[0] * pitch)
        padded = np.zeros((array.shape[0], pitch), array.dtype)
        padded[:, : array.shape[1]] = array
        tensors[tensor.name] = padded
        buffers += [tensor, local]
        k.copy(local.region(), tensor.region())
        regions.append(local.region(0, array.shape, (pitch, 1)))
    k.barrier()
    k.vector(op, *regions, **options)
    k.barrier()
    k.copy(buffers[0].region(), buffers[1].region())
    return execute(k.finish(), tensors, chip)["t0"][:, : out.shape[1]]


def numbers(dtype, shape=(3, 64), seed=0, low=-100, high=100):
    """Whole numbers, or eighths in floating point: exact in every format used here."""
    whole = np.random.default_rng(seed).integers(low, high, shape)
    return (whole / 8 if np.dtype(dtype).kind == "f" else whole).astype(dtype)


# -- any legal order of the pipes gives the same values --------------------------------------------
def tensors_of(program):
    rng = np.random.default_rng(0)
    return {
        b.name: rng.standard_normal(b.elements).astype(np.float16)
        for b in program.tensors
        if b.name in "xwab"
    }


@given(kernels(budget=25))
def test_values_do_not_depend_on_the_order_of_the_pipes(case):
    program, chip = case
    given_tensors = tensors_of(program)
    first, *others = (execute(program, given_tensors, chip, seed=seed) for seed in SEEDS)
    for other in others:
        for name, value in first.items():
            same(value, other[name])


@given(kernels(budget=40, kind="vector"), st.sampled_from(SEEDS))
def test_vector_kernels_compute_what_numpy_computes(case, seed):
    program, chip = case
    given_tensors = tensors_of(program)
    got = execute(program, given_tensors, chip, seed=seed)
    for name, expected in vector_values(case.plan, **given_tensors).items():
        same(got[name], expected)


@pytest.mark.parametrize("pair", [("MTE2", "V"), ("V", "MTE3"), ("V", "MTE2"), ("MTE3", "V")])
def test_without_its_flags_a_kernel_depends_on_the_order(pair):
    program = without_flags(elementwise_program(TOY, 8192, op="vrelu", tile=1024), *pair)
    x = np.random.default_rng(0).standard_normal(8192).astype(np.float16)
    results = {execute(program, {"x1": x}, TOY, seed=seed)["y"].tobytes() for seed in range(8)}
    assert len(results) > 1


# -- poison ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "poison"), [("fp16", np.nan), ("fp32", np.nan), ("int8", -1)])
def test_tensors_that_are_not_given_start_poisoned(dtype, poison):
    program = Program("idle", (Buffer("y", "GM", dtype, 8),), ())
    np.testing.assert_array_equal(execute(program, {}, TOY)["y"], np.full(8, poison))


def test_poison_survives_the_cube():
    """One load2d less: the product is not a number instead of almost right."""
    k = KernelBuilder("half", TOY)
    c = k.tensor("c", "fp16", 256)
    a, b = (k.buffer(n, n.upper(), "fp16", 256).region(0, (1, 1, 16, 16)) for n in ("l0a", "l0b"))
    acc = k.buffer("acc", "L0C", "fp32", 256).region(0, (1, 1, 16, 16))
    out = k.buffer("out", "UB", "fp16", 256)
    k.mmad(acc, a, b)
    k.barrier()
    k.copy(out.region(0, (1, 1, 16, 16)), acc)
    k.barrier()
    k.copy(c.region(), out.region())
    assert np.isnan(execute(k.finish(), {}, TOY)["c"]).all()


# -- vector instructions ---------------------------------------------------------------------------
@pytest.mark.parametrize(("op", "function"), [("vand", np.bitwise_and), ("vor", np.bitwise_or)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int32, np.int8])
def test_bitwise_ops_see_bits_not_numbers(op, function, dtype):
    a = numbers(dtype, seed=1)
    b = numbers(dtype, seed=2)
    bits = f"u{a.itemsize}"
    expected = function(a.view(bits), b.view(bits)).view(dtype)
    same(np.ascontiguousarray(run_vector(op, a, a, b)), expected)


def test_a_mask_leaves_the_other_lanes_alone():
    a = numbers(np.float16, seed=1)
    old = numbers(np.float16, seed=2)
    mask = 0b1011 | 1 << 63
    lanes = np.array([mask >> i & 1 for i in range(64)], bool)
    got = run_vector("vadds", old, a, scalar=1.0, mask=mask)
    np.testing.assert_array_equal(got, np.where(lanes, a + np.float16(1), old))


@pytest.mark.parametrize(
    ("dtype", "scalar", "expected"),
    [
        (np.float16, 0.1, 0.1),
        (np.int32, -7.0, -7),
        (np.int8, 300.0, 127),
        (np.float16, 1e9, np.inf),
    ],
)
def test_vdup_fills_and_casts(dtype, scalar, expected):
    got = run_vector("vdup", numbers(dtype), scalar=scalar)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, np.full((3, 64), np.asarray(expected, dtype)))


@pytest.mark.parametrize("mask", [None, 0xFFFF0])
@pytest.mark.parametrize(
    ("op", "function", "fill"),
    [("vcadd", np.sum, 0.0), ("vcmax", np.max, -np.inf), ("vcmin", np.min, np.inf)],
)
def test_reductions_fold_a_repeat(op, function, fill, mask):
    a = numbers(np.float16, seed=3)
    lanes = np.array([(mask or -1) >> i & 1 for i in range(64)], bool)
    rows = np.where(lanes, a.astype(np.float32), np.float32(fill))
    got = run_vector(op, np.zeros((3, 1), np.float16), a, mask=mask)
    np.testing.assert_array_equal(got[:, 0], function(rows, axis=1).astype(np.float16))


@pytest.mark.parametrize(("op", "function"), [("vcgadd", np.sum), ("vcgmax", np.max)])
def test_group_reductions_fold_a_block_of_32_bytes(op, function):
    a = numbers(np.float16, seed=3)
    got = run_vector(op, np.zeros((3, 4), np.float16), a)
    rows = a.astype(np.float32).reshape(3, 4, 16)
    np.testing.assert_array_equal(got, function(rows, axis=2).astype(np.float16))


@pytest.mark.parametrize(
    ("source", "values", "target", "expected"),
    [
        (np.float32, [0.5, 1.5, 2.5, -0.5, -1.5], np.int32, [0, 2, 2, 0, -2]),
        (np.float16, [127.4, 127.5, 300, -300, 2.5], np.int8, [127, 127, 127, -128, 2]),
        (np.float16, [np.nan, np.inf, -np.inf, -1, 255.5], np.uint8, [0, 255, 0, 0, 255]),
        (np.int32, [300, -300, 7, 0, 128], np.int8, [127, -128, 7, 0, 127]),
        (np.int8, [-128, 127, 0, 1, -1], np.float16, [-128, 127, 0, 1, -1]),
        (
            np.float32,
            [2049, 65504, 65520, 1e-8, -2051],
            np.float16,
            [2048, 65504, np.inf, 0, -2052],
        ),
        (np.float16, [np.nan, np.inf, 6e-8, -0.0, 1], np.float32, None),
    ],
)
def test_vconv_rounds_half_to_even_and_saturates(source, values, target, expected):
    a = np.zeros((1, 32), source)
    a[0, :5] = values
    got = run_vector("vconv", np.ones((1, 32), target), a)
    if expected is None:
        expected = a[0, :5].astype(target)
    np.testing.assert_array_equal(got[0, :5], np.asarray(expected, target))


# -- moves -----------------------------------------------------------------------------------------
def cube_program(chip, *, transpose_b=False, out="fp16", image=None, window=None, **drain):
    """C = A @ B for one fractal of B, and one of A or of the `window` of an image."""
    k = KernelBuilder("cube", chip)
    size = math.prod(image or (256,))
    a, b = (k.tensor(name, "fp16", n) for name, n in (("a", size), ("b", 256)))
    c = k.tensor("c", out, 256)
    l1a, l1b = (k.buffer(f"l1{x.name}", "L1", "fp16", x.elements) for x in (a, b))
    l0a, l0b = (k.buffer(n, n.upper(), "fp16", 256) for n in ("l0a", "l0b"))
    acc = k.buffer("acc", "L0C", "fp32", 256).region(0, (1, 1, 16, 16))
    k.copy(l1a.region(), a.region())
    k.copy(l1b.region(), b.region())
    k.barrier()
    fractal = (1, 16, 16)
    if image:
        k.load3d(l0a.region(0, acc.sizes), l1a.region(0, image), **window)
    else:
        k.load2d(l0a.region(0, fractal), l1a.region(0, fractal))
    strides = (256, 1, 16) if transpose_b else (256, 16, 1)
    k.load2d(l0b.region(0, fractal), l1b.region(0, fractal, strides))
    k.barrier()
    k.mmad(acc, l0a.region(0, acc.sizes), l0b.region(0, acc.sizes))
    k.barrier()
    if chip.combined:
        ub = k.buffer("out", "UB", out, 256)
        k.copy(ub.region(0, acc.sizes), acc)
        k.barrier()
        k.copy(c.region(), ub.region())
    else:
        k.fixpipe(c.region(0, acc.sizes), acc, **drain)
    return k.finish()


@pytest.mark.parametrize("transpose", [False, True])
def test_load2d_can_transpose_a_fractal(transpose):
    program = cube_program(TOY, transpose_b=transpose)
    a = numbers(np.float16, (16, 16), 1)
    b = numbers(np.float16, (16, 16), 2)
    got = execute(program, {"a": a, "b": b}, TOY)["c"].reshape(16, 16)
    # A fractal of L0B is stored with n before k, so plain means A @ B.T.
    expected = a.astype(np.float32) @ (b if transpose else b.T).astype(np.float32)
    np.testing.assert_array_equal(got, expected.astype(np.float16))


@given(st.integers(0, 30), st.integers(0, 6))
def test_load3d_writes_windows_and_zeros_behind_the_last(pixel, tap):
    """3 x 6 outputs of 2 x 3 taps, padded and spread: rows and taps beyond are 0."""
    window = {"kernel": (2, 3), "stride": (2, 1), "pad": (1, 0, 1, 3), "dilation": (1, 2)}
    places = {"m_start": pixel, "k_start": 16 * tap}
    x = numbers(np.float16, (1, 16, 5, 6))
    program = cube_program(TOY, image=(1, 5, 6, 16), window=window | places)
    stored = x.transpose(0, 2, 3, 1)
    got = execute(program, {"a": stored, "b": np.eye(16, dtype=np.float16)}, TOY)["c"]
    rows = im2col_reference(x, *window.values()).reshape(-1, 16, 6)
    wide = np.pad(rows, ((0, 64), (0, 0), (0, 8)))
    np.testing.assert_array_equal(got.reshape(16, 16), wide[pixel : pixel + 16, :, tap])


@pytest.mark.parametrize(
    ("out", "relu", "scale"), [("fp16", True, 1.0), ("int8", False, 0.25), ("fp32", True, 2.0)]
)
def test_fixpipe_scales_rectifies_and_casts(out, relu, scale):
    program = cube_program(SPLIT, out=out, relu=relu, scale=scale)
    a = numbers(np.float16, (16, 16), 1)
    b = numbers(np.float16, (16, 16), 2)
    got = execute(program, {"a": a, "b": b}, SPLIT)["c"].reshape(16, 16)
    expected = (a.astype(np.float64) @ b.T.astype(np.float64)) * scale
    if relu:
        expected = np.maximum(expected, 0)
    if out == "int8":
        expected = np.clip(np.rint(expected), -128, 127)
    np.testing.assert_array_equal(got, expected.astype(got.dtype))


# -- refusals --------------------------------------------------------------------------------------
RELU = elementwise_program(TOY, 1024, op="vrelu", tile=1024)


@settings(max_examples=15)
@given(launches(budget=10))
def test_several_cores_in_any_order(case):
    launch, chip = case
    given_tensors = tensors_of(launch)
    first = execute(launch, given_tensors, chip)
    for seed in (1, 2):
        for name, value in execute(launch, given_tensors, chip, seed=seed).items():
            same(value, first[name])


def test_integer_reductions_are_exact_and_saturate():
    a = np.full((2, 64), 2**24 + 1, np.int32)
    a[1] = 2**31 - 1
    got = run_vector("vcadd", np.zeros((2, 1), np.int32), a)
    assert got[:, 0].tolist() == [64 * (2**24 + 1), 2**31 - 1]


def test_inputs_keep_their_shape_and_are_not_written():
    x = numbers(np.float16, (8, 128))
    kept = x.copy()
    out = execute(RELU, {"x1": x, "y": np.zeros((2, 512), np.float16)}, TOY)
    np.testing.assert_array_equal(x, kept)
    assert out["x1"].shape == (8, 128)
    assert out["y"].shape == (2, 512)


# -- refusals --------------------------------------------------------------------------------------
RELU = elementwise_program(TOY, 1024, op="vrelu", tile=1024)
GOOD = np.zeros(1024, np.float16)
EVENT = Event("S", "V", 0)
WAIT = Instruction("wait_flag", "V", event=EVENT)
ENDLESS = Loop("i", 10**9, (Instruction("scalar", "S"),))


def given_to_relu(**tensors):
    execute(RELU, tensors, TOY)


def read_outside(offset: int):
    """The views are raw memory: an unchecked offset would read outside the process's arrays."""
    x = Buffer("x", "GM", "fp16", 64)
    t = Buffer("t", "UB", "fp16", 64)
    copy = Instruction("data_copy", "MTE2", t.region(0, 16), (x.region(offset, 16),))
    program = Program("hand", (x, t), (Loop("i", 2, (copy,)),))
    execute(program, {"x": np.zeros(64, np.float16)}, TOY)


def use_a_loop_variable_late():
    k = KernelBuilder("late", TOY)
    x = k.tensor("x", "fp16", 128)
    t = k.buffer("t", "UB", "fp16", 16)
    with k.loop("i", 4) as i:
        pass
    k.copy(t.region(), x.region(i * 16, 16))
    k.finish()


CALLS = {
    "an element too few": lambda: given_to_relu(x1=GOOD[:-1]),
    "another format": lambda: given_to_relu(x1=GOOD.astype(np.float32)),
    "a tensor that is none": lambda: given_to_relu(x1=GOOD, z=GOOD),
    "rows of two lengths": lambda: given_to_relu(x1=[[1, 2], [3]]),
    "a text": lambda: given_to_relu(x1="text"),
    "nothing": lambda: given_to_relu(x1=None),
    **{f"x from {at} on": partial(read_outside, at) for at in (-16, 49, 64, 10**12)},
    "a flag that nobody sets": lambda: execute(Program("stuck", (), (WAIT,)), {}, TOY),
    "too many instructions": lambda: execute(Program("long", (), (ENDLESS,)), {}, TOY),
    "spans of too many": lambda: simulate(Program("long", (), (ENDLESS,)), TOY).spans,
    "a program of another chip": lambda: execute(cube_program(TOY), {}, SPLIT),
    "a loop variable behind its loop": use_a_loop_variable_late,
    "a core that is none": lambda: Launch("far", (Part(RELU, ((("core", 7),),)),)),
    "no core": lambda: simulate(Launch("nothing", ()), TOY),
    "more cores than there are": lambda: simulate(
        elementwise_launch(load_chip("Ascend910A"), 32 * 2048), TOY
    ),
    "a path that is missing": lambda: simulate(gemm_launch(GemmShape(64, 64, 64), TOY), SPLIT),
}


def test_what_is_refused_says_what_is_needed():
    assert_messages("isa", "test_execute", CALLS)
