"""Two convolutions that are added are one kernel; a stride's other rows are not loaded."""

from dataclasses import replace

import numpy as np
import pytest
from cube_checks import CHIPS, run_checked
from hypothesis import example, given, strategies as st

from ascend_lab.errors import InputError
from ascend_lab.lab.kernels import conv2d_reference
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators.kernels import (
    ConvShape,
    conv_launch,
    conv_schedule,
    dense_placement,
    pack_conv,
    unpack_conv,
)
from ascend_lab.operators.kernels.conv_shape import stacked, thinned


def small(rng, *shape):
    """Whole numbers whose sums fp16 holds."""
    return rng.integers(-2, 3, shape).astype(np.float16)


def both(chip, step, taps, sizes, k, seed, window=""):
    """Check the kernel of two convolutions on small numbers."""
    (n, c, d, h, w) = sizes
    rng = np.random.default_rng(seed)
    whole = ConvShape(n, d, (h - 1) * step + 1, w * step, k, 1, 1, step)
    shape = ConvShape(n, c, h, w, k, taps, taps, 1, taps // 2)
    images = small(rng, n, c, h, w), small(rng, n, d, whole.h, whole.w)
    weights = small(rng, k, c, taps, taps), small(rng, k, d, 1, 1)
    joint = replace(shape, beside=thinned(whole))
    dense = window == "stacked" and stacked(joint) != joint
    schedule = replace(conv_schedule(stacked(joint), chip), window=window) if dense else None
    place = dense_placement(joint) if dense else None
    launch = conv_launch(joint, chip, schedule, place)
    other = pack_conv(whole, images[1], weights[1])
    packed = pack_conv(shape, images[0], weights[0])
    packed |= {"beside": other["x"], "beside_weight": other["weight"]}
    got = unpack_conv(shape, run_checked(launch, packed, chip, seed=seed), dense=dense)
    wide = [a.astype(np.float64) for a in (*images, *weights)]
    own = conv2d_reference(wide[0], wide[2], pad=taps // 2)
    np.testing.assert_array_equal(got, own + conv2d_reference(wide[1], wide[3], stride=step))


SIZES = st.tuples(*(st.integers(1, top) for top in (3, 50, 50, 9, 20)))


@given(
    st.sampled_from(CHIPS), st.integers(1, 3), st.sampled_from((1, 3)), SIZES,
    st.integers(1, 70), st.integers(0, 99), st.sampled_from(("", "stacked")),
)  # fmt: skip
@example("Ascend310", 2, 3, (1, 256, 64, 7, 7), 64, 0, "")
@example("Ascend310", 2, 1, (8, 64, 128, 7, 7), 64, 0, "stacked")
@example("Ascend910A", 2, 1, (2, 128, 512, 7, 9), 96, 0, "")
@example("Ascend910B2", 1, 3, (4, 32, 48, 5, 7), 33, 0, "stacked")
@example("Toy", 1, 1, (1, 48, 16, 3, 40), 16, 0, "")
def test_sums_of_two_images_equal_numpy(chip_name, step, taps, sizes, k, seed, window):
    both(load_chip(chip_name), step, taps, sizes, k, seed, window)


def test_what_cannot_be_beside_is_refused():
    shape = ConvShape(1, 16, 8, 8, 16, 1, 1)
    one = ConvShape(1, 32, 8, 8, 16, 1, 1)
    for other in (replace(one, r=3, pad=1), replace(one, k=32), replace(one, h=16, stride=(2, 1))):
        with pytest.raises(InputError, match="one tap each"):
            replace(shape, beside=other)


def test_a_stride_loads_only_its_rows():
    whole = ConvShape(2, 32, 15, 14, 32, 1, 1, 2)
    thin = thinned(whole)
    assert (thin.h, thin.strides, thin.stored, thin.out_hw) == (8, (1, 2), (15, 2), whole.out_hw)
    assert thinned(replace(whole, pad=1)) == replace(whole, pad=1)
