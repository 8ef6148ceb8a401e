"""First layers on pixels of 4 channels: the way there, the convolution, and what both save."""

import numpy as np
import pytest
from cube_checks import assert_conv, conv_sums
from hypothesis import given, settings, strategies as st

from ascend_lab.compiler import Graph, GraphBuilder, compile_stages, evaluate, run_compiled, zoo
from ascend_lab.errors import InputError
from ascend_lab.fused.first_image_kernels import (
    FewChannels,
    SmallImage,
    few_channels_launch,
    small_image_launch,
)
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import sanitize
from ascend_lab.machine.sim import execute, simulate
from ascend_lab.operators.kernels import ConvShape, conv_launch
from ascend_lab.operators.kernels.epilogue import Epilogue, Step
from ascend_lab.operators.kernels.epilogue_plan import bias_bytes, pack_bias
from ascend_lab.operators.kernels.operand_packing import pack_conv, unpack_conv


@pytest.mark.parametrize("chip_name", ["Toy", "Ascend310", "Ascend910B2"])
@pytest.mark.parametrize(("n", "c", "pixels"), [(1, 3, 256), (3, 3, 700), (5, 4, 5000)])
def test_planes_become_pixels(chip_name: str, n: int, c: int, pixels: int) -> None:
    """One block, a last tile that is moved back, several tiles over several cores."""
    chip = load_chip(chip_name)
    x = np.random.default_rng(c).standard_normal((n, c, pixels)).astype(np.float16)
    launch = small_image_launch(SmallImage(n, c, pixels), chip)
    assert sanitize(launch, chip) == []
    y = execute(launch, {"x": x.ravel()}, chip)["y"].reshape(n, pixels, 4)
    assert np.array_equal(y[..., :c], x.transpose(0, 2, 1)) and not y[..., c:].any()
    launch = small_image_launch(SmallImage(n, c, pixels, "fp16", "int8", 32.0, -9), chip)
    assert sanitize(launch, chip) == []
    q = execute(launch, {"x": x.ravel()}, chip)["y"].reshape(n, pixels, 4)
    steps = np.rint(x * np.float16(32) - np.float16(9)).clip(-128, 127).transpose(0, 2, 1)
    assert q.dtype == np.int8 and np.array_equal(q[..., :c], steps) and not q[..., c:].any()


@pytest.mark.parametrize("chip_name", ["Toy", "Ascend310", "Ascend910B2"])
@pytest.mark.parametrize(
    ("n", "c", "pixels"), [(1, 3, 16), (3, 2, 700), (2, 16, 5000), (9, 12, 50)]
)
def test_planes_become_pixels_of_sixteen_channels(
    chip_name: str, n: int, c: int, pixels: int
) -> None:
    """One block, a last tile that is moved back, no channel missing, more images than cores."""
    chip = load_chip(chip_name)
    x = np.random.default_rng(c).standard_normal((n, c, pixels)).astype(np.float16)
    launch = few_channels_launch(FewChannels(n, c, pixels), chip)
    assert sanitize(launch, chip) == []
    y = execute(launch, {"x": x.ravel()}, chip)["y"].reshape(n, pixels, 16)
    assert np.array_equal(y[..., :c], x.transpose(0, 2, 1)) and not y[..., c:].any()


@settings(max_examples=15)
@given(st.data(), st.sampled_from(["Toy", "Ascend310", "Ascend910B2"]))
def test_convolutions_equal_numpy(data: st.DataObject, chip_name: str) -> None:
    """Any kernel, stride, dilation, pads: 4 or 8 taps side by side, the last ones may be few."""
    draw = data.draw
    chip = load_chip(chip_name)
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    r = draw(st.integers(1, 5))
    s = draw(st.integers(1, 7))
    c = draw(st.integers(1, 4))
    stride = draw(pair)
    dilation = draw(pair)
    top, bottom, left, right = (draw(st.integers(0, 2)) for _ in range(4))
    pads = (top, bottom, left, right)
    dtype = draw(st.sampled_from(("fp16", "int8")))
    widths = (20, 24, 28) if dtype == "fp16" else (24, 32)
    h = draw(st.integers(r * 3, 16))
    w = draw(st.sampled_from(widths))
    shape = ConvShape(2, c, h, w, 18, r, s, stride, pads, dtype, dilation=dilation, lanes=4)
    assert_conv(shape, chip, seed=h + w)  # type: ignore[no-untyped-call]


def test_cube_cycles_of_a_first_layer_fall_to_a_quarter() -> None:
    """ResNet: 49 taps of 16 lanes are 784 x 4 x 49 products of fractals, of 4 lanes 13 of 49.

    In bytes, twice as deep, 7 of 49.
    """
    chip = load_chip("Ascend310")
    for dtype, depth, wanted in (("fp16", 16, [153664, 40768]), ("int8", 32, [153664, 21952])):
        shapes = [ConvShape(1, 3, 224, 224, 64, 7, 7, 2, 3, dtype, lanes=n) for n in (0, 4)]
        macs = [simulate(conv_launch(shape, chip), chip).macs for shape in shapes]
        assert [m // (16 * 16 * depth) for m in macs] == wanted


def test_the_clock_chooses_and_values_stay() -> None:
    stages = compile_stages(zoo.build("mobilenet_v2"), "Ascend310P3")
    assert [t.layout for n, t in stages.laid_out.types.items() if ":4" in t.layout] == ["NC1HWC0:4"]
    rng = np.random.default_rng(0)
    b = GraphBuilder("g")
    x = b.input("x", (2, 3, 20, 24))
    weight = b.constant(rng.standard_normal((20, 3, 3, 3)).astype(np.float32), name="w")
    b.output(b.relu(b.conv2d(x, weight, stride=2, pad=1)))
    graph = b.build()
    image = rng.standard_normal((2, 3, 20, 24)).astype(np.float32)
    assert "NC1HWC0:4" in str(compile_stages(graph, "Ascend310").laid_out)
    (found,) = run_compiled(graph, {"x": image}, "Ascend310").values()
    (exact,) = evaluate(graph, {"x": image}).values()
    np.testing.assert_allclose(found, exact, rtol=4e-3, atol=2e-2)


@pytest.mark.parametrize(
    "change", [{"c": 5}, {"w": 30}, {"groups": 3}, {"lanes": 8}, {"w": 12, "dtype": "int8"}]
)
def test_what_does_not_fit_four_lanes_is_refused(change: dict[str, int | str]) -> None:
    given_ = {"n": 1, "c": 3, "h": 8, "w": 8, "k": 6, "r": 3, "s": 3, "lanes": 4}
    with pytest.raises(InputError, match="up to 4 channels"):
        ConvShape(**{**given_, **change})  # type: ignore[arg-type]


# -- a bias that the cube adds --------------------------------------------------------------------
CASES = [
    ConvShape(2, 20, 9, 11, 70, 1, 1),  # several tiles of output channels
    ConvShape(1, 40, 7, 9, 40, 3, 3, 1, 1, groups=40),  # bundles, the last one short
    ConvShape(2, 96, 6, 6, 24, 1, 1),
    ConvShape(1, 3, 12, 12, 20, 3, 3, 2, 1, lanes=4),
]


@pytest.mark.parametrize("chip_name", ["Toy", "Ascend310", "Ascend910A"])
@pytest.mark.parametrize("shape", CASES)
def test_the_cube_adds_a_bias(chip_name: str, shape: ConvShape) -> None:
    chip = load_chip(chip_name)
    rng = np.random.default_rng(shape.c)
    x = rng.integers(-3, 4, (shape.n, shape.c, shape.h, shape.w)).astype(np.float16)
    weight = rng.integers(-3, 4, (shape.k, shape.c // shape.groups, shape.r, shape.s))
    bias = rng.integers(-9, 10, shape.k).astype(np.float16)
    steps = (Step("vconv", ("sums",), None, "fp16"), Step("vrelu", (0,)))
    size = bias_bytes(shape)
    launch = conv_launch(shape, chip, None, None, Epilogue((), steps, "fp16", None, "b", size))
    tensors = {**pack_conv(shape, x, weight.astype(np.float16)), "b": pack_bias(shape, bias)}
    found = unpack_conv(shape, execute(launch, tensors, chip))
    exact = conv_sums(shape, x, weight) + bias[:, None, None]  # type: ignore[no-untyped-call]
    assert np.array_equal(found, np.maximum(exact, 0))
    assert sanitize(launch, chip) == []


# -- products of one tensor -----------------------------------------------------------------------
def _three(rows: int, widths: tuple[int, ...]) -> Graph:
    b = GraphBuilder("g")
    rng = np.random.default_rng(3)
    x = b.input("x", (rows, 48))
    for i, width in enumerate(widths):
        weight = b.constant(rng.standard_normal((48, width)).astype(np.float32) / 7, name=f"w{i}")
        bias = b.constant(rng.standard_normal(width).astype(np.float32), name=f"b{i}")
        b.output(b.reshape(b.add(b.matmul(x, weight), bias), shape=(rows, width // 16, 16)))
    return b.build()


@pytest.mark.parametrize("chip_name", ["Ascend310", "Ascend910B2"])
def test_products_of_one_tensor_are_one(chip_name: str) -> None:
    """Rows that fill no fractal, widths of their own: slices of columns are views."""
    graph = _three(33, (64, 16, 48))
    stages = compile_stages(graph, chip_name)
    assert [n.op for n in stages.laid_out.nodes].count("matmul") == 1
    assert "slice" not in {op.type for op in stages.timeline().operators}
    x = np.random.default_rng(1).standard_normal((33, 48)).astype(np.float32)
    found = run_compiled(graph, {"x": x}, chip_name)
    exact = evaluate(graph, {"x": x})
    for one, other in zip(found.values(), exact.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=4e-3, atol=1e-2)
    ragged = compile_stages(_three(32, (64, 24 * 2)), chip_name).laid_out
    assert [n.op for n in ragged.nodes].count("matmul") == 1
