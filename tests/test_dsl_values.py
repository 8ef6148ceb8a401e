"""Every operation of the DSL, by its default schedule, against NumPy: values, flags and time."""

import itertools
from functools import partial

import numpy as np
import pytest
from dsl_oracles import (
    BINARY,
    COMPARE,
    FLOAT_ONLY,
    INT_ONLY,
    INTS,
    POSITIVE,
    SCALAR,
    UNARY,
    binary,
    cast,
    compare,
    fold,
    known,
    made,
    rounding,
    scalar,
    select,
    unary,
)
from dsl_strategies import (
    ANYTHING,
    CHIP_CASES,
    CHIPS,
    ELEMENTWISE,
    FUSABLE,
    SIZES,
    array,
    check_auto,
    chip_of,
    programs,
    shapes,
)
from hypothesis import given, settings, strategies as st

from ascend_lab.errors import PathError
from ascend_lab.lab.kernels import conv2d_reference
from ascend_lab.machine.isa.memory import numpy_type
from ascend_lab.operators import dsl as te

FLOATS = ("fp16", "fp32", "bf16")
ODD = ((1,), (17,), (257,), (31, 33), (5, 1), (1, 7), (3, 16, 5), (2, 3, 5, 7), (127, 2))


def formats_of(op):
    """Formats the vector unit takes an operation in (bf16: only the 910B2 has it)."""
    if op in FLOAT_ONLY:
        return FLOATS
    return INTS if op in INT_ONLY else (*FLOATS, *INTS)


def chips_for(*dtypes):
    return ("Ascend910B2",) if "bf16" in dtypes else CHIPS


def some_shapes(*key):
    """Two odd shapes for a test, always the same ones, over all tests all of them."""
    first = sum(map(ord, "".join(key))) % len(ODD)
    return ODD[first], ODD[(first + 4) % len(ODD)]


def inputs(shape, dtype, count=1, low=-2.0):
    rng = np.random.default_rng(len(shape) + sum(shape))
    arrays = {f"x{i}": array(rng, shape, dtype, low) for i in range(count)}
    return arrays, [known(a, dtype, name) for name, a in arrays.items()]


# -- element by element ----------------------------------------------------------------------------

check_on_few = partial(check_auto, cores=4)
"""Small tensors have more work for each core then; random programs run on all of them."""
OPERATIONS = (*BINARY, *UNARY, *SCALAR)


@pytest.mark.parametrize(("op", "dtype"), [(op, d) for op in OPERATIONS for d in formats_of(op)])
def test_elementwise(op, dtype):
    for shape in some_shapes(op, dtype):
        low = 0.5 if op == "vdiv" else 0.25 if op in POSITIVE else -2.0
        arrays, operands = inputs(shape, dtype, 2 if op in BINARY else 1, low)
        if op in SCALAR:
            y = scalar(op, *operands, 3)
        else:
            y = (binary if op in BINARY else unary)(op, *operands)
        for chip in chips_for(dtype):
            check_on_few([y.named("y")], arrays, chip)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS])
def test_compare_and_select(dtype):
    for op, shape in zip(COMPARE, ODD, strict=False):
        arrays, (a, b) = inputs(shape, dtype, 2)
        condition = compare(a, b, op).named("c")
        for chip in chips_for(dtype):
            check_on_few([condition, select(condition, b, a).named("y")], arrays, chip)


CASTS = [p for p in itertools.permutations((*FLOATS, *INTS), 2) if set(p) != {"int8", "uint8"}]


@pytest.mark.parametrize(("source", "target"), CASTS)
def test_cast(source, target):
    shape, _ = some_shapes(source, target)
    values = np.linspace(-300.0, 300.0, int(np.prod(shape))).reshape(shape)
    if source in ("int8", "uint8"):
        values = np.clip(values, *(np.iinfo(source).min, np.iinfo(source).max))
    x = values.astype(np.float32).astype(numpy_type(source))
    for chip in chips_for(source, target):
        check_on_few([cast(known(x, source, "x"), target).named("y")], {"x": x}, chip)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rounding_goes_to_int32(dtype):
    x = (np.arange(-20, 21, dtype=np.float32) / 4).astype(numpy_type(dtype))
    a = known(x, dtype, "x")
    outputs = [rounding(op, a).named(f"y_{op}") for op in ("floor", "ceil", "round")]
    for chip in chips_for(dtype):
        check_on_few(outputs, {"x": x}, chip)


def test_overflow_and_nan_go_through_as_on_the_hardware():
    x = np.array([65504, -65504, 0, np.inf, -np.inf, np.nan, 12, 1e-7], np.float16)
    a = known(x, "fp16", "x")
    outputs = [
        binary("vadd", a, a).named("double"),
        unary("vexp", a).named("power"),
        scalar("vmuls", a, 0.0).named("nothing"),
    ]
    for chip in CHIPS:
        check_auto(outputs, {"x": x}, chip)


def test_bf16_needs_a_chip_that_has_it():
    x = te.placeholder((16,), "bf16", name="x")
    with pytest.raises(PathError, match=r"bf16.*Ascend910A|Ascend910A.*bf16"):
        te.auto_schedule(te.vadd(x, x), chip_of("Ascend910A"))


# -- broadcasts and folds --------------------------------------------------------------------------
KINDS = ("sum", "max", "min", "prod")


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "int32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_fold_over_one_axis(kind, dtype):
    for shape in ((33, 37), (1, 129), (131, 1), (2, 17, 3)):
        arrays, (a,) = inputs(shape, dtype)
        if kind == "prod":
            sizes = np.where(np.arange(a.value.size).reshape(shape) % 5, 1, -2)
            arrays["x0"] = sizes.astype(numpy_type(dtype))
            a = known(arrays["x0"], dtype, "x0")
        for axis in range(len(shape)):
            for chip in chips_for(dtype):
                check_on_few([fold(kind, a, axis).named("y")], arrays, chip)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("kind", KINDS)
def test_folds_of_bytes_saturate_once(kind, dtype):
    """Sums and products of bytes are taken in int32 and cut to the format at the end."""
    for shape, axes in (((33, 37), (1,)), ((7, 3, 16), (0, 1, 2)), ((5, 130), (0,))):
        arrays, (a,) = inputs(shape, dtype)
        if kind == "prod":
            arrays["x0"] = np.ones(shape, dtype)
            arrays["x0"].flat[::67] = 3
            a = known(arrays["x0"], dtype, "x0")
        for chip in CHIPS:
            check_on_few([fold(kind, a, axes, keepdims=True).named("y")], arrays, chip)


def test_a_long_sum_is_shared_by_the_cores():
    x = array(np.random.default_rng(0), (300_007,), "fp32")
    for count in (262_144, 300_007):
        part = x[:count]
        kernel = check_auto(
            [fold("sum", known(part, "fp32", "x"), 0).named("y")], {"x": part}, "Ascend910A"
        )
        assert (len(kernel.phases) == 2) == (count == 262_144)


# -- moves -----------------------------------------------------------------------------------------
DTYPES = st.sampled_from(("fp16", "fp32", "int32", "int8"))


@given(shapes(limit=700), DTYPES, st.data())
def test_gather(shape, dtype, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    picks = data.draw(st.sampled_from(((1,), (5,), (17,), (2, 3))))
    rng = np.random.default_rng(3)
    arrays = {
        "x": array(rng, shape, dtype),
        "index": rng.integers(0, shape[axis], picks).astype(np.int32),
    }
    x = known(arrays["x"], dtype, "x")
    index = known(arrays["index"], "int32", "index")
    tensor = te.gather(x.tensor, index.tensor, axis)
    y = made(tensor, np.take(x.value, index.value, axis), np.zeros(tensor.shape)).named("y")
    for chip in CHIPS:
        check_on_few([y], arrays, chip, whole=False)


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "int32"])
@pytest.mark.parametrize("mode", ["update", "add"])
@pytest.mark.parametrize(("rows", "tail", "picks"), [(7, (5,), 9), (33, (16,), 4), (1, (3, 5), 3)])
def test_scatter_with_repeated_indices(mode, dtype, rows, tail, picks):
    """update: the last row wins; add: rows are added one after another, rounded each time."""
    rng = np.random.default_rng(picks)
    x = array(rng, (rows, *tail), dtype)
    updates = array(rng, (picks, *tail), dtype)
    index = rng.integers(0, rows, picks).astype(np.int32)
    index[-1] = index[0]
    tensors = [
        te.placeholder(a.shape, d, name=n)
        for a, d, n in ((x, dtype, "x"), (index, "int32", "index"), (updates, dtype, "updates"))
    ]
    want = x.copy()
    slack = np.zeros(x.shape)
    for at, row in zip(index, updates, strict=True):
        want[at] = row if mode == "update" else want[at] + row
    if mode == "add" and dtype != "int32":
        unit = {"fp16": 2.0**-10, "fp32": 2.0**-23}[dtype]
        slack += picks * unit * (np.abs(x) + np.sum(np.abs(updates), axis=0))
    y = made(te.scatter(*tensors, mode), want, slack).named("y")
    arrays = {"x": x, "index": index, "updates": updates}
    for chip in CHIPS:
        check_on_few([y], arrays, chip, whole=False)


# -- formulas --------------------------------------------------------------------------------------
def test_formulas_of_elements():
    rng = np.random.default_rng(4)
    arrays = {"a": array(rng, (19, 37), "fp32"), "b": array(rng, (37,), "fp32", 0.5)}
    a, b = (known(x, "fp32", n) for n, x in arrays.items())
    k = te.reduce_axis(37, "k")
    tensor = te.compute((19, 37), lambda i, j: te.exp(a.tensor[i, j]) * b.tensor[j] - 2.0)
    value = np.exp(a.value) * b.value - np.float32(2)
    rows = te.compute((19,), lambda i: te.max(a.tensor[i, k] / b.tensor[k], axis=k))
    sums = te.compute((19,), lambda i: te.sum(-a.tensor[i, k] * b.tensor[k], axis=k))
    shifted = te.compute((18, 36), lambda i, j: te.maximum(a.tensor[i + 1, j + 1], a.tensor[i, j]))
    steep = te.compute((18, 37), lambda i, j: a.tensor[i, j] - a.tensor[i + 1, j])
    near = np.full((19, 37), 1e-5)
    outputs = [
        made(te.renamed(tensor, "y"), value, near),
        made(te.renamed(rows, "rows"), (a.value / b.value).max(1), np.zeros(19)),
        made(te.renamed(sums, "sums"), -(a.value * b.value).sum(1), near[:, 0]),
        made(te.renamed(steep, "steep"), a.value[:-1] - a.value[1:], np.zeros((18, 37))),
        made(
            te.renamed(shifted, "w"),
            np.maximum(a.value[1:, 1:], a.value[:-1, :-1]),
            np.zeros((18, 36)),
        ),
    ]
    for chip in CHIPS:
        for out in outputs:
            check_auto([out], arrays, chip, whole=False)


def test_window_formula():
    """A sum of three neighbours: reads that overlap."""
    x = array(np.random.default_rng(5), (9, 70), "fp32")
    a = known(x, "fp32", "x")
    tensor = te.compute(
        (9, 68), lambda i, j: a.tensor[i, j] + a.tensor[i, j + 1] + a.tensor[i, j + 2]
    )
    want = (x[:, :-2] + x[:, 1:-1]) + x[:, 2:]
    for chip in CHIPS:
        check_auto([made(te.renamed(tensor, "y"), want, np.full(want.shape, 1e-6))], {"x": x}, chip)


# -- windows and the cube --------------------------------------------------------------------------
@pytest.mark.parametrize("chip", CHIP_CASES)
@pytest.mark.parametrize("mode", ["max", "avg"])
@pytest.mark.parametrize(
    ("size", "window", "stride", "border"),
    [
        ((9, 11), 3, 2, 1),
        ((8, 8), (2, 3), (2, 1), 0),
        ((5, 7), (5, 7), 1, 0),
        ((6, 6), 2, 3, (1, 0)),
    ],
)
def test_pooling(size, window, stride, border, mode, chip):
    x = array(np.random.default_rng(6), (2, 1, *size, 16), "fp16")
    tensor = te.pooling2d(te.placeholder(x.shape, name="x"), window, stride, border, mode)
    want, slack = pooled(x.astype(np.float64), window, stride, border, mode)
    check_auto([made(te.renamed(tensor, "y"), want, slack)], {"x": x}, chip, whole=False)


def pooled(x, window, stride, border, mode):
    """Window by window, from the definition; fp16 sums may round at every step."""
    (kh, kw) = np.broadcast_to(window, 2)
    (sh, sw) = np.broadcast_to(stride, 2)
    ph, pw = np.broadcast_to(border, 2)
    edges = ((0, 0), (0, 0), (ph, ph), (pw, pw), (0, 0))
    wide = np.pad(x, edges, constant_values=-np.inf if mode == "max" else 0.0)
    oh = (wide.shape[2] - kh) // sh + 1
    ow = (wide.shape[3] - kw) // sw + 1
    out = np.zeros((*x.shape[:2], oh, ow, 16))
    size = np.zeros_like(out)
    for i, j in itertools.product(range(oh), range(ow)):
        part = wide[:, :, i * sh : i * sh + kh, j * sw : j * sw + kw]
        out[:, :, i, j] = part.max((2, 3)) if mode == "max" else part.sum((2, 3)) / (kh * kw)
        size[:, :, i, j] = 0 if mode == "max" else np.abs(part).sum((2, 3))
    return out, size * 2.0**-10


def operands(sizes, dtype, batch=()):
    m, k, n = sizes
    rng = np.random.default_rng(m + k + n)
    a = (*batch, m, k)
    b = (*batch, k, n)
    if dtype == "int8":
        return tuple(rng.integers(-128, 128, s).astype(np.int8) for s in (a, b))
    return tuple(rng.normal(size=s).astype(numpy_type(dtype)) for s in (a, b))


def product(a, b):
    return np.matmul(a.astype(np.float64), b.astype(np.float64))


def bound(a, b, dtype):
    """Sums of k products in fp32, in any order: k units of the largest sum of magnitudes."""
    if dtype == "int8":
        return 0
    return a.shape[-1] * 2.0**-23 * float(np.max(product(np.abs(a), np.abs(b)))) + 1e-6


CUBES = [(d, c) for d in ("fp16", "int8", "bf16") for c in chips_for(d)]


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("dtype", "chip"), CUBES)
def test_matmul_of_row_major_arrays(dtype, turned, chip):
    """te.run packs and unpacks; operands may be stored turned, and in batches."""
    for batch, sizes in (((), (33, 47, 20)), ((3,), (17, 16, 5)), ((2, 2), (5, 40, 33))):
        a, b = operands(sizes, dtype, batch)
        stored = [np.swapaxes(x, -1, -2) if t else x for x, t in zip((a, b), turned, strict=True)]
        x, y = (te.placeholder(s.shape, dtype, name=n) for s, n in zip(stored, "ab", strict=True))
        out_dtype = "int32" if dtype == "int8" else "fp32"
        c = te.renamed(te.matmul(x, y, *turned, out_dtype=out_dtype), "c")
        schedule = te.auto_schedule(c, chip_of(chip))
        arrays = dict(zip("ab", map(np.ascontiguousarray, stored), strict=True))
        got = te.run(schedule, arrays)["c"]
        assert got.shape == c.shape
        np.testing.assert_allclose(got, product(a, b), rtol=0, atol=bound(a, b, dtype))


@pytest.mark.parametrize("chip", CHIP_CASES)
def test_matmul_between_vector_stages(chip):
    """relu(a) @ b + bias, then a second product: conversions stand where layouts differ."""
    rng = np.random.default_rng(8)
    arrays = {
        "a": array(rng, (20, 37), "fp16"),
        "b": array(rng, (37, 18), "fp16"),
        "bias": array(rng, (18,), "fp16"),
        "w": array(rng, (18, 33), "fp16"),
    }
    a, b, bias, w = (te.placeholder(x.shape, name=n) for n, x in arrays.items())
    hidden = te.matmul(te.vabs(a), b)
    first = te.renamed(te.vrelu(te.vadd(hidden, te.broadcast(bias, (20, 18)))), "first")
    second = te.renamed(te.vmuls(te.matmul(first, w), 0.5), "second")
    got = te.run(te.auto_schedule([first, second], chip_of(chip)), arrays)
    x = np.abs(arrays["a"].astype(np.float64)) @ arrays["b"].astype(np.float64)
    x = np.maximum(x + arrays["bias"].astype(np.float64), 0)
    y = 0.5 * x @ arrays["w"].astype(np.float64)
    np.testing.assert_allclose(got["first"], x, rtol=2e-3, atol=0.03)
    np.testing.assert_allclose(got["second"], y, rtol=5e-3, atol=0.2)


CONVOLUTIONS = [
    ((1, 16, 8, 8), (8, 16, 3, 3), {"pad": 1}),
    ((2, 5, 9, 7), (7, 5, 3, 2), {"stride": (2, 1), "pad": (0, 1, 2, 0)}),
    ((1, 24, 12, 12), (17, 24, 1, 1), {"stride": 2}),
    ((1, 16, 11, 10), (32, 16, 3, 3), {"pad": 2, "dilation": 2}),
]


@pytest.mark.parametrize("chip", CHIP_CASES)
@pytest.mark.parametrize(("size", "weights", "options"), CONVOLUTIONS)
def test_conv2d(size, weights, options, chip):
    rng = np.random.default_rng(7)
    arrays = {"x": array(rng, size, "fp16"), "w": array(rng, weights, "fp16")}
    x, w = (te.placeholder(a.shape, name=n) for n, a in arrays.items())
    y = te.conv2d(x, w, **options, out_dtype="fp32")
    got = te.run(te.auto_schedule(te.renamed(te.vmuls(y, 2.0), "y"), chip_of(chip)), arrays)["y"]
    how = (options.get(name, one) for name, one in (("stride", 1), ("pad", 0), ("dilation", 1)))
    want = 2.0 * conv2d_reference(*(arrays[n].astype(float) for n in "xw"), *how)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)


# -- random programs -------------------------------------------------------------------------------
BYTES = {"kinds": ELEMENTWISE, "dtypes": ("fp16", "fp32", "int32", "int8", "uint8")}
MOVES = {"kinds": ("move", "move", "scalar"), "dtypes": ("fp16", "fp32", "int32", "int8")}
KINDS_OF_PROGRAMS = {
    "elementwise": BYTES,
    "folds": {"kinds": FUSABLE},
    "anything": {"kinds": ANYTHING, "limit": 700},
    "moves": {**MOVES, "limit": 700},
}


@pytest.mark.parametrize("chip", CHIP_CASES)
@pytest.mark.parametrize("name", KINDS_OF_PROGRAMS)
@given(data=st.data())
def test_random_programs(name, chip, data):
    program = data.draw(programs(**KINDS_OF_PROGRAMS[name]))
    whole = name in ("elementwise", "folds")
    check_auto(program.outputs, program.arrays, chip, whole=whole)


LONG = (*SIZES, 257, 509, 1031, 2053, 5000)


@pytest.mark.parametrize("chip", CHIP_CASES)
@settings(max_examples=12)
@given(program=programs(kinds=(*FUSABLE, *ANYTHING), limit=30_000, sizes=LONG))
def test_random_programs_of_many_tiles(chip, program):
    check_auto(program.outputs, program.arrays, chip, whole=False)
