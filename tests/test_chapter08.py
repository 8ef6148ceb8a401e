"""The figures of the convolution chapter, its three coded exercises, and what its text claims."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from two_sided import two_sided

from ascend_lab.chip import load_chip
from ascend_lab.errors import InputError
from ascend_lab.kernels import ConvShape, conv_launch
from ascend_lab.lab.checks import check_ex_08_2, check_ex_08_3, check_ex_08_4
from ascend_lab.lab.checks.chapter08_09 import addresses, folded
from ascend_lab.lab.figures.conv import (
    copies_of,
    fig_windows,
    matrix_sizes,
)
from ascend_lab.lab.kernels import (
    conv2d_reference,
    explicit_conv,
    im2col_launch,
    im2col_reference,
)
from ascend_lab.sim import execute, simulate, simulate_kernel

CHIP = load_chip("Ascend910A")
LAYER = ConvShape(2, 32, 14, 14, 32, 3, 3, pad=1)


# --- figures --------------------------------------------------------------------------------------


def test_copies_are_counted_by_hand() -> None:
    matrix, copies = copies_of(ConvShape(1, 1, 3, 3, 1, 2, 2))
    assert matrix.tolist() == [[1, 2, 4, 5], [2, 3, 5, 6], [4, 5, 7, 8], [5, 6, 8, 9]]
    assert copies.tolist() == [0, 1, 2, 1, 2, 4, 2, 1, 2, 1]


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


def address(m: Any, k: Any, image: Any, kernel: Any, stride: Any, pad: int, dilation: Any) -> Any:
    _, h, w, c0 = image
    ow = (w + 2 * pad - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    tap, channel = k // c0, k % c0
    block, tap = tap // (kernel[0] * kernel[1]), tap % (kernel[0] * kernel[1])
    row = m // ow * stride[0] + tap // kernel[1] * dilation[0] - pad
    column = m % ow * stride[1] + tap % kernel[1] * dilation[1] - pad
    inside = (row >= 0) & (row < h) & (column >= 0) & (column < w)
    return np.where(inside, ((block * h + row) * w + column) * c0 + channel, -1)


def test_addresses_two_sided() -> None:
    """Without pads, without dilation, without a word for what lies outside."""
    two_sided(
        check_ex_08_2,
        address,
        lambda *_: None,
        lambda m, *_: m * 0,
        lambda *given: address(*given[:5], 0, given[6]),
        lambda *given: address(*given[:6], (1, 1)),
        lambda *given: abs(address(*given)),
    )


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


B = np.array([[1, 0, 0, 0], [0, 1, -1, 1], [-1, 1, 1, 0], [0, 0, 0, -1]])
G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
A = np.array([[1, 0], [1, 1], [1, -1], [0, -1]])


def winograd(image: Any, weights: Any, multiply: Any) -> Any:
    (k, _c, *_), (_, h, w) = weights.shape, image.shape
    y = np.zeros((k, h + h % 2, w + w % 2))
    padded = np.pad(image, ((0, 0), (1, 1 + h % 2), (1, 1 + w % 2)))
    for i in range(0, h, 2):
        for j in range(0, w, 2):
            tile = (B.T @ padded[:, i : i + 4, j : j + 4] @ B).transpose(1, 2, 0)
            kernels = (G @ weights @ G.T).transpose(2, 3, 1, 0)
            product = multiply(tile[:, :, None], kernels)[:, :, 0].transpose(2, 0, 1)
            y[:, i : i + 2, j : j + 2] = A.T @ product @ A
    return y[:, :h, :w]


def test_sixteen_products_a_square_are_asked_for() -> None:
    def direct(image: Any, weights: Any, multiply: Any) -> Any:
        _c, h, w = image.shape
        rows = im2col_reference(image[None], (3, 3), 1, 1)
        return multiply(rows, weights.reshape(len(weights), -1).T).T.reshape(-1, h, w)

    slow = check_ex_08_3(direct)
    assert not slow
    assert "with 36 products" in slow.message
    two_sided(
        check_ex_08_3,
        winograd,
        lambda image, weights, multiply: conv2d_reference(image[None], weights, pad=1)[0],
        lambda image, weights, multiply: 2 * winograd(image, weights, multiply),
        lambda image, weights, multiply: None,
    )


def fold(weight: Any) -> Any:
    k, c, r, s = weight.shape
    even = np.pad(weight, ((0, 0), (0, 0), (0, r % 2), (0, s % 2)))
    parts = even.reshape(k, c, (r + 1) // 2, 2, (s + 1) // 2, 2)
    return parts.transpose(0, 3, 5, 1, 2, 4).reshape(k, 4 * c, (r + 1) // 2, (s + 1) // 2)


def test_folded_weights_pass_and_unfolded_ones_fail() -> None:
    twice, turned = (lambda w: 2 * fold(w)), (lambda w: fold(w)[:, ::-1])
    two_sided(check_ex_08_4, fold, lambda w: w, twice, turned, lambda w: None)


def test_folding_an_image_moves_parities_into_channels() -> None:
    x = np.arange(16).reshape(1, 1, 4, 4)
    got = folded(x)
    assert got.shape == (1, 4, 2, 2)
    assert got[0, :, 0, 0].tolist() == [0, 1, 4, 5]
    assert got[0, :, 1, 1].tolist() == [10, 11, 14, 15]


# --- claims of the text ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Ascend310", "Ascend910A", "Ascend910B2"])
def test_what_the_chapter_says_holds_on_the_chips_it_names(name: str) -> None:
    chip = load_chip(name)

    def cycles(shape: ConvShape) -> int:
        return simulate(conv_launch(shape, chip), chip).cycles

    dense = ConvShape(8, 256, 28, 28, 256, 3, 3, pad=1)
    depthwise = replace(dense, groups=256)
    assert cycles(dense) / cycles(depthwise) < 16
    share = depthwise.ops / cycles(depthwise) * chip.clock_hz / chip.peak_ops_per_s("fp16")
    assert share < 1 / 16
    stem, small = ConvShape(8, 3, 224, 224, 64, 7, 7, 2, 3), ConvShape(8, 12, 115, 115, 64, 4, 4)
    assert stem.out_hw == small.out_hw
    assert cycles(stem) > 2 * cycles(small)
