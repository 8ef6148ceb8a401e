"""A pointwise and a depthwise convolution as one kernel: values, bands, tiles, refusals."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ascend_lab.chip import load_chip
from ascend_lab.errors import CapacityError, UnsupportedError
from ascend_lab.isa import as_kernel, sanitize
from ascend_lab.kernels import ConvShape
from ascend_lab.kernels.chain import chain_launch
from ascend_lab.kernels.chain_schedules import TIMED, chain_launches, ranked
from ascend_lab.kernels.chain_shape import Chain, ChainSchedule
from ascend_lab.kernels.conv_shape import pack_conv, pack_weights, unpack_conv
from ascend_lab.kernels.conv_stage import pack_bias
from ascend_lab.kernels.epilogue import Epilogue, Step
from ascend_lab.lab.kernels import conv2d_reference
from ascend_lab.sim import execute, simulate_kernel

A910 = load_chip("Ascend910A")


def chain_of(sizes, taps, step, pad, *, bias=False):
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
    return Chain(point, depth, *after)


def operands(chain, rng):
    """Small whole numbers, whose sums fp16 holds: image, both weights, both biases."""
    point, depth = chain.point, chain.depth
    shapes = [(point.n, point.c, point.h, point.w), (point.k, point.c, 1, 1)]
    shapes += [(depth.k, 1, depth.r, depth.s), (point.k,), (depth.k,)]
    return [rng.integers(-2, 3, shape).astype(np.float16) for shape in shapes]


def run(chain, schedule, chip, seed=0):
    """Return what the kernel writes, what NumPy says, and the launch."""
    x, one, two, b1, b2 = operands(chain, np.random.default_rng(seed))
    launch = chain_launch(chain, chip, schedule)
    tensors = pack_conv(chain.point, x, one) | {"depth_weight": pack_weights(chain.depth, two)}
    biased = bool(chain.after_point.bias)
    if biased:
        tensors |= {"b1": pack_bias(chain.point, b1), "b2": pack_bias(chain.depth, b2)}
    got = unpack_conv(chain.depth, execute(as_kernel(launch), tensors, chip, seed=seed), dense=True)
    wide = [a.astype(np.float64) for a in (x, one, two, b1 * biased, b2 * biased)]
    between = conv2d_reference(wide[0], wide[1]) + wide[3][:, None, None]
    depth = chain.depth
    full = np.zeros((depth.k, depth.k, depth.r, depth.s))
    full[np.arange(depth.k), np.arange(depth.k)] = wide[2][:, 0]
    sums = conv2d_reference(between.clip(0, 6), full, stride=depth.stride, pad=depth.pad)
    return got, (sums + wide[4][:, None, None]).clip(0, 6), launch


SIZES = st.tuples(*(st.integers(1, top) for top in (3, 40, 12, 12, 70)))


@settings(max_examples=40)
@given(
    SIZES, st.sampled_from((1, 3, 5)), st.integers(1, 2), st.booleans(),
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 4)), st.integers(1, 3),
    st.integers(1, 4), st.integers(1, 5), st.sampled_from(("rows", "weights")),
    st.sampled_from(("Ascend910A", "Ascend310", "Ascend310P3")), st.integers(0, 99),
)  # fmt: skip
@example((2, 24, 9, 11, 96), 3, 2, True, (3, 1, 2), 2, 2, 1, "weights", "Ascend910A", 0)
@example((1, 16, 7, 7, 160), 5, 1, True, (2, 1, 1), 1, 2, 4, "rows", "Ascend310", 1)
@example((3, 40, 12, 5, 33), 3, 1, False, (1, 2, 4), 1, 1, 1, "rows", "Ascend910A", 2)
def test_values_equal_numpy_however_it_is_divided(
    sizes, taps, step, bias, grid, bands, blocks, tile, stay, name, seed
):
    assume(min(sizes[2:4]) + 2 * (taps // 2) >= taps)
    chain, chip = chain_of(sizes, taps, step, taps // 2, bias=bias), load_chip(name)
    assume(np.prod(grid) <= chip.core_count)
    assume(blocks * (taps**2 + 1) <= 64)  # of L0B
    got, wanted, launch = run(chain, ChainSchedule(grid, bands, blocks, tile, stay), chip, seed)
    np.testing.assert_array_equal(got, wanted)
    assert sanitize(launch, chip) == []


def test_every_ranked_way_of_a_block_computes_the_same():
    chain = chain_of((2, 24, 14, 14, 96), 3, 1, 1, bias=True)
    for schedule in ranked(chain, A910)[::17]:
        try:
            got, wanted, _ = run(chain, schedule, A910)
        except CapacityError:
            continue
        np.testing.assert_array_equal(got, wanted)


def test_the_first_of_the_ranking_is_near_the_quickest():
    chain = chain_of((4, 32, 28, 28, 192), 3, 2, 1, bias=True)
    cycles = []
    for schedule in ranked(chain, A910)[:120]:
        try:
            cycles.append(
                simulate_kernel(as_kernel(chain_launch(chain, A910, schedule)), A910).cycles
            )
        except CapacityError:
            continue
    assert min(cycles[:TIMED]) <= 1.15 * min(cycles)


def test_what_lies_between_never_goes_to_memory():
    chain = chain_of((4, 32, 28, 28, 192), 3, 1, 1)
    launch = next(chain_launches(chain, A910))
    moved = simulate_kernel(as_kernel(launch), A910).path_bytes
    written = sum(size for (_, to), size in moved.items() if to == "GM")
    assert written == 4 * 192 * 28 * 28 * 2


def test_what_is_no_chain_is_refused():
    chain = chain_of((1, 16, 8, 8, 32), 3, 1, 1)
    wrong = [
        replace(chain, point=replace(chain.point, r=3, s=3, pad=1)),
        replace(chain, depth=replace(chain.depth, groups=1)),
        replace(chain, depth=replace(chain.depth, h=9)),
        replace(chain, after_point=replace(chain.after_point, out_dtype="fp32")),
    ]
    for other in wrong:
        with pytest.raises(UnsupportedError, match="1x1 convolution"):
            next(chain_launches(other, A910))
    with pytest.raises(UnsupportedError, match="Ascend910B2"):
        next(chain_launches(chain, load_chip("Ascend910B2")))


def test_rows_that_do_not_fit_l1_are_refused():
    chain = chain_of((1, 512, 3, 4000, 16), 3, 1, 1)
    with pytest.raises(CapacityError, match="a row of 32 channel blocks in L1"):
        list(chain_launches(chain, A910))
