"""Other ways to convolve: im2col through memory, the vector unit, plain products, transposed."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from cube_checks import CHIPS, bytes_or_numbers, conv_operands, conv_sums, on, run_checked
from hypothesis import example, given, strategies as st
from message_lists import assert_messages
from test_conv import SIDES, conv_shapes

from ascend_lab.lab.kernels import (
    conv2d_reference,
    explicit_conv,
    im2col_launch,
    im2col_reference,
    is_plain_product,
    pack_explicit,
    pack_pointwise,
    pointwise_launch,
    unpack_explicit,
)
from ascend_lab.lab.kernels.convolution_ways import explicit_gemm
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import execute, simulate, simulate_kernel
from ascend_lab.operators import ops
from ascend_lab.operators.kernels import ConvShape, conv_launch, pack_conv, unpack_conv
from ascend_lab.operators.kernels.deconv import (
    DeconvShape,
    deconv_kernel,
    pack_deconv,
    phases_of,
    unpack_deconv,
)
from ascend_lab.operators.kernels.depthwise import depthwise_launch, pack_depthwise


# -- explicit im2col -------------------------------------------------------------------------------
@given(conv_shapes(), st.sampled_from(CHIPS), st.integers(0, 99))
@example(ConvShape(1, 1, 1, 1, 1, 1, 1, 1, (0, 3, 3, 0)), "Toy", 0)
@example(ConvShape(1, 17, 3, 5, 2, 2, 3, 1, (3, 3, 0, 0), "int8"), "Ascend910B2", 0)
def test_the_matrix_in_memory_is_im2col(shape, chip_name, seed):
    chip = load_chip(chip_name)
    shape = replace(shape, groups=1)
    x, weight = conv_operands(shape, seed)
    launch = im2col_launch(shape, chip)
    packed = pack_explicit(shape, x, weight)
    a = run_checked(launch, {"x": packed["x"]}, chip, seed=seed)["a"]
    c0 = 32 if shape.dtype == "int8" else 16
    c1 = shape.blocks[0]
    pixels = explicit_gemm(shape).m
    wide = np.zeros((shape.n, c1 * c0, shape.h, shape.w), x.dtype)
    wide[:, : shape.c] = x
    rows = im2col_reference(wide, (shape.r, shape.s), shape.strides, shape.pads, shape.dilations)
    rows = rows.reshape(pixels, c1, c0, shape.taps).transpose(1, 3, 0, 2)
    got = a.reshape(c1, shape.taps, -1, c0)[:, :, :pixels]
    np.testing.assert_array_equal(got, rows)


# -- depthwise on the vector unit ------------------------------------------------------------------
def small(shape, seed=0):
    """Operands whose products and sums are exact in fp16."""
    rng = np.random.default_rng(seed)
    sizes = ((shape.n, shape.c, shape.h, shape.w), (shape.c, 1, shape.r, shape.s))
    return [(rng.integers(-4, 5, size) / 4).astype(np.float16) for size in sizes]


@st.composite
def depthwise_shapes(draw):
    shape = draw(conv_shapes())
    c = draw(st.sampled_from((1, 15, 16, 17, 40)))
    return replace(shape, c=c, k=c, groups=c, dtype="fp16", out_dtype="")


def assert_depthwise(shape, chip, seed=0, order=None):
    x, weight = small(shape, seed)
    launch = depthwise_launch(shape, chip)
    tensors = run_checked(launch, pack_depthwise(shape, x, weight), chip, seed=order)
    expected = conv2d_reference(x, weight, shape.strides, shape.pads, shape.dilations, shape.c)
    np.testing.assert_array_equal(unpack_conv(shape, tensors), expected.astype(np.float16))


@given(depthwise_shapes(), st.sampled_from(CHIPS), st.integers(0, 99))
@example(ConvShape(1, 16, 1, 1, 16, 1, 1, 1, (0, 3, 3, 0), groups=16), "Toy", 0)
@example(ConvShape(2, 16, 40, 33, 16, 3, 3, 2, 1, groups=16), "Toy", 1)
@example(ConvShape(1, 16, 30, 60, 16, 5, 5, 1, 2, groups=16), "Ascend910A", 1)
def test_depthwise_equals_numpy_and_the_cube(shape, chip_name, seed):
    chip = load_chip(chip_name)
    assert_depthwise(shape, chip, seed, order=seed)


# -- 1x1 -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("chip_name", on(*CHIPS))
@pytest.mark.parametrize("dtype", ["fp16", "int8"])
@pytest.mark.parametrize(("c", "h", "w", "k"), [(16, 4, 4, 16), (17, 2, 8, 31), (64, 7, 16, 5)])
def test_a_pointwise_convolution_is_a_product_of_the_same_bytes(chip_name, dtype, c, h, w, k):
    chip = load_chip(chip_name)
    shape = ConvShape(1, c, h, w, k, 1, 1, dtype=dtype)
    x, weight = conv_operands(shape)
    packed = pack_pointwise(shape, x, weight)
    assert packed["a"].tobytes() == pack_conv(shape, x, weight)["x"].tobytes()
    got = unpack_conv(shape, {"y": execute(pointwise_launch(shape, chip), packed, chip)["c"]})
    np.testing.assert_array_equal(got, conv_sums(shape, x, weight).astype(got.dtype))


POINTWISE = {"n": 1, "c": 32, "h": 4, "w": 8, "k": 32, "r": 1, "s": 1}
OTHERS = ({"n": 2}, {"r": 2}, {"stride": 2}, {"pad": 1}, {"groups": 2}, {"h": 5, "w": 5})


def test_1x1_is_free_under_conditions_only():
    assert is_plain_product(ConvShape(**POINTWISE))
    assert not any(is_plain_product(ConvShape(**(POINTWISE | change))) for change in OTHERS)


REFERENCE = ops.get("conv_transpose2d").reference


# -- transposed ------------------------------------------------------------------------------------
@st.composite
def deconv_shapes(draw):
    """Transposed convolutions of any stride, pads, dilation and groups that leave an output."""
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    kernel = draw(pair)
    stride = draw(pair)
    dilation = draw(pair)
    groups = draw(st.sampled_from((1, 1, 2, 5)))
    c, k = (draw(st.sampled_from((1, 3, 16, 17))) * groups for _ in range(2))
    image = draw(st.sampled_from(SIDES[:7])), draw(st.sampled_from(SIDES[:7]))
    more = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    full = [
        (size - 1) * s + d * (r - 1) + 1 + m
        for size, s, d, r, m in zip(image, stride, dilation, kernel, more, strict=True)
    ]
    pads = []
    for length in full:
        before = draw(st.integers(0, min(4, length - 1)))
        pads += [before, draw(st.integers(0, min(4, length - 1 - before)))]
    dtype = draw(st.sampled_from(("fp16", "int8")))
    n = draw(st.integers(1, 2))
    return DeconvShape(
        n, c, *image, k, *kernel, stride, tuple(pads), dtype, "", dilation, groups, more
    )


def assert_deconv(shape, chip, seed=0, order=None):
    rng = np.random.default_rng(seed)
    sizes = (
        (shape.n, shape.c, shape.h, shape.w),
        (shape.c, shape.k // shape.groups, shape.r, shape.s),
    )
    x, weight = (bytes_or_numbers(rng, size, shape.dtype) for size in sizes)
    forms = ConvShape(1, 1, 99, 99, 1, 1, 1, shape.stride, shape.pad, dilation=shape.dilation)
    expected = REFERENCE(
        *(np.float64(x), np.float64(weight)),
        stride=forms.strides,
        pad=(forms.pads[:2], forms.pads[2:]),
        dilation=forms.dilations,
        groups=shape.groups,
        output_padding=shape.output_pad,
    )
    assert expected.shape[2:] == shape.out_hw
    kernel = deconv_kernel(shape, chip)
    got = unpack_deconv(shape, run_checked(kernel, pack_deconv(shape, x, weight), chip, seed=order))
    np.testing.assert_array_equal(got, expected.astype(got.dtype))


@given(deconv_shapes(), st.sampled_from(CHIPS), st.integers(0, 99))
@example(DeconvShape(1, 1, 1, 1, 1, 1, 1, 3, 0, output_pad=2), "Toy", 0)
@example(DeconvShape(1, 1, 1, 1, 1, 2, 2, 2, 1, dilation=3), "Toy", 0)
@example(DeconvShape(1, 3, 2, 2, 3, 2, 2, 2, 1), "Ascend910B2", 0)
def test_transposed_convolutions_equal_numpy(shape, chip_name, seed):
    chip = load_chip(chip_name)
    assert_deconv(shape, chip, seed, order=seed)


def test_phases_do_the_work_of_the_forward_pass_and_not_of_inserted_zeros():
    chip = load_chip("Ascend910A")
    shape = DeconvShape(1, 64, 28, 28, 64, 4, 4, 2, 1)
    assert len(phases_of(shape)) == 4
    made = sum(phase.macs for phase in simulate_kernel(deconv_kernel(shape, chip), chip).phases)
    assert made == shape.ops / 2
    inserted = ConvShape(1, 64, 55, 55, 64, 4, 4, 1, 2)
    assert inserted.out_hw == shape.out_hw
    assert simulate(conv_launch(inserted, chip), chip).macs > 3.9 * made


TOY = load_chip("Toy")
TRANSPOSED = {"n": 1, "c": 4, "h": 4, "w": 4, "k": 4, "r": 3, "s": 3, "stride": 2}
CHANGES = (
    *({"pad": 9}, {"output_pad": 2}, {"output_pad": -1}, {"groups": 3}),
    *({"stride": 0}, {"dtype": "fp64"}, {"h": 0}),
)
DEPTHWISE = {
    "one group": ConvShape(1, 16, 8, 8, 16, 3, 3),
    "two outputs a channel": ConvShape(1, 16, 8, 8, 32, 3, 3, groups=16),
    "bytes": ConvShape(1, 16, 8, 8, 16, 3, 3, dtype="int8", groups=16),
    "rows too long": ConvShape(1, 1, 8, 9000, 1, 3, 3),
}
CALLS = {
    **{f"depthwise, {name}": partial(depthwise_launch, s, TOY) for name, s in DEPTHWISE.items()},
    **{
        f"a product of {change}": partial(pointwise_launch, ConvShape(**(POINTWISE | change)), TOY)
        for change in OTHERS
    },
    **{
        f"transposed with {change}": partial(DeconvShape, **(TRANSPOSED | change))
        for change in CHANGES
    },
    "transposed, other weights": lambda: pack_deconv(
        DeconvShape(**TRANSPOSED), np.zeros((1, 4, 4, 4)), np.zeros((4, 5, 3, 3))
    ),
    "im2col of groups": lambda: im2col_launch(ConvShape(1, 32, 8, 8, 32, 3, 3, groups=2), TOY),
    "im2col of wide rows": lambda: im2col_launch(ConvShape(1, 16, 8, 4000, 16, 3, 3, pad=1), TOY),
    "a reference with other channels": lambda: conv2d_reference(
        np.zeros((1, 8, 4, 4)), np.zeros((2, 7, 3, 3))
    ),
}


def test_what_is_refused_says_what_is_needed():
    DeconvShape(**TRANSPOSED)
    assert_messages("cube", "test_conv_ways", CALLS)


# -- references ------------------------------------------------------------------------------------
def loops(x, weight, stride, pads, dilation, groups):
    """The sum of the definition, one product at a time."""
    n, _, h, w = x.shape
    k, cg, r, s = weight.shape
    oh = (h + pads[0] + pads[1] - dilation[0] * (r - 1) - 1) // stride[0] + 1
    ow = (w + pads[2] + pads[3] - dilation[1] * (s - 1) - 1) // stride[1] + 1
    y = np.zeros((n, k, oh, ow))
    for b, f, i, j in np.ndindex(n, k, oh, ow):
        for z, u, v in np.ndindex(cg, r, s):
            row = i * stride[0] + u * dilation[0] - pads[0]
            column = j * stride[1] + v * dilation[1] - pads[2]
            if 0 <= row < h and 0 <= column < w:
                y[b, f, i, j] += x[b, f // (k // groups) * cg + z, row, column] * weight[f, z, u, v]
    return y


CASES = [
    ((2, 4, 5, 4), (6, 2, 3, 2), (2, 1), (1, 0, 2, 1), (1, 2), 2),
    ((1, 3, 4, 4), (2, 3, 3, 3), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    ((1, 3, 3, 2), (3, 1, 2, 2), (3, 2), (2, 2, 2, 2), (2, 2), 3),
]


@pytest.mark.parametrize(("x", "weight", "stride", "pads", "dilation", "groups"), CASES)
def test_the_reference_is_the_definition(x, weight, stride, pads, dilation, groups):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(x)
    weight = rng.standard_normal(weight)
    expected = loops(x, weight, stride, pads, dilation, groups)
    got = conv2d_reference(x, weight, stride, pads, dilation, groups)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
    assert got.dtype == np.float64
    if groups == 1:
        matrix = im2col_reference(x, weight.shape[2:], stride, pads, dilation)
        flat = matrix @ weight.reshape(len(weight), -1).T
        n, k, oh, ow = got.shape
        np.testing.assert_allclose(flat.reshape(n, oh, ow, k).transpose(0, 3, 1, 2), got)


def test_references_keep_whole_numbers_exact():
    x = np.full((1, 8, 4, 4), -128, np.int8)
    weight = np.full((2, 8, 3, 3), -128, np.int8)
    got = conv2d_reference(x, weight)
    assert got.dtype == np.int64
    assert (got == 8 * 9 * 128 * 128).all()
    assert conv2d_reference(x.astype(np.float32), weight.astype(np.float32)).dtype == np.float32


@pytest.mark.parametrize("chip_name", on(*CHIPS))
@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_explicit_convolutions_equal_numpy(chip_name, dtype):
    chip = load_chip(chip_name)
    shape = ConvShape(2, 20, 9, 7, 18, 3, 2, (2, 1), (1, 0, 1, 1), dtype, dilation=(1, 2))
    x, weight = conv_operands(shape)
    kernel = explicit_conv(shape, chip)
    got = unpack_explicit(shape, run_checked(kernel, pack_explicit(shape, x, weight), chip))
    np.testing.assert_array_equal(got, conv_sums(shape, x, weight).astype(got.dtype))
