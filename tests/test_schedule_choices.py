"""Every choice of a cube schedule: equal values, no races, legality with numbers, and its gain."""

from dataclasses import fields, replace
from functools import partial

import pytest
from cube_checks import assert_conv, assert_gemm
from hypothesis import assume, example, given, settings, strategies as st
from message_lists import assert_messages
from test_conv import conv_shapes
from test_epilogue import PIPE, RESIDUAL

from ascend_lab.errors import CapacityError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import simulate, simulate_kernel
from ascend_lab.operators.kernels import (
    ConvShape,
    GemmSchedule,
    GemmShape,
    conv_launch,
    gemm_launch,
    tile_bytes,
)
from ascend_lab.operators.kernels.conv_schedules import check_conv, stage_bytes
from ascend_lab.operators.kernels.conv_shape import stacked
from ascend_lab.operators.kernels.gemm_schedule import CHOICES, KEEP_ORDER

CHIPS = ("Toy", "Ascend310", "Ascend910A", "Ascend910B2")
PLAIN = {"order": "mn", "keep": "", "bypass": ""}


@st.composite
def choices(draw, *, conv):
    """The fields beyond the tiling, legal together on any chip with a path around L1."""
    found = {name: draw(st.sampled_from(values)) for name, values in CHOICES.items()}
    if conv:
        return found | {"keep": "", "bypass": ""}
    keep = found["keep"]
    bypass = "" if keep and keep in found["bypass"] else found["bypass"]
    order = KEEP_ORDER[keep] if keep else found["order"]
    return found | {"window": "", "bypass": bypass, "order": order}


@st.composite
def tilings(draw):
    side = st.sampled_from((16, 32, 48))
    grid = draw(st.sampled_from(((1, 1), (1, 2), (2, 1))))
    return GemmSchedule(draw(side), 32, draw(side), draw(st.integers(1, 3)), *grid)


SIDES = st.sampled_from((1, 15, 16, 33, 64, 70, 97, 130))


@given(
    st.tuples(SIDES, SIDES, SIDES),
    st.sampled_from(("fp16", "int8")),
    tilings(),
    choices(conv=False),
    st.sampled_from(CHIPS),
    st.integers(0, 99),
)
def test_products_equal_numpy(sizes, dtype, tiling, extra, chip_name, seed):
    chip = load_chip(chip_name)
    if ("GM", "L0A") not in chip.paths:
        extra = extra | {"bypass": ""}
    shape = GemmShape(*sizes, dtype)
    schedule = replace(tiling, **extra)
    assume(all(n <= chip.buffers[s] for s, n in tile_bytes(shape, schedule).items()))
    launch = assert_gemm(shape, chip, schedule, seed=seed)
    assert simulate(launch, chip).cycles == simulate_kernel(launch, chip).cycles


def unchanged(extra):
    """Choices without images together."""
    return extra | {"window": "" if extra["window"] == "stacked" else extra["window"]}


@given(conv_shapes(), tilings(), choices(conv=True), st.sampled_from(CHIPS), st.integers(0, 99))
@example(ConvShape(2, 33, 5, 5, 16, 1, 1), GemmSchedule(32, 32, 16, 2, 2, 1),
         {**PLAIN, "window": "stacked"}, "Toy", 0)  # fmt: skip
@example(ConvShape(6, 33, 5, 6, 40, 3, 3, 1, 1), GemmSchedule(32, 48, 16, 6, 2, 1),
         {**PLAIN, "window": "stacked"}, "Ascend310", 1)  # fmt: skip
def test_convolutions_equal_numpy(shape, tiling, extra, chip_name, seed):
    one = stacked(shape) if extra["window"] == "stacked" else shape
    extra = extra if one != shape else unchanged(extra)
    chip = load_chip(chip_name)
    schedule = replace(tiling, **extra)
    try:
        check_conv(one, schedule, chip)
    except CapacityError:
        assume(False)
    launch = assert_conv(shape, chip, schedule, seed=seed, dense=one != shape)
    assert simulate(launch, chip).cycles == simulate_kernel(launch, chip).cycles


@given(choices(conv=False), st.sampled_from(("Ascend310", "Ascend910A", "Ascend910B2")))
def test_epilogues_of_products_work_with_every_choice(extra, chip_name):
    chip = load_chip(chip_name)
    if not chip.combined:
        extra = extra | {"bypass": ""}
    epilogue = RESIDUAL if chip.combined else PIPE["all"]
    schedule = GemmSchedule(32, 32, 32, 1, 1, 2)
    assert_gemm(GemmShape(70, 70, 150), chip, replace(schedule, **extra), epilogue)


@settings(max_examples=15)
@given(choices(conv=True), st.sampled_from(("Ascend310", "Ascend910A", "Ascend910B2")))
def test_epilogues_of_convolutions_work_with_every_choice(extra, chip_name):
    chip = load_chip(chip_name)
    epilogue = RESIDUAL if chip.combined else PIPE["all"]
    shape = ConvShape(2, 20, 3, 40, 40, 3, 3, 1, 1)
    schedule = GemmSchedule(32, 48, 16, 6, 1, 1, **unchanged(extra))
    assert_conv(shape, chip, schedule, epilogue)


@settings(max_examples=100)
@given(tilings(), choices(conv=False))
def test_schedules_survive_plain_data(tiling, extra):
    schedule = replace(tiling, **extra)
    data = schedule.as_dict()
    assert GemmSchedule(**data) == schedule
    assert list(tiling.as_dict()) == [f.name for f in fields(GemmSchedule)][:6]
    assert all(data[name] != f.default for f in fields(schedule) if (name := f.name) in data)


def cycles(launch, chip):
    return simulate_kernel(launch, chip).cycles


def loaded(launch, chip):
    return simulate(launch, chip).path_bytes["GM", "L1"]


def test_weights_stay_where_output_channels_are_outside():
    chip = load_chip("Ascend910A")
    shape = ConvShape(1, 512, 7, 7, 2048, 1, 1)
    tiling = GemmSchedule(16, 32, 128, 16, 1, 8)
    launches = [conv_launch(shape, chip, replace(tiling, order=o)) for o in ("mn", "nm")]
    assert cycles(launches[1], chip) < 0.9 * cycles(launches[0], chip)
    weights = 512 * 2048 * 2
    image = 512 * 7 * 7 * 2
    assert loaded(launches[0], chip) > 4 * weights
    assert weights < loaded(launches[1], chip) < weights + 8 * 2 * 2 * image


@pytest.mark.parametrize("keep", ["a", "b"])
def test_an_operand_kept_in_l1_is_loaded_once(keep):
    chip = load_chip("Ascend910B2")
    shape = GemmShape(2048, 256, 2048)
    tiling = GemmSchedule(128, 128, 128, 1, 3, 8)
    kept = replace(tiling, keep=keep, order=KEEP_ORDER[keep])
    assert cycles(gemm_launch(shape, chip, kept), chip) < cycles(
        gemm_launch(shape, chip, tiling), chip
    )
    one = GemmShape(256, 256, 256)
    alone = GemmSchedule(64, 64, 64, 1, 1, 1)
    matrix = 256 * 256 * 2
    assert loaded(gemm_launch(one, chip, alone), chip) == 4 * matrix + 4 * matrix
    kept = replace(alone, keep=keep, order=KEEP_ORDER[keep])
    assert loaded(gemm_launch(one, chip, kept), chip) == matrix + 4 * matrix


def test_a_window_is_flat_or_a_strip_as_told():
    chip = load_chip("Toy")
    shape = ConvShape(1, 16, 8, 70, 16, 3, 3, 1, 1)
    tiling = GemmSchedule(32, 48, 16, 3, 1, 1)
    flat, strip = (conv_launch(shape, chip, replace(tiling, window=w)) for w in ("flat", "strip"))
    assert conv_launch(shape, chip, tiling) == strip != flat


SMALL = GemmSchedule(16, 16, 16, 1, 1, 1)
PRODUCTS = (
    *({"order": "km"}, {"keep": "c"}, {"keep": "a", "order": "nm"}, {"keep": "b"}),
    *({"keep": "a", "bypass": "ab"}, {"bypass": "a"}, {"window": "flat"}),
    *({"a_l0_slots": 3}, {"b_l1_slots": 0}, {"c_l0_slots": 4}),
)
CONVOLUTIONS = ({"keep": "a"}, {"bypass": "b"}, {"window": "row"}, {"a_l1_slots": 3})


def test_what_is_refused_says_what_is_needed():
    toy = load_chip("Toy")
    first = load_chip("Ascend910A")
    split = load_chip("Ascend910B2")
    square = GemmShape(32, 32, 32)
    conv = ConvShape(1, 16, 8, 8, 16, 1, 1)
    wide = ConvShape(1, 16, 8, 1024, 16, 3, 3, 1, 1)
    flat = GemmSchedule(32, 48, 16, 3, 1, 1, window="flat")
    single = replace(flat, a_l1_slots=1, b_l1_slots=1)
    assert stage_bytes(wide, single) == stage_bytes(wide, flat) / 2
    kept = GemmSchedule(128, 64, 128, 1, 16, 2, order="nm", keep="b")
    sums = GemmSchedule(128, 64, 256, 1, 1, 1, c_l0_slots=2)
    deep = GemmSchedule(16, 64, 64, 1, 1, 2)
    calls = {
        f"a product with {extra}": partial(gemm_launch, square, toy, replace(SMALL, **extra))
        for extra in PRODUCTS
    }
    calls |= {
        f"a convolution with {extra}": partial(conv_launch, conv, first, replace(SMALL, **extra))
        for extra in CONVOLUTIONS
    }
    calls |= {
        "all K of B twice": partial(gemm_launch, GemmShape(2048, 2048, 256), first, kept),
        "B in L0 twice": partial(gemm_launch, GemmShape(16, 256, 128), toy, deep),
        "sums twice": partial(gemm_launch, GemmShape(256, 256, 256), split, sums),
        "wide rows, flat, twice": partial(conv_launch, wide, toy, flat),
        "wide rows, flat, once": partial(conv_launch, wide, toy, single),
    }
    assert_messages("cube", "test_schedule_choices", calls)


def test_small_operands_gain_by_going_around_l1():
    chip = load_chip("Ascend910A")
    shape = GemmShape(512, 512, 512)
    tiling = GemmSchedule(64, 128, 128, 1, 8, 4)
    around = gemm_launch(shape, chip, replace(tiling, bypass="a"))
    assert cycles(around, chip) < cycles(gemm_launch(shape, chip, tiling), chip)
    moved = simulate(around, chip).path_bytes
    assert moved["GM", "L0A"] == moved["L1", "L0B"] / 2
    assert ("L1", "L0A") not in moved
