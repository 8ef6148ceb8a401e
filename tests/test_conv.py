"""Convolutions against NumPy: stride, pads, dilation, groups, wide rows, transposed; and time."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from cube_checks import CHIPS, assert_conv, on
from hypothesis import example, given, strategies as st
from message_lists import assert_messages

from ascend_lab.compiler import GraphBuilder, compile_graph
from ascend_lab.lab.kernels import conv2d_reference
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import simulate
from ascend_lab.operators.kernels import (
    ConvShape,
    GemmSchedule,
    conv_launch,
    conv_schedule,
    dense_placement,
    pack_conv,
    stacked_schedule,
)
from ascend_lab.operators.kernels.conv_schedules import takes_strips

SIDES = (1, 2, 3, 5, 7, 15, 16, 17, 31, 33)
CHANNELS = (1, 2, 3, 15, 16, 17, 31, 32, 33)


@st.composite
def conv_shapes(draw):
    """Any stride, pads a side, dilation and groups that leave an output."""
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    groups = draw(st.sampled_from((1, 1, 2, 3, 5)))
    dtype = draw(st.sampled_from(("fp16", "fp16", "int8")))
    each = st.sampled_from(CHANNELS if groups == 1 else (1, 3, 8, 16, 17))
    c = draw(each) * groups
    k = draw(each) * groups
    kernel = draw(pair)
    stride = draw(pair)
    dilation = draw(pair)
    pads = tuple(draw(st.integers(0, 3)) for _ in range(4))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    h = max(draw(st.sampled_from(SIDES)), reach[0] - pads[0] - pads[1], 1)
    w = max(draw(st.sampled_from(SIDES)), reach[1] - pads[2] - pads[3], 1)
    n = draw(st.integers(1, 2))
    return ConvShape(n, c, h, w, k, *kernel, stride, pads, dtype, "", dilation, groups)


@given(conv_shapes(), st.sampled_from(CHIPS), st.integers(0, 99))
@example(ConvShape(1, 1, 1, 1, 1, 3, 3, 1, 1), "Toy", 0)
@example(ConvShape(1, 3, 5, 1, 2, 1, 1, (3, 2), (0, 3, 2, 1)), "Ascend910B2", 1)
@example(ConvShape(2, 34, 5, 7, 51, 3, 1, 2, (2, 0, 1, 0), dilation=(2, 1), groups=17), "Toy", 2)
@example(ConvShape(1, 16, 6, 7, 16, 3, 3, 1, 1, groups=16), "Ascend910A", 0)
@example(ConvShape(1, 40, 6, 7, 40, 3, 3, 1, 1, "int8", groups=40), "Ascend910B2", 0)
@example(ConvShape(1, 20, 6, 7, 30, 3, 3, 1, 1, groups=10), "Ascend910B2", 0)
@example(ConvShape(1, 100, 6, 7, 100, 3, 3, 1, 1, groups=4), "Ascend310", 0)
def test_any_convolution_equals_numpy(shape, chip_name, seed):
    chip = load_chip(chip_name)
    assert_conv(shape, chip, seed=seed)


def test_cores_that_differ_by_a_shift_share_a_program():
    """56 rows in pieces of 4: a program for the top, one for the bottom, one for the rest."""
    chip = load_chip("Ascend910A")
    shape = ConvShape(2, 16, 56, 56, 32, 3, 3, 1, 1)
    schedule = GemmSchedule(224, 48, 16, 3, 14, 2)
    launch = assert_conv(replace(shape, n=1), chip, schedule)
    assert [part.core_count for part in launch.parts] == [2, 24, 2]
    both = assert_conv(shape, chip, replace(schedule, grid_rows=28, grid_cols=1))
    assert [part.core_count for part in both.parts] == [2, 24, 2]
    across = assert_conv(shape, chip, replace(schedule, grid_rows=3))
    assert across.core_count == 6


WIDE = [
    ConvShape(1, 16, 3, 700, 16, 3, 3, 1, 1),
    ConvShape(1, 20, 5, 301, 17, 3, 5, (2, 3), (1, 0, 4, 2), dilation=(1, 7)),
    ConvShape(2, 16, 1, 257, 16, 1, 1, 1, (0, 1, 0, 40)),
    ConvShape(1, 16, 2, 130, 16, 1, 2, (1, 2), (0, 0, 0, 5), dtype="int8"),
    ConvShape(1, 32, 2, 200, 32, 2, 2, 1, 1, groups=2),
]


@pytest.mark.parametrize("chip_name", on(*CHIPS))
@pytest.mark.parametrize("shape", WIDE, ids=lambda s: f"{s.h}x{s.w}")
@pytest.mark.parametrize("base_m", [0, 16, 48], ids=["default", "16", "48"])
def test_wide_rows_are_cut_into_strips(chip_name, shape, base_m):
    chip = load_chip(chip_name)
    schedule = conv_schedule(shape, chip)
    if base_m:
        schedule = GemmSchedule(base_m, 32 if shape.dtype == "int8" else 16, 16, 1, 2, 1)
    assert takes_strips(shape, schedule, chip) or base_m != 16
    assert_conv(shape, chip, schedule)


# -- shapes and refusals ---------------------------------------------------------------------------
def test_equal_sides_are_one_number():
    shape = ConvShape(1, 4, 8, 8, 4, 3, 3, (2, 2), (1, 1, 1, 1), dilation=[1, 1])
    assert shape == ConvShape(1, 4, 8, 8, 4, 3, 3, 2, 1)
    assert (shape.stride, shape.pad, shape.dilation) == (2, 1, 1)
    assert ConvShape(1, 4, 8, 8, 4, 3, 3, pad=(1, 1, 2, 2)).pad == (1, 2)
    assert ConvShape(1, 4, 8, 8, 4, 3, 3, pad=(1, 2)).pads == (1, 1, 2, 2)
    assert ConvShape(1, 4, 9, 8, 4, 3, 3, (2, 1), (1, 0, 2, 1), dilation=(2, 3)).out_hw == (3, 5)


SIZES = {"n": 1, "c": 4, "h": 8, "w": 8, "k": 6, "r": 3, "s": 3}
WRONG = (
    *({"stride": (1, 0)}, {"stride": (1, 1, 1)}, {"stride": 1.5}, {"stride": True}),
    *({"pad": (1, 2, 3)}, {"pad": (0, 0, -1, 0)}, {"crop": True, "pad": (-4, -4, 0, 0)}),
    *({"dilation": 0}, {"dilation": 5}, {"dilation": (1, 2), "s": 5}),
    *({"groups": 0}, {"groups": 4}, {"groups": 3}, {"dtype": "int32"}),
    *({"n": 0}, {"c": 0}, {"w": 0}, {"k": -6}, {"r": 0}),
)
ALONE = (
    *({"n": 1}, {"h": 64, "w": 8}, {"stride": 2}, {"h": 33, "w": 16, "r": 2}),
    *({"groups": 2}, {"dtype": "int8"}),
)
"""Images that do not fill tiles better together."""


def stacked_launch(change, *, dense=True):
    shape = replace(ConvShape(2, 32, 7, 7, 32, 1, 1), **change, out_dtype="")
    schedule = GemmSchedule(32, 32, 16, 1, 2, 1, window="stacked")
    conv_launch(shape, load_chip("Toy"), schedule, dense_placement(shape) if dense else None)


def test_what_is_refused_says_what_is_needed():
    ConvShape(**SIZES)
    x = np.zeros((1, 4, 8, 8))
    weight = np.zeros((4, 4, 3, 3))
    deep = ConvShape(1, 16, 90, 90, 16, 3, 3, dilation=40)
    grouped = ConvShape(1, 4, 8, 8, 4, 3, 3, groups=2)
    calls = {f"a shape with {change}": partial(ConvShape, **(SIZES | change)) for change in WRONG}
    calls |= {f"stacked with {change}": partial(stacked_launch, change) for change in ALONE}
    calls |= {
        "stacked, images apart": partial(stacked_launch, {}, dense=False),
        "a window that no tiling fits": partial(conv_schedule, deep, load_chip("Toy")),
        "weights of another size": partial(pack_conv, grouped, x, weight),
        "weights of the reference": partial(conv2d_reference, x, weight, groups=2),
    }
    assert_messages("cube", "test_conv", calls)


# -- all images as one ----------------------------------------------------------------------------
def test_images_together_fill_fractals():
    """49 pixels are 3.06 fractals, those of 16 images 49."""
    chip = load_chip("Ascend310")
    shape = ConvShape(16, 512, 7, 7, 2048, 1, 1)
    place = dense_placement(shape)
    tilings = (stacked_schedule(shape, chip), None)
    together, apart = (simulate(conv_launch(shape, chip, t, place), chip) for t in tilings)
    assert together.macs == 49 / 64 * apart.macs and together.cycles < 0.8 * apart.cycles
    wide = replace(shape, k=512, r=3, s=3, pad=1)
    tilings = (stacked_schedule(wide, chip), None)
    together, apart = (
        simulate(conv_launch(wide, chip, t, dense_placement(wide)), chip) for t in tilings
    )
    assert together.macs == 49 / 64 * apart.macs and together.cycles < 0.75 * apart.cycles
    large = replace(shape, n=2, c=64, h=300, w=300, k=64)
    for none in (replace(shape, n=1), large, replace(large, h=1080, w=1920)):
        assert stacked_schedule(none, chip) is None


@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910A"])
def test_a_compiler_takes_the_quicker_tiles(chip):
    """Of small layers an estimate may be wrong: both are timed."""
    for n, c, size, k in ((16, 512, 7, 2048), (16, 64, 1, 64), (12, 256, 5, 256)):
        net = GraphBuilder("small")
        net.output(net.conv2d(net.input("x", (n, c, size, size)), net.weight((k, c, 1, 1))))
        compiled = compile_graph(net.build(), chip)
        (task,) = [t for t in compiled.tasks if t.op == "conv2d"]
        shape = ConvShape(n, c, size, size, k, 1, 1)
        own = load_chip(chip)
        tilings = (conv_schedule(shape, own), stacked_schedule(shape, own))
        place = dense_placement(shape)
        near = {"x": 1.0, task.piece.graph.inputs[0]: 1.0}  # the image in L2: so it is timed
        launches = [conv_launch(shape, own, t, place) for t in tilings]
        cycles = [simulate(launch, own, warm=near).cycles for launch in launches]
        taken = simulate(task.lowered.kernel.phases[0], own, warm=near).cycles
        assert taken <= min(cycles)
