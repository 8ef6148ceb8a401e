"""The checks and figures of chapter 16, and what its prose claims."""

import numpy as np

from ascend_lab.lab.figures import fig_online_softmax
from ascend_lab.lab.figures.flash import flash_traffic, separate_traffic
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators.kernels.flash_shape import FlashShape

A910 = load_chip("Ascend910A")
HEAD = FlashShape(1, 4096, 4096, 64, 64, 0.125)


# -- figures ---------------------------------------------------------------------------------------
def test_the_toy_ends_with_the_softmax():
    scores = np.array([1.0, 3.0, 2.0, 5.0])
    weights = np.exp(scores) / np.exp(scores).sum()
    for block in (1, 2, 3, 4):
        alt = fig_online_softmax(scores, block).alt_text
        assert ", ".join(f"{w:.3f}" for w in weights) in alt
    assert "m 3, l 1.135, factor 0.000; m 5, l 1.203, factor 0.135" in fig_online_softmax().alt_text


# -- claims ----------------------------------------------------------------------------------------
def test_bytes_and_cycles_of_the_introduction():
    apart = separate_traffic(HEAD, A910)
    flash = flash_traffic(HEAD, A910)
    least = 4 * 2 * 4096 * 64
    assert least * 16 == 2 * 4096 * 4096
    assert apart.gm_bytes > 200 * least
    assert apart.cycles > 2.5 * flash.cycles
    # the first core's keys and values come from device memory, all other reads from L2
    assert flash.memory_bytes == 3 * least // 4
