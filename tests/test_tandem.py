"""A pointwise and a depthwise convolution as one kernel: values however it is divided, refusals."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from cube_checks import run_checked
from hypothesis import assume, example, given, strategies as st
from message_lists import assert_messages

from ascend_lab.compiler import GraphBuilder
from ascend_lab.errors import CapacityError
from ascend_lab.fused.means import diagonal
from ascend_lab.fused.tandem_kernel import tandem_launch
from ascend_lab.fused.tandem_schedules import TIMED, ranked, tandem_launches
from ascend_lab.fused.tandem_shape import Tandem, TandemSchedule, mixed_counts
from ascend_lab.lab.kernels import conv2d_reference
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import as_kernel
from ascend_lab.machine.sim import simulate_kernel
from ascend_lab.operators.kernels import ConvShape
from ascend_lab.operators.kernels.epilogue import Epilogue, Step
from ascend_lab.operators.kernels.epilogue_plan import pack_bias
from ascend_lab.operators.kernels.operand_packing import pack_conv, pack_weights, unpack_conv

A910 = load_chip("Ascend910A")


def tandem_of(sizes, taps, step, pad, *, bias=False):
    """Two convolutions of `sizes` (n, c, h, w, k), each with a ReLU6 and maybe a bias."""
    n, c, h, w, k = sizes
    point = ConvShape(n, c, h, w, k, 1, 1, out_dtype="fp16")
    depth = ConvShape(n, k, h, w, k, taps, taps, step, pad, groups=k, out_dtype="fp16")
    steps = (
        Step("vconv", ("sums",), None, "fp16"),
        Step("vmaxs", (0,), 0.0),
        Step("vmins", (1,), 6.0),
    )
    names = ("b1", "b2") if bias else ("", "")
    after = [Epilogue((), steps, "fp16", bias=name) for name in names]
    return Tandem(point, depth, *after)


def operands(tandem, rng):
    """Small whole numbers, whose sums fp16 holds: image, both weights, both biases."""
    point = tandem.point
    depth = tandem.depth
    shapes = [(point.n, point.c, point.h, point.w), (point.k, point.c, 1, 1)]
    shapes += [(depth.k, 1, depth.r, depth.s), (point.k,), (depth.k,)]
    return [rng.integers(-2, 3, shape).astype(np.float16) for shape in shapes]


def run(tandem, schedule, chip, seed=0):
    """Return what the kernel writes, and what NumPy says."""
    x, one, two, b1, b2 = operands(tandem, np.random.default_rng(seed))
    launch = tandem_launch(tandem, chip, schedule)
    tensors = pack_conv(tandem.point, x, one) | {"depth_weight": pack_weights(tandem.depth, two)}
    biased = bool(tandem.after_point.bias)
    if biased:
        tensors |= {"b1": pack_bias(tandem.point, b1), "b2": pack_bias(tandem.depth, b2)}
    got = unpack_conv(tandem.depth, run_checked(launch, tensors, chip, seed=seed), dense=True)
    wide = [a.astype(np.float64) for a in (x, one, two, b1 * biased, b2 * biased)]
    between = conv2d_reference(wide[0], wide[1]) + wide[3][:, None, None]
    depth = tandem.depth
    full = np.zeros((depth.k, depth.k, depth.r, depth.s))
    full[np.arange(depth.k), np.arange(depth.k)] = wide[2][:, 0]
    sums = conv2d_reference(between.clip(0, 6), full, stride=depth.stride, pad=depth.pad)
    return got, (sums + wide[4][:, None, None]).clip(0, 6)


SIZES = st.tuples(*(st.integers(1, top) for top in (3, 40, 12, 12, 70)))


@given(
    SIZES, st.sampled_from((1, 3, 5)), st.integers(1, 2), st.booleans(),
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 4)), st.integers(1, 3),
    st.integers(1, 4), st.integers(1, 5), st.sampled_from(("rows", "weights")),
    st.integers(1, 3), st.sampled_from(("Ascend910A", "Ascend310", "Ascend310P3")),
    st.integers(0, 99),
)  # fmt: skip
@example((2, 24, 9, 11, 96), 3, 2, True, (3, 1, 2), 2, 2, 1, "weights", 1, "Ascend910A", 0)
@example((1, 16, 7, 7, 160), 5, 1, True, (2, 1, 1), 1, 2, 4, "rows", 1, "Ascend310", 1)
@example((1, 1, 1, 1, 1), 3, 1, False, (1, 1, 1), 1, 1, 1, "weights", 1, "Ascend910A", 0)
@example((3, 40, 12, 5, 33), 3, 1, False, (1, 2, 4), 1, 1, 1, "rows", 1, "Ascend910A", 2)
@example((4, 24, 7, 7, 48), 5, 1, True, (1, 2, 1), 1, 1, 3, "rows", 2, "Ascend310P3", 3)
@example((3, 16, 9, 5, 40), 3, 1, True, (3, 1, 2), 2, 1, 2, "weights", 3, "Ascend910A", 4)
def test_values_equal_numpy_however_it_is_divided(
    sizes, taps, step, bias, grid, bands, blocks, tile, stay, images, name, seed
):
    assume(min(sizes[2:4]) + 2 * (taps // 2) >= taps)
    tandem = tandem_of(sizes, taps, step, taps // 2, bias=bias)
    chip = load_chip(name)
    images = images if images in mixed_counts(tandem.depth) else 1
    most = tandem.depth.blocks[1], sizes[0] // images, tandem.depth.out_hw[0]
    grid = tuple(map(min, grid, most))
    assume(np.prod(grid) <= chip.core_count)
    assume(blocks * (taps**2 + 1) <= 64)  # of L0B
    schedule = TandemSchedule(grid, bands, blocks, tile, stay, images)
    got, wanted = run(tandem, schedule, chip, seed)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("sizes", "step", "schedule"),
    [
        ((4, 24, 7, 7, 96), 1, TandemSchedule((2, 1, 1), 1, 2, 4, "rows", 4)),
        ((6, 40, 5, 9, 33), 1, TandemSchedule((1, 2, 1), 2, 1, 3, "weights", 1)),
        ((3, 16, 20, 12, 48), 2, TandemSchedule((1, 1, 1), 3, 3, 2, "rows")),
        ((8, 24, 14, 14, 64), 1, TandemSchedule((2, 1, 1), 3, 2, 5, "weights", 2)),
        ((2, 8, 3, 3, 16), 1, TandemSchedule((1, 1, 1), 1, 1, 1, "rows", 2)),
    ],
)
def test_means_are_written_beside_what_they_are_the_means_of(sizes, step, schedule, bias):
    tandem = tandem_of(sizes, 3, step, 1, bias=bias)
    chip = load_chip("Ascend310P3")
    x, one, two, b1, b2 = operands(tandem, np.random.default_rng(7))
    _, wanted = run(tandem, schedule, chip, 7)
    launch = tandem_launch(replace(tandem, means=True), chip, schedule)
    tensors = pack_conv(tandem.point, x, one) | {"depth_weight": pack_weights(tandem.depth, two)}
    tensors |= (
        {"b1": pack_bias(tandem.point, b1), "b2": pack_bias(tandem.depth, b2)} if bias else {}
    )
    got = run_checked(launch, tensors | {"ones": diagonal()}, chip, seed=1)
    np.testing.assert_array_equal(unpack_conv(tandem.depth, got, dense=True), wanted)
    means = got["means"].reshape(sizes[0], -1)[:, : sizes[4]]
    np.testing.assert_allclose(means, wanted.mean(axis=(2, 3)), rtol=2**-10, atol=2**-20)


def test_the_first_of_the_ranking_is_near_the_quickest():
    tandem = tandem_of((2, 32, 14, 14, 192), 3, 2, 1, bias=True)
    cycles = []
    for schedule in ranked(tandem, A910):
        try:
            cycles.append(
                simulate_kernel(as_kernel(tandem_launch(tandem, A910, schedule)), A910).cycles
            )
        except CapacityError:
            continue
    assert len(cycles) > 60
    assert min(cycles[:TIMED]) <= 1.15 * min(cycles)


def test_what_lies_between_never_goes_to_memory():
    tandem = tandem_of((4, 32, 28, 28, 192), 3, 1, 1)
    launch = next(tandem_launches(tandem, A910))
    moved = simulate_kernel(as_kernel(launch), A910).path_bytes
    written = sum(size for (_, to), size in moved.items() if to == "GM")
    assert written == 4 * 192 * 28 * 28 * 2


def first_of(tandem, chip=A910):
    """The first launch that is tried."""
    return next(tandem_launches(tandem, chip))


def divided(**changes):
    schedule = replace(TandemSchedule((1, 1, 1), 1, 1, 1, "rows"), **changes)
    return tandem_launch(tandem_of((1, 16, 40, 8, 32), 3, 1, 1), A910, schedule)


def test_what_is_refused_says_what_is_needed():
    tandem = tandem_of((1, 16, 8, 8, 32), 3, 1, 1)
    wide_after = replace(tandem.after_point, out_dtype="fp32")
    means = replace(tandem_of((2, 16, 9, 9, 32), 3, 1, 1), means=True)
    rows = TandemSchedule((1, 1, 2), 1, 1, 1, "rows")
    others = {
        "3x3 in front": replace(tandem, point=replace(tandem.point, r=3, s=3, pad=1)),
        "dense behind": replace(tandem, depth=replace(tandem.depth, groups=1)),
        "another image": replace(tandem, depth=replace(tandem.depth, h=9)),
        "fp32 between": replace(tandem, after_point=wide_after),
        "rows of 4000 pixels": tandem_of((1, 512, 3, 4000, 16), 3, 1, 1),
        "means on few flags": means,
    }
    calls = {name: partial(first_of, other) for name, other in others.items()}
    calls |= {
        "separate cores": partial(first_of, tandem, load_chip("Ascend910B2")),
        "means of half an image": partial(tandem_launch, means, load_chip("Ascend310P3"), rows),
        "more channels than there are": partial(divided, grid=(3, 1, 1)),
        "more cores than there are": partial(divided, grid=(2, 1, 17)),
        "a tile of nothing": partial(divided, tile=0),
        "no band": partial(divided, bands=0),
        "a row that stays": partial(divided, resident="row"),
        "more images than there are": partial(divided, images=2),
    }
    assert_messages("cube", "test_tandem", calls)


# -- in a network ---------------------------------------------------------------------------------
def blocks(*, last="silu", size=(2, 16, 14, 14), wide=96, taps=3, step=1):
    """Two inverted residual blocks, biases and functions behind each convolution."""
    net = GraphBuilder("blocks", "fp16")
    x = net.relu(net.input("x", size))
    for at in range(2):
        skip = x
        c = size[1]
        y = net.conv2d(x, net.weight((wide, c, 1, 1)), net.weight((wide,), scale=1.0))
        y = net.relu6(y, name=f"wide{at}")
        own = net.weight((wide, 1, taps, taps)), net.weight((wide,), scale=1.0)
        stride = step if at else 1
        y = net.conv2d(y, *own, stride=stride, pad=taps // 2, groups=wide, name=f"each{at}")
        y = getattr(net, last)(y)
        x = net.conv2d(y, net.weight((c, wide, 1, 1)))
        x = net.add(x, skip) if stride == 1 else x
    net.output(x)
    return net.build()
