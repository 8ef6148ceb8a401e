"""Fused epilogues against NumPy, step by step: convolutions, products, depthwise; time."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from cube_checks import assert_conv, assert_gemm, few_cores, numbers, on, pack_channels, values
from hypothesis import given, strategies as st
from message_lists import assert_messages

from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import sanitize
from ascend_lab.machine.sim import execute
from ascend_lab.operators.kernels import (
    ConvShape,
    GemmSchedule,
    GemmShape,
    conv_launch,
    depthwise_launch,
    gemm_launch,
    pack_depthwise,
    unpack_conv,
)
from ascend_lab.operators.kernels.depthwise import epilogue_obstacle
from ascend_lab.operators.kernels.epilogue import (
    Epilogue,
    Fix,
    Operand,
    Step,
    fix_of,
    unsupported_reason,
)

full = pytest.mark.full
COUPLED = ("Toy", "Ascend310", "Ascend910A")
BIAS16, BIAS32 = (Operand("bias", "channel", dtype) for dtype in ("fp16", "fp32"))
OLD16 = Operand("old", "tile", "fp16")
NARROW = Step("vconv", ("sums",), dtype="fp16")
BIAS = Epilogue((BIAS16,), (NARROW, Step("vadd", (0, "bias"))), "fp16")
BIAS_RELU = Epilogue((BIAS16,), (*BIAS.steps, Step("vrelu", (1,))), "fp16")
WIDE_RELU = Epilogue(
    (BIAS32,),
    (Step("vadd", ("sums", "bias")), Step("vrelu", (0,)), Step("vconv", (1,), dtype="fp16")),
    "fp16",
)
RESIDUAL = Epilogue(
    (BIAS16, OLD16), (*BIAS.steps, Step("vadd", (1, "old")), Step("vrelu", (2,))), "fp16"
)
WIDE_RESIDUAL = Epilogue(
    (OLD16, BIAS32),
    (
        Step("vconv", ("old",), dtype="fp32"),
        Step("vadd", ("sums", "bias")),
        Step("vadd", (0, 1)),
        Step("vrelu", (2,)),
    ),
    "fp32",
)
RELU6 = Epilogue(
    (BIAS16,), (*BIAS.steps, Step("vmaxs", (1,), 0.0), Step("vmins", (2,), 6.0)), "fp16"
)
SIGMOID_GELU = Epilogue(
    (BIAS32,),
    (
        Step("vadd", ("sums", "bias")),
        Step("vmuls", (0,), -1.702),
        Step("vexp", (1,)),
        Step("vadds", (2,), 1.0),
        Step("vrec", (3,)),
        Step("vmul", (0, 4)),
        Step("vconv", (5,), dtype="fp16"),
    ),
    "fp16",
)
MASKED = Epilogue((BIAS16, OLD16), (NARROW, Step("vsel", ("old", 0, "bias"))), "fp16")
EPILOGUES = {
    "bias": BIAS,
    "bias_relu": BIAS_RELU,
    "wide_relu": WIDE_RELU,
    "residual": RESIDUAL,
    "wide_residual": WIDE_RESIDUAL,
    "relu6": RELU6,
    "gelu": SIGMOID_GELU,
    "masked": MASKED,
}
SHAPES = [
    ConvShape(2, 20, 9, 11, 40, 3, 3, 1, 1),
    ConvShape(1, 3, 28, 27, 33, 7, 5, 2, (3, 1, 2, 2)),
    ConvShape(1, 16, 3, 300, 17, 1, 3, (2, 1), 1),
    ConvShape(2, 48, 7, 7, 96, 3, 3, 1, 1, groups=3),
]
SMALL_TILES = GemmSchedule(32, 16, 32, 1, 1, 2)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("chip_name", on(*COUPLED))
@pytest.mark.parametrize("name", EPILOGUES)
def test_convolutions_equal_numpy(name, chip_name, dense):
    chip = few_cores(chip_name)
    for seed, shape in enumerate(SHAPES):
        assert_conv(shape, chip, None, EPILOGUES[name], dense=dense, seed=seed)
    assert_conv(SHAPES[0], chip, SMALL_TILES, EPILOGUES[name], dense=dense)


@pytest.mark.parametrize("chip_name", on(*COUPLED))
@pytest.mark.parametrize("name", EPILOGUES)
def test_products_equal_numpy(name, chip_name):
    chip = few_cores(chip_name)
    for sizes in ((49, 70, 100), (128, 32, 16), (5, 17, 300)):
        assert_gemm(GemmShape(*sizes, "fp16"), chip, None, EPILOGUES[name])
    assert_gemm(GemmShape(70, 70, 90), chip, SMALL_TILES, EPILOGUES[name])


PIPE = {
    "wide_relu": WIDE_RELU,
    "relu": Epilogue((), (NARROW, Step("vrelu", (0,))), "fp16"),
    "convert": Epilogue((), (NARROW,), "fp16"),
    "all": Epilogue(
        (BIAS32,),
        (
            Step("vadd", ("bias", "sums")),
            Step("vmuls", (0,), 0.25),
            Step("vconv", (1,), dtype="fp16"),
            Step("vrelu", (2,)),
        ),
        "fp16",
    ),
}


@pytest.mark.parametrize("chip_name", ["Ascend910B2", pytest.param("Ascend910A", marks=full)])
@pytest.mark.parametrize("name", PIPE)
def test_what_a_fix_pipe_can_do_works_on_both_kinds_of_chip(name, chip_name):
    chip = few_cores(chip_name)
    for dense in (True, False):
        for seed, shape in enumerate(SHAPES):
            assert_conv(shape, chip, None, PIPE[name], dense=dense, seed=seed)
    assert_conv(SHAPES[0], chip, SMALL_TILES, PIPE[name])
    assert_conv(SHAPES[0], chip, GemmSchedule(32, 16, 16, 1, 2, 1), PIPE[name])
    assert_gemm(GemmShape(49, 70, 300), chip, None, PIPE[name])
    assert_gemm(GemmShape(70, 70, 90), chip, SMALL_TILES, PIPE[name])


def test_the_bias_table_limits_the_tile():
    chip = load_chip("Ascend910B2")
    launch = assert_gemm(GemmShape(64, 64, 2048), chip, None, WIDE_RELU)
    table = [b for p in launch.parts for b in p.program.buffers if b.space == "BT"]
    assert max(b.elements * 4 for b in table) <= chip.buffers["BT"]


@pytest.mark.parametrize("chip_name", on("Toy", "Ascend910A", "Ascend910B2"))
def test_sums_of_bytes_are_scaled_to_fp16(chip_name):
    """A quantised layer: int32 bias, conversion, scale, ReLU, result in fp16."""
    chip = load_chip(chip_name)
    steps = (
        Step("vadd", ("sums", "bias")),
        Step("vconv", (0,), dtype="fp32"),
        Step("vmuls", (1,), 1 / 64),
        Step("vrelu", (2,)),
        Step("vconv", (3,), dtype="fp16"),
    )
    epilogue = Epilogue((Operand("bias", "channel", "int32"),), steps, "fp16")
    assert unsupported_reason(epilogue, chip, "int32") == ""
    assert_conv(ConvShape(1, 40, 9, 10, 24, 3, 3, 1, 1, "int8"), chip, None, epilogue)
    assert_gemm(GemmShape(40, 70, 50, "int8"), chip, None, epilogue)


def test_refusals_give_the_reason():
    split = load_chip("Ascend910B2")
    coupled = load_chip("Ascend910A")
    wanted = {
        "bias": "once each, in order",
        "residual": "once each, in order",
        "wide_residual": "no vconv",
        "relu6": "once each",
        "gelu": "no vexp",
        "masked": "no vsel",
    }
    for name, words in wanted.items():
        assert words in unsupported_reason(EPILOGUES[name], split)
        assert unsupported_reason(EPILOGUES[name], coupled) == ""
    tile = Epilogue((Operand("t", "tile", "fp32"),), (Step("vadd", ("sums", "t")),), "fp32")
    assert "memory of their own" in unsupported_reason(tile, split)
    assert "no step reads" in unsupported_reason(Epilogue((BIAS16,), (NARROW,), "fp16"), split)
    assert "one number format" in unsupported_reason(WIDE_RELU, coupled, "int32")
    half = Epilogue((), (Step("vconv", ("sums",), dtype="bf16"),), "bf16")
    assert (unsupported_reason(half, split), unsupported_reason(half, coupled)) == (
        "",
        "Ascend910A has no bf16",
    )
    assert fix_of(PIPE["all"]) == Fix("bias", 0.25, relu=True)
    fp32 = Epilogue((), (Step("vconv", ("sums",), dtype="fp32"),), "fp32")
    assert "stores fp16" in epilogue_obstacle(fp32)
    assert "tile operand" in epilogue_obstacle(RESIDUAL)
    assert "one number format" in epilogue_obstacle(WIDE_RELU)


SUMS = ("sums",)
NONE = {
    "no step": ((), ()),
    "an operand called sums": ((Operand("sums", "tile", "fp16"),), (NARROW,)),
    "an operand per row": ((Operand("b", "row", "fp16"),), (NARROW,)),
    "an operand in bytes": ((Operand("b", "tile", "int8"),), (NARROW,)),
    "a reduction": ((), (Step("vcadd", SUMS),)),
    "one source of two": ((), (Step("vadd", SUMS),)),
    "two sources of three": ((), (Step("vsel", SUMS * 2),)),
    "a step of itself": ((), (Step("vrelu", (0,)),)),
    "a source that is none": ((), (Step("vrelu", ("other",)),)),
    "no number to add": ((), (Step("vadds", SUMS),)),
    "a number that nobody reads": ((), (Step("vrelu", SUMS, 1.0),)),
    "a conversion to nothing": ((), (Step("vconv", SUMS),)),
    "a step without the sums": ((BIAS16,), (Step("vrelu", ("bias",)),)),
}


def many_operands() -> Epilogue:
    """Sixteen tiles of fp32, more than UB of the Toy holds beside the sums."""
    operands = tuple(Operand(f"t{i}", "tile", "fp32") for i in range(16))
    steps = [Step("vadd", (i - 1 if i else "sums", f"t{i}")) for i in range(16)]
    return Epilogue(operands, tuple(steps), "fp32")


def test_what_is_refused_says_what_is_needed():
    toy = load_chip("Toy")
    split = load_chip("Ascend910B2")
    square = GemmShape(32, 32, 32)
    wide = Epilogue((BIAS32,), (Step("vadd", ("sums", "bias")),), "fp16")
    high = GemmSchedule(128, 16, 16, 1, 1, 1)
    long = GemmSchedule(16, 16, 512, 1, 1, 1)
    planes = ConvShape(1, 16, 8, 8, 16, 3, 3, 1, 1, groups=16)
    calls = {name: partial(Epilogue, *parts, "fp16") for name, parts in NONE.items()}
    calls |= {
        "wide sums stored as fp16": partial(conv_launch, SHAPES[0], toy, epilogue=wide),
        "a wide bias on whole numbers": lambda: gemm_launch(
            GemmShape(16, 32, 16, "int8"), load_chip("Ascend910A"), None, WIDE_RELU
        ),
        "too much of the bias table": lambda: gemm_launch(
            GemmShape(64, 64, 2048), split, long, WIDE_RELU
        ),
        "many operands, a convolution": lambda: conv_launch(
            SHAPES[0], toy, epilogue=many_operands()
        ),
        "many operands, a product": lambda: gemm_launch(square, toy, None, many_operands()),
        "a high tile": lambda: gemm_launch(GemmShape(128, 16, 16), toy, high, WIDE_RESIDUAL),
        "a tile behind planes": partial(depthwise_launch, planes, toy, epilogue=RESIDUAL),
    }
    assert_messages("cube", "test_epilogue", calls)


TOGETHER = [
    ConvShape(2, 16, 7, 7, 16, 1, 1),
    ConvShape(16, 40, 7, 7, 33, 1, 1),
    ConvShape(3, 33, 3, 6, 48, 1, 1, (1, 2)),
    ConvShape(5, 64, 1, 1, 20, 1, 1),
    ConvShape(4, 20, 7, 7, 33, 3, 3, 1, 1),
    ConvShape(6, 16, 5, 6, 20, 3, 2, (1, 2), (2, 0, 1, 0), dilation=(2, 1)),
]
TILES = [
    GemmSchedule(32, 32, 16, 1, 2, 1, window="stacked"),
    GemmSchedule(48, 16, 32, 2, 1, 2, window="stacked"),
    GemmSchedule(16, 48, 16, 1, 3, 1, order="nm", window="stacked"),
]


@pytest.mark.parametrize("chip_name", on("Toy", "Ascend310", "Ascend910B2"))
@pytest.mark.parametrize("schedule", TILES, ids=str)
def test_tiles_go_on_in_the_next_image(chip_name, schedule):
    chip = load_chip(chip_name)
    epilogues = [None, *((RESIDUAL, BIAS_RELU) if chip.combined else (WIDE_RELU,))]
    for shape, epilogue in product(TOGETHER, epilogues):
        assert_conv(shape, chip, schedule, epilogue, dense=True, seed=shape.n)


@pytest.mark.parametrize("chip_name", on("Toy", "Ascend910A", "Ascend910B2"))
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_depthwise_convolutions_finish_in_ub(chip_name, dense, wide):
    chip = few_cores(chip_name)
    rng = np.random.default_rng(1)
    for stride, sizes in ((1, (9, 11)), (2, (15, 14)), ((2, 1), (8, 9)), (1, (3, 3))):
        shape = ConvShape(2, 40, *sizes, 40, 3, 3, stride, 1, groups=40)
        steps = (Step("vadd", ("sums", "bias")), Step("vmaxs", (0,), 0.0), Step("vmins", (1,), 6.0))
        epilogue = Epilogue((BIAS16,), steps, "fp16")
        if wide:
            head = (Step("vconv", ("sums",), dtype="fp32"), Step("vadd", (0, "bias")))
            tail = (Step("vmins", (1,), 6.0), Step("vconv", (2,), dtype="fp16"))
            epilogue = Epilogue((BIAS32,), (*head, *tail), "fp16")
        x = numbers(rng, (2, 40, *sizes), "fp16")
        weight = numbers(rng, (40, 1, 3, 3), "fp16")
        bias = numbers(rng, 40, epilogue.operands[0].dtype)
        launch = depthwise_launch(shape, chip, dense=dense, epilogue=epilogue)
        packed = pack_depthwise(shape, x, weight)
        plain = execute(depthwise_launch(shape, chip), packed, chip)
        sums = unpack_conv(shape, plain)
        result = execute(launch, packed | {"bias": pack_channels(bias)}, chip, seed=2)
        wanted = values(epilogue, sums, {"bias": bias[:, None, None]})
        np.testing.assert_array_equal(unpack_conv(shape, result, dense=dense), wanted)
        assert sanitize(launch, chip) == []


@st.composite
def epilogues(draw):
    """A straight line of steps on values of two formats; every operand may be read or not."""
    wide = Operand("wide", "channel", "fp32")
    more = Operand("more", "tile", "fp32")
    operands = (BIAS16, wide, OLD16, more)
    formats = {"sums": "fp32", **{o.name: o.dtype for o in operands}}
    steps: list[Step] = []
    for index in range(draw(st.integers(1, 6))):
        tiles = [s for s in formats if s not in ("bias", "wide")]
        first = draw(st.sampled_from(tiles))
        op = draw(st.sampled_from(("vadd", "vmax", "vmuls", "vrelu", "vconv", "vsel")))
        same = st.sampled_from([s for s in formats if formats[s] == formats[first]])
        if op in ("vadd", "vmax", "vsel"):
            more_of_it = [draw(same) for _ in range(1 + (op == "vsel"))]
            steps.append(Step(op, (first, *more_of_it)))
        elif op == "vconv":
            steps.append(Step(op, (first,), dtype=draw(st.sampled_from(("fp16", "fp32")))))
        else:
            steps.append(Step(op, (first,), 0.5 if op == "vmuls" else None))
        formats[index] = steps[-1].dtype or formats[first]
    return Epilogue(operands, tuple(steps), formats[len(steps) - 1])


@given(
    epilogues(),
    st.sampled_from(COUPLED),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 16, 33)),
    st.integers(1, 9),
    st.integers(1, 40),
    st.booleans(),
)
def test_any_epilogue_equals_numpy(epilogue, chip_name, n, k, h, w, dense):
    chip = load_chip(chip_name)
    assert_conv(ConvShape(n, 3, h, w, k, 3, 1, 1, 1), chip, None, epilogue, dense=dense, seed=h)
    assert_gemm(GemmShape(w, 20, k), chip, None, epilogue, seed=w)


@pytest.mark.parametrize("chip_name", ["Ascend910B2", "Ascend910A"])
@pytest.mark.parametrize("number", [-0.5, 0.0, 3.0])
def test_a_scale_has_any_sign_or_is_nothing(number, chip_name):
    scaled = Epilogue((), (Step("vmuls", ("sums",), number), Step("vrelu", (0,))), "fp32")
    shape = GemmShape(17, 20, 33, out_dtype="fp32")
    assert_gemm(shape, load_chip(chip_name), None, scaled)


def test_a_tile_of_many_blocks_is_done_in_pieces():
    """A schedule whose tile of sums fits L0C, but not UB with all it needs."""
    chip = load_chip("Toy")
    shape = ConvShape(1, 16, 8, 8, 128, 1, 1)
    launch = assert_conv(shape, chip, GemmSchedule(32, 16, 128, 1, 1, 1), WIDE_RESIDUAL)
    program = launch.parts[0].program
    (tile,) = [b for b in program.buffers if b.name == "y_ub"]
    assert 0 < tile.elements < 32 * 128
