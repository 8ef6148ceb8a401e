"""The figures of the convolution chapter, its three coded exercises, and what its text claims."""

from typing import Any

import numpy as np
import pytest

from ascend_lab.errors import InputError
from ascend_lab.lab.checks.chapter07_08 import addresses
from ascend_lab.lab.figures import fig_windows
from ascend_lab.lab.figures.layouts import matrix_sizes
from ascend_lab.lab.kernels import explicit_conv, im2col_launch
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import execute, simulate_kernel
from ascend_lab.operators.kernels import ConvShape

CHIP = load_chip("Ascend910A")


# --- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_sizes_add_up_to_what_the_kernel_stores(pad: int, stride: int, dtype: str) -> None:
    shape = ConvShape(1, 20, 9, 11, 16, 3, 2, stride, pad, dtype)
    sizes = matrix_sizes(shape)
    assert sizes["pixels"] == 20 * 9 * 11
    assert sizes["pixels"] + sizes["blocks"] == 32 * 9 * 11
    write = simulate_kernel(explicit_conv(shape, CHIP), CHIP).phases[0]
    oh, ow = shape.out_hw
    rows = -(-oh * ow // 16) * 16
    names = ("distinct", "copies", "padding", "fractals")
    assert sum(sizes[n] for n in names) == rows * 32 * 6
    item = 2 if dtype == "fp16" else 1
    assert write.path_bytes["UB", "GM"] == oh * ow * 32 * 6 * item
    assert (sizes["padding"] > 0) == (pad > 0)


def test_the_window_figure_answers_to_every_slider() -> None:
    texts = {fig_windows().alt_text}
    changes: list[dict[str, Any]] = [
        {"side": 8}, {"kernel": 2}, {"stride": 2}, {"pad": 2}, {"dilation": 2}, {"channels": 3}
    ]  # fmt: skip
    for change in changes:
        texts.add(fig_windows(**change).alt_text)
    assert len(texts) == 7
    assert not list(fig_windows(side=40, kernel=5).axes[0].texts)
    with pytest.raises(InputError, match="padded image 3x3; got 7x7"):
        fig_windows(side=3, kernel=7)


# --- exercises ------------------------------------------------------------------------------------
def test_addresses_are_those_of_the_kernels() -> None:
    """The matrix that the im2col kernel writes, from an image of its own addresses."""
    shape = ConvShape(1, 32, 4, 5, 16, 3, 2, (1, 2), 1, dilation=(1, 2))
    x = np.arange(1, 641, dtype=np.float16)
    a = execute(im2col_launch(shape, CHIP), {"x": x}, CHIP)["a"]
    pixels = shape.out_hw[0] * shape.out_hw[1]
    m, column = np.divmod(np.arange(pixels * 192), 192)
    picked = addresses(m, column, (2, 4, 5, 16), (3, 2), (1, 2), 1, (1, 2))
    stored = a.reshape(12, -1, 16)[column // 16, m, column % 16]
    np.testing.assert_array_equal(picked, stored.astype(int) - 1)
    assert (picked == -1).any()
